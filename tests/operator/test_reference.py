"""The reference attention against hand-computed values and an element-by-element restatement of its semantics."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from qsa_kernels import e4m3
from qsa_kernels.measure import workloads
from qsa_kernels.measure.workloads import AttentionInputs
from qsa_kernels.reference import reference_attention


def _tokens(inputs: AttentionInputs, row: int) -> Iterator[tuple[int, int]]:
    """Physical (page, slot) of every entry of a row that counts."""
    request = int(inputs.token_to_req[row])
    page_size = inputs.k_cache.shape[1]
    for token in inputs.logical_indices[row].tolist():
        if 0 <= request < inputs.block_table.shape[0] and 0 <= token < inputs.block_table.shape[1] * page_size:
            page = int(inputs.block_table[request, token // page_size])
            if 0 <= page < inputs.k_cache.shape[0]:
                yield page, token % page_size


def _by_the_book(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """One scalar at a time, natural exponentials, no shifting: right for moderate scores and slow."""
    rows, q_heads, head_dim = inputs.q.shape
    group = q_heads // inputs.k_cache.shape[2]
    out, lse = torch.zeros(rows, q_heads, head_dim, dtype=torch.float64), torch.full((rows, q_heads), -math.inf)

    def element(cache: torch.Tensor, scale: float, page: int, slot: int, head: int) -> list[float]:
        stored = cache[page, slot, head // group]
        values = e4m3.decode(stored) if inputs.kv_cache_dtype == "fp8_e4m3" else stored
        return [value * scale for value in values.tolist()]

    for row in range(rows):
        places = list(_tokens(inputs, row))
        for head in range(q_heads) if places else ():
            q = inputs.q[row, head].tolist()
            weights = []
            for page, slot in places:
                key = element(inputs.k_cache, inputs.k_scale, page, slot, head)
                weights.append(math.exp(math.fsum(a * b for a, b in zip(q, key, strict=True)) / math.sqrt(head_dim)))
            values = [element(inputs.v_cache, inputs.v_scale, page, slot, head) for page, slot in places]
            for d in range(head_dim):
                out[row, head, d] = math.fsum(w * v[d] for w, v in zip(weights, values, strict=True)) / sum(weights)
            lse[row, head] = math.log2(math.fsum(weights))
    return out, lse


def _fp8(**changes: Any) -> dict[str, Any]:
    """A one-row call: 6 query heads on one KV head, two pages of 16, everything zero but what `changes` says."""
    head_dim = changes.pop("head_dim", 256)
    arguments: dict[str, Any] = {
        "q": torch.ones(1, 6, head_dim, dtype=torch.float16),
        "k_cache": torch.zeros(3, 16, 1, head_dim, dtype=torch.uint8),
        "v_cache": torch.zeros(3, 16, 1, head_dim, dtype=torch.uint8),
        "logical_indices": torch.tensor([[0, 1]], dtype=torch.int32),
        "block_table": torch.tensor([[1, 2]], dtype=torch.int32),
        "token_to_req": torch.zeros(1, dtype=torch.int32),
        "kv_cache_dtype": "fp8_e4m3",
        "k_scale": 0.0123,
        "v_scale": 0.0371,
    }
    return {**arguments, **changes}


@pytest.mark.parametrize(
    "pair",
    [
        workloads.random_pages(rows=3, topk=13, head_dim=16, seed=1),
        workloads.padded_and_duplicates(head_dim=16, seed=2),
        workloads.all_codes(rows=1, head_dim=16, seed=3),
        workloads.published_shapes(topks=[10], head_dim=16, seed=4)[0],
    ],
    ids=lambda pair: pair.name,
)
@pytest.mark.parametrize("cache", ["quantised", "unquantised"])
def test_matches_scalar_restatement(pair: workloads.QuantisedPair, cache: str) -> None:
    inputs = getattr(pair, cache)
    expected, expected_lse = _by_the_book(inputs)
    out, lse = reference_attention(**inputs.arguments(), return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse.double(), rtol=1e-6, atol=0)
    single = reference_attention(**inputs.arguments(), dtype=torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_raw_dot_beyond_fp16(storage: torch.dtype) -> None:
    inputs = _fp8(k_scale=1e-3, v_scale=1.0)
    inputs["k_cache"][1, 0], inputs["k_cache"][1, 1] = 0x7E, 0x7D
    inputs["v_cache"][1, 0] = 0x38
    inputs["k_cache"], inputs["v_cache"] = inputs["k_cache"].view(storage), inputs["v_cache"].view(storage)
    out, lse = reference_attention(**inputs, return_lse=True)
    expected = 1 / (1 + math.exp(6.656 - 7.168))
    assert out.flatten().tolist() == pytest.approx([expected] * out.numel(), rel=1e-6)
    assert expected == pytest.approx(0.625275, abs=5e-7)
    assert lse.flatten().tolist() == pytest.approx([math.log2(math.exp(7.168) + math.exp(6.656))] * 6, rel=1e-6)


def test_long_uniform_row_does_not_drift() -> None:
    inputs = _fp8(
        k_cache=torch.zeros(1, 2052, 1, 256, dtype=torch.uint8),
        v_cache=torch.full((1, 2052, 1, 256), 0x7E, dtype=torch.uint8),
        logical_indices=torch.arange(2051, dtype=torch.int32)[None],
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        v_scale=1 / 448,
    )
    out, lse = reference_attention(**inputs, return_lse=True)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-7, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log2(2051)), rtol=1e-12, atol=0)


def test_no_weight_for_lanes_beyond_topk() -> None:
    inputs = _fp8(
        k_cache=torch.full((1, 2052, 1, 256), 0xBA, dtype=torch.uint8),
        v_cache=torch.full((1, 2052, 1, 256), 0x38, dtype=torch.uint8),
        logical_indices=torch.arange(2051, dtype=torch.int32)[None],
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        k_scale=1.0,
        v_scale=1.0,
    )
    assert reference_attention(**inputs).unique().tolist() == [1.0]


def test_lse_never_contains_the_v_scale() -> None:
    inputs = _fp8()
    inputs["v_cache"].fill_(0x38)
    one, lse_one = reference_attention(**{**inputs, "v_scale": 0.25}, return_lse=True)
    other, lse_other = reference_attention(**{**inputs, "v_scale": 0.0371}, return_lse=True)
    assert one.unique().tolist() == [0.25]
    assert other.unique().tolist() == pytest.approx([0.0371], rel=1e-6)
    assert torch.equal(lse_one, lse_other)


def test_k_and_v_scale_are_not_interchangeable() -> None:
    inputs = workloads.random_pages(seed=5).quantised
    swapped = replace(inputs, k_scale=inputs.v_scale, v_scale=inputs.k_scale)
    expected, _ = _by_the_book(swapped)
    out = reference_attention(**swapped.arguments())
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(out, reference_attention(**inputs.arguments()), rtol=1e-3)


@pytest.mark.parametrize("poison", [0x7F, 0xFF], ids=hex)
def test_unselected_bytes_never_matter(poison: int) -> None:
    indices = torch.tensor([[0, 5, 17, -1, -1, -1, -1, -1]], dtype=torch.int32)
    outputs = []
    for fill in (0x00, poison):
        generator = torch.Generator().manual_seed(7)
        inputs = _fp8(logical_indices=indices)
        for name in ("k_cache", "v_cache"):
            inputs[name].fill_(fill)
            for page, slot in ((1, 0), (1, 5), (2, 1)):
                inputs[name][page, slot] = torch.randint(0, 0x7F, (1, 256), dtype=torch.uint8, generator=generator)
        outputs.append(reference_attention(**inputs))
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)


def test_selected_nan_stays_visible() -> None:
    inputs = _fp8(
        q=torch.ones(1, 4, 16, dtype=torch.float16),
        k_cache=torch.zeros(3, 16, 2, 16, dtype=torch.uint8),
        v_cache=torch.zeros(3, 16, 2, 16, dtype=torch.uint8),
    )
    inputs["v_cache"][1, 1, 1, 3] = 0xFF
    out = reference_attention(**inputs)
    assert out.isnan().nonzero().tolist() == [[0, 2, 3], [0, 3, 3]]
    inputs["k_cache"][1, 0, 0, 0] = 0x7F
    out, lse = reference_attention(**inputs, return_lse=True)
    assert out[0, :2].isnan().all()
    assert lse[0].isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize("table", [[[1, -1]], [[1, 4]]], ids=["page-1", "page-past-the-cache"])
def test_entries_out_of_range_carry_no_weight(table: list[list[int]]) -> None:
    entries = [0, -1, 15, 16, 31, 32, 2**31 - 1, -(2**31)]
    inputs = _fp8(
        k_cache=torch.full((4, 16, 1, 256), 0x7F, dtype=torch.uint8),
        v_cache=torch.full((4, 16, 1, 256), 0x7F, dtype=torch.uint8),
        logical_indices=torch.tensor([entries], dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32),
        v_scale=0.5,
    )
    inputs["k_cache"][1, [0, 15]] = 0x00
    inputs["v_cache"][1, 0], inputs["v_cache"][1, 15] = 0x38, 0x44  # 1.0 and 3.0
    assert reference_attention(**inputs).unique().tolist() == [1.0]


@pytest.mark.parametrize("request_id", [-1, 1, 99])
def test_row_without_valid_entry(request_id: int) -> None:
    inputs = _fp8(
        q=torch.ones(3, 6, 256, dtype=torch.float16),
        logical_indices=torch.tensor([[0, 1], [0, 1], [-1, -1]], dtype=torch.int32),
        token_to_req=torch.tensor([0, request_id, 0], dtype=torch.int32),
    )
    inputs["v_cache"].fill_(0x38)
    out, lse = reference_attention(**inputs, return_lse=True)
    assert out[1:].unique().tolist() == [0.0]
    assert lse[1:].unique().tolist() == [-math.inf]
    assert lse[0].tolist() == [1.0] * 6


def test_duplicates_count_as_often_as_listed() -> None:
    inputs = _fp8(logical_indices=torch.tensor([[7, 7, 3]], dtype=torch.int32), v_scale=0.75)
    inputs["v_cache"][1, 7] = 0x38
    out, lse = reference_attention(**inputs, return_lse=True)
    torch.testing.assert_close(out, torch.full_like(out, 0.75 * 2 / 3), rtol=1e-15, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log2(3)), rtol=1e-15, atol=0)


@pytest.mark.parametrize("size", ["rows", "topk", "requests", "pages"])
def test_zero_sizes(size: str) -> None:
    rows, topk = (0 if size == "rows" else 4), (0 if size == "topk" else 2)
    inputs = _fp8(
        q=torch.ones(rows, 6, 256, dtype=torch.float16),
        logical_indices=torch.zeros(rows, topk, dtype=torch.int32),
        token_to_req=torch.zeros(rows, dtype=torch.int32),
        block_table=torch.zeros(0 if size == "requests" else 1, 2, dtype=torch.int32),
    )
    if size == "pages":
        inputs["k_cache"], inputs["v_cache"] = inputs["k_cache"][:0], inputs["v_cache"][:0]
    out, lse = reference_attention(**inputs, return_lse=True)
    assert out.shape == (rows, 6, 256)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 1), (12, 2), (24, 2), (5, 1)], ids=str)
def test_query_heads_read_their_own_kv_head(q_heads: int, kv_heads: int) -> None:
    inputs = _fp8(
        q=torch.ones(1, q_heads, 16, dtype=torch.float16),
        k_cache=torch.zeros(3, 16, kv_heads, 16, dtype=torch.uint8),
        v_cache=torch.zeros(3, 16, kv_heads, 16, dtype=torch.uint8),
        v_scale=1.0,
    )
    for head in range(kv_heads):
        inputs["v_cache"][:, :, head] = 0x38 + 8 * head  # 1.0, 2.0
    out = reference_attention(**inputs)[0, :, 0]
    assert out.tolist() == [2.0 ** (head // (q_heads // kv_heads)) for head in range(q_heads)]


def test_strided_caches_read_like_contiguous_ones() -> None:
    inputs = workloads.random_pages(seed=8).quantised
    shape = inputs.k_cache.shape
    shared = torch.full((shape[0], 2, *shape[1:]), e4m3.NAN_CODE, dtype=torch.uint8)
    shared[:, 0] = inputs.k_cache
    wide = torch.full((shape[0], 3, *shape[1:]), e4m3.NAN_CODE, dtype=torch.uint8)
    wide[:, 1] = inputs.v_cache
    strided = replace(inputs, k_cache=shared[:, 0], v_cache=wide[:, 1])
    assert torch.equal(reference_attention(**strided.arguments()), reference_attention(**inputs.arguments()))


def test_slices_of_the_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = workloads.random_pages(rows=7, seed=9).quantised
    whole = reference_attention(**inputs.arguments(), return_lse=True)
    monkeypatch.setattr("qsa_kernels.reference._GATHERED_ELEMENTS", 2 * inputs.topk * 2 * 64)
    sliced = reference_attention(**inputs.arguments(), return_lse=True)
    for a, b in zip(whole, sliced, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


_WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "fnuz-cache": (
        {"k_cache": torch.zeros(3, 16, 1, 256, dtype=torch.uint8).view(torch.float8_e4m3fnuz)},
        TypeError,
        r"k_cache: .*torch\.float8_e4m3fn, got torch\.float8_e4m3fnuz",
    ),
    "e5m2-cache": (
        {"v_cache": torch.zeros(3, 16, 1, 256, dtype=torch.uint8).view(torch.float8_e5m2)},
        TypeError,
        r"v_cache: .*torch\.float8_e4m3fn, got torch\.float8_e5m2",
    ),
    "fp16-cache-as-codes": (
        {"k_cache": torch.zeros(3, 16, 1, 256, dtype=torch.float16)},
        TypeError,
        r"k_cache: .*torch\.uint8.*got torch\.float16",
    ),
    "codes-as-fp16-cache": (
        {"kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0},
        TypeError,
        "k_cache: expected floating point for kv_cache_dtype='auto', got torch.uint8",
    ),
    "cache-dtype-name": ({"kv_cache_dtype": "fp8"}, ValueError, "kv_cache_dtype: expected 'auto' or 'fp8_e4m3'"),
    "not-a-tensor": ({"block_table": [[1, 2]]}, TypeError, r"block_table: expected a torch.Tensor .*got list"),
    "integer-q": ({"q": torch.ones(1, 6, 256, dtype=torch.int32)}, TypeError, "q: expected one of"),
    "long-indices": ({"logical_indices": torch.tensor([[0, 1]])}, TypeError, "logical_indices: expected torch.int32"),
    "rank": ({"token_to_req": torch.zeros(1, 1, dtype=torch.int32)}, ValueError, r"token_to_req: expected \[rows\]"),
    "rows": ({"token_to_req": torch.zeros(2, dtype=torch.int32)}, ValueError, r"token_to_req: .* 1 rows.*\[2\]"),
    "v-shape": ({"v_cache": torch.zeros(3, 8, 1, 256, dtype=torch.uint8)}, ValueError, "v_cache: expected the shape"),
    "head-dim": ({"q": torch.ones(1, 6, 128, dtype=torch.float16)}, ValueError, "k_cache: expected .*head_dim 128"),
    "head-groups": (
        {
            "k_cache": torch.zeros(3, 16, 4, 256, dtype=torch.uint8),
            "v_cache": torch.zeros(3, 16, 4, 256, dtype=torch.uint8),
        },
        ValueError,
        "multiple of kv_heads, got 6 and 4",
    ),
    "device": ({"q": torch.ones(1, 6, 256, device="meta")}, ValueError, "k_cache: expected device meta of q, got cpu"),
    "precision": ({"dtype": torch.float16}, TypeError, r"dtype: expected torch\.float32 or torch\.float64"),
    "k-scale": ({"k_scale": -1.0}, ValueError, "k_scale: expected a finite positive FP32 number, got -1.0"),
    "v-scale": ({"v_scale": torch.ones(2)}, ValueError, r"v_scale: .*got shape \[2\]"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    changes, error, message = _WRONG[name]
    with pytest.raises(error, match=message):
        reference_attention(**_fp8(**changes))


def test_a_scale_for_an_unquantised_cache_is_refused() -> None:
    inputs = replace(workloads.random_pages().unquantised, v_scale=0.5)
    with pytest.raises(ValueError, match=r"v_scale: expected 1\.0 for kv_cache_dtype='auto'"):
        reference_attention(**inputs.arguments())
