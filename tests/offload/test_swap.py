"""Other contents for a while: the live bytes are safe before, and back afterwards, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rl_session.errors import FaultedError, TransitionError, UnsupportedError
from rl_session.lifecycle import Tier
from rl_session.offload.device import InjectedFault
from rl_session.offload.swap import capture, replaced

D, H = Tier.DEVICE, Tier.HOST
Make = Callable[..., Any]
WEIGHTS = ("params", "buffers")


def trained(make: Make) -> tuple[Any, Any]:
    """A world that has stepped since its contents were captured."""
    world = make()
    contents = capture(world.engine, WEIGHTS)
    world.step()
    return world, contents


def test_the_captured_contents_stand_in_inside_and_the_live_ones_are_back_after(make: Make, equal: Any) -> None:
    world = make()
    first = {n: p.detach().clone() for n, p in world.module.named_parameters()}
    contents = capture(world.engine, WEIGHTS)
    world.step()
    before = world.contents()
    with replaced(world.engine, contents, WEIGHTS, stays_valid=False) as copied:
        assert copied > 0
        assert all(torch.equal(p, first[n]) for n, p in world.module.named_parameters())
    assert equal(world.contents(), before)


def test_contents_can_be_captured_while_the_weights_are_away(make: Make, equal: Any) -> None:
    world = make()
    there = {name: buffer.data.clone() for name, buffer in capture(world.engine, WEIGHTS).items()}
    world.to(H)
    away = {name: buffer.data for name, buffer in capture(world.engine, WEIGHTS).items()}
    assert equal(there, away)


def test_a_live_graph_survives_a_swap(make: Make) -> None:
    world, contents = trained(make)
    loss = world.loss()
    with replaced(world.engine, contents, WEIGHTS, stays_valid=False):
        pass
    loss.backward()


def test_an_error_in_the_block_puts_the_live_weights_back_and_wins(make: Make, equal: Any) -> None:
    world, contents = trained(make)
    before = world.contents()
    with pytest.raises(KeyError, match="mine"), replaced(world.engine, contents, WEIGHTS, stays_valid=False):
        raise KeyError("mine")
    assert equal(world.contents(), before)


@pytest.mark.parametrize("point", ["before", "half", "after"])
@pytest.mark.parametrize("operation", ["copy_out", "copy_in", "synchronize"])
@pytest.mark.parametrize(("error", "told"), [(InjectedFault, TransitionError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_fault_anywhere_leaves_the_live_weights(
    make: Make, equal: Any, operation: Any, point: Any, error: Any, told: Any
) -> None:
    world, contents = trained(make)
    before = world.contents()
    fired = 0
    for k in range(1, 40):
        world.engine.mark_dirty()
        fault = world.device.fail(operation, k, point, error)
        try:
            with replaced(world.engine, contents, WEIGHTS, stays_valid=True):
                pass
        except told as failure:
            assert fault.fired
            assert failure is fault.error or failure.__cause__ is fault.error
        fired += fault.fired
        assert equal(world.contents(), before), k
        if not fault.fired:
            break
    assert fired >= 3 if operation != "copy_out" else fired >= 1
    world.device.heal()
    world.to(H)
    assert equal(world.contents(), before)


@pytest.mark.parametrize("error", [InjectedFault, KeyboardInterrupt])
def test_when_the_live_weights_cannot_be_written_back_they_are_safe_and_settling_brings_them_home(
    make: Make, equal: Any, error: Any
) -> None:
    world, contents = trained(make)
    before = world.contents()
    with (
        pytest.raises(FaultedError, match="could not be put back") as caught,
        replaced(world.engine, contents, WEIGHTS, stays_valid=False),
    ):
        world.device.fail("copy_in", 2, "half", error)
        world.device.fail("copy_in", 3, "half", error)
    assert caught.value.remedy == "policy.recover()"
    assert not equal(world.contents(), before)
    world.engine.settle()
    assert equal(world.contents(), before)


def test_a_model_that_is_not_the_captured_one_is_refused_by_name_and_untouched(make: Make, equal: Any) -> None:
    world, contents = trained(make)
    world.module.body = nn.Linear(4, 5)
    before = world.contents()
    with (
        pytest.raises(UnsupportedError, match=r"body\.weight"),
        replaced(world.engine, contents, WEIGHTS, stays_valid=False),
    ):
        pass
    assert equal(world.contents(), before)


def test_copies_made_on_the_way_are_trusted_afterwards_only_in_a_read_only_mode(make: Make) -> None:
    for stays_valid in (True, False):
        world, contents = trained(make)
        with replaced(world.engine, contents, WEIGHTS, stays_valid=stays_valid):
            pass
        clean = world.engine.clean_bytes(world.engine.refresh())
        assert (clean > 0) == stays_valid
        world.to(H)
