"""Real processes to checkpoint, each of which can tell from outside whether it is unharmed.

A workload is a context: it starts on entry, and on exit every process of it is killed and
reaped, whatever the test did in between. Its processes are a session of their own with no
terminal and no inherited descriptors, which is what CRIU dumps without further flags.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from io import BufferedIOBase
from pathlib import Path
from types import TracebackType
from typing import Self

import record
from processes import kill_session, reap_session, wait_until

HERE = Path(__file__).resolve().parent
REDIS_SERVER = HERE.parents[1] / ".cache" / "redis" / "redis-server"
START_SECONDS = 20.0
ADVANCE_SECONDS = 30.0


@dataclass(frozen=True)
class State:
    """How far a workload is, as seen from outside.

    `first` and `last` are the first and the last step it was seen to make since it was started
    or restored; `life` counts the restores.
    """

    life: int
    first: int
    last: int


class Workload(ABC):
    """A process tree that makes steps, and checks itself or can be checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.life = 0
        self._pid = 0
        folder.mkdir()

    @property
    def pid(self) -> int:
        """The root of the process tree, the same after a restore."""
        assert self._pid > 0, "not started"
        return self._pid

    def start(self) -> None:
        """Starts the process and waits until it makes steps."""
        with (self.folder / "errors").open("wb") as errors:
            process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(HERE)},
            )
        self._pid = process.pid
        # From here on the pid may belong to a restored process, so Popen is told to let it go.
        process.returncode = 0
        wait_until(self.ready, START_SECONDS, f"{type(self).__name__} to start")

    def kill(self) -> None:
        """Ends and reaps the whole tree; harmless when it has ended."""
        if self._pid:
            kill_session(self._pid)

    def wait_gone(self) -> None:
        """Reaps the tree after something else, a dump for example, has ended it."""
        reap_session(self.pid)

    def forget(self) -> None:
        """Drops what is known of the process's steps; called just before it is restored."""
        self.life += 1

    def verify(self, before: State, after: State) -> None:
        """Asserts that `after` continues from `before` with memory intact.

        Within one life the steps go on; after a restore the first step made is the one that
        follows the last step before the dump, no matter what the process did since.
        """
        self.verify_memory()
        first = before.first if after.life == before.life else before.last + 1
        assert after.first == first, f"steps begin at {after.first}, not at {first}"
        assert after.last > before.last, f"no step after {before.last}"

    @abstractmethod
    def command(self) -> list[str]:
        """The command that starts the process."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the process has started to make steps."""

    @abstractmethod
    def state(self) -> State:
        """How far the process is now."""

    @abstractmethod
    def frozen_state(self) -> State:
        """How far the process was when a dump ended it."""

    @abstractmethod
    def advance(self, steps: int = 3) -> State:
        """Lets the process go on by at least this many steps; returns where it then is."""

    @abstractmethod
    def verify_memory(self) -> None:
        """Asserts that what the process holds in memory is what it should be."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


class Recorded(Workload):
    """A Python program of `programs/` that checks itself and says so in a record."""

    program: str
    good: str

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.record = folder / "record"
        record.wipe(self.record)

    def command(self) -> list[str]:
        return [sys.executable, str(HERE / "programs" / self.program), str(self.record)]

    def ready(self) -> bool:
        return self._reached(1)

    def forget(self) -> None:
        super().forget()
        record.wipe(self.record)

    def state(self) -> State:
        steps = record.read(self.record)
        assert steps, "no step made"
        return State(self.life, steps[0].number, steps[-1].number)

    def frozen_state(self) -> State:
        return self.state()  # a record outlives its process

    def advance(self, steps: int = 3) -> State:
        # After a restore nothing is recorded yet, and steps count from the first made.
        wait_until(self.ready, ADVANCE_SECONDS, "a first step")
        goal = self.state().last + steps
        wait_until(lambda: self._reached(goal), ADVANCE_SECONDS, f"step {goal}")
        return self.state()

    def verify_memory(self) -> None:
        numbers = [step.number for step in self._good_steps()]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "steps are missing"

    def _reached(self, step: int) -> bool:
        """Whether the process has made a step; it stops at the first that finds damage."""
        steps = self._good_steps()
        return bool(steps) and steps[-1].number >= step

    def _good_steps(self) -> list[record.Step]:
        """The steps made, none of which found anything wrong."""
        errors = (self.folder / "errors").read_text()
        assert not errors, errors
        steps = record.read(self.record)
        wrong = [step for step in steps if step.verdict != self.good]
        assert not wrong, f"the process found its memory damaged: {wrong}"
        return steps


class Heap(Recorded):
    """A Python heap of 16 to 22 MiB that grows and checks every byte at every step."""

    program = "heap.py"
    good = "checksum-ok"


class Tree(Recorded):
    """Three processes counting together over pipes and 4 MiB of shared memory."""

    program = "tree.py"
    good = "counts-ok"


class Toucher(Recorded):
    """One process that touches 64 MiB in an order that is known."""

    program = "toucher.py"
    good = "touched-ok"


class Churn(Recorded):
    """A process that forks, unmaps, moves and discards 48 MiB of memory, and checks the rest."""

    program = "churn.py"
    good = "churn-ok"


class Redis(Workload):
    """redis-server on a UNIX socket, filled with values that are all checked.

    A step is one batch of new keys, written by this side. CRIU 4.1 cannot dump TCP sockets on
    current kernels, hence the UNIX socket.
    """

    BASE_KEYS = 16_000  # of 1 KiB each
    STEP_KEYS = 200

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.socket = folder / "socket"
        self._first: int | None = None
        self._last = 0

    def command(self) -> list[str]:
        quiet = ["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no"]
        return [str(REDIS_SERVER), *quiet, "--unixsocket", str(self.socket)]

    def start(self) -> None:
        super().start()
        self._write(range(self.BASE_KEYS))
        self._ask([b"SET", b"step", b"0"])
        self._first = 1

    def ready(self) -> bool:
        try:
            return self._ask([b"PING"]) == [b"PONG"]
        except (FileNotFoundError, ConnectionError):  # CRIU has not put it together yet
            return False

    def forget(self) -> None:
        super().forget()
        self._first = None

    def state(self) -> State:
        (step,) = self._ask([b"GET", b"step"])
        assert step is not None, "the counter is gone"
        if self._first is None:
            self._first = int(step) + 1
        self._last = int(step)
        return State(self.life, self._first, self._last)

    def frozen_state(self) -> State:
        assert self._first is not None, "nothing was seen of this life"
        return State(self.life, self._first, self._last)  # it makes steps only when told to

    def advance(self, steps: int = 3) -> State:
        for _ in range(steps):
            step = self.state().last + 1
            self._write(self._keys_of(step))
            self._ask([b"INCR", b"step"])
        return self.state()

    def rewrite_some(self, share: float) -> None:
        """Sets some keys anew, to what they are: their values move."""
        keys = range(self._keys_of(self.state().last).stop)
        self._write(random.Random(self.state().last).sample(keys, int(share * len(keys))))

    def verify_memory(self) -> None:
        keys = range(self._keys_of(self.state().last).stop)
        (count,) = self._ask([b"DBSIZE"])
        assert count == str(len(keys) + 1).encode(), f"{count!r} keys, not {len(keys) + 1}"
        values = self._ask(*([b"GET", b"%d" % key] for key in keys))
        wrong = [key for key, value in zip(keys, values, strict=True) if value != value_of(key)]
        assert not wrong, f"{len(wrong)} values are wrong, the first under {wrong[0]}"

    def _keys_of(self, step: int) -> range:
        """The keys that a step writes."""
        stop = self.BASE_KEYS + step * self.STEP_KEYS
        return range(stop - self.STEP_KEYS, stop)

    def _write(self, keys: Iterable[int]) -> None:
        self._ask(*([b"SET", b"%d" % key, value_of(key)] for key in keys))

    def _ask(self, *commands: list[bytes]) -> list[bytes | None]:
        """Sends commands at once; returns the answers.

        Ends only when the server has closed its side too: a connection whose other end is gone
        would stand in the way of a dump that follows at once.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ADVANCE_SECONDS)
            connection.connect(str(self.socket))
            with connection.makefile("rwb") as stream:
                for command in (*commands, [b"QUIT"]):
                    stream.write(b"*%d\r\n" % len(command))
                    stream.writelines(b"$%d\r\n%b\r\n" % (len(part), part) for part in command)
                stream.flush()
                answers = [read_answer(stream) for _ in commands]
                read_answer(stream)  # of QUIT
                assert stream.read() == b"", "redis says more than it was asked"
                return answers


@cache
def value_of(key: int) -> bytes:
    """The value that belongs under a key: 1 KiB that no other key has."""
    return random.Random(key).randbytes(1024)


def read_answer(stream: BufferedIOBase) -> bytes | None:
    """One answer of redis: a line, a number, or a string of given length (None for no value).

    The protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP2).
    """
    line = stream.readline().rstrip(b"\r\n")
    kind, rest = line[:1], line[1:]
    assert kind in (b"+", b":", b"$"), f"redis answers {line!r}"
    if kind != b"$":
        return rest
    length = int(rest)
    return None if length < 0 else stream.read(length + 2)[:-2]
