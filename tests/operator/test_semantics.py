"""What the operator computes, on every arm and code path: the oracle's error budget, and exact values for hard inputs.

Output, LSE and partial buffers hold NaN before every call.
"""

import math
from dataclasses import replace

import attention_calls as calls
import pytest
import torch
from attention_calls import Route, codes, make, routes

from qsa_kernels import e4m3, sparse_paged_attention
from qsa_kernels.arms import ARMS
from qsa_kernels.attention import prepare
from qsa_kernels.measure.workloads import AttentionInputs
from qsa_kernels.reference import reference_attention

every_route = pytest.mark.parametrize("route", routes())
every_quantised_route = pytest.mark.parametrize("route", routes(quantised_only=True))
# the two contractions with the decoder that each machine uses
one_route_a_contraction = pytest.mark.parametrize("route", routes(names=["hoisted/packed", "hoisted/packed+vector"]))
single_and_split = pytest.mark.parametrize("splits", [1, 3], ids="splits{}".format)

FINITE = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def random_codes(shape: torch.Size | tuple[int, ...], seed: int) -> torch.Tensor:
    """Finite codes, all equally likely."""
    generator = torch.Generator().manual_seed(seed)
    return FINITE[torch.randint(len(FINITE), shape, generator=generator)]


class TestAgainstTheOracle:
    @every_route
    @pytest.mark.parametrize("splits", [1, 3], ids="rows3-topk33-splits{}".format)
    def test_random_tokens_on_shuffled_pages(self, route: Route, splits: int, device: str) -> None:
        calls.skip_without_conversion(route)
        pair = calls.standard_pair(rows=3, q_heads=calls.PUBLIC_HEADS, head_dim=calls.PUBLIC_HEAD_DIM)
        inputs = route.of(pair, device)
        calls.assert_within_budget(*route.attend(inputs, splits=splits), inputs, route.arm)

    @one_route_a_contraction
    def test_more_splits_than_tiles(self, route: Route, device: str) -> None:
        inputs = route.of(calls.standard_pair(), device)
        calls.assert_within_budget(*route.attend(inputs, splits=7), inputs, route.arm)

    @every_route
    def test_two_kv_heads(self, route: Route, device: str) -> None:
        calls.skip_without_conversion(route)
        inputs = route.of(calls.standard_pair(q_heads=4, kv_heads=2, seed=1), device)
        calls.assert_within_budget(*route.attend(inputs, splits=3), inputs, route.arm)

    @every_quantised_route
    @pytest.mark.parametrize(("k_scale", "v_scale"), [(0.02, 0.5), (0.5, 0.02)], ids=["k<v", "k>v"])
    def test_scales_are_not_confused(self, route: Route, k_scale: float, v_scale: float, device: str) -> None:
        calls.skip_without_conversion(route)
        shape = (4, calls.PAGE_SIZE, 1, calls.HEAD_DIM)
        q = torch.randn(1, calls.HEADS, calls.HEAD_DIM, generator=torch.Generator().manual_seed(2)).mul(0.03).half()
        rows = [list(range(47, 14, -1))]
        inputs = make(
            route, random_codes(shape, 3), random_codes(shape, 4), rows, device, k_scale=k_scale, v_scale=v_scale, q=q
        )
        calls.assert_within_budget(*route.attend(inputs), inputs, route.arm)
        exchanged = reference_attention(**inputs.arguments() | {"k_scale": v_scale, "v_scale": k_scale})
        with pytest.raises(AssertionError):
            calls.assert_within_budget(exchanged, None, inputs, route.arm)

    def test_wrong_outputs_are_outside_the_budget(self, device: str) -> None:
        """Zeros included, where every number is so small that an absolute tolerance would pass them."""
        inputs = calls.standard_pair(rows=2).quantised.to(device)
        small = replace(inputs, v_scale=inputs.v_scale * 1e-3)
        exact = reference_attention(**small.arguments())
        assert exact.abs().max() < 1e-3
        for wrong in (torch.zeros_like(exact), exact * 1.01, exact.roll(1, dims=-1)):
            with pytest.raises(AssertionError, match="rms error"):
                calls.assert_within_budget(wrong, None, small, ARMS["hoisted/bitcast"])
        calls.assert_within_budget(exact.half(), None, small, ARMS["hoisted/bitcast"])


