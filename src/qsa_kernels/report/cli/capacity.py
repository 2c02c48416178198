"""`qsa capacity`: what a K/V pool holds in FP16 and in E4M3, and how the model stands against the public record."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(help="K/V capacity of a deployment in whole blocks.", invoke_without_command=True)

PLAIN_WIDTH = 200


def _gib(text: str) -> Decimal:
    """Decimal keeps a size such as 6.377 exactly as it was typed."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"expected a number of GiB, got {text!r}") from None


PoolGib = Annotated[
    Decimal | None, typer.Option("--pool-gib", parser=_gib, metavar="GIB", help="K/V pool of one rank.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return json.loads(frame.to_json(orient="records", double_precision=15))


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Integral):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, Real) else str(value)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    numeric = [all(row[i] is None or isinstance(row[i], Real) for row in rows) for i in range(len(columns))]
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, markup=False)
    console.print(title)
    console.print(table)
    for note in notes:
        console.print(note)


def _rows(frame: pd.DataFrame, columns: Sequence[str]) -> list[list[Any]]:
    """The chosen columns as rows of plain values, None where a value is missing."""
    import pandas as pd

    return [[None if pd.isna(value) else value for value in row] for row in frame[list(columns)].to_numpy(dtype=object)]


def _reasons(frame: pd.DataFrame, name: str) -> list[str]:
    return [f"{row[0]}: {row[1]}" for row in _rows(frame, [name, "reason"]) if row[1]]


