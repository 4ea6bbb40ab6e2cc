"""How much of the next checkpoint is new, beside what must be, and beside fixed chunks?

(a) A file of random pages; the same with 7 pages inserted near the front; the same with 500
single pages changed as well. What `add` calls new stands beside what an independent chunker says
that the changed blocks hold. That chunker is written here from docs/format.md ("Chunking"), and
shares with the project nothing but the table of weights.

(b) Two CRIU dumps of one process, a growing Python heap, two seconds apart.

Beside both: fixed chunks of 64 KiB and 1 MiB (zero chunks cost nothing), and single pages, the
optimum that any method could reach.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from common import (
    CACHE,
    MIB,
    PAGE,
    Bar,
    BenchError,
    Icefloe,
    Unavailable,
    arguments,
    bars_table,
    files_under,
    human,
    main_guard,
    mapped,
    parse_size,
    remove,
    run,
    table,
    tree_bytes,
    windows,
    workplace,
    write_json,
)
from images import insert_and_scatter, random_pages

Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
Blocks = dict[bytes, int]
"""The distinct blocks of a folder: identity to length in bytes."""

MIN_PAGES, AVERAGE_PAGES, MAX_PAGES = 16, 64, 256
ZERO_RUN_PAGES = 16

# `add` may call at most this much more new than the changed blocks hold.
OVER_CHANGED_BLOCKS = 1.02
# Seven pages inserted in one place: at most this share of the file is new.
OF_THE_FILE = 0.002

CRIU = CACHE / "criu" / "4.2" / "criu"
SECONDS_BETWEEN_DUMPS = 2.0


def _weights() -> Words:
    """The table of weights, the one thing taken from the project itself."""
    try:
        from icefloe.chunker import WEIGHTS
    except ImportError as error:
        raise Unavailable(f"icefloe.chunker has no weights ({error})") from error
    return np.asarray(WEIGHTS, np.uint64)


def _mix(values: Words) -> Words:
    """Spread the fingerprint over its low bits, as docs/format.md says, modulo 2^64."""
    values = values ^ (values >> np.uint64(29))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(32))


def _look(path: Path) -> tuple[Words, Flags]:
    """For every page of a file its mixed fingerprint, and whether it is all zero."""
    weights = _weights()
    mixed: list[Words] = [np.zeros(0, np.uint64)]
    zero: list[Flags] = [np.zeros(0, np.bool_)]
    for window in windows(path):
        words = np.frombuffer(window, np.uint64).reshape(-1, PAGE // 8)
        mixed.append(_mix(words @ weights))
        zero.append(np.asarray(~words.any(axis=1), np.bool_))
    return np.concatenate(mixed), np.concatenate(zero)


def _long_zero_runs(zero: Flags) -> list[tuple[int, int]]:
    """Runs of zero pages that are long enough to be no part of any block, as [start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], zero.view(np.int8), [0]])))
    runs = edges.reshape(-1, 2)
    long = runs[runs[:, 1] - runs[:, 0] >= ZERO_RUN_PAGES]
    return [(int(start), int(end)) for start, end in long]


def _cut(start: int, end: int, cuts: list[int]) -> Iterator[tuple[int, int]]:
    """Blocks of the stretch [start, end): cut at the first allowed cut point, or when full."""
    while start < end:
        at = bisect.bisect_left(cuts, start + MIN_PAGES)
        stop = min(start + MAX_PAGES, end, *cuts[at : at + 1])
        yield start, stop
        start = stop


def reference_bounds(path: Path) -> list[tuple[int, int]]:
    """The blocks of a file of pages, as [start, end) in pages."""
    mixed, zero = _look(path)
    ends_here = (mixed % np.uint64(AVERAGE_PAGES) == 0) & ~zero
    cuts = [int(page) + 1 for page in np.flatnonzero(ends_here)]
    blocks: list[tuple[int, int]] = []
    position = 0
    for start, end in [*_long_zero_runs(zero), (len(zero), len(zero))]:
        blocks += _cut(position, start, cuts)
        position = end
    return blocks


