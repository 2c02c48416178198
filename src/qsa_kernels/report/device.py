"""Choose between a CUDA device and the Triton interpreter, before triton is imported."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from functools import cache
from pathlib import Path


@cache
def cuda_device_count() -> int:
    """Number of CUDA devices that the driver shows, asked without importing torch or triton."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return 0
    return number.value


def resolve(device: str, *, elsewhere: bool = False) -> str:
    """Turn "auto" into "cuda" or "interpreter".

    Args:
        device: "auto", "interpreter" or "cuda".
        elsewhere: another machine uses it, about whose device this one knows nothing.

    Raises:
        ValueError: an unknown word, "cuda" on a machine without a CUDA device, or "auto" for another machine.
    """
    if device not in ("auto", "interpreter", "cuda"):
        raise ValueError(f"device: expected auto, interpreter or cuda; got {device!r}")
    if elsewhere:
        if device == "auto":
            raise ValueError("device: for jobs on other machines the profile names interpreter or cuda; got auto")
        return device
    if device == "cuda" and cuda_device_count() == 0:
        raise ValueError("device: cuda was asked for, but the driver shows no CUDA device; use interpreter or auto")
    if device == "auto":
        return "cuda" if cuda_device_count() and os.environ.get("TRITON_INTERPRET") != "1" else "interpreter"
    return device


def prepare(device: str = "auto") -> str:
    """Set TRITON_INTERPRET for the device and return which one it is: "cuda" or "interpreter".

    Raises:
        RuntimeError: triton was imported earlier under the other setting, so its kernels can no longer be switched.
    """
    chosen = resolve(device)
    wanted = "1" if chosen == "interpreter" else "0"
    current = os.environ.get("TRITON_INTERPRET", "0")
    if "triton" in sys.modules and current != wanted:
        raise RuntimeError(
            f"TRITON_INTERPRET is {current} but device {chosen!r} needs {wanted}, and triton is already imported: "
            "set it before the first import of triton"
        )
    os.environ["TRITON_INTERPRET"] = wanted
    return chosen


_NETWORK = re.compile(r"nfs|lustre|gpfs|beegfs|cifs|smb|ceph|sshfs|afs|panfs|wekafs")


def is_network_folder(folder: Path, mounts: str | None = None) -> bool:
    """Whether a folder lies on a file system that other machines share.

    Args:
        folder: it or a parent of it exists.
        mounts: text in the form of /proc/mounts; default: that file.
    """
    if mounts is None:
        table = Path("/proc/mounts")
        mounts = table.read_text(encoding="utf-8") if table.is_file() else ""
    entries = [line.split()[1:3] for line in mounts.splitlines()]
    inside = [(point, kind) for point, kind in entries if folder.resolve().is_relative_to(point)]
    return bool(inside) and _NETWORK.search(max(inside, key=lambda entry: len(entry[0]))[1]) is not None


def cache_folder() -> Path:
    """Where this process keeps compiled kernels: writable, and never shared with other machines.

    Two processes that share a cache over a network read each other's half-written files.
    """
    from qsa_kernels.measure import environment

    folder = environment.writable_cache()
    return Path(tempfile.mkdtemp(prefix="qsa-triton-")) if is_network_folder(folder) else folder
