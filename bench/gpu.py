"""What do a capture and a restore of a GPU worker cost?

For a machine with an NVIDIA GPU, PyTorch and cuda-bindings; as root. A worker holds weights and a
partly filled key-value cache on the GPU. CRIU's way and icefloe's way are measured in one run, on
the same processes: CRIU writes its images to tmpfs, and there icefloe's store lies as well. CUDA
is suspended and woken through the same calls for both. Everything that is captured or restored
checks all of its GPU memory before and after.

    bench/gpu.py --criu FOLDER --json gpu.json

FOLDER holds a private CRIU (as scripts/criu makes it), or is the program itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import (
    ROOT,
    Bar,
    BenchError,
    Unavailable,
    bars_table,
    human,
    machine,
    main_guard,
    parse_size,
    table,
    write_json,
)
from subjects import adopt_orphans, criu_program, reap, wait_for, warm_memory

WORKER = Path(__file__).with_name("gpu_worker.py")
SHM = Path("/dev/shm")

# What a PyTorch process needs of CRIU.
CRIU_OPTIONS = ("--tcp-established", "--ext-unix-sk", "--file-locks", "--link-remap")

STEPS_BETWEEN = 40

# Processes that touch memory side by side: one takes a minute for what a GPU worker needs.
WARM_PARTS = 8


@dataclass
class Worker:
    """A worker process, alive or not, and what it has written."""

    log: Path
    process: subprocess.Popen[bytes]
    captured_at: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def lines(self, kind: str) -> list[str]:
        """All lines of a kind so far."""
        with contextlib.suppress(FileNotFoundError):
            return [x for x in self.log.read_text().splitlines() if x.startswith(kind)]
        return []

    def wait_steps(self, count: int) -> None:
        """Until it has made so many more."""
        goal = len(self.lines("step")) + count
        wait_for(lambda: len(self.lines("step")) >= goal, f"{count} steps of the worker")

    def verify(self) -> None:
        """Has it check its GPU memory. Raises BenchError when it is not what it should be."""
        before = len(self.lines("check"))
        os.kill(self.pid, signal.SIGUSR1)
        wait_for(lambda: len(self.lines("check")) > before, "a check of the GPU memory")
        if not self.lines("check")[-1].endswith(" ok"):
            raise BenchError(f"the worker found its memory damaged: {self.lines('check')[-1]}")


@contextlib.contextmanager
def working(folder: Path, name: str, options: argparse.Namespace, seed: int) -> Iterator[Worker]:
    """A worker that makes steps."""
    log = folder / f"{name}.log"
    command = [sys.executable, WORKER, log, options.weights, options.cache, seed]
    with (folder / f"{name}.err").open("wb") as errors:
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
    worker = Worker(log, process)
    try:
        worker.wait_steps(20)
        yield worker
    finally:
        reap(process.pid)


def icefloe(store: Path, *words: str | Path) -> dict[str, Any]:
    """Runs a command with --json; adds what the whole process took."""
    command = [sys.executable, "-m", "icefloe", "--store", str(store), *map(str, words), "--json"]
    command += ["--", *CRIU_OPTIONS] if words[0] in ("capture", "restore") else []
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wall = time.monotonic() - began
    if done.returncode:
        raise BenchError(f"`icefloe {words[0]}` failed: {done.stderr.strip()[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return {**answer, "wall": wall}


def captured(store: Path, name: str, worker: Worker, *more: str) -> dict[str, Any]:
    """`icefloe capture` of a worker; `steps` is how many it made since the one before."""
    steps = len(worker.lines("step"))
    answer = icefloe(store, "capture", name, "--pid", str(worker.pid), *more)
    answer["without_cuda"] = answer["frozen_seconds"] - answer["cuda_seconds"]
    answer["stored_share"] = answer["stored_bytes"] / answer["logical_bytes"]
    answer["steps"], worker.captured_at = steps - worker.captured_at, steps
    shown = {
        key: answer[key] for key in ("wall", "frozen_seconds", "logical_bytes", "stored_bytes")
    }
    print(f"  capture {name}: {shown | answer['frozen']}", file=sys.stderr, flush=True)
    return answer


def resident(pid: int) -> int:
    """Memory that a process holds, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Rival:
    """`criu dump` and `criu restore` in tmpfs, with CUDA suspended through icefloe's own calls."""

    images: Path
    cuda: Any

    def dump(self, worker: Worker) -> dict[str, Any]:
        """Checkpoints a worker, which ends."""
        from icefloe.capture import suspend

        began = time.monotonic()
        suspend.lock(self.cuda, [worker.pid])
        suspend.checkpoint(self.cuda, [worker.pid], 300)
        suspended = time.monotonic()
        self._criu("dump", "-t", str(worker.pid))
        dumped = time.monotonic()
        worker.process.wait()
        size = sum(path.stat().st_size for path in self.images.iterdir())
        found = {"cuda": suspended - began, "criu": dumped - suspended, "bytes": size}
        print(f"  criu dump: {found}", file=sys.stderr, flush=True)
        return found

    def restore(self, worker: Worker) -> dict[str, Any]:
        """Brings it back."""
        from icefloe.capture import suspend

        began = time.monotonic()
        steps = len(worker.lines("step"))
        self._criu("restore", "-d")
        restored = time.monotonic()
        suspend.resume(self.cuda, [worker.pid], 300)
        woken = time.monotonic()
        wait_for(lambda: len(worker.lines("step")) >= steps + 2, "two steps")
        found = {
            "criu": restored - began,
            "cuda": woken - restored,
            "second_step": time.monotonic() - began,
        }
        print(f"  criu restore: {found}", file=sys.stderr, flush=True)
        return found

    def _criu(self, *words: str) -> None:
        log = f"{words[0]}.log"
        command: list[str | Path] = [
            criu_program(),
            *words,
            "-D",
            self.images,
            "-o",
            log,
            *CRIU_OPTIONS,
        ]
        if subprocess.run(command).returncode:
            last = (self.images / log).read_text(errors="replace").splitlines()[-5:]
            raise BenchError(f"criu {words[0]} failed: {' / '.join(last)}")


