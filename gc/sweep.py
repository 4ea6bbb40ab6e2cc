"""`gc`: gives back what no image mentions.

First a plan, computed from tombstones and pack totals; then its execution. New packs are durable
before the change is committed, and old packs are unlinked only after it: at every moment the
catalog points at bytes that are there.
"""

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from icefloe import durable
from icefloe.catalog import DeadBlocks, LocalStore, PackRow
from icefloe.durable import Buffer
from icefloe.ids import BlockId, PackId
from icefloe.store.codecs import Codec
from icefloe.store.pack import Kind, StoredBlock, read_index
from icefloe.store.reader import BlockReader, Location
from icefloe.store.writer import PackWriter, staging_leftovers

# Rewriting a pack costs reading and writing what lives in it: not for a few dead blocks.
REWRITE_WHEN_DEAD = 0.25

# A pull that failed is tried again, or it was given up.
_ARRIVAL_SECONDS = 86400.0

# Packs rewritten in one change: bounds the disk space that a collection needs for itself.
PACKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class GcOptions:
    """`grace_seconds`: a block stays that long after its last image was removed."""

    grace_seconds: float = 0.0
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Pack numbers to remove whole and to rewrite, and how many dead blocks stay, why."""

    remove: tuple[int, ...]
    rewrite: tuple[int, ...]
    blocks_removed: int
    kept_by_grace: int
    kept_in_packs: int


@dataclass(frozen=True, slots=True)
class GcResult:
    """What was removed. `freed_bytes` is what the disk got back."""

    blocks_removed: int
    packs_removed: int
    packs_rewritten: int
    freed_bytes: int
    kept_by_grace: int
    kept_in_packs: int


def make_plan(packs: Iterable[PackRow], dead: DeadBlocks, oldest: float) -> Plan:
    """Which packs go and which are rewritten, given that blocks dead since `oldest` may go. Pure.

    A pack whose blocks are all dead, and old enough, goes whole.
    """
    old_enough = dead.since <= oldest
    numbers, inverse = np.unique(dead.pack, return_inverse=True)
    dead_bytes = np.zeros(len(numbers), np.int64)
    np.add.at(dead_bytes, inverse, np.where(old_enough, dead.stored, 0))
    has_young = np.zeros(len(numbers), np.bool_)
    np.logical_or.at(has_young, inverse, ~old_enough)
    at = dict(zip(numbers.tolist(), range(len(numbers)), strict=True))
    remove, rewrite = [], []
    for pack in packs:
        i = at.get(pack.number)
        if pack.live == 0 and (i is None or not has_young[i]):
            remove.append(pack.number)
        elif i is not None and dead_bytes[i] >= REWRITE_WHEN_DEAD * pack.bytes:
            rewrite.append(pack.number)
    goes = old_enough & np.isin(dead.pack, [*remove, *rewrite])
    return Plan(
        remove=tuple(remove),
        rewrite=tuple(rewrite),
        blocks_removed=int(goes.sum()),
        kept_by_grace=int((~old_enough).sum()),
        kept_in_packs=int((old_enough & ~goes).sum()),
    )


def collect(store: LocalStore, options: GcOptions) -> GcResult:
    """Removes what no image mentions and what crashed commands left behind.

    Needs the store open for writing, which keeps every `add` out. Raises Corrupt when a block
    that would have to be copied is damaged; nothing is lost then.
    """
    packs = {pack.number: pack for pack in store.catalog.packs()}
    dead, oldest = store.catalog.dead_blocks(), time.time() - options.grace_seconds
    plan = make_plan(packs.values(), dead, oldest)
    abandoned = leftovers(store)
    if options.dry_run:
        freed = sum(path.stat().st_size for path in abandoned)
        freed += sum(packs[number].bytes for number in plan.remove)
        freed += sum(packs[number].bytes - packs[number].live for number in plan.rewrite)
    else:
        store.cut_torn_line()
        given_up = _given_up(store.layout.arriving)
        freed = _unlink(abandoned)
        for place in given_up:
            shutil.rmtree(place, ignore_errors=True)
        freed += _drop(store, [packs[number] for number in plan.remove])
        goes = frozenset(i for i, t in zip(dead.ids, dead.since, strict=True) if t <= oldest)
        for first in range(0, len(plan.rewrite), PACKS_AT_ONCE):
            batch = plan.rewrite[first : first + PACKS_AT_ONCE]
            freed += _rewrite(store, [packs[number] for number in batch], goes)
    return GcResult(
        blocks_removed=plan.blocks_removed,
        packs_removed=len(plan.remove),
        packs_rewritten=len(plan.rewrite),
        freed_bytes=freed,
        kept_by_grace=plan.kept_by_grace,
        kept_in_packs=plan.kept_in_packs,
    )


def leftovers(store: LocalStore) -> list[Path]:
    """Packs that no catalog row mentions, traces whose images are gone, what failed pulls left long
    ago, and staging files: this process has none of its own."""
    known = {pack.id for pack in store.catalog.packs()}
    orphans = [p for p in store.layout.published() if p not in known]
    lineages = {name.partition(":")[0] for name in store.catalog.names()}
    lineages |= {image.id.hex() for image in store.catalog.images()}
    traces = set(map(store.layout.trace, lineages))
    stale = [path for path in store.layout.recorded() if path not in traces]
    for place in _given_up(store.layout.arriving):
        stale += (path for path in place.rglob("*") if path.is_file())
    return [*map(store.layout.pack, orphans), *staging_leftovers(store.layout), *stale]


def _given_up(arriving: Path) -> list[Path]:
    """The folders of pulls that nobody goes on with."""
    oldest = time.time() - _ARRIVAL_SECONDS
    places = list(arriving.iterdir()) if arriving.is_dir() else []
    return [
        place
        for place in places
        if all(path.stat().st_mtime < oldest for path in [place, *place.rglob("*")])
    ]


def _drop(store: LocalStore, packs: Sequence[PackRow]) -> int:
    """Removes packs in which nothing lives. Returns the bytes freed."""
    if not packs:
        return 0
    ids = tuple(pack.id for pack in packs)
    store.commit("gc", packs_dropped=ids)
    return _unlink(map(store.layout.pack, ids))


def _rewrite(store: LocalStore, packs: Sequence[PackRow], goes: Set[BlockId]) -> int:
    """Copies what stays of these packs to new ones, then removes them. Returns the bytes freed."""
    with BlockReader(store.layout) as reader, replacing(store) as replacement:
        for pack in packs:
            replacement.packs.append(pack.id)
            stays = [row for row in blocks_of(store, pack) if row.where.id not in goes]
            stored = reader.read_stored([row.where for row in stays])
            for row, (payload, _) in zip(stays, stored, strict=True):
                replacement.writer.append([row.stored(Codec(row.where.codec), payload)])
    return replacement.freed_bytes


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A block of a pack."""

    where: Location
    kind: Kind

    def stored(self, codec: Codec, payload: Buffer) -> StoredBlock:
        """The block, coded this way."""
        return StoredBlock(self.where.id, self.kind, codec, self.where.raw, payload)


