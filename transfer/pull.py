"""`pull`: an image comes out of a remote into the local store, and of its blocks those it lacks.

The store is free for others meanwhile: blocks arrive in packs beside it (`arriving/`), which become
its own when all are there. What arrived before a failure is found there by the next pull.
"""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icefloe import allocator, durable
from icefloe.catalog import LocalStore, open_store
from icefloe.catalog.lock import Lock
from icefloe.errors import Corrupt, IcefloeError, StoreBusy
from icefloe.ids import BlockId, Name, PackId
from icefloe.store import layout as layouts
from icefloe.store.codecs import Encoder
from icefloe.store.layout import Layout
from icefloe.store.pack import Kind, StoredBlock, read_index
from icefloe.store.writer import PackWriter, staging_leftovers
from icefloe.transfer.fetch import Fetcher
from icefloe.transfer.image_object import RemoteImage
from icefloe.transfer.ranges import Range, ranges, windows
from icefloe.transfer.remote import Remote

# What is asked for at once, and what is looked through for neighbours in a pack.
_RANGE_BYTES = 8 << 20
_RANGE_RAW_BYTES = 8 << 20
_WINDOW_BYTES = 64 << 20

# Others may collect what was here between the last look and the commit: then it is fetched.
_TRIES = 3

# How long to wait for others who pull the same image.
LOCK_SECONDS = 5.0

# How long to wait for others who use the store, to commit what has arrived.
COMMIT_SECONDS = 60.0

