"""Reads blocks out of packs, verified. A reader belongs to one thread.

Several blocks are read and decoded at once, neighbours in a pack with one read, into a buffer that
is used again; what is handed out is valid until the next block is asked for.
"""

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from icefloe.durable import Buffer
from icefloe.errors import CorruptBlock
from icefloe.ids import BlockId, PackId, block_id
from icefloe.store.codecs import Decoder, Undecodable
from icefloe.store.layout import Layout
from icefloe.store.pack import open_pack, reading

# Gaps of at most this are read through: a seek costs more.
_MAX_GAP = 256 << 10

# Blocks that are read and decoded together: their stored bytes with such gaps, their raw bytes.
# Each step that isn't Python's own is done for all of them at once, so that threads rarely wait
# for one another; and whoever waits for one of them waits for all. A larger block comes alone.
_READ_BYTES = 8 << 20
_RAW_BYTES = 4 << 20

_OPEN_PACKS = 8


class Location(NamedTuple):
    """Where a block lies. `offset` is that of the payload; lengths in bytes."""

    id: BlockId
    pack: PackId
    offset: int
    stored: int
    raw: int
    codec: int

    @property
    def end(self) -> int:
        """The offset after it."""
        return self.offset + self.stored


class BlockReader:
    """Yields the raw bytes of blocks; every one hashes to its id."""

    def __init__(
        self,
        layout: Layout,
        pinned: Mapping[PackId, int] | None = None,
        raw_bytes: int = _RAW_BYTES,
    ) -> None:
        """`pinned` are packs that somebody else keeps open, and their descriptors.

        Blocks are decoded together up to `raw_bytes`.
        """
        self._layout = layout
        self._raw_bytes = raw_bytes
        self._pinned = pinned or {}
        self._decoder = Decoder()
        self._buffer = memoryview(mmap.mmap(-1, _READ_BYTES))
        self._open: OrderedDict[PackId, int] = OrderedDict()
        self._paths: dict[PackId, Path] = {}

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
        for raws in self.read_batches(locations):
            yield from raws

    def read_batches(self, locations: Sequence[Location]) -> Iterator[list[Buffer]]:
        """Like `read`, but as many at a time as are decoded together."""
        for spans in _batches(locations, self._raw_bytes):
            yield self._verified(*self._payloads(spans))

    def read_stored(self, locations: Sequence[Location]) -> Iterator[tuple[memoryview, Buffer]]:
        """Like `read`, but yields the payload as it is stored, and the raw bytes."""
        for spans in _batches(locations, self._raw_bytes):
            batch, payloads = self._payloads(spans)
            yield from zip(payloads, self._verified(batch, payloads), strict=True)

    def read_one(self, location: Location) -> bytes:
        """Raw bytes of one block, to keep. Raises CorruptBlock, CorruptPack or MissingPack."""
        (raw,) = (bytes(raw) for raw in self.read([location]))
        return raw

    def _payloads(
        self, spans: Sequence[Sequence[Location]]
    ) -> tuple[list[Location], list[memoryview]]:
        """What is stored there, not looked at."""
        total = sum(span[-1].end - span[0].offset for span in spans)
        into = self._buffer if total <= _READ_BYTES else memoryview(mmap.mmap(-1, total))
        batch: list[Location] = []
        payloads = []
        for span in spans:
            first = span[0].offset
            stored = self._read_span(span[0].pack, first, into[: span[-1].end - first])
            into = into[len(stored) :]
            batch += span
            payloads += [stored[at.offset - first : at.end - first] for at in span]
        return batch, payloads

    def _read_span(self, pack: PackId, start: int, into: memoryview) -> memoryview:
        fd, done = self._descriptor(pack), 0
        with reading(self.path(pack)):
            while done < len(into):
                count = os.preadv(fd, [into[done:]], start + done)
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
        if pack not in self._paths:
            self._paths[pack] = self._layout.pack(pack)
        return self._paths[pack]

    def _verified(self, batch: Sequence[Location], payloads: Sequence[memoryview]) -> list[Buffer]:
        codecs, lengths = [at.codec for at in batch], [at.raw for at in batch]
        raws = self._decoder.decode_all(codecs, payloads, lengths)
        try:
            # Each is hashed while the processor's cache still has it.
            return [self._check(at, raw) for at, raw in zip(batch, raws, strict=True)]
        except Undecodable as error:
            for at, payload in zip(batch, payloads, strict=True):
                self._decode(at, payload)  # finds out which
            raise AssertionError("what can't be decoded together can, one by one") from error

    def _check(self, at: Location, raw: Buffer) -> Buffer:
        if (found := block_id(raw)) != at.id:
            path = self.path(at.pack)
            raise CorruptBlock(path, at.offset, at.id, f"its bytes hash to {found.hex()}")
        return raw

    def _decode(self, at: Location, payload: memoryview) -> None:
        try:
            self._decoder.decode(at.codec, payload, at.raw)
        except Undecodable as error:
            raise CorruptBlock(self.path(at.pack), at.offset, at.id, str(error)) from error


def _batches(locations: Iterable[Location], raw_bytes: int) -> Iterator[list[list[Location]]]:
    """What is decoded together, split where one read would cross a wide gap or another pack."""
    spans: list[list[Location]] = []
    stored = raw = 0
    for at in locations:
        before = spans[-1][-1] if spans else None
        joins = (
            before is not None
            and at.pack == before.pack
            and 0 <= at.offset - before.end <= _MAX_GAP
        )
        more = at.end - before.end if joins and before is not None else at.stored
        if spans and (stored + more > _READ_BYTES or raw + at.raw > raw_bytes):
            yield spans
            spans, stored, raw, joins, more = [], 0, 0, False, at.stored
        if joins:
            spans[-1].append(at)
        else:
            spans.append([at])
        stored += more
        raw += at.raw
    if spans:
        yield spans
