"""The engine that samples from a policy's own module: no second copy of the weights, nothing to refit.

Sampling itself is ``rl_session.workers.sampling``; this is the handle that users hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rl_session.errors import ConfigError
from rl_session.workers.sampling import SamplingParams

if TYPE_CHECKING:
    from rl_session.policy import Policy
    from rl_session.scope import Scope

__all__ = ["InProcessEngine"]


class InProcessEngine:
    """Samples from a policy's own weights, batched, with a KV cache where the model has one.

    Args:
        policy: The policy; its ``generation_mode()`` opens the engine.
        name: The engine's name.
        temperature: Logits are divided by it; 0 is greedy.
        top_k: Sample among the k likeliest tokens; None for all.
        top_p: Sample among the likeliest tokens that sum to this probability; None for all.
        max_new_tokens: The most tokens to add.
        stop_ids: Token ids that end a sequence.
        pad_id: Fills up shorter sequences.
        seed: Makes sampling repeatable without touching torch's global generator; the n-th call draws the n-th stream.
        mbs: Sequences sampled at once; all by default.

    Raises:
        ConfigError: ``policy`` is no policy, ``name`` no name, or a parameter is out of range.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        name: str = "engine",
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        max_new_tokens: int = 64,
        stop_ids: Sequence[int] = (),
        pad_id: int = 0,
        seed: int | None = None,
        mbs: int | None = None,
    ) -> None:
        _check(policy, name)
        self.name = name
        self.policy = policy
        self.params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            pad_id=pad_id,
            seed=seed,
            mbs=mbs,
        )
        self._num_calls = 0
        policy._engines.append(self)  # noqa: SLF001 (an engine and its policy are two halves of one thing)

    def __repr__(self) -> str:
        return f"<InProcessEngine {self.name!r} of {self.policy!r}>"

    def awake(self, *, acquire_timeout: float | None = None) -> Scope[Any]:
        """A scope in which this engine samples: ``policy.generation_mode(engine)``.

        Args:
            acquire_timeout: Seconds to wait while another thread or task owns the policy; None gives up at once.
        """
        return self.policy.generation_mode(self, acquire_timeout=acquire_timeout)

    def generate(self, batch: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
        """Continue the prompts of a batch.

        Args:
            batch: ``input_ids [B, S]`` right-padded prompts, ``input_lengths [B]``.
            **overrides: Sampling parameters for this call only, such as ``temperature=0.0``.

        Returns:
            CPU tensors in the caller's order: ``output_ids [B, S']`` right-padded, ``generation_lengths [B]``,
            ``unpadded_sequence_lengths [B]``, ``logprobs [B, S']`` float32 (0 on prompt and padding).

        Raises:
            ModeError: Not in ``generation_mode()``.
            BatchError: The batch does not fit, or the result would be longer than the model allows.
            ConfigError: An override is out of range.
            NonFiniteError: NaN in the logits.
        """
        params = attrs.evolve(self.params, **overrides)
        result: dict[str, Any] = self.policy._control.call("generate", batch, params, self._num_calls)  # noqa: SLF001
        self._num_calls += 1
        return result


def _check(policy: object, name: object) -> None:
    if not isinstance(getattr(policy, "_engines", None), list):
        raise ConfigError(
            f"InProcessEngine({policy!r}): it samples with a policy of a session",
            (f"given: {type(policy).__name__}",),
            "rs.InProcessEngine(session.attach(model, optimizer), max_new_tokens=64)",
        )
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"InProcessEngine(name={name!r}): a name is a string that says something",
            (f"given: {type(name).__name__}",),
            'rs.InProcessEngine(policy, name="engine")',
        )
