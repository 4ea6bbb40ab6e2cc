"""CRIU's file formats, against an encoder that was written by hand."""

import random

import made_checkpoints as made
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_checkpoints import IN_PARENT, LAZY, PAGE, PRESENT, Area, Entry

from icefloe.capture import images
from icefloe.errors import BadImage


@st.composite
def entry_lists(draw: st.DrawFn) -> list[Entry]:
    """Entries in order, of both dialects."""
    position, entries = draw(st.integers(0, 1 << 35)), []
    for _ in range(draw(st.integers(0, 30))):
        position += draw(st.integers(0, 1 << draw(st.integers(0, 10))))
        pages = draw(st.integers(1, 1 << draw(st.integers(0, 20))))
        flags = draw(st.sampled_from([PRESENT, PRESENT | LAZY, IN_PARENT, LAZY]))
        old = draw(st.booleans()) and flags != LAZY
        entries.append(Entry(position * PAGE, pages, flags, old))
        position += pages
    return entries


def rows(entries: list[Entry]) -> list[tuple[int, int, int]]:
    """What a decoder has to make of them."""
    return [(entry.vaddr, entry.pages, entry.flags) for entry in entries]


@given(entry_lists(), st.integers(1, (1 << 32) - 1))
def test_pagemaps_of_old_and_new_criu(entries: list[Entry], pages_id: int) -> None:
    found = images.decode_pagemap(made.pagemap_file(pages_id, entries), "p")
    assert found.pages_id == pages_id
    assert found.entries.tolist() == rows(entries)


@given(entry_lists(), st.integers(1, (1 << 32) - 1))
def test_what_is_encoded_decodes(entries: list[Entry], pages_id: int) -> None:
    table = np.array(rows(entries), images.ENTRY_DTYPE)
    content = images.encode_pagemap(images.Pagemap(pages_id, table))
    found = images.decode_pagemap(content, "p")
    assert (found.pages_id, found.entries.tolist()) == (pages_id, rows(entries))


def test_golden_pagemap() -> None:
    """Field 2 and field 5 both hold the count; numbers are padded to a fixed width."""
    table = np.array([(0x7F0000001000, 3, PRESENT | LAZY)], images.ENTRY_DTYPE)
    content = images.encode_pagemap(images.Pagemap(7, table))
    entry = (
        made.number(1, 0x7F0000001000, 10)
        + made.number(2, 3, 5)
        + made.number(4, 6)
        + made.number(5, 3, 5)
    )
    assert content == made.image_file(made.PAGEMAP, made.number(1, 7), entry)
    assert content.hex() == (
        "1943565425400856"  # the magics
        "020000000807"  # the head, 2 bytes: pages-7.img
        "19000000"  # an entry, 25 bytes
        "0880a0808080e09f808000"  # at 0x7f0000001000
        "108380808000"  # 3 pages, for CRIU before 4.2
        "2006"  # present and lazy
        "288380808000"  # 3 pages, for CRIU 4.2 and later
    )


def test_an_entry_of_16_tib_is_refused() -> None:
    table = np.array([(0, 1 << 32, PRESENT)], images.ENTRY_DTYPE)
    with pytest.raises(ValueError, match="16 TiB"):
        images.encode_pagemap(images.Pagemap(1, table))


@given(entry_lists(), st.data())
def test_damage_is_named(entries: list[Entry], data: st.DataObject) -> None:
    """Whatever the bytes, there is a table or a BadImage, and nothing else."""
    content = bytearray(made.pagemap_file(1, entries))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    for damaged in (bytes(content), bytes(content[:cut])):
        try:
            images.decode_pagemap(damaged, "p")
        except BadImage as error:
            assert "p of the checkpoint" in str(error)


@pytest.mark.parametrize(
    "entries",
    [
        [Entry(PAGE, 2, PRESENT), Entry(2 * PAGE, 1, PRESENT)],
        [Entry(5 * PAGE, 1, PRESENT), Entry(PAGE, 1, PRESENT)],
        [Entry(100, 1, PRESENT)],
        [Entry(PAGE, 1 << 60, PRESENT)],
    ],
)
def test_entries_that_cannot_be(entries: list[Entry]) -> None:
    with pytest.raises(BadImage):
        images.decode_pagemap(made.pagemap_file(1, entries), "p")


def test_many_entries_are_quick() -> None:
    """No loop over entries but the one that finds where they start."""
    table = np.zeros(200_000, images.ENTRY_DTYPE)
    table["vaddr"] = np.arange(len(table)) * np.uint64(2 * PAGE)
    table["pages"], table["flags"] = 1, PRESENT
    content = images.encode_pagemap(images.Pagemap(1, table))
    assert (images.decode_pagemap(content, "p").entries == table).all()


def test_trees_and_areas() -> None:
    tree = images.decode_pstree(made.pstree_file([10, 11, 12]), "t")
    assert [(process.pid, process.parent) for process in tree] == [(10, 0), (11, 10), (12, 10)]
    areas = [
        Area(PAGE, 3 * PAGE),
        Area(3 * PAGE, 4 * PAGE, made.MAP_PRIVATE),
        Area(5 * PAGE, 6 * PAGE, made.MAP_SHARED | made.MAP_ANONYMOUS),
        Area(6 * PAGE, 7 * PAGE, made.MAP_PRIVATE | made.MAP_ANONYMOUS | 0x2000),
        Area(8 * PAGE, 9 * PAGE, status=REGULAR_VDSO),
    ]
    found = images.decode_areas(made.mm_file(areas), "m")
    assert found[["start", "end", "flags"]].tolist() == [(a.start, a.end, a.flags) for a in areas]
    assert images.anonymous(found).tolist() == [True, False, False, True, False]
    assert images.can_be_lazy(found).tolist() == [True, False, False, False, False]


REGULAR_VDSO = made.REGULAR | 1 << 3


def test_damaged_trees_and_areas_are_named() -> None:
    chance = random.Random(1)
    files = [
        (images.decode_pstree, made.pstree_file([10, 11])),
        (images.decode_areas, made.mm_file([Area(PAGE, 2 * PAGE), Area(4 * PAGE, 9 * PAGE)])),
    ]
    for decode, content in files:
        for _ in range(2000):
            damaged = bytearray(content)
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            for attempt in (bytes(damaged), content[: chance.randrange(len(content))]):
                try:
                    decode(attempt, "f")
                except BadImage:
                    pass
