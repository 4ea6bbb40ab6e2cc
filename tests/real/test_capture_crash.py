"""Whatever fails or is killed during a capture: the processes run on, or their image is stored.

Each capture here is the real command on real processes with the real CRIU, hit at a chosen step
(see capture_child.py). Afterwards, when everybody who could still do something is gone, the
processes are looked at, and the store.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import capture_child
import pytest
import small_store
from crashing import fast_folder
from criu_tool import Criu
from fake_cuda import FakeCuda
from hostile import MIB, small_disk
from matrix import NEWEST, OLDEST, one_criu
from processes import wait_until
from restores import environment
from workloads import Heap, Tree, Workload

from icefloe.capture import processes
from icefloe.capture.cuda import CudaState
from icefloe.capture.processes import Process
from icefloe.catalog import open_store
from icefloe.gc.audit import check
from icefloe.gc.sweep import GcOptions, collect

TESTS = Path(capture_child.__file__).parents[1]
KEPT = {"core-1.img": b"core" * 9, "pages-1.img": small_store.text(90 << 10, 1)}
NOTHING_STORED = "nothing was stored, the processes run on"

MODES = pytest.mark.parametrize("leave_running", [False, True], ids=["ending", "running on"])

Plan = dict[str, Any]


def plan(step: str, number: int = 1, to: str = "self", **more: Any) -> Plan:
    """What is to happen when a step is made for that time."""
    return {"step": step, "number": number, "to": to, "signal": signal.SIGKILL, **more}


@dataclass(frozen=True)
class Captured:
    """How a capture ended."""

    code: int
    said: str
    steps: tuple[str, ...]
    hits: int
    """How many plans were carried out."""

    seconds: float
    lingered: float
    """How long others were there when it had ended."""


class Server:
    """Runs commands; see capture_child.py."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(TESTS), str(TESTS / "real")])
        self._process = subprocess.Popen(
            [sys.executable, capture_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            text=True,
        )

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """What came of an order."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


class Stage:
    """Processes that are captured again and again, each time into a store of its own."""

    def __init__(self, criu: Criu, kind: type[Workload], folder: Path, server: Server) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.criu = criu
        self._kind = kind
        self._server = server
        self._prepared = folder / "prepared"
        self._numbers = count(1)
        self._running: Workload | None = None
        (folder / "tmp").mkdir()
        with open_store(self._prepared, write=True, create=True) as opened:
            small_store.add(opened, KEPT, "kept")

    def close(self) -> None:
        """Ends the processes."""
        if self._running is not None:
            self._running.kill()
            self._running = None

    @property
    def workload(self) -> Workload:
        """The processes, which run; others when the last ones were ended."""
        if self._running is None:
            folder = self.folder / str(next(self._numbers))
            folder.mkdir()
            self._running = self._kind(folder / "workload")
            self._running.start()
            self.look()
            self.cuda = FakeCuda(folder / "cuda")
            self.cuda.give(*{self.members[0].pid, self.members[-1].pid})
        return self._running

    def look(self) -> None:
        """Remembers who belongs to them."""
        assert self._running is not None
        root = processes.look(self._running.pid)
        assert root is not None
        self.members: list[Process] = processes.tree(root)

    def capture(
        self,
        *plans: Plan,
        leave_running: bool = False,
        arguments: Sequence[str] = (),
        waiting: bool = True,
        **more: Any,
    ) -> Captured:
        """Captures them as `new`, and waits until everybody is gone who has to do with it.

        `waiting`: until they have made a step.
        """
        shutil.rmtree(self.store, ignore_errors=True)
        shutil.copytree(self._prepared, self.store)
        words = ["capture", "new", "--pid", str(self.workload.pid), *arguments]
        words += ["--leave-running"] if leave_running else []
        self.before = self.workload.advance(1) if waiting else self.workload.state()
        return self.run(words, plans, **more)

    def run(self, words: Sequence[str], plans: Sequence[Plan] = (), **more: Any) -> Captured:
        """A command, to its end."""
        files = {name: self.folder / name for name in ("out", "err", "steps")}
        files["steps"].unlink(missing_ok=True)
        wanted = {**environment(self.criu), "TMPDIR": str(self.folder / "tmp")}
        wanted |= {"XDG_CONFIG_HOME": "/nonexistent"} | more.pop("environment", {})
        order = {
            "store": str(self.store),
            "cuda": str(self.cuda.folder),
            "arguments": words,
            "root": self.members[0].pid,
            "plans": plans,
            "environment": wanted,
            **{name: str(path) for name, path in files.items()},
            **more,
        }
        answer = self._server.ask(order)
        assert answer["gone"], f"somebody is still there: {answer}"
        lines = files["steps"].read_text().splitlines() if files["steps"].exists() else []
        steps = tuple(line for line in lines if not line.startswith("!"))
        said, hits = files["err"].read_text(), len(lines) - len(steps)
        return Captured(answer["code"], said, steps, hits, answer["seconds"], answer["lingered"])

    def judge(self, done: Captured, leave_running: bool) -> bool:
        """The promise. Returns whether the image is stored."""
        stored = self.stored()
        # What is in the journal is committed, and nothing else.
        killed = done.code == -signal.SIGKILL
        in_journal = f"{'write' if killed else 'fsync'} done journal" in done.steps
        assert stored or not in_journal, "a committed image is lost"
        assert "write journal" in done.steps or not stored, "the image was published too early"
        assert not stored or "nothing was stored" not in done.said, done.said
        assert not self.cuda.broken()
        there = [process for process in self.members if processes.is_there(process)]
        if there:
            assert there == [processes.look(p.pid) and p for p in self.members], "some have ended"
            self.runs()
        else:
            assert not leave_running, "the processes have ended"
            assert stored, "the processes have ended, and their image is not stored"
            self.end()
        return stored

    @property
    def has_ended(self) -> bool:
        """Nobody is left; whoever is captured next will be others."""
        return self._running is None

    def runs(self) -> None:
        """All are there, and none noticed anything."""
        for process in self.members:
            wait_until(lambda pid=process.pid: not held(pid), 1.0, f"{process} to run")  # type: ignore[misc]
        after = self.workload.advance(2)
        self.workload.verify(self.before, after)
        assert set(self.cuda.states().values()) <= {CudaState.RUNNING, None}

    def died_of(self) -> set[int]:
        """The signals that ended any of them, when that ended all; they are not reaped yet."""
        if all(map(processes.is_there, self.members)):
            return set()
        wait_until(lambda: not any(map(processes.is_there, self.members)), 5.0, "the others' end")
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ends = [os.waitid(os.P_PID, process.pid, options) for process in self.members]
        return {end.si_status for end in ends if end and end.si_code != os.CLD_EXITED}

    def end(self) -> None:
        """Nobody is left; the next capture is of others."""
        self._last = self.workload
        self.close()

    def stored(self) -> bool:
        """Whether the store has the image. It is whole in any case, and `gc` clears it up."""
        with open_store(self.store, write=True) as opened:
            problems = check(opened, read_data=True).problems
            assert all(problem.waste for problem in problems), problems
            names = opened.catalog.names()
            assert small_store.exported(opened, names.pop("kept:latest")) == KEPT
            images = {row.id for row in opened.catalog.images()}
            collect(opened, GcOptions())
            assert check(opened, read_data=False).problems == ()
            assert {row.id for row in opened.catalog.images()} == images
        assert set(names) <= {"new:latest"} and len(images) == 1 + len(names), "half an image"
        return bool(names)

    def restore(self, ran_on: bool = False) -> None:
        """Brings back those that have ended last, and looks at them.

        They go on where they were frozen. If they `ran_on` then, that was some steps ago.
        """
        assert self._running is None
        self._running = workload = self._last
        last = workload.frozen_state().last
        for pid in self.cuda.states():
            self.cuda.give(pid, state=CudaState.CHECKPOINTED)
        workload.forget()
        done = self.run(["restore", "new"], restores=True)
        assert done.code == 0, done
        self.look()
        workload.advance(2)
        workload.verify_memory()
        first = workload.state().first
        assert self.before.last < first <= last + 1 and (ran_on or first == last + 1)
        assert set(self.cuda.states().values()) == {CudaState.RUNNING}
        assert not self.cuda.broken()


def held(pid: int) -> bool:
    """Whether somebody keeps a process from running."""
    found = processes.look(pid)
    tracer = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "TracerPid" in line
    )
    return found is None or found.state in "Tt" or tracer.split()[1] != "0"


@contextmanager
def staging(criu: Criu, kind: type[Workload], server: Server) -> Iterator[Stage]:
    """A stage; the processes are gone afterwards."""
    with fast_folder() as folder:
        stage = Stage(criu, kind, folder, server)
        try:
            yield stage
        finally:
            stage.close()


@pytest.fixture
def stage(criu: Criu, server: Server) -> Iterator[Stage]:
    with staging(criu, Tree, server) as stage:
        yield stage


def first_and_last(steps: Sequence[str]) -> list[Plan]:
    """To be killed at each of these steps: the first and the last time that it is made.

    With one in the middle of the memory, and the last of all. Before a step is after another.
    """
    over = steps.index("watcher dismiss done")
    made = Counter(s for s in steps[:over] if f"{s} done" not in steps or "journal" in s)
    numbers = [(step, number) for step, last in made.items() for number in sorted({1, last})]
    numbers += [("written take done", 4), (steps[-1], steps.count(steps[-1]))]
    return [plan(step, number) for step, number in numbers]


def told(plans: list[Plan], leave_running: bool) -> list[Plan]:
    """All of them; where the processes run on, a third of those before it makes a difference."""
    late = next(i for i, each in enumerate(plans) if each["step"] == "dump check_alive done")
    return plans[: late if leave_running else 0 : 3] + plans[late if leave_running else 0 :]


class Failures:
    """What went wrong in a row of trials: all of it, each with what it was about."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._errors: list[Exception] = []

    @contextmanager
    def of(self, what: object) -> Iterator[None]:
        """One trial. After a failure the next has other processes."""
        try:
            yield
        except Exception as error:
            error.add_note(str(what))
            self._errors.append(error)
            self._stage.close()

    def tell(self) -> None:
        """Raises them."""
        if self._errors:
            raise ExceptionGroup(f"{len(self._errors)} trials failed", self._errors)


# --- icefloe is killed --------------------------------------------------------------------------


@one_criu
@MODES
@pytest.mark.parametrize("part", [0, 1])
def test_killed_at_each_step(stage: Stage, leave_running: bool, part: int) -> None:
    """The processes run on with their CUDA, or they have ended and are in the store."""
    whole = stage.capture(leave_running=leave_running)
    assert whole.code == 0 and stage.judge(whole, leave_running), whole
    endings, failures = Counter[str](), Failures(stage)
    for each in told(first_and_last(whole.steps), leave_running)[part::2]:
        with failures.of(each):
            done = stage.capture(each, leave_running=leave_running)
            assert done.code == (-signal.SIGKILL if done.hits else 0), done
            stored = stage.judge(done, leave_running)
            endings["stored" if stored else "not stored"] += done.hits
            endings["ended"] += done.hits and stage.has_ended
    failures.tell()
    assert endings["stored"] > 1 and endings["not stored"] > 5, endings
    assert (endings["ended"] > 0) != leave_running, endings


@one_criu
@MODES
def test_killed_with_its_group(stage: Stage, leave_running: bool) -> None:
    """As a terminal or a batch system does it: neither the watcher nor CRIU are in the group."""
    failures = Failures(stage)
    for step in ("checkpoint done", "written take done", "ingest finish", "dump let_go done"):
        with failures.of(step):
            done = stage.capture(plan(step, to="group"), leave_running=leave_running)
            assert done.code == -signal.SIGKILL, done
            stage.judge(done, leave_running)
    failures.tell()


@pytest.mark.parametrize(
    ("criu", "leave_running", "arguments"),
    [
        (OLDEST, False, []),
        (OLDEST, True, []),
        (OLDEST, False, ["--no-stream"]),
        (NEWEST, False, ["--no-stream"]),
        (NEWEST, True, ["--no-stream"]),
    ],
    indirect=["criu"],
)
def test_killed_with_any_criu(stage: Stage, leave_running: bool, arguments: Sequence[str]) -> None:
    """Where it matters most, with both ways to get at the files. The newest streams above."""
    failures = Failures(stage)
    steps = ["written take done", "ingest finish done", "dump let_go done"]
    for step in [*steps, "watcher dismiss"]:
        with failures.of(step):
            done = stage.capture(plan(step), leave_running=leave_running, arguments=arguments)
            assert done.code == -signal.SIGKILL, done
            stored = stage.judge(done, leave_running)
            if stage.has_ended:
                stage.restore()
            assert stored or step in steps
    failures.tell()


@one_criu
def test_restore_what_a_killed_capture_stored(stage: Stage) -> None:
    """The image is whole, whenever the capture was killed after it was committed."""
    for step in ("write done journal", "dump let_go done", "undo kill done"):
        done = stage.capture(plan(step))
        assert stage.judge(done, leave_running=False)
        ran_on = not stage.has_ended
        if ran_on:
            stage.end()
        stage.restore(ran_on)


@one_criu
def test_restore_what_ran_on(stage: Stage) -> None:
    """Killed when the processes ran on already: what is stored is how they were before."""
    done = stage.capture(plan("ingest commit done"), leave_running=True)
    assert done.code == -signal.SIGKILL and stage.judge(done, leave_running=True)
    stage.end()
    stage.restore(ran_on=True)


@one_criu
def test_those_that_were_stopped(stage: Stage) -> None:
    """A process that somebody had stopped stays so, and no other does."""
    failures = Failures(stage)
    for each in (
        plan("written take done"),
        plan("ingest commit done"),
        plan("ingest finish", to="criu"),
        plan("dump let_go done", to="criu"),
        plan("ingest finish", to="script"),
    ):
        with failures.of(each):
            stage.workload.advance(1)
            *_, stopped, _ = stage.members
            os.kill(stopped.pid, signal.SIGSTOP)
            done = stage.capture(each, waiting=False)
            there = [processes.is_there(process) for process in stage.members]
            if any(there):
                assert all(there), there
                assert [p.pid for p in stage.members if held(p.pid)] == [stopped.pid]
                os.kill(stopped.pid, signal.SIGCONT)
            stage.judge(done, leave_running=False)
    failures.tell()


# --- signals ------------------------------------------------------------------------------------

EARLY = (
    ("watcher tell done", 1),
    ("lock", 2),
    ("checkpoint done", 1),
    ("dump start", 1),
    ("criu started", 1),
    ("dump start done", 1),
    ("written take done", 1),
    ("written take done", 4),
    ("ingest finish", 1),
    ("fsync done staging", 1),
    ("ingest finish done", 1),
)
LATE = (
    ("write done journal", 1),
    ("catalog commit done catalog", 1),
    ("ingest commit done", 1),
    ("watcher dismiss", 1),
)
ENDING = (
    ("watcher tell done", 2),
    ("dump let_go", 1),
    ("dump let_go done", 1),
    ("dump finish done", 1),
    ("undo kill", 1),
    ("undo _signal done", 1),
    ("undo kill done", 1),
)
RUNNING_ON = (
    ("dump let_go", 1),
    ("dump finish done", 1),
    ("restore", 1),
    ("unlock done", 1),
)


def interrupted(stage: Stage, done: Captured, leave_running: bool) -> None:
    """It ended with the code for that, and says what has become of the processes."""
    stored = stage.judge(done, leave_running)
    assert "Traceback" not in done.said, done.said
    if stored:
        assert done.code in (0, 130), done
    else:
        assert (done.code, done.said.strip()) == (130, f"icefloe: interrupted: {NOTHING_STORED}")


@one_criu
@MODES
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(stage: Stage, leave_running: bool, number: signal.Signals) -> None:
    """The processes run on, and it says so; or it is too late for that, and all is done."""
    steps = (EARLY[::3] if leave_running else EARLY) + LATE
    steps += RUNNING_ON if leave_running else ENDING
    failures = Failures(stage)
    for step, time in steps if number == signal.SIGINT else steps[::3]:
        with failures.of((step, time)):
            done = stage.capture(plan(step, time, signal=number), leave_running=leave_running)
            assert done.hits == 1, done
            interrupted(stage, done, leave_running)
    failures.tell()


@one_criu
@MODES
def test_interrupted_twice(stage: Stage, leave_running: bool) -> None:
    """Who can't wait presses Ctrl-C again, while all is being undone."""
    failures = Failures(stage)
    first = plan("written take done", 4, signal=signal.SIGINT)
    for step in (
        "dump give_up",
        "dump give_up done",
        "ingest abort done",
        "undo let_run done",
        "restore",
        "restore done",
        "unlock done",
        "watcher dismiss",
    ):
        with failures.of(step):
            again = plan(step, signal=signal.SIGINT)
            done = stage.capture(first, again, leave_running=leave_running)
            assert done.hits == 2 and done.code == 130, done
            stage.judge(done, leave_running)
    failures.tell()


@one_criu
def test_interrupted_in_the_middle_of_a_checkpoint(stage: Stage) -> None:
    """What the driver has begun it ends, and then it is undone."""
    stage.workload.advance(1)
    pids = list(stage.cuda.states())
    stage.cuda.plan(pids[0], "checkpoint", seconds=1.0)
    for number in (signal.SIGINT, signal.SIGKILL):
        done = stage.capture(plan("checkpoint", 2, signal=number, later=0.2))
        assert done.hits == 1, done
        if number == signal.SIGINT:
            interrupted(stage, done, leave_running=False)
        stage.judge(done, leave_running=False)


# --- CRIU is killed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criu", "leave_running"),
    [(NEWEST, False), (NEWEST, True), (OLDEST, False)],
    indirect=["criu"],
)
def test_criu_is_killed(stage: Stage, leave_running: bool) -> None:
    """Before it has begun, and while it is held, and when it was let go."""
    failures = Failures(stage)
    steps = ["criu started", "ingest finish", "ingest finish done", "ingest commit done"]
    after = ["dump let_go", "dump let_go done"]
    for step in [*steps[:1], *after] if leave_running else [*steps, *after]:
        with failures.of(step):
            done = stage.capture(plan(step, to="criu"), leave_running=leave_running)
            assert done.hits == 1, done
            stored = stage.judge(done, leave_running)
            if step == "dump let_go done" and done.code == 0:
                assert stored, done  # it had done its work already
            else:
                assert done.code == 9 and not stage.has_ended, done
                assert ("stored all the same" if stored else NOTHING_STORED) in done.said
    failures.tell()


