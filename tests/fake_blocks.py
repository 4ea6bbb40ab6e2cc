"""Blocks for whoever asks a BlockSource: in memory, where they can be slow or missing, or in packs.

And a layout of memory that is made of such blocks, and a fill of it that is being served.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from puppet import PAGE, Puppet, digest

from icefloe.capture import uffd
from icefloe.capture.blocks import Batch
from icefloe.capture.fill import Fault, Fill
from icefloe.capture.fillers import Fillers
from icefloe.capture.images import Columns
from icefloe.capture.memory import SEGMENT_DTYPE
from icefloe.capture.plan import Plan
from icefloe.capture.spaces import Space
from icefloe.durable import Buffer
from icefloe.errors import MissingPack
from icefloe.ids import block_id
from icefloe.store.codecs import Encoder
from icefloe.store.layout import Layout, describe, make_folders
from icefloe.store.manifest import ZERO
from icefloe.store.pack import Kind, StoredBlock, read_index
from icefloe.store.policies import PolicyName
from icefloe.store.reader import BlockReader, Location
from icefloe.store.writer import PackWriter

BLOCK_PAGES = 16
ZEROS = digest(bytes(PAGE))

Rows = list[tuple[int, int, int, int]]


def noise(pages: int, seed: int) -> bytes:
    """Pages that nothing else equals."""
    return random.Random(seed).randbytes(pages * PAGE)


BLOCKS = {number: noise(BLOCK_PAGES, number) for number in range(8)}


class FakeSource:
    """`blocks` by number. `loads` counts how often each was decoded."""

    def __init__(self, blocks: Mapping[int, bytes], delay: float = 0.0) -> None:
        self.blocks = blocks
        self.delay = delay
        self.loads: Counter[int] = Counter()
        self.held = threading.Event()
        self.held.set()
        self.opened = self.closed = 0

    def open(self) -> "FakeSource":
        """See BlockSource."""
        self.opened += 1
        return self

    def locate(self, numbers: Sequence[int]) -> list[Location]:
        """Nobody needs to know."""
        raise AssertionError("these blocks lie nowhere")

    def fetch_any(self, numbers: Iterable[int]) -> Iterator[Batch]:
        return self.fetch(numbers)

    def fetch(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """See Blocks."""
        for number in numbers:
            yield [(number, self._load(number))]

    def _load(self, number: int) -> Buffer:
        assert self.held.wait(20)
        time.sleep(self.delay)
        self.loads[number] += 1
        if number not in self.blocks:
            raise MissingPack(Layout(Path("/store")).packs / f"{number}")
        return self.blocks[number]

    def close(self) -> None:
        """See Blocks."""
        self.closed += 1


class PackedSource:
    """`blocks` by number, in the packs of a small store; coded as the policies say in turns.

    `fetched` are those that were read by whoever opened it: no other process did.
    """

    def __init__(
        self,
        folder: Path,
        blocks: Mapping[int, bytes],
        policies: Sequence[PolicyName] = ("balanced",),
        per_pack: int = 1,
    ) -> None:
        self.blocks = blocks
        self.layout = Layout(folder)
        self.located: dict[int, Location] = {}
        self.fetched: list[int] = []
        self.opened = self.closed = 0
        folder.mkdir()
        make_folders(self.layout)
        describe(self.layout)
        encoders = [Encoder(policy) for policy in policies]
        numbers = iter(blocks)
        while part := list(islice(numbers, per_pack)):
            coded = []
            for number in part:
                raw = blocks[number]
                block = encoders[number % len(encoders)].encode(memoryview(raw))
                payload = bytes(block.payload)
                coded.append(StoredBlock(block_id(raw), Kind.DATA, block.codec, len(raw), payload))
            self._write(part, coded)

    def _write(self, numbers: Sequence[int], coded: Sequence[StoredBlock]) -> None:
        writer = PackWriter(self.layout)
        writer.append(coded)
        by_id = dict(zip((block.id for block in coded), numbers, strict=True))
        for pack in writer.finish():
            for identity, offset, size, raw, codec, _, _ in read_index(
                self.layout.pack(pack)
            ).tolist():
                at = Location(identity, pack, offset, size, raw, codec)
                self.located[by_id[at.id]] = at

    def locate(self, numbers: Sequence[int]) -> list[Location]:
        """Where these blocks lie."""
        return [self.located[number] for number in numbers]

    def open(self) -> "PackedBlocks":
        """See BlockSource."""
        self.opened += 1
        return PackedBlocks(self)


class PackedBlocks:
    """See Blocks."""

    def __init__(self, source: PackedSource) -> None:
        self._source = source
        self._reader = BlockReader(source.layout)

    def fetch_any(self, numbers: Iterable[int]) -> Iterator[Batch]:
        return self.fetch(numbers)

    def fetch(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """See Blocks."""
        for number in numbers:
            self._source.fetched.append(number)
            for raws in self._reader.read_batches(self._source.locate([number])):
                yield [(number, raw) for raw in raws]

    def close(self) -> None:
        """See Blocks."""
        self._reader.close()
        self._source.closed += 1


def slow_reader(monkeypatch: pytest.MonkeyPatch, delay: float) -> None:
    """Blocks come one at a time, and late, in every process that is started from here on."""
    read_batches = BlockReader.read_batches

    def slowly(self: BlockReader, locations: Sequence[Location]) -> Iterator[list[Buffer]]:
        for location in locations:
            time.sleep(delay)
            yield from read_batches(self, [location])

    monkeypatch.setattr(BlockReader, "read_batches", slowly)


Source = FakeSource | PackedSource


def segments(rows: Sequence[tuple[int, int, int, int]]) -> Columns:
    """Lazy anonymous memory: (address, pages, block or ZERO, offset in pages)."""
    table = np.zeros(len(rows), SEGMENT_DTYPE)
    for i, (address, pages, block, offset) in enumerate(rows):
        table[i] = (address, pages * PAGE, block, offset * PAGE, True, True)
    return table


def layout(start: int) -> Rows:
    """16 pages of each block, block 1 twice, 16 zero pages, a hole of 8 pages, half of block 7."""
    rows = [(start + i * BLOCK_PAGES * PAGE, BLOCK_PAGES, i, 0) for i in range(7)]
    rows.append((start + 7 * BLOCK_PAGES * PAGE, BLOCK_PAGES, ZERO, 0))
    rows.append((start + 8 * BLOCK_PAGES * PAGE, BLOCK_PAGES, 1, 0))
    rows.append((start + (9 * BLOCK_PAGES + 8) * PAGE, 8, 7, 4))
    return rows


PAGES = 10 * BLOCK_PAGES


def wanted(
    rows: Rows, start: int, total: int = PAGES, blocks: Mapping[int, bytes] = BLOCKS
) -> list[str]:
    """The digest of each page."""
    found = [ZEROS] * total
    for address, pages, block, offset in rows:
        if block != ZERO:
            for i in range(pages):
                content = blocks[block][(offset + i) * PAGE : (offset + i + 1) * PAGE]
                found[(address - start) // PAGE + i] = digest(content)
    return found


class Served:
    """A fill at work, with its events read until it is closed."""

    def __init__(self, fill: Fill, plan: Plan, spaces: list[Space], fillers: Fillers) -> None:
        self.fill = fill
        self.plan = plan
        self.watched = spaces
        self.fillers = fillers
        self.forked: list[int] = []

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
            self.forked.append(message.a)
            self.watched.append(self.fill.fork(space, message.a))
        elif message.event == uffd.REMAP:
            space.move(message.a, message.b, message.c)
        else:
            space.discard(message.a, message.b)

    def ask(self, puppet: Puppet, order: str, *numbers: int) -> Any:
        """An order that takes events or faults to be answered."""
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(puppet.ask(order, *numbers)))
        thread.start()
        self.pump(lambda: not thread.is_alive())
        thread.join()
        return answers[0]

    def finish(self) -> None:
        """Until all is filled. Every byte counts once, whoever put it in."""
        self.pump(self.fill.filled.is_set)
        assert self.fill.filled_bytes == self.plan.bytes


@contextmanager
def served(
    puppets: Mapping[int, Puppet],
    rows: Mapping[int, Rows],
    source: Source,
    *,
    workers: int = 2,
    ahead: bool = True,
    registered: bool = True,
    first: Sequence[int] | None = None,
    fillers: Fillers | None = None,
    start: bool = True,
    more: Callable[[Fill], list[Space]] = lambda _: [],
) -> Iterator[Served]:
    """A fill of these processes, started. `fillers` fill it; None: as many as `workers` if they
    can, which have to know where blocks lie. `first` are units that come before others."""
    lazy = {pid: segments(rows[pid]) for pid in puppets}
    plan = Plan(list(puppets), lazy, max(source.blocks, default=0) + 1)
    order = plan.order(None if first is None else np.array(first, np.int64)) if ahead else None
    fill = Fill(plan, source, order, 1 if ahead else workers)
    if fillers is None:
        fillers = Fillers()
        if ahead and isinstance(source, PackedSource):
            fillers.start(source.layout, workers)
    if ahead:
        fill.fill_by(fillers, source.locate)
    spaces = [fill.add_space(task, puppet.fd) for task, puppet in enumerate(puppets.values())]
    spaces += more(fill)
    if registered:
        fill.in_place()
    if start:
        fill.start()
    at_work = Served(fill, plan, spaces, fillers)
    try:
        yield at_work
    finally:
        if isinstance(source, FakeSource):
            source.held.set()
        fill.stop()
        for fd in at_work.forked:
            os.close(fd)
        assert source.opened == source.closed


__all__ = [
    "BLOCKS",
    "BLOCK_PAGES",
    "PAGES",
    "ZERO",
    "ZEROS",
    "FakeSource",
    "PackedSource",
    "Rows",
    "Served",
    "Source",
    "layout",
    "noise",
    "segments",
    "served",
    "slow_reader",
    "wanted",
]
