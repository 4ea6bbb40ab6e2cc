"""The blocks of an image that lies in a remote, for a restore that doesn't wait for them.

Blocks that the store has are read there. The others come over the network: those that a thread of
the restored process waits for at once, the rest with several requests under way, and whatever
arrives is handed on as soon as it is verified, and kept for the store.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice

from icefloe.capture.blocks import BATCH, Batch, StoreBlocks, StoreSource
from icefloe.capture.fillers import Fillers
from icefloe.catalog import LocalStore
from icefloe.errors import NoSpace, NotWritable
from icefloe.store.codecs import Decoder
from icefloe.store.manifest import Manifest
from icefloe.store.reader import Location
from icefloe.transfer.fetch import Arrived, Fetcher
from icefloe.transfer.pull import Arrivals
from icefloe.transfer.ranges import Range, ranges

# What is asked for at once: others wait for the whole of it.
_RANGE_BYTES = 4 << 20
_RANGE_RAW_BYTES = 8 << 20

# What is looked through for neighbours in a pack. What comes first is wanted soonest.
_FIRST_BYTES = 1 << 20
_WINDOW_BYTES = 32 << 20

# Faults that wait for the network at a time, and requests for the rest beside them.
_SERVERS = 4
_BESIDE_FAULTS = 1

# Raw bytes of blocks that are kept at hand: small files share blocks, and are read one by one.
_RECENT_BYTES = 64 << 20

# Memory comes from these. The other files are small, and wanted first.
_PAGES = ("pages-", "amdgpu-pages-")


class RemoteSource:
    """See ImageSource. `first_block_at`: the monotonic time at which the first block arrived."""

    servers = _SERVERS

    def __init__(self, store: LocalStore, fetcher: Fetcher, arrivals: Arrivals) -> None:
        """`store` is open, and not needed afterwards. Raises Corrupt."""
        manifest = fetcher.image.manifest
        self.fetcher = fetcher
        self.unkept: NoSpace | NotWritable | None = None
        """Why the store gets nothing of this."""
        self._arrivals = arrivals
        self._keeping = threading.Lock()
        known = store.catalog.known(manifest.block_ids())
        self._here = [number for number, is_known in enumerate(known) if is_known]
        self._is_here = known
        self._local = StoreSource(store, manifest)
        self._local.pin(self._here)
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._looking = threading.Lock()
        self._waiting = 0
        self.pool = ThreadPoolExecutor(fetcher.remote.requests, "remote")
        self._prepare(manifest)

    def _prepare(self, manifest: Manifest) -> None:
        """Gets what CRIU reads first, in few requests."""
        numbers: dict[int, None] = {}
        for i, file in enumerate(manifest.files):
            if not file.path.rpartition("/")[2].startswith(_PAGES):
                named = manifest.extents_of(i)["block"]
                numbers |= dict.fromkeys(named[named < len(manifest.blocks)].tolist())
        wanted = [number for number in numbers if not self._is_here[number]]
        blocks = self.open()
        for batch in blocks.fetch_any(wanted):
            for number, raw in batch:
                self.remember(number, bytes(raw))
        blocks.close()

    def open(self) -> "RemoteBlocks":
        """See BlockSource."""
        return RemoteBlocks(self, self._local.open())

    @property
    def ahead(self) -> int:
        """How many requests may be under way for what nobody waits for at this moment."""
        return _BESIDE_FAULTS if self._waiting else max(1, self.fetcher.remote.requests // 2)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody waits: what is read ahead has to share the link with that."""
        with self._looking:
            self._waiting += 1
        try:
            yield
        finally:
            with self._looking:
                self._waiting -= 1

    def is_here(self, number: int) -> bool:
        """Whether the store has a block."""
        return self._is_here[number]

    def recent(self, number: int) -> bytes | None:
        """A block that came a moment ago."""
        with self._looking:
            return self._recent.get(number)

    def remember(self, number: int, raw: bytes) -> None:
        """Somebody may ask for it again soon."""
        with self._looking:
            if number not in self._recent:
                self._recent[number] = raw
                self._recent_bytes += len(raw)
            while self._recent_bytes > _RECENT_BYTES:
                self._recent_bytes -= len(self._recent.popitem(last=False)[1])

    def keep(self, arrived: Iterable[Arrived]) -> None:
        """Hands blocks on to the store. That there is no room for them ends nothing."""
        with self._keeping:
            if self.unkept is None:
                try:
                    self._arrivals.keep(each.stored for each in arrived)
                except (NoSpace, NotWritable) as error:
                    self.unkept = error

    def fillers(self, count: int) -> Fillers:
        """See ImageSource: what comes over the network comes to us."""
        return Fillers()

    def locate(self, numbers: Sequence[int]) -> Sequence[Location]:
        """See ImageSource."""
        return self._local.locate(numbers)

    def let_go(self) -> None:
        """See ImageSource: it isn't used any more."""

    def give_up(self) -> None:
        """See ImageSource."""
        self.fetcher.remote.objects.stop()

    def close(self) -> None:
        """See ImageSource."""
        self.pool.shutdown(cancel_futures=True)
        self._local.close()


