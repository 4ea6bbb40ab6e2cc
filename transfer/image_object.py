"""An image in a remote: its manifest, and where its blocks lay when it was pushed.

    image := "ICEFIMAG" version:u32 codec:u32 stored:u32 raw:u32 packs:u32 blocks:u32
             payload[stored] pack_id[32]* place*
    place := offset:u64 pack:u32 stored:u32 codec:u8 0[3]

`payload` is the manifest, coded. One place a block, in the manifest's order; `pack` counts from 0.
A place may be out of date, for packs are rewritten; `indexes/` knows. docs/format.md, "Remote".
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.durable import Buffer
from icefloe.errors import CorruptManifest, UnknownFormat
from icefloe.ids import ID_BYTES, BlockId, PackId, block_id
from icefloe.store import manifest as manifests
from icefloe.store.codecs import Decoder, Encoder, Undecodable
from icefloe.store.manifest import Manifest
from icefloe.store.pack import MAX_MANIFEST
from icefloe.store.reader import Location
from icefloe.transfer.sealing import OVERHEAD

VERSION = 1
MAGIC = b"ICEFIMAG"
HEADER = struct.Struct("<8sIIIIII")
PLACE_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("pack", "<u4"),
        ("stored", "<u4"),
        ("codec", "u1"),
        ("reserved", "V3"),
    ]
)


@dataclass(frozen=True, eq=False)
class RemoteImage:
    """An image of a remote. `encoded` is its manifest.

    `packs` and `places` say where its blocks lay when it was pushed.
    """

    id: BlockId
    manifest: Manifest
    encoded: bytes
    packs: Sequence[PackId]
    places: NDArray[np.void]

    def locations(self, numbers: Sequence[int]) -> list[Location]:
        """Where these blocks of the manifest lay."""
        ids = self.manifest.blocks["id"]
        lengths = self.manifest.blocks["length"]
        found = []
        for number in numbers:
            offset, pack, stored, codec, _ = self.places[number].item()
            identity = BlockId(ids[number].tobytes())
            raw = int(lengths[number])
            found.append(Location(identity, self.packs[pack], offset, stored, raw, codec))
        return found


def encode(encoded: bytes, locations: Sequence[Location]) -> bytes:
    """`encoded` is the manifest, `locations` those of its blocks in order."""
    coded = Encoder("balanced").encode(memoryview(encoded))
    packs: dict[PackId, int] = {}
    places = np.zeros(len(locations), PLACE_DTYPE)
    for i, at in enumerate(locations):
        number = packs.setdefault(at.pack, len(packs))
        places[i] = (at.offset, number, at.stored, at.codec, b"")
    head = HEADER.pack(
        MAGIC,
        VERSION,
        coded.codec,
        len(coded.payload),
        len(encoded),
        len(packs),
        len(places),
    )
    return b"".join([head, coded.payload, *packs, places.tobytes()])


def decode(content: Buffer) -> RemoteImage:
    """The image. Raises CorruptManifest or UnknownFormat; nothing in it is trusted."""
    view = memoryview(content)
    if len(view) < HEADER.size:
        raise CorruptManifest(f"only {len(view)} bytes")
    magic, version, codec, stored, raw, packs, blocks = HEADER.unpack_from(view)
    if magic != MAGIC or version < 1:
        raise CorruptManifest("no image header")
    if version > VERSION:
        raise UnknownFormat("the image", version, VERSION)
    sizes = [HEADER.size, stored, packs * ID_BYTES, blocks * PLACE_DTYPE.itemsize]
    if sum(sizes) != len(view) or not 0 < raw <= MAX_MANIFEST:
        raise CorruptManifest("its length differs from its counts")
    ends = np.cumsum(sizes).tolist()
    try:
        encoded = bytes(Decoder().decode(codec, view[ends[0] : ends[1]], raw))
    except Undecodable as error:
        raise CorruptManifest(str(error)) from error
    manifest = manifests.decode(encoded)
    ids = bytes(view[ends[1] : ends[2]])
    places = np.frombuffer(view[ends[2] :], PLACE_DTYPE)
    if blocks != len(manifest.blocks):
        raise CorruptManifest("it has places for other blocks")
    good = (places["pack"] < packs) & (places["stored"] > 0) & (places["offset"] < 1 << 48)
    good &= places["stored"] <= manifest.blocks["length"] + np.uint32(OVERHEAD)
    if not good.all():
        raise CorruptManifest("its places can't be")
    return RemoteImage(
        block_id(encoded),
        manifest,
        encoded,
        [PackId(ids[i : i + ID_BYTES]) for i in range(0, len(ids), ID_BYTES)],
        places,
    )
