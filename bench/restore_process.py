"""The process that bench/restore.py checkpoints: it holds memory and keeps checking it.

    restore_process.py RECORD BYTES SEED

40 % of the memory is noise, as weights are, 20 % is zero, 40 % looks like a heap: pointers and
small numbers. Every step checks a few pages of each kind against sums taken at the start; SIGUSR1
asks for a check of all of them, and SIGUSR2 for a change of 2 % of them, and then such a check.
RECORD is one line of fixed size: step, time, full checks made, verdict.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
RECORD_BYTES = 128
PAGES_A_STEP = 4
STEP_SECONDS = 0.005
CHANGED = 0.02

# Filled piece by piece, so that making the memory takes little more than the memory.
PIECE_WORDS = 8 << 20

Words = NDArray[np.uint64]


def noise(rng: np.random.Generator, count: int) -> Words:
    """Words that don't compress."""
    return rng.integers(0, 1 << 63, count, dtype=np.uint64)


def heap(rng: np.random.Generator, count: int) -> Words:
    """Words as in the heap of an interpreter: half of them point to few places, others to many."""
    few = np.uint64(0x7F0000000000) + rng.integers(0, 1 << 32, 512, dtype=np.uint64)
    near = np.uint64(0x7F1000000000) + rng.integers(0, 1 << 16, count, dtype=np.uint64) * np.uint64(
        16
    )
    kind = rng.integers(0, 4, count, dtype=np.uint8)
    small = rng.integers(0, 256, count, dtype=np.uint64)
    return np.where(kind < 2, few[small % np.uint64(512)], np.where(kind == 2, small, near))


def filled(count: int, rng: np.random.Generator, kind: str) -> Words:
    """A part of the memory, all of it touched."""
    part = np.empty(count, np.uint64)
    for start in range(0, count, PIECE_WORDS):
        piece = part[start : start + PIECE_WORDS]
        if kind == "zero":
            piece[:] = 0
        else:
            piece[:] = (noise if kind == "noise" else heap)(rng, len(piece))
    return part


def sums(pages: Words) -> Words:
    """A sum for each page, in which every word counts differently."""
    weights = np.arange(1, PAGE // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    result: Words = np.einsum("ij,j->i", pages, weights | np.uint64(1))
    return result


def change(part: Words, expected: Words, rng: np.random.Generator) -> None:
    """Write one word into each of some pages, as a process does that runs on; their sums follow."""
    some = rng.choice(len(part), int(len(part) * CHANGED), replace=False)
    part[some, rng.integers(0, part.shape[1], len(some))] = noise(rng, len(some))
    expected[some] = sums(part[some])


def main(record: str, size: int, seed: int) -> None:
    """Makes the memory, then steps for ever."""
    rng = np.random.default_rng(seed)
    shares = (("noise", 0.4), ("zero", 0.2), ("heap", 0.4))
    parts = []
    for kind, share in shares:
        count = int(size * share) // PAGE * (PAGE // 8)
        parts.append(filled(count, rng, kind).reshape(-1, PAGE // 8))
    expected = [sums(part) for part in parts]
    fd = os.open(record, os.O_RDWR)
    step = full = asked = changes = 0

    def ask(number: int, frame: object) -> None:
        nonlocal asked, changes
        changes += number == signal.SIGUSR2
        asked += 1

    signal.signal(signal.SIGUSR1, ask)
    signal.signal(signal.SIGUSR2, ask)
    while True:
        step += 1
        good = True
        while changes:
            changes -= 1
            for part, want in zip(parts, expected, strict=True):
                change(part, want, rng)
        for part, want in zip(parts, expected, strict=True):
            some = rng.integers(0, len(part), PAGES_A_STEP)
            good &= bool((sums(part[some]) == want[some]).all())
        if full < asked:
            good &= all(
                bool((sums(part) == want).all()) for part, want in zip(parts, expected, strict=True)
            )
            full += 1
        line = f"{step} {time.time():.6f} {full} {'ok' if good else 'BAD'}"
        os.pwrite(fd, line.ljust(RECORD_BYTES - 1).encode() + b"\n", 0)
        if not good:
            sys.exit(1)
        time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
