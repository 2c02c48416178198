"""What the compiler makes of each arm: instructions, registers, spills and shared memory, on a machine without a GPU.

The kernels are compiled in worker processes, because Triton interprets every kernel of a process that has
TRITON_INTERPRET=1. `python -m qsa_kernels.measure.codegen` is such a worker.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd

import qsa_kernels
from qsa_kernels.arms import ARMS
from qsa_kernels.launch import PROFILES, SMALLEST_TRANSPOSED, choose
from qsa_kernels.measure import sass, shared_memory
from qsa_kernels.measure.source_parts import PARTS, Frame, part_of

ARCHITECTURES: dict[str, int] = {"sm_70": 70, "sm_75": 75, "sm_80": 80, "sm_90": 90}
NATIVE_FROM = 89
SCALE_PLACEMENTS = ("hoisted", "in_loop")
DECODERS = ("exp2", "bitcast", "packed", "native")
WARP = 32
ANSWER = "kernel: "
WITH_CODE = "--with-code"
MOST_WORKERS = 4
# A worker imports torch and Triton, which takes as long as a handful of kernels.
KERNELS_A_WORKER = 8
# By contraction, and whether the architecture has tensor cores that Triton's dot uses.
DEFAULT_LAUNCH: dict[tuple[str, bool], dict[str, int]] = {
    ("dot", False): {"block_n": 16, "num_warps": 4},
    ("dot", True): {"block_n": 32, "num_warps": 1},
    ("vector", False): {"block_n": 8, "num_warps": 1},
    ("vector", True): {"block_n": 8, "num_warps": 1},
}
LOCATION = re.compile(r"^\s*\.loc\s+\d+\s+\d+\s+\d+.*?(?://\s*(?P<chain>.*))?$")
FRAME = re.compile(r"(?P<file>[^\s:@\[\]]+):(?P<line>\d+):(?P<column>\d+)")


@dataclass(frozen=True)
class KernelRequest:
    """One attention kernel to compile, described by plain data.

    Args:
        arm (str): name in `qsa_kernels.arms.ARMS`.
        arch (str): name in `ARCHITECTURES`.
        block_n (int): tokens in a tile.
        num_warps (int): warps in a block.
        num_splits (int): split count, a constant of the kernel.
        num_stages (int): pipeline stages; ignored by Triton below sm_80.
        transposed (bool): both products transposed, tokens as rows.
        profile (str): label of the launch; empty = made from columns and warps.
        q_heads (int), kv_heads (int), head_dim (int), topk (int), page_size (int): the geometry.
        dtype (str): "float16" or "bfloat16".
        assembled_for (str): architecture to assemble the PTX for; empty = `arch`. The sm_70 code path on a newer GPU is
            `arch="sm_70", assembled_for="sm_90"`.
        options (tuple): pairs (name, value) that replace fields of the arm, such as ("decoder", "exp2").

    Raises:
        ValueError: an unknown arm or architecture; the message has the known names.
    """

    arm: str
    arch: str = "sm_70"
    block_n: int = 16
    num_warps: int = 4
    num_splits: int = 8
    num_stages: int = 2
    transposed: bool = False
    profile: str = ""
    q_heads: int = 6
    kv_heads: int = 1
    head_dim: int = 256
    topk: int = 2051
    page_size: int = 16
    dtype: str = "float16"
    assembled_for: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise ValueError(f"arm: expected one of {', '.join(ARMS)}; got {self.arm!r}")
        for name, value in (("arch", self.arch), ("assembled_for", self.assembled_for or self.arch)):
            if value not in ARCHITECTURES:
                raise ValueError(f"{name}: expected one of {', '.join(ARCHITECTURES)}; got {value!r}")
        object.__setattr__(self, "assembled_for", self.assembled_for or self.arch)
        if not self.profile:
            label = f"{self.block_n} columns, {self.num_warps} warp{'s' * (self.num_warps > 1)}"
            object.__setattr__(self, "profile", label + ", transposed" * self.transposed)

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored K or V element."""
        return 1 if ARMS[self.arm].is_quantised else 2


