"""Cut points, zero runs and fingerprints: pure functions over buffers, no I/O.

A file is a row of grains (4096 bytes in page data, 512 elsewhere). `scan` looks at the grains of
a window, `CutStream` turns what it saw into zero runs and blocks. docs/format.md, "Chunking",
is the specification.
"""

from icefloe.chunker.cuts import CutStream, Piece, runs
from icefloe.chunker.grains import (
    BYTES,
    MAX_BLOCK,
    PAGES,
    WEIGHTS,
    Grain,
    Marks,
    fingerprints,
    mix,
    scan,
)

__all__ = [
    "BYTES",
    "MAX_BLOCK",
    "PAGES",
    "WEIGHTS",
    "CutStream",
    "Grain",
    "Marks",
    "Piece",
    "fingerprints",
    "mix",
    "runs",
    "scan",
]
