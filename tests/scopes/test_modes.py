"""Every scope alone: where things are before, inside and after, for every base and release."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import rl_session as rs
from rl_session.lifecycle import Cell, Cells
from rl_session.offload import ledger as ledger_module
from rl_session.testing import EmulatedDevice

SCOPES = ["training", "logprob", "refit", "generation", "offloaded"]
DEVICE = {"params": "device", "buffers": "device", "grads": "none"}
HOST = {"params": "host", "buffers": "host", "grads": "none"}


def expected(name: str, base: str, release: str) -> dict[str, str]:
    """The mode table of the design, written down once more; gradients are consumed, optimizer state exists."""
    was = "device" if base == "resident" else "host"
    if release == "never":
        return DEVICE | {"optimizer": "device"}
    if release == "lazy":  # what fits never moves
        return DEVICE | {"optimizer": "device"}
    optimizer = {"training": "device", "refit": "host", "offloaded": "host"}.get(name, was)
    return (HOST if name == "offloaded" else DEVICE) | {"optimizer": optimizer}


@pytest.mark.parametrize("release", ["eager", "lazy", "never"])
@pytest.mark.parametrize("base", ["offloaded", "resident"])
@pytest.mark.parametrize("name", SCOPES)
def test_a_scope_enters_its_mode_and_leaves_it_for_the_one_before(
    name: str, base: str, release: str, make: Callable[..., Any]
) -> None:
    rig = make(base=base, release=release)
    policy, before = rig.policy, rig.state()
    rests = rs.Mode(base)
    assert (policy.mode, policy.resting_mode) == (rests, rests)
    rest_placement = policy.placement
    with rig.scope(name):
        assert policy.mode is rs.Mode(name)
        assert policy.resting_mode is rests
        assert rig.seen() == expected(name, base, release)
        seen = {k: v for k, v in policy.placement.as_text().items() if v != "none" and k in rig.seen()}
        assert seen == {k: v for k, v in rig.seen().items() if v != "none"}
        assert rig.contents() == before[3]
    assert rig.state() == before
    assert policy.placement == rest_placement


def test_attach_moves_nothing_and_the_first_exit_goes_to_the_base(make: Callable[..., Any]) -> None:
    rig = make(warm=False)
    assert rig.policy.mode is rs.Mode.RESIDENT
    assert rig.policy.resting_mode is rs.Mode.OFFLOADED
    assert rig.seen()["params"] == "device"
    assert rig.device.num_copies == 0
    with rig.policy.logprob_mode():
        assert rig.seen()["params"] == "device"
        assert rig.device.num_copies == 0
    assert rig.seen()["params"] == "host"
    assert rig.policy.mode is rs.Mode.OFFLOADED


@pytest.mark.parametrize("name", SCOPES)
def test_a_scope_that_is_never_entered_changes_nothing(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    before, num = rig.state(), len(rig.records())
    scope = rig.scope(name)
    assert "not entered" in repr(scope)
    del scope
    gc.collect()
    assert rig.state() == before
    assert len(rig.records()) == num


@pytest.mark.parametrize("name", SCOPES)
def test_a_scope_is_entered_once(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    scope = rig.scope(name)
    with scope:
        inside = rig.state()
        with pytest.raises(rs.ScopeReuseError, match="active"), scope:
            pytest.fail("entered twice")
        assert rig.state() == inside
    after = rig.state()
    with pytest.raises(rs.ScopeReuseError, match="exited"):
        scope.__enter__()
    assert rig.state() == after


def test_the_repr_tells_the_state(make: Callable[..., Any], here: Callable[..., str]) -> None:
    rig = make()
    scope = rig.policy.training_mode()
    assert repr(scope) == "<training_mode() of policy 'actor': not entered>"
    with scope:
        site = here(-1)
        assert repr(scope) == f"<training_mode() of policy 'actor': active at {site}>"
    assert repr(scope) == f"<training_mode() of policy 'actor': exited at {site}>"
    failing = rig.policy.training_mode()
    rig.device.fail("copy_in")
    with pytest.raises(rs.TransitionError), failing:
        pytest.fail("entered")
    assert repr(failing) == "<training_mode() of policy 'actor': failed to enter>"


@pytest.mark.parametrize("name", SCOPES)
def test_return_break_and_a_closed_generator_leave_the_scope(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()

    def returns() -> rs.Mode:
        with rig.scope(name):
            mode: rs.Mode = rig.policy.mode
            return mode

    def generates() -> Iterator[rs.Mode]:
        with rig.scope(name):
            yield rig.policy.mode

    assert returns() is rs.Mode(name)
    assert rig.state() == before
    for _ in range(2):
        with rig.scope(name):
            assert rig.policy.mode is rs.Mode(name)
            break
    assert rig.state() == before
    generator = generates()
    assert next(generator) is rs.Mode(name)
    generator.close()  # type: ignore[attr-defined]
    assert rig.state() == before


class UnprintableError(Exception):
    """An error that fails when it is printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, UnprintableError]
)
@pytest.mark.parametrize("name", SCOPES)
def test_the_error_of_the_body_is_the_one_raised(
    name: str, kind: type[BaseException], make: Callable[..., Any]
) -> None:
    rig = make()
    before = rig.state()
    error = kind("mine")
    with pytest.raises(kind) as caught:
        with rig.scope(name):
            raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert rig.state() == before
    assert rig.records("scope.exited")[-1].event.error.startswith(kind.__name__)


