"""Where jobs run: profiles for a cluster, what they ask for, and what the machine that sends them checks first."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from qsa_kernels.report import cluster, device, recording, runs, workflow, yamlfile
from qsa_kernels.report.cli import record as command
from qsa_kernels.report.repository import root

GPU_RULES = {"gpu_notebook", "timed_notebook", "search", "process"}
TIMED_RULES = GPU_RULES - {"gpu_notebook"}


def profile() -> dict[str, Any]:
    return yamlfile.load(cluster.workflow_folder() / "profiles/slurm/config.yaml")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that can submit."""
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: types.SimpleNamespace(name=name))
    monkeypatch.setattr(cluster.shutil, "which", lambda name: f"/usr/bin/{name}")


class TestPlace:
    def test_the_shipped_profiles_are_here_and_on_slurm(self, plugin: None) -> None:
        assert not cluster.place("local").is_elsewhere
        assert cluster.place("slurm").is_elsewhere
        assert cluster.place("slurm").executor == "slurm"

    def test_a_users_copy_is_named_by_its_folder(self, plugin: None, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("executor: slurm\n")
        assert cluster.place(str(tmp_path)) == cluster.Place(tmp_path, "slurm")

    def test_an_unknown_profile_names_the_known_ones(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no workflow profile 'slrum'; known: local, slurm, or a folder"):
            cluster.place("slrum")
        with pytest.raises(FileNotFoundError, match=r"holds a config\.yaml"):
            cluster.place(str(tmp_path))

    def test_a_profile_without_keys_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("- executor\n")
        with pytest.raises(ValueError, match=r"config.yaml: expected keys and values; got list"):
            cluster.place(str(tmp_path))

    def test_a_missing_plugin_says_what_installs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda _: None)
        with pytest.raises(ValueError, match="needs the package snakemake-executor-plugin-slurm; 'make install-slurm'"):
            cluster.place("slurm")

    def test_a_machine_that_cannot_submit_says_so(self, plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cluster.shutil, "which", lambda _: None)
        with pytest.raises(ValueError, match="no sbatch here"):
            cluster.place("slurm")

    def test_one_bad_word_ends_with_one_line(self) -> None:
        for words in (["report"], ["record", "--profile", "v100"]):
            answer = subprocess.run(
                [sys.executable, "-m", "qsa_kernels.report.cli", *words, "--workflow-profile", "slrum"],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert answer.returncode == 1
            assert answer.stderr.startswith("error: no workflow profile 'slrum'")
            assert answer.stderr.count("\n") == 1


class TestAskedFor:
    def test_gpu_rules_have_a_model_and_timed_ones_a_whole_node(self) -> None:
        asked = profile()["set-resources"]
        assert set(asked) == GPU_RULES
        assert {rule["constraint"] for rule in asked.values()} == {"v100"}
        exclusive = {name for name, rule in asked.items() if "--exclusive" in rule.get("slurm_extra", "")}
        assert exclusive == TIMED_RULES

    def test_a_node_that_fails_is_left_and_bad_ones_can_be_named(self) -> None:
        assert profile()["slurm-requeue"] is True
        text = (cluster.workflow_folder() / "profiles/slurm/config.yaml").read_text()
        options = [line.removeprefix("# ") for line in text.splitlines() if re.match(r"\s*# [a-z_-]+: ", line)]
        named = [line.split(":")[0].strip(" #") for line in options]
        assert named == ["slurm-exclude-failed-nodes", "slurm_partition", "slurm_account"]

    def test_what_is_left_out_can_be_set(self, tmp_path: Path) -> None:
        """The lines of the profile that a user fills in are right as they stand."""
        text = (cluster.workflow_folder() / "profiles/slurm/config.yaml").read_text()
        filled = re.sub(r"^(\s*)# ([a-z_-]+: )", r"\1\2", text, flags=re.MULTILINE)
        (tmp_path / "config.yaml").write_text(filled)
        content = yamlfile.load(tmp_path / "config.yaml")
        assert content["slurm-exclude-failed-nodes"] == "node07,node12"
        assert set(content["default-resources"]) == {"slurm_partition", "slurm_account", "runtime", "mem_mb"}

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["report", "recording"])
    def test_snakemake_plans_one_gpu_a_job(self, kind: str, tmp_path: Path) -> None:
        """A dry run without the executor, which needs a Slurm: rules and resources are those of the cluster."""
        content = {key: value for key, value in profile().items() if not re.match("executor|slurm-|jobs$", key)}
        where = tmp_path / "profile"
        where.mkdir()
        (where / "config.yaml").write_text(json.dumps(content))
        if kind == "report":
            jobs = workflow.plan_report("v100", elsewhere=True)
            workflow.prepare(jobs, tmp_path / "jobs", tmp_path / "pages")
            config = {"jobs": tmp_path / "jobs", "pages": tmp_path / "pages"}
            expected = {"gpu_notebook": len(jobs) - 1, "timed_notebook": 1}
        else:
            config = {"run": tmp_path / "run", "profile": "v100.yaml", "processes": 5, "commit": "not available"}
            expected = {"search": 1, "process": 5}
        snakefile = cluster.workflow_folder() / ("Snakefile" if kind == "report" else "record.smk")
        told = [f"{key}={value}" for key, value in config.items()]
        options = ["--snakefile", snakefile, "--workflow-profile", where, "--config", *told]
        answer = subprocess.run(
            [sys.executable, "-m", "snakemake", "--dry-run", "--cores", "8", *options],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
            check=True,
        )
        planned = re.findall(r"^rule (\w+):\n(.*?)(?=^\[|\Z)", answer.stdout + answer.stderr, re.MULTILINE | re.DOTALL)
        found = {rule: [text for name, text in planned if name == rule] for rule, _ in planned if rule != "all"}
        assert {rule: len(texts) for rule, texts in found.items()} == expected
        for rule, texts in found.items():
            for text in texts:
                asked = next(line for line in text.splitlines() if "resources:" in line)
                assert re.search(r"\bgpu=1\b", asked)
                assert "constraint=v100" in asked
                assert ("slurm_extra=--exclusive" in asked) == (rule in TIMED_RULES)


class TestElsewhere:
    def test_a_machine_without_a_gpu_plans_for_one_that_has(self) -> None:
        assert device.resolve("cuda", elsewhere=True) == "cuda"
        assert device.resolve("interpreter", elsewhere=True) == "interpreter"
        assert {job.device for job in workflow.plan_report("v100", elsewhere=True)} == {"cuda"}

    def test_auto_says_nothing_about_another_machine(self) -> None:
        with pytest.raises(ValueError, match="the profile names interpreter or cuda; got auto"):
            device.resolve("auto", elsewhere=True)

    def test_what_other_machines_have_begun_is_left_alone(self, tmp_path: Path) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        own, other = (tmp_path / f".partial-{node}-{gone.pid}-ab" for node in (platform.node(), "another-node"))
        running = tmp_path / f".partial-{platform.node()}-{os.getpid()}-cd"
        for folder in (own, other, running):
            folder.mkdir()
        with runs.staged(tmp_path / "run"):
            pass
        assert {path.name for path in tmp_path.iterdir()} == {other.name, running.name, "run"}


class TestRecord:
    @pytest.mark.parametrize("option", [{"cells": ["core"]}, {"process": [1]}, {"assemble": True}, {"budget_s": 5.0}])
    def test_a_cluster_measures_everything(self, option: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="--workflow-profile: measures everything"):
            command.record("v100", workflow_profile="slurm", **option)

    def test_a_failed_job_says_how_to_go_on(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        told: dict[str, Any] = {}

        def fail(config: dict[str, Any], **options: Any) -> None:
            told.update(config, **options)
            raise workflow.WorkflowError("failed")

        monkeypatch.setattr(workflow, "snakemake", fail)
        with pytest.raises(workflow.WorkflowError, match=rf"failed; go on with --resume {tmp_path}/run"):
            workflow.record("v100", "local", tmp_path / "run")
        assert told["run"] == tmp_path / "run"
        assert told["profile"] == root() / "notebooks/profiles/v100.yaml"
        assert told["processes"] == len(recording.process_numbers(recording.plan_of("v100")))
        assert told["snakefile"] == "record.smk"

    def test_two_recordings_into_one_folder_are_refused(self, tmp_path: Path) -> None:
        with (
            workflow.exclusive(tmp_path),
            pytest.raises(workflow.WorkflowError, match=f"another recording into {tmp_path}"),
        ):
            workflow.record("v100", "local", tmp_path)
