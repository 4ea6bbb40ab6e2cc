"""Blocks that lie in memory, for whoever asks a BlockSource; they can be slow, or missing."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from puppet import PAGE

from icefloe.capture.blocks import Load
from icefloe.capture.images import Columns
from icefloe.capture.memory import SEGMENT_DTYPE
from icefloe.durable import Buffer
from icefloe.errors import MissingPack
from icefloe.store.layout import Layout
from icefloe.store.manifest import ZERO


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

    def fetch(self, numbers: Sequence[int]) -> Iterator[tuple[int, Load]]:
        """See Blocks."""
        for number in numbers:
            yield number, lambda number=number: self._load(number)  # type: ignore[misc]

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


__all__ = ["ZERO", "FakeSource", "segments"]
