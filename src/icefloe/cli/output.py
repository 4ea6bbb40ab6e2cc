"""Prints for people (aligned tables, human sizes) and for programs (one JSON document)."""

import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def print_json(document: dict[str, Any] | list[Any]) -> None:
    """The only thing on standard output when `--json` was given."""
    print(json.dumps(document, indent=2))


def size(count: int) -> str:
    """`1.5 GiB`."""
    value = float(count)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def when(seconds: float) -> str:
    """Local time, to the second."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def rate(count: int, seconds: float) -> str:
    """`2.1 GiB/s`."""
    return f"{size(int(count / seconds))}/s" if seconds > 0 else "-"


def printable(text: str) -> str:
    """With what a terminal can't show, or would obey, as bytes: `\\n`, `\\x1b`, `\\xff`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(_bytes(c))[2:-1] for c in text)


def _bytes(character: str) -> bytes:
    """As in the name of a file; half a pair of surrogates, which no name holds, by its number."""
    try:
        return os.fsencode(character)
    except UnicodeEncodeError:
        return character.encode(errors="surrogatepass")


def facts(rows: Sequence[tuple[str, str]]) -> None:
    """Two columns: what, and its value."""
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {printable(value)}")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> None:
    """Aligned columns; those in `right` hold numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if i in right else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    # Piped output is for other programs: never cut to the width of a terminal that isn't there.
    console = Console() if sys.stdout.isatty() else Console(width=10_000, highlight=False)
    console.print(grid)
