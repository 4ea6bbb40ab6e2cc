"""What /proc says of processes, told by real ones: of any name, dead, half dead, reused, nested."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from icefloe.capture import processes
from icefloe.capture.processes import Process

PATIENCE = 20.0
IS_ROOT = os.geteuid() == 0

# Takes a name of any bytes from standard input, and says so.
NAMED = """
import ctypes, sys
libc = ctypes.CDLL(None)
for line in sys.stdin:
    libc.prctl(15, bytes.fromhex(line), 0, 0, 0)
    print("named", flush=True)
"""

# Its first thread ends while another one lives; SYS_exit ends a thread, not the process.
HEADLESS = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
number = {"x86_64": 60}.get(os.uname().machine, 93)
print("ending", flush=True)
ctypes.CDLL(None).syscall(number, 0)
"""

# Three children, one of them with a child and one dead. Each says its pid, in one piece.
FAMILY = """
import os, time
def tell(word, pid):
    os.write(1, f"{word} {pid}\\n".encode())
def child(work):
    if os.fork() == 0:
        work()
        time.sleep(60)
def grandson():
    tell("grandson", os.getpid())
def son():
    child(grandson)
    tell("son", os.getpid())
child(son)
child(lambda: tell("daughter", os.getpid()))
if (pid := os.fork()) == 0:
    os._exit(0)
tell("dead", pid)
time.sleep(60)
"""


@contextmanager
def running(*command: str) -> Iterator["subprocess.Popen[str]"]:
    """A process, gone with its whole session when the context ends."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        with process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
    finally:
        process.wait(PATIENCE)


def python(script: str, *arguments: str) -> list[str]:
    """The command that runs a script."""
    return [sys.executable, "-c", script, *arguments]


def until(condition: Callable[[], bool]) -> None:
    """Waits for it."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def seen(pid: int) -> Process:
    """What there is under a pid, where there must be something."""
    found = processes.look(pid)
    assert found is not None
    return found


def alone(root: Process) -> bool:
    """Whether it is all of its tree. What it is doing changes from look to look."""
    return [(each.pid, each.started) for each in processes.tree(root)] == [(root.pid, root.started)]


def heard(process: "subprocess.Popen[str]", lines: int) -> dict[str, int]:
    """Words and pids that it has said."""
    assert process.stdout is not None
    said = (process.stdout.readline().split() for _ in range(lines))
    return {word: int(pid) for word, pid in said}


@contextmanager
def zombie() -> Iterator[int]:
    """A process that has ended, and that nobody has buried."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    try:
        until(lambda: seen(pid).state == "Z")
        yield pid
    finally:
        os.waitpid(pid, 0)


# --- one process --------------------------------------------------------------------------------


def test_this_process() -> None:
    found = seen(os.getpid())
    assert (found.pid, found.parent) == (os.getpid(), os.getppid())
    # The system's and the process's clock agree to within the start of the interpreter.
    age = float(Path("/proc/uptime").read_text().split()[0]) - found.started / os.sysconf(
        "SC_CLK_TCK"
    )
    assert 0 <= age < time.monotonic() + 1
    assert not found.dead and not found.stopped
    assert processes.is_there(found)


def test_the_start_is_that_of_the_process() -> None:
    """In ticks since boot; a process that started later has a later one."""
    ticks = os.sysconf("SC_CLK_TCK")
    before = float(Path("/proc/uptime").read_text().split()[0])
    with running("sleep", "60") as process:
        after = float(Path("/proc/uptime").read_text().split()[0])
        assert before - 0.1 <= seen(process.pid).started / ticks <= after + 0.1
        assert seen(process.pid).started > seen(os.getpid()).started


@pytest.fixture(scope="module")
def namesake() -> Iterator[Callable[[bytes], Process]]:
    """Names a process, and returns what it was before."""
    with running(*python(NAMED)) as process:
        before = seen(process.pid)

        def named(name: bytes) -> Process:
            assert process.stdin is not None and process.stdout is not None
            print(name.hex(), file=process.stdin, flush=True)
            assert process.stdout.readline() == "named\n"
            assert (Path("/proc") / str(process.pid) / "comm").read_bytes() == name + b"\n"
            return before

        yield named


@settings(max_examples=200, deadline=None)
@given(name=st.binary(max_size=15).map(lambda name: name.replace(b"\0", b"\xff")))
@example(name=b") Z 1 (")
@example(name=b"((()))")
@example(name=b") Z 1 1 1 1")
@example(name=b"a b\tc\nd")
@example(name=b"\n\n\n")
@example(name=b"\nNSpid:\t7")
@example(name=b"\nVmRSS:\t 7 kB")
@example(name=b"\xe9\xff)")
@example(name=b"")
def test_any_name(namesake: Callable[[bytes], Process], name: bytes) -> None:
    """It may hold all that parsers look for."""
    before = namesake(name)
    found = seen(before.pid)
    assert (found.parent, found.started) == (os.getpid(), before.started)
    assert found.state in "SRD" and not found.dead and not found.stopped
    assert processes.is_there(before)
    assert alone(before)
    assert [process.pid for process in processes.below(os.getpid())].count(before.pid) == 1
    assert processes.inner_pid(before.pid) == before.pid
    assert processes.resident_bytes(before.pid) > 1 << 20


def test_nobody() -> None:
    """A pid that is free, and such as can't be."""
    with running("true") as process:
        pid = process.pid
        process.wait()
        for free in (pid, 1 << 30, -1):
            assert processes.look(free) is None
            assert processes.inner_pid(free) == free
            assert processes.resident_bytes(free) == 0
            assert not processes.opens(free, "/")
            assert list(processes.below(free)) == []


