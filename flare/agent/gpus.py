"""The node's devices, read through NVML; where there is no NVML, the host itself as one `cpu` device.

NVML is loaded when `Devices.open` is called, never at import, and creates no CUDA context. Nothing here
raises into the agent: a device or a driver that fails is described in `problem`, and a device that does not
answer is reported with no free memory, so that nothing is placed on it until it answers again.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from flare.values import dataclass

CPU_REVISION = "cpu"
CPU_PREFIX = "CPU-"

REOPEN_SECONDS = 30.0
"""How long a failed NVML is left alone: opening it can take a second, and a reset driver needs a while."""

_NVIDIA = 0x10DE
# First and last PCI device id of a chip. GB300 boards are told by their compute capability.
_REVISION_OF_PCI_IDS = (
    (0x2B80, 0x2BFF, "gb202"),
    (0x2E00, 0x2E7F, "gb10"),
)
# Chips of one compute capability run the same code, so a board missing above still gets its revision.
_REVISION_OF_CAPABILITY = {(12, 1): "gb10", (12, 0): "gb202", (10, 3): "gb300"}

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Reading:
    """One device at one moment.

    Args:
        index: NVML index; 0 for the CPU device.
        uuid: What a grant names it by.
        name: Product name.
        revision: `gb10`, `gb202`, `gb300`, `cpu`, or `sm_<major><minor>` where no core can fit.
        memory_total: Bytes.
        memory_free: Bytes; 0 while the device does not answer.
        host_memory: Whether the two are the host's memory (integrated GPUs, the CPU device).
        utilization: Percent of the sample period, None where unsupported; likewise the next three.
        memory_utilization: Percent of the sample period with memory reads or writes.
        temperature: Degrees Celsius.
        clock: SM clock in MHz.
        problem: Why the device does not answer, a sentence; None when it does.
    """

    index: int
    uuid: str
    name: str
    revision: str
    memory_total: int
    memory_free: int
    host_memory: bool = False
    utilization: int | None = None
    memory_utilization: int | None = None
    temperature: int | None = None
    clock: int | None = None
    problem: str | None = None


def visible_devices(uuids: Sequence[str]) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES that exposes exactly `uuids`, or None to leave it unset.

    It stays unset for the CPU device, and for a member that names no GPUs and so takes the whole node.
    """
    names = [uuid for uuid in uuids if not uuid.startswith(CPU_PREFIX)]
    return ",".join(names) or None


@dataclass(slots=True)
class _Known:
    """A GPU that answered once: what does not change, and its NVML handle while there is one."""

    index: int
    handle: Any
    uuid: str
    name: str
    revision: str
    memory_total: int = 0
    host_memory: bool = False


