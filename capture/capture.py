"""`capture`: checkpoints a running process tree straight into the store.

The order: what can fail is tried first; CUDA is suspended; `criu dump` freezes the tree and
streams its memory into blocks (capture/incoming.py). A tree that is to run on does so as soon as
its memory has been read; one that is to end stands still until its image is durable and
committed. Whatever fails, and wherever, the tree runs on (capture/undo.py).
"""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from icefloe.capture import criu, facts, processes, scratch, suspend, undo
from icefloe.capture.cuda import Cuda, OpenCuda, users
from icefloe.capture.dump import Dump, argument_of, check_arguments, check_defaults
from icefloe.capture.images import DumpTimes
from icefloe.capture.ingest import AddResult, Ingest, IngestOptions, Progress
from icefloe.capture.interrupts import Interrupts
from icefloe.capture.parent import Parent, open_parent
from icefloe.capture.processes import Process
from icefloe.capture.undo import Doing, Watcher
from icefloe.capture.written import Written
from icefloe.catalog import LocalStore
from icefloe.errors import (
    CaptureAborted,
    CriuFailed,
    CudaFailed,
    IcefloeError,
    NoProcess,
    UsageError,
)
from icefloe.gc.recompress import recompress
from icefloe.ids import Name


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """`criu` is a name or path, `arguments` are added to `criu dump`.

    `stream`: take the files through pipes; else CRIU writes them to a folder first.
    `cuda_seconds`: how long suspending or waking CUDA may take.
    """

    pid: int
    ingest: IngestOptions
    criu: str = "criu"
    arguments: tuple[str, ...] = ()
    leave_running: bool = False
    stream: bool = True
    cuda: Literal["auto", "off"] = "auto"
    cuda_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Frozen:
    """How long the tree stood still, and what that was spent on, in seconds.

    `dump` is what CRIU took, of which `freezing`, `collecting` and `writing` are its own figures;
    `committing` is from the last byte read until the image was committed, `ending` from CRIU's end
    until the tree was gone.
    """

    seconds: float
    cuda_lock: float = 0.0
    cuda_checkpoint: float = 0.0
    dump: float = 0.0
    freezing: float = 0.0
    collecting: float = 0.0
    writing: float = 0.0
    committing: float = 0.0
    ending: float = 0.0
    cuda_resume: float = 0.0

    @property
    def cuda(self) -> float:
        """Spent in the CUDA driver."""
        return self.cuda_lock + self.cuda_checkpoint + self.cuda_resume


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """What was stored, and what it cost. `recompressed_bytes`: what the packs shrank by after."""

    added: AddResult
    processes: int
    cuda_processes: int
    frozen: Frozen
    recompressed_bytes: int
    not_recompressed: IcefloeError | None


def capture_tree(
    store: LocalStore,
    name: Name,
    labels: Mapping[str, str],
    options: CaptureOptions,
    watcher: Watcher,
    open_cuda: OpenCuda,
    progress: Progress = lambda count: None,
) -> CaptureResult:
    """Stores a process tree under a name.

    Raises NoProcess, UsageError, CriuFailed or CudaFailed before anything was touched, and
    CaptureAborted when the tree was frozen already and runs on.
    """
    root = check(options)
    program = criu.find_criu(options.criu)
    members = processes.tree(root)
    if not members:
        raise NoProcess(options.pid)
    gpu_pids = users(members) if options.cuda == "auto" else []
    cuda = open_cuda() if gpu_pids else None
    here = facts.machine_facts(program.version, cuda.facts() if cuda else None)
    needed = 0 if options.stream else sum(processes.resident_bytes(p.pid) for p in members)
    place = scratch.place(needed)
    with scratch.folder("icefloe-capture-", place) as folder:
        parent = open_parent(store, name, options.ingest.parent)
        run = _Capture(store, options, watcher, cuda, members, folder, parent, progress)
        try:
            added = run.capture(program, here, name, labels)
        finally:
            run.close()
    saved, reason = _recompress(store, run.ingest, options.ingest)
    return CaptureResult(
        added=replace(added, stored_bytes=added.stored_bytes - saved),
        processes=len(members),
        cuda_processes=len(run.cuda_pids),
        frozen=run.frozen(),
        recompressed_bytes=saved,
        not_recompressed=reason,
    )


