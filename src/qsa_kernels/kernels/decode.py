"""E4M3FN codes to numbers, one jitted function a decoder."""

import triton
import triton.language as tl


@triton.jit
def decode_exp2(codes):
    """FP32 values of uint8 codes, the power of two computed with a real exp2."""
    code = codes.to(tl.int32)
    exponent = (code >> 3) & 0xF
    mantissa = code & 0x7
    sign = tl.where((code & 0x80) != 0, -1.0, 1.0)
    normal = (1.0 + mantissa.to(tl.float32) * 0.125) * tl.math.exp2((exponent - 7).to(tl.float32)) * sign
    subnormal = mantissa.to(tl.float32) * 0.001953125 * sign
    value = tl.where(exponent == 0, subnormal, normal)
    return tl.where((exponent == 0xF) & (mantissa == 0x7), float("nan"), value)


@triton.jit
def decode_bitcast(codes):
    """FP32 values of uint8 codes, the IEEE word of a normal number assembled from its fields."""
    code = codes.to(tl.int32)
    exponent = (code >> 3) & 0xF
    mantissa = code & 0x7
    sign = tl.where((code & 0x80) != 0, -1.0, 1.0)
    word = ((code & 0x80) << 24) | ((exponent + 120) << 23) | (mantissa << 20)
    subnormal = mantissa.to(tl.float32) * 0.001953125 * sign
    value = tl.where(exponent == 0, subnormal, word.to(tl.float32, bitcast=True))
    return tl.where((exponent == 0xF) & (mantissa == 0x7), float("nan"), value)


@triton.jit
def decode_packed(codes):
    """FP16 values of uint8 codes times 2^-8: magnitude at bit 7, sign at bit 15, bit 14 set for the NaN codes."""
    code = codes.to(tl.int16)
    magnitude = code & 0x7F
    not_a_number = (magnitude + 1) & 0x80
    return (((code & 0x80) << 8) | ((magnitude | not_a_number) << 7)).to(tl.float16, bitcast=True)


def packed_assembly(low: str, high: str) -> tl.constexpr:
    """PTX that decodes four codes of a register to two registers of two halves: nine integer instructions.

    The NaN flag takes the place of each byte's sign bit; a permute puts the sign, replicated, above the byte, so that
    one shift aligns both.

    Args:
        low (str): selector of the permute for the first register.
        high (str): for the second one.
    """
    return tl.constexpr(
        f"""
        {{
        .reg .b32 magnitude, carried, flagged, low, high;
        and.b32 magnitude, $2, 0x7f7f7f7f;
        add.u32 carried, magnitude, 0x01010101;
        and.b32 carried, carried, 0x80808080;
        or.b32 flagged, magnitude, carried;
        prmt.b32 low, flagged, $2, {low};
        prmt.b32 high, flagged, $2, {high};
        shl.b32 low, low, 7;
        shl.b32 high, high, 7;
        and.b32 $0, low, 0xff80ff80;
        and.b32 $1, high, 0xff80ff80;
        }}
        """
    )


NEIGHBOURS_TOGETHER = packed_assembly(low="0xd1c0", high="0xf3e2")
EVERY_OTHER_TOGETHER = packed_assembly(low="0xe2c0", high="0xf3d1")


@triton.jit
def decode_packed_assembly(codes):
    """`decode_packed` for four codes at a time."""
    words = tl.inline_asm_elementwise(NEIGHBOURS_TOGETHER, "=r,=r,r", [codes], dtype=tl.int16, is_pure=True, pack=4)
    return words.to(tl.float16, bitcast=True)


@triton.jit
def decode_packed_words(words):
    """`decode_packed` of the low and of the high code of 16-bit words, two words at a time."""
    low, high = tl.inline_asm_elementwise(
        EVERY_OTHER_TOGETHER, "=r,=r,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
    )
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def convert_words(words):
    """FP16 values of the low and of the high code of 16-bit words, by hardware, two words at a time.

    Triton would take an 8-bit type for one that crosses shared memory in bytes.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 sorted;
        .reg .b16 low, high;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def decode_unscaled(codes, DECODER: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Values of a tile of codes before any scale; `packed` gives them times 2^-8."""
    if DECODER == "exp2":
        return decode_exp2(codes)
    elif DECODER == "bitcast":
        return decode_bitcast(codes)
    elif DECODER == "packed":
        if ASSEMBLY:
            return decode_packed_assembly(codes)
        else:
            return decode_packed(codes)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def decode_tile(
    tile, scale, DECODER: tl.constexpr, HOISTED: tl.constexpr, ASSEMBLY: tl.constexpr, OPERAND: tl.constexpr
):
    """A loaded K or V tile as operands of the contraction.

    A decoder of "none" is an unquantised cache. Before hoisting, the scale multiplies every element in FP32 ahead of
    the cast.
    """
    if DECODER == "none":
        return tile.to(OPERAND)
    elif HOISTED:
        return decode_unscaled(tile, DECODER, ASSEMBLY).to(OPERAND)
    else:
        return (decode_unscaled(tile, DECODER, ASSEMBLY) * scale).to(OPERAND)


@triton.jit
def decode_parts(
    tile,
    scale,
    CODES_PER_WORD: tl.constexpr,
    DECODER: tl.constexpr,
    HOISTED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """`decode_tile` as a tuple: one part, or those of the low and of the high codes of 16-bit words."""
    if CODES_PER_WORD == 1:
        return (decode_tile(tile, scale, DECODER, HOISTED, ASSEMBLY, OPERAND),)
    elif DECODER == "native":
        low, high = convert_words(tile)
        return low.to(OPERAND), high.to(OPERAND)
    elif DECODER == "packed" and ASSEMBLY:
        low, high = decode_packed_words(tile)
        return low.to(OPERAND), high.to(OPERAND)
    else:
        low = decode_tile(tile & 0xFF, scale, DECODER, HOISTED, False, OPERAND)
        high = decode_tile((tile >> 8) & 0xFF, scale, DECODER, HOISTED, False, OPERAND)
        return low, high
