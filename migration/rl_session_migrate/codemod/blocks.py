"""The blocks of a function: statements, what the head of each does by itself, and the blocks inside it.

Where an edit can be made is a place in a block. Knows nothing of what edits are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import libcst as cst

from rl_session_migrate.codemod.program import Event, Program
from rl_session_migrate.flow import Node, Part, evaluated
from rl_session_migrate.outline import Function
from rl_session_migrate.tree import children, dotted, walk

__all__ = ["Block", "Place", "Statement", "blocks_of", "bound_paths", "has_stray_await", "num_lines"]

Suite = cst.IndentedBlock | cst.SimpleStatementSuite | cst.Module


@attrs.define(eq=False)
class Statement:
    """One statement of a block.

    Attributes:
        node: The statement; a whole line of simple ones counts as one.
        head: The events of what it evaluates by itself, outside the blocks inside it.
        blocks: The blocks inside it, in order; those of nested functions and classes are not among them.
    """

    node: cst.CSTNode
    head: tuple[Event, ...]
    blocks: tuple[Block, ...]

    def events(self) -> Iterator[Event]:
        """Everything in it, head first."""
        yield from self.head
        for block in self.blocks:
            yield from block.events()

    def inside(self) -> Iterator[Statement]:
        """It, and every statement inside it."""
        yield self
        for block in self.blocks:
            for statement in block.statements:
                yield from statement.inside()

    @property
    def is_simple(self) -> bool:
        """Whether it is a line of simple statements."""
        return isinstance(self.node, (cst.SimpleStatementLine, cst.BaseSmallStatement))

    @property
    def is_plain_with(self) -> bool:
        """Whether it is a ``with`` whose block always runs, and whose head does nothing to tenants."""
        return isinstance(self.node, cst.With) and self.node.asynchronous is None and not self.head


@attrs.define(eq=False)
class Block:
    """A run of statements that belong together.

    Attributes:
        suite: The node that holds them.
        statements: The statements.
    """

    suite: Suite
    statements: tuple[Statement, ...]

    def events(self) -> Iterator[Event]:
        """Everything in it."""
        for statement in self.statements:
            yield from statement.events()

    def blocks(self) -> Iterator[Block]:
        """It, and every block inside it."""
        yield self
        for statement in self.statements:
            for block in statement.blocks:
                yield from block.blocks()


@attrs.frozen
class Place:
    """A statement by where it stands."""

    block: Block = attrs.field(eq=id)
    index: int

    @property
    def statement(self) -> Statement:
        """The statement."""
        return self.block.statements[self.index]


def blocks_of(program: Program, function: Function) -> Block | None:
    """The body of a function; None for a lambda, which has none."""
    node = function.node
    if isinstance(node, cst.Lambda):
        return None
    body = node if isinstance(node, cst.Module) else node.body
    return _Builder(program, function).block(body)  # type: ignore[arg-type]


class _Builder:
    def __init__(self, program: Program, function: Function) -> None:
        self._program = program
        self._function = function

    def block(self, suite: Suite) -> Block:
        return Block(suite, tuple(self.statement(node) for node in suite.body))

    def statement(self, node: cst.CSTNode) -> Statement:
        head = tuple(self._head(node))
        return Statement(node, head, tuple(self.block(suite) for suite in _suites(node)))

    def _head(self, node: cst.CSTNode) -> Iterator[Event]:
        for piece in _pieces(node):
            for ast in evaluated(piece):
                yield from self._program.events_of(ast, self._function)


def _pieces(node: cst.CSTNode) -> Iterator[Node]:  # noqa: C901, PLR0912 (one arm a kind of statement)
    """What a statement evaluates by itself, in order."""
    match node:
        case cst.SimpleStatementLine():
            for small in node.body:
                yield Node(0, Part.STATEMENT, small)
        case cst.If():
            yield Node(0, Part.TEST, node.test)
            if isinstance(node.orelse, cst.If):  # the test of an `elif` belongs to the whole
                yield from _pieces(node.orelse)
        case cst.While():
            yield Node(0, Part.TEST, node.test)
        case cst.For():
            yield Node(0, Part.ITERABLE, node.iter)
            yield Node(0, Part.ITERATE, node)
        case cst.With():
            for item in node.items:
                yield Node(0, Part.ENTER, item)
        case cst.Try() | cst.TryStar():
            for handler in node.handlers:
                yield Node(0, Part.HANDLER, handler)
        case cst.Match():
            yield Node(0, Part.SUBJECT, node.subject)
            for case in node.cases:
                if case.guard is not None:
                    yield Node(0, Part.TEST, case.guard)
        case cst.FunctionDef() | cst.ClassDef():
            yield Node(0, Part.STATEMENT, node)
        case cst.BaseSmallStatement():
            yield Node(0, Part.STATEMENT, node)


def _suites(node: cst.CSTNode) -> Iterator[Suite]:
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        return
    for child in children(node):
        match child:
            case cst.IndentedBlock() | cst.SimpleStatementSuite():
                yield child
            case (
                cst.If() | cst.Else() | cst.Finally() | cst.ExceptHandler() | cst.ExceptStarHandler() | cst.MatchCase()
            ):
                yield from _suites(child)


def bound_paths(node: cst.CSTNode) -> frozenset[str]:
    """The names and attributes that something binds or deletes, as text."""
    found: set[str] = set()
    for here in walk(node, into_functions=False):
        match here:
            case (
                cst.AssignTarget()
                | cst.AnnAssign()
                | cst.AugAssign()
                | cst.NamedExpr()
                | cst.For()
                | cst.CompFor()
                | cst.Del()
            ):
                found |= _targets(here.target)
            case cst.AsName():
                found |= _targets(here.name)
            case cst.FunctionDef() | cst.ClassDef():
                found.add(here.name.value)
            case cst.ImportAlias():
                found.add((dotted(here.name) or "").partition(".")[0])
    return frozenset(found)


def _targets(node: cst.CSTNode) -> set[str]:
    return {path for part in walk(node) if (path := dotted(part)) is not None}


def has_stray_await(node: cst.CSTNode, own: Sequence[cst.CSTNode]) -> bool:
    """Whether something is awaited that is none of ``own``."""
    for here in walk(node, into_functions=False):
        if isinstance(here, cst.Await) and not any(here.expression is call for call in own):
            return True
        if isinstance(here, (cst.With, cst.For)) and here.asynchronous is not None:
            return True
        if isinstance(here, cst.CompFor) and here.asynchronous is not None:
            return True
    return False


def num_lines(program: Program, first: Statement, last: Statement) -> int:
    """How many lines there are between two statements, their own left out."""
    source = program.module.source
    return max(0, source.line(last.node) - source.end(first.node).line - 1)
