"""Manifests: one encoding of each image, and nothing hostile gets through `decode`."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import made_manifests as made
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_manifests import POOL, Run, build, entry

from icefloe.errors import CorruptManifest, LimitReached, UnknownFormat
from icefloe.store import manifest as manifests
from icefloe.store.manifest import HEADER, MAGIC, ZERO, FileKind, ImageFile, Manifest

FOLDER, LINK, HARD = FileKind.FOLDER, FileKind.SYMLINK, FileKind.HARDLINK


def same(a: Manifest, b: Manifest) -> bool:
    """All fields alike."""
    arrays = ("bounds", "blocks", "extents")
    return (a.files, a.facts, a.labels) == (b.files, b.facts, b.labels) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays
    )


def decode_or_refuse(encoded: bytes) -> Manifest | None:
    """A manifest that encodes to exactly these bytes, or one of the two refusals."""
    try:
        manifest = manifests.decode(encoded)
    except (CorruptManifest, UnknownFormat):
        return None
    assert manifests.encode(manifest) == encoded
    return manifest


@given(made.manifests())
@settings(max_examples=200, deadline=None)
def test_round_trip(manifest: Manifest) -> None:
    """What is encoded decodes to the same, and its totals are those of its extents."""
    encoded = manifests.encode(manifest)
    decoded = manifests.decode(encoded)
    assert same(decoded, manifest) and manifests.encode(decoded) == encoded
    zero = sum(decoded.zero_bytes_of(i) for i in range(len(decoded.files)))
    assert decoded.zero_bytes == zero <= decoded.logical_bytes
    assert decoded.raw_bytes == sum(manifest.blocks["length"].tolist())
    assert decoded.block_ids() == [row[0] for row in manifest.blocks.tolist()]


# --- fuzz ---------------------------------------------------------------------------------------


@given(made.manifests(), st.data())
@settings(max_examples=300, deadline=None)
def test_mutated(manifest: Manifest, data: st.DataObject) -> None:
    """Changed bytes, anywhere: refused, or another canonical manifest."""
    encoded = bytearray(manifests.encode(manifest))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(encoded) - 1))
        piece = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 4)))
        encoded[place : place + len(piece)] = piece
    decode_or_refuse(bytes(encoded))


@given(made.manifests(), st.data())
@settings(max_examples=100, deadline=None)
def test_cut_and_lengthened(manifest: Manifest, data: st.DataObject) -> None:
    """Any other length is refused."""
    encoded = manifests.encode(manifest)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    more = data.draw(st.binary(min_size=1, max_size=60))
    for other in (encoded[:cut], encoded + more, more + encoded):
        assert decode_or_refuse(other) is None


@given(st.binary(max_size=200), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3))
@example(b"", 0, 0, 0)
@settings(max_examples=200, deadline=None)
def test_random(noise: bytes, files: int, blocks: int, extents: int) -> None:
    """Random bytes, behind a header that fits their length too."""
    decode_or_refuse(noise)
    rest = len(noise) - files * 48 - blocks * 36 - extents * 16
    if rest >= 0:
        facts = min(rest, 24)
        counts = (files, blocks, extents, rest - facts, facts)
        decode_or_refuse(HEADER.pack(MAGIC, 1, *counts) + noise)


def test_every_bit_of_a_small_one() -> None:
    """Each single flip is refused or canonical; the structure's own bits are all refused."""
    encoded = manifests.encode(plain())
    for i in range(len(encoded) * 8):
        flipped = bytearray(encoded)
        flipped[i // 8] ^= 1 << i % 8
        manifest = decode_or_refuse(bytes(flipped))
        assert manifest is None or i >= 32 * 8


# --- hostile ------------------------------------------------------------------------------------


def plain(
    files: list[ImageFile] | None = None,
    runs: list[list[Run]] | None = None,
    blocks: list[tuple[bytes, int]] | None = None,
    **more: Any,
) -> Manifest:
    """A folder `d` with the file `d/f`, and `g`: valid unless a part is given."""
    if files is None:
        files = [entry("d", FOLDER), entry("d/f", size=1536), entry("g", size=100)]
    if runs is None:
        runs = [[], [(0, 0, 512), (ZERO, 0, 1024)], [(1, 5, 100)]]
    blocks = [POOL[2], POOL[3]] if blocks is None else blocks
    return build(files, runs, blocks, **more)


def refused(manifest: Manifest, reason: str) -> None:
    """`decode` refuses it, and for this reason."""
    with pytest.raises(CorruptManifest, match=reason):
        manifests.decode(manifests.encode(manifest))


def test_plain_is_valid() -> None:
    """Else the refusals below would prove nothing."""
    assert same(manifests.decode(manifests.encode(plain())), plain())


def only(*files: ImageFile) -> Manifest:
    """A manifest of empty files."""
    return build(list(files), [[] for _ in files], [])


@pytest.mark.parametrize(
    "path",
    ["..", "../x", "d/..", "d/../x", "/x", "/", "d/", "d//x", ".", "./x", "d/.", "a\0b", "\0"],
)
def test_paths_that_lead_outside(path: str) -> None:
    """No absolute path, no empty, `.` or `..` part, no NUL."""
    files = sorted([entry("d", FOLDER), entry(path)], key=lambda file: file.path)
    refused(only(*files), "not a plain relative path|lies in no folder")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([entry("a"), entry("a")], "out of order"),
        ([entry("b"), entry("a")], "out of order"),
        ([entry("", FOLDER), entry("", FOLDER)], "out of order"),
        ([entry("")], "root is no folder"),
        ([entry("", LINK, link="/etc")], "root is no folder"),
        ([entry("d/x")], "lies in no folder"),
        ([entry("d", LINK, link="/etc"), entry("d/passwd")], "lies in no folder"),
        ([entry("d"), entry("d/x")], "lies in no folder"),
        ([entry("x" * 4096)], "too long"),
        ([entry("l", LINK, link="x" * 4096)], "too long"),
        ([entry("l", LINK, link="a\0b")], "NUL"),
        ([entry("l", LINK)], "no target"),
        ([entry("a", link="b")], "one too many"),
        ([entry("d", FOLDER, link="b")], "one too many"),
        ([entry("h", HARD)], "no target"),
        ([entry("h", HARD, link="none")], "links to no earlier file"),
        ([entry("h", HARD, link="h")], "links to no earlier file"),
        ([entry("h", HARD, link="later"), entry("later")], "links to no earlier file"),
        ([entry("d", FOLDER), entry("h", HARD, link="d")], "links to no earlier file"),
        ([entry("a", LINK, link="/x"), entry("h", HARD, link="a")], "links to no earlier file"),
        ([entry("a"), entry("b", HARD, link="a"), entry("c", HARD, link="b")], "no earlier file"),
        ([entry("a"), entry("h", HARD, link="/a")], "links to no earlier file"),
        ([entry("a", mode=0o10000)], "impossible mode"),
        ([entry("a", mode=0o100644)], "impossible mode"),
        ([entry("d", FOLDER, size=1)], "has a size"),
        ([entry("p", FileKind.FIFO, size=1)], "has a size"),
        ([entry("a"), entry("h", HARD, link="a", size=1)], "has a size"),
        ([entry("a", device=1)], "no device"),
        ([entry("a", size=1)], "size is not its extents'"),
        ([entry("a", size=(1 << 64) - 1)], "size is not its extents'"),
    ],
)
def test_hostile_entries(files: list[ImageFile], reason: str) -> None:
    """Each refused, and for its own reason."""
    refused(only(*files), reason)


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([[], [(0, 0, 513), (ZERO, 0, 1023)], [(1, 5, 100)]], "outside its block"),
        ([[], [(0, 1, 512), (ZERO, 0, 1024)], [(1, 5, 100)]], "outside its block"),
        ([[], [(0, 0, 512), (ZERO, 0, 1024)], [(1, 65437, 100)]], "outside its block"),
        ([[], [(0, 0, 512), (ZERO, 0, 1024)], [(1, ZERO, 100)]], "outside its block"),
        ([[], [(0, 0, 512), (ZERO, 0, 1023)], [(1, 5, 100)]], "size is not its extents'"),
        ([[], [(0, 0, 512), (ZERO, 0, 1024)], [(1, 5, 101)]], "size is not its extents'"),
        ([[], [(0, 0, 512), (ZERO, 0, 1024), (1, 5, 100)], []], "size is not its extents'"),
        ([[(0, 0, 512)], [(ZERO, 0, 1536)], [(1, 5, 100)]], "size is not its extents'"),
        ([[], [(0, 0, 512), (ZERO, 1, 1024)], [(1, 5, 100)]], "zero extent has an offset"),
        ([[], [(0, 0, 512), (ZERO, 0, 0)], [(1, 5, 100)]], "no valid length"),
        ([[], [(0, 0, 512), (ZERO, 0, 1 << 48)], [(1, 5, 100)]], "no valid length"),
        ([[], [(0, 0, 512), (ZERO, 0, (1 << 64) - 1)], [(1, 5, 100)]], "no valid length"),
        ([[], [(0, 0, 512), (ZERO, 0, 24), (ZERO, 0, 1000)], [(1, 5, 100)]], "not merged"),
        ([[], [(0, 0, 12), (0, 12, 500), (ZERO, 0, 1024)], [(1, 5, 100)]], "not merged"),
        ([[], [(1, 0, 512), (ZERO, 0, 1024)], [(0, 5, 100)]], "order of first use"),
        ([[], [(0, 0, 512), (ZERO, 0, 1024)], [(0, 5, 100)]], "no extent names"),
        ([[], [(0, 0, 512), (ZERO, 0, 1024)], [(2, 5, 100)]], "no extent names"),
        ([[], [(0, 0, 512), (ZERO, 0, 1024)], [(ZERO - 1, 5, 100)]], "no extent names"),
    ],
)
def test_hostile_extents(runs: list[list[Run]], reason: str) -> None:
    """Extents outside their block or file, split, out of order: each refused."""
    refused(plain(runs=runs), reason)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([POOL[2]], "no extent names"),
        ([POOL[2], POOL[3], POOL[4]], "no extent names"),
        ([POOL[2], (POOL[2][0], 65536)], "listed twice"),
        ([POOL[2], (POOL[3][0], 0)], "no valid length"),
        ([POOL[2], (POOL[3][0], (1 << 20) + 1)], "no valid length"),
        ([POOL[2], (POOL[3][0], (1 << 32) - 1)], "no valid length"),
        ([], "no extent names"),
    ],
)
def test_hostile_blocks(blocks: list[tuple[bytes, int]], reason: str) -> None:
    """Too many, too few, twice, too large, empty."""
    refused(plain(blocks=blocks), reason)


