"""The claims ledger: what the public record and this book state, how each statement is checked, and how it came out."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qsa_kernels.report import evidence, repository, runs, yamlfile
from qsa_kernels.report.evidence import Broken, Evidence, Found, Lookup, NotMeasured, Plain
from qsa_kernels.report.parameters import explain

if TYPE_CHECKING:
    import pandas as pd

    from qsa_kernels.report.manifest import Manifest

How = Literal["reproduced", "derived", "recorded", "quoted"]
Verdict = Literal["holds", "fails", "not measured", "quoted"]
VERDICTS: tuple[Verdict, ...] = ("fails", "holds", "not measured", "quoted")
KINDS: tuple[How, ...] = ("reproduced", "derived", "recorded", "quoted")
# What a claim of each kind may rest on.
_PLACES = {
    "reproduced": {"compute", "stored", "glue"},
    "derived": {"compute", "derived", "reported", "stored", "glue"},
    "recorded": {"recorded", "stored"},
    "quoted": {"reported"},
}
# A table reads its status from these words.
_STATUS = {"holds": "passed", "fails": "failed", "not measured": "not_measured", "quoted": "skipped"}
_CARD = "https://huggingface.co/leoncca/Qwen3.8-Flash-Next-NVFP4-QSA-FP8-E4M3-KV-Scales"
_ADDRESS = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)(?:#(?P<number>\d+)|:(?P<path>[\w./-]+)@(?P<commit>[0-9a-f]{7,40}))$")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Noise(_Strict):
    """Where the noise of a recorded value stands.

    Args:
        low, high: columns of the interval, in the row of the value.
        floor: column of the noise floor as a log ratio, in that row.
        log: the value is a ratio, compared in its logarithm; a claim that it is above or below something has to hold
            at the near end of the interval too, less the floor.
        spread: range over draws of the same quantity, for a value without an interval of its own.
    """

    low: str | None = None
    high: str | None = None
    floor: str | None = None
    log: bool = False
    spread: Lookup | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Noise:
        if (self.low is None) != (self.high is None) or (self.low is None) == (self.spread is None):
            raise ValueError("expected low and high, or spread")
        return self


class Claim(_Strict):
    """One statement.

    Args:
        id: a name for it.
        about: whether the public record or this book states it.
        statement: in our words.
        source: repo#number, repo:path@commit, "scale-pack card", or "book/CHAPTER"; several are joined by ", ".
        how: reproduced (run here), derived (computed from sourced figures), recorded (from a stored run) or quoted.
        check: where the value is; none for a quoted statement without a figure.
        compared: how value and expectation are compared.
        expected: the stated value.
        tolerance: absolute; a number, or a place to read it from, such as the spread over draws.
        unit: of the value; "1" where there is none.
        reason: why a quoted claim cannot be checked here.
        noise: of a value that another machine gives differently.
    """

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    about: Literal["public record", "book"]
    statement: Annotated[str, Field(min_length=10)]
    source: Annotated[str, Field(min_length=1)]
    how: How
    check: Lookup | None = None
    compared: Literal["equal", "at most", "at least"] = "equal"
    expected: Plain
    tolerance: float | Lookup = 0.0
    unit: Annotated[str, Field(min_length=1)]
    reason: str = ""
    noise: Noise | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Claim:
        if (self.how == "quoted") != bool(self.reason):
            raise ValueError("a quoted claim needs the reason why it cannot be checked, and only that one")
        if self.check is None and self.how != "quoted":
            raise ValueError("expected a check")
        if self.check is not None:
            place = next(name for name in evidence.PLACES if getattr(self.check, name) is not None)
            if place not in _PLACES[self.how]:
                raise ValueError(f"a {self.how} claim cannot rest on {place}")
        if isinstance(self.tolerance, float) and self.tolerance < 0:
            raise ValueError(f"tolerance: expected zero or more; got {self.tolerance}")
        if isinstance(self.expected, str) and (self.compared != "equal" or self.tolerance != 0.0):
            raise ValueError("a text is compared for equality, without a tolerance")
        for one in self.source.split(", "):
            address(one)
        return self

    def places(self) -> set[str]:
        """Every table that the verdict rests on."""
        lookups = [self.check, self.tolerance]
        return set().union(*(one.places() for one in lookups if isinstance(one, Lookup)))

    @property
    def expectation(self) -> str:
        """The stated value in words."""
        sign = {"equal": "", "at most": "≤ ", "at least": "≥ "}[self.compared]
        within = f" ± {text_of(self.tolerance)}" if isinstance(self.tolerance, float) and self.tolerance else ""
        return f"{sign}{text_of(self.expected)}{within}"


class _Ledger(_Strict):
    claims: Annotated[list[Claim], Field(min_length=1)]


@dataclass(frozen=True)
class Judged:
    """A claim and how it came out.

    Args:
        claim: the statement.
        verdict: holds, fails, not measured or quoted.
        found: the value, None where there is none.
        reason: why it fails or was not measured, or what to know about the value.
        broken: what the claim rests on is unreadable or altered.
    """

    claim: Claim
    verdict: Verdict
    found: Found | None
    reason: str
    broken: bool = False


def address(source: str) -> str:
    """Web address of one source; empty for a chapter of this book.

    Raises:
        ValueError: a source of another form.
    """
    if re.fullmatch(r"book/[a-z]+", source):
        return ""
    if source == "scale-pack card":
        return _CARD
    found = _ADDRESS.match(source)
    if not found:
        raise ValueError(
            f"source: expected repo#number, repo:path@commit, 'scale-pack card' or book/CHAPTER; got {source!r}"
        )
    base = f"https://github.com/{found['repo']}"
    return f"{base}/pull/{found['number']}" if found["number"] else f"{base}/blob/{found['commit']}/{found['path']}"


def text_of(value: Plain | float) -> str:
    """A value as the ledger shows it: whole numbers in full, others to ten significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e12 else f"{value:.10g}"


