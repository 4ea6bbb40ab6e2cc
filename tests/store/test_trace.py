"""Traces: what goes in comes out, damage is seen, and touches find their regions again.

`tests/vectors/lineage.trace` is one that every version has to read. `python
tests/store/test_trace.py --write` makes it anew; a difference is a change of the format.
"""

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from icefloe.store import trace as traces
from icefloe.store.trace import EMPTY, MAX_REGIONS, MAX_RUNS, MAX_TOUCHES, Columns, RunDoor, Trace

VECTOR = Path(__file__).parents[1] / "vectors" / "lineage.trace"
PAGE = 4096

GOLDEN_REGIONS = [(65536, 0x21000, 0, 0), (0x7FFF_FFFF_E000, 4096, 0, 0), (65536, 1 << 40, 3, 0)]
GOLDEN_TOUCHES = [(0, 1, 0), (0x20, 0, 7), (0xFFF_FFFF, 2, 7), (1, 2, 0xFFFF_FFFF)]
GOLDEN_RUNS = [
    (0.25, 1.5, 0.125, 300, RunDoor.LAZY, 0, 0),
    (0.25, 1.25, 0.0, 7, RunDoor.LAZY, traces.REPLAYED, 0),
    (2.0, 2.0, 0.0, 0, RunDoor.EAGER, 0, 0),
    (0.75, 0.75, 0.0, 0, RunDoor.STREAM, 0, 0),
]

Row = tuple[Any, ...]


def made(regions: Sequence[Row], touches: Sequence[Row] = (), runs: Sequence[Row] = ()) -> Trace:
    """A trace of these rows."""
    parts = (traces.REGION_DTYPE, regions), (traces.TOUCH_DTYPE, touches), (traces.RUN_DTYPE, runs)
    return Trace(*(np.array(list(rows), dtype) for dtype, rows in parts))


def areas(*rows: tuple[int, int, int]) -> list[Row]:
    """Regions by task, first page and pages."""
    return [(start * PAGE, pages * PAGE, task, 0) for task, start, pages in rows]


def same(a: Trace, b: Trace) -> bool:
    """Alike to the byte, so that what is no number is too."""
    parts = (a.regions, b.regions), (a.touches, b.touches), (a.runs, b.runs)
    return all(one.tobytes() == other.tobytes() for one, other in parts)


@st.composite
def region_tables(draw: st.DrawFn) -> Columns:
    """The areas of up to three processes, in order, of few different lengths."""
    rows: list[tuple[int, int, int]] = []
    for task in range(draw(st.integers(0, 3))):
        position = 1
        for pages in draw(st.lists(st.sampled_from([1, 2, 30]), max_size=4)):
            position += draw(st.integers(0, 40))
            rows.append((task, position, pages))
            position += pages
    return made(areas(*rows)).regions


