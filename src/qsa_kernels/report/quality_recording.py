"""Recorded quality runs: the same measures on a GPU, with the kernels in the model's forward."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from qsa_kernels.report import profiles, repository
from qsa_kernels.report.parameters import QualityParameters, validated

if TYPE_CHECKING:
    import pandas as pd

    from qsa_kernels.report.runs import Run

CHAPTER = "quality"
TABLES = (
    "quality_documents",
    "quality_effects",
    "quality_attention",
    "quality_selection",
    "quality_needles",
    "quality_kernel",
)
FACTS_FILE = "facts.json"


def parameters_of(profile: str) -> QualityParameters:
    """What a profile measures; it has to name every parameter of the chapter.

    Raises:
        FileNotFoundError: no such profile.
        ValueError: the profile has no plan for the chapter, or names each parameter that is wrong or missing.
    """
    where = f"profile {profiles.path_of(profile).name}, chapter {CHAPTER!r}"
    plan = profiles.load(profile).chapters.get(CHAPTER)
    if plan is None:
        raise ValueError(f"{where}: the profile has no such chapter")
    checked = validated(QualityParameters, plan.values(), where)
    assert isinstance(checked, QualityParameters)
    return checked


def record(profile: str, *, commit: str | None = None) -> Path:
    """Measure on the CUDA device at hand and leave the tables in an unfinished run folder.

    Args:
        profile: name or path of the profile.
        commit: of the checkout, where git cannot tell.

    Raises:
        ValueError: a profile that is wrong, or no CUDA device.
        FileNotFoundError: the model or a text is missing.
    """
    parameters = parameters_of(profile)
    import torch

    from qsa_kernels.measure import environment
    from qsa_kernels.measure.quality import record_tables
    from qsa_kernels.report.progress import track

    if not torch.cuda.is_available():
        raise ValueError("device: recording needs a CUDA device; the chapter itself measures on the CPU")
    provenance = repository.provenance()
    if commit is not None and provenance["commit"] == repository.NOT_AVAILABLE:
        provenance |= {"commit": commit}
    begin, started = time.monotonic(), datetime.now(UTC)
    tables = record_tables("cuda", parameters.plan(), track)
    stamp = started.strftime("%Y%m%dT%H%M%SZ")
    folder = repository.root() / "runs" / "unfinished" / f"{CHAPTER}-{profiles.path_of(profile).stem}-{stamp}"
    folder.mkdir(parents=True)
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    facts = {
        **environment.describe(),
        "provenance": provenance,
        "profile": profiles.path_of(profile).stem,
        "parameters": parameters.model_dump(mode="json"),
        "started": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "wall_time_s": round(time.monotonic() - begin, 3),
    }
    # Written last: a folder with facts is complete.
    text = json.dumps(facts, indent=2, sort_keys=True, allow_nan=False)
    (folder / FACTS_FILE).write_text(text + "\n", encoding="utf-8")
    return folder


def assemble(folder: Path, *, target: Path | None = None) -> Run:
    """Check the tables of a measured run and store it under data/runs/, in one step.

    Args:
        folder: from `record`.
        target: parent of the run folder; default: data/runs.

    Raises:
        ValueError: not a complete folder of that kind, or a table that breaks its schema.
        FileExistsError: the run is stored already.
    """
    from qsa_kernels.report import runs
    from qsa_kernels.report import tables as schemas

    if not (folder / FACTS_FILE).is_file():
        raise ValueError(f"{folder}: no {FACTS_FILE}; expected a folder that 'qsa record-quality' made")
    facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    frames: dict[str, pd.DataFrame] = {name: schemas.read(folder / f"{name}.csv", name) for name in TABLES}
    return runs.store(
        frames,
        run_id=folder.name,
        chapter=CHAPTER,
        profile=facts["profile"],
        parameters=facts["parameters"],
        environment=facts,
        executed_on="cuda",
        started=facts["started"],
        wall_time_s=facts["wall_time_s"],
        seed=facts["parameters"]["seed"],
        provenance=facts["provenance"],
        folder=target,
    )