# -- order -----------------------------------------------------------------------------------------------------------


def test_an_outer_scope_left_first_closes_the_inner_one_and_says_so(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    outer, inner = rig.policy.training_mode(), rig.policy.logprob_mode()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(rs.ScopeOrderError, match=r"training_mode\(\) at test_modes.py:\d+ was left") as caught:
        outer.__exit__(None, None, None)
    assert "closed first: logprob_mode() at test_modes.py" in str(caught.value)
    assert rig.state() == before
    assert [r.event.mode for r in rig.records("scope.exited")[-2:]] == ["logprob", "training"]
    inner.__exit__(None, None, None)  # a no-op with a record
    assert rig.state() == before
    assert rig.records()[-1].event.code == "scope_already_closed"
    outer.__exit__(None, None, None)
    assert rig.state() == before
    with rig.policy.training_mode():
        assert rig.seen()["params"] == "device"


def test_three_levels_left_from_the_outside_restore_flags_and_autograd(make: Callable[..., Any]) -> None:
    rig = make()
    rig.model.train()
    before = rig.state()
    scopes = [rig.policy.training_mode(), rig.policy.logprob_mode(), rig.policy.offloaded()]
    for scope in scopes:
        scope.__enter__()
    with pytest.raises(rs.ScopeOrderError):
        scopes[0].__exit__(None, None, None)
    assert rig.state() == before


def test_a_misused_exit_stack_is_survived(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    with ExitStack() as outer_stack:
        with pytest.raises(rs.ScopeOrderError), ExitStack() as inner_stack:
            inner_stack.enter_context(rig.policy.training_mode())
            outer_stack.enter_context(rig.policy.logprob_mode())
        assert rig.state() == before
    assert rig.state() == before
    assert rig.records()[-1].event.code == "scope_already_closed"


def test_when_the_inner_exit_fails_too_the_order_error_is_a_note(make: Callable[..., Any]) -> None:
    rig = make()
    outer, inner = rig.policy.training_mode(), rig.policy.refit_mode()
    outer.__enter__()
    inner.__enter__()
    rig.device.fail("copy_in")  # the optimizer cannot come back into training
    with pytest.raises(rs.TransitionError) as caught:
        outer.__exit__(None, None, None)
    assert any("was left while scopes inside it were open" in note for note in caught.value.__notes__)
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.seen() == HOST | {"optimizer": "host"}


# -- switch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(rs.Mode))
def test_switch_changes_where_the_policy_rests(mode: rs.Mode, make: Callable[..., Any]) -> None:
    rig = make()
    contents = rig.contents()
    rig.policy.switch(mode)
    assert (rig.policy.mode, rig.policy.resting_mode) == (mode, mode)
    rest = rig.seen()
    on = "host" if mode is rs.Mode.OFFLOADED else "device"
    assert rest == {
        "params": on, "buffers": on, "grads": "none", "optimizer": "device" if mode == "training" else "host"
    }  # fmt: skip
    with rig.policy.training_mode():
        assert rig.seen()["optimizer"] == "device"
    assert rig.policy.mode is mode
    assert rig.seen() == rest
    assert rig.contents() == contents
    assert rig.policy._control.ownership._token is None


@pytest.mark.parametrize("name", SCOPES)
def test_switch_inside_a_scope_is_refused(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    with rig.scope(name):
        inside = rig.state()
        with pytest.raises(rs.ScopeError, match=r"switch\('resident'\) at test_modes.py:\d+ inside"):
            rig.policy.switch("resident")
        with pytest.raises(rs.ScopeError, match=r"offload\(\) at"):
            rig.policy.offload()
        assert rig.state() == inside


def test_switch_to_no_mode_names_the_modes(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    with pytest.raises(rs.ConfigError, match="'logprob'"):
        rig.policy.switch("evaluation")
    assert rig.state() == before


@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_offload_evicts_and_the_second_one_moves_nothing(release: str, make: Callable[..., Any]) -> None:
    rig = make(release=release, base="resident")
    contents = rig.contents()
    assert rig.seen()["optimizer"] == "device"
    rig.policy.offload()
    assert rig.seen() == HOST | {"optimizer": "host"}
    assert rig.policy.resting_mode is rs.Mode.OFFLOADED
    assert rig.device.resident_bytes == 0
    copies, state = rig.device.num_copies, rig.state()
    rig.policy.offload()
    assert rig.state() == state
    assert rig.device.num_copies == copies
    assert rig.contents() == contents


def test_a_failed_switch_leaves_the_resting_mode(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    rig.device.fail("copy_in", k=2, point="half")
    with pytest.raises(rs.TransitionError):
        rig.policy.switch("resident")
    assert rig.state() == before
    rig.policy.switch("resident")
    assert rig.seen()["params"] == "device"


def test_a_placement_that_no_mode_names_is_rested_in_until_the_next_switch(make: Callable[..., Any]) -> None:
    """What the shim does for the legacy calls: parameters away, optimizer left where it is."""
    rig = make(base="resident")
    parked = Cells(weights=Cell.HOST, grads=Cell.AS_IS, optimizer=Cell.AS_IS)
    rig.policy._control.switch(rs.Mode.OFFLOADED, "finish_inference()", "loop.py:1", cells=parked)
    assert rig.seen() == HOST | {"optimizer": "device"}
    with rig.policy.training_mode():
        assert rig.seen() == DEVICE | {"optimizer": "device"}
    assert rig.seen() == HOST | {"optimizer": "device"}
    with rig.policy.offloaded():
        assert rig.seen() == HOST | {"optimizer": "host"}
    assert rig.seen() == HOST | {"optimizer": "device"}, "what the call left where it was comes back there"
    rig.policy.switch("offloaded")
    assert rig.seen() == HOST | {"optimizer": "host"}


# -- re-entry --------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Many small parameters."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(num)])


@pytest.mark.parametrize("num", [10, 2000])
@pytest.mark.parametrize("name", SCOPES)
def test_entering_the_mode_in_effect_costs_nothing_and_writes_two_records(
    name: str, num: int, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(model=Wide(num), warm=False)
    rig.policy.offload()
    with rig.scope(name):
        mode, placement, num_records = rig.policy.mode, rig.policy._control.frames[-1].placement, len(rig.records())
        calls: list[str] = []
        group = rig.policy._control.group
        monkeypatch.setattr(ledger_module, "scan", lambda *a, **k: calls.append("scan"))
        monkeypatch.setattr(gc, "collect", lambda *a: calls.append("gc"))
        monkeypatch.setattr(EmulatedDevice, "_copy", lambda *a: calls.append("copy"))
        monkeypatch.setattr(EmulatedDevice, "empty_cache", lambda *a: calls.append("empty_cache"))
        monkeypatch.setattr(nn.Module, "modules", lambda *a: calls.append("modules"))
        monkeypatch.setattr(nn.Module, "named_modules", lambda *a, **k: calls.append("modules"))
        monkeypatch.setattr(nn.Module, "parameters", lambda *a, **k: calls.append("parameters"))
        monkeypatch.setattr(group, "call", lambda *a, **k: calls.append("rpc"))
        with rig.scope(name):
            assert rig.policy.mode is mode
            assert rig.policy._control.frames[-1].placement is placement
        monkeypatch.undo()
        assert calls == []
        new = rig.records()[num_records:]
        assert [record.name for record in new] == ["scope.entered", "scope.exited"]
        assert (new[0].event.depth, new[0].event.outer_mode) == (1, mode.value)
