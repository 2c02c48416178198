"""What the latency chapter shows: the tables of a run, the sentences made from them, and the check against a V100."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qsa_kernels.arms import ARMS
from qsa_kernels.measure import codegen, sass
from qsa_kernels.measure.codegen import CompiledKernel, KernelRequest
from qsa_kernels.measure.latency import results
from qsa_kernels.measure.latency.plan import BEST_LAUNCH
from qsa_kernels.measure.roofline import DEVICES
from qsa_kernels.report import recording, repository, tables
from qsa_kernels.report.chapter import Page

NOT_MEASURED = "not measured: no latency run is recorded"
GRID_ARMS = ("in_loop/exp2", "hoisted/bitcast", "hoisted/packed", "hoisted/native")
LONG_CONTEXT = "32k"
V100 = "V100-SXM2"
# Published time of a kernel -> the launch that measures the same launch here.
V100_POINTS = {"v100-64x2": "tile-64x2x1", "v100-16x4": "tile-16x4x1"}

_LAUNCH = ("block_n", "num_splits", "num_warps", "num_stages", "transposed")
_CHOICE_NUMBERS = ("ratio", "ratio_low", "ratio_high", "e4m3_time_us", "fp16_time_us", *_LAUNCH)


@dataclass(frozen=True)
class Measured:
    """Tables of one run, or nothing.

    Args:
        frames: tables by name; empty where nothing was measured.
        device: name of the device.
    """

    frames: Mapping[str, pd.DataFrame]
    device: str

    @property
    def there(self) -> bool:
        return bool(self.frames)

    def cells(self, **wanted: Any) -> pd.DataFrame:
        """Rows of `latency_cells` with these values, in the order of the plan."""
        return self._rows("latency_cells", wanted)

    def pairs(self, **wanted: Any) -> pd.DataFrame:
        return self._rows("latency_pairs", wanted)

    def effects(self, **wanted: Any) -> pd.DataFrame:
        return self._rows("latency_effects", wanted)

    def table(self, name: str) -> pd.DataFrame:
        return self.frames[name] if self.there else _without_rows(name)

    def _rows(self, name: str, wanted: Mapping[str, Any]) -> pd.DataFrame:
        frame = self.table(name)
        for column, value in wanted.items():
            frame = frame[frame[column] == value]
        if frame.empty or not self.there:
            return frame
        measured = self.frames["latency_workloads"].sort_values(["kind", "rows", "context"])["workload"]
        order = {name: place for place, name in enumerate(measured)}
        # an incomplete run knows nothing but the names of what it did not come to
        return frame.sort_values("workload", key=lambda names: names.map(order).fillna(len(order)), kind="stable")

    def label(self, code_path: str) -> str:
        """The name under which a code path is shown; the second is never called V100."""
        return f"sm_70 code path on {self.device}" if code_path == "sm_70" else f"{self.device}, own code path"

    @property
    def code_paths(self) -> dict[str, str]:
        """Code paths of the run, with their names."""
        known = set(self.table("latency_cells")["code_path"])
        return {path: self.label(path) for path in ("device", "sm_70") if path in known}

    @property
    def copy_gb_per_s(self) -> float:
        """Measured copy bandwidth, NaN where nothing was measured."""
        return float(self.frames["latency_processes"]["copy_gb_per_s"].median()) if self.there else float("nan")


def _without_rows(name: str) -> pd.DataFrame:
    return pd.DataFrame({column: pd.Series(dtype=object) for column in tables.SCHEMAS[name].columns})


def load(page: Page, source: str, profile: str, cells: Sequence[str], budget_s: float) -> Measured:
    """The run to draw, with its banner; a live measurement only where there is a device for it.

    Raises:
        ValueError: no such run, or one for another device.
        RuntimeError: a live measurement was asked for where nothing can be measured.
    """
    if source == recording.NEWEST:
        newest = recording.newest()
        if newest is None:
            return Measured({}, "no device")
        source = f"recorded:{newest}"
    run = page.recorded(source)
    if run is None:
        return Measured(recording.live(profile, cells=cells, budget_s=budget_s), page.device_label)
    return Measured({name: run.table(name) for name in recording.TABLES}, str(run.manifest.device["name"]))


def _percent(log_ratio: float) -> str:
    return f"{100 * float(np.expm1(log_ratio)):+.1f} %"


def effect_sentence(measured: Measured, effect: str, code_path: str, workload: str, launch: str = BEST_LAUNCH) -> str:
    """One effect with its interval and verdict, in words; says so where it was not measured.

    Args:
        measured: the run.
        effect: "placement", "decoder" or "interaction".
        code_path: "device" or "sm_70".
        workload: start of the workload's name, such as "decode-8-32k".
        launch: launch profile of all four arms.
    """
    rows = measured.effects(
        stage="core", effect=effect, code_path=code_path, launch=launch, cache_state="cold", status="passed"
    )
    rows = rows[rows["workload"].str.startswith(f"{workload}-")] if len(rows) else rows
    if rows.empty:
        return "not measured"
    row = rows.iloc[0]
    interval = f"95 % interval {_percent(row['log_ratio_low'])} to {_percent(row['log_ratio_high'])}"
    floor = f"noise floor {100 * float(np.expm1(row['floor_log_ratio'])):.1f} %"
    return f"{_percent(row['log_ratio'])} ({interval}; {floor}; {row['verdict']})"


def summary_sentence(measured: Measured) -> str:
    """How many ratios there are, how they came out, and how many planned ones have no time."""
    if not measured.there:
        return NOT_MEASURED
    cells = measured.cells()
    arms = cells[(cells["arm"] != "A/A") & (cells["baseline_arm"] != cells["arm"])]
    timed = arms[arms["status"] == "passed"]
    counts = timed["verdict"].value_counts()
    words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in counts.index)
    missing = len(arms) - len(timed)
    return f"{len(timed)} ratios: {words}" + (f"; {missing} planned ones have no time yet" if missing else "")


def noise_sentence(measured: Measured) -> str:
    """The noise floor and how often the A/A arm would have been called different."""
    if not measured.there:
        return NOT_MEASURED
    cells = measured.cells()
    wrong, copies = results.false_positives(cells)
    floors = cells.loc[(cells["arm"] == "fp16") & cells["floor_log_ratio"].notna(), "floor_log_ratio"]
    low, middle, high = (100 * float(np.expm1(floors.quantile(share))) for share in (0.05, 0.5, 0.95))
    return (
        f"the floor is {middle:.2f} % in the median cell ({low:.2f} to {high:.2f} % in nine cells of ten); "
        f"{wrong} of {copies} A/A cells would have been called faster or slower"
    )


def best_sentence(measured: Measured) -> str:
    """Geometric mean over decode 8, 32 and 128 of the best E4M3 arm's time over that of FP16, own code path."""
    rows = measured.cells(stage="core", code_path="device", launch=BEST_LAUNCH, cache_state="cold", status="passed")
    arms = rows[rows["arm"].str.startswith("hoisted/")] if len(rows) else rows
    wanted = [f"decode-{number}-{LONG_CONTEXT}-" for number in (8, 32, 128)]
    best = [arms[arms["workload"].str.startswith(name)]["ratio"].min() for name in wanted] if len(arms) else []
    if not best or any(pd.isna(best)):
        return "not measured"
    return f"{float(np.exp(np.mean(np.log(best)))):.2f} of the time of FP16"


