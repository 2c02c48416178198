"""The merge of split partials."""

import triton
import triton.language as tl

from .scaling import divisor, log_sum_exp, output_factor


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
):
    """Weight each split by 2^(lse - max), normalise, and apply the hoisted V scale once."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    splits = tl.arange(0, STEP)
    highest = tl.full((STEP,), float("-inf"), tl.float32)
    for start in range(0, num_splits, STEP):
        cells = ((start + splits).to(tl.int64) * num_rows + row) * num_q_heads + head
        lse = tl.load(partial_lse_ptr + cells, mask=start + splits < num_splits, other=float("-inf"))
        # a select, since a maximum may drop NaN
        highest = tl.where(lse > highest, lse, highest)
    peak = tl.max(highest, axis=0)
    # a row without tokens has only -inf, and -inf - -inf is NaN
    reference = tl.where(peak == float("-inf"), 0.0, peak)

    total = tl.zeros((STEP,), tl.float32)
    merged = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_splits, STEP):
        in_use = start + splits < num_splits
        cells = ((start + splits).to(tl.int64) * num_rows + row) * num_q_heads + head
        lse = tl.load(partial_lse_ptr + cells, mask=in_use, other=float("-inf"))
        weight = tl.math.exp2(lse - reference)
        partial = tl.load(partial_out_ptr + cells[:, None] * HEAD_DIM + dims[None, :], mask=in_use[:, None], other=0.0)
        total += weight
        merged += tl.sum(partial * weight[:, None], axis=0)
    normaliser = tl.sum(total, axis=0)
    merged = merged / divisor(normaliser) * output_factor(v_scale, DECODER, HOISTED)
    tl.store(out_ptr + row * out_row_stride + head * out_head_stride + dims, merged.to(out_ptr.dtype.element_ty))
    if lse_ptr is not None:
        tl.store(lse_ptr + row * num_q_heads + head, log_sum_exp(peak, normaliser))
