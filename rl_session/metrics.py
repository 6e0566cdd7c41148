"""How the metrics of micro-batches and ranks become one number each.

A loss returns numbers beside the loss itself. Plain numbers are summed, as losses are; a number that is no share of a
sum says so with a mark: ``{"loss": loss, "ratio": rs.mean(ratio, num_tokens), "ratio_max": rs.max(ratio_max)}``.
Knows nothing of batches, steps or ranks.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from rl_session.errors import ArgumentError

__all__ = ["Mark", "MetricSum", "each", "max", "mean", "min"]

Kind = Literal["sum", "mean", "min", "max", "each"]
Number = Tensor | float

_REMEDY = 'metrics = {"kl": kl.sum(), "ratio": rs.mean(ratio, num_tokens), "ratio_max": rs.max(ratio)}: one number each'


@attrs.frozen(eq=False)
class Mark:
    """A metric that is not summed over micro-batches and ranks.

    Attributes:
        kind: How it is combined.
        value: A number or a tensor of one element.
        weight: What a mean weighs it with; of "each", whether it is a share of a sum.
    """

    kind: Kind
    value: Any
    weight: Any = 1


def mean(x: Any, weight: Any = 1) -> Mark:
    """Mark a metric as a mean: ``sum(x * weight) / sum(weight)`` over micro-batches and ranks.

    Args:
        x: A number or a tensor of one element.
        weight: How much it counts, usually the number of tokens or sequences it is the mean of. What has weight 0
            does not count, even if it is NaN; when nothing counts the mean is NaN.

    Returns:
        The marked number, to be put into the metrics that a loss returns.
    """
    return Mark("mean", x, weight)


def min(x: Any) -> Mark:
    """Mark a metric whose smallest value over micro-batches and ranks is kept.

    Args:
        x: A number or a tensor of one element.

    Returns:
        The marked number.
    """
    return Mark("min", x)


def max(x: Any) -> Mark:
    """Mark a metric whose greatest value over micro-batches and ranks is kept.

    Args:
        x: A number or a tensor of one element.

    Returns:
        The marked number.
    """
    return Mark("max", x)


def each(x: Any, *, is_share: bool = True) -> Mark:
    """Mark a metric of which every micro-batch's value is kept, in a list over micro-batches and ranks.

    Args:
        x: A number or a tensor of one element; anything else is kept as it is.
        is_share: Whether it is a share of a sum, which a commit that counted afterwards divides as it does the loss.
    """
    return Mark("each", x, is_share)


@attrs.define(slots=False)
class _Entry:
    """One metric so far. For a mean ``total`` is the weighted sum."""

    kind: Kind
    total: Number
    weight: Number = 0.0


class MetricSum:
    """Metrics summed up so far; it survives pickling, so that ranks can be merged elsewhere.

    Values on a device stay there, detached, until :meth:`settle` or :meth:`result` bring them over in one copy.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._lists: dict[str, list[tuple[Any, bool]]] = {}
        """Of metrics marked "each": values, and whether they are shares of a sum."""

    def __repr__(self) -> str:
        kinds = [f"{name}: {entry.kind}" for name, entry in self._entries.items()]
        return f"MetricSum({', '.join([*kinds, *(f'{name}: each' for name in self._lists)])})"

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take in what one micro-batch reported. All of it or, on an error, nothing.

        Args:
            metrics: Names to numbers, tensors of one element, or marks (:func:`mean`, :func:`min`, :func:`max`,
                :func:`each`).

        Raises:
            ArgumentError: A value is no number, or a name was summed before and is marked now.
        """
        lists = {str(name): value for name, value in metrics.items() if _is_each(value)}
        entries = {str(name): _entry(str(name), value) for name, value in metrics.items() if not _is_each(value)}
        self._combine(entries, {name: [(_detached(mark.value), bool(mark.weight))] for name, mark in lists.items()})

    def merge(self, other: MetricSum) -> None:
        """Take in everything another rank, or another step, has summed up.

        Raises:
            ArgumentError: A name is combined differently there.
        """
        self._combine(other._entries, other._lists)

    def scaled(self, factor: float) -> MetricSum:
        """A copy with the sums, and shares of them, multiplied by ``factor``; means, minima and maxima stay as they are."""
        result = MetricSum()
        for name, values in self._lists.items():
            result._lists[name] = [(x * factor if is_share and factor != 1 else x, is_share) for x, is_share in values]
        for name, entry in self._entries.items():
            result._entries[name] = attrs.evolve(entry, total=entry.total * (factor if entry.kind == "sum" else 1))
        return result

    def settle(self) -> None:
        """Bring what is still on a device to the host: one synchronizing copy for each device."""
        pending = [(entry, field) for entry in self._entries.values() for field in ("total", "weight")]
        pending = [(entry, field) for entry, field in pending if isinstance(getattr(entry, field), Tensor)]
        for device in {getattr(entry, field).device for entry, field in pending}:
            there = [(entry, field) for entry, field in pending if getattr(entry, field).device == device]
            values = torch.stack([getattr(entry, field) for entry, field in there]).tolist()
            for (entry, field), value in zip(there, values, strict=True):
                setattr(entry, field, value)

    def result(self) -> dict[str, Any]:
        """One plain number for each name, in the order of first appearance; then a list for each marked "each"."""
        self.settle()
        lists = {name: [_plain(value) for value, _ in values] for name, values in self._lists.items()}
        return {**{name: _value(entry) for name, entry in self._entries.items()}, **lists}

    def _combine(self, entries: Mapping[str, _Entry], lists: Mapping[str, list[tuple[Any, bool]]]) -> None:
        kinds = {**{name: entry.kind for name, entry in self._entries.items()}, **dict.fromkeys(self._lists, "each")}
        for name, kind in (*((name, entry.kind) for name, entry in entries.items()), *((n, "each") for n in lists)):
            if kinds.get(name, kind) != kind:
                raise ArgumentError(
                    f"combining metric {name!r}",
                    (f"it was a {kinds[name]} before and is a {kind} now",),
                    "mark a metric the same way in every micro-batch",
                )
        for name, values in lists.items():
            self._lists.setdefault(name, []).extend(values)
        for name, entry in entries.items():
            known = self._entries.get(name)
            self._entries[name] = attrs.evolve(entry) if known is None else _combined(known, entry)


def _is_each(value: Any) -> bool:
    return isinstance(value, Mark) and value.kind == "each"


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    """A value of a list as callers get it: numbers plain, anything else on the CPU."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.numel() == 1 else value.cpu()


