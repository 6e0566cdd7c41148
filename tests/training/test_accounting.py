"""Every byte, judged by the emulated device's own counters and by looking at storages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rl_session as rs
from rl_session.testing import EmulatedDevice

AWAY = {"params": "away", "buffers": "away", "optimizer": "away"}


class Meter:
    """Bytes that the device counted since the last look."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.read()

    def read(self) -> tuple[int, int]:
        """Bytes in and out since the last read."""
        now = self.device.bytes_in, self.device.bytes_out
        before = getattr(self, "_before", now)
        self._before = now
        return now[0] - before[0], now[1] - before[1]


def events_of(path: Path, name: str) -> list[Any]:
    return [record.event for record in rs.read_audit(path) if record.name == name]


def sizes(lab: SimpleNamespace, kit: Any) -> dict[str, int]:
    """Bytes of each component; call while all of it is on the device."""
    return {name: lab.storage_bytes(found) for name, found in lab.tensors_of(kit.model, kit.optimizer).items()}


# -- what each exit leaves where --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "nested", "masters", "main-grad"])
def test_after_every_exit_nothing_is_on_the_device(lab: SimpleNamespace, attach: Any, optimizer: str) -> None:
    kit = lab.Kit("buffers", optimizer)
    policy = attach(kit)
    batch = lab.make_batch(1)
    for scope in ("training_mode", "logprob_mode", "refit_mode", "offloaded", "training_mode"):
        with getattr(policy, scope)():
            if scope == "training_mode":
                policy.train(batch, lab.nll_loss)
        found = lab.check_placement(policy, kit)
        assert {name: found[name] for name in ("params", "buffers")} == {"params": "away", "buffers": "away"}
        assert found["optimizer"] in ("away", "none")
        assert policy.device.resident_bytes == lab.device_bytes(kit.model, kit.optimizer) == 0
        assert policy.placement["grads"] is rs.Tier.NONE


