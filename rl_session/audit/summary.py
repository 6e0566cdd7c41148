"""What a run did, in one page: time, bytes, trouble, and who holds the memory at the end.

Reads every record once and keeps totals only, so that a log of any length fits. Works on plain dicts. Draws nothing.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import attrs

from rl_session.audit.nodes import Clock, real, whole, words
from rl_session.audit.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUM_SLOWEST = 5
_NUM_WARNINGS = 50
_NUM_UNFINISHED = 50


@attrs.define(kw_only=True)
class Total:
    """Bytes and seconds of a number of transitions, calls or scopes."""

    count: int = 0
    seconds: float = 0.0
    bytes_moved: int = 0
    bytes_elided: int = 0
    num_failed: int = 0

    @property
    def gb_per_second(self) -> float | None:
        """Bytes moved over the time of the transitions, in 10^9 bytes a second; None where nothing moved."""
        return self.bytes_moved / self.seconds / 1e9 if self.bytes_moved and self.seconds > 0 else None

    def add(self, record: dict[str, Any], seconds: float) -> None:
        """Count one more ending."""
        self.count += 1
        self.seconds += seconds
        self.bytes_moved += whole(record.get("bytes_moved"))
        self.bytes_elided += whole(record.get("bytes_elided"))
        self.num_failed += bool(record.get("error"))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**attrs.asdict(self), "gb_per_second": self.gb_per_second}


@attrs.define(kw_only=True)
class StepTotal:
    """One step of the session's: how long, and how much of it was spent moving."""

    start: float
    end: float
    moving: float = 0.0
    calling: float = 0.0
    bytes_moved: int = 0
    bytes_elided: int = 0

    @property
    def seconds(self) -> float:
        """From its first sign to its last."""
        return self.end - self.start

    @property
    def share_moving(self) -> float:
        """Time in transitions over time; above 1 where policies move at the same time."""
        return self.moving / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**attrs.asdict(self), "seconds": self.seconds, "share_moving": self.share_moving}


@attrs.define(kw_only=True)
class Summary:
    """Totals of a run, or of one step of it.

    Attributes:
        run_id: Which run.
        start_ns: Wall clock of its first record.
        num_records: How many records were counted.
        sources: Who wrote, and how many records.
        seconds: From the first record to the last.
        is_closed: Whether the session said that it ended. False after a crash.
        error: What ended the session, where it says so.
        step: The step that this is of, or None for all.
        scopes: (policy, mode) to totals; nested scopes count in their outer ones as well.
        transitions: (policy, from mode, to mode) to totals.
        calls: (policy, method, mode) to totals.
        steps: Step number to totals.
        slowest: The slowest transitions, slowest first.
        largest: Those that moved the most bytes, likewise.
        rejected: (policy, method, mode, needs) to how often a call was refused.
        warnings: (code, first message, policy) to how often.
        trouble: Lost workers and faulted policies, in words.
        unfinished: What began and did not end, in words.
        memory: Policy to component to tier to bytes, at the last record.
        health: Policy to what is wrong with it; only those with something wrong.
    """

    run_id: str = ""
    start_ns: int = 0
    num_records: int = 0
    sources: dict[str, int] = attrs.field(factory=dict)
    seconds: float = 0.0
    is_closed: bool = False
    error: str | None = None
    step: int | None = None
    scopes: dict[tuple[str, str], Total] = attrs.field(factory=dict)
    transitions: dict[tuple[str, str, str], Total] = attrs.field(factory=dict)
    calls: dict[tuple[str, str, str], Total] = attrs.field(factory=dict)
    steps: dict[int, StepTotal] = attrs.field(factory=dict)
    slowest: list[dict[str, Any]] = attrs.field(factory=list)
    largest: list[dict[str, Any]] = attrs.field(factory=list)
    rejected: dict[tuple[str, str, str, str], int] = attrs.field(factory=dict)
    warnings: dict[tuple[str, str, str], int] = attrs.field(factory=dict)
    trouble: list[str] = attrs.field(factory=list)
    unfinished: list[str] = attrs.field(factory=list)
    memory: dict[str, dict[str, dict[str, int]]] = attrs.field(factory=dict)
    health: dict[str, str] = attrs.field(factory=dict)

    @property
    def moving(self) -> Total:
        """All transitions together."""
        total = Total()
        for part in self.transitions.values():
            total.count += part.count
            total.seconds += part.seconds
            total.bytes_moved += part.bytes_moved
            total.bytes_elided += part.bytes_elided
            total.num_failed += part.num_failed
        return total

    def to_json(self) -> dict[str, Any]:
        """Return plain values, keys of several parts turned into rows."""
        return {
            "run_id": self.run_id,
            "start_ns": self.start_ns,
            "num_records": self.num_records,
            "sources": self.sources,
            "seconds": self.seconds,
            "is_closed": self.is_closed,
            "error": self.error,
            "step": self.step,
            "total": self.moving.to_json(),
            "scopes": _rows(self.scopes, ("policy", "mode")),
            "transitions": _rows(self.transitions, ("policy", "from_mode", "to_mode")),
            "calls": _rows(self.calls, ("policy", "method", "mode")),
            "steps": [{"step": step, **total.to_json()} for step, total in self.steps.items()],
            "slowest": self.slowest,
            "largest": self.largest,
            "rejected": _counts(self.rejected, ("policy", "method", "mode", "needs")),
            "warnings": _counts(self.warnings, ("code", "message", "policy")),
            "trouble": self.trouble,
            "unfinished": self.unfinished,
            "memory": self.memory,
            "health": self.health,
        }