def choices(measured: Measured) -> pd.DataFrame:
    """The fastest arm of each cache type for every cold workload of the core stage, each arm at its own best launch.

    The ratio is that of the E4M3 arm to FP16 through the dot, with its interval and verdict. Arms whose ratio is not
    measurable do not compete; a workload where no E4M3 arm is left stays in the table, with the reason.
    """
    cells = measured.cells(stage="core", cache_state="cold", launch=BEST_LAUNCH, status="passed")
    cells = cells[cells["arm"].isin(ARMS)] if len(cells) else cells
    rows = []
    for (code_path, workload), group in cells.groupby(["code_path", "workload"], sort=False):
        usable = group[group["verdict"] != "not measurable"].sort_values("time_us")
        is_e4m3 = usable["arm"].map(lambda arm: ARMS[arm].is_quantised)
        row = {"code_path": code_path, "workload": workload, **dict.fromkeys(_CHOICE_NUMBERS, np.nan)}
        row |= dict.fromkeys(("e4m3_arm", "verdict", "fp16_arm"), "none")
        if len(others := usable[~is_e4m3.astype(bool)]):
            row |= {"fp16_arm": others["arm"].iloc[0], "fp16_time_us": others["time_us"].iloc[0]}
        if len(found := usable[is_e4m3.astype(bool)]):
            best = found.iloc[0]
            row |= {"e4m3_arm": best["arm"], "e4m3_time_us": best["time_us"], "verdict": best["verdict"]}
            row |= {name: best.get(name, np.nan) for name in ("ratio", "ratio_low", "ratio_high", *_LAUNCH)}
            row |= {"status": "passed", "reason": ""}
        else:
            said = ", ".join(sorted({str(reason) for reason in group["verdict_reason"] if reason}))
            row |= {"status": "not_measured", "reason": f"no E4M3 arm is measurable: {said or 'no times'}"}
        rows.append(row)
    names = ["code_path", "workload", "e4m3_arm", "ratio", "verdict", "ratio_low", "ratio_high", "e4m3_time_us"]
    names += ["fp16_arm", "fp16_time_us", *_LAUNCH, "status", "reason"]
    frame = pd.DataFrame(rows, columns=names).astype(dict.fromkeys(_CHOICE_NUMBERS, float))
    return frame.sort_values("code_path", kind="stable", ignore_index=True)


