"""A policy and a fake engine on one emulated device, and the loops that the tests run over them."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rl_session as rs
from rl_session.testing import EmulatedDevice, FakeEngine

WIDTH, VOCABULARY = 16, 11


class Model(nn.Module):
    """An embedding, a layer and a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.embed(input_ids))))
        return out


ONE = sum(p.numel() * p.element_size() for p in Model(0).parameters())
"""Bytes of the weights of one model; training it holds four times that: gradients and Adam's two moments."""


def prompts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (4, 6), generator=generator),
        "input_lengths": torch.tensor([6, 5, 6, 3]),
    }


def loss_fn(logits: Tensor, data: Any, valid_seqs: Any, valid_tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    picked = logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])
    return -picked.sum() / valid_tokens, {}


class Rig:
    """A session with a policy and an external engine.

    Attributes:
        session: The session.
        policy: The policy, offloaded.
        device: Its device.
        fake: The engine.
        engine: Its handle.
        path: The log.
    """

    def __init__(
        self,
        path: Path,
        *,
        capacity: int | None = None,
        apart: bool = False,
        release: Any = "eager",
        base: Any = "offloaded",
        kv: int = 2 * ONE,
        fake: dict[str, Any] | None = None,
        seed: int = 0,
        **engine: Any,
    ) -> None:
        self.path = path
        self.device = EmulatedDevice(capacity)
        self.device.poison()
        self.session = rs.Session(path, release=release, verify="checksum")
        model = Model(seed)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.policy = self.session.attach(model, self.optimizer, name="actor", device=self.device, base=base)
        if base == "offloaded":
            self.policy.offload()
        self.fake = FakeEngine(None if apart else self.device, weights=ONE, kv_nbytes=kv, **(fake or {}))
        self.engine = self.session.engine("vllm", self.fake, **engine)

    @property
    def engine_bytes(self) -> int:
        """What the engine really holds, by looking at its memory."""
        return self.fake.occupied

    def train(self, policy: rs.Policy | None = None) -> Tensor:
        """One optimizer step."""
        policy = policy or self.policy
        with policy.training_mode():
            loss: Tensor = policy.train(prompts(), loss_fn)["loss"]
            return loss

    def records(self, *names: str) -> list[Any]:
        """Records of the named events."""
        return [record for record in rs.read_audit(self.path) if record.name in names]

    def told(self) -> list[str]:
        """What the log says of engines and pushes, in order."""
        out = []
        for record in self.records("engine.woken", "engine.slept", "weights.published"):
            event = record.event
            if record.name == "engine.woken":
                out.append(f"woken {'+'.join(event.tags)}")
            elif record.name == "engine.slept":
                out.append(f"slept {event.level}")
            else:
                out.append(f"{'skipped' if event.skipped else 'published'} {event.version}")
        return out

    def warnings(self) -> list[str]:
        """Codes of warnings about the engine."""
        return [r.event.code for r in self.records("warning") if r.event.code.startswith("engine_")]

    def weights_crc(self) -> int:
        """CRC-32 of the policy's weights as a push sends them."""
        crc = 0
        for tensor in self.policy.state_dict().values():
            crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes(), crc)
        return crc
