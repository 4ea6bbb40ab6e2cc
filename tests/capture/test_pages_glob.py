"""Which files are memory, and what that means: they are cut on pages, where their content moves.

CRIU's own and amdgpu's are known; others are named with `--pages GLOB`. Where blocks end is held
against the rules once more in slow Python.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import slow_chunker as slow
import small_store
from small_store import KIB

from icefloe.capture.add import add_checkpoint, open_checkpoint
from icefloe.capture.ingest import IngestOptions
from icefloe.capture.source import grain_of, is_page_data
from icefloe.catalog import LocalStore, open_store
from icefloe.chunker import BYTES, PAGES
from icefloe.ids import BlockId, block_id, parse_name

PAGE = 4096
MEMORY = slow.noise(1536 * KIB, 71)
INSERTED = slow.noise(PAGE, 72)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    """An empty store."""
    with open_store(tmp_path / "store", write=True, create=True) as opened:
        yield opened


def blocks(store: LocalStore, folder: Path, path: str, content: bytes, *pages: str) -> set[BlockId]:
    """Those that a checkpoint of this one file has."""
    small_store.write_tree(folder, {path: content})
    options = IngestOptions("fast", 2, pages, parent="none")
    added = add_checkpoint(store, open_checkpoint(folder), parse_name("x"), {}, options)
    assert small_store.exported(store, added.id) == {path: content}
    return set(store.manifest(added.id).block_ids())


def expected(content: bytes, grain: int) -> set[BlockId]:
    """Cut by the rules of docs/format.md."""
    pieces = slow.pieces(*slow.look(content, grain), grain)
    return {block_id(content[start * grain : end * grain]) for start, end, zero in pieces}


ON_PAGES, ON_BYTES = expected(MEMORY, PAGE), expected(MEMORY, 512)

MEMORIES = [
    ("pages-1.img", ()),
    ("sub/pages-123.img", ()),
    ("amdgpu-pages-1-5", ()),
    ("amdgpu-pages-7a.img", ()),
    ("sub/amdgpu-pages-x", ()),
    ("gpu-1.mem", ("*.mem",)),
    ("gpu-1.mem", ("nothing", "gpu-?.mem")),
    ("sub/gpu-1.mem", ("gpu-*",)),
    ("sub/gpu-1.mem", ("sub/*",)),
    ("sub/deep/gpu-1.mem", ("sub/*.mem",)),
    ("[1].mem", ("[[]1].mem",)),
    ("core-1.img", ("*",)),
]
OTHERS = [
    ("core-1.img", ()),
    ("pages-1.img.bak", ()),
    ("xpages-1.img", ()),
    ("pages-x.img", ()),
    ("pages-.img", ()),
    ("amdgpu-kfd-1.img", ()),
    ("amdgpu-pages", ()),
    ("pages-1.img/core", ()),
    ("gpu-1.mem", ("*.MEM",)),
    ("gpu-1.mem", ("gpu", "mem", "gpu-?")),
    ("sub/gpu-1.mem", ("sub", "sub/", "/sub/*", "other/*")),
]


def test_the_grains_differ() -> None:
    """Else nothing could be seen here."""
    assert len(ON_PAGES) > 3 and len(ON_BYTES) > 1
    assert not ON_PAGES & ON_BYTES


@pytest.mark.parametrize("path, pages", MEMORIES)
def test_memory(path: str, pages: tuple[str, ...]) -> None:
    assert is_page_data(path, pages)
    assert grain_of(path, 20 * PAGE, pages) is PAGES
    assert grain_of(path, 20 * PAGE + 512, pages) is BYTES, "no whole pages"


@pytest.mark.parametrize("path, pages", OTHERS)
def test_no_memory(path: str, pages: tuple[str, ...]) -> None:
    assert not is_page_data(path, pages)
    assert grain_of(path, 20 * PAGE, pages) is BYTES


@pytest.mark.parametrize(
    "path, pages",
    [("pages-1.img", ()), ("amdgpu-pages-1-5", ()), ("gpu/1.mem", ("*.mem",)), ("x", ("y", "x"))],
)
def test_memory_is_cut_on_pages(
    store: LocalStore, tmp_path: Path, path: str, pages: tuple[str, ...]
) -> None:
    """So a page in front moves no more than the blocks that it is in."""
    first = blocks(store, tmp_path / "1", path, MEMORY, *pages)
    assert first == ON_PAGES
    moved = blocks(store, tmp_path / "2", path, INSERTED + MEMORY, *pages)
    assert moved == expected(INSERTED + MEMORY, PAGE)
    assert len(moved - first) == 1 and len(moved & first) >= len(first) - 1


def test_other_files_are_not(store: LocalStore, tmp_path: Path) -> None:
    assert blocks(store, tmp_path / "1", "gpu.mem", MEMORY) == ON_BYTES
    assert blocks(store, tmp_path / "2", "gpu.mem", MEMORY, "*.img") == ON_BYTES
    with_rest = MEMORY + b"x" * 512  # no whole pages
    on_bytes = blocks(store, tmp_path / "3", "gpu.mem", with_rest, "*.mem")
    assert on_bytes == expected(with_rest, 512)


def test_memory_of_two_names_is_shared(store: LocalStore, tmp_path: Path) -> None:
    """What the GPU's plugin writes now, and what a pattern names, is cut alike."""
    assert blocks(store, tmp_path / "1", "amdgpu-pages-1-5", MEMORY) == ON_PAGES
    small_store.write_tree(tmp_path / "2", {"vram": MEMORY})
    options = IngestOptions("fast", 2, ("vram",))
    again = add_checkpoint(store, open_checkpoint(tmp_path / "2"), parse_name("y"), {}, options)
    assert again.new_blocks == 0