def load(path: Path | None = None) -> list[Claim]:
    """The ledger, checked.

    Args:
        path: default: data/claims.yaml.

    Raises:
        FileNotFoundError: no such file.
        ValueError: names each claim and key that is wrong, or an id that is there twice.
    """
    path = path or repository.root() / "data/claims.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"no claims ledger: {path}")
    try:
        # YAML reads 1 and 1.0 as different types; both are numbers here.
        ledger = _Ledger.model_validate_json(json.dumps(yamlfile.load(path)))
    except ValidationError as error:
        raise ValueError(explain(error, _Ledger, path.name, "key")) from None
    twice = [name for name, number in Counter(claim.id for claim in ledger.claims).items() if number > 1]
    if twice:
        raise ValueError(f"{path.name}: more than one claim is called {', '.join(twice)}")
    return ledger.claims


def judge(claim: Claim, at: Evidence) -> Judged:
    """Look the value of a claim up and compare it."""
    if claim.check is None:
        return Judged(claim, "quoted", None, claim.reason)
    try:
        found = at.find(claim.check)
        tolerance = claim.tolerance if isinstance(claim.tolerance, float) else at.find(claim.tolerance).value
        holds = _compare(claim, found.value, tolerance)
    except NotMeasured as error:
        return Judged(claim, "not measured", None, str(error))
    except Broken as error:
        return Judged(claim, "fails", None, str(error), broken=True)
    if claim.how == "quoted":
        if holds:
            return Judged(claim, "quoted", found, claim.reason)
        return Judged(claim, "fails", found, f"{found.origin} has another figure than the ledger", broken=True)
    if holds and not _clear_of_noise(claim, found):
        return Judged(claim, "fails", found, "; ".join(filter(None, ["inside the noise of the run", found.note])))
    if holds:
        return Judged(claim, "holds", found, found.note)
    within = f" (tolerance {text_of(tolerance)})" if tolerance and not isinstance(tolerance, str) else ""
    reason = f"found {text_of(found.value)}, expected {claim.expectation}{within}"
    return Judged(claim, "fails", found, "; ".join(filter(None, [reason, found.note])))


def _compare(claim: Claim, value: Plain, tolerance: Plain) -> bool:
    if isinstance(value, str) or isinstance(claim.expected, str):
        return value == claim.expected
    if isinstance(tolerance, str):
        raise Broken(f"tolerance: expected a number; got {tolerance!r}")
    difference = value - claim.expected
    # Both are decimal figures as printed; the last bit of their difference says nothing.
    slack = tolerance + 4 * math.ulp(max(abs(value), abs(claim.expected)))
    return {
        "equal": abs(difference) <= slack,
        "at most": difference <= slack,
        "at least": difference >= -slack,
    }[claim.compared]


def _clear_of_noise(claim: Claim, found: Found) -> bool:
    """Whether a one-sided claim about a ratio holds at the near end of its interval too, less the noise floor."""
    noise = claim.noise
    if noise is None or not noise.log or noise.low is None or claim.compared == "equal":
        return True
    floor = math.exp(float(found.row[noise.floor]) if noise.floor else 0.0)
    low, high = found.interval(noise.low, str(noise.high))
    return _compare(claim, high * floor if claim.compared == "at most" else low / floor, 0.0)


def evaluate(claims: Iterable[Claim] | None = None, at: Evidence | None = None) -> list[Judged]:
    """All claims, judged, those that fail first.

    Args:
        claims: default: the ledger.
        at: where values are looked up; default: the published chapters and recorded runs of this checkout.
    """
    at = at or Evidence()
    judged = [judge(claim, at) for claim in (load() if claims is None else claims)]
    return sorted(judged, key=lambda one: (VERDICTS.index(one.verdict), KINDS.index(one.claim.how)))


