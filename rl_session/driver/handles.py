"""The calls legal in each mode: one Protocol a mode for the type checker, one thin object for the run time.

A scope yields a handle, so that ``train`` inside ``logprob_mode()`` is an error before the program runs. The policy's own
methods make the same check when they are called. Knows nothing of how calls are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from rl_session.lifecycle import MODE_TABLE, Mode, modes_allowing, scope_to_write

__all__ = [
    "Anywhere",
    "EngineCalls",
    "EngineGenerationCalls",
    "GenerationCalls",
    "Handle",
    "LogprobCalls",
    "OffloadedCalls",
    "RefitCalls",
    "TrainingCalls",
    "ValueCalls",
    "ValueTrainingCalls",
]

Batch = Mapping[str, Any]
Result = dict[str, Any]
LossFn = Callable[..., tuple[Tensor, Mapping[str, Any]]]


class Anywhere(Protocol):
    """Calls that are legal in every mode."""

    def state_dict(self) -> dict[str, Tensor]:
        """A CPU copy of the weights."""
        ...

    def save_checkpoint(self, path: str | Path) -> None:
        """Write a checkpoint."""
        ...


class EvaluationCalls(Anywhere, Protocol):
    """Calls that are legal wherever the weights are on the device."""

    def train(
        self, batch: Batch, loss_fn: LossFn, *, gbs: int | None = None, mbs: int | None = None, eval_mode: Literal[True]
    ) -> Result:
        """The loss of a batch, without gradients and optimizer steps."""
        ...


class LogprobCalls(EvaluationCalls, Protocol):
    """Calls that are legal in ``logprob_mode()``."""

    def get_logprobs(self, batch: Batch, *, temperature: float | None = None, mbs: int | None = None) -> Result:
        """Log-probabilities of the tokens."""
        ...

    def get_reference_policy_logprobs(
        self, batch: Batch, *, temperature: float | None = None, mbs: int | None = None
    ) -> Result:
        """Log-probabilities of the tokens under the reference."""
        ...

    def get_topk_logits(self, batch: Batch, k: int, *, mbs: int | None = None) -> Result:
        """The k largest next-token logits."""
        ...

    def score(self, batch: Batch) -> Result:
        """One score a sequence."""
        ...


class _StepCalls(Protocol):
    """Calls that change weights."""

    def train(
        self, batch: Batch, loss_fn: LossFn, *, gbs: int | None = None, mbs: int | None = None, eval_mode: bool = False
    ) -> Result:
        """Optimizer steps over a batch."""
        ...

    def begin_step(self, global_valid_seqs: float | None = None, global_valid_tokens: float | None = None) -> Any:
        """Open a train step."""
        ...

    def load_checkpoint(self, path: str | Path) -> None:
        """Read a checkpoint back."""
        ...


class TrainingCalls(_StepCalls, LogprobCalls, Protocol):
    """Calls that are legal in ``training_mode()``."""


class GenerationCalls(LogprobCalls, Protocol):
    """Calls that are legal in ``generation_mode()`` of an in-process engine."""

    def generate(self, batch: Batch) -> Result:
        """Sample from the engine."""
        ...


class EngineCalls(Protocol):
    """Calls that are legal in ``engine.awake()``."""

    def generate(self, batch: Batch, **kwargs: Any) -> Result:
        """Sample from the engine."""
        ...


class EngineGenerationCalls(EngineCalls, Anywhere, Protocol):
    """Calls that are legal in ``generation_mode()`` of an external engine."""


class ValueCalls(EvaluationCalls, Protocol):
    """Calls that are legal in a value model's ``inference_mode()``."""

    def get_values(self, batch: Batch) -> Result:
        """One value a token."""
        ...


class ValueTrainingCalls(_StepCalls, ValueCalls, Protocol):
    """Calls that are legal in a value model's ``training_mode()``."""


class RefitCalls(Anywhere, Protocol):
    """Calls that are legal in ``refit_mode()``."""

    def iter_weights(self, bucket_nbytes: int = ...) -> Iterator[dict[str, Tensor]]:
        """Weights in buckets."""
        ...


class OffloadedCalls(Anywhere, Protocol):
    """Calls that are legal in ``offloaded()``."""

    def load_checkpoint(self, path: str | Path) -> None:
        """Read a checkpoint back."""
        ...

    def iter_weights(self, bucket_nbytes: int = ...) -> Iterator[dict[str, Tensor]]:
        """Weights in buckets, from the host copies."""
        ...


_ENGINE_CALLS = ("generate",)
"""What a policy itself does not have, and its handle in ``generation_mode()`` has."""
_METHOD_OF_CALL = {"train(eval_mode=True)": "train"}


class Handle:
    """What a scope yields: the calls of its mode and nothing else. It keeps no state and outlives nothing."""

    __slots__ = ("_kind", "_mode", "_target")

    def __init__(self, target: Any, mode: Mode, kind: str) -> None:
        self._target = target
        self._kind = kind
        self._mode = mode

    @property
    def _calls(self) -> list[str]:  # found when asked for: most handles are never looked at
        legal = {_METHOD_OF_CALL.get(call, call) for call in MODE_TABLE[self._mode].calls}
        return sorted(call for call in legal if hasattr(self._target, call))

    def __getattr__(self, name: str) -> Any:
        if name in self._calls:
            return getattr(self._target, name)
        hint = ""
        if modes_allowing(name) and (hasattr(self._target, name) or name in _ENGINE_CALLS):
            hint = f"; write: with {self._kind}.{scope_to_write(name, self._kind)}() as handle: handle.{name}(...)"
        listed = ", ".join(self._calls)
        raise AttributeError(f"the handle of {self._mode} mode has no {name!r} (it has {listed}){hint}")

    def __dir__(self) -> list[str]:
        return self._calls

    def __repr__(self) -> str:
        return f"<handle of {self._target!r} in {self._mode} mode>"
