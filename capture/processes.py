"""Process trees as /proc shows them."""

import os
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_NS_PIDS = re.compile(r"^NSpid:((?:\s+\d+)+)", re.MULTILINE)
_GROUP = re.compile(r"^Tgid:\s+(\d+)", re.MULTILINE)
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """A process; `started` (clock ticks since boot) tells it from a later one of the same pid."""

    pid: int
    parent: int
    state: str
    started: int

    @property
    def stopped(self) -> bool:
        """Stopped by a signal, as a shell's Ctrl-Z does."""
        return self.state == "T"

    @property
    def dead(self) -> bool:
        """Nothing of it runs. One whose first thread has ended looks dead while others run."""
        if self.state not in "ZX":
            return False
        try:
            return len(os.listdir(_PROC / str(self.pid) / "task")) <= 1
        except OSError:
            return True


def look(pid: int) -> Process | None:
    """What there is under a pid."""
    try:
        content = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # proc_pid_stat(5): after the name in brackets, which may hold any bytes, come the state, the
    # parent, and as the 22nd field of all the time of the start.
    fields = content.rpartition(b")")[2].split()
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]))


def again(process: Process) -> Process | None:
    """The same process as it is now; None when it is gone, or its pid another's."""
    now = look(process.pid)
    return now if now is not None and now.started == process.started else None


def is_thread(pid: int) -> bool:
    """Whether it is the number of a thread that isn't the first of its process."""
    group = _status(pid, _GROUP)
    return group is not None and int(group) != pid


def below(pid: int, others: Set[int] = frozenset()) -> Iterator[Process]:
    """Living processes below one. Zombies don't count, but their children do; `others`, and what
    is below them, don't either."""
    children: dict[int, list[Process]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (found := look(int(entry.name))) is not None:
            children.setdefault(found.parent, []).append(found)
    ahead = [pid]
    while ahead:
        for process in children.get(ahead.pop(), ()):
            if process.pid not in others:
                ahead.append(process.pid)
                if not process.dead:
                    yield process


def tree(root: Process) -> list[Process]:
    """The living processes of a tree, the root first; none when the root is another one now."""
    if (now := again(root)) is None:
        return []
    return [process for process in (now, *below(root.pid)) if not process.dead]


def is_there(process: Process) -> bool:
    """Whether it is still the same process, and alive."""
    now = again(process)
    return now is not None and not now.dead


def inner_pid(pid: int) -> int:
    """The pid that a process itself sees, which is the one that CRIU records (proc(5), NSpid)."""
    pids = _status(pid, _NS_PIDS)
    return int(pids.split()[-1]) if pids is not None else pid


def resident_bytes(pid: int) -> int:
    """Memory that a process holds."""
    kilobytes = _status(pid, _RESIDENT)
    return int(kilobytes) << 10 if kilobytes is not None else 0


def _status(pid: int, line: re.Pattern[str]) -> str | None:
    """What a line of /proc/PID/status says, None where there is none."""
    with suppress(OSError):
        found = line.search((_PROC / str(pid) / "status").read_text(errors="replace"))
        return found[1] if found else None
    return None


def opens(pid: int, prefix: str) -> bool:
    """Whether it has a file open whose path starts so. Raises PermissionError."""
    try:
        numbers = os.listdir(_PROC / str(pid) / "fd")
    except (FileNotFoundError, ProcessLookupError):
        return False
    for number in numbers:
        with suppress(FileNotFoundError, ProcessLookupError):
            if os.readlink(_PROC / str(pid) / "fd" / number).startswith(prefix):
                return True
    return False
