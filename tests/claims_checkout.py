"""A checkout whose chapters and recorded runs make every claim of the ledger hold, from tables of a few rows."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qsa_kernels.report import claims, live_checks, manifest, repository, tables
from qsa_kernels.report.manifest import StoredFile

Rows = Sequence[Mapping[str, Any]]

_LONG = {"case": "published-topk2051", "arm": "hoisted/bitcast", "mode": "split", "reference": "fp32"}
_CASES = ("published-topk10", "published-topk33", "published-topk2051")
_EFFECT = {"arm": "calibrated", "against": "fp16"}
_CORE = {"stage": "core", "cache_state": "cold", "launch": "best"}
_DECODE = _CORE | {"workload": "decode-32-32k-clustered"}
_WORKLOADS = (
    *(f"decode-{rows}-32k-clustered" for rows in (1, 4, 8, 32, 128)),
    *(f"prefill-{rows}-32k-overlap90" for rows in (512, 2048)),
)
_PARTITION = {"stage": "partition", "workload": "decode-8-32k-clustered", "arm": "hoisted/native"}
_KNOWN = {"status": "passed", "reason": "", "device": "NVIDIA H200"}
_NOISE = {"floor_log_ratio": 0.01}


def _ratio(value: float) -> dict[str, float]:
    return {"ratio": value, "ratio_low": value * 0.98, "ratio_high": value * 1.03, **_NOISE}


def _time(value: float) -> dict[str, float]:
    return {"time_us": value, "least_process_us": value * 0.99, "largest_process_us": value * 1.02}


CHAPTERS: dict[str, dict[str, Rows]] = {
    "error": {
        "error_cells": [
            _LONG | {"case": case, "mode": mode, "reference": reference, "arm": arm, "max_abs": 8.7e-6}
            for case in _CASES
            for mode in ("single", "split")
            for reference in ("fp64", "fp32")
            for arm in ("hoisted/bitcast", "fp16")
        ],
        "error_real_cells": [_LONG],
        "error_seeds": [{"arm": "hoisted/bitcast", "max_abs": value} for value in (7.7e-6, 9.3e-6)],
        "error_overflow": [{"route": "control: products clamped to FP16", "output": 0.5}],
    },
    "codegen": {
        "codegen_identity": [
            {"contraction": contraction, "code_sha256": contraction * 3}
            for contraction in ("dot", "vector")
            for _ in range(3)
        ],
        "codegen_reported": [
            {"point": "v100-16x4", "explained_share": 0.83, "spill_store_bytes": 0.0},
            {"point": "v100-64x2", "explained_share": 0.06, "spill_store_bytes": 17684.0},
        ],
    },
    "calibration": {
        "calibration_saturation_by_text": [
            {"role": "calibration", "saturated_codes": 0},
            {"role": "evaluation", "saturated_codes": 7},
        ],
        "calibration_repeat": [{}],
    },
    "quality": {
        "quality_effects": [
            _EFFECT | {"measure": "perplexity change", "verdict": "no difference seen"},
            _EFFECT | {"measure": "KL divergence", "verdict": "worse", "value": 0.01},
            _EFFECT | {"measure": "KL divergence", "verdict": "worse", "value": 0.14, "arm": "half"},
        ],
        "quality_kernel": [{"differing_values": 0}],
    },
    "latency": {"latency_v100": [{"point": "v100-16x4", "miss_percent": -5.5, "device": "NVIDIA H200"}]},
}
GLUE: dict[str, dict[str, float | str]] = {
    "error": {
        "error_rms_ratio_in_loop_to_hoisted": 1.25,
        "error_rms_ratio_in_loop_to_hoisted_real": 2.7,
        "error_quantisation_over_kernel": 103.0,
    },
    "codegen": {
        "codegen_loop_baseline": 2406,
        "codegen_loop_bitcast": 2175,
        "codegen_loop_hoisted": 2333,
        "codegen_loop_both": 2112,
        "codegen_loop_packed": 1121,
        "codegen_loop_fp16": 1129,
        "codegen_shared_over_memory": 4.4,
        "codegen_vector_binding": "device memory",
    },
    "calibration": {
        "calibration_saturated_codes_second_text": 128,
        "calibration_half_scale_error_ratio": 3.7,
        "calibration_exchanged_scale_error_ratio": 5.5,
        "calibration_unit_scale_error_ratio": 1.006,
    },
    "quality": {"quality_e4m3_indexer_alone_jaccard": 0.94, "quality_contract_jaccard": 0.97},
    "latency": {},
}
PARAMETERS = {"error": {"topk": 2051, "head_dim": 256, "q_heads": 6}}
LATENCY: dict[str, Rows] = {
    "latency_cells": [
        {"stage": "core", "arm": "A/A", "verdict": "same"},
        *(
            _DECODE | {"code_path": path, "arm": arm} | _ratio(value)
            for path, arm, value in (
                ("device", "hoisted/packed", 0.78),
                ("device", "hoisted/bitcast", 2.6),
                ("sm_70", "hoisted/bitcast", 1.13),
                ("sm_70", "hoisted/packed", 1.01),
            )
        ),
        *(
            _CORE
            | {"code_path": "device", "workload": name, "arm": "hoisted/native", "transposed": 1.0}
            | _ratio(value)
            for name, value in zip(_WORKLOADS, (0.84, 0.79, 0.72, 0.57, 0.54, 0.67, 0.71), strict=True)
        ),
        *(
            {"stage": "public-v100", "code_path": "sm_70", "arm": "fp16", "launch": launch} | _time(time_us)
            for launch, time_us in (("tile-64x2x1", 128000.0), ("tile-16x4x1", 12100.0))
        ),
        *(
            {"stage": "grid", "workload": f"decode-128-{context}-clustered", "arm": arm, "launch": "best"}
            | _time(time_us)
            for arm, times in (("fp16", (44.0, 75.0)), ("hoisted/native", (28.0, 45.0)))
            for context, time_us in zip(("1k", "32k"), times, strict=True)
        ),
        _PARTITION | {"launch": "partition-256"} | _ratio(0.78),
    ],
    "latency_pairs": [
        *(
            _CORE
            | {"code_path": "sm_70", "workload": name, "question": "vector against dot", "baseline_launch": launch}
            | _ratio(value)
            for name in _WORKLOADS[3:]
            for launch, value in (("best", 0.4), ("pre_ampere", 0.25))
        ),
        *(
            _CORE
            | {"code_path": "sm_70", "workload": name, "question": "E4M3 against FP16, vector"}
            | {"baseline_launch": "best"}
            | _ratio(1.05 if name == _WORKLOADS[0] else 0.79)
            for name in _WORKLOADS
        ),
        *(
            _CORE
            | {"code_path": "device", "workload": name, "question": question, "arm": "hoisted/native"}
            | _ratio(value)
            for name in _WORKLOADS
            for question, value in (("against public native", 0.7), ("against flashinfer", 0.6))
        ),
        _PARTITION | {"question": "partition alone"} | _ratio(0.35),
        _PARTITION | {"question": "dtype and partition mixed"} | _ratio(0.26),
    ],
    "latency_effects": [
        _CORE
        | {"code_path": path, "workload": name, "launch": launch, "effect": effect, "floor_log_ratio": 0.001}
        | {"ratio": value, "ratio_low": value * 0.998, "ratio_high": value * 1.003}
        for name in _WORKLOADS
        for path, launch, effect, value in (
            ("sm_70", "best", "decoder", 0.95),
            ("sm_70", "pre_ampere", "decoder", 0.995),
            ("sm_70", "best", "placement", 1.03),
            ("sm_70", "pre_ampere", "placement", 1.01),
            ("device", "best", "decoder", 0.9),
            ("device", "best", "placement", 1.3),
        )
    ],
}
QUALITY: dict[str, Rows] = {
    "quality_effects": [
        _EFFECT | {"measure": "perplexity change", "verdict": "worse", "value": 1.07},
        {"arm": "unit", "against": "calibrated", "measure": "perplexity change", "verdict": "same", "value": -0.07},
    ]
}
RECORDED = {"h200-latency": ("latency", LATENCY), "h200-quality": ("quality", QUALITY)}


def frame(name: str, rows: Rows) -> pd.DataFrame:
    """Rows of a table, with something that its schema allows in the columns that they leave out."""
    columns = tables.SCHEMAS[name].columns

    def filler(column: str) -> object:
        if column in _KNOWN:
            return _KNOWN[column]
        allowed = [check.statistics["allowed_values"] for check in columns[column].checks if check.name == "isin"]
        dtype = str(columns[column].dtype)
        return next(iter(allowed[0])) if allowed else {"float64": 1.0, "int64": 3, "bool": False}.get(dtype, "any")

    return pd.DataFrame([{column: row.get(column, filler(column)) for column in columns} for row in rows])


def store(
    folder: Path,
    chapter: str,
    frames: Mapping[str, Rows],
    *,
    device: str = "NVIDIA H200",
    executed_on: str = "cuda",
    started: str = "2026-09-03T10:00:00Z",
) -> None:
    """A run folder with these tables."""
    stored = {}
    for name, rows in frames.items():
        path = tables.write(frame(name, rows), name, folder / "tables")
        stored[name] = StoredFile(file=f"tables/{path.name}", sha256=repository.sha256(path))
    manifest.make(
        run_id=folder.name,
        chapter=chapter,
        profile="cpu",
        parameters=PARAMETERS.get(chapter, {}),
        commit="a" * 40,
        dirty=False,
        package_sha256="5" * 64,
        inputs={},
        started=started,
        wall_time_s=1.0,
        seed=7,
        executed_on=executed_on,
        device={"name": device},
        versions={"triton": "3.6.0"},
        host={"cpus": 2},
        glue=GLUE.get(chapter, {}) if executed_on == "interpreter" else {},
        tables=stored,
        notebook=None,
    ).write(folder / "manifest.json")


def make(root: Path, *, chapters: bool = True, recorded: bool = True) -> None:
    """The checkout, with the ledger and the public figures of this repository.

    Args:
        root: an empty folder.
        chapters: publish a page of every chapter that a claim rests on.
        recorded: store the recorded runs.
    """
    checkout = Path(__file__).resolve().parents[1]
    (root / "notebooks").mkdir()
    (root / "data/runs").mkdir(parents=True)
    shutil.copy(checkout / "data/claims.yaml", root / "data/claims.yaml")
    shutil.copytree(checkout / "data/reported", root / "data/reported")
    for chapter, frames in CHAPTERS.items() if chapters else ():
        store(root / "runs" / f"{chapter}-1", chapter, frames, device="none", executed_on="interpreter")
        page = root / "book/results" / f"{chapter}.ipynb"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(json.dumps({"cells": [], "metadata": {"qsa": {"run_id": f"{chapter}-1"}}}), encoding="utf-8")
    for run_id, (chapter, frames) in RECORDED.items() if recorded else ():
        store(root / "data/runs" / run_id, chapter, frames)


def expected_checks(ledger: Sequence[claims.Claim]) -> dict[str, Any]:
    """Live checks that answer at once with what the ledger expects."""
    expected = {one.check.compute: one.expected for one in ledger if one.check is not None and one.check.compute}
    assert set(expected) == set(live_checks.CHECKS)
    return {name: lambda value=value: value for name, value in expected.items()}


def table_files(root: Path) -> dict[str, Path]:
    """Every table that a claim can rest on, by the name that `Claim.places` gives it."""
    files = {f"data/reported/{path.name}": path for path in (root / "data/reported").glob("*.csv")}
    for chapter, frames in CHAPTERS.items():
        folder = root / "runs" / f"{chapter}-1"
        files |= {f"{chapter}/{name}": folder / "tables" / f"{name}.csv" for name in frames}
        files[f"{chapter}/glue"] = folder / "manifest.json"
    for run_id, (_, frames) in RECORDED.items():
        files |= {f"recorded {name}": root / "data/runs" / run_id / "tables" / f"{name}.csv" for name in frames}
    return files


def change(folder: Path, name: str, old: str, new: str) -> None:
    """Change the text of a run's table, and its manifest so that it agrees."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    file = folder / content["tables"][name]["file"]
    file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    content["tables"][name]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    path.write_text(json.dumps(content), encoding="utf-8")
