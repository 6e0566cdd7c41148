"""Models and optimizers that change while they are attached, and gradients of every origin."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rl_session as rs


def pair(lab: SimpleNamespace, attach: Any, model: str, optimizer: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A policy and its plain twin: kit, policy, its runner, the twin's runner."""
    kit = lab.Kit(model, optimizer)
    policy = attach(kit, **options)
    return kit, policy, lab.Scoped(kit, policy, Path()), lab.Plain(lab.Kit(model, optimizer))


def both(lab: SimpleNamespace, scoped: Any, plain: Any, *program: str) -> None:
    scoped.run(program)
    plain.run(program)
    lab.assert_same_trace(scoped, plain)


def add_layer(kit: Any) -> nn.Parameter:
    """A new trainable tensor, in the module and in a new param group."""
    torch.manual_seed(23)
    kit.model.head.bias = nn.Parameter(torch.randn(13))
    kit.stepped.add_param_group({"params": [kit.model.head.bias], "lr": 0.1})
    return kit.model.head.bias


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd", "nested", "muon"])
@pytest.mark.parametrize("where", ["offloaded", "training", "resident", "logprob"])
def test_a_param_group_added_later_trains_and_moves_like_the_rest(
    lab: SimpleNamespace, attach: Any, optimizer: str, where: str
) -> None:
    kit, policy, scoped, plain = pair(lab, attach, "plain", optimizer)
    both(lab, scoped, plain, "train", "logprob")
    if where in ("training", "logprob"):
        with getattr(policy, f"{where}_mode")():
            added = add_layer(kit)
    else:
        policy.switch(where)
        added = add_layer(kit)
    add_layer(plain.kit)
    both(lab, scoped, plain, "train", "logprob", "open", "offloaded", "more", "commit", "logprob")
    policy.offload()
    assert added.untyped_storage().nbytes() == 0
    assert lab.device_bytes(kit.model, kit.optimizer) == 0
    policy.close()
    lab.assert_same(kit, plain.kit)


def test_a_parameter_that_is_unfrozen_later_trains_like_the_rest(lab: SimpleNamespace, attach: Any) -> None:
    kit, policy, scoped, plain = pair(lab, attach, "frozen", "adamw")
    both(lab, scoped, plain, "train")
    for one in (kit, plain.kit):
        one.model.embed.weight.requires_grad_(True)
        one.stepped.add_param_group({"params": [one.model.embed.weight]})
    both(lab, scoped, plain, "train", "logprob", "train", "refit")
    policy.close()
    lab.assert_same(kit, plain.kit)


def replace_head(kit: Any) -> None:
    """A new head, which the optimizer steps in place of the old one."""
    torch.manual_seed(29)
    old, kit.model.head.weight = kit.model.head.weight, nn.Parameter(torch.randn(13, 8))
    for group in kit.stepped.param_groups:
        group["params"] = [kit.model.head.weight if p is old else p for p in group["params"]]
    kit.stepped.state.pop(old, None)


@pytest.mark.parametrize("where", ["offloaded", "training", "resident"])
@pytest.mark.parametrize("optimizer", ["adamw", "nested"])
def test_a_replaced_parameter_trains_and_moves_like_the_rest(
    lab: SimpleNamespace, attach: Any, where: str, optimizer: str
) -> None:
    kit, policy, scoped, plain = pair(lab, attach, "plain", optimizer)
    both(lab, scoped, plain, "train", "logprob")
    if where == "training":
        with policy.training_mode():
            replace_head(kit)
    else:
        policy.switch(where)
        replace_head(kit)
    replace_head(plain.kit)
    both(lab, scoped, plain, "train", "logprob", "train")
    policy.offload()
    assert lab.device_bytes(kit.model, kit.optimizer) == 0
    policy.close()
    lab.assert_same(kit, plain.kit)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", None])
