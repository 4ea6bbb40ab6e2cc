"""`add`: reads a checkpoint, cuts it, stores what is new, commits.

Worker threads take windows in order. Reading, scanning, hashing and compressing run side by side;
two things happen in the order of the windows: cutting, because a block may reach over a window's
end, and appending to packs, so that a pack holds blocks in image order. Memory is bounded by the
number of workers, not by the size of the image.
"""

import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icefloe.capture import allocator
from icefloe.capture.assembly import Assembly
from icefloe.capture.source import Checkpoint
from icefloe.capture.tree import Tree
from icefloe.capture.windows import WINDOW_BYTES, Group, Window, windows
from icefloe.catalog import LocalStore
from icefloe.chunker import MAX_BLOCK, Marks, scan
from icefloe.chunker.grains import MIN_ZERO_RUN
from icefloe.errors import BadSource, CorruptManifest, SourceUnreadable
from icefloe.ids import BlockId, Name, block_id
from icefloe.store import manifest as manifests
from icefloe.store.codecs import Encoder, PolicyName
from icefloe.store.manifest import ImageFile, Manifest
from icefloe.store.pack import Kind, StoredBlock
from icefloe.store.writer import PackWriter

# What a window may leave undecided for the next one (see CutStream.pending).
_CARRY_BYTES = MAX_BLOCK + MIN_ZERO_RUN

# More threads than this would only wait for the interpreter and for each other.
_MAX_WORKERS = 16


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """How to store. `workers` 0 means one a core."""

    policy: PolicyName = "balanced"
    workers: int = 0


@dataclass(frozen=True, slots=True)
class AddResult:
    """What `add` did. Bytes; `stored_bytes` is what the packs grew by."""

    id: BlockId
    logical_bytes: int
    zero_bytes: int
    new_bytes: int
    stored_bytes: int
    blocks: int
    new_blocks: int
    replaced: BlockId | None
    """The image that the name pointed at before; it stays, without that name."""


Progress = Callable[[int], None]
"""Called with bytes read since the last call, from any thread."""


def open_checkpoint(path: Path) -> Checkpoint:
    """A directory or an archive. Raises SourceUnreadable, SourceChanged or BadSource."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        raise SourceUnreadable(path, error.strerror or str(error)) from error
    if is_folder:
        return Tree(path)
    from icefloe.capture.archive import Archive  # loads tarfile and four decompressors

    return Archive(path)


def add_checkpoint(
    store: LocalStore,
    checkpoint: Checkpoint,
    name: Name,
    labels: Mapping[str, str],
    options: IngestOptions,
    progress: Progress = lambda count: None,
) -> AddResult:
    """Stores a checkpoint under a name. Nothing is published unless all of it is.

    Raises SourceUnreadable, SourceChanged, BadSource, NoSpace, NotWritable or LimitReached.
    """
    allocator.keep_freed()
    ingest = _Ingest(store, options, progress)
    try:
        ingest.run(checkpoint)
        checkpoint.verify()
        allocator.give_back()
        manifest = ingest.assembly.manifest(ingest.entries, labels)
        return _commit(store, ingest, manifest, name)
    except BaseException:
        ingest.writer.abort()
        raise


def _commit(store: LocalStore, ingest: "_Ingest", manifest: Manifest, name: Name) -> AddResult:
    encoded = manifests.encode(manifest)
    try:
        manifests.decode(encoded)
    except CorruptManifest as error:
        raise BadSource(
            f"this checkpoint can't be an image ({error.reason})", "make the archive anew"
        ) from error
    identity = block_id(encoded)
    if not store.catalog.known([identity])[0]:
        coded = Encoder("balanced").encode(memoryview(encoded))
        block = StoredBlock(identity, Kind.MANIFEST, coded.codec, len(encoded), coded.payload)
        ingest.writer.append([block])
    packs = ingest.writer.finish()
    before = store.catalog.named(name)
    is_new = store.catalog.image(identity) is None
    store.commit(
        "add",
        packs_added=tuple(packs),
        images_added=(identity,) if is_new else (),
        names={str(name): identity},
    )
    return AddResult(
        id=identity,
        logical_bytes=manifest.logical_bytes,
        zero_bytes=manifest.zero_bytes,
        new_bytes=ingest.new_bytes,
        stored_bytes=ingest.writer.stored_bytes,
        blocks=len(manifest.blocks),
        new_blocks=ingest.new_blocks,
        replaced=before if before != identity else None,
    )


@dataclass(frozen=True, slots=True)
class _Extent:
    """The next `length` bytes of a file; `block` is a number of the assembly, None for zero."""

    length: int
    block: int | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Done:
    """A window that was read, cut and coded. Payloads may lie in its thread's buffer."""

    extents: list[_Extent]
    blocks: list[StoredBlock]