@dataclass(frozen=True)
class Site:
    """Where an instruction comes from.

    Args:
        chain (tuple[Frame, ...]): the inlined calls, innermost first.
        access (str): the PTX line, for a shared-memory access.
    """

    chain: tuple[Frame, ...]
    access: str = ""


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel and what can be read from it.

    Args:
        request (KernelRequest): what was asked for.
        ptx (str): the PTX text.
        disassembly (str): nvdisasm's text, with line numbers that index `sites`.
        sites (tuple[Site, ...]): where instructions come from.
        registers (int): 32-bit registers a thread.
        spill_store_bytes (int), spill_load_bytes (int): bytes a thread that the assembler spills and reloads.
        shared_bytes (int): shared memory a block.
        status (str), reason (str): "passed", or why there is nothing to read.
    """

    request: KernelRequest
    ptx: str = field(default="", compare=False)  # holds paths; `ptx_sha256` is of the text without them
    disassembly: str = ""
    sites: tuple[Site, ...] = ()
    registers: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    shared_bytes: int = 0
    status: str = "passed"
    reason: str = ""

    @cached_property
    def program(self) -> sass.Program:
        """The machine code."""
        return sass.parse(self.disassembly)

    @cached_property
    def loop(self) -> sass.Loop:
        """The loop over the tiles of selected tokens."""
        return sass.hot_loop(self.program)

    @cached_property
    def tiles(self) -> int:
        """Tiles that one pass of the loop handles, from the bytes that it loads; above one where it was unrolled."""
        wide = sum(
            sass.access_bits(one) // 8 for one in self.loop.instructions
            if sass.classify(one).startswith(("global_load", "global_to_shared")) and sass.access_bits(one) >= 64
        )  # fmt: skip
        tile_bytes = 2 * self.request.block_n * self.request.head_dim * self.request.item_bytes
        return max(1, round(wide * WARP * self.request.num_warps / tile_bytes))

    @property
    def elements(self) -> int:
        """K and V elements that one pass of the loop handles in a block."""
        return 2 * self.request.block_n * self.request.head_dim * self.tiles

    def per_element(self, instructions: int) -> float:
        """Thread instructions for each K or V element, from warp instructions in one pass of the loop."""
        return instructions * self.request.num_warps * WARP / self.elements

    @property
    def code_sha256(self) -> str:
        """Hash of the machine code and of what a launch needs besides it; free of paths and line tables."""
        text = "".join(one.encoding for one in self.program.instructions)
        return hashlib.sha256(
            f"{text} {self.registers} {self.shared_bytes} {self.request.num_warps}".encode()
        ).hexdigest()

    @property
    def ptx_sha256(self) -> str:
        """Hash of the PTX without comments, line table and debug sections."""
        return hashlib.sha256(normalise(self.ptx).encode()).hexdigest()

    @cached_property
    def thread_values(self) -> shared_memory.ThreadValues:
        """Integer registers of the PTX, a thread each."""
        return shared_memory.ThreadValues(self.ptx, WARP * self.request.num_warps)

    def wavefronts(self, instruction: sass.Instruction) -> float | None:
        """Shared-memory wavefronts of a warp for one access, None where its addresses are not known."""
        site = self.site(instruction)
        if site is None or not site.access:
            return None
        addresses = self.thread_values.addresses(site.access)
        return None if addresses is None else shared_memory.wavefronts(addresses, sass.access_bits(instruction))

    def part(self, instruction: sass.Instruction) -> str:
        """Part of the algorithm that an instruction belongs to, one of `source_parts.PARTS`."""
        site = self.site(instruction)
        return part_of(
            site.chain if site else (),
            fused=instruction.opcode.startswith("FFMA"),
            read=sass.classify(instruction).startswith("shared_load"),
        )

    def site(self, instruction: sass.Instruction) -> Site | None:
        """Where an instruction comes from, None where the line table does not say."""
        return (
            self.sites[instruction.site]
            if instruction.site is not None and 0 < instruction.site < len(self.sites)
            else None
        )


def annotate(ptx: str) -> tuple[str, tuple[Site, ...]]:
    """PTX whose line table numbers call chains and shared-memory accesses instead of source lines.

    Triton writes the chain of inlined calls into a comment beside each line entry; the assembler keeps only the number.

    Args:
        ptx (str): PTX of one kernel as Triton makes it.

    Returns:
        tuple: the PTX, and the sites by line number (number 0 is unused).
    """
    numbers: dict[Site, int] = {}
    current = Site(())
    lines = []

    def entry(site: Site) -> str:
        return f"\t.loc\t1 {numbers.setdefault(site, len(numbers) + 1)} 0"

    for line in _without_debug_sections(ptx):
        if found := LOCATION.match(line):
            frames = FRAME.finditer(found["chain"] or "")
            current = Site(tuple(Frame(one["file"], int(one["line"]), int(one["column"])) for one in frames))
            lines.append(entry(current))
        elif shared_memory.ACCESS.match(line):
            lines += [entry(Site(current.chain, line.strip())), line, entry(current)]
        else:
            lines.append(line)
    lines.append('\t.file\t1 "sites"')
    return "\n".join(lines) + "\n", (Site(()), *numbers)


def normalise(ptx: str) -> str:
    """PTX without comments, line table, file names, debug labels and debug sections."""
    lines = (re.sub(r"//.*", "", line).rstrip() for line in _without_debug_sections(ptx))
    return "\n".join(
        line for line in lines if line and not re.match(r"\s*\.loc\s|\s*\$L__(tmp|func_begin|func_end)\d+:", line)
    )


def _without_debug_sections(ptx: str) -> Iterable[str]:
    depth = 0
    for line in ptx.splitlines():
        if depth or re.match(r"\s*\.section\s+\.debug", line):
            depth = max(1, depth)
            if "}" in line:
                depth = 0
        elif not re.match(r"\s*\.file\s", line):
            yield line


@cache
def tool(name: str) -> str:
    """Path of a CUDA tool that the Triton wheel carries: the versions that still know sm_70.

    Raises:
        FileNotFoundError: the wheel has no such tool.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("triton is not installed")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise FileNotFoundError(f"{name}: expected in the triton wheel at {path}")
    return str(path)


