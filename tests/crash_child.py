"""Runs commands in forked children that kill themselves at a chosen step.

A server: it loads everything once, reads orders from standard input (one JSON document a line),
forks for each, and answers with how the child ended. It never opens a store itself and has one
thread, so a fork copies nothing that must not be copied. See tests/crashing.py for the parent.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from icefloe import cli, durable
from icefloe.catalog import database
from icefloe.errors import IcefloeError
from icefloe.gc import sweep
from icefloe.store import writer
from icefloe.transfer import push

# What commands load when they run; a child that loads it again takes half a second.
PRELOAD = (
    "icefloe.capture.add",
    "icefloe.config",
    "icefloe.gc.capacity",
    "icefloe.gc.removal",
    "icefloe.transfer.folder",
    "icefloe.transfer.pull",
    "icefloe.transfer.push",
    "rich.console",
    "rich.table",
)

# Small packs, so that a small checkpoint has several of them.
PACK_BYTES = 160 << 10

# Kills nothing: the command runs to its end.
NEVER = 0

FINISHED, FAILED = 0, 70


@dataclass(slots=True)
class Recorder:
    """The hook: writes down what is on the disk for sure, counts, and kills at step `kill_at`."""

    written_down: int
    """Descriptor of the file of steps."""

    kill_at: int
    durable_catalog: Path
    steps: int = 0
    sync: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, operation: str, path: Path) -> None:
        with self.lock:
            self.steps += 1
            self._note(operation, path)
            if self.steps == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, operation: str, path: Path) -> None:
        event: dict[str, Any] = {"step": self.steps, "operation": operation, "path": str(path)}
        if operation == "fsync done":
            status = path.stat()
            event |= {"inode": status.st_ino, "length": status.st_size}
        elif operation == "fsync folder done":
            event["entries"] = {e.name: e.inode() for e in os.scandir(path)}
        elif operation == "catalog commit done" and self.sync:
            # RocksDB wrote its log and waited for the disk: this copy is what a crash leaves.
            shutil.rmtree(self.durable_catalog, ignore_errors=True)
            shutil.copytree(path, self.durable_catalog)
        os.write(self.written_down, json.dumps(event).encode() + b"\n")


def _watch_commits(recorder: Recorder) -> None:
    """The hook isn't told whether a commit of the catalog waits for the disk."""
    original = database.Database.commit

    def commit(self: database.Database, batch: database.Batch, *, sync: bool) -> None:
        recorder.sync = sync
        original(self, batch, sync=sync)

    database.Database.commit = commit  # type: ignore[method-assign]


def _make_small() -> None:
    """Several packs an image, and a change of its own for each pack that is rewritten."""
    writer.PackWriter.__init__.__defaults__ = (PACK_BYTES,)
    sweep.PACKS_AT_ONCE = 1
    push.PACK_BYTES = PACK_BYTES


def _run(order: dict[str, Any]) -> None:
    """In the child. Never returns."""
    code = FAILED
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        store = Path(order["store"])
        if order["kill_at"] != NEVER:
            steps = os.open(order["steps"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            recorder = Recorder(steps, order["kill_at"], Path(order["durable_catalog"]))
            _watch_commits(recorder)
            durable.hook = recorder
        cli.cli.main(["--store", str(store), *order["arguments"]], standalone_mode=False)
        code = FINISHED
    except IcefloeError as error:
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    """Answers orders until standard input ends."""
    for module in PRELOAD:
        importlib.import_module(module)
    _make_small()
    os.umask(0o077)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    main()
