"""What each shipped loop needs on the device, phase by phase, as the lower bound sees it.

Only what the computation itself needs: no offload, no order of moves. A reference model is a component of its own (where it is
put is the schedule's business). Weights that are pushed into the engine, its cache, and gradients are made anew each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bytes_moved.bound import Phase
from bytes_moved.sizes import Sizes

__all__ = ["TRACES", "Trace", "capacity_of"]


class Trace(NamedTuple):
    """One of the shipped loops.

    Attributes:
        phases: One step of it.
        has_value: Whether a value model takes part.
        has_reference: Whether log-probabilities of a reference are asked for.
        engine: "none" on these GPUs, "own weights" (vLLM beside the trainer), or "training weights" (Megatron).
        num_epochs: How often the step's batch is trained on.
        leaves_device: Whether the legacy loop ever sends the policy away.
    """

    phases: tuple[Phase, ...]
    has_value: bool = False
    has_reference: bool = True
    engine: str = "none"
    num_epochs: int = 1
    leaves_device: bool = True


def _phase(name: str, *, reads: Sequence[str] = (), writes: Sequence[str] = (), creates: Sequence[str] = ()) -> Phase:
    return Phase(name, frozenset(reads), frozenset(writes), frozenset(creates))


_REFIT = _phase("refit", reads=["params"], creates=["engine_weights"])
_GENERATE = _phase("generate", reads=["engine_weights"], creates=["kv_cache"])
_SAMPLE = _phase("generate", reads=["params"], creates=["megatron_kv_cache"])
_LOGPROB = _phase("logprob", reads=["params"])
_REFERENCE = _phase("reference", reads=["reference"])
_VALUES = _phase("values", reads=["value_params"])
_TRAIN = _phase("train", writes=["params", "optimizer"], creates=["grads"])
_TRAIN_VALUE = _phase("train value", writes=["value_params", "value_optimizer"], creates=["value_grads"])
_PUBLISH = _phase("publish", reads=["params"])

PPO_EPOCHS = 4
"""``ppo_epochs`` of examples/configs/ppo_math_1B.yaml, which also asks for no reference."""

TRACES: Mapping[str, Trace] = {
    "grpo": Trace((_REFIT, _GENERATE, _LOGPROB, _REFERENCE, _TRAIN), engine="own weights"),
    "grpo-nokl": Trace((_REFIT, _GENERATE, _LOGPROB, _TRAIN), has_reference=False, engine="own weights"),
    "grpo-async": Trace((_LOGPROB, _REFERENCE, _TRAIN, _PUBLISH), leaves_device=False),
    "grpo-async-megatron": Trace((_SAMPLE, _LOGPROB, _REFERENCE, _TRAIN), engine="training weights"),
    "grpo-sync": Trace((_REFIT, _GENERATE, _LOGPROB, _REFERENCE, _TRAIN), engine="own weights"),
    "ppo": Trace(
        (_REFIT, _GENERATE, _VALUES, _LOGPROB, *(PPO_EPOCHS * (_TRAIN_VALUE, _TRAIN))),
        has_value=True,
        has_reference=False,
        engine="own weights",
        num_epochs=PPO_EPOCHS,
    ),
    # No shipped loop: the critic's epochs before the actor's. Values and advantages are known before either, so neither waits.
    "ppo-grouped": Trace(
        (_REFIT, _GENERATE, _VALUES, _LOGPROB, *(PPO_EPOCHS * (_TRAIN_VALUE,)), *(PPO_EPOCHS * (_TRAIN,))),
        has_value=True,
        has_reference=False,
        engine="own weights",
        num_epochs=PPO_EPOCHS,
    ),
    "ppo-async": Trace(
        (_VALUES, _LOGPROB, *(PPO_EPOCHS * (_TRAIN_VALUE, _TRAIN)), _PUBLISH),
        has_value=True,
        has_reference=False,
        num_epochs=PPO_EPOCHS,
    ),
    "sft": Trace((_TRAIN,), has_reference=False, leaves_device=False),
    "dpo": Trace((_REFERENCE, _TRAIN), leaves_device=False),
    "rm": Trace((_TRAIN,), has_reference=False, leaves_device=False),
}


def capacity_of(trace: Trace, sizes: Sizes, budget: str) -> int:
    """Bytes of the device under ``budget``; never less than the largest phase, or nothing could run."""
    nbytes = sizes.by_name()
    largest = max(sum(nbytes[name] for name in phase.needs) for phase in trace.phases)
    everything = sum(nbytes[name] for name in frozenset().union(*(phase.needs for phase in trace.phases)))
    return {"tight": largest, "80gb": max(largest, sizes.card), "roomy": everything + everything // 50}[budget]
