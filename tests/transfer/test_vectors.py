"""Golden bytes of remotes: an image and a sealed one, a sealed pack, and what keys derive.

`python tests/transfer/test_vectors.py --write` makes them anew; compressed payloads and nonces then
differ, and nothing else may.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds it already

from icefloe.errors import CorruptManifest, UnknownFormat
from icefloe.ids import BlockId, PackId, block_id
from icefloe.store import manifest as manifests
from icefloe.store.codecs import Codec
from icefloe.store.pack import BLOCK_HEADER, HEADER, TRAILER, Kind, StoredBlock
from icefloe.store.reader import Location
from icefloe.transfer import image_object
from icefloe.transfer.packing import block_label, make_pack
from icefloe.transfer.sealing import OVERHEAD, Key, Sealed

VECTORS = Path(__file__).parents[1] / "vectors"
KEY = bytes(range(32))
SEALED = Sealed([Key(KEY)])
MANIFEST = (VECTORS / "image.manifest").read_bytes()
BLOCKS = [b"first block " * 9, b"second " * 7]


def places() -> list[Location]:
    """Where the blocks of the golden manifest may lie: in two packs, in turns."""
    rows = manifests.decode(MANIFEST).blocks
    packs = [PackId(b"\xaa" * 32), PackId(b"\xbb" * 32)]
    return [
        Location(BlockId(row["id"].tobytes()), packs[i % 2], 64 + 1000 * i, 10 + i, raw, Codec.ZSTD)
        for i, (row, raw) in enumerate(zip(rows, rows["length"].tolist(), strict=True))
    ]


def golden() -> dict[str, Any]:
    """What the bytes mean."""
    return {
        "key": KEY.hex(),
        "key_id": SEALED.key_ids[0],
        "image": block_id(MANIFEST).hex(),
        "outer": SEALED.outer(block_id(MANIFEST)).hex(),
        "places": [[at.pack.hex(), at.offset, at.stored, at.codec] for at in places()],
        "blocks": [[block_id(raw).hex(), SEALED.outer(block_id(raw)).hex()] for raw in BLOCKS],
    }


def write() -> None:
    """Makes the golden files anew."""
    encoded = image_object.encode(MANIFEST, places())
    label = b"image " + SEALED.outer(block_id(MANIFEST))
    (VECTORS / "remote.image").write_bytes(encoded)
    (VECTORS / "sealed.image").write_bytes(bytes(SEALED.seal(label, encoded)))
    stored = [StoredBlock(block_id(raw), Kind.DATA, Codec.RAW, len(raw), raw) for raw in BLOCKS]
    (VECTORS / "sealed.pack").write_bytes(make_pack(stored, SEALED).content)
    (VECTORS / "remote.json").write_text(json.dumps(golden(), indent=1) + "\n")


def test_what_keys_derive() -> None:
    assert json.loads((VECTORS / "remote.json").read_text()) == golden()


def test_the_image() -> None:
    content = (VECTORS / "remote.image").read_bytes()
    image = image_object.decode(content)
    assert (image.id, image.encoded) == (block_id(MANIFEST), MANIFEST)
    assert image.locations(range(len(image.manifest.blocks))) == places()
    sealed = (VECTORS / "sealed.image").read_bytes()
    assert SEALED.open(b"image " + SEALED.outer(image.id), sealed) == content


def test_the_sealed_pack() -> None:
    """Read by hand, as docs/format.md says."""
    content = (VECTORS / "sealed.pack").read_bytes()
    assert content[:8] == b"ICEFSEAL" and HEADER.unpack(content[: HEADER.size])[1:] == (1, 0)
    position = HEADER.size
    for raw in BLOCKS:
        head = BLOCK_HEADER.unpack_from(content, position)
        identity, length = block_id(raw), len(raw) + OVERHEAD
        assert head == (b"ICFB", 1, 0, 0, length, len(raw), SEALED.outer(identity))
        position += BLOCK_HEADER.size
        payload = content[position : position + length]
        assert SEALED.open(block_label(identity), payload) == raw
        position += length
    start, count, version, digest, zero, magic = TRAILER.unpack(content[-TRAILER.size :])
    assert (start, count, version, zero, magic) == (position, len(BLOCKS), 1, 0, b"ICEFTAIL")
    index = content[start : -TRAILER.size]
    assert block_id(index) == digest
    assert len(bytes(SEALED.open(b"index", index))) == 52 * len(BLOCKS)


def test_another_version() -> None:
    content = bytearray((VECTORS / "remote.image").read_bytes())
    content[8] = 2
    with pytest.raises(UnknownFormat):
        image_object.decode(content)
    content[8] = 0
    with pytest.raises(CorruptManifest):
        image_object.decode(content)


@pytest.mark.parametrize("length", [0, 7, 31, 32, 100, -1])
def test_cut_short(length: int) -> None:
    with pytest.raises(CorruptManifest):
        image_object.decode((VECTORS / "remote.image").read_bytes()[:length])


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
