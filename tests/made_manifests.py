"""Manifests for tests: hypothesis draws them, every field at its limits."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from blake3 import blake3
from hypothesis import strategies as st

from icefloe.store.manifest import (
    BLOCK_DTYPE,
    EXTENT_DTYPE,
    ZERO,
    FileKind,
    ImageFile,
    Manifest,
)

Run = tuple[int, int, int]
"""One extent: number of a block (ZERO for none), offset, length."""

POOL = [
    (blake3(bytes([i])).digest(), length) for i, length in enumerate([1, 2, 512, 65536, 1 << 20])
]
"""Blocks that the extents of drawn manifests point into: id and raw length."""


def build(
    files: list[ImageFile],
    runs: list[list[Run]],
    blocks: list[tuple[bytes, int]],
    facts: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
) -> Manifest:
    """A manifest of these rows as they are, however wrong. `runs`: the extents of each file."""
    return Manifest(
        files=tuple(files),
        bounds=np.cumsum([0, *map(len, runs)], dtype=np.int64),
        blocks=np.array(blocks, BLOCK_DTYPE),
        extents=np.array([run for of_file in runs for run in of_file], EXTENT_DTYPE),
        facts=facts or {},
        labels=labels or {},
    )


def entry(path: str, kind: FileKind = FileKind.REGULAR, **more: Any) -> ImageFile:
    """An entry with ordinary owner, mode and time."""
    return replace(ImageFile(path, kind, 0o644, 0, 0, 0), **more)


@dataclass(frozen=True, slots=True)
class _Meta:
    mode: int
    uid: int
    gid: int
    mtime_ns: int


_metas = st.builds(
    _Meta,
    st.integers(0, 0o7777),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(-(1 << 63) * 10**9, (1 << 63) * 10**9 - 1),
)

# What a file can be called on Linux: anything without NUL and slash, UTF-8 or not.
_parts = st.one_of(
    st.sampled_from(["a", "b", "a.img", "pages-1.img", "é", "..a", "-", " ", "\n", "\udcff"]),
    st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=5
    ),
).filter(lambda part: part not in (".", ".."))

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def _runs(draw: st.DrawFn) -> list[Run]:
    """Extents of one file that can't be merged any further; numbers are those of POOL."""
    out: list[Run] = []
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.sampled_from([ZERO, *range(len(POOL))]))
        if number == ZERO:
            run = (ZERO, 0, draw(st.one_of(st.integers(1, 1 << 20), st.just((1 << 48) - 1))))
        else:
            offset = draw(st.integers(0, POOL[number][1] - 1))
            run = (number, offset, draw(st.integers(1, POOL[number][1] - offset)))
        if not (out and joins(out[-1], run)):
            out.append(run)
    return out


def joins(before: Run, after: Run) -> bool:
    """Whether two neighbours would be one extent."""
    return before[0] == after[0] and (before[0] == ZERO or before[1] + before[2] == after[1])


def _key(path: str) -> bytes:
    return path.encode(errors="surrogateescape")


@st.composite
def _trees(draw: st.DrawFn) -> dict[str, FileKind]:
    """Paths and kinds; what a path lies in is a folder."""
    kinds: dict[str, FileKind] = {}
    if draw(st.booleans()):
        kinds[""] = FileKind.FOLDER
    for parts in draw(st.lists(st.lists(_parts, min_size=1, max_size=3), max_size=7)):
        folders = ["/".join(parts[:i]) for i in range(1, len(parts))]
        path = "/".join(parts)
        if path in kinds or any(kinds.get(f, FileKind.FOLDER) != FileKind.FOLDER for f in folders):
            continue
        kinds |= dict.fromkeys(folders, FileKind.FOLDER)
        kinds[path] = draw(st.sampled_from(FileKind))
    return {path: kinds[path] for path in sorted(kinds, key=_key)}


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any valid manifest of a few files."""
    files: list[ImageFile] = []
    runs: list[list[Run]] = []
    regular: list[str] = []
    for path, kind in draw(_trees()).items():
        if kind is FileKind.HARDLINK and not regular:
            kind = FileKind.FIFO
        of_file = draw(_runs()) if kind is FileKind.REGULAR else []
        files.append(_draw_entry(draw, path, kind, regular, sum(run[2] for run in of_file)))
        runs.append(of_file)
        if kind is FileKind.REGULAR:
            regular.append(path)
    order = list(dict.fromkeys(run[0] for f in runs for run in f if run[0] != ZERO))
    numbers = {ZERO: ZERO, **{number: i for i, number in enumerate(order)}}
    renumbered = [[(numbers[n], offset, length) for n, offset, length in f] for f in runs]
    facts = draw(st.dictionaries(st.text(max_size=4), _json, max_size=3))
    labels = draw(st.dictionaries(st.text(max_size=4), st.text(max_size=6), max_size=3))
    return build(files, renumbered, [POOL[number] for number in order], facts, labels)


def _draw_entry(
    draw: st.DrawFn, path: str, kind: FileKind, regular: list[str], size: int
) -> ImageFile:
    meta = draw(_metas)
    link, device = "", 0
    if kind is FileKind.HARDLINK:
        link = draw(st.sampled_from(regular))
    elif kind is FileKind.SYMLINK:
        link = draw(st.sampled_from(["/etc/passwd", "..", "x" * 4095, "\udcfe/é"]))
    elif kind in (FileKind.CHARACTER_DEVICE, FileKind.BLOCK_DEVICE):
        device = draw(st.integers(0, (1 << 64) - 1))
    return ImageFile(path, kind, meta.mode, meta.uid, meta.gid, meta.mtime_ns, size, link, device)
