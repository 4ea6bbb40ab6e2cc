"""Fixtures for tests with the real CRIU, each skipped with its reason where CRIU cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from criu_tool import VERSIONS, Criu, program_of, unusable
from processes import adopting_orphans
from workloads import REDIS_SERVER, Heap, Redis, Tree, Workload

unusable_once = cache(unusable)


@pytest.fixture(params=VERSIONS)
def criu(request: pytest.FixtureRequest) -> Iterator[Criu]:
    """A working CRIU of each version; restored processes become children of this process."""
    version: str = request.param
    if reason := unusable_once(version):
        pytest.skip(reason)
    with adopting_orphans():
        yield Criu(version, program_of(version))


@pytest.fixture(params=[Heap, Redis, Tree])
def workload(request: pytest.FixtureRequest, criu: Criu, tmp_path: Path) -> Iterator[Workload]:
    """Each kind of process, running; it is gone when the test is over."""
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