@one_criu
@MODES
def test_criu_is_killed_at_work(stage: Stage, leave_running: bool) -> None:
    """Nothing is stored; the processes run on, but for what only CRIU can prevent.

    While it collects what it needs from within a process, it has that one make system calls, one
    after the other, behind each of which stands a trap (compel, `int3`). Who kills CRIU just then
    lets the process run into it: it dies of SIGTRAP, which nobody else can keep away from it. Of
    300 kills spread over that time 21 did that.
    """
    failures, trapped, ran_on = Failures(stage), 0, 0
    for i in range(8):
        with failures.of(i):
            at = plan("dump start", to="criu", later=i * 0.006, seized=True)
            done = stage.capture(at, leave_running=leave_running)
            if signal.SIGTRAP in stage.died_of():
                assert not stage.stored()
                stage.end()
                trapped += 1
            else:
                stage.judge(done, leave_running)
                ran_on += 1
    failures.tell()
    assert ran_on > trapped


@one_criu
def test_criu_is_killed_as_it_lets_go(stage: Stage) -> None:
    """Of several processes, some may be stopped by then, and some not."""
    failures = Failures(stage)
    for i in range(5):
        with failures.of(i):
            done = stage.capture(plan("dump let_go", to="criu", later=i * 0.002))
            assert stage.judge(done, leave_running=False)
            assert done.code == (0 if stage.has_ended else 9), done
    failures.tell()


