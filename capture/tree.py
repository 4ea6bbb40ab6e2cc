"""A checkpoint that is a directory, as `criu dump -D` leaves it.

CRIU's `parent` link to an earlier dump (criu/image.c, CR_PARENT_LINK) is followed: the earlier
dump becomes a folder `parent` of the image, where `criu restore` finds it just as well.
"""

import os
import stat
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from icefloe.capture.source import (
    PlainFile,
    SourceFile,
    check_path,
    fingerprint,
    read_errors,
)
from icefloe.errors import BadSource, SourceChanged
from icefloe.store.manifest import FileKind, ImageFile

PARENT = "parent"

_KINDS = {
    stat.S_IFREG: FileKind.REGULAR,
    stat.S_IFDIR: FileKind.FOLDER,
    stat.S_IFLNK: FileKind.SYMLINK,
    stat.S_IFIFO: FileKind.FIFO,
    stat.S_IFCHR: FileKind.CHARACTER_DEVICE,
    stat.S_IFBLK: FileKind.BLOCK_DEVICE,
    stat.S_IFSOCK: FileKind.SOCKET,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str  # inside the image
    place: Path  # on disk
    status: os.stat_result


class Tree:
    """Lists the directory when made; reads files when asked."""

    def __init__(self, root: Path, without: Set[str] = frozenset()) -> None:
        """`without`: paths to leave out. Raises SourceUnreadable, SourceChanged or BadSource."""
        with read_errors(root):
            status = root.stat()
        top = _Entry("", root.resolve(), status)
        entries = [top, *(entry for entry in _walk(top) if entry.path not in without)]
        self._entries = sorted(entries, key=lambda entry: os.fsencode(entry.path))

    def files(self) -> Iterator[SourceFile]:
        """See Checkpoint: in order of paths."""
        first_of: dict[tuple[int, int], str] = {}
        for entry in self._entries:
            inode = (entry.status.st_dev, entry.status.st_ino)
            if stat.S_ISREG(entry.status.st_mode) and entry.status.st_nlink > 1:
                first = first_of.setdefault(inode, entry.path)
                if first != entry.path:
                    yield SourceFile(_image_file(entry, FileKind.HARDLINK, first))
                    continue
            yield _source_file(entry)

    def logical_bytes(self) -> int:
        """See Checkpoint."""
        return sum(e.status.st_size for e in self._entries if stat.S_ISREG(e.status.st_mode))

    def verify(self) -> None:
        """See Checkpoint. A folder's time moves when entries come or go."""
        for entry in self._entries:
            with read_errors(entry.place):
                now = entry.place.lstat()
            if stat.S_ISDIR(entry.status.st_mode):
                if now.st_mtime_ns != entry.status.st_mtime_ns:
                    raise SourceChanged(entry.place, "entries came or went")
            elif fingerprint(now) != fingerprint(entry.status):
                raise SourceChanged(entry.place, "its size or time differs")


def _walk(top: _Entry) -> Iterator[_Entry]:
    """All entries below a folder, whose place is free of links."""
    # Folders to be listed, each with the dumps whose `parent` links led there.
    ahead: list[tuple[_Entry, tuple[Path, ...]]] = [(top, (top.place,))]
    while ahead:
        folder, chain = ahead.pop()
        with read_errors(folder.place):
            names = os.listdir(folder.place)
        is_dump = any(n == "inventory.img" or n.startswith("pagemap-") for n in names)
        for name in names:
            place = folder.place / name
            with read_errors(place):
                status = place.lstat()
            entry = _Entry(f"{folder.path}/{name}" if folder.path else name, place, status)
            if name == PARENT and is_dump and stat.S_ISLNK(status.st_mode):
                entry = _follow_parent(entry, chain)
            yield entry
            if stat.S_ISDIR(entry.status.st_mode):
                is_parent = entry.place != place
                ahead.append((entry, (*chain, entry.place) if is_parent else chain))


def _follow_parent(link: _Entry, chain: tuple[Path, ...]) -> _Entry:
    """The folder that a `parent` link leads to, or the link where that is stored anyway."""
    try:
        target = link.place.resolve(strict=True)
    except (OSError, RuntimeError):
        raise BadSource(
            f"{link.place} points at {os.readlink(link.place)}, which is not there",
            "an incremental dump restores only with its parent; put it back and run again",
        ) from None
    if target in chain:
        raise BadSource(f"{link.place} leads back to {target}", "a dump can't be its own parent")
    if target.is_relative_to(chain[-1]):
        return link
    folder = _Entry(link.path, target, target.stat())
    if not stat.S_ISDIR(folder.status.st_mode):
        raise BadSource(f"{target} is no folder", f"let {link.place} point at the earlier dump")
    return folder


def _image_file(entry: _Entry, kind: FileKind, link: str = "") -> ImageFile:
    status = entry.status
    check_path(entry.path, link)
    return ImageFile(
        path=entry.path,
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        size=status.st_size if kind is FileKind.REGULAR else 0,
        link=link,
        device=status.st_rdev if kind in (FileKind.CHARACTER_DEVICE, FileKind.BLOCK_DEVICE) else 0,
    )


def _source_file(entry: _Entry) -> SourceFile:
    kind = _KINDS[stat.S_IFMT(entry.status.st_mode)]
    link = ""
    if kind is FileKind.SYMLINK:
        with read_errors(entry.place):
            link = os.readlink(entry.place)
    file = _image_file(entry, kind, link)
    if not file.size:
        return SourceFile(file)
    return SourceFile(file, lambda: PlainFile(entry.place, entry.status))