def blocks_of(store: LocalStore, pack: PackRow) -> list[BlockRow]:
    """What a pack holds, in its order. Raises CorruptPack or MissingPack."""
    index = read_index(store.layout.pack(pack.id))
    found, rows = store.catalog.find([BlockId(i.tobytes()) for i in index["id"]])
    # Should another pack hold a copy of a block, its row says which one counts.
    found[found] = rows["pack"] == pack.number
    return [
        BlockRow(Location(BlockId(identity), pack.id, offset, stored, raw, codec), Kind(kind))
        for identity, offset, stored, raw, codec, kind, _ in index[found].tolist()
    ]


@dataclass(slots=True)
class Replacement:
    """New packs on their way to take the place of `packs`."""

    writer: PackWriter
    packs: list[PackId] = field(default_factory=list)
    freed_bytes: int = 0


@contextmanager
def replacing(store: LocalStore) -> Iterator[Replacement]:
    """At the end, what was written takes the place of the old packs; nothing does on an error."""
    replacement = Replacement(PackWriter(store.layout))
    try:
        yield replacement
        added = tuple(replacement.writer.finish())
    except BaseException:
        replacement.writer.abort()
        raise
    if not replacement.packs:
        return
    store.commit("gc", packs_added=added, packs_dropped=tuple(replacement.packs))
    freed = _unlink(map(store.layout.pack, replacement.packs))
    replacement.freed_bytes = freed - replacement.writer.stored_bytes


def _unlink(paths: Iterable[Path]) -> int:
    freed = 0
    for path in paths:
        freed += path.stat().st_size if path.exists() else 0
        durable.unlink(path)
    return freed
