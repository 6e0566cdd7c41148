"""Closing gives the model and the optimizer back whole, wherever there is room, and leaves no trace of the library."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rl_session as rs
from rl_session.testing import EmulatedDevice


def hooks_of(kit: Any, lab: SimpleNamespace) -> int:
    """How many hooks there are on the module, its wrapper and the optimizer, whoever made them."""
    count = 0
    owners = [kit.model, lab.inner_module(kit.model), *([kit.optimizer] if kit.optimizer else [])]
    for owner in owners:
        for name, value in vars(owner).items():
            if "hook" in name and hasattr(value, "__len__"):
                count += len(value)
    return count


def usable(lab: SimpleNamespace, kit: Any) -> None:
    """Plain torch can use everything: forward, backward, step, copies, state dicts."""
    lab.Plain(kit).run(["train", "logprob", "train"])
    copy.deepcopy(kit.model.state_dict())
    copy.deepcopy(kit.stepped.state_dict())
    assert str(next(iter(kit.model.parameters())))


STATES = ("fresh", "training", "logprob", "offloaded", "resident", "lazy", "open step", "in a scope", "never")


@pytest.mark.parametrize("how", ["close", "detach"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("buffers", "nested"), ("compiled", "adamw"), ("strided", "masters"), ("tied", "main-grad")],
)
def test_a_closed_policy_gives_everything_back_and_leaves_no_hook(
    lab: SimpleNamespace, attach: Any, state: str, how: str, model: str, optimizer: str
) -> None:
    twin = lab.Kit(model, optimizer)
    kit = lab.Kit(model, optimizer)
    hooks = hooks_of(kit, lab)
    policy = attach(kit, release=state if state in ("lazy", "never") else "eager", reference="copy")
    assert hooks_of(kit, lab) > hooks
    plain, scoped = lab.Plain(twin), lab.Scoped(kit, policy, Path())
    with ExitStack() as stack:
        if state != "fresh":
            plain.run(["train"])
            scoped.run(["train"])
        if state == "open step":
            plain.run(["open"])
            scoped.run(["open"])
        if state in ("training", "logprob"):
            stack.enter_context(getattr(policy, f"{state}_mode")())
        if state in ("offloaded", "resident"):
            policy.switch(state)
        if state == "in a scope":
            stack.enter_context(policy.training_mode())
            stack.enter_context(policy.logprob_mode())
            stack.enter_context(policy.offloaded())
        getattr(policy, how)()
        getattr(policy, how)()
        assert lab.plain_classes(kit)
        assert hooks_of(kit, lab) == hooks
        lab.assert_same(kit, twin)
        usable(lab, kit)
        usable(lab, twin)
        lab.assert_same(kit, twin)
    assert policy.health == "closed"
    assert torch.is_grad_enabled()
    assert kit.model.training
    with pytest.raises(rs.ClosedError, match="attach"):
        policy.training_mode().__enter__()
    assert lab.scan(kit.model, kit.optimizer)["params"] == "device"


@pytest.mark.parametrize("optimizer", ["adamw", "nested", "masters", "main-grad"])
def test_without_room_on_the_device_the_model_is_given_back_on_the_host(
    lab: SimpleNamespace, attach: Any, optimizer: str
) -> None:
    twin, kit = lab.Kit("strided", optimizer), lab.Kit("strided", optimizer)
    device = EmulatedDevice()
    device.poison()
    policy = attach(kit, device=device)
    plain, scoped = lab.Plain(twin), lab.Scoped(kit, policy, Path())
    program = ["train", "open"]
    plain.run(program)
    scoped.run(program)
    identities = [id(t) for t in lab.model_state(kit.model).values()]
    device.capacity = 100
    policy.close()
    assert device.resident_bytes <= 100
    assert [id(t) for t in lab.model_state(kit.model).values()] == identities
    assert lab.plain_classes(kit)
    lab.assert_same(kit, twin)
    usable(lab, kit)
    usable(lab, twin)
    lab.assert_same(kit, twin)


def test_a_model_can_be_attached_again_after_it_was_given_back(lab: SimpleNamespace, attach: Any) -> None:
    twin, kit = lab.Kit("buffers", "nested"), lab.Kit("buffers", "nested")
    plain = lab.Plain(twin)
    for index, device in enumerate((None, None, EmulatedDevice())):
        policy = attach(kit, device=device, reference="copy", name=f"policy {index}")
        assert policy.mode is rs.Mode.RESIDENT
        scoped = lab.Scoped(kit, policy, Path())
        plain.trace.clear()
        plain.num = 0
        program = ["train", "logprob", "open", "logprob", "more", "commit"]
        plain.run(program)
        scoped.run(program)
        lab.assert_same_trace(scoped, plain)
        policy.detach()
        lab.assert_same(kit, twin)


def test_a_model_given_back_on_the_host_can_be_attached_again(lab: SimpleNamespace, attach: Any) -> None:
    twin, kit = lab.Kit("tied", "adamw"), lab.Kit("tied", "adamw")
    plain = lab.Plain(twin)
    plain.run(["train"])
    policy = attach(kit)
    lab.Scoped(kit, policy, Path()).run(["train"])
    policy.device.capacity = 0
    policy.detach()
    again = attach(kit, device=EmulatedDevice())
    lab.Scoped(kit, again, Path()).run(["train", "logprob"])
    plain.num = 0
    plain.run(["train", "logprob"])
    again.detach()
    lab.assert_same(kit, twin)


def test_a_scope_that_ends_after_close_ends_quietly(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit("frozen")
    was = [part.training for part in kit.model.modules()]
    policy = attach(kit)
    with policy.logprob_mode():
        assert not kit.model.training
        policy.close()
        assert torch.is_grad_enabled()
        assert [part.training for part in kit.model.modules()] == was
    assert torch.is_grad_enabled()
    assert [part.training for part in kit.model.modules()] == was
    assert policy.health == "closed"


@pytest.mark.parametrize("in_scope", [False, True])
def test_a_session_closes_all_its_participants(lab: SimpleNamespace, tmp_path: Path, in_scope: bool) -> None:
    device = EmulatedDevice()
    device.poison()
    kits = [lab.Kit("plain", "adamw"), lab.Kit("buffers", "nested")]
    twins = [lab.Kit("plain", "adamw"), lab.Kit("buffers", "nested")]
    with ExitStack() as stack:
        session = rs.Session(tmp_path / "run.jsonl", verify="checksum")
        policies = [session.attach(kit.model, kit.optimizer, device=device, name=f"p{i}") for i, kit in enumerate(kits)]
        for kit, twin, policy in zip(kits, twins, policies, strict=True):
            lab.Scoped(kit, policy, Path()).run(["train", "logprob"])
            lab.Plain(twin).run(["train", "logprob"])
        if in_scope:
            stack.enter_context(policies[0].training_mode())
        session.close()
        session.close()
        for kit, twin, policy in zip(kits, twins, policies, strict=True):
            assert policy.health == "closed"
            assert lab.plain_classes(kit)
            lab.assert_same(kit, twin)
    assert session._run.pool.held_bytes == 0


def test_a_failing_copy_at_close_is_made_up_for(lab: SimpleNamespace, attach: Any) -> None:
    twin, kit = lab.Kit(), lab.Kit()
    lab.Plain(twin).run(["train"])
    policy = attach(kit)
    lab.Scoped(kit, policy, Path()).run(["train"])
    policy.device.fail("copy_in", 3, "half")
    policy.close()
    assert policy.health == "closed"
    lab.assert_same(kit, twin)


def test_a_faulted_policy_can_still_be_closed_and_gives_the_model_back(lab: SimpleNamespace, attach: Any) -> None:
    twin, kit = lab.Kit(), lab.Kit()
    lab.Plain(twin).run(["train"])
    policy = attach(kit)
    lab.Scoped(kit, policy, Path()).run(["train"])
    policy.device.fail("copy_in", 3, "half")
    policy.device.fail("free", 1, "before")
    with pytest.raises(rs.FaultedError), policy.training_mode():
        raise AssertionError("never entered")
    assert policy.health == "faulted"
    policy.close()
    assert policy.health == "closed"
    assert lab.plain_classes(kit)
    lab.assert_same(kit, twin)


def test_a_policy_that_faulted_in_a_reference_pass_gives_back_the_live_weights(
    lab: SimpleNamespace, attach: Any
) -> None:
    twin, kit = lab.Kit(), lab.Kit()
    lab.Plain(twin).run(["train"])
    policy = attach(kit, reference="copy")
    lab.Scoped(kit, policy, Path()).run(["train"])
    num = len(list(kit.model.parameters()))
    with policy.training_mode():
        policy.device.fail("copy_in", num + 1)
        policy.device.fail("copy_in", num + 2)
        with pytest.raises(rs.FaultedError):
            policy.get_reference_policy_logprobs(lab.make_batch(1))
    policy.close()
    lab.assert_same(kit, twin)


def test_tensors_that_a_user_still_holds_come_back_too(lab: SimpleNamespace, attach: Any) -> None:
    """A parameter that was replaced while it was away is in nobody's inventory, but its holder wants its bytes."""
    kit = lab.Kit()
    policy = attach(kit)
    old = kit.model.head.weight
    want = old.detach().clone()
    policy.offload()
    kit.model.head.weight = torch.nn.Parameter(torch.ones_like(want))
    with policy.logprob_mode():
        policy.get_logprobs(lab.make_batch(1))
    policy.close()
    assert type(old) is torch.nn.Parameter
    assert lab.same(old.detach(), want)
    assert lab.same(kit.model.head.weight.detach(), torch.ones_like(want))
