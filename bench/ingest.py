"""How fast do images go in and come out, beside restic, borg and casync, and in how much memory?

Stores the mixed test image (40 % bf16 weights, 20 % zero, 40 % heap of a real process), then the
same image with a few pages inserted, then gives the first one back, with each contestant in turn,
several rounds. The best of each figure counts, everybody's from the same run. Sources are in the
page cache, repositories on the same disk and new in every round.

Beside it stands the machine's own limit: the time that BLAKE3 of all non-zero bytes and the
codecs that were really used need on all cores, with nothing around them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lz4.block
from blake3 import blake3
from common import (
    GIB,
    PAGE,
    Bar,
    BenchError,
    Contestant,
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
    warm,
    windows,
    workplace,
    write_json,
)
from images import HEAP, WEIGHTS, mixed, plan, with_changes, with_insertions
from rivals import Round, one_round, references, rivals

from icefloe.store.policies import POLICIES

ADD_TIMES_FASTER = 2.0
INSERTED_TIMES_FASTER = 5.0
EXPORT_TIMES_FASTER = 2.0
OF_THE_LIMIT = 0.70

# The limit works on pieces of the store's average block.
PIECE = 256 * 1024

MEMORY_SIZES = (1 * GIB, 4 * GIB, 16 * GIB)

Coder = Callable[[memoryview], object]


def _nothing(_piece: memoryview) -> None:
    """Store a piece as it is."""


def _lz4(piece: memoryview) -> object:
    return lz4.block.compress(piece, store_size=False)


def _zstd() -> Coder:
    """The compressor that `add` uses by default."""
    compressor = POLICIES["balanced"].compressor()
    assert compressor is not None
    return compressor.compress


# For each codec a maker of coders: a thread makes its own and uses it for all of its pieces.
CODERS: dict[str, Callable[[], Coder]] = {
    "raw": lambda: _nothing,
    "lz4": lambda: _lz4,
    "zstd": _zstd,
}


@dataclass(frozen=True)
class Best:
    """The best of every figure over all rounds of one contestant."""

    seconds: dict[str, float]
    added_bytes: dict[str, int]
    restore_seconds: float

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Best:
        """Take the minimum, figure by figure."""
        return cls(
            {name: min(r.seconds[name] for r in rounds) for name in rounds[0].seconds},
            {name: min(r.added_bytes[name] for r in rounds) for name in rounds[0].added_bytes},
            min(r.restore_seconds for r in rounds),
        )


def contest(
    field: Sequence[Contestant], versions: dict[str, Path], work: Path, rounds: int
) -> dict[str, list[Round]]:
    """Let the whole field run `rounds` times; each round starts with another contestant."""
    results: dict[str, list[Round]] = {contestant.name: [] for contestant in field}
    for number in range(rounds):
        shift = number % len(field)
        for contestant in [*field[shift:], *field[:shift]]:
            print(f"round {number + 1}: {contestant.name} ...", file=sys.stderr)
            warm(*versions.values())
            results[contestant.name].append(one_round(contestant, versions, work))
    return results


def make_versions(work: Path, size: int, seed: int, changed: bool) -> dict[str, Path]:
    """Make the test images: the first one, with insertions only, and if asked with changes."""
    print("making the images ...", file=sys.stderr)
    versions = {"base": work / "base", "inserted": work / "inserted"}
    mixed(versions["base"], size, seed)
    with_insertions(versions["base"], versions["inserted"], seed=seed)
    if changed:
        versions["changed"] = work / "changed"
        with_changes(versions["base"], versions["changed"], seed=seed)
    return versions


def inspect(ours: Icefloe, versions: dict[str, Path], work: Path) -> dict[str, Any]:
    """Store every version once, untimed; compare each export with its source; return facts.

    The facts are those of `show` about the first version, and what each `add` answered.
    """
    store, out = work / "facts", work / "facts-out"
    try:
        adds = {name: ours.ask(store, "add", path, name)[1] for name, path in versions.items()}
        for name, path in versions.items():
            ours.ask(store, "export", name, out)
            same_trees(path, out)
            remove(out)
        shown = ours.ask(store, "show", "base")[1]
    finally:
        remove(store)
        remove(out)
    return {"adds": adds, "codecs": shown.get("codecs", {})}


@dataclass(frozen=True)
class Work:
    """One piece of the limit: the bytes, and the codec that they get (None: hashed only)."""

    piece: memoryview
    codec: str | None


def share_out(pieces: Sequence[memoryview], codecs: dict[str, dict[str, int]]) -> list[Work]:
    """Give each codec as many raw bytes as it really coded.

    `pieces` begin with what compresses best, and so does the order of the codecs by their own
    ratio: which block got which codec is not known, but alike goes to alike.
    """
    unknown = sorted(set(codecs) - set(CODERS))
    if unknown:
        raise BenchError(f"codec {unknown[0]} is new: add its coder to CODERS in ingest.py")
    used = [(name, figures) for name, figures in codecs.items() if figures["raw_bytes"]]
    used.sort(key=lambda item: item[1]["stored_bytes"] / item[1]["raw_bytes"])
    ends = list(itertools.accumulate(figures["raw_bytes"] for _, figures in used))
    names: list[str | None] = [name for name, _ in used]
    out, position, current = [], 0, 0
    for piece in pieces:
        while current < len(ends) and position >= ends[current]:
            current += 1
        out.append(Work(piece, names[current] if current < len(ends) else None))
        position += len(piece)
    return out


def _pieces(base: Path, size: int, seed: int, stack: ExitStack) -> list[memoryview]:
    """The non-zero bytes of the image in pieces, heap before weights, mapped and faulted in."""
    found: dict[str, list[memoryview]] = {HEAP: [], WEIGHTS: []}
    for number, regions in enumerate(plan(size, seed), 1):
        view = stack.enter_context(mapped(base / f"pages-{number}.img", populate=True))
        offset = 0
        for region in regions:
            end = offset + region.pages * PAGE
            if region.kind in found:
                starts = range(offset, end, PIECE)
                found[region.kind] += [view[at : min(at + PIECE, end)] for at in starts]
            offset = end
    return found[HEAP] + found[WEIGHTS]


def _code(items: Sequence[Work]) -> None:
    """Hash and code a share of the pieces, as one thread."""
    coders = {name: make() for name, make in CODERS.items()}
    for item in items:
        blake3(item.piece).digest()
        if item.codec is not None:
            coders[item.codec](item.piece)


def _limit_once(items: Sequence[Work], threads: int) -> float:
    """Seconds that all cores need for all pieces."""
    # Dealt like cards: every thread gets the same mixture.
    workers = [
        threading.Thread(target=_code, args=(items[i::threads],), daemon=True)
        for i in range(threads)
    ]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def machine_limit(
    base: Path, size: int, seed: int, codecs: dict[str, dict[str, int]], rounds: int
) -> float:
    """The least seconds in which this machine can hash and code the image."""
    threads = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        pieces = _pieces(base, size, seed, stack)
        items = share_out(pieces, codecs)
        best = min(_limit_once(items, threads) for _ in range(rounds))
        for piece in pieces:
            piece.release()
    return best


def bars(ours: Best, field: dict[str, Best], limit: float | None) -> list[Bar]:
    """The promises. Every ratio is against the rival that is fastest at that very thing."""

    def fastest(figure: Callable[[Best], float]) -> tuple[str, float]:
        name = min(field, key=lambda rival: figure(field[rival]))
        return name, figure(field[name])

    adder, add = fastest(lambda best: best.seconds["base"])
    inserter, insert = fastest(lambda best: best.seconds["inserted"])
    exporter, export = fastest(lambda best: best.restore_seconds)
    stored = ours.added_bytes["base"] / field[adder].added_bytes["base"]
    again = ours.seconds["inserted"]
    out = [
        Bar(f"add, times faster than {adder}", add / ours.seconds["base"], ADD_TIMES_FASTER),
        Bar(f"bytes stored, of those of {adder}", stored, 1.0, at_most=True),
        Bar(
            f"insertions only, times faster than {inserter}", insert / again, INSERTED_TIMES_FASTER
        ),
        Bar(
            f"export, times faster than {exporter}",
            export / ours.restore_seconds,
            EXPORT_TIMES_FASTER,
        ),
    ]
    if limit is not None:
        out.append(Bar("add, of the machine's limit", limit / ours.seconds["base"], OF_THE_LIMIT))
    return out


def contest_table(best: dict[str, Best], size: int, rounds: int) -> None:
    """Print everybody's figures."""
    versions = list(next(iter(best.values())).seconds)
    heads = ["", *(head for v in versions for head in (f"{v} s", "added")), "export s"]
    rows = []
    for name, figures in best.items():
        cells = ((f"{figures.seconds[v]:.2f}", human(figures.added_bytes[v])) for v in versions)
        rows.append([name, *itertools.chain(*cells), f"{figures.restore_seconds:.2f}"])
    table(f"an image of {human(size)}, best of {rounds}", heads, rows)


