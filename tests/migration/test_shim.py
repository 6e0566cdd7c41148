"""The shim beside its contract of effects: what it says, refuses, keeps, records and returns."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import pydoc
import re
import sys
import threading
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import legacy_loops as loops
import pytest
import torch
from shim_rig import Rig, make_batch
from torch import Tensor, nn

import rl_session as rs
from rl_session.testing import EmulatedDevice
from rl_session_migrate import (
    BatchedDataDict,
    LegacyConfig,
    LegacyGeneration,
    LegacyPolicy,
    LegacySynchronizer,
    LegacyValue,
    as_loss_fn,
)

quiet = pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")

Make = Callable[..., Rig]


def here(offset: int = 0) -> str:
    frame = sys._getframe(1)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno + offset}"


def batch(num: int = 4) -> dict[str, Any]:
    return {**make_batch(num), "token_mask": torch.ones(num, 5), "sample_mask": torch.ones(num)}


# -- warnings ----------------------------------------------------------------------------------------------------------


def test_each_call_site_is_warned_about_once_with_the_scope_to_write(make: Make) -> None:
    legacy = make().legacy
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            legacy.prepare_for_training()
            line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        legacy.prepare_for_lp_inference()
    assert [w.category for w in caught] == [DeprecationWarning] * 2
    assert "with policy.training_mode(): ..." in str(caught[0].message)
    assert "with policy.logprob_mode(): ..." in str(caught[1].message)
    assert (Path(caught[0].filename).name, caught[0].lineno) == ("test_shim.py", line)


def test_a_warning_that_is_an_error_comes_before_anything_was_done_and_comes_again(make: Make) -> None:
    rig = make()
    before = (rig.seen(), rig.policy.mode, len(rig.records()))
    for _ in range(2):
        with pytest.raises(DeprecationWarning, match="write: nothing"):
            rig.legacy.offload_to_cpu()
    assert (rig.seen(), rig.policy.mode, len(rig.records())) == before


@quiet
def test_the_no_op_of_a_policy_says_that_it_may_go(make: Make) -> None:
    with pytest.warns(DeprecationWarning, match="write: nothing; it never did anything"):
        assert make().legacy.finish_training("ignored", also="ignored") is None


# -- records -----------------------------------------------------------------------------------------------------------


@quiet
def test_records_say_that_the_shim_asked_and_where(make: Make) -> None:
    rig = make()
    rig.legacy.prepare_for_training()
    site = here(-1)
    started = rig.records("transition.started")[-1].event
    assert (started.via, started.call_site) == ("shim", site)
    assert started.reason == f"prepare_for_training() at {site}"
    rig.legacy.train(batch(), loops.NextTokenLoss())
    called = rig.records("call.finished")[-1].event
    assert (called.method, called.mode, called.via, called.call_site) == ("train", "training", "shim", here(-2))
    assert len(called.digest) == 16
    rig.policy.get_logprobs(batch())
    called = rig.records("call.finished")[-1].event
    assert (called.via, called.call_site) == (None, here(-2))
    rig.policy.switch("offloaded")
    assert rig.records("transition.started")[-1].event.via == "switch"
    with rig.policy.logprob_mode():
        assert rig.records("transition.started")[-1].event.via == "scope"


@quiet
@pytest.mark.parametrize("flat", [False, True])
def test_the_gradients_of_an_open_step_are_kept_where_legacy_destroyed_them_with_a_record(
    make: Make, *, flat: bool
) -> None:
    rig = make(backend="megatron", flat=flat)
    twin = make(backend="megatron", flat=flat)
    loss = loops.NextTokenLoss()
    for each in (rig, twin):
        torch.manual_seed(11)
        each.legacy.prepare_for_training()
        each.legacy.begin_train_step(loss)
        each.legacy.train_microbatches(batch())
    held = rig.gradient_bytes()
    rig.legacy.offload_to_cpu()
    site = here(-1)
    assert rig.seen() == {"P": "cpu", "G": "cpu", "O": "none", "M": "eval"}
    assert rig.gradient_bytes() == held
    (kept,) = [r.event for r in rig.records("warning") if r.event.code == "open_step_kept"]
    assert f"offload_to_cpu() at {site}" in kept.message
    assert kept.nbytes == sum(map(len, held))
    rig.legacy.prepare_for_training()
    assert rig.gradient_bytes() == held
    results = [each.legacy.finish_train_step() for each in (rig, twin)]
    assert torch.equal(results[0]["loss"], results[1]["loss"])
    for name, tensor in rig.policy.state_dict().items():
        assert torch.equal(tensor, twin.policy.state_dict()[name])


@quiet
def test_a_gradient_buffer_of_zeros_is_nobodys_work(make: Make) -> None:
    rig = make(backend="megatron", flat=True)
    assert rig.seen()["G"] == "gpu"
    rig.legacy.prepare_for_lp_inference()
    assert rig.seen()["G"] == "freed"
    rig.legacy.prepare_for_training()
    assert rig.seen()["G"] == "gpu"
    assert not rig.optimizer.flat.any()
    assert not rig.records("warning")


# -- refusals ----------------------------------------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize(
    ("call", "scope"),
    [
        ("prepare_for_training", "training_mode()"),
        ("prepare_for_lp_inference", "logprob_mode()"),
        ("finish_inference", "offloaded()"),
        ("offload_before_refit", "refit_mode()"),
        ("offload_after_refit", "offloaded()"),
        ("offload_to_cpu", "offloaded()"),
    ],
)
def test_a_call_that_moves_bytes_is_refused_inside_a_scope_and_changes_nothing(
    make: Make, call: str, scope: str
) -> None:
    rig = make()
    rig.policy.offload()
    with rig.policy.logprob_mode():
        entered = here(-1)
        before = (rig.seen(), rig.policy.mode, rig.policy.resting_mode, len(rig.records("transition.started")))
        with pytest.raises(rs.ShimInScopeError) as refused:
            getattr(rig.legacy, call)()
        assert (rig.seen(), rig.policy.mode, rig.policy.resting_mode, len(rig.records("transition.started"))) == before
    assert refused.value.attempted == f"policy 'actor': {call}() at {here(-2)} inside logprob_mode() at {entered}"
    assert f"with policy.{scope}: ..." in refused.value.remedy
    getattr(rig.legacy, call)()


@quiet
def test_what_moves_nothing_is_served_inside_a_scope(make: Make) -> None:
    rig = make()
    rig.policy.offload()
    with rig.policy.training_mode():
        rig.legacy.finish_training()
        assert rig.legacy.prepare_for_generation() is True
        assert rig.legacy.finish_generation() is True
        result = rig.legacy.train(batch(), loops.NextTokenLoss())
        assert result["all_mb_metrics"]["loss"] == pytest.approx(result["loss"].tolist())
        rig.legacy.get_logprobs(batch())
        assert rig.model.training, "inside a scope a call restores the train flag, as the scope's own calls do"
    assert rig.policy.mode == "offloaded"


@quiet
@pytest.mark.parametrize(
    ("setup", "call", "missing", "scope"),
    [
        ("offload_to_cpu", "get_logprobs", "prepare_for_lp_inference()", "with policy.logprob_mode()"),
        ("offload_to_cpu", "train", "prepare_for_training()", "with policy.training_mode()"),
        ("offload_before_refit", "train", "prepare_for_training()", "with policy.training_mode()"),
        (
            "finish_inference",
            "get_reference_policy_logprobs",
            "prepare_for_lp_inference()",
            "with policy.logprob_mode()",
        ),
    ],
)
def test_a_compute_call_in_the_wrong_state_names_the_missing_call_and_the_scope(
    make: Make, setup: str, call: str, missing: str, scope: str
) -> None:
    rig = make(reference="copy")
    rig.legacy.prepare_for_training()
    rig.legacy.train(batch(), loops.NextTokenLoss())
    getattr(rig.legacy, setup)()
    before = rig.seen()
    arguments = (batch(), loops.NextTokenLoss()) if call == "train" else (batch(),)
    with pytest.raises(rs.ModeError) as refused:
        getattr(rig.legacy, call)(*arguments)
    assert f"policy.{missing}" in refused.value.remedy
    assert scope in refused.value.remedy
    assert missing in " ".join(refused.value.facts)
    assert rig.records("guard.rejected")[-1].event.method == call
    assert rig.seen() == before
    getattr(rig.legacy, missing[:-2])()
    getattr(rig.legacy, call)(*arguments)


@quiet
def test_computing_wherever_the_bytes_are_is_legal_as_it_was(make: Make) -> None:
    """Legacy looked at no mode: log-probabilities between two phases of a refit, training after log-probabilities."""
    rig = make()
    rig.legacy.offload_before_refit()
    assert rig.policy.mode == "refit"
    rig.legacy.get_logprobs(batch())
    assert rig.policy.mode == "logprob"
    rig.legacy.train(batch(), loops.NextTokenLoss())
    assert rig.policy.mode == "training"
    assert rig.seen() == {"P": "gpu", "G": "none", "O": "gpu", "M": "train"}


@quiet
def test_training_in_an_open_step_is_refused_and_the_step_stays(make: Make) -> None:
    rig = make()
    rig.legacy.prepare_for_training()
    rig.legacy.begin_train_step(loops.NextTokenLoss())
    rig.legacy.train_microbatches(batch())
    held = rig.gradient_bytes()
    with pytest.raises(rs.OpenStepError):
        rig.legacy.train(batch(), loops.NextTokenLoss())
    assert rig.gradient_bytes() == held
    rig.legacy.abort_train_step()
    rig.legacy.abort_train_step()  # without a step it does nothing


@quiet
def test_a_value_takes_no_arguments_and_a_policy_swallows_them(make: Make) -> None:
    value = make(kind="value").legacy
    for call in ("prepare_for_training", "prepare_for_inference", "finish_inference", "finish_training"):
        with pytest.raises(TypeError):
            getattr(value, call)(keep_train_buffers=True)
    policy = make().legacy
    for call in ("prepare_for_training", "finish_training", "prepare_for_generation", "finish_generation"):
        getattr(policy, call)(1, anything=2)
    with pytest.raises(TypeError):
        policy.prepare_for_lp_inference(anything=2)


def test_a_handle_over_something_else_is_refused_by_name(make: Make) -> None:
    rig, critic = make(), make(kind="value")
    with pytest.raises(rs.ConfigError, match="no policy of rl_session"):
        LegacyPolicy(critic.policy)
    with pytest.raises(rs.ConfigError, match="no value of rl_session"):
        LegacyValue(rig.policy)
    with pytest.raises(rs.ConfigError, match="no such backend"):
        LegacyPolicy(rig.policy, backend="fsdp1")  # type: ignore[arg-type]
    with pytest.raises(rs.ConfigError, match="of another"):
        LegacyPolicy(rig.policy, backend="megatron", config=LegacyConfig(backend="dtensor"))


def test_a_handle_of_a_policy_in_this_process_cannot_be_pickled(make: Make) -> None:
    for rig in (make(), make(kind="value")):
        with pytest.raises(rs.UnsupportedError, match="pickling Legacy") as refused:
            pickle.dumps(rig.legacy)
        assert "workers=" in refused.value.remedy


def test_over_remote_workers_a_handle_is_pickled_as_the_policy_is(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(backend="megatron", config={"offload_optimizer_for_refit": False})

    class Remote:
        """A group whose ranks are elsewhere."""

        num_ranks = 2

    monkeypatch.setattr(rig.policy._control, "group", Remote(), raising=True)
    rebuild, (kind, policy, config) = rig.legacy.__reduce__()
    monkeypatch.undo()
    assert policy is rig.policy
    again = rebuild(kind, policy, config)
    assert (type(again), again._config) == (LegacyPolicy, rig.legacy._config)


# -- configuration -----------------------------------------------------------------------------------------------------


def test_flags_come_from_the_legacy_configuration_and_else_from_the_policys_own(make: Make) -> None:
    nested = {
        "offload_optimizer_for_logprob": True,
        "train_micro_batch_size": 2,
        "megatron_cfg": {"enabled": True, "optimizer": {"optimizer_cpu_offload": True}},
        "dtensor_cfg": None,
    }
    config = make(backend="megatron", config=nested).legacy._config
    assert config == LegacyConfig(
        backend="megatron", offload_optimizer_for_logprob=True, optimizer_cpu_offload=True, train_micro_batch_size=2
    )
    config = make(offload_optimizer_for_logprob=True, offload_optimizer_for_refit=False).legacy._config
    assert (config.offload_optimizer_for_logprob, config.offload_optimizer_for_refit) == (True, False)


@quiet
def test_batch_sizes_come_from_the_configuration(make: Make) -> None:
    config = {"train_global_batch_size": 2, "train_micro_batch_size": 1, "logprob_batch_size": 3}
    rig = make(config=config)
    rig.legacy.prepare_for_training()
    result = rig.legacy.train(batch(), loops.NextTokenLoss())
    assert result["loss"].shape == result["grad_norm"].shape == (2,)
    assert len(result["all_mb_metrics"]["loss"]) == 4
    assert rig.legacy.get_logprobs(batch())["logprobs"].shape == (4, 5)


# -- results -----------------------------------------------------------------------------------------------------------


@quiet
def test_train_returns_what_legacy_loops_read(make: Make) -> None:
    rig = make()
    rig.legacy.prepare_for_training()
    data = batch()
    data["sample_mask"][3] = 0
    result = rig.legacy.train(data, loops.NextTokenLoss(), gbs=2, mbs=1)
    metrics = result["all_mb_metrics"]
    assert metrics["lr"] == [0.05] * 3, "a micro-batch without valid samples reports nothing"
    assert metrics["global_valid_seqs"] == [2.0, 2.0, 1.0]
    assert metrics["global_valid_toks"] == [8.0, 8.0, 4.0]
    # Divided by the number of global batches, so that all of them sum to the mean over steps.
    assert sum(metrics["loss"]) == pytest.approx(float(result["loss"].mean()), rel=1e-5)
    assert set(result) == {"loss", "grad_norm", "all_mb_metrics"}


class Extremes:
    """Reports a maximum and something that is no number."""

    input_type = "logit"
    loss_type = "sequence_level"

    def __call__(self, *, logits: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Any:
        assert isinstance(data, BatchedDataDict)
        assert data.size == len(logits)
        loss = logits.float().square().mean(dim=(1, 2)).sum() / global_valid_seqs
        return loss, {"gap_max": logits.detach().max(), "names": ["a", "b"], "n": torch.tensor(len(logits))}


@quiet
def test_maxima_are_not_divided_and_what_is_no_number_comes_as_it_is(make: Make) -> None:
    rig = make()
    rig.legacy.prepare_for_training()
    metrics = rig.legacy.train(batch(), Extremes(), gbs=2, mbs=2)["all_mb_metrics"]
    assert metrics["names"] == [["a", "b"]] * 2
    assert metrics["n"] == [1.0, 1.0], "two of them, divided by the number of global batches"
    assert all(isinstance(value, float) and value > 0 for value in metrics["gap_max"])


@quiet
def test_the_split_step_divides_by_what_its_chunks_counted(make: Make) -> None:
    split, whole = make(), make()
    for each in (split, whole):
        each.legacy.prepare_for_training()
        each.model.dropout.p = 0.0
    data = batch()
    expected = whole.legacy.train(data, loops.NextTokenLoss(), mbs=2)
    split.legacy.begin_train_step(loops.NextTokenLoss())
    for start in (0, 2):
        split.legacy.train_microbatches_from_meta(BatchedDataDict(data).slice(start, start + 2))
    result = split.legacy.finish_train_step()
    assert torch.allclose(result["loss"], expected["loss"])
    assert torch.allclose(result["grad_norm"], expected["grad_norm"])
    assert result["all_mb_metrics"]["global_valid_toks"] == expected["all_mb_metrics"]["global_valid_toks"]
    assert result["all_mb_metrics"]["loss"] == pytest.approx(expected["all_mb_metrics"]["loss"])
    for name, tensor in split.policy.state_dict().items():
        assert torch.allclose(tensor, whole.policy.state_dict()[name])


@quiet
def test_inference_results_are_legacy_batches(make: Make) -> None:
    rig = make(reference="copy")
    for call, keys in (
        (lambda: rig.legacy.get_logprobs(batch()), {"logprobs"}),
        (lambda: rig.legacy.get_reference_policy_logprobs(batch(), micro_batch_size=1), {"reference_logprobs"}),
        (lambda: rig.legacy.get_topk_logits(batch(), k=2), {"topk_logits", "topk_indices"}),
    ):
        found = call()
        assert isinstance(found, BatchedDataDict)
        assert found.keys() == keys
    meta = batch()
    assert rig.legacy.get_logprobs_from_meta(meta) is None
    assert rig.legacy.get_reference_policy_logprobs_from_meta(meta) is None
    assert {"prev_logprobs", "reference_policy_logprobs"} <= meta.keys()
    with pytest.raises(rs.UnsupportedError, match="data plane"):
        rig.legacy.get_logprobs_from_meta(object())


def test_a_loss_with_an_input_that_is_not_served_is_refused_by_name() -> None:
    class Distilling:
        input_type = types.SimpleNamespace(name="DISTILLATION")

    with pytest.raises(rs.UnsupportedError, match="distillation"):
        as_loss_fn(Distilling())


def test_a_loss_function_is_given_back_as_it_is() -> None:
    def loss_fn(logits: Any, data: Any, seqs: Any, tokens: Any) -> Any: ...

    assert as_loss_fn(loss_fn) is loss_fn
    adapted = as_loss_fn(loops.PreferenceLoss())
    assert adapted.loss_type is loops.LossLevel.SEQUENCE_LEVEL
    assert isinstance(pickle.loads(pickle.dumps(adapted)).loss, loops.PreferenceLoss)


# -- the batch -----------------------------------------------------------------------------------------------------------


def test_a_legacy_batch_has_the_methods_that_loops_use() -> None:
    data = BatchedDataDict({"input_ids": torch.arange(6).view(3, 2), "names": ["a", "b", "c"], "scale": 2.0})
    assert data.size == 3
    assert data.to("cpu") is data
    data.update({"rewards": torch.ones(3)})
    assert data.get("missing", 7) == 7
    assert "rewards" in data
    part = data.slice(1, 3)
    assert (part.size, part["names"], part["scale"]) == (2, ["b", "c"], 2.0)
    assert BatchedDataDict[int] is BatchedDataDict
    assert data.get_multimodal_dict(as_tensors=True) == {}
    assert data.repeat_interleave(2, share_immutable_media=True)["names"] == ["a", "a", "b", "b", "c", "c"]
    assert data.select_indices([2, 0])["input_ids"].tolist() == [[4, 5], [0, 1]]
    assert [each.size for each in data.make_microbatch_iterator(2)] == [2, 1]
    assert data.chunk(2, 3)["names"] == ["c"]
    longer = {**data, "input_ids": torch.ones(1, 4, dtype=torch.int64), "names": ["d"], "rewards": torch.zeros(1)}
    joined = BatchedDataDict.from_batches([data, longer], pad_value_dict={"input_ids": 9})
    assert joined["input_ids"].tolist() == [[0, 1, 9, 9], [2, 3, 9, 9], [4, 5, 9, 9], [1, 1, 1, 1]]
    assert joined["names"] == ["a", "b", "c", "d"]
    assert BatchedDataDict().size == 0
    for wrong in (lambda: data.slice(2, 2), lambda: data.chunk(0, 2), lambda: BatchedDataDict.from_batches([])):
        with pytest.raises(rs.BatchError):
            wrong()


# -- the rest ------------------------------------------------------------------------------------------------------------


@quiet
def test_small_things_that_loops_ask_of_a_policy(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    rig = make(capacity=10_000)
    info = rig.legacy.prepare_refit_info()
    assert info["head.weight"] == ((7, 4), torch.float32)
    rig.legacy.offload_to_cpu()
    assert rig.legacy.prepare_refit_info() == info, "also while the weights are away"
    assert rig.legacy.get_free_memory_bytes() == 10_000
    assert rig.legacy.sharding_annotations.get_axis_size("data_parallel") == 1
    assert rig.legacy.sharding_annotations.get_axis_size("tensor_parallel") == 1
    assert rig.legacy.release_ipc_buffer() is None
    assert rig.legacy.finalize_async_save() is None
    assert rig.legacy.invalidate_kv_cache() is True
    rig.legacy.print_node_ip_and_gpu_id()
    assert "policy 'actor': 1 rank" in capsys.readouterr().out
    with pytest.raises(NotImplementedError):
        rig.legacy.calibrate_qkv_fp8_scales(batch())
    assert getattr(rig.legacy, "weight_synchronizer", None) is None
    assert rig.legacy.shutdown() is True
    assert rig.policy.health == "closed"


@quiet
def test_worker_methods_can_be_reached_by_name(make: Make) -> None:
    rig = make()
    assert rig.legacy.run_all_workers_single_data("prepare_for_lp_inference", keep_train_buffers=True) == [None]
    assert rig.policy.mode == "logprob"
    with pytest.raises(ValueError, match="by keyword only"):
        rig.legacy.run_all_workers_single_data("prepare_for_lp_inference", True)
    with pytest.raises(AttributeError, match="there are finalize_async_save, finish_inference"):
        rig.legacy.run_all_workers_single_data("my_own_method")


@quiet
@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_a_checkpoint_can_be_loaded_again_and_says_where_the_optimizer_is(
    make: Make, tmp_path: Path, backend: str
) -> None:
    rig = make(backend=backend)
    rig.legacy.prepare_for_training()
    rig.legacy.train(batch(), loops.NextTokenLoss())
    rig.legacy.offload_to_cpu()
    saved = rig.policy.state_dict()
    result = rig.legacy.save_checkpoint(
        weights_path=str(tmp_path / "w"),
        optimizer_path=str(tmp_path / "o"),
        tokenizer_path="t",
        checkpointing_cfg={},
        is_final_checkpoint=True,
    )
    assert result is None
    assert str(tmp_path / "w") in (tmp_path / "o" / "READ_ME.txt").read_text(encoding="utf-8")
    brought_in = {"P": "gpu", "G": "none", "O": "gpu", "M": "train"}
    assert rig.seen() == (brought_in if backend == "megatron" else {"P": "cpu", "G": "none", "O": "cpu", "M": "eval"})
    rig.legacy.prepare_for_training()
    rig.legacy.train(batch(), loops.NextTokenLoss())
    rig.policy.load_checkpoint(tmp_path / "w")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in rig.policy.state_dict().items())


class Interface(ABC):
    """A legacy interface."""

    @abstractmethod
    def prepare_for_training(self) -> None: ...


def test_a_handle_is_an_instance_of_the_legacy_interfaces(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("nemo_rl.models.policy.interfaces")
    module.PolicyInterface = Interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert isinstance(make().legacy, Interface)


class Frozen(nn.Module):
    """A layer that rests in eval under a root in train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.frozen = nn.Dropout(0.9)
        self.head = nn.Linear(4, 7)
        self.frozen.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.frozen(self.embed(input_ids)))
        return out


