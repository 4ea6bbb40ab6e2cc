"""A checkpoint that is an archive: `.tar`, `.tar.gz`, `.tar.zst`.

The form that kubelet, CRI-O, containerd and Podman write (checkpointctl, lib/metadata.go). The
archive is only transport: its entries are stored, so that the memory in it is deduplicated with
that of dumps stored as directories. Members are read in the order in which they come.
"""

import gzip
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

import zstandard

from icefloe.capture.source import (
    ByteSource,
    PlainFile,
    SourceFile,
    check_path,
    read_errors,
)
from icefloe.capture.tree import PARENT
from icefloe.errors import BadSource, SourceUnreadable
from icefloe.store.manifest import FileKind, ImageFile, safe_path

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"

# Reads of the compressed stream; tarfile's own default of 10 KiB costs a call per 20 blocks.
_STREAM_BYTES = 1 << 20

# What tarfile and the decompressors raise.
_DAMAGED = (tarfile.TarError, zstandard.ZstdError, zlib.error, EOFError, ValueError)

_MAX_ID = 0xFFFFFFFF
_MAX_SECONDS = 1 << 62

_KINDS = {
    tarfile.REGTYPE: FileKind.REGULAR,
    tarfile.AREGTYPE: FileKind.REGULAR,
    tarfile.CONTTYPE: FileKind.REGULAR,
    tarfile.GNUTYPE_SPARSE: FileKind.REGULAR,
    tarfile.DIRTYPE: FileKind.FOLDER,
    tarfile.SYMTYPE: FileKind.SYMLINK,
    tarfile.LNKTYPE: FileKind.HARDLINK,
    tarfile.FIFOTYPE: FileKind.FIFO,
    tarfile.CHRTYPE: FileKind.CHARACTER_DEVICE,
    tarfile.BLKTYPE: FileKind.BLOCK_DEVICE,
}


