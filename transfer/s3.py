"""Objects in an S3 bucket, by s3fs. Each method is one request (a page, for listings).

What is tried again, and for how long, is decided in one place (transfer/patient.py), so s3fs,
botocore and aiohttp try once. Conditional writes are `If-Match` and `If-None-Match`.
"""

import asyncio
import io
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions
import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import ClientError

from icefloe.durable import Buffer
from icefloe.transfer.objects import (
    ABSENT,
    Conflict,
    NoSuchObject,
    Object,
    ObjectInfo,
    Page,
    Refused,
    Transient,
    Unfinished,
)
from icefloe.transfer.options import S3Options

# A server that says nothing for so long is asked again.
_CONNECT_SECONDS = 10
_SILENT_SECONDS = 20

# A server that has taken nothing of a body for so long is asked again. What the kernel keeps for a
# slow link must have gone out by then.
_STUCK_SECONDS = 60

# What is read from a connection at a time.
_CHUNK = 1 << 20

# Keys that one request deletes at most (S3 API, DeleteObjects).
_MOST_KEYS = 1000

_MISSING = {"NoSuchKey", "NoSuchUpload", "404", "NotFound"}
_OUTSIDE = "InvalidRange"
_NOT_IMPLEMENTED = 501
_CONFLICTS = {"PreconditionFailed", "ConditionalRequestConflict", "412"}
_BUSY = {
    "SlowDown",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "InternalError",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "BadDigest",
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
    "OperationAborted",
}

_BROKEN = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.ResponseStreamingError,
    botocore.parsers.ResponseParserError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    ConnectionError,
    TimeoutError,
)

T = TypeVar("T")


