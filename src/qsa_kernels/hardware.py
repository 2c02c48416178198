"""What a device can run: compute capability, the interpreter, and one-line refusals."""

from __future__ import annotations

import torch
import triton

from qsa_kernels.kernels.store import store_tokens

Capability = tuple[int, int]

TENSOR_CORE_CAPABILITY: Capability = (8, 0)  # below, Triton 3.3 and newer turn tl.dot into FMA (triton#5066)
ASYNC_COPY_CAPABILITY: Capability = (8, 0)
NATIVE_CAPABILITY: Capability = (8, 9)  # first with a hardware conversion of E4M3
OVERLAP_CAPABILITY: Capability = (9, 0)  # first with programmatic dependent launch


def device_capability(device: torch.device) -> Capability | None:
    """Compute capability of a CUDA device; None for a CPU, where kernels run in Triton's interpreter.

    Raises:
        ValueError: a CPU while Triton compiles (TRITON_INTERPRET was not set to 1 before Triton was imported), or
            another kind of device.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    if device.type != "cpu":
        raise ValueError(f"q: expected a tensor on a CUDA device or on the CPU (interpreter), got {device}")
    if not interpreting():
        raise ValueError(
            "q: tensors on the CPU need Triton's interpreter; set TRITON_INTERPRET=1 before triton is first imported"
        )
    return None


def interpreting() -> bool:
    """Whether the kernels were built for Triton's interpreter, which is decided when they are imported."""
    return not isinstance(store_tokens, triton.JITFunction)


def check_device(capability: Capability | None, dtype: torch.dtype) -> None:
    """Refuse what a device cannot run, in one line.

    Raises:
        ValueError: BF16 below compute capability 8.0, or a torch build without machine code for the device.
    """
    if capability is None:
        return
    name = f"{capability[0]}.{capability[1]}"
    if dtype == torch.bfloat16 and capability < TENSOR_CORE_CAPABILITY:
        raise ValueError(f"q: bfloat16 needs compute capability 8.0 or higher, this device has {name}; use float16")
    built_for = torch.cuda.get_arch_list()
    if built_for and not any(_runs_on(arch, capability) for arch in built_for):
        raise ValueError(
            f"q: this torch build has no code for compute capability {name} (it has {', '.join(built_for)}); "
            "install a build that names the device's architecture"
        )


def check_product(capability: Capability | None, dtype: torch.dtype, contraction: str) -> None:
    """Refuse the product that Triton's interpreter gets wrong.

    Raises:
        ValueError: BF16 through `tl.dot` in the interpreter.

    Source:
        triton-lang/triton#11584: the bit patterns are multiplied as integers.
    """
    if capability is None and dtype == torch.bfloat16 and contraction == "dot":
        raise ValueError(
            "q: Triton's interpreter multiplies bfloat16 wrongly in tl.dot; use float16, contraction='vector' or a GPU"
        )


def _runs_on(arch: str, capability: Capability) -> bool:
    """Whether machine code (same major, not newer) or PTX (not newer) of a build runs on a device."""
    kind, _, digits = arch.partition("_")
    digits = digits.rstrip("af")
    built = (int(digits[:-1]), int(digits[-1]))
    if kind == "compute":
        return built <= capability
    return built[0] == capability[0] and built <= capability
