"""What a reader's browser makes of the built book: every page, opened as a file with the network blocked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, TimeoutError, expect, sync_playwright

CHECKOUT = Path(__file__).resolve().parents[2]
BOOK = Path(os.environ.get("QSA_BOOK", CHECKOUT / "_build/html")).resolve()
CHROMIUM = Path("/usr/bin/chromium")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
ENTRY = BOOK / "index.html"
PAGES = sorted(
    path.relative_to(BOOK).as_posix()
    for path in BOOK.rglob("*.html")
    if path != ENTRY and "_static" not in path.relative_to(BOOK).parts
)

pytestmark = [
    pytest.mark.skipif(not PAGES, reason="no book is built; run 'make report' or name one with QSA_BOOK"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing"),
    pytest.mark.timeout(300),
]

# Faults of the theme that a style sheet cannot mend: rule, selector of what it may complain about, why.
ALLOWED: list[tuple[str, str, str]] = [
    (
        "aria-required-children",
        ".citation-list",
        "docutils puts doc-biblioentry, a kind of list item that axe does not count as one, into role=list",
    ),
]

# MathJax draws an unknown command in red.
LOOK = """() => {
  const shown = element => element.checkVisibility() && element.getBoundingClientRect();
  const name = element => element.id || element.getAttribute('src')?.slice(0, 80) || element.outerHTML.slice(0, 120);
  return {
    theme: document.documentElement.dataset.theme,
    ground: getComputedStyle(document.body).backgroundColor,
    ids: [...document.querySelectorAll('[id], a[name]')].map(each => each.id || each.name),
    links: [...document.querySelectorAll('a[href]')].map(each => each.href),
    images: [...document.images].map(each => ({
      name: name(each), source: each.src,
      alt: each.getAttribute('alt'), decorative: each.getAttribute('role') === 'presentation',
      natural: each.naturalWidth, shown: shown(each) ? [shown(each).width, shown(each).height] : null,
    })),
    figures: [...document.querySelectorAll('figure')].filter(shown).map(each => ({
      name: name(each), width: shown(each).width, height: shown(each).height,
      caption: each.querySelector('figcaption')?.innerText.trim() ?? '',
    })),
    formulas: document.querySelectorAll('.math').length,
    unrendered: [...document.querySelectorAll('.math')].filter(each => !each.querySelector('mjx-container')).map(name),
    wrong: [...document.querySelectorAll('mjx-merror, mjx-container [style*="color: red"]')].map(
      each => each.outerHTML.slice(0, 200)),
    empty: [...document.querySelectorAll('mjx-container')].filter(
      each => shown(each) && shown(each).width === 0).map(name),
    mathjax: [...document.scripts].map(each => each.src).filter(each => /mathjax/i.test(each)),
  };
}"""
TABLES_READY = """() => document.documentElement.dataset.qsaTables === 'ready'
  || !document.querySelector('table.qsa-sortable')"""
# Rows of a table are alike; axe takes a minute for hundreds of them.
FEW_ROWS = "document.querySelectorAll('tbody').forEach(body => [...body.rows].slice(6).forEach(row => row.remove()))"
SIDEWAYS = """() => ['html', 'body', '.bd-container', '.bd-main', '.bd-content', '.bd-article-container', '.bd-article']
  .map(selector => [selector, document.querySelector(selector)])
  .filter(([, element]) => element && element.scrollWidth > element.clientWidth && element.clientWidth > 0)
  .map(([selector, element]) => `${selector} is ${element.scrollWidth} px wide in ${element.clientWidth}`)"""


@dataclass
class Visit:
    """What one page showed: on a desk, light and dark, then on a phone."""

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    light: dict = field(default_factory=dict)
    dark: dict = field(default_factory=dict)
    sideways: list[str] = field(default_factory=list)
    barriers: list[str] = field(default_factory=list)
    dark_barriers: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=QUIET)
        yield browser
        browser.close()


def local(route: Route) -> None:
    """Let files and inline data through; there is no network."""
    if urlsplit(route.request.url).scheme in ("file", "data", "blob"):
        route.continue_()
    else:
        route.abort()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", reduced_motion="reduce")
    context.route("**/*", local)
    yield context
    context.close()


def listen(page: Page, visit: Visit) -> None:
    page.on(
        "console",
        lambda message: visit.complaints.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    page.on("requestfailed", lambda request: visit.complaints.append(f"failed to load {request.url}"))
    page.on("request", lambda request: visit.requests.append(request.url))


def settle(page: Page) -> None:
    page.wait_for_load_state("load")
    page.evaluate("async () => { if (window.MathJax?.startup?.promise) await MathJax.startup.promise; }")
    page.wait_for_function(TABLES_READY, timeout=60_000)


def barriers(page: Page, **options: object) -> list[str]:
    """Serious and critical findings of axe, without those that ALLOWED explains."""
    found = []
    for violation in (
        Axe().run(page, options={"resultTypes": ["violations"], "preload": False, **options}).response["violations"]
    ):
        if violation["impact"] not in ("serious", "critical"):
            continue
        for node in violation["nodes"]:
            target = str(node["target"][0])
            allowed = [selector for rule, selector, _ in ALLOWED if rule == violation["id"]]
            if not any(
                page.evaluate("([a, b]) => document.querySelector(a)?.matches(b)", [target, a]) for a in allowed
            ):
                said = re.sub(r"\s+", " ", node.get("failureSummary", ""))
                found.append(f"{violation['id']}: {target}: {node['html'][:120]}: {said}")
    return found


@pytest.fixture(scope="module")
def visit(context: BrowserContext) -> Callable[[str], Visit]:
    """Opens each page once, however many tests ask."""
    visits: dict[str, Visit] = {}

    def visit(name: str) -> Visit:
        if name not in visits:
            seen = visits[name] = Visit()
            page = context.new_page()
            listen(page, seen)
            page.goto((BOOK / name).as_uri())
            settle(page)
            seen.light = page.evaluate(LOOK)
            page.set_viewport_size(PHONE)
            seen.sideways = page.evaluate(SIDEWAYS)
            page.set_viewport_size(DESKTOP)
            page.evaluate(FEW_ROWS)
            seen.barriers = barriers(page)
            page.emulate_media(color_scheme="dark")
            with suppress(TimeoutError):
                page.wait_for_function("document.documentElement.dataset.theme === 'dark'", timeout=5_000)
            seen.dark = page.evaluate(LOOK)
            seen.dark_barriers = barriers(page, runOnly={"type": "rule", "values": ["color-contrast"]})
            page.close()
        return visits[name]

    return visit


@pytest.mark.parametrize("page", PAGES)
def test_a_page_opens_without_complaint_and_asks_no_other_host(visit, page):
    seen = visit(page)
    assert seen.complaints == []
    assert {urlsplit(address).scheme for address in seen.requests} <= {"file", "data", "blob"}
    outside = [address for address in seen.requests if address.startswith("file:") and BOOK.as_uri() not in address]
    assert outside == []


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_book_arrive(visit, page):
    broken = []
    for address in sorted(set(visit(page).light["links"])):
        if not address.startswith("file:"):
            assert address.startswith(("https:", "mailto:")), address
            continue
        plain, anchor = urldefrag(address)
        target = Path(unquote(urlsplit(plain).path))
        if not target.is_file() or not target.is_relative_to(BOOK):
            broken.append(address)
        elif anchor and target.suffix == ".html":
            ids = visit(target.relative_to(BOOK).as_posix()).light["ids"]
            if unquote(anchor) not in ids:
                broken.append(address)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_images_and_figures_have_size_caption_and_alt_text(visit, page):
    look = visit(page).light
    for image in look["images"]:
        assert image["natural"] > 0, image
        assert image["shown"] is None or min(image["shown"]) > 0, image
        assert image["decorative"] or (image["alt"] or "").strip(), image
        # a file name instead of words is what Sphinx writes when nobody gave any
        assert not re.search(r"\.(svg|png)$|^_images/", image["alt"] or ""), image
    for figure in look["figures"]:
        assert min(figure["width"], figure["height"]) > 20, figure
        assert figure["caption"], figure


def test_every_stored_image_stands_on_some_page(visit):
    shown = {Path(image["source"]).name for page in PAGES for image in visit(page).light["images"]}
    assert {path.name for path in (BOOK / "_images").glob("*.svg")} <= shown


@pytest.mark.parametrize("page", PAGES)
def test_formulas_are_rendered_by_the_mathjax_of_the_book(visit, page):
    look = visit(page).light
    assert look["unrendered"] == []
    assert look["wrong"] == []
    assert look["empty"] == []
    assert all(address.startswith(BOOK.as_uri()) for address in look["mathjax"])
    assert look["formulas"] == 0 or look["mathjax"]


@pytest.mark.parametrize("page", PAGES)
def test_a_phone_needs_no_sideways_scroll(visit, page):
    assert visit(page).sideways == []


@pytest.mark.parametrize("page", PAGES)
def test_the_theme_follows_the_reader(visit, page):
    seen = visit(page)
    assert (seen.light["theme"], seen.dark["theme"]) == ("light", "dark")
    assert seen.light["ground"] != seen.dark["ground"]


@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_no_serious_barrier(visit, page):
    assert visit(page).barriers == []


@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_no_lack_of_contrast_in_the_dark(visit, page):
    assert visit(page).dark_barriers == []


def test_the_method_page_has_formulas(visit):
    assert visit("book/method.html").light["formulas"] > 3


def column(page: Page, table: str, heading: str) -> list[str]:
    """Cells under a heading, of the rows that are shown."""
    return page.evaluate(
        """([table, heading]) => {
          const place = [...document.querySelectorAll(`${table} thead th`)].findIndex(
            each => each.innerText.trim().startsWith(heading));
          return [...document.querySelectorAll(`${table} tbody tr`)].map(row => row.cells[place].innerText);
        }""",
        [table, heading],
    )


def test_a_click_on_a_heading_sorts_a_long_table(context):
    page = context.new_page()
    page.goto((BOOK / "book/data.html").as_uri())
    settle(page)
    table = "#stored-published"
    before = column(page, table, "bytes")
    heading = page.locator(f"{table} thead th", has_text="bytes")
    heading.click()
    expect(heading).to_have_attribute("aria-sort", "ascending")
    ascending = [int(text) for text in column(page, table, "bytes")]
    assert ascending == sorted(map(int, before))
    heading.get_by_role("button").press("Enter")
    expect(heading).to_have_attribute("aria-sort", "descending")
    assert [int(text) for text in column(page, table, "bytes")] == ascending[::-1]
    heading = page.locator(f"{table} thead th", has_text="download")
    heading.click()
    expect(heading).to_have_attribute("aria-sort", "ascending")
    names = column(page, table, "download")
    assert names == sorted(names, key=str.casefold)
    page.close()


def test_words_filter_a_long_table_and_the_rest_comes_back(context):
    page = context.new_page()
    page.goto((BOOK / "book/data.html").as_uri())
    settle(page)
    table = "#stored-recorded"
    every = column(page, table, "download")
    page.get_by_label("Filter rows").first.wait_for()
    field = page.locator(f"{table} input[type=search]")
    field.fill("manifest")
    shown = page.locator(f"{table} .dt-info")
    expect(shown).to_have_text(f"{every.count('manifest.json')} rows of {len(every)}")
    assert set(column(page, table, "download")) == {"manifest.json"}
    field.fill("")
    expect(shown).to_have_text(f"{len(every)} rows")
    assert column(page, table, "download") == every
    page.close()


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_read_without_a_script(browser, page):
    context = browser.new_context(viewport=PHONE, java_script_enabled=False)
    opened = context.new_page()
    opened.goto((BOOK / page).as_uri())
    for table in opened.locator("figure.qsa-table").all():
        assert table.locator("thead th").first.is_visible()
        last = table.locator("tbody tr:last-child td")
        assert last.count() == 0 or last.first.is_visible()
        assert str(table.get_attribute("id")).startswith("stored-") or table.locator("figcaption a[download]").count()
    context.close()


def test_the_root_leads_to_the_first_page(context):
    page = context.new_page()
    page.goto(ENTRY.as_uri(), wait_until="commit")
    page.wait_for_url((BOOK / "book/index.html").as_uri(), timeout=10_000)
    assert page.title()
    page.close()


@pytest.fixture
def address() -> Iterator[str]:
    """The book as a server on this machine shows it."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(BOOK))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def found(page: Page, address: str) -> list[str]:
    """Pages that the search page lists."""
    page.goto(f"{address}/search.html?q=scale")
    page.locator("#search-results ul.search li a").first.wait_for(timeout=10_000)
    page.wait_for_function("/found/i.test(document.querySelector('#search-results .search-summary')?.innerText)")
    hits = page.locator("#search-results ul.search li > a")
    return [urlsplit(str(hit.get_attribute("href"))).path for hit in hits.all()]


