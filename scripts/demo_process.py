"""The process that `make demo` checkpoints: a heap of random data, and a counter.

Usage: demo_process.py LOG MEGABYTES. Every tenth of a second it counts on, changes one page and
writes the count and whether its heap still has the checksum that it should have.
"""

import hashlib
import os
import sys
import time


def main() -> None:
    log, megabytes = sys.argv[1], int(sys.argv[2])
    heap = bytearray(os.urandom(megabytes << 20))
    digest = hashlib.sha256(heap).hexdigest()
    count = 0
    while True:
        intact = hashlib.sha256(heap).hexdigest() == digest
        with open(log, "a") as file:
            file.write(f"{count} {'memory intact' if intact else 'MEMORY DAMAGED'}\n")
        count += 1
        heap[(count * 4096) % len(heap)] ^= 0xFF
        digest = hashlib.sha256(heap).hexdigest()
        time.sleep(0.1)


if __name__ == "__main__":
    main()
