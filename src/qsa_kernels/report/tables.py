"""Schemas of every table that the report stores or shows; checked at write and at read."""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import pandera.pandas as pa

STATUSES = ("passed", "failed", "skipped", "not_measured")


def _reason_given(table: pd.DataFrame) -> pd.Series:
    return (table["status"] == "passed") | (table["reason"].str.len() > 0)


def _finite_where_passed(names: Sequence[str]) -> pa.Check:
    def check(table: pd.DataFrame) -> pd.Series:
        return (table["status"] != "passed") | table[list(names)].notna().all(axis=1)

    return pa.Check(check, name="measured_where_passed", error=f"a passed row needs a value in each of {list(names)}")


def schema(columns: Mapping[str, pa.Column], *, measured: Sequence[str] = ()) -> pa.DataFrameSchema:
    """A schema with the columns that every table has: `status` and `reason`.

    Args:
        columns: the table's own columns by name, units in the name.
        measured: columns that may be empty only where `status` is not "passed".
    """
    checks = [pa.Check(_reason_given, name="reason_given", error="a row that did not pass needs a reason")]
    if measured:
        checks.append(_finite_where_passed(measured))
    base = {"status": pa.Column(str, pa.Check.isin(STATUSES)), "reason": pa.Column(str)}
    return pa.DataFrameSchema({**columns, **base}, checks=checks, strict=True, unique_column_names=True)


def number(*checks: pa.Check) -> pa.Column:
    """A float column that may be empty where nothing was measured."""
    return pa.Column(float, list(checks) or None, nullable=True)


def label(*allowed: str) -> pa.Column:
    """A text column; with `allowed`, one of those words."""
    return pa.Column(str, pa.Check.isin(allowed) if allowed else None)


def count(minimum: int = 0) -> pa.Column:
    """An integer column from `minimum` up."""
    return pa.Column(int, pa.Check.ge(minimum))


def optional(dtype: str) -> pa.Column:
    """A column of a nullable pandas type ("Int64", "boolean") that is empty where nothing was published."""
    return pa.Column(dtype, nullable=True)


_PUBLISHED = {"kind": label("reported", "derived"), "source_url": label()}
_DERIVED = {"kind": label("derived")}
_KV_CACHE_DTYPE = {"kv_cache_dtype": label("auto", "float16", "bfloat16", "fp8_e4m3")}
_SERVING = {"tp": count(1), "mtp": count(), "prefix_caching": pa.Column(bool), "max_model_len": count(1)}

_LATENCY_UNIT = {"stage": label(), "workload": label(), "code_path": label("device", "sm_70")}
_LATENCY_CELL = {**_LATENCY_UNIT, "cache_state": label("cold", "hot")}
_ARM = {"arm": label(), "launch": label()}
_LAUNCH = {
    **{name: number() for name in ("block_n", "num_splits", "num_warps", "num_stages", "partition_tokens")},
    # 0 or 1; runs from before there was a choice lack it
    "transposed": pa.Column(float, nullable=True, required=False),
}
_RATIO = {
    **{name: number() for name in ("log_ratio", "log_ratio_low", "log_ratio_high")},
    **{name: number() for name in ("ratio", "ratio_low", "ratio_high", "floor_log_ratio")},
    "verdict": label("faster", "slower", "same", "undecided", "not measurable"),
    "verdict_reason": label(),
}
_PAIR = {
    "baseline_arm": label(),
    "baseline_launch": label(),
    **_RATIO,
    "baseline_partition_tokens": number(),
    "same_partition": label("yes", "no", "not applicable"),
    "order_percent": number(),
}

_KERNEL = {
    **{name: label() for name in ("arch", "assembled_for", "arm", "profile")},
    **{name: count(1) for name in ("block_n", "num_warps", "num_stages")},
}
_KERNEL_SIZES = (
    *("loop_instructions", "total_instructions", "tiles_per_iteration", "loop_instructions_per_element", "registers"),
    *("spill_store_bytes", "spill_load_bytes", "shared_bytes"),
)
_BOUNDS = ("bound_cycles_per_tile", "blocks_per_sm", "warps_per_sm", "bound_us")

