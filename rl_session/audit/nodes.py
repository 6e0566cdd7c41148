"""Records to nodes: scopes with the transitions, calls and events that happened inside them.

A node is what a person calls one thing ("the way into training_mode at step 7"), made of several lines of the log. Works
on plain dicts as they lie on the lines, so that a damaged or a later version's field costs that field alone. Streams: a
node is handed out when its outermost scope has ended. Draws nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rl_session.audit.envelope import ENVELOPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Kind = Literal["scope", "transition", "call", "event"]
Status = Literal["ok", "failed", "rolled back", "unfinished"]

# A rank's line may be merged in after the driver's end of the transition: this many ended ones still take moves.
_NUM_REMEMBERED = 64
# Scopes nested deeper than any program's are drawn at this depth.
_MAX_DEPTH = 32
# A number beyond these is damage; sums of what is left fit into JSON's integers.
_MOST_BYTES = 2**50
_MOST_SECONDS = 1e10
_ENDINGS: dict[str, Status] = {
    "transition.committed": "ok",
    "transition.rolled_back": "rolled back",
    "transition.failed": "failed",
}
#: Events that tell of something gone wrong.
FAILURES = frozenset({"guard.rejected", "policy.faulted", "worker.lost", "step.aborted"})
_ENVELOPE = frozenset(ENVELOPE)


def whole(value: object) -> int:
    """Return a count from a line, 0 where there is none."""
    return min(max(value, -_MOST_BYTES), _MOST_BYTES) if type(value) is int else 0


def real(value: object) -> float:
    """Return a number from a line, 0.0 where there is none (NaN is written as null)."""
    return min(max(float(value), -_MOST_SECONDS), _MOST_SECONDS) if isinstance(value, (int, float)) else 0.0


def words(value: object) -> str:
    """Return a text from a line, empty where there is none."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def _scope_key(record: dict[str, Any]) -> tuple[str, int]:
    # Each process that has a handle numbers its own scopes.
    return record["source"], whole(record.get("scope_id"))


def own_fields(record: dict[str, Any]) -> dict[str, Any]:
    """Return the event's own fields, without the envelope."""
    return {key: value for key, value in record.items() if key not in _ENVELOPE}


class Clock:
    """Seconds since the first record.

    Each source's monotonic clock is tied to its wall clock once, at its first record, so that a wall clock that is set
    during the run bends nothing.
    """

    def __init__(self) -> None:
        self._offsets: dict[str, int] = {}
        #: Wall clock of the first record, nanoseconds since 1970.
        self.start_ns: int | None = None

    def seconds(self, record: dict[str, Any]) -> float:
        """Return when the record was written."""
        if self.start_ns is None:
            self.start_ns = record["time_ns"]
        offset = self._offsets.get(record["source"])
        if offset is None:
            offset = self._offsets[record["source"]] = record["time_ns"] - record["mono_ns"] - self.start_ns
        return float(record["mono_ns"] + offset) / 1e9


@attrs.define(kw_only=True, eq=False)
class Move:
    """One ``component.moved``."""

    source: str
    component: str
    from_tier: str
    to_tier: str
    nbytes: int
    seconds: float
    elided: bool
    end: float


