"""A profile is checked as a whole before anything runs."""

from __future__ import annotations

import pytest

from qsa_kernels.report import profiles, yamlfile


def test_a_profile_says_what_reaches_the_notebook(checkout):
    checkout.profile(
        "device: auto\nchapters:\n"
        "  latency:\n    source: {recorded: h200-1}\n    sections: {grid: {recorded: h200-2}, hot: live}\n"
        "    parameters: {scale: 1e-3}\n"
    )
    plan = profiles.load("cpu").chapters["latency"]
    assert plan.values() == {
        "scale": 1e-3,
        "source": "recorded:h200-1",
        "grid_source": "recorded:h200-2",
        "hot_source": "live",
    }
    assert plan.recorded_runs() == ["h200-1", "h200-2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device: gpu\nchapters: {}", ["'device'", "'auto', 'interpreter' or 'cuda'", "'gpu'"]),
        ("device: auto\nchapters: {}\nspeed: 1", ["unknown key 'speed'", "device", "timeout_s"]),
        ("device: auto\ntimeout_s: .nan\nchapters: {}", ["'timeout_s'", "nan"]),
        ("device: auto\ntimeout_s: 0\nchapters: {}", ["'timeout_s'", "greater than 0"]),
        ("device: auto", ["key 'chapters' is missing"]),
        ("device: auto\nchapters: {error: {source: lve}}", ["'chapters.error.source'", "'live' or 'recorded: RUN_ID'"]),
        ("device: auto\nchapters: {error: {parametrs: {}}}", ["unknown key 'chapters.error.parametrs'", "parameters"]),
        ("device: auto\ndevice: cuda\nchapters: {}", ["'device' is written twice"]),
        ("- 1", ["expected keys and values"]),
        ("device: [", ["not valid YAML"]),
    ],
    ids=["word", "unknown", "nan", "range", "missing", "source", "nested-unknown", "twice", "list", "broken"],
)
def test_bad_profiles_name_the_key(checkout, text, words):
    checkout.profile(text)
    with pytest.raises(ValueError, match=r"cpu\.yaml") as caught:
        profiles.load("cpu")
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_absent_profile_names_those_that_there_are(checkout):
    with pytest.raises(FileNotFoundError, match="no profile 'v1000'; known: cpu"):
        profiles.load("v1000")


def test_a_profile_can_be_a_path(checkout, tmp_path):
    other = tmp_path / "mine.yaml"
    other.write_text("device: interpreter\nchapters: {}", encoding="utf-8")
    assert profiles.load(str(other)).device == "interpreter"


@pytest.mark.parametrize("text", ["1e-3", "1E+3", "-2e5"])
def test_numbers_with_an_exponent_are_numbers(text):
    assert yamlfile.parse(text, "here") == float(text)
