"""The pack format. All numbers are little endian. docs/format.md, "Pack".

    pack    := header block* index trailer
    header  := "ICEFPACK" version:u32 0:u32
    block   := padding "ICFB" kind:u8 codec:u8 0:u16 stored:u32 raw:u32 id[32] payload[stored]
    index   := { id[32] offset:u64 stored:u32 raw:u32 codec:u8 kind:u8 0:u16 }*
    trailer := index_offset:u64 count:u32 version:u32 blake3(index)[32] 0:u64 "ICEFTAIL"

`offset` is where the payload starts. Padding is zero bytes, and there is some only before a
RAW block of 4096 bytes or more, whose payload starts on a page boundary. The pack's id is
blake3(index).
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from icefloe.chunker import MAX_BLOCK
from icefloe.durable import Buffer
from icefloe.errors import CorruptPack, MissingPack, UnknownFormat
from icefloe.ids import BlockId, PackId
from icefloe.store.codecs import Codec

VERSION = 1
MAGIC = b"ICEFPACK"
BLOCK_MAGIC = b"ICFB"
TRAILER_MAGIC = b"ICEFTAIL"

HEADER = struct.Struct("<8sII")
BLOCK_HEADER = struct.Struct("<4sBBHII32s")
TRAILER = struct.Struct("<QII32sQ8s")

INDEX_DTYPE = np.dtype(
    [
        ("id", "V32"),
        ("offset", "<u8"),
        ("stored", "<u4"),
        ("raw", "<u4"),
        ("codec", "u1"),
        ("kind", "u1"),
        ("reserved", "<u2"),
    ]
)
"""One block of an index, 52 bytes."""

Index: TypeAlias = NDArray[np.void]

# Copying from a mapping that starts off a page boundary runs at a fifth of the speed.
ALIGNMENT = 4096

# 200 GB of memory have a manifest of about 45 MB; the rest is room to grow.
MAX_MANIFEST = 256 << 20


class Kind(IntEnum):
    """What a block holds."""

    DATA = 1
    MANIFEST = 2


MAX_RAW = {Kind.DATA: MAX_BLOCK, Kind.MANIFEST: MAX_MANIFEST}


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block, coded, on its way into a pack."""

    id: BlockId
    kind: Kind
    codec: Codec
    raw_length: int
    payload: Buffer


def header() -> bytes:
    """The first bytes of every pack."""
    return HEADER.pack(MAGIC, VERSION, 0)


def block_header(block: StoredBlock) -> bytes:
    """The bytes right before a block's payload."""
    return BLOCK_HEADER.pack(
        BLOCK_MAGIC, block.kind, block.codec, 0, len(block.payload), block.raw_length, block.id
    )


def padding(position: int, codec: int, raw_length: int) -> int:
    """Zero bytes between `position` and the header of a block that is put next."""
    if codec != Codec.RAW or raw_length < ALIGNMENT:
        return 0
    return -(position + BLOCK_HEADER.size) % ALIGNMENT


class Frames:
    """The blocks of a pack on their way to wherever it is written, and where each will stand."""

    def __init__(self, start: bytes) -> None:
        """`start` are the bytes before the first block."""
        self.position = len(start)
        self._rows: list[tuple[bytes, int, int, int, int, int, int]] = []

    def add(self, blocks: Sequence[StoredBlock]) -> list[Buffer]:
        """The bytes that come next."""
        pieces: list[Buffer] = []
        for block in blocks:
            gap = padding(self.position, block.codec, block.raw_length)
            pieces += [bytes(gap), block_header(block), block.payload]
            offset = self.position + gap + BLOCK_HEADER.size
            stored = len(block.payload)
            self._rows.append(
                (block.id, offset, stored, block.raw_length, block.codec, block.kind, 0)
            )
            self.position = offset + stored
        return pieces

    def index(self) -> Index:
        """The rows of all blocks so far."""
        return np.array(self._rows, INDEX_DTYPE)

    def end(self, index: bytes) -> tuple[PackId, list[Buffer]]:
        """The pack's id, and its last bytes: an index and the trailer."""
        identity = PackId(blake3(index).digest())
        return identity, [index, trailer(self.position, len(self._rows), identity)]


def trailer(index_offset: int, count: int, index_hash: bytes) -> bytes:
    """The last bytes of every pack."""
    return TRAILER.pack(index_offset, count, VERSION, index_hash, 0, TRAILER_MAGIC)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the operating system can't read of a pack is damage. Raises MissingPack, CorruptPack."""
    try:
        yield
    except FileNotFoundError:
        raise MissingPack(path) from None
    except OSError as error:
        raise CorruptPack(path, f"it can't be read: {error.strerror}") from error


def open_pack(path: Path) -> int:
    """A descriptor to read from. Raises MissingPack or CorruptPack."""
    with reading(path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_index(path: Path) -> Index:
    """The index of a published pack, in order of offsets, checked against its trailer.

    Raises MissingPack, UnknownFormat or CorruptPack.
    """
    fd = open_pack(path)
    try:
        with reading(path):
            return _parse_index(path, fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def pack_id(index: Index) -> PackId:
    """The identity of a pack with this index."""
    return PackId(blake3(index.tobytes()).digest())


def _parse_index(path: Path, fd: int, length: int) -> Index:
    if length < HEADER.size + TRAILER.size:
        raise CorruptPack(path, f"only {length} bytes long")
    magic, version, reserved = HEADER.unpack(os.pread(fd, HEADER.size, 0))
    if magic != MAGIC or reserved:
        raise CorruptPack(path, "no pack header")
    if version > VERSION:
        raise UnknownFormat(path, version, VERSION)
    end = os.pread(fd, TRAILER.size, length - TRAILER.size)
    start, count, trailer_version, index_hash, reserved, magic = TRAILER.unpack(end)
    if magic != TRAILER_MAGIC or reserved or trailer_version != version or version < 1:
        raise CorruptPack(path, "no valid trailer")
    index_bytes = count * INDEX_DTYPE.itemsize
    if start + index_bytes + TRAILER.size != length or start < HEADER.size:
        raise CorruptPack(path, "the trailer points outside the file")
    content = os.pread(fd, index_bytes, start)
    if blake3(content).digest() != index_hash:
        raise CorruptPack(path, "the index does not match its hash")
    index: Index = np.frombuffer(content, INDEX_DTYPE)
    if (row := bad_row(index, start)) is not None:
        raise CorruptPack(path, f"row {row} of the index is out of bounds")
    return index


def bad_row(index: Index, end: int, overhead: int = 0) -> int | None:
    """The first row that can't be of a pack whose blocks end at `end`, if any.

    An index with a right hash can still come from a hostile writer. A payload is at most `overhead`
    longer than its block.
    """
    kinds = index["kind"]
    limits = np.where(kinds == Kind.MANIFEST, MAX_MANIFEST, MAX_BLOCK)
    starts = index["offset"].astype(np.int64)
    stops = starts + index["stored"]
    befores = np.concatenate([[HEADER.size], stops[:-1]]) if len(index) else starts
    good = (
        ((kinds == Kind.DATA) | (kinds == Kind.MANIFEST))
        & (index["reserved"] == 0)
        & (index["raw"] > 0)
        & (index["raw"] <= limits)
        & (index["stored"] > 0)
        & (index["stored"].astype(np.int64) <= index["raw"].astype(np.int64) + overhead)
        & (starts >= befores + BLOCK_HEADER.size)
        & (starts < befores + BLOCK_HEADER.size + ALIGNMENT)
        & (stops <= end)
    )
    return None if good.all() else int(np.argmin(good))
