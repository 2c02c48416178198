"""`qsa record`: plans that are wrong, devices that are not there, runs that were stopped, runs that are stored."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_run import content, open_folder, record_of, small, write_run

from qsa_kernels.measure.latency import plan as plans
from qsa_kernels.measure.latency import recorder, results, session, statistics
from qsa_kernels.report import recording, runs
from qsa_kernels.report.cli import record as command
from qsa_kernels.report.tables import SCHEMAS

PROFILES = ("h200", "v100")


class TestPlan:
    @pytest.mark.parametrize("profile", PROFILES)
    def test_shipped_plans_are_right(self, profile: str) -> None:
        plan = recording.plan_of(profile)
        core = plan.stages[0]
        assert core.processes >= statistics.FULL_PROCESSES
        assert core.blocks >= statistics.FULL_BLOCKS
        wanted = {("decode", rows) for rows in (1, 4, 8, 32, 128)} | {("prefill", 512), ("prefill", 2048)}
        assert {(workload.kind, workload.rows) for workload in core.each_workload()} == wanted
        for code_path, groups in core.arms.items():
            names = {arm for group in groups for arm in group.arms}
            assert names >= {"fp16", *statistics.TWO_BY_TWO}, code_path
        grid = next(stage for stage in plan.stages if stage.name == "grid")
        assert len(list(grid.each_workload())) == 36

    @pytest.mark.parametrize("profile", PROFILES)
    def test_a_plan_survives_being_stored(self, profile: str) -> None:
        plan = recording.plan_of(profile)
        assert plans.from_mapping(json.loads(json.dumps(plans.to_mapping(plan)))) == plan

    @pytest.mark.parametrize("profile", PROFILES)
    def test_names_of_units_are_unique(self, profile: str) -> None:
        paths = [unit.path for unit in plans.units(recording.plan_of(profile))]
        assert len(set(paths)) == len(paths)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"sample_uss": 1.0}, "sample_uss"),
            ({"seed": "three"}, "seed"),
            ({"sample_us": math.nan}, "sample_us"),
            ({"gate_rows": 1.5}, "gate_rows"),
            ({"stages": [{"name": "core"}]}, "stages.0"),
        ],
        ids=["unknown", "text", "nan", "fraction", "missing"],
    )
    def test_wrong_keys_are_named(self, change: dict[str, Any], named: str) -> None:
        with pytest.raises(ValueError, match=f"profile x: .*{named}"):
            recording.checked(content() | change, "profile x")

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("blocks", 7, r"stages.core.blocks: expected an even number, at least 2, got 7"),
            ("processes", 0, r"stages.core.processes: expected at least 1, got 0"),
            ("arms", {"device": [{"arms": ["fp17"], "launches": ["best"]}]}, r"no arm 'fp17'; known: fp16"),
            ("arms", {"device": [{"arms": ["hoisted/exp2"], "launches": ["best"]}]}, "needs the arm 'fp16'"),
        ],
    )
    def test_senseless_plans_are_refused(self, key: str, value: Any, message: str) -> None:
        values = content()
        values["stages"][0][key] = value
        with pytest.raises(ValueError, match=message):
            recording.checked(values, "profile x")

    def test_a_profile_without_a_plan_says_which_have_one(self) -> None:
        with pytest.raises(ValueError, match=r"cpu.yaml, latency: .*h200, v100"):
            recording.plan_of("cpu")


class TestRefusals:
    @pytest.mark.parametrize("profile", PROFILES)
    def test_another_device_is_refused_in_one_line(self, profile: str, tmp_path: Path) -> None:
        device = profile.upper()
        if device in recorder.environment.device_facts()["name"]:
            pytest.skip(f"this machine has a {device}")
        answer = subprocess.run(
            [
                sys.executable,
                "-m",
                "qsa_kernels.report.cli",
                "record",
                "--profile",
                profile,
                "--resume",
                tmp_path / "x",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert answer.returncode == 1
        lines = answer.stderr.strip().splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(f"error: device: this profile records a {device}; this machine has ")
        assert not (tmp_path / "x").exists()

    def test_the_interpreter_writes_no_latency(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = recorder.environment.describe()
        facts["device"]["name"] = "NVIDIA H200"
        monkeypatch.setattr(recorder.environment, "describe", lambda: facts)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(RuntimeError, match="interpreter wall time is no latency"):
            recorder.open_run(tmp_path / "run", small(), {})
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"commit": "abc"}, "--commit: expected 40 hex digits; got 'abc'"),
            ({"assemble": True}, "--assemble: needs the unfinished run"),
            ({"incomplete": True}, "--incomplete: only together with --assemble"),
        ],
    )
    def test_senseless_options_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            command.record("h200", **options)


class TestResume:
    def test_finished_units_are_not_measured_again(self, tmp_path: Path) -> None:
        plan = small()
        folder = tmp_path / "run"
        open_folder(folder, plan, "run")
        every = list(plans.units(plan))
        session.write_json(folder / every[0].path, record_of(every[0], plan))
        assert recorder.open_units(folder, plan) == every[1:]
        assert not recorder.is_complete(folder)

    def test_a_killed_write_leaves_the_unit_open(self, tmp_path: Path) -> None:
        plan = small()
        unit = next(plans.units(plan))
        with pytest.raises(TypeError):
            session.write_json(tmp_path / unit.path, {"samples": object()})
        assert unit in recorder.open_units(tmp_path, plan)

    @pytest.mark.parametrize("what", ["plan", "state of what is timed", "device"])
    def test_another_plan_code_or_device_cannot_go_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        plan = small()
        folder = tmp_path / "run"
        open_folder(folder, plan, "run")
        stored = json.loads((folder / "facts.json").read_text())
        facts = recorder.environment.describe()
        facts["device"]["name"] = "NVIDIA H200" if what != "device" else "NVIDIA H200 NVL"
        stored["device"]["name"] = "NVIDIA H200"
        (folder / "facts.json").write_text(json.dumps(stored))
        monkeypatch.setattr(recorder.environment, "describe", lambda: facts)
        monkeypatch.setattr(recorder.protocol, "require_measurable", lambda: None)
        monkeypatch.setattr(recorder.torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(recorder, "check_device", lambda *_: None)
        now = plans.from_mapping(plans.to_mapping(plan) | ({"seed": 1} if what == "plan" else {}))
        if what == "state of what is timed":
            monkeypatch.setattr(recorder, "sources_sha256", lambda: "1" * 64)
        with pytest.raises(ValueError, match=f"begun with another {what}"):
            recorder.open_run(folder, now, {})

    def test_a_spent_budget_starts_no_worker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = small()
        folder = tmp_path / "run"
        open_folder(folder, plan, "run")
        monkeypatch.setattr(
            recorder.subprocess, "Popen", lambda *_, **__: pytest.fail("a worker was started without time for it")
        )
        assert recorder.record(folder, budget_s=1.0) == len(list(plans.units(plan)))

    def test_workers_get_the_group_process_and_cells(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = small()
        folder = tmp_path / "run"
        write_run(folder, plan)
        first, second, *_ = plans.units(plan)
        (folder / first.path).unlink()
        (folder / second.path).unlink()
        started = []

        class Worker:
            def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
                assert env["TRITON_CACHE_DIR"] == str(folder / "cache")
                started.append(arguments[arguments.index(str(folder)) + 1 :])

            def wait(self) -> int:
                return 0

        monkeypatch.setattr(recorder.subprocess, "Popen", Worker)
        assert recorder.record(folder, patterns=["core"]) == 2
        measured = [arguments for arguments in started if arguments[0] == "measure"]
        cells = ["--cells", "core"]
        assert measured == [["measure", "--group", "1", "--process", str(p), *cells] for p in (0, 1)]

    def test_a_failed_worker_is_an_error_that_keeps_results(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = small()
        folder = tmp_path / "run"
        write_run(folder, plan)
        unit = next(plans.units(plan))
        (folder / unit.path).unlink()

        class Worker:
            def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
                self.code = 0 if "compile" in arguments else 1

            def wait(self) -> int:
                return self.code

        monkeypatch.setattr(recorder.subprocess, "Popen", Worker)
        with pytest.raises(RuntimeError, match="group 1, process 0: the worker process ended with 1"):
            recorder.record(folder)


class TestAssemble:
    def test_a_complete_run_is_stored_and_read_through_the_schemas(self, tmp_path: Path) -> None:
        folder = tmp_path / "unfinished"
        write_run(folder, small(), "run-1")
        run = recording.assemble(folder, target=tmp_path / "runs")
        assert run.folder == tmp_path / "runs" / "run-1"
        assert set(run.manifest.tables) == set(recording.TABLES) <= set(SCHEMAS)
        assert run.manifest.commit == "0" * 40
        assert run.manifest.device["name"] == "simulated clock"
        assert run.manifest.seed == small().seed
        cells = run.table("latency_cells")
        assert cells["verdict"].isin(statistics.VERDICTS).all()
        wrong, copies = results.false_positives(cells)
        assert wrong <= 0.05 * copies
        effects = run.table("latency_effects")
        assert set(effects["effect"]) == {"decoder", "placement", "interaction"}
        assert len(run.table("latency_samples")) == 13 * (2 * 6 + 4)
        assert recording.newest(tmp_path / "runs") == "run-1"

    def test_the_same_samples_give_the_same_tables(self, tmp_path: Path) -> None:
        folder = tmp_path / "unfinished"
        write_run(folder, small(), "run-1")
        first, second = (recording.assemble(folder, target=tmp_path / name) for name in ("a", "b"))
        assert first.manifest.tables == second.manifest.tables

    def test_open_cells_need_a_word(self, tmp_path: Path) -> None:
        folder = tmp_path / "unfinished"
        plan = small()
        write_run(folder, plan, "run-1")
        for unit in plans.units(plan):
            if unit.stage.name == "grid":
                (folder / unit.path).unlink()
        with pytest.raises(ValueError, match="1 cells are still open"):
            recording.assemble(folder, target=tmp_path / "runs")
        assert not (tmp_path / "runs").exists()
        cells = recording.assemble(folder, incomplete=True, target=tmp_path / "runs").table("latency_cells")
        missing = cells[cells["stage"] == "grid"]
        assert set(missing["status"]) == {"not_measured"}
        assert set(missing["reason"]) == {"not reached within the time of this run"}
        assert set(missing["verdict"]) == {"not measurable"}

    def test_a_stored_run_is_not_replaced(self, tmp_path: Path) -> None:
        folder = tmp_path / "unfinished"
        write_run(folder, small(), "run-1")
        recording.assemble(folder, target=tmp_path / "runs")
        with pytest.raises(FileExistsError):
            recording.assemble(folder, target=tmp_path / "runs")

    def test_a_folder_without_a_plan_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no plan.json"):
            recording.assemble(tmp_path)

    def test_no_recorded_run_is_none(self, tmp_path: Path) -> None:
        assert recording.newest(tmp_path) is None


@pytest.mark.parametrize("run_id", sorted(path.name for path in runs.recorded_folder().glob("latency-*")) or [None])
def test_recorded_runs_hold_what_they_promise(run_id: str | None) -> None:
    if run_id is None:
        pytest.skip("no latency run is recorded yet")
    run = runs.Run.load(run_id)
    cells = run.table("latency_cells")
    assert cells["verdict"].isin(statistics.VERDICTS).all()
    wrong, copies = results.false_positives(cells)
    assert wrong <= 0.05 * copies
    gates = run.table("latency_gates")
    red = set(
        gates[gates["status"] != "passed"][["stage", "workload", "code_path", "arm", "launch"]].itertuples(index=False)
    )
    passed = cells[cells["status"] == "passed"][["stage", "workload", "code_path", "arm", "launch"]]
    assert not red & set(passed.itertuples(index=False))
