"""No number in prose is typed by hand: it comes from a run or a table, or it is a name or a definition."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

# What is no prose: removed before digits are looked for.
NO_PROSE = {
    "fenced code": r"^(?P<fence>`{3,}|~{3,})(?!\{(?:note|warning|tip)\})[^\n]*\n.*?^(?P=fence)[ \t]*$",
    "directive or its option": r"^\s*(?::{3,}\{[^\n]*|:[\w-]+:[^\n]*)$",
    "display formula": r"\$\$.*?\$\$",
    "role, such as glue or a citation": r"\{[\w:-]+\}`[^`]*`",
    "code": r"(`+)(?!`).*?(?<!`)\1(?!`)",
    "formula": r"(?<!\\)\$[^$\n]+(?:\n[^$\n]+)*?\$",
    "address": r"https?://[^\s)>\]]+",
    "link target": r"\]\([^)\s]*\)",
    "label": r"^\([\w-]+\)=$",
    "number of a list": r"^\s*\d+\.\s",
}
# What may hold digits without being a figure. Everything else is a number that somebody typed.
ALLOWED = {
    "citation": r"(?:[\w.-]+/)?[\w.-]*#\d+|[\w.-]+/[\w.-]+:[\w./-]+@[0-9a-f]{7,40}",
    "date": r"\b\d{4}-\d{2}-\d{2}\b|\b20\d\d\b",
    "version": r"\b(?:Python|Triton|torch|CUDA|Jupyter Book|Apache)[ -]\d+(?:\.\d+)*(?: (?:or|and) \d+(?:\.\d+)+)*",
    "compute capability": r"\b(?:capability|below|from|since) \d\.\d\b",
    "name with a digit, such as E4M3 or 128K": r"\b[A-Za-z_]+[\w-]*\d[\w.-]*|\b\d+K\b",
    "setting, such as TP 4": r"\b(?:TP|MTP) \d+\b",
    "type, such as 16-bit": r"\b\d+-bit\b",
    "launch, called by its tile": r"\b\d+ columns\b",
    "level of an interval": r"\b95 %",
    "E4M3 and FP16 by definition": (
        r"\b(?:448|65,504|254\s+finite codes|11(?: significant)? bits|bias of 7|bit (?:7|15))(?!\w|,\d)"
    ),
}


def pages() -> list[Path]:
    written = [*sorted((CHECKOUT / "book").glob("*.md")), CHECKOUT / "CHANGELOG.md"]
    return [*written, *sorted((CHECKOUT / "notebooks").glob("*.ipynb"))]


def prose(path: Path) -> Iterator[tuple[str, str]]:
    """Where and text of each piece of markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield path.name, text
        return
    for number, cell in enumerate(json.loads(text)["cells"], start=1):
        if cell["cell_type"] == "markdown":
            yield f"{path.name}, cell {number}", "".join(cell["source"])


def numbers(text: str) -> list[str]:
    """Digits in prose that nothing allows, each with its surroundings."""
    for pattern in (*NO_PROSE.values(), *ALLOWED.values()):
        text = re.sub(pattern, lambda match: "·" + "\n" * match[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return [
        text[max(0, match.start() - 30) : match.end() + 30].replace("\n", " ")
        for match in re.finditer(r"(?<![\w.,])\d[\d.,]*(?:e[+-]?\d+)?", text)
    ]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_no_number_is_typed_by_hand(path: Path) -> None:
    found = [f"{where}: …{around}…" for where, text in prose(path) for around in numbers(text)]
    assert not found, "take these numbers from a run (glue), or say it in words:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "It is 2.4 times faster.",
        "E4M3 holds 931,100 tokens.",
        "An error of 8.26e-06 and $x$ more.",
        "| fp16 | 14.2 |",
        ":::{note}\nSlower by 2 %.\n:::",
        "The gain is 1.836, see 1CatAI/1Cat-vLLM#453.",
        "Below 64 tokens it is slower.",
        "A tile takes 4484 bytes.",
    ],
)
def test_a_typed_number_is_found(text: str) -> None:
    assert len(numbers(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "{glue:text}`results/error.ipynb::error_max:.1e` on an H200, as {numref}`fig-1` shows",
        "`topk=2051`, $2^{-8}$ and\n\n$$\nx = 3\n$$",
        "```bash\nqsa run --set topk=513\n```",
        "[of 2026](https://example.org/2026/1) and 1Cat-vLLM#453, #452",
        "FP16 at 128K on sm_70, compute capability 8.9, Triton 3.6, Python 3.11 or 3.12, TP 4, 16-bit",
        "all 254 finite codes up to 448",
    ],
)
def test_names_definitions_and_glue_are_no_typed_numbers(text: str) -> None:
    assert numbers(text) == []
