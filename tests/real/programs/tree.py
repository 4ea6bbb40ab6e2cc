"""A parent and two children that count together over pipes and over shared memory.

    tree.py RECORD

In each round the parent sends the number of the round to a child, which checks that it follows
the last one, adds it to the memory that all three share, and sends it back. A byte lost in a
pipe, a page lost of the shared memory or a process restored from another moment than the others
breaks the count at once.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time

from record import RecordWriter

CHILDREN = 2
PAGE = 4096
SHARED_PAGES = 1024  # 4 MiB: the first page holds the counters, the rest what was written
STEP_SECONDS = 0.02
NUMBER = struct.Struct("<Q")


def pattern(step: int) -> bytes:
    """A page that only this step writes."""
    return NUMBER.pack(step * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) * (PAGE // NUMBER.size)


def page_of(step: int) -> int:
    """Where in shared memory the step's page lies."""
    return (1 + step % (SHARED_PAGES - 1)) * PAGE


def receive(pipe: int) -> int:
    """One number from a pipe; the other side's end is ours too."""
    data = os.read(pipe, NUMBER.size)
    if len(data) != NUMBER.size:
        sys.exit(0)
    (number,) = NUMBER.unpack(data)
    return int(number)


def child(which: int, shared: mmap.mmap, inbox: int, outbox: int) -> None:
    """Counts along with the parent, in its own memory and in the shared one."""
    last = 0
    while True:
        step = receive(inbox)
        (counted,) = NUMBER.unpack_from(shared, which * NUMBER.size)
        good = step == last + 1 and counted == last
        last = step
        NUMBER.pack_into(shared, which * NUMBER.size, step)
        if which == step % CHILDREN:
            shared[page_of(step) : page_of(step) + PAGE] = pattern(step)
        os.write(outbox, NUMBER.pack(step if good else 0))


def start_child(which: int, shared: mmap.mmap) -> tuple[int, int]:
    """Forks a child; returns the ends of the pipes to it and from it."""
    to_child, from_parent = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(to_child[1])
        os.close(from_parent[0])
        child(which, shared, to_child[0], from_parent[1])
    os.close(to_child[0])
    os.close(from_parent[1])
    return to_child[1], from_parent[0]


def shared_is_right(shared: mmap.mmap, step: int) -> bool:
    """Whether the counters and every page written since the start are as they should be."""
    counters = [NUMBER.unpack_from(shared, which * NUMBER.size)[0] for which in range(CHILDREN)]
    written = range(max(1, step - SHARED_PAGES + 2), step + 1)
    return counters == [step] * CHILDREN and all(
        shared[page_of(past) : page_of(past) + PAGE] == pattern(past) for past in written
    )


def main(record_path: str) -> None:
    """Runs rounds for ever and writes after each whether all three agree."""
    record = RecordWriter(record_path)
    shared = mmap.mmap(-1, SHARED_PAGES * PAGE)  # anonymous and MAP_SHARED
    pipes = [start_child(which, shared) for which in range(CHILDREN)]
    step = 0
    while True:
        step += 1
        for outbox, _ in pipes:
            os.write(outbox, NUMBER.pack(step))
        answers = [receive(inbox) for _, inbox in pipes]
        good = answers == [step] * CHILDREN and shared_is_right(shared, step)
        record.write(step, "counts-ok" if good else "counts-bad")
        if not good:
            sys.exit(1)
        time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
