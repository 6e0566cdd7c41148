"""The structure of an optimizer's state, so that a failed first step can be undone.

Moments are restored from host copies; what is not in a component (0-dim counters, plain numbers, the containers
themselves) is remembered here. Knows nothing of where bytes are.
"""

from __future__ import annotations

import copy
from typing import Any

import attrs
import torch
from torch import Tensor

from rl_session.offload.inventory import reachable_tensors

__all__ = ["OptimizerStructure"]


@attrs.define(eq=False)
class OptimizerStructure:
    """What ``optimizer.state`` looked like: containers and scalars by value, larger tensors by identity."""

    optimizer: torch.optim.Optimizer
    state: dict[Any, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer | None) -> OptimizerStructure | None:
        """Remember the structure; None without an optimizer. Never creates state (``items()`` only)."""
        if optimizer is None:
            return None
        return cls(optimizer, {parameter: _copy_small(state) for parameter, state in optimizer.state.items()})

    def put_back(self) -> None:
        """Make the optimizer's state look as it did."""
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)


def _copy_small(state: Any) -> Any:
    """A copy in which tensors of one or more dimensions are the same objects and 0-dim ones are clones."""
    if isinstance(state, dict) and all(isinstance(v, Tensor | int | float | bool | None) for v in state.values()):
        return {k: v.clone() if isinstance(v, Tensor) and v.dim() == 0 else v for k, v in state.items()}
    large = {id(tensor): tensor for _, tensor in reachable_tensors(state, "") if tensor.dim() > 0}
    try:
        return copy.deepcopy(state, dict(large))
    except Exception:  # a lock, a generator, a weak reference: then what stands is all there is to go back to
        return state
