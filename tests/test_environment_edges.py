"""More of what test_environment.py is about: every step of a command, and the far corners.

A disk that fails and an interrupt that comes at each step; changes to each part of a checkpoint;
sources that are none; outputs that nobody can write to.
"""

import errno
import gzip
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import pytest
import small_store
import zstandard
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
    unconfigured,
    works,
)
from small_store import NOISE, Tree

from icefloe import durable
from icefloe.catalog import open_store
from icefloe.catalog.lock import Lock
from icefloe.errors import BadSource, NoSpace, SourceChanged
from icefloe.gc.removal import remove
from icefloe.gc.sweep import GcOptions, collect
from icefloe.ids import parse_name

NEW: Tree = {"pages-1.img": NOISE[1] + b"new", "core.img": b"new"}
BEFORE = {"kept": KEPT}


def wear(store: Path) -> None:
    """A store that holds `kept`, in a pack of which so much is dead that `gc` copies the rest."""
    with open_store(store, write=True, create=True) as opened:
        small_store.add(opened, KEPT | {"dead.img": NOISE[2]}, "gone")
        small_store.add(opened, KEPT, "kept")
        remove(opened, [parse_name("gone")])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A worn store that nobody changes."""
    store = tmp_path_factory.mktemp("worn") / "store"
    wear(store)
    return store


@pytest.fixture
def store(tmp_path: Path, template: Path) -> Path:
    """A worn store, closed."""
    small_store.copy_store(template, tmp_path / "store")
    return tmp_path / "store"


def names(store: Path) -> set[str]:
    """What the next reader sees."""
    with open_store(store, write=False) as opened:
        return {name.removesuffix(":latest") for name in opened.catalog.names()}


def run_script(script: str, *arguments: str | Path, seconds: float = 60) -> Ended:
    """Runs a piece of Python that calls the command line."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(
        command, env=unconfigured(), capture_output=True, text=True, timeout=seconds
    )
    return Ended(done.returncode, done.stdout, done.stderr)


# --- disks --------------------------------------------------------------------------------------

AFTER: dict[str, dict[str, Tree]] = {
    "add": {**BEFORE, "new": NEW},
    "tag": {**BEFORE, "too": KEPT},
    "rm": {},
    "gc": BEFORE,
}
"""What a store holds when a command was done to a worn one."""


def act(store: Path, command: str) -> None:
    """Does that command, in this process."""
    with open_store(store, write=True) as opened:
        if command == "add":
            small_store.add(opened, NEW, "new")
        elif command == "tag":
            image = opened.catalog.resolve(parse_name("kept"))
            opened.commit("tag", names={"too:latest": image})
        elif command == "rm":
            remove(opened, [parse_name("kept")])
        else:
            assert collect(opened, GcOptions()).packs_rewritten == 1


class FailingDisk:
    """Refuses every durable step from a certain one on."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.steps = 0

    @contextmanager
    def step(self, operation: str, path: Path) -> Iterator[None]:
        """Instead of durable.step."""
        self.steps += 1
        with durable.write_errors(path):
            if self.steps >= self.first:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield

    def writev(self, fd: int, pieces: Sequence[durable.Buffer]) -> int:
        """Instead of os.writev; the last write that it takes is cut in the middle."""
        self.steps += 1
        content = b"".join(pieces)
        if self.steps >= self.first:
            if self.steps == self.first:
                os.write(fd, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, content)


@pytest.mark.parametrize("way", ["refused", "cut"])
@pytest.mark.parametrize("command", AFTER)
def test_the_disk_fails_at_each_step(
    store: Path, monkeypatch: pytest.MonkeyPatch, command: str, way: str
) -> None:
    """The change is made or it isn't; nothing is damaged, and the next `gc` leaves no waste."""
    for first in count(1):
        copy = store.with_name(str(first))
        small_store.copy_store(store, copy)
        disk = FailingDisk(first)
        with monkeypatch.context() as patch:
            if way == "refused":
                patch.setattr(durable, "step", disk.step)
            else:
                patch.setattr(os, "writev", disk.writev)
            try:
                act(copy, command)
            except NoSpace as error:
                assert str(copy) in str(error)
                failed = True
            else:
                failed = False
        assert failed == (disk.steps >= first), "an error of the disk was swallowed"
        made = names(copy) == set(AFTER[command])
        images = AFTER[command] if made else BEFORE
        assert names(copy) == set(images)
        is_whole(copy, images)
        if not failed:
            assert made and first > 1
            break
        works_again = AFTER[command] if made else BEFORE
        with open_store(copy, write=True) as opened:
            collect(opened, GcOptions())
        is_whole(copy, works_again, waste=False)


