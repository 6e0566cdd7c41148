"""Two that want one policy: one wins, the other waits or is told; they are never inside together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from rig import Make, Rig, make_batch, nll

import rl_session as rs

LIMIT = 20.0
"""Seconds after which a wait is given up; nothing is decided by it."""
ROUNDS = 15


class Meeting:
    """Notes who is inside, and that nobody else ever is."""

    def __init__(self) -> None:
        self._alone = threading.Lock()
        self.met = 0
        self.turns: list[Any] = []

    def __call__(self, who: Any, work: Callable[[], object]) -> None:
        if not self._alone.acquire(blocking=False):
            self.met += 1
            return
        try:
            self.turns.append(who)
            work()
        finally:
            self._alone.release()


def assert_no_interleaving(rig: Rig) -> None:
    """In the log every scope is left before the next one is entered, and every transition ended before another began."""
    scopes = [record.name for record in rig.records("scope.entered", "scope.exited")]
    assert scopes == ["scope.entered", "scope.exited"] * (len(scopes) // 2)
    moves = [r.name for r in rig.records("transition.started", "transition.committed")]
    assert moves == ["transition.started", "transition.committed"] * (len(moves) // 2)


def assert_free(rig: Rig, contents: list[bytes]) -> None:
    control = rig.policy._control
    assert (control.frames, control.ownership.token) == ([], None)
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.on_device() == []
    assert rig.contents() == contents


@pytest.fixture
def rig(make: Make) -> Rig:
    rig = make()
    with rig.policy.training_mode():
        rig.train()
    return rig


def test_of_two_threads_that_race_for_a_policy_one_wins_and_the_other_is_told(rig: Rig) -> None:
    contents = rig.contents()

    def one_round() -> list[str]:
        start, decided = threading.Barrier(2), threading.Event()

        def run(scope: str) -> str:
            start.wait(LIMIT)
            try:
                with getattr(rig.policy, scope)():
                    assert rig.on_device() != []
                    assert decided.wait(LIMIT), "both are inside, or the other was never told"
                    return "won"
            except rs.OwnershipError as error:
                decided.set()
                return error.facts[0]

        with ThreadPoolExecutor(2) as pool:
            return sorted(pool.map(run, ("training_mode", "logprob_mode")))

    for _ in range(ROUNDS):
        told, won = one_round()
        assert won == "won"
        assert told.startswith("owner: thread ")
        assert_free(rig, contents)
    assert_no_interleaving(rig)


def test_threads_that_wait_take_turns_and_never_meet_inside(rig: Rig) -> None:
    meeting, start = Meeting(), threading.Barrier(3)
    scopes = ("training_mode", "logprob_mode", "refit_mode")
    contents = rig.contents()

    def run(scope: str) -> None:
        start.wait(LIMIT)
        for _ in range(ROUNDS):
            with getattr(rig.policy, scope)(acquire_timeout=LIMIT):
                meeting(scope, rig.policy.state_dict)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, scopes))
    assert meeting.met == 0
    assert sorted(meeting.turns) == sorted(scopes * ROUNDS)
    assert_free(rig, contents)
    assert_no_interleaving(rig)


def test_compute_calls_of_threads_beside_the_owner_never_meet_a_move(rig: Rig) -> None:
    """Calls legal in the mode in effect are served from any thread; the others are told so, and none computes on what moves."""
    with rig.policy.logprob_mode():
        expected = rig.policy.get_logprobs(make_batch())["logprobs"]
    stop = threading.Event()
    served = threading.Event()

    def call() -> int:
        count = 0
        while not stop.is_set():
            try:
                found = rig.policy.get_logprobs(make_batch())["logprobs"]
            except rs.ModeError:
                continue
            assert torch.equal(found, expected)
            count += 1
            served.set()
        return count

    with ThreadPoolExecutor(2) as pool:
        callers = [pool.submit(call) for _ in range(2)]
        try:
            for _ in range(ROUNDS):
                with rig.policy.logprob_mode():
                    pass
            with rig.policy.logprob_mode():
                assert served.wait(LIMIT)
        finally:
            stop.set()
        assert sum(caller.result(LIMIT) for caller in callers) >= 1


def test_a_step_of_one_thread_is_not_committed_by_another(rig: Rig) -> None:
    before = rig.contents()
    with rig.policy.training_mode():
        step = rig.policy.begin_step()
        step.forward_backward(make_batch(), nll)
        for act in (step.commit, step.abort, lambda: step.forward_backward(make_batch(2), nll)):
            with ThreadPoolExecutor(1) as pool, pytest.raises(rs.OwnershipError, match="owner: thread 'MainThread'"):
                pool.submit(act).result(LIMIT)
            assert step.state == "open"
        assert step.commit()["loss"].isfinite().all()
    assert rig.contents() != before


def test_of_tasks_that_race_one_wins_and_the_others_are_told_or_wait(rig: Rig) -> None:
    meeting, contents = Meeting(), rig.contents()

    async def enter(scope: str, patience: float | None) -> str:
        try:
            async with getattr(rig.policy, scope)(acquire_timeout=patience):
                await asyncio.to_thread(meeting, scope, rig.on_device)
                return "inside"
        except rs.OwnershipError as error:
            return error.facts[0].split(" ")[1]

    async def race(patience: float | None) -> list[str]:
        return list(await asyncio.gather(*(enter(s, patience) for s in ("training_mode", "logprob_mode", "offloaded"))))

    assert sorted(asyncio.run(race(None))) == ["inside", "task", "task"]
    assert_free(rig, contents)
    assert asyncio.run(race(LIMIT)) == ["inside"] * 3
    assert_free(rig, contents)
    assert meeting.met == 0
    assert len(meeting.turns) == 4
    assert_no_interleaving(rig)


def test_a_thread_and_a_task_that_race_do_not_share_the_policy(rig: Rig) -> None:
    inside, leave = threading.Event(), threading.Event()

    def owner() -> None:
        with rig.policy.training_mode():
            inside.set()
            assert leave.wait(LIMIT)

    async def task() -> str:
        with pytest.raises(rs.OwnershipError, match="owner: thread"):
            async with rig.policy.logprob_mode():
                pytest.fail("both are inside")
        leave.set()
        async with rig.policy.logprob_mode(acquire_timeout=LIMIT):
            return str(rig.policy.mode)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(owner)
        assert inside.wait(LIMIT)
        assert asyncio.run(task()) == "logprob"
        running.result(LIMIT)
    assert_no_interleaving(rig)


def test_switches_of_threads_are_made_one_after_the_other(rig: Rig) -> None:
    start, contents = threading.Barrier(2), rig.contents()

    def run(mode: str) -> int:
        start.wait(LIMIT)
        made = 0
        for _ in range(ROUNDS):
            try:
                rig.policy.switch(mode)
                made += 1
            except rs.OwnershipError as error:
                assert "owner: thread" in error.facts[0]
        return made

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(run, ("resident", "offloaded")))
    assert max(made) >= 1
    rig.policy.offload()
    assert_free(rig, contents)
    assert_no_interleaving(rig)
