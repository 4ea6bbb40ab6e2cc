"""The page server, spoken to by hand as CRIU's lazy-pages daemon would, and as nobody should."""

import json
import os
import random
import re
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import small_store
import trustme
from chains import PE_LAZY, PE_PRESENT, WORD, Pagemap, Run, encoded, read_pagemap, write_pagemap
from chains import field as number_field
from endings import Ended, fails

from icefloe.capture import page_server
from icefloe.capture.blocks import StoreSource
from icefloe.capture.memory import load_memories
from icefloe.capture.page_server import PageServer, tls_context
from icefloe.capture.stored import StoredImage
from icefloe.catalog import LocalStore, open_store
from icefloe.cli import main
from icefloe.errors import StoreBusy
from icefloe.store.manifest import ZERO

PAGE = 4096
PATIENCE = 10.0
PRESENT_ADD_F, GET, CLOSE, FORCE_CLOSE = 4 << 16 | 6, 7, 0x1023, 0x1024
FORMATS = {24: "<IIQQ", 32: "<IIQQQ"}

# Two processes. The first has three areas; between the last two is a gap of one page.
ONE, TWO = 41, 4242
LONG, ZEROS, AFTER_GAP, HIGH = (
    0x400000,
    0x400000 + 600 * PAGE,
    0x400000 + 661 * PAGE,
    0x7FFD00000000,
)
MAP_PRIVATE_ANONYMOUS = 0x22


def noise(pages: int, seed: int) -> bytes:
    """Whole pages that nothing else equals."""
    return random.Random(seed).randbytes(pages * PAGE)


MEMORY = {
    ONE: {LONG: noise(600, 1) + bytes(60 * PAGE), AFTER_GAP: noise(3, 2)},
    TWO: {LONG: noise(1, 3) + noise(1, 4), HIGH: noise(90, 5) + noise(7, 2)},
}


def image_file(magic: int, *messages: bytes) -> bytes:
    """A file of CRIU's: two magics, then messages with their lengths."""
    bodies = b"".join(WORD.pack(len(body)) + body for body in messages)
    return WORD.pack(0x54564319) + WORD.pack(magic) + bodies


def nested(number: int, message: bytes) -> bytes:
    """A protobuf field that is a message."""
    return encoded(number << 3 | 2) + encoded(len(message)) + message


def area(start: int, length: int) -> bytes:
    """A private anonymous area of an mm file."""
    numbers = ((1, start), (2, start + length), (6, MAP_PRIVATE_ANONYMOUS), (7, 1))
    return nested(14, b"".join(number_field(*each) for each in numbers))


