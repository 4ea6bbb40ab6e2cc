"""Processes that decode are killed, stopped and fed with damage; every block is right all the same.

What a way to the blocks hands out is compared byte for byte. Decoders are known by their pids, and
by our ends of the sockets to them, which look readable when an answer lies in them.
"""

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made_checkpoints as made
import numpy as np
import pytest
import small_store
from blake3 import blake3
from processes import adopting_orphans, wait_until
from restores import state_of

from icefloe.capture import decoders as decoding
from icefloe.capture import restore
from icefloe.capture.blocks import Batch, Blocks, StoreBlocks, StoreSource
from icefloe.capture.criu import Criu
from icefloe.capture.decoders import start_decoders
from icefloe.capture.directory import files_for_criu
from icefloe.capture.fill import Fill
from icefloe.capture.guard import Guard
from icefloe.capture.memory import load_memories
from icefloe.capture.stored import StoredImage
from icefloe.capture.waking import Waking
from icefloe.catalog import LocalStore, open_store
from icefloe.errors import Corrupt, CorruptBlock, CriuFailed, MissingPack
from icefloe.ids import BlockId
from icefloe.store.codecs import Codec, PolicyName
from icefloe.store.reader import Location
from icefloe.store.trace import EMPTY

PATIENCE = 20.0
KIB, MIB = 1 << 10, 1 << 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A piece of the blocks below is one to four of them then.
SMALL_SLOT = 512 * KIB


CODECS = {Codec.RAW, Codec.LZ4, Codec.ZSTD, Codec.PLANES4_ZSTD}

# --- the image ----------------------------------------------------------------------------------


def random_bytes(length: int, seed: int) -> bytes:
    """They don't compress."""
    return np.random.default_rng(seed).bytes(length)


def weights(count: int, seed: int, width: int) -> bytes:
    """Numbers as models have them: float32, or bf16, which is the upper half of it."""
    numbers = np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")
    return numbers.tobytes() if width == 4 else (numbers.view("<u4") >> 16).astype("<u2").tobytes()


def growing() -> Iterator[tuple[small_store.Tree, PolicyName]]:
    """What each image has more than the one before it, so that each pack has some blocks."""
    yield {"pages-1.img": random_bytes(2 * MIB, 1)}, "balanced"
    yield {"pages-2.img": weights(768 * KIB, 2, width=2)}, "balanced"
    yield {"pages-3.img": small_store.text(MIB, 3)}, "small"
    yield {"pages-4.img": small_store.text(MIB, 4)}, "fast"
    yield {"pages-5.img": weights(384 * KIB, 5, width=4)}, "balanced"
    yield {f"{i}.img": b"%d" % i * (i % 50) for i in range(300)}, "balanced"
    yield {"odd.img": random_bytes(100_001, 6) + bytes(200_000) + b"end"}, "balanced"
    for seed in range(7, 11):
        yield {f"more-{seed}.img": random_bytes(150 * KIB, seed)}, "balanced"


@dataclass(frozen=True, slots=True)
class Image:
    """A stored image, and the bytes of each of its blocks."""

    root: Path
    id: BlockId
    right: list[bytes]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Its blocks lie in many packs. Never modified: tests damage copies."""
    root = tmp_path_factory.mktemp("decoded") / "store"
    tree: small_store.Tree = {}
    with open_store(root, write=True, create=True) as store:
        for more, policy in growing():
            tree |= more
            id_ = small_store.add(store, tree, "x", policy=policy).id
        manifest = store.manifest(id_)
        source = StoreSource(store, manifest)
        numbers = range(len(manifest.blocks))
        located = source.locate(numbers)
        blocks = source.open()
        right = [bytes(raw) for batch in blocks.fetch(numbers) for _, raw in batch]
        blocks.close()
    assert [blake3(raw).digest() for raw in right] == [at.id for at in located]
    assert {at.codec for at in located} >= CODECS
    assert len({at.pack for at in located}) > 8  # more than a reader keeps open
    return Image(root, id_, right)


@contextmanager
def opened(root: Path, id_: BlockId) -> Iterator[StoreSource]:
    """The blocks of an image in this store."""
    with open_store(root, write=False) as store:
        source = StoreSource(store, store.manifest(id_))
        try:
            yield source
        finally:
            source.close()


@pytest.fixture(scope="module")
def source(image: Image) -> Iterator[StoreSource]:
    """The image, not damaged."""
    with opened(image.root, image.id) as found:
        yield found


@pytest.fixture
def copy(image: Image, tmp_path: Path) -> Path:
    """A store to damage."""
    shutil.copytree(image.root, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are many pieces, and blocks that fit in none."""
    monkeypatch.setattr(decoding, "_SLOT_BYTES", SMALL_SLOT)


