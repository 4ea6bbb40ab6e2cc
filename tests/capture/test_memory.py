"""Which bytes belong at which address, against a reader that goes page by page."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import made_checkpoints as made
import numpy as np
import pytest
import small_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_checkpoints import IN_PARENT, LAZY, PAGE, PRESENT, Area, Entry, Memory
from numpy.typing import NDArray

from icefloe.capture.blocks import StoreSource, read_extents, with_zeros
from icefloe.capture.directory import CriuFiles, files_for_criu
from icefloe.capture.images import Columns
from icefloe.capture.memory import load_memories, overlaps, pages_file
from icefloe.capture.stored import StoredImage
from icefloe.catalog import LocalStore, open_store
from icefloe.errors import BadImage

PID = 77
FILE_AREA = made.MAP_PRIVATE


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStore]:
    """One store for all examples: what they share is stored once."""
    with open_store(tmp_path_factory.mktemp("store"), write=True, create=True) as opened:
        yield opened


def stored(store: LocalStore, files: dict[str, bytes]) -> StoredImage:
    """A checkpoint, stored."""
    manifest = store.manifest(small_store.add(store, files, "image").id)
    return StoredImage(manifest, StoreSource(store, manifest))


def page(kind: int) -> bytes:
    """One of a few pages, so that blocks repeat; 0 is the zero page."""
    return bytes(PAGE) if kind == 0 else small_store.text(PAGE, kind)


@st.composite
def memories(draw: st.DrawFn) -> list[Memory]:
    """A dump and its parents, the oldest last. Every page of a dump's parent entries is there."""
    areas, position = [], 1 << 20
    for _ in range(draw(st.integers(1, 4))):
        position += draw(st.sampled_from([0, 1, 20]))
        pages = draw(st.integers(1, 60))
        flags = draw(st.sampled_from([made.MAP_PRIVATE | made.MAP_ANONYMOUS, FILE_AREA]))
        areas.append(Area(position * PAGE, (position + pages) * PAGE, flags))
        position += pages
    known: set[int] = set()
    dumps: list[Memory] = []
    for _ in range(draw(st.integers(1, 3))):
        memory = draw(_dumps(areas, known))
        known = {at for entry in memory.entries for at in made.page_range(entry)}
        dumps.insert(0, memory)
    return dumps


