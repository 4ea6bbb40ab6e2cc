"""The lazy door, with a CRIU that is made of a few lines and says what we want it to."""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest
from fake_blocks import BLOCK_PAGES, BLOCKS, PAGES, ZEROS, FakeSource, layout, segments, wanted
from puppet import PAGE, Puppet

from icefloe.capture import uffd
from icefloe.capture.fill import Fill
from icefloe.capture.fillers import Fillers
from icefloe.capture.guard import Guard
from icefloe.capture.lazy_pages import SOCKET, LazyDoor
from icefloe.capture.plan import Plan
from icefloe.errors import CriuFailed, MissingPack

pytestmark = pytest.mark.skipif(uffd.probe() is not None, reason=f"userfaultfd: {uffd.probe()}")

PID = struct.Struct("<i")
RSTF = struct.pack("<I", 0x52535446)

# Pids of the checkpoint: two processes, and one that has no memory.
ONE, TWO, ZOMBIE = 41, 4242, 43

Tasks = Mapping[int, Puppet | None]


def descriptors() -> int:
    """How many are open here."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def connected(folder: Path) -> Iterator[socket.socket]:
    """CRIU's end of the socket. CRIU connects from within the folder."""
    with socket.socket(socket.AF_UNIX) as criu:
        with chdir(folder):
            criu.connect(SOCKET)
        yield criu


def send_tasks(criu: socket.socket, tasks: Tasks) -> None:
    """Every pid and descriptor. What is sent is closed here, so that only the door has it."""
    for pid, puppet in tasks.items():
        criu.sendall(PID.pack(-pid if puppet is None else pid))
        if puppet is not None:
            socket.send_fds(criu, [b"\0"], [puppet.fd])
            os.close(puppet.fd)
            puppet.fd = -1


@contextmanager
def opened(
    folder: Path, tasks: Tasks, source: FakeSource, ahead: bool = True
) -> Iterator[tuple[LazyDoor, Fill]]:
    """A door for these tasks, in the order of the tree. No descriptor stays open."""

    def others() -> int:
        return descriptors() - sum(p is not None and p.fd >= 0 for p in tasks.values())

    before = others()
    lazy = {pid: segments(layout(p.address)) for pid, p in tasks.items() if p is not None}
    plan = Plan(list(tasks), lazy, len(BLOCKS))
    fill = Fill(plan, source, plan.order() if ahead else None, 1 if ahead else 2)
    if ahead:
        fill.fill_by(Fillers(), source.locate)
    door = LazyDoor(folder, plan, fill, Guard(None))
    try:
        yield door, fill
    finally:
        source.held.set()
        door.close()
        door.let_go()
    assert others() <= before  # what other tests forgot may go meanwhile
    assert source.opened == source.closed


@contextmanager
def restoring(
    folder: Path, tasks: Tasks, source: FakeSource, ahead: bool = True
) -> Iterator[tuple[LazyDoor, Fill, socket.socket]]:
    """A door that has got the memory of all tasks; CRIU hasn't said yet that it's done."""
    with opened(folder, tasks, source, ahead) as (door, fill), connected(folder) as criu:
        send_tasks(criu, tasks)
        door.connect(lambda: False)
        yield door, fill, criu


def serve(door: LazyDoor, done: Callable[[], bool], look: bool = False) -> None:
    """Serves until `done`, but not forever; each time it can `look` for the dead."""
    deadline = time.monotonic() + 20

    def looked() -> bool:
        assert time.monotonic() < deadline, "it takes too long"
        if look:
            door.look_for_dead()
        return done()

    door.serve(looked)


def ask(door: LazyDoor, puppet: Puppet, order: str, *numbers: int) -> list[str]:
    """An order that takes events or faults to be answered."""
    puppet.tell(order, *numbers)
    serve(door, puppet.answered)
    answer: list[str] = puppet.answer()
    return answer


def right(puppet: Puppet) -> list[str]:
    """All of its memory."""
    return wanted(layout(puppet.address), puppet.address)


