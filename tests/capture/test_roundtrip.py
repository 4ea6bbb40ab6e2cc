"""What goes in comes out: every kind of entry, every time and mode, from folders and archives."""

import gzip
import os
import shutil
import socket
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import slow_chunker as slow
import small_store
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_store import KIB, NOISE

from icefloe.capture.add import add_checkpoint, open_checkpoint
from icefloe.capture.export import export_image
from icefloe.capture.ingest import AddResult, IngestOptions
from icefloe.capture.windows import SMALL_FILE, WINDOW_BYTES
from icefloe.catalog import LocalStore, open_store
from icefloe.errors import BadSource, ExportExists
from icefloe.ids import parse_name
from icefloe.store.policies import PolicyName

IS_ROOT = os.geteuid() == 0
MIB = 1 << 20

# 2026-11-30 with nanoseconds that no float can hold.
TIME_NS = 1_796_083_200_123_456_789


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    """An empty store, open for writing."""
    with open_store(tmp_path / "store", write=True, create=True) as opened:
        yield opened


def add(
    store: LocalStore, path: Path, name: str = "x", workers: int = 2, policy: PolicyName = "fast"
) -> AddResult:
    """Stores a folder or an archive."""
    checkpoint = open_checkpoint(path)
    return add_checkpoint(store, checkpoint, parse_name(name), {}, IngestOptions(policy, workers))


def round_trip(store: LocalStore, path: Path) -> Path:
    """The folder that comes out."""
    image = add(store, path).id
    out = path.with_name("out")
    export_image(store, image, out, workers=2)
    return out


@dataclass(frozen=True, slots=True)
class Seen:
    """All that can be seen of one entry. `inode` is the first path with the same inode."""

    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    device: int
    link: str
    content: bytes
    inode: bytes


def look(root: Path) -> dict[bytes, Seen]:
    """Every entry by its path as bytes, the root itself included."""
    places = [os.fsencode(root)]
    for folder, folders, files in os.walk(os.fsencode(root)):
        places += [os.path.join(folder, name) for name in (*folders, *files)]
    first: dict[int, bytes] = {}
    seen = {}
    for place in sorted(places):
        status, path = os.lstat(place), os.path.relpath(place, os.fsencode(root))
        kind = stat.S_IFMT(status.st_mode)
        content = b""
        if kind == stat.S_IFREG:
            with open(place, "rb") as file:
                content = file.read()
        seen[path] = Seen(
            status.st_mode,
            (status.st_uid, status.st_gid),
            status.st_mtime_ns,
            status.st_rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0,
            os.readlink(place).decode(errors="surrogateescape") if kind == stat.S_IFLNK else "",
            content,
            first.setdefault(status.st_ino, path),
        )
    return seen


def set_times(root: Path) -> None:
    """Another nanosecond for each entry, from the leaves up."""
    places = sorted(root.rglob("*"), key=lambda place: os.fsencode(place), reverse=True)
    for i, place in enumerate([*places, root]):
        os.utime(place, ns=(0, TIME_NS + i), follow_symlinks=False)


LENGTHS = (0, 1, 511, 512, 513, 4095, 4096, 4097, SMALL_FILE - 1, SMALL_FILE, SMALL_FILE + 1)


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """One of everything that archives can hold too."""
    root = tmp_path / "zoo"
    (root / "empty folder").mkdir(parents=True)
    (root / "deep" / "er" / "still").mkdir(parents=True)
    for length in LENGTHS:
        (root / f"length-{length}").write_bytes(slow.noise(length, length))
    (root / "pages-1.img").write_bytes(NOISE[0] + bytes(200 * KIB) + NOISE[1] + bytes(4096))
    (root / "pages-2.img").write_bytes(bytes(300 * KIB))
    (root / "odd pages-3.img").write_bytes(NOISE[2] + b"no whole page")
    for name in ("-rf", "line\nbreak", "tab\t", "ünïcode", " ", "n" * 255, "[bold]"):
        (root / name).write_bytes(os.fsencode(name))
    (root / "deep/er/still/file").write_bytes(b"deep")
    os.link(root / "pages-1.img", root / "deep/linked")
    os.link(root / "pages-1.img", root / "a linked before")
    os.link(root / "length-0", root / "deep/empty linked")
    os.symlink("nowhere", root / "dangling")
    os.symlink("/etc/passwd", root / "absolute")
    os.symlink("../deep", root / "deep/around")
    os.chmod(root / "length-1", 0o4711)
    os.chmod(root / "length-512", 0o000)
    os.chmod(root / "empty folder", 0o1777)
    if IS_ROOT:
        os.lchown(root / "length-513", 1234, 56789)
        os.lchown(root / "dangling", 4321, 0)
        os.chmod(root / "length-513", 0o2755)
    set_times(root)
    os.chmod(root, 0o751)
    return root


