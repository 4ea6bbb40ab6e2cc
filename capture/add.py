"""`add`: stores a checkpoint that lies on a disk."""

import stat
from collections.abc import Mapping
from pathlib import Path

from icefloe.capture.ingest import AddResult, Ingest, IngestOptions, Progress
from icefloe.capture.parent import open_parent
from icefloe.capture.source import Checkpoint
from icefloe.capture.tree import Tree
from icefloe.capture.windows import CheckpointWindows
from icefloe.catalog import LocalStore
from icefloe.errors import SourceUnreadable
from icefloe.ids import Name
from icefloe.store.manifest import ImageFile


def open_checkpoint(path: Path) -> Checkpoint:
    """A directory or an archive. Raises SourceUnreadable, SourceChanged or BadSource."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        raise SourceUnreadable(path, error.strerror or str(error)) from error
    if is_folder:
        return Tree(path)
    from icefloe.capture.archive import Archive  # loads tarfile and four decompressors

    return Archive(path)


def add_checkpoint(
    store: LocalStore,
    checkpoint: Checkpoint,
    name: Name,
    labels: Mapping[str, str],
    options: IngestOptions,
    progress: Progress = lambda count: None,
) -> AddResult:
    """Stores a checkpoint under a name. Nothing is published unless all of it is.

    Raises SourceUnreadable, SourceChanged, BadSource, NoSpace, NotWritable,
    LimitReached, ImageNotFound or Corrupt.
    """
    parent = open_parent(store, name, options.parent)
    ingest = Ingest(store, options, progress, parent)
    entries: list[ImageFile] = []
    try:
        ingest.run(CheckpointWindows(checkpoint, entries, options.pages))
        checkpoint.verify()
        return ingest.commit(ingest.finish(entries, {}, labels), name)
    except BaseException:
        ingest.abort()
        raise