def test_loading_a_state_dict_by_hand_in_training_mode_is_seen(
    lab: SimpleNamespace, attach: Any, assign: bool, optimizer: str | None
) -> None:
    kit = lab.Kit("buffers", optimizer)
    policy = attach(kit)
    policy.offload()
    torch.manual_seed(31)
    other = lab.BufferLM().state_dict()
    other = {name: value.clone() for name, value in other.items()}
    want = {name: value.clone() for name, value in other.items()}
    with policy.training_mode():
        kit.model.load_state_dict(other, assign=assign)
    assert lab.scan(kit.model, None)["params"] == "away"
    assert lab.same(policy.state_dict(), want)
    with policy.logprob_mode():
        assert lab.same({name: t.detach() for name, t in kit.model.state_dict().items()}, want)
    policy.close()
    assert lab.plain_classes(kit)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_loading_optimizer_state_by_hand_in_training_mode_is_seen(
    lab: SimpleNamespace, attach: Any, optimizer: str
) -> None:
    kit, policy, scoped, plain = pair(lab, attach, "plain", optimizer)
    both(lab, scoped, plain, "train")
    donor = lab.Plain(lab.Kit("plain", optimizer))
    donor.run(["train", "train", "train"])
    with policy.training_mode():
        kit.stepped.load_state_dict(copy.deepcopy(donor.kit.stepped.state_dict()))
    plain.kit.stepped.load_state_dict(copy.deepcopy(donor.kit.stepped.state_dict()))
    both(lab, scoped, plain, "logprob", "train", "offloaded", "train")
    policy.close()
    lab.assert_same(kit, plain.kit)


@pytest.mark.parametrize("scope", ["refit_mode", "logprob_mode"])
def test_buffers_that_a_forward_in_train_mode_writes_or_rebinds_in_an_inference_scope_are_kept(
    lab: SimpleNamespace, attach: Any, scope: str
) -> None:
    kit = lab.Kit("buffers")
    policy = attach(kit, reference="copy")
    policy.offload()
    batch = lab.make_batch(1)
    for count in (1, 2):
        with getattr(policy, scope)():
            kit.model.train()
            kit.model(batch["input_ids"])
            if scope == "logprob_mode":
                policy.get_reference_policy_logprobs(batch)
            means = kit.model.norm.running_mean.clone()
        assert kit.model.seen.untyped_storage().nbytes() == 0
        state = policy.state_dict()
        assert state["seen"][0] == count
        assert lab.same(state["norm.running_mean"], means)


def test_a_cleared_optimizer_state_is_gone_everywhere(lab: SimpleNamespace, attach: Any) -> None:
    kit, policy, scoped, plain = pair(lab, attach, "plain", "adamw")
    both(lab, scoped, plain, "train")
    kit.stepped.state.clear()
    plain.kit.stepped.state.clear()
    assert policy.placement["optimizer"] is rs.Tier.NONE
    both(lab, scoped, plain, "train", "logprob")
    policy.close()
    lab.assert_same(kit, plain.kit)


def test_scopes_before_the_first_step_create_no_optimizer_state(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit("frozen")
    policy = attach(kit)
    for scope in ("training_mode", "logprob_mode", "refit_mode", "offloaded", "training_mode"):
        with getattr(policy, scope)():
            pass
    assert len(kit.stepped.state) == 0
    with policy.training_mode():
        policy.train(lab.make_batch(1), lab.nll_loss)
    assert {id(p) for p in kit.stepped.state} == {id(p) for p in kit.model.parameters() if p.requires_grad}


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "masters", "main-grad"])
def test_gradients_that_a_step_of_ones_own_consumed_are_dropped_and_later_ones_are_kept(
    lab: SimpleNamespace, attach: Any, optimizer: str
) -> None:
    kit, policy, scoped, _ = pair(lab, attach, "plain", optimizer)
    with policy.training_mode():
        scoped.backward_by_hand(lab.make_batch(1))
        scoped.step_by_hand()
        there = lab.storage_bytes(lab.tensors_of(kit.model, kit.optimizer)["grads"])
        assert there > 0
        moved = policy.device.bytes_out
    assert policy.placement["grads"] is rs.Tier.NONE
    assert lab.scan(kit.model, kit.optimizer)["grads"] in ("none", "away")
    everything = policy.memory()["components"]
    assert policy.device.bytes_out - moved == sum(everything[name].get("host", 0) for name in ("params", "optimizer"))
    with policy.training_mode():
        scoped.backward_by_hand(lab.make_batch(2))
        scoped.step_by_hand()
        scoped.backward_by_hand(lab.make_batch(3))
        want = [g.clone() for g in lab.tensors_of(kit.model, kit.optimizer)["grads"]]
    assert policy.placement["grads"] is rs.Tier.HOST
    with policy.training_mode():
        assert lab.same(lab.tensors_of(kit.model, kit.optimizer)["grads"], want)
        kit.stepped.zero_grad()
        kit.model.zero_grad()


