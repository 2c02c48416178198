"""Interpreter or GPU is decided before triton is imported, and compiled kernels never land on a shared disk."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qsa_kernels.report import device


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(device, "cuda_device_count", lambda: 0)


def test_auto_is_the_interpreter_where_there_is_no_device(no_device):
    assert device.resolve("auto") == "interpreter"


def test_auto_is_cuda_where_there_is_one(monkeypatch):
    monkeypatch.setattr(device, "cuda_device_count", lambda: 1)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert device.resolve("auto") == "cuda"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device.resolve("auto") == "interpreter"


@pytest.mark.parametrize("name", ["gpu", "CUDA", ""])
def test_other_words_are_refused(name):
    with pytest.raises(ValueError, match="device: expected auto, interpreter or cuda"):
        device.resolve(name)


def test_a_flag_that_comes_too_late_is_reported():
    code = (
        "import triton\nfrom qsa_kernels.report import device\n"
        "try:\n    device.prepare('interpreter')\nexcept RuntimeError as error:\n    print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "needs 1, and triton is already imported" in answer.stdout, answer.stderr


@pytest.mark.parametrize(
    ("mounts", "shared"),
    [
        ("disk / ext4 rw 0 0\n", False),
        ("disk / ext4 rw 0 0\nserver:/x {folder} nfs4 rw 0 0\n", True),
        ("server:/ / nfs rw 0 0\ntmpfs {folder} tmpfs rw 0 0\n", False),
        ("disk / ext4 rw 0 0\nserver:/x {folder}-other lustre rw 0 0\n", False),
        ("", False),
    ],
    ids=["local", "shared", "local-on-shared", "sibling", "unknown"],
)
def test_folders_on_network_disks_are_told_apart(tmp_path, mounts, shared):
    assert device.is_network_folder(tmp_path / "cache", mounts.format(folder=tmp_path)) is shared


def test_a_cache_on_a_network_disk_is_replaced_by_a_private_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert device.cache_folder() == tmp_path / "cache"
    monkeypatch.setattr(device, "is_network_folder", lambda folder: True)
    first, second = device.cache_folder(), device.cache_folder()
    assert first != second
    assert tmp_path not in first.parents
