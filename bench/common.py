"""What every benchmark needs: a folder to work in, a timed child process, a table, a JSON file.

The scripts beside this one each answer one question. They run as plain scripts (`python
bench/ingest.py`), so that they measure the installed command from outside, as a user would.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import mmap
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

PAGE = 4096
ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
BENCH_CACHE = CACHE / "bench"

MIB = 1 << 20
GIB = 1 << 30

# Large enough that a read is dominated by the copy, small enough to stay in the L2 and L3 caches.
WINDOW = 8 * MIB

_UNITS = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB}


class BenchError(Exception):
    """A benchmark cannot go on; the message says what happened and what to do."""


class Unavailable(BenchError):
    """Something that this machine lacks; the part that needs it is skipped with this reason."""


def parse_size(text: str) -> int:
    """Read `2g`, `128MiB` or `4096` as bytes, rounded down to whole pages."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (write 128m or 2g)")
    pages = int(float(found[1]) * _UNITS[found[2]]) // PAGE
    if pages == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one page of {PAGE} bytes")
    return pages * PAGE


def human(count: float) -> str:
    """Write a byte count in MB, as the tables of the project's documents do."""
    return f"{count / 1e6:.1f} MB"


def arguments(description: str | None, default_bytes: str) -> argparse.ArgumentParser:
    """Make a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bytes",
        type=parse_size,
        default=parse_size(default_bytes),
        metavar="SIZE",
        help=f"size of the test image, such as 128m or 2g (default {default_bytes})",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of everything random (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as well")
    parser.add_argument("--keep", action="store_true", help="leave the work folder behind")
    return parser


def main_guard(main: Callable[[], int]) -> NoReturn:
    """Run a script's `main`: one line per failure, and folders cleaned up when it is terminated."""

    def terminated(signum: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, terminated)
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


@contextlib.contextmanager
def workplace(keep: bool) -> Iterator[Path]:
    """Give a fresh folder on the repository's own disk; remove it at the end unless `keep`."""
    BENCH_CACHE.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="work-", dir=BENCH_CACHE))
    try:
        yield folder
    finally:
        if keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder or file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def files_under(folder: Path) -> list[Path]:
    """List the regular files under `folder` in path order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def tree_bytes(folder: Path) -> int:
    """Sum the lengths of all files under `folder` (lengths, not disk blocks)."""
    return sum(path.stat().st_size for path in files_under(folder))


@contextlib.contextmanager
def mapped(path: Path, populate: bool = False) -> Iterator[memoryview]:
    """Map a file for reading; `populate` faults every page in beforehand."""
    size = path.stat().st_size
    if size == 0:
        yield memoryview(b"")
        return
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        # A numpy array made from the view may outlive this block; the collector unmaps it then.
        with contextlib.suppress(BufferError):
            view.release()
            mapping.close()


def windows(path: Path, size: int = WINDOW) -> Iterator[memoryview]:
    """Read a file front to back through one reused buffer of `size` bytes."""
    view = memoryview(mmap.mmap(-1, size))
    with path.open("rb", 0) as file:
        while count := file.readinto(view):
            yield view[:count]


def warm(*folders: Path) -> None:
    """Read every file once, so that no contestant pays for a cold page cache."""
    for folder in folders:
        for path in files_under(folder):
            for _ in windows(path):
                pass


def same_trees(left: Path, right: Path) -> None:
    """Raise BenchError unless both folders hold the same files with the same bytes."""
    names = [[str(path.relative_to(top)) for path in files_under(top)] for top in (left, right)]
    if names[0] != names[1]:
        raise BenchError(f"{left} and {right} hold different files: look at both with --keep")
    for name in names[0]:
        a, b = left / name, right / name
        if a.stat().st_size != b.stat().st_size:
            raise BenchError(f"{b} has another length than {a}")
        # memcmp of two windows; comparing memoryviews goes item by item and is far slower.
        if any(x.tobytes() != y.tobytes() for x, y in zip(windows(a), windows(b), strict=True)):
            raise BenchError(f"{b} has other bytes than {a}")


@dataclass(frozen=True)
class Ran:
    """One finished child: wall seconds, CPU seconds, peak resident bytes, what it printed."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str


