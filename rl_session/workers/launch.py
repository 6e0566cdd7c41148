"""Where the ranks of a policy live: in this process, or on Ray. What users write, checked when they write it.

Knows how to start a group, and nothing of what its ranks do. Ray is imported when a Ray group is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from rl_session.errors import ConfigError
from rl_session.workers.group import SharedGroup
from rl_session.workers.plan import Parallelize, RankPlan
from rl_session.workers.replies import Reply

__all__ = ["LocalWorkers", "RayWorkers", "Workers"]


class Workers(Protocol):
    """Starts the ranks of a policy."""

    parallelize: Parallelize

    def start(self, plan: RankPlan, timeout_seconds: float) -> tuple[SharedGroup, list[Reply]]:
        """Build every rank; the group, and what each rank is (a ``Description``), or why it could not be built."""
        ...

    def site(self) -> object:
        """What policies that share its devices have in common; its identity tells."""
        ...


@attrs.frozen
class LocalWorkers:
    """The one rank is in this process, as with :func:`rl_session.attach`, and is built by the factories."""


def _positive_int(_: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"RayWorkers: {attribute.name}={value!r} must be a whole number from 1",
            (),
            "RayWorkers(4, gpus_per_worker=1)",
        )


def _share(_: Any, attribute: Any, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0 and (value <= 1 or float(value).is_integer())):
        raise ConfigError(
            f"RayWorkers: {attribute.name}={value!r} is no share of a GPU",
            ("a share is above 0 and at most 1, or a whole number",),
            "RayWorkers(4, gpus_per_worker=0.5)",
        )


def _seconds(_: Any, attribute: Any, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):
        raise ConfigError(
            f"RayWorkers: {attribute.name}={value!r} must be a positive number of seconds",
            (),
            "RayWorkers(4, timeout_seconds=600)",
        )


def _way(_: Any, __: Any, value: Any) -> None:
    if value is not None and not callable(value) and value not in ("fsdp2", "ddp"):
        raise ConfigError(
            f"RayWorkers: parallelize={value!r} is no way to spread a model",
            ('choices: "fsdp2", "ddp", None (each rank its own copy), or a function of model and mesh',),
            'RayWorkers(4, parallelize="fsdp2")',
        )


def _place(_: Any, __: Any, value: Any) -> None:
    known = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    if isinstance(value, str) and value not in known:
        raise ConfigError(
            f"RayWorkers: placement={value!r} is no strategy",
            (f"choices: {', '.join(known)}, a placement group, or other RayWorkers to share bundles with",),
            'RayWorkers(4, placement="PACK")',
        )


@attrs.define(eq=False)
class RayWorkers:
    """Ranks as Ray actors in a placement group, one bundle a rank.

    Attributes:
        num_workers: How many ranks.
        gpus_per_worker: GPUs of a rank; a part of one where policies share it. None: 1 where the cluster has GPUs, else 0.
        resources: More that a bundle must have, such as ``{"CPU": 4}``; 1 CPU by default.
        placement: "PACK" or "SPREAD" (or their STRICT forms), a Ray placement group with a bundle a rank, or the
            ``RayWorkers`` of another policy, whose bundles these ranks then share.
        parallelize: How several ranks are one data-parallel policy: "fsdp2" (default: each holds a shard), "ddp", None (each
            holds a plain copy, and gradients are summed before the step), or ``f(model, mesh) -> module``. One worker has the
            plain model, but for a function.
        timeout_seconds: How long a call to the ranks may take; a rank past it is killed. None: the session's.
        affinity: ``affinity(rank)``, called in each worker before anything is allocated, to pin it to the cores near its GPU.

    Raises:
        ConfigError: A value is not one it can have.
    """

    num_workers: int = attrs.field(validator=_positive_int)
    gpus_per_worker: float | None = attrs.field(default=None, validator=_share, kw_only=True)
    resources: Mapping[str, float] = attrs.field(factory=dict, kw_only=True)
    placement: Any = attrs.field(default="PACK", validator=_place, kw_only=True)
    parallelize: Parallelize = attrs.field(default="fsdp2", validator=_way, kw_only=True)
    timeout_seconds: float | None = attrs.field(default=None, validator=_seconds, kw_only=True)
    affinity: Callable[[int], None] | None = attrs.field(default=None, kw_only=True)
    placement_group: Any = attrs.field(default=None, init=False, repr=False)
    """The placement group, once ranks were started in it."""

    def __attrs_post_init__(self) -> None:
        other = self.placement
        if isinstance(other, RayWorkers) and other.num_workers < self.num_workers:
            raise ConfigError(
                f"RayWorkers({self.num_workers}, placement=...): the other workers have {other.num_workers} bundles",
                ("a rank shares the bundle of the other's rank of the same number",),
                f"RayWorkers({other.num_workers}, placement=other)",
            )

    def site(self) -> object:
        """What policies that share devices have in common.

        Returns:
            The workers whose bundles are used, or the placement group that was given.
        """
        if isinstance(self.placement, RayWorkers):
            return self.placement.site()
        return self if isinstance(self.placement, str) else self.placement

    def start(self, plan: RankPlan, timeout_seconds: float) -> tuple[SharedGroup, list[Reply]]:
        """Start the actors and build every rank. The session calls it.

        Args:
            plan: What each rank builds.
            timeout_seconds: The deadline of each call to a rank, unless these workers have one of their own.

        Returns:
            The group, and what each rank is, or why it could not be built.

        Raises:
            WorkerError: The cluster has no room for them.
        """
        from rl_session.workers.ray_group import RayGroup

        group = RayGroup(self, plan, self.timeout_seconds or timeout_seconds)
        return group, group.start()
