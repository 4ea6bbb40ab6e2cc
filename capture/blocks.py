"""Where the blocks of an image come from: one small interface, and the local store behind it.

Doors ask for blocks by their number in the manifest, in the order in which they want them, and
don't know whether they lie on this disk or come over a network.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Protocol

import numpy as np

from icefloe.capture.fillers import Fillers, start_fillers
from icefloe.catalog import LocalStore
from icefloe.durable import Buffer
from icefloe.errors import CorruptCatalog
from icefloe.ids import BlockId, PackId
from icefloe.store.manifest import ZERO, Extents, Manifest
from icefloe.store.pack import open_pack
from icefloe.store.reader import BlockReader, Location

# Blocks that are asked for at once: enough for long reads.
BATCH = 64

# Rows of a table that become Python's at once.
_ROWS = 1024

# Zeros are handed out in pieces of at most this many bytes.
_ZEROS = memoryview(bytes(1 << 20))


Batch = Sequence[tuple[int, Buffer]]
"""Blocks by their numbers: raw bytes, verified, valid until the next batch is asked for."""


class Blocks(Protocol):
    """One thread's way to the blocks."""

    def fetch(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """The blocks with these numbers, in this order, as many at a time as there are.

        Raises Corrupt.
        """

    def fetch_any(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """The same in any order, roughly this one: each as soon as it is there."""

    def close(self) -> None:
        """Gives back what was opened."""


class BlockSource(Protocol):
    """The blocks of one image."""

    def open(self) -> Blocks:
        """For the calling thread alone."""


class ImageSource(BlockSource, Protocol):
    """The blocks of an image that is being restored."""

    @property
    def servers(self) -> int:
        """How many faults at a time are worth waiting for."""

    def fillers(self, count: int) -> Fillers:
        """Processes that read the blocks from packs; none where only we can get at them."""

    def locate(self, numbers: Sequence[int]) -> Sequence[Location]:
        """Where blocks lie, for those processes."""

    def let_go(self) -> None:
        """From here on, the store is free for others. Raises Corrupt."""

    def give_up(self) -> None:
        """Whoever waits for a block that isn't here gets an error."""

    def close(self) -> None:
        """Gives back what was opened."""


class StoreSource:
    """The blocks of an image in the local store. See ImageSource."""

    servers = 1

    def __init__(self, store: LocalStore, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._pinned: dict[int, Location] | None = None
        self._descriptors: dict[PackId, int] = {}

    def open(self) -> "StoreBlocks":
        """See BlockSource."""
        return StoreBlocks(self, BlockReader(self._store.layout, self._descriptors))

    def fillers(self, count: int) -> Fillers:
        """See ImageSource."""
        return start_fillers(self._store.layout, count)

    def let_go(self) -> None:
        """See ImageSource."""
        self.pin(range(len(self._manifest.blocks)))
        self._store.close()

    def give_up(self) -> None:
        """See ImageSource: all blocks are here."""

    def pin(self, numbers: Sequence[int]) -> None:
        """Of these blocks, what is read may even be removed from the store. Raises Corrupt.

        Keeps every pack of them open.
        """
        located = self.locate(numbers)
        for pack in {location.pack for location in located}:
            self._descriptors[pack] = open_pack(self._store.layout.pack(pack))
        self._pinned = dict(zip(numbers, located, strict=True))

    def close(self) -> None:
        """Closes what `pin` opened."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def locate(self, numbers: Sequence[int]) -> list[Location]:
        """Where these blocks lie. Raises CorruptCatalog."""
        if self._pinned is not None:
            return [self._pinned[number] for number in numbers]
        rows = self._manifest.blocks[np.asarray(numbers, np.int64)]
        joined = rows["id"].tobytes()
        ids = [BlockId(joined[i : i + 32]) for i in range(0, len(joined), 32)]
        located = self._store.catalog.locations(ids)
        # The manifest's lengths bound what an extent reads; the catalog's must be the same.
        for location, length in zip(located, rows["length"].tolist(), strict=True):
            if location.raw != length:
                reason = f"block {location.id.hex()} has {location.raw} bytes instead of {length}"
                raise CorruptCatalog(self._store.layout.catalog, reason)
        return located


class StoreBlocks:
    """See Blocks."""

    def __init__(self, source: StoreSource, reader: BlockReader) -> None:
        self._source = source
        self._reader = reader

    def fetch(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """See Blocks."""
        numbers = iter(numbers)
        while part := list(islice(numbers, BATCH)):
            left = iter(part)
            for raws in self._reader.read_batches(self._source.locate(part)):
                yield list(zip(islice(left, len(raws)), raws, strict=True))

    def fetch_any(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """See Blocks."""
        return self.fetch(numbers)

    def close(self) -> None:
        """See Blocks."""
        self._reader.close()


def read_extents(blocks: Blocks, extents: Extents) -> Iterator[tuple[Buffer | None, int]]:
    """The bytes that extents stand for, one after the other: (bytes, length), None for zeros.

    Blocks that are used in turns, as page-exact deduplication leaves them, are decoded once for
    every BATCH of blocks.
    """
    for part in _parts(extents):
        uses = Counter(block for block, _ in groupby(block for block, _, _ in part))
        uses.pop(ZERO, None)
        fetched = chain.from_iterable(blocks.fetch(list(uses)))
        kept: dict[int, memoryview] = {}
        for block, run in groupby(part, key=itemgetter(0)):
            if block == ZERO:
                yield from ((None, length) for _, _, length in run)
                continue
            raw = kept.get(block)
            if raw is None:
                raw = memoryview(next(fetched)[1])
            uses[block] -= 1
            if uses[block] and block not in kept:
                raw = kept[block] = memoryview(bytes(raw))
            elif not uses[block]:
                kept.pop(block, None)
            yield from ((raw[offset : offset + length], length) for _, offset, length in run)


def _parts(extents: Extents) -> Iterator[list[tuple[int, int, int]]]:
    """Stretches of extents of at most BATCH blocks, as tuples."""
    part: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    for first in range(0, len(extents), _ROWS):
        for row in extents[first : first + _ROWS].tolist():
            seen.add(row[0])
            if len(seen) > BATCH:
                yield part
                part, seen = [], {row[0]}
            part.append(row)
    if part:
        yield part


def with_zeros(pieces: Iterator[tuple[Buffer | None, int]]) -> Iterator[Buffer]:
    """What `read_extents` yields, with the zeros written out."""
    for piece, length in pieces:
        if piece is not None:
            yield piece
            continue
        for start in range(0, length, len(_ZEROS)):
            yield _ZEROS[: length - start]
