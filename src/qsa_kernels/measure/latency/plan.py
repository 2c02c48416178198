"""What a recorded run measures, in order of importance: plain data, read from a profile and stored in the run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from qsa_kernels.arms import ARMS

DEVICE, SM_70 = "device", "sm_70"
BASELINES = ("sdpa/fp16", "sdpa/e4m3", "flashinfer/fp16", "flashinfer/e4m3")
# Names of launches beside those of the public profiles: "partition-256" has splits of so many tokens at the best tile;
# "tile-16x4x1" is 16 columns, four warps, one split.
OWN_LAUNCH, BEST_LAUNCH, PARTITION_PREFIX, TILE_PREFIX = "own", "best", "partition-", "tile-"

CodePath = Literal["device", "sm_70"]
_FORBID: Any = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True)
class Workload:
    """One shape of the operator's inputs.

    Args:
        kind: "decode": a row a request; "prefill": the last rows of one prompt.
        rows: concurrency, or rows of the tail.
        context: tokens of each request.
        selection: "random" tokens, or "clustered" in blocks of four.
        overlap: share of blocks that neighbouring rows of a prefill tail have in common; None for decode.
        topk: entries a row.
        q_heads: query heads.
        kv_heads: KV heads.
        head_dim: elements of a head.
        page_size: tokens a page.
        dtype: of q and of the unquantised cache.
    """

    kind: Literal["decode", "prefill"]
    rows: int
    context: int
    selection: Literal["random", "clustered"]
    overlap: float | None
    topk: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: Literal["float16", "bfloat16"] = "float16"

    @property
    def name(self) -> str:
        tokens = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        detail = self.selection if self.kind == "decode" else f"overlap{round(100 * (self.overlap or 0.0))}"
        suffix = "" if self.dtype == "float16" else f"-{self.dtype}"
        return f"{self.kind}-{self.rows}-{tokens}-{detail}-h{self.q_heads}x{self.kv_heads}-k{self.topk}{suffix}"


@dataclass(frozen=True)
class WorkloadGrid:
    """The product of its lists, rows varying slowest."""

    __pydantic_config__ = _FORBID

    kind: Literal["decode", "prefill"]
    rows: list[int]
    context: list[int]
    selection: list[Literal["random", "clustered"]] = dataclasses.field(default_factory=lambda: ["clustered"])
    overlap: list[float] = dataclasses.field(default_factory=lambda: [0.9])
    heads: list[list[int]] = dataclasses.field(default_factory=lambda: [[6, 1]])
    topk: int = 2051
    head_dim: int = 256
    page_size: int = 784
    dtype: Literal["float16", "bfloat16"] = "float16"

    def __iter__(self) -> Iterator[Workload]:
        details: list[Any] = list(self.selection if self.kind == "decode" else self.overlap)
        for rows, context, detail, heads in itertools.product(self.rows, self.context, details, self.heads):
            yield Workload(
                kind=self.kind,
                rows=rows,
                context=context,
                selection=detail if self.kind == "decode" else "clustered",
                overlap=None if self.kind == "decode" else detail,
                topk=self.topk,
                q_heads=heads[0],
                kv_heads=heads[1],
                head_dim=self.head_dim,
                page_size=self.page_size,
                dtype=self.dtype,
            )


@dataclass(frozen=True)
class ArmGroup:
    """Arms that are all measured under each of the launch profiles."""

    __pydantic_config__ = _FORBID

    arms: list[str]
    launches: list[str]


@dataclass(frozen=True)
class Stage:
    """Cells that are measured with the same arms and the same number of processes and blocks.

    Args:
        name: of the stage.
        group: stages of one group share their fresh processes; groups are measured one after the other.
        processes: fresh processes.
        blocks: even number of blocks a process.
        states: "cold", "hot".
        workloads: grids of workloads.
        arms: for each code path the groups of arms.
    """

    __pydantic_config__ = _FORBID

    name: str
    group: int
    processes: int
    blocks: int
    states: list[Literal["cold", "hot"]]
    workloads: list[WorkloadGrid]
    arms: dict[CodePath, list[ArmGroup]]

    def each_workload(self) -> Iterator[Workload]:
        for grid in self.workloads:
            yield from grid


@dataclass(frozen=True)
class TileGrid:
    """Tiles of the launch search for some arms.

    Args:
        arms: which.
        tiles: [columns, warps, stages] each.
        transposed: whether both products are transposed.
    """

    __pydantic_config__ = _FORBID

    arms: list[str]
    tiles: list[list[int]]
    transposed: bool = False


@dataclass(frozen=True)
class Search:
    """The declared search for each arm's best launch.

    Args:
        workloads: where it is made; other workloads take the result of the nearest number of rows.
        programs_per_sm: wanted programs a multiprocessor; with the rows they fix the split counts that are tried.
        tiles: for each code path the tiles that are tried for each arm.
        public: for each code path the public profiles that take part.
        samples: timed samples a candidate, of which the least is kept.
    """

    __pydantic_config__ = _FORBID

    workloads: list[WorkloadGrid]
    programs_per_sm: list[float]
    tiles: dict[CodePath, list[TileGrid]]
    public: dict[CodePath, list[str]]
    samples: int

    def each_workload(self) -> Iterator[Workload]:
        for grid in self.workloads:
            yield from grid


@dataclass(frozen=True)
class Plan:
    """A recorded latency run.

    Args:
        seed: of inputs, order and resamples.
        device_name: what the device's name must contain.
        sample_us: wanted length of a sample.
        gate_rows: rows of each arm's output that are compared with the FP64 reference.
        gate_multiple: allowed error as a multiple of the error of gather + dequantise + SDPA in FP16.
        resamples: of the bootstrap.
        compilers: processes that compile at the same time.
        search: the launch search.
        stages: in order of importance.
    """

    __pydantic_config__ = _FORBID

    seed: int
    device_name: str
    sample_us: float
    gate_rows: int
    gate_multiple: float
    resamples: int
    compilers: int
    search: Search
    stages: list[Stage]

    def check(self) -> Plan:
        """This plan, if it makes sense beyond the types of its fields.

        Raises:
            ValueError: names the key.
        """
        for stage in self.stages:
            where = f"stages.{stage.name}"
            if stage.blocks < 2 or stage.blocks % 2:
                raise ValueError(f"{where}.blocks: expected an even number, at least 2, got {stage.blocks}")
            if stage.processes < 1:
                raise ValueError(f"{where}.processes: expected at least 1, got {stage.processes}")
            for code_path, groups in stage.arms.items():
                names = [arm for group in groups for arm in group.arms]
                for arm in names:
                    if arm not in ARMS and arm not in BASELINES:
                        raise ValueError(
                            f"{where}.arms.{code_path}: no arm {arm!r}; known: {', '.join((*ARMS, *BASELINES))}"
                        )
                if "fp16" not in names:
                    raise ValueError(f"{where}.arms.{code_path}: needs the arm 'fp16', which sets the noise floor")
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stages: names must differ, got {', '.join(names)}")
        return self


@dataclass(frozen=True)
class Unit:
    """What is measured between two looks at the clock: one workload on one code path in one process."""

    stage: Stage
    workload: Workload
    code_path: CodePath
    process: int

    @property
    def path(self) -> str:
        """File name of the result inside the run folder."""
        return f"cells/{self.stage.name}__{self.workload.name}__{self.code_path}__p{self.process}.json.gz"

    def matches(self, patterns: list[str]) -> bool:
        """Whether "stage/workload/code_path" fits one of the patterns; a bare word names a stage."""
        name = f"{self.stage.name}/{self.workload.name}/{self.code_path}"
        return not patterns or any(fnmatch(name, pattern if "/" in pattern else f"{pattern}/*") for pattern in patterns)

    def candidates(self) -> Iterator[tuple[str, str]]:
        """Arm and launch of everything that is compared here."""
        for group in self.stage.arms[self.code_path]:
            yield from itertools.product(group.arms, group.launches)


def units(plan: Plan, patterns: list[str] | None = None) -> Iterator[Unit]:
    """All units in the order in which they are measured: by group, process, stage, workload, code path."""
    for group in sorted({stage.group for stage in plan.stages}):
        stages = [stage for stage in plan.stages if stage.group == group]
        for process in range(max(stage.processes for stage in stages)):
            for stage in stages:
                if process >= stage.processes:
                    continue
                for workload, code_path in itertools.product(stage.each_workload(), stage.arms):
                    unit = Unit(stage, workload, code_path, process)
                    if unit.matches(patterns or []):
                        yield unit


def to_mapping(plan: Plan) -> dict[str, Any]:
    return dataclasses.asdict(plan)


def from_mapping(values: Mapping[str, Any]) -> Plan:
    """A plan from what `to_mapping` made; profiles are validated by the report before."""
    search = dict(values["search"])
    search["workloads"] = [WorkloadGrid(**grid) for grid in search["workloads"]]
    search["tiles"] = {path: [TileGrid(**grid) for grid in grids] for path, grids in search["tiles"].items()}
    stages = []
    for entry in values["stages"]:
        stage = dict(entry)
        stage["workloads"] = [WorkloadGrid(**grid) for grid in stage["workloads"]]
        stage["arms"] = {path: [ArmGroup(**group) for group in groups] for path, groups in stage["arms"].items()}
        stages.append(Stage(**stage))
    return Plan(**{**values, "search": Search(**search), "stages": stages})
