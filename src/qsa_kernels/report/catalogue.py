"""What of this repository can be downloaded from the book: tables, their checksums, columns and units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pandera.pandas as pa

from qsa_kernels import launch
from qsa_kernels.report import repository, runs, tables

# The unit is the end of a column's name; the longest that fits counts.
UNITS = {
    "_us": "µs",
    "_ms": "ms",
    "_s": "s",
    "_mhz": "MHz",
    "_gb_per_s": "GB/s",
    "_bytes": "bytes",
    "_bytes_per_token": "bytes a token",
    "_mib": "MiB",
    "_gib": "GiB",
    "_tokens": "tokens",
    "_percent": "%",
    "_ppm": "parts in a million",
    "_nats": "nats",
    "bytes_fp16": "bytes",
    "bytes_e4m3": "bytes",
    "seconds": "s",
    "_utc": "UTC",
    "_per_element": "instructions an element",
    "_cycles_per_tile": "cycles a tile",
    "_cycles_per_token": "cycles a token",
    "log_ratio": "natural logarithm of a ratio",
    "log_ratio_low": "natural logarithm of a ratio",
    "log_ratio_high": "natural logarithm of a ratio",
}
_TYPES = {"str": "text", "object": "text", "float64": "number", "int64": "whole number", "Int64": "whole number"}
_TYPES |= {"bool": "true or false", "boolean": "true or false"}


def unit(column: str) -> str:
    """Unit of a column by its name; "none" for words, counts, errors and ratios."""
    fitting = [end for end in UNITS if column.endswith(end) or column == end.removeprefix("_")]
    return UNITS[max(fitting, key=len)] if fitting else "none"


def kept() -> list[Path]:
    """Tables that are kept by hand: public figures with their sources, and logs of this project."""
    data = repository.root() / "data"
    return sorted([*data.glob("reported/*.csv"), *data.glob("*.csv")])


def recorded() -> list[runs.Run]:
    """Recorded runs by name, their hashes checked.

    Raises:
        ValueError, FileNotFoundError: a run whose files are not those of its manifest.
    """
    return [runs.Run(path.parent) for path in sorted(runs.recorded_folder().glob("*/manifest.json"))]


def downloads() -> Iterator[Path]:
    """Every file that the tables of this module link to and that no chapter brings along."""
    yield from kept()
    for run in recorded():
        yield run.folder / "manifest.json"
        yield from (run.folder / stored.file for stored in run.manifest.tables.values())


def _content(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A table, and how it is described."""
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    return frame, {"rows": len(frame), "bytes": path.stat().st_size, "sha256": repository.sha256(path)}


def kept_table(up: str) -> pd.DataFrame:
    """One row a table that is kept by hand, with the sources that its rows name.

    Args:
        up: from the page to the root of the book, such as "../".
    """
    rows = []
    for path in kept():
        frame, facts = _content(path)
        name = path.relative_to(repository.root()).as_posix()
        column = next(name for name in ("source_url", "source", "commit", "evidence") if name in frame)
        rows.append(
            {"download": f"{up}{name}", "columns": ", ".join(frame.columns), "source_in_column": column, **facts}
        )
    return pd.DataFrame(rows)


def source_table() -> pd.DataFrame:
    """One row a public source of the figures in data/reported, with how many of them it gives."""
    found: dict[str, Counter[str]] = {}
    for path in kept():
        frame, _ = _content(path)
        for cell in frame.get("source_url", []):
            for address in cell.split(", "):
                found.setdefault(address, Counter())[path.stem] += 1
    rows = [
        {"source": address, "figures": counts.total(), "about": ", ".join(sorted(counts))}
        for address, counts in sorted(found.items())
    ]
    return pd.DataFrame(rows)


