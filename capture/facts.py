"""What a machine is, as far as a process that was captured on it depends on it.

A capture records it in the image as `facts`; `fit` compares them with those of another machine:

    {"arch": "x86_64", "cpu": {"model": "...", "features": ["adx", ...]}, "kernel": "6.8.0",
     "criu": "4.2", "page_bytes": 4096,
     "cuda": {"driver": "580.159.04", "version": "13.0",
              "gpus": [{"name": "...", "uuid": "GPU-...", "memory_bytes": 150754820096,
                        "compute_capability": "9.0"}, ...]}}

`cuda` is there when there are GPUs. Images come from anywhere, so what is read back from one may
lack parts or hold anything: such parts count as not said.
"""

import mmap
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")

# Flags of x86 (arch/x86/include/asm/cpufeatures.h in Linux) that stand for what code may use
# without the kernel's help. Libraries look at them once, when they are loaded, and choose their
# code by them. All flags that begin like these belong to them, also those yet to come.
_X86_FAMILIES = ("amx_", "avx", "sse", "ssse")

# And these. `abm` is LZCNT, `pni` SSE3, `3dnowprefetch` PREFETCHW. `erms` and `fsrm` are no
# instructions, but glibc chooses how to copy by them; by `xsavec` how to bind functions. XSAVES
# is the kernel's alone. Flags that say how the kernel works or what it mitigates are left out.
# Of some of the latest instructions (AVX-IFMA, APX, CMPccXADD) the kernel shows no flag so far.
_X86_FEATURES = frozenset(
    """
    fpu cx8 cx16 cmov fxsr mmx mmxext 3dnow 3dnowext 3dnowprefetch misalignsse pni
    fma fma4 f16c xop
    bmi1 bmi2 tbm abm popcnt adx movbe lahf_lm cmpccxadd raoint apx
    aes vaes pclmulqdq vpclmulqdq gfni sha_ni sha512 sm3 sm4
    ace_en ace2_en phe_en pmm_en rng_en
    rdrand rdseed rdtscp rdpid rdpru fsgsbase
    xsave xsaveopt xsavec xgetbv1
    erms fsrm
    clflush clflushopt clwb clzero cldemote movdiri movdir64b enqcmd serialize
    waitpkg mwaitx ring3mwait
    pku ospke user_shstk lam
    rtm hle tsxldtrk
    """.split()
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as the driver describes it: `GPU-` and hex digits, `9.0`."""

    name: str
    uuid: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """The GPUs in the driver's order, its own version, and that of the CUDA it speaks."""

    driver: str
    version: str
    gpus: tuple[Gpu, ...]


def machine_facts(criu_version: tuple[int, int], cuda: CudaFacts | None) -> dict[str, Any]:
    """The facts of this machine. No features of the CPU where /proc doesn't show them."""
    try:
        cpuinfo = _CPUINFO.read_text(errors="replace")
    except OSError:
        cpuinfo = ""
    facts: dict[str, Any] = {
        "arch": platform.machine(),
        "cpu": {"model": cpu_model(cpuinfo), "features": cpu_features(cpuinfo)},
        "kernel": platform.release(),
        "criu": f"{criu_version[0]}.{criu_version[1]}",
        "page_bytes": mmap.PAGESIZE,
    }
    if cuda is not None and cuda.gpus:
        facts["cuda"] = encode_cuda(cuda)
    return facts


def cpu_features(cpuinfo: str) -> list[str]:
    """What code may use on every processor of a /proc/cpuinfo, sorted.

    Programs move between processors: what one of them lacks, none can count on.
    """
    processors: list[set[str]] = []
    for key, value in _fields(cpuinfo):
        if key == "flags":  # x86
            processors.append({flag for flag in value.split() if _is_for_programs(flag)})
        elif key == "Features":  # ARM: AT_HWCAP, which is made for programs
            processors.append(set(value.split()))
    return sorted(set.intersection(*processors)) if processors else []


def cpu_model(cpuinfo: str) -> str:
    """The first processor's name; on arm64, which has none, the numbers that stand for it."""
    first: dict[str, str] = {}
    for key, value in _fields(cpuinfo):
        first.setdefault(key, value)
    if "model name" in first:
        return first["model name"]
    if "CPU implementer" in first and "CPU part" in first:
        return f"implementer {first['CPU implementer']}, part {first['CPU part']}"
    return ""


def _fields(cpuinfo: str) -> Iterator[tuple[str, str]]:
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _is_for_programs(flag: str) -> bool:
    return flag in _X86_FEATURES or flag.startswith(_X86_FAMILIES)


def encode_cuda(cuda: CudaFacts) -> dict[str, Any]:
    """The part `cuda` of the facts."""
    gpus = [asdict(gpu) for gpu in cuda.gpus]
    return {"driver": cuda.driver, "version": cuda.version, "gpus": gpus}


def decode_cuda(facts: Mapping[str, Any]) -> CudaFacts | None:
    """The part `cuda` of anybody's facts; None when there is none.

    Each GPU keeps its place, whatever it is described by.
    """
    found = facts.get("cuda")
    if not isinstance(found, Mapping):
        return None
    gpus = found.get("gpus")
    return CudaFacts(
        driver=text(found, "driver"),
        version=text(found, "version"),
        gpus=tuple(_decode_gpu(gpu) for gpu in gpus) if isinstance(gpus, list) else (),
    )


def _decode_gpu(found: object) -> Gpu:
    return Gpu(
        name=text(found, "name"),
        uuid=text(found, "uuid"),
        memory_bytes=count(found, "memory_bytes"),
        compute_capability=text(found, "compute_capability"),
    )


def decode_features(facts: Mapping[str, Any]) -> frozenset[str]:
    """The features of the CPU in anybody's facts."""
    cpu = facts.get("cpu")
    features = cpu.get("features") if isinstance(cpu, Mapping) else None
    if not isinstance(features, list):
        return frozenset()
    return frozenset(name for name in features if isinstance(name, str))


def text(facts: object, key: str) -> str:
    """A text in anybody's facts, or a part of them; "" when there is none."""
    found = facts.get(key) if isinstance(facts, Mapping) else None
    return found if isinstance(found, str) else ""


def count(facts: object, key: str) -> int:
    """A number of bytes in anybody's facts, or a part of them; 0 when there is none."""
    found = facts.get(key) if isinstance(facts, Mapping) else None
    # True is an int to Python. A number that no machine can have would only trip its readers.
    return found if type(found) is int and 0 < found < 1 << 63 else 0
