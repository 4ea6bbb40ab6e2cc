"""Processes that fill memory (capture/filling.py), seen from the one that tells them what.

One thread of a process at a time runs Python, and each step of a block gives the turn away and
waits to get it back: on 16 cores, threads took four seconds for what processes do in one. So a
thread only tells processes what belongs where, and hears how far they came (capture/fill.py).

Nothing may move between looking up where memory is and filling it. Every system call that fills
is made under a lock of the process; whoever applies an event holds all of them, and calls off
what the event concerns. They are locks of the kernel, which gives back those of a process that
dies.
"""

import fcntl
import mmap
import os
import pickle
import select
import signal
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.capture.filling import (
    ANSWER,
    CALLED_OFF,
    REGISTERED,
    SIGNALS,
    WANTED,
    Forget,
    Lock,
    Order,
    Outcome,
    serve,
)
from icefloe.capture.plan import Segments
from icefloe.capture.spaces import Space
from icefloe.store.layout import Layout
from icefloe.store.reader import Location

# A request has at most this many pieces: requests wait in the buffer of a socket.
MAX_PIECES = 2000

# While one request is being done, another waits.
_DEPTH = 2


@dataclass(slots=True, eq=False)
class Request:
    """Units to fill, and where their blocks lie; one without a location is zero.

    `pieces` (PIECE_DTYPE) come in the order of the units, `spaces` are those that they name, by
    index. `segments` are of whoever asks.
    """

    units: list[int]
    locations: list[Location | None]
    segments: Segments
    pieces: NDArray[np.void]
    spaces: list[Space]
    slot: int = -1

    def concerns(self, space: Space, start: int, end: int) -> bool:
        """Whether a piece lies among these addresses of a space."""
        if space not in self.spaces:
            return False
        first = self.pieces["address"]
        among = (first < end) & (first + self.pieces["length"] > start)
        return bool((among & (self.pieces["space"] == self.spaces.index(space))).any())


def start_fillers(layout: Layout, count: int) -> "Fillers":
    """Starts that many processes, or as many as a limit allows.

    To be called while there are no other threads.
    """
    fillers = Fillers()
    with suppress(OSError):
        fillers.start(layout, count)
    return fillers


class Fillers:
    """The processes, seen from the one thread that asks them. Another may hold their locks."""

    def __init__(self) -> None:
        """None so far."""
        self._state = mmap.mmap(-1, mmap.PAGESIZE)
        self._locks = -1
        self._fillers: list[_Filler] = []
        self._poll = select.poll()

    def start(self, layout: Layout, count: int) -> None:
        """Adds processes. Raises OSError when a limit is reached."""
        self._locks = os.memfd_create("icefloe-fillers", os.MFD_CLOEXEC)
        most = (len(self._state) - CALLED_OFF) // _DEPTH
        for number in range(min(count, most)):
            filler = _Filler(number, layout, self._state, self._locks)
            self._fillers.append(filler)
            self._poll.register(filler.channel, select.POLLIN)

    @property
    def alive(self) -> bool:
        """Whether any process is left."""
        return any(not filler.lost for filler in self._fillers)

    @property
    def busy(self) -> bool:
        """Whether any request is under way."""
        return any(filler.asked for filler in self._fillers)

    @property
    def ready(self) -> bool:
        """Whether a request would not have to wait long."""
        return any(not filler.lost and len(filler.asked) < _DEPTH for filler in self._fillers)

    def ask(self, request: Request) -> None:
        """Hands a request to the process that has least to do. Only while `ready`."""
        able = [each for each in self._fillers if not each.lost and len(each.asked) < _DEPTH]
        filler = min(able, key=lambda each: len(each.asked))
        request.slot = filler.free_slot()
        self._state[CALLED_OFF + request.slot] = 0
        filler.ask(request)

    def answers(self, seconds: float) -> Iterator[tuple[Request, int, Outcome]]:
        """Waits for answers: requests, how many of their units were filled, and why they ended."""
        for filler in self._fillers:
            if not filler.lost:
                waits = select.POLLOUT if filler.unsent else 0
                self._poll.modify(filler.channel, select.POLLIN | waits)
        ready = dict(self._poll.poll(seconds * 1000))
        for filler in self._fillers:
            event = ready.get(filler.channel.fileno(), 0)
            if event & select.POLLOUT:
                filler.send()
            if event & ~select.POLLOUT:
                yield from filler.answers()
                if filler.lost:
                    self._poll.unregister(filler.channel)

    def register(self) -> None:
        """From here on, what is missing is gone."""
        self._state[REGISTERED] = 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """None of them fills anything meanwhile."""
        if not self._fillers:
            yield
            return
        self._state[WANTED] = 1
        fcntl.lockf(self._locks, fcntl.LOCK_EX, len(self._fillers))
        try:
            yield
        finally:
            self._state[WANTED] = 0
            fcntl.lockf(self._locks, fcntl.LOCK_UN, len(self._fillers))

    def call_off(self, space: Space, start: int, end: int) -> None:
        """Ends requests that concern these addresses. Only while `held`."""
        for filler in self._fillers:
            for request in tuple(filler.asked):  # answers come meanwhile
                if request.concerns(space, start, end):
                    self._state[CALLED_OFF + request.slot] = 1

    def forget(self, space: Space) -> None:
        """Nobody needs the space any more."""
        for filler in self._fillers:
            filler.forget(space)

    def end(self) -> None:
        """Ends all processes: their requests are lost."""
        for filler in self._fillers:
            filler.kill()

    def close(self) -> None:
        """Ends all processes, for those that don't ask any more."""
        while self._fillers:
            self._fillers.pop().close()
        if self._locks >= 0:
            os.close(self._locks)
            self._locks = -1


