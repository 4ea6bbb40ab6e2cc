"""The few file system calls that durability hangs on.

Everything that changes a store on disk goes through here, so that the order of writes can be
read in one place and so that tests can stop a process before and after each step: they set
`hook`, which is called with (operation, path) around every call.

Errors of the operating system leave as NoSpace or NotWritable, naming the path.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from icefloe.errors import IcefloeError, NoSpace, NotWritable

Buffer: TypeAlias = bytes | bytearray | memoryview


def _no_hook(operation: str, path: Path) -> None:
    """What production runs."""


hook: Callable[[str, Path], None] = _no_hook

# Linux takes at most this many pieces in one writev (limits.h, IOV_MAX).
_IOV_MAX = 1024

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turns what the operating system says about a refused write into NoSpace or NotWritable."""
    try:
        yield
    except IcefloeError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        kind = NoSpace if error.errno in FULL else NotWritable
        raise kind(path, reason) from error


@contextmanager
def step(operation: str, path: Path) -> Iterator[None]:
    """One step that a crash can fall before or after."""
    hook(operation, path)
    with write_errors(path):
        yield
    hook(operation + " done", path)


def write(fd: int, path: Path, pieces: Sequence[Buffer]) -> int:
    """Writes all pieces at the file's position; returns their total length in bytes."""
    with step("write", path):
        total = 0
        for first in range(0, len(pieces), _IOV_MAX):
            total += _writev(fd, pieces[first : first + _IOV_MAX])
        return total


def _writev(fd: int, pieces: Sequence[Buffer]) -> int:
    wanted = sum(map(len, pieces))
    written = os.writev(fd, pieces)
    if written < wanted:  # the kernel stops at 2 GiB, and short of a full disk
        rest = memoryview(b"".join(pieces))
        while written < wanted:
            written += os.write(fd, rest[written:])
    return wanted


def fsync(fd: int, path: Path) -> None:
    """The file's bytes are on the disk when this returns."""
    with step("fsync", path):
        os.fsync(fd)


def fsync_folder(path: Path) -> None:
    """The folder's entries are on the disk when this returns."""
    with step("fsync folder", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def rename(old: Path, new: Path) -> None:
    """Atomically gives a file its final name."""
    with step("rename", new):
        os.rename(old, new)


def unlink(path: Path) -> None:
    """Removes a file; one that is already gone is fine."""
    with step("unlink", path):
        path.unlink(missing_ok=True)


def truncate(fd: int, path: Path, length: int) -> None:
    """Cuts a file to `length` bytes."""
    with step("truncate", path):
        os.ftruncate(fd, length)


def make_folder(path: Path) -> None:
    """Makes a folder (0700) and the missing ones above it, each durable in its parent."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with step("mkdir", path):
        path.mkdir(mode=0o700, exist_ok=True)
    fsync_folder(path.parent)


def publish(path: Path, content: bytes) -> None:
    """Writes a whole small file so that it is there complete or not at all. Mode 0600."""
    staged = path.with_name(f".{path.name}.new")
    with write_errors(staged):
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write(fd, staged, [content])
        fsync(fd, staged)
    finally:
        os.close(fd)
    rename(staged, path)
    fsync_folder(path.parent)
