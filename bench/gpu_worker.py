"""The process that bench/gpu.py captures: an inference worker, as far as its memory goes.

Weights on the GPU, a key-value cache that is filled step by step, and a step loop. Every step is
a line of the log: number, a figure of the computation, the time. On SIGUSR1 it sums up all of its
GPU memory and says whether that is what it should be:

    step 12 0.4711 1764738000.123
    check 12 ok

    gpu_worker.py LOG WEIGHT_BYTES CACHE_BYTES SEED

All workers have the same weights, and the seed decides what they work on.
"""

import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch  # type: ignore[import-not-found,unused-ignore]

_SIDE = 4096
_STEP_VALUES = 1 << 16
_LAYERS = 64
_SUM_VALUES = 1 << 24
_PAUSE_SECONDS = 0.02


def total(tensor: "torch.Tensor") -> int:
    """All bits of a tensor count."""
    parts = tensor.view(torch.int16).flatten().split(_SUM_VALUES)  # sums need four times the memory
    return sum(int(part.sum(dtype=torch.int64)) for part in parts)


def main(log: Path, weight_bytes: int, cache_bytes: int, seed: int) -> None:
    """Runs until it is killed."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGUSR1, ask)
    torch.manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [
        torch.randn(_SIDE, _SIDE, **kind) * 0.02 for _ in range(weight_bytes // 2 // _SIDE**2)
    ]
    cache = torch.zeros(cache_bytes // 2, **kind)
    torch.manual_seed(seed)
    state = torch.randn(16, _SIDE, **kind)
    sums = [total(weight) for weight in weights]
    cached, step = 0, 0
    while True:
        y = state
        for weight in weights[:_LAYERS]:
            y = torch.nn.functional.rms_norm(y @ weight, (_SIDE,))
        at = step * _STEP_VALUES % (cache.numel() - _STEP_VALUES)
        part = cache[at : at + _STEP_VALUES]
        cached -= total(part)
        part += y.flatten()[:_STEP_VALUES] + step
        cached += total(part)
        figure = float(y.float().abs().sum())
        with log.open("a") as file:
            file.write(f"step {step} {figure:.4f} {time.time():.3f}\n")
            if asked:
                whole = [total(weight) for weight in weights] == sums and total(cache) == cached
                file.write(f"check {step} {'ok' if whole else 'DAMAGED'}\n")
                asked = False
        step += 1
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
