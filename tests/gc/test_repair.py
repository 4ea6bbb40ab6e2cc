"""`check --repair`: what packs and journal can mend is mended, and nothing is thrown away."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import small_store

from icefloe.catalog import LocalStore, open_store, tables
from icefloe.errors import CorruptJournal
from icefloe.gc.audit import Audit, check, repair
from icefloe.gc.sweep import GcOptions, collect

IMAGES = small_store.worn_store()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with three images and some dead blocks."""
    root = tmp_path / "store"
    with open_store(root, write=True, create=True) as store:
        small_store.wear(store)
    return root


def repaired(root: Path) -> Audit:
    """What `icefloe check --repair` does."""
    with open_store(root, write=True, repair=True) as store:
        return repair(store, check(store, read_data=True))


def damage_line(root: Path, number: int) -> None:
    """One character of a line of the journal; line 0 is the title."""
    lines = (root / "journal").read_bytes().split(b"\n")
    lines[number] = lines[number][:-9] + b"#" + lines[number][-8:]
    (root / "journal").write_bytes(b"\n".join(lines))


def all_is_there(root: Path, names: set[str]) -> None:
    """Every image exports exactly, these names are known, and a collection changes nothing."""
    with open_store(root, write=True) as store:
        assert check(store, read_data=True).problems == ()
        assert set(store.catalog.names()) == names
        collect(store, GcOptions())
        trees = [small_store.exported(store, image.id) for image in store.catalog.images()]
        for tree in IMAGES.values():
            assert tree in trees
        assert check(store, read_data=True).problems == ()


def test_damaged_journal_is_written_from_the_catalog(root: Path) -> None:
    damage_line(root, 2)
    audit = repaired(root)
    assert audit.ok
    assert [(p.kind, p.repaired) for p in audit.problems] == [("journal-damaged", True)]
    all_is_there(root, set(IMAGES))


@pytest.mark.parametrize("line", range(1, 6))
def test_journal_damaged_and_catalog_lost(root: Path, line: int) -> None:
    """Whatever line is unreadable, no image is lost; only what that line said about names is."""
    damage_line(root, line)
    shutil.rmtree(root / "catalog")
    if line < 5:  # the last line may be a torn write, which needs no repair
        with pytest.raises(CorruptJournal):
            open_store(root, write=True)
        assert repaired(root).ok
        with open_store(root, write=True) as store:
            names = set(store.catalog.names())
        assert names <= set(IMAGES) | {"gone:latest"}
        all_is_there(root, names)


@pytest.mark.parametrize("catalog_too", [False, True])
def test_journal_lost(root: Path, catalog_too: bool) -> None:
    (root / "journal").unlink()
    if catalog_too:
        shutil.rmtree(root / "catalog")
    with pytest.raises(CorruptJournal):
        open_store(root, write=True)
    assert repaired(root).ok
    all_is_there(root, set() if catalog_too else set(IMAGES))


def test_journal_cut_short(root: Path) -> None:
    """The catalog knows more than the journal: it is believed."""
    content = (root / "journal").read_bytes()
    (root / "journal").write_bytes(content[: len(content) // 2])
    assert repaired(root).ok
    all_is_there(root, set(IMAGES))


def change_rows(store: LocalStore, field: str, table: str, dtype: np.dtype[np.void]) -> None:
    """Adds one to a field of the first row of a table."""
    key, value = next(iter(store.catalog.database.items(table)))
    row = np.frombuffer(value, dtype).copy()
    row[field] += 1
    batch = store.catalog.database.batch()
    batch.put(table, key, row.tobytes())
    store.catalog.database.commit(batch, sync=False)


@pytest.mark.parametrize(
    ("kind", "field", "table", "dtype"),
    [
        ("wrong-count", "count", tables.BLOCKS, tables.BLOCK_DTYPE),
        ("wrong-location", "offset", tables.BLOCKS, tables.BLOCK_DTYPE),
        ("wrong-live-bytes", "live", tables.PACKS, tables.PACK_DTYPE),
        ("wrong-totals", "logical", tables.IMAGES, tables.IMAGE_DTYPE),
    ],
)
def test_wrong_catalog_is_rebuilt(
    root: Path, kind: str, field: str, table: str, dtype: np.dtype[np.void]
) -> None:
    with open_store(root, write=True) as store:
        change_rows(store, field, table, dtype)
        assert kind in {problem.kind for problem in check(store, read_data=False).problems}
    audit = repaired(root)
    assert audit.ok and all(problem.repaired for problem in audit.problems)
    all_is_there(root, set(IMAGES))


def test_staging_is_cleared_and_orphans_stay(root: Path) -> None:
    """A pack that nobody knows may be the last copy of something: only `gc` removes it."""
    (root / "staging" / "1-x").write_bytes(b"half a pack")
    pack = next(path for path in (root / "packs").rglob("*") if path.is_file())
    orphan = root / "packs" / "00" / ("00" * 32)
    orphan.parent.mkdir(exist_ok=True)
    shutil.copy(pack, orphan)
    audit = repaired(root)
    assert {(p.kind, p.repaired) for p in audit.problems} == {
        ("staging-leftover", True),
        ("orphan-pack", False),
    }
    assert audit.ok and orphan.exists() and not any((root / "staging").iterdir())


def test_damaged_data_stays_damaged(root: Path) -> None:
    pack = max(
        (p for p in (root / "packs").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    content = bytearray(pack.read_bytes())
    content[5000] ^= 1
    pack.write_bytes(content)
    audit = repaired(root)
    assert not audit.ok
    assert {p.kind for p in audit.problems if not p.repaired} == {"data-damaged"}
