"""Sparse paged attention in plain torch, the oracle of every comparison; it shares no code with the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, overload

import torch

from qsa_kernels import e4m3

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GATHERED_ELEMENTS = 1 << 25  # bounds the memory of one pass over a slice of the rows


@overload
def reference_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    *,
    kv_cache_dtype: str = ...,
    k_scale: float | torch.Tensor = ...,
    v_scale: float | torch.Tensor = ...,
    dtype: torch.dtype = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def reference_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    *,
    kv_cache_dtype: str = ...,
    k_scale: float | torch.Tensor = ...,
    v_scale: float | torch.Tensor = ...,
    dtype: torch.dtype = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def reference_attention(
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
    dtype: torch.dtype = torch.float64,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row over its listed tokens, on the decoded and scaled cache.

    Every entry of `logical_indices` counts as often as it is listed. An entry whose token, page or request is out of
    range (-1 included) carries no weight and is never read. A row without a valid entry gives zeros and an LSE of
    -inf. A NaN among the selected values stays visible: in K over the query heads of its KV head, in V at its output
    element. Bytes that nobody selects have no influence.

    Args:
        q (torch.Tensor): [rows, q_heads, head_dim], floating point. Query head h reads KV head
            h // (q_heads / kv_heads); the softmax factor is head_dim^-0.5.
        k_cache (torch.Tensor): [pages, page_size, kv_heads, head_dim]; floating point for "auto", uint8 or
            float8_e4m3fn for "fp8_e4m3". Any strides.
        v_cache (torch.Tensor): as `k_cache`.
        logical_indices (torch.Tensor): [rows, topk] int32, token positions in the request.
        block_table (torch.Tensor): [requests, pages_per_request] int32, physical pages.
        token_to_req (torch.Tensor): [rows] int32, the request of each row.
        kv_cache_dtype (str): "auto" or "fp8_e4m3".
        k_scale (float | torch.Tensor): finite, positive, rounded to FP32; for "auto" only 1.0.
        v_scale (float | torch.Tensor): as `k_scale`.
        dtype (torch.dtype): float64 or float32, the precision of every step.
        return_lse (bool): also return the log-sum-exp.

    Returns:
        torch.Tensor: [rows, q_heads, head_dim] in `dtype`; with `return_lse` also the LSE [rows, q_heads] in `dtype`
        and in log2 units: log2(sum_t 2^(score_t * log2(e))).

    Raises:
        TypeError: an argument has a dtype that the contract does not allow.
        ValueError: an argument has another rank, shape, device or range than the contract allows.
    """
    k_factor, v_factor = _validate(
        q, k_cache, v_cache, logical_indices, block_table, token_to_req, kv_cache_dtype, k_scale, v_scale, dtype
    )
    rows, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    output = torch.zeros(rows, q_heads, head_dim, dtype=dtype, device=q.device)
    lse = torch.full((rows, q_heads), -math.inf, dtype=dtype, device=q.device)

    for part in _row_slices(rows, logical_indices.shape[1] * kv_heads * head_dim):
        page, slot, valid = _resolve(logical_indices[part], block_table, token_to_req[part], k_cache.shape[:2])
        keys = _gather(k_cache, page, slot, valid, k_factor, dtype)  # [rows, topk, kv_heads, head_dim]
        values = _gather(v_cache, page, slot, valid, v_factor, dtype)
        grouped = q[part].to(dtype).unflatten(1, (kv_heads, q_heads // kv_heads))

        scores = torch.einsum("rhgd,rthd->rhgt", grouped, keys) * (head_dim**-0.5 * math.log2(math.e))
        scores = scores.masked_fill(~valid[:, None, None, :], -math.inf)
        top = _maximum(scores)
        weights = torch.exp2(scores - top)
        total = weights.sum(-1)
        weighted = torch.einsum("rhgt,rthd->rhgd", weights, values)
        occupied = valid.any(-1)[:, None, None]
        output[part] = torch.where(occupied[..., None], weighted / total[..., None], 0.0).flatten(1, 2)
        lse[part] = torch.where(occupied, top.squeeze(-1) + torch.log2(total), -math.inf).flatten(1, 2)

    return (output, lse) if return_lse else output


def _row_slices(rows: int, elements_per_row: int) -> Iterator[slice]:
    step = max(1, _GATHERED_ELEMENTS // max(1, elements_per_row))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _maximum(scores: torch.Tensor) -> torch.Tensor:
    """Row maximum over the last axis, 0 where no entry is valid, so that -inf - -inf never arises."""
    if scores.shape[-1] == 0:
        return scores.new_zeros(*scores.shape[:-1], 1)
    top = scores.amax(-1, keepdim=True)
    return torch.where(top == -math.inf, 0.0, top)


def _resolve(
    logical_indices: torch.Tensor, block_table: torch.Tensor, token_to_req: torch.Tensor, cache_shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Physical page and slot of each entry and whether it is valid; page and slot mean nothing where it is not."""
    pages, page_size = cache_shape
    requests, pages_per_request = block_table.shape
    token = logical_indices.long()
    request = token_to_req.long()[:, None].expand_as(token)
    valid = (token >= 0) & (token < pages_per_request * page_size) & (request >= 0) & (request < requests)
    page = torch.full_like(token, -1)
    page[valid] = block_table.long()[request[valid], token[valid] // page_size]
    valid = valid & (page >= 0) & (page < pages)
    return page, token % page_size, valid


def _gather(
    cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, valid: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    is_coded = cache.dtype in e4m3.CODE_DTYPES
    storage = cache.view(torch.uint8) if is_coded else cache  # torch does not index every float8 type
    selected = storage[page[valid], slot[valid]]
    values = (e4m3.decode(selected) if is_coded else selected).to(dtype)
    gathered = torch.zeros(*valid.shape, *cache.shape[2:], dtype=dtype, device=cache.device)
    gathered[valid] = values * scale
    return gathered


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
    dtype: torch.dtype,
) -> tuple[float, float]:
    axes = {
        "q": (q, "[rows, q_heads, head_dim]"),
        "k_cache": (k_cache, "[pages, page_size, kv_heads, head_dim]"),
        "v_cache": (v_cache, "[pages, page_size, kv_heads, head_dim]"),
        "logical_indices": (logical_indices, "[rows, topk]"),
        "block_table": (block_table, "[requests, pages_per_request]"),
        "token_to_req": (token_to_req, "[rows]"),
    }
    for name, (tensor, expected) in axes.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor {expected}, got {type(tensor).__name__}")
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    if kv_cache_dtype not in ("auto", "fp8_e4m3"):
        raise ValueError(f"kv_cache_dtype: expected 'auto' or 'fp8_e4m3', got {kv_cache_dtype!r}")
    if q.dtype not in _FLOAT_DTYPES:
        raise TypeError(f"q: expected one of {', '.join(map(str, _FLOAT_DTYPES))}, got {q.dtype}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if kv_cache_dtype == "fp8_e4m3":
            e4m3.code_bytes(cache, name)
        elif cache.dtype not in _FLOAT_DTYPES:
            raise TypeError(f"{name}: expected floating point for kv_cache_dtype='auto', got {cache.dtype}")
    for name in ("logical_indices", "block_table", "token_to_req"):
        if axes[name][0].dtype != torch.int32:
            raise TypeError(f"{name}: expected torch.int32, got {axes[name][0].dtype}")
    for name, (tensor, expected) in axes.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} of q, got {tensor.device}")
        if tensor.dim() != expected.count(",") + 1:
            raise ValueError(f"{name}: expected {expected}, got shape {list(tensor.shape)}")

    rows, q_heads, head_dim = q.shape
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"v_cache: expected the shape {list(k_cache.shape)} of k_cache, got {list(v_cache.shape)}")
    page_size, kv_heads = k_cache.shape[1:3]
    if page_size == 0 or head_dim == 0 or k_cache.shape[3] != head_dim:
        raise ValueError(
            f"k_cache: expected [pages, page_size >= 1, kv_heads, head_dim {head_dim} of q], "
            f"got shape {list(k_cache.shape)}"
        )
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(f"q: expected q_heads to be a multiple of kv_heads, got {q_heads} and {kv_heads}")
    for name in ("logical_indices", "token_to_req"):
        tensor, expected = axes[name]
        if tensor.shape[0] != rows:
            raise ValueError(f"{name}: expected {expected} with {rows} rows as in q, got shape {list(tensor.shape)}")

    factors = e4m3.scale_value(k_scale, "k_scale"), e4m3.scale_value(v_scale, "v_scale")
    for name, factor in zip(("k_scale", "v_scale"), factors, strict=True):
        if kv_cache_dtype == "auto" and factor != 1.0:
            raise ValueError(
                f"{name}: expected 1.0 for kv_cache_dtype='auto', which holds no scaled codes, got {factor}"
            )
    return factors
