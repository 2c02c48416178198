"""From samples to estimates, intervals and verdicts; no clock, no device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import stats

VERDICTS = ("faster", "slower", "same", "undecided", "not measurable")
COPY_ARM = "A/A"
FULL_PROCESSES, FULL_BLOCKS = 5, 20
THROTTLED_SHARE_ALLOWED = 0.05
# A sample shorter than this many ticks of the timer says more about the timer than about the kernel.
LEAST_TICKS = 20

_EFFECTS = {
    # log-time weights of in_loop/exp2, hoisted/exp2, in_loop/bitcast, hoisted/bitcast
    "decoder": (-0.5, -0.5, 0.5, 0.5),
    "placement": (-0.5, 0.5, -0.5, 0.5),
    "interaction": (1.0, -1.0, -1.0, 1.0),
}
TWO_BY_TWO = ("in_loop/exp2", "hoisted/exp2", "in_loop/bitcast", "hoisted/bitcast")


@dataclass(frozen=True)
class Instance:
    """One arm under one launch profile: what a column of the sample array holds."""

    arm: str
    launch: str


@dataclass(frozen=True)
class CellSamples:
    """The complete blocks of one cell.

    Args:
        key: values of the columns that name the cell.
        instances: the last axis of the arrays.
        log_time: [processes, blocks, instances], natural logarithm of microseconds a call; NaN where an arm is missing.
        position: [processes, blocks, instances], place of the arm in its block.
        mirror: [processes, blocks], index of the block that ran the same arms in reverse.
        throttled: [instances], share of samples at reduced clocks; NaN where the device does not tell.
        elapsed_us: [instances], median length of a whole sample.
    """

    key: tuple[str, ...]
    instances: tuple[Instance, ...]
    log_time: np.ndarray
    position: np.ndarray
    mirror: np.ndarray
    throttled: np.ndarray
    elapsed_us: np.ndarray

    @property
    def processes(self) -> int:
        return self.log_time.shape[0]

    @property
    def blocks(self) -> int:
        return self.log_time.shape[1]

    def column(self, arm: str, launch: str) -> int | None:
        wanted = Instance(arm, launch)
        return self.instances.index(wanted) if wanted in self.instances else None


@dataclass(frozen=True)
class Estimate:
    """A log ratio with its 95 % interval.

    Args:
        value: mean over processes of the per-process median.
        low: lower end.
        high: upper end.
        order: difference between blocks that ran the pair as AB and as BA.
        order_is_clear: whether the interval of that difference leaves zero out.
        processes: processes that hold every arm of the contrast.
    """

    value: float
    low: float
    high: float
    order: float
    order_is_clear: bool
    processes: int

    @property
    def bound(self) -> float:
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class Judgement:
    verdict: str
    reasons: tuple[str, ...] = field(default=())

    @property
    def reason(self) -> str:
        return "; ".join(self.reasons)


def percent(log_ratio: float) -> float:
    """A log ratio as per cent of change."""
    return 100.0 * math.expm1(log_ratio)


def cells(samples: pd.DataFrame, keys: Sequence[str]) -> list[CellSamples]:
    """Samples as arrays, one entry a cell; every process of a cell is cut to the same number of blocks.

    Args:
        samples: the columns of `latency_samples`; only rows with status "passed" are used.
        keys: columns that name a cell.
    """
    found = []
    passed = samples[samples["status"] == "passed"]
    for key, group in passed.groupby(list(keys), sort=True):
        pairs = sorted(set(zip(group["arm"], group["launch"], strict=True)))
        instances = tuple(Instance(arm, launch) for arm, launch in pairs)
        names = pd.MultiIndex.from_tuples(pairs)
        processes = sorted(group["process"].unique())
        blocks = int(group.groupby("process")["block"].nunique().min())
        times, places, mirrors = [], [], []
        for process in processes:
            part = group[group["process"] == process]
            kept = sorted(part["block"].unique())[:blocks]
            part = part[part["block"].isin(kept)]
            wide = part.set_index(["block", "arm", "launch"])[["time_us", "position"]]
            full = wide.reindex(pd.MultiIndex.from_tuples([(block, *pair) for block in kept for pair in pairs]))
            times.append(full["time_us"].to_numpy(float).reshape(len(kept), len(pairs)))
            places.append(full["position"].to_numpy(float).reshape(len(kept), len(pairs)))
            mirrors.append(_mirrors(part.groupby("block")["pair"].first().loc[kept].to_numpy()))
        per_instance = group.groupby(["arm", "launch"])
        known = group[group["throttled"] != "not available"]
        shares = (known["throttled"] == "yes").groupby([known["arm"], known["launch"]]).mean()
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(np.stack(times))
        found.append(
            CellSamples(
                key=tuple(str(part) for part in key),
                instances=instances,
                log_time=np.where(np.isfinite(logs), logs, np.nan),
                position=np.stack(places),
                mirror=np.stack(mirrors),
                throttled=shares.reindex(names).to_numpy(float),
                elapsed_us=per_instance["elapsed_us"].median().reindex(names).to_numpy(float),
            )
        )
    return found


def _mirrors(pairs: np.ndarray) -> np.ndarray:
    """For each block the place of the other block of its pair, or its own place where that is missing."""
    places: dict[int, list[int]] = {}
    for place, pair in enumerate(pairs):
        places.setdefault(int(pair), []).append(place)
    return np.array([next((other for other in places[int(p)] if other != i), i) for i, p in enumerate(pairs)])


def _level(groups: int, level: float) -> float:
    """Tail probability of a percentile interval, widened for few groups (Hesterberg's expanded percentiles).

    Source: T. Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69 (2015).
    """
    tail = (1.0 - level) / 2.0
    if groups < 2:
        return tail
    return float(stats.norm.cdf(-math.sqrt(groups / (groups - 1)) * stats.t.ppf(1.0 - tail, groups - 1)))


def bootstrap(values: np.ndarray, rng: np.random.Generator, resamples: int, level: float = 0.95) -> tuple[float, float]:
    """Interval of the mean over processes of the per-process median, resampling processes and blocks within them.

    Args:
        values: [processes, blocks].
        rng: source of the resamples.
        resamples: how many.
        level: of confidence.
    """
    processes, blocks = values.shape
    chosen = rng.integers(processes, size=(resamples, processes, 1))
    within = rng.integers(blocks, size=(resamples, processes, blocks))
    centres = np.median(values[chosen, within], axis=2).mean(axis=1)
    tail = _level(processes if processes > 1 else blocks, level)
    low, high = np.quantile(centres, [tail, 1.0 - tail])
    return float(low), float(high)


def contrast(
    cell: CellSamples, weights: Mapping[int, float], *, seed: int, resamples: int = 4000, level: float = 0.95
) -> Estimate | None:
    """The weighted sum of log times inside each block, over blocks and processes; None without data.

    Args:
        cell: the samples.
        weights: column -> weight; the first positive and the first negative column decide about the order.
        seed: of the resamples.
        resamples: of the bootstrap.
        level: of confidence.
    """
    columns = list(weights)
    present = np.isfinite(cell.log_time[:, :, columns]).all(axis=(1, 2))
    if not present.any():
        return None
    values = sum(weight * cell.log_time[present][:, :, column] for column, weight in weights.items())
    assert isinstance(values, np.ndarray)
    rng = np.random.default_rng([seed, zlib.crc32(repr((cell.key, sorted(weights.items()))).encode())])
    low, high = bootstrap(values, rng, resamples, level)

    up = next(column for column in columns if weights[column] > 0)
    down = next(column for column in columns if weights[column] < 0)
    place = cell.position[present]
    later = np.sign(place[:, :, up] - place[:, :, down])
    mirrored = np.take_along_axis(values, cell.mirror[present], axis=1)
    differences = later * (values - mirrored)
    # Both blocks of a pair hold the same difference: keep one.
    first = cell.mirror[present] > np.arange(cell.blocks)
    order, is_clear = 0.0, False
    if first.any(axis=1).all():
        kept = int(first.sum(axis=1).min())
        pairs = np.stack([row[mask][:kept] for row, mask in zip(differences, first, strict=True)])
        order = float(np.median(pairs, axis=1).mean())
        order_low, order_high = bootstrap(pairs, rng, resamples, level)
        is_clear = order_low > 0.0 or order_high < 0.0
    return Estimate(
        value=float(np.median(values, axis=1).mean()),
        low=low,
        high=high,
        order=order,
        order_is_clear=is_clear,
        processes=int(present.sum()),
    )


def drift(cell: CellSamples, column: int, *, alpha: float = 1e-3) -> float:
    """Change of an arm's own time from the first to the second half of its blocks, as a log ratio; 0 if not clear.

    Interleaving keeps a drift out of the ratios; it is reported because it says that the device was not steady.
    """
    log_time = cell.log_time[:, :, column]
    log_time = log_time[np.isfinite(log_time).all(axis=1)]
    half = cell.blocks // 2
    if not log_time.size or half < 4:
        return 0.0
    early, late = log_time[:, :half], log_time[:, half:]
    centre = np.median(early, axis=1, keepdims=True)
    change = float((np.median(late, axis=1) - centre[:, 0]).mean())
    test = stats.mannwhitneyu((early - centre).ravel(), (late - centre).ravel())
    return change if test.pvalue < alpha else 0.0


def judge(
    estimate: Estimate | None,
    floor: float | None,
    *,
    throttled_share: float = math.nan,
    elapsed_us: float = math.inf,
    resolution_us: float = 0.0,
    implied_gb_per_s: float = math.nan,
    copy_gb_per_s: float = math.nan,
) -> Judgement:
    """The verdict about one ratio.

    Args:
        estimate: log ratio with interval; None = nothing was measured.
        floor: noise floor as a log ratio, from the A/A arm of the cell; None = the cell has no A/A arm.
        throttled_share: samples at reduced clocks, NaN where the device does not tell.
        elapsed_us: length of the shorter of the two arms' samples.
        resolution_us: one tick of the timer.
        implied_gb_per_s: distinct bytes over time, NaN where the cache may have served them.
        copy_gb_per_s: measured copy bandwidth.
    """
    if estimate is None:
        return Judgement("not measurable", ("no data",))
    if floor is None:
        return Judgement("not measurable", ("no A/A arm in this cell",))
    against: list[str] = []
    if elapsed_us < LEAST_TICKS * resolution_us:
        against.append(f"a sample of {elapsed_us:.3g} us is under {LEAST_TICKS} ticks of the timer")
    if abs(estimate.order) > floor and estimate.order_is_clear:
        against.append(
            f"AB and BA disagree by {percent(abs(estimate.order)):.2f} %, more than the floor of {percent(floor):.2f} %"
        )
    if throttled_share > THROTTLED_SHARE_ALLOWED:
        against.append(f"{100 * throttled_share:.0f} % of samples at reduced clocks")
    if implied_gb_per_s > copy_gb_per_s:
        against.append(
            f"implied bandwidth of {implied_gb_per_s:.0f} GB/s is above the measured copy bandwidth of "
            f"{copy_gb_per_s:.0f} GB/s"
        )
    if against:
        return Judgement("not measurable", tuple(against))
    if estimate.high < -floor:
        return Judgement("faster")
    if estimate.low > floor:
        return Judgement("slower")
    if -floor <= estimate.low and estimate.high <= floor:
        return Judgement("same")
    return Judgement("undecided", ("the interval crosses the noise floor",))


def two_by_two(cell: CellSamples, launch: str) -> dict[str, dict[int, float]] | None:
    """Weights of decoder effect, placement effect and interaction; None if an arm is missing.

    decoder: bitcast against exp2, mean of both placements. placement: hoisted against in_loop, mean of both decoders.
    interaction: by how much the placement effect differs between bitcast and exp2.
    """
    columns = [cell.column(arm, launch) for arm in TWO_BY_TWO]
    if any(column is None for column in columns):
        return None
    return {
        name: {column: weight for column, weight in zip(columns, weights, strict=True) if column is not None}
        for name, weights in _EFFECTS.items()
    }


def floor_factor(weights: Sequence[float]) -> float:
    """By how much a contrast may exceed the noise floor of a simple ratio: half the sum of its absolute weights."""
    return sum(abs(weight) for weight in weights) / 2.0


def compare(
    first: Sequence[float], second: Sequence[float], copy: Sequence[float], *, seed: int = 0, resamples: int = 4000
) -> tuple[Estimate | None, Judgement]:
    """`second` against `first`, three interleaved series of one process; `copy` is the A/A series of `first`.

    Args:
        first: times of the baseline in the order taken, any unit.
        second: times of the other arm.
        copy: times of the separately compiled copy of the baseline.
        seed: of the resamples.
        resamples: of the bootstrap.

    Raises:
        ValueError: series of unequal length.
    """
    lengths = {len(first), len(second), len(copy)}
    if len(lengths) != 1:
        raise ValueError(f"series: expected equal lengths, got {len(first)}, {len(second)} and {len(copy)}")
    if lengths == {0}:
        return None, judge(None, None)
    times = np.stack([np.asarray(series, float) for series in (first, second, copy)], axis=-1)[None]
    blocks = times.shape[1]
    cell = CellSamples(
        key=("series", "", ""),
        instances=(Instance("first", ""), Instance("second", ""), Instance(COPY_ARM, "")),
        log_time=np.log(times),
        position=np.broadcast_to(np.arange(3.0), times.shape),
        mirror=np.arange(blocks)[None],
        throttled=np.full(3, np.nan),
        elapsed_us=times[0].mean(axis=0),
    )
    noise = contrast(cell, {2: 1.0, 0: -1.0}, seed=seed, resamples=resamples)
    estimate = contrast(cell, {1: 1.0, 0: -1.0}, seed=seed, resamples=resamples)
    assert noise is not None
    judgement = judge(estimate, noise.bound)
    shifts = {name: drift(cell, column) for column, name in enumerate(("first", "second"))}
    notes = tuple(f"{name} drifts by {percent(shift):+.1f} %" for name, shift in shifts.items() if shift)
    return estimate, Judgement(judgement.verdict, judgement.reasons + notes)
