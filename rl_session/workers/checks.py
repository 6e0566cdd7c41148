"""What a model, its optimizer and its options must be like to be served, judged where they are, before anything is made of them.

Each refusal names what is wrong and what to write instead. Knows nothing of sessions or of ranks.
"""

from __future__ import annotations

import torch
from torch import nn

from rl_session.config import OffloadConfig
from rl_session.errors import ConfigError, OptimizerError, UnsupportedError
from rl_session.workers.spec import WorkerSpec

__all__ = ["check_spec", "device_of"]


def check_spec(spec: WorkerSpec, config: OffloadConfig, label: str) -> None:
    """Refuse what cannot be served.

    Args:
        spec: What the worker is to be made of.
        config: How its bytes are to move.
        label: How messages name the policy.

    Raises:
        UnsupportedError: The model or the scheduler cannot be served.
        OptimizerError: The optimizer does not belong to the model.
        ConfigError: An option is wrong or contradicts the model.
    """
    _check_model(spec.model, spec.optimizer, label)
    _check_optimizer(spec, label)
    _check_scheduler(spec.scheduler, label)
    _check_options(spec, label)
    _check_cpu_offload(spec.model, config, label)


def _check_model(model: object, optimizer: object, label: str) -> None:
    if type(model).__module__.startswith("deepspeed"):
        raise UnsupportedError(
            f"{label}: a DeepSpeed engine owns the placement of its tensors",
            (),
            "attach the plain module and a torch optimizer, or leave offloading to DeepSpeed",
        )
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"{label}: {type(model).__name__} is not a torch module", (), "attach(module, optimizer)"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"{label}: {type(optimizer).__name__} is not a torch optimizer",
            (),
            "attach(module, optimizer) with a torch.optim.Optimizer (of a wrapper, the optimizer inside)",
        )


def device_of(model: nn.Module, label: str) -> torch.device:
    """Where the parameters of a module are; the CPU for a module without any.

    Raises:
        UnsupportedError: They are on several devices.
    """
    devices = {str(p.device) for p in model.parameters() if p.device.type != "meta"}
    if len(devices) > 1:
        raise UnsupportedError(
            f"{label}: one module over several devices",
            (f"devices: {', '.join(sorted(devices))}",),
            "put it on one device, or shard it over workers",
        )
    return torch.device(devices.pop()) if devices else torch.device("cpu")


def _check_optimizer(spec: WorkerSpec, label: str) -> None:
    """An optimizer that shares no parameter with the module steps something else, unless it is told what.

    Raises:
        OptimizerError: It does.
    """
    if spec.optimizer is None:
        if spec.masters:
            raise OptimizerError(
                f"{label}: masters= without an optimizer that steps them",
                (f"pairs: {len(spec.masters)}",),
                "attach(model, optimizer, masters={parameter: master, ...})",
            )
        return
    own = {id(p) for p in spec.model.parameters()}
    stepped = {id(p) for group in spec.optimizer.param_groups for p in group["params"]}
    for parameter, master in spec.masters:
        if id(parameter) not in own or id(master) not in stepped:
            raise OptimizerError(
                f"{label}: masters= names a pair that is not one",
                (f"parameter of the model: {id(parameter) in own}, master in the optimizer: {id(master) in stepped}",),
                "attach(model, optimizer, masters={parameter: master, ...})",
            )
    if not own & stepped and not spec.masters:
        raise OptimizerError(
            f"{label}: the optimizer shares no parameter with the model",
            (f"parameters of the model: {len(own)}, of the optimizer: {len(stepped)}",),
            "build it over model.parameters(), or map its fp32 copies with masters={parameter: master}",
        )


def _check_scheduler(scheduler: object, label: str) -> None:
    """A scheduler is stepped without arguments, after weights have changed: one that needs them is refused before.

    Raises:
        UnsupportedError: It has no ``step()``, or needs a metric.
    """
    if scheduler is None:
        return
    if not callable(getattr(scheduler, "step", None)) or isinstance(
        scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
    ):
        raise UnsupportedError(
            f"{label}: {type(scheduler).__name__} cannot be stepped without a metric",
            ("train() and commit() call scheduler.step()",),
            "attach without scheduler=, and call scheduler.step(metric) in the loop",
        )


def _check_options(spec: WorkerSpec, label: str) -> None:
    """A norm that is not positive would turn gradients round or to zero without a word.

    Raises:
        ConfigError: ``max_grad_norm`` is no positive number, or ``forward_fn`` cannot be called.
    """
    norm: object = spec.max_grad_norm
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0):
        raise ConfigError(
            f"{label}: max_grad_norm={norm!r} is no positive number",
            ("gradients are clipped to that norm",),
            "attach(..., max_grad_norm=1.0), or None for no clipping",
        )
    if spec.forward_fn is not None and not callable(spec.forward_fn):
        raise ConfigError(
            f"{label}: forward_fn={spec.forward_fn!r} cannot be called",
            (),
            "attach(..., forward_fn=lambda model, batch: model(batch['input_ids']).logits)",
        )


def _check_cpu_offload(model: nn.Module, config: OffloadConfig, label: str) -> None:
    """FSDP's own CPU offload and ``OffloadConfig(cpu_offload=True)`` must agree: a parameter has one owner.

    Raises:
        ConfigError: They disagree.
    """
    owned = any(_has_cpu_offload_policy(module) for module in model.modules())
    if owned != config.cpu_offload:
        has = "has" if owned else "has not"
        raise ConfigError(
            f"{label}: OffloadConfig(cpu_offload={config.cpu_offload}), but the model {has} FSDP's CPUOffloadPolicy",
            (),
            f"OffloadConfig(cpu_offload={owned})",
        )


def _has_cpu_offload_policy(module: nn.Module) -> bool:
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return False
    group = getattr(get_state(), "_fsdp_param_group", None)
    return group is not None and type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy"