def test_resident_bytes_are_those_of_the_storages_in_every_scope(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit("tied", "adamw")
    policy = attach(kit)
    batch = lab.make_batch(1)
    for scope in ("training_mode", "logprob_mode", "refit_mode", "training_mode", "offloaded"):
        with getattr(policy, scope)():
            if scope == "training_mode":
                policy.train(batch, lab.nll_loss)
            assert policy.placement is not None  # a scan: the device hears of state made by the first step
            assert policy.device.resident_bytes == lab.device_bytes(kit.model, kit.optimizer)


def test_gradients_of_an_open_step_wait_on_the_host_and_only_they(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit()
    policy = attach(kit)
    batch = lab.make_batch(1)
    with policy.training_mode():
        step = policy.begin_step(4, lab.valid_tokens(batch))
        step.forward_backward(batch, lab.nll_loss)
        grads = {name: g.clone() for name, g in lab.gradients(kit).items()}
    assert lab.check_placement(policy, kit)["grads"] == "away"
    assert policy.placement["grads"] is rs.Tier.HOST
    with policy.logprob_mode():
        assert lab.check_placement(policy, kit)["grads"] == "away"
    with policy.training_mode():
        assert all(lab.same(g, grads[name]) for name, g in lab.gradients(kit).items())
        with policy.logprob_mode():
            assert lab.check_placement(policy, kit)["grads"] == "device"
        with policy.refit_mode():
            assert lab.check_placement(policy, kit)["grads"] == "away"
        assert all(lab.same(g, grads[name]) for name, g in lab.gradients(kit).items())
        step.commit()
    assert policy.placement["grads"] is rs.Tier.NONE
    assert all(g is None for g in lab.gradients(kit).values())


@pytest.mark.parametrize("logprob_flag", [False, True])
@pytest.mark.parametrize("refit_flag", [False, True])
def test_each_flag_sends_the_optimizer_to_the_host_in_its_own_mode_only(
    lab: SimpleNamespace, attach: Any, logprob_flag: bool, refit_flag: bool
) -> None:
    kit = lab.Kit()
    policy = attach(
        kit, base="resident", offload_optimizer_for_logprob=logprob_flag, offload_optimizer_for_refit=refit_flag
    )
    with policy.training_mode():
        policy.train(lab.make_batch(1), lab.nll_loss)
        state = sizes(lab, kit)["optimizer"]
    meter = Meter(policy.device)
    for scope, flag in (("logprob_mode", logprob_flag), ("refit_mode", refit_flag)):
        with getattr(policy, scope)():
            assert lab.check_placement(policy, kit)["optimizer"] == ("away" if flag else "device")
            assert meter.read() == (0, state if flag else 0)
        assert lab.check_placement(policy, kit)["optimizer"] == "device"
        assert meter.read() == (state if flag else 0, 0)


# -- bytes that need not move ------------------------------------------------------------------------------------------


def test_the_first_exit_ever_copies_everything_out_because_no_host_copy_exists(
    lab: SimpleNamespace, attach: Any
) -> None:
    kit = lab.Kit("buffers")
    policy = attach(kit)
    all_bytes = sizes(lab, kit)
    meter = Meter(policy.device)
    with policy.logprob_mode():
        policy.get_logprobs(lab.make_batch(1))
        assert meter.read() == (0, 0)
    assert meter.read() == (0, all_bytes["params"] + all_bytes["buffers"])


def test_leaving_logprob_mode_copies_nothing_out_when_a_host_copy_exists(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit("buffers")
    policy = attach(kit)
    batch = lab.make_batch(1)
    meter = Meter(policy.device)
    for _ in range(2):
        with policy.training_mode():
            policy.train(batch, lab.nll_loss)
        meter.read()
        for _ in range(3):
            with policy.logprob_mode():
                policy.get_logprobs(batch)
                there = sizes(lab, kit)
                assert meter.read() == (there["params"] + there["buffers"], 0)
            assert meter.read() == (0, 0)


def test_leaving_refit_mode_copies_nothing_out_when_a_host_copy_exists(lab: SimpleNamespace, attach: Any) -> None:
    policy = attach(lab.Kit())
    with policy.training_mode():
        policy.train(lab.make_batch(1), lab.nll_loss)
    meter = Meter(policy.device)
    with policy.refit_mode():
        meter.read()
    assert meter.read() == (0, 0)


def test_optimizer_state_is_not_copied_out_again_by_scopes_that_did_not_bring_it_in(
    lab: SimpleNamespace, attach: Any
) -> None:
    kit = lab.Kit()
    policy = attach(kit)
    with policy.training_mode():
        policy.train(lab.make_batch(1), lab.nll_loss)
    with policy.logprob_mode():
        assert lab.scan(kit.model, kit.optimizer)["optimizer"] == "away"
    with policy.refit_mode():
        assert lab.scan(kit.model, kit.optimizer)["optimizer"] == "away"


def test_a_training_scope_is_dirty_even_if_nothing_was_trained(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit()
    policy = attach(kit)
    policy.offload()
    with policy.training_mode():
        written = sizes(lab, kit)["params"]
        next(iter(kit.model.parameters())).data.mul_(2.0)  # bumps no version counter of the parameter
        want = [p.detach().clone() for p in kit.model.parameters()]
        meter = Meter(policy.device)
    assert meter.read() == (0, written)
    with policy.logprob_mode():
        assert all(lab.same(p.detach(), w) for p, w in zip(kit.model.parameters(), want, strict=True))


def test_entering_the_mode_in_effect_touches_nothing(
    lab: SimpleNamespace, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = attach(lab.Kit())
    with policy.training_mode():
        policy.train(lab.make_batch(1), lab.nll_loss)
        meter, copies = Meter(policy.device), policy.device.num_copies
        asked: list[str] = []
        worker = policy._control.group.worker
        monkeypatch.setattr(worker, "transition", lambda request: asked.append("transition"))
        monkeypatch.setattr(worker.engine, "refresh", lambda **options: asked.append("refresh"))
        monkeypatch.setattr("gc.collect", lambda *args: asked.append("gc"))
        with policy.training_mode(), policy.training_mode():
            assert policy.mode is rs.Mode.TRAINING
        monkeypatch.undo()
        assert asked == []
        assert meter.read() == (0, 0)
        assert policy.device.num_copies == copies


# -- what the log says --------------------------------------------------------------------------------------------------


def _loop(lab: SimpleNamespace, policy: Any, *, reference: bool) -> None:
    batch = lab.make_batch(3)
    for _ in range(3):
        with policy.logprob_mode():
            policy.get_logprobs(batch)
            if reference:
                policy.get_reference_policy_logprobs(batch)
        with policy.training_mode():
            policy.train(batch, lab.nll_loss, gbs=2)
            step = policy.begin_step(4, lab.valid_tokens(batch))
            step.forward_backward(batch, lab.nll_loss)
            with policy.logprob_mode():
                if reference:
                    policy.get_reference_policy_logprobs(batch)
        with policy.refit_mode():
            pass
        with policy.training_mode():
            if reference:
                policy.get_reference_policy_logprobs(batch)
            step.commit()
        with policy.offloaded():
            pass
    policy.switch("resident")
    policy.offload()
    with policy.logprob_mode():
        pass


@pytest.mark.parametrize("release", ["eager", "lazy"])
@pytest.mark.parametrize("reference", ["none", "copy", "module"])
def test_the_log_adds_up_to_what_the_device_counted(
    lab: SimpleNamespace, device: EmulatedDevice, tmp_path: Path, reference: str, release: str
) -> None:
    kit = lab.Kit("buffers", "nested")
    other = {"none": None, "copy": "copy", "module": kit.reference}[reference]
    path = tmp_path / "run.jsonl"
    with rs.Session(path, verify="checksum", release=release) as session:
        meter = Meter(device)
        policy = session.attach(kit.model, kit.optimizer, device=device, reference=other)
        captured = sum(meter.read())  # a reference kept on the host is copied at attach, outside every transition
        assert (captured > 0) == (reference == "copy")
        _loop(lab, policy, reference=other is not None)
        policy.close()
    committed = sum(event.bytes_moved for event in events_of(path, "transition.committed"))
    moved = sum(event.nbytes for event in events_of(path, "component.moved") if not event.elided)
    swapped = sum(event.nbytes for event in events_of(path, "reference.swapped"))
    assert committed + captured == moved
    assert committed > 0
    assert moved + swapped == captured + sum(meter.read())


def test_a_call_that_fails_in_the_reference_pass_is_accounted_for_too(
    lab: SimpleNamespace, device: EmulatedDevice, tmp_path: Path
) -> None:
    kit = lab.Kit()
    path = tmp_path / "run.jsonl"
    fails = False

    def forward(model: Any, batch: Any) -> Any:
        if fails:
            raise ValueError("no")
        return model(batch["input_ids"])

    with rs.Session(path, verify="checksum") as session:
        policy = session.attach(kit.model, kit.optimizer, device=device, reference="copy", forward_fn=forward)
        meter = Meter(device)
        with policy.logprob_mode():
            fails = True
            with pytest.raises(ValueError, match="no"):
                policy.get_reference_policy_logprobs(lab.make_batch(1))
    names = ("transition.committed", "reference.swapped")
    committed, swapped = (events_of(path, name) for name in names)
    assert len(swapped) == 2
    assert sum(e.bytes_moved for e in committed) + sum(e.nbytes for e in swapped) == sum(meter.read())


# -- room -----------------------------------------------------------------------------------------------------------------


def test_a_run_fits_in_exactly_params_and_grads_and_optimizer(lab: SimpleNamespace, attach: Any) -> None:
    twin = lab.Kit()
    plain = lab.Plain(twin)
    plain.open()
    params, grads = (sizes(lab, twin)[name] for name in ("params", "grads"))
    plain.more()
    plain.commit()
    optimizer = sizes(lab, twin)["optimizer"]
    capacity = params + grads + optimizer
    kit = lab.Kit()
    device = EmulatedDevice(capacity=capacity)
    device.poison()
    policy = attach(kit, device=device)
    scoped = lab.Scoped(kit, policy, Path())
    program = ["train", "logprob", "open", "logprob", "more", "commit", "refit", "train", "deep"]
    scoped.run(program)
    assert device.peak <= capacity
    again = lab.Kit()
    plain = lab.Plain(again)
    plain.run(program)
    lab.assert_same_trace(scoped, plain)


def test_too_little_room_is_an_error_in_bytes_and_leaves_the_policy_usable(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit()
    params = sizes(lab, kit)["params"]
    device = EmulatedDevice(capacity=2 * params)
    device.poison()
    policy = attach(kit, device=device, reference="copy")
    batch = lab.make_batch(1)
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)  # the first step's own state is made by torch: no capacity stops it
        want = lab.naive_logprobs(kit.model, batch)
        state = sizes(lab, kit)["optimizer"]
    with pytest.raises(rs.DeviceMemoryError) as caught, policy.training_mode():
        raise AssertionError("never entered")
    text = str(caught.value)
    assert f"needed: {2 * params + state} bytes" in text, "weights, state, and the gradients to come"
    assert f"budget: {2 * params}, in use: 0" in text
    assert "larger than the whole budget" in caught.value.remedy
    assert policy.mode is rs.Mode.OFFLOADED
    assert policy.health == "ok"
    assert device.resident_bytes == 0
    with policy.logprob_mode():
        assert lab.same(policy.get_logprobs(batch)["logprobs"], want)
    device.capacity = None
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)


def test_the_host_pool_is_flat_over_twenty_cycles_and_empty_after_close(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit("buffers", "nested")
    policy = attach(kit, reference="copy")
    pool = policy._control.group.worker.engine.pool
    batch = lab.make_batch(1)
    allocations, held = [], []
    for _ in range(20):
        with policy.logprob_mode():
            policy.get_reference_policy_logprobs(batch)
        with policy.training_mode():
            policy.train(batch, lab.nll_loss)
            step = policy.begin_step(4, lab.valid_tokens(batch))
            step.forward_backward(batch, lab.nll_loss)
        with policy.logprob_mode():
            policy.get_logprobs(batch)
        with policy.training_mode():
            step.commit()
        allocations.append(pool.num_allocations)
        held.append(policy.memory()["host_held"])
    assert len(set(allocations[1:])) == 1, allocations
    assert len(set(held[1:])) == 1, held
    policy.close()
    assert (pool.in_use_bytes, pool.held_bytes) == (0, 0)


def test_a_host_budget_of_its_own_is_returned_on_close_too(lab: SimpleNamespace, attach: Any) -> None:
    policy = attach(lab.Kit(), host_budget=2**20)
    pool = policy._control.group.worker.engine.pool
    with policy.logprob_mode():
        pass
    assert pool.held_bytes > 0
    policy.close()
    assert pool.held_bytes == 0


def test_a_host_budget_that_is_too_small_is_an_error_and_leaves_everything_in_place(
    lab: SimpleNamespace, attach: Any
) -> None:
    kit = lab.Kit()
    policy = attach(kit, host_budget=100)
    batch = lab.make_batch(1)
    want = lab.naive_logprobs(kit.model, batch)
    with pytest.raises(rs.HostMemoryError, match="budget: 100 bytes"):
        policy.offload()
    assert lab.check_placement(policy, kit)["params"] == "device"
    assert policy.health == "ok"
    policy.switch("resident")
    assert lab.same(policy.get_logprobs(batch)["logprobs"], want)


# -- lazy and never ---------------------------------------------------------------------------------------------------------


def test_lazy_moves_nothing_on_exit_and_offload_evicts(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit()
    policy = attach(kit, release="lazy")
    batch = lab.make_batch(1)
    meter = Meter(policy.device)
    for _ in range(2):
        with policy.training_mode():
            policy.train(batch, lab.nll_loss)
        assert policy.mode is rs.Mode.OFFLOADED
        with policy.logprob_mode():
            policy.get_logprobs(batch)
    assert meter.read() == (0, 0)
    there = sizes(lab, kit)
    policy.offload()
    assert meter.read() == (0, there["params"] + there["optimizer"])
    assert policy.device.resident_bytes == 0
    policy.offload()
    assert meter.read() == (0, 0)
    with policy.logprob_mode():
        assert meter.read() == (there["params"], 0)
        assert lab.scan(kit.model, kit.optimizer)["optimizer"] == "away"


def test_lazy_copies_out_what_was_written_between_scopes(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit()
    policy = attach(kit, release="lazy")
    policy.offload()
    with policy.logprob_mode():
        pass
    kit.model.head.weight.data.mul_(3.0)  # legal: it is on the device; no version counter shows it
    want = kit.model.head.weight.detach().clone()
    with policy.logprob_mode():
        pass
    policy.offload()
    assert lab.same(policy.state_dict()["head.weight"], want)


def test_never_moves_no_byte(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit()
    policy = attach(kit, release="never")
    batch = lab.make_batch(1)
    meter = Meter(policy.device)
    with policy.training_mode():
        policy.train(batch, lab.nll_loss)
        with policy.offloaded():
            pass
    with policy.logprob_mode(), policy.refit_mode(), policy.offloaded():
        pass
    policy.offload()
    policy.switch("resident")
    policy.close()
    assert meter.read() == (0, 0)
    assert policy.device.num_copies == 0


# -- hand-written changes that no counter shows -------------------------------------------------------------------------


def test_a_data_write_between_scopes_of_a_resident_policy_survives_the_host(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit()
    policy = attach(kit, base="resident")
    policy.switch("offloaded")
    policy.switch("resident")
    for scope in ("logprob_mode", "refit_mode", "training_mode"):
        with getattr(policy, scope)():
            pass
        kit.model.head.weight.data.add_(1.0)
        want = kit.model.head.weight.detach().clone()
        with policy.offloaded():
            assert lab.same(policy.state_dict()["head.weight"], want)
        assert lab.same(kit.model.head.weight.detach(), want)


def test_a_write_after_a_failed_way_out_is_not_taken_for_the_host_copy(lab: SimpleNamespace, attach: Any) -> None:
    kit = lab.Kit()
    policy = attach(kit, base="resident", offload_optimizer_for_logprob=True)
    with policy.training_mode():
        policy.train(lab.make_batch(1), lab.nll_loss)
    scope = policy.logprob_mode()
    scope.__enter__()
    policy.get_logprobs(lab.make_batch(2))
    with policy.offloaded():
        pass  # from here on the host copy of the weights is valid
    policy.device.fail("copy_in", k=2, point="half")
    with pytest.raises(rs.TransitionError):
        scope.__exit__(None, None, None)
    assert policy.mode is rs.Mode.RESIDENT
    kit.model.head.weight.data.mul_(2.0)
    want = kit.model.head.weight.detach().clone()
    policy.switch("offloaded")
    assert lab.same(policy.state_dict()["head.weight"], want)