@st.composite
def touch_tables(draw: st.DrawFn, regions: Columns) -> Columns:
    """Touches of pages that these regions have, in order of time."""
    pages = (regions["length"] // PAGE).tolist()
    if not pages:
        return EMPTY.touches
    pairs = [(page, region) for region, count in enumerate(pages) for page in range(count)]
    times = st.integers(0, 5) | st.integers(0, 0xFFFF_FFFF)
    drawn = draw(st.lists(st.tuples(st.sampled_from(pairs), times), max_size=12))
    rows = sorted(((*pair, time) for pair, time in drawn), key=lambda row: row[2])
    return made([], rows).touches


seconds = st.floats(width=32)
run_rows = st.tuples(seconds, seconds, seconds, *map(st.integers, [0] * 3, [2**32 - 1, 255, 255]))


@st.composite
def whole_traces(draw: st.DrawFn) -> Trace:
    """Regions, touches of them, and up to 20 runs."""
    regions = draw(region_tables())
    runs = made([], runs=[(*row, 0) for row in draw(st.lists(run_rows, max_size=20))]).runs
    return Trace(regions, draw(touch_tables(regions)), runs)


# --- bytes --------------------------------------------------------------------------------------

GOLDEN = made(GOLDEN_REGIONS, GOLDEN_TOUCHES, GOLDEN_RUNS)


@given(whole_traces())
@settings(max_examples=200, deadline=None)
def test_round_trip(trace: Trace) -> None:
    """All of it comes back, of runs the last."""
    decoded = traces.decode(traces.encode(trace))
    assert decoded and same(decoded, Trace(trace.regions, trace.touches, trace.runs[-MAX_RUNS:]))
    assert traces.encode(decoded) == traces.encode(trace)


def test_limits() -> None:
    """What passes them is left out, the latest touches; a touch without its region counts not."""
    regions = np.zeros(MAX_REGIONS + 3, traces.REGION_DTYPE)
    touches = np.zeros(MAX_TOUCHES + 9, traces.TOUCH_DTYPE)
    regions["start"], touches["milliseconds"] = np.arange(len(regions)), np.arange(len(touches))
    touches["region"][:5] = MAX_REGIONS - 2 + np.arange(5)
    runs = made([], runs=[(0, 0, 0, i, RunDoor.LAZY, 0, 0) for i in range(MAX_RUNS + 4)]).runs
    encoded = traces.encode(Trace(regions, touches, runs))
    assert 5_700_000 < len(encoded) <= 5_800_000
    decoded = traces.decode(encoded)
    assert decoded and decoded.regions["start"].tolist() == list(range(MAX_REGIONS))
    assert decoded.touches["milliseconds"].tolist() == [0, 1, *range(5, MAX_TOUCHES + 3)]
    assert decoded.runs["faults"].tolist() == list(range(4, MAX_RUNS + 4))


def test_vector() -> None:
    """Both ways, byte for byte."""
    content = VECTOR.read_bytes()
    assert traces.encode(GOLDEN) == content
    decoded = traces.decode(content)
    assert decoded and same(decoded, GOLDEN)


def test_vector_by_hand() -> None:
    """The grammar alone is enough to read it."""
    content = VECTOR.read_bytes()
    magic, version, *counts = struct.unpack_from("<8sIIII", content)
    assert (magic, version) == (b"ICEFTRAC", 1)
    at, tables = 24, []
    for count, row in zip(counts, ("<QQII", "<QII", "<fffIBBH"), strict=True):
        end = at + count * struct.calcsize(row)
        tables.append(list(struct.iter_unpack(row, content[at:end])))
        at = end
    assert tables == [GOLDEN_REGIONS, GOLDEN_TOUCHES, GOLDEN_RUNS]
    assert content[at:] == blake3(content[:at]).digest()


def test_every_damage() -> None:
    """Any bit, any end: None."""
    content = VECTOR.read_bytes()
    for i in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[i // 8] ^= 1 << i % 8
        assert traces.decode(bytes(flipped)) is None, i
    assert [n for n in range(len(content)) if traces.decode(content[:n]) is not None] == []
    for more in (b"\0", bytes(16), content[-32:], content):
        assert traces.decode(content + more) is None


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *[(0, int.from_bytes(b"ICEM", "little")), (8, 0), (8, 2)],
        *[(at, count) for at in (12, 16, 20) for count in (0, 2, 5, 0xFFFF_FFFF)],
        *[(24 + 3 * 24 + 8, 3), (24 + 3 * 24 + 3 * 16 + 8, 0xFFFF_FFFF)],
    ],
)
def test_wrong_with_the_right_digest(at: int, value: int) -> None:
    """Another kind or version, counts that are not those, touches of regions that it lacks."""
    body = bytearray(VECTOR.read_bytes()[:-32])
    struct.pack_into("<I", body, at, value)
    assert traces.decode(bytes(body) + blake3(body).digest()) is None


# --- other regions ------------------------------------------------------------------------------

OLD = areas((0, 10, 4), (0, 20, 4), (0, 30, 4), (0, 40, 9), (1, 10, 4))


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (OLD, [0, 1, 2, 3, 4]),
        (OLD[::-1], [4, 3, 2, 1, 0]),
        (areas((0, 20, 5), (0, 40, 1), (0, 10, 9)), [2, 0, None, 1, None]),  # exact, lengths differ
        (areas((0, 110, 4), (0, 120, 4), (0, 130, 4), (0, 140, 9)), [0, 1, 2, 3, None]),  # moved
        (areas((0, 20, 4), (0, 50, 4), (0, 60, 4)), [1, 0, 2, None, None]),  # the exact one first
        (areas((0, 50, 4), (0, 60, 9), (0, 70, 4)), [0, 2, None, 1, None]),  # one is gone
        (areas((2, 10, 4), (1, 20, 4), (1, 40, 9)), [None, None, None, None, 1]),  # other tasks
        ([], [None] * 5),
    ],
)
def test_fit(new: list[Row], expected: list[int | None]) -> None:
    """By start, the others by length in order, each within its task."""
    trace = made(OLD, [(0, region, 9 - region) for region in range(5)])
    fitted = traces.fit(trace, made(new).regions).tolist()
    assert fitted == [(0, to, 9 - i) for i, to in enumerate(expected) if to is not None]


