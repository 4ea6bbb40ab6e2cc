"""`export`: writes an image back as the exact directory that was stored.

Everything is written into a folder beside the destination, which gets its name when all of it is
there (into one inside of it, when the destination is a mount). Worker threads take spans of a few
MiB; every block is verified before it is written. Zero extents become holes.
"""

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np

from icefloe import allocator, durable
from icefloe.capture.blocks import Blocks, BlockSource, StoreSource, read_extents
from icefloe.catalog import LocalStore
from icefloe.durable import Buffer
from icefloe.errors import ExportExists
from icefloe.ids import BlockId
from icefloe.store.manifest import ZERO, Extents, FileKind, ImageFile, Manifest
from icefloe.workers import worker_count

_NODES = {
    FileKind.FIFO: 0o010000,
    FileKind.CHARACTER_DEVICE: 0o020000,
    FileKind.BLOCK_DEVICE: 0o060000,
    FileKind.SOCKET: 0o140000,
}


# What a thread writes before it takes the next piece.
_SPAN_BYTES = 16 << 20

# With so many pieces a block, a span is put together in memory first.
_FRAGMENTED = 3


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What was written. `written_bytes` leaves out holes."""

    id: BlockId
    files: int
    logical_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Extents [first, last) of the manifest; they belong to one file and start at `offset`."""

    file: ImageFile
    first: int
    last: int
    offset: int


Progress = Callable[[int], None]
"""Called with bytes finished since the last call, from any thread."""


