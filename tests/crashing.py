"""Kills commands at every step, takes away what was not on the disk yet, and looks at the rest.

The idea is LevelDB's (db/fault_injection_test.cc): write down what was synced, and after the
crash throw everything else away. What a file system may keep of it anyway differs, so there are
several kinds of `Loss`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import crash_child
import small_store
from small_store import Tree

from icefloe.catalog import LocalStore, open_store
from icefloe.ids import BlockId


class Loss(Enum):
    """What a crash takes with it."""

    NOTHING = "the process is killed, the machine runs on"
    UNSYNCED = "power fails, and nothing is left that nobody waited for"
    HALF = "power fails; new names are there, of unsynced bytes the first half"
    CATALOG = "the process is killed, and the catalog's folder is lost"


_SERVERS = min(os.cpu_count() or 1, 4)


class Server:
    """The process that forks the children; see tests/crash_child.py."""

    def __init__(self) -> None:
        environment = os.environ | {
            "OPENBLAS_NUM_THREADS": "1",
            "ICEFLOE_STORE_WORKERS": "1",
            "XDG_CONFIG_HOME": "/nonexistent",
        }
        self._process = subprocess.Popen(
            [sys.executable, crash_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, order: Mapping[str, object]) -> int:
        """The exit code of the child that carried the order out; -9 when it was killed."""
        requests, answers = self._streams()
        requests.write(json.dumps(order) + "\n")
        requests.flush()
        return int(json.loads(answers.readline()))

    def run(self, store: Path, arguments: Sequence[str]) -> int:
        """The exit code of a command that nothing gets in the way of."""
        order = {"store": str(store), "arguments": list(arguments), "kill_at": crash_child.NEVER}
        return self.ask(order)

    def close(self) -> None:
        """Ends it."""
        for stream in self._streams():
            stream.close()
        self._process.wait()

    def _streams(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin and self._process.stdout
        return self._process.stdin, self._process.stdout


@contextmanager
def fast_folder() -> Iterator[Path]:
    """In memory where there is some: hundreds of copies of a store, and thousands of syncs."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="icefloe-", dir=parent) as folder:
        yield Path(folder)


class Servers:
    """Several of them: a crash and what comes after it are mostly waiting for one process."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[Server] = SimpleQueue()
        self._all = [Server() for _ in range(_SERVERS)]
        for one in self._all:
            self._idle.put(one)
        self.pool = ThreadPoolExecutor(_SERVERS)

    @contextmanager
    def one(self) -> Iterator[Server]:
        """A server that nobody else talks to meanwhile."""
        server = self._idle.get()
        try:
            yield server
        finally:
            self._idle.put(server)

    def close(self) -> None:
        """Ends them."""
        self.pool.shutdown(cancel_futures=True)
        for one in self._all:
            one.close()


@contextmanager
def servers() -> Iterator[Servers]:
    """Servers that end with the block."""
    started = Servers()
    try:
        yield started
    finally:
        started.close()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is on the disk: folders and files by inode, and how many bytes of each file."""

    entries: dict[str, dict[str, int]]
    lengths: dict[int, int]

    @classmethod
    def take(cls, root: Path) -> "Snapshot":
        """Of everything but the catalog, which is kept or lost as a whole."""
        entries: dict[str, dict[str, int]] = {}
        lengths: dict[int, int] = {}
        for folder in _folders(root):
            inside = list(os.scandir(folder))
            entries[str(folder)] = {entry.name: entry.inode() for entry in inside}
            lengths |= {e.inode(): e.stat().st_size for e in inside if e.is_file()}
        return cls(entries, lengths)


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    packs = root / "packs"
    shards = [path for path in packs.iterdir() if path.is_dir()] if packs.is_dir() else []
    return [path for path in (root, packs, root / "staging", *shards) if path.is_dir()]


@dataclass(frozen=True, slots=True)
class Crash:
    """One command that was killed, or not: `killed` is False when it finished before."""

    killed: bool
    steps: int
    last: str
    """The operation at which it was killed, and its file."""

    ends_a_step: bool


