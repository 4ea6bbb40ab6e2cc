"""Cuts the reading of a checkpoint into windows, the units of work of `add`.

A window is a stretch of one large file, or a group of small ones: a few hundred tiny files
become one block, not a few hundred.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from icefloe.capture.source import ByteSource, Checkpoint, SourceFile, grain_of
from icefloe.chunker import MAX_BLOCK, CutStream, Grain
from icefloe.store.manifest import ImageFile

# Large enough that what happens once a window doesn't show, small enough to have two a core.
WINDOW_BYTES = 4 << 20

# Files under this are grouped.
SMALL_FILE = 64 << 10


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A large file that is being read; its windows share it."""

    file: ImageFile
    bytes: ByteSource
    grain: Grain
    cuts: CutStream


@dataclass(frozen=True, slots=True)
class Window:
    """`length` bytes at `offset` of a large file."""

    sequence: int
    open: OpenFile
    offset: int
    length: int

    @property
    def final(self) -> bool:
        return self.offset + self.length == self.open.file.size


@dataclass(frozen=True, slots=True)
class Group:
    """Small files, whole, one behind the other: at most a block."""

    sequence: int
    files: tuple[ImageFile, ...]
    content: bytes


def windows(checkpoint: Checkpoint, entries: list[ImageFile]) -> Iterator[Window | Group]:
    """Windows in the order of reading; collects every entry that passes into `entries`.

    Small files are read here; a group comes when it is full, or at the end.
    """
    sequence = 0
    group: list[ImageFile] = []
    content = bytearray()
    for source in checkpoint.files():
        entries.append(source.file)
        if source.open is None:
            continue
        if source.file.size < SMALL_FILE:
            if len(content) + source.file.size > MAX_BLOCK:
                yield Group(sequence, tuple(group), bytes(content))
                sequence, group, content = sequence + 1, [], bytearray()
            group.append(source.file)
            content += _read_whole(source)
            continue
        grain = grain_of(source.file)
        opened = OpenFile(source.file, source.open(), grain, CutStream(grain))
        for offset in range(0, source.file.size, WINDOW_BYTES):
            length = min(WINDOW_BYTES, source.file.size - offset)
            yield Window(sequence, opened, offset, length)
            sequence += 1
    if group:
        yield Group(sequence, tuple(group), bytes(content))


def _read_whole(source: SourceFile) -> bytearray:
    assert source.open is not None
    content = bytearray(source.file.size)
    opened = source.open()
    try:
        opened.read_into(0, memoryview(content))
    finally:
        opened.close()
    return content
