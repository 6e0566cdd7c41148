"""How a legacy loop brings the policy's weights to an engine: the helper that loops share, and a weight synchronizer.

Knows nothing of how weights travel: the engine's own push does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from rl_session.driver.engine_control import EngineControl
from rl_session.engines import EngineHandle
from rl_session.errors import EngineError, RLSessionError
from rl_session.generation.in_process import InProcessEngine
from rl_session_migrate.shim.effects import policy_effect
from rl_session_migrate.shim.generation import LegacyGeneration, control_of
from rl_session_migrate.shim.notice import warn_once
from rl_session_migrate.shim.policy import LegacyPolicy
from rl_session_migrate.shim.shared import share_weights
from rl_session_migrate.shim.transfer import push

__all__ = ["LegacySynchronizer", "refit_policy_generation"]


def refit_policy_generation(
    policy: LegacyPolicy,
    policy_generation: Any,
    colocated_inference: bool,
    _refit_buffer_size_gb: float | None = None,
    timer: Any = None,
    kv_scales: Any = None,
) -> dict[str, Any]:
    """Bring the policy's weights to the engine.

    Contract: an attached ``policy_generation.weight_synchronizer`` does all of it. Colocated: ``offload_before_refit``, wake the
    weights, push, ``offload_after_refit``, wake the KV cache; the policy is away and the engine awake afterwards. Otherwise only
    the push. After a push that failed the policy is where ``offload_before_refit`` left it. Scope: ``policy.refit(engine)``.
    Guide: docs/legacy-api.md.

    Args:
        policy: The policy.
        policy_generation: A :class:`LegacyGeneration`, or the policy itself (then there is nothing to do).
        colocated_inference: Whether both share devices.
        _refit_buffer_size_gb: Size of a bucket in GiB; by default from what is free.
        timer: Handed to a weight synchronizer, else not used.
        kv_scales: Likewise.

    Returns:
        ``{"weights_version": n}``, or what the weight synchronizer gives.

    Raises:
        ShimInScopeError: A scope is open.
        RLSessionError: The push failed.
    """
    synchronizer = getattr(policy_generation, "weight_synchronizer", None)
    if synchronizer is not None:
        return dict(synchronizer.sync_weights(timer=timer, kv_scales=kv_scales) or {})
    if not isinstance(policy_generation, LegacyGeneration):
        return {}
    warn_once("refit_policy_generation(...)", "policy.refit(engine)")
    buffer = None if _refit_buffer_size_gb is None else int(_refit_buffer_size_gb * 2**30)
    call = "refit_policy_generation()"
    return _bring(policy, policy_generation, call, buffer, colocated=colocated_inference, restores=False)


class LegacySynchronizer:
    """A weight synchronizer between a policy and an engine of one session.

    A loop whose module has a refit helper of its own (which tells both sides, and waits with ``ray.get`` for what only Ray
    gives) runs unmodified when one is attached: ``policy_generation.weight_synchronizer = LegacySynchronizer(policy,
    policy_generation)``. Reference: docs/legacy-api.md; the way to scopes, in steps: migration/README.md.

    Args:
        policy: Whose weights.
        policy_generation: The engine's handle.
        colocated: Whether both share devices; by default what the engine's handle says.
    """

    def __init__(
        self, policy: LegacyPolicy, policy_generation: LegacyGeneration, *, colocated: bool | None = None
    ) -> None:
        self._policy = policy
        self._generation = policy_generation
        self._colocated = policy_generation.cfg["colocated"]["enabled"] if colocated is None else colocated
        self._is_stale = True

    def __repr__(self) -> str:
        return f"<LegacySynchronizer of {self._policy!r} and {self._generation!r}>"

    @property
    def is_stale(self) -> bool:
        """Whether the engine has not had the policy's weights yet.

        Contract: True until the first push that succeeds, and after one that failed. Guide: docs/legacy-api.md.
        """
        return self._is_stale

    def init_communicator(self) -> None:
        """Nothing: a push connects what it has to.

        Contract: called once, before the first push. Scope: none; delete it. Guide: docs/legacy-api.md.
        """

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> dict[str, Any]:
        """Bring the policy's weights to the engine.

        Contract: as :func:`refit_policy_generation` does it; after a push that failed, too, the policy is away and the engine is
        woken. Scope: ``policy.refit(engine)``. Guide: docs/legacy-api.md.

        Args:
            timer: Taken and not used.
            kv_scales: Taken and not used.

        Returns:
            ``{"weights_version": n}``; nothing for an engine that samples from the policy's own weights.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: The push failed; it stays stale.
        """
        del timer, kv_scales
        warn_once("weight_synchronizer.sync_weights()", "policy.refit(engine)")
        self._is_stale = True
        found = _bring(self._policy, self._generation, "sync_weights()", None, colocated=self._colocated, restores=True)
        self._is_stale = False
        return found

    def shutdown(self) -> bool:
        """Nothing; True.

        Contract: the last call of a loop. Scope: none; delete it. Guide: docs/legacy-api.md.
        """
        return True


def _bring(
    policy: LegacyPolicy,
    generation: LegacyGeneration,
    call: str,
    buffer: int | None,
    *,
    colocated: bool,
    restores: bool,
) -> dict[str, Any]:
    engine = generation.scoped
    if isinstance(engine, InProcessEngine):
        return _refit_shared(policy, engine, call, colocated=colocated)
    with ExitStack() as stack:
        site = stack.enter_context(policy._turn(call, "refit_mode()"))  # noqa: SLF001
        if not colocated:
            return {"weights_version": push(policy._control, control_of(engine), site, buffer)}  # noqa: SLF001
        try:
            version = _refit(policy, engine, site, buffer)
        except RLSessionError:
            if restores:  # as far as it goes; what failed is what is told
                with suppress(RLSessionError):
                    _finish(policy, control_of(engine), site)
            raise
    return {"weights_version": version}


def _refit(policy: LegacyPolicy, engine: EngineHandle, site: str, buffer: int | None) -> int:
    control, target = policy._control, control_of(engine)  # noqa: SLF001 (the helper is a friend of both)
    policy._apply("offload_before_refit()", policy_effect("offload_before_refit", policy._config), site)  # noqa: SLF001
    _wake_or_raise(target, target.tags[:1], site)
    version = push(control, target, site, buffer)
    _finish(policy, target, site)
    return version


def _finish(policy: LegacyPolicy, target: EngineControl, site: str) -> None:
    """The second half: the policy leaves, and all of the engine wakes."""
    policy._apply("offload_after_refit()", policy_effect("offload_after_refit", policy._config), site)  # noqa: SLF001
    target.wake_now(None, "prepare_for_generation()", site)


def _wake_or_raise(target: EngineControl, tags: Sequence[str], site: str) -> None:
    """Wake the weights; legacy went on with an engine that had not woken, and wrote into nothing.

    Raises:
        EngineError, DeviceMemoryError: It would not wake.
    """
    target.wake_now(tags, f"prepare_for_generation(tags={list(tags)})", site)
    if tags[0] not in target.awake:
        raise EngineError(f"{target.label}: it did not wake", target.explain()[1], "engine.recover()")


def _refit_shared(policy: LegacyPolicy, engine: InProcessEngine, call: str, *, colocated: bool) -> dict[str, Any]:
    """An engine whose weights are the policy's own: make room, and wake it."""
    if colocated:
        with ExitStack() as stack:
            site = stack.enter_context(policy._turn(call, "generation_mode()"))  # noqa: SLF001
            effect = policy_effect("offload_before_refit", policy._config)  # noqa: SLF001
            policy._apply("offload_before_refit()", effect, site)  # noqa: SLF001
            share_weights(engine, call, site)
    return {}
