"""Stock CRIU restores from `icefloe page-server`, with all of the memory, as often as it likes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from criu_tool import Criu, CriuFailed, dump, end_of
from matrix import every_kind, one_criu
from processes import wait_until
from restores import (
    RSEQ_BYTES,
    command,
    differing_bytes,
    environment,
    memory_of,
    state_of,
    threads_of,
)
from stores import add
from workloads import Heap, Toucher, Workload

RESTORES = 2
START_SECONDS = 20.0
DRAIN_SECONDS = 60.0
END_SECONDS = 5.0


@dataclass(frozen=True)
class Served:
    """A running page server, and what CRIU needs of it."""

    process: subprocess.Popen[str]
    port: int
    files: Path


@contextmanager
def page_server(
    criu: Criu, store: Path, files: Path, *args: str | Path, complaint: str = ""
) -> Iterator[Served]:
    """`icefloe page-server`; ends with a signal, at once, and says nothing but the complaint."""
    process = subprocess.Popen(
        command(store, "page-server", "worker", "--json", "--files", files)
        + ["--listen", "127.0.0.1:0", *map(str, args)],
        env=environment(criu),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        answer = said_by(process)
        yield Served(process, int(answer["listen"].rpartition(":")[2]), Path(answer["files"]))
        process.terminate()
        _, errors = process.communicate(timeout=END_SECONDS)
        assert process.returncode == 0 and complaint in errors, errors
        assert bool(complaint) == bool(errors), errors
    finally:
        process.kill()
        process.communicate()


def said_by(process: subprocess.Popen[str]) -> Any:
    """The JSON document that it prints once it listens."""
    assert process.stdout and process.stderr
    lines: list[str] = []
    while not lines or lines[-1] != "}\n":
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()
    return json.loads("".join(lines))


@contextmanager
def lazy_pages(
    criu: Criu, served: Served, folder: Path, *args: str | Path
) -> Iterator[subprocess.Popen[bytes]]:
    """CRIU's own daemon, waiting for a restore in `folder`; it is gone afterwards."""
    folder.mkdir()
    log = folder / "lazy-pages.log"
    place = ["--page-server", "--address", "127.0.0.1", "--port", str(served.port)]
    command: list[str | Path] = [criu.program, "lazy-pages", *place, "-v4", "-o", log]
    process = subprocess.Popen(
        [*command, "-D", served.files, "-W", folder, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            lambda: (folder / "lazy-pages.socket").exists() or process.poll() is not None,
            START_SECONDS,
            "lazy-pages.socket",
        )
        assert process.poll() is None, end_of(log)
        yield process
    finally:
        process.kill()
        process.wait()


def restore(criu: Criu, served: Served, folder: Path, workload: Workload, *args: str) -> None:
    """`criu restore --lazy-pages`, with the daemon that waits in `folder`."""
    workload.forget()
    log = folder / "restore.log"
    criu.run("restore", "-d", "--lazy-pages", "-D", served.files, "-W", folder, *args, log=log)


def drained(daemon: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits until the daemon has got every page, and said goodbye to the page server."""
    wait_until(lambda: daemon.poll() is not None, DRAIN_SECONDS, "the end of lazy-pages")
    assert daemon.returncode == 0, end_of(folder / "lazy-pages.log")


def stored(criu: Criu, workload: Workload, folder: Path) -> Path:
    """Lets the process run, dumps it and stores the dump as `worker`; returns the store."""
    workload.advance(2)
    dump(criu, workload, folder / "images")
    add(folder / "store", folder / "images", "worker")
    return folder / "store"


@every_kind()
def test_stock_criu_restores_again_and_again(
    criu: Criu, workload: Workload, tmp_path: Path
) -> None:
    store = stored(criu, workload, tmp_path)
    frozen = workload.frozen_state()
    with page_server(criu, store, tmp_path / "files") as served:
        for number in range(RESTORES):
            folder = tmp_path / f"restore-{number}"
            with lazy_pages(criu, served, folder) as daemon:
                restore(criu, served, folder, workload)
                workload.verify(frozen, workload.advance())
                drained(daemon, folder)
                workload.verify(frozen, workload.advance())
            workload.kill()


def test_memory_is_what_it_was_at_the_dump(criu: Criu, heap: Heap, tmp_path: Path) -> None:
    heap.advance()
    dump(criu, heap, tmp_path / "images", leave_running=True, extra=["--leave-stopped"])
    before, threads = memory_of(heap.pid), threads_of(heap.pid)
    heap.kill()
    add(tmp_path / "store", tmp_path / "images", "worker")
    folder = tmp_path / "restore"
    with (
        page_server(criu, tmp_path / "store", tmp_path / "files") as served,
        lazy_pages(criu, served, folder) as daemon,
    ):
        restore(criu, served, folder, heap, "--leave-stopped")
        wait_until(lambda: state_of(heap.pid) in ("T", "t"), START_SECONDS, "it to stop")
        drained(daemon, folder)
        assert differing_bytes(before, memory_of(heap.pid)) <= RSEQ_BYTES * threads


@one_criu
def test_damaged_memory_is_not_handed_out(criu: Criu, tmp_path: Path) -> None:
    """CRIU's daemon is cut off and fails; what it has restored by then is its own affair."""
    with Toucher(tmp_path / "workload") as toucher:
        store = stored(criu, toucher, tmp_path)
        files, folder = tmp_path / "files", tmp_path / "restore"
        with (
            page_server(criu, store, files, complaint="is corrupt") as served,
            lazy_pages(criu, served, folder) as daemon,
        ):
            for pack in (path for path in (store / "packs").rglob("*") if path.is_file()):
                pack.chmod(0o600)
                with pack.open("r+b") as file:
                    file.seek(pack.stat().st_size // 4)
                    file.write(bytes(pack.stat().st_size // 2))
            with suppress(CriuFailed):
                restore(criu, served, folder, toucher, "--leave-stopped")
            wait_until(lambda: daemon.poll() is not None, DRAIN_SECONDS, "lazy-pages to fail")
            assert daemon.returncode != 0
            assert "Remote side closed connection" in end_of(folder / "lazy-pages.log")


@one_criu
def test_over_tls(criu: Criu, tmp_path: Path) -> None:
    if b"gnutls_handshake" not in criu.program.read_bytes():
        pytest.skip(f"criu {criu.version} was built without TLS")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    for who in ("127.0.0.1", "client"):
        certificate = authority.issue_cert(who)
        certificate.private_key_pem.write_to_path(str(tmp_path / f"{who}.key"))
        certificate.cert_chain_pems[0].write_to_path(str(tmp_path / f"{who}.cert"))
    ours = [f"--tls-{kind}={tmp_path / '127.0.0.1'}.{kind}" for kind in ("cert", "key")]
    theirs = [f"--tls-{kind}={tmp_path / 'client'}.{kind}" for kind in ("cert", "key")]
    with Toucher(tmp_path / "workload") as toucher:
        store = stored(criu, toucher, tmp_path)
        frozen = toucher.frozen_state()
        files, folder = tmp_path / "files", tmp_path / "restore"
        with (
            page_server(criu, store, files, *ours, f"--tls-ca={tmp_path / 'ca'}") as served,
            lazy_pages(
                criu, served, folder, "--tls", f"--tls-cacert={tmp_path / 'ca'}", *theirs
            ) as daemon,
        ):
            restore(criu, served, folder, toucher)
            toucher.verify(frozen, toucher.advance(1))
            drained(daemon, folder)
            toucher.verify(frozen, toucher.advance(1))