def write_checkpoint(folder: Path, tail: bytes = b"") -> None:
    """A directory that looks like CRIU's. `tail` is put behind each pages file."""
    tree = [number_field(1, pid) + number_field(2, 0) for pid in MEMORY]
    small_store.write_tree(
        folder,
        {
            "inventory.img": WORD.pack(0x58313116) + b"whatever",
            "pstree.img": image_file(0x50273030, *tree),
            "core-41.img": b"core",
        },
    )
    for pid, memory in MEMORY.items():
        areas = b"".join(area(start, len(content)) for start, content in memory.items())
        (folder / f"mm-{pid}.img").write_bytes(image_file(0x57492820, areas))
        runs = [
            Run(start, len(content) // PAGE, PE_LAZY | PE_PRESENT)
            for start, content in memory.items()
        ]
        magics = image_file(0x56084025)
        write_pagemap(folder / f"pagemap-{pid}.img", Pagemap(magics, pid, runs))
        (folder / f"pages-{pid}.img").write_bytes(b"".join(memory.values()) + tail)


def make_store(folder: Path, tail: bytes = b"") -> Path:
    """A store with the checkpoint as `worker`."""
    write_checkpoint(folder / "images", tail)
    with pytest.raises(SystemExit) as ended:
        main(["--store", str(folder / "store"), "add", str(folder / "images"), "worker", "--json"])
    assert ended.value.code == 0
    return folder / "store"


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that no test changes."""
    return make_store(tmp_path_factory.mktemp("page-server"))


@dataclass
class Served:
    """A running server, what it complains about, and how to connect."""

    server: PageServer
    header: int
    complaints: list[str] = field(default_factory=list)

    def raw(self) -> socket.socket:
        """A connection that says nothing by itself."""
        host, port = self.server.address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), PATIENCE)

    def client(self) -> "Client":
        """A client that speaks the protocol."""
        return Client(self.raw(), self.header)

    def wait_for(self, words: str) -> None:
        """Waits until there is a complaint with these words."""
        wait_until(lambda: any(words in line for line in self.complaints), f"{words!r}", self)


def wait_until(condition: Callable[[], bool], what: str, told: object = None) -> None:
    """Fails after a while."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"no {what} {told}"
        time.sleep(0.005)


class Client:
    """What CRIU's daemon does, in the same bytes."""

    def __init__(self, connection: socket.socket, header: int) -> None:
        self.connection = connection
        self._format = FORMATS[header]

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, command: int, pages: int, vaddr: int, pid: int) -> None:
        """One header. Padding needn't be zero."""
        padding = [0xDEADBEEF] if self._format == FORMATS[32] else []
        self.connection.sendall(struct.pack(self._format, command, *padding, pages, vaddr, pid))

    def ask(self, pid: int, vaddr: int, pages: int) -> bytes:
        """A request and its answer, which may be short."""
        self.send(GET, pages, vaddr, pid)
        return self.answer(pid, vaddr, pages)

    def answer(self, pid: int, vaddr: int, pages: int) -> bytes:
        """The next answer; it must be the one to this request."""
        header = self.receive(struct.calcsize(self._format))
        command, *_, got, at, whose = struct.unpack(self._format, header)
        assert (command, at, whose) == (PRESENT_ADD_F, vaddr, pid)
        assert 0 < got <= pages
        return self.receive(got * PAGE)

    def receive(self, length: int) -> bytes:
        """Exactly so many bytes."""
        content = bytearray()
        while len(content) < length:
            more = self.connection.recv(length - len(content))
            assert more, f"closed after {len(content)} of {length} bytes"
            content += more
        return bytes(content)

    def ended(self) -> bool:
        """Whether the server closes the connection, and sends nothing before."""
        try:
            return self.connection.recv(1) == b""
        except ConnectionResetError:
            return True

    def whole(self, pid: int, vaddr: int, length: int) -> bytes:
        """A range, as often as it takes."""
        content = b""
        while len(content) < length:
            rest = (length - len(content)) // PAGE
            content += self.ask(pid, vaddr + len(content), rest)
        return content


@contextmanager
def serving(
    store: LocalStore, header: int = 32, tls: ssl.SSLContext | None = None
) -> Iterator[Served]:
    """A server on a free port; ending it takes no time."""
    manifest = store.manifest(next(iter(store.catalog.names().values())))
    image = StoredImage(manifest, StoreSource(store, manifest))
    listener = socket.create_server(("127.0.0.1", 0))
    complaints: list[str] = []
    server = PageServer(
        image, load_memories(image), listener, header=header, log=complaints.append, tls=tls
    )
    with server:
        yield Served(server, header, complaints)
        started = time.monotonic()
    assert time.monotonic() - started < 2, "it was slow to end"
    wait_until(lambda: not {"pages", "accept"} & names_of_threads(), "end of threads")


def names_of_threads() -> set[str]:
    """Those that run."""
    return {thread.name for thread in threading.enumerate()}


@pytest.fixture(params=sorted(FORMATS))
def served(request: pytest.FixtureRequest, store_folder: Path) -> Iterator[Served]:
    """With headers of either size."""
    with open_store(store_folder, write=False) as store, serving(store, request.param) as running:
        yield running


@pytest.fixture
def one(store_folder: Path) -> Iterator[Served]:
    """With current headers."""
    with open_store(store_folder, write=False) as store, serving(store) as running:
        yield running


def memory_is_right(client: Client) -> None:
    """Every byte of every process."""
    for pid, memory in MEMORY.items():
        for start, content in memory.items():
            assert client.whole(pid, start, len(content)) == content


