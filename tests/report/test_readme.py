"""The README's figure is the one that the stored run gives."""

from qsa_kernels.report import latency_page, recording, repository, runs
from qsa_kernels.report.figures import latency, style

RUN_ID = "h200-b"
FIGURE = "book/_static/answer.svg"


def drawn() -> str:
    run = runs.Run.load(repository.root() / "data/runs" / RUN_ID)
    measured = latency_page.Measured(
        {name: run.table(name) for name in recording.TABLES}, str(run.manifest.device["name"])
    )
    cells = latency_page.answer_cells(measured, "decode-128-32k")
    return style.svg(latency.answer(cells, measured.label("sm_70")))


def test_figure_is_drawn_from_the_run_that_the_readme_names() -> None:
    readme = (repository.root() / "README.md").read_text(encoding="utf-8")
    assert FIGURE in readme
    assert f"data/runs/{RUN_ID}" in readme
    assert (repository.root() / FIGURE).read_text(encoding="utf-8") == drawn()
