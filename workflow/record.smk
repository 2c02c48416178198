# A recorded latency run on a cluster: one job chooses and compiles the launches, then each fresh process is a job.
# `qsa record --workflow-profile` starts this and stores the run when all of it is there.
import shlex
import sys
from pathlib import Path

RUN = Path(config["run"])
DONE = RUN / "done"
COMMIT = "" if config["commit"] == "not available" else f" --commit {config['commit']}"
RECORD = (
    f"{shlex.quote(sys.executable)} -m qsa_kernels.report.cli record --profile {shlex.quote(config['profile'])}"
    f" --resume {shlex.quote(str(RUN))}{COMMIT}"
)


rule all:
    input:
        [DONE / f"process-{number}" for number in range(int(config["processes"]))],


rule search:
    output:
        touch(DONE / "search"),
    resources:
        gpu=1,
    shell:
        "{RECORD} --search-only"


rule process:
    input:
        DONE / "search",
    output:
        touch(DONE / "process-{number}"),
    resources:
        gpu=1,
    shell:
        "{RECORD} --process {wildcards.number}"
