"""What `criu dump --stream` and `criu restore --stream` have in common on the wire.

CRIU connects once to a socket in its image directory and asks for files by name, each with the
end of a pipe (criu/img-streamer.c, images/img-streamer.proto).
"""

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

from icefloe.errors import CriuFailed

LENGTH = struct.Struct("<I")

# A request holds one file name: field 1, a string of at most PATH_MAX bytes.
_MAX_REQUEST = 8192
_NAME_KEY = 1 << 3 | 2

# Larger pipes are a known trouble of CRIU's; a smaller one costs a switch for every 64 KiB.
_PIPE_BYTES = 1 << 20


def listen(path: Path) -> socket.socket:
    """Listens for CRIU. Raises CriuFailed."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {path} ({error})"
        raise CriuFailed(reason, "set TMPDIR to a folder with a short name") from None
    listener.listen(1)
    return listener


def request(connection: socket.socket) -> str | None:
    """The name of the file that CRIU turns to next, None when there is none. Raises CriuFailed."""
    head = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = connection.recv(length, socket.MSG_WAITALL) if length <= _MAX_REQUEST else b""
    # Names are shorter than 128 bytes, so their length takes one byte.
    if len(body) != length or length < 2 or body[0] != _NAME_KEY or body[1] != length - 2:
        raise CriuFailed("CRIU asked for a file in a way that is not known", "see its log")
    return body[2:].decode(errors="surrogateescape")


def receive_pipe(connection: socket.socket, name: str) -> int:
    """The end of a pipe that CRIU sends with a request. Raises CriuFailed."""
    _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if not fds:
        raise CriuFailed(f"CRIU sent no pipe for {name}", "see its log")
    with suppress(OSError):  # a limit of the user's may forbid it
        fcntl.fcntl(fds[0], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return fds[0]
