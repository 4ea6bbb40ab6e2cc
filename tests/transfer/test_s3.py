"""What S3Objects makes of answers that the server of the other tests never gives."""

from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from icefloe.transfer.objects import Conflict, NoSuchObject, Refused, Transient, Unfinished
from icefloe.transfer.options import S3Options
from icefloe.transfer.s3 import S3Objects

THEN = datetime(2026, 12, 4, tzinfo=UTC)


class Answers:
    """Instead of requests: what is next, raised or returned."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def __call__(self, operation: str, **arguments: Any) -> Coroutine[Any, Any, Any]:
        self.asked.append(arguments)
        return self._next()

    async def _next(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def made(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> tuple[S3Objects, Answers]:
    """A bucket that gives these answers."""
    objects, scripted = S3Objects("s3://bucket/p", S3Options()), Answers(*answers)
    monkeypatch.setattr(objects, "_ask", scripted)
    return objects, scripted


def refusal(code: str, status: int) -> ClientError:
    """As botocore has it."""
    metadata = {"HTTPStatusCode": status}
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": metadata}, "PutObject")


@pytest.mark.parametrize(
    ("code", "status", "meaning"),
    [
        ("PreconditionFailed", 412, Conflict),
        ("ConditionalRequestConflict", 409, Conflict),
        ("OperationAborted", 409, Transient),
        ("SlowDown", 503, Transient),
        ("RequestTimeout", 400, Transient),
        ("", 502, Transient),
        ("NotImplemented", 501, Refused),
        ("ExpiredToken", 400, Refused),
        ("AccessDenied", 403, Refused),
        ("NoSuchBucket", 404, Refused),
    ],
)
def test_what_an_answer_means(
    code: str, status: int, meaning: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, _ = made(monkeypatch, refusal(code, status))
    with pytest.raises(meaning):
        objects.put("x", b"1", "tag")


def test_a_condition_on_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    objects, _ = made(monkeypatch, refusal("NoSuchKey", 404))
    with pytest.raises(Conflict):
        objects.put("x", b"1", "tag")


def test_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    objects, _ = made(monkeypatch, refusal("NoSuchKey", 404), refusal("404", 404))
    with pytest.raises(NoSuchObject):
        objects.read("x")
    with pytest.raises(NoSuchObject):
        objects.info("x")


def test_an_empty_page_that_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that took it for the last would not know what it must keep."""
    row = {"Key": "p/a/2", "Size": 1, "LastModified": THEN}
    objects, scripted = made(
        monkeypatch,
        {"IsTruncated": True, "NextContinuationToken": "token"},
        {"IsTruncated": True, "NextContinuationToken": "more", "Contents": [row]},
    )
    page = objects.page("a/", "a/1")
    assert [found.key for found in page.rows] == ["a/2"] and page.more
    assert scripted.asked == [
        {"Prefix": "p/a/", "StartAfter": "p/a/1"},
        {"Prefix": "p/a/", "ContinuationToken": "token"},
    ]


def test_an_upload_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else gave it up, or finished it."""
    objects, _ = made(monkeypatch, refusal("NoSuchUpload", 404))
    objects.abandon(Unfinished("x", "1", 0.0))


@pytest.mark.parametrize("endpoint", ["nonsense", "127.0.0.1:9000", "http://"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    objects = S3Objects("s3://bucket", S3Options(endpoint=endpoint))
    with pytest.raises((Refused, Transient)):
        objects.read("x")


def test_some_of_several_are_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, kept = {"Code": "NoSuchKey"}, {"Code": "AccessDenied", "Message": "No"}
    objects, _ = made(monkeypatch, {"Errors": [gone]}, {"Errors": [gone, kept]})
    objects.delete(["x"])
    with pytest.raises(Refused, match="AccessDenied: No"):
        objects.delete(["x", "y"])
