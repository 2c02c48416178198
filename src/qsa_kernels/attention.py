"""The public operator: validate, choose the launch, call the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from qsa_kernels import e4m3, launch
from qsa_kernels.arms import Arm
from qsa_kernels.hardware import (
    NATIVE_CAPABILITY,
    OVERLAP_CAPABILITY,
    TENSOR_CORE_CAPABILITY,
    Capability,
    check_device,
    check_product,
    device_capability,
)
from qsa_kernels.kernels.attention import attend_with_dot, attend_with_vector
from qsa_kernels.kernels.merge import merge_splits
from qsa_kernels.launch import LaunchConfig

KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
SCALE_PLACEMENTS = ("hoisted", "in_loop")
DECODERS = ("auto", "exp2", "bitcast", "packed", "native")
CONTRACTIONS = ("auto", "dot", "vector")

# A merge program reads this many splits of this many elements at once.
_MERGE_SPLITS = 64
_MERGE_ELEMENTS = 64
# The packed decoders move 2^8 into the hoisted factors, which must stay finite in FP32.
_LARGEST_SCALE = torch.finfo(torch.float32).max / 256

_AXES = {
    "q": "[rows, q_heads, head_dim]",
    "k_cache": "[pages, page_size, kv_heads, head_dim]",
    "v_cache": "[pages, page_size, kv_heads, head_dim]",
    "logical_indices": "[rows, topk]",
    "block_table": "[requests, pages_per_request]",
    "token_to_req": "[rows]",
}


@dataclass(frozen=True)
class KernelSpec:
    """What the compiler needs to make the attention kernel of one call.

    Args:
        function (triton.JITFunction): the kernel.
        signature (dict[str, str]): Triton type of every argument, "constexpr" for constants.
        constants (dict[str, Any]): value of every constant.
        attributes (dict): divisibility of pointers and strides by 16, as a launch on aligned tensors has it.
        num_warps (int): warps a program.
        num_stages (int): software pipelining depth.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class KernelCall:
    """One kernel launch, ready to be made.

    Args:
        function (triton.JITFunction): the kernel.
        grid (tuple[int, int, int]): programs along each axis.
        arguments (dict[str, Any]): tensors, numbers and None, by argument name.
        constants (dict[str, Any]): value of every compile-time constant.
        num_warps (int): warps a program.
        num_stages (int): software pipelining depth.
        overlapped (bool): launch before the kernel ahead of it in the stream has ended (programmatic dependent launch);
            the kernel itself waits for what it reads.
    """

    function: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    overlapped: bool = False

    def run(self) -> None:
        """Launch through Triton on the current device, or interpret."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.overlapped:
            options["launch_pdl"] = True
        self.function[self.grid](**self.arguments, **self.constants, **options)


@dataclass(frozen=True)
class PreparedCall:
    """A validated call of the operator with its buffers: run `kernels` in order, then read `out` and `lse`."""

    kernels: tuple[KernelCall, ...]
    out: torch.Tensor
    lse: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    """Everything about a call that does not depend on the tensors."""

    contraction: str
    constants: dict[str, Any]
    config: LaunchConfig
    programs_per_row: int

    @property
    def function(self) -> Any:
        return attend_with_vector if self.contraction == "vector" else attend_with_dot


def sparse_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    *,
    kv_cache_dtype: str = "auto",
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    scale_placement: str = "hoisted",
    decoder: str = "auto",
    contraction: str = "auto",
    num_splits: int | None = None,
    launch_profile: str | LaunchConfig | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row over the tokens that it lists in a paged cache.

    Every entry of `logical_indices` counts as often as it is listed. -1 and tokens, pages and requests out of range
    carry no weight and are never dereferenced. A row without a valid token gives zeros and an LSE of -inf. A selected
    NaN code stays visible: in K over the query heads of its KV head, in V at its output element. Scores, softmax state,
    partials and LSE are FP32; the operator does not synchronise with the host and its launch depends on shapes alone,
    so it can be captured in a CUDA graph.

    Args:
        q (torch.Tensor): [rows, q_heads, head_dim] float16 or bfloat16; query head h reads KV head h // (q_heads /
            kv_heads). head_dim is a power of two from 16 to 256, q_heads / kv_heads from 1 to 16.
        k_cache (torch.Tensor): [pages, page_size, kv_heads, head_dim]; q.dtype for "auto", uint8 codes or float8_e4m3fn
            for "fp8_e4m3". Any strides with contiguous elements of a head.
        v_cache (torch.Tensor): as `k_cache`, with strides of its own.
        logical_indices (torch.Tensor): [rows, topk] int32, token positions in the request; -1 = no token.
        block_table (torch.Tensor): [requests, pages_per_request] int32, physical pages.
        token_to_req (torch.Tensor): [rows] int32, the request of each row.
        kv_cache_dtype (str): "auto" (an unquantised cache) or "fp8_e4m3".
        k_scale (float | torch.Tensor): finite, > 0, rounded to FP32; a number or a host tensor of shape [] or [1],
            since reading a device tensor would synchronise.
        v_scale (float | torch.Tensor): as `k_scale`.
        scale_placement (str): "hoisted" out of the tile loop, or "in_loop" before the cast to the operand type, the
            pre-hoist baseline.
        decoder (str): "exp2", "bitcast", "packed" (hoisted only), "native" (hoisted only, compute capability >= 8.9) or
            "auto", the fastest exact one for the device.
        contraction (str): "dot" (tl.dot), "vector" (products and sums in registers, for GPUs whose dot is FMA;
            unquantised or packed) or "auto".
        num_splits (int | None): parts into which the tiles of a row are dealt, 1 to 256; None = by the launch profile.
        launch_profile (str | LaunchConfig | None): a name in `launch.PROFILES`, a launch of one's own, or None = by
            capability.
        out (torch.Tensor | None): [rows, q_heads, head_dim] in q.dtype, contiguous elements of a head; written and
            returned.
        return_lse (bool): also return the log-sum-exp.

    Returns:
        torch.Tensor: [rows, q_heads, head_dim] in q.dtype; with `return_lse` also [rows, q_heads] float32, in log2
            units:
        log2(sum_t 2^(score_t * log2(e))). It never contains `v_scale`.

    Raises:
        TypeError: an argument has a type or dtype that the contract does not allow; the message names both.
        ValueError: an argument has another device, rank, shape or range than the contract allows, an option does not
            exist or not in this combination, or the device cannot run it.

    Source:
        1CatAI/1Cat-vLLM#447 (the operator), #452 (bitcast decoder), #453 (hoisted scales).
    """
    call = prepare(
        q,
        k_cache,
        v_cache,
        logical_indices,
        block_table,
        token_to_req,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        scale_placement=scale_placement,
        decoder=decoder,
        contraction=contraction,
        num_splits=num_splits,
        launch_profile=launch_profile,
        out=out,
        return_lse=return_lse,
    )
    for kernel in call.kernels:
        kernel.run()
    return call.out if call.lse is None else (call.out, call.lse)


