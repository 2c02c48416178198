"""`qsa run`: one chapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    notebook: Annotated[str, typer.Argument(help="Chapter (error) or path of a notebook.")],
    profile: Annotated[str, typer.Option(help="Name of a profile, or path of a YAML file.")] = "cpu",
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one parameter; repeatable.")
    ] = None,
) -> None:
    """Run one notebook under a profile, store the run and publish its page.

    A chapter of the book replaces its page in book/results/; another notebook stays in its run folder.
    """
    from qsa_kernels.report import repository, runs

    job = runs.plan(notebook, profile, assignments or [])
    made = runs.execute(job)
    typer.echo(f"stored {made.folder}")
    if job.path.parent == repository.root() / "notebooks":
        typer.echo(f"published {runs.publish(made)}")


def job(
    file: Annotated[Path, typer.Argument(help="A job that `qsa report` or `qsa batch` wrote.")],
    page: Annotated[Path, typer.Argument(help="File of the page to publish.")],
) -> None:
    """Run one planned job and publish its page; what the workflow calls."""
    from qsa_kernels.report import runs

    planned = runs.Job.model_validate_json(file.read_text(encoding="utf-8"))
    failed = file.with_suffix(".failed")
    failed.unlink(missing_ok=True)
    typer.echo(f"{planned.name}: started", err=True)
    try:
        made = runs.execute(planned)
    except runs.RunError as error:
        failed.write_text(str(error).splitlines()[0], encoding="utf-8")
        raise
    runs.publish(made, page)
    typer.echo(f"{planned.name}: done in {made.manifest.wall_time_s:.0f} s, run {made.manifest.run_id}", err=True)
