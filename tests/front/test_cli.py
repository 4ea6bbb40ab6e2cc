"""The command line: what it prints for people and for programs, and how it ends."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_store
from endings import Ended, fails
from small_store import NOISE, Tree

import icefloe.catalog
from icefloe.cli import main
from icefloe.errors import EXIT_CODES

ONE: Tree = {"pages-1.img": NOISE[0] + bytes(128 << 10), "core.img": b"core"}
TWO: Tree = {"pages-1.img": NOISE[0] + NOISE[1], "more.img": b"more"}


@dataclass(frozen=True, slots=True)
class Line:
    """A command line on one store, in this process."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str | Path) -> Ended:
        """Runs a command with `--store`."""
        return self.bare("--store", self.folder / "store", *arguments)

    def bare(self, *arguments: str | Path) -> Ended:
        """Runs a command as it stands."""
        self.capture.readouterr()
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        printed = self.capture.readouterr()
        return Ended(code, printed.out, printed.err)

    def json(self, *arguments: str | Path) -> Any:
        """Runs a command with `--json`; its answer is all that it prints."""
        ended = self(*arguments, "--json")
        assert (ended.code, ended.err) == (0, ""), ended
        return json.loads(ended.out)

    def tree(self, name: str, tree: Tree) -> Path:
        """A checkpoint on disk."""
        small_store.write_tree(self.folder / name, tree)
        return self.folder / name


