"""The register contraction: every way in which a tile is spread over threads and a group over programs."""

import attention_calls as calls
import pytest
import torch
from attention_calls import Route, routes

from qsa_kernels.attention import prepare
from qsa_kernels.launch import LaunchConfig, heads_per_program, tokens_spread
from qsa_kernels.measure import workloads
from qsa_kernels.reference import reference_attention

vector_arms = pytest.mark.parametrize("route", routes(names=["fp16+vector", "hoisted/packed+vector"]))


@vector_arms
@pytest.mark.parametrize("tile", [2, 8, 32], ids="tile{}-warps1".format)
def test_tiles_taken_in_several_steps(route: Route, tile: int, device: str) -> None:
    """One warp covers four or eight of 64-element tokens at once, so a tile is a part, one or several of its steps."""
    inputs = route.of(calls.standard_pair(seed=3), device)
    out, lse = route.attend(inputs, splits=3, tile=tile, warps=1)
    calls.assert_within_budget(out, lse, inputs, route.arm)


def test_probabilities_and_sums_are_fp32(device: str) -> None:
    """Before its rounding to halves the result is as near to FP64 as FP32 is; a dot of halves is 160 times as far."""
    inputs = workloads.random_pages(device=device).quantised
    call = prepare(**inputs.arguments(), contraction="vector", launch_profile=LaunchConfig(32, 3, 1))
    call.kernels[0].run()
    partial, lse = (call.kernels[0].arguments[f"partial_{name}_ptr"].double() for name in ("out", "lse"))
    weights = torch.softmax(lse * torch.tensor(2.0).log(), dim=0)
    merged = (partial * weights[..., None]).sum(0) * (inputs.v_scale * 256)
    expected = reference_attention(**inputs.arguments())
    assert float((merged - expected).norm() / expected.norm()) <= 1e-6


@vector_arms
def test_a_maximum_that_grows_from_tile_to_tile(route: Route, device: str) -> None:
    """Every tile raises the maximum of some heads and not of others; what was summed before has to decay."""
    ladder = [0x80 | code for code in range(0x50, 0x38, -1)] + list(range(0x38, 0x41))  # -16 up to 2
    k, v = calls.codes(0x00), calls.codes(0x00)
    for token, code in enumerate(ladder):
        k[1 + token // calls.PAGE_SIZE, token % calls.PAGE_SIZE] = code
        v[1 + token // calls.PAGE_SIZE, token % calls.PAGE_SIZE] = 0x20 + token
    q = torch.full((1, calls.HEADS, calls.HEAD_DIM), 0.25, dtype=torch.float16)
    q[:, 1] *= -1
    inputs = calls.make(route, k, v, [list(range(len(ladder)))], device, k_scale=0.37, v_scale=0.0371, q=q)
    out, lse = route.attend(inputs, tile=8, warps=1)
    calls.assert_within_budget(out, lse, inputs, route.arm)


@pytest.mark.parametrize(
    ("group", "quantised", "heads"),
    [(1, True, 1), (5, True, 5), (6, True, 6), (12, True, 6), (16, True, 6), (12, False, 12), (16, False, 8)],
    ids=str,
)
def test_heads_of_a_group_are_dealt_evenly(group: int, quantised: bool, heads: int) -> None:
    assert heads_per_program(group, quantised=quantised) == heads


@pytest.mark.parametrize(
    ("tile", "warps", "head_dim", "itemsize", "tokens"),
    [
        (8, 1, 256, 1, 2),
        (8, 1, 256, 2, 1),
        (8, 4, 256, 1, 8),
        (8, 1, 16, 1, 8),
        (1, 1, 256, 1, 1),
        (256, 16, 64, 2, 64),
    ],
    ids=str,
)
def test_every_thread_loads_sixteen_bytes_where_the_tile_is_large_enough(
    tile: int, warps: int, head_dim: int, itemsize: int, tokens: int
) -> None:
    spread = tokens_spread(LaunchConfig(tile, 1, warps), head_dim, itemsize)
    assert spread == tokens
    assert tile % spread == 0


@pytest.mark.parametrize(("q_heads", "kv_heads", "programs"), [(12, 1, 2), (16, 1, 3), (24, 2, 4), (6, 1, 1)], ids=str)
def test_a_group_over_several_programs(q_heads: int, kv_heads: int, programs: int, device: str) -> None:
    """The exactness of what they compute is in the layout tests; here, that there are several."""
    pair = calls.workloads.random_pages(rows=2, q_heads=q_heads, kv_heads=kv_heads)
    options = {"decoder": "packed", "contraction": "vector", "num_splits": 3}
    call = prepare(**pair.quantised.to(device).arguments(), **options)
    assert call.kernels[0].grid == (2, programs, 3)
