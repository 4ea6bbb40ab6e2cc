"""Damage of any file of a store: `check` finds it, `export` never writes a wrong byte.

A bit is flipped, a file cut short, a file deleted; then the store is opened, checked with every
byte, and every image exported. Either something is said, or nothing is wrong.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_store
from damaged import Examiner, Verdict, examine

from icefloe.catalog import LocalStore, open_store
from icefloe.errors import Corrupt, IcefloeError, StoreNotFound
from icefloe.gc.audit import check
from icefloe.ids import BlockId, PackId
from icefloe.store.codecs import Codec
from icefloe.store.pack import TRAILER, Index, read_index
from icefloe.store.verify import verify_pack

NAMES = set(small_store.worn_store())


@dataclass(frozen=True, slots=True)
class Worn:
    """A closed store and what is in it."""

    root: Path
    ids: dict[str, BlockId]


@pytest.fixture(scope="module")
def worn(tmp_path_factory: pytest.TempPathFactory) -> Worn:
    """A store with some history. Never modified: tests damage copies."""
    root = tmp_path_factory.mktemp("worn") / "store"
    with open_store(root, write=True, create=True) as store:
        ids = small_store.wear(store)
    verdict = examine(root)
    assert verdict.ok and set(verdict.exact) == NAMES
    return Worn(root, ids)


@pytest.fixture
def copy(worn: Worn, tmp_path: Path) -> Path:
    """A copy to damage; its packs are its own."""
    shutil.copytree(worn.root, tmp_path / "store")
    return tmp_path / "store"


def flip(path: Path, position: int) -> None:
    """Flips one bit of the byte at `position`; doing it twice undoes it."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << position % 8]))


def judge(verdict: Verdict, what: object) -> None:
    """No crash, no odd error, no wrong byte; nothing lost in silence."""
    assert not verdict.surprises, (what, verdict)
    assert not verdict.wrong, (what, verdict)
    assert verdict.found_or_harmless(NAMES), (what, verdict)


# --- packs --------------------------------------------------------------------------------------


def frame(index: Index, length: int) -> set[int]:
    """All bytes that aren't payload of data blocks: headers, padding, manifests, index, trailer."""
    positions = set(range(length))
    for _, offset, stored, _, _, kind, _ in index.tolist():
        if kind == 1:
            positions -= set(range(offset, offset + stored))
    return positions


def unused_bits(index: Index) -> set[int]:
    """Where `flip` hits the bit of a zstd frame that decoders pass over (RFC 8878, 3.1.1.1.1.3)."""
    return {row[1] + 4 for row in index.tolist() if row[4] == Codec.ZSTD and row[1] % 8 == 0}


def test_every_byte_of_a_frame(copy: Path) -> None:
    """And a sample of the payloads: verifying the pack finds each flipped bit."""
    with open_store(copy, write=False) as store:
        for pack in store.layout.published():
            path = store.layout.pack(pack)
            length = path.stat().st_size
            index = read_index(path)
            positions = frame(index, length) | set(range(11, length, 2003))
            for position in sorted(positions - unused_bits(index)):
                flip(path, position)
                assert next(verify_pack(store.layout, pack), None), (path, position)
                flip(path, position)
            assert not list(verify_pack(store.layout, pack))


def sample(path: Path) -> list[int]:
    """Positions in a pack, spread over all that there is."""
    index, length = read_index(path), path.stat().st_size
    places = [0, 9, 15, length - 1, length - TRAILER.size, length - TRAILER.size - 30]
    for _, offset, stored, _, _, _, _ in index.tolist():
        places += [offset - 48, offset - 20, offset, offset + stored // 2, offset + stored - 1]
    return places


def test_damaged_packs_in_a_store(copy: Path) -> None:
    """`check --read-data` says damaged; exports are exact or refused."""
    with open_store(copy, write=False) as store:
        for pack in store.layout.published():
            path = store.layout.pack(pack)
            for position in sample(path):
                flip(path, position)
                assert not check(store, read_data=True).ok, (path, position)
                assert_no_wrong_byte(store)
                flip(path, position)
        assert check(store, read_data=True).ok


def assert_no_wrong_byte(store: LocalStore) -> int:
    """Exports everything; returns how many images could not be."""
    images, refused = small_store.worn_store(), 0
    for name, image in store.catalog.names().items():
        try:
            assert small_store.exported(store, image) == images[name]
        except Corrupt:
            refused += 1
    return refused


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 79, 4096, -1, -63, -64, -65, -200])
def test_truncated_packs(worn: Worn, tmp_path: Path, cut: int) -> None:
    """Cut to `cut` bytes from the start or the end."""
    for number, pack in enumerate(packs_of(worn)):
        root = tmp_path / str(number)
        shutil.copytree(worn.root, root)
        path = root / "packs" / pack[:1].hex() / pack.hex()
        os.truncate(path, cut if cut >= 0 else path.stat().st_size + cut)
        verdict = examine(root)
        judge(verdict, (path, cut))
        assert verdict.opened and not verdict.ok


