"""Gets blocks of an image out of a remote: ranges of packs, opened and verified.

A block whose bytes are wrong is fetched again; a pack that isn't where the image says was
rewritten meanwhile, and the indexes say where its blocks are now.
"""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from icefloe.durable import Buffer
from icefloe.errors import CorruptObject
from icefloe.ids import BlockId, block_id
from icefloe.store.codecs import Codec, Decoder, Undecodable
from icefloe.store.layout import Layout
from icefloe.store.pack import Kind, StoredBlock
from icefloe.store.reader import Location
from icefloe.transfer.image_object import RemoteImage
from icefloe.transfer.known import open_known
from icefloe.transfer.leases import collector_state
from icefloe.transfer.objects import NoSuchObject
from icefloe.transfer.packing import block_label
from icefloe.transfer.ranges import Range, ranges
from icefloe.transfer.remote import Remote, pack_key
from icefloe.transfer.sealing import Unsealable

# How often a block with wrong bytes is asked for, the first time included.
_TRIES = 4


class Arrived(NamedTuple):
    """A block: its number in the image, its stored form as a store keeps it, its raw bytes."""

    number: int
    stored: StoredBlock
    raw: Buffer


@dataclass(frozen=True, slots=True)
class _Wrong(Exception):
    """A block that isn't what it should be."""

    location: Location
    reason: str


class Fetcher:
    """Any thread may use it. What is decoded lives in a Decoder of whoever asks."""

    def __init__(self, remote: Remote, image: RemoteImage, layout: Layout) -> None:
        """`layout`: the store beside which is noted what the remote holds."""
        self.remote = remote
        self.image = image
        self._layout = layout
        self._moved: dict[BlockId, Location] | None = None
        self._moving = threading.Lock()
        self._decoders: queue.SimpleQueue[Decoder] = queue.SimpleQueue()

    def wanted(self, numbers: Sequence[int]) -> list[tuple[int, Location]]:
        """These blocks and where they lie, as far as is known."""
        located = self.image.locations(numbers)
        if self._moved is not None:
            located = [self._moved.get(at.id, at) for at in located]
        return list(zip(numbers, located, strict=True))

    def borrow(self) -> Decoder:
        """A decoder; what it gives out lasts until it is used again."""
        try:
            return self._decoders.get_nowait()
        except queue.Empty:
            return Decoder()

    def give_back(self, decoder: Decoder) -> None:
        """Nobody needs what it gave out any more."""
        self._decoders.put(decoder)

    def fetch(self, wanted: Range, decoder: Decoder) -> list[Arrived]:
        """The blocks of a range, verified; they last until the decoder is used again.

        Raises RemoteUnreachable, RemoteRefused or CorruptObject.
        """
        try:
            return fetch_range(self.remote, wanted, decoder)
        except NoSuchObject:
            return self._from_elsewhere(wanted, decoder)

    def _from_elsewhere(self, wanted: Range, decoder: Decoder) -> list[Arrived]:
        """The pack is gone: its blocks lie in others, whose places the indexes know."""
        moved = self._learn()
        numbers = [number for number, _ in wanted.blocks]
        located = [moved.get(at.id, at) for _, at in wanted.blocks]
        for at in located:
            if at.pack == wanted.pack:
                where = self.remote.where(pack_key(wanted.pack))
                raise CorruptObject(where, f"it is gone, and with it block {at.id.hex()}")
        arrived = []
        for part in ranges(list(zip(numbers, located, strict=True)), 1 << 20, 1 << 20):
            for each in self.fetch(part, decoder):
                payload = bytes(each.stored.payload)
                kept = replace(each.stored, payload=payload)
                arrived.append(Arrived(each.number, kept, bytes(each.raw)))
        return arrived

    def _learn(self) -> dict[BlockId, Location]:
        """Where all blocks of the image are now."""
        with self._moving:
            if self._moved is None:
                state = collector_state(self.remote)
                with open_known(self._layout, self.remote) as known:
                    known.learn(state.fence)
                    self._moved = known.find(self.image.manifest.block_ids())
            return self._moved


def fetch_range(remote: Remote, wanted: Range, decoder: Decoder) -> list[Arrived]:
    """The blocks of a range, verified; they last until the decoder is used again.

    Raises NoSuchObject when the pack isn't there; otherwise as Fetcher.fetch.
    """
    for _ in range(_TRIES):
        try:
            return _verified(remote, wanted.blocks, _payloads(remote, wanted), decoder)
        except _Wrong as error:
            wrong = error
    where = remote.where(pack_key(wanted.pack))
    at = wrong.location
    raise CorruptObject(f"block {at.id.hex()} at byte {at.offset} of {where}", wrong.reason)


def _payloads(remote: Remote, wanted: Range) -> list[Buffer]:
    """What is there, as it is sealed."""
    start, content = wanted.start, bytearray(wanted.end - wanted.start)
    count = remote.objects.read_into(pack_key(wanted.pack), start, memoryview(content))
    view = memoryview(content)[:count]
    return [view[at.offset - start : at.end - start] for _, at in wanted.blocks]


def _verified(
    remote: Remote,
    blocks: Sequence[tuple[int, Location]],
    payloads: Sequence[Buffer],
    decoder: Decoder,
) -> list[Arrived]:
    """Raises _Wrong."""
    plain = [_open(remote, at, payload) for (_, at), payload in zip(blocks, payloads, strict=True)]
    codecs, lengths = [at.codec for _, at in blocks], [at.raw for _, at in blocks]
    try:
        raws = list(decoder.decode_all(codecs, plain, lengths))
    except Undecodable:
        for (_, at), payload in zip(blocks, plain, strict=True):
            _decode(at, payload, decoder)  # finds out which
        raise AssertionError("what can't be decoded together can, one by one") from None
    arrived = []
    for (number, at), payload, raw in zip(blocks, plain, raws, strict=True):
        if (found := block_id(raw)) != at.id:
            raise _Wrong(at, f"its bytes hash to {found.hex()}")
        stored = StoredBlock(at.id, Kind.DATA, Codec(at.codec), at.raw, payload)
        arrived.append(Arrived(number, stored, raw))
    return arrived


def _open(remote: Remote, at: Location, payload: Buffer) -> Buffer:
    try:
        return remote.sealing.open(block_label(at.id), payload)
    except Unsealable as error:
        raise _Wrong(at, str(error)) from error


def _decode(at: Location, payload: Buffer, decoder: Decoder) -> None:
    try:
        decoder.decode(at.codec, payload, at.raw)
    except Undecodable as error:
        raise _Wrong(at, str(error)) from error
