"""`make demo`: captures a running process twice, and restores the second image.

Where CRIU can't run it says why and does the same with a generated checkpoint, which is exported
and compared instead of restored. Everything happens in .cache/demo.
"""

import ctypes
import filecmp
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".cache" / "demo"
ICEFLOE = [sys.executable, "-m", "icefloe", "--store", str(PLACE / "store")]
LOG = PLACE / "count.log"
MEGABYTES = 100

# A restored process belongs to whoever asked for this; without it, nobody could reap it.
_PR_SET_CHILD_SUBREAPER = 36


class Failed(Exception):
    """A step of the demo did not work."""


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def icefloe(*arguments: str | Path) -> None:
    """Runs a command the way a person would, and shows it."""
    shown = " ".join(str(a).replace(str(PLACE), "$DEMO") for a in arguments)
    print(f"$ icefloe {shown}", flush=True)
    subprocess.run([*ICEFLOE, *map(str, arguments)], check=True)


def icefloe_json(*arguments: str | Path) -> dict[str, Any]:
    """Runs a command for its JSON."""
    command = [*ICEFLOE, *map(str, arguments), "--json"]
    document: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=-1).stdout)
    return document


def find_criu() -> tuple[Path | None, str]:
    """A CRIU that works here, or None and the reason."""
    if os.geteuid() != 0:
        return None, "CRIU needs root"
    named = os.environ.get("ICEFLOE_CAPTURE_CRIU")
    private = [ROOT / ".cache" / "criu" / version / "criu" for version in ("4.2", "4.1")]
    reason = "no CRIU was found; `make criu` installs a private copy"
    for criu in [Path(named)] if named else private:
        if criu.exists():
            check = subprocess.run([criu, "check"], capture_output=True, text=True)
            if check.returncode == 0:
                return criu, ""
            reason = f"`{criu} check` fails: {(check.stdout + check.stderr).strip()}"
    return None, reason


def counts() -> list[str]:
    return LOG.read_text().splitlines() if LOG.exists() else []


def wait_for_counts(number: int) -> None:
    deadline = time.monotonic() + 30
    while len(counts()) < number:
        if time.monotonic() > deadline:
            raise Failed(f"the process stopped counting at {len(counts())}")
        time.sleep(0.05)


def reap(pid: int) -> None:
    """Ends the process, if it still runs, and takes it off the process table."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def real_demo(criu: Path) -> None:
    """The whole way: process, two checkpoints, store, restore."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    say(f"a process with {MEGABYTES} MB of random data starts counting")
    program = [sys.executable, str(ROOT / "scripts" / "demo_process.py"), str(LOG), str(MEGABYTES)]
    process = subprocess.Popen(
        program,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_counts(5)
        say("it is captured twice, one second apart; the second time it ends")
        os.environ["ICEFLOE_CAPTURE_CRIU"] = str(criu)
        pid = str(process.pid)
        icefloe("capture", "demo:first", "--pid", pid, "--leave-running")
        wait_for_counts(len(counts()) + 10)
        icefloe("capture", "demo:second", "--pid", pid, "--label", "made-by=demo")
        process.wait()
        show_both()
        say("the process comes back to life out of the store")
        before = counts()
        icefloe("restore", "demo:second")
        wait_for_counts(len(before) + 10)
        show_counting_on(before, counts())
    finally:
        reap(process.pid)


def show_counting_on(before: list[str], after: list[str]) -> None:
    print(f"\ncounted before the checkpoint:  ... {', '.join(before[-3:])}")
    print(f"counted after the restore:      {', '.join(after[len(before) : len(before) + 5])} ...")
    expected = [f"{i} memory intact" for i in range(len(after))]
    if after != expected:
        raise Failed("the process did not count on where it was")


def store_both(first: str, second: str) -> None:
    say("both are stored")
    icefloe("add", PLACE / first, "demo:first", "--label", "made-by=demo")
    icefloe("add", PLACE / second, "demo:second", "--label", "made-by=demo")
    show_both()


def show_both() -> None:
    """What the store says of them."""
    print()
    icefloe("ls")
    shared = icefloe_json("diff", "demo:first", "demo:second")
    image = icefloe_json("show", "demo:second")
    part = 100 * image["exclusive_bytes"] / image["logical_bytes"]
    print(
        f"\nThe second checkpoint has {image['logical_bytes'] / 1e6:.0f} MB, "
        f"{shared['shared_bytes'] / 1e6:.0f} MB of them in blocks that the first has too;\n"
        f"keeping it costs {image['exclusive_bytes'] / 1e6:.2f} MB, {part:.2f} % of its size."
    )


def generated_demo(reason: str) -> None:
    """The same without CRIU: a made-up checkpoint, exported and compared."""
    say(f"CRIU can't run here: {reason}")
    print("The demo goes on with a generated checkpoint.")
    rng = random.Random(1)
    pages = [rng.randbytes(4096) for _ in range(MEGABYTES << 8)]
    write_checkpoint(PLACE / "first", pages)
    for at in range(0, len(pages), len(pages) // 10):
        pages[at] = rng.randbytes(4096)
    write_checkpoint(PLACE / "second", [rng.randbytes(4096), *pages])
    store_both("first", "second")
    say("the second comes back out of the store")
    icefloe("export", "demo:second", PLACE / "exported")
    names = sorted(os.listdir(PLACE / "second"))
    same, _, _ = filecmp.cmpfiles(PLACE / "second", PLACE / "exported", names, shallow=False)
    if sorted(same) != names:
        raise Failed("the export differs from what was stored")
    print("\nEvery byte is the same.")


def write_checkpoint(folder: Path, pages: list[bytes]) -> None:
    folder.mkdir()
    (folder / "pages-1.img").write_bytes(b"".join(pages) + bytes(10 << 20))
    (folder / "inventory.img").write_bytes(b"generated\n")


def main() -> int:
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    print(f"DEMO={PLACE}")
    criu, reason = find_criu()
    try:
        if criu is not None:
            real_demo(criu)
        else:
            generated_demo(reason)
        say("and the store is whole")
        icefloe("check", "--read-data")
    except (Failed, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(
        "\nThe store is still there: try `.venv/bin/icefloe --store $DEMO/store show demo:second`."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
