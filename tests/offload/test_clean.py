"""A host copy stands in for a device copy only when nothing, by any road, can have changed the device copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_session.errors import IntegrityError
from rl_session.lifecycle import Tier

D, H = Tier.DEVICE, Tier.HOST
Make = Callable[..., Any]


def home_again(make: Make, **options: Any) -> Any:
    """A world that has been away and is on the device with host copies."""
    world = make(**options)
    world.step()
    world.to(H)
    world.to(D)
    return world


def test_clean_storages_are_dropped_and_not_copied(make: Make, equal: Any) -> None:
    world = home_again(make)
    before, copied = world.contents(), world.device.bytes_out
    total = sum(data.numel() for data in before.values())
    assert world.engine.clean_bytes(world.engine.refresh()) == total
    report = world.to(H)
    assert world.device.bytes_out == copied
    assert (report.bytes_moved, report.bytes_elided) == (0, total)
    assert world.device.resident_bytes == 0
    world.to(D)
    assert equal(world.contents(), before)


def test_a_second_cycle_allocates_no_host_memory(make: Make) -> None:
    world = home_again(make)
    count, held = world.pool.num_allocations, world.pool.held_bytes
    for _ in range(3):
        world.step()
        world.to(H)
        world.to(D)
    assert (world.pool.num_allocations, world.pool.held_bytes) == (count, held)


def bump(world: Any) -> None:
    with torch.no_grad():
        world.module.body.bias.add_(1.0)


def bump_through_alias(world: Any) -> None:
    world.module.body.bias.detach().add_(1.0)


def new_alias(world: Any) -> None:
    world.module.also = world.module.body.bias.detach()


def marked(world: Any) -> None:
    world.engine.mark_dirty()


def forgotten(world: Any) -> None:
    world.engine.forget_snapshots()


def fused_step(world: Any) -> None:
    versions = [p._version for p in world.module.parameters()]
    world.step()
    trained = [p for p in world.module.parameters() if p.requires_grad]
    assert [p._version for p in world.module.parameters()] == versions, "a fused step bumps no version"
    assert trained


@pytest.mark.parametrize("change", [bump, bump_through_alias, new_alias])
def test_a_sign_of_change_forces_a_copy_of_that_storage_only(make: Make, change: Callable[[Any], None]) -> None:
    world = home_again(make)
    change(world)
    before, copied = world.contents(), world.device.bytes_out
    world.to(H)
    assert world.device.bytes_out - copied == 16
    assert world.contents()["params:body.bias"].equal(before["params:body.bias"])


@pytest.mark.parametrize("change", [marked, forgotten])
def test_what_the_library_knows_of_forces_a_copy_of_everything(
    make: Make, equal: Any, change: Callable[[Any], None]
) -> None:
    world = home_again(make)
    change(world)
    before, copied = world.contents(), world.device.bytes_out
    world.to(H)
    assert world.device.bytes_out - copied == sum(data.numel() for data in before.values())
    assert equal(world.contents(), before)


def test_a_fused_step_bumps_no_version_and_still_forces_a_copy(make: Make, equal: Any) -> None:
    world = home_again(make, fused=True)
    fused_step(world)
    before, copied = world.contents(), world.device.bytes_out
    world.to(H)
    assert world.device.bytes_out > copied
    world.to(D)
    assert equal(world.contents(), before)


def test_a_write_past_every_sign_is_found_by_its_checksum_and_nothing_is_lost(make: Make, equal: Any) -> None:
    world = home_again(make)
    world.module.body.bias.data.mul_(2.0)
    before, state = world.contents(), world.freeze()
    with pytest.raises(IntegrityError, match=r"body\.bias \(16 bytes\) changed in a mode") as caught:
        world.to(H)
    assert "the next attempt copies" in caught.value.remedy
    assert world.freeze() == state
    assert equal(world.contents(), before)
    copied = world.device.bytes_out
    world.to(H)
    assert world.device.bytes_out - copied == 16, "the storage that lied is copied now"
    world.to(D)
    assert equal(world.contents(), before)


def test_a_failed_offload_makes_no_copy_trusted(make: Make, equal: Any) -> None:
    world = home_again(make)  # with host buffers from before, which it keeps
    world.engine.mark_dirty()
    world.device.fail("free", 4, "before")
    with pytest.raises(Exception, match="rolled back"):
        world.to(H)
    assert world.engine.clean_bytes(world.engine.refresh()) == 0
    world.module.body.bias.data.mul_(2.0)
    before = world.contents()
    world.to(H)
    world.to(D)
    assert equal(world.contents(), before)


def test_writing_through_the_engine_makes_the_host_copy_the_truth_while_away_and_stale_while_home(make: Make) -> None:
    world = home_again(make)
    bias = world.module.body.bias
    world.engine.writable(bias).fill_(5.0)
    assert bias.tolist() == [5.0] * 4
    world.to(H)
    world.engine.writable(bias).fill_(6.0)
    world.engine.forget_snapshots()
    assert world.engine.readable(bias).tolist() == [6.0] * 4
    world.to(D)
    assert bias.tolist() == [6.0] * 4


def test_a_snapshot_restores_what_a_failed_step_wrote_and_only_until_a_step_succeeds(make: Make, equal: Any) -> None:
    world = home_again(make)
    before = world.contents()
    world.engine.begin_snapshots()
    world.engine.mark_dirty()
    with torch.no_grad():
        world.module.body.bias.fill_(torch.nan)
    assert world.engine.restore_snapshot(["params", "optimizer"])
    assert equal(world.contents(), before)
    world.step()
    assert not world.engine.restore_snapshot(["params"])


def test_contents_are_readable_wherever_they_are_and_strided_as_the_tensor(make: Make) -> None:
    world = make()
    expected = world.module.flipped.clone()
    for tier in (D, H):
        world.to(tier)
        seen = world.engine.readable(world.module.flipped)
        assert torch.equal(seen, expected)
        assert seen.stride() == (1, 4)
