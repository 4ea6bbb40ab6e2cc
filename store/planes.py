"""Byte planes: numbers of 2 or 4 bytes taken apart, so that bytes of the same rank stand together.

Of floating-point numbers the bytes with the exponent repeat and the others don't, which no codec
sees while they alternate (docs/format.md, "Codecs"). Any bytes come back bit for bit; whether they
are numbers decides only how small they get.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from icefloe.durable import Buffer

Width = Literal[2, 4]

# c * log2(c) for every count that a sample of at most this many bytes can have.
MAX_SAMPLE = 4096
_COUNTS = np.arange(MAX_SAMPLE + 1, dtype=np.float64)
_COUNT_LOG = _COUNTS * np.log2(np.maximum(_COUNTS, 1))

# What makes bytes of different rank different numbers.
_RANKS = np.arange(MAX_SAMPLE) % 4 * 256


def take(raw: Buffer, width: Width, rank: int, into: NDArray[np.uint8]) -> None:
    """One plane of the numbers in `raw`; rank 0 is the lowest. What is left at the end is in none.

    `into` has a byte for each whole number. Read from byte `rank` on, the plane's are the lowest
    bytes of numbers: one cast of what is nowhere aligned, which is five times as fast as copying
    every second byte.
    """
    count = min(len(into), (len(raw) - rank) // width)
    if count > 0:
        into[:count] = np.frombuffer(raw, f"<u{width}", count, rank)
    if 0 <= count < len(into):  # the last number has nothing behind it
        into[-1] = raw[(len(into) - 1) * width + rank]


def merge(planes: Sequence[Buffer], tail: Buffer, into: memoryview) -> None:
    """Puts together what `take` took apart, and the bytes that were left, as long as `into`."""
    width = len(planes)
    end = len(into) - len(tail)
    numbers = np.frombuffer(into[:end], f"<u{width}")
    highest, *others = (np.frombuffer(plane, np.uint8) for plane in reversed(planes))
    np.multiply(highest, 256, out=numbers, dtype=numbers.dtype)
    for plane in others[:-1]:
        np.add(numbers, plane, out=numbers)
        np.left_shift(numbers, 8, out=numbers)
    np.add(numbers, others[-1], out=numbers)
    into[end:] = tail


def costs(sample: Buffer) -> tuple[list[float], list[float]]:
    """What is left of each plane of 2-byte and of 4-byte numbers, as a share of its bytes.

    By the entropy of the plane in a sample of up to MAX_SAMPLE bytes (Shannon 1948), which is what
    Huffman coding comes close to. Small samples make it look smaller: by 0.02 for 1024 bytes.
    """
    size = len(sample) // 4
    ranked = np.frombuffer(sample, np.uint8, 4 * size) + _RANKS[: 4 * size]
    four = np.bincount(ranked, minlength=4 * 256).reshape(4, 256)
    counts = np.concatenate([four[:2] + four[2:], four])
    totals = np.array([2, 2, 1, 1, 1, 1]) * size
    shares = (np.log2(totals) - _COUNT_LOG.take(counts).sum(axis=1) / totals) / 8
    found: list[float] = shares.tolist()
    return found[:2], found[2:]
