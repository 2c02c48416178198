"""A cluster that goes away with the tests, a checkout to run in, and the profile as a user adapts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster.loopback import Slurm

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where nobody asked for them; where somebody did, a missing Slurm fails."""
    if os.environ.get("QSA_TEST_CLUSTER"):
        return
    skip = pytest.mark.skip(reason="starts a Slurm of its own: make test-cluster")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    # Not pytest's folder: sockets have short paths, and munged wants parents that only their owner writes to.
    with tempfile.TemporaryDirectory(prefix="qsa-slurm-", dir="/var/tmp", ignore_cleanup_errors=True) as work:
        folder = Path(work)
        folder.chmod(0o755)
        running = Slurm(folder)
        try:
            running.start()
            yield running
        finally:
            running.stop()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout to run in."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    folder = tmp_path / "checkout"
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture
def workflow_profile(tmp_path: Path) -> Path:
    """A copy of the profile for Slurm, as a user makes one, with what a cluster without accounting needs."""
    profile = yaml.safe_load((ROOT / "workflow/profiles/slurm/config.yaml").read_text())
    profile["slurm-status-command"] = "squeue"
    profile["slurm-init-seconds-before-status-checks"] = 3
    profile["default-resources"]["mem_mb"] = 4000
    folder = tmp_path / "loopback"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(profile))
    return folder
