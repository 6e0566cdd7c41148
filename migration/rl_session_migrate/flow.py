"""Control flow: a graph over the statements of one function, a data-flow solver, and what each node evaluates in order.

The graph has one node for each piece that runs in one go: a simple statement, a test, the head of a loop, the entry
and the exit of a ``with``, the start of a handler. ``finally`` blocks and ``with`` exits stand once for each way through
them, so that a ``return`` inside ``try`` reaches the function's end and not the code behind. Knows nothing of tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum, auto
from itertools import pairwise
from typing import Generic, TypeVar

import attrs
import libcst as cst

from rl_session_migrate.outline import Function
from rl_session_migrate.tree import children

__all__ = [
    "Direction",
    "Edge",
    "Graph",
    "How",
    "Node",
    "Part",
    "Summaries",
    "build",
    "evaluated",
    "on_every_path",
    "on_some_path",
    "solve",
]

V = TypeVar("V")
S = TypeVar("S", bound=Hashable)


class Part(Enum):
    """What a node stands for."""

    ENTRY = auto()
    EXIT = auto()
    """The function returns."""
    RAISE = auto()
    """The function ends by an exception."""
    STATEMENT = auto()
    TEST = auto()
    """The test of ``if`` or ``while``, the guard of a ``case``."""
    ITERATE = auto()
    """The head of ``for``: takes the next element and binds the target."""
    ITERABLE = auto()
    """Evaluates what ``for`` goes over, once."""
    ENTER = auto()
    """Enters one item of a ``with``."""
    LEAVE = auto()
    """Leaves one item of a ``with``, by whichever way."""
    SUBJECT = auto()
    """The subject of ``match``, and each pattern tried."""
    HANDLER = auto()
    """An ``except`` clause is tried."""
    JOIN = auto()
    """Nothing happens; paths meet."""


class How(StrEnum):
    """Why control goes along an edge."""

    NEXT = "next"
    TRUE = "true"
    FALSE = "false"
    BACK = "back"
    """To the head of a loop, for another round."""
    EXCEPTION = "exception"
    """The node may have done all, some or none of its work."""


@attrs.frozen(eq=False)
class Node:
    """One piece of a function that runs in one go.

    Attributes:
        index: Its number in the graph.
        part: What it stands for.
        ast: What it evaluates or stands for: a statement, a test, a ``with`` item, a handler.
        within: The compound statement it belongs to, where it is part of one.
    """

    index: int
    part: Part
    ast: cst.CSTNode | None = None
    within: cst.CSTNode | None = None


@attrs.frozen
class Edge:
    """One way from a node to another."""

    source: int
    target: int
    how: How = How.NEXT


@attrs.define(eq=False)
class Graph:
    """The control-flow graph of one function.

    Attributes:
        function: Whose graph it is.
        nodes: All nodes; ``nodes[i].index == i``. Nodes that nothing reaches may be among them.
        edges: All edges out of each node.
        back: All edges into each node.
        entry: Where it begins.
        exit: Where it returns.
        raising: Where it ends by an exception.
    """

    function: Function
    nodes: list[Node] = attrs.field(factory=list)
    edges: list[list[Edge]] = attrs.field(factory=list)
    back: list[list[Edge]] = attrs.field(factory=list)
    entry: int = 0
    exit: int = 0
    raising: int = 0
    _of_ast: dict[cst.CSTNode, list[int]] = attrs.field(factory=dict)

    def add(self, part: Part, ast: cst.CSTNode | None = None, within: cst.CSTNode | None = None) -> int:
        """Add a node."""
        index = len(self.nodes)
        self.nodes.append(Node(index, part, ast, within))
        self.edges.append([])
        self.back.append([])
        if ast is not None:
            self._of_ast.setdefault(ast, []).append(index)
        return index

    def link(self, source: int, target: int, how: How = How.NEXT) -> None:
        """Add an edge, once."""
        edge = Edge(source, target, how)
        if edge not in self.edges[source]:
            self.edges[source].append(edge)
            self.back[target].append(edge)

    def nodes_of(self, ast: cst.CSTNode) -> Sequence[int]:
        """The nodes that stand for a piece of source; several inside ``finally``."""
        return self._of_ast.get(ast, ())

    def reachable(self) -> frozenset[int]:
        """The nodes that some path from the entry reaches."""
        seen = {self.entry}
        todo = [self.entry]
        while todo:
            for edge in self.edges[todo.pop()]:
                if edge.target not in seen:
                    seen.add(edge.target)
                    todo.append(edge.target)
        return frozenset(seen)


def evaluated(node: Node) -> Iterator[cst.CSTNode]:
    """The expressions that a node evaluates, arguments before the call that takes them.

    The bodies of functions, lambdas and classes are left out: they run elsewhere. Of a compound statement only the part
    that the node stands for is looked at.
    """
    ast = node.ast
    if ast is None or node.part in (Part.LEAVE, Part.JOIN):
        return
    roots: Iterable[cst.CSTNode]
    match node.part, ast:
        case Part.ITERATE, cst.For():
            roots = (ast.target,)
        case Part.ENTER, cst.WithItem():
            roots = (ast.item, *((ast.asname,) if ast.asname is not None else ()))
        case Part.HANDLER, cst.ExceptHandler() | cst.ExceptStarHandler():
            roots = (ast.type,) if ast.type is not None else ()
        case _, cst.FunctionDef() | cst.ClassDef():
            roots = ast.decorators
        case _:
            roots = (ast,)
    for root in roots:
        yield from _post_order(root)


_OWN_ORDER = frozenset({cst.Lambda, cst.FunctionDef, cst.ClassDef, cst.Assign, cst.AnnAssign, cst.AugAssign})


def _post_order(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if type(node) not in _OWN_ORDER:
        for child in children(node):
            yield from _post_order(child)
        yield node
        return
    match node:
        case cst.Lambda() | cst.FunctionDef() | cst.ClassDef():
            pass
        case cst.Assign():  # the value comes first
            yield from _post_order(node.value)
            for target in node.targets:
                yield from _post_order(target)
        case cst.AnnAssign():
            if node.value is not None:
                yield from _post_order(node.value)
            yield from _post_order(node.target)
        case cst.AugAssign():
            yield from _post_order(node.value)
            yield from _post_order(node.target)
    yield node


# -- building ----------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Frame:
    """Something around the code being built that a jump must pass.

    Exactly one of the fields is set: a loop (its two targets), a ``finally`` or ``with`` (how to build the way through), or
    handlers (where an exception goes).
    """

    loop: tuple[int, int] | None = None
    """(where ``break`` goes, where ``continue`` goes)"""
    passage: Callable[[int], int] | None = None
    """Builds the code on the way out, given where it must lead; returns where it begins."""
    handlers: tuple[int, ...] = ()


def build(function: Function) -> Graph:
    """The control-flow graph of a function, a lambda or a module's body."""
    return _Builder(function).graph


