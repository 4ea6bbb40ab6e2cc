"""The plan of a collection: pure, so any mixture of packs and dead blocks can be tried."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefloe.catalog import DeadBlocks, PackRow
from icefloe.gc.sweep import REWRITE_WHEN_DEAD, Plan, make_plan
from icefloe.ids import BlockId, PackId

NOW = 1000.0


@dataclass(frozen=True, slots=True)
class Made:
    """One pack as a test sees it: bytes in use, dead blocks as (bytes, since)."""

    live: int
    dead: list[tuple[int, float]]
    frame: int = 100

    @property
    def bytes(self) -> int:
        """Length of the file."""
        return self.frame + self.live + sum(size for size, _ in self.dead)


def plan(made: list[Made], oldest: float = NOW) -> Plan:
    """The plan for these packs, numbered from 0."""
    packs = [PackRow(i, PackId(bytes([i]) * 32), m.bytes, m.live) for i, m in enumerate(made)]
    dead = [(i, size, since) for i, m in enumerate(made) for size, since in m.dead]
    return make_plan(packs, columns(dead), oldest)


def columns(dead: list[tuple[int, int, float]]) -> DeadBlocks:
    """Rows of pack, bytes and time as the catalog gives them."""
    return DeadBlocks(
        np.array([pack for pack, _, _ in dead], np.uint32),
        np.array([size for _, size, _ in dead], np.int64),
        np.array([since for _, _, since in dead], np.float64),
        tuple(BlockId(i.to_bytes(32, "big")) for i in range(len(dead))),
    )


def test_nothing_to_do() -> None:
    """No packs; packs that live."""
    assert plan([]) == Plan((), (), 0, 0, 0)
    assert plan([Made(500, []), Made(1, [])]) == Plan((), (), 0, 0, 0)


def test_a_dead_pack_goes_whole() -> None:
    """Also one in which no block was ever found: another pack has copies of all."""
    made = [Made(0, [(10, 1.0), (20, 2.0)]), Made(500, []), Made(0, [])]
    assert plan(made) == Plan((0, 2), (), 2, 0, 0)


def test_grace_keeps_young_blocks() -> None:
    """One young block keeps a whole dead pack; blocks that died just then are old enough."""
    assert plan([Made(0, [(10, NOW), (10, NOW + 1)])], NOW) == Plan((), (), 0, 1, 1)
    assert plan([Made(0, [(10, NOW), (10, NOW)])], NOW) == Plan((0,), (), 2, 0, 0)


def test_a_dead_pack_with_a_young_block_is_rewritten_when_it_is_worth_it() -> None:
    """The young block moves."""
    assert plan([Made(0, [(1000, 1.0), (10, NOW + 1)])], NOW) == Plan((), (0,), 1, 1, 0)


@pytest.mark.parametrize(("dead", "worth"), [(249, False), (250, True), (251, True)])
def test_rewriting_must_be_worth_it(dead: int, worth: bool) -> None:
    """A quarter of the file."""
    made = Made(1000 - 100 - dead, [(dead, 1.0)])
    assert made.bytes == 1000
    assert plan([made]) == (Plan((), (0,), 1, 0, 0) if worth else Plan((), (), 0, 0, 1))


packs = st.builds(
    Made,
    st.one_of(st.just(0), st.integers(1, 2000)),
    st.lists(st.tuples(st.integers(1, 1000), st.integers(990, 1010).map(float)), max_size=5),
    st.integers(80, 300),
)


@given(st.lists(packs, max_size=8), st.integers(985, 1015).map(float))
def test_any_mixture(made: list[Made], oldest: float) -> None:
    """Each pack and each dead block falls into exactly the class that the rules give it."""
    found = plan(made, oldest)
    assert not set(found.remove) & set(found.rewrite)
    for i, pack in enumerate(made):
        young = [size for size, since in pack.dead if since > oldest]
        old = sum(size for size, since in pack.dead if since <= oldest)
        removes = pack.live == 0 and not young
        assert (i in found.remove) == removes
        worth = old >= REWRITE_WHEN_DEAD * pack.bytes and bool(pack.dead)
        assert (i in found.rewrite) == (not removes and worth)
    touched = {*found.remove, *found.rewrite}
    dead = [(i in touched, since <= oldest) for i, m in enumerate(made) for _, since in m.dead]
    assert found.blocks_removed == dead.count((True, True))
    assert found.kept_by_grace == sum(not old for _, old in dead)
    assert found.kept_in_packs == dead.count((False, True))


@given(st.lists(packs, max_size=6), st.permutations(range(6)))
def test_order_does_not_matter(made: list[Made], order: list[int]) -> None:
    """Packs and dead blocks may come in any order."""
    rows = [PackRow(i, PackId(bytes([i]) * 32), m.bytes, m.live) for i, m in enumerate(made)]
    dead = [(i, size, since) for i, m in enumerate(made) for size, since in m.dead]
    shuffled = [rows[i] for i in order if i < len(rows)]
    found = make_plan(shuffled, columns(dead[::-1]), NOW)
    expected = plan(made)
    assert (set(found.remove), set(found.rewrite)) == (set(expected.remove), set(expected.rewrite))
    assert found.blocks_removed == expected.blocks_removed