_ERRORS = {name: number(pa.Check.ge(0)) for name in ("max_abs", "mean_abs", "rms_relative", "cosine_distance")}
_ERROR_CELL = {
    "case": label(),
    **{name: count(1) for name in ("rows", "q_heads", "kv_heads", "head_dim", "topk")},
    "arm": label(),
    "mode": label("single", "split"),
    **{name: count(1) for name in ("num_splits", "block_n")},
    "reference": label("fp64", "fp32"),
    **_ERRORS,
    **{
        f"{whose}_{metric}": number(pa.Check.ge(0))
        for whose in ("peer", "budget")
        for metric in ("max_abs", "rms_relative")
    },
}

_HOW = label("reproduced", "derived", "recorded", "quoted")
_CLAIM = {name: label() for name in ("expected", "found", "unit")}
_VERDICT_COUNTS = ("fails", "holds", "not_measured", "quoted")
_KIND = label("k", "v")
_QUALITY_ARM = label("fp16", "fp16, other order", "calibrated", "other text", "unit", "half")
_QUALITY_EFFECT = {
    "context_tokens": count(1),
    "measure": label("perplexity change", "KL divergence", "next-token disagreement"),
    "arm": _QUALITY_ARM,
    "unit": label(),
    "documents": count(1),
}
_CHOICE = label("calibrated", "unit", "double", "half", "p99.9", "exchanged")

_QUALITY_SELECTION = schema(
    {
        "context_tokens": count(1),
        "kv_cache": _QUALITY_ARM,
        "indexer_keys": label("fp16", "e4m3"),
        "layer": label(),
        "topk_blocks": count(1),
        "rows": count(1),
        **{name: number(pa.Check.in_range(0, 1)) for name in ("mean_row_jaccard", "fp16_recall", "micro_jaccard")},
    },
    measured=["mean_row_jaccard", "fp16_recall", "micro_jaccard"],
)

