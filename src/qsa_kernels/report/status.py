"""What the pages of this book were made by: facts, runs and checksums, as tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from qsa_kernels.report import repository, runs


def facts(environment: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row a fact of `measure.environment.describe()`; unknown ones are marked as not measured."""
    rows = []
    for group, values in environment.items():
        for name, value in values.items():
            known = value != repository.NOT_AVAILABLE
            status, reason = ("passed", "") if known else ("not_measured", "this machine or its driver does not tell")
            rows.append((group, name, str(value), status, reason))
    return pd.DataFrame(rows, columns=["group", "fact", "value", "status", "reason"])


def run_table(chapters: Iterable[str]) -> pd.DataFrame:
    """One row a chapter: the run that its published page shows.

    Args:
        chapters: names.
    """
    rows: list[tuple[object, ...]] = []
    for chapter in chapters:
        try:
            record = runs.published(chapter).manifest
        except (OSError, ValueError) as error:
            rows.append((chapter, "none", "none", "none", "none", "none", None, "not_measured", str(error)))
            continue
        device = record.executed_on if record.executed_on == "interpreter" else record.device["name"]
        commit = repository.describe_commit(record.commit, record.dirty).removeprefix("commit ")
        rows.append(
            (chapter, record.run_id, record.profile, device, record.started, commit, record.wall_time_s, "passed", "")
        )
    columns = ["chapter", "run", "profile", "device", "started_utc", "commit", "wall_time_s", "status", "reason"]
    return pd.DataFrame(rows, columns=columns).astype({"wall_time_s": float})


def checksums(chapters: Iterable[str]) -> pd.DataFrame:
    """One row a stored table of the published pages, with its SHA-256.

    Args:
        chapters: names; those without a published page have no rows.
    """
    rows = []
    for chapter in chapters:
        try:
            record = runs.published(chapter).manifest
        except (OSError, ValueError):
            continue
        rows += [(chapter, name, stored.sha256, "passed", "") for name, stored in sorted(record.tables.items())]
    return pd.DataFrame(rows, columns=["chapter", "table", "sha256", "status", "reason"]).astype(str)


def installed_gb() -> float:
    """Size of the Python environment that runs this, in 10^9 bytes, rounded to tenths."""
    sizes = (path.lstat().st_size for path in Path(sys.prefix).rglob("*") if path.is_file() and not path.is_symlink())
    return round(sum(sizes) / 1e9, 1)
