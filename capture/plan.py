"""What there is to fill: the lazy memory of a process tree, by unit and by address.

A *unit* is what is put in at once: a block with every segment that stands in it, or one segment
that is zero. Blocks have their number in the manifest, zero segments follow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.capture.images import Columns
from icefloe.store.manifest import ZERO

# One system call zeroes at most this: events wait for it, and so do faults.
_ZERO_PIECE = 16 << 20

_ROW_DTYPE = np.dtype(
    [
        ("vaddr", "<u8"),
        ("length", "<u8"),
        ("offset", "<u4"),
        ("task", "<u4"),
        ("number", "<u4"),
        ("block", "<u4"),
    ]
)

Row = tuple[int, int, int, int, int, int]
"""A segment: vaddr, length, offset in the block, task, number, block."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Some segments as a table; `unit` is the index of the unit that each belongs to."""

    rows: NDArray[np.void]
    unit: NDArray[np.intp]

    def tasks(self) -> list[int]:
        """Whose they are."""
        found: list[int] = np.unique(self.rows["task"]).tolist()
        return found

    def of(self, task: int) -> "Segments":
        """Those of one task."""
        mine = self.rows["task"] == task
        return Segments(self.rows[mine], self.unit[mine])

    def __getitem__(self, which: NDArray[np.bool_]) -> "Segments":
        return Segments(self.rows[which], self.unit[which])


class Plan:
    """All lazy memory of a process tree, by unit and by address.

    `tasks` are pids in the order of the tree, `segments` (memory.SEGMENT_DTYPE) theirs by pid.
    """

    def __init__(self, tasks: Sequence[int], segments: Mapping[int, Columns], blocks: int) -> None:
        self.tasks = tuple(tasks)
        self.blocks = blocks
        parts = [_rows(task, segments[pid]) for task, pid in enumerate(tasks) if pid in segments]
        rows = np.concatenate([np.zeros(0, _ROW_DTYPE), *parts])
        counts = np.bincount(rows["task"], minlength=len(tasks)) if len(rows) else [0] * len(tasks)
        self.bounds: list[int] = np.cumsum([0, *counts]).tolist()
        rows["number"] = np.arange(len(rows))
        zero = rows["block"] == ZERO
        units = rows["block"].astype(np.int64)
        units[zero] = blocks + np.flatnonzero(zero)
        self._by_address = rows
        # Searching in a column of a table would copy the column every time.
        self._starts = np.ascontiguousarray(rows["vaddr"])
        self._ends = self._starts + rows["length"]
        self._unit_of = units
        self._numbers = np.argsort(units, kind="stable")
        self._first = np.searchsorted(units[self._numbers], np.arange(self.units + 1))
        self.bytes = int(rows["length"].sum())
        self.lengths = np.bincount(units, rows["length"], self.units).astype(np.int64)
        """The bytes of each unit, in all its segments."""
        # Those that are to be copied; zeros cost next to nothing.
        self.costs = self.lengths.copy()
        self.costs[blocks:] = 0

    @property
    def units(self) -> int:
        """Unit numbers are below this."""
        return self.blocks + len(self._by_address)

    def extent(self, task: int) -> tuple[int, int]:
        """The lowest and the highest address that a task's lazy memory has."""
        first, last = self.bounds[task], self.bounds[task + 1]
        return (int(self._starts[first]), int(self._ends[last - 1])) if first < last else (0, 0)

    def order(self, first: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Every unit once: those in `first`, then the others by address."""
        wanted = self._unit_of if first is None else np.concatenate([first, self._unit_of])
        units, index = np.unique(wanted, return_index=True)
        ordered: NDArray[np.int64] = units[np.argsort(index)]
        return ordered

    def rows(self, units: Sequence[int]) -> list[Row]:
        """The segments of these units (each once), by task and address."""
        which, _ = self._segments(units)
        found: list[Row] = self._by_address[np.sort(which)].tolist()
        return found

    def table(self, units: Sequence[int]) -> Segments:
        """The same as a table, unit by unit."""
        which, counts = self._segments(units)
        return Segments(self._by_address[which], np.repeat(np.arange(len(units)), counts))

    def _segments(self, units: Sequence[int]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The numbers of the segments of these units, one unit after the other, and how many."""
        at = np.asarray(units, np.intp)
        first, last = self._first[at], self._first[at + 1]
        counts = last - first
        ends = np.cumsum(counts)
        which = np.repeat(last - ends, counts) + np.arange(counts.sum())
        return self._numbers[which], counts

    def row(self, number: int) -> list[Row]:
        """One segment alone."""
        found: list[Row] = self._by_address[number : number + 1].tolist()
        return found

    def find(self, task: int, address: int) -> int | None:
        """The number of the segment at an address."""
        i = self._before(task, address)
        return i if i is not None and address < self._ends[i] else None

    def gap(self, task: int, address: int) -> tuple[int, int]:
        """The addresses around this one, which no segment holds, up to the next segments."""
        i = self._before(task, address)
        after = self.bounds[task] if i is None else i + 1
        low = 0 if i is None else int(self._ends[i])
        return low, int(self._starts[after]) if after < self.bounds[task + 1] else 1 << 63

    def _before(self, task: int, address: int) -> int | None:
        """The number of a task's last segment that starts at an address or before."""
        first, last = self.bounds[task], self.bounds[task + 1]
        i = int(np.searchsorted(self._starts[first:last], np.uint64(address), side="right"))
        return first + i - 1 if i else None

    def find_units(
        self, tasks: NDArray[np.uint32], addresses: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """The units at these addresses, in order; addresses without any are left out."""
        found = np.full(len(addresses), -1, np.int64)
        for task in range(len(self.tasks)):
            first, last = self.bounds[task], self.bounds[task + 1]
            mine = np.flatnonzero(tasks == task)
            if first == last or not len(mine):
                continue
            at = np.searchsorted(self._starts[first:last], addresses[mine], side="right") - 1
            inside = (at >= 0) & (addresses[mine] < self._ends[first + np.maximum(at, 0)])
            found[mine[inside]] = self._unit_of[first + at[inside]]
        return found[found >= 0]

    def unit(self, number: int) -> int:
        """The unit that a segment belongs to."""
        return int(self._unit_of[number])


def _rows(task: int, segments: Columns) -> NDArray[np.void]:
    """A task's segments, long zero ones cut into pieces."""
    zero = segments["block"] == ZERO
    length = segments["length"].astype(np.int64)
    counts = np.where(zero, -(-length // _ZERO_PIECE), 1)
    which = np.repeat(np.arange(len(segments)), counts)
    piece = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.zeros(len(which), _ROW_DTYPE)
    skipped = piece * _ZERO_PIECE
    rows["vaddr"] = segments["vaddr"][which] + skipped.astype(np.uint64)
    rest = length[which] - skipped
    rows["length"] = np.where(zero[which], np.minimum(rest, _ZERO_PIECE), rest)
    for name in ("offset", "block"):
        rows[name] = segments[name][which]
    rows["task"] = task
    return rows
