"""One owner at a time: threads, tasks and processes; ``async with``, cancellation, and what the event loop may do meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rl_session as rs

SCOPES = ["training", "logprob", "refit", "generation", "offloaded"]
LIMIT = 60


class Held:
    """A device operation that stays open until it is told to go on."""

    def __init__(self, rig: Any, operation: str) -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        real = getattr(rig.device, operation)

        def held(*args: Any) -> None:
            delattr(rig.device, operation)
            self.started.set()
            assert self.go.wait(LIMIT)
            real(*args)

        setattr(rig.device, operation, held)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine; an event that never comes fails the test."""

    async def limited() -> Any:
        return await asyncio.wait_for(main, LIMIT)

    return asyncio.run(limited())


async def ticks(num: int = 5) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def in_thread(work: Callable[[], Any], name: str = "other") -> Future[Any]:
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


# -- threads -----------------------------------------------------------------------------------------------------------


def test_a_second_thread_is_refused_at_once_and_told_who_has_it(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        inside = rig.state()[:-3]
        for act in (
            lambda: rig.policy.logprob_mode().__enter__(),
            lambda: rig.policy.switch("resident"),
            rig.policy.begin_step,
        ):
            with pytest.raises(rs.OwnershipError) as caught:
                in_thread(act).result(LIMIT)
            text = str(caught.value)
            assert "owner: thread 'MainThread' (entered at test_owners.py:" in text
            assert "you: thread 'other" in text
            assert "acquire_timeout" in caught.value.remedy
        assert rig.state()[:-3] == inside
        rig.train()
        in_thread(rig.train).result(LIMIT)  # a compute call, train included, is served from any thread


def test_a_second_thread_is_refused_while_a_move_is_under_way(make: Callable[..., Any]) -> None:
    rig = make()
    for act in (lambda: rig.policy.switch("resident"), lambda: rig.policy.training_mode().__enter__()):
        held = Held(rig, "copy_in")
        future = in_thread(act)
        assert held.started.wait(LIMIT)
        with pytest.raises(rs.OwnershipError, match="owner: thread 'other"):
            rig.policy.logprob_mode().__enter__()
        with pytest.raises(rs.OwnershipError, match="owner: thread 'other"):
            rig.policy.switch("logprob")
        held.go.set()
        future.result(LIMIT)
        del future
        gc.collect()
        rig.policy.offload()
    assert rig.policy._control.ownership._token is None


def test_a_second_thread_waits_as_long_as_it_says(make: Callable[..., Any]) -> None:
    rig = make()
    waiting = threading.Event()
    changed = rig.policy._control.ownership._changed
    real = changed.wait

    def wait(timeout: float) -> bool:
        waiting.set()
        woken: bool = real(timeout)
        return woken

    changed.wait = wait

    def other() -> rs.Mode:
        with rig.policy.logprob_mode(acquire_timeout=LIMIT):
            mode: rs.Mode = rig.policy.mode
            return mode

    with rig.policy.training_mode():
        future = in_thread(other)
        assert waiting.wait(LIMIT)
        assert rig.policy.mode is rs.Mode.TRAINING
        rig.train()
    assert future.result(LIMIT) is rs.Mode.LOGPROB
    with rig.policy.training_mode():

        def impatient() -> None:
            with rig.policy.logprob_mode(acquire_timeout=0.01):
                pytest.fail("entered")

        with pytest.raises(rs.OwnershipError, match=r"waited 0.01 s"):
            in_thread(impatient).result(LIMIT)
    assert str(rig.policy.mode) == "offloaded"


def test_a_compute_call_is_served_from_any_thread_one_after_the_other(make: Callable[..., Any]) -> None:
    rig = make()
    worker = rig.policy._control.group.worker
    alone = threading.Lock()
    real = worker.get_logprobs

    def get_logprobs(*args: Any) -> Any:
        assert alone.acquire(blocking=False), "two calls at once"
        try:
            return real(*args)
        finally:
            alone.release()

    worker.get_logprobs = get_logprobs
    with rig.policy.logprob_mode():
        expected = rig.policy.get_logprobs(rig.batch)["logprobs"]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: rig.policy.get_logprobs(rig.batch)["logprobs"], range(12)))
    assert all(torch.equal(result, expected) for result in results)
    with rig.policy.refit_mode(), pytest.raises(rs.ModeError):
        in_thread(lambda: rig.policy.get_logprobs(rig.batch)).result(LIMIT)


def test_a_forked_child_is_refused(make: Callable[..., Any]) -> None:
    rig = make()
    policy = rig.policy
    acts: list[Callable[[], Any]] = [
        lambda: policy.training_mode().__enter__(),
        lambda: policy.switch("resident"),
        lambda: policy.get_logprobs(rig.batch),
        policy.state_dict,
        policy.begin_step,
    ]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        outcomes = []
        for act in acts:
            try:
                act()
                outcomes.append("nothing")
            except BaseException as error:
                outcomes.append(type(error).__name__)
        os.write(writer, " ".join(outcomes).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 1000).decode().split() == ["OwnershipError"] * len(acts)
    os.close(reader)


