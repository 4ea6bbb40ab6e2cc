"""One suite for every object store; beside each, somebody else reads and writes the same."""

import errno
import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import fsspec
import pytest
from fault_proxy import Fault, FaultProxy
from s3_server import READER_KEY, READER_SECRET, S3Server

from icefloe.transfer import s3
from icefloe.transfer.folder import FolderObjects
from icefloe.transfer.fsspec_objects import FsspecObjects
from icefloe.transfer.objects import (
    ABSENT,
    Conflict,
    NoSuchObject,
    ObjectInfo,
    Objects,
    Refused,
    Transient,
)
from icefloe.transfer.options import S3Options
from icefloe.transfer.patient import PatientObjects
from icefloe.transfer.s3 import S3Objects

NAMES = ["format", "names/worker/a.b-c_d:step-1200", "packs/00/" + "0f" * 32]


class Medium(Protocol):
    """The objects, read and written by somebody else."""

    def get(self, key: str) -> bytes:
        """What is there."""

    def put(self, key: str, content: bytes) -> None:
        """Has this be there."""


class ByMinio:
    """S3 by another client."""

    def __init__(self, server: S3Server, bucket: str, prefix: str) -> None:
        self.client = server.client()
        self.bucket = bucket
        self.prefix = prefix

    def get(self, key: str) -> bytes:
        answer = self.client.get_object(self.bucket, self.prefix + key)
        try:
            return answer.read()
        finally:
            answer.close()
            answer.release_conn()

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(self.bucket, self.prefix + key, io.BytesIO(content), len(content))


class ByFiles:
    """A folder by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def put(self, key: str, content: bytes) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(content)


class InMemory:
    """fsspec's own."""

    def __init__(self, root: str) -> None:
        self.fs: Any = fsspec.filesystem("memory")
        self.root = root

    def get(self, key: str) -> bytes:
        content: bytes = self.fs.cat_file(f"{self.root}/{key}")
        return content

    def put(self, key: str, content: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{key}", content)


Made = tuple[Objects, Medium]


@pytest.fixture(params=["s3", "folder", "memory"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("aws")
        bucket = server.bucket()
        yield (
            S3Objects(f"s3://{bucket}/some/where", S3Options()),
            ByMinio(server, bucket, "some/where/"),
        )
    elif request.param == "folder":
        yield FolderObjects(f"file://{tmp_path}/shared"), ByFiles(tmp_path / "shared")
    else:
        root = f"/objects-{os.urandom(4).hex()}"
        yield FsspecObjects(f"memory:/{root}"), InMemory(root)


def filled(objects: Objects, key: str, start: int, length: int) -> bytes:
    """What `read_into` brings, by as many calls as it takes."""
    into, done = memoryview(bytearray(length)), 0
    while done < length and (count := objects.read_into(key, start + done, into[done:])):
        done += count
    return bytes(into[:done])


@pytest.mark.parametrize("key", NAMES)
def test_what_is_put_is_there(made: Made, key: str) -> None:
    objects, medium = made
    for content in (b"", b"x", os.urandom(100_000)):
        tag = objects.put(key, content)
        assert medium.get(key) == content
        found = objects.read(key)
        assert (found.content, found.tag) == (content, tag)
        assert objects.info(key).size == len(content)


def test_what_others_put(made: Made) -> None:
    objects, medium = made
    content = os.urandom(300_000)
    medium.put("packs/a", content)
    assert objects.read("packs/a").content == content
    assert filled(objects, "packs/a", 1000, 2000) == content[1000:3000]
    assert filled(objects, "packs/a", 0, 300_000) == content
    assert filled(objects, "packs/a", 299_990, 50) == content[-10:]
    assert filled(objects, "packs/a", 300_000, 50) == b""
    assert filled(objects, "packs/a", 999_999, 50) == b""


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_whole_pack(made: Made, kind: Callable[[bytes], bytes | bytearray]) -> None:
    """A pack is one object, written by one request."""
    objects, _ = made
    content = os.urandom(1 << 20) * 66
    objects.put("packs/big", kind(content))
    assert objects.info("packs/big").size == len(content)
    assert filled(objects, "packs/big", 65 << 20, 1 << 20) == content[: 1 << 20]


def test_nothing_is_there(made: Made) -> None:
    objects, medium = made
    medium.put("else", b"x")
    into = memoryview(bytearray(10))
    for ask in (
        lambda: objects.read("no/such"),
        lambda: objects.info("no/such"),
        lambda: objects.read_into("no/such", 0, into),
    ):
        with pytest.raises(NoSuchObject):
            ask()
    objects.delete(["no/such", "neither"])
    assert not objects.page("no/", "").rows


def test_conditions(made: Made) -> None:
    objects, medium = made
    first = objects.put("names/a:b", b"1", ABSENT)
    with pytest.raises(Conflict):
        objects.put("names/a:b", b"2", ABSENT)
    second = objects.put("names/a:b", b"3", first)
    with pytest.raises(Conflict):
        objects.put("names/a:b", b"4", first)
    assert medium.get("names/a:b") == b"3"
    objects.delete(["names/a:b"])
    with pytest.raises(Conflict):
        objects.put("names/a:b", b"5", second)
    objects.put("names/a:b", b"6", ABSENT)
    assert medium.get("names/a:b") == b"6"


@pytest.mark.parametrize("expect", ["absent", "tag"])
def test_one_of_several_wins(made: Made, expect: str) -> None:
    objects, medium = made
    tag = ABSENT if expect == "absent" else objects.put("leases/gc", b"before")
    start, won = threading.Barrier(4), []

    def try_it(i: int) -> None:
        start.wait()
        try:
            objects.put("leases/gc", b"%d" % i, tag)
            won.append(i)
        except Conflict:
            pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(try_it, range(4)))
    assert len(won) == 1 and medium.get("leases/gc") == b"%d" % won[0]


def test_listing(made: Made) -> None:
    objects, medium = made
    before = time.time()
    keys = [f"indexes/{i:04}" for i in range(1100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: objects.put(key, b"x"), keys))
    medium.put("indexed", b"not of the folder")
    medium.put("packs/ab/x", b"another")
    found: list[ObjectInfo] = []
    after, pages = "", 0
    while True:
        page = objects.page("indexes/", after)
        found += page.rows
        pages += 1
        if not page.more:
            break
        after = page.rows[-1].key
    assert [row.key for row in found] == keys and pages <= 2
    assert all(row.size == 1 and abs(row.modified - before) < 60 for row in found)
    assert [row.key for row in objects.page("indexes/", keys[1090]).rows] == keys[1091:]
    assert [row.key for row in objects.page("indexe", keys[-1]).rows] == []
    objects.delete(keys)
    assert [row.key for row in objects.page("", "").rows] == ["indexed", "packs/ab/x"]


def test_many_at_once(made: Made) -> None:
    objects, _ = made

    def work(i: int) -> bool:
        content = bytes([i]) * 50_000
        objects.put(f"packs/{i}", content)
        return filled(objects, f"packs/{i}", 100, 1000) == content[:1000]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(64)))


