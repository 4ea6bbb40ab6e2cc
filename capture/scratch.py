"""Where CRIU's working files go, and what is left of them."""

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")
_RESERVE_BYTES = 1 << 30


def place(needed: int) -> str | None:
    """Where the files for CRIU go: into memory when there is plenty, as it reads them but once.

    None: wherever temporary files go here.
    """
    if not needed or "TMPDIR" in os.environ or not _MEMORY.is_dir():
        return None
    room = os.statvfs(_MEMORY)
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    free = int(found[1]) << 10 if found else 0
    # Once as files, once as the memory of the process, and something to breathe.
    fits = room.f_bavail * room.f_frsize > needed and free > 2 * needed + _RESERVE_BYTES
    return str(_MEMORY) if fits else None


def kept(log: Path) -> Path:
    """The log of a failure outlives the folder for CRIU."""
    fd, name = tempfile.mkstemp(prefix="icefloe-", suffix=".log")
    with os.fdopen(fd, "wb") as file, suppress(FileNotFoundError):
        file.write(log.read_bytes())
    return Path(name)
