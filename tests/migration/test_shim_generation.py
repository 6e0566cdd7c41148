"""Legacy generation objects over engines of a session: waking, sleeping, sampling, and bringing weights over."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import legacy_loops as loops
import pytest
import torch
from shim_rig import Actor

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.testing import EmulatedDevice, FakeEngine
from rl_session_migrate import (
    BatchedDataDict,
    LegacyGeneration,
    LegacyPolicy,
    LegacySynchronizer,
    refit_policy_generation,
)
from rl_session_migrate.shim import transfer

pytestmark = pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")

WEIGHTS = sum(t.numel() * t.element_size() for t in Actor().state_dict().values())
KV = 256


class Rig:
    """A policy and a fake engine behind the legacy API.

    Attributes:
        legacy: The policy's handle.
        generation: The engine's handle.
        fake: The engine.
    """

    def __init__(self, path: Path, *, backend: Any, capacity: int | None, apart: bool, policy_backend: Any) -> None:
        self.path = path
        self.device = EmulatedDevice(capacity)
        self.device.poison()
        self.session = rs.Session(path, verify="checksum")
        torch.manual_seed(0)
        self.model = Actor()
        self.policy = self.session.attach(
            self.model, torch.optim.AdamW(self.model.parameters(), lr=0.1), name="actor", device=self.device
        )
        self.fake = FakeEngine(None if apart else self.device, weights=WEIGHTS, kv_nbytes=KV, vocabulary=7)
        self.engine = self.session.engine("vllm", self.fake)
        self.legacy = LegacyPolicy(self.policy, backend=policy_backend)
        self.generation = LegacyGeneration(self.engine, backend=backend)

    def train(self) -> None:
        self.legacy.prepare_for_training()
        self.legacy.train(loops.text(1), loops.NextTokenLoss())

    def on_device(self) -> set[str]:
        return {str(name) for name, tier in self.policy.placement.items() if tier is rs.Tier.DEVICE}

    def records(self, *names: str) -> list[Any]:
        return [record.event for record in rs.read_audit(self.path) if record.name in names]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def build(
        *, backend: str = "vllm", capacity: int | None = None, apart: bool = False, policy_backend: str = "dtensor"
    ) -> Rig:
        path = tmp_path / f"run{len(made)}.jsonl"
        made.append(Rig(path, backend=backend, capacity=capacity, apart=apart, policy_backend=policy_backend))
        return made[-1]

    yield build
    for rig in made:
        rig.fake.heal()
        rig.session.close()
        assert_log_is_consistent(rig.path)


Make = Callable[..., Rig]
PROMPTS = loops.prompts(0)


def test_an_engine_that_was_woken_stays_awake_until_it_is_finished(make: Make) -> None:
    rig = make()
    assert rig.generation.prepare_for_generation() is True
    assert rig.fake.awake_tags == {"weights", "kv_cache"}
    first = rig.generation.generate(PROMPTS)
    assert isinstance(first, BatchedDataDict)
    assert {"output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs"} <= first.keys()
    assert rig.fake.awake_tags == {"weights", "kv_cache"}
    assert torch.equal(rig.generation.generate(PROMPTS)["output_ids"], first["output_ids"])
    assert rig.fake.calls.count("wake weights kv_cache") == 1
    assert rig.generation.finish_generation() is True
    assert not rig.fake.awake_tags
    assert rig.generation.finish_generation() is True, "and again"


def test_it_wakes_part_by_part_and_generates_only_when_all_is_awake(make: Make) -> None:
    rig = make()
    with pytest.raises(rs.ModeError) as refused:
        rig.generation.generate(PROMPTS)
    assert "policy_generation.prepare_for_generation()" in refused.value.remedy
    assert "with engine.awake()" in refused.value.remedy
    rig.generation.prepare_for_generation(tags=["weights"])
    assert rig.fake.awake_tags == {"weights"}
    with pytest.raises(rs.ModeError) as refused:
        rig.generation.generate(PROMPTS)
    assert "prepare_for_generation(tags=['kv_cache'])" in refused.value.remedy
    rig.generation.prepare_for_generation(tags=["kv_cache"])
    rig.generation.generate(PROMPTS)
    assert rig.records("call.finished")[-1].via == "shim"


def test_a_call_inside_a_scope_of_the_engine_is_refused_and_sampling_there_is_served(make: Make) -> None:
    rig = make()
    with rig.engine.awake():
        for call in (rig.generation.prepare_for_generation, rig.generation.finish_generation):
            with pytest.raises(rs.ShimInScopeError, match="inside awake"):
                call()
        rig.generation.generate(PROMPTS)
    assert not rig.fake.awake_tags


@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
def test_these_report_a_failure_by_false_and_the_log_has_it(make: Make, backend: str) -> None:
    rig = make(backend=backend)
    rig.fake.fail("wake")
    assert rig.generation.prepare_for_generation() is False
    (told,) = [event for event in rig.records("warning") if event.code == "legacy_failure_ignored"]
    assert "prepare_for_generation() at test_shim_generation.py:" in told.message
    assert rig.generation.prepare_for_generation() is True
    rig.fake.fail("sleep", error=False)
    assert rig.generation.finish_generation() is False
    assert rig.generation.finish_generation() is True


@pytest.mark.parametrize("backend", ["sglang", "megatron", "dynamo"])
def test_these_raise(make: Make, backend: str) -> None:
    rig = make(backend=backend)
    rig.fake.fail("wake")
    with pytest.raises(rs.EngineError):
        rig.generation.prepare_for_generation()
    result = rig.generation.prepare_for_generation()
    assert result is (None if backend == "sglang" else True)
    assert rig.generation.finish_generation() is (None if backend == "sglang" else True)


def test_megatron_takes_one_keyword_and_keeps_serving_when_told_so(make: Make) -> None:
    rig = make(backend="megatron")
    rig.generation.prepare_for_generation(tags=["colocated_refit"])
    assert rig.fake.awake_tags == {"weights", "kv_cache"}, "a word of its own wakes all of it"
    for wrong in (lambda: rig.generation.finish_generation(True), lambda: rig.generation.finish_generation(gpu=True)):
        with pytest.raises(TypeError):
            wrong()
    assert rig.generation.finish_generation(release_gpu=False) is True
    assert rig.fake.awake_tags
    assert rig.generation.finish_generation(release_gpu=True) is True
    assert not rig.fake.awake_tags
    assert rig.generation.blocks_training() is rig.generation.wake_carries_weight_updates() is True
    assert rig.generation.invalidate_kv_cache() is False
    assert rig.generation.suspend_for_refit() is rig.generation.resume_after_refit() is None


def test_the_others_drop_what_they_are_given(make: Make) -> None:
    rig = make()
    rig.generation.prepare_for_generation(1, anything=2)
    assert rig.generation.finish_generation(release_gpu=False, anything=1) is True
    assert not rig.fake.awake_tags
    assert rig.generation.blocks_training() is rig.generation.wake_carries_weight_updates() is False
    assert rig.generation.invalidate_kv_cache() is True
    assert not hasattr(rig.generation, "weight_synchronizer")
    assert not hasattr(rig.generation, "snapshot_step_metrics")
    assert rig.generation.prepare_refit_info({}) is None
    assert rig.generation.get_logger_metrics() == {}
    assert rig.generation.clear_logger_metrics() is None
    with pytest.raises(rs.UnsupportedError):
        pickle.dumps(rig.generation)
    assert rig.generation.shutdown() is True


def test_an_engine_with_devices_of_its_own_is_awake_anyway(make: Make) -> None:
    rig = make(apart=True)
    rig.generation.generate(PROMPTS)
    assert rig.generation.finish_generation() is True
    assert rig.fake.awake_tags == {"weights", "kv_cache"}
    assert "reset_cache" in rig.fake.calls
    assert rig.generation.prepare_for_generation() is True


def test_whoever_needs_the_room_gets_it_and_the_engine_comes_back_for_the_next_sample(make: Make) -> None:
    """Legacy ran out of memory here."""
    rig = make(capacity=4 * WEIGHTS + KV)
    refit_policy_generation(rig.legacy, rig.generation, True)
    first = rig.generation.generate(PROMPTS)
    rig.train()
    assert not rig.fake.awake_tags
    rig.legacy.offload_to_cpu()
    assert torch.equal(rig.generation.generate(PROMPTS)["output_ids"], first["output_ids"])


def test_beside_an_engine_that_leaves_room_training_does_not_put_it_to_sleep(make: Make) -> None:
    rig = make()
    rig.generation.prepare_for_generation()
    rig.train()
    assert rig.fake.awake_tags == {"weights", "kv_cache"}


def test_a_scope_of_an_engine_that_legacy_woke_leaves_it_awake(make: Make) -> None:
    rig = make()
    rig.generation.prepare_for_generation()
    with rig.engine.awake() as awake:
        first = awake.generate(PROMPTS)
    assert rig.fake.awake_tags == {"weights", "kv_cache"}
    assert torch.equal(rig.generation.generate(PROMPTS)["output_ids"], first["output_ids"])
    rig.generation.finish_generation()
    with rig.engine.awake():
        pass
    assert not rig.fake.awake_tags, "after that, scopes put it to sleep again"


def test_threads_may_generate_at_once(make: Make) -> None:
    rig = make()
    rig.generation.prepare_for_generation()
    expected = rig.generation.generate(PROMPTS)["output_ids"]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(rig.generation.generate, PROMPTS) for _ in range(12)]
        assert all(torch.equal(future.result()["output_ids"], expected) for future in futures)


# -- refit ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_backend", ["dtensor", "megatron"])
def test_a_colocated_refit_leaves_the_policy_away_and_the_engine_awake_with_its_weights(
    make: Make, policy_backend: str
) -> None:
    rig = make(policy_backend=policy_backend, capacity=4 * WEIGHTS + KV)
    rig.train()
    assert "optimizer" in rig.on_device()
    assert refit_policy_generation(rig.legacy, rig.generation, True, 0.5, timer=None) == {"weights_version": 1}
    assert rig.on_device() == set()
    assert not rig.model.training
    assert rig.fake.awake_tags == {"weights", "kv_cache"}
    assert rig.fake.calls[-3:] == ["wake weights", "update_weights", "wake kv_cache"]
    rig.train()
    rig.generation.finish_generation()
    before = rig.fake.fingerprint
    refit_policy_generation(rig.legacy, rig.generation, True)
    assert rig.fake.fingerprint != before
    rig.generation.generate(PROMPTS)


def test_a_refit_that_fails_leaves_the_policy_where_the_first_phase_did(make: Make) -> None:
    rig = make()
    rig.train()
    rig.fake.fail("bucket")
    with pytest.raises(rs.EngineError):
        refit_policy_generation(rig.legacy, rig.generation, True)
    assert rig.on_device() == {"params", "buffers"}
    assert rig.policy.mode == "refit"
    with pytest.raises(rs.RLSessionError):
        rig.generation.generate(PROMPTS)
    refit_policy_generation(rig.legacy, rig.generation, True)
    rig.generation.generate(PROMPTS)


def test_a_refit_of_an_engine_elsewhere_moves_nothing(make: Make) -> None:
    rig = make(apart=True)
    rig.train()
    before = (rig.on_device(), rig.policy.mode, rig.model.training)
    moved = (rig.device.bytes_in, rig.device.bytes_out)
    assert refit_policy_generation(rig.legacy, rig.generation, False) == {"weights_version": 1}
    assert (rig.on_device(), rig.policy.mode, rig.model.training) == before
    assert (rig.device.bytes_in, rig.device.bytes_out) == moved
    rig.legacy.offload_to_cpu()
    with pytest.raises(rs.ModeError) as refused:
        refit_policy_generation(rig.legacy, rig.generation, False)
    assert "policy.prepare_for_lp_inference()" in refused.value.remedy
    assert "policy.refit(engine)" in refused.value.remedy


def test_a_refit_inside_a_scope_is_refused(make: Make) -> None:
    rig = make()
    with rig.policy.training_mode(), pytest.raises(rs.ShimInScopeError):
        refit_policy_generation(rig.legacy, rig.generation, True)
    assert rig.fake.calls == []


def test_a_synchronizer_that_is_attached_does_all_of_it(make: Make) -> None:
    rig = make()
    asked: list[Any] = []

    def sync_weights(**arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return {"synced": 1}

    rig.generation.weight_synchronizer = SimpleNamespace(sync_weights=sync_weights)
    assert refit_policy_generation(rig.legacy, rig.generation, True, timer="t", kv_scales=2) == {"synced": 1}
    assert asked == [{"timer": "t", "kv_scales": 2}]
    assert rig.fake.calls == []


@pytest.mark.parametrize("apart", [False, True])
def test_a_synchronizer_of_the_shim_serves_a_helper_that_would_wait_with_ray(make: Make, *, apart: bool) -> None:
    rig = make(apart=apart)
    rig.train()
    synchronizer = LegacySynchronizer(rig.legacy, rig.generation)
    synchronizer.init_communicator()
    rig.generation.weight_synchronizer = synchronizer
    assert synchronizer.is_stale is True
    before = rig.fake.fingerprint
    assert refit_policy_generation(rig.legacy, rig.generation, not apart, timer="t") == {"weights_version": 1}
    assert (synchronizer.is_stale, rig.fake.fingerprint != before) == (False, True)
    assert rig.on_device() == ({"params", "buffers", "optimizer"} if apart else set())
    rig.generation.generate(PROMPTS)
    assert synchronizer.shutdown() is True
    assert "LegacySynchronizer of" in repr(synchronizer)


def test_a_synchronizer_whose_push_fails_stays_stale_and_ends_both_phases(make: Make) -> None:
    rig = make()
    rig.train()
    synchronizer = LegacySynchronizer(rig.legacy, rig.generation)
    synchronizer.sync_weights()
    rig.train()
    rig.fake.fail("bucket")
    with pytest.raises(rs.EngineError):
        synchronizer.sync_weights()
    assert synchronizer.is_stale is True
    assert rig.on_device() == set(), "unlike the helper it does not leave the policy half-way"
    assert rig.policy.resting_mode == "offloaded"
    rig.legacy.prepare_for_lp_inference()
    assert synchronizer.sync_weights() == {"weights_version": rig.engine.version}
    assert synchronizer.is_stale is False
    with rig.policy.training_mode(), pytest.raises(rs.ShimInScopeError, match="sync_weights"):
        synchronizer.sync_weights()


@pytest.mark.parametrize("sender_first", [True, False])
def test_both_sides_are_told_and_then_waited_for(make: Make, *, sender_first: bool) -> None:
    rig = make()
    rig.train()
    rig.legacy.offload_before_refit()
    rig.generation.prepare_for_generation(tags=["weights"])
    tell = [
        lambda: rig.legacy.stream_weights_via_ipc_zmq(buffer_size_bytes=64, kv_scales=None),
        rig.generation.update_weights_via_ipc_zmq,
    ]
    futures = [future for side in (tell if sender_first else tell[::-1]) for future in side()]
    assert [future.result() for future in futures] == [True, True]
    assert rig.fake.num_buckets[-1] > 1
    assert rig.on_device() == {"params", "buffers"}


def test_one_side_alone_times_out_as_it_did(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    monkeypatch.setattr(transfer, "TIMEOUT_SECONDS", 0.01)
    (future,) = rig.generation.update_weights_from_collective()
    with pytest.raises(TimeoutError):
        future.result()
    (sent,) = rig.legacy.broadcast_weights_for_collective()
    assert sent.result() is True, "what waited is served when the other side comes"
    assert future.result() is True


def test_what_is_away_cannot_be_sent(make: Make) -> None:
    rig = make()
    rig.legacy.offload_to_cpu()
    with pytest.raises(rs.ModeError, match="needs PARAMS"):
        rig.legacy.stream_weights_via_ipc_zmq(buffer_size_bytes=64)


# -- an engine without weights of its own --------------------------------------------------------------------------------


def test_an_in_process_engine_brings_the_policys_weights_in(make: Make) -> None:
    rig = make()
    inner = rs.InProcessEngine(rig.policy, max_new_tokens=2, seed=1)
    generation = LegacyGeneration(inner, backend="megatron")
    rig.train()
    rig.legacy.offload_to_cpu()
    with pytest.raises(rs.ModeError, match="needs PARAMS"):
        generation.generate(PROMPTS)
    assert generation.prepare_for_generation() is True
    assert (rig.on_device(), rig.policy.mode, rig.model.training) == ({"params", "buffers"}, "generation", False)
    found = generation.generate(PROMPTS, greedy=True)
    assert found["output_ids"].shape == (4, 5)
    assert generation.finish_generation() is True
    assert rig.on_device() == {"params", "buffers"}, "finishing moves no weights"
    rig.legacy.get_logprobs(
        found | {"input_ids": found["output_ids"], "input_lengths": found["unpadded_sequence_lengths"]}
    )
    assert torch.equal(rig.legacy.generate(PROMPTS, greedy=True)["output_ids"], found["output_ids"])
    rig.train()
    assert refit_policy_generation(rig.legacy, generation, True) == {}
    assert (rig.on_device(), rig.policy.mode) == ({"params", "buffers"}, "generation")
    with pytest.raises(rs.UnsupportedError, match="own weights"):
        generation.update_weights_via_ipc_zmq()


def test_a_policy_as_its_own_generation_object_needs_no_refit(make: Make) -> None:
    rig = make()
    assert refit_policy_generation(rig.legacy, rig.legacy, True) == {}
    assert (rig.legacy.get_logger_metrics(), rig.legacy.clear_logger_metrics()) == ({}, None)
    with pytest.raises(rs.UsageError, match="needs one engine") as refused:
        rig.legacy.generate(PROMPTS)
    assert "engines that sample from policy 'actor': none" in refused.value.facts
    assert "InProcessEngine(policy)" in refused.value.remedy


def test_a_handle_over_something_else_is_refused(make: Make) -> None:
    rig = make()
    with pytest.raises(rs.ConfigError, match="no engine of a session"):
        LegacyGeneration(rig.fake)  # type: ignore[arg-type]
    with pytest.raises(rs.ConfigError, match="no such backend"):
        LegacyGeneration(rig.engine, backend="hf")  # type: ignore[arg-type]
