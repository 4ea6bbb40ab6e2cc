"""Checkpoints as CRIU writes them, encoded by hand, and read again page by page.

The formats: CRIU's images/*.proto, criu/include/magic.h, criu/pagemap.c. Nothing here comes from
icefloe's own code, which is what the tests are about.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PAGE = 4096
COMMON, PSTREE, PAGEMAP, MM, INVENTORY = 0x54564319, 0x50273030, 0x56084025, 0x57492820, 0x58313116
IN_PARENT, LAZY, PRESENT = 1, 2, 4
MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS = 0x01, 0x02, 0x20
REGULAR = 1  # status bit of every ordinary area
WORD = struct.Struct("<I")


def varint(value: int, width: int = 0) -> bytes:
    """A protobuf varint, padded to `width` bytes as the format allows."""
    out = bytearray()
    while value >= 0x80 or len(out) + 1 < width:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def number(field_number: int, value: int, width: int = 0) -> bytes:
    """A numeric field."""
    return varint(field_number << 3) + varint(value, width)


def nested(field_number: int, message: bytes) -> bytes:
    """A field that is a message."""
    return varint(field_number << 3 | 2) + varint(len(message)) + message


def image_file(magic: int, *messages: bytes) -> bytes:
    """Two magics, then messages with their lengths."""
    bodies = b"".join(WORD.pack(len(body)) + body for body in messages)
    return WORD.pack(COMMON) + WORD.pack(magic) + bodies


@dataclass(frozen=True)
class Entry:
    """A run of pages in a pagemap. `old` writes the count as CRIU did before 4.2."""

    vaddr: int
    pages: int
    flags: int
    old: bool = False

    def encoded(self) -> bytes:
        """The message."""
        if self.old:
            parts = [number(1, self.vaddr), number(2, self.pages)]
            if self.flags & IN_PARENT:
                parts.append(number(3, 1))
            if self.flags & LAZY:
                parts.append(number(4, self.flags))
            return b"".join(parts)
        count = [number(2, 0), number(4, self.flags), number(5, self.pages)]
        return number(1, self.vaddr) + b"".join(count)


def pagemap_file(pages_id: int, entries: Iterable[Entry]) -> bytes:
    """A pagemap file."""
    return image_file(PAGEMAP, number(1, pages_id), *(entry.encoded() for entry in entries))


@dataclass(frozen=True)
class Area:
    """A memory area in pages. Private anonymous unless the flags say otherwise."""

    start: int
    end: int
    flags: int = MAP_PRIVATE | MAP_ANONYMOUS
    status: int = REGULAR

    def encoded(self) -> bytes:
        """The message."""
        values = ((1, self.start), (2, self.end), (3, 0), (4, 0), (5, 3), (6, self.flags))
        fields = [number(n, value) for n, value in (*values, (7, self.status), (8, 1))]
        return nested(14, b"".join(fields))


def mm_file(areas: Iterable[Area]) -> bytes:
    """An mm file: numbers that nobody reads, then the areas."""
    head = b"".join(number(n, 4096 * n) for n in range(1, 13))
    return image_file(MM, head + b"".join(area.encoded() for area in areas))


def pstree_file(pids: Sequence[int]) -> bytes:
    """A tree of processes, each with two threads, all children of the first."""
    return image_file(
        PSTREE,
        *(
            number(1, pid)
            + number(2, 0 if pid == pids[0] else pids[0])
            + number(3, pid)
            + number(4, pid)
            + number(5, pid)
            + number(5, pid + 1)
            for pid in pids
        ),
    )


@dataclass
class Memory:
    """What a dump holds of one process: bytes of each page by address, and the entries."""

    areas: list[Area]
    entries: list[Entry]
    pages: dict[int, bytes] = field(default_factory=dict)
    pages_id: int = 1

    def files(self, pid: int) -> dict[str, bytes]:
        """The files of this process."""
        present = [entry for entry in self.entries if entry.flags & PRESENT]
        content = b"".join(self.pages[page] for entry in present for page in page_range(entry))
        return {
            f"mm-{pid}.img": mm_file(self.areas),
            f"pagemap-{pid}.img": pagemap_file(self.pages_id, self.entries),
            f"pages-{self.pages_id}.img": content,
        }


def page_range(entry: Entry) -> range:
    """The addresses of an entry's pages."""
    return range(entry.vaddr, entry.vaddr + entry.pages * PAGE, PAGE)


def checkpoint(processes: Mapping[int, Memory]) -> dict[str, bytes]:
    """All files of a dump without a parent."""
    files = {
        "inventory.img": WORD.pack(INVENTORY) + WORD.pack(2) + number(1, 2),
        "pstree.img": pstree_file(list(processes)),
    }
    for pid, memory in processes.items():
        files |= memory.files(pid) | {f"core-{pid}.img": b"core of %d" % pid}
    return files


def read_memory(files: Mapping[str, bytes], pid: int) -> dict[int, tuple[bytes, int]]:
    """Bytes and flags of every page that is present, as a simple reader of CRIU's format sees it.

    Both counts must be there and agree: old CRIU knows only the one, new CRIU prefers the other.
    """
    content = files[f"pagemap-{pid}.img"]
    messages, position = [], 8
    while position < len(content):
        (length,) = WORD.unpack_from(content, position)
        messages.append(content[position + 4 : position + 4 + length])
        position += 4 + length
    pages_id = fields(messages[0])[1]
    pages, offset = files[f"pages-{pages_id}.img"], 0
    found: dict[int, tuple[bytes, int]] = {}
    for message in messages[1:]:
        values = fields(message)
        assert values[2] == values[5], "the counts differ"
        for page in range(values[1], values[1] + values[5] * PAGE, PAGE):
            assert page not in found
            data = b""
            if values[4] & PRESENT:
                data, offset = pages[offset : offset + PAGE], offset + PAGE
                assert len(data) == PAGE
            found[page] = data, values[4]
    assert offset == len(pages), "pages that no entry names"
    return found


def fields(message: bytes) -> dict[int, int]:
    """The numeric fields of a message."""
    found, position = {}, 0
    while position < len(message):
        values = []
        for _ in range(2):
            value = shift = 0
            while True:
                byte = message[position]
                position += 1
                value |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            values.append(value)
        found[values[0] >> 3] = values[1]
    return found
