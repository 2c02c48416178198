"""A clock that is told what to show, and a whole run measured with it. Nothing here is a measurement."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qsa_kernels.arms import ARMS
from qsa_kernels.measure import environment
from qsa_kernels.measure.latency import plan as plans
from qsa_kernels.measure.latency import protocol, recorder, session, statistics
from qsa_kernels.measure.latency.plan import Plan, Unit, Workload
from qsa_kernels.measure.latency.protocol import ClockState
from qsa_kernels.measure.latency.statistics import COPY_ARM
from qsa_kernels.report import recording, yamlfile
from qsa_kernels.report.repository import root

L2_BYTES = 50 << 20
COPY_GB_PER_S = 4200.0


@dataclass(frozen=True)
class Call:
    """A call that takes `us` of simulated time; calling it for real is an error."""

    us: float

    def __call__(self) -> None:
        raise AssertionError("a simulated call was run")


@dataclass
class SimulatedTimer:
    """Adds up what the calls claim to take, with noise and with the faults that a test asks for.

    Args:
        rng: source of the noise.
        noise: relative standard deviation of one sample.
        drift: relative slow-down at `drift_samples`, growing from half of them on.
        drift_samples: samples until the drift is complete.
        order_bias: relative slow-down of a sample for each that went before it in its block.
        throttled_blocks: from this block on the clock says that it is throttled.
        tick_us: times are multiples of this.
    """

    rng: np.random.Generator
    noise: float = 0.0
    drift: float = 0.0
    drift_samples: int = 1
    order_bias: float = 0.0
    throttled_blocks: float = math.inf
    tick_us: float = 0.0
    device: str = "simulated clock"
    sync_method: str = "none, the clock is simulated"
    resolution_us: float = 0.5
    samples: int = 0
    blocks: int = 0
    position: int = 0
    log: list[tuple[int, bool]] = field(default_factory=list)

    def prepare(self, calls: Sequence[Call]) -> list[Call]:
        return list(calls)

    def sample(self, prepared: list[Call], *, primed: bool) -> float:
        elapsed = sum(call.us for call in prepared)
        late = max(0.0, 2.0 * self.samples / self.drift_samples - 1.0)
        factor = 1.0 + self.drift * late
        factor += self.order_bias * self.position
        self.position += 1
        self.samples += 1
        self.log.append((len(prepared), primed))
        measured = elapsed * factor * math.exp(self.noise * self.rng.standard_normal())
        return round(measured / self.tick_us) * self.tick_us if self.tick_us else measured

    def clock(self) -> ClockState:
        self.blocks += 1
        self.position = 0
        return ClockState(1980.0, self.blocks > self.throttled_blocks)


_FACTOR = {
    "fp16": 1.0,
    COPY_ARM: 1.0,
    "in_loop/exp2": 2.9,
    "hoisted/exp2": 3.0,
    "in_loop/bitcast": 1.9,
    "hoisted/bitcast": 2.0,
    "hoisted/packed": 0.8,
    "hoisted/native": 0.6,
    "fp16+vector": 1.6,
    "hoisted/packed+vector": 1.4,
    "sdpa/fp16": 6.0,
    "sdpa/e4m3": 9.0,
    "flashinfer/fp16": 1.1,
    "flashinfer/e4m3": 1.05,
}


def time_us(arm: str, launch: str, workload: Workload, code_path: str) -> float:
    """An invented time of one call."""
    tokens = workload.rows * min(workload.topk, workload.context)
    base = 9.0 + tokens * 1024 * workload.kv_heads / 3.4e6
    public = 1.0 if launch in ("best", "own") else 1.3
    slow = 7.0 if code_path == "sm_70" and not arm.endswith("+vector") else 1.0
    return base * _FACTOR[arm] * public * slow


def record_of(unit: Unit, plan: Plan, *, noise: float = 0.004) -> dict[str, Any]:
    """What a session would write about a unit."""
    rng = np.random.default_rng([plan.seed, unit.process, len(unit.path), unit.workload.rows])
    tokens = unit.workload.rows * min(unit.workload.topk, unit.workload.context)
    e4m3 = tokens * 512 * unit.workload.kv_heads
    turns = protocol.rotation(e4m3, L2_BYTES)
    gates, candidates = [], []
    for name, launch, _ in session.candidates(unit):
        config = None
        if name == COPY_ARM or name in ARMS:
            splits = int(launch.removeprefix("partition-")) if launch.startswith("partition-") else 512
            config = session.LaunchConfig(32, -(-unit.workload.topk // splits), 1, 2)
        gates.append(
            session.candidate_row(name, launch, config, unit.workload)
            | {"max_abs_error": 1e-5, "relative_error": 2e-4, "allowed_relative_error": 1e-3}
            | {"rows_checked": 16, "status": "passed", "reason": ""}
        )
        process_effect = math.exp(0.002 * rng.standard_normal())
        us = time_us(name, launch, unit.workload, unit.code_path) * process_effect
        candidates.append(protocol.Candidate(name, launch, [Call(us)] * turns))
    timer = SimulatedTimer(rng, noise=noise)
    samples = []
    for state in unit.stage.states:
        rows = protocol.measure(
            candidates, timer, state=state, blocks=unit.stage.blocks, seed=plan.seed, process=unit.process
        )
        samples += [{"cache_state": state, **row} for row in rows]
    return {
        "stage": unit.stage.name,
        "workload": vars(unit.workload),
        "code_path": unit.code_path,
        "process": unit.process,
        "device": timer.device,
        "sync_method": timer.sync_method,
        "resolution_us": timer.resolution_us,
        "inputs": {
            "rotating_inputs": turns,
            "distinct_tokens": tokens,
            "bytes_fp16": 2 * e4m3,
            "bytes_e4m3": e4m3,
            "l2_bytes": L2_BYTES,
            "neighbour_overlap": None,
        },
        "gates": gates,
        "samples": samples,
        "seconds": 1.0,
    }


def ceiling_record() -> dict[str, Any]:
    """What the measurement of the copy bandwidth would write."""
    taken = {"bytes": 2 << 30, "times_us": [1.0], "measured": "never"}
    return {"copy_gb_per_s": COPY_GB_PER_S, "device": "simulated", **taken}


def search_record(workload: Workload, code_path: str, plan: Plan) -> dict[str, Any]:
    """What a session would write about a launch search."""
    rows = []
    grids = plan.search.tiles[code_path]  # type: ignore[index]
    for arm in dict.fromkeys(arm for grid in grids for arm in grid.arms):
        tiles = [(*tile, grid.transposed) for grid in grids if arm in grid.arms for tile in grid.tiles]
        for number, (block_n, warps, stages, transposed) in enumerate(tiles):
            config = session.LaunchConfig(block_n, 4, warps, stages, transposed)
            rows.append(
                session.candidate_row(arm, "search", config, workload)
                | {"time_us": time_us(arm, "best", workload, code_path) * (1 + 0.1 * number)}
                | {"chosen": "yes" if number == 0 else "no", "status": "passed", "reason": ""}
            )
    return {"workload": vars(workload), "code_path": code_path, "rows": rows, "seconds": 1.0}


def content(profile: str = "h200") -> dict[str, Any]:
    """The section latency of a shipped profile."""
    return copy.deepcopy(yamlfile.load(root() / "notebooks/profiles" / f"{profile}.yaml")["latency"])


def small() -> plans.Plan:
    """The H200 plan cut down to what a test can judge."""
    values = content()
    values["resamples"] = 100
    arms = [{"arms": ["fp16", *statistics.TWO_BY_TWO, "hoisted/native"], "launches": ["best", "sm90_public"]}]
    stages = {stage["name"]: stage for stage in values["stages"]}
    stage = stages["core"] | {"processes": 2, "blocks": 6, "arms": {"device": arms}}
    stage["workloads"] = [{"kind": "decode", "rows": [8], "context": [32768]}]
    other = stages["grid"] | {"processes": 1, "blocks": 4, "group": 2, "arms": {"device": arms}}
    other["workloads"] = [{"kind": "decode", "rows": [32], "context": [1024]}]
    values["stages"] = [stage, other]
    values["search"]["tiles"].pop("sm_70")
    return recording.checked(values, "test")


def open_folder(folder: Path, plan: Plan, run_id: str) -> None:
    """Plan and facts of an unfinished run, as on a machine that has such a device."""
    facts = environment.describe()
    facts["device"]["name"] = "simulated clock"
    facts["provenance"] = {
        "commit": "0" * 40,
        "dirty": False,
        "package_sha256": "0" * 64,
        "run_id": run_id,
        "profile": "simulated",
        "started": "2026-01-02T03:04:05Z",
    }
    facts["sources_sha256"] = recorder.sources_sha256()
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plans.to_mapping(plan)))
    (folder / "facts.json").write_text(json.dumps(facts))


def write_run(folder: Path, plan: Plan, run_id: str = "simulated", *, noise: float = 0.004) -> None:
    """A finished but not yet assembled run."""
    open_folder(folder, plan, run_id)
    for workload, code_path in session.searches(plan):
        path = folder / "search" / session.search_name(workload, code_path)
        session.write_json(path, search_record(workload, code_path, plan))
    for unit in plans.units(plan):
        session.write_json(folder / unit.path, record_of(unit, plan, noise=noise))
    session.write_json(recorder.ceiling_path(folder, environment.NOT_AVAILABLE), ceiling_record())
