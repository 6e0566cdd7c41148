"""What FSDP2 keeps behind ``module.parameters()``: the shards, whatever is registered on the modules at the moment.

``fully_shard`` registers the sharded parameters (DTensors) on the modules, swaps unsharded ones in for a forward, and
keeps a padded flat tensor over each shard for its all-gather. The bytes that move are those of the shards, so they are
found here in every state, without a collective and without changing anything. :meth:`Shards.reshard` puts the shards
back on the modules: before they move or are overwritten, because an unsharded copy that outlives them is silently stale.

The one module that reads attributes of FSDP2 that are not public (torch 2.6 to 2.13); what a version does not have is
taken as not there. Knows nothing of devices, placements or policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

__all__ = ["Shards"]


class Shards:
    """The FSDP2 modules inside some roots; for modules without any, empty and free of cost.

    Args:
        roots: Modules to look into; ``fully_shard`` was applied before.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        found = {id(part): part for root in roots for part in root.modules() if isinstance(part, FSDPModule)}
        self.modules: list[FSDPModule] = list(found.values())

    def __bool__(self) -> bool:
        return bool(self.modules)

    # -- doing ---------------------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Register the shards on every module and free the unsharded parameters. Idempotent.

        What one rank reshards the others must, too: a rank that believes a parameter to be gathered joins no
        all-gather for it.
        """
        for module in self.modules:
            module.reshard()
        for parameter in self._parameters():
            # Resharding to a smaller group (reshard_after_forward=2) leaves its copy behind, up to the next forward.
            if getattr(parameter, "_sharded_post_forward_param_data", None) is not None:
                parameter._sharded_post_forward_param = None
                parameter._sharded_post_forward_param_data = None

    def reset(self) -> None:
        """Give up a forward or backward that failed half-way: its gradients are lost, the next one starts afresh."""
        for module in self.modules:
            state = module._get_fsdp_state()
            if state._is_root and hasattr(module, "reset_iter_state"):  # only since torch 2.12
                module.reset_iter_state()
        for parameter in self._parameters():
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
            parameter.unsharded_accumulated_grad = None
        self.reshard()

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Within the block the gradients of ranks are summed, not averaged.

        ``set_gradient_divide_factor(1.0)`` alone asks for ``PREMUL_SUM``, which gloo does not know; with
        ``set_force_sum_reduction_for_comms`` it is a plain sum on every backend, and nothing is multiplied or divided
        (torch 2.13; ``set_reduce_scatter_divide_factor`` is its deprecated name).
        """
        was = [(group, group.gradient_divide_factor, group.force_sum_reduction_for_comms) for group in self._groups()]
        try:
            for module in self.modules:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            yield
        finally:
            for group, factor, forced in was:
                group.gradient_divide_factor, group.force_sum_reduction_for_comms = factor, forced

    # -- looking -------------------------------------------------------------------------------------------------

    def unsharded(self) -> dict[int, nn.Parameter]:
        """What may be registered on a module instead of a shard: its ``id``, and the shard it stands for."""
        return {
            id(stand_in): parameter.sharded_param
            for parameter in self._parameters()
            for name in ("_unsharded_param", "_sharded_post_forward_param")
            if (stand_in := getattr(parameter, name, None)) is not None
        }

    def padded(self) -> dict[int, Tensor]:
        """``id`` of each shard, and the padded flat tensor over the same storage that is gathered from."""
        return {
            id(parameter.sharded_param): parameter._sharded_param_data
            for parameter in self._parameters()
            if isinstance(getattr(parameter, "_sharded_param_data", None), Tensor)
        }

    def gathered(self) -> list[tuple[str, Tensor]]:
        """Unsharded parameters that have their bytes now, and copies resharded to a smaller group."""
        return [
            (f"{parameter._param_fqn or parameter._module_info.param_name} (gathered)", tensor)
            for parameter in self._parameters()
            for tensor in (*parameter.all_gather_outputs, getattr(parameter, "_sharded_post_forward_param_data", None))
            if tensor is not None and tensor.untyped_storage().nbytes()
        ]

    def parameter_ids(self) -> frozenset[int]:
        """``id`` of each shard."""
        return frozenset(id(parameter.sharded_param) for parameter in self._parameters())

    def hidden_gradients(self) -> list[tuple[str, Tensor]]:
        """Gradients that ``set_requires_gradient_sync(False)`` keeps unsharded, where no ``.grad`` shows them."""
        found: list[tuple[str, Tensor]] = []
        for parameter in self._parameters():
            unsharded = getattr(parameter, "_unsharded_param", None)
            held = (getattr(unsharded, "grad", None), getattr(parameter, "unsharded_accumulated_grad", None))
            name = parameter._param_fqn or parameter._module_info.param_name
            found += [(f"{name}.grad (not reduced)", gradient) for gradient in held if gradient is not None]
        for group in self._groups():
            partial = getattr(group, "_partial_reduce_output", None)
            if partial is not None:
                found.append((f"{group._module_fqn or 'root'}.grad (not all-reduced)", partial))
        return found

    @property
    def hides_gradients(self) -> bool:
        """Whether the next backward would leave its gradients unreduced."""
        return any(not (group.reduce_grads and group.all_reduce_grads) for group in self._groups())

    @property
    def is_placed_by_fsdp(self) -> bool:
        """Whether ``CPUOffloadPolicy`` keeps the shards on the host."""
        return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in self._groups())

    def meshes(self) -> list[Any]:
        """The device meshes it shards and replicates over, each once."""
        return list(dict.fromkeys(group.mesh_info.mesh for group in self._groups()))

    def parameters(self, module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """``module.named_parameters()``, with the shards in place of what is registered now."""
        stand_ins = self.unsharded() if self else {}
        for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
            yield name, stand_ins.get(id(parameter), parameter)

    def _groups(self) -> Iterator[Any]:
        for module in self.modules:
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # one, in another attribute, before torch 2.11
            yield from groups if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]

    def _parameters(self) -> Iterator[Any]:
        for group in self._groups():
            yield from group.fsdp_params
