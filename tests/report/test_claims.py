"""The claims ledger: what it may say, how each kind of claim is judged, and what a broken table takes with it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, ClassVar

import claims_checkout
import pytest

from qsa_kernels.report import claims, live_checks, tables
from qsa_kernels.report.claims import Claim, Judged
from qsa_kernels.report.evidence import Evidence, Lookup

CHECKOUT = Path(__file__).resolve().parents[2]
LEDGER = claims.load(CHECKOUT / "data/claims.yaml")
GLUE_PLACES = {"error/glue", "codegen/glue", "calibration/glue", "quality/glue", "latency/glue"}
PLACES = sorted(set().union(*(claim.places() for claim in LEDGER)) - {"code"})


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which every claim holds; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("whole")
    claims_checkout.make(folder)
    return folder


@pytest.fixture
def root(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; live checks answer at once."""
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    monkeypatch.setenv("QSA_ROOT", str(folder))
    monkeypatch.setattr(live_checks, "CHECKS", claims_checkout.expected_checks(LEDGER))
    return folder


def failing(judged: list[Judged]) -> set[str]:
    return {one.claim.id for one in judged if one.verdict == "fails"}


def claim(**fields: Any) -> Claim:
    given = {
        "id": "a-claim",
        "about": "book",
        "statement": "Something is so.",
        "source": "book/error",
        "how": "reproduced",
        "check": {"glue": "error/key"},
        "expected": 2.0,
        "unit": "1",
    }
    return Claim.model_validate_json(json.dumps({**given, **fields}))


