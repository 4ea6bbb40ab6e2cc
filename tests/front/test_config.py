"""Configuration: a file, the environment, the command line, in rising order of weight."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefloe.config import load, parse_duration
from icefloe.errors import UsageError


def written(folder: Path, text: str) -> Path:
    """A configuration file."""
    path = folder / "config.toml"
    path.write_text(text)
    return path


FULL = """
[store]
path = "/from/file"
policy = "small"
workers = 3
[capture]
criu = "/opt/criu"
[gc]
grace = "2h"
"""


def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which no file of this machine is found."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "none"), "XDG_DATA_HOME": str(tmp_path / "data")}


def test_defaults(tmp_path: Path) -> None:
    """All works with nothing configured."""
    config = load(None, None, bare(tmp_path))
    assert config.store == tmp_path / "data" / "icefloe"
    assert (config.policy, config.workers, config.grace_seconds) == ("balanced", 0, 0.0)
    assert config.criu == "criu"


def test_precedence_of_the_store(tmp_path: Path) -> None:
    """Default, file, ICEFLOE_STORE_PATH, ICEFLOE_STORE, --store."""
    file, environment = written(tmp_path, FULL), bare(tmp_path)
    assert load(file, None, environment).store == Path("/from/file")
    environment["ICEFLOE_STORE_PATH"] = "/from/key"
    assert load(file, None, environment).store == Path("/from/key")
    environment["ICEFLOE_STORE"] = "/from/store"
    assert load(file, None, environment).store == Path("/from/store")
    assert load(file, Path("/from/line"), environment).store == Path("/from/line")


def test_environment_over_file(tmp_path: Path) -> None:
    """Each key has a variable."""
    file, environment = written(tmp_path, FULL), bare(tmp_path)
    config = load(file, None, environment)
    assert (config.policy, config.workers, config.grace_seconds) == ("small", 3, 7200.0)
    assert config.criu == "/opt/criu"
    more = {"ICEFLOE_STORE_POLICY": "fast", "ICEFLOE_STORE_WORKERS": "5", "ICEFLOE_GC_GRACE": "7d"}
    more["ICEFLOE_CAPTURE_CRIU"] = "criu-dev"
    config = load(file, None, environment | more)
    assert config.criu == "criu-dev"
    assert (config.policy, config.workers, config.grace_seconds) == ("fast", 5, 604800.0)


def test_which_file(tmp_path: Path) -> None:
    """--config, then ICEFLOE_CONFIG, then the usual place."""
    usual = tmp_path / "home" / "icefloe" / "config.toml"
    usual.parent.mkdir(parents=True)
    usual.write_text('store.path = "/usual"')
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "home"), "XDG_DATA_HOME": "/data"}
    assert load(None, None, environment).store == Path("/usual")
    second = tmp_path / "second.toml"
    second.write_text('store.path = "/second"')
    environment["ICEFLOE_CONFIG"] = str(second)
    assert load(None, None, environment).store == Path("/second")
    assert load(written(tmp_path, FULL), None, environment).store == Path("/from/file")


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    """A usual one need not."""
    with pytest.raises(UsageError, match="no configuration file"):
        load(tmp_path / "none.toml", None, bare(tmp_path))
    with pytest.raises(UsageError, match="no configuration file"):
        load(None, None, bare(tmp_path) | {"ICEFLOE_CONFIG": str(tmp_path / "none.toml")})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[store]\nfolder = 'x'", r"unknown key store\.folder"),
        ("[stores]\npath = 'x'", r"unknown key stores\.path"),
        ("[gc]\npath = 'x'", r"unknown key gc\.path"),
        ("path = 'x'", "unknown key path"),
        ("store = 'x'", "unknown key store"),
        ("[store", "cannot use"),
        ("[store]\npolicy = 'best'", "unknown policy 'best'"),
        ("[store]\npolicy = 1", "unknown policy 1"),
        ("[store]\nlink = 'fast'", "store.link is 'fast'"),
        ("[store]\nlink = '0g'", "store.link is '0g'"),
        ("[store]\nworkers = -1", "store.workers is -1"),
        ("[store]\nworkers = 1.5", "store.workers is 1.5"),
        ("[store]\nworkers = true", "store.workers is True"),
        ("[store]\nworkers = 'many'", "store.workers is 'many'"),
        ("[store]\nworkers = '²'", "store.workers is '²'"),
        ("[store]\npath = 5", "store.path"),
        ("[store]\npath = ['a']", "store.path"),
        ("[capture]\ncriu = 4", "capture.criu"),
        ("[gc]\ngrace = 'soon'", "'soon' is not a duration"),
        ("[gc]\ngrace = -5", "'-5' is not a duration"),
        ("[gc]\ngrace = true", "not a duration"),
    ],
)
def test_impossible_files(tmp_path: Path, text: str, reason: str) -> None:
    """Each refused by what is wrong with it."""
    with pytest.raises(UsageError, match=reason):
        load(written(tmp_path, text), None, bare(tmp_path))


def test_not_utf8(tmp_path: Path) -> None:
    """A file that is no text, and a folder."""
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe")
    for file in (path, tmp_path):
        with pytest.raises(UsageError, match="cannot use"):
            load(file, None, bare(tmp_path))


@pytest.mark.parametrize("key", ["POLICY", "WORKERS"])
@pytest.mark.parametrize("value", ["", "x", "²", "-1"])
def test_impossible_environment(tmp_path: Path, key: str, value: str) -> None:
    """Variables are looked at like files."""
    with pytest.raises(UsageError):
        load(None, None, bare(tmp_path) | {f"ICEFLOE_STORE_{key}": value})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("1.5h", 5400), ("7d", 604800)],
)
def test_durations(text: str, seconds: float) -> None:
    """With and without a unit."""
    assert parse_duration(text) == seconds


@given(st.text(max_size=8))
def test_any_duration(text: str) -> None:
    """Seconds, not negative, or a UsageError."""
    try:
        seconds: Any = parse_duration(text)
    except UsageError:
        return
    assert seconds >= 0


@pytest.mark.parametrize(("link", "policy"), [("1g", "balanced"), ("100g", "fast")])
def test_auto_goes_by_the_link(tmp_path: Path, link: str, policy: str) -> None:
    environment = {"ICEFLOE_STORE_LINK": link, "ICEFLOE_STORE_POLICY": "auto"}
    config = load(None, tmp_path, environment | {"ICEFLOE_STORE_WORKERS": "2"})
    assert config.policy == policy and config.link == float(link[:-1]) * 1e9


def test_remotes(tmp_path: Path) -> None:
    text = """
[remote]
url = "s3://b/p"
endpoint = "http://there:9000"
region = "eu-north-1"
addressing = "path"
requests = 4
patience = "10s"
encrypt_key_file = "/keys"
grace = "2d"
fetch_first = "1m"
"""
    config = load(written(tmp_path, text), None, bare(tmp_path))
    assert (config.remote_url, config.remote_grace_seconds) == ("s3://b/p", 172800)
    assert (config.remote.requests, config.remote.patience) == (4, 10)
    assert (config.remote.keys, config.fetch_first_bytes) == (Path("/keys"), 1 << 20)
    s3 = config.remote.s3
    assert (s3.endpoint, s3.region, s3.addressing) == ("http://there:9000", "eu-north-1", "path")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("REQUESTS", "0"),
        ("REQUESTS", "many"),
        ("REQUESTS", "257"),
        ("ADDRESSING", "other"),
        ("PATIENCE", "long"),
        ("FETCH_FIRST", "-1"),
        ("FETCH_FIRST", "1t"),
    ],
)
def test_impossible_remotes(tmp_path: Path, key: str, value: str) -> None:
    environment = {**bare(tmp_path), f"ICEFLOE_REMOTE_{key}": value}
    with pytest.raises(UsageError):
        load(None, None, environment)
