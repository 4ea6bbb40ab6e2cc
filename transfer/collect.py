"""`remote gc`: gives back what no name of a remote leads to.

Images that no name means, packs in which nothing lives, and packs that mostly don't (what lives in
them is copied to new ones), each only when it is older than the grace period. First they are
condemned, in `leases/gc`; they are deleted when nobody is left who began before that, and when
another look shows that they are still not needed. docs/invariants.md, "Remotes".
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from icefloe.errors import NotInRemote
from icefloe.ids import BlockId, PackId
from icefloe.store.codecs import Decoder
from icefloe.store.pack import Index, StoredBlock
from icefloe.store.reader import Location
from icefloe.store.writer import TARGET_BYTES
from icefloe.transfer.fetch import fetch_range
from icefloe.transfer.leases import LEASES, Collector, collecting, held_since
from icefloe.transfer.objects import NoSuchObject, ObjectInfo
from icefloe.transfer.packing import make_pack
from icefloe.transfer.ranges import ranges
from icefloe.transfer.remote import (
    INDEXES,
    MANIFESTS,
    PACKS,
    Remote,
    index_key,
    pack_key,
    pack_of,
)

# Copying what lives in a pack costs reading and writing it: not for a few dead blocks.
REWRITE_WHEN_DEAD = 0.5

# Objects deleted between two looks at the lease.
_BATCH = 500

# What is read at once to be copied.
_READ_BYTES = 8 << 20
_READ_RAW_BYTES = 32 << 20

Ids = NDArray[np.bytes_]
"""Block ids (S32)."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Every image, pack and index of a remote. `now`: the store's clock, before it was made."""

    manifests: Mapping[str, ObjectInfo]
    packs: Mapping[PackId, ObjectInfo]
    indexes: Mapping[PackId, ObjectInfo]
    now: float


@dataclass(frozen=True, slots=True)
class RemotePlan:
    """Packs that can go, and packs to write anew with the blocks (S32) to copy from each."""

    packs: tuple[PackId, ...]
    rewrite: Mapping[PackId, Ids]
    kept_by_grace: int


@dataclass(frozen=True, slots=True)
class CollectResult:
    """What was deleted. `kept_by_lease`: objects that wait for others to end."""

    images_removed: int
    packs_removed: int
    packs_rewritten: int
    freed_bytes: int
    kept_by_grace: int
    kept_by_lease: int
    uploads_removed: int


def make_plan(
    listing: Listing, live: Ids, indexes: Iterable[tuple[PackId, Index]], grace: float
) -> RemotePlan:
    """Which packs can go, given the blocks that live (sorted). Pure.

    A pack with half of it dead is written anew; what lives in it and in a better pack as well needs
    no copy. A pack without an index was never finished, an index without a pack is of no use.
    """
    oldest = listing.now - grace
    elsewhere = np.zeros(len(live), np.bool_)
    poor: dict[PackId, NDArray[np.intp]] = {}
    dead = set(listing.packs) ^ set(listing.indexes)
    for pack, index in indexes:
        places, share = _living(index, live)
        if not len(places):
            dead.add(pack)
        elif 1 - share >= REWRITE_WHEN_DEAD:
            poor[pack] = places
        else:
            elsewhere[places] = True
    rewrite: dict[PackId, Ids] = {}
    for pack, places in poor.items():
        if len(needed := places[~elsewhere[places]]):
            rewrite[pack] = live[needed]
        else:
            dead.add(pack)
    rows = {**listing.indexes, **listing.packs}
    return RemotePlan(
        packs=tuple(pack for pack in sorted(dead) if rows[pack].modified <= oldest),
        rewrite={p: ids for p, ids in rewrite.items() if rows[p].modified <= oldest},
        kept_by_grace=sum(rows[pack].modified > oldest for pack in [*dead, *rewrite]),
    )


def _living(index: Index, live: Ids) -> tuple[NDArray[np.intp], float]:
    """Where in `live` the blocks of a pack are, those that live, and their share of its bytes."""
    ids = np.ascontiguousarray(index["id"]).view("S32")
    places = np.searchsorted(live, ids)
    lives = places < len(live)
    lives[lives] = live[places[lives]] == ids[lives]
    stored = index["stored"].astype(np.int64)
    return places[lives], float(stored[lives].sum() / max(1, stored.sum()))


