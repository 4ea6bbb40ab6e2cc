"""The page server: gives the memory of a stored image to `criu lazy-pages --page-server`.

Stock CRIU, here or on another machine, restores processes without their memory and asks over TCP
for the pages that they touch, and then for all others (criu/page-xfer.c, criu/uffd.c). A request
is a header, an answer a header and pages; answers come in the order of the requests. Each
connection has a thread of its own, and all share the blocks that were decoded last: restores of
one image ask for much the same.
"""

import socket
import ssl
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from icefloe.capture.blocks import BATCH, Blocks
from icefloe.capture.images import PAGE, PRESENT, Columns
from icefloe.capture.memory import Memory
from icefloe.capture.stored import StoredImage
from icefloe.errors import IcefloeError, UsageError
from icefloe.store.manifest import ZERO

HEADERS = {24: struct.Struct("<IIQQ"), 32: struct.Struct("<I4xQQQ")}
"""By its length in bytes (CRIU up to 4.1, from 4.2 on): command, pages, address, whose memory."""

# Commands (criu/page-xfer.c); the flags of a page stand above the 16 bits of the command.
_COMMAND = 0xFFFF
_ADD_F, _GET, _CLOSE, _FORCE_CLOSE = 6, 7, 0x1023, 0x1024
_ANSWER = PRESENT << 16 | _ADD_F

# What CLOSE is answered with: all is well.
_STATUS = struct.pack("<i", 0)

# A longer request gets a shorter answer: a fault that comes meanwhile must wait for its end.
MAX_PAGES = 256

# Each has a thread, up to 9 MiB of buffers, and 9 descriptors of the 1024 that are usual.
MAX_CLIENTS = 64

# CRIU asks for a few pages of a block, then for the rest. Enough for the faults of many restores.
_CACHED_BYTES = 64 << 20

# How long a handshake, the rest of a header or a farewell may take; CRIU sends each at once.
_PART_SECONDS = 10.0

# One that never asked for anything must make room for another after this long.
_SILENT_SECONDS = 30.0

# When the system has no descriptor or memory for another connection.
_EXHAUSTED_SECONDS = 1.0

# Nobody may stay connected from a machine that is gone (tcp(7)): 60 s, then 6 tries in 60 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))

_ZEROS = memoryview(bytes(MAX_PAGES * PAGE))

Log = Callable[[str], None]
"""Called with one line whenever a client is let down, from any thread."""


