"""The checks that need no order of events: how a call is written, and what it is inside of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import libcst as cst

from rl_session_migrate.lint.codes import CODES
from rl_session_migrate.lint.findings import Finding
from rl_session_migrate.outline import By, Function
from rl_session_migrate.receivers import Evidence
from rl_session_migrate.rules import Api, Kind, rule_of
from rl_session_migrate.sites import Module, Shape, Site
from rl_session_migrate.tree import arguments, callee, children, dotted, walk

__all__ = ["check_syntax"]

_MAY_YIELD = frozenset({"contextmanager", "asynccontextmanager", "fixture"})


def check_syntax(module: Module) -> Iterator[Finding]:
    """Findings that a look at one statement, and at what is around it, shows."""
    for site in module.sites:
        if site.receiver is None or site.must_fail:
            continue
        yield from _wake(module, site)
        yield from _arguments(module, site)
        yield from _nothing(module, site)
        yield from _unentered(module, site)
        yield from _outlived(module, site)
    yield from _uncalled(module)
    yield from _yields(module)
    yield from _reused(module)


def _finding(module: Module, node: cst.CSTNode, rule: str, what: str, write: str) -> Finding:
    position = module.source.position(node)
    return Finding(module.source.path, position.line, position.column, rule, what, CODES[rule].why, write)


def _wake(module: Module, site: Site) -> Iterator[Finding]:
    """A wake whose result nobody looks at."""
    if site.rule.kind is Kind.WAKE and site.is_statement and site.shape in (Shape.CALL, Shape.AWAITED, Shape.TO_THREAD):
        name = f"{site.receiver}.{site.method}()"
        write = f"with scopes({site.receiver}).awake():, or: if {name} is False: raise"
        yield _finding(module, site.node, "RLM005", f"the result of {name} is ignored", write)


def _arguments(module: Module, site: Site) -> Iterator[Finding]:
    """Arguments that the facade does not take."""
    if not isinstance(site.node, cst.Call) or site.rule.api is not Api.LEGACY or site.shape is Shape.STRING:
        return
    positional, keywords, _ = arguments(site.node)
    name = f"{site.receiver}.{site.method}()"
    takes = site.rule.takes
    if takes is not None:
        extra = [key for key in keywords if key not in takes]
        if extra:
            what = f"{name} takes no {', '.join(extra)}"
            yield _finding(module, site.node, "RLM015", what, f"{name} without it")
        elif len(positional) > len(takes):
            what = f"{name} takes {'no arguments' if not takes else 'one argument'}, and is given {len(positional)}"
            yield _finding(module, site.node, "RLM015", what, f"{name} without them")
    if site.rule.kind is Kind.SLEEP and positional:
        what = f"{name} is given a positional argument: with Megatron it takes release_gpu by keyword only"
        yield _finding(module, site.node, "RLM015", what, f"{site.receiver}.{site.method}(release_gpu=...)")


def _nothing(module: Module, site: Site) -> Iterator[Finding]:
    """A call that looks like a move and is none."""
    receiver = site.receiver
    if receiver is None or site.rule.kind is not Kind.NOOP or not site.shape.runs_here or receiver.may_be:
        return
    if receiver.evidence is Evidence.NAME and site.method != "finish_training":
        return  # an engine may go by the name of a policy
    if site.method == "finish_training":
        write = f"{receiver}.offload_to_cpu(), or: scopes({receiver}).offload()"
    else:
        write = "call it on the engine"
    alias = ""
    written = dotted(site.attribute.value) if isinstance(site.attribute, cst.Attribute) else None
    if written is not None and written != receiver.identity.path:
        alias = f" ({written} is {receiver.identity})"
    what = f"{receiver}.{site.method}() of a policy does nothing{alias}"
    yield _finding(module, site.node, "RLM016", what, write)


def _unentered(module: Module, site: Site) -> Iterator[Finding]:
    """A scope that is made and thrown away, or given a name that nobody reads."""
    if site.rule.kind is not Kind.SCOPE or site.shape is not Shape.CALL:
        return
    name = f"{site.receiver}.{site.method}()"
    write = f"with {name}:"
    if site.is_statement:
        yield _finding(module, site.node, "RLM101", f"{name} is made and never entered", write)
        return
    bound = _assigned(site)
    if bound is not None and not _is_read(bound, site.function):
        yield _finding(module, site.node, "RLM101", f"{name} is given the name {bound} and never entered", write)


def _uncalled(module: Module) -> Iterator[Finding]:
    """``with policy.training_mode:``: the method that makes a scope, without the call."""
    for function in module.outline.functions.values():
        for node in walk(function.node, into_functions=False):
            item = node.item if isinstance(node, cst.WithItem) else node.value if isinstance(node, cst.Expr) else None
            if not isinstance(item, cst.Attribute):
                continue
            method = item.attr.value
            receiver = module.receivers.of_call(item.value, method, function)
            rule = rule_of(receiver.tenant, method) if receiver is not None else None
            if rule is not None and (rule.kind is Kind.SCOPE or rule.gate == "begin_step"):
                name = f"{receiver}.{method}"
                what = f"{name} is a method that makes a scope, and it is not called"
                yield _finding(module, item, "RLM101", what, f"with {name}():")


def _outlived(module: Module, site: Site) -> Iterator[Finding]:
    """The handle that a ``with`` gave a name is used after its block."""
    receiver = site.receiver
    if receiver is None or receiver.handle_of is None or not isinstance(receiver.node, cst.Name):
        return
    name = receiver.node.value
    blocks = [
        (block, item)
        for block in walk(site.function.node, into_functions=False)
        if isinstance(block, cst.With)
        for item in block.items
        if item.asname is not None and isinstance(item.asname.name, cst.Name) and item.asname.name.value == name
    ]
    # A block that is not of this function lives as long as its caller says; a header may use what it has bound.
    if not blocks or any(block in site.parents for block, _ in blocks):
        return
    line = module.source.line(blocks[0][0])
    what = f"{receiver}.{site.method}(): {name} is the handle of the scope of line {line}, which has ended"
    yield _finding(module, site.node, "RLM108", what, f"{receiver}.{site.method}() inside the block")


def _assigned(site: Site) -> str | None:
    above = site.parents[-1] if site.parents else None
    if isinstance(above, cst.Assign) and len(above.targets) == 1 and isinstance(above.targets[0].target, cst.Name):
        return above.targets[0].target.value
    return None


def _is_read(name: str, function: Function) -> bool:
    """Whether a name is read anywhere in a function, those inside it included."""
    if name in function.foreign or function.is_module:
        return True  # anybody may read it
    stored = {
        id(target.target) for node in walk(function.node) if isinstance(node, cst.Assign) for target in node.targets
    }
    return any(
        isinstance(node, cst.Name) and node.value == name and id(node) not in stored for node in walk(function.node)
    )


def _yields(module: Module) -> Iterator[Finding]:
    for function in module.outline.functions.values():
        if not function.is_generator or not isinstance(function.node, cst.FunctionDef):
            continue
        names = {
            callee(d.decorator) if isinstance(d.decorator, cst.Call) else (dotted(d.decorator) or "").rpartition(".")[2]
            for d in function.node.decorators
        }
        if not names & _MAY_YIELD:
            yield from _yields_in(module, function.node.body, ())


def _yields_in(module: Module, node: cst.CSTNode, scopes: tuple[Site, ...]) -> Iterator[Finding]:
    """The yields below a node, with the scopes around them."""
    for child in children(node):
        if isinstance(child, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            continue
        if isinstance(child, cst.With):
            mine = [module.at(item.item) for item in child.items]
            inner = tuple(site for site in mine if isinstance(site, Site) and site.rule.kind is Kind.SCOPE)
            yield from _yields_in(module, child.body, (*scopes, *inner))
            continue
        if isinstance(child, cst.Yield) and scopes:
            scope = scopes[-1]
            what = f"yield inside {scope.receiver}.{scope.method}() of line {scope.position.line}"
            write = "close the scope before the yield, or make a context manager of the function"
            yield _finding(module, child, "RLM105", what, write)
        yield from _yields_in(module, child, scopes)


def _reused(module: Module) -> Iterator[Finding]:
    """One scope object that two ``with`` statements, or one in a loop, enter."""
    for function in module.outline.functions.values():
        entered: dict[str, list[cst.With]] = defaultdict(list)
        for node in walk(function.node, into_functions=False):
            if isinstance(node, cst.With):
                for item in node.items:
                    if isinstance(item.item, cst.Name):
                        entered[item.item.value].append(node)
        for name, withs in entered.items():
            yield from _reused_name(module, function, name, withs)


def _reused_name(module: Module, function: Function, name: str, withs: list[cst.With]) -> Iterator[Finding]:
    home = function.home_of(name)
    bindings = home.bindings[name] if home is not None else []
    if len(bindings) != 1 or bindings[0].by is not By.ASSIGN or bindings[0].value is None:
        return
    site = module.at(bindings[0].value)
    if not isinstance(site, Site) or site.rule.kind is not Kind.SCOPE or site.receiver is None:
        return
    made = f"{site.receiver}.{site.method}()"
    write = f"with {made}: each time"
    loops = [loop for loop in walk(function.node, into_functions=False) if isinstance(loop, (cst.For, cst.While))]
    for node in withs:
        for loop in loops:
            below = set(walk(loop))
            if node in below and bindings[0].value not in below:
                what = f"the loop enters the one scope {name} ({made}) of line {site.position.line} again and again"
                yield _finding(module, node, "RLM106", what, write)
                break
        else:
            if node is not withs[0] and not _apart(function, withs[0], node):
                what = f"{name} ({made}) was entered on line {module.source.line(withs[0])} before"
                yield _finding(module, node, "RLM106", what, write)


def _apart(function: Function, first: cst.With, second: cst.With) -> bool:
    """Whether two statements stand in different arms of one ``if``, so that one path cannot meet both."""
    for node in walk(function.node, into_functions=False):
        if isinstance(node, cst.If) and node.orelse is not None:
            body, other = set(walk(node.body)), set(walk(node.orelse))
            if (first in body and second in other) or (first in other and second in body):
                return True
    return False
