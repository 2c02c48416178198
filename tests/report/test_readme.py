"""The README's figure and number are those that the stored run gives."""

from functools import cache

from qsa_kernels.report import latency_page, recording, repository, runs
from qsa_kernels.report.figures import latency, style

RUN_ID = "h200-full-20261129"
FIGURE = "book/_static/answer.svg"


@cache
def run() -> latency_page.Measured:
    recorded = runs.Run.load(repository.root() / "data/runs" / RUN_ID)
    tables = {name: recorded.table(name) for name in recording.TABLES}
    return latency_page.Measured(tables, str(recorded.manifest.device["name"]))


def readme() -> str:
    return (repository.root() / "README.md").read_text(encoding="utf-8")


def drawn() -> str:
    measured = run()
    cells = latency_page.answer_cells(measured, "decode-128-32k")
    return style.svg(latency.answer(cells, measured.label("sm_70")))


def test_figure_is_drawn_from_the_run_that_the_readme_names() -> None:
    assert FIGURE in readme()
    assert f"data/runs/{RUN_ID}" in readme()
    assert (repository.root() / FIGURE).read_text(encoding="utf-8") == drawn()


def test_caption_has_the_number_of_processes() -> None:
    [number] = latency_page.answer_cells(run(), "decode-128-32k")["processes"].unique()
    assert f"`data/runs/{RUN_ID}`, {('no', 'one', 'two', 'three', 'four', 'five')[number]} processes" in readme()


def test_number_is_that_of_the_run() -> None:
    assert f": {latency_page.best_sentence(run())}, geometric mean of three decode sizes" in readme()


def test_hoisting_is_as_the_readme_says() -> None:
    effects = run().effects(stage="core", effect="placement", launch="best", cache_state="cold")
    on_device = effects[effects["code_path"] == "device"]
    assert set(on_device["verdict"]) == {"slower"}
    elsewhere = effects[effects["code_path"] == "sm_70"]
    assert elsewhere["log_ratio"].abs().max() < on_device["log_ratio"].min() / 3
