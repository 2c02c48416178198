"""The error measurements: known distances, faults that the gate must see, small cases on the kernels, both sources."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch

from qsa_kernels import e4m3
from qsa_kernels.arms import ARMS
from qsa_kernels.measure import error, precision, smollm2, workloads
from qsa_kernels.measure.workloads import QuantisedPair
from qsa_kernels.reference import reference_attention
from qsa_kernels.report import chapter, tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"rows": 2, "q_heads": 6, "head_dim": 64}
QUANTISED = [name for name, arm in ARMS.items() if arm.is_quantised]


def _small_cases() -> list[QuantisedPair]:
    return [
        *workloads.published_shapes(topks=[10, 33], seed=1, **SMALL),
        workloads.all_codes(seed=1, **SMALL),
        workloads.random_pages(rows=3, seed=1),
        workloads.padded_and_duplicates(head_dim=64, seed=1),
    ]


def _exact(out: torch.Tensor, **arguments: Any) -> None:
    keep = ("kv_cache_dtype", "k_scale", "v_scale")
    tensors = ("q", "k_cache", "v_cache", "logical_indices", "block_table", "token_to_req")
    out.copy_(reference_attention(**{name: arguments[name] for name in (*tensors, *keep)}))


class TestMeasure:
    def test_known_distances(self) -> None:
        errors = error.measure(torch.tensor([3.0, 4.0, 1.0]), torch.tensor([3.0, 4.0, 0.0]))
        assert errors["max_abs"] == 1.0
        assert errors["mean_abs"] == pytest.approx(1 / 3)
        assert errors["rms_relative"] == pytest.approx(1 / 5)
        assert errors["cosine_distance"] == pytest.approx(1 - 5 / math.sqrt(26), rel=1e-12)

    def test_cosine_distance_survives_cancellation(self) -> None:
        reference = torch.tensor([1.0, 0.0], dtype=torch.float64)
        errors = error.measure(torch.tensor([1.0, 1e-9], dtype=torch.float64), reference)
        assert errors["cosine_distance"] == pytest.approx(0.5e-18, rel=1e-6)

    @pytest.mark.parametrize("size", [1e-6, 1.0, 1e4], ids=str)
    def test_a_zero_output_is_at_distance_one_however_small_the_reference(self, size: float) -> None:
        reference = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * size
        errors = error.measure(torch.zeros(50), reference)
        assert errors["rms_relative"] == 1.0
        assert errors["cosine_distance"] == 1.0
        peer = error.measure(reference.half(), reference)
        assert error.gate(errors, peer)[0] == "failed"
        assert error.gate(peer, peer) == ("passed", "")

    def test_an_output_that_is_not_finite_fails(self) -> None:
        reference = torch.ones(3)
        for value in (math.nan, math.inf):
            errors = error.measure(torch.tensor([1.0, 1.0, value]), reference)
            assert error.gate(errors, error.measure(reference, reference)) == (
                "failed",
                "the output holds values that are not finite",
            )

    def test_zero_reference_takes_zero_only(self) -> None:
        assert error.measure(torch.zeros(3), torch.zeros(3))["rms_relative"] == 0.0
        assert error.measure(torch.tensor([0.0, 1e-9, 0.0]), torch.zeros(3))["rms_relative"] == math.inf

    def test_shapes_and_references_are_checked(self) -> None:
        with pytest.raises(ValueError, match=r"output: expected shape \[3\], got \[2\]"):
            error.measure(torch.zeros(2), torch.zeros(3))
        with pytest.raises(ValueError, match="reference: expected finite values only"):
            error.measure(torch.zeros(1), torch.tensor([math.nan]))


class TestPrecision:
    @pytest.mark.parametrize("pair", _small_cases(), ids=lambda pair: pair.name)
    @pytest.mark.parametrize("twin", ["quantised", "unquantised"])
    @pytest.mark.parametrize("hoisted", [True, False], ids=["hoisted", "in_loop"])
    def test_without_casts_it_is_the_reference(self, pair: QuantisedPair, twin: str, hoisted: bool) -> None:
        inputs = getattr(pair, twin)
        expected = reference_attention(**inputs.arguments())
        torch.testing.assert_close(
            precision.attend(precision.select(inputs), hoisted=hoisted), expected, rtol=1e-12, atol=1e-14
        )

    def test_each_cast_rounds_what_it_names(self) -> None:
        q = torch.ones(1, 1, 1, 16, dtype=torch.float16)
        k, v = torch.full((1, 2, 1, 16), 1.0, dtype=torch.float64), torch.full((1, 2, 1, 16), 1.0, dtype=torch.float64)
        k[0, 1], v[0, 0] = 0.0, 3.0
        selected = precision.Selected(q, k, v, torch.ones(1, 2, dtype=torch.bool), k_scale=0.0123, v_scale=0.0371)

        def expected(k_scale: float, v_scale: float, p_cast: bool = False) -> float:
            light = math.exp(-16 * k_scale / 4)
            weight = float(torch.tensor(light).half()) if p_cast else light
            return v_scale * (3 + weight) / (1 + light)

        def rounded(value: float) -> float:
            return float(torch.tensor(value, dtype=torch.float64).half())

        def out(*casts: str, hoisted: bool) -> float:
            return float(precision.attend(selected, casts=casts, hoisted=hoisted)[0, 0, 0])

        exact = expected(0.0123, 0.0371)
        for hoisted in (True, False):
            assert out(hoisted=hoisted) == pytest.approx(exact, rel=1e-14)
            assert out("p", hoisted=hoisted) == pytest.approx(expected(0.0123, 0.0371, p_cast=True), rel=1e-12)
            assert out("output", hoisted=hoisted) == rounded(exact)
        assert out("k", "v", hoisted=True) == out(hoisted=True)
        assert out("k", hoisted=False) == pytest.approx(expected(rounded(0.0123), 0.0371), rel=1e-12)
        # 3 * 0.0371 is rounded as a product, not as a scale.
        light = math.exp(-16 * 0.0123 / 4)
        v_rounded = (rounded(3 * 0.0371) + rounded(0.0371) * light) / (1 + light)
        assert out("v", hoisted=False) == pytest.approx(v_rounded, rel=1e-12)

    def test_unknown_casts_are_named(self) -> None:
        selected = precision.select(_small_cases()[0].quantised)
        with pytest.raises(ValueError, match=r"casts: expected any of .*, got \['q'\]"):
            precision.attend(selected, casts=["q"])

    def test_register_arms_round_the_output_only(self) -> None:
        assert precision.arm_casts(ARMS["fp16+vector"]) == ("output",)
        assert precision.arm_casts(ARMS["in_loop/exp2"]) == ("k", "v", "p", "output")


def _twice_v(out: torch.Tensor, **arguments: Any) -> None:
    _exact(out, **arguments)
    out.mul_(arguments["v_scale"])


def _swapped(out: torch.Tensor, **arguments: Any) -> None:
    _exact(out, **{**arguments, "k_scale": arguments["v_scale"], "v_scale": arguments["k_scale"]})


def _one_head_missing(out: torch.Tensor, **arguments: Any) -> None:
    heads = out.clone()
    _exact(out, **arguments)
    out[:, 3] = heads[:, 3]


FAULTS: dict[str, Callable[..., None]] = {
    "zeros": lambda out, **_: out.zero_(),
    "v-scale-twice": _twice_v,
    "scales-exchanged": _swapped,
    "unwritten-head": _one_head_missing,
}


class TestGate:
    @pytest.mark.parametrize("name", FAULTS)
    def test_faulty_operators_fail_every_cell(self, name: str) -> None:
        cells = error.cells(error.run(_small_cases(), arms=["hoisted/bitcast"], splits=4, operator=FAULTS[name]))
        assert set(cells["status"]) == {"failed"}
        assert (cells["reason"] != "").all()

    def test_the_exact_result_passes(self) -> None:
        cells = error.cells(error.run(_small_cases(), arms=["hoisted/bitcast", "fp16"], splits=4, operator=_exact))
        assert set(cells["status"]) == {"passed"}
        tables.validate(cells, "error_cells")

    def test_what_cannot_run_is_skipped_with_its_reason(self) -> None:
        def absent(**_: Any) -> None:
            raise NotImplementedError("not part of this build")

        cells = error.cells(error.run(_small_cases()[:1], arms=["hoisted/packed"], operator=absent))
        assert set(cells["status"]) == {"skipped"}
        assert set(cells["reason"]) == {"not part of this build"}
        tables.validate(cells, "error_cells")

    @pytest.mark.skipif(DEVICE == "cuda", reason="with a GPU the native arm may run")
    def test_native_is_skipped_without_a_gpu(self) -> None:
        cells = error.cells(error.run(_small_cases()[:1], arms=["hoisted/native"], operator=FAULTS["zeros"]))
        assert set(cells["status"]) == {"skipped"}
        assert cells["reason"].str.contains("compute capability 8.9").all()

    def test_refusals_of_the_operator_are_not_hidden(self) -> None:
        def refuses(**_: Any) -> None:
            raise ValueError("q: expected head_dim a power of two, got 96")

        with pytest.raises(ValueError, match="head_dim"):
            error.run(_small_cases()[:1], arms=["fp16"], operator=refuses)

    def test_unknown_arms_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"arms: expected names among fp16.*; got \['hoisted'\]"):
            error.run(_small_cases()[:1], arms=["hoisted"])


@pytest.fixture(scope="module")
def results() -> list[error.Result]:
    cases = [
        *workloads.published_shapes(topks=[33], rows=1, q_heads=6, head_dim=64, seed=1),
        workloads.random_pages(rows=2, requests=2, q_heads=6, head_dim=64, topk=20, seed=1),
    ]
    return error.run([case.to(DEVICE) for case in cases], splits=4)


@pytest.fixture(scope="module")
def cells(results: list[error.Result]) -> pd.DataFrame:
    return error.cells(results)


class TestKernels:
    def test_every_arm_that_runs_here_passes(self, cells: pd.DataFrame) -> None:
        tables.validate(cells, "error_cells")
        failed = cells[cells["status"] == "failed"]
        assert failed[["case", "arm", "mode", "reference", "reason"]].to_dict("records") == []
        ran = set(cells[cells["status"] == "passed"]["arm"])
        assert ran >= set(ARMS) - {"hoisted/native"}

    def test_summary_counts_the_verdicts(self, cells: pd.DataFrame) -> None:
        real = cells.assign(status=cells["status"].where(cells["arm"] != "fp16", "failed"), reason="made up")
        table = error.summary(cells, real, long="random-pages")
        tables.validate(table, "error_summary")
        by_arm = table.set_index("arm")
        assert by_arm.loc["fp16", ["cells_passed", "cells_failed"]].tolist() == [8, 8]
        assert by_arm.loc["fp16", ["status", "reason"]].tolist() == ["failed", "made up"]
        assert by_arm.loc["hoisted/exp2", ["cells_passed", "status"]].tolist() == [16, "passed"]
        exact = cells[(cells["arm"] == "hoisted/exp2") & (cells["mode"] == "split") & (cells["reference"] == "fp64")]
        assert by_arm.loc["hoisted/exp2", "rms_relative_random_median"] == exact["rms_relative"].median()

    def test_hoisted_arms_err_less_than_in_loop_arms(self, cells: pd.DataFrame) -> None:
        exact = cells[(cells["reference"] == "fp64") & (cells["status"] == "passed")]
        rms = exact.pivot_table(index=["case", "mode"], columns="arm", values="rms_relative")
        for decoder in ("exp2", "bitcast"):
            assert (rms[f"hoisted/{decoder}"] < rms[f"in_loop/{decoder}"]).all()

    def test_decoders_change_no_number(self, results: list[error.Result]) -> None:
        outputs = {(r.inputs.name, r.mode, r.arm.name): r.output for r in results}
        for (case, mode, arm), output in outputs.items():
            if arm.endswith("/exp2"):
                assert torch.equal(output, outputs[case, mode, arm.replace("exp2", "bitcast")])

    def test_raw_products_beyond_fp16(self) -> None:
        table = error.overflow(splits=4, device=DEVICE)
        tables.validate(table, "error_overflow")
        assert error.overflow_raw_products() == (114_688.0, 106_496.0)
        assert (table["raw_dot_max"] == 114_688.0).all()
        kernels = table[table["route"].isin(QUANTISED)]
        assert kernels["expected"].tolist() == pytest.approx([1 / (1 + math.exp(-0.512))] * len(kernels))
        assert set(table["status"]) <= {"passed", "skipped"}
        controls = table.set_index("route")["output"]
        assert math.isnan(controls["control: products held in FP16"])
        assert controls["control: products clamped to FP16"] == 0.5

    def test_clamped_products_fail(self) -> None:
        table = error.overflow(arms=["hoisted/bitcast"], operator=lambda out, **_: out.fill_(0.5))
        assert set(table[table["route"] == "hoisted/bitcast"]["status"]) == {"failed"}

    def test_histograms_hold_every_element(self, results: list[error.Result]) -> None:
        table = error.histograms(results, case="random-pages")
        tables.validate(table, "error_histograms")
        counts = table[table["status"] == "passed"].groupby(["arm", "mode"])["elements"].sum()
        assert set(counts) == {2 * 6 * 64}
        assert ("output rounding alone", "none") in counts.index

    def test_a_split_has_one_part_without_tiles(self, results: list[error.Result]) -> None:
        for result in results:
            tiles = -(-result.inputs.topk // result.launch.block_n)
            expected = 1 if result.mode == "single" else max(2, min(4, tiles + 1))
            assert result.launch.num_splits == expected


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return error.sources(_small_cases())


class TestSources:
    def test_hoisting_makes_the_operand_casts_exact(self, table: pd.DataFrame) -> None:
        tables.validate(table, "error_sources")
        rms = table.pivot_table(index="case", columns="source", values="rms_relative")
        assert (rms[["K cast, hoisted", "V cast, hoisted"]] == 0.0).all(axis=None)
        assert (rms[["K cast, in_loop", "V cast, in_loop"]] > 0.0).all(axis=None)

    def test_codes_cost_more_than_casts(self, table: pd.DataFrame) -> None:
        rms = table[table["case"] != "all-codes"].pivot_table(index="case", columns="source", values="rms_relative")
        casts = rms[["K cast, in_loop", "V cast, in_loop", "probability cast", "output cast"]].max(axis=1)
        assert (rms["cache K and V"] > 20 * casts).all()
        # A code is off by 1/16 at most and by 2.5 % in the root mean square of a uniform mantissa.
        assert rms["cache V"].between(0.02, 0.04).all()

    def test_the_cache_error_is_that_of_the_references(self, table: pd.DataFrame) -> None:
        pair = workloads.random_pages(rows=3, seed=1)
        expected = error.measure(*(reference_attention(**c.arguments()) for c in (pair.quantised, pair.unquantised)))
        row = table[(table["case"] == "random-pages") & (table["source"] == "cache K and V")]
        assert row["rms_relative"].item() == pytest.approx(expected["rms_relative"], rel=1e-9)

    def test_ranges_widen_by_the_scale(self) -> None:
        table = error.ranges(_small_cases())
        tables.validate(table, "error_ranges")
        widening = table["raw_dot_hoisted_max_abs"] / table["raw_dot_in_loop_max_abs"]
        assert widening.tolist() == pytest.approx((1 / table["k_scale"]).tolist())
        assert (table["raw_dot_hoisted_max_abs"] <= table["raw_dot_hoisted_reachable"]).all()

    def test_an_outlier_channel_carries_the_score_error(self) -> None:
        pair = workloads.random_pages(rows=3, seed=2)
        k_cache = pair.unquantised.k_cache.clone()
        k_cache[..., 1, 5] *= 40
        loud = workloads.quantised_pair(replace(pair.unquantised, name="loud", k_cache=k_cache))
        table = error.channels([pair, loud])
        tables.validate(table, "error_channels")
        share = table[table["largest_channels"] == 1].set_index("case")["score_error_share"]
        assert share["random-pages"] < 0.03
        assert share["loud"] > 0.8
        assert table[table["largest_channels"] == 128]["score_error_share"].tolist() == pytest.approx([1.0, 1.0])


class TestReported:
    def test_the_public_figures_are_exact_and_sourced(self) -> None:
        figures = error.reported()
        assert figures.loc["long_split_max_abs", "value"] == 8.262693881988525e-06
        assert figures.loc["mixed_route_max_abs", "value"] == 1.52587890625e-05
        assert figures.loc["mixed_route_mean_abs", "value"] == 1.2406309224388679e-06
        assert figures.loc["raw_dot", "value"] == error.overflow_raw_products()[0]
        assert figures["source_url"].str.startswith("https://").all()
        assert set(figures["kind"]) == {"reported"}

    @staticmethod
    def _cell(**changes: Any) -> pd.DataFrame:
        cell = {"case": "published-topk2051", "rows": 3, "q_heads": 6, "head_dim": 256, "mode": "split"}
        cell |= {"reference": "fp32", "arm": "hoisted/bitcast", "max_abs": 1e-5, "status": "passed"}
        return pd.DataFrame([{**cell, **changes}])

    def test_the_published_shape_is_compared(self) -> None:
        sources = error.sources(_small_cases()[:1])
        table = error.beside_reported(self._cell(), sources, error.reported())
        tables.validate(table, "error_reported")
        row = table[table["measured_on"] == "hoisted/bitcast"].iloc[0]
        assert row["reported"] == 8.262693881988525e-06
        assert row["measured_over_reported"] == pytest.approx(1e-5 / 8.262693881988525e-06)
        assert "not public" in row["what_differs"]

    @pytest.mark.parametrize("changes", [{"rows": 4}, {"case": "one-request-topk64"}, {"status": "failed"}], ids=str)
    def test_another_shape_is_not_set_beside_it(self, changes: dict[str, Any]) -> None:
        table = error.beside_reported(self._cell(**changes), error.sources(_small_cases()[:1]), error.reported())
        row = table[table["quantity"] == "max abs error"]
        assert row["status"].tolist() == ["skipped"]
        assert row["measured"].isna().all()

    def test_seeds_scatter_and_hoisting_stays_below(self) -> None:
        table = error.seed_spread(seeds=range(3), topk=129, **SMALL)
        tables.validate(table, "error_seeds")
        rms = table.pivot_table(index="seed", columns="arm", values="rms_relative")
        assert (rms["hoisted/bitcast"] < rms["in_loop/bitcast"]).all()
        assert table["max_abs"].nunique() == len(table)


class TestCaptured:
    @staticmethod
    def _captures(tokens: int = 40) -> Iterator[smollm2.LayerCapture]:
        generator = torch.Generator().manual_seed(6)
        for layer in (0, 7):
            q = torch.randn(tokens, 9, 64, generator=generator).half()
            k, v = (torch.randn(tokens, 3, 64, generator=generator).half() for _ in range(2))
            yield smollm2.LayerCapture(layer, q, k, v)

    def test_rows_list_the_tokens_of_the_largest_attention(self) -> None:
        capture = next(self._captures())
        call = error.captured_cases([capture], rows=3, topk=8)[0].unquantised
        assert call.name == "layer 0"
        assert torch.equal(call.q, capture.q[[20, 29, 39]])
        for position, row in zip((20, 29, 39), call.logical_indices.tolist(), strict=True):
            weights = torch.zeros(position + 1, dtype=torch.float64)
            for head in range(9):
                scores = capture.k[: position + 1, head // 3].double() @ capture.q[position, head].double() / 8
                weights += scores.softmax(0)
            assert set(row) == set(weights.topk(8).indices.tolist())

    def test_short_texts_are_refused(self) -> None:
        with pytest.raises(ValueError, match="tokens: expected at least 60 for topk 30, rows 3, got 40"):
            error.captured_cases(self._captures(), rows=3, topk=30)

    def test_layers_are_picked_by_number(self) -> None:
        cases = error.captured_cases(self._captures(), rows=2, topk=8)
        assert [case.name for case in error.pick_layers(cases, [7])] == ["layer 7"]
        with pytest.raises(ValueError, match=r"layers: expected numbers among the 2 captured layers, got \[3\]"):
            error.pick_layers(cases, [7, 3])

    def test_scales_cover_each_layer(self) -> None:
        for case in error.captured_cases(self._captures(), rows=2, topk=8):
            assert e4m3.count_clipped(case.unquantised.k_cache, case.quantised.k_scale) == 0
            assert e4m3.count_clipped(case.unquantised.v_cache, case.quantised.v_scale) == 0


PARAMETERS = {
    "rows": 3,
    "q_heads": 6,
    "head_dim": 256,
    "topk": 2051,
    "splits": 64,
    "seed": 0,
    "seeds": 16,
    "arms": list(ARMS),
    "text": "tom-sawyer",
    "tokens": 1024,
    "real_rows": 4,
    "real_topk": 256,
    "real_layers": [2, 10],
    "real_splits": 4,
}


class TestParameters:
    def test_known_ones_are_accepted(self) -> None:
        assert chapter.check_parameters("error", {**PARAMETERS, "topk": 64}).model_dump()["topk"] == 64

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"topkk": 64}, "unknown parameter 'topkk'; allowed: .*topk: int"),
            ({"topk": "sixty"}, "parameter 'topk': .*integer.*got 'sixty'"),
            ({"topk": math.nan}, "parameter 'topk': .*got nan"),
            ({"rows": 0}, "parameter 'rows': .*greater than or equal to 1"),
            ({"arms": ["hoisted"]}, "parameter 'arms': .*fp16.*unknown: .'hoisted'"),
            ({"real_layers": []}, "parameter 'real_layers'"),
        ],
        ids=["unknown", "text", "nan", "zero", "arm", "empty"],
    )
    def test_wrong_ones_are_named(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            chapter.check_parameters("error", {**PARAMETERS, **changes})
