"""While processes stand still, coding must not hold up the reading; and what fails, ends it all.

The sources here are as fast or as slow as a test wants them.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import small_store

from icefloe.capture.ingest import Durable, Ingest, IngestOptions
from icefloe.capture.windows import WINDOW_BYTES, Buffer, Group, OpenFile, Window
from icefloe.catalog import LocalStore, open_store
from icefloe.chunker import PAGES
from icefloe.errors import CriuFailed
from icefloe.ids import block_id, parse_name
from icefloe.store.codecs import Codec
from icefloe.store.manifest import FileKind, ImageFile
from icefloe.store.pack import Kind, StoredBlock
from icefloe.store.writer import PackWriter, staging_leftovers

PATIENCE = 30.0
NAME = "pages-1.img"
WINDOWS = 4

# In which a thread that has nothing to do but to wait gets so far.
A_WHILE = 0.15


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    """An empty store."""
    with open_store(tmp_path / "store", write=True, create=True) as opened:
        yield opened


@cache
def window_of_text(number: int) -> bytes:
    """It compresses; no two are alike."""
    return small_store.text(WINDOW_BYTES, number)


class Memory:
    """A file of text, in windows that are there already.

    `wait` is called before each is given, and before the end is told.
    """

    def __init__(self, windows: int, wait: Callable[[int], None] = lambda number: None) -> None:
        self.content = b"".join(map(window_of_text, range(windows)))
        self.stopped = threading.Event()
        self._wait = wait
        opened = OpenFile(NAME, PAGES)
        self._ahead = []
        for i in range(windows):
            buffer, at = Buffer(), i * WINDOW_BYTES
            buffer.window(WINDOW_BYTES)[:] = self.content[at : at + WINDOW_BYTES]
            final = i + 1 == windows
            self._ahead.append(Window(i, opened, at, WINDOW_BYTES, final, buffer, True))
        self._ahead.reverse()

    def take(self, buffer: Buffer) -> Window | Group | None:
        """See Windows."""
        self._wait(len(self.content) // WINDOW_BYTES - len(self._ahead))
        if self.stopped.is_set():
            raise CriuFailed("the dump was given up", "")
        return self._ahead.pop() if self._ahead else None

    def stop(self) -> None:
        """See Windows."""
        self.stopped.set()

    def entry(self) -> ImageFile:
        """What the manifest says of it."""
        return ImageFile(NAME, FileKind.REGULAR, 0o600, 0, 0, 0, len(self.content))


def finished(ingest: Ingest, source: Memory) -> Durable:
    """Runs it to the end and publishes the image as `x`."""
    ingest.run(source)
    image = ingest.finish([source.entry()], {}, {})
    ingest.commit(image, parse_name("x"))
    return image


def check_content(store: LocalStore, image: Durable, source: Memory) -> None:
    """It is exact. (To show megabytes that differ takes minutes.)"""
    same = small_store.exported(store, image.id) == {NAME: source.content}
    assert same


def codecs(store: LocalStore, image: Durable) -> set[int]:
    """How its blocks are stored."""
    return {where.codec for where in store.catalog.locations(image.manifest.block_ids())}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_fast_source_is_not_held_up(store: LocalStore, workers: int) -> None:
    """Not by coding: what is stored so is the same image all the same."""
    source = Memory(WINDOWS * workers)
    ingest = Ingest(store, IngestOptions("balanced", workers, hurry=True))
    image = finished(ingest, source)
    assert ingest.hurried
    assert codecs(store, image) & {Codec.RAW, Codec.LZ4}
    check_content(store, image, source)
    unhurried = Ingest(store, IngestOptions("balanced", workers))
    assert finished(unhurried, Memory(WINDOWS * workers)).id == image.id


def test_blocks_are_lz4_while_the_disk_is_behind(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer bytes for it; else they are stored as they are."""
    monkeypatch.setattr(PackWriter, "disk_is_behind", True)
    source = Memory(WINDOWS)
    ingest = Ingest(store, IngestOptions("balanced", 1, hurry=True))
    image = finished(ingest, source)
    assert ingest.hurried
    # At the end nobody hurries any more.
    assert {Codec.LZ4} <= codecs(store, image) <= {Codec.LZ4, Codec.ZSTD}
    check_content(store, image, source)


