"""What a remote holds, as far as this store knows: kept beside it, so that it is learnt once.

A small database: for each pack its blocks, for each block where it lies. `learn` brings it up to
what `indexes/` lists, and fetches only what is new there.
"""

import fcntl
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icefloe import durable
from icefloe.catalog.database import Database
from icefloe.errors import CorruptCatalog
from icefloe.ids import ID_BYTES, BlockId, PackId
from icefloe.store.layout import Layout
from icefloe.store.pack import Index
from icefloe.store.reader import Location
from icefloe.transfer.objects import NoSuchObject
from icefloe.transfer.remote import Remote

_PACKS = "packs.v1"
"""Pack id -> the ids of its blocks."""

_BLOCKS = "blocks.v1"
"""Block id -> _PLACE_DTYPE."""

_META = "meta.v1"
"""`fence` -> the number of collections that were seen (u64)."""

_FENCE = b"fence"

_PLACE_DTYPE = np.dtype(
    [("pack", "V32"), ("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("codec", "u1")]
)


@contextmanager
def open_known(layout: Layout, remote: Remote) -> Iterator["Known"]:
    """Opens what is known of a remote; one process at a time, so briefly."""
    folder = layout.remote(remote.id)
    durable.make_folder(folder)
    path = folder / "blocks"
    with durable.write_errors(folder), open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        database = _open(path)
        try:
            yield Known(database, remote)
        finally:
            database.close()


def _open(path: Path) -> Database:
    """All of it can be learnt again, so what is damaged goes."""
    names = (_PACKS, _BLOCKS, _META)
    try:
        return Database(path, write=True, names=names)
    except CorruptCatalog:
        shutil.rmtree(path, ignore_errors=True)
        return Database(path, write=True, names=names)


@dataclass(slots=True)
class Known:
    """See `open_known`."""

    _database: Database
    _remote: Remote

    @property
    def fence(self) -> int:
        """How many collections there had been when this was learnt."""
        return int.from_bytes(self._database.get(_META, _FENCE) or b"", "little")

    def find(self, ids: Sequence[BlockId]) -> dict[BlockId, Location]:
        """Where blocks lie, those of which that is known."""
        values = self._database.get_many(_BLOCKS, list(ids))
        found = {}
        for identity, value in zip(ids, values, strict=True):
            if value is not None:
                pack, offset, stored, raw, codec = np.frombuffer(value, _PLACE_DTYPE)[0].item()
                found[identity] = Location(identity, PackId(pack), offset, stored, raw, codec)
        return found

    def learn(self, fence: int) -> None:
        """Brings all of it up to what is there now; `fence` was read before."""
        listed = set(self._remote.packs())
        known = {PackId(key) for key, _ in self._database.items(_PACKS)}
        for pack in known - listed:
            self._forget(pack)
        with self._remote.workers() as pool:
            missing = sorted(listed - known)
            for pack, index in zip(missing, pool.map(self._index, missing), strict=True):
                if index is not None:
                    self.add(pack, index)
        batch = self._database.batch()
        batch.put(_META, _FENCE, fence.to_bytes(8, "little"))
        self._database.commit(batch, sync=False)

    def _index(self, pack: PackId) -> Index | None:
        try:
            return self._remote.index(pack)
        except NoSuchObject:
            return None  # collected meanwhile

    def add(self, pack: PackId, index: Index) -> None:
        """A pack that is there."""
        places = np.zeros(len(index), _PLACE_DTYPE)
        places["pack"] = np.frombuffer(pack, "V32")
        for name in ("offset", "stored", "raw", "codec"):
            places[name] = index[name]
        ids, values = index["id"].tobytes(), places.tobytes()
        width = _PLACE_DTYPE.itemsize
        batch = self._database.batch()
        batch.put(_PACKS, pack, ids)
        for i in range(len(index)):
            identity = ids[i * ID_BYTES : (i + 1) * ID_BYTES]
            batch.put(_BLOCKS, identity, values[i * width : (i + 1) * width])
        self._database.commit(batch, sync=False)

    def _forget(self, pack: PackId) -> None:
        ids = self._database.get(_PACKS, pack) or b""
        keys = [BlockId(ids[i : i + ID_BYTES]) for i in range(0, len(ids), ID_BYTES)]
        batch = self._database.batch()
        for identity, location in self.find(keys).items():
            if location.pack == pack:
                batch.delete(_BLOCKS, identity)
        batch.delete(_PACKS, pack)
        self._database.commit(batch, sync=False)
