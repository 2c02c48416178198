"""Drives a recorded run: fresh processes, in order of importance, resumable, within a time budget."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import qsa_kernels
from qsa_kernels.hardware import check_device
from qsa_kernels.measure import environment
from qsa_kernels.measure.latency import ceiling, protocol, session
from qsa_kernels.measure.latency import plan as plans
from qsa_kernels.measure.latency.plan import Plan

PLAN_FILE, FACTS_FILE = "plan.json", "facts.json"
# What pieces of one run have to agree in, apart from the name of the device.
_SAME_VERSIONS = ("torch", "cuda", "triton", "ptxas")
BROKEN = 3  # exit status of a worker whose CUDA context a launch has broken
# A worker needs this long before its first unit: imports and context.
_START_S = 12.0


def open_run(run: Path, plan: Plan, provenance: dict[str, Any]) -> None:
    """Create the folder of an unfinished run, or check that an existing one belongs to this plan, code and device.

    Args:
        run: the folder.
        plan: what is measured.
        provenance: run id, commit, package hash and so on, as the report puts them into the manifest.

    Raises:
        ValueError: the folder holds a run of another plan, of other sources, of another device, driver or compiler.
        RuntimeError: nothing can be measured here.
    """
    facts = environment.describe()
    name = facts["device"]["name"]
    if plan.device_name not in name:
        raise ValueError(
            f"device: this profile records a {plan.device_name}; this machine has {name}; nothing is measured"
        )
    protocol.require_measurable()
    check_device(torch.cuda.get_device_capability(), torch.float16)
    if (run / PLAN_FILE).is_file():
        stored = json.loads((run / FACTS_FILE).read_text())
        same = (
            ("plan", json.loads((run / PLAN_FILE).read_text()), plans.to_mapping(plan)),
            ("state of what is timed", stored["sources_sha256"], sources_sha256()),
            ("device", stored["device"]["name"], name),
            ("driver", stored["device"]["driver"], facts["device"]["driver"]),
            *((which, stored["versions"][which], facts["versions"][which]) for which in _SAME_VERSIONS),
        )
        for what, before, now in same:
            if before != now:
                raise ValueError(f"{run}: this unfinished run was begun with another {what}; start a new one")
        return
    run.mkdir(parents=True, exist_ok=True)
    _write(run / PLAN_FILE, plans.to_mapping(plan))
    _write(run / FACTS_FILE, {**facts, "provenance": provenance, "sources_sha256": sources_sha256()})


def node_name() -> str:
    """Name of this machine: QSA_NODE, else Slurm's name for it; never the host name, which nobody asked to publish.

    Raises:
        ValueError: QSA_NODE is no name of a folder.
    """
    given = os.environ.get("QSA_NODE")
    if given and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", given):
        raise ValueError(f"QSA_NODE: expected letters, digits, '.', '_' and '-'; got {given!r}")
    return given or os.environ.get("SLURMD_NODENAME") or environment.NOT_AVAILABLE


def node_facts() -> dict[str, str]:
    """What a piece says about the machine that it was measured on."""
    facts = environment.describe()
    device = {"device": facts["device"]["name"], "driver": facts["device"]["driver"]}
    return {"name": node_name(), **device, **{which: facts["versions"][which] for which in _SAME_VERSIONS}}


def sources_sha256() -> str:
    """Hash of the source files that decide about a time: operator, kernels, inputs and the taking of samples."""
    package = Path(qsa_kernels.__file__).parent
    measuring = [package / "measure" / f"{name}.py" for name in ("workloads", "baselines", "codepath")]
    measuring += [package / "measure/latency" / f"{name}.py" for name in ("protocol", "session")]
    digest = hashlib.sha256()
    for path in sorted([*package.glob("*.py"), *package.glob("kernels/*.py"), *measuring]):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def stored_plan(run: Path) -> Plan:
    return plans.from_mapping(json.loads((run / PLAN_FILE).read_text(encoding="utf-8")))


def open_searches(run: Path, plan: Plan) -> list[tuple[plans.Workload, str]]:
    """Searches that have no result yet."""
    return [entry for entry in session.searches(plan) if not (run / "search" / session.search_name(*entry)).is_file()]


def open_units(run: Path, plan: Plan, patterns: Sequence[str] = ()) -> list[plans.Unit]:
    """Units that have no result yet, in the order in which they are measured."""
    return [unit for unit in plans.units(plan, list(patterns)) if not (run / unit.path).is_file()]


def ceiling_path(run: Path, node: str) -> Path:
    """Where the copy bandwidth of a machine is kept."""
    return run / "ceilings" / f"{'this-machine' if node == environment.NOT_AVAILABLE else node}.json.gz"


def is_complete(run: Path) -> bool:
    plan = stored_plan(run)
    return not open_units(run, plan) and not open_searches(run, plan)


def record(
    run: Path,
    *,
    patterns: Sequence[str] = (),
    processes: Sequence[int] = (),
    search_only: bool = False,
    budget_s: float | None = None,
) -> int:
    """Go on with a run until it is complete or the budget is spent; what is finished stays.

    Machines that share the folder each take processes of their own, once one of them has searched the launches.

    Args:
        run: folder that `open_run` prepared.
        patterns: measure only units that match, see `plan.Unit.matches`.
        processes: measure only these fresh processes, by number; default: all.
        search_only: stop when the launches are chosen and compiled.
        budget_s: seconds; None = no limit.

    Returns:
        number of wanted units that are still open.

    Raises:
        RuntimeError: a worker process failed, or `processes` before the launches are chosen.
    """
    deadline = time.time() + budget_s if budget_s is not None else None
    plan = stored_plan(run)
    if processes and open_searches(run, plan):
        raise RuntimeError(f"{run}: no launches are chosen yet; one machine does that first, with --search-only")
    # Machines that share the folder do not share what they compile: over a network they would read half a file.
    named = node_name() != environment.NOT_AVAILABLE
    cache = environment.writable_cache(run / "cache" / node_name() if named else run / "cache")
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache)}

    def wanted() -> list[plans.Unit]:
        return [unit for unit in open_units(run, plan, patterns) if not processes or unit.process in processes]

    def out_of_time() -> bool:
        return deadline is not None and time.time() + _START_S > deadline

    def worker(*arguments: str) -> subprocess.Popen[bytes]:
        limit = ["--deadline", repr(deadline)] if deadline is not None else []
        command = [sys.executable, "-m", "qsa_kernels.measure.latency", str(run), *arguments, *limit]
        return subprocess.Popen(command, env=environ)

    def finish(what: str, *arguments: str) -> None:
        """Run a worker to its end, and another one for each that a launch has broken."""
        code = BROKEN
        while code == BROKEN:
            code = worker(*arguments).wait()
        if code != 0:
            raise RuntimeError(f"{what}: the worker process ended with {code}; finished units are kept")

    def compile_all(step: str) -> None:
        # The mark lies in the cache: another machine starts with an empty one.
        mark = cache / f"compiled-for-{step}"
        if mark.is_file() or out_of_time():
            return
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="qsa-claims-") as claims:
            codes = [
                process.wait() for process in [worker("compile", "--claims", claims) for _ in range(plan.compilers)]
            ]
        if any(codes):
            _say(f"compile: worker processes ended with {codes}; what they left is compiled where it is measured")
        mark.touch()
        _say(f"compiled for {step} in {time.monotonic() - begin:.0f} s")

    if open_searches(run, plan):
        compile_all("search")
        if not out_of_time():
            finish("search", "search")
    if open_searches(run, plan):
        return len(wanted())
    compile_all("measurement")
    if search_only:
        return len(wanted())
    if not ceiling_path(run, node_name()).is_file() and not out_of_time():
        finish("copy bandwidth", "ceiling")
    for group, number in dict.fromkeys((unit.stage.group, unit.process) for unit in wanted()):
        if out_of_time():
            break
        arguments = ["--group", str(group), "--process", str(number)]
        for pattern in patterns:
            arguments += ["--cells", pattern]
        finish(f"group {group}, process {number}", "measure", *arguments)
    return len(wanted())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _has_time(deadline: float | None, longest: float) -> bool:
    return deadline is None or time.time() + longest < deadline


def _work(options: argparse.Namespace) -> None:
    protocol.require_measurable()
    run: Path = options.run
    plan = stored_plan(run)
    if options.task == "compile":
        session.compile_claimed(plan, run, options.claims)
        return
    longest = 0.0
    node = node_facts()
    if options.task == "ceiling":
        session.write_json(ceiling_path(run, node["name"]), {**ceiling.measure(), "node": node})
        return
    worker = session.Session(plan, run, session.Machine.present())
    if options.task == "search":
        for workload, code_path in open_searches(run, plan):
            if not _has_time(options.deadline, longest):
                return
            result = worker.search(workload, code_path)
            session.write_json(run / "search" / session.search_name(workload, code_path), {**result, "node": node})
            longest = max(longest, result["seconds"])
            _say(f"search {workload.name} {code_path}: {result['seconds']:.1f} s")
        return
    for unit in open_units(run, plan, options.cells):
        if unit.stage.group != options.group or unit.process != options.process:
            continue
        if not _has_time(options.deadline, longest):
            return
        result = worker.measure(unit)
        session.write_json(run / unit.path, {**result, "node": node})
        longest = max(longest, result["seconds"])
        red = sum(row["status"] == "failed" for row in result["gates"])
        _say(f"{unit.path}: {result['seconds']:.1f} s" + (f", {red} arms failed" if red else ""))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the worker processes."""
    parser = argparse.ArgumentParser(prog="python -m qsa_kernels.measure.latency", description=main.__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("task", choices=("compile", "search", "ceiling", "measure"))
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--claims", type=Path)
    parser.add_argument("--cells", action="append", default=[])
    parser.add_argument("--deadline", type=float, default=None)
    try:
        _work(parser.parse_args(arguments))
    except session.DeadContextError as error:
        _say(f"this process is broken, another one goes on without the culprit: {error}")
        raise SystemExit(BROKEN) from None
