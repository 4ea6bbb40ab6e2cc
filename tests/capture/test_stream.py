"""The stream door, with a CRIU that is made of a few lines (criu/img-streamer.c)."""

import os
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, chdir, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import made_checkpoints as made
import pytest
import small_store
from made_checkpoints import PAGE, PRESENT, WORD, Area, Entry, Memory

from icefloe.capture.blocks import StoreSource
from icefloe.capture.directory import CriuFiles, files_for_criu
from icefloe.capture.memory import load_memories
from icefloe.capture.stored import StoredImage
from icefloe.capture.stream import SOCKET, StreamDoor
from icefloe.catalog import open_store
from icefloe.errors import CorruptBlock, CriuFailed
from icefloe.store.layout import Layout

PATIENCE, PID = 20.0, 77
CORE, MEMORY, TMPFS = f"core-{PID}.img", "pages-1.img", "tmpfs-dev-42.tar.gz.img"

# Much more than a pipe holds, so that whoever writes has to wait for the reader.
PAGES, ZEROS = 800, 1 << 20


def checkpoint() -> dict[str, bytes]:
    """A process, and a file with a run of zeros."""
    start, text = 1 << 20, small_store.text
    pages = {start + i * PAGE: text(PAGE, i) for i in range(PAGES)}
    memory = Memory([Area(start, start + PAGES * PAGE)], [Entry(start, PAGES, PRESENT)], pages)
    others = {TMPFS: text(700_001, 1) + bytes(ZEROS) + text(700_001, 2), "empty.img": b""}
    return made.checkpoint({PID: memory}) | others


@contextmanager
def stored(root: Path) -> Iterator[CriuFiles]:
    """What CRIU gets of a checkpoint in a store of its own."""
    with open_store(root, write=True, create=True) as store:
        manifest = store.manifest(small_store.add(store, checkpoint(), "image").id)
        image = StoredImage(manifest, StoreSource(store, manifest))
        yield files_for_criu(image, load_memories(image), lazy=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CriuFiles]:
    """The files for all tests; they share a store."""
    with stored(tmp_path_factory.mktemp("store")) as found:
        yield found


def written(files: CriuFiles) -> dict[str, bytes]:
    """What `write` puts into a directory."""
    with tempfile.TemporaryDirectory() as name:
        files.write(Path(name), workers=2)
        return small_store.read_tree(Path(name))


def descriptors() -> int:
    """How many are open here."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def opened(files: CriuFiles) -> Iterator[tuple[StreamDoor, Future[None]]]:
    """A door that serves in this folder until the context ends. It leaks nothing."""
    before, ended = descriptors(), threading.Event()
    with tempfile.TemporaryDirectory() as folder, chdir(folder), ThreadPoolExecutor(1) as pool:
        door = StreamDoor(Path(folder), files)
        serving = pool.submit(door.serve, ended.is_set)
        try:
            yield door, serving
        finally:
            ended.set()
            wait([serving], PATIENCE)
            door.close()
    assert descriptors() <= before  # what other tests forgot may go meanwhile


@contextmanager
def connected() -> Iterator[socket.socket]:
    """CRIU's end of the socket. CRIU connects from within the folder."""
    with socket.socket(socket.AF_UNIX) as criu:
        criu.settimeout(PATIENCE)
        criu.connect(SOCKET)
        yield criu


@contextmanager
def restoring(files: CriuFiles) -> Iterator[socket.socket]:
    """A restore in which nothing fails."""
    with opened(files) as (door, serving):
        with connected() as criu:
            yield criu
        serving.result(PATIENCE)
    assert door.failure is None


def ask(criu: socket.socket, name: str) -> bool:
    """Whether the door has a file."""
    body = made.nested(1, os.fsencode(name))
    criu.sendall(WORD.pack(len(body)) + body)
    (length,) = WORD.unpack(criu.recv(WORD.size, socket.MSG_WAITALL))
    return {b"\x08\0": False, b"\x08\1": True}[criu.recv(length, socket.MSG_WAITALL)]


def open_file(criu: socket.socket, name: str) -> BinaryIO:
    """The pipe through which a file comes."""
    assert ask(criu, name)
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb"):
        socket.send_fds(criu, [b"\0"], [writer])
    return os.fdopen(reader, "rb", buffering=0)


def pieces(pipe: BinaryIO, most: int = 1 << 16) -> Iterator[bytes]:
    """What comes through a pipe, until its end."""
    while select.select([pipe], [], [], PATIENCE)[0]:
        if not (piece := pipe.read(most)):
            return
        yield piece
    raise AssertionError("nothing comes, and no end")


def read(criu: socket.socket, name: str) -> bytes:
    """A whole file."""
    with open_file(criu, name) as pipe:
        return b"".join(pieces(pipe))


def test_every_file_arrives(files: CriuFiles) -> None:
    """As often as it is asked for."""
    whole = written(files)
    assert len(whole[MEMORY]) == PAGES * PAGE and bytes(ZEROS) in whole[TMPFS]
    with restoring(files) as criu:
        for name in [*whole, *whole, CORE, CORE]:
            assert read(criu, name) == whole[name]


def test_unknown_names_are_missing(files: CriuFiles) -> None:
    unknown = ("nothing.img", f"parent/{CORE}", f"../{CORE}", ".", "", "n\udcffo", "n" * 125)
    with restoring(files) as criu:
        for name in unknown:
            assert not ask(criu, name)
            assert read(criu, CORE) == b"core of %d" % PID


