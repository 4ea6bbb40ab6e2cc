"""A process whose memory is filled from outside, and which does what it is told meanwhile.

Run as a script it is that process: it maps memory, registers it with userfaultfd as a process
does that CRIU restores, and answers orders. Imported, it starts such a process. Faults must not
happen in the process that fills: a Python thread that waits for a page keeps the others waiting.
"""

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

PAGE = 4096
API, REGISTER = 0xC018AA3F, 0xC020AA00
SYSCALLS = {"x86_64": 323, "aarch64": 282}
FEATURES = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6
MODE_MISSING = 1
MAYMOVE, FIXED = 1, 2

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Puppet:
    """A running process. `address` is where its memory is, `fd` its userfaultfd (-1: sent on)."""

    def __init__(self, pages: int, register: bool = True) -> None:
        self._ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(pages), str(int(register))],
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        message, fds, _, _ = socket.recv_fds(self._ours, 64, 1)
        self.fd, self.address = fds[0], int(message)
        self._lines = self._ours.makefile("rw")

    def __enter__(self) -> "Puppet":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        with suppress(OSError, ValueError):  # an order that was not taken any more
            self._lines.close()
        os.close(self.fd) if self.fd >= 0 else None

    def kill(self) -> None:
        """Ends it. The descriptor stays open."""
        self._process.kill()
        self._process.wait()
        self._ours.close()

    def tell(self, order: str, *numbers: int) -> None:
        """An order whose answer is fetched later."""
        self._lines.write(json.dumps([order, *numbers]) + "\n")
        self._lines.flush()

    def answered(self) -> bool:
        """Whether an answer can be fetched."""
        return bool(select.select([self._ours], [], [], 0)[0])

    def answer(self, seconds: float = 20.0) -> Any:
        """The answer to the oldest order."""
        self._ours.settimeout(seconds)
        return json.loads(self._lines.readline())

    def ask(self, order: str, *numbers: int) -> Any:
        """An order and its answer. `read PAGE COUNT`: a digest of each page; `fork_read`: the
        same in a child; `write PAGE`; `discard PAGE COUNT`, `unmap PAGE COUNT`; `move PAGE COUNT`:
        to elsewhere, the address is the answer; `split PAGE COUNT`: the kernel takes it for an area
        of its own; `register`: what CRIU does late; `forks COUNT`: children that end at once.
        `fork`: a child that stays, its number is the answer; `child_ORDER NUMBER ...`: it obeys."""
        self.tell(order, *numbers)
        return self.answer()


def digest(content: bytes) -> str:
    """What `read` says of a page."""
    return hashlib.sha256(content).hexdigest()


class Strings:
    """What the puppet hangs on: its memory. Pages keep their numbers when they move."""

    def __init__(self, pages: int) -> None:
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.start = int(libc.mmap(None, pages * PAGE, 3, anonymous, -1, 0))
        self.length = pages * PAGE
        self.children: list[Any] = []
        self.places = {page: self.start + page * PAGE for page in range(pages)}
        self.uffd = libc.syscall(SYSCALLS[os.uname().machine], os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.ioctl(self.uffd, API, bytearray(struct.pack("<QQQ", 0xAA, FEATURES, 0)))

    def register(self) -> None:
        """From now on, missing pages are asked for."""
        argument = struct.pack("<QQQQ", self.start, self.length, MODE_MISSING, 0)
        fcntl.ioctl(self.uffd, REGISTER, bytearray(argument))

    def obey(self, order: str, numbers: list[int]) -> Any:
        """Does what it is told."""
        if order == "register":
            return self.register()
        if order == "fork":
            return self.fork()
        if order == "forks":
            return [in_child(lambda: None) for _ in range(numbers[0])].clear()
        if order.startswith("child_"):
            lines = self.children[numbers[0]]
            lines.write(json.dumps([order.removeprefix("child_"), *numbers[1:]]) + "\n")
            lines.flush()
            return json.loads(lines.readline())
        page, count = numbers[0], numbers[1] if len(numbers) > 1 else 1
        place, length = self.places[page], count * PAGE
        if order == "read":
            pages = range(page, page + count)
            return [digest(ctypes.string_at(self.places[each], PAGE)) for each in pages]
        if order == "fork_read":
            return in_child(lambda: self.obey("read", numbers))
        if order == "write":
            ctypes.memset(place, 0xEE, length)
        elif order == "discard":
            assert libc.madvise(place, length, mmap.MADV_DONTNEED) == 0
        elif order == "split":
            assert libc.madvise(place, length, mmap.MADV_SEQUENTIAL) == 0
        elif order == "unmap":
            assert libc.munmap(place, length) == 0
        elif order == "move":
            free = libc.mmap(None, length, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            to = libc.mremap(place, length, length, MAYMOVE | FIXED, ctypes.c_void_p(free))
            assert to == free
            self.places |= {page + i: int(to) + i * PAGE for i in range(count)}
            return int(to)
        return None

    def fork(self) -> int:
        """A child that obeys until we end."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            for lines in self.children:
                lines.close()
            ours.close()
            self.children = []
            self.listen(theirs)
            os._exit(0)
        theirs.close()
        self.children.append(ours.makefile("rw"))
        ours.close()
        return len(self.children) - 1

    def listen(self, connection: socket.socket) -> None:
        """Obeys whoever is at the other end."""
        with connection.makefile("rw") as lines:
            for line in lines:
                order, *numbers = json.loads(line)
                lines.write(json.dumps(self.obey(order, numbers)) + "\n")
                lines.flush()


def in_child(work: Any) -> Any:
    """The result of some work done in a child, which then ends."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(work()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(said)


def main(channel: int, pages: int, register: bool) -> None:
    """The process itself."""
    with socket.socket(fileno=channel) as connection:
        strings = Strings(pages)
        if register:
            strings.register()
        socket.send_fds(connection, [str(strings.start).encode()], [strings.uffd])
        os.close(strings.uffd) if register else None
        strings.listen(connection)


if __name__ == "__main__":
    assert Path(__file__).exists()
    main(int(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])))
