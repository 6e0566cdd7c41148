"""Gradients of ranks, made one: each parameter's gradient is the sum over ranks, whoever reduces it.

A loss is this rank's share of the global loss, so gradients have to be *summed*. FSDP2 and DDP average:

- FSDP2 is told to sum while we run backward (:meth:`~rl_session.offload.shards.Shards.summing`): nothing is multiplied.
- DDP divides by the number of ranks in C++; the gradient that enters backward is multiplied by it. Exact for a power of
  two, within one rounding else.
- What neither of them reduces (a replicated model, parameters left out of sharding) is summed here, once, before the step.

On one rank all of this is nothing. Knows nothing of losses, chunks or placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rl_session.errors import UnsupportedError
from rl_session.offload.shards import Shards
from rl_session.offload.tensors import plain_tensors
from rl_session.workers.ranks import SOLO, Ranks

__all__ = ["GradientSync"]


class GradientSync:
    """How the gradients of one rank become those of all.

    Args:
        module: The model, under a compiled wrapper.
        shards: Its FSDP2 shards.
        ranks: The ranks that hold it.
    """

    def __init__(self, module: nn.Module, shards: Shards | None = None, ranks: Ranks = SOLO) -> None:
        self.module = module
        self.shards = shards if shards is not None else Shards([module])
        self.ranks = ranks
        self._is_ddp = isinstance(module, DistributedDataParallel)

    @property
    def scale(self) -> float:
        """What the gradient that enters backward is multiplied by."""
        return float(self.ranks.count) if self._is_ddp else 1.0

    @property
    def keeps_buckets(self) -> bool:
        """Whether gradients are views of DDP's buckets: zeroed, not let go of, or nobody could find the buckets."""
        return isinstance(self.module, DistributedDataParallel) and bool(self.module.gradient_as_bucket_view)

    def summing(self) -> AbstractContextManager[None]:
        """Within the block backward sums what it reduces over ranks."""
        return self.shards.summing()

    def check(self, label: str) -> None:
        """Refuse parameters that are spread over ranks in a way that makes their gradients no business of ours.

        Raises:
            UnsupportedError: A DTensor that FSDP2 does not manage, or one that is also spread over other ranks.
        """
        own = self.shards.parameter_ids()
        for name, parameter in self.shards.parameters(self.module):
            if not isinstance(parameter, DTensor):
                continue
            size = parameter.device_mesh.size()
            if id(parameter) not in own or size != self.ranks.count:
                raise UnsupportedError(
                    f"{label}: {name} is spread over {size} ranks, not as data-parallel training spreads it",
                    (f"placements: {parameter.placements}", "tensor and expert parallelism are not served"),
                    'parallelize(model, "fsdp2", mesh) of a plain module',
                )

    def reduce(self) -> None:
        """Sum, over ranks, the gradients that neither FSDP2 nor DDP reduces. One that is missing on a rank counts as zeros."""
        if self.ranks.count == 1 or self._is_ddp:
            return
        ours = [p for _, p in self.shards.parameters(self.module) if p.requires_grad and not isinstance(p, DTensor)]
        if not ours:
            return
        present = self.ranks.gather([float(p.grad is not None) for p in ours])
        reduced = [p for p, flags in zip(ours, zip(*present, strict=True), strict=True) if any(flags)]
        for parameter in reduced:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.sum_tensors([p.grad for p in reduced if p.grad is not None])

    @staticmethod
    def scale_by(gradients: Iterable[Tensor], factor: float | Tensor) -> None:
        """Multiply gradients in place; of sharded ones the shards."""
        plain = [inner for gradient in gradients for inner in plain_tensors(gradient)]
        if plain:
            torch._foreach_mul_(plain, factor)

    @staticmethod
    def total_norm(gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients together, of whole ones where they are sharded: a collective for those.

        Returns:
            A plain tensor without dimensions.
        """
        norms = []
        for part in _by_mesh(gradients):
            norm = torch.nn.utils.get_total_norm(part)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _by_mesh(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in lists of one mesh each; one empty list for none at all."""
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        key = gradient.device_mesh if isinstance(gradient, DTensor) else None
        groups.setdefault(key, []).append(gradient)
    yield from groups.values() or [[]]