def everything(right: Sequence[bytes], times: int = 1) -> list[int]:
    """All blocks in order, some times over."""
    return list(range(len(right))) * times


def agree(batches: Iterable[Batch], numbers: Iterable[int], right: Sequence[bytes]) -> None:
    """Looks at each batch before the next is asked for."""
    left = iter(numbers)
    for batch in batches:
        assert batch
        check(batch, left, right)
    assert next(left, None) is None, "blocks are missing"


def check(batch: Batch, left: Iterator[int], right: Sequence[bytes]) -> None:
    """Compares one batch. pytest's own diff of so many bytes would take minutes."""
    for number, raw in batch:
        assert number == next(left, None)
        is_right = raw == right[number]
        assert is_right, f"block {number} has other bytes"


# --- the decoders -------------------------------------------------------------------------------


def children(pid: int | str = "self") -> list[int]:
    """The children of a process, dead ones included, in the order of their birth."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name)):
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """What is open in a process. Not the catalog's files, which it opens as it likes."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if "/catalog/" not in target:
                found[int(name)] = target
    return found


@dataclass(frozen=True, slots=True)
class Team:
    """Ways to the blocks; the decoders behind them by pid, and our ends of their sockets."""

    ways: list[Blocks]
    pids: list[int]
    channels: list[int]

    def wait_ready(self) -> None:
        """Until each has closed what isn't its own, the last thing it does before it listens."""
        for pid in self.pids:
            wait_until(lambda pid=pid: len(descriptors(pid)) == 1, PATIENCE, "a decoder to listen")  # type: ignore[misc]

    def wait_answer(self, decoder: int) -> None:
        """Until an answer lies in its socket."""
        assert select.select([self.channels[decoder]], [], [], PATIENCE)[0]

    def signal(self, decoders: Iterable[int], number: signal.Signals) -> None:
        """Sends it, and waits for what it does."""
        states = {signal.SIGKILL: "Z", signal.SIGSTOP: "T"}
        for pid in [self.pids[decoder] for decoder in decoders]:
            os.kill(pid, number)
            if (state := states.get(number)) is not None:
                wait_until(lambda pid=pid: state_of(pid) == state, PATIENCE, f"state {state}")  # type: ignore[misc]


@contextmanager
def started(source: StoreSource, workers: int) -> Iterator[Team]:
    """Decoders. Afterwards nothing is left of them: no process, no zombie, no descriptor."""
    born, before = children(), descriptors()
    ways = start_decoders(source, workers)
    pids = [pid for pid in children() if pid not in born]
    new = descriptors().items() - before.items()
    channels = sorted(fd for fd, target in new if target.startswith("socket:"))
    try:
        yield Team(ways, pids, channels)
    finally:
        for way in ways:
            way.close()
    assert children() == born
    assert descriptors().items() <= before.items()  # what other tests forgot may go meanwhile


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that no decoder delivered."""
    fetch, fetched = StoreBlocks.fetch, []

    def noted(self: StoreBlocks, numbers: Iterable[int]) -> Iterator[Batch]:
        asked = list(numbers)
        fetched.extend(asked)
        return fetch(self, asked)

    monkeypatch.setattr(StoreBlocks, "fetch", noted)
    return fetched


@contextmanager
def aside(work: Callable[[], None]) -> Iterator[threading.Thread]:
    """Works in a thread, which is done in the end, and has not failed."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE)
    assert not thread.is_alive(), "it takes too long"
    if failures:
        raise failures[0]


