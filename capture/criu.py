"""Runs CRIU, and finds out from its log why it failed."""

import os
import re
import select
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from icefloe.capture import scratch
from icefloe.errors import CriuFailed

# Older ones lack the events of userfaultfd, or fail on current kernels.
_OLDEST = (4, 0)

_VERSION = re.compile(r"Version:\s*(\d+)\.(\d+)")
_ERROR = re.compile(r"Error \([^)]*\): (.*)")

# What getopt_long(3) says.
_BAD_OPTION = re.compile(
    r"(?:unrecognized|invalid|ambiguous|requires).*(?:option|argument).*|option.*(?:ambiguous|requires).*"
)

# Errors that it survives, or that say nothing.
_NOISE = re.compile(r"RLIMIT_NOFILE|Restoring FAILED|Dumping FAILED")

# What to do about errors that CRIU's own words don't explain. First match wins.
_ADVICE = (
    (
        re.compile(r"Pre-stream script failed|execvp"),
        "set TMPDIR to a folder in which programs may be run",
    ),
    (
        re.compile(r"Can't fork for \d+: File exists|pid \d+.* (already|busy)", re.IGNORECASE),
        "its pid is taken here: end the process that has it, or restore in a pid namespace of its "
        "own (`unshare --pid --fork --mount-proc`)",
    ),
    (
        re.compile(r"Permission denied|Operation not permitted|CAP_|capabilit"),
        "CRIU has to run as root, with all capabilities",
    ),
    (
        re.compile(r"bad (size|mode)|has bad|Can't open file|No such file"),
        "a file that the process had open must be there as it was at the checkpoint",
    ),
)

_LOG_BYTES = 1 << 20

# How often to see whether CRIU has ended while it should say something.
_LOOK_MILLISECONDS = 100


@dataclass(frozen=True, slots=True)
class Criu:
    """A CRIU that can be run, and its version (major, minor)."""

    program: str
    version: tuple[int, int]

    def start(self, arguments: Sequence[str | Path], words: BinaryIO) -> "subprocess.Popen[bytes]":
        """Starts it. What it says on standard error goes to `words`. Raises CriuFailed.

        It inherits standard input and output, for processes that had a terminal, and whatever
        descriptors the caller of icefloe meant for it.
        """
        try:
            return subprocess.Popen([self.program, *arguments], stderr=words, close_fds=False)
        except OSError as error:
            raise _unusable(self.program, error) from None

    def start_apart(
        self, arguments: Sequence[str | Path], words: BinaryIO, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Starts it in a session of its own, so that what ends icefloe doesn't end it as well.

        All that it says goes to `words`. Raises CriuFailed.
        """
        try:
            return subprocess.Popen(
                [self.program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env={**os.environ, **environment},
                close_fds=False,
                start_new_session=True,
            )
        except OSError as error:
            raise _unusable(self.program, error) from None


def find_criu(program: str) -> Criu:
    """The CRIU of this name or path. Raises CriuFailed when it is missing, broken or too old."""
    if shutil.which(program) is None:
        raise CriuFailed(
            f"there is no CRIU ({program})",
            "install it, or name it with ICEFLOE_CAPTURE_CRIU or the key capture.criu",
        )
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unusable(program, error) from None
    found = _VERSION.search(told.stdout)
    if not found:
        words = (told.stderr or told.stdout).strip()[-200:] or f"exit code {told.returncode}"
        raise CriuFailed(f"{program} doesn't tell its version ({words})", "name a working CRIU")
    version = int(found[1]), int(found[2])
    if version < _OLDEST:
        raise CriuFailed(
            f"{program} is CRIU {version[0]}.{version[1]}", "icefloe needs 4.0 or newer"
        )
    return Criu(program, version)


def _unusable(program: str, error: Exception) -> CriuFailed:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return CriuFailed(f"cannot run {program} ({reason})", "name a working CRIU")


def wait_for_criu(end: socket.socket, ended: Callable[[], bool]) -> None:
    """Until CRIU has something to say. Raises CriuFailed when it has `ended` and said nothing.

    The end of CRIU need not end a connection: what it has restored so far may hold on to it.
    """
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while True:
        over = ended()
        if poll.poll(_LOOK_MILLISECONDS):
            return
        if over:
            raise CriuFailed("CRIU ended in the middle of the restore", "see its log")


def require_root() -> None:
    """Raises CriuFailed for a user for whom CRIU can't work."""
    if os.geteuid() != 0:
        raise CriuFailed("CRIU can't dump or restore processes for this user", "run it as root")


def failure(what: str, code: int, words: bytes, log: Path) -> CriuFailed:
    """Why CRIU ended with `code`, by its log and what it said on standard error."""
    told = words.decode(errors="replace")
    if log.exists():
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            told += file.read().decode(errors="replace")
    found = [line for line in _ERROR.findall(told) if not _NOISE.search(line)]
    found = found or _BAD_OPTION.findall(told) or told.strip().splitlines()[-1:]
    reasons = list(dict.fromkeys(line.strip() for line in found))
    shown = "; ".join(reasons[:3]) or f"exit code {code}, and no word about it"
    copy = scratch.kept(log)
    place = f"its log is {copy}" if copy else "its log could not be kept"
    for pattern, advice in _ADVICE:
        if any(pattern.search(reason) for reason in reasons):
            return CriuFailed(f"{what} failed ({shown})", f"{advice}; {place}")
    return CriuFailed(f"{what} failed ({shown})", place)
