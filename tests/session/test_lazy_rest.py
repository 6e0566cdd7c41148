"""Participants that only read take turns on a small device, and nothing is copied out for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.testing import EmulatedDevice

WIDTH, VOCABULARY = 16, 11


class Model(nn.Module):
    """Logits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.embed(input_ids)))
        return out


ONE = sum(p.numel() * p.element_size() for p in Model(0).parameters())
HEAD = VOCABULARY * WIDTH * 4
BATCH = {"input_ids": torch.arange(24).reshape(4, 6) % VOCABULARY, "input_lengths": torch.tensor([6, 5, 6, 3])}


def loss(logits: Tensor, data: Any, seqs: Any, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    picked = logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])
    return -picked.sum() / tokens, {}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., rs.Session]]:
    sessions: list[tuple[rs.Session, Path]] = []

    def build(release: str = "lazy") -> rs.Session:
        path = tmp_path / f"run{len(sessions)}.jsonl"
        sessions.append((rs.Session(path, verify="checksum", release=release), path))  # type: ignore[arg-type]
        return sessions[-1][0]

    yield build
    for session, path in sessions:
        session.close()
        assert_log_is_consistent(path)


def join(session: rs.Session, device: EmulatedDevice, name: str, seed: int) -> tuple[Any, Model]:
    model = Model(seed)
    policy = session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.01), name=name, device=device)
    policy.offload()
    return policy, model


def read(policy: Any) -> Tensor:
    with policy.logprob_mode():
        out: Tensor = policy.get_logprobs(BATCH)["logprobs"]
        return out


def train(policy: Any) -> Tensor:
    with policy.training_mode():
        out: Tensor = policy.train(BATCH, loss)["loss"]
        return out


def test_readers_that_take_turns_copy_nothing_out(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(ONE + ONE // 2)
    session = start()
    (a, _), (b, _) = join(session, device, "a", 0), join(session, device, "b", 1)
    want = [read(a), read(b)]
    copied = device.bytes_out
    for _ in range(3):
        assert torch.equal(read(a), want[0])
        assert b.placement["params"] is rs.Tier.HOST
        assert torch.equal(read(b), want[1])
        assert a.placement["params"] is rs.Tier.HOST
    assert device.bytes_out == copied


def test_a_cycle_copies_out_what_training_changed_and_nothing_else(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(4 * ONE)
    device.poison()
    session = start()
    (actor, _), (judge, _) = join(session, device, "actor", 0), join(session, device, "judge", 1)
    train(actor)
    for _ in range(3):
        read(actor)
        assert torch.equal(read(judge), read(judge))
        copied = device.bytes_out
        train(actor)  # the judge has to go
        assert judge.placement["params"] is rs.Tier.HOST
        assert device.bytes_out == copied, "nobody wrote the judge"
        session.make_room(4 * ONE)
        assert device.bytes_out == copied + 3 * ONE, "weights and moments of the actor, once"


def test_what_the_user_writes_between_the_turns_is_copied_and_no_more(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(ONE + ONE // 2)
    session = start()
    (a, model), (b, _) = join(session, device, "a", 0), join(session, device, "b", 1)
    read(b)
    before = read(a)
    model.head.weight.data.mul_(2.0)
    held = {part["component"]: part for part in _held(a)}
    assert (held["params"]["nbytes"], held["params"]["dirty_nbytes"]) == (ONE, HEAD)
    copied = device.bytes_out
    read(b)
    assert device.bytes_out == copied + HEAD
    after = read(a)
    assert not torch.equal(after, before)
    read(b)
    assert device.bytes_out == copied + HEAD
    assert torch.equal(read(a), after)


def _held(policy: Any) -> list[dict[str, Any]]:
    return [holding._asdict() for holding in policy._control.seat.holdings()]


def test_of_one_participant_the_clean_leaves_before_the_dirty(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(8 * ONE)
    session = start()
    a, model = join(session, device, "a", 0)
    train(a)
    a._control.seat.evict(["params"], "test")
    read(a)
    assert {h["component"]: h["dirty_nbytes"] for h in _held(a)} == {"params": 0, "optimizer": 2 * ONE}
    copied = device.bytes_out
    session.make_room(6 * ONE)
    assert (a.placement["params"], a.placement["optimizer"]) == (rs.Tier.HOST, rs.Tier.DEVICE)
    assert device.bytes_out == copied
    read(a)
    model.head.weight.data.mul_(2.0)
    session.make_room(8 * ONE)
    assert device.bytes_out == copied + HEAD + 2 * ONE


@pytest.mark.parametrize("capacity", [None, 4, 5, 7])
def test_results_are_the_same_whatever_the_user_touches_in_between(
    start: Callable[..., rs.Session], capacity: int | None
) -> None:
    def run(release: str, room: int | None) -> list[Tensor]:
        device = EmulatedDevice(None if room is None else room * ONE)
        device.poison()
        session = start(release)
        (a, first), (b, second) = join(session, device, "a", 0), join(session, device, "b", 1)
        out = []
        for turn in range(3):
            for policy, model in ((a, first), (b, second)):
                out.append(read(policy))
                if policy.placement["params"] is rs.Tier.DEVICE:
                    model.head.bias.data.add_(turn)
                    out.append(model.head.weight.norm().detach())
                out.append(train(policy))
        return out

    assert all(torch.equal(x, y) for x, y in zip(run("lazy", capacity), run("never", None), strict=True))
