"""Images are laid beside those that they are like, whatever their names."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered import FILE, MIB_PAGES, PAGE, Numbers, add, all_is_well, page, tree, within_budget

from icefloe.capture.kin import hooks_of
from icefloe.catalog import LocalStore, open_store
from icefloe.catalog.tables import HOOK_DTYPE, MOST_PLACES
from icefloe.chunker import PAGES, scan
from icefloe.gc.removal import remove
from icefloe.gc.sweep import GcOptions, collect
from icefloe.ids import parse_name

COUNT = 8 * MIB_PAGES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    """An empty store."""
    with open_store(tmp_path / "store", write=True, create=True) as opened:
        yield opened


def changed(numbers: Numbers, share: float, seed: int) -> Numbers:
    """Some pages replaced by others."""
    choice = random.Random(seed)
    return [
        choice.randrange(10**6, 10**9) if choice.random() < share else number for number in numbers
    ]


def differing(ours: Numbers, theirs: Numbers) -> int:
    """Bytes of pages that only we have."""
    return len(set(ours) - set(theirs) - {0}) * PAGE


FIRST = list(range(1, COUNT + 1))


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_scattered_changes_under_another_name(store: LocalStore, share: float) -> None:
    ours = changed(FIRST, share, 1)
    first, second = add(store, tree(FIRST), "one"), add(store, tree(ours), "two")
    assert second.new_bytes <= 1.1 * differing(ours, FIRST)
    within_budget(store, second.id)
    all_is_well(store, {first.id: tree(FIRST), second.id: tree(ours)})


def test_what_was_inserted_and_another_file(store: LocalStore) -> None:
    """It is found wherever it stands, in a file of whatever name."""
    ours = changed(FIRST[:700] + list(range(9000, 9137)) + FIRST[700:], 0.02, 2)
    moved = {"deep/pages-7.img": tree(list(range(5000, 5300)) + ours)[FILE]}
    first, second = add(store, tree(FIRST), "one"), add(store, moved, "two")
    assert second.new_bytes <= 1.2 * (differing(ours, FIRST) + 300 * PAGE)
    all_is_well(store, {first.id: tree(FIRST), second.id: moved})


def test_half_like_one_and_half_like_another(store: LocalStore) -> None:
    other = list(range(20_000, 20_000 + COUNT))
    ours = changed(FIRST + other, 0.05, 3)
    images = {add(store, tree(FIRST), "one").id: tree(FIRST)}
    images[add(store, tree(other), "two").id] = tree(other)
    third = add(store, tree(ours), "three", workers=1)
    # Where the one ends, it takes a few windows to see that.
    assert third.new_bytes <= 1.5 * differing(ours, FIRST + other) + (20 << 20)
    assert third.new_bytes < len(tree(ours)[FILE]) / 3
    all_is_well(store, images | {third.id: tree(ours)})


def test_the_parent_of_the_name_is_no_kin(store: LocalStore) -> None:
    """Where the image of the same name is another altogether, kin is found all the same."""
    add(store, tree(FIRST), "one")
    add(store, tree(list(range(50_000, 50_000 + COUNT))), "two:1")
    ours = changed(FIRST * 2, 0.05, 4)
    second = add(store, tree(ours), "two:2", workers=1)
    assert second.new_bytes < len(tree(ours)[FILE]) / 2
    within_budget(store, second.id)


def test_somebody_says_none(store: LocalStore) -> None:
    ours = changed(FIRST, 0.05, 5)
    add(store, tree(FIRST), "one")
    alone = add(store, tree(ours), "two", parent="none").new_bytes
    assert alone > 5 * differing(ours, FIRST)


def test_the_latest_is_removed(store: LocalStore) -> None:
    """The ones before it are still known, and there is nothing wrong with the store."""
    ours = changed(FIRST, 0.05, 6)
    images = {add(store, tree(FIRST), "one").id: tree(FIRST)}
    for name in ("two", "three"):
        add(store, tree(changed(FIRST, 0.02, 7)), name)
        remove(store, [parse_name(name)])
        collect(store, GcOptions())
    last = add(store, tree(ours), "four")
    assert last.new_bytes <= 1.1 * differing(ours, FIRST)
    all_is_well(store, images | {last.id: tree(ours)})


def test_all_are_removed(store: LocalStore) -> None:
    add(store, tree(FIRST), "one")
    remove(store, [parse_name("one")])
    collect(store, GcOptions())
    second = add(store, tree(FIRST), "two")
    assert second.new_bytes == COUNT * PAGE
    all_is_well(store, {second.id: tree(FIRST)})


def test_a_catalog_made_anew_knows_no_hooks(store: LocalStore) -> None:
    """Until the next image; nothing else depends on them."""
    ours, more = changed(FIRST, 0.05, 8), changed(FIRST, 0.05, 9)
    images = {add(store, tree(FIRST), "one").id: tree(FIRST)}
    store.rebuild()
    second = add(store, tree(ours), "two")
    assert second.new_bytes > 5 * differing(ours, FIRST)
    third = add(store, tree(more), "three")
    assert third.new_bytes <= 1.1 * differing(more, ours)
    all_is_well(store, images | {second.id: tree(ours), third.id: tree(more)})


def test_kin_that_cannot_be_read(store: LocalStore) -> None:
    """It was not asked for: what comes is stored whole."""
    ours = changed(FIRST, 0.05, 10)
    first = add(store, tree(FIRST), "one")
    (location,) = store.catalog.locations([first.id])
    path = store.layout.pack(location.pack)
    with path.open("r+b") as file:
        file.seek(location.offset + location.stored // 2)
        file.write(b"\\xff" * 4)
    second = add(store, tree(ours), "two")
    assert second.new_bytes > 5 * differing(ours, FIRST)


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=300), st.integers(0, 1000))
def test_hooks_are_pages_by_what_they_hold(numbers: Numbers, start: int) -> None:
    """The same pages are hooks wherever they stand, and zero ones never are."""
    content = np.frombuffer(b"".join(map(page, numbers)), np.uint8)
    found = hooks_of(scan(content, PAGES), start * PAGE)
    places = (found.offsets // PAGE - start).tolist()
    alone = {
        number
        for number in set(numbers)
        if len(hooks_of(scan(np.frombuffer(page(number), np.uint8), PAGES), 0).offsets)
    }
    assert places == [i for i, number in enumerate(numbers) if number in alone]
    assert 0 not in alone
    assert (found.fingerprints >> np.uint64(56) == 0).all()


def test_places_of_a_hook(store: LocalStore) -> None:
    """The latest images come first, as many as fit; what is gone goes."""
    ids = [add(store, {"core.img": b"%d" % i}, f"n{i}").id for i in range(MOST_PLACES + 2)]
    prints = np.array([7, 1 << 63], np.uint64)

    def note(image: bytes) -> None:
        rows = np.zeros(2, HOOK_DTYPE)
        rows["image"], rows["offset"] = np.frombuffer(image, "V32"), [PAGE, 2 * PAGE]
        store.catalog.set_hooks(prints, rows)

    def known() -> list[bytes]:
        which, rows = store.catalog.hooks(np.array([5, 7], np.uint64))
        assert set(which.tolist()) <= {1} and set(rows["offset"].tolist()) <= {PAGE}
        return [row["image"].tobytes() for row in rows]

    assert known() == []
    for image in (*ids, ids[-1]):
        note(image)
    assert known() == list(reversed(ids))[:MOST_PLACES]
    remove(store, [parse_name(f"n{len(ids) - 2}")])
    note(ids[0])
    assert known() == [ids[0], ids[-1], ids[-3]][:MOST_PLACES]
