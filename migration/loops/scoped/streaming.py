"""A step that stays open: chunks arrive one by one, and log-probabilities of a chunk are computed between its neighbours' gradients.

The engine has its own devices. Blocking calls are made from a thread, so that the event loop can serve rollouts meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from rl_session.adapters.nemo_rl import scopes, share

from ..support import Checkpointer, Config, Timer, prompts_of


def chunk_of(step: int, number: int, config: Config) -> dict[str, torch.Tensor]:
    """One chunk of a step."""
    data = prompts_of(10 * step + number, config.num_prompts)
    mask = torch.ones(data["input_ids"].shape)
    return {
        **data,
        "token_mask": mask,
        "sample_mask": torch.ones(config.num_prompts),
        "advantages": mask * (1 + number),
    }


async def train_one_step(policy: Any, loss_fn: Any, config: Config, step: int, timer: Timer) -> dict[str, Any]:
    """One optimizer step over chunks."""
    is_open = False
    for number in range(config.max_gen_batches):
        chunk = chunk_of(step, number, config)
        with timer.time("logprobs"):
            # rl-session: kept: a train step stays open here between calls
            await asyncio.to_thread(policy.prepare_for_lp_inference, keep_train_buffers=is_open)
            logprobs = await asyncio.to_thread(policy.get_logprobs, chunk)
            chunk["prev_logprobs"] = logprobs["logprobs"]
        with timer.time("training"):
            # rl-session: kept: a train step stays open here between calls
            await asyncio.to_thread(policy.prepare_for_training)
            scopes(policy).forget()
            if not is_open:
                await asyncio.to_thread(policy.begin_train_step, loss_fn)
                is_open = True
            await asyncio.to_thread(policy.train_microbatches_from_meta, chunk)
    results: dict[str, Any] = await asyncio.to_thread(policy.finish_train_step)
    return results


async def streaming_train(
    policy: Any, loss_fn: Any, config: Config, checkpointer: Checkpointer, timer: Timer
) -> list[dict[str, Any]]:
    """Train, and return what each step measured."""
    history: list[dict[str, Any]] = []
    share(policy, only_colocated=True)
    for step in range(config.num_steps):
        results = await train_one_step(policy, loss_fn, config, step, timer)
        history.append({"loss": results["loss"].tolist()})
        if (step + 1) % config.save_period == 0:
            path = checkpointer.begin(step + 1)
            with scopes(policy).training_mode():
                policy.save_checkpoint(weights_path=str(path / "weights"), optimizer_path=str(path / "optimizer"))
            checkpointer.finish(path, wait_fn=policy.finalize_async_save)
    return history
