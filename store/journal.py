"""The journal: every commit, name change and removal, appended and fsynced before the catalog.

    journal := "icefloe journal 1\\n" line*
    line    := check " " change "\\n"

`change` is JSON, `check` the first 16 hex digits of its BLAKE3. A last line that is incomplete or
fails its check was never acknowledged: the next writer cuts it off. docs/format.md, "Journal".
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from blake3 import blake3

from icefloe import durable
from icefloe.errors import CorruptJournal, UnknownFormat
from icefloe.ids import ID_BYTES, BlockId, PackId

VERSION = 1
_FIRST_LINE = b"icefloe journal %d\n" % VERSION
_CHECK_DIGITS = 16

Operation = Literal["add", "tag", "rm", "gc", "snapshot"]
_OPERATIONS = get_args(Operation)


@dataclass(frozen=True, slots=True)
class Change:
    """What one command changed, all of it or nothing. `time` in seconds since 1970.

    `names` maps a name to the image that it points at from now on, or to None when it is gone.
    """

    operation: Operation
    time: float
    packs_added: tuple[PackId, ...] = ()
    packs_dropped: tuple[PackId, ...] = ()
    images_added: tuple[BlockId, ...] = ()
    images_removed: tuple[BlockId, ...] = ()
    names: Mapping[str, BlockId | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two lines: bytes from the start, and changes before it."""

    offset: int
    sequence: int


START = Position(len(_FIRST_LINE), 0)


def _encode(change: Change, sequence: int) -> bytes:
    document = {
        "sequence": sequence,
        "operation": change.operation,
        "time": change.time,
        "packs_added": [i.hex() for i in change.packs_added],
        "packs_dropped": [i.hex() for i in change.packs_dropped],
        "images_added": [i.hex() for i in change.images_added],
        "images_removed": [i.hex() for i in change.images_removed],
        "names": {n: None if i is None else i.hex() for n, i in change.names.items()},
    }
    body = json.dumps(document, separators=(",", ":")).encode()
    return _check(body) + b" " + body + b"\n"


def _check(body: bytes) -> bytes:
    return blake3(body).hexdigest()[:_CHECK_DIGITS].encode()


def _id(text: str) -> bytes:
    raw = bytes.fromhex(text)
    if len(raw) != ID_BYTES:
        raise ValueError("an id has 32 bytes")
    return raw


@dataclass(frozen=True, slots=True)
class _Line:
    sequence: int
    change: Change


