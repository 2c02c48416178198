"""What scales do to a real model: error of the attention output, saturation on other texts, where the codes lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from qsa_kernels import e4m3
from qsa_kernels.measure import error, smollm2, workloads
from qsa_kernels.measure.calibration import CalibrationReport, Observer, overlay_bytes, summarize
from qsa_kernels.measure.smollm2 import LayerCapture
from qsa_kernels.scales import E4M3_MAX, KINDS, QWEN4_EXP, Kind, scale_for

REPORTED = Path(__file__).resolve().parents[3] / "data" / "reported" / "scale_pack.csv"

SMALLEST_NORMAL = 2.0**-6  # of E4M3; below it a code has less than its three mantissa bits

Captures = Mapping[str, Sequence[LayerCapture]]
Scales = Mapping[tuple[int, Kind], float]

# What each choice of scales stands for; the first is the contract.
CHOICES: dict[str, str] = {
    "calibrated": "max / 448, the public contract",
    "unit": "1.0 everywhere, the negative control",
    "double": "twice the calibrated scale",
    "half": "half the calibrated scale",
    "p99.9": "p99.9 / 448, percentile scaling",
    "exchanged": "K and V scales exchanged",
}


def published_pack(path: Path = REPORTED) -> pd.DataFrame:
    """What the public record says about its scale pack, and what the code here makes of the same quantity.

    Args:
        path: the table of reported figures.
    """
    table = pd.read_csv(path)
    keys = QWEN4_EXP.names()
    value = table.set_index("quantity")["value"]
    here = {
        "scales": float(len(keys)),
        "smallest scale": scale_for(value["smallest observed maximum"]),
        "largest scale": scale_for(value["largest observed maximum"]),
        "size of the overlay": len(overlay_bytes(dict.fromkeys(keys, 0.5))) / 1000,
    }
    return table.assign(here=table["quantity"].map(here), status="passed", reason="")


def scale_choices(report: CalibrationReport) -> dict[str, dict[tuple[int, Kind], float]]:
    """Scales by layer and kind for each of `CHOICES`.

    Args:
        report: of a calibration, no negative control.
    """
    calibrated = report.scale()
    other: dict[Kind, Kind] = {"k": "v", "v": "k"}
    return {
        "calibrated": calibrated,
        "unit": dict.fromkeys(calibrated, 1.0),
        "double": {pair: 2 * scale for pair, scale in calibrated.items()},
        "half": {pair: scale / 2 for pair, scale in calibrated.items()},
        "p99.9": {(tensor.layer, tensor.kind): scale_for(tensor.p99_9) for tensor in report.tensors},
        "exchanged": {(layer, kind): calibrated[layer, other[kind]] for layer, kind in calibrated},
    }


def capture_texts(names: Iterable[str], *, tokens: int) -> dict[str, list[LayerCapture]]:
    """Queries, keys and values of all layers on the first tokens of some texts of the repository.

    Args:
        names: as in `smollm2.texts()`.
        tokens: of each text.
    """
    return {name: smollm2.capture(smollm2.load_text(name), tokens=tokens) for name in names}


def observe(captures: Captures) -> list[Observer]:
    """One observer a text, as if each text had been its own shard.

    Args:
        captures: by text.
    """
    shards = []
    for layers in captures.values():
        shard = Observer(capture.layer for capture in layers)
        for capture in layers:
            shard.observe(capture.layer, capture.k, capture.v)
        shards.append(shard)
    return shards


def repeatability(names: Sequence[str], *, tokens: int, first: CalibrationReport) -> pd.DataFrame:
    """Calibrate again from new forwards, shards in the opposite order, and compare every scale bit for bit.

    Args:
        names: the calibration texts.
        tokens: of each text.
        first: the calibration to compare with.
    """
    again = summarize(observe(capture_texts(reversed(names), tokens=tokens)), source=first.source).scale()
    rows = [
        {
            "layer": layer,
            "kind": kind,
            "first_scale": scale,
            "second_scale": again[layer, kind],
            "status": "passed" if scale == again[layer, kind] else "failed",
            "reason": "" if scale == again[layer, kind] else "the second calibration gives another scale",
        }
        for (layer, kind), scale in first.scale().items()
    ]
    return pd.DataFrame(rows)


def saturation(captures: Captures, scales: Scales) -> pd.DataFrame:
    """How many codes saturate, a row for each text, layer and kind.

    Args:
        captures: by text of the repository.
        scales: by layer and kind.
    """
    sources = smollm2.texts()
    rows = []
    for name, layers in captures.items():
        for capture in layers:
            for kind, values in _both(capture):
                scale = scales[capture.layer, kind]
                rows.append(
                    {
                        "text": name,
                        "role": sources[name].role,
                        "content": f"{sources[name].language} {sources[name].kind}",
                        "layer": capture.layer,
                        "kind": kind,
                        "codes": values.numel(),
                        "saturated_codes": e4m3.count_clipped(values, scale),
                        "max_over_envelope": float(values.abs().max()) / (E4M3_MAX * scale),
                    }
                )
    return pd.DataFrame(rows).assign(status="passed", reason="")


def saturation_by_text(table: pd.DataFrame) -> pd.DataFrame:
    """Sums of `saturation` over the layers, a row for each text and kind.

    Args:
        table: from `saturation`.
    """
    groups = table.groupby(["text", "role", "content", "kind"], sort=False)
    summed = groups.agg(
        codes=("codes", "sum"),
        saturated_codes=("saturated_codes", "sum"),
        layers_with_saturation=("saturated_codes", lambda counts: int((counts > 0).sum())),
        max_over_envelope=("max_over_envelope", "max"),
    ).reset_index()
    return summed.assign(saturated_ppm=1e6 * summed.saturated_codes / summed.codes, status="passed", reason="")


def attention_error(captures: Captures, choices: Mapping[str, Scales]) -> pd.DataFrame:
    """Distance of the attention output on a quantised cache from that on the cache as captured.

    Full causal attention in FP32; the only difference between the two sides is the cache. A row for each text, layer
    and choice of scales.

    Args:
        captures: by text.
        choices: scales by layer and kind, by the name of the choice.
    """
    rows = []
    for name, layers in captures.items():
        for capture in layers:
            exact = _attend(capture.q, capture.k, capture.v)
            for choice, scales in choices.items():
                quantised = [_stored(values, scales[capture.layer, kind]) for kind, values in _both(capture)]
                distance = error.measure(_attend(capture.q, *quantised), exact)
                rows.append(
                    {
                        "text": name,
                        "layer": capture.layer,
                        "choice": choice,
                        "rms_relative": distance["rms_relative"],
                        "cosine_distance": distance["cosine_distance"],
                        "max_abs": distance["max_abs"],
                    }
                )
    return pd.DataFrame(rows).assign(status="passed", reason="")


def error_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """Error of each choice of scales over the calibrated one, over all layers of a text.

    Args:
        table: from `attention_error`.
    """
    wide = table.pivot_table(index=["text", "layer"], columns="choice", values="rms_relative", sort=False)
    ratios = wide.div(wide["calibrated"], axis=0).reset_index().melt(["text", "layer"], value_name="ratio")
    groups = ratios.groupby(["text", "choice"], sort=False)["ratio"]
    summary = groups.agg(
        geometric_mean_ratio=lambda values: float(np.exp(np.log(values).mean())),
        smallest_ratio="min",
        largest_ratio="max",
        layers_better=lambda values: int((values < 1).sum()),
        layers="count",
    ).reset_index()
    typical = table.groupby(["text", "choice"], sort=False)["rms_relative"].median().rename("median_rms_relative")
    return summary.merge(typical.reset_index(), on=["text", "choice"]).assign(status="passed", reason="")


def overall_ratio(table: pd.DataFrame, choice: str) -> float:
    """Geometric mean, over all layers and texts, of the error of a choice of scales over the calibrated one.

    Args:
        table: from `attention_error`.
        choice: one of `CHOICES`.
    """
    wide = table.pivot_table(index=["text", "layer"], columns="choice", values="rms_relative")
    return float(np.exp(np.log(wide[choice] / wide["calibrated"]).mean()))


def code_use(captures: Captures, choices: Mapping[str, Scales]) -> pd.DataFrame:
    """Where the codes of each choice of scales lie, and the quantisation error of the tensors themselves.

    A row for each text, layer, kind and choice: share of non-zero values below the smallest normal code, where E4M3
    loses mantissa bits, share that saturates, and relative RMS error.

    Args:
        captures: by text.
        choices: scales by layer and kind, by the name of the choice.
    """
    rows = []
    for name, layers in captures.items():
        for capture in layers:
            for kind, values in _both(capture):
                magnitude = values.float().abs()
                nonzero = int((magnitude > 0).sum())
                for choice, scales in choices.items():
                    scale = scales[capture.layer, kind]
                    small = int(((magnitude > 0) & (magnitude / scale < SMALLEST_NORMAL)).sum())
                    rows.append(
                        {
                            "text": name,
                            "layer": capture.layer,
                            "kind": kind,
                            "choice": choice,
                            "share_below_normal": small / nonzero,
                            "share_saturated": e4m3.count_clipped(values, scale) / values.numel(),
                            "rms_relative": error.measure(_stored(values, scale), values.float())["rms_relative"],
                        }
                    )
    return pd.DataFrame(rows).assign(status="passed", reason="")


def kernel_check(capture: LayerCapture, scales: Scales, *, topk: int, arm: str = "hoisted/packed") -> pd.DataFrame:
    """A kernel on the calibrated cache of one layer: it, and not only plain torch, reads these codes rightly.

    The last token attends to the `topk` newest; budgets as in the error chapter.

    Args:
        capture: one layer of one text.
        scales: by layer and kind.
        topk: tokens that the row selects.
        arm: name in `ARMS`.
    """
    tokens = capture.q.shape[0]
    pair = workloads.from_tokens(
        f"layer {capture.layer}",
        capture.q[-1:],
        capture.k,
        capture.v,
        torch.arange(tokens - topk, tokens, dtype=torch.int32)[None],
        k_scale=scales[capture.layer, "k"],
        v_scale=scales[capture.layer, "v"],
    )
    cells = error.cells(error.run([pair], arms=[arm], splits=4))
    columns = ["case", "topk", "arm", "mode", "num_splits", "max_abs", "rms_relative", "budget_max_abs",
               "budget_rms_relative", "status", "reason"]  # fmt: skip
    return cells.loc[cells["reference"] == "fp64", columns].reset_index(drop=True)


def _both(capture: LayerCapture) -> list[tuple[Kind, torch.Tensor]]:
    return list(zip(KINDS, (capture.k, capture.v), strict=True))


def _stored(values: torch.Tensor, scale: float) -> torch.Tensor:
    """What a cache gives back: [tokens, kv_heads, head_dim] float32."""
    return e4m3.decode(e4m3.encode(values, scale)) * scale


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of all tokens in FP32, [q_heads, tokens, head_dim]."""
    # The batch axis matters: without it torch takes a path that is three times slower.
    q, k, v = (tensor.float().transpose(0, 1)[None] for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
