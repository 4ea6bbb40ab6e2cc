"""Real memory of a real process is filled while the process does what processes do."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import pytest
from fake_blocks import (
    BLOCK_PAGES,
    BLOCKS,
    PAGES,
    ZERO,
    ZEROS,
    FakeSource,
    Rows,
    layout,
    segments,
    wanted,
)
from puppet import PAGE, Puppet, digest

from icefloe.capture import uffd
from icefloe.capture.fill import Fault, Fill
from icefloe.capture.fillers import Fillers
from icefloe.capture.plan import Plan
from icefloe.capture.spaces import Space
from icefloe.errors import MissingPack

pytestmark = pytest.mark.skipif(uffd.probe() is not None, reason=f"userfaultfd: {uffd.probe()}")


class Served:
    """A fill at work, with its events read until it is closed."""

    def __init__(self, fill: Fill, spaces: list[Space]) -> None:
        self.fill = fill
        self.watched = spaces

    def pump(self, done: Callable[[], bool], seconds: float = 20.0) -> None:
        """Reads events until `done`."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "it takes too long"
            for space in list(self.watched):
                self.fill.read_events(space, lambda m, s=space: self._take(s, m))  # type: ignore[misc]
            if self.fill.failure is not None:
                raise self.fill.failure
            for space in self.fill.forget_dead():
                self.watched.remove(space)
            time.sleep(0.0005)

    def _take(self, space: Space, message: uffd.Message) -> None:
        if message.event == uffd.PAGEFAULT:
            self.fill.faulted(Fault(space, message.b & -PAGE))
        elif message.event == uffd.FORK:
            self.watched.append(self.fill.fork(space, message.a))
        elif message.event == uffd.REMAP:
            space.move(message.a, message.b, message.c)
        else:
            space.discard(message.a, message.b)

    def ask(self, puppet: Puppet, order: str, *numbers: int) -> list[str]:
        """An order that takes events or faults to be answered."""
        answers: list[list[str]] = []
        thread = threading.Thread(target=lambda: answers.append(puppet.ask(order, *numbers)))
        thread.start()
        self.pump(lambda: not thread.is_alive())
        thread.join()
        return answers[0]


@contextmanager
def served(
    puppets: Mapping[int, Puppet],
    rows: Mapping[int, Rows],
    source: FakeSource,
    *,
    workers: int = 2,
    ahead: bool = True,
    registered: bool = True,
) -> Iterator[Served]:
    """A fill of these processes, started."""
    lazy = {pid: segments(rows[pid]) for pid in puppets}
    plan = Plan(list(puppets), lazy, len(source.blocks) + 1)
    fill = Fill(plan, source, plan.order() if ahead else None, 1 if ahead else workers)
    if ahead:
        fill.fill_by(Fillers(), source.locate)
    spaces = [fill.add_space(task, puppet.fd) for task, puppet in enumerate(puppets.values())]
    if registered:
        fill.in_place()
    fill.start()
    try:
        yield Served(fill, spaces)
    finally:
        source.held.set()
        fill.stop()
        assert source.opened == source.closed


@pytest.mark.parametrize("workers", [1, 4])
def test_everything_is_filled_once(workers: int) -> None:
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), FakeSource(BLOCKS)
        with served({1: puppet}, {1: rows}, source, workers=workers) as at_work:
            at_work.pump(at_work.fill.filled.is_set)
            assert at_work.fill.filled_bytes == sum(pages for _, pages, _, _ in rows) * PAGE
            assert source.loads == {number: 1 for number in range(8)}
            assert at_work.fill.faults == 0
            assert at_work.ask(puppet, "read", 0, PAGES) == wanted(rows, puppet.address)


@pytest.mark.parametrize("workers", [1, 3])
def test_only_touched_memory(workers: int) -> None:
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), FakeSource(BLOCKS)
        with served({1: puppet}, {1: rows}, source, workers=workers, ahead=False) as at_work:
            right = wanted(rows, puppet.address)
            for page in (3, 40, 125, 150, 130, 3, 155):
                assert at_work.ask(puppet, "read", page, 1) == [right[page]]
            assert source.loads == {0: 1, 2: 1, 1: 1, 7: 1}
            touched = {(touch.origin - puppet.address) // PAGE for touch in at_work.fill.touches}
            assert touched == {3, 40, 125, 130, 155}
            assert not at_work.fill.filled.is_set()
            assert at_work.ask(puppet, "read", 0, PAGES) == right


def test_faults_come_first() -> None:
    """With slow blocks, the last page of all is there long before it would be its turn."""
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), FakeSource(BLOCKS, delay=0.15)
        with served({1: puppet}, {1: rows}, source, workers=1) as at_work:
            right = wanted(rows, puppet.address)
            assert at_work.ask(puppet, "read", PAGES - 1, 1) == [right[PAGES - 1]]
            assert not at_work.fill.filled.is_set() and len(source.loads) <= 4
            at_work.pump(at_work.fill.filled.is_set)
            assert set(source.loads.values()) == {1}
            assert at_work.ask(puppet, "read", 0, PAGES) == right


