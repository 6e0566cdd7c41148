"""How long a user waits before anything happens: imports and commands, each in a fresh process, against a bare interpreter.

    python benchmarks/startup.py

Commands that only read a log import neither torch nor ray, which would take seconds; a run that finds one of them loaded
fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import interleave, parser, report, show

import rl_session as rs

GOAL = 0.3
"""Seconds, of a command that only reads."""
_READS = """
import sys
from rl_session.cli import main
sys.argv = {arguments!r}
try:
    main()
except SystemExit as end:
    assert not end.code
"""
_LIGHT = "heavy = {'torch', 'ray'} & set(sys.modules); assert not heavy, heavy"


def small_log(path: Path, steps: int = 20) -> None:
    """A log of a few hundred records, of a run that was."""
    with rs.Session(path) as session:
        policy = session.attach(torch.nn.Linear(8, 8))
        for step in range(steps):
            with session.step(step):
                with policy.logprob_mode():
                    pass
                with policy.training_mode():
                    pass


def run(code: str) -> Callable[[], None]:
    """Run code in a fresh interpreter."""

    def start() -> None:
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

    return start


def measure(repeats: int, folder: Path, *, smoke: bool) -> list[dict[str, Any]]:
    """One row a case; the smoke run leaves out what imports torch."""
    log = folder / "run.jsonl"
    small_log(log)
    commands = {
        "rl-session --help": ["--help"],
        "rl-session audit summary": ["audit", "summary", str(log)],
        "rl-session audit check": ["audit", "check", str(log)],
        "rl-session lint --help": ["lint", "--help"],
    }
    cases = {"python -c pass": run("pass")}
    cases |= {
        name: run(_READS.format(arguments=["rl-session", *arguments]) + _LIGHT) for name, arguments in commands.items()
    }
    cases |= {"import rl_session": run("import sys, rl_session;" + _LIGHT)}
    if not smoke:
        cases |= {
            "import torch": run("import torch"),
            "and a session": run("import rl_session as rs; rs.Session().close()"),
        }
    found = interleave(cases, repeats=repeats)
    bare = found["python -c pass"].median
    return [
        {
            "what": name,
            "seconds": sample.median,
            "goal": GOAL if name in commands else "",
            "x bare interpreter": sample.median / bare,
            "spread": sample.spread,
        }
        for name, sample in found.items()
    ]


def main(argv: list[str] | None = None) -> None:
    """Run."""
    options = parser(str(__doc__)).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(1 if options.smoke else options.repeats, Path(folder), smoke=options.smoke)
    show(
        "Until something happens",
        rows,
        note="a fresh process each; the first round, which fills caches, does not count",
    )
    report({"startup": rows}, options.json)


if __name__ == "__main__":
    main()