@attrs.define(kw_only=True, eq=False)
class Node:
    """One scope, transition, call or other event.

    Attributes:
        kind: What it is.
        name: Mode of a scope, method of a call, else the event's name.
        policy: The policy concerned, or None.
        source: Who wrote it.
        step: The session's step number, or None.
        start: Seconds since the first record.
        end: Likewise; None while it is unfinished.
        depth: How many scopes of its policy are around it.
        status: How it ended.
        error: What went wrong, or empty.
        record: The record that ended it, or began it while it is unfinished.
        entered: For a scope: when its entry had committed. None when it never was.
        call_site: For a scope.
        from_mode: For a transition.
        to_mode: For a transition.
        reason: For a transition.
        moves: For a transition: what moved, in the order of the log.
        children: What happened inside.
    """

    kind: Kind
    name: str
    policy: str | None
    source: str
    step: int | None
    start: float
    end: float | None = None
    depth: int = 0
    status: Status = "ok"
    error: str = ""
    record: dict[str, Any]
    entered: float | None = None
    call_site: str = ""
    from_mode: str = ""
    to_mode: str = ""
    reason: str = ""
    moves: list[Move] = attrs.field(factory=list)
    children: list[Node] = attrs.field(factory=list)

    @property
    def seconds(self) -> float | None:
        """How long it took, None while it is unfinished."""
        return None if self.end is None else self.end - self.start

    @property
    def bytes_moved(self) -> int:
        """Bytes copied, by this transition or by those inside."""
        own = sum(move.nbytes for move in self.moves if not move.elided)
        return own + sum(child.bytes_moved for child in self.children)

    @property
    def bytes_elided(self) -> int:
        """Bytes that needed no copy, likewise."""
        own = sum(move.nbytes for move in self.moves if move.elided)
        return own + sum(child.bytes_elided for child in self.children)

    def lay_out(self) -> list[tuple[Move, float, float]]:
        """Return each move with its start and end.

        A source writes its moves when all of them are done, so that their records say how long each took and only the
        last one's says when: the others are laid before it, one after another.
        """
        laid: list[tuple[Move, float, float]] = []
        following: dict[str, float] = {}
        for move in reversed(self.moves):
            end = min(move.end, following.get(move.source, move.end))
            start = following[move.source] = max(min(self.start, end), end - move.seconds)
            laid.append((move, start, end))
        laid.reverse()
        return laid

    def walk(self) -> Iterator[Node]:
        """Yield this node and all inside it, outer ones first."""
        yield self
        for child in self.children:
            yield from child.walk()


@attrs.define(kw_only=True, eq=False)
class _Open:
    """What is open on one policy."""

    scopes: list[Node] = attrs.field(factory=list)
    by_id: dict[tuple[str, int], Node] = attrs.field(factory=dict)


