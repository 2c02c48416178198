"""Run notebooks, keep each run in a folder of its own, and read stored runs back with their hashes checked."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from pydantic import BaseModel, ConfigDict

from qsa_kernels.report import device, manifest, profiles, repository
from qsa_kernels.report.context import RUN_VARIABLE, RunContext
from qsa_kernels.report.manifest import StoredFile
from qsa_kernels.report.templates import Template

if TYPE_CHECKING:  # pandas and pandera take seconds to import; a refused command does not wait for them
    import pandas as pd

KERNEL = "qsa-kernels"
START_TIMEOUT_S = 120
# Parameter value for the newest recorded run, and the name of the input that stands for all of them.
_NEWEST = "recorded:newest"
_NEWEST_INPUT = "data/runs"


class RunError(RuntimeError):
    """A notebook that did not run to its end; the message names notebook and cell."""


class Job(BaseModel):
    """One notebook to run, with everything that its result depends on.

    Args:
        name: chapter, and file name of the published page.
        notebook: template, relative to the checkout where it lies inside.
        profile: name of the profile.
        device: "interpreter" or "cuda".
        timeout_s: limit for one cell, in seconds.
        parameters: all of them.
        after: chapters whose results this one reads.
        inputs: SHA-256 of the files that the result depends on; "package" stands for the source files of `qsa_kernels`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    notebook: str
    profile: str
    device: str
    timeout_s: int
    parameters: dict[str, Any]
    after: list[str]
    inputs: dict[str, str]

    def text(self) -> str:
        """The job as JSON, the same text for the same job."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @property
    def digest(self) -> str:
        """Short hash of the job."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:12]

    @property
    def path(self) -> Path:
        """The template's file."""
        return repository.root() / self.notebook


def input_hashes(template: Path, recorded: Sequence[str] = (), *, newest: bool = False) -> dict[str, str]:
    """SHA-256 of everything outside of the parameters that a run of `template` depends on.

    Args:
        template: the notebook.
        recorded: ids of recorded runs that it draws.
        newest: it draws whatever run is the newest, so that any new one can change it.
    """
    root = repository.root()
    data = root / "data"
    files = (path for path in data.rglob("*") if path.is_file() and data / "runs" not in path.parents)
    hashes = {
        "package": repository.package_sha256(),
        "data": repository.combined_sha256(files, root),
        _relative(template): repository.sha256(template),
    }
    for run_id in recorded:
        path = Run.load(run_id).folder / "manifest.json"
        hashes[_relative(path)] = repository.sha256(path)
    if newest:
        hashes[_NEWEST_INPUT] = repository.combined_sha256(recorded_folder().glob("*/manifest.json"), root)
    return hashes


def _page_hashes(pages: Iterable[str]) -> dict[str, str]:
    """SHA-256 of published pages, by path relative to the checkout; "missing" where there is none."""
    root = repository.root()
    return {page: repository.sha256(root / page) if (root / page).is_file() else "missing" for page in sorted(pages)}


def _relative(path: Path) -> str:
    path = path.resolve()
    return path.relative_to(repository.root()).as_posix() if path.is_relative_to(repository.root()) else str(path)


def template_path(notebook: str) -> Path:
    """The template of a chapter that is given by name ("error") or by path."""
    return Path(notebook) if notebook.endswith(".ipynb") else repository.root() / "notebooks" / f"{notebook}.ipynb"


