"""Figures of the calibration chapter."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from qsa_kernels.measure.scale_effects import CHOICES, SMALLEST_NORMAL
from qsa_kernels.report.figures import style
from qsa_kernels.scales import E4M3_MAX, KINDS

KIND_STYLE: dict[str, dict[str, Any]] = {
    "k": {"color": "#0072B2", "marker": "o"},
    "v": {"color": "#D55E00", "marker": "s"},
}
CHOICE_STYLE: dict[str, dict[str, Any]] = {
    "calibrated": {"color": "#000000", "marker": "o"},
    "unit": {"color": "#0072B2", "marker": "s"},
    "double": {"color": "#56B4E9", "marker": "x"},
    "half": {"color": "#D55E00", "marker": "v"},
    "p99.9": {"color": "#E69F00", "marker": "^"},
    "exchanged": {"color": "#CC79A7", "marker": "D"},
}
TEXT_STYLE: tuple[dict[str, Any], ...] = (
    {"color": "#009E73", "marker": "o"},
    {"color": "#E69F00", "marker": "s"},
    {"color": "#56B4E9", "marker": "^"},
    {"color": "#CC79A7", "marker": "D"},
)


def distributions(histograms: pd.DataFrame, summary: pd.DataFrame) -> Figure:
    """Where the magnitudes of K and V lie in each layer, against the range of normal codes.

    Args:
        histograms: from `CalibrationReport.histograms`.
        summary: from `CalibrationReport.table`.
    """
    with style.look():
        figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7.0, 4.4))
        for axis, kind in zip(axes, KINDS, strict=True):
            rows = histograms[histograms["kind"] == kind]
            edges = np.unique(rows[["log2_lower_edge", "log2_upper_edge"]].to_numpy())
            layers = np.sort(rows["layer"].unique())
            grid = rows.pivot_table(index="log2_lower_edge", columns="layer", values="share_of_nonzero")
            grid = grid.reindex(index=edges[:-1], columns=layers)
            shares = axis.pcolormesh(
                np.append(layers, layers[-1] + 1) - 0.5, 2.0**edges, grid.to_numpy(),
                cmap="Greys", norm=LogNorm(vmin=1e-7, vmax=1e-1), rasterized=True,
            )  # fmt: skip
            tensors = summary[summary["kind"] == kind]
            axis.step(tensors["layer"], tensors["max_abs"], where="mid", color="#D55E00", label="maximum, code 448")
            axis.step(
                tensors["layer"], tensors["scale"] * SMALLEST_NORMAL, where="mid",
                color="#0072B2", label="smallest normal code, calibrated",
            )  # fmt: skip
            axis.axhline(SMALLEST_NORMAL, color="#009E73", linestyle="--", label="smallest normal code, scale 1")
            axis.set(title=f"{kind.upper()}", xlabel="layer", yscale="log", ylim=(2.0**-18, 2.0**6))
            axis.set_yscale("log", base=2)
            axis.grid(visible=False)
        axes[0].set_ylabel("magnitude |x|")
        axes[1].legend(loc="lower right", fontsize=8, frameon=True)
        figure.colorbar(shares, ax=axes, label="share of non-zero values a quarter octave", shrink=0.9)
    return figure


def scales_by_layer(summary: pd.DataFrame, published_range: tuple[float, float]) -> Figure:
    """Scale of K and V in each layer, and what percentile scaling would give.

    Args:
        summary: from `CalibrationReport.table`.
        published_range: smallest and largest published scale, of another model.
    """
    with style.look():
        figure, axis = plt.subplots()
        low, high = published_range
        axis.axhspan(
            low, high, color=style.NOISE_GREY, zorder=0, label="reported range, published pack (another model)"
        )
        for kind in KINDS:
            rows = summary[summary["kind"] == kind]
            axis.plot(rows["layer"], rows["scale"], label=f"{kind.upper()}: maximum / 448", **KIND_STYLE[kind])
            axis.plot(
                rows["layer"], rows["p99_9"] / E4M3_MAX, linestyle=":", color=KIND_STYLE[kind]["color"],
                label=f"{kind.upper()}: p99.9 / 448",
            )  # fmt: skip
        axis.set(xlabel="layer", ylabel="scale (|x| a unit of the code)", yscale="log")
        axis.legend(fontsize=8, ncols=2, loc="lower right")
    return figure


def attention_error(table: pd.DataFrame) -> Figure:
    """Error of the attention output in each layer for each choice of scales, a panel a text.

    Args:
        table: from `scale_effects.attention_error`.
    """
    texts = list(dict.fromkeys(table["text"]))
    with style.look():
        figure, axes = plt.subplots(1, len(texts), sharey=True, figsize=(7.0, 4.4), squeeze=False)
        for axis, text in zip(axes[0], texts, strict=True):
            rows = table[table["text"] == text]
            for choice in CHOICES:
                line = rows[rows["choice"] == choice]
                axis.plot(
                    line["layer"], line["rms_relative"], label=choice, linewidth=1, markersize=4, **CHOICE_STYLE[choice]
                )
            axis.set(title=text, xlabel="layer", yscale="log")
        axes[0][0].set_ylabel("error of the attention output,\nRMS relative to the unquantised cache")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(CHOICES), fontsize=8)
    return figure


def overshoot(table: pd.DataFrame) -> Figure:
    """Largest magnitude of the evaluation texts over the calibrated envelope, in each layer.

    Args:
        table: from `scale_effects.saturation`.
    """
    texts = list(dict.fromkeys(table.loc[table["role"] == "evaluation", "text"]))
    with style.look():
        figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7.0, 4.0))
        for axis, kind in zip(axes, KINDS, strict=True):
            _envelope(axis)
            for number, text in enumerate(texts):
                rows = table[(table["text"] == text) & (table["kind"] == kind)]
                axis.plot(
                    rows["layer"], rows["max_over_envelope"], linestyle="none", markersize=5, label=text,
                    **TEXT_STYLE[number % len(TEXT_STYLE)],
                )  # fmt: skip
            axis.set(title=kind.upper(), xlabel="layer")
        axes[0].set_ylabel("largest |x| / (448 · scale)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(texts) + 1, fontsize=8)
    return figure


def _envelope(axis: Axes) -> None:
    axis.axhline(1.0, color="black", linewidth=1, label="envelope: above it codes saturate")