def test_a_stopped_process() -> None:
    with running("sleep", "60") as process:
        before = seen(process.pid)
        assert not before.stopped
        process.send_signal(19)
        until(lambda: seen(process.pid).stopped)
        assert seen(process.pid).state == "T" and processes.is_there(before)
        assert [each.stopped for each in processes.tree(before)] == [True]
        process.send_signal(18)
        until(lambda: not seen(process.pid).stopped)


def test_a_zombie() -> None:
    with zombie() as pid:
        found = seen(pid)
        assert found.dead and found.parent == os.getpid()
        assert not processes.is_there(found)
        assert pid not in {process.pid for process in processes.below(os.getpid())}
        assert not processes.opens(pid, "/")
        assert processes.resident_bytes(pid) == 0
        assert processes.inner_pid(pid) == pid
    assert found.dead, "and gone"


def test_a_dead_leader_with_a_living_thread() -> None:
    """It looks like a zombie and runs all the same."""
    with running(*python(HEADLESS)) as process:
        assert process.stdout is not None and process.stdout.readline() == "ending\n"
        until(lambda: seen(process.pid).state == "Z")
        found = seen(process.pid)
        assert not found.dead and processes.is_there(found)
        assert alone(found)
        assert process.pid in {each.pid for each in processes.below(os.getpid())}


def test_a_dead_leader_that_is_dead_then() -> None:
    with running(*python(HEADLESS)) as process:
        assert process.stdout is not None and process.stdout.readline() == "ending\n"
        until(lambda: seen(process.pid).state == "Z")
        found = seen(process.pid)
        os.kill(process.pid, 9)
        until(lambda: not processes.is_there(found))
        assert seen(process.pid).dead


def test_threads_are_no_processes() -> None:
    """Their numbers are pids as well."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert thread.native_id is not None and processes.is_thread(thread.native_id)
        assert not processes.is_thread(os.getpid())
        assert thread.native_id not in {each.pid for each in processes.below(os.getppid())}
    finally:
        ended.set()
        thread.join()
    with running(*python(HEADLESS)) as process, zombie() as dead:
        assert process.stdout is not None and process.stdout.readline() == "ending\n"
        until(lambda: seen(process.pid).state == "Z")
        numbers = {int(name) for name in os.listdir(f"/proc/{process.pid}/task")}
        assert len(numbers) == 2
        assert {number for number in numbers if processes.is_thread(number)} == numbers - {
            process.pid
        }
        assert not processes.is_thread(dead) and not processes.is_thread(1 << 30)


def test_a_pid_that_is_used_again() -> None:
    """By a process that was started at another time."""
    with running("sleep", "60") as process:
        found = seen(process.pid)
        for other in (found.started - 1, found.started + 1, 0):
            earlier = replace(found, started=other)
            assert not processes.is_there(earlier)
            assert processes.tree(earlier) == []
        assert processes.is_there(found) and alone(found)
    assert not processes.is_there(found) and processes.tree(found) == []


# --- trees --------------------------------------------------------------------------------------


def test_a_family() -> None:
    """The root first; the dead don't count."""
    with running(*python(FAMILY)) as process:
        said = heard(process, 4)
        until(lambda: seen(said["dead"]).state == "Z")
        root = seen(process.pid)
        found = processes.tree(root)
        assert found[0].pid == root.pid
        living = {said["son"], said["grandson"], said["daughter"]}
        assert {each.pid for each in found[1:]} == living and len(found) == 4
        parents = {each.pid: each.parent for each in found}
        assert parents[said["grandson"]] == said["son"]
        assert parents[said["son"]] == parents[said["daughter"]] == root.pid
        assert {each.pid for each in processes.below(root.pid)} == living
        for others, left in (
            ({said["son"]}, {said["daughter"]}),
            ({said["grandson"]}, {said["son"], said["daughter"]}),
            ({said["dead"]}, living),
            ({root.pid}, living),
            (living, set()),
        ):
            assert {each.pid for each in processes.below(root.pid, others)} == left


