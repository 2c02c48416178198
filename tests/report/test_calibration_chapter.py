"""The calibration chapter: parameters, tables that satisfy their schemas, figures that repeat byte for byte."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from qsa_kernels.measure import calibration, scale_effects
from qsa_kernels.measure.calibration import CalibrationReport
from qsa_kernels.measure.smollm2 import LayerCapture
from qsa_kernels.report import tables
from qsa_kernels.report.chapter import check_parameters
from qsa_kernels.report.figures import calibration as figures
from qsa_kernels.report.figures import style

PARAMETERS = {
    "tokens": 384,
    "similar_text": "alice",
    "second_text": "tang-poems-zh",
    "kernel_layer": 18,
    "kernel_topk": 256,
}
Captures = dict[str, list[LayerCapture]]


@pytest.fixture(scope="module")
def captures() -> Captures:
    """Two layers of three texts, with unequal K and V; the evaluation texts exceed the envelope of the first."""
    generator = torch.Generator().manual_seed(3)
    made: Captures = {}
    for number, text in enumerate(("tom-sawyer", "alice", "tang-poems-zh")):
        made[text] = []
        for layer in (0, 1):
            q, k, v = (torch.randn(40, heads, 16, generator=generator).half() for heads in (6, 2, 2))
            made[text].append(LayerCapture(layer, q, k * (3 + number), v * (1 + number / 4)))
    return made


@pytest.fixture(scope="module")
def report(captures: Captures) -> CalibrationReport:
    return calibration.summarize(scale_effects.observe({"tom-sawyer": captures["tom-sawyer"]}), source="test")


@pytest.fixture(scope="module")
def chapter_tables(captures: Captures, report: CalibrationReport) -> dict[str, pd.DataFrame]:
    choices = scale_effects.scale_choices(report)
    attention = scale_effects.attention_error(captures, choices)
    saturation = scale_effects.saturation(captures, report.scale())
    return {
        "calibration_summary": report.table(),
        "calibration_attention": attention,
        "calibration_choices": scale_effects.error_ratios(attention),
        "calibration_code_use": scale_effects.code_use(captures, choices),
        "calibration_saturation": saturation,
        "calibration_saturation_by_text": scale_effects.saturation_by_text(saturation),
        "calibration_published": scale_effects.published_pack(),
        "calibration_kernel": scale_effects.kernel_check(captures["alice"][1], report.scale(), topk=24),
    }


def test_the_parameters_of_the_template_are_accepted() -> None:
    assert check_parameters("calibration", PARAMETERS).model_dump() == PARAMETERS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"second_text": "nope"}, "second_text: expected an evaluation text, one of opticks, go-bufio, alice"),
        ({"similar_text": "tom-sawyer"}, "similar_text: expected an evaluation text"),
        ({"similar_text": "tang-poems-zh"}, "expected two different texts"),
        ({"kernel_layer": 30}, "kernel_layer: expected a layer from 0 to 29"),
        ({"kernel_topk": 385}, "kernel_topk: expected at most the 384 tokens"),
        ({"tokens": 8}, "'tokens'"),
        ({"tokens": 384.0}, "'tokens'"),
        ({"token": 384}, "unknown parameter 'token'"),
    ],
)
def test_parameters_that_cannot_be_measured_are_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_parameters("calibration", PARAMETERS | change)


def test_tables_satisfy_their_schemas(chapter_tables: dict[str, pd.DataFrame]) -> None:
    for name, table in chapter_tables.items():
        assert len(tables.validate(table, name)) == len(table) > 0


def test_evaluation_texts_saturate_and_the_calibration_text_does_not(chapter_tables: dict[str, pd.DataFrame]) -> None:
    by_text = chapter_tables["calibration_saturation_by_text"].groupby("text")["saturated_codes"].sum()
    assert by_text["tom-sawyer"] == 0
    assert by_text["tang-poems-zh"] > by_text["alice"] > 0


@pytest.mark.parametrize("name", ["distributions", "scales_by_layer", "attention_error", "overshoot"])
def test_figures_repeat_byte_for_byte(
    name: str, chapter_tables: dict[str, pd.DataFrame], report: CalibrationReport
) -> None:
    arguments = {
        "distributions": (report.histograms(), report.table()),
        "scales_by_layer": (report.table(), (0.0171, 0.0841)),
        "attention_error": (chapter_tables["calibration_attention"],),
        "overshoot": (chapter_tables["calibration_saturation"],),
    }[name]
    first, second = (style.svg(getattr(figures, name)(*arguments)) for _ in range(2))
    assert first == second
    assert "<svg" in first
