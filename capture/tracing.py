"""Records what restored processes touch first, and puts it to use at the next restore."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from icefloe import durable
from icefloe.capture import images
from icefloe.capture.fill import Touch
from icefloe.capture.images import PAGE, Columns
from icefloe.capture.memory import Memory
from icefloe.capture.plan import Plan
from icefloe.errors import NoSpace, NotWritable
from icefloe.store import trace as traces
from icefloe.store.layout import Layout
from icefloe.store.trace import EMPTY, REGION_DTYPE, REPLAYED, TOUCH_DTYPE, RunDoor, Trace

# A lazy restore has lost when its process waited for memory nearly all the time until it was
# complete, and that took long enough to matter.
_WAITING_SHARE = 0.9
_MATTERS_SECONDS = 1.0


def load(layout: Layout, lineage: str) -> Trace:
    """The trace of a lineage; EMPTY when there is none that can be read."""
    try:
        content = layout.trace(lineage).read_bytes()
    except OSError:
        return EMPTY
    return traces.decode(content) or EMPTY


def record(
    layout: Layout, lineage: str, regions: Columns | None, touches: Columns, run: Columns
) -> bool:
    """Merges one restore into the lineage's trace. False when the store can't be written.

    A restore that saw no touches has no `regions` either.
    """
    try:
        durable.make_folder(layout.traces)
        with _alone(layout.traces):
            known = load(layout, lineage)
            merged = traces.merge(
                known, known.regions if regions is None else regions, touches, run
            )
            durable.publish(layout.trace(lineage), traces.encode(merged))
    except (NoSpace, NotWritable, OSError):
        return False
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Restores of one lineage may end at the same time."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def regions_of(memories: Sequence[Memory], tasks: Sequence[int]) -> Columns:
    """The areas of a process tree that can be lazy (REGION_DTYPE), task by task."""
    parts = [np.zeros(0, REGION_DTYPE)]
    by_pid = {memory.pid: memory for memory in memories if memory.pid is not None}
    for task, pid in enumerate(tasks):
        if pid in by_pid:
            areas = by_pid[pid].areas
            areas = areas[images.can_be_lazy(areas)]
            rows = np.zeros(len(areas), REGION_DTYPE)
            rows["start"], rows["length"] = areas["start"], areas["end"] - areas["start"]
            rows["task"] = task
            parts.append(rows)
    return np.concatenate(parts)


def touches_of(found: Sequence[Touch], regions: Columns) -> Columns:
    """First touches as rows of a trace (TOUCH_DTYPE), in the order in which they came."""
    rows = np.zeros(len(found), TOUCH_DTYPE)
    tasks = np.array([touch.task for touch in found], np.int64)
    places = np.array([touch.origin for touch in found], np.uint64)
    region = np.full(len(found), -1, np.int64)
    for task in np.unique(tasks).tolist():
        own, mine = np.flatnonzero(regions["task"] == task), tasks == task
        with suppress(IndexError):  # a task without any region was never touched
            at = np.searchsorted(regions["start"][own], places[mine], side="right") - 1
            region[mine] = own[np.maximum(at, 0)]
    rows["region"] = np.maximum(region, 0)
    starts = regions["start"][rows["region"]] if len(regions) else places
    rows["page"] = (places - starts) // np.uint64(PAGE)
    known = (region >= 0) & traces.inside(rows, regions)
    late = np.array([touch.seconds * 1000 for touch in found])
    rows["milliseconds"] = np.clip(late, 0, 0xFFFFFFFF).astype(np.uint32)
    return rows[known]


def units_of(trace: Trace, regions: Columns, plan: Plan) -> NDArray[np.int64]:
    """The units that a trace says are wanted first, each once, in its order."""
    touches = traces.fit(trace, regions)
    region = touches["region"]
    if not len(region):
        return np.zeros(0, np.int64)
    addresses = regions["start"][region] + touches["page"] * np.uint64(PAGE)
    units = plan.find_units(regions["task"][region], addresses)
    _, first = np.unique(units, return_index=True)
    wanted: NDArray[np.int64] = units[np.sort(first)]
    return wanted


def run_row(
    door: Literal["lazy", "eager", "stream"],
    *,
    replayed: bool,
    resumed: float,
    filled: float,
    stalled: float,
    faults: int,
) -> Columns:
    """How one restore went, as a row of a trace (RUN_DTYPE); times in seconds."""
    flags = REPLAYED if replayed else 0
    row = (resumed, filled, stalled, faults, RunDoor[door.upper()], flags, 0)
    return np.array([row], traces.RUN_DTYPE)


def choose_door(trace: Trace) -> Literal["lazy", "eager"]:
    """Lazy, unless the last lazy restores show that it loses.

    It does when, even with a trace to go by, the process did nothing but wait for memory until
    that was complete. Then an eager restore is tried, and kept if it is faster.
    """
    runs = trace.runs
    lazy = runs[(runs["door"] == RunDoor.LAZY) & ((runs["flags"] & REPLAYED) != 0)][-1:]
    if not len(lazy):
        return "lazy"
    resumed, filled, stalled = (float(lazy[name][0]) for name in ("resumed", "filled", "stalled"))
    waiting = filled - resumed
    if waiting < _MATTERS_SECONDS or stalled < _WAITING_SHARE * waiting:
        return "lazy"
    eager = runs[runs["door"] == RunDoor.EAGER][-1:]
    return "lazy" if len(eager) and float(eager["resumed"][0]) >= filled else "eager"