# --- every block, in the order asked ------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "shares"),
    [(1, [1]), (2, [2]), (3, [3]), (5, [3, 2]), (7, [4, 3]), (16, [4, 3, 3, 3, 3])],
)
def test_shares(source: StoreSource, workers: int, shares: list[int]) -> None:
    """Each way has so many processes of its own, which end with it alone."""
    with started(source, workers) as team:
        assert len(team.pids) == workers and len(team.ways) == len(shares)
        ended = []
        for way in team.ways:
            before = len(children())
            way.close()
            ended.append(before - len(children()))
        assert ended == shares


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("slots", ["whole", "small"])
def test_every_block(
    request: pytest.FixtureRequest,
    source: StoreSource,
    image: Image,
    own: list[int],
    workers: int,
    slots: str,
) -> None:
    """In order, against it, shuffled, with repeats; more than all slots hold, one after another.

    All of it is the decoders' work but for blocks that are larger than a slot.
    """
    if slots == "small":
        request.getfixturevalue("small_slots")
    numbers, right = everything(image.right), image.right
    shuffled = np.random.default_rng(workers).permutation(numbers * 2).tolist()
    with started(source, workers) as team:
        for way in team.ways:
            for order in (numbers, numbers[::-1], shuffled, [3, 3, 3, 0, 3], [len(right) - 1]):
                agree(way.fetch(order), order, right)
    large = {n for n in numbers if len(right[n]) > SMALL_SLOT} if slots == "small" else set()
    assert bool(large) == (slots == "small") and set(own) == large


def test_nothing(source: StoreSource, image: Image) -> None:
    """It is no reason to give up."""
    with started(source, 2) as team:
        (way,) = team.ways
        nothing: list[Iterable[int]] = [[], iter(()), range(0)]
        for empty in nothing:
            assert list(way.fetch(empty)) == []
        agree(way.fetch([1]), [1], image.right)


@pytest.mark.usefixtures("small_slots")
def test_ways_at_the_same_time(source: StoreSource, image: Image) -> None:
    """Each in a thread of its own."""
    numbers = everything(image.right, 2)
    with started(source, 7) as team:
        one, two = team.ways
        with aside(lambda: agree(one.fetch(numbers), numbers, image.right)):
            agree(two.fetch(numbers[::-1]), numbers[::-1], image.right)


@pytest.mark.usefixtures("small_slots")
def test_a_slow_generator(source: StoreSource, image: Image) -> None:
    numbers = everything(image.right)

    def slowly() -> Iterator[int]:
        for number in numbers:
            time.sleep(0.002)
            yield number

    with started(source, 3) as team:
        agree(team.ways[0].fetch(slowly()), numbers, image.right)


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("good", [0, 1, 64, 200])
def test_a_generator_that_raises(source: StoreSource, image: Image, good: int) -> None:
    """Its error comes through; what came before it was right."""
    numbers = everything(image.right, 10)[:good]

    def failing() -> Iterator[int]:
        yield from numbers
        raise ZeroDivisionError

    with started(source, 3) as team:
        left = iter(numbers)
        with pytest.raises(ZeroDivisionError):
            for batch in team.ways[0].fetch(failing()):
                check(batch, left, image.right)