@one_criu
@MODES
def test_the_processes_are_killed(stage: Stage, leave_running: bool) -> None:
    """By somebody else, while they are captured: nobody says that they run on."""
    stage.workload.advance(1)
    stage.cuda.take()
    done = stage.capture(plan("written take done", 4, to="tree"), leave_running=leave_running)
    assert stage.died_of() == {signal.SIGKILL}
    if stage.stored():  # all had been read by then
        assert done.code == 0, done
    else:
        assert done.code == 9 and "the processes run on" not in done.said, done


@one_criu
@MODES
@pytest.mark.parametrize("pause", [0.0, 0.5], ids=["CRIU is still there", "CRIU is gone"])
def test_the_action_script_is_killed(stage: Stage, leave_running: bool, pause: float) -> None:
    """What holds CRIU, by somebody who clears up. CRIU takes it for a failure, and undoes all."""
    failures = Failures(stage)
    for step in ["dump let_go"] if leave_running else ["ingest finish", "dump let_go"]:
        with failures.of(step):
            killed = plan(step, to="script", pause=pause)
            done = stage.capture(killed, leave_running=leave_running)
            assert done.hits == 1, done
            stage.judge(done, leave_running)
    failures.tell()


@one_criu
def test_a_stray_of_criu(stage: Stage, tmp_path: Path) -> None:
    """A CRIU that is killed while it tries what the kernel can leaves a stopped child behind.

    It holds on to all that it has inherited, and nobody ever ends it: not to be waited for.
    """
    program = tmp_path / "criu"
    real = stage.criu.program
    program.write_text(f'#!/bin/sh\n[ "$1" = dump ] && (sleep 4 &)\nexec {real} "$@"\n')
    program.chmod(0o755)
    done = stage.capture(environment={"ICEFLOE_CAPTURE_CRIU": str(program)}, leave_running=True)
    assert done.code == 0 and stage.judge(done, leave_running=True)
    assert done.seconds < 3


