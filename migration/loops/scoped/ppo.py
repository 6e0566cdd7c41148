"""PPO by hand: policy, critic and engine take turns on the same device; the policy waits while the critic warms up."""

from __future__ import annotations

from typing import Any
from rl_session.adapters.nemo_rl import scopes, share

from ..support import Checkpointer, Config, Timer, make_train_data, prompts_of, rollout, step_returns
from .grpo import refit_policy_generation, validate


def setup(policy: Any, value_model: Any, policy_generation: Any, config: Config) -> None:
    """Leave the device to the engine, and tell it what it will be given."""
    share(policy, value_model, only_colocated=True)
    scopes(value_model).offload()
    with scopes(policy).refit_mode():
        info = policy.prepare_refit_info()
    policy_generation.prepare_refit_info(info)
    if config.colocated:
        scopes(policy).offload()


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

    share(policy, value_model, policy_generation, only_colocated=True)
    if config.val_at_start:
        if NEED_REFIT and POLICY_GENERATION_STALE:
            refit_policy_generation(policy, policy_generation, colocated_inference)
            if not colocated_inference:
                scopes(policy).offload()
            POLICY_GENERATION_STALE = False
        with scopes(policy_generation).awake():
            history.append({"validation": validate(policy_generation, config, 0)})

    for step in range(config.num_steps):
        batch = prompts_of(step, config.num_prompts)

        with timer.time("prepare_for_generation/total"):
            if NEED_REFIT and POLICY_GENERATION_STALE:
                # The critic must be away, and the policy in, before the weights are pushed.
                refit_policy_generation(policy, policy_generation, colocated_inference, timer=timer)
                if not colocated_inference:
                    with timer.time("policy_offload_after_refit"):
                        scopes(policy).offload()
                POLICY_GENERATION_STALE = False
            else:
                if colocated_inference:
                    scopes(policy).offload()

        with timer.time("generation"):
            with scopes(policy_generation).awake():
                samples = rollout(policy_generation, batch)

        train_data = make_train_data(samples)
        history.append({"reward": samples["rewards"].tolist()})

        with timer.time("value_inference"):
            with scopes(value_model).inference_mode():
                values = value_model.get_values(train_data)
            train_data["values"] = values["values"]

        with timer.time("logprob_inference_prep"):
            pass

        with timer.time("policy_and_reference_logprobs"):
            with scopes(policy).logprob_mode():
                train_data["prev_logprobs"] = policy.get_logprobs(train_data, timer=timer)["logprobs"]
            if not config.skip_reference_logprobs:
                with scopes(policy).logprob_mode():
                    train_data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(
                        train_data,
                    )["reference_logprobs"]
            scopes(policy).offload()

        advantages, returns = step_returns(samples["rewards"], train_data["values"], train_data["token_mask"])
        train_data["advantages"], train_data["returns"] = advantages, returns

        train_results = None
        for epoch in range(config.ppo_epochs):
            with timer.time("value_training_prep"):
                pass
            with timer.time("value_training"):
                with scopes(value_model).training_mode():
                    value_results = value_model.train(train_data, value_loss_fn, timer=timer)
                scopes(value_model).offload()

            if step >= config.policy_training_start_step:
                with timer.time("training_prep"):
                    POLICY_GENERATION_STALE = True
                with timer.time("policy_training"):
                    with scopes(policy).training_mode():
                        train_results = policy.train(train_data, loss_fn, timer=timer)
                if epoch + 1 < config.ppo_epochs:
                    scopes(policy).offload()  # the critic's next epoch needs the room

        history.append({"value_loss": value_results["loss"].tolist()})
        if train_results is not None:
            history.append({"loss": train_results["loss"].tolist()})

        if config.val_period > 0 and (step + 1) % config.val_period == 0:
            if NEED_REFIT and POLICY_GENERATION_STALE:
                refit_policy_generation(policy, policy_generation, colocated_inference)
                if not colocated_inference:
                    scopes(policy).offload()
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
                        weights_path=str(path / "policy_weights"),
                        # Before its first update the policy has no optimizer state to save.
                        optimizer_path=(
                            str(path / "policy_optimizer") if step >= config.policy_training_start_step else None
                        ),
                    )

                with scopes(value_model).training_mode():
                    value_model.save_checkpoint(
                        weights_path=str(path / "value_weights"),
                        optimizer_path=str(path / "value_optimizer"),
                    )
                scopes(value_model).offload()
                checkpointer.finish(path, wait_fn=policy.finalize_async_save)
    return history
