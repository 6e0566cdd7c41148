"""Participants on one device stay within its budget, and move as little as that takes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.planning import Holding, choose_evictions
from rl_session.testing import EmulatedDevice

WIDTH, VOCABULARY = 16, 11


class Model(nn.Module):
    """Logits, or values with a head of one."""

    def __init__(self, seed: int, outputs: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.embed(input_ids))))
        return out


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (4, 6), generator=generator),
        "input_lengths": torch.tensor([6, 5, 6, 3]),
    }


def policy_loss(logits: Tensor, data: Any, valid_seqs: Any, valid_tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    picked = logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])
    return -picked.sum() / valid_tokens, {}


def value_loss(values: Tensor, data: Any, valid_seqs: Any, valid_tokens: Any) -> tuple[Tensor, dict[str, Any]]:
    return (values.squeeze(-1) - 1.0).square().sum() / valid_tokens, {}


def nbytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


ONE = nbytes(Model(0))
"""Bytes of the parameters of one model; training it holds four times that: gradients and Adam's two moments."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., rs.Session]]:
    sessions: list[tuple[rs.Session, Path]] = []

    def build(**arguments: Any) -> rs.Session:
        path = tmp_path / f"run{len(sessions)}.jsonl"
        session = rs.Session(path, verify="checksum", **arguments)
        sessions.append((session, path))
        return session

    yield build
    for session, path in sessions:
        session.close()
        assert_log_is_consistent(path)


def join(session: rs.Session, device: EmulatedDevice, name: str, seed: int, **arguments: Any) -> rs.Policy:
    model = Model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = session.attach(model, optimizer, name=name, device=device, **arguments)
    policy.offload()
    return policy


def read(policy: rs.Policy) -> Tensor:
    with policy.logprob_mode():
        logprobs: Tensor = policy.get_logprobs(batch())["logprobs"]
        return logprobs


def train(policy: rs.Policy) -> Tensor:
    with policy.training_mode():
        loss: Tensor = policy.train(batch(), policy_loss)["loss"]
        return loss


def evictions(session: rs.Session, path: Path) -> list[str]:
    return [
        f"{record.policy}: {record.event.reason}"
        for record in rs.read_audit(path)
        if record.name == "transition.started" and "evicted" in record.event.reason
    ]