@quiet
def test_submodules_frozen_in_eval_stay_so() -> None:
    model = Frozen()
    policy = rs.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), device=EmulatedDevice())
    legacy = LegacyPolicy(policy)
    for _ in range(2):
        legacy.prepare_for_lp_inference()
        assert not any(part.training for part in model.modules())
        legacy.prepare_for_training()
        assert (model.training, model.head.training, model.frozen.training) == (True, True, False)
        legacy.train(batch(), loops.NextTokenLoss())
        assert (model.training, model.frozen.training) == (True, False)
    policy.close()


# -- half-migrated loops, threads, tasks -----------------------------------------------------------------------------------


@quiet
def test_scopes_and_legacy_calls_stand_beside_each_other(make: Make) -> None:
    rig = make()
    legacy = rig.legacy
    legacy.prepare_for_training()
    legacy.train(batch(), loops.NextTokenLoss())
    legacy.finish_inference()
    parked = {"P": "cpu", "G": "none", "O": "gpu", "M": "eval"}
    assert rig.seen() == parked
    with legacy.training_mode():
        assert rig.seen() == {"P": "gpu", "G": "none", "O": "gpu", "M": "train"}
        legacy.train(batch(), loops.NextTokenLoss())
    assert rig.seen() == parked, "a scope comes back to where the legacy call left the policy"
    with legacy.offloaded():
        assert rig.seen() == {**parked, "O": "cpu"}
    assert rig.seen() == parked
    legacy.prepare_for_lp_inference()
    with legacy.logprob_mode() as scoped:
        scoped.get_logprobs(batch())
    assert rig.policy.resting_mode == "logprob"
    assert legacy.scoped is rig.policy
    assert legacy.mode == "logprob"
    assert legacy.placement["optimizer"] is rs.Tier.DEVICE