@app.callback()
def plan(
    context: typer.Context,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks: 1, 2 or 4.")] = 4,
    mtp: Annotated[int, typer.Option(help="Draft tokens a step, 0 to 5; above 0 needs --prefix-caching.")] = 0,
    prefix_caching: Annotated[bool, typer.Option("--prefix-caching", help="Prefix caching is on.")] = False,
    max_model_len: Annotated[int, typer.Option(help="Tokens of the longest request.")] = 131_328,
    pool_gib: PoolGib = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="auto, float16, bfloat16 or fp8_e4m3; default: a 16-bit and an E4M3 row.")
    ] = None,
    share_topk_workspace: Annotated[
        bool, typer.Option("--share-topk-workspace", help="Add the memory that one shared top-k workspace frees.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tokens, concurrent requests and gain of one deployment."""
    if context.invoked_subcommand is not None:
        return
    from qsa_kernels.measure import capacity as model
    from qsa_kernels.measure import capacity_reported as record

    if pool_gib is None:
        raise ValueError("pool_gib: missing; give the K/V pool of one rank in GiB with --pool-gib")
    frame = model.plan(
        tp=tp,
        mtp=mtp,
        prefix_caching=prefix_caching,
        max_model_len=max_model_len,
        pool_gib=pool_gib,
        kv_cache_dtype=kv_cache_dtype,
        share_topk_workspace=share_topk_workspace,
    )
    deployment = model.Deployment(tp=tp, mtp=mtp, prefix_caching=prefix_caching, max_model_len=max_model_len)
    checked_by = record.evidence(deployment)
    shortest = deployment.break_even_max_model_len()
    if as_json:
        _print_json({"rows": _records(frame), "checked_by": checked_by, "break_even_max_model_len": shortest})
        return
    columns = ["kv_cache_dtype", "tokens", "requests", "gain", "gain_limit", "blocks", "blocks_per_request"]
    columns += ["block_tokens", "bytes_per_token"]
    notes = _reasons(frame, "kv_cache_dtype")
    if checked_by:
        notes.append(f"Derived. Public figures with this TP, MTP and prefix caching: {', '.join(checked_by)}.")
    else:
        notes.append("Derived from the block rule alone: no public figure has this TP, MTP and prefix caching.")
    notes.append(f"An E4M3 request never takes more bytes than a 16-bit one from max_model_len {shortest:,} on.")
    title = f"K/V capacity: TP{tp}, MTP{mtp}, prefix caching {'on' if prefix_caching else 'off'}, "
    title += f"max_model_len {max_model_len:,}, {int(frame['pool_bytes'].iloc[0]) / model.GIB:.3f} GiB a rank"
    _print_table(title, columns, _rows(frame, columns), notes)


@app.command()
def validate(as_json: Json = False) -> None:
    """Set the model against every public pair; exit status 1 when one does not hold."""
    import pandas as pd

    from qsa_kernels.measure import capacity_reported as record

    frame = record.validate()
    checks = record.layout_checks()
    holds = not (pd.concat([frame["status"], checks["status"]]) == "failed").any()
    if as_json:
        _print_json({"holds": holds, "pairs": _records(frame), "layout": _records(checks)})
    else:
        headings = {
            "pair": "pair",
            "tp": "TP",
            "mtp": "MTP",
            "max_model_len": "max_model_len",
            "reported_fp16_tokens": "16-bit reported",
            "residual_fp16_tokens": "residual",
            "reported_e4m3_tokens": "E4M3 reported",
            "residual_e4m3_tokens": "residual",
            "gain_reported": "gain",
            "gain_limit": "limit",
            "status": "status",
            "source": "source",
        }
        notes = _reasons(frame, "pair")
        notes.append(
            f"{(checks['status'] == 'passed').sum()} of {len(checks)} published sizes of states and blocks agree."
        )
        _print_table(
            "Block model against the public record (tokens; residual = model - reported)",
            list(headings.values()),
            _rows(frame, list(headings)),
            notes,
        )
    raise typer.Exit(0 if holds else 1)


@app.command()
def cells(pool_gib: PoolGib = None, as_json: Json = False) -> None:
    """Which cells of the public benchmark fit: the two public pools, or the pool that --pool-gib gives."""
    from qsa_kernels.measure import capacity as model
    from qsa_kernels.measure import capacity_reported as record

    if pool_gib is None:
        pools = {pair: record.implied_pool(pair)[0] for pair in ("nvfp4", "awq-r6")}
    else:
        pools = {"pool": model.pool_bytes_from_gib(pool_gib)}
    frame = model.feasibility(pools)
    counts = record.request_counts(frame)
    if as_json:
        _print_json({"cells": _records(frame), "counts": _records(counts)})
        return
    for (pool, dtype), group in frame.groupby(["pool", "kv_cache_dtype"], sort=False):
        text = group["blocks_needed"].astype(str).where(group["fits"], group["blocks_needed"].astype(str) + " no")
        grid = group.assign(text=text).pivot_table(
            index="concurrency", columns="context_tokens", values="text", aggfunc="first"
        )
        own = counts[(counts["pool"] == pool) & (counts["kv_cache_dtype"] == dtype)]
        notes = []
        for quantity, derived, published, reason in _rows(own, ["quantity", "model", "reported", "reason"]):
            notes.append(f"{quantity}: {derived}, reported {_cell(published)}{'; ' + reason if reason else ''}")
        _print_table(
            f"{pool}, {dtype}: blocks needed, of {group['blocks_in_pool'].iloc[0]}, for the context and "
            f"{model.OUTPUT_TOKENS} tokens",
            ["concurrency", *(f"{int(context) // 1024}K" for context in grid.columns)],
            [[f"C{concurrency}", *cells] for concurrency, cells in zip(grid.index, grid.to_numpy(), strict=True)],
            notes,
        )


@app.command()
def blocks(as_json: Json = False) -> None:
    """Block sizes for every supported TP degree and MTP depth."""
    from qsa_kernels.measure import capacity as model

    frame = model.block_sizes()
    if as_json:
        _print_json({"blocks": _records(frame)})
        return
    columns = [column for column in frame.columns if column not in ("kind", "status", "reason")]
    _print_table("Smallest multiple of 16 tokens whose page holds one state", columns, _rows(frame, columns))
