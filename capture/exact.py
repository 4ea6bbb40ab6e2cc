"""The page step: what is unknown of a window is laid beside the parent, and cut into pages.

Pure but for the blocks of the parent that it reads. `capture/ingest.py` stores what is left.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.capture.assembly import merge
from icefloe.capture.blocks import Blocks
from icefloe.capture.images import PAGE
from icefloe.capture.parent import MIN_FOUND, NOWHERE, Budget, Pages, ParentFile, join
from icefloe.chunker import MAX_BLOCK, runs
from icefloe.ids import BlockId
from icefloe.store.manifest import EXTENT_DTYPE, ZERO, Extents

# A stretch counts as similar when this share of its pages is found. When so many pages in a row
# were in others, the file is hardly like its parent, and only every so many stretches are tried,
# or what stands beside something known.
_SIMILAR = 0.05
_PATIENCE = 2048
_TRIED = 64

# What is missing in one place is looked for in the next only if it is more than this.
_FEW = 0.1
_SEARCHES = 3

# A block of which this share is zero pages is better taken apart, too.
_HOLLOW = 0.25

_REST_PAGES = MAX_BLOCK // PAGE


class Beside:
    """Where a file stands beside its parent: what is inserted or removed shifts what follows.

    Threads share it; what one learns is a hint to the others.
    """

    def __init__(self, parent: ParentFile, budget: Budget, shift: int = 0) -> None:
        """`shift`: how much further the parent has what stands here, as far as anybody knows."""
        self.number = parent.number
        self.budget = budget
        self._parent = parent
        self._shift = shift
        self._missed = 0
        self._skipped = 0

    @property
    def doubtful(self) -> bool:
        """Whether the last stretch was not like the parent, as far as that is known."""
        return self._missed > 0

    @property
    def lost(self) -> bool:
        """Whether the file is hardly like its parent."""
        return self._missed > _PATIENCE

    def positions(self, ids: Sequence[BlockId]) -> list[int]:
        """See ParentFile."""
        return self._parent.positions(ids)

    def find(
        self, blocks: Blocks, views: Sequence["View"], shifts: Sequence[int]
    ) -> tuple[Pages, NDArray[np.bool_]]:
        """The pages of a stretch, block by block, that the parent has, and which of them are zero.

        `shifts`: how much further the parent has what stands around it.
        """
        position = views[0].start
        count = (views[-1].end - position) // PAGE
        found = Pages(np.full(count, NOWHERE, np.int64), np.zeros(count, np.int64))
        self._skipped += self.lost
        if self.lost and self._skipped % _TRIED and not shifts:
            return found, np.zeros(count, np.bool_)
        stretch = views[0].onward[: views[-1].end - position]
        zero = _zero_pages(stretch)
        content = count - int(zero.sum())
        best = 0
        for shift in self._shifts(blocks, stretch, position, shifts, zero, found):
            missing = ~zero & (found.block == NOWHERE)
            pages = self._parent.compare(blocks, stretch, position + shift)
            new = missing & (pages.block != NOWHERE)
            found.block[new], found.offset[new] = pages.block[new], pages.offset[new]
            if (more := int(new.sum())) > best:
                best, self._shift = more, shift
        # Only now: others are at it, too, and what they are at is not missed yet.
        if best > _SIMILAR * content:
            self._missed = self._skipped = 0
        else:
            self._missed += content
        return found, zero

    def _shifts(
        self,
        blocks: Blocks,
        stretch: memoryview,
        position: int,
        near: Sequence[int],
        zero: NDArray[np.bool_],
        found: Pages,
    ) -> Iterator[int]:
        """The shifts to try, as long as enough is missing; what comes of them is in `found`."""
        usual = self._shift
        few = max(_FEW * len(zero), MIN_FOUND)
        tried: set[int] = set()
        for shift in (*near, usual, 0):
            missing = (~zero & (found.block == NOWHERE)).sum()
            if missing > (few if tried else 0) and shift not in tried:
                tried.add(shift)
                yield shift
        for _ in range(_SEARCHES):
            gaps = runs(~zero & (found.block == NOWHERE))
            first, last = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0, 0))
            if last - first <= few:
                return
            part = stretch[first * PAGE : last * PAGE]
            far = self._parent.search(blocks, part, position + first * PAGE + usual)
            if far is None or usual + far in tried:
                return
            tried.add(usual + far)
            yield usual + far


def _zero_pages(stretch: memoryview) -> NDArray[np.bool_]:
    """Which pages are zero."""
    words = np.frombuffer(stretch, np.uint64).reshape(-1, PAGE // 8)
    zero: NDArray[np.bool_]
    zero = (words[:, 0] | words[:, 255] | words[:, -1]) == 0  # most are not, and show it
    suspects = np.flatnonzero(zero)
    zero[suspects] = ~words[suspects].any(axis=1)
    return zero


@dataclass(frozen=True, slots=True)
class View:
    """A block of a window: its bytes, and where they start in the file.

    `onward` is the window from there on: what follows in the file follows there, too.
    """

    raw: memoryview
    start: int
    onward: memoryview

    @property
    def end(self) -> int:
        """Where what follows starts."""
        return self.start + len(self.raw)


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks [first, last) of a window, one behind the other, and where their pages are."""

    first: int
    last: int
    pages: Pages


