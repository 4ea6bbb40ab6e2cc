"""The field: restic, borg and casync from Debian bookworm, each behind one small interface.

They are unpacked into `.cache/rivals`, beside the system, by `scripts/private-packages`. Two
lines of reference come with them: `zstd -1 -T2` of a tar, and `cp -a`. Run as a script, this
stores and restores one small image with each and prints what that took.

Every rival keeps its cache inside the folder that it is given, so that nothing outlives a run
and no run profits from another.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import (
    CACHE,
    ROOT,
    BenchError,
    Contestant,
    Unavailable,
    arguments,
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

SUITE = "bookworm"
PACKAGES = ("restic", "borgbackup", "casync", "zstd")
PREFIX = CACHE / "rivals"
COMPLETE = PREFIX / ".complete"


def provision() -> Path:
    """Unpack the rivals if that was not done yet; return the prefix.

    Raises Unavailable with the tool's own words when the packages cannot be had.
    """
    if COMPLETE.exists():
        return PREFIX
    tool = ROOT / "scripts" / "private-packages"
    if not tool.exists():
        raise Unavailable(f"{tool} is missing, so restic, borg and casync cannot be had")
    print("unpacking restic, borg, casync and zstd (once) ...", file=sys.stderr)
    command = [sys.executable, str(tool), SUITE, str(PREFIX), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable((done.stderr.strip().splitlines() or ["private-packages failed"])[-1])
    COMPLETE.touch()
    return PREFIX


def _library_folders(prefix: Path) -> str:
    """Where the prefix keeps its libraries, for its own loader."""
    folders = [*prefix.glob("lib/*-linux-gnu"), *prefix.glob("usr/lib/*-linux-gnu")]
    return ":".join(str(folder) for folder in folders)


def unpacked(prefix: Path, program: str) -> list[str]:
    """Words that run a dynamically linked program of the prefix by the prefix's own loader.

    Its libc and the system's must not mix, and the environment stays clean for its children.
    """
    loaders = sorted(prefix.glob("lib*/ld-linux-*.so.*")) + sorted(prefix.glob("lib/*/ld-linux-*"))
    binary = prefix / "usr/bin" / program
    if not loaders or not binary.exists():
        raise Unavailable(f"{binary} is not there: remove {prefix} and run again")
    return [str(loaders[0]), "--library-path", _library_folders(prefix), str(binary)]


@dataclass(frozen=True)
class Restic:
    """restic, repository version 2 with its default compression, where the version has it."""

    program: Path
    name: str = "restic"

    def _run(self, repo: Path, *words: str | Path, cwd: Path | None = None) -> float:
        places = {
            "RESTIC_REPOSITORY": str(repo / "repo"),
            "RESTIC_CACHE_DIR": str(repo / "cache"),
            "RESTIC_PASSWORD": "benchmark",
        }
        return run([self.program, "--quiet", *words], cwd=cwd, env=places).seconds

    def prepare(self, repo: Path) -> None:
        repo.mkdir()
        try:
            self._run(repo, "init", "--repository-version", "2")
        except BenchError:  # before 0.14 there was version 1 alone, without compression
            self._run(repo, "init")

    def store(self, source: Path, repo: Path, name: str) -> float:
        return self._run(repo, "backup", "--tag", name, ".", cwd=source)

    def restore(self, repo: Path, name: str, out: Path) -> float:
        return self._run(repo, "restore", "latest", "--tag", name, "--target", out)

    def stored_bytes(self, repo: Path) -> int:
        return tree_bytes(repo / "repo")


@dataclass(frozen=True)
class Borg:
    """borg without encryption, `zstd,1`; `python` are the words that run its interpreter."""

    python: Sequence[str]
    prefix: Path
    name: str = "borg"

    def _run(self, repo: Path, *words: str | Path, cwd: Path | None = None) -> float:
        places = {
            "BORG_BASE_DIR": str(repo / "cache"),
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
            "BORG_RELOCATED_REPO_ACCESS_IS_OK": "yes",
            "PYTHONHOME": str(self.prefix / "usr"),
            "PYTHONPATH": str(self.prefix / "usr/lib/python3/dist-packages"),
        }
        command = [*self.python, "-s", self.prefix / "usr/bin/borg", *words]
        return run(command, cwd=cwd, env=places).seconds

    def prepare(self, repo: Path) -> None:
        repo.mkdir()
        self._run(repo, "init", "--encryption", "none", repo / "repo")

    def store(self, source: Path, repo: Path, name: str) -> float:
        archive = f"{repo / 'repo'}::{name}"
        return self._run(repo, "create", "--compression", "zstd,1", archive, ".", cwd=source)

    def restore(self, repo: Path, name: str, out: Path) -> float:
        out.mkdir()
        return self._run(repo, "extract", f"{repo / 'repo'}::{name}", cwd=out)

    def stored_bytes(self, repo: Path) -> int:
        return tree_bytes(repo / "repo")


@dataclass(frozen=True)
class Casync:
    """casync with a chunk store in the repository folder and its default compression."""

    command: Sequence[str]
    name: str = "casync"

    def _run(self, repo: Path, verb: str, *words: str | Path) -> float:
        store = f"--store={repo / 'chunks.castr'}"
        return run([*self.command, verb, store, *words]).seconds

    def prepare(self, repo: Path) -> None:
        repo.mkdir()

    def store(self, source: Path, repo: Path, name: str) -> float:
        return self._run(repo, "make", repo / f"{name}.caidx", source)

    def restore(self, repo: Path, name: str, out: Path) -> float:
        return self._run(repo, "extract", repo / f"{name}.caidx", out)

    def stored_bytes(self, repo: Path) -> int:
        return tree_bytes(repo)


@dataclass(frozen=True)
class ZstdTar:
    """A line of reference: a tar through `zstd -1 -T2`. It deduplicates nothing."""

    command: Sequence[str]
    name: str = "zstd -1 -T2"

    def prepare(self, repo: Path) -> None:
        repo.mkdir()

    def store(self, source: Path, repo: Path, name: str) -> float:
        zstd = shlex.join([*self.command, "-1", "-T2", "-q", "-o", str(repo / f"{name}.tar.zst")])
        return run(["sh", "-c", f"tar -cf - . | {zstd}"], cwd=source).seconds

    def restore(self, repo: Path, name: str, out: Path) -> float:
        out.mkdir()
        zstd = shlex.join([*self.command, "-dc", str(repo / f"{name}.tar.zst")])
        return run(["sh", "-c", f"{zstd} | tar -xf -"], cwd=out).seconds

    def stored_bytes(self, repo: Path) -> int:
        return tree_bytes(repo)


@dataclass(frozen=True)
class Copy:
    """A line of reference: `cp -a`, what the disk can do."""

    name: str = "cp -a"

    def prepare(self, repo: Path) -> None:
        repo.mkdir()

    def store(self, source: Path, repo: Path, name: str) -> float:
        return run(["cp", "-a", "--reflink=never", source, repo / name]).seconds

    def restore(self, repo: Path, name: str, out: Path) -> float:
        return run(["cp", "-a", "--reflink=never", repo / name, out]).seconds

    def stored_bytes(self, repo: Path) -> int:
        return tree_bytes(repo)


def _restic(prefix: Path) -> Contestant:
    return Restic(prefix / "usr/bin/restic")


def _borg(prefix: Path) -> Contestant:
    return Borg(unpacked(prefix, "python3.11"), prefix)


def _casync(prefix: Path) -> Contestant:
    return Casync(unpacked(prefix, "casync"))


def _zstd(prefix: Path) -> Contestant:
    return ZstdTar(unpacked(prefix, "zstd"))


RIVALS: dict[str, Callable[[Path], Contestant]] = {
    "restic": _restic,
    "borg": _borg,
    "casync": _casync,
}


def rivals() -> list[Contestant]:
    """The three rivals whose figures set the bars. Raises Unavailable."""
    prefix = provision()
    return [make(prefix) for make in RIVALS.values()]


def references() -> list[Contestant]:
    """The two lines of reference; `zstd` may be the system's own when there is no prefix."""
    try:
        zstd = _zstd(provision())
    except Unavailable:
        system = shutil.which("zstd")
        return [ZstdTar([system]), Copy()] if system else [Copy()]
    return [zstd, Copy()]


