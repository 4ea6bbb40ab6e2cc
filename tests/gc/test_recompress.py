"""Blocks stored in a hurry are coded anew: smaller, never lost, never made whole when damaged."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import crashing
import pytest
import slow_chunker
import small_store
from small_store import KIB

from icefloe import durable
from icefloe.catalog import LocalStore, open_store
from icefloe.errors import CorruptBlock
from icefloe.gc import recompress as recompressing
from icefloe.gc.audit import check
from icefloe.gc.recompress import recompress, repack
from icefloe.gc.removal import remove
from icefloe.gc.sweep import GcOptions, collect
from icefloe.ids import BlockId, PackId, parse_reference
from icefloe.store import writer
from icefloe.store.codecs import Codec, Encoded, Encoder, as_it_is
from icefloe.store.pack import open_pack, read_index
from icefloe.store.policies import PolicyName
from icefloe.store.reader import BlockReader

# The noise fills packs, the text shrinks: four packs, and a small one.
TREE: small_store.Tree = {"core-1.img": b"small"}
for i in range(4):
    TREE[f"{i}/noise"] = slow_chunker.noise(120 * KIB, i)
    TREE[f"{i}/pages-1.img"] = small_store.text(600 * KIB, i)
NOISE: small_store.Tree = {"pages-1.img": slow_chunker.noise(512 * KIB, 9)}


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several packs an image."""
    monkeypatch.setattr(writer.PackWriter.__init__, "__defaults__", (160 * KIB,))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with one image, coded with lz4."""
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


def test_a_little_is_not_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text would shrink, but its pack is nearly all noise: nothing is even begun."""
    monkeypatch.setattr(writer.PackWriter.__init__, "__defaults__", (writer.TARGET_BYTES,))
    with open_store(tmp_path / "store", write=True, create=True) as store:
        tree = {**NOISE, "text": small_store.text(40 * KIB, 1)}
        small_store.add(store, tree, "noise", policy="fast")
        packs = packs_of(store)
        assert len(packs) == 1 and Codec.LZ4 in codecs_of(store)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "hook", lambda operation, path: pytest.fail(operation))
            assert recompress(store, packs, "balanced") == 0
        monkeypatch.setattr(recompressing, "_WORTH", 0.0001)
        assert recompress(store, packs, "balanced") > 0
        is_whole(store, tree)


def ids_in(store: LocalStore) -> dict[PackId, list[bytes]]:
    """The blocks of each pack, in the order in which they lie."""
    indexes = {pack: read_index(store.layout.pack(pack)) for pack in packs_of(store)}
    return {pack: [i.tobytes() for i in index["id"]] for pack, index in indexes.items()}


def test_blocks_keep_their_order(root: Path) -> None:
    """Neighbours are read in one go, so they stay neighbours."""
    with open_store(root, write=True) as store:
        before = ids_in(store)
        recompress(store, packs_of(store), "balanced", 4)
        after = ids_in(store)
    gone = [ids for pack, ids in before.items() if pack not in after]
    come = [ids for pack, ids in after.items() if pack not in before]
    assert len(gone) > 3 and sum(gone, []) == sum(come, [])


def test_open_packs_can_be_read_on(root: Path) -> None:
    """`restore --no-fill` reads without the lock, from packs that it has open."""
    with open_store(root, write=True) as store:
        old = packs_of(store)
        ids = [BlockId(i) for pack in ids_in(store).values() for i in pack]
        locations = store.catalog.locations(ids)
        pinned = {pack: open_pack(store.layout.pack(pack)) for pack in old}
        recompress(store, old, "balanced")
        assert not all(store.layout.pack(pack).exists() for pack in old)
        with BlockReader(store.layout, pinned) as reader:
            assert sum(1 for _ in reader.read(locations)) == len(ids)
        for fd in pinned.values():
            os.close(fd)


def unlinked_packs_open() -> int:
    """Packs without a name that this process has open: the disk doesn't get them back."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("/packs/" in link and link.endswith(" (deleted)") for link in links)


def test_the_disk_gets_old_packs_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next ones are written: a change needs the space of its own packs only."""
    monkeypatch.setattr(recompressing, "PACKS_AT_ONCE", 1)
    seen: list[int] = []

    def hook(operation: str, path: Path) -> None:
        if operation == "write" and path.parent.name == "staging":
            seen.append(unlinked_packs_open())

    with open_store(root, write=True) as store:
        monkeypatch.setattr(durable, "hook", hook)
        recompress(store, packs_of(store), "balanced", 2)
    assert len(seen) > 9 and not any(seen)


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