class _Turns:
    """Lets threads through in the order of their numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._failed = False
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._next == number)
            if self._failed:
                raise _Stopped
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class _Stopped(Exception):
    """Another thread failed; its error is the one to report."""


class _Buffer:
    """A window with room for what the window before it left undecided, in front."""

    def __init__(self) -> None:
        self.bytes = memoryview(mmap.mmap(-1, _CARRY_BYTES + WINDOW_BYTES))
        self.array = np.frombuffer(self.bytes, np.uint8)

    def window(self, length: int) -> memoryview:
        return self.bytes[_CARRY_BYTES : _CARRY_BYTES + length]


class _Ingest:
    """One checkpoint on its way into packs."""

    def __init__(self, store: LocalStore, options: IngestOptions, progress: Progress) -> None:
        self.assembly = Assembly()
        self.entries: list[ImageFile] = []
        self.writer = PackWriter(store.layout)
        self.new_bytes = 0
        self.new_blocks = 0
        self._catalog = store.catalog
        self._policy: PolicyName = options.policy
        self._workers = min(options.workers or os.cpu_count() or 1, _MAX_WORKERS)
        self._progress = progress
        self._reading = threading.Lock()
        self._claiming = threading.Lock()
        self._cutting = _Turns()
        self._appending = _Turns()
        self._carry = b""

    def run(self, checkpoint: Checkpoint) -> None:
        """Reads all of it; raises the first error of any thread."""
        source = windows(checkpoint, self.entries)
        with ThreadPoolExecutor(self._workers, "add") as pool:
            futures = [pool.submit(self._work, source) for _ in range(self._workers)]
            try:
                errors = [error for f in futures if (error := f.exception()) is not None]
            except BaseException:  # an interrupt, while waiting
                self._stop()
                raise
        real = [error for error in errors if not isinstance(error, _Stopped)]
        if real:
            raise real[0]

    def _stop(self) -> None:
        self._cutting.fail()
        self._appending.fail()

    def _work(self, source: Iterator[Window | Group]) -> None:
        try:
            buffer, encoder = _Buffer(), Encoder(self._policy)
            while (window := self._next(source, buffer)) is not None:
                if isinstance(window, Group):
                    self._do_group(window, encoder)
                else:
                    self._do_window(window, buffer, encoder)
        except BaseException:
            self._stop()
            raise

    def _next(self, source: Iterator[Window | Group], buffer: _Buffer) -> Window | Group | None:
        """The next window; one that must be read in order has been read."""
        with self._reading:
            window = next(source, None)
            if isinstance(window, Window) and window.open.bytes.sequential:
                window.open.bytes.read_into(window.offset, buffer.window(window.length))
            return window

    def _do_group(self, group: Group, encoder: Encoder) -> None:
        with self._cutting.turn(group.sequence):
            pass  # groups are not cut
        (number,), blocks = self._code([memoryview(group.content)], encoder)
        with self._appending.turn(group.sequence):
            offset = 0
            for file in group.files:
                extent = _Extent(file.size, number, offset)
                self.assembly.begin(file.path)
                self._append(_Done([extent], []))
                offset += file.size
            self._append(_Done([], blocks))
        self._progress(len(group.content))

    def _do_window(self, window: Window, buffer: _Buffer, encoder: Encoder) -> None:
        marks = self._scan(window, buffer)
        with self._cutting.turn(window.sequence):
            pieces = window.open.cuts.feed(marks, window.final)
            self._carry_over(window, buffer, len(marks.zero))
        size, end = window.open.grain.size, window.open.file.size
        views: list[memoryview] = []
        zero_lengths: dict[int, int] = {}
        for i, piece in enumerate(pieces):
            start, stop = piece.start * size, min(piece.end * size, end)
            if piece.zero:
                zero_lengths[i] = stop - start
            else:
                base = _CARRY_BYTES - window.offset
                views.append(buffer.bytes[base + start : base + stop])
        numbers, blocks = self._code(views, encoder)
        data = iter([_Extent(len(v), n) for v, n in zip(views, numbers, strict=True)])
        extents = [
            _Extent(zero_lengths[i]) if i in zero_lengths else next(data)
            for i in range(len(pieces))
        ]
        with self._appending.turn(window.sequence):
            if window.offset == 0:
                self.assembly.begin(window.open.file.path)
            self._append(_Done(extents, blocks))
            if window.final:
                window.open.bytes.close()
        self._progress(window.length)

    def _scan(self, window: Window, buffer: _Buffer) -> Marks:
        """Reads a window and looks at its grains. A last, partial grain is filled with zeros."""
        size = window.open.grain.size
        padded = -(-window.length // size) * size
        view = buffer.window(padded)
        source = window.open.bytes
        if source.is_hole(window.offset, window.length):
            view[:] = bytes(padded)
            count = padded // size
            return Marks(np.ones(count, np.bool_), np.zeros(count, np.bool_))
        if not source.sequential:
            source.read_into(window.offset, view[: window.length])
        view[window.length :] = bytes(padded - window.length)
        return scan(buffer.array[_CARRY_BYTES : _CARRY_BYTES + padded], window.open.grain)

    def _carry_over(self, window: Window, buffer: _Buffer, grains: int) -> None:
        """Puts the rest of the window before in front of this one, and keeps the rest of this."""
        before = self._carry
        buffer.bytes[_CARRY_BYTES - len(before) : _CARRY_BYTES] = before
        end = _CARRY_BYTES + grains * window.open.grain.size
        pending = window.open.cuts.pending * window.open.grain.size
        self._carry = bytes(buffer.bytes[end - pending : end])

    def _code(
        self, raws: list[memoryview], encoder: Encoder
    ) -> tuple[list[int], list[StoredBlock]]:
        """The numbers of all blocks, and the stored form of those that nobody has yet."""
        ids = [block_id(raw) for raw in raws]
        numbers: list[int] = []
        fresh: dict[BlockId, memoryview] = {}
        with self._claiming:
            for identity, raw in zip(ids, raws, strict=True):
                number, is_new = self.assembly.number(identity, len(raw))
                numbers.append(number)
                if is_new:  # this thread takes care of it
                    fresh[identity] = raw
        known = self._catalog.known(list(fresh))
        blocks = []
        for (identity, raw), is_known in zip(fresh.items(), known, strict=True):
            if not is_known:
                coded = encoder.encode(raw)
                block = StoredBlock(identity, Kind.DATA, coded.codec, len(raw), coded.payload)
                blocks.append(block)
        return numbers, blocks

    def _append(self, done: _Done) -> None:
        """Takes the results of a window, in order. Only within a turn."""
        for extent in done.extents:
            if extent.block is None:
                self.assembly.add_zero(extent.length)
            else:
                self.assembly.add(extent.block, extent.offset, extent.length)
        if done.blocks:
            self.writer.append(done.blocks)
            self.new_blocks += len(done.blocks)
            self.new_bytes += sum(block.raw_length for block in done.blocks)
