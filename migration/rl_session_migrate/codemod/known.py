"""Functions that may be handed a tenant and neither move it nor compute on it. Data only."""

from __future__ import annotations

import libcst as cst

from rl_session_migrate.tree import callee

__all__ = ["is_harmless"]

_BUILTINS = frozenset(
    {
        "isinstance",
        "issubclass",
        "getattr",
        "hasattr",
        "setattr",
        "print",
        "repr",
        "str",
        "type",
        "id",
        "len",
        "bool",
        "callable",
    }
)
_LOOKERS = frozenset(
    {
        "cast",
        "maybe_gpu_profile_step",  # starts or stops a profiler
        "_initial_policy_generation_stale",
        "warn",
        "info",
        "debug",
    }
)


def is_harmless(node: cst.Call) -> bool:
    """Whether a call only looks at what it is handed."""
    name = callee(node)
    return name in _LOOKERS or (isinstance(node.func, cst.Name) and name in _BUILTINS)
