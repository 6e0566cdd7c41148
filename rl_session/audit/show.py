"""Which part of a log to show, and the tree of it: one line for each scope, transition, call and event.

Decides what is shown and in which order, not how it looks: a line is a list of words with what they mean.
"""

from __future__ import annotations

from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import attrs

from rl_session.audit.naming import rank_of
from rl_session.audit.nodes import Clock, Move, Node, NodeBuilder, own_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_STARTS = {"scope": ("scope.entered", "scope.exited"), "call": ("call.finished",)}


@attrs.define(kw_only=True)
class Filters:
    """What to show; None or empty means no limit.

    Attributes:
        policies: Names of policies; ``*`` and ``?`` match as in a shell.
        rank: Records of this rank only.
        steps: First and last step number.
        events: Names of events, likewise with ``*``.
        since: Seconds since the first record, or a wall clock.
        until: Likewise.
    """

    policies: tuple[str, ...] = ()
    rank: int | None = None
    steps: tuple[int, int] | None = None
    events: tuple[str, ...] = ()
    since: float | datetime | None = None
    until: float | datetime | None = None

    @property
    def is_empty(self) -> bool:
        """Whether everything is shown."""
        return self == Filters()

    def takes(self, record: dict[str, Any], at: float) -> bool:
        """Whether a record passes; ``at`` is its time in seconds since the first record."""
        return (
            self._has_policy(record.get("policy"))
            and (self.rank is None or rank_of(record["source"]) == self.rank)
            and self._has_step(record.get("step"))
            and (not self.events or self._has_event(record["event"]))
            and not self._is_before(record["time_ns"], at)
            and not self.is_after(record["time_ns"], at)
        )

    def takes_node(self, node: Node, start_ns: int) -> bool:
        """Whether a node itself passes; what is inside it is asked for itself."""
        names = _STARTS.get(node.kind, (node.record["event"],))
        if node.kind == "transition":
            names = ("transition.started", node.record["event"])
        end = node.end if node.end is not None else float("inf")
        begin_ns = start_ns + int(node.start * 1e9)
        end_ns = start_ns + int(end * 1e9) if node.end is not None else 2**63
        return (
            self._has_policy(node.policy)
            and (self.rank is None or rank_of(node.source) == self.rank)
            and self._has_step(node.step)
            and (not self.events or any(map(self._has_event, names)))
            and not self._is_before(end_ns, end)
            and not self.is_after(begin_ns, node.start)
        )

    def takes_move(self, move: Move) -> bool:
        """Whether a move is asked for by name: by its rank, or by its event."""
        if self.rank is not None:
            return rank_of(move.source) == self.rank and (not self.events or self._has_event("component.moved"))
        return bool(self.events) and self._has_event("component.moved")

    @property
    def wants_moves(self) -> bool:
        """Whether single moves are asked for."""
        return bool(self.events) and self._has_event("component.moved")

    def is_after(self, time_ns: int, at: float) -> bool:
        """Whether a record is later than anything wanted."""
        return self.until is not None and _later(time_ns, at, self.until)

    def _is_before(self, time_ns: int, at: float) -> bool:
        return self.since is not None and not _later(time_ns, at, self.since) and not _same(time_ns, at, self.since)

    def _has_policy(self, policy: str | None) -> bool:
        return not self.policies or any(fnmatchcase(policy or "", name) for name in self.policies)

    def _has_step(self, step: int | None) -> bool:
        return self.steps is None or (step is not None and self.steps[0] <= step <= self.steps[1])

    def _has_event(self, name: str) -> bool:
        return any(fnmatchcase(name, wanted) for wanted in self.events)


def _later(time_ns: int, at: float, limit: float | datetime) -> bool:
    return time_ns / 1e9 > limit.timestamp() if isinstance(limit, datetime) else at > limit


def _same(time_ns: int, at: float, limit: float | datetime) -> bool:
    return time_ns / 1e9 == limit.timestamp() if isinstance(limit, datetime) else at == limit


