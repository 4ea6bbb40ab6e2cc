"""What does it take to get a checkpoint into a bucket and out of it again, and to restore from it?

The same images go to the same S3 server, in turns, by icefloe, rclone and restic: a first version,
a second one with two insertions, and the first back into an empty place. Then a process is
restored out of the bucket over a link of 1 Gbit/s, lazily and by a pull first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    ROOT,
    Bar,
    BenchError,
    Icefloe,
    Unavailable,
    arguments,
    bars_table,
    human,
    main_guard,
    remove,
    run,
    same_trees,
    table,
    tree_bytes,
    warm,
    workplace,
    write_json,
)
from images import mixed, with_insertions
from subjects import (
    RECORD_BYTES,
    adopt_orphans,
    criu_program,
    reap,
    start_process,
    wait_for,
    warm_memory,
)

sys.path.append(str(ROOT / "tests" / "real"))

from s3_server import S3Server, Unusable, s3_server  # noqa: E402

RIVALS = CACHE / "rivals-s3"
SPACE = "icefloe-bench"
HERE, THERE = "10.213.57.1", "10.213.57.2"
PARTS = ("rivals", "lazy")


def rival(name: str) -> Path:
    """rclone or restic from Debian, unpacked beside the system. Raises Unavailable."""
    program = RIVALS / "usr/bin" / name
    if not program.exists():
        tool = ROOT / "scripts" / "private-packages"
        command = [sys.executable, str(tool), "bookworm", str(RIVALS), "rclone", "restic"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable((done.stderr.strip().splitlines() or ["private-packages failed"])[-1])
    return program


@dataclass
class Contest:
    """Seconds of each step, the best of the rounds, and what else is known of them."""

    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def took(self, who: str, step: str, seconds: float) -> None:
        mine = self.seconds.setdefault(who, {})
        mine[step] = min(seconds, mine.get(step, seconds))


def environment(server: S3Server) -> dict[str, str]:
    """How icefloe, rclone and restic find the server."""
    return {
        **server.environment(),
        "RCLONE_CONFIG": "/dev/null",
        "RCLONE_S3_PROVIDER": "Other",
        "RCLONE_S3_ENDPOINT": server.endpoint,
        "RCLONE_S3_ACCESS_KEY_ID": server.key,
        "RCLONE_S3_SECRET_ACCESS_KEY": server.secret,
        "RESTIC_PASSWORD": "benchmark",
    }


def contest(work: Path, server: S3Server, versions: Sequence[Path], rounds: int) -> Contest:
    """Everybody in turns; each round in a new bucket."""
    found = Contest()
    store, ice = work / "store", Icefloe()
    for i, version in enumerate(versions, 1):
        ran, _ = ice.ask(store, "add", version, f"worker:{i}")
        found.facts[f"add_{i}_seconds"] = ran.seconds
    for _ in range(rounds):
        warm(*versions, store)
        _icefloe(found, work, store, server, versions)
        _rclone(found, work, server, versions)
        _restic(found, work, server, versions)
    return found


def _icefloe(
    found: Contest, work: Path, store: Path, server: S3Server, versions: Sequence[Path]
) -> None:
    ice, url = Icefloe(), f"s3://{server.bucket()}/images"
    remove(store / "remotes")
    for i in (1, 2):
        ran, answer = ice.ask(store, "push", f"worker:{i}", url)
        found.took("icefloe", f"push {i}", ran.seconds)
        found.facts[f"push_{i}"] = answer
        found.facts[f"push_{i}_peak_bytes"] = ran.peak_bytes
    ran, answer = ice.ask(store, "push", "worker:2", url)
    found.facts["push_again"] = answer
    there = work / "there"
    ran, answer = ice.ask(there, "pull", "worker:1", url)
    found.took("icefloe", "pull 1", ran.seconds)
    found.facts["pull_1"] = answer
    found.facts["pull_1_peak_bytes"] = ran.peak_bytes
    ice.ask(there, "export", "worker:1", work / "out")
    same_trees(versions[0], work / "out")
    remove(there)
    remove(work / "out")


def _rclone(found: Contest, work: Path, server: S3Server, versions: Sequence[Path]) -> None:
    program, place = rival("rclone"), f":s3:{server.bucket()}/image"
    for i, version in enumerate(versions, 1):
        ran = run([program, "copy", version, place])
        found.took("rclone", f"push {i}", ran.seconds)
        if i == 1:
            ran = run([program, "copy", place, work / "out"])
            found.took("rclone", "pull 1", ran.seconds)
            remove(work / "out")


def _restic(found: Contest, work: Path, server: S3Server, versions: Sequence[Path]) -> None:
    program = rival("restic")
    places = {
        "RESTIC_REPOSITORY": f"s3:{server.endpoint}/{server.bucket()}/repo",
        "RESTIC_CACHE_DIR": str(work / "restic-cache"),
    }
    run([program, "--quiet", "init", "--repository-version", "2"], env=places)
    for i, version in enumerate(versions, 1):
        ran = run([program, "--quiet", "backup", "."], cwd=version, env=places)
        found.took("restic", f"push {i}", ran.seconds)
        if i == 1:
            remove(work / "restic-cache")
            words: list[str | Path] = ["restore", "latest", "--target", work / "out"]
            ran = run([program, "--quiet", *words], env=places)
            found.took("restic", "pull 1", ran.seconds)
            remove(work / "out")
    remove(work / "restic-cache")


@contextlib.contextmanager
def far_server(work: Path, rate: str) -> Iterator[S3Server]:
    """A server in a network namespace of its own, behind a link of this rate both ways."""

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"`ip {' '.join(words)}`: {done.stderr.strip()}")

    subprocess.run(["ip", "netns", "del", SPACE], capture_output=True, check=False)
    ip("netns", "add", SPACE)
    try:
        ip("link", "add", "ice-here", "type", "veth", "peer", "name", "ice-there", "netns", SPACE)
        ip("addr", "add", f"{HERE}/30", "dev", "ice-here")
        ip("link", "set", "ice-here", "up")
        ip("-n", SPACE, "addr", "add", f"{THERE}/30", "dev", "ice-there")
        ip("-n", SPACE, "link", "set", "ice-there", "up")
        ip("-n", SPACE, "link", "set", "lo", "up")
        with s3_server(work / "far", host=THERE, prefix=["ip", "netns", "exec", SPACE]) as server:
            slow = ["tbf", "rate", rate, "burst", "512kb", "latency", "50ms"]
            for before, device in (([], "ice-here"), (["-n", SPACE], "ice-there")):
                words = ["tc", *before, "qdisc", "add", "dev", device, "root", *slow]
                subprocess.run(words, check=True)
            yield server
    finally:
        subprocess.run(["ip", "netns", "del", SPACE], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", "ice-here"], capture_output=True, check=False)


@dataclass(frozen=True)
class Restored:
    """Seconds from the start of the command (or commands) to the first step that was made."""

    first: float
    answer: Mapping[str, Any]


def lazy(work: Path, size: int, seed: int, rounds: int) -> dict[str, Any]:
    """A process of this size, out of the bucket, lazily and by a pull first, in turns."""
    criu_program()
    adopt_orphans()
    ice, record, first = Icefloe(), work / "record", work / "first"
    process = start_process(record, size, seed)
    best: dict[str, Restored] = {}
    try:
        wait_for(lambda: record.read_bytes().split()[3:] == [b"ok"], "the process to start")
        ice.ask(first, "capture", "worker", "--pid", str(process.pid))
        process.wait()
        with far_server(work, "1gbit") as server:
            os.environ.update(server.environment())
            url = f"s3://{server.bucket()}/images"
            _, sent = ice.ask(first, "push", "worker", url)
            for _ in range(rounds):
                for way in ("lazy", "pull"):
                    warm_memory(size)
                    restored = _restore(work, record, url, process.pid, way)
                    reap(process.pid)
                    if way not in best or restored.first < best[way].first:
                        best[way] = restored
    finally:
        reap(process.pid)
    return {
        "stored_bytes": sent["new_bytes"],
        **{f"{way}_first_seconds": each.first for way, each in best.items()},
        **{f"{way}_answer": each.answer for way, each in best.items()},
    }


def _restore(work: Path, record: Path, url: str, pid: int, way: str) -> Restored:
    """One restore into an empty store."""
    with record.open("r+b") as file:
        file.write(bytes(RECORD_BYTES))
    ice, store = Icefloe(), work / f"store-{way}"
    started, ended = time.time(), threading.Event()
    steps: list[float] = []

    def watch() -> None:
        while not steps and not ended.wait(0.005):
            words = record.read_bytes().split()
            if len(words) == 4 and words[3] == b"ok":
                steps.append(float(words[1]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        if way == "lazy":
            _, answer = ice.ask(store, "restore", "worker", "--from", url)
        else:
            ice.ask(store, "pull", "worker", url)
            _, answer = ice.ask(store, "restore", "worker")
        wait_for(lambda: bool(steps), "the restored process to make a step")
    finally:
        ended.set()
        watcher.join()
    shutil.rmtree(store)
    return Restored(steps[0] - started, answer)


def bars_of(found: Contest) -> list[Bar]:
    """The promises of pushes and pulls."""
    ours, rclone, restic = (found.seconds[who] for who in ("icefloe", "rclone", "restic"))
    second, again = found.facts["push_2"], found.facts["push_again"]
    first = found.facts["push_1"]
    packs = -(-first["new_bytes"] // (64 << 20))
    return [
        Bar("first push: rclone's time / ours", rclone["push 1"] / ours["push 1"], 1),
        Bar("first push: restic's time / ours", restic["push 1"] / ours["push 1"], 2),
        Bar("insertions: rclone's time / ours", rclone["push 2"] / ours["push 2"], 5),
        Bar("insertions: restic's time / ours", restic["push 2"] / ours["push 2"], 5),
        Bar(
            "insertions: wire / stored new bytes",
            second["wire_bytes"] / second["new_bytes"],
            1.1,
            True,
        ),
        Bar("pull: rclone's time / ours", rclone["pull 1"] / ours["pull 1"], 1 / 1.1),
        Bar("pull: restic's time / ours", restic["pull 1"] / ours["pull 1"], 2),
        Bar("requests of the first push - 2N", first["requests"] - 2 * packs, 10, True),
        Bar("requests of a push of nothing", again["requests"], 10, True),
    ]


def contest_table(found: Contest) -> None:
    """Seconds, side by side."""
    steps = ("push 1", "push 2", "pull 1")
    rows = [[who, *(f"{took[s]:.2f} s" for s in steps)] for who, took in found.seconds.items()]
    heads = ["", "first push", "with insertions", "back, from nothing"]
    table("the same S3 server (icefloe: from and to its store)", heads, rows)
    first, second, came = (found.facts[key] for key in ("push_1", "push_2", "pull_1"))
    print(
        f"\n  add before it {found.facts['add_1_seconds']:.2f} s and "
        f"{found.facts['add_2_seconds']:.2f} s; on the wire {human(first['wire_bytes'])}, "
        f"{human(second['wire_bytes'])} and {human(came['wire_bytes'])}; requests "
        f"{first['requests']}, {second['requests']}, {came['requests']}; "
        f"peak {human(found.facts['push_1_peak_bytes'])}, "
        f"{human(found.facts['pull_1_peak_bytes'])}"
    )


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, "2g")
    parser.add_argument("--runs", type=int, default=2, help="rounds; the best counts (default 2)")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts alone")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    parts = options.only or PARTS
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    with workplace(options.keep) as work:
        if "rivals" in parts:
            versions = [work / "v1", work / "v2"]
            mixed(versions[0], options.bytes, options.seed)
            with_insertions(versions[0], versions[1], options.seed)
            try:
                with s3_server(work / "near") as server:
                    os.environ.pop("AWS_CA_BUNDLE", None)  # rclone can't work with it
                    os.environ.update(environment(server))
                    found = contest(work, server, versions, options.runs)
            except Unusable as reason:
                raise BenchError(str(reason)) from None
            contest_table(found)
            bars += bars_of(found)
            logical = tree_bytes(versions[0])
            results["rivals"] = {"bytes": logical, "seconds": found.seconds, **found.facts}
        if "lazy" in parts:
            measured = lazy(work, options.bytes, options.seed, options.runs)
            first = {way: measured[f"{way}_first_seconds"] for way in ("lazy", "pull")}
            rows = [[way, f"{seconds:.2f} s"] for way, seconds in first.items()]
            title = f"out of a bucket over 1 Gbit/s ({human(measured['stored_bytes'])})"
            table(title, ["", "first step"], rows)
            bars.append(Bar("first progress: pull first / lazy", first["pull"] / first["lazy"], 5))
            results["lazy"] = measured
    bars_table(bars)
    write_json(options.json, {**results, "bars": [bar.facts() for bar in bars]})
    return 0


if __name__ == "__main__":
    main_guard(main)