class Devices:
    """Every device of this node. NVML is opened by the first reading, or by `open`.

    States, in `kind`: `cpu`, without NVML or while a broken NVML has not shown any GPU; `nvml`, once it has.
    `cpu` may become `nvml` when a broken NVML recovers; `nvml` stays, so that a GPU in use keeps its name.
    """

    def __init__(self, node_fingerprint: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._cpu_uuid = f"{CPU_PREFIX}{node_fingerprint[:16]}"
        self._monotonic = monotonic
        self._nvml: Any = None
        self._known: dict[str, _Known] = {}  # by UUID: a reset driver may count its GPUs anew
        self._problem: str | None = None
        self._open_again_at: float | None = -math.inf

    @classmethod
    def open(cls, node_fingerprint: str, monotonic: Callable[[], float] = time.monotonic) -> Devices:
        """Look for NVML and its GPUs.

        Args:
            node_fingerprint: Hex fingerprint of the node key; names the CPU device.
            monotonic: The clock, in seconds, that spaces attempts to open a failed NVML again.
        """
        devices = cls(node_fingerprint, monotonic)
        devices._open()
        return devices

    @property
    def kind(self) -> Literal["nvml", "cpu"]:
        """Whether `read` describes GPUs or the host."""
        return "nvml" if self._known else "cpu"

    @property
    def problem(self) -> str | None:
        """What is wrong with NVML as a whole or with GPUs that never answered; None when all is well.

        A host without NVML has no problem.
        """
        return self._problem

    def read(self) -> list[Reading]:
        """Read every device now, by index. Blocks for milliseconds, or as long as the driver takes."""
        if self._open_again_at is not None and self._monotonic() >= self._open_again_at:
            self._open()
        if not self._known:
            total, free = _host_memory()
            return [Reading(0, self._cpu_uuid, _cpu_name(), CPU_REVISION, total, free, host_memory=True)]
        readings = [
            self._read_one(known) for known in sorted(self._known.values(), key=lambda one: one.index)
        ]
        if self._open_again_at is None and any(reading.problem for reading in readings):
            self._open_again_at = self._monotonic() + REOPEN_SECONDS
        return readings

    def close(self) -> None:
        """Let NVML go."""
        if self._nvml is not None:
            self._ask(self._nvml.nvmlShutdown)
            self._nvml = None

    # --- opening

    def _open(self) -> None:
        """Initialise NVML and look at every GPU; keep what is already known of those that do not answer."""
        self._problem = None
        self._open_again_at = None
        self.close()
        for known in self._known.values():
            known.handle = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInitWithFlags(0)
            self._nvml = pynvml
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            if getattr(error, "value", None) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and not self._known:
                return
            self._fail(f"NVML does not work: {error}; check `nvidia-smi`, then restart the agent")
            return
        for index in range(count):
            self._meet(index)
        answering = {known.index for known in self._known.values() if known.handle is not None}
        for known in list(self._known.values()):
            if known.handle is None and known.index in answering:
                del self._known[known.uuid]  # gone for good: the driver gave its index to another GPU

    def _meet(self, index: int) -> None:
        """Learn one GPU's identity."""
        nvml = self._nvml
        handle, why = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
        uuid, why_uuid = self._ask(nvml.nvmlDeviceGetUUID, handle) if handle is not None else (None, None)
        if not uuid:
            self._fail(
                f"GPU {index} does not answer: {why or why_uuid or 'it has no UUID'}; it is not offered"
            )
            return
        name, _ = self._ask(nvml.nvmlDeviceGetName, handle)
        self._known[uuid] = _Known(index, handle, uuid, name or "NVIDIA GPU", self._revision(handle))

    def _revision(self, handle: Any) -> str:
        """The hardware revision, from the PCI device id or else from the compute capability."""
        pci, _ = self._ask(self._nvml.nvmlDeviceGetPciInfo, handle)
        if pci is not None and pci.pciDeviceId & 0xFFFF == _NVIDIA:
            device = pci.pciDeviceId >> 16
            for first, last, revision in _REVISION_OF_PCI_IDS:
                if first <= device <= last:
                    return revision
        capability, _ = self._ask(self._nvml.nvmlDeviceGetCudaComputeCapability, handle)
        if capability is None:
            return "unknown"
        major, minor = capability
        return _REVISION_OF_CAPABILITY.get((major, minor), f"sm_{major}{minor}")

    def _fail(self, problem: str) -> None:
        """Say what is wrong, beside what else is, and look again later."""
        self._problem = problem if self._problem is None else f"{self._problem}; {problem}"
        self._open_again_at = self._monotonic() + REOPEN_SECONDS

    # --- reading

    def _read_one(self, known: _Known) -> Reading:
        problem = self._problem or "NVML has not named it again"
        if known.handle is not None:
            memory, problem = self._memory(known)
            if memory is not None:
                return self._with_metrics(known, *memory)
        return Reading(
            known.index,
            known.uuid,
            known.name,
            known.revision,
            known.memory_total,
            0,
            known.host_memory,
            problem=f"GPU {known.index} does not answer: {problem}; nothing is placed on it until it does",
        )

    def _memory(self, known: _Known) -> tuple[tuple[int, int] | None, str]:
        """Bytes total and free, the host's where the GPU has none of its own; or why they are not known."""
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(known.handle)
            total, free = int(memory.total), int(memory.free)
            known.host_memory = False
        except nvml.NVMLError as error:
            if getattr(error, "value", None) != nvml.NVML_ERROR_NOT_SUPPORTED:
                return None, str(error)
            total, free = _host_memory()
            known.host_memory = True
        known.memory_total = total
        return (total, free), ""

    def _with_metrics(self, known: _Known, total: int, free: int) -> Reading:
        nvml, handle = self._nvml, known.handle
        rates, _ = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        temperature, _ = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        clock, _ = self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        return Reading(
            known.index,
            known.uuid,
            known.name,
            known.revision,
            total,
            free,
            known.host_memory,
            utilization=None if rates is None else int(rates.gpu),
            memory_utilization=None if rates is None else int(rates.memory),
            temperature=temperature,
            clock=clock,
        )

    def _ask(self, function: Callable[..., _Value], *arguments: Any) -> tuple[_Value | None, str | None]:
        """Call NVML; (answer, None), or (None, why there is none)."""
        try:
            return function(*arguments), None
        except self._nvml.NVMLError as error:
            return None, str(error)
        except UnicodeDecodeError:  # the binding decodes names
            return None, "its answer is not UTF-8"


def _host_memory() -> tuple[int, int]:
    """The host's MemTotal and MemAvailable in bytes."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _cpu_name() -> str:
    """What kind of processor this host has."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name" and value.strip():
                    return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
