"""What every command gets: the configuration, the open store, a progress bar."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from icefloe.catalog import LocalStore
    from icefloe.config import Config


@dataclass(frozen=True, slots=True)
class Context:
    """The options that stand before the command."""

    store: str | None
    config_file: str | None
    quiet: bool

    def config(self) -> "Config":
        """Raises UsageError."""
        from icefloe import config

        file = Path(self.config_file) if self.config_file else None
        return config.load(file, Path(self.store) if self.store else None, os.environ)

    def open(
        self, *, write: bool = False, create: bool = False, repair: bool = False
    ) -> "LocalStore":
        """Opens the configured store; the caller closes it."""
        from icefloe.catalog import open_store

        return open_store(self.config().store, write=write, create=create, repair=repair)

    @contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar on standard error when that is a terminal; yields what advances it by bytes."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda count: None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
