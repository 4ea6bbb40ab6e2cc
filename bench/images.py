"""Makes the test images: folders that look like a CRIU checkpoint.

The same seed gives the same bytes, as long as the heaps read once from real processes stay in
`.cache/bench/heap`.

`mixed` is the standing test image: bf16 weights, zero pages and the heap of a real process, in
interleaved memory regions. The other functions make the next version of an image out of one.
All of them stream: none holds more than a few windows of 8 MiB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import (
    BENCH_CACHE,
    MIB,
    PAGE,
    WINDOW,
    BenchError,
    arguments,
    human,
    main_guard,
    table,
    tree_bytes,
)

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

WEIGHTS, ZERO, HEAP = "weights", "zero", "heap"
SHARES = {WEIGHTS: 0.4, ZERO: 0.2, HEAP: 0.4}

# Memory regions of real processes: from a small arena to a large tensor (64 KiB to 64 MiB).
SMALLEST_REGION = 16
LARGEST_REGION = 16 * 1024

# One pages-N.img per process of the tree; four, of quite different sizes.
FILE_SHARES = (0.1, 0.5, 0.15, 0.25)

# Heap is read from one process per part, and at most this many parts are kept (1 GiB).
PART_PAGES = 64 * 1024
MOST_PARTS = 4

# A file of at least this many pages gets insertions; anything smaller is metadata.
BIG_PAGES = 256

# What a process changes between two checkpoints comes in runs; their mean length in pages.
MEAN_RUN = 16


@dataclass(frozen=True)
class Region:
    """One memory region: its kind, its length in pages, and which region of its kind it is."""

    kind: str
    pages: int
    serial: int


def _sizes(rng: np.random.Generator, pages: int) -> list[int]:
    """Cut `pages` into region sizes, log-uniform, none above an eighth of the whole."""
    largest = min(LARGEST_REGION, max(SMALLEST_REGION + 1, pages // 8))
    sizes = []
    while pages:
        size = int(np.exp(rng.uniform(np.log(SMALLEST_REGION), np.log(largest))))
        sizes.append(min(size, pages))
        pages -= sizes[-1]
    return sizes


def plan(size: int, seed: int) -> list[list[Region]]:
    """Lay out an image of `size` bytes: for each pages file, its regions in order."""
    pages = size // PAGE
    counts = {kind: int(pages * share) for kind, share in SHARES.items()}
    counts[HEAP] += pages - sum(counts.values())
    rng = np.random.default_rng([seed, 0])
    regions = [
        Region(kind, length, serial)
        for kind, count in counts.items()
        for serial, length in enumerate(_sizes(rng, count))
    ]
    order = [regions[i] for i in rng.permutation(len(regions))]
    ends = np.cumsum([region.pages for region in order])
    bounds = np.searchsorted(ends, pages * np.cumsum(FILE_SHARES[:-1]))
    starts = [0, *(int(bound) for bound in bounds)]
    stops = [*starts[1:], len(order)]
    return [order[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _fingerprints(pages: Bytes) -> Words:
    """One 64-bit sum per page, to find pages that occur twice (shape: pages by 4096 bytes)."""
    weights = np.random.default_rng(0).integers(0, 2**64, PAGE // 8, np.uint64) | np.uint64(1)
    sums: Words = pages.view(np.uint64) @ weights
    return sums


def _anonymous(pid: int) -> Iterator[tuple[int, int]]:
    """The private writable anonymous regions of a process, as address and length."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split()
        if fields[1] == "rw-p" and (len(fields) == 5 or fields[5] == "[heap]"):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            yield start, end - start


def _memory(pid: int) -> Iterator[Bytes]:
    """Read a process's anonymous memory in windows of pages."""
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for start, length in _anonymous(pid):
            for offset in range(0, length, WINDOW):
                piece = os.pread(memory.fileno(), min(WINDOW, length - offset), start + offset)
                yield np.frombuffer(piece, np.uint8).reshape(-1, PAGE)


