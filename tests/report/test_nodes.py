"""One recorded run from several nodes: who takes what, who may join, and what names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulated_run import ceiling_record, open_folder, small, write_run

from qsa_kernels.measure import environment
from qsa_kernels.measure.latency import plan as plans
from qsa_kernels.measure.latency import recorder, results, session
from qsa_kernels.report import recording, runs, tables
from qsa_kernels.report.cli import record as command

FACTS = {"device": "simulated clock", "driver": "1.2", "torch": "t", "cuda": "c", "triton": "r", "ptxas": "p"}


def measured_by(folder: Path, pattern: str, name: str, **other: str) -> None:
    """Let the pieces that fit a pattern say that a node has measured them."""
    pieces = list(folder.glob(pattern))
    assert pieces
    for path in pieces:
        session.write_json(path, session.read_json(path) | {"node": {"name": name, **FACTS, **other}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A measured run: node a has searched and taken the first process, node b the second."""
    run = tmp_path / "unfinished"
    write_run(run, small(), "run-1")
    measured_by(run, "search/*", "a")
    measured_by(run, "cells/*__p0.json.gz", "a")
    measured_by(run, "cells/*__p1.json.gz", "b")
    for node, times in (("a", 1.0), ("b", 0.5)):
        session.write_json(recorder.ceiling_path(run, node), scaled_ceiling(times, node))
    return run


def scaled_ceiling(times: float, node: str) -> dict[str, Any]:
    record = ceiling_record()
    return record | {"copy_gb_per_s": times * record["copy_gb_per_s"], "node": {"name": node, **FACTS}}


def test_each_process_is_held_against_the_copies_of_its_own_node(folder: Path, tmp_path: Path) -> None:
    processes = recording.assemble(folder, target=tmp_path / "runs").table("latency_processes")
    assert processes.set_index(["stage", "process"])["copy_gb_per_s"].to_dict() == {
        ("core", 0): 4200.0,
        ("core", 1): 2100.0,
        ("grid", 0): 4200.0,
    }


def test_a_node_without_copy_bandwidth_is_named(folder: Path, tmp_path: Path) -> None:
    recorder.ceiling_path(folder, "b").unlink()
    with pytest.raises(ValueError, match=r"no copy bandwidth of b; go on there with --resume"):
        recording.assemble(folder, target=tmp_path / "runs")


def test_a_node_measures_its_copies_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(folder)
    monkeypatch.setattr(recorder.subprocess, "Popen", workers)
    for node in ("a", "c"):
        monkeypatch.setenv("QSA_NODE", node)
        recorder.record(folder, processes=[1])
        assert ([words for words, _ in workers.started if words[0] == "ceiling"] != []) == (node == "c")


def test_a_run_of_two_nodes_names_both(folder: Path, tmp_path: Path) -> None:
    run = recording.assemble(folder, target=tmp_path / "runs")
    assert run.manifest.host["nodes"] == ["a", "b"]
    copies = {entry["node"]["name"]: entry["copy_gb_per_s"] for entry in run.manifest.host["copies"] if "node" in entry}
    assert copies == {"a": 4200.0, "b": 2100.0}
    processes = run.table("latency_processes")
    named = processes.set_index(["stage", "process"])["node"].to_dict()
    assert named == {("core", 0): "a", ("core", 1): "b", ("grid", 0): "a"}


def test_a_process_that_two_nodes_share_names_both(folder: Path, tmp_path: Path) -> None:
    measured_by(folder, "cells/core__decode-8*__p0.json.gz", "b")
    processes = recording.assemble(folder, target=tmp_path / "runs").table("latency_processes")
    assert list(processes.query("process == 0").sort_values("stage")["node"]) == ["b", "a"]


def test_the_names_of_nodes_change_no_statistics(folder: Path, tmp_path: Path) -> None:
    apart = recording.assemble(folder, target=tmp_path / "apart")
    measured_by(folder, "cells/*", "a")
    alone = recording.assemble(folder, target=tmp_path / "alone")
    for name in set(recording.TABLES) - {"latency_processes"}:
        assert apart.manifest.tables[name].sha256 == alone.manifest.tables[name].sha256, name


@pytest.mark.parametrize(
    ("pattern", "other"),
    [
        ("cells/*__p1.json.gz", {"device": "simulated clock NVL"}),
        ("cells/*__p1.json.gz", {"driver": "1.3"}),
        ("cells/*__p1.json.gz", {"ptxas": "q"}),
        ("search/*", {"device": "simulated clock NVL"}),
    ],
    ids=["device", "driver", "compiler", "searched-on-another-device"],
)
def test_nodes_that_differ_are_not_pooled(folder: Path, tmp_path: Path, pattern: str, other: dict[str, str]) -> None:
    measured_by(folder, pattern, "c", **other)
    (_, value), *_ = other.items()
    with pytest.raises(ValueError, match=rf"not pooled into one run: a.*\(.*driver 1\.2.*; .*c \(.*{value}"):
        recording.assemble(folder, target=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_without_names_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "unfinished", small(), "run-1")
    run = recording.assemble(tmp_path / "unfinished", target=tmp_path / "runs")
    assert run.manifest.host["nodes"] == [environment.NOT_AVAILABLE]
    assert set(run.table("latency_processes")["node"]) == {environment.NOT_AVAILABLE}


