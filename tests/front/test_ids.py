"""Names, tags and ids as people type them."""

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from icefloe.errors import IcefloeError, UsageError
from icefloe.ids import IdPrefix, Name, block_id, parse_name, parse_reference

names = st.from_regex(r"[a-z0-9][a-z0-9._/-]{0,127}", fullmatch=True)
tags = st.from_regex(r"[A-Za-z0-9._-]{1,127}", fullmatch=True)


@given(names, tags)
def test_names_round_trip(name: str, tag: str) -> None:
    """What is printed can be typed; a bare name means `latest`."""
    assert parse_name(f"{name}:{tag}") == Name(name, tag) == parse_name(str(Name(name, tag)))
    assert parse_name(name) == Name(name, "latest")
    assert str(parse_name(name)) == f"{name}:latest"
    assert parse_reference(f"{name}:{tag}") == Name(name, tag)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":tag",
        "a:",
        "a:b:c",
        "A",
        "Name",
        "-a",
        ".a",
        "/a",
        "_a",
        "a b",
        "a\n",
        "a:t\n",
        "é",
        "a:é",
        "٣",
        "a@b",
        "a:b/c",
        "a" * 129,
        "a:" + "t" * 128,
        "@a:b",
    ],
)
def test_not_a_name(text: str) -> None:
    """Everything else is refused, with advice."""
    with pytest.raises(UsageError) as caught:
        parse_name(text)
    assert caught.value.exit_code == 2 and caught.value.advice


@given(st.text(max_size=30))
def test_any_text(text: str) -> None:
    """A reference or a UsageError."""
    try:
        reference = parse_reference(text)
    except UsageError:
        return
    assert str(reference) == text.lower() or isinstance(reference, Name)


def test_limits() -> None:
    """The longest name and the longest tag."""
    assert parse_name("a" * 128 + ":" + "T" * 127) == Name("a" * 128, "T" * 127)


@given(st.text("0123456789abcdefABCDEF", min_size=8, max_size=64))
def test_ids(digits: str) -> None:
    """8 to 64 hex digits, in either case."""
    assert parse_reference("@" + digits) == IdPrefix(digits.lower())
    assert str(IdPrefix(digits.lower())) == "@" + digits.lower()


@pytest.mark.parametrize(
    "text",
    [
        "@",
        "@1234567",
        "@" + "0" * 65,
        "@1234567g",
        "@ 12345678",
        "@12345678\n",
        "@@12345678",
        "@٣" * 8,
    ],
)
def test_not_an_id(text: str) -> None:
    """Too short, too long, not hex."""
    with pytest.raises(UsageError):
        parse_reference(text)


@given(st.binary(max_size=300))
def test_block_ids(raw: bytes) -> None:
    """BLAKE3 of the bytes, whatever holds them."""
    expected = blake3(raw).digest()
    assert block_id(raw) == block_id(bytearray(raw)) == block_id(memoryview(raw)) == expected


def test_every_error_has_an_exit_code() -> None:
    """One that `icefloe --help` lists, and a sentence about when it happens."""
    from icefloe.errors import EXIT_CODES

    kinds = [IcefloeError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert kind.exit_code in EXIT_CODES and kind.__doc__, kind
        assert kind is IcefloeError or kind.exit_code > 1, kind
