"""Every operation of every legal transition fails once, before, half-way and after, by an exception and by no memory.

After each failure: the outer mode stands, every byte is what it was, the policy is healthy, and the same again succeeds. The logs
of all of it are checked by the suite's own fixture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, get_args

import pytest
import torch
from rig import Make, Rig
from transitions import SCOPES, Case, cases, ready

import rl_session as rs
from rl_session.offload.device import Operation, Point

OPERATIONS = get_args(Operation)
POINTS = get_args(Point)
ERRORS: dict[str, type[BaseException] | None] = {"exception": None, "no memory": torch.OutOfMemoryError}


def attempt(rig: Rig, case: Case, arm: Callable[[], Any]) -> tuple[Any, bool]:
    """Make the transition with a fault armed; returns the fault, and whether an error came out of it."""
    with ExitStack() as outer:
        case.prepare(rig, outer)
        mode, contents = rig.policy.mode, rig.contents()
        with ExitStack() as inner:
            fault = arm()
            try:
                case.make(rig, inner)
                failed = False
            except rs.RLSessionError:
                failed = True
                assert rig.policy.mode is mode
            rig.device.heal()
            assert rig.policy.health == "ok"
            assert rig.contents() == contents
            if failed:
                case.make(rig, inner)  # the same again succeeds
                assert rig.contents() == contents
    return fault, failed


@pytest.mark.parametrize(
    ("kind", "live"), [("exception", False), ("no memory", True)], ids=["exception", "no memory, live gradients"]
)
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_a_failure_anywhere_on_the_way_in_is_undone(make: Make, case: Case, kind: str, live: bool) -> None:
    rig = ready(make, live=live)
    reached = 0
    for operation, point in itertools.product(OPERATIONS, POINTS):
        for k in itertools.count(1):
            fault, failed = attempt(
                rig, case, lambda o=operation, k=k, p=point: rig.device.fail(o, k=k, point=p, error=ERRORS[kind])
            )
            if not fault.fired:
                break
            reached += 1
            assert failed, (operation, k, point)
    with ExitStack() as stack:
        case.prepare(rig, stack)
        there = rig.on_device()
        case.make(rig, stack)
        moves = rig.on_device() != there
    assert reached or not moves
    if live:
        with rig.policy.training_mode():
            rig.model.zero_grad()


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rest", ["offloaded", "resident"])
def test_a_failure_anywhere_on_the_way_out_stays_pending_and_is_made_up_for(
    make: Make, rest: str, scope: str, kind: str
) -> None:
    rig = ready(make, live=False)
    rig.policy.switch(rest)
    contents, placement = rig.contents(), rig.policy.placement
    for operation, point in itertools.product(OPERATIONS, POINTS):
        for k in itertools.count(1):
            block = getattr(rig.policy, scope)()
            block.__enter__()
            fault = rig.device.fail(operation, k=k, point=point, error=ERRORS[kind])
            try:
                block.__exit__(None, None, None)
            except rs.RLSessionError:
                assert fault.fired
            rig.device.heal()
            assert rig.policy.health == "ok"
            assert rig.policy.mode.value == rest
            with getattr(rig.policy, scope)():  # makes up for the release first
                assert rig.contents() == contents
            assert rig.policy.placement == placement
            if not fault.fired:
                break
