"""Checkpoints of real processes go into a store and come out again, and the processes live on.

The store is used through the command line only, and what it gives back is judged by the file
system, by CRIU and by the process itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from criu_tool import Criu, dump, restore
from matrix import every_kind, one_criu
from stores import add, facts_of, icefloe
from workloads import Heap, Workload

RESTORES = 2


@every_kind()
def test_a_process_survives_the_store(criu: Criu, workload: Workload, tmp_path: Path) -> None:
    store, images, exported = tmp_path / "store", tmp_path / "images", tmp_path / "exported"
    images.mkdir()
    start = workload.advance()
    for number in (1, 2):
        dump(criu, workload, images / str(number), leave_running=True)
        went_on = workload.advance()
        workload.verify(start, went_on)
    dump(criu, workload, images / "3")
    frozen = workload.frozen_state()

    answers = [add(store, images / name, f"worker:{name}") for name in ("1", "2", "3")]
    exported.mkdir()
    for name in ("1", "2", "3"):
        original = facts_of(images / name)
        icefloe(store, "export", f"worker:{name}", exported / name)
        assert facts_of(exported / name) == original
        logical = sum(facts.size for facts in original.values())
        assert answers[int(name) - 1]["logical_bytes"] == logical
    shutil.rmtree(images)

    for _ in range(RESTORES):
        restore(criu, workload, exported / "3")
        workload.verify(frozen, workload.advance())
        workload.kill()


@one_criu
def test_a_grown_process_adds_little_more_than_what_grew(
    criu: Criu, heap: Heap, tmp_path: Path
) -> None:
    first = add_running(criu, heap, tmp_path / "1", tmp_path / "store")
    second = add_running(criu, heap, tmp_path / "2", tmp_path / "store")
    assert first["zero_bytes"] > 0
    assert first["new_bytes"] < first["logical_bytes"]
    # The heap grows by 3/8 at most of what it starts with, and most of that happens later.
    assert second["new_bytes"] < second["logical_bytes"] / 2
    assert second["new_bytes"] < first["new_bytes"] / 2
    assert second["stored_bytes"] < first["stored_bytes"] / 2


@one_criu
def test_the_same_checkpoint_adds_nothing(criu: Criu, heap: Heap, tmp_path: Path) -> None:
    first = add_running(criu, heap, tmp_path / "1", tmp_path / "store")
    again = add(tmp_path / "store", tmp_path / "1", "worker:again")
    assert (again["id"], again["new_bytes"], again["new_blocks"]) == (first["id"], 0, 0)


def add_running(criu: Criu, workload: Workload, images: Path, store: Path) -> dict[str, Any]:
    """Lets the process go on, dumps it while it runs and adds the dump."""
    workload.advance()
    dump(criu, workload, images, leave_running=True)
    return add(store, images, f"worker:{images.name}")
