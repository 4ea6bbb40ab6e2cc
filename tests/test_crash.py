"""Every command, killed at every step: what was committed stays, and the rest is waste.

docs/invariants.md says what must hold. Here each is looked at after each step of each command, on
a machine that runs on, on one whose power failed, and on one that lost its catalog.
"""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from pathlib import Path

import crashing
import pytest
import slow_chunker
import small_store
from click.testing import CliRunner
from crash_child import PACK_BYTES
from crashing import Loss, Scene, State
from small_store import KIB, Tree, text

from icefloe import cli
from icefloe.catalog import LocalStore, open_store
from icefloe.errors import ImageNotFound
from icefloe.gc.audit import check, repair
from icefloe.gc.removal import remove
from icefloe.gc.sweep import GcOptions, collect
from icefloe.ids import BlockId, parse_name
from icefloe.store import writer

# More steps than any of these commands has: a command that never ends is a bug of the test.
MOST_STEPS = 400


@pytest.fixture(scope="module", autouse=True)
def small_packs() -> Iterator[None]:
    """What runs in this process makes packs as small as what runs in a child."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.PackWriter.__init__, "__defaults__", (PACK_BYTES,))
        yield


@pytest.fixture(scope="module")
def servers() -> Iterator[crashing.Servers]:
    with crashing.servers() as started:
        yield started


def noise(length: int, seed: int) -> bytes:
    """Bytes that don't compress, so that they fill packs."""
    return slow_chunker.noise(length, seed)


SHARED = noise(100 * KIB, 1)
FIRST: Tree = {"pages-1.img": small_store.pages([SHARED, text(90 * KIB, 1)]), "core.img": b"c" * 9}
SECOND: Tree = {"pages-1.img": small_store.pages([SHARED, noise(70 * KIB, 2)]), "fs.img": b"f" * 99}
# Lives with SECOND in packs that are rewritten when FADING goes, and alone in packs that vanish.
FADING: Tree = {
    "a": noise(80 * KIB, 3),
    "pages-1.img": SECOND["pages-1.img"],
    "z": noise(300 * KIB, 4),
}
THIRD: Tree = {"pages-1.img": small_store.pages([SHARED, noise(180 * KIB, 5)]), "new.img": b"n"}


def prepare(root: Path) -> State:
    """Two images that share blocks, and what `gc` removes, rewrites and clears away."""
    with open_store(root, write=True, create=True) as store:
        small_store.add(store, FIRST, "first")
        small_store.add(store, FADING, "fading")
        small_store.add(store, SECOND, "second")
        remove(store, [parse_name("fading")])
    return crashing.read_state(root)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The store that each crash begins with, and what it holds; a checkpoint to add."""

    root: Path
    state: State
    source: Path


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    with crashing.fast_folder() as folder:
        small_store.write_tree(folder / "third", THIRD)
        yield Prepared(folder / "store", prepare(folder / "store"), folder / "third")


@pytest.fixture
def folder() -> Iterator[Path]:
    with crashing.fast_folder() as folder:
        yield folder


def audit_problems(store: LocalStore) -> list[str]:
    """Damage, as lines; waste is left out."""
    audit = check(store, read_data=True)
    damage = [f"{p.kind}: {p.what}" for p in audit.problems if not p.waste]
    assert audit.ok == (not damage)
    return damage


@dataclass(frozen=True, slots=True)
class Trial:
    """A command, the name that it is about, and what that name may point at afterwards."""

    arguments: tuple[str, ...]
    name: str | None
    before: State
    known: dict[BlockId, Tree]
    """Every image that may ever be in the store."""

    def judge(self, root: Path, server: crashing.Server) -> None:
        """After the crash: what was committed is whole, and the rest is waste."""
        if not (root / "format").exists():
            assert not self.before.images, "the whole store is gone"
            return
        assert server.run(root, ["ls"]) == 0
        with open_store(root, write=False, wait_seconds=0.0) as store:
            assert audit_problems(store) == []
            after = crashing.state_of(store)
        for image, tree in after.images.items():
            assert tree == self.known[image], "an image is not what was stored"
        others = {n: i for n, i in after.names.items() if n != self.name}
        assert others == {n: i for n, i in self.before.names.items() if n != self.name}
        assert set(after.names.values()) <= set(after.images), "a name points nowhere"
        if self.arguments[0] != "rm":
            assert set(self.before.images) <= set(after.images), "an image is gone"

    def repeat(self, root: Path, server: crashing.Server) -> None:
        """The same command once more; what is removed already can't be found again."""
        code = server.run(root, self.arguments)
        done_already = self.arguments[0] == "rm" and code == ImageNotFound.exit_code
        assert code == 0 or done_already, f"repeated, it ends with {code}"