@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["", "json"])
def test_a_full_disk_is_named(tmp_path: Path, store: Path, as_json: Sequence[str]) -> None:
    """The one line says where space is needed, not only that it is."""
    big = tmp_path / "big"
    small_store.write_tree(big, {"pages-1.img": Random(5).randbytes(6 * MIB)})
    works(icefloe(store, "add", big, "big"))
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        fails(icefloe(store, "export", "big", disk / "out", *as_json), 8, disk / "out")
        assert not any(disk.iterdir())
        fails(icefloe(disk / "store", "add", big, "big", *as_json), 8, disk / "store/staging")


def test_gc_that_copies_on_a_full_disk(tmp_path: Path) -> None:
    """Refused, nothing is lost; with free space it does what it could not do."""
    with small_disk(tmp_path / "disk") as disk:
        wear(disk / "store")
        hog = eat(disk)
        fails(icefloe(disk / "store", "gc"), 8, disk)
        hog.unlink()
        is_whole(disk / "store", BEFORE)
        done = json.loads(works(icefloe(disk / "store", "gc", "--json")).out)
        assert done["packs_rewritten"] == 1
        is_whole(disk / "store", BEFORE, waste=False)


@pytest.mark.parametrize("command", [("ls", "--json"), ("tag", "kept", "too")])
def test_output_to_a_full_disk(store: Path, command: Sequence[str]) -> None:
    """`icefloe ls > list` on a full disk is no bug of icefloe."""
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "icefloe", "--store", str(store), *command]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    fails(Ended(done.returncode, "", done.stderr), 8, "No space left")


def test_errors_to_a_full_disk(store: Path) -> None:
    """`2> log` on a full disk: the line is lost, the exit code is not."""
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "icefloe", "--store", str(store), "show", "none"]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (3, b"")


_READ_ONLY = """
mount -t tmpfs tmpfs "$1" || exit 77
for place in / /tmp /var/tmp /usr/tmp; do mount -o remount,bind,ro $place 2> /dev/null; done
for place in / /tmp /var/tmp /usr/tmp; do
    if test -d $place && test -w $place; then exit 77; fi
done
cd /
shift
exec "$@"
"""


@pytest.mark.parametrize("place", ["", "memory"])
def test_a_read_only_machine(tmp_path: Path, store: Path, place: str) -> None:
    """Reading takes a folder for temporary files; what isn't there is named as what it is."""
    if not IS_ROOT:
        pytest.skip("mounting takes root")
    (tmp_path / "memory").mkdir()
    environment = {n: v for n, v in os.environ.items() if n not in ("TMPDIR", "TEMP", "TMP")}
    if place:
        environment["TMPDIR"] = str(tmp_path / place)
    for command in (["ls"], ["show", "kept"], ["export", "kept", f"{tmp_path}/memory/out"]):
        words = [sys.executable, "-m", "icefloe", "--store", str(store), *command]
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", _READ_ONLY, "sh", str(tmp_path / "memory"), *words],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode == 77 or "unshare failed" in done.stderr:
            pytest.skip("cannot make this machine read-only")
        ended = Ended(done.returncode, done.stdout, done.stderr)
        works(ended) if place else fails(ended, 8, "tmp")


