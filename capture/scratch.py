"""Where CRIU's working files go, and what is left of them."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from icefloe import durable

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


@contextmanager
def folder(prefix: str, where: str | None) -> Iterator[Path]:
    """A folder for a while. Raises NoSpace or NotWritable."""
    with durable.write_errors(Path(where or tempfile.gettempdir())):
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=where)
    with made as name:
        yield Path(name)


def kept(log: Path) -> Path | None:
    """A copy of the log of a failure, which outlives the folder for CRIU; None without room."""
    try:
        content = log.read_bytes()
        fd, name = tempfile.mkstemp(prefix="icefloe-", suffix=".log")
        with os.fdopen(fd, "wb") as file:
            file.write(content)
    except OSError:
        return None
    return Path(name)
