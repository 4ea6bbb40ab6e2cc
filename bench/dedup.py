"""How much of the next checkpoint is new, beside what must be, and what does finding it cost?

The parts, of which `--only` chooses some:

chunks    A file of random pages; the same with 7 pages inserted near the front; the same with 500
          single pages changed as well. Without a parent, what `add` calls new stands beside what
          an independent chunker says that the changed blocks hold. That chunker is written here
          from docs/format.md ("Chunking"), and shares with the project the table of weights alone.
rivals    The test image with single pages changed all over it, beside restic, borg and casync.
heap, redis, postgres, node
          CRIU dumps of real processes, before and after they did some work (dumped.py).
speed     How long `add` takes with the page step, and without it.
chain     Ten generations of the test image: what they cost, and how fast they come out.
restores  Ten captures of a real process, and lazy restores of the first and the last.

Beside it: fixed chunks of 64 KiB and 1 MiB (zero chunks cost nothing), and single pages, the
optimum that any method could reach. Every second image is exported and compared.
"""

from __future__ import annotations

import argparse
import bisect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from chain import generations, restores
from common import (
    MIB,
    PAGE,
    Bar,
    Icefloe,
    Unavailable,
    arguments,
    bars_table,
    files_under,
    human,
    main_guard,
    mapped,
    remove,
    same_trees,
    table,
    tree_bytes,
    windows,
    workplace,
    write_json,
)
from dumped import SUBJECTS, dumped
from images import insert_and_scatter, random_pages
from optimum import optimum
from page_step import against_rivals, speed

Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
Blocks = dict[bytes, int]
"""The distinct blocks of a folder: identity to length in bytes."""

Results = tuple[dict[str, Any], list[Bar]]
"""What a part found, as JSON, and its promises."""

Part = Callable[[Icefloe, int, int, Path], Results]
"""Takes the size asked for, the seed, and an empty folder."""

MIN_PAGES, AVERAGE_PAGES, MAX_PAGES = 16, 64, 256
ZERO_RUN_PAGES = 16

# `add` may call at most this much more new than the changed blocks hold.
OVER_CHANGED_BLOCKS = 1.02
# Seven pages inserted in one place: at most this share of the file is new.
OF_THE_FILE = 0.002
# With a parent: at most this much more than the pages that are nowhere in it.
OF_THE_OPTIMUM = 1.25

SINGLE_PAGES, CHANGED_BLOCKS = "single pages", "changed blocks"


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


@dataclass(frozen=True)
class Answer:
    """What one `add` of the second image said, and what the other methods would store."""

    added: dict[str, Any]
    seconds: float
    others: dict[str, int]

    def facts(self) -> dict[str, Any]:
        """The JSON form."""
        return {"add": self.added, "seconds": self.seconds, "others": self.others}


def second_add(
    ours: Icefloe,
    base: Path,
    later: Path,
    work: Path,
    *more: str,
) -> Answer:
    """Store `base` and `later` in a new store under one name; compare with other methods."""
    store, out = work / "store", work / "out"
    try:
        ours.ask(store, "add", base, "image:first")
        ran, added = ours.ask(store, "add", later, "image:second", *more)
        ours.restore(store, "image:second", out)
        same_trees(later, out)
    finally:
        remove(store)
        remove(out)
    others = {
        "fixed 64 KiB": new_bytes(base, later, fixed_blocks(64 * 1024)),
        "fixed 1 MiB": new_bytes(base, later, fixed_blocks(MIB)),
    }
    return Answer(added, ran.seconds, others)


def print_answers(title: str, answers: dict[str, Answer]) -> None:
    """One table: a row per method, a column per case."""
    methods = dict.fromkeys(name for answer in answers.values() for name in answer.others)
    rows = [["icefloe: new", *(human(a.added["new_bytes"]) for a in answers.values())]]
    rows += [
        [name, *(human(a.others[name]) if name in a.others else "-" for a in answers.values())]
        for name in methods
    ]
    rows += [
        ["icefloe: stored", *(human(a.added["stored_bytes"]) for a in answers.values())],
        ["icefloe: seconds", *(f"{a.seconds:.2f}" for a in answers.values())],
    ]
    table(title, ["new bytes of the second image", *answers], rows)


