"""What the fault tests stand on: a small model, a policy on an emulated device, and eyes that do not ask the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

import rl_session as rs
from rl_session.testing import EmulatedDevice

VOCABULARY = 11


class Net(nn.Module):
    """Logits ``[b, S, V]``; a tied head, a frozen layer, buffers that are saved and one that is not."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.frozen = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((width,), 1.5))
        self.register_buffer("inv_freq", torch.arange(1.0, width + 1), persistent=False)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        hidden = self.mix(self.frozen(self.embed(input_ids)) * self.scale + self.inv_freq)
        out: Tensor = self.head(hidden)
        return out


def make_batch(rows: int = 4, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (rows, length), generator=generator),
        "input_lengths": torch.full((rows,), length),
    }


def nll(logits: Tensor, batch: Mapping[str, Tensor], seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    loss = -logprobs.gather(-1, batch["input_ids"][:, 1:, None]).sum() / tokens
    return loss, {}


def tensors_in(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Every tensor reachable from a value."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        if isinstance(value, Mapping):
            inner: Any = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        else:
            inner = vars(value).values() if hasattr(value, "__dict__") else ()
        for each in inner:
            yield from tensors_in(each, depth - 1)


@attrs.define(eq=False)
class Rig:
    """A policy and everything it is made of."""

    policy: Any
    model: nn.Module
    optimizer: Any
    session: rs.Session
    log: Path

    @property
    def device(self) -> EmulatedDevice:
        device = self.policy.device
        assert isinstance(device, EmulatedDevice)
        return device

    def train(self, rows: int = 4) -> Any:
        return self.policy.train(make_batch(rows), nll)

    def optimizer_tensors(self) -> list[Tensor]:
        if self.optimizer is None:
            return []
        return [t for state in self.optimizer.state.values() for t in tensors_in(state) if t.ndim]

    def on_device(self) -> list[str]:
        """Names of tensors whose storage has bytes, found by looking at storages."""
        named = [
            *self.model.named_parameters(),
            *self.model.named_buffers(),
            *((f"{name}.grad", p.grad) for name, p in self.model.named_parameters() if p.grad is not None),
            *((f"state {index}", t) for index, t in enumerate(self.optimizer_tensors())),
        ]
        return [name for name, tensor in named if tensor.untyped_storage().nbytes()]

    def contents(self) -> list[bytes]:
        """Every byte of weights, buffers, gradients and optimizer state, from whichever tier has it."""
        read = self.policy._control.group.worker.engine.readable
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors = [*self.model.parameters(), *self.model.buffers(), *grads, *self.optimizer_tensors()]
        return [read(t).detach().clone().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]

    def records(self, *names: str) -> list[Any]:
        return [record for record in rs.read_audit(self.log) if not names or record.name in names]


Make = Callable[..., Rig]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
