"""Suspending the CUDA of several processes, and waking it: order, errors, limits.

The processes are real, their CUDA is not (tests/fake_cuda.py).
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_cuda import FOREVER, Call, FakeCuda

from icefloe.capture import suspend
from icefloe.capture.cuda import Cuda, CudaState
from icefloe.errors import CudaFailed

RUNNING, LOCKED, CHECKPOINTED, FAILED = CudaState

# Longer than anything here takes.
ENOUGH = 20.0


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Three processes, which are gone when the test is over."""
    sleeping = [subprocess.Popen(["sleep", "120"]) for _ in range(3)]
    yield [process.pid for process in sleeping]
    for process in sleeping:
        process.kill()
        process.wait()


@pytest.fixture
def cuda(tmp_path: Path, pids: list[int]) -> FakeCuda:
    """They have CUDA, which runs."""
    fake = FakeCuda(tmp_path / "cuda")
    fake.give(*pids)
    return fake


def done(cuda: FakeCuda) -> list[tuple[str, int]]:
    """What was done, to which process."""
    return [(call.action, call.pid) for call in cuda.calls() if not call.error]


def overlap(calls: list[Call]) -> bool:
    """Whether there was a moment when all were at work."""
    return max(call.began for call in calls) < min(call.over for call in calls)


def test_the_fake_is_a_cuda(cuda: FakeCuda, pids: list[int]) -> None:
    """It keeps the driver's order, and says when somebody does not."""
    one: Cuda = cuda
    for action in (one.checkpoint, one.restore, one.unlock):
        with pytest.raises(CudaFailed, match="ILLEGAL_STATE"):
            action(pids[0])
    one.lock(pids[0], 1.0)
    with pytest.raises(CudaFailed, match="ILLEGAL_STATE"):
        one.checkpoint(pids[0])  # the others run
    assert [call.broken for call in cuda.broken()] == [*["it is RUNNING"] * 3, "others are not"]
    one.lock(pids[1], 1.0)
    one.lock(pids[2], 1.0)
    one.checkpoint(pids[0])
    os.kill(pids[0], signal.SIGSTOP)
    os.waitpid(pids[0], os.WUNTRACED)
    with pytest.raises(CudaFailed):
        one.restore(pids[0])
    assert cuda.broken()[-1].broken == "it is stopped"
    os.kill(pids[0], signal.SIGCONT)
    one.restore(pids[0])
    one.unlock(pids[0])
    assert FakeCuda(cuda.folder).states() == {pids[0]: RUNNING, pids[1]: LOCKED, pids[2]: LOCKED}
    assert one.state(os.getpid()) is None


def test_there_and_back(cuda: FakeCuda, pids: list[int]) -> None:
    """Locked one after the other, in order; then all are checkpointed, and woken."""
    for pid in pids:
        cuda.plan(pid, "lock", seconds=0.05)
    suspend.lock(cuda, pids)
    locks = cuda.calls()
    assert [call.pid for call in locks] == pids
    assert all(a.over <= b.began for a, b in zip(locks, locks[1:], strict=False))
    suspend.checkpoint(cuda, pids, ENOUGH)
    assert set(cuda.states().values()) == {CHECKPOINTED}
    suspend.resume(cuda, pids, ENOUGH)
    assert set(cuda.states().values()) == {RUNNING}
    assert sorted(done(cuda)) == sorted(
        (action, pid) for action in ("lock", "checkpoint", "restore", "unlock") for pid in pids
    )
    assert not cuda.broken()


def test_side_by_side(cuda: FakeCuda, pids: list[int]) -> None:
    """What takes long is done to all at once."""
    suspend.lock(cuda, pids)
    for pid in pids:
        cuda.plan(pid, "checkpoint", seconds=0.3)
        cuda.plan(pid, "restore", seconds=0.3)
    suspend.checkpoint(cuda, pids, ENOUGH)
    suspend.resume(cuda, pids, ENOUGH)
    for action in ("checkpoint", "restore"):
        assert overlap([call for call in cuda.calls() if call.action == action])


@pytest.mark.parametrize("state", [LOCKED, CHECKPOINTED, FAILED])
def test_suspended_already(cuda: FakeCuda, pids: list[int], state: CudaState) -> None:
    """By somebody else: that one is named and left alone, as are those that come after it."""
    cuda.give(pids[1], state=state)
    with pytest.raises(CudaFailed, match=f"process {pids[1]} is suspended already"):
        suspend.lock(cuda, pids)
    assert cuda.states() == {pids[0]: LOCKED, pids[1]: state, pids[2]: RUNNING}
    assert done(cuda) == [("lock", pids[0])]