class TestSelection:
    """Which listed entries count, and that nothing else is read."""

    @every_route
    @single_and_split
    def test_every_kind_of_entry_without_weight(self, route: Route, splits: int, device: str) -> None:
        calls.skip_without_conversion(route)
        inputs = route.of(calls.padded_pair(), device)
        out, lse = route.attend(inputs, splits=splits)
        calls.assert_within_budget(out, lse, inputs, route.arm)
        # rows: nothing valid, a negative request, a request past the table
        assert not out[3:].any()
        assert (lse[3:] == -math.inf).all()

    @every_route
    def test_only_tokens_on_pages_that_exist(self, route: Route, device: str) -> None:
        """Pages -1 and 4 of four, tokens beside the table, requests -1 and 99 of two; all that is not listed is NaN."""
        calls.skip_without_conversion(route)
        k, v = codes(0x7F), codes(0x7F)
        k[1, 0] = k[1, 15] = 0x00
        v[1, 0], v[1, 15] = 0x38, 0x48  # 1 and 4
        entries = [0, -1, 15, 16, 31, 32, 2147483647, -2147483648]
        requests, table = [0, 1, -1, 99], [[1, -1], [1, 4]]
        inputs = make(route, k, v, [entries] * 4, device, table=table, requests=requests, v_scale=0.75)
        out, lse = route.attend(inputs)
        assert (out[:2] == 2.5 * inputs.v_scale).all()
        assert (lse[:2] == 1.0).all()
        assert not out[2:].any()
        assert (lse[2:] == -math.inf).all()

    @every_route
    def test_unselected_bytes_do_not_matter(self, route: Route, device: str) -> None:
        """Padding points at page 0, which holds the bytes of something else."""
        calls.skip_without_conversion(route)
        selected = torch.zeros(4, calls.PAGE_SIZE, dtype=torch.bool)
        selected[1, [0, 5]] = selected[2, 1] = True
        shape = (4, calls.PAGE_SIZE, 1, calls.PUBLIC_HEAD_DIM)
        k, v = random_codes(shape, 5), random_codes(shape, 6)
        outputs = []
        for byte in (0x00, 0x7F, 0xFF):
            k[~selected] = v[~selected] = byte
            row = [0, 5, 17, -1, -1, -1, -1, -1]
            inputs = make(route, k, v, [row], device, k_scale=0.0123, v_scale=0.0371, q=0.01, group=calls.PUBLIC_HEADS)
            outputs.append(route.attend(inputs))
        for of_zeros, *of_nan in zip(*outputs, strict=True):
            assert of_zeros.isfinite().all()
            assert all(torch.equal(of_zeros, other) for other in of_nan)

    @every_route
    @single_and_split
    def test_a_row_without_tokens_leaves_its_neighbours_alone(self, route: Route, splits: int, device: str) -> None:
        calls.skip_without_conversion(route)
        inputs = make(route, codes(0x00), codes(0x30), [[3, 40], [], [5]], device, v_scale=0.75)
        out, lse = route.attend(inputs, splits=splits)
        assert not out[1].any()
        assert (lse[1] == -math.inf).all()
        assert (out[[0, 2]] == 0.5 * inputs.v_scale).all()
        assert (lse[0] == 1.0).all()
        assert (lse[2] == 0.0).all()

    @every_route
    @pytest.mark.parametrize("splits", [1, 2, 3], ids="splits{}".format)
    def test_duplicates_count_as_often_as_listed(self, route: Route, splits: int, device: str) -> None:
        calls.skip_without_conversion(route)
        v = codes(0x00)
        v[1, 7] = 0x38
        row = [-1] * calls.TOPK
        row[0], row[16], row[32] = 7, 7, 3  # one entry a tile, so that splits part the duplicates
        out, lse = route.attend(make(route, codes(0x00), v, [row], device), splits=splits)
        torch.testing.assert_close(out, torch.full_like(out, 2 / 3), rtol=2.0**-11, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log2(3)), rtol=1e-6, atol=0)

    @one_route_a_contraction
    @pytest.mark.parametrize("splits", [1, 2, 3, 16, 64], ids="splits{}".format)
    def test_a_short_row_over_many_splits(self, route: Route, splits: int, device: str) -> None:
        v = codes(0x00)
        v[1, 9] = 0x40  # 2
        out, lse = route.attend(make(route, codes(0x00), v, [[9, 1, 2, 3, 4]], device), splits=splits)
        torch.testing.assert_close(out, torch.full_like(out, 0.4), rtol=2.0**-11, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log2(5)), rtol=1e-6, atol=0)

    @one_route_a_contraction
    @single_and_split
    def test_padding_changes_nothing(self, route: Route, splits: int, device: str) -> None:
        """The last listed token bounds the tiles; a row with padding and one without agree bit for bit."""
        pair = calls.standard_pair()
        inputs = route.of(pair, device)
        short = replace(inputs, logical_indices=inputs.logical_indices[:, :20].contiguous())
        padded = replace(inputs, logical_indices=calls.listing(short.logical_indices.tolist()).to(device))
        for a, b in zip(route.attend(short, splits=splits), route.attend(padded, splits=splits), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("empty", ["rows", "topk", "requests", "pages"])
    @pytest.mark.parametrize("name", ["fp16", "hoisted/packed"], ids=["fp16", "hoisted_packed"])
    def test_nothing_to_attend_to(self, empty: str, name: str, device: str) -> None:
        route = Route(ARMS[name])
        rows, topk = (0 if empty == "rows" else 4), (0 if empty == "topk" else calls.TOPK)
        cache = codes(0x38, pages=0 if empty == "pages" else 4)
        indices = torch.zeros(rows, topk, dtype=torch.int32)
        inputs = make(route, cache, cache, indices, device, requests=[0] * rows)
        if empty == "requests":
            inputs = replace(inputs, block_table=inputs.block_table[:0])
        call = prepare(**inputs.arguments() | route.arm.options(), return_lse=True)
        assert call.kernels == ()
        out, lse = sparse_paged_attention(**inputs.arguments() | route.arm.options(), return_lse=True)
        assert out.shape == (rows, calls.HEADS, calls.HEAD_DIM)
        assert out.dtype == torch.float16
        assert not out.any()
        assert lse.shape == (rows, calls.HEADS)
        assert (lse == -math.inf).all()


class TestNumerics:
    @every_route
    def test_every_code_reaches_the_output(self, route: Route, device: str) -> None:
        calls.skip_without_conversion(route)
        k, v = codes(0x00, head_dim=256), codes(0x00, head_dim=256)
        v[1, 3, 0] = torch.arange(256, dtype=torch.uint8)
        out, _ = route.attend(make(route, k, v, [[3]], device, group=calls.PUBLIC_HEADS))
        expected = e4m3.decode(torch.arange(256, dtype=torch.uint8)).half().to(device).expand_as(out)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)

    @every_route
    @single_and_split
    def test_selected_nan_stays_visible(self, route: Route, splits: int, device: str) -> None:
        """Rows 0 and 1 select a NaN key of KV head 1, row 2 NaN values of KV head 0, row 3 neither."""
        calls.skip_without_conversion(route)
        k, v = codes(0x00, kv_heads=2), codes(0x38, kv_heads=2)
        k[1, 4, 1, 0], k[1, 5, 1, 7] = 0x7F, 0xFF
        v[1, 9, 0, 3], v[1, 9, 0, 8] = 0x7F, 0xFF
        inputs = make(route, k, v, [[20, 4], [20, 5], [20, 9], [20, 21]], device)
        out, lse = route.attend(inputs, splits=splits)
        wrong = torch.zeros_like(out, dtype=torch.bool)
        wrong[:2, calls.HEADS :] = True
        wrong[2, : calls.HEADS, [3, 8]] = True
        assert out[wrong].isnan().all()
        assert (out[~wrong] == 1.0).all()
        assert lse[:2, calls.HEADS :].isnan().all()
        assert (lse[:2, : calls.HEADS] == 1.0).all()
        assert (lse[2:] == 1.0).all()

    @every_route
    def test_raw_products_beyond_fp16_stay_finite(self, route: Route, device: str) -> None:
        """Raw sums 114,688 and 106,496; held in FP16 they give NaN, clamped to 65,504 they give 0.5."""
        calls.skip_without_conversion(route)
        k, v = codes(0x00, head_dim=256), codes(0x00, head_dim=256)
        k[1, 0], k[1, 1] = 0x7E, 0x7D
        v[1, 0] = 0x38
        quantised = route.arm.is_quantised
        inputs = make(route, k, v, [[0, 1]], device, k_scale=1e-3, group=calls.PUBLIC_HEADS)
        if not quantised:  # no scale to take 2^-10 out of, so the queries hold it
            inputs = replace(inputs, q=inputs.q * 2.0**-10)
        out, _ = route.attend(inputs)
        difference = 512.0 * (1e-3 if quantised else 2.0**-10)
        expected = 1 / (1 + math.exp(-difference))
        assert not quantised or abs(expected - 0.625275) < 1e-6
        # in the loop, 448e-3 and 416e-3 are rounded to FP16 first: each score moves by up to 2^-11 of itself
        slack = 2.0**-11 * (1 + (7.168 if route.arm.scale_placement == "in_loop" else 0.0))
        torch.testing.assert_close(out, torch.full_like(out, expected), rtol=slack, atol=0)

    @one_route_a_contraction
    @single_and_split
    def test_without_lse_the_output_is_the_same(self, route: Route, splits: int, device: str) -> None:
        inputs = route.of(calls.standard_pair(), device)
        with_lse, _ = route.attend(inputs, splits=splits)
        without, _ = route.attend(inputs, splits=splits, return_lse=False)
        assert torch.equal(with_lse, without)

    @pytest.mark.gpu("Triton's interpreter multiplies bfloat16 wrongly in tl.dot, and truncates where it casts to it")
    @pytest.mark.parametrize("route", routes(paths=["here"]))
    def test_bf16(self, route: Route, device: str) -> None:
        calls.skip_without_conversion(route)
        inputs = route.of(calls.standard_pair(rows=2, dtype=torch.bfloat16), device)
        out, lse = route.attend(inputs, splits=3)
        assert out.dtype == torch.bfloat16
        calls.assert_within_budget(out, lse, inputs, route.arm)