class TestLedger:
    def test_has_every_kind_and_at_least_45(self) -> None:
        assert len(LEDGER) >= 45
        assert {one.how for one in LEDGER} == set(claims.KINDS)
        assert {one.about for one in LEDGER} == {"public record", "book"}

    def test_every_public_claim_has_an_address(self) -> None:
        for one in LEDGER:
            addresses = [claims.address(source) for source in one.source.split(", ")]
            assert one.about == "book" or any(addresses), one.id

    def test_every_live_check_is_used_and_exists(self) -> None:
        assert set(live_checks.CHECKS) == {one.check.compute for one in LEDGER if one.check and one.check.compute}
        assert set(live_checks.CHECKS) >= live_checks.ON_DEVICE

    def test_every_column_exists(self) -> None:
        for one in LEDGER:
            for lookup in (one.check, one.check and one.check.over, one.tolerance):
                if not isinstance(lookup, Lookup) or not (lookup.recorded or lookup.stored):
                    continue
                name = lookup.recorded or str(lookup.stored).split("/")[-1]
                wanted = {*lookup.where, *([lookup.column] if lookup.column else [])}
                assert wanted <= set(tables.SCHEMAS[name].columns), one.id

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("claims: []", "claims"),
            ("claims: [{id: a-b}]", "statement"),
            ("claims: 3", "claims"),
            ("claim: []", "unknown key 'claim'"),
        ],
    )
    def test_a_wrong_file_is_refused(self, tmp_path: Path, text: str, words: str) -> None:
        path = tmp_path / "claims.yaml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"claims\.yaml") as caught:
            claims.load(path)
        assert words in str(caught.value)

    def test_two_claims_of_one_name_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "claims.yaml"
        path.write_text(json.dumps({"claims": [claim().model_dump(mode="json")] * 2}), encoding="utf-8")
        with pytest.raises(ValueError, match="more than one claim is called a-claim"):
            claims.load(path)

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"how": "quoted"}, "a quoted claim needs the reason"),
            ({"reason": "why"}, "a quoted claim needs the reason"),
            ({"check": None}, "expected a check"),
            ({"how": "recorded"}, "a recorded claim cannot rest on glue"),
            ({"check": {"glue": "error/key", "compute": "overlay_bytes"}}, "expected one of"),
            ({"check": {"stored": "error/error_cells"}}, "expected a column"),
            ({"tolerance": -1.0}, "zero or more"),
            ({"expected": "word", "tolerance": 1.0}, "compared for equality"),
            ({"source": "somewhere"}, "expected repo#number"),
            ({"noise": {"low": "ratio_low"}}, "low and high"),
            ({"expected": math.nan}, "finite"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_wrong_claim_is_refused(self, fields: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            claim(**fields)


@pytest.mark.parametrize(
    ("compared", "tolerance", "value", "verdict"),
    [
        ("equal", 0.0, 2.0, "holds"),
        ("equal", 0.0, 2.0000001, "fails"),
        ("equal", 0.25, 1.75, "holds"),
        ("equal", 0.25, 2.2500001, "fails"),
        ("at most", 0.0, 2.0, "holds"),
        ("at most", 0.0, -9.0, "holds"),
        ("at most", 0.0, 2.001, "fails"),
        ("at least", 0.5, 1.5, "holds"),
        ("at least", 0.5, 1.4999, "fails"),
        ("equal", 0.0, "2.0", "fails"),
    ],
)
def test_comparison(
    root: Path, monkeypatch: pytest.MonkeyPatch, compared: str, tolerance: float, value: object, verdict: str
) -> None:
    monkeypatch.setitem(live_checks.CHECKS, "overlay_bytes", lambda: value)
    check = {"compute": "overlay_bytes"}
    assert claims.judge(claim(check=check, compared=compared, tolerance=tolerance), Evidence()).verdict == verdict


@pytest.mark.parametrize("name", sorted(live_checks.CHECKS))
def test_live_check_on_this_machine(name: str) -> None:
    [one] = [one for one in LEDGER if one.check is not None and one.check.compute == name]
    judged = claims.judge(one, Evidence())
    if judged.verdict == "not measured":
        pytest.skip(judged.reason)
    assert judged.verdict == "holds", judged.reason


def test_all_hold_where_everything_was_measured(root: Path) -> None:
    judged = claims.evaluate(LEDGER)
    open_ones = [(one.claim.id, one.verdict, one.reason) for one in judged if one.verdict not in ("holds", "quoted")]
    assert open_ones == []
    assert len(judged) == len(LEDGER)
    assert {one.claim.how for one in judged if one.verdict == "quoted"} == {"quoted"}
    assert not claims.is_failure(judged)


def test_a_fresh_clone_fails_nothing_and_says_what_would_have_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSA_ROOT", str(tmp_path))
    claims_checkout.make(tmp_path, chapters=False, recorded=False)
    monkeypatch.setattr(live_checks, "CHECKS", claims_checkout.expected_checks(LEDGER))
    judged = claims.evaluate(LEDGER)
    assert failing(judged) == set()
    for one in judged:
        if one.verdict == "not measured":
            assert "qsa run" in one.reason or "qsa record" in one.reason, one.claim.id
    by_kind = {how: {one.verdict for one in judged if one.claim.how == how} for how in claims.KINDS}
    assert by_kind["derived"] == {"holds"}
    assert by_kind["recorded"] == {"not measured"}


@pytest.mark.parametrize("place", [place for place in PLACES if place not in GLUE_PLACES])
def test_a_broken_table_fails_exactly_the_claims_that_rest_on_it(root: Path, place: str) -> None:
    file = claims_checkout.table_files(root)[place]
    file.write_bytes(b"" if place.startswith("data/reported") else file.read_bytes() + b"\n")
    judged = claims.evaluate(LEDGER)
    assert failing(judged) == {one.id for one in LEDGER if place in one.places()}
    assert claims.is_failure(judged)


@pytest.mark.parametrize("place", [place for place in PLACES if place in GLUE_PLACES])
def test_lost_numbers_fail_exactly_the_claims_that_quote_them(root: Path, place: str) -> None:
    file = claims_checkout.table_files(root)[place]
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"glue": {}}), encoding="utf-8")
    assert failing(claims.evaluate(LEDGER)) == {one.id for one in LEDGER if place in one.places()}


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("latency", ",-1.92,", ",-1.93,", {"server-nvfp4-decode"}),
        ("capacity", ",507093,", ",507094,", {"capacity-nvfp4-fp16", "capacity-length-unique"}),
        ("quality", ",0.990783,", ",0.990784,", {"quality-row-jaccard"}),
        ("scale_pack", ",0.0171247218,", ",0.0271247218,", {"scales-smallest", "scales-smallest-envelope"}),
        ("error", ",1.52587890625e-05,", ",1.6e-05,", {"error-mixed-route-max"}),
    ],
)
def test_a_changed_public_figure_is_seen(root: Path, file: str, old: str, new: str, expected: set[str]) -> None:
    path = root / "data/reported" / f"{file}.csv"
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    assert failing(claims.evaluate(LEDGER)) == expected