class Archive:
    """Members are listed while they are read: an archive may be a stream."""

    def __init__(self, path: Path) -> None:
        """Raises SourceUnreadable or SourceChanged."""
        with read_errors(path):
            self._path = path = path.resolve(strict=True)
            self._status = path.stat()
            if not stat.S_ISREG(self._status.st_mode):
                raise SourceUnreadable(path, "neither a folder nor a file")
            with open(path, "rb", opener=_open_at_once) as file:
                self._magic = file.read(4)
        self._entries: dict[str, ImageFile] = {}

    def files(self) -> Iterator[SourceFile]:
        """See Checkpoint: in the order of the archive; folders that it leaves out come last."""
        compressed = self._magic[:2] == _GZIP or self._magic == _ZSTD
        with _archive_errors(self._path), self._open() as tar:
            for member in tar:
                file = self._image_file(member)
                if file is None:
                    continue
                self._entries[file.path] = file
                if not file.size:
                    yield SourceFile(file)
                elif compressed or member.issparse():
                    yield SourceFile(file, _member_opener(tar, member, self._path))
                else:
                    yield SourceFile(file, self._slice_opener(member))
            self._check_end(tar)
        if not self._entries:
            raise BadSource(f"{self._path} is empty", "name an archive that holds a checkpoint")
        self._check_parents()
        yield from map(SourceFile, self._missing_folders())

    def logical_bytes(self) -> int | None:
        """See Checkpoint: an archive is not read twice only to know its size."""
        return None

    def verify(self) -> None:
        """See Checkpoint."""
        PlainFile(self._path, self._status).close()

    @contextmanager
    def _open(self) -> Iterator[tarfile.TarFile]:
        with open(self._path, "rb", opener=_open_at_once) as file:
            if self._magic == _ZSTD:
                decoder = zstandard.ZstdDecompressor()
                with decoder.stream_reader(file, read_across_frames=True) as decoded:
                    with _open_stream(cast(IO[bytes], decoded)) as tar:
                        yield tar
            elif self._magic[:2] == _GZIP:
                # tarfile's own decoder stops after the first member and checks no sum.
                with (
                    gzip.GzipFile(fileobj=file) as unzipped,
                    _open_stream(cast(IO[bytes], unzipped)) as tar,
                ):
                    yield tar
            else:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    yield tar

    def _check_end(self, tar: tarfile.TarFile) -> None:
        """An archive cut off between two members looks fine, but for the zero block at its end."""
        assert tar.fileobj is not None
        if self._entries and tar.fileobj.tell() != tar.offset + tarfile.BLOCKSIZE:
            raise self._cut_off()

    def _cut_off(self) -> BadSource:
        return BadSource(f"{self._path} lacks its end", "copy it again, or name a directory")

    def _image_file(self, member: tarfile.TarInfo) -> ImageFile | None:
        path = self._clean(member.name)
        kind = _KINDS.get(member.type)
        if kind is None:
            raise BadSource(f"{path} in {self._path} has an unknown kind", "make the archive anew")
        if path in self._entries:
            raise BadSource(f"{path} is in {self._path} twice", "make the archive anew")
        if not path and kind is not FileKind.FOLDER:
            raise BadSource(f"{self._path} holds a file without a name", "make the archive anew")
        link = member.linkname
        if kind is FileKind.HARDLINK:
            link = self._clean(link)
            target = self._entries.get(link)
            if target is None or target.kind not in (FileKind.REGULAR, FileKind.HARDLINK):
                raise BadSource(
                    f"{path} in {self._path} is a link to {link}, which doesn't come before it",
                    "make the archive anew",
                )
        check_path(path, link)
        self._check_numbers(member)
        device = kind in (FileKind.CHARACTER_DEVICE, FileKind.BLOCK_DEVICE)
        return ImageFile(
            path=path,
            kind=kind,
            mode=stat.S_IMODE(member.mode),
            uid=member.uid,
            gid=member.gid,
            mtime_ns=_mtime_ns(member),
            size=member.size if kind is FileKind.REGULAR else 0,
            link=link if kind in (FileKind.SYMLINK, FileKind.HARDLINK) else "",
            device=os.makedev(member.devmajor, member.devminor) if device else 0,
        )

    def _check_numbers(self, member: tarfile.TarInfo) -> None:
        """A tar header can hold numbers that no file can have."""
        if not (0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID):
            raise BadSource(
                f"{member.name} in {self._path} has owner {member.uid}:{member.gid}",
                f"owners are numbers from 0 to {_MAX_ID}; make the archive anew",
            )
        if abs(member.mtime) >= _MAX_SECONDS:
            raise BadSource(
                f"{member.name} in {self._path} has the time {member.mtime}",
                "no file can have it; make the archive anew",
            )

    def _clean(self, name: str) -> str:
        """`./a/b/` is `a/b`. Raises BadSource for a path that leads out of the archive."""
        path = "/".join(part for part in name.split("/")[name.startswith("/") :] if part != ".")
        path = path.rstrip("/")
        if name.startswith("/") or (path and not safe_path(path)):
            raise BadSource(
                f"{name!r} in {self._path} is not a plain relative path",
                "an archive of a checkpoint holds relative paths without `..`",
            )
        return path

    def _slice_opener(self, member: tarfile.TarInfo) -> Callable[[], ByteSource]:
        start = member.offset_data
        if start + member.size > self._status.st_size:
            raise self._cut_off()
        return lambda: PlainFile(self._path, self._status, start)

    def _check_parents(self) -> None:
        """A dump whose parent is elsewhere would not restore on its own."""
        for file in self._entries.values():
            folder, _, name = file.path.rpartition("/")
            inventory = f"{folder}/inventory.img" if folder else "inventory.img"
            if name != PARENT or file.kind is not FileKind.SYMLINK:
                continue
            target = os.path.normpath(PurePosixPath("/", folder, file.link)).lstrip("/")
            if inventory in self._entries and f"{target}/inventory.img" not in self._entries:
                raise BadSource(
                    f"{file.path} in {self._path} points at {file.link}, outside of the archive",
                    "an incremental dump restores only with its parent; unpack both archives "
                    "side by side and add the folder",
                )

    def _missing_folders(self) -> Iterator[ImageFile]:
        for path in list(self._entries):
            while path := path.rpartition("/")[0]:
                if path not in self._entries:
                    now = self._status.st_mtime_ns
                    folder = ImageFile(path, FileKind.FOLDER, 0o700, os.getuid(), os.getgid(), now)
                    self._entries[path] = folder
                    yield folder


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """A pax header holds the time in decimal; as a float it would lose its nanoseconds."""
    text = member.pax_headers.get("mtime")
    if text is None:
        return int(member.mtime) * 1_000_000_000
    seconds, _, fraction = text.partition(".")
    nanoseconds = int((fraction + "0" * 9)[:9])
    sign = -1 if seconds.startswith("-") else 1
    return int(seconds) * 1_000_000_000 + sign * nanoseconds


def _open_at_once(path: str, flags: int) -> int:
    """Doesn't wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def _open_stream(decoded: IO[bytes]) -> Iterator[tarfile.TarFile]:
    """Reads on to the end of the stream, where its checksum is."""
    with tarfile.open(fileobj=decoded, mode="r|", bufsize=_STREAM_BYTES) as tar:
        yield tar
    while decoded.read(_STREAM_BYTES):
        pass


@contextmanager
def _archive_errors(path: Path) -> Iterator[None]:
    try:
        with read_errors(path):
            try:
                yield
            except gzip.BadGzipFile as error:
                raise ValueError(str(error)) from error
    except _DAMAGED as error:
        raise BadSource(
            f"{path} is not a whole tar archive ({error})", "copy it again, or name a directory"
        ) from error


def _member_opener(
    tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path
) -> Callable[[], ByteSource]:
    return lambda: _Member(tar, member, path)


class _Member:
    """A member of a compressed archive, or a sparse one: tarfile unpacks it."""

    sequential = True

    def __init__(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        self._path = path
        file = tar.extractfile(member)
        if file is None:
            raise SourceUnreadable(path, f"{member.name} has no bytes")
        self._file = file

    def read_into(self, offset: int, view: memoryview) -> None:
        """See ByteSource."""
        assert self._file.tell() == offset
        done = 0
        with _archive_errors(self._path):
            while done < len(view):
                # extractfile declares IO[bytes]; what it returns is a BufferedReader.
                count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise EOFError("it ends early")
                done += count

    def is_hole(self, offset: int, length: int) -> bool:
        """See ByteSource."""
        return False

    def close(self) -> None:
        """See ByteSource."""
        self._file.close()
