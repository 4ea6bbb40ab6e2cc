"""Images go to a remote and come back: only what is missing, whole or not at all."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_store
from remotes import QUICK, key_file, keys_of, memory_url, opened
from small_store import KIB, NOISE, Tree

from icefloe.catalog import LocalStore, open_store
from icefloe.errors import (
    CorruptObject,
    KeyNeeded,
    NotInRemote,
    RemoteNotFound,
    StoreBusy,
    UnknownFormat,
    UsageError,
)
from icefloe.gc.audit import check
from icefloe.gc.removal import remove
from icefloe.gc.sweep import GcOptions, collect
from icefloe.ids import BlockId, IdPrefix, Name, parse_name
from icefloe.store.codecs import Encoder
from icefloe.transfer import push as pushes
from icefloe.transfer.audit import check_remote
from icefloe.transfer.pull import Arrivals, PullResult, pull_image
from icefloe.transfer.push import PushResult, push_image
from icefloe.transfer.remote import Remote, index_key, open_remote, pack_key, pack_of

KEYS = ["11" * 32, "22" * 32]

FIRST: Tree = {
    "pages-1.img": small_store.pages(
        [NOISE[0], NOISE[1], bytes(80 * KIB), small_store.text(99, 1)]
    ),
    "core.img": b"c" * 9,
}
SECOND: Tree = {"pages-1.img": FIRST["pages-1.img"] + NOISE[2], "core.img": b"d" * 9}


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "PACK_BYTES", 150 * KIB)
    monkeypatch.setattr(pushes, "_WORTH_LISTING", 100 * KIB)


@pytest.fixture(params=["open", "sealed"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return key_file(tmp_path / "keys", KEYS[0]) if request.param == "sealed" else None


@pytest.fixture
def remote(keys: Path | None) -> Iterator[Remote]:
    with opened(memory_url(), keys) as remote:
        yield remote


@dataclass
class Node:
    """A store somewhere."""

    root: Path

    def add(self, tree: Tree, name: str) -> BlockId:
        with open_store(self.root, write=True, create=True) as store:
            return small_store.add(store, tree, name).id

    def push(self, name: str, remote: Remote) -> PushResult:
        with open_store(self.root, write=False) as store:
            image = store.catalog.resolve(parse_name(name))
            return push_image(store, image, [parse_name(name)], remote)

    def pull(self, name: str, remote: Remote) -> PullResult:
        wanted = parse_name(name)
        return pull_image(self.root, remote, remote.image(remote.resolve(wanted)), wanted)

    def tree(self, name: str) -> Tree:
        with open_store(self.root, write=False) as store:
            assert check(store, read_data=True).ok
            return small_store.exported(store, store.catalog.resolve(parse_name(name)))


@pytest.fixture
def here(tmp_path: Path) -> Node:
    node = Node(tmp_path / "here")
    node.add(FIRST, "w:1")
    node.add(SECOND, "w:2")
    return node


@pytest.fixture
def there(tmp_path: Path) -> Node:
    return Node(tmp_path / "there")


def test_there_and_back(here: Node, there: Node, remote: Remote) -> None:
    sent = here.push("w:1", remote)
    assert sent.blocks_sent and not sent.blocks_skipped
    assert check_remote(remote, read_data=True).problems == ()
    came = there.pull("w:1", remote)
    assert came.blocks_sent == sent.blocks_sent
    sealing = remote.sealing.overhead * sent.blocks_sent
    assert came.new_bytes == sent.new_bytes - sealing
    assert there.tree("w:1") == FIRST
    assert not list((there.root / "arriving").iterdir())


def test_only_what_is_missing(here: Node, there: Node, remote: Remote) -> None:
    first = here.push("w:1", remote)
    second = here.push("w:2", remote)
    assert 0 < second.blocks_sent <= 3 and second.blocks_skipped
    assert second.new_bytes < first.new_bytes
    there.pull("w:1", remote)
    came = there.pull("w:2", remote)
    assert came.blocks_sent == second.blocks_sent
    assert there.tree("w:2") == SECOND


def test_what_is_there_costs_next_to_nothing(here: Node, remote: Remote) -> None:
    here.push("w:1", remote)
    assert len(keys_of(remote, "packs/")) >= 2
    before = remote.objects.traffic.requests
    again = here.push("w:1", remote)
    assert (again.blocks_sent, again.new_bytes) == (0, 0)
    assert remote.objects.traffic.requests - before <= 3


def test_from_somebody_who_knows_nothing_yet(here: Node, tmp_path: Path, remote: Remote) -> None:
    """Another node has the same image: it learns what is there instead of sending it."""
    other = Node(tmp_path / "other")
    other.add(FIRST, "mine")
    here.push("w:2", remote)
    sent = other.push("mine", remote)
    assert sent.blocks_sent <= 2 <= sent.blocks_skipped  # small files and the end differ


def test_names_move(here: Node, remote: Remote) -> None:
    first = here.add(FIRST, "x")
    here.push("x", remote)
    second = here.add(SECOND, "x")
    assert here.push("x", remote).replaced == (first,)
    assert remote.named(Name("x")).image == second
    assert {name: entry.image for name, entry in remote.names().items()} == {"x:latest": second}


def test_it_is_looked_up_by_id(here: Node, remote: Remote) -> None:
    image = here.add(FIRST, "x")
    here.push("x", remote)
    assert remote.resolve(IdPrefix(image.hex()[:8])) == image
    with pytest.raises(NotInRemote):
        remote.resolve(IdPrefix("00000000"))
    with pytest.raises(NotInRemote, match="no image y:latest in memory://.*remote ls"):
        remote.resolve(Name("y"))


def test_nobody_pushed_anything(tmp_path: Path) -> None:
    with pytest.raises(RemoteNotFound, match="there is no remote at memory://"):
        opened(memory_url(), create=False)


@pytest.mark.parametrize("url", ["s3://", "bucket", "", "nonsense://x/y", "/folder"])
def test_no_remote(url: str) -> None:
    with pytest.raises(UsageError):
        open_remote(url, QUICK)


def test_a_remote_of_another_version() -> None:
    url = memory_url()
    with opened(url) as remote:
        found = json.loads(remote.objects.read("format").content)
        remote.objects.put("format", json.dumps({**found, "format": 2}).encode())
        with pytest.raises(UnknownFormat):
            opened(url)
        remote.objects.put("format", b"{}")
        with pytest.raises(CorruptObject):
            opened(url)


def test_a_remote_that_was_made_anew(here: Node, there: Node) -> None:
    """What was known of the one before doesn't count."""
    url = memory_url()
    with opened(url) as remote:
        here.push("w:1", remote)
        remote.objects.delete(keys_of(remote))
    with opened(url) as remote:
        assert here.push("w:1", remote).blocks_skipped == 0
        there.pull("w:1", remote)
    assert there.tree("w:1") == FIRST


