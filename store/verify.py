"""Verifies every byte of a pack: header, padding, block headers, payloads, index, trailer."""

from collections.abc import Iterator
from pathlib import Path

from icefloe.errors import Corrupt, CorruptBlock, CorruptPack
from icefloe.ids import BlockId, PackId
from icefloe.store.codecs import KNOWN_CODECS
from icefloe.store.layout import Layout
from icefloe.store.pack import (
    BLOCK_HEADER,
    BLOCK_MAGIC,
    HEADER,
    TRAILER,
    Index,
    open_pack,
    pack_id,
    padding,
    read_index,
    reading,
)
from icefloe.store.reader import BlockReader, Location


def verify_pack(layout: Layout, pack: PackId) -> Iterator[Corrupt]:
    """Everything that is wrong with a published pack; nothing when it is whole."""
    path = layout.pack(pack)
    try:
        index = read_index(path)
    except Corrupt as problem:
        yield problem
        return
    if pack_id(index) != pack:
        yield CorruptPack(path, "its index does not match its name")
        return
    try:
        yield from _verify_frames(path, index)
    except CorruptPack as problem:
        yield problem
    with BlockReader(layout) as reader:
        for row in index.tolist():
            identity, offset, stored, raw, codec, _, _ = row
            where = Location(BlockId(identity), pack, offset, stored, raw, codec)
            if codec not in KNOWN_CODECS:
                yield CorruptBlock(path, offset, where.id, f"codec {codec} is not known")
                continue
            try:
                for _ in reader.read([where]):
                    pass
            except Corrupt as problem:
                yield problem


def _verify_frames(path: Path, index: Index) -> Iterator[CorruptPack]:
    """What lies between the payloads has only one right value."""
    position = HEADER.size
    with reading(path), open(open_pack(path), "rb") as file:
        for identity, offset, stored, raw, codec, kind, _ in index.tolist():
            gap = padding(position, codec, raw)
            header = BLOCK_HEADER.pack(BLOCK_MAGIC, kind, codec, 0, stored, raw, identity)
            expected = bytes(gap) + header
            file.seek(position)
            if offset != position + len(expected) or file.read(len(expected)) != expected:
                yield CorruptPack(path, f"the block header before byte {offset} is damaged")
            position = offset + stored
        end = path.stat().st_size - index.nbytes - TRAILER.size
        if position != end:
            yield CorruptPack(path, f"{end - position} bytes too many before the index")
