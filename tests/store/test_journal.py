"""The journal: what was appended is read; what was torn is cut; what is damaged is an error."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from icefloe.errors import CorruptJournal, UnknownFormat
from icefloe.ids import BlockId, PackId
from icefloe.store.journal import START, Change, Journal, Operation, Position, Tail

TITLE = b"icefloe journal 1\n"

digests = st.binary(min_size=32, max_size=32)
packs = st.lists(digests.map(PackId), max_size=3).map(tuple)
images = st.lists(digests.map(BlockId), max_size=3).map(tuple)
names = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.none() | digests.map(BlockId),
    max_size=3,
)
changes = st.builds(
    Change,
    st.sampled_from([name for name in get_args(Operation) if name != "snapshot"]),
    st.floats(0, 1e11).map(lambda time: round(time, 3)),
    packs,
    packs,
    images,
    images,
    names,
)


@contextmanager
def empty() -> Iterator[Journal]:
    """A journal without changes, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal")
        journal.create()
        yield journal


def digest(number: int) -> BlockId:
    """Some id."""
    return BlockId(blake3(bytes([number])).digest())


def change(number: int) -> Change:
    """Change number `number`."""
    return Change("add", 1000.5 + number, (PackId(digest(number)),), names={"n:t": digest(number)})


def write(journal: Journal, count: int) -> list[Position]:
    """Appends changes; returns the position before each, and the last one."""
    positions = [START]
    for i in range(count):
        positions.append(journal.append(change(i), positions[-1]))
    return positions


def changes_of(tail: Tail) -> list[Change]:
    """The changes alone."""
    return [entry.change for entry in tail.entries]


@given(st.lists(changes, max_size=6))
@settings(max_examples=60, deadline=None)
def test_round_trip(written: list[Change]) -> None:
    """Any changes, read from any position, and the same again after `rewrite`."""
    with empty() as journal:
        positions = [START]
        for item in written:
            positions.append(journal.append(item, positions[-1]))
        for i, position in enumerate(positions):
            tail = journal.read(position)
            assert changes_of(tail) == written[i:]
            assert [entry.end for entry in tail.entries] == positions[i + 1 :]
            assert (tail.end, tail.torn_bytes) == (positions[-1], 0)
        if written:
            whole = replace(written[-1], operation="snapshot")
            end = journal.rewrite(whole)
            after = journal.append(written[0], end)
            tail = journal.read()
            assert (changes_of(tail), tail.end) == ([whole, written[0]], after)


def test_create_keeps_what_is_there() -> None:
    """Making a journal that exists does nothing."""
    with empty() as journal:
        write(journal, 2)
        content = journal.path.read_bytes()
        journal.create()
        assert journal.path.read_bytes() == content


def test_mode() -> None:
    """Nobody else may read it."""
    with empty() as journal:
        assert journal.path.stat().st_mode & 0o777 == 0o600


def test_torn_tails() -> None:
    """A last line that lacks any number of bytes is passed over, and cut by the next append."""
    with empty() as journal:
        positions = write(journal, 3)
        whole = journal.path.read_bytes()
        for length in range(positions[2].offset, positions[3].offset):
            journal.path.write_bytes(whole[:length])
            for start in (START, positions[2]):
                tail = journal.read(start)
                assert tail.end == positions[2]
                assert tail.torn_bytes == length - positions[2].offset
            assert changes_of(journal.read()) == [change(0), change(1)]
            end = journal.append(change(7), positions[2])
            tail = journal.read()
            assert (tail.end, tail.torn_bytes) == (end, 0)
            assert changes_of(tail) == [change(0), change(1), change(7)]
            assert journal.path.stat().st_size == end.offset


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=100, deadline=None)
def test_garbage_at_the_end(garbage: bytes) -> None:
    """What a torn write can leave: any bytes, several lines of them too."""
    with empty() as journal:
        positions = write(journal, 2)
        with journal.path.open("ab") as file:
            file.write(garbage)
        tail = journal.read()
        assert (tail.end, tail.torn_bytes) == (positions[2], len(garbage))
        journal.append(change(5), positions[2])
        assert changes_of(journal.read()) == [change(0), change(1), change(5)]


