"""The memory of a stored checkpoint: which bytes of which block belong at which address.

CRIU's pagemaps say where in a pages file the pages of a process stand, and the manifest says
which blocks that file consists of. Here the two are joined, and CRIU's chains of incremental
dumps are flattened: what a pagemap leaves to its parent is looked up there (criu/pagemap.c).
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.capture import images
from icefloe.capture.images import IN_PARENT, LAZY, PAGE, PRESENT, Columns
from icefloe.capture.stored import StoredImage
from icefloe.capture.tree import PARENT
from icefloe.errors import BadImage
from icefloe.store.manifest import EXTENT_DTYPE, ZERO, Extents

SEGMENT_DTYPE = np.dtype(
    [
        ("vaddr", "<u8"),
        ("length", "<u8"),
        ("block", "<u4"),
        ("offset", "<u4"),
        ("lazy", "?"),
        ("anonymous", "?"),
    ]
)
"""Memory from `vaddr` on that stands in one block (ZERO: is zero), `length` bytes of it.

`lazy`: CRIU can leave it to userfaultfd. `anonymous`: private anonymous memory, which is zero
where nobody says otherwise.
"""

_RUN_DTYPE = np.dtype(
    [("vaddr", "<u8"), ("length", "<u8"), ("flags", "<u4"), ("file", "<u4"), ("offset", "<u8")]
)

_PAGEMAP = re.compile(r"pagemap-(?P<shared>shmem-)?(?P<number>[0-9]+)\.img")

_U64 = np.uint64


@dataclass(frozen=True, eq=False)
class Memory:
    """What one pagemap describes: the memory of a process, or a piece of shared memory.

    `pid` is None for shared memory. Segments (SEGMENT_DTYPE) are in order of addresses and lie
    in one of the `areas` each.
    """

    name: str
    pid: int | None
    pages_id: int
    segments: Columns
    areas: Columns


def load_memories(image: StoredImage) -> list[Memory]:
    """All pagemaps of a checkpoint, in order of names. Raises BadImage or Corrupt."""
    found = []
    for name in image.names():
        match = _PAGEMAP.fullmatch(name)
        if match:
            pid = None if match["shared"] else int(match["number"])
            found.append(_load(image, name, pid))
    return found


def _load(image: StoredImage, name: str, pid: int | None) -> Memory:
    pages_id, runs, files = _flatten(image, "", name)
    parts = [_in_blocks(image, path, runs[runs["file"] == i]) for i, path in enumerate(files)]
    pieces = np.concatenate(parts) if parts else np.zeros(0, _PIECE_DTYPE)
    pieces = pieces[np.argsort(pieces["vaddr"], kind="stable")]
    if pid is None:
        return Memory(name, None, pages_id, _segments(pieces), np.zeros(0, images.AREA_DTYPE))
    mm = f"mm-{pid}.img"
    areas = images.decode_areas(image.read(mm), image.path(mm))
    return Memory(name, pid, pages_id, _in_areas(pieces, areas, image.path(name)), areas)


def _flatten(image: StoredImage, folder: str, name: str) -> tuple[int, Columns, list[str]]:
    """The pages id, the runs (_RUN_DTYPE) and the pages files that they stand in."""
    path = folder + name
    pagemap = images.decode_pagemap(image.read(path), image.path(path))
    entries = pagemap.entries
    flags, length = entries["flags"], entries["pages"] * _U64(PAGE)
    parent, present = (flags & IN_PARENT) != 0, (flags & PRESENT) != 0
    if not bool((parent | present).all()):
        raise BadImage(image.path(path), "it lacks pages: it was dumped with --lazy-pages")
    present &= ~parent
    sizes = np.where(present, length, _U64(0))
    runs = np.zeros(int(present.sum()), _RUN_DTYPE)
    for field, values in (("vaddr", entries["vaddr"]), ("length", length), ("flags", flags)):
        runs[field] = values[present]
    runs["offset"] = (np.cumsum(sizes, dtype=_U64) - sizes)[present]
    files = [f"{folder}pages-{pagemap.pages_id}.img"]
    if not parent.any():
        return pagemap.pages_id, runs, files
    above = f"{folder}{PARENT}/"
    if not image.has(above + name):
        raise BadImage(image.path(path), f"it refers to {above}{name}, which was not stored")
    _, inherited, more = _flatten(image, above, name)
    wanted = entries[parent]
    start, end = wanted["vaddr"], wanted["vaddr"] + length[parent]
    starts = inherited["vaddr"]
    _, which, first, last = overlaps(start, end, starts, starts + inherited["length"])
    if int((last - first).sum()) != int((end - start).sum()):
        raise BadImage(image.path(path), f"it refers to pages that {above}{name} lacks")
    taken = inherited[which]
    taken["offset"] += first - taken["vaddr"]
    taken["vaddr"], taken["length"] = first, last - first
    taken["file"] += 1
    joined = np.concatenate([runs, taken])
    return pagemap.pages_id, joined[np.argsort(joined["vaddr"], kind="stable")], files + more


def overlaps(
    a_start: NDArray[np.uint64],
    a_end: NDArray[np.uint64],
    b_start: NDArray[np.uint64],
    b_end: NDArray[np.uint64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Where intervals of two kinds overlap: index in a, index in b, start and end of each piece.

    Each kind is in order and free of overlaps. Pieces are in order.
    """
    first = np.searchsorted(b_end, a_start, side="right")
    last = np.searchsorted(b_start, a_end, side="left")
    counts = np.maximum(last - first, 0)
    in_a = np.repeat(np.arange(len(a_start)), counts)
    before = np.cumsum(counts) - counts
    in_b = np.arange(len(in_a)) - np.repeat(before - first, counts)
    start = np.maximum(a_start[in_a], b_start[in_b])
    return in_a, in_b, start, np.minimum(a_end[in_a], b_end[in_b])


