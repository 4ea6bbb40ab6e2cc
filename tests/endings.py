"""How commands end, and how they must end when they fail."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def fails(ended: Ended, code: int, said: str | Path) -> None:
    """One line on standard error that names the thing and what to do; nothing else anywhere."""
    assert ended.code == code, ended
    assert re.fullmatch(r"icefloe: .+: .+\n", ended.err), ended
    assert str(said) in ended.err and "Traceback" not in ended.err, ended
    assert ended.out == "", ended
