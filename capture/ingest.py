"""Cuts a checkpoint, stores what is new, commits: what `add` and `capture` have in common.

Worker threads take windows in order. Reading, scanning, hashing and compressing run side by side;
two things happen in the order of the windows: cutting, because a block may reach over a window's
end, and appending to packs, so that a pack holds blocks in image order. Memory is bounded by the
number of workers, not by the size of the image.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from icefloe import allocator
from icefloe.capture import exact
from icefloe.capture.assembly import Assembly
from icefloe.capture.blocks import Blocks
from icefloe.capture.exact import Run, View
from icefloe.capture.kin import Hooks, Kin, hooks_of
from icefloe.capture.parent import NOWHERE, Parent, ParentChoice
from icefloe.capture.windows import CARRY_BYTES, Buffer, Group, OpenFile, Window, Windows
from icefloe.catalog import LocalStore
from icefloe.chunker import PAGES, Marks, scan
from icefloe.errors import BadSource, CorruptManifest
from icefloe.ids import BlockId, Name, PackId, block_id
from icefloe.store import manifest as manifests
from icefloe.store.codecs import Encoded, Encoder, as_it_is
from icefloe.store.manifest import EXTENT_DTYPE, Extents, ImageFile, Manifest
from icefloe.store.pack import Kind, StoredBlock
from icefloe.store.policies import PolicyName
from icefloe.store.writer import PackWriter
from icefloe.workers import worker_count

# Workers of a capture, if nobody says how many. CRIU's pipe delivers no more than they can take,
# and more of them wait for one another to run Python: 4 took 5.9 s for 21 GB, 16 took 7.3 to 8.9.
_HURRIED = 4


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """How to store. `workers` 0 means one a core. `pages`: patterns of files that hold memory.

    `hurry`: somebody waits for the reading; when all workers are busy, blocks are stored raw or
    with lz4, whatever the policy says. `parent`: what is unknown is compared with this image, page
    by page, instead of with the latest one of the same name; "none" with none.
    """

    policy: PolicyName = "balanced"
    workers: int = 0
    pages: tuple[str, ...] = ()
    hurry: bool = False
    parent: ParentChoice = None


@dataclass(frozen=True, slots=True)
class AddResult:
    """What was stored. Bytes; `stored_bytes` is what the packs grew by."""

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


@dataclass(frozen=True, slots=True)
class Durable:
    """An image whose packs are on the disk, and that nobody knows of yet."""

    id: BlockId
    manifest: Manifest


@dataclass(slots=True)
class _Worker:
    """What a thread has to itself."""

    buffer: Buffer
    encoder: Encoder
    quick: Encoder
    parents: dict[Parent, Blocks] = field(default_factory=dict)

    def blocks_of(self, parent: Parent) -> Blocks:
        """Its own way to the blocks of a parent."""
        if parent not in self.parents:
            self.parents[parent] = parent.source.open()
        return self.parents[parent]


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


class Ingest:
    """One checkpoint on its way into packs: `run`, `finish`, `commit`, or else `abort`."""

    def __init__(
        self,
        store: LocalStore,
        options: IngestOptions,
        progress: Progress = lambda count: None,
        parent: Parent | None = None,
    ) -> None:
        """`parent`: the image that it is likely to be like."""
        allocator.keep_freed()
        self.hurried = False
        """Blocks were stored in another way than the policy says."""
        self.packs: Sequence[PackId] = ()
        """What was written, once that is finished."""
        self._store = store
        self._assembly = Assembly()
        self._kin = Kin(store, parent, searches=options.parent is None)
        self._writer = PackWriter(store.layout)
        self._new_bytes = 0
        self._new_blocks = 0
        self._policy: PolicyName = options.policy
        self._hurry = options.hurry
        self._cores = worker_count(options.workers)
        if options.hurry and not options.workers:
            self._cores = min(self._cores, _HURRIED)
        # One waits for what comes next while the others work.
        self._workers = self._cores + options.hurry
        self._progress = progress
        self._reading = threading.Lock()
        self._counting = threading.Lock()
        self._failure: BaseException | None = None
        self._busy = 0  # workers that don't wait for something to do
        self._all_read = False
        self._claiming = threading.Lock()
        self._cutting = _Turns()
        self._appending = _Turns()

    def run(self, source: Windows) -> None:
        """Reads all of it; raises the first error of any thread."""
        with ThreadPoolExecutor(self._workers, "ingest") as pool:
            futures = [pool.submit(self._work, source) for _ in range(self._workers)]
            try:
                for future in futures:
                    future.exception()  # waits
            except BaseException:  # an interrupt, while waiting
                self._stop(source)
                raise
        if self._failure is not None:
            raise self._failure

    def _stop(self, source: Windows) -> None:
        source.stop()
        self._cutting.fail()
        self._appending.fail()

    def finish(
        self, entries: Sequence[ImageFile], facts: Mapping[str, Any], labels: Mapping[str, str]
    ) -> Durable:
        """Makes the image of these entries; returns when all of it is on the disk."""
        allocator.give_back()
        manifest = self._assembly.manifest(entries, facts, labels)
        encoded = manifests.encode(manifest)
        try:
            manifests.decode(encoded)
        except CorruptManifest as error:
            raise BadSource(
                f"this checkpoint can't be an image ({error.reason})", "make the archive anew"
            ) from error
        identity = block_id(encoded)
        if not self._store.catalog.known([identity])[0]:
            coded = Encoder("balanced").encode(memoryview(encoded))
            block = StoredBlock(identity, Kind.MANIFEST, coded.codec, len(encoded), coded.payload)
            self._writer.append([block])
        self.packs = self._writer.finish()
        return Durable(identity, manifest)

    def commit(self, image: Durable, name: Name) -> AddResult:
        """Publishes it under a name."""
        catalog = self._store.catalog
        before = catalog.named(name)
        is_new = catalog.image(image.id) is None
        self._store.commit(
            "add",
            packs_added=tuple(self.packs),
            images_added=(image.id,) if is_new else (),
            names={str(name): image.id},
        )
        self._kin.store(image.id, image.manifest)
        return AddResult(
            id=image.id,
            logical_bytes=image.manifest.logical_bytes,
            zero_bytes=image.manifest.zero_bytes,
            new_bytes=self._new_bytes,
            stored_bytes=self._writer.stored_bytes,
            blocks=len(image.manifest.blocks),
            new_blocks=self._new_blocks,
            replaced=before if before != image.id else None,
        )

    def abort(self) -> None:
        """Drops what was not published; what was is left to gc."""
        self._writer.abort()

    def _work(self, source: Windows) -> None:
        try:
            with self._worker() as worker:
                while (window := self._next(source, worker.buffer)) is not None:
                    if isinstance(window, Group):
                        self._do_group(window, worker)
                    else:
                        worker.buffer = window.buffer
                        self._do_window(window, worker)
        except _Stopped:
            pass
        except BaseException as error:
            with self._counting:
                self._failure = self._failure or error
            self._stop(source)

    @contextmanager
    def _worker(self) -> Iterator[_Worker]:
        worker = _Worker(Buffer(), Encoder(self._policy), Encoder("fast"))
        with self._counting:
            self._busy += 1
        try:
            yield worker
        finally:
            for blocks in worker.parents.values():
                blocks.close()

    def _next(self, source: Windows, buffer: Buffer) -> Window | Group | None:
        with self._counting:
            self._busy -= 1
        with self._reading:
            piece = source.take(buffer)
        with self._counting:
            self._busy += 1
            self._all_read |= piece is None
        return piece

    def _encode(self, worker: "_Worker") -> Callable[[memoryview], Encoded]:
        """When all cores but one are busy, which the process's own dump needs, coding would hold
        up the reading. What is not coded at all is fastest, until the disk can't keep up."""
        if not self._hurry or self._all_read or self._busy <= max(1, self._cores - 1):
            return worker.encoder.encode
        self.hurried = True
        return worker.quick.encode if self._writer.disk_is_behind else as_it_is

    def _do_group(self, group: Group, worker: "_Worker") -> None:
        with self._cutting.turn(group.sequence):
            pass  # groups are not cut
        content = memoryview(group.content)
        identity = block_id(content)
        stored = {identity: self._store.catalog.known([identity])[0]}
        (number,), blocks = self._code([identity], [content], stored, worker)
        with self._appending.turn(group.sequence):
            offset = 0
            for path, size in group.files:
                self._assembly.add(path, number, offset, size)
                offset += size
            self._store_blocks(blocks)
        self._progress(len(group.content))

    def _do_window(self, window: Window, worker: "_Worker") -> None:
        marks = self._scan(window)
        with self._cutting.turn(window.sequence):
            pieces = window.open.cuts.feed(marks, window.final)
            self._carry_over(window, len(marks.zero))
        size, end = window.open.grain.size, window.offset + window.length
        views: list[View] = []
        zero_lengths: dict[int, int] = {}
        for i, piece in enumerate(pieces):
            start, stop = piece.start * size, min(piece.end * size, end)
            if piece.zero:
                zero_lengths[i] = stop - start
            else:
                onward = window.buffer.bytes[CARRY_BYTES - window.offset + start :]
                views.append(View(onward[: stop - start], start, onward))
        hooks = None
        if window.open.grain is PAGES:
            hooks = hooks_of(marks, window.offset)
            self._kin.gather(window.open.path, hooks)
        coded, blocks = self._code_views(window.open, views, hooks, worker)
        extents, path = iter(coded), window.open.path
        with self._appending.turn(window.sequence):
            for i in range(len(pieces)):
                if i in zero_lengths:
                    self._assembly.add_zero(path, zero_lengths[i])
                else:
                    self._assembly.add_extents(path, next(extents))
            self._store_blocks(blocks)
            if window.final and window.open.source is not None:
                window.open.source.close()
        self._progress(window.length)

    def _scan(self, window: Window) -> Marks:
        """Reads a window and looks at its grains. A last, partial grain is filled with zeros."""
        size = window.open.grain.size
        padded = -(-window.length // size) * size
        view = window.buffer.window(padded)
        source = window.open.source
        if source is not None and source.is_hole(window.offset, window.length):
            view[:] = bytes(padded)
            count = padded // size
            return Marks(np.ones(count, np.bool_), np.zeros(count, np.bool_))
        if not window.read:
            assert source is not None
            source.read_into(window.offset, view[: window.length])
        view[window.length :] = bytes(padded - window.length)
        return scan(window.buffer.array[CARRY_BYTES : CARRY_BYTES + padded], window.open.grain)

    def _carry_over(self, window: Window, grains: int) -> None:
        """Puts the rest of the window before in front of this one, and keeps the rest of this."""
        file, buffer = window.open, window.buffer.bytes
        buffer[CARRY_BYTES - len(file.carry) : CARRY_BYTES] = file.carry
        end = CARRY_BYTES + grains * file.grain.size
        file.carry = bytes(buffer[end - file.cuts.pending * file.grain.size : end])

    def _code_views(
        self, file: OpenFile, views: Sequence[View], hooks: Hooks | None, worker: "_Worker"
    ) -> tuple[list[Extents], list[StoredBlock]]:
        """The extents of these blocks, and the stored form of what nobody has yet."""
        ids = [block_id(view.raw) for view in views]
        stored = dict(zip(ids, self._store.catalog.known(ids), strict=True))
        parent, runs = self._divide(file, views, ids, stored, hooks, worker)
        rest, places = exact.gather(views, runs)
        divided = {i for run in runs for i in range(run.first, run.last)}
        whole = [i for i in range(len(views)) if i not in divided]
        left_ids = list(map(block_id, rest))
        stored |= zip(left_ids, self._store.catalog.known(left_ids), strict=True)
        every = [ids[i] for i in whole] + left_ids
        numbers, blocks = self._code(every, [views[i].raw for i in whole] + rest, stored, worker)
        # The extents of a run stand for all of its blocks.
        coded = [np.zeros(0, EXTENT_DTYPE)] * len(views)
        for i, number in zip(whole, numbers, strict=False):
            coded[i] = np.array([(number, 0, len(views[i].raw))], EXTENT_DTYPE)
        bases, left = self._number_bases(parent, runs), numbers[len(whole) :]
        for run, place in zip(runs, places, strict=True):
            coded[run.first] = exact.rows(run.pages, place, bases, left)
        return coded, blocks

    def _divide(
        self,
        file: OpenFile,
        views: Sequence[View],
        ids: Sequence[BlockId],
        stored: Mapping[BlockId, bool],
        hooks: Hooks | None,
        worker: "_Worker",
    ) -> tuple[Parent | None, list[Run]]:
        """The blocks that nobody knows and that have pages of a parent, and which parent."""
        if hooks is None or not views:
            return None, []
        with self._claiming:
            known = [stored[identity] or self._assembly.has(identity) for identity in ids]
        found = self._kin.beside(file.path, hooks, all_known=all(known))
        if found is None:
            return None, []
        parent, beside = found
        beside.budget.use(sum(len(v.raw) for v, had in zip(views, known, strict=True) if had))
        if all(known):
            return None, []
        blocks = worker.blocks_of(parent)
        return parent, exact.divide(beside, blocks, views, known, beside.positions(ids))

    def _number_bases(self, parent: Parent | None, runs: Sequence[Run]) -> dict[int, int]:
        """The numbers that the parent's blocks get in this image."""
        if parent is None:
            return {}
        used = {number for run in runs for number in np.unique(run.pages.block).tolist()}
        with self._claiming:
            return {
                number: self._assembly.number(parent.id(number), parent.length(number))[0]
                for number in used - {NOWHERE}
            }

    def _code(
        self,
        ids: Sequence[BlockId],
        raws: Sequence[memoryview],
        stored: Mapping[BlockId, bool],
        worker: "_Worker",
    ) -> tuple[list[int], list[StoredBlock]]:
        """The numbers of all blocks, and the stored form of those that nobody has yet.

        `stored` says which are in the store.
        """
        numbers: list[int] = []
        fresh: dict[BlockId, memoryview] = {}
        with self._claiming:
            for identity, raw in zip(ids, raws, strict=True):
                number, is_new = self._assembly.number(identity, len(raw))
                numbers.append(number)
                if is_new:  # this thread takes care of it
                    fresh[identity] = raw
        blocks = []
        encode = self._encode(worker)
        for identity, raw in fresh.items():
            if not stored[identity]:
                coded = encode(raw)
                block = StoredBlock(identity, Kind.DATA, coded.codec, len(raw), coded.payload)
                blocks.append(block)
        return numbers, blocks

    def _store_blocks(self, blocks: list[StoredBlock]) -> None:
        """Appends blocks to the pack. Only within a turn: payloads may lie in a buffer."""
        if blocks:
            self._writer.append(blocks)
            self._new_blocks += len(blocks)
            self._new_bytes += sum(block.raw_length for block in blocks)