def _entry(name: str, value: Any) -> _Entry:
    if not isinstance(value, Mark):
        return _Entry("sum", _number(name, value))
    number = _number(name, value.value)
    if value.kind != "mean":
        return _Entry(value.kind, number)
    weight = _number(name, value.weight)
    return _Entry("mean", _weighted(number, weight), weight)


def _weighted(number: Number, weight: Number) -> Number:
    # A micro-batch without valid tokens has a mean of 0 / 0: it must not spoil the others.
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.zeros_like(weight), number * weight)
    return number * weight if weight != 0 else 0.0


def _number(name: str, value: Any) -> Number:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        # Float64: counts stay exact. On a device no .item(), which would wait for everything queued before.
        scalar = value.detach().reshape(())
        return float(scalar) if scalar.device.type == "cpu" else scalar.to(torch.float64, copy=True)
    if isinstance(value, numbers.Real):
        return float(value)
    what = (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"{type(value).__name__}: {value!r:.80}"
    )
    raise ArgumentError(f"adding metric {name!r}", (f"it is {what}, not a number",), _REMEDY)


def _combined(a: _Entry, b: _Entry) -> _Entry:
    if a.kind in ("sum", "mean"):
        return _Entry(a.kind, a.total + b.total, a.weight + b.weight)
    return _Entry(a.kind, _extreme(a.kind, a.total, b.total))


def _extreme(kind: Kind, a: Number, b: Number) -> Number:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        pick = torch.minimum if kind == "min" else torch.maximum
        return pick(*(x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in (a, b)))
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return a if (a < b) == (kind == "min") else b


def _value(entry: _Entry) -> float:
    if entry.kind != "mean":
        return float(entry.total)
    return float(entry.total) / float(entry.weight) if float(entry.weight) else math.nan