# --- what CRIU does -----------------------------------------------------------------------------


def test_all_memory(served: Served) -> None:
    """And CLOSE is answered with 0; then the server waits for the other side to close."""
    for command in (CLOSE, FORCE_CLOSE):
        with served.client() as client:
            memory_is_right(client)
            client.send(command, 0, 0, 0)
            assert client.receive(4) == bytes(4)
    assert served.complaints == []


def test_single_pages(served: Served) -> None:
    """As faults ask for them."""
    with served.client() as client:
        for page in random.Random(6).sample(range(660), 100):
            content = client.ask(ONE, LONG + page * PAGE, 1)
            assert content == MEMORY[ONE][LONG][page * PAGE :][:PAGE]
        assert client.ask(ONE, ZEROS, 1) == bytes(PAGE)
        assert client.ask(TWO, HIGH + 96 * PAGE, 1) == MEMORY[TWO][HIGH][-PAGE:]


def test_answers_come_in_order(served: Served) -> None:
    """However many requests stand in line."""
    rows = [(pid, start) for pid, memory in MEMORY.items() for start in memory] * 20
    with served.client() as client:
        for pid, start in rows:
            client.send(GET, 2, start, pid)
        for pid, start in rows:
            assert client.answer(pid, start, 2) == MEMORY[pid][start][: 2 * PAGE]


def test_long_requests_get_short_answers(one: Served) -> None:
    """A fault that comes meanwhile needn't wait for long; and no answer crosses a gap."""
    with one.client() as client:
        assert client.ask(ONE, LONG, 1024) == MEMORY[ONE][LONG][: 256 * PAGE]
        assert client.ask(ONE, LONG, 2**63) == MEMORY[ONE][LONG][: 256 * PAGE]
        assert client.ask(ONE, ZEROS + 50 * PAGE, 1024) == bytes(10 * PAGE)
        assert client.ask(ONE, AFTER_GAP, 4) == MEMORY[ONE][AFTER_GAP]


def test_many_clients_at_once(one: Served) -> None:
    """With few blocks kept, so that they get into each other's way."""
    failed: list[BaseException] = []

    def read_all() -> None:
        try:
            with one.client() as client:
                memory_is_right(client)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read_all) for _ in range(16)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_server, "_CACHED_BYTES", 300_000)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == [] and one.complaints == []


def test_blocks_that_end_within_pages(tmp_path: Path) -> None:
    """A pages file of an odd length is cut anywhere."""
    with open_store(make_store(tmp_path, b"odd"), write=False) as store, serving(store) as served:
        manifest = store.manifest(next(iter(store.catalog.names().values())))
        extents = manifest.extents[manifest.extents["block"] != ZERO]
        assert bool((extents["length"] % PAGE).any())
        with served.client() as client:
            memory_is_right(client)
            for page in range(660):
                content = client.ask(ONE, LONG + page * PAGE, 1)
                assert content == MEMORY[ONE][LONG][page * PAGE :][:PAGE]


# --- what nobody should do ----------------------------------------------------------------------

BAD_REQUESTS = {
    "no memory of process 43": (GET, 1, LONG, 43),
    "no memory of process 10497": (GET, 1, LONG, ONE << 8 | 1),
    "no page of process 41 at 0x0": (GET, 1, 0, ONE),
    f"no page of process 41 at {AFTER_GAP - PAGE:#x}": (GET, 1, AFTER_GAP - PAGE, ONE),
    "no page of process 41 at 0xfffffffffffff000": (GET, 9, 2**64 - PAGE, ONE),
    "no page of process 4242 at 0x7ffd00061000": (GET, 1, HIGH + 97 * PAGE, TWO),
    "0 pages": (GET, 0, LONG, ONE),
    "1 pages at 0x400001": (GET, 1, LONG + 1, ONE),
    "command 4": (4, 1, LONG, ONE << 8 | 1),
    "command 0": (0, 0, 0, 0),
    "command 65535": (0xFFFFFFFF, 1, LONG, ONE),
}


