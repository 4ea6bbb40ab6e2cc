"""The real CRIU, as a person would call it: dump a process tree, restore one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import reap_session
from workloads import Workload

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = ("4.1", "4.2")
# A restore whose pages file is too short never ends: the restorer reads 0 bytes again and again
# (seen with 4.1.1) and logs each time. Hence a limit, and only the log's end is looked at.
CRIU_SECONDS = 20.0
LOG_BYTES = 1 << 20
LOG_LINES = 30


class CriuFailed(AssertionError):
    """CRIU ended with an error; the text holds the end of its log."""


@dataclass(frozen=True)
class Criu:
    """One private copy of CRIU, installed by `scripts/criu`."""

    version: str
    program: Path

    def run(self, *args: str | Path, log: Path) -> None:
        """Runs a command of CRIU that writes the log; raises CriuFailed with the log's end."""
        command = [self.program, *args, "-v4", "-o", log]
        try:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CRIU_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise CriuFailed(f"{shown(command)}: no end\n{end_of(log)}") from None
        if result.returncode != 0:
            reason = f"exit {result.returncode}\n{result.stderr}"
            raise CriuFailed(f"{shown(command)}: {reason}\n{end_of(log)}")


def shown(command: Sequence[str | Path]) -> str:
    """A command as one would type it."""
    return " ".join(map(str, command))


def unusable(version: str) -> str | None:
    """Why this version of CRIU cannot be used here, None when it can."""
    program = program_of(version)
    if os.geteuid() != 0:
        return "CRIU needs root"
    if not program.exists():
        return f"{program} is missing: run `make criu`"
    result = subprocess.run([program, "check"], capture_output=True, text=True)
    if result.returncode != 0:
        return f"criu {version} check fails: {(result.stdout + result.stderr).strip()}"
    return None


def program_of(version: str) -> Path:
    """Where `scripts/criu` puts a version."""
    return REPOSITORY / ".cache" / "criu" / version / "criu"


def dump(
    criu: Criu,
    workload: Workload,
    directory: Path,
    leave_running: bool = False,
    extra: Sequence[str] = (),
) -> None:
    """Checkpoints the workload into a new directory; unless left running, it is gone after."""
    directory.mkdir()
    keep = ["--leave-running"] if leave_running else []
    log = directory / "dump.log"
    criu.run("dump", "-t", str(workload.pid), "-D", directory, *keep, *extra, log=log)
    if not leave_running:
        reap_session(workload.pid)


def restore(criu: Criu, workload: Workload, directory: Path, extra: Sequence[str] = ()) -> None:
    """Restores the workload from a directory, detached, under its old pid.

    The record that is read from outside is wiped first: what it holds afterwards was written by
    the restored process.
    """
    workload.forget()
    criu.run("restore", "-d", "-D", directory, *extra, log=directory / "restore.log")


def end_of(log: Path) -> str:
    """The last lines of a log, and before them the errors in it."""
    if not log.exists():
        return f"(no {log})"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line]
    return "\n".join(["errors:", *errors, "end of the log:", *lines[-LOG_LINES:]])
