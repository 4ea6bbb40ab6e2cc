"""One store, opened by one process: lock, journal, packs and catalog together.

A writer first brings the catalog up to the journal: after a crash, and after the loss of the
whole catalog folder, that is all there is to do.
"""

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from icefloe.catalog.apply import Application, Lost, apply_changes
from icefloe.catalog.catalog import Catalog
from icefloe.catalog.lock import WAIT_SECONDS, Lock
from icefloe.errors import Corrupt, CorruptJournal
from icefloe.ids import BlockId, PackId
from icefloe.store import layout as layouts
from icefloe.store import manifest as manifests
from icefloe.store.journal import START, Change, Entry, Journal, Operation, Position
from icefloe.store.layout import Layout
from icefloe.store.manifest import Manifest
from icefloe.store.pack import Kind, read_index
from icefloe.store.reader import BlockReader


@dataclass(slots=True)
class LocalStore:
    """An open store.

    `lost` names images of the journal that recovery could not bring back; `salvaged` says that
    the journal was damaged and has been written anew.
    """

    layout: Layout
    catalog: Catalog
    journal: Journal
    writable: bool
    lost: list[Lost]
    _lock: Lock
    _position: Position
    salvaged: bool = False

    def __enter__(self) -> "LocalStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the catalog and lets the next process in. Once more does nothing."""
        self.catalog.close()
        self._lock.release()

    def manifest(self, image: BlockId) -> Manifest:
        """The manifest of a committed image. Raises Corrupt."""
        (location,) = self.catalog.locations([image])
        with BlockReader(self.layout) as reader:
            return manifests.decode(reader.read_one(location))

    def commit(
        self,
        operation: Operation,
        *,
        packs_added: tuple[PackId, ...] = (),
        packs_dropped: tuple[PackId, ...] = (),
        images_added: tuple[BlockId, ...] = (),
        images_removed: tuple[BlockId, ...] = (),
        names: Mapping[str, BlockId | None] | None = None,
    ) -> None:
        """Makes one change durable: in the journal first, then in the catalog.

        The packs must be durable already. From the moment the journal has it, the change is
        made: if the catalog can't follow, the next writer brings it up. Raises Corrupt, with
        nothing changed, when the change would break an invariant.
        """
        change = Change(
            operation=operation,
            time=round(time.time(), 3),
            packs_added=packs_added,
            packs_dropped=packs_dropped,
            images_added=images_added,
            images_removed=images_removed,
            names=names or {},
        )
        application = Application(self.layout, self.catalog, change)
        if application.lost:
            raise application.lost[0].reason
        self._position = self.journal.append(change, self._position)
        # A pack is unlinked after its change, so the catalog must not fall back to before it.
        application.commit(self._position, sync=bool(packs_dropped))

    def cut_torn_line(self) -> None:
        """Removes what a killed command left at the end of the journal."""
        self.journal.cut(self._position)

    def rebuild(self) -> None:
        """Makes the catalog anew from packs and journal. Raises CorruptJournal."""
        tail = self.journal.read()
        self.catalog.close()
        shutil.rmtree(self.layout.catalog)
        self.catalog = Catalog(self.layout.catalog, write=True)
        self.lost = apply_changes(self.layout, self.catalog, tail.entries, sync=True)
        self._position = tail.end

    def rewrite_journal(self) -> None:
        """Replaces a damaged journal by one change that holds what the catalog holds."""
        change = Change(
            operation="snapshot",
            time=round(time.time(), 3),
            packs_added=tuple(pack.id for pack in self.catalog.packs()),
            images_added=tuple(image.id for image in self.catalog.images()),
            names=self.catalog.names(),
        )
        self._position = self.journal.rewrite(change)
        self.catalog.set_applied(self._position)


