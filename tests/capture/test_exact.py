"""Page-exact deduplication from end to end: whatever became of a file, it comes out as it was."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import small_store
from endings import Ended, fails
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numbered import (
    FILE,
    MIB_PAGES,
    PAGE,
    Numbers,
    add,
    all_is_well,
    amplification,
    exports,
    joined,
    tree,
    within_budget,
)
from small_store import Tree

from icefloe.capture.parent import MAX_AMPLIFICATION
from icefloe.catalog import LocalStore, open_store
from icefloe.cli import main
from icefloe.errors import Corrupt, ImageNotFound
from icefloe.gc.audit import check
from icefloe.gc.recompress import recompress
from icefloe.gc.removal import remove
from icefloe.gc.sweep import GcOptions, collect
from icefloe.ids import BlockId, IdPrefix, parse_name
from icefloe.store.policies import PolicyName


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    """An empty store."""
    with open_store(tmp_path / "store", write=True, create=True) as opened:
        yield opened


def blocks_of(store: LocalStore, image: BlockId) -> set[BlockId]:
    """Those that an image names."""
    return set(store.manifest(image).block_ids())


def changed(numbers: Sequence[int], share: float, seed: int) -> Numbers:
    """So many of the pages are others."""
    rng = random.Random(seed)
    return [seed * 1_000_000 + i if rng.random() < share else n for i, n in enumerate(numbers)]


def inserted(numbers: Sequence[int], at: int, count: int, seed: int) -> Numbers:
    """New pages at a place."""
    first = seed * 1_000_000 + 500_000
    return [*numbers[:at], *range(first, first + count), *numbers[at:]]


# --- any history --------------------------------------------------------------------------------

Edit = Callable[[Numbers, random.Random], Numbers]


def some_part(numbers: Numbers, rng: random.Random) -> tuple[int, int]:
    """Pages [low, high), a few or many."""
    low = rng.randrange(len(numbers) + 1)
    return low, min(len(numbers), low + rng.choice([1, 3, 20, 200]))


def change_few(numbers: Numbers, rng: random.Random) -> Numbers:
    """Single pages are new."""
    chosen = {rng.randrange(len(numbers)) for _ in range(rng.choice([1, 5, 60]))} if numbers else ()
    return [rng.randrange(1 << 40) + 1 if i in chosen else n for i, n in enumerate(numbers)]


def insert(numbers: Numbers, rng: random.Random) -> Numbers:
    """New pages in between."""
    low, high = some_part(numbers, rng)
    new = [rng.randrange(1 << 40) + 1 for _ in range(high - low)]
    return numbers[:low] + new + numbers[low:]


def leave_out(numbers: Numbers, rng: random.Random) -> Numbers:
    """Pages go."""
    low, high = some_part(numbers, rng)
    return numbers[:low] + numbers[high:]


def make_zero(numbers: Numbers, rng: random.Random) -> Numbers:
    """All of a region, or each second page."""
    low, high = some_part(numbers, rng)
    step = rng.choice([1, 2])
    return [0 if low <= i < high and i % step == 0 else n for i, n in enumerate(numbers)]


def swap(numbers: Numbers, rng: random.Random) -> Numbers:
    """Two regions change places."""
    cuts = sorted(rng.randrange(len(numbers) + 1) for _ in range(3))
    a, b, c = cuts
    return numbers[:a] + numbers[b:c] + numbers[a:b] + numbers[c:]


def repeat(numbers: Numbers, rng: random.Random) -> Numbers:
    """A region once more, or one page many times."""
    low, high = some_part(numbers, rng)
    part = numbers[low:high]
    return numbers[:high] + (part[:1] * 70 if rng.random() < 0.5 else part) + numbers[high:]


def truncate(numbers: Numbers, rng: random.Random) -> Numbers:
    """The end goes, perhaps nearly all."""
    return numbers[: rng.choice([5, 15, 16, 17, len(numbers) // 2])]


def append(numbers: Numbers, rng: random.Random) -> Numbers:
    """More at the end."""
    return numbers + [rng.randrange(1 << 40) + 1 for _ in range(rng.choice([1, 40, 300]))]


EDITS: list[Edit] = [change_few, insert, leave_out, make_zero, swap, repeat, truncate, append]
edits = st.lists(st.sampled_from(EDITS), min_size=1, max_size=4)
tails = st.sampled_from([b"", b"", b"", b"no whole page"])


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.integers(0, 1 << 20),
    st.sampled_from([10, 16, 130, 400]),
    st.lists(st.tuples(edits, tails), min_size=1, max_size=3),
)
def test_any_edits(seed: int, length: int, generations: list[tuple[list[Edit], bytes]]) -> None:
    """Every generation comes out; also when all but the last are gone."""
    rng = random.Random(seed)
    numbers = [rng.randrange(1 << 40) + 1 for _ in range(length)]
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(Path(folder) / "store", write=True, create=True) as store,
    ):
        image = add(store, tree(numbers), "x:0").id
        images = {image: tree(numbers)}
        for i, (script, tail) in enumerate(generations):
            for edit in script:
                numbers = edit(numbers, rng)
            content = tree(numbers, tail)
            image = add(store, content, f"x:{i + 1}").id
            images[image] = content
            within_budget(store, image)
        all_is_well(store, images)
        others = [IdPrefix(other.hex()) for other in images if other != image]
        if others:
            remove(store, others)
        collect(store, GcOptions())
        all_is_well(store, {image: images[image]})


def test_a_file_that_grows_beyond_windows(store: LocalStore) -> None:
    """From a small file, by pages in the middle, over the end of windows."""
    images: dict[BlockId, Tree] = {}
    numbers = list(range(1, 11))
    for generation, length in enumerate([15, 16, 40, 1023, 1024, 1025, 2100]):
        at = len(numbers) // 2
        numbers = inserted(numbers, at, length - len(numbers), generation + 1)
        images[add(store, tree(numbers), f"x:{generation}").id] = tree(numbers)
    all_is_well(store, images)


def test_ten_generations(store: LocalStore) -> None:
    """Each with a few new pages, holes and moves; then the oldest go, one by one."""
    rng = random.Random(1)
    numbers = list(range(1, 1401))
    images: dict[BlockId, Tree] = {}
    read: list[float] = []
    for generation in range(10):
        image = add(store, tree(numbers), f"x:{generation}")
        images[image.id] = tree(numbers)
        read.append(amplification(store.manifest(image.id)))
        numbers = changed(numbers, 0.1, generation + 1)
        for edit in rng.sample([make_zero, swap, insert, leave_out, repeat], 2):
            numbers = edit(numbers, rng)
    all_is_well(store, images)
    names = [f"x:{generation}" for generation in range(10)]
    for first in (0, 4, 7):
        gone = names[first : {0: 4, 4: 7, 7: 9}[first]]
        for name in gone:
            del images[store.catalog.resolve(parse_name(name))]
        remove(store, list(map(parse_name, gone)))
        collect(store, GcOptions())
        all_is_well(store, images)
    assert max(read) <= MAX_AMPLIFICATION


def test_several_files(store: LocalStore) -> None:
    """Each is compared with its own; pages that went to another file come out as well."""
    a, b, c = (list(range(k, k + 300)) for k in (1, 1001, 2001))
    before = {FILE: joined(a), "sub/pages-2.img": joined(b), "x.mem": joined(c), "core.img": b"c"}
    first = add(store, before, "x:0")
    a, b, c = (changed(numbers, 0.05, 7 + i) for i, numbers in enumerate((a, b, c)))
    after = {FILE: joined(a), "sub/pages-2.img": joined(b), "x.mem": joined(c), "core.img": b"d"}
    second = add(store, after, "x:1")
    new = sum(n >= 1_000_000 for n in a + b + c)
    assert second.new_bytes <= 1.25 * new * PAGE
    moved = {FILE: joined(b + a), "pages-7.img": joined(c), "sub/pages-2.img": joined(c + b)}
    third = add(store, moved, "x:2")
    all_is_well(store, {first.id: before, second.id: after, third.id: moved})


def test_a_file_of_another_name(store: LocalStore) -> None:
    """Is compared with nothing, and finds its whole blocks all the same."""
    before, after = tree(range(1, 600)), {"pages-2.img": joined(range(1, 620))}
    images = {add(store, before, "x:0").id: before}
    result = add(store, after, "x:1")
    assert result.new_bytes <= 1 << 20
    all_is_well(store, {**images, result.id: after})


def test_other_kinds_of_the_same_path(store: LocalStore, tmp_path: Path) -> None:
    """A link, a folder or an empty file in its place is no parent."""
    content = tree(range(1, 300))
    folder = {f"{FILE}/core": b"core"}
    empty: Tree = {FILE: b"", "other": b"x"}
    images = {add(store, folder, "x:0").id: folder, add(store, content, "x:1").id: content}
    images[add(store, empty, "y:0").id] = empty
    images[add(store, content, "y:1").id] = content
    images[add(store, {FILE: bytes(PAGE * 100)}, "z:0").id] = {FILE: bytes(PAGE * 100)}
    images[add(store, tree(changed(range(1, 300), 0.1, 1)), "z:1").id] = tree(
        changed(range(1, 300), 0.1, 1)
    )
    all_is_well(store, images)


# --- what it saves ------------------------------------------------------------------------------

LARGE = list(range(1, 16 * MIB_PAGES + 1))


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with an image of 16 MiB, to be copied."""
    root = tmp_path_factory.mktemp("large") / "store"
    with open_store(root, write=True, create=True) as store:
        add(store, tree(LARGE), "x:0")
    return root


