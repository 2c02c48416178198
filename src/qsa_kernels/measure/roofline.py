"""Cycles that each unit of a multiprocessor needs for one tile, from the machine code, and which unit binds."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from qsa_kernels.measure import sass, shared_memory
from qsa_kernels.measure.codegen import ARCHITECTURES, LABELS, WARP, CompiledKernel

VOLTA_PAPER = (
    "NVIDIA Tesla V100 GPU architecture white paper (WP-08608-001), section on the Volta streaming multiprocessor"
)
HOPPER_PAPER = "NVIDIA H100 Tensor Core GPU architecture white paper, section on the H100 streaming multiprocessor"
VOLTA_GUIDE = "NVIDIA Volta tuning guide, sections on occupancy and on unified shared memory"
HOPPER_GUIDE = "NVIDIA Hopper tuning guide, sections on occupancy and on unified shared memory"
THROUGHPUT = "NVIDIA CUDA C++ Programming Guide, table of arithmetic instruction throughput"
PIPELINES = "NVIDIA Nsight Compute documentation, list of pipelines; NVIDIA developer forum, topic 302018"
SHARED_PAPER = "NVIDIA developer forum, topic 77228 (128 bytes a cycle)"
PROJECT = "measured for this project, one run (copy bandwidth)"


@dataclass(frozen=True)
class Constant:
    """A figure of a device, with its unit and where it comes from."""

    value: float
    unit: str
    source: str


_COMMON = {
    "schedulers": Constant(4, "warp instructions/cycle/SM", VOLTA_PAPER),
    "alu": Constant(64, "lanes/cycle/SM", THROUGHPUT),
    "xu": Constant(16, "lanes/cycle/SM", THROUGHPUT),
    "shuffle": Constant(32, "lanes/cycle/SM", THROUGHPUT),
    "shared_memory": Constant(128, "bytes/cycle/SM", SHARED_PAPER),
    "registers": Constant(65536, "32-bit registers/SM", VOLTA_GUIDE),
    "warps": Constant(64, "warps/SM", VOLTA_GUIDE),
    "blocks": Constant(32, "blocks/SM", VOLTA_GUIDE),
}
DEVICES: dict[str, dict[str, Constant]] = {
    "V100-SXM2": {
        **_COMMON,
        "sms": Constant(80, "SMs", VOLTA_PAPER),
        "clock": Constant(1.53, "GHz", VOLTA_PAPER),
        "bandwidth": Constant(900, "GB/s", VOLTA_PAPER),
        "fma": Constant(64, "lanes/cycle/SM", VOLTA_PAPER),
        "fp16": Constant(64, "lanes/cycle/SM", THROUGHPUT),
        "tensor": Constant(512, "FP16 multiply-adds/cycle/SM", VOLTA_PAPER),
        "shared_bytes": Constant(96 * 1024, "bytes/SM", VOLTA_GUIDE),
        "shared_reserved": Constant(0, "bytes/block", VOLTA_GUIDE),
    },
    "H200": {
        **_COMMON,
        "sms": Constant(132, "SMs", HOPPER_PAPER),
        "clock": Constant(1.98, "GHz", HOPPER_PAPER),
        "bandwidth": Constant(4200, "GB/s", PROJECT),
        "fma": Constant(128, "lanes/cycle/SM", HOPPER_PAPER),
        "fp16": Constant(128, "lanes/cycle/SM", THROUGHPUT),
        "tensor": Constant(2048, "FP16 multiply-adds/cycle/SM", HOPPER_PAPER),
        "shared_bytes": Constant(228 * 1024, "bytes/SM", HOPPER_GUIDE),
        "shared_reserved": Constant(1024, "bytes/block", HOPPER_GUIDE),
    },
}
RUNS_ON = {"sm_70": "V100-SXM2", "sm_90": "H200"}
GEOMETRY = ["topk", "q_heads", "kv_heads", "head_dim", "dtype"]
PIPES = ("issue", "fma", "alu", "fp16", "xu", "tensor", "shared_memory", "global_memory")


def constants_table() -> pd.DataFrame:
    """Every constant of the model: device, name, value, unit, source."""
    rows = [
        {"device": device, "constant": name, "value": float(one.value), "unit": one.unit, "source": one.source}
        for device, constants in DEVICES.items()
        for name, one in constants.items()
    ]
    return pd.DataFrame(rows).assign(status="passed", reason="")


def pipe_of(instruction: sass.Instruction, device: str) -> str:
    """Arithmetic unit that executes an instruction; empty where only its issue slot counts.

    Integer multiply-adds run on the FMA unit; packed half precision has a unit of its own on Volta and runs on the FMA
    unit on Hopper; transcendental functions and scalar conversions share one unit.

    Source: `PIPELINES`.
    """
    stem = instruction.opcode.split(".")[0]
    kind = sass.classify(instruction)
    if kind == "tensor_core":
        return "tensor"
    if kind == "fp32" or stem in ("IMAD", "IMUL", "IDP"):
        return "fma"
    if stem in ("HADD2", "HMUL2", "HFMA2"):
        return "fp16" if device == "V100-SXM2" else "fma"
    if stem == "MUFU" or stem in ("F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV"):
        return "xu"
    if kind in ("integer", "fp32_compare", "conversion", "move", "fp16"):
        return "alu"
    return ""


def pipe_cycles(kernel: CompiledKernel, device: str) -> dict[str, float]:
    """Cycles of a multiprocessor that each unit needs for one tile of one block, all units at their peak.

    The shared-memory unit also returns global loads, moves spilled registers and does the shuffles. Device memory
    counts as if every selected token came from there; rows that share tokens find many of them in the L2 cache.

    Args:
        kernel (CompiledKernel): a compiled kernel, status "passed".
        device (str): name in `DEVICES`.

    Raises:
        ValueError: an unknown device; the message has the known names.
    """
    if device not in DEVICES:
        raise ValueError(f"device: expected one of {', '.join(DEVICES)}; got {device!r}")
    constants = {name: one.value for name, one in DEVICES[device].items()}
    warps, tiles, request = kernel.request.num_warps, kernel.tiles, kernel.request
    work: dict[str, float] = defaultdict(float)
    for one in kernel.loop.instructions:
        kind = sass.classify(one)
        bits = sass.access_bits(one)
        work["issue"] += 1
        if pipe := pipe_of(one, device):
            work[pipe] += multiply_adds(one) if pipe == "tensor" else WARP
        if kind.startswith("shared"):
            known = kernel.wavefronts(one)
            work["shared_memory"] += shared_memory.least_wavefronts(bits) if known is None else known
        elif kind == "local" or kind.startswith(("global_load", "global_to_shared")):
            work["shared_memory"] += shared_memory.least_wavefronts(bits)
        elif kind == "shuffle":
            work["shared_memory"] += WARP / constants["shuffle"]
    cycles = dict.fromkeys(PIPES, 0.0)
    cycles["issue"] = work["issue"] * warps / tiles / constants["schedulers"]
    for pipe in ("fma", "alu", "fp16", "xu", "tensor"):
        cycles[pipe] = work[pipe] * warps / tiles / constants[pipe]
    cycles["shared_memory"] = work["shared_memory"] * warps / tiles
    tile_bytes = request.block_n * (2 * request.head_dim * request.item_bytes + INDEX_BYTES)
    bytes_per_cycle = constants["bandwidth"] / constants["clock"] / constants["sms"]
    cycles["global_memory"] = tile_bytes / bytes_per_cycle
    return cycles


INDEX_BYTES = 4


def multiply_adds(instruction: sass.Instruction) -> int:
    """Multiply-adds of a tensor-core instruction of a warp, from the shape in its opcode.

    Raises:
        ValueError: an opcode without a shape.
    """
    for part in instruction.opcode.split("."):
        if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", part):
            # A warp group of four warps executes it together.
            return math.prod(map(int, match.groups())) // 4
        if match := re.fullmatch(r"(16|8)(8|4)(4|8|16|32|64)", part):
            return math.prod(map(int, match.groups()))
    raise ValueError(f"tensor-core instruction: expected a shape in the opcode, got {instruction.opcode}")


def blocks_per_sm(kernel: CompiledKernel, device: str) -> tuple[int, str]:
    """Blocks that fit a multiprocessor, and what limits them.

    Registers are given to warps in units of 256.
    """
    constants = {name: int(one.value) for name, one in DEVICES[device].items() if name != "clock"}
    warps = kernel.request.num_warps
    registers_per_warp = math.ceil(kernel.registers * WARP / 256) * 256
    shared = kernel.shared_bytes + constants["shared_reserved"]
    limits = {
        "warps": constants["warps"] // warps,
        "blocks": constants["blocks"],
        "registers": constants["registers"] // registers_per_warp // warps,
        "shared memory": constants["shared_bytes"] // shared if shared else constants["blocks"],
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def pipe_table(kernels: Sequence[CompiledKernel], device: str) -> pd.DataFrame:
    """One row a kernel and unit: cycles for a tile, and for one token of it."""
    rows = [
        {
            **_labels(kernel, device),
            "pipe": pipe,
            "cycles_per_tile": cycles,
            "cycles_per_token": cycles / kernel.request.block_n,
        }
        for kernel in kernels
        if kernel.status == "passed"
        for pipe, cycles in pipe_cycles(kernel, device).items()
    ]
    return pd.DataFrame(rows).assign(status="passed", reason="")


def bound_table(kernels: Sequence[CompiledKernel], device: str, *, rows: int) -> pd.DataFrame:
    """One row a kernel: the unit that binds, occupancy, and the time that this unit alone needs for a workload.

    The time is a lower bound for rows that share no tokens: latency, launch, merge and the tail of the grid come on
    top. Where rows share tokens, a bound by device memory does not hold.

    Args:
        kernels (Sequence[CompiledKernel]): compiled kernels.
        device (str): name in `DEVICES`.
        rows (int): query rows; a row has `kv_heads` times `num_splits` programs.
    """
    found = []
    for kernel in kernels:
        values: dict[str, Any] = dict.fromkeys(
            ("bound_cycles_per_tile", "blocks_per_sm", "warps_per_sm", "bound_us"), float("nan")
        )
        binding = limit = ""
        if kernel.status == "passed":
            cycles = pipe_cycles(kernel, device)
            binding = max(PIPES, key=lambda pipe: cycles[pipe])
            blocks, limit = blocks_per_sm(kernel, device)
            values = {
                "bound_cycles_per_tile": cycles[binding],
                "blocks_per_sm": float(blocks),
                "warps_per_sm": float(blocks * kernel.request.num_warps),
                "bound_us": microseconds(cycles[binding], kernel, device, rows),
            }
        reason = kernel.reason
        status = kernel.status
        if status == "passed" and not values["blocks_per_sm"]:
            status, reason = "failed", f"does not fit a multiprocessor of {device}: {limit}"
        found.append(
            {**_labels(kernel, device), "rows": rows, "binding_pipe": binding, **values, "occupancy_limit": limit}
            | {"status": status, "reason": reason}
        )
    return pd.DataFrame(found)


def reported_table(
    kernels: Mapping[str, CompiledKernel], reported: pd.DataFrame, device: str, *, rows: int
) -> pd.DataFrame:
    """One row a published time: the bound of the same kernel beside it, and the share of the time that it explains.

    Args:
        kernels (Mapping[str, CompiledKernel]): by the name of the published point.
        reported (pd.DataFrame): columns point, value (milliseconds), source.
        device (str): name in `DEVICES`.
        rows (int): query rows.
    """
    published = reported.set_index("point")[["value", "source"]].to_dict("index")
    bounds = bound_table(list(kernels.values()), device, rows=rows)
    bound_ms = bounds["bound_us"] / 1e3
    reported_ms = pd.Series([float(published[point]["value"]) for point in kernels])
    return bounds[["device", "profile", "rows", "binding_pipe"]].assign(
        point=list(kernels),
        bound_ms=bound_ms,
        reported_ms=reported_ms,
        explained_share=bound_ms / reported_ms,
        spill_store_bytes=[float(kernel.spill_store_bytes) for kernel in kernels.values()],
        source=[str(published[point]["source"]) for point in kernels],
        status=bounds["status"],
        reason=bounds["reason"],
    )


def measured_table(
    kernels: Sequence[CompiledKernel], cells: pd.DataFrame, workloads: pd.DataFrame, device: str, *, rows: int
) -> pd.DataFrame:
    """One row a kernel that a recorded run timed: cycles of a multiprocessor for each selected token.

    Cold decoding of the kernels' geometry on their code path counts, with contexts that fill the list of every row;
    rows select tokens of their own there. Of several launches with the same tile, orientation and, from sm_80 on,
    stages, it is the fastest. The time has the merge of the splits in it.

    Args:
        kernels (Sequence[CompiledKernel]): compiled kernels, with the tiles of the launches.
        cells (pd.DataFrame): the run's `latency_cells`.
        workloads (pd.DataFrame): the run's `latency_workloads`.
        device (str): name in `DEVICES`.
        rows (int): query rows of the workload.
    """
    decoding = workloads[
        (workloads["kind"] == "decode") & (workloads["rows"] == rows) & (workloads["context"] >= workloads["topk"])
    ]
    timed = cells[(cells["cache_state"] == "cold") & (cells["status"] == "passed")]
    found = []
    for kernel in kernels:
        request = kernel.request
        own = RUNS_ON.get(request.arch) == device
        shape = decoding[GEOMETRY].eq([getattr(request, name) for name in GEOMETRY]).all(axis=1)
        same = timed[
            timed["workload"].isin(decoding.loc[shape, "workload"])
            & (timed["arm"] == request.arm)
            & (timed["code_path"] == ("device" if own else request.arch))
            & (timed["block_n"] == request.block_n)
            & (timed["num_warps"] == request.num_warps)
            & (timed.get("transposed", 0.0) == request.transposed)
        ]
        if ARCHITECTURES[request.arch] >= 80:
            same = same[same["num_stages"] == request.num_stages]
        if not same.empty:
            best = same.loc[same["time_us"].idxmin()]
            launched = replace(kernel, request=replace(request, num_splits=int(best["num_splits"])))
            cycles = cycles_per_tile(float(best["time_us"]), launched, device, rows)
            found.append(
                {
                    **_labels(kernel, device),
                    "workload": best["workload"],
                    "time_us": float(best["time_us"]),
                    "cycles_per_token": cycles / request.block_n,
                }
            )
    columns = ["device", *LABELS, "workload", "time_us", "cycles_per_token"]
    # a table without rows has no types of its own
    types = dict.fromkeys(("block_n", "num_warps", "num_stages"), "int64")
    types |= dict.fromkeys(("time_us", "cycles_per_token"), "float64")
    return pd.DataFrame(found, columns=columns).astype(types).assign(status="passed", reason="")


def over_bound(measured: pd.DataFrame, pipes: pd.DataFrame) -> pd.Series:
    """Measured time over that of the unit that binds, by architecture, arm and profile.

    Args:
        measured (pd.DataFrame): from `measured_table`.
        pipes (pd.DataFrame): from `pipe_table`, for the same device.
    """
    by = ["arch", "arm", "profile"]
    bound = pipes.groupby(by)["cycles_per_token"].max()
    time = measured.set_index(by)["cycles_per_token"]
    return time / bound.loc[time.index]


def microseconds(cycles_per_tile: float, kernel: CompiledKernel, device: str, rows: int) -> float:
    """Time of the busiest multiprocessor at a rate of `cycles_per_tile`."""
    constants = DEVICES[device]
    return cycles_per_tile * _tiles_per_sm(kernel, device, rows) / (constants["clock"].value * 1e3)


def cycles_per_tile(time_us: float, kernel: CompiledKernel, device: str, rows: int) -> float:
    """Cycles a tile that a measured time amounts to, to be set beside `pipe_cycles`."""
    return time_us * DEVICES[device]["clock"].value * 1e3 / _tiles_per_sm(kernel, device, rows)


def _tiles_per_sm(kernel: CompiledKernel, device: str, rows: int) -> float:
    request = kernel.request
    programs = rows * request.kv_heads * request.num_splits
    tiles = math.ceil(request.topk / request.block_n) / request.num_splits
    return tiles * max(1.0, programs / DEVICES[device]["sms"].value)


def _labels(kernel: CompiledKernel, device: str) -> dict[str, Any]:
    return {"device": device, **{name: getattr(kernel.request, name) for name in LABELS}}
