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
    process: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Only this fresh process, once the launches are chosen; repeatable."),
    ] = None,
    search_only: Annotated[
        bool, typer.Option("--search-only", help="Choose and compile the launches, measure no cell.")
    ] = False,
    budget_s: Annotated[
        float | None, typer.Option(min=1.0, help="Stop between two cells after so many seconds.")
    ] = None,
    workflow_profile: Annotated[
        str | None, typer.Option(help="Measure on a cluster: slurm, or the folder of a Snakemake profile.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit of this checkout, where git cannot tell.")] = None,
    assemble: Annotated[
        bool, typer.Option("--assemble", help="Measure nothing: judge the samples of --resume and store the run.")
    ] = False,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="With --assemble: store open cells as not measured.")
    ] = False,
) -> None:
    """Measure latency here, in fresh processes, and store the complete run under data/runs/.

    With a workflow profile the processes are jobs on the nodes of a cluster, which share the unfinished run.
    """
    from qsa_kernels.report import recording

    if commit is not None and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"--commit: expected 40 hex digits; got {commit!r}")
    if incomplete and not assemble:
        raise ValueError("--incomplete: only together with --assemble")
    if workflow_profile is not None:
        if cells or process or search_only or budget_s or commit or assemble:
            raise ValueError("--workflow-profile: measures everything; together with --profile and --resume alone")
        from qsa_kernels.report import workflow

        typer.echo(f"stored {workflow.record(profile, workflow_profile, resume).folder}")
        return
    if assemble:
        if resume is None:
            raise ValueError("--assemble: needs the unfinished run, --resume RUN_DIR")
        typer.echo(f"stored {recording.assemble(resume, incomplete=incomplete).folder}")
        return
    if process and search_only:
        raise ValueError("--search-only: chooses the launches of all processes; not together with --process")
    folder, still_open = recording.record(
        profile,
        folder=resume,
        cells=cells or [],
        processes=process or [],
        search_only=search_only,
        budget_s=budget_s,
        commit=commit,
    )
    if search_only:
        typer.echo(f"the launches are chosen in {folder}; measure with --resume {folder}")
        return
    if still_open:
        typer.echo(f"{still_open} cells are still open; go on with --resume {folder}")
        return
    again = f"qsa record --profile {profile} --resume {folder} --assemble"
    if cells or process:
        typer.echo(f"the wanted cells are measured in {folder}; the rest with --resume {folder}")
        return
    try:
        typer.echo(f"stored {recording.assemble(folder).folder}")
    except ImportError as error:
        typer.echo(f"measured in {folder}; {error.name} is missing here, so store it elsewhere with '{again}'")
