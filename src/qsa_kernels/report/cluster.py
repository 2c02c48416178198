"""Where a workflow's jobs run: this machine, or the nodes of a cluster that a Snakemake profile describes."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from qsa_kernels.report import yamlfile

LOCAL = "local"


def workflow_folder() -> Path:
    """The workflow of the checkout that the package lies in."""
    return Path(__file__).resolve().parents[3] / "workflow"


@dataclass(frozen=True)
class Place:
    """A Snakemake profile, and who starts its jobs.

    Args:
        folder: of the profile.
        executor: "local", or the name of an executor plugin.
    """

    folder: Path
    executor: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether jobs run on other machines than this one."""
        return self.executor != LOCAL


def place(profile: str) -> Place:
    """The place that a workflow profile describes, if jobs can be sent there from this machine.

    Args:
        profile: a folder of workflow/profiles by name ("slurm"), or the path of a folder that holds a config.yaml.

    Raises:
        FileNotFoundError: no such profile; names those that there are.
        ValueError: a config.yaml without keys, or an executor whose plugin or command is missing here.
    """
    named = workflow_folder() / "profiles" / profile
    folder = named if named.is_dir() else Path(profile).expanduser().resolve()
    file = folder / "config.yaml"
    if not file.is_file():
        known = sorted(path.parent.name for path in (workflow_folder() / "profiles").glob("*/config.yaml"))
        raise FileNotFoundError(
            f"no workflow profile {profile!r}; known: {', '.join(known)}, or a folder that holds a config.yaml"
        )
    content = yamlfile.load(file)
    if not isinstance(content, dict):
        raise ValueError(f"workflow profile {file}: expected keys and values; got {type(content).__name__}")
    executor = str(content.get("executor", LOCAL))
    plugin = f"snakemake_executor_plugin_{executor.replace('-', '_')}"
    if executor != LOCAL and importlib.util.find_spec(plugin) is None:
        raise ValueError(
            f"workflow profile {profile}: executor {executor!r} needs the package {plugin.replace('_', '-')}; "
            "'make install-slurm' installs the one for Slurm"
        )
    if executor == "slurm" and shutil.which("sbatch") is None:
        raise ValueError(f"workflow profile {profile}: no sbatch here; start from a machine that can submit to Slurm")
    return Place(folder, executor)
