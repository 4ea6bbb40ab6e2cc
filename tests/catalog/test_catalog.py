"""The catalog by example: counts, dead blocks, references, what recovery gives back, the lock."""

import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import small_store
from small_store import GONE, KIB, NOISE, Tree

from icefloe.catalog import LocalStore, open_store, tables
from icefloe.catalog.database import Database
from icefloe.catalog.lock import Lock
from icefloe.errors import (
    Corrupt,
    CorruptCatalog,
    IcefloeError,
    ImageNotFound,
    MissingPack,
    StoreBusy,
    StoreNotFound,
    UsageError,
)
from icefloe.gc.audit import check, repair
from icefloe.gc.removal import remove
from icefloe.gc.sweep import GcOptions, collect
from icefloe.ids import BlockId, IdPrefix, Name, PackId, parse_reference

SHARED: Tree = {"x.img": NOISE[0]}
ONE: Tree = {**SHARED, "y.img": NOISE[1]}
TWO: Tree = {**SHARED, "z.img": NOISE[2]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the store of a test is."""
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    """An empty store, open for writing."""
    with open_store(root, write=True, create=True) as opened:
        yield opened


def count_of(store: LocalStore, image: BlockId) -> list[int]:
    """The counts of an image's blocks, and of its manifest."""
    ids = [*store.manifest(image).block_ids(), image]
    return [int(count) for count in store.catalog.rows(ids)["count"]]


def pack_files(store: LocalStore) -> set[Path]:
    """Every file under packs/."""
    return {path for path in store.layout.packs.rglob("*") if path.is_file()}


# --- counts -------------------------------------------------------------------------------------


def test_counts_follow_images(store: LocalStore) -> None:
    """One for each image that mentions a block, however often; none for a second name."""
    one = small_store.add(store, ONE, "one")
    assert count_of(store, one.id) == [1, 1, 1]
    two = small_store.add(store, TWO, "two")
    assert (two.new_blocks, two.blocks) == (1, 2)
    assert count_of(store, one.id) == [2, 1, 1]
    again = small_store.add(store, ONE, "again")
    assert (again.id, again.new_blocks, again.stored_bytes) == (one.id, 0, 0)
    assert count_of(store, one.id) == [2, 1, 1]
    remove(store, [Name("one")])
    assert count_of(store, one.id) == [2, 1, 1]
    remove(store, [Name("again")])
    assert count_of(store, two.id) == [1, 1, 1]
    assert len(store.catalog.dead_blocks().ids) == 2


def test_a_block_named_twice_counts_once(store: LocalStore) -> None:
    """Two files with the same bytes."""
    image = small_store.add(store, {"a.img": NOISE[0], "b.img": NOISE[0]}, "a")
    assert count_of(store, image.id) == [1, 1]


def test_dead_blocks_come_back_to_life(store: LocalStore) -> None:
    """Adding what was removed writes nothing and clears the tombstones."""
    first = small_store.add(store, ONE, "one")
    remove(store, [Name("one")])
    assert store.catalog.image(first.id) is None and store.catalog.tombstones()
    second = small_store.add(store, ONE, "one")
    assert (second.id, second.stored_bytes, second.new_blocks) == (first.id, 0, 0)
    assert store.catalog.tombstones() == set()
    collect(store, GcOptions())
    assert small_store.exported(store, first.id) == ONE


def test_a_refused_change_changes_nothing(store: LocalStore) -> None:
    """A count below zero, a pack in use, an image without blocks: journal and catalog stay."""
    image = small_store.add(store, ONE, "one").id
    before = (store.journal.path.read_bytes(), store.catalog.names())
    packs = tuple(pack.id for pack in store.catalog.packs())
    with pytest.raises(Corrupt):
        store.commit("gc", packs_dropped=packs)
    with pytest.raises(Corrupt):
        store.commit("add", images_added=(BlockId(b"\1" * 32),))
    with pytest.raises(Corrupt):
        store.commit("add", packs_added=(PackId(b"\1" * 32),), images_added=(BlockId(b"\1" * 32),))
    assert (store.journal.path.read_bytes(), store.catalog.names()) == before
    assert check(store, read_data=True).problems == ()
    assert small_store.exported(store, image) == ONE


def test_a_failed_add_publishes_nothing(store: LocalStore, tmp_path: Path) -> None:
    """A checkpoint that changes while it is read: no image, no name, no line in the journal."""
    from icefloe.capture.add import add_checkpoint, open_checkpoint
    from icefloe.capture.ingest import IngestOptions
    from icefloe.errors import SourceChanged

    before = store.journal.path.read_bytes()
    small_store.write_tree(tmp_path / "tree", ONE)
    checkpoint = open_checkpoint(tmp_path / "tree")
    (tmp_path / "tree" / "y.img").write_bytes(NOISE[1] + b"more")
    with pytest.raises(SourceChanged):
        add_checkpoint(store, checkpoint, Name("one"), {}, IngestOptions())
    assert store.journal.path.read_bytes() == before and not store.catalog.names()
    assert not list(store.layout.staging.iterdir())
    assert check(store, read_data=True).ok


# --- references ---------------------------------------------------------------------------------


def test_names_and_prefixes(store: LocalStore) -> None:
    """A name, a name with a tag, an id, the first digits of an id, odd numbers of them too."""
    one = small_store.add(store, ONE, "one").id
    two = small_store.add(store, TWO, "two:tag").id
    digits = one.hex()
    for text in ("one", "one:latest", *(f"@{digits[:n]}" for n in (8, 9, 63, 64))):
        assert store.catalog.resolve(parse_reference(text)) == one
    assert store.catalog.resolve(parse_reference(f"@{digits.upper()[:12]}")) == one
    assert store.catalog.resolve(parse_reference("two:tag")) == two
    last = "0" if digits[-1] != "0" else "1"
    for text in ("two", "one:tag", "none", f"@{digits[:63]}{last}", "@" + "0" * 8, "@" + "f" * 64):
        with pytest.raises(ImageNotFound, match=text.partition(":")[0]):
            store.catalog.resolve(parse_reference(text))


def test_ambiguous_prefix(store: LocalStore) -> None:
    """Several images, one prefix: none of them is guessed."""
    small_store.add(store, ONE, "one")
    small_store.add(store, TWO, "two")
    ids = sorted(image.id.hex() for image in store.catalog.images())
    with pytest.raises(UsageError, match="means 2 images"):
        store.catalog.resolve(IdPrefix(""))
    for digits in ids:
        assert store.catalog.resolve(IdPrefix(digits[:8])).hex() == digits


def test_remove_is_all_or_nothing(store: LocalStore) -> None:
    """One unknown name, and the others stay too."""
    image = small_store.add(store, ONE, "one").id
    with pytest.raises(ImageNotFound):
        remove(store, [Name("one"), Name("none")])
    assert store.catalog.names() == {"one:latest": image}


def test_remove_takes_names_before_images(store: LocalStore) -> None:
    """By name as long as another name is left; by id at once; twice the same is once."""
    image = small_store.add(store, ONE, "one").id
    store.commit("tag", names={"two:latest": image, "three:latest": image})
    first = remove(store, [Name("one"), Name("one")])
    assert (first.names, first.images, first.freed_bytes) == (("one:latest",), (), 0)
    second = remove(store, [IdPrefix(image.hex()[:8]), Name("two")])
    assert second.names == ("three:latest", "two:latest") and second.images == (image,)
    assert second.freed_bytes == int(store.catalog.dead_blocks().stored.sum()) > 0
    assert not store.catalog.names()


# --- gc -----------------------------------------------------------------------------------------


def test_dry_run_changes_nothing_and_says_what_would_be(store: LocalStore) -> None:
    """The same numbers as the collection that follows."""
    small_store.add(store, ONE, "one")
    small_store.add(store, GONE, "gone")
    remove(store, [Name("gone")])
    before = pack_files(store)
    told = collect(store, GcOptions(dry_run=True))
    assert pack_files(store) == before
    done = collect(store, GcOptions())
    assert told == done and done.packs_removed == 1


def test_rewriting_keeps_what_lives(store: LocalStore) -> None:
    """Half of a pack is dead: it is copied, and the image that shared it still exports."""
    small_store.add(store, ONE, "one")
    two = small_store.add(store, TWO, "two").id
    remove(store, [Name("one")])
    result = collect(store, GcOptions())
    assert (result.packs_rewritten, result.packs_removed, result.blocks_removed) == (1, 0, 2)
    assert small_store.exported(store, two) == TWO
    assert check(store, read_data=True).problems == ()


def test_leftovers_go(store: LocalStore) -> None:
    """Unknown packs and unfinished files; whatever has another name stays."""
    image = small_store.add(store, ONE, "one").id
    (pack,) = store.layout.published()
    orphan = store.layout.pack(PackId(b"\xaa" * 32))
    orphan.parent.mkdir()
    shutil.copy(store.layout.pack(pack), orphan)
    (store.layout.staging / "123-abc").write_bytes(b"x" * 10)
    (orphan.parent / "README").write_text("mine")
    waste = check(store, read_data=True)
    assert waste.ok and {p.kind for p in waste.problems} == {"orphan-pack", "staging-leftover"}
    freed = collect(store, GcOptions()).freed_bytes
    assert freed == store.layout.pack(pack).stat().st_size + 10
    assert not orphan.exists() and (orphan.parent / "README").exists()
    assert check(store, read_data=True).problems == ()
    assert small_store.exported(store, image) == ONE


def test_traces_go_with_the_last_image_of_their_name(store: LocalStore) -> None:
    small_store.add(store, ONE, "one:a")
    small_store.add(store, TWO, "one:b")
    unnamed = small_store.add(store, SHARED, "two").id
    small_store.add(store, ONE, "two")
    lineages = ("one", unnamed.hex(), "gone")
    traces = [store.layout.trace(lineage) for lineage in lineages]
    store.layout.traces.mkdir()
    unfinished = store.layout.traces / f".{traces[0].name}.new"
    for path in (*traces, unfinished, store.layout.traces / "README"):
        path.write_bytes(b"x")

    def left() -> set[Path]:
        assert collect(store, GcOptions()).freed_bytes >= 1
        return set(store.layout.traces.iterdir()) - {store.layout.traces / "README"}

    assert left() == {traces[0], traces[1]}
    remove(store, [Name("one", "a")])
    unfinished.write_bytes(b"x")
    assert left() == {traces[0], traces[1]}
    remove(store, [Name("one", "b")])
    assert left() == {traces[1]}


def test_closing_waits_for_a_thread_at_work(tmp_path: Path) -> None:
    """As one is when a command is interrupted."""
    (tmp_path / "catalog").mkdir()
    for _ in range(3):
        database, asked = Database(tmp_path / "catalog", write=True), threading.Event()

        def work(database: Database = database, asked: threading.Event = asked) -> None:
            with suppress(IcefloeError):  # it is closed at last
                while True:
                    database.get_many(tables.BLOCKS, [bytes(32)] * 5000)
                    asked.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert asked.wait(20)
        database.close()
        thread.join(20)
        assert not thread.is_alive()


def test_gc_refuses_to_copy_damage(root: Path) -> None:
    """A damaged block that lives: an error, and everything is as before."""
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, ONE, "one")
        two = small_store.add(store, TWO, "two").id
        remove(store, [Name("one")])
        where = store.catalog.locations(store.manifest(two).block_ids())[0]
        path = store.layout.pack(where.pack)
        with path.open("r+b") as file:
            file.seek(where.offset + 100)
            file.write(b"\0\0")
        before = (store.journal.path.read_bytes(), pack_files(store))
        with pytest.raises(Corrupt):
            collect(store, GcOptions())
        assert (store.journal.path.read_bytes(), pack_files(store)) == before
        assert not list(store.layout.staging.iterdir())