def parse_time(text: str) -> float | datetime:
    """Read a limit: seconds since the first record, or a date and time (local time unless it says otherwise).

    Raises:
        ValueError: It is neither.
    """
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).astimezone()


def parse_steps(text: str) -> tuple[int, int]:
    """Read ``7`` or ``3-9``.

    Raises:
        ValueError: It is neither.
    """
    first, dash, last = text.partition("-")
    return (int(first), int(last)) if dash else (int(first), int(first))


def filter_records(records: Iterable[dict[str, Any]], filters: Filters) -> Iterator[dict[str, Any]]:
    """Yield the records that pass."""
    clock = Clock()
    for record in records:
        if filters.takes(record, clock.seconds(record)):
            yield record


@attrs.define(kw_only=True)
class Group:
    """What happened in one step of the session, or between two: outermost nodes, in the order of their start."""

    step: int | None
    nodes: list[Node] = attrs.field(factory=list)

    @property
    def span(self) -> tuple[float, float]:
        """From the first start to the last end, in seconds since the first record."""
        return min(n.start for n in self.nodes), max(n.start if n.end is None else n.end for n in self.nodes)

    @property
    def moving(self) -> float:
        """Seconds in transitions."""
        inside = (node for root in self.nodes for node in root.walk() if node.kind == "transition")
        return sum(node.seconds or 0.0 for node in inside)


class Grouper:
    """Takes records one by one, and gives back the groups that are complete, filtered."""

    def __init__(self, filters: Filters) -> None:
        self._filters = filters
        self._builder = NodeBuilder()
        self._group: Group | None = None

    @property
    def start_ns(self) -> int:
        """Wall clock of the first record."""
        return self._builder.clock.start_ns or 0

    def feed(self, record: dict[str, Any]) -> Iterator[Group]:
        """Take a record."""
        for node in self._builder.feed(record):
            yield from self._add(node)

    def finish(self) -> Iterator[Group]:
        """Give what is left, with what never ended."""
        for node in self._builder.finish():
            yield from self._add(node)
        if self._group is not None:
            yield self._close(self._group)
            self._group = None

    def _add(self, root: Node) -> Iterator[Group]:
        node = prune(root, self._filters, self.start_ns)
        if node is None:
            return
        if self._group is not None and self._group.step != node.step:
            yield self._close(self._group)
            self._group = None
        if self._group is None:
            self._group = Group(step=node.step)
        self._group.nodes.append(node)

    @staticmethod
    def _close(group: Group) -> Group:
        group.nodes.sort(key=lambda node: node.start)
        return group


def prune(node: Node, filters: Filters, start_ns: int) -> Node | None:
    """Return the node with only those inside it that pass; None where neither it nor any of them does."""
    if filters.is_empty:
        return node
    if node.kind == "transition" and (filters.rank is not None or filters.wants_moves):
        return _prune_transition(node, filters, start_ns)
    children = [kept for child in node.children if (kept := prune(child, filters, start_ns)) is not None]
    if not children and not filters.takes_node(node, start_ns):
        return None
    return attrs.evolve(node, children=children)


def _prune_transition(node: Node, filters: Filters, start_ns: int) -> Node | None:
    children = [kept for child in node.children if (kept := prune(child, filters, start_ns)) is not None]
    rank_free = attrs.evolve(filters, rank=None, events=())
    moves = [move for move in node.moves if filters.takes_move(move)] if rank_free.takes_node(node, start_ns) else []
    if not moves and not children and not filters.takes_node(node, start_ns):
        return None
    return attrs.evolve(node, children=children, moves=moves)


def detail(node: Node) -> dict[str, Any]:
    """Return what an event says, without what is empty or said elsewhere."""
    fields = own_fields(node.record)
    return {
        key: value
        for key, value in fields.items()
        if key not in ("seconds", "error", "cause") and value is not None and value not in ([], {}, "")
    }
