"""What an engine's weights are, as told by what was asked of it: they decide what it may serve. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

__all__ = ["WHY_STALE", "CountedBuckets", "Weights", "after_loss"]

Weights = Literal["first", "unset", "pushed", "discarded", "torn"]
"""What an engine's weights are: its own first ones, placeholders, those of the last push, gone, or part old and part new."""

WHY_STALE: Mapping[Weights, str] = {
    "unset": "its first weights are placeholders (requires_refit), and nothing was pushed yet",
    "discarded": "its weights were discarded by sleep(level=2), and nothing was pushed since",
    "torn": "the last push failed half-way: its weights are part old, part new",
}
"""The states that are not served, and why, in words."""


class CountedBuckets:
    """The buckets of a push, counted; says when the first one is asked for."""

    def __init__(self, buckets: Iterator[dict[str, Any]], begins: Callable[[], None]) -> None:
        self._buckets = buckets
        self._begins = begins
        self.num = 0
        self.is_done = False

    def __iter__(self) -> CountedBuckets:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.num == 0:
            self._begins()
        try:
            bucket = next(self._buckets)
        except StopIteration:
            self.is_done = True
            raise
        self.num += 1
        return bucket


def after_loss(weights: Weights) -> Weights:
    """What weights are after a sleep that discards them."""
    return weights if weights in ("unset", "torn") else "discarded"
