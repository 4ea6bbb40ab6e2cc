"""An object store with patience: tries again, goes on where a body broke off, counts.

A request is tried again after a random part of a growing delay (full jitter), until patience runs
out or an answer says that trying is no use. Credentials that were refused are looked for anew
first: a file of short-lived ones may have been written meanwhile.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from icefloe.durable import Buffer
from icefloe.errors import RemoteRefused, RemoteUnreachable
from icefloe.transfer.objects import (
    Conflict,
    NoSuchObject,
    Object,
    ObjectInfo,
    Objects,
    Page,
    Refused,
    Transient,
    Unfinished,
)

# A server that was overloaded or gone gets this much time before it is asked once more.
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0

# Refused requests are tried again so often, each time with credentials looked for anew.
_RENEWALS = 2

# What is asked for after `stop` (a lease is released) gets this much time.
_LAST_SECONDS = 2.0

T = TypeVar("T")


@dataclass(slots=True)
class Traffic:
    """What went over the wire: requests that were answered or not, and bytes of bodies."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    retries: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, sent: int = 0, received: int = 0, again: bool = False) -> None:
        """Counts one request."""
        with self._lock:
            self.requests += 1
            self.sent_bytes += sent
            self.received_bytes += received
            self.retries += again


class PatientObjects:
    """Like Objects, but instead of Transient and Refused raises RemoteUnreachable and
    RemoteRefused, when patience has run out."""

    def __init__(self, objects: Objects, patience: float) -> None:
        """`patience`: seconds that a request may go on failing."""
        self._objects = objects
        self._patience = patience
        self.traffic = Traffic()
        self._stopped = threading.Event()

    @property
    def url(self) -> str:
        """See Objects."""
        return self._objects.url

    def stop(self) -> None:
        """Whatever is under way fails at once; from here on nothing is tried again, or for long."""
        self._stopped.set()
        self._objects.give_up()

    def read(self, key: str) -> Object:
        """See Objects."""

        def once() -> tuple[Object, int]:
            found = self._objects.read(key)
            return found, len(found.content)

        return self._again("GET", key, once)

    def read_into(self, key: str, start: int, into: memoryview) -> int:
        """See Objects. Fewer than wanted only if the object ends there."""
        done = 0
        while done < len(into):

            def once(done: int = done) -> tuple[int, int]:
                count = self._objects.read_into(key, start + done, into[done:])
                return count, count

            count = self._again("GET", key, once)
            if not count:
                break
            done += count
        return done

    def info(self, key: str) -> ObjectInfo:
        """See Objects."""
        return self._again("HEAD", key, lambda: (self._objects.info(key), 0))

    def put(self, key: str, content: Buffer, expect: str | None = None) -> str:
        """See Objects."""
        tries = 0

        def once() -> tuple[str, int]:
            nonlocal tries
            tries += 1
            try:
                return self._objects.put(key, content, expect), 0
            except Conflict:
                # An answer that got lost: what is there may be what was sent before.
                with suppress(NoSuchObject):
                    if tries > 1 and (found := self._objects.read(key)).content == content:
                        return found.tag, 0
                raise

        return self._again("PUT", key, once, len(content))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose keys begin with this, in order of keys."""
        page = self._page(prefix, "")
        yield from page.rows
        while page.more:
            page = self._page(prefix, page.rows[-1].key)
            yield from page.rows

    def _page(self, prefix: str, after: str) -> Page:
        return self._again("LIST", prefix, lambda: (self._objects.page(prefix, after), 0))

    def delete(self, keys: Sequence[str]) -> None:
        """See Objects."""

        def once() -> tuple[None, int]:
            self._objects.delete(keys)
            return None, 0

        if keys:
            self._again("DELETE", keys[0], once)

    def unfinished(self) -> Sequence[Unfinished]:
        """See Objects."""
        return self._again("LIST uploads", "", lambda: (self._objects.unfinished(), 0))

    def abandon(self, upload: Unfinished) -> None:
        """See Objects."""

        def once() -> tuple[None, int]:
            self._objects.abandon(upload)
            return None, 0

        self._again("ABORT", upload.key, once)

    def _again(self, verb: str, key: str, once: Callable[[], tuple[T, int]], sent: int = 0) -> T:
        """What `once` returns at last, and how many bytes came with it."""
        request = f"{verb} {self.url.rstrip('/')}/{key}"
        deadline, delay, renewed, tries = None, _FIRST_DELAY, 0, 0
        while True:
            tries += 1
            try:
                with self._bounded():
                    result, received = once()
                self.traffic.add(sent=sent, received=received, again=tries > 1)
                return result
            except (NoSuchObject, Conflict):
                self.traffic.add(sent=sent, again=tries > 1)
                raise
            except Refused as error:
                self.traffic.add(again=tries > 1)
                if renewed == _RENEWALS:
                    raise RemoteRefused(request, str(error)) from error
                renewed += 1
                with suppress(Refused, Transient):  # the request itself will tell
                    self._objects.renew()
            except Transient as error:
                self.traffic.add(sent=sent, again=tries > 1)
                now = time.monotonic()
                deadline = deadline or now + self._patience
                pause = random.uniform(0, delay)
                if now + pause > deadline or self._stopped.wait(pause):
                    tried = f"{error}; tried {tries} times"
                    raise RemoteUnreachable(request, tried) from error
                delay = min(2 * delay, _LONGEST_DELAY)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """When this is stopped, nobody waits for a server that says nothing."""
        if not self._stopped.is_set():
            yield
            return
        end = threading.Timer(_LAST_SECONDS, self._objects.give_up)
        end.daemon = True
        end.start()
        try:
            yield
        finally:
            end.cancel()