def test_keys_have_to_fit(here: Node, tmp_path: Path) -> None:
    url, plain = memory_url(), memory_url()
    mine, other = (key_file(tmp_path / key[:2], key) for key in KEYS)
    with opened(url, mine) as remote:
        here.push("w:1", remote)
    with pytest.raises(KeyNeeded, match="is encrypted"):
        opened(url)
    with pytest.raises(KeyNeeded, match="none of these keys"):
        opened(url, other)
    opened(plain).close()
    with pytest.raises(KeyNeeded, match="isn't encrypted"):
        opened(plain, mine)


def test_a_change_of_keys(here: Node, there: Node, tmp_path: Path) -> None:
    url = memory_url()
    old = key_file(tmp_path / "old", KEYS[0])
    both = key_file(tmp_path / "both", KEYS[1], KEYS[0])
    with opened(url, old) as remote:
        here.push("w:1", remote)
    with opened(url, both) as remote:
        assert here.push("w:2", remote).blocks_skipped  # sealed with the old key, and used
        there.pull("w:2", remote)
        assert check_remote(remote, read_data=True).problems == ()
    assert there.tree("w:2") == SECOND
    with opened(url, old) as remote:
        there.pull("w:1", remote)
        with pytest.raises(KeyNeeded, match="names/w:2 can't be read .*add that key"):
            remote.names()
        with pytest.raises(KeyNeeded):
            check_remote(remote)


