"""The guard, in processes of its own; each of them is gone when its test is over.

Every process of a script holds `life`, a pipe to the test, and tells its pid there. So the test
knows whom to wait for, and sees by the end of the pipe that all of them are gone.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import adopting_orphans, wait_until
from restores import state_of

PATIENCE = 20.0
A_WHILE = 0.5  # in which the guard looks around twice

TOOLS = """
import ctypes, os, signal, sys, time
from icefloe.capture.guard import stand_guard

life, *names = sys.argv[1:]

def tell(word):
    os.write(int(life), f"{word} {os.getpid()}\\n".encode())

def linger(word):
    tell(word)
    time.sleep(60)
    os._exit(0)

def fork(work, *arguments):
    child = os.fork()
    if child == 0:
        work(*arguments)
        os._exit(0)
    return child

def middle():
    os.setsid()
    ctypes.CDLL(None).prctl(15, b"\\xe9) Z 1 (", 0, 0, 0)  # a name that misleads parsers
    fork(linger, "daemon")

def start_family():
    fork(lambda: (fork(linger, "grandson"), linger("son")))
    os.waitpid(fork(middle), 0)
    fork(lambda: (tell("zombie"), fork(linger, "orphan")))

print("once")
guard = stand_guard()
tell("child")
"""
LASTING = ("son", "grandson", "daemon", "orphan")
FAMILY = ("child", "zombie", *LASTING)


@dataclass
class Guarded:
    """The guard, our end of `life`, and which process (by pid) said what."""

    guard: subprocess.Popen[str]
    life: int
    said: dict[str, int] = field(default_factory=dict)
    ended: bool = False


def listen(to: Guarded, seconds: float) -> None:
    """Hears what is said next, or that all have ended. Lines are written in one piece."""
    if select.select([to.life], [], [], seconds)[0]:
        lines = os.read(to.life, 1 << 16).decode().splitlines()
        to.ended = not lines
        to.said |= {word: int(pid) for word, pid in map(str.split, lines)}


def hear(who: Guarded, *words: str) -> None:
    """Waits for these words."""
    deadline = time.monotonic() + PATIENCE
    while not who.said.keys() >= set(words):
        assert time.monotonic() < deadline and not who.ended, (words, who.said)
        listen(who, 0.1)


def order(whom: Guarded, line: str) -> None:
    """A line for the child's standard input."""
    assert whom.guard.stdin
    print(line, file=whom.guard.stdin, flush=True)


def living(who: Guarded, *words: str) -> bool:
    """Whether all who said these words live."""
    return all(state_of(who.said[word]) not in (None, "Z") for word in words)


