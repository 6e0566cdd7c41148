"""What errors of the driver say: attempted, facts, and a line of code that can be written instead. And what handles offer."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rl_session as rs


def caught_in(act: Callable[[], Any], kind: type[rs.RLSessionError]) -> rs.RLSessionError:
    with pytest.raises(kind) as caught:
        act()
    return caught.value


def check(error: rs.RLSessionError, *facts: str, scopes: bool = True) -> None:
    """Attempted, policy, mode, open scopes with call sites, who moved last; legal code; survives pickling."""
    text = str(error)
    assert text.startswith(f"[{error.code}] policy 'actor': "), text
    for fact in ("mode: ", "open scopes: ", "last moved by: ", *facts):
        assert fact in text, text
    if scopes:
        assert "_mode() at test_messages.py:" in text or "offloaded() at test_messages.py:" in text, text
    assert f"write: {error.remedy}" in text
    compile(error.remedy, "write", "exec")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == text
    assert (again.attempted, again.facts, again.remedy, again.cause) == (
        error.attempted,
        error.facts,
        error.remedy,
        error.cause,
    )


@pytest.mark.parametrize(
    ("attempted", "remedy"),
    [
        ("logprob", "with policy.logprob_mode(acquire_timeout=60): "),
        ("offloaded", "with policy.offloaded(acquire_timeout=60): "),
        ("switch", "with policy.training_mode(acquire_timeout=60): "),
    ],
)
def test_who_finds_another_owner_is_told_to_wait_with_the_scope_that_was_wanted(
    attempted: str, remedy: str, make: Callable[..., Any]
) -> None:
    rig = make()
    caught: list[rs.OwnershipError] = []

    def other() -> None:
        try:
            rig.policy.switch("resident") if attempted == "switch" else rig.scope(attempted).__enter__()
        except rs.OwnershipError as error:
            caught.append(error)

    with rig.policy.training_mode():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert caught[0].remedy.startswith(remedy)


def test_a_call_in_the_wrong_mode_says_what_is_where_and_what_to_write(make: Callable[..., Any]) -> None:
    rig = make()
    acts: dict[str, tuple[Callable[[], Any], str]] = {
        "get_logprobs": (lambda: rig.policy.get_logprobs(rig.batch), "PARAMS, BUFFERS on the device, but they are"),
        "train": (rig.train, "PARAMS, BUFFERS, OPTIMIZER on the device, but they are on the host"),
        "score": (lambda: rig.policy.score(rig.batch), "host"),
        "begin_step": (rig.policy.begin_step, "host"),
    }
    for method, (act, fact) in acts.items():
        error = caught_in(act, rs.ModeError)
        moved = "last moved by: leaving training_mode() at conftest.py:"
        check(error, f"{method}() needs ", fact, "open scopes: none", moved, scopes=False)
        assert error.remedy.startswith("with policy.")
        assert f"policy.{method}(...)" in error.remedy
    error = caught_in(lambda: rig.policy.train(rig.batch, rig.loss, eval_mode=True), rs.ModeError)
    assert error.remedy == "with policy.logprob_mode(): policy.train(eval_mode=True)"
    compile(error.remedy, "write", "exec")
    with rig.policy.logprob_mode():
        check(caught_in(rig.train, rs.ModeError), "legal in: training, resident", "open scopes: logprob_mode() at")
        check(caught_in(lambda: next(rig.policy.iter_weights()), rs.ModeError), "is not legal in logprob mode")
    rejected = rig.records("guard.rejected")[-1].event
    assert (rejected.method, rejected.mode) == ("iter_weights", "logprob")


def test_the_remedy_is_followed_and_works(make: Callable[..., Any]) -> None:
    rig = make()
    error = caught_in(lambda: rig.policy.get_logprobs(rig.batch), rs.ModeError)
    code = error.remedy.replace("(...)", "(batch)")
    exec(compile(code, "write", "exec"), {"policy": rig.policy, "batch": rig.batch})  # noqa: S102 (it is the subject)


def test_errors_of_scopes_name_both_scopes_and_their_call_sites(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.logprob_mode():
        error = caught_in(lambda: rig.policy.training_mode().__enter__(), rs.NestingError)
        check(error, "training_mode() at test_messages.py:", "inside logprob_mode() at test_messages.py:")
        check(
            caught_in(lambda: rig.policy.switch("resident"), rs.ScopeError), "switch('resident') at test_messages.py:"
        )
    scope = rig.policy.logprob_mode()
    with scope:
        check(caught_in(scope.__enter__, rs.ScopeReuseError), "a second time at test_messages.py:", "active at")
    outer, inner = rig.policy.training_mode(), rig.policy.logprob_mode()
    outer.__enter__()
    inner.__enter__()
    error = caught_in(lambda: outer.__exit__(None, None, None), rs.ScopeOrderError)
    check(error, "training_mode() at test_messages.py:", "closed first: logprob_mode() at test_messages.py:")


def test_the_other_errors_of_use_have_all_three_parts(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        owned: list[rs.RLSessionError] = []
        thread = threading.Thread(
            target=lambda: owned.append(caught_in(lambda: rig.policy.switch("resident"), rs.OwnershipError))
        )
        thread.start()
        thread.join()
        compile(owned[0].remedy, "write", "exec")
        step = rig.policy.begin_step()
        step.forward_backward(rig.batch, rig.loss)
        check(caught_in(rig.train, rs.OpenStepError), "open step: <train step")
        step.abort()
        check(caught_in(step.commit, rs.StepClosedError), "the step was opened at test_messages.py:")
        rig.model(rig.batch["input_ids"]).sum().backward()
        check(caught_in(rig.train, rs.OpenStepError), "live gradients: 3")
        rig.optimizer.zero_grad()
    rig.device.fail("copy_in", k=3)
    rig.device.fail("free", k=1)
    caught_in(lambda: rig.policy.training_mode().__enter__(), rs.FaultedError)
    error = caught_in(rig.train, rs.FaultedError)
    check(error, "since: policy 'actor': a transition failed", "cause: ", scopes=False)
    rig.policy.recover()
    rig.policy.close()
    check(caught_in(rig.train, rs.ClosedError), "after close() at test_messages.py:", scopes=False)
    check(caught_in(lambda: rig.policy.training_mode().__enter__(), rs.ClosedError), scopes=False)


def test_refused_live_gradients_say_how_to_end_them(make: Callable[..., Any]) -> None:
    rig = make(live_gradients="refuse")
    with rig.policy.training_mode():
        with rig.policy.begin_step() as step:
            step.forward_backward(rig.batch, rig.loss)
            check(caught_in(lambda: rig.policy.refit_mode().__enter__(), rs.OpenStepError), 'live_gradients="refuse"')
        rig.model(rig.batch["input_ids"]).sum().backward()
        check(caught_in(lambda: rig.policy.refit_mode().__enter__(), rs.OpenStepError))
        rig.optimizer.zero_grad()


def test_who_moved_it_last_follows_the_moves(make: Callable[..., Any]) -> None:
    rig = make(warm=False)
    assert "nothing has moved since attach" in rig.policy._control.explain()[1][1]
    rig.policy.offload()
    moved = rig.policy._control.last_move
    assert moved.startswith("offload() at test_messages.py:")
    rig.policy.offload()
    assert rig.policy._control.last_move == moved
    with rig.policy.logprob_mode():
        assert rig.policy._control.last_move.startswith("entering logprob_mode() at test_messages.py:")


# -- handles -----------------------------------------------------------------------------------------------------------

ALWAYS = {"state_dict", "save_checkpoint"}
INFERENCE = {"get_logprobs", "get_reference_policy_logprobs", "get_topk_logits", "score", "train"}
OFFERED = {
    "training": ALWAYS | INFERENCE | {"begin_step", "load_checkpoint"},
    "logprob": ALWAYS | INFERENCE,
    "refit": ALWAYS | {"iter_weights"},
    "generation": ALWAYS | INFERENCE | {"generate"},
    "offloaded": ALWAYS | {"load_checkpoint", "iter_weights"},
}


@pytest.mark.parametrize("name", OFFERED)
def test_a_handle_offers_the_calls_of_its_mode_and_nothing_else(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    with rig.scope(name) as handle:
        assert set(dir(handle)) == OFFERED[name]
        assert all(callable(getattr(handle, call)) for call in OFFERED[name])
        for call in set().union(*OFFERED.values()) - OFFERED[name]:
            with pytest.raises(AttributeError, match=rf"write: with policy\.\w+\(\) as handle: handle\.{call}\("):
                getattr(handle, call)
        for call in ("offload", "switch", "close", "mode", "forward_backward", "nothing"):
            with pytest.raises(AttributeError, match=f"the handle of {name} mode has no '{call}'"):
                getattr(handle, call)
        assert f"in {name} mode" in repr(handle)


def test_a_handle_outlives_nothing(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.logprob_mode() as handle:
        logprobs = handle.get_logprobs(rig.batch)["logprobs"]
        with pytest.raises(rs.ModeError):
            handle.train(rig.batch, rig.loss)
        assert handle.train(rig.batch, rig.loss, eval_mode=True)["loss"].shape == (1,)
    with pytest.raises(rs.ModeError):
        handle.get_logprobs(rig.batch)
    with rig.policy.generation_mode() as generating:
        assert torch.equal(generating.get_logprobs(rig.batch)["logprobs"], logprobs)
        assert generating.generate(rig.batch)["output_ids"].shape == (4, 7)


class Critic(nn.Module):
    """One value a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embed(input_ids)
        return out


