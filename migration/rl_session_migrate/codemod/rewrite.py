"""One module from text to text: passes until nothing changes, then the last strokes.

A pass may be cautious where an earlier transition is still in the way: the next one sees it gone. The result is a fixed point.
"""

from __future__ import annotations

import ast
import codecs
import re
import warnings
from enum import StrEnum

import attrs
import libcst as cst

from rl_session_migrate.codemod.decide import decide
from rl_session_migrate.codemod.edits import apply, split
from rl_session_migrate.codemod.elsewhere import NOWHERE, Elsewhere
from rl_session_migrate.codemod.facts import Facts, safe_functions
from rl_session_migrate.codemod.finish import Spelling, finish
from rl_session_migrate.codemod.imports import ADAPTER, add_import, spelling
from rl_session_migrate.codemod.ours import handle_of
from rl_session_migrate.codemod.plan import Found, Plan
from rl_session_migrate.codemod.program import Program
from rl_session_migrate.codemod.steps import OpenSteps
from rl_session_migrate.outline import Function
from rl_session_migrate.receivers import Names
from rl_session_migrate.rules import Api, Kind, Tenant
from rl_session_migrate.sites import HelperSite, Module, Shape, Site, UnknownSite, analyse
from rl_session_migrate.tree import callee, parents_of, parse, walk

__all__ = [
    "STEP_WORDS",
    "Outcome",
    "Rewritten",
    "Status",
    "could_matter",
    "handed_in_open_steps",
    "moving_functions",
    "rewrite",
]

MAX_PASSES = 8
_WORDS = (
    b"prepare_for_",
    b"offload_before_refit",
    b"offload_after_refit",
    b"offload_to_cpu",
    b"finish_inference",
    b"finish_training",
    b"finish_generation",
    b"refit_policy_generation",
    b"sync_weights",
)


STEP_WORDS = (b"begin_train_step", b"train_microbatches_from_meta", b"finish_train_step", b"keep_train_buffers")
"""Of which a file mentions one if it keeps a train step open between calls."""


class Status(StrEnum):
    """What became of a site."""

    REWRITTEN = "rewritten"
    LEFT = "left"


@attrs.frozen(kw_only=True)
class Outcome:
    """One lifecycle site of the module as it was.

    Attributes:
        line: Where it stood, from 1.
        column: Likewise.
        tenant: "policy", "value", "engine" or "synchronizer"; "unknown" where that cannot be told.
        method: What was called or named.
        receiver: On what.
        function: In which function.
        shape: How it was written.
        status: What became of it.
        why: What covers its effect now, or why it stays.
        advice: What to do by hand, if it stays.
    """

    line: int
    column: int
    tenant: str
    method: str
    receiver: str
    function: str
    shape: str
    status: Status = Status.LEFT
    why: str = ""
    advice: str = ""


@attrs.frozen(kw_only=True)
class Rewritten:
    """A module after the codemod.

    Attributes:
        before: Its bytes as they were.
        after: Its bytes now.
        outcomes: Every lifecycle site, in the order of the source.
        assumed: What was taken for granted, in words, with the line it concerns.
        carriers: Functions that push weights through a refit block, or make no legacy call of it any more.
        safe: Functions that do everything they do with a policy or value in scopes.
        num_passes: How many passes it took.
    """

    before: bytes
    after: bytes
    outcomes: tuple[Outcome, ...] = ()
    assumed: tuple[str, ...] = ()
    carriers: frozenset[str] = frozenset()
    safe: frozenset[str] = frozenset()
    num_passes: int = 0

    @property
    def changed(self) -> bool:
        """Whether anything is different."""
        return self.before != self.after


_COMPUTING = re.compile(
    rb"get_(reference_policy_)?logprobs|get_values|get_topk_logits|train_from_meta"
    rb"|(policy|value_model|critic|_trainer)\.(train|score|save_checkpoint)\("
)


def could_matter(data: bytes) -> bool:
    """Whether a file can have a site, or compute on what another file prepared: a fast look at its bytes."""
    return any(word in data for word in _WORDS) or _COMPUTING.search(data) is not None


