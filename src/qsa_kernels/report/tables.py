"""Schemas of every table that the report stores or shows; checked at write and at read."""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import pandera.pandas as pa

STATUSES = ("passed", "failed", "skipped", "not_measured")


def _reason_given(table: pd.DataFrame) -> pd.Series:
    return (table["status"] == "passed") | (table["reason"].str.len() > 0)


def _finite_where_passed(names: Sequence[str]) -> pa.Check:
    def check(table: pd.DataFrame) -> pd.Series:
        return (table["status"] != "passed") | table[list(names)].notna().all(axis=1)

    return pa.Check(check, name="measured_where_passed", error=f"a passed row needs a value in each of {list(names)}")


def schema(columns: Mapping[str, pa.Column], *, measured: Sequence[str] = ()) -> pa.DataFrameSchema:
    """A schema with the columns that every table has: `status` and `reason`.

    Args:
        columns: the table's own columns by name, units in the name.
        measured: columns that may be empty only where `status` is not "passed".
    """
    checks = [pa.Check(_reason_given, name="reason_given", error="a row that did not pass needs a reason")]
    if measured:
        checks.append(_finite_where_passed(measured))
    base = {"status": pa.Column(str, pa.Check.isin(STATUSES)), "reason": pa.Column(str)}
    return pa.DataFrameSchema({**columns, **base}, checks=checks, strict=True, unique_column_names=True)


def number(*checks: pa.Check) -> pa.Column:
    """A float column that may be empty where nothing was measured."""
    return pa.Column(float, list(checks) or None, nullable=True)


def label(*allowed: str) -> pa.Column:
    """A text column; with `allowed`, one of those words."""
    return pa.Column(str, pa.Check.isin(allowed) if allowed else None)


def count(minimum: int = 0) -> pa.Column:
    """An integer column from `minimum` up."""
    return pa.Column(int, pa.Check.ge(minimum))


SCHEMAS: dict[str, pa.DataFrameSchema] = {
    "example_cells": schema({"label": label(), "rows": count(1), "square": number()}, measured=["square"]),
}


def validate(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The table, if it satisfies the schema `name`.

    Raises:
        ValueError: no such schema, or the rows and columns that break it.
    """
    if name not in SCHEMAS:
        raise ValueError(f"no schema for table {name!r}; known: {', '.join(sorted(SCHEMAS))}")
    try:
        return SCHEMAS[name].validate(table.reset_index(drop=True), lazy=True)
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases[["column", "check", "failure_case", "index"]].head(10)
        raise ValueError(f"table {name!r} does not satisfy its schema:\n{cases.to_string(index=False)}") from None


def file_name(name: str) -> str:
    """CSV, compressed where the table holds raw samples."""
    return f"{name}.csv.gz" if name.endswith("_samples") else f"{name}.csv"


def write(table: pd.DataFrame, name: str, folder: Path) -> Path:
    """Check the table against its schema and write it, the same bytes for the same values.

    Raises:
        ValueError: the table does not satisfy the schema `name`.
    """
    text = validate(table, name).to_csv(index=False, lineterminator="\n").encode()
    path = folder / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as file:
            file.write(text)
        text = buffer.getvalue()
    path.write_bytes(text)
    return path


def read(path: Path, name: str) -> pd.DataFrame:
    """Read a table that `write` wrote and check it against its schema.

    Raises:
        ValueError: the file does not satisfy the schema `name`.
    """
    if name not in SCHEMAS:
        raise ValueError(f"no schema for table {name!r}; known: {', '.join(sorted(SCHEMAS))}")
    # An empty text cell is an empty text, an empty number is a missing one.
    dtypes = {column: str(spec.dtype) for column, spec in SCHEMAS[name].columns.items()}
    texts = {column for column, dtype in dtypes.items() if dtype in ("str", "object", "string")}
    frame = pd.read_csv(
        path,
        dtype={column: (object if column in texts else dtype) for column, dtype in dtypes.items()},
        keep_default_na=False,
        na_values={column: [""] for column in dtypes if column not in texts},
        float_precision="round_trip",
    )
    return validate(frame, name)


def text_of(value: object) -> str:
    """How a cell of a shown table reads: four significant digits, an empty cell as a dash."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