def run_contest(options: argparse.Namespace) -> dict[str, Any]:
    """Compare speeds and sizes; print; return the JSON form."""
    ours = Icefloe()
    rival_list = rivals()
    field: list[Contestant] = [ours, *rival_list, *references()]
    with workplace(options.keep) as work:
        versions = make_versions(work, options.bytes, options.seed, options.changed)
        warm(*versions.values())
        facts = inspect(ours, versions, work)
        rounds = contest(field, versions, work, options.runs)
        limit = None
        if facts["codecs"]:
            size, seed = options.bytes, options.seed
            limit = machine_limit(versions["base"], size, seed, facts["codecs"], options.runs)
    best = {name: Best.of(of_one) for name, of_one in rounds.items()}
    promises = bars(best[ours.name], {r.name: best[r.name] for r in rival_list}, limit)
    contest_table(best, options.bytes, options.runs)
    if limit is not None:
        print(f"\n  hashing and coding alone, all cores: {limit:.2f} s")
    bars_table(promises)
    return {
        "bytes": options.bytes,
        "runs": options.runs,
        "best": {name: asdict(figures) for name, figures in best.items()},
        "rounds": {name: [asdict(r) for r in of_one] for name, of_one in rounds.items()},
        "facts": facts,
        "limit_seconds": limit,
        "bars": [bar.facts() for bar in promises],
    }