def export_image(
    store: LocalStore,
    image: BlockId,
    destination: Path,
    workers: int = 0,
    progress: Progress = lambda count: None,
) -> ExportResult:
    """Writes `image` to `destination`, which must not exist or be an empty folder.

    Raises ExportExists, Corrupt, NoSpace or NotWritable; then the destination is as it was.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ExportExists(destination)
    allocator.keep_freed()
    manifest = store.manifest(image)
    destination = destination.absolute()
    staged = _staging_place(destination)
    with durable.write_errors(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        staged.mkdir(mode=0o700)
        try:
            source = StoreSource(store, manifest)
            written = write_files(source, manifest, staged, workers, progress)
            _settle(staged, destination)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
    return ExportResult(image, len(manifest.files), manifest.logical_bytes, written)


class _Room:
    """Memory that a thread uses again and again."""

    def __init__(self) -> None:
        self._content = memoryview(b"")

    def of(self, length: int) -> memoryview:
        """So many bytes, whatever they hold."""
        if length > len(self._content):
            self._content = memoryview(bytearray(length))
        return self._content[:length]


def _staging_place(destination: Path) -> Path:
    """Beside the destination; inside of it when it is a mount, which nothing can replace."""
    if destination.is_mount():
        return destination / f".{os.getpid()}.partial"
    return destination.with_name(f".{destination.name}.{os.getpid()}.partial")


def _settle(staged: Path, destination: Path) -> None:
    """Gives what was written its final name."""
    if staged.parent != destination:
        os.rename(staged, destination)
        return
    status = staged.stat()
    staged.chmod(0o700)  # else nothing may leave a read-only folder
    for path in staged.iterdir():
        os.rename(path, destination / path.name)
    staged.rmdir()
    if os.geteuid() == 0:
        os.chown(destination, status.st_uid, status.st_gid)
    os.chmod(destination, stat.S_IMODE(status.st_mode))
    os.utime(destination, ns=(status.st_mtime_ns, status.st_mtime_ns))


def write_files(
    source: BlockSource,
    manifest: Manifest,
    root: Path,
    workers: int = 0,
    progress: Progress = lambda count: None,
) -> int:
    """Writes every entry of the manifest into an empty folder; returns the bytes written.

    Raises Corrupt or OSError, and leaves what it wrote.
    """
    _make_entries(manifest.files, root)
    count = worker_count(workers)
    spans, lock, failed = _spans(manifest), threading.Lock(), threading.Event()

    def work() -> int:
        written, room = 0, _Room()
        try:
            with closing(source.open()) as blocks:
                while not failed.is_set():
                    with lock:
                        span = next(spans, None)
                    if span is None:
                        break
                    written += _write_span(blocks, manifest, root, span, room)
                    progress(int(manifest.extents["length"][span.first : span.last].sum()))
        except BaseException:
            failed.set()
            raise
        return written

    with ThreadPoolExecutor(count, "export") as pool:
        futures = [pool.submit(work) for _ in range(count)]
        try:
            total = sum(future.result() for future in futures)
        except BaseException:
            failed.set()
            raise
    _finish_entries(manifest.files, root)
    return total


def _make_entries(files: Sequence[ImageFile], root: Path) -> None:
    """All entries, regular files with their length and no bytes. Folders come before contents."""
    for file in files:
        path = root / file.path
        if file.kind is FileKind.FOLDER and file.path:
            path.mkdir(mode=0o700)
        elif file.kind is FileKind.SYMLINK:
            os.symlink(file.link, path)
        elif file.kind is FileKind.HARDLINK:
            os.link(root / file.link, path, follow_symlinks=False)
        elif file.kind in _NODES:
            os.mknod(path, _NODES[file.kind] | 0o600, file.device)
        elif file.kind is FileKind.REGULAR:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, file.size)
            finally:
                os.close(fd)


def _spans(manifest: Manifest) -> Iterator[_Span]:
    """Each of about _SPAN_BYTES: however fragmented, that is one thread's work."""
    for i, file in enumerate(manifest.files):
        ends = np.cumsum(manifest.extents_of(i)["length"], dtype=np.int64)
        cuts = np.flatnonzero(np.diff(ends // _SPAN_BYTES, append=-1)) + 1
        base, first, offset = int(manifest.bounds[i]), 0, 0
        for last in cuts.tolist():
            yield _Span(file, base + first, base + last, offset)
            first, offset = last, int(ends[last - 1])


def _write_span(blocks: Blocks, manifest: Manifest, root: Path, span: _Span, room: _Room) -> int:
    """Writes the bytes of a span; returns how many."""
    extents = manifest.extents[span.first : span.last]
    pieces = read_extents(blocks, extents)
    if _is_fragmented(extents):
        pieces = _assembled(blocks, extents, room)
    fd = os.open(root / span.file.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    written, position = 0, span.offset
    try:
        for piece, length in pieces:
            if piece is not None:
                _pwrite(fd, memoryview(piece), position)
                written += length
            position += length
    finally:
        os.close(fd)
    return written


def _is_fragmented(extents: Extents) -> bool:
    """Whether these are many small pieces of few blocks."""
    data = extents["block"][extents["block"] != ZERO]
    return len(data) > 0 and len(data) >= _FRAGMENTED * len(np.unique(data))


def _assembled(
    blocks: Blocks, extents: Extents, room: _Room
) -> Iterator[tuple[Buffer | None, int]]:
    """Like `read_extents`, with as much as possible in one piece; each block is decoded once.

    What is handed out lies in `room`.
    """
    is_zero = extents["block"] == ZERO
    data = extents[~is_zero]
    ends = np.cumsum(data["length"], dtype=np.int64)
    by_block = np.argsort(data["block"], kind="stable")
    numbers, counts = np.unique(data["block"], return_counts=True)
    places = ends - data["length"].astype(np.int64)
    columns = (data["offset"], data["length"], places)
    pieces = zip(*(column[by_block].tolist() for column in columns), strict=True)
    content = room.of(int(ends[-1]))
    fetched = chain.from_iterable(blocks.fetch(numbers.tolist()))
    for (_, raw), count in zip(fetched, counts.tolist(), strict=True):
        source = memoryview(raw)
        for offset, length, place in islice(pieces, count):
            content[place : place + length] = source[offset : offset + length]
    done = 0
    edges = (np.flatnonzero(np.diff(is_zero)) + 1).tolist()
    for start, end in pairwise([0, *edges, len(extents)]):
        length = int(extents["length"][start:end].sum())
        yield None if is_zero[start] else content[done : done + length], length
        done += 0 if is_zero[start] else length


def _pwrite(fd: int, raw: memoryview, position: int) -> None:
    while raw:
        count = os.pwrite(fd, raw, position)
        raw, position = raw[count:], position + count


def _finish_entries(files: Sequence[ImageFile], root: Path) -> None:
    """Owners, modes and times; contents first, since writing them touches their folder's time."""
    is_root = os.geteuid() == 0
    for file in reversed(files):
        path = root / file.path
        if file.kind is FileKind.HARDLINK:
            continue
        if is_root or (file.uid, file.gid) != (os.geteuid(), os.getegid()):
            _own(path, file, is_root)
        if file.kind is not FileKind.SYMLINK:
            os.chmod(path, file.mode)
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns), follow_symlinks=False)


def _own(path: Path, file: ImageFile, is_root: bool) -> None:
    """Only root can give files away; others get files of their own, as tar does."""
    try:
        os.lchown(path, file.uid, file.gid)
    except PermissionError:
        if is_root:
            raise
