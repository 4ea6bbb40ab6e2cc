"""The units of work of `add` and `capture`, and how a checkpoint on disk is cut into them.

A window is a stretch of one large file, or a group of small ones: a few hundred tiny files
become one block, not a few hundred.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from icefloe.capture.source import ByteSource, Checkpoint, SourceFile, grain_of
from icefloe.chunker import MAX_BLOCK, CutStream, Grain
from icefloe.chunker.grains import MIN_ZERO_RUN
from icefloe.store.manifest import ImageFile

# Large enough that what happens once a window doesn't show, small enough to have two a core.
WINDOW_BYTES = 4 << 20

# Files under this are grouped.
SMALL_FILE = 64 << 10

# What a window may leave undecided for the next one (see CutStream.pending).
CARRY_BYTES = MAX_BLOCK + MIN_ZERO_RUN


class Buffer:
    """A window, with room in front for what the window before it left undecided."""

    def __init__(self) -> None:
        self.bytes = memoryview(mmap.mmap(-1, CARRY_BYTES + WINDOW_BYTES))
        self.array = np.frombuffer(self.bytes, np.uint8)

    def window(self, length: int) -> memoryview:
        """The first `length` bytes of the window."""
        return self.bytes[CARRY_BYTES : CARRY_BYTES + length]


@dataclass(slots=True)
class OpenFile:
    """A large file that is being read; its windows share it.

    `carry` is what the last window that was cut left undecided.
    """

    path: str
    grain: Grain
    source: ByteSource | None = None
    """Where windows that come unread are read from."""
    carry: bytes = b""
    cuts: CutStream = field(init=False)

    def __post_init__(self) -> None:
        self.cuts = CutStream(self.grain)


@dataclass(frozen=True, slots=True)
class Window:
    """`length` bytes at `offset` of a large file, in `buffer` if they have been `read`."""

    sequence: int
    open: OpenFile
    offset: int
    length: int
    final: bool
    buffer: Buffer
    read: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Small files, whole, one behind the other: at most a block. Paths and sizes."""

    sequence: int
    files: Sequence[tuple[str, int]]
    content: bytes


class Windows(Protocol):
    """What there is to store, piece by piece."""

    def take(self, buffer: Buffer) -> Window | Group | None:
        """The next piece, None after the last; one thread at a time.

        `buffer` is given away for a window, which brings one along: the same, or another. By
        sequence numbers, every file's windows come in order.
        """

    def stop(self) -> None:
        """From any thread: nobody wants more, and a `take` that waits raises."""


class SmallFiles:
    """Collects small files until they fill a group."""

    def __init__(self) -> None:
        self._files: list[tuple[str, int]] = []
        self._content = bytearray()

    def full(self, size: int) -> bool:
        """Whether a file of this size has no room left."""
        return len(self._content) + size > MAX_BLOCK

    def add(self, path: str, content: bytes | bytearray) -> None:
        """Takes a file."""
        self._files.append((path, len(content)))
        self._content += content

    def empty(self, sequence: int) -> Group:
        """The group of what was collected."""
        group = Group(sequence, self._files, bytes(self._content))
        self._files, self._content = [], bytearray()
        return group

    def __bool__(self) -> bool:
        return bool(self._files)


class CheckpointWindows:
    """The windows of a checkpoint on disk; collects every entry that passes into `entries`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: list[ImageFile],
        pages: Sequence[str],
        first: int = 0,
    ) -> None:
        """`first`: the sequence number to start with."""
        self._pieces = _pieces(checkpoint, entries, pages, first)

    def take(self, buffer: Buffer) -> Window | Group | None:
        """See Windows. What must be read in order has been read."""
        make = next(self._pieces, None)
        return None if make is None else make(buffer)

    def stop(self) -> None:
        """See Windows: it never waits."""


def _pieces(
    checkpoint: Checkpoint, entries: list[ImageFile], pages: Sequence[str], sequence: int
) -> Iterator[Callable[[Buffer], Window | Group]]:
    """Pieces in the order of reading, each to be given a buffer.

    Small files are read here; a group comes when it is full, or at the end.
    """
    small = SmallFiles()
    for entry in checkpoint.files():
        file = entry.file
        entries.append(file)
        if entry.open is None:
            continue
        if file.size < SMALL_FILE:
            if small.full(file.size):
                group = small.empty(sequence)
                yield lambda buffer, group=group: group  # type: ignore[misc]
                sequence += 1
            small.add(file.path, _read_whole(entry))
            continue
        opened = OpenFile(file.path, grain_of(file.path, file.size, pages), entry.open())
        for offset in range(0, file.size, WINDOW_BYTES):
            length = min(WINDOW_BYTES, file.size - offset)
            final = offset + length == file.size
            yield partial(_window, sequence, opened, offset, length, final)
            sequence += 1
    if small:
        yield lambda buffer: small.empty(sequence)


def _window(
    sequence: int, opened: OpenFile, offset: int, length: int, final: bool, buffer: Buffer
) -> Window:
    assert opened.source is not None
    if opened.source.sequential:
        opened.source.read_into(offset, buffer.window(length))
    return Window(sequence, opened, offset, length, final, buffer, opened.source.sequential)


def _read_whole(entry: SourceFile) -> bytearray:
    assert entry.open is not None
    content = bytearray(entry.file.size)
    opened = entry.open()
    try:
        opened.read_into(0, memoryview(content))
    finally:
        opened.close()
    return content
