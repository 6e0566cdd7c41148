"""Carrying out a plan on the tree: wrapping statements, taking calls out, putting others in their place.

Comments survive: those of a call that goes move to what follows it. Nodes that are not touched are the same objects afterwards,
so that nothing else of the file changes. Decides nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import libcst as cst

from rl_session_migrate.codemod.blocks import Suite
from rl_session_migrate.codemod.plan import Plan
from rl_session_migrate.codemod.scoping import Run
from rl_session_migrate.tree import dotted

__all__ = ["apply", "comment_line", "line_of", "split"]

Line = cst.BaseStatement | cst.SimpleStatementLine


def apply(module: cst.Module, plan: Plan, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> cst.Module:
    """The module after a plan.

    Args:
        module: The module the plan was made for.
        plan: The plan.
        parents: The parent of each node of the module.
    """
    touched = _touched(plan, parents)
    changed = module.visit(_Editor(plan, touched))
    assert isinstance(changed, cst.Module)
    return changed


def split(module: cst.Module, lines: Collection[cst.CSTNode], parents: Mapping[cst.CSTNode, cst.CSTNode]) -> cst.Module:
    """The module with some lines of several statements (``a; b``) written as a line each.

    Args:
        module: The module.
        lines: The lines.
        parents: The parent of each node of the module.
    """
    changed = module.visit(_Splitter(frozenset(lines), _with_all_above(lines, parents)))
    assert isinstance(changed, cst.Module)
    return changed


class _Splitter(cst.CSTTransformer):
    def __init__(self, lines: frozenset[cst.CSTNode], touched: set[cst.CSTNode]) -> None:
        super().__init__()
        self._lines = lines
        self._touched = touched

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._touched

    def leave_SimpleStatementLine(  # noqa: N802 (the library's name)
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        if original_node not in self._lines:
            return updated_node
        first, *rest = [cst.SimpleStatementLine([_alone(small)]) for small in updated_node.body]
        lines = [first.with_changes(leading_lines=updated_node.leading_lines), *rest]
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)


def _touched(plan: Plan, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> set[cst.CSTNode]:
    """Everything above an edit: all that has to be visited."""
    roots: list[cst.CSTNode] = [site.node for site in (*plan.remove, *plan.replace)]
    roots += plan.empty
    roots += [run.block.suite.body[run.first] for run in plan.runs]
    return _with_all_above(roots, parents)


def _with_all_above(nodes: Iterable[cst.CSTNode], parents: Mapping[cst.CSTNode, cst.CSTNode]) -> set[cst.CSTNode]:
    """Nodes, and whatever they stand in."""
    found: set[cst.CSTNode] = set()
    for node in nodes:
        here: cst.CSTNode | None = node
        while here is not None and here not in found:
            found.add(here)
            here = parents.get(here)
    return found


def line_of(text: str) -> cst.SimpleStatementLine:
    """A line of source as a statement."""
    line = cst.parse_statement(text)
    assert isinstance(line, cst.SimpleStatementLine)
    return line


def comment_line(text: str) -> cst.EmptyLine:
    """A comment on a line of its own."""
    return cst.EmptyLine(comment=cst.Comment(f"# {text}"))


class _Editor(cst.CSTTransformer):
    def __init__(self, plan: Plan, touched: set[cst.CSTNode]) -> None:
        super().__init__()
        self._touched = touched
        self._removed = {site.node for site in plan.remove}
        self._replaced: dict[cst.CSTNode, str] = {site.node: text for site, text in plan.replace.items()}
        self._emptied = set(plan.empty)
        self._runs: dict[cst.CSTNode, list[Run]] = defaultdict(list)
        for run in plan.runs:
            self._runs[run.block.suite].append(run)

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._touched

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        if original_node not in self._touched:
            return updated_node
        if original_node in self._replaced:
            return cst.parse_expression(self._replaced[original_node])
        if isinstance(original_node, (cst.IndentedBlock, cst.Module)):
            assert isinstance(updated_node, (cst.IndentedBlock, cst.Module))
            return self._block(original_node, updated_node)
        if isinstance(original_node, cst.SimpleStatementSuite):
            assert isinstance(updated_node, cst.SimpleStatementSuite)
            return self._one_line_block(original_node, updated_node)
        if isinstance(original_node, cst.If) and isinstance(updated_node, cst.If):
            return _without_empty_else(original_node, updated_node)
        return updated_node

    # -- blocks --------------------------------------------------------------------------------------------------

    def _block(self, original: cst.IndentedBlock | cst.Module, updated: cst.IndentedBlock | cst.Module) -> cst.CSTNode:
        lines = [self._line(old, new) for old, new in zip(original.body, updated.body, strict=True)]
        body, dangling = self._assembled(original, lines)
        if not body and isinstance(original, cst.IndentedBlock):
            body = [cst.SimpleStatementLine([cst.Pass()], leading_lines=dangling)]
            dangling = []
        if dangling:
            updated = updated.with_changes(footer=[*dangling, *updated.footer])
        return updated.with_changes(body=body)

    def _one_line_block(self, original: cst.SimpleStatementSuite, updated: cst.SimpleStatementSuite) -> cst.CSTNode:
        """``if x: a; b`` becomes a block of several lines where a line has to go into a scope."""
        kept = [new for old, new in zip(original.body, updated.body, strict=True) if not self._goes(old)]
        runs = self._runs.get(original, [])
        if not runs:
            return updated.with_changes(body=kept or [cst.Pass()])
        lines: list[Line | None] = [cst.SimpleStatementLine([_alone(small)]) for small in kept]
        body, _ = self._wrapped(runs, lines) if len(kept) == len(original.body) else ([_with(runs[0], lines)], [])
        header = cst.TrailingWhitespace(
            whitespace=updated.trailing_whitespace.whitespace, comment=updated.trailing_whitespace.comment
        )
        return cst.IndentedBlock(body=body, header=header)

    def _assembled(
        self, original: Suite, lines: Sequence[Line | list[cst.EmptyLine]]
    ) -> tuple[list[Line], list[cst.EmptyLine]]:
        """Lines with scopes around runs of them; the comments of lines that went move to the next line."""
        kept: list[Line | None] = []
        dangling: list[cst.EmptyLine] = []
        for line in lines:
            if isinstance(line, list):
                dangling += line
                kept.append(None)
            else:
                is_first = bool(kept) and all(before is None for before in kept)
                kept.append(_led_by(dangling, line, is_first=is_first))
                dangling = []
        body, _ = self._wrapped(self._runs.get(original, []), kept)
        return body, dangling

    @staticmethod
    def _wrapped(runs: Iterable[Run], lines: Sequence[Line | None]) -> tuple[list[Line], None]:
        starts = {run.first: run for run in runs}
        body: list[Line] = []
        index = 0
        while index < len(lines):
            run = starts.get(index)
            if run is None:
                line = lines[index]
                body += [] if line is None else [line]
                index += 1
            else:
                body.append(_with(run, lines[run.first : run.last + 1]))
                index = run.last + 1
        return body, None

    def _line(self, old: cst.CSTNode, new: cst.CSTNode) -> Line | list[cst.EmptyLine]:
        """A line without the calls that go; only its comments, if nothing else is left."""
        if old in self._emptied:
            assert isinstance(old, cst.If)
            inside = (
                [c for line in old.body.body for c in _comments_of(line)]
                if isinstance(old.body, cst.IndentedBlock)
                else []
            )
            return [*_comments_of(old), *inside]
        if isinstance(old, cst.If) and isinstance(new, cst.If) and _is_emptied(old, new):
            return _comments_of(old)
        if not isinstance(old, cst.SimpleStatementLine) or not isinstance(new, cst.SimpleStatementLine):
            assert isinstance(new, (cst.BaseStatement, cst.SimpleStatementLine))
            return new
        kept = [small for before, small in zip(old.body, new.body, strict=True) if not self._goes(before)]
        if len(kept) == len(old.body):
            return new
        if kept:
            kept[-1] = _alone(kept[-1])
            return new.with_changes(body=kept)
        return _comments_of(old)

    def _goes(self, small: cst.CSTNode) -> bool:
        return isinstance(small, cst.Expr) and small.value in self._removed


def _is_emptied(original: cst.If, updated: cst.If) -> bool:
    """Whether nothing is left of an ``if`` whose test does nothing but read a name."""
    test = updated.test.expression if isinstance(updated.test, cst.UnaryOperation) else updated.test
    if updated.orelse is not None or dotted(test) is None:
        return False
    return not _is_only_pass(original.body) and _is_only_pass(updated.body)


def _without_empty_else(original: cst.If, updated: cst.If) -> cst.If:
    """An ``else`` of which nothing is left, no comment either, goes."""
    before, after = original.orelse, updated.orelse
    if not isinstance(before, cst.Else) or not isinstance(after, cst.Else) or _is_pass(before) or not _is_pass(after):
        return updated
    return updated.with_changes(orelse=None)


def _is_pass(branch: cst.Else) -> bool:
    return not branch.leading_lines and _is_only_pass(branch.body)


def _is_only_pass(body: cst.BaseSuite) -> bool:
    """Whether a block holds nothing but ``pass``, and no comment."""
    lines = body.body
    if len(lines) != 1 or (isinstance(body, cst.IndentedBlock) and body.header.comment):
        return False
    line = lines[0]
    if not isinstance(body, cst.IndentedBlock):
        return isinstance(line, cst.Pass)
    plain = not any(empty.comment for empty in (*getattr(line, "leading_lines", ()), *body.footer))
    return plain and isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.Pass)


def _alone(small: cst.BaseSmallStatement) -> cst.BaseSmallStatement:
    return small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)


_DIRECTIVE = re.compile(r"#\s*(?:type:\s*ignore|noqa|pragma|fmt:|isort:|pylint:|pyright:|mypy:|ruff:)")
"""Comments that speak to a tool about the line they stand on: they go with it."""


def _comments_of(line: cst.CSTNode) -> list[cst.EmptyLine]:
    """The comments of a line, each on a line of its own, and blank lines before them."""
    leading = list(getattr(line, "leading_lines", ()))
    trailing = getattr(line, "trailing_whitespace", None)
    if trailing is not None and trailing.comment is not None and not _DIRECTIVE.match(trailing.comment.value):
        leading.append(cst.EmptyLine(comment=trailing.comment))
    return leading


def _led_by(dangling: Sequence[cst.EmptyLine], line: Line, *, is_first: bool) -> Line:
    """A line with the comments of what stood before it; ``is_first`` where it has become the first of its block."""
    leading = _without_double_blanks([*dangling, *getattr(line, "leading_lines", ())])
    while is_first and leading and leading[0].comment is None:
        leading = leading[1:]
    return line.with_changes(leading_lines=leading) if dangling or is_first else line


def _without_double_blanks(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    found: list[cst.EmptyLine] = []
    for line in lines:
        if line.comment is None and found and found[-1].comment is None:
            continue
        found.append(line)
    return found


def _with(run: Run, lines: Sequence[Line | None]) -> cst.With:
    """A scope around lines; what stood above the first of them now stands above the scope."""
    body = [line for line in lines if line is not None]
    leading = list(getattr(body[0], "leading_lines", ()))
    body[0] = body[0].with_changes(leading_lines=[])
    return cst.With(
        items=[cst.WithItem(item=cst.parse_expression(run.item))],
        body=cst.IndentedBlock(body=body),
        leading_lines=leading,
        asynchronous=cst.Asynchronous() if run.is_async else None,
    )
