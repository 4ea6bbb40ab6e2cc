"""How soon does a restored process run, and how soon is its memory complete?

A real process is checkpointed with CRIU into tmpfs and brought back through every door: by CRIU
itself, by CRIU's own lazy-pages, and by icefloe from its store. Everybody restores the same
checkpoint in the same run, in turns. Times count from the start of the command; first progress
is the first step that the restored process makes, after checking some of its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    BENCH_CACHE,
    Bar,
    BenchError,
    Icefloe,
    Unavailable,
    arguments,
    bars_table,
    human,
    main_guard,
    table,
    workplace,
    write_json,
)
from subjects import (
    RECORD_BYTES,
    adopt_orphans,
    criu_program,
    free_memory,
    reap,
    start_process,
    wait_for,
    warm_memory,
)

SHM = Path("/dev/shm")
RESTORE_SECONDS = 300.0
SAMPLE_SECONDS = 0.005
PLOT_POINTS = 200
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Measured:
    """One restore. Seconds from the start of the command; `filled` is None if it never was."""

    first: float
    filled: float | None
    facts: dict[str, Any] = field(default_factory=dict)
    resident: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of the process, as CRIU wrote it and in two stores."""

    pid: int
    record: Path
    images: Path
    stores: dict[str, Path]
    work: Path

    def wipe(self) -> None:
        """What the record holds afterwards was written by a restored process."""
        with self.record.open("r+b") as file:
            file.write(bytes(RECORD_BYTES))

    def steps(self) -> tuple[float, int] | None:
        """When the last step was made, and how many full checks; None before the first."""
        words = self.record.read_bytes().split()
        if len(words) != 4:
            return None
        if words[3] != b"ok":
            raise BenchError("the restored process found its memory damaged")
        return float(words[1]), int(words[2])


@contextlib.contextmanager
def checkpointed(size: int, seed: int, work: Path, policies: Sequence[str]) -> Iterator[Checkpoint]:
    """A process of this size, dumped into tmpfs and stored once with each policy."""
    criu = criu_program()
    record = work / "record"
    images = Path(tempfile.mkdtemp(prefix="icefloe-bench-", dir=SHM))
    process = start_process(record, size, seed)
    stores = {policy: work / f"store-{policy}" for policy in policies}
    made = Checkpoint(process.pid, record, images, stores, work)
    try:
        wait_for(lambda: made.steps() is not None, "the process to start")
        dump: list[str | Path] = [
            criu,
            "dump",
            "-t",
            str(process.pid),
            "-D",
            images,
            "-o",
            "dump.log",
        ]
        if subprocess.run(dump).returncode:
            raise BenchError(f"criu dump failed, see {images}/dump.log")
        process.wait()
        for policy, store in stores.items():
            os.environ["ICEFLOE_STORE_POLICY"] = policy
            Icefloe().ask(store, "add", images, "worker")
        yield made
    finally:
        reap(process.pid)
        shutil.rmtree(images, ignore_errors=True)