def test_nothing_outside_of_the_prefix(aws: S3Server) -> None:
    bucket = aws.bucket()
    here = S3Objects(f"s3://{bucket}/a", S3Options())
    other = S3Objects(f"s3://{bucket}/ab", S3Options())
    here.put("x", b"1")
    other.put("x", b"2")
    assert [row.key for row in here.page("", "").rows] == ["x"]
    here.delete(["x"])
    assert other.read("x").content == b"2" and not here.page("", "").rows


def test_uploads_that_nobody_finished(aws: S3Server) -> None:
    bucket = aws.bucket()
    client: Any = aws.client()
    upload = client._create_multipart_upload(bucket, "p/packs/aa/x", {})
    client._create_multipart_upload(bucket, "q/packs/aa/x", {})
    objects = S3Objects(f"s3://{bucket}/p", S3Options())
    (found,) = objects.unfinished()
    assert (found.key, found.upload) == ("packs/aa/x", upload)
    assert abs(found.started - time.time()) < 60
    objects.abandon(found)
    objects.abandon(found)  # once more does nothing
    assert not objects.unfinished()
    assert len(S3Objects(f"s3://{bucket}", S3Options()).unfinished()) == 1


def test_uploads_to_a_folder_that_nobody_finished(tmp_path: Path) -> None:
    objects = FolderObjects(f"file://{tmp_path}")
    objects.put("packs/aa/x", b"1")
    left = tmp_path / "packs/aa/.x.0123.new"
    left.write_bytes(b"half")
    (found,) = objects.unfinished()
    assert [row.key for row in objects.page("", "").rows] == ["packs/aa/x"]
    objects.abandon(found)
    assert not left.exists() and not objects.unfinished()


