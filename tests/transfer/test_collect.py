"""Collections in a remote: what names lead to stays, and so does what a push relies on."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import small_store
from hypothesis import given
from remotes import key_file, keys_of, memory_url, opened
from slow_chunker import noise
from small_store import KIB, Tree

from icefloe.catalog import open_store
from icefloe.errors import CorruptObject, NotInRemote, RemoteBusy, RemoteRefused
from icefloe.ids import Name, PackId, parse_name
from icefloe.store.pack import INDEX_DTYPE, Index
from icefloe.transfer import leases
from icefloe.transfer import push as pushes
from icefloe.transfer.audit import check_remote
from icefloe.transfer.collect import REWRITE_WHEN_DEAD, Ids, Listing, collect_remote, make_plan
from icefloe.transfer.leases import (
    COLLECTOR,
    Lease,
    State,
    collecting,
    collector_state,
    pulling,
    pushing,
    release_from,
)
from icefloe.transfer.objects import ObjectInfo
from icefloe.transfer.pull import pull_image
from icefloe.transfer.push import push_image
from icefloe.transfer.remote import Remote, index_key, pack_key, pack_of

SHARED = noise(400 * KIB, 1)
FIRST: Tree = {"pages-1.img": small_store.pages([SHARED, noise(600 * KIB, 2)])}
SECOND: Tree = {"pages-1.img": small_store.pages([SHARED, noise(90 * KIB, 3)])}


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "PACK_BYTES", 4 << 20)
    monkeypatch.setattr(pushes, "_WORTH_LISTING", 0)
    monkeypatch.setattr(leases, "_POLL_SECONDS", 0.02)


@pytest.fixture(params=["open", "sealed"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    keys = key_file(tmp_path / "keys", "11" * 32) if request.param == "sealed" else None
    with opened(memory_url(), keys) as remote:
        yield remote


@dataclass
class Node:
    """A store with both images."""

    root: Path

    def push(self, name: str, remote: Remote) -> int:
        with open_store(self.root, write=False) as store:
            image = store.catalog.resolve(parse_name(name))
            return push_image(store, image, [parse_name(name)], remote).blocks_sent

    def is_whole(self, name: str, tree: Tree, remote: Remote) -> bool:
        """Whether a node that has nothing gets it back."""
        root = self.root.with_name(f"{name}-{time.monotonic_ns()}")
        with pulling(remote):
            image = remote.image(remote.resolve(parse_name(name)))
            pull_image(root, remote, image, parse_name(name))
        with open_store(root, write=False) as store:
            return small_store.exported(store, image.id) == tree


@pytest.fixture
def node(tmp_path: Path) -> Node:
    with open_store(tmp_path / "store", write=True, create=True) as store:
        small_store.add(store, FIRST, "first")
        small_store.add(store, SECOND, "second")
    return Node(tmp_path / "store")


def left(remote: Remote) -> list[str]:
    return keys_of(remote, "manifests/") + keys_of(remote, "indexes/") + keys_of(remote, "packs/")


def test_what_is_named_stays(node: Node, remote: Remote) -> None:
    node.push("first", remote)
    node.push("second", remote)
    before = left(remote)
    result = collect_remote(remote, 0)
    assert (result.freed_bytes, result.images_removed, result.packs_removed) == (0, 0, 0)
    assert left(remote) == before


def test_what_is_not_named_goes(node: Node, remote: Remote) -> None:
    node.push("first", remote)
    node.push("second", remote)
    remote.remove_names([Name("second")])
    sizes = sum(row.size for row in remote.objects.list(""))
    planned = collect_remote(remote, 0, dry_run=True)
    result = collect_remote(remote, 0)
    assert (result.images_removed, result.packs_removed) == (1, 1)
    assert planned.freed_bytes == result.freed_bytes > 90 * KIB
    after = sum(row.size for row in remote.objects.list(""))
    assert abs(sizes - after - result.freed_bytes) < 500  # the lease
    assert check_remote(remote, read_data=True).problems == ()
    assert node.is_whole("first", FIRST, remote)
    remote.remove_names([Name("first")])
    collect_remote(remote, 0)
    assert not left(remote)


def test_grace(node: Node, remote: Remote) -> None:
    node.push("first", remote)
    remote.remove_names([Name("first")])
    result = collect_remote(remote, 3600)
    assert (result.images_removed, result.packs_removed, result.kept_by_grace) == (0, 0, 1)
    assert left(remote)


def test_a_pack_that_mostly_died(node: Node, remote: Remote) -> None:
    """What lives in it is copied; images that say where it lay find it all the same."""
    node.push("first", remote)
    node.push("second", remote)
    remote.remove_names([Name("first")])
    before = set(keys_of(remote, "packs/"))
    result = collect_remote(remote, 0)
    assert (result.images_removed, result.packs_rewritten, result.packs_removed) == (1, 1, 1)
    assert len(set(keys_of(remote, "packs/")) - before) == 1
    assert check_remote(remote, read_data=True).problems == ()
    assert node.is_whole("second", SECOND, remote)
    assert collect_remote(remote, 0).packs_rewritten == 0
    # The store's own notes of what is there are out of date, and found to be so.
    assert node.push("first", remote) > 0
    assert node.is_whole("first", FIRST, remote)


def test_a_push_that_began_before(node: Node, remote: Remote) -> None:
    """What it may rely on is condemned and stays until it has ended."""
    node.push("first", remote)
    remote.remove_names([Name("first")])
    lease = Lease(remote, "push")
    result = collect_remote(remote, 0)
    assert (result.images_removed, result.kept_by_lease) == (0, 2)
    assert len(collector_state(remote).condemned) == 2
    lease.release()
    result = collect_remote(remote, 0)
    assert (result.images_removed, result.packs_removed) == (1, 1)
    assert not left(remote) and not collector_state(remote).condemned


def test_a_push_that_relied_on_it(node: Node, remote: Remote) -> None:
    node.push("first", remote)
    remote.remove_names([Name("first")])
    lease = Lease(remote, "push")
    collect_remote(remote, 0)
    image = remote.image_at(keys_of(remote, "manifests/")[0]).id
    remote.set_name(Name("again"), image, remote.named(Name("again")))
    lease.release()
    assert collect_remote(remote, 0).images_removed == 0
    assert node.is_whole("again", FIRST, remote)
    assert not collector_state(remote).condemned


def test_a_push_of_what_is_condemned(node: Node, remote: Remote) -> None:
    """It frees it before it relies on it; nothing is sent again but the image."""
    node.push("first", remote)
    remote.remove_names([Name("first")])
    with pushing(remote):
        collect_remote(remote, 0)
    time.sleep(1.1)  # the next lease is of another second
    assert collector_state(remote).condemned
    assert node.push("first", remote) == 0
    assert not collector_state(remote).condemned
    collect_remote(remote, 0)
    assert node.is_whole("first", FIRST, remote)


def test_the_same_image_once_more(node: Node, remote: Remote) -> None:
    """Everything went; what is known of it beside the store is of no use any more."""
    node.push("first", remote)
    remote.remove_names([Name("first")])
    collect_remote(remote, 0)
    assert node.push("first", remote) > 0
    assert node.is_whole("first", FIRST, remote)


def test_a_pull_that_began_before(node: Node, remote: Remote) -> None:
    node.push("first", remote)
    with pulling(remote):
        image = remote.image(remote.resolve(Name("first")))
        remote.remove_names([Name("first")])
        assert collect_remote(remote, 0).kept_by_lease == 2
        pull_image(node.root.with_name("other"), remote, image, Name("first"))
    assert not keys_of(remote, "leases/pull-")
    collect_remote(remote, 0)
    assert not left(remote)


def test_leases_of_dead_pushes_run_out(
    node: Node, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.push("first", remote)
    remote.remove_names([Name("first")])
    Lease(remote, "push")
    monkeypatch.setattr(leases, "LEASE_SECONDS", -1.0)
    assert collect_remote(remote, 0).images_removed == 1
    assert not keys_of(remote, "leases/push-")


def test_a_lease_that_ran_out(node: Node, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The push doesn't trust what it has found; it gives up after some tries."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.0)
    with pytest.raises(RemoteBusy):
        node.push("first", remote)
    assert not keys_of(remote, "names/")


def test_one_collector_at_a_time(remote: Remote) -> None:
    with (
        collecting(remote) as first,
        pytest.raises(RemoteBusy, match=r"leases/gc is in use by .*process \d+"),
        collecting(remote),
    ):
        pass
    assert first.state.fence == 1
    with collecting(remote, wait_seconds=1) as second:
        assert second.state.fence == 2


def test_a_collector_that_died(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease runs out; should it wake up, it finds that another one is at work."""
    with collecting(remote) as dead:
        monkeypatch.setattr(leases, "COLLECTOR_SECONDS", -1.0)
        with collecting(remote) as second:
            monkeypatch.setattr(leases, "COLLECTOR_SECONDS", 600.0)
            assert second.state.fence == dead.state.fence + 1
            with pytest.raises(RemoteBusy):
                dead.write({"packs/x": 1.0})
            second.write({"packs/y": 1.0})
    assert collector_state(remote).condemned == {"packs/y": 1.0}