@pytest.fixture
def large(large_store: Path, tmp_path: Path) -> Iterator[LocalStore]:
    """With the image x:0 of the pages LARGE."""
    small_store.copy_store(large_store, tmp_path / "copy")
    with open_store(tmp_path / "copy", write=True) as opened:
        yield opened


def optimum(before: Sequence[int], after: Sequence[int]) -> int:
    """Bytes of the pages that are new."""
    return PAGE * len(set(after) - set(before) - {0})


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("insertions", [0, 3])
def test_only_new_pages_are_stored(large: LocalStore, share: float, insertions: int) -> None:
    """Nearly: scattered changes, with a few pages inserted here and there."""
    numbers = changed(LARGE, share, 3)
    rng = random.Random(insertions)
    for i in range(insertions):
        numbers = inserted(numbers, rng.randrange(len(numbers)), (7, 1, 40)[i], i + 10)
    result = add(large, tree(numbers), "x:1")
    exports(large, result.id, tree(numbers))
    within_budget(large, result.id)
    assert result.new_bytes <= 1.25 * optimum(LARGE, numbers)


def test_pages_left_out_cost_little(large: LocalStore) -> None:
    """Most of a window after them is where it was not."""
    numbers = changed(LARGE[:700] + LARGE[760:2900] + LARGE[2903:], 0.1, 5)
    result = add(large, tree(numbers), "x:1")
    exports(large, result.id, tree(numbers))
    assert result.new_bytes <= 1.25 * optimum(LARGE, numbers)


