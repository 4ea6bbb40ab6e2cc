"""The manifest: what one image consists of. docs/format.md, "Manifest".

    manifest := header file* block* extent* paths facts
    header   := "ICEFMANI" version:u32 files:u32 blocks:u32 extents:u32
                path_bytes:u32 facts_bytes:u32
    file     := path_length:u16 link_length:u16 kind:u8 0:u8 mode:u16 uid:u32 gid:u32
                mtime_nanoseconds:u32 extents:u32 mtime_seconds:i64 size:u64 device:u64
    block    := id[32] raw_length:u32
    extent   := block:u32 offset:u32 length:u64        (block 0xffffffff: zero)
    paths    := for each file its path, then its link
    facts    := canonical JSON {"facts": {...}, "labels": {...}}

There is one encoding of an image: files in order of their paths' bytes, blocks in order of first
use, extents merged where they can be. `decode` accepts nothing else, and treats every manifest
as hostile: what it returns can be written to disk without leaving the folder it is written to.
"""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from icefloe.chunker import MAX_BLOCK
from icefloe.errors import CorruptManifest, LimitReached, UnknownFormat
from icefloe.ids import BlockId
from icefloe.store.pack import MAX_MANIFEST

VERSION = 1
MAGIC = b"ICEFMANI"
HEADER = struct.Struct("<8sIIIIII")

