"""CUDA at a restore: whether it is asked for, for which processes, and how it fails.

The processes are real, their CUDA is not (tests/fake_cuda.py).
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_manifests
import pytest
from fake_cuda import FACTS, FakeCuda, no_cuda

from icefloe.capture import fit, gate, processes
from icefloe.capture.criu import Criu
from icefloe.capture.cuda import CudaState
from icefloe.capture.facts import encode_cuda, machine_facts
from icefloe.capture.waking import Waking
from icefloe.errors import CudaFailed, Incompatible
from icefloe.store.manifest import Manifest

CHECKPOINTED, RUNNING = CudaState.CHECKPOINTED, CudaState.RUNNING
CRIU = Criu("criu", (4, 2))
ENOUGH = 20.0


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path / "cuda")


@pytest.fixture
def shell() -> Iterator[list[int]]:
    """A shell and its two children, which are gone when the test is over."""
    shell = subprocess.Popen(["sh", "-c", "sleep 120 & sleep 120 & wait"])
    yield [shell.pid, *children(shell.pid, 2)]
    end(shell)


@pytest.fixture
def nested() -> Iterator[tuple[int, int]]:
    """Two processes, the second of which believes to be the first of all."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a pid namespace takes root and unshare")
    outer = subprocess.Popen(["unshare", "--pid", "--fork", "sleep", "120"])
    (inner,) = children(outer.pid, 1)
    yield outer.pid, inner
    end(outer)


def children(pid: int, count: int) -> list[int]:
    """They are there soon, and run what they are to run."""
    until = time.monotonic() + ENOUGH
    while True:
        found = [process.pid for process in processes.below(pid)]
        names = [Path(f"/proc/{each}/comm").read_text().strip() for each in found]
        if names == ["sleep"] * count:
            return found
        assert time.monotonic() < until
        time.sleep(0.01)


def end(root: "subprocess.Popen[bytes]") -> None:
    """With all that is below it."""
    for process in processes.below(root.pid):
        os.kill(process.pid, 9)
    root.kill()
    root.wait()


def woken(cuda: FakeCuda | None, pids: list[int], root: int, seconds: float = ENOUGH) -> Waking:
    """One that has ended. Raises CudaFailed."""
    waking = Waking(cuda, pids, seconds)
    waking.start(root)
    waking.finish()
    waking.check()
    return waking


def test_those_that_had_cuda(cuda: FakeCuda, shell: list[int]) -> None:
    """And no others of the tree."""
    cuda.give(*shell, state=CHECKPOINTED)
    cuda.plan(shell[2], "restore", seconds=0.2)
    waking = woken(cuda, [shell[0], shell[2]], shell[0])
    assert cuda.states() == {shell[0]: RUNNING, shell[1]: CHECKPOINTED, shell[2]: RUNNING}
    assert 0.2 <= waking.seconds < ENOUGH
    assert not cuda.broken()


def test_by_the_pids_that_they_see(cuda: FakeCuda, nested: tuple[int, int]) -> None:
    """An image knows a process as what it was in its own namespace."""
    outer, inner = nested
    assert processes.inner_pid(inner) == 1
    cuda.give(inner, state=CHECKPOINTED)
    woken(cuda, [1], outer)
    assert cuda.states() == {inner: RUNNING}
    cuda.give(inner, state=CHECKPOINTED)
    with pytest.raises(CudaFailed, match=f"process {inner}, which has CUDA .*is not there"):
        woken(cuda, [inner], outer)
    assert cuda.states() == {inner: CHECKPOINTED}


def test_on_other_gpus(cuda: FakeCuda, shell: list[int]) -> None:
    """What the gate found out reaches the driver."""
    cuda.give(shell[0], state=CHECKPOINTED)
    waking = Waking(cuda, [shell[0]], ENOUGH, [("GPU-0", "GPU-1")])
    waking.start(shell[0])
    waking.finish()
    ((old, new),) = cuda.calls()[0].moves
    assert (old, new) == ("GPU-0", "GPU-1")


def test_one_is_missing(cuda: FakeCuda, shell: list[int]) -> None:
    """Nothing is done to the others either: the restore has failed."""
    cuda.give(*shell, state=CHECKPOINTED)
    gone = shell[1]
    os.kill(gone, 9)
    while Path(f"/proc/{gone}").exists():  # dying takes a moment
        time.sleep(0.01)
    with pytest.raises(CudaFailed, match=f"process {gone}, which has CUDA .*is not there"):
        woken(cuda, shell, shell[0])
    assert not cuda.calls()