@pytest.mark.parametrize("step", [2, 3, 5])
def test_a_file_of_which_pages_became_zero(large: LocalStore, step: int) -> None:
    """Of each `step` pages one is left: it is not worth reading the whole block."""
    numbers = [n if i % step == 0 else 0 for i, n in enumerate(LARGE)]
    result = add(large, tree(numbers), "x:1")
    exports(large, result.id, tree(numbers))
    within_budget(large, result.id)


def test_new_blocks_pay_once(large: LocalStore) -> None:
    """Blocks that are stored whole must not buy reading for others, twice."""
    numbers = []
    for i, number in enumerate(LARGE):  # all pages of the first quarter are new, 5 of 7 behind it
        numbers.append(9_000_000 + i if i < len(LARGE) // 4 or i % 7 > 1 else number)
    result = add(large, tree(numbers), "x:1", workers=1)
    exports(large, result.id, tree(numbers))
    within_budget(large, result.id)


def test_generations_stay_within_the_budget(large: LocalStore) -> None:
    """However often 30 % of the pages change."""
    numbers = LARGE[: 6 * MIB_PAGES]
    for generation in range(1, 5):
        numbers = changed(numbers, 0.3, generation)
        result = add(large, tree(numbers), f"x:{generation}")
        within_budget(large, result.id)
    exports(large, result.id, tree(numbers))


def test_nothing_similar_is_as_without(store: LocalStore) -> None:
    """The same blocks, even the same image."""
    add(store, tree([*range(1, 1500), *[0] * 20, *range(1500, 1600)]), "x:0")
    content = tree([*range(5001, 6800), *[0] * 40])
    with_parent = add(store, content, "x:1")
    without = add(store, content, "y", "none")
    assert with_parent.id == without.id


def test_zero_pages_alone_are_not_similar(store: LocalStore) -> None:
    """That both have zeros in the same places is no reason to read a block of the other."""
    before = [0 if i % 3 else i + 1 for i in range(900)]
    after = [n and n + 100_000 for n in before]
    first = add(store, tree(before), "x:0")
    second = add(store, tree(after), "x:1")
    assert blocks_of(store, first.id).isdisjoint(blocks_of(store, second.id))
    all_is_well(store, {first.id: tree(before), second.id: tree(after)})


def test_a_small_file_is_a_parent(store: LocalStore) -> None:
    """It lies anywhere in a block with others, and so do pages of what came after it."""
    numbers = list(range(1, 16))
    images: dict[BlockId, Tree] = {}
    costs = []
    for generation in range(4):
        content = {"a.img": b"odd", FILE: joined(numbers)}
        result = add(store, content, f"x:{generation}")
        costs.append(result.new_bytes // PAGE)
        images[result.id] = content
        numbers = inserted(numbers, 4, 9, generation + 1)
    all_is_well(store, images)
    assert costs == [15, 9, 9, 9]


# --- which parent -------------------------------------------------------------------------------

BEFORE = list(range(1, 901))
AFTER = changed(BEFORE, 0.05, 1)
NEW = optimum(BEFORE, AFTER)
LITTLE = 2 * NEW


def test_tags_of_a_name_use_each_other(store: LocalStore) -> None:
    add(store, tree(BEFORE), "worker:step-1")
    second = add(store, tree(AFTER), "worker:step-2")
    assert second.new_bytes <= LITTLE
    all_is_well(store, {second.id: tree(AFTER)})


def test_the_same_name_and_tag(store: LocalStore) -> None:
    """What the name pointed at is what it is compared with."""
    first = add(store, tree(BEFORE), "x")
    second = add(store, tree(AFTER), "x")
    assert second.replaced == first.id and second.new_bytes <= LITTLE
    all_is_well(store, {first.id: tree(BEFORE), second.id: tree(AFTER)})


def test_the_latest_of_a_name(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tags say."""
    for second, (tag, first) in enumerate([("z", 10_001), ("a", 20_001), ("m", 1), ("m.", 30_001)]):
        monkeypatch.setattr("time.time", lambda second=second: 1_800_000_000.0 + second)
        add(store, tree(range(first, first + 900)), f"x:{tag}")
    assert add(store, tree(changed(range(30_001, 30_901), 0.05, 1)), "x:b").new_bytes <= LITTLE


def test_a_parent_by_name_by_id_and_none(store: LocalStore) -> None:
    first = add(store, tree(BEFORE), "x:1")
    for number, parent in enumerate(["x:1", f"@{first.id.hex()[:8]}", f"@{first.id.hex()}"]):
        after = changed(BEFORE, 0.05, number + 1)
        result = add(store, tree(after), f"y{number}", parent)
        assert result.new_bytes <= LITTLE
    none = add(store, tree(changed(BEFORE, 0.05, 9)), "x:2", "none")
    assert none.new_bytes > 5 * LITTLE


def test_an_image_beside_itself(store: LocalStore) -> None:
    """Nothing is new; and nothing changes when the parent is of pieces itself."""
    first, second = add(store, tree(BEFORE), "x:1"), add(store, tree(AFTER), "x:2")
    again = add(store, tree(AFTER), "x:3")
    assert again.new_bytes == 0
    assert add(store, tree(BEFORE), "x:4", f"@{second.id.hex()}").id == first.id
    all_is_well(store, {first.id: tree(BEFORE), second.id: tree(AFTER), again.id: tree(AFTER)})


def test_an_unknown_parent_changes_nothing(store: LocalStore) -> None:
    add(store, tree(BEFORE), "x:1")
    for parent in ("y", "x:2", "@00000000"):
        with pytest.raises(ImageNotFound):
            add(store, tree(AFTER), "x:1", parent)
    assert list(store.catalog.names()) == ["x:1"]
    assert check(store, read_data=True).problems == ()


@pytest.mark.parametrize("workers", [1, 5])
def test_any_number_of_workers(store: LocalStore, workers: int) -> None:
    """Ids may differ; what comes out does not."""
    numbers = list(range(1, 3 * MIB_PAGES * 4 + 100))
    before = {FILE: joined(numbers), "pages-2.img": joined(numbers[:700][::-1])}
    numbers = inserted(changed(numbers, 0.1, 1), 1500, 33, 2)
    after = {FILE: joined(numbers), "pages-2.img": joined(changed(numbers[:700], 0.5, 3))}
    first = add(store, before, "x:1", workers=workers)
    second = add(store, after, "x:2", workers=workers)
    within_budget(store, second.id)
    all_is_well(store, {first.id: before, second.id: after})


# --- damage -------------------------------------------------------------------------------------


def some_of_each_block(store: LocalStore, image: BlockId, numbers: Numbers) -> Numbers:
    """One page of every block of an image of one file is another."""
    manifest = store.manifest(image)
    ends = np.cumsum(manifest.extents["length"], dtype=np.int64) // PAGE
    numbers = list(numbers)
    for end in ends.tolist():
        numbers[end - 1] += 50_000_000
    return numbers


def damage(store: LocalStore, block: BlockId) -> None:
    """One bit of what is stored."""
    (where,) = store.catalog.locations([block])
    with store.layout.pack(where.pack).open("r+b") as pack:
        pack.seek(where.offset + where.stored // 2)
        (byte,) = pack.read(1)
        pack.seek(-1, os.SEEK_CUR)
        pack.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("which", [0, 3, -1])
def test_a_damaged_block_of_the_parent(store: LocalStore, which: int) -> None:
    """It is pointed at no more."""
    first = add(store, tree(BEFORE), "x:1")
    numbers = some_of_each_block(store, first.id, BEFORE)
    bad = store.manifest(first.id).block_ids()[which]
    damage(store, bad)
    second = add(store, tree(numbers), "x:2")
    assert bad not in blocks_of(store, second.id)
    exports(store, second.id, tree(numbers))
    with pytest.raises(Corrupt):
        small_store.exported(store, first.id)


@pytest.mark.parametrize("name", ["x:2", "y"])
def test_a_missing_pack_of_the_parent(store: LocalStore, name: str) -> None:
    """One of two: what the other holds may be used."""
    first = add(store, tree(BEFORE), "x:0")
    half = add(store, tree([*BEFORE, *range(5001, 5301)]), "x:1")
    numbers = some_of_each_block(store, half.id, [*BEFORE, *range(5001, 5301)])
    (where,) = store.catalog.locations([store.manifest(first.id).block_ids()[0]])
    lost = store.layout.pack(where.pack)
    mine = {
        at.id
        for at in store.catalog.locations(store.manifest(half.id).block_ids())
        if at.pack == where.pack
    }
    assert mine
    lost.rename(lost.with_name("lost"))
    second = add(store, tree(numbers), name, f"@{half.id.hex()}")
    assert mine.isdisjoint(blocks_of(store, second.id))
    same = small_store.exported(store, second.id) == tree(numbers)
    assert same


@pytest.mark.parametrize("is_missing", [False, True])
def test_the_latest_image_cannot_be_read(store: LocalStore, is_missing: bool) -> None:
    """Nobody asked for it: what was lost earlier is no reason to lose this one, too."""
    first = add(store, tree(BEFORE), "x:1")
    if is_missing:
        (where,) = store.catalog.locations([first.id])
        store.layout.pack(where.pack).unlink()
    else:
        damage(store, first.id)
    numbers = changed(BEFORE, 1.0, 1)
    second = add(store, tree(numbers), "x:2")
    same = small_store.exported(store, second.id) == tree(numbers)
    assert same


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ended]:
    """Runs `icefloe` on a store with the image w:step-1, beside the folders before and after."""
    for name in [name for name in os.environ if name.startswith("ICEFLOE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    small_store.write_tree(tmp_path / "before", tree(BEFORE))
    small_store.write_tree(tmp_path / "after", tree(AFTER))

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        code = 0
        try:
            main(["--store", str(tmp_path / "store"), *arguments])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    assert run("add", "before", "w:step-1").code == 0
    return run


def comes_out(line: Callable[..., Ended], name: str) -> None:
    """AFTER, also when its parent is gone."""
    assert line("export", name, "out").code == 0
    assert line("rm", "w:step-1").code == 0
    assert line("gc", "--grace", "0").code == 0
    assert line("check", "--read-data").code == 0
    assert line("export", name, "again").code == 0
    for out in ("out", "again"):
        same = small_store.read_tree(Path(out)) == tree(AFTER)
        assert same


def new_bytes(ended: Ended) -> int:
    """What --json says."""
    assert ended.code == 0, ended
    return int(json.loads(ended.out)["new_bytes"])


@pytest.mark.parametrize("parent", [(), ("--parent", "w:step-1")])
def test_add_of_the_same_name(line: Callable[..., Ended], parent: tuple[str, ...]) -> None:
    """With and without saying so."""
    assert new_bytes(line("add", "after", "w:step-2", *parent, "--json")) <= LITTLE
    comes_out(line, "w:step-2")


def test_add_beside_an_id(line: Callable[..., Ended]) -> None:
    """As `ls` shows it."""
    identity = json.loads(line("show", "w:step-1", "--json").out)["id"]
    for name, parent in (("v", f"@{identity[:12]}"), ("u", f"@{identity.upper()}")):
        ended = line("add", "after", name, "--parent", parent, "--json")
        assert new_bytes(ended) in (0,) if name == "u" else new_bytes(ended) <= LITTLE
    comes_out(line, "v")


def test_add_beside_none(line: Callable[..., Ended]) -> None:
    """And beside an image that has that name, by its tag."""
    assert new_bytes(line("add", "after", "w:step-2", "--parent", "none", "--json")) > 5 * LITTLE
    assert line("add", "before", "none").code == 0
    assert line("add", "after", "t", "--parent", "none:latest").code == 0
    comes_out(line, "w:step-2")


@pytest.mark.parametrize(
    ("parent", "code"),
    [
        ("nobody", 3),
        ("w:step-9", 3),
        ("w", 3),
        ("@ffffffff", 3),
        ("", 2),
        ("Upper", 2),
        ("@12", 2),
        ("none:", 2),
    ],
)
def test_add_beside_what_is_not_there(line: Callable[..., Ended], parent: str, code: int) -> None:
    """It is named; nothing is stored, and the name is what it was."""
    before = line("ls", "--json").out
    ended = line("add", "after", "w:step-1", "--parent", parent)
    fails(ended, code, parent)
    assert line("ls", "--json").out == before
    assert line("check", "--read-data").code == 0


# --- any order of commands ----------------------------------------------------------------------

names = st.sampled_from(["a:1", "a:2", "a:3", "b:latest"])
parents = st.sampled_from([None, None, None, "none", "a:1", "b:latest"])


class ExactModel(RuleBasedStateMachine):
    """Images that come of each other, and the commands that take away what they stand on."""

    @initialize(seed=st.integers(0, 1 << 20))
    def create(self, seed: int) -> None:
        """A store with one image."""
        self.folder = Path(tempfile.mkdtemp())
        self.rng = random.Random(seed)
        self.store = open_store(self.folder / "store", write=True, create=True)
        self.images: dict[BlockId, Tree] = {}
        self.names: dict[str, BlockId] = {}
        self.numbers = [self.rng.randrange(1 << 40) + 1 for _ in range(200)]
        self.add("a:1", None, [append])

    def teardown(self) -> None:
        """Closes and forgets it."""
        if hasattr(self, "folder"):
            self.store.close()
            shutil.rmtree(self.folder)

    @rule(name=names, parent=parents, script=st.lists(st.sampled_from(EDITS), max_size=3))
    def add(self, name: str, parent: str | None, script: list[Edit]) -> None:
        """What became of the last one, beside any that is there."""
        for edit in script:
            self.numbers = edit(self.numbers, self.rng)[:700]
        content = {**tree(self.numbers), "core-1.img": b"core"}
        policy: PolicyName = self.rng.choice(["fast", "balanced"])
        known = parent if parent in (None, "none") or parent in self.names else None
        result = add(self.store, content, name, known, policy=policy)
        assert self.images.get(result.id, content) == content
        self.images[result.id], self.names[name] = content, result.id
        within_budget(self.store, result.id)

    @rule(data=st.data(), name=names)
    @precondition(lambda self: self.names)
    def tag(self, data: st.DataObject, name: str) -> None:
        """A name points at another's image."""
        image = self.names[data.draw(st.sampled_from(sorted(self.names)))]
        self.store.commit("tag", names={name: image})
        self.names[name] = image

    @rule(data=st.data())
    @precondition(lambda self: self.names)
    def remove(self, data: st.DataObject) -> None:
        """A name goes, perhaps with its image."""
        name = data.draw(st.sampled_from(sorted(self.names)))
        for image in remove(self.store, [parse_name(name)]).images:
            del self.images[image]
        del self.names[name]

    @rule()
    def collect(self) -> None:
        """What nobody mentions goes, at once."""
        collect(self.store, GcOptions())

    @rule()
    def recompress(self) -> None:
        """All packs anew."""
        recompress(self.store, [pack.id for pack in self.store.catalog.packs()], "small")

    @rule()
    def lose_catalog(self) -> None:
        """A new process, which finds packs and journal alone."""
        self.store.close()
        shutil.rmtree(self.folder / "store" / "catalog")
        self.store = open_store(self.folder / "store", write=True)
        assert self.store.lost == []

    @invariant()
    def all_is_well(self) -> None:
        """After each step."""
        assert self.store.catalog.names() == self.names
        all_is_well(self.store, self.images)


TestExactModel = ExactModel.TestCase
TestExactModel.settings = settings(
    max_examples=5,
    stateful_step_count=8,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
