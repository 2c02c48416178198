"""Errors of the arms, where they come from, and how they stand beside the public figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch

import qsa_kernels
from qsa_kernels import e4m3
from qsa_kernels.arms import ARMS, Arm
from qsa_kernels.launch import LaunchConfig, choose
from qsa_kernels.measure import precision, smollm2, workloads
from qsa_kernels.measure.workloads import AttentionInputs, QuantisedPair
from qsa_kernels.reference import reference_attention

REFERENCES = {"fp64": torch.float64, "fp32": torch.float32}
METRICS = ("max_abs", "mean_abs", "rms_relative", "cosine_distance")
RMS_MULTIPLE = 2.0  # of the error of an independent implementation with the same casts
MAX_MULTIPLE = 3.0  # a maximum over a few thousand elements scatters more than a mean

FP16_MAX = torch.finfo(torch.float16).max
CHANNEL_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # and all of them
HISTOGRAM_BINS = 61
HISTOGRAM_REACH = 1.5e-3  # of the RMS of the reference, to either side

REPORTED = Path(__file__).resolve().parents[3] / "data" / "reported" / "error.csv"

Operator = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Result:
    """What one arm made of one call.

    Args:
        inputs (AttentionInputs): the call, on the cache that the arm reads.
        arm (Arm): which arm.
        mode (str): "single" or "split".
        launch (LaunchConfig): tile width and split count.
        output (torch.Tensor | None): [rows, q_heads, head_dim]; None where the arm cannot run.
        references (dict[str, torch.Tensor]): by name, on the decoded cache of `inputs`.
        peer (torch.Tensor): an independent implementation with the arm's casts.
        reason (str): why there is no output.
    """

    inputs: AttentionInputs
    arm: Arm
    mode: str
    launch: LaunchConfig
    output: torch.Tensor | None
    references: dict[str, torch.Tensor]
    peer: torch.Tensor
    reason: str = ""


def random_cases(*, rows: int, q_heads: int, head_dim: int, topk: int, seed: int) -> list[QuantisedPair]:
    """The shapes of the public tests and this project's own: all codes, random pages, padding and duplicates.

    Args:
        rows (int): query rows.
        q_heads (int): query heads on one KV head.
        head_dim (int): elements of a head.
        topk (int): of the long case; it lies on one page of topk + 1 tokens.
        seed (int): of the draws.
    """
    return [
        *workloads.published_shapes(topks=[10, 33], rows=rows, q_heads=q_heads, head_dim=head_dim, seed=seed),
        long_case(rows=rows, q_heads=q_heads, head_dim=head_dim, topk=topk, seed=seed),
        workloads.all_codes(rows=rows, q_heads=q_heads, head_dim=head_dim, seed=seed),
        workloads.random_pages(rows=3, seed=seed),
        workloads.padded_and_duplicates(q_heads=q_heads, head_dim=head_dim, seed=seed),
    ]


def long_case(*, rows: int, q_heads: int, head_dim: int, topk: int, seed: int) -> QuantisedPair:
    """One page of topk + 1 tokens; the published long shape where topk is 2051.

    Args:
        rows (int): query rows.
        q_heads (int): query heads on one KV head.
        head_dim (int): elements of a head.
        topk (int): tokens a row.
        seed (int): of the draws.
    """
    if topk == 2051:
        return workloads.published_shapes(topks=[topk], rows=rows, q_heads=q_heads, head_dim=head_dim, seed=seed)[0]
    return workloads.one_request(
        topk, pages=1, page_size=topk + 1, rows=rows, q_heads=q_heads, head_dim=head_dim, seed=seed
    )


def captured_cases(captures: Iterable[smollm2.LayerCapture], *, rows: int, topk: int) -> list[QuantisedPair]:
    """Decode-like rows over a real model's keys and values, one case a layer.

    The rows lie evenly over the second half of the text. Each lists the `topk` earlier tokens with the largest exact
    attention, averaged over the heads: an indexer that makes no mistake. Scales cover the layer's K and V.

    Args:
        captures (Iterable[LayerCapture]): layers of one text.
        rows (int): query rows.
        topk (int): tokens a row.

    Raises:
        ValueError: half the text is shorter than `topk` or `rows`.
    """
    cases = []
    for capture in captures:
        tokens, q_heads, head_dim = capture.q.shape
        if tokens // 2 < max(topk, rows):
            raise ValueError(
                f"tokens: expected at least {2 * max(topk, rows)} for topk {topk}, rows {rows}, got {tokens}"
            )
        position = torch.linspace(tokens // 2, tokens - 1, rows).long()
        q = capture.q[position]
        group = q_heads // capture.k.shape[1]
        keys = capture.k.float().repeat_interleave(group, 1)
        scores = torch.einsum("rhd,thd->rht", q.float(), keys) / math.sqrt(head_dim)
        scores.masked_fill_((torch.arange(tokens) > position[:, None])[:, None], -math.inf)
        listed = scores.softmax(-1).mean(1).topk(topk).indices.int()
        cases.append(workloads.from_tokens(f"layer {capture.layer}", q, capture.k, capture.v, listed))
    return cases


def pick_layers(cases: Sequence[QuantisedPair], layers: Sequence[int]) -> list[QuantisedPair]:
    """The captured cases of some layers.

    Args:
        cases (Sequence[QuantisedPair]): from `captured_cases`.
        layers (Sequence[int]): 0-based numbers.

    Raises:
        ValueError: a layer that was not captured.
    """
    by_name = {case.name: case for case in cases}
    missing = [layer for layer in layers if f"layer {layer}" not in by_name]
    if missing:
        raise ValueError(f"layers: expected numbers among the {len(cases)} captured layers, got {missing}")
    return [by_name[f"layer {layer}"] for layer in layers]


def run(
    pairs: Iterable[QuantisedPair],
    *,
    arms: Sequence[str] = tuple(ARMS),
    splits: int = 64,
    operator: Operator | None = None,
) -> list[Result]:
    """Call every arm on every case with one split and with several, into outputs that hold NaN before.

    Args:
        pairs (Iterable[QuantisedPair]): the cases.
        arms (Sequence[str]): names in `ARMS`.
        splits (int): most parts of a row in mode "split"; a row of fewer tiles gets one part more than it has tiles.
        operator (Operator | None): what to call; None = `sparse_paged_attention`.

    Raises:
        ValueError: an unknown arm, or a shape that the operator refuses.
    """
    unknown = [name for name in arms if name not in ARMS]
    if unknown:
        raise ValueError(f"arms: expected names among {', '.join(ARMS)}; got {unknown}")
    results = []
    for pair in pairs:
        twins = {
            inputs.kv_cache_dtype: (
                inputs,
                precision.select(inputs),
                {name: reference_attention(**inputs.arguments(), dtype=dtype) for name, dtype in REFERENCES.items()},
            )
            for inputs in (pair.unquantised, pair.quantised)
        }
        for name in arms:
            arm = ARMS[name]
            inputs, selected, references = twins[arm.kv_cache_dtype]
            peer = precision.same_precision(selected, arm)
            for mode, launch in _launches(inputs, arm, splits).items():
                output, reason = _call(operator, inputs, arm, launch)
                results.append(
                    Result(
                        inputs=inputs,
                        arm=arm,
                        mode=mode,
                        launch=launch,
                        output=output,
                        references=references,
                        peer=peer,
                        reason=reason,
                    )
                )
    return results


def cells(results: Iterable[Result]) -> pd.DataFrame:
    """One row for each result and reference: the errors, those of the independent implementation, budgets and verdict.

    Args:
        results (Iterable[Result]): from `run`.
    """
    records = []
    for result in results:
        rows, q_heads, head_dim = result.inputs.q.shape
        for name, reference in result.references.items():
            errors = dict.fromkeys(METRICS, math.nan)
            peer = measure(result.peer, reference)
            status, reason = "skipped", result.reason
            if result.output is not None:
                errors = measure(result.output, reference)
                status, reason = gate(errors, peer)
            records.append(
                {
                    "case": result.inputs.name,
                    "rows": rows,
                    "q_heads": q_heads,
                    "kv_heads": result.inputs.k_cache.shape[2],
                    "head_dim": head_dim,
                    "topk": result.inputs.topk,
                    "arm": result.arm.name,
                    "mode": result.mode,
                    "num_splits": result.launch.num_splits,
                    "block_n": result.launch.block_n,
                    "reference": name,
                    **errors,
                    "peer_max_abs": peer["max_abs"],
                    "peer_rms_relative": peer["rms_relative"],
                    "budget_max_abs": MAX_MULTIPLE * peer["max_abs"],
                    "budget_rms_relative": RMS_MULTIPLE * peer["rms_relative"],
                    "status": status,
                    "reason": reason,
                }
            )
    return pd.DataFrame(records)


def summary(cell_table: pd.DataFrame, real_cell_table: pd.DataFrame, *, long: str) -> pd.DataFrame:
    """One row an arm: verdicts over all cells, and its errors in split mode.

    Args:
        cell_table (pd.DataFrame): from `cells`, random cases.
        real_cell_table (pd.DataFrame): from `cells`, captured cases.
        long (str): the long random case.
    """
    records = []
    for arm in dict.fromkeys(cell_table["arm"]):
        random, real = (table[table["arm"] == arm] for table in (cell_table, real_cell_table))
        verdicts, reasons = (pd.concat([random[name], real[name]], ignore_index=True) for name in ("status", "reason"))
        split = [table[(table["mode"] == "split") & (table["reference"] == "fp64")] for table in (random, real)]
        on_long = random[(random["case"] == long) & (random["mode"] == "split") & (random["reference"] == "fp32")]
        status = next((word for word in ("failed", "passed") if (verdicts == word).any()), "skipped")
        records.append(
            {
                "arm": arm,
                **{f"cells_{word}": int((verdicts == word).sum()) for word in ("passed", "failed", "skipped")},
                "max_abs_long_fp32": on_long["max_abs"].iloc[0],
                "rms_relative_random_median": split[0]["rms_relative"].dropna().median(),
                "rms_relative_real_median": split[1]["rms_relative"].dropna().median(),
                "status": status,
                "reason": reasons[verdicts == status].iloc[0],
            }
        )
    return pd.DataFrame(records)


def measure(output: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Distances of an output from a reference, in FP64; all NaN where the output is not finite.

    `rms_relative` is |output - reference|_2 / |reference|_2 and `cosine_distance` 1 - cosine, both over all elements,
    so a zero output is at distance 1 however small the reference is.

    Args:
        output (torch.Tensor): any shape and floating dtype.
        reference (torch.Tensor): the same shape, finite.

    Raises:
        ValueError: another shape, or a reference that is not finite.
    """
    if output.shape != reference.shape:
        raise ValueError(f"output: expected shape {list(reference.shape)}, got {list(output.shape)}")
    expected, got = reference.double().flatten(), output.to(reference.device).double().flatten()
    if not expected.isfinite().all():
        raise ValueError("reference: expected finite values only")
    if not got.isfinite().all():
        return dict.fromkeys(METRICS, math.nan)
    difference = got - expected
    size, got_size = float(expected.norm()), float(got.norm())
    distance = float(difference.norm())
    if size == 0.0:
        relative = cosine = 0.0 if distance == 0.0 else math.inf
    else:
        relative = distance / size
        # 1 - cosine without the cancellation of the textbook form
        cosine = 0.5 * float((got / got_size - expected / size).square().sum()) if got_size else 1.0
    return {
        "max_abs": float(difference.abs().max()) if difference.numel() else 0.0,
        "mean_abs": float(difference.abs().mean()) if difference.numel() else 0.0,
        "rms_relative": relative,
        "cosine_distance": cosine,
    }


