"""What restores record, and what the next one makes of it."""

import multiprocessing
import shutil
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from blake3 import blake3
from fake_blocks import ZERO, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from icefloe.capture import tracing
from icefloe.capture.fill import Touch
from icefloe.capture.images import AREA_DTYPE, PAGE, Columns
from icefloe.capture.memory import SEGMENT_DTYPE, Memory
from icefloe.capture.plan import Plan
from icefloe.store import trace as traces
from icefloe.store.layout import Layout
from icefloe.store.trace import EMPTY, MAX_RUNS, RunDoor, Trace

LINEAGE = "worker-a"


def regions_at(*rows: tuple[int, int, int]) -> Columns:
    """Regions by task, first page and pages."""
    return np.array([(at * PAGE, n * PAGE, task, 0) for task, at, n in rows], traces.REGION_DTYPE)


def touches_at(*rows: tuple[int, int, int]) -> Columns:
    """Touches by region, page and time."""
    return np.array([(page, region, time) for region, page, time in rows], traces.TOUCH_DTYPE)


def lazy(*, replayed: bool = True, filled: float = 8.25, stalled: float = 7.5) -> Columns:
    """A lazy restore; as it is, one that did nothing but wait."""
    times = {"resumed": 0.25, "filled": filled, "stalled": stalled}
    return tracing.run_row("lazy", replayed=replayed, faults=3, **times)


def other(door: Literal["eager", "stream"], seconds: float) -> Columns:
    """A restore that had all memory when it resumed."""
    times = {"resumed": seconds, "filled": seconds, "stalled": 0.0}
    return tracing.run_row(door, replayed=False, faults=0, **times)


def same(a: Trace, b: Trace) -> bool:
    """Alike to the byte."""
    parts = (a.regions, b.regions), (a.touches, b.touches), (a.runs, b.runs)
    return all(one.tobytes() == two.tobytes() for one, two in parts)


# --- the file -----------------------------------------------------------------------------------

REGIONS = regions_at((0, 16, 100), (1, 16, 4000))
ONE, TWO = touches_at((0, 5, 10), (1, 7, 20)), touches_at((1, 9, 5), (1, 7, 15))


def test_record_and_load(tmp_path: Path) -> None:
    """Under the name of its lineage alone, merged with what was there; nobody else may look."""
    layout = Layout(tmp_path / "store")
    assert tracing.load(layout, LINEAGE) is EMPTY
    for touches in (ONE, TWO):
        assert tracing.record(layout, LINEAGE, REGIONS, touches, lazy())
    touches, runs = touches_at((1, 9, 5), (0, 5, 10), (1, 7, 15)), np.concatenate([lazy(), lazy()])
    assert same(tracing.load(layout, LINEAGE), Trace(REGIONS, touches, runs))
    assert tracing.load(layout, "worker-b") is EMPTY
    (path,) = layout.traces.iterdir()
    assert path.name == blake3(LINEAGE.encode()).hexdigest()[:32]
    assert [layout.traces.stat().st_mode & 0o777, path.stat().st_mode & 0o777] == [0o700, 0o600]


def test_a_restore_without_touches(tmp_path: Path) -> None:
    """Another one may have recorded since it began: nothing of that is lost."""
    layout, none = Layout(tmp_path / "store"), ONE[:0]
    assert tracing.record(layout, LINEAGE, None, none, lazy())
    assert tracing.record(layout, LINEAGE, REGIONS, ONE, lazy())
    assert tracing.record(layout, LINEAGE, None, none, lazy())
    assert same(tracing.load(layout, LINEAGE), Trace(REGIONS, ONE, np.concatenate([lazy()] * 3)))


def spoiled(layout: Layout, how: str) -> None:
    """A trace that is damaged, or that something else is in the place of."""
    assert tracing.record(layout, LINEAGE, REGIONS, ONE, lazy())
    content = (path := layout.trace(LINEAGE)).read_bytes()
    if how.startswith("file"):
        place = layout.root if how == "file for store" else layout.traces
        shutil.rmtree(place)
        place.touch()
        return
    path.unlink()
    if how == "damaged":
        path.write_bytes(content[:-1])
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "folder":
        path.mkdir()


