"""Attention with chosen roundings, in plain torch: which step loses what, and what one precision can deliver at all.

It shares no code with the kernels or with the reference, so that it can stand as an independent implementation between
the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from qsa_kernels import e4m3
from qsa_kernels.arms import Arm
from qsa_kernels.measure.workloads import AttentionInputs

CASTS = ("k", "v", "p", "output")  # what can be rounded to the dtype of q: K and V operands, probabilities, the output


@dataclass(frozen=True)
class Selected:
    """The tokens that each row of a call selects, gathered; codes decoded but not scaled.

    Args:
        q (torch.Tensor): [rows, kv_heads, group, head_dim] as given.
        k (torch.Tensor): [rows, topk, kv_heads, head_dim] float64, 0 where nothing is selected.
        v (torch.Tensor): as `k`.
        valid (torch.Tensor): [rows, topk] bool.
        k_scale (float): 1.0 for an unquantised cache.
        v_scale (float): 1.0 for an unquantised cache.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    valid: torch.Tensor
    k_scale: float
    v_scale: float


def select(inputs: AttentionInputs) -> Selected:
    """Gather the selected tokens of a call; memory grows with rows * topk, so this is for error tables, not for caches.

    Args:
        inputs (AttentionInputs): any call with at least one page and one request.
    """
    pages, page_size, kv_heads, _ = inputs.k_cache.shape
    requests, width = inputs.block_table.shape
    token, request = inputs.logical_indices.long(), inputs.token_to_req.long()[:, None]
    in_table = (token >= 0) & (token < width * page_size) & (request >= 0) & (request < requests)
    flat_table = inputs.block_table.long().flatten()
    place = (request * width + token.div(page_size, rounding_mode="floor")).where(in_table, 0)
    page = flat_table[place]
    valid = in_table & (page >= 0) & (page < pages)
    slot = (page * page_size + token % page_size).where(valid, 0)

    def gather(cache: torch.Tensor) -> torch.Tensor:
        rows = cache.flatten(0, 1)[slot]
        values = e4m3.decode(rows) if inputs.kv_cache_dtype == "fp8_e4m3" else rows
        return values.double().where(valid[..., None, None], 0.0)

    return Selected(
        q=inputs.q.unflatten(1, (kv_heads, -1)),
        k=gather(inputs.k_cache),
        v=gather(inputs.v_cache),
        valid=valid,
        k_scale=e4m3.scale_value(inputs.k_scale, "k_scale"),
        v_scale=e4m3.scale_value(inputs.v_scale, "v_scale"),
    )


def attend(
    selected: Selected, *, casts: Collection[str] = (), hoisted: bool = True, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Attention over gathered tokens in which only the named values are rounded to the dtype of q.

    Args:
        selected (Selected): from `select`.
        casts (Collection[str]): any of `CASTS`.
        hoisted (bool): scales after the products; otherwise every element of K and V is scaled before its cast.
        dtype (torch.dtype): of all other arithmetic.

    Returns:
        torch.Tensor: [rows, q_heads, head_dim] in `dtype`.

    Raises:
        ValueError: an unknown cast.
    """
    unknown = set(casts) - set(CASTS)
    if unknown:
        raise ValueError(f"casts: expected any of {CASTS}, got {sorted(unknown)}")

    def rounded(values: torch.Tensor, cast: str) -> torch.Tensor:
        return values.to(selected.q.dtype).to(dtype) if cast in casts else values

    head_dim = selected.q.shape[-1]
    k = rounded(selected.k.to(dtype) * (1.0 if hoisted else selected.k_scale), "k")
    v = rounded(selected.v.to(dtype) * (1.0 if hoisted else selected.v_scale), "v")
    factor = math.log2(math.e) / math.sqrt(head_dim) * (selected.k_scale if hoisted else 1.0)
    scores = (selected.q.to(dtype) @ k.permute(0, 2, 3, 1)) * factor  # [rows, kv_heads, group, topk]
    scores = scores.where(selected.valid[:, None, None], -math.inf)
    highest = scores.amax(-1, keepdim=True)
    p = torch.exp2(scores - highest.where(highest > -math.inf, 0.0))
    normaliser = p.sum(-1, keepdim=True)
    out = rounded(p, "p") @ v.transpose(1, 2) / normaliser.where(normaliser > 0, 1.0)
    return rounded(out * (selected.v_scale if hoisted else 1.0), "output").flatten(1, 2)


def raw_dot(selected: Selected, *, hoisted: bool) -> torch.Tensor:
    """What a kernel accumulates before it applies any softmax factor, [rows, q_heads, topk] float64.

    Args:
        selected (Selected): from `select`.
        hoisted (bool): on decoded codes; otherwise on scaled keys.
    """
    return (selected.q.double() @ selected.k.permute(0, 2, 3, 1) * (1.0 if hoisted else selected.k_scale)).flatten(1, 2)


def arm_casts(arm: Arm) -> tuple[str, ...]:
    """The values that an arm rounds to the dtype of q; the register contraction keeps all but the output in FP32.

    Args:
        arm (Arm): any arm of `ARMS`.
    """
    return ("output",) if arm.contraction == "vector" else CASTS


def same_precision(selected: Selected, arm: Arm) -> torch.Tensor:
    """An independent implementation of an arm's arithmetic: its casts, FP32 otherwise, without tiles or splits.

    Args:
        selected (Selected): from `select`, of the call that the arm takes.
        arm (Arm): whose casts and scale placement to follow.
    """
    return attend(selected, casts=arm_casts(arm), hoisted=arm.scale_placement != "in_loop", dtype=torch.float32)
