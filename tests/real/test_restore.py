"""Processes come back out of the store through every door, with all of their memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import record
from criu_tool import Criu, dump
from matrix import every_kind, one_criu
from processes import wait_until
from restores import (
    DOORS,
    RSEQ_BYTES,
    command,
    differing_bytes,
    environment,
    memory_of,
    restore,
    restoring,
    state_of,
    threads_of,
    wait_dead,
)
from stores import add, icefloe
from workloads import REDIS_SERVER, Churn, Heap, Redis, Toucher, Workload


def stored(criu: Criu, workload: Workload, folder: Path, *extra: str) -> Path:
    """Lets the process run, dumps it and stores the dump as `worker`; returns the store."""
    workload.advance(2)
    dump(criu, workload, folder / "images", extra=extra)
    add(folder / "store", folder / "images", "worker")
    return folder / "store"


@every_kind()
def test_a_process_lives_on_through_every_door(
    criu: Criu, workload: Workload, tmp_path: Path
) -> None:
    store = stored(criu, workload, tmp_path)
    frozen = workload.frozen_state()
    for door in (*DOORS, "lazy"):
        answer = restore(criu, store, "worker", workload, "--door", door)
        assert answer["door"] == door
        workload.verify(frozen, workload.advance())
        workload.kill()


def test_memory_is_what_it_was_at_the_dump(criu: Criu, heap: Heap, tmp_path: Path) -> None:
    heap.advance()
    dump(criu, heap, tmp_path / "images", leave_running=True, extra=["--leave-stopped"])
    before, threads = memory_of(heap.pid), threads_of(heap.pid)
    heap.kill()
    add(tmp_path / "store", tmp_path / "images", "worker")
    assert sum(len(part.content) for part in before) > 16 << 20
    for door in DOORS:
        restore(
            criu, tmp_path / "store", "worker", heap, "--door", door, criu_args=["--leave-stopped"]
        )
        wait_until(lambda: state_of(heap.pid) in ("T", "t"), 5, "the process to stop")
        assert differing_bytes(before, memory_of(heap.pid)) <= RSEQ_BYTES * threads
        heap.kill()


@one_criu
def test_memory_that_moves_while_it_comes_in(criu: Criu, tmp_path: Path) -> None:
    with Churn(tmp_path / "workload") as churn:
        store = stored(criu, churn, tmp_path)
        frozen = churn.frozen_state()
        for args in ((), (), ("--no-fill",)):
            with restoring(criu, store, "worker", churn, *args) as process:
                churn.verify(frozen, churn.advance(8))
                if args:
                    churn.kill()
                _, errors = process.communicate(timeout=30)
                assert process.returncode == 0, errors
            churn.kill()


@one_criu
def test_a_client_reads_redis_while_it_comes_in(criu: Criu, tmp_path: Path) -> None:
    if not REDIS_SERVER.exists():
        pytest.skip(f"{REDIS_SERVER} is missing: run `make criu`")
    with Redis(tmp_path / "workload") as redis:
        store = stored(criu, redis, tmp_path)
        frozen = redis.frozen_state()
        for args in ((), ("--no-fill",)):
            with restoring(criu, store, "worker", redis, *args) as process:
                wait_until(redis.ready, 20, "redis to answer")
                redis.verify(frozen, redis.advance())
                redis.kill()
                _, errors = process.communicate(timeout=30)
                assert process.returncode == 0, errors


@one_criu
def test_the_trace_spares_faults(criu: Criu, tmp_path: Path) -> None:
    with Toucher(tmp_path / "workload") as toucher:
        store = stored(criu, toucher, tmp_path)
        with restoring(criu, store, "worker", toucher, "--no-fill") as process:
            toucher.advance(1)
            toucher.kill()
            said, errors = process.communicate(timeout=30)
            assert process.returncode == 0, errors
            touched = json.loads(said)
        again = restore(criu, store, "worker", toucher)
        toucher.advance(1)
        toucher.kill()
    assert touched["filled_seconds"] is None and touched["ended"]
    assert touched["faults"] > 100
    assert again["faults"] * 4 <= touched["faults"], f"{again['faults']} of {touched['faults']}"
    # Touched-only faults are counted by segment, of which a block may have several.
    assert again["faults_avoided"] > touched["faults"] / 2


@one_criu
def test_only_what_is_touched_comes_in(criu: Criu, tmp_path: Path) -> None:
    with Toucher(tmp_path / "workload") as toucher:
        toucher.advance(1)
        before = resident(toucher.pid)
        store = stored(criu, toucher, tmp_path)
        with restoring(criu, store, "worker", toucher, "--no-fill") as process:
            wait_until(lambda: state_of(toucher.pid) is not None, 20, "the process")
            time.sleep(0.05)
            # The store is free for others as long as the process lives.
            wait_until(lambda: can_tag(store), 20, "the store to be free")
            icefloe(store, "rm", "worker", "worker:again")
            icefloe(store, "gc")
            assert resident(toucher.pid) < before
            toucher.advance(1)  # from packs that are deleted by now
            toucher.kill()
            _, errors = process.communicate(timeout=30)
            assert process.returncode == 0, errors


@one_criu
def test_clones_in_pid_namespaces(criu: Criu, heap: Heap, tmp_path: Path) -> None:
    """Each clone writes a record of its own, bound over the common one in its mount namespace."""
    store = stored(criu, heap, tmp_path)
    frozen = heap.frozen_state()
    clones = [clone(criu, store, heap, tmp_path / f"record-{number}") for number in range(3)]
    try:
        for number, process in enumerate(clones):
            record = tmp_path / f"record-{number}"
            heap.record = record
            heap.life += 1
            heap.verify(frozen, heap.advance())
            assert process.poll() is None
    finally:
        for process in clones:
            process.kill()
            process.wait()


def clone(criu: Criu, store: Path, heap: Heap, record: Path) -> subprocess.Popen[bytes]:
    """A restore in a pid and mount namespace of its own, which ends with the process killed."""
    heap.forget()
    record.write_bytes(heap.record.read_bytes())
    restored = " ".join(command(store, "restore", "worker"))
    script = f"mount --bind {record} {heap.record} && {restored} && exec sleep 60"
    return subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script],
        env=environment(criu),
        stdin=subprocess.DEVNULL,
    )


@one_criu
def test_a_killed_fill_kills_the_process(criu: Criu, tmp_path: Path) -> None:
    """When the filling process is killed, the kernel would fill the rest with zeros."""
    with Toucher(tmp_path / "workload") as toucher:
        store = stored(criu, toucher, tmp_path)
        with restoring(criu, store, "worker", toucher, "--no-fill") as process:
            os.kill(filler_of(process, toucher), signal.SIGKILL)
            wait_dead(toucher.pid)
            _, errors = process.communicate(timeout=20)
            assert process.returncode == 128 + signal.SIGKILL
            assert "was killed" in errors
        assert all(step.verdict == toucher.good for step in record.read(toucher.record))


@one_criu
def test_a_killed_guard_lets_the_fill_go_on(criu: Criu, tmp_path: Path) -> None:
    with Toucher(tmp_path / "workload") as toucher:
        store = stored(criu, toucher, tmp_path)
        frozen = toucher.frozen_state()
        with restoring(criu, store, "worker", toucher, "--no-fill") as process:
            filler_of(process, toucher)
            process.kill()
            toucher.verify(frozen, toucher.advance(2))
            toucher.kill()


def filler_of(process: subprocess.Popen[str], workload: Workload) -> int:
    """The process that fills, once CRIU has handed over what it restored to the guard."""
    wait_until(lambda: workload.pid in children(process.pid), 20, "the process")
    (filler,) = set(children(process.pid)) - {workload.pid}
    return filler


def children(pid: int) -> list[int]:
    """The children of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident(pid: int) -> int:
    """Resident memory in pages."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def can_tag(store: Path) -> bool:
    """Whether a command that writes gets at the store."""
    result = subprocess.run(command(store, "tag", "worker", "worker:again"), capture_output=True)
    return result.returncode == 0
