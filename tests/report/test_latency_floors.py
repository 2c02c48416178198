"""How far a time is from its bytes, and the counts that the chapter names as mechanisms."""

import pandas as pd
import pytest

from qsa_kernels.measure import codegen
from qsa_kernels.report import latency_page, tables
from qsa_kernels.report.latency_page import Measured

COPY_GB_PER_S = 4000.0


def measured(fp16_us: float, e4m3_us: float) -> Measured:
    """One decode workload of 80 MB in FP16 and 40 MB in E4M3."""
    names = {"workload": "decode-32-32k-x", "code_path": "device", "stage": "core", "cache_state": "cold"}
    common = names | {"launch": "best", "status": "passed", "verdict": "faster", "verdict_reason": "", "block_n": 32.0}
    ratios = dict.fromkeys(("ratio", "ratio_low", "ratio_high", "num_splits", "num_warps", "num_stages"), 1.0)
    cells = [
        {**common, **ratios, "arm": arm, "time_us": us} for arm, us in (("fp16", fp16_us), ("hoisted/native", e4m3_us))
    ]
    sizes = {"workload": "decode-32-32k-x", "kind": "decode", "rows": 32, "context": 32768}
    return Measured(
        {
            "latency_cells": pd.DataFrame(cells),
            "latency_workloads": pd.DataFrame([sizes | {"bytes_fp16": 80e6, "bytes_e4m3": 40e6}]),
            "latency_processes": pd.DataFrame([{"copy_gb_per_s": COPY_GB_PER_S}]),
        },
        "a device",
    )


def test_the_further_bytes_of_fp16_give_the_rate_and_what_is_fixed() -> None:
    found = tables.validate(latency_page.floors(measured(30.0, 20.0)), "latency_floors")
    line = found.iloc[0]
    # 40 MB more in 10 us; 40 MB at that rate take 10 of the 20 us
    assert line["further_bytes_gb_per_s"] == pytest.approx(4000.0)
    assert line["fixed_us"] == pytest.approx(10.0)
    assert (line["fp16_floor_us"], line["e4m3_floor_us"]) == pytest.approx((20.0, 10.0))
    assert latency_page.floor_sentence(found, 32) == (
        "20.0 us against 10.0 us of bytes, with 10.0 us fixed and further bytes at 4,000 GB/s"
    )
    assert latency_page.floor_sentence(found, 8) == "not measured"


def test_bytes_that_cost_nothing_have_no_rate() -> None:
    line = tables.validate(latency_page.floors(measured(20.0, 20.0)), "latency_floors").iloc[0]
    assert pd.isna(line["further_bytes_gb_per_s"])
    assert pd.isna(line["fixed_us"])


def test_without_a_run_there_is_no_floor() -> None:
    found = latency_page.floors(Measured({}, "no device"))
    assert tables.validate(found, "latency_floors").empty


def test_the_mechanisms_are_counted_from_kernels_that_show_them() -> None:
    wanted = [
        request
        for request in latency_page.mechanism_requests()
        if (request.block_n, request.num_warps) == (16, 4) or request.arm == "hoisted/native"
    ]
    counts = latency_page.mechanism_counts(codegen.compile_kernels(wanted))
    # each element once with the scale in the loop, in pairs; elements of other warps too after hoisting, one by one
    assert 1.4 < counts["conversions_in_loop"] < 1.6
    assert 2.9 < counts["conversions_hoisted"] < 3.1
    assert counts["hoisted_over_in_loop"] > 1.3
    assert counts["native_tensor_transposed"] == counts["native_tensor_heads_first"] / 2
    assert counts["native_byte_loads_transposed"] < 8 < counts["native_byte_loads_heads_first"]
