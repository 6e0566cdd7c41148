"""Forwards of the user's own: what a sync scope sets on the entering thread, and how exactly it takes it back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rl_session as rs


def forward(rig: Any) -> torch.Tensor:
    out: torch.Tensor = rig.model(rig.batch["input_ids"])
    return out


@pytest.mark.parametrize("root", ["train", "eval"])
@pytest.mark.parametrize("name", ["logprob", "generation"])
def test_an_inference_scope_sets_eval_and_no_grad_and_restores_every_submodule(
    name: str, root: str, make: Callable[..., Any]
) -> None:
    rig = make()
    if root == "eval":  # with one part in train, as somebody may have left it
        rig.model.eval()
        rig.model.dropout.train()
    flags = rig.flags()
    with rig.scope(name):
        assert not any(rig.flags())
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert forward(rig).grad_fn is None
    assert rig.flags() == flags
    assert torch.is_grad_enabled()
    with pytest.raises(ValueError, match="mine"), rig.scope(name):
        raise ValueError("mine")
    assert rig.flags() == flags
    assert torch.is_grad_enabled()


def test_training_turns_autograd_on_under_the_users_no_grad(make: Callable[..., Any]) -> None:
    rig = make()
    rig.model.eval()
    with torch.no_grad():
        with rig.policy.training_mode():
            assert torch.is_grad_enabled()
            assert rig.model.training
            assert forward(rig).grad_fn is not None
        assert not torch.is_grad_enabled()
    assert not rig.model.training


def test_a_part_that_is_frozen_under_a_root_in_train_stays_in_eval(make: Callable[..., Any]) -> None:
    rig = make()
    flags = rig.flags()
    assert not rig.model.frozen.training
    with rig.policy.training_mode():
        assert rig.model.training
        assert not rig.model.frozen.training
        with rig.policy.logprob_mode():
            assert not any(rig.flags())
            assert not torch.is_grad_enabled()
        assert rig.flags() == flags
        assert torch.is_grad_enabled()
    assert rig.flags() == flags


@pytest.mark.parametrize("name", ["refit", "offloaded"])
def test_scopes_that_mean_no_forwards_touch_nothing(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    flags = rig.flags()
    with rig.scope(name):
        assert rig.flags() == flags
        assert torch.is_grad_enabled()
    with torch.no_grad(), rig.scope(name):
        assert not torch.is_grad_enabled()


def test_a_scope_entered_in_the_mode_in_effect_sets_flags_that_are_wrong(make: Callable[..., Any]) -> None:
    rig = make()
    rig.policy.switch("logprob")
    assert rig.model.training
    with rig.policy.logprob_mode():
        assert not any(rig.flags())
        rig.model.train()
        with rig.policy.logprob_mode():
            assert not any(rig.flags())
        assert all(rig.flags())
    assert rig.model.training
    assert not rig.model.frozen.training


def test_an_entry_that_fails_sets_nothing(make: Callable[..., Any]) -> None:
    rig = make()
    flags = rig.flags()
    rig.device.fail("copy_in")
    with pytest.raises(rs.TransitionError), rig.policy.logprob_mode():
        pytest.fail("the block ran")
    assert rig.flags() == flags
    assert torch.is_grad_enabled()


def test_an_exit_that_fails_restores_flags_and_autograd(make: Callable[..., Any]) -> None:
    rig = make()
    flags = rig.flags()
    with pytest.raises(rs.TransitionError), rig.policy.logprob_mode():
        rig.device.fail("free")
    assert rig.flags() == flags
    assert torch.is_grad_enabled()


def test_autograd_is_set_for_the_entering_thread_only(make: Callable[..., Any]) -> None:
    rig = make()
    found: list[bool] = []
    with rig.policy.logprob_mode():
        thread = threading.Thread(target=lambda: found.append(torch.is_grad_enabled()))
        thread.start()
        thread.join()
        assert not torch.is_grad_enabled()
    assert found == [True]


def test_calls_set_their_own_mode_whatever_the_caller_has(make: Callable[..., Any]) -> None:
    rig = make()
    rig.model.train()  # frozen parts too: their dropout would show
    with rig.policy.logprob_mode():
        expected = rig.policy.get_logprobs(rig.batch)["logprobs"]
    with rig.policy.training_mode():
        rig.model.train()
        flags = rig.flags()
        assert torch.equal(rig.policy.get_logprobs(rig.batch)["logprobs"], expected)
        assert rig.flags() == flags
        with torch.no_grad():
            rig.train()
            assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_a_backward_of_the_users_own_works_in_training(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        forward(rig).sum().backward()
        assert rig.model.head.weight.grad is not None
        rig.optimizer.step()
        rig.optimizer.zero_grad()
    with rig.policy.training_mode():
        rig.train()
