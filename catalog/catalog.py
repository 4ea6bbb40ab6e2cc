"""Reads of the catalog's tables, as values of the field's own types."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from icefloe.catalog import tables
from icefloe.catalog.database import Database
from icefloe.catalog.tables import DeadBlocks, ImageRow, PackRow
from icefloe.errors import CorruptCatalog, ImageNotFound, UsageError
from icefloe.ids import BlockId, IdPrefix, Name, PackId
from icefloe.store.journal import START, Position
from icefloe.store.reader import Location


class Catalog:
    """Answers questions. What changes it is in icefloe.catalog.apply."""

    def __init__(self, path: Path, *, write: bool) -> None:
        self.database = Database(path, write=write)
        self._pack_ids: dict[int, PackId] = {}

    def close(self) -> None:
        """Gives the files back."""
        self.database.close()

    def applied(self) -> Position:
        """How far into the journal the catalog is."""
        value = self.database.get(tables.META, tables.APPLIED)
        if value is None:
            return START
        offset, sequence = np.frombuffer(value, tables.APPLIED_DTYPE)[0].item()
        return Position(offset, sequence)

    def set_applied(self, position: Position) -> None:
        """Notes that the catalog holds what the journal holds up to `position`."""
        batch = self.database.batch()
        value = np.array((position.offset, position.sequence), tables.APPLIED_DTYPE).tobytes()
        batch.put(tables.META, tables.APPLIED, value)
        self.database.commit(batch, sync=True)

    def find(self, ids: Sequence[BlockId]) -> tuple[NDArray[np.bool_], NDArray[np.void]]:
        """Which of the ids have a row, and the BLOCK_DTYPE rows of those."""
        values = self.database.get_many(tables.BLOCKS, list(ids))
        found = np.array([value is not None for value in values], np.bool_)
        return found, tables.block_rows([value for value in values if value is not None])

    def rows(self, ids: Sequence[BlockId]) -> NDArray[np.void]:
        """BLOCK_DTYPE rows of ids that all have one. Raises CorruptCatalog."""
        found, rows = self.find(ids)
        if not found.all():
            missing = ids[int(np.argmin(found))]
            raise CorruptCatalog(self.database.path, f"it lacks block {missing.hex()}")
        return rows

    def dead_blocks(self) -> DeadBlocks:
        """Every block whose count is zero."""
        tombs = list(self.database.items(tables.TOMBSTONES))
        ids = tuple(BlockId(key) for key, _ in tombs)
        rows = self.rows(ids)
        since = np.frombuffer(b"".join(value for _, value in tombs), tables.TIME_DTYPE)
        return DeadBlocks(rows["pack"], rows["stored"].astype(np.int64), since, ids)

    def known(self, ids: Sequence[BlockId]) -> list[bool]:
        """For each id, whether some pack has the block."""
        found: list[bool] = self.find(ids)[0].tolist()
        return found

    def locations(self, ids: Sequence[BlockId]) -> list[Location]:
        """Where each block lies. Raises CorruptCatalog when one is unknown."""
        return [
            Location(identity, self.pack_id(pack), offset, stored, raw, codec)
            for identity, (pack, offset, stored, raw, codec, _, _) in zip(
                ids, self.rows(ids).tolist(), strict=True
            )
        ]

    def pack_id(self, number: int) -> PackId:
        """The id of a pack that a block row names. Raises CorruptCatalog."""
        identity = self._pack_ids.get(number)
        if identity is None:
            value = self.database.get(tables.PACKS, tables.number_key(number))
            if value is None:
                raise CorruptCatalog(self.database.path, f"it lacks pack number {number}")
            identity = self._pack_ids[number] = tables.pack_row(number, value).id
        return identity

    def pack_numbers(self, packs: Sequence[PackId]) -> dict[PackId, int]:
        """Those of the packs that the catalog knows, each once, with their numbers."""
        values = self.database.get_many(tables.PACK_NUMBERS, list(packs))
        pairs = zip(packs, values, strict=True)
        return {pack: int.from_bytes(value, "big") for pack, value in pairs if value is not None}

    def all_blocks(self) -> tuple[NDArray[np.bytes_], NDArray[np.void]]:
        """Every block: ids (S32, sorted) and BLOCK_DTYPE rows. 58 bytes of memory a block."""
        keys, values = bytearray(), bytearray()
        for key, value in self.database.items(tables.BLOCKS):
            keys += key
            values += value
        return np.frombuffer(keys, "S32"), np.frombuffer(values, tables.BLOCK_DTYPE)

    def tombstones(self) -> set[BlockId]:
        """The blocks that are noted as dead."""
        return {BlockId(key) for key, _ in self.database.items(tables.TOMBSTONES)}

    def packs(self) -> Iterator[PackRow]:
        """All packs, in order of their numbers."""
        for key, value in self.database.items(tables.PACKS):
            yield tables.pack_row(int.from_bytes(key, "big"), value)

    def images(self) -> Iterator[ImageRow]:
        """All committed images, in order of their ids."""
        for key, value in self.database.items(tables.IMAGES):
            yield tables.image_row(key, value)

    def image(self, identity: BlockId) -> ImageRow | None:
        """The row of an image, None when it isn't committed."""
        value = self.database.get(tables.IMAGES, identity)
        return None if value is None else tables.image_row(identity, value)

    def hooks(self, fingerprints: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.void]]:
        """Where these pages stood: HOOK_DTYPE rows, and which of the pages each is of."""
        values = self.database.get_many(tables.HOOKS, _hook_keys(fingerprints))
        rows = [np.frombuffer(value or b"", tables.HOOK_DTYPE) for value in values]
        which = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        return which, np.concatenate([np.zeros(0, tables.HOOK_DTYPE), *rows])

    def set_hooks(self, fingerprints: NDArray[np.uint64], rows: NDArray[np.void]) -> None:
        """Notes where hooks stand (HOOK_DTYPE), of one image, before where else they stand."""
        batch = self.database.batch()
        which, others = self.hooks(fingerprints)
        images = others["image"].copy().view("S32")
        stays = np.isin(images, [each for each in np.unique(images) if self._is_there(each)])
        stays &= others["image"] != rows["image"][:1]
        values = [[row.tobytes()] for row in rows]
        for i, other in zip(which[stays].tolist(), others[stays], strict=True):
            values[i].append(other.tobytes())
        for key, value in zip(_hook_keys(fingerprints), values, strict=True):
            batch.put(tables.HOOKS, key, b"".join(value[: tables.MOST_PLACES]))
        self.database.commit(batch, sync=False)

    def _is_there(self, image: bytes) -> bool:
        return self.database.get(tables.IMAGES, image.ljust(32, b"\0")) is not None

    def names(self) -> dict[str, BlockId]:
        """Every name and the image that it points at."""
        return {
            key.decode(): BlockId(np.frombuffer(value, tables.NAME_DTYPE)["image"][0].tobytes())
            for key, value in self.database.items(tables.NAMES)
        }

    def named(self, name: Name) -> BlockId | None:
        """The image that a name points at, None when there is no such name."""
        value = self.database.get(tables.NAMES, str(name).encode())
        if value is None:
            return None
        return BlockId(np.frombuffer(value, tables.NAME_DTYPE)["image"][0].tobytes())

    def names_of(self, identity: BlockId) -> list[str]:
        """The names that point at an image, sorted."""
        return sorted(name for name, image in self.names().items() if image == identity)

    def resolve(self, reference: Name | IdPrefix) -> BlockId:
        """The image that a name or an id prefix means. Raises ImageNotFound or UsageError."""
        if isinstance(reference, IdPrefix):
            return self._resolve_prefix(reference)
        image = self.named(reference)
        if image is None:
            raise ImageNotFound(str(reference))
        return image

    def _resolve_prefix(self, prefix: IdPrefix) -> BlockId:
        start = bytes.fromhex(prefix.digits + "0" * (len(prefix.digits) % 2))
        found = []
        for key, _ in self.database.items(tables.IMAGES, start):
            if not key.hex().startswith(prefix.digits):
                break
            found.append(BlockId(key))
        if not found:
            raise ImageNotFound(str(prefix))
        if len(found) > 1:
            raise UsageError(f"{prefix} means {len(found)} images", "give more digits of the id")
        return found[0]


def _hook_keys(fingerprints: NDArray[np.uint64]) -> list[bytes]:
    joined = fingerprints.astype(">u8").tobytes()
    return [joined[i : i + 8] for i in range(0, len(joined), 8)]