Progress = Callable[[int], object]
"""Called with stored bytes that arrived since the last call."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """What came. `wire_bytes` counts the bodies of all requests, `requests` them all."""

    id: BlockId
    logical_bytes: int
    new_bytes: int
    wire_bytes: int
    requests: int
    blocks_sent: int
    blocks_skipped: int
    replaced: BlockId | None


class Arrivals:
    """Blocks of an image on their way into a store. Not for several threads at once.

    First `look` what is missing, then `keep` what comes and `finish`, then `commit`.
    """

    def __init__(self, root: Path, image: RemoteImage) -> None:
        """`root`: the store's folder. Raises StoreBusy when somebody else pulls the image."""
        self._image = image
        self._place = Layout(root).arrival(image.id)
        layouts.make_folders(self._place)
        self._lock = Lock(self._place.lock, write=True, wait_seconds=LOCK_SECONDS)
        for path in staging_leftovers(self._place):
            path.unlink()
        self._writer: PackWriter | None = None
        self._kept = {BlockId(i.tobytes()) for pack in self._packs() for i in self._ids(pack)}
        self.missing: list[int] = []
        """Numbers of the blocks that have to come, in order."""

    def _packs(self) -> list[PackId]:
        return list(self._place.published())

    def _ids(self, pack: PackId) -> Iterator[np.void]:
        try:
            yield from read_index(self._place.pack(pack))["id"]
        except Corrupt:
            self._place.pack(pack).unlink()

    def look(self, store: LocalStore) -> None:
        """Finds out what is `missing`, here and in the store."""
        ids = self._image.manifest.block_ids()
        known = store.catalog.known(ids)
        self.missing = [
            number
            for number, identity in enumerate(ids)
            if not known[number] and identity not in self._kept
        ]

    def are_all_here(self, store: LocalStore) -> bool:
        """Whether nothing is `missing`, by another look."""
        self.look(store)
        return not self.missing

    def still_missing(self) -> list[int]:
        """Those of `missing` that have not been kept."""
        ids = self._image.manifest.block_ids()
        return [number for number in self.missing if ids[number] not in self._kept]

    def keep(self, blocks: Iterable[StoredBlock]) -> None:
        """Writes blocks, each once. Raises NoSpace or NotWritable."""
        new = [block for block in blocks if block.id not in self._kept]
        self._kept.update(block.id for block in new)
        self._writer = self._writer or PackWriter(self._place)
        self._writer.append(new)

    def finish(self) -> None:
        """All that was kept is durable; the manifest too."""
        identity = self._image.id
        if identity not in self._kept:
            encoded = memoryview(self._image.encoded)
            coded = Encoder("balanced").encode(encoded)
            length = len(encoded)
            self.keep([StoredBlock(identity, Kind.MANIFEST, coded.codec, length, coded.payload)])
        self._seal()

    def _seal(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.finish()
            except BaseException:
                writer.abort()
                raise

    def commit(self, store: LocalStore, name: Name | None) -> BlockId | None:
        """Publishes the image, when `are_all_here`; returns what the name meant before.

        The store is open for writing.
        """
        image = self._image.id
        packs = self._packs()
        for pack in packs:
            place = store.layout.pack(pack)
            durable.make_folder(place.parent)
            with durable.step("link", place), suppress(FileExistsError):
                os.link(self._place.pack(pack), place)
            durable.fsync_folder(place.parent)
        before = store.catalog.named(name) if name is not None else None
        known = store.catalog.pack_numbers(packs)
        store.commit(
            "add",
            packs_added=tuple(pack for pack in packs if pack not in known),
            images_added=(image,) if store.catalog.image(image) is None else (),
            names={str(name): image} if name is not None else {},
        )
        shutil.rmtree(self._place.root, ignore_errors=True)
        return before if before != image else None

    def close(self) -> None:
        """Whatever has arrived stays for the next time."""
        try:
            with suppress(IcefloeError):
                self._seal()
        finally:
            self._lock.release()


def pull_image(
    root: Path,
    remote: Remote,
    image: RemoteImage,
    name: Name | None,
    progress: Progress = lambda count: None,
) -> PullResult:
    """Has the store in `root`, which is made if need be, hold an image of a remote.

    Raises RemoteUnreachable, RemoteRefused, CorruptObject, StoreBusy, NoSpace or NotWritable.
    """
    allocator.keep_freed()
    new_bytes = blocks_sent = 0
    with closing(Arrivals(root, image)) as arrivals:
        with open_store(root, write=False, create=True) as store:
            arrivals.look(store)
        for _ in range(_TRIES):
            blocks_sent += len(arrivals.missing)
            new_bytes += bring(Fetcher(remote, image, Layout(root)), arrivals, progress)
            with open_store(root, write=True, wait_seconds=COMMIT_SECONDS) as store:
                if arrivals.are_all_here(store):
                    replaced = arrivals.commit(store, name)
                    break
        else:
            raise StoreBusy(root, "collectors, again and again")
    traffic, blocks = remote.objects.traffic, len(image.manifest.blocks)
    return PullResult(
        id=image.id,
        logical_bytes=image.manifest.logical_bytes,
        new_bytes=new_bytes,
        wire_bytes=traffic.sent_bytes + traffic.received_bytes,
        requests=traffic.requests,
        blocks_sent=blocks_sent,
        blocks_skipped=blocks - blocks_sent,
        replaced=replaced,
    )


def bring(fetcher: Fetcher, arrivals: Arrivals, progress: Progress = lambda count: None) -> int:
    """Fetches all that is still missing; returns its stored bytes. All of it is durable then."""
    total = 0
    for blocks in _fetch_in_order(fetcher, arrivals.still_missing()):
        arrivals.keep(blocks)
        came = sum(len(block.payload) for block in blocks)
        progress(came)
        total += came
    arrivals.finish()
    return total


def _fetch_in_order(fetcher: Fetcher, numbers: Sequence[int]) -> Iterator[list[StoredBlock]]:
    """Blocks as they are stored, about in this order, many requests at a time."""
    remote = fetcher.remote
    waiting: deque[Future[list[StoredBlock]]] = deque()

    def fetch(wanted: Range) -> list[StoredBlock]:
        decoder = fetcher.borrow()
        arrived = [each.stored for each in fetcher.fetch(wanted, decoder)]
        fetcher.give_back(decoder)
        return arrived

    pool = remote.workers()
    try:
        for window in windows(fetcher.wanted(numbers), _WINDOW_BYTES, _WINDOW_BYTES):
            for part in ranges(window, _RANGE_BYTES, _RANGE_RAW_BYTES):
                if len(waiting) >= remote.requests:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(fetch, part))
        while waiting:
            yield waiting.popleft().result()
    except BaseException:  # or nobody wants the rest
        remote.objects.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
