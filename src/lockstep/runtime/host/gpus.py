"""What the NVIDIA driver says of the GPUs of a node, through nvidia-ml-py; nothing where there is none."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class ToldFacts(BaseModel):
    """Something that is told from node to node."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DriverGpu(ToldFacts):
    """One GPU as its driver sees it; None where the driver does not say."""

    index: int
    name: str
    uuid: str
    pci: str
    numa: int | None
    memory: int
    memory_used: int
    ecc_errors: int | None
    rows_pending: bool | None
    """Whether bad memory waits for a reset to be taken out."""
    slowed_by: list[str]
    temperature: int | None
    processes: list[int]


def gpus_here(root: Path) -> tuple[list[DriverGpu], dict[str, str], dict[str, str], str]:
    """The GPUs, how they reach each other, the driver's version, and what the driver says where it cannot tell."""
    if not has_driver(root):
        return [], {}, {}, ""
    try:
        import pynvml
    except ImportError:
        return [], {}, {}, ""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], {}, {}, str(error)
    try:
        driver = {"driver": _words(pynvml.nvmlSystemGetDriverVersion())}
        handles, troubles = handles_of(pynvml)
        gpus = [_gpu(pynvml, index, handle, root) for index, handle in handles.items()]
        pairs = [(a, b) for b in handles for a in handles if a < b]
        links = {f"{a}-{b}": _link(pynvml, handles[a], handles[b]) for a, b in pairs}
        return gpus, links, driver, ", ".join(troubles)
    except pynvml.NVMLError as error:
        return [], {}, {}, str(error)
    finally:
        pynvml.nvmlShutdown()


def has_driver(root: Path) -> bool:
    """Whether NVIDIA's driver is loaded: to ask this costs nothing."""
    return (root / "dev/nvidiactl").exists()


def handles_of(nvml: Any) -> tuple[dict[int, Any], list[str]]:
    """What the driver knows its GPUs by, whichever of them a process may see; and which of them do not answer."""
    handles, troubles = {}, []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:  # it fell off the bus, say
            troubles.append(f"GPU {index}: {error}")
    return handles, troubles


def ask(nvml: Any, handle: Any, name: str, *arguments: object) -> Any:
    """What the driver says of a GPU; None where it does not say."""
    try:
        return getattr(nvml, name)(handle, *arguments)
    except (AttributeError, nvml.NVMLError):
        return None


def identity_of(nvml: Any, handle: Any) -> tuple[str, str, str]:
    """The name of a GPU, its UUID and its place on the PCI bus."""
    pci = ask(nvml, handle, "nvmlDeviceGetPciInfo_v3") or ask(nvml, handle, "nvmlDeviceGetPciInfo")
    bus = _words(getattr(pci, "busId", "")).lower()
    bus = bus[-12:] if len(bus) > 12 else bus  # the driver writes a domain of eight digits, the kernel one of four
    return _words(ask(nvml, handle, "nvmlDeviceGetName")), _words(ask(nvml, handle, "nvmlDeviceGetUUID")), bus


def _words(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


SLOWED = {
    "nvmlClocksEventReasonSwThermalSlowdown": "heat (software)",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat (hardware)",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "the power supply",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "heat (software)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "heat (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "the power supply",
}
"""Names in nvidia-ml-py, of now and of before its renaming."""


def _gpu(nvml: Any, index: int, handle: Any, root: Path) -> DriverGpu:
    said = partial(ask, nvml, handle)
    memory, (name, uuid, bus) = said("nvmlDeviceGetMemoryInfo"), identity_of(nvml, handle)
    reasons = said("nvmlDeviceGetCurrentClocksEventReasons") or said("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    assert isinstance(reasons, int)
    slowed = {text for reason, text in SLOWED.items() if (bit := getattr(nvml, reason, 0)) and reasons & bit}
    errors = said(
        "nvmlDeviceGetTotalEccErrors",
        getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1),
        getattr(nvml, "NVML_VOLATILE_ECC", 0),
    )
    rows = said("nvmlDeviceGetRemappedRows")
    temperature = said("nvmlDeviceGetTemperature", 0)
    running = said("nvmlDeviceGetComputeRunningProcesses")
    return DriverGpu(
        index=index,
        name=name,
        uuid=uuid,
        pci=bus,
        numa=numa_of(root / "sys/bus/pci/devices" / bus),
        memory=getattr(memory, "total", 0),
        memory_used=getattr(memory, "used", 0),
        ecc_errors=errors if isinstance(errors, int) else None,
        rows_pending=bool(rows[2]) if isinstance(rows, list | tuple) and len(rows) > 2 else None,
        slowed_by=sorted(slowed),
        temperature=temperature if isinstance(temperature, int) else None,
        processes=[process.pid for process in running] if isinstance(running, list) else [],
    )


def _link(nvml: Any, a: Any, b: Any) -> str:
    """NVLink where there is one, else what lies between two GPUs on the way over PCIe."""
    try:
        if nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0:
            return "NVLink"
    except (AttributeError, nvml.NVMLError):
        pass
    ways = {0: "one board", 10: "a PCIe switch", 20: "PCIe switches", 30: "a PCIe bridge", 40: "one NUMA node"}
    try:
        return ways.get(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b), "NUMA nodes")
    except (AttributeError, nvml.NVMLError):
        return "unknown"


def numa_of(device: Path) -> int | None:
    """The part of the machine that a device is plugged into."""
    try:
        number = int((device / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None
