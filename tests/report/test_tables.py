"""Tables keep their values through a file, and rows that break the rules are named."""

from __future__ import annotations

import gzip
import math

import pandas as pd
import pytest

from qsa_kernels.report import tables


def frame(**changes: list[object]) -> pd.DataFrame:
    columns = {
        "label": ['a, "b"', "NA"],
        "rows": [3, 2051],
        "square": [8.262693881988525e-06, float("nan")],
        "status": ["passed", "skipped"],
        "reason": ["", "no device"],
    }
    return pd.DataFrame({**columns, **changes})


def test_a_table_comes_back_as_it_was(tmp_path):
    path = tables.write(frame(), "example_cells", tmp_path)
    pd.testing.assert_frame_equal(tables.read(path, "example_cells"), frame())


def test_the_same_table_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setitem(tables.SCHEMAS, "example_samples", tables.SCHEMAS["example_cells"])
    first = tables.write(frame(), "example_samples", tmp_path / "a")
    second = tables.write(frame(), "example_samples", tmp_path / "b")
    assert first.name == "example_samples.csv.gz"
    assert first.read_bytes() == second.read_bytes()
    assert gzip.decompress(first.read_bytes()).startswith(b"label,rows")
    pd.testing.assert_frame_equal(tables.read(first, "example_samples"), frame())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": ["passed", "maybe"]}, ["status", "maybe"]),
        ({"reason": ["", ""]}, ["needs a reason"]),
        ({"square": [float("nan"), float("nan")]}, ["passed row needs a value"]),
        ({"rows": [3, 0]}, ["rows", "0"]),
        ({"rows": [3.5, 4.5]}, ["rows", "int64"]),
        ({"extra": [1, 2]}, ["extra"]),
    ],
    ids=["status", "no-reason", "empty-passed", "range", "dtype", "unknown-column"],
)
def test_bad_tables_are_not_written(tmp_path, changes, words):
    with pytest.raises(ValueError, match="example_cells") as caught:
        tables.write(frame(**changes), "example_cells", tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value
    assert list(tmp_path.iterdir()) == []


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ValueError, match="square"):
        tables.write(frame().drop(columns="square"), "example_cells", tmp_path)


def test_an_unknown_table_names_those_that_there_are():
    with pytest.raises(ValueError, match=r"no schema for table 'exampel'.*example_cells"):
        tables.validate(frame(), "exampel")


@pytest.mark.parametrize("name", sorted(tables.SCHEMAS))
def test_every_table_says_what_each_row_is(name):
    assert {"status", "reason"} <= set(tables.SCHEMAS[name].columns)


@pytest.mark.parametrize(("value", "text"), [(math.nan, "-"), (None, "-"), (0.123456789, "0.1235"), (2051, "2051")])
def test_shown_cells_are_short(value, text):
    assert tables.text_of(value) == text
