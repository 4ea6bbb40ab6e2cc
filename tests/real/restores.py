"""`icefloe restore` as a person calls it, and a process's memory as the kernel shows it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from criu_tool import Criu
from processes import wait_until
from stores import check_promised
from workloads import Workload

RESTORE_SECONDS = 60.0
DOORS = ("lazy", "eager", "stream")

RESTORE_KEYS: dict[str, type | tuple[type, ...]] = {
    "pid": int,
    "door": str,
    "seconds_to_resume": (int, float),
    "criu_seconds": (int, float),
    "cuda_seconds": (int, float),
    "filled_seconds": (int, float),
    "wire_bytes": int,
    "faults": int,
}

# Where the kernel itself writes when a thread is resumed: its rseq area (rseq(2)).
RSEQ_BYTES = 32


def command(store: Path, *args: str | Path) -> list[str]:
    """A command line of icefloe."""
    return [sys.executable, "-m", "icefloe", "--store", str(store), *map(str, args)]


def environment(criu: Criu | Path) -> dict[str, str]:
    """The environment in which icefloe finds this CRIU."""
    program = criu.program if isinstance(criu, Criu) else criu
    return {**os.environ, "ICEFLOE_CAPTURE_CRIU": str(program)}


def restore(
    criu: Criu,
    store: Path,
    name: str,
    workload: Workload,
    *args: str,
    criu_args: Sequence[str] = (),
) -> dict[str, Any]:
    """Restores a workload; returns the promised JSON, checked."""
    workload.forget()
    tail = ["--", *criu_args] if criu_args else []
    result = subprocess.run(
        command(store, "restore", name, "--json", *args, *tail),
        env=environment(criu),
        capture_output=True,
        text=True,
        timeout=RESTORE_SECONDS,
    )
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stderr}"
    answer: dict[str, Any] = json.loads(result.stdout)
    check_promised("restore", answer, RESTORE_KEYS)
    assert answer["pid"] == workload.pid
    return answer


@contextmanager
def restoring(
    criu: Criu, store: Path, name: str, workload: Workload, *args: str
) -> Iterator[subprocess.Popen[str]]:
    """A restore at work; it is gone afterwards, whatever happened."""
    workload.forget()
    process = subprocess.Popen(
        command(store, "restore", name, "--json", *args),
        env=environment(criu),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the one that fills too
        process.communicate()


def fails(store: Path, environ: Mapping[str, str], *args: str) -> tuple[int, str]:
    """Runs a restore that can't work; returns its exit code and what it says."""
    result = subprocess.run(
        command(store, "restore", *args),
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=RESTORE_SECONDS,
    )
    assert "Traceback" not in result.stderr, result.stderr
    assert result.stderr.startswith("icefloe: "), result.stderr
    return result.returncode, result.stderr


@dataclass(frozen=True)
class MemoryPart:
    """A private writable area of a process and its bytes."""

    start: int
    content: bytes


def memory_of(pid: int) -> list[MemoryPart]:
    """All private writable memory of a stopped process, read through /proc/PID/mem.

    Areas that touch are one: whether the kernel keeps two mappings apart or merges them
    depends on their history, which a restore doesn't bring back.
    """
    parts: list[MemoryPart] = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ \d+ *(.*)", line)
            if found and not found[3].startswith("[v"):
                start, end = int(found[1], 16), int(found[2], 16)
                content = os.pread(memory.fileno(), end - start, start)
                if parts and parts[-1].start + len(parts[-1].content) == start:
                    start, content = parts[-1].start, parts.pop().content + content
                parts.append(MemoryPart(start, content))
    return parts


def differing_bytes(before: Sequence[MemoryPart], after: Sequence[MemoryPart]) -> int:
    """How many bytes differ; the areas must be the same."""
    layout = [(part.start, len(part.content)) for part in before]
    assert layout == [(part.start, len(part.content)) for part in after]
    return sum(
        sum(x != y for x, y in zip(a.content[i : i + 4096], b.content[i : i + 4096], strict=True))
        for a, b in zip(before, after, strict=True)
        if a.content != b.content
        for i in range(0, len(a.content), 4096)
        if a.content[i : i + 4096] != b.content[i : i + 4096]
    )


def threads_of(pid: int) -> int:
    """How many threads a process has."""
    return len(os.listdir(f"/proc/{pid}/task"))


def state_of(pid: int) -> str | None:
    """The state letter of a process, None when there is none of this pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def wait_dead(pid: int, seconds: float = 20.0) -> None:
    """Waits until a process is gone or a zombie."""
    wait_until(lambda: state_of(pid) in (None, "Z"), seconds, f"the end of process {pid}")
