"""The decoders and the encoder of the kernels, alone: every code, every pair of neighbours, every FP16 number."""

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl

from qsa_kernels import e4m3
from qsa_kernels.hardware import NATIVE_CAPABILITY
from qsa_kernels.kernels.decode import decode_parts, decode_unscaled
from qsa_kernels.kernels.store import encode_e4m3

BLOCK = 1024
CODES = torch.arange(256, dtype=torch.uint8)
HALVES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)


@triton.jit
def decode_codes(codes_ptr, out_ptr, DECODER: tl.constexpr, ASSEMBLY: tl.constexpr, COUNT: tl.constexpr):
    """FP32 values of COUNT codes a program."""
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    values = decode_unscaled(tl.load(codes_ptr + places), DECODER, ASSEMBLY)
    tl.store(out_ptr + places, values.to(tl.float32))


@triton.jit
def decode_pairs(
    words_ptr, out_ptr, scale, DECODER: tl.constexpr, HOISTED: tl.constexpr, ASSEMBLY: tl.constexpr, COUNT: tl.constexpr
):
    """FP16 values, as FP32, of the two codes in each of COUNT words a program."""
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    parts = decode_parts(tl.load(words_ptr + places), scale, 2, DECODER, HOISTED, ASSEMBLY, tl.float16)
    for part in tl.static_range(2):
        tl.store(out_ptr + 2 * places + part, parts[part].to(tl.float32))


@triton.jit
def encode_quotients(x_ptr, codes_ptr, scale, COUNT: tl.constexpr):
    """Codes of COUNT quotients a program, as the cache write forms them."""
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    quotients = tl.math.div_rn(tl.load(x_ptr + places).to(tl.float32), scale)
    tl.store(codes_ptr + places, encode_e4m3(quotients))


