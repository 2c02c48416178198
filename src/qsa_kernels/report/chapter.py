"""What a notebook calls: check the parameters, store tables and figures, say where they come from.

Every chapter has the same first three cells:

    # Error                                       markdown: title, one paragraph
    rows: int = 3  # rows of queries              code, tagged `parameters`: typed, lower-case names

    from qsa_kernels.report import chapter        code
    page = chapter.begin("error", **chapter.parameters(globals()))

Then `page.table(frame, "error_cells", caption="...")`, `page.figure(figure, "error-by-arm", alt="...")`,
`page.glue("error_max_abs", 8.1e-6)`, and `page.provenance()` as the last cell. `page.parameters.rows` holds the checked
values, `page.device` is "interpreter" or "cuda". A chapter that can draw a stored run has a parameter
`source: str = "live"` and asks `run = page.recorded(page.parameters.source)`: None when live, else the run whose
`run.table("latency_cells")` it draws, after a banner. Everything named before `begin` counts as a parameter.
"""

from __future__ import annotations

import html
import json
import math
import os
import sys
import tempfile
import types
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import HTML, display
from matplotlib.figure import Figure

from qsa_kernels.report import device, html_table, repository, tables
from qsa_kernels.report.context import RUN_VARIABLE, RunContext
from qsa_kernels.report.figures import style
from qsa_kernels.report.parameters import PARAMETERS, ChapterParameters, validated
from qsa_kernels.report.runs import Run, now

_IPYTHON_NAMES = {"In", "Out"}


