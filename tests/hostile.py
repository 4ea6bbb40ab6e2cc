"""What tests of a hostile world share: commands as processes, small disks, a look afterwards.

See test_environment.py and test_environment_edges.py.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import small_store
from endings import Ended
from small_store import NOISE, Tree

from icefloe.capture.add import add_checkpoint, open_checkpoint
from icefloe.capture.ingest import IngestOptions
from icefloe.catalog import LocalStore, open_store
from icefloe.gc.audit import check
from icefloe.ids import parse_name

MIB = 1 << 20
IS_ROOT = os.geteuid() == 0

KEPT: Tree = {"pages-1.img": NOISE[0] + bytes(128 << 10) + NOISE[1], "core.img": b"core"}


def unconfigured() -> dict[str, str]:
    """An environment that configures nothing."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("ICEFLOE_")}
    return kept | {"XDG_CONFIG_HOME": "/nonexistent"}


def icefloe(store: Path, *arguments: str | Path, weak: bool = False) -> Ended:
    """Runs a command in a process of its own."""
    process = start(store, *arguments, weak=weak)
    out, err = process.communicate(timeout=60)
    return Ended(process.returncode, out, err)


def start(store: Path, *arguments: str | Path, weak: bool = False) -> "subprocess.Popen[str]":
    """Starts one; a `weak` one may read and write only what belongs to its user."""
    command = [sys.executable, "-m", "icefloe", "--store", str(store), *map(str, arguments)]
    if weak and IS_ROOT:
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv here")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    return subprocess.Popen(
        command,
        env=unconfigured(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def works(ended: Ended) -> Ended:
    """It ended well."""
    assert ended.code == 0, ended
    return ended


def is_whole(store: Path, images: dict[str, Tree], waste: bool = True) -> None:
    """These images are there, exactly and alone; waste is allowed where a command broke off."""
    with open_store(store, write=False) as opened:
        problems = check(opened, read_data=True).problems
        assert all(problem.waste and waste for problem in problems), problems
        names = opened.catalog.names()
        assert set(names) == {f"{name}:latest" for name in images}
        for name, tree in images.items():
            assert small_store.exported(opened, names[f"{name}:latest"]) == tree


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """A file system of its own for a test."""
    if not IS_ROOT:
        pytest.skip("mounting takes root")
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@contextmanager
def small_disk(place: Path, size: int = 8 * MIB) -> Iterator[Path]:
    """A disk that is soon full."""
    with mounted(place, "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as disk:
        yield disk


def eat(disk: Path) -> Path:
    """Takes all the space that is left."""
    hog = disk / "hog"
    with hog.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return hog


def add_one(store: LocalStore, root: Path, progress: Callable[[int], None]) -> None:
    """With one worker: windows are read in order."""
    options = IngestOptions("fast", workers=1)
    add_checkpoint(store, open_checkpoint(root), parse_name("big"), {}, options, progress)
