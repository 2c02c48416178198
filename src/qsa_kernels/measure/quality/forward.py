"""One forward of the model over an arm's cache, and what is compared between two of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qsa_kernels import e4m3
from qsa_kernels.measure import smollm2
from qsa_kernels.measure.quality.caches import OperatorReader, TorchReader
from qsa_kernels.measure.smollm2 import LayerCapture

BLOCK = 4  # tokens that one compressed key stands for, as in the public indexer


@dataclass(frozen=True)
class Document:
    """A stretch of a text.

    Args:
        text (str): name in `smollm2.texts()`.
        content (str): language and kind of the text.
        start (int): first token.
        ids (torch.Tensor): int64 [tokens].
    """

    text: str
    content: str
    start: int
    ids: torch.Tensor


@dataclass(frozen=True)
class Trace:
    """What one forward left.

    Args:
        hidden (torch.Tensor): [tokens, hidden], after the last norm.
        layers (list[LayerCapture]): queries, keys and values of each layer, FP16.
        outputs (list[torch.Tensor]): attention output of each layer, [tokens, q_heads, head_dim] FP16.
    """

    hidden: torch.Tensor
    layers: list[LayerCapture]
    outputs: list[torch.Tensor]


def documents(tokens: int, per_text: int) -> list[Document]:
    """Stretches of the evaluation texts, evenly spread, without overlap.

    Args:
        tokens: of each document.
        per_text: documents a text, fewer where the text is too short.

    Raises:
        ValueError: a text has not even one, or is not the indexed one.
        FileNotFoundError: a text is missing.
    """
    found = []
    for name, text in smollm2.texts("evaluation").items():
        ids = smollm2.token_ids(smollm2.load_text(name))
        count = min(per_text, len(ids) // tokens)
        if count == 0:
            raise ValueError(f"text {name!r}: expected at least {tokens} tokens, got {len(ids)}")
        for start in range(0, count * (len(ids) // count), len(ids) // count):
            stretch = ids[start : start + tokens]
            found.append(Document(name, f"{text.language} {text.kind}", start, stretch))
    return found


def forward(
    model: Any, ids: torch.Tensor, reader: TorchReader | OperatorReader, positions: torch.Tensor | None = None
) -> Trace:
    """One forward over a sequence, with every layer's attention read through `reader`.

    Args:
        model: from `caches.model_on`.
        ids: int64 [tokens], on the model's device.
        reader: the cache.
        positions: int64 [tokens]; None = 0, 1, 2 and so on.
    """
    layers: list[LayerCapture] = []
    outputs: list[torch.Tensor] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output = reader(layer, q, k, v)
        layers.append(LayerCapture(layer, q.half(), k.half(), v.half()))
        outputs.append(output.half())
        return output

    place = {} if positions is None else {"position_ids": positions[None]}
    with torch.inference_mode(), smollm2.intercepted_attention(attend, model):
        hidden = model.model(ids[None], use_cache=False, **place).last_hidden_state[0]
    return Trace(hidden, layers, outputs)


def log_probabilities(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Natural log-probabilities [rows, vocabulary] float32; the head in FP32 on every device.

    Args:
        model: from `caches.model_on`.
        hidden: [rows, hidden].
    """
    with torch.inference_mode():
        return torch.nn.functional.linear(hidden.float(), model.lm_head.weight.float()).log_softmax(-1)