def test_what_would_grow_is_copied(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that the policy would store larger keeps its codec, in a pack that shrinks."""
    encode = Encoder.encode

    def half_hearted(self: Encoder, raw: memoryview) -> Encoded:
        return encode(self, raw) if len(raw) > 500 * KIB else as_it_is(raw)

    monkeypatch.setattr(Encoder, "encode", half_hearted)
    with open_store(root, write=True) as store:
        ids, before = store.catalog.all_blocks()
        assert recompress(store, packs_of(store), "balanced") > 0
        same, after = store.catalog.all_blocks()
        assert (same == ids).all() and (after["stored"] <= before["stored"]).all()
        moved = after["pack"] != before["pack"]
        assert {Codec.RAW, Codec.LZ4, Codec.ZSTD} == set(after["codec"][moved].tolist())
        is_whole(store, TREE)


def dead_since(store: LocalStore) -> dict[BlockId, float]:
    """When each dead block died."""
    dead = store.catalog.dead_blocks()
    return dict(zip(dead.ids, dead.since.tolist(), strict=True))


def test_dead_blocks_stay(root: Path) -> None:
    """Collecting is gc's affair, and it keeps a grace period."""
    with open_store(root, write=True) as store:
        small_store.add(
            store, {"pages-1.img": small_store.text(400 * KIB, 7)}, "gone", None, "fast"
        )
        remove(store, [parse_reference("gone")])
        dead = dead_since(store)
        assert dead
        recompress(store, packs_of(store), "balanced")
        assert dead_since(store) == dead
        assert all(store.catalog.known(list(dead)))
        is_whole(store, TREE)


def damage(path: Path) -> bytes:
    """Changes one bit of the last block; what the file holds then."""
    last = read_index(path)[-1]
    content = bytearray(path.read_bytes())
    content[int(last["offset"]) + int(last["stored"]) // 2] ^= 1
    path.write_bytes(content)
    return bytes(content)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("at_once", [1, 16])
def test_damage_is_not_made_whole(
    root: Path, number: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes before stay made. This one isn't, and what it published already is waste."""
    monkeypatch.setattr(recompressing, "PACKS_AT_ONCE", at_once)
    with open_store(root, write=True) as store:
        packs = packs_of(store)
        path = store.layout.pack(packs[number])
        content = damage(path)
        with pytest.raises(CorruptBlock):
            recompress(store, packs, "balanced")
        kept = packs[number:] if at_once == 1 else packs
        assert [pack for pack in packs_of(store) if pack in packs] == kept
        assert path.read_bytes() == content
        assert not any(store.layout.staging.iterdir())
        damaged = [p.kind for p in check(store, read_data=True).problems if not p.waste]
        assert damaged == ["data-damaged"]


# Recompresses copies of a store, killed at the first step, the second, and so on to the end. Never
# opens a store itself: a fork must not copy threads.
_KILLED = """
import os, shutil, signal, sys, traceback
from pathlib import Path
from icefloe import durable
from icefloe.catalog import open_store
from icefloe.gc import recompress
from icefloe.store import writer
root, copies = map(Path, sys.argv[1:])
recompress.PACKS_AT_ONCE = 2
writer.PackWriter.__init__.__defaults__ = (160 << 10,)

def run(copy, number):
    steps = []
    def hook(operation, path):
        if operation.endswith(" done"):
            return  # the disk is as it is before the next one
        steps.append(operation)
        if len(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    with open_store(copy, write=True) as store:
        durable.hook = hook
        packs = [row.id for row in store.catalog.packs()]
        recompress.recompress(store, packs, "balanced", 1)
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


@pytest.mark.parametrize("catalog", ["kept", "lost"])
def test_killed_at_every_step(root: Path, catalog: str) -> None:
    """In the first change and in those after it. Done once more, nothing shows."""
    with crashing.fast_folder() as copies:
        subprocess.run([sys.executable, "-c", _KILLED, root, copies], check=True, timeout=100)
        assert len(list(copies.iterdir())) > 40, "there are more steps than these"
        for copy in copies.iterdir():
            if catalog == "lost":
                shutil.rmtree(copy / "catalog")
            judge(copy)
            shutil.rmtree(copy)


def judge(root: Path) -> None:
    """Nothing is lost, and what the crash left behind goes."""
    with open_store(root, write=True) as store:
        problems = check(store, read_data=True).problems
        assert all(problem.waste for problem in problems), problems
        found = [small_store.exported(store, image.id) for image in store.catalog.images()]
        assert found == [TREE]
        recompress(store, packs_of(store), "balanced")
        assert Codec.LZ4 not in codecs_of(store)
        collect(store, GcOptions())
        is_whole(store, TREE)


def sizes_of(store: LocalStore) -> int:
    """Bytes of all packs."""
    return sum(row.bytes for row in store.catalog.packs())


def test_repacking_by_each_policy(root: Path) -> None:
    """There and back; what it frees is what the packs shrink by, less than nothing by `fast`."""
    with open_store(root, write=True) as store:
        first = sizes_of(store)
        seen: list[int] = []
        freed = repack(store, "balanced", 2, seen.append)
        assert freed == first - sizes_of(store) > 0 and sum(seen) == first
        assert codecs_of(store) == {Codec.RAW, Codec.ZSTD}
        is_whole(store, TREE)
        balanced = sizes_of(store)
        assert repack(store, "fast", 2, seen.append) == balanced - sizes_of(store) < 0
        assert codecs_of(store) == {Codec.RAW, Codec.LZ4}
        is_whole(store, TREE)
        repack(store, "small", 1, seen.append)
        assert sizes_of(store) <= balanced
        assert collect(store, GcOptions()).freed_bytes == 0
        is_whole(store, TREE)
        assert set(store.layout.published()) == set(packs_of(store))


@pytest.mark.parametrize("policy", ["fast", "balanced", "small"])
def test_repacking_again_changes_nothing(root: Path, policy: PolicyName) -> None:
    with open_store(root, write=True) as store:
        repack(store, policy, 2, lambda _: None)
        packs = packs_of(store)
        assert repack(store, policy, 2, lambda _: None) == 0
        assert packs_of(store) == packs


def test_repacking_stops_at_damage(root: Path) -> None:
    """And loses nothing of what was whole."""
    with open_store(root, write=True) as store:
        pack = packs_of(store)[1]
        where = read_index(store.layout.pack(pack))[0]
        with store.layout.pack(pack).open("r+b") as file:
            file.seek(int(where["offset"]) + int(where["stored"]) // 2)
            file.write(b"\xff" * 8)
        packs = packs_of(store)
        with pytest.raises(CorruptBlock):
            repack(store, "balanced", 2, lambda _: None)
        assert packs_of(store) == packs
        (problem,) = check(store, read_data=True).problems
        assert problem.kind == "data-damaged"
