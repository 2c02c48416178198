"""What the quality chapter shows: the recorded run beside the measurement, and the sentences made from both."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from qsa_kernels.measure import smollm2
from qsa_kernels.measure.quality import effects, needles, reported
from qsa_kernels.measure.quality.caches import BASELINE, CALIBRATED, NOISE
from qsa_kernels.measure.quality.effects import PERPLEXITY
from qsa_kernels.report import recording
from qsa_kernels.report.chapter import Page
from qsa_kernels.report.quality_recording import TABLES

NOT_RECORDED = "not measured: no quality run on a GPU is recorded"

Tables = Mapping[str, pd.DataFrame]


def recorded(page: Page, source: str) -> tuple[dict[str, pd.DataFrame] | None, str]:
    """Tables and device of the recorded run to draw beside the measurement, with its banner; None without one.

    Args:
        page: the chapter.
        source: "live" for none, "recorded:newest" or "recorded:RUN_ID".

    Raises:
        FileNotFoundError: no run of that id.
        ValueError: the run's files do not match their hashes.
    """
    if source == recording.NEWEST:
        newest = recording.newest(table="quality_effects")
        source = "live" if newest is None else f"recorded:{newest}"
    run = page.recorded(source)
    if run is None:
        return None, NOT_RECORDED
    return {name: run.table(name) for name in TABLES}, str(run.manifest.device["name"])


def devices(here: Tables, other: Tables | None, *, resamples: int, seed: int) -> pd.DataFrame:
    """Effects of both machines side by side; without a recorded run, rows that say so.

    Args:
        here: tables made now.
        other: of the recorded run.
        resamples: of the bootstrap.
        seed: of the resampling.
    """
    reason = NOT_RECORDED
    if other is not None:
        both = effects.agreement(here["quality_documents"], other["quality_documents"], resamples=resamples, seed=seed)
        if not both.empty:
            return both
        reason = "not measured: the recorded run went through other documents"
    table = here["quality_effects"]
    rows = table[(table["against"] == BASELINE) & (table["arm"] != NOISE)]
    empty = dict.fromkeys(("recorded", "difference", "low", "high", "self_noise"), math.nan)
    filled = rows[["measure", "arm"]].assign(here=rows["value"], **empty)
    filled[["unit", "documents", "context_tokens"]] = rows[["unit", "documents", "context_tokens"]]
    return filled.assign(status="not_measured", reason=reason)


def device_label(page: Page) -> str:
    """What read the cache on this page: forwards on a CPU are plain torch, not interpreted kernels."""
    return page.device_label if page.device == "cuda" else "plain torch on this CPU"


def effect_sentence(table: pd.DataFrame, arm: str, measure: str = PERPLEXITY, against: str = BASELINE) -> str:
    """Value, interval and verdict of one effect in words, for the shortest documents."""
    rows = table[(table["measure"] == measure) & (table["arm"] == arm) & (table["against"] == against)]
    row = rows.sort_values("context_tokens").iloc[0]
    sign = "+" if measure == PERPLEXITY else ""
    unit = row["unit"].replace("percent", "%")
    interval = f"{row['low']:{sign}.2g} to {row['high']:{sign}.2g}"
    words = "" if arm == NOISE else f", {row['verdict']}"
    return f"{row['value']:{sign}.2g} {unit} (95 % interval {interval}{words})"


def glue(page: Page, here: Tables, shown: pd.DataFrame, other: Tables | None, device: str) -> None:
    """All numbers and sentences that prose quotes.

    Args:
        page: the chapter.
        here: tables made now.
        shown: from `devices`.
        other: of the recorded run.
        device: its device.
    """
    table, documents = here["quality_effects"], here["quality_documents"]
    shortest = documents[documents["context_tokens"] == documents["context_tokens"].min()]
    page.glue("quality_model", smollm2.MODEL_NAME)
    page.glue("quality_documents", int((shortest["arm"] == BASELINE).sum()))
    page.glue("quality_texts", shortest["text"].nunique())
    page.glue("quality_context_tokens", int(shortest["context_tokens"].iloc[0]))
    base = shortest[shortest["arm"] == BASELINE]
    page.glue("quality_fp16_perplexity", float(math.exp(base["nll_nats"].mean())))
    for key, arm in (
        ("noise", NOISE),
        ("calibrated", CALIBRATED),
        ("other", "other text"),
        ("unit", "unit"),
        ("half", "half"),
    ):
        page.glue(f"quality_{key}_perplexity_sentence", effect_sentence(table, arm))
        page.glue(f"quality_{key}_kl_sentence", effect_sentence(table, arm, "KL divergence"))
        page.glue(f"quality_{key}_disagreement_sentence", effect_sentence(table, arm, "next-token disagreement"))
    for key, arm in (("other", "other text"), ("unit", "unit"), ("half", "half")):
        page.glue(f"quality_{key}_against_calibrated_sentence", effect_sentence(table, arm, against=CALIBRATED))
    for key, inputs in (("same_inputs", "same inputs"), ("own_forward", "own forward")):
        for arm, name in ((CALIBRATED, "calibrated"), ("unit", "unit"), ("half", "half"), (NOISE, "noise")):
            page.glue(f"quality_{name}_l2_{key}", float(reported.layer_median(dict(here), arm, inputs)["relative_l2"]))
    for key, arm, keys in (
        ("contract", CALIBRATED, "fp16"),
        ("e4m3_indexer", CALIBRATED, "e4m3"),
        ("e4m3_indexer_alone", BASELINE, "e4m3"),
        ("noise", NOISE, "fp16"),
    ):
        overlap = reported.overall(dict(here), kv_cache=arm, indexer_keys=keys)
        page.glue(f"quality_{key}_jaccard", float(overlap["mean_row_jaccard"]))
        page.glue(f"quality_{key}_recall", float(overlap["fp16_recall"]))
    found = needles.summary(here["quality_needles"]).groupby("arm")[["found", "items", "largest_change_nats"]]
    counts, moves = found.sum(), found.max()["largest_change_nats"]
    for key, arm in (("fp16", BASELINE), ("calibrated", CALIBRATED), ("unit", "unit"), ("half", "half")):
        page.glue(f"quality_{key}_needles", f"{counts.loc[arm, 'found']} of {counts.loc[arm, 'items']}")
        if arm != BASELINE:
            page.glue(f"quality_{key}_needle_change", float(moves[arm]))
    checks = here["quality_kernel"]
    page.glue("quality_kernel_values", int(checks["stored_values"].sum()))
    page.glue("quality_kernel_differing", int(checks["differing_values"].sum()))
    page.glue("quality_kernel_passed", f"{int((checks['status'] == 'passed').sum())} of {len(checks)}")
    sentence = _gpu_sentence(shown, other, device)
    page.glue("quality_gpu_sentence", sentence[0].upper() + sentence[1:])


def _gpu_sentence(shown: pd.DataFrame, other: Tables | None, device: str) -> str:
    if other is None:
        return device
    agree = int((shown["status"] == "passed").sum())
    effect = effect_sentence(other["quality_effects"], CALIBRATED)
    noise = effect_sentence(other["quality_effects"], NOISE)
    return (
        f"{device}, the Triton kernels in the forward: calibrated E4M3 changes perplexity by {effect}, "
        f"self-noise {noise}; {agree} of {len(shown)} effects agree with this machine within documents and noise"
    )
