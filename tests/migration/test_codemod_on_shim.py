"""The loops of the repository on the library's own engine: legacy and scoped, on the shim, measure the same bit for bit."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import legacy_loops as losses
import pytest
import torch
from shim_rig import Actor, Critic

import rl_session as rs
from loops.support import Checkpointer, Config, Timer
from rl_session.testing import EmulatedDevice, FakeEngine
from rl_session_migrate import LegacyGeneration, LegacyPolicy, LegacyValue, verify

pytestmark = pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")


class World:
    """Policy, critic and engine on one device, always built the same, behind the legacy API."""

    def __init__(self, path: Path, backend: Any, *, colocated: bool) -> None:
        torch.manual_seed(3)
        self.path = path
        self.device = EmulatedDevice()
        self.device.poison()
        self.session = rs.Session(path, verify="checksum")
        actor, critic = Actor(), Critic()
        optimizer = torch.optim.AdamW(actor.parameters(), lr=0.02)
        self.inner = self.session.attach(actor, optimizer, name="actor", device=self.device, reference="copy")
        critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=0.02)
        self.inner_value = self.session.attach_value(critic, critic_optimizer, name="critic", device=self.device)
        weights = sum(tensor.numel() * tensor.element_size() for tensor in actor.state_dict().values())
        served_from = self.device if colocated else None
        engine = FakeEngine(
            served_from, weights=weights, kv_nbytes=256, vocabulary=7, accepts_host_weights=not colocated
        )
        self.engine = self.session.engine("vllm", engine, device=self.device if colocated else None)
        self.policy = LegacyPolicy(self.inner, backend=backend)
        self.value = LegacyValue(self.inner_value, backend=backend)
        self.generation = LegacyGeneration(self.engine, colocated=colocated)
        torch.manual_seed(4)

    def run(self, flavour: str, name: str, loss_fn: Any, config: Config, folder: Path) -> list[Any]:
        module = importlib.import_module(f"loops.{flavour}.{name}")
        given = {
            "policy": self.policy,
            "value_model": self.value,
            "policy_generation": self.generation,
            "loss_fn": loss_fn,
            "value_loss_fn": losses.ValueLoss(),
            "config": config,
            "checkpointer": Checkpointer(folder),
            "timer": Timer(),
        }
        if name == "ppo":
            module.setup(self.policy, self.value, self.generation, config)
        train = getattr(module, f"{name}_train")
        result = train(**{key: given[key] for key in inspect.signature(train).parameters})
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def state(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), **{f"critic.{k}": v for k, v in self.inner_value.state_dict().items()}}


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def build(name: str, backend: str, *, colocated: bool) -> World:
        made.append(World(tmp_path / f"{name}.jsonl", backend, colocated=colocated))
        return made[-1]

    yield build
    for world in made:
        world.session.close()


LOOPS: dict[str, Any] = {
    "grpo": losses.ClippedPolicyLoss(),
    "ppo": losses.ClippedPolicyLoss(),
    "sft": losses.NextTokenLoss(),
    "dpo": losses.PreferenceLoss(),
}


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_scoped_loop_trains_as_the_legacy_one(
    name: str, backend: str, colocated: bool, worlds: Callable[..., World], tmp_path: Path
) -> None:
    config = Config(colocated=colocated, num_steps=4)
    legacy, scoped = (worlds(flavour, backend, colocated=colocated) for flavour in ("legacy", "scoped"))
    torch.manual_seed(4)
    expected = legacy.run("legacy", name, LOOPS[name], config, tmp_path / "a")
    torch.manual_seed(4)
    found = scoped.run("scoped", name, LOOPS[name], config, tmp_path / "b")
    assert found == expected
    assert sum("loss" in entry for entry in found) == 4
    left, right = legacy.state(), scoped.state()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert legacy.engine.version == scoped.engine.version
    if colocated:  # never more at once than by hand
        assert scoped.device.peak <= legacy.device.peak
    report = verify(legacy.path, scoped.path)
    assert report.equal, str(report)
    assert report.num_digests > 0


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_step_that_stays_open_trains_as_the_legacy_one(
    backend: str, worlds: Callable[..., World], tmp_path: Path
) -> None:
    config = Config(num_steps=3)
    legacy, scoped = (worlds(flavour, backend, colocated=True) for flavour in ("legacy", "scoped"))
    loss = losses.NextTokenLoss()
    torch.manual_seed(4)
    expected = legacy.run("legacy", "streaming", loss, config, tmp_path / "a")
    torch.manual_seed(4)
    assert scoped.run("scoped", "streaming", loss, config, tmp_path / "b") == expected
    left, right = legacy.state(), scoped.state()
    assert all(torch.equal(left[key], right[key]) for key in left)
    report = verify(legacy.path, scoped.path)
    assert report.equal, str(report)
