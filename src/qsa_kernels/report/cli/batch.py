"""`qsa batch`: one notebook, many sets of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def batch(
    sweep: Annotated[Path, typer.Argument(help="YAML file with notebook, profile, grid and sets.")],
    cores: Annotated[
        int | None,
        typer.Option(min=1, help="How many runs at once.", show_default="processors of this machine"),
    ] = None,
    workflow_profile: Annotated[
        str, typer.Option(help="Where they run: local, slurm, or the folder of a Snakemake profile.")
    ] = "local",
) -> None:
    """Run a grid of parameter sets and put their tables together; runs that are done are not repeated."""
    from qsa_kernels.report import batch as batches

    typer.echo(f"the index is {batches.run(sweep, cores, workflow_profile)}")
