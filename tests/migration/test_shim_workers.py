"""The legacy API over a policy on workers: the same effects on every rank, and handles that go to other processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import legacy_loops as loops
import pytest
import torch
from shim_rig import Actor, make_batch

import rl_session as rs
from rl_session.testing import FakeWorkers
from rl_session_migrate import LegacyPolicy, as_loss_fn

pytestmark = pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")


def model() -> Actor:
    torch.manual_seed(0)
    made = Actor()
    made.dropout.p = 0.0
    return made


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def batch() -> dict[str, Any]:
    return {**make_batch(), "token_mask": torch.ones(4, 5), "sample_mask": torch.ones(4)}


@pytest.fixture
def legacy(tmp_path: Path) -> Iterator[LegacyPolicy]:
    with rs.Session(tmp_path / "run.jsonl", verify="checksum") as session:
        policy = session.policy("actor", model=model, optimizer=optimizer, workers=FakeWorkers(2), device="cpu")
        yield LegacyPolicy(policy, backend="megatron")


def tiers(legacy: LegacyPolicy) -> dict[str, str]:
    placement = legacy.placement
    return {name: placement[name].value for name in ("params", "grads", "optimizer")}


def test_calls_have_the_same_effects_on_every_rank(legacy: LegacyPolicy) -> None:
    legacy.prepare_for_training()
    result = legacy.train(batch(), loops.NextTokenLoss(), mbs=1)
    metrics = result["all_mb_metrics"]
    assert [len(values) for values in metrics.values()] == [4] * len(metrics), "one entry a micro-batch"
    assert metrics["global_valid_toks"] == [16.0] * 4
    assert sum(metrics["loss"]) == pytest.approx(float(result["loss"]))
    legacy.finish_inference()
    assert tiers(legacy) == {"params": "host", "grads": "none", "optimizer": "device"}
    legacy.offload_to_cpu()
    assert tiers(legacy) == {"params": "host", "grads": "none", "optimizer": "host"}
    assert legacy.sharding_annotations.get_axis_size("data_parallel") == 2
    assert legacy.run_all_workers_single_data("prepare_for_lp_inference") == [None, None]
    assert legacy.prepare_refit_info()["head.weight"] == ((7, 4), torch.float32)


def test_the_gradients_of_an_open_step_are_kept_on_every_rank(legacy: LegacyPolicy) -> None:
    legacy.prepare_for_training()
    legacy.begin_train_step(loops.NextTokenLoss())
    legacy.train_microbatches(batch())
    legacy.offload_to_cpu()
    assert tiers(legacy) == {"params": "host", "grads": "host", "optimizer": "none"}
    legacy.prepare_for_training()
    result = legacy.finish_train_step()
    assert sum(result["all_mb_metrics"]["num_valid_samples"]) == 4.0, "a count is not divided by the tokens of the step"
    assert set(result["all_mb_metrics"]["global_valid_toks"]) == {16.0}


def test_a_handle_that_was_pickled_serves_the_same_policy(legacy: LegacyPolicy) -> None:
    legacy.prepare_for_lp_inference()
    expected = legacy.get_logprobs(batch())["logprobs"]
    other = pickle.loads(pickle.dumps(legacy))
    assert isinstance(other, LegacyPolicy)
    assert other._config == legacy._config
    assert other.mode == "logprob"
    assert torch.equal(other.get_logprobs(batch())["logprobs"], expected)
    other.finish_inference()
    assert tiers(legacy)["params"] == "host"
    with other.training_mode() as scoped:
        scoped.train(batch(), as_loss_fn(loops.NextTokenLoss()))
    assert tiers(legacy)["params"] == "host", "the way back is where the other handle's call left it"
    legacy.prepare_for_training()
    assert other.mode == "training"
    assert not torch.equal(other.get_logprobs(batch())["logprobs"], expected)
