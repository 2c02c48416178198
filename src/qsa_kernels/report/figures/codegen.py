"""Figures of the code-generation chapter."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qsa_kernels.arms import ARMS
from qsa_kernels.measure import roofline
from qsa_kernels.report.figures import style

# P. Tol's muted scheme: safe with colour blindness, and no colour of an arm.
PALETTE = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB")
CLASS_GROUPS: dict[str, tuple[str, ...]] = {
    "FP32 arithmetic": ("fp32",),
    "tensor core": ("tensor_core",),
    "integer, logic": ("integer", "uniform"),
    "conversion": ("conversion", "fp16"),
    "exp2 and other special functions": ("mufu",),
    "compare, select, move": ("fp32_compare", "move", "constant_load"),
    "global memory": ("global_load", "global_to_shared", "global_store"),
    "shared memory, shuffle, barrier": ("shared_load", "shared_store", "shuffle", "barrier"),
    "spill": ("local",),
    "branch, other": ("branch", "other"),
}
PART_LABELS = {
    "contraction": "contraction",
    "decode": "decode and casts",
    "scaling": "scaling",
    "softmax": "softmax",
    "addressing": "addresses, loads, loop",
    "unattributed": "no line information",
}
PIPE_LABELS = {
    "shared_memory": "shared memory and L1 (128 B a cycle)",
    "issue": "instruction issue",
    "fma": "FMA unit",
    "alu": "integer unit",
    "xu": "special functions, conversions",
    "tensor": "tensor core",
    "global_memory": "device memory",
}


def classes(table: pd.DataFrame) -> Figure:
    """Loop instructions of each arm by class, one panel a launch.

    Args:
        table: from `codegen.class_table`.
    """
    loop = table[table["scope"] == "loop"]
    stem = loop["class"].str.replace(r"_\d+$", "", regex=True)
    group_of = {name: group for group, names in CLASS_GROUPS.items() for name in names}
    return _stacked(loop.assign(group=stem.map(group_of)), "group", tuple(CLASS_GROUPS), CLASS_GROUPS)


def parts(table: pd.DataFrame) -> Figure:
    """Loop instructions of each arm by part of the algorithm, one panel a launch.

    Args:
        table: from `codegen.part_table`.
    """
    return _stacked(table, "part", tuple(PART_LABELS), PART_LABELS)


def _stacked(table: pd.DataFrame, column: str, order: Sequence[str], labels: object) -> Figure:
    launches = [(key, panel) for key, panel in table.groupby(["arch", "profile"], sort=False)]
    sizes = [panel["arm"].nunique() for _, panel in launches]
    with style.look():
        figure, axes = plt.subplots(
            len(launches),
            sharex=True,
            squeeze=False,
            figsize=(8.0, 1.6 + sum(0.34 * size + 0.55 for size in sizes)),
            gridspec_kw={"height_ratios": sizes},
        )
        for axis, (key, panel) in zip(axes[:, 0], launches, strict=True):
            _stack(axis, panel, column, order)
            axis.set_title(", ".join(map(str, key)), loc="left", fontsize=10)
        axes[-1, 0].set_xlabel("thread instructions for each K or V element (bar end: warp instructions in the loop)")
        used = [name for name in order if (table.loc[table[column] == name, "instructions"] > 0).any()]
        handles = [plt.Rectangle((0, 0), 1, 1, color=PALETTE[list(order).index(name)]) for name in used]
        names = [labels[name] if isinstance(labels, dict) and isinstance(labels[name], str) else name for name in used]
        figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _stack(axis: Axes, panel: pd.DataFrame, column: str, order: Sequence[str]) -> None:
    arms = [arm for arm in ARMS if arm in set(panel["arm"])]
    left = np.zeros(len(arms))
    for name, colour in zip(order, PALETTE, strict=False):
        chosen = panel[panel[column] == name].groupby("arm")["per_element"].sum()
        width = np.array([float(chosen.get(arm, 0.0)) for arm in arms])
        axis.barh(arms, width, left=left, color=colour, edgecolor="white", linewidth=0.4, height=0.75)
        left += width
    totals = panel.groupby("arm")["instructions"].sum()
    for arm, end in zip(arms, left, strict=True):
        axis.annotate(
            f"{int(totals[arm]):,}", (end, arm), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.09)


def wavefronts(table: pd.DataFrame) -> Figure:
    """Shared-memory wavefronts of each arm for one tile: the least possible, and what bank conflicts add.

    Args:
        table: from `codegen.shared_access_table`, one launch an arm.
    """
    kind = table["class"].str.contains("store").map({False: "loads", True: "stores"})
    sums = (
        table.assign(kind=kind, least=table["wavefronts_without_conflicts"].clip(upper=table["wavefronts"]))
        .assign(added=lambda one: one["wavefronts"] - one["least"])
        .groupby(["arm", "kind"])[["least", "added"]]
        .sum()
        .mul(table.groupby("arm")["num_warps"].first(), axis=0, level="arm")
    )
    arms = [arm for arm in ARMS if arm in set(table["arm"])]
    with style.look():
        figure, axis = plt.subplots(figsize=(8.0, 1.4 + 0.4 * len(arms)))
        left = np.zeros(len(arms))
        for name, part, colour in (
            ("loads", "least", PALETTE[1]),
            ("loads", "added", PALETTE[0]),
            ("stores", "least", PALETTE[5]),
            ("stores", "added", PALETTE[6]),
        ):
            width = np.array([float(sums[part].get((arm, name), 0.0)) for arm in arms])
            text = f"{name}, {'without conflicts' if part == 'least' else 'added by bank conflicts'}"
            axis.barh(arms, width, left=left, color=colour, edgecolor="white", linewidth=0.4, height=0.75, label=text)
            left += width
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("shared-memory wavefronts of a block for each tile (one a cycle)")
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def pipes(table: pd.DataFrame, measured: pd.DataFrame | None = None) -> Figure:
    """Cycles of each unit for every arm and launch, beside the measured time where there is one.

    Args:
        table: from `roofline.pipe_table`, one device.
        measured: from `roofline.measured_table`, for the same kernels; None = nothing was measured.
    """
    device = table["device"].iloc[0]
    by = ["arm", "profile"]
    cycles = table.pivot_table(index=by, columns="pipe", values="cycles_per_token", sort=False)
    kernels = sorted(cycles.index, key=lambda kernel: list(ARMS).index(kernel[0]))
    shown = [pipe for pipe in PIPE_LABELS if cycles[pipe].max() > 0]
    height = 0.86 / len(shown)
    places = np.arange(len(kernels), dtype=float)
    with style.look():
        figure, axis = plt.subplots(figsize=(8.0, 1.6 + 0.75 * len(kernels)))
        for step, pipe in enumerate(shown):
            offset = (step - (len(shown) - 1) / 2) * height
            values = cycles.loc[kernels, pipe].to_numpy()
            colour = PALETTE[list(PIPE_LABELS).index(pipe)]
            axis.barh(places + offset, values, height=height, color=colour, label=PIPE_LABELS[pipe])
        if measured is not None:
            found = measured.set_index(by)["cycles_per_token"]
            rows = [index for index, kernel in enumerate(kernels) if kernel in found.index]
            values = np.array([float(found[kernels[index]]) for index in rows])
            axis.plot(values, places[rows], "d", color="black", markersize=7, label="measured")
        axis.set_yticks(places, [f"{arm}\n{profile}" for arm, profile in kernels])
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(f"cycles of a multiprocessor for each selected token ({device}, each unit at its peak)")
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def measured_notes(measured: pd.DataFrame, pipes: pd.DataFrame, cells: pd.DataFrame, device: str) -> dict[str, str]:
    """What the measured times say, in words, for each architecture that has some.

    Args:
        measured: from `roofline.measured_table`.
        pipes: from `roofline.pipe_table`, for the same kernels.
        cells: the run's `latency_cells`.
        device: name of the device that was measured.
    """

    def group(kernel: tuple[str, str, str]) -> str:
        arch, arm, profile = kernel
        if ARMS[arm].contraction == "vector":
            return "in the vector arms"
        if profile.endswith("transposed"):
            return "in transposed launches"
        return "with heads as rows" if arch == "sm_90" else "in the dot arms"

    notes = {}
    for arch, values in roofline.over_bound(measured, pipes).groupby(level="arch"):
        timed = measured[measured["arch"] == arch]
        groups = values.groupby([group(kernel) for kernel in values.index]).agg(["min", "max"])
        ranges = [f"{row['min']:.2f} to {row['max']:.2f} times {name}" for name, row in groups.iterrows()]
        words = f"Measured on {device}, cold decoding takes longer than the unit that binds: {' and '.join(ranges)}."
        best = timed.groupby("arm")["time_us"].min()
        for plain, packed in (("fp16", "hoisted/packed"), ("fp16+vector", "hoisted/packed+vector")):
            if {plain, packed} <= set(best.index):
                words += f" The time of {packed} is {best[packed] / best[plain]:.2f} times that of {plain}."
        own = roofline.RUNS_ON.get(str(arch)) == timed["device"].iloc[0]
        on_path = cells["code_path"] == ("device" if own else arch)
        floor = cells.loc[on_path & cells["workload"].isin(timed["workload"]), "floor_log_ratio"].max()
        notes[str(arch)] = f"{words} Noise floor: {100 * np.expm1(floor):.1f} %."
    return notes
