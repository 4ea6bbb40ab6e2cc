"""Codecs of stored blocks, and which one a block gets.

The number of the codec is recorded with the block (docs/format.md, "Codecs"); how it was chosen
is not, and never changes the block's id. An Encoder or Decoder belongs to one thread: making a
zstd context costs up to half of what coding a small block does.
"""

import mmap
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

import lz4.block
import numpy as np
import zstandard

from icefloe.durable import Buffer
from icefloe.store import planes
from icefloe.store.planes import MAX_SAMPLE
from icefloe.store.policies import POLICIES, PolicyName


class Codec(IntEnum):
    """Codec numbers of the format."""

    RAW = 0
    LZ4 = 1
    ZSTD = 2
    PLANES2_ZSTD = 3
    PLANES4_ZSTD = 4


KNOWN_CODECS = frozenset(Codec)

_PLANES = (Codec.PLANES2_ZSTD, Codec.PLANES4_ZSTD)
_WIDTHS: dict[int, planes.Width] = {Codec.PLANES2_ZSTD: 2, Codec.PLANES4_ZSTD: 4}

# What the payload of planes begins with: the stored length of each. As long as the plane: raw.
_TABLES = {2: struct.Struct("<2I"), 4: struct.Struct("<4I")}

# The sample: enough places to see a mixed block, small enough to cost a twentieth of coding it.
_SAMPLES = 4
_SAMPLE_BYTES = MAX_SAMPLE // _SAMPLES

# What lz4 shrinks below this, zstd shrinks for certain: no second look.
_PLAINLY_COMPRESSIBLE = 0.80

# Below this, planes win without a look at what zstd would do.
_PLAINLY_NUMBERS = 0.75

# Four planes of a sample have fewer bytes each than two, and look smaller by this at most.
_WIDER = {Codec.PLANES2_ZSTD: 0.0, Codec.PLANES4_ZSTD: 0.01}

# A plane that seems to shrink to less than this is coded, with zstd that looks for no matches:
# Huffman codes of its literals are all that helps here, and decode twice as fast.
_PLANE_WORTH = 0.92
_ENTROPY_ONLY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, target_length=0
)


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
        self._entropy_coder = zstandard.ZstdCompressor(compression_params=_ENTROPY_ONLY)
        self._room = np.zeros(0, np.uint8)

    def encode(self, raw: memoryview) -> Encoded:
        """Codes one block (1 byte to 256 MiB)."""
        codec, worth = self._choose(_sample(raw))
        if codec == Codec.LZ4:
            payload: Buffer = lz4.block.compress(raw, store_size=False)
        elif codec == Codec.ZSTD and self._zstd is not None:
            payload = self._zstd.compress(raw)
        elif codec in _WIDTHS:
            payload = self._encode_planes(raw, _WIDTHS[codec], worth)
        else:
            return as_it_is(raw)
        return Encoded(codec, payload) if len(payload) < len(raw) else as_it_is(raw)

    def _choose(self, sample: Buffer) -> tuple[Codec, Sequence[bool]]:
        """The codec that is likely to leave least, and which of its planes shrink."""
        ratio = len(lz4.block.compress(sample, store_size=False)) / len(sample)
        worth = self._policy.worth
        if self._zstd is None:
            return (Codec.LZ4 if ratio < worth else Codec.RAW), ()
        if ratio < _PLAINLY_COMPRESSIBLE:
            return Codec.ZSTD, ()
        found: list[tuple[float, Codec, Sequence[bool]]] = [(1.0, Codec.RAW, ())]
        if len(sample) == MAX_SAMPLE:
            for numbers, costs in zip(_PLANES, planes.costs(sample), strict=True):
                pays: Sequence[bool] = [cost < _PLANE_WORTH for cost in costs]
                shares = (cost if cost < _PLANE_WORTH else 1 for cost in costs)
                found.append((sum(shares) / len(costs) + _WIDER[numbers], numbers, pays))
        if min(found)[0] > _PLAINLY_NUMBERS:
            found.append((len(self._quick_zstd.compress(sample)) / len(sample), Codec.ZSTD, ()))
        left, codec, pays = min(found)
        return (codec, pays) if left < worth else (Codec.RAW, ())

    def _encode_planes(
        self, raw: memoryview, width: planes.Width, pays: Sequence[bool]
    ) -> memoryview:
        """Planes that are not coded go right to their place: the processor's cache has no room
        for more than one copy."""
        size = len(raw) // width
        frames = {rank: self._encode_plane(raw, width, rank) for rank in range(width) if pays[rank]}
        coded = {rank: frame for rank, frame in frames.items() if len(frame) < size}
        stored = [len(coded[rank]) if rank in coded else size for rank in range(width)]
        table, tail = _TABLES[width].pack(*stored), raw[width * size :]
        payload = np.empty(len(table) + sum(stored) + len(tail), np.uint8)
        bounds = [*accumulate(stored, initial=len(table))]
        for rank, (start, end) in enumerate(pairwise(bounds)):
            if rank in coded:
                payload[start:end].data[:] = coded[rank]
            else:
                planes.take(raw, width, rank, payload[start:end])
        content = payload.data
        content[: len(table)], content[bounds[-1] :] = table, tail
        return content

    def _encode_plane(self, raw: memoryview, width: planes.Width, rank: int) -> bytes:
        size = len(raw) // width
        if size > len(self._room):
            self._room = np.zeros(size, np.uint8)
        plane = self._room[:size]
        planes.take(raw, width, rank, plane)
        return self._entropy_coder.compress(plane.data)