def test_a_lock_is_refused(cuda: FakeCuda, pids: list[int]) -> None:
    """Those after it are left alone; all are as before when they have been woken."""
    cuda.plan(pids[1], "lock", error="CUDA_ERROR_NOT_READY")
    with pytest.raises(CudaFailed, match=rf"can't lock process {pids[1]} \(CUDA_ERROR_NOT_READY"):
        suspend.lock(cuda, pids)
    assert done(cuda) == [("lock", pids[0])]
    suspend.resume(cuda, pids, ENOUGH)
    assert set(cuda.states().values()) == {RUNNING}
    assert not cuda.broken()


def test_how_long_work_may_take(pids: list[int]) -> None:
    """The driver is told, so that it gives up by itself."""
    told = []

    class Locking(FakeCuda):
        def __init__(self) -> None:
            pass

        def state(self, pid: int) -> CudaState | None:
            return RUNNING

        def lock(self, pid: int, seconds: float) -> None:
            told.append(seconds)

    suspend.lock(Locking(), pids)
    assert told == [suspend.LOCK_SECONDS] * 3


def test_a_checkpoint_is_refused(cuda: FakeCuda, pids: list[int]) -> None:
    """The others are through when the error comes; then each is woken from where it is."""
    suspend.lock(cuda, pids)
    cuda.plan(pids[0], "checkpoint", error="CUDA_ERROR_OUT_OF_MEMORY")
    cuda.plan(pids[1], "checkpoint", seconds=0.2)
    with pytest.raises(CudaFailed, match=f"can't checkpoint process {pids[0]}") as caught:
        suspend.checkpoint(cuda, pids, ENOUGH)
    assert "memory of the machine" in caught.value.advice
    assert cuda.states() == {pids[0]: LOCKED, pids[1]: CHECKPOINTED, pids[2]: CHECKPOINTED}
    suspend.resume(cuda, pids, ENOUGH)
    assert set(cuda.states().values()) == {RUNNING}
    assert ("restore", pids[0]) not in done(cuda)
    assert not cuda.broken()


def test_the_first_error_is_told(cuda: FakeCuda, pids: list[int]) -> None:
    """The first in time, when all have been tried."""
    suspend.lock(cuda, pids)
    cuda.plan(pids[0], "checkpoint", seconds=0.3, error="CUDA_ERROR_LATE")
    cuda.plan(pids[1], "checkpoint", seconds=0.1, error="CUDA_ERROR_EARLY")
    cuda.plan(pids[2], "checkpoint", seconds=0.5)
    with pytest.raises(CudaFailed, match=f"process {pids[1]} .*EARLY"):
        suspend.checkpoint(cuda, pids, ENOUGH)
    assert cuda.states()[pids[2]] is CHECKPOINTED


def test_wake_from_anywhere(cuda: FakeCuda, pids: list[int]) -> None:
    """Nothing is done to one that runs; one that is locked isn't restored."""
    cuda.give(pids[1], state=LOCKED)
    cuda.give(pids[2], state=CHECKPOINTED)
    suspend.resume(cuda, pids, ENOUGH)
    assert set(cuda.states().values()) == {RUNNING}
    assert sorted(done(cuda)) == sorted(
        [("unlock", pids[1]), ("restore", pids[2]), ("unlock", pids[2])]
    )
    assert not cuda.broken()


def test_on_other_gpus(cuda: FakeCuda, pids: list[int]) -> None:
    """Each process is told of all of them."""
    cuda.give(*pids, state=CHECKPOINTED)
    moves = [("GPU-0", "GPU-2"), ("GPU-1", "GPU-1")]
    suspend.resume(cuda, pids, ENOUGH, moves)
    told = [call.moves for call in cuda.calls() if call.action == "restore"]
    assert [[(old, new) for old, new in each] for each in told] == [moves] * 3