def test_neighbours_in_two_files_are_two_extents() -> None:
    """Only extents of one file are merged; an empty file between them changes nothing."""
    files = [entry("a", size=5), entry("b"), entry("c", size=7)]
    runs: list[list[Run]] = [[(0, 0, 5)], [], [(0, 5, 7)]]
    assert decode_or_refuse(manifests.encode(build(files, runs, [POOL[2]]))) is not None
    files = [entry("a", size=5), entry("b", size=7)]
    zero: list[list[Run]] = [[(ZERO, 0, 5)], [(ZERO, 0, 7)]]
    assert decode_or_refuse(manifests.encode(build(files, zero, []))) is not None


def patched(offset: int, value: bytes) -> bytes:
    """The plain manifest with some bytes replaced."""
    encoded = manifests.encode(plain())
    return encoded[:offset] + value + encoded[offset + len(value) :]


FILE = HEADER.size


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"ICEFPACK"),
        (8, b"\0"),
        *((offset, b"\xff" * 4) for offset in range(12, 32, 4)),  # each count
        (FILE + 4, b"\x08"),
        (FILE + 4, b"\xff"),
        (FILE + 5, b"\x01"),
        (FILE, b"\xff\xff"),
        (FILE + 2, b"\xff\xff"),
        (FILE + 16, (1_000_000_000).to_bytes(4, "little")),
        (FILE + 16, b"\xff" * 4),
        (FILE + 20, b"\x01"),
        (FILE + 20, b"\xff" * 4),
    ],
)
def test_hostile_rows(offset: int, value: bytes) -> None:
    """Wrong magic, version 0, huge counts, unknown kinds, reserved bytes, impossible times."""
    with pytest.raises(CorruptManifest):
        manifests.decode(patched(offset, value))


