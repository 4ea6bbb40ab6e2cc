"""Puts the memory of a checkpoint into the address spaces of a restored process tree.

One thread hands out units (capture/plan.py) in a given order, some at a time, to processes that
fill them (capture/fillers.py); where there are none, it does so itself. A page fault takes its unit
first. Each unit is put into every space that lacks it, and counts once, for whoever claims it.

Between looking up where memory is now and the system call that fills it, nothing may move: a
thread does both under the lock of its own lane, and who applies an event holds all lanes.
"""

import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from icefloe.capture import uffd
from icefloe.capture.blocks import Blocks, BlockSource
from icefloe.capture.fillers import MAX_PIECES, Fillers, Request
from icefloe.capture.filling import PIECE_DTYPE, Outcome
from icefloe.capture.images import PAGE
from icefloe.capture.plan import Plan, Row, Segments
from icefloe.capture.spaces import Space
from icefloe.durable import Buffer
from icefloe.errors import LimitReached
from icefloe.store.manifest import ZERO
from icefloe.store.reader import Location

# A fault on memory that the checkpoint doesn't name gets this many zero pages at once. They all
# map the kernel's one zero page, so they cost nothing but page table entries.
_ZERO_AROUND = 64 * PAGE

# Units that are taken at once, and their bytes. The first are wanted soonest, so they are taken a
# few at a time, and then as much as was taken before, divided by this.
_MOST_UNITS = 256
_FEWEST_BYTES, _MOST_BYTES = 1 << 20, 16 << 20
_TAKEN_BEFORE = 32

# Units that are taken once more, at once: some of them may be in somebody's way.
_AGAIN = 64

# Zero units that a thread puts in before it looks for faults.
_ZEROS = 16

# How often to see whether to stop, should no process say so.
_LOOK_SECONDS = 0.2

# One system call copies at most this: events wait for it, and so do faults.
_COPY_BYTES = 2 << 20

# How long to wait until CRIU has registered memory, and until an event has been read.
_UNREGISTERED_SECONDS = 0.002
_CHANGING_SECONDS = 0.0002

Raws = dict[int, Buffer]
"""The raw bytes of blocks, by their number."""

Locate = Callable[[Sequence[int]], Sequence[Location]]
"""Where the blocks with these numbers lie."""

_NOBODY = (errno.ESRCH, errno.ENOSPC)  # the process is gone; ENOSPC before Linux 4.18


@dataclass(frozen=True, slots=True)
class Fault:
    """A thread of the restored process waits for this page."""

    space: Space
    address: int


class _Stopped(Exception):
    """Nobody wants the rest."""


