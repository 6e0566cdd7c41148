"""What a session is given wrongly is refused with a typed error, and the session goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import Net, adamw, make_batch, nll

import rl_session as rs
from rl_session.audit.check import assert_log_is_consistent
from rl_session.testing import EmulatedDevice


@pytest.fixture
def session(tmp_path: Path) -> Iterator[rs.Session]:
    with rs.Session(tmp_path / "run.jsonl", verify="checksum") as made:
        yield made


WRONG: dict[str, Callable[[rs.Session], Any]] = {
    "a step that is text": lambda s: s.step("x").__enter__(),  # type: ignore[arg-type]
    "a step below zero": lambda s: s.step(-1).__enter__(),
    "a step that is no whole number": lambda s: s.step(1.5).__enter__(),  # type: ignore[arg-type]
    "a step that is a truth value": lambda s: s.step(True).__enter__(),
    "an empty name": lambda s: s.attach(Net(), name=""),
    "a number as a name": lambda s: s.attach(Net(), name=3),  # type: ignore[arg-type]
    "an offload that is none": lambda s: s.attach(Net(), offload=3),  # type: ignore[arg-type]
    "a session that is none": lambda s: rs.attach(Net(), session=3),  # type: ignore[arg-type]
    "workers that are none": lambda s: s.policy("p", model=Net, workers=3),  # type: ignore[arg-type]
    "a path that is none": lambda s: rs.Session(audit_path=3),  # type: ignore[arg-type]
    "an extra that exists": lambda s: s.attach(Net(), name="a").register("params", [torch.ones(2)]),
    "an extra without a tensor": lambda s: s.attach(Net(), name="b").register("ema", 3),
    "an extra without a name": lambda s: s.attach(Net(), name="c").register(3, [torch.ones(2)]),  # type: ignore[arg-type]
    "unpinning what is not there": lambda s: s.attach(Net(), name="d").unpin("zzz"),
}


@pytest.mark.parametrize("what", WRONG)
def test_it_is_refused_with_what_to_write(session: rs.Session, tmp_path: Path, what: str) -> None:
    with pytest.raises(rs.ConfigError) as raised:
        WRONG[what](session)
    assert raised.value.remedy
    policy = session.attach(Net(), name="after")
    with session.step(0), policy.logprob_mode():
        policy.get_logprobs(make_batch())
    assert_log_is_consistent(tmp_path / "run.jsonl", finished=False)


def test_an_extra_is_not_replaced_behind_its_owners_back(session: rs.Session) -> None:
    policy = session.attach(Net(), name="a")
    first = torch.ones(5)
    policy.register("ema", [first])
    with pytest.raises(rs.ConfigError, match="exists"):
        policy.register("ema", [torch.ones(2)])
    policy.offload()
    assert first.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("wants", ["params", "model", "m"])
def test_an_optimizer_factory_may_take_parameters_or_the_model(session: rs.Session, wants: str) -> None:
    factories = {
        "params": lambda params: torch.optim.SGD(params, lr=0.1),
        "model": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "m": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    }
    policy = session.policy("p", model=Net, optimizer=factories[wants])
    with policy.training_mode():
        policy.train(make_batch(), nll)


def test_training_that_cannot_hold_its_gradients_is_refused_before_anything_moves() -> None:
    device = EmulatedDevice()
    with rs.Session(verify="checksum") as session:
        model = Net()
        policy = session.attach(model, adamw(model), device=device)
        policy.offload()
        sizes = policy._control.ask("sizes")
        trainable = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        device.capacity = sizes["params"] + sizes["buffers"] + trainable - 1
        with pytest.raises(rs.DeviceMemoryError), policy.training_mode():
            pass
        assert device.resident_bytes == 0
        assert device.bytes_in == 0
        device.capacity += 1
        with policy.training_mode():
            policy.train(make_batch(), nll, eval_mode=True)


def test_what_is_larger_than_the_budget_is_told_so() -> None:
    with rs.Session(device_budget=100) as session:
        policy = session.attach(Net(), device=EmulatedDevice())
        policy.offload()
        with pytest.raises(rs.DeviceMemoryError, match="larger than the whole budget"), policy.logprob_mode():
            pass


def test_who_never_releases_is_never_evicted() -> None:
    device = EmulatedDevice()
    with rs.Session(verify="checksum", release="never") as session:
        stays, comes = (session.attach(Net(), None, name=name, device=device) for name in ("stays", "comes"))
        with stays.logprob_mode():
            pass
        held = device.held_bytes
        device.capacity = held + 10
        assert session.memory()["participants"]["stays"]["releasable"] == {}
        with pytest.raises(rs.DeviceMemoryError, match="stays"):
            session.make_room(100)
        assert device.held_bytes == held
        assert comes.health == "ok"


def test_make_room_makes_up_for_a_release_that_failed() -> None:
    device = EmulatedDevice(capacity=1_000_000)
    with rs.Session(verify="checksum") as session:
        model = Net()
        policy = session.attach(model, adamw(model), device=device)
        policy.offload()
        scope = policy.training_mode()
        scope.__enter__()
        policy.train(make_batch(), nll)
        device.fail("copy_out")
        with pytest.raises(rs.TransitionError):
            scope.__exit__(None, None, None)
        assert device.resident_bytes > 0
        session.make_room(10)
        assert device.resident_bytes == 0


def test_memory_says_which_component_is_dirty() -> None:
    with rs.Session(verify="checksum") as session:
        model = Net()
        policy = session.attach(model, adamw(model), base="resident", device=EmulatedDevice())
        with policy.training_mode():
            policy.train(make_batch(), nll)
            sizes = policy._control.ask("sizes")
            assert policy.memory()["dirty"] == {name: sizes[name] for name in ("params", "buffers", "optimizer")}
        policy.offload()
        with policy.logprob_mode():
            assert policy.memory()["dirty"] == {}
