"""Two runs side by side: what differs in number, and where their sequences of records part.

Compares shape, which a program decides (events, policies, modes, what moved where), and not time, which a machine does;
bytes only on request. Sequences are compared source by source, since how sources interleave is chance.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import attrs

from rl_session.audit.nodes import words
from rl_session.audit.summary import Summary, Total, summarize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NUM_CONTEXT = 3
_NO_STEP = -(2**63)
#: Fields that belong to the shape of a record, beside its event, policy and step.
_SHAPE = ("mode", "outer_mode", "from_mode", "to_mode", "method", "component", "from_tier", "to_tier", "elided", "code")


@attrs.define(kw_only=True)
class Parting:
    """Where two sequences part.

    Attributes:
        source: Whose.
        index: How many records of it are the same before.
        before: The last of those, in words.
        a: What comes next in the first run, in words; empty where it has ended.
        b: Likewise in the second.
        seq_a: The ``seq`` of it in the first run, or None.
        seq_b: Likewise in the second.
    """

    source: str
    index: int
    before: list[str]
    a: list[str]
    b: list[str]
    seq_a: int | None
    seq_b: int | None


@attrs.define(kw_only=True)
class Difference:
    """What tells two runs apart.

    Attributes:
        a: Totals of the first run.
        b: Totals of the second.
        events: Name of the event to how many each run has.
        parting: The first point where they part, or None.
        bytes_differ: Whether a transition of one kind moved or elided another number of bytes in all.
    """

    a: Summary
    b: Summary
    events: dict[str, tuple[int, int]]
    parting: Parting | None
    bytes_differ: bool

    @property
    def is_same_shape(self) -> bool:
        """Whether both runs did the same things in the same order."""
        return self.parting is None

    def transitions(self) -> dict[tuple[str, str, str], tuple[Total, Total]]:
        """(policy, from mode, to mode) to the totals of each run."""
        keys = dict.fromkeys((*self.a.transitions, *self.b.transitions))
        return {key: (self.a.transitions.get(key, Total()), self.b.transitions.get(key, Total())) for key in keys}

    def scopes(self) -> dict[tuple[str, str], tuple[Total, Total]]:
        """(policy, mode) to the totals of each run."""
        keys = dict.fromkeys((*self.a.scopes, *self.b.scopes))
        return {key: (self.a.scopes.get(key, Total()), self.b.scopes.get(key, Total())) for key in keys}

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "same_shape": self.is_same_shape,
            "bytes_differ": self.bytes_differ,
            "parting": None if self.parting is None else attrs.asdict(self.parting),
            "events": [{"event": name, "a": a, "b": b} for name, (a, b) in self.events.items()],
            "transitions": [
                {"policy": key[0], "from_mode": key[1], "to_mode": key[2], "a": a.to_json(), "b": b.to_json()}
                for key, (a, b) in self.transitions().items()
            ],
            "scopes": [
                {"policy": key[0], "mode": key[1], "a": a.to_json(), "b": b.to_json()}
                for key, (a, b) in self.scopes().items()
            ],
        }


def diff(a: Iterable[dict[str, Any]], b: Iterable[dict[str, Any]]) -> Difference:
    """Compare two runs, each given as plain records in the order of their time."""
    shapes: dict[tuple[Any, ...], int] = {}
    first, second = _Sequences(shapes), _Sequences(shapes)
    summary_a, summary_b = summarize(first.watch(a)), summarize(second.watch(b))
    names = sorted({*first.events, *second.events})
    kinds = dict.fromkeys((*summary_a.transitions, *summary_b.transitions))
    return Difference(
        a=summary_a,
        b=summary_b,
        events={name: (first.events.get(name, 0), second.events.get(name, 0)) for name in names},
        parting=_part(first, second, list(shapes)),
        bytes_differ=any(_bytes(summary_a, key) != _bytes(summary_b, key) for key in kinds),
    )


def _bytes(summary: Summary, key: tuple[str, str, str]) -> tuple[int, int]:
    total = summary.transitions.get(key, Total())
    return total.bytes_moved, total.bytes_elided


class _Sequence:
    """One source's records: a number for the shape of each, its step, and where it was. A million take 32 megabytes."""

    def __init__(self) -> None:
        self.shapes: array[int] = array("q")
        self.steps: array[int] = array("q")
        self.seqs: array[int] = array("q")
        self.times: array[float] = array("d")

    def __len__(self) -> int:
        return len(self.shapes)


class _Sequences:
    """The sequences of a run by source."""

    def __init__(self, shapes: dict[tuple[Any, ...], int]) -> None:
        self._shapes = shapes
        self.events: dict[str, int] = {}
        self.by_source: dict[str, _Sequence] = {}

    def watch(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Hand the records on."""
        start = None
        for record in records:
            start = record["time_ns"] if start is None else start
            self.events[record["event"]] = self.events.get(record["event"], 0) + 1
            sequence = self.by_source.get(record["source"])
            if sequence is None:
                sequence = self.by_source[record["source"]] = _Sequence()
            step = record.get("step")
            sequence.shapes.append(self._shapes.setdefault(_shape(record), len(self._shapes)))
            sequence.steps.append(_NO_STEP if step is None else step)
            sequence.seqs.append(record["seq"])
            sequence.times.append((record["time_ns"] - start) / 1e9)
            yield record


def _shape(record: dict[str, Any]) -> tuple[Any, ...]:
    fields = ((key, record[key]) for key in _SHAPE if key in record)
    return (
        record["event"],
        record.get("policy"),
        bool(record.get("error")),
        *((key, value if isinstance(value, (str, bool)) else words(value)) for key, value in fields),
    )


def _part(a: _Sequences, b: _Sequences, shapes: list[tuple[Any, ...]]) -> Parting | None:
    """Find the earliest point, by the time of the run that gets there first, at which a source's sequences part."""
    found: list[tuple[float, Parting]] = []
    for source in dict.fromkeys((*a.by_source, *b.by_source)):
        left, right = a.by_source.get(source, _Sequence()), b.by_source.get(source, _Sequence())
        if left.shapes == right.shapes and left.steps == right.steps:
            continue
        pairs = zip(
            zip(left.shapes, left.steps, strict=True), zip(right.shapes, right.steps, strict=True), strict=False
        )
        shorter = min(len(left), len(right))
        index = next((number for number, (one, other) in enumerate(pairs) if one != other), shorter)
        at = min(run.times[index] for run in (left, right) if index < len(run))
        found.append((at, _parting(source, index, left, right, shapes)))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _parting(source: str, index: int, a: _Sequence, b: _Sequence, shapes: list[tuple[Any, ...]]) -> Parting:
    def tell(run: _Sequence, start: int, stop: int) -> list[str]:
        pairs = zip(run.shapes[start:stop], run.steps[start:stop], strict=True)
        return [_words(shapes[number], step) for number, step in pairs]

    return Parting(
        source=source,
        index=index,
        before=tell(a, max(0, index - _NUM_CONTEXT), index),
        a=tell(a, index, index + _NUM_CONTEXT),
        b=tell(b, index, index + _NUM_CONTEXT),
        seq_a=a.seqs[index] if index < len(a) else None,
        seq_b=b.seqs[index] if index < len(b) else None,
    )


def _words(shape: tuple[Any, ...], step: int) -> str:
    event, policy, is_failed, *fields = shape
    parts = [event]
    if policy is not None:
        parts.append(f"of {policy}")
    if step != _NO_STEP:
        parts.append(f"in step {step}")
    parts += [f"{key}={value}" for key, value in fields]
    return " ".join([*parts, "FAILED"] if is_failed else parts)
