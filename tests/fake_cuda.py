"""CUDA for machines without a GPU; the states of processes lie in a folder.

So all processes see the same: whoever captures, the one that watches it, and the test.

    PID           the state of a process that has CUDA, by name
    PID.ACTION    what becomes of that action on it: seconds that it takes, an error, or both
    PID.turn      locked by who acts on it
    log           a JSON document a line, for each action when it is over

As with the driver, an action whose turn it isn't is refused; here it is noted as well. Actions on
one process wait for each other, and one that hangs ends with the process.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from icefloe.capture import processes
from icefloe.capture.cuda import CudaState, Moves, _explained
from icefloe.capture.facts import CudaFacts, Gpu
from icefloe.capture.processes import Process
from icefloe.errors import CudaFailed

FACTS = CudaFacts("580.159.04", "13.0", (Gpu("Fake", "GPU-0", 1 << 30, "9.0"),))
FOREVER = 3600.0

_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Call:
    """An action that is over: of which process on which, from when to when, how it ended.

    `error` is the driver's, `broken` says what was out of order.
    """

    caller: int
    action: str
    pid: int
    began: float
    over: float
    error: str = ""
    broken: str = ""
    moves: Moves = ()


class FakeCuda:
    """See Cuda. `step` is called before and after each action."""

    def __init__(self, folder: Path, step: Callable[[str], None] = lambda name: None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._step = step

    def give(self, *pids: int, state: CudaState = CudaState.RUNNING) -> None:
        """These processes have CUDA, in this state."""
        for pid in pids:
            new = self.folder / f"{pid}.new.{os.getpid()}"
            new.write_text(state.name)
            new.rename(self.folder / str(pid))

    def plan(self, pid: int, action: str, seconds: float = 0.0, error: str = "") -> None:
        """What becomes of an action, every time from now on."""
        (self.folder / f"{pid}.{action}").write_text(f"{seconds} {error}")

    def take(self) -> None:
        """No process has CUDA, though all of them look so."""
        for pid in self.states():
            (self.folder / str(pid)).write_text("NONE")

    def users(self, tree: Sequence[Process]) -> list[int]:
        """Those of a tree that have CUDA."""
        return [process.pid for process in tree if (self.folder / str(process.pid)).exists()]

    def states(self) -> dict[int, CudaState | None]:
        """Of all processes that were given CUDA; None for those that have ended."""
        names = (path.name for path in self.folder.iterdir())
        return {int(name): self.state(int(name)) for name in names if name.isdigit()}

    def calls(self) -> list[Call]:
        """Everything that was done, in order of the ends."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [Call(**json.loads(line)) for line in lines]

    def broken(self) -> list[Call]:
        """What was done out of order."""
        return [call for call in self.calls() if call.broken]

    def facts(self) -> CudaFacts:
        """See Cuda."""
        return FACTS

    def state(self, pid: int) -> CudaState | None:
        """See Cuda."""
        found = processes.look(pid)
        if found is None or found.dead:
            return None
        try:
            return CudaState[(self.folder / str(pid)).read_text()]
        except (FileNotFoundError, KeyError):
            return None

    def lock(self, pid: int, seconds: float) -> None:
        """See Cuda. The driver's threads in a stopped process can't answer."""
        self._do("lock", pid, CudaState.RUNNING, CudaState.LOCKED, self._stopped)

    def checkpoint(self, pid: int) -> None:
        """See Cuda."""
        self._do("checkpoint", pid, CudaState.LOCKED, CudaState.CHECKPOINTED, self._unlocked)

    def restore(self, pid: int, moves: Moves = ()) -> None:
        """See Cuda."""
        self._do("restore", pid, CudaState.CHECKPOINTED, CudaState.LOCKED, self._stopped, moves)

    def unlock(self, pid: int) -> None:
        """See Cuda."""
        self._do("unlock", pid, CudaState.LOCKED, CudaState.RUNNING, lambda pid: "")

    def _do(
        self,
        action: str,
        pid: int,
        before: CudaState,
        after: CudaState,
        objection: Callable[[int], str],
        moves: Moves = (),
    ) -> None:
        self._step(action)
        began, state = time.monotonic(), self.state(pid)
        broken = "" if state is None or state is before else f"it is {state.name}"
        broken = broken or objection(pid)
        with self._alone(pid):
            seconds, error = self._planned(pid, action)
            # It may be another now: who asked couldn't know that.
            if broken or self.state(pid) is not before:
                error = "CUDA_ERROR_ILLEGAL_STATE"
            elif self._lives_for(pid, seconds):
                if not error:
                    self.give(pid, state=after)
            else:
                error = "CUDA_ERROR_UNKNOWN"
        self._note(Call(os.getpid(), action, pid, began, time.monotonic(), error, broken, moves))
        if error:
            raise _explained(action, pid, error)
        self._step(f"{action} done")

    @contextmanager
    def _alone(self, pid: int) -> Iterator[None]:
        with (self.folder / f"{pid}.turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _planned(self, pid: int, action: str) -> tuple[float, str]:
        try:
            seconds, _, error = (self.folder / f"{pid}.{action}").read_text().partition(" ")
        except FileNotFoundError:
            return 0.0, ""
        return float(seconds), error

    def _lives_for(self, pid: int, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self.state(pid) is not None:
            if time.monotonic() >= until:
                return True
            time.sleep(min(_LOOK_SECONDS, seconds))
        return False

    def _stopped(self, pid: int) -> str:
        found = processes.look(pid)
        return "it is stopped" if found is not None and found.state in "Tt" else ""

    def _unlocked(self, pid: int) -> str:
        """Work of one that runs could reach another that is being checkpointed."""
        return "others are not" if CudaState.RUNNING in self.states().values() else ""

    def _note(self, call: Call) -> None:
        fd = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, json.dumps(asdict(call)).encode() + b"\n")
        os.close(fd)


def no_cuda() -> FakeCuda:
    """Where there is none."""
    raise CudaFailed("there is no CUDA here", "go where there is")