def gate(errors: dict[str, float], peer: dict[str, float]) -> tuple[str, str]:
    """Verdict on an arm: its errors stay within a small multiple of those of an independent implementation.

    Args:
        errors (dict[str, float]): of the arm, from `measure`.
        peer (dict[str, float]): of the independent implementation with the same casts, against the same reference.

    Returns:
        tuple[str, str]: "passed" or "failed", and the reason for a failure.
    """
    if math.isnan(errors["rms_relative"]):
        return "failed", "the output holds values that are not finite"
    for metric, multiple in (("rms_relative", RMS_MULTIPLE), ("max_abs", MAX_MULTIPLE)):
        if errors[metric] > multiple * peer[metric]:
            return "failed", (
                f"{metric} {errors[metric]:.3g} exceeds {multiple:g} times the {peer[metric]:.3g} "
                "of an independent implementation with the same casts"
            )
    return "passed", ""


def histograms(results: Iterable[Result], *, case: str) -> pd.DataFrame:
    """Distribution of the signed errors against FP64, relative to the RMS of the reference.

    The distribution of output rounding alone stands beside those of the arms.

    Args:
        results (Iterable[Result]): from `run`.
        case (str): which case.
    """
    edges = torch.linspace(-HISTOGRAM_REACH, HISTOGRAM_REACH, HISTOGRAM_BINS + 1, dtype=torch.float64)
    records = []

    def add(arm: str, mode: str, output: torch.Tensor | None, reference: torch.Tensor, reason: str) -> None:
        if output is None or not output.isfinite().all():
            status, counts = ("skipped" if output is None else "failed"), torch.full((HISTOGRAM_BINS,), math.nan)
        else:
            error = (output.double() - reference) / reference.square().mean().sqrt()
            inside = error.clamp(edges[0], edges[-1])  # the outer bins hold what lies beyond them
            status, counts = "passed", torch.histogram(inside.flatten().cpu(), edges)[0]
        for low, high, number in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True):
            records.append(
                {
                    "case": case,
                    "arm": arm,
                    "mode": mode,
                    "low_of_rms": low,
                    "high_of_rms": high,
                    "elements": number,
                    "status": status,
                    "reason": reason
                    if output is None
                    else ("" if status == "passed" else "values that are not finite"),
                }
            )

    for result in results:
        if result.inputs.name == case:
            reference = result.references["fp64"]
            add(result.arm.name, result.mode, result.output, reference, result.reason)
            if result.arm.name == "hoisted/bitcast" and result.mode == "single":
                add("output rounding alone", "none", reference.to(result.inputs.q.dtype), reference, "")
    return pd.DataFrame(records)