def compile_kernels(requests: Iterable[KernelRequest], *, cached: bool = True) -> list[CompiledKernel]:
    """Compile kernels and disassemble them.

    Args:
        requests (Iterable[KernelRequest]): what to compile.
        cached (bool): use results stored for the same sources, versions and request. Default: True. Without, everything
            is compiled anew, and the machine code is checked against what Triton itself assembles.

    Returns:
        list[CompiledKernel]: one a request, in order; kernels that the architecture cannot have are "skipped", those
        that do not compile "failed", each with the reason.

    Raises:
        RuntimeError: the worker process fails as a whole.
    """
    return list(compiled(requests, cached=cached))


def compiled(requests: Iterable[KernelRequest], *, cached: bool = True) -> Iterator[CompiledKernel]:
    """`compile_kernels`, one kernel at a time as they are ready."""
    wanted = list(requests)
    folder = _cache_folder()
    paths = {request: folder / f"{_cache_key(request)}.json" for request in wanted}
    absent = [one for one in paths if not (_needs_newer(one) or (cached and paths[one].is_file()))]
    answers = _answers(absent, folder, cached)
    fresh: dict[KernelRequest, dict[str, Any]] = {}
    for request in wanted:
        if request in absent and request not in fresh:
            answer = next(answers)
            if "error" not in answer:
                _store(paths[request], answer)
            fresh[request] = answer
        if _needs_newer(request):
            yield _read(request, None)
        else:
            yield _read(request, fresh.get(request) or json.loads(paths[request].read_text()))


