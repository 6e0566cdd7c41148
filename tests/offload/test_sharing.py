"""Two policies over some of the same storages: counted once, kept while either needs them, freed by the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rl_session.errors import DeviceMemoryError, OffloadedAccessError
from rl_session.lifecycle import Tier
from rl_session.offload.device import EmulatedDevice
from rl_session.offload.host_pool import HostPool

D, H = Tier.DEVICE, Tier.HOST
Make = Callable[..., Any]


def actor_and_critic(make: Make) -> tuple[Any, Any]:
    """Two worlds whose modules share a trunk."""
    device, pool = EmulatedDevice(), HostPool()
    trunk = nn.Linear(4, 4)
    actor, critic = nn.Sequential(trunk, nn.Linear(4, 3)), nn.Sequential(trunk, nn.Linear(4, 1))
    worlds = [make(module, optimizer=None, device=device, pool=pool) for module in (actor, critic)]
    for world in worlds:
        world.engine.refresh()
    return worlds[0], worlds[1]


TRUNK, ACTOR, CRITIC = 80, 60, 20


def test_shared_bytes_are_counted_once(make: Make) -> None:
    actor, _ = actor_and_critic(make)
    assert actor.device.resident_bytes == TRUNK + ACTOR + CRITIC
    assert len(actor.device.units) == 6


def test_shared_storages_stay_while_either_needs_them_and_go_with_the_last(make: Make, equal: Any) -> None:
    actor, critic = actor_and_critic(make)
    before = actor.contents() | critic.contents()
    actor.to(H)
    assert actor.device.resident_bytes == TRUNK + CRITIC
    assert critic.module(torch.ones(1, 4)).isfinite().all(), "the critic's trunk is whole"
    assert actor.engine.placement["params"] is H, "what only the other needs does not count as mine"
    with pytest.raises(OffloadedAccessError):
        actor.module(torch.ones(1, 4))
    critic.to(H)
    assert actor.device.resident_bytes == 0
    actor.to(D)
    assert actor.device.resident_bytes == TRUNK + ACTOR
    critic.to(D)
    assert equal(actor.contents() | critic.contents(), before)
    assert actor.pool.in_use_bytes == TRUNK + ACTOR + CRITIC, "one host copy of what is shared"


def test_a_change_by_one_is_seen_by_the_other_after_both_were_away(make: Make) -> None:
    actor, critic = actor_and_critic(make)
    for world in (actor, critic):
        world.to(H)
    actor.to(D)
    with torch.no_grad():
        actor.module[0].weight.fill_(3.0)
    actor.engine.forget_snapshots()
    actor.to(H)
    critic.to(D)
    assert critic.module[0].weight.eq(3.0).all()


def test_a_failed_move_of_one_leaves_the_other_as_it_was(make: Make, equal: Any) -> None:
    actor, critic = actor_and_critic(make)
    before = critic.contents()
    actor.to(H)
    critic.device.fail("free", 1, "after")
    with pytest.raises(Exception, match="rolled back"):
        critic.to(H)
    assert critic.device.resident_bytes == TRUNK + CRITIC
    assert equal(critic.contents(), before)
    assert actor.engine.refresh().placement["params"] is H


@pytest.mark.parametrize("other", [D, H])
def test_letting_one_go_gives_its_model_back_and_does_not_disturb_the_other(
    make: Make, equal: Any, other: Tier
) -> None:
    actor, critic = actor_and_critic(make)
    before = actor.contents() | critic.contents()
    actor.to(H)
    critic.to(other)
    actor.engine.let_go()
    assert actor.module(torch.ones(1, 4)).isfinite().all()
    assert all(type(p) is nn.Parameter for p in actor.module.parameters())
    critic.to(D)
    critic.to(H)
    critic.to(D)
    assert critic.module(torch.ones(1, 4)).isfinite().all()
    critic.engine.let_go()
    assert actor.device.units == {}
    assert actor.pool.in_use_bytes == 0
    assert equal(actor.contents() | critic.contents(), before)


def test_without_room_on_the_device_a_model_is_given_back_in_plain_memory(make: Make) -> None:
    world = make()
    world.step()
    world.backward()
    expected = {n: p.detach().clone() for n, p in world.module.named_parameters()}
    loss = world.loss().item()
    world.to(H)
    world.device.capacity = 10
    with pytest.raises(DeviceMemoryError):
        world.to(D)
    world.engine.let_go()
    assert all(torch.equal(p, expected[n]) for n, p in world.module.named_parameters())
    assert world.loss().item() == loss
    assert world.module.head.weight is world.module.embed.weight
    assert world.module.flipped.t().equal(world.module.body.weight)
    assert world.pool.in_use_bytes == 0
    assert world.device.units == {}
    world.optimizer.step()


def test_letting_go_returns_every_host_byte_after_a_trim(make: Make) -> None:
    world = make()
    world.step()
    world.to(H)
    world.engine.let_go()
    world.pool.trim()
    assert (world.pool.held_bytes, world.pool.in_use_bytes) == (0, 0)


def test_a_module_of_two_policies_can_be_called_whichever_brought_it_in(make: Make) -> None:
    device, pool = EmulatedDevice(), HostPool()
    module = nn.Linear(4, 4)
    first, second = (make(module, optimizer=None, device=device, pool=pool) for _ in range(2))
    first.engine.refresh()
    second.engine.refresh()
    first.to(H)
    second.to(H)
    for owner in (first, second):
        owner.to(D)
        assert first.engine.away(["params"]) == second.engine.away(["params"]) == []
        assert module(torch.ones(1, 4)).isfinite().all()
        owner.to(H)
        assert first.engine.away(["params"]) == second.engine.away(["params"]) == ["params"]
        with pytest.raises(OffloadedAccessError):
            module(torch.ones(1, 4))
