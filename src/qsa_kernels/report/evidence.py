"""Where the value behind a claim is looked up: chapters' stored tables, recorded runs, public figures, or code."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from qsa_kernels.report import manifest, repository, runs

if TYPE_CHECKING:  # pandas and pandera take seconds to import
    import pandas as pd

    from qsa_kernels.report.manifest import Manifest

Plain = bool | int | float | str
Reduce = Literal["only", "min", "max", "median", "geometric mean", "range", "rows", "distinct"]
PLACES = ("compute", "derived", "reported", "stored", "glue", "recorded")
# Lengths of a request at which the published counts are tried, as in the capacity chapter.
LENGTHS_TRIED = range(32_768, 270_000)


class NotMeasured(Exception):
    """Nothing is there to look at yet; the message says what would have to run."""


class Broken(Exception):
    """What should be there is unreadable, altered or incomplete; the message says where."""


class Lookup(BaseModel):
    """One value, by the place that holds it.

    Args:
        compute: name of a function of `live_checks`, run now.
        derived: name of a table that code derives from public figures, `DERIVED`.
        reported: name of a file in data/reported.
        stored: "chapter/table" of the published page of a chapter.
        glue: "chapter/key", a number that the chapter's run kept.
        recorded: name of a table in a recorded run, the newest that has the value.
        where: values that columns have in the rows wanted; a text with * or ? is a pattern, a list allows any of its
            members.
        column: the column that holds the value.
        reduce: how several rows become one value; "only" wants exactly one.
        parameters: of the chapter's run, without which the value means something else.
        times: factor on the value.
        over: the value is divided by that one.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    compute: str | None = None
    derived: str | None = None
    reported: str | None = None
    stored: Annotated[str, Field(pattern=r"^[a-z_]+/[a-z0-9_]+$")] | None = None
    glue: Annotated[str, Field(pattern=r"^[a-z_]+/[a-zA-Z0-9_]+$")] | None = None
    recorded: str | None = None
    where: dict[str, Plain | list[Plain]] = {}
    column: str | None = None
    reduce: Reduce = "only"
    parameters: dict[str, Plain] = {}
    times: float = 1.0
    over: Lookup | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Lookup:
        given = [name for name in PLACES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of {', '.join(PLACES)}; got {', '.join(given) or 'none'}")
        is_table = given[0] not in ("compute", "glue")
        if is_table and self.column is None and self.reduce != "rows":
            raise ValueError("expected a column")
        return self

    @property
    def place(self) -> str:
        """The table that the value rests on, as messages name it."""
        if self.compute is not None:
            return "code"
        if self.derived is not None:
            return f"data/reported/{DERIVED[self.derived].file}.csv" if self.derived in DERIVED else self.derived
        if self.reported is not None:
            return f"data/reported/{self.reported}.csv"
        if self.recorded is not None:
            return f"recorded {self.recorded}"
        if self.glue is not None:
            return f"{self.glue.split('/')[0]}/glue"
        return str(self.stored)

    def places(self) -> set[str]:
        """Everything that the value rests on."""
        return {self.place} | (self.over.places() if self.over else set())


@dataclass(frozen=True)
class Found:
    """A value and where it comes from.

    Args:
        value: number or text.
        device: what it was made on, empty for what no device matters to.
        origin: run, file or "computed here".
        note: what a reader has to know about it.
        row: the row it stands in, where it is exactly one; of a geometric mean, the means of every column.
        times: factor that the value has over its column.
        divisor: what it was divided by.
    """

    value: Plain
    device: str = ""
    origin: str = ""
    note: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    times: float = 1.0
    divisor: Found | None = None

    def interval(self, low: str, high: str) -> tuple[float, float]:
        """The value's interval, from the columns that hold its ends; those of a divisor count the other way round."""
        ends = float(self.row[low]) * self.times, float(self.row[high]) * self.times
        if self.divisor is None:
            return ends
        least, most = self.divisor.interval(low, high)
        return ends[0] / most, ends[1] / least


@dataclass(frozen=True)
class Derivation:
    """A table made from public figures.

    Args:
        file: of data/reported, without suffix.
        make: from the figures to the table.
    """

    file: str
    make: Any


def _capacity(name: str) -> Any:
    def make(figures: pd.DataFrame) -> pd.DataFrame:
        import pandas as pd

        from qsa_kernels.measure import capacity, capacity_reported

        if name in ("cells", "counts"):
            pools = {pair: capacity_reported.implied_pool(pair, figures)[0] for pair in ("nvfp4", "awq-r6")}
            cells = capacity.feasibility(pools)
            return cells if name == "cells" else capacity_reported.request_counts(cells, figures)
        if name == "workspace":
            return capacity_reported.workspace_steps("awq-r6", "awq-shared-topk", figures)
        if name == "lengths":
            found = capacity_reported.consistent_lengths(
                ["nvfp4", "awq-r6", "awq-shared-topk"], LENGTHS_TRIED, reported=figures
            )
            return pd.DataFrame({"max_model_len": found})
        table: pd.DataFrame = {
            "pairs": capacity_reported.validate,
            "pools": capacity_reported.compare,
            "layout": capacity_reported.layout_checks,
            "constant": capacity_reported.two_number_model,
        }[name](figures)
        return table

    return make


DERIVED: dict[str, Derivation] = {
    f"capacity_{name}": Derivation("capacity", _capacity(name))
    for name in ("pairs", "pools", "layout", "constant", "counts", "cells", "workspace", "lengths")
}


class Evidence:
    """Reads each table once, checks it against the hash in its manifest, and answers lookups.

    Args:
        chapters: runs to read in place of published pages, by chapter.
        recorded: the run to read in place of the recorded ones.
    """

    def __init__(self, chapters: Mapping[str, runs.Run] | None = None, recorded: runs.Run | None = None) -> None:
        self._chosen = dict(chapters or {})
        self._recorded = recorded
        self._frames: dict[tuple[str, str], pd.DataFrame | Exception] = {}
        self._computed: dict[str, Plain | Exception] = {}
        self._page = cache(self._find_page)
        self._stale = cache(self._what_changed)

    def find(self, lookup: Lookup) -> Found:
        """The value of a lookup.

        Raises:
            NotMeasured: nothing is there yet.
            Broken: something is there, and cannot be trusted.
        """
        found = self._find(lookup)
        if lookup.times == 1.0 and lookup.over is None:
            return found
        divisor = self.find(lookup.over) if lookup.over else None
        numbers = [found.value, divisor.value if divisor else 1.0]
        if any(isinstance(number, str) for number in numbers):
            raise Broken(f"{lookup.place}: expected numbers; got {numbers}")
        value, below = (float(number) for number in numbers)
        if below == 0:
            raise Broken(f"{lookup.place}: divided by zero")
        return replace(found, value=value * lookup.times / below, times=lookup.times, divisor=divisor)

    def _find(self, lookup: Lookup) -> Found:
        if lookup.compute is not None:
            return self._compute(lookup.compute)
        if lookup.glue is not None:
            return self._glue(lookup)
        if lookup.stored is not None:
            chapter, table = lookup.stored.split("/")
            folder, record = self._page(chapter)
            self._check_parameters(chapter, record, lookup.parameters)
            frame = self._frame(folder, record, table)
            return self._pick(frame, lookup, Found("", device_of(record), f"run {record.run_id}", self._stale(chapter)))
        if lookup.recorded is not None:
            return self._recorded_value(lookup)
        file = DERIVED[lookup.derived].file if lookup.derived else str(lookup.reported)
        frame = self._figures(lookup.derived or "", file)
        return self._pick(frame, lookup, Found("", "", f"data/reported/{file}.csv"))

    def _compute(self, name: str) -> Found:
        from qsa_kernels.report import device, live_checks

        if name not in self._computed:
            try:
                self._computed[name] = _plain(live_checks.CHECKS[name]())
            except NotMeasured as error:
                self._computed[name] = error
            except Exception as error:  # whatever goes wrong in a check, the other claims are still judged
                self._computed[name] = Broken(f"{name}: {type(error).__name__}: {error}")
        value = self._computed[name]
        if isinstance(value, Exception):
            raise value
        on = "CUDA device" if device.prepare() == "cuda" else "Triton interpreter"
        return Found(value, on if name in live_checks.ON_DEVICE else "", "computed here")

    def _find_page(self, chapter: str) -> tuple[Path, Manifest]:
        """Folder and manifest of the run that a published page shows; tables are checked one by one, where they are
        read."""
        if chapter in self._chosen:
            return self._chosen[chapter].folder, self._chosen[chapter].manifest
        page = repository.root() / runs_page(chapter)
        if not page.is_file():
            raise NotMeasured(f"chapter {chapter} has not run here: make report, or qsa run {chapter}")
        try:
            run_id = str(json.loads(page.read_text(encoding="utf-8"))["metadata"]["qsa"]["run_id"])
            folder = runs.runs_folder() / run_id
            return folder, manifest.read(folder / "manifest.json")
        except KeyError:
            raise Broken(f"{runs_page(chapter)}: names no run") from None
        except (OSError, ValueError) as error:
            raise Broken(str(error)) from None

    def _glue(self, lookup: Lookup) -> Found:
        chapter, key = str(lookup.glue).split("/")
        _, record = self._page(chapter)
        self._check_parameters(chapter, record, lookup.parameters)
        if key not in record.glue:
            raise Broken(f"run {record.run_id}: keeps no number {key!r}")
        return Found(record.glue[key], device_of(record), f"run {record.run_id}", self._stale(chapter))

    def _check_parameters(self, chapter: str, record: Manifest, wanted: Mapping[str, Plain]) -> None:
        other = [
            f"{name} {record.parameters.get(name)}" for name in wanted if record.parameters.get(name) != wanted[name]
        ]
        if other:
            raise NotMeasured(f"chapter {chapter} ran with {', '.join(other)}: qsa run {chapter} --profile cpu")

    def _runs_with(self, table: str) -> list[tuple[Path, Manifest]]:
        """Recorded runs that hold a table, the newest first; a run that was chosen stands alone."""
        if self._recorded is not None:
            if table not in self._recorded.manifest.tables:
                raise NotMeasured(f"run {self._recorded.manifest.run_id} has no table {table}")
            return [(self._recorded.folder, self._recorded.manifest)]
        found = []
        for path in runs.recorded_folder().glob("*/manifest.json"):
            try:
                found.append((path.parent, manifest.read(path)))
            except ValueError as error:
                raise Broken(str(error)) from None
        found = [one for one in found if table in one[1].tables]
        if not found:
            raise NotMeasured(f"no run under data/runs has a table {table}: qsa record makes one")
        return sorted(found, key=lambda one: one[1].started, reverse=True)

    def _recorded_value(self, lookup: Lookup) -> Found:
        """From the newest recorded run that measured it."""
        table = str(lookup.recorded)
        missing = None
        for folder, record in self._runs_with(table):
            at = Found("", device_of(record), f"run {record.run_id}")
            try:
                return self._pick(self._frame(folder, record, table), lookup, at)
            except NotMeasured as error:
                missing = missing or error
        raise missing or NotMeasured(f"no recorded {table}")

    def _what_changed(self, chapter: str) -> str:
        if chapter in self._chosen:
            return ""
        try:
            changed = runs.stale_inputs(runs.published(chapter))
        except (OSError, ValueError):
            return ""  # another table of the run is broken; its own claims say so
        return f"made before a change of {', '.join(changed)}" if changed else ""

    def _frame(self, folder: Path, record: Manifest, name: str) -> pd.DataFrame:
        key = (record.run_id, name)
        if key not in self._frames:
            try:
                self._frames[key] = _checked_table(folder, record, name)
            except (OSError, ValueError) as error:
                self._frames[key] = Broken(str(error))
        return _or_raise(self._frames[key])

    def _figures(self, derived: str, file: str) -> pd.DataFrame:
        key = (derived, file)
        if key not in self._frames:
            try:
                self._frames[key] = _figures(derived, file)
            except Exception as error:  # any fault in a hand-kept file
                self._frames[key] = Broken(f"data/reported/{file}.csv: {type(error).__name__}: {error}")
        return _or_raise(self._frames[key])

    def _pick(self, frame: pd.DataFrame, lookup: Lookup, at: Found) -> Found:
        rows = frame
        for column in (*lookup.where, *([lookup.column] if lookup.column else [])):
            if column not in frame:
                raise Broken(f"{at.origin}: {lookup.place} has no column {column!r}")
        for column, wanted in lookup.where.items():
            rows = rows[np.array([_matches(value, wanted) for value in rows[column]], dtype=bool)]
        if lookup.reduce == "rows":
            return Found(len(rows), at.device, at.origin, at.note)
        values = rows[lookup.column]
        if lookup.reduce == "distinct":
            return Found(int(values.nunique()), at.device, at.origin, at.note)
        conditions = ", ".join(f"{name} {value}" for name, value in lookup.where.items())
        if rows.empty or (lookup.reduce == "only" and len(rows) != 1):
            words = f"{at.origin}: {len(rows) or 'no'} rows of {lookup.place} with {conditions}"
            raise NotMeasured(words) if lookup.recorded is not None and rows.empty else Broken(words)
        column = str(lookup.column)
        records = [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]
        for row in records:
            if row.get("verdict") == "not measurable":
                raise NotMeasured(f"{at.origin}: not measurable: {row.get('verdict_reason')}")
            if _is_missing(row[column]):
                words = f"{at.origin}: {row.get('reason') or f'no value for {conditions}'}"
                raise NotMeasured(words) if row.get("status") in ("skipped", "not_measured") else Broken(words)
        if lookup.reduce in ("only", "min", "max"):
            row = (min if lookup.reduce == "min" else max)(records, key=lambda record: record[column])
            return Found(_plain(row[column]), str(row.get("device") or at.device), at.origin, at.note, row)
        if lookup.reduce == "geometric mean":
            numbers = rows.select_dtypes("number")
            logs = np.log(numbers.loc[:, (numbers > 0).all()])
            means = {str(name): math.exp(mean) for name, mean in logs.mean().items()}
            if column not in means:
                raise Broken(f"{at.origin}: {lookup.place} has values of {column} that are not positive")
            return Found(means[column], at.device, at.origin, at.note, means)
        result = values.max() - values.min() if lookup.reduce == "range" else values.median()
        return Found(_plain(result), at.device, at.origin, at.note)


def runs_page(chapter: str) -> str:
    """Published page of a chapter, relative to the checkout."""
    return f"book/results/{chapter}.ipynb"


def device_of(record: Manifest) -> str:
    """What a run was made on, in words."""
    return "Triton interpreter" if record.executed_on == "interpreter" else str(record.device["name"])


def _or_raise(held: pd.DataFrame | Exception) -> pd.DataFrame:
    if isinstance(held, Exception):
        raise held
    return held


def _checked_table(folder: Path, record: Manifest, name: str) -> pd.DataFrame:
    from qsa_kernels.report import tables

    if name not in record.tables:
        raise ValueError(f"run {record.run_id}: no table {name!r}")
    path = folder / record.tables[name].file
    if not path.is_file():
        raise FileNotFoundError(f"run {record.run_id}: {record.tables[name].file} is missing")
    if repository.sha256(path) != record.tables[name].sha256:
        raise ValueError(f"run {record.run_id}: {record.tables[name].file} does not match the hash in manifest.json")
    return tables.read(path, name)


def _figures(derived: str, file: str) -> pd.DataFrame:
    import pandas as pd

    path = repository.root() / "data/reported" / f"{file}.csv"
    if not derived:
        return pd.read_csv(path, float_precision="round_trip")
    from qsa_kernels.measure import capacity_reported

    table: pd.DataFrame = DERIVED[derived].make(capacity_reported.load(path))
    return table


def _matches(value: object, wanted: Plain | list[Plain]) -> bool:
    if isinstance(wanted, list):
        return any(_matches(value, one) for one in wanted)
    if isinstance(wanted, str) and isinstance(value, str) and any(mark in wanted for mark in "*?"):
        return fnmatch.fnmatchcase(value, wanted)
    return not _is_missing(value) and bool(value == wanted)


def _is_missing(value: object) -> bool:
    import pandas as pd

    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _plain(value: Any) -> Plain:
    """A value of a table as plain Python."""
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, get_args(Plain)) else float(value)
