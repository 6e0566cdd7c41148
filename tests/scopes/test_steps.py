"""Train steps: open across scopes, committed or aborted once, and what is left when the optimizer fails half-way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_session as rs


def chunks(rig: Any) -> list[dict[str, Any]]:
    return [{k: v[i : i + 1] for k, v in rig.batch.items()} for i in range(4)]


def backward(rig: Any) -> None:
    """A backward of the user's own."""
    logits = rig.model(rig.batch["input_ids"])
    logits.square().mean().backward()


def grads(rig: Any) -> list[bytes]:
    read = rig.policy._control.group.worker.engine.readable
    return [read(p.grad).detach().clone().numpy().tobytes() for p in rig.model.parameters() if p.grad is not None]


def uninterrupted(make: Callable[..., Any], **config: Any) -> tuple[dict[str, Any], Any]:
    rig = make(**config)
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        for chunk in chunks(rig):
            step.forward_backward(chunk, rig.loss)
        result = step.commit()
    return result, rig


# -- open across scopes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["eager", "lazy", "never"])
@pytest.mark.parametrize("base", ["offloaded", "resident"])
def test_a_step_open_across_scopes_equals_the_uninterrupted_one_bit_for_bit(
    base: str, release: str, make: Callable[..., Any]
) -> None:
    expected, twin = uninterrupted(make)
    rig = make(base=base, release=release)
    first, second, third, fourth = chunks(rig)
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        step.forward_backward(first, rig.loss)
        live = grads(rig)
        with rig.policy.logprob_mode():
            assert rig.seen()["grads"] == "device"
            rig.policy.get_logprobs(rig.batch)
        step.forward_backward(second, rig.loss)
        with rig.policy.refit_mode():
            assert rig.seen()["grads"] == ("host" if release == "eager" else "device")
        assert len(live) == len(grads(rig))
        live = grads(rig)
    assert rig.policy.open_step is step
    assert step.state == "open"
    assert grads(rig) == live
    with rig.policy.offloaded():
        assert rig.seen()["grads"] == ("host" if release == "eager" else "device")
    with rig.policy.logprob_mode():
        rig.policy.get_logprobs(rig.batch)
        assert grads(rig) == live
    with rig.policy.training_mode():
        assert rig.seen()["grads"] == "device"
        step.forward_backward(third, rig.loss)
    with rig.policy.training_mode():
        step.forward_backward(fourth, rig.loss)
        result = step.commit()
    assert torch.equal(result["loss"], expected["loss"])
    assert torch.equal(result["grad_norm"], expected["grad_norm"])
    assert rig.contents() == twin.contents()
    assert rig.policy.open_step is None