# A child's peak memory starts at that of the process that spawned it, and a benchmark that holds
# arrays is large. This little process between them keeps the peak the child's own (within 10 MB),
# and its clock starts after its own start-up.
_BETWEEN = """
import json, os, sys, time
report = int(sys.argv[1])
os.set_inheritable(report, False)
start = time.perf_counter()
pid = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(pid, 0)
seconds = time.perf_counter() - start
os.write(report, json.dumps({
    "code": os.waitstatus_to_exitcode(status),
    "seconds": seconds,
    "cpu_seconds": used.ru_utime + used.ru_stime,
    "peak_bytes": used.ru_maxrss * 1024,
}).encode())
"""


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """Run a command to its end and measure it; `env` is added to this process's environment.

    Python programs may keep their bytecode, as installed ones do.
    The peak is that of the largest single process among the command and the children it waited
    for, as the kernel counts it, not their sum. Raises BenchError when the command fails.
    """
    words = [str(word) for word in command]
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as report:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _BETWEEN, str(writer), *words],
                cwd=cwd,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **(env or {})},
                pass_fds=(writer,),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        finally:
            os.close(writer)
        facts = json.loads(report.read() or b'{"code": 127}')
    if facts.pop("code") != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise BenchError(f"`{' '.join(words[:8])}` failed: {' / '.join(last)}")
    return Ran(output=done.stdout, **facts)


class Contestant(Protocol):
    """Something that stores named folders in a repository folder and gives them back.

    `store` and `restore` return the wall seconds of the whole process. `stored_bytes` counts the
    repository alone, without caches that could be built again.
    """

    @property
    def name(self) -> str: ...

    def prepare(self, repo: Path) -> None: ...

    def store(self, source: Path, repo: Path, name: str) -> float: ...

    def restore(self, repo: Path, name: str, out: Path) -> float: ...

    def stored_bytes(self, repo: Path) -> int: ...


@dataclass(frozen=True)
class Icefloe:
    """This project's own command, run as a user runs it: a process of its own for every step."""

    name: str = "icefloe"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("icefloe") is None:
            raise Unavailable("icefloe is not installed for this Python: run .venv/bin/python")

    def ask(self, repo: Path, *words: str | Path) -> tuple[Ran, dict[str, Any]]:
        """Run one command with --json; return what it cost and what it answered."""
        ran = run([sys.executable, "-m", "icefloe", "--store", repo, *words, "--json"], cwd=CACHE)
        answer = json.loads(ran.output)
        if not isinstance(answer, dict):
            raise BenchError(f"`icefloe {words[0]}` answered {type(answer).__name__}, not a table")
        return ran, answer

    def prepare(self, repo: Path) -> None:
        """Do nothing: the first `add` makes the store, and its time counts."""

    def store(self, source: Path, repo: Path, name: str) -> float:
        return self.ask(repo, "add", source, name)[0].seconds

    def restore(self, repo: Path, name: str, out: Path) -> float:
        return self.ask(repo, "export", name, out)[0].seconds

    def stored_bytes(self, repo: Path) -> int:
        """Count everything, catalog included."""
        return tree_bytes(repo)


def machine() -> dict[str, Any]:
    """Say on what the figures were measured."""
    model = "unknown"
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        model = found[1] if found else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print an aligned table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    print(f"\n{title}")
    for row in [heads, ["-" * width for width in widths], *rows]:
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
        print("  " + "  ".join(cells).rstrip())


@dataclass(frozen=True)
class Bar:
    """One promise and what was measured: `wanted` is a bound from below or from above."""

    what: str
    measured: float
    wanted: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        if self.at_most:
            return self.measured <= self.wanted
        return self.measured >= self.wanted

    def facts(self) -> dict[str, Any]:
        """The JSON form."""
        sign = "<=" if self.at_most else ">="
        return {
            "what": self.what,
            "measured": self.measured,
            "wanted": f"{sign} {self.wanted:g}",
            "reached": self.reached,
        }


def bars_table(bars: Sequence[Bar]) -> None:
    """Print promises beside figures."""
    rows = [
        [bar.what, f"{bar.measured:.4g}", f"{facts['wanted']}", "yes" if bar.reached else "NO"]
        for bar in bars
        for facts in [bar.facts()]
    ]
    table("bars", ["promise", "measured", "wanted", "reached"], rows)


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write the results with the machine's facts, if a file was asked for."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2, sort_keys=True) + "\n")
    print(f"\nwritten: {path}", file=sys.stderr)
