"""The parts of the control plane by themselves: what users write, what replies add up to, leases, names of sources."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_rig import Rig, Tiny, make_batch, make_optimizer, make_plan

import rl_session as rs
from rl_session.audit.check import check
from rl_session.audit.naming import rank_of, rank_source
from rl_session.driver import consensus
from rl_session.driver.ranks import Ranks
from rl_session.driver.remote_device import RemoteDevice
from rl_session.lifecycle import Mode, Placement, Tier
from rl_session.offload.reports import Notice
from rl_session.testing import EmulatedDevice, FakeWorkers, rank_device
from rl_session.workers.lease import FREE, Lease
from rl_session.workers.plan import AuditTarget, RankPlan
from rl_session.workers.rank import RankServer
from rl_session.workers.replies import CallResult, Changed, Failed, Lost, Ok, Stamp
from rl_session.workers.sampling import SamplingParams
from rl_session.workers.shares import Share

MakeRig = Callable[..., Rig]

# -- who is sent what -------------------------------------------------------------------------------------------------


class Joined:
    """Three ranks that a process group joins, played: each finds its rows' first token, or as many texts as rows."""

    num_ranks, logs_moves, is_joined = 3, True, True

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[Any], tuple[Any, ...]]] = []

    def call_each(self, firsts: list[Share], method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.sent.append((method, firsts, args))
        return [Ok(CallResult(self._found(method, each))) for each in firsts]

    def _found(self, method: str, share: Share) -> Any:
        if method == "train":
            return {"loss": torch.tensor([7.0])}
        ids = share.batch["input_ids"][: share.num_rows]
        if method == "generate":
            return {"output_ids": ids[:, : 1 + share.num_rows]}
        return {"first": ids[:, 0]}


def joined() -> tuple[Ranks, Joined]:
    group: Any = Joined()
    return Ranks(group, "policy 'actor'", lambda: ("policy 'actor'", ()), lambda *_, **__: None), group


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_each_rank_is_sent_its_own_rows_and_results_come_back_in_the_order_of_the_caller(num: int) -> None:
    ranks, group = joined()
    batch = make_batch(num)
    assert torch.equal(ranks.call("get_logprobs", batch, None, 2).value["first"], batch["input_ids"][:, 0])  # type: ignore[index]
    ((method, shares, args),) = group.sent
    assert (method, args) == ("get_logprobs", (None, 2))
    assert sum(share.num_rows for share in shares) == num
    assert max(share.num_rows for share in shares) - min(share.num_rows for share in shares) <= 1
    assert all(len(share.batch["input_ids"]) == max(1, share.num_rows) for share in shares)


def test_a_step_is_cut_into_parts_and_what_every_rank_knows_is_taken_once() -> None:
    ranks, group = joined()
    assert ranks.call("train", make_batch(8), "loss", 4, None, False).value == {"loss": torch.tensor([7.0])}
    ((_, shares, args),) = group.sent
    assert [share.steps for share in shares] == [(2, 2), (1, 1), (1, 1)]
    assert args == ("loss", 4, None, False)


def test_texts_of_ranks_are_filled_up_with_the_pad_token() -> None:
    ranks, _ = joined()
    found: Any = ranks.call("generate", make_batch(4), SamplingParams(pad_id=9), 0).value
    assert found["output_ids"].shape == (4, 3)
    assert found["output_ids"][2:, 2].tolist() == [9, 9]


def test_a_batch_that_is_wrong_is_sent_to_nobody() -> None:
    ranks, group = joined()
    for call in (("train", make_batch(4), "loss", 3, None, False), ("get_logprobs", {"input_ids": "no"}, None, None)):
        with pytest.raises(rs.BatchError, match="policy 'actor': "):
            ranks.call(*call)
    assert group.sent == []


def test_a_placement_that_was_sent_is_the_one_that_arrives() -> None:
    placement = Placement({"params": Tier.DEVICE, "ema": Tier.HOST, "grads": Tier.NONE})
    arrived = pickle.loads(pickle.dumps(placement))
    assert arrived == placement
    assert list(arrived.items()) == list(placement.items())
    assert all(type(tier) is Tier for tier in arrived.values())


# -- what users write -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": True}, "num_workers=True"),
        ({"num_workers": 2, "gpus_per_worker": 1.5}, "no share of a GPU"),
        ({"num_workers": 2, "gpus_per_worker": 0}, "no share of a GPU"),
        ({"num_workers": 2, "placement": "packed"}, "no strategy"),
        ({"num_workers": 2, "parallelize": "megatron"}, "no way to spread"),
        ({"num_workers": 2, "timeout_seconds": -1}, "timeout_seconds=-1"),
        ({"num_workers": 3, "placement": rs.RayWorkers(2)}, "have 2 bundles"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_written(options: dict[str, Any], said: str) -> None:
    with pytest.raises(rs.ConfigError, match=said):
        rs.RayWorkers(**options)


def test_workers_that_share_bundles_are_one_site() -> None:
    first = rs.RayWorkers(2)
    second = rs.RayWorkers(2, placement=first)
    assert rs.RayWorkers(1, placement=second).site() is first.site()
    assert rs.RayWorkers(2).site() is not first.site()


def test_a_model_that_is_built_in_this_process_ends_with_its_policy(tmp_path: Path) -> None:
    built: list[torch.nn.Module] = []

    def model() -> torch.nn.Module:
        built.append(Tiny())
        return built[0]

    device = EmulatedDevice()
    with rs.Session(tmp_path / "run.jsonl", verify="checksum") as session:
        policy = session.policy(model=model, optimizer=make_optimizer, workers=rs.LocalWorkers(), device=device)
        with policy.training_mode():
            assert device.resident_bytes > 0
        assert device.resident_bytes == 0
    assert device.units == {}
    with pytest.raises(rs.OffloadedAccessError):  # not given back: touching what is gone is an error, not a crash
        built[0].state_dict()


def test_each_scheduler_masters_and_reference_are_built_too(tmp_path: Path) -> None:
    with rs.Session(tmp_path / "run.jsonl") as session:
        policy = session.policy(
            model=Tiny,
            optimizer=make_optimizer,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            reference=Tiny,
            workers=FakeWorkers(2),
            device="cpu",
        )
        group: Any = policy._control.group
        for server in group.servers:
            spec = server._of_worker().spec
            assert isinstance(spec.scheduler, torch.optim.lr_scheduler.StepLR)
            assert isinstance(spec.reference, Tiny)


def test_an_affinity_hook_comes_before_everything() -> None:
    seen: list[int] = []
    server = RankServer(3, 4, affinity=seen.append)
    assert seen == [3]
    assert server.rank == 3


# -- adding up --------------------------------------------------------------------------------------------------------


def test_a_component_is_at_the_highest_tier_of_any_rank() -> None:
    merged = consensus.merge_placements(
        [Placement({"params": Tier.HOST, "grads": Tier.NONE}), Placement({"params": Tier.DEVICE, "ema": Tier.HOST})]
    )
    assert merged == Placement({"params": Tier.DEVICE, "ema": Tier.HOST})


def test_changes_are_summed_and_incomplete_ones_are_known() -> None:
    one, two = [Changed("grads", Tier.DEVICE, 8)], [Changed("grads", Tier.DEVICE, 4)]
    assert consensus.merge_changes([one, two]) == (Changed("grads", Tier.DEVICE, 12),)
    assert consensus.tells_all_changes([one, two])
    assert not consensus.tells_all_changes([one, []])


@pytest.mark.parametrize(("name", "nbytes"), [("checkpoint.saved", 4), ("reference.swapped", 7)])
def test_notes_of_ranks_become_one_record(name: str, nbytes: int) -> None:
    notes = [((name, {"path": "p", "nbytes": n, "seconds": s}),) for n, s in ((3, 0.5), (4, 0.2))]
    merged = consensus.merge_calls([CallResult(1, notes=notes[0]), CallResult(2, notes=notes[1])])
    assert merged.value == 1  # a checkpoint is one of all ranks, each of which knows its size
    assert merged.notes == ((name, {"path": "p", "nbytes": nbytes, "seconds": 0.5}),)


def test_equal_warnings_are_one_with_their_bytes_summed() -> None:
    found = consensus._merge_notices([Notice("c", "m", 2, 1), Notice("c", "m", 3, 1), Notice("d", "m")])
    assert found == (Notice("c", "m", 5, 2), Notice("d", "m"))


def test_only_ranks_that_went_ahead_alone_are_put_back() -> None:
    ok, failed = Ok(1), Failed(rs.TransitionError("no"))
    assert consensus.to_put_back([ok, ok]) == ()
    assert consensus.to_put_back([failed, failed]) == ()
    assert consensus.to_put_back([ok, failed, ok, Lost("gone")]) == (0, 2)


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([rs.TransitionError("a"), rs.DeviceMemoryError("b")], rs.DeviceMemoryError),
        ([rs.OpenStepError("a"), rs.TransitionError("b")], rs.TransitionError),
        ([rs.OpenStepError("a"), rs.OpenStepError("b")], rs.OpenStepError),
        ([ValueError("a"), ValueError("b")], rs.TransitionError),
        ([rs.DeviceMemoryError("a"), rs.FaultedError("b")], rs.FaultedError),
    ],
)
def test_the_error_of_a_transition_is_that_of_what_failed_worst(errors: list[Exception], kind: type[Exception]) -> None:
    error = consensus.transition_error("entering", [Failed(e) for e in errors], {}, ("mode: offloaded",))
    assert type(error) is kind
    assert len([fact for fact in error.facts if fact.startswith("rank ")]) == 2
    assert "mode: offloaded" in error.facts


