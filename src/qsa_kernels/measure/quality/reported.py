"""The public quality figures, and the measured ones beside them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from qsa_kernels.measure.quality import needles
from qsa_kernels.measure.quality.caches import BASELINE, CALIBRATED

REPORTED = Path(__file__).resolve().parents[4] / "data" / "reported" / "quality.csv"
NOT_MEASURED = "not measured"

_OTHER_MODEL = "another model, head dim 64 instead of 256, full instead of sparse attention"
_INDEXER = "no indexer of its own: its queries and keys stand in"


def published(path: Path = REPORTED) -> pd.DataFrame:
    """All public figures, values as published.

    Args:
        path: the table of reported figures.
    """
    table = pd.read_csv(path, dtype={"value": str, "of": str}, keep_default_na=False)
    value = table["value"].where(table["of"] == "", table["value"] + " of " + table["of"])
    return table.drop(columns="of").assign(value=value, status="passed", reason="")


def beside(
    figures: pd.DataFrame, here: dict[str, pd.DataFrame], recorded: dict[str, pd.DataFrame] | None
) -> pd.DataFrame:
    """Each public figure of Qwen4Exp and what this model gives for the same question, in columns of their own.

    Args:
        figures: from `published`.
        here: tables of `record_tables`, made now.
        recorded: tables of a recorded run on a GPU, None if there is none.
    """
    measured = [_measured(here), _measured(recorded) if recorded else {}]
    differs = {
        "retrieval": "shorter contexts, answers ranked by likelihood",
        "tools": "a model of this size has no tool use to lose",
        "first": "all next tokens of the evaluation texts",
    }
    rows = []
    for figure in figures[figures["group"] == "qwen4exp"].to_dict("records"):
        key = str(figure["id"])
        local, gpu = (values.get(key, NOT_MEASURED) for values in measured)
        reason = differs.get(key.split("_")[0], _INDEXER if "jaccard" in key or "recall" in key else _OTHER_MODEL)
        rows.append(
            {
                "quantity": figure["quantity"],
                "this_model_here": local,
                "Qwen4Exp_on_V100_reported": figure["value"],
                "this_model_on_a_GPU_recorded": gpu,
                "unit": figure["unit"],
                "what_differs": reason,
                "kind": figure["kind"],
                "source_url": figure["source_url"],
                "status": "not_measured" if local == NOT_MEASURED else "passed",
                "reason": reason if local == NOT_MEASURED else "",
            }
        )
    return pd.DataFrame(rows)


def overall(tables: dict[str, pd.DataFrame], *, kv_cache: str, indexer_keys: str) -> pd.Series:
    """Overlap of the selected blocks over all layers, for the shortest documents.

    Args:
        tables: of `record_tables`.
        kv_cache: arm of the K/V cache.
        indexer_keys: "fp16" or "e4m3".
    """
    table = tables["quality_selection"]
    wanted = (table["layer"] == "all") & (table["kv_cache"] == kv_cache) & (table["indexer_keys"] == indexer_keys)
    return table[wanted].sort_values("context_tokens").iloc[0]


def layer_median(tables: dict[str, pd.DataFrame], arm: str, inputs: str) -> pd.Series:
    """Cosine, relative L2 and RMSE of the attention output in the median layer, for the shortest documents.

    Args:
        tables: of `record_tables`.
        arm: name in `ARMS`.
        inputs: "same inputs" or "own forward".
    """
    table = tables["quality_attention"]
    shortest = table["context_tokens"] == table["context_tokens"].min()
    chosen = table[shortest & (table["arm"] == arm) & (table["inputs"] == inputs)]
    return chosen[["cosine", "relative_l2", "rmse"]].median()


def _measured(tables: dict[str, pd.DataFrame]) -> dict[str, str]:
    found = needles.summary(tables["quality_needles"]).groupby("arm")[["found", "items"]].sum()
    values = {
        f"retrieval_{key}": f"{found.loc[arm, 'found']} of {found.loc[arm, 'items']}"
        for key, arm in (("fp16", BASELINE), ("e4m3", CALIBRATED))
    }
    documents = tables["quality_documents"]
    calibrated = documents[documents["arm"] == CALIBRATED]
    positions = int(calibrated["predictions"].sum())
    equal = calibrated["predictions"] * (1 - calibrated["disagreement_percent"] / 100)
    values["first_token"] = f"{round(float(equal.sum()))} of {positions}"
    overlap = overall(tables, kv_cache=CALIBRATED, indexer_keys="fp16")
    for key in ("mean_row_jaccard", "fp16_recall", "micro_jaccard"):
        values[key] = f"{overlap[key]:.6f}"
    values |= {str(name): f"{value:.6g}" for name, value in layer_median(tables, CALIBRATED, "own forward").items()}
    return values
