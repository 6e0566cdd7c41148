"""A model built on every rank becomes one model over all of them: FSDP2, DDP, or a function of the user's.

Call it on the model before its optimizer is made: ``fully_shard`` replaces every parameter. Knows nothing of what is done
with the model afterwards.

**What is sharded together.** Each repeated block on its own, then the rest with the root. The repeated blocks are found
like this: of the outermost ``nn.ModuleList`` s whose members are all of one class and have parameters, take the longest;
its class, or their classes where several are equally long, are the classes of blocks, and every member of such a class in
any of those lists is a block. That finds ``model.layers`` of a Hugging Face decoder, both stacks of an encoder-decoder,
and ``self.blocks`` of a hand-written one. Experts, which are lists inside a block, stay with their block. A model without
such a list is sharded as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rl_session.errors import ConfigError, UnsupportedError

__all__ = ["How", "blocks_of", "parallelize"]

How = Literal["fsdp2", "ddp"] | Callable[[nn.Module, DeviceMesh], nn.Module] | None
"""How a model is spread over ranks; None leaves a copy on each, whose gradients are summed by the train step."""

_REPLICATE = 'parallelize(model, "ddp", mesh)'
_PIN_NOWHERE = "parallelize(model, 'fsdp2', mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))"


def parallelize(
    model: nn.Module,
    how: How,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
) -> nn.Module:
    """Spread a model over the ranks of a mesh. Every rank calls it, with a model of the same weights.

    Args:
        model: The whole model, on the device of the mesh, before its optimizer is made.
        how: "fsdp2", "ddp", a function ``(model, mesh) -> model``, or None for the model as it is.
        mesh: The data-parallel mesh: one dimension, or for "fsdp2" two (replicate, shard). By default all ranks.
        mp_policy: Mixed precision, "fsdp2" only.
        offload_policy: ``CPUOffloadPolicy`` keeps the shards on the host, "fsdp2" only; then configure
            ``OffloadConfig(cpu_offload=True)``.
        reshard_after_forward: As for ``fully_shard``, "fsdp2" only.

    Returns:
        The model to train: the same object for "fsdp2", a wrapper around it for "ddp".

    Raises:
        ConfigError: ``how`` is not one of these, or an option does not go with it.
        UnsupportedError: The model cannot be spread that way; the facts say why.
    """
    options = {"mp_policy": mp_policy, "offload_policy": offload_policy, "reshard_after_forward": reshard_after_forward}
    given = {name: value for name, value in options.items() if value is not None}
    if given and how != "fsdp2":
        facts = (f"{', '.join(given)}: for how='fsdp2' only",)
        raise ConfigError(f"parallelize(model, {how!r})", facts, f"parallelize(model, {how!r}, mesh)")
    if how is None:
        return model
    if how not in ("fsdp2", "ddp") and not callable(how):
        raise ConfigError(
            f"parallelize(model, {how!r}): there is no such way",
            ("ways: 'fsdp2', 'ddp', a function (model, mesh) -> model, None",),
            'parallelize(model, "fsdp2", mesh)',
        )
    _check_new(model)
    mesh = mesh if mesh is not None else _default_mesh(model)
    if callable(how):
        return _called(how, model, mesh)
    return _sharded(model, mesh, given) if how == "fsdp2" else _replicated(model, mesh)


def _default_mesh(model: nn.Module) -> DeviceMesh:
    if not dist.is_initialized():
        raise UnsupportedError(
            f"parallelize({type(model).__name__}): there are no ranks",
            ("torch.distributed is not initialised in this process",),
            'dist.init_process_group("cpu:gloo,cuda:nccl") on every rank first, or parallelize(model, None)',
        )
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return init_device_mesh(kind, (dist.get_world_size(),))


def _called(how: Callable[[nn.Module, DeviceMesh], nn.Module], model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    made = how(model, mesh)
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"parallelize(model, {getattr(how, '__name__', how)!r}): it returned a {type(made).__name__}",
            (),
            "def how(model, mesh): ...; return model",
        )
    check_wrappers(made, f"parallelize(model, {getattr(how, '__name__', how)!r})")
    return made


def check_wrappers(model: nn.Module, label: str) -> None:
    """Refuse data-parallel wrappers whose storages cannot be followed.

    Raises:
        UnsupportedError: FSDP1, whose parameters are views of flat ones that come and go; or ``nn.DataParallel``.
    """
    for part in model.modules():
        if isinstance(part, FullyShardedDataParallel):
            raise UnsupportedError(
                f"{label}: FullyShardedDataParallel (FSDP1) cannot be served",
                ("its parameters are views of flat buffers that it frees and replaces by itself",),
                'fully_shard(model), or parallelize(model, "fsdp2", mesh)',
            )
        if isinstance(part, nn.DataParallel):
            facts = ("it copies the module to other devices in every forward",)
            raise UnsupportedError(
                f"{label}: nn.DataParallel cannot be served", facts, 'parallelize(model, "ddp", mesh)'
            )


def _check_new(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, FSDPModule | DistributedDataParallel | FullyShardedDataParallel | nn.DataParallel):
            raise _refusal(
                model, f"{type(part).__name__} in it is spread over ranks already", "parallelize(model, None)"
            )
    spread = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    if spread is not None:
        raise _refusal(model, f"{spread} is a DTensor already (tensor parallelism is not served)", "a plain module")


def _refusal(model: nn.Module, fact: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(f"parallelize({type(model).__name__}): it cannot be spread that way", (fact,), remedy)


# -- FSDP2 -----------------------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, in order; the module's text has the rule."""
    lists = list(_outermost_lists(model))
    longest = max((len(each) for each in lists), default=0)
    classes = {type(each[0]) for each in lists if len(each) == longest}
    return [block for each in lists if type(each[0]) in classes for block in each]