def reference_blocks(path: Path) -> Blocks:
    """Content-cut blocks of a pages file."""
    with mapped(path) as view:
        bounds = ((start * PAGE, end * PAGE) for start, end in reference_bounds(path))
        return {blake3(view[a:b]).digest(): b - a for a, b in bounds}


def fixed_blocks(size: int) -> Callable[[Path], Blocks]:
    """A chunker that cuts a file every `size` bytes; a chunk of zeros is free."""

    def blocks(path: Path) -> Blocks:
        out: Blocks = {}
        zero = blake3(bytes(size)).digest()
        for window in windows(path):
            for start in range(0, len(window), size):
                piece = window[start : start + size]
                out[blake3(piece).digest()] = len(piece)
        out.pop(zero, None)
        return out

    return blocks


def _folder_blocks(folder: Path, blocks: Callable[[Path], Blocks]) -> Blocks:
    """The distinct blocks of all files of a folder."""
    out: Blocks = {}
    for path in files_under(folder):
        out.update(blocks(path))
    return out


def new_bytes(base: Path, later: Path, blocks: Callable[[Path], Blocks]) -> int:
    """Bytes of the blocks of `later` that `base` does not have."""
    known = _folder_blocks(base, blocks)
    found = _folder_blocks(later, blocks)
    return sum(length for key, length in found.items() if key not in known)


def _page_sums(folder: Path) -> Words:
    """The distinct fingerprints of the whole non-zero pages of a folder's pages files."""
    looks = [_look(path) for path in files_under(folder) if path.match("pages-*.img")]
    return np.unique(np.concatenate([mixed[~zero] for mixed, zero in looks]))


def new_pages_bytes(base: Path, later: Path) -> int:
    """Bytes of the single pages that are new: the optimum of page-exact deduplication."""
    fresh = np.isin(_page_sums(later), _page_sums(base), assume_unique=True, invert=True)
    return int(np.count_nonzero(fresh)) * PAGE


@dataclass(frozen=True)
class Answer:
    """What one `add` of the second image said, and what the other methods would store."""

    added: dict[str, Any]
    seconds: float
    others: dict[str, int]

    def facts(self) -> dict[str, Any]:
        """The JSON form."""
        return {"add": self.added, "seconds": self.seconds, "others": self.others}


def second_add(ours: Icefloe, base: Path, later: Path, work: Path) -> Answer:
    """Store `base` and `later` in a new store; compare with fixed chunks and single pages."""
    store = work / "store"
    try:
        ours.ask(store, "add", base, "first")
        ran, added = ours.ask(store, "add", later, "second")
    finally:
        remove(store)
    others = {
        "fixed 64 KiB": new_bytes(base, later, fixed_blocks(64 * 1024)),
        "fixed 1 MiB": new_bytes(base, later, fixed_blocks(MIB)),
        "single pages": new_pages_bytes(base, later),
    }
    return Answer(added, ran.seconds, others)


def print_answers(title: str, answers: dict[str, Answer]) -> None:
    """One table: a row per method, a column per case."""
    methods = list(next(iter(answers.values())).others)
    rows = [["icefloe: new", *(human(a.added["new_bytes"]) for a in answers.values())]]
    rows += [[name, *(human(a.others[name]) for a in answers.values())] for name in methods]
    rows += [
        ["icefloe: stored", *(human(a.added["stored_bytes"]) for a in answers.values())],
        ["icefloe: seconds", *(f"{a.seconds:.2f}" for a in answers.values())],
    ]
    table(title, ["new bytes of the second image", *answers], rows)


