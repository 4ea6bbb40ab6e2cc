"""`icefloe capture` as a person calls it, what it must leave alone, and processes made for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from criu_tool import Criu
from processes import reap_session, session_members, wait_until
from restores import command, environment, state_of
from stores import ADD_KEYS, check_promised
from workloads import ADVANCE_SECONDS, Heap, Recorded, State, Workload

from icefloe.catalog import open_store
from icefloe.gc.audit import check
from icefloe.ids import BlockId

CAPTURE_SECONDS = 60.0
STOP_SECONDS = 5.0
LEAVE_RUNNING = "--leave-running"

CAPTURE_KEYS = ADD_KEYS | {"frozen_seconds": (int, float), "cuda_seconds": (int, float)}


def capture(
    criu: Criu,
    store: Path,
    name: str,
    workload: Workload,
    *args: str,
    criu_args: Sequence[str] = (),
) -> dict[str, Any]:
    """Captures a workload; returns the promised JSON, checked. Unless left running, it is gone."""
    tail = ["--", *criu_args] if criu_args else []
    result = subprocess.run(
        command(store, "capture", name, "--pid", str(workload.pid), "--json", *args, *tail),
        env=environment(criu),
        capture_output=True,
        text=True,
        timeout=CAPTURE_SECONDS,
    )
    assert (result.returncode, result.stderr) == (0, ""), f"{result.returncode}: {result.stderr}"
    answer: dict[str, Any] = json.loads(result.stdout)
    check_promised("capture", answer, CAPTURE_KEYS)
    assert 0 < answer["frozen_seconds"] <= answer["seconds"] and answer["cuda_seconds"] == 0
    if LEAVE_RUNNING not in args:
        alive = [pid for pid in session_members(workload.pid) if state_of(pid) not in (None, "Z")]
        assert not alive, f"processes {alive} outlived their capture"
        reap_session(workload.pid)
    return answer


@dataclass(frozen=True)
class Refusal:
    """How a capture that can't work ended."""

    code: int
    said: str


def refused(store: Path, environ: Mapping[str, str], *args: str | Path) -> Refusal:
    """Runs a capture that can't work; it says one line and nothing else."""
    result = subprocess.run(
        command(store, "capture", *args),
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=CAPTURE_SECONDS,
    )
    return refusal(result)


def refusal(result: subprocess.CompletedProcess[str]) -> Refusal:
    """The one line of a command that failed."""
    said = result.stderr
    assert "Traceback" not in said and said.startswith("icefloe: "), said
    assert said.count("\n") == 1 and result.stdout == "", (said, result.stdout)
    return Refusal(result.returncode, said)


@contextmanager
def nothing_happens(workload: Workload, store: Path) -> Iterator[dict[str, str]]:
    """The workload goes on, and nothing is stored or left by what runs with the environment
    yielded, but for CRIU's log."""
    images, before = images_of(store), packs_bytes(store)
    members = {pid: started(pid) for pid in session_members(workload.pid)}
    began = workload.state()
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket
        yield {"TMPDIR": folder}
        left = [path for path in Path(folder).iterdir() if path.suffix != ".log"]
        assert not left, f"{left} was left"
    for pid, when in members.items():
        assert started(pid) == when and state_of(pid) not in ("T", "t"), f"process {pid}"
        assert tracer_of(pid) == 0, f"process {pid} is traced"
    workload.verify(began, workload.advance())
    assert (images_of(store), packs_bytes(store)) == (images, before)


def images_of(store: Path) -> dict[str, BlockId]:
    """The names in a store and their images, all that it has; nothing is wrong with it."""
    with open_store(store, write=False) as opened:
        assert check(opened, read_data=False).problems == ()
        names = opened.catalog.names()
        assert {row.id for row in opened.catalog.images()} == set(names.values())
        return names


def started(pid: int) -> int:
    """When a process was started, in clock ticks since boot: another of the same pid differs."""
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return int(stat.rpartition(")")[2].split()[19])


def tracer_of(pid: int) -> int:
    """Who traces a process; 0 for nobody."""
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    (line,) = (line for line in status.splitlines() if line.startswith("TracerPid:"))
    return int(line.split()[1])


def stop(pid: int) -> None:
    """Stops a process as a shell's Ctrl-Z does; returns when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T", STOP_SECONDS, f"process {pid} to stop")


def packs_bytes(store: Path) -> int:
    """What the packs of a store take."""
    return sum(path.stat().st_size for path in (store / "packs").rglob("*") if path.is_file())


class Growing(Recorded):
    """One process that adds ADDED bytes and rewrites REWRITTEN in one piece at each step, which
    it makes only when told to. All of it is noise."""

    program = "growing.py"
    good = "grown-ok"
    ADDED = 1 << 20
    REWRITTEN = 64 << 10

    def __init__(self, folder: Path, mib: int) -> None:
        super().__init__(folder)
        self._mib = mib
        self._goal = 0
        self._tell(1)

    def command(self) -> list[str]:
        return [*super().command(), str(self.folder / "goal"), str(self._mib)]

    def advance(self, steps: int = 3) -> State:
        self._tell(self._goal + steps)
        wait_until(lambda: self._reached(self._goal), ADVANCE_SECONDS, f"step {self._goal}")
        return self.state()

    def _tell(self, goal: int) -> None:
        self._goal = goal
        with open(self.folder / "goal", "r+" if goal > 1 else "x") as file:
            file.write(f"{goal:>16}")


class Accompanied(Heap):
    """A heap with a child that only sleeps."""

    def command(self) -> list[str]:
        return ["sh", "-c", 'sleep 1000 & exec "$@"', "sh", *super().command()]

    @property
    def child(self) -> int:
        """The pid of the child."""
        (child,) = set(session_members(self.pid)) - {self.pid}
        return child


class Locking(Heap):
    """A heap that holds a lock on a file, which CRIU refuses unless told otherwise."""

    def command(self) -> list[str]:
        return ["flock", "--no-fork", str(self.folder / "lock"), *super().command()]


# Runs a command and says how much memory the largest of its processes had at most.
_MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
sys.exit(code)
"""


def peak_bytes(criu: Criu, store: Path, workload: Workload, prefix: Sequence[str] = ()) -> int:
    """Captures a workload with one worker; returns the peak memory of icefloe, or of CRIU if
    that needs more. It runs under the command `prefix`, and the workload is gone.

    A process counts from its fork on, when it is as large as the one that forked: hence a small
    one in between.
    """
    captured = command(store, "capture", "worker", "--pid", str(workload.pid))
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, *prefix, *captured],
        env=environment(criu) | {"ICEFLOE_STORE_WORKERS": "1"},
        capture_output=True,
        text=True,
        timeout=CAPTURE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    reap_session(workload.pid)
    return int(result.stdout)
