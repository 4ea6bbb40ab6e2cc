"""Processes that decode blocks for the threads that fill memory.

One thread of a process at a time runs Python, and each step of decoding a block gives the turn
away and waits to get it back: 16 threads took 5 s for what 16 processes do in less than one. So
each thread has some processes; it tells them where blocks lie and gets them back in memory that
both share. What a process can't deliver, for whatever reason, the thread decodes by itself.
"""

import mmap
import os
import pickle
import signal
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice

from icefloe.capture.blocks import BATCH, Batch, Blocks, StoreSource
from icefloe.errors import IcefloeError
from icefloe.store.layout import Layout
from icefloe.store.reader import BlockReader, Location

# Blocks are handed over in pieces of at most this, the largest block; while one is used, the next
# is decoded. With larger pieces a process touches more of its memory before it is there.
_SLOT_BYTES = 1 << 20
_SLOTS = 2

# A thread can keep about this many processes busy, and of threads, more than this many would
# rather wait for one another.
_PROCESSES_PER_THREAD = 3
_MAX_THREADS = 8

_MAX_MESSAGE = 1 << 20

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start_decoders(source: StoreSource, workers: int) -> list[Blocks]:
    """Starts that many processes; returns a way to the blocks for each thread that shall fill.

    To be called while there are no other threads. Where a limit allows fewer processes, there are
    fewer; without any, a thread decodes by itself.
    """
    decoders: list[_Decoder] = []
    with suppress(OSError):
        while len(decoders) < workers:
            decoders.append(_Decoder(source.layout))
    if not decoders:
        return [source.open()]
    threads = max(1, min(round(len(decoders) / _PROCESSES_PER_THREAD), _MAX_THREADS))
    return [_DecodedBlocks(source, decoders[i::threads]) for i in range(threads)]


class _Decoder:
    """A process that decodes, seen from the thread that uses it."""

    def __init__(self, layout: Layout) -> None:
        self.room = memoryview(mmap.mmap(-1, _SLOTS * _SLOT_BYTES))
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lost = False
        # Whatever is raised in the child must not get any further in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with theirs:
                self._pid = os.fork()
                if not self._pid:
                    _serve(theirs, layout, self.room)
        except OSError:
            self._channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ask(self, slot: int, locations: Sequence[Location]) -> bool:
        """To decode these blocks to the slot, one after the other."""
        with suppress(OSError):
            self._channel.send(pickle.dumps((slot, locations), pickle.HIGHEST_PROTOCOL))
            return not self._lost
        return False

    def answer(self) -> bool:
        """Whether it did so. Answers come in the order of what was asked."""
        said = b""
        with suppress(OSError):
            said = self._channel.recv(1)
        # One that died may have left an answer behind, which is that to an earlier question.
        self._lost |= not said
        return said == b"+" and not self._lost

    def close(self) -> None:
        """Ends it."""
        if self._pid:
            self._channel.close()
            os.kill(self._pid, signal.SIGKILL)  # it only reads
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


def _serve(channel: socket.socket, layout: Layout, room: memoryview) -> None:
    """The process. Ends when nobody asks any more."""
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # whoever asks decides
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        kept = channel.fileno()
        os.closerange(0, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        with BlockReader(layout) as reader:
            while message := channel.recv(_MAX_MESSAGE):
                slot, locations = pickle.loads(message)
                start = slot * _SLOT_BYTES
                try:
                    reader.read_into(locations, room[start : start + _SLOT_BYTES])
                except IcefloeError:
                    channel.send(b"-")
                else:
                    channel.send(b"+")
    finally:
        os._exit(0)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Blocks that were asked of a process, and where they will be; None if nobody was asked."""

    numbers: list[int]
    locations: list[Location]
    decoder: _Decoder | None
    slot: int


class _DecodedBlocks:
    """See Blocks. What was fetched is fetched to the end, or nothing is fetched afterwards."""

    def __init__(self, source: StoreSource, decoders: Sequence[_Decoder]) -> None:
        self._source = source
        self._own = source.open()
        self._decoders = decoders
        self._places = [(decoder, slot) for slot in range(_SLOTS) for decoder in decoders]

    def fetch(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """See Blocks."""
        places = cycle(self._places)
        asked: deque[_Asked] = deque()
        for part, locations in self._pieces(numbers):
            if len(asked) == len(self._places):
                yield from self._receive(asked.popleft())
            asked.append(_ask(part, locations, *next(places)))
        while asked:
            yield from self._receive(asked.popleft())

    def close(self) -> None:
        """See Blocks."""
        self._own.close()
        for decoder in self._decoders:
            decoder.close()

    def _pieces(self, numbers: Iterable[int]) -> Iterator[tuple[list[int], list[Location]]]:
        """What fits in a slot, or is one block that doesn't."""
        numbers = iter(numbers)
        while batch := list(islice(numbers, BATCH)):
            located = self._source.locate(batch)
            first = size = 0
            for i, location in enumerate(located):
                if i > first and size + location.raw > _SLOT_BYTES:
                    yield batch[first:i], located[first:i]
                    first, size = i, 0
                size += location.raw
            yield batch[first:], located[first:]

    def _receive(self, asked: _Asked) -> Iterator[Batch]:
        if asked.decoder is None or not asked.decoder.answer():
            yield from self._own.fetch(asked.numbers)
            return
        start, batch = asked.slot * _SLOT_BYTES, []
        for number, location in zip(asked.numbers, asked.locations, strict=True):
            batch.append((number, asked.decoder.room[start : start + location.raw]))
            start += location.raw
        yield batch


def _ask(numbers: list[int], locations: list[Location], decoder: _Decoder, slot: int) -> _Asked:
    fits = sum(location.raw for location in locations) <= _SLOT_BYTES
    there = fits and decoder.ask(slot, locations)
    return _Asked(numbers, locations, decoder if there else None, slot)
