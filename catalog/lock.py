"""The store's lock: one writer, or any number of readers, on this machine.

A flock on the file `lock`: the kernel drops it when its holder dies. Who holds it is read from
/proc/locks, so nothing has to be written, and a read-only store can be locked too.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from icefloe import durable
from icefloe.errors import StoreBusy

# Long enough for a quick command beside this one, short enough to be told who is in the way.
WAIT_SECONDS = 5.0

_POLL_SECONDS = 0.02


class Lock:
    """Held until `release`."""

    def __init__(self, path: Path, *, write: bool, wait_seconds: float = WAIT_SECONDS) -> None:
        """Raises StoreBusy when it isn't free within `wait_seconds`."""
        self._fd = _open(path)
        mode = fcntl.LOCK_EX if write else fcntl.LOCK_SH
        deadline = time.monotonic() + wait_seconds
        try:
            while not _try(self._fd, mode):
                if time.monotonic() > deadline:
                    raise StoreBusy(path.parent, _holders(self._fd))
                time.sleep(_POLL_SECONDS)
        except BaseException:
            os.close(self._fd)
            raise

    def release(self) -> None:
        """Lets the next one in. Once more does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        with durable.write_errors(path):
            return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try(fd: int, mode: int) -> bool:
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _holders(fd: int) -> str:
    pids = sorted(set(_holding_pids(os.fstat(fd).st_ino)))
    return ", ".join(map(_describe, pids)) or "another process"


def _holding_pids(inode: int) -> Iterator[int]:
    """From lines like `1: FLOCK  ADVISORY  WRITE 1234 fd:00:5678 0 EOF` (proc(5))."""
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if len(words) == 8 and words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
            yield int(words[4])


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (OSError, UnicodeDecodeError):
        command = ""
    return f"process {pid} ({command})" if command else f"process {pid}"
