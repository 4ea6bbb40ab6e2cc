"""Who is at work in a remote: pushes, pulls, and the one collector.

    leases/push-X   {"holder": "host, process 12"}: a push that began when the object was written
    leases/pull-X   the same of a pull or a restore
    leases/gc       {"fence": 3, "holder": null or "host, process 12", "condemned": {KEY: TIME}}

A collector deletes what it condemned only when everybody who began before that has ended, and
looks once more whether it is still unused. A push that begins later sees what is condemned, and
frees what it needs before it relies on it; a pull that begins later finds no name that leads there.
Times are those of the store's clock.

`leases/gc` is written only by whoever holds it, by conditional writes: each holder counts `fence`
up, and who was too slow finds that out. docs/invariants.md, "Remotes".
"""

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from icefloe.errors import CorruptObject, IcefloeError, RemoteBusy, RemoteRefused
from icefloe.transfer.objects import ABSENT, Conflict, NoSuchObject
from icefloe.transfer.remote import Remote

LEASES = "leases/"
COLLECTOR = "leases/gc"

# A push that takes longer begins anew; what it has sent by then is not sent again. A pull that
# takes longer may find that its image was removed.
LEASE_SECONDS = 6 * 3600.0

# A collector writes its lease anew before this, or has lost it.
COLLECTOR_SECONDS = 600.0

# What clocks and answers may be off.
_MARGIN_SECONDS = 60.0

# How long to wait for a collector to finish.
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class State:
    """The object `leases/gc`. `condemned`: keys that may be deleted, and since when."""

    fence: int = 0
    holder: str | None = None
    condemned: Mapping[str, float] = field(default_factory=dict)
    tag: str = ABSENT

    def encode(self) -> bytes:
        """The object's content."""
        document = {
            "fence": self.fence,
            "holder": self.holder,
            "condemned": dict(sorted(self.condemned.items())),
        }
        return (json.dumps(document, separators=(",", ":")) + "\n").encode()


def collector_state(remote: Remote) -> State:
    """What the collector left, or is about to do."""
    try:
        found = remote.objects.read(COLLECTOR)
    except NoSuchObject:
        return State()
    try:
        document = json.loads(found.content)
        holder = document["holder"]
        condemned = {str(key): float(since) for key, since in document["condemned"].items()}
        return State(int(document["fence"]), holder and str(holder), condemned, found.tag)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptObject(remote.where(COLLECTOR), "it is no lease") from None


class Lease:
    """Keeps collectors from what somebody relies on, while it is `valid`."""

    def __init__(self, remote: Remote, kind: Literal["push", "pull"]) -> None:
        self._remote = remote
        self._began = _now()
        self._key = f"{LEASES}{kind}-{os.urandom(16).hex()}"
        remote.objects.put(self._key, json.dumps({"holder": _me()}).encode())

    @property
    def valid(self) -> bool:
        """Whether collectors still heed it."""
        return _now() - self._began < LEASE_SECONDS - _MARGIN_SECONDS

    def release(self) -> None:
        """It is over."""
        self._remote.objects.delete([self._key])


@contextmanager
def pushing(remote: Remote) -> Iterator[Lease]:
    """A push is under way."""
    lease = Lease(remote, "push")
    try:
        yield lease
    except BaseException:
        remote.objects.stop()  # nobody waits for the lease as well
        raise
    finally:
        with suppress(IcefloeError):  # it runs out by itself
            lease.release()


@contextmanager
def pulling(remote: Remote) -> Iterator[None]:
    """A pull is under way; without a lease, where nothing may be written."""
    lease = None
    with suppress(RemoteRefused):
        lease = Lease(remote, "pull")
    try:
        yield
    except BaseException:
        remote.objects.stop()
        raise
    finally:
        if lease is not None:
            with suppress(IcefloeError):
                lease.release()


def held_since(remote: Remote, now: float) -> tuple[float, list[str]]:
    """Since when somebody has been at work (infinity: nobody is), and leases that have run out."""
    rows = [
        row
        for row in remote.objects.list(LEASES)
        if row.key.startswith((f"{LEASES}push-", f"{LEASES}pull-"))
    ]
    over = [row.key for row in rows if now - row.modified > LEASE_SECONDS]
    return min((row.modified for row in rows if row.key not in over), default=math.inf), over


