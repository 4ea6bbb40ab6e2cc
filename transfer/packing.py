"""A pack in memory, on its way into a remote: laid out like any pack, and sealed if need be.

A sealed pack begins with "ICEFSEAL", its payloads and its index are sealed, and the ids in block
headers are those that others may see. docs/format.md, "Sealed".
"""

import io
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from icefloe.durable import Buffer
from icefloe.ids import BlockId, PackId
from icefloe.store import pack
from icefloe.store.pack import Index, StoredBlock
from icefloe.transfer.sealing import Sealing

SEALED_MAGIC = b"ICEFSEAL"


@dataclass(frozen=True, slots=True)
class PackObject:
    """A whole pack. `stored_index` is its index as it stands in it."""

    id: PackId
    content: bytes
    index: Index
    stored_index: bytes


def block_label(identity: BlockId) -> bytes:
    """What a sealed block is bound to."""
    return b"block " + identity


def make_pack(blocks: Iterable[StoredBlock], sealing: Sealing) -> PackObject:
    """A pack of these blocks. Their payloads need to last only until the next one is asked for."""
    start = pack.header()
    if sealing.overhead:
        start = SEALED_MAGIC + start[len(SEALED_MAGIC) :]
    frames, content, ids = pack.Frames(start), io.BytesIO(), []
    content.write(start)
    for block in blocks:
        ids.append(block.id)
        content.writelines(frames.add([_outside(block, sealing)]))
    index = frames.index()
    index["id"] = np.array(ids, "V32")
    stored_index = bytes(sealing.seal(b"index", index.tobytes()))
    identity, pieces = frames.end(stored_index)
    content.writelines(pieces)
    return PackObject(identity, content.getvalue(), index, stored_index)


def _outside(block: StoredBlock, sealing: Sealing) -> StoredBlock:
    """The block as others see it."""
    if not sealing.overhead:
        return block
    payload: Buffer = sealing.seal(block_label(block.id), block.payload)
    return replace(block, id=BlockId(sealing.outer(block.id)), payload=payload)
