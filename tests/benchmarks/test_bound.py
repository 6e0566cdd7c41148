"""The lower bound is what trying everything finds, and both bounds hold for schedules that a person can check."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from bytes_moved.bound import InfeasibleError, Phase, fractional, whole
from bytes_moved.phases import TRACES, capacity_of
from bytes_moved.sizes import BUDGETS, RECIPES, SHAPES, sizes_of
from hypothesis import given, settings
from hypothesis import strategies as st

INF = np.inf


def phase(name: str, *, reads: str = "", writes: str = "", creates: str = "") -> Phase:
    return Phase(name, *(frozenset(names.split()) for names in (reads, writes, creates)))


# -- everything that could be done -----------------------------------------------------------------------------------------

HOST, CLEAN, DIRTY, LOST = range(4)
"""LOST: its content is nowhere any more, so it can only be made anew."""


def moves(nbytes: int) -> np.ndarray:
    """What it costs to take one component from a state to another, however foolish: early, late, to and fro."""
    cost = np.full((4, 4), INF)
    np.fill_diagonal(cost, 0)
    cost[HOST, CLEAN] = nbytes
    cost[CLEAN, HOST] = 0
    cost[DIRTY, CLEAN] = cost[DIRTY, HOST] = nbytes
    cost[:, LOST] = 0
    return cost


def through(name: str, nbytes: int, phase: Phase) -> np.ndarray:
    """The cost of one component from before a phase to after it."""
    cost = moves(nbytes)
    if name in phase.reads:
        cost[:, [HOST, LOST]] = INF
    elif name in phase.writes:
        cost = np.stack([np.full(4, INF), np.full(4, INF), cost[:, [CLEAN, DIRTY]].min(1), np.full(4, INF)], axis=1)
    elif name in phase.creates:
        cost = np.stack([np.full(4, INF), np.full(4, INF), np.zeros(4), np.full(4, INF)], axis=1)
    return cost


def brute_force(nbytes: dict[str, int], phases: list[Phase], capacity: int) -> float:
    """The least mean cost of any closed walk through all states of all components, by min-plus powers of one step."""
    states = list(itertools.product(range(4), repeat=len(nbytes)))
    fits = np.array(
        [
            sum(n for s, n in zip(state, nbytes.values(), strict=True) if s in (CLEAN, DIRTY)) <= capacity
            for state in states
        ]
    )
    step = np.where(np.eye(len(states), dtype=bool), 0, INF)
    for each in phases:
        costs = [through(name, n, each) for name, n in nbytes.items()]
        matrix = np.zeros((len(states), len(states)))
        for position, cost in enumerate(costs):
            at = [state[position] for state in states]
            matrix += cost[np.ix_(at, at)]
        matrix[:, ~fits] = INF
        step = min_plus(step, matrix)
    power, least = step, INF
    for length in range(1, len(states) + 1):
        least = min(least, power.diagonal().min() / length)
        power = min_plus(power, step)
    return float(least)


def min_plus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a[:, :, None] + b[None, :, :]).min(1)


@st.composite
def problems(draw: st.DrawFn, max_components: int = 3) -> tuple[dict[str, int], list[Phase], int]:
    names = "abcd"[: draw(st.integers(1, max_components))]
    nbytes = {name: draw(st.integers(1, 6)) for name in names}
    phases = []
    for number in range(draw(st.integers(1, 4))):
        what = [draw(st.sampled_from(["reads", "writes", "creates", "", ""])) for _ in names]
        chosen = {
            k: frozenset(n for n, w in zip(names, what, strict=True) if w == k) for k in ("reads", "writes", "creates")
        }
        phases.append(Phase(f"phase {number}", **chosen))
    largest = max(sum(nbytes[name] for name in each.needs) for each in phases)
    return nbytes, phases, largest + draw(st.integers(0, sum(nbytes.values())))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_bound_is_the_least_of_everything_that_could_be_done(
    problem: tuple[dict[str, int], list[Phase], int],
) -> None:
    nbytes, phases, capacity = problem
    found = whole(nbytes, phases, capacity)
    assert float(found.nbytes_per_step) == pytest.approx(brute_force(nbytes, phases, capacity))
    assert sum(copy.nbytes for copy in found.copies) == found.nbytes_per_step * found.num_steps


@settings(max_examples=60, deadline=None)
@given(problems(max_components=2))
def test_parts_cost_no_more_than_pieces_and_pieces_no_more_than_wholes(
    problem: tuple[dict[str, int], list[Phase], int],
) -> None:
    nbytes, phases, capacity = problem

    def cut(names: frozenset[str]) -> frozenset[str]:
        return frozenset(f"{name}{half}" for name in names for half in (0, 1))

    doubled = {name: 2 * n for name, n in nbytes.items()}
    pieces = {f"{name}{half}": n for name, n in nbytes.items() for half in (0, 1)}
    in_pieces = [Phase(p.name, cut(p.reads), cut(p.writes), cut(p.creates)) for p in phases]
    parts = fractional(doubled, phases, 2 * capacity)
    assert parts == 2 * fractional(nbytes, phases, capacity)
    assert parts <= whole(pieces, in_pieces, 2 * capacity).nbytes_per_step
    assert (
        whole(pieces, in_pieces, 2 * capacity).nbytes_per_step <= whole(doubled, phases, 2 * capacity).nbytes_per_step
    )


# -- what a person can check -----------------------------------------------------------------------------------------------

TRAIN = phase("train", writes="weights moments", creates="grads")
SAMPLE = phase("sample", reads="engine", creates="cache")
REFIT = phase("refit", reads="weights", creates="engine")
SIZES = {"weights": 2, "grads": 2, "moments": 12, "engine": 8, "cache": 20}


def test_all_that_does_not_fit_beside_the_engine_leaves_once_and_comes_back_once() -> None:
    step = [REFIT, SAMPLE, TRAIN]
    assert whole(SIZES, step, 44).nbytes_per_step == 0
    assert whole(SIZES, step, 42).nbytes_per_step == 0  # gradients are gone by then
    assert whole(SIZES, step, 41).nbytes_per_step == 4  # the weights: written, so both ways
    assert whole(SIZES, step, 39).nbytes_per_step == 24  # the moments alone are enough
    assert whole(SIZES, step, 28).nbytes_per_step == 28
    assert fractional(SIZES, step, 41) == 2
    assert fractional(SIZES, step, 39) == 6
    assert fractional(SIZES, step, 28) == 28


def test_what_was_only_read_comes_back_and_never_leaves() -> None:
    step = [phase("a", reads="a"), phase("b", reads="b")]
    assert whole({"a": 3, "b": 5}, step, 5).nbytes_per_step == 8
    assert [copy.direction for copy in whole({"a": 3, "b": 5}, step, 5).copies] == ["in", "in"]
    assert fractional({"a": 3, "b": 5}, step, 7) == 2  # one byte of either is away at the other's turn


def test_no_component_gives_more_than_it_has() -> None:
    """The small one is idle in both crowded phases, and would be all it takes if it were larger."""
    sizes = {"small": 3, "left": 5, "right": 5, "first": 10, "second": 10}
    step = [
        phase("all", reads="small left right"),
        phase("crowded", reads="right", creates="first"),
        phase("crowded again", reads="left", creates="second"),
    ]
    assert fractional(sizes, step, 17) == 3 + 3 + 3
    assert whole(sizes, step, 17).nbytes_per_step == 3 + 5 + 5


def test_a_cycle_may_take_more_steps_than_one() -> None:
    step = [phase("a", reads="a"), phase("b", reads="b"), phase("c", reads="c")]
    found = whole({"a": 1, "b": 1, "c": 1}, step, 2)
    assert found.num_steps == 2
    assert found.nbytes_per_step == Fraction(3, 2)
    assert fractional({"a": 1, "b": 1, "c": 1}, step, 2) == Fraction(3, 2)


def test_a_phase_that_fits_by_no_means_is_named() -> None:
    with pytest.raises(InfeasibleError, match="train needs more than 15 bytes"):
        whole(SIZES, [TRAIN], 15)
    with pytest.raises(InfeasibleError, match="train"):
        fractional(SIZES, [TRAIN], 15)


def test_bounds_of_the_shipped_loops_shrink_with_room_and_are_zero_with_all_of_it() -> None:
    for (model, backend), trace in itertools.product(itertools.product(SHAPES, RECIPES), TRACES.values()):
        sizes = sizes_of(model, backend, 8)
        by_room = sorted(capacity_of(trace, sizes, budget) for budget in BUDGETS)
        least = [whole(sizes.by_name(), trace.phases, capacity).nbytes_per_step for capacity in by_room]
        parts = [fractional(sizes.by_name(), trace.phases, capacity) for capacity in by_room]
        assert least == sorted(least, reverse=True)
        assert all(a <= b for a, b in zip(parts, least, strict=True))
        assert least[-1] == 0
