"""What a claim can be tried on at once, on any machine: codec, operator, scale gate, compiler, wheels.

Each function returns one plain value that the ledger compares; the slow and the large stand in the chapters.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qsa_kernels.report.evidence import NotMeasured, Plain

if TYPE_CHECKING:
    import torch

CHECKS: dict[str, Callable[[], Plain]] = {}
# Checks that run a kernel; the device says in what.
ON_DEVICE: set[str] = set()

EXACT_DECODERS = ("exp2", "bitcast", "packed")
TOPK = 2051
SPLITS = (1, 2, 4)
MATRIX = r"(?:wg)?mma\."


def _check(function: Callable[[], Plain]) -> Callable[[], Plain]:
    CHECKS[function.__name__] = function
    return function


def _on_device(function: Callable[[], Plain]) -> Callable[[], Plain]:
    ON_DEVICE.add(function.__name__)
    return _check(function)


def _device() -> str:
    from qsa_kernels.report import device

    return "cuda" if device.prepare() == "cuda" else "cpu"


def _codes() -> torch.Tensor:
    import torch

    return torch.arange(256, dtype=torch.uint8)


@cache
def _decoded(decoder: str) -> np.ndarray:
    """All 256 codes as the operator returns them: V of one selected token, weight one, scale one; FP16 [256]."""
    import torch

    from qsa_kernels import sparse_paged_attention

    where = _device()
    codes = _codes().view(1, 1, 1, 256).to(where)
    one = torch.zeros((1, 1), dtype=torch.int32, device=where)
    out = sparse_paged_attention(
        torch.ones((1, 1, 256), dtype=torch.float16, device=where),
        torch.zeros_like(codes),
        codes,
        one,
        one,
        one.view(1),
        kv_cache_dtype="fp8_e4m3",
        decoder=decoder,
        contraction="dot",
    )
    assert isinstance(out, torch.Tensor)
    return out.view(256).cpu().numpy()


@_on_device
def encodings_decoded_right() -> int:
    """Codes of 256 that the operator decodes to the value of the format, in the worst of the exact decoders."""
    from qsa_kernels import e4m3

    right = e4m3.decode(_codes()).numpy().astype(np.float16)
    return min(
        int(np.count_nonzero((out == right) | (np.isnan(out) & np.isnan(right))))
        for out in map(_decoded, EXACT_DECODERS)
    )


@_on_device
def encodings_between_decoders() -> int:
    """Codes whose value differs between the scalar decoder with exp2 and the bitcast one; zeros by their sign too."""
    first, second = (_decoded(decoder) for decoder in ("exp2", "bitcast"))
    same = (first.view(np.int16) == second.view(np.int16)) | (np.isnan(first) & np.isnan(second))
    return int(np.count_nonzero(~same))


@_check
def encodings_exact_in_fp16() -> int:
    """Finite codes whose value FP16 holds exactly."""
    from qsa_kernels import e4m3

    values = e4m3.decode(_codes()).numpy()
    return int(np.count_nonzero(values == values.astype(np.float16).astype(np.float32)))


@_check
def packed_words_exact() -> int:
    """Finite codes whose bits, moved into an FP16 word, are exactly their value times 2^-8."""
    from qsa_kernels import e4m3

    codes = np.arange(256, dtype=np.uint16)
    words = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).view(np.float16).astype(np.float32)
    return int(np.count_nonzero(words * 256 == e4m3.decode(_codes()).numpy()))


@_check
def quotients_formed_in_fp32() -> int:
    """Code of 0.33203125 over a scale of 0.0123; a quotient rounded to FP16 first would give the next one."""
    import torch

    from qsa_kernels import e4m3

    return int(e4m3.encode(torch.tensor([0.33203125]), 0.0123))


@_check
def largest_raw_product() -> float:
    """Raw product of a query of ones and the largest code at head dim 256."""
    from qsa_kernels.measure import error

    return float(error.overflow_raw_products()[0])


@_check
def multiplications_hoisted() -> int:
    """Multiplications by a scale a row and KV head that hoisting takes out of the loop, K and V."""
    from qsa_kernels.measure.capacity import QWEN4_EXP

    return 2 * TOPK * QWEN4_EXP.head_dim


def _split_inputs() -> dict[str, Any]:
    """One row over 96 tokens whose V codes are all one."""
    import torch

    where = _device()
    generator = torch.Generator().manual_seed(20260903)
    return {
        "q": torch.randn((1, 6, 64), generator=generator).half().to(where),
        "k_cache": torch.randint(0, 0x7F, (6, 16, 1, 64), dtype=torch.uint8, generator=generator).to(where),
        "v_cache": torch.full((6, 16, 1, 64), 0x38, dtype=torch.uint8, device=where),
        "logical_indices": torch.randperm(96, generator=generator).int().view(1, 96).to(where),
        "block_table": torch.arange(6, dtype=torch.int32, device=where).view(1, 6),
        "token_to_req": torch.zeros(1, dtype=torch.int32, device=where),
        "kv_cache_dtype": "fp8_e4m3",
        "k_scale": 0.0123,
        "decoder": "bitcast",
        "contraction": "dot",
        "return_lse": True,
    }


@_on_device
def value_scale_applied_once() -> float:
    """Largest distance from the V scale of an output over values of one, over all split counts."""
    from qsa_kernels import sparse_paged_attention

    inputs = _split_inputs()
    outputs = [sparse_paged_attention(**inputs, v_scale=0.375, num_splits=splits)[0] for splits in SPLITS]
    return max(float((out.float() - 0.375).abs().max()) for out in outputs)


@_on_device
def lse_contains_value_scale() -> float:
    """Largest change of the log-sum-exp when the V scale changes, over all split counts."""
    from qsa_kernels import sparse_paged_attention

    inputs = _split_inputs()
    changes = []
    for splits in SPLITS:
        first, second = (
            sparse_paged_attention(**inputs, v_scale=scale, num_splits=splits)[1] for scale in (0.0371, 0.5)
        )
        changes.append(float((first - second).abs().max()))
    return max(changes)


@_on_device
def unquantised_outputs_changed() -> int:
    """Output elements of the FP16 arm that change bits with the scale placement or the decoder that is asked for."""
    import torch

    from qsa_kernels import sparse_paged_attention

    inputs = {name: value for name, value in _split_inputs().items() if name not in ("k_scale", "decoder")}
    inputs |= {name: (inputs[name].float() / 448).half() for name in ("k_cache", "v_cache")}
    inputs |= {"kv_cache_dtype": "auto", "return_lse": False}
    outputs = []
    for placement in ("hoisted", "in_loop"):
        for decoder in ("exp2", "bitcast"):
            out = sparse_paged_attention(**inputs, scale_placement=placement, decoder=decoder)
            assert isinstance(out, torch.Tensor)
            outputs.append(out)
    first = outputs[0]
    return max(int((first.view(torch.int16) != out.view(torch.int16)).sum()) for out in outputs)


def _overlay(**changes: float | None) -> bytes:
    """A file of the 24 scales; a change replaces a value, or leaves the key out where it is None."""
    import json

    from qsa_kernels import scales

    values: dict[str, float] = {}
    for key in scales.QWEN4_EXP.names():
        value = changes.get(key, 0.0171)
        if value is not None:
            values[key] = value
    header: dict[str, Any] = {
        key: {"dtype": "F32", "shape": [], "data_offsets": [4 * place, 4 * place + 4]}
        for place, key in enumerate(values)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + struct.pack(f"<{len(values)}f", *values.values())


def _refusal(content: bytes) -> str:
    """Why the gate refuses a file; empty where it loads."""
    from qsa_kernels import scales

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / scales.OVERLAY_NAME
        path.write_bytes(content)
        try:
            scales.load_overlay(path, scales.QWEN4_EXP)
        except ValueError as error:
            return str(error)
    return ""


@_check
def damaged_overlays_accepted() -> int:
    """Overlays with a missing, zero, negative, infinite or NaN scale, cut short or of another kind, that load."""
    from qsa_kernels import scales

    if problem := _refusal(_overlay()):
        raise RuntimeError(f"the whole overlay is refused: {problem}")
    key = scales.QWEN4_EXP.key(7, "k")
    values = (None, 0.0, -0.0, -1.0, float("inf"), float("-inf"), float("nan"))
    damaged = [_overlay(**{key: value}) for value in values]
    damaged += [_overlay()[:-1], b"", b"version https://git-lfs.github.com/spec/v1\n"]
    damaged.append(_overlay().replace(b".k_scale", b".q_scale"))
    return sum(not _refusal(content) for content in damaged)


@_check
def incomplete_overlay_is_counted() -> str:
    """How many of the expected scales the gate says that it has when one is missing."""
    from qsa_kernels import scales

    found = re.search(r"\d+/\d+", _refusal(_overlay(**{scales.QWEN4_EXP.key(7, "k"): None})))
    return found[0] if found else "no count"


def _overlay_size(prefix: str) -> int:
    from qsa_kernels import scales
    from qsa_kernels.measure import calibration

    geometry = scales.Geometry(scales.QWEN4_EXP.layers, prefix)
    return len(calibration.overlay_bytes(dict.fromkeys(geometry.names(), 0.5)))


@_check
def overlay_bytes() -> int:
    """Size of an overlay with the published key names."""
    from qsa_kernels import scales

    return _overlay_size(scales.QWEN4_EXP.prefix)


@_check
def overlay_bytes_short_prefix() -> int:
    """Size of an overlay with the key names of the calibration report."""
    return _overlay_size("model.layers")


@_check
def overlay_keys() -> int:
    """Scales of the geometry: K and V of every attention layer."""
    from qsa_kernels import scales

    return len(scales.QWEN4_EXP.names())


@_check
def qsa_layer_ids() -> str:
    """Attention layers of the geometry, 0-based."""
    from qsa_kernels import scales

    layers = scales.QWEN4_EXP.layers
    steps = {later - earlier for earlier, later in pairwise(layers)}
    return f"{layers[0]} to {layers[-1]} in steps of {', '.join(map(str, sorted(steps)))}"


@_check
def scale_covers_maximum() -> int:
    """FP16 maxima of ten thousand whose scale, rounded to FP32, would let the maximum saturate."""
    from qsa_kernels import scales

    maxima = np.random.default_rng(20260903).uniform(2.0**-14, 60000, 10_000).astype(np.float16).astype(float)
    return sum(np.float64(scales.scale_for(maximum)) * 448 < maximum for maximum in maxima.tolist())


def _layout(kv_cache_dtype: str, **setup: Any) -> Any:
    from qsa_kernels.measure.capacity import Deployment

    return Deployment(**setup).layout(kv_cache_dtype)


@_check
def block_tokens() -> str:
    """Tokens of a block, FP16 and E4M3, at TP 4 without draft tokens."""
    return f"{_layout('auto').block_tokens} and {_layout('fp8_e4m3').block_tokens}"


@_check
def block_tokens_tp1_mtp2() -> str:
    """Tokens of a block, FP16 and E4M3, at TP 1 with two draft tokens."""
    setup = {"tp": 1, "mtp": 2, "prefix_caching": True}
    return f"{_layout('auto', **setup).block_tokens} and {_layout('fp8_e4m3', **setup).block_tokens}"


@_check
def blocks_per_request() -> str:
    """Blocks of the longest request, FP16 and E4M3, at TP 4 without draft tokens."""
    return f"{_layout('auto').blocks_per_request} and {_layout('fp8_e4m3').blocks_per_request}"


@_check
def gain_limit() -> float:
    """Gain that no length can exceed, at TP 4 without draft tokens."""
    from qsa_kernels.measure.capacity import Deployment

    return float(Deployment().asymptotic_gain)


@_check
def gain_at_native_length() -> float:
    """Gain of one request of the model's longest length, at TP 4 without draft tokens."""
    from qsa_kernels.measure.capacity import Deployment

    return float(Deployment(max_model_len=262_144).request_gain)