def sources(pairs: Iterable[QuantisedPair]) -> pd.DataFrame:
    """The error that each rounding causes alone, everything else in FP64: those of the cache and those of a kernel.

    Args:
        pairs (Iterable[QuantisedPair]): the cases.
    """
    records = []
    for pair in pairs:
        coded, original = precision.select(pair.quantised), precision.select(pair.unquantised)
        k, v = coded.k * coded.k_scale, coded.v * coded.v_scale
        exact = precision.attend(original)
        compared = {
            "cache K": (precision.attend(replace(original, k=k)), exact),
            "cache V": (precision.attend(replace(original, v=v)), exact),
            "cache K and V": (precision.attend(replace(original, k=k, v=v)), exact),
        }
        for placement in ("in_loop", "hoisted"):
            hoisted = placement == "hoisted"
            decoded = precision.attend(coded, hoisted=hoisted)
            for cast in ("k", "v"):
                rounded = precision.attend(coded, casts=[cast], hoisted=hoisted)
                compared[f"{cast.upper()} cast, {placement}"] = rounded, decoded
        decoded = precision.attend(coded)
        compared["probability cast"] = precision.attend(coded, casts=["p"]), decoded
        compared["output cast"] = precision.attend(coded, casts=["output"]), decoded
        for source, (output, reference) in compared.items():
            records.append(
                {
                    "case": pair.name,
                    "part": "cache" if source.startswith("cache") else "kernel",
                    "source": source,
                    **measure(output, reference),
                    "status": "passed",
                    "reason": "",
                }
            )
    return pd.DataFrame(records)


