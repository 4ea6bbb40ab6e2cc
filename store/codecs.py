"""Codecs of stored blocks, and which one a block gets.

The number of the codec is recorded with the block (docs/format.md, "Codecs"); how it was chosen
is not, and never changes the block's id. An Encoder or Decoder belongs to one thread: making a
zstd context costs up to half of what coding a small block does.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import lz4.block
import zstandard

from icefloe.durable import Buffer


class Codec(IntEnum):
    """Codec numbers of the format. PLANES2 and PLANES4 are reserved, nothing writes them yet."""

    RAW = 0
    LZ4 = 1
    ZSTD = 2
    PLANES2_ZSTD = 3
    PLANES4_ZSTD = 4


KNOWN_CODECS = frozenset({Codec.RAW, Codec.LZ4, Codec.ZSTD})

PolicyName = Literal["fast", "balanced", "small"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Trades time against stored bytes. Ratios are stored / raw bytes of a sample."""

    zstd: zstandard.ZstdCompressionParameters | None  # None: lz4 only
    worth: float  # a block whose sample shrinks to less than this is compressed

    def compressor(self) -> zstandard.ZstdCompressor | None:
        """A compressor of its own for each thread."""
        return None if self.zstd is None else zstandard.ZstdCompressor(compression_params=self.zstd)


# The strategy of zstd's level 3 with the small tables of level 1: as fast as level 1 on memory,
# and 4 % smaller. The window takes the largest block.
_BALANCED = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_DFAST,
    min_match=6,
    hash_log=15,
    chain_log=14,
    search_log=1,
    target_length=0,
    window_log=20,
)

POLICIES: dict[PolicyName, Policy] = {
    "fast": Policy(zstd=None, worth=0.90),
    "balanced": Policy(zstd=_BALANCED, worth=0.95),
    "small": Policy(zstd=zstandard.ZstdCompressionParameters.from_level(6), worth=0.99),
}

# The sample: enough places to see a mixed block, small enough to cost a twentieth of coding it.
_SAMPLES = 4
_SAMPLE_BYTES = 1024

# What lz4 shrinks below this, zstd shrinks for certain: no second look.
_PLAINLY_COMPRESSIBLE = 0.80


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block as it is stored. `payload` is the raw buffer itself when codec is RAW."""

    codec: Codec
    payload: Buffer


def as_it_is(raw: memoryview) -> Encoded:
    """No coding."""
    return Encoded(Codec.RAW, raw)


class Encoder:
    """Compresses blocks by a policy. For one thread."""

    def __init__(self, policy: PolicyName) -> None:
        self._policy = POLICIES[policy]
        self._zstd = self._policy.compressor()
        self._quick_zstd = zstandard.ZstdCompressor(level=1)

    def encode(self, raw: memoryview) -> Encoded:
        """Codes one block (1 byte to 256 MiB)."""
        if not self._worth_it(_sample(raw)):
            return as_it_is(raw)
        if self._zstd is None:
            codec, payload = Codec.LZ4, lz4.block.compress(raw, store_size=False)
        else:
            codec, payload = Codec.ZSTD, self._zstd.compress(raw)
        if len(payload) >= len(raw):
            return as_it_is(raw)
        return Encoded(codec, payload)

    def _worth_it(self, sample: Buffer) -> bool:
        ratio = len(lz4.block.compress(sample, store_size=False)) / len(sample)
        if self._zstd is None or ratio < _PLAINLY_COMPRESSIBLE:
            return ratio < self._policy.worth
        return len(self._quick_zstd.compress(sample)) / len(sample) < self._policy.worth


def _sample(raw: memoryview) -> Buffer:
    if len(raw) <= _SAMPLES * _SAMPLE_BYTES:
        return raw
    step = (len(raw) - _SAMPLE_BYTES) // (_SAMPLES - 1)
    return b"".join(raw[i * step : i * step + _SAMPLE_BYTES] for i in range(_SAMPLES))


class Undecodable(ValueError):
    """A payload that its codec can't turn into the declared number of bytes."""


class Decoder:
    """Decompresses blocks, never to more than their declared length. For one thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, codec: int, payload: Buffer, raw_length: int) -> Buffer:
        """The raw bytes: `payload` itself for RAW. Raises Undecodable."""
        if codec == Codec.RAW:
            raw: Buffer = payload
        elif codec == Codec.LZ4:
            raw = self._lz4(payload, raw_length)
        elif codec == Codec.ZSTD:
            raw = self._unzstd(payload, raw_length)
        else:
            raise Undecodable(f"codec {codec} is not known to this version")
        if len(raw) != raw_length:
            raise Undecodable(f"{len(raw)} bytes instead of {raw_length}")
        return raw

    def decode_all(
        self, codecs: Sequence[int], payloads: Sequence[Buffer], raw_lengths: Sequence[int]
    ) -> list[Buffer]:
        """Several blocks. One call decodes what is zstd, and holds no thread up meanwhile.

        Raises Undecodable where `decode` does, but for a zstd frame that something follows.
        """
        zstd = [i for i, codec in enumerate(codecs) if codec == Codec.ZSTD]
        if len(zstd) < 2:
            return list(map(self.decode, codecs, payloads, raw_lengths))
        frames = [payloads[i] for i in zstd]
        lengths = memoryview(array("Q", (raw_lengths[i] for i in zstd)))
        try:
            decoded = self._zstd.multi_decompress_to_buffer(frames, lengths, threads=1)
        except zstandard.ZstdError as error:
            raise Undecodable(f"zstd: {error}") from error
        # What zstandard declares of its segments leaves out that they are buffers.
        segments = (memoryview(decoded[i]) for i in range(len(zstd)))  # type: ignore[arg-type]
        return [
            next(segments) if codec == Codec.ZSTD else self.decode(codec, payload, raw)
            for codec, payload, raw in zip(codecs, payloads, raw_lengths, strict=True)
        ]

    def _lz4(self, payload: Buffer, raw_length: int) -> bytes:
        try:
            raw: bytes = lz4.block.decompress(payload, uncompressed_size=raw_length)
        except lz4.block.LZ4BlockError as error:
            raise Undecodable(f"lz4: {error}") from error
        return raw

    def _unzstd(self, payload: Buffer, raw_length: int) -> bytes:
        try:
            declared = zstandard.get_frame_parameters(payload).content_size
            if declared != raw_length:  # the decoder would take that much memory
                raise Undecodable(f"zstd frame of {declared} bytes instead of {raw_length}")
            return self._zstd.decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Undecodable(f"zstd: {error}") from error
