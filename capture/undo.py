"""Sets a captured process tree running again when icefloe itself is gone.

A capture may be killed at any moment. CRIU, in a session of its own, notices a broken pipe and
lets the tree go on. What it doesn't know of is done by a small process that was forked before
anything began: it waits until both icefloe and CRIU are gone, then wakes CUDA, and either ends
the tree, if its image was committed and CRIU has left it stopped, or lets it run.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from icefloe.capture import processes, suspend
from icefloe.capture.cuda import OpenCuda
from icefloe.capture.processes import Process
from icefloe.errors import IcefloeError

_WORD_BYTES = 1 << 20

_DYING_SECONDS = 0.002
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Doing:
    """How far a capture is: what there would be to undo.

    `root` is the tree's first process as it was before, `stopped` the pids that were stopped
    then, `cuda` those that are being suspended, `cgroup` the freezer that CRIU uses, `criu` CRIU
    itself when it has been started.
    """

    root: Process
    stopped: tuple[int, ...] = ()
    cuda: tuple[int, ...] = ()
    cgroup: str = ""
    committed: bool = False
    criu: Process | None = None


class Watcher:
    """The process that waits; this side tells it what goes on."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self._channel = channel
        self._pid = pid
        # CRIU holds it as well, so that its end means that both are gone.
        channel.set_inheritable(True)

    def tell(self, doing: Doing) -> None:
        """To be called before the step that it speaks of."""
        with suppress(OSError):  # it is gone: nobody watches, and the capture goes on
            self._channel.send(json.dumps(asdict(doing)).encode())

    def dismiss(self) -> None:
        """There is nothing to undo any more. CRIU must have ended."""
        with suppress(OSError):
            self._channel.send(b"null")
        self._channel.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def stand_by(open_cuda: OpenCuda, cuda_seconds: float) -> Watcher:
    """Forks the watcher. To be called before there are threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.pidfd_open(os.getpid())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # may have come ignored: then CRIU never fails
    pid = os.fork()
    if pid:
        theirs.close()
        os.close(parent)
        return Watcher(ours, pid)
    code = 1
    try:
        ours.close()
        _detach()
        doing = _listen(theirs, parent)
        if doing is not None:
            undo(doing, open_cuda, cuda_seconds)
        code = 0
    except IcefloeError as error:
        _say(f"a capture was killed, and what it had begun can't be undone: {error}")
    finally:
        os._exit(code)


def _detach() -> None:
    """What ends icefloe must not end the watcher, nor may it keep a pipe of icefloe's open."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _listen(channel: socket.socket, parent: int) -> Doing | None:
    """What was going on when both icefloe and CRIU were gone; None if there is nothing to undo."""
    doing = None
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if channel.fileno() in ready:
            message = channel.recv(_WORD_BYTES)
            if not message:
                return doing
            told = json.loads(message)
            if told is None:
                return None
            criu = told["criu"] and Process(**told["criu"])
            doing = Doing(**{**told, "root": Process(**told["root"]), "criu": criu})
        elif doing is not None and doing.criu is not None:
            # Whatever CRIU has left behind may hold on to the channel.
            while processes.is_there(doing.criu):
                time.sleep(_LOOK_SECONDS)
            end_strays(doing.criu.pid)
            return doing
        else:
            poll.unregister(parent)  # the end of the channel will tell


def end_strays(criu: int) -> None:
    """Ends what a killed CRIU has left in its session, stopped perhaps, and waiting for it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(criu, signal.SIGKILL)


def undo(doing: Doing, open_cuda: OpenCuda, cuda_seconds: float) -> None:
    """CRIU must have ended. Raises CudaFailed when CUDA can't be woken."""
    if doing.committed:
        root = processes.again(doing.root)
        if root is None or root.dead:
            return  # it is the last to be ended
        if root.stopped:
            kill(doing.root)
            return
    let_run(doing)
    if doing.cuda:
        suspend.resume(open_cuda(), doing.cuda, cuda_seconds)


def let_run(doing: Doing) -> None:
    """Continues the processes of the tree, but for those that were stopped before."""
    if doing.cgroup:
        _thaw(Path(doing.cgroup))
    if doing.committed:  # only then CRIU was told to leave them stopped
        for process in processes.tree(doing.root):
            if process.pid not in doing.stopped:
                _signal(process, signal.SIGCONT)


def kill(root: Process) -> None:
    """Ends a tree whose processes are stopped; returns when they are gone.

    The root comes last: as long as it is there, all others can be found.
    """
    members = processes.tree(root)[::-1]
    for process in members:
        _signal(process, signal.SIGKILL)
    while any(map(processes.is_there, members)):
        time.sleep(_DYING_SECONDS)


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(process.pid)
        try:
            if processes.again(process) is not None:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def freezer_of(cgroup: str) -> str:
    """The freezer to thaw again if CRIU can't: none when it is frozen already."""
    for name, frozen in (("cgroup.freeze", "1"), ("freezer.state", "FROZEN")):
        with suppress(OSError):
            return "" if (Path(cgroup) / name).read_text().strip() == frozen else cgroup
    return ""


def _thaw(cgroup: Path) -> None:
    for name, word in (("cgroup.freeze", "0"), ("freezer.state", "THAWED")):
        with suppress(OSError):
            if (cgroup / name).exists():
                (cgroup / name).write_text(word)


def _say(words: str) -> None:
    with suppress(OSError):
        print(f"icefloe: {words}", file=sys.stderr)
