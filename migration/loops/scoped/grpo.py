"""GRPO by hand: rollouts, log-probabilities, one update, validation, checkpoints; dynamic sampling may ask for more rollouts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from rl_session.adapters.nemo_rl import scopes, share

from ..support import Checkpointer, Config, Timer, group_advantages, make_train_data, prompts_of, push_weights, rollout


def refit_policy_generation(
    policy: Any,
    policy_generation: Any,
    colocated_inference: bool,
    timer: Timer | None = None,
) -> dict[str, float]:
    """Push the weights of the policy to the engine."""
    synchronizer = getattr(policy_generation, "weight_synchronizer", None)
    if synchronizer is not None:
        with scopes(policy).legacy_refit(policy_generation):
            return synchronizer.sync_weights(timer=timer) or {}

    # Without a timer there is nothing to time.
    with scopes(policy).refit(policy_generation):
        timer_context = timer.time("prepare_for_generation/transfer") if timer is not None else nullcontext()
        with timer_context:
            if not push_weights(policy, policy_generation):
                raise RuntimeError("the engine did not take the weights\nsee the log of its workers")

    return {}


def validate(policy_generation: Any, config: Config, step: int) -> dict[str, float]:
    """The mean reward on held-out prompts."""
    samples = rollout(policy_generation, prompts_of(1000 + step, config.num_prompts))
    return {"reward": float(samples["rewards"].mean())}


def grpo_train(
    policy: Any,
    policy_generation: Any,
    loss_fn: Any,
    config: Config,
    checkpointer: Checkpointer,
    timer: Timer,
) -> list[dict[str, Any]]:
    """Train, and return what each step measured."""
    history: list[dict[str, Any]] = []
    colocated_inference = config.colocated
    POLICY_GENERATION_STALE = True  # the engine has not seen the policy's weights yet

    share(policy, policy_generation, only_colocated=True)

    # A first validation, to know where we start.
    if config.val_at_start:
        if POLICY_GENERATION_STALE:
            refit_policy_generation(policy, policy_generation, colocated_inference)
            POLICY_GENERATION_STALE = False
        with scopes(policy_generation).awake():
            val_metrics = validate(policy_generation, config, 0)
        history.append({"validation": val_metrics})
        if config.stop_at_validation is not None and val_metrics["reward"] >= config.stop_at_validation:
            print("the first validation is good enough")
            return history

    step, num_gen_batches, cache = 0, 0, []
    while step < config.num_steps:
        with timer.time("total_step_time"):
            batch = prompts_of(step + 100 * num_gen_batches, config.num_prompts)

            with timer.time("prepare_for_generation/total"):
                if POLICY_GENERATION_STALE:
                    if config.calibrate:
                        with scopes(policy).logprob_mode():
                            policy.calibrate_qkv_fp8_scales(batch, include_q=True)
                    refit_policy_generation(
                        policy,
                        policy_generation,
                        colocated_inference,
                        timer=timer,
                    )
                    POLICY_GENERATION_STALE = False
                else:
                    if colocated_inference:
                        scopes(policy).offload()  # the optimizer too: make room for the engine

            num_gen_batches += 1
            with timer.time("generation"):
                with scopes(policy_generation).awake():
                    samples = rollout(policy_generation, batch)
                history.append({"reward": samples["rewards"].tolist()})

            with timer.time("reward_calculation"):
                cache.append(samples)
                # A batch in which every answer earned the same teaches nothing: sample again.
                if config.use_dynamic_sampling and num_gen_batches < config.max_gen_batches:
                    continue
                advantages = group_advantages(samples["rewards"])
                num_gen_batches, cache = 0, []

            with timer.time("data_processing"):
                train_data = make_train_data(samples)

            skip_prev, skip_ref = config.skip_prev_logprobs, config.skip_reference_logprobs
            if not (skip_prev and skip_ref):
                print("preparing for logprob inference")
                with timer.time("logprob_inference_prep"):
                    pass

            with timer.time("policy_and_reference_logprobs"):
                if not skip_prev:
                    with scopes(policy).logprob_mode():
                        train_data["prev_logprobs"] = policy.get_logprobs(train_data, timer=timer)["logprobs"]
                else:
                    train_data["prev_logprobs"] = torch.zeros_like(train_data["generation_logprobs"])
                if not skip_ref:
                    with scopes(policy).logprob_mode():
                        train_data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(
                            train_data,
                        )["reference_logprobs"]
                else:
                    train_data["reference_policy_logprobs"] = torch.zeros_like(train_data["prev_logprobs"])

            with timer.time("advantage_calculation"):
                train_data["advantages"] = advantages[:, None] * train_data["token_mask"]

            with timer.time("training_prep"):
                # train mode, and the optimizer back on the device
                POLICY_GENERATION_STALE = True

            with timer.time("policy_training"):
                with scopes(policy).training_mode():
                    results = policy.train(
                        train_data,
                        loss_fn,
                        timer=timer,
                    )

            if config.calibrate:
                with timer.time("recompute_kv_scales"):
                    with scopes(policy).logprob_mode(keep_train_buffers=True):
                        policy.calibrate_qkv_fp8_scales(train_data, include_q=True)
                    POLICY_GENERATION_STALE = True

            history.append({"loss": results["loss"].tolist(), "grad_norm": results["grad_norm"].tolist()})

            if config.val_period > 0 and (step + 1) % config.val_period == 0:
                if POLICY_GENERATION_STALE:
                    refit_policy_generation(policy, policy_generation, colocated_inference)
                    POLICY_GENERATION_STALE = False
                else:
                    if colocated_inference:
                        scopes(policy).offload()
                with scopes(policy_generation).awake():
                    history.append({"validation": validate(policy_generation, config, step + 1)})

            if (step + 1) % config.save_period == 0:
                with timer.time("checkpointing"):
                    path = checkpointer.begin(step + 1)
                    with scopes(policy).training_mode():
                        policy.save_checkpoint(
                            weights_path=str(path / "weights"),
                            optimizer_path=str(path / "optimizer"),
                        )
                    checkpointer.finish(path, wait_fn=policy.finalize_async_save)
        step += 1
    return history
