"""A prepare that keeps the gradients of an open step is never replaced by a scope that does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HELPER = """\
def mid_step_logprobs(policy, batch, keep):
    policy.prepare_for_lp_inference({argument})
    lp = policy.get_logprobs(batch)
    policy.prepare_for_training()
    return lp
"""


def migrated(folder: Path, argument: str) -> str:
    file = folder / "loop.py"
    file.write_text(HELPER.format(argument=argument))
    command = [sys.executable, "-c", "from rl_session.cli import main; main()", "migrate", str(file), "--write"]
    subprocess.run(command, capture_output=True, check=True)
    return file.read_text()


@pytest.mark.parametrize("argument", ["keep_train_buffers=True", "True", "keep_train_buffers=keep"])
def test_it_stays_with_a_reason(tmp_path: Path, argument: str) -> None:
    text = migrated(tmp_path, argument)
    assert f"policy.prepare_for_lp_inference({argument})" in text
    assert "keeps gradients" in text


def test_one_that_keeps_nothing_goes(tmp_path: Path) -> None:
    assert "prepare_for_lp_inference" not in migrated(tmp_path, "keep_train_buffers=False")
