"""Progress of long work, for people; silent where nobody watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Pass `items` on and show how far they are, if standard error is a terminal.

    Args:
        items: anything iterable.
        description: a few words in front of the bar.
        total: number of items, where `items` cannot tell.
    """
    return iter(tqdm(items, desc=description, total=total, disable=None, leave=False))
