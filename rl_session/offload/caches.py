"""Cache hooks: callables that give back memory no parameter, buffer or state owns.

Kernels and models keep workspaces on the side (fp8 workspaces, rotary tables); a hook frees them whenever bytes leave the
device. The built-in hooks look only at modules that are imported already. Knows nothing of what it frees.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

__all__ = ["CacheHook", "clear_fp8_workspaces", "run_cache_hooks"]

CacheHook = Callable[[nn.Module], None]
"""Called with the policy's module after its bytes left the device."""


def clear_fp8_workspaces(module: nn.Module) -> None:
    """Empty the weight workspaces that Transformer Engine modules keep in ``_fp8_workspaces``."""
    for submodule in module.modules():
        workspaces = submodule.__dict__.get("_fp8_workspaces")
        if isinstance(workspaces, dict):
            workspaces.clear()


def run_cache_hooks(module: nn.Module, hooks: list[CacheHook]) -> list[str]:
    """Run the built-in hooks and then ``hooks``; one that fails is reported, never raised.

    Returns:
        One message for each hook that failed.
    """
    problems: list[str] = []
    for hook in [clear_fp8_workspaces, *hooks]:
        try:
            hook(module)
        except Exception as error:
            name = getattr(hook, "__qualname__", repr(hook))
            problems.append(f"cache hook {name} failed: {type(error).__name__}: {error}")
    return problems
