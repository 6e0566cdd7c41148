"""Programs that the rule machine found and shrank, each for a whole kind of fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from twins import SEQS, TOKENS, Fragile, Net, loss_fn, make_batch, make_optimizer

import rl_session as rs
from rl_session.lifecycle import Facts, Flags, restore
from rl_session.testing import EmulatedDevice, FakeEngine, inject_fault

BATCH = make_batch(0)
Attach = Callable[..., Any]


@pytest.fixture
def session() -> Iterator[rs.Session]:
    with rs.Session(verify="checksum") as session:
        yield session


@pytest.fixture
def attach(session: rs.Session) -> Attach:
    device = EmulatedDevice()
    device.poison()

    def build(name: str, **options: Any) -> Any:
        model = Net(0)
        return session.attach(model, make_optimizer(model, "adamw"), name=name, device=device, **options)

    return build


def test_sampling_from_the_policy_is_refused_beside_a_scope_of_an_engine(session: rs.Session, attach: Attach) -> None:
    policy = attach("actor")
    policy.offload()
    sampler = rs.InProcessEngine(policy, max_new_tokens=1)
    engine = session.engine("vllm", FakeEngine(policy.device))
    with engine.awake():
        with pytest.raises(rs.NestingError, match="beside"), policy.generation_mode(sampler):
            pytest.fail("entered")
        with policy.generation_mode(engine), pytest.raises(rs.NestingError, match="beside"):
            policy.generation_mode(sampler).__enter__()
        assert policy.mode is rs.Mode.OFFLOADED
    with policy.generation_mode(sampler):
        assert policy.mode is rs.Mode.GENERATION


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("modes", [("logprob_mode", "logprob_mode"), ("logprob_mode", "training_mode")])
def test_scopes_of_two_policies_restore_autograd_in_whatever_order_they_end(
    attach: Attach, modes: tuple[str, str], first: int
) -> None:
    scopes = [getattr(attach(name), mode)() for name, mode in zip(("actor", "rival"), modes, strict=True)]
    for scope in scopes:
        scope.__enter__()
    last = torch.is_grad_enabled()
    assert last is (modes[1] == "training_mode")
    scopes.pop(first).__exit__(None, None, None)
    assert torch.is_grad_enabled() is (last if first == 0 else False)
    scopes.pop().__exit__(None, None, None)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("operation", ["copy_out", "copy_in", "synchronize"])
@pytest.mark.parametrize(
    ("kind", "error"), [("exception", rs.TransitionError), ("out of memory", rs.DeviceMemoryError)]
)
def test_a_reference_that_cannot_come_in_is_a_typed_error(
    attach: Attach, operation: Any, kind: Any, error: type[Exception]
) -> None:
    policy = attach("actor", reference="copy")
    policy.switch("resident")
    before = policy.get_logprobs(BATCH)["logprobs"]
    with inject_fault(policy, operation, point="half", kind=kind) as fault:
        with pytest.raises(error, match="reference"):
            policy.get_reference_policy_logprobs(BATCH)
        assert fault.fired
    assert torch.equal(policy.get_logprobs(BATCH)["logprobs"], before)
    assert torch.equal(policy.get_reference_policy_logprobs(BATCH)["reference_logprobs"], before)


def test_a_write_after_a_reference_that_could_not_come_in_is_not_lost(attach: Attach) -> None:
    policy = attach("actor", reference="copy")
    weight = policy._control.group.worker.module.mix.weight
    with policy.training_mode():
        with inject_fault(policy, "copy_in", k=4), pytest.raises(rs.TransitionError):
            policy.get_reference_policy_logprobs(BATCH)
        weight.data.mul_(1.5)  # bumps no version: in TRAINING anything may have been written
        written = weight.detach().clone()
        policy.get_reference_policy_logprobs(BATCH)
        assert torch.equal(weight, written)


@pytest.mark.parametrize("mode", [rs.Mode.LOGPROB, rs.Mode.REFIT])
@pytest.mark.parametrize("is_on", [True, False])
def test_optimizer_state_that_a_flag_sends_away_is_not_brought_back_by_the_end_of_a_lazy_scope(
    mode: rs.Mode, is_on: bool
) -> None:
    stored = rs.Placement({"params": rs.Tier.DEVICE, "optimizer": rs.Tier.DEVICE})  # it had not left yet
    evicted = Facts(placement=rs.Placement({"params": rs.Tier.HOST, "optimizer": rs.Tier.HOST}))
    flags = Flags(release="lazy", offload_optimizer_for_logprob=is_on, offload_optimizer_for_refit=is_on)
    found = restore(mode, stored, evicted, flags)
    assert found["params"] is rs.Tier.DEVICE
    assert found["optimizer"] is (rs.Tier.HOST if is_on else rs.Tier.DEVICE)


def test_a_step_whose_gradients_are_away_is_refused_and_stays_open(attach: Attach) -> None:
    policy = attach("actor")
    with policy.training_mode():
        step = policy.begin_step(SEQS, TOKENS)
        step.forward_backward(BATCH, loss_fn)
    policy.switch("resident")
    assert policy.placement["grads"] == "host"
    for call in (lambda: step.forward_backward(BATCH, loss_fn), step.commit):
        with pytest.raises(rs.OffloadedAccessError, match="GRADS") as raised:
            call()
        assert "with policy.training_mode(): step." in str(raised.value)
        assert policy.open_step is step, "nothing is lost by a call that was refused"
    with policy.training_mode():
        assert float(step.commit()["grad_norm"]) > 0


def test_a_failed_optimizer_step_that_cannot_be_restored_faults_the_policy(attach: Attach, tmp_path: Any) -> None:
    policy = attach("actor")
    policy.offload()
    policy.save_checkpoint(tmp_path / "saved")
    weights = policy.state_dict()
    optimizer = policy._control.group.worker.spec.optimizer
    assert isinstance(optimizer, Fragile)
    with policy.training_mode():
        optimizer.fails = True
        with inject_fault(policy, "copy_in") as fault, pytest.raises(rs.FaultedError, match="half-way"):
            policy.train(BATCH, loss_fn)
        assert fault.fired
    assert policy.health == "faulted"
    policy.recover()
    found = policy.state_dict()
    assert all(torch.equal(found[name], weights[name]) for name in weights if name != "seen")
