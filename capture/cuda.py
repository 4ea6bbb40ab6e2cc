"""CUDA's own way to suspend a process from outside: lock, checkpoint; restore, unlock.

Locking lets the work on the GPU finish and keeps new work out. Checkpointing moves the GPU's
memory into the process's own and lets go of the devices, so that CRIU finds a plain process.
The driver API (CUDA driver API, "CUDA Checkpointing") has it since driver 570.
"""

import ctypes
import importlib
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from icefloe.capture import processes
from icefloe.capture.facts import CudaFacts, Gpu
from icefloe.errors import CudaFailed

# What a process that uses a GPU has open.
DEVICES = "/dev/nvidia"

# The driver API of driver 570, the first with the calls.
_OLDEST_API = 12080

_DRIVER_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")
_DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))


class CudaState(IntEnum):
    """Of a process, as the driver names it (CUprocessState)."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


Moves = Sequence[tuple[str, str]]


class Cuda(Protocol):
    """What is needed of the driver; pids are those of this machine. All but `facts` and `state`
    raise CudaFailed."""

    def facts(self) -> CudaFacts:
        """The GPUs, in the driver's order."""

    def state(self, pid: int) -> CudaState | None:
        """None for a process without CUDA, or none at all."""

    def lock(self, pid: int, seconds: float) -> None:
        """Waits for the GPU's work to finish, at most so long, and keeps new work out."""

    def checkpoint(self, pid: int) -> None:
        """Moves the GPU's memory into the process."""

    def restore(self, pid: int, moves: Moves = ()) -> None:
        """Moves it back. The process must run. `moves`: for every GPU the old UUID and the new,
        when they are others."""

    def unlock(self, pid: int) -> None:
        """Lets work in again."""


