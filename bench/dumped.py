"""Real processes, each dumped by CRIU twice: before and after it has done some of its work.

A Python heap that grows, a redis-server some of whose keys are written anew, a PostgreSQL server
with its pgbench, a node that goes on compiling. Whatever a subject needs and this machine lacks
is said by Unavailable. The processes have ended when the folders are handed over.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedRWPair
from pathlib import Path

import numpy as np
from common import CACHE, MIB, BenchError, Unavailable, run
from subjects import criu_program, wait_for

SECONDS_BETWEEN_DUMPS = 2.0

HERE = Path(__file__).parent
REDIS_SERVER = CACHE / "redis" / "redis-server"
VALUE_BYTES = 1024
BATCH = 1000
# Shares of the keys that are written anew before each later dump, counted from the first dump.
REWRITTEN = (0.01, 0.10)

# Transactions a second: what one core can do beside everything else.
PGBENCH_RATE = 1000
# pgbench's scale: the tables take 15 MB for each.
SCALE_BYTES = 15 * MIB
# CRIU asks for the limits of processes. A root that lacks CAP_SYS_RESOURCE, as containers' roots
# do, may ask only those of its own user; PostgreSQL refuses to be root. So CRIU becomes the user
# of PostgreSQL and keeps root's other capabilities.
CAPABILITIES = "+all,-sys_resource"

POSTGRES = """
set -e
"$1/postgres" -D "$2/data" -c listen_addresses= -c unix_socket_directories="$2" \
    -c shared_buffers="$3" -c huge_pages=off -c dynamic_shared_memory_type=mmap -c fsync=off &
until "$1/pg_isready" -q -h "$2"; do sleep 0.1; done
"$1/pgbench" -h "$2" -U bench -i -q -s "$4" postgres
echo ready
exec "$1/pgbench" -h "$2" -U bench -c 2 -R "$5" -T 100000 postgres
"""


@dataclass(frozen=True)
class Pair:
    """Two dumps of one process tree."""

    name: str
    first: Path
    second: Path


def _require_criu() -> None:
    """Raise Unavailable, with the reason, where CRIU cannot dump."""
    try:
        run([criu_program(), "check"])
    except BenchError as error:
        raise Unavailable(str(error)) from error


def _dump(pid: int, folder: Path, become: Sequence[str] = ()) -> None:
    """Checkpoint a process tree and let it run on; the log stays out of the image.

    `become`: words that start CRIU as another user.
    """
    log = folder.with_suffix(".log")
    words: list[str | Path] = ["--leave-running", "--images-dir", folder, "--log-file", log]
    if become:
        words.append("--unprivileged")
    try:
        run([*become, criu_program(), "dump", "--tree", str(pid), *words])
    except BenchError as error:
        last = log.read_text().splitlines()[-1:] if log.exists() else []
        raise BenchError(f"{error} {' '.join(last)}") from error


@contextlib.contextmanager
def _running(command: Sequence[str | Path], said: Path) -> Iterator[int]:
    """Run a program that says `ready`, detached so that CRIU need not know this terminal."""
    with said.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # What io_uring holds, CRIU can't dump.
            env={**os.environ, "UV_USE_IO_URING": "0"},
        )

    def ready() -> bool:
        if process.poll() is not None:
            raise BenchError(f"`{command[0]}` ended: {' '.join(said.read_text().split()[-30:])}")
        return b"ready\n" in said.read_bytes()

    try:
        wait_for(ready, f"{command[0]} to get ready")
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _twice(name: str, command: Sequence[str | Path], work: Path) -> list[Pair]:
    """Dump a process that works by itself, and again later."""
    first, second = work / "dump-1", work / "dump-2"
    for folder in (first, second):
        folder.mkdir()
    with _running(command, work / "said") as pid:
        _dump(pid, first)
        time.sleep(SECONDS_BETWEEN_DUMPS)
        _dump(pid, second)
    return [Pair(name, first, second)]


def heap(size: int, seed: int, work: Path) -> list[Pair]:
    """A Python heap that grows and changes, 1 % each second."""
    words = ["--bytes", str(size // 4), "--seed", str(seed), "--grow"]
    return _twice("python heap", [sys.executable, HERE / "heap.py", *words], work)


def node(size: int, _seed: int, work: Path) -> list[Pair]:
    """A node that allocates and compiles."""
    program = shutil.which("node")
    if program is None:
        raise Unavailable("there is no node on this machine")
    return _twice("node", [program, HERE / "jit.js", str(size // 4)], work)


def _set_keys(path: Path, keys: Iterable[int], rng: np.random.Generator) -> None:
    """Give keys new values. Ends when the server has closed its side too: half a connection
    would stand in the way of a dump."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        with connection.makefile("rwb") as stream:
            batch: list[bytes] = []
            for key in keys:
                value = rng.bytes(VALUE_BYTES)
                head = b"*3\r\n$3\r\nSET\r\n$13\r\nkey:%09d\r\n$%d\r\n" % (key, VALUE_BYTES)
                batch.append(head + value + b"\r\n")
                if len(batch) == BATCH:
                    _send(stream, batch)
                    batch = []
            _send(stream, [*batch, b"*1\r\n$4\r\nQUIT\r\n"])
            if stream.read():
                raise BenchError("redis says more than it was asked")


