"""The stream door of a capture: takes every file through a pipe, as CRIU writes it.

`criu dump --stream` connects to streamer-capture.sock in its image directory. For each file it
sends the name and then the read end of a pipe, and waits for no answer. Several pipes can be open
at once; the end of one is the end of its file. A thread does nothing but read them, a few windows
ahead of those who take windows; when it has no buffer left it stops, and CRIU waits.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from icefloe.capture import img_streamer
from icefloe.capture.dump import given_up, no_dump
from icefloe.capture.source import is_page_data
from icefloe.capture.windows import (
    SMALL_FILE,
    WINDOW_BYTES,
    Buffer,
    Group,
    OpenFile,
    SmallFiles,
    Window,
)
from icefloe.chunker import BYTES, PAGES
from icefloe.errors import CriuFailed
from icefloe.store.manifest import FileKind, ImageFile

SOCKET = "streamer-capture.sock"

_READ_BYTES = 1 << 20

# When CRIU has written everything, its pipes end at once. Should one stay open, don't wait for it.
_LAST_BYTES_SECONDS = 30.0

# Windows that may lie ready: what keeps the reader going while others change places.
_AHEAD = 3

# How often to see whether to stop.
_LOOK_MILLISECONDS = 200


class Incoming:
    """The files of one dump. `entries` fills up as they end; the last window comes when CRIU has
    written everything and waits."""

    def __init__(self, folder: Path, pages: Sequence[str], entries: list[ImageFile]) -> None:
        """Listens in `folder`, which CRIU gets as its image directory. Raises CriuFailed."""
        self._entries = entries
        self.sequence = 0
        self._pages = pages
        self._listener = img_streamer.listen(folder / SOCKET)
        self._connection: socket.socket | None = None
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._files: dict[int, _File] = {}
        self._names: set[str] = set()
        self._small = SmallFiles()
        self._ready: SimpleQueue[Window | Group | Exception | None] = SimpleQueue()
        # An empty place says that there will be no more. Those of files are in nobody's way.
        self._spare: SimpleQueue[Buffer | None] = SimpleQueue()
        for _ in range(_AHEAD):
            self._spare.put(Buffer())
        self._of_files: list[Buffer] = []
        # Groups lie in no buffer: there may be as many.
        self._groups = threading.Semaphore(_AHEAD)
        self._held = False
        self._complete = False
        self._stopped = False
        self._quiet_since = 0.0
        self._reader = threading.Thread(target=self._run, name="incoming")

    def start(self, held: int, process: int, on_complete: Callable[[], None]) -> None:
        """Reads from now on. `held` can be read when CRIU has written everything and waits,
        `process` is CRIU's pidfd. `on_complete` is called when all that CRIU wrote was read."""
        self._held_fd, self._process_fd = held, process
        self._on_complete = on_complete
        self._poll.register(held, select.POLLIN)
        self._poll.register(process, select.POLLIN)
        self._reader.start()

    def take(self, buffer: Buffer) -> Window | Group | None:
        """See Windows. Raises CriuFailed."""
        piece = self._ready.get()
        if isinstance(piece, Window):
            self._spare.put(buffer)
        elif isinstance(piece, Group):
            self._groups.release()
        else:
            self._ready.put(piece)  # for whoever asks next
        if isinstance(piece, Exception):
            raise piece
        return piece

    def stop(self) -> None:
        """See Windows."""
        self._stopped = True
        self._spare.put(None)
        self._groups.release()
        if self._connection is not None:
            with suppress(OSError):  # a request that never ends ends now
                self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives up what is still open: CRIU, if it is alive, fails."""
        self.stop()
        if self._reader.ident is not None:
            self._reader.join()
        for end in (self._listener, self._connection):
            if end is not None:
                end.close()
        for fd in self._files:
            os.close(fd)
        self._files.clear()

    def _run(self) -> None:
        try:
            while not self._complete:
                self._step()
            self._on_complete()
            self._ready.put(None)
        except Exception as error:
            self._ready.put(error)

    def _step(self) -> None:
        if self._stopped:
            raise given_up()
        events = self._poll.poll(_LOOK_MILLISECONDS)
        for fd, event in events:
            if fd in self._files:
                self._read(self._files[fd], bool(event & select.POLLIN))
            elif fd == self._listener.fileno():
                self._connect()
            elif self._connection is not None and fd == self._connection.fileno():
                self._open_next(self._connection)
            elif fd == self._held_fd:
                # Whatever CRIU asked for, it asked for before this.
                self._held = bool(os.read(fd, 16))
                self._quiet_since = time.monotonic()
                self._poll.unregister(fd)
            elif fd == self._process_fd:
                raise no_dump()
        if self._held:
            self._look_for_the_end(idle=not events)

    def _look_for_the_end(self, idle: bool) -> None:
        if not self._files and not self._asked():
            if self._small:
                self._hand_out(self._small.empty(self.sequence))
            self._complete = True
        elif not idle:
            self._quiet_since = time.monotonic()
        elif time.monotonic() - self._quiet_since > _LAST_BYTES_SECONDS:
            names = ", ".join(file.open.path for file in self._files.values())
            raise CriuFailed(f"CRIU never ended {names}", "see its log")

    def _asked(self) -> bool:
        """Whether CRIU has said something that was not read yet."""
        end = self._connection or self._listener
        poll = select.poll()
        poll.register(end, select.POLLIN)
        if not poll.poll(0):
            return False
        return end is self._listener or bool(end.recv(1, socket.MSG_PEEK))

    def _connect(self) -> None:
        self._connection, _ = self._listener.accept()
        self._poll.unregister(self._listener)
        self._poll.register(self._connection, select.POLLIN)

    def _open_next(self, connection: socket.socket) -> None:
        """Takes the next request."""
        name = img_streamer.request(connection)
        if name is None:
            self._poll.unregister(connection)
            return
        fd = img_streamer.receive_pipe(connection, name)
        plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
        if not plain or name in self._names:
            os.close(fd)
            raise CriuFailed(f"CRIU writes a file {name!r}, for the second time or nowhere", "")
        self._names.add(name)
        os.set_blocking(fd, False)
        memory = is_page_data(name, self._pages)
        opened = OpenFile(name, PAGES if memory else BYTES)
        own = None
        if memory:
            own = self._of_files.pop() if self._of_files else Buffer()
        self._files[fd] = _File(fd, opened, own)
        self._poll.register(fd, select.POLLIN)

    def _buffer(self) -> Buffer:
        """The next that somebody gives back. Raises CriuFailed when nobody will."""
        buffer = self._spare.get()
        if buffer is None:
            raise given_up()
        return buffer

    def _read(self, file: "_File", more: bool) -> None:
        """Reads until the window is full or the pipe is empty; `more`: there is something."""
        if not more:  # the other end is closed
            self._end(file)
            return
        if file.held == WINDOW_BYTES:
            self._hand_out(file.window(self.sequence, False, self._buffer()))
        while file.held < WINDOW_BYTES:
            try:
                count = file.read()
            except BlockingIOError:
                return
            if not count:
                self._end(file)
                return

    def _end(self, file: "_File") -> None:
        self._poll.unregister(file.fd)
        os.close(file.fd)
        del self._files[file.fd]
        size = file.offset + file.held
        self._entries.append(
            ImageFile(
                path=file.open.path,
                kind=FileKind.REGULAR,
                mode=0o600,
                uid=os.geteuid(),
                gid=os.getegid(),
                mtime_ns=time.time_ns(),
                size=size,
            )
        )
        if size >= SMALL_FILE:
            self._hand_out(file.window(self.sequence, True, self._buffer()))
        elif size:
            if self._small.full(size):
                self._hand_out(self._small.empty(self.sequence))
            self._small.add(file.open.path, file.whole())
        if file.buffer is not None:
            self._of_files.append(file.buffer)

    def _hand_out(self, piece: Window | Group) -> None:
        if isinstance(piece, Group):
            self._groups.acquire()
            if self._stopped:
                raise given_up()
        self._ready.put(piece)
        self.sequence += 1


class _File:
    """A file that is being written; the bytes of its next window are `held`.

    Memory is read straight into a buffer. All else, which can be many files at once, is gathered
    in as many bytes as there are.
    """

    def __init__(self, fd: int, opened: OpenFile, buffer: Buffer | None) -> None:
        self.fd = fd
        self.open = opened
        self.offset = 0
        self.held = 0
        self.buffer = buffer
        self._gathered = bytearray()

    def read(self) -> int:
        """Takes what the pipe holds; 0 at its end. Raises BlockingIOError when it is empty."""
        room = WINDOW_BYTES - self.held
        if self.buffer is not None:
            count = os.readv(self.fd, [self.buffer.window(WINDOW_BYTES)[self.held :]])
        else:
            content = os.read(self.fd, min(room, _READ_BYTES))
            self._gathered += content
            count = len(content)
        self.held += count
        return count

    def whole(self) -> bytes:
        """All of a file that has seen no window."""
        if self.buffer is not None:
            return bytes(self.buffer.window(self.held))
        return bytes(self._gathered)

    def window(self, sequence: int, final: bool, spare: Buffer) -> Window:
        """The window that is held. `spare` takes the place of its buffer, or becomes it."""
        if self.buffer is not None:
            buffer, self.buffer = self.buffer, spare
        else:
            buffer = spare
            buffer.window(self.held)[:] = self._gathered
            self._gathered = bytearray()
        window = Window(sequence, self.open, self.offset, self.held, final, buffer, True)
        self.offset += self.held
        self.held = 0
        return window
