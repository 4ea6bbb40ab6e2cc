"""A second implementation of docs/format.md, written from that page alone.

It shares no code with icefloe, is slow and holds whole files in memory; tests compare the two.
"""

import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

MIB = 1 << 20
PAGE = 4096
MIN_BLOCK, AVERAGE_BLOCK, MAX_BLOCK = 65536, 262144, MIB
MIN_ZERO_RUN = 65536
MAX_MANIFEST = 256 * MIB
MAX_ZERO_EXTENT = (1 << 48) - 1
NO_BLOCK = 0xFFFFFFFF
FORMAT_LINE = (
    b'{"format": 1, "chunking": {"average": 262144, "min": 65536, "max": 1048576,'
    b' "min_zero_run": 65536}}'
)
JOURNAL_LINE = b"icefloe journal 1\n"

REGULAR, FOLDER, SYMLINK, HARD_LINK, FIFO, CHARACTER, BLOCK_DEVICE, SOCKET = range(8)
DATA, MANIFEST = 1, 2
RAW, LZ4, ZSTD, PLANES2, PLANES4 = range(5)


class Refused(Exception):
    """What was read breaks a rule of the format."""


def need(condition: object, why: str) -> None:
    """Refuses with a reason unless the condition holds."""
    if not condition:
        raise Refused(why)


def block_id(raw: bytes) -> bytes:
    """The id of a block: BLAKE3 of its raw bytes."""
    return blake3(raw).digest()


# --- what an image is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """A run in a file: part of a block, or zeros where block is None."""

    block: bytes | None
    offset: int
    length: int


@dataclass(frozen=True)
class Entry:
    """One file of an image, without its bytes."""

    path: bytes
    kind: int
    mode: int
    uid: int = 0
    gid: int = 0
    mtime: tuple[int, int] = (0, 0)
    size: int = 0
    device: int = 0
    link: bytes = b""
    extents: tuple[Extent, ...] = ()


@dataclass(frozen=True)
class Image:
    """A manifest in the open: files in order, blocks in order with their raw length, facts."""

    files: list[Entry]
    blocks: dict[bytes, int]
    facts: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


# --- codecs -------------------------------------------------------------------------------------


def decode(codec: int, payload: bytes, raw: int) -> bytes:
    """The block behind a payload; refuses unless it comes out at exactly the raw length."""
    need(len(payload) <= raw, "payload longer than its block")
    if codec == RAW:
        block = payload
    elif codec == LZ4:
        block = _decode_lz4(payload, raw)
    elif codec == ZSTD:
        block = _decode_zstd(payload, raw)
    elif codec in (PLANES2, PLANES4):
        block = _decode_planes(payload, raw, 2 if codec == PLANES2 else 4)
    else:
        raise Refused(f"codec {codec} is not known")
    need(len(block) == raw, "block is not as long as stated")
    return block


def _decode_lz4(payload: bytes, raw: int) -> bytes:
    """One LZ4 block without size prefix."""
    try:
        return bytes(lz4.block.decompress(payload, uncompressed_size=raw))
    except lz4.block.LZ4BlockError as error:
        raise Refused("broken lz4 block") from error


def _decode_zstd(payload: bytes, raw: int) -> bytes:
    """One zstd frame that states its content size and has nothing behind it."""
    try:
        parameters = zstandard.get_frame_parameters(payload)
        need(parameters.content_size == raw, "zstd frame of another size")
        need(parameters.dict_id == 0, "zstd frame with a dictionary")
        unpack = zstandard.ZstdDecompressor().decompressobj()
        block = unpack.decompress(payload)
    except zstandard.ZstdError as error:
        raise Refused("broken zstd frame") from error
    need(unpack.eof and not unpack.unused_data, "not one whole zstd frame")
    return block


