"""What a notebook calls checks its input and shows what it stored."""

from __future__ import annotations

import json
import sys

import pandas as pd
import pytest
from matplotlib.figure import Figure

from qsa_kernels.report import chapter
from qsa_kernels.report.context import RUN_VARIABLE, RunContext
from qsa_kernels.report.figures import style

FRAME = pd.DataFrame(
    {
        "label": ["<b>", "b"],
        "rows": [3, 5],
        "square": [9.25, None],
        "status": ["passed", "skipped"],
        "reason": ["", "no"],
    }
)


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """What was displayed, as text."""
    texts: list[str] = []
    monkeypatch.setattr(chapter, "display", lambda thing, **_: texts.append(getattr(thing, "data", str(thing))))
    return texts


@pytest.fixture
def page(checkout, shown, tmp_path, monkeypatch) -> chapter.Page:
    context = RunContext(
        run_id="example-cpu-1",
        notebook="notebooks/example.ipynb",
        profile="cpu",
        folder=str(tmp_path),
        commit="0123456789abcdef",
        dirty=True,
        package_sha256="1" * 64,
        executable=sys.executable,
        version=chapter.metadata.version("qsa-kernels"),
        date="2026-09-03T10:00:00Z",
    )
    monkeypatch.setenv(RUN_VARIABLE, context.model_dump_json())
    return chapter.begin("example", rows=3, label="a")


def test_parameters_are_the_data_of_the_namespace():
    namespace = {"rows": 3, "TOPKK": 64, "_hidden": 1, "In": [], "Out": {}, "json": json, "f": len, "T": int}
    assert chapter.parameters(namespace) == {"rows": 3, "TOPKK": 64}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rows": 3, "label": "a", "TOPKK": 64}, "unknown parameter 'TOPKK'; allowed: rows: int, label: str"),
        ({"rows": 3}, "parameter 'label' is missing"),
        ({"rows": float("nan"), "label": "a"}, "parameter 'rows'"),
    ],
    ids=["unknown", "missing", "nan"],
)
def test_parameters_are_checked_in_the_notebook(checkout, values, words):
    with pytest.raises(ValueError, match=words):
        chapter.begin("example", **values)


def test_an_unknown_chapter_is_refused(checkout):
    with pytest.raises(ValueError, match=r"no chapter 'exampel'; known: .*example"):
        chapter.begin("exampel")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"executable": "/usr/bin/python2"}, "another Python"), ({"version": "0.0.1"}, "another qsa-kernels version")],
)
def test_another_python_or_package_than_the_runners_is_refused(page, monkeypatch, change, words):
    monkeypatch.setenv(RUN_VARIABLE, page.run.model_copy(update=change).model_dump_json())
    with pytest.raises(RuntimeError, match=words):
        chapter.begin("example", rows=3, label="a")


def test_without_a_runner_the_files_go_to_a_folder_of_their_own(checkout, shown, monkeypatch):
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    page = chapter.begin("example", rows=3, label="a")
    assert page.run.run_id == "unrecorded"
    assert checkout.root not in page.folder.parents


def test_a_table_is_stored_and_shown_without_markup_from_its_cells(page, shown):
    pd.testing.assert_frame_equal(pd.DataFrame(page.table(FRAME, "example_cells", caption="Squares & more.")), FRAME)
    assert (page.folder / "tables/example_cells.csv").read_text().startswith("label,rows,square,status,reason\n")
    assert "&lt;b&gt;" in shown[-1]
    assert "<b>" not in shown[-1]
    assert "Squares &amp; more." in shown[-1]
    assert "example/example_cells.csv" in shown[-1]
    with pytest.raises(ValueError, match="already has a table 'example_cells'"):
        page.table(FRAME, "example_cells", caption="Again.")


def test_columns_that_say_nothing_are_not_shown(page, shown):
    page.table(FRAME.assign(status="passed", reason="", square=1.5), "example_cells", caption="All passed.")
    assert "<th scope='col'>status" not in shown[-1]
    assert "<th scope='col'>reason" not in shown[-1]


def test_a_cell_that_ends_with_a_table_shows_it_once(page, shown):
    from IPython.core.formatters import DisplayFormatter

    made = page.table(FRAME, "example_cells", caption="Squares.")
    assert DisplayFormatter().format(made) == ({}, {})
    data, _ = DisplayFormatter().format(made.head(1))
    assert "text/html" in data


def test_a_long_table_is_cut_on_the_page_alone(page, shown):
    long = pd.concat([FRAME] * 600, ignore_index=True)
    page.table(long, "example_cells", caption="Long.")
    assert "The first 1000 of 1200 rows." in shown[-1]
    assert len((page.folder / "tables/example_cells.csv").read_text().splitlines()) == 1201


def test_a_table_that_breaks_its_schema_is_not_shown(page, shown):
    with pytest.raises(ValueError, match="example_cells"):
        page.table(FRAME.drop(columns="rows"), "example_cells", caption="Broken.")
    assert shown == []


def test_a_figure_is_stored_with_the_line_that_says_where_it_comes_from(page, shown):
    figure = Figure()
    figure.subplots().plot([1, 3])
    page.figure(figure, "x-by-y", alt="A line that rises.")
    assert (page.folder / "figures/x-by-y.svg").read_text().startswith("<?xml")
    assert "run example-cpu-1, commit 0123456789 with local changes" in shown[-1]
    with pytest.raises(ValueError, match="alt text is empty"):
        page.figure(figure, "x-by-y", alt=" ")


def test_the_same_figure_gives_the_same_bytes():
    def draw() -> str:
        with style.look():
            figure = Figure()
            axes = figure.subplots()
            axes.plot([1, 3], **style.arm_style("hoisted/packed"))
            style.noise_floor(axes, 0.1, 0.2)
        return style.svg(figure)

    assert draw() == draw()


def test_every_arm_has_a_look_of_its_own():
    from qsa_kernels.arms import ARMS

    assert set(style.ARM_COLOURS) == set(ARMS) == set(style.ARM_MARKERS)
    assert len(set(style.ARM_COLOURS.values())) == len(ARMS) == len(set(style.ARM_MARKERS.values()))
    with pytest.raises(ValueError, match="arm: expected one of"):
        style.arm_style("fp32")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(float("nan"), ValueError), (float("inf"), ValueError), (pd.Series([1.5])[0], TypeError), (None, TypeError)],
)
def test_only_plain_finite_values_are_glued(page, value, kind):
    with pytest.raises(kind, match="glue 'key'"):
        page.glue("key", value)


def test_a_glue_key_is_taken_once(page):
    page.glue("key", 1.5)
    with pytest.raises(ValueError, match="already taken"):
        page.glue("key", 2.5)


def test_the_record_is_complete_only_after_provenance(page, shown):
    def record() -> dict[str, object]:
        return json.loads((page.folder / "chapter.json").read_text())

    page.glue("key", 1.5)
    assert record()["complete"] is False
    page.provenance()
    assert record()["complete"] is True
    assert record()["glue"] == {"key": 1.5}
    assert all(word in shown[-1] for word in ("example-cpu-1", "2026-09-03T10:00:00Z", "package 111111111111"))


def test_a_recorded_source_is_shown_under_a_banner(page, shown, stored):
    assert page.recorded("live") is None
    assert shown == []
    stored()
    run = page.recorded("recorded:h200-1")
    assert run is not None
    assert all(word in shown[-1] for word in ("Recorded, not measured here", "h200-1", "H200", "2026-09-03"))
    for source in ("recorded:", "h200-1"):
        with pytest.raises(ValueError, match="expected 'live' or 'recorded:RUN_ID'"):
            page.recorded(source)
