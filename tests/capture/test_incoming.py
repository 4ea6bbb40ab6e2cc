"""Files as CRIU streams them, from a CRIU that is made of a few lines (criu/img-streamer.c).

What it writes must come out of the store as it was, in whatever order its pipes are filled; and
whatever it does wrong must end the capture at once, without a thread or a descriptor left behind.
"""

import os
import random
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast
from unittest import mock

import made_checkpoints as made
import pytest
import small_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_checkpoints import WORD
from small_store import Tree

from icefloe.capture import incoming as incomings
from icefloe.capture.dump import Dump
from icefloe.capture.incoming import SOCKET, Incoming
from icefloe.capture.ingest import Ingest, IngestOptions
from icefloe.capture.windows import SMALL_FILE, WINDOW_BYTES, Buffer, Group
from icefloe.capture.written import Written
from icefloe.catalog import LocalStore, open_store
from icefloe.errors import CriuFailed
from icefloe.ids import BlockId, parse_name
from icefloe.store.manifest import ZERO, ImageFile, Manifest
from icefloe.store.writer import staging_leftovers

Result = TypeVar("Result")

MIB, PAGE = 1 << 20, 4096
PATIENCE = 20.0

# What is refused "at once" may take this long on a busy machine.
SOON = 5.0

# Windows that lie ready, the buffer for the files in the folder, and files that have ended on
# CRIU's side and not yet on ours.
FEW_BUFFERS = 6


# --- a CRIU -------------------------------------------------------------------------------------


