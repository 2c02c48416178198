"""One look for all figures: a colour and a marker for each arm, and the same bytes for the same data."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

# Okabe and Ito's palette: distinguishable with every common form of colour blindness.
ARM_COLOURS: dict[str, str] = {
    "fp16": "#000000",
    "in_loop/exp2": "#D55E00",
    "hoisted/exp2": "#E69F00",
    "in_loop/bitcast": "#56B4E9",
    "hoisted/bitcast": "#0072B2",
    "hoisted/packed": "#009E73",
    "hoisted/native": "#CC79A7",
    "fp16+vector": "#7F7F7F",
    "hoisted/packed+vector": "#6B4E9B",
}

ARM_MARKERS: dict[str, str] = {
    "fp16": "o",
    "in_loop/exp2": "v",
    "hoisted/exp2": "^",
    "in_loop/bitcast": "s",
    "hoisted/bitcast": "D",
    "hoisted/packed": "P",
    "hoisted/native": "X",
    "fp16+vector": "h",
    "hoisted/packed+vector": "*",
}

NOISE_GREY = "#D9D9D9"
REPORTED_COLOUR = "#8C564B"

RC: dict[RcKeyType, Any] = {
    "figure.figsize": (7.0, 4.0),
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "qsa-kernels",
}


@contextmanager
def look() -> Iterator[None]:
    """Draw in the report's style: `with style.look(): ...`."""
    with mpl.rc_context(RC):
        yield


def arm_style(arm: str) -> dict[str, str]:
    """Colour and marker of an arm, as keyword arguments of `Axes.plot`.

    Raises:
        ValueError: no arm of that name.
    """
    if arm not in ARM_COLOURS:
        raise ValueError(f"arm: expected one of {', '.join(ARM_COLOURS)}; got {arm!r}")
    return {"color": ARM_COLOURS[arm], "marker": ARM_MARKERS[arm]}


def noise_floor(axes: Axes, low: float, high: float, text: str = "A/A noise floor") -> None:
    """A grey horizontal-axis band from `low` to `high` behind the data."""
    axes.axvspan(low, high, color=NOISE_GREY, zorder=0, label=text)


def svg(figure: Figure) -> str:
    """The figure as SVG text: no date, fixed identifiers, white background."""
    buffer = io.StringIO()
    with mpl.rc_context(RC):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
    return buffer.getvalue()
