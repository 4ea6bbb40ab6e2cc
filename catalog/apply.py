"""Applies changes of the journal to the catalog: the only code that moves reference counts.

A commit, a crash recovery and a rebuild from nothing all come through `apply_changes`. One change
is one write batch, which also records how far into the journal the catalog is.

The count of a block is the number of committed images that mention it; an image mentions its
blocks and its own manifest, each once.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from icefloe.catalog import tables
from icefloe.catalog.catalog import Catalog
from icefloe.catalog.database import Batch
from icefloe.errors import Corrupt, CorruptCatalog, CorruptManifest
from icefloe.ids import BlockId, PackId
from icefloe.store import manifest as manifests
from icefloe.store.journal import Change, Entry, Position
from icefloe.store.layout import Layout
from icefloe.store.manifest import Manifest
from icefloe.store.pack import Index, read_index
from icefloe.store.reader import BlockReader, Location

# Rows that are Python objects at the same time: those of 200 GB would fill 200 MB.
_ROWS_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True)
class Lost:
    """An image of the journal that can't be brought back, and why."""

    image: BlockId
    reason: Corrupt


def apply_changes(
    layout: Layout, catalog: Catalog, entries: Sequence[Entry], *, sync: bool
) -> list[Lost]:
    """Brings the catalog up to the last entry. Returns the images that could not be applied.

    A pack that some entry drops may be gone from the disk already, and what lived in it be found
    only in a pack of a later entry. So the packs that stay come first, then images and names entry
    by entry, and at the very end the packs that go. The position moves once, with the last batch:
    interrupted, all of it is done again, which changes nothing that was done already.
    """
    if not entries:
        return []
    stays: dict[PackId, bool] = {}
    gone_at: dict[BlockId, int] = {}
    for i, entry in enumerate(entries):
        stays.update(dict.fromkeys(entry.change.packs_added, True))
        stays.update(dict.fromkeys(entry.change.packs_dropped, False))
        gone_at.update(dict.fromkeys(entry.change.images_removed, i))
    dropped = catalog.pack_numbers([pack for pack, stay in stays.items() if not stay])
    # What no image mentions counts as dead from now on: never too early for a grace period.
    now = entries[-1].change.time
    for pack in (pack for pack, stay in stays.items() if stay):
        arrival = Change("snapshot", now, packs_added=(pack,))
        Application(layout, catalog, arrival, dropped.values()).commit(None, sync=False)
    lost: list[Lost] = []
    for i, entry in enumerate(entries):
        last = i == len(entries) - 1
        packs_dropped = tuple(dropped) if last else ()
        change = replace(entry.change, packs_added=(), packs_dropped=packs_dropped)
        application = Application(layout, catalog, change)
        application.commit(entry.end if last else None, sync=last and sync)
        # An image that is removed later may do without.
        lost += [item for item in application.lost if gone_at.get(item.image, -1) <= i]
    return lost


@dataclass(frozen=True, slots=True)
class _Pack:
    number: int
    id: PackId
    index: Index


@dataclass(frozen=True, slots=True)
class _Mention:
    """An image that comes (+1) or goes (-1), with the ids that it mentions."""

    image: BlockId
    manifest: Manifest
    ids: NDArray[np.bytes_]


@dataclass(slots=True)
class _Rows:
    """The block rows that a change touches: sorted ids, and the rows before and after."""

    ids: NDArray[np.bytes_]
    found: NDArray[np.bool_]
    before: NDArray[np.void]
    after: NDArray[np.void]
    placed: NDArray[np.bool_]

    @property
    def present(self) -> NDArray[np.bool_]:
        return self.found | self.placed

    def at(self, ids: NDArray[np.bytes_]) -> NDArray[np.intp]:
        """Where these ids, all of them touched, stand."""
        return np.searchsorted(self.ids, ids)


def _sortable(ids: NDArray[np.void]) -> NDArray[np.bytes_]:
    """Ids as numpy can sort them. S32 pads with NUL, so 32 bytes compare exactly."""
    return np.ascontiguousarray(ids).view("S32")


