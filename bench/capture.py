"""What does a capture cost a running process?

A real process keeps running while its checkpoint is taken again and again: by `criu dump` into
tmpfs, which stores nothing, and by `icefloe capture` into a store on the disk. All in the same
run, in turns. `wall` is the whole command; `frozen` is how long the process stood still, by
CRIU's own clock for both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common import (
    Bar,
    BenchError,
    Icefloe,
    Unavailable,
    arguments,
    bars_table,
    human,
    main_guard,
    table,
    workplace,
    write_json,
)
from subjects import (
    adopt_orphans,
    criu_program,
    free_memory,
    reap,
    start_process,
    wait_for,
    warm_memory,
)

from icefloe.capture.images import decode_dump_stats

SHM = Path("/dev/shm")
_TIMES = ("wall", "frozen")


@dataclass(frozen=True)
class Captured:
    """One checkpoint. Seconds."""

    wall: float
    frozen: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """The process, and where its images go."""

    pid: int
    record: Path
    work: Path

    def verify(self) -> None:
        """Has the process check all of its memory. Raises BenchError."""
        before = self.checks()
        os.kill(self.pid, signal.SIGUSR1)
        wait_for(lambda: self.checks() > before, "a full check of the memory")

    def checks(self) -> int:
        """Full checks made so far."""
        words = self.record.read_bytes().split()
        if len(words) == 4 and words[3] != b"ok":
            raise BenchError("the process found its memory damaged")
        return int(words[2]) if len(words) == 4 else -1


def criu_dump(subject: Subject) -> Captured:
    """`criu dump --leave-running` into tmpfs: the rival."""
    folder = tempfile.mkdtemp(prefix="icefloe-bench-", dir=SHM)
    try:
        command: list[str | Path] = [
            criu_program(),
            "dump",
            "-t",
            str(subject.pid),
            "-D",
            folder,
            "-o",
            "dump.log",
        ]
        began = time.monotonic()
        if subprocess.run([*command, "--leave-running"]).returncode:
            raise BenchError(f"criu dump failed, see {folder}/dump.log")
        wall = time.monotonic() - began
        times = decode_dump_stats((Path(folder) / "stats-dump").read_bytes(), "stats-dump")
        return Captured(wall, times.freezing + times.frozen)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def icefloe_capture(policy: str, *more: str, known: bool = True) -> Callable[[Subject], Captured]:
    """`icefloe capture --leave-running`; `known`: the store has most of the blocks."""

    def capture(subject: Subject) -> Captured:
        store = subject.work / f"store-{policy}"
        if not known:
            shutil.rmtree(store, ignore_errors=True)
        os.environ["ICEFLOE_STORE_POLICY"] = policy
        words = ["capture", "worker", "--pid", str(subject.pid), "--leave-running", *more]
        ran, answer = Icefloe().ask(store, *words)
        answer["peak_bytes"] = ran.peak_bytes
        return Captured(ran.seconds, answer["frozen_seconds"], answer)

    return capture


CONTESTANTS: dict[str, Callable[[Subject], Captured]] = {
    "criu dump": criu_dump,
    "icefloe, first": icefloe_capture("balanced", known=False),
    "icefloe, second": icefloe_capture("balanced"),
    "icefloe --no-stream, second": icefloe_capture("balanced", "--no-stream"),
}


def contest(subject: Subject, rounds: int) -> dict[str, list[Captured]]:
    """Everybody in turns; the first round warms up."""
    found: dict[str, list[Captured]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds + 1):
        for name, contestant in CONTESTANTS.items():
            captured = contestant(subject)
            said = f"  {name}: {captured.wall:.2f} s, frozen {captured.frozen:.2f} s"
            print(said, file=sys.stderr)
            if number:
                found[name].append(captured)
        subject.verify()
    return found


def report(found: dict[str, list[Captured]], size: int) -> list[Bar]:
    """Prints the table; returns the promises."""
    rival = found["criu dump"]
    wall = median(one.wall for one in rival)
    frozen = median(one.frozen for one in rival)
    rows = []
    for name, runs in found.items():
        facts = runs[-1].facts
        one_wall, one_frozen = (median(getattr(r, what) for r in runs) for what in _TIMES)
        rows.append(
            [
                name,
                f"{one_wall:.2f}",
                f"{one_wall / wall:.2f}",
                f"{one_frozen:.2f}",
                f"{one_frozen / frozen:.2f}",
                human(facts["stored_bytes"]) if facts else "-",
                human(facts["peak_bytes"]) if facts else "-",
            ]
        )
    heads = ["checkpoint", "wall s", "x criu", "frozen s", "x criu", "stored", "peak memory"]
    table(f"a process of {human(size)}, left running", heads, rows)
    second = found["icefloe, second"]
    return [
        Bar(
            "wall of a second capture, over criu dump",
            median(one.wall for one in second) / wall,
            1.3,
            True,
        ),
        Bar(
            "frozen in a second capture, over criu dump",
            median(one.frozen for one in second) / frozen,
            1.2,
            True,
        ),
    ]


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The whole benchmark."""
    process = start_process(work / "record", options.bytes, options.seed)
    subject = Subject(process.pid, work / "record", work)
    try:
        wait_for(lambda: subject.checks() >= 0, "the process to start")
        found = contest(subject, options.runs)
    finally:
        reap(process.pid)
    bars = report(found, options.bytes)
    bars_table(bars)
    return {
        "bytes": options.bytes,
        "runs": {
            name: [{"wall": r.wall, "frozen": r.frozen, **r.facts} for r in runs]
            for name, runs in found.items()
        },
        "bars": [bar.facts() for bar in bars],
    }


def main() -> int:
    parser = arguments(__doc__, "4g")
    parser.add_argument("--runs", type=int, default=3, help="rounds of everybody (default 3)")
    options = parser.parse_args()
    adopt_orphans()
    try:
        criu_program()
    except Unavailable as reason:
        print(f"capture.py: skipped: {reason}", file=sys.stderr)
        write_json(options.json, {"skipped": str(reason)})
        return 0
    warm_memory(free_memory())
    with workplace(options.keep) as work:
        write_json(options.json, measure(options, work))
    return 0


if __name__ == "__main__":
    main_guard(main)
