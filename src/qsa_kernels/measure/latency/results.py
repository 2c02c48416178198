"""Tidy tables of a recorded run: every sample, and what the statistics say about them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qsa_kernels.arms import ARMS
from qsa_kernels.measure.latency import statistics
from qsa_kernels.measure.latency.plan import (
    BASELINES,
    BEST_LAUNCH,
    OWN_LAUNCH,
    PARTITION_PREFIX,
    Plan,
    Unit,
    Workload,
)
from qsa_kernels.measure.latency.session import read_json
from qsa_kernels.measure.latency.statistics import (
    COPY_ARM,
    FULL_BLOCKS,
    FULL_PROCESSES,
    CellSamples,
    Estimate,
    Instance,
)

UNIT_KEYS = ["stage", "workload", "code_path"]
CELL_KEYS = [*UNIT_KEYS, "cache_state"]
_TILE_COLUMNS = ["block_n", "num_splits", "num_warps", "num_stages", "transposed", "partition_tokens"]
_INPUT_FACTS = ["rotating_inputs", "distinct_tokens", "bytes_fp16", "bytes_e4m3", "l2_bytes", "neighbour_overlap"]
_NOT_SEEN = "not available"


def load(run: Path) -> dict[str, pd.DataFrame]:
    """Raw tables of an unfinished or finished run folder, in the columns that the samples were written with.

    Raises:
        ValueError: the folder holds no finished unit, pieces of machines that are no repetitions of one another, or
            pieces of a machine whose copy bandwidth is not there.
    """
    records = [read_json(path) for path in sorted((run / "cells").glob("*.json.gz"))]
    if not records:
        raise ValueError(f"{run}: no finished unit; measure with 'qsa record'")
    searches = [read_json(path) for path in sorted((run / "search").glob("*.json.gz"))]
    known = ceilings(run)
    _refuse_unlike(run, [*records, *searches, *known])
    copy_gb_per_s = {_node(entry): entry["copy_gb_per_s"] for entry in known}
    if missing := {_node(record) for record in records} - copy_gb_per_s.keys():
        raise ValueError(f"{run}: no copy bandwidth of {', '.join(sorted(missing))}; go on there with --resume {run}")
    return {
        "latency_samples": _samples(records),
        "latency_gates": _gates(records),
        "latency_workloads": _workloads(records),
        "latency_processes": _processes(records, copy_gb_per_s),
        "launch_search": _search(searches),
    }


def ceilings(run: Path) -> list[dict[str, Any]]:
    """The copies that each machine of a run was measured with."""
    return [read_json(path) for path in sorted((run / "ceilings").glob("*.json.gz"))]


def _refuse_unlike(run: Path, records: Iterable[Mapping[str, Any]]) -> None:
    nodes: dict[tuple[tuple[str, str], ...], set[str]] = {}
    for node in [record["node"] for record in records if "node" in record]:
        machine = tuple(sorted((key, value) for key, value in node.items() if key != "name"))
        nodes.setdefault(machine, set()).add(node["name"])
    if len(nodes) > 1:
        described = [
            f"{', '.join(sorted(names))} ({', '.join(f'{key} {value}' for key, value in machine)})"
            for machine, names in nodes.items()
        ]
        raise ValueError(f"{run}: nodes that differ are not pooled into one run: {'; '.join(sorted(described))}")


def _node(record: Mapping[str, Any]) -> str:
    return record.get("node", {}).get("name", _NOT_SEEN)


def _unit(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "stage": record["stage"],
        "workload": Workload(**record["workload"]).name,
        "code_path": record["code_path"],
    }


def _samples(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    frames = [pd.DataFrame(record["samples"]).assign(**_unit(record)) for record in records if record["samples"]]
    columns = [*CELL_KEYS, "arm", "launch", "process", "block", "pair", "position", "calls", "elapsed_us", "time_us"]
    columns += ["sm_clock_mhz", "throttled"]
    if not frames:
        return pd.DataFrame(columns=[*columns, "status", "reason"])
    frame = pd.concat(frames, ignore_index=True)[columns].assign(status="passed", reason="")
    return frame.astype({"elapsed_us": float, "time_us": float, "sm_clock_mhz": float})


def _gates(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    rows = [{**_unit(record), "process": record["process"], **row} for record in records for row in record["gates"]]
    numbers = [*_TILE_COLUMNS, "max_abs_error", "relative_error", "allowed_relative_error"]
    return pd.DataFrame(rows).astype(dict.fromkeys(numbers, float))


def _workloads(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        workload = Workload(**record["workload"])
        measured = record["inputs"] is not None
        rows.setdefault(workload.name, {}).update(
            {
                "workload": workload.name,
                **record["workload"],
                **(record["inputs"] or dict.fromkeys(_INPUT_FACTS)),
                "status": "passed" if measured else "skipped",
                "reason": "" if measured else record["gates"][0]["reason"],
            }
        )
    return pd.DataFrame(list(rows.values())).astype(dict.fromkeys(["overlap", *_INPUT_FACTS], float))


def _processes(records: Iterable[Mapping[str, Any]], copy_gb_per_s: Mapping[str, float]) -> pd.DataFrame:
    columns = ["stage", "process", "device", "sync_method", "resolution_us", "seconds"]
    frame = pd.DataFrame([{name: record[name] for name in columns} | {"node": _node(record)} for record in records])
    frame["copy_gb_per_s"] = frame["node"].map(copy_gb_per_s)
    keys = ["stage", "process", "node", "device", "sync_method", "resolution_us"]
    grouped = frame.groupby(keys, as_index=False).agg(
        copy_gb_per_s=("copy_gb_per_s", "median"), units=("seconds", "size"), seconds=("seconds", "sum")
    )
    return grouped.assign(status="passed", reason="")


def _search(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    rows = [
        {
            "code_path": record["code_path"],
            "workload": Workload(**record["workload"]).name,
            **{name: row[name] for name in ("arm", *_TILE_COLUMNS, "time_us", "chosen", "status", "reason")},
        }
        for record in records
        for row in record["rows"]
    ]
    columns = ["code_path", "workload", "arm", *_TILE_COLUMNS, "time_us", "chosen", "status", "reason"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(["time_us", *_TILE_COLUMNS], float))


class _Judge:
    """Turns contrasts of one cell into rows."""

    def __init__(
        self,
        cell: CellSamples,
        *,
        plan: Plan,
        workload: Mapping[str, Any],
        gates: pd.DataFrame,
        device: Mapping[str, Any],
    ) -> None:
        self.cell = cell
        self.plan = plan
        self.workload = workload
        self.gates = gates
        self.device = device
        self.keys = dict(zip(CELL_KEYS, cell.key, strict=True))
        self._estimates: dict[tuple[int, int], Estimate | None] = {}
        self.floor_of_cell = self._own_floor()

    def estimate(self, arm: Instance, baseline: Instance) -> Estimate | None:
        up, down = self.cell.column(arm.arm, arm.launch), self.cell.column(baseline.arm, baseline.launch)
        if up is None or down is None or up == down:
            return None
        if (up, down) not in self._estimates:
            self._estimates[up, down] = statistics.contrast(
                self.cell, {up: 1.0, down: -1.0}, seed=self.plan.seed, resamples=self.plan.resamples
            )
        return self._estimates[up, down]

    def reference(self) -> Instance | None:
        """What the A/A arm is a copy of, and what arms without a twin are compared with."""
        fp16 = [instance for instance in self.cell.instances if instance.arm == "fp16"]
        best = [instance for instance in fp16 if instance.launch == BEST_LAUNCH]
        copies = [instance for instance in self.cell.instances if instance.arm == COPY_ARM]
        same = [instance for instance in fp16 if copies and instance.launch == copies[0].launch]
        return next(iter([*same, *best, *fp16]), None)

    def _own_floor(self) -> float | None:
        reference = self.reference()
        copies = [instance for instance in self.cell.instances if instance.arm == COPY_ARM]
        if reference is None or not copies:
            return None
        found = self.estimate(copies[0], reference)
        return None if found is None else found.bound

    def baseline(self, instance: Instance) -> Instance | None:
        """FP16 under the same launch name, else the reference."""
        if instance.arm != COPY_ARM and self.cell.column("fp16", instance.launch) is not None:
            return Instance("fp16", instance.launch)
        return self.reference()

    def partition(self, instance: Instance) -> float:
        own = self.gate(instance)
        return float(own["partition_tokens"].iloc[0]) if len(own) else math.nan

    def gate(self, instance: Instance) -> pd.DataFrame:
        frame = self.gates
        return frame[(frame["arm"] == instance.arm) & (frame["launch"] == instance.launch)]

    def read_bytes(self, instance: Instance) -> int:
        is_e4m3 = instance.arm.endswith("e4m3") or (instance.arm in ARMS and ARMS[instance.arm].is_quantised)
        return int(self.workload["bytes_e4m3" if is_e4m3 else "bytes_fp16"])

    def time_us(self, instance: Instance) -> tuple[float, float, float]:
        """Mean over processes of the median, and the least and the largest of those medians."""
        column = self.cell.column(instance.arm, instance.launch)
        assert column is not None
        log_time = self.cell.log_time[:, :, column]
        medians = np.exp(np.median(log_time[np.isfinite(log_time).all(axis=1)], axis=1))
        if not len(medians):
            return math.nan, math.nan, math.nan
        return float(np.exp(np.log(medians).mean())), float(medians.min()), float(medians.max())

    def implied_gb_per_s(self, instance: Instance) -> float:
        """Distinct K and V bytes over time; only cold, since hot bytes come from the cache."""
        if self.keys["cache_state"] != "cold":
            return math.nan
        return self.read_bytes(instance) / self.time_us(instance)[0] * 1e-3

    def ratio(self, arm: Instance, baseline: Instance, floor: float | None) -> dict[str, Any]:
        """Ratio, interval and verdict of one pair."""
        estimate = self.estimate(arm, baseline)
        columns = [self.cell.column(one.arm, one.launch) for one in (arm, baseline)]
        used = [column for column in columns if column is not None]
        throttled = self.cell.throttled[used]
        implied = [
            self.implied_gb_per_s(one)
            for one, column in zip((arm, baseline), columns, strict=True)
            if column is not None
        ]
        judgement = statistics.judge(
            estimate,
            floor,
            throttled_share=float(np.nanmax(throttled)) if np.isfinite(throttled).any() else math.nan,
            elapsed_us=float(self.cell.elapsed_us[used].min()) if used else math.inf,
            resolution_us=float(self.device["resolution_us"]),
            implied_gb_per_s=max(implied, default=math.nan),
            copy_gb_per_s=float(self.device["copy_gb_per_s"]),
        )
        own, other = self.partition(arm), self.partition(baseline)
        both_known = not (math.isnan(own) or math.isnan(other))
        alike = ("yes" if own == other else "no") if both_known else "not applicable"
        return {
            "baseline_arm": baseline.arm,
            "baseline_launch": baseline.launch,
            **_interval(estimate, floor),
            "verdict": judgement.verdict,
            "verdict_reason": judgement.reason,
            "partition_tokens": own,
            "baseline_partition_tokens": other,
            "same_partition": alike,
            "order_percent": statistics.percent(estimate.order) if estimate else math.nan,
        }

    def row_of_cell(self, instance: Instance, floor: float | None) -> dict[str, Any]:
        baseline = self.baseline(instance) or Instance(_NOT_SEEN, _NOT_SEEN)
        column = self.cell.column(instance.arm, instance.launch)
        assert column is not None
        time_us, least, largest = self.time_us(instance)
        gate = self.gate(instance)
        tiles = {name: gate[name].iloc[0] if len(gate) else math.nan for name in _TILE_COLUMNS[:-1]}
        ratio = self.ratio(instance, baseline, floor)
        if instance == baseline:
            ratio |= {
                "verdict": "same",
                "verdict_reason": "the baseline itself",
                **_interval(Estimate(0, 0, 0, 0, False, 0), floor),
            }
        implied = self.implied_gb_per_s(instance)
        cold = self.keys["cache_state"] == "cold"
        rotating = int(self.workload["rotating_inputs"]) - 1 if cold else 0
        return {
            **self.keys,
            "arm": instance.arm,
            "launch": instance.launch,
            **tiles,
            "processes": int(np.isfinite(self.cell.log_time[:, :, column]).all(axis=1).sum()),
            "blocks": self.cell.blocks,
            "full_protocol": "yes"
            if self.cell.processes >= FULL_PROCESSES and self.cell.blocks >= FULL_BLOCKS
            else "no",
            "time_us": time_us,
            "least_process_us": least,
            "largest_process_us": largest,
            **ratio,
            "drift_percent": statistics.percent(statistics.drift(self.cell, column)),
            "throttled_share": float(self.cell.throttled[column]),
            "read_bytes": self.read_bytes(instance),
            "implied_gb_per_s": implied,
            "copy_gb_per_s": float(self.device["copy_gb_per_s"]),
            # what other inputs read between two uses of the same one
            "flush_bytes": rotating * self.read_bytes(instance),
            "sync_method": self.device["sync_method"],
            "device": self.device["device"],
            "relative_error": float(gate["relative_error"].max()) if len(gate) else math.nan,
            "status": "passed",
            "reason": "",
        }

    def pairs(self, floor: float | None) -> Iterator[dict[str, Any]]:
        for question, arm, baseline in questions(self.cell.instances):
            if self.estimate(arm, baseline) is None:
                continue
            yield {
                **self.keys,
                "question": question,
                "arm": arm.arm,
                "launch": arm.launch,
                **self.ratio(arm, baseline, floor),
                "status": "passed",
                "reason": "",
            }

    def effects(self, floor: float | None) -> Iterator[dict[str, Any]]:
        for launch in dict.fromkeys(instance.launch for instance in self.cell.instances):
            for name, weights in (statistics.two_by_two(self.cell, launch) or {}).items():
                estimate = statistics.contrast(self.cell, weights, seed=self.plan.seed, resamples=self.plan.resamples)
                limit = None if floor is None else floor * statistics.floor_factor(list(weights.values()))
                throttled = self.cell.throttled[list(weights)]
                judgement = statistics.judge(
                    estimate,
                    limit,
                    throttled_share=float(np.nanmax(throttled)) if np.isfinite(throttled).any() else math.nan,
                )
                yield {
                    **self.keys,
                    "launch": launch,
                    "effect": name,
                    **_interval(estimate, limit),
                    "verdict": judgement.verdict,
                    "verdict_reason": judgement.reason,
                    "processes": estimate.processes if estimate else 0,
                    "blocks": self.cell.blocks,
                    "status": "passed" if estimate else "not_measured",
                    "reason": "" if estimate else "no data",
                }


def _interval(estimate: Estimate | None, floor: float | None) -> dict[str, float]:
    values = (estimate.value, estimate.low, estimate.high) if estimate else (math.nan,) * 3
    names = ("log_ratio", "log_ratio_low", "log_ratio_high")
    return {
        **dict(zip(names, map(float, values), strict=True)),
        "ratio": math.exp(values[0]),
        "ratio_low": math.exp(values[1]),
        "ratio_high": math.exp(values[2]),
        "floor_log_ratio": math.nan if floor is None else floor,
    }


def questions(instances: Sequence[Instance]) -> Iterator[tuple[str, Instance, Instance]]:
    """Pairs beyond "against FP16" that the chapter asks about, for the arms that a cell holds."""
    for question, arm, baseline in _questions(instances):
        if arm in instances and baseline in instances:
            yield question, arm, baseline


def _questions(instances: Sequence[Instance]) -> Iterator[tuple[str, Instance, Instance]]:
    launches_of: dict[str, list[str]] = {}
    for instance in instances:
        launches_of.setdefault(instance.arm, []).append(instance.launch)

    def public(arm: str) -> list[str]:
        return [
            launch
            for launch in launches_of.get(arm, [])
            if launch not in (BEST_LAUNCH, OWN_LAUNCH) and not launch.startswith(PARTITION_PREFIX)
        ]

    for launch in launches_of.get("in_loop/exp2", []):
        yield "both public changes", Instance("hoisted/bitcast", launch), Instance("in_loop/exp2", launch)
    for arm, launches in launches_of.items():
        if BEST_LAUNCH in launches:
            for launch in public(arm):
                yield "best against public launch", Instance(arm, BEST_LAUNCH), Instance(arm, launch)
    for dot in ("fp16", "hoisted/packed"):
        for vector_launch in launches_of.get(f"{dot}+vector", []):
            for launch in launches_of.get(dot, []):
                yield "vector against dot", Instance(f"{dot}+vector", vector_launch), Instance(dot, launch)
    for launch in launches_of.get("hoisted/packed+vector", []):
        yield "E4M3 against FP16, vector", Instance("hoisted/packed+vector", launch), Instance("fp16+vector", launch)
    for arm in ("hoisted/packed", "hoisted/native"):
        for launch in public("hoisted/native"):
            if BEST_LAUNCH in launches_of.get(arm, []):
                yield "against public native", Instance(arm, BEST_LAUNCH), Instance("hoisted/native", launch)
    for name in BASELINES:
        dtype_is_e4m3 = name.endswith("e4m3")
        for arm, launches in launches_of.items():
            if arm in ARMS and ARMS[arm].is_quantised == dtype_is_e4m3 and BEST_LAUNCH in launches:
                yield f"against {name.split('/')[0]}", Instance(arm, BEST_LAUNCH), Instance(name, OWN_LAUNCH)
    partitions = sorted(
        {launch for launches in launches_of.values() for launch in launches if launch.startswith(PARTITION_PREFIX)},
        key=lambda launch: int(launch.removeprefix(PARTITION_PREFIX)),
    )
    if len(partitions) >= 2:
        small, large = partitions[0], partitions[-1]
        for arm, launches in launches_of.items():
            if small in launches and large in launches:
                yield "partition alone", Instance(arm, small), Instance(arm, large)
                if arm in ARMS and ARMS[arm].is_quantised:
                    yield "dtype and partition mixed", Instance(arm, small), Instance("fp16", large)


def analyse(raw: Mapping[str, pd.DataFrame], plan: Plan) -> dict[str, pd.DataFrame]:
    """All tables of a run: the raw ones and `latency_cells`, `latency_pairs`, `latency_effects`."""
    workloads = raw["latency_workloads"].set_index("workload")
    processes = raw["latency_processes"]
    device = {
        "device": processes["device"].iloc[0],
        "sync_method": processes["sync_method"].iloc[0],
        "resolution_us": float(processes["resolution_us"].max()),
        "copy_gb_per_s": float(processes["copy_gb_per_s"].median()),
    }
    judges = []
    for cell in statistics.cells(raw["latency_samples"], CELL_KEYS):
        stage, workload, code_path, _ = cell.key
        gates = raw["latency_gates"]
        mine = gates[(gates[UNIT_KEYS] == [stage, workload, code_path]).all(axis=1) & (gates["status"] == "passed")]
        judges.append(
            _Judge(
                cell,
                plan=plan,
                workload={str(key): value for key, value in workloads.loc[workload].items()},
                gates=mine,
                device=device,
            )
        )
    rows: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    effects: list[dict[str, Any]] = []
    for judge in judges:
        floor = judge.floor_of_cell
        for instance in judge.cell.instances:
            limit = _floor_of_others(judge, judges) if instance.arm == COPY_ARM else floor
            rows.append(judge.row_of_cell(instance, limit))
        pairs += judge.pairs(floor)
        effects += judge.effects(floor)
    cells = pd.DataFrame(rows)
    cells = pd.concat([cells, _unmeasured(raw["latency_gates"], cells)], ignore_index=True)
    return {
        **raw,
        "latency_cells": cells,
        "latency_pairs": pd.DataFrame(pairs),
        "latency_effects": pd.DataFrame(effects),
    }


def _floor_of_others(judge: _Judge, judges: Sequence[_Judge]) -> float | None:
    """The A/A arm is judged by the floors of the other cells, since its own could never be cleared."""
    others = [
        other.floor_of_cell
        for other in judges
        if other is not judge
        and other.floor_of_cell is not None
        and all(other.keys[key] == judge.keys[key] for key in ("code_path", "cache_state"))
    ]
    return float(np.median(others)) if others else judge.floor_of_cell


def _unmeasured(gates: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """A row for every arm that has no sample, with the reason."""
    red = gates[gates["status"] != "passed"].drop_duplicates([*UNIT_KEYS, "arm", "launch"])
    measured = set(cells[[*UNIT_KEYS, "arm", "launch"]].itertuples(index=False, name=None))
    names = (*UNIT_KEYS, "arm", "launch", *_TILE_COLUMNS, "relative_error", "status", "reason")
    rows = [
        {name: entry[name] for name in names}
        for entry in red.to_dict("records")
        if tuple(entry[name] for name in (*UNIT_KEYS, "arm", "launch")) not in measured
    ]
    return _empty_rows(rows, cells)


def with_open_units(cells: pd.DataFrame, units: Iterable[Unit]) -> pd.DataFrame:
    """`latency_cells` with a row "not measured" for every arm of the units that no process has finished."""
    measured = set(cells[UNIT_KEYS].itertuples(index=False, name=None))
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for unit in units:
        place = (unit.stage.name, unit.workload.name, unit.code_path)
        if place in measured:
            continue
        for arm, launch in unit.candidates():
            rows[(*place, arm, launch)] = {
                **dict(zip((*UNIT_KEYS, "arm", "launch"), (*place, arm, launch), strict=True)),
                "status": "not_measured",
                "reason": "not reached within the time of this run",
            }
    return pd.concat([cells, _empty_rows(list(rows.values()), cells)], ignore_index=True)


def _empty_rows(rows: Sequence[Mapping[str, Any]], like: pd.DataFrame) -> pd.DataFrame:
    """Rows in the columns of `latency_cells` that hold nothing but what is given."""
    kinds = {name: like[name].dtype.kind for name in like.columns}
    blank: dict[str, Any] = {"i": 0, "f": math.nan, "O": ""}
    words = {
        "cache_state": "cold",
        "baseline_arm": _NOT_SEEN,
        "baseline_launch": _NOT_SEEN,
        "full_protocol": "no",
        "same_partition": "not applicable",
        "verdict": "not measurable",
    }
    filled = [
        {name: blank[kind] for name, kind in kinds.items()} | words | dict(row) | {"verdict_reason": row["reason"]}
        for row in rows
    ]
    return pd.DataFrame(filled, columns=like.columns).astype(like.dtypes.to_dict())


def false_positives(cells: pd.DataFrame) -> tuple[int, int]:
    """A/A cells that a floor from the other cells would call faster or slower, and all A/A cells."""
    copies = cells[(cells["arm"] == COPY_ARM) & (cells["status"] == "passed")]
    return int(copies["verdict"].isin(["faster", "slower"]).sum()), len(copies)


def facts(run: Path) -> dict[str, Any]:
    """What `recorder.open_run` stored about machine and provenance."""
    return json.loads((run / "facts.json").read_text(encoding="utf-8"))
