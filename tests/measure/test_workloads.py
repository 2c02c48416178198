"""The input builders: shapes, seeds, selections, and that both twins describe the same call."""

import math

import pytest
import torch

from qsa_kernels import e4m3
from qsa_kernels.measure import workloads
from qsa_kernels.measure.workloads import QuantisedPair, neighbour_overlap
from qsa_kernels.reference import reference_attention

BUILDERS = {
    "published": lambda seed: workloads.published_shapes(topks=[33], seed=seed)[0],
    "all-codes": lambda seed: workloads.all_codes(seed=seed),
    "random-pages": lambda seed: workloads.random_pages(seed=seed),
    "padded-duplicates": lambda seed: workloads.padded_and_duplicates(seed=seed),
    "decode-random": lambda seed: workloads.decode(2, 90, topk=35, head_dim=32, page_size=16, seed=seed),
    "decode-clustered": lambda seed: workloads.decode(
        2, 90, topk=35, head_dim=32, page_size=16, selection="clustered", seed=seed
    ),
    "prefill": lambda seed: workloads.prefill(20, 90, topk=35, head_dim=32, page_size=16, seed=seed),
}


@pytest.fixture(params=BUILDERS)
def builder(request: pytest.FixtureRequest):
    return BUILDERS[request.param]


def _tensors(pair: QuantisedPair) -> list[torch.Tensor]:
    calls = (pair.unquantised, pair.quantised)
    return [value for call in calls for value in call.arguments().values() if isinstance(value, torch.Tensor)]


def test_the_seed_decides(builder) -> None:
    first, again, other = ([tensor.nan_to_num() for tensor in _tensors(builder(seed))] for seed in (3, 3, 4))
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_twins_share_everything_but_the_cache(builder) -> None:
    pair = builder(0)
    for name in ("q", "logical_indices", "block_table", "token_to_req"):
        assert getattr(pair.unquantised, name) is getattr(pair.quantised, name)
    assert (pair.unquantised.kv_cache_dtype, pair.quantised.kv_cache_dtype) == ("auto", "fp8_e4m3")
    assert pair.quantised.k_scale != pair.quantised.v_scale
    for scale in (pair.quantised.k_scale, pair.quantised.v_scale):
        assert math.frexp(scale)[0] != 0.5, "a power of two hides rounding"
    for name in ("k_cache", "v_cache"):
        original, codes = getattr(pair.unquantised, name), getattr(pair.quantised, name)
        scale = pair.quantised.k_scale if name == "k_cache" else pair.quantised.v_scale
        decoded = e4m3.decode(codes).double() * scale
        assert torch.equal(original.isnan(), decoded.isnan())
        # Half a step of a 3-bit mantissa, or half the smallest code.
        bound = torch.maximum(original.double().abs() / 16, torch.tensor(scale * 2.0**-10)) * (1 + 1e-6)
        assert ((original.double() - decoded).abs() <= bound).logical_or(original.isnan()).all()
    out, reference = (reference_attention(**call.arguments()) for call in (pair.quantised, pair.unquantised))
    assert out.isfinite().all()
    assert (out - reference).norm() < 0.1 * reference.norm()


def test_published_shapes() -> None:
    pairs = workloads.published_shapes()
    assert [tuple(pair.quantised.k_cache.shape) for pair in pairs] == [
        (2, 8, 1, 256),
        (1, 40, 1, 256),
        (1, 2052, 1, 256),
    ]
    for pair, topk in zip(pairs, (10, 33, 2051), strict=True):
        call = pair.unquantised
        assert call.q.shape == (3, 6, 256)
        assert call.logical_indices.shape == (3, topk)
        assert [len(set(row)) for row in call.logical_indices.tolist()] == [topk] * 3
        assert pair.quantised.k_scale == pytest.approx(float(call.k_cache.abs().max()) / 448, rel=1e-6)
        assert pair.quantised.v_scale == pytest.approx(float(call.v_cache.abs().max()) / 448, rel=1e-6)
    spread = [float(getattr(pairs[2].unquantised, name).float().std()) for name in ("q", "k_cache", "v_cache")]
    assert spread == pytest.approx([0.2, 0.35, 0.3], rel=0.03)


def test_one_request_takes_any_length() -> None:
    call = workloads.one_request(64, pages=5, page_size=13, q_heads=4, kv_heads=2, head_dim=32).quantised
    assert call.name == "one-request-topk64"
    assert call.k_cache.shape == (5, 13, 2, 32)
    assert all(len(set(row)) == 64 and max(row) < 65 for row in call.logical_indices.tolist())


def test_published_shapes_refuses_others() -> None:
    with pytest.raises(ValueError, match=r"topks: expected published shapes \[10, 33, 2051\], got \[64\]"):
        workloads.published_shapes(topks=[10, 64])