def test_a_worse_measurement_fails_its_claim_alone(root: Path) -> None:
    claims_checkout.change(root / "runs/error-1", "error_cells", "8.7e-06", "1.7e-05")
    judged = claims.evaluate(LEDGER)
    assert failing(judged) == {"error-long-split"}
    [one] = [one for one in judged if one.verdict == "fails"]
    assert "found 1.7e-05, expected 8.262693882e-06 (tolerance 1.6e-06)" in one.reason


def test_a_chapter_with_other_parameters_is_not_measured(root: Path) -> None:
    path = root / "runs/error-1/manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["parameters"]["topk"] = 65
    path.write_text(json.dumps(content), encoding="utf-8")
    judged = {one.claim.id: one for one in claims.evaluate(LEDGER)}
    assert judged["error-long-split"].verdict == "not measured"
    assert "topk 65" in judged["error-long-split"].reason
    assert judged["error-no-cell-fails"].verdict == "holds"


def test_a_recorded_claim_that_fails_is_a_finding_not_an_error(root: Path) -> None:
    claims_checkout.change(root / "data/runs/h200-latency", "latency_cells", ",2.6,", ",0.9,")
    judged = claims.evaluate(LEDGER)
    assert failing(judged) == {"latency-public-slower"}
    assert not claims.is_failure(judged)


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({"ratio_high": 0.985}, "holds", ""),
        ({"ratio_high": 0.995}, "fails", "inside the noise"),
        ({"ratio_high": 1.02}, "fails", "inside the noise"),
    ],
)
def test_a_ratio_has_to_clear_its_noise(root: Path, changes: dict[str, Any], verdict: str, words: str) -> None:
    rows = [
        {**row, **changes} if (row["arm"], row.get("code_path")) == ("hoisted/packed", "device") else row
        for row in claims_checkout.LATENCY["latency_cells"]
    ]
    folder = root / "data/runs/h200-later"
    frames = claims_checkout.LATENCY | {"latency_cells": rows}
    claims_checkout.store(folder, "latency", frames, started="2026-09-05T10:00:00Z")
    judged = {one.claim.id: one for one in claims.evaluate(LEDGER)}
    assert judged["latency-packed-faster"].verdict == verdict
    assert words in judged["latency-packed-faster"].reason


def test_a_cell_that_is_not_measurable_gives_way_to_an_older_run_or_to_none(root: Path) -> None:
    changes = {"verdict": "not measurable", "verdict_reason": "implied bandwidth above the copy"}
    rows = [{**row, **changes} for row in claims_checkout.LATENCY["latency_cells"] if row["arm"] != "A/A"]
    frames = claims_checkout.LATENCY | {"latency_cells": rows}
    claims_checkout.store(root / "data/runs/h200-later", "latency", frames, started="2026-09-05T10:00:00Z")
    judged = {one.claim.id: one for one in claims.evaluate(LEDGER)}
    found = judged["latency-packed-faster"].found
    assert found is not None
    assert found.origin == "run h200-latency"
    shutil.rmtree(root / "data/runs/h200-latency")
    judged = {one.claim.id: one for one in claims.evaluate(LEDGER)}
    assert judged["latency-packed-faster"].verdict == "not measured"
    assert "implied bandwidth" in judged["latency-packed-faster"].reason


