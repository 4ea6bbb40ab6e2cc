"""Pushes and pulls through a network and a server that fail, in every way that we know."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_store
from fault_proxy import Fault, FaultProxy
from s3_server import S3Server
from slow_chunker import noise
from small_store import KIB, Tree

from icefloe.catalog import open_store
from icefloe.errors import RemoteRefused, RemoteUnreachable
from icefloe.gc.audit import check
from icefloe.ids import parse_name
from icefloe.transfer import patient, s3
from icefloe.transfer import push as pushes
from icefloe.transfer.audit import check_remote
from icefloe.transfer.options import RemoteOptions
from icefloe.transfer.pull import PullResult, pull_image
from icefloe.transfer.push import PushResult, push_image
from icefloe.transfer.remote import Remote, open_remote

PASSING: list[Fault] = [
    "busy",
    "reset",
    "lost",
    "cut-request",
    "cut",
    "reset-half",
    "stall",
    "stall-half",
    "flip",
]
TREE: Tree = {
    "pages-1.img": small_store.pages([noise(1400 * KIB, seed) for seed in range(3)]),
    "core.img": b"c" * 999,
}
ALL_BYTES = 3 * 1400 * KIB

# Of packs and ranges in processes of their own, and how many may be under way or unfinished.
SMALL = 200 * KIB
UNSURE = 6


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays of milliseconds, silence of a second, small packs."""
    monkeypatch.setattr(patient, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(patient, "_LONGEST_DELAY", 0.1)
    monkeypatch.setattr(s3, "_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(pushes, "PACK_BYTES", 600 * KIB)


@pytest.fixture
def url(s3: S3Server) -> str:
    return f"s3://{s3.bucket()}/here"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with open_store(tmp_path / "store", write=True, create=True) as store:
        small_store.add(store, TREE, "worker")
    return tmp_path / "store"


def remote_at(url: str, patience: float = 10.0) -> Remote:
    return open_remote(url, RemoteOptions(patience=patience, requests=4), create=True)


def push(store: Path, url: str, patience: float = 10.0) -> PushResult:
    with open_store(store, write=False) as opened, remote_at(url, patience) as remote:
        name = parse_name("worker")
        return push_image(opened, opened.catalog.resolve(name), [name], remote)


def pull(root: Path, url: str, patience: float = 10.0) -> PullResult:
    name = parse_name("worker")
    with remote_at(url, patience) as remote:
        return pull_image(root, remote, remote.image(remote.resolve(name)), name)


def is_whole(root: Path) -> bool:
    with open_store(root, write=False) as store:
        assert check(store, read_data=True).ok
        return small_store.exported(store, store.catalog.resolve(parse_name("worker"))) == TREE


@pytest.mark.parametrize("fault", PASSING)
def test_faults_that_pass(
    fault: Fault, store: Path, url: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Each kind of object is hit, on the way there and back."""
    for pattern in ("format", "names/", "leases/", "packs/", "indexes/", "manifests/"):
        if fault != "flip":
            proxy.fail(fault, pattern)
    push(store, url)
    assert proxy.count("PUT .*packs/") > 5
    proxy.heal()
    for pattern in ("format", "names/", "manifests/"):
        if fault != "flip":
            proxy.fail(fault, pattern)
    proxy.fail(fault, "GET .*packs/", times=3)
    pull(tmp_path / "there", url)
    assert is_whole(tmp_path / "there")
    with remote_at(url) as remote:
        assert check_remote(remote, read_data=True).problems == ()


def test_a_server_that_is_gone_for_a_while(
    store: Path, url: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.delay = 0.02
    for work in (lambda: push(store, url), lambda: pull(tmp_path / "there", url)):
        before = proxy.count("packs/")
        back = threading.Timer(1.5, proxy.start)

        def vanish(before: int = before, back: threading.Timer = back) -> None:
            while proxy.count("packs/") < before + 3:
                time.sleep(0.005)
            proxy.vanish()
            back.start()

        watcher = threading.Thread(target=vanish)
        watcher.start()
        work()
        watcher.join()
        back.join()
    assert is_whole(tmp_path / "there")


def test_a_server_that_stays_away(store: Path, url: str, proxy: FaultProxy, tmp_path: Path) -> None:
    """The request is named; once the server is back, what had arrived isn't sent again."""

    def break_it() -> None:
        while proxy.count("PUT .*indexes/") < 3:
            time.sleep(0.001)
        proxy.vanish()

    watcher = threading.Thread(target=break_it)
    watcher.start()
    with pytest.raises(
        RemoteUnreachable, match=r"(PUT|GET) s3://.*/(packs|indexes|leases)"
    ) as caught:
        push(store, url, patience=0.3)
    assert caught.value.exit_code == 7
    watcher.join()
    proxy.start()
    packs = proxy.count("PUT .*packs/")
    result = push(store, url)
    assert result.blocks_skipped >= 2
    assert proxy.count("PUT .*packs/") - packs < 8
    with pytest.raises(RemoteUnreachable, match="GET s3://.*packs/"):
        proxy.fail("busy", "GET .*packs/", times=10_000)
        pull(tmp_path / "there", url, patience=0.3)
    proxy.heal()
    pull(tmp_path / "there", url)
    assert is_whole(tmp_path / "there")


def test_credentials_that_ran_out(store: Path, url: str, proxy: FaultProxy) -> None:
    """Looked for anew, they may be good again; else the request is named."""
    proxy.fail("expired", "PUT .*packs/", times=2)
    push(store, url)
    proxy.fail("expired", "GET", times=10_000)
    with pytest.raises(RemoteRefused, match=r"GET s3://.*/format was refused \(ExpiredToken"):
        push(store, url)


def test_wrong_bytes_for_good(store: Path, url: str, proxy: FaultProxy, tmp_path: Path) -> None:
    from icefloe.errors import CorruptObject

    push(store, url)
    proxy.fail("flip", "GET .*packs/", times=10_000)
    with pytest.raises(CorruptObject, match="block .* at byte"):
        pull(tmp_path / "there", url)
    proxy.heal()
    pull(tmp_path / "there", url)
    assert is_whole(tmp_path / "there")


def test_requests(store: Path, url: str, proxy: FaultProxy) -> None:
    """2N + 10 for N packs, 10 for nothing."""
    push(store, url)
    packs = proxy.count("PUT .*packs/")
    assert packs > 5 and proxy.count() <= 2 * packs + 10
    before = proxy.count()
    push(store, url)
    assert proxy.count() - before <= 10
    with open_store(store, write=True) as opened:
        changed = {**TREE, "pages-2.img": noise(700 * KIB, 9)}
        small_store.add(opened, changed, "worker")
    before, packs = proxy.count(), proxy.count("PUT .*packs/")
    push(store, url)
    packs = proxy.count("PUT .*packs/") - packs
    assert 0 < packs < 3 and proxy.count() - before <= 2 * packs + 10


@pytest.fixture
def slow(proxy: FaultProxy) -> Iterator[FaultProxy]:
    proxy.delay = 0.03
    yield proxy


def hurried_line(root: Path, *words: str) -> list[str]:
    """icefloe with small packs and requests, as a process of its own."""
    code = (
        "from icefloe.transfer import push, pull\n"
        "from icefloe.store.writer import PackWriter\n"
        f"push.PACK_BYTES = pull._RANGE_BYTES = {SMALL}\n"
        f"PackWriter.__init__.__defaults__ = ({SMALL},)\n"
        "from icefloe.cli import run\n"
        "run()\n"
    )
    return [sys.executable, "-c", code, "--store", str(root), *words]


def kill_after(line: list[str], proxy: FaultProxy, pattern: str, count: int) -> None:
    """SIGKILL, when there were so many requests more."""
    before = proxy.count(pattern)
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as process:
        while proxy.count(pattern) < before + count:
            assert process.poll() is None, "it has ended before"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)


def test_killed_while_it_pushes_and_pulls(
    store: Path, url: str, slow: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is: the next one goes on, what was done is whole, and is not done again."""
    monkeypatch.setenv("ICEFLOE_REMOTE_REQUESTS", "3")
    there = tmp_path / "there"
    for pattern, operation, root in (
        ("PUT .*packs/", "push", store),
        ("GET .*packs/", "pull", there),
    ):
        line = hurried_line(root, operation, "worker", url, "--json")
        moments = [random.randrange(8, 12), random.randrange(2, 6)]
        for count in moments:
            kill_after(line, slow, pattern, count)
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        # Some were under way, or in a pack that was not finished.
        at_least = (moments[0] - UNSURE) * SMALL
        assert answer["new_bytes"] <= ALL_BYTES - at_least, (operation, moments)
        assert answer["blocks_skipped"] > 0
    assert is_whole(there)
    with remote_at(url) as remote:
        assert check_remote(remote, read_data=True).ok


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["push", "worker"], "PUT .*packs/"),
        (["pull", "worker"], "GET .*packs/"),
        (["remote", "ls"], "GET .*names/w"),
        (["remote", "check"], "GET .*indexes/."),
    ],
)
def test_interrupted(
    words: list[str], pattern: str, store: Path, url: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Ctrl-C ends it soon, although everything hangs from then on."""
    root = store
    if words[0] != "push":
        root = tmp_path / "there"
        push(store, url)
    proxy.fail("stall", pattern, times=10_000)
    before = proxy.count(pattern)
    line = [sys.executable, "-m", "icefloe", "--store", str(root), *words, url]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    while proxy.count(pattern) <= before:
        assert process.poll() is None
        time.sleep(0.01)
    proxy.fail("stall", "", times=10_000)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in errors
    assert time.monotonic() - started < 6, errors
