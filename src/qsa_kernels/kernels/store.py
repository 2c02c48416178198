"""The cache write."""

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x):
    """E4M3FN codes of FP32 numbers, without an FP8 type: nearest, ties to even, saturating at 448; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # round at the third mantissa bit, then move the exponent bias from 127 to 7
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # adding 2^14 leaves steps of 2^-9 in the FP32 mantissa: the hardware rounds to the subnormal grid
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_tokens(
    key_ptr,  # [tokens, kv_heads, head_dim]
    value_ptr,
    k_cache_ptr,  # [pages, page_size, kv_heads, head_dim]
    v_cache_ptr,
    slots_ptr,  # [tokens] int, page * page_size + slot; negative or past the end = skip
    k_scale,
    v_scale,
    num_slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Write one token's K and V of one head into its slot; the quotient by the scale is formed in FP32."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM)
    place = tl.load(slots_ptr + token).to(tl.int64)
    if (place >= 0) & (place < num_slots):
        page = place // PAGE_SIZE
        slot = place % PAGE_SIZE
        key = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + dims)
        value = tl.load(value_ptr + token * value_token_stride + head * value_head_stride + dims)
        if QUANTISED:
            key = encode_e4m3(tl.math.div_rn(key.to(tl.float32), k_scale))
            value = encode_e4m3(tl.math.div_rn(value.to(tl.float32), v_scale))
        tl.store(k_cache_ptr + page * k_page_stride + slot * k_slot_stride + head * k_head_stride + dims, key)
        tl.store(v_cache_ptr + page * v_page_stride + slot * v_slot_stride + head * v_head_stride + dims, value)
