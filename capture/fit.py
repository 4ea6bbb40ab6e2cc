"""Whether a machine fits an image: what was recorded at its capture against what is here.

Nothing is looked up, so a scheduler can ask it about machines that it only knows by their facts.
What an image doesn't say is not compared. What it says and the machine doesn't, differs; only
versions of the kernel and of CRIU have to be known on both sides.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from icefloe.capture.facts import CudaFacts, Gpu, count, decode_cuda, decode_features, text
from icefloe.errors import Incompatible

Severity = Literal["blocks", "warns"]

_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")

# Of names and texts in a sentence. Images come from anywhere.
_MAX_NAMES = 8
_MAX_TEXT = 100


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something that differs: `blocks` when the process would not live here, or not be right.

    `image` and `here` are the two values as they were found, for programs. `sentence` is for
    people; it can be shown on a terminal whatever the values are.
    """

    what: str
    severity: Severity
    image: str
    here: str
    sentence: str


def mismatches(
    facts: Mapping[str, Any],
    labels: Mapping[str, str],
    here: Mapping[str, Any],
    expected: Mapping[str, str],
    needs_cuda: bool,
    no_cuda_reason: str | None,
) -> tuple[Mismatch, ...]:
    """All that differs, what blocks first.

    `facts` and `labels` are the image's, `here` is what machine_facts says, and `expected` holds
    the labels of what this machine would run. `needs_cuda`: the image's processes use CUDA, even
    if its facts don't say so. `no_cuda_reason` is why `here` has no CUDA, when that is known.
    """
    found = [
        *_machine(facts, here),
        *_criu(text(facts, "criu"), text(here, "criu")),
        *_cuda(decode_cuda(facts), decode_cuda(here), needs_cuda, no_cuda_reason),
        *_labels(labels, expected),
    ]
    return tuple(sorted(found, key=lambda mismatch: mismatch.severity != "blocks"))


def require(found: Iterable[Mismatch]) -> None:
    """Raises Incompatible when any of them blocks."""
    sentences = [mismatch.sentence for mismatch in found if mismatch.severity == "blocks"]
    if sentences:
        raise Incompatible(sentences)


def _machine(facts: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Mismatch]:
    then, now = text(facts, "arch"), text(here, "arch")
    if then and then != now:
        yield Mismatch(
            "arch",
            "blocks",
            then,
            now,
            f"the image was captured on {_shown(then)} and this machine is {_shown(now)}, which "
            "can't run its code",
        )
    else:
        yield from _features(decode_features(facts), decode_features(here))
    size, size_here = count(facts, "page_bytes"), count(here, "page_bytes")
    if size and size != size_here:
        yield Mismatch(
            "page_bytes",
            "blocks",
            str(size),
            str(size_here),
            f"the image has pages of {size} bytes and this machine has pages of {size_here} bytes, "
            "so its memory can't be laid out here",
        )
    then, now = text(facts, "kernel"), text(here, "kernel")
    version, version_here = _version(then), _version(now)
    if version and version_here and version_here < version:
        yield Mismatch(
            "kernel",
            "warns",
            then,
            now,
            f"the kernel here is {_shown(now)}, older than {_shown(then)} of the capture, and may "
            "lack what the process uses",
        )


def _features(then: frozenset[str], now: frozenset[str]) -> Iterator[Mismatch]:
    missing = sorted(then - now)
    if not missing:
        return
    names = ", ".join(map(_shown, missing[:_MAX_NAMES]))
    if len(missing) > _MAX_NAMES:
        names += f" and {len(missing) - _MAX_NAMES} more"
    them = "it" if len(missing) == 1 else "them"
    yield Mismatch(
        "cpu features",
        "blocks",
        " ".join(missing),
        "",
        f"the CPU here lacks {names}, and the process may have chosen code that uses {them}",
    )


def _criu(then: str, now: str) -> Iterator[Mismatch]:
    version, version_here = _version(then), _version(now)
    if not version or not version_here:
        return
    both = f"CRIU here is {_shown(now)} and the image was captured by {_shown(then)}"
    if version[0] != version_here[0]:
        sentence = f"{both}, which may write its files in another way"
        yield Mismatch("criu", "blocks", then, now, sentence)
    elif version_here < version:
        # Its files are protocol buffers: fields that it doesn't know are skipped.
        sentence = f"{both}, so it will ignore what it doesn't know yet in its files"
        yield Mismatch("criu", "warns", then, now, sentence)