def same(before: dict[bytes, Seen], after: dict[bytes, Seen]) -> None:
    """Compares entry by entry: pytest's own diff of all this would take minutes."""
    assert sorted(before) == sorted(after)
    for path, entry in before.items():
        assert after[path] == entry, path


# --- folders ------------------------------------------------------------------------------------


def test_everything(store: LocalStore, zoo: Path) -> None:
    (zoo / os.fsdecode(b"no \xff\xfe text")).write_bytes(b"bytes")
    os.symlink(os.fsdecode(b"\xff"), zoo / "link to bytes")
    os.mkfifo(zoo / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(zoo / "sock"))
    if IS_ROOT:
        os.mknod(zoo / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(zoo / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 259))
    set_times(zoo)
    same(look(zoo), look(round_trip(store, zoo)))


def test_empty_root(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir(mode=0o700)
    same(look(tmp_path / "nothing"), look(round_trip(store, tmp_path / "nothing")))


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_umask_changes_no_mode(store: LocalStore, zoo: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        same(look(zoo), look(round_trip(store, zoo)))
    finally:
        os.umask(before)


@pytest.mark.parametrize("off", [-4096, -1, 0, 1, 4096])
def test_ends_of_windows(store: LocalStore, tmp_path: Path, off: int) -> None:
    """Files that end near the end of a window, with zeros and data across it."""
    root = tmp_path / "image"
    root.mkdir()
    content = bytearray(WINDOW_BYTES + off)
    content[:100_000] = NOISE[0] + b"x" * (100_000 - len(NOISE[0]))
    content[-50_000:] = NOISE[1][:50_000]
    for name in ("pages-1.img", "other"):
        (root / name).write_bytes(content)
    (root / "longer").write_bytes(content + NOISE[2])
    same(look(root), look(round_trip(store, root)))


def test_holes_stay_holes(store: LocalStore, tmp_path: Path) -> None:
    """In, a hole costs no reading; out, zeros take no disk."""
    root = tmp_path / "image"
    root.mkdir()
    with (root / "pages-1.img").open("wb") as file:
        file.truncate(2 << 30)
        file.seek(1 << 30)
        file.write(NOISE[0])
    (root / "written zeros").write_bytes(bytes(16 * MIB))
    out = round_trip(store, root)
    assert (out / "pages-1.img").stat().st_size == 2 << 30
    assert (out / "pages-1.img").stat().st_blocks * 512 <= len(NOISE[0]) + MIB
    assert (out / "written zeros").stat().st_blocks == 0
    with (out / "pages-1.img").open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 1 << 30
        file.seek(1 << 30)
        assert file.read(len(NOISE[0]) + 1) == NOISE[0] + b"\0"


def test_many_small_files(store: LocalStore, tmp_path: Path) -> None:
    """They share blocks, and each is itself again."""
    root = tmp_path / "image"
    root.mkdir()
    for i in range(2000):
        (root / f"{i}.img").write_bytes(b"%d" % i * (i % 50))
    result = add(store, root)
    assert result.blocks < 20
    same(look(root), look(round_trip(store, root)))


def test_deep_paths(store: LocalStore, tmp_path: Path) -> None:
    """As deep as a path can be named at once: deeper than Python's stack."""
    place = root = tmp_path / "image"
    root.mkdir()
    while len(str(place)) < 3900:
        place = place / "d"
        place.mkdir()
    out = round_trip(store, root)
    assert (out / place.relative_to(root)).is_dir()
    subprocess.run(["rm", "-rf", str(root), str(out)], check=True)  # pytest could not


# --- identity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "policy"), [(1, "fast"), (3, "balanced"), (2, "small")])
def test_the_id_depends_on_the_content_alone(
    store: LocalStore, zoo: Path, workers: int, policy: PolicyName
) -> None:
    first = add(store, zoo)
    again = add(store, zoo, "again", workers, policy)
    assert again.id == first.id
    assert (again.new_blocks, again.stored_bytes) == (0, 0)


def test_order_of_names_on_disk_does_not_matter(store: LocalStore, tmp_path: Path) -> None:
    names = [f"{i}.img" for i in range(40)]
    for root, order in (("a", names), ("b", names[::-1])):
        (tmp_path / root).mkdir()
        for name in order:
            (tmp_path / root / name).write_bytes(name.encode())
        set_times(tmp_path / root)
    assert add(store, tmp_path / "a").id == add(store, tmp_path / "b").id


def test_an_insertion_costs_little(store: LocalStore, tmp_path: Path) -> None:
    """Pages inserted at the front move all others, and none of them is stored again."""
    content = slow.noise(8 * MIB, 7)
    for name, head in (("a", b""), ("b", NOISE[0][: 7 * 4096])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pages-1.img").write_bytes(head + content)
    add(store, tmp_path / "a")
    assert add(store, tmp_path / "b").new_bytes <= 2 * MIB


# --- archives -----------------------------------------------------------------------------------


def tar_with_python(source: Path, target: Path, kind: int = tarfile.PAX_FORMAT) -> None:
    """As Python writes it; without nanoseconds in the older formats."""
    with tarfile.open(target, "w", format=kind) as tar:
        tar.add(source, arcname=".")


def tar_with_tar(source: Path, target: Path) -> None:
    """As GNU tar writes it, with sparse files."""
    if shutil.which("tar") is None:
        pytest.skip("no tar here")
    options = ["--posix", "--sparse", "--numeric-owner"]
    subprocess.run(["tar", *options, "-cf", str(target), "-C", str(source), "."], check=True)


def gzipped(path: Path) -> Path:
    """In two members, as `cat a.gz b.gz` makes."""
    content = path.read_bytes()
    half = len(content) // 2 // 512 * 512
    packed = path.with_suffix(".tar.gz")
    packed.write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    return packed


def zstandarded(path: Path) -> Path:
    """In two frames, as `pzstd` makes."""
    content, compressor = path.read_bytes(), zstandard.ZstdCompressor(write_checksum=True)
    half = len(content) // 2 // 512 * 512
    packed = path.with_suffix(".tar.zst")
    packed.write_bytes(compressor.compress(content[:half]) + compressor.compress(content[half:]))
    return packed


PACKERS: dict[str, Callable[[Path], Path]] = {
    "tar": lambda path: path,
    "tar.gz": gzipped,
    "tar.zst": zstandarded,
}


@pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("writer", [tar_with_python, tar_with_tar])
def test_an_archive_is_its_folder(
    store: LocalStore,
    zoo: Path,
    tmp_path: Path,
    writer: Callable[[Path, Path], None],
    packer: Callable[[Path], Path],
) -> None:
    """The same bytes come out, and nothing is stored twice."""
    if writer is tar_with_python:  # its times are floats
        for place in [*zoo.rglob("*"), zoo]:
            os.utime(place, (0, 1_796_083_200), follow_symlinks=False)
    writer(zoo, tmp_path / "zoo.tar")
    folder = add(store, zoo)
    archive = packer(tmp_path / "zoo.tar")
    result = add(store, archive, "archive")
    export_image(store, result.id, tmp_path / "out")
    same(look(zoo), look(tmp_path / "out"))
    if os.listdir(zoo) and result.id != folder.id:
        # Only groups of small files, which come in another order, and the manifest may differ.
        assert result.new_bytes < 2 * MIB


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_formats_of_tar(store: LocalStore, tmp_path: Path, kind: int) -> None:
    root = tmp_path / "image"
    (root / ("f" * 90)).mkdir(parents=True)
    (root / ("f" * 90) / ("g" * 60)).write_bytes(NOISE[0])
    for place in [*root.rglob("*"), root]:
        os.utime(place, (0, 1_796_083_200))
    tar_with_python(root, tmp_path / "image.tar", kind)
    export_image(store, add(store, tmp_path / "image.tar").id, tmp_path / "out")
    same(look(root), look(tmp_path / "out"))


def test_folders_that_the_archive_leaves_out(store: LocalStore, tmp_path: Path) -> None:
    """And one that comes after what is in it."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "folder").mkdir()
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "file", "a/b/file")
        tar.add(tmp_path / "file", "late/file")
        tar.add(tmp_path / "folder", "late")
    out = round_trip(store, tmp_path / "x.tar")
    assert (out / "a/b/file").read_bytes() == (out / "late/file").read_bytes() == b"content"


@pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)
def test_an_archive_cut_off_anywhere(
    store: LocalStore, tmp_path: Path, packer: Callable[[Path], Path]
) -> None:
    """Even where one member ends and the next begins."""
    small_store.write_tree(tmp_path / "x", {"a": NOISE[0], "b": b"b", "c": NOISE[1][:5000]})
    tar_with_python(tmp_path / "x", tmp_path / "whole.tar", tarfile.GNU_FORMAT)
    content = (tmp_path / "whole.tar").read_bytes()
    cut = tmp_path / "cut.tar"
    for length in range(512, len(content.rstrip(b"\0")) + 512, 4 * 512 + 100):
        for at in (length, length // 512 * 512):
            cut.write_bytes(content[:at])
            with pytest.raises(BadSource, match="whole|lacks its end|empty"):
                add(store, packer(cut))
    packed = packer(tmp_path / "whole.tar").read_bytes()
    cut = tmp_path / "cut.packed"
    end = len(content.rstrip(b"\0")) if packed == content else len(packed)
    for at in range(len(packed) * 9 // 10, end, 997):
        cut.write_bytes(packed[:at])
        with pytest.raises(BadSource):
            add(store, cut)
    assert not list(store.catalog.images()) and not list(store.layout.published())


@pytest.mark.parametrize("packer", [gzipped, zstandarded])
def test_a_damaged_archive(
    store: LocalStore, tmp_path: Path, packer: Callable[[Path], Path]
) -> None:
    """Compressed bytes carry a sum: what doesn't match it is not stored."""
    small_store.write_tree(tmp_path / "x", {"a": NOISE[0], "b": b"b" * 9000})
    tar_with_python(tmp_path / "x", tmp_path / "x.tar")
    packed = bytearray(packer(tmp_path / "x.tar").read_bytes())
    damaged = tmp_path / "damaged"
    for at in range(40, len(packed), len(packed) // 23):
        packed[at] ^= 4
        damaged.write_bytes(packed)
        with pytest.raises(BadSource):
            add(store, damaged)
        packed[at] ^= 4
    assert not list(store.catalog.images())


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """A member without bytes."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HOSTILE = {
    "leads out": [member("../evil")],
    "leads out by and by": [member("a/../../evil")],
    "absolute": [member("/etc/evil")],
    "twice": [member("a"), member("./a")],
    "twice with a slash": [member("a", tarfile.DIRTYPE), member("a/", tarfile.DIRTYPE)],
    "below a file": [member("a"), member("a/b")],
    "through a link": [member("a", tarfile.SYMTYPE, "/tmp"), member("a/b")],
    "link to nothing": [member("a", tarfile.LNKTYPE, "b")],
    "link out": [member("a", tarfile.LNKTYPE, "../../etc/passwd")],
    "link to itself": [member("a", tarfile.LNKTYPE, "a")],
    "link to a folder": [member("b", tarfile.DIRTYPE), member("a", tarfile.LNKTYPE, "b")],
    "unknown kind": [member("a", b"Z")],
    "no name": [member(".")],
    "parent elsewhere": [member("inventory.img"), member("parent", tarfile.SYMTYPE, "../first")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
def test_hostile_archives(
    store: LocalStore, tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for info in members:
            tar.addfile(info)
    with pytest.raises(BadSource):
        add(store, tmp_path / "x.tar")
    assert not list(store.catalog.images()) and not list(store.layout.published())


# --- parents ------------------------------------------------------------------------------------


def test_a_chain_of_parents_is_stored_with_the_image(store: LocalStore, tmp_path: Path) -> None:
    """Each `parent` link leads to a folder of the image, which restores on its own."""
    for i, seed in enumerate(("1", "2", "3")):
        folder = tmp_path / "dumps" / seed
        folder.mkdir(parents=True)
        (folder / "inventory.img").write_bytes(b"inventory" + seed.encode())
        (folder / "pages-1.img").write_bytes(NOISE[i][: 8 * 4096])
        if i:
            os.symlink(f"../{i}", folder / "parent")
    out = round_trip(store, tmp_path / "dumps/3")
    shutil.move(out, tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "dumps")
    place = tmp_path / "elsewhere"
    for i in (2, 1, 0):
        assert (place / "pages-1.img").read_bytes() == NOISE[i][: 8 * 4096]
        place = place / "parent"
    assert not place.exists()


@pytest.mark.parametrize("target", ["../gone", ".", "../b"])
def test_broken_chains(store: LocalStore, tmp_path: Path, target: str) -> None:
    """A parent that is missing, the dump itself, or one that leads back."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inventory.img").write_bytes(b"i")
    os.symlink(target, tmp_path / "a/parent")
    os.symlink("../a", tmp_path / "b/parent")
    with pytest.raises(BadSource, match="parent"):
        add(store, tmp_path / "a")


# --- where it comes out -------------------------------------------------------------------------


def test_export_takes_empty_folders_only(store: LocalStore, tmp_path: Path) -> None:
    small_store.write_tree(tmp_path / "x", {"a": b"a"})
    image = add(store, tmp_path / "x").id
    (tmp_path / "empty").mkdir()
    export_image(store, image, tmp_path / "empty")
    assert (tmp_path / "empty/a").read_bytes() == b"a"
    before = look(tmp_path / "empty")
    for taken in (tmp_path / "empty", tmp_path / "empty/a"):
        with pytest.raises(ExportExists):
            export_image(store, image, taken)
    assert look(tmp_path / "empty") == before


# --- at random ----------------------------------------------------------------------------------

PARTS = st.lists(
    st.one_of(
        st.sampled_from([NOISE[0], NOISE[1][: 40 * KIB], b"short"]),
        st.sampled_from([1, 511, 512, 4096, 64 * KIB, 65 * KIB]).map(bytes),
        st.binary(max_size=600),
    ),
    max_size=5,
).map(b"".join)
NAMES = st.sampled_from(["pages-1.img", "pages-2.img", "a", "b", "core-7.img", "ä", "\n"])
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    st.one_of(PARTS, NAMES),  # bytes make a file, text a link
    max_size=8,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(tree=TREES, linked=st.booleans(), workers=st.integers(1, 3))
def test_random_trees(
    store: LocalStore,
    tmp_path_factory: pytest.TempPathFactory,
    tree: dict[tuple[str, ...], bytes | str],
    linked: bool,
    workers: int,
) -> None:
    root = tmp_path_factory.mktemp("random") / "image"
    root.mkdir()
    files = []
    for path, content in tree.items():
        place = root.joinpath(*path)
        if any(above.is_symlink() or above.is_file() for above in place.parents):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() or place.is_symlink():
            continue
        if isinstance(content, bytes):
            place.write_bytes(content)
            files.append(place)
        else:
            os.symlink(content, place)
    if linked and files and not (root / "linked").exists():
        os.link(files[-1], root / "linked")
    set_times(root)
    image = add(store, root, workers=workers).id
    out = root.with_name("out")
    export_image(store, image, out, workers=workers)
    same(look(root), look(out))
    shutil.rmtree(root.parent)