class FakeCriu:
    """The other end of the socket. Each file is a pipe."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(folder / SOCKET))

    def __enter__(self) -> "FakeCriu":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, name: str) -> None:
        """The first half of a request: the name."""
        body = made.nested(1, os.fsencode(name))
        self.socket.sendall(WORD.pack(len(body)) + body)

    def open(self, name: str) -> int:
        """A whole request. Returns the end to write to."""
        self.ask(name)
        reader, writer = os.pipe()
        socket.send_fds(self.socket, [b"\0"], [reader])
        os.close(reader)
        return writer

    def write(self, name: str, content: bytes) -> None:
        """A whole file."""
        with os.fdopen(self.open(name), "wb", buffering=0) as pipe:
            write_all(pipe.fileno(), content)


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Writes until nothing is left."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def write_in_turns(criu: FakeCriu, files: Mapping[str, bytes], chance: random.Random) -> int:
    """Opens, fills and closes the files' pipes in any order. Returns how many were open at most."""
    waiting, most = list(files), 0
    chance.shuffle(waiting)
    pipes: dict[str, int] = {}
    at = dict.fromkeys(files, 0)
    width = chance.choice((1, 2, 5, 30))
    try:
        while waiting or pipes:
            if waiting and (not pipes or len(pipes) < width and chance.random() < 0.5):
                name = waiting.pop()
                pipes[name] = criu.open(name)
                most = max(most, len(pipes))
                continue
            name = chance.choice(list(pipes))
            left = len(files[name]) - at[name]
            if not left:
                os.close(pipes.pop(name))
                continue
            step = min(left, max(left // 20, chance.choice((1, 511, PAGE, 65_537, MIB))))
            write_all(pipes[name], memoryview(files[name])[at[name] : at[name] + step])
            at[name] += step
    finally:
        for fd in pipes.values():
            os.close(fd)
    return most


@dataclass
class Outside:
    """What a dump has besides its socket: CRIU itself, and the pipe on which it says "held"."""

    images: Path
    held: int
    pidfd: int
    _held: int

    def hold(self) -> None:
        """All is written."""
        os.write(self._held, b"held\n")

    def wait_held(self, stopped: Callable[[], bool]) -> None:
        """See Dump."""
        Dump.wait_held(cast(Dump, self), stopped)


@contextmanager
def outside(process: int | None = None) -> Iterator[Outside]:
    """A folder for images, and a CRIU (this process, which lives, unless another is named)."""
    with tempfile.TemporaryDirectory() as folder:
        held, writer = os.pipe()
        pidfd = os.pidfd_open(process or os.getpid())
        try:
            yield Outside(Path(folder), held, pidfd, writer)
        finally:
            for fd in (held, writer, pidfd):
                os.close(fd)


def aside(work: Callable[[], Result]) -> "Future[Result]":
    """Does it in a thread of its own, for which nobody has to wait."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return future


# --- what is written comes out ------------------------------------------------------------------


def content(size: int, seed: int) -> bytes:
    """Bytes such as memory has: noise, text, zeros, in stretches of any length."""
    chance, left = random.Random(seed), size
    parts: list[bytes] = []
    while left:
        length = min(left, chance.choice((100, 5000, 70_000, 300_000, 2_000_000)))
        parts.append(chance.choice((noise, small_store.text, zeros))(length, left ^ seed))
        left -= length
    return b"".join(parts)


def noise(length: int, seed: int) -> bytes:
    """Bytes without structure."""
    return random.Random(seed).randbytes(length)


def zeros(length: int, seed: int) -> bytes:
    """Nothing."""
    return bytes(length)


def around(place: int) -> st.SearchStrategy[int]:
    """Sizes where something changes."""
    return st.sampled_from((-PAGE, -512, -1, 0, 1, 511, PAGE)).map(lambda by: place + by)


small_sizes = st.one_of(st.just(0), st.integers(1, SMALL_FILE - 1), around(SMALL_FILE))
large_sizes = st.one_of(
    st.integers(SMALL_FILE, MIB),
    around(WINDOW_BYTES),
    around(2 * WINDOW_BYTES),
    st.integers(WINDOW_BYTES, 3 * WINDOW_BYTES),
)


@st.composite
def dumps(draw: st.DrawFn) -> dict[str, int]:
    """Sizes of what one dump streams: memory, other large files, up to six groups of small ones."""
    others = draw(st.lists(large_sizes, max_size=2)) + draw(st.lists(small_sizes, max_size=5))
    memory = draw(st.lists(st.one_of(large_sizes, small_sizes), max_size=3))
    others += [SMALL_FILE - 1 - i * 31 for i in range(draw(st.sampled_from((0, 40, 90))))]
    sizes = {f"tmpfs-dev-{i}.tar.gz.img": size for i, size in enumerate(others)}
    sizes |= {f"pages-{i}.img": size // PAGE * PAGE for i, size in enumerate(memory)}
    return sizes | {f"amdgpu-pages-é\udcff-{i}": size for i, size in enumerate(memory[:1])}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStore]:
    """One store for all; no two dumps have blocks in common."""
    with open_store(tmp_path_factory.mktemp("incoming"), write=True, create=True) as opened:
        yield opened


@dataclass
class Seen:
    """How a capture went."""

    image: BlockId
    buffers: int
    calls: int


def captured(
    store: LocalStore,
    files: Mapping[str, bytes],
    write: Callable[[FakeCriu], object],
    options: IngestOptions,
    beside: Tree | None = None,
) -> Seen:
    """The image of a dump that streams `files`, as `write` does it, and leaves others `beside`."""
    calls: list[int] = []
    entries: list[ImageFile] = []
    ingest = Ingest(store, options, lambda count: None)
    with outside() as dump, counted_buffers() as buffers:
        written = Written(cast(Dump, dump), True, options.pages, lambda: calls.append(len(entries)))
        entries = written.entries

        def play() -> None:
            try:
                with FakeCriu(dump.images) as criu:
                    write(criu)
                    for name, whole in (beside or {}).items():
                        (dump.images / name).write_bytes(whole)
                    dump.hold()
            except BaseException:
                written.stop()
                raise

        written.start()
        watchdog = threading.Timer(PATIENCE, written.stop)
        watchdog.start()
        playing = aside(play)
        try:
            ingest.run(written)
            playing.result(PATIENCE)
            written.verify()
            image = ingest.finish(written.entries, {}, {})
            ingest.commit(image, parse_name("streamed"))
        except BaseException:
            ingest.abort()
            raise
        finally:
            watchdog.cancel()
            written.close()
    assert calls == [len(files)], "all was read, and nothing that lies in the folder"
    return Seen(image.id, len(buffers), len(calls))


@contextmanager
def counted_buffers() -> Iterator[list[Buffer]]:
    """Every buffer that is made."""
    made_here: list[Buffer] = []
    make = Buffer.__init__

    def counted(self: Buffer) -> None:
        made_here.append(self)
        make(self)

    with mock.patch.object(Buffer, "__init__", counted):
        yield made_here


def pieces(manifest: Manifest, path: str) -> list[tuple[bytes, int, int]]:
    """The blocks of a file: id (none: zeros), offset in the block, length."""
    index = [file.path for file in manifest.files].index(path)
    ids = manifest.block_ids()
    return [
        (b"" if number == ZERO else bytes(ids[number]), offset, length)
        for number, offset, length in manifest.extents_of(index)[
            ["block", "offset", "length"]
        ].tolist()
    ]


def differences(found: Tree, wanted: Tree) -> list[str]:
    """The files that are not as they should be. (To show megabytes takes minutes.)"""
    return [name for name in found.keys() | wanted if found.get(name) != wanted.get(name)]


def same_as_added(store: LocalStore, files: Mapping[str, bytes], image: BlockId) -> None:
    """`add` cuts the large files in the same places, and so has nothing new to store."""
    large = {
        name: whole
        for name, whole in files.items()
        if len(whole) >= SMALL_FILE and (len(whole) % PAGE == 0 or "pages-" not in name)
    }
    added = small_store.add(store, large, "added")
    assert added.new_blocks == 0
    streamed, other = store.manifest(image), store.manifest(added.id)
    for name in large:
        assert pieces(streamed, name) == pieces(other, name), name


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    sizes=dumps(),
    order=st.integers(0, 1 << 32),
    workers=st.integers(1, 4),
    hurry=st.booleans(),
    beside=st.booleans(),
)
def test_what_is_streamed_comes_out(
    store: LocalStore, sizes: dict[str, int], order: int, workers: int, hurry: bool, beside: bool
) -> None:
    """Files of any size, in pipes that are open at once and filled in any order."""
    files = {name: content(size, order + i) for i, (name, size) in enumerate(sizes.items())}
    extra = {"plugin.img": b"x" * 9, "amdgpu-pages-7": content(MIB, order)} if beside else {}
    most: list[object] = []
    seen = captured(
        store,
        files,
        lambda criu: most.append(write_in_turns(criu, files, random.Random(order))),
        IngestOptions("fast", workers, hurry=hurry),
        extra,
    )
    assert differences(small_store.exported(store, seen.image), files | extra) == []
    same_as_added(store, files, seen.image)
    memories = sum("pages-" in name for name in files)
    assert seen.buffers <= workers + hurry + memories + FEW_BUFFERS


def test_groups_between_windows(store: LocalStore) -> None:
    """Whoever takes a group keeps its buffer, which no two windows may then come to lie in."""
    chance = random.Random(4)
    for workers in (1, 2, 3):
        small = {f"core-{i}.img": noise(SMALL_FILE - 1, chance.getrandbits(40)) for i in range(80)}
        large = {f"pages-{i}.img": noise(2 * MIB, chance.getrandbits(40)) for i in range(20)}
        names = [
            [f"core-{4 * i + j}.img" for j in range(4)] + [f"pages-{i}.img"] for i in range(20)
        ]
        files = small | large
        ordered = {name: files[name] for part in names for name in part}
        seen = captured(store, files, streams(ordered), IngestOptions("fast", workers))
        assert differences(small_store.exported(store, seen.image), files) == []


def streams(files: Mapping[str, bytes]) -> Callable[[FakeCriu], None]:
    """Writes one file after the other."""

    def write(criu: FakeCriu) -> None:
        for name, whole in files.items():
            criu.write(name, whole)

    return write


def test_memory_files_one_after_the_other_share_a_buffer(store: LocalStore) -> None:
    files = {f"pages-{i}.img": noise(3 * PAGE if i % 3 else MIB, i) for i in range(40)}
    seen = captured(store, files, streams(files), IngestOptions("fast", 2))
    assert differences(small_store.exported(store, seen.image), files) == []
    assert seen.buffers <= 2 + 2 + FEW_BUFFERS


def test_a_large_file_takes_a_few_buffers(store: LocalStore) -> None:
    """All of it is in the way at once, and yet not in memory."""
    files = {"pages-1.img": noise(10 * WINDOW_BYTES, 77), "other.img": noise(5 * WINDOW_BYTES, 78)}
    seen = captured(store, files, streams(files), IngestOptions("fast", 1))
    assert differences(small_store.exported(store, seen.image), files) == []
    same_as_added(store, files, seen.image)
    assert seen.buffers <= 1 + 1 + FEW_BUFFERS


@pytest.mark.parametrize("beside", [{}, {"plugin.img": b"p"}])
def test_a_dump_that_streams_nothing(store: LocalStore, beside: Tree) -> None:
    seen = captured(store, {}, lambda criu: None, IngestOptions("fast", 2), beside)
    assert small_store.exported(store, seen.image) == beside


def test_files_of_patterns_are_memory(store: LocalStore) -> None:
    """So they are cut on pages, as `add` does it with the same patterns."""
    files = {"vram-1.bin": noise(3 * MIB, 11), "other.bin": noise(3 * MIB, 12)}
    options = IngestOptions("fast", 2, pages=("vram-*",))
    manifest = store.manifest(captured(store, files, streams(files), options).image)
    ends = {}
    for name in files:
        at = [0]
        for _, _, length in pieces(manifest, name):
            at.append(at[-1] + length)
        ends[name] = at
    assert all(end % PAGE == 0 for end in ends["vram-1.bin"])
    assert any(end % PAGE for end in ends["other.bin"])


# --- what goes wrong ----------------------------------------------------------------------------


@dataclass
class Listening:
    """A door that is read from, and what has come through it."""

    incoming: Incoming
    dump: Outside
    entries: list[ImageFile]
    completed: list[int] = field(default_factory=list)

    def take_all(self) -> int:
        """Takes until there is nothing more; the bytes that came."""
        total = 0
        while (piece := self.incoming.take(Buffer())) is not None:
            total += len(piece.content) if isinstance(piece, Group) else piece.length
        return total


def descriptors() -> int:
    """How many are open here."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> list[str]:
    """Those of a door."""
    return [thread.name for thread in threading.enumerate() if thread.name == "incoming"]


@contextmanager
def listening(process: int | None = None) -> Iterator[Listening]:
    """A door, which must be gone altogether when the context ends."""
    before = descriptors()
    with outside(process) as dump:
        entries: list[ImageFile] = []
        incoming = Incoming(dump.images, (), entries)
        told: list[int] = []
        incoming.start(dump.held, dump.pidfd, lambda: told.append(1))
        try:
            yield Listening(incoming, dump, entries, told)
        finally:
            aside(incoming.close).result(SOON)
    assert threads() == []
    assert descriptors() <= before  # what other tests forgot may go meanwhile


def fails(door: Listening, reason: str) -> None:
    """Whoever takes is told why, each time, and that the dump is whole by nobody."""
    for _ in range(2):
        taking = aside(door.take_all)
        with pytest.raises(CriuFailed, match=reason):
            taking.result(SOON)
    assert not door.completed


@contextmanager
def short_lived() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that can be ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


ASKED = WORD.pack(5) + made.nested(1, b"abc")
BAD_REQUESTS = {
    "endless": WORD.pack(0xFFFFFFFF),
    "oversized": WORD.pack(8193),
    "empty": WORD.pack(0),
    "another field": WORD.pack(5) + made.nested(2, b"abc"),
    "another type": WORD.pack(2) + made.number(1, 7),
    "one field more": WORD.pack(7) + made.nested(1, b"abc") + made.number(2, 1),
    "too long a name": WORD.pack(4) + b"\x0a\x03ab",
    "broken off": ASKED[:-1],
    "broken off behind the length": ASKED[:4],
    "no pipe": ASKED + b"\0",
    "neither pipe nor byte": ASKED,
}


@pytest.mark.parametrize("bad", BAD_REQUESTS)
def test_requests_that_mean_nothing(bad: str) -> None:
    """Each is refused at once, without waiting for more; also when all was well before."""
    with listening() as door, FakeCriu(door.dump.images) as criu:
        criu.write("core-1.img", b"x" * 3000)
        criu.socket.sendall(BAD_REQUESTS[bad])
        if bad.startswith(("broken off", "neither")):
            criu.socket.shutdown(socket.SHUT_WR)
        fails(door, "no pipe for abc" if "pipe" in bad else "in a way that is not known")


def test_a_length_that_is_broken_off() -> None:
    """As when CRIU is killed: that it has ended is what shows it."""
    with short_lived() as process, listening(process.pid) as door:
        with FakeCriu(door.dump.images) as criu:
            criu.socket.sendall(ASKED[:3])
        process.kill()
        fails(door, "CRIU ended")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a/", "a\0b", "twice"])
def test_names_that_cannot_be(name: str) -> None:
    with listening() as door, FakeCriu(door.dump.images) as criu:
        criu.write("twice", b"x")
        with pipe_to(criu, name):
            fails(door, "for the second time or nowhere")


@contextmanager
def pipe_to(criu: FakeCriu, name: str) -> Iterator[int]:
    """A file that is open."""
    writer = criu.open(name)
    try:
        yield writer
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "when", ["at once", "in a file", "between files", "held", "held in a file"]
)
def test_criu_is_gone(when: str) -> None:
    """Its tasks may keep the connection and pipes: no end of file comes."""
    with short_lived() as process, ExitStack() as stack:
        door = stack.enter_context(listening(process.pid))
        if when != "at once":
            criu = stack.enter_context(FakeCriu(door.dump.images))
            criu.write("core-1.img", b"x" * 100)
        if when.endswith("a file"):
            write_all(stack.enter_context(pipe_to(criu, "pages-1.img")), bytes(MIB))
        if when == "held in a file":
            door.dump.hold()
            time.sleep(0.3)
        taking = aside(door.take_all)
        if when == "held":
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            assert not taking.done()
        process.kill()
        with pytest.raises(CriuFailed, match="CRIU ended"):
            taking.result(SOON)
        fails(door, "CRIU ended")


def test_a_criu_that_only_just_held() -> None:
    """It closes the pipe on which it would say so, which is no word."""
    with short_lived() as process, listening(process.pid) as door:
        os.close(door.dump._held)
        door.dump._held = os.open(os.devnull, os.O_RDONLY)
        taking = aside(door.take_all)
        time.sleep(0.3)
        assert not taking.done()
        process.kill()
        with pytest.raises(CriuFailed, match="CRIU ended"):
            taking.result(SOON)


def test_a_pipe_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incomings, "_LAST_BYTES_SECONDS", 0.5)
    with listening() as door, FakeCriu(door.dump.images) as criu:
        with pipe_to(criu, "pages-1.img") as endless, pipe_to(criu, "fine.img"):
            write_all(endless, b"x" * 5000)
            time.sleep(1.0)  # until then it may be as slow as it likes
            taking = aside(door.take_all)
            assert not taking.done()
        with pipe_to(criu, "core-1.img"):
            door.dump.hold()
            with pytest.raises(CriuFailed, match="never ended core-1.img"):
                taking.result(SOON)
            fails(door, "never ended core-1.img")