def prepare(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    *,
    kv_cache_dtype: str = "auto",
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    scale_placement: str = "hoisted",
    decoder: str = "auto",
    contraction: str = "auto",
    num_splits: int | None = None,
    launch_profile: str | LaunchConfig | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    capability: Capability | None = None,
) -> PreparedCall:
    """`sparse_paged_attention` up to its launches, for callers that launch by other means.

    Args:
        capability (tuple[int, int] | None): plan for this compute capability in place of the device's.
        q, k_cache, v_cache, logical_indices, block_table, token_to_req, kv_cache_dtype, k_scale, v_scale,
        scale_placement,
            decoder, contraction, num_splits, launch_profile, out, return_lse: as for `sparse_paged_attention`.
    """
    k_factor, v_factor = _validate(
        q, k_cache, v_cache, logical_indices, block_table, token_to_req, kv_cache_dtype, k_scale, v_scale, out
    )
    rows, q_heads, head_dim = q.shape
    topk = logical_indices.shape[1]
    capability = capability or device_capability(q.device)
    plan = _plan(
        capability=capability,
        rows=rows,
        q_heads=q_heads,
        kv_heads=k_cache.shape[2],
        head_dim=head_dim,
        topk=topk,
        page_size=k_cache.shape[1],
        dtype=q.dtype,
        kv_cache_dtype=kv_cache_dtype,
        scale_placement=scale_placement,
        decoder=decoder,
        contraction=contraction,
        num_splits=num_splits,
        launch_profile=launch_profile,
        paired_codes=_can_be_paired(k_cache) and _can_be_paired(v_cache),
    )
    check_product(capability, q.dtype, plan.contraction)
    result = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(rows, q_heads, dtype=torch.float32, device=q.device) if return_lse else None
    if not (rows and topk and block_table.numel() and k_cache.numel()):
        result.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return PreparedCall((), result, lse)
    kernels = _kernel_calls(
        plan, q, k_cache, v_cache, logical_indices, block_table, token_to_req, k_factor, v_factor, result, lse
    )
    return PreparedCall(kernels, result, lse)


