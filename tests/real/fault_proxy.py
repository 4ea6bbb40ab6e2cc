"""A proxy in front of an S3 server that counts requests and does what networks and servers do.

Faults are rules: for requests of some method and key, the first `times` of them, or of each
`every` one. Requests are signed with the name of the host, so it is handed on as it came.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

Fault = Literal[
    "busy",  # 503 SlowDown
    "expired",  # 400 ExpiredToken
    "reset",  # no answer
    "lost",  # done, but the answer is lost
    "cut-request",  # the connection breaks while the client sends
    "cut",  # half of the body, and a clean end
    "reset-half",  # half of the body, and a reset
    "stall",  # no answer, and no end
    "stall-half",  # half of the body, and no end
    "stall-request",  # half of what the client sends is read, and no more
    "flip",  # one wrong byte
]

_XML = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{0}</Code><Message>{0}</Message></Error>'
_REFUSALS = {"busy": (503, "SlowDown"), "expired": (400, "ExpiredToken")}

_CHUNK = 1 << 16


class _Broken(Exception):
    """The client's connection is at its end."""


@dataclass
class Rule:
    """What happens to requests whose line matches; `times` runs down, `seen` counts them."""

    fault: Fault
    pattern: re.Pattern[str]
    times: int
    every: int
    seen: int = 0

    def hits(self, request: str) -> bool:
        """Whether this request fails."""
        if not self.times or not self.pattern.search(request):
            return False
        self.seen += 1
        if self.seen % self.every:
            return False
        self.times -= 1
        return True


@dataclass
class FaultProxy:
    """See `fault_proxy`."""

    upstream: tuple[str, int]
    delay: float = 0.0
    """Seconds that each answer is late."""
    requests: list[str] = field(default_factory=list, repr=False)
    """METHOD PATH of each."""
    sent_bytes: int = 0
    received_bytes: int = 0
    _rules: list[Rule] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _listener: socket.socket | None = None
    _open: set[socket.socket] = field(default_factory=set)
    _port: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        """What clients are told."""
        return f"http://127.0.0.1:{self._port}"

    def fail(self, fault: Fault, pattern: str, times: int = 1, every: int = 1) -> None:
        """The next requests whose `METHOD PATH` this matches (re.search), or each `every` one."""
        with self._lock:
            self._rules.append(Rule(fault, re.compile(pattern), times, every))

    def heal(self) -> None:
        """No faults any more."""
        with self._lock:
            self._rules.clear()

    def count(self, pattern: str = "") -> int:
        """How many requests there were whose `METHOD PATH` this matches."""
        with self._lock:
            return sum(re.search(pattern, request) is not None for request in self.requests)

    def start(self) -> None:
        """Listens, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=128)
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def vanish(self) -> None:
        """Nobody is there: connections break, new ones are refused. `start` ends it."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _reset(connection)

    def close(self) -> None:
        """Ends everything."""
        self._ended.set()
        self.vanish()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                with self._lock:
                    self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as reader:
                while self._one(connection, reader.readline, reader.read):
                    pass
        except (OSError, ValueError, _Broken):
            pass
        finally:
            with self._lock:
                self._open.discard(connection)

    def _one(
        self,
        connection: socket.socket,
        readline: Callable[[], bytes],
        read: Callable[[int], bytes],
    ) -> bool:
        """One request. False when the client is gone."""
        head = _head(readline)
        if not head:
            return False
        method, path = head[0].decode().split(" ")[:2]
        fault = self._note(f"{method} {path}")
        length = _length(head)
        if fault == "cut-request":
            read(length // 2)
            raise self._broken(connection)
        if fault == "stall-request":
            read(length // 2)
            self._ended.wait(60)
            raise self._broken(connection)
        body = read(length)
        with self._lock:
            self.sent_bytes += length
        if fault in _REFUSALS:
            status, code = _REFUSALS[fault]
            content = _XML.format(code).encode()
            lines = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n"
            connection.sendall(f"{lines}Content-Type: application/xml\r\n\r\n".encode() + content)
            return True
        if fault == "reset":
            raise self._broken(connection)
        if fault == "stall":
            self._ended.wait(60)
            raise self._broken(connection)
        answer, content = self._ask(head, body, method)
        time.sleep(self.delay)
        if fault == "lost":
            raise self._broken(connection)
        self._answer(connection, answer, content, fault)
        return True

    def _note(self, request: str) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.hits(request):
                    return rule.fault
        return None

    def _broken(self, connection: socket.socket) -> _Broken:
        _reset(connection)
        return _Broken()

    def _ask(self, head: list[bytes], body: bytes, method: str) -> tuple[list[bytes], bytes]:
        """What the server says."""
        kept = [line for line in head if not line.lower().startswith((b"expect:", b"connection:"))]
        with socket.create_connection(self.upstream) as server, server.makefile("rb") as reader:
            server.sendall(b"".join([*kept, b"Connection: close\r\n\r\n"]))
            server.sendall(body)
            answer = _head(reader.readline)
            content = b"" if method == "HEAD" else reader.read()
        return answer, content

    def _answer(
        self, connection: socket.socket, head: list[bytes], content: bytes, fault: Fault | None
    ) -> None:
        kept = [line for line in head if not line.lower().startswith(b"connection:")]
        if any(line.lower().startswith(b"transfer-encoding:") for line in kept):
            content = _unchunked(content)
            kept = [line for line in kept if not line.lower().startswith(b"transfer-encoding:")]
            kept.append(f"Content-Length: {len(content)}\r\n".encode())
        connection.sendall(b"".join([*kept, b"\r\n"]))
        if fault == "flip" and content:
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        if fault in ("cut", "reset-half", "stall-half"):
            content = content[: len(content) // 2]
        for start in range(0, len(content), _CHUNK):
            connection.sendall(content[start : start + _CHUNK])
        with self._lock:
            self.received_bytes += len(content)
        if fault == "stall-half":
            self._ended.wait(60)
        if fault in ("reset-half", "stall-half"):
            raise self._broken(connection)
        if fault == "cut":
            connection.shutdown(socket.SHUT_RDWR)
            raise _Broken


def _head(readline: Callable[[], bytes]) -> list[bytes]:
    lines = []
    while (line := readline()) not in (b"\r\n", b"\n", b""):
        lines.append(line)
    return lines


def _length(head: list[bytes]) -> int:
    for line in head:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _unchunked(content: bytes) -> bytes:
    parts = []
    while content:
        size, _, content = content.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        parts.append(content[:length])
        content = content[length + 2 :]
    return b"".join(parts)


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()


@contextmanager
def fault_proxy(host: str) -> Iterator[FaultProxy]:
    """A proxy in front of HOST:PORT."""
    name, _, port = host.rpartition(":")
    proxy = FaultProxy((name, int(port)))
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
