"""What pages in prose say about the code: examples run, commands are accepted, and lists are complete."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from bs4 import BeautifulSoup

from qsa_kernels import arms, attention, e4m3, launch
from qsa_kernels.report import book, catalogue, html_table, repository, runs, tables
from qsa_kernels.report.templates import Template

ROOT = Path(__file__).resolve().parents[2]
PROSE = [*sorted((ROOT / "book").glob("*.md")), ROOT / "README.md"]
ENGINEER = (ROOT / "book/kernel-engineer.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def commands() -> list[str]:
    """Every `qsa` command in a block of the pages."""
    lines = [line for path in PROSE for block in blocks(path.read_text("utf-8"), "bash") for line in block.splitlines()]
    return sorted({line.split("#")[0].strip() for line in lines if line.startswith(".venv/bin/qsa ")})


def test_the_engineers_examples_run_and_agree(monkeypatch):
    """Both calls, on a cache of the layout that the page describes."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(17)
    shape = (2, 16, 1, 32)
    codes = [e4m3.encode(torch.randn(shape), 0.03) for _ in range(2)]
    space: dict[str, object] = {
        "q": torch.randn(3, 6, 32, dtype=torch.float16),
        "k_cache": codes[0],
        "v_cache": codes[1],
        "logical_indices": torch.tensor([[0, 5, 31, -1], [7, 7, 2, 1], [30, 3, 9, 8]], dtype=torch.int32),
        "block_table": torch.tensor([[1, 0]], dtype=torch.int32),
        "token_to_req": torch.zeros(3, dtype=torch.int32),
    }
    first, second = blocks(ENGINEER, "python")
    exec(first, space)
    out = space["out"]
    exec(second, space)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (3, 6, 32)
    assert out.abs().max() > 0
    torch.testing.assert_close(space["out"], out, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("capability", "row"), [((7, 0), "below 8.0"), ((8, 0), "from 8.0, below 8.9"), ((8, 6), "from 8.0, below 8.9")]
)
@pytest.mark.parametrize("last", [False, True], ids=["stated", "from-8.9"])
def test_the_arms_that_auto_takes_are_those_of_the_page(capability, row, last):
    capability, row = ((9, 0), "from 8.9") if last else (capability, row)
    found = re.search(rf"^\| capability {re.escape(row)} \| `(\w+)` \| `(\w+)` \| `([^`]+)` \|", ENGINEER, flags=re.M)
    assert found
    decoder, contraction, arm = found.groups()
    chosen = {"kv_cache_dtype": "fp8_e4m3", "scale_placement": "hoisted", "decoder": "auto", "contraction": "auto"}
    assert attention.resolve_options(capability, **chosen) == (decoder, contraction)
    assert arms.ARMS[arm].options() == {**chosen, "decoder": decoder, "contraction": contraction}


def test_the_default_profiles_are_those_of_the_page():
    shape = {"rows": 33, "q_heads": 6, "kv_heads": 1, "head_dim": 256, "topk": 2051, "itemsize": 2, "quantised": True}
    named = re.findall(r"`(\w+)` (?:below|from) (\d)\.(\d)", ENGINEER)
    assert [name for name, *_ in named] == ["pre_ampere", "generic", "sm90"]
    for name, major, minor in named:
        capability = (7, 0) if name == "pre_ampere" else (int(major), int(minor))
        chosen = [launch.choose(one, capability=capability, contraction="dot", **shape) for one in (None, name)]
        assert chosen[0] == chosen[1]
    vector = [launch.choose(one, capability=(7, 0), contraction="vector", **shape) for one in (None, "vector")]
    assert vector[0] == vector[1]


def test_the_limits_on_the_page_are_those_of_the_operator():
    assert f"from `{min(launch.HEAD_DIMS)}` to `{max(launch.HEAD_DIMS)}`" in ENGINEER
    assert f"at most `{launch.MAX_GROUP}` query heads" in ENGINEER


@pytest.mark.parametrize("command", [line for line in commands() if " run " in line or " batch " in line])
def test_commands_that_run_notebooks_name_what_there_is(command):
    words = shlex.split(command)[1:]
    if words[0] == "batch":
        assert words[1] == "sweep.yaml"
        return
    chapter = Template(ROOT / f"notebooks/{words[1]}.ipynb")
    chapter.resolve(chapter.parse([words[place + 1] for place, word in enumerate(words) if word == "--set"]))


