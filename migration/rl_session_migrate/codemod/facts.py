"""What all decisions about a module look up: its blocks, its legacy sites, which names may be one object, where steps stay open.

Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rl_session_migrate.codemod.blocks import Block, blocks_of
from rl_session_migrate.codemod.elsewhere import Elsewhere, imported_name
from rl_session_migrate.codemod.engines import place_in
from rl_session_migrate.codemod.ours import is_in_own_scope
from rl_session_migrate.codemod.program import Doing, Event, Program
from rl_session_migrate.codemod.refits import is_covered
from rl_session_migrate.codemod.scoping import covers
from rl_session_migrate.codemod.steps import OpenSteps
from rl_session_migrate.codemod.words import CALLBACK, COROUTINES, SHAPES
from rl_session_migrate.outline import By, Function
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import Shape, Site
from rl_session_migrate.tree import dotted

__all__ = ["Facts", "is_bound_again", "is_registrable", "safe_functions"]


class Facts:
    """Facts of one module.

    Args:
        program: The module.
        elsewhere: What is known of functions of other modules.
    """

    def __init__(self, program: Program, elsewhere: Elsewhere) -> None:
        self.program = program
        self._elsewhere = elsewhere
        self.bodies: dict[int, Block] = {}
        for function in program.functions:
            body = blocks_of(program, function)
            if body is not None:
                self.bodies[id(function)] = body
        self.same = _aliases(program)
        self.sites = tuple(
            site for site in program.module.sites if site.receiver is not None and site.shape is not Shape.REMOTE
        )
        self._awaited = [identity_of(s) for s in self.sites if s.shape is Shape.AWAITED and s.rule.is_lifecycle]
        self.steps = OpenSteps(program, self.same, elsewhere)

    def body(self, function: Function) -> Block | None:
        """The blocks of a function; a lambda has none."""
        return self.bodies.get(id(function))

    def lifecycle(self, *tenants: Tenant) -> Iterator[Site]:
        """The legacy lifecycle sites of tenants."""
        for site in self.sites:
            if site.rule.is_lifecycle and site.rule.api is Api.LEGACY and site.rule.tenant in tenants:
                yield site

    @property
    def has_work(self) -> bool:
        """Whether the module moves anything by hand: otherwise its computing calls are somebody else's business."""
        legacy = any(
            site.rule.api is Api.LEGACY and (site.rule.is_lifecycle or site.rule.kind is Kind.REFIT)
            for site in self.sites
        )
        return legacy or bool(self.program.module.helpers) or self._hands_to_a_mover

    @property
    def _hands_to_a_mover(self) -> bool:
        """Whether a function of another migrated module is handed a tenant and moves it: what that leaves is relied on here."""
        return any(
            self._elsewhere.moves(imported_name(self.program, event))
            for function in self.program.functions
            for event in self.program.all_events(function)
            if event.doing is Doing.HANDED and any(r.tenant is not Tenant.ENGINE for r in event.receivers())
        )

    def is_in_sight(self, event: Event) -> bool:
        """Whether a tenant is handed to a function of another module that computes in scopes only, and moves it so."""
        return self._elsewhere.is_safe(imported_name(self.program, event))

    def block_of(self, site: Site) -> Block | None:
        """The block whose statement holds a site."""
        body = self.body(site.function)
        where = place_in(body, site.node) if body is not None else None
        return where.block if where is not None else None

    def is_covered(self, site: Site) -> bool:
        """Whether a site stands in a scope of its own tenant already."""
        assert site.receiver is not None
        tenant = site.receiver.tenant
        return is_in_own_scope(site) or covers(
            self.program, site.withs, site.receiver.identity, lambda receiver: receiver.tenant is tenant
        )

    def why_manual(self, site: Site) -> str:
        """Why a tenant cannot be put into scopes where a site stands; "" if it can."""
        who = identity_of(site)
        if any(self.same(who, other) for other in self._awaited):
            return COROUTINES
        return self.steps.why_open(site)

    def why_not_replaced(self, site: Site) -> str:
        """Why a transition cannot simply go or be replaced where it stands; "" if it can."""
        why = self.why_manual(site)
        if not why and site.shape is not Shape.CALL:
            why = SHAPES.get(site.shape, "it is not simply called")
        if not why and self.program.is_callback(site.function):
            why = CALLBACK
        if not why and (not site.is_statement or site.is_conditional):
            why = "its statement does more than call it"
        return why


def safe_functions(facts: Facts) -> frozenset[str]:
    """Functions that a tenant can be handed to: everything they do with a policy or value stands in scopes.

    To be asked of a module in which nothing is left to rewrite.
    """
    program = facts.program
    bad: set[int] = set()
    for function in program.functions:
        if any(_is_bare(facts, event) for event in program.all_events(function)):
            bad |= {id(outer) for outer in function.chain() if not outer.is_module}
    while True:
        callers = {
            id(function)
            for function in program.functions
            for event in program.all_events(function)
            if event.callee is not None and id(event.callee) in bad
        }
        if callers <= bad:
            break
        bad |= callers
    return frozenset(f.name for f in program.module.outline.functions.values() if f.name and id(f) not in bad)


def _is_bare(facts: Facts, event: Event) -> bool:
    if not any(receiver.tenant is not Tenant.ENGINE for receiver in event.receivers()):
        return False
    site = event.site
    match event.doing:
        case Doing.USE:
            return site is not None and site.method != "prepare_refit_info" and not facts.is_covered(site)
        case Doing.LIFECYCLE:
            return site is not None and site.rule.api is Api.LEGACY
        case Doing.HANDED:
            return not facts.is_in_sight(event)
        case Doing.REFIT:
            return not is_covered(facts.program, event)
    return False


def identity_of(site: Site) -> Identity:
    """Which object a site is about."""
    assert site.receiver is not None
    return site.receiver.identity


def is_registrable(function: Function, receiver: Receiver) -> bool:
    """Whether a function can name a tenant from its first line on: a parameter, an attribute of self, an outer name."""
    path = dotted(receiver.node)
    if not receiver.is_single or path is None:
        return False
    root = path.partition(".")[0]
    bindings = function.bindings.get(root, [])
    return root == function.this or not bindings or any(binding.by is By.PARAMETER for binding in bindings)


def is_bound_again(function: Function, receiver: Receiver) -> bool:
    """Whether the name of a tenant may stand for another object later in a function."""
    root = (dotted(receiver.node) or "").partition(".")[0]
    return any(binding.by is not By.PARAMETER for binding in function.bindings.get(root, ()))


def _aliases(program: Program) -> Callable[[Identity, Identity], bool]:
    """Which identities may be one object: what a name was bound to, at some point."""
    parent: dict[Identity, Identity] = {}

    def root(identity: Identity) -> Identity:
        while parent.get(identity, identity) != identity:
            identity = parent[identity]
        return identity

    for function in program.functions:
        for event in program.all_events(function):
            for receiver in event.receivers():
                for other in receiver.may_be:
                    parent[root(other)] = root(receiver.identity)
    return lambda one, other: one == other or root(one) == root(other)
