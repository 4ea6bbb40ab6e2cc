"""Golden bytes: what this version computes and writes is what the first one did.

`tests/vectors/` holds small files that every reader of format 1 has to understand. They change
only when the format gets a new number. `python tests/store/test_vectors.py --write` makes them
anew (test_trace.py the traces); a difference that git then shows is a change of the format.
`planes.json` was put together by hand and is only read, since compressors change.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import zstandard
from blake3 import blake3

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds it already

import slow_chunker as slow
from made_manifests import Run, build, entry

from icefloe.chunker import BYTES, PAGES, WEIGHTS, CutStream, Grain, mix, scan
from icefloe.ids import BlockId, PackId, block_id
from icefloe.store import manifest as manifests
from icefloe.store.codecs import Codec, Decoder
from icefloe.store.journal import START, Change, Journal
from icefloe.store.layout import Layout, describe, make_folders
from icefloe.store.manifest import ZERO, FileKind, Manifest
from icefloe.store.pack import Kind, StoredBlock, pack_id, read_index
from icefloe.store.reader import BlockReader, Location
from icefloe.store.verify import verify_pack
from icefloe.store.writer import PackWriter

VECTORS = Path(__file__).parents[1] / "vectors"

# --- chunking -----------------------------------------------------------------------------------

RECIPE = [("noise", 400), ("zero", 15), ("noise", 3), ("zero", 16), ("noise", 21), ("same", 300)]
"""A buffer as (kind, KiB times 4): noise, zero, or one byte repeated, which is never marked."""


def buffer(partial: int) -> bytes:
    """The buffer of the recipe, with `partial` more bytes at the end."""
    parts = []
    for seed, (kind, pages) in enumerate(RECIPE):
        noise = slow.noise(pages * 4096, seed) if kind == "noise" else b""
        parts.append(noise or (b"\0" if kind == "zero" else b"s") * (pages * 4096))
    return b"".join(parts) + b"p" * partial


def cut_points(content: bytes, grain: Grain) -> dict[str, Any]:
    """What icefloe sees in a buffer."""
    window = np.frombuffer(content.ljust(-(-len(content) // grain.size) * grain.size, b"\0"), "u1")
    words = window.view(np.uint64).reshape(-1, grain.words)[:4]
    fingerprints = words @ WEIGHTS[: grain.words]
    pieces = CutStream(grain).feed(scan(window, grain), final=True)
    return {
        "grain": grain.size,
        "bytes": len(content),
        "blake3": blake3(content).hexdigest(),
        "fingerprints": [f"{f:016x}" for f in fingerprints.tolist()],
        "mixed": [f"{m:016x}" for m in mix(fingerprints).tolist()],
        "pieces": [[p.start, p.end, p.zero] for p in pieces],
    }


def chunking() -> dict[str, Any]:
    """Weights, fingerprints, cut points."""
    numbers = WEIGHTS.tolist()
    return {
        "weights": {
            "first": [f"{w:016x}" for w in numbers[:4]],
            "last": [f"{w:016x}" for w in numbers[-4:]],
            "blake3": blake3(WEIGHTS.astype("<u8").tobytes()).hexdigest(),
        },
        "files": [cut_points(buffer(0), PAGES), cut_points(buffer(777), BYTES)],
    }


def test_chunking() -> None:
    """Weights, fingerprints and cut points have not moved."""
    assert chunking() == json.loads((VECTORS / "chunking.json").read_text())


def test_chunking_by_hand() -> None:
    """The slow reference agrees with the file."""
    golden = json.loads((VECTORS / "chunking.json").read_text())
    weights = np.array(slow.WEIGHTS, "<u8").tobytes()
    assert golden["weights"]["blake3"] == blake3(weights).hexdigest()
    for file, partial in zip(golden["files"], (0, 777), strict=True):
        size, content = file["grain"], buffer(partial)
        content = content.ljust(-(-len(content) // size) * size, b"\0")
        fingerprints = [slow.fingerprint(content[i * size : (i + 1) * size]) for i in range(4)]
        assert file["fingerprints"] == [f"{f:016x}" for f in fingerprints]
        assert file["mixed"] == [f"{slow.mixed(f):016x}" for f in fingerprints]
        found = slow.pieces(*slow.look(content, size), size)
        assert file["pieces"] == [list(piece) for piece in found]


# --- packs --------------------------------------------------------------------------------------


def raws() -> list[tuple[bytes, Codec, Kind]]:
    """The blocks of `mixed.pack`, in its order."""
    return [
        (b"a small raw block", Codec.RAW, Kind.DATA),
        (slow.noise(5000, 1), Codec.RAW, Kind.DATA),
        (b"lz4 " * 2000, Codec.LZ4, Kind.DATA),
        (b"zstd " * 3000, Codec.ZSTD, Kind.DATA),
        (slow.noise(4096, 2), Codec.RAW, Kind.DATA),
        (manifests.encode(image()), Codec.ZSTD, Kind.MANIFEST),
    ]


def stored(raw: bytes, codec: Codec, kind: Kind) -> StoredBlock:
    """A block in this codec."""
    payload = raw
    if codec == Codec.LZ4:
        payload = lz4.block.compress(raw, store_size=False)
    elif codec == Codec.ZSTD:
        payload = zstandard.ZstdCompressor(level=1).compress(raw)
    return StoredBlock(block_id(raw), kind, codec, len(raw), payload)


def written(blocks: list[StoredBlock]) -> bytes:
    """The bytes of the pack that holds these blocks."""
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(Path(folder))
        make_folders(layout)
        describe(layout)
        writer = PackWriter(layout)
        writer.append(blocks)
        (identity,) = writer.finish()
        return layout.pack(identity).read_bytes()


def raw_blocks() -> list[StoredBlock]:
    """The blocks of `raw.pack`."""
    return [stored(raw, Codec.RAW, kind) for raw, _, kind in raws() if len(raw) < 5001]


def index_rows(path: Path) -> list[list[Any]]:
    """The index of a pack, as JSON has it."""
    return [[row[0].hex(), *row[1:]] for row in read_index(path).tolist()]


def test_reading_a_pack(tmp_path: Path) -> None:
    """All codecs and kinds: index, id, every byte."""
    golden = json.loads((VECTORS / "packs.json").read_text())
    path = VECTORS / "mixed.pack"
    index = read_index(path)
    assert index_rows(path) == golden["index"]
    assert pack_id(index).hex() == golden["id"]
    layout = Layout(tmp_path)
    make_folders(layout)
    describe(layout)
    copy = layout.pack(pack_id(index))
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert list(verify_pack(layout, pack_id(index))) == []
    with BlockReader(layout) as reader:
        for (identity, at, size, raw, codec, kind, _), wanted in zip(
            index.tolist(), raws(), strict=True
        ):
            where = Location(BlockId(identity), pack_id(index), at, size, raw, codec)
            assert (reader.read_one(where), codec, kind) == wanted


def test_writing_a_pack() -> None:
    """Raw blocks only, since compressors change: byte for byte."""
    assert written(raw_blocks()) == (VECTORS / "raw.pack").read_bytes()


def test_reading_planes() -> None:
    """Raw planes, frames of runs and of Huffman codes, tails: each alone, and all at once."""
    golden = json.loads((VECTORS / "planes.json").read_text())
    codecs, lengths = [row["codec"] for row in golden], [row["raw"] for row in golden]
    payloads = [bytes.fromhex(row["payload"]) for row in golden]
    decoder, wanted = Decoder(), [row["id"] for row in golden]
    assert codecs == [Codec.PLANES2_ZSTD, Codec.PLANES4_ZSTD]
    alone = [bytes(each) for each in map(decoder.decode, codecs, payloads, lengths)]
    assert [block_id(raw).hex() for raw in alone] == wanted
    together = decoder.decode_all(codecs, payloads, lengths)
    assert [block_id(raw).hex() for raw in together] == wanted


# --- manifest and journal -----------------------------------------------------------------------


def image() -> Manifest:
    """One entry of each kind, extents of each kind."""
    kind, day = FileKind, 86400 * 10**9
    blocks = [(blake3(bytes([i])).digest(), length) for i, length in enumerate([1048576, 300, 7])]
    files = [
        entry("", kind.FOLDER, mode=0o700, uid=1000, gid=1000, mtime_ns=20000 * day + 5),
        entry("char", kind.CHARACTER_DEVICE, device=0x0105),
        entry("disk", kind.BLOCK_DEVICE, device=(1 << 40) + 3),
        entry("empty", mtime_ns=-1),
        entry("fifo", kind.FIFO, mode=0o600),
        entry("link", kind.SYMLINK, link="../anywhere", mode=0o777),
        entry("not\udcffutf8", size=7, mode=0o4755),
        entry("pages-1.img", size=65536 + 1048576 + 300 + 1, mtime_ns=20000 * day + 999999999),
        entry("same", kind.HARDLINK, link="pages-1.img"),
        entry("socket", kind.SOCKET),
        entry("sub", kind.FOLDER, mode=0o755),
        entry("sub/é.img", size=(1 << 48) - 1, uid=(1 << 32) - 1, gid=7),
    ]
    runs: dict[str, list[Run]] = {
        "not\udcffutf8": [(0, 100, 7)],
        "pages-1.img": [(ZERO, 0, 65536), (0, 0, 1048576), (1, 0, 300), (2, 6, 1)],
        "sub/é.img": [(ZERO, 0, (1 << 48) - 1)],
    }
    facts = {"arch": "x86_64", "gpus": [{"name": "H200", "memory": 150754820096}], "x": None}
    labels = {"model": "llama", "ort": "Köln"}
    return build(files, [runs.get(f.path, []) for f in files], blocks, facts, labels)


def changes() -> list[Change]:
    """One change of each kind."""
    packs = [PackId(blake3(bytes([i])).digest()) for i in range(5)]
    images = [BlockId(blake3(bytes([i, i])).digest()) for i in range(3)]
    names = {"worker-a:step-1": images[0], "worker-a:latest": images[0]}
    return [
        Change("snapshot", 1796083199.0, (packs[3],), (), (images[2],), (), {"c:1": images[2]}),
        Change("add", 1796083200.125, (packs[0], packs[1]), images_added=(images[0],), names=names),
        Change(
            "add", 1796083201.0, (packs[2],), images_added=(images[1],), names={"b:1": images[1]}
        ),
        Change("tag", 1796083202.5, names={"b:é": images[1]}),
        Change("rm", 1796083203.25, images_removed=(images[0],), names=dict.fromkeys(names)),
        Change("gc", 1796083204.0, (packs[4],), (packs[0], packs[2])),
    ]


def journal() -> bytes:
    """The journal that holds these changes."""
    with tempfile.TemporaryDirectory() as folder:
        made = Journal(Path(folder) / "journal")
        made.create()
        position = START
        for change in changes():
            position = made.append(change, position)
        return made.path.read_bytes()


def test_manifest() -> None:
    """Both ways, byte for byte."""
    golden = (VECTORS / "image.manifest").read_bytes()
    assert manifests.encode(image()) == golden
    decoded = manifests.decode(golden)
    assert manifests.encode(decoded) == golden
    assert decoded.files == image().files
    assert (decoded.facts, decoded.labels) == (image().facts, image().labels)
    assert (decoded.extents == image().extents).all() and (decoded.blocks == image().blocks).all()


def test_journal() -> None:
    """Both ways, byte for byte."""
    golden = (VECTORS / "all.journal").read_bytes()
    assert journal() == golden
    tail = Journal(VECTORS / "all.journal").read()
    assert [entry.change for entry in tail.entries] == changes()
    assert (tail.end.offset, tail.end.sequence, tail.torn_bytes) == (len(golden), 6, 0)


def test_they_stay_small() -> None:
    """Golden files belong into the repository, so they must not weigh."""
    assert sum(path.stat().st_size for path in VECTORS.iterdir()) < 100 << 10


# --- making them --------------------------------------------------------------------------------


def write_vectors() -> None:
    """Makes all files of `tests/vectors/`."""
    VECTORS.mkdir(exist_ok=True)
    (VECTORS / "chunking.json").write_text(json.dumps(chunking(), indent=1) + "\n")
    path = VECTORS / "mixed.pack"
    path.write_bytes(written([stored(*raw) for raw in raws()]))
    golden = {"id": pack_id(read_index(path)).hex(), "index": index_rows(path)}
    (VECTORS / "packs.json").write_text(json.dumps(golden, indent=1) + "\n")
    (VECTORS / "raw.pack").write_bytes(written(raw_blocks()))
    (VECTORS / "image.manifest").write_bytes(manifests.encode(image()))
    (VECTORS / "all.journal").write_bytes(journal())


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write_vectors()
