"""`restore`: brings a checkpointed process tree back to life.

Three doors lead into CRIU. The lazy one starts the processes before their memory is there and
brings it in meanwhile (capture/lazy_pages.py); the eager one writes CRIU a complete directory;
the stream one hands it file after file (capture/stream.py).
"""

import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from icefloe import allocator, durable
from icefloe.capture import criu, fit, gate, images, scratch, tracing, uffd
from icefloe.capture.blocks import ImageSource, StoreSource
from icefloe.capture.cuda import OpenCuda
from icefloe.capture.directory import CriuFiles, files_for_criu
from icefloe.capture.fill import Fill
from icefloe.capture.fit import Mismatch
from icefloe.capture.guard import Guard
from icefloe.capture.images import Columns
from icefloe.capture.lazy_pages import LazyDoor
from icefloe.capture.memory import Memory, load_memories
from icefloe.capture.plan import Plan
from icefloe.capture.stored import StoredImage
from icefloe.capture.stream import StreamDoor
from icefloe.capture.waking import Waking
from icefloe.catalog import LocalStore
from icefloe.errors import CriuFailed, IcefloeError, RestoreAborted
from icefloe.ids import BlockId, IdPrefix, Name
from icefloe.store.layout import Layout
from icefloe.store.manifest import Manifest
from icefloe.store.trace import EMPTY, Trace
from icefloe.workers import worker_count

DoorName = Literal["lazy", "eager", "stream"]

_PSTREE = "pstree.img"

# How often to see whether processes have ended without a word.
_DEAD_SECONDS = 1.0

# How long CRIU may take to end after it has given up. A process that waits for memory may keep it.
_GIVING_UP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """`criu` is a name or path, `arguments` are added to `criu restore`.

    `lineage` names the trace that is replayed and added to; without a `door`, it decides.
    `fill`: bring in all memory, not only what is touched. `workers`: threads, 0 for one a core.
    `expected`: labels that the image must have. `ignore_incompatible`: try it all the same.
    `cuda_seconds`: how long waking CUDA may take.
    """

    lineage: str
    door: DoorName | None = None
    criu: str = "criu"
    arguments: tuple[str, ...] = ()
    fill: bool = True
    workers: int = 0
    expected: Mapping[str, str] = field(default_factory=dict)
    ignore_incompatible: bool = False
    cuda_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """Times in seconds since `started`, except for `criu_seconds` (how long CRIU ran) and
    `cuda_seconds` (how long waking CUDA took; memory was filled meanwhile).

    `filled_seconds` is None when memory was filled only where it was touched. `stalled_seconds`
    is how long any thread was waiting for memory. `faults_avoided`: memory that the trace said
    would be touched and that was there before it was. `ended`: the process was gone before its
    memory was complete.
    """

    pid: int
    door: DoorName
    seconds_to_resume: float
    criu_seconds: float
    cuda_seconds: float
    filled_seconds: float | None
    faults: int = 0
    faults_avoided: int = 0
    stalled_seconds: float = 0.0
    memory_bytes: int = 0
    ended: bool = False
    differences: tuple[Mismatch, ...] = ()


def restore_image(
    store: LocalStore,
    image: BlockId,
    options: RestoreOptions,
    guard: Guard,
    started: float,
    open_cuda: OpenCuda,
) -> RestoreResult:
    """Restores an image of the store. See `restore_from`."""
    manifest = store.manifest(image)
    source = StoreSource(store, manifest)
    return restore_from(source, store.layout, manifest, options, guard, started, open_cuda)


def restore_from(
    source: ImageSource,
    layout: Layout,
    manifest: Manifest,
    options: RestoreOptions,
    guard: Guard,
    started: float,
    open_cuda: OpenCuda,
) -> RestoreResult:
    """Restores an image; returns when its memory is complete or its processes have ended.

    `started` is the monotonic time that the result counts from; `layout` is the store with the
    traces. Raises Incompatible before anything was done; CriuFailed, CudaFailed, Corrupt,
    LimitReached, NoSpace, or what the source raises; what was restored must then be killed, as the
    guard does. Closes the source.
    """
    criu.require_root()
    program = criu.find_criu(options.criu)
    verdict = gate.judge(manifest, program, options.expected, open_cuda)
    if not options.ignore_incompatible:
        fit.require(verdict.mismatches)
    waking = Waking(verdict.cuda, gate.cuda_pids(manifest), options.cuda_seconds, verdict.moves)
    allocator.keep_freed()
    trace = tracing.load(layout, options.lineage)
    door = options.door or tracing.choose_door(trace)
    if door == "lazy" and (reason := uffd.probe()) is not None:
        raise CriuFailed(
            f"userfaultfd can't be used here ({reason})", "restore with --eager, or allow it"
        )
    stored = StoredImage(manifest, source)
    memories = load_memories(stored)
    files = files_for_criu(stored, memories, lazy=door == "lazy")
    with ExitStack() as stack:
        stack.callback(source.close)
        place = scratch.place(files.total_bytes if door == "eager" else 0)
        folder = stack.enter_context(scratch.folder("icefloe-restore-", place))
        run = _Run(program, options, door, folder, started, waking)
        run.differences = verdict.mismatches
        if door == "lazy":
            return _restore_lazily(run, memories, files, source, layout, guard, trace)
        if door == "stream":
            _restore_streaming(run, files)
        else:
            _restore_eagerly(run, files)
        run.wake()
    row = tracing.run_row(
        door,
        replayed=False,
        resumed=run.resumed - started,
        filled=run.resumed - started,
        stalled=0.0,
        faults=0,
    )
    tracing.record(layout, options.lineage, None, EMPTY.touches, row)
    return run.result(run.resumed)