def _rows(table: dict[Any, Total], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{**dict(zip(names, key, strict=True)), **total.to_json()} for key, total in table.items()]


def _counts(table: dict[Any, int], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{**dict(zip(names, key, strict=True)), "count": count} for key, count in table.items()]


def summarize(records: Iterable[dict[str, Any]], *, step: int | None = None) -> Summary:
    """Sum up a run.

    Args:
        records: Plain records in the order of their time.
        step: Count this step only; memory is then as it was at the end of it.
    """
    counter = _Counter(step)
    for record in records:
        if not counter.feed(record):
            break
    return counter.finish()


class _Counter:
    def __init__(self, step: int | None) -> None:
        self._summary = Summary(step=step)
        self._step = step
        self._clock = Clock()
        self._replay = Replay()
        self._first = self._last = 0.0
        self._open_transitions: dict[tuple[str, int], dict[str, Any]] = {}
        self._open_scopes: dict[tuple[str, int], dict[str, Any]] = {}
        self._slowest = _Top()
        self._largest = _Top()
        self._handlers = {
            "scope.entered": self._scope_entered,
            "scope.exited": self._scope_exited,
            "transition.started": self._transition_started,
            "transition.committed": self._transition_ended,
            "transition.rolled_back": self._transition_ended,
            "transition.failed": self._transition_ended,
            "call.finished": self._call_finished,
            "guard.rejected": self._rejected,
            "warning": self._warning,
            "policy.faulted": self._trouble,
            "worker.lost": self._trouble,
            "session.closed": self._session_closed,
        }

    def feed(self, record: dict[str, Any]) -> bool:
        """Take a record; False when no later one can matter."""
        summary = self._summary
        number = record.get("step")
        if self._step is not None and number is not None and number > self._step:
            return False
        at = self._clock.seconds(record)
        self._replay.feed(record)
        if self._step is not None and number != self._step:
            # What is open must be known even where it is not counted.
            if record["event"].startswith(("scope.", "transition.")):
                self._follow(record)
            return True
        if not summary.num_records:
            summary.run_id = record["run_id"]
            self._first = at
        summary.num_records += 1
        source = record["source"]
        summary.sources[source] = summary.sources.get(source, 0) + 1
        self._last = max(self._last, at)
        if number is not None:
            self._widen(number, at - (real(record.get("seconds")) if record["event"] == "call.finished" else 0.0), at)
        handle = self._handlers.get(record["event"])
        if handle is not None:
            handle(record, at)
        return True

    def finish(self) -> Summary:
        """Return the totals, with what never ended."""
        summary = self._summary
        summary.start_ns = self._clock.start_ns or 0
        summary.seconds = max(0.0, self._last - self._first)
        for record in self._open_transitions.values():
            summary.unfinished.append(
                f"transition {record.get('transition_id')} of {_policy(record)}: {words(record.get('reason'))}"
            )
        for record in self._open_scopes.values():
            where = words(record.get("call_site"))
            summary.unfinished.append(f"scope {words(record.get('mode'))} of {_policy(record)}, entered at {where}")
        del summary.unfinished[_NUM_UNFINISHED:]
        summary.slowest = self._slowest.rows()
        summary.largest = self._largest.rows()
        for name, policy in self._replay.state.policies.items():
            if policy.health == "closed":
                continue
            summary.memory[name] = {
                words(component): {words(tier): whole(nbytes) for tier, nbytes in tiers.items()}
                for component, tiers in policy.components.items()
            }
            if policy.health != "ok" or not policy.is_certain:
                summary.health[name] = policy.health if policy.health != "ok" else "uncertain"
        return summary

    def _widen(self, number: int, start: float, end: float) -> None:
        total = self._summary.steps.get(number)
        if total is None:
            self._summary.steps[number] = StepTotal(start=start, end=end)
        else:
            total.start = min(total.start, start)
            total.end = max(total.end, end)

    def _follow(self, record: dict[str, Any]) -> None:
        key = (_policy(record), whole(record.get("transition_id")))
        match record["event"]:
            case "scope.entered":
                self._scope_entered(record, 0.0)
            case "scope.exited":
                self._open_scopes.pop((_policy(record), whole(record.get("scope_id"))), None)
            case "transition.started":
                self._open_transitions[key] = record
            case _:
                self._open_transitions.pop(key, None)

    def _scope_entered(self, record: dict[str, Any], _at: float) -> None:
        self._open_scopes[_policy(record), whole(record.get("scope_id"))] = record

    def _scope_exited(self, record: dict[str, Any], _at: float) -> None:
        self._open_scopes.pop((_policy(record), whole(record.get("scope_id"))), None)
        key = (_policy(record), words(record.get("mode")))
        self._summary.scopes.setdefault(key, Total()).add(record, real(record.get("seconds")))

    def _transition_started(self, record: dict[str, Any], _at: float) -> None:
        self._open_transitions[_policy(record), whole(record.get("transition_id"))] = record

    def _transition_ended(self, record: dict[str, Any], at: float) -> None:
        policy = _policy(record)
        started = self._open_transitions.pop((policy, whole(record.get("transition_id"))), None)
        seconds = real(record.get("seconds"))
        if not seconds and started is not None:
            seconds = max(0.0, at - self._clock.seconds(started))
        key = (policy, words(record.get("from_mode")), words(record.get("to_mode")))
        total = self._summary.transitions.setdefault(key, Total())
        total.add(record, seconds)
        if record["event"] != "transition.committed" and not record.get("error"):
            total.num_failed += 1
        number = record.get("step")
        if number is not None:
            step = self._summary.steps[number]
            step.moving += seconds
            step.bytes_moved += whole(record.get("bytes_moved"))
            step.bytes_elided += whole(record.get("bytes_elided"))
        row = (record, started, at - seconds, seconds)
        self._slowest.offer(seconds, row)
        if moved := whole(record.get("bytes_moved")):
            self._largest.offer(moved, row)

    def _call_finished(self, record: dict[str, Any], _at: float) -> None:
        key = (_policy(record), words(record.get("method")), words(record.get("mode")))
        seconds = real(record.get("seconds"))
        self._summary.calls.setdefault(key, Total()).add(record, seconds)
        number = record.get("step")
        if number is not None:
            self._summary.steps[number].calling += seconds

    def _rejected(self, record: dict[str, Any], _at: float) -> None:
        needs = record.get("needs")
        wanted = ", ".join(map(words, needs)) if isinstance(needs, list) else words(needs)
        key = (_policy(record), words(record.get("method")), words(record.get("mode")), wanted)
        self._summary.rejected[key] = self._summary.rejected.get(key, 0) + 1

    def _warning(self, record: dict[str, Any], _at: float) -> None:
        code, policy = words(record.get("code")), _policy(record)
        for key in self._summary.warnings:
            if key[0] == code and key[2] == policy:
                self._summary.warnings[key] += 1
                return
        if len(self._summary.warnings) < _NUM_WARNINGS:
            self._summary.warnings[code, words(record.get("message")), policy] = 1

    def _trouble(self, record: dict[str, Any], at: float) -> None:
        who = f"rank {record.get('rank')} lost" if record["event"] == "worker.lost" else "faulted"
        if len(self._summary.trouble) < _NUM_WARNINGS:
            self._summary.trouble.append(f"{_policy(record)} {who} at {at:.3f} s: {words(record.get('cause'))}")

    def _session_closed(self, record: dict[str, Any], _at: float) -> None:
        self._summary.is_closed = True
        self._summary.error = words(record.get("error")) or None