def _recompress(
    store: LocalStore, ingest: Ingest, options: IngestOptions
) -> tuple[int, IcefloeError | None]:
    """Gives blocks that were stored in a hurry their proper codec. The image is safe either way."""
    if not ingest.hurried:
        return 0, None
    before = sum(pack.bytes for pack in store.catalog.packs())
    failed = None
    try:
        recompress(store, ingest.packs, options.policy, options.workers)
    except IcefloeError as error:
        failed = error
    return before - sum(pack.bytes for pack in store.catalog.packs()), failed


def check(options: CaptureOptions) -> Process:
    """The first process, when nothing speaks against it. For this no store is needed.

    Raises UsageError, CriuFailed or NoProcess.
    """
    check_arguments(options.arguments, options.stream)
    check_defaults(options.stream)
    criu.require_root()
    root = processes.look(options.pid)
    if root is None or root.dead or processes.is_thread(options.pid):
        raise NoProcess(options.pid)
    ancestor: Process | None = processes.look(os.getpid())
    while ancestor is not None and ancestor.pid:
        if ancestor.pid == root.pid:
            raise UsageError(
                f"icefloe itself is below process {root.pid}", "run it from outside of the tree"
            )
        ancestor = processes.look(ancestor.parent)
    return root


@dataclass(slots=True)
class _Times:
    """Moments of the monotonic clock, 0 while they have not come."""

    locking: float = 0.0
    locked: float = 0.0
    suspended: float = 0.0
    dumping: float = 0.0
    read: float = 0.0
    committed: float = 0.0
    dumped: float = 0.0
    over: float = 0.0
    """The tree runs on, or is gone."""
    criu: DumpTimes = field(default_factory=DumpTimes)


