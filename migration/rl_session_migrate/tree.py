"""Reading a module: its syntax tree, where each node stands, and fast walks over it.

The library's own visitors rebuild every node they pass; the walks here only look. Knows nothing of tenants.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import libcst as cst
from libcst import BatchableCSTVisitor
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

__all__ = ["Position", "Source", "arguments", "callee", "children", "code", "dotted", "is_string", "parse", "walk"]

# Fields without code in them. `whitespace` also covers `whitespace_before_...` and the like.
_IDLE = (
    "whitespace",
    "leading_lines",
    "lines_after",
    "lpar",
    "rpar",
    "comma",
    "semicolon",
    "header",
    "footer",
    "newline",
    "lbracket",
    "rbracket",
    "lbrace",
    "rbrace",
    "equal",
    "colon",
    "dot",
    "indent",
    "trailing",
)
_LINE_END = re.compile(r"\r\n|\r|\n")
_fields: dict[type, tuple[str, ...]] = {}


class Position(tuple[int, int]):
    """Line and column, both from 1, as editors and compilers count them."""

    __slots__ = ()

    @property
    def line(self) -> int:
        """The line, from 1."""
        return self[0]

    @property
    def column(self) -> int:
        """The column, from 1."""
        return self[1]

    def __str__(self) -> str:
        return f"{self[0]}:{self[1]}"


@attrs.frozen(eq=False)
class Source:
    """One parsed module.

    Attributes:
        path: Where it came from; only shown.
        module: Its tree; the nodes of all findings are nodes of this tree.
        ranges: Where each node begins and ends.
        lines: The source, line by line.
    """

    path: str
    module: cst.Module
    ranges: Mapping[cst.CSTNode, CodeRange]
    lines: tuple[str, ...]

    def position(self, node: cst.CSTNode) -> Position:
        """Where a node begins."""
        start = self.ranges[node].start
        return Position((start.line, start.column + 1))

    def line(self, node: cst.CSTNode) -> int:
        """The line a node begins on."""
        return self.ranges[node].start.line

    def text(self, node: cst.CSTNode) -> str:
        """The lines that a node stands on, as they are written."""
        found = self.ranges[node]
        return "\n".join(self.lines[found.start.line - 1 : found.end.line])

    def end(self, node: cst.CSTNode) -> Position:
        """Where a node ends: the position after its last character."""
        end = self.ranges[node].end
        return Position((end.line, end.column + 1))


class _Wrapper(MetadataWrapper):
    """Resolving positions ends with a walk for providers that share one; there are none, and it takes a fifth of the time."""

    def visit_batched(self, visitors: Iterable[BatchableCSTVisitor], *args: Any, **kwargs: Any) -> cst.CSTNode:
        listed = list(visitors)
        return super().visit_batched(listed, *args, **kwargs) if listed else self.module


def parse(text: str | bytes, path: str | Path = "<string>") -> Source:
    """Parse a module.

    Args:
        text: Its source; bytes are decoded as their coding line says.
        path: Shown in findings.

    Raises:
        libcst.ParserSyntaxError: It is no Python, or newer than the parser.
        UnicodeDecodeError: The bytes are not in the encoding they claim.
    """
    # The tree is ours alone, so the wrapper need not copy it.
    wrapper = _Wrapper(cst.parse_module(text), unsafe_skip_copy=True)
    raw = text if isinstance(text, str) else text.decode(wrapper.module.encoding)
    lines = tuple(_LINE_END.split(raw))
    return Source(str(path), wrapper.module, wrapper.resolve(PositionProvider), lines)


def _fields_of(kind: type) -> tuple[str, ...]:
    names = _fields.get(kind)
    if names is None:
        names = tuple(
            field.name
            for field in dataclasses.fields(kind)
            if not any(field.name.startswith(idle) or field.name.endswith(f"_{idle}") for idle in _IDLE)
        )
        _fields[kind] = names
    return names


_nodes: dict[type, bool] = {}


def _is_node(kind: type) -> bool:
    """Whether a type is that of nodes. Their classes are abstract ones, of which ``isinstance`` is slow."""
    found = _nodes.get(kind)
    if found is None:
        found = _nodes[kind] = issubclass(kind, cst.CSTNode)
    return found


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The nodes directly below, in the order of the source, without whitespace and punctuation."""
    for name in _fields_of(type(node)):
        value = getattr(node, name)
        kind = type(value)
        if kind is list or kind is tuple:
            for item in value:
                if _is_node(type(item)):
                    yield item
        elif _is_node(kind):
            yield value


_ELSEWHERE = frozenset({cst.FunctionDef, cst.ClassDef, cst.Lambda})
"""What runs somewhere else than where it stands."""


def parents_of(module: cst.Module) -> dict[cst.CSTNode, cst.CSTNode]:
    """The parent of each node of a module."""
    parents: dict[cst.CSTNode, cst.CSTNode] = {}
    stack: list[cst.CSTNode] = [module]
    while stack:
        here = stack.pop()
        for child in children(here):
            parents[child] = here
            stack.append(child)
    return parents


def walk(node: cst.CSTNode, *, into_functions: bool = True) -> Iterator[cst.CSTNode]:
    """Every node from here down, parents first.

    Args:
        node: Where to begin; it is yielded too.
        into_functions: Whether to enter functions, classes and lambdas below ``node``.
    """
    stack = [node]
    while stack:
        here = stack.pop()
        yield here
        if not into_functions and here is not node and type(here) in _ELSEWHERE:
            continue
        stack.extend(reversed(list(children(here))))


def dotted(node: cst.CSTNode) -> str | None:
    """``a.b.c`` as text, or None if the expression is not a chain of names."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    parts.append(node.value)
    return ".".join(reversed(parts))


_EMPTY = cst.Module(body=())


def code(node: cst.CSTNode) -> str:
    """The source of a node on one line, without the parentheses around it."""
    text = _EMPTY.code_for_node(node)
    return " ".join(text.split()) if "\n" in text or "  " in text else text.strip()


def callee(node: cst.Call) -> str:
    """The last name of what is called: ``attach`` of ``rs.attach(...)``; "" if it has none."""
    func = node.func
    if isinstance(func, cst.Subscript):  # Generic[int](...)
        func = func.value
    if isinstance(func, cst.Attribute):
        return func.attr.value
    return func.value if isinstance(func, cst.Name) else ""


def arguments(node: cst.Call) -> tuple[list[cst.BaseExpression], dict[str, cst.BaseExpression], bool]:
    """Positional arguments, keyword arguments, and whether ``*`` or ``**`` may add more."""
    positional = [arg.value for arg in node.args if arg.keyword is None and not arg.star]
    keywords = {arg.keyword.value: arg.value for arg in node.args if arg.keyword is not None}
    return positional, keywords, any(arg.star for arg in node.args)


def is_string(node: cst.CSTNode) -> str | None:
    """The value of a plain string literal, or None."""
    if isinstance(node, cst.SimpleString) and not node.prefix.lower().startswith("b"):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None
