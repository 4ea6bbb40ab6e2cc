"""docs/format.md against icefloe: the example of the page, and images read by a second reader."""

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import second_reader as second
import zstandard
from second_reader import Entry, Extent

PAGE = (Path(__file__).parents[1] / "docs" / "format.md").read_text()
MIB = 1 << 20
RANDOM = np.random.default_rng(5)


def noise(size: int) -> bytes:
    """Random bytes without zeros, so that zero runs are only where a test puts them."""
    return RANDOM.integers(1, 256, size, dtype=np.uint8).tobytes()


def icefloe(store: Path, *arguments: str | Path) -> None:
    """Runs the command."""
    command = [Path(sys.executable).with_name("icefloe"), "-q", "--store", store, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the example of the page --------------------------------------------------------------------


def dumps() -> list[bytes]:
    """The hex dumps of the page: the manifest and the pack."""
    found: list[bytearray] = []
    for at, digits in re.findall(r"^ {4}([0-9a-f]{4}) ((?: [0-9a-f]{2})+)$", PAGE, re.M):
        if at == "0000":
            found.append(bytearray())
        assert len(found[-1]) == int(at, 16)
        found[-1] += bytes.fromhex(digits)
    return [bytes(dump) for dump in found]


def stated_ids() -> list[str]:
    """The ids that the example states: block, manifest, pack."""
    return re.findall(r"`([0-9a-f]{64})`", PAGE)


def example_files() -> list[Entry]:
    """The files of the example as its words describe them."""
    extent = Extent(second.block_id(b"hello icefloe\n"), 0, 14)
    root = Entry(b"", second.FOLDER, 0o755, 1000, 1000, (1796083200, 0))
    note = Entry(b"note", second.REGULAR, 0o644, 1000, 1000, (1796083200, 0), 14)
    return [root, replace(note, extents=(extent,))]


def test_example_manifest() -> None:
    manifest = dumps()[0]
    files = example_files()
    lengths = {files[1].extents[0].block or b"": 14}
    assert second.encode_manifest(files, lengths) == manifest
    image = second.read_manifest(manifest)
    assert image == second.Image(files, lengths)
    assert second.block_id(manifest).hex() == stated_ids()[1]


def test_example_pack() -> None:
    manifest, pack = dumps()
    digest, rows = second.read_pack(pack)
    assert [*(row.id.hex() for row in rows), digest.hex()] == stated_ids()
    assert [second.block(pack, row) for row in rows] == [b"hello icefloe\n", manifest]
    assert second.salvage(pack[: rows[-1].offset + rows[-1].stored]) == rows


def test_example_journal() -> None:
    lines = re.findall(r"^ {4}(icefloe journal 1|[0-9a-f]{16} \{.*\})$", PAGE, re.M)
    journal = "".join(line + "\n" for line in lines).encode()
    (change,) = second.read_journal(journal)
    assert second.JOURNAL_LINE + second.journal_line(change) == journal
    _, image, pack = stated_ids()
    assert second.replay([change]) == second.State(0, {pack}, {image}, {"example:latest": image})


def test_example_format() -> None:
    lines = re.findall(r'^ {4}(\{"format".*\})$', PAGE, re.M)
    assert [second.FORMAT_LINE.decode()] == lines


def test_fingerprint_numbers() -> None:
    assert second.WEIGHTS[[0, 511]].tolist() == [0xE220A8397B1DCDAF, 0x4980AF326A4B65D9]
    f = second.sums(np.arange(512, dtype=np.uint64).reshape(1, 512))
    assert f.tolist() == [0x5548709DCE889936]
    assert second.mix(f).tolist() == [0xD516917B69CC5863]


# --- damage -------------------------------------------------------------------------------------


def test_every_changed_byte_of_the_example_is_refused() -> None:
    manifest, pack = dumps()
    for at in range(len(pack)):
        bad = bytearray(pack)
        bad[at] ^= 1
        with pytest.raises(second.Refused):
            _, rows = second.read_pack(bytes(bad))
            for row in rows:
                second.block(bytes(bad), row)
    for end in range(len(manifest)):
        with pytest.raises(second.Refused):
            second.read_manifest(manifest[:end])


def test_damage_in_the_journal() -> None:
    added: dict[str, object] = dict.fromkeys(second.KEYS, [])
    changes = [{"sequence": at, "operation": "gc", **added, "names": {}} for at in range(3)]
    lines = [second.journal_line(change) for change in changes]
    whole = second.JOURNAL_LINE + b"".join(lines)
    assert second.replay(second.read_journal(whole)).sequence == 2
    for cut in range(1, len(lines[2])):
        assert second.read_journal(whole[:-cut]) == changes[:2]
    with pytest.raises(second.Refused):
        second.read_journal(whole.replace(lines[1], lines[1][:-2] + b"\n"))
    with pytest.raises(second.Refused):
        second.replay([changes[0], changes[2]])


def test_snapshot_stands_for_all_that_came_before() -> None:
    pack, image = "aa" * 32, "bb" * 32
    empty: dict[str, object] = dict.fromkeys(second.KEYS, [])
    change = empty | {"packs_added": [pack], "images_added": [image]}
    start = {"sequence": 0, "operation": "snapshot", **change, "names": {"x:latest": image}}
    gone = empty | {"images_removed": [image]}
    after = {"sequence": 1, "operation": "rm", **gone, "names": {"x:latest": None}}
    assert second.replay([start, after]) == second.State(1, {pack}, set(), {})
    with pytest.raises(second.Refused):
        second.replay([start, {**after, "names": {}}])


UNSAFE: list[tuple[str, Entry]] = [
    ("absolute", Entry(b"/a", second.REGULAR, 0)),
    ("above", Entry(b"..", second.FOLDER, 0)),
    ("empty part", Entry(b"a/", second.REGULAR, 0)),
    ("too long", Entry(b"a" * 4096, second.REGULAR, 0)),
    ("NUL", Entry(b"a\0", second.REGULAR, 0)),
    ("below a file", Entry(b"note/x", second.REGULAR, 0)),
    ("below nothing", Entry(b"x/y", second.REGULAR, 0)),
    ("twice", Entry(b"note", second.REGULAR, 0)),
    ("linked to itself", Entry(b"x", second.HARD_LINK, 0, link=b"x")),
    ("linked to a folder", Entry(b"x", second.HARD_LINK, 0, link=b"")),
    ("mode", Entry(b"x", second.REGULAR, 0o10000)),
    ("kind", Entry(b"x", 8, 0)),
    ("size", Entry(b"x", second.REGULAR, 0, size=1)),
    ("nanoseconds", Entry(b"x", second.REGULAR, 0, mtime=(0, 10**9))),
    ("device", Entry(b"x", second.FIFO, 0, device=1)),
    ("two zeros", Entry(b"x", second.REGULAR, 0, size=2, extents=(Extent(None, 0, 1),) * 2)),
]


@pytest.mark.parametrize("entry", [pytest.param(entry, id=name) for name, entry in UNSAFE])
def test_refuses_a_manifest_that_is_not_safe_or_canonical(entry: Entry) -> None:
    files = example_files()
    lengths = {files[1].extents[0].block or b"": 14}
    with pytest.raises(second.Refused):
        second.read_manifest(second.encode_manifest([*files, entry], lengths))


# --- directories --------------------------------------------------------------------------------


def put(folder: Path, name: str | bytes, data: bytes) -> Path:
    """Writes a file and the folders above it."""
    path = folder / os.fsdecode(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def small_files(folder: Path) -> None:
    """More small files than one block holds, in an order that a walk by folder would not give."""
    for at in range(40):
        put(folder, f"{'ab-./'[at % 4]}{at}", noise(65535 - at * at))
        put(folder, f"a/{at}", noise(1 + at))
    put(folder, "a-b", b"before a/0")
    put(folder, "empty", b"")
    put(folder, "zeros", bytes(65535))
    put(folder, "twin", b"before a/0")
    put(folder, "large", noise(65536))


def exact_group(folder: Path) -> None:
    """Small files that fill a block to the byte, and one more."""
    for at in range(16):
        put(folder, f"{at:02}", noise(65535))
    put(folder, "16", noise(16))
    put(folder, "17", b"next block")


def zero_runs(folder: Path) -> None:
    """Zero runs about as long as the shortest zero extent, at all places of a file."""
    for run in (65535, 65536, 65537, 66047, 66048, 131072):
        put(folder, f"front/{run}", bytes(run) + noise(70000))
        put(folder, f"between/{run}", noise(512 * 9) + bytes(run) + noise(70000))
        put(folder, f"between-grains/{run}", noise(1000) + bytes(run) + noise(70000))
        put(folder, f"end/{run}", noise(512 * 9) + bytes(run))
        put(folder, f"all/{run}", bytes(run))
    put(folder, "zero-to-limit", noise(512) + bytes(MIB + 5))
    put(folder, "short-runs", (noise(512) + bytes(65024)) * 40)


def page_files(folder: Path) -> None:
    """Names and sizes that are page data, and some that are not."""
    pages = (noise(4096 * 50) + bytes(4096 * 15) + noise(4096 * 3) + bytes(4096 * 16)) * 6
    put(folder, "pages-1.img", pages)
    put(folder, "deep/er/pages-22.img", pages[4096:])
    put(folder, "amdgpu-pages-0-0.img", pages[8192:])
    put(folder, "pages-1.img.not", pages[12288:])
    put(folder, "pages-.img", pages[16384:])
    put(folder, "pages-x.img", pages[:-4096])
    put(folder, "pages-3.img", pages[:-100])
    put(folder, "gpu-blob", pages[:-8192])


def large(folder: Path) -> None:
    """Files far longer than any window, with zero runs across every MiB, and all codecs."""
    blob = bytearray(noise(22 * MIB + 77))
    for at in range(1, 22):
        start = at * MIB - (at * 4096) % 50000
        length = (65024, 65536, 66048, 100000, 512, 3 * MIB // 2)[at % 6]
        blob[start : start + length] = bytes(length)
    put(folder, "blob", bytes(blob[: 22 * MIB + 77]))
    put(folder, "pages-7.img", bytes(blob[5 * MIB : 13 * MIB]))
    words = RANDOM.integers(1, 30, 3 * MIB // 4, dtype=np.uint32)
    put(folder, "words", words.tobytes())
    put(folder, "text", b"the same again and again " * 100000)


def attributes(folder: Path) -> None:
    """All kinds of files, with unusual names, modes and times."""
    long = "/".join(["x" * 255] * 3)
    put(folder, long, b"deep")
    for name in (
        b"\xff\xfe",
        b"new\nline",
        b"back\\slash",
        b" ",
        b"-",
        b"\xc3\xbc",
        b"...",
        b"a:b",
    ):
        put(folder, name, name)
    first = put(folder, "m/first", noise(100000))
    os.link(first, folder / "m/second")
    os.link(first, folder / "a-link")
    os.symlink(b"/nowhere/\xff", os.fsencode(folder / "absolute"))
    os.symlink("../..", folder / "m/up")
    os.symlink("m", folder / "to-folder")
    os.mkfifo(folder / "fifo", 0o640)
    sparse = put(folder, "sparse", b"front")
    os.truncate(sparse, 3 * MIB + 3)
    (folder / "hollow").mkdir(mode=0o1777)
    put(folder, "setuid", b"x").chmod(0o6711)
    put(folder, "closed", b"x").chmod(0o400)
    put(folder, "old", b"x")
    for path, nanoseconds in (("old", -1), ("fifo", -(10**9)), ("m/up", -1500000000), ("m", 1)):
        os.utime(folder / path, ns=(0, nanoseconds), follow_symlinks=False)
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(folder, os.O_PATH)
        listener.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)


def odd_page_names(folder: Path) -> None:
    """Names that a regular expression may take for page data, or not."""
    for name in ("pages-\u0661.img", "amdgpu-pages-\n", "amdgpu-pages-", "pages-1.img\n"):
        put(folder, name, noise(4096 * 200))


BUILDERS: list[Callable[[Path], None]] = [
    small_files,
    exact_group,
    zero_runs,
    page_files,
    large,
    attributes,
]


def check_image(store: second.Store, name: str, sources: list[tuple[Entry, bytes]]) -> None:
    """The image has the files' every byte and attribute, in the encoding that is predicted."""
    opened, bytes_of = store.read(store.state.names[f"{name}:latest"])
    plain = [replace(entry, extents=()) for entry in opened.files]
    wanted = [replace(entry, size=len(data)) for entry, data in sources]
    assert plain == sorted(wanted, key=lambda entry: entry.path)
    for entry, data in sources:
        if entry.kind == second.REGULAR:
            assert bytes_of[entry.path] == data, entry.path
    manifest = store.manifest(store.state.names[f"{name}:latest"])
    assert second.predict(sources, opened.facts, opened.labels) == manifest


def test_weights(tmp_path: Path) -> None:
    weights = np.random.default_rng(8).normal(0, 0.02, 400_001).astype("<f4")
    bf16 = weights.view("<u2")[1::2].tobytes()
    put(tmp_path, "source/single.bin", weights.tobytes() + b"end")
    put(tmp_path, "source/brain.bin", bf16 + b"!")
    put(tmp_path, "source/pages-1.img", bf16[: 4096 * 99] + noise(4096) + bf16[: 4096 * 50])
    icefloe(tmp_path / "store", "add", tmp_path / "source", "x")
    store = second.Store(tmp_path / "store")
    check_image(store, "x", second.read_folder(tmp_path / "source"))
    assert {second.PLANES2, second.PLANES4} <= {row.codec for _, row in store.rows.values()}


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_folder(build: Callable[[Path], None], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    build(source)
    icefloe(tmp_path / "store", "add", source, "x")
    check_image(second.Store(tmp_path / "store"), "x", second.read_folder(source))


def test_names_labels_rm_and_gc(tmp_path: Path) -> None:
    sources = {}
    shared = noise(3 * MIB)
    for name in ("one", "two", "three"):
        put(tmp_path / name, "own", noise(2 * MIB))
        put(tmp_path / name, "shared", shared)
        sources[name] = second.read_folder(tmp_path / name)
        icefloe(
            tmp_path / "store", "add", tmp_path / name, name, "--label", 'k="\x7f\u00fc\U0001f9ca'
        )
    icefloe(tmp_path / "store", "tag", "two", "other:tag")
    icefloe(tmp_path / "store", "rm", "one", "two")
    icefloe(tmp_path / "store", "add", tmp_path / "one", "one")
    icefloe(tmp_path / "store", "add", tmp_path / "one", "one-again")
    check_image(second.Store(tmp_path / "store"), "one-again", sources["one"])
    icefloe(tmp_path / "store", "rm", "one", "one-again")
    icefloe(tmp_path / "store", "gc", "--grace", "0s")
    store = second.Store(tmp_path / "store")
    assert set(store.state.names) == {"other:tag", "three:latest"}
    assert set(store.state.names.values()) == store.state.images
    there = {path.name for path in (tmp_path / "store" / "packs").glob("*/*")}
    assert store.state.packs == there
    check_image(store, "three", sources["three"])
    opened, _ = store.read(store.state.names["other:tag"])
    assert opened.labels == {"k": '"\x7f\u00fc\U0001f9ca'}


def test_parent_dump(tmp_path: Path) -> None:
    put(tmp_path, "base/inventory.img", b"base")
    put(tmp_path, "base/pages-1.img", noise(4096 * 20))
    put(tmp_path, "top/inventory.img", b"top")
    (tmp_path / "top/parent").symlink_to("../base")
    sources = [item for item in second.read_folder(tmp_path / "top") if item[0].path != b"parent"]
    for entry, data in second.read_folder(tmp_path / "base"):
        sources.append(
            (replace(entry, path=b"parent/"[: 7 if entry.path else 6] + entry.path), data)
        )
    icefloe(tmp_path / "store", "add", tmp_path / "top", "x")
    check_image(second.Store(tmp_path / "store"), "x", sources)


# --- vectors ------------------------------------------------------------------------------------

VECTORS = Path(__file__).parent / "vectors"


@pytest.mark.parametrize("name", ["raw.pack", "mixed.pack"])
def test_vector_packs(name: str) -> None:
    pack = (VECTORS / name).read_bytes()
    digest, rows = second.read_pack(pack)
    blocks = [(row.kind, second.block(pack, row)) for row in rows]
    assert second.salvage(pack[: rows[-1].offset + rows[-1].stored]) == rows
    if name == "raw.pack":
        assert second.write_pack(blocks) == (digest, pack)


def test_vector_planes() -> None:
    rows = json.loads((VECTORS / "planes.json").read_text())
    assert [row["codec"] for row in rows] == [second.PLANES2, second.PLANES4]
    for row in rows:
        payload = bytes.fromhex(row["payload"])
        raw = second.decode(row["codec"], payload, row["raw"])
        assert second.block_id(raw).hex() == row["id"]
        for wrong in (payload[:-1], payload + b"x", b"\xff" + payload[1:]):
            with pytest.raises(second.Refused):
                second.decode(row["codec"], wrong, row["raw"])


def test_vector_manifest() -> None:
    manifest = (VECTORS / "image.manifest").read_bytes()
    image = second.read_manifest(manifest)
    again = second.encode_manifest(image.files, image.blocks, image.facts, image.labels)
    assert again == manifest


def test_odd_page_names(tmp_path: Path) -> None:
    odd_page_names(tmp_path / "source")
    icefloe(tmp_path / "store", "add", tmp_path / "source", "x")
    sources = second.read_folder(tmp_path / "source")
    check_image(second.Store(tmp_path / "store"), "x", sources)


# --- archives -----------------------------------------------------------------------------------


def tar_member(archive: tarfile.TarFile, entry: Entry, data: bytes) -> None:
    """Appends one file to an archive."""
    kinds = {
        second.REGULAR: tarfile.REGTYPE,
        second.FOLDER: tarfile.DIRTYPE,
        second.SYMLINK: tarfile.SYMTYPE,
        second.HARD_LINK: tarfile.LNKTYPE,
        second.FIFO: tarfile.FIFOTYPE,
        second.CHARACTER: tarfile.CHRTYPE,
    }
    member = tarfile.TarInfo(os.fsdecode(entry.path) or ".")
    member.type, member.mode, member.size = kinds[entry.kind], entry.mode, len(data)
    member.uid, member.gid, member.mtime = entry.uid, entry.gid, entry.mtime[0]
    member.linkname = os.fsdecode(entry.link)
    member.devmajor, member.devminor = os.major(entry.device), os.minor(entry.device)
    archive.addfile(member, BytesIO(data))


def archive_sources() -> list[tuple[Entry, bytes]]:
    """Files in an order that is not that of their paths."""
    time = (1700000000, 0)
    files: list[tuple[bytes, int, bytes, bytes]] = [
        (b"", second.FOLDER, b"", b""),
        (b"z", second.REGULAR, b"", noise(60000)),
        (b"d", second.FOLDER, b"", b""),
        (b"d/pages-5.img", second.REGULAR, b"", (noise(4096 * 99) + bytes(65536)) * 9),
        (b"d/hard", second.REGULAR, b"", noise(100)),
        (b"e", second.HARD_LINK, b"d/hard", b""),
        (b"d/soft", second.SYMLINK, b"../\xff", b""),
        (b"fifo", second.FIFO, b"", b""),
        *((b"%d" % (99 - at), second.REGULAR, b"", noise(60000)) for at in range(20)),
    ]
    made = [
        (Entry(path, kind, 0o700 + at, at, 2 * at, time, link=link), data)
        for at, (path, kind, link, data) in enumerate(files)
    ]
    null = Entry(b"null", second.CHARACTER, 0o666, 0, 0, time, device=os.makedev(1, 3))
    return [*made, (null, b"")]


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tar.zst"])
def test_archive(ending: str, tmp_path: Path) -> None:
    sources = archive_sources()
    plain = BytesIO()
    mode = "w:gz" if ending == "tar.gz" else "w"
    with tarfile.open(fileobj=plain, mode=mode) as archive:  # type: ignore[call-overload]
        for entry, data in sources:
            tar_member(archive, entry, data)
    packed = plain.getvalue()
    if ending == "tar.zst":
        packed = zstandard.compress(packed)
    icefloe(tmp_path / "store", "add", put(tmp_path, f"x.{ending}", packed), "x")
    check_image(second.Store(tmp_path / "store"), "x", sources)


@pytest.mark.parametrize("size", [5, 100000])
def test_archive_whose_hard_link_sorts_before_its_file(size: int, tmp_path: Path) -> None:
    read = Entry(b"z", second.REGULAR, 0o600)
    link = Entry(b"a", second.HARD_LINK, 0o640, link=b"z")
    data = noise(size)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        tar_member(archive, read, data)
        tar_member(archive, link, b"")
    icefloe(tmp_path / "store", "add", tmp_path / "x.tar", "x")
    wanted = [
        (replace(link, kind=second.REGULAR, link=b""), data),
        (replace(read, kind=second.HARD_LINK, link=b"a"), b""),
    ]
    check_image(second.Store(tmp_path / "store"), "x", wanted)


# --- a store from the other side ----------------------------------------------------------------


def test_icefloe_reads_what_the_second_writer_wrote(tmp_path: Path) -> None:
    raw = noise(100000)
    name = second.block_id(raw)
    pieces = (
        Extent(name, 7, 5),
        Extent(None, 0, 3),
        Extent(name, 0, 7),
        Extent(name, 90000, 10000),
    )
    odd = Entry(b"odd", second.REGULAR, 0o600, os.getuid(), os.getgid(), (-5, 9), 25 - 10 + 10000)
    root = replace(odd, path=b"", kind=second.FOLDER, mode=0o750, size=0)
    tail = Entry(b"small", second.REGULAR, 0o640, os.getuid(), os.getgid(), (5, 0), 9)
    files = [root, replace(odd, extents=pieces), replace(tail, extents=(Extent(name, 7, 9),))]
    second.write_store(tmp_path / "store", "x", files, {name: raw})
    icefloe(tmp_path / "store", "check")
    icefloe(tmp_path / "store", "export", "x", tmp_path / "out")
    assert (tmp_path / "out/odd").read_bytes() == raw[7:12] + bytes(3) + raw[:7] + raw[90000:]
    assert (tmp_path / "out/small").read_bytes() == raw[7:16]
    written = [entry for entry, _ in second.read_folder(tmp_path / "out")]
    assert written == [replace(entry, size=0, extents=()) for entry in files]


def test_salvage_and_alignment() -> None:
    blocks = [(second.DATA, noise(size)) for size in (1, 4000, 4095, 4096, 4050, 5000, 4095 - 96)]
    blocks.append((second.MANIFEST, dumps()[0]))
    _, pack = second.write_pack(blocks)
    _, rows = second.read_pack(pack)
    assert [(row.kind, second.block(pack, row)) for row in rows] == blocks
    assert [row.offset % 4096 for row in rows if row.raw >= 4096] == [0, 0]
    end = rows[-1].offset + rows[-1].stored
    assert second.salvage(pack[:end]) == rows
    assert second.salvage(pack[: end - 1]) == rows[:-1]