def packs_of(worn: Worn) -> list[PackId]:
    """The packs of the store, in order."""
    with open_store(worn.root, write=False) as store:
        return list(store.layout.published())


def test_lengthened_swapped_and_deleted_packs(worn: Worn, tmp_path: Path) -> None:
    """Bytes more at the end, another pack's bytes under this name, no file, an empty folder."""
    packs = packs_of(worn)
    for number, pack in enumerate(packs):
        for kind in ("longer", "swapped", "deleted"):
            root = tmp_path / f"{number}{kind}"
            shutil.copytree(worn.root, root)
            path = root / "packs" / pack[:1].hex() / pack.hex()
            if kind == "longer":
                path.write_bytes(path.read_bytes() + b"\0")
            elif kind == "swapped":
                other = packs[number - 1]
                shutil.copy(root / "packs" / other[:1].hex() / other.hex(), path)
            else:
                path.unlink()
            verdict = examine(root)
            judge(verdict, (path, kind))
            assert verdict.opened and not verdict.ok


# --- journal ------------------------------------------------------------------------------------


def journal_positions(content: bytes) -> Iterator[int]:
    """All of the title; of each line the check, the ends and a sample."""
    start = 0
    for number, line in enumerate(content.splitlines(keepends=True)):
        dense = range(len(line)) if number == 0 else range(18)
        yield from (start + i for i in dense)
        yield from range(start + 18, start + len(line) - 2, 61)
        yield from (start + len(line) - 2, start + len(line) - 1)
        start += len(line)


@pytest.mark.parametrize("write", [False, True], ids=["reader", "writer"])
def test_damaged_journal(copy: Path, write: bool) -> None:
    """The catalog is whole, so the images are; but the damage is told, before it is needed."""
    path = copy / "journal"
    content = path.read_bytes()
    places = sorted(set(journal_positions(content)))
    for position in places[::5] if write else places:
        flip(path, position)
        verdict = examine(copy, write=write)
        judge(verdict, position)
        assert verdict.told and not verdict.ok, position
        path.write_bytes(content)
    assert examine(copy, write=write).ok


def test_truncated_and_deleted_journal(copy: Path) -> None:
    """Of any length, and gone."""
    path = copy / "journal"
    content = path.read_bytes()
    for length in [*range(0, 60), *range(60, len(content), 83), len(content) - 1]:
        path.write_bytes(content[:length])
        verdict = examine(copy)
        judge(verdict, length)
        assert verdict.told and not verdict.ok, length
    path.unlink()
    judge(verdict := examine(copy), "deleted")
    assert not verdict.ok


def test_damaged_journal_without_catalog(worn: Worn, tmp_path: Path) -> None:
    """Nothing to compare with: an error, or the images up to the damaged last line."""
    content = (worn.root / "journal").read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    for position in sorted(set(journal_positions(content)))[::11]:
        root = tmp_path / str(position)
        small_store.copy_store(worn.root, root)
        shutil.rmtree(root / "catalog")
        flip(root / "journal", position)
        verdict = examine(root)
        assert not verdict.surprises and not verdict.wrong, (position, verdict)
        if position < last - 1:  # the newline before it makes the last two lines one
            assert verdict.told, (position, verdict)
        shutil.rmtree(root)


