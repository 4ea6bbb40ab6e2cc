"""Real memory of a real process is filled while the process does what processes do."""

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fake_blocks import (
    BLOCK_PAGES,
    BLOCKS,
    PAGES,
    ZERO,
    ZEROS,
    FakeSource,
    PackedSource,
    Rows,
    Source,
    layout,
    segments,
    served,
    slow_reader,
    wanted,
)
from puppet import PAGE, Puppet, digest

from icefloe.capture import uffd
from icefloe.capture.plan import Plan
from icefloe.errors import MissingPack

pytestmark = pytest.mark.skipif(uffd.probe() is not None, reason=f"userfaultfd: {uffd.probe()}")


BY = pytest.mark.parametrize("by", ["thread", "processes"])


def source_by(by: str, folder: Path, delay: float = 0.0) -> Source:
    """Blocks that a thread puts in, or processes do, who know where they lie."""
    if by == "thread":
        return FakeSource(BLOCKS, delay)
    return PackedSource(folder / "store", BLOCKS, per_pack=3)


def loads_of(source: Source) -> Counter[int]:
    """How often each block was read by us."""
    return Counter(source.fetched) if isinstance(source, PackedSource) else source.loads


@BY
@pytest.mark.parametrize("workers", [1, 4])
def test_everything_is_filled_once(by: str, tmp_path: Path, workers: int) -> None:
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), source_by(by, tmp_path)
        with served({1: puppet}, {1: rows}, source, workers=workers) as at_work:
            at_work.finish()
            assert at_work.fill.filled_bytes == sum(pages for _, pages, _, _ in rows) * PAGE
            loads = {number: 1 for number in range(8)}
            assert loads_of(source) == (loads if by == "thread" else {})
            assert at_work.fill.faults == 0
            assert at_work.ask(puppet, "read", 0, PAGES) == wanted(rows, puppet.address)


@pytest.mark.parametrize("workers", [1, 3])
def test_only_touched_memory(workers: int) -> None:
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), FakeSource(BLOCKS)
        with served({1: puppet}, {1: rows}, source, workers=workers, ahead=False) as at_work:
            right = wanted(rows, puppet.address)
            for page in (3, 40, 125, 150, 130, 3, 155):
                assert at_work.ask(puppet, "read", page, 1) == [right[page]]
            assert source.loads == {0: 1, 2: 1, 1: 1, 7: 1}
            touched = {(touch.origin - puppet.address) // PAGE for touch in at_work.fill.touches}
            assert touched == {3, 40, 125, 130, 155}
            assert not at_work.fill.filled.is_set()
            assert at_work.ask(puppet, "read", 0, PAGES) == right


def test_faults_come_first() -> None:
    """With slow blocks, the last page of all is there long before it would be its turn."""
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), FakeSource(BLOCKS, delay=0.15)
        with served({1: puppet}, {1: rows}, source, workers=1) as at_work:
            right = wanted(rows, puppet.address)
            assert at_work.ask(puppet, "read", PAGES - 1, 1) == [right[PAGES - 1]]
            assert not at_work.fill.filled.is_set() and len(source.loads) <= 4
            at_work.pump(at_work.fill.filled.is_set)
            assert set(source.loads.values()) == {1}
            assert at_work.ask(puppet, "read", 0, PAGES) == right


@BY
def test_pages_that_are_there_are_kept(by: str, tmp_path: Path) -> None:
    with Puppet(PAGES, register=False) as puppet:
        puppet.ask("write", 5, 1)
        puppet.ask("write", 17, 3)
        puppet.ask("register", 0)
        rows, source = layout(puppet.address), source_by(by, tmp_path)
        with served({1: puppet}, {1: rows}, source) as at_work:
            at_work.finish()
            right = wanted(rows, puppet.address)
            for page in (5, 17, 18, 19):
                right[page] = digest(b"\xee" * PAGE)
            assert at_work.ask(puppet, "read", 0, PAGES) == right


@BY
def test_memory_that_is_registered_late(by: str, tmp_path: Path) -> None:
    with Puppet(PAGES, register=False) as puppet:
        rows, source = layout(puppet.address), source_by(by, tmp_path)
        with served({1: puppet}, {1: rows}, source, registered=False) as at_work:
            time.sleep(0.1)
            assert not at_work.fill.filled_bytes
            puppet.ask("register", 0)
            at_work.pump(lambda: at_work.fill.filled_bytes > 0)
            at_work.fill.in_place()
            at_work.finish()
            assert at_work.ask(puppet, "read", 0, PAGES) == wanted(rows, puppet.address)


