"""Processes that fill are killed, stopped, held and fed with damage; memory is right all the same.

They fill real memory of real processes, which fork, move, discard and write meanwhile. Fillers are
known by their pids. Where one of them has to be slow, or to wait at a certain place, that is made
so before it is forked.
"""

import ctypes
import errno
import mmap
import os
import pickle
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import made_checkpoints as made
import numpy as np
import pytest
import small_store
from fake_blocks import (
    BLOCK_PAGES,
    BLOCKS,
    PAGES,
    ZERO,
    ZEROS,
    PackedSource,
    Rows,
    Served,
    layout,
    noise,
    segments,
    served,
    slow_reader,
    wanted,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from processes import adopting_orphans, wait_until
from puppet import PAGE, Puppet, digest
from restores import state_of

from icefloe.capture import blocks, filling, restore, uffd
from icefloe.capture import fill as filler_user
from icefloe.capture.blocks import StoreSource
from icefloe.capture.criu import Criu
from icefloe.capture.directory import files_for_criu
from icefloe.capture.fill import Fault, Fill
from icefloe.capture.fillers import MAX_PIECES, Fillers, Request, start_fillers
from icefloe.capture.filling import PIECE_DTYPE, Outcome
from icefloe.capture.guard import Guard
from icefloe.capture.memory import load_memories
from icefloe.capture.plan import Plan
from icefloe.capture.spaces import Space
from icefloe.capture.stored import StoredImage
from icefloe.capture.uffd import Message
from icefloe.capture.waking import Waking
from icefloe.catalog import LocalStore, open_store
from icefloe.durable import Buffer
from icefloe.errors import CorruptBlock, CriuFailed, MissingPack
from icefloe.ids import BlockId, PackId
from icefloe.store.codecs import Codec
from icefloe.store.reader import BlockReader, Location
from icefloe.store.trace import EMPTY

pytestmark = [
    pytest.mark.skipif(uffd.probe() is not None, reason=f"userfaultfd: {uffd.probe()}"),
    pytest.mark.usefixtures("nothing_left"),
]

PATIENCE = 20.0
# After this long, what should take no time is taken to hang.
HANGS = 4.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WRITTEN = digest(b"\xee" * PAGE)

# --- processes ----------------------------------------------------------------------------------


def children(pid: int | str = "self") -> list[int]:
    """The children of a process, dead ones included, in the order of their birth."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name)):
        with suppress(FileNotFoundError):  # a thread may end meanwhile
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """What is open in a process. Not the catalog's files, which it opens as it likes."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if "/catalog/" not in target:
                found[int(name)] = target
    return found


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them, though there is little memory."""
    monkeypatch.setattr(filler_user, "_FEWEST_BYTES", 64 << 10)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process, no zombie, no descriptor."""
    born, before = children(), descriptors()
    yield
    assert children() == born
    assert descriptors().items() <= before.items()  # what other tests forgot may go meanwhile


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal, and waits for what it does."""
    states = {signal.SIGKILL: "Z", signal.SIGSTOP: "T"}
    for pid in pids:
        os.kill(pid, number)
        if (state := states.get(number)) is not None:
            wait_until(lambda pid=pid: state_of(pid) == state, PATIENCE, f"state {state}")  # type: ignore[misc]


@contextmanager
def started(source: PackedSource, count: int) -> Iterator[tuple[Fillers, list[int]]]:
    """Fillers and their pids."""
    born = children()
    fillers = start_fillers(source.layout, count)
    try:
        yield fillers, [pid for pid in children() if pid not in born]
    finally:
        fillers.close()


def ends(work: Callable[[], object], otherwise: Callable[[], object]) -> bool:
    """Whether some work in a thread of its own comes to its end; `otherwise` sets it free."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(HANGS)
    if not (ended := not thread.is_alive()):
        otherwise()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    return ended


class Gate:
    """Where processes wait that are forked later. They have no descriptor of ours."""

    def __init__(self, after: int = 0, open_: bool = False) -> None:
        """Shuts after so many have passed."""
        self._us = os.getpid()
        self._state = mmap.mmap(-1, mmap.PAGESIZE)
        self._after = after
        self._state[0] = int(open_)

    def pass_(self) -> None:
        """In a process. We ourselves always pass."""
        if os.getpid() == self._us:
            return
        self._after -= 1
        if self._after >= 0:
            return
        while not self._state[0]:
            self._state[1] = 1
            time.sleep(0.0005)

    def open(self) -> None:
        """Lets all pass."""
        self._state[0] = 1

    def wait(self) -> None:
        """Until somebody is there."""
        wait_until(lambda: self._state[1] == 1, PATIENCE, "a process at the gate")


@contextmanager
def gated_reader(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> Iterator[Gate]:
    """Processes forked from here on wait before they decode, without their lock."""
    gate, read_batches = Gate(after), BlockReader.read_batches

    def guarded(self: BlockReader, locations: Sequence[Location]) -> Iterator[list[Buffer]]:
        gate.pass_()
        yield from read_batches(self, locations)

    monkeypatch.setattr(BlockReader, "read_batches", guarded)
    try:
        yield gate
    finally:
        gate.open()


@contextmanager
def gated_copy(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> Iterator[Gate]:
    """Processes forked from here on wait when they have filled something, with their lock."""
    gate = Gate(after)

    def guarded(copy: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*arguments: Any) -> Any:
            result = copy(*arguments)
            gate.pass_()
            return result

        return passing

    for name in ("copy", "put_all"):
        monkeypatch.setattr(uffd, name, guarded(getattr(uffd, name)))
    try:
        yield gate
    finally:
        gate.open()


# --- blocks of all kinds ------------------------------------------------------------------------


def content(number: int) -> bytes:
    """A block of 4 to 48 pages; noise, text, or numbers as models have them."""
    length = (4, 16, 48)[number // 3 % 3] * PAGE
    if number % 3 == 0:
        return noise(length // PAGE, 100 + number)
    if number % 3 == 1:
        return small_store.text(length, number)
    return np.random.default_rng(number).normal(0, 0.02, length // 4).astype("<f4").tobytes()


MANY = {number: content(number) for number in range(60)}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> PackedSource:
    """Of several codecs, in more packs than a reader keeps open."""
    folder = tmp_path_factory.mktemp("many") / "store"
    source = PackedSource(folder, MANY, ("balanced", "fast", "balanced", "small"), per_pack=5)
    codecs = {at.codec for at in source.located.values()}
    assert codecs >= {Codec.RAW, Codec.LZ4, Codec.ZSTD, Codec.PLANES4_ZSTD}
    return source


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PackedSource:
    """The blocks of `layout`."""
    return PackedSource(tmp_path_factory.mktemp("plain") / "store", BLOCKS)


def mixed(start: int, seed: int, pages: int, blocks: Sequence[int]) -> Rows:
    """Pieces of blocks in any order, zeros, and holes, up to an address."""
    chance = random.Random(seed)
    rows: Rows = []
    page = 0
    while page < pages:
        kind, left = chance.random(), pages - page
        if kind < 0.1:
            page += chance.randint(1, 6)
            continue
        if kind < 0.3:
            count = min(left, chance.choice([1, 3, 30]))
            rows.append((start + page * PAGE, count, ZERO, 0))
        else:
            block = chance.choice(blocks)
            size = len(MANY[block]) // PAGE
            offset = chance.choice([0, 0, chance.randrange(size)])
            count = min(left, size - offset if chance.random() < 0.6 else 1)
            rows.append((start + page * PAGE, count, block, offset))
        page += count
    return rows


def compare(at_work: Served, puppet: Puppet, right: Sequence[str], what: str = "read") -> None:
    """All memory of a process. pytest's own diff of so many lines would take long."""
    found = at_work.ask(puppet, what, 0, len(right))
    wrong = [page for page, it in enumerate(found) if it != right[page]]
    assert not wrong, f"{len(wrong)} pages are wrong, from {wrong[0]} on"


# --- all memory is as the checkpoint says -------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_memory_of_several_processes(many: PackedSource, workers: int, seed: int) -> None:
    """Blocks are used by many segments, and by several tasks. We ourselves read none."""
    total = 900
    with ExitStack() as stack:
        puppets = {pid: stack.enter_context(Puppet(total)) for pid in (7, 8, 9)}
        rows = {
            pid: mixed(puppet.address, seed * 10 + pid % 8, total, list(MANY))
            for pid, puppet in puppets.items()
        }
        before = len(many.fetched)
        at_work = stack.enter_context(served(puppets, rows, many, workers=workers))
        at_work.finish()
        filled_at = at_work.fill.filled_at
        assert len(many.fetched) == before
        assert not at_work.fill.faults and not at_work.fill.touches
        for pid, puppet in puppets.items():
            compare(at_work, puppet, wanted(rows[pid], puppet.address, total, MANY))
        assert at_work.fill.filled_at == filled_at


def test_a_task_without_memory(plain: PackedSource) -> None:
    with Puppet(PAGES) as one, Puppet(PAGES) as two:
        rows: dict[int, Rows] = {1: [], 2: layout(two.address)}
        with served({1: one, 2: two}, rows, plain) as at_work:
            at_work.finish()
            compare(at_work, one, [ZEROS] * PAGES)
            compare(at_work, two, wanted(rows[2], two.address))


def test_nothing_to_fill(plain: PackedSource) -> None:
    with Puppet(PAGES) as puppet, served({1: puppet}, {1: []}, plain) as at_work:
        at_work.finish()
        compare(at_work, puppet, [ZEROS] * PAGES)


def test_only_zeros(plain: PackedSource) -> None:
    """Long ones are cut in pieces; many short ones make a request of zeros alone."""
    total = 30_000
    with Puppet(total) as puppet:
        rows: Rows = [(puppet.address, 20_000, ZERO, 0)]
        rows += [(puppet.address + (20_000 + 2 * i) * PAGE, 1, ZERO, 0) for i in range(1500)]
        with served({1: puppet}, {1: rows}, plain) as at_work:
            at_work.finish()
            assert not at_work.fill.faults
            for page in (0, 19_999, 20_000, 22_998):
                assert at_work.ask(puppet, "read", page, 1) == [ZEROS]


def crowded(start: int, block: int, count: int) -> Rows:
    """`count` segments of one page of a block, none of which joins the next."""
    return [(start + i * PAGE, 1, block, (i * 7) % BLOCK_PAGES) for i in range(count)]


@pytest.mark.parametrize("count", [MAX_PIECES - 1, MAX_PIECES, MAX_PIECES + 1, 2 * MAX_PIECES])
def test_a_unit_of_many_pieces(plain: PackedSource, count: int) -> None:
    """No request has more pieces than fit. Such a unit is put in by the thread."""
    total = count + 7 * BLOCK_PAGES
    with Puppet(total) as puppet:
        rows = crowded(puppet.address, 0, count)
        tail = puppet.address + count * PAGE
        rows += [(tail + i * BLOCK_PAGES * PAGE, BLOCK_PAGES, i + 1, 0) for i in range(7)]
        before = len(plain.fetched)
        with served({1: puppet}, {1: rows}, plain) as at_work:
            at_work.finish()
            assert plain.fetched[before:] == [0] * (count > MAX_PIECES)
            compare(at_work, puppet, wanted(rows, puppet.address, total))


def test_units_of_many_pieces_together(plain: PackedSource) -> None:
    """Requests are halved until they fit."""
    count = 400
    total = 8 * count
    with Puppet(total) as puppet:
        rows = [
            row
            for block in range(8)
            for row in crowded(puppet.address + block * count * PAGE, block, count)
        ]
        before = len(plain.fetched)
        with served({1: puppet}, {1: rows}, plain) as at_work:
            at_work.finish()
            assert len(plain.fetched) == before
            compare(at_work, puppet, wanted(rows, puppet.address, total))


@pytest.mark.parametrize(
    "there",
    [[0], [PAGES - 1], [15, 16], list(range(16, 32)), [3, 5, 7, 120, 121, 135], list(range(PAGES))],
    ids=str,
)
def test_pages_that_are_there(plain: PackedSource, there: list[int]) -> None:
    """At the edges, in the middle, whole units, zeros, everything: they are kept."""
    with Puppet(PAGES, register=False) as puppet:
        for page in there:
            puppet.ask("write", page, 1)
        puppet.ask("register", 0)
        rows = layout(puppet.address)
        with served({1: puppet}, {1: rows}, plain) as at_work:
            at_work.finish()
            right = wanted(rows, puppet.address)
            for page in there:
                right[page] = WRITTEN
            compare(at_work, puppet, right)


def test_memory_that_consists_of_many_areas(many: PackedSource) -> None:
    """One system call fills no more than one of them; pieces across a border are the thread's."""
    total = 400
    with Puppet(total) as puppet:
        for page in range(3, total - 9, 13):
            puppet.ask("split", page, 5)
        rows = mixed(puppet.address, 5, total, list(MANY))
        with served({1: puppet}, {1: rows}, many) as at_work:
            at_work.finish()
            compare(at_work, puppet, wanted(rows, puppet.address, total, MANY))


def test_memory_that_is_registered_late(many: PackedSource) -> None:
    """Processes wait for it, for each page of it, until all is in its place."""
    total = 300
    with Puppet(total, register=False) as one, Puppet(total) as two:
        rows = {
            pid: mixed(p.address, pid, total, list(MANY)) for pid, p in {1: one, 2: two}.items()
        }
        with served({1: one, 2: two}, rows, many, registered=False) as at_work:
            at_work.pump(lambda: at_work.fillers.busy)
            assert not at_work.fill.filled.wait(0.05)
            one.ask("register", 0)
            at_work.fill.in_place()
            at_work.finish()
            for pid, puppet in {1: one, 2: two}.items():
                compare(at_work, puppet, wanted(rows[pid], puppet.address, total, MANY))


def test_faults_come_first(plain: PackedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are stuck in their first requests; what is touched is there all the same."""
    with Puppet(PAGES) as puppet, gated_reader(monkeypatch) as gate:
        rows = layout(puppet.address)
        right = wanted(rows, puppet.address)
        with served({1: puppet}, {1: rows}, plain) as at_work:
            gate.wait()
            for page in (PAGES - 1, 0, 40, 120, 140):
                assert at_work.ask(puppet, "read", page, 1) == [right[page]]
            touched = {(touch.origin - puppet.address) // PAGE for touch in at_work.fill.touches}
            assert touched == {PAGES - 1, 0, 40, 120, 140}
            gate.open()
            at_work.finish()
            compare(at_work, puppet, right)


def test_everything_is_touched_before_its_turn(
    plain: PackedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What processes fill later counts no more."""
    finished: list[float] = []
    finish = Fill._finish

    def counted(self: Fill) -> None:
        finish(self)
        finished.append(self.filled_at)

    monkeypatch.setattr(Fill, "_finish", counted)
    with Puppet(PAGES) as puppet, gated_reader(monkeypatch) as gate:
        rows = layout(puppet.address)
        with served({1: puppet}, {1: rows}, plain) as at_work:
            gate.wait()
            compare(at_work, puppet, wanted(rows, puppet.address))
            at_work.finish()
            assert len(at_work.fill.touches) == 9 and at_work.fillers.busy
            gate.open()
            at_work.pump(lambda: not at_work.fillers.busy)
            assert at_work.fill.filled_bytes == at_work.plan.bytes
        assert at_work.fill.filled_bytes == at_work.plan.bytes
        assert finished == [at_work.fill.filled_at]


# --- processes that do what processes do --------------------------------------------------------


class Model:
    """What a puppet's memory has to be, page by page; None where it has been unmapped.

    Pages of one number in `region` are neighbours.
    """

    def __init__(self, right: Sequence[str]) -> None:
        self.right: list[str | None] = list(right)
        self.region = [0] * len(right)
        self._regions = 0

    def copy(self) -> "Model":
        """A child has the same."""
        child = Model([])
        child.right, child.region = list(self.right), list(self.region)
        child._regions = self._regions
        return child

    def run(self, page: int, most: int) -> int:
        """How many pages from this one on are neighbours, and mapped."""
        count = 0
        while (
            count < most
            and page + count < len(self.right)
            and self.right[page + count] is not None
            and self.region[page + count] == self.region[page]
        ):
            count += 1
        return count

    def apply(self, order: str, page: int, count: int) -> None:
        """What an order does."""
        span = range(page, page + count)
        if order == "move":
            self._regions += 1
        for each in span:
            if order == "move":
                self.region[each] = self._regions
            elif order != "read" and order != "fork_read":
                self.right[each] = {"write": WRITTEN, "discard": ZEROS, "unmap": None}[order]


ORDERS = ["write", "discard", "discard", "unmap", "move", "move", "read", "fork_read"]


def act(
    at_work: Served, puppet: Puppet, model: Model, chance: random.Random, child: int | None = None
) -> None:
    """Some order, and whether its answer is right."""
    page = chance.randrange(len(model.right))
    order = chance.choice(ORDERS)
    count = model.run(page, chance.choice([1, 2, 5, 40]))
    if not count:
        return
    prefix, numbers = ("", [page, count]) if child is None else ("child_", [child, page, count])
    found = at_work.ask(puppet, prefix + order, *numbers)
    if order in ("read", "fork_read"):
        wrong = [i for i in range(count) if found[i] != model.right[page + i]]
        assert not wrong, f"{order} {page} {count}: {wrong} are wrong"
    model.apply(order, page, count)


def compare_model(at_work: Served, puppet: Puppet, model: Model, child: int | None = None) -> None:
    """All that is mapped."""
    page = 0
    while page < len(model.right):
        if count := model.run(page, len(model.right)):
            prefix, numbers = ("", [page]) if child is None else ("child_", [child, page])
            found = at_work.ask(puppet, f"{prefix}read", *numbers, count)
            wrong = [page + i for i in range(count) if found[i] != model.right[page + i]]
            assert not wrong, f"pages {wrong} are wrong"
        page += max(count, 1)


@pytest.mark.parametrize("seed", range(8))
def test_anything_at_any_time(
    many: PackedSource, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two processes and children of theirs do this and that while slow fillers are at work.

    Every other time, fillers are killed on the way.
    """
    chance, total, operations = random.Random(seed), 500, 50
    slow_reader(monkeypatch, 0.004)
    born = children()
    with ExitStack() as stack:
        puppets = {pid: stack.enter_context(Puppet(total)) for pid in (1, 2)}
        rows = {pid: mixed(p.address, seed + pid, total, list(MANY)) for pid, p in puppets.items()}
        models = {
            pid: Model(wanted(rows[pid], p.address, total, MANY)) for pid, p in puppets.items()
        }
        forked: list[tuple[int, int, Model]] = []
        at_work = stack.enter_context(served(puppets, rows, many, workers=3))
        pids = [pid for pid in children() if pid not in born][2:]
        assert len(pids) == 3
        for i in range(operations):
            pid = chance.choice([1, 2])
            if forked and chance.random() < 0.3:
                pid, child, model = chance.choice(forked)
                act(at_work, puppets[pid], model, chance, child)
            elif len(forked) < 4 and chance.random() < 0.1:
                child = at_work.ask(puppets[pid], "fork")
                forked.append((pid, child, models[pid].copy()))
            else:
                act(at_work, puppets[pid], models[pid], chance)
            if seed % 2 and i % 15 == 7:
                send([pids.pop()], signal.SIGKILL)
        at_work.finish()
        for pid, puppet in puppets.items():
            compare_model(at_work, puppet, models[pid])
        for pid, child, model in forked:
            compare_model(at_work, puppets[pid], model, child)


GATES = pytest.mark.parametrize("gated", [gated_reader, gated_copy], ids=["decode", "ioctl"])
Gated = Callable[[pytest.MonkeyPatch, int], Any]


@pytest.mark.parametrize("order", ["discard", "move", "unmap", "write", "fork_read"])
def test_what_changes_under_a_request(
    plain: PackedSource, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """A process has decoded, or is about to: it knows addresses that don't hold any more."""
    with Puppet(PAGES) as puppet, gated_reader(monkeypatch) as gate:
        rows = layout(puppet.address)
        model = Model(wanted(rows, puppet.address))
        with served({1: puppet}, {1: rows}, plain, workers=1) as at_work:
            gate.wait()
            for page, count in ((0, 5), (10, 20), (60, 4), (115, 8), (130, 30)):
                at_work.ask(puppet, order, page, count)
                model.apply(order, page, count)
            gate.open()
            at_work.finish()
            compare_model(at_work, puppet, model)
            assert at_work.fill.failure is None


def test_something_else_is_mapped_at_an_old_address(
    plain: PackedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 0 is asked for at addresses at which, when it is decoded, block 2 lies."""
    with Puppet(PAGES) as puppet, gated_reader(monkeypatch) as gate:
        rows = layout(puppet.address)
        model = Model(wanted(rows, puppet.address))
        with served({1: puppet}, {1: rows}, plain, workers=1) as at_work:
            gate.wait()
            at_work.ask(puppet, "move", 0, 16)
            model.apply("move", 0, 16)
            # The kernel hands out the highest hole that is large enough: try until it is this.
            for page in (32, 48, 64, 80):
                at_work.ask(puppet, "move", page, 16)
                model.apply("move", page, 16)
            gate.open()
            at_work.finish()
            compare_model(at_work, puppet, model)


def test_an_order_while_a_process_fills(
    plain: PackedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever applies an event waits for it; then what it had put in is discarded, and stays so."""
    with Puppet(PAGES) as puppet, gated_copy(monkeypatch) as gate:
        rows = layout(puppet.address)
        right = wanted(rows, puppet.address)
        with served({1: puppet}, {1: rows}, plain, workers=1) as at_work:
            gate.wait()
            puppet.tell("discard", 0, 100)
            reader = threading.Thread(target=lambda: at_work.pump(puppet.answered))
            reader.start()
            reader.join(0.05)
            assert reader.is_alive() and not puppet.answered()
            gate.open()
            reader.join(PATIENCE)
            puppet.answer()
            right[:100] = [ZEROS] * 100
            at_work.finish()
            compare(at_work, puppet, right)


def test_a_storm_of_forks(many: PackedSource) -> None:
    """Every fork calls off what is under way in that memory, and yet it comes to an end."""
    total = 3000
    with Puppet(total) as puppet:
        rows = mixed(puppet.address, 1, total, list(MANY))
        with served({1: puppet}, {1: rows}, many) as at_work:
            puppet.tell("forks", 150)
            at_work.pump(puppet.answered)
            puppet.answer()
            for space in at_work.fill.spaces():
                space.alive = uffd.is_alive(space.fd)
            at_work.finish()
            compare(at_work, puppet, wanted(rows, puppet.address, total, MANY))


@pytest.mark.parametrize("when", ["before", "decoding", "filling"])
def test_a_task_that_ends(plain: PackedSource, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Its memory counts, the other's is right."""
    gated = gated_copy if when == "filling" else gated_reader
    with Puppet(PAGES) as one, Puppet(PAGES) as two, gated(monkeypatch) as gate:
        rows = {1: layout(one.address), 2: layout(two.address)}
        if when == "before":
            one.kill()
        with served({1: one, 2: two}, rows, plain) as at_work:
            gate.wait()
            one.kill()
            for space in at_work.fill.spaces():
                space.alive = uffd.is_alive(space.fd)
            gate.open()
            at_work.finish()
            assert len(at_work.watched) == 1
            compare(at_work, two, wanted(rows[2], two.address))


# --- fillers that die or stop -------------------------------------------------------------------

VICTIMS = pytest.mark.parametrize("victims", [[0], [1, 2], [0, 1, 2]], ids=str)


def takes_all_locks(fillers: Fillers) -> None:
    """They can be held, whoever has died."""

    def hold() -> None:
        with fillers.held():
            pass

    assert ends(hold, fillers.end), "the locks can't be had"


@VICTIMS
def test_killed_before(many: PackedSource, victims: list[int]) -> None:
    """Even before they have begun to listen."""
    total = 400
    with Puppet(total) as puppet, started(many, 3) as (fillers, pids):
        rows = mixed(puppet.address, 3, total, list(MANY))
        send([pids[i] for i in victims], signal.SIGKILL)
        with served({1: puppet}, {1: rows}, many, fillers=fillers) as at_work:
            takes_all_locks(fillers)
            at_work.finish()
            compare(at_work, puppet, wanted(rows, puppet.address, total, MANY))


@VICTIMS
@GATES
def test_killed_at_work(
    many: PackedSource, monkeypatch: pytest.MonkeyPatch, gated: Gated, victims: list[int]
) -> None:
    """While it decodes; or with its lock, when something is filled and nobody has been told."""
    total = 1500
    with Puppet(total) as puppet, gated(monkeypatch, 1) as gate:
        rows = mixed(puppet.address, 4, total, list(MANY))
        with (
            started(many, 3) as (fillers, pids),
            served({1: puppet}, {1: rows}, many, fillers=fillers) as at_work,
        ):
            gate.wait()
            send([pids[i] for i in victims], signal.SIGKILL)
            gate.open()
            takes_all_locks(fillers)
            at_work.finish()
            compare(at_work, puppet, wanted(rows, puppet.address, total, MANY))


def test_killed_while_somebody_waits_for_its_lock(
    many: PackedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 300
    with Puppet(total) as puppet, gated_copy(monkeypatch) as gate:
        rows = mixed(puppet.address, 4, total, list(MANY))
        with (
            started(many, 2) as (fillers, pids),
            served({1: puppet}, {1: rows}, many, fillers=fillers) as at_work,
        ):
            gate.wait()
            waiting = threading.Thread(target=takes_all_locks, args=(fillers,))
            waiting.start()
            waiting.join(0.05)
            assert waiting.is_alive()
            send(pids, signal.SIGKILL)
            waiting.join(PATIENCE)
            assert fillers.alive or at_work.fill.failure is None
            at_work.finish()
            compare(at_work, puppet, wanted(rows, puppet.address, total, MANY))


class SlowToLocate(PackedSource):
    """The filling thread waits after so many questions, for as long as `going` is not set."""

    def __init__(self, source: PackedSource, after: int) -> None:
        self.blocks, self.layout, self.located = source.blocks, source.layout, source.located
        self.fetched, self.opened, self.closed = [], 0, 0
        self.going, self.waits = threading.Event(), threading.Event()
        self._after = after

    def locate(self, numbers: Sequence[int]) -> list[Location]:
        """See PackedSource."""
        self._after -= threading.current_thread().name == "fill"
        if self._after < 0:
            self.waits.set()
            assert self.going.wait(PATIENCE)
        return super().locate(numbers)


@VICTIMS
def test_killed_with_answers_unread(many: PackedSource, victims: list[int]) -> None:
    """Some of what they have done is known, some isn't, and what waits in a socket may be lost."""
    total = 1500
    source = SlowToLocate(many, 5)
    with Puppet(total) as puppet, started(many, 3) as (fillers, pids):
        rows = mixed(puppet.address, 6, total, list(MANY))
        with served({1: puppet}, {1: rows}, source, fillers=fillers) as at_work:
            assert source.waits.wait(PATIENCE)
            for filler in fillers._fillers:
                assert select.select([filler.channel], [], [], PATIENCE)[0]
            send([pids[i] for i in victims], signal.SIGKILL)
            source.going.set()
            at_work.finish()
            takes_all_locks(fillers)
            compare(at_work, puppet, wanted(rows, puppet.address, total, MANY))


def test_killed_afterwards(plain: PackedSource) -> None:
    with Puppet(PAGES) as puppet, started(plain, 3) as (fillers, pids):
        rows = layout(puppet.address)
        with served({1: puppet}, {1: rows}, plain, fillers=fillers) as at_work:
            at_work.finish()
            send(pids, signal.SIGKILL)
            takes_all_locks(fillers)
            compare(at_work, puppet, wanted(rows, puppet.address))


@pytest.mark.parametrize("how_many", [1, 3])
def test_stopped_and_continued(many: PackedSource, how_many: int) -> None:
    total = 1000
    with Puppet(total) as puppet, started(many, 3) as (fillers, pids):
        rows = mixed(puppet.address, 8, total, list(MANY))
        send(pids[:how_many], signal.SIGSTOP)
        with served({1: puppet}, {1: rows}, many, fillers=fillers) as at_work:
            at_work.pump(lambda: all(each.asked for each in fillers._fillers[:how_many]))
            assert not at_work.fill.filled.wait(0.05)
            send(pids[:how_many], signal.SIGCONT)
            at_work.finish()
            compare(at_work, puppet, wanted(rows, puppet.address, total, MANY))


def test_signals_to_the_whole_group(plain: PackedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks decides when they end."""
    with Puppet(PAGES) as puppet, gated_reader(monkeypatch) as gate:
        rows = layout(puppet.address)
        with (
            started(plain, 3) as (fillers, pids),
            served({1: puppet}, {1: rows}, plain, fillers=fillers) as at_work,
        ):
            gate.wait()
            for pid in pids:
                os.setpgid(pid, pids[0])
                wait_until(lambda pid=pid: len(descriptors(pid)) <= 5, PATIENCE, "its start")  # type: ignore[misc]
            for number in SIGNALS * 2:
                os.killpg(pids[0], number)
            gate.open()
            at_work.finish()
            assert all(state_of(pid) not in (None, "Z") for pid in pids)


def test_a_signal_right_after_the_fork(
    plain: PackedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child must not go on as a second one of us, whatever Ctrl-C raises in it."""
    fork, us = os.fork, os.getpid()
    escaped, tell = os.pipe()

    def interrupted() -> int:
        pid = fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Puppet(PAGES) as puppet, monkeypatch.context() as patched:
            patched.setattr(os, "fork", interrupted)
            rows = layout(puppet.address)
            with served({1: puppet}, {1: rows}, plain) as at_work:
                at_work.finish()
                assert at_work.fillers.alive
    except BaseException:
        if os.getpid() != us:
            os.write(tell, b"x")
            os._exit(1)
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(tell)
    with os.fdopen(escaped, "rb") as said:
        assert said.read() == b""


# --- damage -------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    """Another byte there."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


def fails(source: PackedSource, blocks: Mapping[int, bytes], rows: Rows, puppet: Puppet) -> Any:
    """What a fill fails with. All that counts as put in is right."""
    with served({1: puppet}, {1: rows}, source) as at_work:
        with pytest.raises((CorruptBlock, MissingPack)) as caught:
            at_work.pump(lambda: False)
        at_work.fill.stop()
        assert not at_work.fill.filled.is_set()
        assert at_work.fill.filled_bytes < at_work.plan.bytes
        (space,) = at_work.watched
        for done, (address, pages, block, offset) in zip(space.done, rows, strict=True):
            if done and block != ZERO:
                found = puppet.ask("read", (address - puppet.address) // PAGE, pages)
                part = blocks[block][offset * PAGE :]
                assert found == [digest(part[i * PAGE :][:PAGE]) for i in range(pages)]
        assert any(space.done)
    return caught.value


def in_a_row(start: int) -> Rows:
    """All blocks."""
    rows: Rows = []
    for number, raw in MANY.items():
        rows.append((start, len(raw) // PAGE, number, 0))
        start += len(raw)
    return rows


TOTAL = sum(map(len, MANY.values())) // PAGE


@pytest.mark.parametrize("number", [36, 37, 38, 43])
def test_a_damaged_block(tmp_path: Path, number: int) -> None:
    """It is named exactly, by its pack and where it is."""
    source = PackedSource(tmp_path / "store", MANY, ("balanced", "fast"), per_pack=30)
    at = source.located[number]
    path = source.layout.pack(at.pack)
    flip(path, at.offset + at.stored // 2)
    with Puppet(TOTAL) as puppet:
        error = fails(source, MANY, in_a_row(puppet.address), puppet)
    assert isinstance(error, CorruptBlock)
    assert (error.expected, error.pack, error.offset) == (at.id, path, at.offset)


@pytest.mark.parametrize("length", [None, 100])
def test_a_pack_that_is_missing_or_cut_off(tmp_path: Path, length: int | None) -> None:
    source = PackedSource(tmp_path / "store", MANY, per_pack=20)
    path = source.layout.pack(source.located[25].pack)
    path.unlink() if length is None else os.truncate(path, length)
    with Puppet(TOTAL) as puppet:
        error = fails(source, MANY, in_a_row(puppet.address), puppet)
    assert isinstance(error, MissingPack if length is None else CorruptBlock)
    assert error.pack == path


def test_damage_nobody_needs(tmp_path: Path) -> None:
    """Blocks that are not in this memory."""
    source = PackedSource(tmp_path / "store", BLOCKS, per_pack=8)
    at = source.located[3]
    flip(source.layout.pack(at.pack), at.offset)
    with Puppet(PAGES) as puppet:
        rows = [row for row in layout(puppet.address) if row[2] != 3]
        with served({1: puppet}, {1: rows}, source) as at_work:
            at_work.finish()
            compare(at_work, puppet, wanted(rows, puppet.address))


def test_what_fillers_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """We can, and do: one unit after the other."""
    us, read_batches = os.getpid(), BlockReader.read_batches

    def blind(self: BlockReader, locations: Sequence[Location]) -> Iterator[list[Buffer]]:
        if os.getpid() != us:
            raise MissingPack(tmp_path)
        return read_batches(self, locations)

    monkeypatch.setattr(BlockReader, "read_batches", blind)
    source = PackedSource(tmp_path / "store", BLOCKS)
    with Puppet(PAGES) as puppet:
        rows = layout(puppet.address)
        with served({1: puppet}, {1: rows}, source) as at_work:
            at_work.finish()
            assert sorted(source.fetched) == list(range(8)) and at_work.fillers.alive
            compare(at_work, puppet, wanted(rows, puppet.address))


@pytest.mark.filterwarnings("ignore")
def test_fillers_that_break_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody expects ends them all, one after the other; the thread does the rest."""
    us = os.getpid()
    read_batches = BlockReader.read_batches

    def broken(self: BlockReader, locations: Sequence[Location]) -> Iterator[list[Buffer]]:
        if os.getpid() != us:
            raise ZeroDivisionError
        return read_batches(self, locations)

    monkeypatch.setattr(BlockReader, "read_batches", broken)
    source = PackedSource(tmp_path / "store", BLOCKS)
    with Puppet(PAGES) as puppet:
        rows = layout(puppet.address)
        with served({1: puppet}, {1: rows}, source) as at_work:
            at_work.finish()
            assert not at_work.fillers.alive
            compare(at_work, puppet, wanted(rows, puppet.address))


# --- the thread lends a hand --------------------------------------------------------------------


def test_faults_while_the_thread_has_a_unit_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUG A: who serves a fault must not overwrite the block that is about to be put in.

    The first unit has too many pieces for a request. While it is put in, several processes wait
    for pages of other blocks, and the thread whose work that is, is busy.
    """
    source = PackedSource(tmp_path / "store", BLOCKS)
    busy, go = threading.Event(), threading.Event()
    read_batches = BlockReader.read_batches

    def slow_for_faults(self: BlockReader, at: Sequence[Location]) -> Iterator[list[Buffer]]:
        if threading.current_thread().name == "faults":
            busy.set()
            assert go.wait(PATIENCE)
        elif threading.current_thread().name == "fill":
            assert busy.wait(PATIENCE)
        return read_batches(self, at)

    monkeypatch.setattr(BlockReader, "read_batches", slow_for_faults)
    total = MAX_PIECES + 200
    with Puppet(total) as one, Puppet(PAGES) as two, Puppet(PAGES) as three:
        puppets = {1: one, 2: two, 3: three}
        rows: dict[int, Rows] = {
            1: crowded(one.address, 0, total),
            2: layout(two.address)[1:],
            3: layout(three.address)[1:],
        }
        with served(puppets, rows, source, start=False, first=[0]) as at_work:
            two.tell("read", 20, 1)
            three.tell("read", 40, 1)
            for space in at_work.watched[1:]:
                assert select.select([space.fd], [], [], PATIENCE)[0]
                at_work.fill.read_events(space, lambda m, s=space: at_work._take(s, m))  # type: ignore[misc]
            at_work.fill.start()
            wait_until(lambda: at_work.fill.filled_bytes > 0, PATIENCE, "a unit")
            go.set()
            at_work.finish()
            assert two.answer() == [wanted(rows[2], two.address)[20]]
            assert three.answer() == [wanted(rows[3], three.address)[40]]
            compare(at_work, one, wanted(rows[1], one.address, total))


# --- Fillers themselves -------------------------------------------------------------------------


def requests_for(source: PackedSource, spaces: Sequence[Space], start: int) -> list[Request]:
    """Block after block, one in each request, to be put into all these spaces."""
    rows = [(start + i * BLOCK_PAGES * PAGE, BLOCK_PAGES, i, 0) for i in range(8)]
    plan = Plan([1], {1: segments(rows)}, 8)
    found = []
    for number in range(8):
        pieces = np.zeros(len(spaces), PIECE_DTYPE)
        pieces["address"], pieces["length"] = rows[number][0], BLOCK_PAGES * PAGE
        pieces["space"] = np.arange(len(spaces))
        located = list[Location | None](source.locate([number]))
        found.append(Request([number], located, plan.table([number]), pieces, list(spaces)))
    return found


def space_of(puppet: Puppet) -> Space:
    """The whole of its memory."""
    end = puppet.address + PAGES * PAGE
    return Space(puppet.fd, 0, bytearray(8), (puppet.address, end))


def drain(fillers: Fillers) -> list[tuple[Request, int, Outcome]]:
    """All answers that are due."""
    found: list[tuple[Request, int, Outcome]] = []
    deadline = time.monotonic() + PATIENCE
    while fillers.busy:
        assert time.monotonic() < deadline
        found += fillers.answers(0.1)
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_ask_and_answer(plain: PackedSource, count: int) -> None:
    """Each can be asked twice before it has answered."""
    with Puppet(PAGES) as puppet, started(plain, count) as (fillers, _):
        fillers.register()
        requests = requests_for(plain, [space_of(puppet)], puppet.address)
        left, answered = list(requests), []
        while left:
            asked = 0
            while fillers.ready and left:
                fillers.ask(left.pop(0))
                asked += 1
            assert asked <= 2 * count
            answered += drain(fillers)
        assert {request.units[0]: (n, out) for request, n, out in answered} == {
            number: (1, Outcome.DONE) for number in range(8)
        }
        found = [digest(BLOCKS[i][j * PAGE :][:PAGE]) for i in range(8) for j in range(16)]
        assert puppet.ask("read", 0, 8 * BLOCK_PAGES) == found


def test_held(plain: PackedSource) -> None:
    """Nothing is filled while they are held, and what is called off never is."""
    with Puppet(PAGES) as puppet, started(plain, 2) as (fillers, _):
        fillers.register()
        space = space_of(puppet)
        one, two = requests_for(plain, [space], puppet.address)[:2]
        with fillers.held():
            fillers.ask(one)
            fillers.ask(two)
            assert not list(fillers.answers(0.1)) and fillers.busy
            fillers.call_off(space, puppet.address + PAGE, puppet.address + 2 * PAGE)
        assert {(r.units[0], n, out) for r, n, out in drain(fillers)} == {
            (0, 0, Outcome.CALLED_OFF),
            (1, 1, Outcome.DONE),
        }
        assert uffd.zero(puppet.fd, puppet.address, PAGE) == (PAGE, 0)
        assert uffd.zero(puppet.fd, puppet.address + 16 * PAGE, PAGE)[1] == errno.EEXIST


def test_a_slot_is_used_again(plain: PackedSource) -> None:
    """What was called off says nothing about the next request."""
    with Puppet(PAGES) as puppet, started(plain, 1) as (fillers, _):
        fillers.register()
        space = space_of(puppet)
        for request in requests_for(plain, [space], puppet.address):
            with fillers.held():
                fillers.ask(request)
                fillers.call_off(space, 0, 1 << 62)
            assert [out for _, _, out in drain(fillers)] == [Outcome.CALLED_OFF]
            fillers.ask(request)
            assert [out for _, _, out in drain(fillers)] == [Outcome.DONE]


def test_answers_come_while_requests_are_called_off(
    plain: PackedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUG B: another thread reads events than the one that takes answers."""
    with Puppet(PAGES) as puppet, started(plain, 1) as (fillers, _):
        fillers.register()
        space = space_of(puppet)
        concerns = Request.concerns

        def meanwhile(self: Request, space: Space, start: int, end: int) -> bool:
            thread = threading.Thread(target=drain, args=(fillers,))  # as the filling thread does
            thread.start()
            thread.join(HANGS)
            return concerns(self, space, start, end)

        monkeypatch.setattr(Request, "concerns", meanwhile)
        for request in requests_for(plain, [space], puppet.address)[:2]:
            fillers.ask(request)
        for _ in range(2):
            assert select.select([fillers._fillers[0].channel], [], [], PATIENCE)[0]
        fillers.call_off(space, puppet.address, puppet.address + PAGE)


def test_spaces_are_forgotten(plain: PackedSource) -> None:
    """They close what they don't need any more."""
    with Puppet(PAGES) as puppet, started(plain, 1) as (fillers, (pid,)):
        fillers.register()
        spaces = [space_of(puppet) for _ in range(5)]
        for request in requests_for(plain, spaces, puppet.address):
            fillers.ask(request)
            drain(fillers)
        opened = [at for at in descriptors(pid).values() if "userfaultfd" in at]
        assert len(opened) == 5
        for space in spaces[1:]:
            fillers.forget(space)
            fillers.forget(space)
        (last,) = requests_for(plain, spaces[:1], puppet.address)[:1]
        fillers.ask(last)
        drain(fillers)
        assert len([at for at in descriptors(pid).values() if "userfaultfd" in at]) == 1


def copies_of(puppet: Puppet, count: int, stack: ExitStack) -> Callable[[Fill], list[Space]]:
    """As if the process had forked so many times: descriptors of the same memory."""

    def more(fill: Fill) -> list[Space]:
        found = []
        for _ in range(count):
            fd = os.dup(puppet.fd)
            stack.callback(os.close, fd)
            found.append(fill.add_space(0, fd))
        return found

    return more


MANY_SPACES = 400


def test_many_processes_end_at_once(plain: PackedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUG C: what is said to a busy process must not fill its socket while all locks are held."""
    with (
        ExitStack() as stack,
        Puppet(PAGES) as puppet,
        gated_reader(monkeypatch, after=1) as gate,
    ):
        rows = layout(puppet.address)
        more = copies_of(puppet, MANY_SPACES, stack)
        with (
            started(plain, 1) as (fillers, pids),
            served({1: puppet}, {1: rows}, plain, fillers=fillers, more=more) as at_work,
        ):
            gate.wait()
            for space in at_work.watched[1:]:
                space.alive = False
            forgetting = threading.Thread(target=at_work.fill.forget_dead)
            forgetting.start()
            forgetting.join(0.3)
            gate.open()
            forgetting.join(HANGS)
            hangs = forgetting.is_alive()
            if hangs:
                os.kill(pids[0], signal.SIGKILL)
                forgetting.join(PATIENCE)
            del at_work.watched[1:]
            at_work.finish()
            assert not hangs, "forget_dead() and a process wait for each other"
            compare(at_work, puppet, wanted(rows, puppet.address))


def test_many_processes_to_tell_of(plain: PackedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUG D: who asks a busy process must not wait for it, with a lock that events need."""
    with (
        ExitStack() as stack,
        Puppet(PAGES) as one,
        Puppet(PAGES) as two,
        gated_reader(monkeypatch, after=1) as gate,
    ):
        rows = {1: layout(one.address)[:4], 2: []}
        for i in range(8):
            row = (two.address + i * BLOCK_PAGES * PAGE, BLOCK_PAGES, ZERO if i > 3 else 4 + i, 0)
            rows[2].append(row)
        more = copies_of(one, MANY_SPACES, stack)
        first = [4, 5, 6, 7, *range(8 + 8, 8 + 12)]  # those of the second, zeros as well
        with (
            started(plain, 1) as (fillers, pids),
            served(
                {1: one, 2: two}, rows, plain, fillers=fillers, more=more, first=first
            ) as at_work,
        ):
            gate.wait()
            two.tell("discard", 0, 128)
            assert select.select([at_work.watched[1].fd], [], [], PATIENCE)[0]
            time.sleep(0.3)  # until the filling thread has said all it can
            gate.open()
            hangs = not ends(
                lambda: at_work.fill.read_events(
                    at_work.watched[1], lambda m: at_work._take(at_work.watched[1], m)
                ),
                lambda: os.kill(pids[0], signal.SIGKILL),
            )
            at_work.finish()
            assert not hangs, "reading events, asking and filling wait for one another"


def test_a_request_that_cannot_be_sent(plain: PackedSource) -> None:
    """BUG E: there are other reasons than that the process is gone; nobody waits for its answer.

    Buffers of sockets can be small, and memory for them can be lacking.
    """
    total = MAX_PIECES - 50
    with Puppet(total) as puppet, started(plain, 1) as (fillers, pids):
        fillers._fillers[0].channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        rows = crowded(puppet.address, 7, total)
        with served({1: puppet}, {1: rows}, plain, fillers=fillers) as at_work:
            answered = at_work.fill.filled.wait(HANGS)
            if not answered:
                os.kill(pids[0], signal.SIGKILL)
            at_work.finish()
            assert answered, "an answer is awaited that nobody was asked for"
            compare(at_work, puppet, wanted(rows, puppet.address, total))


# --- what is left of them -----------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["unstarted", "decoding", "filling", "some", "filled"])
def test_stop_at_any_moment(
    plain: PackedSource, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Twice is as good as once; nothing is left, and events can still be read."""
    gated = {"decoding": gated_reader, "filling": gated_copy}.get(moment)
    born, before = children(), descriptors()
    with ExitStack() as stack:
        puppet = stack.enter_context(Puppet(PAGES))
        gate = stack.enter_context(gated(monkeypatch)) if gated else Gate(open_=True)
        rows = layout(puppet.address)
        ours = {*children(), *born}
        at_work = stack.enter_context(
            served({1: puppet}, {1: rows}, plain, start=moment != "unstarted")
        )
        assert len(children()) == len(ours) + 2
        if gated:
            gate.wait()
        elif moment == "some":
            at_work.pump(lambda: at_work.fill.filled_bytes > 0)
        elif moment == "filled":
            at_work.finish()
        for _ in range(2):
            at_work.fill.stop()
            assert set(children()) == ours
            left = descriptors().items() - before.items()
            assert not any("memfd" in target for _, target in left)
        assert not at_work.fillers.alive and not at_work.fillers.busy
        at_work.fill.in_place()
        puppet.tell("discard", 0, 5)
        at_work.pump(puppet.answered)
        at_work.watched[0].alive = False
        assert at_work.fill.forget_dead() == at_work.watched
        puppet.kill()


def test_stop_while_memory_changes(plain: PackedSource) -> None:
    """Processes and threads wait for an event to be read, which nobody does any more."""
    with Puppet(PAGES) as puppet:
        rows = layout(puppet.address)
        with served({1: puppet}, {1: rows}, plain, start=False) as at_work:
            puppet.tell("discard", 0, 100)
            assert select.select([puppet.fd], [], [], PATIENCE)[0]
            at_work.fill.start()
            wait_until(lambda: at_work.fillers.busy, PATIENCE, "requests")
            at_work.fill.stop()
            assert not at_work.fill.filled.is_set() and not at_work.fill.filled_bytes
            puppet.kill()


def test_stop_while_a_fault_is_served(plain: PackedSource) -> None:
    """BUG H: what was broken off does not count as filled. One page can't be put in."""
    before = len(plain.fetched)
    with Puppet(PAGES) as puppet:
        rows = layout(puppet.address)[:1]
        with served({1: puppet}, {1: rows}, plain, fillers=Fillers(), start=False) as at_work:
            (space,) = at_work.watched
            puppet.tell("discard", 20, 5)
            assert select.select([puppet.fd], [], [], PATIENCE)[0]
            at_work.fill.faulted(Fault(space, puppet.address))
            at_work.fill.start()
            wait_until(lambda: len(plain.fetched) > before, PATIENCE, "a block")
            time.sleep(0.05)
            at_work.fill.stop()
            assert not at_work.fill.filled.is_set()
            assert not at_work.fill.filled_bytes
            puppet.kill()


def test_they_have_nothing_of_ours(many: PackedSource) -> None:
    """Of descriptors: but their end of the socket, the locks, memory to fill, and a few packs."""
    high, total = 900, 1500
    with open(os.devnull) as file:
        os.dup2(file.fileno(), high)
    try:
        with Puppet(total) as puppet, started(many, 3) as (fillers, pids):
            rows = mixed(puppet.address, 1, total, list(MANY))
            with served({1: puppet}, {1: rows}, many, fillers=fillers) as at_work:
                at_work.finish()
                ours = set(descriptors().values())
                for pid in pids:
                    found = list(descriptors(pid).values())
                    (channel,) = [at for at in found if at.startswith("socket:")]
                    assert channel not in ours
                    assert len([at for at in found if "memfd:icefloe-fillers" in at]) == 1
                    assert len([at for at in found if "userfaultfd" in at]) <= 1
                    packs = [at for at in found if at.startswith(f"{many.layout.packs}/")]
                    assert 1 <= len(packs) <= 8
                    assert len(found) <= 3 + len(packs)
    finally:
        os.close(high)


def test_they_keep_nobody_out(tmp_path: Path) -> None:
    """The lock of the store is ours alone to hold, and to give back."""
    root = tmp_path / "store"
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, {"a": noise(9, 1)}, "x")
    with open_store(root, write=False) as store:
        fillers = start_fillers(store.layout, 3)
        for filler in fillers._fillers:
            wait_until(lambda f=filler: len(descriptors(f._pid)) == 2, PATIENCE, "its start")  # type: ignore[misc]
        store.close()
        with open_store(root, write=True, wait_seconds=0.0):
            pass
        fillers.close()


LEFT = """
import pickle, sys
from contextlib import nullcontext
from pathlib import Path
from icefloe.capture.fillers import start_fillers

layout, requests, registered, hold = pickle.loads(Path(sys.argv[1]).read_bytes())
fillers = start_fillers(layout, 2)
if registered:
    fillers.register()
with fillers.held() if hold else nullcontext():
    for request in requests:
        fillers.ask(request)
    print("asked", flush=True)
    sys.stdin.read()
"""


def buried(pid: int) -> bool:
    """Whether a process is gone; if it has fallen to us, it is reaped."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return state_of(pid) is None


@pytest.mark.parametrize("how", ["idle", "asked", "held", "changing", "unregistered"])
def test_they_go_when_we_are_killed(plain: PackedSource, tmp_path: Path, how: str) -> None:
    """And nobody is there to kill them. BUG F: whatever they wait for, nobody will do it.

    One that stays keeps the descriptor of a process's memory, which waits for ever.
    """
    with Puppet(PAGES, register=how != "unregistered") as puppet:
        requests = requests_for(plain, [space_of(puppet)], puppet.address)[:4]
        if how == "idle":
            requests = []
        elif how == "changing":
            puppet.tell("discard", 100, 5)
            assert select.select([puppet.fd], [], [], PATIENCE)[0]
        said = (plain.layout, requests, how != "unregistered", how == "held")
        (tmp_path / "said").write_bytes(pickle.dumps(said))
        command = [sys.executable, "-c", LEFT, str(tmp_path / "said")]
        with adopting_orphans():
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[puppet.fd],
            )
            with process:
                assert process.stdout is not None
                assert process.stdout.readline() == "asked\n"
                pids = children(process.pid)
                time.sleep(0.05)
                process.kill()
                process.wait()
            assert len(pids) == 2
            try:
                wait_until(lambda: all([buried(pid) for pid in pids]), HANGS, "their end")
            finally:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                wait_until(lambda: all([buried(pid) for pid in pids]), PATIENCE, "their end")


def test_children_that_nobody_waits_for(plain: PackedSource) -> None:
    """BUG G: whoever ignores SIGCHLD has no zombies. A filler that died is no reason to fail."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with started(plain, 2) as (fillers, pids):
            os.kill(pids[0], signal.SIGKILL)
            wait_until(lambda: state_of(pids[0]) is None, PATIENCE, "its end")
            try:
                fillers.end()
            finally:
                fillers._fillers[0]._pid = 0
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("good", [0, 2])
def test_a_fork_that_fails(plain: PackedSource, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    """With fewer of them or with none, memory is filled."""
    fork, left = os.fork, good

    def limited() -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EAGAIN, "no more processes")
        return fork()

    with Puppet(PAGES) as puppet:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fork", limited)
            fillers = start_fillers(plain.layout, 7)
        assert len(fillers._fillers) == good and fillers.alive == bool(good)
        rows = layout(puppet.address)
        with served({1: puppet}, {1: rows}, plain, fillers=fillers) as at_work:
            at_work.finish()
            compare(at_work, puppet, wanted(rows, puppet.address))


@pytest.mark.parametrize("name", ["memfd_create", "socketpair"])
def test_limits_of_descriptors(
    plain: PackedSource, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refused(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "too many")

    with monkeypatch.context() as patched:
        patched.setattr(os if name == "memfd_create" else socket, name, refused)
        fillers = start_fillers(plain.layout, 3)
    assert not fillers.alive
    fillers.end()
    fillers.close()


# --- a restore ----------------------------------------------------------------------------------


class GivesUp(Criu):
    """A CRIU that fails at once."""

    def start(self, arguments: Sequence[str | Path], words: Any) -> "subprocess.Popen[bytes]":
        """See Criu."""
        return subprocess.Popen(["false"], stderr=words)


def checkpoint() -> small_store.Tree:
    """One process with some pages of memory."""
    start, count = 1 << 30, 64
    pages = {start + i * made.PAGE: noise(1, i) for i in range(count)}
    entries = [made.Entry(start, count, made.PRESENT | made.LAZY)]
    areas = [made.Area(start, start + count * made.PAGE)]
    return made.checkpoint({41: made.Memory(areas, entries, pages)})


def restore_with(store: LocalStore, id_: BlockId, folder: Path, fill: bool) -> None:
    """A lazy restore with a CRIU that gives up."""
    folder.mkdir()
    source = StoreSource(store, store.manifest(id_))
    stored = StoredImage(store.manifest(id_), source)
    memories = load_memories(stored)
    files = files_for_criu(stored, memories, lazy=True)
    options = restore.RestoreOptions("x", "lazy", fill=fill, workers=5)
    waking = Waking(None, [], 1.0)
    run = restore._Run(GivesUp("criu", (4, 2)), options, "lazy", folder, 0.0, waking)
    restore._restore_lazily(run, memories, files, source, store.layout, Guard(None), EMPTY)


def test_a_lazy_restore_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends them. Where nothing is filled ahead, there are none."""
    told: list[Any] = []

    def noted(*arguments: Any) -> Fillers:
        fillers = start_fillers(*arguments)
        told.append((arguments[1], len(fillers._fillers), len(children()), fillers))
        return fillers

    monkeypatch.setattr(blocks, "start_fillers", noted)
    before = children()
    with open_store(tmp_path / "store", write=True, create=True) as store:
        id_ = small_store.add(store, checkpoint(), "x").id
        for fill in (True, False):
            with pytest.raises(CriuFailed):
                restore_with(store, id_, tmp_path / f"criu-{fill}", fill)
    ((workers, started_, count, fillers),) = told
    assert (workers, started_) == (5, 5) and count >= len(before) + 5
    assert children() == before and not fillers._fillers


# --- the parts ----------------------------------------------------------------------------------

page_counts = st.integers(1, 3)


@st.composite
def piece_tables(draw: st.DrawFn) -> tuple[NDArray[np.void], NDArray[np.uint64]]:
    """Pieces close to one another, and where their blocks are."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 6),  # address: where the last ended, or elsewhere
                page_counts,
                st.integers(0, 6),
                st.integers(0, 1),
                st.sampled_from([0, 0, 1 << 20, (1 << 20) + 4 * PAGE]),
            ),
            max_size=12,
        )
    )
    pieces = np.zeros(len(rows), PIECE_DTYPE)
    starts = np.zeros(len(rows), np.uint64)
    address, source = 64 * PAGE, 0
    for i, (step, length, offset, space, start) in enumerate(rows):
        address = address if step < 4 else (64 + step) * PAGE
        if step < 4 and start and source >= start:
            offset = (source - start) // PAGE
        pieces[i] = (address, length * PAGE, offset * PAGE, space if step < 5 else 0, i, 0)
        starts[i] = start
        address += length * PAGE
        source = start + (offset + length) * PAGE
    return pieces, starts


@settings(max_examples=300, deadline=None)
@given(piece_tables())
def test_runs(table: tuple[NDArray[np.void], NDArray[np.uint64]]) -> None:
    """Against a loop that joins two neighbours."""
    pieces, starts = table
    expected: list[list[int]] = []
    for i, (address, length, offset, space, _, _) in enumerate(pieces.tolist()):
        source = int(starts[i]) and int(starts[i]) + offset
        if expected:
            _, other, first, size, from_ = expected[-1]
            follows = not source if not from_ else source == from_ + size
            if other == space and first + size == address and follows:
                expected[-1][3] += length
                continue
        expected.append([i, space, address, length, source])
    runs = filling._runs(pieces, starts)
    assert [[int(runs.first[i]), *runs[i]] for i in range(len(runs.first))] == expected
    small = [size <= filling._COPY_BYTES for *_, size, _ in expected]
    ends = 0
    for first, end in runs.groups():
        assert first == ends < end
        ends = end
        if end - first > 1:
            assert all(small[first:end]) and len({run[1] for run in expected[first:end]}) == 1
            assert sum(run[3] for run in expected[first:end]) <= 2 * filling._COPY_BYTES
        assert list(map(uffd_piece, runs.puts[first:end])) == [
            (address, source, size) for _, _, address, size, source in expected[first:end]
        ]
    assert ends == len(expected)


def uffd_piece(put: uffd.Put) -> tuple[int, int, int]:
    """Address, source (0 for zeros) and length of what uffd.put_all takes."""
    call, argument = put
    if call == uffd._COPY:
        address, source, length, mode, done = struct.unpack("<QQQQq", argument)
        assert source
    else:
        assert call == uffd._ZEROPAGE
        address, length, mode, done = struct.unpack_from("<QQQq", argument)
        source = 0
    assert not mode and not done
    return address, source, length


@given(
    st.lists(st.tuples(st.integers(0, 40), page_counts, st.integers(0, 2)), max_size=8),
    st.integers(0, 3),
    st.sampled_from([(0, (1 << 64) - 1), (5, 9), (0, 1), (9, 10), (7, 30)]),
)
def test_concerns(rows: list[tuple[int, int, int]], which: int, span: tuple[int, int]) -> None:
    """Against a loop. The fourth space is not named."""
    spaces = [Space(i, 0, bytearray(1), (0, 1)) for i in range(4)]
    pieces = np.zeros(len(rows), PIECE_DTYPE)
    for i, (address, length, space) in enumerate(rows):
        pieces[i] = (address, length, 0, space, i, 0)
    none = Plan([1], {}, 1).table([])
    request = Request([], [], none, pieces, spaces[:3])
    start, end = span
    expected = any(
        space == which and max(address, start) < min(address + length, end)
        for address, length, space in rows
    )
    assert request.concerns(spaces[which], start, end) == expected


def test_concerned() -> None:
    """What an event changes: nothing, everything, two places, one."""
    assert Message(uffd.PAGEFAULT, 1, 2, 3).concerned() == ()
    ((first, last),) = Message(uffd.FORK, 9, 0, 0).concerned()
    assert first == 0 and last >= 1 << 63
    assert Message(uffd.REMAP, 100, 500, 10).concerned() == ((100, 110), (500, 510))
    for event in (uffd.REMOVE, uffd.UNMAP):
        assert Message(event, 100, 500, 0).concerned() == ((100, 500),)


@settings(deadline=None)
@given(st.data())
def test_tables_of_units(data: st.DataObject) -> None:
    """Unit by unit they have what `rows` has, whose segments are by address."""
    blocks = 4
    lazy = {}
    for pid in (1, 2):
        rows: Rows = []
        address = 1 << 20
        for block in data.draw(st.lists(st.sampled_from([0, 1, 2, ZERO]), max_size=6)):
            count = data.draw(st.sampled_from([1, 2, 5000]))
            rows.append((address, count, block, 0))
            address += (count + 1) * PAGE
        lazy[pid] = segments(rows)
    plan = Plan([1, 2], lazy, blocks)
    known = plan.order().tolist()
    units = data.draw(st.permutations([*known, 3]))[: data.draw(st.integers(0, 10))]
    table = plan.table(units)
    assert sorted(table.rows.tolist(), key=lambda row: row[4]) == plan.rows(units)
    assert list(table.unit) == sorted(table.unit)
    for i, unit in enumerate(units):
        assert table[table.unit == i].rows.tolist() == plan.rows([unit])
    by_task = [row for task in table.tasks() for row in table.of(task).rows.tolist()]
    assert sorted(by_task, key=lambda row: row[4]) == plan.rows(units)
    assert all(set(table.of(task).rows["task"].tolist()) == {task} for task in table.tasks())
    kept = table[table.rows["length"] > PAGE]
    assert kept.rows.tolist() == [row for row in table.rows.tolist() if row[1] > PAGE]


class Memory:
    """What a process fills, in place of the kernel and of the lock before it."""

    def __init__(self, says: Callable[[], str]) -> None:
        self.pages: dict[tuple[int, int], bytes] = {}
        self._says = says
        self._said = ""

    @contextmanager
    def held(self, slot: int) -> Iterator[bool]:
        """See _Lock."""
        assert slot == 5 and not self._said
        self._said = self._says()
        try:
            if self._said == "called off":
                raise filling._CalledOff
            yield self._said != "late"
        finally:
            self._said = ""

    def copy(self, fd: int, address: int, source: int, length: int) -> tuple[int, int]:
        """See uffd."""
        assert self._said and length <= filling._COPY_BYTES
        return self._put(fd, address, ctypes.string_at(source, length))

    def zero(self, fd: int, address: int, length: int) -> tuple[int, int]:
        """See uffd."""
        assert self._said and length <= filling._ZERO_BYTES
        return self._put(fd, address, bytes(length))

    def put_all(self, fd: int, pieces: Sequence[uffd.Put]) -> int:
        """See uffd. The second of these meets what was said."""
        said, done, total = self._said, 0, 0
        for address, source, length in map(uffd_piece, pieces):
            total += length
            assert said and total <= 2 * filling._COPY_BYTES
            self._said = said if done else "all"
            whole = ctypes.string_at(source, length) if source else bytes(length)
            if self._put(fd, address, whole)[1]:
                break
            done += 1
        return done

    def _put(self, fd: int, address: int, whole: bytes) -> tuple[int, int]:
        if self._said in ("trouble", "late"):
            return 0, errno.ENOENT if self._said == "late" else errno.ESRCH
        if self._said == "changing":
            return 0, errno.EAGAIN
        if self._said == "there":
            self.pages.setdefault((fd, address), b"was there")
            return 0, errno.EEXIST
        length = PAGE if self._said == "some" else len(whole)
        for at in range(0, length, PAGE):
            if (fd, address + at) in self.pages:
                return (at, errno.EAGAIN) if at else (0, errno.EEXIST)
            self.pages[fd, address + at] = whole[at : at + PAGE]
        return length, 0 if length == len(whole) else errno.EAGAIN


def filled(memory: Memory, shelf: "Shelf", order: filling.Order) -> tuple[int, Outcome]:
    """What a process says that fills this memory."""
    process = filling._Process(cast(Any, memory), cast(Any, shelf), {0: 30, 1: 31})
    with pytest.MonkeyPatch.context() as patched:
        for name in ("copy", "put_all", "zero"):
            patched.setattr(uffd, name, getattr(memory, name))
        return process.fill(order)


class Shelf:
    """Blocks in place of a reader; several come together, in memory that is used again."""

    def __init__(self, blocks: Sequence[bytes], batch: int, fails: int) -> None:
        self._blocks, self._batch, self._fails = blocks, batch, fails

    def read_batches(self, locations: Sequence[Location]) -> Iterator[list[Buffer]]:
        """See BlockReader. The offset is the number of the block."""
        room = bytearray(self._batch * 4 * PAGE)
        for first in range(0, len(locations), self._batch):
            part = [at.offset for at in locations[first : first + self._batch]]
            if self._fails in part:
                raise MissingPack(Path("/nowhere"))
            raws, end = [], 0
            for number in part:
                raw = self._blocks[number]
                room[end : end + len(raw)] = raw
                raws.append(memoryview(room)[end : end + len(raw)])
                end += len(raw)
            yield list(raws)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_count_of_a_process(data: st.DataObject) -> None:
    """However a request ends, all units before the count are in memory, and nothing is wrong."""
    count = data.draw(st.integers(1, 10))
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    zeros = [chance.random() < 0.3 for _ in range(count)]
    sizes = [chance.randint(1, 4) for _ in range(count)]
    blocks = [bytes(chance.randbytes(size * PAGE)) for size in sizes]
    pieces, right, address = [], {}, 100
    for unit in range(count):
        for space in chance.choice([[], [0], [0, 1], [1], [0, 0]]):
            address += chance.choice([0, 0, 0, 2])
            length = sizes[unit]
            pieces.append((address * PAGE, length * PAGE, 0, space, unit, 0))
            for i in range(length):
                page = bytes(PAGE) if zeros[unit] else blocks[unit][i * PAGE :][:PAGE]
                right[space + 30, (address + i) * PAGE] = (unit, page)
            address += length
    ends_at = data.draw(st.integers(0, 12))
    ending = data.draw(st.sampled_from(["called off", "trouble", "all"]))
    said: list[str] = []

    def says() -> str:
        said.append(
            ending
            if len(said) == ends_at
            else chance.choice(["all", "all", "all", "some", "there", "changing", "late"])
        )
        return said[-1]

    memory = Memory(says)
    reader = Shelf(blocks, data.draw(st.integers(1, 4)), data.draw(st.integers(0, 20)))
    locations = [
        None if zero else Location(BlockId(b""), PackId(b""), i, 0, 0, 0)
        for i, zero in enumerate(zeros)
    ]
    order = filling.Order(5, list(locations), np.array(pieces, PIECE_DTYPE).tobytes())
    done, outcome = filled(memory, reader, order)
    assert done <= count and (done == count or outcome is not Outcome.DONE)
    if "called off" in said:
        assert outcome is Outcome.CALLED_OFF
    for key, (unit, page) in right.items():
        assert memory.pages.get(key, page) in (page, b"was there")
        assert unit >= done or key in memory.pages
    assert set(memory.pages) <= set(right)


def test_zeros_between_blocks() -> None:
    """A unit that is zero does not wait for a block that comes after it."""
    blocks = [noise(1, 1), noise(1, 2)]
    memory = Memory(lambda: "all")
    at = [Location(BlockId(b""), PackId(b""), i, 0, 0, 0) for i in range(2)]
    locations = [None, at[0], None, None, at[1], None]
    pieces = np.zeros(6, PIECE_DTYPE)
    pieces["unit"], pieces["length"] = np.arange(6), PAGE
    pieces["address"] = np.arange(6) * PAGE
    order = filling.Order(5, list(locations), pieces.tobytes())
    assert filled(memory, Shelf(blocks, 2, 99), order) == (6, Outcome.DONE)
    right = [bytes(PAGE), blocks[0], bytes(PAGE), bytes(PAGE), blocks[1], bytes(PAGE)]
    assert [memory.pages[30, i * PAGE] for i in range(6)] == right
    assert len(memory.pages) == 6
