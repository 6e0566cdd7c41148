"""Faults 57 to 64: exceptions, nesting, partial failure."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from rig import Make, Rig, make_batch, nll

import rl_session as rs
from rl_session.lifecycle import NESTING, Mode

SCOPES = {
    "training": "training_mode",
    "logprob": "logprob_mode",
    "refit": "refit_mode",
    "offloaded": "offloaded",
}


def scope(rig: Rig, name: str) -> Any:
    return getattr(rig.policy, SCOPES[name])()


class BodyError(Exception):
    """What a loop raises."""


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("base", ["offloaded", "resident"])
@pytest.mark.parametrize("where", ["body", "way in", "way out", "body and way out"])
def test_row_57_whatever_fails_the_placement_is_defined(make: Make, name: str, base: str, where: str) -> None:
    """Others: an exception in the block, or in a move, leaves the model somewhere: there is no `finally`.

    Here: after a failure in the block, on the way in or on the way out, the outer mode stands and the block's error is on top.
    By: a scope always closes, and every transition is all or nothing (`driver/scopes`, `offload/transaction`).
    """
    rig = make(base=base)
    rig.policy.switch(base)
    with rig.policy.training_mode():
        rig.train()
    before = rig.contents()
    operation = "copy_out" if (base, name) == ("resident", "offloaded") else "allocate"
    fault = rig.device.fail(operation) if where == "way in" else None
    error: BaseException | None = None
    try:
        with scope(rig, name):
            if "out" in where:
                fault = rig.device.fail("allocate" if (base, name) == ("resident", "offloaded") else "free")
            if "body" in where:
                raise BodyError
    except BaseException as raised:
        error = raised
    rig.device.heal()
    assert rig.policy.health == "ok"
    assert rig.policy.mode.value == base
    if "body" in where:
        assert type(error) is BodyError
    elif fault is not None and fault.fired:
        assert isinstance(error, rs.RLSessionError)
    if "and" in where and fault is not None and fault.fired:
        assert error is not None
        assert "while leaving" in " ".join(getattr(error, "__notes__", ()))
    assert rig.contents() == before
    with scope(rig, name):
        assert rig.contents() == before
    expected = [] if base == "offloaded" else rig.on_device()
    assert rig.on_device() == expected


CHAINS = [
    chain
    for length in (2, 3)
    for chain in itertools.product(SCOPES, repeat=length)
    if all(Mode(inner) in NESTING[Mode(outer)] for outer, inner in itertools.pairwise(chain))
]


@pytest.mark.parametrize("base", ["offloaded", "resident"])
def test_row_58_leaving_restores_what_was_not_a_constant(make: Make, base: str) -> None:
    """Others: the exit of an inner context undoes the outer one.

    Here: for every legal nesting up to depth 3, after each exit everything is where it was before that entry.
    By: a stack of frames, each with the placement it restores (`driver/scopes`).
    """
    rig = make(base=base)
    with rig.policy.training_mode():
        rig.train()
    assert len(CHAINS) > 20
    for chain in CHAINS:
        states = []
        opened = []
        for name in chain:
            states.append((rig.policy.mode, rig.policy.placement, rig.on_device(), rig.model.training))
            opened.append(scope(rig, name))
            opened[-1].__enter__()
        for block in reversed(opened):
            block.__exit__(None, None, None)
            assert (rig.policy.mode, rig.policy.placement, rig.on_device(), rig.model.training) == states.pop(), chain


def test_row_59_a_failed_entry_leaves_no_trace(make: Make) -> None:
    """Others: a depth counter is raised before the move that then fails, and the next entry does nothing.

    Here: after a failed entry no scope is open, and the next entry really brings the weights in.
    By: a frame is pushed only after its transition committed (`driver/scopes.enter`).
    """
    rig = make()
    rig.policy.offload()
    rig.device.fail("copy_in")
    with pytest.raises(rs.TransitionError), rig.policy.logprob_mode():
        pass
    assert rig.policy.mode is Mode.OFFLOADED
    copied = rig.device.bytes_in
    with rig.policy.logprob_mode():
        assert rig.device.bytes_in > copied
        rig.policy.get_logprobs(make_batch())
    assert rig.on_device() == []


def test_row_60_the_way_out_undoes_what_the_way_in_did_and_no_more(make: Make) -> None:
    """Others: an exit reloads what its entry never moved.

    Here: an optimizer that was on the device when the scope opened is there when it closes; one that was away stays away.
    By: exit restores the stored placement of entry (`lifecycle.restore`).
    """
    rig = make(offload=rs.OffloadConfig(offload_optimizer_for_logprob=True), base="resident")
    rig.train()
    with rig.policy.logprob_mode():
        assert not any(t.untyped_storage().nbytes() for t in rig.optimizer_tensors())
    assert all(t.untyped_storage().nbytes() for t in rig.optimizer_tensors())
    rig.policy.offload()
    copied = rig.device.bytes_in
    with rig.policy.logprob_mode():
        weights = rig.device.bytes_in - copied
    assert not any(t.untyped_storage().nbytes() for t in rig.optimizer_tensors())
    assert rig.device.bytes_in - copied == weights


POINTS = ("before", "half", "after")


@pytest.mark.parametrize("point", POINTS)
def test_row_62_a_failure_at_any_storage_can_be_tried_again(make: Make, point: Any) -> None:
    """Others: a host copy is dropped before the wake that needs it has succeeded.

    Here: a move may fail at every storage and at every point of it; a retry brings identical bytes.
    By: each byte exists somewhere at every instant of a move (`offload/transaction`).
    """
    rig = make()
    with rig.policy.training_mode():
        rig.train()
    rig.device.poison()
    before = rig.contents()
    fired = 0
    for operation in ("allocate", "copy_in", "copy_out", "free"):
        for k in itertools.count(1):
            fault = rig.device.fail(operation, k=k, point=point)
            try:
                with rig.policy.training_mode():
                    pass
            except rs.RLSessionError:
                fired += 1
            rig.device.heal()
            assert rig.policy.health == "ok"
            with rig.policy.training_mode():
                assert rig.contents() == before
            if not fault.fired:
                break
    assert fired >= 20


def test_row_64_nobody_reads_before_the_copy_has_ended(make: Make) -> None:
    """Others: the CPU reads a host buffer while the copy into it is still under way.

    Here: with copies that happen only when awaited, a reader right after a scope sees the right bytes.
    By: one synchronisation a transition, before the device copy is freed (`offload/transaction`).
    """
    rig = make()
    expected = {name: value.clone() for name, value in rig.model.state_dict().items()}
    rig.device.delay()
    rig.device.poison()
    rig.policy.offload()
    served = rig.policy.state_dict()
    assert all(torch.equal(served[name], expected[name]) for name in expected)
    with rig.policy.training_mode():
        assert all(torch.equal(value, expected[name]) for name, value in rig.model.state_dict().items())
        rig.policy.train(make_batch(), nll)