def collect_remote(remote: Remote, grace: float, *, dry_run: bool = False) -> CollectResult:
    """Deletes what is not needed and nobody may still rely on. `grace` in seconds.

    Raises RemoteBusy when another collector is at work; RemoteUnreachable, RemoteRefused or
    CorruptObject: then nothing is lost, and the next run goes on.
    """
    if not dry_run:
        with collecting(remote) as collector:
            return _Collection(remote, collector, grace).run()
    look = _look(remote, _clock(remote), grace, lambda: None)
    goes = [*look.manifests, *map(pack_key, look.plan.packs)]
    return CollectResult(
        images_removed=len(look.manifests),
        packs_removed=len(look.plan.packs),
        packs_rewritten=len(look.plan.rewrite),
        freed_bytes=look.bytes_of(goes),
        kept_by_grace=look.plan.kept_by_grace + look.young,
        kept_by_lease=0,
        uploads_removed=0,
    )


@dataclass(frozen=True, slots=True)
class _Look:
    """What is there, and what of it nobody needs. `manifests`: keys; `young`: kept by grace."""

    listing: Listing
    manifests: tuple[str, ...]
    young: int
    plan: RemotePlan

    def bytes_of(self, keys: Iterable[str]) -> int:
        """What they take."""
        total = 0
        for key in keys:
            pack = pack_of(key)
            rows = [self.listing.manifests.get(key)]
            if key.startswith(PACKS) and pack is not None:
                rows = [self.listing.packs.get(pack), self.listing.indexes.get(pack)]
            total += sum(row.size for row in rows if row is not None)
        return total


def _look(remote: Remote, now: float, grace: float, tick: Callable[[], None]) -> _Look:
    """Names come first: what is pushed meanwhile is young, or held by a lease.

    `tick` is called now and then.
    """
    named = {entry.image for entry in remote.names().values() if entry.image is not None}
    kept = {MANIFESTS + o.hex() for image in named for o in remote.sealing.outers(image)}
    listing = Listing(
        manifests={r.key: r for r in remote.objects.list(MANIFESTS) if pack_of(r.key)},
        packs=_by_pack(remote.objects.list(PACKS)),
        indexes=_by_pack(remote.objects.list(INDEXES)),
        now=now,
    )
    unnamed = [key for key in listing.manifests if key not in kept]
    old = [key for key in unnamed if listing.manifests[key].modified <= now - grace]
    goes = set(old)
    live = _live_blocks(remote, [key for key in listing.manifests if key not in goes], tick)
    indexes = _indexes(remote, [pack for pack in listing.indexes if pack in listing.packs], tick)
    plan = make_plan(listing, live, indexes, grace)
    return _Look(listing, tuple(old), len(unnamed) - len(old), plan)


def _by_pack(rows: Iterator[ObjectInfo]) -> dict[PackId, ObjectInfo]:
    found = ((pack_of(row.key), row) for row in rows)
    return {pack: row for pack, row in found if pack is not None}


def _live_blocks(remote: Remote, keys: Sequence[str], tick: Callable[[], None]) -> Ids:
    """The blocks of these images, sorted. An image that can't be read ends the collection."""
    live: Ids = np.zeros(0, "S32")
    with remote.workers() as pool:
        for ids in pool.map(lambda key: _blocks_of(remote, key), keys):
            live = np.union1d(live, ids)
            tick()
    return live


def _blocks_of(remote: Remote, key: str) -> Ids:
    try:
        image = remote.image_at(key)
    except (NoSuchObject, NotInRemote):
        return np.zeros(0, "S32")  # removed meanwhile
    return np.ascontiguousarray(image.manifest.blocks["id"]).view("S32")


def _indexes(
    remote: Remote, packs: Sequence[PackId], tick: Callable[[], None]
) -> Iterator[tuple[PackId, Index]]:
    def index(pack: PackId) -> Index | None:
        try:
            return remote.index(pack)
        except NoSuchObject:
            return None

    with remote.workers() as pool:
        for pack, found in zip(packs, pool.map(index, packs), strict=True):
            tick()
            if found is not None:
                yield pack, found


def _clock(remote: Remote) -> float:
    """The store's clock."""
    probe = f"{LEASES}clock-{os.urandom(8).hex()}"
    remote.objects.put(probe, b"")
    now = remote.objects.info(probe).modified
    remote.objects.delete([probe])
    return now


