"""What differs between an image and a machine, one difference at a time."""

import copy
import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefloe.capture import fit
from icefloe.capture.facts import machine_facts
from icefloe.capture.fit import Mismatch, mismatches
from icefloe.errors import Incompatible

Change = Callable[[dict[str, Any]], object]


def gpu(number: int, **others: Any) -> dict[str, Any]:
    """A GPU, as facts have it."""
    made = {"name": "H200", "uuid": f"GPU-{number}", "memory_bytes": 140 << 30}
    return made | {"compute_capability": "9.0"} | others


FACTS: dict[str, Any] = {
    "arch": "x86_64",
    "cpu": {"model": "Xeon", "features": ["avx", "avx2", "sse2"]},
    "kernel": "6.8.0-31-generic",
    "criu": "4.2",
    "page_bytes": 4096,
    "cuda": {"driver": "580.159.04", "version": "13.0", "gpus": [gpu(0), gpu(1)]},
}
PLAIN = {key: value for key, value in FACTS.items() if key != "cuda"}

WORDS = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(1 << 2000) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
RELEASES = st.from_regex(r"[0-9]{1,9}\.[0-9]{1,9}.{0,3}", fullmatch=True)


def mostly(valid: Any, *others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What belongs there, or anything."""
    return st.one_of(st.just(valid), *others, JSON)


GPUS = st.fixed_dictionaries({}, optional={key: mostly(gpu(0)[key], WORDS) for key in gpu(0)})
CUDAS = st.fixed_dictionaries(
    {"driver": mostly("580"), "version": mostly("13.0"), "gpus": st.lists(GPUS | JSON) | JSON}
)
HOSTILE = st.fixed_dictionaries(
    {},
    optional={
        "arch": mostly("x86_64"),
        "cpu": st.fixed_dictionaries({"features": st.lists(WORDS | JSON) | JSON}) | JSON,
        "kernel": mostly("6.8", RELEASES),
        "criu": mostly("4.2", RELEASES),
        "page_bytes": mostly(4096),
        "cuda": CUDAS | JSON,
    },
)
LABELS = st.dictionaries(st.sampled_from(["model", "engine", "flags"]) | WORDS, WORDS, max_size=3)


def compared(
    image: dict[str, Any],
    here: dict[str, Any],
    needs_cuda: bool = False,
    reason: str | None = None,
) -> tuple[Mismatch, ...]:
    """Without labels."""
    return mismatches(image, {}, here, {}, needs_cuda, reason)


def changed(change: Change) -> dict[str, Any]:
    """Facts of which something is different."""
    facts = copy.deepcopy(FACTS)
    change(facts)
    return facts


def only(found: tuple[Mismatch, ...]) -> Mismatch:
    """The one that there has to be."""
    assert len(found) == 1, found
    return found[0]


def put(value: Any, *keys: Any) -> Change:
    """Sets a value deep inside."""

    def change(facts: Any) -> None:
        for key in keys[:-1]:
            facts = facts[key]
        facts[keys[-1]] = value

    return change


def put_gpu(number: int, **others: Any) -> Change:
    """A GPU that differs."""
    return put(gpu(number, **others), "cuda", "gpus", number)


GPU_LIST = ("cuda", "gpus")

# What is different here; then what is said of it, its severity, and words of its sentence.
DIFFERENCES: list[tuple[Change, str, str, list[str]]] = [
    (put("aarch64", "arch"), "arch", "blocks", ["x86_64", "aarch64", "can't run"]),
    (put(65536, "page_bytes"), "page_bytes", "blocks", ["4096", "65536", "memory"]),
    (put(["avx", "sse2"], "cpu", "features"), "cpu features", "blocks", ["lacks avx2,", "uses it"]),
    (put([], "cpu", "features"), "cpu features", "blocks", ["avx, avx2, sse2", "uses them"]),
    (put("6.5.99-1", "kernel"), "kernel", "warns", ["6.5.99-1", "6.8.0", "older"]),
    (put("5.15.0", "kernel"), "kernel", "warns", ["5.15.0", "older"]),
    (put("4.1", "criu"), "criu", "warns", ["4.1", "4.2", "ignore"]),
    (put("3.19", "criu"), "criu", "blocks", ["3.19", "4.2", "another way"]),
    (put("5.0", "criu"), "criu", "blocks", ["5.0", "4.2", "another way"]),
    (put([gpu(0)], *GPU_LIST), "gpus", "blocks", ["was 2", "is 1 here"]),
    (put([], *GPU_LIST), "gpus", "blocks", ["was 2", "is 0 here"]),
    (put_gpu(1, name="A100"), "gpu 1", "blocks", ["GPU 1", "H200", "A100", "same kind"]),
    (
        put_gpu(0, compute_capability="8.0"),
        "gpu 0 compute capability",
        "blocks",
        ["GPU 0", "9.0", "8.0", "kernels"],
    ),
    (
        put_gpu(1, memory_bytes=(140 << 30) - 1),
        "gpu 1 memory",
        "blocks",
        ["143360 MiB", "143359 MiB"],
    ),
    (put([gpu(1), gpu(0)], *GPU_LIST), "gpu order", "warns", ["another order"]),
    (put_gpu(1, uuid="GPU-7"), "gpu uuids", "warns", ["restore onto others"]),
    (put("570.1", "cuda", "driver"), "driver", "blocks", ["570.1", "580.159.04", "library"]),
    (put("13.1", "cuda", "version"), "cuda version", "warns", ["13.1", "13.0"]),
]


@pytest.mark.parametrize(("change", "what", "severity", "words"), DIFFERENCES)
def test_one_difference(change: Change, what: str, severity: str, words: list[str]) -> None:
    """It is all that is said, in one sentence."""
    found = only(compared(FACTS, changed(change)))
    assert (found.what, found.severity) == (what, severity)
    assert all(word in found.sentence for word in words), found.sentence
    assert found.sentence[0] not in string.punctuation and found.sentence[-1] != "."
    assert found.image != found.here


SAME: list[Change] = [
    put("6.8.99", "kernel"),  # only major and minor count
    put("6.10.0", "kernel"),  # ten is more than eight
    put("7.0.0", "kernel"),
    put("strange", "kernel"),
    put("4.3", "criu"),
    put("4.10", "criu"),
    put(["avx", "avx2", "sse2", "avx512f"], "cpu", "features"),
    put("another", "cpu", "model"),
    put([gpu(0), gpu(1), gpu(2)], *GPU_LIST),
    put_gpu(0, memory_bytes=141 << 30),
]


@pytest.mark.parametrize("change", SAME)
def test_what_makes_no_difference(change: Change) -> None:
    assert compared(FACTS, changed(change)) == ()


def test_another_arch_says_nothing_of_features() -> None:
    """They have other names there. All else is still compared."""
    here = changed(lambda facts: facts.update(arch="aarch64", cpu={"features": ["asimd"]}))
    here["page_bytes"] = 65536
    assert [found.what for found in compared(FACTS, here)] == ["arch", "page_bytes"]


def test_many_features() -> None:
    """Eight are named, all are in the value."""
    names = [f"avx{number}" for number in range(10, 30)]
    found = only(compared({"cpu": {"features": names[::-1]}}, PLAIN))
    assert (
        ", ".join(names[:8]) + " and 12 more" in found.sentence and names[8] not in found.sentence
    )
    assert found.image.split() == names
    exactly = only(compared({"cpu": {"features": names[:8]}}, PLAIN))
    assert names[7] in exactly.sentence and "more" not in exactly.sentence


def test_gpus_elsewhere() -> None:
    """Another driver is no news about its CUDA; a subset of the GPUs may be in other places."""
    here = changed(lambda facts: facts["cuda"].update(driver="570.1", version="12.8"))
    assert only(compared(FACTS, here)).what == "driver"
    here = changed(put([gpu(2), gpu(0), gpu(1)], *GPU_LIST))
    assert only(compared(FACTS, here)).what == "gpu order"


def test_a_driver_that_does_not_tell() -> None:
    """What an image doesn't say isn't compared; what this machine doesn't say can't be right."""
    unknown = changed(put("", "cuda", "driver"))
    assert compared(unknown, FACTS) == ()
    assert "is unknown and" in only(compared(FACTS, unknown)).sentence


@pytest.mark.parametrize(("image", "needs"), [(FACTS, False), (FACTS, True), (PLAIN, True)])
def test_no_cuda_here(image: dict[str, Any], needs: bool) -> None:
    """Once, and nothing about GPUs that aren't there."""
    found = only(compared(image, PLAIN, needs, "no driver"))
    assert (found.what, found.severity) == ("cuda", "blocks")
    assert found.sentence.endswith("can't be used here (no driver)")
    assert only(compared(image, PLAIN, needs)).sentence.endswith("can't be used here")


def test_cuda_here() -> None:
    """Of use to an image that says nothing about it, and of no harm to one that needs none."""
    assert compared(PLAIN, FACTS, True) == compared(PLAIN, FACTS) == compared(PLAIN, PLAIN) == ()


def test_labels() -> None:
    """Only what is expected is compared."""
    labels = {"model": "llama", "engine": "vllm 0.9", "flags": "", "more": "x"}
    expected = {"model": "llama", "engine": "vllm 0.10", "digest": "sha256:1", "flags": "-a"}
    found = {m.what: m for m in mismatches({}, labels, {}, expected, False, None)}
    assert {m.severity for m in found.values()} == {"blocks"}
    assert sorted(found) == ["label digest", "label engine", "label flags"]
    assert "engine of the image is vllm 0.9" in found["label engine"].sentence
    assert "vllm 0.10" in found["label engine"].sentence
    assert "captured without saying its digest" in found["label digest"].sentence
    assert "flags of the image is empty" in found["label flags"].sentence
    assert mismatches({}, labels, {}, labels, False, None) == ()
    assert mismatches({}, labels, {}, {}, False, None) == ()


def test_an_image_without_facts() -> None:
    """One that was added from a directory."""
    assert compared({}, FACTS) == ()


def test_parts_that_are_not_said() -> None:
    """Or that make no sense: the machine has them, the image is silent."""
    for silent in ({}, None, {"name": 5, "memory_bytes": "much", "uuid": []}):
        assert compared({"cuda": {"gpus": [silent, gpu(1)]}, "cpu": [], "criu": 4}, FACTS) == ()


def test_what_blocks_comes_first() -> None:
    here = changed(lambda facts: facts.update(kernel="5.0", criu="4.0", page_bytes=65536))
    found = mismatches(FACTS, {}, here, {"model": "x"}, False, None)
    assert [m.what for m in found] == ["page_bytes", "label model", "kernel", "criu"]


def test_require() -> None:
    """Warnings are no reason."""
    older = changed(lambda facts: facts.update(kernel="5.0", criu="4.0"))
    fit.require(compared(FACTS, older))
    older |= {"arch": "aarch64", "page_bytes": 65536}
    found = compared(FACTS, older)
    with pytest.raises(Incompatible) as caught:
        fit.require(found)
    sentences = caught.value.sentences
    assert sentences == tuple(m.sentence for m in found[:2]) and len(found) == 4
    assert str(caught.value).startswith(f"this machine doesn't fit the image ({sentences[0]}; ")
    assert f"; {sentences[1]}): start the work anew here" in str(caught.value)
    assert str(caught.value).endswith("or try with --ignore-incompatible")
    assert caught.value.exit_code == 5


def test_this_machine_fits_itself() -> None:
    here = machine_facts((4, 2), None)
    assert here["cpu"]["features"] and compared(here, here) == ()


@given(HOSTILE, LABELS)
def test_whatever_fits_itself(facts: dict[str, Any], labels: dict[str, str]) -> None:
    """Also what makes no sense."""
    assert mismatches(facts, labels, facts, labels, False, None) == ()


@given(HOSTILE, HOSTILE | st.just(FACTS), LABELS, LABELS, st.booleans(), st.none() | WORDS)
def test_hostile_facts(
    image: dict[str, Any],
    here: dict[str, Any],
    labels: dict[str, str],
    expected: dict[str, str],
    needs_cuda: bool,
    reason: str | None,
) -> None:
    """There is an answer, in order, that a terminal can show."""
    found = mismatches(image, labels, here, expected, needs_cuda, reason)
    severities = [mismatch.severity for mismatch in found]
    assert severities == sorted(severities)  # "blocks" is before "warns"
    assert all(mismatch.sentence.isprintable() for mismatch in found)
    try:
        fit.require(found)
    except Incompatible as error:
        assert len(error.sentences) == severities.count("blocks") > 0
    else:
        assert "blocks" not in severities


def test_long_and_unprintable_values() -> None:
    """They are whole in the value."""
    evil = "\x1b[2J\ud800" + "x" * 10_000
    found = only(mismatches({}, {"model": evil}, {}, {"model": "m"}, False, None))
    assert found.image == evil and len(found.sentence) < 300
    assert r"\x1b[2J\ud800xx" in found.sentence