class TestLongRows:
    """2,051 entries: 32 tiles of 64 and three more, on one query head of 16 elements."""

    TOPK, TILE, HEAD_DIM = 2051, 64, 16

    def inputs(
        self, route: Route, device: str, *, k: int, v: int, tokens: int, q: float = 1.0, v_scale: float = 1.0
    ) -> AttentionInputs:
        caches = [torch.full((3, 2052, 1, self.HEAD_DIM), code, dtype=torch.uint8) for code in (k, v)]
        rows = calls.listing([list(range(tokens))], self.TOPK)
        return make(route, *caches, rows, device, table=[[2]], v_scale=v_scale, q=q, group=1)

    def attend(self, route: Route, inputs: AttentionInputs, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        calls.skip_without_conversion(route)
        return route.attend(inputs, splits=splits, tile=self.TILE, warps=4)

    @every_route
    def test_columns_past_the_end_get_no_weight(self, route: Route, device: str) -> None:
        """Every score is -20, so that one phantom column of score 0 would outweigh all the others."""
        inputs = self.inputs(route, device, k=0xBA, v=0x38, tokens=self.TOPK, q=4.0)
        out, lse = self.attend(route, inputs, 1)
        assert (out == 1.0).all()
        expected = math.log2(self.TOPK) - 20 * math.log2(math.e)
        torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=1e-6, atol=0)

    @one_route_a_contraction
    @pytest.mark.parametrize("splits", [1, 2, 8, 33], ids="splits{}".format)
    def test_sums_beyond_fp16_stay_exact(self, route: Route, splits: int, device: str) -> None:
        """The un-normalised sum is 918,848."""
        inputs = self.inputs(route, device, k=0x00, v=0x7E, tokens=self.TOPK, v_scale=1 / 448)
        out, lse = self.attend(route, inputs, splits)
        expected = 448 * inputs.v_scale
        torch.testing.assert_close(out, torch.full_like(out, expected), rtol=2.0**-10, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log2(self.TOPK)), rtol=1e-6, atol=0)

    @one_route_a_contraction
    @pytest.mark.parametrize("splits", [1, 2, 4, 8], ids="splits{}".format)
    def test_v_scale_is_applied_once_at_every_split_count(self, route: Route, splits: int, device: str) -> None:
        inputs = self.inputs(route, device, k=0x00, v=0x38, tokens=256, v_scale=0.25)
        out, lse = self.attend(route, inputs, splits)
        assert (out == 0.25).all()
        assert (lse == 8.0).all()

    @every_quantised_route
    @single_and_split
    def test_v_scale_never_reaches_the_lse(self, route: Route, splits: int, device: str) -> None:
        results = {}
        for v_scale in (0.25, 0.0371):
            inputs = self.inputs(route, device, k=0x31, v=0x38, tokens=100, v_scale=v_scale)
            out, results[v_scale] = self.attend(route, inputs, splits)
            torch.testing.assert_close(out, torch.full_like(out, v_scale), rtol=2.0**-11, atol=0)
        assert torch.equal(results[0.25], results[0.0371])

    @pytest.mark.parametrize("topk", [1, 2, 15, 16, 17, 63, 65], ids="topk{}".format)
    @pytest.mark.parametrize("route", routes(names=["hoisted/packed", "hoisted/packed+vector"], paths=["here"]))
    def test_lengths_beside_a_multiple_of_the_tile(self, route: Route, topk: int, device: str) -> None:
        inputs = self.inputs(route, device, k=0xBA, v=0x38, tokens=topk, q=4.0)
        inputs = replace(inputs, logical_indices=inputs.logical_indices[:, :topk].contiguous())
        for splits in (1, 3):
            out, _ = route.attend(inputs, splits=splits)
            assert (out == 1.0).all()