def test_the_disk_is_behind_when_packs_wait_for_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    publish = PackWriter._publish

    def slowly(self: PackWriter, *arguments: object) -> object:
        free.wait(PATIENCE)
        return publish(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PackWriter, "_publish", slowly)
    writer = PackWriter(store.layout, target_bytes=1)
    assert not writer.disk_is_behind
    try:
        for i in range(3):
            raw = b"block %d" % i
            assert writer.disk_is_behind == (i > 1)
            writer.append([StoredBlock(block_id(raw), Kind.DATA, Codec.RAW, len(raw), raw)])
        assert writer.disk_is_behind
    finally:
        free.set()
    assert len(writer.finish()) == 3
    assert not writer.disk_is_behind


@pytest.mark.parametrize("hurry", [True, False])
def test_nobody_hurries_for_a_slow_source(store: LocalStore, hurry: bool) -> None:
    """One thread codes, one waits for the source, and one for its turn to do so."""
    check_slow(store, workers=2, hurry=hurry)


def test_nobody_hurries_for_a_slow_source_on_one_core(store: LocalStore) -> None:
    """One thread codes and the other waits for the source: no coding holds that up."""
    check_slow(store, workers=1, hurry=True)


def test_nobody_hurries_when_all_has_been_read(store: LocalStore) -> None:
    """Threads that have found the end are not busy."""
    source = Unread()
    ingest = Ingest(store, IngestOptions("balanced", 2, hurry=True))
    image = finished(ingest, source)
    assert not ingest.hurried
    assert codecs(store, image) == {Codec.ZSTD}
    check_content(store, image, source)


class Unread(Memory):
    """One window, which can only be read when two other threads have come for more."""

    sequential = False

    def __init__(self) -> None:
        super().__init__(1)
        (window,) = self._ahead
        window.open.source = self
        self._ahead = [replace(window, read=False)]
        self._others = threading.Semaphore(0)

    def take(self, buffer: Buffer) -> Window | Group | None:
        """See Windows."""
        piece = super().take(buffer)
        if piece is None:
            self._others.release()
        return piece

    def is_hole(self, offset: int, length: int) -> bool:
        """See ByteSource."""
        return False

    def read_into(self, offset: int, view: memoryview) -> None:
        """See ByteSource."""
        for _ in range(2):
            assert self._others.acquire(timeout=PATIENCE)
        time.sleep(A_WHILE)
        view[:] = self.content

    def close(self) -> None:
        """See ByteSource."""


