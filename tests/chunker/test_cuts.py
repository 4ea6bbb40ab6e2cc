"""Cuts and marks: against a slow reference, and what docs/format.md promises of them."""

from collections.abc import Sequence
from itertools import pairwise, zip_longest

import numpy as np
import pytest
import slow_chunker as slow
from hypothesis import given, settings
from hypothesis import strategies as st

from icefloe.chunker import BYTES, PAGES, WEIGHTS, CutStream, Grain, Marks, Piece, mix, scan

both = pytest.mark.parametrize("grain", [PAGES, BYTES], ids=["pages", "bytes"])

Flags = tuple[list[bool], list[bool]]


def marks_of(zero: Sequence[bool], cut: Sequence[bool]) -> Marks:
    """Marks as `scan` would make them."""
    return Marks(np.array(zero, np.bool_), np.array(cut, np.bool_))


def in_windows(flags: Flags, grain: Grain, bounds: Sequence[int]) -> list[Piece]:
    """The pieces of a file that comes in windows ending at `bounds`, as they come."""
    zero, cut = flags
    stream, out = CutStream(grain), []
    edges = [0, *bounds, len(zero)]
    for i, (start, end) in enumerate(pairwise(edges)):
        out += stream.feed(marks_of(zero[start:end], cut[start:end]), i == len(edges) - 2)
        assert stream.pending < grain.max_block + grain.min_zero_run
    assert stream.pending == 0
    return out


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbouring zero pieces as one."""
    out: list[Piece] = []
    for piece in pieces:
        if out and out[-1].zero and piece.zero and out[-1].end == piece.start:
            piece = Piece(out.pop().start, piece.end, True)
        out.append(piece)
    return out


@st.composite
def flags(draw: st.DrawFn, grain: Grain) -> Flags:
    """A file as runs of zero, plain and marked grains; lengths lie around the limits."""
    low, high = grain.min_block, grain.max_block
    near = [1, 2, low - 1, low, low + 1, 2 * low, high - 1, high, high + 1, high + low]
    lengths = st.one_of(st.sampled_from(near), st.integers(1, 2 * low))
    zero: list[bool] = []
    cut: list[bool] = []
    for kind, length in draw(st.lists(st.tuples(st.sampled_from("zpm"), lengths), max_size=14)):
        length = min(length, 3) if kind == "m" else length
        zero += [kind == "z"] * length
        cut += [kind == "m"] * length
    return zero, cut


@st.composite
def flags_and_windows(draw: st.DrawFn, grain: Grain) -> tuple[Flags, list[int]]:
    """A file and where its windows end."""
    drawn = draw(flags(grain))
    ends = st.lists(st.integers(0, len(drawn[0])), max_size=12)
    return drawn, sorted(draw(ends))


@both
def test_windows_do_not_move_cuts(grain: Grain) -> None:
    """Windows of any size, empty ones too, give what the slow reference gives for the whole."""

    @given(flags_and_windows(grain))
    @settings(max_examples=250, deadline=None)
    def run(case: tuple[Flags, list[int]]) -> None:
        (zero, cut), bounds = case
        found = joined(in_windows((zero, cut), grain, bounds))
        expected = slow.pieces(zero, cut, grain.size)
        assert [(p.start, p.end, p.zero) for p in found] == expected

    run()


@both
@pytest.mark.parametrize("step", [1, 2, 7, 16, 17, 127, 128, 129, 255, 256, 257])
def test_equal_windows(grain: Grain, step: int) -> None:
    """A file cut in windows of one size, down to a single grain."""
    rng = np.random.default_rng(step)
    zero = np.repeat(rng.random(60) < 0.4, rng.integers(1, 2 * grain.min_zero_run, 60))
    cut = (rng.random(len(zero)) < 1 / 64) & ~zero
    file = (zero.tolist(), cut.tolist())
    found = joined(in_windows(file, grain, range(step, len(zero), step)))
    assert [(p.start, p.end, p.zero) for p in found] == slow.pieces(*file, grain.size)


@both
def test_pieces_tile_and_keep_limits(grain: Grain) -> None:
    """No gap, no overlap; blocks within bounds; long zero runs are pieces, short ones never."""

    @given(flags(grain))
    @settings(max_examples=250, deadline=None)
    def run(file: Flags) -> None:
        zero, cut = file
        pieces = in_windows(file, grain, [])
        assert [0, *(p.end for p in pieces)] == [*(p.start for p in pieces), len(zero)]
        for piece, after in zip_longest(pieces, pieces[1:]):
            length = piece.end - piece.start
            if piece.zero:
                assert length >= grain.min_zero_run and all(zero[piece.start : piece.end])
                continue
            assert 0 < length <= grain.max_block
            last = after is None or after.zero
            assert length >= grain.min_block or last
            inner = cut[piece.start + grain.min_block - 1 : piece.end - 1]
            assert not any(inner), "a mark past the minimum must cut"
            assert cut[piece.end - 1] or length == grain.max_block or last
            assert longest_run(zero[piece.start : piece.end]) < grain.min_zero_run

    run()


def longest_run(zero: Sequence[bool]) -> int:
    """The length of the longest run of true."""
    longest = length = 0
    for flag in zero:
        length = length + 1 if flag else 0
        longest = max(longest, length)
    return longest


@both
@pytest.mark.parametrize("seed", range(8))
def test_insertion_moves_only_cuts_nearby(grain: Grain, seed: int) -> None:
    """Seven grains more in the middle: what lies before keeps its cuts, what follows finds them."""
    rng = np.random.default_rng(seed)
    count = 80 * grain.max_block
    cut = rng.random(count) < 1 / (262144 // grain.size)
    place, added = int(rng.integers(count)), 7
    more = np.insert(cut, [place] * added, False)
    before = ends_of(cut, grain)
    after = ends_of(more, grain)
    shifted = {end if end <= place else end + added for end in before}
    assert {end for end in before if end <= place} == {end for end in after if end <= place}
    moved = shifted ^ after
    assert len(moved) <= 24
    assert not moved or max(moved) - place < 16 * grain.max_block


def ends_of(cut: np.ndarray[tuple[int], np.dtype[np.bool_]], grain: Grain) -> set[int]:
    """Where the blocks of a file without zeros end."""
    stream = CutStream(grain)
    pieces = stream.feed(Marks(np.zeros(len(cut), np.bool_), cut), final=True)
    return {piece.end for piece in pieces}


def test_insertion_in_real_bytes() -> None:
    """The same with pages: all but a few blocks are found again, byte for byte."""
    content = np.random.default_rng(3).integers(1, 256, 24 << 20, dtype=np.uint8)
    place = 9 << 20
    inserted = np.concatenate([content[:place], content[: 3 * 4096], content[place:]])
    before, after = (blocks_of(c) for c in (content, inserted))
    assert len(before) > 40
    assert len(before - after) <= 4


def blocks_of(content: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> set[bytes]:
    """The blocks of a file of pages."""
    pieces = CutStream(PAGES).feed(scan(content, PAGES), final=True)
    return {content[p.start * 4096 : p.end * 4096].tobytes() for p in pieces}


# --- what scan sees -----------------------------------------------------------------------------


def ghost(size: int, seed: int) -> bytes:
    """A grain that is not zero and has fingerprint 0: its last two words undo the others."""
    words = slow.splitmix64(size // 8, seed)
    rest = sum(w * weight for w, weight in zip(words[1:], slow.WEIGHTS[1:], strict=False))
    words[0] = -rest * pow(slow.WEIGHTS[0], -1, 1 << 64) & slow.MASK
    grain = np.array(words, np.uint64).tobytes()
    assert slow.fingerprint(grain) == 0 and any(grain)
    return grain


def lone(size: int, seed: int) -> bytes:
    """A grain with one bit set."""
    grain = bytearray(size)
    grain[seed % size] = 1 << seed % 8
    return bytes(grain)


@both
def test_scan_against_reference(grain: Grain) -> None:
    """Zero, ghost, sparse and full grains in any order."""
    makers = [
        lambda seed: bytes(grain.size),
        lambda seed: ghost(grain.size, seed),
        lambda seed: lone(grain.size, seed),
        lambda seed: slow.noise(grain.size, seed),
    ]
    grains = st.builds(lambda make, seed: make(seed), st.sampled_from(makers), st.integers(0, 4095))

    @given(st.lists(grains, max_size=12))
    @settings(max_examples=80, deadline=None)
    def run(content: list[bytes]) -> None:
        raw = b"".join(content)
        marks = scan(np.frombuffer(bytearray(raw), np.uint8), grain)
        assert (marks.zero.tolist(), marks.cut.tolist()) == slow.look(raw, grain.size)

    run()


@both
def test_scan_marks_what_the_reference_marks(grain: Grain) -> None:
    """Over enough grains that many are marked."""
    raw = slow.noise(1 << 20, 11)
    marks = scan(np.frombuffer(raw, np.uint8), grain)
    assert (marks.zero.tolist(), marks.cut.tolist()) == slow.look(raw, grain.size)
    assert marks.cut.any()


@both
def test_ghosts_are_not_zero(grain: Grain) -> None:
    """Fingerprint 0 alone makes no grain zero: alone, among zeros, among full grains."""
    zero, full = bytes(grain.size), slow.noise(grain.size, 1)
    for content in (
        [ghost(grain.size, 1)],
        [ghost(grain.size, 1), ghost(grain.size, 2)],
        [zero, ghost(grain.size, 3), zero, zero],
        [full, zero, ghost(grain.size, 4), full, ghost(grain.size, 5), zero],
    ):
        marks = scan(np.frombuffer(b"".join(content), np.uint8), grain)
        assert marks.zero.tolist() == [grain_bytes == zero for grain_bytes in content]


@both
def test_zero_grains_are_never_marked(grain: Grain) -> None:
    """A zero grain mixes to 0, which would be a cut."""
    marks = scan(np.zeros(64 * grain.size, np.uint8), grain)
    assert marks.zero.all() and not marks.cut.any()


@both
def test_empty_window(grain: Grain) -> None:
    """A window without grains has no marks."""
    marks = scan(np.zeros(0, np.uint8), grain)
    assert len(marks.zero) == len(marks.cut) == 0


@both
def test_scan_refuses_other_windows(grain: Grain) -> None:
    """Partial grains and scattered bytes are errors."""
    for window in (
        np.zeros(grain.size - 1, np.uint8),
        np.zeros(grain.size + 8, np.uint8),
        np.zeros(4 * grain.size, np.uint8)[::2],
    ):
        with pytest.raises(ValueError):
            scan(window, grain)


def test_weights_and_mix() -> None:
    """Both come out as the slow reference computes them."""
    assert WEIGHTS.tolist() == slow.WEIGHTS
    values = slow.splitmix64(100, 5) + [0, 1, slow.MASK]
    assert mix(np.array(values, np.uint64)).tolist() == [slow.mixed(v) for v in values]
