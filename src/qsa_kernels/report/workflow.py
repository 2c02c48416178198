"""Plan a report or a batch, and let Snakemake run what is not done yet."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from qsa_kernels.report import book, cluster, profiles, recording, repository, runs

# What the book is made of besides the results pages.
_BOOK_SOURCES = (
    *("_config.yml", "_toc.yml", "book/**/*.md", "book/references.bib", "book/_static/**/*"),
    *("CHANGELOG.md", "CITATION.cff", "data/**/*.csv", "data/runs/*/manifest.json"),
)


class WorkflowError(RuntimeError):
    """Some of the jobs failed; their own messages were printed."""


@contextmanager
def exclusive(folder: Path | None = None) -> Iterator[int]:
    """Hold a folder for one workflow; the system lets go of it even when the process is killed.

    Yields the file descriptor of the lock, for children that have to hold it too.

    Args:
        folder: default: what reports and batches of this checkout write to.

    Raises:
        WorkflowError: another process holds it.
    """
    busy = f"another recording into {folder} is running"
    if folder is None:
        busy = "another report or batch is running in this checkout"
    folder = folder or repository.root() / "_build"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkflowError(busy) from None
        yield file.fileno()


def plan_report(profile: str, *, elsewhere: bool = False) -> list[runs.Job]:
    """The jobs of all chapters that the table of contents lists.

    Args:
        profile: name or path of the profile.
        elsewhere: they run on other machines than this one.

    Raises:
        ValueError: a chapter that the profile does not have, a circle in what chapters wait for, or anything that
            `runs.plan` refuses.
    """
    chosen = profiles.load(profile)
    listed = book.chapters()
    if missing := [name for name in listed if name not in chosen.chapters]:
        raise ValueError(f"profile {profile}: no plan for chapter {', '.join(missing)}, which _toc.yml lists")
    jobs = [runs.plan(name, profile, elsewhere=elsewhere) for name in listed]
    for job in jobs:
        if unknown := [name for name in job.after if name not in listed]:
            raise ValueError(
                f"profile {profile}: {job.name} waits for {', '.join(unknown)}, which _toc.yml does not list"
            )
    return jobs


def prepare(jobs: Iterable[runs.Job], folder: Path, pages: Path, names: Iterable[str] | None = None) -> None:
    """Write the job files, and remove pages that other jobs have made.

    Args:
        jobs: one for each page.
        folder: where the job files go; what else lies there is removed.
        pages: where the pages go.
        names: file names of the pages without suffix; default: the chapters' names.
    """
    jobs = list(jobs)
    wanted = dict(zip(names or [job.name for job in jobs], jobs, strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.stem not in wanted or file.suffix == ".failed":
            file.unlink()
    for name, job in wanted.items():
        file = folder / f"{name}.json"
        if not file.is_file() or file.read_text(encoding="utf-8") != job.text():
            file.write_text(job.text(), encoding="utf-8")
        page = pages / f"{name}.ipynb"
        if page.is_file() and not is_current(page, job):
            page.unlink()


def is_current(page: Path, job: runs.Job) -> bool:
    """Whether a page was made by this job, and its run is stored and untouched."""
    try:
        made_by = json.loads(page.read_text(encoding="utf-8"))["metadata"]["qsa"]["job"]
        runs.run_of_page(page)
    except (OSError, ValueError, KeyError):
        return False
    return bool(made_by == job.digest)


def prepare_book() -> None:
    """Note the state of everything that the book is made of besides the results pages."""
    root = repository.root()
    files = {path for pattern in _BOOK_SOURCES for path in root.glob(pattern) if path.is_file()}
    state = {path.relative_to(root).as_posix(): repository.sha256(path) for path in sorted(files)}
    state["package"] = repository.package_sha256()
    text = json.dumps(state, indent=2, sort_keys=True) + "\n"
    note = root / "_build/book-sources.json"
    note.parent.mkdir(exist_ok=True)
    if not note.is_file() or note.read_text(encoding="utf-8") != text:
        note.write_text(text, encoding="utf-8")


def snakemake(
    config: Mapping[str, object],
    *,
    lock: int,
    where: cluster.Place,
    cores: int | None = None,
    snakefile: str = "Snakefile",
) -> None:
    """Run what is not done yet.

    Args:
        config: what the workflow is told.
        lock: descriptor that `exclusive` yielded; the workflow holds the folder as long as it runs.
        where: jobs run there.
        cores: how many jobs at once; default: one for each processor of this machine, or what the profile of another
            place says.
        snakefile: which workflow.

    Raises:
        WorkflowError: a job failed; the others were run.
    """
    if cores is None and not where.is_elsewhere:
        cores = len(os.sched_getaffinity(0))
    at_once = {"--jobs" if where.is_elsewhere else "--cores": [cores]} if cores else {}
    # Snakemake is part of the package's environment, the workflow a part of the checkout.
    options: dict[str, Sequence[object]] = {
        "--snakefile": [cluster.workflow_folder() / snakefile],
        "--workflow-profile": [where.folder],
        **at_once,
        "--config": [f"{key}={value}" for key, value in config.items()],
    }
    with subprocess.Popen(
        [sys.executable, "-m", "snakemake", *(str(word) for name in options for word in (name, *options[name]))],
        cwd=repository.root(),
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        stdin=subprocess.DEVNULL,
        pass_fds=(lock,),
        start_new_session=True,
    ) as process:
        try:
            status = process.wait()
        except BaseException:
            if where.is_elsewhere:
                # Snakemake takes its jobs back from the cluster at this signal alone.
                process.send_signal(signal.SIGINT)
            else:
                # Snakemake alone would wait for its jobs; the group has them too, and they leave nothing behind.
                os.killpg(process.pid, signal.SIGTERM)
            raise
    if status:
        raise WorkflowError(
            "not everything ran to its end: the messages above say what failed, .snakemake/log has the rest"
        )


def report(profile: str, cores: int | None = None, workflow_profile: str = cluster.LOCAL) -> Path:
    """Run all chapters of the book under a profile, then build it; returns its index.html.

    Args:
        profile: name or path of the profile.
        cores: how many chapters at once, see `snakemake`.
        workflow_profile: where they run, see `cluster.place`.

    Raises:
        ValueError: anything in the profile or the templates that cannot be; nothing has run then.
        WorkflowError: a chapter or the book failed; other chapters were run, and nothing partial was published.
    """
    root = repository.root()
    where = cluster.place(workflow_profile)
    with exclusive() as lock:
        jobs = plan_report(profile, elsewhere=where.is_elsewhere)
        prepare(jobs, root / "_build/jobs", root / book.RESULTS)
        prepare_book()
        config = {"jobs": "_build/jobs", "pages": book.RESULTS, "book": "true"}
        snakemake(config, lock=lock, where=where, cores=cores)
    return root / "_build/html/index.html"


def record(profile: str, workflow_profile: str, folder: Path | None = None) -> runs.Run:
    """Measure latency on the nodes of a cluster, each fresh process as a job of its own, and store the complete run.

    Args:
        profile: name or path of a profile with a section `latency`.
        workflow_profile: where the jobs run, see `cluster.place`.
        folder: an unfinished run to go on with, which the nodes share; default: a new one.

    Raises:
        ValueError: a profile that is wrong, or nodes that differ.
        WorkflowError: a job failed; what is measured stays, and the same call with `folder` goes on.
    """
    plan = recording.plan_of(profile)
    where = cluster.place(workflow_profile)
    folder = (folder or recording.unfinished_folder(profile)).resolve()
    config = {
        "run": folder,
        "profile": profiles.path_of(profile).resolve(),
        "processes": len(recording.process_numbers(plan)),
        "commit": repository.commit(),
    }
    with exclusive(folder) as lock:
        try:
            snakemake(config, lock=lock, where=where, snakefile="record.smk")
        except WorkflowError as error:
            raise WorkflowError(f"{error}; go on with --resume {folder}") from None
        return recording.assemble(folder)
