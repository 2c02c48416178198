"""Directives of Sphinx with which pages in prose show what runs have stored, checked against its hashes."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from qsa_kernels.report import book, catalogue, html_table, repository, runs


def _raw(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


def _made_by(run: runs.Run) -> nodes.raw:
    record = run.manifest
    state = repository.describe_commit(record.commit, record.dirty)
    words = f"Made by notebooks/{record.chapter}.ipynb, run {record.run_id}, {state}"
    return _raw(f"<p class='qsa-made-by'>{html.escape(words)}</p>")


class Stored(SphinxDirective):
    """What the directives below share: any fault of a run fails the build with its own message."""

    required_arguments = 1

    @property
    def up(self) -> str:
        """From the page to the root of the book."""
        return "../" * self.env.docname.count("/")

    def run(self) -> list[nodes.Node]:
        try:
            return self.show()
        except (OSError, ValueError, KeyError) as error:
            raise self.error(f"{self.name} {self.arguments[0]}: {error}") from None

    def show(self) -> list[nodes.Node]:
        raise NotImplementedError


class PublishedTable(Stored):
    """A table that a chapter has stored: `chapter/table`, with `columns` the ones to show."""

    option_spec: ClassVar[dict[str, Any]] = {
        "caption": directives.unchanged_required,
        "columns": directives.unchanged_required,
    }

    def show(self) -> list[nodes.Node]:
        chapter, _, name = self.arguments[0].partition("/")
        run = runs.published(chapter)
        frame = run.table(name)
        if wanted := self.options.get("columns"):
            frame = frame[[column.strip() for column in wanted.split(",")]]
        address = f"{self.up}{book.RESULTS}/{chapter}/{Path(run.manifest.tables[name].file).name}"
        return [_raw(html_table.figure(frame, self.options["caption"], address, f"table-{name}")), _made_by(run)]


class PublishedFigure(Stored):
    """A figure of a chapter: `chapter/name`; the content replaces its caption."""

    has_content = True

    def show(self) -> list[nodes.Node]:
        chapter, _, name = self.arguments[0].partition("/")
        run = runs.published(chapter)
        svg, settings = _figure(run, name)
        folder = Path(self.env.app.outdir).parent / "published"
        folder.mkdir(exist_ok=True)
        (folder / f"{chapter}-{name}.svg").write_text(svg, encoding="utf-8")
        here = Path(self.env.doc2path(self.env.docname)).parent
        address = os.path.relpath(folder / f"{chapter}-{name}.svg", here)
        figure = nodes.figure("", nodes.image(uri=Path(address).as_posix(), alt=settings["image"]["alt"]))
        figure["align"] = "default"
        caption = " ".join(self.content) or settings["figure"]["caption"]
        words, messages = self.parse_inline(caption)
        figure += nodes.caption(caption, "", *words)
        return [figure, _made_by(run), *messages]


def _figure(run: runs.Run, name: str) -> tuple[str, dict[str, Any]]:
    """SVG and metadata of the figure of that name.

    Raises:
        ValueError: the run has no such figure.
    """
    assert run.manifest.notebook is not None
    cells = json.loads((run.folder / run.manifest.notebook.file).read_text(encoding="utf-8"))["cells"]
    known = []
    for cell in cells:
        settings = cell["metadata"].get("mystnb", {})
        for output in cell.get("outputs", []):
            if "figure" in settings and "image/svg+xml" in output.get("data", {}):
                if settings["figure"]["name"] == name:
                    return "".join(output["data"]["image/svg+xml"]), settings
                known.append(settings["figure"]["name"])
    raise ValueError(f"run {run.manifest.run_id}: no figure {name!r}; it has {', '.join(known) or 'none'}")


class StoredTables(Stored):
    """What there is, listed by code: see `_LISTS`."""

    def show(self) -> list[nodes.Node]:
        kind = self.arguments[0]
        if kind not in _LISTS:
            raise ValueError(f"expected one of {', '.join(_LISTS)}")
        caption, make = _LISTS[kind]
        return [_raw(html_table.figure(make(self.up), caption, None, f"stored-{kind}"))]


def _columns(up: str) -> pd.DataFrame:
    stored = [runs.published(chapter) for chapter in book.chapters()] + catalogue.recorded()
    return catalogue.column_table({name for run in stored for name in run.manifest.tables})


_LISTS: dict[str, tuple[str, Callable[[str], pd.DataFrame]]] = {
    "kept": ("Tables that are kept by hand, with their columns.", catalogue.kept_table),
    "recorded": ("Tables of the recorded runs, each run with its manifest.", catalogue.recorded_table),
    "published": (
        "Tables that the chapters show.",
        lambda up: catalogue.published_table(book.chapters(), up),
    ),
    "columns": ("Columns of every table that a run has stored.", _columns),
    "sources": ("Public sources, with the number of figures taken from each.", lambda up: catalogue.source_table()),
    "profiles": ("Launch profiles and where their numbers come from.", lambda up: catalogue.profile_table()),
    "launches": ("Launch profiles, line by line.", lambda up: catalogue.launch_table()),
}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("published-table", PublishedTable)
    app.add_directive("published-figure", PublishedFigure)
    app.add_directive("stored-tables", StoredTables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
