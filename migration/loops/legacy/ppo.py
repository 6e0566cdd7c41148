"""PPO by hand: policy, critic and engine take turns on the same device; the policy waits while the critic warms up."""

from __future__ import annotations

from typing import Any

from ..support import Checkpointer, Config, Timer, make_train_data, prompts_of, rollout, step_returns
from .grpo import refit_policy_generation, validate


def setup(policy: Any, value_model: Any, policy_generation: Any, config: Config) -> None:
    """Leave the device to the engine, and tell it what it will be given."""
    policy.offload_to_cpu()
    value_model.finish_training()
    policy.prepare_for_training()
    info = policy.prepare_refit_info()
    policy_generation.prepare_refit_info(info)
    if config.colocated:
        policy.offload_to_cpu()


def ppo_train(
    policy: Any,
    value_model: Any,
    policy_generation: Any,
    loss_fn: Any,
    value_loss_fn: Any,
    config: Config,
    checkpointer: Checkpointer,
    timer: Timer,
) -> list[dict[str, Any]]:
    """Train, and return what each step measured."""
    history: list[dict[str, Any]] = []
    NEED_REFIT = True
    # An engine may be missing: then the policy generates by itself.
    if policy_generation is None:
        policy_generation = policy
        NEED_REFIT = False
    POLICY_GENERATION_STALE = True
    colocated_inference = config.colocated

    if config.val_at_start:
        if NEED_REFIT and POLICY_GENERATION_STALE:
            policy.prepare_for_lp_inference()
            refit_policy_generation(policy, policy_generation, colocated_inference)
            if not colocated_inference:
                policy.offload_to_cpu()
            POLICY_GENERATION_STALE = False
        else:
            policy_generation.prepare_for_generation()
        history.append({"validation": validate(policy_generation, config, 0)})
        policy_generation.finish_generation()

    for step in range(config.num_steps):
        batch = prompts_of(step, config.num_prompts)

        with timer.time("prepare_for_generation/total"):
            if NEED_REFIT and POLICY_GENERATION_STALE:
                # The critic must be away, and the policy in, before the weights are pushed.
                value_model.finish_training()
                policy.prepare_for_lp_inference()
                refit_policy_generation(policy, policy_generation, colocated_inference, timer=timer)
                if not colocated_inference:
                    with timer.time("policy_offload_after_refit"):
                        policy.offload_to_cpu()
                POLICY_GENERATION_STALE = False
            else:
                if colocated_inference:
                    policy.offload_to_cpu()
                policy_generation.prepare_for_generation()

        with timer.time("generation"):
            samples = rollout(policy_generation, batch)
            policy_generation.finish_generation()

        train_data = make_train_data(samples)
        history.append({"reward": samples["rewards"].tolist()})

        with timer.time("value_inference"):
            value_model.prepare_for_inference()
            values = value_model.get_values(train_data)
            train_data["values"] = values["values"]
            value_model.finish_inference()

        with timer.time("logprob_inference_prep"):
            policy.prepare_for_lp_inference()

        with timer.time("policy_and_reference_logprobs"):
            train_data["prev_logprobs"] = policy.get_logprobs(train_data, timer=timer)["logprobs"]
            if not config.skip_reference_logprobs:
                train_data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(
                    train_data,
                )["reference_logprobs"]
            policy.finish_inference()

        advantages, returns = step_returns(samples["rewards"], train_data["values"], train_data["token_mask"])
        train_data["advantages"], train_data["returns"] = advantages, returns

        train_results = None
        for epoch in range(config.ppo_epochs):
            with timer.time("value_training_prep"):
                value_model.prepare_for_training()
            with timer.time("value_training"):
                value_results = value_model.train(train_data, value_loss_fn, timer=timer)
                value_model.finish_training()

            if step >= config.policy_training_start_step:
                with timer.time("training_prep"):
                    policy.prepare_for_training()
                    POLICY_GENERATION_STALE = True
                with timer.time("policy_training"):
                    train_results = policy.train(train_data, loss_fn, timer=timer)
                if epoch + 1 < config.ppo_epochs:
                    policy.offload_to_cpu()  # the critic's next epoch needs the room

        history.append({"value_loss": value_results["loss"].tolist()})
        if train_results is not None:
            history.append({"loss": train_results["loss"].tolist()})

        if config.val_period > 0 and (step + 1) % config.val_period == 0:
            if NEED_REFIT and POLICY_GENERATION_STALE:
                refit_policy_generation(policy, policy_generation, colocated_inference)
                if not colocated_inference:
                    policy.offload_to_cpu()
                POLICY_GENERATION_STALE = False
            else:
                if colocated_inference:
                    policy.offload_to_cpu()
                policy_generation.prepare_for_generation()
            history.append({"validation": validate(policy_generation, config, step + 1)})
            policy_generation.finish_generation()

        if (step + 1) % config.save_period == 0:
            with timer.time("checkpointing"):
                path = checkpointer.begin(step + 1)
                policy.prepare_for_training()
                policy.save_checkpoint(
                    weights_path=str(path / "policy_weights"),
                    # Before its first update the policy has no optimizer state to save.
                    optimizer_path=(
                        str(path / "policy_optimizer") if step >= config.policy_training_start_step else None
                    ),
                )
                policy.offload_to_cpu()

                value_model.prepare_for_training()
                value_model.save_checkpoint(
                    weights_path=str(path / "value_weights"),
                    optimizer_path=str(path / "value_optimizer"),
                )
                value_model.finish_training()
                checkpointer.finish(path, wait_fn=policy.finalize_async_save)
    return history