def requests(
    arch: str, arms: Sequence[str] = (), *, profile: str | None = None, rows: int = 128, **fields: Any
) -> list[KernelRequest]:
    """Requests for several arms with one launch each.

    Args:
        arch (str): name in `ARCHITECTURES`.
        arms (Sequence[str]): names in `qsa_kernels.arms.ARMS`; empty = all that the launch is made for.
        profile (str | None): name in `qsa_kernels.launch.PROFILES`; None = `DEFAULT_LAUNCH`.
        rows (int): query rows, by which a profile chooses.
        fields (Any): other fields of `KernelRequest`; a launch given here goes before the profile's.

    Raises:
        ValueError: an unknown arm, architecture or profile, a profile that is made for another contraction, or
            transposed products for an arm that has none.
    """
    chosen = []
    for arm in arms or ARMS:
        request = KernelRequest(arm, arch, **fields)
        contraction = ARMS[arm].contraction
        if request.transposed and contraction != "dot":
            if not arms:
                continue
            raise ValueError(f"transposed: expected an arm of the dot contraction, got {arm!r}")
        found: dict[str, Any] = dict(DEFAULT_LAUNCH[contraction, ARCHITECTURES[arch] >= 80])
        if profile is not None:
            if not arms and profile in PROFILES and PROFILES[profile].contraction != contraction:
                continue
            config = choose(
                profile,
                capability=divmod(ARCHITECTURES[arch], 10),
                rows=rows,
                q_heads=request.q_heads,
                kv_heads=request.kv_heads,
                head_dim=request.head_dim,
                topk=request.topk,
                itemsize=2,
                quantised=ARMS[arm].is_quantised,
                contraction=contraction,
            )
            found = {**dataclasses.asdict(config), "profile": profile}
        if not found.keys().isdisjoint(fields):
            found["profile"] = ""
        chosen.append(dataclasses.replace(request, **{"profile": "", **found, **fields}))
    return chosen


def survey(**geometry: Any) -> list[KernelRequest]:
    """The kernels of the chapter: a V100's under four launches, an H200's under the public one and transposed.

    Args:
        geometry (Any): fields of `KernelRequest` that all of them share.

    Raises:
        ValueError: a head too short for transposed products.
    """
    head_dim = KernelRequest("fp16", **geometry).head_dim
    if head_dim < SMALLEST_TRANSPOSED:
        raise ValueError(f"head_dim: expected at least {SMALLEST_TRANSPOSED} for transposed products, got {head_dim}")
    dot = [name for name, arm in ARMS.items() if arm.contraction == "dot"]
    vector = [name for name, arm in ARMS.items() if arm.contraction == "vector"]
    bare = [name for name in dot if ARMS[name].decoder != "native"]
    on_h200 = ("fp16", "hoisted/packed", "hoisted/native")
    return [
        *requests("sm_70", dot, block_n=16, num_warps=4, **geometry),
        *requests("sm_70", bare, block_n=16, num_warps=2, **geometry),
        *requests("sm_70", vector, block_n=8, num_warps=1, **geometry),
        *requests("sm_70", ("fp16",), block_n=64, num_warps=2, **geometry),
        *requests("sm_90", (*on_h200, "hoisted/bitcast"), block_n=32, num_warps=1, **geometry),
        *requests("sm_90", on_h200, block_n=32, num_warps=1, transposed=True, **geometry),
        *requests("sm_90", on_h200, block_n=64, num_warps=2, transposed=True, **geometry),
    ]