class Scene:
    """A copy of a prepared store, in a folder of its own, for one crash."""

    def __init__(self, prepared: Path, folder: Path, server: Server) -> None:
        self._prepared = prepared
        self._folder = folder
        self._server = server
        self.store = folder / "store"
        self._steps = folder / "steps"
        self._durable_catalog = folder / "durable-catalog"

    def crash(self, arguments: Sequence[str], kill_at: int, loss: Loss) -> Crash:
        """Runs a command on the copy, up to step `kill_at`. Once."""
        self._folder.mkdir()
        if self._prepared.exists():
            shutil.copytree(self._prepared, self.store)
            shutil.copytree(self._prepared / "catalog", self._durable_catalog)
        before = Snapshot.take(self.store)
        code = self._server.ask(
            {
                "store": str(self.store),
                "arguments": list(arguments),
                "kill_at": kill_at,
                "steps": str(self._steps),
                "durable_catalog": str(self._durable_catalog),
            }
        )
        assert code in (-signal.SIGKILL, crash_child.FINISHED), f"the command ended with {code}"
        events = [json.loads(line) for line in self._steps.read_text().splitlines()]
        if code == crash_child.FINISHED:
            return Crash(False, len(events), "", False)
        operation = events[-1]["operation"]
        self._lose(before, events, loss)
        place = Path(events[-1]["path"])
        inside = place.relative_to(self.store) if place.is_relative_to(self.store) else place
        return Crash(True, len(events), f"{operation} {inside}", operation.endswith(" done"))

    def clear(self) -> None:
        """Removes the copy."""
        shutil.rmtree(self._folder)

    def _lose(self, before: Snapshot, events: Sequence[dict[str, Any]], loss: Loss) -> None:
        if loss is Loss.CATALOG:
            shutil.rmtree(self.store / "catalog", ignore_errors=True)
        elif loss is Loss.HALF:
            _cut_files(self.store, _synced(before, events), keep=0.5)
        elif loss is Loss.UNSYNCED:
            synced = _synced(before, events)
            _cut_files(self.store, synced, keep=0.0)
            self._undo_names(synced)
            shutil.rmtree(self.store / "catalog", ignore_errors=True)
            if self._durable_catalog.exists() and self.store.exists():
                shutil.copytree(self._durable_catalog, self.store / "catalog")

    def _undo_names(self, synced: Snapshot) -> None:
        """New names that no sync of their folder made last go, removed ones come back."""
        for folder in _folders(self.store):
            if not folder.exists():
                continue  # went with the folder above it
            kept = synced.entries.get(str(folder), {})
            for entry in list(os.scandir(folder)):
                if kept.get(entry.name) == entry.inode() or entry.name == "catalog":
                    continue
                remove = shutil.rmtree if entry.is_dir() else os.unlink
                remove(entry.path)
            for name in kept.keys() - set(os.listdir(folder)):
                source = self._prepared / folder.relative_to(self.store) / name
                if source.is_file():
                    shutil.copy2(source, folder / name)
        above = synced.entries.get(str(self._folder), {})
        if not self._prepared.exists() and self.store.name not in above:
            shutil.rmtree(self.store, ignore_errors=True)


def _synced(before: Snapshot, events: Sequence[dict[str, Any]]) -> Snapshot:
    """What was on the disk for sure after these events."""
    entries, lengths = dict(before.entries), dict(before.lengths)
    for event in events:
        if event["operation"] == "fsync done":
            lengths[event["inode"]] = event["length"]
        elif event["operation"] == "fsync folder done":
            entries[event["path"]] = event["entries"]
    return Snapshot(entries, lengths)


def _cut_files(root: Path, synced: Snapshot, keep: float) -> None:
    """Takes the given part of all bytes behind the last sync of each file."""
    for folder in _folders(root):
        for entry in os.scandir(folder):
            if not entry.is_file():
                continue
            length, certain = entry.stat().st_size, synced.lengths.get(entry.inode(), 0)
            if length > certain:
                os.truncate(entry.path, certain + int((length - certain) * keep))


@dataclass(frozen=True, slots=True)
class State:
    """What a store holds: names, and images with the bytes of their files."""

    names: dict[str, BlockId]
    images: dict[BlockId, Tree]


def state_of(store: LocalStore) -> State:
    """Exports everything."""
    images = {row.id: small_store.exported(store, row.id) for row in store.catalog.images()}
    return State(store.catalog.names(), images)


def read_state(root: Path) -> State:
    """Of a store on disk; an empty one when there is none."""
    if not (root / "format").exists():
        return State({}, {})
    with open_store(root, write=False, wait_seconds=0.0) as store:
        return state_of(store)
