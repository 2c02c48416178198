"""Figures of the latency chapter; each shows its device, its noise floor and what it cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from qsa_kernels.report.figures import style

# What is not an arm of the operator, in colours that no arm has.
BASELINE_STYLE = {
    "sdpa/fp16": {"color": "#999933", "marker": "<"},
    "sdpa/e4m3": {"color": "#999933", "marker": ">"},
    "flashinfer/fp16": {"color": "#882255", "marker": "<"},
    "flashinfer/e4m3": {"color": "#882255", "marker": ">"},
    "A/A": {"color": "#666666", "marker": "."},
}
CODE_PATH_COLOUR = {"device": "#0072B2", "sm_70": "#D55E00"}
EFFECTS = ("placement", "decoder", "interaction")
VERDICT_MARK = {"faster": "", "slower": "", "same": "=", "undecided": "?", "not measurable": "!"}
NOT_MEASURED = "not measured: no recorded run"


def look_of(arm: str) -> dict[str, Any]:
    """Colour and marker of an arm or a baseline."""
    return BASELINE_STYLE.get(arm) or style.arm_style(arm)


def empty(what: str = NOT_MEASURED) -> Figure:
    """A figure that says that there is nothing to draw."""
    with style.look():
        figure, axes = plt.subplots(figsize=(7.0, 1.2))
        axes.text(0.5, 0.5, what, ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
    return figure


def title_of(workload: str) -> str:
    """A short title of a workload, from its name."""
    kind, rows, context, detail, heads, *_ = workload.split("-")
    words = {"random": ", random tokens", "overlap90": "", "overlap0": ", no overlap", "clustered": ""}
    heads = "" if heads == "h6x1" else f", {heads.removeprefix('h').replace('x', '/')} heads"
    return f"{kind} {rows}, {context.upper()}{words.get(detail, '')}{heads}"


def forest(cells: pd.DataFrame, launch: str, device: str) -> Figure:
    """Time of every arm over that of FP16, with 95 % intervals and the noise floor of each panel.

    Args:
        cells: `latency_cells` of one stage, code path and cache state, in the order of the panels.
        launch: arms are shown under this launch; baselines under their own.
        device: name of device and code path.
    """
    shown = cells[cells["launch"].isin([launch, "own"]) & (cells["status"] == "passed")]
    shown = shown[(shown["arm"] != "fp16") | (shown["launch"] != launch)]
    workloads = list(shown["workload"].unique())
    if not workloads:
        return empty()
    arms = [arm for arm in (*style.ARM_COLOURS, *BASELINE_STYLE) if arm in set(shown["arm"])][::-1]
    columns = min(3, len(workloads))
    lines = -(-len(workloads) // columns)
    with style.look():
        figure, grid = plt.subplots(
            lines,
            columns,
            sharex=True,
            sharey=True,
            squeeze=False,
            figsize=(9.0, 0.5 + lines * (0.7 + 0.2 * len(arms))),
        )
        for axes, workload in zip(grid.flat, workloads, strict=False):
            part = shown[shown["workload"] == workload].set_index("arm")
            floor = part["floor_log_ratio"].max()
            style.noise_floor(axes, np.exp(-floor), np.exp(floor))
            axes.axvline(1.0, color="#000000", linewidth=0.8)
            for place, arm in enumerate(arms):
                if arm in part.index:
                    _interval(axes, part.loc[arm], place, arm)
            axes.set_title(title_of(workload), fontsize=9)
            axes.set_xscale("log")
            axes.set_yticks(range(len(arms)), arms, fontsize=8)
            axes.grid(visible=False, axis="y")
            axes.tick_params(labelbottom=True)
        for axes in grid.flat[len(workloads) :]:
            axes.set_axis_off()
        _ratio_ticks(grid[0, 0], shown["ratio"])
        figure.suptitle(device, fontsize=9)
        figure.supxlabel("time over that of FP16 under the same launch name; grey: A/A noise floor", fontsize=9)
    return figure


def _interval(axes: Axes, row: pd.Series, place: float, arm: str) -> None:
    look = look_of(arm)
    hollow = row["verdict"] in ("undecided", "not measurable")
    low, high = row["ratio"] - row["ratio_low"], row["ratio_high"] - row["ratio"]
    axes.errorbar(
        row["ratio"], place, xerr=[[max(0.0, low)], [max(0.0, high)]], fmt=look["marker"], color=look["color"],
        markerfacecolor="white" if hollow else look["color"], markersize=5, capsize=2, elinewidth=1.2,
    )  # fmt: skip


def _ratio_ticks(axes: Axes, ratios: pd.Series) -> None:
    wanted = [0.25, 0.33, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50]
    low, high = 0.85 * min(1.0, ratios.min()), 1.18 * max(1.0, ratios.max())
    kept = [tick for tick in wanted if low <= tick <= high]
    if len(kept) > 6:
        kept = [tick for tick in kept if tick in (0.25, 0.5, 0.7, 1, 2, 5, 10, 20, 50)]
    axes.set_xlim(low, high)
    axes.set_xticks(kept)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


ANSWER = (
    ("hoisted/bitcast", "pre_ampere", "E4M3, both public changes, public launch"),
    ("fp16", "pre_ampere", "FP16, public launch"),
    ("hoisted/bitcast", "best", "E4M3, both public changes, best launch"),
    ("hoisted/packed", "best", "E4M3, packed decoder, best launch"),
    ("fp16", "best", "FP16, best launch"),
    ("fp16+vector", "best", "FP16, products in registers"),
    ("hoisted/packed+vector", "best", "E4M3, packed, products in registers"),
)


def answer(cells: pd.DataFrame, device: str) -> Figure:
    """Why the bytes did not pay and what makes them pay: times of one workload on one code path.

    Args:
        cells: `latency_cells` of one workload, code path and cache state.
        device: name of device and code path.
    """
    times = cells[cells["status"] == "passed"].set_index(["arm", "launch"])["time_us"]
    rows = [(arm, label, float(times[arm, launch])) for arm, launch, label in ANSWER if (arm, launch) in times.index]
    if not rows:
        return empty()
    floor = float(np.expm1(cells["floor_log_ratio"].median()))
    with style.look():
        figure, axes = plt.subplots(figsize=(7.0, 3.4))
        places = np.arange(len(rows))[::-1]
        colours = [style.arm_style(arm)["color"] for arm, _, _ in rows]
        axes.barh(places, [time for *_, time in rows], color=colours, height=0.65)
        for place, (_, _, time) in zip(places, rows, strict=True):
            axes.annotate(f"{time:.0f}", (time, place), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [label for _, label, _ in rows])
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.1)
        axes.set_xlabel(f"time, µs; noise floor {100 * floor:.1f} % of a time")
        axes.set_title(f"{title_of(str(cells['workload'].iloc[0]))}; {device}", fontsize=10)
    return figure


def effects(table: pd.DataFrame, labels: dict[str, str]) -> Figure:
    """Main effects and interaction of the 2x2 in per cent of time, with intervals and floors, for both code paths.

    Args:
        table: `latency_effects` of one launch, cold; a row a workload, code path and effect.
        labels: name of each code path.
    """
    shown = table[table["status"] == "passed"]
    workloads = list(shown["workload"].unique())
    if not workloads:
        return empty()
    paths = [path for path in labels if path in set(shown["code_path"])]
    with style.look():
        figure, grid = plt.subplots(
            1, len(EFFECTS), sharey=True, figsize=(9.0, 1.3 + 0.42 * len(workloads)), squeeze=False
        )
        for axes, effect in zip(grid[0], EFFECTS, strict=True):
            part = shown[shown["effect"] == effect]
            floor = part["floor_log_ratio"].median()
            style.noise_floor(axes, 100 * np.expm1(-floor), 100 * np.expm1(floor))
            axes.axvline(0.0, color="#000000", linewidth=0.8)
            for number, path in enumerate(paths):
                rows = part[part["code_path"] == path].set_index("workload").reindex(workloads)
                percent = 100 * np.expm1(rows[["log_ratio", "log_ratio_low", "log_ratio_high"]].to_numpy(float))
                places = np.arange(len(workloads))[::-1] + 0.16 * (0.5 - number) * 2
                axes.errorbar(
                    percent[:, 0], places,
                    xerr=[percent[:, 0] - percent[:, 1], percent[:, 2] - percent[:, 0]],
                    fmt="os"[number], color=CODE_PATH_COLOUR[path], markersize=4, capsize=2, label=labels[path],
                )  # fmt: skip
            axes.set_title({"placement": "hoisting the scale", "decoder": "bitcast for exp2"}.get(effect, effect))
            axes.set_yticks(range(len(workloads)), [title_of(name) for name in workloads[::-1]], fontsize=8)
            axes.set_xscale("symlog", linthresh=10)
            axes.margins(x=0.15)
            _percent_ticks(axes)
        figure.supxlabel("change of time, per cent; linear between -10 and 10; grey: A/A noise floor", fontsize=9)
        handles, names = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=8)
    return figure


def _percent_ticks(axes: Axes) -> None:
    low, high = axes.get_xlim()
    inside = [
        tick for tick in (-90, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100, 200) if low <= tick <= high
    ]
    apart = max(1, round(len(inside) / 5))
    zero = inside.index(0) if 0 in inside else 0
    axes.set_xticks([tick for place, tick in enumerate(inside) if (place - zero) % apart == 0])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))


def grid(cells: pd.DataFrame, workloads: pd.DataFrame, arms: Sequence[str], device: str) -> Figure:
    """Time over FP16 for concurrency and context, a panel an arm.

    Args:
        cells: `latency_cells` of the grid stage.
        workloads: `latency_workloads`.
        arms: the panels.
        device: its name.
    """
    joined = cells.merge(workloads[["workload", "rows", "context"]], on="workload")
    measured = joined[joined["status"] == "passed"]
    if measured.empty:
        return empty()
    rows, contexts = np.sort(joined["rows"].unique()), np.sort(joined["context"].unique())
    spread = max(0.05, float(np.abs(np.log2(measured[measured["arm"].isin(arms)]["ratio"])).max()))
    with style.look():
        figure, axes_of = plt.subplots(1, len(arms), sharey=True, figsize=(2.6 * len(arms) + 0.8, 3.0), squeeze=False)
        for axes, arm in zip(axes_of[0], arms, strict=True):
            part = measured[measured["arm"] == arm]
            ratio = part.pivot_table(index="rows", columns="context", values="ratio").reindex(rows, columns=contexts)
            image = axes.imshow(
                np.log2(ratio), cmap="PuOr_r", norm=TwoSlopeNorm(0.0, -spread, spread), aspect="auto", origin="lower"
            )
            for row, context, value, verdict in zip(
                part["rows"], part["context"], part["ratio"], part["verdict"], strict=True
            ):
                axes.text(
                    int(np.searchsorted(contexts, context)), int(np.searchsorted(rows, row)),
                    f"{value:.2f}{VERDICT_MARK[verdict]}", ha="center", va="center", fontsize=7,
                    color="white" if abs(np.log2(value)) > 0.6 * spread else "black",
                )  # fmt: skip
            axes.set_title(arm, fontsize=9)
            axes.set_xticks(range(len(contexts)), [f"{context // 1024}K" for context in contexts], fontsize=8)
            axes.set_yticks(range(len(rows)), [str(row) for row in rows], fontsize=8)
            axes.set_xlabel("context, tokens")
            axes.grid(visible=False)
        axes_of[0, 0].set_ylabel("concurrency, requests")
        figure.suptitle(device, fontsize=9)
        bar = figure.colorbar(image, ax=axes_of, shrink=0.9, label="time over FP16")
        ticks = [tick for tick in (0.25, 0.5, 0.7, 1, 1.4, 2, 4, 8) if abs(np.log2(tick)) <= spread]
        bar.set_ticks([float(np.log2(tick)) for tick in ticks], labels=[f"{tick:g}" for tick in ticks])
    return figure


def bandwidth(cells: pd.DataFrame, workloads: pd.DataFrame, copy_gb_per_s: float, device: str) -> Figure:
    """Distinct K and V bytes over time, cold, against the measured copy bandwidth.

    Args:
        cells: `latency_cells` of decode at one context, best launches and baselines.
        workloads: `latency_workloads`.
        copy_gb_per_s: measured copy bandwidth.
        device: its name.
    """
    joined = cells.merge(workloads[["workload", "rows"]], on="workload")
    joined = joined[(joined["status"] == "passed") & (joined["arm"] != "A/A")]
    if joined.empty:
        return empty()
    with style.look():
        figure, axes = plt.subplots(figsize=(7.0, 4.2))
        for arm in [arm for arm in (*style.ARM_COLOURS, *BASELINE_STYLE) if arm in set(joined["arm"])]:
            part = joined[joined["arm"] == arm].sort_values("rows")
            axes.plot(part["rows"], part["implied_gb_per_s"], label=arm, markersize=5, linewidth=1, **look_of(arm))
        axes.axhline(copy_gb_per_s, color="#000000", linestyle="--", linewidth=1)
        axes.text(1.0, copy_gb_per_s * 1.03, "measured copy bandwidth", fontsize=8, va="bottom")
        rows = np.sort(joined["rows"].unique())
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(rows, [str(row) for row in rows])
        axes.set_ylim(top=copy_gb_per_s * 1.6)
        axes.set(xlabel="rows (decode concurrency)", ylabel="distinct K and V bytes over time, GB/s")
        axes.set_title(device, fontsize=9)
        figure.legend(loc="outside right center", fontsize=8)
    return figure


def cold_and_hot(cold: pd.DataFrame, hot: pd.DataFrame, workloads: pd.DataFrame, device: str) -> Figure:
    """Times of the same cells with a cold and with a hot cache.

    Args:
        cold: `latency_cells`, cold, best launches.
        hot: the same, hot.
        workloads: `latency_workloads`.
        device: its name.
    """
    keys = ["workload", "arm", "launch"]
    both = hot.merge(cold[[*keys, "time_us"]], on=keys, suffixes=("_hot", "_cold"))
    both = both[both["arm"] != "A/A"].merge(workloads[["workload", "rows"]], on="workload")
    if both.empty:
        return empty()
    with style.look():
        figure, axes = plt.subplots(figsize=(7.0, 3.8))
        for arm in [arm for arm in style.ARM_COLOURS if arm in set(both["arm"])]:
            part = both[both["arm"] == arm].sort_values("rows")
            axes.plot(
                part["rows"], part["time_us_cold"] / part["time_us_hot"], label=arm, markersize=5, linewidth=1,
                **look_of(arm),
            )  # fmt: skip
        floor = float(both["floor_log_ratio"].median())
        axes.axhspan(np.exp(-floor), np.exp(floor), color=style.NOISE_GREY, zorder=0, label="A/A noise floor")
        axes.axhline(1.0, color="#000000", linewidth=0.8)
        axes.set_title(device, fontsize=9)
        rows = np.sort(both["rows"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [str(row) for row in rows])
        axes.set(xlabel="rows (decode concurrency)", ylabel="cold time over hot time")
        figure.legend(loc="outside right center", fontsize=8)
    return figure


def public_launch(pairs: pd.DataFrame, labels: dict[str, str]) -> Figure:
    """How much each arm gains from its own best launch against the public profiles.

    Args:
        pairs: `latency_pairs` of the question "best against public launch", cold.
        labels: name of each code path.
    """
    if pairs.empty:
        return empty()
    paths = [path for path in labels if path in set(pairs["code_path"])]
    with style.look():
        figure, grid = plt.subplots(1, len(paths), figsize=(9.0, 4.2), squeeze=False)
        for axes, path in zip(grid[0], paths, strict=True):
            part = pairs[pairs["code_path"] == path]
            workloads = list(part["workload"].unique())
            arms = [arm for arm in style.ARM_COLOURS if arm in set(part["arm"])]
            for number, arm in enumerate(arms):
                rows = part[part["arm"] == arm]
                places = [workloads.index(name) + 0.1 * (number - len(arms) / 2) for name in rows["workload"]]
                axes.plot(1.0 / rows["ratio"], places, linestyle="none", markersize=5, label=arm, **look_of(arm))
            floor = part["floor_log_ratio"].median()
            style.noise_floor(axes, np.exp(-floor), np.exp(floor), "")
            axes.axvline(1.0, color="#000000", linewidth=0.8)
            axes.set_yticks(range(len(workloads)), [title_of(name) for name in workloads], fontsize=8)
            axes.invert_yaxis()
            axes.set_xscale("log")
            _ratio_ticks(axes, 1.0 / part["ratio"])
            axes.set_title(labels[path], fontsize=9)
            axes.set_xlabel("public time over best time")
        handles = {
            name: handle
            for axes in grid[0]
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
            if name
        }
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=8)
    return figure
