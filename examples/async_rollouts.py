"""Asynchronous rollouts: an engine of its own keeps sampling while the policy trains, one weight version behind.

A collector task samples with a second copy of the model, which has a device of its own; the trainer takes batches from a
queue, trains in `async with policy.training_mode()`, and publishes its weights now and then. Blocking calls run in threads
(`asyncio.to_thread`), so the event loop never waits for a matrix. The numbers say how old the weights behind each batch were.

    python examples/async_rollouts.py               some seconds on a CPU
    python examples/async_rollouts.py --steps 4     a smoke run

Shapes: B sequences, S tokens each, V vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import rl_session as rs
from rl_session.testing import EmulatedDevice

VOCABULARY, WANTED, PROMPT, NEW = 32, 7, 4, 8
NUM_SAMPLES, LR = 32, 2e-3

Batch = dict[str, Tensor]


def build_model() -> LlamaForCausalLM:
    """A Llama small enough for one core."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def reinforce_loss(logits: Tensor, batch: Any, seqs: float, tokens: float) -> tuple[Tensor, dict[str, Any]]:
    """Policy gradient with the batch's mean as baseline, corrected for the age of the weights that sampled."""
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    mask = batch["token_mask"][:, 1:]
    ratio = (logprobs - batch["generation_logprobs"][:, 1:]).exp().clamp(max=2.0).detach()
    loss = -(ratio * logprobs * batch["advantages"][:, None] * mask).sum() / tokens
    return loss, {}


class Sampler:
    """The engine's side: a copy of the model on a device of its own, and the version of its weights."""

    def __init__(self, session: rs.Session, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.policy = session.attach(self.model, name="sampler", base="resident", device=EmulatedDevice())
        self.engine = rs.InProcessEngine(self.policy, name="sampler", max_new_tokens=NEW, seed=0)
        self.version = 0
        self.lock = asyncio.Lock()

    async def sample(self) -> tuple[Batch, float, int]:
        """One batch, its mean reward, and the version of the weights that made it."""
        prompts = {
            "input_ids": torch.randint(0, VOCABULARY, (NUM_SAMPLES, PROMPT)),
            "input_lengths": torch.full((NUM_SAMPLES,), PROMPT),
        }
        async with self.lock, self.policy.generation_mode():
            out, version = await asyncio.to_thread(self.engine.generate, prompts), self.version
        ids_BS = out["output_ids"]
        mask_BS = torch.zeros(ids_BS.shape)
        mask_BS[:, PROMPT:] = 1
        rewards_B = ((ids_BS == WANTED) * mask_BS).sum(1) / NEW
        batch = {
            "input_ids": ids_BS,
            "input_lengths": out["unpadded_sequence_lengths"],
            "token_mask": mask_BS,
            "generation_logprobs": out["logprobs"],
            "advantages": rewards_B - rewards_B.mean(),
        }
        return batch, rewards_B.mean().item(), version

    async def take(self, weights: dict[str, Tensor]) -> None:
        """Serve new weights from the next batch on."""
        async with self.lock:
            await asyncio.to_thread(self.model.load_state_dict, weights)
            self.version += 1


async def collect(sampler: Sampler, queue: asyncio.Queue[tuple[Batch, float, int]]) -> None:
    """Sample for ever; the queue's size bounds how far the samples may lag."""
    while True:
        await queue.put(await sampler.sample())


async def train(
    session: rs.Session, policy: rs.Policy, sampler: Sampler, steps: int, publish_every: int, progress: Progress
) -> tuple[list[float], list[int]]:
    """Train on what the collector brings; returns the rewards, and the age of the weights behind each batch."""
    queue: asyncio.Queue[tuple[Batch, float, int]] = asyncio.Queue(maxsize=1)
    collector = asyncio.create_task(collect(sampler, queue))
    rewards, ages = [], []
    task = progress.add_task("training", total=steps)
    try:
        for step in range(steps):
            batch, reward, version = await queue.get()
            rewards.append(reward)
            ages.append(step // publish_every - version)
            with session.step(step):
                async with policy.training_mode():
                    await asyncio.to_thread(policy.train, batch, reinforce_loss)
            if (step + 1) % publish_every == 0:
                await sampler.take(await asyncio.to_thread(policy.state_dict))  # from the host copies: nothing moves
            progress.update(task, advance=1, description=f"reward {reward:.2f}")
    finally:
        collector.cancel()
        await asyncio.gather(collector, return_exceptions=True)
    return rewards, ages


def main(argv: list[str] | None = None) -> list[float]:
    """Run; returns the reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps (default 60)")
    parser.add_argument("--publish-every", type=int, default=2, help="steps between two weight versions (default 2)")
    parser.add_argument("--log", type=Path, default=Path("runs/async.jsonl"), help="the audit log")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.publish_every < 1:
        parser.error("--steps and --publish-every must be at least 1")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    model = build_model()
    with rs.Session(arguments.log) as session, Progress(console=console) as progress:
        policy = session.attach(model, torch.optim.AdamW(model.parameters(), lr=LR), name="actor", max_grad_norm=1.0)
        sampler = Sampler(session, model)
        job = train(session, policy, sampler, arguments.steps, arguments.publish_every, progress)
        rewards, ages = asyncio.run(job)
    table = Table(title="Asynchronous rollouts", show_header=False, min_width=60)
    table.add_row("reward of the first and the last step", f"{rewards[0]:.3f}, {rewards[-1]:.3f}")
    table.add_row("weight versions published", str(sampler.version))
    table.add_row("age of the weights behind a batch", f"{min(ages)} to {max(ages)} versions")
    table.add_row("log", str(arguments.log))
    console.print(table)
    return rewards


if __name__ == "__main__":
    main()
