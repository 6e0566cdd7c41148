"""One contract for every worker group: in this process, scripted, and on Ray. The same tests, three times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_rig import Tiny, make_batch, make_plan, nll

import rl_session as rs
from rl_session.lifecycle import Mode, Tier
from rl_session.testing import EmulatedDevice, FakeGroup
from rl_session.workers.group import LocalGroup
from rl_session.workers.launch import RayWorkers
from rl_session.workers.plan import build_spec
from rl_session.workers.replies import Failed, Lost, Ok, TransitionReply, TransitionRequest
from rl_session.workers.worker import Worker

KINDS = ("local", "fake", "ray")
SEVERAL = ("fake", "ray")
FLAGS = rs.OffloadConfig().flags(release="eager")
TRAINING = TransitionRequest(mode=Mode.TRAINING, flags=FLAGS, transition_id=1)
OFFLOADED = TransitionRequest(mode=Mode.OFFLOADED, flags=FLAGS, transition_id=2, leaves_library=True)


def local_group() -> LocalGroup:
    from rl_session.offload.host_pool import HostPool

    plan = make_plan()
    spec = build_spec(plan)
    worker = Worker(spec, EmulatedDevice(), HostPool(None), lambda: (plan.label, ()))
    worker.start()
    return LocalGroup(worker, is_built=True)


def ray_group(num_ranks: int = 2, timeout_seconds: float = 60.0) -> Any:
    workers = RayWorkers(num_ranks, resources={"CPU": 0.5}, parallelize=None)
    group, replies = workers.start(make_plan(), timeout_seconds)
    assert all(isinstance(reply, Ok) for reply in replies), replies
    return group


def fake_group() -> FakeGroup:
    group = FakeGroup(2, make_plan())
    assert all(isinstance(reply, Ok) for reply in group.start())
    return group


@pytest.fixture(scope="module")
def shared_ray(cluster: None) -> Iterator[Any]:
    """One Ray group for the tests that leave it as it was."""
    group = ray_group()
    yield group
    group.close()


@pytest.fixture(params=KINDS)
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A group of each kind, at rest with everything on the host."""
    if request.param == "ray":
        made = request.getfixturevalue("shared_ray")
    else:
        made = local_group() if request.param == "local" else fake_group()
    assert all(isinstance(reply, Ok) for reply in made.call("transition", OFFLOADED))
    yield made
    if request.param != "ray":
        made.close()


def test_there_is_one_reply_a_rank(group: Any) -> None:
    replies = group.call("component_names")
    assert len(replies) == group.num_ranks
    assert all(isinstance(reply, Ok) and "params" in reply.value for reply in replies)


def test_a_transition_says_where_everything_is_before_and_after(group: Any) -> None:
    for reply in group.call("transition", TRAINING):
        assert isinstance(reply, Ok)
        assert isinstance(reply.value, TransitionReply)
        assert (reply.value.before["params"], reply.value.placement["params"]) == (Tier.HOST, Tier.DEVICE)
        assert sum(moved.nbytes for moved in reply.value.moved) > 0
    assert all(reply.value["params"] is Tier.DEVICE for reply in group.call("placement"))


def test_what_a_rank_raises_is_a_reply(group: Any) -> None:
    for reply in group.call("get_logprobs", {"input_ids": "no"}):
        assert isinstance(reply, Failed)
        assert isinstance(reply.error, rs.BatchError)


def test_a_failure_carries_the_traceback_of_where_it_happened(group: Any) -> None:
    for reply in group.call("get_logprobs", {"input_ids": "no"}):
        there = reply.traceback or "".join(__import__("traceback").format_exception(reply.error))
        assert "check_batch" in there


def test_a_method_that_is_not_there_is_a_reply(group: Any) -> None:
    assert all(
        isinstance(reply, Failed) and isinstance(reply.error, AttributeError) for reply in group.call("no_such_method")
    )


def test_a_group_goes_on_after_a_failure(group: Any) -> None:
    before = [reply.value for reply in group.call("placement")]
    group.call("no_such_method")
    assert [reply.value for reply in group.call("placement")] == before


def test_keyword_arguments_arrive(group: Any) -> None:
    group.call("transition", TRAINING)
    for reply in group.call("get_logprobs", make_batch(), mbs=1):
        assert isinstance(reply, Ok)
        assert reply.value.value["logprobs"].shape == (4, 5)


def test_a_function_and_a_batch_arrive_and_results_come_back(group: Any) -> None:
    group.call("transition", TRAINING)
    replies = group.call("train", make_batch(), nll, None, None, False)
    losses = [reply.value.value["loss"] for reply in replies]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert losses[0].shape == (1,)