@dataclass(slots=True, eq=False)
class Lane:
    """What belongs to one thread: its lock, its way to the blocks, its counts."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    filled_bytes: int = 0
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Touch:
    """The first fault on a unit: which process, which address of the checkpoint, when."""

    task: int
    origin: int
    seconds: float


class Fill:
    """The threads that fill. Events come in through `read_events`, faults through `faulted`."""

    def __init__(
        self, plan: Plan, source: BlockSource, order: NDArray[np.int64] | None, servers: int = 1
    ) -> None:
        """`order` is that in which units are filled; None fills only what is touched.

        `servers` threads do nothing but serve faults.
        """
        self._plan = plan
        self._source = source
        self._order = order
        self._next = 0
        self._taken = 0
        self._again: list[int] = []
        self._fillers = Fillers()
        self._spaces: list[tuple[Space, ...]] = [() for _ in plan.tasks]
        self._claimed = np.zeros(plan.units, np.bool_)
        self._claiming = threading.Lock()
        self._left = 0 if order is None else len(order)
        self._faults: queue.SimpleQueue[Fault | None] = queue.SimpleQueue()
        self._lanes: list[Lane] = []
        self._threads: list[threading.Thread] = []
        for _ in range(servers):
            self._add_thread("faults", self._serve_faults)
        self._stopping = threading.Event()
        self.registered = threading.Event()
        self.filled = threading.Event()
        self.filled_at = 0.0
        self.failure: BaseException | None = None
        self.touches: list[Touch] = []
        self._waiting = 0
        self._waiting_since = 0.0
        self.stalled_seconds = 0.0
        self.started_at = 0.0

    @property
    def filled_bytes(self) -> int:
        """Bytes put in so far."""
        return sum(lane.filled_bytes for lane in self._lanes)

    @property
    def faults(self) -> int:
        """Faults answered so far."""
        return sum(lane.faults for lane in self._lanes)

    def spaces(self) -> list[Space]:
        """All spaces that are not known to be gone."""
        return [space for spaces in self._spaces for space in spaces if space.alive]

    def add_space(self, task: int, fd: int) -> Space:
        """The memory of a task, behind its descriptor. Before `start`."""
        count = self._plan.bounds[task + 1] - self._plan.bounds[task]
        space = Space(fd, task, bytearray(count), self._plan.extent(task))
        self._spaces[task] += (space,)
        return space

    def fill_by(self, fillers: Fillers, locate: Locate) -> None:
        """These processes fill; `locate` says where blocks lie. Before `start`; `stop` ends them.

        Without any, a thread does.
        """
        self._fillers = fillers
        self._add_thread("fill", partial(self._dispatch, locate))

    def _add_thread(self, name: str, work: Callable[[Lane], None]) -> None:
        lane = Lane()
        self._lanes.append(lane)
        self._threads.append(threading.Thread(target=self._guarded, args=(work, lane), name=name))

    def start(self) -> None:
        """Starts the threads; CRIU may still be at work."""
        self.started_at = time.monotonic()
        if not self._left and self._order is not None:
            self._finish()
        for thread in self._threads:
            thread.start()

    def in_place(self) -> None:
        """CRIU has put all memory where it belongs: what is not there from now on is gone."""
        self.registered.set()
        self._fillers.register()

    def stop(self) -> None:
        """Ends the threads and processes, whether all is filled or not."""
        self._stopping.set()
        self._fillers.end()
        for _ in self._threads:
            self._faults.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._fillers.close()

    def read_events(self, space: Space, take: Callable[[uffd.Message], None]) -> None:
        """Reads the space's events and hands them to `take` while nothing else is going on."""
        with self._alone():
            for message in uffd.messages(space.fd):
                take(message)
                for start, end in message.concerned():
                    self._fillers.call_off(space, start, end)

    def fork(self, parent: Space, fd: int) -> Space:
        """A child of a space. Only from within `read_events`."""
        child = parent.child(fd)
        self._spaces[parent.task] += (child,)
        return child

    def forget_dead(self) -> list[Space]:
        """Takes out spaces whose process is gone. Nobody uses their descriptors afterwards."""
        dead = [s for spaces in self._spaces for s in spaces if not s.alive]
        if dead:
            with self._alone():
                for task, spaces in enumerate(self._spaces):
                    self._spaces[task] = tuple(s for s in spaces if s not in dead)
                for space in dead:
                    self._fillers.forget(space)
        return dead

    def faulted(self, fault: Fault) -> None:
        """Somebody waits for a page. `stalled_seconds` is how long anybody did."""
        with self._claiming:
            if not self._waiting:
                self._waiting_since = time.monotonic()
            self._waiting += 1
        self._faults.put(fault)

    def touched_among(self, units: NDArray[np.int64]) -> int:
        """How many of these units were faulted on before they were put in."""
        tasks = np.array([touch.task for touch in self.touches], np.uint32)
        addresses = np.array([touch.origin for touch in self.touches], np.uint64)
        return len(np.intersect1d(units, self._plan.find_units(tasks, addresses)))

    def _answered(self) -> None:
        with self._claiming:
            self._waiting -= 1
            if not self._waiting:
                self.stalled_seconds += time.monotonic() - self._waiting_since

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No thread is filling meanwhile."""
        with ExitStack() as stack:
            for lane in self._lanes:
                stack.enter_context(lane.lock)
            stack.enter_context(self._fillers.held())
            yield

    def _guarded(self, work: Callable[[Lane], None], lane: Lane) -> None:
        try:
            work(lane)
        except _Stopped:
            pass
        except BaseException as error:
            self.failure = self.failure or error
            self._stopping.set()

    def _serve_faults(self, lane: Lane) -> None:
        with closing(self._source.open()) as blocks:
            while (fault := self._faults.get()) is not None:
                self._serve(lane, blocks, fault)

    def _dispatch(self, locate: Locate, lane: Lane) -> None:
        fillers = self._fillers
        with closing(self._source.open()) as own:
            while fillers.alive and not self._stopping.is_set():
                while fillers.ready and (units := self._take()):
                    self._ask(locate, units, lane, own)
                if not fillers.busy:
                    return
                for request, count, outcome in fillers.answers(_LOOK_SECONDS):
                    self._settle(request, count, outcome, lane, own)
            self._work(own, lane)  # what is left when no process is

    def _ask(self, locate: Locate, units: list[int], lane: Lane, own: Blocks) -> None:
        """Has these units filled, or as many of them as one request can have."""
        located = iter(locate([unit for unit in units if unit < self._plan.blocks]))
        locations = [next(located) if unit < self._plan.blocks else None for unit in units]
        segments = self._plan.table(units)
        with lane.lock:
            pieces, spaces = self._pieces(segments)
            if len(pieces) <= MAX_PIECES:
                self._fillers.ask(Request(units, locations, segments, pieces, spaces))
                return
        if len(units) == 1:
            self._put_unit(lane, own, units[0])
        else:
            self._put_back(units[len(units) // 2 :])
            self._ask(locate, units[: len(units) // 2], lane, own)

    def _pieces(self, segments: Segments) -> tuple[NDArray[np.void], list[Space]]:
        """What of these is to be filled now, and in which spaces. Under the lane's lock."""
        parts = [np.zeros(0, PIECE_DTYPE)]
        spaces: list[Space] = []
        for task in segments.tasks():
            mine = segments.of(task)
            for space in self._spaces[task]:
                lacking = mine[self._lacks(space, mine)]
                if space.alive and len(lacking.rows):
                    part = _pieces_of(space, lacking)
                    part["space"] = len(spaces)
                    parts.append(part)
                    spaces.append(space)
        pieces = np.concatenate(parts)
        if len(spaces) > 1:  # one alone has them in order
            pieces = pieces[np.argsort(pieces["unit"], kind="stable")]
        return pieces, spaces

    def _there(self, space: Space, segments: Segments) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """What says of the segments of a space whether they were put in; where it says so."""
        at = segments.rows["number"].astype(np.intp) - self._plan.bounds[space.task]
        return np.frombuffer(space.done, np.uint8), at

    def _lacks(self, space: Space, segments: Segments) -> NDArray[np.bool_]:
        """Which of these segments of its task have not been put into a space."""
        there, at = self._there(space, segments)
        lacking: NDArray[np.bool_] = there[at] == 0
        return lacking

    def _settle(
        self, request: Request, count: int, outcome: Outcome, lane: Lane, own: Blocks
    ) -> None:
        """`count` units of a request were filled: notes it, and what becomes of the others."""
        units = request.units
        filled = request.segments[request.segments.unit < count]
        with lane.lock:
            lacking = {units[i] for i in self._note(request, filled)}
        self._put_back([*lacking, *units[count + (outcome is Outcome.TROUBLE) :]])
        finished = self._claim([unit for unit in units[:count] if unit not in lacking])
        lane.filled_bytes += int(self._plan.lengths[finished].sum())
        self._finished(len(finished))
        if outcome is Outcome.TROUBLE and not self._stopping.is_set():
            self._put_unit(lane, own, units[count])

    def _note(self, request: Request, filled: Segments) -> set[int]:
        """These were put into the spaces of the request; the units that another space lacks."""
        lacking: set[int] = set()
        for task in filled.tasks():
            mine = filled.of(task)
            for space in self._spaces[task]:
                if space in request.spaces:
                    there, at = self._there(space, mine)
                    there[at] = 1
                elif space.alive:  # forked meanwhile
                    lacking.update(mine.unit[self._lacks(space, mine)].tolist())
        return lacking

    def _put_back(self, units: Sequence[int]) -> None:
        """Somebody shall take these again."""
        with self._claiming:
            self._again += units

    def _put_unit(self, lane: Lane, own: Blocks, unit: int) -> None:
        """Puts one unit in without anybody's help."""
        if self._claim([unit]):
            self._put_rows(lane, self._plan.rows([unit]), self._raws(own, unit))
            self._finished(1)

    def _raws(self, blocks: Blocks, unit: int) -> Raws:
        """The block of a unit, if it has one."""
        return dict(next(blocks.fetch([unit]))) if unit < self._plan.blocks else {}

    def _work(self, ahead: Blocks, lane: Lane) -> None:
        with closing(self._source.open()) as urgent:
            for batch in ahead.fetch_any(self._take_blocks(lane, urgent)):
                raws = dict(batch)
                self._put_units(lane, urgent, list(raws), raws)

    def _take_blocks(self, lane: Lane, urgent: Blocks) -> Iterator[int]:
        """The blocks to fetch; what is zero is put in on the way."""
        while (units := self._take()) and not self._stopping.is_set():
            zero = [unit for unit in units if unit >= self._plan.blocks]
            for first in range(0, len(zero), _ZEROS):
                self._put_units(lane, urgent, zero[first : first + _ZEROS], {})
            yield from (unit for unit in units if unit < self._plan.blocks)

    def _put_units(self, lane: Lane, urgent: Blocks, units: list[int], raws: Raws) -> None:
        """Those of these units that nobody has claimed; whoever waits for memory comes first."""
        while not self._faults.empty() and not self._stopping.is_set():
            self._serve_next(lane, urgent)
        if not self._stopping.is_set() and (claimed := self._claim(units)):
            self._put_rows(lane, self._plan.rows(claimed), raws)
            self._finished(len(claimed))

    def _take(self) -> list[int]:
        """The next units that nobody has claimed."""
        assert self._order is not None
        with self._claiming:
            while self._again or self._next < len(self._order):
                if self._again:
                    units = np.array(self._again[:_AGAIN])
                    self._again = self._again[_AGAIN:]
                else:
                    units = self._next_units(self._order)
                if len(units := units[~self._claimed[units]]):
                    found: list[int] = units.tolist()
                    return found
        return []

    def _next_units(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        units = order[self._next : self._next + _MOST_UNITS]
        total = np.cumsum(self._plan.costs[units])
        most = min(max(self._taken // _TAKEN_BEFORE, _FEWEST_BYTES), _MOST_BYTES)
        units = units[: max(int(np.searchsorted(total, most, side="right")), 1)]
        self._next += len(units)
        self._taken += int(total[len(units) - 1])
        return units

    def _claim(self, units: list[int]) -> list[int]:
        """Those of these units that nobody else has claimed; whoever claims one puts it in."""
        with self._claiming:
            mine = [unit for unit in units if not self._claimed[unit]]
            self._claimed[mine] = True
            return mine

    def _finished(self, units: int) -> None:
        with self._claiming:
            self._left -= units
            if units and not self._left:
                self._finish()

    def _finish(self) -> None:
        self.filled_at = time.monotonic()
        self.filled.set()

    def _serve_next(self, lane: Lane, blocks: Blocks) -> None:
        try:
            fault = self._faults.get_nowait()
        except queue.Empty:
            return
        if fault is None:
            self._faults.put(None)  # meant for a thread that does nothing else
            return
        self._serve(lane, blocks, fault)

    def _serve(self, lane: Lane, blocks: Blocks, fault: Fault) -> None:
        """Puts in the page that a thread waits for, and then the rest of its unit."""
        space, number = fault.space, None
        with lane.lock:
            if space.alive and (origin := space.origin(fault.address)) is not None:
                number = self._plan.find(space.task, origin)
            if number is None or space.done[number - self._plan.bounds[space.task]]:
                self._put_zeros(space, fault.address, number is None)
        lane.faults += 1
        if number is not None and origin is not None:
            if self.registered.is_set():
                self._put_touched(lane, blocks, space, number, origin)
            else:
                self._put_page(lane, blocks, space, number, origin)
        self._answered()

    def _put_page(self, lane: Lane, blocks: Blocks, space: Space, number: int, origin: int) -> None:
        """One page alone: CRIU may be waiting for it, while units wait for CRIU."""
        (row,) = self._plan.row(number)
        vaddr, _, offset, _, _, block = row
        if block == ZERO:
            self._put(lane, space, origin, origin + PAGE, 0)
            return
        source = uffd.address_of(self._raws(blocks, block)[block]) + offset + origin - vaddr
        self._put(lane, space, origin, origin + PAGE, source)

    def _put_touched(
        self, lane: Lane, blocks: Blocks, space: Space, number: int, origin: int
    ) -> None:
        """Who has claimed the unit already is about to put it in, which wakes the thread."""
        plan, unit = self._plan, self._plan.unit(number)
        ahead = self._order is not None
        claim = unit if ahead else plan.blocks + number
        if not self._claim([claim]):
            return
        self.touches.append(Touch(space.task, origin, time.monotonic() - self.started_at))
        raws = self._raws(blocks, unit)
        rows = plan.rows([unit]) if ahead else plan.row(number)
        for vaddr, length, offset, task, _, block in rows:
            if task == space.task and vaddr <= origin < vaddr + length and block != ZERO:
                source = uffd.address_of(raws[block]) + offset + origin - vaddr
                self._put(lane, space, origin, origin + PAGE, source)
        self._put_rows(lane, rows, raws)
        if ahead:
            self._finished(1)

    def _put_rows(self, lane: Lane, rows: Sequence[Row], raws: Raws) -> None:
        """Copies segments to every space that lacks them."""
        for task, numbers, vaddr, end, source in _runs(rows, raws):
            first = self._plan.bounds[task]
            run = slice(numbers.start - first, numbers.stop - first)
            # A space that was forked meanwhile shows up when the others are done.
            while lacking := [s for s in self._spaces[task] if s.alive and not all(s.done[run])]:
                for space in lacking:
                    self._put(lane, space, vaddr, end, source)
                    space.done[run] = bytes([1]) * len(numbers)
            lane.filled_bytes += end - vaddr

    def _put_zeros(self, space: Space, address: int, unnamed: bool) -> None:
        """Memory that the checkpoint doesn't name is zero, and so is what was discarded.

        More of it will be touched soon, so what is around it is made zero too. Otherwise the page
        is there by now, and whoever waits is told. Under the lock of a lane.
        """
        code = uffd.zero(space.fd, address, PAGE)[1] if unnamed and space.alive else errno.EEXIST
        if code in _NOBODY:
            space.alive = False
        elif code:  # it is there, or about to move: let it fault again
            uffd.wake(space.fd, address, PAGE) if space.alive else None
        else:
            low, high = self._hole(space, address)
            start = max(address - address % _ZERO_AROUND, low)
            end = min(start + _ZERO_AROUND, high)
            for first, last in ((start, address), (address + PAGE, end)):
                if first < last:
                    uffd.zero(space.fd, first, last - first)

    def _hole(self, space: Space, address: int) -> tuple[int, int]:
        """The addresses around this one at which nothing of the checkpoint is, or will be."""
        low, high, origin = space.surroundings(address)
        if origin is None:
            return low, high
        first, last = self._plan.gap(space.task, origin)
        return max(low, first - origin + address), min(high, last - origin + address)

    def _put(self, lane: Lane, space: Space, origin: int, end: int, source: int) -> None:
        """Fills [origin, end) from our memory at `source` (0: with zeros), as far as it's there."""
        limit, missed = end - origin, -1
        while origin < end:
            if self._stopping.is_set():
                raise _Stopped
            # Asked before: what was missing at the call may be there a moment later.
            registered = self.registered.is_set()
            with lane.lock:
                found = space.where(origin, end) if space.alive else None
                if found is None:
                    return
                first, address, length = found
                length = min(length, limit)
                if source:
                    done, code = uffd.copy(space.fd, address, source + first - origin, length)
                else:
                    done, code = uffd.zero(space.fd, address, length)
            moved = first - origin + done
            if code == errno.EEXIST:
                moved += PAGE  # that page is there already
            elif code == errno.ENOENT and not registered:
                # CRIU hasn't put the memory in its place yet.
                self.registered.wait(_UNREGISTERED_SECONDS)
            elif code == errno.ENOENT and length > PAGE:
                limit = max(PAGE, length // 2 // PAGE * PAGE)  # two areas, or partly unmapped
            elif code == errno.ENOENT and missed != address:
                # It may be moving at this moment. Asked again, the kernel says EAGAIN until the
                # event has been read, and then we know where to.
                missed = address
            elif code == errno.ENOENT:
                moved += PAGE  # unmapped; the event is on its way
            elif code == errno.EAGAIN and not done:
                time.sleep(_CHANGING_SECONDS)  # an event waits to be read
            elif code in _NOBODY:
                space.alive = False
            elif code not in (0, errno.EAGAIN):
                raise LimitReached(
                    f"the restored process can't get its memory ({os.strerror(code)})",
                    "give it more memory (see its cgroup), or restore it on a larger machine",
                )
            else:
                limit = max(limit, end - origin)
            origin += moved
            source += moved if source else 0


def _pieces_of(space: Space, segments: Segments) -> NDArray[np.void]:
    """Where these are in a space by now, as far as they are still there (PIECE_DTYPE)."""
    rows = segments.rows
    if space.ranges is None:
        pieces = np.zeros(len(rows), PIECE_DTYPE)
        pieces["address"], pieces["unit"] = rows["vaddr"], segments.unit
        pieces["length"], pieces["offset"] = rows["length"], rows["offset"]
        return pieces
    found: list[tuple[int, int, int, int, int, int]] = []
    for (vaddr, length, offset, *_), unit in zip(
        rows.tolist(), segments.unit.tolist(), strict=True
    ):
        origin, end = vaddr, vaddr + length
        while origin < end and (there := space.where(origin, end)) is not None:
            first, address, size = there
            found.append((address, size, offset + first - vaddr, 0, unit, 0))
            origin = first + size
    return np.array(found, PIECE_DTYPE)


def _runs(rows: Sequence[Row], raws: Raws) -> Iterator[tuple[int, range, int, int, int]]:
    """What one system call puts in: task, numbers of segments, vaddr, end, source.

    The source is an address in our memory, 0 for zeros. Segments are by task and address.
    """
    task, numbers, vaddr, end, source = 0, range(0), 0, 0, 0
    for start, length, offset, owner, number, block in rows:
        at = 0 if block == ZERO else uffd.address_of(raws[block]) + offset
        if (
            len(numbers)
            and number == numbers.stop
            and owner == task
            and start == end
            and source
            and at == source + end - vaddr
            and start + length - vaddr <= _COPY_BYTES
        ):
            numbers, end = range(numbers.start, number + 1), start + length
            continue
        if len(numbers):
            yield task, numbers, vaddr, end, source
        task, numbers = owner, range(number, number + 1)
        vaddr, end, source = start, start + length, at
    if len(numbers):
        yield task, numbers, vaddr, end, source