@_check
def break_even_tokens() -> int:
    """Length of a request from which on E4M3 never holds less than FP16, at TP 4 without draft tokens."""
    from qsa_kernels.measure.capacity import Deployment

    return Deployment().break_even_max_model_len()


@_check
def heads_of_a_rank() -> str:
    """Query and KV heads of one of four ranks."""
    from qsa_kernels.measure.capacity import QWEN4_EXP, Deployment

    return f"{QWEN4_EXP.q_heads // 4} and {Deployment(tp=4).kv_heads_per_rank}"


@_check
def workspace_freed_mib() -> float:
    """MiB a rank that one top-k buffer in place of one a layer frees."""
    from qsa_kernels.measure import capacity

    return capacity.topk_workspace_bytes()["freed"] / capacity.MIB


@cache
def _ptx(arch: str, arm: str) -> str:
    from qsa_kernels.measure import codegen

    [kernel] = codegen.compile_kernels(codegen.requests(arch, [arm]))
    if kernel.status != "passed":
        raise NotMeasured(f"{arm} for {arch}: {kernel.reason}")
    return kernel.ptx


def _instructions(pattern: str, arch: str, arm: str) -> int:
    return len(re.findall(rf"^\s*(?:@\S+\s+)?{pattern}", _ptx(arch, arm), re.MULTILINE))