def restored(store: Path, name: str, worker: Worker) -> dict[str, Any]:
    """`icefloe restore`, lazily, until the second step; then until its memory is complete."""
    steps = len(worker.lines("step"))
    command = [sys.executable, "-m", "icefloe", "--store", str(store), "restore", name, "--json"]
    began = time.monotonic()
    process = subprocess.Popen([*command, "--door", "lazy", "--", *CRIU_OPTIONS], stdout=-1)

    def stepped() -> bool:
        if process.poll():
            raise BenchError("icefloe restore failed")
        return len(worker.lines("step")) >= steps + 2

    wait_for(stepped, "two steps")
    second = time.monotonic() - began
    said, _ = process.communicate()
    if process.returncode:
        raise BenchError("icefloe restore failed")
    answer: dict[str, Any] = json.loads(said)
    before = answer["seconds_to_resume"] - answer["cuda_seconds"] - answer["criu_seconds"]
    answer |= {
        "second_step": second,
        "before_criu": before,
        "criu_and_fill": answer["filled_seconds"] - before,
        "wall": time.monotonic() - began,
    }
    shown = {key: answer[key] for key in ("second_step", "criu_and_fill", "cuda_seconds", "faults")}
    print(f"  icefloe restore: {shown}", file=sys.stderr, flush=True)
    return answer


def measure(
    options: argparse.Namespace, folder: Path, cuda: Any, found: dict[str, Any]
) -> dict[str, Any]:
    """The whole benchmark. What there is of it is in `found` should it end early."""
    store, images = folder / "store", folder / "images"
    images.mkdir()
    rival = Rival(images, cuda)
    found |= {"captures": {}, "criu_restores": [], "restores": []}
    captures = found["captures"]
    with working(folder, "one", options, 1) as worker:
        worker.verify()
        print(f"  a worker of {resident(worker.pid) / 1e9:.1f} GB runs", file=sys.stderr)
        warm_memory(options.warm, WARM_PARTS)
        captures["first"] = captured(store, "one:1", worker, "--leave-running")
        worker.verify()
        worker.wait_steps(STEPS_BETWEEN)
        warm_memory(options.warm, WARM_PARTS)
        captures["second"] = captured(store, "one:2", worker, "--leave-running")
        worker.verify()
        # While the first capture coded its blocks anew, the worker went on. Now it has few steps.
        worker.wait_steps(STEPS_BETWEEN)
        warm_memory(options.warm, WARM_PARTS)
        captures["third"] = captured(store, "one:3", worker, "--leave-running")
        worker.verify()
        # From here on the worker ends and comes back, turn by turn: from what CRIU dumps now, and
        # from the image of the third capture.
        warm_memory(options.warm, WARM_PARTS)
        found["criu_dump"] = rival.dump(worker)
        warm_memory(options.warm, WARM_PARTS)
        found["criu_restores"].append(rival.restore(worker))
        worker.verify()
        reap(worker.pid)
        for number in range(options.runs):
            warm_memory(options.warm, WARM_PARTS)
            found["restores"].append(restored(store, "one:3", worker))
            worker.verify()
            reap(worker.pid)
            if number == 0:
                with working(folder, "two", options, 2) as other:
                    other.verify()
                    captures["other worker, ended"] = captured(store, "two:1", other)
            if number + 1 < options.runs:
                warm_memory(options.warm, WARM_PARTS)
                found["criu_restores"].append(rival.restore(worker))
                worker.verify()
                reap(worker.pid)
    return found