def test_every_command_on_the_pages_exists():
    from typer.main import get_command

    from qsa_kernels.report.cli import app

    known = get_command(app).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"\bqsa ([a-z][a-z-]+)\b", "\n".join(path.read_text("utf-8") for path in PROSE)))
    assert named <= set(known)
    for line in commands():
        words = shlex.split(line)[1:]
        options = {name for parameter in known[words[0]].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_terms_of_the_glossary_are_in_order_and_explained_once():
    text = (ROOT / "book/glossary.md").read_text(encoding="utf-8")
    body = re.search(r"^:::\{glossary\}\n(.*?)^:::$", text, flags=re.M | re.S)
    assert body
    terms = re.findall(r"^(\S.*)$", body[1], flags=re.M)
    assert terms == sorted(set(terms), key=str.casefold)
    assert len(terms) > 30


def test_the_changelog_knows_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (.*)$", text, flags=re.M)
    assert headings[0] == "Unreleased" or headings[0].startswith(f"[{version}]")
    assert version in text


def test_every_literature_entry_is_cited_and_every_citation_has_one():
    known = set(re.findall(r"^@\w+\{([^,]+),", (ROOT / "book/references.bib").read_text("utf-8"), flags=re.M))
    texts = [path.read_text("utf-8") for path in (*PROSE, *(ROOT / "notebooks").glob("*.ipynb"))]
    cited = {key for text in texts for keys in re.findall(r"\{cite:[pt]\}`([^`]+)`", text) for key in keys.split(",")}
    assert cited == known


@pytest.mark.parametrize(
    ("column", "unit"),
    [
        ("time_us", "µs"),
        ("implied_gb_per_s", "GB/s"),
        ("constant_bytes_per_token", "bytes a token"),
        ("floor_log_ratio", "natural logarithm of a ratio"),
        ("wall_time_s", "s"),
        ("bytes_fp16", "bytes"),
        ("rows", "none"),
        ("status", "none"),
        ("ratio", "none"),
    ],
)
def test_a_unit_is_read_from_the_name(column, unit):
    assert catalogue.unit(column) == unit


def test_the_lists_name_every_table_of_the_repository_with_its_checksum(monkeypatch):
    monkeypatch.delenv("QSA_ROOT", raising=False)
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "data").rglob("*") if path.suffix in (".csv", ".gz")}
    listed = pd.concat([catalogue.kept_table("../"), catalogue.recorded_table("../")])
    by_file = dict(zip(listed["download"].str.removeprefix("../"), listed["sha256"], strict=True))
    assert files <= set(by_file)
    assert {path.relative_to(ROOT).as_posix() for path in catalogue.downloads()} == set(by_file)
    assert all(repository.sha256(ROOT / name) == digest for name, digest in by_file.items())


def test_every_column_of_every_schema_is_described():
    described = catalogue.column_table(set(tables.SCHEMAS))
    for name, schema in tables.SCHEMAS.items():
        own = set(schema.columns) - {"status", "reason"}
        assert set(described.loc[described["table"] == name, "column"]) == own
    verdict = described.query("table == 'latency_cells' and column == 'verdict'").iloc[0]
    assert verdict["values"] == "faster, slower, same, undecided, not measurable"


def test_every_line_of_every_launch_profile_is_listed():
    lines = sum(len(profile.quantised_tiers) + len(profile.tiers) for profile in launch.PROFILES.values())
    assert len(catalogue.launch_table()) == lines
    assert set(catalogue.profile_table()["profile"]) == set(launch.PROFILES)


def test_long_tables_alone_are_sortable_and_downloads_are_links():
    frame = pd.DataFrame({"download": ["../a/b & c.csv"] * 9, "sha256": ["0" * 64] * 9, "rows": range(9)})
    long = BeautifulSoup(html_table.figure(frame, "Nine.", None, "nine"), "html.parser")
    assert long.table["class"] == ["qsa-sortable"]
    assert long.td.a["href"] == "../a/b & c.csv"
    assert long.td.a.text == "b & c.csv"
    assert [" ".join(cell.get("class", [])) for cell in long.tr.find_all("th")] == ["", "qsa-hash", "qsa-number"]
    short = BeautifulSoup(html_table.figure(frame.head(8), "Eight.", "a.csv", "eight"), "html.parser")
    assert short.table.get("class") is None
    assert short.figcaption.a["href"] == "a.csv"


PAGE = """# Tiny

```{published-table} example/example_cells
:caption: Squares.
:columns: label, square
```

```{stored-tables} published
```

```{stored-tables} columns
```
"""


def write(copied, page: str) -> None:
    config = yaml.safe_load((copied.root / "_config.yml").read_text())
    config["sphinx"]["extra_extensions"].append("qsa_kernels.report.directives")
    (copied.root / "_config.yml").write_text(yaml.safe_dump(config))
    (copied.root / "book/index.md").write_text(page)


def test_pages_show_what_the_run_of_a_chapter_stored(copied):
    write(copied, PAGE)
    index = book.build().parent / "book/index.html"
    page = BeautifulSoup(index.read_text(encoding="utf-8"), "html.parser")
    squares, published, columns = page.find_all("figure", class_="qsa-table")
    assert [cell.text for cell in squares.find_all("th")] == ["label", "square"]
    assert squares.tbody.td.text == "a"
    assert "49.25" in squares.tbody.text
    assert runs.published("example").manifest.run_id in page.find("p", class_="qsa-made-by").text
    for link in (squares.figcaption.a, published.td.find_next("a")):
        assert (index.parent / link["href"]).resolve().is_file()
    assert "example_cells" in columns.text


FAULTS = {
    "```{published-table} example/other\n:caption: None.\n```": "no table 'other'; it has example_cells",
    "```{published-table} error/error_cells\n:caption: None.\n```": "no published page book/results/error.ipynb",
    "```{published-table} example/example_cells\n:caption: None.\n:columns: cube\n```": "cube",
    "```{published-figure} example/fig-none\n```": "no figure 'fig-none'; it has none",
    "```{stored-tables} others\n```": "expected one of kept, recorded",
}


def test_what_no_run_has_stored_fails_the_build(copied):
    write(copied, "# Tiny\n\n" + "\n\n".join(FAULTS))
    with pytest.raises(book.BookError) as caught:
        book.build()
    said = str(caught.value).splitlines()
    assert [words for words in FAULTS.values() if not any(words in line for line in said)] == []
    assert not (copied.root / "_build/html").exists()
