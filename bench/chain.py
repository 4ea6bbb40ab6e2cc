"""Do checkpoints age? Ten generations, each with 2 % of its pages changed since the one before.

A chain of test images says what each generation costs beside its new pages, and whether the last
is exported as fast as the first. A chain of captures of a real process says the same of lazy
restores.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import PAGE, Bar, BenchError, Icefloe, human, remove, same_trees, table
from images import mixed, scatter_changes
from optimum import distinct, new_ids, page_ids
from restore import SHM, Checkpoint, icefloe_door, measure
from subjects import adopt_orphans, criu_program, reap, start_process, wait_for

GENERATIONS = 10
CHANGED = 0.02
ROUNDS = 3

OF_THE_OPTIMUM = 1.25
OF_THE_FIRST = 1.3

POLICY = "balanced"


def _add_generations(
    ours: Icefloe, size: int, seed: int, store: Path, image: Path
) -> list[dict[str, Any]]:
    """Change the image and add it, again and again; what each `add` said, and the optimum."""
    rng = np.random.default_rng([seed, 10])
    mixed(image, size, seed)
    known = np.zeros(0, np.uint64)
    found = []
    for number in range(1, GENERATIONS + 1):
        print(f"generation {number} ...", file=sys.stderr)
        if number > 1:
            scatter_changes(image, CHANGED, rng)
        ids = page_ids(image)
        fresh = new_ids(known, ids)
        known = np.union1d(known, distinct(ids))
        answer = ours.ask(store, "add", image, f"image:{number}")[1]
        found.append({**answer, "optimum": len(fresh) * PAGE})
    return found


def _export_seconds(ours: Icefloe, store: Path, last: Path) -> dict[int, float]:
    """Medians of exports of the first and of the last generation into memory, in turns."""
    times: dict[int, list[float]] = {1: [], GENERATIONS: []}
    place = Path(tempfile.mkdtemp(prefix="icefloe-bench-", dir=SHM))
    try:
        for number in range(ROUNDS + 1):  # the first one warms up
            for generation, of_one in times.items():
                out = place / "out"
                seconds = ours.restore(store, f"image:{generation}", out)
                print(f"  export of {generation}: {seconds:.2f} s", file=sys.stderr)
                if number:
                    of_one.append(seconds)
                elif generation == GENERATIONS:
                    same_trees(last, out)
                remove(out)
    finally:
        remove(place)
    return {generation: median(of_one) for generation, of_one in times.items()}


def generations(
    ours: Icefloe, size: int, seed: int, work: Path
) -> tuple[dict[str, Any], list[Bar]]:
    """What ten generations of the test image cost, and how fast they come out."""
    store, image = work / "store", work / "image"
    found = _add_generations(ours, size, seed, store, image)
    seconds = _export_seconds(ours, store, image)
    for folder in (store, image):
        remove(folder)
    rows = [
        [
            str(number),
            human(one["optimum"]),
            human(one["new_bytes"]),
            f"{one['new_bytes'] / one['optimum']:.3f}",
            human(one["stored_bytes"]),
        ]
        for number, one in enumerate(found, 1)
    ]
    title = f"generations of {human(size)}, {CHANGED:.0%} of pages changed in each"
    table(title, ["generation", "optimum", "new", "of it", "stored"], rows)
    exports = ", ".join(f"of {number} in {s:.2f} s" for number, s in seconds.items())
    print(f"\n  exports into memory, medians of {ROUNDS}: {exports}")
    worst = max(one["new_bytes"] / one["optimum"] for one in found[1:])
    bars = [
        Bar("worst generation: new, of the optimum", worst, OF_THE_OPTIMUM, True),
        Bar(
            "export of the last generation, of the first",
            seconds[GENERATIONS] / seconds[1],
            OF_THE_FIRST,
            True,
        ),
    ]
    return {"bytes": size, "generations": found, "export_seconds": seconds}, bars


def _capture_generations(ours: Icefloe, made: Checkpoint) -> list[dict[str, Any]]:
    """Capture the process, have it change 2 % of its pages, and so on; what each capture said."""
    found = []
    for number in range(1, GENERATIONS + 1):
        print(f"capture {number} ...", file=sys.stderr)
        if number > 1:
            _change(made)
        words = ["capture", f"worker:{number}", "--pid", str(made.pid), "--leave-running"]
        found.append(ours.ask(made.stores[POLICY], *words)[1])
    return found


def _change(made: Checkpoint) -> None:
    """Have the process change its memory, and check it."""
    before = made.steps()
    assert before is not None
    os.kill(made.pid, signal.SIGUSR2)
    wait_for(lambda: (made.steps() or before)[1] > before[1], "the change of the memory")


def _restore_seconds(made: Checkpoint) -> dict[int, float]:
    """Medians until the memory is complete, restored lazily, in turns."""
    times: dict[int, list[float]] = {1: [], GENERATIONS: []}
    for number in range(ROUNDS + 1):  # the first one warms up, and makes the trace
        for generation, of_one in times.items():
            door = icefloe_door(POLICY, "--door", "lazy", image=f"worker:{generation}")
            filled = measure(made, door).filled
            if filled is None:
                raise BenchError("icefloe restore doesn't say when the memory was complete")
            print(f"  restore of {generation}: {filled:.2f} s", file=sys.stderr)
            if number:
                of_one.append(filled)
    return {generation: median(of_one) for generation, of_one in times.items()}


def restores(ours: Icefloe, size: int, seed: int, work: Path) -> tuple[dict[str, Any], list[Bar]]:
    """How fast the first and the last capture of a process are restored. Raises Unavailable."""
    criu_program()
    adopt_orphans()
    os.environ["ICEFLOE_STORE_POLICY"] = POLICY
    record, store = work / "record", work / "store"
    process = start_process(record, size, seed)
    made = Checkpoint(process.pid, record, work, {POLICY: store}, work)
    try:
        wait_for(lambda: made.steps() is not None, "the process to start")
        captures = _capture_generations(ours, made)
        process.kill()
        process.wait()
        seconds = _restore_seconds(made)
    finally:
        reap(process.pid)
        shutil.rmtree(store, ignore_errors=True)
    rows = [
        [str(number), human(one["new_bytes"]), human(one["stored_bytes"])]
        for number, one in enumerate(captures, 1)
    ]
    title = f"captures of a process of {human(size)}, {CHANGED:.0%} of pages changed before each"
    table(title, ["capture", "new", "stored"], rows)
    said = ", ".join(f"{number} in {s:.2f} s" for number, s in seconds.items())
    print(f"\n  memory complete after a lazy restore, medians of {ROUNDS}: {said}")
    times = seconds[GENERATIONS] / seconds[1]
    bars = [Bar("lazy restore of the last capture, of the first", times, OF_THE_FIRST, True)]
    return {"bytes": size, "captures": captures, "filled_seconds": seconds}, bars