def test_last_bytes_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is how long nothing came. Requests that were not looked at yet count as well."""
    monkeypatch.setattr(incomings, "_LAST_BYTES_SECONDS", 1.5)
    with listening() as door, FakeCriu(door.dump.images) as criu:
        taking = aside(door.take_all)
        with pipe_to(criu, "pages-1.img") as slow:
            door.dump.hold()
            for _ in range(10):
                time.sleep(0.25)
                write_all(slow, b"x" * PAGE)
                assert not taking.done()
        assert taking.result(SOON) == 10 * PAGE
        assert [(entry.path, entry.size) for entry in door.entries] == [("pages-1.img", 10 * PAGE)]
        assert door.completed == [1]


def test_held_comes_before_everything_was_looked_at() -> None:
    """CRIU waits for no answer: all of a small dump can lie in socket and pipes when it holds."""
    names = [f"core-{i}.img" for i in range(20)]
    for _ in range(20):
        with outside() as dump:
            entries: list[ImageFile] = []
            incoming = Incoming(dump.images, (), entries)
            with FakeCriu(dump.images) as criu:
                for name in names:
                    criu.write(name, name.encode())
                dump.hold()
            incoming.start(dump.held, dump.pidfd, lambda: None)
            door = Listening(incoming, dump, entries)
            try:
                assert aside(door.take_all).result(PATIENCE) == sum(map(len, names))
            finally:
                incoming.close()
            assert sorted(entry.path for entry in entries) == sorted(names)


class LateLook:
    """A poll(2) behind whose first look at the listener CRIU connects, writes and holds.

    The kernel looks at one descriptor after the other: `held` can be ready in an answer in which
    the listener, which was looked at before, is not.
    """

    def __init__(self, poll: "select.poll", listener: int, held: int) -> None:
        self._poll, self._listener, self._held = poll, listener, held
        self._first = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._poll, name)

    def poll(self, milliseconds: int) -> list[tuple[int, int]]:
        """See select.poll."""
        if self._first:
            select.select([self._held], [], [], PATIENCE)
            self._first = False
            events = [event for event in self._poll.poll(0) if event[0] != self._listener]
            assert [fd for fd, _ in events] == [self._held]
            return events
        return self._poll.poll(milliseconds)


def test_held_is_seen_before_the_connection() -> None:
    with outside() as dump:
        entries: list[ImageFile] = []
        incoming = Incoming(dump.images, (), entries)
        late = LateLook(incoming._poll, incoming._listener.fileno(), dump.held)
        incoming._poll = cast("select.poll", late)
        with FakeCriu(dump.images) as criu:
            criu.write("pstree.img", b"processes")
            dump.hold()
        incoming.start(dump.held, dump.pidfd, lambda: None)
        try:
            assert aside(Listening(incoming, dump, entries).take_all).result(PATIENCE) == 9
        finally:
            incoming.close()


def test_the_end_is_the_end_for_everyone() -> None:
    """Each thread that takes is told."""
    with listening() as door, FakeCriu(door.dump.images) as criu:
        criu.write("core-1.img", b"x" * 100)
        door.dump.hold()
        assert aside(door.take_all).result(PATIENCE) == 100
        assert aside(door.take_all).result(SOON) == 0


def test_all_who_take_hear_of_a_failure() -> None:
    with short_lived() as process, listening(process.pid) as door:
        takers = [aside(door.take_all) for _ in range(4)]
        process.kill()
        for taker in takers:
            with pytest.raises(CriuFailed, match="CRIU ended"):
                taker.result(SOON)


def test_what_is_done_at_the_end_may_fail() -> None:
    with outside() as dump:
        incoming = Incoming(dump.images, (), [])

        def fail() -> None:
            raise CriuFailed("it can't be let go", "")

        incoming.start(dump.held, dump.pidfd, fail)
        try:
            dump.hold()
            with pytest.raises(CriuFailed, match="let go"):
                aside(lambda: incoming.take(Buffer())).result(SOON)
        finally:
            incoming.close()


def test_criu_waits_when_nobody_takes() -> None:
    """What was read and not taken is a few windows, however much there is."""
    with listening() as door, FakeCriu(door.dump.images) as criu:
        with pipe_to(criu, "pages-1.img") as pipe:
            os.set_blocking(pipe, False)
            written, part = 0, bytes(MIB)
            while select.select([], [pipe], [], 1.0)[1] and written < 64 * MIB:
                with suppress(BlockingIOError):
                    written += os.write(pipe, part)
            assert 3 * WINDOW_BYTES <= written <= 6 * WINDOW_BYTES
            os.set_blocking(pipe, True)
            taking = aside(door.take_all)
            write_all(pipe, part)
        door.dump.hold()
        assert taking.result(PATIENCE) == written + MIB


# --- giving up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before CRIU", "in a file", "between files", "held"])
def test_stop_ends_the_waiting(where: str) -> None:
    with listening() as door, ExitStack() as stack:
        if where != "before CRIU":
            criu = stack.enter_context(FakeCriu(door.dump.images))
            criu.write("core-1.img", b"x")
        if where in ("in a file", "held"):
            pipe = stack.enter_context(pipe_to(criu, "pages-1.img"))
            write_all(pipe, bytes(2 * MIB))
        if where == "held":
            door.dump.hold()
        taking = aside(door.take_all)
        time.sleep(0.1)
        assert not taking.done()
        aside(door.incoming.stop).result(SOON)
        with pytest.raises(CriuFailed, match="given up"):
            taking.result(SOON)
        fails(door, "given up")


def test_stop_while_all_buffers_are_taken() -> None:
    """The reader waits for one that nobody will give back."""
    with listening() as door, FakeCriu(door.dump.images) as criu:
        writing = aside(lambda: criu.write("pages-1.img", bytes(20 * WINDOW_BYTES)))
        time.sleep(0.5)
        assert not writing.done()
        aside(door.incoming.stop).result(SOON)
        aside(door.incoming.close).result(SOON)
        with pytest.raises(BrokenPipeError):
            writing.result(SOON)


@pytest.mark.parametrize("part", ["length", "name", "pipe"])
def test_stop_within_a_request(part: str) -> None:
    """CRIU can be stopped between any two of its steps, and it must still be possible to give up
    on it."""
    head = {"length": ASKED[:2], "name": ASKED[:-1], "pipe": ASKED}[part]
    with outside() as dump, FakeCriuLater() as later:
        incoming = Incoming(dump.images, (), [])
        incoming.start(dump.held, dump.pidfd, lambda: None)
        criu = later.connect(dump.images)
        criu.socket.sendall(head)
        taking = aside(lambda: incoming.take(Buffer()))
        time.sleep(0.2)
        incoming.stop()
        closing = aside(incoming.close)
        try:
            with pytest.raises(CriuFailed):
                taking.result(SOON)
            closing.result(SOON)
        finally:
            criu.socket.close()  # ends the waiting in any case
            closing.result(PATIENCE)


class FakeCriuLater:
    """A CRIU that connects when the door is open."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> "FakeCriuLater":
        return self

    def connect(self, folder: Path) -> FakeCriu:
        """Now."""
        return self._stack.enter_context(FakeCriu(folder))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def test_stop_before_criu_holds_without_streams() -> None:
    """It writes files to its folder, which may take minutes."""
    with outside() as dump:
        written = Written(cast(Dump, dump), False, (), lambda: None)
        written.start()
        taking = aside(lambda: written.take(Buffer()))
        time.sleep(0.2)
        assert not taking.done()
        written.stop()
        try:
            with pytest.raises(CriuFailed):
                taking.result(SOON)
        finally:
            dump.hold()
            with suppress(CriuFailed):
                taking.result(PATIENCE)
            written.close()


