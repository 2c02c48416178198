"""Figures of the quality chapter."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from qsa_kernels.measure.quality.caches import ARMS, BASELINE, CALIBRATED, NOISE
from qsa_kernels.measure.quality.effects import MEASURES, PERPLEXITY
from qsa_kernels.report.figures import style

ARM_STYLE: dict[str, dict[str, Any]] = {
    BASELINE: {"color": style.ARM_COLOURS["fp16"], "marker": "o"},
    NOISE: {"color": "#7F7F7F", "marker": "x"},
    CALIBRATED: {"color": "#009E73", "marker": "P"},
    "other text": {"color": "#E69F00", "marker": "^"},
    "unit": {"color": "#0072B2", "marker": "s"},
    "half": {"color": "#D55E00", "marker": "v"},
}
_SELECTIONS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (NOISE, "fp16", "FP16 K/V, other order (self-noise)", {"color": "#7F7F7F", "marker": "x"}),
    (CALIBRATED, "fp16", "E4M3 K/V, FP16 indexer keys (the contract)", {"color": "#009E73", "marker": "P"}),
    (BASELINE, "e4m3", "FP16 K/V, E4M3 indexer keys", {"color": "#CC79A7", "marker": "D"}),
    (CALIBRATED, "e4m3", "E4M3 K/V, E4M3 indexer keys", {"color": "#6B4E9B", "marker": "v"}),
)


def effects(here: pd.DataFrame, here_label: str, recorded: pd.DataFrame | None, recorded_label: str) -> Figure:
    """Each measure of each arm with its interval, the self-noise as a band; a recorded run as open markers.

    Args:
        here: table of effects of this run.
        here_label: device of this run.
        recorded: of a recorded run, None if there is none.
        recorded_label: its device.
    """
    runs = [(here, here_label, 0.0)] + ([(recorded, recorded_label, 0.28)] if recorded is not None else [])
    shown = [arm for arm in ARMS if arm not in (BASELINE, NOISE)]
    with style.look():
        figure, axes = plt.subplots(1, len(MEASURES), sharey=True, figsize=(8.0, 3.8))
        for axis, (measure, (_, unit)) in zip(axes, MEASURES.items(), strict=True):
            for table, _, shift in runs:
                rows = _shortest(table)
                rows = rows[(rows["measure"] == measure) & (rows["against"] == BASELINE)].set_index("arm")
                noise = float(rows["self_noise"].iloc[0])
                if shift == 0.0:
                    low = -noise if measure == PERPLEXITY else 0.0
                    axis.axvspan(low, noise, color=style.NOISE_GREY, zorder=0)
                for place, arm in enumerate(shown):
                    row = rows.loc[arm]
                    axis.errorbar(
                        row["value"], place + shift,
                        xerr=[[row["value"] - row["low"]], [row["high"] - row["value"]]],
                        capsize=3, linestyle="none", markersize=6, **ARM_STYLE[arm],
                        markerfacecolor="white" if shift else None,
                    )  # fmt: skip
            axis.set(xlabel=f"{measure}\n({unit})")
            if measure == "KL divergence":
                axis.set_xscale("log")
            else:
                axis.axvline(0.0, color="black", linewidth=0.8)
        axes[0].set_yticks(range(len(shown)), shown)
        axes[0].invert_yaxis()
        axes[0].set_ylabel("scales of the E4M3 cache")
        words = [f"{'open' if shift else 'filled'}: {label}" for _, label, shift in runs]
        figure.suptitle("Against the FP16 cache; " + "; ".join(words), fontsize=9)
    return figure


def by_document(documents: pd.DataFrame) -> Figure:
    """Perplexity change of every document and E4M3 arm.

    Args:
        documents: table of documents.
    """
    rows = _shortest(documents)
    wide = rows.pivot_table(index=["text", "start_token"], columns="arm", values="nll_nats", sort=False)
    change = wide.sub(wide[BASELINE], axis=0).transform(lambda column: 100 * np.expm1(column))
    texts = list(dict.fromkeys(rows["text"]))
    with style.look():
        figure, axis = plt.subplots(figsize=(7.0, 3.6))
        axis.axhline(0.0, color="black", linewidth=0.8)
        for number, arm in enumerate(arm for arm in ARMS if arm != BASELINE):
            for place, text in enumerate(texts):
                values = change.loc[text, arm]
                axis.plot(
                    np.full(len(values), place + (number - 2) * 0.14), values, linestyle="none", markersize=5,
                    label=arm if place == 0 else None, **ARM_STYLE[arm],
                )  # fmt: skip
        axis.set_xticks(range(len(texts)), texts)
        axis.set_ylabel("perplexity change (percent)")
        axis.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.14), columnspacing=1.0)
    return figure


def attention(table: pd.DataFrame) -> Figure:
    """Relative L2 error of the attention output in each layer.

    Args:
        table: of the attention outputs.
    """
    rows = _shortest(table)
    titles = {
        "same inputs": "same queries, keys, values",
        "own forward": "in the arm's own forward",
    }
    with style.look():
        figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7.5, 4.0))
        for axis, (inputs, title) in zip(axes, titles.items(), strict=True):
            for arm in (arm for arm in ARMS if arm != BASELINE):
                line = rows[(rows["inputs"] == inputs) & (rows["arm"] == arm)].sort_values("layer")
                axis.plot(line["layer"], line["relative_l2"], label=arm, linewidth=1, markersize=4, **ARM_STYLE[arm])
            axis.set(title=title, xlabel="layer", yscale="log")
        axes[0].set_ylabel("relative L2 of the attention output\n(ratio, against the FP16 cache)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(ARMS), fontsize=8)
    return figure


def selection(table: pd.DataFrame) -> Figure:
    """Mean per-row Jaccard of the selected blocks in each layer, for both types of indexer keys.

    Args:
        table: of the selections.
    """
    rows = _shortest(table[table["layer"] != "all"])
    with style.look():
        figure, axis = plt.subplots(figsize=(7.0, 4.2))
        for arm, keys, label, look in _SELECTIONS:
            line = rows[(rows["kv_cache"] == arm) & (rows["indexer_keys"] == keys)]
            line = line.assign(layer=line["layer"].astype(int)).sort_values("layer")
            axis.plot(line["layer"], line["mean_row_jaccard"], label=label, linewidth=1, markersize=5, **look)
        axis.set(xlabel="layer", ylabel="mean per-row Jaccard\nwith the FP16 selection (ratio)", ylim=(None, 1.005))
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def needles(items: pd.DataFrame) -> Figure:
    """Lead of the right answer over the best wrong one at each depth, a panel a context.

    Args:
        items: table of the questions.
    """
    rows = items[items["context_tokens"] < 2 * items["context_tokens"].min()]
    texts = list(dict.fromkeys(rows["text"]))
    with style.look():
        figure, axes = plt.subplots(1, len(texts), sharey=True, figsize=(7.0, 4.0), squeeze=False)
        for axis, text in zip(axes[0], texts, strict=True):
            axis.axhline(0.0, color="black", linewidth=0.8)
            depths = sorted(rows["depth_percent"].unique())
            for number, arm in enumerate(ARMS):
                line = rows[(rows["text"] == text) & (rows["arm"] == arm)].set_index("depth_percent")
                axis.plot(
                    np.arange(len(depths)) + (number - 2.5) * 0.11, line.loc[depths, "margin_nats"], linestyle="none",
                    markersize=6, label=arm, **ARM_STYLE[arm],
                )  # fmt: skip
            tokens = int(rows.loc[rows["text"] == text, "context_tokens"].iloc[0])
            axis.set(title=f"{text}, {tokens} tokens", xlabel="depth of the sentence (percent)")
            axis.set_xticks(range(len(depths)), [str(depth) for depth in depths])
        axes[0][0].set_ylabel("lead of the right answer (nats);\nfound above zero")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(ARMS), fontsize=8)
    return figure


def _shortest(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the shortest documents, which every run has."""
    return table[table["context_tokens"] == table["context_tokens"].min()]