def test_a_value_model_is_told_its_own_scope(make: Callable[..., Any]) -> None:
    batch = make().batch
    model = Critic()
    with rs.Session(verify="checksum") as session:
        value = session.attach_value(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with value.inference_mode() as handle:
            assert set(dir(handle)) == ALWAYS | {"get_values", "train"}
            assert handle.get_values(batch)["values"].shape == (4, 5)
        error = caught_in(lambda: value.get_values(batch), rs.ModeError)
        assert error.attempted.startswith("value 'value': get_values() needs PARAMS on the device")
        assert error.remedy == "with value.inference_mode(): value.get_values(...)"
        with (
            value.offloaded() as handle,
            pytest.raises(AttributeError, match=r"with value.inference_mode\(\) as handle"),
        ):
            handle.get_values(batch)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "attempted"),
    [
        ({"max_grad_norm": 0}, "max_grad_norm=0 "),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0 "),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan "),
        ({"max_grad_norm": "1"}, "max_grad_norm='1' "),
        ({"forward_fn": 3}, "forward_fn=3 "),
    ],
)
def test_attach_refuses_an_option_that_could_not_work(options: dict[str, Any], attempted: str) -> None:
    with pytest.raises(rs.ConfigError, match=attempted) as caught:
        rs.attach(nn.Linear(2, 2), **options)
    assert caught.value.remedy.startswith("attach(")


def test_masters_need_an_optimizer_that_steps_them() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(rs.OptimizerError, match="without an optimizer") as caught:
        rs.attach(model, masters={model.weight: torch.zeros(2, 2)})
    assert caught.value.remedy
