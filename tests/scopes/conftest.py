"""A small policy on an emulated device, and ways to look at it that do not ask the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.testing import EmulatedDevice

VOCABULARY = 11


class Tiny(nn.Module):
    """An embedding, a frozen layer that rests in eval, dropout, a head, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.frozen = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).requires_grad_(requires_grad=False)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(6, VOCABULARY)
        self.register_buffer("scale", torch.full((6,), 1.5))
        self.frozen.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.dropout(self.frozen(self.embed(input_ids)) * self.scale)
        out: Tensor = self.head(hidden)
        return out


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


class Rig:
    """A policy with everything it is made of.

    Attributes:
        policy: The policy.
        model: Its module.
        optimizer: Its optimizer.
        device: Its device.
        session: Its session.
    """

    def __init__(self, session: rs.Session, policy: Any, model: nn.Module, optimizer: Any) -> None:
        self.session = session
        self.policy = policy
        self.model = model
        self.optimizer = optimizer
        self.device: EmulatedDevice = policy.device
        self.batch = make_batch()
        self.loss = nll

    def train(self) -> dict[str, Any]:
        """One optimizer step, in whatever mode there is."""
        result: dict[str, Any] = self.policy.train(self.batch, self.loss)
        return result

    def scope(self, name: str) -> Any:
        """A new scope of this policy, by the name of its mode."""
        if name == "offloaded":
            return self.policy.offloaded()
        return getattr(self.policy, f"{name}_mode")()

    def state_tensors(self) -> list[Tensor]:
        """Tensors of optimizer state that move."""
        return [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.ndim]

    def seen(self) -> dict[str, str]:
        """Where bytes are, by looking at storages: "device", "host", "none" or "mixed" for each component."""
        groups: dict[str, list[Tensor]] = {
            "params": list(self.model.parameters()),
            "buffers": list(self.model.buffers()),
            "grads": [p.grad for p in self.model.parameters() if p.grad is not None],
            "optimizer": self.state_tensors(),
        }
        return {name: _where(tensors) for name, tensors in groups.items()}

    def contents(self) -> list[bytes]:
        """Every byte of weights, buffers, gradients and optimizer state, from whichever tier has it."""
        read = self.policy._control.group.worker.engine.readable
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors = [*self.model.parameters(), *self.model.buffers(), *grads, *self.state_tensors()]
        return [read(t).detach().clone().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]

    def flags(self) -> list[bool]:
        """The train flag of every submodule."""
        return [part.training for part in self.model.modules()]

    def records(self, *names: str) -> list[Any]:
        """What the log has, of the named events only when names are given."""
        self.session_path: Path
        found = rs.read_audit(self.session_path)
        return [record for record in found if not names or record.name in names]

    def state(self) -> tuple[Any, ...]:
        """What a refused or failed call must leave alone."""
        control = self.policy._control
        return (
            self.policy.mode,
            self.policy.resting_mode,
            self.seen(),
            self.contents(),
            self.flags(),
            torch.is_grad_enabled(),
            [frame.scope_id for frame in control.frames],
            control.ownership._token is None,
        )


def _where(tensors: list[Tensor]) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        found = {"device" if t.untyped_storage().nbytes() else "host" for t in tensors}
    return "none" if not found else found.pop() if len(found) == 1 else "mixed"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make rigs; their sessions are closed at the end, whatever state they are in."""
    made: list[Rig] = []

    def build(
        *,
        base: str = "offloaded",
        release: str = "eager",
        warm: bool = True,
        capacity: int | None = None,
        optimizer: Callable[[Any], Any] | None = None,
        model: nn.Module | None = None,
        **config: Any,
    ) -> Rig:
        torch.manual_seed(0)
        model = Tiny() if model is None else model
        build_optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
        opt = build_optimizer([p for p in model.parameters() if p.requires_grad])
        path = tmp_path / f"audit{len(made)}.jsonl"
        session = rs.Session(path, release=release, verify="checksum")  # type: ignore[arg-type]
        policy = session.attach(
            model,
            opt,
            name="actor",
            base=base,  # type: ignore[arg-type]
            device=EmulatedDevice(capacity),
            offload=rs.OffloadConfig(**config),
        )
        policy.device.poison()  # type: ignore[attr-defined]
        rs.InProcessEngine(policy, max_new_tokens=2, seed=1)
        rig = Rig(session, policy, model, opt)
        rig.session_path = path
        made.append(rig)
        if warm:  # optimizer state exists, and the policy is at rest
            with policy.training_mode():
                rig.train()
        return rig

    yield build
    assert torch.is_grad_enabled(), "a scope left autograd off"
    for rig in made:
        rig.device.heal()
        rig.session.close()
        assert_log_is_consistent(rig.session_path)


@pytest.fixture
def here() -> Callable[[], str]:
    """``file:line`` of the caller, as messages give call sites."""

    def site(offset: int = 0) -> str:
        frame = sys._getframe(1)
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno + offset}"

    return site
