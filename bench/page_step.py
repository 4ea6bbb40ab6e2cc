"""What comparing page by page with the parent saves, beside the rivals, and what it costs.

Saves: the test image with single pages changed all over it, stored after the unchanged one by
icefloe, restic, borg and casync. Costs: the time of `add` with a parent and with `--parent none`,
where the parent has nothing of the image and where it has nearly all of it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    Bar,
    Contestant,
    Icefloe,
    human,
    remove,
    same_trees,
    table,
    tree_bytes,
    warm,
)
from images import mixed, random_pages, scatter_changes, with_changes
from optimum import optimum
from restore import SHM
from rivals import rivals
from subjects import warm_memory

CHANGED = 0.05
INSERTIONS = 2
ROUNDS = 5

# Of what the best rival adds, icefloe adds at most this much.
OF_THE_BEST = 0.1
# `add` takes at most this many times as long as without the page step.
NOTHING_SIMILAR = 1.25
ALL_SIMILAR = 1.5


@dataclass(frozen=True)
class Growth:
    """How much a repository grew, and in which time, when the changed image came."""

    added_bytes: int
    seconds: float


def _growth(
    contestant: Contestant, names: Sequence[str], images: Sequence[Path], repo: Path
) -> Growth:
    """Store the unchanged image, then the changed one, into a new repository."""
    base, later = images
    contestant.prepare(repo)
    contestant.store(base, repo, names[0])
    before = contestant.stored_bytes(repo)
    os.sync()
    seconds = contestant.store(later, repo, names[1])
    return Growth(contestant.stored_bytes(repo) - before, seconds)


def against_rivals(
    ours: Icefloe, size: int, seed: int, work: Path
) -> tuple[dict[str, Any], list[Bar]]:
    """5 % of the pages and two insertions, beside everybody. Raises Unavailable."""
    field = rivals()
    base, later, repo, out = (work / name for name in ("base", "changed", "repo", "out"))
    mixed(base, size, seed)
    with_changes(base, later, 0.0, INSERTIONS, seed)
    scatter_changes(later, CHANGED, np.random.default_rng([seed, 8]))
    best = optimum(base, later, addresses=False).anywhere
    growths: dict[str, Growth] = {}
    for rival in field:
        print(f"{rival.name}, a changed image ...", file=sys.stderr)
        growths[rival.name] = _growth(rival, ("base", "changed"), (base, later), repo)
        remove(repo)
    # One name with two tags: the first image is the parent of the second.
    added = _growth(ours, ("image:base", "image:changed"), (base, later), repo)
    ours.restore(repo, "image:changed", out)
    same_trees(later, out)
    for folder in (repo, out, base, later):
        remove(folder)
    rows = [
        [name, human(growth.added_bytes), f"{growth.seconds:.1f}"]
        for name, growth in {ours.name: added, **growths}.items()
    ]
    title = f"{human(size)}, {CHANGED:.0%} of pages changed, {INSERTIONS} insertions"
    table(f"{title}; new pages, raw: {human(best)}", ["", "added", "s"], rows)
    least = min(growths, key=lambda name: growths[name].added_bytes)
    share = added.added_bytes / growths[least].added_bytes
    facts = {name: vars(growth) for name, growth in {ours.name: added, **growths}.items()}
    bars = [Bar(f"changed image: added, of what {least} adds", share, OF_THE_BEST, True)]
    return {"bytes": size, "optimum": best, "added": facts}, bars


def _copy_of_store(store: Path, copy: Path) -> None:
    """The same store again. Packs never change, so they may be the same files."""

    def one(source: str, target: str) -> None:
        (os.link if "packs" in Path(source).parts else shutil.copy2)(source, target)

    shutil.copytree(store, copy, copy_function=one)


def _seconds(ours: Icefloe, base: Path, later: Path) -> dict[str, float]:
    """Medians of `add` of `later`, with `base` as parent and without parent, in turns."""
    place = Path(tempfile.mkdtemp(prefix="icefloe-bench-", dir=SHM))  # a disk has moods
    store, copy = place / "store", place / "copy"
    ours.ask(store, "add", base, "image:base")
    found: dict[str, list[float]] = {"parent": [], "none": []}
    for number in range(ROUNDS + 1):  # the first one warms up
        for how in sorted(found, reverse=bool(number % 2)):
            times = found[how]
            _copy_of_store(store, copy)
            warm(later)
            os.sync()
            # A virtual machine takes its time for memory that was not in use just before.
            warm_memory(2 * tree_bytes(later))
            more = ["--parent", "none"] if how == "none" else []
            ran, _ = ours.ask(copy, "add", later, "image:later", *more)
            print(f"  {how}: {ran.seconds:.2f} s", file=sys.stderr)
            if number:
                times.append(ran.seconds)
            remove(copy)
    remove(place)
    return {how: median(times) for how, times in found.items()}


def speed(ours: Icefloe, size: int, seed: int, work: Path) -> tuple[dict[str, Any], list[Bar]]:
    """How long the page step takes, at its worst and at its usual."""
    base, other, similar = (work / name for name in ("base", "other", "similar"))
    for folder, its_seed in ((base, seed), (other, seed + 1)):
        folder.mkdir()
        random_pages(folder / "pages-1.img", size, its_seed)
    shutil.copytree(base, similar)
    scatter_changes(similar, CHANGED, np.random.default_rng([seed, 9]))
    cases = {
        "nothing similar": (other, NOTHING_SIMILAR),
        f"all similar but {CHANGED:.0%}": (similar, ALL_SIMILAR),
    }
    facts: dict[str, dict[str, float]] = {}
    bars: list[Bar] = []
    for case, (later, bound) in cases.items():
        facts[case] = _seconds(ours, base, later)
        times = facts[case]["parent"] / facts[case]["none"]
        bars.append(Bar(f"add, {case}: of the time without parent", times, bound, True))
    for folder in (base, other, similar):
        remove(folder)
    rows = [[case, f"{of['none']:.2f}", f"{of['parent']:.2f}"] for case, of in facts.items()]
    title = f"add of {human(size)} of random pages, medians of {ROUNDS}"
    table(title, ["", "--parent none s", "with parent s"], rows)
    return {"bytes": size, "seconds": facts}, bars