def summary(kernels: Sequence[CompiledKernel]) -> list[dict[str, Any]]:
    """One plain row a kernel: sizes, registers, spilled bytes a thread, shared bytes a block, loop counts by class."""
    rows = []
    for kernel in kernels:
        good = kernel.status == "passed"
        rows.append(
            {
                "arch": kernel.request.arch,
                "arm": kernel.request.arm,
                "profile": kernel.request.profile,
                "loop_instructions": len(kernel.loop.instructions) if good else None,
                "total_instructions": len(kernel.program.instructions) if good else None,
                "registers": kernel.registers if good else None,
                "spills": kernel.spill_store_bytes + kernel.spill_load_bytes if good else None,
                "shared_bytes": kernel.shared_bytes if good else None,
                "by_class": sass.count(kernel.loop.instructions) if good else None,
                "status": kernel.status,
                "reason": kernel.reason,
                "transposed": kernel.request.transposed,
            }
        )
    return rows


def kernel_table(kernels: Sequence[CompiledKernel]) -> pd.DataFrame:
    """One row a kernel: sizes of the loop and of the whole kernel, registers, spills, shared memory, hashes.

    Columns with `_per_element` count thread instructions for each K or V element of a tile.
    """
    rows = []
    for kernel in kernels:
        good = kernel.status == "passed"
        rows.append(
            {
                **_labels(kernel),
                "loop_instructions": len(kernel.loop.instructions) if good else float("nan"),
                "total_instructions": len(kernel.program.instructions) if good else float("nan"),
                "tiles_per_iteration": float(kernel.tiles) if good else float("nan"),
                "loop_instructions_per_element": kernel.per_element(len(kernel.loop.instructions))
                if good
                else float("nan"),
                "registers": kernel.registers if good else float("nan"),
                "spill_store_bytes": kernel.spill_store_bytes if good else float("nan"),
                "spill_load_bytes": kernel.spill_load_bytes if good else float("nan"),
                "shared_bytes": kernel.shared_bytes if good else float("nan"),
                "ptx_sha256": kernel.ptx_sha256 if good else "",
                "code_sha256": kernel.code_sha256 if good else "",
                "status": kernel.status,
                "reason": kernel.reason,
            }
        )
    table = pd.DataFrame(rows)
    texts = {*LABELS, "ptx_sha256", "code_sha256", "status", "reason"}
    return table.astype({name: float for name in table if name not in texts})


def class_table(kernels: Sequence[CompiledKernel]) -> pd.DataFrame:
    """One row a kernel, scope ("loop" or "kernel") and instruction class.

    `instructions` counts warp instructions, `per_element` thread instructions for each K or V element of a tile.
    """
    rows = []
    for kernel in _passed(kernels):
        for scope, instructions in (("loop", kernel.loop.instructions), ("kernel", kernel.program.instructions)):
            for name, number in sass.count(instructions).items():
                per_element = kernel.per_element(number) if scope == "loop" else float("nan")
                rows.append(
                    {
                        **_labels(kernel),
                        "scope": scope,
                        "class": name,
                        "instructions": number,
                        "per_element": per_element,
                    }
                )
    return _with_status(pd.DataFrame(rows, columns=[*LABELS, "scope", "class", "instructions", "per_element"]))


def part_table(kernels: Sequence[CompiledKernel]) -> pd.DataFrame:
    """One row a kernel and part of the algorithm: the loop's warp instructions that its source lines account for."""
    rows = []
    for kernel in _passed(kernels):
        parts = Counter(kernel.part(one) for one in kernel.loop.instructions)
        for name in PARTS:
            rows.append(
                {
                    **_labels(kernel),
                    "part": name,
                    "instructions": parts[name],
                    "per_element": kernel.per_element(parts[name]),
                }
            )
    return _with_status(pd.DataFrame(rows, columns=[*LABELS, "part", "instructions", "per_element"]))


