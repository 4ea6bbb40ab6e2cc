"""The files that CRIU gets for a restore: those of the checkpoint, with pagemaps made to measure.

Pages that a door brings in by itself are named in the pagemap as lazy and stand in no pages
file; zero pages of private anonymous memory are not even named, where everything is read at
once. Everything else stands in the pages files, packed in the order of the pagemap. Both counts
of an entry are written, so CRIU 4.1 and 4.2 read it (criu/pagemap.c, criu/mem.c).
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from icefloe.capture import images, memory
from icefloe.capture.blocks import read_extents, with_zeros
from icefloe.capture.export import write_files
from icefloe.capture.images import LAZY, PRESENT, Columns
from icefloe.capture.memory import Memory
from icefloe.capture.stored import StoredImage
from icefloe.durable import Buffer
from icefloe.store.manifest import ZERO, Extents, FileKind, ImageFile, Manifest


@dataclass(frozen=True, eq=False)
class CriuFiles:
    """`extents` of every regular file by its name, except for pagemaps, which are in `made`.

    `lazy` are the segments of each process (by pid) that stand in no file.
    """

    image: StoredImage
    extents: Mapping[str, Extents]
    made: Mapping[str, bytes]
    lazy: Mapping[int, Columns]

    @property
    def total_bytes(self) -> int:
        """How much `write` writes at most."""
        whole = sum(int(extents["length"].sum()) for extents in self.extents.values())
        return whole + sum(map(len, self.made.values()))

    def has(self, name: str) -> bool:
        """Whether CRIU would find this file."""
        return name in self.extents or name in self.made

    def content(self, name: str) -> Iterator[Buffer]:
        """The bytes of a file, in pieces that are valid until the next. Raises Corrupt."""
        if name in self.made:
            yield self.made[name]
            return
        with closing(self.image.source.open()) as blocks:
            yield from with_zeros(read_extents(blocks, self.extents[name]))

    def write(self, root: Path, workers: int = 0) -> int:
        """Writes all files into an empty folder; returns the bytes. Raises Corrupt, OSError."""
        written = write_files(self.image.source, self._manifest(), root, workers)
        for name, content in self.made.items():
            (root / name).write_bytes(content)
            written += len(content)
        return written

    def _manifest(self) -> Manifest:
        """An image of these files alone. It shares its blocks with the one it was made from."""
        whole = self.image.manifest
        files = [
            ImageFile(
                path=name,
                kind=FileKind.REGULAR,
                mode=0o600,
                uid=0,
                gid=0,
                mtime_ns=0,
                size=int(extents["length"].sum()),
            )
            for name, extents in self.extents.items()
        ]
        return replace(
            whole,
            files=tuple(files),
            bounds=np.cumsum([0, *map(len, self.extents.values())], dtype=np.int64),
            extents=np.concatenate([whole.extents[:0], *self.extents.values()]),
        )


def files_for_criu(image: StoredImage, memories: list[Memory], *, lazy: bool) -> CriuFiles:
    """What CRIU reads to restore this checkpoint; `lazy` leaves out what userfaultfd brings in.

    Raises BadImage or Corrupt.
    """
    extents: dict[str, Extents] = {}
    made, left = {}, {}
    for each in memories:
        kept, flags = _divide(each, lazy)
        entries = memory.pagemap_entries(kept, flags)
        made[each.name] = images.encode_pagemap(images.Pagemap(each.pages_id, entries))
        present = (flags & PRESENT) != 0
        extents[f"pages-{each.pages_id}.img"] = memory.pages_file(kept[present])
        if each.pid is not None and lazy:
            left[each.pid] = kept[~present]
    for name in image.names():
        regular = image.manifest.files[image.number(name)].kind is FileKind.REGULAR
        if regular and name not in made:
            extents.setdefault(name, image.extents(name))
    return CriuFiles(image, extents, made, left)


def _divide(each: Memory, lazy: bool) -> tuple[Columns, NDArray[np.uint32]]:
    """The segments that the pagemap names, and the flags that each gets there."""
    segments = each.segments
    whole = memory.on_pages(segments)
    if lazy:
        by_fault = segments["lazy"] & whole
        return segments, np.where(by_fault, LAZY, PRESENT).astype(np.uint32)
    needless = segments["anonymous"] & whole & (segments["block"] == ZERO)
    kept = segments[~needless]
    return kept, np.full(len(kept), PRESENT, np.uint32)