def test_a_collector_that_slept(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(remote) as collector:
        collector._written -= 590
        with pytest.raises(RemoteBusy, match="took too long"):
            collector.alive()


def test_a_store_without_conditions(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = remote.objects.put
    monkeypatch.setattr(
        remote.objects, "put", lambda key, content, expect=None: whole(key, content)
    )
    with pytest.raises(RemoteRefused, match="takes no notice of it"):
        collect_remote(remote, 0)


def test_a_lease_that_is_none(remote: Remote) -> None:
    remote.objects.put(COLLECTOR, b"{}")
    with pytest.raises(CorruptObject):
        collect_remote(remote, 0)


def test_release(remote: Remote) -> None:
    with collecting(remote) as collector:
        collector.write({"packs/x": 1.0, "packs/y": 2.0})
    assert release_from(remote, ["packs/x"]).condemned == {"packs/y": 2.0}
    state = collector_state(remote)
    assert (state.condemned, state.holder) == ({"packs/y": 2.0}, None)
    assert json.loads(State(3, None, {}).encode()) == {"fence": 3, "holder": None, "condemned": {}}


def test_an_image_that_cannot_be_read(node: Node, remote: Remote) -> None:
    """What it needs isn't known, so nothing goes."""
    node.push("first", remote)
    node.push("second", remote)
    remote.remove_names([Name("second")])
    for key in keys_of(remote, "manifests/"):
        if remote.image_at(key).id == remote.named(Name("first")).image:
            remote.objects.put(key, b"damaged")
    before = left(remote)
    with pytest.raises(CorruptObject):
        collect_remote(remote, 0)
    assert left(remote) == before and collector_state(remote).holder is None


def test_orphans(node: Node, remote: Remote) -> None:
    """Packs without an index, indexes without a pack, and what others have put there."""
    node.push("first", remote)
    pack = pack_of(keys_of(remote, "packs/")[0])
    assert pack is not None
    lost = PackId(b"\1" * 32)
    remote.objects.put(pack_key(lost), b"half")
    remote.objects.put(index_key(PackId(b"\2" * 32)), remote.objects.read(index_key(pack)).content)
    remote.objects.put("packs/README", b"of somebody else")
    remote.objects.put("manifests/README", b"of somebody else")
    kinds = {problem.kind for problem in check_remote(remote).problems}
    assert "orphan-pack" in kinds
    assert collect_remote(remote, 0).packs_removed == 2
    assert sorted(keys_of(remote, "packs/")) == sorted([pack_key(pack), "packs/README"])
    assert node.is_whole("first", FIRST, remote)


def test_pushes_and_collections_at_once(node: Node, tmp_path: Path) -> None:
    """Names come and go on several nodes while collectors run: what is named is whole."""
    url = memory_url()
    opened(url)
    over = threading.Event()
    trees = {"first": FIRST, "second": SECOND}

    def pusher(i: int) -> int:
        found = 0
        with opened(url) as remote:
            while not over.is_set() or not found:  # the last round's names stay
                name = ("first", "second")[(i + found) % 2]
                node.push(name, remote)
                with suppress(NotInRemote):  # the name may be gone already
                    assert node.is_whole(name, trees[name], remote)
                    found += 1
        return found

    def remover() -> None:
        with opened(url) as remote:
            while not over.wait(0.05):
                remote.objects.delete([f"names/{name}:latest" for name in trees])

    def collector() -> int:
        done = 0
        with opened(url) as remote:
            while not over.is_set() or not done:
                try:
                    collect_remote(remote, 0)
                    done += 1
                except RemoteBusy:
                    time.sleep(0.05)
        return done

    with ThreadPoolExecutor(5) as pool:
        pushed = [pool.submit(pusher, i) for i in range(2)]
        collected = [pool.submit(collector) for _ in range(2)]
        removed = pool.submit(remover)
        time.sleep(2.5)
        over.set()
        assert all(each.result() for each in pushed) and all(e.result() for e in collected)
        removed.result()
    with opened(url) as remote:
        audit = check_remote(remote, read_data=True)
        assert audit.ok, audit.problems


# The plan alone


def index_of(blocks: list[int], size: int = 1000) -> Index:
    rows = np.zeros(len(blocks), INDEX_DTYPE)
    rows["id"] = np.array([bytes([block]) * 32 for block in blocks], "V32")
    rows["stored"] = size
    return rows


def pack(number: int) -> PackId:
    return PackId(bytes([number]) * 32)


@given(
    st.dictionaries(st.integers(1, 20), st.lists(st.integers(1, 40), min_size=1, unique=True)),
    st.sets(st.integers(1, 40)),
    st.sets(st.integers(1, 20)),
)
def test_a_plan_keeps_all_that_lives(
    packs: dict[int, list[int]], live: set[int], young: set[int]
) -> None:
    """Whatever lived in a pack that goes is in one that stays, or is copied."""
    rows = {pack(n): ObjectInfo("", 1, 90.0 if n in young else 10.0) for n in packs}
    listing = Listing({}, rows, rows, 100.0)
    ids: Ids = np.sort(np.array([bytes([block]) * 32 for block in live], "S32"))
    plan = make_plan(listing, ids, [(pack(n), index_of(blocks)) for n, blocks in packs.items()], 50)
    gone = {n for n in packs if pack(n) in plan.packs or pack(n) in plan.rewrite}
    copied = {i[0] for part in plan.rewrite.values() for i in part.tolist()}
    there = {block for n, blocks in packs.items() for block in blocks}
    stays = {block for n, blocks in packs.items() if n not in gone for block in blocks}
    assert live & there <= stays | copied
    assert not gone & young
    for n in gone:
        assert len(live & set(packs[n])) <= (1 - REWRITE_WHEN_DEAD) * len(packs[n])
    for n in packs.keys() - gone - young:
        assert live & set(packs[n])
