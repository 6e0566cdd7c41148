"""What a scope costs that changes nothing, against ``contextlib.nullcontext``, and against the number of parameters.

    python benchmarks/scope.py

Entering the mode in effect is the common case of a loop whose phases follow each other, so it has to be O(1). Processor time
of the thread, so that neighbours on the machine are not in it.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import interleave, parser, report, show
from torch import nn

import rl_session as rs

ROUNDS = 1000
TARGETS = {"audit off": 10.0, "audit on": 40.0}
"""Microseconds of one enter and exit."""


class Many(nn.Module):
    """A module with as many parameters as asked for."""

    def __init__(self, number: int) -> None:
        super().__init__()
        # Past register_parameter(), whose checks take longer than all that is measured.
        self._parameters.update((f"w{index}", nn.Parameter(torch.ones(4))) for index in range(number))


def many_times(scope: Callable[[], Any], rounds: int) -> Callable[[], None]:
    """``rounds`` times in and out."""

    def run() -> None:
        for _ in range(rounds):
            with scope():
                pass

    return run


def measure(options: Any, folder: Path) -> list[dict[str, Any]]:
    """One row a number of parameters."""
    rounds = 50 if options.smoke else ROUNDS
    rows = []
    for number in (10, 1000) if options.smoke else (10, 1000, 100_000):
        module = Many(number)
        sessions = {"audit off": rs.Session(), "audit on": rs.Session(folder / f"{number}.jsonl")}
        policies = {
            name: session.attach(module if name == "audit off" else Many(number), name="p", base="resident")
            for name, session in sessions.items()
        }
        with contextlib.ExitStack() as stack:
            for policy in policies.values():
                stack.enter_context(policy.logprob_mode())
            cases = {"nullcontext": many_times(contextlib.nullcontext, rounds)}
            cases |= {name: many_times(policy.logprob_mode, rounds) for name, policy in policies.items()}
            found = interleave(cases, repeats=options.repeats, clock=time.thread_time)
        for session in sessions.values():
            session.close()
        each = {name: 1e6 * min(sample.seconds) / rounds for name, sample in found.items()}
        rows.append(
            {
                "parameters": number,
                **{f"{name} us": value for name, value in each.items()},
                **{f"goal, {name}": goal for name, goal in TARGETS.items()},
                "x nullcontext": each["audit off"] / each["nullcontext"],
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run."""
    options = parser(str(__doc__)).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    show("Re-entering the mode in effect", rows, note="best of the repetitions: a neighbour only ever adds")
    report({"scope": rows}, options.json)


if __name__ == "__main__":
    main()