def test_files_are_read_at_once(files: CriuFiles) -> None:
    whole, steps = written(files), ((MEMORY, 5000), (TMPFS, 70_000), (MEMORY, 12_345))
    with restoring(files) as criu, ExitStack() as stack:
        pipes = [(stack.enter_context(open_file(criu, name)), step) for name, step in steps]
        assert read(criu, CORE) == whole[CORE]
        rounds = zip_longest(*(pieces(pipe, step) for pipe, step in pipes), fillvalue=b"")
        found = [b"".join(parts) for parts in zip(*rounds, strict=True)]
    assert found == [whole[name] for name, _ in steps]


def test_pipes_may_be_closed_early(files: CriuFiles) -> None:
    with restoring(files) as criu:
        open_file(criu, MEMORY).close()
        with open_file(criu, MEMORY) as pipe:
            assert len(next(pieces(pipe, PAGE))) == PAGE
        assert read(criu, CORE) == b"core of %d" % PID


def test_the_last_file_arrives_after_criu_has_hung_up(files: CriuFiles) -> None:
    with opened(files) as (door, serving), ExitStack() as stack:
        with connected() as criu:
            pipe = stack.enter_context(open_file(criu, MEMORY))
        serving.result(PATIENCE)
        closing = threading.Thread(target=door.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive(), "the file isn't written yet"
        assert b"".join(pieces(pipe)) == written(files)[MEMORY]
    assert door.failure is None


def test_nothing_more_is_asked(files: CriuFiles) -> None:
    """CRIU hangs up, even within a length, or before it has its answers."""
    for head in (b"", WORD.pack(9)[:3], ASKED, ASKED * 2):
        with restoring(files) as criu:
            criu.sendall(head)


@pytest.mark.parametrize("connects", [False, True])
def test_criu_is_killed(files: CriuFiles, connects: bool) -> None:
    """Its tasks may keep the connection: no end of file comes, and yet nothing else will."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), ExitStack() as stack:
        door = StreamDoor(Path(folder), files)
        stack.callback(door.close)
        if connects:
            with connected() as criu:
                stack.enter_context(criu.dup())
        with pytest.raises(CriuFailed, match="CRIU ended"):
            door.serve(lambda: True)


def test_a_pipe_that_cannot_be_written(files: CriuFiles) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer), opened(files) as (door, serving):
        with connected() as criu:
            assert ask(criu, CORE)
            socket.send_fds(criu, [b"\0"], [reader])
        serving.result(PATIENCE)
    with pytest.raises(CriuFailed, match=f"cannot give {CORE} to CRIU"):
        raise door.failure or AssertionError


ASKED = WORD.pack(len(CORE) + 2) + made.nested(1, CORE.encode())
BAD_REQUESTS = {
    "endless": WORD.pack(0xFFFFFFFF),
    "oversized": WORD.pack(8193),
    "empty": WORD.pack(0),
    "another field": WORD.pack(5) + made.nested(2, b"abc"),
    "one field more": WORD.pack(7) + made.nested(1, b"abc") + made.number(2, 1),
    "too long a name": WORD.pack(4) + b"\x0a\x03ab",
    "broken off": ASKED[:-1],
    "no pipe": ASKED + b"\0",
    "neither pipe nor byte": ASKED,
}


@pytest.mark.parametrize("bad", BAD_REQUESTS)
def test_requests_that_mean_nothing(files: CriuFiles, bad: str) -> None:
    """Each is refused at once, without waiting for more."""
    with opened(files) as (_, serving), connected() as criu:
        assert read(criu, CORE)
        criu.sendall(BAD_REQUESTS[bad])
        if bad in ("broken off", "neither pipe nor byte"):
            criu.shutdown(socket.SHUT_WR)
        reason = f"no pipe for {CORE}" if "pipe" in bad else "in a way that is not known"
        with pytest.raises(CriuFailed, match=reason):
            serving.result(PATIENCE)


def test_a_damaged_block(tmp_path: Path) -> None:
    """The file ends with what was read before it; no wrong byte gets through, other files come."""
    with stored(tmp_path) as files:
        whole, extents, source = written(files), files.extents[MEMORY], files.image.source
        blocks = extents["block"].tolist()
        sound = int(extents["length"][: blocks.index(blocks[-1])].sum())
        assert 0 < sound < len(whole[MEMORY]) and isinstance(source, StoreSource)
        (where,) = source.locate(blocks[-1:])
        pack = Layout(tmp_path).pack(where.pack)
        content = bytearray(pack.read_bytes())
        content[where.offset + where.stored // 2] ^= 1
        pack.write_bytes(content)
        with opened(files) as (door, serving):
            with connected() as criu:
                for _ in range(2):
                    assert whole[MEMORY][:sound].startswith(read(criu, MEMORY))
                assert read(criu, TMPFS) == whole[TMPFS]
            serving.result(PATIENCE)
    assert isinstance(door.failure, CorruptBlock)


def test_a_folder_whose_name_is_too_long(files: CriuFiles, tmp_path: Path) -> None:
    folder, before = tmp_path / ("n" * 100), descriptors()
    with pytest.raises(CriuFailed, match=r"cannot listen .*n+/.*: set TMPDIR to a folder"):
        StreamDoor(folder, files)
    assert descriptors() == before