def buried(pid: int) -> bool:
    """Whether a process is gone; if it has fallen to us, it is reaped."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return state_of(pid) is None


def end(who: Guarded) -> None:
    """Ends whoever is left, and sees that nobody is."""
    deadline = time.monotonic() + PATIENCE
    while not who.ended:
        assert time.monotonic() < deadline, f"of {who.said}, some can't be ended"
        who.guard.kill()
        for pid in who.said.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        listen(who, 0.05)
    who.guard.wait(PATIENCE)
    wait_until(lambda: all(map(buried, who.said.values())), PATIENCE, "all to be reaped")


@contextmanager
def guarded(script: str, folder: Path, *names: Path, tools: str = TOOLS) -> Iterator[Guarded]:
    """A script at work, its output in files. Orphans that the guard leaves behind fall to us."""
    life, theirs = os.pipe()
    command = [sys.executable, "-c", tools + script, str(theirs), *map(str, names)]
    with os.fdopen(life, "rb"), open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=err, pass_fds=[theirs], text=True
        )
        os.close(theirs)
        with adopting_orphans(), guard:
            who = Guarded(guard, life)
            try:
                yield who
            finally:
                end(who)


@pytest.mark.parametrize("code", [0, 1, 4, 255])
def test_the_exit_code_is_the_childs(tmp_path: Path, code: int) -> None:
    with guarded(f"sys.exit({code})", tmp_path) as who:
        assert who.guard.wait(PATIENCE) == code
        hear(who, "child")
        assert who.said["child"] != who.guard.pid
    assert (tmp_path / "out").read_text() == "once\n"
    assert (tmp_path / "err").read_text() == ""


@pytest.mark.parametrize("by", [None, signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_fails_takes_all_along(tmp_path: Path, by: signal.Signals | None) -> None:
    """When the guard exits, nobody is left, not even a zombie."""
    with guarded("start_family(); sys.stdin.readline(); sys.exit(9)", tmp_path) as who:
        hear(who, *FAMILY)
        os.kill(who.said["son"], signal.SIGSTOP)
        os.kill(who.said["child"], by) if by else order(who, "fail")
        assert who.guard.wait(PATIENCE) == (128 + by if by else 9)
        listen(who, 0)
        assert who.ended and not any(map(state_of, who.said.values()))
    told = rf"icefloe: .* by {by.name}: .* killed.*; run it again\n" if by else ""
    assert re.fullmatch(told, (tmp_path / "err").read_text())


@pytest.mark.parametrize("child", [True, False])
def test_one_whose_first_thread_has_ended_is_no_zombie(tmp_path: Path, child: bool) -> None:
    """It looks like one in /proc, and its child needn't fall to the guard."""
    script = f"""
import threading
def odd():
    if {child}:
        fork(linger, "grandson")
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    tell("odd")
    ctypes.CDLL(None).pthread_exit(None)
fork(odd)
sys.stdin.readline()
sys.exit(9)
"""
    with guarded(script, tmp_path) as who:
        hear(who, "odd", *["grandson"] * child)
        wait_until(lambda: state_of(who.said["odd"]) == "Z", PATIENCE, "its first thread's end")
        order(who, "fail")
        assert who.guard.wait(PATIENCE) == 9
        listen(who, 0)
        assert who.ended


def test_who_was_there_before_is_spared(tmp_path: Path) -> None:
    """As `helper & exec icefloe restore ...` makes it."""
    before = TOOLS.replace("guard = stand_guard()", 'fork(linger, "helper")\nguard = stand_guard()')
    with guarded("start_family(); sys.exit(9)", tmp_path, tools=before) as who:
        assert who.guard.wait(PATIENCE) == 9
        hear(who, "helper", *FAMILY)
        assert living(who, "helper") and not any(state_of(who.said[name]) for name in LASTING)


@pytest.mark.parametrize(
    ("before", "script", "code"),
    [
        ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "sys.exit(0)", 0),
        ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "sys.exit(9)", 9),
        ("os.close(1); sys.stdout = None", "sys.exit(0)", 0),
        ("os.close(2); os.open('/dev/full', os.O_WRONLY)", "os.kill(os.getpid(), 9)", 137),
        ("", "os.kill(os.getpid(), 40)", 168),
    ],
)
def test_odd_surroundings(tmp_path: Path, before: str, script: str, code: int) -> None:
    tools = TOOLS.replace("guard = stand_guard()", f"{before}\nguard = stand_guard()")
    with guarded(f"start_family(); {script}", tmp_path, tools=tools) as who:
        assert who.guard.wait(PATIENCE) == code
        hear(who, *FAMILY)
        assert any(state_of(who.said[name]) for name in LASTING) is (code == 0)


def test_a_descriptor_that_cannot_be_held(tmp_path: Path) -> None:
    """What the guard can't hold must not run on."""
    script = """
import resource
start_family()
last = max(map(int, os.listdir(f"/proc/{os.getppid()}/fd")))
resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (last + 1, last + 1))
for _ in range(last + 1):
    guard.hold(0)
time.sleep(60)
"""
    with guarded(script, tmp_path) as who:
        assert who.guard.wait(PATIENCE) == 137
        listen(who, 0)  # what was said before
        listen(who, 0)
        assert who.ended