def ranges(pairs: Iterable[QuantisedPair]) -> pd.DataFrame:
    """How far the raw product of q and K reaches before and after hoisting, beside the largest FP16 number.

    Args:
        pairs (Iterable[QuantisedPair]): the cases.
    """
    records = []
    for pair in pairs:
        selected = precision.select(pair.quantised)
        hoisted, in_loop = (float(precision.raw_dot(selected, hoisted=flag).abs().max()) for flag in (True, False))
        # Cauchy and Schwarz would be tighter for given keys; this is what the format allows for these queries.
        reachable = e4m3.MAX_FINITE * float(selected.q.double().abs().sum(-1).max())
        records.append(
            {
                "case": pair.name,
                "k_scale": pair.quantised.k_scale,
                "raw_dot_in_loop_max_abs": in_loop,
                "raw_dot_hoisted_max_abs": hoisted,
                "raw_dot_hoisted_reachable": reachable,
                "fp16_max": FP16_MAX,
                "exceeds_fp16": hoisted > FP16_MAX,
                "status": "passed",
                "reason": "",
            }
        )
    return pd.DataFrame(records)


def overflow_case() -> AttentionInputs:
    """Two tokens whose raw products, 114,688 and 106,496, both exceed FP16; their scaled scores differ by 0.512.

    V is 1 for the first token and 0 for the second, so the output is the first token's weight.

    Source:
        The raw dot of the public regression test (`test_qsa_e4m3.py`); the second token is this project's.
    """
    k_cache = torch.zeros(1, 2, 1, 256, dtype=torch.uint8)
    k_cache[0, 0], k_cache[0, 1] = 0x7E, 0x7D
    v_cache = torch.zeros_like(k_cache)
    v_cache[0, 0] = 0x38
    return AttentionInputs(
        name="raw-dot-114688",
        q=torch.ones(1, 6, 256, dtype=torch.float16),
        k_cache=k_cache,
        v_cache=v_cache,
        logical_indices=torch.tensor([[0, 1]], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        token_to_req=torch.zeros(1, dtype=torch.int32),
        kv_cache_dtype="fp8_e4m3",
        k_scale=1e-3,
        v_scale=1.0,
    )


def overflow_raw_products() -> tuple[float, float]:
    """The two raw products of `overflow_case`."""
    first, second = precision.raw_dot(precision.select(overflow_case()), hoisted=True)[0, 0].tolist()
    return first, second


def overflow(
    *,
    arms: Sequence[str] = tuple(ARMS),
    splits: int = 64,
    device: torch.device | str = "cpu",
    operator: Operator | None = None,
) -> pd.DataFrame:
    """What the quantised arms, and two ways of doing it wrong, make of raw products beyond FP16.

    Args:
        arms (Sequence[str]): names in `ARMS`; arms without codes are left out.
        splits (int): as for `run`.
        device (torch.device | str): where the kernels run; the controls are computed there too.
        operator (Operator | None): what to call; None = `sparse_paged_attention`.
    """
    inputs = overflow_case().to(device)
    raw = precision.raw_dot(precision.select(inputs), hoisted=True)
    factor = inputs.k_scale / math.sqrt(inputs.q.shape[-1])
    exact = float((raw * factor).softmax(-1)[0, 0, 0])
    resolution = torch.finfo(inputs.q.dtype).eps / 2  # of the output, relative
    records = []

    def add(route: str, mode: str, output: float | None, expected: float, reason: str) -> None:
        agrees = output is not None and (
            math.isnan(output)
            if math.isnan(expected)
            else abs(output - expected) <= RMS_MULTIPLE * resolution * expected
        )
        status = "skipped" if output is None else "passed" if agrees else "failed"
        records.append(
            {
                "route": route,
                "mode": mode,
                "raw_dot_max": float(raw.max()),
                "fp16_max": FP16_MAX,
                "output": math.nan if output is None else output,
                "expected": expected,
                "status": status,
                "reason": reason or ("" if status != "failed" else "not the expected weight"),
            }
        )

    for name in arms:
        if ARMS[name].is_quantised:
            for mode, launch in _launches(inputs, ARMS[name], splits).items():
                output, reason = _call(operator, inputs, ARMS[name], launch)
                add(name, mode, None if output is None else float(output[0, 0, 0]), exact, reason)
    held = raw.to(torch.float16).double()
    add("control: products held in FP16", "none", float((held * factor).softmax(-1)[0, 0, 0]), math.nan, "inf - inf")
    clamped = raw.clamp(-FP16_MAX, FP16_MAX)
    add(
        "control: products clamped to FP16",
        "none",
        float((clamped * factor).softmax(-1)[0, 0, 0]),
        0.5,
        "both products clamp to the same number",
    )
    return pd.DataFrame(records)


def seed_spread(*, seeds: Iterable[int], rows: int, q_heads: int, head_dim: int, topk: int) -> pd.DataFrame:
    """Largest error of the long case over several draws, by the independent implementation of each scale placement.

    Args:
        seeds (Iterable[int]): draws.
        rows (int): query rows.
        q_heads (int): query heads on one KV head.
        head_dim (int): elements of a head.
        topk (int): tokens a row.
    """
    records = []
    for seed in seeds:
        pair = long_case(rows=rows, q_heads=q_heads, head_dim=head_dim, topk=topk, seed=seed)
        selected = precision.select(pair.quantised)
        reference = reference_attention(**pair.quantised.arguments(), dtype=torch.float32)
        for arm in ("in_loop/bitcast", "hoisted/bitcast"):
            errors = measure(precision.same_precision(selected, ARMS[arm]), reference)
            records.append(
                {
                    "seed": seed,
                    "arm": arm,
                    "reference": "fp32",
                    "max_abs": errors["max_abs"],
                    "rms_relative": errors["rms_relative"],
                    "status": "passed",
                    "reason": "",
                }
            )
    return pd.DataFrame(records)


def channels(pairs: Iterable[QuantisedPair]) -> pd.DataFrame:
    """How few channels of K carry its range and the score error that its codes cause.

    A channel is one element of one KV head. The error of a score is a sum over channels of q * (K error); channels are
    ranked by the mean square of their term.

    Args:
        pairs (Iterable[QuantisedPair]): the cases.
    """
    records = []
    for pair in pairs:
        coded, original = precision.select(pair.quantised), precision.select(pair.unquantised)
        error = coded.k * coded.k_scale - original.k
        q_square = original.q.double().square().sum(2)  # [rows, kv_heads, head_dim]
        term = (q_square[:, None] * error.square()).sum((0, 1)).flatten()
        share = torch.sort(term, descending=True)[0].cumsum(0) / term.sum()
        largest = original.k.abs().amax((0, 1)).flatten()
        tiny = (coded.k.abs() < 2.0**-6) & coded.valid[..., None, None]
        for count in sorted({*(n for n in CHANNEL_COUNTS if n < len(share)), len(share)}):
            records.append(
                {
                    "case": pair.name,
                    "channels": len(share),
                    "largest_channels": count,
                    "score_error_share": float(share[count - 1]),
                    "k_max_over_median_channel": float(largest.max() / largest.median()),
                    "k_subnormal_share": float(tiny.sum() / (coded.valid.sum() * len(share))),
                    "status": "passed",
                    "reason": "",
                }
            )
    return pd.DataFrame(records)


def reported(file: Path = REPORTED) -> pd.DataFrame:
    """The public error figures, each with its source, by id.

    Args:
        file (Path): CSV with the columns id, quantity, value, unit, kind, setting, source_url, note.
    """
    return pd.read_csv(file, keep_default_na=False, dtype={"value": float}, float_precision="round_trip").set_index(
        "id"
    )


def beside_reported(cell_table: pd.DataFrame, source_table: pd.DataFrame, figures: pd.DataFrame) -> pd.DataFrame:
    """Each public error figure beside what was measured here, with what differs between the two.

    Args:
        cell_table (pd.DataFrame): from `cells`.
        source_table (pd.DataFrame): from `sources`, random and captured cases.
        figures (pd.DataFrame): from `reported`.
    """
    records = []

    def add(key: str, subject: str, measured: float, differs: str, reason: str = "") -> None:
        figure = figures.loc[key]
        records.append(
            {
                "quantity": figure["quantity"],
                "setting": figure["setting"],
                "reported": float(figure["value"]),
                "measured_on": subject,
                "measured": measured,
                "measured_over_reported": measured / float(figure["value"]),
                "what_differs": differs,
                "kind": figure["kind"],
                "source_url": figure["source_url"],
                "status": "skipped" if reason else "passed",
                "reason": reason,
            }
        )

    published = cell_table[
        (cell_table[["case", "rows", "q_heads", "head_dim"]] == ["published-topk2051", 3, 6, 256]).all(axis=1)
        & (cell_table["mode"] == "split")
        & (cell_table["reference"] == "fp32")
        & (cell_table["status"] == "passed")
        & cell_table["arm"].map(lambda name: ARMS[name].is_quantised)
    ]
    differs = "drawn tensors and selection (theirs are not public); device; split count and order of the sums"
    for arm, largest in zip(published["arm"], published["max_abs"], strict=True):
        other = "" if arm == "hoisted/bitcast" else "arm (theirs is hoisted/bitcast); "
        add("long_split_max_abs", arm, largest, other + differs)
    if published.empty:
        add(
            "long_split_max_abs",
            "the long case",
            math.nan,
            "shape",
            "needs the published shape: 3 rows, 6 query heads, head dim 256, topk 2051",
        )
    for key in ("mixed_route_max_abs", "mixed_route_mean_abs"):
        add(key, "nothing", math.nan, "route", "grouped Flash-V100 and XQA kernels are not part of this operator")

    cache = source_table[source_table["source"] == "cache K and V"]
    captured = cache["case"].str.startswith("layer ")
    for subject, rows in (
        ("random long case", cache[cache["case"].str.endswith("2051")]),
        ("real layers, median", cache[captured]),
    ):
        if not rows.empty:
            differs = "model and text" if subject.startswith("real") else "random tensors instead of a model's"
            add(
                "quality_relative_l2",
                subject,
                float(rows["rms_relative"].median()),
                f"{differs}; context length; scales",
            )
            add(
                "quality_cosine",
                subject,
                1.0 - float(rows["cosine_distance"].median()),
                f"{differs}; context length; scales",
            )
    return pd.DataFrame(records)


def headline(
    cell_table: pd.DataFrame, real_cell_table: pd.DataFrame, source_table: pd.DataFrame, *, long: str
) -> dict[str, float]:
    """The figures that other pages quote, by their key.

    Args:
        cell_table (pd.DataFrame): from `cells`, random cases.
        real_cell_table (pd.DataFrame): from `cells`, captured cases.
        source_table (pd.DataFrame): from `sources`, both.
        long (str): the long random case.
    """

    def rms(table: pd.DataFrame) -> pd.DataFrame:
        chosen = table[(table["reference"] == "fp64") & (table["mode"] == "split")]
        return chosen.pivot_table(index="case", columns="arm", values="rms_relative")

    def gain(table: pd.DataFrame) -> float:
        by_arm = rms(table)
        return math.exp((by_arm["in_loop/bitcast"] / by_arm["hoisted/bitcast"]).map(math.log).mean())

    against_fp32 = cell_table[
        (cell_table["case"] == long)
        & (cell_table["arm"] == "hoisted/bitcast")
        & (cell_table["mode"] == "split")
        & (cell_table["reference"] == "fp32")
    ]
    alone = source_table.pivot_table(index="case", columns="source", values="rms_relative")
    real = alone[alone.index.str.startswith("layer ")].median()
    random = alone.loc[long]
    kernel = float(rms(cell_table)["hoisted/bitcast"][long])
    tested = pd.concat([cell_table, real_cell_table])
    return {
        "error_max_abs_long_split": float(against_fp32["max_abs"].iloc[0]),
        "error_rms_long_split": kernel,
        "error_rms_ratio_in_loop_to_hoisted": gain(cell_table),
        "error_rms_ratio_in_loop_to_hoisted_real": gain(real_cell_table),
        "error_quantisation_rms": float(random["cache K and V"]),
        "error_quantisation_rms_real": float(real["cache K and V"]),
        "error_quantisation_over_kernel": float(random["cache K and V"]) / kernel,
        **{
            f"error_{key}_rms{suffix}": float(values[source])
            for key, source in (
                ("cache_k", "cache K"),
                ("cache_v", "cache V"),
                ("cast_k", "K cast, in_loop"),
                ("cast_v", "V cast, in_loop"),
                ("cast_output", "output cast"),
            )
            for suffix, values in (("", random), ("_real", real))
        },
        "error_rms_over_peer_largest": float((tested["rms_relative"] / tested["peer_rms_relative"]).max()),
        "error_max_over_peer_largest": float((tested["max_abs"] / tested["peer_max_abs"]).max()),
    }


def _call(
    operator: Operator | None, inputs: AttentionInputs, arm: Arm, launch: LaunchConfig
) -> tuple[torch.Tensor | None, str]:
    reason = _unavailable(arm, inputs.q.device)
    if reason:
        return None, reason
    out = torch.full_like(inputs.q, math.nan)
    try:
        call = operator or qsa_kernels.sparse_paged_attention  # Triton is imported here, after its setting is chosen
        call(**{**inputs.arguments(), **arm.options(), "launch_profile": launch, "out": out})
    except NotImplementedError as error:
        return None, str(error) or "not implemented"
    return out, ""


def _unavailable(arm: Arm, device: torch.device) -> str:
    if arm.decoder != "native":
        return ""
    if device.type != "cuda":
        return "the hardware conversion needs a GPU of compute capability 8.9 or above; this runs interpreted on a CPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"the hardware conversion needs compute capability 8.9 or above; this GPU has {major}.{minor}"
    return ""


def _launches(inputs: AttentionInputs, arm: Arm, splits: int) -> dict[str, LaunchConfig]:
    """One launch with a single split and one with several, by mode.

    On a GPU the launch profile decides the tile. Interpreted, the split launch has the public tile of 16 tokens (for up
    to 31 programs) and the single one the public 64 for long rows. The register contraction there has wide tiles of
    many warps instead of 8 tokens and one warp, because the interpreter's time goes by the steps of a tile.
    """
    rows, q_heads, head_dim = inputs.q.shape
    device = inputs.q.device
    launches = {}
    for mode in ("single", "split"):
        config = choose(
            None,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            rows=rows,
            q_heads=q_heads,
            kv_heads=inputs.k_cache.shape[2],
            head_dim=head_dim,
            topk=inputs.topk,
            itemsize=inputs.q.element_size(),
            quantised=arm.is_quantised,
            contraction=arm.contraction,
        )
        if device.type != "cuda":
            is_long = inputs.topk >= 128
            if arm.contraction == "vector":
                config = replace(config, block_n=128 if is_long else 16, num_warps=16)
            else:
                config = replace(config, block_n=64 if is_long and mode == "single" else 16)
        # One part more than there are tiles, which stays empty, but never fewer than two.
        most = max(2, min(splits, -(-inputs.topk // config.block_n) + 1))
        launches[mode] = replace(config, num_splits=1 if mode == "single" else most)
    return launches
