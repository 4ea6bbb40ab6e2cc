"""Keeps a restored process from running on with memory that is not there.

When the last descriptor of a userfaultfd is closed, the kernel fills what is missing with zeros
and lets the process run on: the worst that can happen to it. So the one who fills is a child, and
its parent, which does nothing else, holds every descriptor too. If the child dies before it is
done, the parent kills whatever it has restored, and only then lets go.

If the parent dies, the child goes on and finishes the fill.
"""

import ctypes
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Set
from contextlib import suppress
from types import FrameType

from icefloe.capture import processes

# <linux/prctl.h>: what the child restores, and whatever that starts, stays below the parent.
_SET_CHILD_SUBREAPER = 36

# What the child says: "+" with a descriptor to hold or "-" for one to release, and its token.
_WORD = struct.Struct("<cQ")

# How often the parent buries what has died meanwhile, as init would.
_LOOK_MILLISECONDS = 200

# How often to look whether what was killed is gone.
_DYING_SECONDS = 0.005


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
                socket.send_fds(self._channel, [_WORD.pack(b"+", self._count)], [fd])
        return self._count

    def release(self, token: int) -> None:
        """The parent may let go of it."""
        if self._channel is not None:
            with suppress(OSError):
                self._channel.send(_WORD.pack(b"-", token))


def stand_guard() -> Guard:
    """Forks. Returns in the child; the parent stays behind and exits with the child's code.

    To be called before there are threads.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Each process restored takes a descriptor here and there.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # may have come ignored: then nothing waits
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    others = frozenset(process.pid for process in processes.below(os.getpid()))
    forwarded = {signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ours.close()
        return Guard(theirs)
    theirs.close()

    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in forwarded:
        signal.signal(number, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child as well
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os._exit(_watch(child, ours, others))


def _watch(child: int, channel: socket.socket, others: Set[int]) -> int:
    """Holds descriptors until the child ends; returns the exit code."""
    held: dict[int, int] = {}
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    status: int | None = None
    while status is None:
        if poll.poll(_LOOK_MILLISECONDS):
            message, fds, _, _ = socket.recv_fds(channel, _WORD.size, 1)
            if not message:
                status = os.waitpid(child, 0)[1]
                break
            word, token = _WORD.unpack(message)
            if word == b"-" and token in held:
                os.close(held.pop(token))
            elif word == b"+" and fds:
                held[token] = fds[0]
            elif word == b"+":  # a limit of descriptors: what can't be guarded must not go on
                os.kill(child, signal.SIGKILL)
        status = _bury(child)
    code = os.waitstatus_to_exitcode(status)
    channel.close()  # one descriptor at least is left to look into /proc with
    if code:
        kill_descendants(others)
    if code < 0:
        with suppress(OSError):
            print(
                f"icefloe: the restore was ended by {_name(-code)}: what it had restored was "
                "killed, because its memory was not complete; run it again",
                file=sys.stderr,
            )
        return 128 - code
    return code


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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


def kill_descendants(others: Set[int]) -> None:
    """Kills every process below this one but for `others`, and reaps those that fall to it."""
    while living := list(processes.below(os.getpid(), others)):
        for process in living:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        _bury(0)
        time.sleep(_DYING_SECONDS)
    _bury(0)