def test_memory_of_a_tree(tmp_path: Path) -> None:
    """All is put in as soon as CRIU is done, shared blocks once; a zombie has none."""
    with Puppet(PAGES, register=False) as one, Puppet(PAGES, register=False) as two:
        source = FakeSource(BLOCKS)
        with restoring(tmp_path, {ONE: one, ZOMBIE: None, TWO: two}, source) as (door, fill, criu):
            end = time.monotonic() + 0.2
            serve(door, lambda: time.monotonic() > end)
            assert (fill.filled_bytes, door.resumed_at) == (0, None)
            assert not fill.registered.is_set() and len(fill.spaces()) == 2
            one.ask("register", 0)
            two.ask("register", 0)
            criu.sendall(RSTF)
            serve(door, fill.filled.is_set)
            assert door.resumed_at is not None and fill.registered.is_set()
            assert (fill.filled_bytes, fill.faults) == (2 * 152 * PAGE, 0)
            assert source.loads == dict.fromkeys(BLOCKS, 1)
            assert ask(door, one, "read", 0, PAGES) == right(one)
            assert ask(door, two, "read", 0, PAGES) == right(two)


def test_only_zombies(tmp_path: Path) -> None:
    with restoring(tmp_path, {ZOMBIE: None}, FakeSource(BLOCKS)) as (door, fill, criu):
        criu.sendall(RSTF)
        serve(door, lambda: door.resumed_at is not None)
        assert fill.filled.is_set() and not fill.spaces()


@pytest.mark.parametrize("ahead", [True, False])
def test_faults_while_criu_is_at_work(tmp_path: Path, ahead: bool) -> None:
    """They are answered though the filling waits for CRIU to put memory in its place."""
    with Puppet(PAGES, register=False) as one, Puppet(PAGES) as two:
        source = FakeSource(BLOCKS)
        with restoring(tmp_path, {ONE: one, TWO: two}, source, ahead) as (door, fill, criu):
            for page in (5 * BLOCK_PAGES + 3, 7 * BLOCK_PAGES, 9 * BLOCK_PAGES + 1, PAGES - 1):
                assert ask(door, two, "read", page, 1) == [right(two)[page]]
            assert fill.faults >= 4 and door.resumed_at is None
            assert not fill.filled.is_set() and not fill.touches
            one.ask("register", 0)
            criu.sendall(RSTF)
            if ahead:
                serve(door, fill.filled.is_set)
            assert ask(door, two, "read", 0, PAGES) == right(two)
            assert ask(door, one, "read", 0, PAGES) == right(one)


def test_criu_takes_its_time(tmp_path: Path) -> None:
    """It connects when the door has looked for it in vain already, and hangs up when it's done."""
    looks = iter([False, True])
    with Puppet(PAGES) as puppet:
        with opened(tmp_path, {ONE: puppet}, FakeSource(BLOCKS)) as (door, fill):

            def criu_ended() -> bool:
                if next(looks, False):
                    with connected(tmp_path) as criu:
                        send_tasks(criu, {ONE: puppet})
                        criu.sendall(RSTF)
                return False

            door.connect(criu_ended)
            serve(door, fill.filled.is_set)
            assert next(looks, None) is None
            assert ask(door, puppet, "read", 0, PAGES) == right(puppet)


def test_long_path(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["x" * 200] * 5)
    folder.mkdir(parents=True)
    with Puppet(PAGES) as puppet:
        with restoring(folder, {ONE: puppet}, FakeSource(BLOCKS)) as (door, fill, criu):
            criu.sendall(RSTF)
            serve(door, fill.filled.is_set)
            assert ask(door, puppet, "read", 0, PAGES) == right(puppet)


def test_criu_ends_without_connecting(tmp_path: Path) -> None:
    with opened(tmp_path, {ONE: None}, FakeSource(BLOCKS)) as (door, _):
        with pytest.raises(CriuFailed, match="CRIU ended"):
            door.connect(lambda: True)


@pytest.mark.parametrize("said", [b"", PID.pack(ONE)[:3], PID.pack(ONE), PID.pack(ONE) + b"\0"])
@pytest.mark.parametrize("before", [0, 1])
def test_criu_says_too_little(tmp_path: Path, before: int, said: bytes) -> None:
    """No pid, part of one, one alone, one without a descriptor; of the first or the second."""
    with Puppet(PAGES) as puppet:
        tasks = {TWO: puppet, ONE: None} if before else {ONE: puppet}
        with opened(tmp_path, tasks, FakeSource(BLOCKS)) as (door, fill):
            with connected(tmp_path) as criu:
                if before:
                    send_tasks(criu, {TWO: puppet})
                criu.sendall(said)
            with pytest.raises(CriuFailed, match="gave up|sent no memory"):
                door.connect(lambda: False)
            assert len(fill.spaces()) == before