_PIECE_DTYPE = np.dtype(
    [("vaddr", "<u8"), ("length", "<u8"), ("block", "<u4"), ("offset", "<u4"), ("flags", "<u4")]
)


def _in_blocks(image: StoredImage, path: str, runs: Columns) -> Columns:
    """The runs of one pages file, cut where its extents end."""
    extents = image.extents(path) if len(runs) else np.zeros(0, EXTENT_DTYPE)
    ends = np.cumsum(extents["length"], dtype=_U64)
    starts = ends - extents["length"]
    run_ends = runs["offset"] + runs["length"]
    if len(runs) and int(run_ends.max()) > (int(ends[-1]) if len(ends) else 0):
        raise BadImage(image.path(path), "it is shorter than its pagemap says")
    run, extent, start, end = overlaps(runs["offset"], run_ends, starts, ends)
    pieces = np.zeros(len(run), _PIECE_DTYPE)
    pieces["vaddr"] = runs["vaddr"][run] + (start - runs["offset"][run])
    pieces["length"] = end - start
    pieces["flags"] = runs["flags"][run]
    pieces["block"] = extents["block"][extent]
    inside = extents["offset"][extent] + (start - starts[extent])
    pieces["offset"] = np.where(pieces["block"] == ZERO, 0, inside)
    return pieces


def _segments(pieces: Columns) -> Columns:
    segments = np.zeros(len(pieces), SEGMENT_DTYPE)
    for field in ("vaddr", "length", "block", "offset"):
        segments[field] = pieces[field]
    return segments


def _in_areas(pieces: Columns, areas: Columns, path: str) -> Columns:
    """Segments of a process, cut where its areas end: one system call fills one area at most."""
    starts = pieces["vaddr"]
    piece, area, start, end = overlaps(
        starts, starts + pieces["length"], areas["start"], areas["end"]
    )
    if int((end - start).sum()) != int(pieces["length"].sum()):
        raise BadImage(path, "it names memory outside of every area of its process")
    segments = _segments(pieces[piece])
    zero = segments["block"] == ZERO
    segments["offset"] += np.where(zero, 0, start - segments["vaddr"]).astype(np.uint32)
    segments["vaddr"], segments["length"] = start, end - start
    lazy = (pieces["flags"][piece] & LAZY) != 0
    segments["lazy"] = lazy & images.can_be_lazy(areas)[area]
    segments["anonymous"] = images.anonymous(areas)[area]
    return segments


def on_pages(segments: Columns) -> NDArray[np.bool_]:
    """Which segments begin and end on page boundaries."""
    result: NDArray[np.bool_] = ((segments["vaddr"] | segments["length"]) % _U64(PAGE)) == 0
    return result


def pages_file(segments: Columns) -> Extents:
    """The extents of a pages file that holds these segments, one after the other."""
    extents = np.zeros(len(segments), EXTENT_DTYPE)
    for field in ("block", "offset", "length"):
        extents[field] = segments[field]
    return extents


def pagemap_entries(segments: Columns, flags: NDArray[np.uint32]) -> Columns:
    """The entries (images.ENTRY_DTYPE) of a pagemap for these segments, neighbours joined."""
    starts = segments["vaddr"]
    ends = starts + segments["length"]
    new = np.ones(len(segments), np.bool_)
    new[1:] = (starts[1:] != ends[:-1]) | (flags[1:] != flags[:-1])
    first = np.flatnonzero(new)
    entries = np.zeros(len(first), images.ENTRY_DTYPE)
    entries["vaddr"] = starts[first]
    last = np.append(first[1:], len(segments))[: len(first)] - 1
    entries["pages"] = (ends[last] - starts[first]) // _U64(PAGE)
    entries["flags"] = flags[first]
    return entries
