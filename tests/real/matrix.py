"""What is tried with which CRIU: the core claims with each version, all others with the newest.

A version differs in the images it writes and in how it restores, and not in what icefloe makes
of a bad name, a full disk or a signal.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from criu_tool import VERSIONS
from workloads import Heap, Redis, Tree, Workload

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
KINDS: tuple[type[Workload], ...] = (Heap, Redis, Tree)

one_criu = pytest.mark.parametrize("criu", [NEWEST], indirect=True)


def every_kind(*more: type[Workload]) -> pytest.MarkDecorator:
    """Each kind of process with the newest CRIU, and the one with most to it with the oldest."""
    cases: Sequence[tuple[str, type[Workload]]] = [
        *((NEWEST, kind) for kind in (*KINDS, *more)),
        (OLDEST, Tree),
    ]
    return pytest.mark.parametrize(("criu", "workload"), cases, indirect=True)