SCHEMAS: dict[str, pa.DataFrameSchema] = {
    "calibration_attention": schema(
        {
            "text": label(),
            "layer": count(),
            "choice": _CHOICE,
            **{name: number() for name in ("rms_relative", "cosine_distance", "max_abs")},
        },
        measured=["rms_relative"],
    ),
    "calibration_choices": schema(
        {
            "text": label(),
            "choice": _CHOICE,
            **{name: number() for name in ("geometric_mean_ratio", "smallest_ratio", "largest_ratio")},
            "layers_better": count(),
            "layers": count(1),
            "median_rms_relative": number(),
        },
        measured=["geometric_mean_ratio"],
    ),
    "calibration_code_use": schema(
        {
            "text": label(),
            "layer": count(),
            "kind": _KIND,
            "choice": _CHOICE,
            **{name: number() for name in ("share_below_normal", "share_saturated", "rms_relative")},
        },
        measured=["rms_relative"],
    ),
    "calibration_example": schema(
        {"layer": count(), "kind": _KIND, **{name: number(pa.Check.gt(0)) for name in ("scale", "envelope")}},
        measured=["scale"],
    ),
    "calibration_kernel": schema(
        {
            "case": label(),
            "topk": count(1),
            "arm": label(),
            "mode": label("single", "split"),
            "num_splits": count(1),
            **{name: number() for name in ("max_abs", "rms_relative", "budget_max_abs", "budget_rms_relative")},
        },
        measured=["rms_relative"],
    ),
    "calibration_published": schema(
        {
            **{name: label() for name in ("quantity", "unit", "source")},
            "kind": label("reported", "derived"),
            **{name: number() for name in ("value", "here")},
        },
        measured=["value"],
    ),
    "calibration_repeat": schema(
        {"layer": count(), "kind": _KIND, **{name: number(pa.Check.gt(0)) for name in ("first_scale", "second_scale")}},
    ),
    "calibration_saturation": schema(
        {
            "text": label(),
            "role": label("calibration", "evaluation"),
            "content": label(),
            "layer": count(),
            "kind": _KIND,
            "codes": count(1),
            "saturated_codes": count(),
            "max_over_envelope": number(),
        },
    ),
    "calibration_saturation_by_text": schema(
        {
            "text": label(),
            "role": label("calibration", "evaluation"),
            "content": label(),
            "kind": _KIND,
            "codes": count(1),
            "saturated_codes": count(),
            "layers_with_saturation": count(),
            "max_over_envelope": number(),
            "saturated_ppm": number(),
        },
    ),
    "calibration_summary": schema(
        {
            "layer": count(),
            "kind": _KIND,
            **{name: count(1) for name in ("count", "finite_count", "nonzero_count")},
            **{name: number(pa.Check.gt(0)) for name in ("max_abs", "scale", "p99_9", "p99_99")},
            "saturation_ratio": number(pa.Check.in_range(0, 1)),
            **{f"shard_scale_{end}_over_global": number(pa.Check.in_range(0, 1)) for end in ("min", "max")},
        },
        measured=["max_abs", "scale"],
    ),
    "capacity_block_sizes": schema(
        {
            **{name: count() for name in ("tp", "mtp", "state_bytes")},
            **{f"block_{unit}_{width}": count(1) for unit in ("tokens", "bytes") for width in ("fp16", "e4m3")},
            **_DERIVED,
        }
    ),
    "capacity_layout": schema(
        {
            **{name: label() for name in ("pair", "quantity", "kv_cache_dtype", "unit")},
            "reported": count(1),
            "model": count(1),
            **_PUBLISHED,
        }
    ),
    "capacity_pairs": schema(
        {
            "pair": label(),
            **{name: optional("Int64") for name in ("tp", "mtp", "max_model_len")},
            **{
                f"{quantity}_{width}_tokens": optional("Int64")
                for quantity in ("reported", "residual")
                for width in ("fp16", "e4m3")
            },
            "gain_reported": number(),
            "gain_limit": number(),
            "same_pool": optional("boolean"),
            **_PUBLISHED,
        },
        measured=["reported_e4m3_tokens", "residual_e4m3_tokens", "gain_limit"],
    ),
    "capacity_pools": schema(
        {
            "pair": label(),
            **_KV_CACHE_DTYPE,
            "reported_tokens": count(1),
            **{name: optional("Int64") for name in ("model_tokens", "residual_tokens", "blocks", "blocks_per_request")},
            **{name: number() for name in ("tokens_per_block", "pool_low_gib", "pool_high_gib", "reported_pool_gib")},
            **_PUBLISHED,
        },
        measured=["model_tokens", "blocks", "pool_low_gib", "pool_high_gib"],
    ),
    "capacity_waterfall": schema(
        {"deployment": label(), "step": label(), "gain": number(), "change": number(), "meaning": label(), **_DERIVED},
        measured=["gain", "change"],
    ),
    "capacity_constant": schema(
        {
            "pair": label(),
            "gain_reported": number(),
            "kv_bytes_per_token": count(1),
            "constant_bytes_per_token": number(pa.Check.ge(0)),
            "index_bytes_per_token": count(),
            **_PUBLISHED,
        },
        measured=["constant_bytes_per_token"],
    ),
    "capacity_gain_by_length": schema(
        {
            **_SERVING,
            "blocks_fp16": count(1),
            "blocks_e4m3": count(1),
            "gain": number(pa.Check.gt(0)),
            "gain_limit": number(pa.Check.gt(0)),
            **_DERIVED,
        },
        measured=["gain", "gain_limit"],
    ),
    "capacity_cells": schema(
        {
            "pool": label(),
            **_KV_CACHE_DTYPE,
            **{name: count(1) for name in ("concurrency", "context_tokens", "output_tokens", "blocks_needed")},
            "blocks_in_pool": count(),
            "fits": pa.Column(bool),
            **_DERIVED,
        }
    ),
    "capacity_counts": schema(
        {
            "pool": label(),
            **_KV_CACHE_DTYPE,
            "quantity": label("cells", "requests"),
            "model": count(),
            "reported": optional("Int64"),
            **_PUBLISHED,
        },
        measured=["reported"],
    ),
    "capacity_workspace": schema(
        {
            "quantity": label(),
            "low_bytes": count(),
            "high_bytes": count(),
            **{name: label() for name in ("low_mib", "high_mib", "reported_mib")},
            **_PUBLISHED,
        }
    ),
    "capacity_deployment": schema(
        {
            **_KV_CACHE_DTYPE,
            **_SERVING,
            **{name: count() for name in ("pool_bytes", "block_tokens", "block_bytes", "blocks", "blocks_per_request")},
            **{name: count() for name in ("bytes_per_token", "tokens", "requests")},
            "gain": number(pa.Check.ge(0)),
            "gain_limit": number(pa.Check.gt(0)),
            **_DERIVED,
        },
        measured=["gain"],
    ),
    "claims": schema(
        {
            "claim": label(),
            "about": label("public record", "book"),
            "statement": label(),
            "source": label(),
            "how": _HOW,
            **_CLAIM,
            "verdict": label("holds", "fails", "not measured", "quoted"),
            **{name: label() for name in ("device", "evidence", "rests_on", "source_url")},
        }
    ),
    "claims_counts": schema({"how": _HOW, **{name: count() for name in (*_VERDICT_COUNTS, "claims")}}),
    "codegen_kernels": schema(
        {
            **_KERNEL,
            **{name: number(pa.Check.ge(0)) for name in _KERNEL_SIZES},
            "ptx_sha256": label(),
            "code_sha256": label(),
        },
        measured=_KERNEL_SIZES,
    ),
    "codegen_classes": schema(
        {
            **_KERNEL,
            "scope": label("loop", "kernel"),
            "class": label(),
            "instructions": count(1),
            "per_element": number(pa.Check.gt(0)),
        }
    ),
    "codegen_parts": schema({**_KERNEL, "part": label(), "instructions": count(), "per_element": number()}),
    "codegen_shared_accesses": schema(
        {
            **_KERNEL,
            "class": label(),
            "accesses": count(1),
            "accesses_unknown": count(),
            "wavefronts": number(pa.Check.gt(0)),
            "wavefronts_without_conflicts": number(pa.Check.gt(0)),
        }
    ),
    "codegen_pipes": schema(
        {
            "device": label(),
            **_KERNEL,
            "pipe": label(),
            "cycles_per_tile": number(pa.Check.ge(0)),
            "cycles_per_token": number(pa.Check.ge(0)),
        }
    ),
    "codegen_bounds": schema(
        {
            "device": label(),
            **_KERNEL,
            "rows": count(1),
            "binding_pipe": label(),
            **{name: number(pa.Check.ge(0)) for name in _BOUNDS},
            "occupancy_limit": label(),
        },
        measured=_BOUNDS,
    ),
    "codegen_measured": schema(
        {
            "device": label(),
            **_KERNEL,
            "workload": label(),
            "time_us": number(pa.Check.gt(0)),
            "cycles_per_token": number(pa.Check.gt(0)),
        }
    ),
    "codegen_reported": schema(
        {
            **{name: label() for name in ("device", "profile", "binding_pipe", "point", "source")},
            "rows": count(1),
            **{name: number(pa.Check.ge(0)) for name in ("bound_ms", "reported_ms", "explained_share")},
            "spill_store_bytes": number(pa.Check.ge(0)),
        },
        measured=["bound_ms", "reported_ms", "explained_share"],
    ),
    "codegen_constants": schema(
        {**{name: label() for name in ("device", "constant", "unit", "source")}, "value": number(pa.Check.ge(0))}
    ),
    "codegen_identity": schema(
        {name: label() for name in ("arch", "contraction", "scale_placement", "decoder", "code_sha256")}
    ),
    "environment_facts": schema({"group": label(), "fact": label(), "value": label()}),
    "environment_runs": schema(
        {
            **{name: label() for name in ("chapter", "run", "profile", "device", "started_utc", "commit")},
            "wall_time_s": number(pa.Check.ge(0)),
        },
        measured=["wall_time_s"],
    ),
    "environment_checksums": schema({"chapter": label(), "table": label(), "sha256": label()}),
    "environment_checks": schema({"check": label(), "value": label()}),
    "latency_samples": schema(
        {
            **_LATENCY_CELL,
            **_ARM,
            **{name: count() for name in ("process", "block", "pair", "position")},
            "calls": count(1),
            "elapsed_us": number(pa.Check.ge(0)),
            "time_us": number(pa.Check.ge(0)),
            "sm_clock_mhz": number(),
            "throttled": label("yes", "no", "not available"),
        },
        measured=["elapsed_us", "time_us"],
    ),
    "latency_gates": schema(
        {
            **_LATENCY_UNIT,
            "process": count(),
            **_ARM,
            **_LAUNCH,
            **{name: number() for name in ("max_abs_error", "relative_error", "allowed_relative_error")},
            "rows_checked": count(),
        },
        measured=["relative_error", "allowed_relative_error"],
    ),
    "latency_workloads": schema(
        {
            "workload": label(),
            "kind": label("decode", "prefill"),
            "rows": count(1),
            "context": count(1),
            "dtype": label("float16", "bfloat16"),
            "selection": label("random", "clustered"),
            "overlap": number(),
            **{name: count(1) for name in ("topk", "q_heads", "kv_heads", "head_dim", "page_size")},
            **{name: number() for name in ("rotating_inputs", "distinct_tokens", "bytes_fp16", "bytes_e4m3")},
            **{name: number() for name in ("l2_bytes", "neighbour_overlap")},
        },
        measured=["rotating_inputs", "distinct_tokens"],
    ),
    "latency_processes": schema(
        {
            "stage": label(),
            "process": count(),
            # only runs that name their machines have it
            "node": pa.Column(str, required=False),
            "device": label(),
            "sync_method": label(),
            **{name: number() for name in ("resolution_us", "copy_gb_per_s", "seconds")},
            "units": count(1),
        },
        measured=["copy_gb_per_s"],
    ),
    "launch_search": schema(
        {
            "code_path": label("device", "sm_70"),
            "workload": label(),
            "arm": label(),
            **_LAUNCH,
            "time_us": number(pa.Check.ge(0)),
            "chosen": label("yes", "no"),
        },
        measured=["time_us"],
    ),
    "latency_cells": schema(
        {
            **_LATENCY_CELL,
            **_ARM,
            **_LAUNCH,
            "processes": count(),
            "blocks": count(),
            "full_protocol": label("yes", "no"),
            **{name: number(pa.Check.ge(0)) for name in ("time_us", "least_process_us", "largest_process_us")},
            **_PAIR,
            "drift_percent": number(),
            "throttled_share": number(),
            "read_bytes": count(),
            "implied_gb_per_s": number(),
            "copy_gb_per_s": number(),
            "flush_bytes": count(),
            "sync_method": label(),
            "device": label(),
            "relative_error": number(),
        },
        measured=["time_us"],
    ),
    "latency_pairs": schema(
        {**_LATENCY_CELL, "question": label(), **_ARM, "partition_tokens": number(), **_PAIR},
        measured=["log_ratio", "log_ratio_low", "log_ratio_high"],
    ),
    "latency_effects": schema(
        {
            **_LATENCY_CELL,
            "launch": label(),
            "effect": label("decoder", "placement", "interaction"),
            **_RATIO,
            "processes": count(),
            "blocks": count(),
        },
        measured=["log_ratio", "log_ratio_low", "log_ratio_high"],
    ),
    "latency_choice": schema(
        {
            "code_path": label("device", "sm_70"),
            **{name: label() for name in ("workload", "e4m3_arm", "verdict", "fp16_arm")},
            **{name: number() for name in ("ratio", "ratio_low", "ratio_high", "e4m3_time_us", "fp16_time_us")},
            **{name: _LAUNCH[name] for name in ("block_n", "num_splits", "num_warps", "num_stages", "transposed")},
        },
        measured=["ratio", "ratio_low", "ratio_high", "e4m3_time_us"],
    ),
    "latency_floors": schema(
        {
            **{name: label() for name in ("workload", "fp16_arm", "e4m3_arm")},
            **{name: number() for name in ("fp16_time_us", "fp16_floor_us", "e4m3_time_us", "e4m3_floor_us")},
            **{name: number() for name in ("further_bytes_gb_per_s", "fixed_us")},
        },
        measured=["fp16_time_us", "fp16_floor_us", "e4m3_time_us", "e4m3_floor_us"],
    ),
    "latency_v100": schema(
        {
            **{name: label() for name in ("point", "what", "setting", "device")},
            **{name: number() for name in ("reported_ms", "measured_ms", "factor", "predicted_ms", "miss_percent")},
            "source": label(),
            **_PUBLISHED,
        },
        measured=["reported_ms", "predicted_ms", "miss_percent"],
    ),
    "latency_unmeasured": schema({"what": label(), "code_path": label()}),
    "latency_reported": schema(
        {
            **{name: label() for name in ("point", "group", "device", "what", "setting", "unit")},
            "value": number(),
            "source": label(),
            **_PUBLISHED,
        },
        measured=["value"],
    ),
    "gpu_tests": schema(
        {
            **{
                name: label()
                for name in (
                    "date",
                    "device",
                    "compute_capability",
                    "driver",
                    "python",
                    "torch",
                    "triton",
                    "commit",
                    "what",
                )
            },
            **{f"tests_{outcome}": count() for outcome in ("passed", "failed", "skipped")},
        }
    ),
    "kernel_log": schema(
        {
            "step": count(),
            **{name: label() for name in ("change", "prediction", "quantity", "unit", "outcome", "evidence")},
            **{name: number() for name in ("before", "after")},
        },
        measured=["before", "after"],
    ),
    "error_cells": schema(_ERROR_CELL, measured=list(_ERRORS)),
    "error_real_cells": schema(_ERROR_CELL, measured=list(_ERRORS)),
    "error_histograms": schema(
        {
            **{name: label() for name in ("case", "arm", "mode")},
            **{name: number() for name in ("low_of_rms", "high_of_rms", "elements")},
        },
        measured=["elements"],
    ),
    "error_summary": schema(
        {
            "arm": label(),
            **{f"cells_{word}": count() for word in ("passed", "failed", "skipped")},
            **{
                name: number(pa.Check.ge(0))
                for name in ("max_abs_long_fp32", "rms_relative_random_median", "rms_relative_real_median")
            },
        },
        measured=["rms_relative_random_median", "rms_relative_real_median"],
    ),
    "error_sources": schema(
        {"case": label(), "part": label("cache", "kernel"), "source": label(), **_ERRORS}, measured=list(_ERRORS)
    ),
    "error_ranges": schema(
        {
            "case": label(),
            **{
                name: number(pa.Check.ge(0))
                for name in (
                    *("k_scale", "raw_dot_in_loop_max_abs", "raw_dot_hoisted_max_abs"),
                    *("raw_dot_hoisted_reachable", "fp16_max"),
                )
            },
            "exceeds_fp16": pa.Column(bool),
        },
        measured=["raw_dot_hoisted_max_abs"],
    ),
    "error_overflow": schema(
        {
            "route": label(),
            "mode": label("single", "split", "none"),
            **{name: number() for name in ("raw_dot_max", "fp16_max", "output", "expected")},
        },
        measured=["raw_dot_max"],
    ),
    "error_seeds": schema(
        {
            "seed": count(),
            "arm": label(),
            "reference": label("fp64", "fp32"),
            **{name: number(pa.Check.ge(0)) for name in ("max_abs", "rms_relative")},
        },
        measured=["max_abs"],
    ),
    "error_channels": schema(
        {
            "case": label(),
            **{name: count(1) for name in ("channels", "largest_channels")},
            **{
                name: number(pa.Check.ge(0))
                for name in ("score_error_share", "k_max_over_median_channel", "k_subnormal_share")
            },
        },
        measured=["score_error_share"],
    ),
    "error_reported": schema(
        {
            **{name: label() for name in ("quantity", "setting", "measured_on", "what_differs")},
            **{name: number() for name in ("reported", "measured", "measured_over_reported")},
            **_PUBLISHED,
        },
        measured=["reported", "measured"],
    ),
    "quality_documents": schema(
        {
            **{name: label() for name in ("text", "content")},
            "start_token": count(),
            "context_tokens": count(1),
            "arm": _QUALITY_ARM,
            "predictions": count(1),
            **{name: number() for name in ("nll_nats", "kl_nats", "disagreement_percent")},
        },
        measured=["nll_nats", "kl_nats", "disagreement_percent"],
    ),
    "quality_effects": schema(
        {
            **_QUALITY_EFFECT,
            "against": _QUALITY_ARM,
            **{name: number() for name in ("value", "low", "high", "self_noise")},
            "verdict": label("self-noise", "worse", "better", "same", "no difference seen", "undecided"),
        },
        measured=["value"],
    ),
    "quality_devices": schema(
        {
            **_QUALITY_EFFECT,
            **{name: number() for name in ("here", "recorded", "difference", "low", "high", "self_noise")},
        },
        measured=["here", "recorded", "difference"],
    ),
    "quality_attention": schema(
        {
            "context_tokens": count(1),
            "arm": _QUALITY_ARM,
            "inputs": label("own forward", "same inputs"),
            "layer": count(),
            **{name: number() for name in ("cosine", "relative_l2", "rmse")},
        },
        measured=["cosine", "relative_l2", "rmse"],
    ),
    "quality_selection": _QUALITY_SELECTION,
    "quality_selection_layers": _QUALITY_SELECTION,
    "quality_needles": schema(
        {
            "text": label(),
            "context_tokens": count(1),
            "depth_percent": count(),
            "arm": _QUALITY_ARM,
            "candidates": count(2),
            "rank": count(1),
            "margin_nats": number(),
            "most_probable_token": label("right", "another"),
        },
        measured=["margin_nats"],
    ),
    "quality_needles_by_arm": schema(
        {
            "context_tokens": count(1),
            "arm": _QUALITY_ARM,
            "items": count(1),
            "found": count(),
            **{name: number() for name in ("mean_margin_nats", "least_margin_nats", "largest_change_nats")},
        },
        measured=["mean_margin_nats"],
    ),
    "quality_kernel": schema(
        {
            "layer": count(),
            "arm": _QUALITY_ARM,
            **{name: count(1) for name in ("tokens", "rows", "stored_values")},
            "differing_values": count(),
            **{
                f"{whose}_{metric}": number(pa.Check.ge(0))
                for metric in ("rms_relative", "max_abs")
                for whose in ("kernel", "torch")
            },
        },
        measured=["kernel_rms_relative"],
    ),
    "quality_reported": schema(
        {
            "quantity": label(),
            "this_model_here": label(),
            "this_model_on_a_GPU_recorded": label(),
            "Qwen4Exp_on_V100_reported": label(),
            **{name: label() for name in ("unit", "what_differs")},
            **_PUBLISHED,
        },
    ),
    "quality_elsewhere": schema(
        {
            **{name: label() for name in ("quantity", "value", "unit", "setting", "source", "note")},
            **_PUBLISHED,
        },
    ),
    "example_cells": schema({"label": label(), "rows": count(1), "square": number()}, measured=["square"]),
}

