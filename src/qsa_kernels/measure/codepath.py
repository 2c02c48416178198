"""The code that a V100 would execute, run on the GPU at hand.

Triton compiles a kernel for compute capability 7.0 to PTX; Triton's own assembler turns that PTX into machine code for
the present device. What runs is the sm_70 code path (FMA in place of tensor cores, no asynchronous copies, no hardware
conversion of FP8) on another GPU: evidence about mechanisms and about relative cost, never the speed of a V100.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qsa_kernels.attention import KernelCall, prepare
from qsa_kernels.launch import Capability

V100_CAPABILITY: Capability = (7, 0)

_STATIC_SHARED_BYTES = 48 * 1024
_POINTER_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_C_TYPES = {"fp32": ctypes.c_float, "i32": ctypes.c_int32, "i64": ctypes.c_int64}


@dataclass(frozen=True)
class _Loaded:
    function: Any
    parameter_names: tuple[str, ...]
    parameter_types: tuple[str, ...]
    threads: int
    shared_bytes: int


@dataclass
class Launcher:
    """Runs the operator's kernels as compiled for another compute capability.

    An instance has the call signature of `sparse_paged_attention` and keeps what it has compiled and loaded. Two
    instances share nothing, so that a second one is a separately compiled copy of the first.

    Args:
        capability (tuple[int, int]): whose code path; at most that of the device.

    Raises:
        RuntimeError: no CUDA device, or the assembler or the driver refused (with its message).
        ValueError: `capability` is newer than the device.
    """

    capability: Capability = V100_CAPABILITY
    _loaded: dict[Any, _Loaded] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "the code path of another compute capability can be run on a CUDA device only; none is here"
            )
        device = torch.cuda.get_device_capability()
        if self.capability > device:
            raise ValueError(f"capability: expected at most the device's {device}, got {self.capability}")

    @property
    def label(self) -> str:
        """The name under which results of this launcher may be shown."""
        return f"sm_{self.capability[0]}{self.capability[1]} code path on {torch.cuda.get_device_name()}"

    def __call__(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As `sparse_paged_attention`."""
        call = prepare(*tensors, **options, capability=self.capability)
        for kernel in call.kernels:
            self.launch(kernel)
        return call.out if call.lse is None else (call.out, call.lse)

    def launch(self, call: KernelCall) -> None:
        """Launch one kernel on the current stream."""
        from cuda.bindings import driver

        loaded = self._load(call)
        arguments = [call.arguments[name] for name in loaded.parameter_names]
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        kinds = [_C_TYPES.get(kind, ctypes.c_void_p) for kind in loaded.parameter_types]
        # Triton appends two scratch pointers that these kernels do not use
        values += [0, 0]
        kinds += [ctypes.c_void_p, ctypes.c_void_p]
        stream = torch.cuda.current_stream().cuda_stream
        _check(
            driver.cuLaunchKernel(
                loaded.function,
                *call.grid,
                loaded.threads,
                1,
                1,
                loaded.shared_bytes,
                stream,
                (tuple(values), tuple(kinds)),
                0,
            )
        )

    def _load(self, call: KernelCall) -> _Loaded:
        signature, constants, attributes = specialise(call)
        key = (
            call.function.fn.__name__,
            tuple(signature.items()),
            tuple(constants.items()),
            tuple(attributes),
            call.num_warps,
            call.num_stages,
        )
        if key not in self._loaded:
            self._loaded[key] = self._compile(call, signature, constants, attributes)
        return self._loaded[key]

    def _compile(
        self, call: KernelCall, signature: dict[str, str], constants: dict[str, Any], attributes: dict[Any, Any]
    ) -> _Loaded:
        from cuda.bindings import driver

        major, minor = self.capability
        compiled = triton.compile(
            ASTSource(call.function, signature, constants, attributes),
            target=GPUTarget("cuda", major * 10 + minor, 32),
            options={"num_warps": call.num_warps, "num_stages": call.num_stages},
        )
        torch.cuda.current_stream()  # a context for the driver to load into
        device = torch.cuda.get_device_capability()
        code = compiled.asm["cubin"] if device == self.capability else assemble(compiled.asm["ptx"], device)
        module = _check(driver.cuModuleLoadData(code))
        function = _check(driver.cuModuleGetFunction(module, compiled.metadata.name.encode()))
        shared = compiled.metadata.shared
        if shared > _STATIC_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, shared))
        names = tuple(name for name, kind in signature.items() if kind != "constexpr")
        return _Loaded(function, names, tuple(signature[name] for name in names), 32 * call.num_warps, shared)


def specialise(call: KernelCall) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """Signature, constants and divisibility attributes of a call, as `triton.compiler.ASTSource` takes them."""
    signature: dict[str, str] = {}
    constants = dict(call.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    general = {parameter.name for parameter in call.function.params if parameter.do_not_specialize}
    for position, name in enumerate(call.function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = call.arguments[name]
        if value is None:
            signature[name], constants[name] = "constexpr", None
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTER_TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and name not in general:
                attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def assemble(ptx: str, capability: Capability) -> bytes:
    """Machine code for a compute capability from PTX for the same or an older one, by Triton's ptxas.

    The result is kept in Triton's cache folder, so that fresh processes find it as they find compiled kernels.

    Raises:
        RuntimeError: the assembler failed; the message is its own.
    """
    arch = f"sm_{capability[0]}{capability[1]}"
    # line information names files of the machine that compiled
    text = re.sub(r"^\s*\.(file|loc)\b.*$", "", ptx, flags=re.MULTILINE)
    digest = hashlib.sha256(f"{knobs.nvidia.ptxas.version} {arch}\n{text}".encode()).hexdigest()
    kept = Path(knobs.cache.dir, f"assembled-{digest}.cubin")
    if kept.is_file():
        return kept.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(text)
        done = subprocess.run(
            [knobs.nvidia.ptxas.path, f"-arch={arch}", str(source), "-o", str(target)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"ptxas -arch={arch} failed: {done.stderr.strip()}")
        code = target.read_bytes()
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_bytes(code)
    partial.replace(kept)
    return code


def _check(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call, or its error by name."""
    status, *values = answer
    if int(status):
        raise RuntimeError(f"the CUDA driver refused: {status.name}")
    return values[0] if values else None
