"""Where the scales go once they are out of the loop, and the end of the softmax."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# The packed decoder gives values times 2^-8.
PACKED_FACTOR = tl.constexpr(256.0)


@triton.jit
def softmax_factor(k_scale, HEAD_DIM: tl.constexpr, DECODER: tl.constexpr, HOISTED: tl.constexpr):
    """What turns a raw dot product into a score in log2 units."""
    if DECODER == "none" or not HOISTED:
        return HEAD_DIM**-0.5 * LOG2_E
    elif DECODER == "packed":
        return HEAD_DIM**-0.5 * LOG2_E * k_scale * PACKED_FACTOR
    else:
        return HEAD_DIM**-0.5 * LOG2_E * k_scale


@triton.jit
def output_factor(v_scale, DECODER: tl.constexpr, HOISTED: tl.constexpr):
    """What multiplies a normalised output element, once, after any merge."""
    if DECODER == "none" or not HOISTED:
        return 1.0
    elif DECODER == "packed":
        return v_scale * PACKED_FACTOR
    else:
        return v_scale


@triton.jit
def divisor(normaliser):
    """The normaliser, or 1 for a row without tokens, whose sum of weights is zero."""
    return tl.where(normaliser == 0.0, 1.0, normaliser)


@triton.jit
def inverse(normaliser):
    """What an output is multiplied by: 1 for a row without tokens, whose sum of weights is zero."""
    return 1.0 / divisor(normaliser)


@triton.jit
def log_sum_exp(peak, normaliser):
    """The LSE in log2 units, -inf for a row without tokens."""
    return tl.where(normaliser == 0.0, float("-inf"), peak + tl.math.log2(divisor(normaliser)))
