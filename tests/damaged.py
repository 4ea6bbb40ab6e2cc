"""Looks at a damaged store as a user would, in a process of its own, and tells what happened.

RocksDB may crash or hang on damaged files; then only the child does.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import small_store

from icefloe.catalog import open_store
from icefloe.errors import IcefloeError
from icefloe.gc.audit import check

# A child that takes longer hangs.
PATIENCE = 30


@dataclass(slots=True)
class Verdict:
    """What opening, checking and exporting came to. Lists hold what must not happen."""

    opened: bool = False
    ok: bool = False
    wrong: list[str] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    exact: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def found_or_harmless(self, names: set[str]) -> bool:
        """Either something was said, or every image is there, byte for byte."""
        return bool(self.told) or (self.ok and set(self.exact) == names)


def examine(root: Path, *, write: bool = False) -> Verdict:
    """Opens, checks with every byte and exports all images of a store."""
    verdict = Verdict()
    images = {**small_store.worn_store(), "gone:latest": small_store.GONE}
    try:
        with open_store(root, write=write, wait_seconds=0.0) as store:
            verdict.opened = True
            audit = check(store, read_data=True)
            verdict.ok = audit.ok
            verdict.told += [p.kind for p in audit.problems if not p.waste]
            for name, image in store.catalog.names().items():
                try:
                    right = small_store.exported(store, image) == images[name]
                except IcefloeError as error:
                    verdict.told.append(str(error))
                else:
                    (verdict.exact if right else verdict.wrong).append(name)
    except IcefloeError as error:
        verdict.told.append(f"{type(error).__name__}: {error}")
    except BaseException as error:  # pyo3's panics are no Exception
        verdict.surprises.append(f"{type(error).__name__}: {error}")
    return verdict


class Examiner:
    """A process that has loaded everything and opened nothing; it forks a child for each store."""

    def __enter__(self) -> "Examiner":
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def examine(self, root: Path) -> Verdict:
        """`examine` in a child; a crash or a hang is a surprise."""
        assert self._process.stdin and self._process.stdout
        print(root, file=self._process.stdin, flush=True)
        return Verdict(**json.loads(self._process.stdout.readline()))


def _examine_in_child(root: Path) -> Verdict:
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, json.dumps(asdict(examine(root))).encode()[: 1 << 16])
        os._exit(0)
    os.close(theirs)
    verdict = Verdict()
    with open(ours, "rb") as answer:
        try:
            signal.alarm(PATIENCE)
            content = answer.read()
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            content = b""
            verdict.surprises.append(f"no answer in {PATIENCE} s")
        finally:
            signal.alarm(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code or not content:
        verdict.surprises.append(f"the child ended with {code}")
        return verdict
    return Verdict(**json.loads(content))


def _too_late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def _serve() -> None:
    """Reads paths, a line each; writes verdicts, a line each."""
    signal.signal(signal.SIGALRM, _too_late)
    for line in sys.stdin:
        print(json.dumps(asdict(_examine_in_child(Path(line.rstrip("\n"))))), flush=True)


if __name__ == "__main__":
    _serve()
