"""The chunking rules of docs/format.md once more, in slow and obvious Python.

Shares no code with icefloe: the weights, the fingerprints and the cuts are computed by hand.
"""

import struct
from collections.abc import Sequence

MASK = (1 << 64) - 1

AVERAGE, MIN, MAX, ZERO_RUN = 262144, 65536, 1048576, 65536

Cut = tuple[int, int, bool]
"""Grains [start, end), and whether they are a zero run."""


def splitmix64(count: int, seed: int = 0) -> list[int]:
    """The first outputs of splitmix64, as its authors' C code has it."""
    out = []
    for i in range(1, count + 1):
        z = (seed + i * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


WEIGHTS = [number | 1 for number in splitmix64(512)]


def noise(length: int, seed: int) -> bytes:
    """Bytes without structure, the same for ever; no zero among them. `length` any number."""
    words = splitmix64(-(-length // 8), seed * 1_000_003)
    raw = struct.pack(f"<{len(words)}Q", *words)[:length]
    return raw.replace(b"\0", b"\1")


def fingerprint(grain: bytes) -> int:
    """The weighted sum of a grain's 64-bit words."""
    words: tuple[int, ...] = struct.unpack(f"<{len(grain) // 8}Q", grain)
    return sum(w * weight for w, weight in zip(words, WEIGHTS, strict=False)) & MASK


def mixed(value: int) -> int:
    """A fingerprint with its bits spread."""
    m = value ^ (value >> 29)
    m = (m * 0xBF58476D1CE4E5B9) & MASK
    return m ^ (m >> 32)


def look(content: bytes, size: int) -> tuple[list[bool], list[bool]]:
    """For each grain of `size` bytes: is it zero, and may a block end after it?"""
    grains = [content[i : i + size] for i in range(0, len(content), size)]
    zero = [not any(grain) for grain in grains]
    cut = [any(grain) and mixed(fingerprint(grain)) % (AVERAGE // size) == 0 for grain in grains]
    return zero, cut


def pieces(zero: Sequence[bool], cut: Sequence[bool], size: int) -> list[Cut]:
    """The zero runs and blocks of a whole file."""
    out: list[Cut] = []
    start = 0
    for run_start, run_end in _zero_runs(zero):
        if (run_end - run_start) * size >= ZERO_RUN:
            out += _blocks(start, run_start, cut, size)
            out.append((run_start, run_end, True))
            start = run_end
    return out + _blocks(start, len(zero), cut, size)


def _zero_runs(zero: Sequence[bool]) -> list[tuple[int, int]]:
    runs, start = [], None
    for i, flag in enumerate([*zero, False]):
        if flag and start is None:
            start = i
        if not flag and start is not None:
            runs.append((start, i))
            start = None
    return runs


def _blocks(start: int, end: int, cut: Sequence[bool], size: int) -> list[Cut]:
    out: list[Cut] = []
    for i in range(start, end):
        length = (i + 1 - start) * size
        if (length >= MIN and cut[i]) or length == MAX or i + 1 == end:
            out.append((start, i + 1, False))
            start = i + 1
    return out