def test_a_door_that_was_never_open() -> None:
    before = descriptors()
    with outside() as dump:
        Incoming(dump.images, (), []).close()
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(CriuFailed, match="cannot listen .*: set TMPDIR"):
            Incoming(Path(folder) / ("n" * 100), (), [])
    assert descriptors() <= before


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failed_dump_leaves_nothing(tmp_path: Path, workers: int) -> None:
    """The workers end, with what CRIU did wrong as the reason."""
    with open_store(tmp_path / "store", write=True, create=True) as store:
        ingest = Ingest(store, IngestOptions("fast", workers, hurry=True))
        with short_lived() as process, outside(process.pid) as dump:
            written = Written(cast(Dump, dump), True, (), lambda: None)
            written.start()
            running = aside(lambda: ingest.run(written))
            with FakeCriu(dump.images) as criu:
                criu.write("pages-1.img", noise(9 * MIB, 5))
                with pipe_to(criu, "pages-2.img") as pipe:
                    write_all(pipe, noise(5 * MIB, 6))
                    process.kill()
                    with pytest.raises(CriuFailed, match="CRIU ended"):
                        running.result(PATIENCE)
                    aside(written.close).result(SOON)
        ingest.abort()
        assert store.catalog.names() == {} and not list(store.layout.published())
        assert staging_leftovers(store.layout) == []
        assert not [t for t in threading.enumerate() if t.name.startswith(("ingest", "incoming"))]


def test_small_files_wait_too() -> None:
    """When nobody takes, no more than a few groups of them are read."""
    with listening() as door, FakeCriu(door.dump.images) as criu:
        content = noise(SMALL_FILE - 1, 5)
        names = [f"core-{i}.img" for i in range(20 * MIB // SMALL_FILE)]

        def write() -> None:
            for name in names:
                criu.write(name, content)

        writing = aside(write)
        with pytest.raises(TimeoutError):
            writing.result(0.5)
        read = door.incoming.sequence
        assert 0 < read < 8
        taken = aside(door.take_all)
        writing.result(PATIENCE)
        door.dump.hold()
        assert taken.result(PATIENCE) == len(names) * len(content)
