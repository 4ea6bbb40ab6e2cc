"""`check`: does the store hold what it says, and nothing else?

Everything is recomputed from packs, manifests and journal and compared with the catalog. A
problem is either damage, which means that data is or may be lost, or waste, which the next `gc`
gives back (docs/invariants.md tells the two apart).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from icefloe import durable
from icefloe.catalog import LocalStore
from icefloe.errors import Corrupt
from icefloe.gc.sweep import leftovers
from icefloe.ids import BlockId, PackId
from icefloe.store.journal import Change
from icefloe.store.manifest import Manifest
from icefloe.store.pack import read_index
from icefloe.store.verify import verify_pack
from icefloe.store.writer import staging_leftovers
from icefloe.workers import worker_count

# Wrong in the catalog only: packs and journal know better.
_MENDED_BY_REBUILD = {
    "wrong-count",
    "wrong-live-bytes",
    "wrong-location",
    "wrong-tombstone",
    "wrong-totals",
    "dangling-name",
    "block-missing",
    "journal-differs",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """`kind` is one of a few words for programs, `what` a sentence for people."""

    kind: str
    what: str
    waste: bool = False
    """Space only: nothing is lost, the next `gc` heals it."""

    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Audit:
    """What `check` looked at and what it found."""

    images: int
    blocks: int
    packs: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """No damage is left. Waste is allowed."""
        return all(problem.waste or problem.repaired for problem in self.problems)


Progress = Callable[[int], None]
"""Called with bytes of packs read since the last call."""


def check(store: LocalStore, *, read_data: bool, progress: Progress = lambda count: None) -> Audit:
    """Audits counts, indexes and names; with `read_data` every byte of every pack."""
    ids, rows = store.catalog.all_blocks()
    packs = list(store.catalog.packs())
    images = list(store.catalog.images())
    problems = [Problem("image-lost", f"image {p.image.hex()}: {p.reason}") for p in store.lost]
    if store.salvaged:
        what = f"{store.layout.journal} was damaged; what could be read was applied"
        problems.append(Problem("journal-damaged", what, repaired=True))
    problems += _check_counts(store, ids, rows)
    problems += _check_packs(store, ids, rows)
    problems += _check_names(store)
    problems += _check_journal(store)
    problems += _find_waste(store)
    if read_data:
        problems += _read_all(store, [pack.id for pack in packs], progress)
    return Audit(len(images), len(ids), len(packs), tuple(problems))


def repair(store: LocalStore, audit: Audit) -> Audit:
    """Mends what packs and journal can mend; the same audit, with what is gone marked repaired.

    A damaged journal is written anew from the catalog, a wrong catalog is rebuilt from a whole
    journal. Damaged data stays. Nothing is unlinked but staging files: that is for `gc`.
    """
    kinds = {problem.kind for problem in audit.problems}
    if "journal-damaged" in kinds and not store.salvaged:
        store.rewrite_journal()
    elif kinds & _MENDED_BY_REBUILD:
        store.rebuild()
    for path in staging_leftovers(store.layout):
        durable.unlink(path)
    still = check(store, read_data=False).problems
    left = {(p.kind, p.what) for p in still if not p.repaired}
    left |= {(p.kind, p.what) for p in audit.problems if p.kind == "data-damaged"}
    marked = [replace(p, repaired=(p.kind, p.what) not in left) for p in audit.problems]
    return replace(audit, problems=tuple(marked))


def _check_counts(
    store: LocalStore, ids: NDArray[np.bytes_], rows: NDArray[np.void]
) -> Iterator[Problem]:
    """The count of a block is the number of committed images that mention it."""
    expected = np.zeros(len(ids), np.int64)
    for image in store.catalog.images():
        name = image.id.hex()
        try:
            manifest = store.manifest(image.id)
        except Corrupt as error:
            yield Problem("manifest-unreadable", f"image {name}: {error}")
            continue
        totals = (manifest.logical_bytes, manifest.zero_bytes, manifest.raw_bytes)
        if totals != (image.logical_bytes, image.zero_bytes, image.raw_bytes):
            yield Problem("wrong-totals", f"image {name} has other totals than its manifest")
        mentioned = _mentioned(manifest, image.id)
        at = np.minimum(np.searchsorted(ids, mentioned), max(len(ids) - 1, 0))
        present = ids[at] == mentioned
        expected[at[present]] += 1
        for missing in mentioned[~present][:1]:
            count = int((~present).sum())
            example = missing.ljust(32, b"\0").hex()
            yield Problem("block-missing", f"image {name} lacks {count} blocks, {example} first")
    wrong = np.flatnonzero(expected != rows["count"])
    for i in wrong[:100].tolist():
        block = ids[i : i + 1].tobytes().hex()
        counted = f"{int(rows['count'][i])} instead of {int(expected[i])}"
        yield Problem("wrong-count", f"block {block} has count {counted}")
    dead = {BlockId(ids[i : i + 1].tobytes()) for i in np.flatnonzero(rows["count"] == 0)}
    for odd in sorted(dead ^ store.catalog.tombstones())[:100]:
        yield Problem("wrong-tombstone", f"block {odd.hex()} is dead and not noted, or noted")


def _mentioned(manifest: Manifest, image: BlockId) -> NDArray[np.bytes_]:
    ids = np.append(manifest.blocks["id"], np.array([image], "V32"))
    return np.ascontiguousarray(ids).view("S32")


def _check_packs(
    store: LocalStore, ids: NDArray[np.bytes_], rows: NDArray[np.void]
) -> Iterator[Problem]:
    """Every block row points at what the index of its pack says."""
    fields = ("offset", "stored", "raw", "codec", "kind")
    confirmed = np.zeros(len(ids), np.bool_)
    known: set[int] = set()
    for pack in store.catalog.packs():
        known.add(pack.number)
        here = np.flatnonzero(rows["pack"] == pack.number)
        live = int(rows["stored"][here][rows["count"][here] > 0].sum(dtype=np.int64))
        if live != pack.live:
            what = f"pack {pack.id.hex()} has {pack.live} live bytes instead of {live}"
            yield Problem("wrong-live-bytes", what)
        path = store.layout.pack(pack.id)
        try:
            index = read_index(path)
        except Corrupt as error:
            confirmed[here] = True  # one problem is enough
            yield Problem("pack-damaged", str(error))
            continue
        if path.stat().st_size != pack.bytes:
            yield Problem("pack-damaged", f"pack {path} has another length")
        order = np.argsort(np.ascontiguousarray(index["id"]).view("S32"))
        sorted_ids = np.ascontiguousarray(index["id"]).view("S32")[order]
        at = np.minimum(np.searchsorted(sorted_ids, ids[here]), max(len(index) - 1, 0))
        entries = index[order[at]] if len(index) else index
        same = sorted_ids[at] == ids[here] if len(index) else np.zeros(len(here), np.bool_)
        for field in fields:
            same &= entries[field] == rows[field][here] if len(index) else same
        confirmed[here[same]] = True
    for i in np.flatnonzero(~confirmed)[:100].tolist():
        block = ids[i : i + 1].tobytes().hex()
        yield Problem("wrong-location", f"block {block} is not where the catalog says")


def _check_names(store: LocalStore) -> Iterator[Problem]:
    for name, image in store.catalog.names().items():
        if store.catalog.image(image) is None:
            yield Problem("dangling-name", f"{name} points at {image.hex()}, which is no image")


def _check_journal(store: LocalStore) -> Iterator[Problem]:
    """Replayed from its start, the journal gives the images, names and packs of the catalog."""
    try:
        tail = store.journal.read()
    except Corrupt as error:
        yield Problem("journal-damaged", str(error))
        return
    if tail.end != store.catalog.applied():
        yield Problem("journal-damaged", f"{store.layout.journal} ends where it should not")
        return
    images, packs, names = _replay([entry.change for entry in tail.entries])
    if (
        images != {image.id for image in store.catalog.images()}
        or packs != {pack.id for pack in store.catalog.packs()}
        or names != store.catalog.names()
    ):
        yield Problem("journal-differs", "the journal tells another story than the catalog")
    if tail.torn_bytes:
        what = f"{tail.torn_bytes} bytes of an unfinished command at the end of the journal"
        yield Problem("journal-torn", what, waste=True)


def _replay(changes: list[Change]) -> tuple[set[BlockId], set[PackId], dict[str, BlockId]]:
    images: set[BlockId] = set()
    packs: set[PackId] = set()
    names: dict[str, BlockId | None] = {}
    for change in changes:
        images = (images | set(change.images_added)) - set(change.images_removed)
        packs = (packs | set(change.packs_added)) - set(change.packs_dropped)
        names.update(change.names)
    return images, packs, {n: i for n, i in names.items() if i is not None}


def _find_waste(store: LocalStore) -> Iterator[Problem]:
    for path in leftovers(store):
        if path.parent == store.layout.staging:
            yield Problem("staging-leftover", f"an unfinished command left {path}", waste=True)
        else:
            yield Problem("orphan-pack", f"no image needs {path}", waste=True)


def _read_all(store: LocalStore, packs: list[PackId], progress: Progress) -> Iterator[Problem]:
    def verify(pack: PackId) -> list[Problem]:
        found = [Problem("data-damaged", str(e)) for e in verify_pack(store.layout, pack)]
        path = store.layout.pack(pack)
        progress(path.stat().st_size if path.exists() else 0)
        return found

    with ThreadPoolExecutor(worker_count()) as pool:
        for problems in pool.map(verify, packs):
            yield from problems
