"""The block model against hand-worked sizes, the public record, and the properties that any pool has to keep."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qsa_kernels.measure import capacity, capacity_reported
from qsa_kernels.measure.capacity import GIB, BlockLayout, Deployment

POOLS = st.integers(min_value=0, max_value=64 * GIB)
DTYPES = st.sampled_from(capacity.DTYPES)


@st.composite
def deployments(draw: st.DrawFn, shortest: int = 1) -> Deployment:
    mtp = draw(st.integers(0, 5))
    return Deployment(
        tp=draw(st.sampled_from([1, 2, 4])),
        mtp=mtp,
        prefix_caching=mtp > 0 or draw(st.booleans()),
        max_model_len=draw(st.integers(shortest, 600_000)),
    )


def layout(dtype: str, **setup: object) -> BlockLayout:
    return Deployment(**setup).layout(dtype)  # type: ignore[arg-type]


# Geometry -------------------------------------------------------------------------------------------------------------

BLOCKS = {
    (1, 0): (1568, 3136),
    (1, 1): (1584, 3152),
    (1, 2): (1600, 3184),
    (1, 3): (1600, 3200),
    (1, 4): (1616, 3216),
    (1, 5): (1616, 3232),
    (4, 0): (784, 1568),
    (4, 1): (800, 1584),
    (4, 2): (800, 1600),
    (4, 3): (800, 1600),
    (4, 4): (816, 1616),
    (4, 5): (816, 1616),
}
# Half the state and half the K/V heads a rank: two ranks have the blocks of one.
BLOCKS |= {(2, mtp): BLOCKS[1, mtp] for mtp in range(6)}


@pytest.mark.parametrize(("tp", "mtp"), sorted(BLOCKS), ids=lambda value: str(value))
def test_block_sizes_are_the_published_ones(tp: int, mtp: int) -> None:
    deployment = Deployment(tp=tp, mtp=mtp, prefix_caching=mtp > 0)
    assert tuple(one.block_tokens for one in deployment.layouts) == BLOCKS[tp, mtp]


def test_block_table_covers_every_supported_setup_once() -> None:
    table = capacity.block_sizes()
    columns = ["tp", "mtp", "block_tokens_fp16", "block_tokens_e4m3"]
    assert len(table) == len(BLOCKS)
    assert {(tp, mtp): tuple(sizes) for tp, mtp, *sizes in table[columns].to_numpy().tolist()} == BLOCKS


@given(deployments(), DTYPES)
def test_block_is_the_smallest_multiple_of_sixteen_whose_page_holds_a_state(deployment: Deployment, dtype: str) -> None:
    one = deployment.layout(dtype)
    assert one.block_tokens % 16 == 0
    assert one.block_tokens * one.kv_bytes_per_token >= deployment.state_bytes
    assert (one.block_tokens - 16) * one.kv_bytes_per_token < deployment.state_bytes


@pytest.mark.parametrize(
    ("setup", "state_bytes"),
    [({}, 801_792), ({"mtp": 3, "prefix_caching": True}, 817_152)],
    ids=["tp4-mtp0", "tp4-mtp3"],
)
def test_state_bytes(setup: dict[str, object], state_bytes: int) -> None:
    assert Deployment(**setup).state_bytes == state_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "setup", "block_bytes", "bytes_per_token"),
    [
        ("auto", {}, 10_235_904, 13_056),
        ("fp8_e4m3", {}, 10_838_016, 6_912),
        ("fp8_e4m3", {"mtp": 3, "prefix_caching": True}, 11_980_800, 7_488),
    ],
    ids=["fp16", "e4m3", "e4m3-mtp3"],
)
def test_block_bytes(dtype: str, setup: dict[str, object], block_bytes: int, bytes_per_token: int) -> None:
    one = layout(dtype, **setup)
    assert (one.block_bytes, one.bytes_per_token) == (block_bytes, bytes_per_token)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_both_16_bit_types_have_one_layout(dtype: str) -> None:
    assert layout(dtype).block_bytes == layout("auto").block_bytes


@pytest.mark.parametrize(
    ("mtp", "prefix_caching", "fixed"),
    [(0, False, 5), (0, True, 9), (2, True, 17), (3, True, 21), (5, True, 29)],
)
def test_fixed_blocks_a_request(mtp: int, prefix_caching: bool, fixed: int) -> None:
    assert Deployment(mtp=mtp, prefix_caching=prefix_caching).fixed_blocks == fixed


@pytest.mark.parametrize(("length", "wide", "narrow"), [(131_328, 173, 89), (262_144, 340, 173)])
def test_blocks_a_request(length: int, wide: int, narrow: int) -> None:
    deployment = Deployment(max_model_len=length)
    assert tuple(one.blocks_per_request for one in deployment.layouts) == (wide, narrow)


@pytest.mark.parametrize(("tp", "limit"), [(4, Fraction(17, 9)), (2, Fraction(17, 9)), (1, Fraction(33, 17))])
def test_asymptotic_gain_is_exact(tp: int, limit: Fraction) -> None:
    assert Deployment(tp=tp).asymptotic_gain == limit


# Public record --------------------------------------------------------------------------------------------------------

EXACT = {
    "nvfp4": (507_093, 931_100),
    "awq-r6": (310_480, 569_579),
    "awq-shared-topk": (365_137, 671_395),
    "fixed-4gib": (None, 600_052),
    "mtp3-256k": (433_401, 775_096),
    "mtp3-32k": (284_341, 396_336),
    "gb10-nanetnounou": (780_638, 1_399_848),
    "gb10-jschmied": (1_077_542, 1_853_358),
    "gb10x2-de1tydev": (2_350_409, 3_989_504),
}


@pytest.mark.parametrize("pair", EXACT)
def test_public_pair_is_exact(pair: str) -> None:
    row = capacity_reported.validate().set_index("pair").loc[pair]
    assert row["status"] == "passed"
    for label, count in zip(("fp16", "e4m3"), EXACT[pair], strict=True):
        values = [row[f"{quantity}_{label}_tokens"] for quantity in ("reported", "model", "residual")]
        assert values == [count, count, 0] if count else all(value is pd.NA for value in values)


def test_one_pair_is_two_tokens_off() -> None:
    row = capacity_reported.validate().set_index("pair").loc["gb10-rmagur1203"]
    assert (row["residual_fp16_tokens"], row["residual_e4m3_tokens"]) == (-2, 0)
    assert row["status"] == "passed"
    assert "2 tokens off" in row["reason"]


def test_pair_without_max_model_len_is_named_as_not_determined() -> None:
    row = capacity_reported.validate().set_index("pair").loc["rtx-andreasgru"]
    assert row["status"] == "skipped"
    assert row["reason"].startswith("not determined: max_model_len")
    assert (row["reported_fp16_tokens"], row["reported_e4m3_tokens"]) == (535_178, 1_010_693)


def test_every_other_pair_says_why_it_is_left_out() -> None:
    table = capacity_reported.validate()
    skipped = table[table["status"] == "skipped"]
    assert set(skipped["pair"]) == set(table["pair"]) - {*EXACT, "gb10-rmagur1203"}
    assert skipped["reason"].str.len().min() > 10


@pytest.mark.parametrize("shift", [-1, 1, 5])
def test_a_wrong_count_fails(shift: int) -> None:
    table = capacity_reported.load()
    changed = (table["pair"] == "nvfp4") & (table["quantity"] == "tokens") & (table["kv_cache_dtype"] == "fp8_e4m3")
    table.loc[changed, "value"] += shift
    row = capacity_reported.validate(table).set_index("pair").loc["nvfp4"]
    assert row["status"] == "failed"
    assert row["residual_e4m3_tokens"] == -shift


def test_a_wrong_pool_fails() -> None:
    table = capacity_reported.load()
    table.loc[(table["pair"] == "fixed-4gib") & (table["quantity"] == "pool_gib"), "value"] = 4.1
    assert capacity_reported.validate(table).set_index("pair").loc["fixed-4gib", "status"] == "failed"


def test_the_fixed_budget_is_predicted_without_any_fit() -> None:
    assert layout("fp8_e4m3", max_model_len=262_144).tokens(4 * GIB) == 600_052


def test_one_pool_explains_both_counts_of_every_same_budget_pair() -> None:
    table = capacity_reported.validate().set_index("pair")
    assert table.loc[["nvfp4", "awq-r6", "awq-shared-topk"], "same_pool"].all()
    low, high = capacity_reported.implied_pool("nvfp4")
    assert (round(low / GIB, 3), round(high / GIB, 3)) == (6.369, 6.378)


def test_pool_of_an_unequal_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="gb10-jschmied"):
        capacity_reported.implied_pool("gb10-jschmied")


def test_published_sizes_of_states_and_blocks_agree() -> None:
    checks = capacity_reported.layout_checks()
    assert set(checks["quantity"]) == {"state_bytes", "block_tokens", "block_bytes", "blocks"}
    assert (checks["status"] == "passed").all(), checks


def test_every_figure_has_a_source() -> None:
    table = capacity_reported.load()
    assert table["source"].str.contains(r"#\d+|@[0-9a-f]{7,}").all()
    assert table["source_url"].str.startswith("https://github.com/").all()
    assert set(table["kind"]) == {"reported"}


def test_only_one_length_explains_the_six_v100_counts() -> None:
    found = capacity_reported.consistent_lengths(["nvfp4", "awq-r6", "awq-shared-topk"], range(32_768, 270_000))
    assert found == [131_328]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_no_length_explains_the_undetermined_pair(prefix_caching: bool) -> None:
    lengths = range(1_024, 600_000)
    assert capacity_reported.consistent_lengths(["rtx-andreasgru"], lengths, prefix_caching=prefix_caching) == []


def test_evidence_names_the_pairs_of_the_setup_or_none() -> None:
    assert capacity_reported.evidence(Deployment(tp=2, mtp=5, prefix_caching=True)) == ["gb10x2-de1tydev"]
    assert capacity_reported.evidence(Deployment(tp=2, mtp=1, prefix_caching=True)) == []


# Pools ----------------------------------------------------------------------------------------------------------------


@given(deployments(), DTYPES, POOLS)
def test_tokens_agree_with_exact_fractions(deployment: Deployment, dtype: str, pool: int) -> None:
    one = deployment.layout(dtype)
    whole = max(n for n in (pool // one.block_bytes - 1, pool // one.block_bytes) if n * one.block_bytes <= pool)
    requests = Fraction(
        whole, math.ceil(Fraction(deployment.max_model_len, one.block_tokens)) + deployment.fixed_blocks
    )
    assert one.tokens(pool) == math.floor(requests * deployment.max_model_len)
    assert one.requests(pool) == math.floor(requests)


@given(deployments(), DTYPES, POOLS, POOLS)
def test_more_pool_never_holds_less(deployment: Deployment, dtype: str, first: int, second: int) -> None:
    one = deployment.layout(dtype)
    small, large = sorted((first, second))
    assert one.tokens(small) <= one.tokens(large)
    assert one.requests(small) <= one.requests(large)


@given(deployments(), DTYPES, POOLS)
def test_tokens_never_exceed_the_bytes(deployment: Deployment, dtype: str, pool: int) -> None:
    one = deployment.layout(dtype)
    assert one.tokens(pool) * one.bytes_per_token <= pool
    assert one.blocks(pool) * one.block_bytes <= pool


@given(deployments(), DTYPES, POOLS)
def test_tokens_to_pool_and_back(deployment: Deployment, dtype: str, pool: int) -> None:
    one = deployment.layout(dtype)
    tokens = one.tokens(pool)
    smallest = one.pool_bytes(tokens)
    assert smallest <= pool
    assert one.tokens(smallest) == tokens


@given(deployments(), DTYPES, st.integers(0, 10_000_000))
def test_pool_for_tokens_is_the_smallest(deployment: Deployment, dtype: str, tokens: int) -> None:
    one = deployment.layout(dtype)
    pool = one.pool_bytes(tokens)
    assert one.tokens(pool) >= tokens
    assert pool == 0 or one.tokens(pool - 1) < tokens


@given(deployments(shortest=7_000), POOLS)
def test_e4m3_never_holds_fewer_requests_from_the_break_even_length_on(deployment: Deployment, pool: int) -> None:
    wide, narrow = deployment.layouts
    assert deployment.break_even_max_model_len() <= 7_000
    assert narrow.request_bytes <= wide.request_bytes
    assert narrow.requests(pool) >= wide.requests(pool)


@given(deployments(shortest=7_000), POOLS)
def test_e4m3_never_reports_fewer_tokens_once_the_gain_is_worth_a_block(deployment: Deployment, pool: int) -> None:
    wide, narrow = deployment.layouts
    assume(deployment.request_gain > 1)
    # Rounding down to whole blocks costs the E4M3 pool less than one block, which a pool from this size on outweighs.
    smallest = narrow.block_bytes / (1 - 1 / deployment.request_gain)
    larger = math.ceil(smallest) + pool
    assert narrow.tokens(larger) >= wide.tokens(larger)


@given(st.integers(2 * 10_838_016, 64 * GIB))
def test_e4m3_never_reports_fewer_tokens_in_the_published_contract(pool: int) -> None:
    wide, narrow = Deployment().layouts
    assert narrow.tokens(pool) >= wide.tokens(pool)


def test_short_requests_lose_by_the_size_of_the_blocks() -> None:
    assert Deployment(max_model_len=784).request_gain == Fraction(17, 18)
    assert Deployment(max_model_len=785).request_gain > 1
    assert Deployment().break_even_max_model_len() == 785


@given(deployments())
def test_break_even_length_is_the_last_crossing(deployment: Deployment) -> None:
    length = deployment.break_even_max_model_len()
    gains = {
        candidate: Deployment(
            tp=deployment.tp, mtp=deployment.mtp, prefix_caching=deployment.prefix_caching, max_model_len=candidate
        ).request_gain
        for candidate in {max(length - 1, 1), *range(length, length + 40_000, 397)}
    }
    assert length == 1 or gains.pop(length - 1) < 1
    assert min(gains.values()) >= 1


@given(deployments())
def test_gain_stays_at_or_below_its_limit_for_long_requests_in_steps_of_both_blocks(deployment: Deployment) -> None:
    wide, narrow = deployment.layouts
    length = math.lcm(wide.block_tokens, narrow.block_tokens)
    whole = Deployment(
        tp=deployment.tp, mtp=deployment.mtp, prefix_caching=deployment.prefix_caching, max_model_len=length
    )
    assert whole.request_gain < whole.asymptotic_gain < 2


# Budgets and the constant part (B40) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "constant"),
    [(Fraction(931_100, 507_093), 1204), (Fraction(569_579, 310_480), 1218)],
    ids=["nvfp4", "awq-r6"],
)
def test_constant_part_that_the_reported_gains_would_need(gain: Fraction, constant: int) -> None:
    main = 12 * 2 * 1 * 256 * 2
    found = capacity.fixed_bytes_from_gain(main, gain)
    assert round(found) == constant
    assert (main + found) / (Fraction(main, 2) + found) == gain
    assert found > 12 * capacity.QWEN4_EXP.index_bytes_per_token


def test_twice_the_tokens_need_a_constant_part_of_zero() -> None:
    assert capacity.fixed_bytes_from_gain(12_288, Fraction(2)) == 0
    assert capacity.fixed_bytes_from_gain(12_288, Fraction(17, 9)) == 768


@pytest.mark.parametrize("gain", [Fraction(1), Fraction(201, 100), Fraction(0)], ids=str)
def test_gain_outside_the_two_number_model_is_refused(gain: Fraction) -> None:
    with pytest.raises(ValueError, match=r"^gain:"):
        capacity.fixed_bytes_from_gain(12_288, gain)


@pytest.mark.parametrize(
    ("pool", "blocks"),
    [(0, 0), (10_838_015, 0), (10_838_016, 1), (631 * 10_838_016 + 10_838_015, 631)],
    ids=["zero", "below-one-block", "one-block", "no-whole-number-of-blocks"],
)
def test_budget_counts_whole_blocks_only(pool: int, blocks: int) -> None:
    one = layout("fp8_e4m3")
    assert one.blocks(pool) == blocks
    assert one.tokens(pool) == blocks * 131_328 // 89


def test_no_gain_without_16_bit_tokens() -> None:
    assert Deployment().gain(0) is None
    with pytest.raises(ValueError, match=r"^pool_bytes:"):
        capacity.waterfall(Deployment(), 10_235_903)


@pytest.mark.parametrize("pool_gib", [0, Decimal("0.009"), 0.0], ids=repr)
def test_plan_of_a_pool_below_one_request_says_so(pool_gib: object) -> None:
    frame = plan(pool_gib=pool_gib)
    assert (frame["tokens"] == 0).all()
    assert (frame["status"] == "failed").all()
    assert frame["reason"].str.contains("one request of 131328 tokens takes").all()


def plan(**changes: object) -> pd.DataFrame:
    setup = {"tp": 4, "mtp": 0, "prefix_caching": False, "max_model_len": 131_328, "pool_gib": Decimal("6.37")}
    return capacity.plan(**(setup | changes))  # type: ignore[arg-type]


def test_plan_gives_the_published_pair() -> None:
    frame = plan()
    assert frame["tokens"].tolist() == [507_093, 931_100]
    assert frame["requests"].tolist() == [3, 7]
    assert frame["gain"].tolist() == [1.0, 931_100 / 507_093]


def test_plan_of_one_type_keeps_its_gain() -> None:
    frame = plan(kv_cache_dtype="fp8_e4m3")
    assert frame["gain"].tolist() == [931_100 / 507_093]


def test_plan_with_shared_workspace_adds_what_sharing_frees() -> None:
    added = plan(share_topk_workspace=True)["pool_bytes"] - plan()["pool_bytes"]
    assert added.tolist() == [739_278_848] * 2
    assert 739_278_848 / 2**20 == 705.03125


@pytest.mark.parametrize(
    ("pool_gib", "error"),
    [
        (-1, ValueError),
        (-0.5, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (Decimal("nan"), ValueError),
        (np.float32("nan"), ValueError),
        ("4", TypeError),
        (True, TypeError),
        (None, TypeError),
        ([4], TypeError),
    ],
    ids=repr,
)
def test_bad_pool_is_named(pool_gib: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^pool_gib: expected"):
        plan(pool_gib=pool_gib)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("tp", 0, ValueError),
        ("tp", -4, ValueError),
        ("tp", "4", TypeError),
        ("tp", True, TypeError),
        ("tp", 4.0, TypeError),
        ("mtp", -1, ValueError),
        ("mtp", math.nan, TypeError),
        ("max_model_len", 0, ValueError),
        ("max_model_len", -131_328, ValueError),
        ("max_model_len", math.nan, TypeError),
        ("max_model_len", "131328", TypeError),
        ("max_model_len", np.bool_(True), TypeError),
        ("prefix_caching", 1, TypeError),
        ("prefix_caching", "yes", TypeError),
        ("kv_cache_dtype", "fp8_e5m2", ValueError),
        ("kv_cache_dtype", "int8", ValueError),
        ("kv_cache_dtype", 8, TypeError),
        ("share_topk_workspace", 0, TypeError),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_bad_argument_is_named(name: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{name}: expected"):
        plan(**{name: value})


@pytest.mark.parametrize("call", ["blocks", "tokens", "requests"])
@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("9", TypeError)])
def test_bad_pool_bytes_are_named(call: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^pool_bytes: expected"):
        getattr(layout("auto"), call)(value)


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ({"tp": 8}, r"^tp: .*no public figure checks another"),
        ({"tp": 3}, r"^tp: expected one of 1, 2, 4"),
        ({"mtp": 6, "prefix_caching": True}, r"^mtp: .*no public block size is known"),
        ({"mtp": 2}, r"^prefix_caching: .*number of fixed blocks without them is not known"),
    ],
    ids=["tp8", "tp3", "mtp6", "mtp-without-prefix-caching"],
)
def test_setup_outside_the_model_is_refused_with_the_reason(setup: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Deployment(**setup)  # type: ignore[arg-type]


def test_shared_workspace_is_refused_with_draft_tokens() -> None:
    with pytest.raises(ValueError, match=r"^share_topk_workspace:"):
        plan(mtp=3, prefix_caching=True, share_topk_workspace=True)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"q_heads": 6}, "q_heads"),
        ({"gdn_key_heads": 6}, "gdn_key_heads"),
        ({"gdn_value_heads": 50}, "gdn_value_heads"),
        ({"kv_heads": 3}, "kv_heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_heads_that_do_not_divide_are_refused(change: dict[str, int], name: str) -> None:
    geometry = capacity.ModelGeometry(**(vars(capacity.QWEN4_EXP) | change))
    with pytest.raises(ValueError, match=rf"^tp: .*{name}"):
        Deployment(tp=4, geometry=geometry)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"gdn_layers": 35}, "gdn_layers"), ({"compress_ratio": 3}, "compress_ratio"), ({"head_dim": 0}, "head_dim")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_geometry_is_refused(change: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}:"):
        capacity.ModelGeometry(**(vars(capacity.QWEN4_EXP) | change))


# Tables of the chapter ------------------------------------------------------------------------------------------------


def cells() -> pd.DataFrame:
    return capacity.feasibility({pair: capacity_reported.implied_pool(pair)[0] for pair in ("nvfp4", "awq-r6")})


@pytest.mark.parametrize("pool", ["nvfp4", "awq-r6"])
def test_cells_that_do_not_fit(pool: str) -> None:
    table = cells()
    missing = table[(table["pool"] == pool) & ~table["fits"]]
    found = {
        dtype: {(row.concurrency, row.context_tokens // 1024, row.blocks_needed) for row in group.itertuples()}
        for dtype, group in missing.groupby("kv_cache_dtype")
    }
    assert found == {"auto": {(4, 128, 692), (8, 64, 712), (8, 128, 1384)}, "fp8_e4m3": {(8, 128, 712)}}


def test_request_counts_follow_for_one_pool_and_not_for_the_other() -> None:
    counts = capacity_reported.request_counts(cells()).set_index(["pool", "kv_cache_dtype", "quantity"]).sort_index()
    assert counts.loc["awq-r6", "model"].tolist() == [15, 174, 17, 210]
    assert (counts.loc["awq-r6", "status"] == "passed").all()
    odd = counts.loc["nvfp4", "fp8_e4m3", "requests"]
    assert (odd["model"], odd["reported"], odd["status"]) == (210, 87, "failed")


def test_cell_at_exactly_the_pool_fits() -> None:
    blocks = layout("auto").request_blocks(1024 + 256)
    exact = blocks * layout("auto").block_bytes
    for pool, fits in ((exact, True), (exact - 1, False)):
        table = capacity.feasibility({"pool": pool}, concurrencies=[1], contexts=[1024])
        assert table.loc[table["kv_cache_dtype"] == "auto", "fits"].tolist() == [fits]


def test_waterfall_of_the_published_contract() -> None:
    steps = capacity.waterfall(Deployment(), capacity_reported.implied_pool("nvfp4")[0])
    assert steps["gain"].round(4).tolist() == [2.0, 1.8889, 1.8889, 1.8358, 1.8362]
    assert steps["change"].sum() == pytest.approx(931_100 / 507_093, rel=1e-12)


def test_last_page_costs_something_at_twice_the_length_only() -> None:
    pool = capacity_reported.implied_pool("nvfp4")[0]
    change = {
        length: capacity.waterfall(Deployment(max_model_len=length), pool)
        .set_index("step")
        .loc["last page rounded up", "change"]
        for length in (131_328, 262_144)
    }
    assert change[131_328] == 0
    assert change[262_144] == pytest.approx(-0.0056, abs=5e-5)


def test_gain_by_length_at_the_two_contract_lengths() -> None:
    table = capacity.gain_by_length([131_328, 262_144])
    assert table["gain"].round(3).tolist() == [1.836, 1.856]
    assert table["gain_limit"].tolist() == [17 / 9, 17 / 9]


def test_corner_lengths_hold_every_jump() -> None:
    corners = capacity.corner_lengths(20_000)
    gains = capacity.gain_by_length(range(1, 20_001))["gain"].to_numpy()
    jumps = set((np.flatnonzero(np.diff(gains)) + 2).tolist())
    assert jumps <= set(corners)
    assert {length - 1 for length in jumps} <= set(corners)


def test_workspace_sharing_matches_the_step_between_the_two_pools() -> None:
    steps = capacity_reported.workspace_steps("awq-r6", "awq-shared-topk").set_index("quantity")
    assert steps["low_bytes"].tolist()[:3] == [806_486_016, 67_207_168, 739_278_848]
    assert steps["reported_mib"].tolist() == ["769.125", "64.094", "705.031", ""]
    growth = steps.iloc[3]
    assert growth["low_bytes"] < 739_278_848 < growth["high_bytes"]
    assert (steps["status"] == "passed").all()


def test_workspace_of_another_size_fails() -> None:
    table = capacity_reported.load()
    table.loc[table["quantity"] == "workspace_freed_mib", "value"] = 704.0
    steps = capacity_reported.workspace_steps("awq-r6", "awq-shared-topk", table).set_index("quantity")
    assert steps["status"].tolist() == ["passed", "passed", "failed", "passed"]