class TestLayout:
    @pytest.mark.parametrize(
        ("q_heads", "kv_heads", "head_dim"),
        [(1, 1, 64), (5, 1, 64), (6, 1, 16), (12, 2, 16), (12, 1, 64), (16, 1, 16), (24, 2, 64)],
        ids=str,
    )
    @pytest.mark.parametrize(
        "route",
        routes(names=["fp16", "hoisted/packed", "fp16+vector", "hoisted/packed+vector"], paths=["here"]),
    )
    def test_groups_and_head_dims_into_a_wider_buffer(
        self, route: Route, q_heads: int, kv_heads: int, head_dim: int, device: str
    ) -> None:
        pair = calls.workloads.random_pages(
            rows=1, topk=9, pages_per_request=2, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, seed=7
        )
        inputs = route.of(pair, device)
        wide = torch.full((1, q_heads + 2, head_dim), 7.0, dtype=torch.float16, device=device)
        out, lse = route.attend(inputs, out=wide[:, :q_heads])
        assert out.data_ptr() == wide.data_ptr()
        assert (wide[:, q_heads:] == 7.0).all()
        calls.assert_within_budget(out, lse, inputs, route.arm)

    @every_route
    def test_each_query_head_reads_its_own_kv_head(self, route: Route, device: str) -> None:
        calls.skip_without_conversion(route)
        v = codes(0x38, kv_heads=4)
        for head in range(4):
            v[:, :, head] = 0x38 + 8 * head  # 1, 2, 4, 8
        inputs = make(route, codes(0x00, kv_heads=4), v, [[1]], device)
        out, _ = route.attend(inputs)
        assert out[0, :, 0].tolist() == [2.0 ** (head // 2) for head in range(8)]

    @one_route_a_contraction
    @single_and_split
    def test_output_of_strided_rows(self, route: Route, splits: int, device: str) -> None:
        inputs = route.of(calls.standard_pair(rows=2), device)
        plain, _ = route.attend(inputs, splits=splits)
        wide = torch.full((2, 3, calls.HEADS, calls.HEAD_DIM), 7.0, dtype=torch.float16, device=device)
        strided, _ = route.attend(inputs, splits=splits, out=wide[:, 1])
        assert torch.equal(strided, plain)
        assert (wide[:, [0, 2]] == 7.0).all()

    @every_route
    def test_strided_caches_give_the_same_bits(self, route: Route, device: str) -> None:
        """K and V beside each other in one buffer; and with page, slot and head strides of their own."""
        calls.skip_without_conversion(route)
        inputs = route.of(calls.standard_pair(q_heads=4, kv_heads=2), device)
        k, v = inputs.k_cache, inputs.v_cache
        both = torch.stack([k, v], dim=1)
        beside = replace(inputs, k_cache=both[:, 0], v_cache=both[:, 1])
        wide_k, wide_v = torch.cat([v, k, v], dim=-1), torch.cat([v, k], dim=-1)
        apart = replace(
            inputs,
            k_cache=wide_k.split(calls.HEAD_DIM, dim=-1)[1],
            v_cache=wide_v.split(calls.HEAD_DIM, dim=-1)[0],
        )
        expected = route.attend(inputs)
        for moved in (beside, apart):
            assert moved.k_cache.stride() != k.stride()
            for a, b in zip(expected, route.attend(moved), strict=True):
                assert torch.equal(a, b)

    @pytest.mark.parametrize("route", routes(names=["hoisted/packed", "hoisted/packed+vector", "hoisted/native"]))
    def test_float8_caches_read_like_their_bytes(self, route: Route, device: str) -> None:
        calls.skip_without_conversion(route)
        inputs = route.of(calls.standard_pair(), device)
        typed = replace(
            inputs,
            k_cache=inputs.k_cache.view(torch.float8_e4m3fn),
            v_cache=inputs.v_cache.view(torch.float8_e4m3fn),
        )
        for a, b in zip(route.attend(inputs), route.attend(typed), strict=True):
            assert torch.equal(a, b)

    @one_route_a_contraction
    @pytest.mark.parametrize("far", ["k_cache", "v_cache"])
    def test_a_page_2_gib_into_the_buffer(self, route: Route, far: str, device: str) -> None:
        page = 2**31 // 4096
        pair = calls.standard_pair(q_heads=calls.PUBLIC_HEADS, head_dim=calls.PUBLIC_HEAD_DIM)
        near = replace(route.of(pair, device), logical_indices=calls.listing([list(range(9))]).to(device))
        small = near.block_table.new_tensor([[1]])
        buffer = torch.empty(2**31 + 4096, dtype=torch.uint8, device=device)
        large = buffer.view(page + 1, 16, 1, 256)
        large[page] = getattr(near, far)[1]
        other = {"k_cache": "v_cache", "v_cache": "k_cache"}[far]
        moved = replace(
            near,
            block_table=small.new_tensor([[page]]),
            **{far: large, other: getattr(near, other)[1].expand(page + 1, 16, 1, 256)},
        )
        expected = route.attend(replace(near, block_table=small))
        for a, b in zip(expected, route.attend(moved), strict=True):
            assert torch.equal(a, b)


class TestPublicFunction:
    def test_returns_what_the_prepared_call_writes(self, device: str) -> None:
        route = Route(ARMS["hoisted/packed"])
        inputs = route.of(calls.standard_pair(), device)
        options = route.arm.options() | {"launch_profile": calls.LaunchConfig(calls.TILE, 3, 4)}
        out, lse = sparse_paged_attention(**inputs.arguments() | options, return_lse=True)
        for a, b in zip((out, lse), route.attend(inputs, splits=3), strict=True):
            assert torch.equal(a, b)
        given = torch.full_like(out, math.nan)
        returned = sparse_paged_attention(**inputs.arguments() | options, out=given)
        assert returned is given
        assert torch.equal(given, out)

    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
    def test_defaults(self, kv_cache_dtype: str, device: str) -> None:
        """No option given: what the machine is fastest with, in its own table's launch."""
        pair = calls.standard_pair()
        inputs = (pair.unquantised if kv_cache_dtype == "auto" else pair.quantised).to(device)
        out = sparse_paged_attention(**inputs.arguments())
        arm = ARMS["fp16"] if kv_cache_dtype == "auto" else ARMS["hoisted/bitcast"]
        calls.assert_within_budget(out, None, inputs, arm)