# --- buffers ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("workers", [1, 3])
def test_buffers_last_until_the_next_batch(source: StoreSource, image: Image, workers: int) -> None:
    """However far decoders have come meanwhile; and memory is used again afterwards."""
    numbers, places = everything(image.right, 2), set()
    fits = [number for number in numbers if len(image.right[number]) <= SMALL_SLOT]
    with started(source, workers) as team:
        left = iter(fits)
        for batch in team.ways[0].fetch(fits):
            select.select(team.channels, [], [], 0.01)
            time.sleep(0.005)
            starts = [np.frombuffer(raw, np.uint8).ctypes.data for _, raw in batch]
            ends = [start + len(raw) for start, (_, raw) in zip(starts, batch, strict=True)]
            assert starts[1:] == ends[:-1], "one after the other"
            check(batch, left, image.right)
            places.add(starts[0])
        assert next(left, None) is None
    assert len(places) == 2 * workers


# --- decoders that die or stop ------------------------------------------------------------------

VICTIMS = pytest.mark.parametrize("victims", [[0], [1, 2], [0, 1, 2]], ids=str)


@pytest.mark.usefixtures("small_slots")
@VICTIMS
@pytest.mark.parametrize("ready", [True, False])
def test_killed_before(source: StoreSource, image: Image, victims: list[int], ready: bool) -> None:
    """Even before they have begun to listen."""
    numbers = everything(image.right)
    with started(source, 3) as team:
        if ready:
            team.wait_ready()
        team.signal(victims, signal.SIGKILL)
        agree(team.ways[0].fetch(numbers), numbers, image.right)


@pytest.mark.usefixtures("small_slots")
@VICTIMS
def test_killed_while_asked(source: StoreSource, image: Image, victims: list[int]) -> None:
    """They are stopped, so that they have not answered, and we wait for them."""
    numbers = everything(image.right, 2)
    with started(source, 3) as team:
        (way,) = team.ways
        team.wait_ready()
        team.signal(victims, signal.SIGSTOP)
        with aside(lambda: agree(way.fetch(numbers), numbers, image.right)):
            time.sleep(0.05)
            team.signal(victims, signal.SIGKILL)


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("after", [1, 2, 4, 7])
def test_killed_at_work(source: StoreSource, image: Image, after: int) -> None:
    """One after the other, from a batch on."""
    numbers = everything(image.right, 2)
    with started(source, 3) as team:
        left = iter(numbers)
        for i, batch in enumerate(team.ways[0].fetch(numbers)):
            check(batch, left, image.right)
            if after <= i < after + 3:
                team.signal([i - after], signal.SIGKILL)
        assert next(left, None) is None


@pytest.mark.usefixtures("small_slots")
def test_killed_between_an_answer_and_the_next_question(source: StoreSource, image: Image) -> None:
    """Whoever has answered for one slot and dies has not answered for the other.

    Its socket says once that it broke off, and only then gives out the answer that lies in it.
    """
    numbers = [n for n in everything(image.right, 3) if len(image.right[n]) <= SMALL_SLOT]
    with started(source, 3) as team:
        left, batches = iter(numbers), team.ways[0].fetch(numbers)
        check(next(batches), left, image.right)
        team.wait_answer(0)  # for its second slot
        team.signal([0], signal.SIGSTOP)
        check(next(batches), left, image.right)  # and the first slot is asked for anew
        team.signal([0], signal.SIGKILL)
        agree(batches, left, image.right)


@pytest.mark.usefixtures("small_slots")
@VICTIMS
def test_killed_afterwards(source: StoreSource, image: Image, victims: list[int]) -> None:
    numbers = everything(image.right)
    with started(source, 3) as team:
        (way,) = team.ways
        agree(way.fetch(numbers), numbers, image.right)
        team.signal(victims, signal.SIGKILL)
        agree(way.fetch(numbers), numbers, image.right)


@pytest.mark.usefixtures("small_slots")
def test_stopped_and_continued(source: StoreSource, image: Image, own: list[int]) -> None:
    numbers = [n for n in everything(image.right, 2) if len(image.right[n]) <= SMALL_SLOT]
    with started(source, 3) as team:
        (way,) = team.ways
        team.signal(range(3), signal.SIGSTOP)
        with aside(lambda: agree(way.fetch(numbers), numbers, image.right)):
            time.sleep(0.1)
            team.signal(range(3), signal.SIGCONT)
    assert not own


