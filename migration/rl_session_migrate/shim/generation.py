"""The legacy generation API over a generation engine of rl_session.

``help(LegacyGeneration)`` is its reference. What backends do differently is mostly what they return, and whether a failure to
wake is raised or reported by False. Knows nothing of how weights travel: the engine's own push does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from rl_session.audit import events
from rl_session.driver.callsite import call_site, speaking
from rl_session.driver.engine_control import EngineControl
from rl_session.engines import EngineHandle
from rl_session.errors import (
    ConfigError,
    ModeError,
    OwnershipError,
    RLSessionError,
    ShimInScopeError,
    UnsupportedError,
)
from rl_session.generation.in_process import InProcessEngine
from rl_session_migrate.shim.batch import BatchedDataDict
from rl_session_migrate.shim.notice import warn_once
from rl_session_migrate.shim.shared import sample_shared, share_weights
from rl_session_migrate.shim.trainer import Batch
from rl_session_migrate.shim.transfer import Transfer, receive

__all__ = ["GenerationBackend", "LegacyGeneration", "control_of"]

GenerationBackend = Literal["vllm", "sglang", "megatron", "trtllm", "dynamo"]

_SWALLOWS = frozenset({"vllm", "trtllm"})
"""Backends that report a failure to wake or sleep by False."""
_INSTEAD_OF_WAKING = "with engine.awake(): ...  or with policy.generation_mode(): ... around what generates"
_PUSH = "policy.refit(engine), which tells both sides and waits for both"
_INSTEAD_OF_SLEEPING = "nothing: the end of the engine's scope is the way back"


class LegacyGeneration:
    """A generation engine of rl_session with the methods of a legacy generation object.

    What ``prepare_for_generation`` woke stays awake until ``finish_generation``, or until somebody needs the room; then it is
    woken again by the next ``generate`` (legacy ran out of memory). Reference: docs/legacy-api.md; the way to scopes, in steps:
    migration/README.md.

    Args:
        engine: What ``session.engine(name, engine)`` gave, or an in-process engine (the weights are the policy's then).
        backend: Whose return values and refusals to have: "vllm", "sglang", "megatron", "trtllm" or "dynamo".
        colocated: Whether it shares the policy's devices; by default whether the engine says so.

    Raises:
        ConfigError: That is no engine, or there is no such backend.
    """

    weight_synchronizer: Any
    """Not there unless a loop sets it; :func:`refit_policy_generation` hands over to it."""

    def __init__(
        self,
        engine: EngineHandle | InProcessEngine,
        *,
        backend: GenerationBackend = "vllm",
        colocated: bool | None = None,
    ) -> None:
        if backend not in get_args(GenerationBackend):
            listed = ", ".join(map(repr, get_args(GenerationBackend)))
            raise ConfigError(
                f"backend={backend!r}: there is no such backend",
                (f"backends: {listed}",),
                'LegacyGeneration(engine, backend="vllm")',
            )
        if not isinstance(engine, EngineHandle | InProcessEngine):
            raise ConfigError(
                f"LegacyGeneration({engine!r}): that is no engine of a session",
                (),
                'LegacyGeneration(session.engine("engine", vllm))',
            )
        self._engine = engine
        self._backend = backend
        self._colocated = colocated if colocated is not None else _shares_device(engine)

    def __repr__(self) -> str:
        return f"<LegacyGeneration of {self._engine!r}, {self._backend}>"

    def __reduce__(self) -> Any:
        """A handle for another process, where the engine's own can go there.

        Raises:
            UnsupportedError: The engine's memory is managed in this process.
        """
        raise UnsupportedError(
            f"engine {self._engine.name!r}: pickling LegacyGeneration",
            ("its memory is managed in this process",),
            "call it from threads of this process (asyncio.to_thread), or session.engine(...) in the other one",
        )

    @property
    def scoped(self) -> Any:
        """The engine of rl_session behind this handle.

        Contract: not of the legacy API; ``awake()`` is its scope. Guide: docs/legacy-api.md.
        """
        return self._engine

    @property
    def cfg(self) -> dict[str, Any]:
        """The configuration as legacy code reads it, and as ``scopes(policy_generation)`` of the adapter does.

        Contract: the keys that lifecycle calls go by. Guide: docs/legacy-api.md.
        """
        colocated = {"enabled": self._colocated}
        return {
            "backend": self._backend,
            "colocated": colocated,
            "sglang_server_config": {"needs_offload": self._colocated},
        }

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def prepare_for_generation(self, *args: Any, tags: Sequence[str] | None = None, **kwargs: Any) -> bool | None:
        """Wake the engine, or a part of it; what is awake stays so.

        Contract: non-colocated engines are awake anyway. vLLM and TensorRT-LLM report a failure by False (with a warning
        record) where the others raise; SGLang returns None. An in-process engine brings the policy's weights to the device.
        Scope: ``with engine.awake(): ...``. Guide: docs/legacy-api.md.

        Args:
            *args: Dropped.
            tags: Which parts, such as ``["weights"]``; everything by default.
            **kwargs: Dropped.

        Returns:
            Whether it is awake; None on SGLang.

        Raises:
            ShimInScopeError: A scope of the engine is open.
            RLSessionError: It would not wake (SGLang, Megatron, Dynamo).
        """
        del args, kwargs
        shown = "" if tags is None else f"tags={list(tags)}"
        warn_once(f"policy_generation.prepare_for_generation({shown})", _INSTEAD_OF_WAKING)
        return self._reporting("prepare_for_generation()", lambda site: self._wake(tags, site))

    def _wake(self, tags: Sequence[str] | None, site: str) -> None:
        if isinstance(self._engine, InProcessEngine):
            share_weights(self._engine, "prepare_for_generation()", site)
            return
        control = control_of(self._engine)
        known = None if tags is None else [tag for tag in tags if tag in control.tags]
        if known == []:  # a backend's own word, such as "colocated_refit": all of it
            known = None
        if self._colocated or control.state != "awake":
            control.wake_now(known, "prepare_for_generation()", site)

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool | None:
        """Put the engine to sleep. A non-colocated one only forgets what it cached.

        Contract: an in-process engine and a Megatron one with ``release_gpu=False`` keep what they have. Scope: none; the end
        of the engine's scope is the way back. Guide: docs/legacy-api.md.

        Args:
            *args: Refused on Megatron, else dropped.
            **kwargs: ``release_gpu`` on Megatron; everything is dropped on the others.

        Returns:
            Whether it sleeps; None on SGLang.

        Raises:
            TypeError: Arguments that Megatron does not take.
            ShimInScopeError: A scope of the engine is open.
            RLSessionError: It would not sleep (SGLang, Megatron, Dynamo).
        """
        keeps = False
        if self._backend == "megatron":
            if args or set(kwargs) - {"release_gpu"}:
                raise TypeError("finish_generation() takes only the keyword release_gpu")
            keeps = not kwargs.get("release_gpu", True)
        warn_once("policy_generation.finish_generation()", _INSTEAD_OF_SLEEPING)
        if keeps:
            return True
        return self._reporting("finish_generation()", self._sleep)

    def _sleep(self, site: str) -> None:
        if isinstance(self._engine, InProcessEngine):
            return  # the weights are the policy's, and moving them is the policy's own business
        control = control_of(self._engine)
        if self._colocated:
            control.sleep_now(site)
        else:
            self._reset_cache()

    def _reporting(self, call: str, work: Any) -> bool | None:
        """Do it; a failure is raised or reported by False, as the backend does."""
        site = call_site()
        self._refuse_in_scope(call, site)
        try:
            with speaking("shim", site):
                work(site)
        except ShimInScopeError:
            raise
        except RLSessionError as error:
            if self._backend not in _SWALLOWS:
                raise
            self._tell(f"{call} at {site} failed, and legacy loops ignore the False it returns: {error.attempted}")
            return False
        return None if self._backend == "sglang" else True

    def _refuse_in_scope(self, call: str, site: str) -> None:
        """Refuse a call that wakes or sleeps while a scope is open.

        Raises:
            ShimInScopeError: One is.
        """
        control: Any = self._policy_control() if isinstance(self._engine, InProcessEngine) else control_of(self._engine)
        control.close_orphans()
        if control.frames:
            inside = control.frames[-1]
            raise ShimInScopeError(
                f"{control.label}: {call} at {site} inside {inside.describe()}",
                control.explain()[1],
                f"with engine.awake(): ...  # after the block of {inside.spelling}; the scope does what the call did",
            )

    def _policy_control(self) -> Any:
        assert isinstance(self._engine, InProcessEngine)
        return self._engine.policy._control  # noqa: SLF001 (two faces of one policy)

    def _tell(self, message: str) -> None:
        event = events.WarningIssued(code="legacy_failure_ignored", message=message)
        if isinstance(self._engine, EngineHandle):
            control_of(self._engine).run.recorder(None)(event)
        else:
            self._policy_control().record(event)

    def invalidate_kv_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forget what the engine cached of older weights.

        Contract: False on Megatron, which does it by itself or not at all; True where there is nothing to forget. Guide:
        docs/legacy-api.md.

        Args:
            *args: Dropped.
            **kwargs: Dropped.
        """
        del args, kwargs
        return False if self._backend == "megatron" else self._reset_cache()

    def _reset_cache(self) -> bool:
        engine = self._engine.engine if isinstance(self._engine, EngineHandle) else None
        reset = getattr(engine, "reset_cache", None)
        return reset is None or reset() is not False

    def suspend_for_refit(self) -> None:
        """Nothing: a push waits until nothing is in flight.

        Contract: returns None (Megatron pauses its engine around a swap of weights). Scope: none; ``policy.refit(engine)`` pauses
        where it must. Guide: docs/legacy-api.md.
        """
        warn_once("policy_generation.suspend_for_refit()", "nothing; policy.refit(engine) pauses where it must")

    def resume_after_refit(self) -> None:
        """Nothing.

        Contract: returns None, as :meth:`suspend_for_refit` does. Scope: none. Guide: docs/legacy-api.md.
        """
        warn_once("policy_generation.resume_after_refit()", "nothing; policy.refit(engine) pauses where it must")

    def blocks_training(self) -> bool:
        """Whether training must wait while it generates: on Megatron, where it shares the policy's devices.

        Contract: False on every other backend. Guide: docs/legacy-api.md.
        """
        return self._backend == "megatron" and self._colocated

    def wake_carries_weight_updates(self) -> bool:
        """Whether waking it brings the policy's new weights: where the weights are the policy's own.

        Contract: False but on a colocated Megatron engine. Guide: docs/legacy-api.md.
        """
        return self._backend == "megatron" and self._colocated

    def prepare_refit_info(self, state_dict_info: Any = None) -> None:
        """Nothing: a push says of each tensor what it is.

        Contract: takes what ``policy.prepare_refit_info()`` gives, and returns None. Scope: none; delete it. Guide:
        docs/legacy-api.md.

        Args:
            state_dict_info: Taken and not used.
        """

    # -- generating ------------------------------------------------------------------------------------------------------

    def generate(self, data: Batch, greedy: bool = False, **kwargs: Any) -> BatchedDataDict:
        """Continue prompts.

        Contract: needs all of the engine awake, as ``prepare_for_generation()`` leaves it. Scope: ``with engine.awake() as e:
        e.generate(batch)``. Guide: docs/legacy-api.md.

        Args:
            data: ``input_ids [B, S]`` right-padded prompts, ``input_lengths [B]``.
            greedy: Take the likeliest token; handed to the engine.
            **kwargs: Handed to the engine.

        Returns:
            ``output_ids``, ``generation_lengths``, ``unpadded_sequence_lengths``, ``logprobs``.

        Raises:
            ModeError: It, or a part of it, was not woken; the message names the missing legacy call and the scope.
            StaleWeightsError: Its weights were discarded, or a push failed half-way.
            EngineError: The engine failed.
        """
        site = call_site()
        with speaking("shim", site):
            if isinstance(self._engine, InProcessEngine):
                return sample_shared(self._engine, data, greedy, site, kwargs)
            if greedy:
                kwargs["greedy"] = True
            control = control_of(self._engine)
            if not control.frames:
                self._wake_again(control, site)
            return BatchedDataDict(self._engine.generate(data, **kwargs))

    def _wake_again(self, control: EngineControl, site: str) -> None:
        """Bring back what legacy believes to be awake, where somebody needed the room."""
        asleep = [tag for tag in control.tags if tag not in control.rests]
        if asleep and self._colocated and set(asleep) - set(control.awake):
            call = "prepare_for_generation()" if not control.rests else f"prepare_for_generation(tags={asleep})"
            raise ModeError(
                f"{control.label}: generate() at {site} with {', '.join(asleep)} asleep",
                (*control.explain()[1], f"the legacy call that wakes them was not made: {call}"),
                f"policy_generation.{call}  # before; or, in scopes: with engine.awake() as e: e.generate(batch)",
            )
        while True:
            try:
                control.wake_now(None, "generate()", site)
                return
            except OwnershipError:  # another thread is at waking it
                if control.frames:
                    return

    # -- metrics -----------------------------------------------------------------------------------------------------

    def get_logger_metrics(self) -> dict[str, Any]:
        """None that the engine keeps for a logger: an empty dict.

        Contract: what loops log of a step's rollouts. Scope: none. Guide: docs/legacy-api.md.
        """
        return {}

    def clear_logger_metrics(self) -> None:
        """Nothing: none are kept.

        Contract: returns None. Scope: none. Guide: docs/legacy-api.md.
        """

    # -- the rest --------------------------------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        """Take the engine out of the session; True.

        Contract: the last call of a loop. Scope: the end of ``with rs.Session(...)``. Guide: docs/legacy-api.md.
        """
        if isinstance(self._engine, EngineHandle):
            self._engine.close()
        return True

    def update_weights_via_ipc_zmq(self) -> list[Transfer]:
        """Receive the weights that a policy of the same session is told to send; one future.

        Contract: tell both sides, then wait for both. Scope: ``policy.refit(engine)``. Guide: docs/legacy-api.md.

        Raises:
            UnsupportedError: The engine has no weights of its own.
        """
        warn_once("policy_generation.update_weights_via_ipc_zmq()", _PUSH)
        return [self._receive("update_weights_via_ipc_zmq")]

    def update_weights_from_collective(self) -> list[Transfer]:
        """As :meth:`update_weights_via_ipc_zmq`, of the policy's ``broadcast_weights_for_collective``.

        Contract: tell both sides, then wait for both. Scope: ``policy.refit(engine)``. Guide: docs/legacy-api.md.

        Raises:
            UnsupportedError: The engine has no weights of its own.
        """
        warn_once("policy_generation.update_weights_from_collective()", _PUSH)
        return [self._receive("update_weights_from_collective")]

    def _receive(self, call: str) -> Transfer:
        if isinstance(self._engine, InProcessEngine):
            raise UnsupportedError(
                f"engine {self._engine.name!r}: {call}()",
                ("it samples from the policy's own weights: there is nothing to receive",),
                "refit_policy_generation(policy, policy_generation, colocated_inference)",
            )
        return receive(control_of(self._engine))


def _shares_device(engine: EngineHandle | InProcessEngine) -> bool:
    return isinstance(engine, InProcessEngine) or engine.device is not None


def control_of(engine: EngineHandle) -> EngineControl:
    """The driver's side of an engine: what a legacy handle changes it by."""
    return engine._control  # noqa: SLF001 (two faces of one engine)
