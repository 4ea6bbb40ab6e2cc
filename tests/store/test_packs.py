"""Packs: writer and reader against each other, and indexes that are damaged or hostile."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import pytest
import slow_chunker as slow
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from icefloe.errors import CorruptBlock, CorruptPack, MissingPack, UnknownFormat
from icefloe.ids import BlockId, PackId, block_id
from icefloe.store import pack as packs
from icefloe.store.codecs import Codec
from icefloe.store.layout import Layout, describe, make_folders
from icefloe.store.pack import INDEX_DTYPE, TRAILER, Index, Kind, StoredBlock, read_index
from icefloe.store.reader import BlockReader, Location
from icefloe.store.verify import verify_pack
from icefloe.store.writer import PackWriter


@contextmanager
def empty_store() -> Iterator[Layout]:
    """A store without packs, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(Path(folder))
        make_folders(layout)
        describe(layout)
        yield layout


def stored(raw: bytes, codec: Codec, kind: Kind = Kind.DATA) -> StoredBlock:
    """A block in the codec that is wanted."""
    payload = raw
    if codec == Codec.LZ4:
        payload = lz4.block.compress(raw, store_size=False)
    elif codec == Codec.ZSTD:
        payload = zstandard.ZstdCompressor().compress(raw)
    if len(payload) > len(raw):
        codec, payload = Codec.RAW, raw
    return StoredBlock(block_id(raw), kind, codec, len(raw), payload)


def write(layout: Layout, blocks: Sequence[StoredBlock], target: int, batch: int) -> list[PackId]:
    """Appends the blocks `batch` at a time."""
    writer = PackWriter(layout, target)
    for first in range(0, len(blocks), batch):
        writer.append(blocks[first : first + batch])
    written = writer.finish()
    assert writer.stored_bytes == sum(layout.pack(p).stat().st_size for p in written)
    assert not list(layout.staging.iterdir())
    return written


def locations(layout: Layout, pack: PackId) -> list[Location]:
    """Every block of a pack, as its index says."""
    return [
        Location(BlockId(identity), pack, offset, size, raw, codec)
        for identity, offset, size, raw, codec, _, _ in read_index(layout.pack(pack)).tolist()
    ]


def make_raw(number: int, length: int, dense: bool) -> bytes:
    """Block number `number`, unlike all others; dense ones don't shrink."""
    head = number.to_bytes(4, "little")
    body = slow.noise(min(length, 3000), number) * 7 if dense else b""
    return (head + body).ljust(length, b"-")[: max(length, 4)]


shapes = st.tuples(
    st.sampled_from([1, 100, 4095, 4096, 4097, 20_000, 70_000]),
    st.booleans(),
    st.sampled_from([Codec.RAW, Codec.LZ4, Codec.ZSTD]),
)


