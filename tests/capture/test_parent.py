"""The parts of page-exact deduplication, each beside a slow model of it."""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import cast

import made_manifests
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from icefloe.capture import exact, export
from icefloe.capture.blocks import BATCH, Batch, read_extents, with_zeros
from icefloe.capture.exact import Beside, Run, View
from icefloe.capture.images import PAGE
from icefloe.capture.parent import (
    MAX_AMPLIFICATION,
    MIN_USE,
    NOWHERE,
    Budget,
    Pages,
    ParentFile,
)
from icefloe.errors import MissingPack
from icefloe.ids import BlockId, block_id
from icefloe.store.manifest import EXTENT_DTYPE, ZERO, Extents, FileKind, ImageFile

Row = tuple[int, int, int]
"""One extent: number of a block (ZERO for none), offset, length."""

Place = tuple[int, int] | None
"""Block and offset; None: nowhere, or zero."""


@lru_cache(None)
def page(number: int) -> bytes:
    """A page that differs from those of all other numbers; that of 0 is zero."""
    return number.to_bytes(8, "little") * (PAGE // 8)


def joined(numbers: Iterable[int]) -> bytes:
    """These pages, one behind the other."""
    return b"".join(map(page, numbers))


def extents(rows: Sequence[Row]) -> Extents:
    """As a manifest has them."""
    return np.array(list(rows), EXTENT_DTYPE)


class Fleeting:
    """Blocks as a reader gives them: what it gave is overwritten when it is asked for more."""

    def __init__(self, blocks: Mapping[int, bytes], size: int = 3) -> None:
        self.blocks = blocks
        self.size = size
        self.loads: Counter[int] = Counter()

    def fetch_any(self, numbers: Iterable[int]) -> Iterator[Batch]:
        return self.fetch(numbers)

    def fetch(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """See Blocks."""
        for part in batched(numbers, self.size):
            self.loads.update(part)
            missing = [number for number in part if number not in self.blocks]
            if missing:
                raise MissingPack(Path(f"/packs/{missing[0]}"))
            given = [(number, bytearray(self.blocks[number])) for number in part]
            yield given
            for _, raw in given:
                raw[:] = b"\xee" * len(raw)

    def close(self) -> None:
        """See Blocks."""


def batched(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    """A few at a time."""
    numbers = iter(numbers)
    while part := list(itertools.islice(numbers, size)):
        yield part


# --- read_extents -------------------------------------------------------------------------------

SMALL = {i: bytes((i * 7 + j * 13 + 1) % 251 for j in range(1 + i % 37)) for i in range(200)}


@st.composite
def small_rows(draw: st.DrawFn, most: int = 199) -> list[Row]:
    """Any extents into SMALL, many of them in turns."""
    rows: list[Row] = []
    for number in draw(st.lists(st.integers(-8, most), max_size=80)):
        if number < 0:
            rows.append((ZERO, 0, draw(st.integers(1, 50))))
        else:
            offset = draw(st.integers(0, len(SMALL[number]) - 1))
            rows.append((number, offset, draw(st.integers(1, len(SMALL[number]) - offset))))
    return rows


def slowly_read(blocks: Mapping[int, bytes], rows: Sequence[Row]) -> bytes:
    """What extents stand for."""
    return b"".join(
        bytes(length) if block == ZERO else blocks[block][offset : offset + length]
        for block, offset, length in rows
    )


@settings(deadline=None)
@given(small_rows(), st.integers(1, 70))
def test_any_extents_can_be_read(rows: list[Row], size: int) -> None:
    """Piece by piece, each whole before the next is asked for."""
    pieces = read_extents(Fleeting(SMALL, size), extents(rows))
    read = [(None if piece is None else bytes(piece), length) for piece, length in pieces]
    assert [length for _, length in read] == [length for _, _, length in rows]
    assert [piece is None for piece, _ in read] == [block == ZERO for block, _, _ in rows]
    content = b"".join(bytes(length) if piece is None else piece for piece, length in read)
    assert content == slowly_read(SMALL, rows)


@settings(deadline=None)
@given(small_rows(most=BATCH - 2), st.integers(1, 70))
def test_a_few_blocks_are_decoded_once(rows: list[Row], size: int) -> None:
    """However they take turns."""
    blocks = Fleeting(SMALL, size)
    for _ in read_extents(blocks, extents(rows)):
        pass
    assert set(blocks.loads.values()) <= {1}
    assert set(blocks.loads) == {block for block, _, _ in rows} - {ZERO}


@pytest.mark.parametrize("count", [BATCH - 1, BATCH, BATCH + 1, 2 * BATCH, 3 * BATCH + 1])
@pytest.mark.parametrize("zeros", [False, True])
def test_many_blocks_in_turns(count: int, zeros: bool) -> None:
    """Over and over, with and without zeros in between."""
    rows: list[Row] = []
    for i in range(5 * count):
        number = i % count
        rows.append((number, 0, len(SMALL[number])))
        if zeros:
            rows.append((ZERO, 0, 3))
    content = b"".join(map(bytes, with_zeros(read_extents(Fleeting(SMALL), extents(rows)))))
    assert content == slowly_read(SMALL, rows)


def test_zeros_come_in_pieces() -> None:
    """A hole of gigabytes takes no memory."""
    rows = [(ZERO, 0, 3 * (1 << 20) + 5), (0, 0, 1), (ZERO, 0, 1)]
    pieces = list(map(bytes, with_zeros(read_extents(Fleeting(SMALL), extents(rows)))))
    assert max(map(len, pieces)) <= 1 << 20
    assert b"".join(pieces) == slowly_read(SMALL, rows)


# --- spans of an export -------------------------------------------------------------------------

SPAN = export._SPAN_BYTES
LENGTHS = st.one_of(st.integers(1, 3 * SPAN), st.sampled_from([1, SPAN - 1, SPAN, SPAN + 1]))


def regular(path: str, size: int) -> ImageFile:
    """A regular file."""
    return ImageFile(path, FileKind.REGULAR, 0o600, 0, 0, 0, size)


@given(st.lists(st.lists(LENGTHS, max_size=12), max_size=4))
def test_spans_cover_all_extents(lengths: list[list[int]]) -> None:
    """Once, in order; none is more work than about a span, but for one long extent."""
    files = [regular(f"{i}", sum(of_file)) for i, of_file in enumerate(lengths)]
    files.append(ImageFile("z", FileKind.FIFO, 0o600, 0, 0, 0))
    runs: list[list[Row]] = [[(ZERO, 0, length) for length in of_file] for of_file in lengths]
    manifest = made_manifests.build(files, [*runs, []], [])
    expected = [(i, n) for i, of_file in enumerate(lengths) for n in range(len(of_file))]
    seen = []
    for span in export._spans(manifest):
        number = files.index(span.file)
        base = int(manifest.bounds[number])
        mine = lengths[number][span.first - base : span.last - base]
        assert mine and span.offset == sum(lengths[number][: span.first - base])
        assert sum(mine[1:]) <= SPAN
        seen += [(number, n - base) for n in range(span.first, span.last)]
    assert seen == expected


# --- files of the parent ------------------------------------------------------------------------


def parent_file(blocks: Sequence[bytes], rows: Sequence[Row]) -> ParentFile:
    """A file of these extents; its blocks by their numbers."""
    table = [(bytes(block_id(raw)), len(raw)) for raw in blocks]
    manifest = made_manifests.build([regular("pages-1.img", 0)], [list(rows)], table)
    return ParentFile(manifest, manifest.extents)


@settings(deadline=None)
@given(small_rows().filter(bool), st.data())
def test_any_part_of_a_file(rows: list[Row], data: st.DataObject) -> None:
    """Byte by byte."""
    file = parent_file([SMALL[i] for i in range(200)], rows)
    whole = [
        None if block == ZERO else (block, offset + i)
        for block, offset, length in rows
        for i in range(length)
    ]
    low = data.draw(st.integers(0, len(whole) - 1))
    high = data.draw(st.integers(low + 1, len(whole)))
    before = file._extents.copy()
    part = [
        None if block == ZERO else (block, offset + i)
        for block, offset, length in file._cut(low, high).tolist()
        for i in range(length)
    ]
    assert part == whole[low:high]
    assert (file._extents == before).all()
    assert all(not offset for block, offset, _ in file._cut(low, high).tolist() if block == ZERO)


@settings(deadline=None)
@given(small_rows())
def test_where_whole_blocks_stand(rows: list[Row]) -> None:
    """Any place of those at which they stand as a whole."""
    raws = [bytes([i]) + SMALL[i] for i in range(200)]  # no two alike
    rows = [(b, 0, len(raws[b])) if b != ZERO and b % 2 else (b, o, n) for b, o, n in rows]
    file = parent_file(raws, rows)
    places: dict[BlockId, set[int]] = {}
    position = 0
    for block, _, length in rows:
        if block != ZERO and length == len(raws[block]):
            places.setdefault(block_id(raws[block]), set()).add(position)
        position += length
    ids = [*map(block_id, raws), block_id(b"nobody knows it")]
    for identity, found in zip(ids, file.positions(ids), strict=True):
        assert found in places.get(identity, {NOWHERE})


@st.composite
def paged(draw: st.DrawFn) -> tuple[list[list[int]], list[Row]]:
    """Blocks of a few numbered pages, and the extents of a file of whole pages."""
    pages = st.lists(st.integers(0, 5), min_size=1, max_size=6)
    blocks = draw(st.lists(pages, min_size=1, max_size=5))
    rows: list[Row] = []
    for number in draw(st.lists(st.integers(-1, len(blocks) - 1), min_size=1, max_size=12)):
        if number < 0:
            rows.append((ZERO, 0, PAGE * draw(st.integers(1, 4))))
        else:
            offset = draw(st.integers(0, len(blocks[number]) - 1))
            length = draw(st.integers(1, len(blocks[number]) - offset))
            rows.append((number, offset * PAGE, length * PAGE))
    return blocks, rows


def places_of(rows: Sequence[Row]) -> list[Place]:
    """Where each page of a file stands."""
    return [
        None if block == ZERO else (block, offset + i)
        for block, offset, length in rows
        for i in range(0, length, PAGE)
    ]


@settings(deadline=None)
@given(paged(), st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(-8, 40))
def test_pages_are_compared(
    drawn: tuple[list[list[int]], list[Row]], stretch: list[int], first: int
) -> None:
    """Before, in and behind the file. Zero pages need not be found."""
    blocks, rows = drawn
    raws = list(map(joined, blocks))
    places = places_of(rows)
    file = parent_file(raws, rows)
    source = Fleeting(dict(enumerate(raws)))
    found = file.compare(source, memoryview(joined(stretch)), first * PAGE)
    for i, number in enumerate(stretch):
        place = places[first + i] if 0 <= first + i < len(places) else None
        is_equal = place is not None and raws[place[0]][place[1] :][:PAGE] == page(number)
        if found.block[i] != NOWHERE:
            assert is_equal and (found.block[i], found.offset[i]) == place
        elif number:
            assert not is_equal


def test_a_last_page_that_is_not_whole_equals_none() -> None:
    blocks = [joined([1, 2]) + b"short"]
    file = parent_file(blocks, [(0, 0, len(blocks[0]))])
    source = Fleeting(dict(enumerate(blocks)))
    found = file.compare(source, memoryview(joined([1, 2, 0])), 0)
    assert found.block.tolist() == [0, 0, NOWHERE]
    behind = file.compare(source, memoryview(joined([1])), 2 * PAGE)
    assert behind.block.tolist() == [NOWHERE]


@pytest.mark.parametrize("missing", range(4))
def test_what_cannot_be_read_equals_nothing(missing: int) -> None:
    """It, and perhaps what was read with it."""
    raws = {i: joined(range(i * 4 + 1, i * 4 + 5)) for i in range(4)}
    file = parent_file([*raws.values()], [(i, 0, 4 * PAGE) for i in range(4)])
    damaged = Fleeting({i: raw for i, raw in raws.items() if i != missing}, 1)
    found = file.compare(damaged, memoryview(b"".join(raws.values())), 0)
    assert found.block[: 4 * missing].tolist() == [i // 4 for i in range(4 * missing)]
    assert missing not in found.block


@settings(deadline=None)
@given(st.data())
def test_a_search_finds_what_moved(data: st.DataObject) -> None:
    """Wherever it went within reach, if it is enough."""
    length = data.draw(st.integers(8, 60))
    numbers = list(range(1, length + 1))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=5)))
    bounds = [0, *cuts, length]
    raws = [joined(numbers[low:high]) for low, high in itertools.pairwise(bounds)]
    file = parent_file(raws, [(i, 0, len(raw)) for i, raw in enumerate(raws)])
    first = data.draw(st.integers(0, length - 8))
    count = data.draw(st.integers(8, length - first))
    position = data.draw(st.integers(0, 100)) * PAGE
    stretch = joined(numbers[first : first + count])
    found = file.search(Fleeting(dict(enumerate(raws))), memoryview(stretch), position)
    assert found == first * PAGE - position


def test_a_search_that_finds_too_little() -> None:
    """A few pages alike, all of them zero, out of reach, or not readable."""
    raw = joined(range(1, 101))
    file = parent_file([raw], [(0, 0, len(raw))])
    source = Fleeting({0: raw})
    few = joined([*range(1, 8), *range(200, 240)])
    assert file.search(source, memoryview(few), 0) is None
    assert file.search(source, memoryview(bytes(40 * PAGE)), 0) is None
    assert file.search(source, memoryview(raw), 700 * PAGE) is None
    assert file.search(source, memoryview(raw), -700 * PAGE) is None
    assert file.search(Fleeting({}), memoryview(raw), 0) is None
    assert file.search(source, memoryview(raw), -100 * PAGE) == 100 * PAGE


# --- the budget ---------------------------------------------------------------------------------


def pages_in(places: Sequence[Place]) -> Pages:
    """Where each page of a stretch was found."""
    block = [NOWHERE if place is None else place[0] for place in places]
    offset = [0 if place is None else place[1] for place in places]
    return Pages(np.array(block, np.int64), np.array(offset, np.int64))


class SlowBudget:
    """The same in fractions: the best blocks first, as many as may be."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.taken: set[int] = set()
        self.read = self.used = 0

    def use(self, pages: int) -> None:
        """Blocks that are used whole."""
        self.read += pages
        self.used += pages

    def spend(self, blocks: Sequence[int]) -> set[int]:
        """The blocks that are pointed into, of those where pages were found."""
        uses = Counter(block for block in blocks if block != NOWHERE)
        price = {block: 0 if block in self.taken else self.lengths[block] for block in uses}
        worth = [b for b in sorted(uses) if uses[b] >= Fraction(MIN_USE) * price[b]]
        worth.sort(key=lambda block: Fraction(price[block], uses[block]))
        self.used += len(blocks)
        for count in range(len(worth), -1, -1):
            chosen = worth[:count]
            read = sum(price[b] - uses[b] for b in chosen) + len(blocks)
            if self.read + read <= Fraction(MAX_AMPLIFICATION) * self.used or not count:
                break
        self.read += read
        self.taken.update(chosen)
        return set(chosen)


CALLS = st.lists(
    st.one_of(
        st.integers(0, 30),
        st.lists(st.integers(NOWHERE, 5), max_size=30),
        st.lists(st.sampled_from([NOWHERE, 0, 1]), max_size=12),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(st.lists(st.integers(1, 24), min_size=6, max_size=6), CALLS)
def test_never_above_the_budget(lengths: list[int], calls: list[int | list[int]]) -> None:
    """In any order of calls. A call takes all pages of a block, or none."""
    budget, slow = Budget(np.array(lengths, np.uint32) * PAGE), SlowBudget(lengths)
    taken: set[int] = set()
    read = used = 0
    for call in calls:
        if isinstance(call, int):
            budget.use(call * PAGE)
            slow.use(call)
            read, used = read + call, used + call
            continue
        pages = pages_in([None if block == NOWHERE else (block, i) for i, block in enumerate(call)])
        left = budget.spend(pages)
        assert pages.block.tolist() == call, "what it was given is changed"
        kept = {block for block in left.block.tolist() if block != NOWHERE}
        expected = [block if block in kept else NOWHERE for block in call]
        assert left.block.tolist() == expected
        assert (left.offset == pages.offset).all()
        assert all(call.count(block) >= MIN_USE * lengths[block] for block in kept - taken)
        read += sum(lengths[block] for block in kept - taken) + expected.count(NOWHERE)
        used += len(call)
        taken |= kept
        assert read <= MAX_AMPLIFICATION * used
        assert kept == slow.spend(call)


@pytest.mark.parametrize(("length", "uses", "kept"), [(100, 25, True), (101, 25, False)])
def test_a_quarter_of_a_block_is_the_least(length: int, uses: int, kept: bool) -> None:
    """Exactly, with a budget that has room."""
    budget = Budget(np.array([length], np.uint32) * PAGE)
    budget.use(10_000 * PAGE)
    left = budget.spend(pages_in([(0, i * PAGE) for i in range(uses)]))
    assert (left.block != NOWHERE).all() == kept
    assert (left.block == NOWHERE).all() != kept


@pytest.mark.parametrize(("length", "kept"), [(15, True), (16, False)])
def test_the_budget_goes_as_far_as_it_says(length: int, kept: bool) -> None:
    """15 pages for 10 are the most."""
    budget = Budget(np.array([length], np.uint32) * PAGE)
    left = budget.spend(pages_in([(0, i * PAGE) for i in range(10)]))
    assert (left.block != NOWHERE).all() == kept


def test_a_budget_and_nothing_to_spend() -> None:
    budget = Budget(np.zeros(0, np.uint32))
    assert len(budget.spend(pages_in([])).block) == 0
    assert budget.spend(pages_in([None])).block.tolist() == [NOWHERE]
    budget.use(0)


def test_a_block_is_paid_once() -> None:
    """Afterwards a single page of it is welcome."""
    budget = Budget(np.array([12], np.uint32) * PAGE)
    first = pages_in([(0, i * PAGE) for i in range(8)])
    assert (budget.spend(first).block == 0).all()
    assert budget.spend(pages_in([(0, 0)])).block.tolist() == [0]


def test_a_part_of_a_page_is_read_too() -> None:
    """Blocks of small files end anywhere: 8191 bytes for 4096 are too much."""
    budget = Budget(np.array([2 * PAGE - 1], np.uint32))
    assert budget.spend(pages_in([(0, 0)])).block.tolist() == [NOWHERE]


def test_threads_share_a_budget() -> None:
    """What all of them got together is within it."""
    lengths = [7, 9, 13, 16, 20, 24] * 20
    budget = Budget(np.array(lengths, np.uint32) * PAGE)
    start = threading.Barrier(4)

    def spend(thread: int) -> list[Pages]:
        start.wait()
        got = []
        for i in range(len(lengths)):
            number = (i * 7 + thread * 31) % len(lengths)
            budget.use((i % 2) * PAGE)
            got.append(budget.spend(pages_in([(number, j * PAGE) for j in range(6)])))
        return got

    with ThreadPoolExecutor(4) as pool:
        results = [pages for got in pool.map(spend, range(4)) for pages in got]
    found = np.concatenate([pages.block for pages in results])
    whole = 4 * len(lengths) // 2
    blocks = set(found[found != NOWHERE].tolist())
    read = sum(lengths[b] for b in blocks) + int((found == NOWHERE).sum()) + whole
    assert read <= MAX_AMPLIFICATION * (len(found) + whole)
    assert blocks


# --- runs of blocks -----------------------------------------------------------------------------


def views_of(contents: Sequence[bytes], gaps: Sequence[int]) -> list[View]:
    """Blocks of a window, each so many bytes behind the one before."""
    window = b"".join(bytes(gap) + content for content, gap in zip(contents, gaps, strict=True))
    views: list[View] = []
    position = 0
    for content, gap in zip(contents, gaps, strict=True):
        onward = memoryview(window)[position + gap :]
        views.append(View(onward[: len(content)], position + gap, onward))
        position = views[-1].end
    return views


class Told:
    """Stands for Beside: says what it was told to; remembers what it was asked."""

    def __init__(
        self, found: Callable[[View], Sequence[Place]], zero: Sequence[bool] | None = None
    ) -> None:
        self.found = found
        self.zero = zero
        self.asked: list[tuple[list[int], list[int]]] = []
        self.budget = self
        self.spent: list[int] = []

    def find(
        self, blocks: object, views: Sequence[View], shifts: Sequence[int]
    ) -> tuple[Pages, NDArray[np.bool_]]:
        """See Beside."""
        self.asked.append(([view.start for view in views], list(shifts)))
        pages = pages_in([place for view in views for place in self.found(view)])
        return pages, np.array(self.zero or [False] * len(pages.block), np.bool_)

    def spend(self, pages: Pages, zero: NDArray[np.bool_]) -> Pages:
        """See Budget: all that is asked for, at once for a window."""
        self.spent.append(len(pages.block))
        assert len(zero) == len(pages.block)
        return pages


def slow_stretches(views: Sequence[View], known: Sequence[bool]) -> list[list[int]]:
    """The longest rows of neighbours that may be divided."""
    out: list[list[int]] = []
    for i, view in enumerate(views):
        if known[i] or len(view.raw) % PAGE:
            continue
        if out and out[-1][-1] == i - 1 and views[i - 1].end == view.start:
            out[-1].append(i)
        else:
            out.append([i])
    return out


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[View], list[bool], list[int], dict[int, list[bool]]]:
    """Blocks; which are known; where they stand; which pages of them are found, by start."""
    lengths = draw(st.lists(st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE, 100]), max_size=8))
    count = len(lengths)
    few = st.sampled_from([0, 0, PAGE])
    gaps = draw(st.lists(few, min_size=count, max_size=count))
    known = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    views = views_of([bytes(length) for length in lengths], gaps)
    there = [draw(st.integers(0, 9)) * PAGE if k and draw(st.booleans()) else -1 for k in known]
    sizes = {view.start: len(view.raw) // PAGE for view in views}
    some = {s: draw(st.lists(st.booleans(), min_size=n, max_size=n)) for s, n in sizes.items()}
    return views, known, there, some


@settings(deadline=None)
@given(windows())
def test_what_is_divided(
    window: tuple[list[View], list[bool], list[int], dict[int, list[bool]]],
) -> None:
    """Neighbours of which something was found; asked for once, with what is known around."""
    views, known, there, some = window
    assert list(exact._stretches(views, known)) == [
        (stretch[0], stretch[-1] + 1) for stretch in slow_stretches(views, known)
    ]
    told = Told(lambda view: [(3, view.start) if f else None for f in some[view.start]])
    beside = cast(Beside, told)
    runs = exact.divide(beside, Fleeting({}), views, known, there)
    expected = []
    for stretch in slow_stretches(views, known):
        for has_some, part in itertools.groupby(stretch, lambda i: any(some[views[i].start])):
            if has_some:
                expected.append(list(part))
    assert [list(range(run.first, run.last)) for run in runs] == expected
    for run in runs:
        flags = [f for view in views[run.first : run.last] for f in some[view.start]]
        assert (run.pages.block != NOWHERE).tolist() == flags
    check_hints(told, views, known, there)
    asked = sum(
        len(some[view.start])
        for s in slow_stretches(views, known)
        for view in map(views.__getitem__, s)
    )
    assert told.spent == ([asked] if asked else [])


@pytest.mark.parametrize(("zeros", "divided"), [(0, False), (3, False), (4, True), (15, True)])
def test_hollow_blocks(zeros: int, divided: bool) -> None:
    """A block with many zero pages is taken apart, whether anything was found or not."""
    flags = [i < zeros for i in range(16)]
    told = cast(Beside, Told(lambda view: [None] * 16, flags))
    views = views_of([bytes(16 * PAGE)], [0])
    runs = exact.divide(told, Fleeting({}), views, [False], [NOWHERE])
    assert [(run.first, run.last) for run in runs] == ([(0, 1)] if divided else [])


def check_hints(told: Told, views: list[View], known: list[bool], there: list[int]) -> None:
    """The nearest blocks before and behind that stand somewhere in the parent."""
    expected = []
    for stretch in slow_stretches(views, known):
        before = [i for i in range(stretch[0]) if there[i] != NOWHERE][-1:]
        behind = [i for i in range(stretch[-1] + 1, len(views)) if there[i] != NOWHERE][:1]
        shifts = [there[i] - views[i].start for i in before + behind]
        expected.append(([views[i].start for i in stretch], shifts))
    assert told.asked == expected


@st.composite
def found_runs(draw: st.DrawFn) -> tuple[list[list[int]], list[list[tuple[int, bool]]]]:
    """Blocks of the parent as numbered pages; runs of pages as numbers, found or not."""
    pages = st.lists(st.integers(1, 6), min_size=1, max_size=5)
    blocks = draw(st.lists(pages, min_size=1, max_size=4))
    one = st.tuples(st.integers(0, 6), st.booleans())
    return blocks, draw(st.lists(st.lists(one, min_size=1, max_size=12), max_size=4))


def a_place(blocks: Sequence[Sequence[int]], number: int, salt: int) -> Place:
    """One of those where the parent has a page."""
    places = [
        (b, o * PAGE) for b, row in enumerate(blocks) for o, n in enumerate(row) if n == number
    ]
    return places[salt % len(places)] if places else None


@settings(deadline=None)
@given(found_runs(), st.integers(0, 3))
def test_a_run_is_what_it_was(
    drawn: tuple[list[list[int]], list[list[tuple[int, bool]]]], salt: int
) -> None:
    """Read back from its extents, byte for byte; only pages that are new are left."""
    blocks, contents = drawn
    views = views_of([joined(n for n, _ in run) for run in contents], [PAGE] * len(contents))
    found = [
        [a_place(blocks, n, salt + i) if f else None for i, (n, f) in enumerate(run)]
        for run in contents
    ]
    check_runs(blocks, views, found)


def check_runs(
    blocks: Sequence[Sequence[int]], views: Sequence[View], found: Sequence[Sequence[Place]]
) -> None:
    """Gathers what is left of runs of one block each, and reads their extents."""
    runs = [Run(i, i + 1, pages_in(places)) for i, places in enumerate(found)]
    rest, places = exact.gather(views, runs)
    left = [
        bytes(view.raw[i * PAGE : (i + 1) * PAGE])
        for view, of_view in zip(views, found, strict=True)
        for i, place in enumerate(of_view)
        if place is None
    ]
    assert b"".join(map(bytes, rest)) == b"".join(part for part in left if any(part))
    assert all(len(part) == 256 * PAGE for part in rest[:-1])
    assert all(0 < len(part) <= 256 * PAGE for part in rest)
    numbers = {i: 100 + i for i in range(len(blocks))}
    here = {numbers[i]: joined(block) for i, block in enumerate(blocks)}
    here |= {50 + i: bytes(part) for i, part in enumerate(rest)}
    for run, place, view in zip(runs, places, views, strict=True):
        rows = exact.rows(run.pages, place, numbers, [50 + i for i in range(len(rest))])
        assert slowly_read(here, rows.tolist()) == view.raw
        check_joined(rows.tolist())


def check_joined(rows: Sequence[Row]) -> None:
    """No two neighbours could be one extent."""
    for (block, offset, length), (number, start, _) in itertools.pairwise(rows):
        assert block != number or (block != ZERO and offset + length != start)


def test_more_is_left_than_one_block_holds() -> None:
    """Over the runs: every block but the last is full."""
    numbers = list(range(1, 701))
    parts = [numbers[:300], numbers[300:301], numbers[301:]]
    views = views_of(list(map(joined, parts)), [0, 0, 0])
    found: list[list[Place]] = [[(0, 0) if n == 1 else None for n in part] for part in parts]
    check_runs([[1]], views, found)
    rest, _ = exact.gather(views, [Run(i, i + 1, pages_in(p)) for i, p in enumerate(found)])
    assert len(rest) == math.ceil(699 / 256)


def test_nothing_is_left() -> None:
    assert exact.gather([], []) == ([], [])
    views = views_of([joined([0, 3])], [0])
    rest, _ = exact.gather(views, [Run(0, 1, pages_in([None, (0, 0)]))])
    assert rest == []
    check_runs([[3]], views, [[None, (0, 0)]])