def _decode_planes(payload: bytes, raw: int, width: int) -> bytes:
    """A table of stored lengths, the planes of all bytes of one rank, and the tail."""
    count, rest = divmod(raw, width)
    start = 4 * width
    need(len(payload) >= start, "table of planes cut off")
    stored = struct.unpack_from(f"<{width}I", payload)
    need(start + sum(stored) + rest == len(payload), "planes of another length")
    block = bytearray(raw)
    for rank, length in enumerate(stored):
        plane = payload[start : start + length]
        start += length
        for at, byte in enumerate(plane if length == count else _decode_zstd(plane, count)):
            block[at * width + rank] = byte
    block[raw - rest :] = payload[start:]
    return bytes(block)


# --- pack ---------------------------------------------------------------------------------------

PACK_HEADER = struct.Struct("<8sII")
BLOCK_HEADER = struct.Struct("<4sBBHII32s")
INDEX_ROW = struct.Struct("<32sQIIBBH")
TRAILER = struct.Struct("<QII32sQ8s")


@dataclass(frozen=True)
class Row:
    """One row of a pack's index."""

    id: bytes
    offset: int
    stored: int
    raw: int
    codec: int
    kind: int

    @property
    def header(self) -> bytes:
        """The 48 bytes that must stand before the payload."""
        return BLOCK_HEADER.pack(b"ICFB", self.kind, self.codec, 0, self.stored, self.raw, self.id)


