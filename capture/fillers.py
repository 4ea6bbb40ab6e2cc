"""Processes that fill memory: they read blocks, decode them and copy them to where they belong.

One thread of a process at a time runs Python, and each step of a block gives the turn away and
waits to get it back: on 16 cores, threads took four seconds for what processes do in one. So a
thread only tells processes what belongs where, and hears how far they came (capture/fill.py).

Nothing may move between looking up where memory is and filling it. Every system call that fills
is made under a lock of the process; whoever applies an event holds all of them, and calls off
what the event concerns. They are locks of the kernel, which gives back those of a process that
dies.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from icefloe.capture import uffd
from icefloe.capture.images import PAGE
from icefloe.capture.plan import Segments
from icefloe.capture.spaces import Space
from icefloe.errors import IcefloeError
from icefloe.store.layout import Layout
from icefloe.store.reader import BlockReader, Location

PIECE_DTYPE = np.dtype(
    [
        ("address", "<u8"),
        ("length", "<u8"),
        ("offset", "<u4"),
        ("space", "<u4"),
        ("unit", "<u4"),
        ("pad", "<u4"),
    ]
)
"""Memory to fill: where it is, in which space; the offset in its block; the index of its unit."""

# A request has at most this many pieces: requests wait in the buffer of a socket.
MAX_PIECES = 1000
_MAX_MESSAGE = 256 << 10

# While one request is being done, another waits.
_DEPTH = 2

# Decoded at once: so much stays in the processor's cache until it is copied.
_RAW_BYTES = 1 << 20

# One system call fills at most this, for events wait for it. Zeros are pages of the kernel.
_COPY_BYTES = 256 << 10
_ZERO_BYTES = 4 << 20

_UNREGISTERED_SECONDS = 0.001
_WAITING_SECONDS = 0.0001

# What all share: whether CRIU has put all memory in its place, whether somebody wants all locks,
# and for each request that can be under way, whether it was called off.
_REGISTERED, _WANTED, _CALLED_OFF = 0, 1, 2

_SET_PDEATHSIG = 1  # <linux/prctl.h>

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ANSWER = struct.Struct("<IB")


class Outcome(IntEnum):
    """Why a request ended."""

    DONE = 0
    CALLED_OFF = 1
    TROUBLE = 2
    """The next unit can't be filled, or only by somebody who looks closer."""
    LOST = 3
    """The process has died; nobody knows how far it came."""


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
        most = (len(self._state) - _CALLED_OFF) // _DEPTH
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
        self._state[_CALLED_OFF + request.slot] = 0
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
        self._state[_REGISTERED] = 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """None of them fills anything meanwhile."""
        if not self._fillers:
            yield
            return
        self._state[_WANTED] = 1
        fcntl.lockf(self._locks, fcntl.LOCK_EX, len(self._fillers))
        try:
            yield
        finally:
            self._state[_WANTED] = 0
            fcntl.lockf(self._locks, fcntl.LOCK_UN, len(self._fillers))

    def call_off(self, space: Space, start: int, end: int) -> None:
        """Ends requests that concern these addresses. Only while `held`."""
        for filler in self._fillers:
            for request in tuple(filler.asked):  # answers come meanwhile
                if request.concerns(space, start, end):
                    self._state[_CALLED_OFF + request.slot] = 1

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
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        parent = os.getpid()
        try:
            with theirs:
                self._pid = os.fork()
                if not self._pid:
                    _serve(theirs, _Lock(locks, number, state), layout, parent)
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
        order = _Order(request.slot, request.locations, pieces.tobytes())
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
            said = self.channel.recv(_ANSWER.size)
        if len(said) == _ANSWER.size and self.asked:
            units, outcome = _ANSWER.unpack(said)
            yield self.asked.popleft(), units, Outcome(outcome)
            return
        self.lost = True
        while self.asked:
            yield self.asked.popleft(), 0, Outcome.LOST

    def forget(self, space: Space) -> None:
        """Has it close its descriptor of the space, when the time comes."""
        if (number := self._known.pop(space, None)) is not None:
            self._unsent.append((pickle.dumps(_Forget(number)), -1))

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