def _outermost_lists(module: nn.Module) -> list[nn.ModuleList]:
    found = []
    for child in module.children():
        if isinstance(child, nn.ModuleList) and _is_uniform(child):
            found.append(child)
        else:
            found += _outermost_lists(child)
    return found


def _is_uniform(each: nn.ModuleList) -> bool:
    has_parameters = all(next(member.parameters(), None) is not None for member in each)
    return len(each) > 0 and len({type(member) for member in each}) == 1 and has_parameters


def _sharded(model: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> nn.Module:
    blocks = list(dict.fromkeys(blocks_of(model)))
    _check_shardable(model, blocks, mesh, options)
    try:
        for block in blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    except (NotImplementedError, AssertionError, ValueError, RuntimeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise UnsupportedError(
            f"parallelize({type(model).__name__}, 'fsdp2'): fully_shard refused it",
            ("part of it may be sharded: build it again before the next try",),
            'parallelize(model, "ddp", mesh), or a function (model, mesh) that shards it',
            cause,
        ) from error
    return model


def _check_shardable(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, options: dict[str, Any]) -> None:
    if mesh.ndim > 2:
        raise _refusal(model, f"the mesh has {mesh.ndim} dimensions, not one or (replicate, shard)", "a mesh of one")
    for name, parameter in model.named_parameters():
        _check_parameter(model, name, parameter)
    _check_groups(model, blocks)
    policy = options.get("offload_policy")
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        raise _refusal(model, "CPUOffloadPolicy pins memory, and there is no device to pin it for", _PIN_NOWHERE)


def _check_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if parameter.is_meta:
        raise _refusal(model, f"{name} is a meta tensor: it has no bytes", "load the weights first")
    if parameter.dim() == 0:
        raise _refusal(model, f"{name} has no dimension to shard", f"{_REPLICATE}, or give it shape [1]")
    if not parameter.is_contiguous():
        raise _refusal(model, f"{name} is not contiguous", f"{name}.data = {name}.data.contiguous()")


def _check_groups(model: nn.Module, blocks: list[nn.Module]) -> None:
    """FSDP finds out about both in the first forward only."""
    names = {id(p): name for name, p in model.named_parameters()}
    for key, num in _num_users(model, blocks).items():
        if num > 1:
            raise _refusal(model, f"{names[key]} is shared between blocks, or by a block and the rest", _REPLICATE)
    groups = [{id(p): p for p in block.parameters()} for block in blocks]
    inside = {key for group in groups for key in group}
    for group in (*groups, {id(p): p for p in model.parameters() if id(p) not in inside}):
        dtypes = {p.dtype for p in group.values() if p.requires_grad}
        if len(dtypes) > 1:
            listed = ", ".join(sorted(map(str, dtypes)))
            raise _refusal(model, f"trainable parameters of one block have several dtypes: {listed}", _REPLICATE)


def _num_users(model: nn.Module, blocks: list[nn.Module]) -> Counter[int]:
    """In how many groups each parameter would be: its blocks, and the rest."""
    in_blocks = {id(part) for block in blocks for part in block.modules()}
    rest = (part for part in model.modules() if id(part) not in in_blocks)
    users = Counter({id(p) for part in rest for p in part.parameters(recurse=False)})
    for block in blocks:
        users.update({id(p) for p in block.parameters()})
    return users


# -- DDP -------------------------------------------------------------------------------------------------------------


def _replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.ndim != 1:
        raise _refusal(model, f"the mesh has {mesh.ndim} dimensions, not one", "a mesh of one dimension")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _refusal(model, "none of its parameters requires a gradient", "parallelize(model, None)")
    # Gradients are then views of the reducer's buckets: the scan finds the buckets, and they can leave the device.
    return DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
