"""Sparse paged grouped-query attention with a calibrated E4M3 K/V cache."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsa_kernels.attention import sparse_paged_attention
    from qsa_kernels.reference import reference_attention

__all__ = ["reference_attention", "sparse_paged_attention"]


def __getattr__(name: str) -> Any:
    # torch and Triton are loaded on first use, so that commands that need neither start at once
    if name == "sparse_paged_attention":
        from qsa_kernels.attention import sparse_paged_attention

        return sparse_paged_attention
    if name == "reference_attention":
        from qsa_kernels.reference import reference_attention

        return reference_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