def test_all_are_gone(cuda: FakeCuda, shell: list[int]) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(CudaFailed, match=f"process {shell[1]}, which has CUDA"):
        woken(cuda, [shell[1]], ended.pid)


def test_nobody_had_cuda(cuda: FakeCuda, shell: list[int]) -> None:
    """Then none is needed, here or anywhere."""
    cuda.give(*shell, state=CHECKPOINTED)
    for here in (cuda, None):
        assert woken(here, [], shell[0]).seconds == 0.0
    assert not cuda.calls()
    Waking(None, [1], 1.0).finish()  # not started


def test_no_cuda_here(shell: list[int]) -> None:
    with pytest.raises(CudaFailed, match="need CUDA, which can't be used here"):
        woken(None, [shell[0]], shell[0])


def test_a_failure_is_seen_at_once(cuda: FakeCuda, shell: list[int]) -> None:
    """While memory is still coming in: who brings it looks every now and then."""
    cuda.give(*shell, state=CHECKPOINTED)
    cuda.plan(shell[1], "restore", seconds=0.3, error="CUDA_ERROR_OUT_OF_MEMORY")
    waking = Waking(cuda, shell, ENOUGH)
    waking.check()
    waking.start(shell[0])
    waking.check()  # nothing is known yet
    until = time.monotonic() + ENOUGH
    with pytest.raises(CudaFailed, match=f"can't restore process {shell[1]}"):
        while time.monotonic() < until:
            waking.check()
            time.sleep(0.01)
    with pytest.raises(CudaFailed):
        waking.finish()
    assert waking.seconds == 0.0


def test_it_takes_too_long(cuda: FakeCuda, shell: list[int]) -> None:
    cuda.give(*shell, state=CHECKPOINTED)
    cuda.plan(shell[1], "restore", seconds=3600)
    with pytest.raises(CudaFailed, match=f"did not restore process {shell[1]} within 0 s"):
        woken(cuda, shell, shell[0], seconds=0.3)


# --- the gate -----------------------------------------------------------------------------------


def image(cuda: Any) -> Manifest:
    """An image that was captured here, with this as the facts about CUDA."""
    facts = machine_facts((4, 2), None)
    return made_manifests.build([], [], [], facts | ({} if cuda is None else {"cuda": cuda}))


def test_an_image_without_cuda() -> None:
    """The driver is left alone: opening it takes time, and memory on every GPU."""
    verdict = gate.judge(image(None), CRIU, {}, no_cuda)
    assert verdict.fits and verdict.cuda is None
    assert gate.cuda_pids(image(None)) == []


def test_an_image_with_cuda(cuda: FakeCuda) -> None:
    fitting = image(encode_cuda(FACTS) | {"pids": [7]})
    verdict = gate.judge(fitting, CRIU, {}, lambda: cuda)
    assert verdict.fits and verdict.cuda is cuda
    assert gate.cuda_pids(fitting) == [7]


def test_gpus_take_the_places_of_others(cuda: FakeCuda) -> None:
    """One by one, in the driver's order, and only where one is another than it was."""
    then = replace(FACTS, gpus=(replace(FACTS.gpus[0], uuid="GPU-7"),))
    verdict = gate.judge(image(encode_cuda(then) | {"pids": [7]}), CRIU, {}, lambda: cuda)
    assert verdict.fits and list(verdict.moves) == [("GPU-7", "GPU-0")]
    same = gate.judge(image(encode_cuda(FACTS) | {"pids": [7]}), CRIU, {}, lambda: cuda)
    assert not same.moves


def test_no_driver_here() -> None:
    """The reason is told, as what blocks; the restore may be tried all the same."""
    verdict = gate.judge(image(encode_cuda(FACTS) | {"pids": [7]}), CRIU, {}, no_cuda)
    assert not verdict.fits and verdict.cuda is None
    assert any("there is no CUDA here" in found.sentence for found in verdict.mismatches)
    with pytest.raises(Incompatible, match="there is no CUDA here"):
        fit.require(verdict.mismatches)


@pytest.mark.parametrize(
    ("cuda", "pids"),
    [
        ({"pids": [3, 1]}, [3, 1]),
        ({"pids": [True, 2, "3", None, 4.0, [5]]}, [2]),
        ({"pids": {"1": 2}}, []),
        ({"pids": "12"}, []),
        ({"pids": 7}, []),
        ({}, []),
        ([7], []),
        ("pids", []),
    ],
)
def test_pids_of_anybody(cuda: Any, pids: list[int]) -> None:
    """Facts come from anywhere."""
    assert gate.cuda_pids(image(cuda)) == pids
