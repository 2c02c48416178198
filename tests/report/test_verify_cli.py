"""`qsa verify` as people and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import claims_checkout
import pytest
from typer.testing import CliRunner, Result

from qsa_kernels.report import claims, cli, live_checks


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QSA_ROOT", str(tmp_path))
    claims_checkout.make(tmp_path)
    monkeypatch.setattr(live_checks, "CHECKS", claims_checkout.expected_checks(claims.load()))
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["verify", *arguments])


def answer(result: Result) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(
        result.stdout, parse_constant=lambda word: pytest.fail(f"no strict JSON: {word}")
    )
    return reply


def test_json(root: Path) -> None:
    result = call("--json")
    assert result.exit_code == 0, result.output
    reply = answer(result)
    assert sum(reply["counts"].values()) == len(reply["claims"]) >= 45
    assert reply["counts"]["fails"] == reply["counts"]["not measured"] == 0
    [gain] = [one for one in reply["claims"] if one["id"] == "capacity-nvfp4-gain"]
    assert (gain["verdict"], gain["expected"], gain["tolerance"]) == ("holds", 1.836, 0.0005)
    assert gain["found"] == pytest.approx(931_100 / 507_093)
    assert gain["rests_on"] == ["data/reported/capacity.csv"]


def test_table(root: Path) -> None:
    result = call()
    assert result.exit_code == 0, result.output
    for words in ("capacity-nvfp4-gain", "1.836 ± 0.0005", "claims: ", " holds, "):
        assert words in result.stdout


def test_a_broken_table_ends_with_status_1(root: Path) -> None:
    path = root / "runs/codegen-1/tables/codegen_identity.csv"
    path.write_bytes(path.read_bytes() + b"\n")
    result = call("--json")
    assert result.exit_code == 1
    wrong = {one["id"]: one["reason"] for one in answer(result)["claims"] if one["verdict"] == "fails"}
    assert set(wrong) == {"fp16-same-machine-code", "fp16-same-machine-code-vector"}
    assert all("does not match the hash in manifest.json" in reason for reason in wrong.values())


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(("ratio", "status"), [(0.79, 0), (0.99, 1)])
def test_against(root: Path, ratio: float, status: int, as_json: bool) -> None:
    rows = [
        row | ({"ratio": ratio} if (row["arm"], row.get("code_path")) == ("hoisted/packed", "device") else {})
        for row in claims_checkout.LATENCY["latency_cells"]
    ]
    claims_checkout.store(root / "runs/mine", "latency", claims_checkout.LATENCY | {"latency_cells": rows})
    result = call("--against", "h200-latency", *(["--json"] if as_json else []))
    assert result.exit_code == status, result.output
    if as_json:
        reply = answer(result)
        assert (reply["recorded"], reply["own"]) == ("h200-latency", "mine")
        assert reply["counts"].get("differs", 0) == status
    else:
        assert "latency-packed-faster" in result.stdout


def test_bad_calls(root: Path) -> None:
    with pytest.raises(ValueError, match="--run: only together with --against"):
        CliRunner().invoke(cli.app, ["verify", "--run", "x"], catch_exceptions=False)
    with pytest.raises(FileNotFoundError, match="no run 'nowhere'"):
        CliRunner().invoke(cli.app, ["verify", "--against", "nowhere"], catch_exceptions=False)
