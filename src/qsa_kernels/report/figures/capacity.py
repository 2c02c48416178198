"""Figures of the capacity chapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from qsa_kernels.report.figures import style

# The E4M3 type stands for the public path, so it has the colour of that path's arm.
WIDTHS: dict[str, tuple[str, str]] = {"16-bit": ("fp16", "fp16"), "E4M3": ("fp8_e4m3", "hoisted/bitcast")}
LIMIT_COLOUR = "#D55E00"


def _counted(value: float, _: object = None) -> str:
    for unit, size in (("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _lengths(value: float, _: object = None) -> str:
    return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"


def _is_narrow(table: pd.DataFrame) -> pd.Series:
    return table["kv_cache_dtype"].eq("fp8_e4m3")


def parity(counts: pd.DataFrame) -> Figure:
    """Model against reported tokens, with the residuals below.

    Args:
        counts: from `capacity_reported.compare`.
    """
    known = counts[counts["status"] != "skipped"]
    with style.look():
        figure, (upper, lower) = plt.subplots(
            2, 1, sharex=True, figsize=(7.0, 6.0), gridspec_kw={"height_ratios": [2.2, 1]}
        )
        ends = np.array([known["reported_tokens"].min() * 0.8, known["reported_tokens"].max() * 1.25])
        upper.plot(ends, ends, color=style.NOISE_GREY, zorder=1, label="model = reported")
        for label, (dtype, arm) in WIDTHS.items():
            rows = known[_is_narrow(known) == (dtype == "fp8_e4m3")]
            marks = style.arm_style(arm)
            x = rows["reported_tokens"].astype(float)
            upper.plot(x, rows["model_tokens"].astype(float), linestyle="none", label=label, **marks)
            lower.plot(x, rows["residual_tokens"].astype(float), linestyle="none", **marks)
        for _, row in known[known["residual_tokens"] != 0].iterrows():
            lower.annotate(
                f"{row['pair']}: {row['residual_tokens']}",
                (float(row["reported_tokens"]), float(row["residual_tokens"])),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
            )
        lower.axhline(0, color=style.NOISE_GREY, zorder=1)
        upper.set(xscale="log", yscale="log", ylabel="model (tokens)")
        lower.set(xlabel="reported (tokens)", ylabel="residual (tokens)", ylim=(-3.5, 3.5))
        for axis in (upper.xaxis, upper.yaxis):
            axis.set_major_formatter(FuncFormatter(_counted))
            axis.set_minor_formatter(FuncFormatter(lambda value, _: _counted(value) if f"{value:e}"[0] in "25" else ""))
        upper.legend(loc="upper left")
    return figure


def waterfall(steps: Mapping[str, pd.DataFrame]) -> Figure:
    """From the factor 2 to the ratio of the reported tokens, one panel a deployment.

    Args:
        steps: name of the deployment and its table from `capacity.waterfall`.
    """
    with style.look():
        figure, panels = plt.subplots(1, len(steps), sharey=True, figsize=(9.0, 3.2), squeeze=False)
        low = min(0.9, *(table["gain"].min() - 0.6 for table in steps.values()))
        for axes, (name, table) in zip(panels[0], steps.items(), strict=True):
            rows = np.arange(len(table))
            after = table["gain"].to_numpy()
            before = after - table["change"].to_numpy()
            before[0] = low
            left = np.minimum(before, after)
            colours = [style.ARM_COLOURS["fp16+vector"], *[LIMIT_COLOUR] * (len(table) - 1)]
            axes.barh(rows, np.abs(after - before), left=left, color=colours, height=0.6)
            axes.vlines(after[:-1], rows[:-1] - 0.3, rows[1:] + 0.3, color="black", linewidth=0.8)
            axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
            for row, edge, gain, change in zip(rows[1:], left[1:], after[1:], table["change"][1:], strict=True):
                axes.text(edge - 0.015, row, f"{gain:.4f} ({change:+.4f})", ha="right", va="center", fontsize=8)
            axes.text(after[0] - 0.015, 0, f"{after[0]:g}", ha="right", va="center", fontsize=8, color="white")
            axes.set_title(name, fontsize=9)
            axes.set(xlim=(low, 2.05), ylim=(len(table) - 0.5, -0.5), xlabel="E4M3 over 16-bit tokens")
            axes.grid(visible=False, axis="y")
        panels[0][0].set_yticks(rows, table["step"])
    return figure


def gain_by_length(
    curves: Mapping[str, pd.DataFrame], marks: Mapping[str, tuple[int, float]], lengths: Sequence[int]
) -> Figure:
    """Gain as a function of `max_model_len`, in a pool so large that its own rounding does not show.

    Args:
        curves: name of the deployment and its table from `capacity.gain_by_length`.
        marks: published gains, `max_model_len` and ratio, by the name of the pair.
        lengths: lengths to mark by a vertical line.
    """
    styles = [("hoisted/bitcast", "-"), ("hoisted/packed", "-"), ("hoisted/exp2", "-")]
    with style.look():
        figure, axes = plt.subplots(figsize=(7.0, 4.6))
        for (name, table), (arm, line) in zip(curves.items(), styles, strict=False):
            axes.plot(
                table["max_model_len"],
                table["gain"],
                linestyle=line,
                color=style.ARM_COLOURS[arm],
                linewidth=1,
                label=name,
            )
        for limit in sorted({float(table["gain_limit"].iloc[0]) for table in curves.values()}):
            axes.axhline(
                limit, color=LIMIT_COLOUR, linestyle="--", linewidth=1, label=f"limit for long requests, {limit:.4f}"
            )
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":", label="no gain")
        for length in lengths:
            axes.axvline(length, color=style.NOISE_GREY, zorder=0)
            axes.text(length, 1.91, f"{length:,} ", rotation=90, ha="right", va="bottom", fontsize=8)
        for index, (name, (length, gain)) in enumerate(marks.items()):
            axes.plot(
                length,
                gain,
                linestyle="none",
                marker="D",
                color=style.REPORTED_COLOUR,
                label="reported" if index == 0 else None,
            )
            axes.annotate(
                name, (length, gain), xytext=(6, -5), textcoords="offset points", ha="left", va="top", fontsize=8
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(_lengths))
        axes.set(
            xlabel="max_model_len (tokens)",
            ylabel="E4M3 over 16-bit tokens (ratio)",
            ylim=(0.6, 2.12),
            xlim=(256, 600_000),
        )
        axes.legend(loc="lower right", fontsize=8)
    return figure


def _grid(axes: Axes, cells: pd.DataFrame) -> None:
    share = cells.assign(share=cells["blocks_needed"] / cells["blocks_in_pool"]).pivot_table(
        index="concurrency", columns="context_tokens", values="share"
    )
    values = share.to_numpy()
    axes.imshow(np.where(values <= 1, values, np.nan), cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    axes.set_facecolor("#F4D9C6")
    for row, column in np.ndindex(*values.shape):
        fits = values[row, column] <= 1
        axes.text(
            column,
            row,
            f"{values[row, column]:.0%}" if fits else f"no\n{values[row, column]:.0%}",
            ha="center",
            va="center",
            fontsize=9,
            weight="normal" if fits else "bold",
        )
    axes.set_xticks(range(share.shape[1]), [_lengths(float(length)) for length in share.columns])
    axes.set_yticks(range(share.shape[0]), [f"C{concurrency}" for concurrency in share.index])
    axes.grid(visible=False)


def feasibility(cells: pd.DataFrame, names: Mapping[str, str]) -> Figure:
    """Share of the pool that each cell of the benchmark takes; what exceeds it does not fit.

    Args:
        cells: from `capacity.feasibility`.
        names: shown name of every pool.
    """
    with style.look():
        figure, panels = plt.subplots(
            len(WIDTHS), len(names), sharex=True, sharey=True, figsize=(9.0, 4.6), squeeze=False
        )
        for column, (pool, name) in enumerate(names.items()):
            for row, (label, (dtype, _)) in enumerate(WIDTHS.items()):
                chosen = cells[(cells["pool"] == pool) & (_is_narrow(cells) == (dtype == "fp8_e4m3"))]
                axes = panels[row][column]
                _grid(axes, chosen)
                axes.set_title(f"{name}, {label}: {chosen['fits'].sum()} of {len(chosen)} cells", fontsize=10)
        for axes in panels[-1]:
            axes.set_xlabel("context (tokens)")
        for row_of_axes in panels:
            row_of_axes[0].set_ylabel("concurrency")
    return figure


def workspace(counts: pd.DataFrame, before: str, after: str, freed_mib: float) -> Figure:
    """Growth of the pool that the token counts of two pairs allow, beside the memory that sharing frees.

    Args:
        counts: from `capacity_reported.compare`.
        before, after: names of the two pairs.
        freed_mib: memory that the shared workspace frees, MiB per rank.
    """
    with style.look():
        figure, axes = plt.subplots(figsize=(7.0, 2.3))
        rows = {
            pair: counts[counts["pair"] == pair].assign(narrow=_is_narrow(counts)).set_index("narrow")
            for pair in (before, after)
        }
        spans = {}
        for label, (dtype, arm) in WIDTHS.items():
            old, new = (rows[pair].loc[dtype == "fp8_e4m3"] for pair in (before, after))
            span = 1024 * np.array(
                [new["pool_low_gib"] - old["pool_high_gib"], new["pool_high_gib"] - old["pool_low_gib"]]
            )
            spans[label] = span
            axes.plot(span, [label] * 2, color=style.ARM_COLOURS[arm], marker="|", linewidth=4)
        axes.axvline(freed_mib, color=LIMIT_COLOUR, linestyle="--")
        axes.annotate(
            f"freed: {freed_mib:.3f} MiB", (freed_mib, 0.5), xytext=(6, 0), textcoords="offset points", va="center"
        )
        axes.set(xlabel="growth of the pool that the token counts allow (MiB per rank)", ylim=(1.6, -0.6))
        axes.grid(visible=False, axis="y")
    return figure