def test_search_works_without_a_server(context):
    # Sphinx then lists titles alone: a browser does not let it read the other files for the summaries.
    page = context.new_page()
    hits = found(page, BOOK.as_uri())
    assert "book/method.html" in hits
    assert all((BOOK / hit).is_file() for hit in hits)
    page.close()


def test_search_on_a_server_adds_summaries_and_asks_no_other_host(browser, address):
    context = browser.new_context(viewport=DESKTOP)
    context.route("**/*", lambda route: route.continue_() if route.request.url.startswith(address) else route.abort())
    seen = Visit()
    page = context.new_page()
    listen(page, seen)
    assert "book/method.html" in found(page, address)
    page.locator("#search-results ul.search li p.context").first.wait_for(timeout=10_000)
    assert seen.complaints == []
    assert [asked for asked in seen.requests if not asked.startswith((address, "data:"))] == []
    context.close()


def test_a_foreign_request_and_a_missing_file_would_be_noticed(context, tmp_path):
    """The listeners themselves: a page with both faults, and one that axe must refuse."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><html><head><title>bad</title></head><body><img src='missing.svg'>"
        "<script src='https://example.org/x.js'></script><script>nowhere()</script></body></html>"
    )
    seen = Visit()
    page = context.new_page()
    listen(page, seen)
    page.goto(bad.as_uri())
    settle(page)
    said = "\n".join(seen.complaints)
    assert "missing.svg" in said
    assert "https://example.org/x.js" in said
    assert "nowhere is not defined" in said
    found = "\n".join(barriers(page))
    assert "image-alt" in found
    assert "html-has-lang" in found
    page.close()


def test_every_explained_fault_is_explained():
    assert all(rule and selector and len(why) > 20 for rule, selector, why in ALLOWED)
