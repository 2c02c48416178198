"""A checkout of its own for each test, with notebooks that are made on the spot."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat import v4

from qsa_kernels.report import repository, runs

# The hash of the package, where a test must not depend on somebody editing it meanwhile.
PACKAGE = "5" * 64

BEGIN = "from qsa_kernels.report import chapter\npage = chapter.begin('example', **chapter.parameters(globals()))"
SQUARES = """import pandas as pd
rows = page.parameters.rows
frame = pd.DataFrame(
    {"label": ["a", "b"], "rows": [rows, rows], "square": [rows**2 + 0.25, None],
     "status": ["passed", "skipped"], "reason": ["", "not asked for"]}
)
_ = page.table(frame, "example_cells", caption="Squares.")
page.glue("example_square", float(rows**2) + 0.25)"""
END = "page.provenance()"
PARAMETERS = 'rows: int = 3  # rows of queries\nlabel: str = "a=b"'

PROFILE = """device: interpreter
timeout_s: 60
chapters:
  example: {parameters: {rows: 7}}
"""
CONFIG = """title: Tiny
only_build_toc_files: true
execute: {execute_notebooks: "off"}
sphinx:
  extra_extensions: [sphinx-mathjax-offline]
"""
TOC = """format: jb-book
root: book/index
chapters:
  - file: book/results/example
"""
INDEX = """# Tiny

The square is {glue:text}`results/example.ipynb::example_square:.2f`, and $a^2 \\ge 0$.
"""


class Checkout:
    """A folder in the layout of this repository."""

    begin, squares, end = BEGIN, SQUARES, END

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("notebooks/profiles", "data/runs", "data/reported", "book"):
            (root / folder).mkdir(parents=True)
        self.profile(PROFILE)

    def profile(self, text: str, name: str = "cpu") -> Path:
        path = self.root / "notebooks/profiles" / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    def notebook(self, name: str, *cells: str, parameters: str | None = PARAMETERS, kernel: str = "python3") -> Path:
        """Write a template: a title, the parameters cell, then code cells."""
        notebook = v4.new_notebook(
            metadata={
                "kernelspec": {"name": kernel, "display_name": kernel, "language": "python"},
                "language_info": {"name": "python"},
            }
        )
        notebook.cells.append(v4.new_markdown_cell("# Example"))
        if parameters is not None:
            notebook.cells.append(v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
        notebook.cells += [v4.new_code_cell(cell) for cell in cells]
        path = self.root / "notebooks" / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    def example(self, kernel: str = "python3") -> Path:
        """The smallest complete chapter."""
        return self.notebook("example", self.begin, self.squares, self.end, kernel=kernel)

    def book(self) -> None:
        """The sources of a book of two pages."""
        (self.root / "_config.yml").write_text(CONFIG, encoding="utf-8")
        (self.root / "_toc.yml").write_text(TOC, encoding="utf-8")
        (self.root / "book/index.md").write_text(INDEX, encoding="utf-8")

    def leftovers(self) -> list[str]:
        """Everything under runs/ and book/results/, hidden files included."""
        folders = (self.root / "runs", self.root / "book/results")
        return sorted(path.name for folder in folders if folder.is_dir() for path in folder.iterdir())


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """An empty checkout that the package takes for its own."""
    monkeypatch.setenv("QSA_ROOT", str(tmp_path))
    return Checkout(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with the example chapter run and published once; to be copied, not changed."""
    made = Checkout(tmp_path_factory.mktemp("finished"))
    # A kernel that no machine has: the runner brings its own.
    made.example(kernel="py39_new")
    made.book()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QSA_ROOT", str(made.root))
        patch.setattr(repository, "package_sha256", lambda: PACKAGE)
        runs.publish(runs.execute(runs.plan("example", "cpu")))
    return made


@pytest.fixture
def copied(finished: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A copy of the finished checkout, free to be changed."""
    root = tmp_path / "copy"
    shutil.copytree(finished.root, root)
    monkeypatch.setenv("QSA_ROOT", str(root))
    monkeypatch.setattr(repository, "package_sha256", lambda: PACKAGE)
    made = object.__new__(Checkout)
    made.root = root
    return made


@pytest.fixture
def in_subprocess() -> Callable[..., tuple[int, str]]:
    """Run the `qsa` command as users do: exit status and everything that it printed."""

    def call(*words: str) -> tuple[int, str]:
        answer = subprocess.run(
            [sys.executable, "-m", "qsa_kernels.report.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return answer.returncode, answer.stdout

    return call


@pytest.fixture
def stored(checkout: Checkout) -> Callable[..., runs.Run]:
    """Store a recorded run of one table."""

    def store(run_id: str = "h200-1", **changes: object) -> runs.Run:
        frame = pd.DataFrame({"label": ["a"], "rows": [3], "square": [9.25], "status": ["passed"], "reason": [""]})
        arguments: dict[str, object] = {
            "chapter": "latency",
            "profile": "h200",
            "parameters": {"blocks": 20},
            "environment": {"device": {"name": "H200"}, "versions": {"triton": "3.6.0"}, "host": {"cpus": 2}},
            "executed_on": "cuda",
            "started": "2026-09-03T10:00:00Z",
            "wall_time_s": 12.5,
            "seed": 17,
        }
        return runs.store({"example_cells": frame}, run_id=run_id, **{**arguments, **changes})  # type: ignore[arg-type]

    return store
