"""Objects as files in a folder that several machines share, `file://`.

Every object is written beside its place, fsynced and renamed, so that it is there whole or not at
all. A condition is checked under a lock on the folder's file `.lock`; tags are hashes.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from blake3 import blake3

from icefloe import durable
from icefloe.durable import Buffer
from icefloe.errors import IcefloeError
from icefloe.transfer.objects import (
    ABSENT,
    Conflict,
    NoSuchObject,
    Object,
    ObjectInfo,
    Page,
    Refused,
    Unfinished,
)

_LOCK = ".lock"
_STAGED = ".new"


class FolderObjects:
    """A folder. See Objects."""

    def __init__(self, url: str) -> None:
        """`url` is file:///path."""
        self.url = url
        self._root = Path(url.removeprefix("file://"))

    def read(self, key: str) -> Object:
        """See Objects."""
        with _errors(key):
            content = (self._root / key).read_bytes()
        return Object(content, _tag(content))

    def read_into(self, key: str, start: int, into: memoryview) -> int:
        """See Objects."""
        with _errors(key), open(self._root / key, "rb", buffering=0) as file:
            done = 0
            while done < len(into) and (count := os.preadv(file.fileno(), [into[done:]], start)):
                done, start = done + count, start + count
            return done

    def info(self, key: str) -> ObjectInfo:
        """See Objects."""
        with _errors(key):
            status = (self._root / key).stat()
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def put(self, key: str, content: Buffer, expect: str | None = None) -> str:
        """See Objects. Raises NoSpace or NotWritable."""
        path = self._root / key
        durable.make_folder(path.parent)
        staged = path.with_name(f".{path.name}.{os.urandom(8).hex()}{_STAGED}")
        with durable.write_errors(staged):
            fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                durable.write(fd, staged, [content])
                durable.fsync(fd, staged)
            finally:
                os.close(fd)
            if expect is None:
                durable.rename(staged, path)
            else:
                self._replace(staged, path, expect)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        durable.fsync_folder(path.parent)
        return _tag(content)

    def _replace(self, staged: Path, path: Path, expect: str) -> None:
        with self._locked():
            try:
                found = _tag(path.read_bytes())
            except FileNotFoundError:
                found = ABSENT
            if found != expect:
                raise Conflict(path.name)
            durable.rename(staged, path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self._root / _LOCK
        with durable.write_errors(path), open(path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def page(self, prefix: str, after: str) -> Page:
        """See Objects."""
        rows = []
        with _errors(prefix):
            for path in self._files(prefix):
                key = str(path.relative_to(self._root))
                if key > after and not path.name.startswith("."):
                    with suppress(NoSuchObject):  # removed meanwhile
                        rows.append(self.info(key))
        return Page(rows, False)

    def _files(self, prefix: str) -> Iterator[Path]:
        """In order of keys. What can't be listed is an error: a collector that doesn't see an image
        would remove its packs."""
        top = self._root / prefix.rpartition("/")[0]
        found = [
            str(Path(folder, name).relative_to(self._root))
            for folder, _, names in os.walk(top, onerror=_unless_gone)
            for name in names
        ]
        yield from (self._root / key for key in sorted(found) if key.startswith(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """See Objects. Raises NotWritable."""
        for key in keys:
            durable.unlink(self._root / key)

    def unfinished(self) -> Sequence[Unfinished]:
        """See Objects."""
        found = []
        with _errors(""):
            for path in self._files(""):
                if path.name.startswith(".") and path.name.endswith(_STAGED):
                    with suppress(FileNotFoundError):
                        key = str(path.relative_to(self._root))
                        found.append(Unfinished(key, key, path.stat().st_mtime))
        return found

    def abandon(self, upload: Unfinished) -> None:
        """See Objects."""
        durable.unlink(self._root / upload.upload)

    def renew(self) -> None:
        """See Objects: there are no credentials."""

    def give_up(self) -> None:
        """See Objects: nothing waits for long."""


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextmanager
def _errors(key: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoSuchObject(key) from error
    except IcefloeError:
        raise
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}") from error


def _tag(content: Buffer) -> str:
    return blake3(content).hexdigest(16)
