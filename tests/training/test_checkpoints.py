"""Checkpoints of a policy: saving moves nothing, loading goes where the bytes are, and failures change nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rl_session as rs


def start_states(lab: SimpleNamespace, policy: Any, state: str, stack: ExitStack) -> None:
    """Bring a policy into one of the states in which it may be saved."""
    batch = lab.make_batch(1)
    if state != "never stepped":
        with policy.training_mode():
            policy.train(batch, lab.nll_loss)
    if state in ("training", "open step"):
        stack.enter_context(policy.training_mode())
    if state in ("logprob", "refit"):
        stack.enter_context(getattr(policy, f"{state}_mode")())
    if state in ("open step", "open step on the host"):
        with policy.training_mode():
            policy.begin_step(4, 4).forward_backward(batch, lab.nll_loss)
    if state in ("resident", "resident, optimizer away"):
        policy.switch("resident" if state == "resident" else "offloaded")
        policy.switch("resident")


def warm_up(lab: SimpleNamespace, policy: Any) -> None:
    """A first step, by which an optimizer makes the objects in its state that a checkpoint can only fill."""
    with policy.training_mode():
        policy.train(lab.make_batch(99), lab.nll_loss)


STATES = (
    *("offloaded", "training", "logprob", "refit", "resident", "resident, optimizer away"),
    *("open step", "open step on the host", "never stepped"),
)


@pytest.mark.parametrize("release", ["eager", "lazy"])
@pytest.mark.parametrize("state", STATES)
def test_saving_leaves_every_byte_where_it_was(
    lab: SimpleNamespace, attach: Any, tmp_path: Path, state: str, release: str
) -> None:
    kit = lab.Kit("buffers", "nested")
    policy = attach(kit, release=release)
    with ExitStack() as stack:
        start_states(lab, policy, state, stack)
        found, placement = lab.check_placement(policy, kit), policy.placement
        moved, resident = policy.device.num_copies, policy.device.resident_bytes
        policy.save_checkpoint(tmp_path / "checkpoint")
        assert lab.check_placement(policy, kit) == found
        assert policy.placement == placement
        assert policy.device.resident_bytes == resident
        assert policy.device.num_copies == moved
    other = lab.Kit("buffers", "nested")
    twin = attach(other, name="twin")
    warm_up(lab, twin)
    twin.load_checkpoint(tmp_path / "checkpoint")
    assert lab.same(twin.state_dict(), policy.state_dict())
    policy.close()
    twin.close()
    assert lab.same(lab.optimizer_state(other), lab.optimizer_state(kit))


@pytest.mark.parametrize(
    ("model", "optimizer", "load_in"),
    [
        ("plain", "adamw", "offloaded"),
        ("buffers", "adamw", "training"),
        ("buffers", "adamw-fused", "offloaded"),
        ("tied", "adamw-foreach", "resident"),
        ("buffers", "sgd", "offloaded"),
        ("plain", "adafactor", "training"),
        ("buffers", "nested", "offloaded"),
        ("plain", "nested", "resident"),
        ("strided", "muon", "offloaded"),
        ("plain", "masters", "offloaded"),
        ("buffers", "masters", "training"),
        ("lora", "adamw", "offloaded"),
    ],
)
def test_three_steps_a_checkpoint_and_three_steps_are_six_steps(
    lab: SimpleNamespace, attach: Any, tmp_path: Path, model: str, optimizer: str, load_in: str
) -> None:
    def three(policy: Any, first: int) -> list[Any]:
        results = []
        for number in range(first, first + 3):
            torch.manual_seed(number)
            with policy.training_mode():
                results.append(policy.train(lab.make_batch(number), lab.nll_loss, mbs=2))
        return results

    whole = lab.Kit(model, optimizer)
    policy = attach(whole)
    want = [*three(policy, 1), *three(policy, 4)]
    policy.close()

    first = lab.Kit(model, optimizer)
    policy = attach(first)
    got = three(policy, 1)
    policy.save_checkpoint(tmp_path / "checkpoint")
    policy.close()

    second = lab.Kit(model, optimizer)
    policy = attach(second, base="offloaded")
    if optimizer == "nested":
        warm_up(lab, policy)
    if load_in == "training":
        with policy.training_mode():
            policy.load_checkpoint(tmp_path / "checkpoint")
    else:
        policy.switch(load_in)
        policy.load_checkpoint(tmp_path / "checkpoint")
        lab.check_placement(policy, second)
    got += three(policy, 4)
    policy.close()
    assert lab.same([r["loss"] for r in got], [r["loss"] for r in want])
    assert lab.same([r["grad_norm"] for r in got], [r["grad_norm"] for r in want])
    lab.assert_same(second, whole)


def test_loading_while_offloaded_leaves_everything_on_the_host(
    lab: SimpleNamespace, attach: Any, tmp_path: Path
) -> None:
    kit = lab.Kit("buffers", "nested")
    policy = attach(kit)
    with policy.training_mode():
        policy.train(lab.make_batch(1), lab.nll_loss)
    policy.save_checkpoint(tmp_path / "checkpoint")
    for other in (kit, lab.Kit("buffers", "nested")):
        policy.close()
        policy = attach(other)
        warm_up(lab, policy)
        policy.load_checkpoint(tmp_path / "checkpoint")
        found = lab.check_placement(policy, other)
        assert found == {"params": "away", "buffers": "away", "grads": "none", "optimizer": "away"}
        given_back = 0 if other is kit else lab.device_bytes(kit.model, kit.optimizer)
        assert policy.device.resident_bytes == given_back


def test_what_was_loaded_is_not_taken_for_the_old_host_copy(lab: SimpleNamespace, attach: Any, tmp_path: Path) -> None:
    kit = lab.Kit()
    policy = attach(kit)
    batch = lab.make_batch(1)
    policy.save_checkpoint(tmp_path / "checkpoint")
    want = policy.state_dict()
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)
    with policy.training_mode():
        policy.load_checkpoint(tmp_path / "checkpoint")
    assert lab.same(policy.state_dict(), want)
    with policy.logprob_mode():
        assert lab.same(dict(kit.model.state_dict()), want)


@pytest.mark.parametrize("state", ["in its scope", "after its scope"])
def test_loading_in_an_open_step_is_refused(lab: SimpleNamespace, attach: Any, tmp_path: Path, state: str) -> None:
    kit = lab.Kit()
    policy = attach(kit)
    policy.save_checkpoint(tmp_path / "checkpoint")
    batch = lab.make_batch(1)
    with policy.training_mode():
        step = policy.begin_step(4, lab.valid_tokens(batch))
        step.forward_backward(batch, lab.nll_loss)
        if state == "in its scope":
            with pytest.raises(rs.OpenStepError, match="commit"):
                policy.load_checkpoint(tmp_path / "checkpoint")
    if state == "after its scope":
        with pytest.raises(rs.OpenStepError, match="commit"):
            policy.load_checkpoint(tmp_path / "checkpoint")
    with policy.training_mode():
        step.commit()
    policy.load_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize("state", ["in its scope", "after its scope"])
def test_loading_over_gradients_of_ones_own_is_refused(
    lab: SimpleNamespace, attach: Any, tmp_path: Path, state: str
) -> None:
    kit = lab.Kit()
    policy = attach(kit)
    policy.save_checkpoint(tmp_path / "checkpoint")
    with policy.training_mode():
        lab.Plain(kit).own_backward()
        if state == "in its scope":
            with pytest.raises(rs.OpenStepError, match="zero_grad"):
                policy.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(rs.OpenStepError, match="zero_grad"):
        policy.load_checkpoint(tmp_path / "checkpoint")


def _truncate(folder: Path) -> None:
    largest = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def _empty(folder: Path) -> None:
    for file in list(folder.rglob("*")):
        if file.is_file():
            file.unlink()


@pytest.mark.parametrize("where", ["offloaded", "training"])
@pytest.mark.parametrize("damage", [_truncate, _empty, None])
def test_a_checkpoint_that_does_not_load_changes_nothing(
    lab: SimpleNamespace, attach: Any, tmp_path: Path, where: str, damage: Callable[[Path], None] | None
) -> None:
    kit = lab.Kit("plain", "adamw")
    other = lab.Kit("plain" if damage else "buffers", "adamw")
    source = attach(other, name="source")
    with source.training_mode():
        source.train(lab.make_batch(9), lab.nll_loss)
    source.save_checkpoint(tmp_path / "checkpoint")
    if damage is not None:
        damage(tmp_path / "checkpoint")
    policy = attach(kit)
    batch = lab.make_batch(1)
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)
    want = policy.state_dict()
    with ExitStack() as stack:
        if where == "training":
            stack.enter_context(policy.training_mode())
        found = lab.check_placement(policy, kit)
        with pytest.raises(rs.CheckpointError):
            policy.load_checkpoint(tmp_path / "checkpoint")
        assert lab.check_placement(policy, kit) == found
        assert lab.same(policy.state_dict(), want)
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)
    assert policy.health == "ok"


def test_a_full_disk_is_an_error_and_what_stood_there_still_stands(
    lab: SimpleNamespace, attach: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = lab.Kit()
    policy = attach(kit)
    path = tmp_path / "checkpoint"
    policy.save_checkpoint(path)
    stood = policy.state_dict()
    with policy.training_mode():
        policy.train(lab.make_batch(1), lab.nll_loss)
    want = policy.state_dict()

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rl_session.workers.checkpoint.dcp.dcp_save", full)
        with pytest.raises(rs.CheckpointWriteError):
            policy.save_checkpoint(path)
    assert lab.same(policy.state_dict(), want)
    policy.load_checkpoint(path)
    assert lab.same(policy.state_dict(), stood)