# -- tasks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["offloaded", "resident"])
@pytest.mark.parametrize("name", SCOPES)
def test_every_scope_works_with_async_with_and_leaves_flags_and_autograd_alone(
    name: str, base: str, make: Callable[..., Any]
) -> None:
    rig = make(base=base)
    before = rig.state()

    async def main() -> None:
        async with rig.scope(name) as handle:
            assert rig.policy.mode == name
            assert rig.flags() == before[4]
            assert torch.is_grad_enabled()
            assert rig.contents() == before[3]
            assert handle.state_dict().keys() == rig.policy.state_dict().keys()
        assert rig.state() == before
        with pytest.raises(ValueError, match="mine"):
            async with rig.scope(name):
                raise ValueError("mine")

    run(main())
    assert rig.state() == before


def test_blocking_calls_inside_an_async_scope_run_in_threads(make: Callable[..., Any]) -> None:
    rig, twin = make(), make()
    with twin.policy.training_mode():
        expected = twin.train()

    async def main() -> dict[str, Any]:
        async with rig.policy.training_mode():
            async with rig.policy.logprob_mode():
                await asyncio.to_thread(rig.policy.get_logprobs, rig.batch)
            return await asyncio.to_thread(rig.policy.train, rig.batch, rig.loss)

    assert torch.equal(run(main())["loss"], expected["loss"])
    assert rig.contents() == twin.contents()


def test_a_sync_scope_in_a_thread_may_nest_in_the_async_one_around_it(make: Callable[..., Any]) -> None:
    rig = make()

    def inner() -> str:
        with rig.policy.logprob_mode():
            return str(rig.policy.mode)

    async def main() -> None:
        async with rig.policy.training_mode():
            assert await asyncio.to_thread(inner) == "logprob"
            assert rig.policy.mode == "training"

    run(main())


def test_of_two_tasks_one_is_refused_by_name_or_waits(make: Callable[..., Any]) -> None:
    rig = make()

    async def main() -> None:
        inside, leave = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            async with rig.policy.training_mode():
                inside.set()
                await leave.wait()

        owner = asyncio.create_task(first(), name="the trainer")
        await inside.wait()
        with pytest.raises(rs.OwnershipError, match="owner: task 'the trainer'"):
            async with rig.policy.logprob_mode():
                pytest.fail("entered")
        with pytest.raises(rs.OwnershipError, match="owner: task 'the trainer'"):
            rig.policy.begin_step()

        async def second() -> None:
            async with rig.policy.logprob_mode(acquire_timeout=LIMIT):
                assert rig.policy.mode == "logprob"

        waiter = asyncio.create_task(second())
        await ticks()
        assert rig.policy.mode == "training"
        leave.set()
        await asyncio.gather(owner, waiter)

    run(main())
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.policy._control.ownership._token is None


def test_two_tasks_that_race_for_entry_do_not_share_it(make: Callable[..., Any]) -> None:
    rig = make()

    async def main() -> None:
        held = Held(rig, "copy_in")

        async def enter() -> str:
            async with rig.policy.training_mode():
                return str(rig.policy.mode)

        first, second = asyncio.create_task(enter()), asyncio.create_task(enter())
        await asyncio.to_thread(held.started.wait, LIMIT)
        await asyncio.wait([second])
        assert isinstance(second.exception(), rs.OwnershipError)
        held.go.set()
        assert await first == "training"

    run(main())


def test_a_child_task_inherits_the_context_and_not_the_ownership(make: Callable[..., Any]) -> None:
    rig = make()

    async def child() -> None:
        async with rig.policy.logprob_mode():
            pytest.fail("entered")

    async def main() -> None:
        async with rig.policy.training_mode():
            with pytest.raises(rs.OwnershipError):
                await asyncio.create_task(child())
            async with rig.policy.logprob_mode():
                pass
        # The token that the context still finds is over: it makes nobody an owner.
        await asyncio.create_task(_enter_and_leave(rig))
        await _enter_and_leave(rig)

    run(main())


async def _enter_and_leave(rig: Any) -> None:
    async with rig.policy.training_mode():
        assert rig.policy.mode == "training"


def test_the_event_loop_goes_on_while_bytes_move(make: Callable[..., Any]) -> None:
    rig = make()

    async def main() -> None:
        for operation, move in (("copy_in", "entry"), ("copy_out", "exit")):
            scope = rig.policy.training_mode()
            if move == "exit":
                await scope.__aenter__()
            held = Held(rig, operation)
            work: Awaitable[Any] = scope.__aenter__() if move == "entry" else scope.__aexit__(None, None, None)
            task = asyncio.ensure_future(work)
            await asyncio.to_thread(held.started.wait, LIMIT)
            await ticks(100)
            assert not task.done()
            held.go.set()
            await task
            if move == "entry":
                await scope.__aexit__(None, None, None)

    run(main())
    assert rig.policy.mode is rs.Mode.OFFLOADED


