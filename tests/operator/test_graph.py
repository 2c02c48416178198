"""CUDA graphs: a captured call stays valid when its inputs change in place, and nothing waits for the host."""

from collections.abc import Iterator
from dataclasses import replace

import attention_calls as calls
import pytest
import torch
from attention_calls import Route, routes

from qsa_kernels import sparse_paged_attention
from qsa_kernels.arms import ARMS
from qsa_kernels.attention import prepare
from qsa_kernels.launch import LaunchConfig
from qsa_kernels.measure.workloads import AttentionInputs

NAMES = ["fp16", "in_loop/exp2", "hoisted/packed", "hoisted/native", "fp16+vector", "hoisted/packed+vector"]
ROWS = 3


def half_listed(route: Route, device: str) -> AttentionInputs:
    """Three rows of which each lists 17 of 33 entries."""
    inputs = route.of(calls.standard_pair(rows=ROWS), device)
    indices = inputs.logical_indices.clone()
    indices[:, 17:] = -1
    return replace(inputs, logical_indices=indices)


def changes(inputs: AttentionInputs) -> Iterator[str]:
    """Change a call's inputs in place, one way after another."""
    generator = torch.Generator().manual_seed(8)
    indices = inputs.logical_indices
    tokens = inputs.block_table.shape[1] * calls.PAGE_SIZE
    yield "as captured"
    indices[0, 2:] = -1
    indices[1] = -1
    yield "fewer tokens, one row without any"
    indices.copy_(torch.randint(tokens, indices.shape, generator=generator, dtype=torch.int32))
    yield "more tokens, duplicates among them"
    inputs.block_table.copy_(inputs.block_table.flip(0, 1).clone())
    inputs.block_table[0, 0] = -1
    yield "other pages, one of them invalid"
    inputs.token_to_req.copy_(torch.tensor([2, -1, 1], dtype=torch.int32))
    yield "other requests"
    inputs.q.copy_(torch.randn(inputs.q.shape, generator=generator).mul(0.2))
    yield "other queries"


@pytest.mark.parametrize("name", ["fp16", "hoisted/packed", "hoisted/packed+vector"])
def test_the_launch_depends_on_shapes_alone(name: str, device: str) -> None:
    route = Route(ARMS[name])
    inputs = half_listed(route, device)
    plans = []
    for _ in changes(inputs):
        kernels = prepare(**inputs.arguments() | route.arm.options()).kernels
        plans.append([(k.function, k.grid, k.constants, k.num_warps, k.num_stages) for k in kernels])
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.gpu
@pytest.mark.parametrize("route", routes(names=NAMES))
@pytest.mark.parametrize("splits", [1, 3], ids="splits{}".format)
def test_replay_equals_eager_on_new_data(route: Route, splits: int, device: str) -> None:
    calls.skip_without_conversion(route)
    inputs = half_listed(route, device)
    warps = 8 if route.arm.contraction == "vector" else 4
    options = route.arm.options() | {"launch_profile": LaunchConfig(calls.TILE, splits, warps), "return_lse": True}
    route.operator(**inputs.arguments() | options)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = route.operator(**inputs.arguments() | options)
    for change in changes(inputs):
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        eager = route.operator(**inputs.arguments() | options)
        for a, b in zip(captured, eager, strict=True):
            assert torch.equal(a, b), change
        calls.assert_within_budget(*captured, inputs, route.arm)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_the_defaults_can_be_captured_into_an_output_of_ones_own(kv_cache_dtype: str, device: str) -> None:
    route = Route(ARMS["fp16" if kv_cache_dtype == "auto" else "hoisted/packed"])
    inputs = half_listed(route, device)
    out = torch.empty_like(inputs.q)
    sparse_paged_attention(**inputs.arguments(), out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        sparse_paged_attention(**inputs.arguments(), out=out)
    for change in changes(inputs):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, sparse_paged_attention(**inputs.arguments())), change


@pytest.mark.gpu
@pytest.mark.parametrize("route", routes(names=NAMES))
@pytest.mark.parametrize("splits", [1, 3], ids="splits{}".format)
def test_no_call_waits_for_the_host_or_asks_the_driver_for_memory(route: Route, splits: int, device: str) -> None:
    calls.skip_without_conversion(route)
    inputs = half_listed(route, device)
    warps = 8 if route.arm.contraction == "vector" else 4
    options = route.arm.options() | {"launch_profile": LaunchConfig(calls.TILE, splits, warps), "return_lse": True}
    route.operator(**inputs.arguments() | options)  # compiles
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            route.operator(**inputs.arguments() | options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocated
