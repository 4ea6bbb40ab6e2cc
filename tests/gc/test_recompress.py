"""Blocks stored in a hurry are coded anew: smaller, never lost, never made whole when damaged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_store
from small_store import KIB

from icefloe.catalog import LocalStore, open_store
from icefloe.errors import CorruptBlock
from icefloe.gc.audit import check
from icefloe.gc.recompress import recompress
from icefloe.gc.removal import remove
from icefloe.ids import PackId, parse_reference
from icefloe.store import writer
from icefloe.store.codecs import Codec

TREE = {
    "pages-1.img": small_store.pages([small_store.text(700 * KIB, 1), os.urandom(90 * KIB)]),
    "pages-2.img": small_store.text(300 * KIB, 2),
    "core-1.img": b"small",
}
NOISE = {"pages-1.img": os.urandom(512 * KIB)}


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several packs an image."""
    monkeypatch.setattr(writer.PackWriter.__init__, "__defaults__", (160 * KIB,))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with one image, coded with lz4, and a dead block or two."""
    root = tmp_path / "store"
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, TREE, "hasty", policy="fast")
    return root


def packs_of(store: LocalStore) -> list[PackId]:
    """All packs, in order."""
    return [row.id for row in store.catalog.packs()]


def codecs_of(store: LocalStore) -> set[int]:
    """The codecs of all blocks."""
    return set(store.catalog.all_blocks()[1]["codec"].tolist())


def is_whole(store: LocalStore, *trees: small_store.Tree) -> None:
    """The audit finds nothing, and every image exports exactly."""
    assert check(store, read_data=True).problems == ()
    found = [small_store.exported(store, image.id) for image in store.catalog.images()]
    assert sorted(map(sorted, found)) == sorted(map(sorted, trees))
    assert all(tree in found for tree in trees)


def test_smaller_and_the_same(root: Path) -> None:
    with open_store(root, write=True) as store:
        assert Codec.LZ4 in codecs_of(store)
        old = packs_of(store)
        before = sum(row.bytes for row in store.catalog.packs())
        freed = recompress(store, old, "balanced", 2)
        assert 0.1 * before < freed == before - sum(row.bytes for row in store.catalog.packs())
        assert Codec.LZ4 not in codecs_of(store)
        assert Codec.RAW in codecs_of(store)  # the noise
        is_whole(store, TREE)
        on_disk = set(store.layout.published())
        assert on_disk == set(packs_of(store))


def test_twice_does_nothing(root: Path) -> None:
    with open_store(root, write=True) as store:
        recompress(store, packs_of(store), "balanced")
        packs = packs_of(store)
        assert recompress(store, packs, "balanced") == 0
        assert packs_of(store) == packs


def test_what_does_not_shrink_stays(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", write=True, create=True) as store:
        small_store.add(store, NOISE, "noise", policy="fast")
        packs = packs_of(store)
        assert recompress(store, packs, "small") == 0
        assert packs_of(store) == packs
        assert not any(store.layout.staging.iterdir())


def test_other_packs_stay(root: Path) -> None:
    with open_store(root, write=True) as store:
        first, *others = packs_of(store)
        recompress(store, [first], "balanced")
        assert set(others) < set(packs_of(store))
        assert first not in packs_of(store)
        is_whole(store, TREE)


def test_zstd_is_copied(root: Path) -> None:
    """Only what was stored in a hurry is decoded; the rest keeps its bytes."""
    with open_store(root, write=True) as store:
        small_store.add(store, {"pages-1.img": small_store.text(90 * KIB, 5)}, "slow")
        ids, rows = store.catalog.all_blocks()
        zstd = {bytes(i): r["stored"] for i, r in zip(ids, rows, strict=True) if r["codec"] == 2}
        recompress(store, packs_of(store), "small")
        ids, rows = store.catalog.all_blocks()
        after = {bytes(i): r["stored"] for i, r in zip(ids, rows, strict=True)}
        assert zstd and all(after[i] == stored for i, stored in zstd.items())


def test_dead_blocks_stay(root: Path) -> None:
    """Collecting is gc's affair, and it keeps a grace period."""
    with open_store(root, write=True) as store:
        small_store.add(
            store, {"pages-1.img": small_store.text(400 * KIB, 7)}, "gone", None, "fast"
        )
        remove(store, [parse_reference("gone")])
        dead = set(store.catalog.dead_blocks().ids)
        assert dead
        recompress(store, packs_of(store), "balanced")
        assert set(store.catalog.dead_blocks().ids) == dead
        assert all(store.catalog.known(list(dead)))
        is_whole(store, TREE)


def test_damage_is_not_made_whole(root: Path) -> None:
    with open_store(root, write=True) as store:
        packs = packs_of(store)
        path = store.layout.pack(packs[0])
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.chmod(0o600)
        path.write_bytes(content)
        with pytest.raises(CorruptBlock):
            recompress(store, packs, "balanced")
        assert packs_of(store) == packs
        assert bytes(content) == path.read_bytes()
        assert not any(store.layout.staging.iterdir())


# Recompresses copies of a store, killed at the first step, the second, and so on to the end. Never
# opens a store itself: a fork must not copy threads.
_KILLED = """
import os, shutil, signal, sys, traceback
from pathlib import Path
from icefloe import durable
from icefloe.catalog import open_store
from icefloe.gc.recompress import recompress
from icefloe.store import writer
root, copies = map(Path, sys.argv[1:])
writer.PackWriter.__init__.__defaults__ = (160 << 10,)

def run(copy, number):
    steps = []
    def hook(operation, path):
        steps.append(operation)
        if len(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    with open_store(copy, write=True) as store:
        durable.hook = hook
        recompress(store, [row.id for row in store.catalog.packs()], "balanced", 1)
    os._exit(0)

number, status = 0, 9
while status == 9:
    number += 1
    shutil.copytree(root, copies / str(number))
    pid = os.fork()
    if not pid:
        try:
            run(copies / str(number), number)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_killed_at_every_step(root: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    subprocess.run([sys.executable, "-c", _KILLED, root, copies], check=True, timeout=100)
    assert len(list(copies.iterdir())) > 20, "there are more steps than these"
    for copy in copies.iterdir():
        with open_store(copy, write=True) as store:
            problems = check(store, read_data=True).problems
            assert all(problem.waste for problem in problems), problems
            found = [small_store.exported(store, image.id) for image in store.catalog.images()]
            assert found == [TREE]
