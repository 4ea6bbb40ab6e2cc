"""Blocks stored in a hurry are coded anew: smaller, never lost, never made whole when damaged."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import small_store
from small_store import KIB

from icefloe import durable
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
        from icefloe.gc.removal import remove
        from icefloe.ids import parse_reference

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


def killed(root: Path, step: int) -> bool:
    """Recompresses in a child that kills itself at a step; whether it came so far."""
    child = os.fork()
    if not child:
        steps = 0

        def hook(operation: str, path: Path) -> None:
            nonlocal steps
            steps += 1
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            with open_store(root, write=True) as store:
                durable.hook = hook
                recompress(store, packs_of(store), "balanced", 1)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_killed_at_every_step(root: Path, tmp_path: Path) -> None:
    step = 1
    while True:
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(root, copy)
        came_so_far = killed(copy, step)
        with open_store(copy, write=True) as store:
            problems = check(store, read_data=True).problems
            assert all(problem.waste for problem in problems), problems
            found = [small_store.exported(store, image.id) for image in store.catalog.images()]
            assert found == [TREE]
        shutil.rmtree(copy)
        if not came_so_far:
            break
        step += 1
    assert step > 20, "there are more steps than these"