@pytest.mark.parametrize("said", BAD_REQUESTS)
def test_bad_requests(served: Served, said: str) -> None:
    """Close the connection with a word about it; what was asked before is answered."""
    with served.client() as other, served.client() as client:
        other.ask(ONE, LONG, 1)
        client.send(GET, 1, LONG, TWO)
        client.send(*BAD_REQUESTS[said])
        assert client.answer(TWO, LONG, 1) == MEMORY[TWO][LONG][:PAGE]
        assert client.ended()
        (line,) = served.complaints
        assert said in line and line.startswith("127.0.0.1:")
        memory_is_right(other)


def test_headers_of_another_length(one: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older CRIU would wait for ever, and nobody would know why."""
    monkeypatch.setattr(page_server, "_PART_SECONDS", 0.2)
    with Client(one.raw(), 24) as client:
        client.send(GET, 1, LONG, ONE)
        assert client.ended()
    one.wait_for("it sent 24 bytes of a header; 32-byte headers are those of CRIU from 4.2 on")


def test_garbage(served: Served) -> None:
    """Random bytes, and connections that break off anywhere."""
    chance = random.Random(7)
    for length in [0, 1, 23, 31, 33, 100, *(chance.randrange(5000) for _ in range(30))]:
        with served.raw() as connection:
            connection.sendall(chance.randbytes(length))
            if chance.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with served.client() as client:
        memory_is_right(client)
    assert not [line for line in served.complaints if "unexpected" in line]


def test_who_does_not_read_blocks_nobody(one: Served) -> None:
    """Nor does who says nothing, or half of a header."""
    with ExitStack() as stack:
        for _ in range(5):
            greedy = stack.enter_context(one.client())
            for _ in range(100):
                greedy.send(GET, 256, LONG, ONE)
            stack.enter_context(one.raw())
            stack.enter_context(one.raw()).sendall(b"half")
        memory_is_right(stack.enter_context(one.client()))
        started = time.monotonic()
        one.server.close()
        assert time.monotonic() - started < 1
    assert one.complaints == []


def test_there_is_a_limit_to_clients(one: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has asked for something stays; who never does has to go in the end."""
    monkeypatch.setattr(page_server, "MAX_CLIENTS", 3)
    with one.client() as first, one.client() as silent, one.client() as second:
        for client in (first, second):
            client.ask(ONE, LONG, 1)
        with one.client() as refused:
            assert refused.ended()
        one.wait_for("refused (3 clients are connected)")
        monkeypatch.setattr(page_server, "_SILENT_SECONDS", 0.0)
        with one.client() as late:
            memory_is_right(late)
            assert silent.ended()
        one.wait_for("never asked")
        for client in (first, second):
            memory_is_right(client)


def test_a_corrupt_block(tmp_path: Path) -> None:
    """No byte of it goes out; the others do."""
    folder = make_store(tmp_path)
    with open_store(folder, write=False) as store:
        manifest = store.manifest(next(iter(store.catalog.names().values())))
        names = [file.path for file in manifest.files]
        bad = int(manifest.extents_of(names.index(f"pages-{ONE}.img"))["block"][0])
        (where,) = store.catalog.locations([manifest.block_ids()[bad]])
        pack = store.layout.pack(where.pack)
        content = bytearray(pack.read_bytes())
        content[where.offset + where.stored // 2] ^= 1
        pack.chmod(0o600)
        pack.write_bytes(content)
        with serving(store) as served, served.client() as other:
            for _ in range(2):
                with served.client() as client:
                    client.send(GET, 1, LONG, ONE)
                    assert client.ended()
            served.wait_for(f"block {where.id.hex()}")
            assert other.ask(ONE, AFTER_GAP, 3) == MEMORY[ONE][AFTER_GAP]


# --- TLS ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trust:
    """PEM files of a server, and contexts of clients."""

    authority: Path
    certificate: Path
    key: Path
    known: ssl.SSLContext
    stranger: ssl.SSLContext
    nobody: ssl.SSLContext


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Trust:
    """A client with a certificate of the authority, one with another's, and one without."""
    folder = tmp_path_factory.mktemp("pem")
    ours, theirs = trustme.CA(), trustme.CA()
    mine = ours.issue_cert("127.0.0.1")
    ours.cert_pem.write_to_path(str(folder / "ca"))
    mine.private_key_pem.write_to_path(str(folder / "key"))
    mine.cert_chain_pems[0].write_to_path(str(folder / "cert"))
    contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(3)]
    for context in contexts:
        ours.configure_trust(context)
    ours.issue_cert("client").configure_cert(contexts[0])
    theirs.issue_cert("client").configure_cert(contexts[1])
    return Trust(folder / "ca", folder / "cert", folder / "key", *contexts)


@pytest.fixture
def secured(store_folder: Path, trust: Trust) -> Iterator[Served]:
    """A server that speaks TLS."""
    tls = tls_context(trust.certificate, trust.key, trust.authority)
    with open_store(store_folder, write=False) as store, serving(store, tls=tls) as running:
        yield running


def test_tls(secured: Served, trust: Trust) -> None:
    """The same bytes; a header comes in a record of its own, and nothing unasked for."""
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        trust.known.maximum_version = version
        with (
            trust.known.wrap_socket(secured.raw(), server_hostname="127.0.0.1") as connection,
            Client(connection, 32) as client,
        ):
            assert not select.select([connection], [], [], 0.1)[0]
            memory_is_right(client)
            client.send(GET, 256, LONG, ONE)
            assert len(connection.recv(1 << 20)) == 32
            assert client.receive(256 * PAGE) == MEMORY[ONE][LONG][: 256 * PAGE]
            client.send(CLOSE, 0, 0, 0)
            assert client.receive(4) == bytes(4)
            connection.unwrap().close()
    assert secured.complaints == []


@pytest.mark.parametrize("who", ["stranger", "nobody"])
def test_tls_wants_a_certificate(secured: Served, trust: Trust, who: str) -> None:
    """Of the right authority."""
    context: ssl.SSLContext = getattr(trust, who)
    with pytest.raises((ssl.SSLError, ConnectionError)), secured.raw() as raw:
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
            Client(connection, 32).ask(ONE, LONG, 1)
    secured.wait_for("closed (")


def test_tls_only(secured: Served, trust: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in the clear are not answered, and a handshake has to come to an end."""
    monkeypatch.setattr(page_server, "_PART_SECONDS", 0.2)
    with secured.client() as client, secured.raw() as silent:
        client.send(GET, 1, LONG, ONE)
        with pytest.raises((AssertionError, ConnectionError)):
            client.answer(ONE, LONG, 1)
        assert silent.recv(1) == b""
    secured.wait_for("timed out")


# --- the command --------------------------------------------------------------------------------


@contextmanager
def running(
    store: Path, *args: str | Path, criu: str = "/no/criu"
) -> Iterator[subprocess.Popen[str]]:
    """`icefloe page-server worker` in a process of its own."""
    command = [sys.executable, "-m", "icefloe", "--store", store, "page-server", "worker"]
    process = subprocess.Popen(
        [*map(str, command), "--listen", "127.0.0.1:0", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ICEFLOE_CAPTURE_CRIU": criu},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def port_of(process: subprocess.Popen[str]) -> int:
    """Where it listens, as it says in its only line."""
    assert process.stdout
    words = process.stdout.readline().split()
    assert words[:2] == ["listening", "on"], words
    return int(words[2].removeprefix("127.0.0.1:"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_runs_until_it_is_told(store_folder: Path, number: signal.Signals) -> None:
    """Clients may be connected; others may read the store, and nobody may write it."""
    with running(store_folder) as process:
        with Client(socket.create_connection(("127.0.0.1", port_of(process))), 32) as client:
            memory_is_right(client)
            open_store(store_folder, write=False).close()
            with pytest.raises(StoreBusy):
                open_store(store_folder, write=True, wait_seconds=0.0)
            process.send_signal(number)
            out, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, errors) == (0, "", "")


def test_it_complains_on_standard_error(store_folder: Path) -> None:
    """A line each."""
    with running(store_folder) as process:
        with Client(socket.create_connection(("127.0.0.1", port_of(process))), 32) as client:
            client.send(GET, 1, LONG, 43)
            assert client.ended()
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
    assert re.fullmatch(r"icefloe: 127\.0\.0\.1:\d+: closed \(.+ process 43\)\n", errors), errors


@pytest.mark.parametrize(
    "criu, args, header",
    [
        ("Version: 4.1.1", (), 24),
        ("Version: 4.2", (), 32),
        ("Version: 5.0", (), 32),
        ("", (), 32),
        ("Version: 4.1.1", ("--header", "32"), 32),
        ("Version: 4.2", ("--header", "24"), 24),
    ],
)
def test_headers_are_those_of_the_criu_here(
    store_folder: Path, tmp_path: Path, criu: str, args: tuple[str, ...], header: int
) -> None:
    """Unless one is named."""
    program = tmp_path / "criu"
    program.write_text(f"#!/bin/sh\necho '{criu}'\n")
    program.chmod(0o755)
    with running(store_folder, *args, criu=str(program)) as process:
        with Client(socket.create_connection(("127.0.0.1", port_of(process))), header) as client:
            assert client.ask(ONE, LONG, 1) == MEMORY[ONE][LONG][:PAGE]


def test_files_for_the_other_side(store_folder: Path, tmp_path: Path) -> None:
    """Everything but what the server gives, and that is named as lazy."""
    with running(store_folder, "--files", tmp_path / "new" / "files", "--json") as process:
        assert process.stdout
        answer = json.loads("".join(process.stdout.readline() for _ in range(4)))
        assert answer["files"] == str(tmp_path / "new" / "files")
        assert answer["listen"].startswith("127.0.0.1:")
        tree = small_store.read_tree(tmp_path / "new" / "files")
        process.terminate()
        assert process.wait(PATIENCE) == 0
    original = small_store.read_tree(store_folder.parent / "images")
    assert tree.keys() == original.keys()
    for name, content in tree.items():
        if name.startswith("pages-"):
            assert content == b""
        elif name.startswith("pagemap-"):
            (tmp_path / name).write_bytes(content)
            runs = read_pagemap(tmp_path / name).runs
            memory = MEMORY[int(name[8:-4])]
            expected = [(start, len(area) // PAGE, PE_LAZY) for start, area in memory.items()]
            assert [(run.vaddr, run.pages, run.flags) for run in runs] == expected
        else:
            assert content == original[name]


REFUSED = {
    "others can reach 0.0.0.0": (2, "--listen 0.0.0.0:0"),
    "others can reach ::": (2, "--listen [::]:0"),
    "'27277' is no address": (2, "--listen 27277"),
    "':1' is no address": (2, "--listen :1"),
    "'a:65536' is no address": (2, "--listen a:65536"),
    "cannot listen on no.such.host.invalid:1": (2, "--listen no.such.host.invalid:1"),
    "cannot listen on 192.0.2.1:0": (2, "--insecure --listen 192.0.2.1:0"),
    "TLS needs all": (2, "--tls-cert cert"),
    "cannot use cert, key and ca": (2, "--tls-cert cert --tls-key key --tls-ca ca"),
    "exists and is not an empty folder": (2, "--files /proc/self/fdinfo"),
    "cannot write /proc/new": (8, "--files /proc/new"),
    "'25' is not one of": (2, "--header 25"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(store_folder: Path, capsys: pytest.CaptureFixture[str], said: str) -> None:
    """Before anything is served."""
    code, args = REFUSED[said]
    place = [] if "--listen" in args else ["--listen", "127.0.0.1:0"]
    with pytest.raises(SystemExit) as ended:
        main(["--store", str(store_folder), "page-server", "worker", *place, *args.split()])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    fails(Ended(ended.value.code, printed.out, printed.err), code, said)


def test_a_taken_port(store_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is named."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SystemExit) as ended:
            main(["--store", str(store_folder), "page-server", "worker", "--listen", place])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    fails(Ended(ended.value.code, printed.out, printed.err), 2, f"cannot listen on {place}")
