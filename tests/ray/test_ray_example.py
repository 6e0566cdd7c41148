"""The example with two workers runs, loses one of them on the way, and has the losses of one process."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts import load_script

import rl_session as rs
from rl_session.audit.check import check

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_two_workers.py"

pytestmark = pytest.mark.slow


def _alone(module: ModuleType) -> list[float]:
    """The same three steps in this process, on one rank."""
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(0, module.VOCABULARY, (7, 12)), "input_lengths": torch.full((7,), 12)}
    torch.manual_seed(0)
    model = module.TinyLM()
    policy = rs.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with policy.training_mode():
        losses = [float(policy.train(batch, module.loss_fn)["loss"]) for _ in range(3)]
    policy.close()
    return losses


@pytest.mark.usefixtures("cluster")
def test_a_run_that_lost_a_worker_has_the_losses_of_one_that_did_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load_script("examples/ray_two_workers.py")
    log = tmp_path / "run.jsonl"
    harmed = module.main(["--steps", "3", "--audit", str(log)])
    assert "rank 1: lost" in capsys.readouterr().out
    assert harmed == pytest.approx(_alone(module), abs=1e-3)
    assert harmed[-1] < harmed[0]
    names = [record.name for record in rs.read_audit(log)]
    assert names.count("worker.lost") == names.count("policy.recovered") == 1
    assert not check(log).findings