class Nvidia:
    """The driver on this machine."""

    def __init__(self) -> None:
        """Raises CudaFailed where there is none, or an old one."""
        try:
            self._api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise CudaFailed(
                f"cuda-bindings can't be used ({error})", "install icefloe with its extra `cuda`"
            ) from None
        try:
            self._call("cuInit", 0)
            version = int(self._call("cuDriverGetVersion"))
        except _Refused as error:
            raise CudaFailed(
                f"the CUDA driver can't be used ({error})", "see whether nvidia-smi works here"
            ) from None
        if version < _OLDEST_API:
            raise CudaFailed(
                f"the CUDA driver here speaks version {_dotted(version)} only",
                "suspending processes takes driver 570 (CUDA 12.8) or newer",
            )
        self._version = version

    def facts(self) -> CudaFacts:
        """See Cuda."""
        gpus = []
        try:
            for number in range(self._call("cuDeviceGetCount")):
                gpus.append(self._gpu(self._call("cuDeviceGet", number)))
        except _Refused as error:
            raise CudaFailed(f"the GPUs can't be listed ({error})", "see nvidia-smi") from None
        return CudaFacts(_driver_version(), _dotted(self._version), tuple(gpus))

    def _gpu(self, device: Any) -> Gpu:
        kind = self._api.CUdevice_attribute
        major, minor = (
            self._call("cuDeviceGetAttribute", attribute, device)
            for attribute in (
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        digits = bytes(self._call("cuDeviceGetUuid", device).bytes).hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        name = self._call("cuDeviceGetName", 256, device)
        return Gpu(
            name=bytes(name).split(b"\0")[0].decode(errors="replace"),
            uuid="GPU-" + "-".join(parts),
            memory_bytes=int(self._call("cuDeviceTotalMem", device)),
            compute_capability=f"{major}.{minor}",
        )

    def state(self, pid: int) -> CudaState | None:
        """See Cuda."""
        try:
            return CudaState(int(self._call("cuCheckpointProcessGetState", pid)))
        except (_Refused, ValueError):
            return None

    def lock(self, pid: int, seconds: float) -> None:
        """See Cuda."""
        arguments = self._api.CUcheckpointLockArgs()
        arguments.timeoutMs = int(seconds * 1000)
        self._ask("cuCheckpointProcessLock", "lock", pid, arguments)

    def checkpoint(self, pid: int) -> None:
        """See Cuda."""
        arguments = self._api.CUcheckpointCheckpointArgs()
        self._ask("cuCheckpointProcessCheckpoint", "checkpoint", pid, arguments)

    def restore(self, pid: int, moves: Moves = ()) -> None:
        """See Cuda."""
        arguments = self._api.CUcheckpointRestoreArgs()
        if moves:
            arguments.gpuPairs = [self._pair(old, new) for old, new in moves]
            arguments.gpuPairsCount = len(moves)
        self._ask("cuCheckpointProcessRestore", "restore", pid, arguments)

    def _pair(self, old: str, new: str) -> Any:
        pair = self._api.CUcheckpointGpuPair()
        for field, uuid in (("oldUuid", old), ("newUuid", new)):
            number = self._api.CUuuid()
            digits = bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
            ctypes.memmove(number.getPtr(), digits, len(digits))  # `bytes` can only be read
            setattr(pair, field, number)
        return pair

    def unlock(self, pid: int) -> None:
        """See Cuda."""
        arguments = self._api.CUcheckpointUnlockArgs()
        self._ask("cuCheckpointProcessUnlock", "unlock", pid, arguments)

    def _ask(self, function: str, action: str, pid: int, arguments: Any) -> None:
        try:
            self._call(function, pid, arguments)
        except _Refused as error:
            raise _explained(action, pid, error.name) from None

    def _call(self, function: str, *arguments: Any) -> Any:
        """The result of a function of the driver API. Raises _Refused."""
        try:
            error, *results = getattr(self._api, function)(*arguments)
        except (AttributeError, RuntimeError) as missing:  # no driver, or it lacks this
            raise _Refused(str(missing).split(". ")[0]) from None
        if int(error):
            raise _Refused(getattr(error, "name", str(error)))
        return results[0] if results else None


class _Refused(Exception):
    """An answer of the driver that is not success."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _explained(action: str, pid: int, name: str) -> CudaFailed:
    """What an answer of the driver means for a process."""
    if not os.path.exists(f"/proc/{pid}"):
        return CudaFailed(f"process {pid} ended before CUDA could {action} it", "see why it did")
    what = f"CUDA can't {action} process {pid} ({name})"
    if "NOT_READY" in name or "TIMEOUT" in name:
        return CudaFailed(what, "its work on the GPU took too long to finish; try again later")
    if "NOT_SUPPORTED" in name:
        reasons = "; ".join(_known_limits(pid)) or "managed (UVM) memory, IPC handles, MPS, MIG"
        return CudaFailed(what, f"the driver can't suspend what it uses: {reasons}")
    if "OUT_OF_MEMORY" in name:
        return CudaFailed(what, "its GPU memory has to fit into the memory of the machine")
    return CudaFailed(what, "see the driver's notes on checkpoints, and dmesg")


def _known_limits(pid: int) -> list[str]:
    """What can be seen of the things that the driver doesn't suspend."""
    found = []
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes()
        if b"CUDA_MPS_" in variables:
            found.append("it uses MPS")
        if re.search(rb"(^|\0)(CUDA|NVIDIA)_VISIBLE_DEVICES=[^\0]*MIG-", variables):
            found.append("it runs on a MIG instance")
    return found


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver_version() -> str:
    for file in _DRIVER_FILES:
        with suppress(OSError):
            found = _DRIVER_VERSION.search(file.read_text())
            if found:
                return found[0]
    return ""


def users(tree: "list[processes.Process]") -> list[int]:
    """The processes of a tree that have a GPU open."""
    return [process.pid for process in tree if processes.opens(process.pid, DEVICES)]


OpenCuda = Callable[[], Cuda]
