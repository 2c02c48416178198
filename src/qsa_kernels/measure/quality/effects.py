"""Effects with intervals: what an arm changes over all documents, beside the self-noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from qsa_kernels.measure.quality.caches import ARMS, BASELINE, CALIBRATED, NOISE

PERPLEXITY = "perplexity change"
# Column of the documents' table, unit; larger is worse in all of them.
MEASURES: dict[str, tuple[str, str]] = {
    PERPLEXITY: ("nll_nats", "percent"),
    "KL divergence": ("kl_nats", "nats a token"),
    "next-token disagreement": ("disagreement_percent", "percent of positions"),
}
KEYS = ["text", "start_token", "context_tokens"]


def interval(differences: np.ndarray, *, resamples: int, seed: int) -> tuple[float, float, float]:
    """Mean of paired differences and its 95 % percentile interval over resampled documents.

    Args:
        differences: one a document.
        resamples: of the bootstrap.
        seed: of the resampling.

    Returns:
        tuple: mean, low, high; low and high are NaN for fewer than two documents.
    """
    mean = float(np.mean(differences))
    if len(differences) < 2:
        return mean, math.nan, math.nan
    found = stats.bootstrap(
        (differences,), np.mean, n_resamples=resamples, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return mean, float(found.low), float(found.high)


def effects(documents: pd.DataFrame, *, resamples: int, seed: int) -> pd.DataFrame:
    """Each measure of each arm against the FP16 cache, and the perplexity of other E4M3 arms against the calibrated.

    The differences are formed document by document before they are resampled. The self-noise is the largest magnitude
    of the interval of the FP16 arm with another order of sums. An arm is worse or better where its whole interval lies
    beyond the self-noise, the same where it lies inside; an interval that is wider and contains zero shows no
    difference.

    Args:
        documents: a row for each document and arm.
        resamples: of the bootstrap.
        seed: of the resampling.
    """
    rows = []
    for context, table in documents.groupby("context_tokens", sort=True):
        for measure, (column, unit) in MEASURES.items():
            wide = table.pivot_table(index=KEYS, columns="arm", values=column)
            shown: Callable[[float], float] = _percent if measure == PERPLEXITY else float
            noise = math.nan
            for arm, against in _comparisons(measure):
                difference = wide[arm] - wide[against] if measure == PERPLEXITY else wide[arm]
                value, low, high = map(shown, interval(difference.to_numpy(), resamples=resamples, seed=seed))
                if arm == NOISE:
                    noise = max(abs(low), abs(high))
                verdict = "self-noise" if arm == NOISE else judged(low, high, noise)
                rows.append(
                    {
                        "measure": measure,
                        "arm": arm,
                        "against": against,
                        "value": value,
                        "low": low,
                        "high": high,
                        "verdict": verdict,
                        "self_noise": noise,
                        "unit": unit,
                        "documents": len(difference),
                        "context_tokens": context,
                    }
                )
    return pd.DataFrame(rows).assign(status="passed", reason="")


def judged(low: float, high: float, noise: float) -> str:
    """The verdict on an interval where larger is worse; see `effects`."""
    if math.isnan(low) or math.isnan(high) or math.isnan(noise):
        return "undecided"
    if low > noise:
        return "worse"
    if high < -noise:
        return "better"
    if -noise <= low and high <= noise:
        return "same"
    return "no difference seen" if low <= 0 <= high else "undecided"


def agreement(here: pd.DataFrame, recorded: pd.DataFrame, *, resamples: int, seed: int) -> pd.DataFrame:
    """Whether two machines find the same effect, document by document.

    Both go through the same documents. The difference between the two effects is formed for each document; its interval
    contains zero, or lies inside the self-noise of the two machines together, where they agree.

    Args:
        here: documents' table of this machine.
        recorded: of the other one.
        resamples: of the bootstrap.
        seed: of the resampling.
    """
    rows = []
    for context in sorted(set(here["context_tokens"]) & set(recorded["context_tokens"])):
        tables = [table[table["context_tokens"] == context] for table in (here, recorded)]
        for measure, (column, unit) in MEASURES.items():
            wide = [table.pivot_table(index=KEYS, columns="arm", values=column) for table in tables]
            if set(wide[0].index) != set(wide[1].index):
                continue
            changes = [table.sub(table[BASELINE], axis=0) if measure == PERPLEXITY else table for table in wide]
            shown: Callable[[float], float] = _percent if measure == PERPLEXITY else float
            noise = shown(sum(float(change[NOISE].abs().mean()) for change in changes))
            for arm in ARMS:
                if arm in (BASELINE, NOISE):
                    continue
                apart = (changes[1][arm] - changes[0][arm].reindex(changes[1].index)).to_numpy()
                value, low, high = map(shown, interval(apart, resamples=resamples, seed=seed))
                agrees = low <= 0 <= high or max(abs(low), abs(high)) <= noise
                rows.append(
                    {
                        "measure": measure,
                        "arm": arm,
                        "here": shown(float(changes[0][arm].mean())),
                        "recorded": shown(float(changes[1][arm].mean())),
                        "difference": value,
                        "low": low,
                        "high": high,
                        "self_noise": noise,
                        "unit": unit,
                        "documents": len(apart),
                        "context_tokens": context,
                        "status": "passed" if agrees else "failed",
                        "reason": "" if agrees else "the two machines differ by more than the documents and the noise",
                    }
                )
    return pd.DataFrame(rows)


def _comparisons(measure: str) -> list[tuple[str, str]]:
    against_fp16 = [(arm, BASELINE) for arm in ARMS if arm != BASELINE]
    if measure != PERPLEXITY:
        return against_fp16
    return against_fp16 + [(arm, CALIBRATED) for arm in ARMS if arm not in (BASELINE, NOISE, CALIBRATED)]


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)
