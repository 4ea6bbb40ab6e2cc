"""Processes that outlive the process which started them: finding, killing and reaping them.

A restored process is a child of CRIU, which ends at once, so it falls to this process if it is a
subreaper. Whoever is not reaped stays a zombie and keeps its pid, and CRIU cannot restore a
process whose pid is taken.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
REAP_SECONDS = 10.0
POLL_SECONDS = 0.005
# Of /proc/PID/stat after the command's name: state, parent, group, session.
PARENT_FIELD, SESSION_FIELD = 1, 3


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Orphaned descendants become children of this process while the context is open."""
    set_subreaper(True)
    try:
        yield
    finally:
        set_subreaper(False)


def set_subreaper(on: bool) -> None:
    """Sets or clears this process's mark as a subreaper."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls until the condition holds; raises AssertionError that names `what` at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(POLL_SECONDS)


def session_members(session: int) -> list[int]:
    """The processes of a session, zombies included: a tree is found even when its root died.

    A restore that was broken off may leave its root in CRIU's session, as a child of ours.
    """
    return [pid for pid in all_pids() if belongs(pid, session)]


def all_pids() -> list[int]:
    """Every process that can be seen."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def belongs(pid: int, session: int) -> bool:
    """Whether a process is of the session, or was to become its leader."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = stat.rpartition(")")[2].split()
    is_orphan = pid == session and int(fields[PARENT_FIELD]) == os.getpid()
    return int(fields[SESSION_FIELD]) == session or is_orphan


def kill_session(session: int) -> None:
    """Ends every process of a session and reaps it, so that the pids are free afterwards."""
    for pid in session_members(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    reap_session(session)


def reap_session(session: int) -> None:
    """Waits until no process of the session is left, not even a zombie."""

    def nobody_left() -> bool:
        members = session_members(session)
        for pid in members:
            # Not a child yet: its parent, which dies too, has not handed it over.
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return not members

    wait_until(nobody_left, REAP_SECONDS, f"the end of session {session}")