def test_newer_version() -> None:
    """Told apart from damage."""
    with pytest.raises(UnknownFormat) as caught:
        manifests.decode(patched(8, b"\x02"))
    assert (caught.value.version, caught.value.known) == (2, 1)


def test_huge_counts_take_no_memory() -> None:
    """Counts are compared with the length before anything is made of them."""
    head = HEADER.pack(MAGIC, 1, *[(1 << 32) - 1] * 5)
    tracemalloc.start()
    try:
        assert decode_or_refuse(head + bytes(500)) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_extents_that_add_up_to_too_much() -> None:
    """Many of the longest extents would overflow 64 bits: refused."""
    pair: list[Run] = [(ZERO, 0, (1 << 48) - 1), (0, 0, 1)]
    count = 1 << 16
    size = count * (1 << 48) % (1 << 64)
    manifest = build([entry("a", size=size)], [pair * count], [POOL[0]])
    assert decode_or_refuse(manifests.encode(manifest)) is None


def with_facts(facts: bytes) -> bytes:
    """An empty image with these bytes in place of its facts."""
    return HEADER.pack(MAGIC, 1, 0, 0, 0, 0, len(facts)) + facts


@pytest.mark.parametrize(
    "facts",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"facts":{}}',
        b'{"labels":{}}',
        b'{"labels":{},"facts":{}}',
        b'{"facts":{},"labels":{},"more":1}',
        b'{"facts":{},"labels":{} }',
        b'{"facts": {},"labels":{}}',
        b'{"facts":{},"labels":{}}\n',
        b'{"facts":{},"facts":{},"labels":{}}',
        b'{"facts":{"b":1,"a":2},"labels":{}}',
        b'{"facts":{"a":1,"a":1},"labels":{}}',
        b'{"facts":{"a":1.00},"labels":{}}',
        b'{"facts":{"a":1E2},"labels":{}}',
        b'{"facts":{"a":"\xc3\xa9"},"labels":{}}',
        b'{"facts":{"a":"\\u0041"},"labels":{}}',
        b'{"facts":{"a":"\\u00E9"},"labels":{}}',
        b'{"facts":[],"labels":{}}',
        b'{"facts":{},"labels":[]}',
        b'{"facts":null,"labels":{}}',
        b'{"facts":{},"labels":{"a":1}}',
        b'{"facts":{},"labels":{"a":null}}',
        b'{"facts":' + b"[" * 100_000 + b',"labels":{}}',
        b'{"facts":{"a":' + b"9" * 5000 + b'},"labels":{}}',
    ],
    ids=lambda facts: facts[:40].decode("latin-1"),
)
def test_facts_not_canonical(facts: bytes) -> None:
    """Every other way to write JSON, and every other document."""
    with pytest.raises(CorruptManifest):
        manifests.decode(with_facts(facts))


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_facts_that_are_no_json(number: bytes) -> None:
    """Python's json takes these; JSON and any other reader of the format don't."""
    with pytest.raises(CorruptManifest):
        manifests.decode(with_facts(b'{"facts":{"a":' + number + b'},"labels":{}}'))


