"""From marks to zero runs and blocks, window by window.

The rule is stated on the whole file, so windows of any size give the same pieces: whatever a
window's end leaves undecided is carried into the next one.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.chunker.grains import Grain, Marks


@dataclass(frozen=True, slots=True)
class Piece:
    """Grains [start, end) of a file: one zero run, or one block."""

    start: int
    end: int
    zero: bool


class CutStream:
    """Cuts one file, given the marks of its windows in order.

    1. Zero runs of at least grain.min_zero_run grains are pieces of their own.
    2. What lies between them is cut after a grain that is marked, once the block has
       grain.min_block grains, and in any case when it has grain.max_block.
    """

    def __init__(self, grain: Grain) -> None:
        self._grain = grain
        self._position = 0  # everything before has been handed out
        self._carried = Marks(np.zeros(0, np.bool_), np.zeros(0, np.bool_))
        self._inside_zero_run = False  # the last piece was zero and may go on

    @property
    def pending(self) -> int:
        """Grains seen and not yet handed out: under max_block + min_zero_run."""
        return len(self._carried.zero)

    def feed(self, marks: Marks, final: bool) -> list[Piece]:
        """The pieces that are decided now; all that are left when `final`.

        A zero run that goes on in the next window comes as several pieces in a row.
        """
        zero = np.concatenate([self._carried.zero, marks.zero])
        cut = np.concatenate([self._carried.cut, marks.cut])
        pieces = list(self._pieces(zero, cut, final))
        done = pieces[-1].end if pieces else 0
        self._inside_zero_run = pieces[-1].zero if pieces else self._inside_zero_run
        self._carried = Marks(zero[done:], cut[done:])
        base, self._position = self._position, self._position + done
        return [Piece(base + p.start, base + p.end, p.zero) for p in pieces]

    def _pieces(
        self, zero: NDArray[np.bool_], cut: NDArray[np.bool_], final: bool
    ) -> Iterator[Piece]:
        count = len(zero)
        cuts = (np.flatnonzero(cut) + 1).tolist()
        position = 0
        undecided = count  # blocks may end up to here
        for start, end in runs(zero):
            long = end - start >= self._grain.min_zero_run or (start == 0 and self._inside_zero_run)
            if long:
                yield from self._blocks(position, start, start, True, cuts)
                yield Piece(start, end, True)
                position = end
            elif end == count and not final:
                undecided = start  # the next window tells whether this run is long
        yield from self._blocks(position, count, undecided, final, cuts)

    def _blocks(
        self, start: int, end: int, limit: int, final: bool, cuts: list[int]
    ) -> Iterator[Piece]:
        """Blocks of the stretch [start, end), as far as they end by `limit`."""
        while start < end:
            earliest, latest = start + self._grain.min_block, start + self._grain.max_block
            at = bisect_left(cuts, earliest)
            stop = min(cuts[at], latest) if at < len(cuts) else latest
            if final:
                stop = min(stop, end)
            if stop > limit:
                return
            yield Piece(start, stop, False)
            start = stop


def runs(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of true."""
    padded = np.zeros(len(flags) + 2, np.int8)
    padded[1:-1] = flags
    edges = np.flatnonzero(np.diff(padded)).tolist()
    return zip(edges[::2], edges[1::2], strict=True)
