"""How small does each codec make weights and heap, and how fast, on one core?

Blocks of 256 KiB: normally distributed weights as bf16, fp16 and fp32, and what a Python heap
looks like. Beside what `balanced` chooses: lz4, and zstd level 1. Then the policies, on the mixed
image that bench/images.py makes: what `auto` goes by. Every way runs in turns, and everything that
is decoded is compared. GB/s of raw bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import images
import lz4.block
import numpy as np
import zstandard
from common import Bar, BenchError, arguments, bars_table, main_guard, table, write_json

from icefloe.durable import Buffer
from icefloe.store.codecs import Codec, Decoder, Encoder
from icefloe.store.policies import POLICIES, PolicyName

BLOCK = 256 << 10
ROUNDS = 7

Coded = Sequence[tuple[int, Buffer]]
Decoded = Sequence[Buffer]
Maker = Callable[[list[bytes]], tuple[Callable[[], Coded], Callable[[Coded], Decoded]]]


def weights(blocks: int, seed: int) -> dict[str, list[bytes]]:
    """Blocks of numbers with a standard deviation of 0.02."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(blocks * BLOCK // 2, np.float32) * np.float32(0.02)
    kinds = {
        "bf16": (numbers.view(np.uint32) >> 16).astype(np.uint16),
        "fp16": numbers.astype(np.float16),
        "fp32": numbers[: blocks * BLOCK // 4],
    }
    return {kind: cut(content.tobytes()) for kind, content in kinds.items()}


def heap(blocks: int) -> list[bytes]:
    """Pointers, counts and text, as objects of an interpreter have them."""
    count = blocks * BLOCK // 64
    rows = np.zeros((count, 8), np.uint64)
    rows[:, 0] = np.arange(count) % 7 + 1
    rows[:, 1] = 0x7F00_0000_0000 + np.arange(count) % 31 * 416
    rows[:, 2] = 0x7F12_3400_0000 + np.arange(count) * 64
    text = b"".join(b"%-32d" % (i * 2654435761 % (1 << 32)) for i in range(count))
    rows[:, 4:] = np.frombuffer(text, np.uint64).reshape(-1, 4)
    return cut(rows.tobytes())


def cut(content: bytes) -> list[bytes]:
    """Blocks of a size."""
    return [content[i : i + BLOCK] for i in range(0, len(content), BLOCK)]


def image(size: int, seed: int) -> list[bytes]:
    """Blocks of what a process may hold; zero ones are never coded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image"
        images.mixed(path, size, seed)
        content = b"".join(file.read_bytes() for file in sorted(path.rglob("pages-*.img")))
    return [block for block in cut(content) if len(block) == BLOCK and any(block)]


def by_policy(
    policy: PolicyName, blocks: list[bytes]
) -> tuple[Callable[[], Coded], Callable[[Coded], Decoded]]:
    """What a policy does."""
    encoder, decoder = Encoder(policy), Decoder()

    def encode() -> Coded:
        coded = [encoder.encode(memoryview(block)) for block in blocks]
        return [(each.codec, each.payload) for each in coded]

    def decode(coded: Coded) -> Decoded:
        codecs, payloads = zip(*coded, strict=True)
        return list(decoder.decode_all(codecs, payloads, [BLOCK] * len(codecs)))

    return encode, decode


def zstd_1(blocks: list[bytes]) -> tuple[Callable[[], Coded], Callable[[Coded], Decoded]]:
    """zstd level 1 for everything."""
    encoder, decoder = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return (
        lambda: [(Codec.ZSTD, encoder.compress(block)) for block in blocks],
        lambda coded: [decoder.decompress(payload) for _, payload in coded],
    )


def lz4_block(blocks: list[bytes]) -> tuple[Callable[[], Coded], Callable[[Coded], Decoded]]:
    """lz4 for everything."""
    return (
        lambda: [(Codec.LZ4, lz4.block.compress(block, store_size=False)) for block in blocks],
        lambda coded: [
            lz4.block.decompress(payload, uncompressed_size=BLOCK) for _, payload in coded
        ],
    )


WAYS: dict[str, Maker] = {
    "balanced": partial(by_policy, "balanced"),
    "zstd level 1": zstd_1,
    "lz4": lz4_block,
}
BY_POLICY: dict[str, Maker] = {name: partial(by_policy, name) for name in POLICIES}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def measure(blocks: list[bytes], makers: Mapping[str, Maker] = WAYS) -> dict[str, dict[str, Any]]:
    """Every way on the same blocks, in turns. Raises BenchError for wrong bytes."""
    ways = {name: make(blocks) for name, make in makers.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    found: dict[str, dict[str, Any]] = {}
    size = sum(map(len, blocks))
    for _ in range(ROUNDS):
        for name, (encode, decode) in ways.items():
            coding, coded = timed(encode)
            decoding, raws = timed(partial(decode, coded))
            if list(map(bytes, raws)) != blocks:
                raise BenchError(f"{name} does not give back what it got")
            seconds[name].append((coding, decoding))
            stored = sum(len(payload) for _, payload in coded)
            names = sorted({Codec(codec).name.lower() for codec, _ in coded})
            found[name] = {"ratio": stored / size, "codecs": names}
    for name, times in seconds.items():
        coding, decoding = (median(column) for column in zip(*times, strict=True))
        found[name] |= {"code": size / coding / 1e9, "decode": size / decoding / 1e9}
    return found


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every kind of content; prints the tables."""
    count = max(1, options.bytes // BLOCK)
    results = {
        kind: measure(blocks)
        for kind, blocks in (*weights(count, options.seed).items(), ("heap", heap(count)))
    }
    results["policies"] = measure(image(8 * options.bytes, options.seed), BY_POLICY)
    for kind, ways in results.items():
        rows = [
            [
                name,
                ", ".join(one["codecs"]),
                f"{one['ratio']:.3f}",
                f"{one['code']:.2f}",
                f"{one['decode']:.2f}",
            ]
            for name, one in ways.items()
        ]
        table(kind, ["way", "codec", "stored", "coding GB/s", "decoding GB/s"], rows)
    bars = [
        Bar("bf16: stored, of raw", results["bf16"]["balanced"]["ratio"], 0.68, True),
        Bar("fp32: stored, of raw", results["fp32"]["balanced"]["ratio"], 0.84, True),
    ]
    for kind in ("bf16", "fp16", "fp32"):
        ways = results[kind]
        for step in ("code", "decode"):
            times = ways["balanced"][step] / ways["zstd level 1"][step]
            bars.append(Bar(f"{kind}: {step}s so many times as fast as zstd 1", times, 1))
    bars_table(bars)
    return {**results, "bars": [bar.facts() for bar in bars]}


def main() -> int:
    options = arguments(__doc__, "16m").parse_args()
    write_json(options.json, {"codecs": run_all(options)})
    return 0


if __name__ == "__main__":
    main_guard(main)