@given(region_tables(), region_tables(), st.data())
@settings(max_examples=200, deadline=None)
def test_fit_to_anything(old: Columns, new: Columns, data: st.DataObject) -> None:
    """One region never becomes two, nor two one; each stays in its task. Moved as a whole: all."""
    trace = Trace(old, data.draw(touch_tables(old)), EMPTY.runs)
    every = Trace(old, np.zeros(len(old), traces.TOUCH_DTYPE), EMPTY.runs)
    every.touches["region"] = every.touches["milliseconds"] = np.arange(len(old))
    pairs = traces.fit(every, new)
    assert len(set(pairs["region"].tolist())) == len(pairs)
    for was, now in zip(
        old[pairs["milliseconds"]].tolist(), new[pairs["region"]].tolist(), strict=True
    ):
        assert was[2] == now[2] and (was[0] == now[0] or was[1] == now[1])
    moved = old.copy()
    moved["start"] += 1 << 40
    assert traces.fit(trace, moved).tolist() == trace.touches.tolist()


# --- merging ------------------------------------------------------------------------------------


def test_merge() -> None:
    """The earliest time of each page, in order of time, in terms of the new regions."""
    run = (1.0, 2.0, 0.0, 5, RunDoor.LAZY, 0, 0)
    old = made(OLD, [(1, 0, 10), (2, 0, 20), (3, 3, 30), (1, 4, 40)], [run])
    new = made(OLD[1::-1], [(3, 1, 5), (2, 1, 15), (1, 1, 25), (1, 0, 25)], [run])
    merged = traces.merge(old, new.regions, new.touches, new.runs)
    wanted = made(OLD[1::-1], [(3, 1, 5), (1, 1, 10), (2, 1, 15), (1, 0, 25)], [run, run])
    assert same(merged, wanted)


def test_merge_of_too_many_regions() -> None:
    """The last are left out, and nothing is taken for another's."""
    regions = np.zeros(MAX_REGIONS + 1, traces.REGION_DTYPE)
    regions["start"], regions["length"] = np.arange(len(regions)) << 20, 4096
    touches = made([], [(0, MAX_REGIONS, 1), (0, 0, 2), (0, MAX_REGIONS - 1, 3)]).touches
    merged = traces.merge(EMPTY, regions, touches, EMPTY.runs)
    assert merged.touches.tolist() == [(0, 0, 2), (0, MAX_REGIONS - 1, 3)]
    assert len(merged.regions) == MAX_REGIONS


def test_pages_that_a_region_lost() -> None:
    trace = made(OLD[:1], [(0, 0, 1)])
    regions = trace.regions.copy()
    assert traces.fit(trace, regions).tolist() == [(0, 0, 1)]
    regions["length"] = 0
    assert traces.fit(trace, regions).tolist() == []


def test_merge_keeps_the_last_runs() -> None:
    """Those beyond the limit go, the oldest first; a restore may leave no row."""
    trace, rows = EMPTY, [(0, 0, 0, i, RunDoor.EAGER, 0, 0) for i in range(MAX_RUNS + 5)]
    for run in [*(made([], runs=[row]).runs for row in rows), EMPTY.runs]:
        trace = traces.merge(trace, trace.regions, trace.touches, run)
    assert trace.runs["faults"].tolist() == list(range(5, MAX_RUNS + 5))


@given(region_tables(), st.data())
@settings(max_examples=200, deadline=None)
def test_merge_against_a_dictionary(regions: Columns, data: st.DataObject) -> None:
    """Each page once, at its earliest time, in order; the same restore again changes nothing."""
    first, second = data.draw(touch_tables(regions)), data.draw(touch_tables(regions))
    once = traces.merge(Trace(regions, first, EMPTY.runs), regions, second, EMPTY.runs)
    earliest: dict[tuple[int, int], int] = {}
    for page, region, time in [*first.tolist(), *second.tolist()]:
        earliest[page, region] = min(time, earliest.get((page, region), time))
    wanted = sorted((*place, time) for place, time in earliest.items())
    assert sorted(once.touches.tolist()) == wanted
    assert once.touches["milliseconds"].tolist() == sorted(earliest.values())
    assert same(traces.merge(once, regions, second, EMPTY.runs), once)
    assert same(traces.merge(once, regions, first, EMPTY.runs), once)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    VECTOR.write_bytes(traces.encode(GOLDEN))