def test_others_see_nothing(here: Node, tmp_path: Path) -> None:
    """Neither content nor ids, nor the names of files."""
    with opened(memory_url(), key_file(tmp_path / "key", KEYS[0])) as remote:
        image = here.add({"secret-file": b"secret content " * 9}, "w:3")
        here.push("w:3", remote)
        with open_store(here.root, write=False) as store:
            ids = [image, *store.manifest(image).block_ids()]
        traces = [b"secret", *map(bytes, ids), *(i.hex().encode() for i in ids)]
        for key in keys_of(remote):
            shown = key.encode() + remote.objects.read(key).content
            assert not any(trace in shown for trace in traces)


def test_a_pack_with_wrong_bytes(here: Node, there: Node, remote: Remote) -> None:
    here.push("w:1", remote)
    key = max(keys_of(remote, "packs/"), key=lambda key: remote.objects.info(key).size)
    content = bytearray(remote.objects.read(key).content)
    content[len(content) // 2] ^= 1
    remote.objects.put(key, content)
    with pytest.raises(CorruptObject, match=f"block .* at byte .*{key}"):
        there.pull("w:1", remote)
    assert not check_remote(remote, read_data=True).ok
    assert check_remote(remote).ok


def test_packs_that_moved(here: Node, there: Node, remote: Remote) -> None:
    """An image says where its blocks lay; where they are now, the indexes know."""
    from icefloe.store.codecs import Decoder
    from icefloe.store.reader import Location
    from icefloe.transfer.fetch import fetch_range
    from icefloe.transfer.packing import make_pack
    from icefloe.transfer.ranges import Range

    here.push("w:1", remote)
    blocks = []
    for key in keys_of(remote, "indexes/"):
        pack = pack_of(key)
        assert pack is not None
        for identity, offset, stored, raw, codec, _, _ in remote.index(pack).tolist():
            at = Location(BlockId(identity), pack, offset, stored, raw, codec)
            (found,) = fetch_range(remote, Range(pack, ((0, at),)), Decoder())
            blocks.append(found.stored)
        remote.objects.delete([pack_key(pack), index_key(pack)])
    made = make_pack(reversed(blocks), remote.sealing)
    remote.objects.put(pack_key(made.id), made.content)
    remote.objects.put(index_key(made.id), made.stored_index)
    there.pull("w:1", remote)
    assert there.tree("w:1") == FIRST


def test_packs_that_are_gone(here: Node, there: Node, remote: Remote) -> None:
    here.push("w:1", remote)
    packs = [pack for key in keys_of(remote, "packs/") if (pack := pack_of(key))]
    remote.objects.delete([key(pack) for pack in packs for key in (pack_key, index_key)])
    with pytest.raises(CorruptObject, match="it is gone, and with it block"):
        there.pull("w:1", remote)
    assert not check_remote(remote).ok


def test_a_pull_goes_on(here: Node, there: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived when it fails is not asked for again."""
    with opened(memory_url()) as remote:
        here.push("w:1", remote)
        image = remote.image(remote.resolve(parse_name("w:1")))
        whole = remote.objects.read_into
        calls = 0

        def failing(key: str, start: int, into: memoryview) -> int:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise CorruptObject(key, "for a test")
            return whole(key, start, into)

        monkeypatch.setattr(remote.objects, "read_into", failing)
        with pytest.raises(CorruptObject):
            there.pull("w:1", remote)
        monkeypatch.undo()
    with opened(remote.url) as remote:
        came = there.pull("w:1", remote)
    assert 0 < came.blocks_sent < len(image.manifest.blocks)
    assert there.tree("w:1") == FIRST


def test_a_pull_that_nobody_goes_on_with(here: Node, there: Node) -> None:
    """What it fetched stays for a day."""
    there.add(SECOND, "x")
    with opened(memory_url()) as remote:
        here.push("w:1", remote)
        image = remote.image(remote.resolve(parse_name("w:1")))
    arrivals = Arrivals(there.root, image)
    arrivals.finish()
    arrivals.close()
    place = there.root / "arriving" / image.id.hex()
    for age, stays in ((3600, True), (90_000, False)):
        for path in [place, *place.rglob("*")]:
            os.utime(path, (time.time() - age,) * 2)
        with open_store(there.root, write=True) as store:
            collect(store, GcOptions())
        assert place.exists() == stays


def test_two_pull_the_same(here: Node, there: Node) -> None:
    with opened(memory_url()) as remote:
        here.push("w:1", remote)
        image = remote.image(remote.resolve(parse_name("w:1")))
        arrivals = Arrivals(there.root, image)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("icefloe.transfer.pull.LOCK_SECONDS", 0.1)
            with pytest.raises(StoreBusy):
                there.pull("w:1", remote)
        arrivals.close()
        there.pull("w:1", remote)


def test_blocks_that_go_while_others_come(here: Node, there: Node, remote: Remote) -> None:
    """A block that was here at first is collected before the commit: it is fetched as well."""
    there.add(FIRST, "gone")
    here.push("w:2", remote)
    image = remote.image(remote.resolve(parse_name("w:2")))
    original, done = Arrivals.are_all_here, False

    def after_a_collection(self: Arrivals, store: LocalStore) -> bool:
        nonlocal done
        if not done:
            done = True
            remove(store, [parse_name("gone")])
            collect(store, GcOptions())
        return original(self, store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arrivals, "are_all_here", after_a_collection)
        came = pull_image(there.root, remote, image, parse_name("w:2"))
    assert came.blocks_sent > len(image.manifest.blocks) // 2
    assert there.tree("w:2") == SECOND


def test_a_damaged_block_is_not_pushed(here: Node, remote: Remote) -> None:
    from icefloe.errors import Corrupt

    pack = max((here.root / "packs").rglob("*/*"), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    with pytest.raises(Corrupt):
        here.push("w:2", remote)
    assert not keys_of(remote, "names/") and not keys_of(remote, "manifests/")
    assert not keys_of(remote, "leases/push-")


def test_the_image_is_hostile(here: Node, there: Node) -> None:
    """Places that point anywhere can't bring in other bytes."""
    from icefloe.transfer import image_object

    with opened(memory_url()) as remote:
        here.push("w:1", remote)
        (key,) = keys_of(remote, "manifests/")
        image = remote.image_at(key)
        located = image.locations(range(len(image.manifest.blocks)))
        for wrong in (
            [at._replace(offset=at.offset + 1) for at in located],
            [at._replace(codec=9) for at in located],
            [at._replace(stored=max(1, at.stored - 1)) for at in located],
            [at._replace(offset=1 << 40) for at in located],
        ):
            remote.objects.put(key, image_object.encode(image.encoded, wrong))
            with pytest.raises(CorruptObject):
                there.pull("w:1", remote)
        whole = image_object.encode(image.encoded, located)
        for bad in (b"", whole[:-1], whole + b"x", whole[:100], b"x" * 200):
            remote.objects.put(key, bad)
            with pytest.raises(CorruptObject):
                there.pull("w:1", remote)
        other = Encoder("balanced").encode(memoryview(b"no manifest" * 9))
        assert other.payload
        remote.objects.put(key, whole)
        there.pull("w:1", remote)
