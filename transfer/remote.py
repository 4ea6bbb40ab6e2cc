"""A remote: images in an object store, by a fixed layout. docs/format.md, "Remote".

    format              version, and whether things are sealed
    packs/ab/X          packs, as in a store; X is the hex id, ab its first two digits
    indexes/X           the index of pack X
    manifests/X         images: manifest and places (transfer/image_object.py)
    names/NAME:TAG      which image a name means
    leases/X            who pushes or collects (transfer/leases.py)

Written in the order packs, indexes, manifests, names: whatever is there is whole.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
from blake3 import blake3

from icefloe.errors import (
    CorruptManifest,
    CorruptObject,
    KeyNeeded,
    NotInRemote,
    RemoteBusy,
    RemoteNotFound,
    UnknownFormat,
    UsageError,
)
from icefloe.ids import ID_BYTES, BlockId, IdPrefix, Name, PackId, parse_name
from icefloe.store.pack import INDEX_DTYPE, Index, bad_row
from icefloe.transfer import image_object
from icefloe.transfer.image_object import RemoteImage
from icefloe.transfer.objects import ABSENT, Conflict, NoSuchObject, ObjectInfo, Objects
from icefloe.transfer.options import RemoteOptions
from icefloe.transfer.patient import PatientObjects
from icefloe.transfer.sealing import Open, Sealing, Unsealable, load_keys

VERSION = 1

FORMAT = "format"
PACKS, INDEXES, MANIFESTS, NAMES = "packs/", "indexes/", "manifests/", "names/"

# How often something is looked up anew that others change at the same time.
_TRIES = 8

# No pack is that long; keeps sums of offsets in bounds.
_PACK_LIMIT = 1 << 48


@dataclass(frozen=True, slots=True)
class NameEntry:
    """What a name means. `tag` is that of its object; ABSENT and no image if there is none."""

    image: BlockId | None
    time: float
    tag: str


def pack_key(pack: PackId) -> str:
    """Where a pack lies."""
    return f"{PACKS}{pack[:1].hex()}/{pack.hex()}"


def index_key(pack: PackId) -> str:
    """Where the index of a pack lies."""
    return INDEXES + pack.hex()


class Remote:
    """An open remote. Any thread may use it."""

    def __init__(self, objects: PatientObjects, sealing: Sealing, requests: int) -> None:
        self.objects = objects
        self.sealing = sealing
        self.requests = requests
        self.id = ""
        self.is_new = False
        """It was made when it was opened, and nothing was put there since."""

    def __enter__(self) -> "Remote":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nobody needs it any more."""
        self.objects.stop()

    @property
    def url(self) -> str:
        """As the user wrote it."""
        return self.objects.url

    def where(self, key: str) -> str:
        """An object, as people would name it."""
        return f"{self.url.rstrip('/')}/{key}"

    def workers(self) -> ThreadPoolExecutor:
        """Threads that wait for requests. Left by an exception, they don't wait any more."""
        return _Workers(self.objects, self.requests)

    # Names

    def named(self, name: Name) -> NameEntry:
        """What a name means. Raises CorruptObject."""
        key = f"{NAMES}{name}"
        try:
            found = self.objects.read(key)
        except NoSuchObject:
            return NameEntry(None, 0.0, ABSENT)
        try:
            document = json.loads(bytes(self.sealing.open(f"name {name}".encode(), found.content)))
            image = BlockId(bytes.fromhex(document["image"]))
            entry = NameEntry(image, float(document["time"]), found.tag)
        except Unsealable as error:
            raise self.unsealable(key, error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptObject(self.where(key), "it is no name") from error
        if len(image) != ID_BYTES:
            raise CorruptObject(self.where(key), "it names no image")
        return entry

    def set_name(self, name: Name, image: BlockId, before: NameEntry) -> NameEntry:
        """Has a name mean an image; returns what it meant. Raises RemoteBusy.

        Whoever is last counts: a name that was changed meanwhile is changed again.
        """
        document = {"image": image.hex(), "time": round(time.time(), 3)}
        content = self.sealing.seal(f"name {name}".encode(), json.dumps(document).encode())
        for _ in range(_TRIES):
            try:
                self.objects.put(f"{NAMES}{name}", content, before.tag)
                return before
            except Conflict:
                before = self.named(name)
        raise RemoteBusy(self.where(f"{NAMES}{name}"), "others, who change it all the time")

    def names(self) -> dict[str, NameEntry]:
        """Every name. One request each: they are small, and there are few."""
        keys = [row.key.removeprefix(NAMES) for row in self.objects.list(NAMES)]
        names = [parse_name(key) for key in keys]
        with self.workers() as pool:
            return dict(zip(keys, pool.map(self.named, names), strict=True))

    def remove_names(self, names: Sequence[Name]) -> None:
        """Takes all of these names away or, when one isn't there, none. Raises NotInRemote."""
        for name in names:
            if self.named(name).image is None:
                raise NotInRemote(str(name), self.url)
        self.objects.delete([f"{NAMES}{name}" for name in names])

    # Images

    def resolve(self, reference: Name | IdPrefix) -> BlockId:
        """The image that a name or an id means. Raises NotInRemote."""
        if isinstance(reference, Name):
            image = self.named(reference).image
            if image is None:
                raise NotInRemote(str(reference), self.url)
            return image
        found = {e.image for e in self.names().values() if e.image is not None}
        fits = [image for image in found if image.hex().startswith(reference.digits)]
        if len(fits) > 1:
            raise UsageError(f"{reference} means {len(fits)} images", "give more digits of the id")
        if not fits:
            raise NotInRemote(str(reference), self.url)
        return fits[0]

    def find_image(self, image: BlockId) -> ObjectInfo | None:
        """The object that holds an image, if there is one."""
        for outer in self.sealing.outers(image):
            try:
                return self.objects.info(MANIFESTS + outer.hex())
            except NoSuchObject:
                continue
        return None

    def image(self, image: BlockId) -> RemoteImage:
        """An image. Raises NotInRemote, CorruptObject, CorruptManifest."""
        for outer in self.sealing.outers(image):
            key = MANIFESTS + outer.hex()
            try:
                found = self.objects.read(key)
            except NoSuchObject:
                continue
            return self._open_image(key, found.content)
        raise NotInRemote(f"@{image.hex()}", self.url)

    def image_at(self, key: str) -> RemoteImage:
        """The image in an object. Raises NoSuchObject, CorruptObject, CorruptManifest."""
        return self._open_image(key, self.objects.read(key).content)

    def _open_image(self, key: str, sealed: bytes) -> RemoteImage:
        outer = bytes.fromhex(key.removeprefix(MANIFESTS))
        try:
            image = image_object.decode(self.sealing.open(b"image " + outer, sealed))
        except Unsealable as error:
            raise self.unsealable(key, error) from error
        except CorruptManifest as error:
            raise CorruptObject(self.where(key), error.reason) from error
        if outer not in self.sealing.outers(image.id):
            raise CorruptObject(self.where(key), f"it is image {image.id.hex()}")
        return image

    def put_image(self, image: BlockId, content: bytes) -> None:
        """Publishes an image; all of its blocks have to be there."""
        self.is_new = False
        outer = self.sealing.outer(image)
        self.objects.put(MANIFESTS + outer.hex(), self.sealing.seal(b"image " + outer, content))

    # Packs

    def index(self, pack: PackId) -> Index:
        """The index of a pack. Raises NoSuchObject or CorruptObject."""
        key = index_key(pack)
        return self.open_index(key, pack, self.objects.read(key).content)

    def open_index(self, where: str, pack: PackId, content: bytes) -> Index:
        """The rows of an index as it is stored. Raises CorruptObject."""
        if blake3(content).digest() != pack:
            raise CorruptObject(self.where(where), "it doesn't hash to its name")
        try:
            plain = bytes(self.sealing.open(b"index", content))
        except Unsealable as error:
            raise self.unsealable(where, error) from error
        if len(plain) % INDEX_DTYPE.itemsize:
            raise CorruptObject(self.where(where), "it has no whole rows")
        index: Index = np.frombuffer(plain, INDEX_DTYPE)
        if (row := bad_row(index, _PACK_LIMIT, self.sealing.overhead)) is not None:
            raise CorruptObject(self.where(where), f"row {row} is out of bounds")
        return index

    def packs(self) -> Iterator[PackId]:
        """Every pack that has an index."""
        for row in self.objects.list(INDEXES):
            if (pack := pack_of(row.key)) is not None:
                yield pack

    def unsealable(self, key: str, error: Unsealable) -> Exception:
        """What to tell people."""
        known = ", ".join(self.sealing.key_ids)
        if "sealed with key" in str(error):
            return KeyNeeded(
                f"{self.where(key)} can't be read ({error}, known are {known})",
                "add that key to the file that --encrypt-key-file names",
            )
        return CorruptObject(self.where(key), str(error))


class _Workers(ThreadPoolExecutor):
    def __init__(self, objects: PatientObjects, requests: int) -> None:
        super().__init__(requests, "remote")
        self._objects = objects

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._objects.stop()
        self.shutdown(cancel_futures=kind is not None)


def pack_of(key: str) -> PackId | None:
    """The pack of which this is the object or the index."""
    try:
        identity = bytes.fromhex(key.rpartition("/")[2])
    except ValueError:
        return None
    return PackId(identity) if len(identity) == ID_BYTES else None


def open_remote(url: str, options: RemoteOptions, *, create: bool = False) -> Remote:
    """Opens what is at a URL; `create` makes a remote where there is none.

    Raises UsageError, RemoteNotFound, RemoteUnreachable, RemoteRefused, KeyNeeded or UnknownFormat.
    """
    objects = PatientObjects(_objects(url, options), options.patience)
    sealing: Sealing = Open() if options.keys is None else load_keys(options.keys)
    remote = Remote(objects, sealing, options.requests)
    first = tuple(sealing.key_ids[:1])
    for _ in range(_TRIES):
        try:
            found = objects.read(FORMAT)
        except NoSuchObject:
            if not create:
                raise RemoteNotFound(url) from None
            wanted, tag = _Format(os.urandom(16).hex(), bool(first), first), ABSENT
        else:
            there, tag = _decode_format(remote, found.content), found.tag
            _check_keys(remote, there)
            wanted = replace(there, keys=tuple(dict.fromkeys(first + there.keys)))
            remote.id = there.id
            if not create or set(wanted.keys) == set(there.keys):
                return remote
        with suppress(Conflict):
            objects.put(FORMAT, wanted.encode(), tag)
            remote.id, remote.is_new = wanted.id, tag == ABSENT
            return remote
    raise RemoteBusy(url, "others, who make it at the same time")


@dataclass(frozen=True, slots=True)
class _Format:
    """The object `format`. `keys`: the ids of all keys that ever sealed something there.

    `id` is drawn at random when the remote is made, and tells it from one that was there before.
    """

    id: str
    sealed: bool
    keys: tuple[str, ...]

    def encode(self) -> bytes:
        document = {
            "format": VERSION,
            "id": self.id,
            "sealed": self.sealed,
            "keys": self.keys,
        }
        return (json.dumps(document) + "\n").encode()


def _objects(url: str, options: RemoteOptions) -> Objects:
    scheme, separator, rest = url.partition("://")
    if not separator or not rest.strip("/"):
        raise UsageError(
            f"{url!r} is no remote", "write s3://BUCKET/PREFIX or file:///FOLDER, for example"
        )
    # Each is imported when it is needed: s3fs alone takes half a second.
    if scheme == "s3":
        from icefloe.transfer.s3 import S3Objects

        return S3Objects(url, options.s3, options.requests)
    if scheme == "file":
        from icefloe.transfer.folder import FolderObjects

        return FolderObjects(url)
    from icefloe.transfer.fsspec_objects import FsspecObjects

    return FsspecObjects(url)


def _decode_format(remote: Remote, content: bytes) -> _Format:
    try:
        document = json.loads(content)
        version = int(document["format"])
        keys = tuple(map(str, document["keys"]))
        found = _Format(str(document["id"]), bool(document["sealed"]), keys)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptObject(remote.where(FORMAT), "it says nothing of a format") from None
    if version > VERSION:
        raise UnknownFormat(remote.where(FORMAT), version, VERSION)
    return found


def _check_keys(remote: Remote, there: _Format) -> None:
    """Raises KeyNeeded unless the keys at hand fit."""
    mine, option = remote.sealing.key_ids, "name the file with its keys by --encrypt-key-file"
    if there.sealed and not mine:
        raise KeyNeeded(f"{remote.url} is encrypted", option)
    if mine and not there.sealed:
        raise KeyNeeded(
            f"{remote.url} isn't encrypted", "leave out the keys, or use another prefix"
        )
    if there.sealed and not set(there.keys) & set(mine):
        raise KeyNeeded(f"none of these keys is one of {remote.url}", option)
