"""Which statements go into which scope: where a computing call can be wrapped, and which neighbours share a scope.

A scope holds the smallest run of statements with neighbouring calls of one mode on one tenant, and goes inside conditions.
Knows nothing of transitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import libcst as cst

from rl_session_migrate.codemod.blocks import Block, Place, Statement, bound_paths, has_stray_await, num_lines
from rl_session_migrate.codemod.ours import spoken
from rl_session_migrate.codemod.program import Doing, Event, Program
from rl_session_migrate.codemod.words import SHAPES
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import Shape, Site
from rl_session_migrate.tree import code, dotted

__all__ = ["Run", "Want", "covers", "place_of", "runs", "wanted"]

MAX_GAP = 12
"""Lines between two calls that may share a scope: re-indenting more than that costs a reader more than a second scope."""


@attrs.frozen
class Want:
    """A scope that a call wants.

    Attributes:
        identity: Whose.
        receiver: What its scopes are called on: ``scopes(policy)``, or a handle of ours.
        scope: The method that makes it: ``logprob_mode``.
        arguments: What is passed to it.
    """

    identity: Identity
    receiver: str
    scope: str
    arguments: str = ""


@attrs.frozen
class Run:
    """Statements of a block that go into one scope.

    Attributes:
        block: The block.
        first: The first statement's place in it.
        last: The last one's.
        item: The expression behind ``with``.
        is_async: Whether something inside is awaited.
    """

    block: Block = attrs.field(eq=id)
    first: int
    last: int
    item: str
    is_async: bool = False


_INFERENCE = {Tenant.POLICY: "logprob_mode", Tenant.VALUE: "inference_mode"}


def wanted(site: Site) -> Want | None:
    """The scope that a use of a policy or value wants, if scopes have one for it."""
    receiver = site.receiver
    if receiver is None or receiver.tenant not in _INFERENCE or site.rule.api is not Api.LEGACY:
        return None
    if site.method == "save_checkpoint":
        scope = "training_mode"  # the optimizer is saved too
    elif site.method == "prepare_refit_info":
        scope = "refit_mode"
    elif site.rule.kind is Kind.COMPUTE:
        scope = "training_mode" if site.rule.gate == "train" else _INFERENCE[receiver.tenant]
    elif site.rule.kind is Kind.TRANSFER:
        scope = "refit_mode"
    else:
        return None
    return Want(receiver.identity, spoken(receiver, site.function), scope)


def covers(
    program: Program, site_withs: Sequence[cst.With], identity: Identity, tenants: Callable[[Receiver], bool]
) -> bool:
    """Whether one of the ``with`` statements around something is a scope, or a refit block, of a tenant."""
    for with_ in site_withs:
        for item in with_.items:
            for call in _calls_in(item.item):
                found = program.module.at(call)
                if not isinstance(found, Site) or found.receiver is None:
                    continue
                is_block = found.rule.kind is Kind.SCOPE or (
                    found.rule.kind is Kind.REFIT and found.rule.api is Api.SCOPED
                )
                if is_block and found.receiver.identity == identity and tenants(found.receiver):
                    return True
    return False


def _calls_in(item: cst.BaseExpression) -> Iterator[cst.Call]:
    match item:
        case cst.Call():
            yield item
        case cst.IfExp():
            yield from _calls_in(item.body)
            yield from _calls_in(item.orelse)


def is_pure(receiver: Receiver) -> bool:
    """Whether an expression may be written a second time."""
    node = receiver.node
    return dotted(node) is not None or (
        isinstance(node, cst.Subscript)
        and dotted(node.value) is not None
        and all(
            isinstance(e.slice, cst.Index) and isinstance(e.slice.value, (cst.Name, cst.BaseString, cst.Integer))
            for e in node.slice
        )
    )


def place_of(body: Block, site: Site) -> Place | str:
    """The statement to wrap for a call, or why it cannot be wrapped, in words."""
    assert site.receiver is not None
    if site.shape in SHAPES and site.shape is not Shape.AWAITED:
        return SHAPES[site.shape]
    if any(isinstance(parent, cst.GeneratorExp) for parent in site.parents):
        return "a generator expression runs later than the statement it stands in"
    if not is_pure(site.receiver):
        return f"{site.receiver} is no name that can be written a second time"
    found = _find(body, site)
    if found is None:
        return "it stands in a class body or a default value"
    place, is_head = found
    if is_head and not place.statement.is_simple and isinstance(place.statement.node, (cst.FunctionDef, cst.ClassDef)):
        return "it stands in a decorator or a default value"
    why = _whole(place.statement, site)
    if why and is_head and not place.statement.is_simple:
        return f"it stands in the head of a `{_word(place.statement.node)}` whose blocks do more: {why}"
    return why or place


def _word(node: cst.CSTNode) -> str:
    return type(node).__name__.lower()


def _find(block: Block, site: Site) -> tuple[Place, bool] | None:
    for index, statement in enumerate(block.statements):
        if any(event.node is site.node for event in statement.head):
            return Place(block, index), True
        for inner in statement.blocks:
            found = _find(inner, site)
            if found is not None:
                return found
    return None


def _whole(statement: Statement, site: Site) -> str:
    """Why a whole statement cannot go into the scope of one of its calls; "" if it can."""
    want = wanted(site)
    for event in statement.events():
        if event.doing is Doing.YIELD:
            return "the statement yields, and a scope must not be left open over a yield"
        if event.site is not None and event.doing is Doing.USE:
            other = wanted(event.site)
            if other is not None and want is not None and (other.identity, other.scope) == (want.identity, want.scope):
                continue
            return f"{event.site.method} in the same statement wants another scope"
        if event.doing in (Doing.LIFECYCLE, Doing.REFIT, Doing.ENTER):
            return "the same statement moves a tenant"
        if event.doing in (Doing.CALL, Doing.HANDED):
            if event.doing is Doing.CALL and not event.handed:
                return f"{_name(event)}() in the same statement may use a tenant"
            if event.handed:
                return f"a tenant is handed to {_name(event)}() in the same statement"
    own = [event.node for event in statement.events() if event.doing is Doing.USE]
    if has_stray_await(statement.node, own):
        return "something else is awaited in the same statement"
    return ""


def _name(event: Event) -> str:
    return code(event.node.func) if isinstance(event.node, cst.Call) else "a function"


# -- runs ----------------------------------------------------------------------------------------------------------


def runs(program: Program, body: Block, chosen: dict[int, Want]) -> Iterator[Run]:
    """The scopes for the chosen uses of a function.

    Args:
        program: The module.
        body: The function's body.
        chosen: What each use that is to be wrapped wants, by the identity of the call's node.
    """
    for block in body.blocks():
        yield from _block_runs(program, block, chosen)


@attrs.define(eq=False)
class _Item:
    first: int
    last: int
    want: Want
    is_async: bool
    is_block: bool
    """A ``with`` whose block holds the calls: wrapped only together with a neighbour."""


def _block_runs(program: Program, block: Block, chosen: dict[int, Want]) -> Iterator[Run]:
    merged: list[_Item] = []
    for item in _items(block, chosen):
        before = merged[-1] if merged else None
        if before is not None and before.want == item.want and _is_near(program, block, before, item):
            before.last = item.last
            before.is_async |= item.is_async
            before.is_block = False
        else:
            merged.append(item)
    for item in merged:
        if not item.is_block:
            wrapped = [s for statement in block.statements[item.first : item.last + 1] for s in statement.inside()]
            inner = {id(event.node) for statement in wrapped for event in statement.head}
            for node in inner:
                chosen.pop(node, None)  # inside this scope already
            yield Run(
                block,
                item.first,
                item.last,
                f"{item.want.receiver}.{item.want.scope}({item.want.arguments})",
                item.is_async,
            )


def _items(block: Block, chosen: dict[int, Want]) -> Iterator[_Item]:
    for index, statement in enumerate(block.statements):
        wants = [chosen[id(event.node)] for event in statement.head if id(event.node) in chosen]
        if wants:
            yield _Item(index, index, wants[0], _awaits(statement), is_block=False)
        elif statement.is_plain_with:
            found = _with_item(index, statement, chosen)
            if found is not None:
                yield found


def _with_item(index: int, statement: Statement, chosen: dict[int, Want]) -> _Item | None:
    """A ``with`` all of whose uses always run and want one scope."""
    wants: set[Want] = set()
    for event in statement.events():
        if id(event.node) not in chosen:
            return None
        wants.add(chosen[id(event.node)])
    straight = statement
    while straight.is_plain_with:
        inner = [s for block in straight.blocks for s in block.statements if any(True for _ in s.events())]
        if not inner or any(not s.is_simple and not s.is_plain_with for s in inner):
            return None
        if all(s.is_simple for s in inner):
            break
        if len(inner) != 1:
            return None
        straight = inner[0]
    if len(wants) != 1 or _binds(statement, next(iter(wants))):
        return None
    own = [event.node for event in statement.events()]
    if has_stray_await(statement.node, own):
        return None
    return _Item(index, index, next(iter(wants)), _awaits(statement), is_block=True)


def _awaits(statement: Statement) -> bool:
    return any(event.site is not None and event.site.shape is Shape.AWAITED for event in statement.events())


def _is_near(program: Program, block: Block, before: _Item, item: _Item) -> bool:
    """Whether two runs may become one: what lies between does nothing that a scope must not hold."""
    between = block.statements[before.last + 1 : item.first]
    last, first = block.statements[before.last], block.statements[item.first]
    if any(_binds(statement, item.want) for statement in (*block.statements[before.first : before.last + 1], *between)):
        return False
    if num_lines(program, last, first) > MAX_GAP:
        return False
    return not any(is_barrier(statement) for statement in between)


def _binds(statement: Statement, want: Want) -> bool:
    parts = want.identity.path.split(".")
    paths = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return bool(bound_paths(statement.node) & paths)


def is_barrier(statement: Statement) -> bool:
    """Whether a run must not reach over a statement."""
    if any(True for _ in statement.events()) or has_stray_await(statement.node, ()):
        return True
    return any(isinstance(inner.node, (cst.FunctionDef, cst.ClassDef)) for inner in statement.inside())