def _each(chosen: NDArray[np.bool_]) -> Iterator[int]:
    at = np.flatnonzero(chosen)
    for first in range(0, len(at), _ROWS_AT_ONCE):
        yield from at[first : first + _ROWS_AT_ONCE].tolist()


def _cell(column: bytes, i: int, width: int) -> bytes:
    return column[i * width : (i + 1) * width]


def _split(ids: NDArray[np.bytes_]) -> list[bytes]:
    joined = ids.tobytes()
    return [joined[i : i + 32] for i in range(0, len(joined), 32)]


class Application:
    """One change as one batch: computed when made, written by `commit`.

    `lost` names the images that the change adds and that are not complete; they are left out.
    Blocks that lie in packs of the numbers `going` move to those that the change adds, where they
    have them.
    Raises Corrupt when the change would break an invariant.
    """

    def __init__(
        self,
        layout: Layout,
        catalog: Catalog,
        change: Change,
        going: Collection[int] = (),
    ) -> None:
        self._layout = layout
        self._catalog = catalog
        self._database = catalog.database
        self._change = change
        self._going = going
        self.lost: list[Lost] = []
        self._batch = self._compute()

    def commit(self, end: Position | None, *, sync: bool) -> None:
        """Writes the batch and, if given, that the catalog now stands at `end` of the journal."""
        if end is not None:
            applied = np.array((end.offset, end.sequence), tables.APPLIED_DTYPE)
            self._batch.put(tables.META, tables.APPLIED, applied.tobytes())
        self._database.commit(self._batch, sync=sync)

    def _compute(self) -> Batch:
        packs = self._new_packs()
        gone = self._dropped_packs()
        entering = self._entering(packs)
        leaving = self._leaving()
        rows = self._touched(packs, gone, [*entering, *leaving])
        self._place(rows, packs, gone)
        entering = [mention for mention in entering if self._complete(rows, mention)]
        self._count(rows, entering, leaving)
        batch = self._database.batch()
        self._put_blocks(batch, rows, gone)
        self._put_packs(batch, rows, packs, gone)
        self._put_images(batch, entering, leaving)
        return batch

    # What comes and goes

    def _new_packs(self) -> list[_Pack]:
        added = dict.fromkeys(self._change.packs_added)
        known = self._catalog.pack_numbers(list(added))
        value = self._database.get(tables.META, tables.NEXT_PACK)
        first = int.from_bytes(value, "big") if value else 0
        packs: list[_Pack] = []
        for identity in (pack for pack in added if pack not in known):
            try:
                index = read_index(self._layout.pack(identity))
            except Corrupt:
                continue  # the images in it turn out incomplete, and are lost by name
            packs.append(_Pack(first + len(packs), identity, index))
        return packs

    def _dropped_packs(self) -> dict[int, NDArray[np.bytes_]]:
        """Number and ids of each pack that goes."""
        numbers = self._catalog.pack_numbers(self._change.packs_dropped)
        return {number: self._ids_in(number, pack) for pack, number in numbers.items()}

    def _ids_in(self, number: int, identity: PackId) -> NDArray[np.bytes_]:
        try:
            return _sortable(read_index(self._layout.pack(identity))["id"])
        except Corrupt:  # damaged or gone: the slow way
            wanted = number.to_bytes(4, "little")
            rows = self._database.items(tables.BLOCKS)
            return np.array([key for key, row in rows if row[:4] == wanted], "S32")

    def _entering(self, packs: list[_Pack]) -> list[_Mention]:
        mentions = []
        for image in dict.fromkeys(self._change.images_added):
            if self._catalog.image(image) is not None:
                continue
            try:
                mentions.append(self._mention(image, self._locate(image, packs)))
            except Corrupt as reason:
                self.lost.append(Lost(image, _bare(reason)))
        return mentions

    def _leaving(self) -> list[_Mention]:
        committed = [i for i in self._change.images_removed if self._catalog.image(i)]
        return [self._mention(image, self._locate(image, [])) for image in dict.fromkeys(committed)]

    def _locate(self, image: BlockId, packs: list[_Pack]) -> Location:
        for pack in packs:
            at = np.flatnonzero(_sortable(pack.index["id"]) == _sortable(np.array([image], "V32")))
            if len(at):
                _, offset, stored, raw, codec, _, _ = pack.index[at[0]].item()
                return Location(image, pack.id, offset, stored, raw, codec)
        return self._catalog.locations([image])[0]

    def _mention(self, image: BlockId, location: Location) -> _Mention:
        with BlockReader(self._layout) as reader:
            manifest = manifests.decode(reader.read_one(location))
        own = np.array([image], "V32")
        ids = np.concatenate([np.ascontiguousarray(manifest.blocks["id"]), own])
        return _Mention(image, manifest, _sortable(ids))

    # Block rows

    def _touched(
        self, packs: list[_Pack], gone: dict[int, NDArray[np.bytes_]], mentions: list[_Mention]
    ) -> _Rows:
        groups = [_sortable(pack.index["id"]) for pack in packs]
        groups += [*gone.values(), *(mention.ids for mention in mentions)]
        ids = np.unique(np.concatenate(groups)) if groups else np.zeros(0, "S32")
        found = np.zeros(len(ids), np.bool_)
        before = np.zeros(len(ids), tables.BLOCK_DTYPE)
        for first in range(0, len(ids), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            values = self._database.get_many(tables.BLOCKS, _split(ids[part]))
            found[part] = [value is not None for value in values]
            rows = tables.block_rows([value for value in values if value is not None])
            before[part][found[part]] = rows
        return _Rows(ids, found, before, before.copy(), np.zeros(len(ids), np.bool_))

    def _place(self, rows: _Rows, packs: list[_Pack], gone: dict[int, NDArray[np.bytes_]]) -> None:
        """Points rows into the new packs, unless a pack that stays has the block already."""
        homeless = ~rows.found | np.isin(rows.before["pack"], [*gone, *self._going])
        for pack in packs:
            at = rows.at(_sortable(pack.index["id"]))
            take = homeless[at]
            for field in ("offset", "stored", "raw", "codec", "kind"):
                rows.after[field][at[take]] = pack.index[field][take]
            rows.after["pack"][at[take]] = pack.number
            rows.placed[at[take]] = True
            homeless[at] = False

    def _complete(self, rows: _Rows, mention: _Mention) -> bool:
        """A manifest is committed only when every block that it names is present."""
        at = rows.at(mention.ids)
        missing = mention.ids[~rows.present[at]]
        lengths = rows.after["raw"][at[:-1]]
        if len(missing):
            name = _split(missing[:1])[0].hex()
            reason: Corrupt = CorruptCatalog(self._database.path, f"it lacks block {name}")
        elif not (lengths == mention.manifest.blocks["length"]).all():
            reason = CorruptManifest("a block has another length than it says")
        else:
            return True
        self.lost.append(Lost(mention.image, reason))
        return False

    def _count(self, rows: _Rows, entering: list[_Mention], leaving: list[_Mention]) -> None:
        for mention in entering:
            rows.after["count"][rows.at(mention.ids)] += 1
        for mention in leaving:
            at = rows.at(mention.ids)
            if not (rows.after["count"][at] > 0).all():
                raise CorruptCatalog(self._database.path, "a reference count is too low")
            rows.after["count"][at] -= 1

    def _put_blocks(self, batch: Batch, rows: _Rows, gone: dict[int, NDArray[np.bytes_]]) -> None:
        # Nothing deletes a block whose count is above zero.
        leaves = rows.found & ~rows.placed & np.isin(rows.before["pack"], list(gone))
        if (rows.after["count"][leaves] > 0).any():
            raise CorruptCatalog(self._database.path, "a pack to be dropped holds blocks in use")
        ids, values = rows.ids.tobytes(), rows.after.tobytes()
        width = tables.BLOCK_DTYPE.itemsize
        was_dead = rows.found & (rows.before["count"] == 0)
        dead = rows.present & ~leaves & (rows.after["count"] == 0)
        written = rows.present & ~leaves & (rows.placed | (rows.before != rows.after))
        for i in _each(written):
            batch.put(tables.BLOCKS, _cell(ids, i, 32), _cell(values, i, width))
        for i in _each(leaves):
            batch.delete(tables.BLOCKS, _cell(ids, i, 32))
        time = np.array(self._change.time, tables.TIME_DTYPE).tobytes()
        for i in _each(dead & ~was_dead):
            batch.put(tables.TOMBSTONES, _cell(ids, i, 32), time)
        for i in _each(was_dead & ~dead):
            batch.delete(tables.TOMBSTONES, _cell(ids, i, 32))

    # The other tables

    def _put_packs(
        self,
        batch: Batch,
        rows: _Rows,
        packs: list[_Pack],
        gone: dict[int, NDArray[np.bytes_]],
    ) -> None:
        change = _live_bytes(rows.after[rows.present])
        for number, live in _live_bytes(rows.before[rows.found]).items():
            change[number] = change.get(number, 0) - live
        for pack in packs:
            length = self._layout.pack(pack.id).stat().st_size
            row = (pack.id, length, change.pop(pack.number, 0))
            key = tables.number_key(pack.number)
            batch.put(tables.PACKS, key, np.array(row, tables.PACK_DTYPE).tobytes())
            batch.put(tables.PACK_NUMBERS, pack.id, key)
        if packs:
            following = tables.number_key(packs[-1].number + 1)
            batch.put(tables.META, tables.NEXT_PACK, following)
        for number in gone:
            change.pop(number, None)
            batch.delete(tables.PACKS, tables.number_key(number))
            batch.delete(tables.PACK_NUMBERS, self._catalog.pack_id(number))
        for number, live in change.items():
            if live:
                self._move_live(batch, number, live)

    def _move_live(self, batch: Batch, number: int, live: int) -> None:
        key = tables.number_key(number)
        value = self._database.get(tables.PACKS, key)
        if value is None:
            raise CorruptCatalog(self._database.path, f"it lacks pack number {number}")
        row = np.frombuffer(value, tables.PACK_DTYPE).copy()
        row["live"] = int(row["live"][0]) + live
        batch.put(tables.PACKS, key, row.tobytes())

    def _put_images(self, batch: Batch, entering: list[_Mention], leaving: list[_Mention]) -> None:
        for mention in entering:
            manifest = mention.manifest
            row = np.array(
                (
                    self._change.time,
                    manifest.logical_bytes,
                    manifest.zero_bytes,
                    manifest.raw_bytes,
                    len(manifest.blocks),
                    len(manifest.files),
                ),
                tables.IMAGE_DTYPE,
            )
            batch.put(tables.IMAGES, mention.image, row.tobytes())
        for mention in leaving:
            batch.delete(tables.IMAGES, mention.image)
        committed = {mention.image for mention in entering}
        left = {mention.image for mention in leaving}
        for name, image in self._change.names.items():
            if image is None:
                batch.delete(tables.NAMES, name.encode())
            # A name points only at a committed image.
            elif image not in left and (image in committed or self._catalog.image(image)):
                row = np.array((image, self._change.time), tables.NAME_DTYPE)
                batch.put(tables.NAMES, name.encode(), row.tobytes())


def _bare(error: Corrupt) -> Corrupt:
    """The error without the frames that raised it: they hold on to an open database."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _live_bytes(rows: NDArray[np.void]) -> dict[int, int]:
    """Stored bytes in use, by pack number."""
    used = rows[rows["count"] > 0]
    numbers, inverse = np.unique(used["pack"], return_inverse=True)
    sums = np.zeros(len(numbers), np.int64)
    np.add.at(sums, inverse, used["stored"].astype(np.int64))
    return dict(zip(numbers.tolist(), sums.tolist(), strict=True))
