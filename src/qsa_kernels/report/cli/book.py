"""`qsa book`: from published pages to HTML."""

from __future__ import annotations

import typer


def book() -> None:
    """Build the book from the published pages; nothing is executed, and a stale or failed page is an error."""
    from qsa_kernels.report import book as builder

    typer.echo(f"built {builder.build()}")