def _sample(raw: memoryview) -> Buffer:
    if len(raw) <= MAX_SAMPLE:
        return raw
    # Numbers keep their places in it.
    step = (len(raw) - _SAMPLE_BYTES) // (_SAMPLES - 1) // 4 * 4
    return b"".join(raw[i * step : i * step + _SAMPLE_BYTES] for i in range(_SAMPLES))


class Undecodable(ValueError):
    """A payload that its codec can't turn into the declared number of bytes."""


class _Frame(NamedTuple):
    """A zstd frame, and the number of bytes that must come out of it."""

    payload: Buffer
    length: int


class _Step(NamedTuple):
    """How a block is decoded: its frames, and what makes the block of what was in them."""

    frames: Sequence[_Frame]
    finish: Callable[[Sequence[Buffer]], Buffer]


class Decoder:
    """Decompresses blocks, never to more than their declared length. For one thread.

    What comes out of a call is valid until the next one.
    """

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()
        self._whole_room = self._room = memoryview(b"")

    def decode(self, codec: int, payload: Buffer, raw_length: int) -> Buffer:
        """The raw bytes: `payload` itself for RAW. Raises Undecodable."""
        self._make_room(raw_length)
        step = self._step(codec, payload, raw_length)
        raw = step.finish([self._unzstd(frame) for frame in step.frames])
        if len(raw) != raw_length:
            raise Undecodable(f"{len(raw)} bytes instead of {raw_length}")
        return raw

    def decode_all(
        self, codecs: Sequence[int], payloads: Sequence[Buffer], raw_lengths: Sequence[int]
    ) -> Iterator[Buffer]:
        """Several blocks. One call decodes all zstd in them, and holds no thread up meanwhile.

        Raises Undecodable where `decode` does, but for a zstd frame that something follows.
        """
        self._make_room(sum(raw_lengths))
        steps = list(map(self._step, codecs, payloads, raw_lengths))
        decoded = self._unzstd_all([frame for step in steps for frame in step.frames])
        for step, length in zip(steps, raw_lengths, strict=True):
            raw = step.finish([next(decoded) for _ in step.frames])
            if len(raw) != length:
                raise Undecodable(f"{len(raw)} bytes instead of {length}")
            yield raw

    def _step(self, codec: int, payload: Buffer, length: int) -> _Step:
        if codec == Codec.RAW:
            return _Step((), lambda _: payload)
        if codec == Codec.LZ4:
            return _Step((), lambda _: _unlz4(payload, length))
        if codec == Codec.ZSTD:
            return _Step([_Frame(payload, length)], lambda decoded: decoded[0])
        if (width := _WIDTHS.get(codec)) is None:
            raise Undecodable(f"codec {codec} is not known to this version")
        stored, tail = _planes(memoryview(payload), length, width)
        size = length // width

        def finish(decoded: Sequence[Buffer]) -> Buffer:
            coded = iter(decoded)
            whole = [plane if len(plane) == size else next(coded) for plane in stored]
            raw = self._take(length)
            planes.merge(whole, tail, raw)
            return raw

        return _Step([_Frame(plane, size) for plane in stored if len(plane) != size], finish)

    def _make_room(self, length: int) -> None:
        """For everything that is put together from planes; neighbours stay neighbours."""
        if length > len(self._whole_room):
            self._whole_room = memoryview(mmap.mmap(-1, length))
        self._room = self._whole_room

    def _take(self, length: int) -> memoryview:
        place, self._room = self._room[:length], self._room[length:]
        return place

    def _unzstd(self, frame: _Frame) -> Buffer:
        try:
            _check(frame)
            return self._zstd.decompress(frame.payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Undecodable(f"zstd: {error}") from error

    def _unzstd_all(self, frames: Sequence[_Frame]) -> Iterator[Buffer]:
        if not frames:
            return
        lengths = memoryview(array("Q", (frame.length for frame in frames)))
        payloads = [frame.payload for frame in frames]
        try:
            for frame in frames:
                _check(frame)
            decoded = self._zstd.multi_decompress_to_buffer(payloads, lengths, threads=1)
        except zstandard.ZstdError as error:
            raise Undecodable(f"zstd: {error}") from error
        # What zstandard declares of its segments leaves out that they are buffers.
        yield from (memoryview(decoded[i]) for i in range(len(frames)))  # type: ignore[arg-type]


def _check(frame: _Frame) -> None:
    """The decoder takes as much memory as a frame says, and for none it breaks (zstandard 0.25).

    Raises Undecodable or ZstdError.
    """
    declared = zstandard.get_frame_parameters(frame.payload).content_size
    if declared != frame.length or not declared:
        raise Undecodable(f"zstd frame of {declared} bytes instead of {frame.length}")


def _unlz4(payload: Buffer, raw_length: int) -> bytes:
    try:
        raw: bytes = lz4.block.decompress(payload, uncompressed_size=raw_length)
    except lz4.block.LZ4BlockError as error:
        raise Undecodable(f"lz4: {error}") from error
    return raw


def _planes(
    payload: memoryview, length: int, width: planes.Width
) -> tuple[list[memoryview], memoryview]:
    """The planes as they are stored, and the tail. Raises Undecodable."""
    table = _TABLES[width]
    if len(payload) < table.size:
        raise Undecodable("its table of planes is cut off")
    ends = list(accumulate(table.unpack_from(payload), initial=table.size))
    tail = payload[ends[-1] :]
    if len(payload) != ends[-1] + length % width:
        raise Undecodable(f"{len(payload)} bytes of planes instead of {ends[-1] + length % width}")
    return [payload[a:b] for a, b in pairwise(ends)], tail