class _Capture:
    """One capture at work."""

    def __init__(
        self,
        store: LocalStore,
        options: CaptureOptions,
        watcher: Watcher,
        cuda: Cuda | None,
        members: Sequence[Process],
        folder: Path,
        parent: Parent | None,
        progress: Progress,
    ) -> None:
        # Once CRIU has written them, nobody waits for the reading of files.
        waits = options.stream or not options.leave_running
        self.ingest = Ingest(store, replace(options.ingest, hurry=waits), progress, parent)
        self.cuda_pids: tuple[int, ...] = ()
        self._options = options
        self._watcher = watcher
        self._cuda = cuda
        self._times = _Times()
        stopped = tuple(process.pid for process in members if process.stopped)
        cgroup = undo.freezer_of(argument_of("--freeze-cgroup", options.arguments))
        self._doing = Doing(members[0], stopped, (), cgroup)
        self._dump = Dump(folder)
        self._written = Written(self._dump, options.stream, options.ingest.pages, self._all_read)
        self._aside = ThreadPoolExecutor(1, "run-on")
        self._running_on: Future[None] | None = None
        self._cuda_failed: IcefloeError | None = None
        self._committing = False

    def capture(
        self, program: criu.Criu, here: dict[str, Any], name: Name, labels: Mapping[str, str]
    ) -> AddResult:
        """All of it. The tree runs on, or is gone, when this returns or raises."""
        with Interrupts() as interrupts:
            try:
                self._suspend(here)
                self._start(program)
                with interrupts.allowed():
                    self.ingest.run(self._written)
                self._written.verify()
                if self._running_on is not None:
                    self._running_on.result()
                image = self.ingest.finish(self._written.entries, here, labels)
                with interrupts.allowed():
                    pass  # the last moment
                if not self._options.leave_running:
                    self._dump.check_alive()
                self._committing = True
                added = self.ingest.commit(image, name)
            except BaseException as error:
                raise self._undo(error) from error
            self._times.committed = time.monotonic()
            if not self._options.leave_running:
                self._end()
            if self._cuda_failed is not None:
                raise self._stored_all_the_same(self._cuda_failed)
        return added

    def close(self) -> None:
        """Lets go of everything. The tree has been seen to."""
        self._written.close()
        self._aside.shutdown()
        self._dump.close()
        self._watcher.dismiss()

    def _suspend(self, here: dict[str, Any]) -> None:
        """Suspends the CUDA of all processes that have any. Raises CudaFailed."""
        if self._cuda is None:
            self._watcher.tell(self._doing)
            return
        self._times.locking = time.monotonic()
        # One that was started meanwhile is found in the next round.
        while fresh := self._not_locked(self._cuda):
            self.cuda_pids += tuple(fresh)
            self._doing = replace(self._doing, cuda=self.cuda_pids)
            self._watcher.tell(self._doing)
            suspend.lock(self._cuda, fresh)
        if self.cuda_pids:
            here["cuda"]["pids"] = [processes.inner_pid(pid) for pid in self.cuda_pids]
        else:
            here.pop("cuda", None)  # a GPU was open, and nothing ran on it
        self._times.locked = time.monotonic()
        suspend.checkpoint(self._cuda, self.cuda_pids, self._options.cuda_seconds)
        self._times.suspended = time.monotonic()

    def _not_locked(self, cuda: Cuda) -> list[int]:
        """Processes with CUDA that are not taken care of. Others may have a GPU open, too."""
        pids = users(processes.tree(self._doing.root))
        return [p for p in pids if p not in self.cuda_pids and cuda.state(p) is not None]

    def _start(self, program: criu.Criu) -> None:
        options = self._options
        after = "--leave-running" if options.leave_running else "--leave-stopped"
        through = ["--stream"] if options.stream else []
        self._times.dumping = time.monotonic()
        self._dump.start(program, options.pid, [after, *through, *options.arguments])
        self._doing = replace(self._doing, criu=processes.look(self._dump.pid))
        self._watcher.tell(self._doing)
        self._written.start()

    def _all_read(self) -> None:
        """Called when there is nothing in the frozen tree any more that has not been read."""
        self._times.read = time.monotonic()
        if self._options.leave_running:
            self._running_on = self._aside.submit(self._run_on)

    def _run_on(self) -> None:
        """Lets the tree run on. Raises CriuFailed; the image is no less whole without CUDA."""
        self._dump.let_go()
        self._times.criu = self._dump.finish()
        self._times.dumped = time.monotonic()
        try:
            self._wake()
        except IcefloeError as error:
            self._cuda_failed = error
        self._times.over = time.monotonic()

    def _wake(self) -> None:
        if self._cuda is not None:
            suspend.resume(self._cuda, self.cuda_pids, self._options.cuda_seconds)

    def _end(self) -> None:
        """Ends the tree, whose image has been committed."""
        self._doing = replace(self._doing, committed=True)
        self._watcher.tell(self._doing)
        try:
            self._dump.let_go()
            self._times.criu = self._dump.finish()
        except CriuFailed as error:
            undo.let_run(self._doing)
            self._wake()
            raise self._stored_all_the_same(error) from error
        self._times.dumped = time.monotonic()
        undo.kill(self._doing.root)
        self._times.over = time.monotonic()

    def _stored_all_the_same(self, error: IcefloeError) -> IcefloeError:
        kind = CudaFailed if isinstance(error, CudaFailed) else CriuFailed
        happened = f"{error.happened}; the image is stored all the same, {self._outcome()}"
        return kind(happened, error.advice)

    def _undo(self, error: BaseException) -> BaseException:
        """Has the tree run on; returns what there is to say."""
        self._written.close()
        reason = self._dump.give_up(error)
        self.ingest.abort()
        self._aside.shutdown()
        undo.let_run(self._doing)
        try:
            self._wake()
        except IcefloeError as failed:
            why = reason.happened if isinstance(reason, IcefloeError) else "it was interrupted"
            return CudaFailed(f"{failed.happened}, after this: {why}", failed.advice)
        # A commit that fails in its last step is found by the next command (docs/invariants.md).
        stored = "`icefloe ls` shows what was stored" if self._committing else "nothing was stored"
        outcome = f"{stored}, {self._outcome()}"
        if isinstance(reason, KeyboardInterrupt):
            return KeyboardInterrupt(outcome)
        touched = self._times.locking or self._times.dumping
        if touched and isinstance(reason, IcefloeError):
            return CaptureAborted(reason, outcome)
        return reason

    def _outcome(self) -> str:
        """What has become of the tree."""
        there = processes.tree(self._doing.root)
        return "the processes run on" if there else "the processes have ended"

    def frozen(self) -> Frozen:
        """How long the tree stood still, once it is over."""
        times, own = self._times, self._times.criu
        if times.locking:
            seconds = times.over - times.locking
        elif own.frozen:
            seconds = own.freezing + own.frozen + times.over - times.dumped
        else:
            seconds = times.over - times.dumping
        ended = not self._options.leave_running
        suspending = times.suspended - times.locking
        committing = times.committed - times.read if ended else 0.0
        last = times.over - times.dumped
        return Frozen(
            seconds=seconds,
            cuda_lock=times.locked - times.locking,
            cuda_checkpoint=times.suspended - times.locked,
            dump=seconds - suspending - committing - last,
            freezing=own.freezing,
            collecting=own.collecting,
            writing=own.writing,
            committing=committing,
            ending=last if ended else 0.0,
            cuda_resume=0.0 if ended else last,
        )
