"""Which bytes of which packs to ask for, given blocks in the order they are wanted in. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from icefloe.ids import PackId
from icefloe.store.reader import Location

# Gaps of at most this are read through: a request costs more.
MAX_GAP = 256 << 10


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, end) of a pack, and the blocks in them by offset, each with its number."""

    pack: PackId
    blocks: tuple[tuple[int, Location], ...]

    @property
    def start(self) -> int:
        """Where the first block begins."""
        return self.blocks[0][1].offset

    @property
    def end(self) -> int:
        """Where the last block ends."""
        return self.blocks[-1][1].end


def windows(
    wanted: Iterable[tuple[int, Location]], first: int, most: int
) -> Iterator[list[tuple[int, Location]]]:
    """Cuts what is wanted into pieces of `first` stored bytes, growing to `most`.

    The sooner something is wanted, the less comes with it.
    """
    window: list[tuple[int, Location]] = []
    size, limit = 0, first
    for number, at in wanted:
        window.append((number, at))
        size += at.stored
        if size >= limit:
            yield window
            window, size, limit = [], 0, min(2 * limit, most)
    if window:
        yield window


def ranges(window: Sequence[tuple[int, Location]], longest: int, most_raw: int) -> list[Range]:
    """What to ask for to get a window: each block once, neighbours in a pack together.

    A range has at most `longest` bytes and `most_raw` raw bytes of blocks, unless a single block
    has more. Packs come in the order in which the window first names them.
    """
    packs: dict[PackId, list[tuple[int, Location]]] = {}
    for number, at in window:
        packs.setdefault(at.pack, []).append((number, at))
    return [
        Range(pack, part)
        for pack, blocks in packs.items()
        for part in _parts(sorted(blocks, key=lambda each: each[1].offset), longest, most_raw)
    ]


def _parts(
    blocks: Sequence[tuple[int, Location]], longest: int, most_raw: int
) -> Iterator[tuple[tuple[int, Location], ...]]:
    part: list[tuple[int, Location]] = []
    raw = 0
    for number, at in blocks:
        if part:
            start, before = part[0][1].offset, part[-1][1].end
            apart = at.offset < before or at.offset - before > MAX_GAP
            if apart or at.end - start > longest or raw + at.raw > most_raw:
                yield tuple(part)
                part, raw = [], 0
        part.append((number, at))
        raw += at.raw
    if part:
        yield tuple(part)