# --- recovery -----------------------------------------------------------------------------------


def forget_catalog(root: Path) -> None:
    """As if its folder were lost."""
    shutil.rmtree(root / "catalog")


def assert_holds(root: Path, expected: dict[str, Tree]) -> None:
    """The store opens, is clean, and has exactly these names, byte for byte."""
    with open_store(root, write=True) as store:
        assert store.lost == []
        assert check(store, read_data=True).problems == ()
        names = store.catalog.names()
        assert names.keys() == expected.keys()
        for name, image in names.items():
            assert small_store.exported(store, image) == expected[name]


def test_catalog_lost_after_a_rewrite(root: Path) -> None:
    """An image shared blocks with one that is gone; `gc` has moved them to a new pack."""
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, ONE, "one")
        small_store.add(store, TWO, "two")
        remove(store, [Name("one")])
        assert collect(store, GcOptions()).packs_rewritten == 1
    forget_catalog(root)
    assert_holds(root, {"two:latest": TWO})


def test_catalog_lost_after_two_rewrites(root: Path) -> None:
    """The blocks have moved twice; names have moved and gone."""
    three: Tree = {**SHARED, "w.img": small_store.text(200 * KIB, 4)}
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, {**ONE, "more.img": small_store.text(300 * KIB, 7)}, "one")
        small_store.add(store, TWO, "two")
        small_store.add(store, three, "two:3")
        remove(store, [Name("one")])
        collect(store, GcOptions())
        remove(store, [Name("two")])
        small_store.add(store, GONE, "gone")
        collect(store, GcOptions())
        store.commit("tag", names={"two:latest": store.catalog.resolve(Name("two", "3"))})
        remove(store, [Name("gone")])
    forget_catalog(root)
    assert_holds(root, {"two:3": three, "two:latest": three})


