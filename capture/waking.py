"""Wakes the CUDA of a tree that CRIU has restored, while its memory is still coming in."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from icefloe.capture import processes, suspend
from icefloe.capture.cuda import Cuda, Moves
from icefloe.errors import CudaFailed


class Waking:
    """For the processes that had CUDA at the capture; `pids` are those that they see themselves.

    `moves`: which GPU takes the place of which, if others do.
    """

    def __init__(
        self, cuda: Cuda | None, pids: Sequence[int], seconds: float, moves: Moves = ()
    ) -> None:
        self.seconds = 0.0
        """How long it took."""
        self._cuda = cuda
        self._pids = pids
        self._limit = seconds
        self._moves = moves
        self._done: Future[None] | None = None

    def start(self, root: int) -> None:
        """`root` is the first of the processes; they run."""
        if self._pids:
            aside = ThreadPoolExecutor(1, "wake")
            self._done = aside.submit(self._wake, root)
            aside.shutdown(wait=False)

    def check(self) -> None:
        """Raises CudaFailed when it has failed already."""
        if self._done is not None and self._done.done():
            self._done.result()

    def finish(self) -> None:
        """Waits for its end. Raises CudaFailed."""
        if self._done is not None:
            self._done.result()

    def _wake(self, root: int) -> None:
        if self._cuda is None:
            raise CudaFailed(
                "the processes need CUDA, which can't be used here", "restore where there is a GPU"
            )
        began = time.monotonic()
        there = processes.look(root)
        tree = processes.tree(there) if there is not None else []
        outside = {processes.inner_pid(process.pid): process.pid for process in tree}
        missing = [pid for pid in self._pids if pid not in outside]
        if missing:
            raise CudaFailed(
                f"process {missing[0]}, which has CUDA to be restored, is not there",
                "see what ended it",
            )
        suspend.resume(self._cuda, [outside[pid] for pid in self._pids], self._limit, self._moves)
        self.seconds = time.monotonic() - began
