"""One fresh process of a recorded run: inputs, correctness gate, launch search, samples. Writes files."""

from __future__ import annotations

import dataclasses
import gzip
import importlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from qsa_kernels import launch as launches
from qsa_kernels.arms import ARMS, Arm
from qsa_kernels.hardware import NATIVE_CAPABILITY
from qsa_kernels.launch import LaunchConfig
from qsa_kernels.measure import baselines, workloads
from qsa_kernels.measure.latency import plan as plans
from qsa_kernels.measure.latency import protocol
from qsa_kernels.measure.latency.plan import (
    BASELINES,
    BEST_LAUNCH,
    PARTITION_PREFIX,
    SM_70,
    TILE_PREFIX,
    Plan,
    Workload,
)
from qsa_kernels.measure.latency.statistics import COPY_ARM
from qsa_kernels.measure.workloads import AttentionInputs, QuantisedPair
from qsa_kernels.reference import reference_attention

Operator = Callable[..., Any]

QUARANTINE_FILE = "quarantine.json"


@dataclass(frozen=True)
class RotatingInputs:
    """Inputs of one shape that take turns.

    Args:
        pairs: each with its FP16 cache and its codes.
        distinct_tokens: tokens that one call reads at least once.
        distinct_bytes: K and V bytes of those tokens by cache dtype.
    """

    pairs: Sequence[QuantisedPair]
    distinct_tokens: int
    distinct_bytes: dict[str, int]

    def of(self, arm_is_quantised: bool) -> list[AttentionInputs]:
        return [pair.quantised if arm_is_quantised else pair.unquantised for pair in self.pairs]


def build_inputs(workload: Workload, *, l2_bytes: int, seed: int, device: str = "cuda") -> RotatingInputs:
    """As many inputs as the rotation needs: more than twice L2 between two uses, counted in E4M3 bytes.

    Decode: other requests for each input. Prefill: other prompts.
    """
    shape: dict[str, Any] = {
        name: getattr(workload, name) for name in ("topk", "q_heads", "kv_heads", "head_dim", "page_size")
    }
    shape |= {"device": device, "dtype": getattr(torch, workload.dtype)}
    token_bytes = 2 * workload.kv_heads * workload.head_dim  # K and V of one token in E4M3
    if workload.kind == "decode":
        distinct = workload.rows * min(workload.topk, workload.context)
        turns = protocol.rotation(distinct * token_bytes, l2_bytes)
        whole = workloads.decode(
            workload.rows * turns, workload.context, selection=workload.selection, seed=seed, **shape
        )
        pairs = [_rows_of(whole, slice(i * workload.rows, (i + 1) * workload.rows)) for i in range(turns)]
    else:
        first = workloads.prefill(workload.rows, workload.context, overlap=workload.overlap or 0.0, seed=seed, **shape)
        distinct = int(torch.unique(first.quantised.logical_indices.clamp(min=0)).numel())
        turns = protocol.rotation(distinct * token_bytes, l2_bytes)
        pairs = [first] + [
            workloads.prefill(
                workload.rows, workload.context, overlap=workload.overlap or 0.0, seed=seed + turn, **shape
            )
            for turn in range(1, turns)
        ]
    return RotatingInputs(pairs, distinct, {"fp16": 2 * distinct * token_bytes, "e4m3": distinct * token_bytes})


def _rows_of(pair: QuantisedPair, rows: slice) -> QuantisedPair:
    # Copies, because the base of a slice is not aligned as the base of a whole tensor is.
    small = {name: getattr(pair.quantised, name)[rows].clone() for name in ("q", "logical_indices", "token_to_req")}
    return replace(pair, unquantised=replace(pair.unquantised, **small), quantised=replace(pair.quantised, **small))


