"""A Slurm on loopback: munged, slurmctld and two slurmd of one machine, in a folder of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NODES = ("gpu-a", "gpu-b")
# A file that stands for the GPU of each node: Slurm counts it, nothing opens it.
_DEVICES = ("/dev/null", "/dev/zero")

_SLURM_CONF = """ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=10
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_MUNGE_FILES = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def wait_for(what: str, condition: Callable[[], bool], seconds: float) -> None:
    """Look once a second until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {seconds:.0f} s: {what}"
        time.sleep(1)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Slurm:
    """The running cluster.

    Args:
        folder: of its configuration, state and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        # The executor's job steps lose SLURM_CONF, which a real cluster does not need.
        wrapper = folder / "bin/srun"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {shutil.which("srun")} "$@"\n')
        wrapper.chmod(0o755)
        self.environment["PATH"] = f"{wrapper.parent}:{os.environ['PATH']}"

    def ask(self, *command: str) -> str:
        """The answer of a Slurm command."""
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert answer.returncode == 0, f"{' '.join(command)}: {answer.stderr}"
        return answer.stdout

    def job(self, comment: str, state: str = "RUNNING") -> str | None:
        """Id of the job whose comment ends so, if it is in that state."""
        for line in self.ask("squeue", "--noheader", "--states=all", "--format=%A %T %k").splitlines():
            identifier, now, text = line.split(maxsplit=2)
            if now == state and text.strip().endswith(comment):
                return identifier
        return None

    def start(self) -> None:
        """Start the daemons and wait for the nodes."""
        folder = self.folder
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().split(".")[0]
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=5000"
            " Feature=v100 Gres=gpu:1 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        text = _SLURM_CONF.format(host=host, folder=folder, user=user, ports=ports, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text)
        gres = [f"NodeName={node} Name=gpu File={file}\n" for node, file in zip(NODES, _DEVICES, strict=True)]
        (folder / "gres.conf").write_text("".join(gres))
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        munge = [f"--{name}={folder}/munge.{suffix}" for name, suffix in _MUNGE_FILES.items()]
        self.ask("munged", "--force", *munge)
        self.ask("slurmctld")
        for node in NODES:
            self.ask("slurmd", "-N", node)
        wait_for("idle nodes", lambda: self.ask("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(NODES), 30)

    def stop(self) -> None:
        """End the jobs and the daemons of this folder, by their process ids."""
        subprocess.run(["scancel", "--state=RUNNING", "--signal=KILL"], env=self.environment, check=False)
        subprocess.run(["scancel", "--state=PENDING"], env=self.environment, check=False)
        for file in [*self.folder.glob("slurmd-*.pid"), self.folder / "slurmctld.pid", self.folder / "munge.pid"]:
            if file.is_file():
                identifier = file.read_text().strip()
                subprocess.run(["kill", identifier], check=False)
                wait_for(f"the end of {file.name}", lambda name=identifier: not Path("/proc", name).exists(), 30)
