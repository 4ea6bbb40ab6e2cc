"""A process that fills memory: it reads blocks, decodes them and copies them to where they belong.

It does what it is told (capture/fillers.py), and every system call that fills under a lock of its
own, so that nothing is filled while somebody holds the locks of all.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import pickle
import signal
import socket
import struct
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from icefloe.capture import uffd
from icefloe.capture.images import PAGE
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

_MAX_MESSAGE = 256 << 10

# Decoded at once: so much stays in the processor's cache until it is copied.
_RAW_BYTES = 1 << 20

# One system call fills at most this, for events wait for it. Zeros are pages of the kernel.
_COPY_BYTES = 256 << 10
_ZERO_BYTES = 4 << 20

_UNREGISTERED_SECONDS = 0.001
_WAITING_SECONDS = 0.0001

# What all share: whether CRIU has put all memory in its place, whether somebody wants all locks,
# and for each request that can be under way, whether it was called off.
REGISTERED, WANTED, CALLED_OFF = 0, 1, 2

_SET_PDEATHSIG = 1  # <linux/prctl.h>

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

ANSWER = struct.Struct("<IB")


class Outcome(IntEnum):
    """Why a request ended."""

    DONE = 0
    CALLED_OFF = 1
    TROUBLE = 2
    """The next unit can't be filled, or only by somebody who looks closer."""
    LOST = 3
    """The process has died; nobody knows how far it came."""


@dataclass(frozen=True, slots=True)
class Order:
    """A request as it is sent."""

    slot: int
    locations: list[Location | None]
    pieces: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """The descriptor of this space is to be closed."""

    space: int


class _CalledOff(Exception):
    """Nobody wants the rest."""


class _Trouble(Exception):
    """Memory can't be filled."""


class Lock:
    """The lock of a process, and what it must know before it fills anything."""

    def __init__(self, locks: int, number: int, state: mmap.mmap) -> None:
        self.locks = locks
        self._number = number
        self._state = state

    @contextmanager
    def held(self, slot: int) -> Iterator[bool]:
        """Whether all memory was in its place by then. Raises _CalledOff."""
        while self._state[WANTED]:  # a matter of manners: locks know no queue
            time.sleep(_WAITING_SECONDS)
        fcntl.lockf(self.locks, fcntl.LOCK_EX, 1, self._number)
        try:
            if self._state[CALLED_OFF + slot]:
                raise _CalledOff
            yield bool(self._state[REGISTERED])
        finally:
            fcntl.lockf(self.locks, fcntl.LOCK_UN, 1, self._number)


@dataclass(slots=True)
class _Process:
    """The process itself."""

    lock: Lock
    reader: BlockReader
    spaces: dict[int, int] = field(default_factory=dict)

    def fill(self, order: Order) -> tuple[int, Outcome]:
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
            mine = blocks[taken : taken + len(raws)]
            taken += len(raws)
            last = mine[-1] + 1
            found = np.zeros(last - first, np.uint64)
            found[np.array(mine) - first] = list(map(uffd.address_of, raws))
            yield first, last, found
            first = last
        if first < len(locations):
            yield first, len(locations), np.zeros(len(locations) - first, np.uint64)

    def _put_small(self, slot: int, runs: "_Runs", first: int, end: int) -> int:
        """Fills runs of a group, as many as nothing stands in the way of. Raises _CalledOff."""
        if not runs.small[first]:
            return 0
        with self.lock.held(slot):
            return uffd.put_all(self.spaces[int(runs.space[first])], runs.puts[first:end])

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
    puts: list[uffd.Put] = field(init=False)

    def __post_init__(self) -> None:
        self.small = self.length <= _COPY_BYTES
        self.puts = uffd.puts(self.address, self.source, self.length)

    def __getitem__(self, i: int) -> _Run:
        columns = (self.space, self.address, self.length, self.source)
        return _Run(*(int(column[i]) for column in columns))

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


def serve(channel: socket.socket, lock: Lock, layout: Layout, parent: int) -> None:
    """The process. Ends when nobody asks any more, or with who started it: it holds the memory of
    others, and may be waiting for something that nobody will do then."""
    try:
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # whoever asks decides
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
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
        if isinstance(said, Order):
            channel.send(ANSWER.pack(*process.fill(said)))
        elif isinstance(said, Forget):
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
