"""CRIU's own file formats, as far as a restore has to look into them.

An image file is two magics, then records: a 32-bit length and a protobuf message (criu/image.c,
criu/protobuf.c, images/*.proto). Only pstree, mm and pagemap files are read here; a pagemap has
as many records as there are runs of pages, so that one is decoded in columns.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.errors import BadImage

PAGE = 4096

# criu/include/magic.h
_COMMON_MAGIC = 0x54564319
_PSTREE_MAGIC = 0x50273030
_PAGEMAP_MAGIC = 0x56084025
_MM_MAGIC = 0x57492820
_SERVICE_MAGIC = 0x55105940
_STATS_MAGIC = 0x57093306
_MAGICS = struct.Struct("<II")
_LENGTH = struct.Struct("<I")

# Flags of a pagemap entry (criu/include/pagemap.h).
IN_PARENT, LAZY, PRESENT = 1, 2, 4

ENTRY_DTYPE = np.dtype([("vaddr", "<u8"), ("pages", "<u8"), ("flags", "<u4")])
"""One run of pages in a pagemap: address, length in pages, flags."""

AREA_DTYPE = np.dtype([("start", "<u8"), ("end", "<u8"), ("flags", "<u4"), ("status", "<u4")])
"""One memory area (VMA): addresses, mmap(2) flags, CRIU's own status bits."""

# mmap(2) flags, and CRIU's status bits of areas (criu/include/image.h).
_MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_LOCKED, _MAP_HUGETLB = 0x02, 0x20, 0x2000, 0x40000
_VSYSCALL, _VDSO, _VVAR, _AIO_RING, _PLUGIN = 1 << 2, 1 << 3, 1 << 12, 1 << 13, 1 << 27

Columns = NDArray[np.void]