def test_an_error_of_the_loss_keeps_its_class(group: Any) -> None:
    def loss(*_: Any) -> Any:
        raise ZeroDivisionError("advantages")

    group.call("transition", TRAINING)
    replies = group.call("train", make_batch(), loss, None, None, False)
    assert all(isinstance(reply, Failed) and isinstance(reply.error, ZeroDivisionError) for reply in replies)


def test_an_error_that_cannot_travel_says_the_same_in_words(group: Any) -> None:
    class OddError(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} is not {b}")

    def loss(*_: Any) -> Any:
        raise OddError(1, 2)

    group.call("transition", TRAINING)
    for reply in group.call("train", make_batch(), loss, None, None, False):
        assert isinstance(reply, Failed)
        assert "1 is not 2" in str(reply.error)


def test_asking_some_ranks_asks_no_other(group: Any) -> None:
    last = group.num_ranks - 1
    found = group.call_on([last], "transition", TRAINING)
    assert list(found) == [last]
    assert isinstance(found[last], Ok)
    tiers = [reply.value["params"] for reply in group.call("placement")]
    assert tiers == [Tier.HOST] * last + [Tier.DEVICE]


def test_a_transition_can_be_taken_back(group: Any) -> None:
    before = [reply.value for reply in group.call("placement")]
    group.call("transition", TRAINING)
    replies = group.call("undo")
    assert all(isinstance(reply, Ok) for reply in replies)
    assert [reply.value for reply in group.call("placement")] == before


def test_there_is_nothing_to_take_back_twice(group: Any) -> None:
    group.call("transition", TRAINING)
    group.call("undo")
    assert all(isinstance(reply.error, rs.TransitionError) for reply in group.call("undo"))


def test_each_rank_can_be_given_a_first_argument_of_its_own(group: Any) -> None:
    group.call("transition", TRAINING)
    batches = [make_batch(rank + 2) for rank in range(group.num_ranks)]
    replies = group.call_each(batches, "get_logprobs", None, mbs=2)
    assert [len(reply.value.value["logprobs"]) for reply in replies] == [rank + 2 for rank in range(group.num_ranks)]
    assert all(isinstance(reply, Failed) for reply in group.call_each([{}] * group.num_ranks, "get_logprobs"))


def expect_weights_of_the_seed(group: Any) -> None:
    torch.manual_seed(3)
    model, batch = Tiny(), make_batch()
    logprobs = torch.log_softmax(model(batch["input_ids"])[:, :-1], dim=-1)
    expected = logprobs.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    assert all(isinstance(reply, Ok) for reply in group.call("transition", TRAINING))
    for reply in group.call("get_logprobs", batch):
        assert torch.allclose(reply.value.value["logprobs"][:, 1:], expected, atol=1e-6)


def expect_closed(group: Any) -> None:
    group.close()
    group.close()
    replies = group.call("placement")
    assert len(replies) == group.num_ranks
    assert all(isinstance(reply, Failed) and isinstance(reply.error, rs.ClosedError) for reply in replies)
    assert all(isinstance(reply, Failed) for reply in group.restart())


def test_a_rank_in_this_process_has_the_weights_of_the_seed_until_it_is_closed() -> None:
    group = local_group()
    expect_weights_of_the_seed(group)
    expect_closed(group)


@pytest.fixture(params=SEVERAL)
def losing(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Callable[[int], None]]]:
    """A group of several ranks, and how to lose one in its next transition."""
    if request.param == "fake":
        fake = fake_group()
        yield fake, lambda rank: fake.script(rank, "transition", "lost", "half")
        fake.close()
        return
    request.getfixturevalue("cluster")
    made = ray_group()
    yield made, lambda rank: made.call_on([rank], "emulated", "die", "copy_in", 1, "half")
    made.close()


def test_a_lost_rank_stays_lost_until_the_group_starts_anew_as_it_was_built(
    losing: tuple[Any, Callable[[int], None]],
) -> None:
    group, lose = losing
    expect_weights_of_the_seed(group)
    group.call("train", make_batch(), nll, None, None, False)
    group.call("transition", OFFLOADED)
    lose(1)
    first, second = group.call("transition", TRAINING)
    assert isinstance(first, Ok)
    assert isinstance(second, Lost)
    assert "died" in second.cause
    kept = group.call("placement")
    assert isinstance(kept[0], Ok)
    assert isinstance(kept[1], Lost)
    assert group.call_on([1], "placement") == {1: kept[1]}
    replies = group.restart()
    assert [type(reply) for reply in replies] == [Ok, Ok]
    assert all(reply.value.nbytes["params"] > 0 for reply in replies)
    expect_weights_of_the_seed(group)
    expect_closed(group)