def resolve_options(
    capability: Capability | None, *, kv_cache_dtype: str, scale_placement: str, decoder: str, contraction: str
) -> tuple[str, str]:
    """The decoder ("none" for an unquantised cache) and the contraction that "auto" stands for.

    The vector contraction and the packed decoder below 8.0, the dot and the packed decoder from 8.0 and in the
    interpreter, the dot and the hardware conversion from 8.9.

    Raises:
        ValueError: an option that does not exist, or a combination that has no kernel or no hardware here.
    """
    for name, value, allowed in (
        ("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES),
        ("scale_placement", scale_placement, SCALE_PLACEMENTS),
        ("decoder", decoder, DECODERS),
        ("contraction", contraction, CONTRACTIONS),
    ):
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")

    has_fast_dot = capability is None or capability >= TENSOR_CORE_CAPABILITY
    if kv_cache_dtype == "auto":
        return "none", ("dot" if has_fast_dot else "vector") if contraction == "auto" else contraction

    hoisted = scale_placement == "hoisted"
    if decoder == "auto":
        has_conversion = capability is not None and capability >= NATIVE_CAPABILITY and contraction != "vector"
        fastest_hoisted = "native" if has_conversion else "packed"
        decoder = fastest_hoisted if hoisted else "bitcast"
    if contraction == "auto":
        contraction = "dot" if has_fast_dot or decoder != "packed" else "vector"
    if decoder in ("packed", "native") and not hoisted:
        raise ValueError(f"decoder: {decoder!r} needs scale_placement='hoisted', got {scale_placement!r}")
    if contraction == "vector" and decoder != "packed":
        raise ValueError(f"contraction: 'vector' exists for an unquantised cache and decoder='packed', got {decoder!r}")
    if decoder == "native" and (capability is None or capability < NATIVE_CAPABILITY):
        here = "the interpreter" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        raise ValueError(f"decoder: 'native' needs compute capability 8.9 or higher, this is {here}")
    return decoder, contraction


def kernel_spec(
    arm: Arm,
    config: LaunchConfig,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    topk: int,
    page_size: int,
    capability: Capability,
    dtype: torch.dtype = torch.float16,
    rows: int = 128,
) -> KernelSpec:
    """The attention kernel of an arm as the compiler sees it in a launch on contiguous, aligned tensors.

    No device is needed: what an architecture would execute can be compiled and counted anywhere.

    Args:
        arm (Arm): which kernel.
        config (LaunchConfig): its launch.
        q_heads (int): query heads.
        kv_heads (int): KV heads.
        head_dim (int): elements of a head.
        topk (int): entries a row.
        page_size (int): tokens a page.
        capability (tuple[int, int]): compute capability that the launch is for.
        dtype (torch.dtype): of q.
        rows (int): query rows.
    """
    plan = _plan(
        capability=capability,
        rows=rows,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        topk=topk,
        page_size=page_size,
        dtype=dtype,
        kv_cache_dtype=arm.kv_cache_dtype,
        scale_placement=arm.scale_placement or "hoisted",
        decoder=arm.decoder or "auto",
        contraction=arm.contraction,
        num_splits=None,
        launch_profile=config,
    )
    activation = {torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    cache = ("*i16" if config.transposed else "*u8") if arm.is_quantised else activation
    pointers = {
        "q_ptr": activation,
        "k_cache_ptr": cache,
        "v_cache_ptr": cache,
        "indices_ptr": "*i32",
        "block_table_ptr": "*i32",
        "token_to_req_ptr": "*i32",
        "out_ptr": activation,
        "partial_out_ptr": "*fp32",
        "partial_lse_ptr": "*fp32",
    }
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    constants = {**plan.constants, "lse_ptr": None}
    for position, name in enumerate(plan.function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = pointers[name]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif name.endswith("_scale"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name.endswith("_stride") and name not in ("indices_row_stride", "block_table_stride"):
                attributes[(position,)] = [["tt.divisibility", 16]]
    return KernelSpec(plan.function, signature, constants, attributes, plan.config.num_warps, plan.config.num_stages)


def _plan(
    *,
    capability: Capability | None,
    rows: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    topk: int,
    page_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str,
    scale_placement: str,
    decoder: str,
    contraction: str,
    num_splits: int | None,
    launch_profile: str | LaunchConfig | None,
    paired_codes: bool = True,
) -> _Plan:
    decoder, contraction = resolve_options(
        capability,
        kv_cache_dtype=kv_cache_dtype,
        scale_placement=scale_placement,
        decoder=decoder,
        contraction=contraction,
    )
    quantised = decoder != "none"
    config = launch.choose(
        launch_profile,
        capability=capability,
        rows=rows,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        topk=topk,
        itemsize=dtype.itemsize,
        quantised=quantised,
        contraction=contraction,
        num_splits=num_splits,
    )
    if config.transposed and quantised and not paired_codes:
        if isinstance(launch_profile, LaunchConfig):
            raise ValueError(
                "launch_profile.transposed: expected caches whose strides and place in memory are multiples of two "
                "bytes, so that codes can be read in pairs"
            )
        config = replace(config, transposed=False)
    group = q_heads // kv_heads
    constants: dict[str, Any] = {
        "TOPK": topk,
        "PAGE_SIZE": page_size,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_N": config.block_n,
        "SPLIT": config.num_splits > 1,
        "DECODER": decoder,
        "HOISTED": scale_placement == "hoisted",
        "ASSEMBLY": capability is not None,
        "OVERLAPPED": config.num_splits > 1 and capability is not None and capability >= OVERLAP_CAPABILITY,
    }
    if contraction == "vector":
        heads = launch.heads_per_program(group, quantised=quantised)
        spread = launch.tokens_spread(config, head_dim, 1 if quantised else dtype.itemsize)
        constants |= {"BLOCK_M": heads, "SPREAD": spread}
        return _Plan(contraction, constants, config, kv_heads * -(-group // heads))
    constants |= {
        "BLOCK_M": launch.padded_group(group, transposed=config.transposed),
        "TRANSPOSED": config.transposed,
        "CODES_PER_WORD": 2 if config.transposed and quantised else 1,
    }
    return _Plan(contraction, constants, config, kv_heads)


def _can_be_paired(cache: torch.Tensor) -> bool:
    """Whether two neighbouring codes can be read as one aligned word."""
    return all(number % 2 == 0 for number in (cache.data_ptr(), cache.storage_offset(), *cache.stride()[:-1]))


def _kernel_calls(
    plan: _Plan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> tuple[KernelCall, ...]:
    rows, q_heads, head_dim = q.shape
    splits = plan.config.num_splits
    if splits > 1:
        partial_out = torch.empty(splits, rows, q_heads, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(splits, rows, q_heads, dtype=torch.float32, device=q.device)
    else:
        partial_out = partial_lse = torch.empty(0, dtype=torch.float32, device=q.device)
    if plan.constants["DECODER"] != "none":
        word = torch.int16 if plan.config.transposed else torch.uint8
        k_cache, v_cache = k_cache.view(word), v_cache.view(word)
    attend = KernelCall(
        plan.function,
        (rows, plan.programs_per_row, splits),
        {
            "q_ptr": q,
            "k_cache_ptr": k_cache,
            "v_cache_ptr": v_cache,
            "indices_ptr": logical_indices,
            "block_table_ptr": block_table,
            "token_to_req_ptr": token_to_req,
            "out_ptr": out,
            "lse_ptr": lse,
            "partial_out_ptr": partial_out,
            "partial_lse_ptr": partial_lse,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "num_rows": rows,
            "num_splits": splits,
            "num_q_heads": q_heads,
            "num_requests": block_table.shape[0],
            "pages_per_request": block_table.shape[1],
            "num_pages": k_cache.shape[0],
            "q_row_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "k_page_stride": k_cache.stride(0),
            "k_slot_stride": k_cache.stride(1),
            "k_head_stride": k_cache.stride(2),
            "v_page_stride": v_cache.stride(0),
            "v_slot_stride": v_cache.stride(1),
            "v_head_stride": v_cache.stride(2),
            "indices_row_stride": logical_indices.stride(0),
            "block_table_stride": block_table.stride(0),
            "out_row_stride": out.stride(0),
            "out_head_stride": out.stride(1),
        },
        plan.constants,
        plan.config.num_warps,
        plan.config.num_stages,
    )
    if splits == 1:
        return (attend,)
    overlapped = plan.constants["OVERLAPPED"]
    merge = KernelCall(
        merge_splits,
        (rows, q_heads, -(-head_dim // _MERGE_ELEMENTS)),
        {
            "partial_out_ptr": partial_out,
            "partial_lse_ptr": partial_lse,
            "out_ptr": out,
            "lse_ptr": lse,
            "v_scale": v_scale,
            "num_splits": splits,
            "num_rows": rows,
            "num_q_heads": q_heads,
            "out_row_stride": out.stride(0),
            "out_head_stride": out.stride(1),
        },
        {
            "HEAD_DIM": head_dim,
            "BLOCK_D": min(head_dim, _MERGE_ELEMENTS),
            "STEP": min(_MERGE_SPLITS, 1 << (splits - 1).bit_length()),
            "DECODER": plan.constants["DECODER"],
            "HOISTED": plan.constants["HOISTED"],
            "OVERLAPPED": overlapped,
        },
        num_warps=4,
        num_stages=1,
        overlapped=overlapped,
    )
    return (attend, merge)


def _validate(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    out: torch.Tensor | None,
) -> tuple[float, float]:
    """Check type, dtype, device, rank, shape and range, in that order; return the two scales as FP32 numbers."""
    tensors = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "logical_indices": logical_indices,
        "block_table": block_table,
        "token_to_req": token_to_req,
    }
    axes = dict(_AXES)
    if out is not None:
        tensors["out"], axes["out"] = out, _AXES["q"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor {axes[name]}, got {type(tensor).__name__}")

    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"q: expected torch.float16 or torch.bfloat16, got {q.dtype}")
    for name in ("k_cache", "v_cache"):
        if kv_cache_dtype == "fp8_e4m3":
            e4m3.code_bytes(tensors[name], name)
        elif kv_cache_dtype == "auto" and tensors[name].dtype != q.dtype:
            raise TypeError(
                f"{name}: expected the dtype of q ({q.dtype}) for kv_cache_dtype='auto', got {tensors[name].dtype}"
            )
    for name in ("logical_indices", "block_table", "token_to_req"):
        if tensors[name].dtype != torch.int32:
            raise TypeError(f"{name}: expected torch.int32, got {tensors[name].dtype}")
    if out is not None and out.dtype != q.dtype:
        raise TypeError(f"out: expected the dtype of q ({q.dtype}), got {out.dtype}")

    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected the device of q ({q.device}), got {tensor.device}")
    check_device(device_capability(q.device), q.dtype)
    for name, tensor in tensors.items():
        if tensor.dim() != axes[name].count(",") + 1:
            raise ValueError(f"{name}: expected {axes[name]}, got shape {list(tensor.shape)}")

    rows, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    for name, expected in (
        ("k_cache", [*k_cache.shape[:3], head_dim]),
        ("v_cache", list(k_cache.shape)),
        ("logical_indices", [rows, logical_indices.shape[1]]),
        ("token_to_req", [rows]),
        ("out", list(q.shape)),
    ):
        if name in tensors and list(tensors[name].shape) != expected:
            raise ValueError(
                f"{name}: expected {axes[name]} = {expected} to agree with q {list(q.shape)} and k_cache "
                f"{list(k_cache.shape)}, got {list(tensors[name].shape)}"
            )
    if head_dim not in launch.HEAD_DIMS:
        raise ValueError(f"q: expected head_dim to be one of {list(launch.HEAD_DIMS)}, got {head_dim}")
    if kv_heads == 0 or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= launch.MAX_GROUP:
        raise ValueError(
            f"q: expected q_heads to be 1 to {launch.MAX_GROUP} times kv_heads, "
            f"got {q_heads} query and {kv_heads} KV heads"
        )
    if k_cache.shape[1] == 0:
        raise ValueError(f"k_cache: expected a page_size of at least 1, got shape {list(k_cache.shape)}")
    for name in ("q", "k_cache", "v_cache", "out", "logical_indices", "block_table"):
        if name in tensors and tensors[name].numel() and tensors[name].stride(-1) != 1:
            raise ValueError(
                f"{name}: expected contiguous elements along the last axis, got strides {tensors[name].stride()}"
            )
    if token_to_req.numel() > 1 and token_to_req.stride(0) != 1:
        raise ValueError(f"token_to_req: expected contiguous elements, got strides {token_to_req.stride()}")
    if out is not None and out.numel() and out.data_ptr() == q.data_ptr():
        raise ValueError("out: expected memory of its own, got that of q")
    return _scale("k_scale", k_scale, kv_cache_dtype), _scale("v_scale", v_scale, kv_cache_dtype)


def _scale(name: str, scale: float | torch.Tensor, kv_cache_dtype: str) -> float:
    if isinstance(scale, torch.Tensor) and scale.device.type != "cpu":
        raise TypeError(
            f"{name}: expected a number or a host tensor, got one on {scale.device}; reading it would synchronise"
        )
    if isinstance(scale, bool) or not isinstance(scale, int | float | torch.Tensor):
        raise TypeError(f"{name}: expected a number or a tensor of shape [] or [1], got {type(scale).__name__}")
    value = e4m3.scale_value(scale, name)
    if value > _LARGEST_SCALE:
        raise ValueError(f"{name}: expected at most {_LARGEST_SCALE:.3g}, got {value}")
    if kv_cache_dtype == "auto" and value != 1.0:
        raise ValueError(f"{name}: an unquantised cache has no scale, expected 1.0, got {value}")
    return value
