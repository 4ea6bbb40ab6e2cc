"""`restore`: brings a checkpointed process tree back to life.

Three doors lead into CRIU. The lazy one starts the processes before their memory is there and
brings it in meanwhile (capture/lazy_pages.py); the eager one writes CRIU a complete directory;
the stream one hands it file after file (capture/stream.py).
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from icefloe import durable
from icefloe.capture import allocator, criu, images, uffd
from icefloe.capture.blocks import StoreSource
from icefloe.capture.directory import CriuFiles, files_for_criu
from icefloe.capture.fill import Fill, Plan
from icefloe.capture.guard import Guard
from icefloe.capture.lazy_pages import LazyDoor
from icefloe.capture.memory import load_memories
from icefloe.capture.stored import StoredImage
from icefloe.catalog import LocalStore
from icefloe.errors import CriuFailed, IcefloeError, RestoreAborted
from icefloe.ids import BlockId

DoorName = Literal["lazy", "eager", "stream"]

_PSTREE = "pstree.img"

_MAX_WORKERS = 16

# How often to see whether processes have ended without a word.
_DEAD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """`criu` is a name or path, `arguments` are added to `criu restore`.

    `fill`: bring in all memory, not only what is touched. `workers`: threads, 0 for one a core.
    """

    door: DoorName = "lazy"
    criu: str = "criu"
    arguments: tuple[str, ...] = ()
    fill: bool = True
    workers: int = 0


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """Times in seconds since `started`, except for `criu_seconds` (how long CRIU ran).

    `filled_seconds` is None when memory was filled only where it was touched. `stalled_seconds`
    is how long threads waited for memory, all added up. `ended`: the process was gone before its
    memory was complete.
    """

    pid: int
    door: DoorName
    seconds_to_resume: float
    criu_seconds: float
    filled_seconds: float | None
    faults: int
    stalled_seconds: float
    memory_bytes: int
    ended: bool


def restore_image(
    store: LocalStore, image: BlockId, options: RestoreOptions, guard: Guard, started: float
) -> RestoreResult:
    """Restores an image; returns when its memory is complete or its processes have ended.

    `started` is the monotonic time that the result counts from. Raises CriuFailed, Corrupt,
    LimitReached or NoSpace; what was restored must then be killed, as the guard does.
    """
    criu.require_root()
    program = criu.find_criu(options.criu)
    if options.door == "lazy" and (reason := uffd.probe()) is not None:
        raise CriuFailed(
            f"userfaultfd can't be used here ({reason})", "restore with --eager, or allow it"
        )
    allocator.keep_freed()
    manifest = store.manifest(image)
    source = StoreSource(store, manifest)
    stored = StoredImage(manifest, source)
    with ExitStack() as stack:
        stack.callback(source.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icefloe-restore-")))
        run = _Run(program, options, folder, started)
        files = files_for_criu(stored, load_memories(stored), lazy=options.door == "lazy")
        if options.door == "lazy":
            return _restore_lazily(run, stored, files, source, store, guard)
        with durable.write_errors(folder):
            files.write(folder, options.workers)
        with run.criu() as process:
            run.finish(process)
        return run.result(faults=0, stalled=0.0, filled=run.resumed, memory=0, ended=False)


class _Run:
    """One run of `criu restore`, and when what happened."""

    def __init__(
        self, program: criu.Criu, options: RestoreOptions, folder: Path, started: float
    ) -> None:
        self.options = options
        self.folder = folder
        self.started = started
        self.resumed = 0.0
        self.launched = 0.0
        self._program = program
        self._pidfile = folder / "root.pid"
        # Not in the folder: it outlives a failure.
        self._log = Path(tempfile.gettempdir()) / f"icefloe-restore-{os.getpid()}.log"

    @contextmanager
    def criu(self, *arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
        """CRIU at work; it doesn't outlive the context."""
        self._log.unlink(missing_ok=True)
        command: list[str | Path] = ["restore", "--restore-detached", "-D", self.folder]
        command += ["-W", self.folder, "-o", self._log, "--pidfile", self._pidfile]
        with tempfile.TemporaryFile() as words:
            self._words = words
            self.launched = time.monotonic()
            process = self._program.start([*command, *arguments, *self.options.arguments], words)
            try:
                yield process
            except BaseException:
                process.kill()
                raise
            finally:
                process.wait()

    def finish(self, process: "subprocess.Popen[bytes]") -> None:
        """Waits for CRIU's end; the processes run. Raises CriuFailed."""
        if code := process.wait():
            self._words.seek(0)
            raise criu.failure("criu restore", code, self._words.read(), self._log)
        self.resumed = time.monotonic()
        self._log.unlink(missing_ok=True)

    def result(
        self, *, faults: int, stalled: float, filled: float | None, memory: int, ended: bool
    ) -> RestoreResult:
        return RestoreResult(
            pid=int(self._pidfile.read_text()),
            door=self.options.door,
            seconds_to_resume=self.resumed - self.started,
            criu_seconds=self.resumed - self.launched,
            filled_seconds=None if filled is None else filled - self.started,
            faults=faults,
            stalled_seconds=stalled,
            memory_bytes=memory,
            ended=ended,
        )


def _restore_lazily(
    run: _Run,
    stored: StoredImage,
    files: CriuFiles,
    source: StoreSource,
    store: LocalStore,
    guard: Guard,
) -> RestoreResult:
    options = run.options
    processes = images.decode_pstree(stored.read(_PSTREE), stored.path(_PSTREE))
    plan = Plan([p.pid for p in processes], files.lazy, len(stored.manifest.blocks))
    workers = min(options.workers or os.cpu_count() or 1, _MAX_WORKERS)
    fill = Fill(plan, source, plan.order() if options.fill else None, workers)
    with durable.write_errors(run.folder):
        files.write(run.folder, workers)
    door = LazyDoor(run.folder, plan, fill, guard)
    try:
        with run.criu("--lazy-pages") as process:
            try:
                door.connect(lambda: process.poll() is not None)
                door.serve(lambda: process.poll() is not None)
            except CriuFailed:
                run.finish(process)  # knows more, from the log
                raise
            run.finish(process)
        if not options.fill:
            source.pin()
            store.close()  # what is pinned stays readable, and others may write meanwhile
        _serve_until_complete(door, fill)
    except IcefloeError as error:
        raise RestoreAborted(error) if run.resumed else error from error
    finally:
        door.close()
    return run.result(
        faults=fill.faults,
        stalled=fill.stalled_seconds,
        filled=fill.filled_at if fill.filled.is_set() else None,
        memory=fill.filled_bytes,
        ended=not fill.filled.is_set(),
    )


def _serve_until_complete(door: LazyDoor, fill: Fill) -> None:
    looked = time.monotonic()

    def done() -> bool:
        nonlocal looked
        if time.monotonic() - looked > _DEAD_SECONDS:
            looked = time.monotonic()
            door.look_for_dead()
        return fill.filled.is_set() or not fill.spaces()

    door.serve(done)