@dataclass(frozen=True, eq=False)
class Pagemap:
    """A pagemap file. `pages_id` names the file that its present pages stand in, one by one."""

    pages_id: int
    entries: Columns


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the tree, with the pid that it had (and gets again)."""

    pid: int
    parent: int


@dataclass(frozen=True, slots=True)
class DumpTimes:
    """What `criu dump` says of itself, in seconds.

    `freezing` until all threads stood still, `frozen` from then until they were let go;
    `collecting` and `writing` their memory are parts of it.
    """

    freezing: float = 0.0
    frozen: float = 0.0
    collecting: float = 0.0
    writing: float = 0.0


def _records(
    content: bytes, magic: int, path: str, first: int = _COMMON_MAGIC
) -> tuple[list[int], list[int]]:
    """Where the messages of an image file start and end. Raises BadImage."""
    if len(content) < _MAGICS.size or _MAGICS.unpack_from(content) != (first, magic):
        raise BadImage(path, "it doesn't start with its magic numbers")
    starts, ends, position, length = [], [], _MAGICS.size, len(content)
    while position < length:
        if position + _LENGTH.size > length:
            raise BadImage(path, "it is cut short")
        start = position + _LENGTH.size
        position = start + _LENGTH.unpack_from(content, position)[0]
        starts.append(start)
        ends.append(position)
    if position != length:
        raise BadImage(path, "it is cut short")
    return starts, ends


def _varint(content: bytes, position: int, end: int, path: str) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 70:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise BadImage(path, "a number in it never ends")


def _fields(content: bytes, start: int, end: int, path: str) -> Iterator[tuple[int, int, int]]:
    """(field, value, 0) of numbers and (field, start, end) of strings and messages."""
    position = start
    while position < end:
        key, position = _varint(content, position, end, path)
        wire = key & 7
        if wire == 0:
            value, position = _varint(content, position, end, path)
            yield key >> 3, value, 0
        elif wire == 2:
            length, position = _varint(content, position, end, path)
            if position + length > end:
                raise BadImage(path, "a message in it is longer than its record")
            yield key >> 3, position, position + length
            position += length
        elif wire in (1, 5):
            position += 8 if wire == 1 else 4
            if position > end:
                raise BadImage(path, "a number in it is cut short")
        else:
            raise BadImage(path, f"a field has wire type {wire}")


def decode_pstree(content: bytes, path: str) -> tuple[Process, ...]:
    """The processes of a tree, the root first (images/pstree.proto). Raises BadImage."""
    found = []
    for start, end in zip(*_records(content, _PSTREE_MAGIC, path), strict=True):
        numbers = {field: value for field, value, stop in _fields(content, start, end, path)}
        if 1 not in numbers or 2 not in numbers:
            raise BadImage(path, "a process has no pid")
        found.append(Process(numbers[1], numbers[2]))
    if not found:
        raise BadImage(path, "it holds no process")
    return tuple(found)


def decode_dump_stats(content: bytes, path: str) -> DumpTimes:
    """The times of a stats-dump file (images/stats.proto, in microseconds). Raises BadImage."""
    for start, end in zip(*_records(content, _STATS_MAGIC, path, _SERVICE_MAGIC), strict=True):
        for field, first, last in _fields(content, start, end, path):
            if field == 1 and last:
                told = {}
                for number, value, stop in _fields(content, first, last, path):
                    if stop and number <= 4:
                        raise BadImage(path, "a time in it is no number")
                    told[number] = value / 1e6
                return DumpTimes(*(told.get(number, 0.0) for number in (1, 2, 3, 4)))
    raise BadImage(path, "it holds no times")


def decode_areas(content: bytes, path: str) -> Columns:
    """The memory areas of an mm file in order of addresses (images/mm.proto). Raises BadImage."""
    rows = []
    for start, end in zip(*_records(content, _MM_MAGIC, path), strict=True):
        for field, first, last in _fields(content, start, end, path):
            if field == 14 and last:
                area = {f: value for f, value, _ in _fields(content, first, last, path)}
                rows.append(tuple(area.get(number, 0) for number in (1, 2, 6, 7)))
    try:
        areas = np.array(rows, AREA_DTYPE)
    except OverflowError:
        raise BadImage(path, "a number in it is out of range") from None
    if len(areas) and not bool((areas["start"] < areas["end"]).all()):
        raise BadImage(path, "an area ends before it starts")
    if not bool((areas["end"][:-1] <= areas["start"][1:]).all()):
        raise BadImage(path, "its areas are not in order")
    return areas


def anonymous(areas: Columns) -> NDArray[np.bool_]:
    """Which areas are private anonymous memory: a page of them that no pagemap names is zero."""
    wanted = np.uint32(_MAP_PRIVATE | _MAP_ANONYMOUS)
    special = np.uint32(_VSYSCALL | _VDSO | _VVAR | _AIO_RING | _PLUGIN)
    plain = (areas["status"] & special) == 0
    result: NDArray[np.bool_] = ((areas["flags"] & wanted) == wanted) & plain
    return result


def can_be_lazy(areas: Columns) -> NDArray[np.bool_]:
    """Which areas CRIU registers with userfaultfd (criu/include/vma.h, vma_entry_can_be_lazy)."""
    barred = np.uint32(_MAP_LOCKED | _MAP_HUGETLB)
    result: NDArray[np.bool_] = anonymous(areas) & ((areas["flags"] & barred) == 0)
    return result


def decode_pagemap(content: bytes, path: str) -> Pagemap:
    """A pagemap file of any CRIU (images/pagemap.proto; criu/pagemap.c). Raises BadImage.

    The count is in field 5 since 4.2 and in field 2 before; an entry without flags is present.
    """
    starts, ends = _records(content, _PAGEMAP_MAGIC, path)
    if not starts:
        raise BadImage(path, "it has no head")
    head = {field: value for field, value, _ in _fields(content, starts[0], ends[0], path)}
    if 1 not in head:
        raise BadImage(path, "its head names no pages file")
    columns, given = _numbers(content, starts[1:], ends[1:], 5, path)
    entries = np.zeros(len(starts) - 1, ENTRY_DTYPE)
    entries["vaddr"] = columns[1]
    entries["pages"] = np.where(given[5], columns[5], columns[2])
    flags = np.where(given[4], columns[4], np.uint64(PRESENT))
    entries["flags"] = np.where(columns[3] != 0, columns[4] | np.uint64(IN_PARENT), flags)
    _check_entries(entries, path)
    return Pagemap(head[1], entries)


def _check_entries(entries: Columns, path: str) -> None:
    limit = np.uint64(1 << 51)
    if not bool(((entries["pages"] < limit) & (entries["vaddr"] < limit << np.uint64(12))).all()):
        raise BadImage(path, "an entry is out of range")
    if bool((entries["vaddr"] % np.uint64(PAGE)).any()):
        raise BadImage(path, "an entry is off a page")
    ends = entries["vaddr"] + entries["pages"] * np.uint64(PAGE)
    if not bool((ends[:-1] <= entries["vaddr"][1:]).all()):
        raise BadImage(path, "its entries are not in order")


def _numbers(
    content: bytes, starts: Sequence[int], ends: Sequence[int], fields: int, path: str
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Numbers of many messages that hold nothing else, as columns: [field, message].

    Also whether a message has the field. All messages take a step at a time.
    """
    data = np.frombuffer(content + bytes(10), np.uint8)
    position, end = np.array(starts, np.int64), np.array(ends, np.int64)
    values = np.zeros((fields + 1, len(position)), np.uint64)
    given = np.zeros((fields + 1, len(position)), np.bool_)
    ahead = np.flatnonzero(position < end)
    while len(ahead):
        key = data[position[ahead]].astype(np.int64)
        number = key >> 3
        if bool((((key & 7) != 0) | (number > fields) | (number < 1)).any()):
            raise BadImage(path, "an entry has an unknown field: a newer CRIU wrote it")
        value, length = _varints(data, position[ahead] + 1)
        position[ahead] += 1 + length
        if bool(((length == 0) | (position[ahead] > end[ahead])).any()):
            raise BadImage(path, "a number in it never ends")
        values[number, ahead] = value
        given[number, ahead] = True
        ahead = ahead[position[ahead] < end[ahead]]
    return values, given