def rewrite(
    data: bytes, path: str = "<string>", *, names: Names | None = None, elsewhere: Elsewhere | None = None
) -> Rewritten:
    """Rewrite a module.

    Args:
        data: Its bytes.
        path: Shown in reports.
        names: Extra names of tenants.
        elsewhere: Asked about functions that are imported.

    Raises:
        SyntaxError: It is no Python, or not in the encoding it claims.
        libcst.ParserSyntaxError: It is no Python that can be rewritten.
    """
    if not could_matter(data):
        _check_syntax(data)
        return Rewritten(before=data, after=data)
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    _check_syntax(data)
    worker = _Rewriter(data.removeprefix(bom), path, names, elsewhere or NOWHERE)
    worker.run()
    if worker.split_in_vain:
        worker = _Rewriter(data.removeprefix(bom), path, names, elsewhere or NOWHERE, splits=False)
        worker.run()
    after = bom + worker.data
    if data.endswith(b"\r") and not after.endswith(b"\r"):
        after += b"\r"  # the parser does not see a carriage return alone as the end of the last line
    _check_syntax(after)  # what does not compile never leaves here
    return Rewritten(
        before=data,
        after=after,
        outcomes=tuple(worker.outcomes),
        assumed=tuple(dict.fromkeys(worker.assumed)),
        carriers=worker.carriers,
        safe=worker.safe,
        num_passes=worker.num_passes,
    )


