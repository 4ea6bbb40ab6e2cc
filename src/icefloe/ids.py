"""Identity: block ids, manifest ids, and the names people give to images."""

import re
from dataclasses import dataclass
from typing import NewType

from blake3 import blake3

from icefloe.errors import UsageError

BlockId = NewType("BlockId", bytes)
"""BLAKE3-256 of a block's raw bytes, 32 bytes. A manifest's id is the id of its block."""

PackId = NewType("PackId", bytes)
"""BLAKE3-256 of a pack's index, 32 bytes."""

ID_BYTES = 32

# Fewer digits than this would soon name several images of a large store.
MIN_ID_DIGITS = 8

_NAME = re.compile(r"[a-z0-9][a-z0-9._/-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9._-]{1,127}")
_ID_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_ID_DIGITS},{2 * ID_BYTES}}}")


def block_id(raw: bytes | bytearray | memoryview) -> BlockId:
    """The identity of these raw bytes."""
    return BlockId(blake3(raw).digest())


@dataclass(frozen=True, slots=True)
class Name:
    """A mutable pointer to an image: `name:tag`."""

    name: str
    tag: str = "latest"

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"


@dataclass(frozen=True, slots=True)
class IdPrefix:
    """The first hex digits of a manifest id, as in `@1f2e3d4c`."""

    digits: str

    def __str__(self) -> str:
        return f"@{self.digits}"


def parse_name(text: str) -> Name:
    """`NAME[:TAG]`. Raises UsageError."""
    name, colon, tag = text.partition(":")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{text!r} is not a name",
            "names are a-z 0-9 . _ / - (128 at most, a letter or digit first)",
        )
    if colon and not _TAG.fullmatch(tag):
        raise UsageError(f"{text!r} has no valid tag", "tags are A-Z a-z 0-9 . _ - (127 at most)")
    return Name(name, tag) if colon else Name(name)


def parse_reference(text: str) -> Name | IdPrefix:
    """`NAME[:TAG]` or `@ID`. Raises UsageError."""
    if not text.startswith("@"):
        return parse_name(text)
    if not _ID_PREFIX.fullmatch(text[1:].lower()):
        raise UsageError(
            f"{text!r} is not an id",
            f"write @ and {MIN_ID_DIGITS} to {2 * ID_BYTES} hex digits, as `icefloe ls` shows them",
        )
    return IdPrefix(text[1:].lower())
