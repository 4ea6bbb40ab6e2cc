"""push and pull, killed at every step: what was there is whole, and the next one goes on.

The remote is a folder, so that its steps are counted like those of the store.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import crashing
import pytest
import small_store
from crashing import Loss, Scene, State
from remotes import opened
from slow_chunker import noise
from small_store import KIB, Tree

from icefloe.catalog import open_store
from icefloe.gc.audit import check
from icefloe.transfer.audit import check_remote

MOST_STEPS = 400

FIRST: Tree = {"pages-1.img": small_store.pages([noise(220 * KIB, 1)]), "core.img": b"c" * 9}
SECOND: Tree = {"pages-1.img": FIRST["pages-1.img"] + noise(100 * KIB, 2), "core.img": b"d" * 9}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A store with both images, one with the first, and a remote with the first."""

    full: Path
    part: Path
    remote: Path
    both: State


@pytest.fixture(scope="module")
def servers() -> Iterator[crashing.Servers]:
    with crashing.servers() as started:
        yield started


@pytest.fixture(scope="module")
def prepared(servers: crashing.Servers) -> Iterator[Prepared]:
    with crashing.fast_folder() as folder, servers.one() as server:
        for name, trees in (("full", (FIRST, SECOND)), ("part", (FIRST,))):
            with open_store(folder / name, write=True, create=True) as store:
                for i, tree in enumerate(trees, 1):
                    small_store.add(store, tree, f"w:{i}")
        assert server.run(folder / "full", ["push", "w:1", f"file://{folder}/remote"]) == 0
        both = crashing.read_state(folder / "full")
        yield Prepared(folder / "full", folder / "part", folder / "remote", both)


def is_whole(remote: Path) -> bool:
    """Every name of the remote leads to a whole image."""
    with opened(f"file://{remote}") as there:
        return check_remote(there, read_data=True).ok


def crash_everywhere(
    servers: crashing.Servers, prepared: Path, remote: Path, words: Sequence[str], both: State
) -> None:
    """Kills a command at each step, looks at the store and the remote, and runs it once more."""

    def one(kill_at: int) -> bool:
        with crashing.fast_folder() as folder, servers.one() as server:
            there = folder / "remote"
            shutil.copytree(remote, there)
            arguments = [*words, f"file://{there}"]
            scene = Scene(prepared, folder / "scene", server)
            crash = scene.crash(arguments, kill_at, Loss.NOTHING)
            assert is_whole(there), crash
            with open_store(scene.store, write=False) as store:
                assert check(store, read_data=True).ok, crash
            assert server.run(scene.store, arguments) == 0, crash
            assert is_whole(there), crash
            out = folder / "out"
            assert server.run(out, ["pull", "w:2", f"file://{there}"]) == 0, crash
            for root in (scene.store, out):
                state = crashing.read_state(root)
                image = state.names["w:2"]
                assert state.images[image] == both.images[image], crash
            return crash.killed

    # Each step is announced before and after it; after one is before the next.
    results = servers.pool.map(one, range(1, MOST_STEPS, 2))
    for killed in results:
        if not killed:
            break
    else:
        raise AssertionError("it never ends")


def test_push(servers: crashing.Servers, prepared: Prepared, tmp_path: Path) -> None:
    with opened(f"file://{prepared.remote}") as remote:
        assert set(remote.names()) == {"w:1"}
    remote_copy = tmp_path / "remote"
    shutil.copytree(prepared.remote, remote_copy)
    crash_everywhere(servers, prepared.full, remote_copy, ["push", "w:2"], prepared.both)


def test_pull(servers: crashing.Servers, prepared: Prepared, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    shutil.copytree(prepared.remote, remote)
    with servers.one() as server:
        assert server.run(prepared.full, ["push", "w:2", f"file://{remote}"]) == 0
    crash_everywhere(servers, prepared.part, remote, ["pull", "w:2"], prepared.both)
