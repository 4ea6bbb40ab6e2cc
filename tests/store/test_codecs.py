"""Codecs: what goes in comes out, never larger; what is garbage is refused, in bounded memory."""

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from typing import get_args

import lz4.block
import numpy as np
import pytest
import slow_chunker as slow
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from icefloe.durable import Buffer
from icefloe.store.codecs import KNOWN_CODECS, Codec, Decoder, Encoder, Undecodable
from icefloe.store.policies import PolicyName

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
policies = st.sampled_from(POLICIES)

plain = st.binary(min_size=1, max_size=9000)
repeated = st.builds(lambda part, times: part * times, st.binary(min_size=1), st.integers(1, 900))
half = st.builds(lambda a, length: a + bytes(length), plain, st.integers(1, 30_000))

WIDTHS = {Codec.PLANES2_ZSTD: 2, Codec.PLANES4_ZSTD: 4}
CODED = [Codec.LZ4, Codec.ZSTD, *WIDTHS]
planes_codecs = pytest.mark.parametrize("codec", list(WIDTHS))
MIB = 1 << 20


def floats(count: int, seed: int) -> NDArray[np.float32]:
    """Weights of a layer."""
    return np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")


def bf16(length: int, seed: int = 1) -> bytes:
    """Weights as the upper 16 bits of single precision. `length` any number, as everywhere here."""
    return floats(length // 2 + 1, seed).view("<u2")[1::2].tobytes()[:length]


def fp16(length: int, seed: int = 1) -> bytes:
    """Weights in half precision."""
    return floats(length // 2 + 1, seed).astype("<f2").tobytes()[:length]


def fp32(length: int, seed: int = 1) -> bytes:
    """Weights in single precision."""
    return floats(length // 4 + 1, seed).tobytes()[:length]


WEIGHTS = [bf16, fp16, fp32]
weights = st.builds(
    lambda kind, length, seed: kind(length, seed),
    st.sampled_from(WEIGHTS),
    st.integers(1, 9000),
    st.integers(0, 99),
)

# --- what an encoder makes ----------------------------------------------------------------------


@given(st.one_of(plain, repeated, half, weights), policies)
@settings(max_examples=200, deadline=None)
def test_round_trip(raw: bytes, policy: PolicyName) -> None:
    """Any bytes, any policy; the payload is never larger, and as large only when raw."""
    coded = Encoder(policy).encode(memoryview(raw))
    assert coded.codec in KNOWN_CODECS
    assert len(coded.payload) < len(raw) or coded.codec == Codec.RAW
    assert len(coded.payload) <= len(raw)
    assert Decoder().decode(coded.codec, coded.payload, len(raw)) == raw


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [1, 4096, 4097, 1 << 20])
def test_round_trip_of_large_blocks(policy: PolicyName, length: int) -> None:
    """The limits of a block: noise stays raw, text shrinks."""
    noise = slow.noise(length, 2)
    text = (b"the quick brown fox %d " * length)[:length]
    encoder, decoder = Encoder(policy), Decoder()
    for raw in (noise, text):
        coded = encoder.encode(memoryview(raw))
        assert decoder.decode(coded.codec, coded.payload, length) == raw
    assert encoder.encode(memoryview(noise)).codec == Codec.RAW
    if length >= 4096:
        wanted = Codec.LZ4 if policy == "fast" else Codec.ZSTD
        assert encoder.encode(memoryview(text)).codec == wanted


@pytest.mark.parametrize("policy", ["balanced", "small"])
@pytest.mark.parametrize(
    ("make", "codec", "most"),
    [
        (bf16, Codec.PLANES2_ZSTD, 0.68),
        (fp16, Codec.PLANES2_ZSTD, 0.86),
        (fp32, Codec.PLANES4_ZSTD, 0.84),
    ],
)
def test_weights_are_taken_apart(
    make: Callable[[int, int], bytes], codec: Codec, most: float, policy: PolicyName
) -> None:
    """In planes of the width that their numbers have, whatever the sample was."""
    encoder, decoder = Encoder(policy), Decoder()
    for seed in range(5):
        raw = make(256 << 10, seed)
        coded = encoder.encode(memoryview(raw))
        assert decoder.decode(coded.codec, coded.payload, len(raw)) == raw
        assert len(coded.payload) <= most * len(raw)
        assert coded.codec == codec


@pytest.mark.parametrize("policy", POLICIES)
def test_text_and_noise_are_not(policy: PolicyName) -> None:
    """Nor is anything by the policy that knows lz4 only."""
    text = b"".join(b"%d: the quick brown fox\n" % (i * i) for i in range(12_000))[: 256 << 10]
    noise = np.random.default_rng(3).bytes(256 << 10)
    encoder = Encoder(policy)
    wanted = Codec.LZ4 if policy == "fast" else Codec.ZSTD
    assert encoder.encode(memoryview(text)).codec == wanted
    assert encoder.encode(memoryview(noise)).codec == Codec.RAW
    if policy == "fast":
        assert not {encoder.encode(memoryview(make(8192))).codec for make in WEIGHTS} & {*WIDTHS}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", WEIGHTS)
def test_weights_of_any_length(make: Callable[[int], bytes], policy: PolicyName) -> None:
    """Around the size of a sample, around that of a block, with any tail; cut amid a number too."""
    encoder, decoder = Encoder(policy), Decoder()
    for length in (1, 2, 3, 5, 7, 1023, 4093, *range(4095, 4101), 8191, 65537, 100_003, MIB):
        whole = make(length + 3)
        for start in (0, 1, 3) if length < MIB else (0,):
            raw = memoryview(whole)[start : start + length]
            coded = encoder.encode(raw)
            assert len(coded.payload) < length or coded.codec == Codec.RAW
            assert len(coded.payload) <= length
            assert decoder.decode(coded.codec, coded.payload, length) == raw
            if policy != "fast" and length > 8000:
                assert coded.codec in WIDTHS


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_are_not_what_they_seem(policy: PolicyName) -> None:
    """Noise that looks like weights in many places, and the other way round: never larger."""
    encoder, decoder = Encoder(policy), Decoder()
    for length in (4100, 9000, 66_563):
        kinds = [make(length) for make in WEIGHTS] + [b"-" * length]
        noise = np.random.default_rng(7).bytes(length)
        for good in kinds:
            for front, back in ((good, noise), (noise, good)):
                raw = bytearray(back)
                for i in range(4):  # where the sample is taken, as it is now
                    at = (length - 1024) // 3 // 4 * 4 * i
                    raw[at : at + 1024] = front[at : at + 1024]
                coded = encoder.encode(memoryview(raw))
                assert len(coded.payload) < length or coded.codec == Codec.RAW
                assert decoder.decode(coded.codec, coded.payload, length) == raw


class SameLength:
    """Makes frames that are as long as what is in them."""

    def compress(self, plane: Buffer) -> bytes:
        return bytes(len(plane))


def test_a_frame_as_long_as_its_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would be read as the plane: the plane itself is stored."""
    encoder, raw = Encoder("balanced"), fp32(8192)
    monkeypatch.setattr(encoder, "_entropy_coder", SameLength())
    coded = encoder.encode(memoryview(raw))
    assert Decoder().decode(coded.codec, coded.payload, len(raw)) == raw
    pieces = encoder._encode_planes(memoryview(raw), 4, [True] * 4)
    assert Decoder().decode(Codec.PLANES4_ZSTD, pieces, len(raw)) == raw


# --- payloads of other writers ------------------------------------------------------------------

Coder = Callable[[bytes], bytes]


def as_is(plane: bytes) -> bytes:
    """No coding."""
    return plane


def zstd(plane: bytes, level: int = 1) -> bytes:
    """A frame as it should be."""
    return zstandard.ZstdCompressor(level=level).compress(plane)


def checked(plane: bytes) -> bytes:
    """A frame that ends with a checksum, which the format allows."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(plane)


def planes_of(raw: bytes, width: int) -> tuple[list[bytes], bytes]:
    """Planes and tail, as docs/format.md has them."""
    end = len(raw) - len(raw) % width
    return [raw[:end][rank::width] for rank in range(width)], raw[end:]


def put_together(stored: Sequence[bytes], tail: bytes) -> bytes:
    """A payload of planes, from what each is stored as."""
    return struct.pack(f"<{len(stored)}I", *map(len, stored)) + b"".join(stored) + tail


def planes_payload(raw: bytes, coders: Sequence[Coder]) -> bytes:
    """One coder for each plane; none where the plane is empty, or as long as its frame."""
    parts, tail = planes_of(raw, len(coders))
    coded = [coder(part) for coder, part in zip(coders, parts, strict=True)]
    unlike = [
        part if len(frame) == len(part) or not part else frame
        for frame, part in zip(coded, parts, strict=True)
    ]
    return put_together(unlike, tail)


def compressed(codec: Codec, raw: bytes) -> bytes:
    """A payload as any writer may make it."""
    if codec == Codec.RAW:
        return raw
    if codec == Codec.ZSTD:
        return zstd(raw, 3)
    if codec in WIDTHS:
        return planes_payload(raw, [zstd] * WIDTHS[codec])
    payload: bytes = lz4.block.compress(raw, store_size=False)
    return payload


@given(st.data(), st.sampled_from(list(WIDTHS)))
@settings(max_examples=100, deadline=None)
def test_planes_by_hand(data: st.DataObject, codec: Codec) -> None:
    """Any bytes, each plane coded or not: what the page says is what is read."""
    raw = data.draw(st.one_of(plain, repeated, half, weights))
    some = st.lists(
        st.sampled_from([as_is, zstd, checked]), min_size=WIDTHS[codec], max_size=WIDTHS[codec]
    )
    payload = planes_payload(raw, data.draw(some))
    assert Decoder().decode(codec, payload, len(raw)) == raw
    assert one(Decoder(), codec, payload, len(raw)) == raw


def one(decoder: Decoder, codec: int, payload: bytes, length: int) -> Buffer:
    """`decode_all` for one block."""
    (raw,) = decoder.decode_all([codec], [payload], [length])
    return raw


BOTH = [Decoder.decode, one]
"""The two ways to decode a block; they refuse the same but where a test says otherwise."""


@given(st.sampled_from(range(7)), st.binary(max_size=400), st.integers(1, 5000))
@settings(max_examples=300, deadline=None)
def test_garbage(codec: int, payload: bytes, raw_length: int) -> None:
    """Any bytes under any codec number: the declared length, or Undecodable."""
    decoded_or_refused(codec, payload, raw_length)


@given(st.sampled_from(list(WIDTHS)), st.data(), st.integers(4, 400))
@settings(max_examples=200, deadline=None)
def test_garbage_in_planes(codec: Codec, data: st.DataObject, raw_length: int) -> None:
    """Tables of likely and unlikely numbers, with anything behind them."""
    size = raw_length // WIDTHS[codec]
    number = st.sampled_from([0, 1, size - 1, size, size + 1, raw_length, (1 << 32) - 1])
    number = st.one_of(number, st.integers(0, size + 20))
    table = data.draw(st.lists(number, min_size=WIDTHS[codec], max_size=WIDTHS[codec]))
    frame = st.binary(max_size=size + 9).map(zstd)
    behind = data.draw(st.lists(st.one_of(st.just(bytes(size)), frame, st.binary()), max_size=5))
    payload = struct.pack(f"<{len(table)}I", *table) + b"".join(behind)
    decoded_or_refused(codec, payload, raw_length)


def decoded_or_refused(codec: int, payload: bytes, raw_length: int) -> None:
    """Nothing else than the right length and Undecodable may come out, and both ways the same."""
    found = []
    for decode in BOTH:
        try:
            found.append(bytes(decode(Decoder(), codec, payload, raw_length)))
        except Undecodable:
            continue
        assert codec in KNOWN_CODECS and len(found[-1]) == raw_length
    assert len({*found}) <= 1


@given(st.data(), st.sampled_from(CODED))
@settings(max_examples=250, deadline=None)
def test_damaged_payloads(data: st.DataObject, codec: Codec) -> None:
    """Changed, cut and lengthened payloads."""
    raw = data.draw(st.one_of(repeated, weights))
    payload = bytearray(compressed(codec, raw))
    kind = data.draw(st.sampled_from(["flip", "cut", "more", "front"]))
    if kind == "flip":
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    elif kind == "more":
        payload += data.draw(st.binary(min_size=1, max_size=20))
    else:
        payload[data.draw(st.integers(0, min(15, len(payload) - 1)))] = data.draw(
            st.integers(0, 255)
        )
    decoded_or_refused(codec, bytes(payload), len(raw))


@pytest.mark.parametrize("codec", CODED)
def test_another_length_is_refused(codec: Codec) -> None:
    """A payload of 32 MiB that says otherwise."""
    payload = compressed(codec, bytes(32 << 20))
    for declared in (1000, MIB, (32 << 20) - 4, (32 << 20) - 1, (32 << 20) + 1, (32 << 20) + 4):
        for decode in BOTH:
            with pytest.raises(Undecodable):
                decode(Decoder(), codec, payload, declared)


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("decode", BOTH)
def test_bombs_take_no_memory(decode: Callable[..., Buffer], codec: Codec) -> None:
    """A few KiB that unpack to 64 MiB, declared as 1 MiB: no more than about 1 MiB is taken."""
    payload = compressed(codec, bytes(64 << 20))
    decoder = Decoder()
    tracemalloc.start()
    try:
        with pytest.raises(Undecodable):
            decode(decoder, codec, payload, MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def silent(raw: bytes) -> bytes:
    """A frame without its content size: how much memory it takes is open."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(raw)


def twice(raw: bytes) -> bytes:
    """Two frames, half of the bytes in each."""
    return zstd(raw[: len(raw) // 2]) + zstd(raw[len(raw) // 2 :])


SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"

# Names and makers of what stands where a frame should.
NOT_OURS: dict[str, Coder] = {
    "silent": silent,
    "twice": twice,
    "skippable": lambda raw: SKIPPABLE,
    "skippable first": lambda raw: SKIPPABLE + zstd(raw),
    "nothing": lambda raw: b"",
    "without magic": lambda raw: zstd(raw)[4:],
    "cut": lambda raw: zstd(raw)[:-1],
    "longer": lambda raw: zstd(raw + b"x"),
    "shorter": lambda raw: zstd(raw[:-1]),
    "of nothing": lambda raw: zstd(b""),
}
not_ours = pytest.mark.parametrize("make", [pytest.param(NOT_OURS[n], id=n) for n in NOT_OURS])


@not_ours
@pytest.mark.parametrize("decode", BOTH)
def test_zstd_frames_that_are_not_ours(decode: Callable[..., Buffer], make: Coder) -> None:
    """No content size, two frames, a skippable frame: refused, not guessed."""
    raw = b"abc" * 1000
    with pytest.raises(Undecodable):
        decode(Decoder(), Codec.ZSTD, make(raw), len(raw))


@not_ours
@planes_codecs
@pytest.mark.parametrize("decode", BOTH)
def test_planes_that_are_not_ours(decode: Callable[..., Buffer], codec: Codec, make: Coder) -> None:
    """The same of each plane, while the others are as they should be, coded or not."""
    raw, width = b"abcdefg" * 1001, WIDTHS[codec]
    for rank in range(width):
        for other in (as_is, zstd):
            coders = [make if at == rank else other for at in range(width)]
            with pytest.raises(Undecodable):
                decode(Decoder(), codec, planes_payload(raw, coders), len(raw))


def test_what_follows_a_frame() -> None:
    """`decode` refuses it, in a plane too. (`decode_all` may not.)"""
    raw = b"abcdefg" * 1001
    for codec, width in WIDTHS.items():
        payload = planes_payload(raw, [lambda plane: zstd(plane) + b"x"] * width)
        with pytest.raises(Undecodable):
            Decoder().decode(codec, payload, len(raw))
    with pytest.raises(Undecodable):
        Decoder().decode(Codec.ZSTD, zstd(raw) + b"x", len(raw))


@planes_codecs
@pytest.mark.parametrize("decode", BOTH)
@pytest.mark.parametrize("coder", [as_is, zstd])
def test_tables_that_do_not_add_up(
    decode: Callable[..., Buffer], coder: Coder, codec: Codec
) -> None:
    """A last plane that is said to go on behind the payload, or to end before it."""
    raw, width = b"abcdefgh" * 1000, WIDTHS[codec]
    parts, _ = planes_of(raw, width)
    stored = [coder(part) for part in parts]
    table, rest = [len(plane) for plane in stored], b"".join(stored)
    pack = struct.Struct(f"<{width}I").pack
    assert decode(Decoder(), codec, pack(*table) + rest, len(raw)) == raw
    last = table[-1]
    for wrong in (0, last - 1, last + 1, last + width, (1 << 31) - 1, (1 << 32) - 1):
        with pytest.raises(Undecodable):
            decode(Decoder(), codec, pack(*table[:-1], wrong) + rest, len(raw))


@planes_codecs
@pytest.mark.parametrize("decode", BOTH)
def test_tails_and_tables_cut_off(decode: Callable[..., Buffer], codec: Codec) -> None:
    """A payload of planes is as long as its table says, with a tail of the right length."""
    width = WIDTHS[codec]
    for rest in range(width):
        raw = b"abcdefgh" * 1000 + b"123"[:rest]
        payload = compressed(codec, raw)
        for wrong in (payload[:-1], payload + b"x", payload + b"1234", payload[: 4 * width - 1]):
            with pytest.raises(Undecodable):
                decode(Decoder(), codec, wrong, len(raw))
        with pytest.raises(Undecodable):
            decode(Decoder(), codec, b"", len(raw))


@pytest.mark.parametrize("decode", ["decode", "decode_all"])
@pytest.mark.parametrize("codec", list(WIDTHS))
def test_frames_for_planes_of_nothing(codec: Codec, decode: str) -> None:
    """A block shorter than its numbers, each plane a frame, of nothing or much.

    In a process of its own: zstandard frees twice what it takes for a frame without content.
    """
    stored = [[zstd(inside)] * WIDTHS[codec] for inside in (b"", b"much" * 9000)]
    payloads = [put_together(frames, b"x") for frames in stored]
    script = f"""
from icefloe.store.codecs import Decoder, Undecodable
for payload in {payloads!r}:
    for _ in range(99):
        try:
            if {decode!r} == "decode":
                raw = Decoder().decode({int(codec)}, payload, 1)
            else:
                (raw,) = Decoder().decode_all([{int(codec)}], [payload], [1])
            assert raw == b"x"
        except Undecodable:
            pass
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("decode", BOTH)
@pytest.mark.parametrize("codec", [5, 255])
def test_unknown_codecs(codec: int, decode: Callable[..., Buffer]) -> None:
    """Reserved and future numbers are named in the error."""
    with pytest.raises(Undecodable, match=f"codec {codec} "):
        decode(Decoder(), codec, b"x", 1)


# --- several at once ----------------------------------------------------------------------------

Stored = tuple[list[Codec], list[bytes], list[bytes]]
"""Codecs, payloads and raw bytes of some blocks."""


def as_stored(blocks: Sequence[tuple[bytes, Codec]]) -> Stored:
    """Blocks in codecs that somebody chose for them."""
    raws, codecs = [raw for raw, _ in blocks], [codec for _, codec in blocks]
    return codecs, list(map(compressed, codecs, raws)), raws


some_blocks = st.builds(
    as_stored,
    st.lists(st.tuples(st.one_of(plain, repeated, weights), st.sampled_from(Codec)), max_size=6),
)


@given(st.lists(some_blocks, min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_all_together_is_as_one_by_one(calls: list[Stored]) -> None:
    """Any codecs and sizes, call after call; what came out stays as it is until the next call."""
    decoder, single = Decoder(), Decoder()
    for codecs, payloads, raws in calls:
        lengths = list(map(len, raws))
        together = list(decoder.decode_all(codecs, payloads, lengths))
        alone = [bytes(each) for each in map(single.decode, codecs, payloads, lengths)]
        assert [bytes(each) for each in together] == alone == raws


@given(some_blocks.filter(lambda blocks: bool(blocks[0])), st.data())
@settings(max_examples=50, deadline=None)
def test_one_of_several_is_damaged(blocks: Stored, data: st.DataObject) -> None:
    """All of it is refused, and the decoder works on."""
    codecs, payloads, raws = blocks
    lengths, bad = list(map(len, raws)), data.draw(st.integers(0, len(raws) - 1))
    damaged = [payload[:-1] if at == bad else payload for at, payload in enumerate(payloads)]
    decoder = Decoder()
    with pytest.raises(Undecodable):
        list(decoder.decode_all(codecs, damaged, lengths))
    again = decoder.decode_all(codecs, payloads, lengths)
    assert [bytes(each) for each in again] == raws


def test_many_large_blocks() -> None:
    """As the encoder makes them, of odd lengths, more than a reader decodes at once."""
    encoder, decoder = Encoder("balanced"), Decoder()
    raws = [make(length) for make in WEIGHTS for length in (MIB, 70_001, 300_002, 4099, 9)]
    raws += [b"text " * 9999, np.random.default_rng(1).bytes(99_999)]
    coded = [encoder.encode(memoryview(raw)) for raw in raws]
    codecs, payloads = [each.codec for each in coded], [each.payload for each in coded]
    for _ in range(2):
        found = list(decoder.decode_all(codecs, payloads, list(map(len, raws))))
        assert all(a == b for a, b in zip(found, raws, strict=True))
