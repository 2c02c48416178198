"""How samples are taken: rotation, blocks, timers. The timer is passed in, so all of it runs without a GPU."""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from qsa_kernels.measure import environment

L2_FACTOR = 2.0
COLD, HOT = "cold", "hot"

Call = Callable[[], object]


@dataclass(frozen=True)
class ClockState:
    """What the device says about its clocks.

    Args:
        sm_mhz: SM clock, NaN where it does not tell.
        throttled: whether it runs below the clock that it could reach, None where it does not tell.
    """

    sm_mhz: float = math.nan
    throttled: bool | None = None


class Timer(Protocol):
    """Measures a prepared sequence of calls.

    Attributes:
        device: name of what is measured.
        sync_method: how the end of the work is awaited, and what lies inside of the timed part.
        resolution_us: one tick.
    """

    device: str
    sync_method: str
    resolution_us: float

    def prepare(self, calls: Sequence[Call]) -> Any:
        """Something that `sample` can repeat, warmed up."""

    def sample(self, prepared: Any, *, primed: bool) -> float:
        """Microseconds of one pass over all calls; `primed`: with an untimed pass just before."""

    def clock(self) -> ClockState:
        """The clocks now."""


@dataclass(frozen=True)
class Candidate:
    """A named thing to be measured.

    Args:
        arm: name in `arms.ARMS`, a baseline, or "A/A".
        launch: name of the launch profile.
        calls: one call for each of the rotating inputs, in the same order for every candidate.
    """

    arm: str
    launch: str
    calls: Sequence[Call]


@dataclass
class _Prepared:
    candidate: Candidate
    parts: list[Any]
    calls_per_part: int
    next_part: int = 0

    def turn(self) -> Any:
        part = self.parts[self.next_part]
        self.next_part = (self.next_part + 1) % len(self.parts)
        return part


def rotation(touched_bytes: int, l2_bytes: int, factor: float = L2_FACTOR) -> int:
    """How many inputs have to take turns so that more than `factor` times L2 passes between two uses of one of them.

    Args:
        touched_bytes: distinct bytes that one call reads.
        l2_bytes: size of the device's L2 cache.
        factor: multiple of L2.

    Raises:
        ValueError: a size below one.
    """
    if touched_bytes < 1 or l2_bytes < 1:
        raise ValueError(f"touched_bytes, l2_bytes: expected at least 1, got {touched_bytes} and {l2_bytes}")
    return 2 + math.floor(factor * l2_bytes / touched_bytes)