def test_repair_of_a_damaged_journal(worn: Worn, tmp_path: Path) -> None:
    """What the error advises does help, wherever the damage is: all that was there is there."""
    from icefloe.gc.audit import repair

    content = (worn.root / "journal").read_bytes()
    for position in sorted({3, 30, len(content) // 2, len(content) - 30, len(content) - 1}):
        root = tmp_path / str(position)
        small_store.copy_store(worn.root, root)
        flip(root / "journal", position)
        with open_store(root, write=True, repair=True) as store:
            assert repair(store, check(store, read_data=False)).ok, position
        verdict = examine(root)
        assert verdict.ok and set(verdict.exact) == NAMES, (position, verdict)


# --- format and folders -------------------------------------------------------------------------


def test_damaged_format(copy: Path) -> None:
    """Every bit counts: what else is in the folder may be of another format."""
    path = copy / "format"
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in (0, 3, 6):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(Corrupt):
                open_store(copy, write=False)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(Corrupt):
            open_store(copy, write=False)
    path.unlink()
    with pytest.raises(StoreNotFound):
        open_store(copy, write=False)


def test_format_of_nothing_but_brackets(copy: Path) -> None:
    """JSON that is nested too deeply for the parser is damage like any other."""
    (copy / "format").write_bytes(b"[" * 100_000)
    with pytest.raises(Corrupt):
        open_store(copy, write=False)


@pytest.mark.parametrize("name", ["lock", "staging", "packs", "catalog"])
@pytest.mark.parametrize("write", [False, True], ids=["reader", "writer"])
def test_missing_parts(copy: Path, name: str, write: bool) -> None:
    """`lock`, `staging` and `catalog` are not missed; without `packs` the images are not there."""
    path = copy / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    verdict = examine(copy, write=write)
    if name == "packs":
        assert not verdict.surprises and not verdict.wrong and not verdict.exact, verdict
        assert verdict.told
    else:
        judge(verdict, name)
        assert verdict.ok and set(verdict.exact) == NAMES, verdict


# --- catalog ------------------------------------------------------------------------------------


def catalog_files(worn: Worn) -> list[str]:
    """The files of RocksDB that hold something, LOG left out: nothing reads it."""
    names = (path.name for path in (worn.root / "catalog").iterdir() if path.stat().st_size)
    return sorted(name for name in names if name != "LOG")


def sampled(length: int, count: int) -> list[int]:
    """`count` positions, both ends among them."""
    return sorted({i * (length - 1) // max(count - 1, 1) for i in range(count)})


@pytest.fixture(scope="module")
def examiner() -> Iterator[Examiner]:
    """Where RocksDB may crash."""
    with Examiner() as made:
        yield made


def damage_catalog(
    examiner: Examiner, worn: Worn, folder: Path, name: str, kind: str, place: int
) -> Verdict:
    """A copy with one file of the catalog flipped or cut at `place`, or deleted."""
    root = folder / f"{name}-{kind}-{place}"
    small_store.copy_store(worn.root, root)
    path = root / "catalog" / name
    if kind == "flip":
        flip(path, place)
    elif kind == "cut":
        os.truncate(path, place)
    else:
        path.unlink()
    verdict = examiner.examine(root)
    shutil.rmtree(root)
    return verdict


def test_flipped_bits_in_the_catalog(examiner: Examiner, worn: Worn, tmp_path: Path) -> None:
    """RocksDB checks its blocks; what it doesn't check must not matter."""
    for name in catalog_files(worn):
        length = (worn.root / "catalog" / name).stat().st_size
        count = 24 if name == "CURRENT" or name.startswith("MANIFEST") else 6
        for place in sampled(length, min(count, length)):
            judge(damage_catalog(examiner, worn, tmp_path, name, "flip", place), (name, place))


def test_a_record_that_rocksdb_never_gets_past(
    examiner: Examiner, worn: Worn, tmp_path: Path
) -> None:
    """Every record of the MANIFEST, its type flipped to one of a file that is used again."""
    (name,) = (name for name in catalog_files(worn) if name.startswith("MANIFEST"))
    content = (worn.root / "catalog" / name).read_bytes()
    at = 0
    while at + 7 <= len(content):
        root = tmp_path / str(at)
        small_store.copy_store(worn.root, root)
        damaged = bytearray(content)
        damaged[at + 6] ^= 4
        (root / "catalog" / name).unlink()
        (root / "catalog" / name).write_bytes(damaged)
        judge(examiner.examine(root), at)
        at += 7 + int.from_bytes(content[at + 4 : at + 6], "little")


def test_cut_and_deleted_files_of_the_catalog(
    examiner: Examiner, worn: Worn, tmp_path: Path
) -> None:
    """Each file empty, halved, without its last byte, and gone."""
    for name in catalog_files(worn):
        length = (worn.root / "catalog" / name).stat().st_size
        for kind, place in [("cut", 0), ("cut", length // 2), ("cut", length - 1), ("delete", 0)]:
            judge(damage_catalog(examiner, worn, tmp_path, name, kind, place), (name, kind, place))


def test_a_damaged_catalog_is_rebuilt_when_moved_away(worn: Worn, tmp_path: Path) -> None:
    """What the error advises does help."""
    root = tmp_path / "store"
    small_store.copy_store(worn.root, root)
    for path in (root / "catalog").glob("*.sst"):
        os.truncate(path, 10)
    with pytest.raises(IcefloeError, match="move .*catalog away"):
        with open_store(root, write=True) as store:
            list(store.catalog.images())
    shutil.move(root / "catalog", tmp_path / "away")
    verdict = examine(root)
    assert verdict.ok and set(verdict.exact) == NAMES
