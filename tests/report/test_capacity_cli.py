"""`qsa capacity` as people and scripts call it, and the chapter's parameters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from qsa_kernels.measure import capacity_reported
from qsa_kernels.report import cli, repository, tables
from qsa_kernels.report.chapter import check_parameters

PARAMETERS = {
    "tp": 4,
    "mtp": 0,
    "prefix_caching": False,
    "max_model_len": 131_328,
    "pool_gib": 6.375,
    "kv_cache_dtype": "fp8_e4m3",
    "share_topk_workspace": False,
}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["capacity", *arguments])


def answer(*arguments: str) -> dict[str, list[dict[str, object]]]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"not strict JSON: {word}"))


def test_deployment_as_json() -> None:
    reply = answer("--pool-gib", "6.375")
    assert [(row["kv_cache_dtype"], row["tokens"], row["requests"]) for row in reply["rows"]] == [
        ("auto", 507_093, 3),
        ("fp8_e4m3", 931_100, 7),
    ]
    assert reply["rows"][1]["gain"] == pytest.approx(931_100 / 507_093, rel=1e-12)
    assert reply["break_even_max_model_len"] == 785
    assert "nvfp4" in reply["checked_by"]


def test_deployment_as_table() -> None:
    result = call("--pool-gib", "6.375")
    assert result.exit_code == 0
    for text in ("507,093", "931,100", "1.8362", "Derived. Public figures with this TP"):
        assert text in result.stdout


def test_setup_that_no_public_figure_checks_says_so() -> None:
    result = call("--pool-gib", "10", "--tp", "2", "--mtp", "1", "--prefix-caching")
    assert result.exit_code == 0
    assert "no public figure has this TP, MTP and prefix caching" in result.stdout


def test_empty_pool_has_no_gain_and_a_reason() -> None:
    reply = answer("--pool-gib", "0")
    assert [row["tokens"] for row in reply["rows"]] == [0, 0]
    assert [row["gain"] for row in reply["rows"]] == [None, None]
    assert all(row["status"] == "failed" and row["reason"] for row in reply["rows"])


def test_a_decimal_pool_is_taken_as_typed() -> None:
    # 1.4 GiB are 1503238553.6 bytes; the nearest double lies below.
    assert answer("--pool-gib", "1.4")["rows"][0]["pool_bytes"] == 1_503_238_553
    assert answer("--pool-gib", "0.1")["rows"][0]["pool_bytes"] == 107_374_182


def test_validate_prints_one_row_a_pair_and_succeeds() -> None:
    result = call("validate")
    assert result.exit_code == 0, result.output
    pairs = list(dict.fromkeys(capacity_reported.load()["pair"]))
    rows = [line for line in result.stdout.splitlines() if line.startswith("│") and line.split("│")[1].strip()]
    assert [row.split("│")[1].strip() for row in rows] == pairs
    assert "rtx-andreasgru: not determined: max_model_len and prefix_caching not published" in result.stdout


def test_validate_fails_when_a_pair_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    table = capacity_reported.load()
    table.loc[(table["pair"] == "awq-r6") & (table["quantity"] == "tokens"), "value"] += 3
    monkeypatch.setattr(capacity_reported, "load", lambda: table)
    result = call("validate", "--json")
    assert result.exit_code == 1
    reply = json.loads(result.stdout)
    assert reply["holds"] is False
    assert {row["pair"] for row in reply["pairs"] if row["status"] == "failed"} == {"awq-r6"}


def test_validate_fails_when_a_published_size_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    table = capacity_reported.load()
    table.loc[table["quantity"] == "state_bytes", "value"] += 2
    monkeypatch.setattr(capacity_reported, "load", lambda: table)
    assert call("validate").exit_code == 1


def test_cells_count_15_and_17() -> None:
    counts = {
        (row["pool"], row["kv_cache_dtype"]): (row["model"], row["reported"])
        for row in answer("cells")["counts"]
        if row["quantity"] == "cells"
    }
    assert set(counts) == {(pool, dtype) for pool in ("nvfp4", "awq-r6") for dtype in ("auto", "fp8_e4m3")}
    assert {dtype: counts["nvfp4", dtype] for dtype in ("auto", "fp8_e4m3")} == {"auto": (15, 15), "fp8_e4m3": (17, 17)}


def test_cells_of_another_pool_as_table() -> None:
    result = call("cells", "--pool-gib", "20")
    assert result.exit_code == 0
    assert "cells: 18, reported -; not published" in result.stdout


def test_blocks_has_every_setup() -> None:
    assert len(answer("blocks")["blocks"]) == 18
    assert "10,838,016" in call("blocks").stdout


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "pool_gib"),
        (["--pool-gib", "nan"], "pool_gib"),
        (["--pool-gib", "-1"], "pool_gib"),
        (["--pool-gib", "inf"], "pool_gib"),
        (["--pool-gib", "4", "--tp", "8"], "tp"),
        (["--pool-gib", "4", "--mtp", "2"], "prefix_caching"),
        (["--pool-gib", "4", "--mtp", "6", "--prefix-caching"], "mtp"),
        (["--pool-gib", "4", "--max-model-len", "0"], "max_model_len"),
        (["--pool-gib", "4", "--kv-cache-dtype", "int8"], "kv_cache_dtype"),
        (["cells", "--pool-gib", "-3"], "pool_gib"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_input_names_the_parameter(
    arguments: list[str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["qsa", "capacity", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr()
    assert end.value.code == 1
    assert printed.err.startswith(f"error: {name}:")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(("option", "value"), [("--pool-gib", "four"), ("--tp", "two"), ("--max-model-len", "1.5")])
def test_text_that_is_no_number_names_the_option(option: str, value: str) -> None:
    result = call(*([] if option == "--pool-gib" else ["--pool-gib", "4"]), option, value)
    assert result.exit_code == 2
    assert option in result.output


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys; from qsa_kernels.report import cli; sys.argv = ['qsa', 'capacity', '--pool-gib', '4'];\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join({'torch', 'triton', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "318,071" in done.stdout


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"pool_gib": float("nan")}, "pool_gib"),
        ({"pool_gib": -1.0}, "pool_gib"),
        ({"pool_gib": "4"}, "pool_gib"),
        ({"tp": True}, "tp"),
        ({"tp": 8}, "tp: expected one of 1, 2, 4, got 8; no public figure checks another"),
        ({"mtp": 2}, "prefix_caching: expected True with mtp = 2"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
        ({"max_model_length": 4096}, "max_model_length"),
    ],
    ids=str,
)
def test_chapter_refuses_bad_parameters_by_name(change: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_parameters("capacity", PARAMETERS | change)


def test_every_number_in_the_prose_is_glued_and_every_table_has_a_schema() -> None:
    cells = json.loads((repository.root() / "notebooks/capacity.ipynb").read_text(encoding="utf-8"))["cells"]
    prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    code = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    glued = set(re.findall(r'page\.glue\(\s*"(\w+)"', code))
    assert set(re.findall(r"\{glue:text\}`(\w+)", prose)) <= glued
    assert {"capacity_gain_reported", "capacity_gain_model", "capacity_gain_asymptote"} <= glued
    assert set(re.findall(r'"(capacity_\w+)"', code)) - glued <= set(tables.SCHEMAS)


def test_stored_tables_survive_a_round_trip(tmp_path: Path) -> None:
    for name, table in {
        "capacity_pairs": capacity_reported.validate()[capacity_reported.PAIR_COLUMNS],
        "capacity_pools": capacity_reported.compare()[capacity_reported.COUNT_COLUMNS],
        "capacity_layout": capacity_reported.layout_checks(),
        "capacity_workspace": capacity_reported.workspace_steps("awq-r6", "awq-shared-topk"),
    }.items():
        path = tables.write(table, name, tmp_path)
        pd.testing.assert_frame_equal(tables.read(path, name), table.reset_index(drop=True), check_dtype=False)
