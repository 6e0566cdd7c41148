"""DPO by hand: reference log-probabilities come from a generator that drives the loop, while the policy is ready to train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from rl_session.adapters.nemo_rl import scopes, share

from ..support import Checkpointer, Config, Timer, prompts_of


def pairs_of(step: int, config: Config) -> dict[str, torch.Tensor]:
    """Pairs of a step: even rows are preferred to the odd rows after them."""
    data = prompts_of(step, config.num_prompts)
    mask = torch.ones(data["input_ids"].shape)
    return {**data, "token_mask": mask, "sample_mask": torch.ones(config.num_prompts)}


def add_ref_logprobs_to_data(
    batches: Iterable[dict[str, torch.Tensor]], policy: Any, config: Config
) -> Iterator[dict[str, torch.Tensor]]:
    """Every batch with the reference's log-probabilities of it."""
    for batch in batches:
        with scopes(policy).logprob_mode(keep_train_buffers=True):
            logprobs = policy.get_reference_policy_logprobs(
                batch,
                micro_batch_size=config.micro_batch_size * 2,
            )["reference_logprobs"]
        batch["reference_policy_logprobs"] = torch.roll(logprobs, -1, dims=-1)
        yield batch


def validate_one_dataset(policy: Any, loss_fn: Any, config: Config, step: int, timer: Timer) -> dict[str, float]:
    """The mean loss on held-out pairs."""
    with timer.time("total_validation_time"):
        losses = []
        held_out = (pairs_of(1000 + step + number, config) for number in range(2))
        for batch in add_ref_logprobs_to_data(held_out, policy, config):
            with scopes(policy).training_mode():
                results = policy.train(batch, loss_fn, eval_mode=True)
            losses.append(float(results["loss"].mean()))
    return {"val_loss": sum(losses) / len(losses)}


def dpo_train(
    policy: Any, loss_fn: Any, config: Config, checkpointer: Checkpointer, timer: Timer
) -> list[dict[str, Any]]:
    """Train, and return what each step measured."""
    history: list[dict[str, Any]] = []
    share(policy, only_colocated=True)
    if config.val_at_start:
        history.append({"validation": validate_one_dataset(policy, loss_fn, config, 0, timer)})

    batches = (pairs_of(step, config) for step in range(config.num_steps))
    for step, batch in enumerate(add_ref_logprobs_to_data(batches, policy, config)):
        with timer.time("policy_training"):
            with scopes(policy).training_mode():
                results = policy.train(batch, loss_fn)
        history.append({"loss": results["loss"].tolist()})

        if config.val_period > 0 and (step + 1) % config.val_period == 0:
            val_metrics = validate_one_dataset(policy, loss_fn, config, step + 1, timer)
            history.append({"validation": val_metrics})

        if (step + 1) % config.save_period == 0:
            path = checkpointer.begin(step + 1)
            with scopes(policy).training_mode():
                policy.save_checkpoint(
                    weights_path=str(path / "weights"),
                    optimizer_path=str(path / "optimizer"),
                )
            checkpointer.finish(path, wait_fn=policy.finalize_async_save)
    return history
