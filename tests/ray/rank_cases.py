"""Every legal transition of a policy on several ranks, and the faults that one of them may have in it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, get_args

import torch

from rl_session.offload.device import Operation, Point

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
OPERATIONS, POINTS = get_args(Operation), get_args(Point)
ERRORS: dict[str, type[BaseException] | None] = {"exception": None, "no memory": torch.OutOfMemoryError}
SCOPES = ("training_mode", "logprob_mode", "refit_mode", "offloaded")


def cases() -> Iterator[tuple[str, Callable[[Any, ExitStack], object], Callable[[Any, ExitStack], object]]]:
    """Name, what to do before, and the transition."""

    def entering(scope: str) -> Callable[[Any, ExitStack], object]:
        return lambda policy, stack: stack.enter_context(getattr(policy, scope)())

    def switching(mode: str) -> Callable[[Any, ExitStack], object]:
        return lambda policy, stack: policy.switch(mode)

    for rest, scope in itertools.product(("offloaded", "resident"), SCOPES):
        yield f"{rest}, enter {scope}", switching(rest), entering(scope)
    for outer, inner in itertools.combinations(SCOPES, 2):  # each may be opened inside those before it
        yield f"{outer.removesuffix('_mode')}, enter {inner}", entering(outer), entering(inner)
    for start, end in itertools.permutations(("offloaded", "resident", "logprob"), 2):
        yield f"switch {start} to {end}", switching(start), switching(end)


def faults(number: int) -> Iterator[tuple[int, str, Any, str, int]]:
    """Rank, operation, point, kind and k of each fault; by default each operation at each point, the rest in turns."""
    if THOROUGH:
        yield from itertools.product((0, 1), OPERATIONS, POINTS, ERRORS, (1, 2, 3, 5, 8))
        return
    kinds = list(ERRORS)
    for index, (operation, point) in enumerate(itertools.product(OPERATIONS, POINTS), number):
        yield index % 2, operation, point, kinds[(index // 2) % 2], 1 + (index // 4) % 2
