"""What a measurement ran on: device, driver, clocks and versions; the same keys with and without a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
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
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except Exception:
        return None
    driver = _attempt(pynvml.nvmlSystemGetDriverVersion)
    ecc = _attempt(lambda: pynvml.nvmlDeviceGetEccMode(handle)[0])
    return {
        "driver": driver.decode() if isinstance(driver, bytes) else driver,
        "sm_clock_max_mhz": _attempt(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        "sm_clock_set_mhz": _attempt(
            lambda: pynvml.nvmlDeviceGetApplicationsClock(handle, pynvml.NVML_CLOCK_GRAPHICS)
        ),
        "sm_clock_seen_mhz": _attempt(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        "memory_clock_seen_mhz": _attempt(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        "power_limit_w": _attempt(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "temperature_c": _attempt(
            lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        ),
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
            facts[name] = _attempt(lambda cell=cell: float(cell))
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
        found[package] = _attempt(lambda package=package: importlib.metadata.version(package))
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


def require_device(
    *,
    dtype: torch.dtype = torch.float16,
    decoder: str | None = None,
    capability: tuple[int, int] | None = None,
    architectures: Sequence[str] | None = None,
) -> tuple[int, int]:
    """The compute capability of a device that can run what is asked for.

    Args:
        dtype: dtype of the queries.
        decoder: E4M3 decoder, None where nothing is decoded.
        capability: of the device; default: of the present one.
        architectures: what this torch build carries code for; default: `torch.cuda.get_arch_list()`.

    Raises:
        ValueError: in one line, why this device cannot.
    """
    if capability is None:
        if not torch.cuda.is_available():
            raise ValueError("device: expected a CUDA device; this machine shows none to torch")
        capability = torch.cuda.get_device_capability()
    if architectures is None:
        architectures = torch.cuda.get_arch_list()
    if capability < (7, 0):
        raise ValueError(f"device: expected compute capability 7.0 or newer; got {capability[0]}.{capability[1]}")
    # Machine code runs on the same major version from its own minor version up; PTX runs on anything newer.
    native = {_arch(name) for name in architectures if name.startswith("sm_")}
    portable = {_arch(name) for name in architectures if name.startswith("compute_")}
    runs = any(arch[0] == capability[0] and arch <= capability for arch in native) or any(
        arch <= capability for arch in portable
    )
    if not runs:
        raise ValueError(
            f"torch {torch.__version__}: no code for a device of compute capability {capability[0]}.{capability[1]}; "
            f"this build carries {' '.join(architectures) or 'none'}"
        )
    if dtype == torch.bfloat16 and capability < (8, 0):
        raise ValueError(
            f"q: expected float16 on compute capability {capability[0]}.{capability[1]}; "
            "got bfloat16, which this hardware does not have"
        )
    if decoder == "native" and capability < (8, 9):
        raise ValueError(
            f"decoder: 'native' needs compute capability 8.9 or newer; this device has {capability[0]}.{capability[1]}"
        )
    return capability


def _arch(name: str) -> tuple[int, int]:
    digits = "".join(character for character in name.split("_")[1] if character.isdigit())
    return int(digits[:-1]), int(digits[-1])


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
