"""The world is against us: full disks, refused reads, changing files, interrupts, other processes.

Each time: one clear line, the documented exit code, and nothing that was stored is lost.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import slow_chunker as slow
import small_store
from endings import Ended, fails
from hostile import (
    IS_ROOT,
    KEPT,
    MIB,
    add_one,
    eat,
    icefloe,
    is_whole,
    mounted,
    small_disk,
    start,
    works,
)
from small_store import NOISE, Tree

from icefloe.capture.export import export_image
from icefloe.capture.windows import WINDOW_BYTES
from icefloe.catalog import open_store
from icefloe.catalog.lock import Lock
from icefloe.errors import CorruptPack, SourceChanged
from icefloe.gc.audit import check
from icefloe.ids import IdPrefix, parse_name

NOBODY = 65534


def fill(store: Path) -> None:
    """A store that holds `kept`."""
    with open_store(store, write=True, create=True) as opened:
        small_store.add(opened, KEPT, "kept")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that holds `kept`, closed."""
    fill(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A checkpoint of 12 MiB that does not compress."""
    root = tmp_path / "big"
    root.mkdir()
    (root / "pages-1.img").write_bytes(slow.noise(12 * MIB, 5))
    return root


# --- disks --------------------------------------------------------------------------------------


def test_disk_fills_up_during_add(tmp_path: Path, big: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk / "store")
        fails(icefloe(disk / "store", "add", big, "big"), 8, "No space left")
        assert not any((disk / "store/staging").iterdir())
        is_whole(disk / "store", {"kept": KEPT}, waste=False)
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        works(icefloe(disk / "store", "add", big, "big"))
        is_whole(disk / "store", {"kept": KEPT, "big": small_store.read_tree(big)}, waste=False)


def test_no_space_for_a_store(tmp_path: Path, big: Path) -> None:
    """Not even for an empty one."""
    with small_disk(tmp_path / "disk", 2 * MIB) as disk:
        hog = eat(disk)
        fails(icefloe(disk / "store", "add", big, "big", "--json"), 8, disk)
        hog.unlink()
        works(icefloe(disk / "store", "ls")) if (disk / "store/format").exists() else None
        small_store.write_tree(tmp_path / "kept", KEPT)
        works(icefloe(disk / "store", "add", tmp_path / "kept", "kept"))
        is_whole(disk / "store", {"kept": KEPT})


@pytest.mark.parametrize("command", [("rm", "kept"), ("tag", "kept", "too"), ("gc",)])
def test_changes_on_a_full_disk(tmp_path: Path, command: Sequence[str]) -> None:
    """Each is made or refused, and afterwards everything can be made."""
    with small_disk(tmp_path / "disk") as disk:
        fill(disk / "store")
        hog = eat(disk)
        ended = icefloe(disk / "store", *command)
        if ended.code:
            fails(ended, 8, disk)
        hog.unlink()
        names = {
            name
            for i in json.loads(works(icefloe(disk / "store", "ls", "--json")).out)
            for name in i["names"]
        }
        assert names <= {"kept:latest", "too:latest"}
        if command[0] != "rm":
            works(icefloe(disk / "store", "export", "kept", tmp_path / "out"))
            assert small_store.read_tree(tmp_path / "out") == KEPT
        works(icefloe(disk / "store", "gc"))
        works(icefloe(disk / "store", "check", "--read-data"))


def test_export_to_a_full_disk(tmp_path: Path, store: Path, big: Path) -> None:
    """Nothing half is left there."""
    works(icefloe(store, "add", big, "big"))
    with small_disk(tmp_path / "disk") as disk:
        fails(icefloe(store, "export", "big", disk / "out"), 8, "No space left")
        assert not any(disk.iterdir())


def test_export_to_a_mount(tmp_path: Path, store: Path, big: Path) -> None:
    """A volume is filled in place, or left empty."""
    works(icefloe(store, "add", big, "big"))
    with small_disk(tmp_path / "disk") as disk:
        fails(icefloe(store, "export", "big", disk), 8, "No space left")
        assert not any(disk.iterdir())
        with open_store(store, write=False) as opened:
            kept = opened.manifest(opened.catalog.resolve(parse_name("kept"))).files[0]
        works(icefloe(store, "export", "kept", disk))
        assert small_store.read_tree(disk) == KEPT
        status = disk.stat()
        assert (status.st_mode & 0o7777, status.st_mtime_ns) == (kept.mode, kept.mtime_ns)
        fails(icefloe(store, "export", "kept", disk), 2, disk)


def test_a_file_size_limit(store: Path, big: Path) -> None:
    """`ulimit -f` is a full disk of its own kind, and comes with a signal."""
    limit = f"ulimit -f 4096; exec {sys.executable} -m icefloe --store {store} add {big} big"
    done = subprocess.run(["bash", "-c", limit], capture_output=True, text=True)
    fails(Ended(done.returncode, done.stdout, done.stderr), 8, store)
    is_whole(store, {"kept": KEPT}, waste=False)


def test_read_only_store(tmp_path: Path, store: Path, big: Path) -> None:
    """What only reads works; what would write says that it can't."""
    with mounted(tmp_path / "view", "--bind", str(store)) as view:
        subprocess.run(["mount", "-o", "remount,bind,ro", view], check=True)
        for command in (("add", big, "big"), ("rm", "kept"), ("tag", "kept", "k"), ("gc",)):
            fails(icefloe(view, *command), 8, view)
        for command in (("ls",), ("show", "kept"), ("diff", "kept", "kept"), ("check",)):
            works(icefloe(view, *command))
        works(icefloe(view, "export", "kept", tmp_path / "out"))
        assert small_store.read_tree(tmp_path / "out") == KEPT
    is_whole(store, {"kept": KEPT}, waste=False)


def test_another_users_store(store: Path) -> None:
    """Checkpoints are secret: another user learns nothing but that."""
    if not IS_ROOT:
        pytest.skip("giving files away takes root")
    for place in [*store.rglob("*"), store]:
        os.chown(place, NOBODY, NOBODY)
    for command in (("ls",), ("gc",), ("check",), ("export", "kept", "/tmp/never")):
        ended = icefloe(store, *command, weak=True)
        assert ended.code in (3, 8), ended
        fails(ended, ended.code, store)


def test_a_disk_that_cannot_read(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector under a pack is damage of that pack, not of where it is exported to."""
    (pack,) = (path for path in (store / "packs").rglob("*") if path.is_file())
    read = os.preadv

    def fail(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if os.path.samestat(os.fstat(fd), pack.stat()) and len(buffers[0]) > 1000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset, flags)

    with open_store(store, write=False) as opened:
        image = opened.catalog.resolve(parse_name("kept"))
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(CorruptPack, match=f"{pack}.*Input/output error"):
            export_image(opened, image, tmp_path / "out")
        problems = check(opened, read_data=True).problems
        assert {p.kind for p in problems} == {"data-damaged"} and str(pack) in problems[0].what
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    is_whole(store, {"kept": KEPT}, waste=False)


# --- sources ------------------------------------------------------------------------------------


def test_unreadable(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "image"
    small_store.write_tree(root, KEPT)
    for place, mode in ((root / "core.img", 0o644), (root, 0o755)):
        place.chmod(0)
        fails(icefloe(store, "add", root, "x", weak=True), 3, place)
        place.chmod(mode)
    is_whole(store, {"kept": KEPT}, waste=False)
    works(icefloe(store, "add", root, "x", weak=True))


def test_not_there(store: Path, tmp_path: Path) -> None:
    fails(icefloe(store, "add", tmp_path / "nowhere", "x"), 3, tmp_path / "nowhere")
    is_whole(store, {"kept": KEPT}, waste=False)


@pytest.mark.parametrize("content", [b"", b"text", bytes(10240), b"\x1f\x8b", b"\x28\xb5\x2f\xfd"])
def test_no_archive(store: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    fails(icefloe(store, "add", tmp_path / "file", "x"), 4, tmp_path / "file")
    is_whole(store, {"kept": KEPT}, waste=False)


def shrink(path: Path) -> None:
    """The end goes."""
    os.truncate(path, WINDOW_BYTES + 4096)


def grow(path: Path) -> None:
    """More comes."""
    with path.open("ab") as file:
        file.write(b"more")


def overwrite(path: Path) -> None:
    """The same length, other bytes, at the start, which was read already."""
    with path.open("r+b") as file:
        file.write(b"other")


def vanish(path: Path) -> None:
    """Gone."""
    path.unlink()


def replace(path: Path) -> None:
    """Another file of that name and length."""
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.rename(path)


def appear(path: Path) -> None:
    """A new file beside it."""
    (path.parent / "new").write_bytes(b"new")


CHANGES = (shrink, grow, overwrite, vanish, replace, appear)


@pytest.mark.parametrize("when", ["at the first window", "at the last window"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_while_it_is_read(
    store: Path, big: Path, change: Callable[[Path], None], when: str
) -> None:
    """Nothing of it is stored, and the next try succeeds."""
    length = (big / "pages-1.img").stat().st_size
    read = 0

    def progress(count: int) -> None:
        nonlocal read
        before, read = read, read + count
        if before < (1 if when == "at the first window" else length) <= read:
            time.sleep(0.02)  # the clock of a file system moves every few milliseconds
            change(big / "pages-1.img")

    with open_store(store, write=True) as opened:
        with pytest.raises(SourceChanged, match=str(big)):
            add_one(opened, big, progress)
    is_whole(store, {"kept": KEPT}, waste=False)
    (big / "pages-1.img").write_bytes(NOISE[2])
    works(icefloe(store, "add", big, "big"))
    is_whole(store, {"kept": KEPT, "big": small_store.read_tree(big)}, waste=False)


# --- signals and other processes ----------------------------------------------------------------


# Takes its time over each read of the file `slow`.
_STUCK = """
import pathlib, sys, time
from icefloe import cli
from icefloe.capture.source import PlainFile
read = PlainFile.read_into
def slow(self, offset, view):
    if self._path.name == "slow":
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(float(sys.argv[2]))
    read(self, offset, view)
PlainFile.read_into = slow
PlainFile.is_hole = lambda self, offset, length: False
cli.main(sys.argv[3:])
"""


@contextmanager
def stuck_add(store: Path, folder: Path, seconds: float) -> Iterator["subprocess.Popen[str]"]:
    """An `add` of `folder`/stuck that is in the middle of reading, and stays there a while."""
    small_store.write_tree(folder / "stuck", {"pages-1.img": NOISE[2], "slow": bytes(MIB)})
    reached = folder / "reached"
    words = [reached, seconds, "--store", store, "add", folder / "stuck", "stuck"]
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 20
        while not reached.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(store: Path, tmp_path: Path, number: signal.Signals) -> None:
    """As if it had never begun; SIGTERM may leave waste."""
    with stuck_add(store, tmp_path, 0.5) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode and out == ""
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert re.fullmatch(r"icefloe: interrupted: .+\n", err.lstrip("\n"))
    is_whole(store, {"kept": KEPT}, waste=number is not signal.SIGINT)
    works(icefloe(store, "add", tmp_path / "stuck", "stuck"))
    stuck = small_store.read_tree(tmp_path / "stuck")
    is_whole(store, {"kept": KEPT, "stuck": stuck}, waste=number is not signal.SIGINT)


def test_busy(store: Path, tmp_path: Path) -> None:
    """Who waits in vain is told whom for. Readers don't get in each other's way."""
    with stuck_add(store, tmp_path, 60) as process:
        waiting = [start(store, command) for command in ("ls", "gc")]
        for other in waiting:
            out, err = other.communicate(timeout=20)
            fails(Ended(other.returncode, out, err), 6, f"process {process.pid}")
    lock = Lock(store / "lock", write=False)
    works(icefloe(store, "ls"))
    lock.release()


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a")])
@pytest.mark.parametrize("place", ["store", "new store"])
def test_two_at_once(store: Path, tmp_path: Path, names: tuple[str, str], place: str) -> None:
    """One waits for the other, and both are stored, also when both make the store."""
    store = store.with_name(place)
    trees: list[Tree] = [{"x": NOISE[0] + b"1"}, {"x": NOISE[0] + b"2", "y": NOISE[2]}]
    for i, tree in enumerate(trees):
        small_store.write_tree(tmp_path / str(i), tree)
    running = [start(store, "add", tmp_path / str(i), names[i], "--json") for i in range(2)]
    ids: list[str] = []
    for process in running:
        out, err = process.communicate(timeout=60)
        works(Ended(process.returncode, out, err))
        ids.append(json.loads(out)["id"])
    with open_store(store, write=False) as opened:
        assert check(opened, read_data=True).problems == ()
        images = [opened.catalog.resolve(IdPrefix(identity)) for identity in ids]
        assert [small_store.exported(opened, image) for image in images] == trees