class RemoteBlocks:
    """See Blocks."""

    def __init__(self, source: RemoteSource, local: StoreBlocks) -> None:
        self._source = source
        self._local = local

    def fetch(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """See Blocks."""
        numbers = iter(numbers)
        while part := list(islice(numbers, BATCH)):
            found = {number: self._source.recent(number) for number in part}
            raws = {number: raw for number, raw in found.items() if raw is not None}
            for batch in self.fetch_any(number for number in found if number not in raws):
                for number, raw in batch:
                    raws[number] = bytes(raw)
                    self._source.remember(number, raws[number])
            yield [(number, raws[number]) for number in part]

    def fetch_any(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """See Blocks."""
        source, fetcher = self._source, self._source.fetcher
        windows = self._windows(numbers)
        todo: deque[Range] = deque()
        pending: set[Future[tuple[Decoder, list[Arrived]]]] = set()
        more = True
        try:
            while more or todo or pending:
                while more and not todo and len(pending) < source.ahead:
                    window = next(windows, None)
                    more = window is not None
                    here = [number for number in window or () if source.is_here(number)]
                    there = [number for number in window or () if not source.is_here(number)]
                    todo += ranges(fetcher.wanted(there), _RANGE_BYTES, _RANGE_RAW_BYTES)
                    yield from self._local.fetch(here)
                if not more and len(todo) == 1 and not pending:
                    # Nobody shall wait behind what is read ahead.
                    with source.waiting():
                        found = self._get(todo.popleft())
                    yield from self._hand_on(*found)
                while todo and len(pending) < source.ahead:
                    pending.add(source.pool.submit(self._get, todo.popleft()))
                if pending:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield from self._hand_on(*future.result())
        finally:
            for future in pending:
                future.cancel()

    def _get(self, wanted: Range) -> tuple[Decoder, list[Arrived]]:
        decoder = self._source.fetcher.borrow()
        return decoder, self._source.fetcher.fetch(wanted, decoder)

    def _hand_on(self, decoder: Decoder, arrived: list[Arrived]) -> Iterator[Batch]:
        self._source.keep(arrived)
        yield [(each.number, each.raw) for each in arrived]
        self._source.fetcher.give_back(decoder)

    def _windows(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Pieces that grow."""
        lengths = self._source.fetcher.image.places["stored"]
        window: list[int] = []
        size, limit = 0, _FIRST_BYTES
        for number in numbers:
            window.append(number)
            size += int(lengths[number])
            if size >= limit:
                yield window
                window, size, limit = [], 0, min(2 * limit, _WINDOW_BYTES)
        if window:
            yield window

    def close(self) -> None:
        """See Blocks."""
        self._local.close()
