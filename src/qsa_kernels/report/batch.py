"""Run one notebook with many sets of parameters, resume where it stopped, and put the results together."""

from __future__ import annotations

import html
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qsa_kernels.report import cluster, repository, runs, workflow, yamlfile
from qsa_kernels.report.parameters import explain


class Sweep(BaseModel):
    """A batch of runs of one notebook.

    Args:
        notebook: name or path of the template.
        profile: name or path of the profile whose values the sets override.
        grid: values of each parameter; every combination is run.
        sets: single sets of parameters, run besides the grid.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    notebook: str
    profile: str = "cpu"
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    sets: list[dict[str, Any]] = []

    def expand(self) -> list[dict[str, Any]]:
        """All sets of parameters, each once, in the order of the file."""
        names = list(self.grid)
        combinations = itertools.product(*(self.grid[name] for name in names)) if names else ()
        found: list[dict[str, Any]] = []
        for candidate in [*(dict(zip(names, values, strict=True)) for values in combinations), *self.sets]:
            if candidate not in found:
                found.append(candidate)
        return found


def load(path: Path) -> Sweep:
    """Read and check a sweep.

    Raises:
        FileNotFoundError: no such file.
        ValueError: names each unknown, mistyped or missing key; or no parameter set at all.
    """
    content = yamlfile.load(path)
    if not isinstance(content, dict):
        raise ValueError(f"sweep {path}: expected keys and values; got {type(content).__name__}")
    try:
        sweep = Sweep.model_validate(content)
    except ValidationError as error:
        raise ValueError(explain(error, Sweep, f"sweep {path}", "key")) from None
    if not sweep.expand():
        raise ValueError(f"sweep {path}: neither grid nor sets names a parameter set")
    return sweep


def run(path: Path, cores: int | None = None, workflow_profile: str = cluster.LOCAL) -> Path:
    """Run every set of a sweep that is not done yet; returns the index page.

    Args:
        path: the sweep's YAML file; its name names the folder runs/batches/NAME.
        cores: how many runs at once, see `workflow.snakemake`.
        workflow_profile: where they run, see `cluster.place`.

    Raises:
        ValueError: anything in the sweep, profile or template that cannot be; nothing has run then.
        WorkflowError: some runs failed; the index names them, and the tables hold the others.
    """
    sweep = load(path)
    values = sweep.expand()
    where = cluster.place(workflow_profile)
    jobs = [runs.plan(sweep.notebook, sweep.profile, values=chosen, elsewhere=where.is_elsewhere) for chosen in values]
    folder = runs.runs_folder() / "batches" / path.stem
    pages = folder / "pages"
    pages.mkdir(parents=True, exist_ok=True)
    names = [job.digest for job in jobs]
    with workflow.exclusive() as lock:
        workflow.prepare(jobs, folder / "jobs", pages, names)
        failure: workflow.WorkflowError | None = None
        try:
            config = {"jobs": _relative(folder / "jobs"), "pages": _relative(pages)}
            workflow.snakemake(config, lock=lock, where=where, cores=cores)
        except workflow.WorkflowError as error:
            failure = error
        made = {
            name: runs.run_of_page(pages / f"{name}.ipynb") for name in names if (pages / f"{name}.ipynb").is_file()
        }
        index = index_table(names, values, made, folder / "jobs")
        _write(folder / "index.csv", index.to_csv(index=False, lineterminator="\n"))
        for table, frame in combine(names, values, made).items():
            _write(folder / f"{table}.csv", frame.to_csv(index=False, lineterminator="\n"))
        _write(folder / "index.html", index_page(path.stem, index))
    if failure:
        raise workflow.WorkflowError(
            f"{len(names) - len(made)} of {len(names)} runs failed; see {folder / 'index.html'}"
        )
    return folder / "index.html"


def _relative(path: Path) -> Path:
    return path.relative_to(repository.root())


def index_table(
    names: Sequence[str], values: Sequence[Mapping[str, Any]], made: Mapping[str, runs.Run], jobs: Path
) -> pd.DataFrame:
    """One row a parameter set: its parameters, run, status and, where it failed, the reason.

    Args:
        names: of the pages.
        values: parameters of each.
        made: the runs that ended well, by name.
        jobs: folder of the job files, where a failed job leaves its message.
    """
    rows = []
    for name, chosen in zip(names, values, strict=True):
        message = jobs / f"{name}.failed"
        run = made.get(name)
        rows.append(
            {
                "page": f"pages/{name}.ipynb",
                **chosen,
                "run": run.manifest.run_id if run else "none",
                "wall_time_s": run.manifest.wall_time_s if run else None,
                "status": "passed" if run else "failed" if message.is_file() else "not_measured",
                "reason": message.read_text(encoding="utf-8") if not run and message.is_file() else "",
            }
        )
    return pd.DataFrame(rows)


def combine(
    names: Iterable[str], values: Iterable[Mapping[str, Any]], made: Mapping[str, runs.Run]
) -> dict[str, pd.DataFrame]:
    """The tables of all runs under one another, each row with the parameters and the run that it comes from.

    Args:
        names: of the pages.
        values: parameters of each.
        made: the runs that ended well, by name.
    """
    parts: dict[str, list[pd.DataFrame]] = {}
    for name, chosen in zip(names, values, strict=True):
        if (run := made.get(name)) is None:
            continue
        for table in run.manifest.tables:
            frame = run.table(table)
            # A parameter may have the name of a column, and may be a list.
            for key, value in reversed(list(chosen.items())):
                frame.insert(0, f"parameter_{key}", [value] * len(frame))
            frame.insert(0, "run", run.manifest.run_id)
            parts.setdefault(table, []).append(frame)
    return {table: pd.concat(frames, ignore_index=True) for table, frames in parts.items()}


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#222;background:#fff}"
    "table{border-collapse:collapse}th,td{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #ddd}"
    ".failed,.not_measured{color:#a40000}"
)


def index_page(title: str, index: pd.DataFrame) -> str:
    """A static page that lists the runs of a batch; needs no network."""
    head = "".join(f"<th scope='col'>{html.escape(str(column))}</th>" for column in index.columns)
    body = []
    for row in index.to_dict("records"):
        cells = []
        for column, value in row.items():
            text = "" if value is None or value != value else html.escape(str(value))
            if column == "page" and row["status"] == "passed":
                text = f"<a href='{text}'>{text}</a>"
            cells.append(f"<td>{text}</td>")
        body.append(f"<tr class='{row['status']}'>{''.join(cells)}</tr>")
    return (
        f"<!doctype html>\n<html lang='en-GB'><head><meta charset='utf-8'><title>Batch {html.escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>Batch {html.escape(title)}</h1>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></body></html>\n"
    )


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