class NodeBuilder:
    """Takes records one by one and gives back the nodes that are complete."""

    def __init__(self) -> None:
        self.clock = Clock()
        #: When the latest record was written.
        self.now = 0.0
        #: The node that the latest record began or ended.
        self.touched: Node | None = None
        self._policies: dict[str | None, _Open] = {}
        self._transitions: OrderedDict[tuple[str | None, int], Node] = OrderedDict()
        self._roots: set[Node] = set()
        self._handlers: dict[str, Callable[[dict[str, Any], float], list[Node]]] = {
            "scope.entered": self._scope_entered,
            "scope.exited": self._scope_exited,
            "transition.started": self._transition_started,
            "transition.committed": self._transition_ended,
            "transition.rolled_back": self._transition_ended,
            "transition.failed": self._transition_ended,
            "component.moved": self._component_moved,
            "call.finished": self._call_finished,
        }

    def feed(self, record: dict[str, Any]) -> list[Node]:
        """Take a record; return the outermost nodes that it completed."""
        at = self.clock.seconds(record)
        self.now = max(self.now, at)
        return self._handlers.get(record["event"], self._event)(record, at)

    def finish(self) -> list[Node]:
        """Return what was never completed, outermost nodes only."""
        roots = sorted(self._roots, key=lambda node: node.start)
        self._roots.clear()
        return roots

    # -- placing -------------------------------------------------------------------------------------------------

    def _of(self, policy: str | None) -> _Open:
        found = self._policies.get(policy)
        if found is None:
            found = self._policies[policy] = _Open()
        return found

    def _place(self, node: Node, parent: Node | None) -> list[Node]:
        """Hang a node below its parent; one without a parent is a root, given back at once if it is complete."""
        if parent is not None:
            parent.children.append(node)
            return []
        if node.end is None:
            self._roots.add(node)
            return []
        return [node]

    def _complete(self, node: Node) -> list[Node]:
        if node in self._roots:
            self._roots.remove(node)
            return [node]
        return []

    def _node(self, kind: Kind, name: str, record: dict[str, Any], start: float, **fields: Any) -> Node:
        return Node(
            kind=kind,
            name=name,
            policy=record.get("policy"),
            source=record["source"],
            step=record.get("step"),
            start=start,
            record=record,
            **fields,
        )

    def _parent(self, record: dict[str, Any]) -> tuple[Node | None, int]:
        """The scope that a record belongs to: the one it names, else the innermost one of its policy."""
        open_ = self._of(record.get("policy"))
        named = open_.by_id.get(_scope_key(record))
        parent = named or (open_.scopes[-1] if open_.scopes else None)
        return parent, 0 if parent is None else parent.depth + 1

    # -- scopes --------------------------------------------------------------------------------------------------

    def _open_scope(self, record: dict[str, Any], at: float, name: str) -> Node:
        """Begin a scope at its first sign, which is the transition that enters it."""
        open_ = self._of(record.get("policy"))
        depth = min(len(open_.scopes), _MAX_DEPTH)
        outer = open_.scopes[depth - 1] if depth else None
        scope = self._node("scope", name, record, at, status="unfinished", depth=depth)
        self._place(scope, outer)
        open_.scopes.append(scope)
        open_.by_id[_scope_key(record)] = scope
        return scope

    def _scope_entered(self, record: dict[str, Any], at: float) -> list[Node]:
        open_ = self._of(record.get("policy"))
        scope = open_.by_id.get(_scope_key(record))
        if scope is None:
            scope = self._open_scope(record, at, words(record.get("mode")))
        scope.name = words(record.get("mode"))
        scope.entered = at
        scope.call_site = words(record.get("call_site"))
        scope.record = record
        self.touched = scope
        return self._leave_lost(scope, record, at)

    def _leave_lost(self, scope: Node, record: dict[str, Any], at: float) -> list[Node]:
        """Close scopes that cannot be open any more, since the one that was entered lies outside them: their ends are lost."""
        open_ = self._of(record.get("policy"))
        depth = record.get("depth")
        lost = (
            [other for other in open_.scopes if other is not scope][depth:] if type(depth) is int and depth >= 0 else []
        )
        if not lost:
            return []
        for other in lost:
            other.end = at
            open_.scopes.remove(other)
            if scope in other.children:
                other.children.remove(scope)
        open_.by_id = {key: other for key, other in open_.by_id.items() if other not in lost}
        scope.depth = min(len(open_.scopes) - 1, _MAX_DEPTH)
        self._place(scope, open_.scopes[scope.depth - 1] if scope.depth else None)
        return [node for other in lost for node in self._complete(other)]

    def _scope_exited(self, record: dict[str, Any], at: float) -> list[Node]:
        open_ = self._of(record.get("policy"))
        scope = open_.by_id.get(_scope_key(record))
        if scope is None:  # its entry is lost: all that is known is how long it was open
            start = max(0.0, at - real(record.get("seconds")))
            scope = self._open_scope(record, start, words(record.get("mode")))
        scope.error = words(record.get("error"))
        return self._close_scope(scope, record, at)

    def _close_scope(self, scope: Node, record: dict[str, Any], at: float) -> list[Node]:
        open_ = self._of(record.get("policy"))
        scope.end = at
        scope.status = "failed" if scope.error else "ok"
        scope.record = record
        self.touched = scope
        del open_.by_id[_scope_key(record)]
        open_.scopes.remove(scope)
        return self._complete(scope)

    # -- transitions ---------------------------------------------------------------------------------------------

    def _transition_started(self, record: dict[str, Any], at: float) -> list[Node]:
        open_ = self._of(record.get("policy"))
        if record.get("scope_id") is not None and _scope_key(record) not in open_.by_id:
            self._open_scope(record, at, words(record.get("to_mode")))
        parent, depth = self._parent(record)
        node = self._node(
            "transition",
            "transition",
            record,
            at,
            status="unfinished",
            depth=depth,
            from_mode=words(record.get("from_mode")),
            to_mode=words(record.get("to_mode")),
            reason=words(record.get("reason")),
        )
        self._transitions[record.get("policy"), whole(record.get("transition_id"))] = node
        if len(self._transitions) > _NUM_REMEMBERED:
            self._transitions.popitem(last=False)
        return self._place(node, parent)

    def _transition_ended(self, record: dict[str, Any], at: float) -> list[Node]:
        node = self._transitions.get((record.get("policy"), whole(record.get("transition_id"))))
        done: list[Node] = []
        if node is None or node.end is not None:  # its start is lost
            parent, depth = self._parent(record)
            start = max(0.0, at - real(record.get("seconds")))
            node = self._node("transition", "transition", record, start, depth=depth)
            node.end = at
            done = self._place(node, parent)
        node.end = at
        node.record = record
        node.status = _ENDINGS[record["event"]]
        node.error = words(record.get("error"))
        node.from_mode = node.from_mode or words(record.get("from_mode"))
        node.to_mode = node.to_mode or words(record.get("to_mode"))
        done += self._complete(node)
        done += self._give_up_entry(node, record, at)
        self.touched = node
        return done

    def _give_up_entry(self, node: Node, record: dict[str, Any], at: float) -> list[Node]:
        """A scope whose way in failed was never entered: it ends with its transition."""
        scope = self._of(record.get("policy")).by_id.get(_scope_key(record))
        if node.status == "ok" or scope is None or scope.entered is not None:
            return []
        scope.error = node.error or node.status
        return self._close_scope(scope, record, at)

    def _component_moved(self, record: dict[str, Any], at: float) -> list[Node]:
        move = Move(
            source=record["source"],
            component=words(record.get("component")),
            from_tier=words(record.get("from_tier")),
            to_tier=words(record.get("to_tier")),
            nbytes=whole(record.get("nbytes")),
            seconds=real(record.get("seconds")),
            elided=record.get("elided") is True,
            end=at,
        )
        node = self._transitions.get((record.get("policy"), whole(record.get("transition_id"))))
        if node is None:  # a move outside every transition is an event of its own
            done = self._event(record, at)
            target = done[0] if done else self._parent(record)[0]
            if target is not None:
                (target if done else target.children[-1]).moves.append(move)
            return done
        node.moves.append(move)
        return []

    # -- the rest ------------------------------------------------------------------------------------------------

    def _call_finished(self, record: dict[str, Any], at: float) -> list[Node]:
        parent, depth = self._parent(record)
        start = max(0.0, at - real(record.get("seconds")))
        node = self._node("call", words(record.get("method")), record, start, depth=depth)
        node.end = at
        node.error = words(record.get("error"))
        node.status = "failed" if node.error else "ok"
        self.touched = node
        self._adopt(node, parent)
        return self._place(node, parent)

    @staticmethod
    def _adopt(call: Node, parent: Node | None) -> None:
        """Take in the facts that were written while the call ran: their lines come before its own."""
        siblings = [] if parent is None else parent.children
        while siblings and siblings[-1].kind == "event" and siblings[-1].start >= call.start:
            fact = siblings.pop()
            fact.depth += 1
            call.children.insert(0, fact)

    def _event(self, record: dict[str, Any], at: float) -> list[Node]:
        transition = self._transitions.get((record.get("policy"), whole(record.get("transition_id"))))
        parent, depth = (transition, transition.depth + 1) if transition else self._parent(record)
        seconds = 0.0 if record["event"].startswith("session.") else real(record.get("seconds"))
        node = self._node("event", record["event"], record, max(0.0, at - seconds), depth=depth)
        node.end = at
        node.error = words(record.get("error")) or words(record.get("cause"))
        node.status = "failed" if record["event"] in FAILURES or node.error else "ok"
        self.touched = node
        return self._place(node, parent)
