"""The stream door: hands CRIU every file through a pipe, as criu-image-streamer does.

`criu restore --stream` connects to streamer-serve.sock in its image directory. It asks for a file
by name, gets told whether there is one, and then sends the end of a pipe to write it into
(criu/img-streamer.c, images/img-streamer.proto). It reads several files at once, and some twice.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from icefloe.capture import img_streamer
from icefloe.capture.criu import wait_for_criu
from icefloe.capture.directory import CriuFiles
from icefloe.errors import CriuFailed, IcefloeError

SOCKET = "streamer-serve.sock"

_EXISTS = img_streamer.LENGTH.pack(2) + bytes((1 << 3, 1))
_MISSING = img_streamer.LENGTH.pack(2) + bytes((1 << 3, 0))


class StreamDoor:
    """Serves the files of one restore."""

    def __init__(self, folder: Path, files: CriuFiles) -> None:
        """Listens in `folder`, which CRIU gets as its image directory."""
        self._files = files
        self._threads: list[threading.Thread] = []
        self.failure: IcefloeError | None = None
        self._listener = img_streamer.listen(folder / SOCKET)

    def serve(self, criu_ended: Callable[[], bool]) -> None:
        """Answers until CRIU needs no more files, or has ended. Raises CriuFailed."""
        wait_for_criu(self._listener, criu_ended)
        connection, _ = self._listener.accept()
        with connection, suppress(ConnectionError):  # as good as its end
            while True:
                wait_for_criu(connection, criu_ended)
                if (name := img_streamer.request(connection)) is None:
                    return
                self._answer(connection, name, criu_ended)

    def close(self, seconds: float | None = None) -> None:
        """Waits until the last file is written, `seconds` at most; CRIU must have ended."""
        self._listener.close()
        until = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def _answer(self, connection: socket.socket, name: str, criu_ended: Callable[[], bool]) -> None:
        if not self._files.has(name):
            connection.sendall(_MISSING)
            return
        connection.sendall(_EXISTS)
        wait_for_criu(connection, criu_ended)
        pipe = img_streamer.receive_pipe(connection, name)
        # When CRIU is killed, what it has started may keep a pipe open: nobody waits for that.
        thread = threading.Thread(target=self._write, args=(name, pipe), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _write(self, name: str, fd: int) -> None:
        """Writes one file into a pipe. CRIU notices by a short file when that fails."""
        try:
            for piece in self._files.content(name):
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(fd, rest) :]
        except BrokenPipeError:
            pass  # CRIU has read what it wanted
        except IcefloeError as error:
            self.failure = self.failure or error
        except OSError as error:
            reason = f"cannot give {name} to CRIU ({error})"
            self.failure = self.failure or CriuFailed(reason, "see its log")
        finally:
            os.close(fd)
