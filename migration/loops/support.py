"""What the loops lean on and the codemod leaves alone: timing, checkpoints, configuration, batches, rollouts.

Knows a tenant only where it samples from an engine or pushes weights to one; it makes no lifecycle call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Checkpointer",
    "Config",
    "Timer",
    "group_advantages",
    "make_train_data",
    "prompts_of",
    "push_weights",
    "rollout",
    "step_returns",
]


class Config:
    """The settings of a run; every loop reads some of them.

    Args:
        **settings: Those that differ from the defaults below.

    Raises:
        AttributeError: There is no such setting.
    """

    num_steps = 3
    num_prompts = 4
    max_gen_batches = 3
    micro_batch_size = 2
    val_period = 2
    val_at_start = True
    save_period = 2
    colocated = True
    skip_prev_logprobs = False
    skip_reference_logprobs = False
    calibrate = False
    use_dynamic_sampling = False
    ppo_epochs = 2
    policy_training_start_step = 0
    stop_at_validation = None

    def __init__(self, **settings: Any) -> None:
        for name, value in settings.items():
            getattr(self, name)
            setattr(self, name, value)


class Timer:
    """Which blocks were timed, in order.

    Attributes:
        keys: The key of every block that was entered.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []

    @contextlib.contextmanager
    def time(self, key: str) -> Iterator[None]:
        """A timed block."""
        self.keys.append(key)
        yield


class Checkpointer:
    """Checkpoint folders, written under a temporary name and renamed when every writer has finished.

    Args:
        folder: Where they go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.saved: list[str] = []

    def begin(self, step: int) -> Path:
        """A fresh folder for the checkpoint of a step."""
        path = self._folder / f"tmp_step_{step}"
        path.mkdir(parents=True)
        return path

    def finish(self, path: Path, wait_fn: Callable[[], None] | None = None) -> None:
        """Wait for the writers, and give the folder its name."""
        if wait_fn is not None:
            wait_fn()
        self.saved.append(path.name.removeprefix("tmp_"))
        path.rename(self._folder / self.saved[-1])


def prompts_of(step: int, num_prompts: int) -> dict[str, torch.Tensor]:
    """Prompts of a step: ``input_ids [B, 3]`` and ``input_lengths [B]``, the same for every run."""
    start = torch.arange(num_prompts)[:, None] + step
    return {
        "input_ids": (start * 7 + torch.arange(3)) % 6 + 1,
        "input_lengths": torch.full((num_prompts,), 3),
    }


def rollout(policy_generation: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sample one answer to each prompt.

    Returns:
        ``input_ids [B, S]``, ``input_lengths [B]``, ``generation_logprobs [B, S]`` and ``rewards [B]``.
    """
    samples = policy_generation.generate(batch)
    ids = samples["output_ids"]
    lengths = samples["unpadded_sequence_lengths"]
    rewards = (ids.sum(dim=1) % 5).float() / 4
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "generation_logprobs": samples["logprobs"],
        "rewards": rewards,
        "prompt_lengths": batch["input_lengths"],
    }


def make_train_data(samples: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A training batch of rollouts: what was generated counts, the prompt does not."""
    position = torch.arange(samples["input_ids"].shape[1])[None, :]
    generated = (position >= samples["prompt_lengths"][:, None]) & (position < samples["input_lengths"][:, None])
    return {
        "input_ids": samples["input_ids"],
        "input_lengths": samples["input_lengths"],
        "token_mask": generated.float(),
        "sample_mask": torch.ones(len(position) * samples["input_ids"].shape[0]),
        "generation_logprobs": samples["generation_logprobs"],
    }


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards against their mean, in units of their spread. ``[B] -> [B]``."""
    return (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)


def step_returns(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of a reward at the end. ``[B], [B, S], [B, S] -> [B, S], [B, S]``."""
    returns = rewards[:, None] * mask
    return (returns - values) * mask, returns


def push_weights(policy: Any, policy_generation: Any) -> bool:
    """Stream the weights of the policy to the engine, and wait for both sides together.

    Returns:
        Whether every receiver has them.
    """
    nbytes = int(policy.get_free_memory_bytes() * 0.3)
    sent = policy.stream_weights_via_ipc_zmq(buffer_size_bytes=nbytes)
    received = policy_generation.update_weights_via_ipc_zmq()
    for future in sent:
        future.result()
    return all(future.result() for future in received)