# --- disks --------------------------------------------------------------------------------------


@one_criu
@MODES
@pytest.mark.parametrize("arguments", [(), ("--no-stream",)], ids=["stream", "files"])
def test_the_disk_is_full(
    criu: Criu, server: Server, tmp_path: Path, leave_running: bool, arguments: Sequence[str]
) -> None:
    """In the middle of the memory."""
    with staging(criu, Heap, server) as stage, small_disk(tmp_path / "disk", 12 * MIB) as disk:
        stage.store = disk / "store"
        done = stage.capture(leave_running=leave_running, arguments=arguments)
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)  # to look at it
        assert not stage.judge(done, leave_running)
        assert done.code == 8, done
        assert "No space left" in done.said and NOTHING_STORED in done.said, done.said


@one_criu
def test_no_space_for_what_criu_writes(stage: Stage, tmp_path: Path) -> None:
    """Without streams its files are there twice for a while."""
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        done = stage.capture(arguments=["--no-stream"], environment={"TMPDIR": str(disk)})
        assert not stage.judge(done, leave_running=False)
        assert done.code in (8, 9) and NOTHING_STORED in done.said, done


@one_criu
@MODES
def test_a_file_grows_too_large(stage: Stage, leave_running: bool) -> None:
    """`ulimit -f`."""
    done = stage.capture(leave_running=leave_running, file_bytes=1 << 20)
    assert not stage.judge(done, leave_running)
    assert done.code == 8 and NOTHING_STORED in done.said, done