@pytest.mark.parametrize("said", [b"", RSTF[:2], RSTF[::-1]])
def test_criu_gives_up_at_the_end(tmp_path: Path, said: bytes) -> None:
    """It hangs up, or says something else than that it's done."""
    with Puppet(PAGES) as puppet:
        with restoring(tmp_path, {ONE: puppet}, FakeSource(BLOCKS)) as (door, fill, criu):
            criu.sendall(said)
            criu.close()
            with pytest.raises(CriuFailed, match="gave up"):
                serve(door, lambda: False)
            assert door.resumed_at is None and not fill.registered.is_set()


def test_criu_is_killed_and_a_task_keeps_its_socket(tmp_path: Path) -> None:
    """No end of file comes, and yet nothing will."""
    with opened(tmp_path, {ONE: None}, FakeSource(BLOCKS)) as (door, _):
        with connected(tmp_path) as criu, criu.dup():
            criu.close()
            with pytest.raises(CriuFailed, match="CRIU ended"):
                door.connect(lambda: True)


def test_a_pid_that_nobody_knows(tmp_path: Path) -> None:
    with Puppet(PAGES) as puppet:
        with opened(tmp_path, {ONE: puppet}, FakeSource(BLOCKS)) as (door, fill):
            with connected(tmp_path) as criu:
                send_tasks(criu, {TWO: puppet})
                with pytest.raises(CriuFailed, match=f"no memory of process {TWO}"):
                    door.connect(lambda: False)
            assert not fill.spaces()


@pytest.mark.parametrize("ahead", [True, False])
def test_fork_during_the_fill(tmp_path: Path, ahead: bool) -> None:
    """The child gets its memory too. When it has ended, nothing of it stays open."""
    with Puppet(PAGES) as puppet:
        source = FakeSource(BLOCKS)
        source.held.clear()
        with restoring(tmp_path, {ONE: puppet}, source, ahead) as (door, fill, criu):
            criu.sendall(RSTF)
            before = descriptors()
            puppet.tell("fork_read", 0, PAGES)
            serve(door, lambda: len(fill.spaces()) == 2)
            assert descriptors() == before + 1
            source.held.set()
            serve(door, puppet.answered)
            assert puppet.answer() == right(puppet)
            serve(door, lambda: descriptors() == before, look=True)
            assert len(fill.spaces()) == 1
            assert ask(door, puppet, "read", 0, PAGES) == right(puppet)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("dead", [1, 2])
def test_killed_during_the_fill(tmp_path: Path, dead: int, ahead: bool) -> None:
    """Of one that is killed while it waits, nothing stays open. The others get their memory."""
    with Puppet(PAGES) as one, Puppet(PAGES) as two:
        source = FakeSource(BLOCKS)
        source.held.clear()
        with restoring(tmp_path, {ONE: one, TWO: two}, source, ahead) as (door, fill, criu):
            before = descriptors()
            criu.sendall(RSTF)
            assert ask(door, one, "read", 7 * BLOCK_PAGES, 1) == [ZEROS]
            answered = fill.faults
            one.tell("read", PAGES - 1, 1)
            serve(door, lambda: fill.faults > answered)
            for puppet in (one, two)[:dead]:
                puppet.kill()
            source.held.set()
            # Who fills finds out by itself; where nothing is filled ahead, nobody else does.
            serve(door, lambda: descriptors() == before - dead, look=not ahead)
            assert len(fill.spaces()) == 2 - dead and fill.failure is None
            if dead == 1:
                assert ask(door, two, "read", 0, PAGES) == right(two)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_missing_block(tmp_path: Path, ahead: bool) -> None:
    """Whoever waits for it keeps waiting until the door lets go, and must be killed before."""
    with Puppet(PAGES) as puppet:
        source = FakeSource({number: BLOCKS[number] for number in BLOCKS if number != 3})
        with restoring(tmp_path, {ONE: puppet}, source, ahead) as (door, fill, criu):
            criu.sendall(RSTF)
            puppet.tell("read", 3 * BLOCK_PAGES, 1)
            with pytest.raises(MissingPack):
                serve(door, lambda: False)
            before = descriptors()
            door.close()
            assert descriptors() == before - 2  # where it listened, and the connection
            time.sleep(0.3)
            assert not puppet.answered() and not fill.filled.is_set()
            door.let_go()
            assert descriptors() == before - 3
            assert puppet.answer() == [ZEROS]
