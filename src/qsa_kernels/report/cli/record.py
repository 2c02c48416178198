"""`qsa record`: measure latency on the machine at hand and keep the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer


def record(
    profile: Annotated[str, typer.Option(help="h200 or v100, or the path of a YAML file with a section latency.")],
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Go on with an unfinished run.")] = None,
    cells: Annotated[
        list[str] | None,
        typer.Option(help="Only these: a stage, or a pattern of stage/workload/code_path; repeatable."),
    ] = None,
    budget_s: Annotated[
        float | None, typer.Option(min=1.0, help="Stop between two cells after so many seconds.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of this checkout, where git cannot tell.")] = None,
    assemble: Annotated[
        bool, typer.Option("--assemble", help="Measure nothing: judge the samples of --resume and store the run.")
    ] = False,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="With --assemble: store open cells as not measured.")
    ] = False,
) -> None:
    """Measure latency here, in fresh processes, and store the complete run under data/runs/."""
    from qsa_kernels.report import recording

    if commit is not None and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"--commit: expected 40 hex digits; got {commit!r}")
    if incomplete and not assemble:
        raise ValueError("--incomplete: only together with --assemble")
    if assemble:
        if resume is None:
            raise ValueError("--assemble: needs the unfinished run, --resume RUN_DIR")
        typer.echo(f"stored {recording.assemble(resume, incomplete=incomplete).folder}")
        return
    folder, still_open = recording.record(profile, folder=resume, cells=cells or [], budget_s=budget_s, commit=commit)
    if still_open:
        typer.echo(f"{still_open} cells are still open; go on with --resume {folder}")
        return
    again = f"qsa record --profile {profile} --resume {folder} --assemble"
    if cells:
        typer.echo(f"the wanted cells are measured in {folder}; the rest with --resume {folder}")
        return
    try:
        typer.echo(f"stored {recording.assemble(folder).folder}")
    except ImportError as error:
        typer.echo(f"measured in {folder}; {error.name} is missing here, so store it elsewhere with '{again}'")
