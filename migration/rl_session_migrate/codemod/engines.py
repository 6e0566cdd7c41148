"""Engines: the run of statements between a wake and a sleep that uses one becomes its scope.

Where no run does, wake and sleep keep their places, as calls that raise instead of returning False. Knows nothing of
policies but that their calls must not get into an engine's scope.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import libcst as cst

from rl_session_migrate.codemod.blocks import Block, Place, Statement, bound_paths, has_stray_await
from rl_session_migrate.codemod.ours import spoken
from rl_session_migrate.codemod.program import Doing, Event
from rl_session_migrate.codemod.scoping import Run, is_pure
from rl_session_migrate.receivers import Identity
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import Shape, Site
from rl_session_migrate.tree import arguments

__all__ = ["AwakeRun", "awake_runs", "why_not_a_call"]


@attrs.frozen(eq=False)
class AwakeRun:
    """Statements that use an engine, and the sleep behind them.

    Attributes:
        run: The statements.
        sleep: The call that the end of the scope replaces.
        uses: The nodes of everything inside.
    """

    run: Run
    sleep: Site
    uses: frozenset[int]


def why_not_a_call(site: Site) -> str:
    """Why a wake or a sleep cannot be replaced by a call of ours; "" if it can."""
    assert site.receiver is not None
    if site.shape is not Shape.CALL or not isinstance(site.node, cst.Call):
        return "the method is not simply called"
    if not site.is_statement:
        return "its result is used"
    if not is_pure(site.receiver):
        return f"{site.receiver} is no name that can be written a second time"
    positional, keywords, is_open = arguments(site.node)
    if is_open or positional:
        return "its arguments cannot be read"
    allowed = {"tags"} if site.rule.kind is Kind.WAKE else set()
    for name, value in keywords.items():
        if name == "release_gpu" and isinstance(value, cst.Name) and value.value == "True":
            continue
        if name == "release_gpu":
            never = isinstance(value, cst.Name) and value.value == "False"
            return (
                "the engine keeps serving, which no scope does" if never else "whether it sleeps is decided at run time"
            )
        if name not in allowed:
            return f"scopes know no {name}="
    return ""


def awake_runs(body: Block) -> Iterator[AwakeRun]:
    """The runs of statements that use an engine and end in its sleep."""
    for block in body.blocks():
        taken = -1
        for index, statement in enumerate(block.statements):
            site = _sleep_of(statement)
            if site is None or why_not_a_call(site):
                continue
            found = _run_before(block, index, site, taken)
            if found is not None:
                taken = index
                yield found


def _sleep_of(statement: Statement) -> Site | None:
    if not statement.is_simple or len(statement.head) != 1:
        return None
    site = statement.head[0].site
    if site is None or site.rule.kind is not Kind.SLEEP or site.rule.api is not Api.LEGACY:
        return None
    return site


def _run_before(block: Block, index: int, sleep: Site, taken: int) -> AwakeRun | None:
    """The uses right before a sleep, in the same block."""
    assert sleep.receiver is not None
    who = sleep.receiver.identity
    first = last = None
    for here in range(index - 1, taken, -1):
        statement = block.statements[here]
        uses = any(_uses(event, who) for event in statement.events())
        if not _fits(statement, who):
            break
        if uses:
            first = here
            last = here if last is None else last
    if first is None or last is None:
        return None
    inside = block.statements[first : last + 1]
    nodes = frozenset(id(event.node) for statement in inside for event in statement.events())
    is_async = any(_awaits(statement) for statement in inside)
    return AwakeRun(
        Run(block, first, last, f"{spoken(sleep.receiver, sleep.function)}.awake()", is_async), sleep, nodes
    )


def _uses(event: Event, who: Identity) -> bool:
    if event.doing is Doing.USE:
        site = event.site
        return (
            site is not None and site.rule.tenant is Tenant.ENGINE and any(r.identity == who for r in event.receivers())
        )
    return event.doing in (Doing.HANDED, Doing.CALL) and any(r.identity == who for r in event.receivers())


def _fits(statement: Statement, who: Identity) -> bool:
    """Whether a statement may stand in the scope of an engine."""
    for event in statement.events():
        if event.doing is Doing.DEVICE:
            continue
        if not _uses(event, who):
            return False
        if any(r.tenant is not Tenant.ENGINE for r in event.receivers()):
            return False
    if any(isinstance(inner.node, (cst.FunctionDef, cst.ClassDef)) for inner in statement.inside()):
        return False
    if who.path.partition(".")[0] in bound_paths(statement.node):
        return False
    return not has_stray_await(statement.node, [event.node for event in statement.events()])


def _awaits(statement: Statement) -> bool:
    """Whether a use inside is awaited."""
    own = [event.node for event in statement.events()]
    return bool(own) and has_stray_await(statement.node, ())


def place_in(body: Block, node: cst.CSTNode) -> Place | None:
    """The statement whose head holds a node."""
    for block in body.blocks():
        for index, statement in enumerate(block.statements):
            if any(event.node is node for event in statement.head):
                return Place(block, index)
    return None