def judge_end(root: Path, expected: State, server: crashing.Server) -> None:
    """After the repeated command, `gc` leaves nothing that `check` could find fault with."""
    assert server.run(root, ["gc"]) == 0
    with open_store(root, write=False) as store:
        assert check(store, read_data=True).problems == ()
        assert crashing.state_of(store) == expected


def end_state(arguments: Sequence[str], prepared_root: Path, folder: Path) -> State:
    """What the command comes to when nothing gets in its way."""
    root = folder / "undisturbed"
    if prepared_root.exists():
        shutil.copytree(prepared_root, root)
    result = CliRunner().invoke(cli.cli, ["--store", str(root), *arguments])
    assert result.exception is None
    return crashing.read_state(root)


COMMANDS = {
    "add": (("add", "{source}", "third"), "third:latest"),
    "add in place of another": (("add", "{source}", "second"), "second:latest"),
    "tag": (("tag", "first", "second"), "second:latest"),
    "rm": (("rm", "first"), "first:latest"),
    "gc": (("gc",), None),
    "repack": (("gc", "--repack", "--policy", "fast"), None),
}


CASES = [
    *((command, loss) for command in ("add", "tag", "rm", "gc") for loss in Loss),
    ("add in place of another", Loss.UNSYNCED),
    ("repack", Loss.UNSYNCED),
]


@pytest.mark.parametrize(
    ("command", "loss"), CASES, ids=lambda value: getattr(value, "name", value)
)
def test_killed(
    command: str, loss: Loss, prepared: Prepared, servers: crashing.Servers, folder: Path
) -> None:
    """The store held two images and much to collect."""
    play(command, loss, prepared, servers, folder)


@pytest.mark.parametrize("loss", [Loss.NOTHING, Loss.UNSYNCED], ids=lambda loss: loss.name)
def test_killed_while_making_the_store(
    loss: Loss, prepared: Prepared, servers: crashing.Servers, folder: Path
) -> None:
    """There was no store before."""
    nothing = Prepared(folder / "no store", State({}, {}), prepared.source)
    play("add", loss, nothing, servers, folder)


def play(
    command: str, loss: Loss, prepared: Prepared, servers: crashing.Servers, folder: Path
) -> None:
    """Kills the command at its first step, its second, and so on until it gets through."""
    pattern, name = COMMANDS[command]
    arguments = tuple(word.format(source=prepared.source) for word in pattern)
    expected = end_state(arguments, prepared.root, folder)
    known = prepared.state.images | expected.images
    trial = Trial(arguments, name, prepared.state, known)
    play = Play(trial, expected, prepared.root, folder, loss)
    with servers.one() as server:
        steps = play.scene(0, server).crash(arguments, MOST_STEPS, loss).steps
    assert 3 < steps < MOST_STEPS
    results = [servers.pool.submit(play.round, step, servers) for step in range(1, steps + 1)]
    failed = wait(results, return_when=FIRST_EXCEPTION)
    for result in results:
        result.cancel()
    wait(results)
    for done in failed.done:
        done.result()


@dataclass(frozen=True, slots=True)
class Play:
    """One command and one kind of loss, again and again."""

    trial: Trial
    expected: State
    prepared: Path
    folder: Path
    loss: Loss

    def scene(self, step: int, server: crashing.Server) -> Scene:
        """Every crash has its own."""
        return Scene(self.prepared, self.folder / f"step-{step}", server)

    def round(self, step: int, servers: crashing.Servers) -> None:
        """Kills the command at this step and looks at what is left."""
        with servers.one() as server:
            scene = self.scene(step, server)
            crash = scene.crash(self.trial.arguments, step, self.loss)
            whole = crash.ends_a_step or step == 1
            if whole or self.loss is Loss.NOTHING:
                try:
                    self._judge(scene.store, server, whole)
                except Exception as error:
                    error.add_note(f"killed at step {step}, {crash.last}; {self.loss.value}")
                    raise
            scene.clear()

    def _judge(self, store: Path, server: crashing.Server, whole: bool) -> None:
        """Between two steps nothing happens to the disk: there, a look is enough."""
        self.trial.judge(store, server)
        if not whole:
            return
        self.trial.repeat(store, server)
        judge_end(store, self.expected, server)