def divide(
    beside: Beside, blocks: Blocks, views: Sequence[View], known: Sequence[bool], there: list[int]
) -> list[Run]:
    """Which of these blocks consist of pages that the parent has or zero ones, some at least.

    `there`: where the parent has a block as a whole, NOWHERE if it hasn't.
    """
    stretches = list(_stretches(views, known))
    looked = []
    for first, last in stretches:
        around = (range(first - 1, -1, -1), range(last, len(views)))
        anchors = [next((i for i in side if there[i] != NOWHERE), None) for side in around]
        near = [there[i] - views[i].start for i in anchors if i is not None]
        looked.append(beside.find(blocks, views[first:last], near))
    if not looked:
        return []
    # What is left of a window is in one block, of which each stretch of the next has a little.
    zero = np.concatenate([zero for _, zero in looked])
    spent = beside.budget.spend(join([pages for pages, _ in looked]), zero)
    found: list[Run] = []
    done = 0
    for first, last in stretches:
        ends = np.cumsum([len(view.raw) // PAGE for view in views[first:last]])
        starts = np.concatenate([[0], ends[:-1]])
        mine = slice(done, done + int(ends[-1]))
        done, pages = mine.stop, spent[mine]
        some = np.logical_or.reduceat(pages.block != NOWHERE, starts)
        some |= np.add.reduceat(zero[mine].astype(np.int64), starts) >= _HOLLOW * (ends - starts)
        for low, high in runs(some):
            part = slice(int(starts[low]), int(ends[high - 1]))
            found.append(Run(first + low, first + high, pages[part]))
    return found


def _stretches(views: Sequence[View], known: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of blocks of whole pages that nobody knows, one behind the other."""
    first = 0
    for i in range(len(views) + 1):
        fits = i < len(views) and not known[i] and len(views[i].raw) % PAGE == 0
        if fits and (i == first or views[i].start == views[i - 1].end):
            continue
        if i > first:
            yield first, i
        first = i if fits else i + 1


def gather(
    views: Sequence[View], divided: Sequence[Run]
) -> tuple[list[memoryview], list[NDArray[np.int64]]]:
    """The pages that are left of these runs, in blocks as full as they get.

    And for each page of each run its place there; one that was found or is zero has NOWHERE.
    """
    kept: list[NDArray[np.uint8]] = [np.zeros((0, PAGE), np.uint8)]
    places, count = [], 0
    for run in divided:
        place = np.full(len(run.pages.block), NOWHERE, np.int64)
        done = 0
        for view in views[run.first : run.last]:
            content = np.frombuffer(view.raw, np.uint64).reshape(-1, PAGE // 8)
            missing = np.flatnonzero(run.pages.block[done : done + len(content)] == NOWHERE)
            missing = missing[content[missing].any(axis=1)]
            place[done + missing] = count + np.arange(len(missing))
            count += len(missing)
            kept.append(content[missing].view(np.uint8))
            done += len(content)
        places.append(place)
    rest = np.concatenate(kept)
    starts = range(0, count, _REST_PAGES)
    return [rest[i : i + _REST_PAGES].reshape(-1).data for i in starts], places


def rows(
    pages: Pages, place: NDArray[np.int64], numbers: Mapping[int, int], rest: Sequence[int]
) -> Extents:
    """The extents of a run.

    `numbers`: those of the parent's blocks in this image; `rest`: those of what was left.
    """
    extents = np.zeros(len(place), EXTENT_DTYPE)
    extents["block"], extents["length"] = ZERO, PAGE
    found, left = pages.block != NOWHERE, place != NOWHERE
    used, which = np.unique(pages.block[found], return_inverse=True)
    extents["block"][found] = np.array([numbers[block] for block in used.tolist()], np.uint32)[
        which
    ]
    extents["offset"][found] = pages.offset[found]
    extents["block"][left] = np.array(rest, np.uint32)[place[left] // _REST_PAGES]
    extents["offset"][left] = place[left] % _REST_PAGES * PAGE
    return merge(extents)
