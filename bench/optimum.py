"""How little could the second of two images cost, if every page were stored once?

Written without the project's own code, so that it can judge it: pages are told apart by BLAKE3,
and where a page lies in a process is read from CRIU's pagemaps by a decoder of a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from common import PAGE, BenchError, windows

Ids = npt.NDArray[np.uint64]
Addresses = npt.NDArray[np.uint64]

# The first 8 bytes of BLAKE3: among a million pages, two that differ are taken for equal with a
# probability of one in thirty million.
ID_BYTES = 8

# criu/include/magic.h: every image begins with two of four bytes each; then messages, each after
# its length.
MAGICS_BYTES = 8
LENGTH_BYTES = 4

# images/pagemap.proto: fields of the head and of an entry, and the flag of a page that is there.
PAGES_ID = 1
VADDR, FEW_PAGES, FLAGS, MANY_PAGES = 1, 2, 4, 5
PRESENT = 4


def _id(page: memoryview | bytes) -> bytes:
    return blake3(page).digest(ID_BYTES)


ZERO = np.frombuffer(_id(bytes(PAGE)), np.uint64)[0]


def file_ids(path: Path) -> Ids:
    """The identities of a file's pages, in order."""
    out = bytearray()
    for window in windows(path):
        for start in range(0, len(window), PAGE):
            out += _id(window[start : start + PAGE])
    return np.frombuffer(out, np.uint64)


def page_ids(folder: Path) -> dict[str, Ids]:
    """The identities of all pages of an image: pages file to array."""
    return {path.name: file_ids(path) for path in sorted(folder.glob("pages-*.img"))}


def distinct(image: dict[str, Ids]) -> Ids:
    """Every page of an image once, without zero pages."""
    ids = np.unique(np.concatenate([*image.values(), np.zeros(0, np.uint64)]))
    nonzero: Ids = ids[ids != ZERO]
    return nonzero


def new_ids(known: Ids, image: dict[str, Ids]) -> Ids:
    """The pages of an image that are not among the known ones, each once."""
    found: Ids = np.setdiff1d(distinct(image), known, assume_unique=True)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of a protobuf message and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, at


def _numbers(message: bytes) -> dict[int, int]:
    """The fields of a message that has nothing but numbers."""
    fields, at = {}, 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7:
            raise BenchError("a pagemap has a field that is no number: extend optimum.py")
        fields[key >> 3], at = _varint(message, at)
    return fields


def _messages(path: Path) -> Iterator[dict[int, int]]:
    """The head of a pagemap, then its entries."""
    data, at = path.read_bytes(), MAGICS_BYTES
    while at < len(data):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        yield _numbers(data[start:at])


def _pages_file(pagemap: Path) -> tuple[str, Addresses]:
    """The pages file of a pagemap, and the number in memory of each of its pages."""
    head, *entries = _messages(pagemap)
    numbers = [np.zeros(0, np.uint64)]
    for entry in entries:
        if entry.get(FLAGS, PRESENT) & PRESENT:
            first = entry[VADDR] // PAGE
            count = entry.get(MANY_PAGES) or entry[FEW_PAGES]
            numbers.append(np.arange(first, first + count, dtype=np.uint64))
    return f"pages-{head[PAGES_ID]}.img", np.concatenate(numbers)


def _changed_in_place(base: tuple[Addresses, Ids], later: tuple[Addresses, Ids]) -> int:
    """How many pages of one memory are not what they were, or not zero where nothing was."""
    (had, old), (has, new) = base, later
    was = np.full(len(has), ZERO)
    if len(had):
        at = np.minimum(np.searchsorted(had, has), len(had) - 1)
        was[had[at] == has] = old[at][had[at] == has]
    return int(np.count_nonzero((new != was) & (new != ZERO)))


@dataclass(frozen=True)
class Optimum:
    """Bytes of the pages that must be stored. `in_place`: if pages were compared only with those
    at the same address of the same process; None where no address is known."""

    anywhere: int
    in_place: int | None


def optimum(base: Path, later: Path, addresses: bool) -> Optimum:
    """What `later` must cost beside `base`."""
    old, new = page_ids(base), page_ids(later)
    fresh = len(new_ids(distinct(old), new)) * PAGE
    if not addresses:
        return Optimum(fresh, None)
    changed = 0
    for pagemap in sorted(later.glob("pagemap-*.img")):
        name, has = _pages_file(pagemap)
        before = (np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        if (base / pagemap.name).exists():
            old_name, had = _pages_file(base / pagemap.name)
            before = (had, old[old_name])
        changed += _changed_in_place(before, (has, new[name]))
    return Optimum(fresh, changed * PAGE)
