"""Encryption of what lies in a remote: AES-256-GCM, and ids that say nothing to others.

    sealed := key_id[8] nonce[12] ciphertext tag[16]

What is sealed is bound to what it is (a block of this id, the index of a pack, an image), so that
nothing can take the place of something else. docs/format.md, "Sealed".
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from icefloe.durable import Buffer
from icefloe.errors import KeyNeeded
from icefloe.ids import BlockId

KEY_BYTES = 32
KEY_ID_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16

OVERHEAD = KEY_ID_BYTES + _NONCE_BYTES + _TAG_BYTES
"""Bytes by which a sealed thing is longer."""

# What a key is used for, each with a key of its own (BLAKE3's derive_key).
_FOR_BYTES = "icefloe 2026-12 sealed bytes"
_FOR_IDS = "icefloe 2026-12 ids in a remote"
_FOR_NAMING = "icefloe 2026-12 id of a key"

_KEY = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")


class Unsealable(ValueError):
    """Bytes that no key of the ring opens: changed, moved, or sealed with a key not at hand."""


class Sealing(Protocol):
    """How a remote keeps things from others."""

    @property
    def overhead(self) -> int:
        """Bytes by which a sealed thing is longer."""

    @property
    def key_ids(self) -> Sequence[str]:
        """Of all keys at hand, the one that seals first; none without encryption."""

    def outer(self, identity: BlockId) -> bytes:
        """The id that others see, by the key that seals."""

    def outers(self, identity: BlockId) -> Sequence[bytes]:
        """The ids under which it may be there, by any key."""

    def seal(self, what: bytes, plain: Buffer) -> Buffer:
        """`what` has to be given again to open it."""

    def open(self, what: bytes, sealed: Buffer) -> Buffer:
        """Raises Unsealable."""


class Open:
    """No encryption. See Sealing."""

    overhead = 0
    key_ids: Sequence[str] = ()

    def outer(self, identity: BlockId) -> bytes:
        """See Sealing."""
        return identity

    def outers(self, identity: BlockId) -> Sequence[bytes]:
        """See Sealing."""
        return (identity,)

    def seal(self, what: bytes, plain: Buffer) -> Buffer:
        """See Sealing."""
        return plain

    def open(self, what: bytes, sealed: Buffer) -> Buffer:
        """See Sealing."""
        return sealed


@dataclass(frozen=True, slots=True)
class Key:
    """One key of 32 bytes, ready for use. Whoever can read a process's memory can read it."""

    secret: bytes = field(repr=False)
    id: bytes = field(init=False)
    _cipher: AESGCM = field(init=False, repr=False)
    _ids: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        derived = {
            use: blake3(self.secret, derive_key_context=use).digest()
            for use in (_FOR_BYTES, _FOR_IDS, _FOR_NAMING)
        }
        object.__setattr__(self, "id", derived[_FOR_NAMING][:KEY_ID_BYTES])
        object.__setattr__(self, "_cipher", AESGCM(derived[_FOR_BYTES]))
        object.__setattr__(self, "_ids", derived[_FOR_IDS])

    def outer(self, identity: BlockId) -> bytes:
        """What stands for an id where others can read it."""
        return blake3(identity, key=self._ids).digest()

    def seal(self, what: bytes, plain: Buffer) -> bytes:
        """See Sealing."""
        nonce = os.urandom(_NONCE_BYTES)
        return b"".join([self.id, nonce, self._cipher.encrypt(nonce, plain, what)])

    def open(self, what: bytes, nonce: bytes, ciphertext: Buffer) -> bytes:
        """Raises InvalidTag."""
        return self._cipher.decrypt(nonce, ciphertext, what)


class Sealed:
    """Encryption with the first of some keys; the others open what is older. See Sealing."""

    overhead = OVERHEAD

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = {key.id: key for key in reversed(keys)}
        self._first = keys[0]
        self.key_ids: Sequence[str] = [key.id.hex() for key in keys]

    def outer(self, identity: BlockId) -> bytes:
        """See Sealing."""
        return self._first.outer(identity)

    def outers(self, identity: BlockId) -> Sequence[bytes]:
        """See Sealing."""
        others = (key for key in self._keys.values() if key is not self._first)
        return [self.outer(identity), *(key.outer(identity) for key in others)]

    def seal(self, what: bytes, plain: Buffer) -> Buffer:
        """See Sealing."""
        return self._first.seal(what, plain)

    def open(self, what: bytes, sealed: Buffer) -> Buffer:
        """See Sealing."""
        view = memoryview(sealed)
        if len(view) < OVERHEAD:
            raise Unsealable("it is cut short")
        key = self._keys.get(bytes(view[:KEY_ID_BYTES]))
        if key is None:
            raise Unsealable(f"it was sealed with key {bytes(view[:KEY_ID_BYTES]).hex()}")
        start = KEY_ID_BYTES + _NONCE_BYTES
        try:
            return key.open(what, bytes(view[KEY_ID_BYTES:start]), view[start:])
        except InvalidTag:
            raise Unsealable("it was changed, or isn't what it is taken for") from None


def load_keys(path: Path) -> Sealed:
    """Keys from a file: 64 hex digits a line, the one that seals first. Raises KeyNeeded."""
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise KeyNeeded(f"cannot read the keys in {path} ({error})", "name another file") from error
    words = [line.partition("#")[0].strip() for line in lines]
    keys = [word for word in words if word]
    if not keys or not all(map(_KEY.fullmatch, keys)):
        raise KeyNeeded(
            f"{path} holds no keys",
            "write 64 hex digits a line, as `openssl rand -hex 32` makes them, the newest first",
        )
    return Sealed([Key(bytes.fromhex(key)) for key in keys])
