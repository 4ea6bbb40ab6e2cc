"""Patience: what is tried again, for how long, and what people are told at last."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from icefloe.durable import Buffer
from icefloe.errors import RemoteRefused, RemoteUnreachable
from icefloe.transfer import patient
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
from icefloe.transfer.patient import PatientObjects


class Scripted:
    """Answers as it was told to: exceptions are raised, the rest is returned."""

    url = "s3://bucket/there"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[Any, ...]] = []
        self.renewed = 0

    def _next(self, *call: Any) -> Any:
        self.calls.append(call)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read(self, key: str) -> Object:
        found: Object = self._next("read", key)
        return found

    def read_into(self, key: str, start: int, into: memoryview) -> int:
        count: int = self._next("read_into", key, start, len(into))
        into[:count] = bytes([start % 256]) * count
        return count

    def info(self, key: str) -> ObjectInfo:
        found: ObjectInfo = self._next("info", key)
        return found

    def put(self, key: str, content: Buffer, expect: str | None = None) -> str:
        tag: str = self._next("put", key, bytes(content), expect)
        return tag

    def page(self, prefix: str, after: str) -> Page:
        page: Page = self._next("page", prefix, after)
        return page

    def delete(self, keys: Sequence[str]) -> None:
        self._next("delete", *keys)

    def unfinished(self) -> Sequence[Unfinished]:
        found: Sequence[Unfinished] = self._next("unfinished")
        return found

    def abandon(self, upload: Unfinished) -> None:
        self._next("abandon", upload)

    def renew(self) -> None:
        self.renewed += 1

    def give_up(self) -> None:
        pass


BUSY = Transient("503: SlowDown")
FOUND = Object(b"content", "tag")


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "_FIRST_DELAY", 0.005)
    monkeypatch.setattr(patient, "_LONGEST_DELAY", 0.02)


def test_it_is_tried_again() -> None:
    objects = PatientObjects(Scripted(BUSY, BUSY, FOUND), 5)
    assert objects.read("x") == FOUND
    traffic = objects.traffic
    assert (traffic.requests, traffic.received_bytes, traffic.retries) == (3, 7, 2)


def test_it_says_what_failed() -> None:
    objects = PatientObjects(Scripted(BUSY), 0.1)
    started = time.monotonic()
    with pytest.raises(RemoteUnreachable) as caught:
        objects.read("packs/ab/x")
    assert 0.05 < time.monotonic() - started < 1
    assert "GET s3://bucket/there/packs/ab/x failed (503: SlowDown; tried" in str(caught.value)
    assert caught.value.exit_code == 7


def test_delays_are_random_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        drawn.append((low, high))
        return 0.0

    monkeypatch.setattr(random, "uniform", uniform)
    objects = PatientObjects(Scripted(*[BUSY] * 6, FOUND), 5)
    objects.read("x")
    assert drawn == [(0, 0.005), (0, 0.01), (0, 0.02), (0, 0.02), (0, 0.02), (0, 0.02)]


@pytest.mark.parametrize("error", [NoSuchObject("x"), Conflict("x")])
def test_an_answer_is_an_answer(error: Exception) -> None:
    scripted = Scripted(error)
    with pytest.raises(type(error)):
        PatientObjects(scripted, 5).put("x", b"1", ABSENT)
    assert len(scripted.calls) == 1


def test_credentials_are_looked_for_anew() -> None:
    scripted = Scripted(Refused("ExpiredToken"), FOUND)
    assert PatientObjects(scripted, 5).read("x") == FOUND
    assert scripted.renewed == 1


@pytest.mark.parametrize("error", [Refused("no such profile"), BUSY])
def test_there_are_no_credentials_to_be_found(error: Exception) -> None:
    """People are told what was refused, then as before."""

    class Lost(Scripted):
        def renew(self) -> None:
            raise error

    with pytest.raises(RemoteRefused, match="GET .* was refused .no credentials"):
        PatientObjects(Lost(Refused("no credentials")), 5).read("x")


def test_refused_for_good() -> None:
    scripted = Scripted(Refused("403: AccessDenied"))
    with pytest.raises(RemoteRefused, match="PUT s3://bucket/there/x was refused .403") as caught:
        PatientObjects(scripted, 5).put("x", b"1")
    assert caught.value.exit_code == 7 and len(scripted.calls) == 3


def test_an_answer_that_got_lost() -> None:
    """What is there is what was sent: that is no conflict."""
    scripted = Scripted(Transient("reset"), Conflict("x"), Object(b"mine", "7"))
    assert PatientObjects(scripted, 5).put("names/x", b"mine", ABSENT) == "7"
    scripted = Scripted(Transient("reset"), Conflict("x"), Object(b"another's", "7"))
    with pytest.raises(Conflict):
        PatientObjects(scripted, 5).put("names/x", b"mine", ABSENT)
    scripted = Scripted(Transient("reset"), Conflict("x"), NoSuchObject("x"))
    with pytest.raises(Conflict):  # and by now it is gone
        PatientObjects(scripted, 5).put("names/x", b"mine", "6")
    scripted = Scripted(Conflict("x"), Object(b"mine", "7"))
    with pytest.raises(Conflict):
        PatientObjects(scripted, 5).put("names/x", b"mine", ABSENT)


def test_it_goes_on_where_it_broke_off() -> None:
    scripted = Scripted(30, BUSY, 50, 20)
    into = bytearray(100)
    objects = PatientObjects(scripted, 5)
    assert objects.read_into("x", 5, memoryview(into)) == 100
    asked = [(start, length) for _, _, start, length in scripted.calls]
    assert asked == [(5, 100), (35, 70), (35, 70), (85, 20)]
    assert bytes(into) == bytes([5]) * 30 + bytes([35]) * 50 + bytes([85]) * 20
    assert objects.traffic.received_bytes == 100


def test_the_object_ends() -> None:
    assert PatientObjects(Scripted(30, 0), 5).read_into("x", 0, memoryview(bytearray(100))) == 30


def test_a_listing_goes_on() -> None:
    rows = [ObjectInfo(f"a/{i}", 1, 0.0) for i in range(4)]
    scripted = Scripted(Page(rows[:2], True), BUSY, Page(rows[2:], False))
    assert list(PatientObjects(scripted, 5).list("a/")) == rows
    assert scripted.calls == [("page", "a/", ""), ("page", "a/", "a/1"), ("page", "a/", "a/1")]


def test_stopping_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "_FIRST_DELAY", 60.0)
    monkeypatch.setattr(patient, "_LONGEST_DELAY", 60.0)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    objects = PatientObjects(Scripted(BUSY), 1000)
    threading.Timer(0.1, objects.stop).start()
    with pytest.raises(RemoteUnreachable):
        objects.read("x")


def test_what_is_asked_for_after_stopping_gets_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is released if the server answers; if not, the command ends all the same."""
    monkeypatch.setattr(patient, "_LAST_SECONDS", 0.1)
    given_up = threading.Event()

    class Silent(Scripted):
        def delete(self, keys: Sequence[str]) -> None:
            assert not given_up.is_set() and given_up.wait(10)
            raise Transient("given up")

        def give_up(self) -> None:
            if stopped.is_set():
                given_up.set()

    stopped = threading.Event()
    objects = PatientObjects(Silent(FOUND), 1000)
    objects.stop()
    stopped.set()
    assert objects.read("x") == FOUND
    with pytest.raises(RemoteUnreachable, match="DELETE .*tried 1 times"):
        objects.delete(["leases/x"])
    given_up.clear()
    time.sleep(0.15)
    assert not given_up.is_set()


def each(objects: PatientObjects) -> list[Callable[[], object]]:
    """The methods that return nothing worth looking at."""
    return [
        lambda: objects.delete(["x"]),
        lambda: objects.abandon(Unfinished("x", "1", 0.0)),
        lambda: objects.unfinished(),
        lambda: objects.info("x"),
    ]


@pytest.mark.parametrize("i", range(4))
def test_all_of_them(i: int) -> None:
    scripted = Scripted(BUSY, None)
    each(PatientObjects(scripted, 5))[i]()
    assert len(scripted.calls) == 2
    with pytest.raises(RemoteUnreachable):
        each(PatientObjects(Scripted(BUSY), 0.02))[i]()


def test_deleting_nothing_asks_nothing() -> None:
    scripted = Scripted(None)
    PatientObjects(scripted, 5).delete([])
    assert not scripted.calls