def test_every_byte_in_the_middle() -> None:
    """A damaged line with a whole one behind it was acknowledged: an error."""
    with empty() as journal:
        positions = write(journal, 3)
        whole = journal.path.read_bytes()
        for place in range(len(TITLE), positions[2].offset - 1):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            journal.path.write_bytes(damaged)
            with pytest.raises(CorruptJournal, match=str(journal.path)):
                journal.read()


def test_lines_that_are_gone_doubled_or_swapped() -> None:
    """Each line is whole, and their numbers tell."""
    with empty() as journal:
        write(journal, 3)
        title, one, two, three = journal.path.read_bytes().splitlines(keepends=True)
        for lines in ([two, three], [one, three], [one, one, two], [one, three, two], [one] * 2):
            journal.path.write_bytes(title + b"".join(lines))
            with pytest.raises(CorruptJournal):
                journal.read()


def line(body: bytes) -> bytes:
    """A line whose check is right."""
    return blake3(body).hexdigest()[:16].encode() + b" " + body + b"\n"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b'{"sequence":0}',
        b'{"sequence":0,"operation":"add","time":"x","packs_added":[],"packs_dropped":[],'
        b'"images_added":[],"images_removed":[],"names":{}}',
        b'{"sequence":0,"operation":"add","time":1,"packs_added":["00"],"packs_dropped":[],'
        b'"images_added":[],"images_removed":[],"names":{}}',
        b'{"sequence":0,"operation":"add","time":1,"packs_added":[5],"packs_dropped":[],'
        b'"images_added":[],"images_removed":[],"names":{}}',
        b'{"sequence":0,"operation":"add","time":1,"packs_added":[],"packs_dropped":[],'
        b'"images_added":[],"images_removed":[],"names":[]}',
        b"[" * 100_000,
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
def test_lines_that_are_whole_and_no_change(body: bytes) -> None:
    """The right check, the wrong content: an error, and never another one."""
    with empty() as journal:
        content = journal.path.read_bytes()
        journal.path.write_bytes(content + line(body))
        with pytest.raises(CorruptJournal):
            journal.read()


def test_snapshots_come_first() -> None:
    """One in the middle would make what came before it count twice."""
    with empty() as journal:
        positions = write(journal, 2)
        journal.append(replace(change(2), operation="snapshot"), positions[2])
        with pytest.raises(CorruptJournal, match="snapshot"):
            journal.read()


def test_position_inside_a_line() -> None:
    """A catalog that points there belongs to another journal."""
    with empty() as journal:
        positions = write(journal, 2)
        for offset in (positions[1].offset - 1, positions[1].offset + 1, positions[2].offset + 9):
            with pytest.raises(CorruptJournal, match=f"byte {offset}"):
                journal.read(replace(positions[1], offset=offset))


def test_position_with_another_sequence() -> None:
    """The lines behind it have other numbers."""
    with empty() as journal:
        positions = write(journal, 2)
        with pytest.raises(CorruptJournal, match="sequence"):
            journal.read(replace(positions[1], sequence=0))


@pytest.mark.parametrize("version", ["2", "7", "10", "99999"])
def test_newer_version(version: str) -> None:
    """Told apart from damage."""
    with empty() as journal:
        write(journal, 1)
        rest = journal.path.read_bytes()[len(TITLE) :]
        journal.path.write_bytes(f"icefloe journal {version}\n".encode() + rest)
        with pytest.raises(UnknownFormat) as caught:
            journal.read()
        assert (caught.value.version, caught.value.known) == (int(version), 1)


@pytest.mark.parametrize(
    "title",
    [
        b"",
        b"\n",
        b"icefloe journal 1",
        b"icefloe journal \n",
        b"icefloe journal 0\n",
        b"icefloe journal -2\n",
        b"icefloe journal 1x\n",
        b"Icefloe journal 1\n",
        b"\xff" * 40,
        "icefloe journal ²\n".encode(),
        "icefloe journal ٣\n".encode(),
    ],
    ids=repr,
)
def test_damaged_title(title: bytes) -> None:
    """Anything else in the first line is damage."""
    with empty() as journal:
        write(journal, 1)
        journal.path.write_bytes(title + journal.path.read_bytes()[len(TITLE) :])
        with pytest.raises(CorruptJournal):
            journal.read()


def test_missing(tmp_path: Path) -> None:
    """A store always has one."""
    with pytest.raises(CorruptJournal, match="missing"):
        Journal(tmp_path / "journal").read()