def predictions(ids: torch.Tensor, base: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """How well the next tokens are predicted, and how far the prediction lies from that of the baseline.

    Args:
        ids: int64 [tokens].
        base: [tokens, vocabulary] log-probabilities of the baseline.
        other: the same of an arm.

    Returns:
        dict: negative log-likelihood and KL(baseline || arm) in nats a token, share of positions whose most probable
        token is another one, in percent.
    """
    target = ids[1:, None]
    divergence = (base[:-1].exp() * (base[:-1] - other[:-1])).sum(-1)
    return {
        "nll_nats": float(-other[:-1].gather(1, target).double().mean()),
        "kl_nats": float(divergence.double().mean()),
        "disagreement_percent": 100 * float((base[:-1].argmax(-1) != other[:-1].argmax(-1)).double().mean()),
    }


class Distance:
    """Cosine, relative L2 and RMSE of many pairs of tensors, as if they were one vector."""

    def __init__(self) -> None:
        self.error = self.expected = self.got = self.product = 0.0
        self.elements = 0

    def add(self, output: torch.Tensor, reference: torch.Tensor) -> None:
        """Take in one pair of the same shape."""
        got, expected = output.double(), reference.double()
        self.error += float((got - expected).square().sum())
        self.expected += float(expected.square().sum())
        self.got += float(got.square().sum())
        self.product += float((got * expected).sum())
        self.elements += got.numel()

    def result(self) -> dict[str, float]:
        return {
            "cosine": self.product / math.sqrt(self.got * self.expected),
            "relative_l2": math.sqrt(self.error / self.expected),
            "rmse": math.sqrt(self.error / self.elements),
        }


def selected_blocks(
    q: torch.Tensor, k: torch.Tensor, *, topk: int, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of four tokens that each row and KV head would read.

    The key of a complete block is the mean of its keys, formed in FP32 and stored in FP16, or in E4M3 with `scale`. A
    row scores the complete blocks up to its token by the sum of products with its query heads and takes the best.

    Args:
        q: [tokens, q_heads, head_dim].
        k: [tokens, kv_heads, head_dim].
        topk: blocks a row.
        scale: of an E4M3 indexer cache; None for an FP16 one.

    Returns:
        tuple: selection [kv_heads, rows, blocks] bool of the rows that have a choice, those with more than `topk`
        complete blocks, and their positions [rows].

    Raises:
        ValueError: no row has a choice.

    Source:
        Pooling, sum over heads and top-k as in the indexer of the public model,
        huggingface/transformers:src/transformers/models/qwen4_exp/modular_qwen4_exp.py. That one has projections and a
        norm of its own, pools before the rotary embedding and drops negative products; here the model's own queries and
        keys stand in, whose products may all be negative.
    """
    tokens, kv_heads, _ = k.shape
    blocks = tokens // BLOCK
    if blocks <= topk:
        raise ValueError(f"topk: expected fewer than the {blocks} blocks of {tokens} tokens, got {topk}")
    rows = torch.arange(BLOCK * (topk + 1) - 1, tokens, device=k.device)
    compressed = k[: blocks * BLOCK].float().unflatten(0, (blocks, BLOCK)).mean(1).half()
    keys = compressed.float() if scale is None else e4m3.decode(e4m3.encode(compressed, scale)) * scale
    heads = q[rows].float().unflatten(1, (kv_heads, -1)).sum(2)
    scores = torch.einsum("rhd,bhd->hrb", heads, keys)
    complete = (rows + 1) // BLOCK
    scores = scores.masked_fill(torch.arange(blocks, device=k.device) >= complete[:, None], -math.inf)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(2, scores.topk(topk, dim=2).indices, True), rows


class Overlap:
    """How much two selections of blocks have in common, over many rows."""

    def __init__(self) -> None:
        self.rows = self.common = self.either = 0
        self.jaccard = self.recall = 0.0

    def add(self, selection: torch.Tensor, baseline: torch.Tensor) -> None:
        """Take in one pair [kv_heads, rows, blocks] bool; a row of one KV head counts as a row."""
        common = (selection & baseline).sum(-1)
        either = (selection | baseline).sum(-1)
        self.rows += common.numel()
        self.common += int(common.sum())
        self.either += int(either.sum())
        self.jaccard += float((common / either).double().sum())
        self.recall += float((common / baseline.sum(-1)).double().sum())

    def merge(self, other: Overlap) -> None:
        """Take in all rows of another one."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def result(self) -> dict[str, float | int]:
        return {
            "rows": self.rows,
            "mean_row_jaccard": self.jaccard / self.rows,
            "fp16_recall": self.recall / self.rows,
            "micro_jaccard": self.common / self.either,
        }


def pairs(base: Trace, other: Trace) -> Iterator[tuple[int, LayerCapture, LayerCapture, torch.Tensor, torch.Tensor]]:
    """Layer by layer: captures of both forwards and their attention outputs."""
    for first, second, output, changed in zip(base.layers, other.layers, base.outputs, other.outputs, strict=True):
        yield first.layer, first, second, output, changed
