"""`qsa doctor`: what this machine can and cannot run."""

from __future__ import annotations

import typer


def doctor() -> None:
    """Say what this machine can and cannot run, and why; exit status 1 when something needs repair."""
    from rich.console import Console
    from rich.table import Table

    from qsa_kernels.report import doctor as examination

    found = examination.examine()
    table = Table("check", "found", "status", "why")
    colours = {"passed": "green", "skipped": "yellow", "failed": "red"}
    for check, value, status, reason in found.astype(str).to_numpy().tolist():
        table.add_row(check, value, f"[{colours[status]}]{status}[/]", reason)
    Console().print(table)
    if (found["status"] == "failed").any():
        raise typer.Exit(1)
