"""A small model, what trains it, and a rig around a policy on several ranks; workers are sent what is in here by value."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rl_session as rs
from rl_session.config import OffloadConfig
from rl_session.testing import EmulatedDevice, FakeGroup, rank_device
from rl_session.workers.plan import RankPlan

VOCABULARY = 11


class Tiny(nn.Module):
    """An embedding, a head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.register_buffer("scale", torch.full((6,), 1.5))

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(input_ids) * self.scale)
        return out


class Deep(Tiny):
    """Two blocks between them, so that a forward gathers shards more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        out: Tensor = self.head(hidden * self.scale)
        return out


def forward_or_fail(model: nn.Module, batch: Any) -> Tensor:
    """A forward that rank 1 does not make when the batch says so: the others wait for it in a collective."""
    trouble = batch.get("trouble", "")
    if trouble and dist.get_rank() == 1:
        if trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(trouble)
    out: Tensor = model(batch["input_ids"])
    return out


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def make_batch(num: int = 4, length: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (num, length), generator=generator),
        "input_lengths": torch.full((num,), length),
    }


def nll(logits: Tensor, batch: Any, seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    loss = -logprobs.gather(-1, batch["input_ids"][:, 1:, None]).sum() / tokens
    return loss, {"nll": loss.detach()}


def make_plan(device: Any = None, **options: Any) -> RankPlan:
    config = OffloadConfig()
    values: dict[str, Any] = {
        "label": "policy 'actor'",
        "model": Tiny,
        "optimizer": make_optimizer,
        "device": device if device is not None else EmulatedDevice(),
        "config": config,
        "flags": config.flags(release="eager"),
        "verify": True,
        "seed": 3,
        **options,
    }
    return RankPlan(**values)


class Rig:
    """A policy on several ranks, and ways to look at it that do not ask the library's records."""

    def __init__(self, session: rs.Session, policy: rs.Policy, path: Path) -> None:
        self.session = session
        self.policy = policy
        self.path = path
        self.group: Any = policy._control.group
        self.batch = make_batch()
        self.loss = nll

    @property
    def fake(self) -> FakeGroup:
        assert isinstance(self.group, FakeGroup)
        return self.group

    def train(self) -> dict[str, Any]:
        return self.policy.train(self.batch, self.loss)

    def seen(self) -> list[dict[str, str]]:
        """Where the bytes of each rank in this process are, by looking at storages."""
        return [_seen(server._of_worker().spec) for server in self.fake.servers]

    def placements(self) -> list[dict[str, str]]:
        """Where each rank says its components are, by scan."""
        return [value.as_text() for value in self.policy._control.ranks.ask_each("placement")]

    def counters(self, name: str) -> list[int]:
        """One counter of every rank's device."""
        return [getattr(rank_device(self.policy, rank), name) for rank in range(self.group.num_ranks)]

    def records(self, *names: str) -> list[Any]:
        return [record for record in rs.read_audit(self.path) if not names or record.name in names]


def _seen(spec: Any) -> dict[str, str]:
    states = spec.optimizer.state.values()
    groups = {
        "params": list(spec.model.parameters()),
        "buffers": list(spec.model.buffers()),
        "grads": [p.grad for p in spec.model.parameters() if p.grad is not None],
        "optimizer": [t for s in states for t in s.values() if isinstance(t, Tensor) and t.ndim],
    }
    return {name: _where(tensors) for name, tensors in groups.items()}


def _where(tensors: list[Tensor]) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        found = {"device" if t.untyped_storage().nbytes() else "host" for t in tensors}
    return "none" if not found else found.pop() if len(found) == 1 else "mixed"


class Learner:
    """An actor of the user's own, that is given a policy."""

    def __init__(self, policy: rs.Policy) -> None:
        self.policy = policy
        self.scope: Any = None

    def learn(self, wait_seconds: float = 0.0) -> dict[str, Any]:
        with self.policy.training_mode(acquire_timeout=wait_seconds) as training:
            return training.train(make_batch(), nll)

    def logprobs(self) -> torch.Tensor:
        found: torch.Tensor = self.policy.get_logprobs(make_batch())["logprobs"]
        return found

    def enter_and_stay(self) -> int:
        self.scope = self.policy.training_mode()
        self.scope.__enter__()
        return os.getpid()

    def mode(self) -> str:
        return str(self.policy.mode)
