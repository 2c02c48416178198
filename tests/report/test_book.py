"""The book shows what the runs measured, or is not built."""

from __future__ import annotations

import shutil

import nbformat
import pytest
from bs4 import BeautifulSoup

from qsa_kernels.report import book, repository, runs
from qsa_kernels.report.manifest import StoredFile


def text_of(checkout, page: str) -> str:
    html = (checkout.root / "_build/html" / f"{page}.html").read_text(encoding="utf-8")
    return BeautifulSoup(html, "html.parser").get_text()


def republish(checkout, edit) -> None:
    """Change the published page together with its run, so that only the content is at fault."""
    run = runs.published("example")
    path = run.folder / "example.ipynb"
    notebook = nbformat.read(path, as_version=4)
    edit(notebook)
    record = run.manifest.model_copy(update={"parameters": {**run.manifest.parameters, "label": "edited"}})
    notebook.metadata["qsa"]["record"] = record.digest()
    nbformat.write(notebook, path)
    stored = StoredFile(file=path.name, sha256=repository.sha256(path))
    record.model_copy(update={"notebook": stored}).write(run.folder / "manifest.json")
    runs.publish(runs.Run(run.folder))


def test_numbers_of_a_run_reach_other_pages_and_follow_it(copied):
    index = book.build()
    assert index == copied.root / "_build/html/index.html"
    assert "url=book/index.html" in index.read_text()
    assert "The square is 49.25" in text_of(copied, "book/index")
    assert (index.parent / "book/results/example/example_cells.csv").read_text().count("\n") == 3
    assert book.external_loads(index.parent) == []
    # the theme declares it twice, which a browser refuses, and it could only load from another host
    assert "thebe" not in (index.parent / "book/index.html").read_text().lower()
    assert 'src="../_static/mathjax/' in (index.parent / "book/index.html").read_text()
    assert (index.parent / "_static/mathjax/tex-chtml.js").is_file()
    library = (index.parent / "_static" / book.TABLE_LIBRARY).read_text()
    assert library.startswith("window.qsaTableLibrary = import(URL.createObjectURL(new Blob([")
    assert "datatables.net/license" in library

    def change(notebook):
        text = nbformat.writes(notebook).replace("49.25", "36.25")
        notebook.update(nbformat.reads(text, as_version=4))

    republish(copied, change)
    book.build()
    assert "The square is 36.25" in text_of(copied, "book/index")
    assert "49.25" not in text_of(copied, "book/index") + text_of(copied, "book/results/example")


def test_a_missing_glue_key_fails_and_the_old_book_stays(copied):
    old = copied.root / "_build/html"
    old.mkdir(parents=True)
    (old / "index.html").write_text("old")
    page = copied.root / "book/index.md"
    page.write_text(page.read_text().replace("example_square", "example_cube"))
    with pytest.raises(book.BookError, match="example_cube"):
        book.build()
    assert (old / "index.html").read_text() == "old"
    assert [path.name for path in (copied.root / "_build").iterdir()] == ["html"]


def test_a_stale_page_is_refused(copied):
    template = copied.root / "notebooks/example.ipynb"
    template.write_text(template.read_text().replace("Squares.", "Other squares."))
    with pytest.raises(book.BookError, match=r"example: stale, made before a change of notebooks/example\.ipynb"):
        book.build()


def test_a_page_made_by_another_package_is_refused(copied, monkeypatch):
    monkeypatch.setattr(repository, "package_sha256", lambda: "6" * 64)
    with pytest.raises(book.BookError, match="stale, made before a change of package"):
        book.check_pages()


def test_changed_results_are_refused(copied):
    run = runs.published("example")
    path = run.folder / "tables/example_cells.csv"
    path.write_text(path.read_text().replace("49.25", "50.25"))
    with pytest.raises(book.BookError, match=r"example_cells\.csv does not match the hash"):
        book.check_pages()


def test_a_tampered_manifest_is_refused(copied):
    path = runs.published("example").folder / "manifest.json"
    path.write_text(path.read_text().replace('"executed_on": "interpreter"', '"executed_on": "cuda"'))
    with pytest.raises(book.BookError, match=r"example\.ipynb: manifest\.json of run .* has changed"):
        book.build()
    assert not (copied.root / "_build/html").exists()


def test_a_damaged_recorded_run_is_refused_whoever_draws_it(copied):
    folder = copied.root / "data/runs/h200-1"
    shutil.copytree(runs.published("example").folder, folder)
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(runs.published("example").manifest.run_id, "h200-1"))
    book.check_pages()
    (folder / "tables/example_cells.csv").write_text("label\n")
    with pytest.raises(book.BookError, match=r"run h200-1: tables/example_cells\.csv does not match the hash"):
        book.build()


