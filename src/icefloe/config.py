"""Configuration: a TOML file, the environment, the command line, in rising order of weight.

    [store]
    path = "/var/lib/icefloe"
    policy = "balanced"     # fast, balanced, small; auto: as link and cores suggest
    workers = 0             # threads; 0: one a core
    link = "10g"            # bits a second to other nodes, for auto; default: as the system says

    [capture]
    criu = "criu"           # the CRIU to run, a name or a path
    cuda_timeout = "5m"     # how long suspending or waking the CUDA of a process may take

    [gc]
    grace = "0s"            # how long a block outlives its last image

    [remote]
    url = "s3://bucket/prefix"  # where pull and restore look if not told
    endpoint = "http://..."     # an S3 server that isn't AWS; AWS_ENDPOINT_URL says it too
    region = "eu-north-1"
    addressing = "auto"         # of buckets: path, virtual
    requests = 16               # under way at a time
    patience = "2m"             # how long a request may go on failing
    encrypt_key_file = "..."    # keys, if things are to be encrypted there
    fetch_first = "16m"         # a restore with no more to fetch than this fetches it first
    grace = "24h"               # how long what isn't needed there stays, at least

`ICEFLOE_<SECTION>_<KEY>` overrides a key, `ICEFLOE_STORE` is short for `ICEFLOE_STORE_PATH`.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from icefloe.errors import UsageError
from icefloe.link import link_speed
from icefloe.store.policies import PolicyName, choose
from icefloe.transfer.options import Addressing, RemoteOptions, S3Options
from icefloe.workers import worker_count

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_LINK_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_LINK = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)")
_SIZE_BITS = {"": 0, "k": 10, "m": 20, "g": 30}
_SIZE = re.compile(r"(\d+)([kmg]?)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")

_KEYS = {
    "store": ("path", "policy", "workers", "link"),
    "capture": ("criu", "cuda_timeout"),
    "gc": ("grace",),
    "remote": (
        "url",
        "endpoint",
        "region",
        "addressing",
        "requests",
        "patience",
        "encrypt_key_file",
        "fetch_first",
        "grace",
    ),
}


@dataclass(frozen=True, slots=True)
class Config:
    """What the commands are told. `grace_seconds` is the default of `gc --grace`.

    `link` is in bits a second, None when nobody said.
    """

    store: Path
    policy: PolicyName
    workers: int
    link: float | None
    criu: str
    cuda_seconds: float
    grace_seconds: float
    remote_url: str | None
    remote: RemoteOptions
    remote_grace_seconds: float
    fetch_first_bytes: int


def parse_duration(text: str) -> float:
    """`90`, `90s`, `15m`, `2h`, `7d`, `4w` in seconds. Raises UsageError."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise UsageError(f"{text!r} is not a duration", "write for example 90s, 15m, 2h or 7d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def load(file: Path | None, store: Path | None, environment: Mapping[str, str]) -> Config:
    """The configuration in force. `file` and `store` come from the command line.

    Raises UsageError for a file that can't be read, an unknown key or an impossible value.
    """
    named = file or (Path(p) if (p := environment.get("ICEFLOE_CONFIG")) else None)
    values = _read(named or _default_file(environment), must_exist=named is not None)
    for section, keys in _KEYS.items():
        for key in keys:
            variable = f"ICEFLOE_{section.upper()}_{key.upper()}"
            if variable in environment:
                values[f"{section}.{key}"] = environment[variable]
    workers, link = _workers(values.get("store.workers", 0)), _link(values.get("store.link"))
    path = store or environment.get("ICEFLOE_STORE") or _text("store.path", values)
    return Config(
        store=Path(path) if path else _default_store(environment),
        policy=parse_policy(values.get("store.policy", "balanced"), link, workers),
        workers=workers,
        link=link,
        criu=_text("capture.criu", values) or "criu",
        cuda_seconds=parse_duration(str(values.get("capture.cuda_timeout", "5m"))),
        grace_seconds=parse_duration(str(values.get("gc.grace", "0s"))),
        remote_url=_text("remote.url", values),
        remote=_remote(values),
        remote_grace_seconds=parse_duration(str(values.get("remote.grace", "24h"))),
        fetch_first_bytes=_bytes("remote.fetch_first", values.get("remote.fetch_first", "16m")),
    )


