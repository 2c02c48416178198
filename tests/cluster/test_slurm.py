"""Through sbatch of a real Slurm: a job is killed midway, and the resumed run ends as one that nobody stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.loopback import NODES, Slurm, wait_for
from simulated_run import small, write_run

from qsa_kernels.measure.latency import plan as plans
from qsa_kernels.report import recording, runs

ROOT = Path(__file__).resolve().parents[2]
# Start and length of each run, checksums of tables that name runs, and the memory that was free.
OF_ONE_RUN = {("environment", f"environment_{name}") for name in ("runs", "checksums", "checks")}
RUN_ID = re.compile(r"-ci-\d{8}T\d{6}Z-[0-9a-f]{4}\b")


class Command:
    """`qsa` in a checkout, as a user of the cluster starts it."""

    def __init__(self, slurm: Slurm, checkout: Path, log: Path, *path: Path, **variables: str) -> None:
        self.checkout, self.log = checkout, log
        folders = [checkout / "src", *path, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = slurm.environment | variables | {"PYTHONPATH": ":".join(map(str, folders))}
        self.environment.pop("QSA_ROOT", None)

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "qsa_kernels.report.cli", *map(str, words)]
        with self.log.open("ab") as file:
            return subprocess.Popen(command, cwd=self.checkout, env=self.environment, stdout=file, stderr=file)

    def succeed(self, *words: object) -> None:
        assert self.start(*words).wait(900) == 0, self.log.read_text()[-3000:]


def pages(checkout: Path) -> dict[str, str]:
    """Run id of each published page."""
    found = {}
    for page in (checkout / "book/results").glob("*.ipynb"):
        found[page.stem] = json.loads(page.read_text())["metadata"]["qsa"]["run_id"]
    return found


def results(checkout: Path) -> dict[tuple[str, str], str]:
    """Each table of the published runs as text, by chapter and name, without the ids of the runs."""
    found = {}
    for chapter, run_id in pages(checkout).items():
        run = runs.Run(checkout / "runs" / run_id)
        for name in run.manifest.tables:
            found[chapter, name] = RUN_ID.sub("", run.table(name).to_csv())
    return found


@pytest.mark.timeout(1800)
def test_a_report_whose_job_is_killed_resumes_to_the_same_result(
    slurm: Slurm, checkout: Path, workflow_profile: Path, tmp_path: Path
) -> None:
    qsa = Command(slurm, checkout, tmp_path / "log")
    report = ["report", "--profile", "ci"]
    on_slurm = [*report, "--workflow-profile", workflow_profile]
    first = qsa.start(*on_slurm)
    wait_for(
        "a notebook that is being run",
        lambda: any((checkout / "runs").glob(".partial-*/calibration.ipynb")) or first.poll() is not None,
        240,
    )
    job = slurm.job("notebook_wildcards_calibration")
    assert job, qsa.log.read_text()[-3000:]
    slurm.ask("scancel", job)
    assert first.wait(900) == 1
    assert "not everything ran to its end" in qsa.log.read_text()
    done = pages(checkout)
    assert set(done) == {"capacity", "codegen", "error", "latency", "quality"}
    assert not list((checkout / "runs").glob(".partial-*"))
    assert not (checkout / "_build/html/index.html").exists()

    qsa.succeed(*on_slurm)
    resumed = pages(checkout)
    assert {name: resumed[name] for name in done} == done
    assert set(resumed) == {*done, "calibration", "claims", "environment"}
    assert (checkout / "_build/html/index.html").is_file()
    after_the_kill = results(checkout)

    for folder in ("runs", "book/results", "_build", ".snakemake"):
        shutil.rmtree(checkout / folder)
    qsa.succeed(*report)
    uninterrupted = results(checkout)
    assert after_the_kill.keys() == uninterrupted.keys()
    assert {key for key, text in uninterrupted.items() if after_the_kill[key] != text} == OF_ONE_RUN


def v100(folder: Path) -> Path:
    """A profile that measures four small processes."""
    latency: dict[str, Any] = plans.to_mapping(small()) | {"device_name": "V100", "compilers": 1}
    latency["stages"][0]["processes"] = 4
    path = folder / "small.yaml"
    content = {"device": "cuda", "chapters": {}, "latency": json.loads(json.dumps(latency))}
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.timeout(600)
def test_a_recorded_run_of_two_nodes_whose_job_is_killed_resumes_to_the_same_result(
    slurm: Slurm, checkout: Path, workflow_profile: Path, tmp_path: Path
) -> None:
    profile, run = v100(tmp_path), tmp_path / "shared/run-1"
    qsa = Command(
        slurm, checkout, tmp_path / "log", ROOT / "tests", ROOT / "tests/cluster/stand_in", QSA_SIMULATED_UNIT_S="4"
    )
    record = ["record", "--profile", profile, "--workflow-profile", workflow_profile, "--resume", run]
    first = qsa.start(*record)
    wait_for("a job that measures", lambda: bool(slurm.job("process_wildcards_1")) or first.poll() is not None, 120)
    job = slurm.job("process_wildcards_1")
    assert job, qsa.log.read_text()[-3000:]
    asked = slurm.ask("scontrol", "show", "job", job)
    for words in ("Features=v100", "TresPerJob=gres:gpu:1", "OverSubscribe=NO", "NumNodes=1", "Requeue=1"):
        assert words in asked, asked
    slurm.ask("scancel", job)
    assert first.wait(300) == 1
    assert f"go on with --resume {run}" in qsa.log.read_text()
    assert not (checkout / "data/runs/run-1").exists()
    kept = {path: path.stat().st_mtime_ns for path in (run / "cells").iterdir()}
    assert 0 < len(kept) < len(list(plans.units(recording.plan_of(str(profile)))))

    qsa.succeed(*record)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    stored = runs.Run(checkout / "data/runs/run-1")
    assert stored.manifest.host["nodes"] == sorted(NODES)
    assert set(stored.table("latency_processes")["node"]) == set(NODES)

    write_run(tmp_path / "uninterrupted", recording.plan_of(str(profile)), "run-1")
    expected = recording.assemble(tmp_path / "uninterrupted", target=tmp_path / "runs").manifest.tables
    assert {name for name, file in stored.manifest.tables.items() if file != expected[name]} == {"latency_processes"}


@pytest.mark.timeout(300)
def test_a_report_that_is_stopped_takes_its_jobs_back(
    slurm: Slurm, checkout: Path, workflow_profile: Path, tmp_path: Path
) -> None:
    qsa = Command(slurm, checkout, tmp_path / "log")
    process = qsa.start("report", "--profile", "ci", "--workflow-profile", workflow_profile)
    # What is being submitted at that moment is not taken back: the chapters that wait for no other are in the queue.
    wait_for(
        "jobs that run and wait",
        lambda: len(slurm.ask("squeue", "--noheader").splitlines()) == 6 or process.poll() is not None,
        120,
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) != 0
    wait_for("an empty queue", lambda: not slurm.ask("squeue", "--noheader").strip(), 60)


@pytest.mark.timeout(300)
def test_a_node_without_the_gpu_measures_nothing(
    slurm: Slurm, checkout: Path, workflow_profile: Path, tmp_path: Path
) -> None:
    qsa = Command(slurm, checkout, tmp_path / "log")
    run = tmp_path / "run"
    record = qsa.start("record", "--profile", "v100", "--workflow-profile", workflow_profile, "--resume", run)
    assert record.wait(240) == 1
    logs = "".join(path.read_text() for path in (checkout / ".snakemake/slurm_logs").rglob("*.log"))
    assert "error: device: this profile records a V100; this machine has " in logs
    assert not (run / "facts.json").exists()
