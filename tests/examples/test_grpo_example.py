"""The main example runs, its losses do not depend on offloading, and an interrupt leaves a readable log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load_script

import rl_session as rs

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpo.py"
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "dumb", "COLUMNS": "200"}


def options(log: Path) -> list[str]:
    return ["--warmup-steps", "2", "--losses", "--log", str(log)]


def losses(output: str) -> list[str]:
    return re.findall(r"loss (\S+)", output)


def test_losses_are_the_same_to_the_last_bit_with_and_without_offloading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    example, outputs = load_script("examples/grpo.py"), {}
    for name, extra in (("eager", []), ("never", ["--no-offload"])):
        example.main([*options(tmp_path / f"{name}.jsonl"), "--steps", "2", *extra])
        outputs[name] = capsys.readouterr().out
    assert len(losses(outputs["eager"])) == 2
    assert losses(outputs["eager"]) == losses(outputs["never"])

    moved = {
        name: sum(
            r.event.bytes_moved for r in rs.read_audit(tmp_path / f"{name}.jsonl") if r.name == "transition.committed"
        )
        for name in outputs
    }
    assert moved["eager"] > 0
    assert moved["never"] == 0
    assert f"{moved['eager']:,}" in outputs["eager"], "the table says what the log says"
    assert str(tmp_path / "eager.html") in outputs["eager"]
    assert "<title>rl-session timeline</title>" in (tmp_path / "eager.html").read_text(encoding="utf-8")


def test_an_interrupt_leaves_a_closed_and_readable_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), *options(log), "--steps", "500"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:  # the first step is over: the loop is running
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in rest

    reader = rs.read_audit(log)
    names = [record.name for record in reader]
    assert names[0] == "session.opened"
    assert names[-1] == "session.closed"
    assert reader.torn == reader.skipped == 0
    assert names.count("transition.started") == sum(
        names.count(f"transition.{end}") for end in ("committed", "rolled_back", "failed")
    )
    assert names.count("scope.entered") == names.count("scope.exited")