class _Builder:
    """Builds a graph front to back. ``self.here`` holds the loose ends that the next node is linked to."""

    def __init__(self, function: Function) -> None:
        graph = self.graph = Graph(function)
        graph.entry = graph.add(Part.ENTRY)
        graph.exit = graph.add(Part.EXIT)
        graph.raising = graph.add(Part.RAISE)
        self.frames: list[_Frame] = []
        self.here: list[tuple[int, How]] = [(graph.entry, How.NEXT)]
        self.passages: dict[tuple[_Frame, int], int] = {}
        node = function.node
        if isinstance(node, cst.Lambda):
            self.here = [(self.step(Part.STATEMENT, node.body), How.NEXT)]
        elif isinstance(node, cst.Module):
            self.statements(node.body)
        else:
            self.block(node.body)
        self.join(graph.exit)

    # -- primitives ----------------------------------------------------------------------------------------------

    def join(self, target: int) -> None:
        """Link all loose ends to a node that exists."""
        for source, how in self.here:
            self.graph.link(source, target, how)

    def step(self, part: Part, ast: cst.CSTNode | None = None, within: cst.CSTNode | None = None) -> int:
        """Add a node behind the loose ends; it becomes the only loose end."""
        index = self.graph.add(part, ast, within)
        self.join(index)
        self.here = [(index, How.NEXT)]
        if _may_raise(part, ast):
            self.raise_from(index)
        return index

    def raise_from(self, source: int) -> None:
        """Link a node to wherever an exception goes from here."""
        for target in self.exception_targets(len(self.frames)):
            self.graph.link(source, target, How.EXCEPTION)

    def exception_targets(self, depth: int) -> list[int]:
        """Where an exception goes that is raised inside ``self.frames[:depth]``."""
        for level in range(depth - 1, -1, -1):
            frame = self.frames[level]
            if frame.handlers:
                return list(frame.handlers)
            if frame.passage is not None:
                return [self.through(level, target, key=target) for target in self.exception_targets(level)]
        return [self.graph.raising]

    def through(self, level: int, target: int, *, key: int) -> int:
        """The start of the way through the ``finally`` or ``with`` at ``level`` that leads to ``target``."""
        frame = self.frames[level]
        assert frame.passage is not None
        found = self.passages.get((frame, key))
        if found is None:
            saved = self.here, self.frames
            self.frames = self.frames[:level]
            found = frame.passage(target)
            self.here, self.frames = saved
            self.passages[frame, key] = found
        return found

    def jump(self, depth: int, target: int) -> None:
        """Leave all frames above ``depth`` towards ``target``; nothing is left to follow on."""
        # The innermost passage runs first: build from the outside in.
        for level in range(depth, len(self.frames)):
            if self.frames[level].passage is not None:
                target = self.through(level, target, key=target)
        self.join(target)
        self.here = []

    # -- statements ----------------------------------------------------------------------------------------------

    def block(self, body: cst.BaseSuite) -> None:
        """Build a block."""
        self.statements(body.body)

    def statements(self, body: Sequence[cst.CSTNode]) -> None:
        """Build a run of statements."""
        for statement in body:
            self.statement(statement)

    def statement(self, node: cst.CSTNode) -> None:  # noqa: C901 - one arm a kind of statement
        """Build one statement."""
        match node:
            case cst.SimpleStatementLine():
                for small in node.body:
                    self.statement(small)
            case cst.If():
                self.if_(node)
            case cst.While():
                self.while_(node)
            case cst.For():
                self.for_(node)
            case cst.With():
                self.with_(node, 0)
            case cst.Try() | cst.TryStar():
                self.try_(node)
            case cst.Match():
                self.match_(node)
            case cst.Return():
                self.step(Part.STATEMENT, node)
                self.jump(0, self.graph.exit)
            case cst.Raise():
                self.step(Part.STATEMENT, node)
                self.here = []  # the exception edges of the step are its only ways on
            case cst.Break() | cst.Continue():
                self.leave_loop(node)
            case _:
                self.step(Part.STATEMENT, node)

    def leave_loop(self, node: cst.Break | cst.Continue) -> None:
        """Build ``break`` or ``continue``."""
        self.step(Part.STATEMENT, node)
        for level in range(len(self.frames) - 1, -1, -1):
            loop = self.frames[level].loop
            if loop is not None:
                if isinstance(node, cst.Continue):
                    self.here = [(source, How.BACK) for source, _ in self.here]
                self.jump(level + 1, loop[0] if isinstance(node, cst.Break) else loop[1])
                return
        self.here = []

    def if_(self, node: cst.If) -> None:
        """Build ``if``."""
        test = self.step(Part.TEST, node.test, node)
        always = _constant(node.test)
        self.here = [(test, How.TRUE)] if always is not False else []
        self.block(node.body)
        ends = self.here
        self.here = [(test, How.FALSE)] if always is not True else []
        match node.orelse:
            case cst.If():
                self.if_(node.orelse)
            case cst.Else():
                self.block(node.orelse.body)
        self.here = ends + self.here

    def while_(self, node: cst.While) -> None:
        """Build ``while``."""
        test = self.step(Part.TEST, node.test, node)
        after = self.graph.add(Part.JOIN, None, node)
        self.frames.append(_Frame(loop=(after, test)))
        self.here = [(test, How.TRUE)]
        self.block(node.body)
        self.here = [(source, _back(how)) for source, how in self.here]
        self.join(test)
        self.frames.pop()
        self.here = [(test, How.FALSE)] if _constant(node.test) is not True else []
        if node.orelse is not None:
            self.block(node.orelse.body)
        self.join(after)
        self.here = [(after, How.NEXT)] if self.graph.back[after] else []

    def for_(self, node: cst.For) -> None:
        """Build ``for``."""
        self.step(Part.ITERABLE, node.iter, node)
        head = self.step(Part.ITERATE, node, node)
        after = self.graph.add(Part.JOIN, None, node)
        self.frames.append(_Frame(loop=(after, head)))
        self.here = [(head, How.TRUE)]
        self.block(node.body)
        self.here = [(source, _back(how)) for source, how in self.here]
        self.join(head)
        self.frames.pop()
        self.here = [(head, How.FALSE)]
        if node.orelse is not None:
            self.block(node.orelse.body)
        self.join(after)
        self.here = [(after, How.NEXT)]

    def with_(self, node: cst.With, index: int) -> None:
        """Build ``with``, item by item."""
        if index == len(node.items):
            self.block(node.body)
            return
        item = node.items[index]
        self.step(Part.ENTER, item, node)

        def passage(target: int) -> int:
            leave = self.graph.add(Part.LEAVE, item, node)
            self.graph.link(leave, target)
            return leave

        self.frames.append(_Frame(passage=passage))
        self.with_(node, index + 1)
        self.frames.pop()
        if self.here:
            self.step(Part.LEAVE, item, node)

    def try_(self, node: cst.Try | cst.TryStar) -> None:
        """Build ``try``."""
        if node.finalbody is not None:
            self.frames.append(_Frame(passage=self.passage_of(node.finalbody)))
        handlers: tuple[cst.ExceptHandler | cst.ExceptStarHandler, ...] = tuple(node.handlers)
        starts = [self.graph.add(Part.HANDLER, handler, node) for handler in handlers]
        if starts:
            # An exception tries the handlers in order; the last one that does not match lets it through.
            for first, second in pairwise(starts):
                self.graph.link(first, second, How.FALSE)
            self.frames.append(_Frame(handlers=(starts[0],)))
        self.block(node.body)
        if starts:
            self.frames.pop()
        if node.orelse is not None:
            self.block(node.orelse.body)
        ends = self.here + self.handled(handlers, starts)
        self.here = ends
        if node.finalbody is not None:
            self.frames.pop()
            if self.here:
                self.block(node.finalbody.body)

    def handled(
        self, handlers: Sequence[cst.ExceptHandler | cst.ExceptStarHandler], starts: Sequence[int]
    ) -> list[tuple[int, How]]:
        """Build the bodies of handlers; returns their loose ends."""
        ends: list[tuple[int, How]] = []
        for handler, start in zip(handlers, starts, strict=True):
            self.here = [(start, How.TRUE)]
            self.block(handler.body)
            ends += self.here
        if starts and not _catches_all(handlers[-1]):
            for target in self.exception_targets(len(self.frames)):
                self.graph.link(starts[-1], target, How.FALSE)
        return ends

    def passage_of(self, final: cst.Finally) -> Callable[[int], int]:
        """Builds a copy of a ``finally`` block that leads to a target."""

        def passage(target: int) -> int:
            start = self.graph.add(Part.JOIN, None, final)
            self.here = [(start, How.NEXT)]
            self.block(final.body)
            self.join(target)
            return start

        return passage

    def match_(self, node: cst.Match) -> None:
        """Build ``match``."""
        self.step(Part.SUBJECT, node.subject, node)
        ends: list[tuple[int, How]] = []
        for case in node.cases:
            pattern = self.step(Part.SUBJECT, case.pattern, node)
            misses = [] if _matches_all(case) else [(pattern, How.FALSE)]
            self.here = [(pattern, How.TRUE)]
            if case.guard is not None:
                guard = self.step(Part.TEST, case.guard, node)
                self.here = [(guard, How.TRUE)]
                misses.append((guard, How.FALSE))
            self.block(case.body)
            ends += self.here
            self.here = misses
        self.here = ends + self.here


