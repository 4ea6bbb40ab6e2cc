"""Page-exact deduplication: what of a file stands in the image before it, page by page.

Blocks that are cut by content are new as a whole when one of their pages is. Where the image that
came before is known (it is named, or has the same name), what is unknown is laid beside it and
compared byte for byte; extents then point at the pages that are equal, and only the rest is
stored. Nothing is decided by a fingerprint. See docs/format.md, "Page-exact deduplication".
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from icefloe.capture.blocks import Blocks, StoreSource, read_extents, with_zeros
from icefloe.capture.images import PAGE
from icefloe.catalog import LocalStore
from icefloe.chunker import PAGES, fingerprints
from icefloe.durable import Buffer
from icefloe.errors import Corrupt
from icefloe.ids import BlockId, IdPrefix, Name
from icefloe.store.manifest import ZERO, Extents, FileKind, Manifest

# A block is pointed into only when this share of it or more is used, and what is read for all of
# that may be at most this much more than what it is used for. Otherwise restores would read ever
# more blocks for ever fewer pages, generation by generation.
MIN_USE = 0.25
MAX_AMPLIFICATION = 1.5

NOWHERE = -1

# How far away to search for what is not where it was, and how many pages prove it.
_REACH = 512 * PAGE
MIN_FOUND = 8


@dataclass(frozen=True, slots=True)
class Pages:
    """For each page of a stretch, where the parent has it: block (NOWHERE) and offset in it."""

    block: NDArray[np.int64]
    offset: NDArray[np.int64]

    def __getitem__(self, part: slice) -> "Pages":
        """Those of a part of it."""
        return Pages(self.block[part], self.offset[part])


def join(parts: Sequence[Pages]) -> Pages:
    """Several stretches, one behind the other."""
    return Pages(
        np.concatenate([part.block for part in parts]),
        np.concatenate([part.offset for part in parts]),
    )


ParentChoice: TypeAlias = Name | IdPrefix | Literal["none"] | None
"""What a user says: this image, none, or nothing."""


def open_parent(store: LocalStore, name: Name, parent: ParentChoice) -> "Parent | None":
    """`parent`, or without one the latest image of the same name with any tag, if there is one.

    Raises ImageNotFound, UsageError or Corrupt.
    """
    if parent == "none":
        return None
    if parent is not None:
        return Parent(store, store.catalog.resolve(parent))
    named = store.catalog.names()
    images = {image for known, image in named.items() if known.partition(":")[0] == name.name}
    rows = [row for image in images if (row := store.catalog.image(image)) is not None]
    if not rows:
        return None
    try:
        return Parent(store, max(rows, key=lambda row: row.created).id)
    except Corrupt:  # it was not asked for, and what comes now is whole without it
        return None


class Parent:
    """The image that others are compared with. Threads share it; each opens blocks of its own."""

    def __init__(self, store: LocalStore, image: BlockId) -> None:
        """Raises Corrupt."""
        self.image = image
        self.manifest: Manifest = store.manifest(image)
        self.source = StoreSource(store, self.manifest)
        self.budget = Budget(self.manifest.blocks["length"])
        self._numbers = {
            file.path: number
            for number, file in enumerate(self.manifest.files)
            if file.kind is FileKind.REGULAR
        }

    def file(self, path: str) -> "ParentFile | None":
        """The file of this path, if it consists of whole pages."""
        number = self._numbers.get(path)
        return None if number is None else self.file_of(number)

    def file_of(self, number: int) -> "ParentFile | None":
        """The file of this number, if there is one and it consists of whole pages."""
        if number >= len(self.manifest.files):
            return None
        extents = self.manifest.extents_of(number)
        whole = (extents["length"][:-1] % PAGE == 0).all()
        return ParentFile(self.manifest, extents, number) if len(extents) and whole else None

    def id(self, number: int) -> BlockId:
        """The id of one of its blocks."""
        return BlockId(self.manifest.blocks["id"][number].tobytes())

    def length(self, number: int) -> int:
        """The raw length of one of its blocks."""
        return int(self.manifest.blocks["length"][number])


class ParentFile:
    """A file of the parent."""

    def __init__(self, manifest: Manifest, extents: Extents, number: int = 0) -> None:
        self.number = number
        self._lengths = manifest.blocks["length"]
        self._extents = extents
        self._ends = np.cumsum(extents["length"], dtype=np.int64)
        self._starts = self._ends - extents["length"].astype(np.int64)
        data = np.flatnonzero(extents["block"] != ZERO)
        whole = data[extents["length"][data] == self._lengths[extents["block"][data]]]
        ids = np.ascontiguousarray(manifest.blocks["id"][extents["block"][whole]])
        prefixes = ids.view(np.uint64).reshape(-1, 4)[:, 0]
        order = np.argsort(prefixes, kind="stable")
        self._prefixes, self._positions = prefixes[order], self._starts[whole][order]

    def positions(self, ids: Sequence[BlockId]) -> list[int]:
        """Where whole blocks stand in the file, NOWHERE for those that don't. A hint."""
        wanted = np.frombuffer(b"".join(ids), np.uint64).reshape(-1, 4)[:, 0]
        at = np.searchsorted(self._prefixes, wanted)
        inside = at < len(self._prefixes)
        at[~inside] = 0
        found = np.full(len(ids), NOWHERE, np.int64)
        if len(self._prefixes):
            hits = inside & (self._prefixes[at] == wanted)
            found[hits] = self._positions[at[hits]]
        numbers: list[int] = found.tolist()
        return numbers

    def compare(self, blocks: Blocks, stretch: memoryview, position: int) -> Pages:
        """Which pages of a stretch equal those that the file has from `position` on."""
        count = len(stretch) // PAGE
        block = np.full(count, NOWHERE, np.int64)
        offset = np.zeros(count, np.int64)
        low = max(position, 0)
        high = min(position + count * PAGE, int(self._ends[-1]) // PAGE * PAGE)
        if low < high:
            part = self._cut(low, high)
            pages = slice((low - position) // PAGE, (high - position) // PAGE)
            equal = _equal(blocks, part, stretch[pages.start * PAGE : pages.stop * PAGE])
            counts = (part["length"] // PAGE).astype(np.int64)
            starts = np.cumsum(counts) - counts
            within = np.arange(counts.sum()) - np.repeat(starts, counts)
            owner = np.repeat(part["block"], counts).astype(np.int64)
            equal &= owner != ZERO
            block[pages][equal] = owner[equal]
            offset[pages][equal] = (np.repeat(part["offset"], counts) + within * PAGE)[equal]
        return Pages(block, offset)

    def search(self, blocks: Blocks, stretch: memoryview, position: int) -> int | None:
        """How much further than `position` the file has most of a stretch; None if nowhere near.

        By the fingerprints of its first pages: whoever uses it compares.
        """
        stretch = stretch[:_REACH]
        low = max(position - _REACH, 0) // PAGE * PAGE
        high = min(position + len(stretch) + _REACH, int(self._ends[-1])) // PAGE * PAGE
        if low >= high:
            return None
        try:
            pieces = with_zeros(read_extents(blocks, self._cut(low, high)))
            content = b"".join(bytes(piece) for piece in pieces)
        except Corrupt:
            return None
        theirs, ours = _fingerprints(content), _fingerprints(stretch)
        order = np.argsort(theirs)
        at = np.minimum(np.searchsorted(theirs, ours, sorter=order), len(order) - 1)
        here = np.flatnonzero((theirs[order[at]] == ours) & (ours != 0))
        shifts, counts = np.unique(order[at[here]] - here, return_counts=True)
        if not len(counts) or counts.max() < MIN_FOUND:
            return None
        return int(shifts[counts.argmax()]) * PAGE + low - position

    def _cut(self, low: int, high: int) -> Extents:
        """The extents of the bytes [low, high)."""
        first = int(np.searchsorted(self._ends, low, side="right"))
        last = int(np.searchsorted(self._starts, high))
        part = self._extents[first:last].copy()
        skipped = low - int(self._starts[first])
        part["offset"][0] += skipped if part["block"][0] != ZERO else 0
        part["length"][0] -= skipped
        part["length"][-1] -= int(self._ends[last - 1]) - high
        return part


class Budget:
    """Which of the parent's blocks an image may point into. Threads share it.

    A block supplies MIN_USE of its own pages or more, and all that is read to restore the image is
    at most MAX_AMPLIFICATION of what it consists of.
    """

    def __init__(self, lengths: NDArray[np.uint32]) -> None:
        """`lengths` of the parent's blocks, in bytes."""
        self._pages = -(-lengths.astype(np.int64) // PAGE)
        self._taken = np.zeros(len(lengths), np.bool_)
        self._read = self._used = 0
        self._lock = threading.Lock()

    def use(self, count: int) -> None:
        """So many bytes are read and used: those of blocks that are used whole."""
        with self._lock:
            self._read += count // PAGE
            self._used += count // PAGE

    def spend(self, pages: Pages, zero: NDArray[np.bool_] | None = None) -> Pages:
        """Leaves out the pages of blocks that would not be worth reading. Zero pages cost nothing.

        All others are read and used from now on, wherever they will be.
        """
        total = len(pages.block) - (0 if zero is None else int(zero.sum()))
        there = np.flatnonzero(pages.block != NOWHERE)
        bases, which, uses = np.unique(pages.block[there], return_inverse=True, return_counts=True)
        with self._lock:
            price = np.where(self._taken[bases], 0, self._pages[bases])
            worth = (price == 0) | (uses >= MIN_USE * price)
            # The best ones first, as far as the budget goes. A page that is not found is read, too.
            order = np.argsort(np.where(worth, price / uses, np.inf), kind="stable")
            left = total - np.cumsum(uses[order])
            read = self._read + np.cumsum(price[order]) + left
            fits = read <= MAX_AMPLIFICATION * (self._used + total)
            count = min(int(worth.sum()), int(np.flatnonzero(fits)[-1]) + 1 if fits.any() else 0)
            chosen = order[:count]
            self._taken[bases[chosen]] = True
            self._read += int(price[chosen].sum()) + total - int(uses[chosen].sum())
            self._used += total
        keeps = np.zeros(len(bases), np.bool_)
        keeps[chosen] = True
        block = pages.block.copy()
        block[there[~keeps[which]]] = NOWHERE
        return Pages(block, pages.offset)


def _fingerprints(content: Buffer) -> NDArray[np.uint64]:
    return fingerprints(np.frombuffer(content, np.uint8), PAGES)


def _equal(blocks: Blocks, extents: Extents, stretch: memoryview) -> NDArray[np.bool_]:
    """Which pages of a stretch equal those of extents of the same length.

    Zero extents are equal to nothing, and so is what can't be read: it is stored anew.
    """
    equal = np.zeros(len(stretch) // PAGE, np.bool_)
    done = 0
    try:
        for piece, length in read_extents(blocks, extents):
            if piece is not None:
                ours = np.frombuffer(stretch[done : done + length], np.uint64).reshape(-1, 512)
                theirs = np.frombuffer(piece, np.uint64).reshape(-1, 512)
                equal[done // PAGE : (done + length) // PAGE] = (ours == theirs).all(axis=1)
            done += length
    except Corrupt:
        equal[done // PAGE :] = False
    return equal
