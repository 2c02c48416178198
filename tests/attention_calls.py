"""Calls of the operator for its tests: every arm, on every code path that the machine at hand can run.

Compiled kernels are few because calls share one shape: entries that a test does not need are -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from qsa_kernels import e4m3
from qsa_kernels.arms import ARMS, Arm
from qsa_kernels.attention import PreparedCall, prepare, sparse_paged_attention
from qsa_kernels.hardware import NATIVE_CAPABILITY
from qsa_kernels.launch import SMALLEST_TRANSPOSED, LaunchConfig
from qsa_kernels.measure import codepath, precision, workloads
from qsa_kernels.measure.workloads import AttentionInputs
from qsa_kernels.reference import reference_attention

TOPK, PAGE_SIZE, HEADS, HEAD_DIM = 33, 16, 2, 64
PUBLIC_HEADS, PUBLIC_HEAD_DIM = 6, 256  # of one rank of the public model
TILE = 16

# Of the error of an independent implementation with the same casts. The order of the sums differs, so single elements
# scatter more than the norm.
RMS_MULTIPLE, MAX_MULTIPLE = 2.0, 3.0


@dataclass(frozen=True)
class Route:
    """One arm on one code path.

    Args:
        arm (Arm): what to compute.
        path (str): "here" as the operator launches on this machine, "transposed" the same with both products
            transposed, or "sm_70" as compiled for a V100.
    """

    arm: Arm
    path: str = "here"

    def attend(
        self, inputs: AttentionInputs, *, splits: int = 1, tile: int = TILE, warps: int | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of a call whose output and partial buffers hold NaN before."""
        # eight warps spread a tile over so many threads that the vector contraction takes it in one or two steps
        warps = warps or (8 if self.arm.contraction == "vector" else 4)
        arguments = inputs.arguments() | self.arm.options() | options
        transposed = self.path == "transposed" and inputs.q.shape[-1] >= SMALLEST_TRANSPOSED
        arguments.setdefault("launch_profile", LaunchConfig(tile, splits, warps, transposed=transposed))
        arguments.setdefault("return_lse", True)
        launcher = _launcher() if self.path == "sm_70" else None
        call = prepare(**arguments, capability=launcher.capability if launcher else None)
        poison(call)
        for kernel in call.kernels:
            if launcher:
                launcher.launch(kernel)
            else:
                kernel.run()
        return call.out, call.out.new_empty(0) if call.lse is None else call.lse

    @property
    def operator(self) -> Callable[..., Any]:
        """A callable with the signature of `sparse_paged_attention`."""
        return _launcher() if self.path == "sm_70" else sparse_paged_attention

    def cache(self, codes: torch.Tensor) -> torch.Tensor:
        """A cache with the values of some codes, in the type that the arm reads."""
        return codes if self.arm.is_quantised else e4m3.decode(codes).half()

    def scales(self, k_scale: float, v_scale: float) -> dict[str, Any]:
        """Scale arguments, which an unquantised cache does not take."""
        if not self.arm.is_quantised:
            return {"kv_cache_dtype": "auto"}
        return {"kv_cache_dtype": "fp8_e4m3", "k_scale": k_scale, "v_scale": v_scale}

    def of(self, pair: workloads.QuantisedPair, device: str) -> AttentionInputs:
        """The half of a pair that the arm reads."""
        return (pair.quantised if self.arm.is_quantised else pair.unquantised).to(device)


def routes(
    *,
    quantised_only: bool = False,
    names: Iterable[str] = tuple(ARMS),
    paths: Sequence[str] = ("here", "transposed", "sm_70"),
) -> list[Any]:
    """Parameters for pytest, one a runnable combination; what needs a GPU carries its mark."""
    return [
        pytest.param(
            Route(ARMS[name], path),
            id=name.replace("/", "_") + ("" if path == "here" else f"@{path}"),
            marks=[pytest.mark.gpu] if path == "sm_70" or ARMS[name].decoder == "native" else [],
        )
        for name in names
        for path in paths
        if (ARMS[name].is_quantised or not quantised_only) and _has_path(ARMS[name], path)
    ]


def _has_path(arm: Arm, path: str) -> bool:
    """Whether an arm exists on a path, and is not the same there as another one in all that a test can see."""
    if path == "transposed":
        return arm.contraction == "dot" and arm.decoder != "exp2"
    return path == "here" or arm.decoder != "native"


@cache
def _launcher() -> codepath.Launcher:
    pytest.importorskip("cuda.bindings", reason="the sm_70 code path is launched through cuda.bindings")
    return codepath.Launcher()


def skip_without_conversion(route: Route) -> None:
    """Skip the native decoder on a device that cannot convert E4M3."""
    if route.arm.decoder == "native" and torch.cuda.get_device_capability() < NATIVE_CAPABILITY:
        pytest.skip("needs compute capability 8.9 or higher")


def poison(call: PreparedCall) -> None:
    """Fill everything that a call has to write with NaN, so that an element left out is seen."""
    for buffer in (call.out, call.lse, *(k.arguments["partial_out_ptr"] for k in call.kernels)):
        if buffer is not None:
            buffer.fill_(math.nan)
    for kernel in call.kernels:
        kernel.arguments["partial_lse_ptr"].fill_(math.nan)


