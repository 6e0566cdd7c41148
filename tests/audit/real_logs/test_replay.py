"""Replaying: the log of a real run says where everything was, at every instant that somebody looked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

import rl_session as rs
from rl_session.audit import AuditReader, events, read_audit
from rl_session.audit.check import assert_log_is_consistent
from rl_session.audit.log import AuditLog
from rl_session.audit.replay import Replay, replay, state_at
from rl_session.testing import EmulatedDevice

Scenario = Callable[[Any, Any, Any], None]


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11))


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
                actor.get_logprobs(batch)
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
    actor = run.attach(reference=make_model())
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


def comparable(states: list[Any], run: Any) -> list[tuple[Any, Any]]:
    """What the log says and what was seen, for each look."""
    return [
        ({name: states[num - 1].policies[name].placement for name in placements}, placements)
        for num, placements, _ in run.seen
    ]


# -- what no record can say ------------------------------------------------------------------------------------


def test_bytes_that_user_code_made_are_known_when_they_move_and_noted(
    tmp_path: Path, make_run: Callable[..., Any]
) -> None:
    run = make_run(tmp_path / "run.jsonl")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    actor = run.session.attach(model, optimizer, name="own", device=EmulatedDevice())
    run.policies.append(actor)
    for _ in range(2):
        with actor.training_mode():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        run.look()
    run.session.close()
    assert all(told == seen for told, seen in comparable(list(replay(run.path)), run))
    result = assert_log_is_consistent(run.path)
    assert {note.code for note in result.notes} == {"moved_from"}
    assert "optimizer" in result.notes[0].message + result.notes[1].message


def faulted_run(run: Any, batch: Any, loss: Any) -> Any:
    """A policy that is faulted with a train step open, by an entry that could not be undone."""
    actor = run.attach()
    with actor.training_mode():
        actor.train(batch, loss)
    with pytest.raises(rs.FaultedError), actor.training_mode():
        step = actor.begin_step()
        step.forward_backward(batch, loss)
        actor.device.fail("free", k=2, point="after")
        actor.device.fail("allocate", k=1)
        with actor.offloaded():
            pass
    actor.device.heal()
    assert actor.health == "faulted"
    return actor


def test_after_a_fault_the_placement_is_uncertain_until_the_log_says_it_again(
    tmp_path: Path, make_run: Callable[..., Any], batch: Any, loss: Any
) -> None:
    run = make_run(tmp_path / "run.jsonl")
    actor = faulted_run(run, batch, loss)
    state = state_at(run.path).policies["actor"]
    assert (state.health, state.is_certain, state.mode) == ("faulted", False, actor.mode)
    actor.recover()
    with actor.training_mode():
        run.look()
    run.session.close()
    states = list(replay(run.path))
    num, placements, _ = run.seen[-1]
    state = states[num - 1].policies["actor"]
    assert state.placement == placements["actor"]
    assert state.health == "ok"
    assert_log_is_consistent(run.path)


def test_a_recovery_that_says_where_everything_is_ends_the_uncertainty() -> None:
    live = Replay()
    for record in synthetic(
        events.PolicyCreated(mode="training", placement={"params": "device"}, nbytes={"params": 8}),
        events.TransitionStarted(from_mode="training", to_mode="offloaded", reason="x"),
        events.TransitionFailed(from_mode="training", to_mode="offloaded", error="x"),
        events.PolicyFaulted(cause="x", remedy="y"),
    ):
        live.feed(record)
    assert not live.state.policies["actor"].is_certain
    (record,) = synthetic(events.PolicyRecovered(origin="host", placement={"params": "host"}, nbytes={"params": 8}))
    live.feed(record)
    state = live.state.policies["actor"]
    assert (state.is_certain, state.placement, state.health) == (True, {"params": "host"}, "ok")


# -- single rules ----------------------------------------------------------------------------------------------


def synthetic(*made: events.Event, **envelope: Any) -> list[dict[str, Any]]:
    """Records as they would be read."""
    return [
        {
            "schema": 1,
            "run_id": "r",
            "source": "driver",
            "seq": seq,
            "time_ns": 1000 + seq,
            "mono_ns": seq,
            "event": event.event,
            "policy": "actor",
            "scope_id": None,
            "transition_id": 1,
            "step": None,
            **envelope,
            **event.to_fields(),
        }
        for seq, event in enumerate(made)
    ]


def test_bytes_are_followed_by_tier_and_vanish_when_dropped() -> None:
    live = Replay()
    placement, nbytes = {"params": "host", "grads": "device"}, {"params": 10, "grads": 4}
    moved = {"component": "params", "from_tier": "host", "to_tier": "device", "seconds": 0.0}
    for record in synthetic(
        events.PolicyCreated(mode="offloaded", placement=placement, nbytes=nbytes),
        events.ComponentMoved(**moved, nbytes=4),
    ):
        live.feed(record)
    half = live.state.policies["actor"]
    assert half.components["params"] == {"host": 6, "device": 4}
    assert half.placement["params"] == "device"
    assert (half.nbytes("device"), half.nbytes("host")) == (8, 6)
    for record in synthetic(
        events.ComponentMoved(**moved, nbytes=6),
        events.ComponentMoved(component="grads", from_tier="device", to_tier="none", nbytes=4, seconds=0.0),
    ):
        live.feed(record)
    whole = live.state.policies["actor"]
    assert whole.components == {"params": {"device": 10}, "grads": {}}
    assert whole.placement == {"params": "device", "grads": "none"}
    assert half.components["params"] == {"host": 6, "device": 4}, "a state is a value"


def test_versions_and_references_are_followed() -> None:
    live = Replay()
    swap = {"nbytes": 4, "kind": "module", "seconds": 0.0}
    placement = {"params": "device", "reference": "host"}
    said: list[Any] = []
    for record in synthetic(
        events.PolicyCreated(mode="logprob", placement=placement, nbytes={"params": 4, "reference": 4}),
        events.WeightsPublished(version=3, nbytes=4),
        events.ReferenceSwapped(direction="in", **swap),
    ):
        live.feed(record)
        said.append(live.state.policies["actor"])
    assert said[-1].weights_version == 3
    assert said[-1].reference_in
    assert said[-1].placement["reference"] == "device"
    assert said[-1].open_call is not None
    assert said[-1].open_call.method == "get_reference_policy_logprobs"
    for record in synthetic(
        events.ReferenceSwapped(direction="out", **swap),
        events.CallFinished(method="get_reference_policy_logprobs", mode="logprob", seconds=0.0),
    ):
        live.feed(record)
    last = live.state.policies["actor"]
    assert (last.reference_in, last.open_call, last.placement["reference"]) == (False, None, "host")


def test_unknown_events_and_damaged_fields_change_nothing_and_do_not_raise() -> None:
    said: list[str] = []
    live = Replay(lambda code, _message: said.append(code))
    records = synthetic(
        events.PolicyCreated(mode="offloaded", placement={}, nbytes={}), events.PolicyClosed(reason="x")
    )
    live.feed(records[0])
    live.feed({**records[1], "event": "moon.landed"})
    live.feed({**records[1], "event": "component.moved"})
    live.feed({**records[1], "event": "call.finished", "mode": "offloaded", "changed": [3], "method": "x"})
    assert said == ["malformed", "malformed"]
    assert live.state.policies["actor"].health == "ok"
    assert live.num_records == 4


def test_a_log_that_begins_in_the_middle_is_replayed_from_there(clean_log: Path) -> None:
    records = [orjson.loads(line) for line in clean_log.read_bytes().splitlines()]
    said: list[str] = []
    live = Replay(lambda code, _message: said.append(code))
    start = next(n for n, r in enumerate(records) if r["event"] == "transition.started")
    for record in records[start:]:
        live.feed(record)
    assert said[0] == "unknown_policy"
    assert live.state.policies["actor"].health == "closed"


# -- asking ----------------------------------------------------------------------------------------------------


def test_state_at_a_seq_and_at_a_time_is_the_state_after_that_record(clean_log: Path) -> None:
    states = list(replay(clean_log))
    assert states[-1].seq == len(states) - 1
    for wanted in (2, len(states) // 2, len(states) - 1):
        assert state_at(clean_log, seq=wanted) == states[wanted]
        assert state_at(clean_log, time_ns=states[wanted].time_ns).seq >= wanted
    assert state_at(clean_log) == states[-1]
    assert state_at(read_audit(clean_log), seq=5) == states[5]
    with pytest.raises(ValueError, match="begins later"):
        state_at(clean_log, time_ns=0)


def test_open_scopes_steps_and_transitions_are_there_while_they_are_open(clean_log: Path) -> None:
    reader = AuditReader(clean_log)
    depths, steps, moving = [], 0, 0
    for record, state in zip(reader, replay(clean_log), strict=True):
        policy = state.policies.get("actor")
        if policy is None:
            continue
        depths.append(len(policy.scopes))
        steps += policy.open_step is not None
        moving += policy.transition is not None
        if record.name == "scope.entered":
            assert policy.scopes[-1].scope_id == record.scope_id
            assert policy.scopes[-1].mode == policy.mode
        if record.name == "component.moved" and record.transition_id is not None:
            assert policy.transition is not None
            assert policy.transition.transition_id == record.transition_id
    assert max(depths) == 2
    assert steps
    assert moving
    assert depths[-1] == 0


def test_states_of_several_sources_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with (
        AuditLog(path, run_id="r") as driver,
        AuditLog(tmp_path / "run.rank:0.jsonl", run_id="r", source="rank:0") as rank,
    ):
        created = events.PolicyCreated(
            mode="offloaded", placement={"params": "host"}, nbytes={"params": 8}, num_ranks=2
        )
        driver.write(created, policy="actor")
        driver.write(
            events.TransitionStarted(from_mode="offloaded", to_mode="training", reason="x"),
            policy="actor",
            transition_id=1,
        )
        moved = events.ComponentMoved(component="params", from_tier="host", to_tier="device", nbytes=8, seconds=0.1)
        rank.write(moved, policy="actor", transition_id=1)
    last = state_at(path)
    assert (last.source, last.policies["actor"].placement) == ("rank:0", {"params": "device"})
    assert state_at(path, seq=1).policies["actor"].placement == {"params": "host"}
