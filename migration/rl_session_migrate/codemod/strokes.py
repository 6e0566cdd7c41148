"""What to write at which statement of a module, collected before it is written. Data, and where it goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import attrs
import libcst as cst

from rl_session_migrate.tree import code

__all__ = ["Spelling", "Strokes", "insert_behind", "statement_of"]


@attrs.frozen
class Spelling:
    """How the module spells our names."""

    scopes: str = "scopes"
    share: str = "share"


@attrs.define
class Strokes:
    """What to write, by the statement it is written at.

    Attributes:
        above: Comments above statements.
        behind: Lines behind statements.
        before: Lines before statements.
        instead: Lines instead of statements.
    """

    above: dict[cst.CSTNode, list[str]] = attrs.field(factory=lambda: defaultdict(list))
    behind: dict[cst.CSTNode, list[str]] = attrs.field(factory=lambda: defaultdict(list))
    before: dict[cst.CSTNode, list[str]] = attrs.field(factory=lambda: defaultdict(list))
    instead: dict[cst.CSTNode, str] = attrs.field(factory=dict)


def statement_of(node: cst.CSTNode, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> cst.CSTNode | None:
    """The line or compound statement that something stands in."""
    here: cst.CSTNode | None = node
    while here is not None:
        above = parents.get(here)
        if isinstance(above, (cst.IndentedBlock, cst.Module)) and here in above.body:
            return here
        here = above
    return None


def insert_behind(
    strokes: Strokes, statement: cst.CSTNode | None, parents: Mapping[cst.CSTNode, cst.CSTNode], text: str
) -> None:
    """A line behind a simple statement, unless it is there."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return
    block = parents[statement]
    assert isinstance(block, (cst.IndentedBlock, cst.Module))
    index = list(block.body).index(statement)
    following = block.body[index + 1] if index + 1 < len(block.body) else None
    there = isinstance(following, cst.SimpleStatementLine) and code(following.body[0]) == text
    if not there and text not in strokes.behind[statement]:
        strokes.behind[statement].append(text)
