"""The plain-torch codec against the definition of E4M3FN, exact rational arithmetic and the fault list's values."""

import math
from fractions import Fraction

import pytest
import torch

from qsa_kernels import e4m3

NAN_CODES = {0x7F, 0xFF}


def _exact(code: int) -> Fraction:
    """Value of a finite code, from the bit fields, in rational arithmetic."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 512)
    return -magnitude if code & 0x80 else magnitude


def _nearest_even(x: torch.Tensor) -> torch.Tensor:
    """Nearest codes of finite FP64 numbers; a tie goes to the code whose last mantissa bit is 0."""
    grid = torch.tensor([float(_exact(code)) for code in range(0x7F)], dtype=torch.float64)
    midpoints = (grid[1:] + grid[:-1]) / 2  # exact: a code has four significant bits
    code = torch.searchsorted(midpoints, x.abs())
    is_tie = (code < 0x7E) & (midpoints[code.clamp(max=0x7D)] == x.abs())
    return code + (is_tie & (code % 2 == 1)) + 0x80 * torch.signbit(x)


def _codes(values: list[float], scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[int]:
    return e4m3.encode(torch.tensor(values, dtype=dtype), scale).tolist()


class TestDecode:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
    def test_all_codes_are_bit_exact(self, dtype: torch.dtype) -> None:
        decoded = e4m3.decode(torch.arange(256, dtype=torch.uint8).view(dtype))
        assert decoded.dtype == torch.float32
        for code, value in enumerate(decoded.tolist()):
            if code in NAN_CODES:
                assert math.isnan(value)
            else:
                assert Fraction(value) == _exact(code)
                assert math.copysign(1.0, value) == (-1.0 if code & 0x80 else 1.0)

    @pytest.mark.parametrize(
        ("code", "value"),
        [(0x01, 0.001953125), (0x07, 0.013671875), (0x08, 0.015625), (0x38, 1.0), (0x7D, 416.0), (0x7E, 448.0)],
        ids=lambda item: hex(item) if isinstance(item, int) else str(item),
    )
    def test_landmarks(self, code: int, value: float) -> None:
        assert e4m3.decode(torch.tensor([code, code | 0x80], dtype=torch.uint8)).tolist() == [value, -value]

    def test_keeps_shape_and_reads_strided_storage(self) -> None:
        codes = torch.arange(256, dtype=torch.uint8).view(8, 32)[:, ::2]
        assert torch.equal(e4m3.decode(codes), e4m3.decode(codes.contiguous()))
        assert e4m3.decode(codes).shape == (8, 16)

    @pytest.mark.parametrize(
        "dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2, torch.int8, torch.float16, torch.int32], ids=str
    )
    def test_other_dtypes_are_refused_by_name(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=rf"torch\.uint8.*torch\.float8_e4m3fn.*{dtype}"):
            e4m3.decode(torch.zeros(4, dtype=torch.float32).to(dtype))


class TestEncode:
    def test_every_float16_value_takes_the_nearest_code(self) -> None:
        words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
        finite = words[words.isfinite()]
        codes = e4m3.encode(finite, 1.0)
        assert finite[codes != _nearest_even(finite.double())].tolist() == []

    def test_every_code_and_every_midpoint(self) -> None:
        for code in range(0x7E):
            low, high = float(_exact(code)), float(_exact(code + 1))
            middle = torch.tensor((low + high) / 2, dtype=torch.float32)
            below, above = (torch.nextafter(middle, torch.tensor(side)) for side in (0.0, 1e9))
            values = torch.stack([torch.tensor(low), below, middle, above])
            even = code if code % 2 == 0 else code + 1
            expected = [code, code, even, code + 1]
            assert e4m3.encode(values, 1.0).tolist() == expected
            assert e4m3.encode(-values, 1.0).tolist() == [0x80 | c for c in expected]

    def test_decode_then_encode_is_the_identity_on_finite_codes(self) -> None:
        codes = torch.tensor([c for c in range(256) if c not in NAN_CODES], dtype=torch.uint8)
        assert torch.equal(e4m3.encode(e4m3.decode(codes), 1.0), codes)

    def test_top_of_the_range_saturates(self) -> None:
        values = [256, 288, 320, 352, 384, 416, 448, 449, 464, 465, 1e30, -1e30, 3.0e38]
        expected = [0x78, 0x79, 0x7A, 0x7B, 0x7C, 0x7D, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E]
        assert _codes(values) == expected
        assert e4m3.count_clipped(torch.tensor(values), 1.0) == 6

    @pytest.mark.parametrize(
        ("value", "code"),
        [
            (1.0625, 0x38),
            (1.0625001, 0x39),
            (1.1875, 0x3A),
            (17.0, 0x58),
            (19.0, 0x5A),
            (400.0, 0x7C),
            (432.0, 0x7E),
            (200.0, 0x74),
            (2.0**-10, 0x00),
            (3 * 2.0**-10, 0x02),
            (-(2.0**-10), 0x80),
        ],
        ids=str,
    )
    def test_ties_go_to_even_and_are_rounded_once(self, value: float, code: int) -> None:
        assert _codes([value]) == [code]

    @pytest.mark.parametrize(
        ("value", "scale", "code"),
        [(0.33203125, 0.0123, 0x5D), (0.0, 2e-8, 0x00), (4e-6, 2e-8, 0x74), (40.0, 4e-4, 0x7E), (10.0, 0.05, 0x74)],
        ids=["quotient-26.99", "zero", "tiny-scale", "beyond-fp16", "divides"],
    )
    def test_quotient_is_formed_in_fp32(self, value: float, scale: float, code: int) -> None:
        # 4e-6 is not an FP16 number; its neighbour there still encodes to the same code.
        assert _codes([value], scale, torch.float16) == [code]

    def test_direction_of_the_scale(self) -> None:
        code = e4m3.encode(torch.tensor([10.0]), 0.05)
        assert (e4m3.decode(code).double() * 0.05).item() == pytest.approx(9.6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_no_finite_input_becomes_nan(self, dtype: torch.dtype) -> None:
        values = torch.randn(50_000, generator=torch.Generator().manual_seed(3)).mul(1e3).to(dtype)
        codes = e4m3.encode(values, 0.0123)
        assert not (codes & 0x7F == 0x7F).any()

    def test_special_values(self) -> None:
        values = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45]
        assert _codes(values) == [0x7F, 0xFF, 0x7E, 0xFE, 0x00, 0x80, 0x00, 0x80]
        assert e4m3.count_clipped(torch.tensor(values), 1.0) == 2

    def test_float64_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"x: expected .*torch\.float32, got torch\.float64"):
            e4m3.encode(torch.zeros(1, dtype=torch.float64), 1.0)

    def test_empty(self) -> None:
        assert e4m3.encode(torch.zeros(0, 3), 0.5).shape == (0, 3)


class TestScale:
    @pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e-60, 1e60], ids=str)
    @pytest.mark.parametrize("form", [float, torch.tensor], ids=["number", "tensor"])
    def test_invalid_values_are_refused(self, value: float, form: type) -> None:
        with pytest.raises(ValueError, match="scale: expected a finite positive FP32 number, got"):
            e4m3.encode(torch.ones(1), form(value))

    @pytest.mark.parametrize("shape", [(2,), (4,), (1, 1, 4), (0,), (1, 1)], ids=str)
    def test_shapes_other_than_one_number_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=rf"shape \[\] or \[1\], got shape \[{', '.join(map(str, shape))}\]"):
            e4m3.encode(torch.ones(1), torch.ones(shape))

    @pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one"])
    def test_one_number_is_accepted(self, shape: tuple[int, ...]) -> None:
        assert e4m3.encode(torch.tensor([10.0]), torch.full(shape, 0.05)).tolist() == [0x74]

    @pytest.mark.parametrize(
        ("largest", "published"), [(7.671875, 0.0171247218), (37.6875, 0.0841238871)], ids=["smallest", "largest"]
    )
    def test_covering_scale_gives_the_published_range(self, largest: float, published: float) -> None:
        scale = e4m3.covering_scale(torch.tensor([0.5, -largest]))
        assert scale == pytest.approx(published, abs=5e-11)
        assert scale * 448 >= largest

    def test_covering_scale_is_tight_and_never_clips(self) -> None:
        values = torch.randn(400, generator=torch.Generator().manual_seed(9))
        for value in values:
            scale = e4m3.covering_scale(value)
            below = torch.nextafter(torch.tensor(scale), torch.tensor(0.0)).item()
            assert scale >= abs(value.item()) / 448 > below
            assert e4m3.count_clipped(value[None], scale) == 0

    @pytest.mark.parametrize("value", [0.0, math.nan, math.inf], ids=str)
    def test_covering_scale_needs_a_finite_envelope(self, value: float) -> None:
        with pytest.raises(ValueError, match="largest magnitude"):
            e4m3.covering_scale(torch.tensor([value]))
