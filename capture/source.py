"""What can be stored: a checkpoint's entries, and the bytes of those that have any."""

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from icefloe.chunker import BYTES, PAGES, Grain
from icefloe.errors import BadSource, SourceChanged, SourceUnreadable
from icefloe.store.manifest import MAX_PATH, ImageFile

# CRIU's memory images (images/pagemap.proto, criu/image-desc.c) and its amdgpu plugin's.
_PAGE_DATA = re.compile(r"pages-[0-9]+\.img|amdgpu-pages-.*", re.DOTALL)


class ByteSource(Protocol):
    """The bytes of one file. Any error while reading means that nothing gets stored."""

    sequential: bool
    """Must be read front to back, by one thread at a time."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fills `view` with the bytes at `offset`. Raises SourceChanged or SourceUnreadable."""

    def is_hole(self, offset: int, length: int) -> bool:
        """True when the file system knows that this range is zero."""

    def close(self) -> None:
        """Raises SourceChanged when the file isn't what it was when it was opened."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An entry; `open` is there when it is a regular file that has bytes."""

    file: ImageFile
    open: Callable[[], ByteSource] | None = None


class Checkpoint(Protocol):
    """A directory or an archive."""

    def files(self) -> Iterator[SourceFile]:
        """All entries, each once, in the order in which they are best read."""

    def logical_bytes(self) -> int | None:
        """Bytes to be read, for a progress bar; None when it can't be known before."""

    def verify(self) -> None:
        """Called after the last read. Raises SourceChanged when entries came or went."""


def is_page_data(path: str, patterns: Sequence[str]) -> bool:
    """Whether a file holds memory: CRIU's own, or one whose path or name matches a pattern."""
    name = path.rpartition("/")[2]
    if _PAGE_DATA.fullmatch(name):
        return True
    return any(fnmatchcase(path, p) or fnmatchcase(name, p) for p in patterns)


def grain_of(path: str, size: int, patterns: Sequence[str]) -> Grain:
    """Memory is cut on pages, everything else on 512 bytes."""
    pages = size % PAGES.size == 0 and is_page_data(path, patterns)
    return PAGES if pages else BYTES


@contextmanager
def read_errors(path: str | Path) -> Iterator[None]:
    """Turns what the operating system says about a refused read into our errors."""
    try:
        yield
    except (SourceUnreadable, SourceChanged):
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ESTALE):
            raise SourceChanged(path, reason) from error
        raise SourceUnreadable(path, reason) from error


def check_path(path: str, link: str) -> None:
    """Raises BadSource for a path or link target that the format can't hold."""
    for text in (path, link):
        if len(os.fsencode(text)) >= MAX_PATH:
            raise BadSource(
                f"path {text[:80]}... is longer than {MAX_PATH - 1} bytes", "shorten it"
            )


class PlainFile:
    """A file on disk, or `length` bytes of one from `start` on."""

    sequential = False

    def __init__(self, path: Path, expected: os.stat_result, start: int = 0) -> None:
        """Raises SourceChanged when the file isn't the one that was listed."""
        self._path = path
        self._start = start
        self._expected = fingerprint(expected)
        with read_errors(path):
            # NONBLOCK: a pipe in the file's place would let us wait for ever.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._fd = os.open(path, flags)
        try:
            self._check()
        except BaseException:
            os.close(self._fd)
            raise

    def read_into(self, offset: int, view: memoryview) -> None:
        """See ByteSource."""
        position, done = self._start + offset, 0
        with read_errors(self._path):
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], position + done)
                if not count:
                    raise SourceChanged(self._path, f"it ends at byte {position + done}")
                done += count

    def is_hole(self, offset: int, length: int) -> bool:
        """See ByteSource."""
        position = self._start + offset
        try:
            return os.lseek(self._fd, position, os.SEEK_DATA) >= position + length
        except OSError as error:
            # ENXIO: no data behind `position`. Anything else: the file system doesn't tell.
            return error.errno == errno.ENXIO

    def close(self) -> None:
        """See ByteSource."""
        try:
            self._check()
        finally:
            os.close(self._fd)

    def _check(self) -> None:
        if fingerprint(os.fstat(self._fd)) != self._expected:
            raise SourceChanged(self._path, "its size or time differs")


def fingerprint(status: os.stat_result) -> tuple[int, ...]:
    """Moves with every write to a file, with its links and its mode."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