FILE_DTYPE = np.dtype(
    [
        ("path_length", "<u2"),
        ("link_length", "<u2"),
        ("kind", "u1"),
        ("reserved", "u1"),
        ("mode", "<u2"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        ("mtime_nanoseconds", "<u4"),
        ("extents", "<u4"),
        ("mtime_seconds", "<i8"),
        ("size", "<u8"),
        ("device", "<u8"),
    ]
)
BLOCK_DTYPE = np.dtype([("id", "V32"), ("length", "<u4")])
EXTENT_DTYPE = np.dtype([("block", "<u4"), ("offset", "<u4"), ("length", "<u8")])

Blocks: TypeAlias = NDArray[np.void]
Extents: TypeAlias = NDArray[np.void]

ZERO = 0xFFFFFFFF
"""The block number of a zero extent."""

# PATH_MAX of Linux; no longer path could be written back.
MAX_PATH = 4096

_NANOSECONDS = 1_000_000_000


class FileKind(IntEnum):
    """What an entry of an image is."""

    REGULAR = 0
    FOLDER = 1
    SYMLINK = 2
    HARDLINK = 3
    FIFO = 4
    CHARACTER_DEVICE = 5
    BLOCK_DEVICE = 6
    SOCKET = 7


_DEVICES = (FileKind.CHARACTER_DEVICE, FileKind.BLOCK_DEVICE)
_LINKS = (FileKind.SYMLINK, FileKind.HARDLINK)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One entry of a checkpoint. Paths are relative; the checkpoint's own folder is ``""``.

    `link` is where a symlink points, or the path of the entry that a hard link shares its bytes
    with. `size` in bytes; 0 for all but regular files. `device` is st_rdev.
    """

    path: str
    kind: FileKind
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int = 0
    link: str = ""
    device: int = 0


@dataclass(frozen=True, eq=False)
class Manifest:
    """One image. `extents[bounds[i]:bounds[i+1]]` belong to `files[i]`."""

    files: tuple[ImageFile, ...]
    bounds: NDArray[np.int64]
    blocks: Blocks
    extents: Extents
    facts: Mapping[str, Any]
    labels: Mapping[str, str]

    @cached_property
    def logical_bytes(self) -> int:
        """Bytes of all regular files."""
        return sum(file.size for file in self.files)

    @cached_property
    def zero_bytes(self) -> int:
        """Bytes in zero extents."""
        return int(self.extents["length"][self.extents["block"] == ZERO].sum())

    @cached_property
    def raw_bytes(self) -> int:
        """Raw bytes of its distinct blocks."""
        return int(self.blocks["length"].sum(dtype=np.int64))

    @property
    def read_amplification(self) -> float:
        """Bytes of blocks that reading the image takes, over the non-zero bytes it holds.

        Under 1 when an image repeats itself.
        """
        wanted = self.logical_bytes - self.zero_bytes
        return self.raw_bytes / wanted if wanted else 1.0

    def block_ids(self) -> list[BlockId]:
        """Ids of the distinct blocks, in order of first use."""
        joined = self.blocks["id"].tobytes()
        return [BlockId(joined[i : i + 32]) for i in range(0, len(joined), 32)]

    def extents_of(self, index: int) -> Extents:
        """The extents of files[index], in order."""
        return self.extents[self.bounds[index] : self.bounds[index + 1]]

    def zero_bytes_of(self, index: int) -> int:
        """Bytes of files[index] in zero extents."""
        extents = self.extents_of(index)
        return int(extents["length"][extents["block"] == ZERO].sum())


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes. Raises LimitReached when they pass 256 MiB."""
    rows = np.zeros(len(manifest.files), FILE_DTYPE)
    names: list[bytes] = []
    counts = np.diff(manifest.bounds)
    for i, file in enumerate(manifest.files):
        path, link = os.fsencode(file.path), os.fsencode(file.link)
        names += [path, link]
        seconds, nanoseconds = divmod(file.mtime_ns, _NANOSECONDS)
        rows[i] = (len(path), len(link), file.kind, 0, file.mode, file.uid, file.gid) + (
            nanoseconds,
            counts[i],
            seconds,
            file.size,
            file.device,
        )
    paths, facts = b"".join(names), _encode_facts(manifest.facts, manifest.labels)
    head = HEADER.pack(
        MAGIC,
        VERSION,
        len(rows),
        len(manifest.blocks),
        len(manifest.extents),
        len(paths),
        len(facts),
    )
    parts = [head, rows.tobytes(), manifest.blocks.tobytes(), manifest.extents.tobytes()]
    encoded = b"".join([*parts, paths, facts])
    if len(encoded) > MAX_MANIFEST:
        raise LimitReached(
            f"the manifest would have {len(encoded)} bytes, the limit is {MAX_MANIFEST}",
            "store the checkpoint as several images",
        )
    return encoded


def _encode_facts(facts: Mapping[str, Any], labels: Mapping[str, str]) -> bytes:
    document = {"facts": facts, "labels": labels}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def decode(encoded: bytes) -> Manifest:
    """The image that these bytes describe. Raises CorruptManifest or UnknownFormat."""
    if len(encoded) < HEADER.size:
        raise CorruptManifest(f"only {len(encoded)} bytes")
    magic, version, files, blocks, extents, path_bytes, facts_bytes = HEADER.unpack_from(encoded)
    if magic != MAGIC or version < 1:
        raise CorruptManifest("no manifest header")
    if version > VERSION:
        raise UnknownFormat("the manifest", version, VERSION)
    sizes = (
        files * FILE_DTYPE.itemsize,
        blocks * BLOCK_DTYPE.itemsize,
        extents * EXTENT_DTYPE.itemsize,
        path_bytes,
        facts_bytes,
    )
    if HEADER.size + sum(sizes) != len(encoded):
        raise CorruptManifest("its length differs from its counts")
    ends = np.cumsum([HEADER.size, *sizes]).tolist()
    parts = [encoded[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
    rows = np.frombuffer(parts[0], FILE_DTYPE)
    facts, labels = _decode_facts(parts[4])
    manifest = Manifest(
        files=_decode_files(rows, parts[3]),
        bounds=np.concatenate([[0], np.cumsum(rows["extents"], dtype=np.int64)]),
        blocks=np.frombuffer(parts[1], BLOCK_DTYPE),
        extents=np.frombuffer(parts[2], EXTENT_DTYPE),
        facts=facts,
        labels=labels,
    )
    _check_files(manifest.files)
    _check_blocks(manifest)
    _check_extents(manifest)
    return manifest


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise CorruptManifest(reason)


def _decode_facts(encoded: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        document = json.loads(encoded)
        facts, labels = document.pop("facts"), document.pop("labels")
        canonical = not document and _encode_facts(facts, labels) == encoded
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptManifest("its facts are not canonical JSON") from None
    _require(canonical, "its facts are not canonical JSON")
    _require(isinstance(facts, dict) and isinstance(labels, dict), "its facts are no objects")
    _require(all(isinstance(v, str) for v in labels.values()), "a label is no text")
    return facts, labels


def _decode_files(rows: NDArray[np.void], paths: bytes) -> tuple[ImageFile, ...]:
    lengths = np.stack([rows["path_length"], rows["link_length"]], axis=1).astype(np.int64)
    _require(int(lengths.sum()) == len(paths), "its paths have other lengths")
    _require(bool((rows["reserved"] == 0).all()), "a reserved byte is set")
    _require(bool((rows["kind"] <= max(FileKind)).all()), "a file has an unknown kind")
    _require(bool((rows["mtime_nanoseconds"] < _NANOSECONDS).all()), "an mtime is out of range")
    files, position = [], 0
    for row in rows.tolist():
        path_length, link_length, kind, _, mode, uid, gid, nanoseconds, _, seconds, size, dev = row
        link_start, end = position + path_length, position + path_length + link_length
        files.append(
            ImageFile(
                path=os.fsdecode(paths[position:link_start]),
                kind=FileKind(kind),
                mode=mode,
                uid=uid,
                gid=gid,
                mtime_ns=seconds * _NANOSECONDS + nanoseconds,
                size=size,
                link=os.fsdecode(paths[link_start:end]),
                device=dev,
            )
        )
        position = end
    return tuple(files)


def _check_files(files: Sequence[ImageFile]) -> None:
    """Every entry lies in a folder of the image itself, so nothing is written outside of it."""
    kinds: dict[str, FileKind] = {}
    before: bytes | None = None
    for file in files:
        path = os.fsencode(file.path)
        _require(before is None or before < path, f"path {file.path!r} is out of order")
        before = path
        _check_path(file, kinds)
        _check_fields(file)
        if file.kind is FileKind.HARDLINK:
            target = kinds.get(file.link)
            _require(target is FileKind.REGULAR, f"{file.path!r} links to no earlier file")
        kinds[file.path] = file.kind


def _check_path(file: ImageFile, kinds: Mapping[str, FileKind]) -> None:
    if not file.path:
        _require(file.kind is FileKind.FOLDER, "the root is no folder")
        return
    _require(len(os.fsencode(file.path)) < MAX_PATH, "a path is too long")
    _require(safe_path(file.path), f"path {file.path!r} is not a plain relative path")
    parent = file.path.rpartition("/")[0]
    _require(
        not parent or kinds.get(parent) is FileKind.FOLDER,
        f"{file.path!r} lies in no folder of the image",
    )


def safe_path(path: str) -> bool:
    """A relative path without empty, `.` and `..` parts and without NUL."""
    return "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def _check_fields(file: ImageFile) -> None:
    name = repr(file.path)
    _require(file.mode <= 0o7777, f"{name} has an impossible mode")
    _require(file.kind is FileKind.REGULAR or not file.size, f"{name} has a size and no bytes")
    _require(bool(file.link) == (file.kind in _LINKS), f"{name} has no target, or one too many")
    _require("\0" not in file.link, f"the target of {name} holds a NUL")
    _require(len(os.fsencode(file.link)) < MAX_PATH, f"the target of {name} is too long")
    _require(file.kind in _DEVICES or not file.device, f"{name} is no device")


def _check_blocks(manifest: Manifest) -> None:
    blocks, numbers = manifest.blocks, manifest.extents["block"]
    lengths = blocks["length"]
    _require(bool(((lengths > 0) & (lengths <= MAX_BLOCK)).all()), "a block has no valid length")
    ids = np.ascontiguousarray(blocks["id"]).view("S32")
    _require(len(np.unique(ids)) == len(ids), "a block is listed twice")
    used, first = np.unique(numbers[numbers != ZERO], return_index=True)
    _require(
        len(used) == len(blocks) and bool((used == np.arange(len(blocks))).all()),
        "it lists blocks that no extent names, or misses some",
    )
    _require(bool((np.diff(first) > 0).all()), "its blocks are not in order of first use")


def _check_extents(manifest: Manifest) -> None:
    extents, bounds = manifest.extents, manifest.bounds
    _require(int(bounds[-1]) == len(extents), "its extents belong to no file")
    zero, length = extents["block"] == ZERO, extents["length"]
    offset = extents["offset"].astype(np.uint64)
    # Lengths over this would overflow the sums below; no file is that long.
    _require(bool(((length > 0) & (length < 1 << 48)).all()), "an extent has no valid length")
    _require(bool((offset[zero] == 0).all()), "a zero extent has an offset")
    inside = offset[~zero] + length[~zero]
    limits = manifest.blocks["length"][extents["block"][~zero]]
    _require(bool((inside <= limits).all()), "an extent lies outside its block")
    _require(len(extents) < 1 << 15 or float(length.sum(dtype=np.float64)) < 2.0**62, "it is huge")
    ends = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])
    sizes = ends[bounds[1:]] - ends[bounds[:-1]]
    declared = np.array([file.size for file in manifest.files], dtype=np.uint64)
    _require(bool((sizes.astype(np.uint64) == declared).all()), "a file's size is not its extents'")
    if len(extents) > 1:
        _check_merged(extents, bounds)


def _check_merged(extents: Extents, bounds: NDArray[np.int64]) -> None:
    """Two neighbours in one file that could be one extent would be a second encoding."""
    before, after = extents[:-1], extents[1:]
    same = before["block"] == after["block"]
    zero = before["block"] == ZERO
    follows = before["offset"] + before["length"] == after["offset"]
    same_file = np.ones(len(before), np.bool_)
    starts = bounds[1:-1]
    same_file[starts[(starts > 0) & (starts < len(extents))] - 1] = False
    _require(not bool((same & same_file & (zero | follows)).any()), "extents are not merged")