class _Collection:
    """One run."""

    def __init__(self, remote: Remote, collector: Collector, grace: float) -> None:
        self._remote = remote
        self._collector = collector
        self._grace = grace

    def run(self) -> CollectResult:
        uploads = self._abandon_uploads()
        look = self._look()
        rewritten = self._rewrite(look.plan.rewrite)
        before, since = self._collector.state.condemned, self._collector.now()
        goes = [*look.manifests, *map(pack_key, [*look.plan.packs, *rewritten])]
        condemned = {key: before.get(key, since) for key in goes}
        self._collector.write(condemned)
        allowed = self._allowed(condemned)
        # Whoever began before has ended: what a push left is seen now.
        again = self._look()
        dead = {*again.manifests, *map(pack_key, again.plan.packs)}
        deleted = [key for key in allowed if key in dead]
        self._delete(deleted)
        left = {key: t for key, t in condemned.items() if key in dead and key not in deleted}
        self._collector.write(left)
        return CollectResult(
            images_removed=sum(key.startswith(MANIFESTS) for key in deleted),
            packs_removed=sum(key.startswith(PACKS) for key in deleted),
            packs_rewritten=len(rewritten),
            freed_bytes=look.bytes_of(deleted),
            kept_by_grace=look.plan.kept_by_grace + look.young,
            kept_by_lease=len(left),
            uploads_removed=uploads,
        )

    def _look(self) -> _Look:
        alive = self._collector.alive
        return _look(self._remote, self._collector.now(), self._grace, alive)

    def _abandon_uploads(self) -> int:
        """Uploads in parts that nobody will finish."""
        oldest = self._collector.now() - self._grace
        old = [each for each in self._remote.objects.unfinished() if each.started <= oldest]
        for upload in old:
            self._remote.objects.abandon(upload)
        return len(old)

    def _allowed(self, condemned: Mapping[str, float]) -> list[str]:
        """What everybody who is at work knows to be condemned."""
        oldest, over = held_since(self._remote, self._collector.now())
        self._remote.objects.delete(over)
        return [key for key, since in condemned.items() if since < oldest]

    def _delete(self, keys: Sequence[str]) -> None:
        """Images first, and packs last: whatever is found is whole."""
        images = [key for key in keys if key.startswith(MANIFESTS)]
        packs = [pack for key in keys if key.startswith(PACKS) and (pack := pack_of(key))]
        for part in (images, list(map(index_key, packs)), list(map(pack_key, packs))):
            for first in range(0, len(part), _BATCH):
                self._collector.alive()
                self._remote.objects.delete(part[first : first + _BATCH])

    def _rewrite(self, packs: Mapping[PackId, Ids]) -> list[PackId]:
        """Copies what lives in these packs to new ones; returns those that are not needed then."""
        blocks = self._living_blocks(packs)
        group: list[StoredBlock] = []
        size = 0
        for block in blocks:
            group.append(block)
            size += len(block.payload)
            if size >= TARGET_BYTES:
                self._put(group)
                group, size = [], 0
        if group:
            self._put(group)
        return list(packs)

    def _put(self, group: Sequence[StoredBlock]) -> None:
        made = make_pack(group, self._remote.sealing)
        self._collector.alive()
        self._remote.objects.put(pack_key(made.id), made.content)
        self._remote.objects.put(index_key(made.id), made.stored_index)

    def _living_blocks(self, packs: Mapping[PackId, Ids]) -> Iterator[StoredBlock]:
        """Verified, each once."""
        done: set[BlockId] = set()
        decoder = Decoder()
        for pack, ids in packs.items():
            wanted = set(ids.tolist())
            rows = self._remote.index(pack)
            located = []
            for row in rows.tolist():
                identity, offset, stored, raw, codec, _, _ = row
                if identity.rstrip(b"\0") in wanted and identity not in done:
                    done.add(BlockId(identity))
                    located.append(
                        (0, Location(BlockId(identity), pack, offset, stored, raw, codec))
                    )
            for part in ranges(located, _READ_BYTES, _READ_RAW_BYTES):
                for each in fetch_range(self._remote, part, decoder):
                    yield replace(each.stored, payload=bytes(each.stored.payload))
