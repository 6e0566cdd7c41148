"""Replaying: the log of a real run says where everything was, at every instant that somebody looked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_session as rs
from rl_session.audit import read_audit
from rl_session.audit.check import assert_log_is_consistent
from rl_session.audit.replay import Replay, replay, state_at
from rl_session.testing import EmulatedDevice

Scenario = Callable[[Any, Any, Any], None]


def nested(run: Any, batch: Any, loss: Any) -> None:
    actor = run.attach(reference="copy")
    rs.InProcessEngine(actor, max_new_tokens=2, seed=1)
    run.look()
    for n in range(3):
        with run.session.step(n):
            with actor.training_mode():
                run.look()
                actor.train(batch, loss)
                run.look()
                with actor.training_mode():
                    actor.train(batch, loss)
                with actor.logprob_mode():
                    actor.get_reference_policy_logprobs(batch)
                    run.look()
                    with actor.refit_mode():
                        run.look()
                        with actor.offloaded():
                            run.look()
                run.look()
            with actor.generation_mode():
                actor.policies if False else actor.get_logprobs(batch)
                run.look()
                with actor.logprob_mode():
                    run.look()
            run.look()


def open_steps(run: Any, batch: Any, loss: Any) -> None:
    actor = run.attach()
    step = None
    with actor.training_mode():
        step = actor.begin_step()
        step.forward_backward(batch, loss)
        run.look()
    run.look()
    with actor.logprob_mode():
        actor.get_logprobs(batch)
        run.look()
    with actor.refit_mode():
        run.look()
    with actor.training_mode():
        run.look()
        step.commit()
        run.look()
        with pytest.raises(ZeroDivisionError), actor.begin_step() as step:
            step.forward_backward(batch, loss)
            raise ZeroDivisionError
        run.look()
        step = actor.begin_step()
        step.forward_backward(batch, loss)
    step.abort()
    run.look()
    actor.switch("training")
    step = actor.begin_step()
    step.forward_backward(batch, loss)
    actor.offload()
    run.look()
    step.abort()


def faults(run: Any, batch: Any, loss: Any) -> None:
    actor = run.attach()
    with actor.training_mode():
        actor.train(batch, loss)
    for operation in ("copy_in", "copy_out", "allocate", "free", "synchronize"):
        for point in ("before", "half", "after"):
            for k in (1, 2):
                actor.device.fail(operation, k=k, point=point)
                try:
                    with actor.training_mode():
                        run.look()
                        with actor.refit_mode():
                            run.look()
                except rs.RLSessionError:
                    pass
                actor.device.heal()
                run.look()
    actor.offload()
    run.look()


def out_of_order(run: Any, batch: Any, loss: Any) -> None:
    actor = run.attach(base="resident")
    outer, inner = actor.training_mode(), actor.logprob_mode()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(rs.ScopeOrderError):
        outer.__exit__(None, None, None)
    run.look()
    inner.__exit__(None, None, None)
    run.look()
    lost = actor.offloaded()
    lost.__enter__()
    run.look()
    del lost
    with actor.training_mode():
        actor.train(batch, loss)
        run.look()
    run.look()


def own_loop(run: Any, batch: Any, loss: Any) -> None:
    """Gradients and optimizer state that no call of the library made."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    actor = run.session.attach(model, optimizer, name="own", device=EmulatedDevice())
    run.policies.append(actor)
    for _ in range(2):
        with actor.training_mode():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        run.look()


def several(run: Any, batch: Any, loss: Any) -> None:
    device = EmulatedDevice()
    actor = run.attach("actor", device=device)
    critic = run.attach("critic", device=device, base="resident")
    with actor.training_mode(), critic.training_mode():
        actor.train(batch, loss)
        critic.train(batch, loss)
        run.look()
    run.look()
    critic.offload()
    critic.switch("resident")
    run.look()
    critic.detach()
    run.look()
    run.attach("critic")
    run.look()


def checkpoints(run: Any, batch: Any, loss: Any) -> None:
    actor = run.attach()
    path = run.path.parent / "checkpoint"
    with actor.training_mode():
        actor.train(batch, loss)
    actor.save_checkpoint(path)
    actor.load_checkpoint(path)
    run.look()
    with actor.training_mode():
        run.look()
        actor.load_checkpoint(path)
        run.look()
    run.attach("fresh").load_checkpoint(path)
    run.look()


def module_reference(run: Any, batch: Any, loss: Any) -> None:
    actor = run.attach(reference=type(run.attach("other")._control.group.worker.module)())
    run.look()
    with actor.logprob_mode():
        actor.get_reference_policy_logprobs(batch)
        run.look()
    run.look()


SCENARIOS: list[Scenario] = [
    nested,
    open_steps,
    faults,
    out_of_order,
    own_loop,
    several,
    checkpoints,
    module_reference,
]


@pytest.mark.parametrize("release", ["eager", "lazy", "never"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_placement_that_was_looked_at_is_in_the_log(
    scenario: Scenario, release: str, tmp_path: Path, make_run: Callable[..., Any], batch: Any, loss: Any
) -> None:
    run = make_run(tmp_path / "run.jsonl", release=release)
    scenario(run, batch, loss)
    run.session.close()

    states = list(replay(run.path))
    assert len(states) == run.path.read_bytes().count(b"\n")
    for num, placements, modes in run.seen:
        state = states[num - 1]
        assert {name: state.policies[name].placement for name in placements} == placements
        assert {name: state.policies[name].mode for name in modes} == modes
    assert_log_is_consistent(run.path)