def choice_sentence(measured: Measured, code_path: str) -> str:
    """Which E4M3 arms are the fastest, and in how many of the workloads that could be judged."""
    found = choices(measured).query("code_path == @code_path and status == 'passed'")
    if found.empty:
        return "not measured"
    counts = found["e4m3_arm"].value_counts()
    return " and ".join(f"{arm} in {counts[arm]} of {len(found)} workloads" for arm in counts.index)


def answer_cells(measured: Measured, workload: str) -> pd.DataFrame:
    """Cold cells of one workload of the core stage on the sm_70 code path; `workload` is the start of its name."""
    cells = measured.cells(stage="core", code_path="sm_70", cache_state="cold")
    return cells[cells["workload"].str.startswith(f"{workload}-")] if len(cells) else cells


def vector_ratios(measured: Measured, workload: str) -> dict[str, float]:
    """How the packed vector arm compares on the sm_70 code path; NaN where one side was not measured.

    Args:
        measured: the run.
        workload: start of the workload's name, such as "decode-128-32k".

    Returns:
        its time over that of FP16 through the dot ("fp16") and through the vector contraction ("fp16_vector"), each
        under its best launch, and the time of the merged public arm under the public launch over its own ("public").
    """
    cells = answer_cells(measured, workload)

    def time_us(arm: str, launch: str = BEST_LAUNCH) -> float:
        found = cells[(cells["arm"] == arm) & (cells["launch"] == launch)]
        return float(found["time_us"].iloc[0]) if len(found) else float("nan")

    own = time_us("hoisted/packed+vector")
    return {
        "fp16": own / time_us("fp16"),
        "fp16_vector": own / time_us("fp16+vector"),
        "public": time_us("hoisted/bitcast", "pre_ampere") / own,
    }


def reported() -> pd.DataFrame:
    """Public figures about latency, each with its source."""
    return tables.read(repository.root() / "data/reported/latency.csv", "latency_reported")