@st.composite
def _dumps(draw: st.DrawFn, areas: list[Area], known: set[int]) -> Memory:
    entries: list[Entry] = []
    pages: dict[int, bytes] = {}
    for area in areas:
        at = area.start
        while at < area.end:
            count = min(draw(st.integers(1, 40)), (area.end - at) // PAGE)
            inside = range(at, at + count * PAGE, PAGE)
            anonymous = bool(area.flags & made.MAP_ANONYMOUS)
            choices = [0, PRESENT] + [PRESENT | LAZY] * anonymous
            choices += [IN_PARENT] * known.issuperset(inside)
            flags = draw(st.sampled_from(choices))
            if flags:
                entries.append(Entry(at, count, flags, draw(st.booleans())))
            if flags & PRESENT:
                kind = draw(st.integers(0, 6))
                for i, place in enumerate(inside):
                    pages[place] = page(kind if kind < 4 else i % 5)
            at += count * PAGE
    return Memory(areas, entries, pages)


def tree_of(dumps: list[Memory]) -> dict[str, bytes]:
    """The files of a dump, its parents in folders."""
    files: dict[str, bytes] = {}
    for depth, memory in enumerate(dumps):
        prefix = "parent/" * depth
        files |= {prefix + name: data for name, data in made.checkpoint({PID: memory}).items()}
    return files


def resolved(dumps: list[Memory], at: int) -> bytes:
    """A page as CRIU's own reader finds it: down the chain while entries say so."""
    for memory in dumps:
        for entry in memory.entries:
            if at in made.page_range(entry):
                if entry.flags & IN_PARENT:
                    break
                return memory.pages[at]
    raise AssertionError(f"{at:#x} is nowhere")


def content_of(image: StoredImage, segments: Columns) -> bytes:
    """The bytes that segments stand for, one after the other."""
    blocks = image.source.open()
    try:
        pieces = with_zeros(read_extents(blocks, pages_file(segments)))
        return b"".join(bytes(piece) for piece in pieces)
    finally:
        blocks.close()


def by_page(image: StoredImage, segments: Columns) -> dict[int, bytes]:
    """Each page of some segments."""
    content, found, position = content_of(image, segments), {}, 0
    for start, length in segments[["vaddr", "length"]].tolist():
        for at in range(start, start + length, PAGE):
            found[at] = content[position : position + PAGE]
            position += PAGE
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(memories())
def test_segments_name_the_right_bytes(store: LocalStore, dumps: list[Memory]) -> None:
    image = stored(store, tree_of(dumps))
    (memory,) = load_memories(image)
    assert (memory.pid, memory.pages_id) == (PID, 1)
    named = [at for entry in dumps[0].entries for at in made.page_range(entry)]
    wanted = {at: resolved(dumps, at) for at in named}
    assert by_page(image, memory.segments) == wanted
    starts, lengths = memory.segments["vaddr"], memory.segments["length"]
    for area in memory.areas.tolist():
        inside = (starts >= area[0]) & (starts < area[1])
        assert bool((starts[inside] + lengths[inside] <= area[1]).all())
        plain = area[2] == made.MAP_PRIVATE | made.MAP_ANONYMOUS
        assert bool((memory.segments["anonymous"][inside] == plain).all())
        assert plain or not memory.segments["lazy"][inside].any()


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(memories(), st.booleans())
def test_criu_reads_the_same_memory(store: LocalStore, dumps: list[Memory], lazy: bool) -> None:
    image = stored(store, tree_of(dumps))
    files = files_for_criu(image, load_memories(image), lazy=lazy)
    written = written_by(files)
    found = made.read_memory(written, PID)
    areas = {at: area for area in dumps[0].areas for at in range(area.start, area.end, PAGE)}
    named = [at for entry in dumps[0].entries for at in made.page_range(entry)]
    wanted = {at: resolved(dumps, at) for at in named}
    left = by_page(image, files.lazy[PID]) if lazy else {}
    for at, content in wanted.items():
        if at in left:
            assert found[at] == (b"", LAZY) and left[at] == content
        elif at in found:
            assert found[at] == (content, PRESENT)
        else:
            assert not any(content) and areas[at].flags & made.MAP_ANONYMOUS
            assert not lazy
    assert found.keys() <= wanted.keys()
    assert written[f"core-{PID}.img"] == b"core of %d" % PID
    assert not any(name.startswith("parent") for name in written)
    assert {name: b"".join(bytes(piece) for piece in files.content(name)) for name in written} == (
        written
    )


def written_by(files: CriuFiles) -> dict[str, bytes]:
    """What `write` writes."""
    with tempfile.TemporaryDirectory() as folder:
        files.write(Path(folder), workers=2)
        found = small_store.read_tree(Path(folder))
    assert sum(map(len, found.values())) <= files.total_bytes
    assert all(files.has(name) for name in found) and not files.has("nothing.img")
    return found


@given(
    st.lists(st.integers(0, 60), unique=True, max_size=20),
    st.lists(st.integers(0, 60), unique=True, max_size=20),
)
def test_overlaps(a: list[int], b: list[int]) -> None:
    def intervals(points: list[int]) -> list[tuple[int, int]]:
        points = sorted(points)
        return list(zip(points[::2], points[1::2], strict=False))

    def columns(pairs: list[tuple[int, int]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        table = np.array(pairs, np.uint64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    first, second = intervals(a), intervals(b)
    found = overlaps(*columns(first), *columns(second))
    wanted = [
        (i, j, max(x[0], y[0]), min(x[1], y[1]))
        for i, x in enumerate(first)
        for j, y in enumerate(second)
        if max(x[0], y[0]) < min(x[1], y[1])
    ]
    assert list(zip(*(column.tolist() for column in found), strict=True)) == wanted


def simple(flags: int = PRESENT | LAZY) -> Memory:
    """Two pages."""
    start = 1 << 20
    pages = {start: page(1), start + PAGE: page(2)} if flags & PRESENT else {}
    return Memory([Area(start, start + 2 * PAGE)], [Entry(start, 2, flags)], pages)


def test_what_cannot_be_restored_is_named(store: LocalStore) -> None:
    whole = made.checkpoint({PID: simple()})
    cases = [
        ({**whole, "pages-1.img": page(1)}, "shorter than its pagemap says"),
        (made.checkpoint({PID: simple(LAZY)}), "dumped with --lazy-pages"),
        (made.checkpoint({PID: simple(IN_PARENT)}), "which was not stored"),
        (
            tree_of([simple(IN_PARENT), Memory(simple().areas, [], {})]),
            "refers to pages that parent/pagemap-77.img lacks",
        ),
        ({**whole, f"mm-{PID}.img": made.mm_file([])}, "outside of every area"),
        ({name: data for name, data in whole.items() if not name.startswith("mm-")}, "not there"),
        ({name: data for name, data in whole.items() if name != "inventory.img"}, "no checkpoint"),
        ({**whole, f"pagemap-{PID}.img": b"junk"}, "magic numbers"),
    ]
    for files, reason in cases:
        with pytest.raises(BadImage, match=reason):
            load_memories(stored(store, files))


def test_an_archive_keeps_criu_files_in_a_folder(store: LocalStore) -> None:
    files = {f"checkpoint/{k}": v for k, v in made.checkpoint({PID: simple()}).items()}
    image = stored(store, files | {"config.dump": b"{}", "parent/inventory.img": b"not this one"})
    assert image.base == "checkpoint/"
    (memory,) = load_memories(image)
    assert by_page(image, memory.segments) == simple().pages


def test_shared_memory_is_read_by_criu(store: LocalStore) -> None:
    """Its pages are in no area, and none is dropped."""
    entries = [Entry(0, 3, PRESENT)]
    files = made.checkpoint({PID: simple()}) | {
        "pagemap-shmem-9.img": made.pagemap_file(2, entries),
        "pages-2.img": page(1) + bytes(PAGE) + page(2),
    }
    image = stored(store, files)
    for lazy in (True, False):
        written = written_by(files_for_criu(image, load_memories(image), lazy=lazy))
        renamed = {"pagemap-9.img": written["pagemap-shmem-9.img"], **written}
        assert [data for data, _ in made.read_memory(renamed, 9).values()] == [
            page(1),
            bytes(PAGE),
            page(2),
        ]