@pytest.mark.parametrize("kind", [FolderObjects, FsspecObjects])
def test_folders_that_cannot_be_listed(
    kind: type[FolderObjects] | type[FsspecObjects], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that took them for empty would remove what it must keep."""
    objects = kind(f"{'file' if kind is FolderObjects else 'local'}://{tmp_path}")
    objects.put("packs/aa/x", b"1")
    objects.put("manifests/x", b"1")
    whole = os.scandir

    def failing(path: str) -> object:
        if str(path).endswith("manifests"):
            raise OSError(errno.ESTALE, "stale", str(path))
        return whole(path)

    monkeypatch.setattr(os, "scandir", failing)
    for prefix in ("", "manifests/"):
        with pytest.raises((Refused, Transient), match="stale"):
            objects.page(prefix, "")
    assert [row.key for row in objects.page("packs/", "").rows] == ["packs/aa/x"]
    assert not objects.page("nothing/", "").rows


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    """One for several tests: a new one takes a second."""
    return s3.bucket()


@pytest.fixture
def objects(bucket: str, proxy: FaultProxy) -> S3Objects:
    """A place of its own behind the proxy."""
    return S3Objects(f"s3://{bucket}/{os.urandom(4).hex()}", S3Options())


@pytest.mark.parametrize("fault", ["busy", "expired", "reset", "lost", "cut-request", "stall"])
def test_one_call_is_one_request(
    fault: Fault, objects: S3Objects, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody below tries again, not even over a connection that was kept; only we know how."""
    objects.put("packs/x", b"x" * 100_000)  # the first of a bucket takes its time
    if fault.startswith("stall"):
        monkeypatch.setattr(s3, "_SILENT_SECONDS", 0.3)
        objects = S3Objects(objects.url, S3Options())
        objects.info("packs/x")
    asks: list[Callable[[], object]] = [
        lambda: objects.put("names/x", b"mine", ABSENT),
        lambda: objects.read("packs/x"),
        lambda: objects.info("packs/x"),
        lambda: objects.page("", ""),
        lambda: objects.delete(["names/x"]),
    ]
    for ask in asks:
        proxy.fail(fault, "", times=10)
        before = proxy.count()
        with suppress(Transient, Refused):
            ask()
        assert proxy.count() == before + 1
        proxy.heal()
        with suppress(Transient):  # a connection that was kept is of no use
            objects.info("packs/x")
        objects.info("packs/x")


def test_a_write_does_not_conflict_with_itself(objects: S3Objects, proxy: FaultProxy) -> None:
    patient, tag = PatientObjects(objects, 10), ABSENT
    faults: list[Fault] = ["reset", "lost", "cut-request", "lost"]
    for i, fault in enumerate(faults):
        proxy.fail(fault, "PUT .*names/x")
        tag = patient.put("names/x", b"%d" % i, tag)
        assert patient.read("names/x").tag == tag


def test_a_server_that_stops_reading(
    objects: S3Objects, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel can't take any more waits for somebody who never comes."""
    monkeypatch.setattr(s3, "_STUCK_SECONDS", 0.4)
    proxy.fail("stall-request", "PUT")
    started = time.monotonic()
    with pytest.raises(Transient, match="has taken nothing for"):
        objects.put("packs/x", bytes(32 << 20))
    assert time.monotonic() - started < 5
    objects.put("packs/x", bytes(32 << 20))
    assert proxy.count() == 2


def test_refusals(aws: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="NoSuchBucket"):
        S3Objects("s3://icefloe-no-such-bucket", S3Options()).read("x")
    bucket = aws.bucket()
    objects = S3Objects(f"s3://{bucket}", S3Options())
    objects.put("x", b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    objects = S3Objects(f"s3://{bucket}", S3Options())
    with pytest.raises(Refused, match="SignatureDoesNotMatch"):
        objects.read("x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", aws.secret)
    objects.renew()
    assert objects.read("x").content == b"1"
    if aws.has_reader:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
        objects = S3Objects(f"s3://{bucket}", S3Options())
        assert objects.read("x").content == b"1"
        with pytest.raises(Refused, match="AccessDenied"):
            objects.put("x", b"2")


def test_the_options(aws: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the configuration says counts more than the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    bucket = aws.bucket()
    options = S3Options(aws.endpoint, "us-east-1", "path")
    S3Objects(f"s3://{bucket}", options).put("x", b"1")
    assert aws.client().stat_object(bucket, "x").size == 1