@pytest.mark.parametrize("times", [1, 3])
def test_cancelling_an_entry_waits_for_the_move_undoes_it_and_propagates(times: int, make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()

    async def main() -> None:
        held = Held(rig, "copy_in")
        task = asyncio.create_task(_enter_and_leave(rig))
        await asyncio.to_thread(held.started.wait, LIMIT)
        for _ in range(times):
            task.cancel()
            await ticks()
        assert not task.done(), "it waits for the move"
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run(main())
    assert rig.state() == before
    assert [r.name for r in rig.records("scope.entered", "scope.exited")[-2:]] == ["scope.entered", "scope.exited"]
    run(_enter_and_leave(rig))


def test_cancelling_an_entry_that_fails_propagates_with_the_failure_as_a_note(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()

    async def main() -> None:
        held = Held(rig, "copy_in")
        rig.device.fail("copy_in", k=2, point="half")
        task = asyncio.create_task(_enter_and_leave(rig))
        await asyncio.to_thread(held.started.wait, LIMIT)
        task.cancel()
        await ticks()
        held.go.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__cause__, rs.TransitionError)
        assert "injected" in caught.value.__notes__[0]

    run(main())
    assert rig.state() == before


def test_when_undoing_a_cancelled_entry_fails_the_cancellation_still_propagates(make: Callable[..., Any]) -> None:
    rig = make()

    async def main() -> None:
        held = Held(rig, "copy_in")
        rig.device.fail("copy_out")
        task = asyncio.create_task(_enter_and_leave(rig))
        await asyncio.to_thread(held.started.wait, LIMIT)
        task.cancel()
        await ticks()
        held.go.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert "and while leaving training_mode()" in caught.value.__notes__[0]

    run(main())
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.policy._control.frames == []
    run(_enter_and_leave(rig))


def test_cancelling_an_exit_finishes_it(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()

    async def main() -> None:
        held = Held(rig, "copy_out")
        task = asyncio.create_task(_enter_and_leave(rig))
        await asyncio.to_thread(held.started.wait, LIMIT)
        task.cancel()
        await ticks()
        assert not task.done()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert rig.state() == before


def test_cancelling_the_block_leaves_the_scope(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()

    async def main() -> None:
        inside = asyncio.Event()

        async def forever() -> None:
            async with rig.policy.training_mode():
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(forever())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert rig.state() == before
    assert rig.records()[-1].event.error.startswith("CancelledError")


def test_cancelling_a_task_that_waits_for_the_owner_changes_nothing(make: Callable[..., Any]) -> None:
    rig = make()

    async def main() -> None:
        async with rig.policy.training_mode():
            scope = rig.policy.logprob_mode(acquire_timeout=LIMIT)

            async def waits() -> None:
                async with scope:
                    pytest.fail("entered")

            task = asyncio.create_task(waits())
            await ticks()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert "failed to enter" in repr(scope)
            assert rig.policy.mode == "training"
            await asyncio.to_thread(rig.train)

    run(main())
    assert rig.policy.mode is rs.Mode.OFFLOADED


def test_an_async_entry_that_fails_gives_the_ownership_back(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()

    async def main() -> None:
        rig.device.fail("copy_in", k=2)
        with pytest.raises(rs.TransitionError):
            await _enter_and_leave(rig)
        assert rig.state() == before
        await asyncio.create_task(_enter_and_leave(rig))

    run(main())
    assert rig.state() == before


def test_a_scope_lost_by_one_task_stands_in_no_other_tasks_way(make: Callable[..., Any]) -> None:
    rig = make()

    async def loses() -> None:
        await rig.policy.training_mode().__aenter__()

    async def main() -> None:
        await asyncio.create_task(loses())
        gc.collect()
        await asyncio.create_task(_enter_and_leave(rig))

    run(main())
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert [r.event.code for r in rig.records("warning")].count("orphaned_scope") == 1


def test_an_error_of_the_body_wins_over_one_on_an_async_way_out(make: Callable[..., Any]) -> None:
    rig = make()

    async def main() -> None:
        error = ValueError("mine")
        with pytest.raises(ValueError, match="mine") as caught:
            async with rig.policy.training_mode():
                rig.device.fail("copy_out")
                raise error
        assert caught.value is error
        assert "and while leaving" in error.__notes__[0]
        with pytest.raises(rs.TransitionError):
            async with rig.policy.training_mode():
                rig.device.fail("copy_out")

    run(main())
