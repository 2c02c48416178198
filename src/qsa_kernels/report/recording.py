"""Recorded latency runs: from a profile to an unfinished run folder, and from there to data/runs/."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from qsa_kernels.measure.latency import plan as plans
from qsa_kernels.measure.latency.plan import Plan
from qsa_kernels.report import profiles, repository

if TYPE_CHECKING:
    import pandas as pd

    from qsa_kernels.report.runs import Run

CHAPTER = "latency"
TABLES = (
    "latency_samples",
    "latency_gates",
    "latency_workloads",
    "latency_processes",
    "launch_search",
    "latency_cells",
    "latency_pairs",
    "latency_effects",
)
NEWEST = "recorded:newest"


def plan_of(profile: str) -> Plan:
    """The latency plan of a profile, checked.

    Raises:
        FileNotFoundError: no such profile.
        ValueError: the profile has no section `latency`, or names every key in it that is wrong.
    """
    content = profiles.load(profile).latency
    where = f"profile {profiles.path_of(profile).name}, latency"
    if not content:
        raise ValueError(f"{where}: the profile has no such section; profiles that record: h200, v100")
    return checked(content, where)


def checked(content: Mapping[str, Any], where: str) -> Plan:
    """A plan from plain data; what YAML holds is held against the types as JSON is."""
    try:
        return TypeAdapter(Plan).validate_json(json.dumps(content)).check()
    except ValidationError as error:
        lines = [
            f"key {'.'.join(str(part) for part in problem['loc']) or '(whole)'!r}: {problem['msg']}; "
            f"got {problem['input']!r}"
            for problem in error.errors(include_url=False)
        ]
        raise ValueError(f"{where}: " + "; ".join(lines)) from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def process_numbers(plan: Plan) -> range:
    """Numbers of the fresh processes of a plan."""
    return range(max(stage.processes for stage in plan.stages))


def unfinished_folder(profile: str) -> Path:
    """A new folder for a run that is being measured; ignored by git."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return repository.root() / "runs" / "unfinished" / f"{CHAPTER}-{profiles.path_of(profile).stem}-{stamp}"


def record(
    profile: str,
    *,
    folder: Path | None = None,
    cells: Sequence[str] = (),
    processes: Sequence[int] = (),
    search_only: bool = False,
    budget_s: float | None = None,
    commit: str | None = None,
) -> tuple[Path, int]:
    """Measure on the machine at hand, or go on with a run that was stopped.

    Args:
        profile: name or path of the profile.
        folder: an unfinished run to go on with; default: a new one.
        cells: patterns of "stage/workload/code_path"; a bare word names a stage; default: everything.
        processes: numbers of the fresh processes to measure; default: all.
        search_only: stop when the launches are chosen and compiled.
        budget_s: stop between two cells when this many seconds have passed.
        commit: of the checkout, where git cannot tell.

    Returns:
        the folder and the number of wanted cells (workload, code path and process) that are still open.

    Raises:
        ValueError: a profile that is wrong, one for another device than the present one, or a process that the plan
            does not have.
        RuntimeError: nothing can be measured here.
    """
    plan = plan_of(profile)
    known_processes = process_numbers(plan)
    if unknown := sorted(set(processes) - set(known_processes)):
        raise ValueError(
            f"--process: expected 0 to {known_processes[-1]}; got {', '.join(str(number) for number in unknown)}"
        )
    # torch takes seconds to import: only for a profile that is right
    from qsa_kernels.measure.latency import recorder

    provenance = repository.provenance()
    if commit is not None and provenance["commit"] == repository.NOT_AVAILABLE:
        provenance |= {"commit": commit, "dirty": repository.NOT_AVAILABLE}
    known = folder or unfinished_folder(profile)
    provenance |= {
        "run_id": known.name,
        "profile": profiles.path_of(profile).stem,
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    recorder.open_run(known, plan, provenance)
    still_open = recorder.record(known, patterns=cells, processes=processes, search_only=search_only, budget_s=budget_s)
    return known, still_open


def assemble(folder: Path, *, incomplete: bool = False, target: Path | None = None) -> Run:
    """Judge the samples of a measured run and store it under data/runs/, in one step.

    Args:
        folder: the unfinished run.
        incomplete: accept open cells; they are stored as not measured.
        target: parent of the run folder; default: data/runs.

    Raises:
        ValueError: open cells without `incomplete`, a folder without results, or nodes that differ.
        FileExistsError: the run is stored already.
    """
    from qsa_kernels.measure.latency import recorder, results
    from qsa_kernels.report import runs

    if not (folder / recorder.PLAN_FILE).is_file():
        raise ValueError(f"{folder}: no {recorder.PLAN_FILE}; expected a folder that 'qsa record' made")
    plan = recorder.stored_plan(folder)
    missing = recorder.open_units(folder, plan)
    if missing and not incomplete:
        raise ValueError(
            f"{folder}: {len(missing)} cells are still open; go on with --resume, or store it with --incomplete"
        )
    raw = results.load(folder)
    tables = results.analyse(raw, plan)
    if missing:
        tables["latency_cells"] = results.with_open_units(tables["latency_cells"], missing)
    facts = results.facts(folder)
    facts["host"]["nodes"] = sorted(raw["latency_processes"]["node"].unique())
    facts["host"]["copies"] = results.ceilings(folder)
    known = facts["provenance"]
    return runs.store(
        {name: tables[name] for name in TABLES},
        run_id=known["run_id"],
        chapter=CHAPTER,
        profile=known["profile"],
        parameters=plans.to_mapping(plan),
        environment=facts,
        executed_on="cuda",
        started=known["started"],
        wall_time_s=float(raw["latency_processes"]["seconds"].sum()),
        seed=plan.seed,
        provenance=known,
        folder=target,
    )


def newest(folder: Path | None = None, *, table: str = "latency_cells") -> str | None:
    """Id of the newest recorded run that holds `table`, None if there is none."""
    from qsa_kernels.report import runs

    found = []
    for path in (folder or runs.recorded_folder()).glob("*/manifest.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if table in record.get("tables", {}):
            found.append((record["started"], record["run_id"]))
    return max(found)[1] if found else None


def live(profile: str, *, cells: Sequence[str], budget_s: float) -> dict[str, pd.DataFrame]:
    """Tables of a measurement made now, not stored.

    Raises:
        ValueError: as `record`, or nothing was finished within the budget.
        RuntimeError: as `record`.
    """
    from qsa_kernels.measure.latency import recorder, results

    with tempfile.TemporaryDirectory(prefix="qsa-latency-") as work:
        folder, _ = record(profile, folder=Path(work) / "run", cells=cells, budget_s=budget_s)
        plan = recorder.stored_plan(folder)
        return results.analyse(results.load(folder), plan)
