"""The same training twice: once behind the library, once in plain torch with nothing around it.

A twin is what the bytes must be. It does what a user of the library does, with torch alone, in the same order, so that the
two can be compared bit for bit. Knows nothing of modes and placements.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 11, 6


class Net(nn.Module):
    """Logits ``[b, S, V]``; a tied head, a frozen layer, a buffer that training writes and one that is not saved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scale", torch.full((WIDTH,), 1.5), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.training:
            self.seen += 1.0
        logits: Tensor = self.head(torch.tanh(self.mix(self.frozen(self.embed(input_ids)) * self.scale)))
        return logits


class Fragile(torch.optim.AdamW):
    """An optimizer that fails half-way through its step when told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError("injected: half of a step")
        return super().step(closure)


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """One of the optimizers whose state differs in kind."""
    params = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    if kind == "fused":
        return torch.optim.AdamW(params, lr=0.01, fused=True)
    return Fragile(params, lr=0.01)


def make_batch(seed: int) -> dict[str, Tensor]:
    """Three sequences of at most four tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (3, 4), generator=generator),
        "input_lengths": torch.tensor([4, 3, 4]),
    }


SEQS, TOKENS = 3.0, 8.0
"""What a batch of :func:`make_batch` counts: its sequences, and its tokens but for the first of each."""


def loss_fn(logits: Tensor, batch: Mapping[str, Tensor], seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    logprobs = torch.log_softmax(logits[:, :-1], dim=-1)
    return -logprobs.gather(-1, batch["input_ids"][:, 1:, None]).sum() / tokens, {}


def nan_loss(logits: Tensor, batch: Mapping[str, Tensor], seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    return logits.sum() * float("nan"), {}


def broken_loss(logits: Tensor, batch: Mapping[str, Tensor], seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    raise ZeroDivisionError("injected: the loss of a user")


class Twin:
    """A model, its optimizer and an extra, in plain torch."""

    def __init__(self, seed: int, kind: str) -> None:
        self.model = Net(seed)
        self.optimizer = make_optimizer(self.model, kind)
        self.extra = torch.arange(5.0)
        self.has_extra = False

    # -- what users do -------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop every gradient."""
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def backward(self, batch: Mapping[str, Tensor], seqs: float, tokens: float) -> float:
        """Add the gradients of a batch, in train mode."""
        was = self.model.training
        self.model.train()
        counts = torch.tensor(seqs), torch.tensor(tokens)
        with torch.enable_grad():
            loss, _ = loss_fn(self.model(batch["input_ids"]), batch, *counts)
            loss.backward()
        self.model.train(was)
        return float(loss.detach())

    def forward_train(self, batch: Mapping[str, Tensor]) -> None:
        """A forward in train mode whose result is not used."""
        was = self.model.training
        self.model.train()
        self.model(batch["input_ids"])
        self.model.train(was)

    def step(self) -> None:
        """One optimizer step that drops the gradients."""
        self.optimizer.step()
        self.zero_grad()

    def logprobs(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities ``[B, S]``; entry 0 is 0."""
        return logprobs_of(self.model, batch)

    # -- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Every tensor by name: weights, buffers, gradients, optimizer state, the extra."""
        return state_of(self.model, self.optimizer, self.extra)

    def snapshot(self) -> Any:
        """What a checkpoint holds."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def restore(self, snapshot: Any) -> None:
        """Go back to a checkpoint."""
        weights, moments = copy.deepcopy(snapshot)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)

    def served(self) -> int:
        """CRC-32 of the weights as a push sends them."""
        crc = 0
        for tensor in self.model.state_dict().values():
            crc = zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), crc)
        return crc


def logprobs_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """In eval, without gradients, by the book."""
    was = model.training
    model.eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(batch["input_ids"])[:, :-1].float(), dim=-1)
        picked = logprobs.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    model.train(was)
    found = torch.zeros(batch["input_ids"].shape)
    found[:, 1:] = picked
    return found * (torch.arange(found.shape[1]) < batch["input_lengths"][:, None])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, extra: Tensor) -> dict[str, Tensor]:
    """Every tensor by component and name."""
    found = {f"P.{name}": p for name, p in model.named_parameters()}
    found |= {f"B.{name}": b for name, b in model.named_buffers()}
    found |= {f"G.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state
    for index, p in enumerate(params):
        if p in state:
            found |= {f"O.{index}.{key}": v for key, v in state[p].items() if isinstance(v, Tensor)}
    found["X.extra"] = extra
    return found
