"""An incremental dump, whose unchanged pages lie in its parent, is stored as a whole.

The dump refers to its parent by a link to a directory beside it. What the store gives back must
not: the original parent may be gone, so the export brings its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from chains import make_chain
from criu_tool import Criu, dump, restore
from matrix import every_kind
from stores import Facts, add, facts_of, icefloe
from workloads import State, Workload


def dump_chain(criu: Criu, workload: Workload, parent: Path, child: Path) -> State:
    """Dumps the process twice and makes the second refer to the first; returns where it ended."""
    workload.advance()
    dump(criu, workload, parent, leave_running=True)
    workload.advance()
    dump(criu, workload, child)
    counts = make_chain(parent, child)
    assert counts.from_parent > counts.kept > 0, f"not much of a chain: {counts}"
    return workload.frozen_state()


def without_parent(facts: dict[str, Facts]) -> dict[str, Facts]:
    """The facts less those about the parent, be it a link or a directory."""
    return {name: each for name, each in facts.items() if name.partition("/")[0] != "parent"}


@every_kind()
def test_an_exported_chain_restores_without_the_originals(
    criu: Criu, workload: Workload, tmp_path: Path
) -> None:
    parent, child = tmp_path / "images" / "dump1", tmp_path / "images" / "dump2"
    store, exported = tmp_path / "store", tmp_path / "exported"
    parent.parent.mkdir()
    frozen = dump_chain(criu, workload, parent, child)

    # First without icefloe: CRIU itself takes these images for an incremental dump.
    restore(criu, workload, child)
    workload.verify(frozen, workload.advance())
    workload.kill()

    add(store, child, "worker")
    parent_facts, child_facts = facts_of(parent), without_parent(facts_of(child))
    shutil.rmtree(parent.parent)
    icefloe(store, "export", "worker", exported)
    assert (exported / "parent").is_dir() and not (exported / "parent").is_symlink()
    assert without_parent(facts_of(exported)) == child_facts
    assert facts_of(exported / "parent") == parent_facts

    restore(criu, workload, exported)
    workload.verify(frozen, workload.advance())