def shared_access_table(kernels: Sequence[CompiledKernel]) -> pd.DataFrame:
    """One row a kernel and kind of shared-memory access in the loop: number a warp, wavefronts, and the least possible.

    `wavefronts` counts what the addresses of all threads ask for, `accesses_unknown` the accesses whose addresses do
    not follow from the thread index and that are counted without conflicts.
    """
    rows = []
    for kernel in _passed(kernels):
        kinds: dict[str, list[tuple[float, bool]]] = {}
        for one in kernel.loop.instructions:
            kind = sass.classify(one)
            if kind.startswith("shared"):
                known = kernel.wavefronts(one)
                least = shared_memory.least_wavefronts(sass.access_bits(one))
                kinds.setdefault(kind, []).append((least if known is None else known, known is None))
        for kind, found in sorted(kinds.items()):
            rows.append(
                {
                    **_labels(kernel),
                    "class": kind,
                    "accesses": len(found),
                    "accesses_unknown": sum(unknown for _, unknown in found),
                    "wavefronts": float(sum(number for number, _ in found)),
                    "wavefronts_without_conflicts": float(
                        shared_memory.least_wavefronts(int(kind.rsplit("_", 1)[1])) * len(found)
                    ),
                }
            )
    columns = [*LABELS, "class", "accesses", "accesses_unknown", "wavefronts", "wavefronts_without_conflicts"]
    return _with_status(pd.DataFrame(rows, columns=columns))


def fp16_code_hashes(
    arch: str = "sm_70", contraction: str = "dot", *, transposed: bool = False
) -> dict[tuple[str, str], str]:
    """Hash of the unquantised arm's machine code for every choice of scale placement and decoder.

    Args:
        arch (str): name in `ARCHITECTURES`.
        contraction (str): "dot" or "vector".
        transposed (bool): both products of "dot" transposed.

    Raises:
        RuntimeError: one of them does not compile.
    """
    wanted = fp16_requests(arch, contraction, transposed=transposed)
    kernels = compile_kernels(wanted.values())
    for kernel in kernels:
        if kernel.status != "passed":
            raise RuntimeError(f"{kernel.request.arm} on {arch} with {dict(kernel.request.options)}: {kernel.reason}")
    return {choice: kernel.code_sha256 for choice, kernel in zip(wanted, kernels, strict=True)}


def fp16_requests(arch: str, contraction: str, *, transposed: bool = False) -> dict[tuple[str, str], KernelRequest]:
    """The unquantised arm for every choice of scale placement and decoder, by that choice."""
    arm = "fp16" if contraction == "dot" else f"fp16+{contraction}"
    fields: dict[str, Any] = {"transposed": True} if transposed else {}
    (launch,) = requests(arch, [arm], **fields)
    return {
        (placement, decoder): dataclasses.replace(
            launch, options=(("scale_placement", placement), ("decoder", decoder))
        )
        for placement in SCALE_PLACEMENTS
        for decoder in DECODERS
    }


# Architecture, contraction, transposed: what is shown to compile to one machine code whatever the E4M3 options are.
IDENTITIES = (("sm_70", "dot", False), ("sm_70", "vector", False), ("sm_90", "dot", True))


def identity_requests() -> list[KernelRequest]:
    """The kernels that `identity_table` compares."""
    return [
        request
        for arch, contraction, transposed in IDENTITIES
        for request in fp16_requests(arch, contraction, transposed=transposed).values()
    ]


def identity_table() -> pd.DataFrame:
    """One row an architecture, contraction, scale placement and decoder: hash of the unquantised arm's machine code."""
    rows = [
        {
            "arch": arch,
            "contraction": contraction + ", transposed" * transposed,
            "scale_placement": placement,
            "decoder": decoder,
            "code_sha256": code,
        }
        for arch, contraction, transposed in IDENTITIES
        for (placement, decoder), code in fp16_code_hashes(arch, contraction, transposed=transposed).items()
    ]
    return _with_status(pd.DataFrame(rows))


LABELS = ("arch", "assembled_for", "arm", "profile", "block_n", "num_warps", "num_stages")


