"""Signals that end a command wait until it can be ended.

An exception from a signal can come between any two steps, also between a commit and the note of
it. So handlers of signals only take note, but for the moments in which they may raise.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_on_signals() -> None:
    """SIGTERM and SIGHUP end the command as Ctrl-C does, unless its caller has them ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


class Interrupts:
    """While the context is open, KeyboardInterrupt comes when it is `allowed`, and only once."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._allowed = False
        self._pending = False

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pending and kind is None:
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """An interrupt that has come, or comes while this is open, is raised in here."""
        self._allowed = True
        try:
            if self._pending:
                self._raise()
            yield
        finally:
            self._allowed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        if self._allowed:
            self._raise()

    def _raise(self) -> None:
        self._allowed = self._pending = False
        raise KeyboardInterrupt
