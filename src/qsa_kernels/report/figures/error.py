"""Figures of the error chapter."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qsa_kernels.report.figures import style

SOURCE_STYLE: dict[str, dict[str, str]] = {
    "cache K": {"color": "#0072B2", "marker": "o"},
    "cache V": {"color": "#D55E00", "marker": "s"},
    "cache K and V": {"color": "#000000", "marker": "D"},
    "K cast, in_loop": {"color": "#56B4E9", "marker": "^"},
    "V cast, in_loop": {"color": "#E69F00", "marker": "v"},
    "probability cast": {"color": "#009E73", "marker": "P"},
    "output cast": {"color": "#CC79A7", "marker": "X"},
}

# Not the colour of any arm.
RANDOM_COLOUR = "#882255"
REAL_COLOUR = "#44AA99"


def by_arm(cells: pd.DataFrame, sources: pd.DataFrame, device: str) -> Figure:
    """RMS error of every arm on every case, above the error that rounding the output causes alone.

    Args:
        cells: from `error.cells`.
        sources: from `error.sources` of the same cases.
        device: what ran the kernels.
    """
    shown = cells[(cells["reference"] == "fp64") & (cells["status"] == "passed")]
    cases = list(dict.fromkeys(shown["case"]))
    arms = list(dict.fromkeys(shown["arm"]))
    floor = sources[sources["source"] == "output cast"].set_index("case")["rms_relative"]
    with style.look():
        figure, axis = plt.subplots(figsize=(7.4, 4.6))
        for place, case in enumerate(cases):
            axis.hlines(floor[case], place - 0.45, place + 0.45, color="#7F7F7F", linewidth=1.5, zorder=1)
            for number, arm in enumerate(arms):
                rows = shown[(shown["case"] == case) & (shown["arm"] == arm)]
                look = style.arm_style(arm)
                for mode, fill in (("single", look["color"]), ("split", "white")):
                    values = rows[rows["mode"] == mode]["rms_relative"]
                    shift = (number - (len(arms) - 1) / 2) * 0.095 + (0.02 if mode == "split" else -0.02)
                    axis.plot(
                        np.full(len(values), place + shift), values, linestyle="none", markersize=5.5,
                        marker=look["marker"], color=look["color"], markerfacecolor=fill,
                    )  # fmt: skip
        axis.set_xticks(range(len(cases)), [case.replace("published-", "published\n") for case in cases], fontsize=8)
        axis.set_ylabel("RMS error / RMS of the FP64 reference")
        axis.set_ylim(bottom=0)
        axis.ticklabel_format(axis="y", style="sci", scilimits=(-4, -4))
        axis.set_title(f"device: {device}", fontsize=9, loc="right")
        handles = [
            Line2D([], [], linestyle="none", **style.arm_style(arm), label=arm)  # type: ignore[arg-type]
            for arm in arms
        ]
        handles += [
            Line2D([], [], linestyle="none", marker="o", color="#444444", label="one split"),
            Line2D(
                [], [], linestyle="none", marker="o", color="#444444", markerfacecolor="white", label="several splits"
            ),
            Line2D([], [], color="#7F7F7F", label="rounding the E4M3 output alone"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def histograms(table: pd.DataFrame, arms: Sequence[str], device: str) -> Figure:
    """Distribution of the signed errors of some arms on one case.

    Args:
        table: from `error.histograms`.
        arms: which arms, split mode.
        device: what ran the kernels.
    """
    with style.look():
        figure, axis = plt.subplots()
        for arm in ("output rounding alone", *arms):
            rows = table[(table["arm"] == arm) & table["mode"].isin(["split", "none"]) & (table["status"] == "passed")]
            if rows.empty:
                continue
            edges = np.append(rows["low_of_rms"], rows["high_of_rms"].iloc[-1])
            share = rows["elements"].to_numpy() / rows["elements"].sum()
            if arm in style.ARM_COLOURS:
                axis.stairs(share, edges, color=style.ARM_COLOURS[arm], linewidth=1.6, label=arm)
            else:
                axis.stairs(share, edges, fill=True, color=style.NOISE_GREY, label=arm)
        axis.set(xlabel="(output minus FP64 reference) / RMS of the reference", ylabel="share of the output elements")
        axis.ticklabel_format(axis="x", style="sci", scilimits=(-3, -3))
        axis.set_title(f"{table['case'].iloc[0]}, several splits; device: {device}", fontsize=9, loc="right")
        axis.legend(fontsize=8)
    return figure


def sources(table: pd.DataFrame, random_case: str) -> Figure:
    """What each rounding costs alone: the cache above, the casts of a kernel below; random case and real layers.

    Args:
        table: from `error.sources`, random and captured cases.
        random_case: the random case to show.
    """
    names = list(SOURCE_STYLE)
    with style.look():
        figure, axis = plt.subplots(figsize=(7.0, 3.8))
        for place, name in enumerate(names):
            rows = table[table["source"] == name]
            real = rows[rows["case"].str.startswith("layer ")]["rms_relative"]
            random = rows[rows["case"] == random_case]["rms_relative"]
            jitter = np.linspace(-0.22, 0.22, max(1, len(real)))
            axis.plot(real, place + jitter[: len(real)], ".", color=REAL_COLOUR, markersize=4, alpha=0.7)
            axis.plot(random, np.full(len(random), place), "D", color=RANDOM_COLOUR, markersize=7)
        axis.axhline(2.5, color="#7F7F7F", linewidth=0.8)
        axis.set_yticks(range(len(names)), [name.replace("in_loop", "before hoisting") for name in names])
        axis.invert_yaxis()
        axis.set(xscale="log", xlabel="RMS error of the attention output / RMS of the output")
        axis.legend(
            handles=[
                Line2D([], [], linestyle="none", marker="D", color=RANDOM_COLOUR, label=f"random: {random_case}"),
                Line2D([], [], linestyle="none", marker=".", color=REAL_COLOUR, label="real: one point a layer"),
            ],
            loc="lower right",
            fontsize=8,
            frameon=True,
        )
        axis.set_title("FP64 with one rounding switched on; device: CPU", fontsize=9, loc="right")
    return figure


def layers(table: pd.DataFrame, random_case: str) -> Figure:
    """Error that the codes of K, of V and of both cause in each layer, beside the random case.

    Args:
        table: from `error.sources`, random and captured cases.
        random_case: the random case to show as horizontal lines.
    """
    real = table[table["case"].str.startswith("layer ")].copy()
    real["layer"] = real["case"].str.removeprefix("layer ").astype(int)
    with style.look():
        figure, axis = plt.subplots(figsize=(7.0, 4.2))
        for name in ("cache K", "cache V", "cache K and V"):
            look = SOURCE_STYLE[name]
            rows = real[real["source"] == name].sort_values("layer")
            axis.plot(rows["layer"], rows["rms_relative"], markersize=4.5, linewidth=1, label=f"{name}, real", **look)  # type: ignore[arg-type]
            if name != "cache K and V":
                level = table[(table["case"] == random_case) & (table["source"] == name)]["rms_relative"]
                axis.axhline(float(level.iloc[0]), color=look["color"], linestyle="--", label=f"{name}, random")
        axis.set(xlabel="layer", ylabel="RMS error of the attention output /\nRMS of the output", yscale="log")
        axis.set_title("FP64 on decoded against FP64 on unquantised cache; device: CPU", fontsize=9, loc="right")
        figure.legend(loc="outside lower center", fontsize=8, ncols=3)
    return figure


def channels(table: pd.DataFrame, random_case: str) -> Figure:
    """Share of the score error that the largest channels of K carry.

    Args:
        table: from `error.channels`, random and captured cases.
        random_case: the random case to show.
    """
    with style.look():
        figure, axis = plt.subplots()
        for case, rows in table.groupby("case", sort=False):
            is_random = case == random_case
            if not is_random and not str(case).startswith("layer "):
                continue
            axis.plot(
                rows["largest_channels"] / rows["channels"],
                rows["score_error_share"],
                color=RANDOM_COLOUR if is_random else REAL_COLOUR,
                linewidth=2.2 if is_random else 0.8,
                alpha=1.0 if is_random else 0.55,
                zorder=3 if is_random else 2,
            )
        alike = np.geomspace(0.002, 1.0, 60)
        axis.plot(alike, alike, color="#7F7F7F", linestyle=":")
        axis.set(
            xscale="log",
            xlabel="share of the channels of K, largest contributors first",
            ylabel="share of the mean square score error",
            ylim=(0, 1.02),
        )
        axis.legend(
            handles=[
                Line2D([], [], color=RANDOM_COLOUR, linewidth=2.2, label=f"random: {random_case}"),
                Line2D([], [], color=REAL_COLOUR, linewidth=0.8, label="real: one line a layer"),
                Line2D([], [], color="#7F7F7F", linestyle=":", label="all channels alike"),
            ],
            fontsize=8,
        )
        axis.set_title("score error = q · (decoded K minus K); device: CPU", fontsize=9, loc="right")
    return figure


def seed_spread(table: pd.DataFrame, cells: pd.DataFrame, reported_max_abs: float) -> Figure:
    """Largest errors over several draws of the long case, with the kernels' and the public figure.

    Args:
        table: from `error.seed_spread`.
        cells: the kernels' rows of the long case in split mode against the same reference.
        reported_max_abs: the public figure.
    """
    arms = list(dict.fromkeys(table["arm"]))
    with style.look():
        figure, axis = plt.subplots(figsize=(7.0, 2.8))
        for place, arm in enumerate(arms):
            colour = style.ARM_COLOURS[arm]
            drawn = table[table["arm"] == arm]["max_abs"]
            axis.plot(drawn, np.full(len(drawn), place), "|", color=colour, markersize=16)
            kernel = cells[cells["arm"] == arm]["max_abs"]
            axis.plot(kernel, np.full(len(kernel), place), linestyle="none", markersize=7, **style.arm_style(arm))  # type: ignore[arg-type]
        axis.axvline(reported_max_abs, color=style.REPORTED_COLOUR, linestyle="--")
        axis.set_yticks(range(len(arms)), arms)
        axis.set(ylim=(-0.6, len(arms) - 0.4), xlabel="largest absolute error against the FP32 dequantised reference")
        axis.ticklabel_format(axis="x", style="sci", scilimits=(-6, -6))
        axis.legend(
            handles=[
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker="|",
                    markersize=12,
                    color="#444444",
                    label="plain torch, one draw each",
                ),
                Line2D([], [], linestyle="none", marker="D", color="#444444", label="the kernel, this run's draw"),
                Line2D([], [], color=style.REPORTED_COLOUR, linestyle="--", label="reported (V100, other tensors)"),
            ],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.3),
            ncols=3,
            fontsize=8,
        )
    return figure
