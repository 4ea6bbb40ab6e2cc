"""`criu dump` for a capture: how it is called, held while the image becomes durable, let go.

CRIU runs an action script when it has written all and the processes still stand still
(criu/cr-dump.c, "post-dump"). Ours says so and waits for an answer. Only when that is "go", CRIU
leaves the processes stopped, or running, as it was told to; without an answer, because icefloe
failed or is gone, it undoes what it did and lets them run on.
"""

import os
import select
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from icefloe import durable
from icefloe.capture import criu, images
from icefloe.capture.criu import Criu
from icefloe.capture.images import DumpTimes
from icefloe.capture.undo import end_strays
from icefloe.errors import BadImage, CriuFailed, UsageError

# The script finds the pipes in CRIU, its parent: CRIU closes what a script might inherit.
_SCRIPT = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
echo held >"/proc/$PPID/fd/$ICEFLOE_HELD" || exit 1
read -r answer <"/proc/$PPID/fd/$ICEFLOE_ANSWER"
[ "$answer" = go ]
"""

# How long CRIU may take to undo what it did. Without streams it writes its files to the end first.
_UNDOING_SECONDS = 600.0

# How often to see whether to stop.
_LOOK_MILLISECONDS = 200

_OURS = "icefloe sets it by itself"
_ELSEWHERE = "the memory would go elsewhere"
_REFUSED = {
    "-t": _OURS,
    "--tree": _OURS,
    "-D": _OURS,
    "--images-dir": _OURS,
    "-W": _OURS,
    "--work-dir": _OURS,
    "-o": _OURS,
    "--log-file": _OURS,
    "-s": _OURS,
    "--leave-stopped": _OURS,
    "--stream": _OURS,
    "--no-stream": _OURS,
    "--no-leave-stopped": _OURS,
    "--no-leave-running": _OURS,
    "--config": "its options can't be seen here; write them instead of it",
    "-R": "write it before the --",
    "--leave-running": "write it before the --",
    "--page-server": _ELSEWHERE,
    "--address": _ELSEWHERE,
    "--port": _ELSEWHERE,
    "--ps-socket": _ELSEWHERE,
    "--lazy-pages": _ELSEWHERE,
    "--prev-images-dir": "no image needs a parent here: what is known is not stored twice",
}
_REFUSED_STREAMING = {"--auto-dedup": "CRIU can't do both; add --no-stream"}

# Of CRIU's short options (criu/config.c) those that take a value.
_WITH_VALUE = "tDorJWLMvx"

# A shorter beginning of a long option is never unambiguous for CRIU.
_SHORTEST = 4


def check_arguments(arguments: Sequence[str], stream: bool) -> None:
    """Raises UsageError for options of CRIU's that don't go with a capture.

    Every word is looked at as if it were options, though it may be the value of one.
    """
    refused = {**_REFUSED, **(_REFUSED_STREAMING if stream else {})}
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.partition("=")[0]
            found = [o for o in refused if len(name) >= _SHORTEST and o.startswith(name)]
        else:
            found = [f"-{letter}" for letter in _letters(argument) if f"-{letter}" in refused]
        if found:
            reason = refused[found[0]]
            raise UsageError(f"{argument} can't be given to CRIU ({reason})", "leave it out")


def check_defaults(stream: bool) -> None:
    """The same for the files of options that CRIU reads by itself (criu.conf(5))."""
    files = [Path("/etc/criu/default.conf"), Path.home() / ".criu/default.conf"]
    if named := os.environ.get("CRIU_CONFIG_FILE"):
        files.append(Path(named))
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        words = [line.split()[0] for line in lines if line.strip() and line.strip()[0] != "#"]
        try:
            check_arguments([f"--{word}" for word in words], stream)
        except UsageError as error:
            raise UsageError(f"{error.happened}, but {file} does", "take it out there") from None


def _letters(argument: str) -> str:
    """The options in one word, as getopt(3) reads it."""
    if not argument.startswith("-"):
        return ""
    for i, letter in enumerate(argument[1:], 1):
        if letter in _WITH_VALUE:
            return argument[1 : i + 1]
    return argument[1:]


def argument_of(option: str, arguments: Sequence[str]) -> str:
    """The value that a long option of CRIU's is given at last, or nothing."""
    found = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        if len(name) >= _SHORTEST and option.startswith(name):
            found = value if equals else following
    return found