@pytest.mark.parametrize(
    ("by", "ahead"), [("thread", True), ("thread", False), ("processes", True)]
)
def test_memory_that_changes_meanwhile(
    by: str, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discarded memory reads as zero, moved memory comes along, and a child has all of it."""
    slow_reader(monkeypatch, 0.02)
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), source_by(by, tmp_path, delay=0.02)
        with served({1: puppet}, {1: rows}, source, workers=2, ahead=ahead) as at_work:
            right = wanted(rows, puppet.address)
            at_work.ask(puppet, "discard", 70, 3)
            right[70:73] = [ZEROS] * 3
            at_work.ask(puppet, "move", 100, 20)
            assert at_work.ask(puppet, "fork_read", 90, 40) == right[90:130]
            at_work.ask(puppet, "unmap", 60, 2)
            at_work.ask(puppet, "move", 20, 8)
            at_work.ask(puppet, "move", 22, 3)
            at_work.ask(puppet, "discard", 23, 1)
            right[23] = ZEROS
            at_work.ask(puppet, "write", 24, 1)
            right[24] = digest(b"\xee" * PAGE)
            assert at_work.ask(puppet, "fork_read", 0, 60) == right[:60]
            if ahead:
                at_work.finish()
            assert at_work.ask(puppet, "read", 0, 60) == right[:60]
            assert at_work.ask(puppet, "read", 62, PAGES - 62) == right[62:]


@BY
def test_two_processes_share_blocks(by: str, tmp_path: Path) -> None:
    with Puppet(PAGES) as one, Puppet(PAGES) as two:
        rows = {1: layout(one.address), 2: layout(two.address)}
        source = source_by(by, tmp_path)
        with served({1: one, 2: two}, rows, source) as at_work:
            at_work.finish()
            assert set(loads_of(source).values()) == ({1} if by == "thread" else set())
            assert at_work.ask(one, "read", 0, PAGES) == wanted(rows[1], one.address)
            assert at_work.ask(two, "read", 0, PAGES) == wanted(rows[2], two.address)


@pytest.mark.parametrize(
    ("by", "ahead"), [("thread", True), ("thread", False), ("processes", True)]
)
def test_a_process_that_ends_meanwhile(
    by: str, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_reader(monkeypatch, 0.05)
    with Puppet(PAGES) as puppet:
        rows, source = layout(puppet.address), source_by(by, tmp_path, delay=0.05)
        with served({1: puppet}, {1: rows}, source, ahead=ahead) as at_work:
            if not ahead:
                at_work.ask(puppet, "read", 0, 1)
            puppet.kill()
            for space in at_work.fill.spaces():
                space.alive = uffd.is_alive(space.fd)
            at_work.pump(lambda: not at_work.fill.spaces())
            assert at_work.fill.failure is None


@pytest.mark.parametrize(
    ("by", "ahead"), [("thread", True), ("thread", False), ("processes", True)]
)
def test_a_block_that_is_missing(by: str, ahead: bool, tmp_path: Path) -> None:
    with Puppet(PAGES) as puppet:
        rows = layout(puppet.address)
        source: Source = FakeSource({n: BLOCKS[n] for n in BLOCKS if n != 3})
        if by == "processes":
            source = PackedSource(tmp_path / "store", BLOCKS)
            source.layout.pack(source.located[3].pack).unlink()
        with served({1: puppet}, {1: rows}, source, ahead=ahead) as at_work:
            puppet.tell("read", 3 * BLOCK_PAGES, 1)
            with pytest.raises(MissingPack):
                at_work.pump(lambda: False)
            puppet.kill()  # it still waits


def test_order() -> None:
    """Wanted units come first, each once; pieces of long zero runs are units of their own."""
    rows: Rows = [(1 << 20, 4, 2, 0), (1 << 21, 10_000, ZERO, 0), (1 << 30, 4, 0, 0)]
    rows.append(((1 << 30) + 8 * PAGE, 4, 2, 0))
    plan = Plan([5], {5: segments(rows)}, 3)
    assert plan.order().tolist() == [2, 4, 5, 6, 0]
    assert plan.order(np.array([0, 5])).tolist() == [0, 5, 2, 4, 6]
    assert plan.bytes == 10_012 * PAGE and len(plan.rows([2])) == 2
    assert plan.extent(0) == (1 << 20, (1 << 30) + 12 * PAGE)
    assert plan.gap(0, (1 << 30) + 5 * PAGE) == ((1 << 30) + 4 * PAGE, (1 << 30) + 8 * PAGE)
    found = plan.find_units(np.zeros(3, np.uint32), np.array([1 << 30, 5, 1 << 20], np.uint64))
    assert found.tolist() == [0, 2]
