"""`push`, `pull` and `remote` as people type them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small_store
from endings import Ended, fails
from remotes import key_file
from small_store import NOISE, Tree

from icefloe.cli import main

TREE: Tree = {"pages-1.img": small_store.pages([NOISE[0], bytes(128 << 10)]), "core.img": b"c"}

TRANSFER_KEYS = {
    "id": str,
    "logical_bytes": int,
    "wire_bytes": int,
    "blocks_sent": int,
    "blocks_skipped": int,
    "sources": dict,
    "seconds": float,
}


@dataclass(frozen=True, slots=True)
class Line:
    """Command lines on stores of these names, and a remote."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    @property
    def url(self) -> str:
        return f"file://{self.folder}/remote"

    def __call__(self, store: str, *arguments: str | Path) -> Ended:
        self.capture.readouterr()
        words = ["--store", self.folder / store, *arguments]
        try:
            main([str(word) for word in words])
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        printed = self.capture.readouterr()
        return Ended(code, printed.out, printed.err)

    def json(self, store: str, *arguments: str | Path) -> Any:
        ended = self(store, *arguments, "--json")
        assert (ended.code, ended.err) == (0, ""), ended
        return json.loads(ended.out)


@pytest.fixture
def line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Line:
    """A store `here` with an image, and nothing else."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    small_store.write_tree(tmp_path / "tree", TREE)
    line = Line(tmp_path, capsys)
    assert line("here", "add", tmp_path / "tree", "worker:1").code == 0
    return line


def test_what_is_promised(line: Line) -> None:
    for store, command in (("here", "push"), ("there", "pull")):
        answer = line.json(store, command, "worker:1", line.url)
        assert {key: type(answer[key]) for key in TRANSFER_KEYS} == TRANSFER_KEYS
        assert answer["sources"] == {line.url: answer["wire_bytes"]}
        assert answer["blocks_sent"] > 0 == answer["blocks_skipped"]
    (listed,) = line.json("here", "remote", "ls", line.url)
    assert (listed["name"], listed["id"]) == ("worker:1", answer["id"])
    checked = line.json("here", "remote", "check", line.url, "--read-data")
    assert checked["ok"] and checked["images"] == 1 and checked["problems"] == []
    assert line.json("here", "remote", "rm", line.url, "worker:1") == {"names": ["worker:1"]}
    planned = line.json("here", "remote", "gc", line.url, "--grace", "0s", "--dry-run")
    collected = line.json("here", "remote", "gc", line.url, "--grace", "0s")
    assert planned["freed_bytes"] == collected["freed_bytes"] > 0
    assert line.json("here", "remote", "ls", line.url) == []


def test_for_people(line: Line) -> None:
    sent = line("here", "push", "worker:1", line.url)
    assert sent.code == 0 and "on the wire" in sent.out and "in 10 requests" in sent.out
    came = line("there", "pull", "worker:1", line.url)
    assert came.code == 0 and "0 were there" in came.out
    assert "worker:1" in line("here", "remote", "ls", line.url).out
    assert line("here", "remote", "check", line.url).out.endswith("ok\n")
    assert "0 images, 0 packs" in line("here", "remote", "gc", line.url).out
    assert line("there", "ls").out.count("worker:1") == 1


def test_a_default_remote(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(line("here", "push", "worker:1"), 2, "no remote is named")
    fails(line("there", "pull", "worker:1"), 2, "no remote is named")
    monkeypatch.setenv("ICEFLOE_REMOTE_URL", line.url)
    assert line("here", "push", "worker:1").code == 0
    assert line("there", "pull", "worker:1").code == 0


def test_the_first_that_has_it(line: Line) -> None:
    other = f"file://{line.folder}/other"
    line("here", "push", "worker:1", line.url)
    line("here", "tag", "worker:1", "elsewhere")
    line("here", "push", "elsewhere", other)
    assert line("there", "pull", "worker:1", other, line.url).code == 0
    fails(line("there", "pull", "nobody", other, line.url), 3, "no image nobody:latest in file://")


def test_by_id(line: Line) -> None:
    """All names of the image are set; one without any can't be pushed."""
    line("here", "tag", "worker:1", "also")
    (image,) = {row["id"] for row in line.json("here", "ls")}
    answer = line.json("here", "push", f"@{image[:12]}", line.url)
    assert sorted(answer["names"]) == ["also:latest", "worker:1"]
    assert line.json("there", "pull", f"@{image[:12]}", line.url)["name"] is None
    line("here", "add", line.folder / "tree", "worker:1", "--label", "a=b")
    line("here", "rm", "also")
    assert line("there", "ls").code == 0


def test_what_is_not_there(line: Line) -> None:
    fails(line("here", "push", "nobody", line.url), 3, "no image nobody:latest")
    fails(line("here", "pull", "worker:1", line.url), 3, "there is no remote at file://")
    line("here", "push", "worker:1", line.url)
    fails(line("here", "remote", "rm", line.url, "worker:1", "no"), 3, "no image no:latest")
    assert len(line.json("here", "remote", "ls", line.url)) == 1
    fails(line("here", "push", "worker:1", "nowhere"), 2, "'nowhere' is no remote")
    fails(line("here", "push", "worker:1", "s3://"), 2, "is no remote")


def test_keys(line: Line) -> None:
    keys = key_file(line.folder / "keys", "11" * 32)
    option = ("--encrypt-key-file", keys)
    assert line("here", "push", "worker:1", line.url, *option).code == 0
    fails(line("there", "pull", "worker:1", line.url), 2, "is encrypted")
    assert line("there", "pull", "worker:1", line.url, *option).code == 0
    fails(line("there", "restore", "worker:1", *option), 2, "--encrypt-key-file is for remotes")


def test_damage_has_an_exit_code(line: Line) -> None:
    line("here", "push", "worker:1", line.url)
    (pack,) = (line.folder / "remote/packs").rglob("*/*")
    pack.write_bytes(pack.read_bytes()[:-1])
    ended = line("here", "remote", "check", line.url)
    assert (
        ended.code == 4 and "DAMAGE  corrupt-pack" in ended.out and ended.out.endswith("damaged\n")
    )


def test_replaced(line: Line) -> None:
    line("here", "push", "worker:1", line.url)
    line("there", "add", line.folder / "tree", "worker:1", "--label", "a=b")
    ended = line("there", "pull", "worker:1", line.url)
    assert ended.code == 0 and "worker:1 was @" in ended.err