def _back(how: How) -> How:
    return How.BACK if how is How.NEXT else how


def _constant(test: cst.BaseExpression) -> bool | None:
    if isinstance(test, cst.Name) and test.value in ("True", "False"):
        return test.value == "True"
    return test.value != "0" if isinstance(test, cst.Integer) else None


def _catches_all(handler: cst.ExceptHandler | cst.ExceptStarHandler) -> bool:
    return handler.type is None or (isinstance(handler.type, cst.Name) and handler.type.value == "BaseException")


def _matches_all(case: cst.MatchCase) -> bool:
    return case.guard is None and isinstance(case.pattern, cst.MatchAs) and case.pattern.pattern is None


_RAISING = frozenset(
    {cst.Call, cst.Subscript, cst.Attribute, cst.Await, cst.Yield, cst.BinaryOperation, cst.Import, cst.ImportFrom}
)


def _may_raise(part: Part, ast: cst.CSTNode | None) -> bool:
    """Whether an exception can come from a node. Names, constants and jumps raise nothing worth a path."""
    if part in (Part.JOIN, Part.ENTRY, Part.EXIT, Part.RAISE, Part.LEAVE):
        return False
    if isinstance(ast, cst.Raise | cst.Assert):
        return True
    if part is Part.ITERATE:
        return True
    if ast is None or isinstance(ast, (cst.Break, cst.Continue, cst.Pass, cst.Global, cst.Nonlocal)):
        return False
    return any(type(node) in _RAISING for node in evaluated(Node(0, part, ast)))