def test_catalog_falls_back_to_before_a_rewrite(root: Path, tmp_path: Path) -> None:
    """It points into packs that are gone."""
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, ONE, "one")
        small_store.add(store, TWO, "two")
    shutil.copytree(root / "catalog", tmp_path / "earlier")
    with open_store(root, write=True) as store:
        remove(store, [Name("one")])
        collect(store, GcOptions())
    forget_catalog(root)
    shutil.copytree(tmp_path / "earlier", root / "catalog")
    assert_holds(root, {"two:latest": TWO})


def test_a_rebuild_keeps_the_grace_period(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What died a minute ago did so also for a catalog that is made anew."""
    clock = iter((1000.0, 2000.0, 90_000.0))
    monkeypatch.setattr("icefloe.catalog.local.time.time", lambda: next(clock))
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, ONE, "one")
        small_store.add(store, TWO, "two")
        remove(store, [parse_reference("one")])
        before = store.catalog.dead_blocks()
    shutil.rmtree(root / "catalog")
    with open_store(root, write=True) as store:
        after = store.catalog.dead_blocks()
        assert after.ids == before.ids and len(after.ids) > 0
        assert list(after.since) == [90_000.0] * len(after.ids)
        assert sorted(row.created for row in store.catalog.images()) == [2000.0]


def test_pack_removed_and_written_again(root: Path) -> None:
    """The same pack comes, goes and comes back: the journal names it three times."""
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, ONE, "one")
        remove(store, [Name("one")])
        assert collect(store, GcOptions()).packs_removed == 1
        small_store.add(store, ONE, "one")
    forget_catalog(root)
    assert_holds(root, {"one:latest": ONE})


def test_rebuilding_in_the_same_process(root: Path) -> None:
    """After a recovery that met packs which are gone: the old database must be closed for it."""
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, ONE, "one")
        remove(store, [Name("one")])
        collect(store, GcOptions())
        small_store.add(store, TWO, "two")
    forget_catalog(root)
    with open_store(root, write=True) as store:
        store.rebuild()
        assert store.catalog.names().keys() == {"two:latest"}
    with open_store(root, write=True) as store:
        store.rebuild()
    assert_holds(root, {"two:latest": TWO})


def test_closing_twice(root: Path) -> None:
    """An error in the middle of a rebuild must not be covered by one about closing."""
    store = open_store(root, write=True, create=True)
    store.catalog.close()
    store.catalog.close()
    store.close()


def test_a_lost_pack_loses_only_its_images(root: Path) -> None:
    """And says so, by name, each time until the images are removed."""
    with open_store(root, write=True, create=True) as store:
        one = small_store.add(store, ONE, "one").id
        small_store.add(store, GONE, "gone")
        lost = store.catalog.locations([one])[0].pack
    (root / "packs" / lost[:1].hex() / lost.hex()).unlink()
    with open_store(root, write=True) as store:
        gone = store.catalog.resolve(Name("gone"))
        assert not check(store, read_data=False).ok
        with pytest.raises(MissingPack):
            small_store.exported(store, one)
        assert small_store.exported(store, gone) == GONE
    forget_catalog(root)
    with open_store(root, write=True) as store:
        assert [item.image for item in store.lost] == [one]
        assert [p.kind for p in check(store, read_data=False).problems].count("image-lost") == 1
        assert small_store.exported(store, gone) == GONE


def test_adding_again_heals_a_lost_pack(root: Path) -> None:
    """What the error advises: fetch the image again. After a repair it must not be deduplicated
    against bytes that are gone."""
    with open_store(root, write=True, create=True) as store:
        one = small_store.add(store, ONE, "one").id
        lost = store.catalog.locations([one])[0].pack
    (root / "packs" / lost[:1].hex() / lost.hex()).unlink()
    with open_store(root, write=True, repair=True) as store:
        repair(store, check(store, read_data=False))
        assert small_store.add(store, ONE, "one").id == one
        assert small_store.exported(store, one) == ONE
    assert_holds(root, {"one:latest": ONE})


def spoil(store: LocalStore, image: BlockId) -> None:
    """Makes the count of an image's manifest and the name `one` wrong."""
    batch = store.catalog.database.batch()
    row = store.catalog.rows([image]).copy()
    row["count"] = 7
    batch.put(tables.BLOCKS, image, row.tobytes())
    batch.delete(tables.NAMES, b"one:latest")
    store.catalog.database.commit(batch, sync=True)


def test_repair_mends_a_wrong_catalog(root: Path) -> None:
    """Counts, names and totals that are wrong are computed anew."""
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, ONE, "one")
        image = small_store.add(store, TWO, "two").id
        spoil(store, image)
    with open_store(root, write=True) as store:
        audit = check(store, read_data=False)
        kinds = {problem.kind for problem in audit.problems}
        assert not audit.ok and {"wrong-count", "journal-differs"} <= kinds
        assert repair(store, audit).ok
    assert_holds(root, {"one:latest": ONE, "two:latest": TWO})


