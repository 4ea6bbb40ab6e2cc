"""Blocks that lie in memory, for whoever asks a BlockSource; they can be slow, or missing.

And a layout of memory that is made of such blocks.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from puppet import PAGE, digest

from icefloe.capture.blocks import Batch
from icefloe.capture.images import Columns
from icefloe.capture.memory import SEGMENT_DTYPE
from icefloe.durable import Buffer
from icefloe.errors import MissingPack
from icefloe.store.layout import Layout
from icefloe.store.manifest import ZERO
from icefloe.store.reader import Location

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


def wanted(rows: Rows, start: int) -> list[str]:
    """The digest of each page."""
    found = [ZEROS] * PAGES
    for address, pages, block, offset in rows:
        if block != ZERO:
            for i in range(pages):
                content = BLOCKS[block][(offset + i) * PAGE : (offset + i + 1) * PAGE]
                found[(address - start) // PAGE + i] = digest(content)
    return found


__all__ = [
    "BLOCKS",
    "BLOCK_PAGES",
    "PAGES",
    "ZERO",
    "ZEROS",
    "FakeSource",
    "Rows",
    "layout",
    "segments",
    "wanted",
]
