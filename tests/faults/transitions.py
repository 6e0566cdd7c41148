"""Every legal transition of a policy, as something to prepare and something to do; what the exhaustive tests go through."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import attrs
from rig import Make, Rig, make_batch

import rl_session as rs
from rl_session.lifecycle import NESTING

SCOPES = ("training_mode", "logprob_mode", "refit_mode", "generation_mode", "offloaded")
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
"""Whether every point is tried; else a sample that covers each transition."""


@attrs.frozen
class Case:
    """One transition: what to do before it, and how to make it."""

    name: str
    prepare: Callable[[Rig, ExitStack], object]
    make: Callable[[Rig, ExitStack], object]


def entering(scope: str) -> Callable[[Rig, ExitStack], object]:
    return lambda rig, stack: stack.enter_context(getattr(rig.policy, scope)())


def mode_of(scope: str) -> rs.Mode:
    return rs.Mode(scope.removesuffix("_mode"))


def cases() -> Iterator[Case]:
    """Every scope from either resting mode, every legal nesting, and every switch between three resting modes."""
    for rest, scope in itertools.product(("offloaded", "resident"), SCOPES):

        def at_rest(rig: Rig, stack: ExitStack, rest: str = rest) -> None:
            rig.policy.switch(rest)

        yield Case(f"{rest}, enter {scope}", at_rest, entering(scope))
    for outer, inner in itertools.permutations(SCOPES, 2):
        if mode_of(inner) in NESTING[mode_of(outer)]:
            yield Case(f"{mode_of(outer)}, enter {inner}", entering(outer), entering(inner))
    for start, end in itertools.permutations(("offloaded", "resident", "logprob"), 2):
        yield Case(
            f"switch {start} to {end}",
            lambda rig, stack, start=start: rig.policy.switch(start),
            lambda rig, stack, end=end: rig.policy.switch(end),
        )


def ready(make: Make, *, live: bool = False, **options: object) -> Rig:
    """A policy that has trained once, and whose optimizer leaves for log-probabilities."""
    flags = rs.OffloadConfig(offload_optimizer_for_logprob=True)
    rig = make(offload=flags, **options)
    rs.InProcessEngine(rig.policy, max_new_tokens=1, seed=0)
    with rig.policy.training_mode():
        rig.train()
        if live:
            rig.model(make_batch()["input_ids"]).sum().backward()
    return rig
