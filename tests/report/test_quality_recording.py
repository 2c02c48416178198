"""Recording the quality measures: what is refused, what is stored, and what the chapter finds again."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from qsa_kernels.measure import quality
from qsa_kernels.measure.quality import effects
from qsa_kernels.measure.quality.caches import ARMS, BASELINE, NOISE
from qsa_kernels.report import quality_page, quality_recording, recording
from qsa_kernels.report.cli import app

PROFILES = Path(__file__).resolve().parents[2] / "notebooks/profiles"
STAMP = {"status": "passed", "reason": ""}


def measured(shift: float = 0.01) -> dict[str, pd.DataFrame]:
    """Tables in the layout of a run: eight documents, one layer, one question."""
    generator = np.random.default_rng(8)
    rows = [
        {
            "text": f"text {number % 2}",
            "content": "en prose",
            "start_token": 300 * number,
            "context_tokens": 256,
            "arm": arm,
            "predictions": 255,
            "nll_nats": 3.0 + number + (shift if arm not in (BASELINE, NOISE) else 0.0) + generator.normal(0, 1e-5),
            "kl_nats": 0.001,
            "disagreement_percent": 1.0,
        }
        for number in range(8)
        for arm in ARMS
    ]
    documents = pd.DataFrame(rows).assign(**STAMP)
    numbers = {"cosine": 0.5, "relative_l2": 0.25, "rmse": 0.125}
    shares = {"rows": 9, "mean_row_jaccard": 0.5, "fp16_recall": 0.75, "micro_jaccard": 0.5}
    question = {"text": "alice", "context_tokens": 400, "depth_percent": 50, "candidates": 2, "rank": 1}
    return {
        "quality_documents": documents,
        "quality_effects": effects.effects(documents, resamples=200, seed=1),
        "quality_attention": pd.DataFrame(
            [{"context_tokens": 256, "arm": "unit", "inputs": "own forward", "layer": 0, **numbers, **STAMP}]
        ),
        "quality_selection": pd.DataFrame(
            [
                {
                    "context_tokens": 256,
                    "kv_cache": "unit",
                    "indexer_keys": "fp16",
                    "layer": "all",
                    "topk_blocks": 8,
                    **shares,
                    **STAMP,
                }
            ]
        ),
        "quality_needles": pd.DataFrame(
            [{**question, "arm": "unit", "margin_nats": 1.5, "most_probable_token": "right", **STAMP}]
        ),
        "quality_kernel": pd.DataFrame(
            [
                {
                    "layer": 0,
                    "arm": "fp16",
                    "tokens": 8,
                    "rows": 4,
                    "stored_values": 99,
                    "differing_values": 0,
                    "kernel_rms_relative": 0.1,
                    "torch_rms_relative": 0.1,
                    "kernel_max_abs": 0.1,
                    "torch_max_abs": 0.1,
                    **STAMP,
                }
            ]
        ),
    }


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    """A machine that says it has a CUDA device and measures at once; returns what was asked of it."""
    asked: list[tuple[object, object]] = []

    def record_tables(device: object, plan: object, progress: object) -> dict[str, pd.DataFrame]:
        asked.append((device, plan))
        return measured()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quality, "record_tables", record_tables)
    monkeypatch.setattr("qsa_kernels.measure.environment.describe", lambda: {
        "device": {"name": "Imagined GPU"}, "versions": {"torch": "2.11.0"}, "host": {"machine": "x86_64"},
    })  # fmt: skip
    return asked


@pytest.fixture
def profile(checkout) -> str:
    shutil.copy(PROFILES / "h200.yaml", checkout.root / "notebooks/profiles/h200.yaml")
    return "h200"


@pytest.mark.parametrize("name", ["h200", "v100"])
def test_the_profiles_name_every_parameter(name):
    parameters = quality_recording.parameters_of(name)
    plan = parameters.plan()
    assert plan.context_tokens[0] == 256
    assert parameters.gpu_source == "live"


def test_a_measured_run_is_stored_and_found_again(checkout, profile, on_a_gpu):
    folder = quality_recording.record(profile, commit="c" * 40)
    assert folder.parent == checkout.root / "runs/unfinished"
    run = quality_recording.assemble(folder)
    assert run.folder.parent == checkout.root / "data/runs"
    assert recording.newest(table="quality_effects") == run.manifest.run_id
    assert recording.newest() is None
    assert run.manifest.executed_on == "cuda"
    assert run.manifest.device["name"] == "Imagined GPU"
    assert run.manifest.seed == run.manifest.parameters["seed"]
    for name, table in measured().items():
        pd.testing.assert_frame_equal(run.table(name), table, check_dtype=False)
    ((device, plan),) = on_a_gpu
    assert device == "cuda"
    assert plan.context_tokens == (256, 2048)


def test_an_interrupted_measurement_leaves_nothing(checkout, profile, on_a_gpu, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(quality, "record_tables", stop)
    with pytest.raises(KeyboardInterrupt):
        quality_recording.record(profile)
    assert checkout.leftovers() == []


def test_a_table_that_breaks_its_schema_is_not_stored(checkout, profile, on_a_gpu):
    folder = quality_recording.record(profile)
    table = pd.read_csv(folder / "quality_selection.csv")
    table.assign(mean_row_jaccard=1.5).to_csv(folder / "quality_selection.csv", index=False)
    with pytest.raises(ValueError, match="quality_selection"):
        quality_recording.assemble(folder)
    assert list((checkout.root / "data/runs").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "cpu"], "chapter 'quality': the profile has no such chapter"),
        (["--profile", "nowhere"], "no profile 'nowhere'"),
        (["--profile", "half"], "parameter 'other_text' is missing"),
        (["--profile", "h200", "--commit", "abc"], "--commit: expected 40 hex digits"),
        (["--assemble", "nowhere"], "expected a folder that 'qsa record-quality' made"),
    ],
    ids=["no-chapter", "no-profile", "incomplete", "commit", "no-run"],
)
def test_what_cannot_be_recorded_is_refused(checkout, profile, arguments, message):
    checkout.profile("device: cuda\nchapters:\n  quality: {parameters: {seed: 1, gpu_source: live}}\n", name="half")
    result = CliRunner().invoke(app, ["record-quality", *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_device(checkout, profile):
    with pytest.raises(ValueError, match="device: recording needs a CUDA device"):
        quality_recording.record(profile)


def test_without_a_recorded_run_the_page_says_so():
    table = quality_page.devices(measured(), None, resamples=200, seed=1)
    assert set(table["status"]) == {"not_measured"}
    assert set(table["reason"]) == {quality_page.NOT_RECORDED}
    assert table["recorded"].isna().all()


def test_a_run_on_other_documents_is_not_compared():
    other = measured()
    other["quality_documents"] = other["quality_documents"].assign(start_token=7)
    table = quality_page.devices(measured(), other, resamples=200, seed=1)
    assert set(table["status"]) == {"not_measured"}
    assert table["reason"].str.contains("other documents").all()


def test_a_sentence_names_value_interval_and_verdict():
    sentence = quality_page.effect_sentence(measured()["quality_effects"], "unit")
    assert sentence == "+1 % (95 % interval +1 to +1, worse)"
