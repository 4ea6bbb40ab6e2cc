"""What is read from a machine, and what is read back from facts that anybody may have written."""

import json
import mmap
import platform
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefloe.capture import facts
from icefloe.capture.facts import CudaFacts, Gpu

CPUINFO = Path("/proc/cpuinfo")

# Two processors of a server, the flags shortened; the second is said to lack some.
X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu vme msr pae sse sse2 ss ht syscall nx lm pni vmx smx ssse3 sse4_1 avx2 xsave xsaves
vmx flags\t: vnmi preemption_timer avx_of_the_host
bugs\t\t: spectre_v1 avx_bug
address sizes\t: 46 bits physical, 57 bits virtual
power management:

processor\t: 1
model name\t: another
flags\t\t: fpu sse2 sse ss lm pni ssse3 xsave amx_tile md_clear ibrs avx2
"""

ARM64 = """\
processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd evtstrm aes sve sve2
CPU implementer\t: 0x41
CPU part\t: 0xd4f

processor\t: 1
Features\t: fp asimd evtstrm aes sve
CPU implementer\t: 0x41
CPU part\t: 0xd0c
"""

WORDS = st.text(max_size=20)
GPUS = st.builds(Gpu, WORDS, WORDS, st.integers(0, (1 << 63) - 1), WORDS)
CUDAS = st.builds(CudaFacts, WORDS, WORDS, st.lists(GPUS, max_size=4).map(tuple))

H200 = Gpu("NVIDIA H200", "GPU-0", 150_754_820_096, "9.0")

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(1 << 2000) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=10,
)


def test_x86_features_are_those_of_programs_on_all_processors() -> None:
    assert facts.cpu_features(X86) == ["avx2", "fpu", "pni", "sse", "sse2", "ssse3", "xsave"]
    assert facts.cpu_model(X86) == "Intel(R) Xeon(R) Platinum 8480+"


def test_arm_features_are_all_that_are_listed() -> None:
    assert facts.cpu_features(ARM64) == ["aes", "asimd", "evtstrm", "fp", "sve"]
    assert facts.cpu_model(ARM64) == "implementer 0x41, part 0xd4f"


@pytest.mark.parametrize(
    "flag",
    "sse4a ssse3 avx avx512_vp2intersect avx_vnni amx_fp16 fma f16c bmi2 sha_ni abm 3dnowprefetch "
    "cx16 rdpid xsavec erms fsrm clwb movdir64b waitpkg ospke rtm user_shstk lam gfni".split(),
)
def test_a_flag_for_programs(flag: str) -> None:
    assert facts.cpu_features(f"flags\t: {flag}\n") == [flag]


@pytest.mark.parametrize(
    "flag",
    "ss vmx svm avic smep smap umip invpcid xsaves xsaveerptr pti ibrs ibpb stibp ssbd md_clear "
    "flush_l1d la57 hypervisor constant_tsc rep_good tsc_deadline_timer pconfig arch_lbr "
    "sev sme pcid x2apic fxsr_opt wbnoinvd split_lock_detect cqm".split(),
)
def test_a_flag_of_the_kernel(flag: str) -> None:
    assert facts.cpu_features(f"flags\t: {flag}\n") == []


@pytest.mark.parametrize("cpuinfo", ["", "flags", "flags\t:", "isa : rv64gc\n", "\0\n:\n: :\n"])
def test_a_cpu_that_says_nothing(cpuinfo: str) -> None:
    assert facts.cpu_features(cpuinfo) == [] and facts.cpu_model(cpuinfo) == ""


def test_this_machine() -> None:
    """Its own /proc/cpuinfo: of what is found, nothing is made up."""
    cpuinfo = CPUINFO.read_text()
    found = facts.cpu_features(cpuinfo)
    assert found == sorted(set(found)) and set(found) <= set(cpuinfo.split())
    always = {"x86_64": {"sse2", "cmov", "fxsr"}, "aarch64": {"fp", "asimd"}}
    assert set(found) >= always.get(platform.machine(), set())
    if platform.machine() == "x86_64":
        assert not {"lm", "nx", "syscall", "pae"} & set(found)


def test_machine_facts() -> None:
    """The schema, to the key."""
    found = facts.machine_facts((4, 2), CudaFacts("580.159.04", "13.0", (H200,)))
    cpuinfo = CPUINFO.read_text()
    assert found == {
        "arch": platform.machine(),
        "cpu": {"model": facts.cpu_model(cpuinfo), "features": facts.cpu_features(cpuinfo)},
        "kernel": platform.release(),
        "criu": "4.2",
        "page_bytes": mmap.PAGESIZE,
        "cuda": {
            "driver": "580.159.04",
            "version": "13.0",
            "gpus": [
                {
                    "name": "NVIDIA H200",
                    "uuid": "GPU-0",
                    "memory_bytes": 150_754_820_096,
                    "compute_capability": "9.0",
                }
            ],
        },
    }
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("cuda", [None, CudaFacts("580.159.04", "13.0", ())])
def test_a_machine_without_gpus(cuda: CudaFacts | None) -> None:
    assert "cuda" not in facts.machine_facts((4, 2), cuda)


def test_a_machine_that_shows_no_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_CPUINFO", Path("/nonexistent"))
    found = facts.machine_facts((4, 2), None)
    assert found["cpu"] == {"model": "", "features": []} and found["kernel"]


@given(CUDAS)
def test_cuda_facts_come_back(cuda: CudaFacts) -> None:
    """Also through JSON, as the manifest holds them."""
    encoded = json.loads(json.dumps(facts.encode_cuda(cuda)))
    assert facts.decode_cuda({"cuda": encoded}) == cuda


@given(JSON)
def test_hostile_cuda(found: Any) -> None:
    """Whatever stands there, there is a value of the right types, or none."""
    for document in (found, {"gpus": found}, {"gpus": [found, {"memory_bytes": found}]}):
        cuda = facts.decode_cuda({"cuda": document})
        assert (cuda is not None) is isinstance(document, dict)
        for gpu in cuda.gpus if cuda else ():
            texts = (gpu.name, gpu.uuid, gpu.compute_capability)
            assert all(type(text) is str for text in texts)
            assert type(gpu.memory_bytes) is int and 0 <= gpu.memory_bytes < 1 << 63


def test_a_damaged_gpu_keeps_its_place() -> None:
    damaged = {"name": 5, "uuid": "GPU-1", "memory_bytes": True}
    gpus = [None, damaged, {"memory_bytes": 1 << 63}]
    cuda = facts.decode_cuda({"cuda": {"driver": ["580"], "gpus": gpus}})
    nothing = Gpu("", "", 0, "")
    assert cuda == CudaFacts("", "", (nothing, Gpu("", "GPU-1", 0, ""), nothing))


@given(JSON)
def test_hostile_features(found: Any) -> None:
    for document in (found, {"features": found}, {"features": ["avx", found]}):
        features = facts.decode_features({"cpu": document})
        assert all(type(name) is str for name in features)
    assert "avx" in facts.decode_features({"cpu": {"features": ["avx", found]}})
