"""Codes blocks anew: those that were stored in a hurry, or all by another policy.

While a process is frozen, blocks are stored raw or with lz4 when the codec can't keep up
(capture/ingest.py). When it runs on, their packs are written anew by the store's policy. The
order is that of a collection: new packs, commit, and only then the old ones go.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from icefloe.catalog import LocalStore, PackRow
from icefloe.gc.sweep import PACKS_AT_ONCE, BlockRow, Replacement, blocks_of, replacing
from icefloe.ids import PackId
from icefloe.store.codecs import Codec, Encoded, Encoder
from icefloe.store.pack import StoredBlock
from icefloe.store.policies import POLICIES, PolicyName
from icefloe.store.reader import BlockReader
from icefloe.workers import worker_count

# Writing a pack anew costs as much as writing it did: not for less than this. Nor for nothing: a
# pack that holds the same has the same id, and would be unlinked with the old one.
_WORTH = 0.02

# What a thread codes at a time: enough that handing it out doesn't show.
_BLOCKS_AT_ONCE = 8

_HASTY = frozenset((Codec.RAW, Codec.LZ4))


Progress = Callable[[int], object]


def recompress(
    store: LocalStore, packs: Sequence[PackId], policy: PolicyName, workers: int = 0
) -> int:
    """Codes the raw and lz4 blocks of these packs by a policy, where that makes them smaller.

    `workers` 0 means one a core; a pack at a time is in memory. Needs the store open for writing.
    Returns the bytes that the packs shrank by. Raises Corrupt, NoSpace or NotWritable; what
    was not replaced by then stays as it is.
    """
    wanted = set(packs)
    rows = [row for row in store.catalog.packs() if row.id in wanted]
    return _recompress(store, rows, _Task(policy, _HASTY, quicker=False), workers, lambda _: None)


def repack(store: LocalStore, policy: PolicyName, workers: int, progress: Progress) -> int:
    """Codes every block by a policy. Otherwise like `recompress`.

    A block changes where that makes it smaller; by `fast`, also where it is decoded sooner then,
    and the packs may grow. `progress` hears of stored bytes that were looked at.
    """
    quick = POLICIES[policy].zstd is None
    codecs = frozenset(Codec) - _HASTY if quick else frozenset(Codec)
    task = _Task(policy, codecs, quicker=quick)
    return _recompress(store, list(store.catalog.packs()), task, workers, progress)


@dataclass(frozen=True, slots=True)
class _Task:
    """Blocks of these codecs are coded by the policy: where they get smaller, or `quicker` anyway.

    A codec counts as quick that is no more than a copy.
    """

    policy: PolicyName
    codecs: frozenset[Codec]
    quicker: bool

    def prefers(self, coded: Encoded, stored: int) -> bool:
        """Whether a block is better off than with so many bytes stored."""
        return len(coded.payload) < stored or (self.quicker and coded.codec in _HASTY)


def _recompress(
    store: LocalStore, packs: Sequence[PackRow], task: _Task, workers: int, progress: Progress
) -> int:
    """Codes packs anew, some in one change. Returns the bytes freed."""
    freed = 0
    for first in range(0, len(packs), PACKS_AT_ONCE):
        # The disk gets an old pack back only when no coder has it open: they end with the change.
        with _Coders(store, task, workers) as coders, replacing(store) as replacement:
            for pack in packs[first : first + PACKS_AT_ONCE]:
                held = blocks_of(store, pack)
                if any(block.where.codec in task.codecs for block in held):
                    _replace(pack.id, held, task, coders, replacement)
                progress(pack.bytes)
        freed += replacement.freed_bytes
    return freed


def _replace(
    pack: PackId,
    held: Sequence[BlockRow],
    task: _Task,
    coders: "_Coders",
    replacement: Replacement,
) -> None:
    """Writes what a pack holds anew, if that is worth it. Nothing is written before that."""
    coded = coders.code(held)
    before = sum(block.where.stored for block in held)
    after = sum(len(block.payload) for block in coded)
    if task.quicker or before - after >= _WORTH * before:
        replacement.packs.append(pack)
        replacement.writer.append(coded)


class _Coders:
    """Threads that code, each with a reader and an encoder of its own."""

    def __init__(self, store: LocalStore, task: _Task, workers: int) -> None:
        self._store = store
        self._task = task
        self._own = threading.local()
        self._readers: list[BlockReader] = []
        self._pool = ThreadPoolExecutor(worker_count(workers), "code")

    def __enter__(self) -> "_Coders":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for reader in self._readers:
            reader.close()

    def code(self, blocks: Sequence[BlockRow]) -> list[StoredBlock]:
        """The blocks of a pack in their order, as small as they get. Raises CorruptBlock."""
        parts = [blocks[i : i + _BLOCKS_AT_ONCE] for i in range(0, len(blocks), _BLOCKS_AT_ONCE)]
        return [block for part in self._pool.map(self._code, parts) for block in part]

    def _code(self, blocks: Sequence[BlockRow]) -> list[StoredBlock]:
        reader, encoder = self._tools()
        result = []
        stored = reader.read_stored([block.where for block in blocks])
        for block, (payload, raw) in zip(blocks, stored, strict=True):
            where = block.where
            if where.codec in self._task.codecs:
                coded = encoder.encode(memoryview(raw))
                if self._task.prefers(coded, where.stored):
                    # One that is stored as it is lies in the reader's buffer.
                    result.append(block.stored(coded.codec, bytes(coded.payload)))
                    continue
            result.append(block.stored(Codec(where.codec), bytes(payload)))
        return result

    def _tools(self) -> tuple[BlockReader, Encoder]:
        if not hasattr(self._own, "reader"):
            self._own.reader = BlockReader(self._store.layout)
            self._own.encoder = Encoder(self._task.policy)
            self._readers.append(self._own.reader)
        return self._own.reader, self._own.encoder
