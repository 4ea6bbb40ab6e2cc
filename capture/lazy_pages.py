"""The lazy door: takes the place of `criu lazy-pages` on the socket that CRIU connects to.

`criu restore --lazy-pages` connects once to lazy-pages.socket in its working directory and sends,
for each process of the tree, its pid (negative: a zombie) and then a userfaultfd; at the end of
the restore the word "RSTF" (criu/uffd.c). From the first descriptor on, memory is filled.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from icefloe.capture import uffd
from icefloe.capture.criu import wait_for_criu
from icefloe.capture.fill import Fault, Fill
from icefloe.capture.guard import Guard
from icefloe.capture.images import PAGE
from icefloe.capture.plan import Plan
from icefloe.capture.spaces import Space
from icefloe.errors import CriuFailed

SOCKET = "lazy-pages.socket"

_PID = struct.Struct("<i")
_FINISHED = struct.pack("<I", 0x52535446)

# How often to look whether CRIU, a thread or the last process has ended.
_LOOK_SECONDS = 0.1


class LazyDoor:
    """Serves one restore."""

    def __init__(self, folder: Path, plan: Plan, fill: Fill, guard: Guard) -> None:
        """Listens in `folder`, which CRIU gets as its working directory."""
        self._plan = plan
        self._fill = fill
        self._guard = guard
        self._held: dict[int, int] = {}
        self._poll = select.poll()
        self._watched: dict[int, Space] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._connection: socket.socket | None = None
        self.resumed_at: float | None = None
        # The path of a socket is short; that of the folder needn't be.
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._listener.bind(f"/proc/self/fd/{fd}/{SOCKET}")
        finally:
            os.close(fd)
        self._listener.listen(1)

    def let_go(self) -> None:
        """Gives memory back to the kernel, which makes what was not filled by now zero."""
        self._fill.stop()
        for fd in list(self._held):
            self._let_go(fd)

    def close(self) -> None:
        """Ends the threads. Memory stays as it is, and whoever waits for it keeps waiting."""
        self._fill.stop()
        self._listener.close()
        if self._connection is not None:
            self._connection.close()

    def connect(self, criu_ended: Callable[[], bool]) -> None:
        """Waits for CRIU and takes the memory of every process. Raises CriuFailed.

        `criu_ended` tells whether CRIU has given up.
        """
        wait_for_criu(self._listener, criu_ended)
        self._connection = self._listener.accept()[0]
        for _ in self._plan.tasks:
            self._take_process(self._connection, criu_ended)
        self._poll.register(self._connection.fileno(), select.POLLIN)
        self._fill.start()

    def _take_process(self, connection: socket.socket, criu_ended: Callable[[], bool]) -> None:
        wait_for_criu(connection, criu_ended)
        word = connection.recv(_PID.size, socket.MSG_WAITALL)
        if len(word) < _PID.size:
            raise CriuFailed("CRIU gave up while it restored", "see its log")
        (pid,) = _PID.unpack(word)
        if pid < 0:
            return
        wait_for_criu(connection, criu_ended)
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        for fd in fds:
            self._hold(fd)
        if not fds or pid not in self._plan.tasks:
            raise CriuFailed(f"CRIU sent no memory of process {pid}", "see its log")
        self._watch(self._fill.add_space(self._plan.tasks.index(pid), fds[0]))

    def _hold(self, fd: int) -> None:
        """Nobody closes it before `let_go`: neither we nor, as long as it guards, the guard."""
        os.set_inheritable(fd, False)
        self._held[fd] = self._guard.hold(fd)

    def _watch(self, space: Space) -> None:
        self._watched[space.fd] = space
        self._poll.register(space.fd, select.POLLIN)

    def serve(self, done: Callable[[], bool]) -> None:
        """Answers the processes until `done`. Raises what the filling threads met.

        `done` is asked a few times a second, and after every event.
        """
        while not done():
            self.serve_once()

    def serve_once(self) -> None:
        """Waits a moment for events and handles them."""
        for fd, _ in self._poll.poll(_LOOK_SECONDS * 1000):
            if self._connection is not None and fd == self._connection.fileno():
                self._hear(self._connection)
            elif (space := self._watched.get(fd)) is not None:
                self._handle(space)
        if self._fill.failure is not None:
            raise self._fill.failure
        for space in self._fill.forget_dead():
            self._let_go(space.fd)

    def look_for_dead(self) -> None:
        """Finds out which processes have ended without a word."""
        for space in self._fill.spaces():
            if not uffd.is_alive(space.fd):
                space.alive = False

    def _let_go(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)
        os.close(fd)
        self._guard.release(self._held.pop(fd))

    def _hear(self, connection: socket.socket) -> None:
        """The end of the restore, or of CRIU."""
        word = connection.recv(len(_FINISHED), socket.MSG_WAITALL)
        if word == _FINISHED:
            self.resumed_at = time.monotonic()
            self._fill.in_place()
        self._poll.unregister(connection.fileno())
        if word != _FINISHED:
            raise CriuFailed("CRIU gave up while it restored", "see its log")

    def _handle(self, space: Space) -> None:
        def take(message: uffd.Message) -> None:
            if message.event == uffd.PAGEFAULT:
                self._fill.faulted(Fault(space, message.b & -PAGE))
            elif message.event == uffd.FORK:
                self._hold(message.a)
                self._watch(self._fill.fork(space, message.a))
            elif message.event == uffd.REMAP:
                space.move(message.a, message.b, message.c)
                left.extend(message.concerned())
            else:
                # After REMOVE the memory is still registered: a fault there gets zeros. Telling the
                # kernel not to ask any more would come too late, when something else may be there.
                space.discard(message.a, message.b)
                left.extend(message.concerned())

        left: list[tuple[int, int]] = []
        self._fill.read_events(space, take)
        for start, end in left:
            uffd.wake(space.fd, start, end - start)  # whoever waits there must look again