class Sampler:
    """Watches how much memory the restored process has, from its first page on."""

    def __init__(self, pid: int, started: float) -> None:
        self.samples: list[tuple[float, int]] = []
        self._pid, self._started = pid, started
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(SAMPLE_SECONDS):
            with contextlib.suppress(OSError, IndexError):
                pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
                self.samples.append((time.time() - self._started, pages * PAGE))

    def stop(self) -> list[tuple[float, int]]:
        """The samples, thinned."""
        self._ending.set()
        self._thread.join()
        step = max(1, len(self.samples) // PLOT_POINTS)
        return self.samples[::step] + self.samples[-1:]


def measure(made: Checkpoint, door: Callable[[Checkpoint, float], Measured]) -> Measured:
    """One restore through a door, watched until the process has checked all of its memory."""
    made.wipe()
    started = time.time()
    sampler = Sampler(made.pid, started)
    try:
        measured = door(made, started)
        checks = made.steps()
        assert checks is not None
        os.kill(made.pid, signal.SIGUSR1)
        wait_for(lambda: (made.steps() or checks)[1] > checks[1], "a full check of the memory")
    finally:
        measured_resident = sampler.stop()
        reap(made.pid)
    end = (measured.filled or measured.first) * 1.2
    measured.resident = [sample for sample in measured_resident if sample[0] <= end]
    return measured


def first_step(made: Checkpoint, started: float, process: subprocess.Popen[bytes]) -> float:
    """Waits for the first step after a restore. Raises BenchError when that fails."""

    def stepped() -> bool:
        # Looks without taking: whoever asks for the process's peak memory needs to wait for it.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_status:
            raise BenchError(f"`{process.args!r}` failed")
        return made.steps() is not None

    wait_for(stepped, "the first step")
    found = made.steps()
    assert found is not None
    # The record holds the last step; it was made at most a step before this look at it.
    return min(found[0], time.time()) - started


def criu_eager(made: Checkpoint, started: float) -> Measured:
    """`criu restore` from tmpfs: the rival."""
    command: list[str | Path] = [
        criu_program(),
        "restore",
        "-d",
        "-D",
        made.images,
        "-o",
        "restore.log",
    ]
    process = subprocess.Popen(command)
    first = first_step(made, started, process)
    process.wait()
    return Measured(first, time.time() - started)


def stock_lazy(made: Checkpoint, started: float, folder: Path, *more: str | Path) -> Measured:
    """`criu lazy-pages` and `criu restore --lazy-pages`."""
    criu = criu_program()
    place: list[str | Path] = ["-D", folder, "-W", folder]
    (folder / "lazy-pages.socket").unlink(missing_ok=True)
    lazy_pages: list[str | Path] = [criu, "lazy-pages", *place, "-o", "lazy.log", *more]
    daemon = subprocess.Popen(lazy_pages)
    try:
        wait_for((folder / "lazy-pages.socket").exists, "criu lazy-pages")
        restore: list[str | Path] = [
            criu,
            "restore",
            "--lazy-pages",
            "-d",
            *place,
            "-o",
            "restore.log",
        ]
        process = subprocess.Popen(restore)
        first = first_step(made, started, process)
        process.wait()
        if daemon.wait(RESTORE_SECONDS):
            raise BenchError(f"criu lazy-pages failed, see {folder}/lazy.log")
        return Measured(first, time.time() - started)
    finally:
        daemon.kill()
        daemon.wait()


def criu_lazy(made: Checkpoint, started: float) -> Measured:
    """CRIU's own lazy restore, from the same tmpfs."""
    return stock_lazy(made, started, made.images)


def icefloe_door(
    policy: str, *more: str, image: str = "worker"
) -> Callable[[Checkpoint, float], Measured]:
    """`icefloe restore` from a store with this policy."""

    def door(made: Checkpoint, started: float) -> Measured:
        command = [sys.executable, "-m", "icefloe", "--store", str(made.stores[policy])]
        command += ["restore", image, "--json", *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        first = first_step(made, started, process)
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise BenchError(f"`{' '.join(command)}` failed")
        facts = json.loads(said)
        facts["peak_bytes"] = used.ru_maxrss << 10
        return Measured(first, facts["filled_seconds"], facts)

    return door


def through_page_server(made: Checkpoint, started: float) -> Measured:
    """Stock `criu lazy-pages` against `icefloe page-server`, which is up already."""
    folder = Path(tempfile.mkdtemp(prefix="files-", dir=made.images.parent))
    command = [sys.executable, "-m", "icefloe", "--store", str(made.stores["balanced"])]
    command += ["page-server", "worker", "--listen", "127.0.0.1:0", "--files", str(folder / "f")]
    server = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        text = ""
        while True:
            text += server.stdout.readline()
            with contextlib.suppress(ValueError):
                host, _, port = json.loads(text)["listen"].rpartition(":")
                break
            if server.poll() is not None:
                raise BenchError("icefloe page-server ended")
        delay = time.time() - started
        more = ("--page-server", "--address", host, "--port", port)
        measured = stock_lazy(made, started + delay, folder / "f", *more)
        measured.resident = [(at - delay, size) for at, size in measured.resident]
        return measured
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


DOORS: dict[str, Callable[[Checkpoint, float], Measured]] = {
    "criu restore": criu_eager,
    "icefloe, zstd": icefloe_door("balanced", "--door", "lazy"),
    "icefloe, lz4": icefloe_door("fast", "--door", "lazy"),
    "icefloe --eager": icefloe_door("fast", "--eager"),
    "icefloe --stream": icefloe_door("fast", "--stream"),
    "criu lazy-pages": criu_lazy,
    "icefloe page-server": through_page_server,
}


def contest(made: Checkpoint, doors: Sequence[str], rounds: int) -> dict[str, list[Measured]]:
    """Restores through every door in turns; the first round warms up the machine's memory."""
    found: dict[str, list[Measured]] = {name: [] for name in doors}
    for number in range(rounds + 1):
        for name in doors:
            measured = measure(made, DOORS[name])
            filled = f"{measured.filled:.2f}" if measured.filled else "-"
            print(f"  {name}: first {measured.first:.3f} s, filled {filled} s", file=sys.stderr)
            if number:
                found[name].append(measured)
    return found


def best(runs: Sequence[Measured]) -> Measured:
    """The run with the earliest first progress, with the earliest filling of all."""
    one = min(runs, key=lambda run: run.first)
    filled = [run.filled for run in runs if run.filled is not None]
    return Measured(one.first, min(filled, default=None), one.facts, one.resident)


def plot(runs: dict[str, Measured], path: Path) -> None:
    """Memory of the process over time, a line for each door, as SVG."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (`make bench` does)", file=sys.stderr)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, run in runs.items():
        times, sizes = zip(*run.resident, strict=True)
        (line,) = axes.plot(times, [size / 1e9 for size in sizes], label=name)
        axes.plot([run.first], [0], marker="^", color=line.get_color(), clip_on=False)
    axes.set_xlabel("seconds since the command started (triangles: first progress)")
    axes.set_ylabel("memory of the process, GB")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"written: {path}", file=sys.stderr)


def split_table(runs: dict[str, Measured]) -> None:
    """Where the time of icefloe's own doors goes."""
    rows = []
    for name, run in runs.items():
        if not run.facts:
            continue
        facts = run.facts
        resumed, criu = facts["seconds_to_resume"], facts["criu_seconds"]
        rows.append(
            [
                name,
                f"{resumed - criu:.3f}",
                f"{criu:.3f}",
                f"{facts['filled_seconds'] - resumed:.3f}",
                str(facts["faults"]),
                str(facts["faults_avoided"]),
                f"{facts['stalled_seconds']:.3f}",
            ]
        )
    heads = ["door", "before CRIU s", "CRIU s", "filling after s", "faults", "avoided", "waited s"]
    table("where the time goes", heads, rows)


def run_doors(options: argparse.Namespace, work: Path) -> tuple[dict[str, Measured], list[Bar]]:
    """Every door at one size."""
    print(f"a process of {human(options.bytes)} ...", file=sys.stderr)
    with checkpointed(options.bytes, options.seed, work, ("balanced", "fast")) as made:
        rounds = contest(made, list(DOORS), options.runs)
    runs = {name: best(of_one) for name, of_one in rounds.items()}
    rival = runs["criu restore"]
    rows = [
        [
            name,
            f"{run.first:.3f}",
            f"{run.filled:.3f}" if run.filled else "-",
            f"{rival.first / run.first:.2f}",
        ]
        for name, run in runs.items()
    ]
    heads = ["door", "first progress s", "filled s", "times as soon as criu restore"]
    table(f"restore of {human(options.bytes)}", heads, rows)
    split_table(runs)
    ours, quick, stock = (
        runs[name] for name in ("icefloe, zstd", "icefloe, lz4", "icefloe page-server")
    )
    assert rival.filled and quick.filled and ours.filled and stock.filled
    bars = [
        Bar("first progress, zstd: times as soon as criu", rival.first / ours.first, 5),
        Bar("filled, lz4: times as soon as criu", rival.filled / quick.filled, 1),
        Bar("own door filled: times as soon as lazy-pages", stock.filled / ours.filled, 3),
    ]
    return runs, bars


def run_sizes(options: argparse.Namespace) -> tuple[dict[str, Any], list[Bar]]:
    """First progress of the lazy door for several sizes."""
    found: dict[int, Measured] = {}
    for size in options.sizes:
        with workplace(options.keep) as work:
            print(f"a process of {human(size)} ...", file=sys.stderr)
            with checkpointed(size, options.seed, work, ("balanced",)) as made:
                found[size] = best(contest(made, ["icefloe, zstd"], options.runs)["icefloe, zstd"])
    rows = [
        [human(size), f"{run.first:.3f}", f"{run.filled:.3f}", human(run.facts["peak_bytes"])]
        for size, run in found.items()
    ]
    table("lazily, by size", ["memory", "first progress s", "filled s", "icefloe's peak"], rows)
    first = [run.first for run in found.values()]
    bars = [Bar("first progress, slowest size over fastest", max(first) / min(first), 1.3, True)]
    return {str(size): facts_of(run) for size, run in found.items()}, bars


def facts_of(run: Measured) -> dict[str, Any]:
    """A run for the JSON document."""
    return {"first": run.first, "filled": run.filled, "facts": run.facts, "resident": run.resident}


def main() -> int:
    from common import parse_size

    parser = arguments(__doc__, "4g")
    parser.add_argument("--runs", type=int, default=3, help="rounds of everybody (default 3)")
    parser.add_argument(
        "--sizes",
        type=lambda text: [parse_size(one) for one in text.split(",") if one],
        default="1g,4g,8g",
        help="sizes for the question whether first progress depends on them; empty: not asked",
    )
    options = parser.parse_args()
    adopt_orphans()
    try:
        criu_program()
    except Unavailable as reason:
        print(f"restore.py: skipped: {reason}", file=sys.stderr)
        write_json(options.json, {"skipped": str(reason)})
        return 0
    warm_memory(free_memory())
    with workplace(options.keep) as work:
        doors, bars = run_doors(options, work)
    sizes: dict[str, Any] = {}
    if options.sizes:
        sizes, more = run_sizes(options)
        bars += more
    bars_table(bars)
    measured = {
        "bytes": options.bytes,
        "doors": {name: facts_of(run) for name, run in doors.items()},
        "sizes": sizes,
        "bars": [bar.facts() for bar in bars],
    }
    write_json(options.json, measured)
    # Last, as a child's peak memory starts at that of its parent, and drawing takes much.
    plot(doors, (options.json or BENCH_CACHE / "restore.json").with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    main_guard(main)