# -- leases -----------------------------------------------------------------------------------------------------------


def stamped(handle: int, epoch: int, mode: Mode | None = None) -> Stamp:
    return Stamp(handle, epoch, mode)


def test_a_late_call_of_an_earlier_holder_is_refused() -> None:
    lease = Lease("policy")
    lease.check(stamped(0, 1), Mode.OFFLOADED, "transition")
    lease.release(0, None)
    assert lease.holder == FREE
    grant = lease.acquire(7, "another")
    assert grant.epoch == 2, "what other ranks tell the new holder by"
    lease.check(stamped(7, grant.epoch), Mode.OFFLOADED, "transition")
    with pytest.raises(rs.StaleHandleError):
        lease.check(stamped(0, 1), Mode.OFFLOADED, "transition")


def test_another_rank_learns_of_a_new_holder_from_its_first_call() -> None:
    other_rank = Lease("policy")
    other_rank.check(stamped(7, 2), Mode.OFFLOADED, "transition")
    with pytest.raises(rs.StaleHandleError):
        other_rank.check(stamped(0, 1), Mode.OFFLOADED, "transition")


def test_a_reader_makes_nobody_the_holder() -> None:
    other_rank = Lease("policy")
    other_rank.check(stamped(9, 2, Mode.LOGPROB), Mode.LOGPROB, "get_logprobs")
    other_rank.check(stamped(7, 2), Mode.LOGPROB, "transition")
    with pytest.raises(rs.StaleHandleError):
        other_rank.check(stamped(9, 2, Mode.TRAINING), Mode.LOGPROB, "get_logprobs")


