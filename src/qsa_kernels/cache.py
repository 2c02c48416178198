"""The paged K/V cache: layout and write."""

from __future__ import annotations

from typing import Any

import torch

from qsa_kernels.hardware import check_device, device_capability
from qsa_kernels.kernels.store import store_tokens
from qsa_kernels.launch import HEAD_DIMS
from qsa_kernels.scales import LayerScales


class PagedKVCache:
    """K and V pages of one layer.

    A token lies at `slot = page * page_size + offset`. An E4M3 cache stores `e4m3fn(x / scale)`, the quotient formed in
    FP32, rounded to nearest even and saturated at 448; NaN stays NaN.

    Args:
        num_pages (int): physical pages.
        page_size (int): tokens a page.
        kv_heads (int): KV heads.
        head_dim (int): elements of a head; a power of two from 16 to 256.
        dtype (torch.dtype): float16 or bfloat16, of the activations and of an unquantised cache.
        kv_cache_dtype (str): "auto" (stored in `dtype`) or "fp8_e4m3" (stored as uint8 codes).
        scales (LayerScales | None): of this layer, from a finalised set; required for "fp8_e4m3" and refused for
            "auto".
        device (torch.device | str): where the pages live.

    Raises:
        TypeError: `dtype` or `scales` has another type.
        ValueError: a size below one, an unsupported head_dim or kv_cache_dtype, scales without or missing for E4M3.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float16,
        kv_cache_dtype: str = "auto",
        scales: LayerScales | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, size in (("num_pages", num_pages), ("page_size", page_size), ("kv_heads", kv_heads)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {size!r}")
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim: expected one of {list(HEAD_DIMS)}, got {head_dim!r}")
        if dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"dtype: expected torch.float16 or torch.bfloat16, got {dtype}")
        if kv_cache_dtype not in ("auto", "fp8_e4m3"):
            raise ValueError(f"kv_cache_dtype: expected 'auto' or 'fp8_e4m3', got {kv_cache_dtype!r}")
        if scales is not None and not isinstance(scales, LayerScales):
            raise TypeError(f"scales: expected the LayerScales of a finalised set, got {type(scales).__name__}")
        if (kv_cache_dtype == "fp8_e4m3") != (scales is not None):
            expected = "LayerScales" if kv_cache_dtype == "fp8_e4m3" else "None"
            raise ValueError(f"scales: expected {expected} for kv_cache_dtype={kv_cache_dtype!r}, got {scales!r}")
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        self.scales = scales
        shape = (num_pages, page_size, kv_heads, head_dim)
        stored_as = torch.uint8 if scales else dtype
        self.k_cache = torch.zeros(shape, dtype=stored_as, device=device)
        self.v_cache = torch.zeros(shape, dtype=stored_as, device=device)

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store tokens; a slot below 0 or past the last page is skipped.

        Args:
            key (torch.Tensor): [tokens, kv_heads, head_dim] in the cache's `dtype`, contiguous elements of a head.
            value (torch.Tensor): as `key`.
            slot_mapping (torch.Tensor): [tokens] int32 or int64. Two tokens in one slot leave either.

        Raises:
            TypeError: another dtype.
            ValueError: another shape or device.
        """
        num_pages, page_size, kv_heads, head_dim = self.k_cache.shape
        tokens = slot_mapping.shape[0] if slot_mapping.dim() == 1 else -1
        if slot_mapping.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"slot_mapping: expected torch.int32 or torch.int64, got {slot_mapping.dtype}")
        if tokens < 0 or slot_mapping.stride(0) != 1:
            raise ValueError(f"slot_mapping: expected contiguous [tokens], got shape {list(slot_mapping.shape)}")
        for name, tensor in (("key", key), ("value", value)):
            if tensor.dtype != self.dtype:
                raise TypeError(f"{name}: expected {self.dtype}, got {tensor.dtype}")
            if list(tensor.shape) != [tokens, kv_heads, head_dim]:
                expected = [tokens, kv_heads, head_dim]
                raise ValueError(
                    f"{name}: expected [tokens, kv_heads, head_dim] = {expected}, got {list(tensor.shape)}"
                )
            if tensor.numel() and tensor.stride(-1) != 1:
                raise ValueError(f"{name}: expected contiguous elements of a head, got strides {tensor.stride()}")
        for name, tensor in (("key", key), ("value", value), ("slot_mapping", slot_mapping)):
            if tensor.device != self.k_cache.device:
                raise ValueError(f"{name}: expected the cache's device {self.k_cache.device}, got {tensor.device}")
        check_device(device_capability(key.device), self.dtype)
        if tokens == 0:
            return
        store_tokens[(tokens, kv_heads)](
            key_ptr=key,
            value_ptr=value,
            k_cache_ptr=self.k_cache,
            v_cache_ptr=self.v_cache,
            slots_ptr=slot_mapping,
            k_scale=self.scales.k_scale if self.scales else 1.0,
            v_scale=self.scales.v_scale if self.scales else 1.0,
            num_slots=num_pages * page_size,
            key_token_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_token_stride=value.stride(0),
            value_head_stride=value.stride(1),
            k_page_stride=self.k_cache.stride(0),
            k_slot_stride=self.k_cache.stride(1),
            k_head_stride=self.k_cache.stride(2),
            v_page_stride=self.v_cache.stride(0),
            v_slot_stride=self.v_cache.stride(1),
            v_head_stride=self.v_cache.stride(2),
            PAGE_SIZE=page_size,
            HEAD_DIM=head_dim,
            QUANTISED=self.scales is not None,
            num_warps=1,
        )

    def arguments(self) -> dict[str, Any]:
        """The cache's share of the keyword arguments of `sparse_paged_attention`."""
        scales = {"k_scale": self.scales.k_scale, "v_scale": self.scales.v_scale} if self.scales else {}
        return {"k_cache": self.k_cache, "v_cache": self.v_cache, "kv_cache_dtype": self.kv_cache_dtype, **scales}
