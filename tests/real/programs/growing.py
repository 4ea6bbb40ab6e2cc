"""A process that changes a known part of its memory when it is told to, and checks all of it.

    growing.py RECORD GOAL MIB

It begins with so many MiB. Each step adds a mapping and writes one run of pages anew, in another
place each time; nothing else is touched but the interpreter's own. It makes no step beyond the
number in the file GOAL, which has a fixed size, as RECORD has, so that CRIU may find it open.
"""

from __future__ import annotations

import mmap
import random
import sys
import time
import zlib

from record import RecordWriter

BLOCK = 1 << 20
RUN = 64 << 10
LOOK_SECONDS = 0.01


class Block:
    """A mapping of its own, and what must be in it."""

    def __init__(self, number: int) -> None:
        self.area = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.area[:] = random.Random(number).randbytes(BLOCK)
        self.sum = zlib.crc32(self.area)

    def write(self, noise: random.Random) -> None:
        """Writes a run of pages anew, somewhere."""
        start = noise.randrange(BLOCK // RUN) * RUN
        self.area[start : start + RUN] = noise.randbytes(RUN)
        self.sum = zlib.crc32(self.area)


def main(record_path: str, goal_path: str, mib: int) -> None:
    """Makes steps as far as the goal, whenever it moves."""
    record = RecordWriter(record_path)
    blocks = [Block(number) for number in range(mib)]
    step = 0
    while True:
        with open(goal_path) as file:
            goal = int(file.read())
        while step < goal:
            step += 1
            blocks.append(Block(mib + step))
            noise = random.Random(-step)
            noise.choice(blocks).write(noise)
            good = all(zlib.crc32(block.area) == block.sum for block in blocks)
            record.write(step, "grown-ok" if good else "grown-bad")
            if not good:
                sys.exit(1)
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
