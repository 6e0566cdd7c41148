"""Real processes: workers that die at every point, run out of memory or stop answering, on one shared Ray cluster."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import ERRORS, OPERATIONS, POINTS, SCOPES, cases, faults
from rank_rig import Rig, Tiny, make_optimizer, nll
from torch import Tensor

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.testing import EmulatedDevice, rank_device

HOST = {"params": "host", "buffers": "host", "grads": "none", "optimizer": "host", "reference": "none"}
DEVICE = {**HOST, "params": "device", "buffers": "device", "optimizer": "device"}
TIMEOUT_SECONDS = 30.0

pytestmark = pytest.mark.slow


class RayRig(Rig):
    """A policy on Ray actors."""

    def pids(self) -> list[int]:
        return [self.pid(rank) for rank in range(self.group.num_ranks)]

    def pid(self, rank: int) -> int:
        import ray

        found: int = ray.get(self.group.actors[rank].pid.remote())
        return found

    def kill(self, rank: int) -> None:
        """``kill -9``, and wait until the process is gone."""
        pid = self.pid(rank)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def make_ray_rig(path: Path, num_workers: int, **options: Any) -> RayRig:
    session = rs.Session(path, verify="checksum")
    workers = rs.RayWorkers(num_workers, resources={"CPU": 0.5}, timeout_seconds=TIMEOUT_SECONDS, parallelize=None)
    policy = session.policy(
        "actor", model=Tiny, optimizer=make_optimizer, workers=workers, device=EmulatedDevice(), **options
    )
    rig = RayRig(session, policy, path)
    with policy.training_mode():
        rig.train()
    return rig


@pytest.fixture(scope="module")
def shared(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRig]:
    """Two ranks for all tests that leave them healthy: starting processes takes most of the time."""
    rig = make_ray_rig(tmp_path_factory.mktemp("ray") / "run.jsonl", 2)
    yield rig
    pids = rig.pids()
    workers = rig.group._workers
    rig.session.close()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    import ray

    table = ray.util.placement_group_table(workers.placement_group)
    assert table["state"] == "REMOVED"
    assert_log_is_consistent(rig.path)


@pytest.fixture
def rig(shared: RayRig) -> Iterator[RayRig]:
    """The shared ranks, healthy and at rest before and after."""
    assert (shared.policy.health, shared.policy.mode) == ("ok", "offloaded")
    yield shared
    assert (shared.policy.health, shared.policy.mode) == ("ok", "offloaded")
    assert shared.placements() == [HOST, HOST]


def expect_recovery(rig: RayRig, origin: str, expected: dict[str, Tensor]) -> None:
    """The policy is faulted, says so, and serves again after ``recover()`` with the weights it had."""
    assert rig.policy.health == "faulted"
    with pytest.raises(rs.FaultedError, match=r"recover\(\)"):
        rig.policy.get_logprobs(rig.batch)
    rig.policy.recover()
    assert rig.records("policy.recovered")[-1].event.origin == origin
    found = rig.policy.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with rig.policy.training_mode():
        assert rig.placements() == [DEVICE, DEVICE]
        assert rig.train()["loss"].isfinite().all()


# -- healthy --------------------------------------------------------------------------------------------------------


def test_ranks_train_as_one_process_does(rig: RayRig) -> None:
    model = Tiny()
    model.load_state_dict(rig.policy.state_dict())
    alone = rs.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with alone.logprob_mode(), rig.policy.logprob_mode():
        expected = alone.get_logprobs(rig.batch)["logprobs"]
        assert torch.equal(rig.policy.get_logprobs(rig.batch)["logprobs"], expected)
    alone.close()


def test_each_rank_moves_and_their_devices_count_what_the_log_says(rig: RayRig) -> None:
    before = rig.counters("bytes_in"), rig.counters("bytes_out")
    with rig.policy.training_mode():
        assert rig.placements() == [DEVICE, DEVICE]
    after = rig.counters("bytes_in"), rig.counters("bytes_out")
    way_in, way_out = rig.records("transition.committed")[-2:]
    assert way_in.event.bytes_moved == sum(after[0]) - sum(before[0])
    assert way_out.event.bytes_moved == sum(after[1]) - sum(before[1])


def test_every_source_is_gapless(rig: RayRig) -> None:
    seen: dict[str, list[int]] = {}
    for record in rig.records():
        seen.setdefault(record.source, []).append(record.seq)
    assert {"driver", "rank:0", "rank:1"} <= seen.keys()
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())


def test_an_error_of_the_loss_arrives_with_its_traceback(rig: RayRig) -> None:
    def bad_loss(*_: Any) -> Any:
        raise ZeroDivisionError("advantages")

    with rig.policy.training_mode():
        with pytest.raises(ZeroDivisionError) as caught:
            rig.policy.train(rig.batch, bad_loss)
    assert any("in bad_loss" in note for note in caught.value.__notes__)


def test_what_cannot_be_sent_is_said_before_anything_happens(rig: RayRig) -> None:
    import threading

    lock = threading.Lock()
    with rig.policy.training_mode():
        with pytest.raises(rs.UnsupportedError, match="cannot be sent"):
            rig.policy.train(rig.batch, lambda *_: lock)
        rig.train()


def test_no_room_on_one_rank_holds_all_back_until_there_is(rig: RayRig) -> None:
    device = rank_device(rig.policy, 1)
    device.set_capacity(100)
    with pytest.raises(rs.DeviceMemoryError) as caught, rig.policy.training_mode():
        pass
    assert rig.placements() == [HOST, HOST]
    assert rig.counters("resident_bytes") == [0, 0]
    assert "rank 0: ok, was put back" in str(caught.value)
    device.set_capacity(None)
    with rig.policy.training_mode():
        assert rig.placements() == [DEVICE, DEVICE]


def test_policies_can_share_bundles(rig: RayRig) -> None:
    workers = rs.RayWorkers(1, placement=rig.group._workers)
    with rig.session.value_model("critic", model=Tiny, workers=workers, device="cpu").inference_mode():
        pass
    critic = next(p for p in rig.session._participants if p.name == "critic")
    assert critic.device is rig.policy.device
    critic.close()
    assert critic.health == "closed"
    import ray

    assert ray.util.placement_group_table(rig.group._workers.placement_group)["state"] == "CREATED"


# -- dying ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_died_before_a_transition(rig: RayRig) -> None:
    expected = rig.policy.state_dict()
    rig.kill(1)
    start = time.monotonic()
    with pytest.raises(rs.FaultedError) as caught, rig.policy.training_mode():
        pass
    assert time.monotonic() - start < TIMEOUT_SECONDS
    assert "rank 0: ok, was put back" in str(caught.value)
    assert "rank 1: lost" in str(caught.value)
    assert rig.group.call_on([0], "placement")[0].value.as_text() == HOST
    expect_recovery(rig, "host copies of rank 0", expected)


@pytest.mark.parametrize(("operation", "point"), [("copy_in", "half"), ("synchronize", "after")])
def test_a_rank_that_dies_in_a_transition(rig: RayRig, operation: Any, point: Any) -> None:
    expected = rig.policy.state_dict()
    rank_device(rig.policy, 0).die(operation, 1, point)
    with pytest.raises(rs.FaultedError, match="rank 0: lost"), rig.policy.training_mode():
        pass
    assert rig.records("worker.lost")[-1].event.rank == 0
    assert rig.group.call_on([1], "placement")[1].value.as_text() == HOST
    expect_recovery(rig, "host copies of rank 1", expected)


def test_row_69_a_rank_that_dies_is_named_and_the_others_are_in_a_known_state(rig: RayRig) -> None:
    """Others: a dead actor keeps the loop waiting, or its memory, and nobody tells the driver.

    Here: the error comes in bounded time and names the rank; the survivor was put back, and `recover()` starts anew from it.
    By: a lost rank is a reply too, found out by its deadline or its death (`workers/ray_group`).
    """
    with pytest.raises(rs.FaultedError, match="rank 1: lost"):
        with rig.policy.training_mode():
            rig.train()
            expected = rig.policy.state_dict()
            there = rank_device(rig.policy, 0).checksums
            rig.kill(1)
    assert rig.records("worker.lost")[-1].event.rank == 1
    assert rig.group.call_on([0], "placement")[0].value.as_text() == DEVICE
    assert rank_device(rig.policy, 0).checksums == there
    expect_recovery(rig, "host copies of rank 0", expected)


def test_a_rank_that_dies_in_train(rig: RayRig) -> None:
    def deadly(logits: Tensor, *rest: Any) -> Any:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("and the other one fails")

    expected = rig.policy.state_dict()
    with pytest.raises(rs.FaultedError, match="rank 0: lost"):
        with rig.policy.training_mode():
            rig.policy.train(rig.batch, deadly)
    expect_recovery(rig, "host copies of rank 1", expected)


def test_a_rank_that_dies_inside_a_collective(rig: RayRig) -> None:
    def deadly(logits: Tensor, *rest: Any) -> Any:
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(3))
        return nll(logits, *rest)

    expected = rig.policy.state_dict()
    start = time.monotonic()
    with pytest.raises(rs.FaultedError, match="rank 1: lost"):
        with rig.policy.training_mode():
            rig.policy.train(rig.batch, deadly)
    assert time.monotonic() - start < TIMEOUT_SECONDS
    expect_recovery(rig, "host copies of rank 0", expected)


def test_a_rank_past_the_deadline_is_killed(rig: RayRig) -> None:
    expected = rig.policy.state_dict()
    pid = rig.pid(1)
    rig.group.timeout_seconds = 2.0
    rank_device(rig.policy, 1).stall("copy_in", 1, "half")
    with pytest.raises(rs.FaultedError, match="did not answer transition"), rig.policy.training_mode():
        pass
    wait_until(lambda: not is_alive(pid))
    rig.group.timeout_seconds = TIMEOUT_SECONDS
    assert rig.group.call_on([0], "placement")[0].value.as_text() == HOST
    expect_recovery(rig, "host copies of rank 0", expected)


def test_the_last_checkpoint_is_taken_where_nobody_survived(rig: RayRig, tmp_path: Path) -> None:
    rig.policy.save_checkpoint(tmp_path / "ck")
    expected = rig.policy.state_dict()
    with rig.policy.training_mode():
        rig.train()
    rig.kill(0)
    rig.kill(1)
    with pytest.raises(rs.FaultedError), rig.policy.training_mode():
        pass
    expect_recovery(rig, f"checkpoint {tmp_path / 'ck'}", expected)


def contents(rig: RayRig) -> list[dict[str, int]]:
    """Checksums that each rank takes of its own storages, wherever their bytes are."""
    found = rig.counters("checksums")
    assert all(len(each) >= 6 for each in found), "weights, a buffer and moments on each rank"
    return found


def test_row_68_a_rank_that_fails_is_heard_of_when_the_scope_ends(rig: RayRig) -> None:
    """Others: a remote offload is started and never waited for, so that its failure is never seen.

    Here: an actor that fails in the way out is the error of the `with` block, with its rank; the release is made up for.
    By: every call waits for one reply a rank, and a failure is a reply (`workers/group`, `driver/ranks`).
    """
    before = contents(rig)
    with pytest.raises(rs.TransitionError, match="rank 1") as raised, rig.policy.training_mode():
        rank_device(rig.policy, 1).fail("copy_out", 1, "half")
    assert "injected" in str(raised.value)
    assert [n > 0 for n in rig.counters("resident_bytes")] == [True, True], "the one that could was put back"
    with rig.policy.logprob_mode():
        pass
    assert rig.counters("resident_bytes") == [0, 0]
    assert contents(rig) == before


def test_a_failure_in_any_operation_of_one_rank_is_undone_on_both(rig: RayRig) -> None:
    policy, fired, moving = rig.policy, set(), set()
    before = contents(rig)
    for number, (name, prepare, make_it) in enumerate(cases()):
        for rank, operation, point, kind, k in faults(number):
            device = rank_device(policy, rank)
            with ExitStack() as outer:
                prepare(policy, outer)
                mode, placements = policy.mode, rig.placements()
                with ExitStack() as inner:
                    device.fail(operation, k, point, ERRORS[kind])  # type: ignore[arg-type]
                    try:
                        make_it(policy, inner)
                    except rs.RLSessionError as error:
                        fired.add((name, operation, point, kind))
                        assert f"rank {rank}: " in str(error)
                        assert (policy.mode, policy.health) == (mode, "ok")
                        assert rig.placements() == placements
                        make_it(policy, inner)
                    device.heal()
                    if rig.placements() != placements:
                        moving.add(name)
                    assert contents(rig) == before, (name, rank, operation, point, kind, k)
            policy.offload()
    assert {name for name, *_ in fired} == moving
    assert len(moving) >= 10
    assert {(operation, point) for _, operation, point, _ in fired} == set(itertools.product(OPERATIONS, POINTS))
    assert {kind for *_, kind in fired} == set(ERRORS)


def test_a_failure_in_any_operation_of_a_way_out_is_made_up_for_on_both(rig: RayRig) -> None:
    policy, num_fired = rig.policy, 0
    before = contents(rig)
    for number, scope in enumerate(SCOPES[:3]):
        for rank, operation, point, kind, k in faults(number):
            device = rank_device(policy, rank)
            block = getattr(policy, scope)()
            block.__enter__()
            device.fail(operation, k, point, ERRORS[kind])  # type: ignore[arg-type]
            try:
                block.__exit__(None, None, None)
            except rs.RLSessionError as error:
                num_fired += 1
                assert f"rank {rank}: " in str(error)
            device.heal()
            assert (policy.mode, policy.health) == ("offloaded", "ok")
            with getattr(policy, scope)():
                assert contents(rig) == before
            assert rig.counters("resident_bytes") == [0, 0]
    assert num_fired >= 5


# -- four ranks, and the end -----------------------------------------------------------------------------------------


def test_out_of_memory_on_one_of_four(cluster: None, tmp_path: Path) -> None:
    rig = make_ray_rig(tmp_path / "four.jsonl", 4)
    before = [rig.counters(name) for name in ("resident_bytes", "held_bytes")]
    rank_device(rig.policy, 1).set_capacity(100)
    with pytest.raises(rs.DeviceMemoryError) as caught, rig.policy.training_mode():
        pass
    assert rig.placements() == [HOST] * 4
    assert [rig.counters(name) for name in ("resident_bytes", "held_bytes")] == before
    assert str(caught.value).count("was put back") == 3
    rank_device(rig.policy, 1).set_capacity(None)
    with rig.policy.training_mode():
        assert rig.placements() == [DEVICE] * 4
        rig.train()
    pids = rig.pids()
    rig.session.close()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_no_room_in_the_cluster_is_said_in_time_and_leaves_nothing(cluster: None, tmp_path: Path) -> None:
    import ray

    def groups() -> int:
        return sum(table["state"] != "REMOVED" for table in ray.util.placement_group_table().values())

    before = groups()
    with rs.Session(tmp_path / "run.jsonl") as session:
        with pytest.raises(rs.WorkerError, match="no room in the cluster"):
            session.policy(model=Tiny, workers=rs.RayWorkers(2, resources={"CPU": 1000}, timeout_seconds=1))
    wait_until(lambda: groups() == before)


def test_a_worker_that_cannot_be_built_leaves_nothing(cluster: None, tmp_path: Path) -> None:
    def broken() -> torch.nn.Module:
        raise OSError(f"no weights; this is process {os.getpid()}")

    workers = rs.RayWorkers(1, resources={"CPU": 0.5})
    with rs.Session(tmp_path / "run.jsonl") as session:
        with pytest.raises(rs.WorkerError, match="no weights") as caught:
            session.policy(model=broken, workers=workers)
    pid = int(str(caught.value).split("process ")[1].split()[0])
    wait_until(lambda: not is_alive(pid))
    import ray

    assert ray.util.placement_group_table(workers.placement_group)["state"] == "REMOVED"


def test_a_program_that_just_ends_leaves_no_process(tmp_path: Path) -> None:
    script = """
        import torch, ray, os
        import rl_session as rs
        session = rs.Session()
        workers = rs.RayWorkers(1, resources={"CPU": 0.5})
        policy = session.policy(model=lambda: torch.nn.Embedding(3, 4), workers=workers, device="cpu")
        print("pid", ray.get(policy._control.group.actors[0].pid.remote()), flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    pid = int(done.stdout.split("pid ")[1].split()[0])
    wait_until(lambda: not is_alive(pid))