class _BadRequest(Exception):
    """What a client sent makes no sense, or not for this image."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """Segments of a process. `starts` are their addresses, `runs` where memory next has a gap.

    Both are columns of their own: numpy would copy a column of a table for every search.
    """

    segments: Columns
    starts: NDArray[np.uint64]
    runs: NDArray[np.uint64]


def _rows(segments: Columns) -> _Rows:
    starts = np.ascontiguousarray(segments["vaddr"])
    ends = starts + segments["length"]
    last = np.append(np.flatnonzero(starts[1:] != ends[:-1]), len(starts) - 1)
    return _Rows(segments, starts, np.repeat(ends[last], np.diff(last, prepend=-1)))


class _Memory:
    """All memory of an image, by pid and address."""

    def __init__(self, memories: Iterable[Memory]) -> None:
        self._rows = {
            memory.pid: _rows(memory.segments)
            for memory in memories
            if memory.pid is not None and len(memory.segments)
        }
        self._decoded: OrderedDict[int, bytes] = OrderedDict()
        self._decoded_bytes = 0
        self._lock = threading.Lock()

    def copy(self, blocks: Blocks, pid: int, vaddr: int, into: memoryview) -> int:
        """Copies memory from `vaddr` on, up to a gap or the end of `into`; returns whole pages.

        Raises _BadRequest when there is not one, or Corrupt.
        """
        rows = self._rows.get(pid)
        if rows is None:
            raise _BadRequest(f"the image has no memory of process {pid}")
        first = int(np.searchsorted(rows.starts, np.uint64(vaddr), side="right")) - 1
        run = int(rows.runs[first]) if first >= 0 else 0
        pages = (min(run, vaddr + len(into)) - vaddr) // PAGE
        if pages < 1:
            raise _BadRequest(f"the image has no page of process {pid} at {vaddr:#x}")
        end = vaddr + pages * PAGE
        last = int(np.searchsorted(rows.starts, np.uint64(end), side="left"))
        for i in range(first, last, BATCH):  # not all at once: each may be in another block
            pieces = rows.segments[i : min(i + BATCH, last)]
            found = self._blocks(blocks, pieces["block"][pieces["block"] != ZERO].tolist())
            for start, length, block, offset, _, _ in pieces.tolist():
                low, high = max(start, vaddr), min(start + length, end)
                raw = _ZEROS if block == ZERO else memoryview(found[block])[offset + low - start :]
                into[low - vaddr : high - vaddr] = raw[: high - low]
        return pages

    def _blocks(self, blocks: Blocks, numbers: Sequence[int]) -> dict[int, bytes]:
        """These blocks, decoded and verified. Two threads may do the same work once in a while."""
        found = {}
        with self._lock:
            for number in numbers:
                if (raw := self._decoded.get(number)) is not None:
                    self._decoded.move_to_end(number)
                    found[number] = raw
        missing = [number for number in dict.fromkeys(numbers) if number not in found]
        if not missing:
            return found
        for number, fresh in chain.from_iterable(blocks.fetch(missing)):
            found[number] = bytes(fresh)
            self._keep(number, found[number])
        return found

    def _keep(self, number: int, raw: bytes) -> None:
        with self._lock:
            if number not in self._decoded:
                self._decoded[number] = raw
                self._decoded_bytes += len(raw)
            while self._decoded_bytes > _CACHED_BYTES:
                self._decoded_bytes -= len(self._decoded.popitem(last=False)[1])


class _Client:
    """One connection. Its thread calls `serve`; others may only look, and `hang_up`."""

    def __init__(self, connection: socket.socket, peer: str, header: struct.Struct) -> None:
        self.connection = connection
        self.peer = peer
        self.since = time.monotonic()
        self.asked = False
        self.thread: threading.Thread | None = None
        self._header = header

    def greet(self) -> None:
        """TLS's handshake. Raises OSError."""
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.settimeout(_PART_SECONDS)
            self.connection.do_handshake()
            self.connection.settimeout(None)

    def serve(self, memory: _Memory, blocks: Blocks) -> None:
        """Answers until the client has enough. Raises _BadRequest, Corrupt or OSError."""
        header = self._header
        answer = memoryview(bytearray(header.size + MAX_PAGES * PAGE))
        while request := self._receive():
            command, pages, vaddr, pid = header.unpack(request)
            command &= _COMMAND
            if command in (_CLOSE, _FORCE_CLOSE):
                self._part()
                return
            if command != _GET:
                raise self._malformed(f"it sent command {command}")
            if not pages or vaddr % PAGE:
                raise self._malformed(f"it asked for {pages} pages at {vaddr:#x}")
            self.asked = True
            wanted = min(pages, MAX_PAGES) * PAGE
            into = answer[header.size : header.size + wanted]
            found = memory.copy(blocks, pid, vaddr, into)
            header.pack_into(answer, 0, _ANSWER, found, vaddr, pid)
            self._send(answer[: header.size + found * PAGE])

    def hang_up(self) -> None:
        """Wakes the thread, whatever it waits for; nothing goes out any more."""
        with suppress(OSError):
            # Not SSLSocket.shutdown(), which goes on in the clear with what is left to send.
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)

    def _receive(self) -> bytes:
        """The next header; nothing at the end of the connection."""
        content = self.connection.recv(self._header.size)  # however long it takes
        if not content or len(content) == self._header.size:
            return content
        deadline = time.monotonic() + _PART_SECONDS
        while len(content) < self._header.size:
            self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                more = self.connection.recv(self._header.size - len(content))
            except TimeoutError:
                more = b""
            if not more:
                raise self._malformed(f"it sent {len(content)} bytes of a header")
            content += more
        self.connection.settimeout(None)
        return content

    def _send(self, answer: memoryview) -> None:
        if isinstance(self.connection, ssl.SSLSocket):
            # In a record of its own. CRIU waits for its socket after each part that it has read,
            # and what it has decrypted beyond that part would never wake it.
            self.connection.sendall(answer[: self._header.size])
            answer = answer[self._header.size :]
        self.connection.sendall(answer)

    def _part(self) -> None:
        """Tells the client that all is well, and lets it close the connection first."""
        self.connection.sendall(_STATUS)
        self.connection.settimeout(_PART_SECONDS)
        with suppress(OSError):
            if isinstance(self.connection, ssl.SSLSocket):
                self.connection.unwrap()
            else:
                self.connection.recv(1)

    def _malformed(self, what: str) -> _BadRequest:
        size = self._header.size
        other = "up to 4.1" if size == 24 else "from 4.2 on"
        return _BadRequest(f"{what}; {size}-byte headers are those of CRIU {other} (see --header)")


