"""`qsa codegen`: what the compiler makes of each arm for a named architecture, on any machine."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

COLUMNS = ("arm", "profile", "loop_instructions", "total_instructions", "registers", "spills", "shared_bytes")
PLAIN_WIDTH = 200


def codegen(
    arch: Annotated[str, typer.Option(help="sm_70, sm_75, sm_80 or sm_90.")] = "sm_70",
    arm: Annotated[list[str] | None, typer.Option(help="Arm to compile; repeat for several. Default: all.")] = None,
    profile: Annotated[str | None, typer.Option(help="Launch profile by name, such as sm70_public.")] = None,
    rows: Annotated[int, typer.Option(help="Query rows, by which a profile chooses.")] = 128,
    block_n: Annotated[int | None, typer.Option(help="Columns of a tile.")] = None,
    warps: Annotated[int | None, typer.Option(help="Warps a block.")] = None,
    splits: Annotated[int | None, typer.Option(help="Split count.")] = None,
    stages: Annotated[int | None, typer.Option(help="Pipeline stages, from sm_80 on.")] = None,
    transposed: Annotated[
        bool, typer.Option("--transposed", help="Both products of tl.dot transposed, tokens as rows.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
) -> None:
    """Count instructions, registers, spills and shared memory of the attention kernels."""
    from qsa_kernels.measure import codegen as measure
    from qsa_kernels.report.progress import track

    launch = {"block_n": block_n, "num_warps": warps, "num_splits": splits, "num_stages": stages}
    given = {name: value for name, value in launch.items() if value is not None}
    if transposed:
        given["transposed"] = True
    requests = measure.requests(arch, arm or (), profile=profile, rows=rows, **given)
    found = measure.summary(list(track(measure.compiled(requests), "compiling", total=len(requests))))
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        _print_table(arch, found)
    if any(row["status"] == "failed" for row in found):
        raise typer.Exit(1)


def _print_table(arch: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Warp instructions for {arch}; spills in bytes a thread, shared memory in bytes a block")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("arm", "profile") else "right")
    for row in rows:
        table.add_row(*("-" if row[name] is None else f"{row[name]}" for name in COLUMNS))
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, markup=False)
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(f"{row['arm']}: {row['status']}, {row['reason']}")
