"""A checkpoint in the store, seen as the folder of files that CRIU wrote."""

from collections.abc import Iterator
from contextlib import closing

from icefloe.capture.blocks import BlockSource, read_extents, with_zeros
from icefloe.capture.tree import PARENT
from icefloe.errors import BadImage
from icefloe.store.manifest import Extents, FileKind, ImageFile, Manifest

INVENTORY = "inventory.img"

# More than any file but a pages file has; a hostile one would take the memory.
_MAX_READ = 1 << 30


class StoredImage:
    """Files by the paths that they have in CRIU's image directory.

    An archive of a container engine has that directory in a folder of its own.
    """

    def __init__(self, manifest: Manifest, source: BlockSource) -> None:
        """Raises BadImage when the image holds no checkpoint of CRIU."""
        self.manifest = manifest
        self.source = source
        self._index = {file.path: i for i, file in enumerate(manifest.files)}
        self.base = self._find_base()

    def _find_base(self) -> str:
        found = [
            path.removesuffix(INVENTORY)
            for path in self._index
            if path.rpartition("/")[2] == INVENTORY and PARENT not in path.split("/")[:-1]
        ]
        if not found:
            raise BadImage(INVENTORY, "there is none: this is no checkpoint of CRIU")
        return min(found, key=lambda folder: (folder.count("/"), folder))

    def path(self, name: str) -> str:
        """The path in the image, as `icefloe show` prints it."""
        return self.base + name

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return self.base + name in self._index

    def names(self) -> Iterator[str]:
        """Every entry directly in CRIU's directory, in order."""
        for path in self._index:
            name = path.removeprefix(self.base)
            if path.startswith(self.base) and name and "/" not in name:
                yield name

    def file(self, name: str) -> ImageFile:
        """One entry, with hard links followed. Raises BadImage when there is none."""
        return self.manifest.files[self._regular(name)]

    def extents(self, name: str) -> Extents:
        """What a file consists of. Raises BadImage when there is none."""
        return self.manifest.extents_of(self._regular(name))

    def read(self, name: str) -> bytes:
        """A whole file. Raises BadImage when there is none or it is huge, or Corrupt."""
        if self.file(name).size > _MAX_READ:
            raise BadImage(self.path(name), "it is larger than any such file can be")
        with closing(self.source.open()) as blocks:
            return b"".join(
                bytes(piece) for piece in with_zeros(read_extents(blocks, self.extents(name)))
            )

    def number(self, name: str) -> int:
        """The position in the manifest, with hard links followed. Raises BadImage."""
        number = self._index.get(self.base + name)
        if number is None:
            raise BadImage(self.base + name, "it is not there")
        file = self.manifest.files[number]
        return self._index[file.link] if file.kind is FileKind.HARDLINK else number

    def _regular(self, name: str) -> int:
        number = self.number(name)
        file = self.manifest.files[number]
        if file.kind is not FileKind.REGULAR:
            raise BadImage(file.path, "it is no regular file")
        return number