def listing(rows: Sequence[Sequence[int]], topk: int = TOPK) -> torch.Tensor:
    """[rows, topk] int32 indices; -1 after what is listed."""
    indices = torch.full((len(rows), topk), -1, dtype=torch.int32)
    for row, tokens in enumerate(rows):
        indices[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return indices


def codes(value: int, *, pages: int = 4, kv_heads: int = 1, head_dim: int = HEAD_DIM) -> torch.Tensor:
    """[pages, page_size, kv_heads, head_dim] uint8, all one code."""
    return torch.full((pages, PAGE_SIZE, kv_heads, head_dim), value, dtype=torch.uint8)


def make(
    route: Route,
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    rows: Sequence[Sequence[int]] | torch.Tensor,
    device: str,
    *,
    table: Sequence[Sequence[int]] = ((1, 2, 3),),
    requests: Sequence[int] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q: torch.Tensor | float = 1.0,
    group: int = HEADS,
) -> AttentionInputs:
    """A call on caches that hold the values of some codes; q is one number, or given."""
    indices = rows if isinstance(rows, torch.Tensor) else listing(rows)
    kv_heads, head_dim = k_codes.shape[2:]
    if not isinstance(q, torch.Tensor):
        q = torch.full((indices.shape[0], group * kv_heads, head_dim), q, dtype=torch.float16)
    return AttentionInputs(
        name="",
        q=q,
        k_cache=route.cache(k_codes),
        v_cache=route.cache(v_codes),
        logical_indices=indices,
        block_table=torch.tensor(table, dtype=torch.int32),
        token_to_req=torch.tensor(requests or [0] * indices.shape[0], dtype=torch.int32),
        **route.scales(k_scale, v_scale),
    ).to(device)


def standard_pair(
    *,
    rows: int = 1,
    q_heads: int = HEADS,
    kv_heads: int = 1,
    head_dim: int = HEAD_DIM,
    seed: int = 0,
    dtype: torch.dtype = torch.float16,
) -> workloads.QuantisedPair:
    """Random tokens of three requests on shuffled pages, in the shape that most tests share."""
    return workloads.random_pages(
        rows=rows,
        pages_per_request=3,
        page_size=PAGE_SIZE,
        topk=TOPK,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seed=seed,
        dtype=dtype,
    )


def padded_pair() -> workloads.QuantisedPair:
    """Every kind of entry without weight, and duplicates; everything unselected is NaN."""
    pair = workloads.padded_and_duplicates(q_heads=HEADS, head_dim=HEAD_DIM)
    indices = listing(pair.quantised.logical_indices.tolist())
    return replace(
        pair,
        unquantised=replace(pair.unquantised, logical_indices=indices),
        quantised=replace(pair.quantised, logical_indices=indices),
    )


def assert_within_budget(output: torch.Tensor, lse: torch.Tensor | None, inputs: AttentionInputs, arm: Arm) -> None:
    """Hold an output to the error of an independent implementation in the same precision on the same inputs.

    The oracle is the FP64 reference; the implementation is plain torch with the arm's casts and FP32 otherwise. Both
    errors are relative to the reference, so that small numbers get no discount.
    """
    exact, exact_lse = reference_attention(**inputs.arguments(), return_lse=True)
    peer = precision.same_precision(precision.select(inputs), arm)
    assert output.isfinite().all(), "the output holds values that are not finite"
    for name, norm, multiple in (("rms", _rms, RMS_MULTIPLE), ("max", _largest, MAX_MULTIPLE)):
        error, budget = norm(output.double() - exact), norm(peer.double() - exact)
        message = f"{name} error {error:.3g}, independent implementation {budget:.3g}, reference {norm(exact):.3g}"
        print(message)
        assert error <= multiple * budget, message
    if lse is not None:
        occupied = exact_lse > -math.inf
        assert torch.equal(lse == -math.inf, ~occupied)
        peer_error = _largest(_lse_in_fp32(inputs, arm)[occupied] - exact_lse[occupied])
        resolution = torch.finfo(torch.float32).eps * _largest(exact_lse[occupied])
        error = _largest(lse[occupied] - exact_lse[occupied])
        message = f"LSE error {error:.3g}, independent implementation {peer_error:.3g}, FP32 step {resolution:.3g}"
        print(message)
        assert error <= MAX_MULTIPLE * (peer_error + resolution), message


def _lse_in_fp32(inputs: AttentionInputs, arm: Arm) -> torch.Tensor:
    """[rows, q_heads] LSE in log2 units, by torch, with the arm's rounding of K and FP32 otherwise."""
    selected = precision.select(inputs)
    in_loop = arm.scale_placement == "in_loop"
    k = (selected.k.float() * selected.k_scale).to(selected.q.dtype) if in_loop else selected.k
    scores = selected.q.float() @ k.float().permute(0, 2, 3, 1) / math.sqrt(selected.q.shape[-1])
    scores = scores * (1.0 if in_loop else selected.k_scale)
    scores = scores.where(selected.valid[:, None, None], -math.inf)
    return (scores.logsumexp(-1) * math.log2(math.e)).flatten(1, 2)


def _rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def _largest(values: torch.Tensor) -> float:
    return float(values.double().abs().max())
