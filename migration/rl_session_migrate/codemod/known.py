"""Functions that may be handed a tenant and neither move it nor compute on it. Data only."""

from __future__ import annotations

import libcst as cst

from rl_session_migrate.tree import callee

__all__ = ["is_harmless", "is_harmless_method"]

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


_CONTAINERS = frozenset({"append", "appendleft", "extend", "insert", "setdefault"})
_METHODS = frozenset({"shutdown", "close", "items", "keys", "values", "get", "copy"})
_OF_ROWS = frozenset(
    {"prepare_step", "finish_step", "prepare_val_partition", "discard_samples", "get_data_plane_step_metrics"}
)
"""What a policy does to the rows of a batch that lie outside the model."""
_METHODS_LIKE = ("print_", "log_", "init_", "is_", "has_", "start_", "stop_", "report_", "read_", "write_")


def is_harmless_method(name: str) -> bool:
    """Whether a method that the tables do not know neither computes nor moves: it connects, tells, measures or ends."""
    return name in _METHODS | _OF_ROWS or name.startswith(_METHODS_LIKE)


def is_harmless(node: cst.Call) -> bool:
    """Whether a call only looks at what it is handed."""
    name = callee(node)
    if isinstance(node.func, cst.Attribute) and name in _CONTAINERS:
        return True
    return name in _LOOKERS or (isinstance(node.func, cst.Name) and name in _BUILTINS)