def is_failure(judged: Sequence[Judged]) -> bool:
    """Whether a reproduced or derived claim fails, or something that a claim rests on is broken."""
    return any(one.verdict == "fails" and (one.broken or one.claim.how in KINDS[:2]) for one in judged)


def table(judged: Sequence[Judged]) -> pd.DataFrame:
    """All that is known of each claim, one row a claim, for the schema `claims`."""
    import pandas as pd

    rows = [
        {
            "claim": one.claim.id,
            "about": one.claim.about,
            "statement": one.claim.statement,
            "source": one.claim.source,
            "how": one.claim.how,
            "expected": one.claim.expectation,
            "found": "" if one.found is None else text_of(one.found.value),
            "unit": one.claim.unit,
            "verdict": one.verdict,
            "device": "" if one.found is None else one.found.device,
            "evidence": "" if one.found is None else one.found.origin,
            "rests_on": ", ".join(sorted(one.claim.places())),
            "source_url": ", ".join(filter(None, map(address, one.claim.source.split(", ")))),
            "status": _STATUS[one.verdict],
            "reason": one.reason,
        }
        for one in judged
    ]
    return pd.DataFrame(rows)


def part(frame: pd.DataFrame, verdict: Verdict) -> pd.DataFrame:
    """The claims of one verdict with the columns that a page shows, for the schema `claims_VERDICT`."""
    rows = frame[frame["verdict"] == verdict].reset_index(drop=True)
    public = rows["source_url"].where(rows["source_url"] != "", rows["source"].str.replace("book/", "chapter "))
    short = rows["expected"].str.replace(r"^([0-9a-f]{12})[0-9a-f]{52}$", r"\1…", regex=True)
    shown = rows.assign(source=public, expected=short, on=rows["device"].where(rows["device"] != "", rows["evidence"]))
    return shown[["statement", "expected", "found", "unit", "how", "on", "source", "status", "reason"]]


def counts(judged: Sequence[Judged]) -> pd.DataFrame:
    """How many claims of each kind came out how, one row a kind, for the schema `claims_counts`."""
    import pandas as pd

    number = Counter((one.claim.how, one.verdict) for one in judged)
    rows = [
        {"how": how}
        | {verdict.replace(" ", "_"): number[how, verdict] for verdict in VERDICTS}
        | {"claims": sum(number[how, verdict] for verdict in VERDICTS), "status": "passed", "reason": ""}
        for how in KINDS
    ]
    return pd.DataFrame(rows)


def glue(judged: Sequence[Judged]) -> dict[str, int]:
    """Numbers that other pages quote, by key."""
    number = Counter(one.verdict for one in judged)
    return {"claims_total": len(judged)} | {
        f"claims_{verdict.replace(' ', '_')}": number[verdict] for verdict in VERDICTS
    }


def against(run_id: str, own_id: str | None = None, claims: Iterable[Claim] | None = None) -> pd.DataFrame:
    """One's own run beside a recorded one, claim by claim, for every claim that rests on tables of both.

    Args:
        run_id: the recorded run.
        own_id: one's own run; default: the newest other run that measured the same tables.
        claims: default: the ledger.

    Returns:
        DataFrame: claim, statement, recorded and own value, difference and tolerance (log ratios where `scale` says so,
            else the unit of the claim), both verdicts, agreement (agrees, differs, other device, other parameters,
            not in both), status and reason.

    Raises:
        FileNotFoundError: no such run, or no run of one's own to compare.
        ValueError: a run whose files do not match their hashes, the same run twice, or runs of different chapters.
    """
    import pandas as pd

    theirs = runs.Run.load(run_id)
    mine = runs.Run.load(own_id) if own_id else _own_run(theirs)
    if mine.manifest.run_id == theirs.manifest.run_id:
        raise ValueError(f"run {run_id}: expected two different runs to compare")
    if mine.manifest.chapter != theirs.manifest.chapter:
        raise ValueError(
            f"run {mine.manifest.run_id} belongs to {mine.manifest.chapter}, {run_id} to {theirs.manifest.chapter}"
        )
    chapter = theirs.manifest.chapter
    sides = [Evidence({chapter: run}, run) for run in (theirs, mine)]
    devices = [evidence.device_of(run.manifest) for run in (theirs, mine)]
    parameters = [run.manifest.parameters for run in (theirs, mine)]
    changed = [
        name for name in sorted({*parameters[0], *parameters[1]}) if len({str(one.get(name)) for one in parameters}) > 1
    ]
    rows = []
    for claim in load() if claims is None else claims:
        if _rests_on(claim, chapter, theirs):
            rows.append(_side_by_side(claim, sides, devices, changed))
    if not rows:
        raise ValueError(f"run {run_id}: no claim rests on its tables {', '.join(sorted(theirs.manifest.tables))}")
    return pd.DataFrame(rows).assign(recorded_run=run_id, own_run=mine.manifest.run_id)