def _harvest(seed: int, known: Words, out: Path) -> None:
    """Fill `out` with PART_PAGES pages of one process's heap, each unlike all other pages."""
    script = Path(__file__).with_name("heap.py")
    # A sixth more than needed: what repeats (the interpreter's own start, zero pages) drops out.
    size = PART_PAGES * PAGE * 7 // 6
    command = [sys.executable, str(script), "--bytes", str(size), "--seed", str(seed)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    missing = PART_PAGES
    try:
        assert child.stdout is not None
        if child.stdout.readline() != b"ready\n":
            raise BenchError(f"the heap process ended early: run {script} by hand")
        with out.open("wb") as file:
            for pages in _memory(child.pid):
                sums, first = np.unique(_fingerprints(pages), return_index=True)
                fresh = np.isin(sums, known, invert=True) & (sums != 0)
                chosen = np.sort(first[fresh])[:missing]
                file.write(pages[chosen])
                known = np.concatenate([known, sums[fresh]])
                missing -= len(chosen)
    finally:
        child.kill()
        child.communicate()
    if missing:
        raise BenchError(f"the heap process had {missing} pages too few: enlarge it in images.py")


class HeapPool:
    """Pages of real heaps as one long stream; every page of the stream is different.

    Up to MOST_PARTS parts come from processes (kept in the cache, about 6 s each to make). A
    longer stream goes through them again with a constant added to every byte, which makes new
    pages that compress as the old ones did.
    """

    def __init__(self, pages: int) -> None:
        folder = BENCH_CACHE / "heap"
        folder.mkdir(parents=True, exist_ok=True)
        self.parts: list[Bytes] = []
        for index in range(min(MOST_PARTS, -(-pages // PART_PAGES))):
            path = folder / f"part-{index}.pages"
            if not path.exists():
                self._make(index, path)
            self.parts.append(np.memmap(path, np.uint8, "r").reshape(-1, PAGE))

    def _make(self, index: int, path: Path) -> None:
        print(f"reading the heap of process {index + 1} (once) ...", file=sys.stderr)
        known = [_fingerprints(part) for part in self.parts]
        staging = path.with_suffix(".new")
        _harvest(1000 + index, np.concatenate([np.zeros(1, np.uint64), *known]), staging)
        staging.rename(path)

    def windows(self, start: int, pages: int) -> Iterator[Bytes]:
        """Yield pages `start` to `start + pages` of the stream, a window or less at a time."""
        while pages:
            part, offset = divmod(start, PART_PAGES)
            turn, part = divmod(part, len(self.parts))
            count = min(pages, PART_PAGES - offset, WINDOW // PAGE)
            window = self.parts[part][offset : offset + count]
            yield window + np.uint8(turn) if turn else window
            start, pages = start + count, pages - count


def _weight_windows(rng: np.random.Generator, pages: int) -> Iterator[Bytes]:
    """bf16 weights: a normal distribution of width 0.02, cut off after the upper 16 bits."""
    while pages:
        count = min(pages, WINDOW // PAGE)
        values = rng.standard_normal(count * PAGE // 2, np.float32)
        values *= np.float32(0.02)
        upper = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        yield upper.view(np.uint8)
        pages -= count


def _zero_windows(pages: int) -> Iterator[Bytes]:
    zeros = np.zeros(WINDOW, np.uint8)
    while pages:
        count = min(pages, WINDOW // PAGE)
        yield zeros[: count * PAGE]
        pages -= count


def _write_small_files(folder: Path, seed: int) -> None:
    """Write the few dozen metadata files of a process tree: 200 bytes to 20 KB, half text-like."""
    rng = np.random.default_rng([seed, 1])
    names = [f"{name}.img" for name in ("inventory", "pstree", "files", "seccomp", "timens-0")]
    for pid in range(1, len(FILE_SHARES) + 1):
        kinds = ("core", "mm", "pagemap", "ids", "fs", "fdinfo", "sigacts", "rlimit", "creds")
        names += [f"{kind}-{pid}.img" for kind in kinds]
    for name in names:
        size = int(np.exp(rng.uniform(np.log(200), np.log(20_000))))
        noise = rng.integers(0, 256, size, np.uint8)
        # Protobuf messages are mostly tags and small numbers: so are three bytes in four here.
        noise[rng.random(size) < 0.75] &= 0x0F
        (folder / name).write_bytes(noise.tobytes())


def mixed(path: Path, size: int, seed: int) -> None:
    """Make the folder `path` with an image of `size` bytes of pages and some small files."""
    path.mkdir(parents=True)
    layout = plan(size, seed)
    heap_pages = sum(r.pages for regions in layout for r in regions if r.kind == HEAP)
    pool, drawn = HeapPool(heap_pages), 0
    for number, regions in enumerate(layout, 1):
        with (path / f"pages-{number}.img").open("wb") as file:
            for region in regions:
                if region.kind == HEAP:
                    source, drawn = pool.windows(drawn, region.pages), drawn + region.pages
                elif region.kind == WEIGHTS:
                    rng = np.random.default_rng([seed, 2, region.serial])
                    source = _weight_windows(rng, region.pages)
                else:
                    source = _zero_windows(region.pages)
                file.writelines(window.data for window in source)
    _write_small_files(path, seed)


def random_pages(path: Path, size: int, seed: int) -> None:
    """Write one file of `size` random bytes: no page twice, nothing to compress."""
    rng = np.random.default_rng([seed, 3])
    with path.open("wb") as file:
        for offset in range(0, size, WINDOW):
            file.write(rng.bytes(min(WINDOW, size - offset)))


def _copy_with_pages(src: Path, dst: Path, inserts: dict[int, bytes]) -> None:
    """Copy a file with pages put in before the given page numbers of the source."""
    size = src.stat().st_size
    with src.open("rb", 0) as reader, dst.open("wb", 0) as writer:
        position = 0
        for page, data in [*sorted(inserts.items()), (size // PAGE, b"")]:
            while position < page * PAGE:
                wanted = page * PAGE - position
                copied = os.copy_file_range(reader.fileno(), writer.fileno(), wanted)
                if copied == 0:
                    raise BenchError(f"{src} became shorter while it was copied")
                position += copied
            writer.write(data)
        writer.write(os.pread(reader.fileno(), PAGE, position))


def _big_files(folder: Path) -> list[Path]:
    """The pages files worth changing, in name order."""
    pages = sorted(folder.glob("pages-*.img"))
    return [path for path in pages if path.stat().st_size >= BIG_PAGES * PAGE]


def with_insertions(src: Path, dst: Path, count: int = 7, seed: int = 1) -> None:
    """Copy an image with `count` new pages near the front and in the middle of each big file."""
    shutil.copytree(src, dst, ignore=shutil.ignore_patterns("pages-*.img"))
    rng = np.random.default_rng([seed, 4])
    big = _big_files(src)
    for path in sorted(src.glob("pages-*.img")):
        pages = path.stat().st_size // PAGE
        places = (min(100, pages // 8), pages // 2) if path in big else ()
        inserts = {place: rng.bytes(count * PAGE) for place in places}
        _copy_with_pages(path, dst / path.name, inserts)


def _change_runs(path: Path, fraction: float, rng: np.random.Generator) -> None:
    """Change about `fraction` of a file's pages in place, in runs, by adding to every byte."""
    pages = path.stat().st_size // PAGE
    runs = int(pages * fraction / MEAN_RUN)
    lengths = rng.geometric(1 / MEAN_RUN, runs)
    with path.open("r+b", 0) as file:
        for start, length in zip(rng.integers(0, pages, runs), lengths, strict=True):
            old = np.frombuffer(os.pread(file.fileno(), length * PAGE, start * PAGE), np.uint8)
            new = old + np.uint8(rng.integers(1, 256))
            os.pwrite(file.fileno(), new.data, start * PAGE)


def with_changes(
    src: Path, dst: Path, fraction: float = 0.05, insertions: int = 2, seed: int = 1
) -> None:
    """Copy an image with `fraction` of its pages changed in runs and pages inserted.

    Each of the `insertions` puts 7 pages somewhere in one of the big files, largest first.
    """
    shutil.copytree(src, dst, ignore=shutil.ignore_patterns("pages-*.img"))
    rng = np.random.default_rng([seed, 5])
    by_size = sorted(_big_files(src), key=lambda path: -path.stat().st_size)
    places: dict[str, dict[int, bytes]] = {path.name: {} for path in src.glob("pages-*.img")}
    for number in range(insertions if by_size else 0):
        path = by_size[number % len(by_size)]
        page = int(rng.integers(0, path.stat().st_size // PAGE))
        places[path.name][page] = rng.bytes(7 * PAGE)
    for name, inserts in sorted(places.items()):
        _copy_with_pages(src / name, dst / name, inserts)
        _change_runs(dst / name, fraction, rng)


def scatter_changes(folder: Path, fraction: float, rng: np.random.Generator) -> None:
    """Change `fraction` of an image's pages in place, single ones all over it, each word by one
    number of the page: what compressed well still does, and no two pages become the same."""
    for path in sorted(folder.glob("pages-*.img")):
        pages = path.stat().st_size // PAGE
        with path.open("r+b", 0) as file:
            for page in np.sort(rng.choice(pages, int(pages * fraction), replace=False)):
                old = np.frombuffer(os.pread(file.fileno(), PAGE, int(page) * PAGE), np.uint64)
                new = old + rng.integers(1, 1 << 64, dtype=np.uint64)
                os.pwrite(file.fileno(), new.data, int(page) * PAGE)


def insert_and_scatter(
    src: Path, dst: Path, inserted: int = 7, at_page: int = 100, scattered: int = 500, seed: int = 1
) -> None:
    """Copy one file with pages inserted at one place and single pages changed all over it."""
    rng = np.random.default_rng([seed, 6])
    _copy_with_pages(src, dst, {at_page: rng.bytes(inserted * PAGE)} if inserted else {})
    pages = dst.stat().st_size // PAGE
    with dst.open("r+b", 0) as file:
        for page in rng.choice(pages, scattered, replace=False):
            os.pwrite(file.fileno(), rng.bytes(PAGE), int(page) * PAGE)


def main() -> int:
    parser = arguments(__doc__, "128m")
    parser.add_argument("folder", type=Path, help="where to make base/, inserted/ and changed/")
    options = parser.parse_args()
    base = options.folder / "base"
    mixed(base, options.bytes, options.seed)
    with_insertions(base, options.folder / "inserted")
    with_changes(base, options.folder / "changed")
    rows = [[p.name, human(tree_bytes(p))] for p in sorted(options.folder.iterdir()) if p.is_dir()]
    table(f"images of {options.bytes // MIB} MiB", ["folder", "bytes"], rows)
    return 0


if __name__ == "__main__":
    main_guard(main)
