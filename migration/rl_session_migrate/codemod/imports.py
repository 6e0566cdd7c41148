"""The names that rewritten code needs: bound by imports, and not already somebody else's.

Knows nothing of what they are used for.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from rl_session_migrate.codemod.edits import line_of
from rl_session_migrate.outline import By, Outline
from rl_session_migrate.tree import dotted

__all__ = ["ADAPTER", "add_import", "spelling"]

ADAPTER = "rl_session.adapters.nemo_rl"


def spelling(outline: Outline, source: str, name: str) -> str:
    """How a module must spell a name: as it is, as it is imported already, or under another name where it is taken."""
    full = f"{source}.{name}"
    for local, imported in outline.imports.items():
        if imported == full and outline.body.bindings.get(local):
            return local
    bound = {local for function in outline.functions.values() for local in function.bindings}
    return f"rl_{name}" if name in bound else name


def add_import(module: cst.Module, outline: Outline, source: str, name: str, local: str) -> cst.Module:
    """The module with a name imported, if it is not yet."""
    bindings = outline.body.bindings.get(local, [])
    if outline.imports.get(local) == f"{source}.{name}" and any(binding.by is By.IMPORT for binding in bindings):
        return module
    spelled = name if local == name else f"{name} as {local}"
    body = list(module.body)
    index = _existing(body, source)
    if index is not None:
        body[index] = _extended(body[index], source, spelled)
        return module.with_changes(body=body)
    line = line_of(f"from {source} import {spelled}")
    at = _after_imports(body)
    if at < len(body) and isinstance(body[at], (cst.FunctionDef, cst.ClassDef)) and not body[at].leading_lines:
        body[at] = body[at].with_changes(leading_lines=[cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)])
    return module.with_changes(body=[*body[:at], line, *body[at:]])


def _is_from(node: cst.CSTNode, source: str) -> bool:
    return (
        isinstance(node, cst.SimpleStatementLine)
        and len(node.body) == 1
        and isinstance(node.body[0], cst.ImportFrom)
        and not node.body[0].relative
        and node.body[0].module is not None
        and dotted(node.body[0].module) == source
        and not isinstance(node.body[0].names, cst.ImportStar)
    )


def _existing(body: Sequence[cst.CSTNode], source: str) -> int | None:
    return next((index for index, node in enumerate(body) if _is_from(node, source)), None)


def _extended(line: cst.CSTNode, source: str, spelled: str) -> cst.SimpleStatementLine:
    assert isinstance(line, cst.SimpleStatementLine)
    node = line.body[0]
    assert isinstance(node, cst.ImportFrom)
    assert not isinstance(node.names, cst.ImportStar)
    added = line_of(f"from {source} import {spelled}").body[0]
    assert isinstance(added, cst.ImportFrom)
    assert not isinstance(added.names, cst.ImportStar)
    last = node.names[-1]
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if isinstance(last.comma, cst.Comma):  # a trailing comma: the list is one name a line
        before = node.names[-2].comma if len(node.names) > 1 else cst.MaybeSentinel.DEFAULT
        comma = before if isinstance(before, cst.Comma) else comma
    names = [*node.names[:-1], last.with_changes(comma=comma), added.names[0].with_changes(comma=last.comma)]
    return line.with_changes(body=[node.with_changes(names=names)])


def _after_imports(body: Sequence[cst.CSTNode]) -> int:
    """Behind the last import of the block of imports at the top, or behind the docstring."""
    at = 0
    for index, node in enumerate(body):
        if not isinstance(node, cst.SimpleStatementLine):
            break
        if all(isinstance(small, (cst.Import, cst.ImportFrom)) for small in node.body):
            relative = any(isinstance(small, cst.ImportFrom) and small.relative for small in node.body)
            at = at if relative and at else index + 1
        elif index == 0 and _is_docstring(node):
            at = 1
        elif at and not _may_stand_between(node):
            break
    return at


def _is_docstring(node: cst.SimpleStatementLine) -> bool:
    first = node.body[0]
    return isinstance(first, cst.Expr) and isinstance(first.value, (cst.SimpleString, cst.ConcatenatedString))


def _may_stand_between(node: cst.SimpleStatementLine) -> bool:
    """Whether imports usually go on behind a line: ``__all__``, a dunder, a warning filter."""
    first = node.body[0]
    return isinstance(first, (cst.Assign, cst.Expr)) and not isinstance(first, cst.Return)