@one_criu
@MODES
def test_the_disk_fails_at_each_step(stage: Stage, leave_running: bool) -> None:
    """Whatever can't be written, the processes run on; what is said of the image is true."""
    failures = Failures(stage)
    steps = ("write staging", "fsync staging", "rename packs", "write journal", "fsync journal")
    for step in (*steps, "catalog commit catalog"):
        with failures.of(step):
            done = stage.capture(plan(step, to="disk"), leave_running=leave_running)
            assert done.hits == 1, done
            stage.judge(done, leave_running)
            assert done.code == 8 and not stage.has_ended, done
    failures.tell()


# --- CUDA ---------------------------------------------------------------------------------------


@one_criu
@MODES
@pytest.mark.parametrize("action", ["lock", "checkpoint"])
def test_cuda_refuses(stage: Stage, leave_running: bool, action: str) -> None:
    """Nothing is captured; the others are woken."""
    stage.workload.advance(1)
    *_, last = stage.cuda.states()
    stage.cuda.plan(last, action, error="CUDA_ERROR_NOT_SUPPORTED")
    done = stage.capture(leave_running=leave_running)
    assert done.code == 9, done
    assert f"can't {action} process {last}" in done.said and NOTHING_STORED in done.said
    assert "dump start" not in done.steps
    assert not stage.judge(done, leave_running)


