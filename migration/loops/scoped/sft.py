"""Supervised fine-tuning by hand: prepared once before the loop, and again at the end of a validation that the loop relies on."""

from __future__ import annotations

from typing import Any

import torch
from rl_session.adapters.nemo_rl import scopes, share

from ..support import Checkpointer, Config, Timer, prompts_of


def sentences_of(step: int, config: Config) -> dict[str, torch.Tensor]:
    """Sentences of a step, every token but the first counting."""
    data = prompts_of(step, config.num_prompts)
    mask = torch.ones(data["input_ids"].shape)
    return {**data, "token_mask": mask, "sample_mask": torch.ones(config.num_prompts)}


def validate(policy: Any, loss_fn: Any, config: Config, step: int, timer: Timer) -> dict[str, float]:
    """The mean loss on held-out sentences."""
    with timer.time("total_validation_time"):
        losses = []
        for number in range(3):
            with scopes(policy).training_mode():
                results = policy.train(
                    sentences_of(1000 + step + number, config),
                    loss_fn,
                    eval_mode=True,
                )
            losses.append(float(results["loss"].mean()))
            if number >= config.max_gen_batches - 1:
                break

        # What follows trains on.
    return {"val_loss": sum(losses) / len(losses)}


def sft_train(
    policy: Any, loss_fn: Any, config: Config, checkpointer: Checkpointer, timer: Timer
) -> list[dict[str, Any]]:
    """Train, and return what each step measured."""
    history: list[dict[str, Any]] = []
    share(policy, only_colocated=True)
    if config.val_at_start:
        history.append({"validation": validate(policy, loss_fn, config, 0, timer)})

    for step in range(config.num_steps):
        with timer.time("total_step_time"):
            with timer.time("data_processing"):
                train_data = sentences_of(step, config)

            print("taking a training step")
            with timer.time("policy_training"):
                with scopes(policy).training_mode():
                    results = policy.train(train_data, loss_fn)
            history.append({"loss": results["loss"].tolist()})

            if config.val_period > 0 and (step + 1) % config.val_period == 0:
                history.append({"validation": validate(policy, loss_fn, config, step + 1, timer)})

            if (step + 1) % config.save_period == 0:
                with timer.time("checkpointing"):
                    path = checkpointer.begin(step + 1)
                    with scopes(policy).training_mode():
                        policy.save_checkpoint(
                            weights_path=str(path / "weights"),
                            optimizer_path=str(path / "optimizer"),
                        )
                    checkpointer.finish(path, wait_fn=policy.finalize_async_save)
    return history