@dataclass(frozen=True)
class Round:
    """What one contestant needed, once: for each version its seconds and the bytes it added."""

    seconds: dict[str, float]
    added_bytes: dict[str, int]
    restore_seconds: float


def one_round(contestant: Contestant, versions: dict[str, Path], work: Path) -> Round:
    """Store the versions in order into a new repository and restore the first, compared after.

    Every timed step starts with a disk that has nothing left to write, so that nobody pays for
    the one before. Nothing but the processes themselves is inside the timing.
    """
    repo, out = work / "repo", work / "out"
    seconds, added, stored = {}, {}, 0
    try:
        contestant.prepare(repo)
        for name, folder in versions.items():
            os.sync()
            seconds[name] = contestant.store(folder, repo, name)
            before, stored = stored, contestant.stored_bytes(repo)
            added[name] = stored - before
        first = next(iter(versions))
        os.sync()
        restore = contestant.restore(repo, first, out)
        same_trees(versions[first], out)
    finally:
        remove(repo)
        remove(out)
    return Round(seconds, added, restore)


def main() -> int:
    parser = arguments(__doc__, "128m")
    options = parser.parse_args()
    with workplace(options.keep) as work:
        base, inserted = work / "base", work / "inserted"
        mixed(base, options.bytes, options.seed)
        with_insertions(base, inserted, seed=options.seed)
        warm(base, inserted)
        versions = {"base": base, "inserted": inserted}
        field = [*rivals(), *references()]
        rounds = {rival.name: one_round(rival, versions, work) for rival in field}
    rows = [
        [
            name,
            *(t for v in versions for t in (f"{r.seconds[v]:.2f}", human(r.added_bytes[v]))),
            f"{r.restore_seconds:.2f}",
        ]
        for name, r in rounds.items()
    ]
    heads = ["", "store s", "stored", "inserted s", "added", "restore s"]
    table(f"the field, an image of {human(options.bytes)}", heads, rows)
    write_json(options.json, {"rivals": {name: asdict(r) for name, r in rounds.items()}})
    return 0


if __name__ == "__main__":
    main_guard(main)
