"""Codecs: what goes in comes out, never larger; what is garbage is refused, in bounded memory."""

import tracemalloc
from typing import get_args

import lz4.block
import pytest
import slow_chunker as slow
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from icefloe.store.codecs import KNOWN_CODECS, Codec, Decoder, Encoder, PolicyName, Undecodable

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
policies = st.sampled_from(POLICIES)

plain = st.binary(min_size=1, max_size=9000)
repeated = st.builds(lambda part, times: part * times, st.binary(min_size=1), st.integers(1, 900))
half = st.builds(lambda a, length: a + bytes(length), plain, st.integers(1, 30_000))


@given(st.one_of(plain, repeated, half), policies)
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


@given(st.sampled_from(range(7)), st.binary(max_size=400), st.integers(1, 5000))
@settings(max_examples=300, deadline=None)
def test_garbage(codec: int, payload: bytes, raw_length: int) -> None:
    """Any bytes under any codec number: the declared length, or Undecodable."""
    decoded_or_refused(codec, payload, raw_length)


def decoded_or_refused(codec: int, payload: bytes, raw_length: int) -> None:
    """Nothing else than the right length and Undecodable may come out."""
    try:
        raw = Decoder().decode(codec, payload, raw_length)
    except Undecodable:
        return
    assert codec in KNOWN_CODECS and len(raw) == raw_length


@given(st.data(), st.sampled_from([Codec.LZ4, Codec.ZSTD]))
@settings(max_examples=200, deadline=None)
def test_damaged_payloads(data: st.DataObject, codec: Codec) -> None:
    """Changed, cut and lengthened payloads."""
    raw = data.draw(repeated)
    payload = bytearray(compressed(codec, raw))
    kind = data.draw(st.sampled_from(["flip", "cut", "more"]))
    if kind == "flip":
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    else:
        payload += data.draw(st.binary(min_size=1, max_size=20))
    decoded_or_refused(codec, bytes(payload), len(raw))


def compressed(codec: Codec, raw: bytes) -> bytes:
    """A payload as any writer may make it."""
    if codec == Codec.ZSTD:
        return zstandard.ZstdCompressor().compress(raw)
    payload: bytes = lz4.block.compress(raw, store_size=False)
    return payload


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("declared", [1000, 1 << 20, (32 << 20) - 1, (32 << 20) + 1])
def test_another_length_is_refused(codec: Codec, declared: int) -> None:
    """A payload of 32 MiB that says otherwise."""
    payload = compressed(codec, bytes(32 << 20))
    with pytest.raises(Undecodable):
        Decoder().decode(codec, payload, declared)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_bombs_take_no_memory(codec: Codec) -> None:
    """A few KiB that unpack to 64 MiB, declared as 1 MiB: no more than about 1 MiB is taken."""
    payload = compressed(codec, bytes(64 << 20))
    decoder = Decoder()
    tracemalloc.start()
    try:
        with pytest.raises(Undecodable):
            decoder.decode(codec, payload, 1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def test_zstd_frames_that_are_not_ours() -> None:
    """No content size, two frames, a skippable frame: refused, not guessed."""
    raw = b"abc" * 1000
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    twice = zstandard.ZstdCompressor().compress(raw[:1500]) * 2
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    for payload in (silent, twice, skippable, skippable + compressed(Codec.ZSTD, raw), b""):
        with pytest.raises(Undecodable):
            Decoder().decode(Codec.ZSTD, payload, len(raw))


@pytest.mark.parametrize("codec", [Codec.PLANES2_ZSTD, Codec.PLANES4_ZSTD, 5, 255])
def test_unknown_codecs(codec: int) -> None:
    """Reserved and future numbers are named in the error."""
    with pytest.raises(Undecodable, match=f"codec {int(codec)} "):
        Decoder().decode(codec, b"x", 1)