class Collector:
    """Holds `leases/gc`; `state` is what it says."""

    def __init__(self, remote: Remote, state: State) -> None:
        self._remote = remote
        self.state = state
        self._written = _now()
        self._server = remote.objects.info(COLLECTOR).modified

    def now(self) -> float:
        """The store's clock, and not before it."""
        return self._server + (_now() - self._written) + 2

    def write(self, condemned: Mapping[str, float]) -> None:
        """Says anew what is condemned, and that this collector is at work. Raises RemoteBusy."""
        self._put(replace(self.state, condemned=condemned))

    def alive(self) -> None:
        """Makes sure that nobody else collects for a while. Raises RemoteBusy."""
        if _now() - self._written > COLLECTOR_SECONDS / 4:
            self._put(self.state)

    def release(self) -> None:
        """Lets the next one in."""
        self._put(replace(self.state, holder=None))

    def _put(self, state: State) -> None:
        began = _now()
        if began - self._written > COLLECTOR_SECONDS - _MARGIN_SECONDS:
            raise RemoteBusy(self._remote.where(COLLECTOR), "nobody: it took too long")
        try:
            tag = self._remote.objects.put(COLLECTOR, state.encode(), self.state.tag)
        except Conflict:
            raise RemoteBusy(self._remote.where(COLLECTOR), "another collector by now") from None
        self.state = replace(state, tag=tag)
        self._server += began - self._written
        self._written = began


@contextmanager
def collecting(remote: Remote, wait_seconds: float = 0.0) -> Iterator[Collector]:
    """The one collector. Raises RemoteBusy when there is another one, for longer than that."""
    collector = _acquire(remote, wait_seconds)
    try:
        yield collector
    except BaseException:
        remote.objects.stop()
        raise
    finally:
        with suppress(IcefloeError):  # it runs out by itself
            collector.release()


def _acquire(remote: Remote, wait_seconds: float) -> Collector:
    deadline = time.monotonic() + wait_seconds
    while True:
        state = collector_state(remote)
        if state.holder is None or _is_stale(remote):
            mine = replace(state, fence=state.fence + 1, holder=f"{_me()}, {os.urandom(4).hex()}")
            try:
                tag = remote.objects.put(COLLECTOR, mine.encode(), state.tag)
            except Conflict:
                continue
            if state.fence == 0:
                _require_conditions(remote, mine)
            return Collector(remote, replace(mine, tag=tag))
        if time.monotonic() > deadline:
            raise RemoteBusy(remote.where(COLLECTOR), state.holder)
        time.sleep(_POLL_SECONDS)


def _require_conditions(remote: Remote, state: State) -> None:
    """Some stores take no notice of conditions, and would let two collectors in."""
    try:
        remote.objects.put(COLLECTOR, state.encode() + b"\n", ABSENT)
    except Conflict:
        return
    raise RemoteRefused(
        f"PUT {remote.where(COLLECTOR)} with If-None-Match", "the store takes no notice of it"
    )


def _is_stale(remote: Remote) -> bool:
    """Whether the lease was last written too long ago, by the clock of the store."""
    probe = f"{LEASES}clock-{os.urandom(8).hex()}"
    remote.objects.put(probe, b"")
    now = remote.objects.info(probe).modified
    remote.objects.delete([probe])
    return now - remote.objects.info(COLLECTOR).modified > COLLECTOR_SECONDS


def release_from(remote: Remote, keys: Sequence[str]) -> State:
    """Takes keys off the list of what may be deleted; returns the state after that.

    What was deleted already is not brought back: look what is there. Raises RemoteBusy.
    """
    with collecting(remote, _WAIT_SECONDS) as collector:
        left = {k: since for k, since in collector.state.condemned.items() if k not in keys}
        collector.write(left)
    return replace(collector.state, holder=None)


def _now() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _me() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"