def test_facts_canonical() -> None:
    """The control for the refusals above."""
    encoded = with_facts(b'{"facts":{"a":[1,2.5,null,"\\u00e9"]},"labels":{"k":"v"}}')
    assert decode_or_refuse(encoded) is not None


def test_encode_refuses_what_is_too_large() -> None:
    """256 MiB, and not a byte more."""
    room = (256 << 20) - len(manifests.encode(build([], [], [], {}, {"k": ""})))
    assert len(manifests.encode(build([], [], [], {}, {"k": "x" * room}))) == 256 << 20
    with pytest.raises(LimitReached):
        manifests.encode(build([], [], [], {}, {"k": "x" * (room + 1)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda file: replace(file, path="d/é\udcff"),
        lambda file: replace(file, mtime_ns=-1),
        lambda file: replace(file, mtime_ns=-(1 << 63) * 10**9),
        lambda file: replace(file, uid=(1 << 32) - 1, gid=(1 << 32) - 1, mode=0o7777),
    ],
)
def test_fields_at_their_limits(change: Callable[[ImageFile], ImageFile]) -> None:
    """Not UTF-8, before 1970, the largest owners: all kept."""
    folder, file, other = plain().files
    manifest = plain(files=[folder, change(file), other])
    assert manifests.decode(manifests.encode(manifest)).files == manifest.files