def _default_file(environment: Mapping[str, str]) -> Path:
    if os.geteuid() == 0 and "XDG_CONFIG_HOME" not in environment:
        return Path("/etc/icefloe/config.toml")
    base = environment.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "icefloe" / "config.toml"


def _default_store(environment: Mapping[str, str]) -> Path:
    if "XDG_DATA_HOME" in environment:
        return Path(environment["XDG_DATA_HOME"]) / "icefloe"
    if os.geteuid() == 0:
        return Path("/var/lib/icefloe")
    return Path.home() / ".local" / "share" / "icefloe"


def _read(file: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError:
        if must_exist:
            raise UsageError(f"no configuration file {file}", "name one that exists") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot use {file} ({error})", "mend it, or name another") from error
    values = {}
    for section, content in document.items():
        for key, value in content.items() if isinstance(content, dict) else [("", content)]:
            if key not in _KEYS.get(section, ()):
                known = ", ".join(f"{s}.{k}" for s, keys in _KEYS.items() for k in keys)
                raise UsageError(f"unknown key {section}.{key} in {file}", f"known are {known}")
            values[f"{section}.{key}"] = value
    return values


def _text(key: str, values: Mapping[str, object]) -> str | None:
    value = values.get(key)
    if value is None or isinstance(value, str):
        return value
    raise UsageError(f"{key} is {value!r}", "write it in quotes")


def parse_policy(value: object, link: float | None, workers: int) -> PolicyName:
    """The policy of this name; `auto` is decided here. Raises UsageError."""
    if value == "auto":
        return choose(link or link_speed(), worker_count(workers))
    for policy in get_args(PolicyName):
        if value == policy:
            known: PolicyName = policy
            return known
    raise UsageError(f"unknown policy {value!r}", "use fast, balanced, small or auto")


def _remote(values: Mapping[str, object]) -> RemoteOptions:
    keys, addressing = _text("remote.encrypt_key_file", values), values.get("remote.addressing")
    known = {choice: choice for choice in get_args(Addressing)}
    if addressing is not None and addressing not in known:
        raise UsageError(f"remote.addressing is {addressing!r}", "use auto, path or virtual")
    requests = str(values.get("remote.requests", 16))
    if not requests.isascii() or not requests.isdecimal() or not 0 < int(requests) <= 256:
        raise UsageError(f"remote.requests is {requests!r}", "write a number from 1 to 256")
    return RemoteOptions(
        s3=S3Options(
            endpoint=_text("remote.endpoint", values),
            region=_text("remote.region", values),
            addressing=known.get(str(addressing), "auto"),
        ),
        patience=parse_duration(str(values.get("remote.patience", "2m"))),
        requests=int(requests),
        keys=Path(keys) if keys else None,
    )


def _bytes(key: str, value: object) -> int:
    match = _SIZE.fullmatch(str(value))
    if not match:
        raise UsageError(f"{key} is {value!r}", "write bytes: 4096, 64k, 16m or 1g")
    return int(match[1]) << _SIZE_BITS[match[2]]


def _link(value: object) -> float | None:
    if value is None:
        return None
    match = _LINK.fullmatch(str(value))
    if not match or not float(match[1]):
        raise UsageError(f"store.link is {value!r}", "write bits a second, like 10g or 400m")
    return float(match[1]) * _LINK_UNITS[match[2]]


def _workers(value: object) -> int:
    if not re.fullmatch("[0-9]+", str(value)):
        raise UsageError(f"store.workers is {value!r}", "use a whole number; 0 means one a core")
    return int(str(value))
