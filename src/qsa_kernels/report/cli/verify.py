"""`qsa verify`: every claim of the public record and of this book, judged on the machine at hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

    from qsa_kernels.report.claims import Judged

_COLOURS = {"holds": "green", "fails": "red", "not measured": "yellow", "quoted": "dim", "agrees": "green"}
_COLOURS |= {"differs": "red", "other device": "yellow", "other parameters": "yellow", "not in both": "yellow"}


def verify(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    against: Annotated[
        str | None, typer.Option(metavar="RUN_ID", help="Set your own run beside this recorded one.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN_ID", help="Your own run for --against; default: the newest other one.")
    ] = None,
) -> None:
    """Judge every claim; exit status 1 when a reproduced or derived one fails, or what it rests on is damaged."""
    from qsa_kernels.report import claims

    if run is not None and against is None:
        raise ValueError("--run: only together with --against, which names the run to compare with")
    if against is not None:
        frame = claims.against(against, run)
        _print_agreement(frame, as_json)
        failed = bool((frame["status"] == "failed").any())
    else:
        judged = claims.evaluate()
        _print_claims(judged, as_json)
        failed = claims.is_failure(judged)
    if failed:
        raise typer.Exit(1)


def _print_claims(judged: list[Judged], as_json: bool) -> None:
    from qsa_kernels.report import claims

    counts = {verdict: sum(one.verdict == verdict for one in judged) for verdict in claims.VERDICTS}
    if as_json:
        _print_json({"counts": counts, "claims": [_record(one) for one in judged]})
        return
    rows = [
        (
            one.claim.id,
            one.claim.statement,
            one.claim.how,
            one.claim.expectation,
            claims.text_of(one.found.value) if one.found else "",
            one.claim.unit,
            one.verdict,
            one.reason,
        )
        for one in judged
    ]
    _print_rows(("claim", "statement", "how", "expected", "found", "unit", "verdict", "why"), rows, 6)
    print(f"{len(judged)} claims: " + ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number))


def _record(one: Judged) -> dict[str, Any]:
    found = one.found
    return {
        **one.claim.model_dump(include={"id", "about", "statement", "source", "how", "compared", "expected", "unit"}),
        "tolerance": one.claim.tolerance if isinstance(one.claim.tolerance, float) else "from the noise",
        "found": None if found is None else found.value,
        "device": found.device if found else "",
        "evidence": found.origin if found else "",
        "rests_on": sorted(one.claim.places()),
        "verdict": one.verdict,
        "reason": one.reason,
    }


def _print_agreement(frame: pd.DataFrame, as_json: bool) -> None:
    counts = frame["agreement"].value_counts().to_dict()
    recorded, own = frame["recorded_run"].iloc[0], frame["own_run"].iloc[0]
    if as_json:
        rows = [
            {str(key): None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
            for row in frame.drop(columns=["recorded_run", "own_run"]).to_dict("records")
        ]
        _print_json({"recorded": recorded, "own": own, "counts": counts, "claims": rows})
        return
    print(f"recorded: {recorded}\nown: {own}")
    columns = ("claim", "recorded", "own", "unit", "difference", "tolerance", "agreement", "reason")
    cells = [
        tuple(f"{value:.3g}" if isinstance(value, float) and not math.isnan(value) else _blank(value) for value in row)
        for row in frame[list(columns)].itertuples(index=False)
    ]
    _print_rows(columns, cells, 6)
    print(f"{len(frame)} claims: " + ", ".join(f"{number} {word}" for word, number in counts.items()))


def _blank(value: object) -> str:
    return "" if isinstance(value, float) else str(value)


def _print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], verdict: int) -> None:
    import sys

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from qsa_kernels.report.cli.capacity import PLAIN_WIDTH

    table = Table(*columns)
    for row in rows:
        cells = [escape(cell) for cell in row]
        cells[verdict] = f"[{_COLOURS[row[verdict]]}]{cells[verdict]}[/]"
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False).print(table)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
