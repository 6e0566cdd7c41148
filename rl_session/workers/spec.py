"""What a worker is made of: one plain record. Knows nothing of what is done with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

__all__ = ["WorkerSpec"]


@attrs.define(eq=False, kw_only=True)
class WorkerSpec:
    """Everything a worker is made of.

    Attributes:
        model: The module, or a compiled wrapper of it.
        optimizer: Its optimizer, or None.
        scheduler: A learning rate scheduler, stepped once a ``train`` call.
        max_grad_norm: Gradients are clipped to this norm; None for no clipping.
        masters: Pairs of module parameter and the optimizer's fp32 master of it.
        reference: None, "copy", "adapter-off" or a module.
        forward_fn: ``forward_fn(model, batch) -> logits``; None for the usual signature.
        temperature: Logits are divided by it.
        extras: Registered extras by name.
        verify: Whether contents are compared at every move.
        pin: Whether host buffers are page-locked on CUDA.
        label: How messages name the policy.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any | None = None
    max_grad_norm: float | None = None
    masters: Sequence[tuple[nn.Parameter, Tensor]] = ()
    reference: str | nn.Module | None = None
    forward_fn: Callable[..., Any] | None = None
    temperature: float = 1.0
    extras: Mapping[str, Any] = attrs.field(factory=dict)
    verify: bool = False
    pin: bool = True
    label: str = "policy"

    @property
    def module(self) -> nn.Module:
        """The module itself, under a compiled wrapper."""
        module: nn.Module = getattr(self.model, "_orig_mod", self.model)
        return module

    @property
    def bare(self) -> nn.Module:
        """The module under every wrapper: the one that gives weights their names."""
        module = self.module
        return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
