"""Any catalog of the past, and none at all, is brought up to the journal, also in several tries."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import slow_chunker as slow
import small_store
from small_store import KIB

from icefloe.catalog import open_store
from icefloe.catalog.apply import Application
from icefloe.gc.audit import check
from icefloe.gc.removal import remove
from icefloe.gc.sweep import GcOptions, collect
from icefloe.ids import BlockId, PackId, parse_name
from icefloe.store import writer
from icefloe.store.journal import Position

# Larger than a small file, so that each is a block, and packs hold two of them.
PARTS = [slow.noise(66 * KIB, 100 + i) for i in range(9)]
PACK_BYTES = 150 * KIB


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories in which packs come, are rewritten and go."""
    monkeypatch.setattr(writer.PackWriter.__init__, "__defaults__", (PACK_BYTES,))


@dataclass(frozen=True, slots=True)
class State:
    """What a catalog says: names, images with their times, packs and bytes that live in them."""

    names: dict[str, BlockId]
    images: dict[BlockId, float]
    packs: set[PackId]
    live_bytes: int


def state_of(root: Path) -> State:
    """Of a store without damage. A writer brings it up first."""
    with open_store(root, write=True) as store:
        assert store.lost == []
        assert [p for p in check(store, read_data=True).problems if not p.waste] == []
        packs = list(store.catalog.packs())
        images = {image.id: image.created for image in store.catalog.images()}
        live = sum(pack.live for pack in packs)
        return State(store.catalog.names(), images, {pack.id for pack in packs}, live)


def one_command(root: Path, choice: random.Random) -> None:
    """A random one, on a few names and a few files."""
    with open_store(root, write=True, create=True) as store:
        names = sorted(store.catalog.names())
        command = choice.choice(["add", "add", "add", "rm", "rm", "gc", "tag"])
        if command == "add":
            tree = {f"f{i}": choice.choice(PARTS) for i in range(choice.randint(1, 4))}
            small_store.add(store, tree, choice.choice("abcd"))
        elif command == "gc":
            collect(store, GcOptions())
        elif names and command == "rm":
            count = choice.randint(1, min(2, len(names)))
            remove(store, [parse_name(name) for name in choice.sample(names, count)])
        elif names:
            image = store.catalog.names()[choice.choice(names)]
            store.commit("tag", names={f"{choice.choice('abcd')}:latest": image})


class Crash(Exception):
    """Instead of a kill."""


def crash_while_opening(root: Path, after: int) -> None:
    """Lets a recovery commit this many batches, if it has so many, and no more."""
    original, count = Application.commit, 0

    def commit(self: Application, end: Position | None, *, sync: bool) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise Crash
        original(self, end, sync=sync)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Application, "commit", commit)
        try:
            open_store(root, write=True).close()
        except Crash as crash:
            crash.__traceback__ = None  # holds on to the database


@pytest.mark.parametrize("seed", range(8))
def test_any_past_is_brought_up(seed: int, tmp_path: Path) -> None:
    choice = random.Random(seed)
    root, pasts = tmp_path / "store", [tmp_path / "nothing"]
    for i in range(choice.randint(4, 9)):
        one_command(root, choice)
        if choice.random() < 0.5:
            pasts.append(tmp_path / f"past-{i}")
            shutil.copytree(root / "catalog", pasts[-1])
    expected = state_of(root)
    for past in pasts:
        for crash in (None, 1, 2, 4):
            copy = tmp_path / "copy"
            shutil.copytree(root, copy)
            shutil.rmtree(copy / "catalog")
            if past.exists():
                shutil.copytree(past, copy / "catalog")
            if crash:
                crash_while_opening(copy, crash)
            assert state_of(copy) == expected, (past.name, crash)
            shutil.rmtree(copy)
