"""What a transition on N Ray workers costs when nothing has to move, against a bare call to the same actors that does nothing.

    python benchmarks/ranks.py --ranks 1 2 4

Also: messages sent when the lease holder enters the mode in effect (none), and the constants of the formula in
docs/scale.md, fitted from the bare calls of this run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from harness import parser, report, show
from torch import nn

import rl_session as rs

ROUNDS = 300
GOAL = 1.3
"""The most that a transition may cost, as a multiple of the bare call."""


class Model(nn.Module):
    """Eight layers: what a rank has to scan grows with the number of tensors, not with their size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Not called."""
        return input_ids


class Counting:
    """A group that counts the messages sent through it."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.messages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As the group's, counted."""
        self.messages += self._group.num_ranks
        return self._group.call(method, *args, **kwargs)


def time_each(policy: rs.Policy, actors: list[Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of single calls, taken in turns.

    A bare one, a transition in which no byte moves, and one after a call that may have touched the model, which is looked
    at again then.
    """
    control = policy._control
    spent: dict[str, list[float]] = {"bare": [], "transition": [], "after a call": []}

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        spent[name].append(time.perf_counter() - start)

    for _ in range(rounds):
        timed("bare", lambda: ray.get([actor.nothing.remote() for actor in actors]))
        scope = policy.training_mode()
        timed("transition", scope.__enter__)
        timed("transition", lambda ending=scope: ending.__exit__(None, None, None))
        control.ask("sizes")  # any call but a transition
        scope = policy.training_mode()
        timed("after a call", scope.__enter__)
        scope.__exit__(None, None, None)
    return spent


def count_messages(policy: rs.Policy) -> tuple[int, int]:
    """Messages of a scope that is entered again, and of one transition there and back."""
    control = policy._control
    counting = Counting(control.group)
    control.group = control.ranks.group = counting
    with policy.training_mode():
        there = counting.messages
        with policy.training_mode():
            again = counting.messages - there
    control.group = control.ranks.group = counting._group
    return again, counting.messages


def measure(num_ranks: int, options: Any, folder: Path) -> dict[str, Any]:
    """One row; of each case the lowest decile, since a neighbour on the machine only ever adds."""
    rounds = 10 if options.smoke else ROUNDS
    with rs.Session(folder / f"{num_ranks}.jsonl") as session:
        workers = rs.RayWorkers(num_ranks, resources={"CPU": 0.01})
        policy = session.policy(model=Model, optimizer=torch.optim.SGD, workers=workers, device="cpu", base="resident")
        spent = time_each(policy, policy._control.group.actors, rounds)
        again, messages = count_messages(policy)
    us = {name: 1e6 * statistics.quantiles(values, n=10)[0] for name, values in spent.items()}
    medians = {name: statistics.median(values) for name, values in spent.items()}
    return {
        "ranks": num_ranks,
        "bare call us": us["bare"],
        "transition us": us["transition"],
        "x bare": us["transition"] / us["bare"],
        "x bare, medians": medians["transition"] / medians["bare"],
        "goal": GOAL,
        "after a call us": us["after a call"],
        "messages, mode in effect": again,
        "messages, in and out": messages,
    }


def fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a round: ``fixed + per_rank * ranks``, by least squares over the bare calls, and the rest of a transition."""
    xs = [row["ranks"] for row in rows]
    ys = [row["bare call us"] for row in rows]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / over if over else 0.0
    return {
        "fixed us": mean_y - slope * mean_x,
        "per rank us": slope,
        "records us": sum(row["transition us"] - row["bare call us"] for row in rows) / len(rows),
        "scan us": sum(row["after a call us"] - row["transition us"] for row in rows) / len(rows),
    }


def main(argv: list[str] | None = None) -> None:
    """Run."""
    made = parser(str(__doc__))
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    options = made.parse_args(argv)
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(number, options, Path(folder)) for number in options.ranks]
    if started:
        ray.shutdown()
    constants = fit(rows)
    show("A transition in which nothing moves", rows, note="lowest decile of calls taken in turns")
    show("Constants of docs/scale.md", [constants])
    report({"ranks": rows, "constants": constants}, options.json)


if __name__ == "__main__":
    main()
