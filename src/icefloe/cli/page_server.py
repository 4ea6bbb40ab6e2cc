"""`page-server`: stock CRIU restores lazily, from here or from another machine."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import click

from icefloe.cli import output
from icefloe.cli.context import Context
from icefloe.errors import CriuFailed, ExportExists, UsageError

if TYPE_CHECKING:
    from socket import socket

    from icefloe.capture.directory import CriuFiles

# The first CRIU whose headers have 32 bytes instead of 24.
_LONG_HEADERS = (4, 2)

_path = click.Path(path_type=Path)


@click.command("page-server")
@click.argument("name")
@click.option(
    "--listen",
    "place",
    default="127.0.0.1:27277",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; port 0 picks a free one.",
)
@click.option(
    "--files",
    type=_path,
    metavar="DIR",
    help="Write there what CRIU needs on the other side besides the pages.",
)
@click.option(
    "--header",
    type=click.Choice(["24", "32"]),
    help="Bytes of a header: 24 up to CRIU 4.1, 32 from 4.2 on. Else as the CRIU here has it.",
)
@click.option("--tls-cert", type=_path, metavar="FILE", help="This server's certificate.")
@click.option("--tls-key", type=_path, metavar="FILE", help="The key of it.")
@click.option("--tls-ca", type=_path, metavar="FILE", help="Who signs the clients' certificates.")
@click.option("--insecure", is_flag=True, help="Let anybody in the network read the memory.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
@click.pass_obj
def page_server(
    context: Context,
    name: str,
    place: str,
    files: Path | None,
    header: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Serve the memory of an image to `criu lazy-pages`.

    On the other side, with DIR as --files wrote it: `criu lazy-pages --page-server --address HOST
    --port PORT -D DIR -W DIR`, and then `criu restore --lazy-pages -D DIR -W DIR`. Any number of
    restores at a time. Ends when it is interrupted or terminated.
    """
    from icefloe import allocator
    from icefloe.capture.blocks import StoreSource
    from icefloe.capture.directory import files_for_criu
    from icefloe.capture.memory import load_memories
    from icefloe.capture.page_server import PageServer, tls_context
    from icefloe.capture.stored import StoredImage
    from icefloe.ids import parse_reference

    reference, (host, port) = parse_reference(name), _host_and_port(place)
    given = [file for file in (tls_cert, tls_key, tls_ca) if file is not None]
    if len(given) not in (0, 3):
        raise UsageError("TLS needs all of --tls-cert, --tls-key and --tls-ca", "name all three")
    tls = tls_context(*given) if given else None
    config = context.config()
    length = int(header) if header else _header_of(config.criu)
    allocator.keep_freed()
    with context.open() as store, _listen(host, port, insecure or bool(given)) as listener:
        manifest = store.manifest(store.catalog.resolve(reference))
        image = StoredImage(manifest, StoreSource(store, manifest))
        memories = load_memories(image)
        if files is not None:
            _write(files_for_criu(image, memories, lazy=True), files, config.workers)
        server = PageServer(image, memories, listener, header=length, log=_log, tls=tls)
        with _until_told() as ended, server:
            if as_json:
                written = None if files is None else str(files)
                output.print_json({"listen": server.address, "files": written})
            else:
                click.echo(f"listening on {server.address}")
            sys.stdout.flush()
            ended.wait()


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address", "write HOST:PORT, or [HOST]:PORT for IPv6")
    return host, int(port)


def _listen(host: str, port: int, anywhere: bool) -> "socket":
    """A listening socket. Unless `anywhere`, only loopback will do."""
    import socket
    from ipaddress import ip_address

    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        if not anywhere and not ip_address(address[0]).is_loopback:
            raise UsageError(
                f"others can reach {host}, and whoever asks there gets a process's memory",
                "use --tls-cert, --tls-key and --tls-ca, or --insecure in a network you trust",
            )
        return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"cannot listen on {host}:{port} ({error})", "name another address with --listen"
        ) from None


def _header_of(program: str) -> int:
    """What the CRIU of this machine speaks; what current ones do when there is none."""
    from icefloe.capture.criu import find_criu

    try:
        return 32 if find_criu(program).version >= _LONG_HEADERS else 24
    except CriuFailed:
        return 32


@contextmanager
def _until_told() -> Iterator[Event]:
    """Set when the command is to end."""
    ended = Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: ended.set()) for number in numbers]
    try:
        yield ended
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _log(line: str) -> None:
    with suppress(OSError):  # nobody may be listening, and clients are served all the same
        click.echo(f"icefloe: {output.printable(' '.join(line.split()))}", err=True)


def _write(files: "CriuFiles", folder: Path, workers: int) -> None:
    """Into a new or empty folder, which is as it was when this fails."""
    from icefloe import durable

    with durable.write_errors(folder):
        existed = folder.exists()
        if existed and (not folder.is_dir() or any(folder.iterdir())):
            raise ExportExists(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            files.write(folder, workers)
        except BaseException:
            for path in folder.iterdir():
                path.unlink()
            if not existed:
                folder.rmdir()
            raise