# Parts of a table that a page shows beside the whole.
SCHEMAS |= {
    f"claims_{verdict}": schema({"statement": label(), **_CLAIM, "how": _HOW, "on": label(), "source": label()})
    for verdict in _VERDICT_COUNTS
}
SCHEMAS |= {"latency_partition": SCHEMAS["latency_cells"], "latency_vector": SCHEMAS["latency_pairs"]}


def validate(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The table, if it satisfies the schema `name`.

    Raises:
        ValueError: no such schema, or the rows and columns that break it.
    """
    if name not in SCHEMAS:
        raise ValueError(f"no schema for table {name!r}; known: {', '.join(sorted(SCHEMAS))}")
    try:
        return SCHEMAS[name].validate(table.reset_index(drop=True), lazy=True)
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases[["column", "check", "failure_case", "index"]].head(10)
        raise ValueError(f"table {name!r} does not satisfy its schema:\n{cases.to_string(index=False)}") from None


def file_name(name: str) -> str:
    """CSV, compressed where the table holds raw samples."""
    return f"{name}.csv.gz" if name.endswith("_samples") else f"{name}.csv"


def write(table: pd.DataFrame, name: str, folder: Path) -> Path:
    """Check the table against its schema and write it, the same bytes for the same values.

    Raises:
        ValueError: the table does not satisfy the schema `name`.
    """
    text = validate(table, name).to_csv(index=False, lineterminator="\n").encode()
    path = folder / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as file:
            file.write(text)
        text = buffer.getvalue()
    path.write_bytes(text)
    return path


def read(path: Path, name: str) -> pd.DataFrame:
    """Read a table that `write` wrote and check it against its schema.

    Raises:
        ValueError: the file does not satisfy the schema `name`.
    """
    if name not in SCHEMAS:
        raise ValueError(f"no schema for table {name!r}; known: {', '.join(sorted(SCHEMAS))}")
    # An empty text cell is an empty text, an empty number is a missing one.
    dtypes = {column: str(spec.dtype) for column, spec in SCHEMAS[name].columns.items()}
    texts = {column for column, dtype in dtypes.items() if dtype in ("str", "object", "string")}
    frame = pd.read_csv(
        path,
        dtype={column: (object if column in texts else dtype) for column, dtype in dtypes.items()},
        keep_default_na=False,
        na_values={column: [""] for column in dtypes if column not in texts},
        float_precision="round_trip",
    )
    return validate(frame, name)


def text_of(value: object) -> str:
    """How a cell of a shown table reads: four significant digits, an empty cell as a dash."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