# --- in the process -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Order:
    """A request as it is sent."""

    slot: int
    locations: list[Location | None]
    pieces: bytes


@dataclass(frozen=True, slots=True)
class _Forget:
    """The descriptor of this space is to be closed."""

    space: int


class _CalledOff(Exception):
    """Nobody wants the rest."""


class _Trouble(Exception):
    """Memory can't be filled."""


class _Lock:
    """The lock of a process, and what it must know before it fills anything."""

    def __init__(self, locks: int, number: int, state: mmap.mmap) -> None:
        self.locks = locks
        self._number = number
        self._state = state

    @contextmanager
    def held(self, slot: int) -> Iterator[bool]:
        """Whether all memory was in its place by then. Raises _CalledOff."""
        while self._state[_WANTED]:  # a matter of manners: locks know no queue
            time.sleep(_WAITING_SECONDS)
        fcntl.lockf(self.locks, fcntl.LOCK_EX, 1, self._number)
        try:
            if self._state[_CALLED_OFF + slot]:
                raise _CalledOff
            yield bool(self._state[_REGISTERED])
        finally:
            fcntl.lockf(self.locks, fcntl.LOCK_UN, 1, self._number)


@dataclass(slots=True)
class _Process:
    """The process itself."""

    lock: _Lock
    reader: BlockReader
    spaces: dict[int, int] = field(default_factory=dict)

    def fill(self, order: _Order) -> tuple[int, Outcome]:
        """Fills units, one after the other; how many it was, and why it wasn't more."""
        pieces = np.frombuffer(order.pieces, PIECE_DTYPE)
        bounds = np.searchsorted(pieces["unit"], np.arange(len(order.locations) + 1)).tolist()
        done = 0
        try:
            for first, last, sources in self._decoded(order.locations):
                done = first
                part = pieces[bounds[first] : bounds[last]]
                runs = _runs(part, sources[part["unit"] - first])
                for at, end in runs.groups():
                    done = bisect_right(bounds, bounds[first] + int(runs.first[at])) - 1
                    at += self._put_small(order.slot, runs, at, end)
                    for i in range(at, end):
                        done = bisect_right(bounds, bounds[first] + int(runs.first[i])) - 1
                        self._put(order.slot, runs[i])
                done = last
        except _CalledOff:
            return done, Outcome.CALLED_OFF
        except (_Trouble, IcefloeError):
            return done, Outcome.TROUBLE
        return done, Outcome.DONE

    def _decoded(
        self, locations: Sequence[Location | None]
    ) -> Iterator[tuple[int, int, NDArray[np.uint64]]]:
        """Units [first, last), and where in our memory their blocks are, 0 for zero ones."""
        blocks = [i for i, location in enumerate(locations) if location is not None]
        first = taken = 0
        for raws in self.reader.read_batches([at for at in locations if at is not None]):
            sources = [np.frombuffer(raw, np.uint8).__array_interface__["data"][0] for raw in raws]
            mine = blocks[taken : taken + len(raws)]
            taken += len(raws)
            last = mine[-1] + 1
            found = np.zeros(last - first, np.uint64)
            found[np.array(mine) - first] = sources
            yield first, last, found
            first = last
        if first < len(locations):
            yield first, len(locations), np.zeros(len(locations) - first, np.uint64)

    def _put_small(self, slot: int, runs: "_Runs", first: int, end: int) -> int:
        """Copies runs of a group, as many as nothing stands in the way of. Raises _CalledOff."""
        if not runs.small[first]:
            return 0
        with self.lock.held(slot):
            return uffd.copy_all(self.spaces[int(runs.space[first])], runs.arguments(first, end))

    def _put(self, slot: int, run: "_Run") -> None:
        """Fills memory, as far as it is not there. Raises _Trouble, _CalledOff."""
        fd, address, length, source = self.spaces[run.space], run.address, run.length, run.source
        while length:
            with self.lock.held(slot) as registered:
                if source:
                    done, code = uffd.copy(fd, address, source, min(length, _COPY_BYTES))
                else:
                    done, code = uffd.zero(fd, address, min(length, _ZERO_BYTES))
            if code == errno.EEXIST:
                done += PAGE  # somebody was sooner
            elif code == errno.ENOENT and not registered:
                time.sleep(_UNREGISTERED_SECONDS)
            elif code == errno.EAGAIN and not done:
                time.sleep(_WAITING_SECONDS)  # an event waits to be read
            elif code not in (0, errno.EAGAIN):
                raise _Trouble
            address += done
            length -= done
            source += done if source else 0


