"""What a rank is to be built from, by itself, wherever it is: factories, options and where its records go.

A plan crosses process boundaries; what it builds does not. Knows nothing of who starts ranks.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import nn

from rl_session.config import OffloadConfig
from rl_session.errors import ConfigError, UnsupportedError
from rl_session.lifecycle import Flags
from rl_session.offload.device import Device
from rl_session.workers.spec import WorkerSpec

__all__ = ["AuditTarget", "Parallelize", "RankPlan", "build_spec", "check_factories"]

Parallelize = Literal["fsdp2", "ddp"] | Callable[..., nn.Module] | None
"""How a model becomes one of several ranks; a callable is given the model and the device mesh."""


@attrs.define(slots=False)
class AuditTarget:
    """Where the records of a rank go.

    Attributes:
        path: The driver's file; a rank's lies beside it.
        run_id: The run's.
        policy: The policy's name, on every record.
        shares_name: Whether another policy of the run has ranks too, so that ``rank:K`` alone does not say whose.
        rotate_nbytes: As for the driver's log.
    """

    path: str
    run_id: str
    policy: str
    shares_name: bool = False
    rotate_nbytes: int | None = None


@attrs.define(slots=False, kw_only=True)
class RankPlan:
    """What every rank of a policy is built from.

    Attributes:
        label: How messages name the policy.
        model: ``model() -> module``.
        optimizer: ``optimizer(parameters) -> optimizer``; given the module when its first argument is called ``model`` or
            ``module``. None for a model that only infers.
        scheduler: ``scheduler(optimizer) -> scheduler``.
        masters: ``masters(model, optimizer) -> {parameter: master}``.
        reference: None, "copy", "adapter-off", or ``reference() -> module``.
        max_grad_norm: As for ``attach``.
        forward_fn: As for ``attach``.
        temperature: As for ``attach``.
        device: As for ``attach``; an emulated device is made anew on every rank, with the same capacity.
        parallelize: How the model becomes one of several ranks.
        config: How bytes move.
        flags: The part of it that decides placements, with what is inherited.
        verify: Whether contents are compared at every move.
        seed: Seeds the generators before the factories run, so that every rank builds the same weights; None for one rank in
            the user's own process.
        audit: Where records go; None for nowhere.
    """

    label: str
    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    scheduler: Callable[..., Any] | None = None
    masters: Callable[..., Mapping[Any, Any]] | None = None
    reference: str | Callable[[], nn.Module] | None = None
    max_grad_norm: float | None = None
    forward_fn: Callable[..., Any] | None = None
    temperature: float = 1.0
    device: Device | torch.device | str | None = None
    parallelize: Parallelize = None
    config: OffloadConfig
    flags: Flags
    verify: bool = False
    seed: int | None = None
    audit: AuditTarget | None = None


def check_factories(plan: RankPlan) -> None:
    """Refuse what is no factory before any rank is started.

    Raises:
        ConfigError: A module or an optimizer was given where what makes one is needed.
    """
    for name in ("model", "optimizer", "scheduler", "masters"):
        made: object = getattr(plan, name)
        is_missing = made is None and name != "model"
        if not is_missing and (isinstance(made, nn.Module | torch.optim.Optimizer) or not callable(made)):
            raise ConfigError(
                f"{plan.label}: {name}={type(made).__name__} is no factory",
                ("each worker builds its own, so it is given what makes one",),
                "session.policy(name, model=make_model, optimizer=make_optimizer), or session.attach(model, optimizer)",
            )


def build_spec(plan: RankPlan, shape: Callable[[nn.Module], nn.Module] = lambda model: model) -> WorkerSpec:
    """Run the factories, here.

    Args:
        plan: What to build.
        shape: Makes the module one of several ranks; the optimizer is built over what it returns.

    Raises:
        UnsupportedError: The model factory returned no module.
    """
    if plan.seed is not None:
        torch.manual_seed(plan.seed)
        random.seed(plan.seed)
    model = plan.model()
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"{plan.label}: model() returned {type(model).__name__}, not a torch module",
            (),
            "model=lambda: MyModel(...)",
        )
    model = shape(model)
    optimizer = None if plan.optimizer is None else plan.optimizer(_wanted_by(plan.optimizer, model))
    masters = () if plan.masters is None else tuple(plan.masters(model, optimizer).items())
    reference = plan.reference() if callable(plan.reference) else plan.reference
    return WorkerSpec(
        model=model,
        optimizer=optimizer,
        scheduler=None if plan.scheduler is None else plan.scheduler(optimizer),
        max_grad_norm=plan.max_grad_norm,
        masters=masters,
        reference=reference,
        forward_fn=plan.forward_fn,
        temperature=plan.temperature,
        verify=plan.verify,
        pin=plan.config.pin,
        label=plan.label,
    )


def _wanted_by(factory: Callable[..., Any], model: nn.Module) -> Any:
    """What an optimizer factory is given: the module when it names its first argument so, else the parameters."""
    try:
        first = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):  # a builtin says nothing of its arguments
        first = ""
    return model if first in ("model", "module") else _Parameters(model)


class _Parameters(list[nn.Parameter]):
    """The parameters of a model, as an optimizer takes them; it answers for them as the model does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.parameters = model.parameters
        self.named_parameters = model.named_parameters
