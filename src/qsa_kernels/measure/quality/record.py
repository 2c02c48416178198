"""The measures of the quality chapter, all of them from the same forwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from qsa_kernels import e4m3
from qsa_kernels.measure import error, smollm2
from qsa_kernels.measure.calibration import summarize
from qsa_kernels.measure.quality import caches, effects, forward, needles
from qsa_kernels.measure.quality.caches import BASELINE, CALIBRATED, CacheArm, OperatorReader, TorchReader
from qsa_kernels.measure.quality.forward import Distance, Overlap, Trace
from qsa_kernels.measure.scale_effects import capture_texts, observe
from qsa_kernels.reference import reference_attention

Progress = Callable[[Iterable[Any], str], Iterable[Any]]

KERNEL_ROWS = 4  # of the kernel check; enough, since every row goes through the same code


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        calibration_tokens (int): of each calibration text.
        other_text (str): the one calibration text of the arm "other text".
        context_tokens (tuple[int, ...]): lengths of the documents.
        documents_per_text (int): of each evaluation text and length.
        topk_blocks (int): blocks of four tokens that a row selects.
        needle_texts (tuple[str, ...]): texts around the sentences that are asked for.
        needle_tokens (tuple[int, ...]): lengths of those contexts, without the sentences.
        depth_percent (tuple[int, ...]): where in the context the sentences stand.
        resamples (int): of the bootstrap.
        seed (int): of the resampling.
        kernel_layers (tuple[int, ...]): layers on which plain torch is held against the kernels.
        kernel_tokens (int): first tokens of a document that are stored for that.
    """

    calibration_tokens: int
    other_text: str
    context_tokens: tuple[int, ...]
    documents_per_text: int
    topk_blocks: int
    needle_texts: tuple[str, ...]
    needle_tokens: tuple[int, ...]
    depth_percent: tuple[int, ...]
    resamples: int
    seed: int
    kernel_layers: tuple[int, ...]
    kernel_tokens: int

    def __post_init__(self) -> None:
        texts = smollm2.texts()
        for name, wanted, role in (
            ("other_text", [self.other_text], "calibration"),
            ("needle_texts", self.needle_texts, "evaluation"),
        ):
            known = [text for text in texts if texts[text].role == role]
            if unknown := [text for text in wanted if text not in known]:
                raise ValueError(f"{name}: expected {role} texts among {', '.join(known)}, got {', '.join(unknown)}")
        needles.check_depths(self.depth_percent, "depth_percent")
        if (blocks := min(self.context_tokens) // forward.BLOCK) <= self.topk_blocks:
            raise ValueError(
                f"topk_blocks: expected fewer than the {blocks} blocks of a document, got {self.topk_blocks}"
            )
        if wrong := [layer for layer in self.kernel_layers if not 0 <= layer < smollm2.LAYERS]:
            raise ValueError(f"kernel_layers: expected layers from 0 to {smollm2.LAYERS - 1}, got {wrong}")


def record_tables(
    device: torch.device | str, plan: Plan, progress: Progress = lambda items, _: items
) -> dict[str, pd.DataFrame]:
    """All tables of a run on one device.

    Args:
        device: "cpu" (FP32 model, FP16 at the operator's boundary, the cache in plain torch) or "cuda" (FP16 model,
            the Triton kernels in the forward).
        plan: what is measured.
        progress: wraps an iterable and a description.

    Raises:
        FileNotFoundError: a text or the model is missing.
        ValueError: a text or the model is not the known one, or too short for the plan.
    """
    device = torch.device(device)
    stretches = [
        document for tokens in plan.context_tokens for document in forward.documents(tokens, plan.documents_per_text)
    ]
    captures = capture_texts(
        progress(list(smollm2.texts("calibration")), "calibration texts"), tokens=plan.calibration_tokens
    )
    both = summarize(observe(captures), source="all calibration texts")
    other = summarize(observe({plan.other_text: captures[plan.other_text]}), source=plan.other_text)
    arms = caches.arms(both, other)
    model = caches.model_on(device)

    collected = _Collected(arms, plan.topk_blocks)
    kernel = pd.DataFrame()
    for number, document in enumerate(progress(stretches, "documents")):
        base = collected.add(model, document, device)
        if number == 0:
            kernel = kernel_check(base, arms, layers=plan.kernel_layers, tokens=plan.kernel_tokens)
    stacks = [
        needles.haystack(text, number=number, tokens=tokens, depths=plan.depth_percent)
        for tokens in plan.needle_tokens
        for number, text in enumerate(plan.needle_texts)
    ]
    items = [
        row for stack in progress(stacks, "needles") for arm in arms.values() for row in needles.ask(model, stack, arm)
    ]
    documents = pd.DataFrame(collected.documents).assign(status="passed", reason="")
    return {
        "quality_documents": documents,
        "quality_effects": effects.effects(documents, resamples=plan.resamples, seed=plan.seed),
        "quality_attention": collected.attention(),
        "quality_selection": collected.selection(),
        "quality_needles": pd.DataFrame(items).assign(status="passed", reason=""),
        "quality_kernel": kernel,
    }


class _Collected:
    """What has been seen so far, summed over documents."""

    def __init__(self, arms: dict[str, CacheArm], topk: int) -> None:
        self.arms = arms
        self.topk = topk
        self.documents: list[dict[str, object]] = []
        self._attention: dict[tuple[int, str, str, int], Distance] = defaultdict(Distance)
        self._selection: dict[tuple[int, str, str, int], Overlap] = defaultdict(Overlap)

    def add(self, model: Any, document: forward.Document, device: torch.device) -> Trace:
        """Run a document through every arm; returns the forward of the baseline."""
        ids = document.ids.to(device)
        indices = caches.causal(len(ids), device)
        base = forward.forward(model, ids, caches.reader(self.arms[BASELINE], indices))
        expected = forward.log_probabilities(model, base.hidden)
        for name, arm in self.arms.items():
            reader = caches.reader(arm, indices)
            trace = base if name == BASELINE else forward.forward(model, ids, reader)
            found = expected if name == BASELINE else forward.log_probabilities(model, trace.hidden)
            self.documents.append(
                {
                    "text": document.text,
                    "content": document.content,
                    "start_token": document.start,
                    "context_tokens": len(ids),
                    "arm": name,
                    "predictions": len(ids) - 1,
                    **forward.predictions(ids, expected, found),
                }
            )
            with torch.inference_mode():
                self._compare(len(ids), name, reader, base, trace)
        return base

    def _compare(
        self, context: int, name: str, reader: TorchReader | OperatorReader, base: Trace, trace: Trace
    ) -> None:
        index_scales = self.arms[CALIBRATED].scales
        assert index_scales is not None
        for layer, first, own, expected, output in forward.pairs(base, trace):
            if name != BASELINE:
                self._attention[context, name, "own forward", layer].add(output, expected)
                alone = reader(layer, first.q, first.k, first.v)
                self._attention[context, name, "same inputs", layer].add(alone, expected)
            wanted, _ = forward.selected_blocks(first.q, first.k, topk=self.topk)
            for keys, scale in (("fp16", None), ("e4m3", index_scales[layer].k_scale)):
                if name == BASELINE and scale is None:
                    continue
                chosen, _ = forward.selected_blocks(own.q, own.k, topk=self.topk, scale=scale)
                self._selection[context, name, keys, layer].add(chosen, wanted)

    def attention(self) -> pd.DataFrame:
        """A row for each length, arm, kind of inputs and layer."""
        rows = [
            {"context_tokens": context, "arm": arm, "inputs": inputs, "layer": layer, **distance.result()}
            for (context, arm, inputs, layer), distance in self._attention.items()
        ]
        return pd.DataFrame(rows).assign(status="passed", reason="")

    def selection(self) -> pd.DataFrame:
        """A row for each length, arm, type of the indexer's keys and layer, and one over all layers."""
        whole: dict[tuple[int, str, str], Overlap] = defaultdict(Overlap)
        rows = []
        for (context, arm, keys, layer), overlap in self._selection.items():
            whole[context, arm, keys].merge(overlap)
            rows.append(self._overlap_row(context, arm, keys, str(layer), overlap))
        rows += [self._overlap_row(*key, "all", overlap) for key, overlap in whole.items()]
        return pd.DataFrame(rows).assign(status="passed", reason="")

    def _overlap_row(self, context: int, arm: str, keys: str, layer: str, overlap: Overlap) -> dict[str, object]:
        return {
            "context_tokens": context,
            "kv_cache": arm,
            "indexer_keys": keys,
            "layer": layer,
            "topk_blocks": self.topk,
            **overlap.result(),
        }


def kernel_check(trace: Trace, arms: dict[str, CacheArm], *, layers: Iterable[int], tokens: int) -> pd.DataFrame:
    """Plain torch against the kernels on samples of a real forward: codes bit for bit, outputs within a budget.

    The last rows of the sample attend to every token before them. The budget is that of the error chapter: a small
    multiple of what plain torch itself is away from the FP64 reference on the same codes.

    Args:
        trace: a forward over the FP16 cache.
        arms: from `caches.arms`.
        layers: to sample.
        tokens: first tokens of the forward that are stored.
    """
    tokens = min(tokens, len(trace.hidden))
    rows = slice(-KERNEL_ROWS, None)
    records = []
    for layer in layers:
        q, k, v = (tensor[:tokens] for tensor in (trace.layers[layer].q, trace.layers[layer].k, trace.layers[layer].v))
        indices = caches.causal(tokens, q.device)
        for name in (BASELINE, CALIBRATED):
            arm = arms[name]
            operator = OperatorReader(arm, indices[rows])
            cache, block_table = operator.stored(layer, k, v)
            order = block_table[0].long()
            scales = arm.scales[layer] if arm.scales else None
            wanted = (e4m3.encode(k, scales.k_scale), e4m3.encode(v, scales.v_scale)) if scales else (k, v)
            differing = sum(
                int((pages[order].flatten(0, 1)[:tokens] != expected).sum())
                for pages, expected in zip((cache.k_cache, cache.v_cache), wanted, strict=True)
            )
            reference = reference_attention(
                q[rows],
                logical_indices=indices[rows],
                block_table=block_table,
                token_to_req=torch.zeros(len(indices[rows]), dtype=torch.int32, device=q.device),
                **cache.arguments(),
            )
            found = error.measure(operator.read(q[rows], cache, block_table), reference)
            peer = error.measure(TorchReader(arm, indices)(layer, q, k, v)[rows], reference)
            status, reason = error.gate(found, peer)
            if differing:
                status, reason = "failed", f"{differing} stored values differ from those of the plain codec"
            records.append(
                {
                    "layer": layer,
                    "arm": name,
                    "tokens": tokens,
                    "rows": len(indices[rows]),
                    "stored_values": 2 * k.numel(),
                    "differing_values": differing,
                    "kernel_rms_relative": found["rms_relative"],
                    "torch_rms_relative": peer["rms_relative"],
                    "kernel_max_abs": found["max_abs"],
                    "torch_max_abs": peer["max_abs"],
                    "status": status,
                    "reason": reason,
                }
            )
    return pd.DataFrame(records)