class TestSeveralRows:
    WHERE: ClassVar = {"stage": "core", "code_path": "device", "arm": "hoisted/native"}
    NOISE: ClassVar = {"low": "ratio_low", "high": "ratio_high", "floor": "floor_log_ratio", "log": True}

    def store(self, root: Path, rows: list[dict[str, Any]]) -> None:
        rows = [{"workload": f"decode-{place}", **self.WHERE, **row} for place, row in enumerate(rows)]
        frames = claims_checkout.LATENCY | {"latency_cells": rows}
        shutil.rmtree(root / "data/runs/h200-latency")
        claims_checkout.store(root / "data/runs/h200-later", "latency", frames)

    def judge(self, **fields: Any) -> Judged:
        return claims.judge(claim(how="recorded", **fields), Evidence())

    def check(self, reduce: str) -> dict[str, Any]:
        return {"recorded": "latency_cells", "where": self.WHERE, "column": "ratio", "reduce": reduce}

    @pytest.mark.parametrize(
        ("reduce", "compared", "value", "bound"),
        [
            # near end of the row that holds the extreme, moved by its floor
            ("max", "at most", 0.75, 0.83 * math.exp(0.03)),
            ("min", "at least", 0.24, 0.21 / math.exp(0.02)),
            # of each end and of the floors: the square root of the product of two
            ("geometric mean", "at most", math.sqrt(0.75 * 0.24), math.sqrt(0.83 * 0.25) * math.exp(math.sqrt(6e-4))),
        ],
    )
    def test_a_bound_has_to_clear_the_noise_of_what_decides(
        self, root: Path, reduce: str, compared: str, value: float, bound: float
    ) -> None:
        wide = {"ratio": 0.75, "ratio_low": 0.74, "ratio_high": 0.83, "floor_log_ratio": 0.03}
        narrow = {"ratio": 0.24, "ratio_low": 0.21, "ratio_high": 0.25, "floor_log_ratio": 0.02}
        self.store(root, [wide, narrow])
        fields = {"check": self.check(reduce), "compared": compared, "noise": self.NOISE}
        step = 1e-9 if compared == "at most" else -1e-9
        inside = self.judge(expected=bound + step, **fields)
        assert inside.verdict == "holds"
        assert inside.found is not None
        assert inside.found.value == pytest.approx(value, rel=1e-12)
        assert "inside the noise" in self.judge(expected=bound - step, **fields).reason

    def test_a_quotient_of_times_has_the_ends_of_both(self, root: Path) -> None:
        times = {"time_us": 6.0, "least_process_us": 5.0, "largest_process_us": 7.0}
        below = {"time_us": 12.0, "least_process_us": 10.0, "largest_process_us": 14.0}
        self.store(root, [times, below])
        check = {"recorded": "latency_cells", "where": {"workload": "decode-0"}, "column": "time_us", "times": 3}
        check["over"] = {"recorded": "latency_cells", "where": {"workload": "decode-1"}, "column": "time_us"}
        noise = {"low": "least_process_us", "high": "largest_process_us", "log": True}
        found = self.judge(check=check, noise=noise).found
        assert found is not None
        assert found.value == 1.5
        assert found.interval("least_process_us", "largest_process_us") == (15 / 14, 21 / 10)
        at_most = {"check": check, "noise": noise, "compared": "at most"}
        assert self.judge(expected=2.1, **at_most).verdict == "holds"
        assert "inside the noise" in self.judge(expected=2.099, **at_most).reason

    @pytest.mark.parametrize(
        ("row", "words"),
        [
            ({"verdict": "not measurable", "verdict_reason": "throttled"}, "throttled"),
            ({"ratio": math.nan, "status": "skipped", "reason": "no FlashInfer"}, "no FlashInfer"),
        ],
    )
    def test_one_row_without_a_value_leaves_the_claim_open(self, root: Path, row: dict[str, Any], words: str) -> None:
        self.store(root, [{"ratio": 0.5}, row])
        judged = self.judge(check=self.check("max"))
        assert (judged.verdict, words in judged.reason) == ("not measured", True)

    def test_no_geometric_mean_of_zero(self, root: Path) -> None:
        self.store(root, [{"ratio": 0.5}, {"ratio": 0.0}])
        assert "not positive" in self.judge(check=self.check("geometric mean")).reason


def test_tables_satisfy_their_schemas(root: Path) -> None:
    judged = claims.evaluate(LEDGER)
    every = claims.table(judged)
    tables.validate(every, "claims")
    tables.validate(claims.counts(judged), "claims_counts")
    parts = [tables.validate(claims.part(every, one), f"claims_{one.replace(' ', '_')}") for one in claims.VERDICTS]
    assert sum(map(len, parts)) == len(LEDGER) == claims.glue(judged)["claims_total"]
    row = every.set_index("claim").loc["latency-packed-faster"]
    assert (row["device"], row["evidence"]) == ("NVIDIA H200", "run h200-latency")
    assert every.set_index("claim").loc["error-long-split", "device"] == "Triton interpreter"


