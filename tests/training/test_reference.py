"""The reference stands in for the live weights for one call, and leaves no trace on them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rl_session as rs
from rl_session.testing import EmulatedDevice

WHERE = ("logprob", "training", "open step", "resident", "logprob in an open step")


def live(lab: SimpleNamespace, kit: Any) -> dict[str, tuple[Tensor, int, int]]:
    """Bits, version and identity of every weight and buffer."""
    return {name: (t.detach().clone(), t._version, id(t)) for name, t in lab.model_state(kit.model).items()}


def unchanged(lab: SimpleNamespace, kit: Any, before: dict[str, tuple[Tensor, int, int]]) -> bool:
    return all(
        torch.equal(t.detach(), before[name][0]) and t._version == before[name][1] and id(t) == before[name][2]
        for name, t in lab.model_state(kit.model).items()
    )


def detached_twin(lab: SimpleNamespace, kit: Any, batch: Any) -> Tensor:
    """Logprobs of the deep copy, by a policy of its own."""
    twin = rs.attach(copy.deepcopy(kit.reference), name="twin", device=EmulatedDevice())
    with twin.logprob_mode():
        logprobs = twin.get_logprobs(batch)["logprobs"]
    twin.close()
    return logprobs


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("model", ["plain", "tied", "buffers", "strided", "llama"])
def test_a_copied_reference_gives_the_logprobs_of_a_deep_copy_after_training_too(
    lab: SimpleNamespace, attach: Any, model: str, where: str
) -> None:
    kit = lab.Kit(model)
    policy = attach(kit, reference="copy")
    batch = lab.make_batch(5)
    want = detached_twin(lab, kit, batch)
    assert lab.same(want, lab.naive_logprobs(kit.reference, batch))

    def check() -> None:
        before = live(lab, kit)
        assert torch.equal(policy.get_reference_policy_logprobs(batch)["reference_logprobs"], want)
        assert unchanged(lab, kit, before)

    for _ in range(2):
        if where == "logprob":
            with policy.logprob_mode():
                check()
        elif where == "resident":
            policy.switch("resident")
            check()
        with policy.training_mode():
            if where == "training":
                check()
            policy.train(batch, lab.nll_loss)
            if where == "training":
                check()
            if "open" in where:
                step = policy.begin_step(4, lab.valid_tokens(batch))
                step.forward_backward(lab.rows(batch, 0, 2), lab.nll_loss)
                grads = {name: g.clone() for name, g in lab.gradients(kit).items() if g is not None}
                if where == "open step":
                    check()
                else:
                    with policy.logprob_mode():
                        check()
                assert all(lab.same(lab.gradients(kit)[name], g) for name, g in grads.items())
                step.forward_backward(lab.rows(batch, 2, 4), lab.nll_loss)
                step.commit()
        with policy.logprob_mode():
            assert not torch.equal(policy.get_logprobs(batch)["logprobs"], want)


def test_a_live_autograd_graph_survives_a_reference_pass(lab: SimpleNamespace, attach: Any) -> None:
    kit, twin = lab.Kit(), lab.Kit()
    policy = attach(kit, reference="copy")
    batch = lab.make_batch(5)
    with policy.training_mode():
        torch.manual_seed(3)
        loss, _ = lab.nll_loss(kit.model(batch["input_ids"]), batch, torch.tensor(1.0), torch.tensor(1.0))
        policy.get_reference_policy_logprobs(batch)
        loss.backward()
        torch.manual_seed(3)
        lab.nll_loss(twin.model(batch["input_ids"]), batch, torch.tensor(1.0), torch.tensor(1.0))[0].backward()
        assert all(lab.same(g, lab.gradients(twin)[name]) for name, g in lab.gradients(kit).items())
        kit.stepped.zero_grad()


@pytest.mark.parametrize("mode", ["logprob_mode", "training_mode"])
def test_an_error_in_the_reference_forward_leaves_the_live_weights(
    lab: SimpleNamespace, attach: Any, mode: str
) -> None:
    kit = lab.Kit("buffers")
    fails = False

    def forward(model: Any, batch: Any) -> Tensor:
        if fails:
            raise RuntimeError("the forward failed")
        return model(batch["input_ids"])

    policy = attach(kit, reference="copy", forward_fn=forward)
    batch = lab.make_batch(5)
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)
    with getattr(policy, mode)():
        before = live(lab, kit)
        fails = True
        with pytest.raises(RuntimeError, match="the forward failed"):
            policy.get_reference_policy_logprobs(batch)
        fails = False
        assert unchanged(lab, kit, before)
        got = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
        assert torch.equal(got, lab.naive_logprobs(kit.reference, batch))
    assert policy.health == "ok"


@pytest.mark.parametrize("point", ["before", "half", "after"])
@pytest.mark.parametrize("which", ["save", "in", "out"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_copy_that_fails_in_a_swap_leaves_the_live_weights(
    lab: SimpleNamespace, attach: Any, which: str, point: str, error: Any
) -> None:
    kit = lab.Kit("buffers")
    policy = attach(kit, reference="copy")
    batch = lab.make_batch(5)
    num = len({t.untyped_storage()._cdata for t in lab.model_state(kit.model).values()})
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)
        before = live(lab, kit)
        operation, k = {"save": ("copy_out", 2), "in": ("copy_in", 2), "out": ("copy_in", num + 2)}[which]
        fault = policy.device.fail(operation, k, point, error)
        if which == "out" and error is None:
            policy.get_reference_policy_logprobs(batch)  # put back at the second attempt
        else:
            with pytest.raises((rs.RLSessionError, RuntimeError, KeyboardInterrupt)) as caught:
                policy.get_reference_policy_logprobs(batch)
            assert error is None or caught.type is error
        assert fault.fired
        assert policy.health == "ok"
        assert unchanged(lab, kit, before)
        got = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
        assert torch.equal(got, lab.naive_logprobs(kit.reference, batch))
        policy.train(batch, lab.nll_loss)


def test_weights_that_cannot_be_put_back_fault_the_policy_and_recover_brings_them_back(
    lab: SimpleNamespace, attach: Any
) -> None:
    kit = lab.Kit()
    policy = attach(kit, reference="copy")
    batch = lab.make_batch(5)
    num = len({t.untyped_storage()._cdata for t in lab.model_state(kit.model).values()})
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)
    want = policy.state_dict()
    with policy.logprob_mode():
        policy.device.fail("copy_in", num + 1)
        policy.device.fail("copy_in", num + 2)
        with pytest.raises(rs.FaultedError, match="safe in host buffers"):
            policy.get_reference_policy_logprobs(batch)
        assert policy.health == "faulted"
        with pytest.raises(rs.FaultedError, match=r"policy\.recover\(\)"):
            policy.get_logprobs(batch)
    policy.recover()
    assert policy.health == "ok"
    assert lab.same(policy.state_dict(), want)


@pytest.mark.parametrize("base", ["offloaded", "resident"])
def test_a_reference_module_of_its_own_is_on_the_device_only_while_it_is_called(
    lab: SimpleNamespace, attach: Any, base: str
) -> None:
    kit = lab.Kit("buffers")
    own = kit.reference
    nbytes = lab.storage_bytes([*own.parameters(), *own.buffers()])
    seen: list[int] = []

    def forward(model: Any, batch: Any) -> Tensor:
        seen.append(lab.storage_bytes([*own.parameters(), *own.buffers()]))
        return model(batch["input_ids"])

    policy = attach(kit, reference=own, forward_fn=forward, base=base)
    batch = lab.make_batch(5)
    want = lab.naive_logprobs(copy.deepcopy(own), batch)
    policy.offload()
    if base == "resident":
        policy.switch("resident")
    assert lab.storage_bytes([*own.parameters(), *own.buffers()]) == 0
    for scope in ("logprob_mode", "training_mode"):
        with getattr(policy, scope)():
            before = policy.device.bytes_in, policy.device.bytes_out
            seen.clear()
            got = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
            assert torch.equal(got, want)
            assert seen == [nbytes]
            assert lab.storage_bytes([*own.parameters(), *own.buffers()]) == 0
            assert (policy.device.bytes_in, policy.device.bytes_out) == (before[0] + nbytes, before[1])
            policy.get_logprobs(batch)
            assert seen[1:] == [0]
    policy.close()
    assert lab.same(lab.naive_logprobs(own, batch), want)


@pytest.mark.parametrize("where", ["logprob_mode", "training_mode"])
def test_a_reference_with_adapters_off_moves_no_byte_and_equals_the_base_model(
    lab: SimpleNamespace, attach: Any, where: str
) -> None:
    kit = lab.Kit("lora")
    policy = attach(kit, reference="adapter-off")
    batch = lab.make_batch(5)
    with kit.model.disable_adapter():
        want = lab.naive_logprobs(kit.model, batch)
    for _ in range(2):
        with policy.training_mode():
            policy.train(batch, lab.nll_loss)
        with getattr(policy, where)():
            before = live(lab, kit)
            moved = policy.device.num_copies
            assert torch.equal(policy.get_reference_policy_logprobs(batch)["reference_logprobs"], want)
            assert not torch.equal(policy.get_logprobs(batch)["logprobs"], want)
            assert policy.device.num_copies == moved
            assert unchanged(lab, kit, before)


def test_without_a_reference_the_call_is_an_error_that_says_what_to_write(lab: SimpleNamespace, attach: Any) -> None:
    policy = attach(lab.Kit())
    with policy.logprob_mode(), pytest.raises(rs.UnsupportedError, match='reference="copy"'):
        policy.get_reference_policy_logprobs(lab.make_batch(1))


@pytest.mark.parametrize("reference", ["adapter-off", "copied"])
def test_a_reference_that_cannot_be_served_is_refused_at_attach(
    lab: SimpleNamespace, attach: Any, reference: str
) -> None:
    kit = lab.Kit()
    with pytest.raises(rs.UnsupportedError, match='reference="copy"'):
        attach(kit, reference=reference)
    assert lab.run_model(kit.model, lab.make_batch(1)) is not None


def test_a_reference_pass_does_not_copy_out_weights_that_have_a_valid_host_copy(
    lab: SimpleNamespace, attach: Any
) -> None:
    kit = lab.Kit()
    policy = attach(kit, reference="copy")
    policy.offload()
    batch = lab.make_batch(5)
    with policy.logprob_mode():
        before = policy.device.bytes_out
        policy.get_reference_policy_logprobs(batch)
        policy.get_reference_policy_logprobs(batch)
        assert policy.device.bytes_out == before
    assert policy.device.bytes_out == before


def test_a_step_that_fails_after_a_reference_pass_can_still_be_undone(
    lab: SimpleNamespace, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = lab.Kit()
    policy = attach(kit, reference="copy")
    batch = lab.make_batch(5)
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)
    with policy.training_mode():
        want = live(lab, kit)
        state = copy.deepcopy(lab.optimizer_state(kit))
        policy.get_reference_policy_logprobs(batch)

        def half_way(*args: Any) -> None:
            with torch.no_grad():
                next(iter(kit.model.parameters())).fill_(9.0)
            next(iter(kit.stepped.state.values()))["exp_avg"].zero_()
            raise RuntimeError("half-way")

        with monkeypatch.context() as patch:
            patch.setattr(kit.stepped, "step", half_way)
            with pytest.raises(rs.OptimizerStepError, match="restored"):
                policy.train(batch, lab.nll_loss)
        assert all(lab.same(t.detach(), want[name][0]) for name, t in lab.model_state(kit.model).items())
        assert lab.same(lab.optimizer_state(kit), state)


def test_two_policies_that_share_a_storage_and_cross_their_names_keep_their_own_references(
    lab: SimpleNamespace, device: EmulatedDevice
) -> None:
    kits = [lab.Kit("plain"), lab.Kit("plain")]
    first, second = (kit.model for kit in kits)
    shared = first.embed.weight  # "embed.weight" in the first policy, "head.weight" in the second
    second.head.weight = shared
    second.embed.weight = torch.nn.Parameter(torch.randn_like(shared))
    batch = lab.make_batch(1)
    wants = [lab.naive_logprobs(model, batch) for model in (first, second)]
    with rs.Session(verify="checksum") as session:
        policies = [
            session.attach(model, device=device, name=name, reference="copy")
            for name, model in (("first", first), ("second", second))
        ]
        for policy, want in zip(policies, wants, strict=True):
            with policy.logprob_mode():
                got = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
                assert torch.equal(got, want)
                assert torch.equal(policy.get_logprobs(batch)["logprobs"], want)


@pytest.mark.parametrize("where", ["training", "resident"])
def test_weights_written_by_hand_after_a_reference_pass_are_not_taken_for_the_copy_made_by_it(
    lab: SimpleNamespace, attach: Any, where: str
) -> None:
    kit = lab.Kit()
    policy = attach(kit, reference="copy")
    policy.switch("resident")
    with policy.training_mode() if where == "training" else nullcontext():
        policy.get_reference_policy_logprobs(lab.make_batch(1))
        kit.model.head.weight.data.mul_(2.0)  # no version counter tells
        want = kit.model.head.weight.detach().clone()
    policy.offload()
    assert lab.same(policy.state_dict()["head.weight"], want)
