"""The protocol with an injected clock: what is there is found, what is not there is not claimed (faults B38, B39)."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from simulated_run import Call, SimulatedTimer, record_of

from qsa_kernels.arms import ARMS
from qsa_kernels.hardware import interpreting
from qsa_kernels.launch import LaunchConfig
from qsa_kernels.measure import baselines, workloads
from qsa_kernels.measure.latency import ceiling, protocol, results, session, statistics
from qsa_kernels.measure.latency import plan as plans
from qsa_kernels.measure.latency.plan import ArmGroup, Plan, Search, Stage, TileGrid, Workload, WorkloadGrid
from qsa_kernels.measure.latency.protocol import Candidate
from qsa_kernels.measure.latency.statistics import COPY_ARM, Estimate, Instance
from qsa_kernels.reference import reference_attention

RESAMPLES = 1000
KEYS = ["cache_state"]


def samples(
    times: dict[str, float], *, processes: int = 5, blocks: int = 20, seed: int = 1, **faults: Any
) -> pd.DataFrame:
    """Cold samples of arms that take `times` microseconds, by an injected clock with the given faults."""
    rows = []
    for process in range(processes):
        timer = SimulatedTimer(np.random.default_rng([seed, process]), **faults)
        candidates = [Candidate(arm, "best", [Call(us)] * 3) for arm, us in times.items()]
        rows += protocol.measure(candidates, timer, state="cold", blocks=blocks, seed=seed, process=process)
    return pd.DataFrame(rows).assign(cache_state="cold", status="passed", reason="")


def judged(times: dict[str, float], arm: str = "hoisted/native", **options: Any) -> tuple[Estimate, Any]:
    """Estimate and judgement of `arm` against fp16, with the floor of the A/A arm."""
    (cell,) = statistics.cells(samples(times, **options), KEYS)
    columns = {name: cell.column(name, "best") for name in ("fp16", COPY_ARM, arm)}
    seed = options.get("seed", 1)
    noise = statistics.contrast(cell, {columns[COPY_ARM]: 1.0, columns["fp16"]: -1.0}, seed=seed, resamples=RESAMPLES)
    found = statistics.contrast(cell, {columns[arm]: 1.0, columns["fp16"]: -1.0}, seed=seed, resamples=RESAMPLES)
    assert noise is not None
    assert found is not None
    throttled = float(np.nanmax(cell.throttled))
    return found, statistics.judge(found, noise.bound, throttled_share=throttled)


class TestRotation:
    @pytest.mark.parametrize(("touched", "turns"), [(1 << 20, 102), (512 << 20, 2), (60 << 20, 3), (100 << 20, 3)])
    def test_more_than_twice_l2_passes_between_two_uses(self, touched: int, turns: int) -> None:
        l2 = 50 << 20
        assert protocol.rotation(touched, l2) == turns
        assert (turns - 1) * touched > 2 * l2
        assert (turns - 2) * touched <= 2 * l2

    def test_refuses_nothing_touched(self) -> None:
        with pytest.raises(ValueError, match="touched_bytes"):
            protocol.rotation(0, 1)


class TestBlocks:
    def test_every_two_arms_run_as_ab_and_ba_equally_often(self) -> None:
        orders = [list(order) for _, order in protocol.block_orders(5, 20, np.random.default_rng(3))]
        for a in range(5):
            for b in range(a):
                assert sum(order.index(a) < order.index(b) for order in orders) == 10

    def test_orders_are_shuffled_by_the_seed(self) -> None:
        def first(seed: int) -> list[list[int]]:
            return [order.tolist() for _, order in protocol.block_orders(6, 4, np.random.default_rng(seed))]

        assert first(1) == first(1)
        assert first(1) != first(2)

    @pytest.mark.parametrize("blocks", [0, 1, 7])
    def test_unbalanced_numbers_are_refused(self, blocks: int) -> None:
        with pytest.raises(ValueError, match=f"blocks: .*got {blocks}"):
            list(protocol.block_orders(2, blocks, np.random.default_rng(0)))


class TestTiming:
    def test_a_known_kernel_is_timed_within_five_per_cent(self) -> None:
        frame = samples({"fp16": 10_000.0}, processes=1, noise=0.01)
        assert frame["time_us"].median() == pytest.approx(10_000.0, rel=0.05)

    def test_short_calls_are_repeated_until_the_sample_is_long_enough(self) -> None:
        frame = samples({"fp16": 3.7}, processes=1, tick_us=0.5)
        assert (frame["elapsed_us"] >= 1000.0).all()
        assert frame["time_us"].median() == pytest.approx(3.7, rel=0.01)

    def test_a_call_of_no_length_is_not_called_a_time(self) -> None:
        frame = samples({"fp16": 1e-5}, processes=1, tick_us=0.5)
        found = statistics.judge(
            Estimate(-0.5, -0.6, -0.4, 0.0, False, 1), 0.01, elapsed_us=frame["elapsed_us"].max(), resolution_us=0.5
        )
        assert found.verdict == "not measurable"
        assert "ticks of the timer" in found.reason

    def test_long_calls_take_the_inputs_in_turn(self) -> None:
        timer = SimulatedTimer(np.random.default_rng(0))
        candidate = Candidate("fp16", "best", [Call(2000.0), Call(3000.0)])
        rows = protocol.measure([candidate], timer, state="cold", blocks=4, seed=0, process=0)
        assert [row["time_us"] for row in rows] == [2000.0, 3000.0, 2000.0, 3000.0]

    @pytest.mark.parametrize(("state", "primed", "inputs"), [("cold", False, {7.0, 9.0}), ("hot", True, {7.0})])
    def test_hot_repeats_one_input_after_an_untimed_pass(self, state: str, primed: bool, inputs: set[float]) -> None:
        timer = SimulatedTimer(np.random.default_rng(0))
        candidate = Candidate("fp16", "best", [Call(7.0), Call(9.0)])
        prepared = protocol.prepare(candidate, timer, state=state, target_us=100.0)
        assert {call.us for part in prepared.parts for call in part} == inputs
        protocol.measure([candidate], timer, state=state, blocks=2, seed=0, process=0)
        assert timer.log[-1][1] is primed

    def test_the_interpreter_is_never_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(RuntimeError, match="interpreter wall time is no latency"):
            protocol.require_measurable()
        with pytest.raises(RuntimeError, match="interpreter"):
            session.Machine.present()


class TestVerdict:
    @pytest.mark.parametrize(("factor", "verdict"), [(1.03, "slower"), (0.97, "faster")])
    @pytest.mark.parametrize("seed", range(4))
    def test_three_per_cent_are_found(self, factor: float, verdict: str, seed: int) -> None:
        times = {"fp16": 40.0, COPY_ARM: 40.0, "hoisted/native": 40.0 * factor}
        found, judgement = judged(times, noise=0.015, seed=seed)
        assert judgement.verdict == verdict
        assert found.low < math.log(factor) < found.high

    def test_no_difference_is_not_called_one(self) -> None:
        verdicts = Counter(
            judged({"fp16": 40.0, COPY_ARM: 40.0, "hoisted/native": 40.0}, noise=0.015, seed=seed)[1].verdict
            for seed in range(30)
        )
        assert set(verdicts) <= {"same", "undecided"}

    def test_differences_between_processes_are_noise(self) -> None:
        verdicts: Counter[str] = Counter()
        for seed in range(20):
            rng = np.random.default_rng([77, seed])
            frames = []
            for process in range(5):
                times = {arm: 40.0 * math.exp(0.01 * rng.standard_normal()) for arm in ("fp16", COPY_ARM, "x")}
                frames.append(samples(times, processes=1, noise=0.003, seed=seed).assign(process=process))
            (cell,) = statistics.cells(pd.concat(frames), KEYS)
            columns = [cell.column(arm, "best") for arm in ("x", "fp16", COPY_ARM)]
            weights = [{columns[place]: 1.0, columns[1]: -1.0} for place in (0, 2)]
            found, noise = (statistics.contrast(cell, pair, seed=seed, resamples=RESAMPLES) for pair in weights)
            assert noise is not None
            verdicts[statistics.judge(found, noise.bound).verdict] += 1
        assert verdicts["faster"] + verdicts["slower"] <= 0.05 * 20

    def test_order_bias_makes_a_pair_not_measurable(self) -> None:
        times = {"fp16": 60.0, COPY_ARM: 60.0, "hoisted/native": 30.0}
        _, judgement = judged(times, noise=0.002, order_bias=0.05)
        assert judgement.verdict == "not measurable"
        assert "AB and BA disagree" in judgement.reason

    def test_throttling_makes_a_pair_not_measurable(self) -> None:
        times = {"fp16": 60.0, COPY_ARM: 60.0, "hoisted/native": 30.0}
        _, judgement = judged(times, noise=0.002, throttled_blocks=18)
        assert judgement.verdict == "not measurable"
        assert "10 % of samples at reduced clocks" in judgement.reason

    def test_five_per_cent_of_throttled_samples_are_borne(self) -> None:
        times = {"fp16": 60.0, COPY_ARM: 60.0, "hoisted/native": 30.0}
        assert judged(times, noise=0.002, throttled_blocks=19)[1].verdict == "faster"

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [
            (-0.05, -0.02, "faster"),
            (0.02, 0.05, "slower"),
            (-0.009, 0.008, "same"),
            (-0.02, 0.0, "undecided"),
            (-0.02, 0.02, "undecided"),
        ],
    )
    def test_interval_against_floor(self, low: float, high: float, verdict: str) -> None:
        assert statistics.judge(Estimate((low + high) / 2, low, high, 0.0, False, 5), 0.01).verdict == verdict

    def test_bandwidth_above_the_copy_is_flagged(self) -> None:
        estimate = Estimate(-0.5, -0.51, -0.49, 0.0, False, 5)
        found = statistics.judge(estimate, 0.01, implied_gb_per_s=5000.0, copy_gb_per_s=4200.0)
        assert found.verdict == "not measurable"
        assert "5000 GB/s is above the measured copy bandwidth of 4200 GB/s" in found.reason

    def test_without_a_noise_floor_nothing_is_claimed(self) -> None:
        assert statistics.judge(Estimate(-1.0, -1.1, -0.9, 0.0, False, 5), None).verdict == "not measurable"


class TestSeries:
    """Plain series, as in fault B39."""

    def test_two_series_of_one_distribution(self) -> None:
        wrong = 0
        for seed in range(200):
            first, second, copy = np.random.default_rng([5, seed]).normal(100.0, 1.5, size=(3, 30))
            verdict = statistics.compare(first, second, copy, seed=seed, resamples=RESAMPLES)[1].verdict
            wrong += verdict in ("faster", "slower")
        assert wrong <= 0.05 * 200

    def test_interval_covers_the_truth_as_often_as_it_says(self) -> None:
        covered = 0
        for seed in range(200):
            values = np.random.default_rng([9, seed]).normal(0.0, 0.015, size=(1, 30))
            low, high = statistics.bootstrap(values, np.random.default_rng(seed), RESAMPLES)
            covered += low <= 0.0 <= high
        assert covered >= 0.92 * 200

    def test_drift_of_the_second_half_is_reported(self) -> None:
        rng = np.random.default_rng(4)
        ramp = np.concatenate([np.ones(30), np.linspace(1.0, 1.15, 30)])
        first, second, copy = rng.normal(100.0, 0.5, size=(3, 60)) * ramp
        _, judgement = statistics.compare(first, second, copy)
        assert judgement.verdict in ("same", "undecided")
        assert "first drifts by +" in judgement.reason
        assert "second drifts by +" in judgement.reason

    def test_a_steady_series_has_no_drift(self) -> None:
        series = np.random.default_rng(8).normal(100.0, 1.5, size=(3, 60))
        assert "drifts" not in statistics.compare(*series)[1].reason

    def test_drift_of_the_device_stays_out_of_the_ratio(self) -> None:
        times = {"fp16": 40.0, COPY_ARM: 40.0, "hoisted/native": 38.0}
        blocks = 20
        faults = {"noise": 0.003, "drift": 0.15, "drift_samples": 3 * blocks}
        found, judgement = judged(times, blocks=blocks, **faults)
        assert judgement.verdict in ("faster", "not measurable")
        assert found.value == pytest.approx(math.log(38.0 / 40.0), abs=0.006)
        (cell,) = statistics.cells(samples(times, blocks=blocks, **faults), KEYS)
        assert 3.0 < statistics.percent(statistics.drift(cell, 0)) < 15.0

    def test_nothing_gives_no_data(self) -> None:
        estimate, judgement = statistics.compare([], [], [])
        assert estimate is None
        assert judgement.reason == "no data"

    def test_unequal_lengths_are_refused(self) -> None:
        with pytest.raises(ValueError, match="equal lengths, got 2, 1 and 2"):
            statistics.compare([1.0, 2.0], [1.0], [1.0, 2.0])


class TestTwoByTwo:
    def test_planted_effects_are_separated(self) -> None:
        decoder, placement, interaction = math.log(0.7), math.log(1.05), 0.06
        times = {
            "in_loop/exp2": 100.0,
            "hoisted/exp2": 100.0 * math.exp(placement - interaction / 2),
            "in_loop/bitcast": 100.0 * math.exp(decoder - interaction / 2),
            "hoisted/bitcast": 100.0 * math.exp(decoder + placement),
        }
        (cell,) = statistics.cells(samples(times, noise=0.004), KEYS)
        weights = statistics.two_by_two(cell, "best")
        assert weights is not None
        found = {
            name: statistics.contrast(cell, contrast, seed=1, resamples=RESAMPLES) for name, contrast in weights.items()
        }
        for name, truth in (("decoder", decoder), ("placement", placement), ("interaction", interaction)):
            estimate = found[name]
            assert estimate is not None
            assert estimate.value == pytest.approx(truth, abs=0.004)
            assert estimate.low < truth < estimate.high

    def test_missing_arm_gives_no_effect(self) -> None:
        (cell,) = statistics.cells(samples({"in_loop/exp2": 9.0, "hoisted/exp2": 9.0}), KEYS)
        assert statistics.two_by_two(cell, "best") is None

    def test_the_interaction_may_exceed_the_floor_of_a_ratio_twice(self) -> None:
        assert statistics.floor_factor([1.0, -1.0]) == 1.0
        assert statistics.floor_factor([0.5, 0.5, -0.5, -0.5]) == 1.0
        assert statistics.floor_factor([1.0, -1.0, -1.0, 1.0]) == 2.0


def small_plan(arms: list[str], launches: list[str], *, processes: int = 2, blocks: int = 4, topk: int = 19) -> Plan:
    grid = WorkloadGrid(kind="decode", rows=[3], context=[70], heads=[[6, 1]], topk=topk, head_dim=16, page_size=48)
    return Plan(
        seed=3,
        device_name="simulated",
        sample_us=100.0,
        gate_rows=2,
        gate_multiple=4.0,
        resamples=200,
        compilers=1,
        search=Search(
            workloads=[grid],
            programs_per_sm=[2.0],
            tiles={"device": [TileGrid(["fp16", "hoisted/packed"], [[16, 2, 2]])]},
            public={"device": ["generic"]},
            samples=1,
        ),
        stages=[Stage("core", 1, processes, blocks, ["cold", "hot"], [grid], {"device": [ArmGroup(arms, launches)]})],
    )


class RunningTimer:
    """Runs the first call once and shows ten microseconds for each."""

    device = "interpreter"
    sync_method = "none"
    resolution_us = 0.5

    def prepare(self, calls: list[Any]) -> list[Any]:
        calls[0]()
        return calls

    def sample(self, prepared: list[Any], *, primed: bool) -> float:
        return 10.0 * len(prepared)

    def clock(self) -> protocol.ClockState:
        return protocol.ClockState()


@pytest.fixture
def machine() -> session.Machine:
    if not interpreting():
        pytest.skip("runs on the CPU, which needs the interpreter")
    return session.Machine(RunningTimer, "cpu", l2_bytes=700, sms=2)


class TestSession:
    def test_every_arm_passes_the_gate_before_it_is_sampled(self, tmp_path: Path, machine: session.Machine) -> None:
        plan = small_plan(["fp16", "in_loop/exp2", "hoisted/packed+vector", "hoisted/native"], ["generic"])
        plan.stages[0].arms["device"][:] = [
            ArmGroup(["fp16", "in_loop/exp2", "hoisted/native"], ["generic"]),
            ArmGroup(["hoisted/packed+vector"], ["vector"]),
            ArmGroup(["sdpa/e4m3"], ["own"]),
        ]
        (unit, _) = plans.units(plan)
        record = session.Session(plan, tmp_path, machine).measure(unit)
        gates = {row["arm"]: row for row in record["gates"]}
        assert gates["hoisted/native"]["status"] == "skipped"
        assert {row["status"] for arm, row in gates.items() if arm != "hoisted/native"} == {"passed"}
        assert gates["in_loop/exp2"]["rows_checked"] == 4
        assert 0 < gates["fp16"]["relative_error"] < gates["fp16"]["allowed_relative_error"] < 0.01
        assert {row["arm"] for row in record["samples"]} == set(gates) - {"hoisted/native"}
        assert record["inputs"]["rotating_inputs"] == protocol.rotation(3 * 19 * 2 * 16, 700)

    @pytest.mark.parametrize("fault", ["zeros", "unwritten", "raises"])
    def test_a_wrong_arm_is_not_sampled(
        self, tmp_path: Path, machine: session.Machine, monkeypatch: pytest.MonkeyPatch, fault: str
    ) -> None:
        plan = small_plan(["fp16", "hoisted/packed"], ["generic"])
        (unit, _) = plans.units(plan)
        worker = session.Session(plan, tmp_path, machine)
        right = worker.operator("device")

        def wrong(**arguments: Any) -> torch.Tensor:
            if arguments["kv_cache_dtype"] == "auto":
                return right(**arguments)
            if fault == "raises":
                raise RuntimeError("the driver refused\nand said more")
            return arguments["out"].zero_() if fault == "zeros" else arguments["out"]

        monkeypatch.setattr(worker, "operator", lambda code_path, copy=False: wrong)
        record = worker.measure(unit)
        gates = {row["arm"]: row for row in record["gates"]}
        assert gates["fp16"]["status"] == "passed"
        assert gates["hoisted/packed"]["status"] == "failed"
        assert gates["hoisted/packed"]["reason"]
        assert "\n" not in gates["hoisted/packed"]["reason"]
        assert "hoisted/packed" not in {row["arm"] for row in record["samples"]}

    def test_what_breaks_the_device_is_left_out_by_the_next_process(
        self, tmp_path: Path, machine: session.Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = small_plan(["fp16", "hoisted/packed"], ["generic"])
        (unit, _) = plans.units(plan)

        def start() -> session.Session:
            worker = session.Session(plan, tmp_path, machine)
            right = worker.operator("device")

            def breaks(**arguments: Any) -> torch.Tensor:
                if arguments["kv_cache_dtype"] == "auto":
                    return right(**arguments)
                raise RuntimeError("an illegal memory access was encountered")

            monkeypatch.setattr(worker, "operator", lambda code_path, copy=False: breaks)
            return worker

        def dead() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "synchronize", dead)
        with pytest.raises(session.DeadContextError, match="hoisted/packed generic"):
            start().measure(unit)
        record = start().measure(unit)
        gates = {row["arm"]: row for row in record["gates"]}
        assert gates["hoisted/packed"]["status"] == "failed"
        assert "illegal memory access" in gates["hoisted/packed"]["reason"]
        assert gates[COPY_ARM]["status"] == "passed", gates[COPY_ARM]["reason"]
        assert {row["arm"] for row in record["samples"]} == {"fp16", COPY_ARM}

    def test_an_arm_that_cannot_be_captured_is_no_reason_to_stop(
        self, tmp_path: Path, machine: session.Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = small_plan(["fp16", "hoisted/packed"], ["generic"])
        (unit, _) = plans.units(plan)
        genuine = protocol.prepare

        def prepare(candidate: Candidate, timer: Any, **options: Any) -> Any:
            if candidate.arm == "hoisted/packed":
                raise RuntimeError("operation not permitted when stream is capturing")
            return genuine(candidate, timer, **options)

        monkeypatch.setattr(protocol, "prepare", prepare)
        record = session.Session(plan, tmp_path, machine).measure(unit)
        gates = {row["arm"]: row for row in record["gates"]}
        assert gates["hoisted/packed"]["status"] == "failed"
        assert gates["hoisted/packed"]["reason"].startswith("cannot be captured in a graph: RuntimeError: operation")
        assert gates[COPY_ARM]["status"] == "passed", gates[COPY_ARM]["reason"]
        assert {row["arm"] for row in record["samples"]} == {"fp16", COPY_ARM}

    def test_search_chooses_the_fastest_right_launch_for_each_arm(
        self, tmp_path: Path, machine: session.Machine
    ) -> None:
        plan = small_plan(["fp16"], ["best"])
        workload = next(plan.search.each_workload())
        record = session.Session(plan, tmp_path, machine).search(workload, "device")
        frame = pd.DataFrame(record["rows"])
        assert (frame["status"] == "passed").all()
        assert frame.groupby("arm")["chosen"].agg(lambda column: (column == "yes").sum()).tolist() == [1, 1]
        session.write_json(tmp_path / "search" / session.search_name(workload, "device"), record)
        found = session.BestLaunches(tmp_path).config("fp16", workload, "device")
        assert isinstance(found, LaunchConfig)
        chosen = frame[(frame["arm"] == "fp16") & (frame["chosen"] == "yes")].iloc[0]
        assert (found.block_n, found.transposed) == (chosen["block_n"], chosen["transposed"])
        with pytest.raises(ValueError, match="no launch search for in_loop/exp2"):
            session.BestLaunches(tmp_path).config("in_loop/exp2", workload, "device")

    def test_the_copy_has_kernels_of_its_own(self, tmp_path: Path) -> None:
        from qsa_kernels import attention

        fresh = session._fresh_attention()
        assert fresh.attend_with_dot is not attention.attend_with_dot
        assert fresh.merge_splits is not attention.merge_splits
        assert fresh.launch.LaunchConfig is LaunchConfig
        import qsa_kernels.attention

        assert qsa_kernels.attention is attention

    def test_partition_is_what_one_split_reduces(self) -> None:
        assert session.partition_tokens(LaunchConfig(32, 8, 1), 2048) == 256
        assert session.partition_tokens(LaunchConfig(64, 2, 1), 2048) == 1024
        assert session.partition_tokens(LaunchConfig(64, 1, 1), 2051) == 2051

    def test_split_count_reaches_for_the_wanted_programs(self) -> None:
        shape = Workload("decode", 8, 32768, "clustered", None, 2051, 6, 1, 256, 784)
        assert session.split_count(4.0, 132, shape, 32) == 65  # one tile a split
        assert session.split_count(2.0, 132, shape, 32) == 33
        assert session.split_count(0.01, 132, shape, 32) == 1


@pytest.mark.gpu
def test_a_kernel_copies_faster_than_the_copy_engines() -> None:
    """Held against the slower of the two, an arm near the memory's limit would look impossible."""
    found = ceiling.measure()
    source = torch.zeros(1 << 28, device="cuda")
    target = torch.empty_like(source)
    timer = protocol.CudaGraphTimer()
    prepared = timer.prepare([lambda: target.copy_(source)])
    engines = 2 * source.nbytes / min(timer.sample(prepared, primed=False) for _ in range(5)) * 1e-3
    assert found["copy_gb_per_s"] > engines


