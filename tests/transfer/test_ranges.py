"""What to ask for: every block once, in order enough, within bounds."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from icefloe.ids import BlockId, PackId
from icefloe.store.codecs import Codec
from icefloe.store.reader import Location
from icefloe.transfer.ranges import MAX_GAP, Range, ranges, windows

LONGEST, MOST_RAW = 1 << 20, 2 << 20
Wanted = tuple[int, Location]


@st.composite
def wanted(draw: st.DrawFn) -> list[Wanted]:
    """Blocks of a few packs, in any order, as packs can hold them."""
    blocks: list[Location] = []
    for pack in range(draw(st.integers(1, 4))):
        offset = 16
        for _ in range(draw(st.integers(0, 12))):
            stored = draw(st.integers(1, 400_000))
            offset += 48 + draw(st.sampled_from([0, 0, 4000, MAX_GAP, MAX_GAP + 1]))
            raw = stored + draw(st.integers(0, 600_000))
            identity = BlockId(bytes([pack]) * 16 + offset.to_bytes(16, "big"))
            place = (PackId(bytes([pack]) * 32), offset, stored, raw, Codec.ZSTD)
            blocks.append(Location(identity, *place))
            offset += stored
    return list(enumerate(draw(st.permutations(blocks))))


def bytes_of(part: Range) -> int:
    return part.end - part.start


@given(wanted())
def test_each_block_once(blocks: list[Wanted]) -> None:
    asked = ranges(blocks, LONGEST, MOST_RAW)
    found = [block for part in asked for block in part.blocks]
    assert sorted(found) == sorted(blocks)
    for part in asked:
        places = [at for _, at in part.blocks]
        assert {at.pack for at in places} == {part.pack}
        assert all(a.end <= b.offset <= a.end + MAX_GAP for a, b in pairwise(places))
        assert (part.start, part.end) == (places[0].offset, places[-1].end)
        if len(places) > 1:
            assert bytes_of(part) <= LONGEST and sum(at.raw for at in places) <= MOST_RAW


@given(wanted())
def test_no_two_could_be_one(blocks: list[Wanted]) -> None:
    asked = ranges(blocks, LONGEST, MOST_RAW)
    for before, after in pairwise(asked):
        if before.pack == after.pack:
            raw = sum(at.raw for _, at in before.blocks) + after.blocks[0][1].raw
            first = after.blocks[0][1]
            apart = first.offset - before.end > MAX_GAP
            assert apart or first.end - before.start > LONGEST or raw > MOST_RAW


@given(wanted(), st.integers(1, 1 << 20))
def test_windows_keep_the_order(blocks: list[Wanted], first: int) -> None:
    cut = list(windows(iter(blocks), first, 4 * first))
    assert [block for window in cut for block in window] == blocks
    limit = first
    for window in cut[:-1]:
        sizes = [at.stored for _, at in window]
        assert sum(sizes) >= limit > sum(sizes[:-1])
        limit = min(2 * limit, 4 * first)
