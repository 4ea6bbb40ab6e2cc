"""Address spaces that are being filled: what has been put in, and where memory has moved to.

A restored process is free to unmap, move, discard and fork before its memory is complete. The
kernel tells about each of these and waits until it was read (userfaultfd(2), "non-cooperative").
Addresses of the checkpoint are called origins here; they are where CRIU put the memory at first.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Memory at [start, end) that was at `origin` in the checkpoint."""

    start: int
    end: int
    origin: int


@dataclass(slots=True, eq=False)
class Space:
    """One address space. `done` has a byte for each segment of its process: 1 when it was put in.

    `ranges` holds, in order, all memory that may have to be filled; None while nothing has moved.
    """

    fd: int
    task: int
    done: bytearray
    extent: tuple[int, int]
    ranges: list[Range] | None = None
    alive: bool = True
    _by_origin: list[tuple[int, Range]] = field(default_factory=list)

    def child(self, fd: int) -> "Space":
        """The same memory after fork(2); what was put in before is in the child too."""
        ranges = None if self.ranges is None else list(self.ranges)
        return Space(fd, self.task, bytearray(self.done), self.extent, ranges, True)

    def discard(self, start: int, end: int) -> None:
        """What was at [start, end) is not to be filled any more."""
        self._take(start, end)
        self._by_origin = []

    def move(self, start: int, to: int, length: int) -> None:
        """What was at [start, start + length) is at `to` now."""
        taken = self._take(start, start + length)
        self._take(to, to + length)
        ranges = self._ranges()
        for each in taken:
            insort(ranges, Range(each.start - start + to, each.end - start + to, each.origin))
        self._by_origin = []

    def origin(self, address: int) -> int | None:
        """Where in the checkpoint this address was, None when it holds nothing of it."""
        if self.ranges is None:
            return address if self.extent[0] <= address < self.extent[1] else None
        i = bisect_right(self.ranges, address, key=_start) - 1
        if i < 0 or address >= self.ranges[i].end:
            return None
        return address - self.ranges[i].start + self.ranges[i].origin

    def surroundings(self, address: int) -> tuple[int, int, int | None]:
        """The range around an address, or the hole between two, and the address's origin."""
        low, high = 0, 1 << 63
        for each in [Range(*self.extent, self.extent[0])] if self.ranges is None else self.ranges:
            if each.start > address:
                return low, each.start, None
            if address < each.end:
                return each.start, each.end, address - each.start + each.origin
            low = each.end
        return low, high, None

    def where(self, origin: int, end: int) -> tuple[int, int, int] | None:
        """The first piece of origins [origin, end) that is still there.

        Returns its origin, its address now and its length; None when nothing is left.
        """
        if self.ranges is None:
            return origin, origin, end - origin
        if not self._by_origin:
            self._by_origin = sorted((each.origin, each) for each in self.ranges)
        i = max(bisect_right(self._by_origin, origin, key=_first) - 1, 0)
        for start, each in self._by_origin[i:]:
            stop = start + each.end - each.start
            if start >= end:
                break
            if stop > origin:
                first, last = max(start, origin), min(stop, end)
                return first, first - start + each.start, last - first
        return None

    def _ranges(self) -> list[Range]:
        if self.ranges is None:
            start, end = self.extent
            self.ranges = [Range(start, end, start)]
        return self.ranges

    def _take(self, start: int, end: int) -> list[Range]:
        """Cuts [start, end) out of the ranges; returns what was there."""
        kept, taken = [], []
        for each in self._ranges():
            first, last = max(each.start, start), min(each.end, end)
            if first >= last:
                kept.append(each)
                continue
            taken.append(Range(first, last, each.origin + first - each.start))
            if each.start < first:
                kept.append(Range(each.start, first, each.origin))
            if last < each.end:
                kept.append(Range(last, each.end, each.origin + last - each.start))
        self.ranges = kept
        return taken


def _start(each: Range) -> int:
    return each.start


def _first(pair: tuple[int, Range]) -> int:
    return pair[0]
