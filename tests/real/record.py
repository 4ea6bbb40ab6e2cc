"""The record in which a test process says how far it is and whether its memory is right.

A file of fixed size: one line per step, `<step> <verdict>` padded to LINE_BYTES, step N in slot
N modulo LINES. The size never changes because CRIU compares it at restore. A record wiped with
zeros before a restore then holds exactly the steps that the restored process made.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES = 32
LINES = 4096  # steps take 20 ms or more, so a record covers more than a minute


class RecordWriter:
    """The process's side: holds the file open, as a process that logs would."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR)

    def write(self, step: int, verdict: str) -> None:
        """Writes one step with one system call, so that a freeze finds it written or not."""
        line = f"{step:>10} {verdict}".ljust(LINE_BYTES - 1) + "\n"
        os.pwrite(self._file, line.encode(), step % LINES * LINE_BYTES)


@dataclass(frozen=True)
class Step:
    """One line of a record."""

    number: int
    verdict: str


def wipe(path: Path) -> None:
    """Makes an empty record, or empties one; the size stays, and so does the file itself."""
    with path.open("r+b" if path.exists() else "xb") as file:
        file.write(bytes(LINES * LINE_BYTES))


def read(path: Path) -> list[Step]:
    """The steps that a record holds, in order; a line that is just being written does not count."""
    data = path.read_bytes().rstrip(b"\0")  # most of it is empty
    slots = (data[start : start + LINE_BYTES] for start in range(0, len(data), LINE_BYTES))
    # The kernel may copy the end of a line before its start.
    whole = (slot for slot in slots if slot.endswith(b"\n") and b"\0" not in slot)
    return sorted(map(step_of, whole), key=number_of)


def step_of(slot: bytes) -> Step:
    """The step that a full slot names."""
    number, verdict = slot.split()
    return Step(int(number), verdict.decode())


def number_of(step: Step) -> int:
    """The step's number, to sort by."""
    return step.number
