"""What a manifest knows about a machine, with and without a GPU; kernel caches that cannot be written (fault B28)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qsa_kernels.measure import environment
from qsa_kernels.measure.environment import NOT_AVAILABLE

SMI_KEYS = set(environment._SMI_FIELDS)


def blanks(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [blank for part in value.values() for blank in blanks(part)]
    return [value] if value is None or value == "" else []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that torch can see; NVML and nvidia-smi are up to the test."""
    properties = SimpleNamespace(
        name="NVIDIA Imaginary",
        major=7,
        minor=0,
        multi_processor_count=80,
        L2_cache_size=6 << 20,
        total_memory=32 << 30,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: properties)
    monkeypatch.setattr(environment, "_nvml_facts", lambda index: None)


class TestDescribe:
    def test_nothing_is_blank_on_this_machine(self) -> None:
        facts = environment.describe()
        assert set(facts) == {"device", "versions", "host"}
        assert blanks(facts) == []

    def test_without_a_gpu_every_key_says_not_available(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        facts = environment.device_facts()
        assert facts.pop("name") == "no CUDA device"
        assert set(facts.values()) == {NOT_AVAILABLE}
        assert set(facts) >= SMI_KEYS

    def test_versions_name_what_makes_machine_code(self) -> None:
        found = environment.versions()
        assert found["torch"] == torch.__version__
        assert found["triton"][0].isdigit()
        assert found["ptxas"][0].isdigit()

    @pytest.mark.usefixtures("gpu")
    def test_driver_facts_come_from_nvidia_smi(self, monkeypatch: pytest.MonkeyPatch) -> None:
        line = "580.1, 1530, [N/A], 1380, 877, 300.00, 41, Enabled\n"
        monkeypatch.setattr(
            subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=line, stderr="")
        )
        facts = environment.device_facts()
        assert facts["driver"] == "580.1"
        assert facts["sm_clock_max_mhz"] == 1530.0
        assert facts["sm_clock_set_mhz"] == NOT_AVAILABLE
        assert facts["power_limit_w"] == 300.0
        assert facts["ecc"] == "on"
        assert facts["compute_capability"] == "7.0"
        assert facts["facts_from"] == "nvidia-smi"

    @pytest.mark.parametrize("answer", [FileNotFoundError("nvidia-smi"), "garbage\n"], ids=["absent", "garbage"])
    @pytest.mark.usefixtures("gpu")
    def test_without_a_driver_tool_torch_alone_speaks(
        self, monkeypatch: pytest.MonkeyPatch, answer: Exception | str
    ) -> None:
        def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
            if isinstance(answer, Exception):
                raise answer
            return subprocess.CompletedProcess([], 0, stdout=answer, stderr="")

        monkeypatch.setattr(subprocess, "run", run)
        facts = environment.device_facts()
        assert facts["sms"] == 80
        assert {facts[key] for key in SMI_KEYS} == {NOT_AVAILABLE}


class TestInterpreterFlag:
    @pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), (None, False)])
    def test_is_read(self, monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if value is not None:
            monkeypatch.setenv("TRITON_INTERPRET", value)
        assert environment.is_interpreted() is expected


class TestCacheFolder:
    def test_a_writable_folder_is_taken(self, tmp_path: Path) -> None:
        assert environment.writable_cache(tmp_path / "new") == tmp_path / "new"

    def test_an_impossible_folder_gives_a_private_one(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        found = environment.writable_cache(tmp_path / "file" / "cache")
        assert found.is_dir()
        assert found.stat().st_mode & 0o077 == 0

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write to folders of mode 0555")
    def test_a_read_only_folder_gives_a_private_one(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o555)
        assert environment.writable_cache(tmp_path) != tmp_path

    def test_without_a_home_there_is_still_a_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        assert environment.writable_cache().is_dir()
