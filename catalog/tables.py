"""Tables of the catalog: their names, keys and values. The version is part of the name.

Values are little endian, packed. Pack numbers are local to one catalog; they keep ten million
block rows small.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.ids import BlockId, PackId

BLOCKS = "blocks.v1"
"""Block id -> BLOCK_DTYPE."""

PACKS = "packs.v1"
"""Pack number (u32, big endian) -> PACK_DTYPE."""

PACK_NUMBERS = "pack_numbers.v1"
"""Pack id -> pack number (u32, big endian)."""

IMAGES = "images.v1"
"""Manifest id -> IMAGE_DTYPE."""

NAMES = "names.v1"
"""Name (UTF-8) -> NAME_DTYPE."""

TOMBSTONES = "tombstones.v1"
"""Block id -> time (f64) at which its count fell to zero."""

META = "meta.v1"
"""`applied` -> APPLIED_DTYPE; `next_pack` -> pack number that is given out next."""

HOOKS = "hooks.v1"
"""Fingerprint of a page (u64, big endian) -> HOOK_DTYPE, up to MOST_PLACES of them: where it stood
in the latest images. A hint: images may be gone, and a catalog that was made anew has none."""

MOST_PLACES = 3

ALL = (BLOCKS, PACKS, PACK_NUMBERS, IMAGES, NAMES, TOMBSTONES, META, HOOKS)

APPLIED = b"applied"
NEXT_PACK = b"next_pack"

BLOCK_DTYPE = np.dtype(
    [
        ("pack", "<u4"),
        ("offset", "<u8"),
        ("stored", "<u4"),
        ("raw", "<u4"),
        ("codec", "u1"),
        ("kind", "u1"),
        ("count", "<u4"),
    ]
)
PACK_DTYPE = np.dtype([("id", "V32"), ("bytes", "<u8"), ("live", "<u8")])
IMAGE_DTYPE = np.dtype(
    [
        ("created", "<f8"),
        ("logical", "<u8"),
        ("zero", "<u8"),
        ("raw", "<u8"),
        ("blocks", "<u4"),
        ("files", "<u4"),
    ]
)
HOOK_DTYPE = np.dtype([("image", "V32"), ("file", "<u4"), ("offset", "<u8")])
NAME_DTYPE = np.dtype([("image", "V32"), ("time", "<f8")])
TIME_DTYPE = np.dtype("<f8")
APPLIED_DTYPE = np.dtype([("offset", "<u8"), ("sequence", "<u8")])


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack that the catalog points into. `live` is the stored length of blocks in use."""

    number: int
    id: PackId
    bytes: int
    live: int


@dataclass(frozen=True, slots=True)
class ImageRow:
    """A committed image. `created` in seconds since 1970, the rest in bytes and counts."""

    id: BlockId
    created: float
    logical_bytes: int
    zero_bytes: int
    raw_bytes: int
    blocks: int
    files: int


@dataclass(frozen=True, slots=True)
class DeadBlocks:
    """Blocks that no image mentions, as parallel columns. `since` in seconds since 1970."""

    pack: NDArray[np.uint32]
    stored: NDArray[np.int64]
    since: NDArray[np.float64]
    ids: tuple[BlockId, ...]


def number_key(number: int) -> bytes:
    """Pack numbers sort in order."""
    return number.to_bytes(4, "big")


def pack_row(number: int, value: bytes) -> PackRow:
    """Decodes a value of PACKS."""
    identity, length, live = np.frombuffer(value, PACK_DTYPE)[0].item()
    return PackRow(number, PackId(identity), length, live)


def image_row(key: bytes, value: bytes) -> ImageRow:
    """Decodes a row of IMAGES."""
    created, logical, zero, raw, blocks, files = np.frombuffer(value, IMAGE_DTYPE)[0].item()
    return ImageRow(BlockId(key), created, logical, zero, raw, blocks, files)


def block_rows(values: list[bytes]) -> NDArray[np.void]:
    """Decodes values of BLOCKS."""
    return np.frombuffer(b"".join(values), BLOCK_DTYPE)
