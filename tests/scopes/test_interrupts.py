"""Ctrl-C: it waits for the end of a move, and a scope that it orphans is closed at the next call."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rl_session as rs


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    """The handler that raises KeyboardInterrupt, before each test and after it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "a deferral was not taken back"
    signal.signal(signal.SIGINT, before)


def strike_in(rig: Any, operation: str) -> list[str]:
    """Send SIGINT to this process in the middle of the next device operation of that name."""
    real = getattr(rig.device, operation)
    struck: list[str] = []

    def interrupted(*args: Any) -> None:
        delattr(rig.device, operation)
        os.kill(os.getpid(), signal.SIGINT)
        struck.append("before the copy")
        real(*args)
        struck.append("after the copy")

    setattr(rig.device, operation, interrupted)
    return struck


@pytest.mark.parametrize("name", ["training", "logprob", "refit", "generation"])
def test_an_interrupt_during_entry_waits_for_the_move_and_leaves_the_scope_again(
    name: str, make: Callable[..., Any]
) -> None:
    rig = make()
    before = rig.state()
    struck = strike_in(rig, "copy_in")
    scope = rig.scope(name)
    with pytest.raises(KeyboardInterrupt), scope:
        pytest.fail("the block ran")
    assert struck == ["before the copy", "after the copy"]
    assert "exited" in repr(scope)
    assert rig.state() == before
    assert [r.name for r in rig.records("scope.entered", "scope.exited")[-2:]] == ["scope.entered", "scope.exited"]
    assert rig.records("transition.committed")[-2].event.to_mode == name