def _send(stream: BufferedRWPair, batch: Sequence[bytes]) -> None:
    """Send commands that are answered by OK."""
    stream.write(b"".join(batch))
    stream.flush()
    for _ in batch:
        if stream.readline() != b"+OK\r\n":
            raise BenchError("redis refuses a command")


def redis(size: int, seed: int, work: Path) -> list[Pair]:
    """A redis-server that holds 3/10 of `size` in values, on a UNIX socket."""
    if not REDIS_SERVER.exists():
        raise Unavailable(f"there is no {REDIS_SERVER}: run `make criu`")
    rng = np.random.default_rng([seed, 7])
    keys = rng.permutation(size * 3 // 10 // VALUE_BYTES)
    folders = [work / f"dump-{number}" for number in range(len(REWRITTEN) + 1)]
    for folder in folders:
        folder.mkdir()
    # The path of a socket may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="icefloe-bench-") as place:
        path = Path(place) / "socket"
        quiet = ["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no"]
        # redis says `Ready to accept connections`; the shell says it sooner, and in our words.
        script = 'echo ready; exec "$@"'
        command: list[str | Path] = [
            "sh",
            "-c",
            script,
            "sh",
            REDIS_SERVER,
            *quiet,
            "--unixsocket",
            path,
        ]
        with _running(command, work / "said") as pid:
            wait_for(path.exists, "the socket of redis")
            _set_keys(path, range(len(keys)), rng)
            _dump(pid, folders[0])
            done = 0
            for share, folder in zip(REWRITTEN, folders[1:], strict=True):
                goal = int(len(keys) * share)
                _set_keys(path, (int(key) for key in keys[done:goal]), rng)
                _dump(pid, folder)
                done = goal
    named = zip(REWRITTEN, folders[1:], strict=True)
    return [Pair(f"redis, {share:.0%} of keys", folders[0], folder) for share, folder in named]


def _postgres_programs() -> Path:
    """The folder of PostgreSQL's programs. Raises Unavailable."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name)
    if named := shutil.which("postgres"):
        found.append(Path(named).resolve().parent)
    for folder in reversed(found):
        if all((folder / name).exists() for name in ("postgres", "initdb", "pgbench")):
            return folder
    raise Unavailable("PostgreSQL's postgres, initdb and pgbench are not on this machine")


def _user() -> pwd.struct_passwd:
    """A user for PostgreSQL, which refuses to be root."""
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise Unavailable("there is neither a user postgres nor a user nobody")


def postgres(size: int, _seed: int, work: Path) -> list[Pair]:
    """PostgreSQL and a pgbench that keeps it busy, as one tree, dumped while they work."""
    programs, user = _postgres_programs(), _user()
    if not (shutil.which("setpriv") and shutil.which("unshare")):
        raise Unavailable("setpriv and unshare of util-linux are not on this machine")
    become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    capable = [f"--inh-caps={CAPABILITIES}", f"--ambient-caps={CAPABILITIES}"]
    buffers = [f"{size // 4 // MIB}MB", str(max(1, size // 4 // SCALE_BYTES)), str(PGBENCH_RATE)]
    # The folder of the benchmark may be closed to that user.
    place = Path(tempfile.mkdtemp(prefix="icefloe-bench-"))
    try:
        folders = [place / "dump-1", place / "dump-2"]
        for folder in (place, *folders):
            folder.mkdir(exist_ok=True)
            os.chown(folder, user.pw_uid, user.pw_gid)
        words = ["--auth=trust", "--username=bench", "--no-sync"]
        run([*become, programs / "initdb", "-D", place / "data", *words], cwd=place)
        # PostgreSQL has a System V segment, which CRIU dumps only with the namespace around it.
        script: list[str | Path] = [*become, "sh", "-c", POSTGRES, "sh", programs, place, *buffers]
        with _running(["unshare", "--ipc", *script], work / "said") as pid:
            for folder in folders:
                time.sleep(SECONDS_BETWEEN_DUMPS)
                _dump(pid, folder, [*become, *capable])
        moved = [Path(shutil.move(folder, work)) for folder in folders]
        return [Pair("postgresql, pgbench", *moved)]
    finally:
        # Its processes end by themselves, a moment after the first of them.
        wait_for(lambda: _gone(place), f"{place} to become free")


def _gone(folder: Path) -> bool:
    """Remove a folder in which somebody may still write; say whether that was all."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


SUBJECTS: dict[str, Callable[[int, int, Path], list[Pair]]] = {
    "heap": heap,
    "redis": redis,
    "postgres": postgres,
    "node": node,
}


def dumped(subject: str, size: int, seed: int, work: Path) -> list[Pair]:
    """Run a subject; `size` is that of the benchmark, of which it takes a part."""
    _require_criu()
    return SUBJECTS[subject](size, seed, work)