def against_v100(measured: Measured) -> pd.DataFrame:
    """Published V100 times beside times of the sm_70 code path, scaled by multiprocessors and clock.

    What a multiprocessor's pipes bind scales with their number and clock; constants are those of the roofline model.
    A published point that no measurement stands for stays in the table, with the reason.
    """
    here = next((name for name in DEVICES if name in measured.device and name != V100), None)
    rows = []
    for point in (
        reported().query("group == 'kernel' and device.str.startswith('V100') and unit == 'ms'").to_dict("records")
    ):
        row = {
            "point": point["point"],
            "what": point["what"],
            "setting": point["setting"],
            "device": measured.device,
            "reported_ms": point["value"],
            "measured_ms": np.nan,
            "factor": np.nan,
            "predicted_ms": np.nan,
            "miss_percent": np.nan,
            "source": point["source"],
            "kind": "derived",
            "source_url": point["source_url"],
            "status": "not_measured",
            "reason": "another kernel than the Triton route" if point["point"] not in V100_POINTS else NOT_MEASURED,
        }
        times = measured.cells(launch=V100_POINTS.get(point["point"], ""), arm="fp16", status="passed")
        if len(times):
            row["measured_ms"] = float(times["time_us"].iloc[0]) / 1e3
            on_v100 = "V100" in measured.device
            if here is None and not on_v100:
                row["reason"] = f"no constants of {measured.device}"
            else:
                row["factor"] = 1.0 if on_v100 or here is None else speed_factor(here)
                row["predicted_ms"] = row["measured_ms"] * row["factor"]
                row["miss_percent"] = 100.0 * (row["predicted_ms"] / row["reported_ms"] - 1.0)
                row |= {"status": "passed", "reason": ""}
        rows.append(row)
    return pd.DataFrame(rows)


def speed_factor(device: str) -> float:
    """Multiprocessors times clock of `device` over those of the V100.

    Raises:
        KeyError: no constants for the device.
    """
    rate = {name: DEVICES[name]["sms"].value * DEVICES[name]["clock"].value for name in (device, V100)}
    return rate[device] / rate[V100]


def unmeasured(measured: Measured) -> pd.DataFrame:
    """What this chapter does not show, and why; devices first."""
    rows = [
        ("latency on a V100", "device", "nobody has recorded a run there; 'qsa record --profile v100' makes one"),
        (
            "other routes of the V100 serving fork (grouped page-4, XQA)",
            "device",
            "CUDA kernels outside of this project",
        ),
        (
            "published gains of 16 columns with four warps over earlier profiles",
            "device",
            "the profiles before are not all known",
        ),
        (
            "end-to-end serving time",
            "device",
            "no server here; the figures reported in public stand in their own table",
        ),
    ]
    if "V100" in measured.device:
        rows = rows[1:]
    if not measured.there:
        rows.append(("every cell of this chapter", "device", NOT_MEASURED))
    else:
        red = measured.cells()
        red = red[red["status"] != "passed"].drop_duplicates(["stage", "workload", "code_path", "arm", "launch"])
        keys = ["stage", "arm", "launch", "code_path", "reason"]
        for group in red.groupby(keys, sort=False).size().reset_index(name="number").to_dict("records"):
            what = f"{group['arm']} with launch {group['launch']} in stage {group['stage']}"
            rows.append((f"{what}, {group['number']} workloads", group["code_path"], group["reason"]))
    frame = pd.DataFrame(rows, columns=["what", "code_path", "reason"])
    return frame.assign(status="not_measured")[["what", "code_path", "status", "reason"]]


def mechanism_requests() -> list[KernelRequest]:
    """Kernels of sm_90 that explain the launches: two public tiles, 16 columns, and tiles that the search chose."""
    arms = ("fp16", "in_loop/bitcast", "hoisted/bitcast", "hoisted/native")
    software, others = arms[1:3], (arms[0], arms[3], "hoisted/packed")
    return [
        *codegen.requests("sm_90", arms, block_n=64, num_warps=2),
        *codegen.requests("sm_90", arms, block_n=32, num_warps=1),
        *codegen.requests("sm_90", arms, block_n=16, num_warps=4),
        *codegen.requests("sm_90", software, block_n=32, num_warps=4, transposed=True),
        *codegen.requests("sm_90", others, block_n=32, num_warps=1, transposed=True),
        *codegen.requests("sm_90", others, block_n=64, num_warps=2, transposed=True),
    ]