def _varints(
    data: NDArray[np.uint8], position: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The varints at these positions, and their lengths (0: longer than ten bytes)."""
    value = np.zeros(len(position), np.uint64)
    length = np.zeros(len(position), np.int64)
    unfinished = np.arange(len(position))
    for i in range(10):
        byte = data[np.minimum(position[unfinished] + i, len(data) - 1)]
        value[unfinished] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * i)
        last = byte < 0x80
        length[unfinished[last]] = i + 1
        unfinished = unfinished[~last]
        if not len(unfinished):
            break
    return value, length


def encode_pagemap(pagemap: Pagemap) -> bytes:
    """The file that both old and new CRIU read: the count stands in fields 2 and 5.

    Numbers are padded to a fixed width, which protobuf allows, so that all records are written
    at once. An entry of 2^32 pages or more (16 TiB) raises ValueError.
    """
    entries = pagemap.entries
    if bool((entries["pages"] >> np.uint64(32)).any()):
        raise ValueError("an entry of 16 TiB or more")
    columns = ((1, 10, "vaddr"), (2, 5, "pages"), (4, 1, "flags"), (5, 5, "pages"))
    width = sum(1 + size for _, size, _ in columns)
    rows = np.zeros((len(entries), _LENGTH.size + width), np.uint8)
    rows[:, 0] = width
    at = _LENGTH.size
    for field, size, name in columns:
        rows[:, at] = field << 3
        values = entries[name].astype(np.uint64)
        for i in range(size):
            part = (values >> np.uint64(7 * i)).astype(np.uint8) & np.uint8(0x7F)
            rows[:, at + 1 + i] = part | np.uint8(0x80 if i + 1 < size else 0)
        at += 1 + size
    head = bytearray(b"\x08")
    number = pagemap.pages_id
    while number >= 0x80:
        head.append(number & 0x7F | 0x80)
        number >>= 7
    head.append(number)
    magics = _MAGICS.pack(_COMMON_MAGIC, _PAGEMAP_MAGIC)
    return magics + _LENGTH.pack(len(head)) + bytes(head) + rows.tobytes()