@given(
    st.lists(shapes, min_size=1, max_size=25),
    st.sampled_from([1, 5000, 60_000, 1 << 20]),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_round_trip(
    shape: list[tuple[int, bool, Codec]], target: int, batch: int, rng: Any
) -> None:
    """Blocks come back in any order, packs verify, raw payloads stand on pages."""
    raws = {i: make_raw(i, length, dense) for i, (length, dense, _) in enumerate(shape)}
    blocks = [stored(raws[i], codec) for i, (_, _, codec) in enumerate(shape)]
    by_id = {block_id(raw): raw for raw in raws.values()}
    with empty_store() as layout:
        written = write(layout, blocks, target, batch)
        found = [where for pack in written for where in locations(layout, pack)]
        assert [where.id for where in found] == [block.id for block in blocks]
        for where in found:
            assert where.codec != Codec.RAW or where.raw < 4096 or where.offset % 4096 == 0
        assert sorted(layout.published()) == sorted(written)
        assert [list(verify_pack(layout, pack)) for pack in written] == [[]] * len(written)
        if target == 1:
            assert len(written) == len(blocks)
        with BlockReader(layout) as reader:
            check_reading(reader, found, by_id)
            some = [where for where in found if rng.random() < 0.5]
            check_reading(reader, some, by_id)
            rng.shuffle(some)
            check_reading(reader, some + some[:3], by_id)


def check_reading(
    reader: BlockReader, wanted: Sequence[Location], by_id: dict[BlockId, bytes]
) -> None:
    """What comes is what was asked for, in that order."""
    assert [bytes(raw) for raw in reader.read(wanted)] == [by_id[w.id] for w in wanted]


def test_same_blocks_same_pack() -> None:
    """A pack's id is that of its index; published files have no other name and mode 0600."""
    blocks = [stored(make_raw(i, 5000, True), Codec.RAW) for i in range(4)]
    with empty_store() as one, empty_store() as two:
        (first,), (second,) = (write(layout, blocks, 1 << 20, 2) for layout in (one, two))
        path = one.pack(first)
        assert first == second
        assert path.read_bytes() == two.pack(second).read_bytes()
        assert first == packs.pack_id(read_index(path)) and path.stat().st_mode & 0o777 == 0o600


def test_wide_gaps_and_large_blocks() -> None:
    """Reads that skip more than what is read through, and a manifest larger than one read."""
    raws = [slow.noise(300_000, i) for i in range(4)]
    large = slow.noise(100_000, 9) * 100
    blocks = [stored(raw, Codec.RAW) for raw in raws]
    blocks.append(stored(large, Codec.RAW, Kind.MANIFEST))
    with empty_store() as layout:
        (pack,) = write(layout, blocks, 1 << 30, 1)
        found = locations(layout, pack)
        with BlockReader(layout) as reader:
            by_id = {block_id(raw): raw for raw in [*raws, large]}
            check_reading(reader, [found[0], found[3], found[4], found[1], found[4]], by_id)
            check_reading(reader, found, by_id)
        assert not list(verify_pack(layout, pack))


def test_more_packs_than_are_held_open() -> None:
    """Reading to and fro between many packs."""
    raws = [make_raw(i, 100, True) for i in range(30)]
    with empty_store() as layout:
        written = write(layout, [stored(raw, Codec.RAW) for raw in raws], 1, 30)
        found = [where for pack in written for where in locations(layout, pack)]
        before = len(os.listdir("/proc/self/fd"))
        with BlockReader(layout) as reader:
            check_reading(reader, found + found[::-1], {block_id(raw): raw for raw in raws})
            assert len(os.listdir("/proc/self/fd")) <= before + 9
        assert len(os.listdir("/proc/self/fd")) == before


def test_reading_what_is_damaged_or_gone() -> None:
    """A wrong byte, a pack cut short, a wrong codec and a lost pack each raise their error."""
    with empty_store() as layout:
        (pack,) = write(layout, [stored(slow.noise(9000, 1), Codec.RAW)], 1 << 20, 1)
        (where,) = locations(layout, pack)
        path = layout.pack(pack)
        content = bytearray(path.read_bytes())
        with BlockReader(layout) as reader:
            content[where.offset + 5] ^= 4
            path.write_bytes(content)
            with pytest.raises(CorruptBlock) as caught:
                reader.read_one(where)
            assert (caught.value.pack, caught.value.offset) == (path, where.offset)
            os.truncate(path, where.end - 1)
            with pytest.raises(CorruptBlock):
                reader.read_one(where)
            other = Location(where.id, pack, where.offset, where.stored, where.raw, 7)
            with pytest.raises(CorruptBlock):
                reader.read_one(other)
        path.unlink()
        with BlockReader(layout) as reader, pytest.raises(MissingPack):
            reader.read_one(where)


def test_a_writer_that_failed_refuses_more() -> None:
    """After an error only `abort` is left, and nothing is published."""
    with empty_store() as layout:
        writer = PackWriter(layout)
        good = stored(b"a" * 50, Codec.RAW)
        bad = StoredBlock(BlockId(b"short"), Kind.DATA, Codec.RAW, -1, b"x")
        writer.append([good])
        with pytest.raises(Exception, match="argument|range|format"):
            writer.append([bad])
        for attempt in (lambda: writer.append([good]), writer.finish):
            with pytest.raises(RuntimeError):
                attempt()
        writer.abort()
        assert not list(layout.staging.iterdir()) and not list(layout.published())


def test_abort_leaves_no_descriptor_open() -> None:
    """However many packs still wait for the disk."""
    before = len(os.listdir("/proc/self/fd"))
    with empty_store() as layout:
        writer = PackWriter(layout, 1)
        writer.append([stored(make_raw(i, 100, True), Codec.RAW) for i in range(12)])
        writer.abort()
        left = [path.name for path in layout.staging.iterdir()]
        opened = len(os.listdir("/proc/self/fd")) - before
        assert (opened, left) == (0, [])


def test_other_files_beside_packs_are_passed_over() -> None:
    """As `Layout.published` says: whatever has another name."""
    with empty_store() as layout:
        (pack,) = write(layout, [stored(b"abc" * 50, Codec.RAW)], 1 << 20, 1)
        folder = layout.pack(pack).parent
        for name in ("README", folder.name + "z" * 62, folder.name + "F" * 62, "x" * 64):
            (folder / name).touch()
        (layout.packs / "0f0").mkdir()
        assert list(layout.published()) == [pack]


# --- damaged and hostile indexes ----------------------------------------------------------------


def a_pack() -> bytes:
    """A small pack of all kinds, as bytes."""
    blocks = [
        stored(b"one " * 30, Codec.ZSTD),
        stored(slow.noise(4096, 1), Codec.RAW),
        stored(b"two " * 300, Codec.LZ4),
        stored(b"{}" * 40, Codec.RAW, Kind.MANIFEST),
    ]
    with empty_store() as layout:
        (pack,) = write(layout, blocks, 1 << 20, 4)
        return layout.pack(pack).read_bytes()


PACK = a_pack()


def index_of(content: bytes) -> Index | None:
    """What read_index makes of these bytes: an index, or one of its two refusals."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            return read_index(Path(file.name))
        except (CorruptPack, UnknownFormat):
            return None


def test_every_single_bit() -> None:
    """A flipped bit of header, index or trailer is found; one elsewhere leaves the index as is."""
    whole = index_of(PACK)
    assert whole is not None
    frame = {*range(16), *range(len(PACK) - TRAILER.size - whole.nbytes, len(PACK))}
    for position in sorted(frame | set(range(16, len(PACK), 97))):
        damaged = bytearray(PACK)
        damaged[position] ^= 1 << position % 8
        found = index_of(bytes(damaged))
        assert (found is None) == (position in frame), position
        assert found is None or (found == whole).all()


@given(st.integers(0, len(PACK) - 1))
@settings(max_examples=150, deadline=None)
def test_truncated(length: int) -> None:
    """A pack without its end was never published."""
    assert index_of(PACK[:length]) is None


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_mutated(data: st.DataObject) -> None:
    """Several edits at once, near the end where the index is; never another error."""
    content = bytearray(PACK)
    for _ in range(data.draw(st.integers(1, 4))):
        place = len(content) - data.draw(st.integers(0, min(len(content), 400)))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "copy"]))
        piece = data.draw(st.binary(min_size=1, max_size=12))
        if kind == "set":
            content[place : place + len(piece)] = piece
        elif kind == "insert":
            content[place:place] = piece
        elif kind == "delete":
            del content[place : place + len(piece)]
        else:
            content += content[place : place + 64]
    index_of(bytes(content))


@given(st.binary(max_size=300), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_random(noise: bytes, framing: int) -> None:
    """Random bytes, between a right header and a right trailer too."""
    head = packs.header() if framing & 1 else b""
    end = packs.trailer(16, len(noise) // 52, blake3(noise).digest()) if framing & 2 else b""
    index_of(head + noise + end)


def hostile(rows: Index, blocks_end: int) -> Index | None:
    """A pack of zeros with this index, its hash right."""
    raw = rows.tobytes()
    body = packs.header().ljust(blocks_end, b"\0") + raw
    return index_of(body + packs.trailer(blocks_end, len(rows), blake3(raw).digest()))


def good_rows() -> Index:
    """Three blocks of 100, 4096 (raw, on a page) and 200 bytes."""
    rows = [
        (b"a" * 32, 64, 100, 200, 2, 1, 0),
        (b"b" * 32, 4096, 4096, 4096, 0, 1, 0),
        (b"c" * 32, 8240, 200, 900, 2, 2, 0),
    ]
    index: Index = np.array(rows, INDEX_DTYPE)
    return index


BLOCKS_END = 8440


def test_the_rows_are_good_as_they_are() -> None:
    """Else the refusals below would prove nothing."""
    assert hostile(good_rows(), BLOCKS_END) is not None
    assert hostile(good_rows()[:0], 16) is not None


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        (0, "offset", 0),
        (0, "offset", 63),
        (0, "offset", 64 + 4096),
        (2, "offset", 8241),
        (2, "offset", 1 << 62),
        (2, "offset", (1 << 63) - 1),
        (2, "offset", 1 << 63),
        (2, "offset", (1 << 64) - 1),
        (1, "offset", 100),
        (0, "stored", 0),
        (0, "stored", 201),
        (0, "stored", (1 << 32) - 1),
        (2, "stored", 201),
        (0, "raw", 0),
        (0, "raw", 99),
        (0, "raw", (1 << 20) + 1),
        (0, "raw", (1 << 32) - 1),
        (2, "raw", (256 << 20) + 1),
        (0, "kind", 0),
        (0, "kind", 3),
        (0, "kind", 255),
        (1, "reserved", 1),
        (1, "reserved", 0x8000),
    ],
)
def test_rows_out_of_bounds(row: int, field: str, value: int) -> None:
    """The hash is right, the row is not."""
    rows = good_rows()
    rows[field][row] = value
    assert hostile(rows, BLOCKS_END) is None


def test_rows_out_of_order() -> None:
    """Rows come in the order of the file, and none twice."""
    rows = good_rows()
    assert hostile(rows[[1, 0, 2]], BLOCKS_END) is None
    assert hostile(rows[[0, 0, 1, 2]], BLOCKS_END) is None


numbers = st.one_of(st.integers(0, 5000), st.sampled_from([1 << 31, (1 << 32) - 1]))


@given(
    st.lists(
        st.tuples(numbers | st.integers(0, (1 << 64) - 1), numbers, numbers, st.integers(0, 4)),
        max_size=4,
    )
)
@settings(max_examples=200, deadline=None)
def test_random_rows(rows: list[tuple[int, int, int, int]]) -> None:
    """What is accepted lies in the file, in order, without overlap."""
    full = [
        (bytes([i]) * 32, at, size, raw, 0, kind, 0) for i, (at, size, raw, kind) in enumerate(rows)
    ]
    found = hostile(np.array(full, INDEX_DTYPE), BLOCKS_END)
    end = 16
    for _, offset, size, raw, _, kind, _ in [] if found is None else found.tolist():
        assert offset >= end + 48 and 0 < size <= raw <= 1 << (20 if kind == 1 else 28)
        end = offset + size
    assert end <= BLOCKS_END


def test_frames_from_other_versions() -> None:
    """A newer version is told apart from damage; trailer and header must agree."""
    version = PACK[:8] + (2).to_bytes(4, "little") + PACK[12:]
    with tempfile.NamedTemporaryFile() as file:
        file.write(version)
        file.flush()
        with pytest.raises(UnknownFormat) as caught:
            read_index(Path(file.name))
    assert (caught.value.version, caught.value.known) == (2, 1)
    zero = (
        PACK[:8] + bytes(4) + PACK[12 : -TRAILER.size + 12] + bytes(4) + PACK[-TRAILER.size + 16 :]
    )
    assert index_of(zero) is None


def test_missing(tmp_path: Path) -> None:
    """A pack that is not there has an error of its own."""
    with pytest.raises(MissingPack):
        read_index(tmp_path / "none")
