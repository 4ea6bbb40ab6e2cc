"""icefloe as a person calls it, and directories compared as an archivist would."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ICEFLOE_SECONDS = 120.0

# What `add --json` promises, and of what kind each value is.
ADD_KEYS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "name": str,
    "logical_bytes": int,
    "zero_bytes": int,
    "new_bytes": int,
    "stored_bytes": int,
    "blocks": int,
    "new_blocks": int,
    "seconds": (int, float),
}


@dataclass(frozen=True)
class Facts:
    """What a file system knows of one entry of a directory, and a digest of what is in it."""

    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    size: int
    content: str


def icefloe(store: Path, *args: str | Path) -> Any:
    """Runs a command of icefloe on a store; returns the JSON document that it prints."""
    command = [sys.executable, "-m", "icefloe", "--store", store, *args, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=ICEFLOE_SECONDS)
    told = f"icefloe {' '.join(map(str, args))}: exit {result.returncode}\n{result.stderr}"
    assert result.returncode == 0, told
    return json.loads(result.stdout)


def add(store: Path, directory: Path, name: str) -> dict[str, Any]:
    """Adds a directory; checks the promised keys of the answer and returns it."""
    answer: dict[str, Any] = icefloe(store, "add", directory, name)
    check_promised("add", answer, ADD_KEYS)
    return answer


def check_promised(
    what: str, answer: Mapping[str, Any], keys: Mapping[str, type | tuple[type, ...]]
) -> None:
    """Asserts that the JSON of a command has all promised keys, each with the right kind."""
    missing = sorted(keys.keys() - answer.keys())
    assert not missing, f"`{what} --json` lacks {missing}"
    wrong = {key: answer[key] for key, kind in keys.items() if not isinstance(answer[key], kind)}
    assert not wrong, f"`{what} --json` has values of the wrong kind: {wrong}"


def facts_of(tree: Path) -> dict[str, Facts]:
    """Facts about everything under a directory, the directory itself left out."""
    return {str(path.relative_to(tree)): facts_of_entry(path) for path in tree.rglob("*")}


def facts_of_entry(path: Path) -> Facts:
    """Facts about one entry; a link's own, not those of what it points to."""
    status = path.lstat()
    content, size = "", 0  # a directory's size is its file system's affair
    if stat.S_ISLNK(status.st_mode):
        content = os.readlink(path)
    elif stat.S_ISREG(status.st_mode):
        size = status.st_size
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    owner = (status.st_uid, status.st_gid)
    return Facts(status.st_mode, owner, status.st_mtime_ns, size, content)
