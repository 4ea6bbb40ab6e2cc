"""Reads blocks out of packs, verified. A reader belongs to one thread.

Neighbours in a pack are read in one go into a buffer that is used again; what is handed out is
valid until the next block is asked for.
"""

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from icefloe.durable import Buffer
from icefloe.errors import CorruptBlock
from icefloe.ids import BlockId, PackId, block_id
from icefloe.store.codecs import Decoder, Undecodable
from icefloe.store.layout import Layout
from icefloe.store.pack import open_pack, reading

# One read of at most this, bridging gaps of at most that: a seek costs more than reading through.
_READ_BYTES = 8 << 20
_MAX_GAP = 256 << 10

_OPEN_PACKS = 8


@dataclass(frozen=True, slots=True)
class Location:
    """Where a block lies. `offset` is that of the payload; lengths in bytes."""

    id: BlockId
    pack: PackId
    offset: int
    stored: int
    raw: int
    codec: int

    @property
    def end(self) -> int:
        return self.offset + self.stored


class BlockReader:
    """Yields the raw bytes of blocks; every one hashes to its id."""

    def __init__(self, layout: Layout, pinned: Mapping[PackId, int] | None = None) -> None:
        """`pinned` are packs that somebody else keeps open, and their descriptors."""
        self._layout = layout
        self._pinned = pinned or {}
        self._decoder = Decoder()
        self._buffer = memoryview(mmap.mmap(-1, _READ_BYTES))
        self._open: OrderedDict[PackId, int] = OrderedDict()

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the packs that it holds open."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, locations: Sequence[Location]) -> Iterator[Buffer]:
        """Raw bytes of each location, in order. Raises CorruptBlock, CorruptPack or MissingPack.

        A buffer is valid until the next one is asked for.
        """
        for where, payload in self.payloads(locations):
            yield self.verified(where, payload)

    def read_stored(self, locations: Sequence[Location]) -> Iterator[memoryview]:
        """Like `read`, but yields the payloads as they are stored. They are verified too."""
        for where, payload in self.payloads(locations):
            self.verified(where, payload)
            yield payload

    def payloads(self, locations: Sequence[Location]) -> Iterator[tuple[Location, memoryview]]:
        """What is stored at each location, not looked at. Raises CorruptPack or MissingPack."""
        for group in _neighbours(locations):
            stored = self._read_span(group[0].pack, group[0].offset, group[-1].end)
            for where in group:
                start = where.offset - group[0].offset
                yield where, stored[start : start + where.stored]

    def read_one(self, location: Location) -> bytes:
        """Raw bytes of one block, to keep. Raises CorruptBlock, CorruptPack or MissingPack."""
        (raw,) = (bytes(raw) for raw in self.read([location]))
        return raw

    def _read_span(self, pack: PackId, start: int, end: int) -> memoryview:
        length = end - start
        into = self._buffer if length <= _READ_BYTES else memoryview(mmap.mmap(-1, length))
        fd, done = self._descriptor(pack), 0
        with reading(self.path(pack)):
            while done < length:
                count = os.preadv(fd, [into[done:length]], start + done)
                if not count:
                    break  # a pack cut short: what is missing fails its hash
                done += count
        return into[:done]

    def _descriptor(self, pack: PackId) -> int:
        if (pinned := self._pinned.get(pack)) is not None:
            return pinned
        fd = self._open.pop(pack, None)
        if fd is None:
            fd = open_pack(self.path(pack))
        self._open[pack] = fd
        if len(self._open) > _OPEN_PACKS:
            os.close(self._open.popitem(last=False)[1])
        return fd

    def path(self, pack: PackId) -> Path:
        """The pack's file."""
        return self._layout.pack(pack)

    def verified(self, where: Location, stored: memoryview) -> Buffer:
        """The raw bytes of a payload. Raises CorruptBlock."""
        try:
            raw = self._decoder.decode(where.codec, stored, where.raw)
        except Undecodable as error:
            raise CorruptBlock(self.path(where.pack), where.offset, where.id, str(error)) from error
        found = block_id(raw)
        if found != where.id:
            path = self.path(where.pack)
            raise CorruptBlock(path, where.offset, where.id, f"its bytes hash to {found.hex()}")
        return raw


def _neighbours(locations: Sequence[Location]) -> Iterator[Sequence[Location]]:
    """Splits where one read would get too long, cross a wide gap or another pack."""
    first = 0
    for i in range(1, len(locations) + 1):
        if i < len(locations) and _joins(locations[first], locations[i - 1], locations[i]):
            continue
        yield locations[first:i]
        first = i


def _joins(first: Location, before: Location, after: Location) -> bool:
    return (
        after.pack == before.pack
        and 0 <= after.offset - before.end <= _MAX_GAP
        and after.end - first.offset <= _READ_BYTES
    )
