"""Turns two full dumps of one process into a parent and a child, as incremental dumps are.

CRIU makes such chains itself only on kernels with CONFIG_MEM_SOFT_DIRTY. The images here are real
except for that: pages of the second dump that equal the first's at the same address become
PE_PARENT entries of its pagemaps, and its pages files are packed accordingly.

The format is decoded here by hand, and not with icefloe's own code, which is what is under test.
Source: CRIU's images/pagemap.proto and criu/pagemap.c.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
PE_PARENT, PE_LAZY, PE_PRESENT = 1, 2, 4
MAGICS_BYTES = 8  # the common magic and the type's own
WORD = struct.Struct("<I")
VARINT = 0  # the only wire type in a pagemap
# Numbers of the fields of pagemap_entry, and of the one field of pagemap_head.
VADDR, COMPAT_NR_PAGES, IN_PARENT, FLAGS, NR_PAGES = 1, 2, 3, 4, 5
PAGES_ID = 1


@dataclass(frozen=True)
class Run:
    """An entry of a pagemap: consecutive pages of one process."""

    vaddr: int
    pages: int
    flags: int


@dataclass(frozen=True)
class Pagemap:
    """A pagemap file: where the pages of a process or a shared area lie."""

    magics: bytes
    pages_id: int
    runs: list[Run]

    def pages_file(self, directory: Path) -> Path:
        """The file that holds the pages which are present, in the order of the runs."""
        return directory / f"pages-{self.pages_id}.img"


@dataclass(frozen=True)
class Counts:
    """How many pages of a rewritten dump come from its parent, and how many it keeps."""

    from_parent: int
    kept: int


def make_chain(parent: Path, child: Path) -> Counts:
    """Rewrites `child` to refer to `parent`, a dump in the same folder, wherever they agree."""
    totals = [
        refer_to_parent(parent / path.name, path)
        for path in sorted(child.glob("pagemap-*.img"))
        if (parent / path.name).exists()
    ]
    (child / "parent").symlink_to(Path("..") / parent.name)  # relative, as CRIU makes it
    return Counts(sum(each.from_parent for each in totals), sum(each.kept for each in totals))


def refer_to_parent(parent_path: Path, path: Path) -> Counts:
    """Rewrites one pagemap and its pages file."""
    pagemap = read_pagemap(path)
    known = dict(present_pages(read_pagemap(parent_path), parent_path.parent))
    kept = bytearray()
    runs: list[Run] = []
    for vaddr, data, flags in pages_with_flags(pagemap, path.parent):
        same = known.get(vaddr) == data
        append_page(runs, vaddr, PE_PARENT if same else flags)
        if not same:
            kept += data
    pagemap.pages_file(path.parent).write_bytes(kept)
    write_pagemap(path, Pagemap(pagemap.magics, pagemap.pages_id, runs))
    total = sum(run.pages for run in runs)
    return Counts(total - len(kept) // PAGE, len(kept) // PAGE)


def append_page(runs: list[Run], vaddr: int, flags: int) -> None:
    """Adds a page to the last run when it continues it, else starts another."""
    if runs and runs[-1].flags == flags and runs[-1].vaddr + runs[-1].pages * PAGE == vaddr:
        runs[-1] = Run(runs[-1].vaddr, runs[-1].pages + 1, flags)
    else:
        runs.append(Run(vaddr, 1, flags))


def present_pages(pagemap: Pagemap, directory: Path) -> Iterator[tuple[int, bytes]]:
    """Address and content of each page that a dump holds itself."""
    for vaddr, data, _ in pages_with_flags(pagemap, directory):
        yield vaddr, data


def pages_with_flags(pagemap: Pagemap, directory: Path) -> Iterator[tuple[int, bytes, int]]:
    """Address, content and flags of each page; every page of a full dump is present."""
    with pagemap.pages_file(directory).open("rb") as pages:
        for run in pagemap.runs:
            assert run.flags & PE_PRESENT, f"not a full dump: {run}"
            for number in range(run.pages):
                yield run.vaddr + number * PAGE, pages.read(PAGE), run.flags
        assert not pages.read(1), "pages that no entry names"


def read_pagemap(path: Path) -> Pagemap:
    """Decodes a pagemap file."""
    data = path.read_bytes()
    head, *entries = [dict(fields(message)) for message in messages(data[MAGICS_BYTES:])]
    return Pagemap(data[:MAGICS_BYTES], head[PAGES_ID], [run_of(entry) for entry in entries])


def run_of(entry: dict[int, int]) -> Run:
    """An entry by the reader's rules of CRIU 4.2, which also hold for what 4.1 writes."""
    pages = entry.get(NR_PAGES, entry[COMPAT_NR_PAGES])
    flags = entry.get(FLAGS, PE_PRESENT) | (PE_PARENT if entry.get(IN_PARENT) else 0)
    return Run(entry[VADDR], pages, flags)


def write_pagemap(path: Path, pagemap: Pagemap) -> None:
    """Encodes a pagemap file; both counts are written, so that 4.1 and 4.2 read it."""
    bodies = [field(PAGES_ID, pagemap.pages_id)]
    for run in pagemap.runs:
        bodies.append(
            field(VADDR, run.vaddr)
            + field(COMPAT_NR_PAGES, run.pages)
            + field(FLAGS, run.flags)
            + field(NR_PAGES, run.pages)
        )
    path.write_bytes(pagemap.magics + b"".join(WORD.pack(len(body)) + body for body in bodies))


def messages(data: bytes) -> Iterator[bytes]:
    """The protobuf messages of an image file, each preceded by its length."""
    position = 0
    while position < len(data):
        (length,) = WORD.unpack_from(data, position)
        position += WORD.size
        yield data[position : position + length]
        position += length


def fields(message: bytes) -> Iterator[tuple[int, int]]:
    """Number and value of each field; pagemaps hold varints only."""
    position = 0
    while position < len(message):
        key, position = varint(message, position)
        assert key & 7 == VARINT, f"a field of wire type {key & 7} in a pagemap"
        value, position = varint(message, position)
        yield key >> 3, value


def varint(data: bytes, position: int) -> tuple[int, int]:
    """A protobuf varint and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7


def field(number: int, value: int) -> bytes:
    """A protobuf varint field."""
    return encoded(number << 3 | VARINT) + encoded(value)


def encoded(value: int) -> bytes:
    """A protobuf varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
