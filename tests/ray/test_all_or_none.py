"""A transition is made on every rank or on none, whatever one of them does, at whatever point of it.

On a scripted group of four real ranks in this process: storages are looked at, and bytes are counted by the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_rig import Rig

import rl_session as rs
from rl_session.audit.forward import to_callable
from rl_session.testing import FakeWorkers, rank_device
from rl_session.workers.replies import TransitionRequest

HOST = {"params": "host", "buffers": "host", "grads": "none", "optimizer": "host"}
DEVICE = {"params": "device", "buffers": "device", "grads": "none", "optimizer": "device"}

MakeRig = Callable[..., Rig]


def test_a_policy_on_four_ranks_is_built_trains_and_rests(make: MakeRig) -> None:
    rig = make(warm=False)
    assert rig.policy.mode == "resident"
    with rig.policy.training_mode():
        result = rig.train()
    assert result["loss"].shape == (1,)
    assert rig.seen() == [HOST] * 4
    states = [server._of_worker().state_dict() for server in rig.fake.servers]
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in state)


def test_each_rank_moves_and_all_bytes_are_counted(make: MakeRig) -> None:
    rig = make()
    before = rig.counters("bytes_in")
    with rig.policy.training_mode():
        assert rig.seen() == [DEVICE] * 4
    moved = sum(rig.counters("bytes_in")) - sum(before)
    committed = [r for r in rig.records("transition.committed") if r.event.to_mode == "training"][-1]
    assert committed.event.bytes_moved == moved
    assert committed.event.num_moves == 4 * 3


def test_one_round_of_messages_is_enough(make: MakeRig) -> None:
    rig = make()
    rig.fake.calls.clear()
    with rig.policy.training_mode():
        pass
    assert [method for method, _ in rig.fake.calls] == ["transition", "transition"]


def test_the_mode_in_effect_is_entered_without_a_message(make: MakeRig) -> None:
    rig = make()
    with rig.policy.training_mode():
        rig.fake.calls.clear()
        with rig.policy.training_mode():
            assert rig.policy.mode == "training"
        assert rig.fake.calls == []


@pytest.mark.parametrize("point", ["before", "half", "after"])
@pytest.mark.parametrize(("outcome", "error"), [("fail", rs.TransitionError), ("oom", rs.DeviceMemoryError)])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_that_fails_on_the_way_in_holds_all_back(
    make: MakeRig, rank: int, outcome: str, error: type[Exception], point: str
) -> None:
    rig = make()
    contents = [server._of_worker().state_dict() for server in rig.fake.servers]
    resident = rig.counters("resident_bytes")
    rig.fake.script(rank, "transition", outcome, point)
    with pytest.raises(error) as caught, rig.policy.training_mode():
        raise AssertionError("the block must not run")
    assert rig.seen() == [HOST] * 4
    assert (rig.policy.mode, rig.policy.health) == ("offloaded", "ok")
    assert rig.counters("resident_bytes") == resident
    assert [server._of_worker().mode for server in rig.fake.servers] == ["offloaded"] * 4
    assert [f"rank {k}: " in str(caught.value) for k in range(4)] == [True] * 4
    assert str(caught.value).count("was put back") == 3
    for before, server in zip(contents, rig.fake.servers, strict=True):
        after = server._of_worker().state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    with rig.policy.training_mode():
        rig.train()
        assert rig.seen()[0]["optimizer"] == "device"


def test_row_72_one_rank_of_four_that_fails_fails_all_and_each_says_what_it_did(make: MakeRig) -> None:
    """Others: "some succeeded" is taken for success; the rest of the loop runs on ranks in different states.

    Here: nobody has moved; the error lists each of the four ranks with what it did and where it is now.
    By: one decision over all replies, and those that went ahead are put back (`driver/consensus`).
    """
    rig = make(FakeWorkers(4))
    before = rig.seen()
    rig.fake.script(2, "transition", "fail", "half")
    with pytest.raises(rs.TransitionError) as raised, rig.policy.training_mode():
        pytest.fail("the block ran")
    told = {rank: next(fact for fact in raised.value.facts if f"rank {rank}: " in fact) for rank in range(4)}
    assert "injected" in str(raised.value.cause)
    assert "TransitionError" in told[2]
    assert all("was put back" in told[rank] for rank in (0, 1, 3))
    assert rig.seen() == before
    assert (rig.policy.mode, rig.policy.health) == ("offloaded", "ok")
    with rig.policy.training_mode():
        rig.train()


@pytest.mark.parametrize("point", ["before", "half", "after"])
def test_a_rank_that_fails_on_the_way_out_keeps_all_where_they_are(make: MakeRig, point: str) -> None:
    rig = make()
    with pytest.raises(rs.TransitionError):
        with rig.policy.training_mode():
            rig.fake.script(2, "transition", "fail", point, "copy_out")
    assert rig.seen() == [DEVICE] * 4
    assert (rig.policy.mode, rig.policy.health) == ("offloaded", "ok")
    with rig.policy.logprob_mode():  # makes up for the release first
        assert [seen["optimizer"] for seen in rig.seen()] == ["host"] * 4
    assert rig.seen() == [HOST] * 4


def test_all_ranks_out_of_memory_is_one_error(make: MakeRig) -> None:
    rig = make()
    for rank in range(4):
        rig.fake.script(rank, "transition", "oom")
    rig.fake.calls.clear()
    with pytest.raises(rs.DeviceMemoryError), rig.policy.training_mode():
        pass
    assert [method for method, _ in rig.fake.calls] == ["transition"]  # nobody had to be put back


def test_a_rank_short_of_memory_holds_four_back_until_there_is_room(make: MakeRig) -> None:
    rig = make()
    device = rank_device(rig.policy, 1)
    device.set_capacity(100)
    with pytest.raises(rs.DeviceMemoryError) as caught, rig.policy.training_mode():
        pass
    assert rig.seen() == [HOST] * 4
    assert rig.counters("resident_bytes") == [0] * 4
    assert "rank 1" in str(caught.value)
    device.set_capacity(None)
    with rig.policy.training_mode():
        assert rig.seen() == [DEVICE] * 4


@pytest.mark.parametrize("point", ["before", "half", "after"])
@pytest.mark.parametrize("outcome", ["lost", "late"])
def test_a_lost_rank_faults_the_policy_and_the_others_are_put_back(make: MakeRig, outcome: str, point: str) -> None:
    rig = make()
    rig.fake.script(2, "transition", outcome, point)
    with pytest.raises(rs.FaultedError) as caught, rig.policy.training_mode():
        pass
    seen = rig.seen()
    assert [seen[rank] for rank in (0, 1, 3)] == [HOST] * 3
    assert rig.policy.health == "faulted"
    assert "rank 2: lost" in str(caught.value)
    (lost,) = rig.records("worker.lost")
    assert lost.event.rank == 2
    with pytest.raises(rs.FaultedError, match=r"recover\(\)"), rig.policy.training_mode():
        pass


def test_a_rank_that_cannot_be_put_back_faults_the_policy(make: MakeRig) -> None:
    rig = make()
    rig.fake.script(1, "transition", "oom")
    rig.fake.script(3, "undo", "fail")
    with pytest.raises(rs.FaultedError) as caught, rig.policy.training_mode():
        pass
    assert "rank 3: ok, could not be put back" in str(caught.value)
    rig.policy.recover()
    assert (rig.policy.health, rig.seen()) == ("ok", [HOST] * 4)
    with rig.policy.training_mode():
        rig.train()


def test_an_open_step_survives_a_transition_that_is_taken_back(make: MakeRig) -> None:
    rig = make()
    with rig.policy.training_mode():
        with rig.policy.begin_step() as step:
            step.forward_backward(rig.batch, rig.loss)
            grads = [server._of_worker().spec.model.head.weight.grad.clone() for server in rig.fake.servers]
            rig.fake.script(0, "transition", "fail", "half", "copy_out")
            with pytest.raises(rs.TransitionError), rig.policy.offloaded():
                pass
            kept = [server._of_worker().spec.model.head.weight.grad for server in rig.fake.servers]
            assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))


def test_discarded_gradients_end_the_step_on_every_rank(make: MakeRig) -> None:
    rig = make(offload=rs.OffloadConfig(live_gradients="discard"))
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        step.forward_backward(rig.batch, rig.loss)
        rig.fake.script(0, "transition", "fail", "before")
        with pytest.raises(rs.TransitionError), rig.policy.offloaded():
            pass
        assert not rig.policy._control.ask("has_open_step")
        assert step.state == "aborted"
        with pytest.raises(rs.StepClosedError):
            step.commit()
        rig.train()


def test_a_training_step_on_some_ranks_only_faults_the_policy(make: MakeRig) -> None:
    rig = make()
    with pytest.raises(rs.FaultedError, match="on some ranks only"):
        with rig.policy.training_mode():
            rig.fake.script(1, "train", "fail", "before")
            rig.train()
    assert rig.policy.health == "faulted"


def test_an_inference_call_on_some_ranks_only_is_its_own_error(make: MakeRig) -> None:
    rig = make()
    with rig.policy.logprob_mode():
        rig.fake.script(1, "get_logprobs", "fail", "before")
        with pytest.raises(Exception, match="injected") as caught:
            rig.policy.get_logprobs(rig.batch)
        assert any("rank 0: ok" in note for note in caught.value.__notes__)
        assert rig.policy.get_logprobs(rig.batch)["logprobs"].shape == (4, 5)
    assert rig.policy.health == "ok"


def test_a_recovery_says_which_rank_survived(make: MakeRig) -> None:
    rig = make()
    with rig.policy.training_mode():
        rig.train()
    expected = rig.policy.state_dict()
    rig.fake.script(0, "transition", "lost", "half")
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    rig.policy.recover()
    (recovered,) = rig.records("policy.recovered")
    assert recovered.event.origin == "host copies of rank 1"
    for server in rig.fake.servers:
        found = server._of_worker().state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert rig.seen() == [HOST] * 4
    with rig.policy.training_mode():
        rig.train()


def test_a_recovery_of_training_goes_on_as_if_nothing_had_happened(make: MakeRig) -> None:
    def run(rig: Rig, *, loses: bool) -> list[float]:
        losses = []
        for step in range(4):
            if loses and step == 2:
                rig.fake.script(3, "transition", "lost", "after")
                with pytest.raises(rs.FaultedError), rig.policy.training_mode():
                    pass
                rig.policy.recover()
            with rig.policy.training_mode():
                losses.append(float(rig.train()["loss"]))
        return losses

    torch.manual_seed(5)
    plain = run(make(), loses=False)
    torch.manual_seed(5)
    assert run(make(), loses=True) == plain


def test_without_a_survivor_the_last_checkpoint_is_taken(make: MakeRig, tmp_path: Any) -> None:
    rig = make(FakeWorkers(2))
    rig.policy.save_checkpoint(tmp_path / "ck")
    expected = rig.policy.state_dict()
    with rig.policy.training_mode():
        rig.train()
    for rank in (0, 1):
        rig.fake.script(rank, "transition", "lost")
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    rig.policy.recover()
    assert rig.records("policy.recovered")[0].event.origin == f"checkpoint {tmp_path / 'ck'}"
    found = rig.policy.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_survivor_or_checkpoint_recovery_says_what_to_do(make: MakeRig) -> None:
    rig = make(FakeWorkers(2))
    for rank in (0, 1):
        rig.fake.script(rank, "transition", "lost")
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    with pytest.raises(rs.FaultedError, match=r"load_checkpoint\(path\)"):
        rig.policy.recover()
    assert rig.policy.health == "faulted"


def test_every_rank_reports_to_its_own_file(make: MakeRig) -> None:
    rig = make(FakeWorkers(2))
    with rig.policy.logprob_mode():
        pass
    sources = {record.source for record in rig.records()}
    assert sources == {"driver", "rank:0", "rank:1"}
    for source in ("rank:0", "rank:1"):
        own = [record for record in rig.records() if record.source == source]
        assert {record.name for record in own} == {"component.moved", "rank.reported"}
        assert [record.seq for record in own] == list(range(len(own)))
    assert not [r for r in rig.records("component.moved") if r.source == "driver"]


def test_the_log_tells_of_a_rank_that_was_put_back(make: MakeRig) -> None:
    rig = make(FakeWorkers(2))
    rig.fake.script(1, "transition", "oom", "half")
    with pytest.raises(rs.DeviceMemoryError), rig.policy.training_mode():
        pass
    number = rig.records("transition.rolled_back")[-1].transition_id
    reports = [(r.source, r.event.outcome) for r in rig.records("rank.reported") if r.transition_id == number]
    assert sorted(reports) == [("rank:0", "ok"), ("rank:0", "undone"), ("rank:1", "failed")]


def test_two_policies_with_ranks_have_files_of_their_own(make: MakeRig) -> None:
    rig = make(FakeWorkers(2))
    critic = rig.session.value_model(
        "critic", model=type(rig.fake.servers[0]._of_worker().spec.model), workers=FakeWorkers(2)
    )
    with critic.inference_mode():
        pass
    sources = {record.source for record in rig.records() if record.policy == "critic"}
    assert sources == {"driver", "rank:0@critic", "rank:1@critic"}


def test_a_restarted_rank_begins_a_file_of_its_own(make: MakeRig) -> None:
    rig = make(FakeWorkers(2))
    rig.fake.script(1, "transition", "lost")
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    rig.policy.recover()
    assert {"rank:0+1", "rank:1+1"} <= {record.source for record in rig.records()}


def test_a_model_that_the_session_built_ends_with_the_policy(make: MakeRig) -> None:
    rig = make(FakeWorkers(2))
    devices = [server.device for server in rig.fake.servers]
    rig.policy.close()
    assert [len(device.units) for device in devices] == [0, 0]
    assert rig.policy.health == "closed"


def test_a_factory_is_not_a_module(make: MakeRig) -> None:
    rig = make(FakeWorkers(1))
    with pytest.raises(rs.ConfigError, match="no factory"):
        rig.session.policy("other", model=torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_what_a_factory_raises_is_an_error_of_starting(make: MakeRig) -> None:
    rig = make(FakeWorkers(1))

    def broken() -> torch.nn.Module:
        raise OSError("no such weights")

    with pytest.raises(rs.WorkerError, match="no such weights"):
        rig.session.policy("other", model=broken, workers=FakeWorkers(2))
    assert [p.name for p in rig.session._participants] == ["actor"]


def test_an_optimizer_factory_may_ask_for_the_module(make: MakeRig) -> None:
    rig = make(FakeWorkers(1))
    seen = []

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        seen.append(type(model).__name__)
        return torch.optim.SGD(model.parameters(), lr=0.1)

    rig.session.policy("other", model=lambda: torch.nn.Linear(2, 2), optimizer=optimizer)
    assert seen == ["Linear"]


def test_policies_that_share_ranks_share_their_budget(make: MakeRig) -> None:
    class Shared(FakeWorkers):
        def site(self) -> object:
            return first

    first = FakeWorkers(2)
    one = make(first, session_options={"release": "lazy"})
    nbytes = one.counters("resident_bytes")[0]
    assert nbytes > 0  # lazy: it stays
    two = one.session.policy(
        "other",
        model=type(one.fake.servers[0]._of_worker().spec.model),
        optimizer=torch.optim.AdamW,
        workers=Shared(2),
        device="cpu",
    )
    assert two.device is one.policy.device
    assert two.device.held_bytes >= nbytes
    one.session.make_room(0, device=two.device)
    one.session._run.arbiter.budget = nbytes + 10
    with two.logprob_mode():
        assert one.counters("resident_bytes")[0] < nbytes  # it had to make room


def test_a_budget_costs_no_round_while_there_is_room(make: MakeRig) -> None:
    rig = make(FakeWorkers(2), capacity=100_000)
    rig.fake.calls.clear()
    with rig.policy.training_mode():
        pass
    assert [method for method, _ in rig.fake.calls] == ["transition", "transition"]


def test_no_room_in_the_budget_moves_nothing_and_names_who_holds_it(make: MakeRig) -> None:
    rig = make(FakeWorkers(2), capacity=100_000)
    rig.session._run.arbiter.budget = 100
    before = rig.counters("num_copies")
    with pytest.raises(rs.DeviceMemoryError, match="no room on the device"), rig.policy.training_mode():
        pass
    assert rig.seen() == [HOST] * 2
    assert rig.counters("num_copies") == before
    rig.session._run.arbiter.budget = None
    with rig.policy.training_mode():
        assert rig.seen() == [DEVICE] * 2


def test_ranks_that_need_different_room_move_together_in_the_end(make: MakeRig) -> None:
    records: list[dict[str, Any]] = []
    session = rs.Session(release="lazy", verify="checksum", audit_processors=[to_callable(records.append)])
    rig = make(FakeWorkers(2), session=session, warm=False)  # a first optimizer state is expected, and may not refuse
    rig.policy.offload()
    with rig.policy.logprob_mode():  # lazy: the weights stay on the device
        pass
    rig.fake.call_on([1], "transition", _offloaded())  # one rank is not where the driver takes it to be
    held = rig.counters("held_bytes")
    assert held[0] > held[1] == 0
    first, second = (reply.value.nbytes for reply in rig.fake.call("room", _training()))
    assert first < second
    session._run.arbiter.budget = held[0] + second - 1  # enough for the first, and not for the second
    copied = sum(rig.counters("bytes_in")) + sum(rig.counters("bytes_out"))
    rig.fake.calls.clear()
    with rig.policy.training_mode():
        assert [method for method, _ in rig.fake.calls][:2] == ["transition", "undo"]
        assert [seen["params"] for seen in rig.seen()] == ["device"] * 2
        copied = sum(rig.counters("bytes_in")) + sum(rig.counters("bytes_out")) - copied
        assert [r["bytes_moved"] for r in records if r["event"] == "transition.committed"][-1] == copied


def _training() -> Any:
    return TransitionRequest(mode=rs.Mode.TRAINING, flags=rs.OffloadConfig().flags(release="lazy"))


def _offloaded() -> Any:
    return TransitionRequest(mode=rs.Mode.OFFLOADED, flags=rs.OffloadConfig().flags(release="eager"))


def test_a_push_is_not_spared_because_a_new_rank_counts_from_the_start(make: MakeRig) -> None:
    rig = make(FakeWorkers(2))
    before = rig.policy._control.ask_all("weights_epoch")
    rig.fake.script(1, "transition", "lost")
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    rig.policy.recover()
    after = rig.policy._control.ask_all("weights_epoch")
    assert all(new > old for new, old in zip(after, before, strict=True))


def test_what_was_registered_is_registered_again_on_new_ranks(make: MakeRig) -> None:
    rig = make(FakeWorkers(2))
    rig.policy.register("ema", {"weights": torch.ones(5)})
    rig.fake.script(1, "transition", "lost")
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    rig.policy.recover()
    assert all("ema" in reply.value for reply in rig.fake.call("component_names"))
    with rig.policy.training_mode():
        assert all(placement["ema"] == "device" for placement in rig.placements())


def test_a_transition_in_which_nothing_moved_is_no_excuse_not_to_look_after_a_call(make: MakeRig) -> None:
    rig = make(FakeWorkers(2), base="resident", warm=False)
    with rig.policy.training_mode():  # nothing moves
        rig.train()  # and now there is optimizer state
    rig.policy.offload()
    assert rig.seen() == [HOST] * 2


def test_the_reference_of_a_survivor_is_that_of_all(make: MakeRig) -> None:
    rig = make(FakeWorkers(2), reference="copy")
    with rig.policy.logprob_mode():
        expected = rig.policy.get_reference_policy_logprobs(rig.batch)["reference_logprobs"]
        policy_logprobs = rig.policy.get_logprobs(rig.batch)["logprobs"]
    assert not torch.equal(expected, policy_logprobs)
    # A model that is built otherwise the second time: the seed alone would not bring the reference back.
    rig.fake._plan.seed = 99
    rig.fake.script(0, "transition", "lost")
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    rig.policy.recover()
    with rig.policy.logprob_mode():
        for reply in rig.fake.call("get_reference_policy_logprobs", rig.batch):
            assert torch.equal(reply.value.value["reference_logprobs"], expected)
