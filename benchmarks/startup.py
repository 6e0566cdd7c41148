"""How long a user waits before anything happens: imports and commands, each in a fresh process, against a bare interpreter.

    python benchmarks/startup.py

Commands that only read a log import neither torch nor ray, which would take seconds, nor pydantic; a run that finds one of
them loaded fails. Compiled files are kept, as those of an installed package are, even where the environment says otherwise.
"""

from __future__ import annotations

import os
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
_LIGHT = "heavy = {'torch', 'ray', 'pydantic'} & set(sys.modules); assert not heavy, heavy"


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


def run(code: str, compiled: Path) -> Callable[[], None]:
    """Run code in a fresh interpreter that keeps its compiled files in a folder."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(compiled)}

    def start() -> None:
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=environment)

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
    scripts = {"python -c pass": "pass"}
    scripts |= {
        name: _READS.format(arguments=["rl-session", *arguments]) + _LIGHT for name, arguments in commands.items()
    }
    scripts |= {"import rl_session": "import sys, rl_session;" + _LIGHT}
    if not smoke:
        scripts |= {"import torch": "import torch", "and a session": "import rl_session as rs; rs.Session().close()"}
    cases = {name: run(script, folder / "compiled") for name, script in scripts.items()}
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
