"""The packed decoder against the others: bit for bit within the dot contraction, on finite codes."""

import math
from dataclasses import replace

import attention_calls as calls
import pytest
import torch
from attention_calls import Route

from qsa_kernels.arms import ARMS
from qsa_kernels.attention import prepare
from qsa_kernels.launch import LaunchConfig
from qsa_kernels.measure import workloads
from qsa_kernels.measure.workloads import AttentionInputs

PATHS = ["here", "transposed", pytest.param("sm_70", marks=pytest.mark.gpu)]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture
def every_code(device: str) -> AttentionInputs:
    """All 254 finite codes at every place of the head; NaN codes beside them, unselected."""
    return workloads.all_codes(rows=2, head_dim=calls.PUBLIC_HEAD_DIM).quantised.to(device)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("splits", [1, 3], ids="rows2-topk254-splits{}".format)
@pytest.mark.parametrize("other", ["hoisted/bitcast", "hoisted/exp2"], ids=lambda name: name.replace("/", "_"))
def test_same_bits_as_another_exact_decoder(path: str, splits: int, other: str, every_code: AttentionInputs) -> None:
    packed = Route(ARMS["hoisted/packed"], path).attend(every_code, splits=splits, tile=32)
    exact = Route(ARMS[other], path).attend(every_code, splits=splits, tile=32)
    assert packed[0].isfinite().all()
    assert all(_same_bits(a, b) for a, b in zip(packed, exact, strict=True))


def test_partials_hold_the_factor_that_the_merge_takes_out(device: str) -> None:
    inputs = calls.standard_pair().quantised.to(device)
    partials = []
    for name in ("hoisted/packed", "hoisted/bitcast"):
        options = ARMS[name].options() | {"launch_profile": LaunchConfig(calls.TILE, 3, 4)}
        call = prepare(**inputs.arguments() | options)
        call.kernels[0].run()
        partials.append((call.kernels[0].arguments["partial_out_ptr"], call.kernels[0].arguments["partial_lse_ptr"]))
    (packed, packed_lse), (exact, exact_lse) = partials
    assert _same_bits(packed * 256, exact)
    assert _same_bits(packed_lse, exact_lse)


@pytest.mark.parametrize("path", PATHS)
def test_smallest_and_largest_codes_keep_every_bit(path: str, device: str) -> None:
    """2^-9 times 2^-8 is an FP16 subnormal, which no step may flush."""
    route = Route(ARMS["hoisted/packed"], path)
    for code, value in ((0x01, 2.0**-9), (0x07, 7 * 2.0**-9), (0x81, -(2.0**-9)), (0x7E, 448.0), (0xFE, -448.0)):
        inputs = calls.make(route, calls.codes(code), calls.codes(code), [[4, 9]], device, q=0.5)
        out, lse = route.attend(inputs)
        assert (out == value).all()
        score = calls.HEAD_DIM**0.5 * 0.5 * value
        expected = torch.full_like(lse, 1 + score * math.log2(math.e))
        torch.testing.assert_close(lse, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1.3e36], ids=str)
def test_extreme_scales_survive_the_factor(scale: float, device: str) -> None:
    """256 times the largest allowed scale is finite, and a tiny one is not lost."""
    route = Route(ARMS["hoisted/packed"])
    inputs = calls.make(route, calls.codes(0x00), calls.codes(0x38), [[4]], device, v_scale=scale)
    inputs = replace(inputs, q=inputs.q * 0)
    call = prepare(**inputs.arguments() | route.arm.options(), num_splits=1)
    assert math.isfinite(torch.tensor(call.kernels[0].arguments["v_scale"] * 256).item())
    out, _ = route.attend(inputs)
    assert (out == torch.tensor(scale).half().to(device)).all()