def chunks(ours: Icefloe, size: int, seed: int, work: Path) -> Results:
    """A file of random pages, changed in known ways."""
    base = work / "random"
    base.mkdir()
    random_pages(base / "pages-1.img", size, seed)
    answers = {}
    for case, scattered in (("inserted", 0), ("scattered", 500)):
        later = work / case
        later.mkdir()
        source, target = base / "pages-1.img", later / "pages-1.img"
        insert_and_scatter(source, target, scattered=scattered, seed=seed)
        pages = optimum(base, later, addresses=False).anywhere
        blocks = new_bytes(base, later, reference_blocks)
        for how, more in (("", ()), (", no parent", ("--parent", "none"))):
            answer = second_add(ours, base, later, work, *more)
            answer.others.update({SINGLE_PAGES: pages, CHANGED_BLOCKS: blocks})
            answers[case + how] = answer
        remove(later)
    print_answers(f"a file of {human(size)} of random pages", answers)
    new = {case: answer.added["new_bytes"] for case, answer in answers.items()}
    other = answers["scattered"].others
    changed = new["scattered, no parent"] / other[CHANGED_BLOCKS]
    bars = [
        Bar("no parent: new, of the changed blocks", changed, OVER_CHANGED_BLOCKS, True),
        Bar("new after the insertion, of the file", new["inserted"] / size, OF_THE_FILE, True),
        _of_optimum("scattered pages", answers["scattered"]),
    ]
    facts = {case: answer.facts() for case, answer in answers.items()}
    return {"bytes": size, **facts}, bars


def _of_optimum(what: str, answer: Answer) -> Bar:
    """The promise about single pages."""
    of_it = answer.added["new_bytes"] / answer.others[SINGLE_PAGES]
    return Bar(f"{what}: new, of single pages", of_it, OF_THE_OPTIMUM, True)


def processes(subject: str) -> Part:
    """The part about one of the real processes. It raises Unavailable."""

    def part(ours: Icefloe, size: int, seed: int, work: Path) -> Results:
        answers = {}
        for pair in dumped(subject, size, seed, work):
            answer = second_add(ours, pair.first, pair.second, work)
            best = optimum(pair.first, pair.second, addresses=True)
            answer.others[SINGLE_PAGES] = best.anywhere
            if best.in_place is not None:
                answer.others["single pages in place"] = best.in_place
            answer.others["whole image"] = tree_bytes(pair.second)
            answers[pair.name] = answer
        print_answers(f"{subject}, dumped by CRIU", answers)
        bars = [_of_optimum(name, answer) for name, answer in answers.items()]
        return {name: answer.facts() for name, answer in answers.items()}, bars

    return part


def _rivals(ours: Icefloe, size: int, seed: int, work: Path) -> Results:
    """The test image is twice as large as other parts' images, as in bench/ingest.py."""
    return against_rivals(ours, 2 * size, seed, work)


PARTS: dict[str, Part] = {
    "chunks": chunks,
    "rivals": _rivals,
    **{subject: processes(subject) for subject in SUBJECTS},
    "speed": speed,
    "chain": generations,
    "restores": restores,
}


def run_parts(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts asked for; return the JSON form."""
    ours = Icefloe()
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in options.only:
        print(f"{name} ...", file=sys.stderr)
        try:
            with workplace(options.keep) as work:
                results[name], more = PARTS[name](ours, options.bytes, options.seed, work)
        except Unavailable as reason:
            print(f"\n  {name} skipped: {reason}")
            results[name], more = {"skipped": str(reason)}, []
        bars += more
    bars_table(bars)
    return {**results, "bars": [bar.facts() for bar in bars]}


def _parts(text: str) -> list[str]:
    """Read `redis,node`."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {name!r}, only {', '.join(PARTS)}")
    return names


def main() -> int:
    parser = arguments(__doc__, "1g")
    parser.add_argument(
        "--only", type=_parts, default=list(PARTS), metavar="PART,...", help="only these parts"
    )
    options = parser.parse_args()
    try:
        write_json(options.json, {"dedup": run_parts(options)})
    except Unavailable as reason:
        print(f"dedup.py: skipped: {reason}", file=sys.stderr)
        write_json(options.json, {"skipped": str(reason)})
    return 0


if __name__ == "__main__":
    main_guard(main)