# -- solving -----------------------------------------------------------------------------------------------------


class Direction(Enum):
    """Which way facts travel."""

    FORWARD = auto()
    BACKWARD = auto()


def solve(
    graph: Graph,
    *,
    initial: V,
    transfer: Callable[[Node, V], V],
    join: Callable[[V, V], V],
    direction: Direction = Direction.FORWARD,
    along: Callable[[Edge, V], V | None] | None = None,
) -> Mapping[int, V]:
    """The value before each node (after it, when going backward), at the fixpoint.

    Args:
        graph: The graph.
        initial: The value at the entry (going backward: at both ends).
        transfer: What a node does to a value.
        join: Where paths meet. Must be monotone over a lattice of finite height, or this does not end.
        direction: Which way.
        along: What an edge does to a value, such as learning how a test came out; None means that no path goes along it.
            An exception leaves a node with its work done or not done: without ``along`` the value before and the value
            after both travel along an EXCEPTION edge, joined.

    Returns:
        Values of the nodes that something reached; nodes that nothing reaches are not in it.
    """
    forward = direction is Direction.FORWARD
    outward, start = (graph.edges, (graph.entry,)) if forward else (graph.back, (graph.exit, graph.raising))
    values: dict[int, V] = dict.fromkeys(start, initial)
    todo = deque(start)
    waiting = set(start)
    while todo:
        index = todo.popleft()
        waiting.discard(index)
        before = values[index]
        after = transfer(graph.nodes[index], before)
        for edge in outward[index]:
            travels = after
            if edge.how is How.EXCEPTION and forward:
                travels = join(before, after)
            if along is not None:
                changed = along(edge, travels)
                if changed is None:
                    continue
                travels = changed
            target = edge.target if forward else edge.source
            if target not in values:
                values[target] = travels
            else:
                joined = join(values[target], travels)
                if joined == values[target]:
                    continue
                values[target] = joined
            if target not in waiting:
                waiting.add(target)
                todo.append(target)
    return values


