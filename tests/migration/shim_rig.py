"""Small models on an emulated device behind the legacy API, and ways to look at them that do not ask the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rl_session as rs
from rl_session.testing import EmulatedDevice

VOCABULARY = 7
WIDTH = 4


class Actor(nn.Module):
    """An embedding, dropout, a head, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.dropout(self.embed(input_ids) * self.scale))
        return out


class Critic(Actor):
    """One number a token."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)


class MainGrad(torch.optim.Optimizer):
    """SGD with momentum over ``main_grad``: views of one flat buffer that a hook adds into, as Megatron keeps gradients."""

    def __init__(self, params: Any) -> None:
        trained = list(params)
        super().__init__(trained, {"lr": 0.05})
        sizes = [p.numel() for p in trained]
        self.flat = torch.zeros(sum(sizes))
        for p, piece in zip(trained, self.flat.split(sizes), strict=True):
            p.main_grad = piece.view(p.shape)
            p.register_post_accumulate_grad_hook(self._accumulate)

    @staticmethod
    def _accumulate(p: Any) -> None:
        p.main_grad.add_(p.grad)
        p.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.main_grad)
                p.add_(momentum, alpha=-group["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for p in group["params"]:
                p.main_grad.zero_()


def make_batch(num: int = 4, length: int = 5, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (num, length), generator=generator),
        "input_lengths": torch.full((num,), length),
    }


class Rig:
    """A model behind the legacy API, with everything it is made of.

    Attributes:
        legacy: The handle.
        policy: The policy of rl_session behind it.
        model: Its module.
        optimizer: Its optimizer.
    """

    def __init__(self, session: rs.Session, legacy: Any, model: nn.Module, optimizer: Any, path: Path) -> None:
        self.session = session
        self.legacy = legacy
        self.policy = legacy.scoped
        self.model = model
        self.optimizer = optimizer
        self.path = path
        self.device: EmulatedDevice = self.policy.device

    def gradients(self) -> list[Tensor]:
        """The gradients that exist: those of ``.grad``, and the flat buffer."""
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [*found, self.optimizer.flat] if isinstance(self.optimizer, MainGrad) else found

    def state_tensors(self) -> list[Tensor]:
        """Optimizer state that moves."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [t for s in states for t in s.values() if isinstance(t, Tensor) and t.ndim]

    def seen(self) -> dict[str, str]:
        """Where bytes are, by looking at storages; what has none and once had is "cpu", or "freed" when nobody holds it."""
        found = {
            "P": _where(list(self.model.parameters())),
            "G": _where(self.gradients()),
            "O": _where(self.state_tensors()),
            "M": "train" if self.model.training else "eval",
        }
        if found["G"] == "cpu" and self.policy.placement["grads"] is rs.Tier.NONE:
            found["G"] = "freed"
        return found

    def gradient_bytes(self) -> list[bytes]:
        """The contents of all gradients, from whichever tier has them."""
        read = self.policy._control.group.worker.engine.readable
        return [read(t).detach().clone().view(torch.uint8).numpy().tobytes() for t in self.gradients()]

    def records(self, *names: str) -> list[Any]:
        """What the log has, of the named events only when names are given."""
        return [record for record in rs.read_audit(self.path) if not names or record.name in names]


def _where(tensors: list[Tensor]) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        found = {"gpu" if t.untyped_storage().nbytes() else "cpu" for t in tensors}
    return "none" if not found else found.pop() if len(found) == 1 else "mixed"
