"""The times that `criu dump` notes of itself, against bytes that were made by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_checkpoints import PAGEMAP, WORD, nested, number, varint

from icefloe.capture.images import DumpTimes, decode_dump_stats
from icefloe.errors import BadImage

# criu/include/magic.h: these files are no images, and say so.
SERVICE, STATS = 0x55105940, 0x57093306
MAGICS = WORD.pack(SERVICE) + WORD.pack(STATS)


def stats_file(*messages: bytes) -> bytes:
    """Magics, and messages with their lengths."""
    return MAGICS + b"".join(WORD.pack(len(body)) + body for body in messages)


def dump_entry(*times: int, rest: bytes = b"") -> bytes:
    """A StatsEntry of a dump: microseconds in fields 1 to 4, counts behind (images/stats.proto)."""
    numbers = [number(i, time) for i, time in enumerate(times, 1)]
    counts = [number(i, 1000 * i) for i in range(5, 15)]
    return nested(1, b"".join([*numbers, *counts, rest]))


def test_golden_stats() -> None:
    """100 ms until all stood still, 1.5 s frozen, 20 ms and 300 ms of it for the memory."""
    content = bytes.fromhex(
        "40591055" "06330957"  # the magics: service, stats
        "1f000000"  # one message of 31 bytes
        "0a1d"  # the dump, 29 bytes
        "08a08d06"  # freezing: 100,000 us
        "10e0c65b"  # frozen: 1,500,000 us
        "18a09c01"  # memdump: 20,000 us
        "20e0a712"  # memwrite: 300,000 us
        "28d086" "03"  # 50,000 pages scanned
        "3000"  # none skipped
        "38ac02"  # 300 written
        "4007"  # irmap_resolve: 7 us
        "4800"  # none lazy
    )  # fmt: skip
    assert decode_dump_stats(content, "s") == DumpTimes(0.1, 1.5, 0.02, 0.3)


times = st.integers(0, (1 << 32) - 1)


@given(times, times, times, times, st.integers(0, (1 << 64) - 1))
def test_all_times(freezing: int, frozen: int, collecting: int, writing: int, other: int) -> None:
    """What a newer CRIU adds is overlooked, whatever its type."""
    entry = dump_entry(
        freezing,
        frozen,
        collecting,
        writing,
        rest=number(40, other) + nested(41, b"\x08\x01") + varint(42 << 3 | 5) + b"1234",
    )
    wanted = [value / 1e6 for value in (freezing, frozen, collecting, writing)]
    for content in (stats_file(entry), stats_file(number(3, other) + entry + nested(9, b"new"))):
        found = decode_dump_stats(content, "s")
        told = [found.freezing, found.frozen, found.collecting, found.writing]
        assert told == pytest.approx(wanted, rel=1e-12)


def test_fields_in_any_order() -> None:
    """As protobuf allows."""
    fields = [number(2, 2_000_000), number(9, 7), number(4, 4_000_000), number(1, 1_000_000)]
    assert decode_dump_stats(stats_file(nested(1, b"".join(fields))), "s") == DumpTimes(1, 2, 0, 4)


def test_the_last_of_two_counts() -> None:
    entry = nested(1, number(1, 5) + number(1, 3_000_000))
    assert decode_dump_stats(stats_file(entry), "s").freezing == 3.0


GOOD = stats_file(dump_entry(100_000, 1_500_000, 20_000, 300_000))
DAMAGED = {
    "empty": b"",
    "no magics": GOOD[8:],
    "half the magics": GOOD[:6],
    "nothing else": GOOD[:8],
    "the magics of images": WORD.pack(0x54564319) + GOOD[4:],
    "another kind of file": GOOD[:4] + WORD.pack(PAGEMAP) + GOOD[8:],
    "the magics the other way round": GOOD[4:8] + GOOD[:4] + GOOD[8:],
    "cut in a length": GOOD[:10],
    "cut in the message": GOOD[:-1],
    "something behind it": GOOD + b"\0",
    "too long": stats_file(GOOD[12:])[:-1],
    "a restore's": stats_file(nested(2, number(1, 5) + number(3, 7))),
    "an empty message": stats_file(b""),
    "a number for the dump": stats_file(number(1, 77)),
    "a dump longer than the message": stats_file(b"\x0a\x05\x08\x01"),
    "a number that never ends": stats_file(nested(1, b"\x08\xff\xff")),
    "a number longer than 64 bits": stats_file(nested(1, b"\x08" + b"\xff" * 11 + b"\x01")),
    "a key without a value": stats_file(nested(1, number(1, 5) + b"\x10")),
    "a group": stats_file(nested(1, b"\x0b\x0c")),
    "a type that is none": stats_file(nested(1, b"\x0f\x01")),
}


def test_the_good_one() -> None:
    """Of which the damaged ones are made."""
    assert decode_dump_stats(GOOD, "s") == DumpTimes(0.1, 1.5, 0.02, 0.3)


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_ones(damage: str) -> None:
    with pytest.raises(BadImage, match="stats-dump"):
        decode_dump_stats(DAMAGED[damage], "/work/stats-dump")


@pytest.mark.parametrize(
    "fields",
    {
        "a string for a time": nested(1, b"abc") + number(2, 5),
        "eight bytes that are not there": number(1, 5) + varint(50 << 3 | 1) + b"1234",
        "four bytes that are not there": number(1, 5) + varint(50 << 3 | 5),
    }.items(),
    ids=lambda item: item[0],
)
def test_fields_of_another_type(fields: tuple[str, bytes]) -> None:
    """No time is made of where they stand, and none may reach over the message's end."""
    with pytest.raises(BadImage):
        decode_dump_stats(stats_file(nested(1, fields[1])), "s")


def test_any_damage_is_named() -> None:
    """Whatever the bytes: times, or BadImage."""
    chance = random.Random(1)
    for _ in range(5000):
        damaged = bytearray(GOOD)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        for content in (bytes(damaged), bytes(damaged[: chance.randrange(len(damaged))])):
            try:
                found = decode_dump_stats(content, "s")
            except BadImage:
                continue
            assert min(found.freezing, found.frozen, found.collecting, found.writing) >= 0