def plan(
    notebook: str,
    profile: str,
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    *,
    elsewhere: bool = False,
) -> Job:
    """The job that runs a notebook under a profile; nothing has run when this raises.

    Args:
        notebook: name or path of the template.
        profile: name or path of the profile.
        assignments: `key=value` texts that override the profile.
        values: parameters that override the profile.
        elsewhere: the job runs on another machine, so that this one needs no GPU.

    Raises:
        FileNotFoundError: no such notebook, profile or recorded run.
        ValueError: any parameter, profile key or device that cannot be.
    """
    template = Template(template_path(notebook))
    chosen = profiles.load(profile)
    chapter = chosen.chapters.get(template.name, profiles.ChapterPlan())
    try:
        parameters = template.resolve({**chapter.values(), **(values or {}), **template.parse(list(assignments))})
    except ValueError as error:
        raise ValueError(f"profile {profile}: {error}") from None
    return Job(
        name=template.name,
        notebook=_relative(template.path),
        profile=profiles.path_of(profile).stem,
        device=device.resolve(chosen.device, elsewhere=elsewhere),
        timeout_s=chapter.timeout_s or chosen.timeout_s,
        parameters=parameters,
        after=_waits_for(template.name, chapter.after, chosen),
        inputs=input_hashes(template.path, chapter.recorded_runs(), newest=_NEWEST in parameters.values()),
    )


def _waits_for(name: str, after: Sequence[str], profile: profiles.Profile) -> list[str]:
    """`after` with "*" replaced by all other chapters of the profile that have a template."""
    if "*" not in after:
        return list(after)
    return sorted(other for other in profile.chapters if other != name and template_path(other).is_file())


def runs_folder() -> Path:
    """Where runs of this checkout go; ignored by git."""
    return repository.root() / "runs"


def recorded_folder() -> Path:
    """Where measured runs are kept for good."""
    return repository.root() / "data" / "runs"


class Run:
    """A stored run: a folder with a manifest and tables.

    Args:
        folder: the run folder.

    Raises:
        FileNotFoundError: no manifest, or a table that it names is missing.
        ValueError: a manifest that breaks its schema, or a file whose hash is not the one in the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = manifest.read(folder / "manifest.json")
        if self.manifest.run_id != folder.name:
            raise ValueError(f"{folder}: the manifest belongs to run {self.manifest.run_id!r}")
        for stored in (*self.manifest.tables.values(), *filter(None, [self.manifest.notebook])):
            path = folder / stored.file
            if not path.is_file():
                raise FileNotFoundError(f"run {folder.name}: {stored.file} is missing")
            if repository.sha256(path) != stored.sha256:
                raise ValueError(f"run {folder.name}: {stored.file} does not match the hash in manifest.json")

    @classmethod
    def load(cls, run_id: str) -> Run:
        """The run of that id, recorded or local."""
        for parent in (recorded_folder(), runs_folder()):
            if (parent / run_id).is_dir():
                return cls(parent / run_id)
        known = sorted(path.name for path in recorded_folder().glob("*") if path.is_dir())
        raise FileNotFoundError(f"no run {run_id!r}; recorded: {', '.join(known) or 'none'}")

    def table(self, name: str) -> pd.DataFrame:
        """A stored table, checked against its schema."""
        from qsa_kernels.report import tables

        if name not in self.manifest.tables:
            raise ValueError(
                f"run {self.manifest.run_id}: no table {name!r}; it has {', '.join(sorted(self.manifest.tables))}"
            )
        return tables.read(self.folder / self.manifest.tables[name].file, name)


def published(chapter: str) -> Run:
    """The run that the published page of a chapter shows.

    Raises:
        FileNotFoundError: no published page of that chapter.
    """
    page = repository.root() / "book/results" / f"{chapter}.ipynb"
    if not page.is_file():
        raise FileNotFoundError(f"no published page {_relative(page)}: run 'qsa run {chapter}' first")
    return run_of_page(page)


def run_of_page(page: Path) -> Run:
    """The run that an executed page was made by.

    Raises:
        ValueError: the page names no run, is not the notebook which that run stored, or was made with another manifest
            than the one beside it.
    """
    content = json.loads(page.read_text(encoding="utf-8"))
    named = content.get("metadata", {}).get("qsa", {})
    run_id = named.get("run_id")
    if not run_id:
        raise ValueError(f"{_relative(page)}: names no run; make it with 'qsa run'")
    run = Run.load(run_id)
    if run.manifest.notebook is None or repository.sha256(page) != run.manifest.notebook.sha256:
        raise ValueError(f"{_relative(page)}: is not the notebook that run {run_id} stored")
    if named.get("record") != run.manifest.digest():
        raise ValueError(f"{_relative(page)}: manifest.json of run {run_id} has changed since the page was made")
    return run


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A new folder that takes the name `folder` in one step when the block ends well, and vanishes otherwise.

    Raises:
        FileExistsError: `folder` is there already.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} is there already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    partial = folder.parent / f".partial-{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Delete what processes of this machine that were killed have left; others may share the folder."""
    own = f".partial-{platform.node()}-"
    for partial in parent.glob(".partial-*"):
        found = re.match(r"(\d+)-", partial.name.removeprefix(own))
        if found and partial.name.startswith(own) and not Path(f"/proc/{found[1]}").exists():
            shutil.rmtree(partial, ignore_errors=True)


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_run_id(name: str, profile: str, started: str) -> str:
    """A name for a run folder: chapter, profile, time and four hex digits against collisions."""
    stamp = started.replace("-", "").replace(":", "")
    return f"{name}-{profile}-{stamp}-{secrets.token_hex(2)}"


