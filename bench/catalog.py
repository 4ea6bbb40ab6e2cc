"""Does the catalog stay quick when it is large?

Fills a store with images of 30,000 blocks each, none shared, until it has `--blocks` of them, and
times every commit on the way: the cost must not grow with what is there. The blocks are 16 bytes
long, so that the figures are those of the catalog, journal and manifests and not of the disk; all
of it goes the way that `add` goes. Then, with the store full: looking up 30,000 ids that are there
and 30,000 that aren't, committing an image that shares all of its blocks, removing it, and
removing one whose blocks die with it.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from common import Bar, arguments, bars_table, main_guard, table, workplace, write_json

from icefloe.catalog import LocalStore, open_store
from icefloe.gc.removal import remove
from icefloe.ids import BlockId, IdPrefix, PackId, block_id
from icefloe.store import manifest as manifests
from icefloe.store.codecs import Codec, Encoder
from icefloe.store.manifest import BLOCK_DTYPE, EXTENT_DTYPE, FileKind, ImageFile, Manifest
from icefloe.store.pack import Kind, StoredBlock
from icefloe.store.writer import PackWriter

IMAGE_BLOCKS = 30_000
BLOCK_BYTES = 16

# A commit among the last may cost this much more than one among the first.
GROWTH_ALLOWED = 1.5


@dataclass(frozen=True)
class Packed:
    """An image whose packs are on the disk and whose commit is still to come."""

    id: BlockId
    packs: tuple[PackId, ...]
    blocks: tuple[BlockId, ...]


def encode_image(blocks: list[BlockId], label: str) -> bytes:
    """The manifest of an image of one file that consists of these blocks."""
    rows = np.zeros(len(blocks), BLOCK_DTYPE)
    rows["id"] = np.frombuffer(b"".join(blocks), "V32")
    rows["length"] = BLOCK_BYTES
    extents = np.zeros(len(blocks), EXTENT_DTYPE)
    extents["block"], extents["length"] = np.arange(len(blocks)), BLOCK_BYTES
    size = len(blocks) * BLOCK_BYTES
    file = ImageFile("pages-1.img", FileKind.REGULAR, 0o600, 0, 0, 0, size)
    bounds = np.array([0, len(blocks)], np.int64)
    return manifests.encode(Manifest((file,), bounds, rows, extents, {}, {"label": label}))


def write_packs(store: LocalStore, payloads: list[bytes], label: str) -> Packed:
    """Puts new blocks and the manifest that names them into packs."""
    blocks = [BlockId(blake3(payload).digest()) for payload in payloads]
    writer = PackWriter(store.layout)
    writer.append(
        [
            StoredBlock(identity, Kind.DATA, Codec.RAW, BLOCK_BYTES, payload)
            for identity, payload in zip(blocks, payloads, strict=True)
        ]
    )
    return finish(writer, blocks, label)


def finish(writer: PackWriter, blocks: list[BlockId], label: str) -> Packed:
    """Adds the manifest and waits for the disk."""
    encoded = encode_image(blocks, label)
    coded = Encoder("balanced").encode(memoryview(encoded))
    identity = block_id(encoded)
    writer.append([StoredBlock(identity, Kind.MANIFEST, coded.codec, len(encoded), coded.payload)])
    return Packed(identity, tuple(writer.finish()), tuple(blocks))


def commit(store: LocalStore, image: Packed, name: str) -> float:
    """Commits; returns the seconds that it took."""
    return timed(
        lambda: store.commit(
            "add",
            packs_added=image.packs,
            images_added=(image.id,),
            names={f"{name}:latest": image.id},
        )
    )


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def fill(store: LocalStore, images: int, seed: int) -> tuple[list[float], Packed]:
    """Commits that many images; returns the seconds of each commit, and the first image."""
    seconds: list[float] = []
    first: Packed | None = None
    for number in range(images):
        start = number * IMAGE_BLOCKS
        payloads = [b"%016x" % (seed << 40 | start + i) for i in range(IMAGE_BLOCKS)]
        image = write_packs(store, payloads, str(number))
        first = first or image
        seconds.append(commit(store, image, f"image-{number}"))
        if number % 20 == 0:
            print(f"  {start + IMAGE_BLOCKS:>10,} blocks, commit {seconds[-1]:.3f} s", flush=True)
    assert first is not None
    return seconds, first


def measure_full(store: LocalStore, first: Packed) -> dict[str, float]:
    """What one image costs while the store is full. Seconds."""
    blocks = list(first.blocks)
    absent = [BlockId(os.urandom(32)) for _ in blocks]
    shared = finish(PackWriter(store.layout), blocks, "shares everything")
    return {
        "look up 30,000 that are there": timed(lambda: store.catalog.known(blocks)),
        "look up 30,000 that aren't": timed(lambda: store.catalog.known(absent)),
        "commit an image that shares all": commit(store, shared, "shared"),
        "remove it": timed(lambda: remove(store, [IdPrefix(shared.id.hex())])),
        "remove one that shares nothing": timed(lambda: remove(store, [IdPrefix(first.id.hex())])),
    }


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Fills, measures, closes and opens again."""
    images = max(10, options.blocks // IMAGE_BLOCKS)
    with open_store(folder / "store", write=True, create=True) as store:
        commits, first = fill(store, images, options.seed)
        full = measure_full(store, first)
    opened = timed(lambda: open_store(folder / "store", write=True).close())
    tenth = max(3, images // 10)
    early, late = float(np.median(commits[:tenth])), float(np.median(commits[-tenth:]))
    catalog = sum(path.stat().st_size for path in (folder / "store" / "catalog").iterdir())
    return {
        "blocks": images * IMAGE_BLOCKS,
        "images": images,
        "seconds": {
            "commit of 30,000 blocks, first tenth": early,
            "commit of 30,000 blocks, last tenth": late,
            "commit of 30,000 blocks, slowest": max(commits),
            **full,
            "open the full store": opened,
        },
        "growth": late / early,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "catalog_bytes": catalog,
    }


def main() -> int:
    """Parses, measures, prints."""
    parser = arguments(__doc__, "4k")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="default 10000000")
    options = parser.parse_args()
    with workplace(options.keep) as folder:
        results = run(folder, options)
    rows = [[what, f"{seconds:.3f}"] for what, seconds in results["seconds"].items()]
    title = f"{results['blocks']:,} blocks in {results['images']} images"
    table(title, ["what", "seconds"], rows)
    memory, catalog = results["peak_memory_bytes"], results["catalog_bytes"]
    print(f"\n  peak memory {memory / 1e6:.0f} MB, catalog on disk {catalog / 1e6:.0f} MB")
    bar = Bar("commit, last tenth / first tenth", results["growth"], GROWTH_ALLOWED, at_most=True)
    bars_table([bar])
    write_json(options.json, {**results, "bars": [bar.facts()]})
    return 0 if bar.reached else 1


if __name__ == "__main__":
    main_guard(main)
