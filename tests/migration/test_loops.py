"""Training functions for the legacy objects run on the shim as they are, and compute what scopes compute, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import legacy_loops as loops
import pytest
import torch
from shim_rig import Actor, Critic

import rl_session as rs
from rl_session.testing import EmulatedDevice, FakeEngine
from rl_session_migrate import LegacyGeneration, LegacyPolicy, LegacyValue, as_loss_fn, refit_policy_generation, verify

pytestmark = pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")


class World:
    """Policy, critic and engine on one device, always built the same."""

    def __init__(self, path: Path, *, capacity: int | None = None) -> None:
        torch.manual_seed(3)
        self.path = path
        self.device = EmulatedDevice(capacity)
        self.device.poison()
        self.session = rs.Session(path, verify="checksum")
        actor, critic = Actor(), Critic()
        self.policy = self.session.attach(
            actor,
            torch.optim.AdamW(actor.parameters(), lr=0.02),
            name="actor",
            device=self.device,
            reference="copy",
            max_grad_norm=1.0,
        )
        self.value = self.session.attach_value(
            critic, torch.optim.AdamW(critic.parameters(), lr=0.02), name="critic", device=self.device
        )
        weights = sum(t.numel() * t.element_size() for t in actor.state_dict().values())
        self.engine = self.session.engine("vllm", FakeEngine(self.device, weights=weights, kv_nbytes=256, vocabulary=7))
        torch.manual_seed(4)

    def state(self) -> dict[str, Any]:
        return {"policy": self.policy.state_dict(), "value": self.value.state_dict()}


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def build(name: str, **options: Any) -> World:
        world = World(tmp_path / f"{name}.jsonl", **options)
        made.append(world)
        return world

    yield build
    for world in made:
        world.session.close()


def assert_same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for index, (left, right) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(left, right), f"entry {index}: {left} and {right}"


def assert_same_state(a: World, b: World) -> None:
    for kind, left in a.state().items():
        right = b.state()[kind]
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left), kind


def assert_proved(legacy: World, scoped: World) -> None:
    report = verify(legacy.path, scoped.path)
    assert report.equal, str(report)
    assert report.num_digests > 0
    assert report.scoped.peak <= report.legacy.peak
    assert all(moment.call_site.startswith("legacy_loops.py:") for moment in report.moments if moment.kind == "call")


backends = pytest.mark.parametrize("backend", ["dtensor", "megatron"])


@backends
def test_grpo(worlds: Callable[..., World], tmp_path: Path, backend: Any) -> None:
    legacy, scoped = worlds("legacy"), worlds("scoped")
    a: list[Any] = []
    b: list[Any] = []
    loss = loops.ClippedPolicyLoss()
    loops.grpo_legacy(
        LegacyPolicy(legacy.policy, backend=backend),
        LegacyGeneration(legacy.engine),
        refit_policy_generation,
        loss,
        tmp_path / "a",
        a,
    )
    torch.manual_seed(4)
    loops.grpo_scoped(scoped.policy, scoped.engine, as_loss_fn(loss), tmp_path / "b", b)
    assert_same(a, b)
    assert_same_state(legacy, scoped)
    assert_proved(legacy, scoped)
    assert (tmp_path / "a" / "step_1" / "optimizer").is_dir()


@backends
def test_ppo(worlds: Callable[..., World], backend: Any) -> None:
    legacy, scoped = worlds("legacy"), worlds("scoped")
    a: list[Any] = []
    b: list[Any] = []
    losses = (loops.ClippedPolicyLoss(), loops.ValueLoss())
    loops.ppo_legacy(
        LegacyPolicy(legacy.policy, backend=backend),
        LegacyValue(legacy.value, backend=backend),
        LegacyGeneration(legacy.engine),
        refit_policy_generation,
        losses,
        a,
    )
    torch.manual_seed(4)
    loops.ppo_scoped(scoped.policy, scoped.value, scoped.engine, tuple(map(as_loss_fn, losses)), b)
    assert_same(a, b)
    assert_same_state(legacy, scoped)
    assert_proved(legacy, scoped)


@backends
def test_dpo_with_the_reference_in_train_state(worlds: Callable[..., World], backend: Any) -> None:
    legacy, scoped = worlds("legacy"), worlds("scoped")
    a: list[Any] = []
    b: list[Any] = []
    loss = loops.PreferenceLoss()
    loops.dpo_legacy(LegacyPolicy(legacy.policy, backend=backend), loss, a)
    torch.manual_seed(4)
    loops.dpo_scoped(scoped.policy, as_loss_fn(loss), b)
    assert_same(a, b)
    assert_same_state(legacy, scoped)
    assert_proved(legacy, scoped)


@backends
def test_a_step_that_stays_open(worlds: Callable[..., World], backend: Any) -> None:
    legacy, scoped = worlds("legacy"), worlds("scoped")
    a: list[Any] = []
    b: list[Any] = []
    loss = loops.NextTokenLoss()
    loops.streaming_legacy(LegacyPolicy(legacy.policy, backend=backend), loss, a)
    torch.manual_seed(4)
    loops.streaming_scoped(scoped.policy, as_loss_fn(loss), b)
    assert_same(a, b)
    assert_same_state(legacy, scoped)
    assert_proved(legacy, scoped)
