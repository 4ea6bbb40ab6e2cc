"""A process with a varied, growing Python heap, to be looked at from outside.

The image maker reads its memory, and the dedup benchmark checkpoints it with CRIU. It prints
`ready` once its resident memory has grown by the size asked for, then waits for its standard
input to close; with `--grow` it goes on growing and changing instead.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import time
from typing import Any

# From <sys/personality.h>: without address randomisation equal seeds give nearly equal heaps.
ADDR_NO_RANDOMIZE = 0x0040000

WORDS = (
    "attention cache token layer prompt batch sequence request response session tensor kernel "
    "schedule worker stream prefix decode sample logit embed index query answer context model "
    "latency budget replica shard router gateway tenant region bucket object commit branch"
).split()

# Between looks at the own size: about 4 MB of objects, so that the size is met closely.
RECORDS_PER_STEP = 2000


def _text(rng: random.Random, words: int) -> str:
    """A sentence that looks written, with some numbers in it."""
    return " ".join(rng.choices(WORDS, k=words)) + f" {rng.getrandbits(48):x}"


def _record(rng: random.Random, serial: int) -> dict[str, Any]:
    """One request as a serving process might hold it; half a dozen kinds of object."""
    return {
        "id": f"req-{serial:08d}-{rng.getrandbits(64):016x}",
        "tenant": rng.choice(WORDS) + "-" + rng.choice(WORDS),
        "arrived": 1.7e9 + rng.random() * 1e6,
        "prompt": _text(rng, rng.randrange(4, 40)),
        "tokens": [rng.randrange(128_000) for _ in range(rng.randrange(4, 24))],
        "scores": tuple(rng.random() for _ in range(rng.randrange(2, 12))),
        "flags": {"stream": rng.random() < 0.5, "priority": rng.randrange(5), "retry": None},
        "digest": rng.randbytes(20),
        "seen": {rng.choice(WORDS) for _ in range(3)},
    }


def _resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def grow(records: list[dict[str, Any]], rng: random.Random, size: int) -> None:
    """Add records until the resident memory has grown by `size` bytes."""
    goal = _resident() + size
    while _resident() < goal:
        start = len(records)
        records.extend(_record(rng, start + i) for i in range(RECORDS_PER_STEP))


def change(records: list[dict[str, Any]], rng: random.Random, count: int) -> None:
    """Give `count` records, picked anywhere, new scores and a new prompt."""
    for record in rng.choices(records, k=count):
        record["arrived"] = 1.8e9 + rng.random() * 1e6
        record["prompt"] = _text(rng, rng.randrange(4, 40))


def _same_addresses_every_time() -> None:
    """Start this program again without address randomisation, where the kernel allows it."""
    libc = ctypes.CDLL(None, use_errno=True)
    current = libc.personality(ctypes.c_ulong(0xFFFFFFFF))
    if current < 0 or current & ADDR_NO_RANDOMIZE:
        return
    if libc.personality(ctypes.c_ulong(current | ADDR_NO_RANDOMIZE)) >= 0:
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=64 << 20, help="heap to build")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grow", action="store_true", help="go on growing, 1 %% each second")
    options = parser.parse_args()
    _same_addresses_every_time()
    rng = random.Random(options.seed)
    records: list[dict[str, Any]] = []
    grow(records, rng, options.bytes)
    print("ready", flush=True)
    if not options.grow:
        sys.stdin.read()
        return 0
    while True:
        grow(records, rng, options.bytes // 100)
        change(records, rng, len(records) // 100)
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