def open_store(
    root: Path,
    *,
    write: bool,
    create: bool = False,
    repair: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> LocalStore:
    """Opens the store in `root`; readers share it, a writer has it alone.

    `create` makes a store where there is none. `repair` lets a writer open a store whose journal
    is damaged. Raises StoreNotFound, StoreBusy, Corrupt, NoSpace or NotWritable.
    """
    layout = Layout(root)
    if create:
        _create(layout, wait_seconds)
    layouts.require(layout)
    if write:
        return _open_to_write(layout, wait_seconds, repair)
    store = _open_to_read(layout, wait_seconds)
    if store is None:  # a crash left work to do
        _open_to_write(layout, wait_seconds, repair).close()
        store = _open_to_read(layout, wait_seconds)
    if store is None:
        raise CorruptJournal(layout.journal, "it keeps running ahead of the catalog")
    return store


def _create(layout: Layout, wait_seconds: float) -> None:
    layouts.make_folders(layout)
    if not layout.format.exists():
        lock = Lock(layout.lock, write=True, wait_seconds=wait_seconds)
        try:
            layouts.describe(layout)
        finally:
            lock.release()


def _open_to_read(layout: Layout, wait_seconds: float) -> LocalStore | None:
    """None when the catalog is behind the journal: bringing it up takes a writer."""
    lock = Lock(layout.lock, write=False, wait_seconds=wait_seconds)
    try:
        if not (layout.catalog / "CURRENT").exists():
            lock.release()
            return None
        catalog = Catalog(layout.catalog, write=False)
        journal, position = Journal(layout.journal), catalog.applied()
        if _behind(journal, position):
            catalog.close()
            lock.release()
            return None
    except BaseException:
        lock.release()
        raise
    return LocalStore(layout, catalog, journal, False, [], lock, position)


def _behind(journal: Journal, position: Position) -> bool:
    try:
        return bool(journal.read(position).entries)
    except CorruptJournal:
        return False  # the catalog is whole, and `check` reports the journal


def _open_to_write(layout: Layout, wait_seconds: float, repair: bool) -> LocalStore:
    lock = Lock(layout.lock, write=True, wait_seconds=wait_seconds)
    catalog = None
    try:
        journal = Journal(layout.journal)
        fresh = not layout.catalog.exists() and next(layout.published(), None) is None
        if fresh:
            journal.create()
        catalog = Catalog(layout.catalog, write=True)
        store = LocalStore(layout, catalog, journal, True, [], lock, START)
        _recover(store, repair)
    except BaseException:
        if catalog is not None:
            catalog.close()
        lock.release()
        raise
    return store


def _recover(store: LocalStore, repair: bool) -> None:
    """Applies what the journal holds beyond the catalog."""
    position = store.catalog.applied()
    try:
        tail = store.journal.read(position)
    except CorruptJournal:
        if not repair:
            raise
        _salvage(store, position)
        return
    store._position = tail.end
    with suppress(Corrupt):
        store.lost = apply_changes(store.layout, store.catalog, tail.entries, sync=True)
        return
    # The catalog fell back to before a collection whose packs are gone: start over.
    store.rebuild()


def _salvage(store: LocalStore, position: Position) -> None:
    """The journal is damaged where the catalog would need it: saves all that can be found.

    Every pack on the disk counts, and every change that can still be read is applied. Images in
    these packs that no such change mentions come back without a name, rather than being
    collected as garbage; some of them may have been removed once.
    """
    known = {pack.id for pack in store.catalog.packs()}
    unknown = tuple(pack for pack in store.layout.published() if pack not in known)
    changes = store.journal.salvage(position)
    mentioned = {i for c in changes for i in (*c.images_added, *c.images_removed)}
    found = tuple(i for i in _images_in(store.layout, unknown) if i not in mentioned)
    now = round(time.time(), 3)
    kept = [replace(change, packs_added=(), packs_dropped=()) for change in changes]
    all_changes = [
        Change("snapshot", now, packs_added=unknown),
        *kept,
        Change("snapshot", now, images_added=found),
    ]
    entries = [Entry(change, position) for change in all_changes]
    store.lost = apply_changes(store.layout, store.catalog, entries, sync=True)
    store.rewrite_journal()
    store.salvaged = True


def _images_in(layout: Layout, packs: Iterable[PackId]) -> Iterator[BlockId]:
    for pack in packs:
        try:
            index = read_index(layout.pack(pack))
        except Corrupt:
            continue  # `check` reports it
        for identity in index["id"][index["kind"] == Kind.MANIFEST]:
            yield BlockId(identity.tobytes())