def _labels(kernel: CompiledKernel) -> dict[str, Any]:
    return {name: getattr(kernel.request, name) for name in LABELS}


def _passed(kernels: Iterable[CompiledKernel]) -> list[CompiledKernel]:
    return [kernel for kernel in kernels if kernel.status == "passed"]


def _with_status(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(status="passed", reason="")


def _needs_newer(request: KernelRequest) -> bool:
    return ARMS[request.arm].decoder == "native" and ARCHITECTURES[request.arch] < NATIVE_FROM


def _read(request: KernelRequest, answer: dict[str, Any] | None) -> CompiledKernel:
    if answer is None:
        reason = f"hardware conversion needs compute capability 8.9 or newer, {request.arch} has none"
        return CompiledKernel(request, status="skipped", reason=reason)
    if "error" in answer:
        return CompiledKernel(request, status="failed", reason=answer["error"])
    _, sites = annotate(answer["ptx"])
    usage = _usage(answer["log"])
    return CompiledKernel(request, answer["ptx"], answer["disassembly"], sites, *usage, answer["shared"])


def _usage(log: str) -> tuple[int, int, int]:
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas -v: expected register and spill lines, got {log!r}")
    return int(registers[1]), int(spills[1]), int(spills[2])


def _assemble(answer: dict[str, Any], request: KernelRequest) -> dict[str, Any]:
    """Assemble the numbered PTX and disassemble it; where Triton's machine code is there, it must be the same."""
    ptx, _ = annotate(answer["ptx"])
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        log = _call(
            tool("ptxas"), "-lineinfo", "-v", f"--gpu-name={_gpu_name(request)}", str(source), "-o", str(binary)
        ).stderr
        disassembly = _call(tool("nvdisasm"), "-c", "-g", "-hex", str(binary)).stdout
    if "cubin" in answer and request.assembled_for == request.arch:
        _compare(disassembly, base64.b64decode(answer["cubin"]), request)
    return {"ptx": answer["ptx"], "disassembly": disassembly, "log": log, "shared": answer["shared"]}


def _compare(disassembly: str, cubin: bytes, request: KernelRequest) -> None:
    words = re.findall("." * 16, "".join(one.encoding for one in sass.parse(disassembly).instructions))
    code = b"".join(int(word, 16).to_bytes(8, "little") for word in words)
    if code not in cubin:
        raise RuntimeError(f"{request.arm} on {request.arch}: the numbered line table changed the machine code")


def _gpu_name(request: KernelRequest) -> str:
    # Triton's own code for sm_90 uses the instructions that only that architecture has.
    return "sm_90a" if request.arch == "sm_90" else request.assembled_for


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed with code {done.returncode}: {done.stderr.strip()}")
    return done


def _cache_folder() -> Path:
    """A folder that can be written: beside Triton's own cache, or a private one that lives as long as this process."""
    home = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    try:
        folder = home / "qsa_codegen"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(_private_folder().name)


@cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="qsa_codegen_")


