"""What one grain of a file looks like: is it zero, and may a block end after it?

Fingerprints decide where blocks end. They never decide identity: that is BLAKE3 over the block.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# Content-defined blocks of 256 KiB on average. Smaller ones find a little more to share and cost
# more metadata; see docs/format.md, "Chunking".
AVERAGE_BLOCK = 256 << 10
MIN_BLOCK = 64 << 10
MAX_BLOCK = 1 << 20

# A shorter zero run stays inside its block, where it compresses to nothing: blocks don't splinter.
MIN_ZERO_RUN = 64 << 10

_WORD = 8
_MASK64 = (1 << 64) - 1


def _splitmix64(count: int) -> list[int]:
    """The first `count` outputs of splitmix64 with seed 0 (Steele, Lea, Flood, OOPSLA 2014)."""
    state, out = 0, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        out.append(z ^ (z >> 31))
    return out


WEIGHTS: NDArray[np.uint64] = np.array(_splitmix64(512), dtype=np.uint64) | np.uint64(1)
"""Fingerprint weights, 512 odd 64-bit numbers; a grain of n words uses the first n."""


@dataclass(frozen=True, slots=True)
class Grain:
    """The unit on which a file is cut. All limits are in grains, `size` in bytes."""

    size: int

    @property
    def words(self) -> int:
        return self.size // _WORD

    @property
    def min_block(self) -> int:
        return MIN_BLOCK // self.size

    @property
    def max_block(self) -> int:
        return MAX_BLOCK // self.size

    @property
    def min_zero_run(self) -> int:
        return MIN_ZERO_RUN // self.size

    @property
    def cut_mask(self) -> np.uint64:
        """A block may end after a grain whose mixed fingerprint has none of these bits."""
        return np.uint64(AVERAGE_BLOCK // self.size - 1)


PAGES = Grain(4096)
"""Memory: content moves by whole pages."""

BYTES = Grain(512)
"""Everything else: tar archives move by 512 bytes, and so do most file formats on disk."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What `scan` saw, one entry a grain."""

    zero: NDArray[np.bool_]
    """Every byte is zero."""

    cut: NDArray[np.bool_]
    """A block may end after this grain. Never true of a zero grain."""

    mixed: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """The mixed fingerprint of the grain, or nothing where nobody needs it."""


def mix(fingerprints: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spreads every bit of a fingerprint over its low bits, which decide cuts."""
    mixed = fingerprints ^ (fingerprints >> np.uint64(29))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def fingerprints(window: NDArray[np.uint8], grain: Grain) -> NDArray[np.uint64]:
    """The fingerprint of each grain, unmixed. That of a zero grain is 0, and of few others."""
    words = window.view(np.uint64).reshape(-1, grain.words)
    # einsum runs at twice the speed of `@` on integers.
    found: NDArray[np.uint64] = np.einsum("ij,j->i", words, WEIGHTS[: grain.words])
    return found


def scan(window: NDArray[np.uint8], grain: Grain) -> Marks:
    """Looks at a window of whole grains (uint8, contiguous, length a multiple of grain.size).

    Raises ValueError for a window that isn't.
    """
    words = window.view(np.uint64).reshape(-1, grain.words)
    found = fingerprints(window, grain)
    # The few others that have the fingerprint of a zero grain are told apart by a look.
    zero = found == 0
    suspects = np.flatnonzero(zero)
    if len(suspects) == len(words):
        zero[:] = ~words.any(axis=1)
    elif len(suspects):
        zero[suspects] = ~_any_by_runs(words, suspects)
    mixed = mix(found)
    cut = (mixed & grain.cut_mask) == 0
    cut &= ~zero
    return Marks(zero, cut, mixed)


def _any_by_runs(words: NDArray[np.uint64], suspects: NDArray[np.intp]) -> NDArray[np.bool_]:
    """`words[suspects].any(axis=1)` without copying runs of neighbours out first."""
    breaks = np.flatnonzero(np.diff(suspects) != 1) + 1
    out = np.empty(len(suspects), dtype=np.bool_)
    edges = [0, *breaks.tolist(), len(suspects)]
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        start = int(suspects[first])
        out[first:last] = words[start : start + last - first].any(axis=1)
    return out
