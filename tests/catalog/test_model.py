"""A store against a model of it: any order of commands, crashes and losses of the catalog.

The model knows which images there are, what they hold and which names point at them. After each
step everything else is computed from that and from the files on disk, and compared.
"""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import slow_chunker as slow
import small_store
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from small_store import KIB, Tree

from icefloe.catalog import LocalStore, open_store
from icefloe.gc.audit import check
from icefloe.gc.removal import remove
from icefloe.gc.sweep import REWRITE_WHEN_DEAD, GcOptions, collect
from icefloe.ids import BlockId, IdPrefix, parse_name
from icefloe.store.pack import read_index

# What pages files are made of. Each piece ends up as blocks of its own: a zero run cuts.
PIECES = [
    slow.noise(64 * KIB, 1),
    slow.noise(96 * KIB, 2),
    small_store.text(128 * KIB, 3),
    slow.noise(200 * KIB, 4) + small_store.text(300 * KIB, 5),
    small_store.text(1024 * KIB, 6),
]
GAP = bytes(64 * KIB)

HOUR = 3600.0

names = st.sampled_from(["a:latest", "a:b", "c:latest", "d/e:1"])
pieces = st.lists(st.integers(0, len(PIECES) - 1), max_size=4)


def tree_of(numbers: list[int], small: int) -> Tree:
    """A checkpoint with these pieces in one file, and a small file."""
    content = GAP.join(small_store.pages([PIECES[number]]) for number in numbers)
    return {"pages-1.img": content, "inventory.img": b"small %d" % small}


def used_blocks(store: LocalStore) -> dict[bytes, int]:
    """Each block that is in use, and how often."""
    ids, rows = store.catalog.all_blocks()
    padded = (identity.ljust(32, b"\0") for identity in ids.tolist())
    counts = zip(padded, rows["count"].tolist(), strict=True)
    return {identity: count for identity, count in counts if count}