def check_slow(store: LocalStore, workers: int, hurry: bool) -> None:
    """A window, and the end, comes when all before are stored and everybody waits."""
    stored = [0]

    def progress(count: int) -> None:
        stored[0] += count

    def wait(number: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while stored[0] < number * WINDOW_BYTES and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(A_WHILE)

    source = Memory(4, wait)
    ingest = Ingest(store, IngestOptions("balanced", workers, hurry=hurry), progress)
    image = finished(ingest, source)
    assert not ingest.hurried
    assert codecs(store, image) == {Codec.ZSTD}
    check_content(store, image, source)


def test_who_does_not_hurry_keeps_the_policy(store: LocalStore) -> None:
    """However fast the source is."""
    ingest = Ingest(store, IngestOptions("balanced", 2))
    assert codecs(store, finished(ingest, Memory(WINDOWS))) == {Codec.ZSTD}
    assert not ingest.hurried


# --- errors -------------------------------------------------------------------------------------


class Broken(Exception):
    """What a worker fails with."""


class Waiting(Memory):
    """A source that has nothing more after some windows, and waits until it is stopped."""

    def __init__(self, windows: int) -> None:
        super().__init__(windows + 1, self._until_stopped)
        self._windows = windows

    def _until_stopped(self, number: int) -> None:
        if number >= self._windows:
            assert self.stopped.wait(PATIENCE), "nobody has stopped it"


def in_time(work: Callable[[], None]) -> "Future[None]":
    """Does it in a thread of its own, and waits for no more than a time."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="in time", daemon=True).start()
    future.exception(PATIENCE)
    return future


def leaves_nothing(store: LocalStore, ingest: Ingest) -> None:
    """Given up, it has published nothing, and no thread of it goes on."""
    ingest.abort()
    assert store.catalog.names() == {} and not list(store.catalog.images())
    assert not list(store.layout.published()) and staging_leftovers(store.layout) == []
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("ingest", "publish"))]


@pytest.mark.parametrize("hurry", [True, False])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_worker_that_fails_stops_the_source(store: LocalStore, hurry: bool, number: int) -> None:
    """The others wait for it, or for their turn; what failed is the error of all."""
    seen = [0]

    def progress(count: int) -> None:
        seen[0] += 1
        if seen[0] > number:
            raise Broken

    source = Waiting(5)
    ingest = Ingest(store, IngestOptions("fast", 3, hurry=hurry), progress)
    with pytest.raises(Broken):
        in_time(lambda: ingest.run(source)).result(0)
    assert source.stopped.is_set()
    leaves_nothing(store, ingest)


class Choosy:
    """Small files without end, until a thread of the name `for_whom` has got one; then nothing
    more for anybody."""

    def __init__(self, for_whom: str) -> None:
        self.stopped = threading.Event()
        self._for_whom = for_whom
        self._given = 0
        self._done = False

    def take(self, buffer: Buffer) -> Window | Group | None:
        """See Windows."""
        if self._done:
            assert self.stopped.wait(PATIENCE), "nobody has stopped it"
        if self.stopped.is_set():
            raise CriuFailed("the dump was given up", "")
        self._done = threading.current_thread().name == self._for_whom
        self._given += 1
        name = f"core-{self._given}.img"
        return Group(self._given - 1, [(name, len(name))], name.encode())

    def stop(self) -> None:
        """See Windows."""
        self.stopped.set()


@pytest.mark.parametrize("which", [0, 1])
def test_what_failed_is_what_is_told(store: LocalStore, which: int) -> None:
    """Whichever thread it was; not that the other was stopped in its waiting for it.

    "The dump was given up" would say nothing of a full disk.
    """
    name = f"ingest_{which}"

    def progress(count: int) -> None:
        if threading.current_thread().name == name:
            raise Broken

    ingest = Ingest(store, IngestOptions("fast", 2), progress)
    source = Choosy(name)
    future = in_time(lambda: ingest.run(source))
    assert source.stopped.is_set()
    leaves_nothing(store, ingest)
    assert repr(future.exception(0)) == repr(Broken())


def test_a_disk_that_is_full(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the disk, with the source full of windows."""

    def refuse(self: PackWriter, blocks: object) -> None:
        raise Broken

    monkeypatch.setattr(PackWriter, "append", refuse)
    source = Memory(WINDOWS)
    ingest = Ingest(store, IngestOptions("fast", 2, hurry=True))
    with pytest.raises(Broken):
        in_time(lambda: ingest.run(source)).result(0)
    assert source.stopped.is_set()
    leaves_nothing(store, ingest)


def test_a_source_that_fails(store: LocalStore) -> None:
    """Windows were stored already."""
    fatal = random.Random(1).randrange(2, 5)

    def wait(number: int) -> None:
        if number == fatal:
            raise Broken

    ingest = Ingest(store, IngestOptions("fast", 2, hurry=True))
    source = Memory(5, wait)
    with pytest.raises(Broken):
        in_time(lambda: ingest.run(source)).result(0)
    leaves_nothing(store, ingest)


def test_given_up_when_all_was_stored(store: LocalStore) -> None:
    """Packs may be published then, which gc removes; the image is not."""
    ingest = Ingest(store, IngestOptions("fast", 2, hurry=True))
    source = Memory(2)
    ingest.run(source)
    ingest.finish([source.entry()], {}, {})
    ingest.abort()
    assert store.catalog.names() == {} and not list(store.catalog.images())
    assert staging_leftovers(store.layout) == []
