"""Runs commands in forked children that hit themselves, or their CRIU, at a chosen step.

A server: it loads everything once, reads orders from standard input (one JSON document a line),
forks for each, and answers when the child, its watcher and its CRIU are all gone. It has one
thread, so a fork copies nothing that must not be copied. See test_capture_crash.py for the parent.

The child is the real command line with the real CRIU. Only CUDA is not real (tests/fake_cuda.py).
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fake_cuda import FakeCuda
from processes import set_subreaper

from icefloe import cli, durable
from icefloe.capture import capture, cuda, dump, ingest, undo, written
from icefloe.capture import processes as proc
from icefloe.capture.criu import Criu
from icefloe.catalog.apply import Application
from icefloe.errors import NoSpace
from icefloe.store import writer

# What commands load when they run; a child that loads it again takes half a second.
PRELOAD = ("icefloe.config", "icefloe.capture.restore", "icefloe.gc.recompress", "rich.console")

# Small packs, so that an image of some megabytes has several of them.
PACK_BYTES = 2 << 20

# How long a command may take, and the watcher and CRIU when it has ended.
HANG_SECONDS = LINGER_SECONDS = 20.0

SCRIPT = "action"


class Steps:
    """Writes each step down, and does what is planned for it; in the captured process only.

    A plan: {"step": NAME, "number": N, "signal": S, "to": WHOM}. The first time that a step is
    made has number 1. "later": that many seconds after it; with "seized" after CRIU has got hold
    of the first process. "pause": seconds that the step takes longer then.

    WHOM: "self", "group" (of icefloe), "criu", "script" (CRIU's), "tree" (that is captured), or
    "disk", which makes a step of the store's fail.
    """

    def __init__(self, log: Path, plans: list[dict[str, Any]], root: int) -> None:
        self._root = root
        self._owner = os.getpid()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._plans = plans
        self._made: Counter[str] = Counter()
        self._lock = threading.RLock()  # a signal's handler may run in the middle of it
        self.criu = 0

    def __call__(self, name: str) -> None:
        if os.getpid() != self._owner:  # the watcher is a copy of us
            return
        with self._lock:
            self._made[name] += 1
            number = self._made[name]
            os.write(self._log, f"{name}\n".encode())
        for plan in self._plans:
            if (plan["step"], plan["number"]) == (name, number):
                if "later" in plan:
                    threading.Thread(target=self._hit_later, args=[plan], daemon=True).start()
                else:
                    self._hit(plan)

    def _hit_later(self, plan: dict[str, Any]) -> None:
        while plan.get("seized") and not self._seized():
            time.sleep(0.001)
        time.sleep(plan["later"])
        self._hit(plan)

    def _seized(self) -> bool:
        return "TracerPid:\t0\n" not in Path(f"/proc/{self._root}/status").read_text()

    def _hit(self, plan: dict[str, Any]) -> None:
        if plan["to"] == "disk":
            os.write(self._log, b"! disk\n")
            raise NoSpace(plan["step"], os.strerror(errno.ENOSPC))
        for pid in self._targets(plan["to"]):
            with suppress(ProcessLookupError):
                os.write(self._log, f"! {plan['to']}\n".encode())
                os.kill(pid, plan["signal"])
        time.sleep(plan.get("pause", 0.0))

    def _targets(self, to: str) -> list[int]:
        if to == "self":
            return [os.getpid()]
        if to == "group":
            return [-os.getpid()]
        if to == "criu":
            return [self.criu]
        if to == "tree":
            root = proc.look(self._root)
            return [process.pid for process in proc.tree(root)] if root else []
        below = [process.pid for process in proc.below(self.criu)]
        return [pid for pid in below if Path(f"/proc/{pid}/comm").read_text() == f"{SCRIPT}\n"]


def wrap(owner: Any, name: str, step: Steps, label: str) -> None:
    """A step before and one after each call of a function."""
    original: Callable[..., Any] = getattr(owner, name)

    def stepping(*args: Any, **named: Any) -> Any:
        step(label)
        result = original(*args, **named)
        step(f"{label} done")
        return result

    put(owner, name, stepping)


def put(owner: Any, name: str, other: Any) -> None:
    """In the place of what has this name."""
    setattr(owner, name, other)


def watch(step: Steps, store: Path) -> None:
    """Everything that a capture does becomes a step."""
    apart = Criu.start_apart

    def start_apart(self: Criu, *args: Any) -> Any:
        process = apart(self, *args)
        step.criu = process.pid
        step("criu started")
        return process

    put(Criu, "start_apart", start_apart)
    for owner, names in (
        (undo.Watcher, ("tell", "dismiss")),
        (dump.Dump, ("start", "let_go", "finish", "give_up", "check_alive")),
        (ingest.Ingest, ("finish", "commit", "abort")),
        (written.Written, ("take",)),
        (undo, ("kill", "_signal", "let_run")),
        (Application, ("commit",)),
    ):
        for name in names:
            wrap(owner, name, step, f"{owner.__name__.rpartition('.')[2].lower()} {name}")
    durable.hook = lambda operation, path: step(f"{operation} {kind(path, store)}")


def kind(path: Path, store: Path) -> str:
    """The part of the store that a file belongs to: those in it have names of their own."""
    return (*path.relative_to(store).parts, "store")[0]


def run(order: dict[str, Any]) -> None:
    """In the child. Never returns."""
    os.setsid()
    os.environ.update(order["environment"])
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), fd)
    step = Steps(Path(order["steps"]), order["plans"], order["root"])
    watch(step, Path(order["store"]))
    fake = FakeCuda(Path(order["cuda"]), step)
    put(cuda, "Nvidia", lambda: fake)
    put(capture, "users", fake.users)
    if "file_bytes" in order:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"], resource.RLIM_INFINITY))
    code = 99
    try:
        cli.main(["--store", order["store"], *order["arguments"]])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 98
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """How the child ended, and whether everybody else did, too."""
    # What it restores is for the parent to see to; what it leaves behind itself is not.
    set_subreaper(not order.get("restores", False))
    reader, writer_end = os.pipe()
    os.set_inheritable(writer_end, True)  # to the watcher, and to CRIU
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        run(order)
    os.close(writer_end)
    with open(os.pidfd_open(child)) as ending:
        hangs = not select.select([ending], [], [], HANG_SECONDS)[0]
    if hangs:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    ended = time.monotonic()
    gone = not hangs and bool(select.select([reader], [], [], LINGER_SECONDS)[0])
    os.close(reader)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    code = os.waitstatus_to_exitcode(status)
    lingered = time.monotonic() - ended
    return {"code": code, "gone": gone, "seconds": ended - began, "lingered": lingered}


def main() -> None:
    """Answers orders until standard input ends."""
    for module in PRELOAD:
        with suppress(ModuleNotFoundError):
            importlib.import_module(module)
    writer.PackWriter.__init__.__defaults__ = (PACK_BYTES,)
    os.umask(0o077)
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
