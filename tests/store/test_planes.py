"""Byte planes against a slow model written from docs/format.md: bit for bit, whatever the bytes."""

import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icefloe.durable import Buffer
from icefloe.store import planes
from icefloe.store.planes import MAX_SAMPLE, Width

WIDTHS: tuple[Width, ...] = get_args(Width)
widths = st.sampled_from(WIDTHS)

# Zeros of both signs, infinities, quiet and signalling NaNs with something in them, subnormals.
ODD_FLOATS = (
    *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001),
    *(0xFFBFFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x00000001, 0x80000001, 0x007FFFFF),
)
odd_floats = st.lists(st.sampled_from(ODD_FLOATS), max_size=50).map(
    lambda numbers: struct.pack(f"<{len(numbers)}I", *numbers)
)
anything = st.one_of(
    st.binary(max_size=70),
    st.builds(lambda part, times: part * times, st.binary(max_size=9), st.integers(0, 300)),
    st.builds(bytes.__add__, odd_floats, st.binary(max_size=3)),
)


def model(raw: bytes, width: int) -> tuple[list[bytes], bytes]:
    """Planes and tail, a byte at a time."""
    ranks: list[list[int]] = [[] for _ in range(width)]
    whole = len(raw) // width * width
    for at in range(whole):
        ranks[at % width].append(raw[at])
    return [bytes(rank) for rank in ranks], raw[whole:]


def entropy(plane: bytes) -> float:
    """Bits a byte, by Shannon's sum."""
    shares = [count / len(plane) for count in Counter(plane).values()]
    return -sum(share * math.log2(share) for share in shares)


def merged(parts: Sequence[bytes], tail: bytes, before: int = 0) -> bytes:
    """What `merge` makes of them, `before` bytes into a buffer that was full of something else."""
    length = sum(map(len, parts)) + len(tail)
    room = bytearray(b"\xa5" * (before + length + 5))
    planes.merge(parts, tail, memoryview(room)[before : before + length])
    assert room[:before] + room[before + length :] == b"\xa5" * (before + 5)
    return bytes(room[before : before + length])


def taken(raw: Buffer, width: Width) -> list[bytes]:
    """All planes, each taken into the middle of something else."""
    size = len(raw) // width
    found = []
    for rank in range(width):
        room = np.full(size + 5, 0xA5, np.uint8)
        planes.take(raw, width, rank, room[2 : 2 + size])
        assert {*room[:2].tolist(), *room[2 + size :].tolist()} == {0xA5}
        found.append(room[2 : 2 + size].tobytes())
    return found


@given(anything, widths)
@settings(max_examples=200, deadline=None)
def test_take(raw: bytes, width: Width) -> None:
    """The planes are those of the model, in its order, from any kind of buffer."""
    wanted, _ = model(raw, width)
    for buffer in (raw, bytearray(raw), memoryview(b"x" + raw)[1:]):
        assert taken(buffer, width) == wanted


@given(anything, widths, st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_merge(raw: bytes, width: Width, before: int) -> None:
    """What the model takes apart, at any address; nothing beside it is touched."""
    assert merged(*model(raw, width), before) == raw


@given(st.lists(st.binary(min_size=33, max_size=33), min_size=4, max_size=4), widths)
@settings(max_examples=100, deadline=None)
def test_merge_then_take(parts: list[bytes], width: Width) -> None:
    """The other way round: planes of any bytes are the planes of what they make."""
    raw = merged(parts[:width], b"")
    assert taken(raw, width) == parts[:width]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_length(width: Width) -> None:
    """Every tail there is, behind no number at all, one, and several."""
    for length in range(5 * width):
        raw = bytes(range(1, length + 1))
        parts = taken(raw, width)
        assert len(parts) == width and {len(part) for part in parts} == {length // width}
        assert merged(parts, raw[length // width * width :]) == raw


def test_every_number_of_two_bytes() -> None:
    """No carry and no sign gets lost; in numbers of four bytes they meet each other."""
    raw = np.arange(1 << 16, dtype="<u2").tobytes()
    for width in WIDTHS:
        assert merged(taken(raw, width), b"") == raw


# --- costs --------------------------------------------------------------------------------------


def shares(sample: bytes) -> list[float]:
    """`costs` as one list: two planes, then four."""
    return [float(cost) for costs in planes.costs(sample) for cost in costs]


samples = st.one_of(
    st.binary(min_size=4, max_size=200),
    st.builds(lambda part: (part * MAX_SAMPLE)[:MAX_SAMPLE], st.binary(min_size=1, max_size=90)),
    odd_floats.filter(len),
)


@given(samples)
@settings(max_examples=200, deadline=None)
def test_costs_are_the_entropy_of_the_sample(sample: bytes) -> None:
    """For any bytes: finite, from 0 to 1, and what the sum over shares gives."""
    whole = sample[: len(sample) // 4 * 4]
    wanted = [entropy(plane) / 8 for width in WIDTHS for plane in model(whole, width)[0]]
    found = shares(sample)
    assert found == pytest.approx(wanted, abs=1e-9)
    assert all(-1e-9 < cost < 1 + 1e-9 for cost in found)


@pytest.mark.parametrize("values", [1, 2, 16, 100, 256])
def test_costs_are_near_those_of_the_source(values: int) -> None:
    """As many values, all as likely: a full sample shows their entropy but for 0.03."""
    for seed in range(10):
        made = np.random.default_rng(seed).integers(0, values, MAX_SAMPLE, dtype=np.uint8)
        for cost in shares(made.tobytes()):
            assert math.log2(values) / 8 - 0.03 < cost < math.log2(values) / 8 + 1e-9


def test_costs_tell_planes_apart() -> None:
    """Numbers whose highest byte never changes, and whose lowest never repeats."""
    numbers = np.arange(256, dtype="<u4") | 0x3F000000
    assert planes.costs(numbers.tobytes())[1] == [1, 0, 0, 0]