@pytest.fixture
def line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Line]:
    """An empty folder, and nothing configured."""
    for name in list(os.environ):
        if name.startswith("ICEFLOE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    mask = os.umask(0o022)
    yield Line(tmp_path, capsys)
    os.umask(mask)


@pytest.fixture
def filled(line: Line) -> Line:
    """With the images `one` and `two:v2`."""
    assert line("add", line.tree("1", ONE), "one", "--label", "k=v", "--label", "e=a=b").code == 0
    assert line("add", line.tree("2", TWO), "two:v2").code == 0
    return line


# --- for programs -------------------------------------------------------------------------------


def test_add_json(line: Line) -> None:
    """All promised keys, with the right numbers."""
    tree = line.tree("1", ONE)
    first = line.json("add", tree, "one")
    assert len(first["id"]) == 64 and first["name"] == "one:latest"
    assert first["logical_bytes"] == len(ONE["pages-1.img"]) + 4
    assert first["zero_bytes"] == 128 << 10
    assert first["new_bytes"] == len(NOISE[0]) + 4
    assert (first["blocks"], first["new_blocks"]) == (2, 2)
    assert first["stored_bytes"] > first["new_bytes"] and first["seconds"] >= 0
    again = line.json("add", tree, "one:again")
    assert again["id"] == first["id"]
    assert (again["new_bytes"], again["stored_bytes"], again["new_blocks"]) == (0, 0, 0)
    other = line.json("add", line.tree("2", TWO), "one")
    assert other["replaced"] == first["id"] and again["replaced"] is None


def test_show_json(filled: Line) -> None:
    """All promised keys."""
    shown = filled.json("show", "one")
    promised = {
        *("id", "names", "created", "files", "logical_bytes", "zero_bytes", "raw_bytes"),
        *("stored_bytes", "exclusive_bytes", "read_amplification", "facts", "labels"),
    }
    assert promised <= shown.keys()
    assert shown["names"] == ["one:latest"] and shown["labels"] == {"k": "v", "e": "a=b"}
    files = {file["path"]: (file["bytes"], file["zero_bytes"]) for file in shown["files"]}
    assert files["pages-1.img"] == (len(ONE["pages-1.img"]), 128 << 10)
    assert files["core.img"] == (4, 0)
    assert shown["raw_bytes"] == len(NOISE[0]) + 4
    assert shown["stored_bytes"] >= shown["exclusive_bytes"] > 0
    assert shown["facts"] == {} and shown["read_amplification"] == 1.0


def test_exclusive_bytes_are_what_a_removal_frees(filled: Line) -> None:
    """`show` before, `rm` and `gc` after, tell the same."""
    exclusive = filled.json("show", "one")["exclusive_bytes"]
    removal = filled.json("rm", "one")
    assert removal["freed_bytes"] == exclusive
    assert removal["names"] == ["one:latest"] and len(removal["images"]) == 1


def test_diff_json(filled: Line) -> None:
    """Bytes of blocks, and files."""
    found = filled.json("diff", "one", "two:v2")
    assert {"shared_bytes", "only_a_bytes", "only_b_bytes", "files"} <= found.keys()
    assert found["only_a_bytes"] == filled.json("show", "one")["raw_bytes"] - found["shared_bytes"]
    changes = {file["path"]: file["change"] for file in found["files"]}
    assert changes["core.img"] == "only_a" and changes["more.img"] == "only_b"
    assert changes["pages-1.img"] == "changed"
    same = filled.json("diff", "one", "one")
    assert (same["only_a_bytes"], same["only_b_bytes"], same["files"]) == (0, 0, [])


def test_ls_json_and_patterns(filled: Line) -> None:
    """Newest first; a pattern is for the name, with or without its tag."""
    filled("tag", "two:v2", "group/two:x")
    listed = filled.json("ls")
    assert [item["names"] for item in listed] == [["group/two:x", "two:v2"], ["one:latest"]]
    promised = {"id", "names", "created", "logical_bytes", "zero_bytes", "raw_bytes"}
    assert promised <= listed[0].keys()
    wanted = {"one": 1, "o*": 1, "*:v2": 1, "two:*": 1, "group/*": 1, "*": 2, "one:v2": 0, "TWO": 0}
    for pattern, count in wanted.items():
        assert len(filled.json("ls", pattern)) == count, pattern


def test_tag_and_rm_json(filled: Line) -> None:
    """By name, by id, by the first digits of an id."""
    identity = filled.json("show", "one")["id"]
    tagged = filled.json("tag", f"@{identity[:9]}", "copy:1")
    assert (tagged["id"], tagged["name"], tagged["replaced"]) == (identity, "copy:1", None)
    other = filled.json("show", "two:v2")["id"]
    assert filled.json("tag", "one", "two:v2")["replaced"] == other
    removal = filled.json("rm", f"@{identity.upper()}")
    assert removal["names"] == ["copy:1", "one:latest", "two:v2"]
    assert [item["names"] for item in filled.json("ls")] == [[]]


def test_gc_json(filled: Line) -> None:
    """All promised keys; a dry run removes nothing."""
    filled("rm", "one")
    promised = {
        *("blocks_removed", "packs_removed", "packs_rewritten", "freed_bytes"),
        *("kept_by_grace", "kept_by_lease", "seconds"),
    }
    young = filled.json("gc", "--grace", "1h")
    assert promised <= young.keys()
    assert young["blocks_removed"] == 0 < young["kept_by_grace"]
    dry = filled.json("gc", "--dry-run")
    done = filled.json("gc")
    for key in promised - {"seconds", "freed_bytes"}:
        assert dry[key] == done[key], key
    assert filled.json("gc")["blocks_removed"] == 0


def test_gc_repacks(filled: Line) -> None:
    """By the policy that is named, or the configured one."""
    text = b"".join(b"line %d of many, much like all the others\n" % i for i in range(20_000))
    filled("add", filled.tree("text", {"pages-1.img": text}), "text")
    assert filled.json("gc")["repacked_bytes"] == 0
    assert filled.json("gc", "--repack", "--policy", "fast")["repacked_bytes"] < 0
    assert filled.json("gc", "--repack")["repacked_bytes"] > 0
    assert " less\n" in filled("gc", "--repack", "--policy", "small").out
    fails(filled("gc", "--policy", "small"), 2, "give --repack as well")
    fails(filled("gc", "--repack", "--dry-run"), 2, "leave out --dry-run")
    fails(filled("gc", "--repack", "--policy", "best"), 2, "unknown policy 'best'")
    assert filled.json("check", "--read-data")["ok"]


def test_check_json(filled: Line) -> None:
    """All promised keys; damage is told and ends with 4, and so it does for people."""
    found = filled.json("check", "--read-data")
    assert (found["ok"], found["images"], found["packs"], found["problems"]) == (True, 2, 2, [])
    pack = next(path for path in (filled.folder / "store/packs").rglob("*") if path.is_file())
    content = bytearray(pack.read_bytes())
    content[5000] ^= 1
    pack.write_bytes(content)
    ended = filled("check", "--read-data", "--json")
    damaged = json.loads(ended.out)
    assert (ended.code, damaged["ok"]) == (4, False)
    assert {"kind", "what", "repaired"} <= damaged["problems"][0].keys()
    ended = filled("check", "--read-data")
    assert ended.code == 4 and "DAMAGE" in ended.out and ended.out.endswith("damaged\n")


def test_waste_is_no_damage(filled: Line) -> None:
    """Exit code 0."""
    (filled.folder / "store" / "staging" / "left").touch()
    ended = filled("check")
    assert ended.code == 0 and "waste" in ended.out and ended.out.endswith("ok\n")
    assert filled("check", "--repair").code == 0
    assert filled.json("check")["problems"] == []


def test_export(filled: Line) -> None:
    """The exact files, and numbers about them."""
    told = filled.json("export", "one", filled.folder / "out")
    assert small_store.read_tree(filled.folder / "out") == ONE
    assert told["logical_bytes"] == len(ONE["pages-1.img"]) + 4
    assert told["written_bytes"] == told["logical_bytes"] - (128 << 10)
    fails(filled("export", "one", filled.folder / "out"), 2, "is not an empty folder")
    assert small_store.read_tree(filled.folder / "out") == ONE


# --- for people ---------------------------------------------------------------------------------


def test_tables(filled: Line) -> None:
    """Aligned, with human sizes, never cut; an image without a name has a dash."""
    ended = filled("ls")
    heading, *rows = ended.out.splitlines()
    assert heading.split() == ["NAME", "ID", "CREATED", "LOGICAL", "ZERO", "RAW"]
    assert [row.split()[0] for row in rows] == ["two:v2", "one:latest"]
    assert {len(line.rstrip()) for line in ended.out.splitlines()} == {len(heading.rstrip())}
    assert "224.0 KiB" in rows[1] and "128.0 KiB" in rows[1]
    assert {row.find("@") for row in rows} == {heading.find("ID")}
    filled("tag", "two:v2", "one")
    assert filled("ls").out.splitlines()[-1].split()[0] == "-"


def test_show_and_diff_for_people(filled: Line) -> None:
    """Facts first, files below."""
    shown = filled("show", "one").out
    for word in ("image", "names", "one:latest", "label k", "exclusive", "FILE", "pages-1.img"):
        assert word in shown
    compared = filled("diff", "one", "two:v2").out
    for word in ("shared", "only one", "only two:v2", "CHANGE", "only_a", "changed"):
        assert word in compared


def test_remarks(filled: Line) -> None:
    """What a name pointed at before is said on standard error, unless quiet."""
    tree = filled.folder / "2"
    assert "that image is kept" in filled("add", tree, "one").err
    assert filled("-q", "add", filled.folder / "1", "one").err == ""


def test_names_that_are_no_text(line: Line) -> None:
    """A file name need not be UTF-8, and a label may hold anything: they are still shown."""
    folder = line.tree("1", {})
    (folder / os.fsdecode(b"\xff\xfe.img")).write_bytes(b"x")
    assert line("add", folder, "odd", "--label", "k=\udcff").code == 0
    assert len(line.json("show", "odd")["files"]) == 2
    store = line.folder / "store"
    line("add", line.tree("2", ONE), "one")
    for arguments in (["show", "odd"], ["diff", "odd", "one"]):
        ended = run_apart("--store", store, *arguments)
        assert (ended.code, ended.err) == (0, "")


def test_names_that_look_like_markup(line: Line) -> None:
    """Brackets are part of a name like any other character."""
    assert line("add", line.tree("1", {"[red]x[b].img": b"x"}), "odd").code == 0
    assert "[red]x[b].img" in line("show", "odd").out


def run_apart(*arguments: str | Path) -> Ended:
    """The same in a process of its own, with strict UTF-8 on its output."""
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "icefloe", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_help() -> None:
    """Lists every command and every exit code."""
    ended = run_apart("--help")
    assert ended.code == 0 and ended.err == ""
    for code, what in EXIT_CODES.items():
        assert re.search(rf"^  *{code}  {re.escape(what)}$", ended.out, re.M), code
    for command in (
        *("add", "restore", "export", "page-server", "ls", "show", "diff", "tag", "rm", "gc"),
        "check",
    ):
        assert re.search(rf"^  {command} ", ended.out, re.M)
        assert run_apart(command, "--help").code == 0


def test_version(line: Line) -> None:
    """The version, and nothing else."""
    ended = line.bare("--version")
    assert (ended.code, ended.err) == (0, "") and "0.1.0" in ended.out


def test_no_command(line: Line) -> None:
    """The help, readable, line by line."""
    ended = line.bare()
    printed = ended.out + ended.err
    assert ended.code in (0, 2)
    assert "Exit codes:" in printed and len(printed.splitlines()) > 10


# --- errors -------------------------------------------------------------------------------------


def test_usage(filled: Line) -> None:
    """2, in one line."""
    tree = filled.folder / "1"
    fails(filled("frobnicate"), 2, "frobnicate")
    fails(filled("ls", "--frobnicate"), 2, "--frobnicate")
    fails(filled("show"), 2, "NAME")
    fails(filled("rm"), 2, "NAME")
    fails(filled("show", "Not A Name"), 2, "is not a name")
    fails(filled("show", "@12"), 2, "is not an id")
    fails(filled("tag", "one", "@12345678"), 2, "is not a name")
    fails(filled("add", tree, "x", "--label", "novalue"), 2, "is not a label")
    fails(filled("add", tree, "x", "--label", "=v"), 2, "is not a label")
    fails(filled("gc", "--grace", "soon"), 2, "is not a duration")
    fails(filled.bare("--config", "/none.toml", "ls"), 2, "no configuration file")


def test_not_found(filled: Line) -> None:
    """3: images, stores, checkpoints."""
    for arguments in (
        ["show", "none"],
        ["show", "one:v2"],
        ["rm", "one", "none"],
        ["show", "@" + "0" * 8],
    ):
        fails(filled(*arguments), 3, "no image")
    fails(filled("export", "none", filled.folder / "out"), 3, "no image none:latest")
    fails(filled("diff", "one", "none"), 3, "no image")
    fails(filled("add", filled.folder / "nowhere", "x"), 3, "nowhere")
    assert [item["names"] for item in filled.json("ls")] == [["two:v2"], ["one:latest"]]


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["show", "x"], ["diff", "x", "y"], ["rm", "x"], ["tag", "x", "y"], ["gc"], ["check"]],
    ids=lambda arguments: str(arguments[0]),
)
def test_no_store(line: Line, arguments: list[str]) -> None:
    """3, and none is made."""
    fails(line(*arguments), 3, "no store in")
    assert not (line.folder / "store").exists()