class _Filler:
    """One process, from outside."""

    def __init__(self, number: int, layout: Layout, state: mmap.mmap, locks: int) -> None:
        self.lost = False
        self.asked: deque[Request] = deque()
        self._slots = range(number * _DEPTH, (number + 1) * _DEPTH)
        self._known: dict[Space, int] = {}
        self._next = 0
        self._unsent: deque[tuple[bytes, int]] = deque()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Whatever is raised in the child must not get any further in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        parent = os.getpid()
        try:
            with theirs:
                self._pid = os.fork()
                if not self._pid:
                    serve(theirs, Lock(locks, number, state), layout, parent)
        except OSError:
            self.channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def free_slot(self) -> int:
        """A place for what may be called off."""
        taken = {request.slot for request in self.asked}
        return next(slot for slot in self._slots if slot not in taken)

    @property
    def unsent(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._unsent)

    def ask(self, request: Request) -> None:
        """Hands over a request. When the process is gone, the answer will say so."""
        self.asked.append(request)
        for space in request.spaces:
            if space not in self._known and not self._introduce(space):
                self.kill()
                return
        pieces = request.pieces.copy()
        numbers = np.array([self._known[space] for space in request.spaces], np.uint32)
        pieces["space"] = numbers[pieces["space"]]
        order = Order(request.slot, request.locations, pieces.tobytes())
        self._unsent.append((pickle.dumps(order, pickle.HIGHEST_PROTOCOL), -1))
        self.send()

    def _introduce(self, space: Space) -> bool:
        """Gives it a descriptor of the space, unless a limit forbids that."""
        try:
            fd = os.dup(space.fd)  # whoever owns this one may close it before there is room
        except OSError:
            return False
        self._known[space], self._next = self._next, self._next + 1
        self._unsent.append((pickle.dumps(self._known[space]), fd))
        return True

    def send(self) -> None:
        """Sends what there is room for: the process may be waiting for a lock of ours."""
        while self._unsent:
            message, fd = self._unsent[0]
            with_it = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
            try:
                self.channel.sendmsg([message], with_it if fd >= 0 else [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self.kill()  # what it doesn't get to know it can't answer
                return
            self._unsent.popleft()
            if fd >= 0:
                os.close(fd)

    def answers(self) -> Iterator[tuple[Request, int, Outcome]]:
        """What it has said, at least once; when it is gone, all that it was asked is lost."""
        said = b""
        with suppress(OSError):
            said = self.channel.recv(ANSWER.size)
        if len(said) == ANSWER.size and self.asked:
            units, outcome = ANSWER.unpack(said)
            yield self.asked.popleft(), units, Outcome(outcome)
            return
        self.lost = True
        while self.asked:
            yield self.asked.popleft(), 0, Outcome.LOST

    def forget(self, space: Space) -> None:
        """Has it close its descriptor of the space, when the time comes."""
        if (number := self._known.pop(space, None)) is not None:
            self._unsent.append((pickle.dumps(Forget(number)), -1))

    def kill(self) -> None:
        """Ends it. What it does can be broken off anywhere."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends it and waits for its end."""
        self.lost = True
        self.kill()
        self.channel.close()
        while self._unsent:
            _, fd = self._unsent.popleft()
            if fd >= 0:
                os.close(fd)
        if self._pid:
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0
