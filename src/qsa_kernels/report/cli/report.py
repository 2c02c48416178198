"""`qsa report`: all chapters, then the book."""

from __future__ import annotations

from typing import Annotated

import typer


def report(
    profile: Annotated[str, typer.Option(help="Name of a profile, or path of a YAML file.")] = "cpu",
    cores: Annotated[
        int | None,
        typer.Option(min=1, help="How many chapters at once.", show_default="processors of this machine"),
    ] = None,
    workflow_profile: Annotated[
        str, typer.Option(help="Where they run: local, slurm, or the folder of a Snakemake profile.")
    ] = "local",
) -> None:
    """Run what has changed of all chapters, then build the book."""
    from qsa_kernels.report import workflow

    typer.echo(f"the report is {workflow.report(profile, cores, workflow_profile)}")