USABLE, BLOCKED = ("gone", "damaged", "loop"), ("folder", "file for traces", "file for store")


@pytest.mark.parametrize("how", USABLE + BLOCKED)
def test_what_can_not_be_read(tmp_path: Path, how: str) -> None:
    """It counts as none, and is made anew where that can be done; nothing is raised."""
    layout = Layout(tmp_path / "store")
    spoiled(layout, how)
    assert tracing.load(layout, LINEAGE) is EMPTY
    assert tracing.record(layout, LINEAGE, REGIONS, TWO, lazy()) is (how in USABLE)
    wanted = Trace(REGIONS, TWO, lazy()) if how in USABLE else EMPTY
    assert same(tracing.load(layout, LINEAGE), wanted)


EACH = 40


def _record(first: int, layout: Layout, together: Barrier) -> None:
    together.wait(30)
    for page in range(first, first + EACH):
        assert tracing.record(layout, LINEAGE, REGIONS, touches_at((1, page, page)), lazy())


def test_recording_at_once(tmp_path: Path) -> None:
    """Two processes: no touch and no run is lost."""
    layout, context = Layout(tmp_path / "store"), multiprocessing.get_context("fork")
    rest = (layout, context.Barrier(2))
    children = [context.Process(target=_record, args=(first, *rest)) for first in (0, EACH)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    found = tracing.load(layout, LINEAGE)
    assert found.touches["page"].tolist() == list(range(2 * EACH))
    assert len(found.runs) == MAX_RUNS and len(list(layout.recorded())) == 1


# --- regions and touches ------------------------------------------------------------------------


def test_regions_of() -> None:
    """Private anonymous areas, neither locked nor huge, by position of the process in the tree."""
    private, shared, anonymous, locked, huge = 0x02, 0x01, 0x20, 0x2000, 0x40000
    kinds = [private | anonymous, private, shared | anonymous, private | anonymous | locked]
    kinds += [private | anonymous | huge, private | anonymous]
    rows = [(i << 20, (i << 20) + (i + 1) * PAGE, flags, 1) for i, flags in enumerate(kinds)]
    rows.append((9 << 20, 10 << 20, private | anonymous, 1 << 3))  # the vdso
    areas, lacking = np.array(rows, AREA_DTYPE), np.zeros(0, SEGMENT_DTYPE)
    memories = [
        Memory("pagemap-7.img", 7, 1, lacking, areas[:1]),
        Memory("pagemap-9.img", 9, 2, lacking, areas),
        Memory("pagemap-shmem-8.img", None, 3, lacking, areas),
    ]
    found = tracing.regions_of(memories, [9, 8, 7])
    assert found.tolist() == regions_at((0, 0, 1), (0, 5 << 8, 6), (2, 0, 1)).tolist()
    assert not len(tracing.regions_of([], [1]))


@st.composite
def region_tables(draw: st.DrawFn) -> Columns:
    """The areas of up to three processes, some of which have none."""
    rows: list[tuple[int, int, int]] = []
    for task in range(draw(st.integers(0, 3))):
        position = draw(st.integers(1, 4))
        for pages in draw(st.lists(st.integers(1, 3), max_size=4)):
            rows.append((task, position, pages))
            position += pages + draw(st.integers(0, 2))
    return regions_at(*rows)


seconds = st.floats(-1, 1e8) | st.integers(0, 1 << 40).map(float)
pages, rests = st.integers(0, 16), st.sampled_from([0, 1, PAGE - 1])
origins = st.builds(lambda page, rest: page * PAGE + rest, pages, rests)
found_touches = st.builds(Touch, st.integers(0, 2), origins, seconds)


@given(region_tables(), st.lists(found_touches, max_size=20))
@settings(max_examples=200, deadline=None)
def test_touches_one_by_one(regions: Columns, found: Sequence[Touch]) -> None:
    """Each in its region, in order; one outside of all of them is on no page that a region has."""
    wanted = []
    for touch in found:
        for region, (start, length, task, _) in enumerate(regions.tolist()):
            if task == touch.task and start <= touch.origin < start + length:
                time = int(min(max(touch.seconds * 1000, 0), 0xFFFF_FFFF))
                wanted.append(((touch.origin - start) // PAGE, region, time))
    rows = tracing.touches_of(found, regions)
    inside = rows["page"] < regions["length"][rows["region"]] // PAGE
    assert rows[inside].tolist() == wanted


# --- the next restore ---------------------------------------------------------------------------


def test_units_of() -> None:
    """The units of what was touched, in order of time, each once, wherever memory is now."""
    one = [(16 * PAGE, 4, 2, 0), (20 * PAGE, 4, 0, 0), (40 * PAGE, 8, ZERO, 0)]
    two = [(16 * PAGE, 4, 1, 0), (20 * PAGE, 4, 2, 4)]
    plan = Plan([5, 6], {5: segments(one), 6: segments(two)}, 3)
    regions = regions_at((0, 16, 16), (0, 40, 8), (1, 16, 16))
    old = regions_at((0, 16, 16), (0, 90, 8), (0, 99, 5), (1, 70, 16))
    rows = [(3, 5, 1), (1, 7, 2), (2, 0, 3), (0, 9, 4), (0, 0, 5), (3, 3, 6), (1, 0, 7), (0, 7, 8)]
    trace = Trace(old, touches_at(*rows), EMPTY.runs)
    assert tracing.units_of(trace, regions, plan).tolist() == [2, 3 + 2, 1, 0]  # row 2 is zero
    for lacking in (EMPTY, Trace(old[2:3], touches_at((0, 1, 1)), EMPTY.runs)):
        assert tracing.units_of(lacking, regions, plan).tolist() == []


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40)), max_size=12))
@settings(deadline=None)
def test_what_was_touched_comes_first(places: list[tuple[int, int]]) -> None:
    """From the faults of one restore to the order of the next, as the plan knows their units."""
    rows = [(16 * PAGE, 4, 2, 0), (20 * PAGE, 4, 0, 0), (30 * PAGE, 8, ZERO, 0)]
    plan = Plan([5, 6], {5: segments(rows), 6: segments(rows[:2])}, 3)
    regions = regions_at((0, 16, 10), (0, 30, 8), (1, 16, 16))
    found = [Touch(task, page * PAGE, float(i)) for i, (task, page) in enumerate(places)]
    numbers = [plan.find(task, page * PAGE) for task, page in places]
    wanted = list(dict.fromkeys(plan.unit(number) for number in numbers if number is not None))
    trace = traces.merge(EMPTY, regions, tracing.touches_of(found, regions), EMPTY.runs)
    assert tracing.units_of(trace, regions, plan).tolist() == wanted


