"""A process that forks, unmaps, moves and discards memory all the time, and checks the rest.

    churn.py RECORD

Every page of its areas holds the number of the area and its own, twice over; what was discarded
must read as zero. A child checks what it inherited, changes some of it and must not be seen to.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys

from record import RecordWriter

PAGE = 4096
AREAS, PAGES = 12, 1024  # 48 MiB
NUMBERS = struct.Struct("<QQ")
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
PROT_READ_WRITE = 3
MAP_PRIVATE_ANONYMOUS = 0x22
FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Area:
    """One mapping. `zero` are pages that were discarded, `gone` those that were unmapped."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.zero: set[int] = set()
        self.gone: set[int] = set()
        found = libc.mmap(None, PAGES * PAGE, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, 0)
        assert found != FAILED
        self.start = int(found)
        for page in range(PAGES):
            ctypes.memmove(self.start + page * PAGE, self.content(page), PAGE)

    def content(self, page: int) -> bytes:
        """What a page that nobody touched holds."""
        # Noise that no other page has, so that every page has to come from its own block.
        seed = (self.number << 32 | page) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        words = [(seed * odd) & 0xFFFFFFFFFFFFFFFF for odd in range(1, 65, 2)]
        return NUMBERS.pack(self.number, page) + struct.pack("<32Q", *words).ljust(PAGE - 16, b"x")

    def check(self, pages: range) -> bool:
        """Whether these pages hold what they should."""
        for page in pages:
            if page not in self.gone:
                found = ctypes.string_at(self.start + page * PAGE, PAGE)
                if found != (bytes(PAGE) if page in self.zero else self.content(page)):
                    return False
        return True

    def discard(self, page: int) -> None:
        """The page reads as zero from now on."""
        assert libc.madvise(self.start + page * PAGE, PAGE, mmap.MADV_DONTNEED) == 0
        self.zero.add(page)

    def unmap(self, page: int) -> None:
        """The page is no more."""
        assert libc.munmap(self.start + page * PAGE, PAGE) == 0
        self.gone.add(page)

    def move(self) -> None:
        """The area goes elsewhere. It must be in one piece."""
        found = libc.mremap(self.start, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE)
        assert found != FAILED
        free = libc.mmap(None, PAGES * PAGE, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, 0)
        moved = libc.mremap(
            found, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, ctypes.c_void_p(free)
        )
        assert moved == free
        self.start = int(moved)


def checked_by_child(areas: list[Area], step: int) -> bool:
    """A child looks at all of the memory, writes into its own copy of it, and ends."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    good = all(area.check(range(step % 3, PAGES, 3)) for area in areas)
    for area in areas:
        for page in range(0, PAGES, 64):
            if page not in area.gone:
                ctypes.memset(area.start + page * PAGE, 0xEE, PAGE)
    os._exit(0 if good else 1)


def main(record_path: str) -> None:
    """One change of every kind each step, each looked at by a child and by itself."""
    record = RecordWriter(record_path)
    areas = [Area(number) for number in range(AREAS)]
    step = 0
    while True:
        step += 1
        page = step * 37 % PAGES
        areas[step % 4].discard(page)
        if page not in areas[4 + step % 4].zero | areas[4 + step % 4].gone:
            areas[4 + step % 4].unmap(page)
        areas[8 + step % 4].move()
        good = checked_by_child(areas, step)
        good &= all(area.check(range(step % 8, PAGES, 8)) for area in areas)
        record.write(step, "churn-ok" if good else "churn-bad")
        if not good:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
