"""Keeps a restored process from running on with memory that is not there.

When the last descriptor of a userfaultfd is closed, the kernel fills what is missing with zeros
and lets the process run on: the worst that can happen to it. So the one who fills is a child, and
its parent, which does nothing else, holds every descriptor too. If the child dies before it is
done, the parent kills whatever it has restored, and only then lets go.

If the parent dies, the child goes on and finishes the fill.
"""

import ctypes
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

# <linux/prctl.h>: what the child restores, and whatever that starts, stays below the parent.
_SET_CHILD_SUBREAPER = 36

_RELEASE = struct.Struct("<Q")

# How often the parent buries what has died meanwhile, as init would.
_LOOK_MILLISECONDS = 200


class Guard:
    """The child's side: tells the parent which descriptors to hold."""

    def __init__(self, channel: socket.socket | None) -> None:
        self._channel = channel
        self._count = 0

    def hold(self, fd: int) -> int:
        """From now on the parent holds this descriptor too. Returns a token for `release`."""
        self._count += 1
        if self._channel is not None:
            with suppress(OSError):  # the parent is gone: nobody guards, and the fill goes on
                socket.send_fds(self._channel, [b"+"], [fd])
        return self._count

    def release(self, token: int) -> None:
        """The parent may let go of it."""
        if self._channel is not None:
            with suppress(OSError):
                self._channel.send(_RELEASE.pack(token))


def stand_guard() -> Guard:
    """Forks. Returns in the child; the parent stays behind and exits with the child's code.

    To be called before there are threads.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        ours.close()
        return Guard(theirs)
    theirs.close()

    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGHUP, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child as well
    os._exit(_watch(child, ours))


def _watch(child: int, channel: socket.socket) -> int:
    """Holds descriptors until the child ends; returns the exit code."""
    held: dict[int, int] = {}
    count = 0
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    status: int | None = None
    while status is None:
        if poll.poll(_LOOK_MILLISECONDS):
            message, fds, _, _ = socket.recv_fds(channel, _RELEASE.size, 1)
            if fds:
                count += 1
                held[count] = fds[0]
            elif message:
                os.close(held.pop(_RELEASE.unpack(message)[0]))
            else:
                status = os.waitpid(child, 0)[1]
                break
        status = _bury(child)
    code = os.waitstatus_to_exitcode(status)
    if code:
        kill_descendants()
    if code < 0:
        name = signal.Signals(-code).name
        print(
            f"icefloe: the restore was ended by {name}: what it had restored was killed, because "
            "its memory was not complete; run it again",
            file=sys.stderr,
        )
        return 128 - code
    return code


def _bury(child: int) -> int | None:
    """Reaps what has ended; returns the child's status if it was among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            return status
        if not pid:
            return None


def kill_descendants() -> None:
    """Kills every process below this one and reaps those that fall to it."""
    while living := list(_descendants()):
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
    _bury(0)


def _descendants() -> Iterator[int]:
    """Living processes below this one; zombies don't count, but their children do."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                # proc_pid_stat(5): after the name in brackets, which may hold any bytes, come the
                # state and the parent.
                state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(entry.name), state in b"ZX"))
    ahead = [os.getpid()]
    while ahead:
        for pid, dead in children.get(ahead.pop(), ()):
            ahead.append(pid)
            if not dead:
                yield pid
