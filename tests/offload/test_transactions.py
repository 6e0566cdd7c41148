"""All or nothing: whatever fails, wherever it fails, everything is where it was and no byte has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_session.errors import (
    DeviceMemoryError,
    FaultedError,
    HostMemoryError,
    IntegrityError,
    OffloadedAccessError,
    RLSessionError,
    TransitionError,
)
from rl_session.lifecycle import Component, Tier
from rl_session.offload.device import EmulatedDevice, InjectedFault
from rl_session.offload.host_pool import HostPool

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NONE
Make = Callable[..., Any]

ERRORS: list[tuple[type[BaseException], type[BaseException]]] = [
    (InjectedFault, TransitionError),
    (torch.OutOfMemoryError, DeviceMemoryError),
    (KeyboardInterrupt, KeyboardInterrupt),
]
POINTS = ["before", "half", "after"]


def open_step(make: Make) -> Any:
    """A world with weights, optimizer state and live gradients on the device."""
    world = make()
    world.step()
    world.backward()
    return world


def attempt(world: Any, goal: Tier) -> BaseException | None:
    """Go to ``goal``; what went wrong, if anything."""
    try:
        world.to(goal)
    except BaseException as error:
        return error
    return None


def strike(world: Any, goal: Tier, operation: str, point: str, raised: Any, caught: Any, equal: Any) -> int:
    """Fail every storage of ``operation`` in turn on the way to ``goal``; returns how many there were."""
    before, state = world.contents(), world.freeze()
    k = 0
    while True:
        k += 1
        fault = world.device.fail(operation, k, point, raised)
        error = attempt(world, goal)
        if error is None:
            assert not fault.fired, "an error was swallowed"
            world.device.heal()
            return k - 1
        assert fault.fired, f"another error: {error!r}"
        assert type(error) is caught
        if isinstance(error, RLSessionError):
            assert raised.__name__ in error.cause
            assert error.remedy
        assert world.freeze() == state
        assert equal(world.contents(), before)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("raised", "caught"), ERRORS)
@pytest.mark.parametrize("operation", ["copy_out", "free", "synchronize"])
def test_a_failed_offload_leaves_everything_on_the_device(
    make: Make, equal: Any, operation: str, point: str, raised: Any, caught: Any
) -> None:
    world = open_step(make)
    before = world.contents()
    struck = strike(world, H, operation, point, raised, caught, equal)
    assert struck == (1 if operation == "synchronize" else len(before))
    assert set(world.scan().values()) == {0}, "the attempt without a fault succeeded"
    assert world.device.resident_bytes == 0
    assert equal(world.contents(), before)
    world.to(D)
    assert equal(world.contents(), before)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("raised", "caught"), ERRORS)
@pytest.mark.parametrize("operation", ["copy_in", "allocate", "synchronize"])
def test_a_failed_onload_leaves_everything_on_the_host(
    make: Make, equal: Any, operation: str, point: str, raised: Any, caught: Any
) -> None:
    world = open_step(make)
    before = world.contents()
    world.to(H)
    struck = strike(world, D, operation, point, raised, caught, equal)
    assert struck == (1 if operation == "synchronize" else len(before))
    assert equal(world.contents(), before)
    assert world.device.resident_bytes == sum(data.numel() for data in before.values())
    assert world.module.body.weight.isfinite().all()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("operation", ["copy_out", "free", "synchronize", "allocate", "copy_in"])
def test_a_transition_that_goes_both_ways_is_undone_both_ways(
    make: Make, equal: Any, operation: Any, point: Any
) -> None:
    world = open_step(make)
    world.to(D, params=H, buffers=H)
    before, state = world.contents(), world.freeze()
    for k in range(1, 20):
        fault = world.device.fail(operation, k, point)
        try:
            world.to(H, params=D, buffers=D)
        except TransitionError:
            assert world.freeze() == state
            assert equal(world.contents(), before)
        if not fault.fired:
            break
    assert 2 <= k < 20
    world.device.heal()
    assert world.engine.placement["optimizer"] is H
    assert equal(world.contents(), before)


@pytest.mark.parametrize("after", ["copy_out", "free", "copy_in", "allocate", "synchronize"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("goal", [H, D])
def test_when_putting_back_fails_too_it_is_faulted_and_settling_brings_every_byte_back(
    make: Make, equal: Any, goal: Tier, after: Any, point: Any
) -> None:
    first = {H: ("free", 3, "after"), D: ("copy_in", 3, "half")}[goal]
    world = open_step(make)
    before = world.contents()
    world.to(D if goal is H else H)
    world.device.fail(*first)
    counted = 0
    for k in range(1, 40):
        fault = world.device.fail(after, k, point)
        error = attempt(world, goal)
        if isinstance(error, FaultedError):
            assert fault.fired
            assert error.remedy == "policy.recover()"
            assert "safe in a host buffer" in str(error)
            assert "InjectedFault" in error.cause
            counted += 1
            world.device.heal()
            world.engine.settle()
            assert equal(world.contents(), before)
            shown = [p for p in world.module.parameters() if type(p) is torch.nn.Parameter]
            assert all(p.isfinite().all() for p in shown), "what can be touched has its bytes"
            world.to(D)
            assert equal(world.contents(), before)
            assert world.module.body.weight.isfinite().all()
            world.to(D if goal is H else H)
            world.device.fail(*first)
        else:
            assert isinstance(error, TransitionError)
            world.device.heal()
            world.device.fail(*first)
        if not fault.fired:
            break
    if (goal, after) in {(H, "copy_in"), (H, "allocate"), (H, "synchronize"), (D, "free"), (D, "synchronize")}:
        assert counted >= 1


def test_while_faulted_every_hidden_tensor_still_says_so_instead_of_showing_poison(make: Make) -> None:
    world = open_step(make)
    world.device.fail("free", 2, "after")
    world.device.fail("allocate", 1, "before")
    with pytest.raises(FaultedError):
        world.to(H)
    away = [t for t in world.tensors().values() if type(t).__name__.startswith("Away")]
    assert away
    for tensor in away:
        with pytest.raises(OffloadedAccessError):
            tensor.sum()
    world.engine.settle()
    world.to(D)
    assert all(t.float().isfinite().all() for t in world.tensors().values())


def test_out_of_device_memory_names_what_was_needed_and_free_and_the_rest_stands(make: Make, equal: Any) -> None:
    device = EmulatedDevice()
    world = make(device=device)
    world.step()
    before, total = world.contents(), device.resident_bytes
    world.to(H)
    device.capacity = total - 1
    with pytest.raises(DeviceMemoryError) as caught:
        world.to(D)
    text = str(caught.value)
    assert f"needed: {total} bytes" in text
    assert f"free now: {total - 1} bytes" in text
    assert "other.offload()" in caught.value.remedy
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert device.resident_bytes == 0
    assert equal(world.contents(), before)
    device.capacity = total
    world.to(D)
    assert equal(world.contents(), before)
    assert device.peak == total


def test_out_of_host_memory_moves_nothing(make: Make, equal: Any) -> None:
    world = make(pool=HostPool(budget=100))
    world.step()
    before, state = world.contents(), world.freeze()
    with pytest.raises(HostMemoryError, match="do not fit"):
        world.to(H)
    assert world.freeze() == state
    assert equal(world.contents(), before)


def test_the_peak_of_a_swap_is_that_of_its_ends_because_offloads_come_first(make: Make) -> None:
    world = make()
    world.step()
    world.to(H, params=D, buffers=D)
    ends = [world.device.resident_bytes]
    world.device.peak = 0
    world.to(D, params=H, buffers=H)
    ends.append(world.device.resident_bytes)
    assert world.device.peak <= max(ends)


def test_a_copy_that_arrives_with_other_bytes_is_found_and_undone(make: Make, equal: Any) -> None:
    world = make()
    world.step()
    before = world.contents()
    world.to(H)
    unit = next(u for u in world.device.units.values() if u.component == "params")
    unit.host.data[0] ^= 1
    with pytest.raises(IntegrityError, match="came back with other bytes"):
        world.to(D)
    unit.host.data[0] ^= 1
    world.to(D)
    assert equal(world.contents(), before)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("k", [1, 2])
def test_a_failed_free_of_a_dropped_flat_gradient_buffer_leaves_it_usable(make: Make, point: Any, k: int) -> None:
    world = make()
    for parameter in (world.module.body.weight, world.module.body.bias):
        parameter.main_grad = torch.full_like(parameter, 3.0)
    world.consume()
    world.engine.stamps.consume(p.main_grad for p in (world.module.body.weight, world.module.body.bias))
    before = world.freeze()
    fault = world.device.fail("free", k, point)
    with pytest.raises(TransitionError):
        world.to(D, grads=N)
    assert fault.fired
    assert world.freeze() == before
    for parameter in (world.module.body.weight, world.module.body.bias):
        assert set(parameter.main_grad.flatten().tolist()) <= {0.0, 3.0}, "kept, or back as zeros; never poison"
    world.to(D, grads=N)
    assert world.engine.placement[Component.GRADS] is N


@pytest.mark.parametrize("operation", ["allocate", "copy_in"])
def test_gradients_on_the_host_survive_an_onload_that_fails_beside_their_drop(
    make: Make, equal: Any, operation: Any
) -> None:
    world = open_step(make)
    world.to(H)
    before, state = world.contents(), world.freeze()
    world.device.fail(operation, 2)
    with pytest.raises(TransitionError):
        world.to(D, grads=N)
    assert world.freeze() == state
    assert equal(world.contents(), before)
    report = world.to(D, grads=N)
    assert report.dropped_bytes == sum(d.numel() for n, d in before.items() if n.startswith("grads:"))
    assert all(p.grad is None for p in world.module.parameters())


def test_after_any_failure_training_goes_on_bit_for_bit(make: Make) -> None:
    plain, struck = make(), make()
    for turn in range(4):
        plain.step()
        struck.step()
        for goal, operation in ((H, "free"), (D, "copy_in")):
            struck.device.fail(operation, 1 + turn, "half")
            with pytest.raises(TransitionError):
                struck.to(goal)
            struck.to(goal)
    assert all(torch.equal(a, b) for a, b in zip(plain.module.parameters(), struck.module.parameters(), strict=True))
