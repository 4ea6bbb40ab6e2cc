"""Writes packs: staged, sealed with index and trailer, fsynced, and only then given their name.

Packs are published by a thread of their own, so that waiting for the disk and compressing the
next blocks overlap. A writer that failed once refuses everything but `abort`.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from icefloe import durable
from icefloe.durable import Buffer
from icefloe.errors import CorruptPack
from icefloe.ids import PackId
from icefloe.store import pack
from icefloe.store.layout import Layout
from icefloe.store.pack import StoredBlock

# Large enough that one object a pack suits object stores, small enough to rewrite one.
TARGET_BYTES = 64 << 20

# Sealed packs that wait for the disk; more than this and adding waits too.
_MAX_UNPUBLISHED = 4


class _Staged:
    """One pack being written."""

    def __init__(self, layout: Layout) -> None:
        self.path = layout.staging / f"{os.getpid()}-{os.urandom(8).hex()}"
        with durable.write_errors(self.path):
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.position = 0
        self._frames = pack.Frames(pack.header())
        self._write([pack.header()])

    def _write(self, pieces: Sequence[Buffer]) -> None:
        self.position += durable.write(self.fd, self.path, pieces)

    def append(self, blocks: Sequence[StoredBlock]) -> None:
        self._write(self._frames.add(blocks))
        # Every row points at the payload that was just written.
        assert self.position == self._frames.position

    def seal(self) -> PackId:
        identity, pieces = self._frames.end(self._frames.index().tobytes())
        self._write(pieces)
        return identity

    def discard(self) -> None:
        os.close(self.fd)
        self.path.unlink(missing_ok=True)


class PackWriter:
    """Appends blocks to packs of about `target_bytes`. Not for several threads at once."""

    def __init__(self, layout: Layout, target_bytes: int = TARGET_BYTES) -> None:
        self._layout = layout
        self._target = target_bytes
        self._staged: _Staged | None = None
        self._publishing: list[tuple[_Staged, Future[PackId]]] = []
        self._publisher = ThreadPoolExecutor(1, "publish")
        self._broken = False
        self.stored_bytes = 0
        """Bytes of the packs sealed so far."""

    def append(self, blocks: Sequence[StoredBlock]) -> None:
        """Adds blocks in order. Raises NoSpace or NotWritable."""
        if self._broken:
            raise RuntimeError("this writer failed before")
        self._broken = True
        for first, last in self._split(blocks):
            staged = self._staged or _Staged(self._layout)
            self._staged = staged
            staged.append(blocks[first:last])
            if staged.position >= self._target:
                self._seal()
        self._broken = False

    def _split(self, blocks: Sequence[StoredBlock]) -> list[tuple[int, int]]:
        """Cuts a batch where the pack reaches its target."""
        position = self._staged.position if self._staged else 0
        spans, first = [], 0
        for i, block in enumerate(blocks):
            position += len(block.payload)
            if position >= self._target:
                spans.append((first, i + 1))
                first, position = i + 1, 0
        return [*spans, (first, len(blocks))] if first < len(blocks) else spans

    def _seal(self) -> None:
        staged, self._staged = self._staged, None
        if staged is None:
            return
        try:
            identity = staged.seal()
        except BaseException:
            staged.discard()
            raise
        self.stored_bytes += staged.position
        waiting = [future for _, future in self._publishing if not future.done()]
        if len(waiting) >= _MAX_UNPUBLISHED:
            waiting[0].result()
        future = self._publisher.submit(self._publish, staged, identity)
        self._publishing.append((staged, future))

    @property
    def disk_is_behind(self) -> bool:
        """Packs are made faster than they get to the disk."""
        return sum(not future.done() for _, future in self._publishing[-_MAX_UNPUBLISHED:]) > 1

    def _publish(self, staged: _Staged, identity: PackId) -> PackId:
        """A pack gets its name only when all of it is on the disk and reads back."""
        try:
            durable.fsync(staged.fd, staged.path)
            if pack.pack_id(pack.read_index(staged.path)) != identity:
                raise CorruptPack(staged.path, "the index read back differs")
            path = self._layout.pack(identity)
            durable.make_folder(path.parent)
            durable.rename(staged.path, path)
            durable.fsync_folder(path.parent)
        finally:
            staged.discard()
        return identity

    def finish(self) -> list[PackId]:
        """Seals the last pack; returns all packs once they are durable, in order."""
        if self._broken:
            raise RuntimeError("this writer failed before")
        self._broken = True
        self._seal()
        packs = [future.result() for _, future in self._publishing]
        self._publisher.shutdown()
        return packs

    def abort(self) -> None:
        """Drops the pack being written. Packs published already are left to gc."""
        self._broken = True
        if self._staged is not None:
            self._staged.discard()
            self._staged = None
        self._publisher.shutdown(wait=True, cancel_futures=True)
        for staged, future in self._publishing:
            if future.cancelled():
                staged.discard()


def staging_leftovers(layout: Layout) -> list[Path]:
    """Packs that dead processes left unfinished. Only the holder of the lock may ask."""
    return sorted(layout.staging.iterdir()) if layout.staging.is_dir() else []
