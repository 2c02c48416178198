"""The merge of split partials."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .scaling import inverse, log_sum_exp, output_factor


@triton.jit(do_not_specialize=("num_rows",))
def merge_splits(
    partial_out_ptr,  # [splits, rows, q_heads, head_dim] float32
    partial_lse_ptr,  # [splits, rows, q_heads] float32
    out_ptr,  # [rows, q_heads, head_dim]
    lse_ptr,  # [rows, q_heads] float32, or None
    v_scale,
    num_splits,
    num_rows,
    num_q_heads,
    out_row_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    DECODER: tl.constexpr,
    HOISTED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Weight each split by 2^(lse - max), normalise, and apply the hoisted V scale once.

    With OVERLAPPED the launch comes before the attention kernel has ended, and this one waits for its partials.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    splits = tl.arange(0, STEP)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    merged = tl.zeros((BLOCK_D,), tl.float32)
    if OVERLAPPED:
        gdc_wait()
    for start in range(0, num_splits, STEP):
        in_use = start + splits < num_splits
        cells = ((start + splits).to(tl.int64) * num_rows + row) * num_q_heads + head
        lse = tl.load(partial_lse_ptr + cells, mask=in_use, other=float("-inf"))
        partial = tl.load(partial_out_ptr + cells[:, None] * HEAD_DIM + dims[None, :], mask=in_use[:, None], other=0.0)
        # a maximum may drop NaN, the weights do not
        highest = tl.maximum(peak, tl.max(lse, axis=0))
        # a row without tokens has only -inf, and -inf - -inf is NaN
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        decay = tl.math.exp2(peak - reference)
        weight = tl.math.exp2(lse - reference)
        total = total * decay + tl.sum(weight, axis=0)
        merged = merged * decay + tl.sum(partial * weight[:, None], axis=0)
        peak = highest
    merged = merged * inverse(total) * output_factor(v_scale, DECODER, HOISTED)
    tl.store(out_ptr + row * out_row_stride + head * out_head_stride + dims, merged.to(out_ptr.dtype.element_ty))
    if lse_ptr is not None:
        tl.store(lse_ptr + row * num_q_heads + head, log_sum_exp(peak, total))