class _Run(NamedTuple):
    """Pieces that follow one another, in memory and in ours: in which space, and where they are.

    `source` is where in our memory, 0 for zeros.
    """

    space: int
    address: int
    length: int
    source: int


@dataclass(slots=True)
class _Runs:
    """Runs as columns. `first` is the index of the first piece of each."""

    first: NDArray[np.intp]
    space: NDArray[np.uint32]
    address: NDArray[np.uint64]
    length: NDArray[np.uint64]
    source: NDArray[np.uint64]
    small: NDArray[np.bool_] = field(init=False)
    _arguments: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.small = (self.source != 0) & (self.length <= _COPY_BYTES)
        self._arguments = uffd.copy_arguments(self.address, self.source, self.length)

    def __getitem__(self, i: int) -> _Run:
        columns = (self.space, self.address, self.length, self.source)
        return _Run(*(int(column[i]) for column in columns))

    def arguments(self, first: int, end: int) -> bytes:
        """For uffd.copy_all."""
        return self._arguments[first * uffd.COPY_BYTES : end * uffd.COPY_BYTES]

    def groups(self) -> Iterator[tuple[int, int]]:
        """Runs [first, end) for which one lock is enough: small ones in one space, not too many."""
        if not len(self.first):
            return
        parts = np.cumsum(self.length) // _COPY_BYTES
        edges = self.space[1:] != self.space[:-1]
        edges |= (parts[1:] != parts[:-1]) | ~self.small[1:] | ~self.small[:-1]
        bounds = [0, *(np.flatnonzero(edges) + 1).tolist(), len(self.first)]
        yield from pairwise(bounds)


def _runs(pieces: NDArray[np.void], starts: NDArray[np.uint64]) -> _Runs:
    """The runs of these pieces; `starts` is where in our memory the block of each is, or 0."""
    address, length, space = pieces["address"], pieces["length"], pieces["space"]
    source = np.where(starts == 0, np.uint64(0), starts + pieces["offset"])
    joins = np.zeros(len(pieces), np.bool_)
    joins[1:] = (address[1:] == address[:-1] + length[:-1]) & (space[1:] == space[:-1])
    joins[1:] &= source[1:] == np.where(starts[:-1] == 0, np.uint64(0), source[:-1] + length[:-1])
    first = np.flatnonzero(~joins)
    lengths = np.add.reduceat(length, first) if len(first) else length
    return _Runs(first, space[first], address[first], lengths, source[first])


def _serve(channel: socket.socket, lock: _Lock, layout: Layout, parent: int) -> None:
    """The process. Ends when nobody asks any more, or with who started it: it holds the memory of
    others, and may be waiting for something that nobody will do then."""
    try:
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # whoever asks decides
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _close_but(channel.fileno(), lock.locks)
        with BlockReader(layout, raw_bytes=_RAW_BYTES) as reader:
            _answer(channel, _Process(lock, reader))
    finally:
        os._exit(0)


def _answer(channel: socket.socket, process: _Process) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(channel, _MAX_MESSAGE, 1)
        if not message:
            return
        said = pickle.loads(message)
        if isinstance(said, _Order):
            channel.send(_ANSWER.pack(*process.fill(said)))
        elif isinstance(said, _Forget):
            os.close(process.spaces.pop(said.space))
        else:
            (process.spaces[said],) = fds


def _close_but(*kept: int) -> None:
    """Closes every other descriptor."""
    first = 0
    for fd in sorted(kept):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
