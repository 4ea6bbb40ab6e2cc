"""Checkpoints of one file whose pages have numbers, and what must be true of them once stored."""

import os
import random
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import second_reader
import small_store
from small_store import Tree

from icefloe.capture.add import add_checkpoint, open_checkpoint
from icefloe.capture.ingest import AddResult, IngestOptions
from icefloe.capture.parent import MAX_AMPLIFICATION
from icefloe.catalog import LocalStore
from icefloe.gc.audit import check
from icefloe.ids import BlockId, parse_name, parse_reference
from icefloe.store.manifest import ZERO, Manifest
from icefloe.store.policies import PolicyName

PAGE = 4096
FILE = "pages-1.img"
MIB_PAGES = 256

Numbers = list[int]
"""A file of pages, each by its number; that of 0 is zero."""


@lru_cache(1 << 15)
def page(number: int) -> bytes:
    """A page of noise that differs from those of all other numbers."""
    return random.Random(number).randbytes(PAGE) if number else bytes(PAGE)


def joined(numbers: Sequence[int]) -> bytes:
    """The bytes of a file."""
    return b"".join(map(page, numbers))


def tree(numbers: Sequence[int], tail: bytes = b"") -> Tree:
    """A checkpoint of one file."""
    return {FILE: joined(numbers) + tail}


def add(
    store: LocalStore,
    content: Tree,
    name: str,
    parent: str | None = None,
    workers: int = 2,
    policy: PolicyName = "fast",
) -> AddResult:
    """Stores a tree, beside what `--parent` would say."""
    reference = "none" if parent == "none" else parent and parse_reference(parent)
    options = IngestOptions(policy, workers, ("*.mem",), parent=reference or None)
    with tempfile.TemporaryDirectory() as folder:
        small_store.write_tree(Path(folder) / "tree", content)
        checkpoint = open_checkpoint(Path(folder) / "tree")
        return add_checkpoint(store, checkpoint, parse_name(name), {}, options)


def exports(store: LocalStore, image: BlockId, content: Tree) -> None:
    """Byte for byte, also for the other reader. (To show megabytes that differ takes minutes.)"""
    same = small_store.exported(store, image) == content
    assert same, "another export"
    _, files = second_reader.Store(store.layout.root).read(image.hex())
    same = {os.fsdecode(path): raw for path, raw in files.items()} == content
    assert same, "another export by the second reader"


def all_is_well(store: LocalStore, images: dict[BlockId, Tree]) -> None:
    """Every image is what it was, and nothing is wrong with the store."""
    for image, content in images.items():
        exports(store, image, content)
    assert check(store, read_data=True).problems == ()


def amplification(manifest: Manifest) -> float:
    """What is read to restore an image, over what it holds that is not zero."""
    data = manifest.extents["length"][manifest.extents["block"] != ZERO]
    return int(manifest.blocks["length"].sum(dtype=np.int64)) / max(int(data.sum()), 1)


def within_budget(store: LocalStore, image: BlockId) -> None:
    """docs/format.md: at most 1.5 times what it consists of."""
    assert amplification(store.manifest(image)) <= MAX_AMPLIFICATION
