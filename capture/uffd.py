"""userfaultfd(2): the ioctls and messages that a lazy restore needs.

Numbers and layouts: <linux/userfaultfd.h>; behaviour: ioctl_userfaultfd(2) and mm/userfaultfd.c.
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.durable import Buffer

_API = 0xC018AA3F
_WAKE = 0x8010AA02
_COPY = 0xC028AA03
_ZEROPAGE = 0xC020AA04
_API_VERSION = 0xAA

_API_ARGUMENT = struct.Struct("<QQQ")
_RANGE = struct.Struct("<QQ")
_COPY_ARGUMENT = struct.Struct("<QQQQq")
_ZERO_ARGUMENT = struct.Struct("<QQQq")

# What CRIU asks of the kernel (criu/uffd.c): events for fork, mremap, munmap and madvise.
_FEATURES = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6

PAGEFAULT, FORK, REMAP, REMOVE, UNMAP = 0x12, 0x13, 0x14, 0x15, 0x16

_MESSAGE = struct.Struct("<B7xQQQ")
# Messages are read this many at a time.
_MESSAGES = 64

Put = tuple[int, bytes]
"""An ioctl that fills memory, and its argument."""

# syscall(2) numbers by machine.
_SYSCALL = {"x86_64": 323, "aarch64": 282}


@dataclass(frozen=True, slots=True)
class Message:
    """An event. `a`, `b`, `c` are its three words: for PAGEFAULT flags and address, for FORK the
    new descriptor, for REMAP from, to, length, for REMOVE and UNMAP start and end."""

    event: int
    a: int
    b: int
    c: int

    def concerned(self) -> tuple[tuple[int, int], ...]:
        """The addresses [start, end) at which something has changed."""
        if self.event == PAGEFAULT:
            return ()
        if self.event == FORK:
            return ((0, (1 << 64) - 1),)
        if self.event == REMAP:
            return (self.a, self.a + self.c), (self.b, self.b + self.c)
        return ((self.a, self.b),)


def probe() -> str | None:
    """Why userfaultfd can't be used here as CRIU uses it, None when it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SYSCALL.get(os.uname().machine)
    if number is None:
        return f"not tried on {os.uname().machine}"
    fd = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        code = ctypes.get_errno()
        if code == errno.ENOSYS:
            return "the kernel was built without it (CONFIG_USERFAULTFD)"
        return f"{os.strerror(code)}: it takes root, or vm.unprivileged_userfaultfd=1"
    try:
        fcntl.ioctl(fd, _API, bytearray(_API_ARGUMENT.pack(_API_VERSION, _FEATURES, 0)))
    except OSError as error:
        return f"no events of fork, mremap and munmap ({error.strerror}): it takes CAP_SYS_PTRACE"
    finally:
        os.close(fd)
    return None


def copy(fd: int, address: int, source: int, length: int) -> tuple[int, int]:
    """Puts `length` bytes from our address `source` at `address`; wakes who waits for them.

    Returns how many bytes were put, and the errno that stopped it (0: all of them).
    """
    argument = bytearray(_COPY_ARGUMENT.pack(address, source, length, 0, 0))
    try:
        fcntl.ioctl(fd, _COPY, argument)
    except OSError as error:
        return _partial(_COPY_ARGUMENT.unpack(argument)[4], error.errno)
    return length, 0


def address_of(raw: Buffer) -> int:
    """Where in our memory these bytes are."""
    return int(np.frombuffer(raw, np.uint8).__array_interface__["data"][0])


def puts(
    addresses: NDArray[np.uint64], sources: NDArray[np.uint64], lengths: NDArray[np.uint64]
) -> list[Put]:
    """What `put_all` takes, one for each piece. A source of 0 stands for zeros."""
    zero = sources == 0
    table = np.zeros((len(addresses), 5), "<u8")  # that of _ZEROPAGE is shorter
    table[:, 0] = addresses
    table[:, 1], table[:, 2] = np.where(zero, lengths, sources), np.where(zero, 0, lengths)
    content, size = table.tobytes(), _COPY_ARGUMENT.size
    calls: list[int] = np.where(zero, _ZEROPAGE, _COPY).tolist()
    return [(call, content[i * size : (i + 1) * size]) for i, call in enumerate(calls)]


def put_all(fd: int, pieces: Sequence[Put]) -> int:
    """Fills pieces, one after the other; how many there were before one that fails.

    That one may have been put in part.
    """
    for count, (call, argument) in enumerate(pieces):
        try:
            fcntl.ioctl(fd, call, argument)
        except OSError:
            return count
    return len(pieces)


def zero(fd: int, address: int, length: int) -> tuple[int, int]:
    """Puts zero pages there; otherwise like `copy`."""
    argument = bytearray(_ZERO_ARGUMENT.pack(address, length, 0, 0))
    try:
        fcntl.ioctl(fd, _ZEROPAGE, argument)
    except OSError as error:
        return _partial(_ZERO_ARGUMENT.unpack(argument)[3], error.errno)
    return length, 0


def _partial(done: int, code: int | None) -> tuple[int, int]:
    """The kernel says EAGAIN when it stopped part of the way, and in `done` how far it came."""
    if done < 0:
        return 0, -done
    return done, code or errno.EIO


def wake(fd: int, address: int, length: int) -> None:
    """Lets who waits for these pages try again."""
    fcntl.ioctl(fd, _WAKE, _RANGE.pack(address, length))


def is_alive(fd: int) -> bool:
    """Whether the address space behind the descriptor still exists."""
    # Nothing is ever registered at this address; the kernel looks for the process first.
    return zero(fd, 1 << 16, 4096)[1] != errno.ESRCH


def messages(fd: int) -> Iterator[Message]:
    """The events that are waiting. Reading a FORK makes the child's descriptor ours."""
    try:
        content = os.read(fd, _MESSAGE.size * _MESSAGES)
    except BlockingIOError:
        return
    for event, a, b, c in _MESSAGE.iter_unpack(content):
        yield Message(event, a, b, c)