@cache
def _sources_sha256() -> str:
    digest = hashlib.sha256()
    package = Path(qsa_kernels.__file__).parent
    for path in sorted([*package.glob("*.py"), *package.glob("kernels/*.py"), Path(__file__)]):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _cache_key(request: KernelRequest) -> str:
    versions = [importlib.metadata.version(name) for name in ("triton", "torch")]
    text = json.dumps([_sources_sha256(), versions, dataclasses.asdict(request)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _store(path: Path, answer: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump(answer, file)
    os.replace(file.name, path)


def _answers(requests: Sequence[KernelRequest], folder: Path, cached: bool) -> Iterator[dict[str, Any]]:
    """Compile and assemble several kernels at a time; the answers come in the order of the requests."""
    if not requests:
        return
    count = min(MOST_WORKERS, len(os.sched_getaffinity(0)), 1 + (len(requests) - 1) // KERNELS_A_WORKER)
    idle: queue.SimpleQueue[Callable[[KernelRequest], dict[str, Any]]] = queue.SimpleQueue()
    assembled: dict[tuple[str, str], dict[str, Any]] = {}

    def answer(request: KernelRequest) -> dict[str, Any]:
        ask = idle.get()
        try:
            found = ask(request)
        finally:
            idle.put(ask)
        if "error" in found:
            return found
        same = (found["ptx"], request.assembled_for)
        if same not in assembled:
            assembled[same] = _assemble(found, request)
        return assembled[same]

    with ExitStack() as stack:
        for _ in range(count):
            idle.put(stack.enter_context(_worker_process(folder, cached)))
        yield from stack.enter_context(ThreadPoolExecutor(count)).map(answer, requests)


@contextmanager
def _worker_process(folder: Path, cached: bool) -> Iterator[Callable[[KernelRequest], dict[str, Any]]]:
    hidden = ("TRITON_INTERPRET", "TRITON_DISABLE_LINE_INFO", "DISABLE_PTXAS_OPT", "TRITON_OVERRIDE_ARCH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["TRITON_CACHE_DIR"] = str(folder / ("ptx" if cached else "code"))
    if not cached:
        environment["TRITON_ALWAYS_COMPILE"] = "1"
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "qsa_kernels.measure.codegen", *([] if cached else [WITH_CODE])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def ask(request: KernelRequest) -> dict[str, Any]:
            try:
                stdin.write(json.dumps(dataclasses.asdict(request)) + "\n")
                stdin.flush()
                for line in stdout:
                    if line.startswith(ANSWER):
                        return dict(json.loads(line.removeprefix(ANSWER)))
            except BrokenPipeError:
                with suppress(BrokenPipeError):
                    stdin.close()
            code = process.wait()
            errors.seek(0)
            raise RuntimeError(
                f"the compiling process ended with code {code} at {request.arm} for {request.arch}: "
                f"{errors.read().strip()[-2000:]}"
            )

        yield ask


def _compile(request: KernelRequest, with_code: bool) -> dict[str, Any]:
    import torch
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qsa_kernels.attention import kernel_spec
    from qsa_kernels.launch import LaunchConfig

    # The assembler runs on the numbered PTX anyway; Triton's own run is only for the comparison.
    knobs.runtime.add_stages_inspection_hook = None if with_code else _without_code
    spec = kernel_spec(
        dataclasses.replace(ARMS[request.arm], **dict(request.options)),
        LaunchConfig(
            block_n=request.block_n,
            num_splits=request.num_splits,
            num_warps=request.num_warps,
            num_stages=request.num_stages,
            transposed=request.transposed,
        ),
        q_heads=request.q_heads,
        kv_heads=request.kv_heads,
        head_dim=request.head_dim,
        topk=request.topk,
        page_size=request.page_size,
        dtype=getattr(torch, request.dtype),
        capability=divmod(ARCHITECTURES[request.arch], 10),
    )
    compiled = triton.compile(
        ASTSource(spec.function, spec.signature, spec.constants, spec.attributes),
        target=GPUTarget("cuda", ARCHITECTURES[request.arch], WARP),
        options={"num_warps": spec.num_warps, "num_stages": spec.num_stages},
    )
    answer = {"ptx": compiled.asm["ptx"], "shared": compiled.metadata.shared}
    return answer | ({"cubin": base64.b64encode(compiled.asm["cubin"]).decode()} if with_code else {})


def _without_code(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    stages["cubin"] = lambda source, metadata: b""


def _worker(with_code: bool) -> None:
    for line in sys.stdin:
        fields = json.loads(line)
        fields["options"] = tuple(tuple(pair) for pair in fields["options"])
        try:
            answer = _compile(KernelRequest(**fields), with_code)
        except Exception as error:
            # One kernel that does not compile must not take the others with it.
            words = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {words[-1]}"}
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _worker(WITH_CODE in sys.argv)