def test_pages_that_are_there_are_kept() -> None:
    with Puppet(PAGES, register=False) as puppet:
        puppet.ask("write", 5, 1)
        puppet.ask("write", 17, 3)
        puppet.ask("register", 0)
        rows, source = layout(puppet.address), FakeSource(BLOCKS)
        with served({1: puppet}, {1: rows}, source) as at_work:
            at_work.pump(at_work.fill.filled.is_set)
            right = wanted(rows, puppet.address)
            for page in (5, 17, 18, 19):
                right[page] = digest(b"\xee" * PAGE)
            assert at_work.ask(puppet, "read", 0, PAGES) == right


def test_memory_that_is_registered_late() -> None:
    with Puppet(PAGES, register=False) as puppet:
        rows, source = layout(puppet.address), FakeSource(BLOCKS)
        with served({1: puppet}, {1: rows}, source, registered=False) as at_work:
            time.sleep(0.1)
            assert not at_work.fill.filled_bytes
            puppet.ask("register", 0)
            at_work.pump(lambda: at_work.fill.filled_bytes > 0)
            at_work.fill.in_place()
            at_work.pump(at_work.fill.filled.is_set)
            assert at_work.ask(puppet, "read", 0, PAGES) == wanted(rows, puppet.address)


@pytest.mark.parametrize("ahead", [True, False])
def test_memory_that_changes_meanwhile(ahead: bool) -> None:
    """Discarded memory reads as zero, moved memory comes along, and a child has all of it."""
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), FakeSource(BLOCKS, delay=0.02)
        with served({1: puppet}, {1: rows}, source, workers=2, ahead=ahead) as at_work:
            right = wanted(rows, puppet.address)
            at_work.ask(puppet, "discard", 70, 3)
            right[70:73] = [ZEROS] * 3
            at_work.ask(puppet, "move", 100, 20)
            assert at_work.ask(puppet, "fork_read", 90, 40) == right[90:130]
            at_work.ask(puppet, "unmap", 60, 2)
            at_work.ask(puppet, "move", 20, 8)
            at_work.ask(puppet, "move", 22, 3)
            at_work.ask(puppet, "discard", 23, 1)
            right[23] = ZEROS
            at_work.ask(puppet, "write", 24, 1)
            right[24] = digest(b"\xee" * PAGE)
            assert at_work.ask(puppet, "fork_read", 0, 60) == right[:60]
            if ahead:
                at_work.pump(at_work.fill.filled.is_set)
            assert at_work.ask(puppet, "read", 0, 60) == right[:60]
            assert at_work.ask(puppet, "read", 62, PAGES - 62) == right[62:]


def test_two_processes_share_blocks() -> None:
    with Puppet(PAGES) as one, Puppet(PAGES) as two:
        rows = {1: layout(one.address), 2: layout(two.address)}
        source = FakeSource(BLOCKS)
        with served({1: one, 2: two}, rows, source) as at_work:
            at_work.pump(at_work.fill.filled.is_set)
            assert set(source.loads.values()) == {1}
            assert at_work.ask(one, "read", 0, PAGES) == wanted(rows[1], one.address)
            assert at_work.ask(two, "read", 0, PAGES) == wanted(rows[2], two.address)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_process_that_ends_meanwhile(ahead: bool) -> None:
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), FakeSource(BLOCKS, delay=0.05)
        with served({1: puppet}, {1: rows}, source, ahead=ahead) as at_work:
            if not ahead:
                at_work.ask(puppet, "read", 0, 1)
            puppet.kill()
            for space in at_work.fill.spaces():
                space.alive = uffd.is_alive(space.fd)
            at_work.pump(lambda: not at_work.fill.spaces())
            assert at_work.fill.failure is None


@pytest.mark.parametrize("ahead", [True, False])
def test_a_block_that_is_missing(ahead: bool) -> None:
    with Puppet(PAGES) as puppet:
        rows = layout(puppet.address)
        source = FakeSource({number: BLOCKS[number] for number in BLOCKS if number != 3})
        with served({1: puppet}, {1: rows}, source, ahead=ahead) as at_work:
            puppet.tell("read", 3 * BLOCK_PAGES, 1)
            with pytest.raises(MissingPack):
                at_work.pump(lambda: False)
            puppet.kill()  # it still waits


def test_order() -> None:
    """Wanted units come first, each once; pieces of long zero runs are units of their own."""
    rows: Rows = [(1 << 20, 4, 2, 0), (1 << 21, 10_000, ZERO, 0), (1 << 30, 4, 0, 0)]
    rows.append(((1 << 30) + 8 * PAGE, 4, 2, 0))
    plan = Plan([5], {5: segments(rows)}, 3)
    assert plan.order().tolist() == [2, 4, 5, 6, 0]
    assert plan.order(np.array([0, 5])).tolist() == [0, 5, 2, 4, 6]
    assert plan.bytes == 10_012 * PAGE and len(plan.rows([2])) == 2
    assert plan.extent(0) == (1 << 20, (1 << 30) + 12 * PAGE)
    assert plan.gap(0, (1 << 30) + 5 * PAGE) == ((1 << 30) + 4 * PAGE, (1 << 30) + 8 * PAGE)
    found = plan.find_units(np.zeros(3, np.uint32), np.array([1 << 30, 5, 1 << 20], np.uint64))
    assert found.tolist() == [0, 2]