@pytest.mark.parametrize("refused", ["restore", "unlock"])
def test_one_that_does_not_wake(cuda: FakeCuda, pids: list[int], refused: str) -> None:
    """It is named; the others run."""
    for pid in pids:
        cuda.give(pid, state=CHECKPOINTED)
    cuda.plan(pids[1], refused, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(CudaFailed, match=f"can't {refused} process {pids[1]}"):
        suspend.resume(cuda, pids, ENOUGH)
    left = LOCKED if refused == "unlock" else CHECKPOINTED
    assert cuda.states() == {pids[0]: RUNNING, pids[1]: left, pids[2]: RUNNING}


def test_given_up_by_the_driver(cuda: FakeCuda, pids: list[int]) -> None:
    cuda.give(*pids, state=CHECKPOINTED)
    cuda.give(pids[0], state=FAILED)
    with pytest.raises(CudaFailed, match=f"{pids[0]} .the driver has given it up"):
        suspend.resume(cuda, pids, ENOUGH)
    assert cuda.states() == {pids[0]: FAILED, pids[1]: RUNNING, pids[2]: RUNNING}


def test_ended_meanwhile(cuda: FakeCuda, pids: list[int]) -> None:
    """Nobody has reaped it yet."""
    cuda.give(*pids, state=CHECKPOINTED)
    os.kill(pids[0], signal.SIGKILL)
    os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
    with pytest.raises(CudaFailed, match=f"{pids[0]} .it has ended"):
        suspend.resume(cuda, pids, ENOUGH)
    assert cuda.states() == {pids[0]: None, pids[1]: RUNNING, pids[2]: RUNNING}


def test_ends_in_the_middle(cuda: FakeCuda, pids: list[int]) -> None:
    suspend.lock(cuda, pids)
    cuda.plan(pids[2], "checkpoint", seconds=FOREVER)
    ending = threading.Timer(0.2, os.kill, [pids[2], signal.SIGKILL])
    ending.start()
    began = time.monotonic()
    with pytest.raises(CudaFailed, match=f"process {pids[2]}"):
        suspend.checkpoint(cuda, pids, ENOUGH)
    assert time.monotonic() - began < ENOUGH / 2
    ending.join()


def test_one_that_hangs(cuda: FakeCuda, pids: list[int]) -> None:
    """It is named when the time is over, and the key that gives it more; the others are done."""
    suspend.lock(cuda, pids)
    cuda.plan(pids[1], "checkpoint", seconds=FOREVER)
    began = time.monotonic()
    with pytest.raises(CudaFailed, match=f"did not checkpoint process {pids[1]} within") as caught:
        suspend.checkpoint(cuda, pids, 0.5)
    assert 0.5 <= time.monotonic() - began < 5
    assert "capture.cuda_timeout" in caught.value.advice
    assert cuda.states() == {pids[0]: CHECKPOINTED, pids[1]: LOCKED, pids[2]: CHECKPOINTED}


def test_one_that_is_late(cuda: FakeCuda, pids: list[int]) -> None:
    """Given up, it is checkpointed after all, while it is being woken: woken it is."""
    suspend.lock(cuda, pids)
    cuda.plan(pids[1], "checkpoint", seconds=0.6)
    with pytest.raises(CudaFailed, match="did not checkpoint"):
        suspend.checkpoint(cuda, pids, 0.2)
    suspend.resume(cuda, pids, ENOUGH)
    assert set(cuda.states().values()) == {RUNNING}
    assert ("checkpoint", pids[1]) in done(cuda)
    assert not cuda.broken()


def test_hanging_is_not_the_first_error(cuda: FakeCuda, pids: list[int]) -> None:
    """Why another was refused says more."""
    suspend.lock(cuda, pids)
    cuda.plan(pids[0], "checkpoint", seconds=FOREVER)
    cuda.plan(pids[1], "checkpoint", error="CUDA_ERROR_NOT_SUPPORTED")
    with pytest.raises(CudaFailed, match=f"can't checkpoint process {pids[1]}"):
        suspend.checkpoint(cuda, pids, 0.5)


def test_nothing_to_do(cuda: FakeCuda) -> None:
    suspend.lock(cuda, [])
    suspend.checkpoint(cuda, [], 0.0)
    suspend.resume(cuda, [], 0.0)
    assert not cuda.calls()


def test_known_errors_come_before_others() -> None:
    """What is a bug doesn't hide what a person can do something about."""

    def act(pid: int) -> None:
        time.sleep(pid / 10)
        raise CudaFailed("known", "") if pid == 2 else ValueError(pid)

    with pytest.raises(CudaFailed, match="known"):
        suspend.in_parallel(act, [1, 2, 3], ENOUGH, "act on")
    with pytest.raises(ValueError, match="1"):
        suspend.in_parallel(act, [1, 3], ENOUGH, "act on")