def payload_start(position: int, codec: int, raw: int) -> int:
    """Where the payload of a block starts whose padding starts at position."""
    start = position + BLOCK_HEADER.size
    return -(-start // PAGE) * PAGE if codec == RAW and raw >= PAGE else start


def read_pack(pack: bytes) -> tuple[bytes, list[Row]]:
    """The id and the index of a pack whose frame is sound; payloads are looked at by block()."""
    need(len(pack) >= PACK_HEADER.size + TRAILER.size, "pack too short")
    magic, version, reserved = PACK_HEADER.unpack_from(pack)
    need((magic, version, reserved) == (b"ICEFPACK", 1, 0), "not a pack header")
    at, count, version, digest, zero, tail = TRAILER.unpack_from(pack, len(pack) - TRAILER.size)
    need((version, zero, tail) == (1, 0, b"ICEFTAIL"), "not a pack trailer")
    need(at + count * INDEX_ROW.size + TRAILER.size == len(pack), "index of another size")
    index = pack[at : -TRAILER.size]
    need(blake3(index).digest() == digest, "index does not match its digest")
    rows = [_row(fields) for fields in INDEX_ROW.iter_unpack(index)]
    need(_walk(pack, rows) == at, "something between last payload and index")
    return digest, rows


def _row(fields: tuple[Any, ...]) -> Row:
    """An index row with its numbers in range."""
    *values, zero = fields
    row = Row(*values)
    need(zero == 0, "reserved bytes of a row")
    need(row.kind in (DATA, MANIFEST), "unknown kind of block")
    need(1 <= row.raw <= (MAX_BLOCK if row.kind == DATA else MAX_MANIFEST), "raw length")
    need(row.stored <= row.raw, "payload longer than its block")
    need(row.codec != RAW or row.stored == row.raw, "raw payload of another length")
    return row


def _walk(pack: bytes, rows: Iterable[Row]) -> int:
    """Checks paddings and block headers against the index; gives the end of the last payload."""
    position = PACK_HEADER.size
    for row in rows:
        start = payload_start(position, row.codec, row.raw)
        need(row.offset == start, "block at another place than the layout says")
        header = start - BLOCK_HEADER.size
        need(not any(pack[position:header]), "padding that is not zero")
        need(pack[header:start] == row.header, "block header differs from the index")
        position = start + row.stored
    return position


def block(pack: bytes, row: Row) -> bytes:
    """The raw bytes of one block of a pack, verified."""
    raw = decode(row.codec, pack[row.offset : row.offset + row.stored], row.raw)
    need(block_id(raw) == row.id, "block has another id")
    return raw


def write_pack(blocks: Sequence[tuple[int, bytes]]) -> tuple[bytes, bytes]:
    """The id and the bytes of a pack that holds (kind, raw bytes) without compression."""
    pack = bytearray(PACK_HEADER.pack(b"ICEFPACK", 1, 0))
    index = bytearray()
    for kind, raw in blocks:
        start = payload_start(len(pack), RAW, len(raw))
        row = Row(block_id(raw), start, len(raw), len(raw), RAW, kind)
        pack += bytes(start - BLOCK_HEADER.size - len(pack)) + row.header + raw
        index += INDEX_ROW.pack(row.id, start, row.stored, row.raw, RAW, kind, 0)
    digest = blake3(index).digest()
    trailer = TRAILER.pack(len(pack), len(blocks), 1, digest, 0, b"ICEFTAIL")
    return digest, bytes(pack + index + trailer)


def salvage(pack: bytes) -> list[Row]:
    """The whole blocks at the front of a pack that has lost its end."""
    rows: list[Row] = []
    position = PACK_HEADER.size
    while row := _salvage_one(pack, position):
        rows.append(row)
        position = row.offset + row.stored
    return rows


def _salvage_one(pack: bytes, position: int) -> Row | None:
    """The block that comes next, if it is whole."""
    for start in (position + BLOCK_HEADER.size, payload_start(position, RAW, PAGE)):
        header = pack[start - BLOCK_HEADER.size : start]
        if len(header) < BLOCK_HEADER.size or header[:4] != b"ICFB":
            continue
        _, kind, codec, _, stored, raw, name = BLOCK_HEADER.unpack(header)
        row = Row(name, start, stored, raw, codec, kind)
        if start + stored <= len(pack) and block(pack, row):
            return row
    return None


# --- manifest -----------------------------------------------------------------------------------

MANIFEST_HEADER = struct.Struct("<8sIIIIII")
FILE = struct.Struct("<HHBBHIIIIqQQ")
BLOCK = struct.Struct("<32sI")
EXTENT = struct.Struct("<IIQ")


def encode_facts(facts: dict[str, Any], labels: dict[str, str]) -> bytes:
    """Facts and labels as the manifest's JSON."""
    both = {"facts": facts, "labels": labels}
    return json.dumps(both, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def join(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Puts neighbours together that must be one extent."""
    joined: list[Extent] = []
    for extent in extents:
        if joined and _goes_on(joined[-1], extent):
            joined[-1] = replace(joined[-1], length=joined[-1].length + extent.length)
        else:
            joined.append(extent)
    return tuple(joined)


def _goes_on(first: Extent, second: Extent) -> bool:
    """True if the second extent must be one with the first."""
    if first.block is None or second.block is None:
        return first.block is second.block
    return first.block == second.block and first.offset + first.length == second.offset


def encode_manifest(
    files: Iterable[Entry],
    lengths: dict[bytes, int],
    facts: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
) -> bytes:
    """The one encoding of an image; lengths has the raw length of every block."""
    ordered = sorted(files, key=lambda entry: entry.path)
    extents = [extent for entry in ordered for extent in entry.extents]
    named = dict.fromkeys(extent.block for extent in extents if extent.block is not None)
    rows = {name: row for row, name in enumerate(named)}
    paths = b"".join(entry.path + entry.link for entry in ordered)
    json_bytes = encode_facts(facts or {}, labels or {})
    counts = (len(ordered), len(rows), len(extents), len(paths), len(json_bytes))
    parts = [MANIFEST_HEADER.pack(b"ICEFMANI", 1, *counts)]
    parts += [_encode_file(entry) for entry in ordered]
    parts += [BLOCK.pack(name, lengths[name]) for name in rows]
    parts += [_encode_extent(extent, rows) for extent in extents]
    return b"".join([*parts, paths, json_bytes])


def _encode_file(entry: Entry) -> bytes:
    """The 48 bytes of one file."""
    seconds, nanoseconds = entry.mtime
    front = (len(entry.path), len(entry.link), entry.kind, 0, entry.mode, entry.uid, entry.gid)
    extents = len(entry.extents)
    return FILE.pack(*front, nanoseconds, extents, seconds, entry.size, entry.device)


def _encode_extent(extent: Extent, rows: dict[bytes, int]) -> bytes:
    """The 16 bytes of one extent."""
    row = NO_BLOCK if extent.block is None else rows[extent.block]
    return EXTENT.pack(row, extent.offset, extent.length)


class _Cursor:
    """Reads a manifest front to back."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, length: int) -> bytes:
        """The next bytes, all of them."""
        need(self.at + length <= len(self.data), "manifest too short")
        self.at += length
        return self.data[self.at - length : self.at]

    def rows(self, row: struct.Struct, count: int) -> Iterator[tuple[Any, ...]]:
        """The next count rows."""
        return row.iter_unpack(self.take(row.size * count))


def read_manifest(data: bytes) -> Image:
    """An image from its encoding; refuses what is not canonical or not safe."""
    cursor = _Cursor(data)
    magic, version, files, blocks, extents, path_bytes, facts_bytes = MANIFEST_HEADER.unpack(
        cursor.take(MANIFEST_HEADER.size)
    )
    need((magic, version) == (b"ICEFMANI", 1), "not a manifest")
    file_rows = list(cursor.rows(FILE, files))
    table = list(cursor.rows(BLOCK, blocks))
    runs = [_read_extent(fields, table) for fields in cursor.rows(EXTENT, extents)]
    paths = _Cursor(cursor.take(path_bytes))
    facts, labels = _read_facts(cursor.take(facts_bytes))
    need(cursor.at == len(data), "bytes behind the facts")
    entries = _read_files(file_rows, paths, runs)
    check_blocks(table, runs)
    check_safe(entries)
    return Image(entries, dict(table), facts, labels)


def _read_extent(fields: tuple[int, int, int], table: list[tuple[Any, ...]]) -> Extent:
    """One extent with its block's id instead of the row."""
    row, offset, length = fields
    need(length > 0, "empty extent")
    if row == NO_BLOCK:
        need(offset == 0 and length <= MAX_ZERO_EXTENT, "zero extent out of range")
        return Extent(None, 0, length)
    need(row < len(table), "extent of a block that is not there")
    need(offset + length <= table[row][1], "extent beyond its block")
    return Extent(table[row][0], offset, length)


def _read_facts(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Facts and labels from canonical JSON."""
    try:
        both = json.loads(data.decode("ascii"))
    except ValueError as error:
        raise Refused("facts are not JSON in ASCII") from error
    need(isinstance(both, dict) and set(both) == {"facts", "labels"}, "facts and labels")
    facts, labels = both["facts"], both["labels"]
    need(isinstance(facts, dict) and isinstance(labels, dict), "facts or labels no object")
    need(all(isinstance(value, str) for value in labels.values()), "label that is no string")
    need(encode_facts(facts, labels) == data, "facts are not canonical")
    return facts, labels


def _read_files(rows: list[tuple[Any, ...]], paths: _Cursor, runs: list[Extent]) -> list[Entry]:
    """The files with their paths, links and extents; nothing may be left over."""
    entries, used = [], 0
    for row in rows:
        count = row[8]
        need(used + count <= len(runs), "more extents than there are")
        entry = _read_file(row, paths, tuple(runs[used : used + count]))
        check_entry(entry)
        entries.append(entry)
        used += count
    need(used == len(runs), "extents of no file")
    need(paths.at == len(paths.data), "paths of no file")
    return entries


def _read_file(row: tuple[Any, ...], paths: _Cursor, extents: tuple[Extent, ...]) -> Entry:
    """One file from its row."""
    path_length, link_length, kind, zero, mode, uid, gid, nano, _, seconds, size, device = row
    need(zero == 0, "reserved byte of a file")
    path = paths.take(path_length)
    link = paths.take(link_length)
    return Entry(path, kind, mode, uid, gid, (seconds, nano), size, device, link, extents)


def check_entry(entry: Entry) -> None:
    """The rules that one file keeps by itself."""
    need(entry.kind <= SOCKET, "unknown kind of file")
    need(entry.mode < 1 << 12, "mode with more than 12 bits")
    need(entry.mtime[1] <= 999_999_999, "nanoseconds out of range")
    need(entry.device == 0 or entry.kind in (CHARACTER, BLOCK_DEVICE), "device number")
    need(bool(entry.link) == (entry.kind in (SYMLINK, HARD_LINK)), "link where none belongs")
    need(len(entry.link) < PAGE and b"\0" not in entry.link, "link target")
    need(entry.kind == REGULAR or not entry.extents, "extents of no regular file")
    need(sum(extent.length for extent in entry.extents) == entry.size, "size")
    need(join(entry.extents) == entry.extents, "neighbours that are one extent")


def check_blocks(table: list[tuple[Any, ...]], runs: list[Extent]) -> None:
    """Blocks are in the order in which extents first name them, each named, none twice."""
    named = dict.fromkeys(extent.block for extent in runs if extent.block is not None)
    need(list(named) == [name for name, _ in table], "blocks out of order or not named")
    need(all(1 <= length <= MAX_BLOCK for _, length in table), "raw length of a block")


def check_safe(entries: list[Entry]) -> None:
    """Order of the paths, and that none leads out of the folder."""
    seen: dict[bytes, int] = {}
    last: bytes | None = None
    for entry in entries:
        need(last is None or last < entry.path, "paths out of order")
        check_path(entry, seen)
        last = entry.path
        seen[entry.path] = entry.kind


def check_path(entry: Entry, seen: dict[bytes, int]) -> None:
    """One path against those before it."""
    if not entry.path:
        need(entry.kind == FOLDER, "the root is no folder")
        return
    need(len(entry.path) < PAGE and b"\0" not in entry.path, "path too long or with NUL")
    need(not {b"", b".", b".."} & set(entry.path.split(b"/")), "path with a part that is unsafe")
    above, slash, _ = entry.path.rpartition(b"/")
    need(not slash or seen.get(above) == FOLDER, "path in something that is no folder")
    if entry.kind == HARD_LINK:
        need(seen.get(entry.link) == REGULAR, "hard link to no earlier regular file")


# --- chunking -----------------------------------------------------------------------------------

U64 = npt.NDArray[np.uint64]
PAGE_FILE = re.compile(rb"pages-[0-9]+\.img|amdgpu-pages-.*", re.DOTALL)


def make_weights(count: int) -> U64:
    """The first outputs of splitmix64 from state 0, each made odd."""
    mask, state, weights = (1 << 64) - 1, 0, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        weights.append((z ^ (z >> 31)) | 1)
    return np.array(weights, dtype=np.uint64)


WEIGHTS = make_weights(512)


def grain_of(path: bytes, size: int) -> int:
    """The grain of a file: a page for page data, else 512."""
    name = path.rpartition(b"/")[2]
    return PAGE if PAGE_FILE.fullmatch(name) and size % PAGE == 0 else 512


def view_grains(data: bytes, grain: int) -> U64:
    """The file as rows of grains, the last one filled up with zero bytes."""
    padded = data + bytes(-len(data) % grain)
    return np.frombuffer(padded, dtype="<u8").astype(np.uint64).reshape(-1, grain // 8)


def sums(grains: U64) -> U64:
    """f of every grain."""
    weights = WEIGHTS[: grains.shape[1]]
    parts = [grains[at : at + 1024] * weights for at in range(0, len(grains), 1024)]
    return np.concatenate([part.sum(axis=1, dtype=np.uint64) for part in parts])


def mix(f: U64) -> U64:
    """m of every f."""
    m: U64 = (f ^ (f >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return m ^ (m >> np.uint64(32))


def zero_runs(zero: npt.NDArray[np.bool_], grain: int) -> Iterator[tuple[int, int]]:
    """The zero extents, in grains; a partial last grain counts in full."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], zero, [False]]).astype(np.int8)))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if (end - first) * grain >= MIN_ZERO_RUN:
            yield first, end


def cut_points(first: int, end: int, marks: npt.NDArray[np.intp], grain: int) -> Iterator[int]:
    """Where blocks end, as grain numbers, between the grains first and end."""
    while first < end:
        at = np.searchsorted(marks, first + MIN_BLOCK // grain - 1)
        mark = int(marks[at]) + 1 if at < len(marks) else end
        first = min(mark, first + MAX_BLOCK // grain, end)
        yield first


def cut(data: bytes, grain: int) -> list[tuple[bool, int, int]]:
    """A file of 65536 bytes or more as (is zero, start, end) in bytes."""
    grains = view_grains(data, grain)
    zero: npt.NDArray[np.bool_] = np.max(grains, axis=1) == 0
    hits = mix(sums(grains)) % np.uint64(AVERAGE_BLOCK // grain) == 0
    marks = np.flatnonzero(hits & ~zero)
    pieces: list[tuple[bool, int, int]] = []
    at = 0
    for first, end in [*zero_runs(zero, grain), (len(grains), len(grains))]:
        for stop in cut_points(at, first, marks, grain):
            pieces.append((False, at, stop))
            at = stop
        if first < end:
            pieces.append((True, first, end))
        at = end
    return [(is_zero, a * grain, min(b * grain, len(data))) for is_zero, a, b in pieces]


@dataclass
class Cutter:
    """Turns files, in the order in which they are read, into extents and blocks."""

    blocks: dict[bytes, bytes] = field(default_factory=dict)
    extents: dict[bytes, tuple[Extent, ...]] = field(default_factory=dict)
    _group: bytearray = field(default_factory=bytearray)
    _members: list[tuple[bytes, int, int]] = field(default_factory=list)

    def add(self, path: bytes, data: bytes) -> None:
        """Cuts one regular file, or keeps it for a block of small files."""
        if not data:
            self.extents[path] = ()
        elif len(data) < MIN_BLOCK:
            self._add_small(path, data)
        else:
            pieces = cut(data, grain_of(path, len(data)))
            self.extents[path] = join(self._extent(data, piece) for piece in pieces)

    def _extent(self, data: bytes, piece: tuple[bool, int, int]) -> Extent:
        """The extent of one piece of a file, its block kept."""
        is_zero, start, end = piece
        return Extent(None if is_zero else self._keep(data[start:end]), 0, end - start)

    def _keep(self, raw: bytes) -> bytes:
        """Keeps a block and gives its id."""
        name = block_id(raw)
        self.blocks[name] = raw
        return name

    def _add_small(self, path: bytes, data: bytes) -> None:
        """Puts a small file behind those before it."""
        if len(self._group) + len(data) > MAX_BLOCK:
            self.finish()
        self._members.append((path, len(self._group), len(data)))
        self._group += data

    def finish(self) -> None:
        """Closes the block of small files that is open."""
        if self._members:
            name = self._keep(bytes(self._group))
        for path, offset, length in self._members:
            self.extents[path] = (Extent(name, offset, length),)
        self._group.clear()
        self._members.clear()


def make_image(sources: Iterable[tuple[Entry, bytes]]) -> tuple[list[Entry], dict[bytes, bytes]]:
    """Files with extents, and the blocks, from files and their bytes in the order of reading."""
    cutter, entries = Cutter(), []
    for entry, data in sources:
        entries.append(replace(entry, size=len(data)))
        if entry.kind == REGULAR:
            cutter.add(entry.path, data)
    cutter.finish()
    filled = [replace(entry, extents=cutter.extents.get(entry.path, ())) for entry in entries]
    return sorted(filled, key=lambda entry: entry.path), cutter.blocks


# --- reading a folder ---------------------------------------------------------------------------

KINDS = {
    stat.S_IFREG: REGULAR,
    stat.S_IFDIR: FOLDER,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFIFO: FIFO,
    stat.S_IFCHR: CHARACTER,
    stat.S_IFBLK: BLOCK_DEVICE,
    stat.S_IFSOCK: SOCKET,
}


def list_paths(root: bytes) -> list[bytes]:
    """Every path below a folder, the folder's own "" first, in byte order."""
    paths = [b""]
    for folder, folders, files in os.walk(root):
        below = os.path.relpath(folder, root)
        prefix = b"" if below == b"." else below + b"/"
        paths += [prefix + name for name in folders + files]
    return sorted(paths)


def read_folder(folder: Path) -> list[tuple[Entry, bytes]]:
    """The files of a folder as an image has them, with the bytes of the regular ones."""
    root = os.fsencode(folder)
    sources: list[tuple[Entry, bytes]] = []
    first: dict[tuple[int, int], bytes] = {}
    for path in list_paths(root):
        full = os.path.join(root, path) if path else root
        entry = read_entry(full, path, first)
        data = Path(os.fsdecode(full)).read_bytes() if entry.kind == REGULAR else b""
        sources.append((entry, data))
    return sources


def read_entry(full: bytes, path: bytes, first: dict[tuple[int, int], bytes]) -> Entry:
    """One file's attributes; first has the first path of every regular file with more names."""
    status = os.lstat(full)
    kind = KINDS[stat.S_IFMT(status.st_mode)]
    link = os.readlink(full) if kind == SYMLINK else b""
    if kind == REGULAR and status.st_nlink > 1:
        earlier = first.setdefault((status.st_dev, status.st_ino), path)
        kind, link = (REGULAR, b"") if earlier == path else (HARD_LINK, earlier)
    mode, mtime = stat.S_IMODE(status.st_mode), divmod(status.st_mtime_ns, 10**9)
    device = status.st_rdev if kind in (CHARACTER, BLOCK_DEVICE) else 0
    return Entry(path, kind, mode, status.st_uid, status.st_gid, mtime, 0, device, link)


def predict(
    sources: Iterable[tuple[Entry, bytes]],
    facts: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
) -> bytes:
    """The manifest that files in the order of reading must have."""
    files, blocks = make_image(sources)
    lengths = {name: len(raw) for name, raw in blocks.items()}
    return encode_manifest(files, lengths, facts, labels)


# --- journal ------------------------------------------------------------------------------------

OPERATIONS = {"add", "tag", "rm", "gc", "snapshot"}
KEYS = ("packs_added", "packs_dropped", "images_added", "images_removed", "names")


@dataclass
class State:
    """What a journal adds up to; ids are hex here, as in the journal."""

    sequence: int = -1
    packs: set[str] = field(default_factory=set)
    images: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)


def journal_line(change: dict[str, Any]) -> bytes:
    """One line of a journal."""
    text = json.dumps(change, separators=(",", ":")).encode()
    return blake3(text).hexdigest()[:16].encode() + b" " + text + b"\n"


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """The change of a line, or None if the line is damaged."""
    digest, space, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or not space:
        return None
    if digest != blake3(text).hexdigest()[:16].encode():
        return None
    change: dict[str, Any] = json.loads(text)
    return change


def read_journal(journal: bytes) -> list[dict[str, Any]]:
    """The changes that were made; a damaged end is left out."""
    need(journal.startswith(JOURNAL_LINE), "not a journal, or of another version")
    lines = re.findall(rb"[^\n]*\n|[^\n]+", journal[len(JOURNAL_LINE) :])
    changes = [_parse_line(line) for line in lines]
    whole = [change for change in changes if change is not None]
    need(changes[: len(whole)] == whole, "a damaged line with a whole one behind it")
    return whole


def replay(changes: Iterable[dict[str, Any]]) -> State:
    """Images, names and packs after all changes."""
    state = State()
    for change in changes:
        need(change["operation"] in OPERATIONS, "unknown operation")
        if change["operation"] == "snapshot":
            state = State(change["sequence"] - 1)
        need(change["sequence"] == state.sequence + 1, "gap in the sequence")
        state.sequence += 1
        _apply(state, change)
    return state


def _apply(state: State, change: dict[str, Any]) -> None:
    """One change: sets first, then names, which must fit the images that are left."""
    _replace(state.packs, change["packs_added"], change["packs_dropped"])
    _replace(state.images, change["images_added"], change["images_removed"])
    for name, image in change["names"].items():
        if image is None:
            need(state.names.pop(name, None), "a name is gone that was not there")
        else:
            state.names[name] = image
    need(set(state.names.values()) <= state.images, "a name without its image")


def _replace(things: set[str], added: list[str], gone: list[str]) -> None:
    """Takes out what is gone and puts in what is added, each for the first time."""
    need(things.issuperset(gone), "something is gone that was not there")
    need(things.isdisjoint(added), "something is added that was there")
    things.difference_update(gone)
    things.update(added)


# --- store --------------------------------------------------------------------------------------


class Store:
    """A store's folder, read without lock and catalog."""

    def __init__(self, folder: Path) -> None:
        line = (folder / "format").read_bytes()
        need(line.removesuffix(b"\n") == FORMAT_LINE, "format of another version")
        self.folder = folder
        self.state = replay(read_journal((folder / "journal").read_bytes()))
        self.rows: dict[tuple[int, bytes], tuple[str, Row]] = {}
        for name in sorted(self.state.packs):
            self._open(name)

    def pack(self, name: str) -> bytes:
        """The bytes of a pack."""
        return (self.folder / "packs" / name[:2] / name).read_bytes()

    def _open(self, name: str) -> None:
        """Reads the index of a pack."""
        digest, rows = read_pack(self.pack(name))
        need(digest.hex() == name, "pack under another name")
        self.rows.update({(row.kind, row.id): (name, row) for row in rows})

    def blocks(self, kind: int, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """The raw bytes of blocks of one kind, each pack read once."""
        found = [self.rows[kind, name] for name in names]
        packs = {name: self.pack(name) for name, _ in found}
        return {row.id: block(packs[name], row) for name, row in found}

    def manifest(self, image: str) -> bytes:
        """The encoding of an image."""
        need(image in self.state.images, "no such image")
        name = bytes.fromhex(image)
        return self.blocks(MANIFEST, [name])[name]

    def read(self, image: str) -> tuple[Image, dict[bytes, bytes]]:
        """An image and the bytes of its regular files, by path."""
        opened = read_manifest(self.manifest(image))
        blocks = self.blocks(DATA, opened.blocks)
        need(opened.blocks == {name: len(raw) for name, raw in blocks.items()}, "raw length")
        regular = [entry for entry in opened.files if entry.kind == REGULAR]
        return opened, {entry.path: contents(entry, blocks) for entry in regular}


def contents(entry: Entry, blocks: dict[bytes, bytes]) -> bytes:
    """The bytes of a regular file."""
    return b"".join(
        bytes(extent.length)
        if extent.block is None
        else blocks[extent.block][extent.offset : extent.offset + extent.length]
        for extent in entry.extents
    )


def write_store(folder: Path, name: str, files: Sequence[Entry], blocks: dict[bytes, bytes]) -> str:
    """A new store with one image, all blocks raw in one pack; gives the image's id."""
    lengths = {name: len(raw) for name, raw in blocks.items()}
    manifest = encode_manifest(files, lengths)
    used = [(DATA, blocks[key]) for key in read_manifest(manifest).blocks]
    digest, pack = write_pack([*used, (MANIFEST, manifest)])
    image = block_id(manifest).hex()
    added: dict[str, Any] = dict.fromkeys(KEYS, [])
    added |= {"packs_added": [digest.hex()], "images_added": [image]}
    change = {"sequence": 0, "operation": "add", "time": 0, **added}
    change["names"] = {f"{name}:latest": image}
    packs = folder / "packs" / digest.hex()[:2]
    for part in (folder, folder / "staging", folder / "packs", packs):
        part.mkdir(mode=0o700)
    _write_file(packs / digest.hex(), pack)
    _write_file(folder / "lock", b"")
    _write_file(folder / "journal", JOURNAL_LINE + journal_line(change))
    _write_file(folder / "format", FORMAT_LINE + b"\n")
    return image


def _write_file(path: Path, data: bytes) -> None:
    """A file of a store, for its owner alone."""
    path.touch(mode=0o600)
    path.write_bytes(data)