class TestAgainst:
    def compare(self, root: Path, **changes: Any) -> dict[str, dict[str, Any]]:
        """A second latency run, with packed decoding at another ratio, beside the recorded one."""
        rows = [
            {**row, **changes} if (row["arm"], row.get("code_path")) == ("hoisted/packed", "device") else row
            for row in claims_checkout.LATENCY["latency_cells"]
        ]
        device = changes.pop("device", "NVIDIA H200")
        claims_checkout.store(
            root / "runs/mine", "latency", claims_checkout.LATENCY | {"latency_cells": rows}, device=device
        )
        return claims.against("h200-latency").set_index("claim").to_dict("index")

    def test_inside_the_noise_of_both_runs(self, root: Path) -> None:
        found = self.compare(root, ratio=0.8, ratio_low=0.78, ratio_high=0.82)["latency-packed-faster"]
        halves = math.log(1.03 / 0.98) / 2, math.log(0.82 / 0.78) / 2
        assert found["tolerance"] == pytest.approx(math.hypot(*halves) + 0.01)
        assert found["difference"] == pytest.approx(math.log(0.8 / 0.78))
        assert (found["agreement"], found["status"]) == ("agrees", "passed")

    def test_outside_of_it(self, root: Path) -> None:
        found = self.compare(root, ratio=0.95, ratio_low=0.94, ratio_high=0.96)
        assert found["latency-packed-faster"]["agreement"] == "differs"
        assert found["latency-packed-faster"]["own_verdict"] == "holds"
        assert {one for one, row in found.items() if row["agreement"] != "agrees"} == {"latency-packed-faster"}

    def test_another_device_is_no_contradiction(self, root: Path) -> None:
        found = self.compare(root, ratio=0.95, ratio_low=0.94, ratio_high=0.96, device="Tesla V100-SXM2-32GB")
        row = found["latency-packed-faster"]
        assert (row["agreement"], row["reason"]) == ("other device", "Tesla V100-SXM2-32GB against NVIDIA H200")

    def test_a_cell_that_only_one_run_has(self, root: Path) -> None:
        found = self.compare(root, workload="decode-8-32k-clustered")["latency-packed-faster"]
        assert (found["agreement"], found["status"]) == ("not in both", "not_measured")

    def test_spread_over_draws_is_the_noise_of_an_error(self, root: Path) -> None:
        cells = [row | {"max_abs": 9.9e-6} for row in claims_checkout.CHAPTERS["error"]["error_cells"]]
        claims_checkout.store(
            root / "runs/error-2",
            "error",
            claims_checkout.CHAPTERS["error"] | {"error_cells": cells},
            device="none",
            executed_on="interpreter",
            started="2026-09-04T10:00:00Z",
        )
        found = claims.against("error-1").set_index("claim").to_dict("index")
        assert found["error-long-split"]["tolerance"] == pytest.approx(1.6e-6)
        assert found["error-long-split"]["agreement"] == "agrees"
        assert found["error-long-split"]["own_verdict"] == "fails"

    def test_other_parameters_explain_a_value_without_noise(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def store(run_id: str, ratio: float, started: str) -> None:
            monkeypatch.setitem(claims_checkout.GLUE["error"], "error_quantisation_over_kernel", ratio)
            frames = claims_checkout.CHAPTERS["error"]
            folder = root / "runs" / run_id
            claims_checkout.store(folder, "error", frames, executed_on="interpreter", started=started)

        store("error-same", 102.0, "2026-09-04T10:00:00Z")
        found = claims.against("error-1").set_index("claim").loc["error-codes-dominate"]
        assert (found["agreement"], found["status"]) == ("differs", "failed")
        monkeypatch.setitem(claims_checkout.PARAMETERS, "error", {**claims_checkout.PARAMETERS["error"], "rows": 2})
        store("error-other", 102.0, "2026-09-05T10:00:00Z")
        found = claims.against("error-1").set_index("claim").loc["error-codes-dominate"]
        assert (found["agreement"], found["reason"]) == ("other parameters", "the runs differ in rows")

    def test_a_page_that_draws_a_recorded_run_is_no_run_of_ones_own(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(claims_checkout.PARAMETERS, "latency", {"source": "recorded:newest"})
        claims_checkout.store(root / "runs/drawn", "latency", claims_checkout.LATENCY)
        with pytest.raises(FileNotFoundError, match="no run of latency to set beside h200-latency"):
            claims.against("h200-latency")

    def test_a_run_beside_itself_and_no_other_run_are_refused(self, root: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no run of latency to set beside h200-latency"):
            claims.against("h200-latency")
        with pytest.raises(ValueError, match="two different runs"):
            claims.against("h200-latency", "h200-latency")
        with pytest.raises(ValueError, match="belongs to quality"):
            claims.against("h200-latency", "h200-quality")
