"""A process whose heap grows and that checks every byte of it at every step.

    heap.py RECORD

RECORD is a file of fixed size, made beforehand (see `record.py`): CRIU refuses to restore a
process whose open files have another size than at the dump, so a log that grows would allow one
restore only.
"""

from __future__ import annotations

import random
import sys
import time
import zlib

from record import RecordWriter

BLOCK = 1 << 20
# Growth ends when the process has 3/8 more than at its start: however late a second dump is
# taken, the greater part of it was in the first.
BASE_BLOCKS, GROWN_BLOCKS = 16, 22
ZERO_BYTES = 4 << 20
STEP_SECONDS = 0.02


def block(number: int) -> bytes:
    """A block that compresses to nothing less and that no other block equals."""
    return random.Random(number).randbytes(BLOCK)


def main(record_path: str) -> None:
    """Grows by a block every other step and writes whether all of memory is as it was left."""
    record = RecordWriter(record_path)
    zeros = bytearray(ZERO_BYTES)
    for page in range(0, ZERO_BYTES, 4096):
        zeros[page] = 0  # touched, hence really there and dumped unless somebody notices
    blocks = [block(number) for number in range(BASE_BLOCKS)]
    sums = [zlib.crc32(data) for data in blocks]
    step = 0
    while True:
        step += 1
        if step % 2 == 0 and len(blocks) < GROWN_BLOCKS:
            blocks.append(block(len(blocks)))
            sums.append(zlib.crc32(blocks[-1]))
        good = [zlib.crc32(data) for data in blocks] == sums and not any(memoryview(zeros)[::4096])
        record.write(step, "checksum-ok" if good else "checksum-bad")
        if not good:
            sys.exit(1)
        time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