def parameters(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The data variables of a notebook, which are its parameters when this is called right after the parameters cell.

    Names that no chapter model declares are passed on as well: `begin` refuses them, so that a misspelt parameter
    never falls back to its default.

    Args:
        namespace: `globals()` of the notebook.
    """
    return {
        name: value
        for name, value in namespace.items()
        if not name.startswith("_")
        and name not in _IPYTHON_NAMES
        and not isinstance(value, types.ModuleType | type)
        and not callable(value)
    }


def check_parameters(name: str, values: Mapping[str, Any]) -> ChapterParameters:
    """The chapter's parameters as a frozen model.

    Raises:
        ValueError: no such chapter; else names each unknown, missing, mistyped or non-finite parameter and what is
            allowed.
    """
    if name not in PARAMETERS:
        raise ValueError(f"no chapter {name!r}; known: {', '.join(sorted(PARAMETERS))}")
    return validated(PARAMETERS[name], values, f"chapter {name!r}")


class Shown(pd.DataFrame):
    """A frame that is on the page already, so that a cell which ends with it does not show it again."""

    def _ipython_display_(self) -> None:
        pass


class Page:
    """One executed chapter: where its tables, figures and numbers go."""

    def __init__(self, name: str, values: ChapterParameters, run: RunContext, environment: dict[str, Any]) -> None:
        self.name = name
        self.parameters = values
        self.run = run
        self.folder = Path(run.folder)
        self.device = device.prepare("auto")
        self.environment = environment
        self._tables: dict[str, str] = {}
        self._glue: dict[str, int | float | str] = {}
        self._save(complete=False)

    @property
    def device_label(self) -> str:
        """What the kernels ran on, in words."""
        if self.device == "cuda":
            return str(self.environment["device"]["name"])
        return f"Triton interpreter, {self.environment['host']['machine']} CPU"

    def _save(self, *, complete: bool) -> None:
        record = {
            "tables": self._tables,
            "glue": self._glue,
            "device": self.device,
            "environment": self.environment,
            "complete": complete,
        }
        text = json.dumps(record, indent=2, sort_keys=True, allow_nan=False)
        (self.folder / "chapter.json").write_text(text + "\n", encoding="utf-8")

    def _made_by(self) -> str:
        state = repository.describe_commit(self.run.commit, self.run.dirty)
        return f"Made by {self.run.notebook}, run {self.run.run_id}, {state}"

    def recorded(self, source: str) -> Run | None:
        """The stored run to draw instead of measuring, shown with a banner; None when the source is "live".

        Args:
            source: "live" or "recorded:RUN_ID".

        Raises:
            ValueError: another word, or a run whose files do not match their hashes.
            FileNotFoundError: no such run.
        """
        if source == "live":
            return None
        kind, _, run_id = source.partition(":")
        if kind != "recorded" or not run_id:
            raise ValueError(f"source: expected 'live' or 'recorded:RUN_ID'; got {source!r}")
        run = Run.load(run_id)
        record = run.manifest
        words = (
            f"Recorded, not measured here: run {record.run_id} on {record.device['name']}, {record.started[:10]}, "
            f"{repository.describe_commit(record.commit, record.dirty)}."
        )
        display(HTML(f"<p class='qsa-recorded' role='note'>{html.escape(words)}</p>"))
        return run

    def table(self, frame: pd.DataFrame, name: str, caption: str) -> pd.DataFrame:
        """Check, store and show a table; returns it.

        Args:
            frame: one row an observation.
            name: key of the schema in `tables.SCHEMAS`; also the name of the stored file.
            caption: one sentence under the table's number.

        Raises:
            ValueError: the table does not satisfy its schema, or the chapter already has a table of that name.
        """
        if name in self._tables:
            raise ValueError(f"chapter {self.name!r} already has a table {name!r}")
        path = tables.write(frame, name, self.folder / "tables")
        self._tables[name] = path.name
        self._save(complete=False)
        display(HTML(html_table.figure(frame, caption, f"{self.name}/{path.name}", f"table-{name}")))
        return Shown(frame)

    def figure(self, figure: Figure, name: str, alt: str) -> None:
        """Store and show a figure as SVG, with the line that says where it comes from.

        Args:
            figure: drawn with `figures.style.look()`.
            name: name of the stored file, in words joined by hyphens.
            alt: what the figure shows, for those who cannot see it.

        Raises:
            ValueError: an empty `alt`.
        """
        if not alt.strip():
            raise ValueError(f"figure {name!r}: alt text is empty")
        text = style.svg(figure)
        folder = self.folder / "figures"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
        display({"image/svg+xml": text, "text/plain": alt}, raw=True)
        display(HTML(f"<p class='qsa-made-by'>{html.escape(self._made_by())}</p>"))

    def glue(self, key: str, value: int | float | str) -> None:
        """Keep one number or word under `key` for other pages.

        Raises:
            TypeError: not a plain int, float or str.
            ValueError: NaN or infinity, or a key that is taken.
        """
        from myst_nb import glue

        if type(value) not in (int, float, str):
            raise TypeError(f"glue {key!r}: expected a plain int, float or str; got {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"glue {key!r}: expected a finite number; got {value}")
        if key in self._glue:
            raise ValueError(f"glue {key!r} is already taken in chapter {self.name!r}")
        self._glue[key] = value
        self._save(complete=False)
        glue(key, value, display=False)

    def provenance(self) -> None:
        """Show where the page comes from; the last cell of every chapter."""
        self._save(complete=True)
        parts = (self._made_by(), self.device_label, self.run.date, f"package {self.run.package_sha256[:12]}")
        display(HTML(f"<p class='qsa-provenance'>{html.escape(', '.join(parts))}</p>"))


def begin(name: str, **values: Any) -> Page:
    """Check interpreter, package version and parameters, and open the chapter's page.

    Args:
        name: the chapter, as in the template's file name.
        values: its parameters.

    Raises:
        ValueError: parameters that the chapter does not accept.
        RuntimeError: the kernel runs another Python or another version of the package than the runner.
    """
    checked = check_parameters(name, values)
    version = metadata.version("qsa-kernels")
    text = os.environ.get(RUN_VARIABLE)
    if text is None:
        run = RunContext(
            run_id="unrecorded",
            notebook=f"notebooks/{name}.ipynb",
            profile="none",
            folder=tempfile.mkdtemp(prefix=f"qsa-{name}-"),
            commit=repository.commit(),
            dirty=repository.is_dirty(),
            package_sha256=repository.package_sha256(),
            executable=sys.executable,
            version=version,
            date=now(),
        )
    else:
        run = RunContext.model_validate_json(text)
    for what, expected, found in (
        ("Python", run.executable, sys.executable),
        ("qsa-kernels version", run.version, version),
    ):
        if expected != found:
            raise RuntimeError(f"the kernel has another {what} than the runner: expected {expected}, got {found}")
    device.prepare()
    os.environ["TRITON_CACHE_DIR"] = str(device.cache_folder())

    from qsa_kernels.measure import environment

    return Page(name, checked, run, environment.describe())
