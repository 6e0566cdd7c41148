"""The least that any schedule can copy: offline, with the whole future known, for a loop that repeats.

The model is smaller than the library on purpose, and shares nothing with it. A step is a list of phases; a phase says which
components have to be on the device while it lasts, and what it does to them: *reads* them, *writes* them (their host copy is
worth nothing afterwards), or *creates* them (what was in them does not matter: gradients, a KV cache, weights that are pushed
again). Copying in costs a component's bytes; leaving costs them if it is dirty and will be needed with its content; whoever is on
the device counts against the capacity.

:func:`whole` moves whole components and is exact: a shortest path over every state that a schedule might want to be in, and the
cheapest cycle among steps, with a certificate that there is no cheaper. :func:`fractional` lets any part of a component stay,
which is a bound for schedules that evict storage by storage, and is exact too: a linear program in rational numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

__all__ = ["Copy", "InfeasibleError", "Phase", "Schedule", "fractional", "whole"]

AWAY, CLEAN, DIRTY = 0, 1, 2
State = tuple[int, ...]
"""For each component whether it is away, on the device with a host copy as good, or on the device and nowhere else."""


class InfeasibleError(ValueError):
    """A phase does not fit on the device by itself."""


class Phase(NamedTuple):
    """What a phase has to have on the device."""

    name: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    creates: frozenset[str] = frozenset()

    @property
    def needs(self) -> frozenset[str]:
        """All that has to be there."""
        return self.reads | self.writes | self.creates


class Copy(NamedTuple):
    """One copy of a schedule: before which phase, of which component, "in" or "out", its bytes."""

    phase: str
    component: str
    direction: str
    nbytes: int


class Schedule(NamedTuple):
    """A cheapest cycle.

    Attributes:
        nbytes_per_step: What it copies a step, on average.
        num_steps: After how many steps it repeats.
        copies: All its copies, in order.
    """

    nbytes_per_step: Fraction
    num_steps: int
    copies: tuple[Copy, ...]


class _Problem:
    """Names turned into positions, and what is dead when."""

    def __init__(self, nbytes: Mapping[str, int], phases: Sequence[Phase], capacity: int) -> None:
        used = set().union(*(phase.needs for phase in phases))
        self.names = sorted(used)
        self.nbytes = [nbytes[name] for name in self.names]
        self.phases = phases
        self.capacity = capacity
        for phase in phases:
            if sum(nbytes[name] for name in phase.needs) > capacity:
                raise InfeasibleError(f"{phase.name} needs more than {capacity} bytes: {sorted(phase.needs)}")

    def next_use(self, name: str, start: int) -> int:
        """How many phases from ``start`` on until ``name`` is needed (0: in ``start`` itself)."""
        return next(k for k in range(len(self.phases)) if name in self._phase(start + k).needs)

    def _phase(self, index: int) -> Phase:
        return self.phases[index % len(self.phases)]

    def is_dead(self, name: str, start: int) -> bool:
        """Whether the content of ``name`` is worth nothing from phase ``start`` on: it is created before it is read."""
        return name in self._phase(start + self.next_use(name, start)).creates

    def step(self, state: State, index: int) -> Iterator[tuple[State, int, list[Copy]]]:
        """The states after phase ``index``, with what it cost to get there.

        Leaving late is never worse than leaving early, so a component leaves only when room is short, and no more leave than have
        to: every set from which none could be spared is tried.
        """
        phase = self.phases[index]
        here = list(state)
        copies: list[Copy] = []
        room = self.capacity
        others = []
        for position, name in enumerate(self.names):
            if name in phase.needs:
                room -= self.nbytes[position]
                if here[position] == AWAY and name not in phase.creates:
                    copies.append(Copy(phase.name, name, "in", self.nbytes[position]))
                    here[position] = CLEAN
                if name not in phase.reads:
                    here[position] = DIRTY
            elif here[position] != AWAY and self.is_dead(name, index):
                here[position] = AWAY
            elif here[position] != AWAY:
                others.append(position)
        for leaving in _minimal(others, [self.nbytes[p] for p in others], room):
            after = list(here)
            out = []
            for position in leaving:
                if here[position] == DIRTY:
                    out.append(Copy(phase.name, self.names[position], "out", self.nbytes[position]))
                after[position] = AWAY
            made = [*out, *copies]
            yield tuple(after), sum(copy.nbytes for copy in made), made


def _minimal(positions: Sequence[int], nbytes: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
    """Every set of ``positions`` without which the rest fits in ``room``, and of which none can be left out."""
    excess = sum(nbytes) - room
    if excess <= 0:
        yield ()
        return
    for count in range(1, len(positions) + 1):
        for chosen in itertools.combinations(range(len(positions)), count):
            freed = sum(nbytes[i] for i in chosen)
            if freed >= excess and freed - min(nbytes[i] for i in chosen) < excess:
                yield tuple(positions[i] for i in chosen)


class _Edge(NamedTuple):
    cost: int
    copies: tuple[Copy, ...]


def _one_step(problem: _Problem, start: State) -> dict[State, _Edge]:
    """Where a whole step can lead from ``start``, the cheapest way to each."""
    reached = {start: _Edge(0, ())}
    for index in range(len(problem.phases)):
        further: dict[State, _Edge] = {}
        for state, (cost, copies) in reached.items():
            for after, more, made in problem.step(state, index):
                if after not in further or cost + more < further[after].cost:
                    further[after] = _Edge(cost + more, (*copies, *made))
        reached = further
    return reached


def whole(nbytes: Mapping[str, int], phases: Sequence[Phase], capacity: int) -> Schedule:
    """The cheapest way to repeat ``phases`` for ever, whole components moving.

    Args:
        nbytes: Bytes of each component.
        phases: One step.
        capacity: Bytes of the device.

    Raises:
        InfeasibleError: A phase does not fit by itself.
    """
    problem = _Problem(nbytes, phases, capacity)
    edges: dict[State, dict[State, _Edge]] = {}
    todo = [tuple([AWAY] * len(problem.names))]
    while todo:
        state = todo.pop()
        if state not in edges:
            edges[state] = _one_step(problem, state)
            todo += edges[state]
    cycle = _cheapest_cycle({s: {t: edge.cost for t, edge in out.items()} for s, out in edges.items()})
    made = [edges[a][b] for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    total = sum(edge.cost for edge in made)
    return Schedule(Fraction(total, len(cycle)), len(cycle), tuple(copy for edge in made for copy in edge.copies))


def _cheapest_cycle(edges: Mapping[State, Mapping[State, int]]) -> list[State]:
    """The cycle of least mean cost: from any cycle on, a cheaper one, until potentials prove that there is none."""
    cycle = _any_cycle(edges)
    while True:
        mean = _mean(edges, cycle)
        cheaper = _negative_cycle(edges, mean)
        if cheaper is None:
            return cycle
        assert _mean(edges, cheaper) < mean
        cycle = cheaper


def _mean(edges: Mapping[State, Mapping[State, int]], cycle: Sequence[State]) -> Fraction:
    costs = [edges[a][b] for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    return Fraction(sum(costs), len(costs))


def _any_cycle(edges: Mapping[State, Mapping[State, int]]) -> list[State]:
    state, seen = next(iter(edges)), []
    while state not in seen:
        seen.append(state)
        state = min(edges[state], key=lambda target: (edges[seen[-1]][target], target))
    return seen[seen.index(state) :]


def _negative_cycle(edges: Mapping[State, Mapping[State, int]], mean: Fraction) -> list[State] | None:
    """A cycle whose mean is below ``mean``; None when potentials exist under which every edge costs at least that."""
    # In whole numbers: costs times the denominator, less the numerator.
    potential = dict.fromkeys(edges, 0)
    before: dict[State, State] = {}
    for _ in range(len(edges) + 1):
        changed = None
        for state, out in edges.items():
            for target, cost in out.items():
                reach = potential[state] + cost * mean.denominator - mean.numerator
                if reach < potential[target]:
                    potential[target], before[target], changed = reach, state, target
        if changed is None:
            return None
        cycle = _cycle_behind(before, changed)
        if cycle is not None:
            return cycle
    raise AssertionError("a graph without a negative cycle settles in as many rounds as it has nodes")


def _cycle_behind(before: Mapping[State, State], state: State) -> list[State] | None:
    trail: list[State] = []
    seen: set[State] = set()
    while state in before and state not in seen:
        seen.add(state)
        trail.append(state)
        state = before[state]
    return trail[trail.index(state) :][::-1] if state in seen else None


# -- any part of a component -----------------------------------------------------------------------------------------------


class _Gap(NamedTuple):
    """The time between two uses of a component, cyclically: the phases in between, and the epoch of its content."""

    component: str
    phases: tuple[int, ...]
    epoch: int
    is_dirty: bool


def fractional(nbytes: Mapping[str, int], phases: Sequence[Phase], capacity: int) -> Fraction:
    """The least a step can copy when any part of a component may stay while the rest is away.

    A gap in which ``x`` bytes of a component are away costs ``x`` to bring them back. Bytes that were written cost once more to
    leave, the first time since they were written. Averaging over many steps keeps these constraints, so no schedule does better,
    of whatever period.

    Raises:
        InfeasibleError: A phase does not fit by itself.
    """
    problem = _Problem(nbytes, phases, capacity)
    gaps = [gap for name in problem.names for gap in _gaps(problem, name)]
    epochs = sorted({(gap.component, gap.epoch) for gap in gaps if gap.is_dirty})
    num = len(gaps) + len(epochs)
    rows: list[tuple[dict[int, int], int]] = []  # sum of coefficient * variable >= bound
    for index, phase in enumerate(phases):
        idle = [k for k, gap in enumerate(gaps) if index in gap.phases]
        excess = sum(nbytes[name] for name in phase.needs) + sum(nbytes[gaps[k].component] for k in idle) - capacity
        if excess > 0:
            rows.append((dict.fromkeys(idle, 1), excess))
    for k, gap in enumerate(gaps):
        rows.append(({k: -1}, -nbytes[gap.component]))
        if gap.is_dirty:
            rows.append(({len(gaps) + epochs.index((gap.component, gap.epoch)): 1, k: -1}, 0))
    return _minimise([1] * num, rows)


def _gaps(problem: _Problem, name: str) -> Iterator[_Gap]:
    """The gaps of a component in which its content has to survive."""
    num = len(problem.phases)
    uses = [index for index in range(num) if name in problem.phases[index].needs]
    changes = [index for index in uses if name not in problem.phases[index].reads]
    for use, after in zip(uses, [*uses[1:], uses[0] + num], strict=True):
        if name in problem.phases[after % num].creates:
            continue
        last_change = max((c for c in (*changes, *(c - num for c in changes)) if c <= use), default=None)
        idle = tuple(index % num for index in range(use + 1, after))
        epoch = -1 if last_change is None else last_change % num
        yield _Gap(name, idle, epoch, last_change is not None)


def _minimise(costs: Sequence[int], rows: Sequence[tuple[Mapping[int, int], int]]) -> Fraction:
    """The least ``costs . x`` with ``x >= 0`` and every row's sum at least its bound; costs are not negative.

    The dual simplex method: the slack basis is dual feasible at once. Bland's rule keeps it from cycling.
    """
    num = len(costs)
    reduced = [Fraction(cost) for cost in costs] + [Fraction(0)] * len(rows)
    value = Fraction(0)
    # Row i says: slack_i = sum(coefficients) - bound, with slack_i >= 0; written as -sum + slack_i = -bound.
    table = [
        [Fraction(-row.get(j, 0)) for j in range(num)] + [Fraction(int(i == k)) for k in range(len(rows))]
        for i, (row, _) in enumerate(rows)
    ]
    right = [Fraction(-bound) for _, bound in rows]
    basis = list(range(num, num + len(rows)))
    while True:
        leaving = min((i for i in range(len(rows)) if right[i] < 0), key=lambda i: basis[i], default=None)
        if leaving is None:
            solution = dict(zip(basis, right, strict=True))
            _check_optimal(costs, rows, [solution.get(j, Fraction(0)) for j in range(num)], reduced[num:], value)
            return value
        row = table[leaving]
        candidates = [j for j in range(num + len(rows)) if row[j] < 0]
        if not candidates:
            raise InfeasibleError("no schedule meets the constraints")
        entering = min(candidates, key=lambda j: (reduced[j] / -row[j], j))
        pivot = row[entering]
        table[leaving] = row = [entry / pivot for entry in row]
        right[leaving] /= pivot
        for i, other in enumerate(table):
            if i != leaving and other[entering]:
                factor = other[entering]
                table[i] = [a - factor * b for a, b in zip(other, row, strict=True)]
                right[i] -= factor * right[leaving]
        factor = reduced[entering]
        reduced = [a - factor * b for a, b in zip(reduced, row, strict=True)]
        value += factor * right[leaving]
        basis[leaving] = entering


def _check_optimal(
    costs: Sequence[int],
    rows: Sequence[tuple[Mapping[int, int], int]],
    x: Sequence[Fraction],
    prices: Sequence[Fraction],
    value: Fraction,
) -> None:
    """Weak duality: a solution and prices, both allowed, that come to the same value prove each other best."""
    assert all(each >= 0 for each in (*x, *prices))
    assert all(sum(row[j] * x[j] for j in row) >= bound for row, bound in rows)
    earned = [
        sum(price * row.get(j, 0) for price, (row, _) in zip(prices, rows, strict=True)) for j in range(len(costs))
    ]
    assert all(gain <= cost for gain, cost in zip(earned, costs, strict=True))
    assert sum(cost * each for cost, each in zip(costs, x, strict=True)) == value
    assert sum(price * bound for price, (_, bound) in zip(prices, rows, strict=True)) == value
