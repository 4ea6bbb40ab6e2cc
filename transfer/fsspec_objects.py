"""Objects in anything else that fsspec knows, `memory://` among them.

fsspec has no conditional writes: what a condition expects is looked up right before, under a lock
of this process. Two processes that change the same name at once may both succeed, and the later
one counts; two collectors are kept apart only if they don't start in the same moment.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import fsspec
from blake3 import blake3

from icefloe.durable import Buffer
from icefloe.errors import IcefloeError, UsageError
from icefloe.transfer.objects import (
    ABSENT,
    Conflict,
    NoSuchObject,
    Object,
    ObjectInfo,
    Page,
    Refused,
    Transient,
    Unfinished,
)

# How file systems call the time of the last change.
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")

_LOCK = threading.Lock()


class FsspecObjects:
    """A folder of a file system. See Objects."""

    def __init__(self, url: str) -> None:
        """Raises UsageError for a URL of which fsspec can make nothing here."""
        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"{url} can't be used ({error})", "use s3:// or file://") from error
        self._root = self._root.rstrip("/")

    def read(self, key: str) -> Object:
        """See Objects."""
        with _errors(key):
            content = self._fs.cat_file(self._path(key))
        return Object(content, _tag(content))

    def read_into(self, key: str, start: int, into: memoryview) -> int:
        """See Objects."""
        with _errors(key):
            content = self._fs.cat_file(self._path(key), start=start, end=start + len(into))
        into[: len(content)] = content
        return len(content)

    def info(self, key: str) -> ObjectInfo:
        """See Objects."""
        with _errors(key):
            return self._info(self._fs.info(self._path(key)))

    def put(self, key: str, content: Buffer, expect: str | None = None) -> str:
        """See Objects."""
        path = self._path(key)
        with _errors(key):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with _LOCK:
                if expect is not None and self._tag_of(key) != expect:
                    raise Conflict(key)
                self._fs.pipe_file(path, bytes(content))
        return _tag(content)

    def _tag_of(self, key: str) -> str:
        try:
            return self.read(key).tag
        except NoSuchObject:
            return ABSENT

    def page(self, prefix: str, after: str) -> Page:
        """See Objects."""
        try:
            with _errors(prefix):
                self._fs.invalidate_cache()
                top = self._path(prefix.rpartition("/")[0]).rstrip("/")
                found = list(self._find(top))
        except NoSuchObject:
            return Page((), False)
        rows = map(self._info, found)
        wanted = [row for row in rows if row.key.startswith(prefix) and row.key > after]
        return Page(sorted(wanted, key=lambda row: row.key), False)

    def _find(self, top: str) -> Iterable[dict[str, Any]]:
        """All files. What can't be listed is an error, which fsspec's own way of walking isn't: a
        collector that doesn't see an image would remove its packs."""
        if type(self._fs).find is not fsspec.AbstractFileSystem.find:
            found: dict[str, dict[str, Any]] = self._fs.find(top, detail=True)
            return found.values()
        return self._walk(top)

    def _walk(self, top: str) -> Iterator[dict[str, Any]]:
        try:
            entries = self._fs.ls(top, detail=True)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry["type"] != "directory":
                yield entry
            elif entry["name"].rstrip("/") != top:
                yield from self._walk(entry["name"].rstrip("/"))

    def delete(self, keys: Sequence[str]) -> None:
        """See Objects."""
        for key in keys:
            try:
                with _errors(key):
                    self._fs.rm_file(self._path(key))
            except NoSuchObject:
                continue

    def unfinished(self) -> Sequence[Unfinished]:
        """See Objects: fsspec doesn't know them."""
        return ()

    def abandon(self, upload: Unfinished) -> None:
        """See Objects."""

    def renew(self) -> None:
        """See Objects."""

    def give_up(self) -> None:
        """See Objects: nothing waits for long."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _info(self, info: dict[str, Any]) -> ObjectInfo:
        times = (info[name] for name in _TIMES if info.get(name) is not None)
        changed = next(times, 0.0)
        seconds = changed.timestamp() if isinstance(changed, datetime) else float(changed)
        name = info["name"].removeprefix(self._root).lstrip("/")
        return ObjectInfo(name, info["size"], seconds)


@contextmanager
def _errors(key: str) -> Iterator[None]:
    try:
        yield
    except (Conflict, NoSuchObject, IcefloeError):
        raise
    except FileNotFoundError as error:
        raise NoSuchObject(key) from error
    except PermissionError as error:
        raise Refused(str(error)) from error
    except Exception as error:  # each file system has errors of its own
        raise Transient(f"{type(error).__name__}: {error}") from error


def _tag(content: Buffer) -> str:
    return blake3(content).hexdigest(16)