@pytest.mark.parametrize("call", ["train", "begin_step"])
def test_training_over_gradients_of_ones_own_is_refused_in_any_scope_and_keeps_them(
    lab: SimpleNamespace, attach: Any, call: str
) -> None:
    kit, policy, scoped, plain = pair(lab, attach, "plain", "adamw")
    both(lab, scoped, plain, "own_backward")
    for _ in range(2):
        with policy.training_mode(), pytest.raises(rs.OpenStepError, match="zero_grad"):
            policy.train(lab.make_batch(1), lab.nll_loss) if call == "train" else policy.begin_step()
    both(lab, scoped, plain, "own_step", "train")
    policy.close()
    lab.assert_same(kit, plain.kit)


def test_training_over_gradients_that_are_away_is_refused_too(lab: SimpleNamespace, attach: Any) -> None:
    _, policy, scoped, plain = pair(lab, attach, "plain", "adamw")
    both(lab, scoped, plain, "own_backward")
    policy.switch("resident")
    assert policy.placement["grads"] is rs.Tier.HOST
    with pytest.raises(rs.OpenStepError, match="zero_grad"):
        policy.train(lab.make_batch(1), lab.nll_loss)
    both(lab, scoped, plain, "own_step")


@pytest.mark.parametrize("call", ["train", "begin_step"])
def test_training_while_the_optimizer_is_away_is_an_error_and_no_fault(
    lab: SimpleNamespace, attach: Any, call: str
) -> None:
    kit, policy, scoped, plain = pair(lab, attach, "plain", "adamw")
    both(lab, scoped, plain, "train")
    policy.switch("resident")
    assert lab.scan(kit.model, kit.optimizer) == {
        "params": "device",
        "buffers": "none",
        "grads": "none",
        "optimizer": "away",
    }
    with pytest.raises(rs.OffloadedAccessError, match=r"policy\.training_mode\(\)"):
        policy.train(lab.make_batch(1), lab.nll_loss) if call == "train" else policy.begin_step()
    assert policy.health == "ok"
    assert policy.open_step is None
    both(lab, scoped, plain, "train")
    policy.close()
    lab.assert_same(kit, plain.kit)


@pytest.mark.parametrize("optimizer", ["adamw", "main-grad", "masters"])
@pytest.mark.parametrize("where", ["training", "logprob in training", "logprob", "offloaded", "resident"])
def test_an_aborted_step_leaves_no_gradient_wherever_it_was(
    lab: SimpleNamespace, attach: Any, optimizer: str, where: str
) -> None:
    kit, policy, scoped, plain = pair(lab, attach, "plain", optimizer)
    both(lab, scoped, plain, "train", "open")
    if where == "logprob in training":
        with policy.training_mode(), policy.logprob_mode():
            scoped.step.abort()
    elif where in ("training", "logprob"):
        with getattr(policy, f"{where}_mode")():
            scoped.step.abort()
    else:
        policy.switch(where)
        scoped.step.abort()
    plain.run(["abort"])
    scoped.trace.clear()
    plain.trace.clear()
    lab.check_placement(policy, kit)
    assert policy.open_step is None
    both(lab, scoped, plain, "train", "logprob", "open", "more", "commit")
    policy.close()
    lab.assert_same(kit, plain.kit)