def mechanism_counts(kernels: Sequence[CompiledKernel]) -> dict[str, float]:
    """The counts of `mechanism_requests` that the prose of the chapter speaks about.

    Returns:
        conversions for each K or V element under 16 columns and four warps with the scale in the loop and hoisted, the
        loop's instructions hoisted over in the loop there, and for the hardware conversion in one warp the loop's
        instructions, those of the tensor cores and the shared loads of one byte, before and after transposing.
    """
    by_launch = {
        (kernel.request.arm, kernel.request.block_n, kernel.request.num_warps, kernel.request.transposed): kernel
        for kernel in kernels
        if kernel.status == "passed"
    }
    loops = {key: sass.count(kernel.loop.instructions) for key, kernel in by_launch.items()}
    in_loop, hoisted = (f"{placement}/bitcast" for placement in ("in_loop", "hoisted"))
    software = {arm: by_launch[arm, 16, 4, False] for arm in (in_loop, hoisted)}
    found = {
        f"conversions_{arm.partition('/')[0]}": kernel.per_element(loops[arm, 16, 4, False]["conversion"])
        for arm, kernel in software.items()
    }
    found["hoisted_over_in_loop"] = len(software[hoisted].loop.instructions) / len(software[in_loop].loop.instructions)
    for label, transposed in (("heads_first", False), ("transposed", True)):
        key = ("hoisted/native", 32, 1, transposed)
        found[f"native_loop_{label}"] = len(by_launch[key].loop.instructions)
        found[f"native_tensor_{label}"] = loops[key].get("tensor_core", 0)
        found[f"native_byte_loads_{label}"] = loops[key].get("shared_load_8", 0)
    return found


def floors(measured: Measured) -> pd.DataFrame:
    """How far the fastest arm of each cache type is from bytes over copy bandwidth, own code path, decode, cold.

    FP16 and E4M3 of one workload read the same tokens and differ in their bytes, so the difference of their times
    gives the rate at which further bytes arrive; what the E4M3 time has beyond its bytes at that rate is fixed:
    launches, the chain of loads that leads to the first bytes, and the merge.
    """
    chosen = choices(measured).query("code_path == 'device' and status == 'passed'")
    sizes = measured.table("latency_workloads").set_index("workload") if measured.there else None
    rows = []
    for row in chosen[chosen["workload"].str.startswith("decode-")].to_dict("records"):
        assert sizes is not None
        size = sizes.loc[row["workload"]]
        seconds = row["fp16_time_us"] - row["e4m3_time_us"]
        rate = (size["bytes_fp16"] - size["bytes_e4m3"]) / seconds * 1e-3 if seconds > 0 else np.nan
        rows.append(
            {
                "workload": row["workload"],
                "fp16_arm": row["fp16_arm"],
                "fp16_time_us": row["fp16_time_us"],
                "fp16_floor_us": size["bytes_fp16"] / measured.copy_gb_per_s * 1e-3,
                "e4m3_arm": row["e4m3_arm"],
                "e4m3_time_us": row["e4m3_time_us"],
                "e4m3_floor_us": size["bytes_e4m3"] / measured.copy_gb_per_s * 1e-3,
                "further_bytes_gb_per_s": rate,
                "fixed_us": row["e4m3_time_us"] - size["bytes_e4m3"] / rate * 1e-3,
            }
        )
    names = list(tables.SCHEMAS["latency_floors"].columns)
    frame = pd.DataFrame(rows, columns=names[:-2]).assign(status="passed", reason="")
    return frame.astype({name: float for name in names if name.endswith(("_us", "_per_s"))})


def floor_sentence(found: pd.DataFrame, rows: int) -> str:
    """One line of `floors` in words."""
    lines = found[found["workload"].str.startswith(f"decode-{rows}-")]
    if lines.empty:
        return "not measured"
    line = lines.iloc[0]
    return (
        f"{line['e4m3_time_us']:.1f} us against {line['e4m3_floor_us']:.1f} us of bytes, "
        f"with {line['fixed_us']:.1f} us fixed and further bytes at {line['further_bytes_gb_per_s']:,.0f} GB/s"
    )