STORY = (
    ("add", "{first}", "first"),
    ("add", "{fading}", "fading"),
    ("add", "{second}", "second"),
    ("rm", "fading"),
    ("gc",),
    ("add", "{fading}", "fading"),
    ("tag", "second", "kept"),
    ("rm", "second", "first"),
    ("gc",),
    ("add", "{first}", "again"),
    ("add", "{second}", "fading"),
    ("gc",),
)
"""Packs come, are rewritten, vanish, and come back under the same id."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """The store after a command, and what it holds."""

    command: str
    store: Path
    state: State


@pytest.fixture(scope="module")
def chapters(servers: crashing.Servers) -> Iterator[list[Chapter]]:
    """Copies of the store after each command of the story."""
    trees = {"first": FIRST, "second": SECOND, "fading": FADING}
    with crashing.fast_folder() as folder, servers.one() as server:
        for name, tree in trees.items():
            small_store.write_tree(folder / name, tree)
        told = []
        for i, words in enumerate(STORY):
            arguments = [word.format(**{name: folder / name for name in trees}) for word in words]
            assert server.run(folder / "store", arguments) == 0
            copy = folder / f"chapter-{i}"
            shutil.copytree(folder / "store", copy)
            told.append(Chapter(" ".join(words), copy, crashing.read_state(copy)))
        yield told


def judge_recovered(root: Path, expected: State, server: crashing.Server) -> None:
    """The next command, though it only reads, finds everything as it was, and nothing more."""
    assert server.run(root, ["ls"]) == 0
    with open_store(root, write=False) as store:
        assert check(store, read_data=True).problems == ()
        assert crashing.state_of(store) == expected


@pytest.mark.parametrize("end", range(len(STORY)))
def test_catalog_is_lost(
    end: int, chapters: list[Chapter], servers: crashing.Servers, folder: Path
) -> None:
    """It is rebuilt from packs and journal; what was removed does not come back."""
    shutil.copytree(chapters[end].store, folder / "store")
    shutil.rmtree(folder / "store/catalog")
    with servers.one() as server:
        judge_recovered(folder / "store", chapters[end].state, server)


@pytest.mark.parametrize("end", range(1, len(STORY)))
def test_catalog_falls_back(
    end: int, chapters: list[Chapter], servers: crashing.Servers, folder: Path
) -> None:
    """Any older state of the catalog is brought up to the journal."""
    with servers.one() as server:
        for older in chapters[:end]:
            root = folder / older.store.name
            shutil.copytree(chapters[end].store, root)
            shutil.rmtree(root / "catalog")
            shutil.copytree(older.store / "catalog", root / "catalog")
            try:
                judge_recovered(root, chapters[end].state, server)
            except AssertionError as error:
                error.add_note(
                    f"catalog of after {older.command!r}, {chapters[end].command!r} next"
                )
                raise


def test_rebuilt_in_a_process_that_lives_on(chapters: list[Chapter], folder: Path) -> None:
    """Whoever rebuilt the catalog can close it and open it again."""
    shutil.copytree(chapters[4].store, folder / "store")
    shutil.rmtree(folder / "store/catalog")
    for _ in range(2):
        with open_store(folder / "store", write=True) as store:
            assert set(store.catalog.names()) == set(chapters[4].state.names)


def test_gc_clears_an_unfinished_line_away(prepared: Prepared, folder: Path) -> None:
    """What `check` calls waste, the next `gc` heals, also when it has nothing else to do."""
    shutil.copytree(prepared.root, folder / "store")
    root = folder / "store"
    with open_store(root, write=True) as store:
        collect(store, GcOptions())
    with (root / "journal").open("ab") as journal:
        journal.write(b"half a li")
    with open_store(root, write=True) as store:
        assert [p.kind for p in check(store, read_data=False).problems] == ["journal-torn"]
        collect(store, GcOptions())
        assert check(store, read_data=True).problems == ()


def test_repair_after_images_were_lost(chapters: list[Chapter], folder: Path) -> None:
    """A rebuild that finds an image damaged doesn't keep `check --repair` from working."""
    root = folder / "store"
    shutil.copytree(chapters[1].store, root)
    shutil.rmtree(root / "catalog")
    victim = max((path for path in root.glob("packs/??/*")), key=lambda path: path.stat().st_size)
    victim.unlink()
    with open_store(root, write=True, repair=True) as store:
        assert store.lost
        audit = check(store, read_data=True)
        assert not audit.ok
        repair(store, audit)
