"""Suspends the CUDA of a whole process tree, and wakes it again."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from icefloe.capture import processes
from icefloe.capture.cuda import Cuda, CudaState, Moves
from icefloe.errors import CudaFailed, IcefloeError

# How long the work on a GPU may take to finish. It ends by itself, or never.
LOCK_SECONDS = 10.0

_LOOK_SECONDS = 0.05


def lock(cuda: Cuda, pids: Sequence[int]) -> None:
    """Locks all, one after the other: each takes a millisecond. Raises CudaFailed."""
    for pid in pids:
        if cuda.state(pid) is not CudaState.RUNNING:
            raise CudaFailed(
                f"the CUDA of process {pid} is suspended already",
                "another program has begun a checkpoint of it; let that one end first",
            )
        cuda.lock(pid, LOCK_SECONDS)


def checkpoint(cuda: Cuda, pids: Sequence[int], seconds: float) -> None:
    """Checkpoints all that are locked, side by side. Raises CudaFailed."""
    in_parallel(cuda.checkpoint, pids, seconds, "checkpoint")


def resume(cuda: Cuda, pids: Sequence[int], seconds: float, moves: Moves = ()) -> None:
    """Restores and unlocks all, side by side, whatever was done to each. They must run.

    `moves`: see Cuda. Raises CudaFailed for the first that can't be, when all have been tried.
    """
    in_parallel(lambda pid: _wake(cuda, pid, moves), pids, seconds, "restore")


def _wake(cuda: Cuda, pid: int, moves: Moves) -> None:
    """Leads it back from wherever it is, step by step."""
    while (state := cuda.state(pid)) is not CudaState.RUNNING:
        try:
            if state is CudaState.CHECKPOINTED:
                cuda.restore(pid, moves)
            elif state is CudaState.LOCKED:
                cuda.unlock(pid)
            else:
                there = processes.look(pid)
                gone = there is None or there.dead
                reason = "it has ended" if gone else "the driver has given it up"
                raise CudaFailed(f"CUDA can't restore process {pid} ({reason})", "start it anew")
        except CudaFailed:
            if cuda.state(pid) is state:  # else a call that came too late has changed it meanwhile
                raise


def in_parallel(
    action: Callable[[int], None], pids: Sequence[int], seconds: float, what: str
) -> None:
    """Does it to all pids at once and waits, `seconds` at most. Raises the first error.

    A call into the driver can't be taken back: a thread that never returns is left behind.
    """
    done: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()

    def run(pid: int) -> None:
        try:
            action(pid)
        except BaseException as error:
            done.put((pid, error))
        else:
            done.put((pid, None))

    for pid in pids:
        threading.Thread(target=run, args=(pid,), daemon=True).start()
    left = set(pids)
    errors: list[BaseException] = []
    until = time.monotonic() + seconds
    while left:
        try:
            pid, error = done.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            if time.monotonic() > until:
                names = ", ".join(map(str, sorted(left)))
                errors.append(_late(what, names, seconds))
                break
            continue
        left.discard(pid)
        if error is not None:
            errors.append(error)
    if errors:
        known = [error for error in errors if isinstance(error, IcefloeError)]
        raise (known or errors)[0]


def _late(what: str, pids: str, seconds: float) -> CudaFailed:
    return CudaFailed(
        f"CUDA did not {what} process {pids} within {seconds:.0f} s",
        "give it longer with the key capture.cuda_timeout, or see dmesg",
    )
