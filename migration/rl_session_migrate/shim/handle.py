"""A legacy handle over a policy or value model: what it is made of, and its lifecycle calls.

A lifecycle call is one change of the resting mode (``Control.switch``) with the cells of its row; the library's engine does
the rest. No state is kept here beyond configuration, so that any number of handles may be made over one policy. Knows
nothing of compute calls, and nothing of engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NoReturn

import attrs

from rl_session.audit import events
from rl_session.driver.callsite import call_site, speaking
from rl_session.driver.control import Control
from rl_session.driver.ownership import Token
from rl_session.errors import ConfigError, OwnershipError, ShimInScopeError, StaleHandleError, UnsupportedError
from rl_session.lifecycle import Cell, Component, Mode, Placement, Tier
from rl_session.policy import TrainableModel
from rl_session.scope import Scope
from rl_session.workers.group import LocalGroup
from rl_session_migrate.shim.effects import Effect, LegacyConfig, destroys_gradients, still_freed
from rl_session_migrate.shim.notice import warn_once

__all__ = ["LegacyHandle"]

_PATIENCE_SECONDS = 600.0
"""How long a call waits for other threads; legacy calls waited for ever."""


class LegacyHandle:
    """What every legacy handle has: its policy, its configuration and its lifecycle. Made as a policy or a value."""

    _kind = "policy"
    _infers = "prepare_for_lp_inference"
    """The legacy call that brings the weights in for inference."""
    _effects: ClassVar[Callable[..., Effect]]
    """What each lifecycle call does, by name, configuration and flags."""

    def __init__(
        self,
        policy: TrainableModel,
        *,
        backend: Literal["dtensor", "megatron"] = "dtensor",
        config: LegacyConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if getattr(policy, "_kind", None) != self._kind:
            made = "rs.attach" if self._kind == "policy" else "session.attach_value"
            raise ConfigError(
                f"{type(self).__name__}({policy!r}): that is no {self._kind} of rl_session",
                (),
                f"{type(self).__name__}({made}(model, optimizer))",
            )
        self._policy: Any = policy
        self._control: Control = policy._control  # noqa: SLF001 (two faces of one policy)
        self._config: LegacyConfig = LegacyConfig.of(backend, config, self._defaults())

    def _defaults(self) -> dict[str, bool]:
        names = ("offload_optimizer_for_logprob", "offload_optimizer_for_refit")
        return {name: getattr(self._control.flags, name) for name in names}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._policy!r}, {self._config.backend}>"

    def __reduce__(self) -> Any:
        """A handle for another process, where the policy itself can go there.

        Raises:
            UnsupportedError: The policy is in this process.
        """
        if isinstance(self._control.group, LocalGroup):
            raise UnsupportedError(
                f"{self._control.label}: pickling {type(self).__name__} of a policy in this process",
                ("its model and optimizer are here, and another process would get a copy of them",),
                "session.policy(..., workers=RayWorkers(...))  # then handles may be sent to other actors",
            )
        return _rebuild, (type(self), self._policy, self._config)

    # -- the policy itself, for loops that are half migrated -----------------------------------------------------------

    @property
    def scoped(self) -> Any:
        """The policy or value model of rl_session behind this handle.

        Contract: not of the legacy API; its scopes and its own methods are there. Guide: docs/legacy-api.md.
        """
        return self._policy

    @property
    def cfg(self) -> dict[str, Any]:
        """The configuration as legacy code reads it, and as ``scopes(policy)`` of the adapter does.

        Contract: the keys that lifecycle calls go by, nested as legacy nests them. Guide: docs/legacy-api.md.
        """
        config = self._config
        is_megatron = config.backend == "megatron"
        return {
            "dtensor_cfg": {"enabled": not is_megatron, "cpu_offload": not self._control.flags.weights_move},
            "megatron_cfg": {
                "enabled": is_megatron,
                "optimizer": {"optimizer_cpu_offload": config.optimizer_cpu_offload},
            },
            "offload_optimizer_for_logprob": config.offload_optimizer_for_logprob,
            "offload_optimizer_for_refit": config.offload_optimizer_for_refit,
        }

    @property
    def mode(self) -> Mode:
        """The mode in effect.

        Contract: not of the legacy API. Guide: docs/legacy-api.md.
        """
        mode: Mode = self._policy.mode
        return mode

    @property
    def placement(self) -> Placement:
        """Where each component is.

        Contract: not of the legacy API. Guide: docs/legacy-api.md.

        Raises:
            ClosedError: The policy was closed.
        """
        placement: Placement = self._policy.placement
        return placement

    def training_mode(self, **options: Any) -> Scope[Any]:
        """The scope of what is behind this handle; inside it this handle's compute calls may be made.

        Contract: not of the legacy API; comes back to where the last lifecycle call left the model. Guide: docs/legacy-api.md.
        """
        scope: Scope[Any] = self._policy.training_mode(**options)
        return scope

    def offloaded(self, **options: Any) -> Scope[Any]:
        """The scope of what is behind this handle.

        Contract: not of the legacy API; comes back to where the last lifecycle call left the model. Guide: docs/legacy-api.md.
        """
        scope: Scope[Any] = self._policy.offloaded(**options)
        return scope

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def _lifecycle(self, method: str, *, alias: str = "", **flags: bool) -> None:
        """Do what a lifecycle call does, and say what to write instead.

        Args:
            method: Its name in the table of effects.
            alias: Its name where it is called otherwise.
            **flags: Its arguments; those that are False are not shown.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: The transition failed and was rolled back; everything is as it was.
        """
        effect = self._effects(method, self._config, **flags)
        call = f"{alias or method}({', '.join(f'{name}=True' for name, is_set in flags.items() if is_set)})"
        warn_once(f"{self._kind}.{call}", self._instead(effect))
        with self._turn(call, effect.scope) as site:
            self._apply(call, effect, site)

    def _apply(self, call: str, effect: Effect, site: str) -> None:
        """What a lifecycle call does; the caller has the turn."""
        mode = effect.mode
        if mode is Mode.REFIT and self._is_away(Component.PARAMS):
            mode = Mode.OFFLOADED  # legacy moved no weights here, and there is nothing to read on the device
        cells = still_freed(effect.cells, self._control.resting_cells)
        reply = self._control.switch(mode, call, site, cells=cells)
        self._control.ask("hold_mode", effect.forwards)
        if reply is not None and destroys_gradients(effect):
            tier = reply.placement[Component.GRADS]
            if tier is Tier.DEVICE:  # kept for an open step, and the buffer with them: nothing was freed
                self._control.resting_cells = attrs.evolve(cells, grads=Cell.AS_IS)
            self._tell_kept(call, site, tier)

    def _instead(self, effect: Effect) -> str:
        if effect.scope == "offloaded()":
            return f"nothing: the end of a scope is the way back; or with {self._kind}.offloaded(): ..."
        return f"with {self._kind}.{effect.scope}: ... around the calls that it serves"

    def _tell_kept(self, call: str, site: str, tier: Tier) -> None:
        if tier is Tier.NONE:
            return
        nbytes = self._control.ask("sizes")[Component.GRADS.value]
        message = (
            f"{call} at {site}: legacy destroyed the gradients of the open step here; they are kept on the "
            f"{tier.value}. Say keep_train_buffers=True, or finish or abort the step before"
        )
        self._control.record(events.WarningIssued(code="open_step_kept", message=message, nbytes=nbytes))

    @contextmanager
    def _turn(self, call: str, scope: str) -> Iterator[str]:
        """A block in which this thread alone changes the policy, outside every scope; yields the call site."""
        site = call_site()
        token = self._own(call, site)
        try:
            if token is None:
                self._refuse_in_scope(call, site, scope)
            with self._control.changing(), speaking("shim", site):
                if self._control.frames:
                    self._refuse_in_scope(call, site, scope)
                yield site
        finally:
            if token is not None:
                self._control.let_go(token)

    def _own(self, call: str, site: str) -> Token | None:
        """Become the owner, waiting for others as long as they have no scope open; None when one is open, in any process."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            self._control.close_orphans()
            if self._control.frames:
                return None
            try:
                return self._control.acquire(call, site, timeout=0.2)
            except OwnershipError as error:
                if self._control.scope_elsewhere():
                    return None
                if isinstance(error, StaleHandleError) or time.monotonic() > deadline:
                    raise

    def _refuse_in_scope(self, call: str, site: str, scope: str) -> NoReturn:
        """Refuse a call that moves bytes while a scope is open.

        Raises:
            ShimInScopeError: Always.
        """
        inside = self._control.frames[-1] if self._control.frames else None
        if inside is not None:
            described, block = inside.describe(), inside.spelling
        else:
            block = self._control.scope_elsewhere() or "that scope"
            described = f"{block} in another process"
        raise ShimInScopeError(
            f"{self._control.label}: {call} at {site} inside {described}",
            self._control.explain()[1],
            f"with {self._kind}.{scope}: ...  # after the block of {block}; the scope does what the call did",
        )

    def _is_away(self, *components: str) -> list[str]:
        away: list[str] = self._control.ask("away", components)
        return away


def _rebuild(kind: type[LegacyHandle], policy: TrainableModel, config: LegacyConfig) -> LegacyHandle:
    return kind(policy, backend=config.backend, config=config)
