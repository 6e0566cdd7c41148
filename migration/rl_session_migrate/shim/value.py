"""The legacy value API over a value model of rl_session.

Its verbs are not those of a policy: ``prepare_for_inference``, and a ``finish_training`` that really offloads. None of its
lifecycle calls takes an argument. ``help(LegacyValue)`` is its reference. Knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rl_session.driver.callsite import call_site, speaking
from rl_session.policy import ValueModel
from rl_session.scope import Scope
from rl_session_migrate.shim.batch import BatchedDataDict
from rl_session_migrate.shim.effects import LegacyConfig, value_effect
from rl_session_migrate.shim.trainer import Batch, LegacyTrainer

__all__ = ["LegacyValue"]


class LegacyValue(LegacyTrainer):
    """A value model of rl_session with the methods of a legacy value, over the same engine as the scopes.

    Lifecycle calls set where it *rests*, as those of :class:`LegacyPolicy` do; they take no arguments. Reference:
    docs/legacy-api.md; the way to scopes, in steps: migration/README.md.

    Args:
        value: The value model, made by ``session.attach_value``.
        backend: Whose effects to have where they differ: "dtensor" or "megatron".
        config: A legacy configuration (its nested mapping), or a :class:`LegacyConfig`.

    Raises:
        ConfigError: That is no value model, or there is no such backend.
    """

    _kind = "value"
    _infers = "prepare_for_inference"
    _effects = staticmethod(value_effect)

    def __init__(
        self,
        value: ValueModel,
        *,
        backend: Literal["dtensor", "megatron"] = "dtensor",
        config: LegacyConfig | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(value, backend=backend, config=config)

    def prepare_for_training(self) -> None:
        """Bring weights, gradients and optimizer state to the device, and leave the module in train.

        Contract: from any state, and again. A gradient buffer that was freed comes back as zeros. Scope:
        ``with value.training_mode(): ...``. Guide: docs/legacy-api.md.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: The device has no room, or something else failed; everything is as it was.
        """
        self._lifecycle("prepare_for_training")

    def prepare_for_inference(self) -> None:
        """Bring the weights to the device, and leave the module in eval; optimizer state stays where it is.

        Contract: DTensor keeps gradients; Megatron frees their buffer, except that of an open step, which legacy destroyed.
        ``offload_optimizer_for_logprob`` has no effect on a value. Scope: ``with value.inference_mode(): ...``. Guide:
        docs/legacy-api.md.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: The device has no room, or something else failed; everything is as it was.
        """
        self._lifecycle("prepare_for_inference")

    def finish_inference(self) -> None:
        """Send the weights to the host; the train flag and optimizer state stay (a policy's leaves the module in eval).

        Contract: DTensor moves gradients with the weights, Megatron leaves them. Scope: none; the end of
        ``with value.inference_mode():`` is the way back. Guide: docs/legacy-api.md.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: It failed; everything is as it was.
        """
        self._lifecycle("finish_inference")

    def finish_training(self) -> None:
        """Send everything to the host, and leave the module in eval; that of a policy does nothing.

        Contract: Megatron frees gradients, except those of an open step, which go to the host. Scope: none; the end of
        ``with value.training_mode():`` is the way back. Guide: docs/legacy-api.md.

        Raises:
            ShimInScopeError: A scope is open.
            RLSessionError: It failed; everything is as it was.
        """
        self._lifecycle("finish_training")

    def get_values(self, data: Batch, timer: Any = None) -> BatchedDataDict:
        """One value a token.

        Contract: needs the weights on the device, as ``prepare_for_inference()`` brings them; leaves the module in eval.
        Scope: ``with value.inference_mode(): value.get_values(batch)``. Guide: docs/legacy-api.md.

        Args:
            data: A legacy batch or any mapping.
            timer: Taken and not used.

        Returns:
            ``values [B, S]``.

        Raises:
            ModeError: The weights are away; the message names the missing legacy call and the scope.
            RLSessionError: As ``rl_session.ValueModel.get_values``.
        """
        del timer
        return self._infer("get_values", lambda: self._policy.get_values(data))

    def save_checkpoint(
        self,
        weights_path: Any,
        optimizer_path: Any = None,
        tokenizer_path: Any = None,
        checkpointing_cfg: Any = None,
        **kwargs: Any,
    ) -> None:
        """Write a checkpoint of weights, optimizer and scheduler state to ``weights_path``; nothing moves.

        Contract: from any state (legacy failed on a value whose weights were away). Guide: docs/legacy-api.md.

        Args:
            weights_path: Where; the checkpoint holds the optimizer too.
            optimizer_path: A note that points there is written here.
            tokenizer_path: Taken and not used.
            checkpointing_cfg: Taken and not used.
            **kwargs: Taken and not used, such as ``is_final_checkpoint``.

        Raises:
            CheckpointError: ``weights_path`` is something else than a checkpoint or a free name.
            CheckpointWriteError: It could not be written; what stood there still stands.
        """
        del tokenizer_path, checkpointing_cfg, kwargs
        with speaking("shim", call_site()):
            self._save(weights_path, optimizer_path)

    def inference_mode(self, **options: Any) -> Scope[Any]:
        """The scope of the value model behind this handle; inside it this handle's compute calls may be made.

        Contract: not of the legacy API; comes back to where the last lifecycle call left the model. Guide: docs/legacy-api.md.
        """
        scope: Scope[Any] = self._policy.inference_mode(**options)
        return scope