class _Top:
    """The few largest of many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._count = 0

    def offer(self, value: float, row: Any) -> None:
        if len(self._heap) == _NUM_SLOWEST and value <= self._heap[0][0]:
            return
        self._count += 1  # earlier ones win a tie, and rows are never compared
        heapq.heappush(self._heap, (value, -self._count, row))
        if len(self._heap) > _NUM_SLOWEST:
            heapq.heappop(self._heap)

    def rows(self) -> list[dict[str, Any]]:
        return [_transition_row(*row) for _, _, row in sorted(self._heap, reverse=True, key=lambda entry: entry[:2])]


def _transition_row(
    record: dict[str, Any], started: dict[str, Any] | None, start: float, seconds: float
) -> dict[str, Any]:
    moved = whole(record.get("bytes_moved"))
    return {
        "transition_id": record.get("transition_id"),
        "policy": record.get("policy"),
        "step": record.get("step"),
        "at": start,
        "seconds": seconds,
        "from_mode": words(record.get("from_mode")),
        "to_mode": words(record.get("to_mode")),
        "reason": words(started.get("reason")) if started else "",
        "outcome": record["event"].removeprefix("transition."),
        "bytes_moved": moved,
        "bytes_elided": whole(record.get("bytes_elided")),
        "gb_per_second": moved / seconds / 1e9 if moved and seconds > 0 else None,
    }


def _policy(record: dict[str, Any]) -> str:
    return record.get("policy") or "-"
