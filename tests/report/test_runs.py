"""A run is complete and stored, or it is not there at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import nbformat
import pytest

from qsa_kernels.report import manifest, runs, tables

SLOW_PROFILE = "device: interpreter\ntimeout_s: {}\nchapters: {{}}\n"


def page_text(checkout, name: str = "example") -> str:
    return (checkout.root / "book/results" / f"{name}.ipynb").read_text(encoding="utf-8")


def test_a_finished_run_is_stored_with_its_hashes_and_published(copied):
    run = runs.published("example")
    record = run.manifest
    assert record.parameters == {"rows": 7, "label": "a=b"}
    assert record.glue == {"example_square": 49.25}
    assert record.executed_on == "interpreter"
    assert record.device["name"] == "no CUDA device"
    assert record.versions["triton"] == "3.6.0"
    assert record.seed == "not available"
    assert set(record.inputs) == {"package", "data", "notebooks/example.ipynb"}
    assert run.table("example_cells")["square"].tolist()[0] == 49.25
    assert runs.stale_inputs(run) == []
    assert copied.leftovers() == sorted([run.manifest.run_id, "example.ipynb"])


def test_the_page_hides_its_parameters_cells_and_names_no_folder(finished):
    notebook = nbformat.reads(page_text(finished), as_version=4)
    tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
    assert ["parameters", "hide-input"] in tags
    assert ["injected-parameters", "hide-input"] in tags
    assert str(finished.root) not in page_text(finished)
    assert sys.prefix not in page_text(finished)


def test_the_kernel_is_this_python_whatever_the_user_has_installed(checkout, tmp_path, monkeypatch):
    spec = tmp_path / "jupyter/kernels/python3"
    spec.mkdir(parents=True)
    argv = ["/nonexistent/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "stale", "language": "python"}))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("HOME", str(tmp_path / "no-home"))
    checkout.notebook("other", "import sys\nraise RuntimeError(sys.executable)", parameters="", kernel="py39_new")
    with pytest.raises(runs.RunError, match=sys.executable):
        runs.execute(runs.plan("other", "cpu"))
    assert os.environ["HOME"] == str(tmp_path / "no-home")


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("x = 1\n1 / 0", ["cell 4 ('x = 1')", "ZeroDivisionError"]),
        ("import os\nos.kill(os.getpid(), 9)", ["cell 4 ('import os')", "the kernel died"]),
        ("while True: pass", ["cell 4 ('while True: pass')", "still running after 4 s"]),
    ],
    ids=["failing", "killed", "endless"],
)
def test_a_failed_notebook_ends_soon_names_its_cell_and_leaves_nothing(checkout, cell, words):
    checkout.notebook("other", "y = 2", cell)
    checkout.profile(SLOW_PROFILE.format(4))
    begin = time.monotonic()
    with pytest.raises(runs.RunError, match=r"notebooks/other\.ipynb") as caught:
        runs.execute(runs.plan("other", "cpu"))
    assert time.monotonic() - begin < 60
    assert all(word in str(caught.value) for word in words), caught.value
    assert checkout.leftovers() == []


def test_a_slow_cell_passes_within_its_limit(checkout):
    checkout.notebook("other", "import time; time.sleep(3)", parameters="")
    checkout.profile(SLOW_PROFILE.format(30))
    # It reaches the end, where the missing chapter is what is left to refuse.
    with pytest.raises(runs.RunError, match=r"did not call chapter\.begin"):
        runs.execute(runs.plan("other", "cpu"))


def test_a_killed_runner_leaves_no_page_and_its_rest_is_swept_up(copied):
    copied.notebook("example", "import time; time.sleep(60)")
    process = subprocess.Popen([sys.executable, "-m", "qsa_kernels.report.cli", "run", "example"])
    partial = copied.root / "runs"
    before = set(copied.leftovers())
    for _ in range(300):
        if any(path.name.startswith(".partial-") for path in partial.iterdir()):
            break
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert {name for name in copied.leftovers() if not name.startswith(".partial-")} == before
    with runs.staged(partial / "next") as folder:
        (folder / "x").touch()
    assert set(copied.leftovers()) == before | {"next"}


def test_refusals_come_before_anything_runs(checkout, in_subprocess):
    checkout.example()
    for words, expected in (
        (["--set", "topkk=64"], ["topkk", "rows: int", "label: str"]),
        (["--set", "rows=.nan"], ["rows"]),
        (["--profile", "v1000"], ["v1000", "cpu"]),
    ):
        status, output = in_subprocess("run", "example", *words)
        assert status == 1
        assert all(word in output for word in expected), output
        assert "Traceback" not in output
    assert checkout.leftovers() == []


def test_cuda_without_a_device_is_refused_before_anything_runs(checkout):
    from qsa_kernels.report import device

    if device.cuda_device_count():
        pytest.skip("this machine has a CUDA device")
    checkout.example()
    checkout.profile("device: cuda\nchapters: {}")
    with pytest.raises(ValueError, match="no CUDA device"):
        runs.plan("example", "cpu")


def test_a_parameter_that_only_the_kernel_sees_is_refused_there(checkout, tmp_path):
    """Plain papermill only warns of unknown parameters, so the notebook itself has to refuse them."""
    import papermill

    path = checkout.example()
    with pytest.raises(papermill.PapermillExecutionError, match=r"unknown parameter 'TOPKK'.*rows: int"):
        papermill.execute_notebook(
            str(path), str(tmp_path / "out.ipynb"), {"TOPKK": 64}, kernel_name="python3", cwd=str(tmp_path),
            progress_bar=False,
        )  # fmt: skip


def test_a_recorded_run_comes_back(checkout, stored):
    stored()
    run = runs.Run.load("h200-1")
    assert run.folder == checkout.root / "data/runs/h200-1"
    assert run.manifest.seed == 17
    assert run.table("example_cells")["square"].tolist() == [9.25]
    with pytest.raises(ValueError, match="no table 'latency_cells'; it has example_cells"):
        run.table("latency_cells")
    with pytest.raises(FileNotFoundError, match="no run 'h200-2'; recorded: h200-1"):
        runs.Run.load("h200-2")


def test_a_run_is_never_overwritten(stored):
    stored()
    with pytest.raises(FileExistsError, match="h200-1"):
        stored(seed=18)
    assert runs.Run.load("h200-1").manifest.seed == 17


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"device": {"name": ""}, "versions": {}, "host": {}}},
        {"environment": {"device": {"clock": None}, "versions": {}, "host": {}}},
        {"wall_time_s": float("nan")},
        {"started": "yesterday"},
        {"executed_on": "gpu"},
        {"profile": ""},
    ],
    ids=["blank", "none", "nan", "time", "device", "empty"],
)
def test_blank_or_wrong_facts_are_not_stored(checkout, stored, changes):
    with pytest.raises(ValueError, match=r"run h200-1: field '(device|wall_time_s|started|executed_on|profile)'"):
        stored(**changes)
    assert list((checkout.root / "data/runs").iterdir()) == []


def test_a_changed_table_is_refused(stored):
    folder = stored().folder
    path = folder / "example_cells.csv"
    path.write_text(path.read_text().replace("9.25", "9.52"))
    with pytest.raises(ValueError, match=r"example_cells\.csv does not match the hash"):
        runs.Run.load("h200-1")


def test_a_missing_table_is_refused(stored):
    (stored().folder / "example_cells.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"example_cells\.csv is missing"):
        runs.Run.load("h200-1")


def test_a_table_that_breaks_its_schema_is_refused_although_its_hash_is_right(stored, monkeypatch):
    run = stored()
    monkeypatch.setitem(tables.SCHEMAS, "example_cells", tables.schema({"label": tables.label("b")}))
    with pytest.raises(ValueError, match="example_cells"):
        run.table("example_cells")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text.replace('"seed": 17', '"seed": NaN'), "NaN is not JSON"),
        (lambda text: text.replace('"seed": 17', '"seed": ""'), "'seed"),
        (lambda text: text.replace('"seed": 17', '"seeds": 17'), "unknown field 'seeds'"),
        (lambda text: text.replace('"seed": 17,', ""), "field 'seed' is missing"),
        (lambda text: text[:-5], "not strict JSON"),
        (lambda text: text.replace("h200-1", "h200-2"), "belongs to run 'h200-2'"),
    ],
    ids=["nan", "blank", "unknown", "missing", "cut", "other-run"],
)
def test_a_tampered_manifest_is_refused(stored, edit, words):
    path = stored().folder / "manifest.json"
    path.write_text(edit(path.read_text()))
    with pytest.raises(ValueError, match=words):
        runs.Run.load("h200-1")


def test_a_manifest_that_was_changed_after_its_page_is_refused(copied):
    path = runs.published("example").folder / "manifest.json"
    path.write_text(path.read_text().replace('"rows": 7', '"rows": 8'))
    with pytest.raises(ValueError, match=r"manifest\.json of run example-cpu-\S+ has changed since the page was made"):
        runs.published("example")


def test_a_page_that_its_run_did_not_make_is_refused(copied):
    page = copied.root / "book/results/example.ipynb"
    page.write_text(page.read_text().replace("49.25", "49.52"))
    with pytest.raises(ValueError, match="is not the notebook that run"):
        runs.published("example")
    page.write_text('{"metadata": {}}')
    with pytest.raises(ValueError, match="names no run"):
        runs.published("example")
    page.unlink()
    with pytest.raises(FileNotFoundError, match="no published page"):
        runs.published("example")


@pytest.mark.parametrize("path", ["notebooks/example.ipynb", "data/reported/new.csv"])
def test_changed_inputs_are_seen(copied, path):
    run = runs.published("example")
    target = copied.root / path
    target.write_text((target.read_text() if target.exists() else "") + "\n")
    assert runs.stale_inputs(run) == [path if path.startswith("notebooks") else "data"]


def test_a_recorded_run_is_an_input_of_the_chapter_that_draws_it(checkout, stored):
    stored()
    checkout.notebook("other", parameters="source: str = 'live'")
    checkout.profile("device: interpreter\nchapters: {other: {source: {recorded: h200-1}}}")
    job = runs.plan("other", "cpu")
    assert job.parameters == {"source": "recorded:h200-1"}
    assert "data/runs/h200-1/manifest.json" in job.inputs
    checkout.profile("device: interpreter\nchapters: {other: {source: {recorded: absent}}}")
    with pytest.raises(FileNotFoundError, match="no run 'absent'"):
        runs.plan("other", "cpu")


def test_a_profile_cannot_set_a_source_that_the_notebook_does_not_have(checkout):
    checkout.example()
    checkout.profile("device: interpreter\nchapters: {example: {source: {recorded: h200-1}}}")
    with pytest.raises(ValueError, match="unknown parameter 'source'"):
        runs.plan("example", "cpu")


def test_the_job_changes_with_every_input(checkout):
    path = checkout.example()
    first = runs.plan("example", "cpu")
    assert runs.plan("example", "cpu").digest == first.digest
    assert runs.plan("example", "cpu", ["rows=8"]).digest != first.digest
    path.write_text(path.read_text() + "\n")
    assert runs.plan("example", "cpu").digest != first.digest


def test_a_new_recorded_run_changes_what_draws_the_newest_one(checkout, stored):
    checkout.example()
    checkout.notebook("latest", parameters='source: str = "recorded:newest"')
    before = {name: runs.plan(name, "cpu").digest for name in ("example", "latest")}
    stored()
    after = {name: runs.plan(name, "cpu").digest for name in ("example", "latest")}
    assert after["example"] == before["example"]
    assert after["latest"] != before["latest"]


def test_publishing_replaces_the_page_in_one_step(copied):
    run = runs.published("example")
    page = copied.root / "book/results/example.ipynb"
    page.write_text("old")
    runs.publish(run)
    assert runs.published("example").manifest.run_id == run.manifest.run_id
    assert [path.name for path in page.parent.iterdir()] == ["example.ipynb"]


def test_manifests_are_written_as_read(stored, tmp_path):
    record = stored().manifest
    record.write(tmp_path / "manifest.json")
    assert manifest.read(tmp_path / "manifest.json") == record
