"""What a reader of the documentation has at hand when a block begins: a model, a policy, a batch, a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rl_session as rs

VOCABULARY = 13


class LM(nn.Module):
    """Logits ``[b, S, V]`` from ``input_ids [b, S]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        logits: Tensor = self.head(self.embed(input_ids))
        return logits


class Critic(nn.Module):
    """Values ``[b, S, 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        values: Tensor = self.head(self.embed(input_ids))
        return values


def loss_fn(
    logits: Tensor, batch: Any, global_valid_seqs: Any, global_valid_tokens: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Next-token loss."""
    shift = logits[:, :-1].transpose(1, 2)
    nll = nn.functional.cross_entropy(shift, batch["input_ids"][:, 1:], reduction="none")
    loss = nll.sum() / global_valid_tokens
    return loss, {"nll": loss.detach()}


def value_loss(
    values: Tensor, batch: Any, global_valid_seqs: Any, global_valid_tokens: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Squared error against zeros."""
    loss = values.square().sum() / global_valid_tokens
    return loss, {}


def make_batch(rows: int = 4) -> dict[str, Tensor]:
    """A batch of ``rows`` sequences of 6."""
    return {
        "input_ids": torch.randint(0, VOCABULARY, (rows, 6)),
        "input_lengths": torch.full((rows,), 6),
        "token_mask": torch.ones(rows, 6),
        "sample_mask": torch.ones(rows),
    }


def world(folder: Path) -> dict[str, Any]:
    """Names to what stands for them. ``session`` is to be closed afterwards.

    Args:
        folder: Where the log goes.
    """
    session = rs.Session(folder / "world.jsonl", verify="checksum")
    model, critic = LM(), Critic()
    optimizer = torch.optim.AdamW(model.parameters())
    policy = session.attach(model, optimizer, name="actor", reference="copy")
    value = session.attach_value(critic, torch.optim.AdamW(critic.parameters()), name="critic")
    engine = rs.InProcessEngine(policy, max_new_tokens=4)
    batch = make_batch()
    prompts = {"input_ids": batch["input_ids"][:, :3], "input_lengths": torch.full((4,), 3)}
    loaded = LM()
    return {
        "rs": rs,
        "torch": torch,
        "LM": LM,
        "Critic": Critic,
        "session": session,
        "model": loaded,
        "optimizer": torch.optim.AdamW(loaded.parameters()),
        "policy": policy,
        "value": value,
        "engine": engine,
        "batch": batch,
        "prompts": prompts,
        "loader": [prompts],
        "eos": 1,
        "loss_fn": loss_fn,
        "value_loss": value_loss,
        "score": lambda rollouts: {**make_batch(4), "rewards": torch.ones(4)},
    }
