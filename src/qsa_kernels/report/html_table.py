"""Tables as static HTML, which the book's script makes sortable where they are long."""

from __future__ import annotations

import html
import re

import pandas as pd

from qsa_kernels.report import tables

# What a page still opens at once with; a longer table is cut, and its CSV has the rest.
SHOWN_ROWS = 1000
# Up to here a table is read faster than it is sorted.
UNSORTED_ROWS = 8


def figure(frame: pd.DataFrame, caption: str, address: str | None, anchor: str) -> str:
    """A table with its caption; readable as it is, without a script.

    `status` and `reason` are left out where they say nothing. Web addresses become links, and so does the column
    "download", which holds addresses relative to the page.

    Args:
        frame: one row an observation.
        caption: one sentence.
        address: of the CSV, relative to the page; None where there is none.
        anchor: id of the figure.
    """
    silent = [
        column
        for column, word in (("status", "passed"), ("reason", ""))
        if column in frame and (frame[column] == word).all()
    ]
    shown = frame.drop(columns=silent).head(SHOWN_ROWS)
    if "status" in shown:
        shown = shown.assign(status=shown["status"].str.replace("_", " "))
    numbers = [pd.api.types.is_numeric_dtype(shown[column]) for column in shown.columns]
    classes = [
        " class='qsa-number'" if number else " class='qsa-hash'" if str(column).endswith("sha256") else ""
        for column, number in zip(shown.columns, numbers, strict=True)
    ]
    head = "".join(
        f"<th scope='col'{kind}>{html.escape(str(column).replace('_', ' '))}</th>"
        for column, kind in zip(shown.columns, classes, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{_download(value) if column == 'download' else _cell(value)}</td>"
            for column, value, kind in zip(shown.columns, row, classes, strict=True)
        )
        + "</tr>"
        for row in shown.itertuples(index=False)
    )
    extent = f" The first {SHOWN_ROWS} of {len(frame)} rows." if len(frame) > SHOWN_ROWS else ""
    link = f" <a href='{html.escape(address)}' download>CSV</a>" if address else ""
    sortable = " class='qsa-sortable'" if len(shown) > UNSORTED_ROWS else ""
    return (
        f"<figure class='qsa-table' id='{html.escape(anchor)}'><figcaption>{html.escape(caption + extent)}{link}"
        f"</figcaption><div class='qsa-scroll' tabindex='0' role='region' aria-label='{html.escape(caption)}'>"
        f"<table{sortable}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></figure>"
    )


def _citation(address: str) -> str:
    """A short name for an address: repository#number or repository:file@commit on GitHub, else without the scheme."""
    name = re.sub(r"^https://(github\.com/)?", "", address)
    name = re.sub(r"^([^/]+/[^/]+)/(?:pull|issues)/(\d+)$", r"\1#\2", name)
    return re.sub(r"^([^/]+/[^/]+)/blob/(\w{1,10})\w*/(?:.*/)?([^/]+)$", r"\1:\3@\2", name)


def _cell(value: object) -> str:
    """A table cell as HTML; web addresses become links."""
    text = html.escape(tables.text_of(value))
    if not text.startswith("https://"):
        return text
    return ", ".join(f"<a href='{address}'>{_citation(address)}</a>" for address in text.split(", "))


def _download(address: object) -> str:
    text = html.escape(str(address))
    return f"<a href='{text}' download>{text.rsplit('/', 1)[-1]}</a>"