def test_runs_stored_without_names_are_still_read(folder: Path, tmp_path: Path) -> None:
    processes = results.load(folder)["latency_processes"].drop(columns="node")
    tables.write(processes, "latency_processes", tmp_path)
    assert "node" not in tables.read(tmp_path / "latency_processes.csv", "latency_processes")
    for path in runs.recorded_folder().glob("*/latency_processes.csv"):
        runs.Run.load(path.parent.name).table("latency_processes")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, environment.NOT_AVAILABLE),
        ({"SLURMD_NODENAME": "gpu-03"}, "gpu-03"),
        ({"SLURMD_NODENAME": "gpu-03", "QSA_NODE": "v100_b.1"}, "v100_b.1"),
        ({"QSA_NODE": ""}, environment.NOT_AVAILABLE),
    ],
    ids=["nothing", "slurm", "given", "empty"],
)
def test_names_come_from_slurm_or_from_the_user(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable in ("QSA_NODE", "SLURMD_NODENAME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    facts = recorder.node_facts()
    assert facts["name"] == name
    assert set(facts) == {"name", *FACTS}


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "two words"])
def test_a_name_that_is_no_folder_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("QSA_NODE", name)
    with pytest.raises(ValueError, match="QSA_NODE: expected letters"):
        recorder.node_name()


class Workers:
    """Stands for worker processes; keeps what they were started with."""

    started: list[tuple[list[str], str]]

    def __init__(self, run: Path) -> None:
        self.run, self.started = run, []

    def __call__(self, arguments: list[str], env: dict[str, str]) -> Any:
        self.started.append((arguments[arguments.index(str(self.run)) + 1 :], env["TRITON_CACHE_DIR"]))

        class Ended:
            def wait(self) -> int:
                return 0

        return Ended()


def test_a_node_measures_its_own_processes_with_its_own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for unit in plans.units(small()):
        (folder / unit.path).unlink()
    workers = Workers(folder)
    monkeypatch.setenv("QSA_NODE", "b")
    monkeypatch.setattr(recorder.subprocess, "Popen", workers)
    assert recorder.record(folder, processes=[1]) == 1
    assert [words for words, _ in workers.started if words[0] == "measure"] == [
        ["measure", "--group", "1", "--process", "1"]
    ]
    assert {cache for _, cache in workers.started} == {str(folder / "cache" / "b")}


def test_a_process_needs_chosen_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder(tmp_path / "run", small(), "run-1")
    workers = Workers(tmp_path / "run")
    monkeypatch.setattr(recorder.subprocess, "Popen", workers)
    with pytest.raises(RuntimeError, match=r"no launches are chosen yet; one machine does that first"):
        recorder.record(tmp_path / "run", processes=[0])
    assert workers.started == []


def test_a_search_measures_no_cell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small()
    for unit in plans.units(plan):
        (folder / unit.path).unlink()
    for path in (folder / "search").iterdir():
        path.unlink()
    workers = Workers(folder)

    def search(arguments: list[str], env: dict[str, str]) -> Any:
        if "search" in arguments:
            write_run(folder.parent / "other", plan)
            (folder / "search").rmdir()
            (folder.parent / "other/search").rename(folder / "search")
        return workers(arguments, env)

    monkeypatch.setattr(recorder.subprocess, "Popen", search)
    assert recorder.record(folder, search_only=True) == len(list(plans.units(plan)))
    tasks = [words[0] for words, _ in workers.started]
    assert tasks == ["compile"] * plan.compilers + ["search"] + ["compile"] * plan.compilers


@pytest.mark.parametrize("which", ["driver", "triton"])
def test_a_node_with_another_driver_or_compiler_cannot_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    plan = small()
    open_folder(tmp_path / "run", plan, "run-1")
    stored = json.loads((tmp_path / "run/facts.json").read_text())
    stored["device"]["name"] = "NVIDIA H200"
    (tmp_path / "run/facts.json").write_text(json.dumps(stored))
    here = json.loads(json.dumps(stored))
    here["device" if which == "driver" else "versions"][which] = "9.9"
    monkeypatch.setattr(recorder.environment, "describe", lambda: here)
    monkeypatch.setattr(recorder.protocol, "require_measurable", lambda: None)
    monkeypatch.setattr(recorder.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(recorder, "check_device", lambda *_: None)
    with pytest.raises(ValueError, match=f"begun with another {which}"):
        recorder.open_run(tmp_path / "run", plan, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"process": [4, 5, 7]}, "--process: expected 0 to 4; got 5, 7"),
        ({"process": [1], "search_only": True}, "not together with --process"),
    ],
    ids=["unknown", "both"],
)
def test_senseless_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.record("v100", **options)
