"""How a tenant is spoken to through scopes: ``scopes(x)`` for a foreign object, its own handle where that is ours.

``shim = LegacyPolicy(policy)`` in sight means that ``policy`` is a handle of this library, and its scopes are written as such.
"""

from __future__ import annotations

import libcst as cst

from rl_session_migrate.outline import By, Function
from rl_session_migrate.receivers import Receiver
from rl_session_migrate.rules import SCOPES
from rl_session_migrate.sites import Site
from rl_session_migrate.tree import arguments, callee, code, dotted

__all__ = ["BY_HAND", "handle_of", "is_in_own_scope", "spoken"]

_SHIMS = frozenset({"LegacyPolicy", "LegacyValue", "LegacyGeneration"})
BY_HAND = "the shim moves both sides by itself, and what it wraps has a call of its own for that"


def handle_of(receiver: Receiver, function: Function) -> str:
    """The handle of this library that a shim in sight wraps, as text that means the same in a function; "" for all else."""
    call = receiver.origin
    if call is None or callee(call) not in _SHIMS or receiver.may_be:
        return ""
    positional, _, _ = arguments(call)
    path = dotted(positional[0]) if positional else None
    root = (path or "").partition(".")[0]
    names = {root, str(receiver).partition(".")[0]}
    homes = [function.home_of(name) for name in names]
    if path is None or any(
        home is None or not _is_bound_once(home, name) for home, name in zip(homes, names, strict=True)
    ):
        return ""
    return path


def _is_bound_once(home: Function, name: str) -> bool:
    return sum(binding.by is not By.IMPORT for binding in home.bindings[name]) == 1


def spoken(receiver: Receiver, function: Function) -> str:
    """What scopes of a tenant are called on."""
    return handle_of(receiver, function) or f"scopes({receiver})"


def is_in_own_scope(site: Site) -> bool:
    """Whether a site stands in a scope that is written for what it names, or for the handle that its shim wraps.

    By the text alone: who it is may be known by the method that is called, and not by the scope's.
    """
    if site.receiver is None:
        return False
    mine = {handle_of(site.receiver, site.function), f"scopes({site.receiver})", f"rl_scopes({site.receiver})"} - {""}
    calls = [item.item for with_ in site.withs for item in with_.items if isinstance(item.item, cst.Call)]
    return any(
        isinstance(call.func, cst.Attribute) and call.func.attr.value in SCOPES and code(call.func.value) in mine
        for call in calls
    )
