"""What a transition on N Ray workers costs when nothing has to move, against a bare call to the same actors that does nothing.

    python benchmarks/ranks.py --ranks 1 2 4

Also: messages sent when the lease holder enters the mode in effect (none), and the constants of the formula in
docs/scale.md, fitted from the bare calls of this run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from harness import interleave, parser, report, show
from torch import nn

import rl_session as rs

ROUNDS = 50
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


def transitions(policy: rs.Policy, rounds: int) -> Callable[[], None]:
    """``rounds`` transitions in which no byte moves: from RESIDENT to TRAINING and back."""

    def run() -> None:
        for _ in range(rounds // 2):
            with policy.training_mode():
                pass

    return run


def bare(actors: list[Any], rounds: int) -> Callable[[], None]:
    """``rounds`` calls of every actor that do nothing."""

    def run() -> None:
        for _ in range(rounds):
            ray.get([actor.nothing.remote() for actor in actors])

    return run


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
    """One row."""
    rounds = 4 if options.smoke else ROUNDS
    with rs.Session(folder / f"{num_ranks}.jsonl") as session:
        workers = rs.RayWorkers(num_ranks, resources={"CPU": 0.01})
        policy = session.policy(model=Model, optimizer=torch.optim.SGD, workers=workers, device="cpu", base="resident")
        actors = policy._control.group.actors
        found = interleave(
            {"bare": bare(actors, rounds), "transition": transitions(policy, rounds)}, repeats=options.repeats
        )
        again, messages = count_messages(policy)
    each = {name: 1e6 * sample.median / rounds for name, sample in found.items()}
    return {
        "ranks": num_ranks,
        "bare call us": each["bare"],
        "transition us": each["transition"],
        "x bare": each["transition"] / each["bare"],
        "goal": GOAL,
        "spread": max(sample.spread for sample in found.values()),
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
        "scan and records us": sum(row["transition us"] - row["bare call us"] for row in rows) / len(rows),
    }


def main() -> None:
    """Run."""
    made = parser(str(__doc__))
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    options = made.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(number, options, Path(folder)) for number in options.ranks]
    ray.shutdown()
    constants = fit(rows)
    show("A transition in which nothing moves", rows, note="medians of interleaved repetitions")
    show("Constants of docs/scale.md", [constants])
    report({"ranks": rows, "constants": constants}, options.json)


if __name__ == "__main__":
    main()
