"""Build the book from published pages, and refuse anything stale, failed or unreadable without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from bs4 import BeautifulSoup

from qsa_kernels.report import repository, runs

RESULTS = "book/results"
TABLE_LIBRARY = "itables.js"
# Files that may differ between two builds from the same runs, each with the reason. There are none: the place, the time
# zone and the order of hashing leave no trace.
VARYING: dict[str, str] = {}
# the package has no __main__, and the script beside this Python may be missing or another one
_JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"
_STRICT = ("-W", "-n", "--keep-going", "-q")
# Links that say something about a page without making the browser fetch anything.
_QUIET_RELATIONS = {"canonical", "license", "author", "next", "prev", "search", "index", "help"}
_LIVE_CODE = re.compile(
    r"[ \t]*<script>const THEBE_JS_URL\b[^<]*</script>\n?"
    r'|[ \t]*<script type="text/x-thebe-config">[^<]*</script>\n?'
    r"|[ \t]*<script>kernelName = [^<]*</script>\n?"
    r'|[ \t]*<(?:script|link)\b[^>]* (?:src|href)="[^"]*/sphinx-thebe\.[^"]*"[^>]*>(?:</script>)?\n?'
)


class BookError(RuntimeError):
    """The book cannot be built or must not be published; the message lists every reason."""


def check_version() -> None:
    """Refuse a Jupyter Book that cannot build this book.

    Raises:
        BookError: not version 1.
    """
    version = metadata.version("jupyter-book")
    if version.split(".")[0] != "1":
        raise BookError(f"jupyter-book: expected version 1, which _config.yml and _toc.yml are for; got {version}")


def pages() -> list[str]:
    """All pages of the table of contents, without suffix, in order.

    Raises:
        BookError: no _toc.yml, or one without pages.
    """
    path = repository.root() / "_toc.yml"
    if not path.is_file():
        raise BookError(f"no _toc.yml in {repository.root()}")
    found = list(_entries(yaml.safe_load(path.read_text(encoding="utf-8"))))
    if not found:
        raise BookError("_toc.yml lists no pages")
    return found


def _entries(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("file", "root"):
                yield str(value)
            else:
                yield from _entries(value)
    elif isinstance(node, list):
        for value in node:
            yield from _entries(value)


def chapters() -> list[str]:
    """Names of the chapters that the table of contents lists."""
    return [page.removeprefix(f"{RESULTS}/") for page in pages() if page.startswith(f"{RESULTS}/")]


def check_pages() -> dict[str, runs.Run]:
    """The run behind each results page, by chapter.

    Raises:
        BookError: lists every page that is missing, made by no stored run, made from other sources than the present
            ones, holds a failed cell, or has a figure without caption, name or alt text, and every recorded run whose
            files are not those of its manifest.
    """
    root = repository.root()
    problems = list(_damaged_records())
    found: dict[str, runs.Run] = {}
    for page in pages():
        if not page.startswith(f"{RESULTS}/"):
            if not any((root / f"{page}{suffix}").is_file() for suffix in (".md", ".ipynb", ".rst")):
                problems.append(f"{page}: listed in _toc.yml, but there is no such page")
            continue
        path = root / f"{page}.ipynb"
        name = path.stem
        try:
            run = runs.published(name)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        found[name] = run
        if changed := runs.stale_inputs(run):
            problems.append(f"{page}: stale, made before a change of {', '.join(changed)}; run 'qsa run {name}'")
        problems += [f"{page}: {problem}" for problem in _cell_problems(path)]
    if problems:
        raise BookError("; ".join(problems))
    return found


def _damaged_records() -> Iterator[str]:
    for path in sorted(runs.recorded_folder().glob("*/manifest.json")):
        try:
            runs.Run(path.parent)
        except (OSError, ValueError) as error:
            yield str(error)


def _cell_problems(path: Path) -> Iterator[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells, start=1):
        outputs = cell.get("outputs", [])
        for output in outputs:
            if output["output_type"] == "error":
                yield f"cell {number} failed with {output['ename']}"
            if 'class="dataframe"' in "".join(output.get("data", {}).get("text/html", "")):
                yield f"cell {number} shows a bare data frame; assign what page.table returns"
        if any("image/svg+xml" in output.get("data", {}) for output in outputs):
            settings = cell["metadata"].get("mystnb", {})
            given = {**settings.get("figure", {}), **settings.get("image", {})}
            missing = [key for key in ("caption", "name", "alt") if not given.get(key)]
            if missing:
                yield f"cell {number} shows a figure whose metadata lack {', '.join(missing)}"


def build(published: Path | None = None) -> Path:
    """Build the book and return its index.html; the published book is replaced only by a complete one.

    Args:
        published: where it goes; default: _build/html of the checkout.

    Raises:
        BookError: the wrong Jupyter Book, a page that must not be published, a warning of the build (a missing glue
            key is one), or HTML that is empty, old or loads something from another host.
    """
    check_version()
    sources = check_pages()
    root = repository.root()
    published = published or root / "_build/html"
    published.parent.mkdir(exist_ok=True)
    begin = time.time()
    with tempfile.TemporaryDirectory(dir=published.parent, prefix=".book-") as folder:
        answer = subprocess.run(
            [sys.executable, "-c", _JUPYTER_BOOK, "build", str(root), "--path-output", folder, *_STRICT],
            cwd=root,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        html = Path(folder) / "_build/html"
        if answer.returncode:
            raise BookError(f"the build failed:\n{_complaints(answer.stdout + answer.stderr)}")
        for name, run in sources.items():
            _copy_tables(run, html / RESULTS / name)
        _copy_data(html)
        _drop_live_code(html)
        _add_table_library(html)
        check_html(html, sources, begin)
        _write_entry(html)
        _swap(html, published)
    return published / "index.html"


def _complaints(log: str) -> str:
    lines = [line for line in log.splitlines() if any(word in line for word in ("WARNING", "ERROR", "rror:"))]
    return "\n".join(lines or log.splitlines()[-20:])


def _copy_tables(run: runs.Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stored in run.manifest.tables.values():
        shutil.copyfile(run.folder / stored.file, folder / Path(stored.file).name)
    shutil.copyfile(run.folder / "manifest.json", folder / "manifest.json")


def _copy_data(html: Path) -> None:
    """Public figures and recorded runs, under the paths that they have in the repository."""
    from qsa_kernels.report import catalogue  # pandas takes seconds to import

    for path in catalogue.downloads():
        copy = html / path.relative_to(repository.root())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _drop_live_code(html: Path) -> None:
    """Take out Thebe, which the theme always adds, twice over, and which could only start at another host."""
    for page in html.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(_LIVE_CODE.sub("", text), encoding="utf-8")


def _add_table_library(html: Path) -> None:
    """Put the DataTables of itables where `qsa-tables.js` looks for it, once for all pages.

    A browser imports no module from a file, but it imports one from a text in a plain script.
    """
    import itables.options

    source = Path(itables.options.dt_bundle).read_text(encoding="utf-8")
    blob = f'new Blob([{json.dumps(source)}], {{ type: "text/javascript" }})'
    script = html / "_static" / TABLE_LIBRARY
    script.write_text(f"window.qsaTableLibrary = import(URL.createObjectURL({blob}));\n", encoding="utf-8")


def _write_entry(html: Path) -> None:
    """Give the redirect that Jupyter Book leaves at the root a language, a title and a link."""
    config = yaml.safe_load((repository.root() / "_config.yml").read_text(encoding="utf-8"))
    title, first = escape(config["title"]), escape(f"{pages()[0]}.html")
    (html / "index.html").write_text(
        f"<!doctype html>\n<html lang='en-GB'><head><meta charset='utf-8'><title>{title}</title>"
        f"<meta http-equiv='refresh' content='0; url={first}'></head>"
        f"<body><main><h1><a href='{first}'>{title}</a></h1></main></body></html>\n",
        encoding="utf-8",
    )


def check_html(html: Path, sources: dict[str, runs.Run], begin: float) -> None:
    """Check what was built.

    Args:
        html: folder of the built pages.
        sources: run behind each results page.
        begin: when the build began, seconds since the epoch.

    Raises:
        BookError: lists every problem.
    """
    problems = []
    index = html / "index.html"
    if not index.is_file() or index.stat().st_size == 0:
        problems.append("index.html is missing or empty")
    elif index.stat().st_mtime < begin - 2:
        problems.append("index.html is older than this build")
    for page in pages():
        path = html / f"{page}.html"
        if not path.is_file() or path.stat().st_size == 0:
            problems.append(f"{page}.html is missing or empty")
    for name, run in sources.items():
        path = html / RESULTS / f"{name}.html"
        if path.is_file() and run.manifest.run_id not in path.read_text(encoding="utf-8"):
            problems.append(f"{name}.html does not name its run {run.manifest.run_id}")
    problems += [f"{page.relative_to(html)} loads {address}" for page, address in external_loads(html)]
    if problems:
        raise BookError("; ".join(problems))


def differences(first: Path, second: Path) -> list[str]:
    """Files that two built books do not have in common byte for byte, apart from `VARYING`.

    Args:
        first: folder of built pages.
        second: another one.
    """
    folders = (first, second)
    names = {path.relative_to(folder).as_posix() for folder in folders for path in folder.rglob("*") if path.is_file()}
    return [name for name in sorted(names - set(VARYING)) if _bytes(first / name) != _bytes(second / name)]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def external_loads(html: Path) -> list[tuple[Path, str]]:
    """Everything that a browser would fetch from another host when it opens the pages.

    Args:
        html: folder of built pages.
    """
    found = []
    for page in sorted(html.rglob("*.html")):
        soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
        for tag in soup.find_all(["script", "img", "iframe", "source", "video", "audio", "embed", "object", "link"]):
            address = str(tag.get("src") or tag.get("href") or tag.get("data") or "")
            relations = set(tag.get("rel") or ())
            if tag.name == "link" and relations and relations <= _QUIET_RELATIONS:
                continue
            if address.startswith(("http:", "https:", "//")):
                found.append((page, address))
    for sheet in sorted(html.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8", errors="replace")
        for marker in ("url(http", "url('http", 'url("http', "url(//", "@import 'http", '@import "http'):
            if marker in text:
                found.append((sheet, marker))
    return found


def _swap(new: Path, published: Path) -> None:
    """Put a folder where another one may be; both renames are instant, and a kill between them leaves no half book."""
    old = published.with_name(".html-old")
    shutil.rmtree(old, ignore_errors=True)
    if published.exists():
        published.rename(old)
    new.rename(published)
    shutil.rmtree(old, ignore_errors=True)