class PageServer:
    """Serves one image on a socket that listens, from `start` to `close`."""

    def __init__(
        self,
        image: StoredImage,
        memories: Sequence[Memory],
        listener: socket.socket,
        *,
        header: int,
        log: Log,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`memories` are all of the image's, `header` is a length in bytes out of HEADERS."""
        self.address = _shown(listener.getsockname())
        self._source = image.source
        self._memory = _Memory(memories)
        self._listener = listener
        self._header = HEADERS[header]
        self._log = log
        self._tls = tls
        self._clients: set[_Client] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="accept")

    def __enter__(self) -> "PageServer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """From here on clients are answered."""
        self._acceptor.start()

    def close(self) -> None:
        """Ends all connections and threads, at once, and closes the listener."""
        self._stopping.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
            for client in clients:
                client.hang_up()
        for client in clients:
            if client.thread is not None:
                client.thread.join()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._stopping.wait(_EXHAUSTED_SECONDS):
                    self._log(f"cannot accept a connection ({error})")
                continue
            try:
                self._welcome(connection, _shown(address))
            except (OSError, RuntimeError) as error:  # gone already; or no thread to be had
                connection.close()
                self._log(f"{_shown(address)}: refused ({error})")

    def _welcome(self, connection: socket.socket, peer: str) -> None:
        if not self._has_room():
            raise OSError(f"{MAX_CLIENTS} clients are connected")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        if self._tls is not None:
            # The handshake is left to the thread.
            connection = self._tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        client = _Client(connection, peer, self._header)
        client.thread = threading.Thread(target=self._run, args=(client,), name="pages")
        with self._lock:
            self._clients.add(client)
        try:
            client.thread.start()
        except RuntimeError:
            self._forget(client)
            raise

    def _has_room(self) -> bool:
        """Whether another client can be served; sends off one that only blocks the place."""
        with self._lock:
            if len(self._clients) < MAX_CLIENTS:
                return True
            silent = [client for client in self._clients if not client.asked]
            oldest = min(silent, key=lambda client: client.since, default=None)
            if oldest is None or time.monotonic() - oldest.since < _SILENT_SECONDS:
                return False
            oldest.hang_up()
            oldest.since = time.monotonic()  # not again for the next one
            self._log(f"{oldest.peer}: closed, as it never asked for anything")
            return True

    def _run(self, client: _Client) -> None:
        try:
            client.greet()
            with closing(self._source.open()) as blocks:
                client.serve(self._memory, blocks)
        except (_BadRequest, IcefloeError, OSError) as error:
            self._complain(client, str(error))
        except Exception as error:  # a bug: the other clients go on
            self._complain(client, f"unexpected {type(error).__name__}: {error}")
        finally:
            self._forget(client)

    def _complain(self, client: _Client, reason: str) -> None:
        if not self._stopping.is_set():
            self._log(f"{client.peer}: closed ({reason})")

    def _forget(self, client: _Client) -> None:
        with self._lock:  # nobody may hang up on a descriptor that is another's by then
            self._clients.discard(client)
            client.connection.close()


def tls_context(certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    """TLS as CRIU's own server does it: clients must show a certificate of the authority.

    All three are PEM files. Raises UsageError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    # Tickets come after the handshake, and CRIU aborts on bytes that it hasn't asked for.
    context.num_tickets = 0
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key, password=lambda: "")  # else it would ask for one
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UsageError(
            f"cannot use {certificate}, {key} and {authority} ({error})",
            "name PEM files: a certificate, its key without a password, the clients' authority",
        ) from None
    return context


def _shown(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"
