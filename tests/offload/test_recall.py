"""An unchanged policy is not scanned again; whatever changes is noticed at the next look, and nothing is kept alive for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_session.errors import OffloadedAccessError, UnsupportedError
from rl_session.lifecycle import Tier
from rl_session.offload import ledger as ledger_module
from rl_session.offload.inventory import Inventory, Sources, scan

World = Any
"""What ``make`` of the conftest builds."""
Make = Callable[..., World]
D, H = Tier.DEVICE, Tier.HOST


class Holder(nn.Module):
    """A module with everything that a look goes through."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4))
        self.kept: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(ids.float()[:4])) * self.scale
        return out


@pytest.fixture
def held(make: Make) -> World:
    """A world after a step, looked at once, with an extra that is a list."""
    made = make(Holder(), extras={"ema": [torch.ones(3)]})
    made.step()
    made.engine.refresh()
    return made


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with every scan that a look makes."""
    made: list[object] = []

    def counted(sources: Sources, **how: bool) -> Inventory:
        made.append(sources)
        return scan(sources, **how)

    monkeypatch.setattr(ledger_module, "scan", counted)
    return made


def picture(inventory: Any) -> list[tuple[Any, ...]]:
    """What matters of an inventory: storages in order, with every name, component and known tensor."""
    return [
        (key, [(e.component, e.name, id(e.tensor), e.is_grad_slot) for e in found.entries], set(found.known))
        for key, found in inventory.storages.items()
    ]


def agrees(world: World) -> bool:
    """Whether a look finds what a scan finds."""
    seen = world.engine.refresh()  # lives while it is looked at
    whole = scan(world.engine.ledger.sources)
    return picture(seen.inventory) == picture(whole) and set(seen.units) == set(whole.storages)


def test_what_has_not_changed_is_scanned_once_however_often_it_moves(held: World, scans: list[object]) -> None:
    before = held.contents()
    for tier in (H, D, H, D):
        held.to(tier)
    assert scans == []
    assert held.contents().keys() == before.keys()
    assert all(torch.equal(data, before[name]) for name, data in held.contents().items())
    assert agrees(held)


def replace_parameter(world: World) -> None:
    world.module.first.weight = nn.Parameter(torch.ones(4, 4))


def replace_storage(world: World) -> None:
    world.module.first.weight.data = torch.ones(4, 4)


def wrap_a_parameter_anew(world: World) -> None:
    """Another tensor, at the same place of the walk and over the same storage; the optimizer keeps the old one alive."""
    world.module.first.weight = nn.Parameter(world.module.first.weight.detach())


def rebind_buffer(world: World) -> None:
    world.module.scale = torch.ones(4)


def demote_to_buffer(world: World) -> None:
    """The same tensor at the same place of the walk, in another component."""
    bias = world.module.second._parameters.pop("bias")
    world.module.second.register_buffer("bias", bias)


def tie(world: World) -> None:
    world.module.second.weight = world.module.first.weight


def untie_by_data(world: World) -> None:
    world.module.second.bias.data = world.module.first.bias.data.clone()


def share_by_data(world: World) -> None:
    world.module.second.bias.data = world.module.first.bias.data


def add_submodule(world: World) -> None:
    world.module.third = nn.Linear(4, 4)


def remove_submodule(world: World) -> None:
    world.module.second = nn.Identity()


def load_by_assignment(world: World) -> None:
    world.module.load_state_dict({k: v.clone() for k, v in world.module.state_dict().items()}, assign=True)


def grow_an_extra(world: World) -> None:
    world.engine.ledger.sources.extras["ema"].append(torch.ones(5))


def replace_in_an_extra(world: World) -> None:
    world.engine.ledger.sources.extras["ema"][0] = torch.zeros(3)


def keep_a_view(world: World) -> None:
    world.module.kept.append(world.module.first.weight.detach())


def attach_a_tensor_to_a_parameter(world: World) -> None:
    world.module.first.weight.shadow = world.module.first.weight.detach()


def attach_a_gradient_to_a_parameter(world: World) -> None:
    world.module.first.weight.main_grad = torch.ones(4, 4)


def add_a_group(world: World) -> None:
    assert world.optimizer is not None
    world.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def replace_state(world: World) -> None:
    assert world.optimizer is not None
    world.optimizer.state[world.module.first.weight]["exp_avg"] = torch.ones(4, 4)


def nest_state(world: World) -> None:
    assert world.optimizer is not None
    world.optimizer.state[world.module.first.weight]["factors"] = {"rows": [torch.ones(4)]}


def forget_state(world: World) -> None:
    assert world.optimizer is not None
    world.optimizer.state.clear()


def make_gradients(world: World) -> None:
    world.backward()


def make_half_of_the_gradients(world: World) -> None:
    world.module.first(torch.ones(4)).sum().backward()


def grow_in_place(world: World) -> None:
    with torch.no_grad():
        world.module.scale.resize_(64)
        world.module.scale.fill_(2.0)


CHANGES = [
    *(
        replace_parameter,
        replace_storage,
        wrap_a_parameter_anew,
        rebind_buffer,
        demote_to_buffer,
        tie,
        untie_by_data,
        share_by_data,
    ),
    *(add_submodule, remove_submodule, load_by_assignment, grow_an_extra, replace_in_an_extra, keep_a_view),
    *(attach_a_tensor_to_a_parameter, attach_a_gradient_to_a_parameter, add_a_group, replace_state, nest_state),
    *(forget_state, make_gradients, make_half_of_the_gradients, grow_in_place),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_noticed_and_what_is_new_moves(held: World, change: Callable[[World], None]) -> None:
    change(held)
    assert agrees(held)
    before = held.contents()
    held.to(H, grads=H)
    assert set(held.scan().values()) <= {0}, "every byte is away"
    held.to(D)
    after = held.contents()
    assert after.keys() == before.keys()
    assert all(torch.equal(data, before[name]) for name, data in after.items())
    assert agrees(held)


def test_gradients_are_found_afresh_and_cost_no_scan_of_the_rest(held: World, scans: list[object]) -> None:
    for _ in range(2):
        held.backward()
        with_them = held.engine.refresh()
        assert {e.name for e in with_them.inventory.entries("grads")} >= {"first.weight.grad", "second.bias.grad"}
        held.to(H, grads=H)
        held.to(D)
        assert scans == []
        assert held.optimizer is not None
        held.optimizer.zero_grad()
        without = held.engine.refresh()
        assert not list(without.inventory.entries("grads"))
        assert agrees(held)


def test_a_view_that_took_the_place_of_a_dead_one_in_memory_is_another(held: World) -> None:
    held.module.kept.append(held.module.first.weight.detach())
    held.engine.refresh()
    place = id(held.module.kept[0])
    held.module.kept.clear()
    elsewhere = [held.module.first.weight.detach()]
    while id(elsewhere[-1]) != place and len(elsewhere) < 10_000:
        elsewhere.append(held.module.first.weight.detach())
    assert id(elsewhere[-1]) == place, "CPython gives an address away again"
    held.module.kept.append(elsewhere.pop())
    held.to(H)
    with pytest.raises(OffloadedAccessError, match=r"first\.weight"):
        held.module.kept[0].clone()
    held.to(D)
    assert held.module.kept[0].shape == (4, 4)


def test_what_somebody_else_emptied_is_refused_by_name_and_usable_again_when_it_is_back(held: World) -> None:
    storage = held.module.first.weight.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(UnsupportedError, match=r"first\.weight has no bytes"):
        held.engine.refresh()
    storage.resize_(nbytes)
    with torch.no_grad():
        held.module.first.weight.fill_(3.0)
    held.to(H)
    held.to(D)
    assert held.module.first.weight.tolist() == [[3.0] * 4] * 4


@pytest.mark.parametrize("is_moved", [False, True])
def test_nothing_is_kept_alive_to_compare_with(held: World, is_moved: bool) -> None:
    if is_moved:
        held.to(H)
        held.to(D)
    held.engine.refresh()
    tensor = weakref.ref(held.module.first.weight)
    resident = held.device.resident_bytes
    nbytes = held.module.first.weight.nbytes
    assert held.optimizer is not None
    held.optimizer.param_groups[0]["params"].remove(held.module.first.weight)
    del held.optimizer.state[held.module.first.weight]
    del held.module.first
    gc.collect()
    assert tensor() is None
    assert held.device.resident_bytes <= resident - 3 * nbytes, "the weight and its state are gone at once"


def test_gradients_are_freed_by_zero_grad_although_they_were_looked_at(held: World) -> None:
    held.backward()
    held.engine.refresh()
    resident = held.device.resident_bytes
    assert held.optimizer is not None
    held.optimizer.zero_grad()
    assert held.device.resident_bytes < resident


def test_a_large_storage_is_freed_when_its_tensor_gets_another_although_it_was_moved(make: Make) -> None:
    world = make(nn.Linear(300, 300), optimizer=None)
    world.to(H)
    world.to(D)
    weight = world.module.weight
    resident = world.device.resident_bytes
    weight.data = torch.ones(300, 300)
    assert world.device.resident_bytes == resident - weight.nbytes