def report(found: dict[str, Any]) -> list[Bar]:
    """Prints the tables; returns the promises."""
    dump, captures = found["criu_dump"], found["captures"]
    rows = [
        ["criu dump to tmpfs", f"{dump['cuda']:.2f}", f"{dump['criu']:.2f}", "-", "-", "-", "-"]
    ]
    for name, one in captures.items():
        rows.append(
            [
                f"icefloe, {name}",
                f"{one['frozen']['cuda_lock'] + one['frozen']['cuda_checkpoint']:.2f}",
                f"{one['without_cuda']:.2f}",
                f"{one['frozen']['cuda_resume']:.2f}",
                human(one["stored_bytes"]),
                f"{100 * one['stored_share']:.3f} %",
                f"{one['steps']}",
            ]
        )
    heads = [
        "capture",
        "CUDA suspend s",
        "without CUDA s",
        "CUDA wake s",
        "stored",
        "of the image",
        "steps",
    ]
    table(f"a worker of {human(dump['bytes'])}, standing still", heads, rows)
    eager = [one["second_step"] for one in found["criu_restores"]]
    lazy = [one["second_step"] for one in found["restores"]]
    rows = [
        [name, f"{min(times):.2f}", f"{median(times):.2f}", f"{min(eager) / min(times):.2f}"]
        for name, times in (("criu restore from tmpfs", eager), ("icefloe restore, lazy", lazy))
    ]
    heads = ["restore", "second GPU step s, best", "median", "times as soon"]
    table("until the second GPU step", heads, rows)
    keys = ("before_criu", "criu_seconds", "cuda_seconds", "criu_and_fill", "faults")
    rows = [[f"{one[key]:.3f}" for key in keys] for one in found["restores"]]
    table("where icefloe's time goes", keys, rows)
    first = max(one["without_cuda"] for one in captures.values())
    other = captures["other worker, ended"]["stored_share"]
    return [
        Bar("capture without CUDA, over criu dump", first / dump["criu"], 1, True),
        Bar("capture without CUDA, seconds", first, 5, True),
        Bar("stored by a second capture, %", 100 * captures["second"]["stored_share"], 0.5, True),
        Bar("stored by the third, %", 100 * captures["third"]["stored_share"], 0.05, True),
        Bar("stored for a 2nd worker, %", 100 * other, 2, True),
        Bar("second GPU step: times as soon as criu", min(eager) / min(lazy), 4),
        Bar("CRIU and fill, s", min(one["criu_and_fill"] for one in found["restores"]), 1.5, True),
    ]


def gpu_facts(cuda: Any) -> dict[str, Any]:
    """On what it was measured."""
    from icefloe.capture.facts import encode_cuda

    said = subprocess.run([criu_program(), "--version"], capture_output=True, text=True).stdout
    version = re.search(r"Version:\s*(\S+)", said)
    facts = {**encode_cuda(cuda.facts()), "criu": version[1] if version else "unknown"}
    return {**facts, **machine(), "node": platform.node()}


def open_cuda(program: Path | None) -> Any:
    """The driver. Raises Unavailable."""
    from icefloe.capture.cuda import Nvidia
    from icefloe.errors import CudaFailed

    if program is not None:
        named = program / "criu" if program.is_dir() else program
        os.environ["ICEFLOE_CAPTURE_CRIU"] = str(named)
    criu_program()
    try:
        return Nvidia()
    except CudaFailed as error:
        raise Unavailable(str(error)) from None


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as well")
    parser.add_argument("--keep", action="store_true", help="leave the work folder behind")
    parser.add_argument("--criu", type=Path, metavar="FOLDER", help="where a private CRIU is")
    parser.add_argument("--weights", type=parse_size, default=8 * 10**9, metavar="SIZE")
    parser.add_argument("--cache", type=parse_size, default=12 * 10**9, metavar="SIZE")
    parser.add_argument(
        "--warm",
        type=parse_size,
        metavar="SIZE",
        default=0,
        help="memory to touch right before each step that is measured (default: none)",
    )
    parser.add_argument("--runs", type=int, default=3, help="restores of each kind (default 3)")
    options = parser.parse_args(words)
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    sys.path.insert(0, str(ROOT / "src"))
    adopt_orphans()
    try:
        cuda = open_cuda(options.criu)
    except Unavailable as reason:
        print(f"gpu.py: skipped: {reason}", file=sys.stderr)
        write_json(options.json, {"skipped": str(reason)})
        return 0
    folder = Path(tempfile.mkdtemp(prefix="icefloe-gpu-", dir=SHM))
    found: dict[str, Any] = {}
    try:
        measure(options, folder, cuda, found)
    except BaseException:
        write_json(options.json, found)
        raise
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    bars = report(found)
    bars_table(bars)
    found |= {"on": gpu_facts(cuda), "bars": [bar.facts() for bar in bars]}
    found |= {"weights": options.weights, "cache": options.cache}
    write_json(options.json, found)
    return 0


if __name__ == "__main__":
    main_guard(main)