def no_dump() -> CriuFailed:
    """CRIU has ended, and not even said that it failed."""
    return CriuFailed(
        "CRIU ended without a dump", "see whether its arguments make it do something else"
    )


def given_up() -> CriuFailed:
    """Nobody wants what CRIU writes any more."""
    return CriuFailed("the dump was given up", "run it again")


class Dump:
    """One run of `criu dump`, in a folder that holds `images` and its working files."""

    def __init__(self, folder: Path) -> None:
        """Raises NoSpace or NotWritable."""
        self.images = folder / "images"
        self._folder = folder
        self._script = folder / "action"
        with durable.write_errors(folder):
            self.images.mkdir(mode=0o700)
            self._script.write_text(_SCRIPT)
            self._script.chmod(0o700)
        self._log = folder / "dump.log"
        self._words = tempfile.TemporaryFile()
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self.pidfd = -1
        # Ours is the reading end of the one and the writing end of the other.
        self.held, self._held = os.pipe()
        self._answer_to, self._answer = os.pipe()

    def start(self, program: Criu, pid: int, arguments: Sequence[str]) -> None:
        """CRIU freezes the tree. Raises CriuFailed."""
        command: list[str | Path] = ["dump", "-t", str(pid), "-D", self.images, "-W", self._folder]
        command += ["-o", self._log, "--action-script", self._script, *arguments]
        theirs = (self._held, self._answer_to)
        for fd in theirs:
            os.set_inheritable(fd, True)
        told = {"ICEFLOE_HELD": str(self._held), "ICEFLOE_ANSWER": str(self._answer_to)}
        self._process = program.start_apart(command, self._words, told)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        with suppress(OSError):  # whoever runs out of memory: not the one who has frozen others
            Path(f"/proc/{self.pid}/oom_score_adj").write_text("-1000")
        for fd in theirs:
            os.close(fd)
        self._held = self._answer_to = -1

    def wait_held(self, stopped: Callable[[], bool]) -> None:
        """Until all is written. Raises CriuFailed when CRIU ends without, or this has `stopped`."""
        poll = select.poll()
        poll.register(self.held, select.POLLIN)
        while not poll.poll(_LOOK_MILLISECONDS):
            if stopped():
                raise given_up()
        if os.read(self.held, 16) == b"":
            raise no_dump()

    def check_alive(self) -> None:
        """Raises CriuFailed when it is gone, and the processes run on without its image."""
        if self._process is None or self._process.poll() is not None:
            raise CriuFailed("CRIU was ended while the processes stood still", "see its log")

    def let_go(self) -> None:
        """CRIU is to leave the processes as it was told to. Raises CriuFailed when it is gone."""
        self.check_alive()
        with suppress(BrokenPipeError):  # `finish` says why
            os.write(self._answer, b"go\n")

    def finish(self) -> DumpTimes:
        """Waits for CRIU's end. Raises CriuFailed."""
        assert self._process is not None
        if code := self._process.wait():
            self._words.seek(0)
            raise criu.failure("criu dump", code, self._words.read(), self._log)
        stats = self._folder / "stats-dump"
        try:
            return images.decode_dump_stats(stats.read_bytes(), str(stats))
        except (OSError, BadImage):  # another CRIU's: times are no reason to fail
            return DumpTimes()

    def give_up(self, error: BaseException) -> BaseException:
        """Has CRIU let the tree run on, and ends it. Returns its reason, if it failed first."""
        if self._process is None:
            return error
        self._close(self._answer)
        self._answer = -1
        try:
            self._process.wait(_UNDOING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode < 0:
            end_strays(self.pid)
        if isinstance(error, CriuFailed):
            try:
                self.finish()
            except CriuFailed as reason:
                return reason
        return error

    def close(self) -> None:
        """Lets go of everything. CRIU has ended."""
        for fd in (self.held, self._held, self._answer_to, self._answer, self.pidfd):
            self._close(fd)
        self._words.close()

    def _close(self, fd: int) -> None:
        if fd >= 0:
            os.close(fd)
