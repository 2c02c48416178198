"""A report runs what changed, goes on past a failure, and publishes nothing partial."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from qsa_kernels.report import batch, runs, workflow

BROKEN = "if page.parameters.rows == 5:\n    raise RuntimeError('five')"
TWO = """device: interpreter
timeout_s: 60
chapters:
  example: {parameters: {rows: 7}}
  other: {after: [example]}
"""


def test_two_reports_at_once_are_refused_and_a_killed_one_lets_go(checkout):
    code = (
        "import time\nfrom qsa_kernels.report import workflow\n"
        "with workflow.exclusive():\n    print('held', flush=True)\n    time.sleep(120)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(workflow.WorkflowError, match="another report or batch is running"), workflow.exclusive():
        pass
    process.kill()
    process.wait()
    with workflow.exclusive():
        pass


@pytest.mark.slow
def test_a_report_that_is_stopped_stops_its_jobs_and_leaves_nothing(checkout):
    checkout.notebook("example", "import time; time.sleep(120)")
    checkout.book()
    process = subprocess.Popen([sys.executable, "-m", "qsa_kernels.report.cli", "report"])
    runs_folder = checkout.root / "runs"
    for _ in range(600):
        if runs_folder.is_dir() and any(runs_folder.glob(".partial-*/*.ipynb")):
            break
        time.sleep(0.1)
    assert checkout.leftovers()
    process.terminate()
    assert process.wait(60) != 0
    for _ in range(200):
        if not checkout.leftovers():
            break
        time.sleep(0.1)
    assert checkout.leftovers() == []


def test_a_report_needs_a_plan_for_every_listed_chapter(copied):
    toc = copied.root / "_toc.yml"
    toc.write_text(toc.read_text() + "  - file: book/results/latency\n")
    with pytest.raises(ValueError, match="no plan for chapter latency"):
        workflow.plan_report("cpu")


def test_chapters_wait_for_listed_ones_alone(copied):
    copied.profile("device: interpreter\nchapters: {example: {after: [absent]}}")
    with pytest.raises(ValueError, match="example waits for absent"):
        workflow.plan_report("cpu")


def test_all_others_stands_for_the_chapters_with_a_template(checkout):
    checkout.example()
    checkout.notebook("other", parameters="")
    checkout.profile("device: interpreter\nchapters: {other: {after: ['*']}, example: {}, planned: {}}")
    assert runs.plan("other", "cpu").after == ["example"]


def test_pages_of_other_jobs_are_removed_and_those_of_this_one_stay(copied):
    page = copied.root / "book/results/example.ipynb"
    jobs, pages = copied.root / "_build/jobs", page.parent
    workflow.prepare([runs.plan("example", "cpu")], jobs, pages)
    assert page.is_file()
    first = (jobs / "example.json").stat().st_mtime_ns
    time.sleep(0.01)
    workflow.prepare([runs.plan("example", "cpu")], jobs, pages)
    assert (jobs / "example.json").stat().st_mtime_ns == first
    workflow.prepare([runs.plan("example", "cpu", ["rows=8"])], jobs, pages)
    assert not page.is_file()


@pytest.mark.slow
def test_a_failed_chapter_fails_the_report_while_others_run(checkout, capfd):
    checkout.example()
    checkout.notebook("other", "1 / 0")
    checkout.profile(TWO.replace("{after: [example]}", "{}"))
    checkout.book()
    toc = checkout.root / "_toc.yml"
    toc.write_text(toc.read_text() + "  - file: book/results/other\n")
    with pytest.raises(workflow.WorkflowError, match="not everything ran"):
        workflow.report("cpu", cores=2)
    assert "ZeroDivisionError" in capfd.readouterr().err
    pages = [path.name for path in (checkout.root / "book/results").iterdir()]
    assert pages == ["example.ipynb"]
    assert not (checkout.root / "_build/html").exists()

    first = runs.published("example").manifest.run_id
    toc.write_text(toc.read_text().replace("  - file: book/results/other\n", ""))
    index = workflow.report("cpu", cores=2)
    assert index.is_file()
    assert runs.published("example").manifest.run_id == first
    stamp = index.stat().st_mtime_ns
    workflow.report("cpu", cores=2)
    assert index.stat().st_mtime_ns == stamp


@pytest.mark.slow
def test_a_batch_resumes_and_puts_its_tables_together(checkout):
    checkout.notebook("example", checkout.begin, BROKEN, checkout.squares, checkout.end)
    sweep = checkout.root / "sweep.yaml"
    sweep.write_text("notebook: example\ngrid: {rows: [3, 5]}\nsets: [{rows: 3}]\n")
    with pytest.raises(workflow.WorkflowError, match="1 of 2 runs failed"):
        batch.run(sweep, cores=2)
    folder = checkout.root / "runs/batches/sweep"
    index = (folder / "index.csv").read_text()
    assert index.count("\n") == 3
    assert "RuntimeError: five" in index
    assert "passed" in index
    assert "failed" in (folder / "index.html").read_text()
    lines = (folder / "example_cells.csv").read_text().splitlines()
    assert lines[0].startswith("run,parameter_rows,label,rows,square")
    assert len(lines) == 3

    made = {path.name for path in (checkout.root / "runs").glob("example-*")}
    assert len(made) == 1
    checkout.example()
    sweep.write_text("notebook: example\ngrid: {rows: [3]}\n")
    batch.run(sweep, cores=2)
    again = {path.name for path in (checkout.root / "runs").glob("example-*")}
    assert len(again) == 2
    batch.run(sweep, cores=2)
    assert {path.name for path in (checkout.root / "runs").glob("example-*")} == again


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("notebook: example\ngrid: {topkk: [1]}", "unknown parameter 'topkk'"),
        ("notebook: example\ngrid: {rows: [3, .nan]}", "'rows'"),
        ("notebook: example\ngrid: {rows: []}", r"'grid\.rows'"),
        ("notebook: example", "neither grid nor sets"),
        ("notebook: example\ngrids: {}", "unknown key 'grids'"),
        ("grid: {rows: [3]}", "key 'notebook' is missing"),
        ("- 3", "expected keys and values"),
    ],
    ids=["parameter", "nan", "empty", "no-sets", "key", "no-notebook", "list"],
)
def test_bad_sweeps_are_refused_before_anything_runs(checkout, text, words):
    checkout.example()
    sweep = checkout.root / "sweep.yaml"
    sweep.write_text(text)
    with pytest.raises(ValueError, match=words):
        batch.run(sweep, cores=1)
    assert checkout.leftovers() == []


def test_a_grid_has_every_combination_once():
    sweep = batch.Sweep(notebook="example", grid={"a": [1, 2], "b": ["x", "y"]}, sets=[{"a": 1, "b": "x"}, {"a": 3}])
    assert sweep.expand() == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3},
    ]  # fmt: skip
