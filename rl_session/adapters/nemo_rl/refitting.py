"""A push of weights as a block: between a policy and an engine on its GPUs, or on its own; by our calls, or by a legacy helper's.

Says in which order scopes are entered. Knows nothing of legacy methods but what a helper's contract leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl_session.adapters.nemo_rl.effects import Call, effect
from rl_session.driver.callsite import call_site
from rl_session.errors import RLSessionError, ScopeError
from rl_session.lifecycle import Mode, Tier

if TYPE_CHECKING:
    from rl_session.adapters.nemo_rl.facade import EngineScopes, LegacyScopes, PolicyScopes

__all__ = ["legacy_refitting", "refitting"]


@contextmanager
def refitting(policy: PolicyScopes, engine: EngineScopes) -> Iterator[None]:
    """The block is the transfer: what it needs is placed around it, in the order that bounds the peak.

    Raises:
        EngineError: A wake failed; both sides were put back.
        ScopeError: A scope of the policy is open, and the engine is on the same GPUs.
        RLSessionError: A legacy call failed and was undone.
    """
    with _beside(policy, engine) if _are_tenants(policy, engine) else _apart(policy):
        yield
    policy.published()


def _are_tenants(policy: PolicyScopes, engine: EngineScopes) -> bool:
    return engine.group.sharing is not None and engine.group.sharing is policy.group.sharing


@contextmanager
def _beside(policy: PolicyScopes, engine: EngineScopes) -> Iterator[None]:
    shares_weights = engine.group.traits.shares_weights
    _check_outside(policy, "refit")
    try:  # an engine that is awake is put to sleep by the first entry, with what it cached of the old weights
        first = ("colocated_refit",) if shares_weights else ("weights",)
        with policy.refit_mode(), engine._awake(first, hold=True):  # noqa: SLF001 (scopes are two halves of one thing)
            yield
    except BaseException as error:
        if not engine.group.is_asleep and engine.health == "ok":  # half of its weights may be new
            try:
                engine.offload()
            except RLSessionError as failure:
                error.add_note(f"and while putting the engine to sleep: {failure}")
        raise
    if not shares_weights:
        with engine._awake(None, hold=True):  # noqa: SLF001 (its entry sends the policy away first)
            pass


@contextmanager
def _apart(policy: PolicyScopes) -> Iterator[None]:
    rests_in = policy.mode is Mode.RESIDENT and policy.group.state.params is Tier.DEVICE
    if rests_in or not policy.group.traits.weights_move:
        yield
        return
    with policy._weights_in():  # noqa: SLF001 (gradients and optimizer stay where they are: nobody needs their room)
        yield


@contextmanager
def legacy_refitting(policy: PolicyScopes, engine: EngineScopes) -> Iterator[None]:
    """The block makes the legacy calls of a refit itself.

    Raises:
        ScopeError: A scope of the policy or of the engine is open.
        RLSessionError: A legacy call failed and was undone.
    """
    for tenant in (policy, engine):
        _check_outside(tenant, "legacy_refit")
    with policy._weights_in(hold=True):  # noqa: SLF001 (the others leave, the parameters come in, and stay)
        pass
    try:
        yield
    except BaseException:
        policy.group.forget()
        engine.group.forget()
        raise
    _after_helper(policy, engine)
    policy.published()


def _after_helper(policy: PolicyScopes, engine: EngineScopes) -> None:
    """What ``refit_policy_generation`` and the synchronisers leave behind when they succeed (legacy contract A.7)."""
    trainer, traits = policy.group, policy.group.traits
    if not _are_tenants(policy, engine):
        if engine.group.traits.backend == "megatron":  # its synchroniser frees the optimizer on every topology
            trainer.state = effect(trainer.state, Call("offload_before_refit"), traits)
        return
    shares_weights = engine.group.traits.shares_weights
    left = "offload_before_refit" if shares_weights else "offload_after_refit"
    trainer.state = effect(trainer.state, Call(left), traits)
    engine.group.set_awake()
    if shares_weights:
        trainer.weights_taken()


def _check_outside(tenant: LegacyScopes, method: str) -> None:
    if tenant.open_scope():
        raise ScopeError(
            f"{tenant._control.label}: {method}() at {call_site()} inside {tenant._control.frames[-1].describe()}",  # noqa: SLF001
            tenant._control.explain()[1],  # noqa: SLF001
            f"with scopes(policy).{method}(policy_generation): ...  # after that block has ended",
        )