def test_all_codes_selects_every_finite_code_at_every_element() -> None:
    call = workloads.all_codes(head_dim=16).quantised
    page, slot = call.block_table[0, call.logical_indices[0].long() // 16].long(), call.logical_indices[0].long() % 16
    for cache in (call.k_cache, call.v_cache):
        selected = cache[page, slot, 0]
        for column in selected.T.tolist():
            assert sorted(column) == [code for code in range(256) if code & 0x7F != 0x7F]
        assert (cache == e4m3.NAN_CODE).sum() == 2 * 16


@pytest.mark.parametrize("selection", ["random", "clustered"])
@pytest.mark.parametrize("topk", [1, 3, 16, 35])
def test_decode_selects_distinct_tokens_of_the_context(selection: str, topk: int) -> None:
    call = workloads.decode(3, 90, topk=topk, head_dim=16, page_size=16, selection=selection).quantised
    assert call.logical_indices.shape == (3, topk)
    for row in call.logical_indices.tolist():
        assert len(set(row)) == topk
        assert all(0 <= token < 90 for token in row)
        if selection == "clustered":
            newest = topk % 4
            assert row[topk - newest :] == list(range(90 - newest, 90))
            blocks = [row[i : i + 4] for i in range(0, topk - newest, 4)]
            assert all(block == list(range(block[0], block[0] + 4)) and block[0] % 4 == 0 for block in blocks)
    assert sorted(call.block_table.flatten().tolist()) == list(range(18))
    assert call.token_to_req.tolist() == [0, 1, 2]


@pytest.mark.parametrize("context", [1, 20, 35])
def test_decode_lists_a_short_context_whole(context: int) -> None:
    call = workloads.decode(2, context, topk=35, head_dim=16, page_size=16).quantised
    for row in call.logical_indices.tolist():
        assert sorted(row[:context]) == list(range(context))
        assert row[context:] == [-1] * (35 - context)


@pytest.mark.parametrize("wanted", [0.0, 0.5, 0.9, 1.0])
def test_prefill_neighbours_share_the_wanted_blocks(wanted: float) -> None:
    pair = workloads.prefill(64, 4096, overlap=wanted, topk=515, head_dim=16, page_size=784)
    indices = pair.quantised.logical_indices
    for position, row in zip(range(4096 - 64, 4096), indices.tolist(), strict=True):
        assert len(set(row)) == 515
        assert all(0 <= token <= position for token in row)
        assert row[-3:] == [position - 2, position - 1, position]
    assert pair.neighbour_overlap == neighbour_overlap(indices)
    assert pair.neighbour_overlap == pytest.approx(wanted, abs=0.02)


def test_fresh_prefill_lists_everything_until_topk() -> None:
    call = workloads.prefill(60, 60, topk=35, head_dim=16, page_size=16).quantised
    for position, row in enumerate(call.logical_indices.tolist()):
        listed = [token for token in row if token >= 0]
        assert len(listed) == len(set(listed)) == min(position + 1, 35)
        assert max(listed) == position


def test_neighbour_overlap_counts_blocks() -> None:
    rows = [[0, 1, 2, 3, 8, 9, -1, -1], [0, 3, 12, 13, 14, 15, -1, -1], [12, 12, 12, 0, 4, 5, 20, 21]]
    # Blocks {0, 2}, {0, 3}, {0, 1, 3, 5}: one of two, then two of four.
    assert neighbour_overlap(torch.tensor(rows, dtype=torch.int32)) == 0.5
    assert neighbour_overlap(torch.tensor(rows[:1], dtype=torch.int32)) == 1.0


def test_from_tokens_keeps_every_token_at_its_position() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 6, 16, generator=generator).half()
    k, v = (torch.randn(37, 2, 16, generator=generator).half() for _ in range(2))
    indices = torch.tensor([[0, 36, 5], [16, -1, 31]], dtype=torch.int32)
    call = workloads.from_tokens("captured", q, k, v, indices, page_size=16).unquantised
    out = reference_attention(**call.arguments())
    for row, tokens in enumerate(([0, 36, 5], [16, 31])):
        for head in range(6):
            scores = (k[tokens, head // 3].double() @ q[row, head].double()) / 4
            torch.testing.assert_close(out[row, head], scores.softmax(0) @ v[tokens, head // 3].double())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: workloads.decode(0, 8), "concurrency: expected at least 1, got 0"),
        (
            lambda: workloads.decode(1, 8, selection="sorted"),
            "selection: expected 'random' or 'clustered', got 'sorted'",
        ),
        (lambda: workloads.prefill(9, 8), "context: expected at least rows = 9 tokens, got 8"),
        (lambda: workloads.prefill(2, 8, overlap=1.5), "overlap: expected a share from 0 to 1, got 1.5"),
        (lambda: workloads.random_pages(topk=81), "topk: expected at most 80 tokens, got 81"),
    ],
    ids=["concurrency", "selection", "context", "overlap", "topk"],
)
def test_wrong_sizes_are_named(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_to_moves_both_twins() -> None:
    pair = workloads.random_pages().to("meta")
    assert {tensor.device.type for tensor in _tensors(pair)} == {"meta"}