def _cuda(
    then: CudaFacts | None, now: CudaFacts | None, needed: bool, reason: str | None
) -> Iterator[Mismatch]:
    if now is None and (needed or then is not None):
        why = f" ({_shown(reason)})" if reason else ""
        yield Mismatch(
            "cuda",
            "blocks",
            then.version if then else "",
            "",
            f"the process uses CUDA, which can't be used here{why}",
        )
    if then is None or now is None:
        return
    if len(now.gpus) < len(then.gpus):
        yield Mismatch(
            "gpus",
            "blocks",
            str(len(then.gpus)),
            str(len(now.gpus)),
            f"the number of GPUs was {len(then.gpus)} at the capture and is {len(now.gpus)} here, "
            "so CUDA can't restore what was on the others",
        )
    for number, (gpu, gpu_here) in enumerate(zip(then.gpus, now.gpus, strict=False)):
        yield from _gpu(number, gpu, gpu_here)
    yield from _which_gpus(then.gpus, now.gpus)
    yield from _driver(then, now)


def _gpu(number: int, then: Gpu, now: Gpu) -> Iterator[Mismatch]:
    """The driver restores onto GPUs of the same chip with enough memory (CUDA driver API,
    cuCheckpointProcessRestore)."""
    if then.name and then.name != now.name:
        yield Mismatch(
            f"gpu {number}",
            "blocks",
            then.name,
            now.name,
            f"GPU {number} was {_shown(then.name)} and is {_shown(now.name)} here, but CUDA "
            "restores only onto the same kind",
        )
    kind, kind_here = then.compute_capability, now.compute_capability
    if kind and kind != kind_here:
        yield Mismatch(
            f"gpu {number} compute capability",
            "blocks",
            kind,
            kind_here,
            f"GPU {number} had compute capability {_shown(kind)} and has {_shown(kind_here)} here, "
            "so it can't run the process's kernels",
        )
    if now.memory_bytes < then.memory_bytes:
        yield Mismatch(
            f"gpu {number} memory",
            "blocks",
            str(then.memory_bytes),
            str(now.memory_bytes),
            f"GPU {number} had {then.memory_bytes >> 20} MiB of memory and has "
            f"{now.memory_bytes >> 20} MiB here, which may not hold what the process had there",
        )


def _which_gpus(then: tuple[Gpu, ...], now: tuple[Gpu, ...]) -> Iterator[Mismatch]:
    """Says nothing when there are too few: that is said already."""
    uuids, uuids_here = [gpu.uuid for gpu in then], [gpu.uuid for gpu in now]
    values = " ".join(uuids), " ".join(uuids_here)
    if "" in uuids or len(then) > len(now) or uuids == uuids_here[: len(uuids)]:
        return
    if set(uuids) <= set(uuids_here):
        sentence = (
            "the GPUs of the image are here in another order, so the process may find its data on "
            "another one than before"
        )
        yield Mismatch("gpu order", "warns", *values, sentence)
    else:
        sentence = "the GPUs here are not those of the image, so CUDA has to restore onto others"
        yield Mismatch("gpu uuids", "warns", *values, sentence)


def _driver(then: CudaFacts, now: CudaFacts) -> Iterator[Mismatch]:
    if then.driver and then.driver != now.driver:
        # CRIU compares the size and build id of mapped files; the driver reads its own state.
        yield Mismatch(
            "driver",
            "blocks",
            then.driver,
            now.driver,
            f"the NVIDIA driver here is {_shown(now.driver)} and was {_shown(then.driver)} at the "
            "capture, but the process has the driver's library in its memory and needs the same",
        )
    elif then.version and then.version != now.version:
        # The library can be another than the driver's own: cuda-compat.
        yield Mismatch(
            "cuda version",
            "warns",
            then.version,
            now.version,
            f"CUDA here is {_shown(now.version)} and was {_shown(then.version)} at the capture, so "
            "its library may be another than the process has in its memory",
        )


def _labels(labels: Mapping[str, str], expected: Mapping[str, str]) -> Iterator[Mismatch]:
    for name, now in sorted(expected.items()):
        then = labels.get(name)
        if then == now:
            continue
        if then is None:
            sentence = (
                f"the image was captured without saying its {_shown(name)}, so it may be another "
                f"than {_shown(now, 'empty')} that would run here"
            )
        else:
            sentence = (
                f"{_shown(name)} of the image is {_shown(then, 'empty')} and here it would be "
                f"{_shown(now, 'empty')}, so the process would go on as something else"
            )
        yield Mismatch(f"label {name}", "blocks", then or "", now, sentence)


def _version(release: str) -> tuple[int, int] | None:
    """Major and minor; None when it doesn't begin with them."""
    found = _VERSION.match(release)
    return (int(found[1]), int(found[2])) if found else None


def _shown(value: str, nothing: str = "unknown") -> str:
    """As it can stand in a sentence: printable, and not too long. `nothing` stands for ""."""
    if len(value) > _MAX_TEXT:
        value = f"{value[:_MAX_TEXT]}..."
    if not value.isprintable():
        value = ascii(value)[1:-1]
    return value or nothing
