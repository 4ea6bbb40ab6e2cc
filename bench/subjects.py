"""Processes that benchmarks checkpoint and restore, and the CRIU that does it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import CACHE, BenchError, Unavailable

PROCESS = Path(__file__).with_name("restore_process.py")
RECORD_BYTES = 128
SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
WAIT_SECONDS = 300.0

WARM = """
import mmap, sys
size = int(sys.argv[1])
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
piece = b"1" * (1 << 20)
for start in range(0, size - len(piece), len(piece)):
    memory[start : start + len(piece)] = piece
"""


def criu_program() -> Path:
    """The CRIU to run. Raises Unavailable."""
    named = os.environ.get("ICEFLOE_CAPTURE_CRIU")
    program = Path(named) if named else CACHE / "criu" / "4.2" / "criu"
    if os.geteuid() != 0:
        raise Unavailable("CRIU needs root")
    if not program.exists():
        raise Unavailable(f"there is no {program}: run `make criu`")
    os.environ["ICEFLOE_CAPTURE_CRIU"] = str(program)
    # As installed programs do, Python may keep its bytecode.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return program


def reap(pid: int) -> None:
    """Ends the process and frees its pid."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            raise BenchError(f"process {pid} does not end")
        time.sleep(0.002)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Polls every millisecond. Raises BenchError after the time limit."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"waited in vain for {what}")
        time.sleep(0.001)


def start_process(record: Path, size: int, seed: int) -> subprocess.Popen[bytes]:
    """A process of this size that checks its memory (restore_process.py)."""
    record.write_bytes(bytes(RECORD_BYTES))
    return subprocess.Popen(
        [sys.executable, PROCESS, record, str(size), str(seed)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def adopt_orphans() -> None:
    """Restored processes become children of this one, so that their pids can be freed."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def free_memory() -> int:
    """Most of the memory that is free, in bytes."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return (int(found[1]) << 10) * 3 // 4 if found else 0


def warm_memory(size: int, parts: int = 1) -> None:
    """Touches so much memory once, in several processes: a virtual machine may pay seconds for
    memory that was not in use just before."""
    command = [sys.executable, "-c", WARM, str(size // parts)]
    for process in [subprocess.Popen(command) for _ in range(parts if size else 0)]:
        if process.wait():
            raise BenchError(f"{size} bytes of memory can't be touched")