def test_a_rank_that_was_built_anew_gives_no_number_of_weights_again() -> None:
    found = []
    for restarts in (0, 1, 2):
        server = RankServer(0, 1, restarts)
        assert isinstance(server.build(make_plan()), Ok)
        reply = server.serve(Stamp(), "weights_epoch")
        assert isinstance(reply, Ok)
        found.append(reply.value)
    assert [number >> 48 for number in found] == [0, 1, 2]  # a new process counts from the start


# -- devices and names ------------------------------------------------------------------------------------------------


def test_a_remote_device_counts_what_policies_report() -> None:
    device = RemoteDevice(capacity=100)
    device.hold("a", 30)
    device.hold("b", 20)
    assert (device.held_bytes, device.free_bytes()) == (50, 50)
    device.hold("a", 0)
    assert device.held_bytes == 20
    with pytest.raises(rs.UnsupportedError):
        device.synchronize()


@pytest.mark.parametrize("rank", [0, 12])
@pytest.mark.parametrize("policy", ["", "critic", "a+1"])
@pytest.mark.parametrize("restarts", [0, 3])
def test_the_source_of_a_rank_says_which(rank: int, policy: str, restarts: int) -> None:
    assert rank_of(rank_source(rank, policy=policy, restarts=restarts)) == rank


