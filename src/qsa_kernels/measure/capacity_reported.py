"""The published capacity figures, set against the block model of `capacity`.

Where a published set-up fixes the layout, a token count pins the pool down to a whole number of blocks; the residual
is what the closest integer leaves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qsa_kernels.measure.capacity import (
    GIB,
    MIB,
    BlockLayout,
    Deployment,
    fixed_bytes_from_gain,
    topk_workspace_bytes,
)

REPORTED = Path(__file__).resolve().parents[3] / "data" / "reported" / "capacity.csv"
REPEATS = 3

_SETUP = ["pair", "device", "tp", "mtp", "prefix_caching", "max_model_len", "setup_kind"]
_NULLABLE: dict[Hashable, str] = {"tp": "Int64", "mtp": "Int64", "prefix_caching": "boolean", "max_model_len": "Int64"}
_SOURCE = ["source_url"]
# What a reader needs of `validate` and of `compare`, in reading order.
PAIR_COLUMNS = [
    *("pair", "tp", "mtp", "max_model_len", "reported_fp16_tokens", "residual_fp16_tokens", "reported_e4m3_tokens"),
    *("residual_e4m3_tokens", "gain_reported", "gain_limit", "same_pool", "status", "reason", "kind", "source_url"),
]
COUNT_COLUMNS = [
    *("pair", "kv_cache_dtype", "reported_tokens", "model_tokens", "residual_tokens", "blocks", "blocks_per_request"),
    *(
        "tokens_per_block",
        "pool_low_gib",
        "pool_high_gib",
        "reported_pool_gib",
        "status",
        "reason",
        "kind",
        "source_url",
    ),
]
_NAMES = {"16-bit": "fp16", "fp8_e4m3": "e4m3"}


def load(path: Path = REPORTED) -> pd.DataFrame:
    """The published figures, one row a figure, with set-up, source and `kind`.

    Returns:
        DataFrame: pair, device, tp, mtp, prefix_caching, max_model_len (empty where not published), setup_kind
            (`reported`; `inferred`: a field follows from another source or from the fit; `incomplete`; `outside`:
            another engine), quantity, kv_cache_dtype, value, unit, kind, source, source_url, tolerance_tokens,
            note.
    """
    table = pd.read_csv(path, dtype=_NULLABLE | {"tolerance_tokens": "Int64", "value": "float64"})
    text = table.select_dtypes(include="object").columns
    table[text] = table[text].fillna("")
    return table


def deployment_of(figure: pd.Series) -> Deployment:
    """The deployment that the set-up columns of a figure describe.

    Raises:
        ValueError: where set-up columns are empty, naming them.
    """
    missing = [field for field in ("max_model_len", "prefix_caching", "mtp", "tp") if pd.isna(figure[field])]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not published")
    return Deployment(
        tp=int(figure["tp"]),
        mtp=int(figure["mtp"]),
        prefix_caching=bool(figure["prefix_caching"]),
        max_model_len=int(figure["max_model_len"]),
    )


def _figures(table: pd.DataFrame, pair: str, quantity: str) -> pd.DataFrame:
    found = table[(table["pair"] == pair) & (table["quantity"] == quantity)]
    if found.empty:
        raise ValueError(f"pair: expected one of {', '.join(dict.fromkeys(table['pair']))}, got {pair!r}")
    return found


def _same_width(table: pd.DataFrame, dtype: str) -> pd.Series:
    return table["kv_cache_dtype"].eq("fp8_e4m3") == (dtype == "fp8_e4m3")


def _holds(layout: BlockLayout, blocks: int, pool_gib: float) -> bool:
    """Whether a published pool is the budget that gives these blocks, or the blocks themselves, to four decimals."""
    return blocks * layout.block_bytes / GIB - 5e-5 <= pool_gib < (blocks + 1) * layout.block_bytes / GIB


def compare(reported: pd.DataFrame | None = None) -> pd.DataFrame:
    """Sets the model against every published token count, one row a count.

    A layout that is wrong meets an arbitrary count with a chance of about one in `tokens_per_block`.

    Returns:
        DataFrame: set-up columns, kv_cache_dtype, reported_tokens, model_tokens, residual_tokens (model less
            reported), blocks, blocks_per_request, tokens_per_block, pool_low_gib and pool_high_gib (the pools that
            give these blocks), reported_pool_gib, kind, source_url, status (`skipped`: not determined) and
            reason.
    """
    table = load() if reported is None else reported
    rows = []
    for _, figure in table[table["quantity"] == "tokens"].iterrows():
        value = int(figure["value"])
        row = {column: figure[column] for column in [*_SETUP, "kv_cache_dtype"]} | {"reported_tokens": value}
        row |= {"kind": figure["kind"]} | {column: figure[column] for column in _SOURCE}
        rows.append(row)
        if figure["setup_kind"] == "outside":
            row |= {"status": "skipped", "reason": f"outside the model: {figure['note']}"}
            continue
        try:
            deployment = deployment_of(figure)
        except ValueError as error:
            row |= {"status": "skipped", "reason": f"not determined: {error}"}
            continue
        layout = deployment.layout(figure["kv_cache_dtype"])
        blocks = layout.nearest_blocks(value)
        residual = layout.tokens_in_blocks(blocks) - value
        tolerance = 0 if pd.isna(figure["tolerance_tokens"]) else int(figure["tolerance_tokens"])
        pool = table[
            (table["pair"] == figure["pair"])
            & (table["quantity"] == "pool_gib")
            & (table["kv_cache_dtype"] == figure["kv_cache_dtype"])
        ]["value"]
        row |= {
            "model_tokens": value + residual,
            "residual_tokens": residual,
            "blocks": blocks,
            "blocks_per_request": layout.blocks_per_request,
            "tokens_per_block": layout.max_model_len / layout.blocks_per_request,
            "pool_low_gib": blocks * layout.block_bytes / GIB,
            "pool_high_gib": (blocks + 1) * layout.block_bytes / GIB,
            "reported_pool_gib": np.nan if pool.empty else float(pool.iloc[0]),
            "status": "passed",
            "reason": "",
        }
        if abs(residual) > tolerance:
            row |= {"status": "failed", "reason": f"{abs(residual)} tokens off, {tolerance} allowed"}
        elif not pool.empty and not _holds(layout, blocks, float(pool.iloc[0])):
            row |= {"status": "failed", "reason": f"the published pool does not hold {blocks} blocks"}
        elif residual:
            row["reason"] = f"{abs(residual)} tokens off, {tolerance} allowed: {figure['note']}"
    whole = ["model_tokens", "residual_tokens", "blocks", "blocks_per_request"]
    return pd.DataFrame(rows).astype(_NULLABLE | dict.fromkeys(whole, "Int64"))


def validate(reported: pd.DataFrame | None = None) -> pd.DataFrame:
    """The verdict on every published pair, one row a pair.

    Returns:
        DataFrame: set-up columns, reported, model and residual tokens for `fp16` (16-bit) and `e4m3`, gain_reported,
            gain_model, gain_limit, same_pool (one pool size explains both counts), kind, source, source_url, status
            and reason.
    """
    table = load() if reported is None else reported
    counts = compare(table)
    rows = []
    for pair in dict.fromkeys(table["pair"]):
        figures = table[table["pair"] == pair]
        first = figures.iloc[0]
        own = counts[counts["pair"] == pair]
        row: dict[str, Any] = {column: first[column] for column in _SETUP}
        for width, label in _NAMES.items():
            found = own[_same_width(own, width)]
            for quantity in ("reported", "model", "residual"):
                row[f"{quantity}_{label}_tokens"] = pd.NA if found.empty else found.iloc[0][f"{quantity}_tokens"]
        published = figures[figures["quantity"] == "gain"]["value"]
        gain = _ratio(row["reported_e4m3_tokens"], row["reported_fp16_tokens"])
        if first["setup_kind"] == "outside":
            gain = np.nan
        elif own.empty:
            gain = float(published.iloc[0])
        statuses = set(own["status"]) or {"skipped"}
        sources = figures[figures["quantity"].isin(["tokens", "gain"])]
        row |= {
            "gain_reported": gain,
            "gain_model": _ratio(row["model_e4m3_tokens"], row["model_fp16_tokens"]),
            "gain_limit": np.nan,
            "same_pool": pd.NA,
            "kind": "reported",
            "status": next((status for status in ("failed", "skipped") if status in statuses), "passed"),
            "reason": "; ".join(dict.fromkeys(filter(None, own["reason"]))) or "",
        }
        row |= {column: ", ".join(dict.fromkeys(sources[column])) for column in ["source", *_SOURCE]}
        if own.empty:
            row["reason"] = f"not determined: {first['note']}"
        if row["status"] != "skipped":
            row["gain_limit"] = float(deployment_of(first).asymptotic_gain)
            if len(own) == len(_NAMES):
                row["same_pool"] = bool(own["pool_low_gib"].max() < own["pool_high_gib"].min())
        rows.append(row)
    whole = [
        f"{quantity}_{label}_tokens" for quantity in ("reported", "model", "residual") for label in _NAMES.values()
    ]
    return pd.DataFrame(rows).astype(_NULLABLE | dict.fromkeys(whole, "Int64") | {"same_pool": "boolean"})


def _ratio(numerator: Any, denominator: Any) -> float:
    return np.nan if pd.isna(numerator) or pd.isna(denominator) else numerator / denominator


def layout_checks(reported: pd.DataFrame | None = None) -> pd.DataFrame:
    """Sets published sizes of states and blocks, and published block counts, against the model, one row a figure.

    Returns:
        DataFrame: pair, quantity, kv_cache_dtype, unit, reported, model, status, reason, kind, source_url.
    """
    table = load() if reported is None else reported
    counts = compare(table)
    rows = []
    for _, figure in table[table["quantity"].isin(["state_bytes", "block_tokens", "block_bytes", "blocks"])].iterrows():
        deployment = deployment_of(figure)
        layout = deployment.layout(figure["kv_cache_dtype"] or "auto")
        own = counts[(counts["pair"] == figure["pair"]) & (counts["kv_cache_dtype"] == figure["kv_cache_dtype"])]
        model = {
            "state_bytes": deployment.state_bytes,
            "block_tokens": layout.block_tokens,
            "block_bytes": layout.block_bytes,
            "blocks": None if own.empty else own.iloc[0]["blocks"],
        }[figure["quantity"]]
        agrees = model == int(figure["value"])
        rows.append(
            {column: figure[column] for column in ["pair", "quantity", "kv_cache_dtype", "unit"]}
            | {"reported": int(figure["value"]), "model": model}
            | {"status": "passed" if agrees else "failed", "reason": "" if agrees else "the model gives another value"}
            | {column: figure[column] for column in ["kind", *_SOURCE]}
        )
    return pd.DataFrame(rows).astype({"model": "int64"})


def evidence(deployment: Deployment, reported: pd.DataFrame | None = None) -> list[str]:
    """Names of the published pairs with the same TP, MTP and prefix caching; empty where the rule stands alone."""
    table = load() if reported is None else reported
    same = table["max_model_len"].notna() & (table["quantity"] == "tokens")
    for field in ("tp", "mtp", "prefix_caching"):
        same &= (table[field] == getattr(deployment, field)).fillna(False)
    return list(dict.fromkeys(table[same]["pair"]))


def implied_pool(pair: str, reported: pd.DataFrame | None = None) -> tuple[int, int]:
    """The pool sizes in bytes per rank that explain every token count of one pair: from the first up to, not
    including, the second.

    Raises:
        ValueError: for an unknown pair, or one whose counts no single pool size explains.
    """
    table = load() if reported is None else reported
    lows, highs = [], []
    for _, figure in _figures(table, pair, "tokens").iterrows():
        layout = deployment_of(figure).layout(figure["kv_cache_dtype"])
        blocks = layout.nearest_blocks(int(figure["value"]))
        lows.append(blocks * layout.block_bytes)
        highs.append((blocks + 1) * layout.block_bytes)
    if max(lows) >= min(highs):
        raise ValueError(f"pair: no single pool size explains all token counts of {pair}")
    return max(lows), min(highs)


def request_counts(cells: pd.DataFrame, reported: pd.DataFrame | None = None, repeats: int = REPEATS) -> pd.DataFrame:
    """Cells that fit, and scored requests (`repeats` rounds of every request in them), beside the published counts.

    Args:
        cells: from `capacity.feasibility`, with pools named like pairs.
        repeats: scored rounds of a cell.

    Returns:
        DataFrame: pool, kv_cache_dtype, quantity (`cells`, `requests`), model, reported, status (`failed`: the
            published count is another), reason, kind, source_url.
    """
    table = load() if reported is None else reported
    rows = []
    for (pool, dtype), group in cells[cells["fits"]].groupby(["pool", "kv_cache_dtype"], sort=False):
        for quantity, model in {"cells": len(group), "requests": repeats * int(group["concurrency"].sum())}.items():
            found = table[(table["pair"] == pool) & (table["quantity"] == quantity) & _same_width(table, str(dtype))]
            value: Any = pd.NA
            status, reason, address = "skipped", "not published", ""
            for _, figure in found.iterrows():
                value, address = int(figure["value"]), figure["source_url"]
                agrees = value == model
                status = "passed" if agrees else "failed"
                reason = "" if agrees else f"does not follow from the cells; {figure['note']}"
            rows.append(
                {
                    "pool": pool,
                    "kv_cache_dtype": dtype,
                    "quantity": quantity,
                    "model": model,
                    "reported": value,
                    "status": status,
                    "reason": reason,
                    "kind": "derived",
                    "source_url": address,
                }
            )
    return pd.DataFrame(rows).astype({"reported": "Int64"})


def workspace_steps(before: str, after: str, reported: pd.DataFrame | None = None) -> pd.DataFrame:
    """Memory that one shared top-k workspace frees, beside the growth of the pool between two published pairs.

    Returns:
        DataFrame: quantity, low_bytes and high_bytes (equal where exact; for the growth the open interval that the
            token counts allow), low_mib, high_mib and reported_mib (text, to three decimals as published), status,
            reason, kind, source_url.
    """
    table = load() if reported is None else reported
    old, new = implied_pool(before, table), implied_pool(after, table)
    low, high = new[0] - old[1], new[1] - old[0]
    exact = topk_workspace_bytes()
    rows: list[tuple[str, int, int, str, bool, list[str]]] = []
    for name, size in exact.items():
        figure = _figures(table, after, f"workspace_{name}_mib").iloc[0]
        published = f"{figure['value']:.3f}"
        agrees = abs(size / MIB - figure["value"]) <= 5e-4
        rows.append((f"workspace, {name}", size, size, published, agrees, [figure["source_url"]]))
    sources = [address for pair in (before, after) for address in _figures(table, pair, "tokens")["source_url"]]
    inside = low < exact["freed"] < high
    rows.append((f"pool, from {before} to {after}", low, high, "", inside, sources))
    return pd.DataFrame(
        {
            "quantity": quantity,
            "low_bytes": first,
            "high_bytes": last,
            "low_mib": f"{first / MIB:.3f}",
            "high_mib": f"{last / MIB:.3f}",
            "reported_mib": published,
            "status": "passed" if agrees else "failed",
            "reason": "" if agrees else "the published and the derived size contradict each other",
            "kind": "derived",
            "source_url": ", ".join(dict.fromkeys(addresses)),
        }
        for quantity, first, last, published, agrees, addresses in rows
    )


def consistent_lengths(
    pairs: Iterable[str], lengths: range, *, prefix_caching: bool | None = None, reported: pd.DataFrame | None = None
) -> list[int]:
    """Every `max_model_len` in `lengths` at which all token counts of the pairs have an exact whole-block answer.

    Args:
        pairs: names of pairs whose TP degree and MTP depth are published.
        lengths: the lengths to try.
        prefix_caching: the setting to try; None for the published one.
    """
    table = load() if reported is None else reported
    candidates = np.asarray(lengths, dtype=np.int64)
    for pair in pairs:
        for _, figure in _figures(table, pair, "tokens").iterrows():
            aligned = bool(figure["prefix_caching"]) if prefix_caching is None else prefix_caching
            deployment = Deployment(tp=int(figure["tp"]), mtp=int(figure["mtp"]), prefix_caching=aligned)
            layout = deployment.layout(figure["kv_cache_dtype"])
            tokens = int(figure["value"])
            request = -(-candidates // layout.block_tokens) + layout.fixed_blocks
            blocks = -(-tokens * request // candidates)
            candidates = candidates[blocks * candidates // request == tokens]
    return candidates.tolist()


def two_number_model(reported: pd.DataFrame | None = None) -> pd.DataFrame:
    """The constant bytes a token that a simpler model (K/V that halves, plus a constant) would need for each gain.

    Only pairs that one pool explains and that use no draft layer; the indexer's real bytes stand beside the constant.

    Returns:
        DataFrame: pair, gain_reported, kv_bytes_per_token, constant_bytes_per_token, index_bytes_per_token, kind,
            source_url, status, reason.
    """
    table = validate(reported)
    rows = []
    for _, pair in table[table["same_pool"].fillna(False) & (table["mtp"] == 0)].iterrows():
        deployment = deployment_of(pair)
        layout = deployment.layout("auto")
        main = deployment.attention_layers * layout.kv_bytes_per_token
        gain = Fraction(int(pair["reported_e4m3_tokens"]), int(pair["reported_fp16_tokens"]))
        rows.append(
            {
                "pair": pair["pair"],
                "gain_reported": pair["gain_reported"],
                "kv_bytes_per_token": main,
                "constant_bytes_per_token": float(fixed_bytes_from_gain(main, gain)),
                "index_bytes_per_token": deployment.attention_layers * layout.index_bytes_per_token,
                "status": "passed",
                "reason": "",
                "kind": "derived",
                "source_url": pair["source_url"],
            }
        )
    return pd.DataFrame(rows)