@one_criu
def test_cuda_hangs(stage: Stage) -> None:
    """The time that it has is in the configuration."""
    stage.workload.advance(1)
    *_, last = stage.cuda.states()
    stage.cuda.plan(last, "checkpoint", seconds=1.5)
    done = stage.capture(environment={"ICEFLOE_CAPTURE_CUDA_TIMEOUT": "1s"})
    assert not stage.judge(done, leave_running=False)
    assert done.code == 9 and "capture.cuda_timeout" in done.said, done


@one_criu
def test_cuda_does_not_wake(stage: Stage) -> None:
    """When the image is stored: it stays, and the exit code says that something is wrong."""
    stage.workload.advance(1)
    *others, last = stage.cuda.states()
    stage.cuda.plan(last, "restore", error="CUDA_ERROR_OUT_OF_MEMORY")
    done = stage.capture(leave_running=True)
    assert done.code == 9 and f"can't restore process {last}" in done.said, done
    assert "the image is stored all the same, the processes run on" in done.said
    assert stage.stored()
    states = stage.cuda.states()
    assert states.pop(last) is CudaState.CHECKPOINTED
    assert set(states.values()) == {CudaState.RUNNING} and list(states) == others


@one_criu
def test_cuda_does_not_wake_after_a_failure(stage: Stage) -> None:
    """Both are told: what failed first, and who is left without CUDA."""
    stage.workload.advance(1)
    *_, last = stage.cuda.states()
    stage.cuda.plan(last, "restore", error="CUDA_ERROR_OUT_OF_MEMORY")
    done = stage.capture(plan("write staging", to="disk"))
    assert done.code == 9 and f"can't restore process {last}" in done.said, done
    assert "No space left" in done.said and not stage.stored()
    stage.workload.advance(2)


@one_criu
def test_the_watcher_wakes_slowly(stage: Stage) -> None:
    """It takes what time it needs; it is not in icefloe's group, and no signal ends it."""
    stage.workload.advance(1)
    for pid in stage.cuda.states():
        stage.cuda.plan(pid, "restore", seconds=1.0)
    done = stage.capture(plan("written take done", to="group"))
    assert done.lingered > 1.0
    assert not stage.judge(done, leave_running=False)


@one_criu
def test_a_gpu_without_cuda(stage: Stage) -> None:
    """A process may have a GPU open for other things: it is captured like any other."""
    stage.workload.advance(1)
    stage.cuda.take()
    for leave_running in (True, False):
        done = stage.capture(leave_running=leave_running)
        assert done.code == 0, done
        assert stage.judge(done, leave_running)
