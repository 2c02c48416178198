"""What a user would run instead: gather + dequantise + SDPA in torch, and FlashInfer's paged decode at page size 1."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from qsa_kernels.measure.workloads import AttentionInputs

_WORKSPACE_BYTES = 128 << 20  # the size that FlashInfer recommends
_workspaces: dict[torch.device, torch.Tensor] = {}


def flat_slots(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each listed token lies in the cache seen as [pages * page_size, ...], and whether it is a token at all.

    Only for inputs that the builders make: an entry is a valid token or -1.

    Returns:
        [rows, topk] int64 slots, 0 where there is no token, and [rows, topk] bool.
    """
    token = inputs.logical_indices.long()
    valid = token >= 0
    page_size = inputs.k_cache.shape[1]
    pages = inputs.block_table.long()[inputs.token_to_req.long()]
    page = pages.gather(1, token.clamp(min=0) // page_size)
    return torch.where(valid, page * page_size + token % page_size, 0), valid


def _dequantise(gathered: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return gathered.view(torch.float8_e4m3fn).to(dtype) * scale


def sdpa(inputs: AttentionInputs) -> Callable[[], torch.Tensor]:
    """Gather the selected tokens, dequantise them to the dtype of q, and call torch's attention on the copy.

    Inside of the returned call: address arithmetic, gather, conversion and attention, each its own kernel. Whether a
    mask is needed is found beforehand, since it would cost a wait for the device.

    Returns:
        a call without arguments that gives [rows, q_heads, head_dim].
    """
    rows, q_heads, head_dim = inputs.q.shape
    kv_heads = inputs.k_cache.shape[2]
    query = inputs.q.view(rows, kv_heads, q_heads // kv_heads, head_dim)
    padded = bool((inputs.logical_indices < 0).any())
    quantised = inputs.kv_cache_dtype == "fp8_e4m3"

    def call() -> torch.Tensor:
        slots, valid = flat_slots(inputs)

        def select(cache: torch.Tensor, scale: float) -> torch.Tensor:
            gathered = cache.view(-1, kv_heads, head_dim)[slots]
            if quantised:
                gathered = _dequantise(gathered, scale, inputs.q.dtype)
            return gathered.transpose(1, 2)

        keys = select(inputs.k_cache, inputs.k_scale)
        values = select(inputs.v_cache, inputs.v_scale)
        mask = valid[:, None, None, :] if padded else None
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).reshape(rows, q_heads, head_dim)

    return call


def flashinfer_missing() -> str:
    """Why FlashInfer cannot run here, empty if it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed (optional extra 'flashinfer')"
    if not torch.cuda.is_available():
        return "FlashInfer needs a CUDA device"
    if torch.cuda.get_device_capability() < (7, 5):
        return "FlashInfer supports compute capability 7.5 and newer"
    return ""


def flashinfer_decode(inputs: AttentionInputs) -> Callable[[], torch.Tensor]:
    """FlashInfer's paged decode over the selected tokens as pages of one token.

    Inside of the returned call: attention, and for E4M3 the multiplication by the V scale. Outside: resolving the page
    table and planning, which a server does on the host for each step. Tensor-core kernels of the FA2 backend, since
    the group of six query heads has no other. Dependent launch is off, so that calls in one graph do not overlap.

    Returns:
        a call without arguments that gives [rows, q_heads, head_dim].

    Raises:
        RuntimeError: FlashInfer cannot run here.
    """
    missing = flashinfer_missing()
    if missing:
        raise RuntimeError(missing)
    import flashinfer

    rows, q_heads, head_dim = inputs.q.shape
    kv_heads = inputs.k_cache.shape[2]
    slots, valid = flat_slots(inputs)
    counts = valid.sum(1)
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device=inputs.q.device)
    indptr[1:] = counts.cumsum(0)
    quantised = inputs.kv_cache_dtype == "fp8_e4m3"
    storage = torch.float8_e4m3fn if quantised else inputs.k_cache.dtype
    caches = tuple(cache.view(storage).view(-1, 1, kv_heads, head_dim) for cache in (inputs.k_cache, inputs.v_cache))
    device = inputs.q.device
    if device not in _workspaces:
        _workspaces[device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspaces[device], "NHD", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        indptr,
        slots[valid].int(),
        torch.ones(rows, dtype=torch.int32, device=device),
        q_heads,
        kv_heads,
        head_dim,
        1,
        q_data_type=inputs.q.dtype,
        kv_data_type=storage,
    )
    scales = {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale} if quantised else {}

    def call() -> torch.Tensor:
        return wrapper.run(inputs.q, caches, enable_pdl=False, **scales)

    return call


def prepare(name: str, inputs: AttentionInputs) -> Callable[[], torch.Tensor]:
    """The baseline `name` ("sdpa/..." or "flashinfer/...") on inputs whose cache dtype fits it."""
    return {"sdpa": sdpa, "flashinfer": flashinfer_decode}[name.split("/")[0]](inputs)