def test_a_flat_gradient_buffer_is_emptied_by_an_abort_even_if_the_optimizer_does_not(
    lab: SimpleNamespace, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.MainGrad, "zero_grad", torch.optim.Optimizer.zero_grad)
    kit, policy, scoped, _ = pair(lab, attach, "plain", "main-grad", base="resident")
    scoped.run(["open", "abort"])
    assert all(not bool(p.main_grad.any()) for p in kit.model.parameters())
    scoped.run(["train"])
    assert all(not bool(p.main_grad.any()) for p in kit.model.parameters())
    assert policy.placement["grads"] is rs.Tier.DEVICE


def test_a_consumed_flat_gradient_buffer_is_freed_in_place_and_comes_back_as_zeros(
    lab: SimpleNamespace, attach: Any
) -> None:
    kit, policy, scoped, _ = pair(lab, attach, "plain", "main-grad")
    scoped.run(["train"])
    assert policy.placement["grads"] is rs.Tier.NONE
    assert lab.scan(kit.model, kit.optimizer)["grads"] == "away"
    in_use = policy.memory()["host_in_use"]
    assert in_use == sum(lab.storage_bytes([p]) or p.nbytes for p in kit.model.parameters()) * 2
    with policy.training_mode():
        assert all(not bool(p.main_grad.any()) for p in kit.model.parameters())


def test_an_optimizer_whose_state_cannot_be_copied_still_trains(lab: SimpleNamespace, attach: Any) -> None:
    import threading

    kit, _, scoped, plain = pair(lab, attach, "plain", "nested")
    for one in (kit, plain.kit):
        lab.Plain(one).step_by_hand()
    both(lab, scoped, plain, "train")
    for state in kit.stepped.state.values():
        state["object"].lock = threading.Lock()
    both(lab, scoped, plain, "train", "logprob")


@pytest.mark.parametrize("policy_of_gradients", ["refuse", "discard"])
def test_live_gradients_are_refused_or_discarded_as_configured(
    lab: SimpleNamespace, attach: Any, policy_of_gradients: str
) -> None:
    kit = lab.Kit()
    policy = attach(kit, base="resident", live_gradients=policy_of_gradients)
    batch = lab.make_batch(1)
    with policy.training_mode():
        step = policy.begin_step(4, lab.valid_tokens(batch))
        step.forward_backward(batch, lab.nll_loss)
        if policy_of_gradients == "refuse":
            with pytest.raises(rs.OpenStepError, match="commit"), policy.offloaded():
                raise AssertionError("never entered")
            step.commit()
        else:
            with policy.offloaded():
                pass
            assert all(g is None for g in lab.gradients(kit).values())
            assert policy.open_step is None
            with pytest.raises(rs.StepClosedError):
                step.commit()
        policy.train(batch, lab.nll_loss)


def test_a_parameter_of_the_optimizer_alone_moves_with_it_and_its_gradient_with_the_gradients(
    lab: SimpleNamespace, attach: Any
) -> None:
    """A learned temperature, say: stepped with the model, and in no module."""
    kit = lab.Kit()
    lonely = nn.Parameter(torch.ones(5))
    kit.stepped.add_param_group({"params": [lonely]})
    policy = attach(kit)
    with policy.training_mode():
        (lonely * torch.arange(5)).sum().backward()
    assert lonely.untyped_storage().nbytes() == 0
    assert lonely.grad is not None
    assert lonely.grad.untyped_storage().nbytes() == 0
    assert policy.placement["grads"] is rs.Tier.HOST
    with policy.training_mode():
        assert torch.equal(lonely.grad, torch.arange(5.0))
        kit.stepped.step()
    assert lonely.grad is None
    policy.close()
    assert not torch.equal(lonely.detach(), torch.ones(5))