def test_what_fits_never_moves(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(20 * ONE)
    session = start(release="lazy")
    a, b = join(session, device, "a", 0), join(session, device, "b", 1)
    for policy in (a, b):
        read(policy)
        train(policy)
    moved = device.bytes_in, device.bytes_out
    for _ in range(3):
        for policy in (a, b):
            read(policy)
            train(policy)
    assert (device.bytes_in, device.bytes_out) == moved
    assert a.placement["params"] is rs.Tier.DEVICE


@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_actor_and_critic_share_a_device_that_holds_only_the_largest_phase(
    release: str, start: Callable[..., rs.Session]
) -> None:
    def steps(session: rs.Session, device: EmulatedDevice) -> list[Tensor]:
        actor = join(session, device, "actor", 0, reference="copy")
        critic_model = Model(1, outputs=1)
        critic = session.attach_value(
            critic_model, torch.optim.AdamW(critic_model.parameters(), lr=0.01), name="critic", device=device
        )
        critic.offload()
        out = []
        for _ in range(3):
            with critic.inference_mode():
                out.append(critic.get_values(batch())["values"])
            with actor.logprob_mode():
                out.append(actor.get_logprobs(batch())["logprobs"])
                out.append(actor.get_reference_policy_logprobs(batch())["reference_logprobs"])
            with critic.training_mode():
                out.append(critic.train(batch(), value_loss)["loss"])
            out.append(train(actor))
        return out

    roomy = EmulatedDevice()
    want = steps(start(release="never"), roomy)
    tight = EmulatedDevice(4 * ONE)
    tight.poison()
    found = steps(start(release=release), tight)
    assert tight.peak <= 4 * ONE
    assert len(found) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_the_participant_used_least_recently_leaves_first(start: Callable[..., rs.Session], tmp_path: Path) -> None:
    device = EmulatedDevice(3 * ONE)
    session = start(release="lazy")
    a, b, c, d = (join(session, device, name, seed) for seed, name in enumerate("abcd"))
    for policy in (a, b, c, a):
        read(policy)
    read(d)
    assert [p.placement["params"] for p in (a, b, c, d)] == [
        rs.Tier.DEVICE,
        rs.Tier.HOST,
        rs.Tier.DEVICE,
        rs.Tier.DEVICE,
    ]
    assert [line[:2] for line in evictions(session, tmp_path / "run0.jsonl")] == ["b:"]


def test_an_entry_that_cannot_fit_fails_before_anything_moves_and_says_who_holds_the_bytes(
    start: Callable[..., rs.Session],
) -> None:
    device = EmulatedDevice(2 * ONE + ONE // 2)
    session = start(release="lazy")
    a, b, c = (join(session, device, name, seed) for seed, name in enumerate("abc"))
    with a.logprob_mode(), b.logprob_mode():
        before = device.num_copies, a.placement, b.placement, c.placement
        with pytest.raises(rs.DeviceMemoryError) as caught, c.logprob_mode():
            pytest.fail("entered")
        assert (device.num_copies, a.placement, b.placement, c.placement) == before
        text = str(caught.value)
        assert f"budget: {2 * ONE + ONE // 2}, in use: {2 * ONE}" in text
        assert "policy 'a' (in logprob_mode() at test_budget.py:" in text
        assert c.mode is rs.Mode.OFFLOADED
    read(c)  # the others have left their scopes, and may leave the device


def test_an_explicit_budget_binds_below_the_capacity(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(100 * ONE)
    session = start(release="lazy", device_budget=ONE)
    a, b = join(session, device, "a", 0), join(session, device, "b", 1)
    read(a)
    read(b)
    assert a.placement["params"] is rs.Tier.HOST
    assert device.resident_bytes == ONE


def test_what_is_pinned_stays(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(2 * ONE)
    session = start(release="lazy")
    a, b, c = (join(session, device, name, seed) for seed, name in enumerate("abc"))
    read(a)
    a.pin("params")
    read(b)
    read(c)
    assert a.placement["params"] is rs.Tier.DEVICE
    assert b.placement["params"] is rs.Tier.HOST
    a.offload()
    assert a.placement["params"] is rs.Tier.DEVICE
    a.unpin()
    a.offload()
    assert a.placement["params"] is rs.Tier.HOST
    with pytest.raises(rs.ConfigError, match="no such component"):
        a.pin("weights")


def test_make_room_evicts_what_is_releasable_and_memory_says_what_that_is(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(8 * ONE)
    session = start(release="lazy")
    a = join(session, device, "a", 0)
    train(a)
    held = session.memory()
    assert held["participants"]["a"]["releasable"] == {"params": ONE, "optimizer": 2 * ONE}
    assert held["devices"] == [{"device": repr(device), "budget": 8 * ONE, "in_use": 3 * ONE}]
    session.make_room(6 * ONE)
    assert device.resident_bytes <= 2 * ONE
    session.make_room(8 * ONE)
    assert device.resident_bytes == 0
    with pytest.raises(rs.DeviceMemoryError, match="make_room"):
        session.make_room(9 * ONE)
    with pytest.raises(rs.ConfigError):
        session.make_room(-1)


def test_gradients_that_are_consumed_leave_before_anything_that_must_be_copied(
    start: Callable[..., rs.Session],
) -> None:
    device = EmulatedDevice(5 * ONE)
    session = start(release="lazy")
    a, b = join(session, device, "a", 0), join(session, device, "b", 1)
    worker = a._control.group.worker  # type: ignore[attr-defined]
    with a.training_mode():  # a step of the user's own leaves its gradients behind
        worker.module(batch()["input_ids"]).sum().backward()
        worker.spec.optimizer.step()
    assert device.resident_bytes == 4 * ONE
    copies = device.bytes_out
    with b.logprob_mode():
        pass
    session.make_room(ONE)
    assert device.bytes_out == copies
    assert worker.module.body.weight.grad is None
    assert a.placement["params"] is rs.Tier.DEVICE


def test_a_participant_that_another_thread_is_using_is_not_evicted(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(ONE)
    session = start(release="lazy")
    a, b = join(session, device, "a", 0), join(session, device, "b", 1)
    read(a)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with a._control.lock:
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(rs.DeviceMemoryError), b.logprob_mode():
        pytest.fail("entered")
    leave.set()
    thread.join()
    read(b)
    assert a.placement["params"] is rs.Tier.HOST


def test_losses_are_the_same_however_tight_the_device_is(start: Callable[..., rs.Session]) -> None:
    def run(capacity: int | None, release: str) -> list[Tensor]:
        device = EmulatedDevice(capacity)
        session = start(release=release)
        a, b = join(session, device, "a", 0), join(session, device, "b", 1)
        return [each(policy) for _ in range(3) for policy in (a, b) for each in (read, train)]

    want = run(None, "never")
    for capacity in (4, 5, 6, 7, 9):
        found = run(capacity * ONE, "lazy")
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True)), capacity


# -- the pure choice -----------------------------------------------------------------------------------------------------


def holding(participant: str, component: str, size: int, **other: Any) -> Holding:
    facts = {"dirty_nbytes": size, "last_used": 1, "releasable": True, "disposable": False, **other}
    return Holding(participant, component, size, **facts)


def test_the_choice_takes_disposable_then_old_then_clean_and_no_more_than_needed() -> None:
    disposable = holding("new", "grads", 10, last_used=9, disposable=True, dirty_nbytes=0)
    clean = holding("old", "params", 10, dirty_nbytes=0)
    dirty = holding("old", "optimizer", 10)
    newer = holding("new", "params", 10, last_used=9, dirty_nbytes=0)
    everything = [newer, dirty, clean, disposable, holding("old", "buffers", 10, releasable=False)]
    order = [disposable, clean, dirty, newer]
    for number in range(1, 5):
        assert list(choose_evictions(10 * number, everything) or ()) == order[:number]
    assert choose_evictions(41, everything) is None
    assert choose_evictions(0, copy.copy(everything)) == ()


def test_what_a_large_component_makes_room_for_stays_when_it_has_to_leave_anyway() -> None:
    gradients = holding("old", "grads", 5, disposable=True, dirty_nbytes=0)
    small, medium = holding("old", "params", 10), holding("old", "ema", 20)
    large = holding("old", "optimizer", 60)
    everything = [gradients, small, medium, large]
    assert choose_evictions(30, everything) == (gradients, small, medium)
    assert choose_evictions(40, everything) == (gradients, large)
    assert choose_evictions(66, everything) == (gradients, small, large)
    assert choose_evictions(80, everything) == (gradients, medium, large)
    assert choose_evictions(95, everything) == (gradients, small, medium, large)


def test_weights_stay_where_the_optimizer_alone_makes_room(start: Callable[..., rs.Session]) -> None:
    device = EmulatedDevice(4 * ONE)
    session = start(release="lazy")
    a = join(session, device, "a", 0)
    train(a)
    assert device.resident_bytes == 3 * ONE
    copied_out = device.bytes_out
    session.make_room(3 * ONE)  # the weights are the smaller, and would leave first; the moments have to leave anyway
    assert device.bytes_out - copied_out == 2 * ONE
    assert a.placement["params"] is rs.Tier.DEVICE
