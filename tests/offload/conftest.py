"""A small policy with every kind of storage, on a device that poisons, delays and checks everything it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from rl_session.lifecycle import Component, Placement, Tier
from rl_session.offload.device import EmulatedDevice
from rl_session.offload.engine import Engine, MoveReport
from rl_session.offload.host_pool import HostPool
from rl_session.offload.inventory import Sources
from rl_session.offload.tensors import byte_alias, library_access, storage_of

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NONE


class Tiny(nn.Module):
    """Tied and frozen parameters, mixed dtypes, a transposed view, buffers persistent and not."""

    scale: Tensor
    table: Tensor
    flipped: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(4).bfloat16(), requires_grad=False)
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("table", torch.arange(9), persistent=False)
        self.register_buffer("flipped", self.body.weight.detach().t())

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.embed(ids))) * self.scale + self.frozen)
        return out


@attrs.define(eq=False)
class World:
    """A policy's worth of tensors and the engine over them."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    engine: Engine

    @property
    def device(self) -> EmulatedDevice:
        assert isinstance(self.engine.device, EmulatedDevice)
        return self.engine.device

    @property
    def pool(self) -> HostPool:
        return self.engine.pool

    def loss(self) -> Tensor:
        return self.module(torch.arange(7)).square().sum()

    def backward(self) -> None:
        self.loss().backward()

    def step(self, *, zero: bool = True) -> None:
        """Forward, backward, optimizer step, and what the worker's hooks tell the engine."""
        assert self.optimizer is not None
        self.backward()
        self.optimizer.step()
        self.consume()
        if zero:
            self.optimizer.zero_grad()

    def consume(self) -> None:
        self.engine.stamps.consume(p.grad for p in self.module.parameters() if p.grad is not None)
        self.engine.forget_snapshots()

    def to(self, tier: Tier, **others: Tier) -> MoveReport:
        """Everything that has bytes to one tier, but for ``others``."""
        snapshot = self.engine.refresh()
        target = dict.fromkeys(snapshot.placement, tier)
        return self.engine.move(snapshot, Placement({**target, **others}))

    def tensors(self) -> dict[str, Tensor]:
        """Every managed tensor by name."""
        with library_access():
            found = self.engine.refresh().inventory.storages.values()
            return {f"{e.component}:{e.name}": e.tensor for f in found for e in f.entries}

    def contents(self) -> dict[str, Tensor]:
        """The raw bytes of every managed storage, wherever they are."""
        with library_access():
            snapshot = self.engine.refresh()
            return {
                f"{found.components[0]}:{found.name}": self._bytes(snapshot.units[key], found.storage)
                for key, found in snapshot.inventory.storages.items()
            }

    @staticmethod
    def _bytes(unit: Any, storage: torch.UntypedStorage) -> Tensor:
        if unit.tier is Tier.HOST and unit.host is not None:
            data: Tensor = unit.host.data
            return data.clone()
        return byte_alias(storage).clone()

    def scan(self) -> dict[str, int]:
        """Bytes in each storage now, found by looking at the storages and not at any record."""
        return {name: storage_of(tensor).nbytes() for name, tensor in self.tensors().items()}

    def freeze(self) -> tuple[Any, ...]:
        """Everything a failed transition must leave as it was."""
        placement = self.engine.refresh().placement
        types = {name: type(tensor) for name, tensor in self.tensors().items()}
        return placement, self.scan(), types, self.device.resident_bytes, self.pool.in_use_bytes


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def equal() -> Callable[[dict[str, Tensor], dict[str, Tensor]], bool]:
    """Whether two sets of tensors are the same, bit for bit."""
    return same


@pytest.fixture
def make() -> Callable[..., World]:
    """Makes a world: a module (``Tiny`` by default), an optimizer (AdamW by default), an engine."""

    def build(
        module: nn.Module | None = None,
        *,
        optimizer: Any = torch.optim.AdamW,
        device: EmulatedDevice | None = None,
        pool: HostPool | None = None,
        verify: bool = True,
        masters: Iterable[Tensor] = (),
        reference: nn.Module | None = None,
        extras: dict[str, Any] | None = None,
        **options: Any,
    ) -> World:
        torch.manual_seed(0)
        module = module if module is not None else Tiny()
        if isinstance(optimizer, type):
            optimizer = optimizer([p for p in module.parameters() if p.requires_grad], **{"lr": 0.1, **options})
        device = device if device is not None else EmulatedDevice()
        device.poison()
        device.delay()
        sources = Sources(module, optimizer, list(masters), reference, extras or {})
        return World(
            module, optimizer, Engine(sources, device, pool if pool is not None else HostPool(), verify=verify)
        )

    return build


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    """A world after one optimizer step, without gradients."""
    made = make()
    made.step()
    return made


@pytest.fixture
def components() -> list[str]:
    return [str(component) for component in Component]
