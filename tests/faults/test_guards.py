"""What nobody reported because it crashes at once elsewhere: touching, stepping and loading what is away; needless work."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rig import Make, Rig, make_batch

import rl_session as rs
from rl_session.errors import OffloadedAccessError

TOUCHES: dict[str, Callable[[Rig], Any]] = {
    "read": lambda rig: rig.model.mix.weight + 1,  # type: ignore[operator]
    "clone": lambda rig: rig.model.mix.weight.clone(),  # type: ignore[operator]
    "print": lambda rig: repr(rig.model.mix.weight),
    "numpy": lambda rig: rig.model.mix.weight.detach().numpy(),  # type: ignore[operator]
    "write": lambda rig: rig.model.mix.weight.data.zero_(),  # type: ignore[operator]
    "a moment": lambda rig: rig.optimizer_tensors()[0].sum(),
}


@pytest.fixture
def away(make: Make) -> Rig:
    """A policy that has trained once and is away."""
    rig = make()
    with rig.policy.training_mode():
        rig.train()
    assert rig.on_device() == []
    return rig


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_touch_of_what_is_away_is_refused_before_it_reads(away: Rig, touch: str) -> None:
    before = away.contents()
    with pytest.raises(OffloadedAccessError, match="whose bytes are on the host") as raised:
        TOUCHES[touch](away)
    assert "with policy." in raised.value.remedy
    assert away.contents() == before
    with away.policy.training_mode():
        TOUCHES[touch](away)


def test_a_step_while_something_of_it_is_away_is_refused_and_changes_nothing(away: Rig) -> None:
    before = away.contents()
    with pytest.raises(OffloadedAccessError, match=r"optimizer\.step\(\) needs") as raised:
        away.optimizer.step()
    assert raised.value.remedy == "with policy.training_mode(): optimizer.step()"
    assert away.contents() == before


def test_a_load_into_what_is_away_is_refused_and_changes_nothing(away: Rig) -> None:
    before = away.contents()
    with pytest.raises(OffloadedAccessError, match=r"module\.load_state_dict\(\) needs") as raised:
        away.model.load_state_dict(away.policy.state_dict())
    assert "with policy.training_mode()" in raised.value.remedy
    assert away.contents() == before


def test_the_optimizers_own_state_dict_of_what_is_away_names_the_cure(away: Rig) -> None:
    before = away.contents()
    with pytest.raises(OffloadedAccessError, match=r"optimizer\.state_dict\(\) needs") as raised:
        away.optimizer.state_dict()
    assert raised.value.remedy == "policy.save_checkpoint(path)"
    assert away.contents() == before


def test_a_backward_through_an_older_graph_is_refused_and_works_again_later(make: Make) -> None:
    rig = make(base="resident")
    loss = rig.model(make_batch()["input_ids"]).sum()
    rig.policy.offload()
    with pytest.raises(OffloadedAccessError, match=r"backward\(\) needs"):
        loss.backward()
    rig.policy.switch("resident")
    loss.backward()
    assert all(p.grad is not None for p in rig.model.parameters() if p.requires_grad)
    rig.model.zero_grad()


def test_garbage_is_collected_once_and_only_when_something_was_freed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(base="resident")
    rig.train()
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda *_: calls.append("collect"))
    monkeypatch.setattr(rig.device, "empty_cache", lambda: calls.append("empty cache"))
    rig.policy.offload()
    assert calls == ["collect", "empty cache"]
    calls.clear()
    with rig.policy.logprob_mode():
        assert calls == [], "an onload frees nothing"
    assert calls == ["collect", "empty cache"]
    assert rig.policy.mode is rs.Mode.OFFLOADED


def test_weights_loaded_while_away_are_the_ones_that_come_in(make: Make, away: Rig) -> None:
    path = away.log.parent / "checkpoint"
    away.policy.save_checkpoint(path)
    saved = away.contents()
    with away.policy.training_mode():
        away.train()
    assert away.contents() != saved
    away.policy.load_checkpoint(path)
    with away.policy.logprob_mode():
        assert torch.equal(away.model.mix.weight, away.policy.state_dict()["mix.weight"])  # type: ignore[arg-type]
    assert away.contents() == saved
