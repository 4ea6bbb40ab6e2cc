"""`remote check`: whether everything that a name of a remote leads to is there, and whole.

Problems are damage, when an image can't be brought back as it was, or waste, which `remote gc`
removes. With `read_data`, every byte of every pack is read and verified.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from icefloe.errors import Corrupt, CorruptObject
from icefloe.ids import BlockId, PackId
from icefloe.store.codecs import Decoder
from icefloe.store.pack import TRAILER, TRAILER_MAGIC, Index
from icefloe.store.reader import Location
from icefloe.transfer.fetch import fetch_range
from icefloe.transfer.image_object import RemoteImage
from icefloe.transfer.objects import NoSuchObject
from icefloe.transfer.ranges import ranges
from icefloe.transfer.remote import (
    INDEXES,
    MANIFESTS,
    PACKS,
    Remote,
    index_key,
    pack_key,
    pack_of,
)

_READ_BYTES = 8 << 20
_READ_RAW_BYTES = 32 << 20

Progress = Callable[[int], object]
"""Called with bytes of packs that were read."""


@dataclass(frozen=True, slots=True)
class RemoteProblem:
    """Something that isn't as it should be; `waste` if nothing is lost by it."""

    kind: str
    what: str
    waste: bool = False


@dataclass(frozen=True, slots=True)
class RemoteAudit:
    """What was looked at, and what was found."""

    images: int
    names: int
    blocks: int
    packs: int
    problems: tuple[RemoteProblem, ...]

    @property
    def ok(self) -> bool:
        """Nothing is damaged."""
        return all(problem.waste for problem in self.problems)


def check_remote(
    remote: Remote, *, read_data: bool = False, progress: Progress = lambda count: None
) -> RemoteAudit:
    """Looks at all of a remote. Raises RemoteUnreachable, RemoteRefused or KeyNeeded.

    What is pushed or collected meanwhile may show up as a problem: look again.
    """
    problems: list[RemoteProblem] = []
    names = remote.names()
    rows = {row.key: row for row in remote.objects.list(MANIFESTS) if pack_of(row.key)}
    sizes = {row.key: row.size for row in remote.objects.list(PACKS)}
    listed = [pack for row in remote.objects.list(INDEXES) if (pack := pack_of(row.key))]
    indexes = _indexes(remote, listed, problems)
    ids = np.concatenate([np.zeros(0, "V32"), *(index["id"] for index in indexes.values())])
    there = np.unique(np.ascontiguousarray(ids).view("S32"))
    problems += _pack_problems(remote, indexes, listed, sizes)
    named = {entry.image for entry in names.values()}
    found = set()
    with remote.workers() as pool:
        for key, image in zip(rows, pool.map(lambda key: _image(remote, key), rows), strict=True):
            if isinstance(image, RemoteProblem):
                problems.append(image)
                continue
            found.add(image.id)
            lacking = ~np.isin(np.ascontiguousarray(image.manifest.blocks["id"]).view("S32"), there)
            if lacking.any():
                first = image.manifest.blocks["id"][lacking][0].tobytes().hex()
                what = f"{remote.where(key)} lacks {lacking.sum()} blocks, {first} first"
                problems.append(RemoteProblem("missing-blocks", what, image.id not in named))
            elif image.id not in named:
                problems.append(RemoteProblem("unnamed-image", remote.where(key), waste=True))
    for name, entry in names.items():
        if entry.image is not None and entry.image not in found:
            what = f"{name} means @{entry.image.hex()}, which can't be read"
            problems.append(RemoteProblem("dangling-name", what))
    if read_data:
        with remote.workers() as pool:
            whole = [pack for pack in indexes if pack_key(pack) in sizes]
            read = pool.map(lambda pack: list(_read(remote, pack, indexes[pack], sizes)), whole)
            for pack, bad in zip(whole, read, strict=True):
                problems += bad
                progress(sizes[pack_key(pack)])
    return RemoteAudit(len(found), len(names), len(there), len(indexes), tuple(problems))


def _indexes(
    remote: Remote, packs: Sequence[PackId], problems: list[RemoteProblem]
) -> dict[PackId, Index]:
    def index(pack: PackId) -> Index | RemoteProblem:
        try:
            return remote.index(pack)
        except NoSuchObject:
            return RemoteProblem("missing-index", remote.where(index_key(pack)), waste=True)
        except CorruptObject as error:
            return RemoteProblem("corrupt-index", error.happened)

    found = {}
    with remote.workers() as pool:
        for pack, answer in zip(packs, pool.map(index, packs), strict=True):
            if isinstance(answer, RemoteProblem):
                problems.append(answer)
            else:
                found[pack] = answer
    return found


def _pack_problems(
    remote: Remote, indexes: dict[PackId, Index], listed: Sequence[PackId], sizes: dict[str, int]
) -> Iterator[RemoteProblem]:
    known = {pack_key(pack) for pack in listed}
    for key in sizes.keys() - known:
        yield RemoteProblem("orphan-pack", remote.where(key), waste=True)
    for pack, index in indexes.items():
        size = sizes.get(pack_key(pack))
        stop = int((index["offset"] + index["stored"]).max(initial=0))
        wanted = stop + index.nbytes + remote.sealing.overhead + TRAILER.size
        if size is None:
            yield RemoteProblem("missing-pack", remote.where(pack_key(pack)))
        elif size != wanted:
            what = f"{remote.where(pack_key(pack))} has {size} bytes instead of {wanted}"
            yield RemoteProblem("corrupt-pack", what)


def _image(remote: Remote, key: str) -> RemoteImage | RemoteProblem:
    try:
        return remote.image_at(key)
    except NoSuchObject:
        return RemoteProblem("missing-image", remote.where(key), waste=True)
    except Corrupt as error:
        return RemoteProblem("corrupt-image", error.happened)


def _read(
    remote: Remote, pack: PackId, index: Index, sizes: dict[str, int]
) -> Iterator[RemoteProblem]:
    """Whatever of a pack isn't what its index says."""
    decoder = Decoder()
    located = [
        (0, Location(BlockId(identity), pack, offset, stored, raw, codec))
        for identity, offset, stored, raw, codec, _, _ in index.tolist()
    ]
    for part in ranges(located, _READ_BYTES, _READ_RAW_BYTES):
        try:
            fetch_range(remote, part, decoder)
        except (CorruptObject, NoSuchObject) as error:
            words = error.happened if isinstance(error, CorruptObject) else str(error)
            yield RemoteProblem("corrupt-block", words)
    start = sizes[pack_key(pack)] - index.nbytes - remote.sealing.overhead - TRAILER.size
    end = bytearray(max(0, sizes[pack_key(pack)] - start))
    count = remote.objects.read_into(pack_key(pack), max(0, start), memoryview(end))
    stored_index, trailer = bytes(end[: -TRAILER.size]), bytes(end[-TRAILER.size :])
    offset, rows, _, digest, _, magic = TRAILER.unpack(trailer)
    right = (offset, rows, digest, magic) == (start, len(index), pack, TRAILER_MAGIC)
    if count != len(end) or not right or blake3(stored_index).digest() != pack:
        yield RemoteProblem("corrupt-pack", f"{remote.where(pack_key(pack))} has no valid end")