def _restore_eagerly(run: "_Run", files: CriuFiles) -> None:
    with durable.write_errors(run.folder):
        files.write(run.folder, run.options.workers)
    with run.criu() as process:
        run.finish(process)


def _restore_streaming(run: "_Run", files: CriuFiles) -> None:
    door = StreamDoor(run.folder, files)
    try:
        with run.criu("--stream") as process:
            with run.blaming(process):
                door.serve(lambda: process.poll() is not None)
            run.finish(process)
    except CriuFailed as error:
        door.close(_GIVING_UP_SECONDS)
        raise door.failure or error from error
    door.close()
    if door.failure is not None:
        raise RestoreAborted(door.failure)


def lineage_of(store: LocalStore, image: BlockId, reference: Name | IdPrefix) -> str:
    """The lineage that an image belongs to: its name without the tag."""
    if isinstance(reference, Name):
        return reference.name
    names = store.catalog.names_of(image)
    return names[0].partition(":")[0] if names else image.hex()


class _Run:
    """One run of `criu restore`, and when what happened."""

    def __init__(
        self,
        program: criu.Criu,
        options: RestoreOptions,
        door: DoorName,
        folder: Path,
        started: float,
        waking: Waking,
    ) -> None:
        self.options = options
        self.waking = waking
        self.differences: tuple[Mismatch, ...] = ()
        self.door = door
        self.folder = folder
        self.started = started
        self.resumed = 0.0
        self.launched = 0.0
        self.pid = 0
        self._program = program
        self._pidfile = folder / "root.pid"
        self._log = folder / "restore.log"

    @contextmanager
    def criu(self, *arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
        """CRIU at work; it doesn't outlive the context."""
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

    @contextmanager
    def blaming(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        """A CriuFailed from within becomes what CRIU itself says, if it ends as well."""
        try:
            yield
        except CriuFailed:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GIVING_UP_SECONDS)
                self.finish(process)
            raise

    def finish(self, process: "subprocess.Popen[bytes]") -> None:
        """Waits for CRIU's end; the processes run. Raises CriuFailed."""
        if code := process.wait():
            self._words.seek(0)
            raise criu.failure("criu restore", code, self._words.read(), self._log)
        self.resumed = time.monotonic()
        self.pid = int(self._pidfile.read_text())
        self.waking.start(self.pid)

    def wake(self) -> None:
        """Waits until CUDA is awake. Raises RestoreAborted."""
        try:
            self.waking.finish()
        except IcefloeError as error:
            raise RestoreAborted(error) from error

    def result(self, filled: float | None) -> RestoreResult:
        """What came of it; memory was complete at `filled`."""
        return RestoreResult(
            pid=self.pid,
            door=self.door,
            seconds_to_resume=self.resumed + self.waking.seconds - self.started,
            criu_seconds=self.resumed - self.launched,
            cuda_seconds=self.waking.seconds,
            filled_seconds=None if filled is None else filled - self.started,
            differences=self.differences,
        )


def _restore_lazily(
    run: _Run,
    memories: list[Memory],
    files: CriuFiles,
    source: ImageSource,
    layout: Layout,
    guard: Guard,
    trace: Trace,
) -> RestoreResult:
    options, stored = run.options, files.image
    processes = images.decode_pstree(stored.read(_PSTREE), stored.path(_PSTREE))
    plan = Plan([p.pid for p in processes], files.lazy, len(stored.manifest.blocks))
    regions = tracing.regions_of(memories, plan.tasks)
    first = tracing.units_of(trace, regions, plan)
    workers = worker_count(options.workers)
    # Where nothing is filled ahead, faults are all there is to do.
    order, servers = (plan.order(first), source.servers) if options.fill else (None, workers)
    fill = Fill(plan, source, order, servers)
    with durable.write_errors(run.folder):
        files.write(run.folder, workers)
    door = LazyDoor(run.folder, plan, fill, guard)
    try:
        with run.criu("--lazy-pages") as process:
            if options.fill:  # while CRIU gets going
                fill.fill_by(source.fillers(workers), source.locate)
            with run.blaming(process):
                door.connect(lambda: process.poll() is not None)
                door.serve(lambda: process.poll() is not None)
            run.finish(process)
        if not options.fill:
            source.let_go()
        _serve_until_complete(door, fill, run.waking)
        door.let_go()
        run.waking.finish()
    except BaseException as error:
        source.give_up()
        if isinstance(error, IcefloeError) and run.resumed:
            raise RestoreAborted(error) from error
        raise
    finally:
        door.close()
    complete = fill.filled.is_set()
    result = replace(
        run.result(fill.filled_at if complete else None),
        faults=fill.faults,
        faults_avoided=len(first) - fill.touched_among(first) if options.fill else 0,
        stalled_seconds=fill.stalled_seconds,
        memory_bytes=fill.filled_bytes,
        ended=not complete,
    )
    touches = tracing.touches_of(fill.touches, regions)
    tracing.record(layout, options.lineage, regions, touches, _row(result, len(first)))
    return result


def _row(result: RestoreResult, replayed: int) -> Columns:
    """A lazy restore for the trace. One that wasn't filled says nothing about doors."""
    if result.filled_seconds is None:
        return EMPTY.runs
    return tracing.run_row(
        result.door,
        replayed=bool(replayed),
        resumed=result.seconds_to_resume,
        filled=result.filled_seconds,
        stalled=result.stalled_seconds,
        faults=result.faults,
    )


def _serve_until_complete(door: LazyDoor, fill: Fill, waking: Waking) -> None:
    looked = time.monotonic()

    def done() -> bool:
        nonlocal looked
        if time.monotonic() - looked > _DEAD_SECONDS:
            looked = time.monotonic()
            door.look_for_dead()
        waking.check()
        return fill.filled.is_set() or not fill.spaces()

    door.serve(done)
