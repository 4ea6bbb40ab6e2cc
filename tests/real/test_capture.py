"""Running processes go into the store and come back; what can't be captured is left alone."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from captures import (
    LEAVE_RUNNING,
    Accompanied,
    Growing,
    Locking,
    capture,
    nothing_happens,
    packs_bytes,
    peak_bytes,
    refusal,
    refused,
    stop,
)
from criu_tool import Criu, dump
from matrix import every_kind, one_criu
from processes import wait_until
from restores import (
    DOORS,
    RSEQ_BYTES,
    command,
    differing_bytes,
    environment,
    fails,
    memory_of,
    restore,
    state_of,
    threads_of,
)
from stores import add, icefloe
from workloads import REDIS_SERVER, Churn, Heap, Redis, Tree, Workload

from icefloe.capture.images import PAGE
from icefloe.chunker import MAX_BLOCK

ROUNDS = 8
GROWING_MIB = 24
SMALL_MIB, LARGE_MIB = 60, 240
# Packs are compressed anew one at a time: one as it was stored and one as it will be.
PACKS_IN_MEMORY = 2 * 64 << 20
LIMIT_MIB, LIMITED_MIB = 250, 150
CGROUPS = Path("/sys/fs/cgroup")


@every_kind(Churn)
def test_a_process_lives_on(criu: Criu, workload: Workload, tmp_path: Path) -> None:
    """Captured, brought back, and the same again, through files, of which CRIU may cut holes."""
    store = tmp_path / "store"
    workload.advance()
    for args, criu_args, door in (
        ((), (), "lazy"),
        (("--no-stream",), ("--auto-dedup",), "eager"),
    ):
        capture(criu, store, "worker", workload, *args, criu_args=criu_args)
        frozen = workload.frozen_state()
        assert restore(criu, store, "worker", workload, "--door", door)["door"] == door
        workload.verify(frozen, workload.advance())


@every_kind(Churn)
def test_a_process_runs_on(criu: Criu, workload: Workload, tmp_path: Path) -> None:
    """By itself, and once more from where it was captured."""
    store = tmp_path / "store"
    before = workload.advance()
    capture(criu, store, "worker", workload, LEAVE_RUNNING)
    after = workload.state()
    workload.verify(before, workload.advance())
    workload.kill()
    restore(criu, store, "worker", workload)
    again = workload.advance(1)
    workload.verify_memory()
    assert before.last < again.first <= after.last + 1


@one_criu
def test_a_growing_process_costs_what_changes(criu: Criu, tmp_path: Path) -> None:
    """Again and again captured and restored: what is new is what was written since, in blocks."""
    store = tmp_path / "store"
    logical: list[int] = []
    new: list[int] = []
    steps: list[int] = []
    with Growing(tmp_path / "workload", GROWING_MIB) as growing:
        for number in range(ROUNDS):
            before = packs_bytes(store)
            growing.advance(1)
            answer = capture(criu, store, f"worker:{number}", growing)
            frozen = growing.frozen_state()
            assert packs_bytes(store) - before == answer["stored_bytes"]
            restore(criu, store, f"worker:{number}", growing)
            growing.verify(frozen, growing.advance(1))
            logical.append(answer["logical_bytes"])
            new.append(answer["new_bytes"])
            steps.append(frozen.last - sum(steps))
            print(
                f"round {number:2}: logical {logical[-1] / 1e6:5.1f} MB, "
                f"new {new[-1] / 1e6:5.2f} MB in {answer['new_blocks']:3} blocks, "
                f"store grew by {answer['stored_bytes'] / 1e6:5.2f} MB"
            )
    # The interpreter, which touches its own memory all over, may be new every time.
    interpreter = logical[0] - (GROWING_MIB << 20) - steps[0] * Growing.ADDED
    assert 0 < interpreter < 12 << 20
    written = [count * (Growing.ADDED + Growing.REWRITTEN) for count in steps]
    # What is added and what is rewritten lie in one place each; either may touch the block
    # before it and the one after, which may be of any length.
    for made, wrote, count in zip(new[1:], written[1:], steps[1:], strict=True):
        assert wrote < made < wrote + interpreter + count * 2 * 2 * MAX_BLOCK
    # Blocks have a quarter of that length on average.
    assert sum(new[1:]) < sum(written[1:]) + (ROUNDS - 1) * interpreter + sum(steps[1:]) * MAX_BLOCK
    assert packs_bytes(store) < sum(logical) / 6
    audit = icefloe(store, "check", "--read-data")
    assert (audit["ok"], audit["images"], audit["problems"]) == (True, ROUNDS, [])


@one_criu
def test_scattered_changes_cost_pages(criu: Criu, tmp_path: Path) -> None:
    """And no blocks around them: beside the image before it, and beside one of another name."""
    if not REDIS_SERVER.exists():
        pytest.skip(f"{REDIS_SERVER} is missing: run `make criu`")
    store = tmp_path / "store"
    names = ("redis:1", "redis:2", "another")
    with Redis(tmp_path / "workload") as redis:
        redis.advance()
        answers = [capture(criu, store, names[0], redis, LEAVE_RUNNING)]
        for name in names[1:]:
            redis.rewrite_some(0.02)
            answers.append(capture(criu, store, name, redis, LEAVE_RUNNING))
        redis.kill()
        restore(criu, store, names[-1], redis)
        redis.verify_memory()
    kept: set[bytes] = set()
    for name, answer in zip(names, answers, strict=True):
        icefloe(store, "export", name, tmp_path / name)
        pages = set(pages_of(tmp_path / name)) - {bytes(PAGE)}
        least = len(pages - kept) * PAGE
        print(f"{name}: new {answer['new_bytes'] / 1e6:.2f} MB, of pages {least / 1e6:.2f} MB")
        assert least <= answer["new_bytes"] <= 1.25 * least + (1 << 20)
        kept |= pages
    assert answers[1]["new_bytes"] < answers[0]["new_bytes"] / 4
    audit = icefloe(store, "check", "--read-data")
    assert (audit["ok"], audit["images"]) == (True, len(names))


def pages_of(folder: Path) -> Iterator[bytes]:
    """Every page of the memory in a checkpoint."""
    for file in sorted(folder.glob("pages-*.img")):
        content = file.read_bytes()
        yield from (content[i : i + PAGE] for i in range(0, len(content), PAGE))


def test_memory_is_what_it_was_at_the_capture(criu: Criu, heap: Heap, tmp_path: Path) -> None:
    """A process that was stopped is captured, and restored, as stopped."""
    store = tmp_path / "store"
    heap.advance()
    stop(heap.pid)
    before, threads = memory_of(heap.pid), threads_of(heap.pid)
    assert sum(len(part.content) for part in before) > 16 << 20
    capture(criu, store, "running", heap, LEAVE_RUNNING)
    assert state_of(heap.pid) == "T"
    assert differing_bytes(before, memory_of(heap.pid)) <= RSEQ_BYTES * threads
    capture(criu, store, "ended", heap, "--no-stream")
    frozen = heap.frozen_state()
    for name, door in zip(("running", "ended", "running"), DOORS, strict=True):
        heap.kill()
        restore(criu, store, name, heap, "--door", door)
        wait_until(lambda: state_of(heap.pid) == "T", 5, "the process to stop")
        assert differing_bytes(before, memory_of(heap.pid)) <= RSEQ_BYTES * threads
    os.kill(heap.pid, signal.SIGCONT)
    heap.verify(frozen, heap.advance())


@one_criu
def test_a_stream_has_the_blocks_of_a_dump(criu: Criu, heap: Heap, tmp_path: Path) -> None:
    """The same state: captured, and dumped by CRIU and added."""
    store = tmp_path / "store"
    heap.advance()
    stop(heap.pid)
    capture(criu, store, "streamed", heap, LEAVE_RUNNING)
    dump(criu, heap, tmp_path / "images", leave_running=True)
    add(store, tmp_path / "images", "added")
    found = icefloe(store, "diff", "streamed", "added")
    # The kernel writes into the process's rseq area; small files share a block, and plain CRIU
    # leaves its log with them.
    assert found["shared_bytes"] > 16 << 20, found
    assert found["only_a_bytes"] < 2 * MAX_BLOCK and found["only_b_bytes"] < 3 * MAX_BLOCK, found


@one_criu
def test_one_of_a_tree_is_stopped(criu: Criu, tmp_path: Path) -> None:
    """It stays stopped, and no other is."""
    store = tmp_path / "store"
    with Accompanied(tmp_path / "workload") as tree:
        child = tree.child
        stop(child)
        for args in ((), ("--no-stream",)):
            began = tree.advance()
            answer = capture(criu, store, "worker", tree, LEAVE_RUNNING, *args)
            assert answer["processes"] == 2
            tree.verify(began, tree.advance())
            assert (state_of(child), state_of(tree.pid) in ("R", "S", "D")) == ("T", True)
        os.kill(child, signal.SIGCONT)
        wait_until(lambda: state_of(child) == "S", 5, "the child to go on")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that holds something already."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(bytes(range(256)) * 1000)
    add(tmp_path / "store", tmp_path / "kept", "kept")
    return tmp_path / "store"


@pytest.fixture
def tree(criu: Criu, tmp_path: Path) -> Iterator[Tree]:
    """Three processes; they are gone when the test is over."""
    with Tree(tmp_path / "workload") as running:
        yield running


# All that is refused is in tests/capture/test_dump_arguments.py.
REFUSED = (["--auto-dedup"], ["-jDx"], ["-lt", "4194305"])


@one_criu
def test_arguments_that_cannot_be_meant(
    criu: Criu, tree: Tree, store: Path, tmp_path: Path
) -> None:
    """2, before CRIU is even asked for its version, and before a store is made."""
    program, asked = watched(criu, tmp_path)
    place = ["worker", "--pid", str(tree.pid)]
    with nothing_happens(tree, store) as extra:
        for words in REFUSED:
            ended = refused(tmp_path / "none", environment(program) | extra, *place, "--", *words)
            assert ended.code == 2 and words[0] in ended.said, ended
            assert not asked.exists(), asked.read_text()
    assert not (tmp_path / "none").exists()


@one_criu
def test_the_end_of_options_as_a_value(criu: Criu, tree: Tree, store: Path, tmp_path: Path) -> None:
    """2: to getopt(3) the `--` is what `--external` names, and options go on after it."""
    program, asked = watched(criu, tmp_path)
    place = ["worker", "--pid", str(tree.pid)]
    with nothing_happens(tree, store) as extra:
        environ = environment(program) | extra
        ended = refused(store, environ, *place, "--", "--external", "--", "-R")
        assert ended.code == 2 and not asked.exists(), ended


def watched(criu: Criu, folder: Path) -> tuple[Path, Path]:
    """A CRIU that writes down what it is asked for, and where it does."""
    program, asked = folder / "criu", folder / "asked"
    program.write_text(f'#!/bin/sh\necho "$@" >>{asked}\nexec {criu.program} "$@"\n')
    program.chmod(0o755)
    return program, asked


@one_criu
def test_nobody_to_capture(criu: Criu, tree: Tree, store: Path) -> None:
    """3: none, never one, and one that has ended already."""
    with subprocess.Popen(["true"]) as ended:
        wait_until(lambda: state_of(ended.pid) == "Z", 5, "a zombie")
        with nothing_happens(tree, store) as extra:
            environ = environment(criu) | extra
            for pid in ("4194305", "0", str(ended.pid)):
                found = refused(store, environ, "worker", "--pid", pid)
                assert found.code == 3 and f"there is no process {pid}" in found.said, found


@one_criu
def test_words_that_mean_nothing(criu: Criu, tree: Tree, store: Path) -> None:
    """2: bad names and labels, and no pid."""
    pid = ["--pid", str(tree.pid)]
    with nothing_happens(tree, store) as extra:
        environ = environment(criu) | extra
        for words in (
            ["BAD NAME", *pid],
            ["@12345678", *pid],
            ["worker", *pid, "--label", "x"],
            ["worker"],
        ):
            ended = refused(store, environ, *words)
            assert ended.code == 2, (words, ended)


@one_criu
def test_an_ancestor(criu: Criu, tree: Tree, store: Path) -> None:
    """2: nobody can freeze the one that started it, or itself."""
    with nothing_happens(tree, store) as extra:
        for script in ('"$@" --pid $$; exit $?', 'exec "$@" --pid $$'):
            result = subprocess.run(
                ["sh", "-c", script, "sh", *command(store, "capture", "worker")],
                env=environment(criu) | extra,
                capture_output=True,
                text=True,
                timeout=30,
                start_new_session=True,
            )
            ended = refusal(result)
            assert ended.code == 2 and "icefloe itself" in ended.said, ended


@one_criu
def test_no_usable_criu(criu: Criu, tree: Tree, store: Path, tmp_path: Path) -> None:
    """9: before anything was touched."""
    cases = {
        "weak": ('[ "$1" = --version ] && echo Version: 4.2 && exit; exit 3', "criu dump failed"),
        "idle": (
            '[ "$1" = --version ] && echo Version: 4.2 && exit; exit 0',
            "CRIU ended without a dump",
        ),
    }
    with nothing_happens(tree, store) as extra:
        place = ["worker", "--pid", str(tree.pid)]
        ended = refused(store, environment(tmp_path / "missing") | extra, *place)
        assert ended.code == 9 and "there is no CRIU" in ended.said, ended
        for name, (script, reason) in cases.items():
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            ended = refused(store, environment(program) | extra, *place)
            assert ended.code == 9 and reason in ended.said, ended


@one_criu
def test_a_busy_store(criu: Criu, tree: Tree, store: Path) -> None:
    """6, and the processes are not frozen meanwhile."""
    with nothing_happens(tree, store) as extra:
        with (store / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            began = tree.state()
            ended = refused(store, environment(criu) | extra, "worker", "--pid", str(tree.pid))
            # Steps take 20 ms or a little more, and it waits for five seconds.
            assert tree.state().last - began.last > 50
        assert ended.code == 6 and "is in use by" in ended.said, ended


@one_criu
def test_a_process_that_criu_refuses(criu: Criu, store: Path, tmp_path: Path) -> None:
    """9, and its log is kept. With the argument that CRIU asks for, the same process works."""
    with Locking(tmp_path / "workload") as locking:
        with nothing_happens(locking, store) as extra:
            for args in ((), ("--no-stream",), (LEAVE_RUNNING,)):
                place = ["worker", "--pid", str(locking.pid), *args]
                ended = refused(store, environment(criu) | extra, *place)
                assert ended.code == 9, ended
                assert "criu dump failed" in ended.said and "--file-locks" in ended.said, ended
                assert "nothing was stored, the processes run on" in ended.said, ended
                log = Path(ended.said.rpartition("its log is ")[2].strip())
                assert log.parent == Path(extra["TMPDIR"]) and "Error" in log.read_text()
        capture(criu, store, "worker", locking, criu_args=["--file-locks"])
        frozen = locking.frozen_state()
        restore(criu, store, "worker", locking, criu_args=["--file-locks"])
        locking.verify(frozen, locking.advance())


@one_criu
def test_memory_does_not_grow_with_the_image(criu: Criu, tmp_path: Path) -> None:
    peaks = []
    for mib in (SMALL_MIB, LARGE_MIB):
        with Growing(tmp_path / f"workload-{mib}", mib) as growing:
            peaks.append(peak_bytes(criu, tmp_path / f"store-{mib}", growing))
            frozen = growing.frozen_state()
            restore(criu, tmp_path / f"store-{mib}", "worker", growing)
            growing.verify(frozen, growing.advance(1))
    small, large = peaks
    print(f"peak: {small / 1e6:.0f} MB for {SMALL_MIB} MiB, {large / 1e6:.0f} MB for {LARGE_MIB}")
    assert large - small < PACKS_IN_MEMORY < LARGE_MIB - SMALL_MIB << 20
    assert large < LIMIT_MIB << 20


@one_criu
def test_memory_is_scarce(criu: Criu, tmp_path: Path) -> None:
    """Of icefloe and CRIU; the process has its own."""
    with limited(LIMIT_MIB << 20) as prefix:
        with Growing(tmp_path / "workload", LIMITED_MIB) as growing:
            growing.advance()
            peak_bytes(criu, tmp_path / "store", growing, prefix)
            frozen = growing.frozen_state()
            restore(criu, tmp_path / "store", "worker", growing)
            growing.verify(frozen, growing.advance())


@contextmanager
def limited(limit: int) -> Iterator[list[str]]:
    """What a command is put behind so that it has no more memory than this, nor any swap."""
    try:
        if "memory" not in (CGROUPS / "cgroup.subtree_control").read_text().split():
            pytest.skip(f"{CGROUPS} gives out no limits of memory")
        cgroup = Path(tempfile.mkdtemp(prefix="icefloe-test-", dir=CGROUPS))
    except OSError as error:
        pytest.skip(f"no cgroup can be made ({error})")
    try:
        for name, value in (("memory.max", limit), ("memory.swap.max", 0)):
            if (cgroup / name).exists() or name == "memory.max":
                (cgroup / name).write_text(str(value))
        yield ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(cgroup)]
    finally:
        wait_until(lambda: not (cgroup / "cgroup.procs").read_text(), 10, "its processes to end")
        cgroup.rmdir()


@one_criu
def test_facts(criu: Criu, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image knows where it was captured, and what it must be."""
    monkeypatch.setenv("ICEFLOE_CAPTURE_CRIU", str(criu.program))
    store = tmp_path / "store"
    tree.advance()
    capture(criu, store, "worker", tree, "--label", "model=a", "--label", "made-by=me")
    frozen = tree.frozen_state()
    shown = icefloe(store, "show", "worker")
    facts: dict[str, Any] = shown["facts"]
    assert shown["labels"] == {"model": "a", "made-by": "me"}
    assert (facts["arch"], facts["kernel"]) == (platform.machine(), platform.release())
    assert facts["criu"] == criu.version
    assert facts["cpu"]["features"] and isinstance(facts["cpu"]["model"], str)
    assert "cuda" not in facts or facts["cuda"]["gpus"]

    assert icefloe(store, "fits", "worker", "--expect", "model=a") == {
        "id": shown["id"],
        "fits": True,
        "mismatches": [],
    }
    asked = subprocess.run(
        command(store, "fits", "worker", "--expect", "model=b", "--json"),
        capture_output=True,
        text=True,
    )
    answer = json.loads(asked.stdout)
    assert (asked.returncode, answer["fits"]) == (5, False)
    assert [(found["image"], found["here"]) for found in answer["mismatches"]] == [("a", "b")]

    code, said = fails(store, environment(criu), "worker", "--expect", "model=b")
    assert code == 5 and "model of the image is a" in said, said
    assert state_of(tree.pid) is None
    restore(criu, store, "worker", tree, "--expect", "model=b", "--ignore-incompatible")
    tree.verify(frozen, tree.advance())
