"""What images hold and cost: the numbers behind `show`, `ls` and `diff`. Bytes everywhere."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.catalog import ImageRow, LocalStore
from icefloe.ids import BlockId
from icefloe.store.codecs import Codec
from icefloe.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of `ls`."""

    image: ImageRow
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CodecShare:
    """How much of an image one codec holds."""

    codec: str
    blocks: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Description:
    """What one image holds and costs.

    `stored_bytes` is what its blocks and its manifest take in packs, `exclusive_bytes` the part
    that no other image shares: what removing it would free.
    """

    image: ImageRow
    names: tuple[str, ...]
    manifest: Manifest
    stored_bytes: int
    exclusive_bytes: int
    codecs: tuple[CodecShare, ...]


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that differs between two images: `change` is changed, only_a or only_b."""

    path: str
    change: str
    a_bytes: int
    b_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Raw bytes of blocks that both images mention, and that only one does."""

    shared_bytes: int
    only_a_bytes: int
    only_b_bytes: int
    files: tuple[FileChange, ...]


def summarise(store: LocalStore) -> list[Listed]:
    """All images with their names, newest first."""
    names: dict[BlockId, list[str]] = {}
    for name, image in store.catalog.names().items():
        names.setdefault(image, []).append(name)
    rows = sorted(store.catalog.images(), key=lambda row: row.created, reverse=True)
    return [Listed(row, tuple(sorted(names.get(row.id, [])))) for row in rows]


def describe(store: LocalStore, image: BlockId) -> Description:
    """Looks at every block of an image. Raises Corrupt."""
    row = store.catalog.image(image)
    assert row is not None  # the caller resolved it
    manifest = store.manifest(image)
    blocks = store.catalog.rows([*manifest.block_ids(), image])
    stored = blocks["stored"].astype(np.int64)
    return Description(
        image=row,
        names=tuple(store.catalog.names_of(image)),
        manifest=manifest,
        stored_bytes=int(stored.sum()),
        exclusive_bytes=int(stored[blocks["count"] == 1].sum()),
        codecs=tuple(_shares(blocks[:-1])),
    )


def _shares(rows: NDArray[np.void]) -> Iterator[CodecShare]:
    for codec in np.unique(rows["codec"]).tolist():
        mine = rows[rows["codec"] == codec]
        sums = (int(mine[field].sum(dtype=np.int64)) for field in ("raw", "stored"))
        yield CodecShare(Codec(codec).name.lower(), len(mine), *sums)


def compare(store: LocalStore, a: BlockId, b: BlockId) -> Comparison:
    """What two images share. Raises Corrupt."""
    first, second = store.manifest(a), store.manifest(b)
    ids_a, ids_b = (np.ascontiguousarray(m.blocks["id"]).view("S32") for m in (first, second))
    in_both_a, in_both_b = np.isin(ids_a, ids_b), np.isin(ids_b, ids_a)
    lengths_a = first.blocks["length"].astype(np.int64)
    lengths_b = second.blocks["length"].astype(np.int64)
    return Comparison(
        shared_bytes=int(lengths_a[in_both_a].sum()),
        only_a_bytes=int(lengths_a[~in_both_a].sum()),
        only_b_bytes=int(lengths_b[~in_both_b].sum()),
        files=tuple(_file_changes(first, second)),
    )


def _file_changes(a: Manifest, b: Manifest) -> Iterator[FileChange]:
    at_a = {file.path: i for i, file in enumerate(a.files)}
    at_b = {file.path: i for i, file in enumerate(b.files)}
    for path in sorted(at_a.keys() | at_b.keys()):
        i, j = at_a.get(path), at_b.get(path)
        size_a = a.files[i].size if i is not None else 0
        size_b = b.files[j].size if j is not None else 0
        if i is None or j is None:
            yield FileChange(path, "only_b" if i is None else "only_a", size_a, size_b)
        elif a.files[i] != b.files[j] or _content(a, i) != _content(b, j):
            yield FileChange(path, "changed", size_a, size_b)


def _content(manifest: Manifest, index: int) -> list[tuple[bytes, int, int]]:
    """Extents by block id: equal lists mean equal bytes."""
    extents = manifest.extents_of(index)
    zero = extents["block"] == np.uint32(0xFFFFFFFF)
    ids = np.zeros(len(extents), "V32")
    ids[~zero] = manifest.blocks["id"][extents["block"][~zero]]
    return list(
        zip(
            (i.tobytes() for i in ids),
            extents["offset"].tolist(),
            extents["length"].tolist(),
            strict=True,
        )
    )