# --- opening and the lock -----------------------------------------------------------------------


def test_no_store(tmp_path: Path) -> None:
    """Readers make none; neither do writers that weren't told to."""
    for write in (False, True):
        with pytest.raises(StoreNotFound):
            open_store(tmp_path / "none", write=write)
    assert not (tmp_path / "none").exists()


def test_modes(store: LocalStore) -> None:
    """Nobody else may look into a store."""
    small_store.add(store, ONE, "one")
    ours = [p for p in store.layout.root.rglob("*") if store.layout.catalog not in p.parents]
    for path in [store.layout.root, *ours]:
        expected = 0o700 if path.is_dir() else 0o600
        if path != store.layout.catalog:  # RocksDB makes it; the folder above keeps others out
            assert path.stat().st_mode & 0o777 == expected, path


def test_readers_share_and_writers_exclude(root: Path) -> None:
    """Any number of readers, or one writer."""
    open_store(root, write=True, create=True).close()
    with open_store(root, write=False), open_store(root, write=False, wait_seconds=0.0):
        with pytest.raises(StoreBusy):
            open_store(root, write=True, wait_seconds=0.1)
    with open_store(root, write=True):
        for write in (False, True):
            with pytest.raises(StoreBusy):
                open_store(root, write=write, wait_seconds=0.1)
    with open_store(root, write=True, wait_seconds=0.0) as store:
        assert store.writable