def on_every_path(graph: Graph, start: int, wanted: Callable[[Node], bool], stop: Callable[[Node], bool]) -> bool:
    """Whether every path from behind ``start`` meets a wanted node before it meets a stop or ends.

    A path that goes round for ever counts as ending: only what it meets counts. Exceptions out of the function are left
    out: they end the path without a verdict.
    """
    seen: set[int] = set()
    todo = [edge.target for edge in graph.edges[start] if edge.how is not How.EXCEPTION]
    met = False
    while todo:
        index = todo.pop()
        if index in seen:
            continue
        seen.add(index)
        node = graph.nodes[index]
        if wanted(node):
            met = True
            continue
        if stop(node) or node.part is Part.EXIT:
            return False
        todo += [edge.target for edge in graph.edges[index] if edge.target != graph.raising]
    return met


def on_some_path(graph: Graph, start: int, wanted: Callable[[Node], bool], stop: Callable[[Node], bool]) -> Node | None:
    """A wanted node that some path from behind ``start`` meets before it meets a stop, or None."""
    seen: set[int] = set()
    todo = deque(edge.target for edge in graph.edges[start] if edge.how is not How.EXCEPTION)
    while todo:
        index = todo.popleft()
        if index in seen:
            continue
        seen.add(index)
        node = graph.nodes[index]
        if wanted(node):
            return node
        if not stop(node):
            todo += [edge.target for edge in graph.edges[index]]
    return None


class Summaries(Generic[S]):
    """What each function of a module does, seen from a caller: a fixpoint over calls inside the module.

    Args:
        functions: The functions.
        bottom: The summary before anything is known.
        compute: Makes the summary of a function; it asks for callees through this object. Must be monotone.
        limit: After so many rounds the last summaries stand (recursion that keeps growing).
    """

    def __init__(
        self, functions: Iterable[Function], bottom: S, compute: Callable[[Function, Summaries[S]], S], limit: int = 8
    ) -> None:
        self._found: dict[int, S] = {}
        self._bottom = bottom
        self._functions = list(functions)
        for _ in range(limit):
            changed = False
            # Inner functions come after their owners in the outline: go backward, so that callees are mostly done first.
            for function in reversed(self._functions):
                found = compute(function, self)
                if found != self._found.get(id(function), bottom):
                    self._found[id(function)] = found
                    changed = True
            if not changed:
                break

    def of(self, function: Function) -> S:
        """The summary of a function."""
        return self._found.get(id(function), self._bottom)