@quiet
def test_calls_may_come_from_threads_at_once(make: Make) -> None:
    rig = make()
    rig.legacy.prepare_for_training()
    expected = rig.policy.get_logprobs(batch())["logprobs"]
    calls = [
        lambda: rig.legacy.get_logprobs(batch())["logprobs"],
        lambda: rig.legacy.prepare_for_lp_inference(keep_train_buffers=True),
        rig.legacy.prepare_for_training,
        lambda: rig.legacy.get_logprobs(batch())["logprobs"],
    ] * 5
    with ThreadPoolExecutor(8) as pool:
        results = [future.result() for future in [pool.submit(call) for call in calls]]
    assert all(torch.equal(result, expected) for result in results if result is not None)
    assert rig.seen()["P"] == "gpu"


@quiet
def test_a_lifecycle_call_from_another_thread_is_refused_while_a_scope_is_open(make: Make) -> None:
    rig = make()
    rig.policy.offload()
    with ThreadPoolExecutor(1) as pool, rig.policy.logprob_mode():
        future = pool.submit(rig.legacy.prepare_for_training)
        with pytest.raises(rs.ShimInScopeError):
            future.result()
        assert pool.submit(rig.legacy.get_logprobs, batch()).result()["logprobs"].shape == (4, 5)


@quiet
def test_a_call_waits_for_another_thread_that_is_at_work(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    rig.legacy.prepare_for_training()
    control = rig.policy._control
    begun, waited, go_on = threading.Event(), threading.Event(), threading.Event()
    acquire = control.acquire
    refusals: list[Any] = []

    def watched(call: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return acquire(call, *args, **kwargs)
        except rs.OwnershipError:
            refusals.append(call)
            if refusals.count("offload_to_cpu()") == 2:
                waited.set()
            raise

    monkeypatch.setattr(control, "acquire", watched)

    def slow(logits: Tensor, data: Any, seqs: Any, tokens: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return logits.float().square().mean(), {}

    with ThreadPoolExecutor(2) as pool:
        training = pool.submit(rig.legacy.train, batch(), slow)
        assert begun.wait(60)
        offloading = pool.submit(rig.legacy.offload_to_cpu)
        assert waited.wait(60), "refused twice by the owner's lock, and still waiting"
        assert not offloading.done()
        go_on.set()
        training.result()
        offloading.result()
    assert rig.seen() == {"P": "cpu", "G": "none", "O": "cpu", "M": "eval"}


@quiet
def test_a_refused_call_leaves_the_train_flag(make: Make) -> None:
    rig = make()
    rig.legacy.prepare_for_training()
    rig.legacy.begin_train_step(loops.NextTokenLoss())
    rig.legacy.get_logprobs(batch())
    assert not rig.model.training
    with pytest.raises(rs.OpenStepError):
        rig.legacy.train(batch(), loops.NextTokenLoss())
    assert not rig.model.training
    with pytest.raises(rs.BatchError):
        rig.legacy.train({}, loops.NextTokenLoss(), eval_mode=True)
    assert not rig.model.training


@quiet
def test_bound_methods_go_through_to_thread(make: Make) -> None:
    rig = make(backend="megatron")

    async def step() -> Any:
        await asyncio.to_thread(rig.legacy.prepare_for_lp_inference, keep_train_buffers=False)
        await asyncio.to_thread(rig.legacy.get_logprobs, batch())
        await asyncio.to_thread(rig.legacy.prepare_for_training)
        await asyncio.to_thread(rig.legacy.begin_train_step, loops.NextTokenLoss())
        await asyncio.to_thread(rig.legacy.train_microbatches_from_meta, batch())
        await asyncio.to_thread(rig.legacy.prepare_for_lp_inference, keep_train_buffers=True)
        await asyncio.to_thread(rig.legacy.get_logprobs, batch())
        await asyncio.to_thread(rig.legacy.prepare_for_training)
        return await asyncio.to_thread(rig.legacy.finish_train_step)

    assert asyncio.run(step())["loss"].shape == (1,)
    assert rig.seen() == {"P": "gpu", "G": "none", "O": "gpu", "M": "train"}


@quiet
def test_a_transition_that_fails_leaves_everything_and_can_be_made_again(make: Make) -> None:
    rig = make()
    rig.legacy.prepare_for_training()
    rig.legacy.train(batch(), loops.NextTokenLoss())
    before = rig.seen()
    rig.device.fail("copy_out", k=1, point="half")
    with pytest.raises(rs.TransitionError):
        rig.legacy.offload_to_cpu()
    assert rig.seen() == before
    rig.legacy.offload_to_cpu()
    assert rig.seen() == {"P": "cpu", "G": "none", "O": "cpu", "M": "eval"}


@quiet
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("freeing", ["prepare_for_lp_inference", "offload_before_refit", "offload_to_cpu"])
@pytest.mark.parametrize("eval_mode", [False, True])
def test_on_megatron_training_after_the_gradient_buffer_was_freed_names_the_call_that_brings_it_back(
    make: Make, freeing: str, *, flat: bool, eval_mode: bool
) -> None:
    rig = make(backend="megatron", flat=flat)
    rig.legacy.prepare_for_training()
    rig.legacy.train(batch(), loops.NextTokenLoss())
    getattr(rig.legacy, freeing)()
    rig.legacy.prepare_for_lp_inference(keep_train_buffers=True)  # brings weights in, and no buffer back
    rig.legacy.get_logprobs(batch())
    before = (rig.seen(), rig.policy.mode)
    with pytest.raises(rs.ModeError) as refused:
        rig.legacy.train(batch(), loops.NextTokenLoss(), eval_mode=eval_mode)
    assert "GRADS" in refused.value.attempted
    assert "policy.prepare_for_training()" in refused.value.remedy
    assert "with policy.training_mode(): policy.train(...)" in refused.value.remedy
    assert (rig.seen(), rig.policy.mode) == before
    with rig.legacy.training_mode():
        rig.legacy.train(batch(), loops.NextTokenLoss())
    with pytest.raises(rs.ModeError):  # a scope comes back to where the legacy call left the policy
        rig.legacy.begin_train_step(loops.NextTokenLoss())
    rig.legacy.prepare_for_training()
    rig.legacy.train(batch(), loops.NextTokenLoss(), eval_mode=eval_mode)
    rig.legacy.get_logprobs(batch())  # leaves eval, and frees nothing
    rig.legacy.train(batch(), loops.NextTokenLoss(), eval_mode=eval_mode)


@quiet
def test_a_buffer_that_was_freed_stays_so_past_a_save_a_park_and_a_sample(make: Make, tmp_path: Path) -> None:
    rig = make(backend="megatron")
    engine = LegacyGeneration(rs.InProcessEngine(rig.policy, max_new_tokens=1), backend="megatron")
    rig.legacy.prepare_for_training()
    rig.legacy.train(batch(), loops.NextTokenLoss())
    for between in (
        lambda: rig.legacy.save_checkpoint(tmp_path / "w", tmp_path / "o"),
        lambda: (rig.legacy.finish_inference(), rig.legacy.prepare_for_lp_inference(keep_train_buffers=True)),
        lambda: (engine.prepare_for_generation(), engine.generate(make_batch(length=3))),
        lambda: rig.legacy.generate(make_batch(length=3)),
    ):
        rig.legacy.prepare_for_training()
        rig.legacy.prepare_for_lp_inference()
        between()
        with pytest.raises(rs.ModeError, match="needs GRADS"):
            rig.legacy.train(batch(), loops.NextTokenLoss())
    rig.policy.switch("training")  # the library's own word brings everything in
    rig.legacy.train(batch(), loops.NextTokenLoss())


@quiet
def test_the_buffer_of_an_open_step_is_kept_and_training_goes_on_after_it(make: Make) -> None:
    rig = make(backend="megatron")
    rig.legacy.prepare_for_training()
    rig.legacy.begin_train_step(loops.NextTokenLoss())
    rig.legacy.train_microbatches(batch())
    rig.legacy.prepare_for_lp_inference()
    rig.legacy.get_logprobs(batch())
    rig.legacy.train_microbatches(batch())
    rig.legacy.finish_train_step()
    rig.legacy.train(batch(), loops.NextTokenLoss())
    rig.legacy.begin_train_step(loops.NextTokenLoss())
    rig.legacy.train_microbatches(batch())
    rig.legacy.prepare_for_lp_inference()
    rig.legacy.abort_train_step()
    rig.legacy.train(batch(), loops.NextTokenLoss())


@quiet
@pytest.mark.parametrize("call", ["begin_train_step", "train"])
def test_errors_of_the_split_step_speak_of_its_legacy_calls(make: Make, call: str) -> None:
    rig = make(backend="megatron")
    loss = loops.NextTokenLoss()
    rig.legacy.prepare_for_training()
    for orphan in (lambda: rig.legacy.train_microbatches(batch()), rig.legacy.finish_train_step):
        with pytest.raises(rs.StepClosedError, match="no train step is open") as refused:
            orphan()
        assert "policy.begin_train_step(loss_fn)" in refused.value.remedy
    rig.legacy.begin_train_step(loss)
    rig.legacy.train_microbatches(batch())
    held = rig.gradient_bytes()
    arguments = (loss,) if call == "begin_train_step" else (batch(), loss)
    with pytest.raises(rs.OpenStepError) as refused:
        getattr(rig.legacy, call)(*arguments)
    assert refused.value.attempted == f"policy 'actor': {call}() at {here(-1)} while a train step is open"
    assert "policy.finish_train_step()  # or policy.abort_train_step()" in refused.value.remedy
    assert rig.gradient_bytes() == held
    rig.legacy.finish_train_step()


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        ("prepare_for_generation", "nothing; a policy is no engine"),
        ("finish_generation", "nothing; a policy is no engine"),
        ("invalidate_kv_cache", "nothing; a policy is no engine"),
        ("abort_train_step", "step.abort()"),
    ],
)
def test_calls_that_do_nothing_warn_once_too(make: Make, call: str, instead: str) -> None:
    rig = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            getattr(rig.legacy, call)()
    (warned,) = caught
    assert warned.category is DeprecationWarning
    assert f"policy.{call}()" in str(warned.message)
    assert instead in str(warned.message)


# -- help ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LegacyPolicy, LegacyValue, LegacyGeneration, LegacySynchronizer])
def test_help_gives_the_contract_of_every_method_and_where_to_read_on(kind: type) -> None:
    text = pydoc.plain(pydoc.render_doc(kind))
    names = [name for name, value in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    for name in names:
        assert name in text
        assert inspect.getdoc(getattr(kind, name)), name
    for name in (name for name in dir(kind) if not name.startswith("_")):
        told = inspect.getdoc(getattr(kind, name)) or ""
        assert "Contract:" in told, name
        assert re.search(r"Guide:\s+docs/legacy-api\.md\.", told), name
    assert "migration/README.md" in (kind.__doc__ or "")
    for page in ("docs/legacy-api.md", "migration/README.md"):
        assert (Path(__file__).parents[2] / page).is_file()
