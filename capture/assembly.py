"""Collects extents as they come and makes the manifest of them.

Columns instead of objects: 200 GB of memory have about 700,000 extents.
"""

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from icefloe.ids import BlockId
from icefloe.store.manifest import (
    BLOCK_DTYPE,
    EXTENT_DTYPE,
    ZERO,
    Extents,
    FileKind,
    ImageFile,
    Manifest,
)


class Assembly:
    """Extents of files, each file's in order. Threads take turns."""

    def __init__(self) -> None:
        self._numbers: dict[BlockId, int] = {}
        self._lengths = array("I")
        # Of each file: block, offset, length; block, offset, length; ...
        self._rows: dict[str, array[int]] = defaultdict(lambda: array("Q"))

    @property
    def blocks(self) -> int:
        """Distinct blocks so far."""
        return len(self._numbers)

    def number(self, block: BlockId, length: int) -> tuple[int, bool]:
        """The number that stands for a block, and whether it is new. Numbers have no order."""
        count = len(self._numbers)
        number = self._numbers.setdefault(block, count)
        if number == count:
            self._lengths.append(length)
        return number, number == count

    def add_zero(self, path: str, length: int) -> None:
        """The next `length` bytes of the file are zero."""
        self.add(path, ZERO, 0, length)

    def has(self, block: BlockId) -> bool:
        """Whether a block has a number."""
        return block in self._numbers

    def add_extents(self, path: str, extents: Extents) -> None:
        """Like `add`, for a table."""
        columns = [extents[name].astype(np.uint64) for name in ("block", "offset", "length")]
        self._rows[path].frombytes(np.stack(columns, axis=1).tobytes())

    def add(self, path: str, number: int, offset: int, length: int) -> None:
        """The next `length` bytes of the file stand in the block of this number at `offset`."""
        self._rows[path].extend((number, offset, length))

    def manifest(
        self, files: Sequence[ImageFile], facts: Mapping[str, Any], labels: Mapping[str, str]
    ) -> Manifest:
        """The image of these entries, in canonical order. Once: nothing is left of the extents."""
        owners, ordered = _settle_links(files)
        parts = [merge(self._extents(owners[f.path])) for f in ordered if f.size]
        counts = iter(map(len, parts))
        bounds = np.cumsum([0, *(next(counts) if f.size else 0 for f in ordered)], dtype=np.int64)
        joined = np.concatenate([np.zeros(0, EXTENT_DTYPE), *parts])
        return Manifest(
            files=tuple(ordered),
            bounds=bounds,
            blocks=self._in_order_of_use(joined),
            extents=joined,
            facts=facts,
            labels=labels,
        )

    def _extents(self, path: str) -> Extents:
        rows = np.array(self._rows.pop(path), np.uint64).reshape(-1, 3)
        extents = np.zeros(len(rows), EXTENT_DTYPE)
        extents["block"], extents["offset"], extents["length"] = rows.T
        return extents

    def _in_order_of_use(self, extents: Extents) -> NDArray[np.void]:
        """Renumbers the blocks in `extents`; returns them in their new order."""
        blocks = np.zeros(len(self._lengths), BLOCK_DTYPE)
        blocks["id"] = np.frombuffer(b"".join(self._numbers), "V32")
        self._numbers.clear()  # most of the memory; what follows needs its own
        blocks["length"] = self._lengths
        data = extents["block"] != ZERO
        used, first = np.unique(extents["block"][data], return_index=True)
        order = used[np.argsort(first)]
        renumbered = np.zeros(len(blocks), np.uint32)
        renumbered[order] = np.arange(len(order), dtype=np.uint32)
        extents["block"][data] = renumbered[extents["block"][data]]
        in_order: NDArray[np.void] = blocks[order]
        return in_order


def _settle_links(files: Sequence[ImageFile]) -> tuple[dict[str, str], list[ImageFile]]:
    """Of the paths that share their bytes, the first in order holds them.

    Returns for each path whose extents it has, and the entries in order. An archive may have met
    another path first.
    """
    by_path = {file.path: file for file in files}
    groups: dict[str, list[str]] = {}
    for file in files:
        root = file
        while root.kind is FileKind.HARDLINK:
            root = by_path[root.link]
        if root is not file or file.kind is FileKind.REGULAR:
            groups.setdefault(root.path, []).append(file.path)
    owners: dict[str, str] = {}
    for read, paths in groups.items():
        holder, size = min(paths, key=_path_key), by_path[read].size
        for path in paths:
            owners[path] = read
            by_path[path] = _relink(by_path[path], holder, size)
    return owners, sorted(by_path.values(), key=lambda file: _path_key(file.path))


def _relink(file: ImageFile, holder: str, size: int) -> ImageFile:
    """The entry at file.path, with its `size` bytes or as a link to `holder`."""
    here = file.path == holder
    return replace(
        file,
        kind=FileKind.REGULAR if here else FileKind.HARDLINK,
        size=size if here else 0,
        link="" if here else holder,
    )


def _path_key(path: str) -> bytes:
    return path.encode(errors="surrogateescape")


def merge(extents: Extents) -> Extents:
    """Joins neighbours that can be one extent: zero runs, and stretches of one block."""
    before, after = extents[:-1], extents[1:]
    follows = before["offset"] + before["length"] == after["offset"]
    joins = (before["block"] == after["block"]) & ((before["block"] == ZERO) | follows)
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    merged = extents[starts]
    merged["length"] = np.add.reduceat(extents["length"], starts)
    return merged
