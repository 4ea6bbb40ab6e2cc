"""`restore --from`: out of a remote, while its blocks come in; the store keeps what has come.

When little is missing it is fetched first, for what lies in the store is filled in by several
processes. Otherwise nothing waits for the whole: neither the processes, nor users of the store.
"""

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from icefloe.capture.cuda import OpenCuda
from icefloe.capture.guard import Guard
from icefloe.capture.remote_source import RemoteSource
from icefloe.capture.restore import RestoreOptions, RestoreResult, restore_from, restore_image
from icefloe.catalog import open_store
from icefloe.errors import IcefloeError
from icefloe.ids import Name
from icefloe.store.layout import Layout
from icefloe.transfer.fetch import Fetcher
from icefloe.transfer.image_object import RemoteImage
from icefloe.transfer.pull import COMMIT_SECONDS, Arrivals, bring, pull_image
from icefloe.transfer.remote import Remote


@dataclass(frozen=True, slots=True)
class RemoteRestoreResult:
    """A restore, and what it took from a remote. Times in seconds since the restore started.

    `unkept`: why the store has not got the image now, though the processes run.
    """

    restore: RestoreResult
    wire_bytes: int
    image_seconds: float
    first_blocks_seconds: float
    kept_seconds: float | None
    unkept: str | None


def restore_from_remote(
    root: Path,
    remote: Remote,
    image: RemoteImage,
    name: Name | None,
    options: RestoreOptions,
    guard: Guard,
    started: float,
    open_cuda: OpenCuda,
    fetch_first: int,
) -> RemoteRestoreResult:
    """Restores an image of a remote, with the store in `root`, which is made if need be.

    `fetch_first`: with no more stored bytes to fetch than this, nothing is gained by not waiting.

    As `restore_from`; raises RemoteUnreachable, RemoteRefused, CorruptObject or StoreBusy as well.
    """
    found = time.monotonic()
    with closing(Arrivals(root, image)) as arrivals:
        with open_store(root, write=False, create=True) as store:
            arrivals.look(store)
            few = int(image.places["stored"][arrivals.missing].sum()) <= fetch_first
            if not few:
                source = RemoteSource(store, Fetcher(remote, image, Layout(root)), arrivals)
        if not few:
            first = time.monotonic()
            result = restore_from(
                source, Layout(root), image.manifest, options, guard, started, open_cuda
            )
            unkept = str(source.unkept) if source.unkept else _keep(root, source, arrivals, name)
    if few:
        pull_image(root, remote, image, name)
        first = time.monotonic()
        with open_store(root, write=False) as store:
            result = restore_image(store, image.id, options, guard, started, open_cuda)
        unkept = None
    traffic = remote.objects.traffic
    return RemoteRestoreResult(
        restore=result,
        wire_bytes=traffic.sent_bytes + traffic.received_bytes,
        image_seconds=found - started,
        first_blocks_seconds=first - started,
        kept_seconds=None if unkept else time.monotonic() - started,
        unkept=unkept,
    )


def _keep(root: Path, source: RemoteSource, arrivals: Arrivals, name: Name | None) -> str | None:
    """Fetches what nobody has asked for, and commits; why not, should that fail."""
    try:
        bring(source.fetcher, arrivals)
        with open_store(root, write=True, wait_seconds=COMMIT_SECONDS) as store:
            if not arrivals.are_all_here(store):
                return "blocks were collected meanwhile: `icefloe pull` brings them in"
            arrivals.commit(store, name)
    except IcefloeError as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted: `icefloe pull` brings in the rest"
    return None