def test_two_builds_give_the_same_bytes_wherever_they_run(copied, tmp_path, monkeypatch):
    other = shutil.copytree(copied.root, tmp_path / "elsewhere/deeper/copy")
    first = book.build().parent
    monkeypatch.setenv("QSA_ROOT", str(other))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert book.differences(first, book.build().parent) == []
    (first / "_static/mathjax/tex-chtml.js").unlink()
    (first / "book/index.html").write_text("another page")
    assert book.differences(first, other / "_build/html") == ["_static/mathjax/tex-chtml.js", "book/index.html"]


def test_a_failed_cell_is_refused(copied):
    failed = nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="division by zero", traceback=[])
    republish(copied, lambda notebook: notebook.cells[-1].outputs.append(failed))
    with pytest.raises(book.BookError, match="cell 6 failed with ZeroDivisionError"):
        book.check_pages()


@pytest.mark.parametrize("absent", ["caption", "name", "alt"])
def test_a_figure_without_its_words_is_refused(copied, absent):
    def add(notebook):
        words = {"caption": "A line.", "name": "fig-line", "alt": "A line that rises."}
        del words[absent]
        cell = notebook.cells[-1]
        figure = {key: value for key, value in words.items() if key != "alt"}
        image = {key: value for key, value in words.items() if key == "alt"}
        cell.metadata["mystnb"] = {"figure": figure, "image": image}
        cell.outputs.append(nbformat.v4.new_output("display_data", {"image/svg+xml": "<svg/>"}))

    republish(copied, add)
    with pytest.raises(book.BookError, match=f"figure whose metadata lack {absent}"):
        book.check_pages()


def test_pages_that_are_listed_but_absent_are_all_named(copied):
    toc = copied.root / "_toc.yml"
    toc.write_text(toc.read_text() + "  - file: book/results/latency\n  - file: book/method\n")
    with pytest.raises(book.BookError, match=r"latency\.ipynb: run 'qsa run latency' first; book/method: listed"):
        book.build()
    toc.unlink()
    with pytest.raises(book.BookError, match=r"no _toc\.yml"):
        book.pages()


@pytest.mark.parametrize("version", ["2.0.0", "0.15.1"])
def test_another_jupyter_book_is_refused(copied, monkeypatch, version):
    monkeypatch.setattr(book.metadata, "version", lambda name: version)
    with pytest.raises(book.BookError, match=f"expected version 1, .*got {version}"):
        book.build()


@pytest.mark.parametrize(
    ("markup", "loaded"),
    [
        ("<script src='https://cdn.example/x.js'></script>", True),
        ("<link rel='stylesheet' href='//cdn.example/x.css'>", True),
        ("<img src='http://cdn.example/x.png'>", True),
        ("<iframe src='https://cdn.example'></iframe>", True),
        ("<a href='https://github.com/1CatAI/1Cat-vLLM/pull/453'>source</a>", False),
        ("<link rel='canonical' href='https://here.example/'>", False),
        ("<script src='_static/x.js'></script><img src='data:image/png;base64,AA=='>", False),
    ],
)
def test_what_a_page_would_fetch_from_elsewhere_is_found(tmp_path, markup, loaded):
    (tmp_path / "page.html").write_text(f"<html>{markup}</html>")
    assert bool(book.external_loads(tmp_path)) is loaded


def test_style_sheets_that_fetch_are_found(tmp_path):
    (tmp_path / "x.css").write_text("@font-face { src: url(https://cdn.example/x.woff2); }")
    assert len(book.external_loads(tmp_path)) == 1


def test_html_that_is_missing_empty_or_old_is_refused(copied, tmp_path):
    html = tmp_path / "html"
    (html / "book/results").mkdir(parents=True)
    for page in ("index.html", "book/index.html", "book/results/example.html"):
        (html / page).write_text("content")
    sources = {"example": runs.published("example")}
    with pytest.raises(book.BookError, match="does not name its run"):
        book.check_html(html, sources, begin=0)
    with pytest.raises(book.BookError, match=r"index\.html is older than this build"):
        book.check_html(html, {}, begin=4e9)
    (html / "index.html").write_text("")
    (html / "book/index.html").unlink()
    with pytest.raises(book.BookError, match=r"index\.html is missing or empty; book/index\.html is missing"):
        book.check_html(html, {}, begin=0)
