"""E4M3FN codec in plain torch: one sign bit, four exponent bits of bias 7, three mantissa bits, no infinities."""

from __future__ import annotations

import math
from functools import cache

import torch

MAX_FINITE = 448.0
NAN_CODE = 0x7F
CODE_DTYPES = (torch.uint8, torch.float8_e4m3fn)

_MAX_CODE = 0x7E
_INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SMALLEST_NORMAL_BITS = 121 << 23  # FP32 word of 2^-6
_FP32_INFINITY_BITS = 0x7F800000
_BIAS_GAP = 127 - 7
_DROPPED_BITS = 23 - 3


def encode(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Codes of `x / scale`, rounded to nearest even and saturated at 448.

    The quotient is formed in FP32 and rounded once, by integer arithmetic on its bits, so the result does not depend
    on the float8 cast of the installed torch. Infinite quotients saturate like large finite ones; a NaN becomes 0x7F or
    0xFF by its sign, so that a fault in the data stays visible.

    Args:
        x (torch.Tensor): float16, bfloat16 or float32, any shape. Float64 is refused: it would be rounded twice.
        scale (float | torch.Tensor): finite and positive in FP32; a number or a tensor of shape [] or [1].

    Returns:
        torch.Tensor: uint8 codes, shape of `x`.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: `scale` is not one finite positive number.
    """
    quotient = _quotient(x, scale)
    bits = quotient.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF

    normal = _shift_right_to_nearest_even(magnitude, _DROPPED_BITS) - (_BIAS_GAP << 3)
    # Below 2^-6 the code counts units of 2^-9; from a shift of 25 on, everything is below half a unit.
    significand = (magnitude & 0x7FFFFF) | 0x800000
    subnormal = _shift_right_to_nearest_even(significand, (141 - (magnitude >> 23)).clamp(max=25))

    code = torch.where(magnitude >= _SMALLEST_NORMAL_BITS, normal, subnormal).clamp(max=_MAX_CODE)
    code = torch.where(magnitude > _FP32_INFINITY_BITS, NAN_CODE, code)
    return (code | ((bits >> 24) & 0x80)).to(torch.uint8)


def count_clipped(x: torch.Tensor, scale: float | torch.Tensor) -> int:
    """Number of elements that `encode` saturates: those with `|x / scale| > 448`, infinities included, NaN not.

    Args:
        x (torch.Tensor): as for `encode`.
        scale (float | torch.Tensor): as for `encode`.
    """
    return int((_quotient(x, scale).abs() > MAX_FINITE).sum())


def decode(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of E4M3FN codes; 0x7F and 0xFF are NaN, 0x80 is -0.

    Args:
        codes (torch.Tensor): uint8 or float8_e4m3fn, any shape.

    Raises:
        TypeError: any other dtype, which would be read as E4M3FN although it is not.
    """
    return _table(codes.device)[code_bytes(codes, "codes").int()]


def code_bytes(codes: torch.Tensor, name: str) -> torch.Tensor:
    """The same storage as uint8, or a TypeError that names the argument `name` and its dtype."""
    if codes.dtype not in CODE_DTYPES:
        raise TypeError(f"{name}: expected E4M3FN codes as torch.uint8 or torch.float8_e4m3fn, got {codes.dtype}")
    return codes.view(torch.uint8)


def covering_scale(x: torch.Tensor) -> float:
    """Smallest FP32 number that is at least `max|x| / 448`, so that no element of `x` saturates.

    Args:
        x (torch.Tensor): floating point, any shape, at least one element that is not zero.

    Raises:
        ValueError: the largest magnitude is zero or not finite.

    Source:
        The calibration contract of the published scale pack: scale = observed max |x| / 448, rounded upwards.
    """
    largest = float(x.abs().max()) if x.numel() else 0.0
    if not math.isfinite(largest) or largest == 0.0:
        raise ValueError(f"x: expected a finite largest magnitude above zero, got {largest}")
    exact = largest / MAX_FINITE  # FP64, so the rounding direction below is decided on the true quotient
    scale = torch.tensor(exact, dtype=torch.float32)
    if scale.item() < exact:
        scale = torch.nextafter(scale, torch.tensor(torch.inf))
    return scale.item()


def scale_value(scale: float | torch.Tensor, name: str = "scale") -> float:
    """The scale as the FP32 number that the cache contract stores, checked to be finite and positive.

    Args:
        scale (float | torch.Tensor): a number or a tensor of shape [] or [1].
        name (str): the argument's name in error messages.
    """
    if isinstance(scale, torch.Tensor) and tuple(scale.shape) not in {(), (1,)}:
        raise ValueError(f"{name}: expected a number or a tensor of shape [] or [1], got shape {list(scale.shape)}")
    value = torch.tensor(float(scale), dtype=torch.float32).item()
    if not math.isfinite(value) or value <= 0.0:
        raise ValueError(f"{name}: expected a finite positive FP32 number, got {float(scale)}")
    return value


def _quotient(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(f"x: expected one of {', '.join(map(str, _INPUT_DTYPES))}, got {x.dtype}")
    # A tensor divisor: torch turns division by a Python number into a product with its reciprocal on some devices.
    return x.float() / torch.tensor(scale_value(scale), dtype=torch.float32, device=x.device)


def _shift_right_to_nearest_even(word: torch.Tensor, shift: int | torch.Tensor) -> torch.Tensor:
    half = (1 << (shift - 1)) if isinstance(shift, int) else torch.ones_like(shift) << (shift - 1)
    return (word + half - 1 + ((word >> shift) & 1)) >> shift


@cache
def _table(device: torch.device) -> torch.Tensor:
    return torch.tensor([_definition(code) for code in range(256)], dtype=torch.float32, device=device)


def _definition(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)
