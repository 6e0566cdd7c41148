"""One model spread over Ray actors with FSDP2 or DDP: the numbers of one process, through the scopes of the session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_rig import Tiny, make_batch, make_optimizer, nll

import rl_session as rs
from rl_session.testing import EmulatedDevice

pytestmark = pytest.mark.slow


def _trained(policy: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"loss": []}
    for index in range(3):
        batch = make_batch(5 if index else 6)
        with policy.logprob_mode():
            found["logprobs"] = policy.get_logprobs(batch)["logprobs"]
            found["reference"] = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
        with policy.training_mode():
            result = policy.train(batch, nll, gbs=None if index else 3, mbs=1)
            found["loss"].append(result["loss"])
            found["nll"] = result["metrics"]["nll"]
            step = policy.begin_step()
            step.forward_backward(make_batch(1), nll)
            step.forward_backward(make_batch(4), nll)
            found["loss"].append(step.commit()["loss"])
    policy.save_checkpoint(folder)
    policy.load_checkpoint(folder)
    found["state"] = policy.state_dict()
    with policy.refit_mode():
        buckets = list(policy.iter_weights(bucket_nbytes=100))
        found["weights"] = {name: value.clone() for bucket in buckets for name, value in bucket.items()}
    return found


@pytest.mark.parametrize("how", ["fsdp2", "ddp"])
def test_two_actors_train_as_one_process_does(cluster: None, tmp_path: Path, how: Any) -> None:
    with rs.Session(tmp_path / "ray.jsonl", verify="checksum") as session:
        workers = rs.RayWorkers(2, resources={"CPU": 0.5}, timeout_seconds=60.0, parallelize=how)
        policy = session.policy(
            "actor",
            model=Tiny,
            optimizer=make_optimizer,
            workers=workers,
            device=EmulatedDevice(),
            reference="copy",
            max_grad_norm=0.1,
        )
        weights = policy.state_dict()
        ours = _trained(policy, tmp_path / "ours")
        with pytest.raises(rs.ModeError):
            policy.get_logprobs(make_batch(2))
    model = Tiny()
    model.load_state_dict(weights)
    alone = rs.attach(model, make_optimizer(model.parameters()), reference="copy", max_grad_norm=0.1)
    theirs = _trained(alone, tmp_path / "theirs")
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours["loss"], theirs["loss"], strict=True))
    assert torch.allclose(ours["logprobs"], theirs["logprobs"], atol=1e-3)
    assert torch.allclose(ours["reference"], theirs["reference"], atol=1e-4)
    assert ours["nll"] == pytest.approx(theirs["nll"], abs=1e-3)
    assert ours["state"].keys() == ours["weights"].keys() == theirs["state"].keys()
    assert all(torch.equal(value, ours["weights"][name]) for name, value in ours["state"].items())
    assert all(torch.allclose(value, theirs["state"][name], atol=1e-3) for name, value in ours["state"].items())
