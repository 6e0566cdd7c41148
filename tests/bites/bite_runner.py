"""Takes one mechanism after the other away in a copy of the tree, and shows which test notices: `make test-bites`.

A bite is noticed when every test it names fails, in its own body or at its end, by something other than a time limit; a
test that cannot be collected or set up proves nothing. All named tests must pass in the copy first. Each bite runs in a
fork of this process, which has torch and pytest loaded and never loads the library itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import attrs
import hypothesis
import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
from bites import ROOT, Bite, BiteError, load

_LOADED = (hypothesis, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor)
"""Loaded once, for every fork: they take longest."""
_TREES = ("rl_session", "migration", "tests", "docs", "examples", "benchmarks")
_PYTEST = ("-q", "--no-header", "-p", "no:randomly", "-p", "no:cacheprovider", "--timeout=100", "-W", "default")


@attrs.define
class Outcome:
    """What the named tests did.

    Attributes:
        status: The exit status of pytest; None when the run was stopped at its deadline.
        failed: Node to the first line of why it failed, of tests that ran.
        broken: The same of those that could not even be set up or collected.
        passed: Nodes that passed.
    """

    status: int | None
    failed: dict[str, str] = attrs.field(factory=dict)
    broken: dict[str, str] = attrs.field(factory=dict)
    passed: list[str] = attrs.field(factory=list)


class _Recorder:
    """A pytest plugin that notes how each test ended."""

    def __init__(self) -> None:
        self.outcome = Outcome(None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcome.broken[report.nodeid] = _first_line(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = _first_line(report)
            is_test = report.when != "setup" and "from pytest-timeout" not in text
            (self.outcome.failed if is_test else self.outcome.broken).setdefault(report.nodeid, text)
        elif report.passed and report.when == "call":
            self.outcome.passed.append(report.nodeid)


def _first_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[:160]


def run_tests(copy: Path, tests: Sequence[str], seconds: float) -> Outcome:
    """Run tests in a fork that works in ``copy``; it and what it started are gone afterwards."""
    here, there = Pipe(duplex=False)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        here.close()
        _child(copy, tests, there)
    there.close()
    try:
        if not wait([here], seconds):
            return Outcome(None)
        return Outcome(**json.loads(here.recv_bytes()))
    except EOFError:
        return Outcome(-1, broken={"": "the process died"})
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        here.close()


def _child(copy: Path, tests: Sequence[str], pipe: Connection) -> NoReturn:
    status = 1
    try:
        os.setsid()
        with (copy / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(copy)
        roots = [str(copy), str(copy / "migration")]
        os.environ["PYTHONPATH"] = os.pathsep.join(roots)
        sys.path[:0] = roots
        sys.dont_write_bytecode = True
        torch.set_num_threads(1)
        recorder = _Recorder()
        recorder.outcome.status = int(pytest.main([*_PYTEST, *tests], plugins=[recorder]))
        pipe.send_bytes(json.dumps(attrs.asdict(recorder.outcome)).encode())
        status = 0
    finally:
        os._exit(status)


def copy_tree(target: Path) -> None:
    """A copy of what the tests need, without compiled files."""
    for name in _TREES:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy2(path, target / path.name)
    shutil.copy2(ROOT / "Makefile", target / "Makefile")


def judge(bite: Bite, outcome: Outcome) -> str:
    """Why a bite was not noticed as it should be; "" where it was."""
    if outcome.status is None:
        return "the tests did not end in time"
    if outcome.broken:
        node, why = next(iter(outcome.broken.items()))
        return f"{node or 'the run'} broke: {why}"
    silent = [test for test in bite.tests if not any(_is_of(node, test) for node in outcome.failed)]
    return f"not noticed by {', '.join(silent)}" if silent else ""


def _is_of(node: str, test: str) -> bool:
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def baseline(copy: Path, bites: Sequence[Bite], seconds: float) -> list[str]:
    """What is wrong with the named tests while every mechanism is there."""
    tests = list(dict.fromkeys(test for bite in bites for test in bite.tests))
    outcome = run_tests(copy, tests, seconds)
    if outcome.status is None:
        return ["the tests did not end in time with every mechanism in place"]
    problems = [f"{node} fails with every mechanism in place: {why}" for node, why in outcome.failed.items()]
    problems += [f"{node or 'the run'} broke: {why}" for node, why in outcome.broken.items()]
    ended = (*outcome.passed, *outcome.failed)
    problems += [f"{test} did not run" for test in tests if not any(_is_of(node, test) for node in ended)]
    return problems


def bitten(copy: Path, bite: Bite, seconds: float) -> tuple[str, Outcome]:
    """Take one mechanism away, run its tests, put it back."""
    try:
        changed = bite.applied(copy)
    except BiteError as error:
        return str(error), Outcome(None)
    path = copy / bite.file
    original = path.read_text(encoding="utf-8")
    try:
        path.write_text(changed, encoding="utf-8")
        _forget_compiled(path)
        outcome = run_tests(copy, bite.tests, seconds)
    finally:
        path.write_text(original, encoding="utf-8")
        _forget_compiled(path)
    return judge(bite, outcome), outcome


def _forget_compiled(path: Path) -> None:
    """Of two files written in one second, of one length, Python takes the compiled one for that of both."""
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def table(rows: Sequence[tuple[Bite, str, Outcome]]) -> str:
    """What was taken away, and what noticed."""
    lines = []
    for bite, problem, outcome in rows:
        lines.append(f"{'MISSED ' if problem else 'noticed'}  {bite.area}: {bite.mechanism}")
        if problem:
            lines.append(f"           {problem}")
        for test in bite.tests:
            why = next((why for node, why in outcome.failed.items() if _is_of(node, test)), "")
            if why:
                lines += [f"           {test}", f"             {why[:110]}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bites in which each of these words occurs")
    parser.add_argument("--list", action="store_true", help="name them and stop")
    parser.add_argument("--seconds", type=float, default=150.0, help="the most for the tests of one bite")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy goes
    chosen = [bite for bite in load() if bite.matches(tuple(options.words))]
    if options.list or not chosen:
        print("\n".join(f"{bite.area}: {bite.mechanism}" for bite in chosen) or "no bite has these words")
        return 0 if chosen else 1
    with tempfile.TemporaryDirectory(prefix="bites-") as folder:
        return run(Path(folder).resolve(), chosen, options.seconds)


def run(copy: Path, chosen: Sequence[Bite], seconds: float) -> int:
    """Run the chosen bites in an empty folder; 0 where each was noticed."""
    start = time.monotonic()
    copy_tree(copy)
    print(f"{len(chosen)} bites; first their tests with everything in place", flush=True)
    problems = baseline(copy, chosen, 60.0 + 10.0 * len(chosen))
    if problems:
        print("\n".join(problems))
        print((copy / "output.txt").read_text(encoding="utf-8")[-4000:])
        return 1
    rows = []
    for number, bite in enumerate(chosen, 1):
        began = time.monotonic()
        problem, outcome = bitten(copy, bite, seconds)
        rows.append((bite, problem, outcome))
        took = time.monotonic() - began
        print(f"[{number}/{len(chosen)}] {took:5.1f} s  {problem or 'noticed'}: {bite.mechanism}", flush=True)
    missed = sum(bool(problem) for _, problem, _ in rows)
    print(f"\n{table(rows)}\n")
    print(f"{len(rows) - missed} of {len(rows)} noticed, in {time.monotonic() - start:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
