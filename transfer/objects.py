"""What a remote needs of an object store, and the four ways in which it can fail.

Each store is a few methods (transfer/s3.py, transfer/folder.py, transfer/fsspec_objects.py) that
try once; transfer/patient.py is the same interface with patience. Keys are relative, with `/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from icefloe.durable import Buffer

ABSENT: Final = ""
"""The tag of an object that isn't there."""


class NoSuchObject(LookupError):
    """There is no object of this key."""


class Conflict(Exception):
    """The object isn't, or is no longer, what a conditional write expected."""


class Transient(Exception):
    """It may work in a moment: the server is busy, gone, or broke off."""


class Refused(Exception):
    """It won't work like this: no permission, no such bucket, an expired or wrong credential."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as a listing shows it: bytes, seconds since 1970 by the store's clock."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing, and whether more comes after it."""

    rows: Sequence[ObjectInfo]
    more: bool


@dataclass(frozen=True, slots=True)
class Object:
    """A small object, whole. `tag` changes with every write (an ETag)."""

    content: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload in parts that nobody finished."""

    key: str
    upload: str
    started: float


class Objects(Protocol):
    """One prefix of an object store. Any thread may use it."""

    @property
    def url(self) -> str:
        """As the user wrote it."""

    def read(self, key: str) -> Object:
        """A whole object. Raises NoSuchObject, Transient or Refused, as all of these may."""

    def read_into(self, key: str, start: int, into: memoryview) -> int:
        """Fills `into` with the bytes from `start` on; returns how many came.

        Fewer than wanted when the connection broke or the object ends there; none only if the
        object ends before `start`.
        """

    def info(self, key: str) -> ObjectInfo:
        """Its size and time."""

    def put(self, key: str, content: Buffer, expect: str | None = None) -> str:
        """Writes an object, whole or not at all; returns its tag.

        `expect`: only if the object has this tag, ABSENT if there is none. Raises Conflict.
        """

    def page(self, prefix: str, after: str) -> Page:
        """Objects whose keys begin with `prefix` and come after this one, in order of keys."""

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; those that are gone already are fine."""

    def unfinished(self) -> Sequence[Unfinished]:
        """Uploads in parts that were begun and neither finished nor given up."""

    def abandon(self, upload: Unfinished) -> None:
        """Gives an upload up, and its parts back."""

    def renew(self) -> None:
        """Looks for credentials anew, where there are any."""

    def give_up(self) -> None:
        """What is under way fails at once, as Transient."""