def _hold(path: Path, write: bool, held: Event, enough: Event) -> None:
    lock = Lock(path, write=write)
    held.set()
    enough.wait(30)
    lock.release()


@pytest.mark.parametrize("write", [False, True], ids=["reader", "writer"])
def test_busy_names_the_holder(root: Path, write: bool) -> None:
    """The process that is in the way, by number and command."""
    open_store(root, write=True, create=True).close()
    context = multiprocessing.get_context("fork")
    held, enough = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(root / "lock", write, held, enough))
    child.start()
    try:
        assert held.wait(30)
        with pytest.raises(StoreBusy) as caught:
            Lock(root / "lock", write=True, wait_seconds=0.1)
        assert caught.value.holder.startswith(f"process {child.pid} (")
        assert str(root) in str(caught.value)
    finally:
        enough.set()
        child.join()
    Lock(root / "lock", write=True, wait_seconds=0.0).release()


def test_the_lock_goes_with_its_holder(root: Path) -> None:
    """Killed is as good as released."""
    open_store(root, write=True, create=True).close()
    context = multiprocessing.get_context("fork")
    held, enough = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(root / "lock", True, held, enough))
    child.start()
    assert held.wait(30)
    child.kill()
    child.join()
    Lock(root / "lock", write=True, wait_seconds=1.0).release()


def test_opening_leaks_nothing(root: Path) -> None:
    """Descriptors, whether it could be opened or not."""
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, ONE, "one")
    before = len(os.listdir("/proc/self/fd"))
    for write in (False, True, False):
        open_store(root, write=write).close()
    (root / "journal").write_bytes(b"damaged")
    with pytest.raises(Corrupt):
        open_store(root, write=True)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_unreadable_catalog_is_named(root: Path) -> None:
    """The error says what to move away."""
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, ONE, "one")
    (root / "catalog" / "CURRENT").write_bytes(b"MANIFEST-999999\n")
    for write in (False, True):
        with pytest.raises(CorruptCatalog, match=f"move {root}/catalog away"):
            open_store(root, write=write)
