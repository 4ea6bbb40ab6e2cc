"""Codes blocks anew that were stored in a hurry.

While a process is frozen, blocks are stored raw or with lz4 when the codec can't keep up
(capture/ingest.py). When it runs on, their packs are written anew by the store's policy. The
order is that of a collection: new packs, commit, and only then the old ones go.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from icefloe.catalog import LocalStore, PackRow
from icefloe.gc.sweep import PACKS_AT_ONCE, BlockRow, Replacement, blocks_of, replacing
from icefloe.ids import PackId
from icefloe.store.codecs import Codec, Encoder, PolicyName
from icefloe.store.pack import StoredBlock
from icefloe.store.reader import BlockReader
from icefloe.workers import worker_count

# Writing a pack anew costs as much as writing it did: not for less than this. Nor for nothing: a
# pack that holds the same has the same id, and would be unlinked with the old one.
_WORTH = 0.02

# What a thread codes at a time: enough that handing it out doesn't show.
_BLOCKS_AT_ONCE = 8

_HASTY = (Codec.RAW, Codec.LZ4)


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
    freed = 0
    for first in range(0, len(rows), PACKS_AT_ONCE):
        freed += _recompress(store, rows[first : first + PACKS_AT_ONCE], policy, workers)
    return freed


def _recompress(
    store: LocalStore, packs: Sequence[PackRow], policy: PolicyName, workers: int
) -> int:
    """Codes packs anew in one change. Returns the bytes freed."""
    # The disk gets an old pack back only when no coder has it open: they don't outlive the change.
    with _Coders(store, policy, workers) as coders, replacing(store) as replacement:
        for pack in packs:
            held = blocks_of(store, pack)
            if any(block.where.codec in _HASTY for block in held):
                _replace(pack.id, held, coders, replacement)
    return replacement.freed_bytes


def _replace(
    pack: PackId, held: Sequence[BlockRow], coders: "_Coders", replacement: Replacement
) -> None:
    """Writes what a pack holds anew, if it shrinks enough. Nothing is written before that."""
    coded = coders.code(held)
    before = sum(block.where.stored for block in held)
    after = sum(len(block.payload) for block in coded)
    if before - after >= _WORTH * before:
        replacement.packs.append(pack)
        replacement.writer.append(coded)


class _Coders:
    """Threads that code, each with a reader and an encoder of its own."""

    def __init__(self, store: LocalStore, policy: PolicyName, workers: int) -> None:
        self._store = store
        self._policy: PolicyName = policy
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
            coded = encoder.encode(memoryview(raw)) if where.codec in _HASTY else None
            if coded is not None and len(coded.payload) < where.stored:
                result.append(block.stored(coded.codec, coded.payload))
            else:
                result.append(block.stored(Codec(where.codec), bytes(payload)))
        return result

    def _tools(self) -> tuple[BlockReader, Encoder]:
        if not hasattr(self._own, "reader"):
            self._own.reader = BlockReader(self._store.layout)
            self._own.encoder = Encoder(self._policy)
            self._readers.append(self._own.reader)
        return self._own.reader, self._own.encoder