def random_file(
    ours: Icefloe, size: int, seed: int, work: Path
) -> tuple[dict[str, Any], list[Bar]]:
    """Question (a)."""
    base = work / "random"
    base.mkdir()
    random_pages(base / "pages-1.img", size, seed)
    answers = {}
    for case, scattered in (("inserted", 0), ("scattered", 500)):
        later = work / case
        later.mkdir()
        source, target = base / "pages-1.img", later / "pages-1.img"
        insert_and_scatter(source, target, scattered=scattered, seed=seed)
        answer = second_add(ours, base, later, work)
        answer.others["changed blocks"] = new_bytes(base, later, reference_blocks)
        answers[case] = answer
        remove(later)
    print_answers(f"(a) a file of {human(size)} of random pages", answers)
    new = {case: answer.added["new_bytes"] for case, answer in answers.items()}
    changed = answers["scattered"].others["changed blocks"]
    bars = [
        Bar(
            "(a) new, of what the changed blocks hold",
            new["scattered"] / changed,
            OVER_CHANGED_BLOCKS,
            True,
        ),
        Bar("(a) new after the insertion, of the file", new["inserted"] / size, OF_THE_FILE, True),
    ]
    facts = {case: answer.facts() for case, answer in answers.items()}
    return {"bytes": size, **facts}, bars


def _wait_until_ready(process: subprocess.Popen[bytes], said: Path) -> None:
    """Wait until the heap process has grown to its size."""
    deadline = time.monotonic() + 120
    while "ready" not in said.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError("the heap process did not get ready: run bench/heap.py by hand")
        time.sleep(0.05)


@contextlib.contextmanager
def _growing_process(size: int, work: Path) -> Iterator[int]:
    """Run the growing heap process, detached so that CRIU need not know this terminal."""
    said = work / "said"
    script = Path(__file__).with_name("heap.py")
    with said.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(script), "--grow", "--bytes", str(size)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, said)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _require_criu() -> None:
    """Raise Unavailable, with the reason, where CRIU cannot dump."""
    if not CRIU.exists():
        raise Unavailable(f"{CRIU} is missing: run `make criu`")
    if os.geteuid() != 0:
        raise Unavailable("CRIU needs root here")
    try:
        run([CRIU, "check"])
    except BenchError as error:
        raise Unavailable(str(error)) from error


def _dump(pid: int, folder: Path) -> None:
    """Checkpoint a process and let it run on; the log stays out of the image."""
    folder.mkdir()
    log = folder.with_suffix(".log")
    places: list[str | Path] = ["--images-dir", folder, "--log-file", log]
    try:
        run([CRIU, "dump", "--tree", str(pid), "--leave-running", *places])
    except BenchError as error:
        last = log.read_text().splitlines()[-1:] if log.exists() else []
        raise BenchError(f"{error} {' '.join(last)}") from error


def real_process(ours: Icefloe, size: int, work: Path) -> dict[str, Any]:
    """Question (b). Raises Unavailable where CRIU cannot run."""
    _require_criu()
    first, second = work / "dump-1", work / "dump-2"
    with _growing_process(size, work) as pid:
        _dump(pid, first)
        time.sleep(SECONDS_BETWEEN_DUMPS)
        _dump(pid, second)
    answer = second_add(ours, first, second, work)
    total = tree_bytes(second)
    title = f"(b) a Python heap dumped twice by CRIU, {human(total)}"
    print_answers(title, {"later dump": answer})
    return {"bytes": total, **answer.facts()}


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Answer both questions; return the JSON form."""
    ours = Icefloe()
    with workplace(options.keep) as work:
        results: dict[str, Any] = {}
        results["random"], bars = random_file(ours, options.bytes, options.seed, work)
        try:
            results["process"] = real_process(ours, options.heap, work)
        except Unavailable as reason:
            print(f"\n  (b) skipped: {reason}")
            results["process"] = {"skipped": str(reason)}
    bars_table(bars)
    return {**results, "bars": [bar.facts() for bar in bars]}


def main() -> int:
    parser = arguments(__doc__, "1g")
    parser.add_argument(
        "--heap",
        type=parse_size,
        default=parse_size("256m"),
        metavar="SIZE",
        help="size of the process that CRIU dumps (default 256m)",
    )
    options = parser.parse_args()
    try:
        write_json(options.json, {"dedup": run_all(options)})
    except Unavailable as reason:
        print(f"dedup.py: skipped: {reason}", file=sys.stderr)
        write_json(options.json, {"skipped": str(reason)})
    return 0


if __name__ == "__main__":
    main_guard(main)