def _decode(line: bytes) -> _Line | None:
    """None for a damaged line. Raises ValueError for a whole one that makes no sense."""
    if not _is_whole(line):
        return None
    try:
        document = json.loads(line[_CHECK_DIGITS + 1 :])
        sequence, change = int(document["sequence"]), _change(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is no change ({error})") from error
    if change.operation not in _OPERATIONS or (change.operation == "snapshot" and sequence):
        raise ValueError(f"has operation {change.operation} at sequence {sequence}")
    return _Line(sequence, change)


def _change(document: dict[str, Any]) -> Change:
    return Change(
        operation=document["operation"],
        time=float(document["time"]),
        packs_added=tuple(PackId(_id(i)) for i in document["packs_added"]),
        packs_dropped=tuple(PackId(_id(i)) for i in document["packs_dropped"]),
        images_added=tuple(BlockId(_id(i)) for i in document["images_added"]),
        images_removed=tuple(BlockId(_id(i)) for i in document["images_removed"]),
        names={n: None if i is None else BlockId(_id(i)) for n, i in document["names"].items()},
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A change and the position behind it."""

    change: Change
    end: Position


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows a position."""

    entries: tuple[Entry, ...]
    end: Position
    torn_bytes: int
    """Bytes behind `end` that are no whole line."""


class Journal:
    """The journal of one store. Only the holder of the store's lock may append."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Makes an empty journal unless there is one."""
        if not self.path.exists():
            durable.publish(self.path, _FIRST_LINE)

    def read(self, after: Position = START) -> Tail:
        """The changes after a position that was read before. Raises CorruptJournal.

        A damaged line is taken for a torn write only when no valid line follows it.
        """
        content = self._content(after.offset)
        entries: list[Entry] = []
        start, end = 0, after
        for raw in _lines(content):
            try:
                line = _decode(raw)
                if line and line.sequence != end.sequence:
                    raise ValueError(f"has sequence {line.sequence} instead of {end.sequence}")
                if not line and any(map(_is_whole, _lines(content[start + len(raw) :]))):
                    raise ValueError("fails its check")
            except ValueError as error:
                reason = f"the line at byte {end.offset} {error}"
                raise CorruptJournal(self.path, reason) from error
            if not line:
                break
            start += len(raw)
            end = Position(after.offset + start, end.sequence + 1)
            entries.append(Entry(line.change, end))
        return Tail(tuple(entries), end, len(content) - start)

    def salvage(self, after: Position = START) -> list[Change]:
        """Every change after a position that can still be read, in order, whatever lies between.

        None when the position no longer is the start of a line.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        if after != START and content[after.offset - 1 : after.offset] != b"\n":
            return []
        found = []
        for raw in _lines(content[after.offset if after != START else 0 :]):
            try:
                line = _decode(raw)
            except ValueError:
                continue
            if line:
                found.append(line.change)
        return found

    def _content(self, offset: int) -> bytes:
        """Everything behind `offset`, which must be the start of a line."""
        try:
            with self.path.open("rb") as file:
                self._check_title(file.read(len(_FIRST_LINE) + 8))
                file.seek(offset - 1)
                before, content = file.read(1), file.read()
        except FileNotFoundError:
            raise CorruptJournal(self.path, "it is missing") from None
        if before != b"\n":
            raise CorruptJournal(self.path, f"no line ends at byte {offset}")
        return content

    def _check_title(self, content: bytes) -> None:
        if content.startswith(_FIRST_LINE):
            return
        title = re.match(rb"icefloe journal ([1-9][0-9]{0,8})\n", content)
        if title and int(title[1]) > VERSION:
            raise UnknownFormat(self.path, int(title[1]), VERSION)
        raise CorruptJournal(self.path, "its first line is damaged")

    def cut(self, end: Position) -> None:
        """Cuts off what a torn write left behind `end`."""
        os.close(self._open_cut(end))

    def _open_cut(self, end: Position) -> int:
        with durable.write_errors(self.path):
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != end.offset:
                durable.truncate(fd, self.path, end.offset)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def append(self, change: Change, end: Position) -> Position:
        """Adds a line at `end`, cutting off what a torn write left there. Durable on return."""
        line = _encode(change, end.sequence)
        fd = self._open_cut(end)
        try:
            os.lseek(fd, end.offset, os.SEEK_SET)
            try:
                durable.write(fd, self.path, [line])
                durable.fsync(fd, self.path)
            except OSError:
                # Half a line may be there. It was not acknowledged; don't let it become so.
                os.ftruncate(fd, end.offset)
                raise
        finally:
            os.close(fd)
        return Position(end.offset + len(line), end.sequence + 1)

    def rewrite(self, change: Change) -> Position:
        """Replaces the whole journal by one change that holds everything."""
        line = _encode(change, 0)
        durable.publish(self.path, _FIRST_LINE + line)
        return Position(len(_FIRST_LINE) + len(line), 1)


def _lines(content: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(content):
        end = content.find(b"\n", start) + 1 or len(content)
        yield content[start:end]
        start = end


def _is_whole(line: bytes) -> bool:
    body = line[_CHECK_DIGITS + 1 : -1]
    return (
        line[_CHECK_DIGITS : _CHECK_DIGITS + 1] == b" "
        and line.endswith(b"\n")
        and _check(body) == line[:_CHECK_DIGITS]
    )