def _own_run(theirs: runs.Run) -> runs.Run:
    """The newest run of the same measurement that is not `theirs`, and no page that draws it."""
    found = []
    for folder in (runs.recorded_folder(), runs.runs_folder()):
        for path in folder.glob("*/manifest.json"):
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["chapter"] == theirs.manifest.chapter and _is_measured_alike(record, theirs.manifest):
                found.append((record["started"], path.parent))
    for _, folder in sorted(found, reverse=True):
        if folder.name != theirs.manifest.run_id:
            return runs.Run(folder)
    chapter = theirs.manifest.chapter
    raise FileNotFoundError(
        f"no run of {chapter} to set beside {theirs.manifest.run_id}: make one with 'qsa record' or 'qsa run {chapter}'"
    )


def _is_measured_alike(record: Mapping[str, Any], theirs: Manifest) -> bool:
    """Whether a run holds tables of the same names, and measured them itself."""
    is_drawn = str(record["parameters"].get("source", "live")).startswith("recorded:")
    on_alike = record["executed_on"] == theirs.executed_on or theirs.notebook is not None
    return bool(set(theirs.tables) & set(record["tables"])) and on_alike and not is_drawn


def _rests_on(claim: Claim, chapter: str, run: runs.Run) -> bool:
    check = claim.check
    if check is None:
        return False
    if check.recorded is not None:
        return check.recorded in run.manifest.tables
    if check.stored is not None:
        return check.stored.split("/")[0] == chapter and check.stored.split("/")[1] in run.manifest.tables
    return check.glue is not None and check.glue.split("/")[0] == chapter and bool(run.manifest.glue)


def _side_by_side(
    claim: Claim, sides: Sequence[Evidence], devices: Sequence[str], changed: Sequence[str]
) -> dict[str, Any]:
    judged = [judge(claim, side) for side in sides]
    row: dict[str, Any] = {
        "claim": claim.id,
        "statement": claim.statement,
        "unit": claim.unit,
        "recorded": text_of(judged[0].found.value) if judged[0].found else "",
        "own": text_of(judged[1].found.value) if judged[1].found else "",
        "scale": "log ratio" if claim.noise and claim.noise.log else "value",
        "difference": math.nan,
        "tolerance": math.nan,
        "recorded_verdict": judged[0].verdict,
        "own_verdict": judged[1].verdict,
    }
    found = [one.found for one in judged]
    if found[0] is None or found[1] is None:
        reason = "; ".join(dict.fromkeys(one.reason for one in judged if one.found is None))
        is_broken = any(one.broken for one in judged)
        word, status = ("differs", "failed") if is_broken else ("not in both", "not_measured")
        return row | {"agreement": word, "status": status, "reason": reason}
    values = [one.value for one in found if one is not None]
    if any(isinstance(value, str) for value in values):
        agrees, reason = values[0] == values[1], "another word"
    else:
        tolerance = _noise(claim, found, sides)
        numbers = [float(value) for value in values]
        first, second = map(math.log, numbers) if row["scale"] == "log ratio" else numbers
        row |= {"difference": second - first, "tolerance": tolerance}
        agrees = abs(second - first) <= tolerance + 4 * math.ulp(max(abs(first), abs(second)))
        reason = "beyond the noise of the two runs" if claim.noise else "the value has no noise"
    if agrees:
        return row | {"agreement": "agrees", "status": "passed", "reason": ""}
    if devices[0] != devices[1]:
        return row | {"agreement": "other device", "status": "skipped", "reason": f"{devices[1]} against {devices[0]}"}
    if changed and claim.noise is None:
        words = f"the runs differ in {', '.join(changed)}"
        return row | {"agreement": "other parameters", "status": "skipped", "reason": words}
    return row | {"agreement": "differs", "status": "failed", "reason": reason}


def _noise(claim: Claim, found: Sequence[Found | None], sides: Sequence[Evidence]) -> float:
    """How far two runs of the same thing may lie apart: the half intervals in quadrature and the larger noise floor, or
    the larger spread over draws; without noise, the tolerance of the claim."""
    noise = claim.noise
    if noise is None:
        return claim.tolerance if isinstance(claim.tolerance, float) else 0.0
    if noise.spread is not None:
        return max(float(side.find(noise.spread).value) for side in sides)
    halves, floors = [], []
    for one in filter(None, found):
        low, high = one.interval(str(noise.low), str(noise.high))
        halves.append((math.log(high / low) if noise.log else high - low) / 2)
        floors.append(float(one.row[noise.floor]) if noise.floor else 0.0)
    return math.hypot(*halves) + max(floors)
