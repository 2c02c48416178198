"""`qsa record-quality`: the measures of the quality chapter on a GPU, kept as a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer


def record_quality(
    profile: Annotated[str, typer.Option(help="h200 or v100, or the path of a YAML file.")] = "h200",
    commit: Annotated[str | None, typer.Option(help="Commit of this checkout, where git cannot tell.")] = None,
    assemble: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Measure nothing: store a run that was measured elsewhere.")
    ] = None,
) -> None:
    """Run the model over every kind of cache with the kernels in its forward, and store the run under data/runs/."""
    from qsa_kernels.report import quality_recording

    if commit is not None and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"--commit: expected 40 hex digits; got {commit!r}")
    folder = quality_recording.record(profile, commit=commit) if assemble is None else assemble
    try:
        typer.echo(f"stored {quality_recording.assemble(folder).folder}")
    except ImportError as error:
        again = f"qsa record-quality --assemble {folder}"
        typer.echo(f"measured in {folder}; {error.name} is missing here, so store it elsewhere with '{again}'")
