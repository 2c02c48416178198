"""`qsa codegen` as people and scripts call it, the chapter's parameters, and its figures."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from qsa_kernels.measure import codegen, roofline, sass
from qsa_kernels.report import cli, tables
from qsa_kernels.report.chapter import check_parameters
from qsa_kernels.report.figures import codegen as figures
from qsa_kernels.report.figures import style

ARMS = ("fp16", "hoisted/packed", "hoisted/native")
GEOMETRY = {"q_heads": 6, "kv_heads": 1, "head_dim": 256, "topk": 2051, "page_size": 784}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["codegen", *arguments])


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, object]]:
    result = call("--arch", "sm_70", *(word for arm in ARMS for word in ("--arm", arm)), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"not strict JSON: {word}"))
    return {row["arm"]: row for row in found}


def test_json_is_one_row_an_arm(rows: dict[str, dict[str, object]]) -> None:
    assert tuple(rows) == ARMS
    plain = rows["fp16"]
    assert plain["profile"] == "16 columns, 4 warps"
    assert 1000 <= plain["loop_instructions"] <= 1250
    assert plain["loop_instructions"] == sum(plain["by_class"].values()) < plain["total_instructions"]
    assert plain["by_class"]["shared_load_128"] == 161
    assert (plain["spills"], plain["shared_bytes"]) == (0, 24576)
    assert rows["hoisted/packed"]["loop_instructions"] <= plain["loop_instructions"]


def test_json_keeps_what_the_architecture_cannot_have(rows: dict[str, dict[str, object]]) -> None:
    native = rows["hoisted/native"]
    assert (native["status"], native["loop_instructions"], native["by_class"]) == ("skipped", None, None)
    assert "8.9" in str(native["reason"])


def test_table_shows_the_same_numbers(rows: dict[str, dict[str, object]]) -> None:
    result = call("--arm", "fp16", "--arm", "hoisted/native")
    assert result.exit_code == 0
    line = next(line for line in result.stdout.splitlines() if "fp16" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[:3] == ["fp16", "16 columns, 4 warps", str(rows["fp16"]["loop_instructions"])]
    assert "hoisted/native: skipped" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--arch", "sm_60"], "arch: expected one of sm_70, sm_75, sm_80, sm_90; got 'sm_60'", id="arch"),
        pytest.param(["--arm", "fp8"], "arm: expected one of fp16, in_loop/exp2", id="arm"),
        pytest.param(["--profile", "best"], "launch_profile: expected one of", id="profile"),
        pytest.param(
            ["--arm", "fp16", "--profile", "vector"],
            "'vector' is made for contraction='vector'",
            id="other-contraction",
        ),
        pytest.param(
            ["--arm", "fp16+vector", "--transposed"],
            "transposed: expected an arm of the dot contraction, got 'fp16+vector'",
            id="transposed-vector",
        ),
    ],
)
def test_unknown_names_are_refused_before_anything_is_compiled(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_chapter_parameters() -> None:
    assert check_parameters("codegen", {**GEOMETRY, "rows": 2048, "source": "live"}).model_dump()["page_size"] == 784
    with pytest.raises(ValueError, match="rows"):
        check_parameters("codegen", {**GEOMETRY, "rows": 0, "source": "live"})


@pytest.fixture(scope="module")
def kernels(rows: object) -> list[codegen.CompiledKernel]:
    return codegen.compile_kernels([codegen.KernelRequest(arm) for arm in ARMS])


def test_tables_satisfy_their_schemas(kernels: list[codegen.CompiledKernel]) -> None:
    for name, table in {
        "codegen_kernels": codegen.kernel_table(kernels),
        "codegen_classes": codegen.class_table(kernels),
        "codegen_parts": codegen.part_table(kernels),
        "codegen_shared_accesses": codegen.shared_access_table(kernels),
        "codegen_pipes": roofline.pipe_table(kernels, "V100-SXM2"),
        "codegen_bounds": roofline.bound_table(kernels, "V100-SXM2", rows=2048),
        "codegen_constants": roofline.constants_table(),
    }.items():
        assert len(tables.validate(table, name)) == len(table), name


def test_figures_are_the_same_bytes_for_the_same_data(kernels: list[codegen.CompiledKernel]) -> None:
    pipes = roofline.pipe_table(kernels, "V100-SXM2")
    measured = pipes[pipes["pipe"] == "shared_memory"]
    for draw in (
        lambda: figures.classes(codegen.class_table(kernels)),
        lambda: figures.parts(codegen.part_table(kernels)),
        lambda: figures.wavefronts(codegen.shared_access_table(kernels)),
        lambda: figures.pipes(pipes),
        lambda: figures.pipes(pipes, measured),
    ):
        assert style.svg(draw()) == style.svg(draw())


def test_measured_times_are_marked_where_there_are_some(kernels: list[codegen.CompiledKernel]) -> None:
    pipes = roofline.pipe_table(kernels, "V100-SXM2")
    assert not list(figures.pipes(pipes).axes[0].lines)
    measured = pipes[pipes["pipe"] == "issue"].iloc[:1]
    (marks,) = figures.pipes(pipes, measured).axes[0].lines
    assert list(marks.get_xdata()) == measured["cycles_per_token"].tolist()


def test_launches_of_one_arm_stand_beside_each_other() -> None:
    (kernel,) = codegen.compile_kernels([codegen.KernelRequest("fp16")])
    pipes = roofline.pipe_table([kernel], "V100-SXM2")
    both = pd.concat([pipes, pipes.assign(profile="another", cycles_per_token=2 * pipes["cycles_per_token"])])
    (axis,) = figures.pipes(both, both[(both["pipe"] == "issue") & (both["profile"] == "another")]).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["fp16\n16 columns, 4 warps", "fp16\nanother"]
    (marks,) = axis.lines
    assert (list(marks.get_ydata()), len(axis.patches)) == ([1.0], 2 * len(axis.containers))


def test_notes_give_ranges_ratios_and_the_noise_floor_of_their_code_path() -> None:
    wide, narrow, turned = "16 columns, 4 warps", "32 columns, 1 warp", "32 columns, 1 warp, transposed"
    found = [
        ("sm_70", "fp16", wide, 10.0, 11.1),
        ("sm_70", "hoisted/packed", wide, 10.0, 12.5),
        ("sm_70", "fp16+vector", "8 columns, 1 warp", 2.0, 4.0),
        ("sm_90", "fp16", narrow, 2.0, 3.0),
        ("sm_90", "fp16", turned, 2.0, 2.4),
    ]
    table = pd.DataFrame(found, columns=["arch", "arm", "profile", "bound", "cycles_per_token"])
    measured = table.assign(device="H200", workload="decode", time_us=table["cycles_per_token"])
    pipes = table.assign(pipe="issue", cycles_per_token=table["bound"])
    cells = pd.DataFrame(
        {
            "workload": ["decode", "decode", "other"],
            "code_path": ["sm_70", "device", "sm_70"],
            "floor_log_ratio": [0.003, 0.011, 0.5],
        }
    )
    start = "Measured on the device, cold decoding takes longer than the unit that binds: "
    assert figures.measured_notes(measured, pipes, cells, "the device") == {
        "sm_70": start + "1.11 to 1.25 times in the dot arms and 2.00 to 2.00 times in the vector arms. "
        "The time of hoisted/packed is 1.13 times that of fp16. Noise floor: 0.3 %.",
        "sm_90": start + "1.20 to 1.20 times in transposed launches and 1.50 to 1.50 times with heads as rows. "
        "Noise floor: 1.1 %.",
    }
    assert figures.measured_notes(measured.iloc[:0], pipes, cells, "the device") == {}


def test_transposed_products_by_flag() -> None:
    result = call("--arch", "sm_90", "--arm", "hoisted/native", "--transposed", "--json")
    (row,) = json.loads(result.stdout)
    assert (row["profile"], row["transposed"]) == ("32 columns, 1 warp, transposed", True)
    assert row["by_class"]["tensor_core"] == 64


def test_every_class_has_a_place_in_the_figure() -> None:
    grouped = {name for names in figures.CLASS_GROUPS.values() for name in names}
    assert set(sass.CLASSES) <= grouped