LOST, SHORT = lazy(), lazy(filled=1.0, stalled=0.75)
WORKED, FIRST = lazy(stalled=6.0), lazy(replayed=False)
FASTER, AS_SLOW, STREAM = other("eager", 8.0), other("eager", 8.25), other("stream", 1.0)


@pytest.mark.parametrize(
    ("runs", "door"),
    [
        ([], "lazy"),
        ([FASTER, STREAM], "lazy"),
        ([FIRST], "lazy"),  # it had no trace to go by
        ([SHORT], "lazy"),  # it lost, but that doesn't matter
        ([WORKED], "lazy"),
        ([LOST, WORKED], "lazy"),
        ([WORKED, LOST], "eager"),
        ([LOST, FIRST], "eager"),
        ([LOST, STREAM], "eager"),
        ([LOST, FASTER], "eager"),
        ([LOST, AS_SLOW], "lazy"),
        ([FASTER, LOST, AS_SLOW], "lazy"),
        ([AS_SLOW, FASTER, LOST], "eager"),
    ],
)
def test_choose_door(runs: list[Columns], door: str) -> None:
    """Lazy, unless the last lazy restore with a trace only waited, and eager isn't slower."""
    trace = Trace(EMPTY.regions, EMPTY.touches, np.concatenate([EMPTY.runs, *runs]))
    assert tracing.choose_door(trace) == door


def test_run_row() -> None:
    """Every number where it belongs."""
    assert lazy().tolist() == [(0.25, 8.25, 7.5, 3, RunDoor.LAZY, traces.REPLAYED, 0)]
    assert STREAM.tolist() == [(1.0, 1.0, 0.0, 0, RunDoor.STREAM, 0, 0)]
