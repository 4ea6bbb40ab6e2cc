"""Small checkpoints as dictionaries, and how tests put them into a store and get them back."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import slow_chunker as slow

from icefloe.capture.add import add_checkpoint, open_checkpoint
from icefloe.capture.export import export_image
from icefloe.capture.ingest import AddResult, IngestOptions
from icefloe.catalog import LocalStore
from icefloe.ids import BlockId, parse_name
from icefloe.store.policies import PolicyName

Tree = dict[str, bytes]
"""Path and bytes of each file; folders are those that the paths need."""

# All files and folders are of this time, so that equal trees are equal images.
_TIME = 1_796_083_200

KIB = 1 << 10


def write_tree(root: Path, tree: Tree) -> None:
    """Makes a directory of a tree."""
    root.mkdir(parents=True)
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for path in [*root.rglob("*"), root]:
        os.utime(path, (_TIME, _TIME))


def read_tree(root: Path) -> Tree:
    """The other way."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def add(
    store: LocalStore,
    tree: Tree,
    name: str,
    labels: Mapping[str, str] | None = None,
    policy: PolicyName = "balanced",
) -> AddResult:
    """Stores a tree under a name."""
    with tempfile.TemporaryDirectory() as folder:
        write_tree(Path(folder) / "tree", tree)
        checkpoint = open_checkpoint(Path(folder) / "tree")
        options = IngestOptions(policy, workers=2)
        return add_checkpoint(store, checkpoint, parse_name(name), labels or {}, options)


def exported(store: LocalStore, image: BlockId) -> Tree:
    """What `export` writes. A failed export must leave nothing behind."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            export_image(store, image, Path(folder) / "out", workers=1)
        except BaseException:
            assert not os.listdir(folder), "a failed export left something"
            raise
        return read_tree(Path(folder) / "out")


def text(length: int, seed: int) -> bytes:
    """Bytes that compress: lines of words, no two seeds alike."""
    line = b"%d: the quick brown fox jumps over the lazy dog\n"
    lines = [line % (seed * 1_000_003 + i) for i in range(length // 40 + 1)]
    return b"".join(lines)[:length]


def pages(parts: Sequence[bytes]) -> bytes:
    """Parts behind each other, filled up to a whole page."""
    content = b"".join(parts)
    return content + bytes(-len(content) % 4096)


def copy_store(source: Path, target: Path) -> None:
    """A copy that may be damaged; packs are shared, since they are never modified."""
    shutil.copytree(source, target, ignore=lambda folder, names: {"packs"} & set(names))
    shutil.copytree(source / "packs", target / "packs", copy_function=os.link)


NOISE = [slow.noise(96 * KIB, seed) for seed in range(3)]


def worn_store() -> dict[str, Tree]:
    """Images that share blocks, of noise, text and zeros, by name. See `wear`."""
    shared = pages([NOISE[0], text(90 * KIB, 1), bytes(80 * KIB), NOISE[1]])
    return {
        "a:latest": {"pages-1.img": shared, "core-1.img": b"core" * 9, "sub/fs.img": b"x" * 700},
        "b:latest": {"pages-1.img": shared + text(80 * KIB, 2), "core-1.img": b"core" * 9},
        "b:fast": {"pages-2.img": pages([text(200 * KIB, 3)]), "zero": bytes(300 * KIB)},
    }


GONE: Tree = {"gone.img": NOISE[2] + text(70 * KIB, 9)}
"""An image that the worn store held once, as `gone`."""


def wear(store: LocalStore) -> dict[str, BlockId]:
    """Fills a store with the images of `worn_store`, and leaves dead blocks behind."""
    from icefloe.gc.removal import remove

    images = worn_store()
    ids = {"a:latest": add(store, images["a:latest"], "a", {"k": "v"}).id}
    add(store, GONE, "gone")
    ids["b:latest"] = add(store, images["b:latest"], "b", policy="small").id
    ids["b:fast"] = add(store, images["b:fast"], "b:fast", policy="fast").id
    remove(store, [parse_name("gone")])
    return ids