@pytest.mark.parametrize("first", ["training", "logprob", "refit", "generation", "offloaded"])
@pytest.mark.parametrize("second", ["training", "logprob", "refit", "generation", "offloaded"])
def test_an_open_step_survives_every_pair_of_scopes(first: str, second: str, make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        step.forward_backward(rig.batch, rig.loss)
    live = grads(rig)
    with rig.scope(first):
        assert grads(rig) == live
        try:
            with rig.scope(second):
                assert grads(rig) == live
        except rs.NestingError:
            pass
        assert grads(rig) == live
    assert grads(rig) == live
    assert rig.policy.open_step is step
    step.abort()
    assert grads(rig) == []
    assert rig.device.resident_bytes == 0


# -- one end -----------------------------------------------------------------------------------------------------------


def test_a_with_block_commits_at_its_end(make: Callable[..., Any]) -> None:
    expected, twin = uninterrupted(make)
    rig = make()
    with rig.policy.training_mode(), rig.policy.begin_step() as step:
        for chunk in chunks(rig):
            step.forward_backward(chunk, rig.loss)
        assert rig.policy.open_step is step
    assert step.state == "committed"
    assert rig.policy.open_step is None
    assert rig.contents() == twin.contents()
    assert expected["loss"].shape == (1,)
    assert rig.records("step.opened", "step.committed")[-1].name == "step.committed"


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_with_block_does_nothing_more_after_commit_or_abort(end: str, make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode(), rig.policy.begin_step() as step:
        step.forward_backward(rig.batch, rig.loss)
        getattr(step, end)()
        after = rig.contents()
    assert step.state == ("committed" if end == "commit" else "aborted")
    assert rig.contents() == after


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_aborts_and_leaves_weights_and_optimizer_alone(
    kind: type[BaseException], make: Callable[..., Any]
) -> None:
    rig = make()
    before = rig.contents()
    error = kind("mine")
    with pytest.raises(kind) as caught, rig.policy.training_mode(), rig.policy.begin_step() as step:
        step.forward_backward(rig.batch, rig.loss)
        raise error
    assert caught.value is error
    assert step.state == "aborted"
    assert rig.contents() == before
    assert rig.records("step.aborted")[-1].event.reason == "aborted by the caller"
    with rig.policy.training_mode():
        rig.train()


def test_a_closed_step_refuses_every_call_and_tells_where_it_was_opened(make: Callable[..., Any]) -> None:
    rig = make()
    for end in ("commit", "abort"):
        with rig.policy.training_mode():
            step = rig.policy.begin_step()
            step.forward_backward(rig.batch, rig.loss)
            getattr(step, end)()
            before = rig.state()
            for act in (
                step.commit,
                step.abort,
                lambda step=step: step.forward_backward(rig.batch, rig.loss),
                step.__enter__,
            ):
                with pytest.raises(rs.StepClosedError, match=r"the step was opened at test_steps\.py:"):
                    act()
            assert rig.state() == before


def test_what_an_open_step_forbids_names_it(make: Callable[..., Any], tmp_path: Path) -> None:
    rig = make()
    with rig.policy.training_mode():
        rig.policy.save_checkpoint(tmp_path / "saved")
        step = rig.policy.begin_step()
        step.forward_backward(rig.batch, rig.loss)
        before = rig.state()
        for act in (rig.policy.begin_step, rig.train, lambda: rig.policy.load_checkpoint(tmp_path / "saved")):
            with pytest.raises(rs.OpenStepError, match="train step is open") as caught:
                act()
            assert "open step: <train step of policy 'actor' from test_steps.py" in str(caught.value)
        assert rig.state() == before
        assert rig.policy.open_step is step
        rig.policy.train(rig.batch, rig.loss, eval_mode=True)
        rig.policy.save_checkpoint(tmp_path / "again")
        step.commit()


@pytest.mark.parametrize("name", ["logprob", "refit", "generation", "offloaded"])
def test_accumulating_and_committing_need_training(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        step.forward_backward(rig.batch, rig.loss)
    with rig.scope(name):
        before = rig.state()
        for act in (step.commit, lambda: step.forward_backward(rig.batch, rig.loss), rig.policy.begin_step):
            with pytest.raises(rs.ModeError, match="legal in: training, resident"):
                act()
        assert rig.state() == before
        assert step.state == "open"
        step.abort()
    assert rig.policy.open_step is None


def test_a_step_outlives_the_variable_that_held_it(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        rig.policy.begin_step().forward_backward(rig.batch, rig.loss)
    with rig.policy.training_mode():
        assert rig.policy.open_step is not None
        rig.policy.open_step.commit()


def test_a_loss_that_fails_aborts_the_step_and_a_bad_batch_does_not(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.contents()
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        with pytest.raises(rs.BatchError):
            step.forward_backward({"input_ids": torch.zeros(2, 3)}, rig.loss)
        assert step.state == "open"
        with pytest.raises(rs.NonFiniteError):
            step.forward_backward(rig.batch, lambda logits, *_: (logits.sum() * float("nan"), {}))
        assert step.state == "aborted"
        assert rig.policy.open_step is None
    assert rig.contents() == before
    assert rig.records("step.aborted")[-1].event.reason == "NonFiniteError"


def test_a_wrong_argument_keeps_the_step_open_and_its_gradients(make: Callable[..., Any]) -> None:
    expected, twin = uninterrupted(make)
    rig = make()
    unknown = {**rig.batch, "input_ids": torch.full((4, 5), 99)}
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        for chunk in chunks(rig):
            step.forward_backward(chunk, rig.loss)
        live = grads(rig)
        with pytest.raises(rs.BatchError, match="mbs=0"):
            step.forward_backward(rig.batch, rig.loss, mbs=0)
        with pytest.raises(rs.BatchError):
            step.forward_backward({**unknown, "input_ids": -unknown["input_ids"]}, rig.loss)
        with pytest.raises(rs.ArgumentError, match="cannot be called"):
            step.forward_backward(rig.batch, None)
        assert step.state == "open"
        assert grads(rig) == live
        assert torch.equal(step.commit()["loss"], expected["loss"])
    assert rig.contents() == twin.contents()


def test_a_key_that_the_loss_needs_and_the_batch_lacks_is_named(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.contents()

    def needing(logits: Any, batch: Any, seqs: Any, tokens: Any) -> Any:
        return (logits.sum() * batch["advantages"]).sum(), {}

    def failing(logits: Any, batch: Any, seqs: Any, tokens: Any) -> Any:
        raise KeyError("input_ids")

    with rig.policy.training_mode():
        with pytest.raises(rs.BatchError, match="the loss needs 'advantages'") as caught:
            rig.policy.train(rig.batch, needing)
        assert isinstance(caught.value.__cause__, KeyError)
        assert "input_ids" in caught.value.facts[0]
        assert caught.value.remedy == 'batch["advantages"] = ...'
        with pytest.raises(KeyError):  # the batch has it: an error of the loss's own
            rig.policy.train(rig.batch, failing)
    assert rig.contents() == before


def test_a_loss_that_cannot_be_called_is_refused(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        for eval_mode in (False, True):
            with pytest.raises(rs.ArgumentError, match="cannot be called") as caught:
                rig.policy.train(rig.batch, None, eval_mode=eval_mode)
            assert "loss_fn(logits" in caught.value.remedy
        rig.train()


def test_a_loss_may_not_open_scopes_or_switch(make: Callable[..., Any]) -> None:
    rig = make()
    refused: list[BaseException] = []

    def loss(logits: Any, *rest: Any) -> Any:
        for act in (lambda: rig.policy.logprob_mode().__enter__(), rig.policy.offload):
            try:
                act()
            except rs.ScopeError as error:
                refused.append(error)
        return rig.loss(logits, *rest)

    with rig.policy.training_mode():
        rig.policy.train(rig.batch, loss)
        assert len(refused) == 2
        assert len(rig.policy._control.frames) == 1
    assert rig.policy.mode is rs.Mode.OFFLOADED


# -- gradients of the user's own -----------------------------------------------------------------------------------------


def test_gradients_of_ones_own_are_not_zeroed_by_a_train_step(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        backward(rig)
        live, before = grads(rig), rig.contents()
        for act in (rig.train, rig.policy.begin_step):
            with pytest.raises(rs.OpenStepError, match=r"made by a loss.backward\(\) outside this library"):
                act()
        assert grads(rig) == live
        assert rig.contents() == before
        rig.optimizer.step()  # consumed: nobody's any more
        rig.train()


def test_preserve_keeps_gradients_of_ones_own_bit_for_bit(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        backward(rig)
        live = grads(rig)
        with rig.policy.logprob_mode():
            assert rig.seen()["grads"] == "device"
        with rig.policy.refit_mode():
            assert rig.seen()["grads"] == "host"
            assert grads(rig) == live
    assert rig.seen()["grads"] == "host"
    with rig.policy.training_mode():
        assert rig.seen()["grads"] == "device"
        assert grads(rig) == live


def test_refuse_leaves_everything_and_the_outer_mode_until_they_are_consumed(make: Callable[..., Any]) -> None:
    rig = make(live_gradients="refuse")
    scope = rig.policy.training_mode()
    scope.__enter__()
    backward(rig)
    before = rig.state()
    for name in ("logprob", "refit", "offloaded"):
        with pytest.raises(rs.OpenStepError, match='live_gradients="refuse"'):
            rig.scope(name).__enter__()
        assert rig.state() == before
    with pytest.raises(rs.OpenStepError):
        scope.__exit__(None, None, None)
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.contents() == before[3]
    rig.optimizer.zero_grad()
    with rig.policy.training_mode():
        rig.train()
    assert rig.seen() == {"params": "host", "buffers": "host", "grads": "none", "optimizer": "host"}


def test_discard_drops_them_with_a_record_and_lets_train_go_on(make: Callable[..., Any]) -> None:
    rig = make(live_gradients="discard")
    with rig.policy.training_mode():
        backward(rig)
        nbytes = sum(map(len, grads(rig)))
        with rig.policy.logprob_mode():
            assert rig.seen()["grads"] == "none"
        dropped = rig.records("gradients.dropped")[-1].event
        assert (dropped.nbytes, dropped.reason) == (nbytes, "live, discarded")
        backward(rig)
        rig.train()


def test_discard_aborts_an_open_step(make: Callable[..., Any]) -> None:
    rig = make(live_gradients="discard")
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        step.forward_backward(rig.batch, rig.loss)
        with rig.policy.refit_mode():
            assert rig.seen()["grads"] == "none"
            assert step.state == "aborted"
            assert rig.policy.open_step is None
        with pytest.raises(rs.StepClosedError):
            step.commit()
        rig.train()
    assert "discarded by a transition" in rig.records("step.aborted")[-1].event.reason


# -- an optimizer that fails half-way ------------------------------------------------------------------------------------


class HalfWay(torch.optim.AdamW):
    """Writes one parameter and its state, then fails, as often as it is armed."""

    error: BaseException | None = None

    def step(self, closure: Any = None) -> Any:
        """As AdamW, or half of it."""
        if self.error is None:
            return super().step(closure)
        error, self.error = self.error, None
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.add_(1.0)
            state = self.state[first]
            state.setdefault("exp_avg", torch.zeros_like(first)).add_(1.0)
            state.setdefault("step", torch.tensor(0.0)).add_(1.0)
        raise error


def halfway(parameters: Any) -> HalfWay:
    return HalfWay(parameters, lr=0.1)


@pytest.mark.parametrize("how", ["train", "commit"])
def test_a_step_that_fails_half_way_is_undone_from_the_host_copies_of_entry(how: str, make: Callable[..., Any]) -> None:
    rig, twin = make(optimizer=halfway), make(optimizer=halfway)
    before = rig.contents()
    with rig.policy.training_mode():
        rig.optimizer.error = RuntimeError("half")
        with pytest.raises(rs.OptimizerStepError, match="restored from the host copies") as caught:
            if how == "train":
                rig.train()
            else:
                step = rig.policy.begin_step()
                step.forward_backward(rig.batch, rig.loss)
                step.commit()
        assert "RuntimeError: half" in caught.value.cause
        assert rig.policy.health == "ok"
        assert rig.policy.open_step is None
        assert rig.contents() == before
        again = rig.train()
    with twin.policy.training_mode():
        assert torch.equal(twin.train()["loss"], again["loss"])
    assert rig.contents() == twin.contents()


def test_ctrl_c_in_a_step_is_undone_and_stays_what_it_is(make: Callable[..., Any]) -> None:
    rig = make(optimizer=halfway)
    before = rig.contents()
    with pytest.raises(KeyboardInterrupt), rig.policy.training_mode():
        rig.optimizer.error = KeyboardInterrupt()
        rig.train()
    assert rig.policy.health == "ok"
    assert rig.contents() == before


def torn(make: Callable[..., Any], base: str = "resident") -> Any:
    rig = make(optimizer=halfway, base=base)
    scope = rig.policy.training_mode()
    scope.__enter__()
    if base == "offloaded":
        rig.train()  # the copies of entry are no longer of the moment before the step
    rig.optimizer.error = RuntimeError("half")
    with pytest.raises(rs.FaultedError, match="no host copy to restore from"):
        rig.train()
    scope.__exit__(None, None, None)
    return rig


@pytest.mark.parametrize("base", ["resident", "offloaded"])
def test_without_host_copies_it_faults_and_a_checkpoint_heals(
    base: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    saved = make(optimizer=halfway)
    with saved.policy.training_mode():
        saved.policy.save_checkpoint(tmp_path / "saved")
    rig = torn(make, base)
    policy = rig.policy
    assert policy.health == "faulted"
    for act in (rig.train, policy.offload, lambda: policy.logprob_mode().__enter__(), policy.state_dict):
        with pytest.raises(rs.FaultedError, match=r"since: policy 'actor': optimizer.step\(\) failed half-way"):
            act()
    with pytest.raises(rs.FaultedError, match=r"recover\(\) without a checkpoint"):
        policy.recover()
    assert policy.health == "faulted"
    with pytest.raises(rs.FaultedError, match=r"since: policy 'actor': optimizer.step\(\) failed half-way"):
        policy.state_dict()
    with pytest.raises(rs.CheckpointError):
        policy.load_checkpoint(tmp_path / "missing")
    assert policy.health == "faulted"
    policy.load_checkpoint(tmp_path / "saved")
    assert policy.health == "ok"
    assert policy.mode is rs.Mode(base)
    assert rig.contents() == saved.contents()
    with policy.training_mode():
        rig.train()


def test_recover_takes_the_last_checkpoint(make: Callable[..., Any], tmp_path: Path) -> None:
    rig = make(optimizer=halfway, base="resident")
    rig.policy.save_checkpoint(tmp_path / "saved")
    saved = rig.contents()
    with rig.policy.training_mode():
        rig.train()
        rig.optimizer.error = RuntimeError("half")
        with pytest.raises(rs.FaultedError):
            rig.train()
    rig.policy.recover()
    assert rig.policy.health == "ok"
    assert rig.contents() == saved
    assert rig.policy.mode is rs.Mode.RESIDENT
    with rig.policy.training_mode():
        rig.train()


class Late(torch.optim.AdamW):
    """Fails after the step it inherits has written everything."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.fails:
            raise ValueError("too late")
        return result


def test_a_step_that_fails_after_the_one_it_calls_is_undone_too(make: Callable[..., Any]) -> None:
    rig = make(optimizer=lambda parameters: Late(parameters, lr=0.1))
    before = rig.state()
    with rig.policy.training_mode():
        rig.optimizer.fails = True
        with pytest.raises(rs.OptimizerStepError):
            rig.train()
        rig.optimizer.fails = False
    assert rig.policy.health == "ok"
    assert rig.state() == before
    with rig.policy.training_mode():
        rig.train()
