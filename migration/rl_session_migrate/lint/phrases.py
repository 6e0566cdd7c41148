"""Small questions about sites and receivers, and how findings speak of them."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from rl_session.lifecycle import scope_to_write
from rl_session_migrate.lint.state import At, State
from rl_session_migrate.receivers import Identity, Receiver
from rl_session_migrate.rules import Api, Rule, Tenant
from rl_session_migrate.sites import HelperSite, Module, Shape, Site
from rl_session_migrate.tree import arguments, callee, code, is_string, walk

__all__ = [
    "cause",
    "is_evaluation",
    "is_fresh",
    "is_here",
    "keeps_buffers",
    "receiver_of",
    "release",
    "remedy",
    "rests_on_host",
    "shared",
    "woken_tags",
]


def is_here(state: State, site: Site) -> bool:
    """Whether a tenant was put where it is by the function that a site is in."""
    return isinstance(state.by, Site) and state.by.function is site.function


def is_fresh(state: State) -> bool:
    """Whether a tenant was brought in and nothing used it since."""
    return state.by is not None and state.at in (At.TRAINING, At.LOGPROB) and not state.is_used and state.step is None


def cause(state: State) -> str:
    """The call that put a tenant where it is, to read."""
    by = state.by
    if by is None:
        return "a call"
    name = by.helper.name if isinstance(by, HelperSite) else by.method
    return f"{name}() on line {by.position.line}"


def remedy(rule: Rule, receiver: Receiver) -> tuple[str, str]:
    """The legacy call and the scope that a call needs before it."""
    scope = scope_to_write(rule.gate, receiver.tenant.value) if rule.gate else "training_mode"
    if scope == "training_mode":
        return f"{receiver}.prepare_for_training()", scope
    if receiver.tenant is Tenant.VALUE:
        return f"{receiver}.prepare_for_inference()", scope
    return f"{receiver}.prepare_for_lp_inference()", scope


def release(other: Receiver) -> str:
    """The call that sends a tenant away."""
    match other.tenant:
        case Tenant.ENGINE:
            return f"{other}.finish_generation()"
        case Tenant.VALUE:
            return f"{other}.finish_training()"
    return f"{other}.offload_to_cpu()"


def receiver_of(by: Site | HelperSite, identity: Identity) -> Receiver | None:
    """The tenant of an identity at a site."""
    if isinstance(by, Site):
        return by.receiver
    return next((t for t in by.tenants if t is not None and t.identity == identity), None)


def is_evaluation(site: Site) -> bool:
    """Whether it is ``train(..., eval_mode=True)``."""
    if not isinstance(site.node, cst.Call) or site.method not in ("train", "train_from_meta"):
        return False
    positional, keywords, _ = arguments(site.node)
    flag = keywords.get("eval_mode", positional[2] if len(positional) > 2 else None)
    return flag is not None and code(flag) == "True"


def keeps_buffers(site: Site) -> bool:
    """Whether a move says ``keep_train_buffers``, or something that may mean it."""
    if site.shape is Shape.TO_THREAD:
        call = next((p for p in reversed(site.parents) if isinstance(p, cst.Call)), None)
    else:
        call = site.node if isinstance(site.node, cst.Call) else None
    if call is None:
        return False
    positional, keywords, is_open = arguments(call)
    # Of to_thread(policy.prepare_for_lp_inference, True) the method itself is an argument too.
    first = next((index + 1 for index, value in enumerate(positional) if value is site.attribute), 0)
    keep = keywords.get("keep_train_buffers", positional[first] if len(positional) > first else None)
    return is_open or (keep is not None and code(keep) != "False")


def woken_tags(site: Site) -> frozenset[str] | None:
    """The parts of an engine that a wake names; None for all of it, and for what the source does not say."""
    if not isinstance(site.node, cst.Call):
        return None
    tags = arguments(site.node)[1].get("tags")
    if not isinstance(tags, (cst.List, cst.Tuple, cst.Set)):
        return None
    names = [is_string(element.value) for element in tags.elements]
    return frozenset(name for name in names if name is not None) if None not in names else None


def rests_on_host(receiver: Receiver) -> bool:
    """Whether the call that made a policy of this library is in sight and leaves it to rest on the host."""
    origin = receiver.origin
    if receiver.api is not Api.SCOPED or receiver.is_scopes or origin is None:
        return False
    _, keywords, is_open = arguments(origin)
    base = keywords.get("base")
    return not is_open and (base is None or code(base).strip("'\"") == "offloaded")


def shared(module: Module) -> Iterator[Identity]:
    """The tenants that ``share(...)`` of the NeMo-RL adapter puts on the same GPUs."""
    if not module.outline.imports.get("share", "").startswith("rl_session."):
        return
    for function in module.outline.functions.values():
        for node in walk(function.node, into_functions=False):
            if isinstance(node, cst.Call) and callee(node) == "share":
                for arg in node.args:
                    receiver = module.receivers.of(arg.value, function) if arg.keyword is None else None
                    if receiver is not None:
                        yield receiver.identity