def test_bad_source(line: Line) -> None:
    """4: a file that is no archive."""
    (line.folder / "x.tar").write_bytes(b"no archive" * 100)
    ended = line("add", line.folder / "x.tar", "x")
    fails(ended, 4, "x.tar")


def test_corrupt(filled: Line) -> None:
    """4: a damaged journal, a damaged format, a missing pack."""
    store = filled.folder / "store"
    for pack in [path for path in (store / "packs").rglob("*") if path.is_file()]:
        pack.rename(filled.folder / pack.name)
    fails(filled("export", "one", filled.folder / "out"), 4, "is missing")
    assert not (filled.folder / "out").exists()
    (store / "format").write_text("{}")
    fails(filled("ls"), 4, "is damaged")


def test_busy(filled: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """6, and who it is."""
    impatient = partial(icefloe.catalog.open_store, wait_seconds=0.1)
    with icefloe.catalog.open_store(filled.folder / "store", write=True):
        monkeypatch.setattr(icefloe.catalog, "open_store", impatient)
        fails(filled("ls"), 6, f"process {os.getpid()}")
        fails(filled("gc"), 6, f"process {os.getpid()}")


def test_ambiguous_prefix(filled: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """2: with a prefix short enough, two images have it."""
    import icefloe.ids

    monkeypatch.setattr(icefloe.ids, "_ID_PREFIX", re.compile("[0-9a-f]*"))
    fails(filled("show", "@"), 2, "means 2 images")


def test_restores_that_cannot_be_meant(filled: Line) -> None:
    """2, 3, 4: each in one line, from the process that guards or the one that restores."""
    criu = filled.folder / "criu"
    criu.write_text("#!/bin/sh\necho Version: 4.2\n")
    criu.chmod(0o755)

    def restore(*words: str) -> Ended:
        store: list[str | Path] = [
            "--store",
            filled.folder / "store",
            "--config",
            filled.folder / "config.toml",
        ]
        return run_apart(*store, "restore", *words)

    (filled.folder / "config.toml").write_text(f'capture.criu = "{criu}"')
    fails(restore("ONE"), 2, "ONE")
    fails(restore("one", "--no-fill", "--eager"), 2, "--eager")
    fails(restore("one", "--stream", "--no-fill"), 2, "--stream")
    fails(restore("missing"), 3, "missing")
    if os.geteuid() == 0:
        fails(restore("one", "--eager"), 4, "inventory.img")
    else:
        fails(restore("one", "--eager"), 9, "root")


def test_unexpected(filled: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """1: a bug is one line too; with -v there is a traceback."""

    def broken(*arguments: object, **options: object) -> None:
        raise KeyError("what")

    monkeypatch.setattr(icefloe.catalog, "open_store", broken)
    fails(filled("ls"), 1, "unexpected KeyError")
    verbose = filled.bare("-v", "--store", filled.folder / "store", "ls")
    assert verbose.code == 1 and "Traceback" in verbose.err


def test_closed_output(filled: Line) -> None:
    """Whoever reads the output may stop: no complaint."""
    command = f"{sys.executable} -m icefloe --store {filled.folder}/store show one --json | true"
    script = f"set -o pipefail; {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_configured_store(filled: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """By file, by environment, by option: the later wins."""
    config = filled.folder / "config.toml"
    config.write_text(f"store.path = '{filled.folder}/store'\ngc.grace = '1d'")
    assert len(json.loads(filled.bare("--config", config, "ls", "--json").out)) == 2
    filled("rm", "one")
    kept = json.loads(filled.bare("--config", config, "gc", "--json").out)
    assert kept["kept_by_grace"] > 0 == kept["blocks_removed"]
    monkeypatch.setenv("ICEFLOE_STORE", str(filled.folder / "other"))
    fails(filled.bare("--config", config, "ls"), 3, f"no store in {filled.folder}/other")
    assert filled("ls").code == 0


def test_paths_that_cannot_be_meant(filled: Line) -> None:
    """An unset variable, and a folder that holds the store itself."""
    fails(filled("add", "", "x"), 2, "empty path")
    fails(filled("export", "one", ""), 2, "empty path")
    fails(filled("add", filled.folder, "x"), 2, "holds the store")
    (filled.folder / "loop").symlink_to("loop")
    fails(filled("add", filled.folder / "loop", "x"), 3, "loop")


def test_default_store(line: Line) -> None:
    """Where the data of programs belongs; nobody else may look in."""
    assert line.bare("add", line.tree("1", ONE), "one").code == 0
    store = line.folder / "data" / "icefloe"
    assert store.stat().st_mode & 0o777 == 0o700
    for path in store.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_json_is_all_that_is_printed(filled: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal there is a bar, on standard error; the answer stays one document."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    ended = filled("add", filled.folder / "1", "bar", "--json")
    assert ended.code == 0 and json.loads(ended.out)["name"] == "bar:latest"