def _digests(folder: Path) -> dict[str, str]:
    """BLAKE3 of every file, so that the source can be removed before the export is compared."""
    out = {}
    for path in files_under(folder):
        hasher = blake3()
        for window in windows(path):
            hasher.update(window)
        out[str(path.relative_to(folder))] = hasher.hexdigest()
    return out


def memory_of(ours: Icefloe, size: int, seed: int, work: Path) -> dict[str, float]:
    """Peak memory of `add` and `export` for one size.

    The source is removed before the export: the largest image then needs 25 GB of disk, not 40.
    """
    source, store, out = work / "source", work / "store", work / "out"
    print(f"memory: an image of {size / GIB:g} GiB ...", file=sys.stderr)
    try:
        mixed(source, size, seed)
        added, _ = ours.ask(store, "add", source, "image")
        wanted = _digests(source)
        remove(source)
        exported, _ = ours.ask(store, "export", "image", out)
        if _digests(out) != wanted:
            raise BenchError(f"the export of {size} bytes differs from its source")
    finally:
        for folder in (source, store, out):
            remove(folder)
    return {
        "bytes": size,
        "add_seconds": added.seconds,
        "add_peak_bytes": added.peak_bytes,
        "export_seconds": exported.seconds,
        "export_peak_bytes": exported.peak_bytes,
    }


def run_memory(options: argparse.Namespace) -> list[dict[str, float]]:
    """Measure peak memory for every size up to the largest asked for; print; return JSON."""
    ours = Icefloe()
    sizes = [size for size in MEMORY_SIZES if size <= options.memory]
    with workplace(options.keep) as work:
        results = [memory_of(ours, size, options.seed, work) for size in sizes or [options.memory]]
    rows = [
        [
            f"{r['bytes'] / GIB:g} GiB",
            f"{r['add_seconds']:.1f}",
            human(r["add_peak_bytes"]),
            f"{r['export_seconds']:.1f}",
            human(r["export_peak_bytes"]),
        ]
        for r in results
    ]
    table("peak memory", ["image", "add s", "add peak", "export s", "export peak"], rows)
    return results


def main() -> int:
    parser = arguments(__doc__, "2g")
    parser.add_argument("--runs", type=int, default=3, help="rounds of everybody (default 3)")
    parser.add_argument(
        "--changed", action="store_true", help="also store a version with 5 %% of pages changed"
    )
    parser.add_argument(
        "--memory",
        type=lambda text: int(float(text) * GIB),
        metavar="GIB",
        help="measure peak memory instead, for images of 1, 4 and 16 GiB up to this size",
    )
    options = parser.parse_args()
    if options.runs < 1:
        parser.error("--runs takes 1 or more")
    if options.memory is not None:
        write_json(options.json, {"memory": run_memory(options)})
    else:
        try:
            write_json(options.json, {"ingest": run_contest(options)})
        except Unavailable as reason:
            print(f"ingest.py: skipped: {reason}", file=sys.stderr)
            write_json(options.json, {"skipped": str(reason)})
    return 0


if __name__ == "__main__":
    main_guard(main)