def launch_table() -> pd.DataFrame:
    """One row a line of a launch profile, in the order in which they are tried."""
    rows = []
    for profile in launch.PROFILES.values():
        parts = {"fp16": profile.tiers, "e4m3": profile.quantised_tiers} if profile.quantised_tiers else {}
        for cache, tiers in (parts or {"any": profile.tiers}).items():
            for tier in tiers:
                most = "any number" if tier.max_programs is None else f"up to {tier.max_programs}"
                if tier.max_programs_wide:
                    most += f", {tier.max_programs_wide} with more than eight query heads a KV head"
                if tier.only_for:
                    most += " with {} query heads a KV head of {} elements".format(*tier.only_for)
                row: dict[str, Any] = {"profile": profile.name, "cache": cache}
                row |= {"rows_times_kv_heads": most, "block_n": tier.block_n, "most_splits": tier.target_splits}
                row |= {"num_warps": tier.num_warps, "num_stages": tier.num_stages}
                row["transposed"] = "yes" if profile.transposed else "no"
                rows.append(row)
    return pd.DataFrame(rows)


def profile_table() -> pd.DataFrame:
    """One row a launch profile, with the source of its numbers."""
    rows = [
        {"profile": profile.name, "contraction": profile.contraction, "source": profile.source}
        for profile in launch.PROFILES.values()
    ]
    return pd.DataFrame(rows)


def recorded_table(up: str) -> pd.DataFrame:
    """One row a table of a recorded run.

    Args:
        up: as for `kept_table`.
    """
    rows = []
    for run in recorded():
        record = run.manifest
        folder = f"{up}data/runs/{record.run_id}"
        about = {"run": record.run_id, "device": str(record.device["name"]), "date": record.started[:10]}
        rows.append({**about, "download": f"{folder}/manifest.json", "rows": pd.NA})
        rows[-1] |= {"bytes": (path := run.folder / "manifest.json").stat().st_size, "sha256": repository.sha256(path)}
        for _, stored in sorted(record.tables.items()):
            facts = _content(run.folder / stored.file)[1]
            rows.append({**about, "download": f"{folder}/{stored.file}", **facts})
    return pd.DataFrame(rows).astype({"rows": "Int64"})


def published_table(chapters: list[str], up: str) -> pd.DataFrame:
    """One row a table that a chapter shows.

    Args:
        chapters: names, in the order of the book.
        up: as for `kept_table`.
    """
    rows = []
    for chapter in chapters:
        run = runs.published(chapter)
        for name, stored in sorted(run.manifest.tables.items()):
            file = Path(stored.file).name
            facts = _content(run.folder / stored.file)[1]
            rows.append({"chapter": chapter, "table": name, "download": f"{up}book/results/{chapter}/{file}", **facts})
    return pd.DataFrame(rows)


def column_table(names: set[str]) -> pd.DataFrame:
    """One row a column of these tables, without the `status` and `reason` that all have.

    Args:
        names: of tables, keys of `tables.SCHEMAS`.
    """
    rows = []
    for name in sorted(names):
        has_units = "unit" in tables.SCHEMAS[name].columns
        for column, spec in tables.SCHEMAS[name].columns.items():
            if column in ("status", "reason"):
                continue
            kind = _TYPES[str(spec.dtype)]
            named = "in column unit" if has_units and kind == "number" and unit(column) == "none" else unit(column)
            rows.append({"table": name, "column": column, "type": kind, "unit": named})
            rows[-1]["values"] = "; ".join(_words(check) for check in spec.checks) or "any"
            rows[-1]["may_be_empty"] = "yes" if spec.nullable else "no"
    return pd.DataFrame(rows)


def _words(check: pa.Check) -> str:
    """What a check asks for."""
    facts = check.statistics or {}
    if "allowed_values" in facts:
        return ", ".join(map(str, facts["allowed_values"]))
    if check.name == "in_range":
        return f"{facts['min_value']} to {facts['max_value']}"
    if "min_value" in facts:
        return f"{'above' if check.name == 'greater_than' else 'from'} {facts['min_value']}"
    raise ValueError(f"no words for the check {check.name!r}")
