"""Where things lie in a store's folder. docs/format.md, "Folder".

format      version and chunking parameters, JSON
lock        flock: one writer or many readers
journal     every commit, name change and removal
packs/ab/   published packs, by the first byte of their id
staging/    packs being written
catalog/    RocksDB, can be rebuilt from packs and journal
traces/     what restored processes touch first, by name of the image; made by the first restore
remotes/    what remotes hold, by their ids; made by the first push
arriving/   packs of images that are being pulled, by the image's id: laid out like a store
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from icefloe import durable
from icefloe.chunker import grains
from icefloe.errors import Corrupt, StoreNotFound, UnknownFormat
from icefloe.ids import ID_BYTES, BlockId, PackId

FORMAT_VERSION = 1

_PACK_NAME = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_TRACE_NAME = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\.new")


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one store."""

    root: Path

    @property
    def format(self) -> Path:
        return self.root / "format"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def packs(self) -> Path:
        return self.root / "packs"

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def catalog(self) -> Path:
        return self.root / "catalog"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    def pack(self, pack: PackId) -> Path:
        """Where a published pack lies."""
        return self.packs / pack[:1].hex() / pack.hex()

    def remote(self, identity: str) -> Path:
        """Where it is noted what a remote holds; its id is anybody's text."""
        return self.root / "remotes" / blake3(identity.encode()).hexdigest(16)

    @property
    def arriving(self) -> Path:
        return self.root / "arriving"

    def arrival(self, image: BlockId) -> "Layout":
        """Where the packs of an image lie that is being pulled."""
        return Layout(self.arriving / image.hex())

    def trace(self, lineage: str) -> Path:
        """Where the trace of the images with this name lies; names are too long for files."""
        return self.traces / blake3(lineage.encode()).hexdigest(16)

    def recorded(self) -> Iterator[Path]:
        """Every trace on disk, unfinished ones too. Files with other names are passed over."""
        if self.traces.is_dir():
            names = filter(_TRACE_NAME.fullmatch, sorted(os.listdir(self.traces)))
            yield from map(self.traces.joinpath, names)

    def published(self) -> Iterator[PackId]:
        """Every pack on disk, in order of ids. Files with other names are passed over."""
        for folder in sorted(self.packs.glob("[0-9a-f][0-9a-f]")):
            for path in sorted(folder.iterdir()):
                if _PACK_NAME.fullmatch(path.name) and path.name.startswith(folder.name):
                    yield PackId(bytes.fromhex(path.name))


def _description() -> bytes:
    chunking = {
        "average": grains.AVERAGE_BLOCK,
        "min": grains.MIN_BLOCK,
        "max": grains.MAX_BLOCK,
        "min_zero_run": grains.MIN_ZERO_RUN,
    }
    return (json.dumps({"format": FORMAT_VERSION, "chunking": chunking}) + "\n").encode()


def make_folders(layout: Layout) -> None:
    """Makes the folders of a store, those that are missing."""
    for folder in (layout.root, layout.packs, layout.staging):
        durable.make_folder(folder)


def describe(layout: Layout) -> None:
    """Makes the folder a store. The caller holds the lock."""
    if not layout.format.exists():
        durable.publish(layout.format, _description())


def require(layout: Layout) -> None:
    """Raises StoreNotFound, UnknownFormat or Corrupt unless a store of this version is there."""
    try:
        content = layout.format.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreNotFound(layout.root) from None
    try:
        version = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        version = None
    if not isinstance(version, int):
        raise Corrupt(f"{layout.format} is damaged", _rewrite_advice(layout))
    if version > FORMAT_VERSION:
        raise UnknownFormat(layout.root, version, FORMAT_VERSION)
    if content != _description():
        raise Corrupt(f"{layout.format} is damaged", _rewrite_advice(layout))


def _rewrite_advice(layout: Layout) -> str:
    return f"remove {layout.format}; the next `icefloe add` writes it anew"
