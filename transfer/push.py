"""`push`: an image goes to a remote, and of its blocks those that the remote lacks.

Some packs are put together and sent at a time, each by one thread: read from the local packs,
verified, written as one object, then its index. The image follows when all are there, and then its
names: an interrupted push leaves packs that the next one finds.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from icefloe.catalog import LocalStore
from icefloe.errors import RemoteBusy
from icefloe.ids import BlockId, Name
from icefloe.store.codecs import Codec
from icefloe.store.manifest import Manifest
from icefloe.store.pack import Kind, StoredBlock
from icefloe.store.reader import BlockReader, Location
from icefloe.store.writer import TARGET_BYTES
from icefloe.transfer import image_object
from icefloe.transfer.known import open_known
from icefloe.transfer.leases import (
    State,
    collector_state,
    pushing,
    release_from,
)
from icefloe.transfer.packing import PackObject, make_pack
from icefloe.transfer.remote import MANIFESTS, Remote, index_key, pack_key

# A pack is one object, and sent by one request.
PACK_BYTES = TARGET_BYTES

# Packs that are put together or sent at a time; each is whole in memory.
_AT_ONCE = 3

# With less than this to send, it isn't worth looking what others have pushed meanwhile.
_WORTH_LISTING = TARGET_BYTES

# How often to begin anew, should the lease run out or collectors remove what was relied on.
_TRIES = 3

Progress = Callable[[int], object]
"""Called with stored bytes that were sent since the last call, from any thread."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """What was sent. `wire_bytes` counts the bodies of all requests, `requests` them all.

    `new_bytes`: stored bytes of the blocks that the remote lacked. `replaced`: images that the
    names meant before; they go with the next collection there.
    """

    id: BlockId
    logical_bytes: int
    new_bytes: int
    wire_bytes: int
    requests: int
    blocks_sent: int
    blocks_skipped: int
    replaced: tuple[BlockId, ...]


@dataclass(slots=True)
class _Sent:
    blocks: int = 0
    bytes: int = 0


def push_image(
    store: LocalStore,
    image: BlockId,
    names: Sequence[Name],
    remote: Remote,
    progress: Progress = lambda count: None,
) -> PushResult:
    """Has a remote hold an image, under these names.

    Raises RemoteUnreachable, RemoteRefused, RemoteBusy, CorruptObject; Corrupt for a local block.
    """
    manifest = store.manifest(image)
    before = {name: remote.named(name) for name in names}
    keys = [MANIFESTS + outer.hex() for outer in remote.sealing.outers(image)]
    named = all(entry.image == image for entry in before.values())
    sent = _Sent()
    replaced: list[BlockId] = []
    if not named or any(key in collector_state(remote).condemned for key in keys):
        with _holding(store, image, manifest, remote, sent, progress):
            for name, entry in before.items():
                was = remote.set_name(name, image, entry).image
                if was is not None and was != image:
                    replaced.append(was)
    traffic = remote.objects.traffic
    return PushResult(
        id=image,
        logical_bytes=manifest.logical_bytes,
        new_bytes=sent.bytes,
        wire_bytes=traffic.sent_bytes + traffic.received_bytes,
        requests=traffic.requests,
        blocks_sent=sent.blocks,
        blocks_skipped=len(manifest.blocks) - sent.blocks,
        replaced=tuple(dict.fromkeys(replaced)),
    )


@contextmanager
def _holding(
    store: LocalStore,
    image: BlockId,
    manifest: Manifest,
    remote: Remote,
    sent: _Sent,
    progress: Progress,
) -> Iterator[None]:
    """The image is there, whole, and stays meanwhile. Raises RemoteBusy."""
    for _ in range(_TRIES):
        with pushing(remote) as lease:
            done = _put_image(store, image, manifest, remote, sent, progress)
            if done and lease.valid:
                yield
                return
    raise RemoteBusy(remote.url, "collectors, all the time")


def _put_image(
    store: LocalStore,
    image: BlockId,
    manifest: Manifest,
    remote: Remote,
    sent: _Sent,
    progress: Progress,
) -> bool:
    """Has the image be there, whole; whether it still is."""
    state = collector_state(remote)
    keys = [MANIFESTS + outer.hex() for outer in remote.sealing.outers(image)]
    condemned = [key for key in keys if key in state.condemned]
    if not condemned and not remote.is_new and remote.find_image(image) is not None:
        return True
    located, state = _put_blocks(store, manifest.block_ids(), remote, state, sent, progress)
    (at,) = store.catalog.locations([image])
    with BlockReader(store.layout) as reader:
        encoded = reader.read_one(at)
    remote.put_image(image, image_object.encode(encoded, located))
    if not condemned:
        return True
    # Its packs are safe by now. It itself may have been deleted before it was released.
    release_from(remote, condemned)
    return remote.find_image(image) is not None


def _put_blocks(
    store: LocalStore,
    ids: Sequence[BlockId],
    remote: Remote,
    state: State,
    sent: _Sent,
    progress: Progress,
) -> tuple[list[Location], State]:
    """Where all of these blocks lie, once all of them are there, and the state of collections."""
    found, state = _find(store, ids, remote, state)
    lacking = [identity for identity in dict.fromkeys(ids) if identity not in found]
    for made in _send(store, lacking, remote, state, progress):
        with open_known(store.layout, remote) as known:
            known.add(made.id, made.index)
            found |= known.find([BlockId(i.tobytes()) for i in made.index["id"]])
        sent.blocks += len(made.index)
        sent.bytes += int(made.index["stored"].sum())
    return [found[identity] for identity in ids], state


def _find(
    store: LocalStore, ids: Sequence[BlockId], remote: Remote, state: State
) -> tuple[dict[BlockId, Location], State]:
    """Those of the blocks that are there and stay there."""
    with open_known(store.layout, remote) as known:
        found = known.find(ids)
        lacking = [identity for identity in ids if identity not in found]
        missing = sum(at.stored for at in store.catalog.locations(lacking))
        if not remote.is_new and (known.fence != state.fence or missing >= _WORTH_LISTING):
            known.learn(state.fence)
            found = known.find(ids)
    packs = {at.pack for at in found.values()}
    condemned = [key for pack in packs for key in (pack_key(pack),) if key in state.condemned]
    if not condemned:
        return found, state
    # What was deleted before it could be released is no longer listed.
    return _find(store, ids, remote, release_from(remote, condemned))


def _send(
    store: LocalStore,
    ids: Sequence[BlockId],
    remote: Remote,
    state: State,
    progress: Progress,
) -> Iterator[PackObject]:
    """Packs of these blocks, each as soon as it is there, in order."""
    groups = _groups(store.catalog.locations(ids))
    own = threading.local()
    waiting: deque[Future[PackObject]] = deque()
    readers: list[BlockReader] = []

    def send(group: Sequence[Location]) -> PackObject:
        if not hasattr(own, "reader"):
            own.reader = BlockReader(store.layout)
            readers.append(own.reader)
        made = make_pack(_stored(own.reader, group), remote.sealing)
        if (key := pack_key(made.id)) in state.condemned:
            release_from(remote, [key])  # it was there once
        remote.objects.put(key, made.content)
        remote.objects.put(index_key(made.id), made.stored_index)
        progress(sum(at.stored for at in group))
        return made

    pool = remote.workers()
    try:
        for group in groups:
            if len(waiting) >= _AT_ONCE:
                yield waiting.popleft().result()
            waiting.append(pool.submit(send, group))
        while waiting:
            yield waiting.popleft().result()
    except BaseException:  # or nobody wants the rest
        remote.objects.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        for reader in readers:
            reader.close()


def _stored(reader: BlockReader, group: Sequence[Location]) -> Iterator[StoredBlock]:
    """Blocks as they are stored, verified."""
    for at, (payload, _) in zip(group, reader.read_stored(group), strict=True):
        yield StoredBlock(at.id, Kind.DATA, Codec(at.codec), at.raw, payload)


def _groups(locations: Sequence[Location]) -> Iterator[list[Location]]:
    """What goes into one pack."""
    group: list[Location] = []
    size = 0
    for at in locations:
        group.append(at)
        size += at.stored
        if size >= PACK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
