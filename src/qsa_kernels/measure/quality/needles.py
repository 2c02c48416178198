"""Retrieval of one sentence out of a long context, at several depths, all depths in one forward.

Each context holds one sentence for each depth, and each question is appended on its own: its rows list the tokens of
the context and of that question alone. The answers are ranked by likelihood: a model of this size seldom writes what is
asked for in the form that is asked for, and a rank with its margin says more than one bit an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from qsa_kernels.measure import smollm2
from qsa_kernels.measure.quality import caches, forward
from qsa_kernels.measure.quality.caches import CacheArm

PLACES = ("lighthouse", "bakery", "library", "harbour", "museum", "garden", "station")
# One token each, so that one row of logits ranks them.
ANSWERS = (" copper", " silver", " orange", " purple", " marble", " violet", " yellow")


@dataclass(frozen=True)
class Haystack:
    """A context with its questions.

    Args:
        text (str): name of the text that surrounds the sentences.
        ids (torch.Tensor): int64 [tokens], context and then all questions.
        positions (torch.Tensor): int64 [tokens]; every question starts where the context ends.
        indices (torch.Tensor): [tokens, tokens of the context and of the longest question] int32, what each row lists.
        last (list[int]): row after which the answer to each question follows.
        depths (list[int]): depth of each answer in percent of the context.
        right (list[int]): index of each right answer in `answers`.
        answers (list[int]): token ids of the candidates.
    """

    text: str
    ids: torch.Tensor
    positions: torch.Tensor
    indices: torch.Tensor
    last: list[int]
    depths: list[int]
    right: list[int]
    answers: list[int]


def check_depths(depths: Sequence[int], name: str) -> None:
    """Refuse depths that no haystack can have.

    Args:
        depths: in percent.
        name: of the argument, for the message.

    Raises:
        ValueError: fewer than two, more than seven, out of range or not distinct.
    """
    if not 2 <= len(depths) <= len(PLACES):
        raise ValueError(f"{name}: expected 2 to {len(PLACES)} depths, got {len(depths)}")
    if len(set(depths)) != len(depths) or not all(0 <= depth <= 100 for depth in depths):
        raise ValueError(f"{name}: expected distinct percentages from 0 to 100, got {list(depths)}")


def haystack(text: str, *, number: int, tokens: int, depths: Sequence[int]) -> Haystack:
    """Sentences in a stretch of a text, one at each depth, and a question for each.

    Args:
        text: name in `smollm2.texts()`.
        number: of the haystack; turns places and answers against the depths.
        tokens: of the stretch, without the sentences.
        depths: in percent, distinct, two to seven, each from 0 to 100.

    Raises:
        ValueError: depths that cannot be, or a text that is too short.
    """
    check_depths(depths, "depths")
    content = smollm2.token_ids(smollm2.load_text(text), tokens=tokens)
    depths = sorted(depths)
    places = [PLACES[(item + number) % len(PLACES)] for item in range(len(depths))]
    right = [(item + 3 * number) % len(depths) for item in range(len(depths))]

    parts, before = [], 0
    for depth, place, answer in zip(depths, places, right, strict=True):
        cut = depth * tokens // 100
        sentence = f"\n\nThe password of the {place} is{ANSWERS[answer]}.\n\n"
        parts += [content[before:cut], smollm2.token_ids(sentence)]
        before = cut
    context = torch.cat([*parts, content[before:]])
    questions = [
        smollm2.token_ids(f"\n\nWhat is the password of the {place}? The password of the {place} is")
        for place in places
    ]
    length, longest = len(context), max(map(len, questions))
    ids = torch.cat([context, *questions])
    positions = torch.cat([torch.arange(length), *(length + torch.arange(len(ids)) for ids in questions)])
    indices = torch.full((len(ids), length + longest), -1, dtype=torch.int32)
    indices[:length, :length] = caches.causal(length, ids.device)
    last, begin = [], length
    for question in questions:
        rows = slice(begin, begin + len(question))
        indices[rows, :length] = torch.arange(length, dtype=torch.int32)
        own = caches.causal(len(question), ids.device)
        indices[rows, length : length + len(question)] = torch.where(own < 0, own, own + begin)
        begin += len(question)
        last.append(begin - 1)
    answers = [int(smollm2.token_ids(answer)) for answer in ANSWERS[: len(depths)]]
    return Haystack(text, ids, positions, indices, last, depths, right, answers)


def ask(model: Any, stack: Haystack, arm: CacheArm) -> list[dict[str, object]]:
    """A row for each question: which of the answers ranks first, and by how much the right one leads.

    Args:
        model: from `caches.model_on`.
        stack: the context and its questions.
        arm: the cache.
    """
    device = next(model.parameters()).device
    trace = forward.forward(
        model, stack.ids.to(device), caches.reader(arm, stack.indices.to(device)), stack.positions.to(device)
    )
    logs = forward.log_probabilities(model, trace.hidden[stack.last]).cpu()
    rows: list[dict[str, object]] = []
    for line, depth, right in zip(logs, stack.depths, stack.right, strict=True):
        candidates = line[stack.answers]
        others = torch.cat([candidates[:right], candidates[right + 1 :]])
        rows.append(
            {
                "text": stack.text,
                "context_tokens": int(stack.positions[stack.last[0]]) + 1,
                "depth_percent": depth,
                "arm": arm.name,
                "candidates": len(stack.answers),
                "rank": 1 + int((others > candidates[right]).sum()),
                "margin_nats": float(candidates[right] - others.max()),
                "most_probable_token": "right" if int(line.argmax()) == stack.answers[right] else "another",
            }
        )
    return rows


def summary(items: pd.DataFrame) -> pd.DataFrame:
    """Found items and typical margin of each arm and length, and how far the margins move from the baseline.

    Args:
        items: rows of `ask`.
    """
    keys = ["text", "context_tokens", "depth_percent"]
    base = items.loc[items["arm"] == caches.BASELINE, [*keys, "margin_nats"]]
    joined = items.merge(base, on=keys, suffixes=("", "_fp16"))
    groups = joined.assign(moved=(joined["margin_nats"] - joined["margin_nats_fp16"]).abs()).groupby(
        ["context_tokens", "arm"], sort=False
    )
    found = groups.agg(
        items=("rank", "count"),
        found=("rank", lambda ranks: int((ranks == 1).sum())),
        mean_margin_nats=("margin_nats", "mean"),
        least_margin_nats=("margin_nats", "min"),
        largest_change_nats=("moved", "max"),
    )
    return found.reset_index().assign(status="passed", reason="")