def test_what_was_restored_lives_on(tmp_path: Path) -> None:
    """Who dies before the child ends is buried by the guard."""
    with guarded("start_family(); sys.stdin.readline()", tmp_path) as who:
        hear(who, *FAMILY)
        os.kill(who.said["orphan"], signal.SIGKILL)
        wait_until(lambda: state_of(who.said["orphan"]) is None, PATIENCE, "the burial")
        assert living(who, "child", *LASTING[:-1]) and who.guard.poll() is None
        order(who, "end well")
        assert who.guard.wait(PATIENCE) == 0
        assert living(who, *LASTING[:-1])


def is_ready(guard: int) -> bool:
    """Whether SIGHUP is caught and SIGINT ignored, which is set last."""
    status = Path(f"/proc/{guard}/status").read_text()
    ignored, caught = (int(s, 16) for s in re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)$", status, re.M))
    return bool(caught & 1 << signal.SIGHUP - 1 and ignored & 1 << signal.SIGINT - 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_forwarded(tmp_path: Path, number: signal.Signals) -> None:
    """Except for SIGINT, which a terminal sends to both."""
    script = f"signal.signal({number}, lambda number, frame: os._exit(77)); linger('ready')"
    with guarded(script, tmp_path) as who:
        hear(who, "ready")
        wait_until(lambda: is_ready(who.guard.pid), PATIENCE, "the guard")
        who.guard.send_signal(signal.SIGINT)
        time.sleep(A_WHILE)
        assert living(who, "child") and who.guard.poll() is None
        who.guard.send_signal(number)
        assert who.guard.wait(PATIENCE) == 77


HOLDER = """
start_family()
fds = [os.open(name, os.O_WRONLY) for name in names]
tokens = list(map(guard.hold, [*fds, 1]))
list(map(os.close, fds))
tell("held")
guard.release(tokens[int(sys.stdin.readline())])
guard.hold(1)
tell("released")
sys.exit(int(sys.stdin.readline()))
"""


def hung_up(pipe: int, seconds: float) -> bool:
    """Whether the last writer goes in this time."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(seconds * 1000))


def test_descriptors_are_held(tmp_path: Path) -> None:
    """Until they are released, or the guard has killed everybody and ends."""
    fifos = [tmp_path / "first", tmp_path / "second"]
    list(map(os.mkfifo, fifos))
    first, second = (os.open(fifo, os.O_RDONLY | os.O_NONBLOCK) for fifo in fifos)
    with os.fdopen(first), os.fdopen(second), guarded(HOLDER, tmp_path, *fifos) as who:
        hear(who, *FAMILY, "held")
        assert not hung_up(first, A_WHILE) and not hung_up(second, 0)
        order(who, "1")
        assert hung_up(second, PATIENCE) and not hung_up(first, A_WHILE)
        who.guard.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(who.guard.pid) == "T", PATIENCE, "the guard to stop")
        os.kill(who.said["child"], signal.SIGKILL)
        wait_until(lambda: not living(who, "child"), PATIENCE, "the child's end")
        assert not hung_up(first, A_WHILE)
        who.guard.send_signal(signal.SIGCONT)
        assert hung_up(first, PATIENCE) and not any(map(state_of, who.said.values()))
        assert who.guard.wait(PATIENCE) == 137


def test_the_child_goes_on_without_a_guard(tmp_path: Path) -> None:
    with guarded(HOLDER, tmp_path, Path(os.devnull)) as who:
        hear(who, *FAMILY, "held")
        who.guard.kill()
        assert who.guard.wait(PATIENCE) == -signal.SIGKILL
        order(who, "0")
        hear(who, "released")
        assert living(who, "child", *LASTING)
        order(who, "7")
        wait_until(lambda: not living(who, "child"), PATIENCE, "the child's end")
        assert os.waitstatus_to_exitcode(os.waitpid(who.said["child"], 0)[1]) == 7
    assert (tmp_path / "err").read_text() == ""
