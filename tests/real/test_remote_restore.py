"""Processes come back out of a bucket while their memory is still on its way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from criu_tool import Criu, dump
from fault_proxy import FaultProxy
from matrix import one_criu
from restores import restore, restoring, wait_dead
from s3_server import S3Server
from stores import add, icefloe
from workloads import Heap, Workload


def pushed(criu: Criu, workload: Workload, folder: Path, server: S3Server) -> str:
    """A dump of it in a bucket; the store that it went through is not used again."""
    workload.advance()
    dump(criu, workload, folder / "images")
    add(folder / "first", folder / "images", "worker")
    url = f"s3://{server.bucket()}/images"
    icefloe(folder / "first", "push", "worker", url)
    return url


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is, it isn't fetched first."""
    monkeypatch.setenv("ICEFLOE_REMOTE_FETCH_FIRST", "0")


def test_out_of_a_bucket(
    criu: Criu, heap: Heap, tmp_path: Path, aws: S3Server, streaming: None
) -> None:
    """Nothing is here before; afterwards the store has the image, and no byte comes again."""
    url = pushed(criu, heap, tmp_path, aws)
    frozen = heap.frozen_state()
    for door in ("lazy", "eager", "lazy"):
        answer = restore(criu, tmp_path / "store", "worker", heap, "--from", url, "--door", door)
        heap.verify(frozen, heap.advance())
        heap.kill()
        timeline = answer["timeline"]
        assert timeline["image"] <= timeline["first_blocks"] <= timeline["resumed"]
        if answer["wire_bytes"] < 1 << 20:
            break
        assert timeline["filled"] <= timeline["kept"]
    else:
        pytest.fail("it came over the network again and again")
    assert icefloe(tmp_path / "store", "check", "--read-data")["ok"]
    restore(criu, tmp_path / "store", "worker", heap)
    heap.verify(frozen, heap.advance())


@one_criu
def test_over_a_bad_network(
    criu: Criu, heap: Heap, tmp_path: Path, proxy: FaultProxy, aws: S3Server, streaming: None
) -> None:
    url = pushed(criu, heap, tmp_path, aws)
    frozen = heap.frozen_state()
    proxy.delay = 0.005
    for fault in ("reset", "reset-half", "cut", "busy", "flip"):
        proxy.fail(fault, "GET .*packs/", times=2)
    restore(criu, tmp_path / "store", "worker", heap, "--from", url)
    heap.verify(frozen, heap.advance())


@one_criu
def test_the_server_goes_for_good(
    criu: Criu,
    heap: Heap,
    tmp_path: Path,
    proxy: FaultProxy,
    aws: S3Server,
    streaming: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever had been restored is gone; what had arrived is used by the next restore."""
    url = pushed(criu, heap, tmp_path, aws)
    frozen = heap.frozen_state()
    monkeypatch.setenv("ICEFLOE_REMOTE_PATIENCE", "1")
    monkeypatch.setenv("ICEFLOE_REMOTE_REQUESTS", "2")
    proxy.delay = 0.1
    before = proxy.count("GET .*packs/")
    with restoring(criu, tmp_path / "store", "worker", heap, "--from", url) as process:
        while proxy.count("GET .*packs/") < before + 4:
            time.sleep(0.005)
        proxy.vanish()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 7, errors
    assert "GET s3://" in errors
    wait_dead(heap.pid)
    proxy.start()
    proxy.delay = 0
    restore(criu, tmp_path / "store", "worker", heap, "--from", url)
    heap.verify(frozen, heap.advance())
