"""Remotes for tests: folders, memory, and a look at what is in them."""

import os
from dataclasses import replace
from pathlib import Path

from icefloe.transfer.options import RemoteOptions
from icefloe.transfer.remote import Remote, open_remote

QUICK = RemoteOptions(patience=2.0, requests=4)


def memory_url() -> str:
    """A place in memory that nobody has used."""
    return f"memory://remote-{os.urandom(6).hex()}"


def opened(url: str, keys: Path | None = None, *, create: bool = True) -> Remote:
    """A remote with little patience."""
    return open_remote(url, replace(QUICK, keys=keys), create=create)


def keys_of(remote: Remote, prefix: str = "") -> list[str]:
    """The keys of all objects."""
    return [row.key for row in remote.objects.list(prefix)]


def key_file(path: Path, *keys: str) -> Path:
    """A file of keys."""
    path.write_text("# the newest first\n" + "\n".join(keys) + "\n")
    return path