class TestBaselines:
    @pytest.mark.parametrize("context", [200, 40], ids=["full", "padded"])
    def test_sdpa_agrees_with_the_reference(self, context: int) -> None:
        pair = workloads.decode(5, context, topk=67, head_dim=64, page_size=48, seed=2)
        for inputs in (pair.unquantised, pair.quantised):
            expected = reference_attention(**inputs.arguments())
            assert session.relative_error(baselines.sdpa(inputs)(), expected) < 2e-3

    def test_zeros_have_an_error_of_one(self) -> None:
        expected = torch.full((2, 3), 1e-6, dtype=torch.float64)
        assert session.relative_error(torch.zeros(2, 3), expected) == 1.0

    def test_flashinfer_is_missing_with_a_reason(self) -> None:
        if not baselines.flashinfer_missing():
            pytest.skip("FlashInfer can run here")
        pair = workloads.decode(2, 40, topk=16, head_dim=64)
        with pytest.raises(RuntimeError, match=r"FlashInfer|flashinfer"):
            baselines.flashinfer_decode(pair.quantised)

    @pytest.mark.gpu
    @pytest.mark.skipif(bool(baselines.flashinfer_missing()), reason=baselines.flashinfer_missing() or "it is there")
    def test_flashinfer_agrees_with_the_reference(self) -> None:
        pair = workloads.decode(5, 4096, topk=2051, seed=2, device="cuda")
        for inputs in (pair.unquantised, pair.quantised):
            expected = reference_attention(**inputs.arguments())
            assert session.relative_error(baselines.flashinfer_decode(inputs)(), expected) < 2e-3


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    arms = ["fp16", "in_loop/exp2", "hoisted/exp2", "in_loop/bitcast", "hoisted/bitcast", "hoisted/native"]
    plan = small_plan(arms, ["best", "partition-256", "partition-1024"], processes=5, blocks=6, topk=2048)
    records = [record_of(unit, plan) for unit in plans.units(plan)]
    # one arm fails everywhere, as an arm does that cannot be launched
    for record in records:
        record["samples"] = [row for row in record["samples"] if row["arm"] != "in_loop/bitcast"]
        for gate in record["gates"]:
            if gate["arm"] == "in_loop/bitcast":
                gate |= {"status": "failed", "reason": "does not fit", "relative_error": None}
    raw = {
        "latency_samples": results._samples(records),
        "latency_gates": results._gates(records),
        "latency_workloads": results._workloads(records),
        "latency_processes": results._processes(records, {"not available": 4200.0}),
        "launch_search": results._search([]),
    }
    return results.analyse(raw, plan)