class _OneTry(AIOHTTPSession):  # type: ignore[misc]  # it ships no types
    """aiohttp sends a request once more, unasked, when a connection that it kept breaks: a write
    whose answer got lost would conflict with itself, and nobody would know that there were two."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


class S3Objects:
    """A bucket, or a prefix in it. See Objects."""

    def __init__(self, url: str, options: S3Options, connections: int = 16) -> None:
        """`url` is s3://bucket or s3://bucket/prefix. `connections`: at a time."""
        self.url = url
        self._bucket, _, prefix = url.removeprefix("s3://").strip("/").partition("/")
        self._prefix = f"{prefix.rstrip('/')}/" if prefix else ""
        self._fs = s3fs.S3FileSystem(
            endpoint_url=options.endpoint,
            client_kwargs={"region_name": options.region} if options.region else {},
            config_kwargs=_settings(options, connections),
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self._fs.retries = 1  # that is, tries
        self._client: Any = None
        self._under_way: set[Future[Any]] = set()

    def read(self, key: str) -> Object:
        """See Objects."""
        return self._run(self._read(key), key)

    async def _read(self, key: str) -> Object:
        answer = await self._ask("get_object", Key=self._prefix + key)
        body = answer["Body"]
        try:
            content = await body.read()
        finally:
            body.close()
        wanted = answer.get("ContentLength", len(content))  # not said when it comes in chunks
        if len(content) != wanted:
            raise Transient(f"{len(content)} of {wanted} bytes came")
        return Object(content, answer["ETag"])

    def read_into(self, key: str, start: int, into: memoryview) -> int:
        """See Objects."""
        try:
            return self._run(self._read_into(key, start, into), key)
        except Refused as error:
            if isinstance(error.__cause__, ClientError) and _code(error.__cause__) == _OUTSIDE:
                return 0
            raise

    async def _read_into(self, key: str, start: int, into: memoryview) -> int:
        wanted = f"bytes={start}-{start + len(into) - 1}"
        answer = await self._ask("get_object", Key=self._prefix + key, Range=wanted)
        body, done = answer["Body"], 0
        try:
            if not answer.get("ContentRange", "").startswith(f"bytes {start}-"):
                raise Transient(f"the server sent {answer.get('ContentRange')} for {wanted}")
            while done < len(into) and (chunk := await body.read(_CHUNK)):
                part = chunk[: len(into) - done]
                into[done : done + len(part)] = part
                done += len(part)
        except _BROKEN:
            if not done:
                raise
        finally:
            body.close()
        if not done:
            raise Transient("nothing came")
        return done

    def info(self, key: str) -> ObjectInfo:
        """See Objects."""
        answer = self._run(self._ask("head_object", Key=self._prefix + key), key)
        return ObjectInfo(key, answer["ContentLength"], answer["LastModified"].timestamp())

    def put(self, key: str, content: Buffer, expect: str | None = None) -> str:
        """See Objects."""
        condition = {}
        if expect is not None:
            condition = {"IfMatch": expect} if expect != ABSENT else {"IfNoneMatch": "*"}
        try:
            answer = self._run(self._put(self._prefix + key, _Body(content), condition), key)
        except NoSuchObject:  # what If-Match says of an object that is gone
            raise Conflict(key) from None
        tag: str = answer["ETag"]
        return tag

    async def _put(self, key: str, body: "_Body", condition: Mapping[str, str]) -> Any:
        """aiohttp waits for ever for a server that stops to read."""
        sending = asyncio.ensure_future(
            self._ask("put_object", Key=key, Body=body, **condition),
        )
        try:
            while not sending.done():
                await asyncio.wait({sending}, timeout=_STUCK_SECONDS / 4)
                if not sending.done() and body.is_stuck:
                    raise Transient(f"the server has taken nothing for {_STUCK_SECONDS} seconds")
            return await sending
        finally:
            sending.cancel()

    def page(self, prefix: str, after: str) -> Page:
        """See Objects."""
        start = {"StartAfter": self._prefix + after} if after else {}
        while True:
            answer = self._run(
                self._ask("list_objects_v2", Prefix=self._prefix + prefix, **start), prefix
            )
            rows = [
                ObjectInfo(
                    row["Key"].removeprefix(self._prefix),
                    row["Size"],
                    row["LastModified"].timestamp(),
                )
                for row in answer.get("Contents", ())
            ]
            more = bool(answer.get("IsTruncated"))
            if rows or not more:
                return Page(rows, more)
            # A page may be empty, and not the last one.
            start = {"ContinuationToken": answer["NextContinuationToken"]}

    def delete(self, keys: Sequence[str]) -> None:
        """See Objects."""
        for first in range(0, len(keys), _MOST_KEYS):
            part = keys[first : first + _MOST_KEYS]
            wanted = {"Objects": [{"Key": self._prefix + key} for key in part], "Quiet": True}
            answer = self._run(self._ask("delete_objects", Delete=wanted), part[0])
            for error in answer.get("Errors", ()):
                if error.get("Code") not in _MISSING:
                    raise _meaning(error.get("Code", ""), error.get("Message", ""), 0)

    def unfinished(self) -> Sequence[Unfinished]:
        """See Objects."""
        found: list[Unfinished] = []
        more: Mapping[str, Any] = {}
        while True:
            page = self._run(
                self._ask("list_multipart_uploads", Prefix=self._prefix, **more), self._prefix
            )
            for row in page.get("Uploads", ()):
                key = row["Key"].removeprefix(self._prefix)
                found.append(Unfinished(key, row["UploadId"], row["Initiated"].timestamp()))
            if not page.get("IsTruncated"):
                return found
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abandon(self, upload: Unfinished) -> None:
        """See Objects."""
        try:
            self._run(
                self._ask(
                    "abort_multipart_upload",
                    Key=self._prefix + upload.key,
                    UploadId=upload.upload,
                ),
                upload.key,
            )
        except NoSuchObject:
            return  # gone already

    def renew(self) -> None:
        """See Objects: the usual files and variables are read again."""
        self._run(self._connect(refresh=True), "")

    async def _connect(self, refresh: bool) -> Any:
        try:
            return await self._fs.set_session(refresh=refresh)
        except ValueError as error:  # the endpoint is no URL
            raise Refused(_words(error)) from error

    def give_up(self) -> None:
        """See Objects."""
        for future in tuple(self._under_way):
            future.cancel()

    async def _ask(self, operation: str, **arguments: Any) -> Any:
        client = await self._connect(refresh=False)
        if client is not self._client:
            self._client = client
            client.meta.events.register_last("before-call.s3", _expect_nothing)
        return await self._fs._call_s3(operation, Bucket=self._bucket, **arguments)

    def _run(self, work: Coroutine[Any, Any, T], key: str) -> T:
        """Runs it on the thread of fsspec's event loop. Raises what Objects says."""
        future = asyncio.run_coroutine_threadsafe(_caught(work), self._fs.loop)
        self._under_way.add(future)
        try:
            return future.result()
        except CancelledError as error:
            raise Transient("given up") from error
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if _code(error) in _MISSING:
                raise NoSuchObject(key) from error
            message = error.response.get("Error", {}).get("Message", "")
            raise _meaning(_code(error), message, status) from error
        except _BROKEN as error:
            raise Transient(_words(error)) from error
        except botocore.exceptions.BotoCoreError as error:
            raise Refused(_words(error)) from error
        finally:
            self._under_way.discard(future)


class _Body(io.BytesIO):
    """What is sent. aiohttp sends a stream piece by piece, and everything else in one go. Of bytes,
    this is no copy."""

    def __init__(self, content: Buffer) -> None:
        super().__init__(content)
        self._size = len(content)
        self._moved = 0.0

    def read(self, size: int | None = -1, /) -> bytes:
        self._moved = time.monotonic()
        return super().read(size)

    @property
    def is_stuck(self) -> bool:
        """A part is sent, and no more of it was for a while."""
        return 0 < self.tell() < self._size and time.monotonic() - self._moved > _STUCK_SECONDS


def _expect_nothing(params: dict[str, Any], **_: Any) -> None:
    """Bodies are sent without asking first: a server that never says yes is waited for for ever."""
    params["headers"].pop("Expect", None)


async def _caught(work: Coroutine[Any, Any, T]) -> T:
    """What s3fs turns into Python's own errors is turned back: those say less."""
    try:
        return await work
    except OSError as error:
        if isinstance(error.__cause__, ClientError):
            raise error.__cause__ from None
        raise


def _code(error: ClientError) -> str:
    code: str = error.response.get("Error", {}).get("Code", "")
    return code


def _meaning(code: str, message: str, status: int) -> Exception:
    words = f"{code or status}: {message}" if message else str(code or status)
    if code in _CONFLICTS or status == 412:
        return Conflict(words)
    if code in _BUSY or status in (408, 409, 429) or (status >= 500 and status != _NOT_IMPLEMENTED):
        return Transient(words)
    return Refused(words)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _settings(options: S3Options, connections: int) -> dict[str, Any]:
    """Of botocore. Bodies are signed over http, and protected by TLS over https: the checksums that
    newer versions add are not known to every server."""
    return {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _SILENT_SECONDS,
        "max_pool_connections": connections,
        "http_session_cls": _OneTry,
        "retries": {"total_max_attempts": 1},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": options.addressing},
    }