def test_stopped_ones_can_be_closed(source: StoreSource) -> None:
    with started(source, 3) as team:
        team.signal(range(3), signal.SIGSTOP)


@pytest.mark.usefixtures("small_slots")
def test_signals_to_the_whole_group(source: StoreSource, image: Image, own: list[int]) -> None:
    """Whoever asks decides when decoders end."""
    numbers = [n for n in everything(image.right) if len(image.right[n]) <= SMALL_SLOT]
    with started(source, 3) as team:
        team.wait_ready()
        for pid in team.pids:
            os.setpgid(pid, team.pids[0])
        batches, left = team.ways[0].fetch(numbers), iter(numbers)
        for number in SIGNALS * 2:
            os.killpg(team.pids[0], number)
            check(next(batches), left, image.right)
        agree(batches, left, image.right)
        assert all(state_of(pid) not in (None, "Z") for pid in team.pids)
    assert not own


def test_a_signal_right_after_the_fork(
    source: StoreSource, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child must not go on as a second one of us, whatever Ctrl-C raises in it."""
    fork, us = os.fork, os.getpid()
    escaped, tell = os.pipe()

    def interrupted() -> int:
        pid = fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(os, "fork", interrupted)
    try:
        with started(source, 2) as team:
            agree(team.ways[0].fetch([0, 1, 2]), [0, 1, 2], image.right)
    except BaseException:
        if os.getpid() != us:
            os.write(tell, b"x")
            os._exit(1)
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(tell)
    with os.fdopen(escaped, "rb") as said:
        assert said.read() == b""


# --- damage -------------------------------------------------------------------------------------


def block_of(source: StoreSource, right: Sequence[bytes], codec: Codec) -> tuple[int, Location]:
    """A block in the middle that has this codec."""
    located = source.locate(everything(right))
    found = [(number, at) for number, at in enumerate(located) if at.codec == codec]
    return found[len(found) // 2]


def flip(path: Path, position: int) -> None:
    """Another byte there."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


def fails_at(way: Blocks, right: Sequence[bytes], first: int) -> Corrupt:
    """Fetches all twice; block `first` can't be had, and is the first of those."""
    numbers, count = everything(right, 2), 0
    left = iter(numbers)
    with pytest.raises(Corrupt) as caught:
        for batch in way.fetch(numbers):
            check(batch, left, right)
            count += len(batch)
    assert count <= first
    return caught.value


@pytest.mark.parametrize("codec", sorted(CODECS), ids=lambda codec: codec.name)
def test_a_damaged_block(image: Image, copy: Path, codec: Codec) -> None:
    """It is named by us, and what came before it was right; so is what else is asked for."""
    with opened(copy, image.id) as source:
        number, at = block_of(source, image.right, codec)
        path = source.layout.pack(at.pack)
        flip(path, at.offset + at.stored // 2)
        with started(source, 3) as team:
            error = fails_at(team.ways[0], image.right, number)
    assert isinstance(error, CorruptBlock)
    assert (error.expected, error.pack, error.offset) == (at.id, path, at.offset)


@pytest.mark.usefixtures("small_slots")
def test_others_are_none_the_worse_for_a_damaged_block(image: Image, copy: Path) -> None:
    """And a way that met one can be closed, with everything else that it had asked for."""
    with opened(copy, image.id) as source:
        number, at = block_of(source, image.right, Codec.PLANES4_ZSTD)
        flip(source.layout.pack(at.pack), at.offset + at.stored // 2)
        others = [n for n in everything(image.right, 2) if n != number]
        with started(source, 7) as team:
            one, two = team.ways
            with aside(lambda: agree(two.fetch(others), others, image.right)):
                fails_at(one, image.right, number)


@pytest.mark.parametrize("length", [None, 100])
def test_a_pack_that_is_missing_or_cut_off(image: Image, copy: Path, length: int | None) -> None:
    with opened(copy, image.id) as source:
        located = source.locate(everything(image.right))
        number, at = block_of(source, image.right, Codec.LZ4)
        first = next(i for i, each in enumerate(located) if each.pack == at.pack)
        path = source.layout.pack(at.pack)
        path.unlink() if length is None else os.truncate(path, length)
        with started(source, 3) as team:
            error = fails_at(team.ways[0], image.right, first)
    assert first <= number
    assert isinstance(error, MissingPack if length is None else CorruptBlock)
    assert error.pack == path


@pytest.mark.usefixtures("small_slots")
def test_what_decoders_cannot_read(image: Image, copy: Path, own: list[int]) -> None:
    """We have the packs open and read on, when they are gone for everybody else."""
    numbers = everything(image.right)
    with opened(copy, image.id) as source:
        source.pin()
        shutil.rmtree(source.layout.packs)
        with started(source, 3) as team:
            agree(team.ways[0].fetch(numbers), numbers, image.right)
    assert own == numbers


# --- what is left of them -----------------------------------------------------------------------


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("asked", [0, 1, 5])
def test_closed_while_fetching(source: StoreSource, image: Image, asked: int) -> None:
    """Twice is as good as once. What was handed out last stays."""
    numbers = everything(image.right, 2)
    with started(source, 7) as team:
        for way in team.ways:
            batches, left = way.fetch(numbers), iter(numbers)
            for _ in range(asked):
                batch = next(batches)
                check(batch, left, image.right)
            last = [(number, bytes(raw)) for number, raw in batch] if asked else []
            for _ in range(2):
                way.close()
            assert all(image.right[number] == raw for number, raw in last)
            if asked:
                check(batch, iter([number for number, _ in last]), image.right)
        assert not set(team.pids) & set(children())


@pytest.mark.usefixtures("small_slots")
def test_they_have_nothing_of_ours(source: StoreSource, image: Image) -> None:
    """Of descriptors: but their end of the socket, and a few packs."""
    high = 900
    with open(os.devnull) as file:
        os.dup2(file.fileno(), high)
    try:
        with started(source, 3) as team:
            numbers = everything(image.right, 3)
            agree(team.ways[0].fetch(numbers), numbers, image.right)
            ours = set(descriptors().values())
            for pid in team.pids:
                found = sorted(descriptors(pid).values(), key=lambda at: at.startswith("socket:"))
                packs, channel = found[:-1], found[-1]
                assert channel.startswith("socket:") and channel not in ours
                assert 1 <= len(packs) <= 8
                assert all(at.startswith(f"{source.layout.packs}/") for at in packs), packs
    finally:
        os.close(high)


def test_they_keep_nobody_out(image: Image, copy: Path) -> None:
    """The lock of the store is ours alone to hold, and to give back."""
    with open_store(copy, write=False) as store:
        source = StoreSource(store, store.manifest(image.id))
        source.pin()
        with started(source, 3) as team:
            team.wait_ready()
            store.close()
            with open_store(copy, write=True, wait_seconds=0.0):
                pass
            agree(team.ways[0].fetch([1, 0]), [1, 0], image.right)
        source.close()


LEFT = """
import sys
from pathlib import Path
from icefloe.capture.blocks import StoreSource
from icefloe.capture.decoders import start_decoders
from icefloe.catalog import open_store

store = open_store(Path(sys.argv[1]), write=False)
manifest = store.manifest(bytes.fromhex(sys.argv[2]))
ways = start_decoders(StoreSource(store, manifest), 7)
fetched = [way.fetch(list(range(len(manifest.blocks))) * 20) for way in ways]
for batches in fetched:
    next(batches)
print("fetching", flush=True)
if sys.argv[3] == "idle":
    for batches in fetched:
        for _ in batches:
            pass
    print("done", flush=True)
sys.stdin.read()
"""


def buried(pid: int) -> bool:
    """Whether a process is gone; if it has fallen to us, it is reaped."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return state_of(pid) is None


@pytest.mark.parametrize("when", ["asked", "idle"])
def test_they_go_when_we_are_killed(image: Image, when: str) -> None:
    """And nobody is there to kill them."""
    command = [sys.executable, "-c", LEFT, str(image.root), image.id.hex(), when]
    with adopting_orphans():
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            for word in ("fetching", "done")[: 1 + (when == "idle")]:
                assert process.stdout.readline() == f"{word}\n"
            pids = children(process.pid)
            process.kill()
            process.wait()
        assert len(pids) == 7
        wait_until(lambda: all([buried(pid) for pid in pids]), PATIENCE, "the end of decoders")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("good", [0, 2])
def test_a_fork_that_fails(source: StoreSource, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    """With fewer decoders or not at all, but it leaves none behind that nobody can close."""
    fork, born, before, left = os.fork, children(), descriptors(), good

    def limited() -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EAGAIN, "no more processes")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    ways: list[Blocks] = []
    with suppress(OSError):
        ways = start_decoders(source, 7)
    for way in ways:
        way.close()
    lost = [pid for pid in children() if pid not in born]
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not lost
    assert descriptors().items() <= before.items()


# --- a restore ----------------------------------------------------------------------------------


class GivesUp(Criu):
    """A CRIU that fails at once."""

    def start(self, arguments: Sequence[str | Path], words: Any) -> "subprocess.Popen[bytes]":
        """See Criu."""
        return subprocess.Popen(["false"], stderr=words)


def checkpoint() -> small_store.Tree:
    """One process with some pages of memory."""
    start, count = 1 << 30, 64
    pages = {start + i * made.PAGE: random_bytes(made.PAGE, i) for i in range(count)}
    entries = [made.Entry(start, count, made.PRESENT | made.LAZY)]
    areas = [made.Area(start, start + count * made.PAGE)]
    return made.checkpoint({41: made.Memory(areas, entries, pages)})


def restore_with(store: LocalStore, id_: BlockId, folder: Path, fill: bool) -> None:
    """A lazy restore with a CRIU that gives up."""
    folder.mkdir()
    source = StoreSource(store, store.manifest(id_))
    stored = StoredImage(store.manifest(id_), source)
    memories = load_memories(stored)
    files = files_for_criu(stored, memories, lazy=True)
    options = restore.RestoreOptions("x", "lazy", fill=fill, workers=5)
    waking = Waking(None, [], 1.0)
    run = restore._Run(GivesUp("criu", (4, 2)), options, "lazy", folder, 0.0, waking)
    restore._restore_lazily(run, memories, files, source, store, Guard(None), EMPTY)


def test_a_lazy_restore_fills_through_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends them when it fails. Where nothing is filled ahead, there are none."""
    told: list[Any] = []

    def noted(source: StoreSource, workers: int) -> list[Blocks]:
        ways = start_decoders(source, workers)
        told.append((workers, ways, len(children())))
        return ways

    def given(fill: Fill, ways: Sequence[Blocks]) -> None:
        told.append(ways)
        read_ahead(fill, ways)

    read_ahead = Fill.read_ahead
    monkeypatch.setattr(restore, "start_decoders", noted)
    monkeypatch.setattr(Fill, "read_ahead", given)
    before = children()
    with open_store(tmp_path / "store", write=True, create=True) as store:
        id_ = small_store.add(store, checkpoint(), "x").id
        for fill in (True, False):
            with pytest.raises(CriuFailed):
                restore_with(store, id_, tmp_path / f"criu-{fill}", fill)
    (workers, ways, count), taken = told
    assert (workers, len(ways)) == (5, 2) and taken is ways
    assert count >= len(before) + 5
    assert children() == before