class TestResults:
    def test_every_cell_has_a_verdict(self, tables: dict[str, pd.DataFrame]) -> None:
        cells = tables["latency_cells"]
        assert cells["verdict"].isin(statistics.VERDICTS).all()
        red = cells[cells["arm"] == "in_loop/bitcast"]
        assert set(red["status"]) == {"failed"}
        assert set(red["verdict"]) == {"not measurable"}
        assert set(red["reason"]) == {"does not fit"}

    def test_cold_and_hot_say_what_was_flushed(self, tables: dict[str, pd.DataFrame]) -> None:
        cells = tables["latency_cells"].query("arm == 'fp16' and launch == 'best'").set_index("cache_state")
        assert cells.loc["hot", "flush_bytes"] == 0
        assert math.isnan(cells.loc["hot", "implied_gb_per_s"])
        assert cells.loc["cold", "flush_bytes"] > 2 * (50 << 20)
        assert set(cells["sync_method"]) == {"none, the clock is simulated"}
        assert set(cells["device"]) == {"simulated clock"}

    def test_unequal_partitions_are_no_like_for_like_pair(self, tables: dict[str, pd.DataFrame]) -> None:
        pairs = tables["latency_pairs"]
        mixed = pairs[pairs["question"] == "dtype and partition mixed"]
        assert set(mixed["same_partition"]) == {"no"}
        assert (mixed["partition_tokens"] != mixed["baseline_partition_tokens"]).all()
        cells = tables["latency_cells"].query("launch == 'partition-256' and arm == 'hoisted/native'")
        assert set(cells["same_partition"]) == {"yes"}

    def test_the_copy_is_judged_by_floors_of_other_cells(self, tables: dict[str, pd.DataFrame]) -> None:
        wrong, all_copies = results.false_positives(tables["latency_cells"])
        assert all_copies == 2
        assert wrong == 0

    def test_missing_arm_leaves_no_effect(self, tables: dict[str, pd.DataFrame]) -> None:
        assert tables["latency_effects"].empty


def test_units_come_in_order_of_importance() -> None:
    plan = small_plan(["fp16"], ["best"], processes=2)
    second = plan.stages[0]
    later = Stage("later", 2, 1, 2, ["cold"], second.workloads, second.arms)
    both = Plan(**{**vars(plan), "stages": [later, second]})
    assert [(unit.stage.name, unit.process) for unit in plans.units(both)] == [("core", 0), ("core", 1), ("later", 0)]
    assert [unit.stage.name for unit in plans.units(both, ["later"])] == ["later"]
    assert len(list(plans.units(both, ["*/decode-3-*/device"]))) == 3


def test_questions_ask_for_arms_that_are_there() -> None:
    instances = [Instance("fp16", "best"), Instance("fp16", "pre_ampere"), Instance("fp16+vector", "best")]
    assert set(statistics.TWO_BY_TWO) <= set(ARMS)
    assert [(question, base.launch) for question, _, base in results.questions(instances)] == [
        ("best against public launch", "pre_ampere"),
        ("vector against dot", "best"),
        ("vector against dot", "pre_ampere"),
    ]