def test_children_of_a_dead_leader_and_of_other_threads() -> None:
    """They are children of the process, whichever thread has forked them."""
    script = (
        HEADLESS.replace("time.sleep, args=(60,)", "fork")
        .replace("import ctypes", "import subprocess, ctypes")
        .replace(
            "threading.Thread",
            "def fork():\n    for _ in range(2):\n        subprocess.Popen(['sleep', '60'])\n"
            "    print('forked', flush=True)\n    time.sleep(60)\nthreading.Thread",
            1,
        )
    )
    with running(*python(script)) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"forked\n", "ending\n"}
        until(lambda: seen(process.pid).state == "Z")
        root = seen(process.pid)
        assert len(processes.tree(root)) == 3
        assert {each.parent for each in processes.below(root.pid)} == {root.pid}


def test_processes_that_come_and_go() -> None:
    """Nobody minds that one ends between two looks."""
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            subprocess.run(["true"], check=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(60):
            assert all(isinstance(each, Process) for each in processes.below(os.getpid()))
    finally:
        ended.set()
        thread.join()


# --- namespaces ---------------------------------------------------------------------------------


@pytest.mark.skipif(not IS_ROOT, reason="a pid namespace takes root")
@pytest.mark.parametrize("levels", [1, 2])
def test_a_nested_pid_namespace(levels: int) -> None:
    """CRIU records the pid of the innermost."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    command = ["unshare", "--pid", "--fork", "--kill-child"] * levels
    with running(*command, *python("import time; print('x', flush=True); time.sleep(60)")) as outer:
        assert outer.stdout is not None and outer.stdout.readline() == "x\n"
        assert processes.inner_pid(outer.pid) == outer.pid
        family = processes.tree(seen(outer.pid))
        assert len(family) == levels + 1
        innermost = family[-1]
        assert innermost.pid != 1 and processes.inner_pid(innermost.pid) == 1
        assert processes.is_there(innermost)


# --- open files ---------------------------------------------------------------------------------

OPENER = """
import os, socket, sys
files = [open(path) for path in sys.argv[1:]]
pair = socket.socketpair()
os.unlink(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_open_files(tmp_path: Path) -> None:
    """By the beginning of their paths; also of one that is deleted."""
    paths = [tmp_path / "deleted", tmp_path / "other"]
    for path in paths:
        path.write_text("x")
    with running(*python(OPENER, *map(str, paths))) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        for prefix in (
            *map(str, paths),
            f"{tmp_path}/del",
            f"{tmp_path}/",
            "/",
            "socket:",
            "pipe:",
        ):
            assert processes.opens(process.pid, prefix), prefix
        for prefix in (f"{tmp_path}/x", "/dev/nvidia", str(tmp_path)[1:], f"{paths[1]}x"):
            assert not processes.opens(process.pid, prefix), prefix


@pytest.mark.skipif(not IS_ROOT, reason="takes root, to be somebody else")
def test_open_files_of_others_are_none_of_our_business() -> None:
    """It is said, and not taken for none."""
    script = """
import os
from icefloe.capture import processes
os.seteuid(65534)
try:
    processes.opens(os.getppid(), "/")
except PermissionError:
    found = processes.look(os.getppid())
    print("refused", found.parent, processes.inner_pid(os.getppid()))
"""
    told = subprocess.run(python(script), capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["refused", str(os.getppid()), str(os.getpid())]


def test_resident_bytes() -> None:
    """They grow with what a process touches."""
    script = (
        "import sys\nprint(0, flush=True)\nsys.stdin.readline()\n"
        "x = bytearray(64 << 20)\nx[::4096] = b'x' * (len(x) // 4096)\n"
        "print(1, flush=True)\nsys.stdin.readline()"
    )
    with running(*python(script)) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        before = processes.resident_bytes(process.pid)
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        grown = processes.resident_bytes(process.pid) - before
        assert 60 << 20 < grown < 80 << 20