def _fresh_attention() -> ModuleType:
    """A second copy of the operator module and its kernels, with compiled code of its own."""
    prefixes = ("qsa_kernels.attention", "qsa_kernels.kernels")

    def is_copied(name: str) -> bool:
        return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)

    kept = {name: module for name, module in sys.modules.items() if is_copied(name)}
    for name in kept:
        del sys.modules[name]
    parents = {name: vars(sys.modules["qsa_kernels"]).get(name) for name in ("attention", "kernels")}
    try:
        return importlib.import_module("qsa_kernels.attention")
    finally:
        for name in [name for name in sys.modules if is_copied(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
        for name, module in parents.items():
            if module is not None:
                setattr(sys.modules["qsa_kernels"], name, module)


def operator(code_path: str, *, copy_cache: Path | None = None) -> Operator:
    """`sparse_paged_attention` on a code path; with `copy_cache` a copy that is compiled again, into that folder."""
    if code_path == SM_70:
        from qsa_kernels.measure import codepath

        call: Operator = codepath.Launcher()
    elif copy_cache is not None:
        call = _fresh_attention().sparse_paged_attention
    else:
        from qsa_kernels import attention

        call = attention.sparse_paged_attention
    if copy_cache is None:
        return call
    from triton import knobs

    def compiled_apart(**arguments: Any) -> torch.Tensor:
        with knobs.cache.scope():
            knobs.cache.dir = str(copy_cache)
            return call(**arguments)

    return compiled_apart


def capability_of(code_path: str) -> tuple[int, int] | None:
    """Compute capability that code of this path is made for; None in the interpreter."""
    if code_path == SM_70:
        return (7, 0)
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _converts(code_path: str) -> bool:
    return (capability_of(code_path) or (0, 0)) >= NATIVE_CAPABILITY


def partition_tokens(config: LaunchConfig, topk: int) -> int:
    """Tokens that one split reduces by itself; it decides about the order of the reduction."""
    tiles = -(-topk // config.block_n)
    return min(topk, -(-tiles // config.num_splits) * config.block_n)


def public_config(profile: str, arm: Arm, workload: Workload, code_path: str) -> LaunchConfig:
    return launches.choose(
        profile,
        capability=capability_of(code_path),
        rows=workload.rows,
        q_heads=workload.q_heads,
        kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        topk=workload.topk,
        itemsize=2,
        quantised=arm.is_quantised,
        contraction=arm.contraction,
    )


class BestLaunches:
    """Results of the search, by code path, rows and arm."""

    def __init__(self, run: Path) -> None:
        self._found: dict[str, list[tuple[Workload, dict[str, LaunchConfig]]]] = {}
        for path in sorted((run / "search").glob("*.json.gz")):
            record = read_json(path)
            chosen = {row["arm"]: row for row in record["rows"] if row["chosen"] == "yes"}
            configs = {
                arm: LaunchConfig(**{field.name: row[field.name] for field in dataclasses.fields(LaunchConfig)})
                for arm, row in chosen.items()
            }
            self._found.setdefault(record["code_path"], []).append((Workload(**record["workload"]), configs))

    def config(self, arm: str, workload: Workload, code_path: str) -> LaunchConfig:
        """The best launch at the searched workload with the nearest number of programs.

        Raises:
            ValueError: no search has a result for this arm.
        """
        known = [(other, configs[arm]) for other, configs in self._found.get(code_path, []) if arm in configs]
        if not known:
            raise ValueError(f"no launch search for {arm} on code path {code_path}")

        def distance(entry: tuple[Workload, LaunchConfig]) -> tuple[float, bool, int]:
            programs = [shape.rows * shape.kv_heads for shape in (entry[0], workload)]
            return abs(math.log2(programs[0] / programs[1])), entry[0].kind != workload.kind, programs[0]

        return min(known, key=distance)[1]


def resolve(launch: str, arm: Arm, workload: Workload, code_path: str, best: BestLaunches) -> LaunchConfig:
    """The launch that a name stands for.

    Raises:
        ValueError: the name, or a tile that the code path cannot launch.
    """
    if launch == BEST_LAUNCH:
        return best.config(arm.name, workload, code_path)
    if launch.startswith(PARTITION_PREFIX):
        tokens = int(launch.removeprefix(PARTITION_PREFIX))
        return replace(best.config(arm.name, workload, code_path), num_splits=-(-workload.topk // tokens))
    if launch.startswith(TILE_PREFIX):
        block_n, warps, splits = map(int, launch.removeprefix(TILE_PREFIX).split("x"))
        return LaunchConfig(block_n, splits, warps)
    return public_config(launch, arm, workload, code_path)


@dataclass(frozen=True)
class Oracle:
    """FP64 results for some rows of one input, and the error of an independent FP16 implementation on them."""

    rows: torch.Tensor
    expected: torch.Tensor
    allowed: float

    @classmethod
    def of(cls, inputs: AttentionInputs, rows: int, multiple: float) -> Oracle:
        chosen = torch.linspace(0, inputs.rows - 1, min(rows, inputs.rows), device=inputs.q.device).round().long()
        part = replace(
            inputs,
            **{name: getattr(inputs, name)[chosen] for name in ("q", "logical_indices", "token_to_req")},
        )
        expected = reference_attention(**part.arguments())
        independent = relative_error(baselines.sdpa(part)(), expected)
        return cls(chosen, expected, multiple * independent)

    def check(self, output: torch.Tensor) -> tuple[float, float, bool]:
        """Largest absolute error, the same over the largest reference value, and whether that is allowed."""
        found = output[self.rows]
        relative = relative_error(found, self.expected)
        absolute = float((found.double() - self.expected).abs().max())
        return absolute, relative, bool(torch.isfinite(output).all()) and relative <= self.allowed


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation over the largest reference value, so that an output of zeros has an error of 1."""
    return float((output.double() - expected).abs().max() / expected.abs().max())


@dataclass
class Prepared:
    """A candidate before its gate: one call for each input, and where the call puts its result."""

    arm: str
    launch: str
    config: LaunchConfig | None
    quantised: bool
    calls: list[Callable[[], torch.Tensor]]


def prepare_arm(
    call: Operator, name: str, arm: Arm, launch: str, config: LaunchConfig, inputs: RotatingInputs
) -> Prepared:
    """Calls of one arm; every input has an output tensor of its own, filled with NaN."""

    def bind(one: AttentionInputs) -> Callable[[], torch.Tensor]:
        out = torch.full_like(one.q, math.nan)
        arguments = {**one.arguments(), **arm.options(), "launch_profile": config, "out": out}
        return lambda: call(**arguments)

    return Prepared(name, launch, config, arm.is_quantised, [bind(one) for one in inputs.of(arm.is_quantised)])


def prepare_baseline(name: str, inputs: RotatingInputs) -> Prepared:
    quantised = name.endswith("e4m3")
    calls = [baselines.prepare(name, one) for one in inputs.of(quantised)]
    return Prepared(name, plans.OWN_LAUNCH, None, quantised, calls)


def gate_row(prepared: Prepared, oracles: dict[bool, list[Oracle]], workload: Workload) -> dict[str, Any]:
    """Run the first and the last input and compare; a row of `latency_gates`."""
    row = candidate_row(prepared.arm, prepared.launch, prepared.config, workload)
    worst = {"max_abs_error": 0.0, "relative_error": 0.0, "allowed_relative_error": math.inf}
    passed, checked = True, 0
    for oracle, call in zip(oracles[prepared.quantised], (prepared.calls[0], prepared.calls[-1]), strict=True):
        absolute, relative, right = oracle.check(call())
        passed &= right
        checked += len(oracle.rows)
        worst["max_abs_error"] = max(worst["max_abs_error"], absolute)
        worst["relative_error"] = max(worst["relative_error"], relative)
        worst["allowed_relative_error"] = min(worst["allowed_relative_error"], oracle.allowed)
    reason = "" if passed else "the output differs from the FP64 reference by more than the gate allows"
    return row | worst | {"rows_checked": checked, "status": "passed" if passed else "failed", "reason": reason}


def candidate_row(arm: str, launch: str, config: LaunchConfig | None, workload: Workload) -> dict[str, Any]:
    tiles = dataclasses.asdict(config) if config else dict.fromkeys(f.name for f in dataclasses.fields(LaunchConfig))
    reduced = partition_tokens(config, workload.topk) if config else None
    return {"arm": arm, "launch": launch, **tiles, "partition_tokens": reduced}


def missing_row(arm: str, launch: str, workload: Workload, status: str, reason: str) -> dict[str, Any]:
    empty = dict.fromkeys(("max_abs_error", "relative_error", "allowed_relative_error"))
    row = candidate_row(arm, launch, None, workload)
    return row | empty | {"rows_checked": 0, "status": status, "reason": first_line(reason)}


def first_line(text: object) -> str:
    lines = str(text).strip().splitlines()
    return (lines[0] if lines else type(text).__name__)[:300]


def describe(error: Exception) -> str:
    return first_line(f"{type(error).__name__}: {error}")


class DeadContextError(RuntimeError):
    """A launch has broken the CUDA context of this process."""


@dataclass(frozen=True)
class Machine:
    """What a session measures on.

    Args:
        new_timer: makes a timer; each cell gets its own, whose graphs are freed with it.
        torch_device: where inputs live.
        l2_bytes: size of the L2 cache.
        sms: multiprocessors.
    """

    new_timer: Callable[[], protocol.Timer]
    torch_device: str
    l2_bytes: int
    sms: int

    @classmethod
    def present(cls) -> Machine:
        """The CUDA device of this process.

        Raises:
            RuntimeError: there is none, or the interpreter is asked for.
        """
        protocol.require_measurable()
        properties = torch.cuda.get_device_properties(0)
        return cls(
            new_timer=protocol.CudaGraphTimer,
            torch_device="cuda",
            l2_bytes=int(properties.L2_cache_size),
            sms=properties.multi_processor_count,
        )


class Session:
    """What one process keeps between units: timer and operators.

    Args:
        plan: of the run.
        run: its folder.
        machine: what is measured on.
    """

    def __init__(self, plan: Plan, run: Path, machine: Machine) -> None:
        self.plan = plan
        self.run = run
        self.machine = machine
        self.best = BestLaunches(run)
        noted = run / QUARANTINE_FILE
        self.quarantine: dict[str, str] = json.loads(noted.read_text()) if noted.is_file() else {}
        self._operators: dict[tuple[str, bool], Operator] = {}
        self._inputs: tuple[Workload, RotatingInputs] | None = None

    def operator(self, code_path: str, *, copy: bool = False) -> Operator:
        key = (code_path, copy)
        if key not in self._operators:
            self._operators[key] = operator(code_path, copy_cache=self.run / "copy-cache" if copy else None)
        return self._operators[key]

    def inputs(self, workload: Workload) -> RotatingInputs:
        """Inputs of the workload; the same in every process, kept until another workload is asked for."""
        if self._inputs is None or self._inputs[0] != workload:
            self._inputs = None
            torch.cuda.empty_cache()
            inputs = build_inputs(
                workload, l2_bytes=self.machine.l2_bytes, seed=self.plan.seed, device=self.machine.torch_device
            )
            self._inputs = (workload, inputs)
        return self._inputs[1]

    def _go_on(self, key: str, error: Exception) -> None:
        """Return if the device still works; else note the culprit, which the next process leaves out.

        Raises:
            DeadContextError: nothing can be launched in this process any more.
        """
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except RuntimeError:
            self.quarantine[key] = describe(error)
            (self.run / QUARANTINE_FILE).write_text(json.dumps(self.quarantine, indent=2) + "\n", encoding="utf-8")
            raise DeadContextError(f"{key}: {describe(error)}") from error

    def oracles(self, inputs: RotatingInputs) -> dict[bool, list[Oracle]]:
        return {
            quantised: [
                Oracle.of(inputs.of(quantised)[place], self.plan.gate_rows, self.plan.gate_multiple)
                for place in (0, -1)
            ]
            for quantised in (False, True)
        }

    def _prepare(self, unit: plans.Unit, name: str, launch: str, copy: bool, inputs: RotatingInputs) -> Prepared:
        if name in BASELINES:
            return prepare_baseline(name, inputs)
        arm = ARMS["fp16" if copy else name]
        config = resolve(launch, arm, unit.workload, unit.code_path, self.best)
        return prepare_arm(self.operator(unit.code_path, copy=copy), name, arm, launch, config, inputs)

    def measure(self, unit: plans.Unit) -> dict[str, Any]:
        """Gate and samples of one unit; a unit that does not fit the memory says so for every arm."""
        begin = time.monotonic()
        record = {
            "stage": unit.stage.name,
            "workload": dataclasses.asdict(unit.workload),
            "code_path": unit.code_path,
            "process": unit.process,
        }
        timer = self.machine.new_timer()
        try:
            inputs = self.inputs(unit.workload)
        except torch.OutOfMemoryError as error:
            gates = [
                missing_row(name, launch, unit.workload, "skipped", f"the inputs do not fit the memory: {error}")
                for name, launch, _ in candidates(unit)
            ]
            found: dict[str, Any] = {"inputs": None, "gates": gates, "samples": []}
        else:
            found = self._measure(unit, inputs)
        return {
            **record,
            "device": timer.device,
            "sync_method": timer.sync_method,
            "resolution_us": timer.resolution_us,
            **found,
            "seconds": time.monotonic() - begin,
        }

    def _measure(self, unit: plans.Unit, inputs: RotatingInputs) -> dict[str, Any]:
        oracles = self.oracles(inputs)
        gates: list[dict[str, Any]] = []
        passed: list[Prepared] = []
        for name, launch, copy in candidates(unit):
            key = f"{unit.code_path} {name} {launch} {unit.workload.name}"
            missing = self._missing(name, unit.code_path)
            if missing or key in self.quarantine:
                status = "skipped" if missing else "failed"
                gates.append(missing_row(name, launch, unit.workload, status, missing or self.quarantine[key]))
                continue
            try:
                prepared = self._prepare(unit, name, launch, copy, inputs)
                row = gate_row(prepared, oracles, unit.workload)
            except Exception as error:  # whatever compiler, driver or library raise is the reason
                self._go_on(key, error)
                gates.append(missing_row(name, launch, unit.workload, "failed", describe(error)))
                continue
            gates.append(row)
            if row["status"] == "passed":
                passed.append(prepared)
        samples: list[dict[str, Any]] = []
        refused: list[tuple[str, str, Exception]] = []
        for state in unit.stage.states if passed else []:
            rows = protocol.measure(
                [protocol.Candidate(entry.arm, entry.launch, entry.calls) for entry in passed],
                self.machine.new_timer(),
                state=state,
                blocks=unit.stage.blocks,
                seed=self.plan.seed,
                process=unit.process,
                target_us=self.plan.sample_us,
                refused=refused,
            )
            samples += [{"cache_state": state, **row} for row in rows]
        for name, launch, refusal in refused:
            self._go_on(f"{unit.code_path} {name} {launch} {unit.workload.name}", refusal)
            gate = next(row for row in gates if (row["arm"], row["launch"]) == (name, launch))
            gate |= {"status": "failed", "reason": f"cannot be captured in a graph: {describe(refusal)}"}
        facts = {
            "rotating_inputs": len(inputs.pairs),
            "distinct_tokens": inputs.distinct_tokens,
            "bytes_fp16": inputs.distinct_bytes["fp16"],
            "bytes_e4m3": inputs.distinct_bytes["e4m3"],
            "l2_bytes": self.machine.l2_bytes,
            "neighbour_overlap": inputs.pairs[0].neighbour_overlap,
        }
        return {"inputs": facts, "gates": gates, "samples": samples}

    def _missing(self, name: str, code_path: str) -> str:
        """Why something cannot run here at all, empty if it can."""
        if name.startswith("flashinfer"):
            return baselines.flashinfer_missing()
        if name in ARMS and ARMS[name].decoder == "native" and not _converts(code_path):
            return "the hardware conversion needs compute capability 8.9 or newer"
        return ""

    def search(self, workload: Workload, code_path: str) -> dict[str, Any]:
        """Time of every declared launch of every arm; the fastest right one is chosen."""
        begin = time.monotonic()
        inputs = self.inputs(workload)
        oracles = self.oracles(inputs)
        rows: list[dict[str, Any]] = []
        for name, configs in search_configs(self.plan, workload, code_path, self.machine.sms):
            arm = ARMS[name]
            tried: list[dict[str, Any]] = []
            if self._missing(name, code_path):
                continue
            fastest = math.inf
            for config in configs:
                row = {**candidate_row(name, "search", config, workload), "time_us": None, "chosen": "no"}
                key = f"{code_path} {name} {config} {workload.name}"
                if key in self.quarantine:
                    tried.append(row | {"status": "failed", "reason": self.quarantine[key]})
                    continue
                try:
                    prepared = prepare_arm(self.operator(code_path), name, arm, "search", config, inputs)
                    gate = gate_row(prepared, oracles, workload)
                    row |= {"status": gate["status"], "reason": gate["reason"]}
                    if gate["status"] == "passed":
                        row["time_us"] = self._quick_time(prepared, fastest)
                        fastest = min(fastest, row["time_us"])
                except Exception as error:
                    self._go_on(key, error)
                    row |= {"status": "failed", "reason": describe(error)}
                tried.append(row)
            right = [row for row in tried if row["time_us"] is not None]
            if right:
                min(right, key=lambda row: row["time_us"])["chosen"] = "yes"
            rows += tried
        return {
            "workload": dataclasses.asdict(workload),
            "code_path": code_path,
            "device": self.machine.new_timer().device,
            "rows": rows,
            "seconds": time.monotonic() - begin,
        }

    def _quick_time(self, prepared: Prepared, fastest: float) -> float:
        """Least of a few cold samples; a launch that one call shows to be hopeless is not sampled further."""
        timer = self.machine.new_timer()
        once = timer.sample(timer.prepare(prepared.calls[-1:]), primed=False)
        if once > 2.0 * fastest:
            return once
        ready = timer.prepare(prepared.calls)
        times = [timer.sample(ready, primed=False) for _ in range(self.plan.search.samples)]
        return min(times) / len(prepared.calls)


def search_configs(
    plan: Plan, workload: Workload, code_path: str, sms: int
) -> Iterator[tuple[str, list[LaunchConfig]]]:
    """For each arm the launches that the search tries, public ones first."""
    grids = plan.search.tiles.get(code_path, [])  # type: ignore[call-overload]
    for name in dict.fromkeys(name for grid in grids for name in grid.arms):
        arm = ARMS[name]
        configs: list[LaunchConfig] = []
        for profile in plan.search.public[code_path]:  # type: ignore[index]
            if launches.PROFILES[profile].contraction == arm.contraction:
                configs.append(public_config(profile, arm, workload, code_path))
        for grid in grids:
            if name not in grid.arms:
                continue
            for (block_n, warps, stages), per_sm in itertools.product(grid.tiles, plan.search.programs_per_sm):
                splits = split_count(per_sm, sms, workload, block_n)
                configs.append(LaunchConfig(block_n, splits, warps, stages, grid.transposed))
        yield name, list(dict.fromkeys(configs))


def split_count(programs_per_sm: float, sms: int, workload: Workload, block_n: int) -> int:
    """The split count with equal shares that brings the number of programs near to the wanted one."""
    wanted = programs_per_sm * sms / (workload.rows * workload.kv_heads)
    tiles = -(-min(workload.topk, workload.context) // block_n)
    return launches.even_split_count(tiles, max(1, round(wanted)))


@dataclass(frozen=True)
class Compilation:
    """One compiled kernel: a launch of an arm for a shape.

    Args:
        code_path: which code path.
        arm: name of the arm.
        config: its launch.
        copy: whether it is the A/A copy.
        shape: a small workload that compiles to the same code.
    """

    code_path: str
    arm: str
    config: LaunchConfig
    copy: bool
    shape: Workload


def _small(workload: Workload) -> Workload:
    """Sizes that the compiler does not see are made small."""
    return replace(workload, kind="decode", rows=8, context=4096, selection="clustered", overlap=None)


def compilations_of_search(plan: Plan, sms: int) -> list[Compilation]:
    """Everything that the launch search launches."""
    wanted: dict[Compilation, None] = {}
    for code_path, workload in itertools.product(plan.search.tiles, plan.search.each_workload()):
        for name, configs in search_configs(plan, workload, code_path, sms):
            wanted |= {Compilation(code_path, name, config, False, _small(workload)): None for config in configs}
    return list(wanted)


def compilations_of_units(plan: Plan, run: Path) -> list[Compilation]:
    """Everything that the stages launch, once the search has chosen."""
    best = BestLaunches(run)
    wanted: dict[Compilation, None] = {}
    for unit in plans.units(plan):
        for name, launch, copy in candidates(unit):
            if name in BASELINES:
                continue
            arm = ARMS["fp16" if copy else name]
            try:
                config = resolve(launch, arm, unit.workload, unit.code_path, best)
            except ValueError:  # the unit itself reports it
                continue
            wanted[Compilation(unit.code_path, arm.name, config, copy, _small(unit.workload))] = None
    return list(wanted)


def compile_claimed(plan: Plan, run: Path, claims: Path) -> int:
    """Launch everything that the next step launches once, on small inputs, so that it is found compiled.

    Processes that do this at the same time share the work: a file in `claims` says that one has taken a kernel. A
    launch that fails here fails again where it is measured, which records it.

    Returns:
        the number of kernels that this process compiled.
    """
    machine = Machine.present()
    session = Session(plan, run, machine)
    searched = all((run / "search" / name).is_file() for name in search_names(plan))
    wanted = compilations_of_units(plan, run) if searched else compilations_of_search(plan, machine.sms)
    names = [arm for stage in plan.stages for groups in stage.arms.values() for group in groups for arm in group.arms]
    libraries = sorted({name for name in names if name.startswith("flashinfer")}) if not searched else []
    inputs: dict[Workload, RotatingInputs] = {}
    done = 0

    def inputs_of(shape: Workload) -> RotatingInputs:
        if shape not in inputs:
            inputs[shape] = build_inputs(shape, l2_bytes=1, seed=plan.seed, device=machine.torch_device)
        return inputs[shape]

    entries: list[str | Compilation] = [*libraries, *wanted]
    for number, entry in enumerate(entries):
        if not _claim(claims / str(number)):
            continue
        try:
            if isinstance(entry, str):
                prepare_baseline(entry, inputs_of(_small(next(plan.search.each_workload())))).calls[0]()
            else:
                if ARMS[entry.arm].decoder == "native" and not _converts(entry.code_path):
                    continue
                call = session.operator(entry.code_path, copy=entry.copy)
                shaped = inputs_of(entry.shape)
                prepare_arm(call, entry.arm, ARMS[entry.arm], "compile", entry.config, shaped).calls[0]()
            done += 1
        except Exception as error:
            print(f"compile {entry}: {describe(error)}", file=sys.stderr)
    torch.cuda.synchronize()
    return done


def _claim(path: Path) -> bool:
    """Whether this process is the first to ask for the name."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def search_names(plan: Plan) -> list[str]:
    """Names of the files that the search leaves."""
    return [search_name(workload, code_path) for workload, code_path in searches(plan)]


def search_name(workload: Workload, code_path: str) -> str:
    return f"{workload.name}__{code_path}.json.gz"


def searches(plan: Plan) -> list[tuple[Workload, str]]:
    return list(itertools.product(plan.search.each_workload(), plan.search.tiles))


def candidates(unit: plans.Unit) -> Iterator[tuple[str, str, bool]]:
    """Name, launch and whether it is the copy; the A/A copy follows the launch that sets the floor."""
    pairs = list(unit.candidates())
    own = [launch for arm, launch in pairs if arm == "fp16"]
    copied = BEST_LAUNCH if BEST_LAUNCH in own else own[0]
    yield from ((arm, launch, False) for arm, launch in pairs)
    yield COPY_ARM, copied, True


def read_json(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write whole or not at all; NaN becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(_strict(record), file, allow_nan=False)
    partial.replace(path)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