def block_orders(arms: int, blocks: int, rng: np.random.Generator) -> Iterator[tuple[int, np.ndarray]]:
    """Pair number and order of the arms for each block: a random order, then the same order reversed.

    For every two arms, half of the blocks run them as AB and half as BA, and a linear drift cancels within a pair.

    Raises:
        ValueError: a number of blocks that is odd or below two.
    """
    if blocks < 2 or blocks % 2:
        raise ValueError(f"blocks: expected an even number, at least 2, so that AB and BA balance; got {blocks}")
    for pair in range(blocks // 2):
        order = rng.permutation(arms)
        yield pair, order
        yield pair, order[::-1]


def prepare(candidate: Candidate, timer: Timer, *, state: str, target_us: float, most_calls: int = 4096) -> _Prepared:
    """Group the candidate's calls so that one sample lasts about `target_us`.

    Cold: a sample passes over the rotating inputs, as often as needed; calls that are long by themselves are sampled
    one input at a time, in turn. Hot: a sample repeats the first input.
    """
    calls = list(candidate.calls) if state == COLD else [candidate.calls[0]]
    first = timer.prepare(calls)
    timer.sample(first, primed=False)
    per_call = timer.sample(first, primed=False) / len(calls)
    if state == COLD and per_call >= target_us and len(calls) > 1:
        return _Prepared(candidate, [timer.prepare([call]) for call in calls], 1)
    rounds = 1
    if per_call > 0.0:
        rounds = max(1, min(math.ceil(target_us / (per_call * len(calls))), most_calls // len(calls)))
    elif most_calls > len(calls):
        rounds = most_calls // len(calls)
    part = first if rounds == 1 else timer.prepare(calls * rounds)
    return _Prepared(candidate, [part], len(calls) * rounds)


def measure(
    candidates: Sequence[Candidate],
    timer: Timer,
    *,
    state: str,
    blocks: int,
    seed: int,
    process: int,
    target_us: float = 1000.0,
    warmup_blocks: int = 2,
    refused: list[tuple[str, str, Exception]] | None = None,
) -> list[dict[str, Any]]:
    """All samples of one cell in one process, in the columns of `latency_samples` that do not depend on the workload.

    Args:
        candidates: what is compared; every block runs each of them once.
        timer: the clock.
        state: "cold" or "hot".
        blocks: even number of blocks.
        seed: of the run; with `process` it fixes the order of the arms.
        process: number of the fresh process.
        target_us: wanted length of a sample.
        warmup_blocks: untimed blocks beforehand.
        refused: receives arm, launch and error of candidates that cannot be prepared; None = the error is raised.
    """
    if state not in (COLD, HOT):
        raise ValueError(f"state: expected {COLD!r} or {HOT!r}, got {state!r}")
    prepared = []
    for candidate in candidates:
        try:
            prepared.append(prepare(candidate, timer, state=state, target_us=target_us))
        except Exception as error:
            if refused is None:
                raise
            refused.append((candidate.arm, candidate.launch, error))
    primed = state == HOT
    for _ in range(warmup_blocks):
        for entry in prepared:
            timer.sample(entry.turn(), primed=primed)
    rng = np.random.default_rng([seed, process])
    samples = []
    for block, (pair, order) in enumerate(block_orders(len(prepared), blocks, rng)):
        taken = []
        for position, column in enumerate(order):
            entry = prepared[column]
            elapsed = timer.sample(entry.turn(), primed=primed)
            taken.append(
                {
                    "arm": entry.candidate.arm,
                    "launch": entry.candidate.launch,
                    "process": process,
                    "block": block,
                    "pair": pair,
                    "position": position,
                    "calls": entry.calls_per_part,
                    "elapsed_us": elapsed,
                    "time_us": elapsed / entry.calls_per_part,
                }
            )
        # Asking the driver takes longer than a sample: once a block, outside of the timed parts.
        clock = timer.clock()
        throttled = {None: "not available", True: "yes", False: "no"}[clock.throttled]
        samples += [{**row, "sm_clock_mhz": clock.sm_mhz, "throttled": throttled} for row in taken]
    return samples


class CudaGraphTimer:
    """CUDA events around the replay of a CUDA graph that holds the calls.

    Inside of the timed part: the kernels of all calls and the gaps between them on the device. Outside: host code,
    launch from the host, allocation, planning. A spin kernel before the start event keeps the device busy until the
    replay has been submitted.
    """

    sync_method = "CUDA events around graph replay, event synchronisation"
    resolution_us = 0.5

    def __init__(self, spin_cycles: int = 100_000) -> None:
        self.device = torch.cuda.get_device_name()
        self._spin_cycles = spin_cycles
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._side = torch.cuda.Stream()
        self._nvml = _Nvml()

    def prepare(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            calls[0]()
            torch.cuda.synchronize()
            # `torch.cuda.graph` collects garbage before each capture, which costs more than the capture; a collection
            # inside of one could free device memory, which is not allowed there.
            collects = gc.isenabled()
            gc.disable()
            try:
                graph.capture_begin()
                try:
                    for call in calls:
                        call()
                finally:
                    graph.capture_end()
            finally:
                if collects:
                    gc.enable()
        torch.cuda.current_stream().wait_stream(self._side)
        return graph

    def sample(self, prepared: torch.cuda.CUDAGraph, *, primed: bool) -> float:
        if primed:
            prepared.replay()
        else:
            torch.cuda._sleep(self._spin_cycles)
        self._start.record()
        prepared.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3

    def clock(self) -> ClockState:
        return self._nvml.clock()


class _Nvml:
    """SM clock and the reasons why it is not higher, through NVML if it is there."""

    def __init__(self) -> None:
        self._library: Any = None
        try:
            pynvml: Any = importlib.import_module("pynvml")
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
            self._library = pynvml
        except Exception:  # no binding, no library, or a virtual machine that hides the device
            return
        # Thermal and power brakes of hardware and software; an idle or application clock is no throttling.
        names = ("HwSlowdown", "SwThermalSlowdown", "SwPowerCap")
        self._brakes = sum(
            getattr(pynvml, f"nvmlClocksEventReason{name}", getattr(pynvml, f"nvmlClocksThrottleReason{name}", 0))
            for name in names
        )

    def clock(self) -> ClockState:
        if self._library is None:
            return ClockState()
        library = self._library
        try:
            mhz = float(library.nvmlDeviceGetClockInfo(self._handle, library.NVML_CLOCK_SM))
        except Exception:
            return ClockState()
        read = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            library, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        try:
            reasons = read(self._handle) if read else None
        except Exception:
            reasons = None
        return ClockState(mhz, None if reasons is None else bool(reasons & self._brakes))


def require_measurable() -> None:
    """Refuse to time anything that is not a device.

    Raises:
        RuntimeError: the Triton interpreter is asked for, or there is no CUDA device.
    """
    if environment.is_interpreted():
        raise RuntimeError("latency: TRITON_INTERPRET is set; interpreter wall time is no latency, nothing is written")
    if not torch.cuda.is_available():
        raise RuntimeError("latency: this machine shows no CUDA device to torch; nothing is written")