def decode(codes: torch.Tensor, decoder: str, *, assembly: bool = False) -> torch.Tensor:
    out = torch.full(codes.shape, 7.0, dtype=torch.float32, device=codes.device)
    count = min(BLOCK, codes.numel())
    decode_codes[(codes.numel() // count,)](codes, out, DECODER=decoder, ASSEMBLY=assembly, COUNT=count, num_warps=1)
    return out * 256 if decoder == "packed" else out


def pairs(codes: torch.Tensor, decoder: str, *, assembly: bool = False, scale: float | None = None) -> torch.Tensor:
    """FP32 values of codes that are read two to a word; with a scale, as before hoisting."""
    out = torch.full(codes.shape, 7.0, dtype=torch.float32, device=codes.device)
    words = codes.view(torch.int16)
    decode_pairs[(words.numel() // BLOCK,)](
        words, out, scale or 1.0, DECODER=decoder, HOISTED=scale is None, ASSEMBLY=assembly, COUNT=BLOCK, num_warps=1
    )
    return out * 256 if decoder == "packed" else out


def encode(x: torch.Tensor, scale: float) -> torch.Tensor:
    codes = torch.full(x.shape, 0x55, dtype=torch.uint8, device=x.device)
    count = min(BLOCK, x.numel())
    encode_quotients[(x.numel() // count,)](x, codes, scale, COUNT=count, num_warps=1)
    return codes


def assert_same_values(values: torch.Tensor, expected: torch.Tensor) -> None:
    """Every bit of a number, and NaN for NaN of any sign and payload."""
    not_a_number = expected.isnan()
    assert torch.equal(values.isnan(), not_a_number)
    bits, right = (t[~not_a_number].view(torch.int32) for t in (values, expected))
    assert torch.equal(bits, right)


DECODERS = [
    pytest.param("exp2", False, id="exp2"),
    pytest.param("bitcast", False, id="bitcast"),
    pytest.param("packed", False, id="packed"),
    pytest.param("packed", True, id="packed-assembly", marks=pytest.mark.gpu),
    pytest.param("native", False, id="native", marks=pytest.mark.gpu),
]


class TestDecode:
    @pytest.mark.parametrize(("decoder", "assembly"), DECODERS)
    def test_every_code(self, decoder: str, assembly: bool, device: str) -> None:
        if decoder == "native" and torch.cuda.get_device_capability() < NATIVE_CAPABILITY:
            pytest.skip("needs compute capability 8.9 or higher")
        codes = CODES.to(device)
        values = decode(codes, decoder, assembly=assembly)
        assert_same_values(values, e4m3.decode(codes))
        assert values[0x80].item() == 0.0
        assert torch.signbit(values[0x80])
        assert values[[0x01, 0x07, 0x08, 0x38, 0x7D, 0xFE]].tolist() == [2.0**-9, 7 * 2.0**-9, 2.0**-6, 1, 416, -448]

    @pytest.mark.gpu
    def test_native_agrees_with_bitcast(self, device: str) -> None:
        if torch.cuda.get_device_capability() < NATIVE_CAPABILITY:
            pytest.skip("needs compute capability 8.9 or higher")
        codes = CODES.to(device)
        assert_same_values(decode(codes, "native"), decode(codes, "bitcast"))

    @pytest.mark.gpu
    def test_assembly_agrees_with_the_plain_form_on_every_pair_of_neighbours(self, device: str) -> None:
        """Four codes share a register; none may leak into another."""
        first, second = (t.reshape(-1) for t in torch.meshgrid(CODES, CODES, indexing="ij"))
        words = torch.stack([first, second, second, first], dim=1).reshape(-1).contiguous().to(device)
        assembled = decode(words, "packed", assembly=True)
        assert_same_values(assembled, decode(words, "packed"))
        assert_same_values(assembled, e4m3.decode(words))


class TestDecodePairs:
    """Every pair of neighbours in a 16-bit word: neither code may leak into the other."""

    @pytest.mark.parametrize(("decoder", "assembly"), DECODERS)
    def test_every_pair_of_codes(self, decoder: str, assembly: bool, device: str) -> None:
        if decoder == "native" and torch.cuda.get_device_capability() < NATIVE_CAPABILITY:
            pytest.skip("needs compute capability 8.9 or higher")
        codes = HALVES.to(device).view(torch.uint8)
        values = pairs(codes, decoder, assembly=assembly)
        assert_same_values(values, e4m3.decode(codes))

    def test_a_scale_in_the_loop_multiplies_before_the_cast(self, device: str) -> None:
        codes = HALVES.to(device).view(torch.uint8)
        values = pairs(codes, "bitcast", scale=0.0123)
        assert_same_values(values, (e4m3.decode(codes) * torch.tensor(0.0123)).half().float())


class TestEncode:
    @pytest.mark.parametrize("scale", [1.0, 0.0123, 0.0841238871, 37.0, 2e-8], ids=str)
    def test_every_half(self, scale: float, device: str) -> None:
        """NaN becomes NaN; which of the two codes is not promised."""
        x = HALVES.to(device)
        got, expected = encode(x, scale), e4m3.encode(x, scale)
        not_a_number = x.isnan()
        assert (got[not_a_number] & 0x7F == 0x7F).all()
        wrong = (got != expected) & ~not_a_number
        assert x[wrong].tolist() == []

    @pytest.mark.parametrize(
        ("values", "codes"),
        [
            pytest.param(
                [256, 288, 320, 352, 384, 416, 448, 449, 464, 465, 1e30, -1e30, 3.0e38, 0, 0, 0],
                [0x78, 0x79, 0x7A, 0x7B, 0x7C, 0x7D, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0, 0, 0],
                id="saturates",
            ),
            pytest.param(
                [1.0625, 1.0625001, 1.1875, 17, 19, 400, 432, 200, 2.0**-10, 3 * 2.0**-10, -(2.0**-10), 0, 0, 0, 0, 0],
                [0x38, 0x39, 0x3A, 0x58, 0x5A, 0x7C, 0x7E, 0x74, 0x00, 0x02, 0x80, 0, 0, 0, 0, 0],
                id="ties-to-even-once",
            ),
        ],
    )
    def test_fp32_values(self, values: Sequence[float], codes: Sequence[int], device: str) -> None:
        assert encode(torch.tensor(values, dtype=torch.float32, device=device), 1.0).tolist() == codes
