"""Finds the image that a file is like, whatever the names of the two are.

A page whose fingerprint starts with eight zero bits is a hook: one page in 256, chosen by what it
holds and not by where it is. The catalog keeps for each hook where it stood in the latest images. A
hook of what comes in says which image to lay beside it, and where: sparse indexing (Lillibridge et
al., FAST 2009). It is a hint, and nothing is decided by it: pages are compared (capture/parent.py).
"""

import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icefloe.capture.exact import Beside
from icefloe.capture.images import PAGE
from icefloe.capture.parent import Parent
from icefloe.catalog import LocalStore
from icefloe.catalog.tables import HOOK_DTYPE
from icefloe.chunker import Marks
from icefloe.errors import Corrupt, IcefloeError
from icefloe.ids import BlockId
from icefloe.store.manifest import Manifest

_HOOK_SHIFT = np.uint64(56)

# Images that are laid beside one in the making: each takes memory for its manifest.
_MOST = 4


@dataclass(frozen=True, slots=True)
class Hooks:
    """Mixed fingerprints of pages of one file, and where these pages start."""

    fingerprints: NDArray[np.uint64]
    offsets: NDArray[np.int64]


def hooks_of(marks: Marks, offset: int) -> Hooks:
    """The hooks of a window of pages that starts at `offset`. A hole has none."""
    if not len(marks.mixed):
        return Hooks(marks.mixed, np.zeros(0, np.int64))
    found = np.flatnonzero((marks.mixed >> _HOOK_SHIFT == 0) & ~marks.zero)
    return Hooks(marks.mixed[found], offset + found * PAGE)


class Kin:
    """What the files of an image in the making are laid beside. Threads share it."""

    def __init__(self, store: LocalStore, parent: Parent | None, *, searches: bool) -> None:
        """`parent` is the image that it is likely to be like; `searches`: others will do, too."""
        self._store = store
        self._parent = parent
        self._searches = searches
        self._beside: dict[str, tuple[Parent, Beside]] = {}
        self._gathered: dict[str, list[Hooks]] = {}
        self._parents: dict[BlockId, Parent | None] = {}
        self._lock = threading.Lock()

    def gather(self, path: str, hooks: Hooks) -> None:
        """Keeps the hooks of a file."""
        if len(hooks.offsets):
            with self._lock:
                self._gathered.setdefault(path, []).append(hooks)

    def beside(self, path: str, hooks: Hooks, *, all_known: bool) -> tuple[Parent, Beside] | None:
        """How a file lies beside the same file of the parent, or beside one that it is like.

        `hooks` are those of a window; with `all_known` nothing of it is looked for.
        """
        with self._lock:
            found = self._beside.get(path) or self._same_file(path)
        if all_known or not self._searches or (found is not None and not found[1].doubtful):
            return found
        # One page alone may be in many images that are not alike.
        lost = found is not None and found[1].lost
        kin = self._find(hooks, votes=2 if lost else 1)
        if kin is None or (found is not None and not lost and _place(found) == _place(kin)):
            return found
        with self._lock:
            self._beside[path] = kin
        return kin

    def _same_file(self, path: str) -> tuple[Parent, Beside] | None:
        theirs = None if self._parent is None else self._parent.file(path)
        if self._parent is None or theirs is None:
            return None
        self._beside[path] = self._parent, Beside(theirs, self._parent.budget)
        return self._beside[path]

    def _find(self, hooks: Hooks, votes: int) -> tuple[Parent, Beside] | None:
        """What most of these hooks stood in, so many at least, and how it lies beside."""
        fingerprints, first = np.unique(hooks.fingerprints, return_index=True)
        which, rows = self._store.catalog.hooks(fingerprints)
        places = [(BlockId(row["image"].tobytes()), int(row["file"])) for row in rows]
        for (image, number), count in Counter(places).most_common():
            if count < votes:
                return None
            with self._lock:
                parent = self._open(image)
            file = None if parent is None else parent.file_of(number)
            if parent is not None and file is not None:
                at = places.index((image, number))
                ours = int(hooks.offsets[first[which[at]]])
                return parent, Beside(file, parent.budget, int(rows["offset"][at]) - ours)
        return None

    def store(self, image: BlockId, manifest: Manifest) -> None:
        """Notes where the hooks stand, now that the image is there."""
        numbers = {file.path: number for number, file in enumerate(manifest.files)}
        with suppress(IcefloeError):  # the image is whole without them
            for path, gathered in self._gathered.items():
                fingerprints = np.concatenate([each.fingerprints for each in gathered])
                rows = np.zeros(len(fingerprints), HOOK_DTYPE)
                rows["image"] = np.frombuffer(image, "V32")
                rows["file"] = numbers[path]
                rows["offset"] = np.concatenate([each.offsets for each in gathered])
                self._store.catalog.set_hooks(fingerprints, rows)

    def _open(self, image: BlockId) -> Parent | None:
        if image not in self._parents and len(self._parents) < _MOST:
            self._parents[image] = None
            if self._store.catalog.image(image) is not None:
                with suppress(Corrupt):
                    self._parents[image] = Parent(self._store, image)
        return self._parents.get(image)


def _place(found: tuple[Parent, Beside]) -> tuple[BlockId, int]:
    return found[0].image, found[1].number