def test_a_read_only_store_that_crashed(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its catalog is behind, and can't be brought up: that is said. Later nothing is missing."""

    def fail(*arguments: object, **options: object) -> None:
        raise NoSpace(store, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("icefloe.catalog.database.Database.commit", fail)
        with pytest.raises(NoSpace):
            act(store, "add")
    with mounted(tmp_path / "view", "--bind", str(store)) as view:
        subprocess.run(["mount", "-o", "remount,bind,ro", view], check=True)
        for command in (("ls",), ("show", "kept"), ("gc",)):
            fails(icefloe(view, *command), 8, view)
    is_whole(store, AFTER["add"])


def test_too_few_open_files(store: Path) -> None:
    """`ulimit -n`: a limit is no damage, and nobody must be told to move the catalog away."""
    script = f"ulimit -n 10; exec {sys.executable} -m icefloe --store {store} gc"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    is_whole(store, BEFORE)
    assert "damaged" not in done.stderr, done.stderr
    fails(Ended(done.returncode, done.stdout, done.stderr), 8, "Too many open files")


# --- sources that change ------------------------------------------------------------------------


def cut_short(root: Path) -> None:
    os.truncate(root / "z-small", 3)


def write_before(root: Path) -> None:
    (root / "0-small").write_bytes(b"other")


def take_away(root: Path) -> None:
    (root / "z-small").unlink()


def point_elsewhere(root: Path) -> None:
    (root / "link").unlink()
    (root / "link").symlink_to("elsewhere")


def add_below(root: Path) -> None:
    (root / "sub/new").touch()


def swap_folder(root: Path) -> None:
    (root / "sub").rename(root.with_name("sub"))
    (root / "sub").symlink_to(root.with_name("sub"))


def swap_for_link(root: Path) -> None:
    (root / "z-small").rename(root.with_name("z-small"))
    (root / "z-small").symlink_to(root.with_name("z-small"))


def change_parent(root: Path) -> None:
    (root.with_name("first") / "core.img").write_bytes(b"other")


CHANGES: dict[Callable[[Path], None], str] = {
    cut_short: "z-small",
    write_before: "0-small",
    take_away: "z-small",
    point_elsewhere: "dump",
    add_below: "sub",
    swap_folder: "dump",
    swap_for_link: "z-small",
    change_parent: "core.img",
}


def dump(root: Path) -> None:
    """An incremental dump with a small file on either side of a large one, and its parent."""
    small = {"0-small": b"small", "z-small": b"small", "sub/file": b"file"}
    small_store.write_tree(root, {"inventory.img": b"i", "pages-1.img": NOISE[2], **small})
    small_store.write_tree(root.with_name("first"), {"inventory.img": b"i", "core.img": b"core!"})
    (root / "link").symlink_to("0-small")
    (root / "parent").symlink_to("../first")


@contextmanager
def once(change: Callable[[], None]) -> Iterator[Callable[[int], None]]:
    """A progress that makes a change when it is first called."""
    calls = 0

    def progress(read: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(0.02)  # the clock of a file system moves every few milliseconds
            change()

    yield progress
    assert calls, "nothing was read"


@pytest.mark.parametrize("change", CHANGES)
def test_another_entry_changes(store: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    """While a large file is read, something beside it changes, read already or not."""
    root = tmp_path / "dump"
    dump(root)
    with open_store(store, write=True) as opened:
        with once(lambda: change(root)) as progress:
            with pytest.raises(SourceChanged, match=CHANGES[change]) as raised:
                add_one(opened, root, progress)
        assert raised.value.exit_code == 4 and not any(opened.layout.staging.iterdir())
    is_whole(store, BEFORE, waste=False)


def pack(root: Path, target: Path, kind: str) -> Path:
    """An archive of a folder."""
    plain = target.with_suffix(".tar")
    with tarfile.open(plain, "w") as tar:
        tar.add(root, ".")
    packed = target.with_suffix(f".tar{kind}")
    if kind == ".gz":
        packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
    elif kind == ".zst":
        packed.write_bytes(zstandard.compress(plain.read_bytes()))
    return packed


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(10240))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touch(path: Path) -> None:
    os.utime(path)


@pytest.mark.parametrize("change", [grow, halve, touch, Path.unlink])
@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_an_archive_changes(
    store: Path, tmp_path: Path, change: Callable[[Path], None], kind: str
) -> None:
    """Also one that is a stream: whatever of it was stored is not published."""
    small_store.write_tree(tmp_path / "x", {"pages-1.img": Random(4).randbytes(6 * MIB), "z": b"z"})
    archive = pack(tmp_path / "x", tmp_path / "x.tar", kind)
    with open_store(store, write=True) as opened:
        with once(lambda: change(archive)) as progress:
            # A stream with another end can't be told from one that was never whole.
            kinds = (SourceChanged, BadSource) if change in (grow, halve) else SourceChanged
            with pytest.raises(kinds, match=str(archive)) as raised:
                add_one(opened, archive, progress)
        assert raised.value.exit_code == 4 and not any(opened.layout.staging.iterdir())
    is_whole(store, BEFORE, waste=False)


# Does something when the first bytes of a file are read, by the one thread that reads.
_WHILE_READING = """
import errno, os, sys
from icefloe import cli
preadv, path, done = os.preadv, sys.argv[1], []
def read(fd, buffers, offset, flags=0):
    if os.path.samestat(os.fstat(fd), status) and not done:
        done.append(True)
        {what}
    return preadv(fd, buffers, offset, flags)
status, os.preadv = os.stat(path), read
os.environ["ICEFLOE_STORE_WORKERS"] = "1"
cli.main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("os.truncate(path, 4096)", 4),
        ("os.unlink(path)", 4),
        ("raise OSError(errno.EIO, 'bad sector')", 3),
    ],
)
@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["", "json"])
def test_what_the_command_says(
    store: Path, tmp_path: Path, what: str, code: int, as_json: Sequence[str]
) -> None:
    """The exit code and the one line, naming the file."""
    small_store.write_tree(tmp_path / "x", NEW)
    pages, words = tmp_path / "x/pages-1.img", ("--store", store, "add", tmp_path / "x", "x")
    fails(run_script(_WHILE_READING.format(what=what), pages, *words, *as_json), code, pages)
    is_whole(store, BEFORE, waste=False)


def test_a_file_becomes_a_fifo(store: Path, tmp_path: Path) -> None:
    """Opening it must not wait for somebody who writes: the store stays locked meanwhile."""
    root = tmp_path / "dump"
    dump(root)
    place = repr(str(root / "z-small"))
    script = _WHILE_READING.format(what=f"os.unlink({place}); os.mkfifo({place})")
    try:
        words = ("--store", store, "add", root, "x")
        ended = run_script(script, root / "pages-1.img", *words, seconds=5)
    except subprocess.TimeoutExpired:
        pytest.fail("add hangs, and holds the store")
    fails(ended, 4, root / "z-small")
    is_whole(store, BEFORE, waste=False)


# --- sources that are none ----------------------------------------------------------------------


def test_unreadable_parts(store: Path, tmp_path: Path) -> None:
    """A folder inside, one above, a file of the parent, an archive: each is named."""
    root = tmp_path / "above/dump"
    dump(root)
    archive = pack(root, tmp_path / "x.tar", "")
    for place, mode, source in (
        (root / "sub", 0o755, root),
        (root.with_name("first") / "core.img", 0o644, root),
        (archive, 0o644, archive),
        (tmp_path / "above", 0o755, root),
    ):
        place.chmod(0)
        named = source if place == tmp_path / "above" else place
        fails(icefloe(store, "add", source, "x", "--json", weak=True), 3, named)
        place.chmod(mode)
    is_whole(store, BEFORE, waste=False)
    works(icefloe(store, "add", root, "x", weak=True))


def add_in_time(store: Path, source: Path) -> Ended:
    """An `add` that must not hang."""
    process = start(store, "add", source, "x")
    try:
        out, err = process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        pytest.fail(f"add {source} hangs")
    finally:
        process.kill()
        process.communicate()
    return Ended(process.returncode, out, err)


def test_a_fifo_is_no_checkpoint(store: Path, tmp_path: Path) -> None:
    """Nobody writes into it, so that reading it would never end."""
    os.mkfifo(tmp_path / "fifo")
    ended = add_in_time(store, tmp_path / "fifo")
    assert ended.code in (3, 4)
    fails(ended, ended.code, tmp_path / "fifo")


def test_nodes_are_no_checkpoints(store: Path, tmp_path: Path) -> None:
    """A socket and devices: none of them is opened."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    for source in (tmp_path / "socket", Path("/dev/null"), Path("/dev/zero")):
        fails(add_in_time(store, source), 3, source)
    is_whole(store, BEFORE, waste=False)


def test_nodes_in_a_checkpoint(store: Path, tmp_path: Path) -> None:
    """They are stored as what they are, and nobody waits for their bytes."""
    root, out = tmp_path / "x", tmp_path / "out"
    root.mkdir()
    (root / "pages-1.img").write_bytes(NOISE[2])
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(root / "socket"))
    works(add_in_time(store, root))
    works(icefloe(store, "export", "x", out))
    assert stat.S_ISFIFO((out / "fifo").stat().st_mode)
    assert stat.S_ISSOCK((out / "socket").stat().st_mode)
    assert (out / "pages-1.img").read_bytes() == NOISE[2]


@pytest.mark.parametrize("name", ["", "Upper", "a:b:c", ":b", "../a", "@12345678"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    """Before anything is read or made."""
    ended = icefloe(tmp_path / "store", "add", tmp_path / "nowhere", name)
    fails(ended, 2, repr(name))
    assert not (tmp_path / "store").exists()


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    """An entry without bytes."""
    info = tarfile.TarInfo(name)
    info.type = kind
    return info


def hostile(folder: Path) -> Iterator[Path]:
    """Archives that must be refused."""
    for i, name in enumerate(("../evil", "/etc/evil", "a/../../evil")):
        with tarfile.open(folder / f"{i}.tar", "w") as tar:
            tar.addfile(member(name))
        yield folder / f"{i}.tar"
    small_store.write_tree(folder / "x", NEW)
    for kind in ("", ".gz", ".zst"):
        whole = pack(folder / "x", folder / "whole", kind)
        cut = folder / f"cut.tar{kind}"
        cut.write_bytes(whole.read_bytes()[: 90 * 1024])
        yield cut


def test_archives_that_are_refused(store: Path, tmp_path: Path) -> None:
    """Those that lead out, and those that were cut off."""
    for archive in hostile(tmp_path):
        fails(icefloe(store, "add", archive, "x", "--json"), 4, archive)
        is_whole(store, BEFORE, waste=False)


def test_an_archive_with_a_device(store: Path, tmp_path: Path) -> None:
    """Stored; only who may make devices gets it back, and a refusal leaves nothing behind."""
    device = member("null", tarfile.CHRTYPE)
    device.devmajor, device.devminor = 1, 3
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(device)
    works(icefloe(store, "add", tmp_path / "x.tar", "x"))
    ended = icefloe(store, "export", "x", tmp_path / "out")
    if ended.code:
        fails(ended, 8, tmp_path / "out")
        assert not any(path for path in tmp_path.iterdir() if "out" in path.name)
    else:
        made = (tmp_path / "out/null").stat()
        assert stat.S_ISCHR(made.st_mode) and made.st_rdev == os.makedev(1, 3)


@pytest.mark.parametrize("target", ["../gone", "parent", ".", "../b", "inventory.img"])
def test_parents_that_are_none(store: Path, tmp_path: Path, target: str) -> None:
    """One that is gone, a link to itself, the dump itself, one that leads back, a file."""
    if target == "inventory.img":
        target = "../b/inventory.img"
    for name in ("a", "b"):
        small_store.write_tree(tmp_path / name, {"inventory.img": b"i"})
    (tmp_path / "a/parent").symlink_to(target)
    (tmp_path / "b/parent").symlink_to("../a")
    fails(icefloe(store, "add", tmp_path / "a", "x"), 4, "parent")
    is_whole(store, BEFORE, waste=False)


# --- interrupts ---------------------------------------------------------------------------------

# Runs a command on copies of a store, interrupted at its first step, at its second, and so on.
_INTERRUPTED = """
import os, shutil, signal, sys, threading
from pathlib import Path
import icefloe.capture.add, icefloe.gc.removal, icefloe.gc.sweep
from icefloe import cli, durable
template, folder, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]

def run(number):
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{number}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), fd)
    lock, steps = threading.Lock(), []
    def hook(operation, path):
        with lock:
            steps.append(operation)
            if len(steps) != number:
                return
            (folder / f"{number}.reached").write_text(operation)
        os.kill(os.getpid(), signal.SIGINT)
    durable.hook = hook
    try:
        cli.main(["--store", str(folder / str(number)), *words])
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code)

last, reached = 0, True
while reached:
    children = {}
    for number in range(last + 1, last + 5):
        shutil.copytree(template, folder / str(number))
        children[number] = os.fork()
        if not children[number]:
            try:
                run(number)
            finally:
                os._exit(99)
    for last, child in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (folder / f"{last}.code").write_text(str(code))
        reached = (folder / f"{last}.reached").exists()
"""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """A store after a command that was interrupted in it."""

    store: Path
    step: str
    ended: Ended


def interrupts(template: Path, folder: Path, command: str) -> list[Interrupt]:
    """A command interrupted at each of its steps."""
    tree = folder / "tree"
    small_store.write_tree(tree, NEW)
    words = {"add": [str(tree), "new"], "tag": ["kept", "too"], "rm": ["kept"], "gc": []}[command]
    ended = run_script(_INTERRUPTED, template, folder, command, *words)
    assert ended == Ended(0, "", "")
    found: list[Interrupt] = []
    for number in count(1):
        at = {name: folder / f"{number}.{name}" for name in ("reached", "code", "out", "err")}
        code = int(at["code"].read_text())
        if not at["reached"].exists():
            assert code == 0, "the last one is not interrupted"
            return found
        ended = Ended(code, at["out"].read_text(), at["err"].read_text())
        found.append(Interrupt(folder / str(number), at["reached"].read_text(), ended))
    raise AssertionError


@pytest.mark.parametrize("command", ["add", "rm", "gc"])
def test_interrupted_at_each_step(template: Path, tmp_path: Path, command: str) -> None:
    """One line and 130; the change is made or it isn't, and a `gc` later nothing is left of it."""
    found = interrupts(template, tmp_path, command)
    assert {"write", "fsync done", "catalog commit"} <= {i.step for i in found}
    for interrupt in found:
        assert interrupt.ended.code == 130 and interrupt.ended.out == "", interrupt
        assert re.fullmatch(r"icefloe: interrupted: .+\n", interrupt.ended.err.lstrip("\n"))
        seen = names(interrupt.store)
        assert seen in (set(BEFORE), set(AFTER[command])), interrupt
        images = AFTER[command] if seen == set(AFTER[command]) else BEFORE
        is_whole(interrupt.store, images)
        with open_store(interrupt.store, write=True) as opened:
            collect(opened, GcOptions())
        is_whole(interrupt.store, images, waste=False)


def test_an_interrupted_command_tells_the_truth(template: Path, tmp_path: Path) -> None:
    """Where it says that nothing was changed, nothing was."""
    lies = [
        interrupt.step
        for interrupt in interrupts(template, tmp_path, "rm")
        if "nothing was changed" in interrupt.ended.err and names(interrupt.store) != set(BEFORE)
    ]
    assert not lies


# Sends a signal to itself, once, when the first bytes are written out.
_WHILE_WRITING = """
import contextlib, os, sys
from icefloe import cli
pwrite, signals = os.pwrite, [int(sys.argv[1])]
os.environ["TMPDIR"] = sys.argv[2]  # a killed reader leaves its links there
def write(fd, raw, position):
    with contextlib.suppress(IndexError):
        os.kill(os.getpid(), signals.pop())
    return pwrite(fd, raw, position)
os.pwrite = write
cli.main(sys.argv[3:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_export_is_interrupted(store: Path, tmp_path: Path, number: signal.Signals) -> None:
    """No half image has the name of a whole one; an interrupt leaves nothing at all."""
    (tmp_path / "place").mkdir()
    out = tmp_path / "place/out"
    words = (str(int(number)), tmp_path, "--store", store, "export", "kept", out)
    ended = run_script(_WHILE_WRITING, *words)
    left = os.listdir(out.parent)
    if number is signal.SIGINT:
        assert (ended.code, ended.out, left) == (130, "", [])
        assert re.fullmatch(r"icefloe: interrupted: .+\n", ended.err.lstrip("\n"))
    else:
        assert ended.code and all(name.endswith(".partial") for name in left)
    works(icefloe(store, "export", "kept", out))
    assert small_store.read_tree(out) == KEPT


def test_interrupted_while_waiting(store: Path) -> None:
    """Who waits for the store can be stopped, and the one that has it notices nothing."""
    lock = Lock(store / "lock", write=True)
    process = start(store, "gc")
    try:
        deadline = time.monotonic() + 20
        while not waits_for(process.pid, store / "lock"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=4)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (130, "")
    assert re.fullmatch(r"icefloe: interrupted: .+\n", err.lstrip("\n"))
    lock.release()
    is_whole(store, BEFORE, waste=False)


def waits_for(process: int, path: Path) -> bool:
    """Whether a process has that file open."""
    folder = Path(f"/proc/{process}/fd")
    try:
        return any(os.readlink(link) == str(path) for link in folder.iterdir())
    except FileNotFoundError:  # a file was closed meanwhile
        return False


# --- other processes ----------------------------------------------------------------------------

_IMPATIENT = """
import functools, sys
import icefloe.catalog
icefloe.catalog.open_store = functools.partial(icefloe.catalog.open_store, wait_seconds=0.05)
from icefloe import cli
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("write", [True, False], ids=["writer", "reader"])
def test_busy_for_every_command(store: Path, tmp_path: Path, write: bool) -> None:
    """A writer keeps everybody out, a reader only writers; each is told whom it waits for."""
    small_store.write_tree(tmp_path / "x", NEW)
    readers = [["ls"], ["check"], ["export", "kept", str(tmp_path / "out")]]
    writers = [["add", str(tmp_path / "x"), "x"], ["tag", "kept", "k"], ["rm", "kept"], ["gc"]]
    writers.append(["check", "--repair"])
    lock = Lock(store / "lock", write=write)
    commands = [*readers, *writers]
    with ThreadPoolExecutor(2) as pool:
        run = partial(run_script, _IMPATIENT, "--store", store)
        results = list(pool.map(lambda words: run(*words, "--json"), commands))
    for words, ended in zip(commands, results, strict=True):
        if write or words in writers:
            fails(ended, 6, f"process {os.getpid()}")
        else:
            works(ended)
    lock.release()
    assert (tmp_path / "out").exists() != write
    is_whole(store, BEFORE, waste=False)


def test_many_at_once(store: Path, tmp_path: Path) -> None:
    """Adds, a removal and a collection one after the other, in whatever order."""
    trees: dict[str, Tree] = {f"n{i}": {"x": NOISE[2] + b"%d" % i, "y": NOISE[i]} for i in (0, 1)}
    for name, tree in trees.items():
        small_store.write_tree(tmp_path / name, tree)
    commands = [["add", str(tmp_path / name), name] for name in trees]
    running = [start(store, *words) for words in [*commands, ["rm", "kept"], ["gc"]]]
    for process in running:
        out, err = process.communicate(timeout=60)
        works(Ended(process.returncode, out, err))
    works(icefloe(store, "gc"))
    is_whole(store, trees, waste=False)


# --- every error --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "ls --frobnicate"),
        (2, "gc --grace soon"),
        (2, "export kept /proc"),
        (3, "show none"),
        (3, "rm kept none"),
        (3, "export none {folder}/out"),
        (3, "add {folder}/nowhere x"),
        (4, "add {folder}/text x"),
        (8, "export kept {folder}/text/out"),
    ],
)
def test_one_line_with_json_too(store: Path, tmp_path: Path, code: int, words: str) -> None:
    """On standard error, and standard output stays empty."""
    (tmp_path / "text").write_bytes(b"text")
    command = words.format(folder=tmp_path).split()
    fails(icefloe(store, *command, "--json"), code, "icefloe: ")
    is_whole(store, BEFORE, waste=False)
