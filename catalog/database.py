"""RocksDB through rocksdict: opening it, its settings, its errors."""

import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, cast

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    ColumnFamily,
    DBCompressionType,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from icefloe import durable
from icefloe.catalog import tables
from icefloe.errors import CorruptCatalog, IcefloeError, LimitReached, NoSpace, NotWritable

# Bounds on memory; both are far below what a single window of an image takes.
_CACHE_BYTES = 32 << 20
_WRITE_BUFFER_BYTES = 16 << 20

# Ten bits a key: a miss costs a hundredth of what it does without. Filters and indexes stay in
# memory, about 2 MB a million blocks: fetched through the cache, they make every commit to a
# large catalog three times slower (bench/catalog.py).
_BLOOM_BITS = 10

# Half the index entries of RocksDB's default of 4 KiB, at the same speed.
_BLOCK_BYTES = 8 << 10

# RocksDB keeps each file open that it may use; the usual limit of a process is 1024.
_MAX_OPEN_FILES = 256

# rocksdict's file of settings; all of them are given when a database is opened.
_CONFIG = "rocksdict-config.json"

# How long closing waits for a thread that is still at work in the database.
_BORROWED_SECONDS = 5.0

# Of RocksDB's logs (rocksdb/db/log_format.h).
_RECORD = struct.Struct("<4xHB")
_LOG_BLOCK = 32 << 10
_RECYCLED = (5, 6, 7, 8, 11)

_NOT_IN_VIEW = {_CONFIG, "LOCK", "LOG"}


def _options(cache: Cache) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_keep_log_file_num(1)
    options.set_max_open_files(_MAX_OPEN_FILES)
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_stats_dump_period_sec(0)
    # Ids are random: compressing them costs time and saves nothing.
    options.set_compression_type(DBCompressionType.none())
    blocks = BlockBasedOptions()
    blocks.set_bloom_filter(_BLOOM_BITS, False)
    blocks.set_block_size(_BLOCK_BYTES)
    blocks.set_block_cache(cache)
    options.set_block_based_table_factory(blocks)
    return options


def _view(path: Path) -> TemporaryDirectory[str]:
    """A folder with links to the files of a database, to read it without writing to it.

    rocksdict writes its settings anew whenever it opens a database, also to read. The store may
    be read-only or full, and another reader may be there at the same moment.
    """
    try:
        place = Path(gettempdir())
    except FileNotFoundError as error:
        raise NotWritable("a temporary folder", str(error.strerror)) from error
    names = set(os.listdir(path)) - _NOT_IN_VIEW
    with durable.write_errors(place):
        view = TemporaryDirectory(prefix="icefloe-")
        try:
            for name in names:
                os.symlink(path.absolute() / name, Path(view.name) / name)
        except BaseException:
            view.cleanup()
            raise
    return view


def _close(each: Rdict) -> None:
    """Waits for a thread that is asking it something at this moment, as one may after Ctrl-C."""
    deadline = time.monotonic() + _BORROWED_SECONDS
    while True:
        try:
            each.close()
            return
        except RuntimeError as error:  # PyO3's, for an object that another thread is in
            if "borrowed" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _check_manifest(path: Path) -> None:
    """Raises CorruptCatalog for a record in the MANIFEST at which RocksDB would look for ever.

    Its records (rocksdb/db/log_format.h) are checksum, 16-bit length, type; a type that says that
    its file is used again, as one flipped bit can make of another, has no end there.
    """
    try:
        named = (path / "CURRENT").read_text().strip()
        content = (path / named).read_bytes() if named.startswith("MANIFEST-") else b""
    except (OSError, ValueError):
        return  # RocksDB says it better
    position = 0
    while position + _RECORD.size <= len(content):
        if position % _LOG_BLOCK > _LOG_BLOCK - _RECORD.size:
            position += -position % _LOG_BLOCK
            continue
        length, kind = _RECORD.unpack_from(content, position)
        if kind in _RECYCLED:
            raise CorruptCatalog(path, f"{named} has a record of type {kind}")
        position += _RECORD.size + length


class Database:
    """The tables of one catalog. Writers must hold the store's lock."""

    def __init__(self, path: Path, *, write: bool, names: Sequence[str] = tables.ALL) -> None:
        self.path = path
        self.names = names
        options = _options(Cache(_CACHE_BYTES))
        access = AccessType.read_write() if write else AccessType.read_only()
        self._view = None if write else _view(path)
        try:
            self._open(self._view.name if self._view else str(path), options, access)
        except BaseException:
            self._clean_up()
            raise

    def _open(self, place: str, options: Options, access: AccessType) -> None:
        with self.errors():
            _check_manifest(self.path)
            if not self._view:
                # Cut short by a crash or a full disk, it would keep the database from opening.
                (self.path / _CONFIG).unlink(missing_ok=True)
            self._db = Rdict(
                place, options, {name: options for name in self.names}, access_type=access
            )
            self._tables = {name: self._db.get_column_family(name) for name in self.names}

    def _clean_up(self) -> None:
        if self._view:
            self._view.cleanup()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns RocksDB's errors, which are plain exceptions with a text, into ours."""
        try:
            yield
        except IcefloeError:
            raise
        except Exception as error:
            text = str(error)
            if "No space left" in text or "Disk quota" in text or "File too large" in text:
                raise NoSpace(self.path, text) from error
            if "Too many open files" in text:
                raise LimitReached(
                    f"cannot open {self.path} ({text})", "allow more open files (ulimit -n)"
                ) from error
            if "Read-only file system" in text or "Permission denied" in text:
                raise NotWritable(self.path, text) from error
            raise CorruptCatalog(self.path, text) from error

    def close(self) -> None:
        """Gives the files back. Once more does nothing."""
        tables_open, self._tables = self._tables, {}
        if not tables_open:
            return
        with self.errors():
            for each in (*tables_open.values(), self._db):
                _close(each)
        self._clean_up()

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value of a key, None when there is none."""
        with self.errors():
            value: bytes | None = self._tables[table].get(key)
            return value

    def get_many(self, table: str, keys: list[bytes]) -> list[bytes | None]:
        """The values of many keys, in their order."""
        if not keys:
            return []
        with self.errors():
            # The stub wants list[str | int | ...], which no list[bytes] is: lists are invariant.
            values = self._tables[table].get(cast(list[Any], keys))
            return cast(list[bytes | None], values)

    def items(self, table: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All rows from `start` on, in order of keys."""
        with self.errors():
            yield from self._tables[table].items(from_key=start)

    def batch(self) -> "Batch":
        """An empty batch of changes."""
        return Batch(self)

    def commit(self, batch: "Batch", *, sync: bool) -> None:
        """Applies a batch, all or nothing; on the disk on return when `sync`."""
        options = WriteOptions()
        options.sync = sync
        with durable.step("catalog commit", self.path), self.errors():
            self._db.write(batch.writes, options)

    def handle(self, table: str) -> ColumnFamily:
        """What a batch needs to know of a table."""
        return self._db.get_column_family_handle(table)


class Batch:
    """Changes to several tables that are applied together."""

    def __init__(self, database: Database) -> None:
        self.writes = WriteBatch(raw_mode=True)
        self._handles = {name: database.handle(name) for name in database.names}

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Sets a row."""
        self.writes.put(key, value, self._handles[table])

    def delete(self, table: str, key: bytes) -> None:
        """Removes a row, if it is there."""
        self.writes.delete(key, self._handles[table])
