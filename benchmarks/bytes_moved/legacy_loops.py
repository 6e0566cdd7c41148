"""One steady step of each shipped loop, call for call, as the legacy loops make them.

A step without validation and without a checkpoint; what ran before left the weights stale, as training does. Calls that move
nothing on these GPUs (the data plane, collectors, counters) are left out; the order of the others is the loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bytes_moved.legacy import LegacyEngine, LegacyTrainer, Store
from bytes_moved.phases import PPO_EPOCHS

__all__ = ["LOOPS", "START", "Rig"]


class Rig(NamedTuple):
    """Who takes part; what a loop does not use is None."""

    policy: LegacyTrainer
    value: LegacyTrainer | None
    engine: LegacyEngine | None
    megatron_kv_cache: Store | None


def _refit(rig: Rig) -> None:
    """``refit_policy_generation`` with colocated inference and no synchronizer."""
    assert rig.engine is not None
    rig.policy.call("offload_before_refit")
    rig.engine.wake("weights")
    rig.policy.infer()
    rig.policy.call("offload_after_refit")
    rig.engine.wake("kv_cache")


def _rollout(rig: Rig) -> None:
    assert rig.engine is not None
    rig.engine.generate()
    rig.engine.sleep()


def _grpo(rig: Rig) -> None:
    _refit(rig)
    _rollout(rig)
    rig.policy.call("prepare_for_lp_inference")
    rig.policy.infer()
    rig.policy.infer_reference()
    rig.policy.call("prepare_for_training")
    rig.policy.train()


def _grpo_nokl(rig: Rig) -> None:
    _refit(rig)
    _rollout(rig)
    rig.policy.call("prepare_for_lp_inference")
    rig.policy.infer()
    rig.policy.call("prepare_for_training")
    rig.policy.train()


def _grpo_async(rig: Rig) -> None:
    """Generation has GPUs of its own: the refit is a broadcast."""
    rig.policy.call("prepare_for_lp_inference")
    rig.policy.infer()
    rig.policy.infer_reference()
    rig.policy.call("prepare_for_training")
    rig.policy.train()
    rig.policy.infer()


def _grpo_async_megatron(rig: Rig) -> None:
    """The engine samples with the training weights: awake while nothing trains, and woken by the synchronizer."""
    assert rig.megatron_kv_cache is not None
    rig.policy.infer()
    rig.megatron_kv_cache.free()  # finish_generation(release_gpu=True)
    rig.policy.call("prepare_for_lp_inference")
    rig.policy.infer()
    rig.policy.infer_reference()
    rig.policy.call("prepare_for_training")
    rig.policy.train()
    rig.policy.call("offload_before_refit")
    rig.megatron_kv_cache.make()  # prepare_for_generation(tags=["colocated_refit"]): parameters are there


def _ppo_epochs(rig: Rig) -> None:
    assert rig.value is not None
    for epoch in range(PPO_EPOCHS):
        rig.value.call("prepare_for_training")
        rig.value.train()
        rig.value.call("finish_training")
        rig.policy.call("prepare_for_training")
        rig.policy.train()
        if epoch + 1 < PPO_EPOCHS:
            rig.policy.call("offload_to_cpu")


def _values_and_logprobs(rig: Rig) -> None:
    assert rig.value is not None
    rig.value.call("prepare_for_inference")
    rig.value.infer()
    rig.value.call("finish_inference")
    rig.policy.call("prepare_for_lp_inference")
    rig.policy.infer()
    rig.policy.call("finish_inference")


def _ppo(rig: Rig) -> None:
    assert rig.value is not None
    rig.value.call("finish_training")
    rig.policy.call("prepare_for_lp_inference")
    _refit(rig)
    _rollout(rig)
    _values_and_logprobs(rig)
    _ppo_epochs(rig)


def _ppo_async(rig: Rig) -> None:
    _values_and_logprobs(rig)
    _ppo_epochs(rig)
    rig.policy.infer()
    rig.policy.call("offload_to_cpu")


def _train(rig: Rig) -> None:
    """SFT and RM: prepared once, before the loop."""
    rig.policy.train()


def _dpo(rig: Rig) -> None:
    rig.policy.infer_reference()
    rig.policy.train()


LOOPS: Mapping[str, Callable[[Rig], None]] = {
    "grpo": _grpo,
    "grpo-nokl": _grpo_nokl,
    "grpo-async": _grpo_async,
    "grpo-async-megatron": _grpo_async_megatron,
    "grpo-sync": _grpo,  # the same calls, from two processes
    "ppo": _ppo,
    "ppo-grouped": _ppo,  # what it is compared with
    "ppo-async": _ppo_async,
    "sft": _train,
    "dpo": _dpo,
    "rm": _train,
}

START: Mapping[str, tuple[str, ...]] = {
    # What a loop calls on its policy before the first step; the colocated ones begin with a refit.
    "grpo-async-megatron": ("offload_before_refit",),
    "ppo": ("offload_to_cpu",),
    "ppo-grouped": ("offload_to_cpu",),
    "ppo-async": ("offload_to_cpu",),
    **dict.fromkeys(("sft", "dpo", "rm"), ("prepare_for_training",)),
}
