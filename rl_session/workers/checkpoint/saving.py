"""Writing a checkpoint: what goes into it, and in which order."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_session.errors import CheckpointWriteError
from rl_session.workers.checkpoint.dcp import write_tensors
from rl_session.workers.checkpoint.directory import replacing_together, target_of, write_manifest
from rl_session.workers.checkpoint.skeleton import Encoder, Node, nbytes_of
from rl_session.workers.ranks import SOLO, Ranks

__all__ = ["masters_of", "save"]


def save(
    path: str | os.PathLike[str],
    *,
    module_tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    param_names: Mapping[int, str],
    scheduler: Any | None,
    read: Callable[[Tensor], Tensor],
    extra: Mapping[str, Any] | None = None,
    ranks: Ranks = SOLO,
) -> int:
    """Write a checkpoint, atomically: it is all there, or what stood at ``path`` before still is.

    A checkpoint of ours at ``path`` is replaced; both are on the disk for a moment. Functions in the scheduler's state
    or among hyperparameters are not written; loading keeps the live ones.

    Args:
        path: The directory to write. Missing parents are created; it is readable to its owner only.
        module_tensors: Qualified name to parameter or buffer; tied ones under each of their names.
        optimizer: Its hyperparameters and state are written, and parameters that are not among ``module_tensors``.
        param_names: ``id(parameter)`` to name for every parameter of the optimizer.
        scheduler: What has a ``state_dict()``, or None.
        read: Gives, for any of these tensors, one whose values may be read now, on the CPU or a device.
        extra: JSON to keep with it.
        ranks: Who writes it together, into one directory that all of them reach. What is sharded is written whole.

    Returns:
        Bytes of the tensors written, each once.

    Raises:
        CheckpointError: Something that is no checkpoint of ours is at ``path``.
        CheckpointWriteError: The disk failed or is full, or the state holds what cannot be written without pickle.
    """
    attempted = f"cannot write the checkpoint {path}"
    with ranks.together(attempted):
        target = target_of(path)
        encoder = Encoder(f"cannot write the checkpoint {target}")
        body = {
            "torch": torch.__version__,
            "model": {name: encoder.encode(tensor, f"model/{name}") for name, tensor in module_tensors.items()},
            "optimizer": _optimizer(encoder, optimizer, module_tensors, param_names),
            "scheduler": None if scheduler is None else encoder.encode(scheduler.state_dict(), "scheduler"),
            "extra": _json(encoder.attempted, dict(extra or {})),
        }
    nbytes = sum(nbytes_of(tensor) for tensor in encoder.tensors.values())
    with replacing_together(target, nbytes, ranks) as staging:
        with ranks.together(attempted):
            tensors = {key: _readable(read, tensor) for key, tensor in encoder.tensors.items()}
        write_tensors(staging, tensors, ranks)
        with ranks.together(attempted):
            if ranks.is_first:
                write_manifest(staging, {**body, "tensors": encoder.table()})
    return nbytes


def _json(attempted: str, extra: dict[str, Any]) -> Node:
    encoder = Encoder(attempted)
    node = encoder.encode(extra, "extra")
    if encoder.tensors:
        facts = (f"{next(iter(encoder.tensors))} is a tensor", "nothing was written")
        raise CheckpointWriteError(attempted, facts, "keep JSON in extra; tensors belong to the model or optimizer")
    return node


def _readable(read: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    values = read(tensor).detach()
    assert values.shape == tensor.shape, f"read() gave {tuple(values.shape)} for {tuple(tensor.shape)}"
    assert values.dtype == tensor.dtype, f"read() gave {values.dtype} for {tensor.dtype}"
    return values


def masters_of(
    optimizer: torch.optim.Optimizer, module_tensors: Mapping[str, Tensor], param_names: Mapping[int, str]
) -> dict[str, Tensor]:
    """The optimizer's parameters that are not among the module's tensors, by name."""
    own = {id(tensor) for tensor in module_tensors.values()}
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {param_names[id(parameter)]: parameter for parameter in parameters if id(parameter) not in own}


def _optimizer(
    encoder: Encoder,
    optimizer: torch.optim.Optimizer | None,
    module_tensors: Mapping[str, Tensor],
    param_names: Mapping[int, str],
) -> Node:
    if optimizer is None:
        return None
    masters = masters_of(optimizer, module_tensors, param_names)
    node: dict[str, Any] = {
        "type": type(optimizer).__name__,
        "masters": {name: encoder.encode(tensor, f"masters/{name}") for name, tensor in masters.items()},
        "groups": [],
        "state": {},
        "shared": [],
    }
    for index, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        names = [param_names[id(parameter)] for parameter in group["params"]]
        node["groups"].append({"params": names, "options": encoder.encode(options, f"param_groups/{index}")["pairs"]})
    # items() only: indexing a defaultdict would create state for parameters that have none.
    live: Mapping[Any, Any] = optimizer.state
    for owner, state in live.items():
        if not isinstance(owner, Tensor):
            node["shared"].append([encoder.encode(owner, "optimizer"), encoder.encode(state, f"optimizer/{owner}")])
        elif id(owner) in param_names:
            name = param_names[id(owner)]
            node["state"][name] = encoder.encode(state, f"optimizer/{name}", owner)
        else:
            raise CheckpointWriteError(
                encoder.attempted,
                (f"the optimizer has state for a {tuple(owner.shape)} tensor that is in none of its groups",),
                "delete that entry of optimizer.state; no step reads it",
            )
    return node
