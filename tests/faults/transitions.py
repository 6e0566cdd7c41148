"""Every legal transition of a policy, as something to prepare and something to do; what the exhaustive tests go through."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import attrs
from rig import Make, Rig, make_batch

import rl_session as rs

SCOPES = ("training_mode", "logprob_mode", "refit_mode", "offloaded")
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


def cases() -> Iterator[Case]:
    for rest, scope in itertools.product(("offloaded", "resident"), SCOPES):

        def at_rest(rig: Rig, stack: ExitStack, rest: str = rest) -> None:
            rig.policy.switch(rest)

        yield Case(f"{rest}, enter {scope}", at_rest, entering(scope))
    for scope in ("logprob_mode", "refit_mode", "offloaded"):
        yield Case(f"training, enter {scope}", entering("training_mode"), entering(scope))
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
    with rig.policy.training_mode():
        rig.train()
        if live:
            rig.model(make_batch()["input_ids"]).sum().backward()
    return rig