@pytest.mark.parametrize("source", ["driver", "driver:4711", "rank:", "rank:x", "rank:01"])
def test_other_sources_are_no_ranks(source: str) -> None:
    assert rank_of(source) is None


# -- records ----------------------------------------------------------------------------------------------------------


class Elsewhere(FakeWorkers):
    """Ranks whose disk is another one."""

    def start(self, plan: RankPlan, timeout_seconds: float) -> Any:
        assert isinstance(plan.audit, AuditTarget)
        self.folder = Path(plan.audit.path).parent / "other-node"
        plan.audit.path = str(self.folder / Path(plan.audit.path).name)
        return super().start(plan, timeout_seconds)


def test_records_of_ranks_on_other_nodes_are_fetched_at_the_end(make: MakeRig) -> None:
    workers = Elsewhere(2)
    rig = make(workers)
    assert [path.name for path in rig.path.parent.glob("*.rank:*")] == []
    rig.session.close()
    names = sorted(path.name for path in rig.path.parent.glob("*.rank:*"))
    assert names == ["audit0.rank:0.jsonl", "audit0.rank:1.jsonl"]
    shutil.rmtree(workers.folder)
    assert not check(rig.path).findings


def test_records_are_fetched_before_ranks_are_started_anew(make: MakeRig) -> None:
    workers = Elsewhere(2)
    rig = make(workers)
    rig.fake.script(1, "transition", "lost")
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    rig.policy.recover()
    assert (rig.path.parent / "audit0.rank:0.jsonl").exists()
    left = "audit0.rank:1.jsonl"  # nobody is left to ask for it: it has to be copied by hand
    assert not (rig.path.parent / left).exists()
    shutil.copy(workers.folder / left, rig.path.parent / left)


# -- test devices -----------------------------------------------------------------------------------------------------


def test_a_rank_device_is_not_to_be_had_for_a_real_one() -> None:
    server = RankServer(0, 1)
    assert isinstance(server.build(make_plan()), Ok)
    reply = server.serve(Stamp(), "emulated", ("no_such_thing",))
    assert isinstance(reply, Failed)
    assert isinstance(reply.error, rs.ConfigError)


def test_faults_can_be_set_on_one_rank(make: MakeRig) -> None:
    rig = make(FakeWorkers(3))
    rank_device(rig.policy, 2).fail("copy_in", 1, "half")
    with pytest.raises(rs.TransitionError, match="rank 2: TransitionError"), rig.policy.training_mode():
        pass
    rank_device(rig.policy, 2).poison()
    rank_device(rig.policy, 2).delay()
    with rig.policy.training_mode():
        rig.train()
    rank_device(rig.policy, 2).delay(on=False)
    assert rank_device(rig.policy, 2).bytes_in > 0


def test_checksums_of_a_rank_are_those_of_its_bytes_wherever_they_are(make: MakeRig) -> None:
    rig = make(FakeWorkers(2))
    away = rig.counters("checksums")
    assert away[0] == away[1], "the ranks hold copies of one model"
    assert {"embed.weight", "head.weight", "head.bias", "scale"} < away[0].keys()
    with rig.policy.training_mode():
        assert rig.counters("checksums") == away
        rig.train()
        trained = rig.counters("checksums")
        assert {name for name in away[0] if trained[0][name] != away[0][name]} >= {"embed.weight", "head.weight"}
        assert trained[0]["scale"] == away[0]["scale"]
    assert rig.counters("checksums") == trained
