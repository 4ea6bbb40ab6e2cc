"""A process that touches the pages of a large area in an order that is known, one by one.

    toucher.py RECORD

Every step is one pass over the area in a pseudo-random order; between two touches it computes a
little, as a program would. Each page holds its own number, which is checked.
"""

from __future__ import annotations

import mmap
import random
import struct
import sys
import time

from record import RecordWriter

PAGE = 4096
PAGES = 16384  # 64 MiB
TOUCHES = 400  # of blocks of 256 KiB on average there are about as many
NUMBER = struct.Struct("<Q")
PAUSE_SECONDS = 0.0005


def main(record_path: str) -> None:
    """Fills the area once, then makes passes for ever; the first is made after the dump."""
    record = RecordWriter(record_path)
    area = mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    noise = random.Random(1)
    for page in range(PAGES):
        area[page * PAGE : (page + 1) * PAGE] = NUMBER.pack(page) + noise.randbytes(PAGE - 8)
    order = list(range(0, PAGES, PAGES // TOUCHES))
    random.Random(2).shuffle(order)
    step = 0
    while True:
        good = True
        for page in order:
            good &= NUMBER.unpack_from(area, page * PAGE) == (page,)
            time.sleep(PAUSE_SECONDS)
        step += 1
        record.write(step, "touched-ok" if good else "touched-bad")
        if not good:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
