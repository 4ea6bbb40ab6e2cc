"""What others see of what is sealed, and what opens it."""

from pathlib import Path

import pytest
from remotes import key_file

from icefloe.errors import KeyNeeded
from icefloe.ids import BlockId, block_id
from icefloe.transfer.sealing import OVERHEAD, Key, Open, Sealed, Unsealable, load_keys

OLD, NEW = "11" * 32, "22" * 32
BLOCK = block_id(b"content")


def test_what_is_sealed_opens(tmp_path: Path) -> None:
    sealed = load_keys(key_file(tmp_path / "keys", NEW))
    for plain in (b"", b"x", bytes(100_000)):
        closed = bytes(sealed.seal(b"block", plain))
        assert len(closed) == len(plain) + OVERHEAD
        assert len(plain) < 50 or plain not in closed
        assert bytes(sealed.open(b"block", closed)) == plain
        assert bytes(sealed.seal(b"block", plain)) != closed


def test_only_as_what_it_is() -> None:
    sealed = Sealed([Key(bytes(32))])
    closed = bytes(sealed.seal(b"block one", b"content"))
    for bad in (closed[:-1], closed + b"x", closed[:20] + b"\xff" + closed[21:], closed[:10], b""):
        with pytest.raises(Unsealable):
            sealed.open(b"block one", bad)
    with pytest.raises(Unsealable, match="isn't what it is taken for"):
        sealed.open(b"block two", closed)


def test_another_key(tmp_path: Path) -> None:
    """After a change of keys, what is older still opens, and what is new has the new key."""
    old = load_keys(key_file(tmp_path / "old", OLD))
    both = load_keys(key_file(tmp_path / "both", NEW, OLD))
    new = load_keys(key_file(tmp_path / "new", NEW))
    closed = old.seal(b"x", b"content")
    assert bytes(both.open(b"x", closed)) == b"content"
    with pytest.raises(Unsealable, match=f"sealed with key {old.key_ids[0]}"):
        new.open(b"x", closed)
    assert bytes(new.open(b"x", both.seal(b"x", b"content"))) == b"content"
    assert both.outers(BLOCK) == [new.outer(BLOCK), old.outer(BLOCK)]


def test_ids_say_nothing() -> None:
    """Whoever knows the content can't tell that it is there."""
    one, two = Sealed([Key(bytes(32))]), Sealed([Key(b"\1" * 32)])
    assert len({BLOCK, one.outer(BLOCK), two.outer(BLOCK)}) == 3
    assert one.outer(BLOCK) == one.outer(BlockId(bytes(BLOCK)))
    assert Open().outer(BLOCK) == BLOCK


@pytest.mark.parametrize("content", ["", "# nothing\n", "11\n", "zz" * 32, "11" * 32 + " 22"])
def test_no_keys(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(KeyNeeded, match="holds no keys.*openssl rand -hex 32"):
        load_keys(tmp_path / "keys")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyNeeded, match="cannot read the keys"):
        load_keys(tmp_path / "keys")


def test_the_secret_is_not_shown() -> None:
    assert "1111" not in repr(Key(bytes.fromhex(OLD)))
