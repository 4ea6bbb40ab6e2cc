"""A restore that can't work says why, with the right exit code, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from criu_tool import Criu, dump
from matrix import one_criu
from restores import command, environment, fails, restore, restoring, state_of, wait_dead
from stores import add
from workloads import Heap, Toucher


@pytest.fixture
def store(criu: Criu, heap: Heap, tmp_path: Path) -> Path:
    """A store with a heap as `worker`, which is gone."""
    heap.advance()
    dump(criu, heap, tmp_path / "images")
    add(tmp_path / "store", tmp_path / "images", "worker")
    return tmp_path / "store"


def mounts(own: Path) -> list[str]:
    """What is mounted here, except for what other tests mount in folders of theirs meanwhile."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(own) in line or "/pytest-of-" not in line]


@contextmanager
def nothing_left(heap: Heap) -> Iterator[dict[str, str]]:
    """No process, no folder and no mount is left by what runs with the environment yielded."""
    own = heap.record.parents[1]
    before = mounts(own)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket
        yield {"TMPDIR": folder}
        assert state_of(heap.pid) is None
        assert mounts(own) == before
        assert not [path for path in Path(folder).iterdir() if path.is_dir()]


def script(path: Path, text: str) -> Path:
    """A program in CRIU's place."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@one_criu
@pytest.mark.parametrize("door", ["lazy", "eager", "stream"])
def test_no_usable_criu(heap: Heap, store: Path, tmp_path: Path, door: str) -> None:
    cases = [
        (tmp_path / "missing", "there is no CRIU", "ICEFLOE_CAPTURE_CRIU"),
        (script(tmp_path / "old", "echo Version: 3.17.1"), "CRIU 3.17", "4.0 or newer"),
        (script(tmp_path / "odd", "exit 1"), "doesn't tell its version", "working CRIU"),
        (tmp_path, "there is no CRIU", "install it"),
    ]
    for program, reason, advice in cases:
        with nothing_left(heap) as extra:
            code, said = fails(store, environment(program) | extra, "worker", "--door", door)
        assert (code, reason in said, advice in said) == (9, True, True), said


@one_criu
@pytest.mark.parametrize("door", ["lazy", "eager", "stream"])
def test_criu_gives_up(criu: Criu, heap: Heap, store: Path, tmp_path: Path, door: str) -> None:
    """At once, after it has begun, and because of a missing file of the process."""
    real = criu.program
    version = f'[ "$1" = --version ] && exec {real} --version\n'
    for program in (
        script(tmp_path / "broken", version + "exit 3"),
        script(tmp_path / "killed", version + "kill -9 $$"),
    ):
        with nothing_left(heap) as extra:
            code, said = fails(store, environment(program) | extra, "worker", "--door", door)
        assert code == 9 and "criu restore failed" in said, said
    hidden = heap.record.with_name("hidden")
    heap.record.rename(hidden)
    with nothing_left(heap) as extra:
        code, said = fails(store, environment(criu) | extra, "worker", "--door", door)
    assert code == 9 and "record" in said and "its log is" in said, said
    hidden.rename(heap.record)
    answer = restore(criu, store, "worker", heap, "--door", door)
    assert answer["door"] == door
    heap.advance()


@one_criu
def test_a_taken_pid(criu: Criu, tmp_path: Path) -> None:
    with Heap(tmp_path / "workload") as heap:
        heap.advance()
        dump(criu, heap, tmp_path / "images", leave_running=True)
        add(tmp_path / "store", tmp_path / "images", "worker")
        for door in ("lazy", "eager", "stream"):
            code, said = fails(tmp_path / "store", environment(criu), "worker", "--door", door)
            assert code == 9 and "unshare --pid" in said, said
        heap.advance()  # the process that has the pid is left alone


@one_criu
def test_not_permitted(criu: Criu, heap: Heap, store: Path) -> None:
    """Another user may read the store, at most."""
    result = subprocess.run(
        ["unshare", "--user", "--map-user=65534", *command(store, "restore", "worker")],
        env=environment(criu),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 9 and "run it as root" in result.stderr, result.stderr
    assert state_of(heap.pid) is None


@one_criu
def test_no_userfaultfd(criu: Criu, heap: Heap, store: Path) -> None:
    """Without CAP_SYS_PTRACE the kernel gives no userfaultfd that serves for a restore."""
    result = subprocess.run(
        ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
        + command(store, "restore", "worker"),
        env=environment(criu),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 9, result.stderr
    assert "userfaultfd can't be used here" in result.stderr and "--eager" in result.stderr
    assert state_of(heap.pid) is None


@one_criu
@pytest.mark.parametrize("args", [(), ("--no-fill",), ("--eager",), ("--stream",)])
def test_a_corrupt_block_kills_the_process(
    criu: Criu, tmp_path: Path, args: tuple[str, ...]
) -> None:
    with Toucher(tmp_path / "workload") as toucher:
        toucher.advance(1)
        dump(criu, toucher, tmp_path / "images")
        store = tmp_path / "store"
        add(store, tmp_path / "images", "worker")
        damage(store)
        with restoring(criu, store, "worker", toucher, *args) as process:
            _, said = process.communicate(timeout=40)
            assert process.returncode == 4, said
            assert "is corrupt" in said and "block " in said, said
        wait_dead(toucher.pid)
        assert state_of(toucher.pid) is None
        # It made no step with memory that is wrong.
        import record

        assert all(step.verdict == toucher.good for step in record.read(toucher.record))


def damage(store: Path) -> None:
    """Flips bytes in the middle of every pack that holds memory."""
    for pack in (store / "packs").rglob("*"):
        if pack.is_file() and pack.stat().st_size > 16 << 20:
            with pack.open("r+b") as file:
                for place in range(4 << 20, pack.stat().st_size - (4 << 20), 1 << 20):
                    file.seek(place)
                    file.write(bytes(64))


@one_criu
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_it_is_told_to_end(
    criu: Criu, heap: Heap, store: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before memory is complete: the process goes, and with it all that was made for it."""
    with nothing_left(heap) as extra:
        monkeypatch.setenv("TMPDIR", extra["TMPDIR"])
        with restoring(criu, store, "worker", heap, "--no-fill") as process:
            heap.advance(1)
            # A terminal sends SIGINT to both processes.
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            _, said = process.communicate(timeout=20)
        assert process.returncode == 130, said
        assert said.strip().startswith("icefloe: interrupted: what was restored was killed"), said


@one_criu
def test_the_log_is_kept(criu: Criu, heap: Heap, store: Path) -> None:
    """Of a restore that failed, and nothing else."""
    heap.record.rename(heap.record.with_name("hidden"))
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket
        _, said = fails(store, environment(criu) | {"TMPDIR": folder}, "worker")
        log = Path(said.rpartition("its log is ")[2].strip())
        assert "Error" in log.read_text()
        assert list(Path(folder).iterdir()) == [log]