def _check_syntax(data: bytes) -> None:
    """Raise what the compiler has against a module.

    Raises:
        SyntaxError: It is no Python, or not in the encoding it claims.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an odd escape in somebody's string is not our business
        ast.parse(data)


class _Rewriter:
    """One module on its way.

    Args:
        data: Its bytes.
        path: Shown in reports.
        names: Extra names of tenants.
        elsewhere: Asked about functions that are imported.
        splits: Whether ``a; b`` may become two lines, where one of them is a transition.
    """

    def __init__(
        self, data: bytes, path: str, names: Names | None, elsewhere: Elsewhere, *, splits: bool = True
    ) -> None:
        self.data = data
        self._splits = splits
        self._split: frozenset[int] = frozenset()
        self.path = path
        self.names = names
        self.elsewhere = elsewhere
        self.assumed: list[str] = []
        self.carriers: frozenset[str] = frozenset()
        self.safe: frozenset[str] = frozenset()
        self.num_passes = 0
        self._alive: list[int] = []
        self._found: list[Outcome] = []
        self._unknown: list[Outcome] = []

    @property
    def outcomes(self) -> list[Outcome]:
        return sorted([*self._found, *self._unknown], key=lambda outcome: (outcome.line, outcome.column))

    @property
    def split_in_vain(self) -> bool:
        """Whether lines were split and nothing on any of them was rewritten: they might as well stay as they are."""
        mine = [outcome for outcome in self._found if outcome.line in self._split]
        return bool(mine) and all(outcome.status is Status.LEFT for outcome in mine)

    def run(self) -> None:
        """Go through the passes."""
        module = analyse(parse(self.data, self.path), self.names)
        self._found = [_outcome(site) for site in _counted(module)]
        self._unknown = [_unknown(site) for site in module.unknown]
        self._alive = list(range(len(self._found)))
        module = self._apart(module)
        while True:
            program = Program(module)
            plan = decide(program, self.elsewhere)
            if not plan.changes or self.num_passes >= MAX_PASSES:
                break
            self.num_passes += 1
            self._note(module, plan)
            self.data = self._edited(module, plan)
            module = analyse(parse(self.data, self.path), self.names)
        self._note_left(module, plan)
        facts = Facts(program, self.elsewhere)
        self.carriers = _carriers(module)
        self.assumed += _serving_loops(module)
        if module.receivers.speaks:  # else it is not even known what in it computes
            self.safe = safe_functions(facts)
        self.data = self._finished(facts, plan)

    def _apart(self, module: Module) -> Module:
        """The module with a line of its own for each statement beside a transition: a scope takes whole lines."""
        parents = parents_of(module.source.module)
        lines = {
            line
            for site in _counted(module)
            if isinstance(site, Site) and site.is_statement
            for line in [_line_of(site.node, parents)]
            if line is not None and len(line.body) > 1
        }
        if not lines or not self._splits:
            return module
        self._split = frozenset(module.source.line(line) for line in lines)
        self.data = split(module.source.module, lines, parents).bytes
        return analyse(parse(self.data, self.path), self.names)

    # -- text ----------------------------------------------------------------------------------------------------

    def _edited(self, module: Module, plan: Plan) -> bytes:
        local = spelling(module.outline, ADAPTER, "scopes")
        spelled = _spelled(plan, local)
        tree = apply(module.source.module, spelled, parents_of(module.source.module))
        if _speaks_scopes(spelled, local):
            tree = add_import(tree, module.outline, ADAPTER, "scopes", local)
        return tree.bytes

    def _finished(self, facts: Facts, plan: Plan) -> bytes:
        module = facts.program.module
        names = Spelling(spelling(module.outline, ADAPTER, "scopes"), spelling(module.outline, ADAPTER, "share"))
        tree = finish(facts, plan, parents_of(module.source.module), names)
        text = tree.bytes
        if f"{names.share}(".encode() in text and tree is not module.source.module:
            tree = add_import(tree, module.outline, ADAPTER, "share", names.share)
        return tree.bytes

    # -- outcomes ------------------------------------------------------------------------------------------------

    def _note(self, module: Module, plan: Plan) -> None:
        alive = []
        for number, site in self._aligned(module):
            became = _became(plan, site)
            if became:
                self._found[number] = attrs.evolve(self._found[number], status=Status.REWRITTEN, why=became)
            else:
                alive.append(number)
        self._alive = alive
        for site, text in plan.assumed:
            self.assumed.append(f"{site.method} in {site.function.name or 'the module'}: {text}")

    def _aligned(self, module: Module) -> list[tuple[int, Found]]:
        """The sites of a pass beside those of the file as it was that are still there: same order, same calls."""
        pairs: list[tuple[int, Found]] = []
        waiting = list(self._alive)
        for site in _counted(module):
            same = [number for number in waiting if _is_same(self._found[number], _outcome(site))]
            if same:
                pairs.append((same[0], site))
                waiting = waiting[waiting.index(same[0]) + 1 :]
        return pairs

    def _note_left(self, module: Module, plan: Plan) -> None:
        for number, site in self._aligned(module):
            if site in plan.covered:
                found = attrs.evolve(self._found[number], status=Status.REWRITTEN, why=plan.covered[site])
            else:
                why = plan.left.get(site) or _DEFAULT.get(site.shape, "it was not understood")
                found = attrs.evolve(self._found[number], why=why, advice=_advice(site))
            self._found[number] = found
        self._note_strangers(module)

    def _note_strangers(self, module: Module) -> None:
        """Say why a site stays whose handle nothing identifies any more: what did so went in an earlier pass."""
        strangers = [_unknown(site) for site in module.unknown]
        for number in self._alive:
            found = self._found[number]
            same = next((each for each in strangers if _is_same(attrs.evolve(each, tenant=found.tenant), found)), None)
            if found.status is Status.LEFT and not found.why and same is not None:
                self._found[number] = attrs.evolve(found, why=same.why, advice=same.advice)


_DEFAULT = {
    Shape.STRING: "the method is named in a string",
    Shape.VALUE: "the method is passed as a value",
}


def _spelled(plan: Plan, local: str) -> Plan:
    if local == "scopes":
        return plan

    def spell(text: str) -> str:
        return text.replace("scopes(", f"{local}(", 1)

    return attrs.evolve(
        plan,
        runs=[attrs.evolve(run, item=spell(run.item)) for run in plan.runs],
        replace={site: spell(text) for site, text in plan.replace.items()},
    )


def _speaks_scopes(plan: Plan, local: str) -> bool:
    return any(f"{local}(" in text for text in (*(run.item for run in plan.runs), *plan.replace.values()))


def _became(plan: Plan, site: Found) -> str:
    if not isinstance(site, Site):
        return ""
    return plan.remove.get(site, "") or plan.replace.get(site, "")


def _line_of(node: cst.CSTNode, parents: dict[cst.CSTNode, cst.CSTNode]) -> cst.SimpleStatementLine | None:
    here: cst.CSTNode | None = node
    while here is not None and not isinstance(here, cst.SimpleStatementLine):
        here = parents.get(here)
    return here


def _counted(module: Module) -> list[Found]:
    """The legacy lifecycle sites of a module: what the migration is about."""
    found: list[Found] = [site for site in module.sites if _is_counted(site)]
    found += module.helpers
    return sorted(found, key=lambda site: site.position)


def _is_counted(site: Site) -> bool:
    if site.shape is Shape.REMOTE or site.rule.api is not Api.LEGACY:
        return False
    return site.rule.is_lifecycle or site.rule.kind is Kind.REFIT


def _outcome(site: Found) -> Outcome:
    is_helper = isinstance(site, HelperSite)
    method = site.helper.name if isinstance(site, HelperSite) else site.method
    is_push = is_helper or (isinstance(site, Site) and site.rule.kind is Kind.REFIT)
    tenant = Tenant.ENGINE if is_push or not isinstance(site, Site) else site.rule.tenant
    receiver = "" if not isinstance(site, Site) or site.receiver is None else str(site.receiver)
    return Outcome(
        line=site.position.line,
        column=site.position.column,
        tenant=str(tenant),
        method=method,
        receiver=receiver,
        function=site.function.name or "<module>",
        shape=str(site.shape),
    )


def _unknown(site: UnknownSite) -> Outcome:
    return Outcome(
        line=site.position.line,
        column=site.position.column,
        tenant="unknown",
        method=site.method,
        receiver=site.receiver,
        function=site.function.name or "<module>",
        shape=str(site.shape),
        why=site.why,
        advice='if it is one, name it in pyproject.toml: [tool.rl-session.migrate] policies = ["..."]',
    )


def _is_same(one: Outcome, other: Outcome) -> bool:
    """Whether two sites are one call, in two states of a file."""
    keys = ("tenant", "method", "receiver", "function", "shape")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def _serving_loops(module: Module) -> list[str]:
    """Loops whose engine serves others while they work: they say when it blocks training, and scopes do not ask."""
    found = []
    for function in module.outline.functions.values():
        has_scopes = any(s.receiver is not None and s.receiver.is_scopes for s in module.sites_in(function))
        asked = [
            n for n in walk(function.node, into_functions=False) if isinstance(n, cst.Call) and callee(n) in _SERVING
        ]
        if has_scopes and asked:
            found.append(
                f"{callee(asked[0])} in {function.name or 'the module'}: the engine serves others while this loop works; a"
                " scope of a policy or value on the same GPUs puts it to sleep, so its users must be paused around each"
            )
    return found


_SERVING = frozenset({"blocks_training", "wake_carries_weight_updates"})


def _is_clean(module: Module, function: Function) -> bool:
    """Whether a function that pushes weights makes none of the calls by hand: every push in it stands in a refit block."""
    mine = module.sites_in(function)
    legacy = [
        site
        for site in mine
        if site.rule.is_lifecycle and site.rule.api is Api.LEGACY and site.rule.kind is not Kind.NOOP
    ]
    blocks = [site for site in mine if site.rule.kind is Kind.REFIT and site.rule.api is Api.SCOPED]
    return bool(blocks) and not legacy


def _carriers(module: Module) -> frozenset[str]:
    return frozenset(
        function.name for function in module.outline.functions.values() if _is_clean(module, function) and function.name
    )


def moving_functions(data: bytes, path: str, names: Names | None = None) -> frozenset[str]:
    """The functions of a module that move a policy or value, by hand or in scopes.

    Args:
        data: Its bytes.
        path: Shown in errors.
        names: Extra names of tenants.

    Raises:
        libcst.ParserSyntaxError: It is no Python.
    """
    module = analyse(parse(data, path), names)
    kinds = (Kind.PREPARE, Kind.OFFLOAD, Kind.SCOPE, Kind.SWITCH)
    return frozenset(
        site.function.name
        for site in module.sites
        if site.rule.kind in kinds and site.rule.tenant in (Tenant.POLICY, Tenant.VALUE) and site.function.name
    )


def handed_in_open_steps(data: bytes, path: str, names: Names | None, elsewhere: Elsewhere) -> list[tuple[str, str]]:
    """The imported functions that a module hands a tenant to while a train step of it is open, and who does it.

    Args:
        data: Its bytes.
        path: Shown in errors.
        names: Extra names of tenants.
        elsewhere: What is known of other modules.

    Raises:
        libcst.ParserSyntaxError: It is no Python.
    """
    program = Program(analyse(parse(data, path), names), hands_only=True)
    return list(OpenSteps(program, Facts(program, elsewhere).same, elsewhere).handed_in_open_step())


def _advice(site: Found) -> str:
    """What to do by hand about a site that stays."""
    handles = (
        [handle_of(t, site.function) for t in site.tenants if t is not None] if isinstance(site, HelperSite) else []
    )
    if len(handles) == 2 and all(handles):
        return f"{handles[0]}.refit({handles[1]})  # in its place"
    if isinstance(site, HelperSite) or site.rule.kind is Kind.REFIT:
        return "with scopes(policy).legacy_refit(policy_generation): ...  # around the call"
    if site.rule.kind in (Kind.WAKE, Kind.SLEEP):
        return "scopes(policy_generation).wake() and .sleep() at the same places, once who uses the engine is known"
    if site.shape in (Shape.TO_THREAD, Shape.SUBMITTED):
        return "open the scope where the thread runs, or `async with` it around the awaited compute call"
    if site.shape in (Shape.VALUE, Shape.STRING):
        return "make the call in a function of your own, and open the scope there"
    if site.rule.kind is Kind.OFFLOAD and site.method != "offload_before_refit":
        return f"scopes({site.receiver}).offload()  # in its place"
    return site.rule.write.format(str(site.receiver), "policy_generation") + "  # around what relies on it"
