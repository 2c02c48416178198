"""What a measurement ran on: device, driver, clocks and versions; the same keys with and without a GPU."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NOT_AVAILABLE = "not available"

# Names of `nvidia-smi --query-gpu`, for machines that have the tool and no NVML binding.
_SMI_FIELDS = {
    "driver": "driver_version",
    "sm_clock_max_mhz": "clocks.max.sm",
    "sm_clock_set_mhz": "clocks.applications.graphics",
    "sm_clock_seen_mhz": "clocks.sm",
    "memory_clock_seen_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "ecc": "ecc.mode.current",
}
_VERSIONED = ("triton", "numpy", "pandas", "scipy", "flashinfer-python")


def _attempt(read: Callable[[], Any]) -> Any:
    """The value, or "not available" where driver, library or device cannot tell."""
    try:
        value = read()
    except Exception:  # NVML raises its own class for each thing that a device or a virtual machine hides
        return NOT_AVAILABLE
    return NOT_AVAILABLE if value is None else value


def _nvml_facts(index: int) -> dict[str, Any] | None:
    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except Exception:
        return None
    driver = _attempt(pynvml.nvmlSystemGetDriverVersion)
    ecc = _attempt(lambda: pynvml.nvmlDeviceGetEccMode(handle)[0])
    return {
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "sm_clock_max_mhz": _attempt(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        "sm_clock_set_mhz": _attempt(lambda: pynvml.nvmlDeviceGetApplicationsClock(handle, pynvml.NVML_CLOCK_GRAPHICS)),
        "sm_clock_seen_mhz": _attempt(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        "memory_clock_seen_mhz": _attempt(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        "power_limit_w": _attempt(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "temperature_c": _attempt(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        "ecc": ecc if ecc == NOT_AVAILABLE else ("on" if ecc else "off"),
        "facts_from": "NVML",
    }


def _smi_facts(index: int) -> dict[str, Any] | None:
    try:
        answer = subprocess.run(
            [
                "nvidia-smi",
                f"--id={index}",
                f"--query-gpu={','.join(_SMI_FIELDS.values())}",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    cells = [cell.strip() for cell in answer.stdout.strip().split(",")]
    if len(cells) != len(_SMI_FIELDS):
        return None
    facts: dict[str, Any] = {}
    for name, cell in zip(_SMI_FIELDS, cells, strict=True):
        missing = not cell or cell.startswith("[") or cell in ("N/A", "Unknown Error")
        facts[name] = NOT_AVAILABLE if missing else cell
        if not missing and name not in ("driver", "ecc"):
            facts[name] = _attempt(functools.partial(float, cell))
    if facts["ecc"] != NOT_AVAILABLE:
        facts["ecc"] = {"Enabled": "on", "Disabled": "off"}.get(facts["ecc"], NOT_AVAILABLE)
    return {**facts, "facts_from": "nvidia-smi"}


def device_facts(index: int = 0) -> dict[str, Any]:
    """Facts about CUDA device `index`; every key is there on every machine, "not available" where unknown."""
    facts: dict[str, Any] = dict.fromkeys(
        ("name", "compute_capability", "sms", "l2_bytes", "memory_bytes", *_SMI_FIELDS, "facts_from"), NOT_AVAILABLE
    )
    if not torch.cuda.is_available():
        return {**facts, "name": "no CUDA device"}
    properties = torch.cuda.get_device_properties(index)
    facts |= {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", NOT_AVAILABLE),
        "memory_bytes": properties.total_memory,
    }
    return facts | (_nvml_facts(index) or _smi_facts(index) or {})


def _ptxas_version() -> str:
    from triton import knobs

    return str(knobs.nvidia.ptxas.version)


def versions() -> dict[str, str]:
    """Versions of what decides about machine code and numbers."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or NOT_AVAILABLE,
        "ptxas": _attempt(_ptxas_version),
    }
    for package in _VERSIONED:
        found[package] = _attempt(functools.partial(importlib.metadata.version, package))
    return found


def describe(index: int = 0) -> dict[str, Any]:
    """Device and versions, as manifests store them: `{"device": {...}, "versions": {...}, "host": {...}}`."""
    return {
        "device": device_facts(index),
        "versions": versions(),
        "host": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cpus": os.cpu_count() or NOT_AVAILABLE,
        },
    }


def is_interpreted() -> bool:
    """Whether `TRITON_INTERPRET` asks for the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def writable_cache(wanted: str | os.PathLike[str] | None = None) -> Path:
    """A folder for compiled kernels that this process can write to.

    Args:
        wanted: preferred folder; default: `TRITON_CACHE_DIR`, else `~/.triton/cache`.

    Returns:
        the preferred folder, or a new private temporary one where that cannot be written.
    """
    chosen = wanted or os.environ.get("TRITON_CACHE_DIR")
    folder = Path(chosen) if chosen else Path(os.environ.get("HOME") or tempfile.gettempdir()) / ".triton" / "cache"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="qsa-triton-"))
