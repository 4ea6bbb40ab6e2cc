"""Fixtures for tests with the real CRIU, each skipped with its reason where CRIU cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from criu_tool import VERSIONS, Criu, program_of, unusable
from fault_proxy import FaultProxy, fault_proxy
from processes import adopting_orphans
from s3_server import S3Server, Unusable, s3_server
from workloads import REDIS_SERVER, Heap, Redis, Workload

unusable_once = cache(unusable)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server, started once for each process that runs tests."""
    try:
        with s3_server(tmp_path_factory.mktemp("s3")) as server:
            yield server
    except Unusable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def aws(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, and the environment that leads to it."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def proxy(aws: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The environment leads to a proxy in front of the server."""
    with fault_proxy(aws.host) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture(params=VERSIONS)
def criu(request: pytest.FixtureRequest) -> Iterator[Criu]:
    """A working CRIU of each version; restored processes become children of this process."""
    version: str = request.param
    if reason := unusable_once(version):
        pytest.skip(reason)
    with adopting_orphans():
        yield Criu(version, program_of(version))


@pytest.fixture
def workload(request: pytest.FixtureRequest, criu: Criu, tmp_path: Path) -> Iterator[Workload]:
    """A kind of process that the test names, running; it is gone when the test is over."""
    kind: type[Workload] = request.param
    if kind is Redis and not REDIS_SERVER.exists():
        pytest.skip(f"{REDIS_SERVER} is missing: run `make criu`")
    with kind(tmp_path / "workload") as running:
        yield running


@pytest.fixture
def heap(criu: Criu, tmp_path: Path) -> Iterator[Heap]:
    """The Python heap, running; it is gone when the test is over."""
    with Heap(tmp_path / "workload") as running:
        yield running