def store(
    frames: Mapping[str, pd.DataFrame],
    *,
    run_id: str,
    chapter: str,
    profile: str,
    parameters: Mapping[str, Any],
    environment: Mapping[str, Any],
    executed_on: str,
    started: str,
    wall_time_s: float,
    seed: int | str = repository.NOT_AVAILABLE,
    provenance: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> Run:
    """Store measured tables as a recorded run, in one step.

    Args:
        frames: tables by name of their schema.
        run_id: name of the new folder.
        chapter: name of the measurement.
        profile: name of the profile.
        parameters: all of them, resolved.
        environment: what `measure.environment.describe()` returned on the measuring machine.
        executed_on: "interpreter" or "cuda".
        started: UTC, ISO 8601 to the second, as `now()` gives it.
        wall_time_s: seconds from start to end.
        seed: of the random numbers.
        provenance: `commit`, `dirty` and `package_sha256` of what measured, where that is not the present checkout.
        folder: parent of the run folder; default: data/runs.

    Raises:
        ValueError: a table that breaks its schema, or a blank field; nothing is stored then.
        FileExistsError: a run of that id exists.
    """
    from qsa_kernels.report import tables

    target = (folder or recorded_folder()) / run_id
    sources = provenance or repository.provenance()
    with staged(target) as partial:
        stored = {}
        for name, frame in frames.items():
            path = tables.write(frame, name, partial)
            stored[name] = StoredFile(file=path.name, sha256=repository.sha256(path))
        record = manifest.make(
            run_id=run_id,
            chapter=chapter,
            profile=profile,
            parameters=dict(parameters),
            commit=sources["commit"],
            dirty=sources["dirty"],
            package_sha256=sources["package_sha256"],
            inputs={},
            started=started,
            wall_time_s=wall_time_s,
            seed=seed,
            executed_on=executed_on,
            device=dict(environment["device"]),
            versions=dict(environment["versions"]),
            host=dict(environment["host"]),
            glue={},
            tables=stored,
            notebook=None,
        )
        record.write(partial / "manifest.json")
    return Run(target)


@contextmanager
def _kernel(environment: Mapping[str, str]) -> Iterator[None]:
    """Make this very Python available as a kernel of a private name, whatever kernels the user has installed."""
    with tempfile.TemporaryDirectory(prefix="qsa-kernel-") as folder:
        spec_folder = Path(folder) / "kernels" / KERNEL
        spec_folder.mkdir(parents=True)
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=50"],
            "display_name": KERNEL,
            "language": "python",
            # jupyter_client expands $NAME in these values.
            "env": {name: value.replace("$", "$$") for name, value in environment.items()}
            | {"IPYTHONDIR": f"{folder}/ipython"},
        }
        (spec_folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
        before = {name: os.environ.get(name) for name in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR")}
        os.environ["JUPYTER_PATH"] = folder
        os.environ["JUPYTER_RUNTIME_DIR"] = f"{folder}/runtime"
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def execute(job: Job, folder: Path | None = None) -> Run:
    """Run a notebook to its end and store the run; a run that fails leaves nothing in `folder`.

    Args:
        job: from `plan`.
        folder: parent of the run folder; default: runs/ of the checkout.

    Raises:
        RunError: names the notebook and the cell that failed, timed out or killed its kernel.
    """
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    started = now()
    begin = time.monotonic()
    run_id = new_run_id(job.name, job.profile, started)
    with (
        staged((folder or runs_folder()) / run_id) as partial,
        tempfile.TemporaryDirectory(prefix="qsa-work-") as work,
    ):
        context = RunContext(
            run_id=run_id,
            notebook=job.notebook,
            profile=job.profile,
            folder=str(partial),
            commit=repository.commit(),
            dirty=repository.is_dirty(),
            package_sha256=job.inputs["package"],
            executable=sys.executable,
            version=metadata.version("qsa-kernels"),
            date=started,
        )
        environment = {
            RUN_VARIABLE: context.model_dump_json(),
            "TRITON_INTERPRET": "1" if job.device == "interpreter" else "0",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        output = partial / f"{job.name}.ipynb"
        try:
            with _kernel(environment):
                papermill.execute_notebook(
                    _escaped(job.path),
                    _escaped(output),
                    parameters=job.parameters,
                    kernel_name=KERNEL,
                    language="python",
                    cwd=work,
                    start_timeout=START_TIMEOUT_S,
                    execution_timeout=job.timeout_s,
                    progress_bar={"desc": job.name, "disable": None, "leave": False, "unit": "cell"},
                )
        except PapermillExecutionError as error:
            raise RunError(f"{_where(job, output)}: {error.ename}: {error.evalue}\n{_tail(error.traceback)}") from None
        except CellTimeoutError:
            raise RunError(f"{_where(job, output)}: still running after {job.timeout_s} s") from None
        except DeadKernelError:
            raise RunError(f"{_where(job, output)}: the kernel died (killed, out of memory, or crashed)") from None
        except Exception as error:
            raise RunError(f"{_where(job, output)}: {type(error).__name__}: {error}") from error
        _finish(job, context, partial, output, round(time.monotonic() - begin, 3))
    return Run((folder or runs_folder()) / run_id)


def _escaped(path: Path) -> str:
    # papermill formats paths with the parameters
    return str(path).replace("{", "{{").replace("}", "}}")


def _where(job: Job, output: Path) -> str:
    """Notebook, number and first line of the cell that was running last."""
    try:
        cells = nbformat.read(output, as_version=4).cells
    except (OSError, ValueError):
        return f"{job.notebook}: before the first cell"
    added = {"injected-parameters", "papermill-error-cell-tag"}
    own = [cell for cell in cells if not added & set(cell.metadata.get("tags", []))]
    reached = [
        (number, cell)
        for number, cell in enumerate(own, start=1)
        if cell.cell_type == "code" and cell.metadata.get("papermill", {}).get("start_time")
    ]
    if not reached:
        return f"{job.notebook}: before the first cell"
    number, cell = reached[-1]
    return f"{job.notebook}, cell {number} ({cell.source.strip().splitlines()[0][:60]!r})"


def _tail(traceback: Sequence[str]) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(traceback))
    return "\n".join(f"    {line}" for line in plain.splitlines()[-12:])


def _figure_apart(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cell of a figure, and what else it shows in a cell of its own: MyST-NB captions every output of the first."""
    shown = [output for output in cell.get("outputs", []) if "text/html" in output.get("data", {})]
    if not shown or "figure" not in cell.metadata.get("mystnb", {}):
        return [cell]
    cell.outputs = [output for output in cell.outputs if output not in shown]
    # A cell without source would be left out of the page with its outputs.
    rest = nbformat.v4.new_code_cell("# shown with the figure", outputs=shown, metadata={"tags": ["remove-input"]})
    rest.id = f"{cell.id}-rest"
    return [cell, rest]


def _finish(job: Job, context: RunContext, partial: Path, output: Path, wall_time_s: float) -> None:
    """Turn what the notebook left into a complete run folder."""
    record_path = partial / "chapter.json"
    if not record_path.is_file():
        raise RunError(f"{job.notebook}: did not call chapter.begin; see the docstring of qsa_kernels.report.chapter")
    record = json.loads(record_path.read_text(encoding="utf-8"))
    if not record["complete"]:
        raise RunError(f"{job.notebook}: did not end with page.provenance()")
    notebook = nbformat.read(output, as_version=4)
    # Papermill's notes hold absolute paths and times; what matters of them is in the manifest.
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        tags = cell.metadata.get("tags", [])
        if {"parameters", "injected-parameters"} & set(tags) and "hide-input" not in tags:
            cell.metadata["tags"] = [*tags, "hide-input"]
    notebook.cells = [part for cell in notebook.cells for part in _figure_apart(cell)]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = manifest.make(
        run_id=context.run_id,
        chapter=job.name,
        profile=job.profile,
        parameters=job.parameters,
        commit=context.commit,
        dirty=context.dirty,
        package_sha256=context.package_sha256,
        inputs=job.inputs | _page_hashes(f"book/results/{name}.ipynb" for name in job.after),
        started=context.date,
        wall_time_s=wall_time_s,
        seed=job.parameters.get("seed", repository.NOT_AVAILABLE),
        executed_on=record["device"],
        device=record["environment"]["device"],
        versions=record["environment"]["versions"],
        host=record["environment"]["host"],
        glue=record["glue"],
        tables={
            name: StoredFile(file=f"tables/{file}", sha256=repository.sha256(partial / "tables" / file))
            for name, file in record["tables"].items()
        },
        notebook=None,
    )
    notebook.metadata["qsa"] = {"run_id": context.run_id, "job": job.digest, "record": made.digest()}
    nbformat.write(notebook, output)
    stored = StoredFile(file=output.name, sha256=repository.sha256(output))
    made.model_copy(update={"notebook": stored}).write(partial / "manifest.json")
    record_path.unlink()


def publish(run: Run, target: Path | None = None) -> Path:
    """Put a run's page where the book reads it, in one step.

    Args:
        run: from `execute`.
        target: file of the page; default: book/results/NAME.ipynb.
    """
    if run.manifest.notebook is None:
        raise ValueError(f"run {run.manifest.run_id} has no notebook to publish")
    page = target or repository.root() / "book/results" / f"{run.manifest.chapter}.ipynb"
    page.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=page.parent, prefix=".partial-", delete=False) as file:
        temporary = Path(file.name)
    try:
        shutil.copyfile(run.folder / run.manifest.notebook.file, temporary)
        temporary.chmod(0o644)
        temporary.replace(page)
    finally:
        temporary.unlink(missing_ok=True)
    return page


def stale_inputs(run: Run) -> list[str]:
    """Names of the inputs that have changed since a run."""
    root = repository.root()
    recorded = [Path(name).parent.name for name in run.manifest.inputs if name.endswith("/manifest.json")]
    read = {name for name in run.manifest.inputs if name.startswith("book/results/")}
    template = next(name for name in run.manifest.inputs if name.endswith(".ipynb") and name not in read)
    if not (root / template).is_file():
        return [template]
    newest = _NEWEST_INPUT in run.manifest.inputs
    current = input_hashes(root / template, recorded, newest=newest) | _page_hashes(read)
    return sorted(name for name in current if current[name] != run.manifest.inputs.get(name))
