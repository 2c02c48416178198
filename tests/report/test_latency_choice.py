"""Which arm the latency chapter names for each workload."""

from __future__ import annotations

import pandas as pd
import pytest

from qsa_kernels.report import latency_page, tables

FP16, VECTOR, PACKED, NATIVE = "fp16", "fp16+vector", "hoisted/packed", "hoisted/native"


def cell(workload: str, arm: str, time_us: float, verdict: str = "slower", **changes: object) -> dict[str, object]:
    row: dict[str, object] = {"stage": "core", "cache_state": "cold", "launch": "best", "status": "passed"}
    row |= {"code_path": "device", "workload": workload, "arm": arm, "time_us": time_us, "verdict": verdict}
    row |= {"ratio": time_us / 40.0, "ratio_low": time_us / 41.0, "ratio_high": time_us / 39.0, "verdict_reason": ""}
    return {**row, "block_n": 16.0, "num_splits": 8.0, "num_warps": 4.0, "num_stages": 2.0, **changes}


def measured(*cells: dict[str, object]) -> latency_page.Measured:
    frame = pd.DataFrame(cells)
    names = sorted(set(frame["workload"]))
    workloads = pd.DataFrame({"workload": names, "kind": "decode", "rows": range(len(names)), "context": 1024})
    return latency_page.Measured({"latency_cells": frame, "latency_workloads": workloads}, "GPU")


def test_the_fastest_arm_of_each_cache_type_is_named_with_its_launch():
    found = latency_page.choices(
        measured(
            cell("a", FP16, 40.0, "same"),
            cell("a", VECTOR, 35.0),
            cell("a", PACKED, 30.0, "faster", block_n=64.0),
            cell("a", NATIVE, 31.0, "faster"),
            cell("a", NATIVE, 1.0, launch="sm90_public"),
            cell("a", NATIVE, 1.0, cache_state="hot"),
            cell("a", NATIVE, 1.0, stage="grid"),
            cell("a", "sdpa/e4m3", 1.0),
        )
    )
    row = tables.validate(found, "latency_choice").iloc[0]
    assert (row["e4m3_arm"], row["fp16_arm"], row["verdict"]) == (PACKED, VECTOR, "faster")
    assert (row["e4m3_time_us"], row["fp16_time_us"], row["block_n"]) == (30.0, 35.0, 64.0)
    assert row["ratio"] == pytest.approx(0.75)


def test_what_is_not_measurable_does_not_compete():
    broken = {"verdict": "not measurable", "verdict_reason": "AB and BA disagree"}
    found = latency_page.choices(
        measured(
            cell("a", FP16, 40.0, "same"),
            cell("a", PACKED, 20.0, **broken),
            cell("a", NATIVE, 45.0),
            cell("b", FP16, 40.0, "same"),
            cell("b", PACKED, 20.0, **broken),
        )
    ).set_index("workload")
    assert found.loc["a", "e4m3_arm"] == NATIVE
    assert found.loc["b", "status"] == "not_measured"
    assert found.loc["b", "reason"] == "no E4M3 arm is measurable: AB and BA disagree"
    assert pd.isna(found.loc["b", "ratio"])


def test_the_sentence_counts_what_could_be_judged():
    run = measured(
        cell("a", PACKED, 30.0),
        cell("b", PACKED, 30.0),
        cell("c", NATIVE, 30.0),
        cell("d", PACKED, 30.0, "not measurable"),
        cell("a", NATIVE, 30.0, code_path="sm_70"),
    )
    assert (
        latency_page.choice_sentence(run, "device") == f"{PACKED} in 2 of 3 workloads and {NATIVE} in 1 of 3 workloads"
    )
    assert latency_page.choice_sentence(run, "sm_70") == f"{NATIVE} in 1 of 1 workloads"
    assert latency_page.choice_sentence(latency_page.Measured({}, "no device"), "device") == "not measured"