@pytest.mark.parametrize("name", ["training", "logprob", "refit", "generation"])
def test_an_interrupt_during_exit_waits_for_the_move(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    with pytest.raises(KeyboardInterrupt), rig.scope(name):
        struck = strike_in(rig, "free")
    assert struck == ["before the copy", "after the copy"]
    assert rig.state() == before
    assert rig.records()[-1].name == "scope.exited"


def test_an_interrupt_during_exit_keeps_the_error_of_the_body_as_context(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    error = ValueError("mine")
    with pytest.raises(KeyboardInterrupt) as caught, rig.policy.training_mode():
        strike_in(rig, "free")
        raise error
    assert caught.value.__context__ is error
    assert rig.state() == before


def test_an_interrupt_and_a_failure_at_once_leave_the_state_of_the_failure(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    strike_in(rig, "copy_in")
    rig.device.fail("copy_in", k=2, point="half")
    with pytest.raises(KeyboardInterrupt) as caught, rig.policy.training_mode():
        pytest.fail("the block ran")
    assert isinstance(caught.value.__context__, rs.TransitionError)
    assert rig.state() == before


def test_a_handler_that_does_not_raise_lets_the_block_run(make: Callable[..., Any]) -> None:
    rig = make()
    noticed: list[bool] = []
    signal.signal(signal.SIGINT, lambda *_: noticed.append(rig.device._resident != {}))
    try:
        strike_in(rig, "copy_in")
        with rig.policy.training_mode():
            assert noticed == [True], "it was called when the move had ended"
            assert rig.policy.mode is rs.Mode.TRAINING
            assert rig.seen()["params"] == "device"
        assert rig.seen()["params"] == "host"
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("name", ["switch", "close", "recover"])
def test_other_moves_end_before_the_interrupt_too(name: str, make: Callable[..., Any]) -> None:
    rig = make()
    contents = rig.contents()
    if name == "recover":
        rig.device.fail("copy_in", k=3)
        rig.device.fail("free", k=1)
        with pytest.raises(rs.FaultedError), rig.policy.training_mode():
            pytest.fail("the block ran")
    struck = strike_in(rig, "copy_out" if name == "recover" else "copy_in")
    with pytest.raises(KeyboardInterrupt):
        rig.policy.switch("resident") if name == "switch" else getattr(rig.policy, name)()
    assert struck[-1] == "after the copy"
    if name == "close":
        assert rig.policy.health == "closed"
        assert rig.seen()["params"] == "device"
        return
    assert rig.policy.mode is rig.policy.resting_mode is rs.Mode("resident" if name == "switch" else "offloaded")
    assert rig.contents() == contents
    with rig.policy.training_mode():
        rig.train()


def test_waiting_for_another_owner_can_be_interrupted(make: Callable[..., Any]) -> None:
    rig = make()
    inside, leave = threading.Event(), threading.Event()

    def owner() -> None:
        with rig.policy.training_mode():
            inside.set()
            assert leave.wait(30)

    thread = threading.Thread(target=owner)
    thread.start()
    assert inside.wait(30)
    changed = rig.policy._control.ownership._changed
    real = changed.wait

    def wait(timeout: float) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        woken: bool = real(timeout)
        return woken

    changed.wait = wait
    with pytest.raises(KeyboardInterrupt), rig.policy.training_mode(acquire_timeout=120):
        pytest.fail("the block ran")
    changed.wait = real
    leave.set()
    thread.join(30)
    with rig.policy.training_mode():
        rig.train()


# -- orphans -----------------------------------------------------------------------------------------------------------


def lose(scope: Any) -> None:
    """Enter a scope and drop it, as an interrupt between entry and the block does."""
    scope.__enter__()


def refused(rig: Any) -> None:
    with pytest.raises(rs.ModeError):
        rig.train()


CALLS: dict[str, Callable[[Any], Any]] = {
    "switch": lambda rig: rig.policy.switch("resident"),
    "state_dict": lambda rig: rig.policy.state_dict(),
    "a refused call": refused,
    "iter_weights": lambda rig: next(rig.policy.iter_weights()),
}


@pytest.mark.parametrize("call", ["a scope", *CALLS])
def test_a_scope_that_was_lost_is_closed_at_the_next_call(call: str, make: Callable[..., Any]) -> None:
    rig = make()
    flags, start = rig.flags(), len(rig.records())
    lose(rig.policy.training_mode())
    assert rig.policy.mode is rs.Mode.TRAINING
    scope = rig.policy.logprob_mode()
    if call == "a scope":
        with scope:
            assert [f.spelling for f in rig.policy._control.frames] == ["logprob_mode()"]
    else:
        CALLS[call](rig)
    assert rig.policy._control.frames == []
    assert rig.policy._control.ownership._token is None
    assert rig.policy.mode is rig.policy.resting_mode
    assert rig.flags() == flags
    new = rig.records()[start:]
    warnings = [r for r in new if r.name == "warning" and r.event.code == "orphaned_scope"]
    assert len(warnings) == 1
    assert "training_mode() at test_interrupts.py" in warnings[0].event.message
    exited = next(r for r in new if r.name == "scope.exited")
    assert (exited.event.error, exited.scope_id) == ("orphaned", warnings[0].scope_id)


def test_lost_scopes_inside_each_other_are_closed_from_the_inside(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    lose(rig.policy.training_mode())
    # The one inside would close the lost one around it, so both are held until both are open.
    outer, inner = rig.policy.training_mode(), rig.policy.logprob_mode()
    outer.__enter__()
    inner.__enter__()
    del outer, inner
    gc.collect()
    rig.policy.state_dict()
    assert rig.state() == before
    assert [r.event.mode for r in rig.records("scope.exited")[-2:]] == ["logprob", "training"]


def test_a_lost_inner_scope_leaves_the_outer_one_at_work(make: Callable[..., Any]) -> None:
    rig = make()
    with rig.policy.training_mode():
        lose(rig.policy.logprob_mode())
        rig.train()
        assert rig.policy.mode is rs.Mode.TRAINING
        assert len(rig.policy._control.frames) == 1


@pytest.mark.parametrize("act", ["enter", "switch", "train"])
def test_a_scope_lost_in_a_thread_that_has_ended_stands_in_nobodys_way(act: str, make: Callable[..., Any]) -> None:
    rig = make()
    thread = threading.Thread(target=lambda: lose(rig.policy.training_mode()))
    thread.start()
    thread.join(30)
    if act == "enter":
        with rig.policy.training_mode():
            rig.train()
    elif act == "switch":
        rig.policy.switch("resident")
        assert rig.seen()["params"] == "device"
    else:
        with pytest.raises(rs.ModeError):
            rig.train()
    assert rig.policy.mode is rig.policy.resting_mode


def test_when_closing_a_lost_scope_fails_it_is_gone_all_the_same(make: Callable[..., Any]) -> None:
    rig = make()
    before = rig.state()
    lose(rig.policy.training_mode())
    rig.device.fail("copy_out")
    with pytest.raises(rs.TransitionError):
        rig.policy.state_dict()
    assert rig.policy._control.frames == []
    assert rig.policy._control.ownership._token is None
    with rig.policy.training_mode():
        pass
    assert rig.state() == before


# -- a real one --------------------------------------------------------------------------------------------------------

LOOP = """
    import signal, sys
    import torch
    from torch import nn
    import rl_session as rs

    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "input_lengths": torch.tensor([3, 3])}

    def loss(logits, batch, seqs, tokens):
        return logits.sum() / tokens, {}

    with rs.Session(sys.argv[1], verify="checksum") as session:
        policy = session.attach(model, torch.optim.AdamW(model.parameters()), forward_fn=lambda m, b: m(b["input_ids"]))
        for number in range(10**9):
            with session.step(number):
                with policy.logprob_mode():
                    policy.get_logprobs(batch)
                with policy.training_mode():
                    policy.train(batch, loss)
            print(number, flush=True)
"""


def test_ctrl_c_in_a_running_loop_leaves_a_closed_and_readable_log(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LOOP), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "3":
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=60)
    assert errors.rstrip().splitlines()[-1].startswith("KeyboardInterrupt")
    reader = rs.read_audit(path)
    records = list(reader)
    assert (reader.torn, reader.skipped) == (0, 0)
    assert [r.seq for r in records] == list(range(len(records)))
    assert records[-1].name == "session.closed"
    assert records[-1].event.error == "KeyboardInterrupt"  # type: ignore[attr-defined]
    names = [r.name for r in records]
    assert names.count("scope.entered") == names.count("scope.exited")
    assert names.count("transition.started") == names.count("transition.committed")
    assert names[-2] == "policy.closed"