class StoreModel(RuleBasedStateMachine):
    """Rules do what commands do; invariants compare."""

    images = Bundle("images")

    @initialize()
    def create(self) -> None:
        """An empty store."""
        self.folder = Path(tempfile.mkdtemp())
        self.root, self.earlier = self.folder / "store", self.folder / "earlier"
        self.trees: dict[BlockId, Tree] = {}
        self.names: dict[str, BlockId] = {}
        self.store = open_store(self.root, write=True, create=True)

    def teardown(self) -> None:
        """Closes and forgets it."""
        if hasattr(self, "folder"):
            self.store.close()
            shutil.rmtree(self.folder)

    # Commands

    @rule(target=images, numbers=pieces, small=st.integers(0, 1), name=names)
    def add(self, numbers: list[int], small: int, name: str) -> BlockId:
        """Stores a checkpoint, perhaps one that is or was there."""
        tree = tree_of(numbers, small)
        result = small_store.add(self.store, tree, name)
        before = self.names.get(name)
        assert result.replaced == (None if before == result.id else before)
        assert self.trees.get(result.id, tree) == tree
        self.trees[result.id], self.names[name] = tree, result.id
        return result.id

    @rule(image=images, name=names)
    def tag(self, image: BlockId, name: str) -> None:
        """Points a name at an image that is there."""
        if image in self.trees:
            self.store.commit("tag", names={name: image})
            self.names[name] = image

    @rule(data=st.data())
    @precondition(lambda self: self.names)
    def remove_names(self, data: st.DataObject) -> None:
        """Names go, and images with their last name."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.names)), min_size=1, max_size=3))
        targets = {self.names[name] for name in chosen}
        removal = remove(self.store, [parse_name(name) for name in chosen])
        for name in set(chosen):
            del self.names[name]
        gone = targets - set(self.names.values())
        for image in gone:
            del self.trees[image]
        assert set(removal.images) == gone and removal.names == tuple(sorted(set(chosen)))

    @rule(image=images, digits=st.sampled_from([8, 15, 64]))
    def remove_image(self, image: BlockId, digits: int) -> None:
        """An image goes with all its names, or without any."""
        if image in self.trees:
            removal = remove(self.store, [IdPrefix(image.hex()[:digits])])
            mine = sorted(name for name, target in self.names.items() if target == image)
            assert (removal.names, removal.images) == (tuple(mine), (image,))
            del self.trees[image]
            for name in mine:
                del self.names[name]

    @rule()
    def collect_all(self) -> None:
        """Without grace: what is left is needed, or lies in packs that mostly live."""
        before = self.disk_bytes()
        result = collect(self.store, GcOptions(grace_seconds=0.0))
        assert result.freed_bytes == before - self.disk_bytes()
        assert result.kept_by_grace == 0
        dead = self.store.catalog.dead_blocks()
        assert len(dead.ids) == result.kept_in_packs
        for pack in self.store.catalog.packs():
            wasted = int(dead.stored[dead.pack == pack.number].sum())
            assert pack.live > 0 and wasted < REWRITE_WHEN_DEAD * pack.bytes

    @rule()
    def collect_with_grace(self) -> None:
        """Nothing is that old."""
        ids = set(self.store.catalog.dead_blocks().ids)
        result = collect(self.store, GcOptions(grace_seconds=HOUR))
        assert set(self.store.catalog.dead_blocks().ids) == ids
        assert (result.blocks_removed, result.kept_by_grace) == (0, len(ids))

    # What happens to a store

    @rule()
    def reopen(self) -> None:
        """A new process."""
        before = used_blocks(self.store)
        self.store.close()
        self.store = open_store(self.root, write=True)
        assert self.store.lost == [] and used_blocks(self.store) == before

    @rule()
    def read_only(self) -> None:
        """A reader sees the same."""
        before = used_blocks(self.store)
        self.store.close()
        with open_store(self.root, write=False) as store:
            assert not store.writable and store.catalog.names() == self.names
            assert check(store, read_data=True).ok
        self.store = open_store(self.root, write=True)
        assert used_blocks(self.store) == before

    @rule()
    def lose_catalog(self) -> None:
        """The whole folder: packs and journal bring it back."""
        self.store.close()
        shutil.rmtree(self.root / "catalog")
        self.store = open_store(self.root, write=True)
        assert self.store.lost == []

    @rule()
    def keep_catalog(self) -> None:
        """Copies the catalog as it is on the disk now."""
        self.store.close()
        shutil.rmtree(self.earlier, ignore_errors=True)
        shutil.copytree(self.root / "catalog", self.earlier)
        self.store = open_store(self.root, write=True)

    @rule()
    @precondition(lambda self: self.earlier.exists())
    def fall_back(self) -> None:
        """A crash that loses all that the catalog learnt since: the journal tells it again."""
        self.store.close()
        shutil.rmtree(self.root / "catalog")
        shutil.copytree(self.earlier, self.root / "catalog")
        self.store = open_store(self.root, write=True)
        assert self.store.lost == []

    # What is always true

    @invariant()
    def all_is_well(self) -> None:
        """After each step; what is below, one after the other."""
        self.images_and_names()
        self.reference_counts()
        self.packs_and_bytes()
        assert check(self.store, read_data=False).problems == ()
        self.exports()
        self.could_be_rebuilt()

    def disk_bytes(self) -> int:
        """Bytes of all files under packs/ and staging/."""
        layout = self.store.layout
        folders = (layout.packs, layout.staging)
        return sum(p.stat().st_size for f in folders for p in f.rglob("*") if p.is_file())

    def images_and_names(self) -> None:
        """As the model has them."""
        catalog = self.store.catalog
        assert catalog.names() == self.names
        assert {image.id for image in catalog.images()} == set(self.trees)
        for row in catalog.images():
            sizes = sum(len(content) for content in self.trees[row.id].values())
            assert row.logical_bytes == sizes

    def reference_counts(self) -> None:
        """The count of a block is the number of images that mention it; dead is what none does."""
        expected: Counter[bytes] = Counter()
        for image in self.trees:
            expected.update({*self.store.manifest(image).block_ids(), image})
        assert used_blocks(self.store) == expected
        ids, _ = self.store.catalog.all_blocks()
        everything = {i.ljust(32, b"\0") for i in ids.tolist()}
        dead = everything - set(expected)
        assert set(self.store.catalog.dead_blocks().ids) == dead == self.store.catalog.tombstones()

    def packs_and_bytes(self) -> None:
        """Packs are those on disk; their totals add up; each live block is in one."""
        store, found = self.store, 0
        live: Counter[bytes] = Counter(used_blocks(self.store).keys())
        for pack in store.catalog.packs():
            path = store.layout.pack(pack.id)
            index = read_index(path)
            assert pack.bytes == path.stat().st_size
            mine = {row[0]: row[2] for row in index.tolist()}
            used = [i for i in mine if i in live]
            assert pack.live == sum(mine[i] for i in used)
            found += len(used)
        assert found == len(live)
        assert sum(pack.bytes for pack in store.catalog.packs()) == self.disk_bytes()

    def could_be_rebuilt(self) -> None:
        """Packs and journal alone give the same images, names and counts."""
        copy = self.folder / "copy"
        copy.mkdir()
        for name in ("format", "journal"):
            shutil.copy(self.root / name, copy)
        (copy / "packs").symlink_to(self.root / "packs")
        with open_store(copy, write=True) as store:
            assert store.lost == []
            assert store.catalog.names() == self.names
            assert used_blocks(store) == used_blocks(self.store)
            assert check(store, read_data=False).problems == ()
        shutil.rmtree(copy)

    def exports(self) -> None:
        """Each image, byte for byte."""
        for image, tree in self.trees.items():
            assert small_store.exported(self.store, image) == tree


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    # A failure is told as it was met: making it shorter takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
