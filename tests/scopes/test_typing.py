"""A type checker knows what a mode allows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SNIPPET = """\
from typing import Any

import rl_session as rs

def loop(policy: rs.Policy, value: rs.ValueModel, batch: dict[str, Any], loss: Any) -> None:
    with policy.logprob_mode() as h:
        h.get_logprobs(batch)
        h.train(batch, loss, eval_mode=True)
        h.state_dict()
        h.train(batch, loss)  # no
        h.begin_step()  # no
        h.generate(batch)  # no
        h.load_checkpoint("x")  # no
    with policy.training_mode() as t:
        t.train(batch, loss, gbs=4)
        t.begin_step()
        t.get_logprobs(batch)
        t.load_checkpoint("x")
        t.generate(batch)  # no
        t.iter_weights()  # no
        t.get_values(batch)  # no
    with policy.refit_mode() as r:
        for bucket in r.iter_weights():
            print(bucket)
        r.get_logprobs(batch)  # no
    with policy.generation_mode() as g:
        g.generate(batch)
        g.get_logprobs(batch)
        g.train(batch, loss)  # no
    with policy.offloaded() as o:
        o.save_checkpoint("x")
        o.load_checkpoint("x")
        o.get_logprobs(batch)  # no
    with value.inference_mode() as v:
        v.get_values(batch)
        v.train(batch, loss)  # no
        v.get_logprobs(batch)  # no
    with value.training_mode() as vt:
        vt.get_values(batch)
        vt.train(batch, loss)
        vt.get_logprobs(batch)  # no

async def also(policy: rs.Policy, batch: dict[str, Any], loss: Any) -> None:
    async with policy.logprob_mode() as h:
        h.get_logprobs(batch)
        h.train(batch, loss)  # no
"""


@pytest.mark.slow
def test_mypy_rejects_exactly_the_calls_that_a_mode_does_not_allow(tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET)
    config = tmp_path / "mypy.ini"  # torch is big, and not what is asked about
    config.write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path), str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    rejected = {int(line) for line in re.findall(r"snippet\.py:(\d+): error", result.stdout)}
    expected = {number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# no")}
    assert rejected == expected, result.stdout + result.stderr
