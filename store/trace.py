"""The trace of a lineage: which memory its processes touched first. docs/format.md, "Trace".

    trace  := header region* touch* run* blake3(everything before)[32]
    header := "ICEFTRAC" version:u32 regions:u32 touches:u32 runs:u32
    region := start:u64 length:u64 task:u32 0:u32
    touch  := page:u64 region:u32 milliseconds:u32
    run    := resumed:f32 filled:f32 stalled:f32 faults:u32 door:u8 flags:u8 0:u16

Processes are told apart by their position in the tree and memory by its area, so that a trace
fits the next checkpoint, whatever its pids and addresses are. A trace is advice: one that is
lost or damaged costs time, never data.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

VERSION = 1
MAGIC = b"ICEFTRAC"
HEADER = struct.Struct("<8sIIII")
_DIGEST = 32
_PAGE = 4096

REGION_DTYPE = np.dtype([("start", "<u8"), ("length", "<u8"), ("task", "<u4"), ("reserved", "<u4")])
"""A memory area: address and length in bytes, and the process's position in the tree."""

TOUCH_DTYPE = np.dtype([("page", "<u8"), ("region", "<u4"), ("milliseconds", "<u4")])
"""A first touch: which page of which region, and when after memory began to come in."""

RUN_DTYPE = np.dtype(
    [
        ("resumed", "<f4"),
        ("filled", "<f4"),
        ("stalled", "<f4"),
        ("faults", "<u4"),
        ("door", "u1"),
        ("flags", "u1"),
        ("reserved", "<u2"),
    ]
)
"""How one restore went, in seconds: until it ran, until its memory was complete, waiting."""

# One touch stands for a block of 256 KiB on average: enough for 64 GB.
MAX_TOUCHES = 1 << 18
MAX_REGIONS = 1 << 16

# The last restores are enough to judge by.
MAX_RUNS = 16

Columns = NDArray[np.void]


class RunDoor(IntEnum):
    """The way into CRIU that a restore took."""

    LAZY = 1
    EAGER = 2
    STREAM = 3


REPLAYED = 1
"""Flag of a run that had a trace to go by."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Touches (TOUCH_DTYPE) in order of time, of `regions` (REGION_DTYPE), and the last `runs`."""

    regions: Columns
    touches: Columns
    runs: Columns


EMPTY = Trace(np.zeros(0, REGION_DTYPE), np.zeros(0, TOUCH_DTYPE), np.zeros(0, RUN_DTYPE))


def encode(trace: Trace) -> bytes:
    """The bytes of a trace, at most 5.8 MB. What passes the limits is left out, latest first."""
    regions = trace.regions[:MAX_REGIONS]
    touches = trace.touches[trace.touches["region"] < len(regions)][:MAX_TOUCHES]
    runs = trace.runs[-MAX_RUNS:]
    head = HEADER.pack(MAGIC, VERSION, len(regions), len(touches), len(runs))
    content = head + regions.tobytes() + touches.tobytes() + runs.tobytes()
    return content + blake3(content).digest()


def decode(content: bytes) -> Trace | None:
    """The trace, None when it is damaged or of another version."""
    if len(content) < HEADER.size + _DIGEST:
        return None
    body, digest = content[:-_DIGEST], content[-_DIGEST:]
    magic, version, regions, touches, runs = HEADER.unpack_from(body)
    if magic != MAGIC or version != VERSION or blake3(body).digest() != digest:
        return None
    parts, position = [], HEADER.size
    for count, dtype in ((regions, REGION_DTYPE), (touches, TOUCH_DTYPE), (runs, RUN_DTYPE)):
        end = position + count * dtype.itemsize
        if end > len(body):
            return None
        parts.append(np.frombuffer(body[position:end], dtype))
        position = end
    trace = Trace(*parts)
    if position != len(body) or bool((trace.touches["region"] >= len(trace.regions)).any()):
        return None
    return trace


def fit(trace: Trace, regions: Columns) -> Columns:
    """The touches of a trace as touches of other regions, those of another checkpoint.

    A region is the same when it starts at the same address in the same process; what is left is
    matched by length, in order. Touches of regions that are gone are left out.
    """
    target = np.full(len(trace.regions), -1, np.int64)
    taken = np.zeros(len(regions), np.bool_)
    exact = {key: i for i, key in enumerate(_keys(regions, "start"))}
    for i, key in enumerate(_keys(trace.regions, "start")):
        if key in exact:
            target[i] = exact[key]
            taken[exact[key]] = True
    spare: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(_keys(regions, "length")):
        if not taken[i]:
            spare.setdefault(key, []).append(i)
    for i, key in enumerate(_keys(trace.regions, "length")):
        if target[i] < 0 and spare.get(key):
            target[i] = spare[key].pop(0)
    fitted: Columns = trace.touches[target[trace.touches["region"]] >= 0]
    fitted["region"] = target[fitted["region"]]
    return fitted[inside(fitted, regions)]


def inside(touches: Columns, regions: Columns) -> NDArray[np.bool_]:
    """Which touches are of a page that their region has."""
    if not len(regions):
        return np.zeros(len(touches), np.bool_)
    pages = regions["length"] // np.uint64(_PAGE)
    found: NDArray[np.bool_] = touches["page"] < pages[touches["region"]]
    return found


def _keys(regions: Columns, field: str) -> list[tuple[int, int]]:
    return list(zip(regions["task"].tolist(), regions[field].tolist(), strict=True))


def merge(trace: Trace, regions: Columns, touches: Columns, run: Columns) -> Trace:
    """The trace after one more restore, in terms of that restore's regions.

    A page counts by the earliest time it was touched at: what a replay brings in ahead isn't
    seen to be touched, and keeps its place.
    """
    regions = regions[:MAX_REGIONS]
    touches = touches[touches["region"] < len(regions)]
    joined = np.concatenate([fit(trace, regions), touches])
    joined = joined[np.argsort(joined["milliseconds"], kind="stable")]
    places = joined["region"].astype(np.uint64) << np.uint64(48) | joined["page"]
    _, first = np.unique(places, return_index=True)
    kept = joined[np.sort(first)]
    return Trace(regions, kept, np.concatenate([trace.runs, run])[-MAX_RUNS:])