@_check
def tensor_core_instructions_sm70() -> int:
    """Matrix instructions in the PTX of the attention kernel for a V100."""
    return _instructions(MATRIX, "sm_70", "hoisted/bitcast")


@_check
def tensor_core_instructions_sm90() -> int:
    """The same for compute capability 9.0, in the FP16 arm: the control."""
    return _instructions(MATRIX, "sm_90", "fp16")


@_check
def fused_multiply_adds_sm70() -> int:
    """FP32 fused multiply-adds in the PTX of the attention kernel for a V100."""
    return _instructions(r"fma\.rn\.f32\b", "sm_70", "hoisted/bitcast")


@_check
def eight_bit_floats_sm70() -> int:
    """FP8 types in the PTX of the attention kernel for a V100."""
    return len(re.findall(r"e4m3|e5m2", _ptx("sm_70", "hoisted/bitcast")))


@_check
def wide_tile_on_sm75() -> str:
    """What becomes of a launch of 64 columns at head dim 256 on compute capability 7.5."""
    from qsa_kernels.launch import LaunchConfig, choose

    try:
        choose(
            LaunchConfig(block_n=64, num_splits=1, num_warps=2, num_stages=1),
            capability=(7, 5),
            rows=2048,
            q_heads=12,
            kv_heads=1,
            head_dim=256,
            topk=2048,
            itemsize=2,
            quantised=False,
            contraction="dot",
        )
    except ValueError:
        return "refused"
    return "accepted"


@_check
def torch_builds_for_sm70() -> str:
    """Whether the installed torch carries code for compute capability 7.0."""
    import torch

    return "yes" if "sm_70" in (torch._C._cuda_getArchFlags() or "").split() else "no"


@_check
def triton_of_torch() -> str:
    """Triton version that the installed torch asks for."""
    wanted = [text for text in metadata.requires("torch") or [] if text.startswith("triton")]
    found = re.search(r"==\s*([\d.]+)", wanted[0]) if wanted else None
    return found[1] if found else "none"


@_check
def torch_release() -> str:
    """Release of the installed torch, without the build's suffix."""
    return metadata.version("torch").split("+")[0]
