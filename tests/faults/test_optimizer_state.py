"""Faults 21 to 35: optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rig import Make, Net, adamw, make_batch, nll, tensors_in
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import rl_session as rs
from rl_session.lifecycle import Mode
from rl_session.testing import EmulatedDevice


def test_row_21_looking_at_optimizer_state_makes_none(make: Make) -> None:
    """Others: an offload before the first step inserts empty entries into `optimizer.state`.

    Here: scopes before the first step leave the state empty; frozen parameters never appear in it.
    By: state is walked with `.items()`, never indexed (`offload/inventory`).
    """
    rig = make()
    for scope in (rig.policy.training_mode, rig.policy.logprob_mode, rig.policy.offloaded):
        with scope():
            pass
    assert len(rig.optimizer.state) == 0
    with rig.policy.training_mode():
        rig.train()
    assert all(parameter.requires_grad for parameter in rig.optimizer.state)


STARTS = [
    *(("rest", mode) for mode in ("offloaded", "resident")),
    *(("scope", scope) for scope in ("training_mode", "logprob_mode", "refit_mode", "offloaded")),
    ("open step", "training_mode"),
    ("before a step", "resident"),
]


@pytest.mark.parametrize(("kind", "where"), STARTS)
def test_row_23_a_checkpoint_leaves_everything_where_it_was(make: Make, tmp_path: Path, kind: str, where: str) -> None:
    """Others: saving brings the optimizer to the GPU and forgets it there.

    Here: from each of eight starting states, the placement after a save is the placement before it, and no byte was copied.
    By: checkpoints read from whichever tier holds the bytes (`workers/checkpoint`).
    """
    rig = make()
    if kind != "before a step":
        with rig.policy.training_mode():
            rig.train()
    if kind in ("rest", "before a step"):
        rig.policy.switch(where)
        scope: Any = None
    else:
        scope = getattr(rig.policy, where)()
        scope.__enter__()
    step = None
    if kind == "open step":
        step = rig.policy.begin_step()
        step.forward_backward(make_batch(), nll)
    found, copied = rig.on_device(), (rig.device.bytes_in, rig.device.bytes_out)
    placement = rig.policy.placement
    rig.policy.save_checkpoint(tmp_path / "checkpoint")
    assert rig.on_device() == found
    assert rig.policy.placement == placement
    assert (rig.device.bytes_in, rig.device.bytes_out) == copied
    if step is not None:
        step.abort()
    if scope is not None:
        scope.__exit__(None, None, None)


@pytest.mark.parametrize("for_logprob", [False, True])
@pytest.mark.parametrize("for_refit", [False, True])
def test_row_25_one_table_decides_where_the_optimizer_is(make: Make, for_logprob: bool, for_refit: bool) -> None:
    """Others: the optimizer's offload is forgotten, forced, or tied to the wrong part in one of several code paths.

    Here: for every flag and scope the optimizer is where the one table says, from the host and from the device.
    By: the mode table, read by scopes, guards, shim and documentation (`lifecycle.MODE_TABLE`).
    """
    flags = rs.OffloadConfig(offload_optimizer_for_logprob=for_logprob, offload_optimizer_for_refit=for_refit)
    rig = make(offload=flags, base="resident")
    rig.train()

    def seen() -> bool:
        return all(t.untyped_storage().nbytes() for t in rig.optimizer_tensors())

    for start in ("resident", "offloaded"):
        rig.policy.switch(start)
        was = seen()
        with rig.policy.logprob_mode():
            assert seen() == (was and not for_logprob)
        assert seen() == was
        with rig.policy.refit_mode():
            assert seen() == (was and not for_refit)
        assert seen() == was
        with rig.policy.training_mode():
            assert seen()
        assert seen() == was


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_row_26_a_checkpoint_loaded_while_offloaded_steps_on_the_device(
    make: Make, tmp_path: Path, options: dict[str, bool]
) -> None:
    """Others: after a resume the fused optimizer finds moments or step counts on the wrong device.

    Here: loaded while offloaded, the next training scope steps with every implementation, as if never interrupted.
    By: a load writes into the bytes where they are; 0-dim state stays where torch puts it (`workers/checkpoint/restoring`).
    """

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model, **options)

    first, second = make(Net(), build), make(Net(), build)
    with first.policy.training_mode():
        first.train()
    first.policy.save_checkpoint(tmp_path / "checkpoint")
    second.policy.offload()
    second.policy.load_checkpoint(tmp_path / "checkpoint")
    assert second.on_device() == []
    for rig in (first, second):
        with rig.policy.training_mode():
            rig.train()
            assert all(t.device.type == "cpu" and t.untyped_storage().nbytes() for t in rig.optimizer_tensors())
    assert first.contents() == second.contents()


class Odd(torch.optim.SGD):
    """An optimizer whose state has names, nestings and objects that no list foresees."""

    class Box:
        """Holds a tensor."""

        def __init__(self, tensor: Tensor) -> None:
            self.inside = tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                        state["foo"] = {"deep": [torch.zeros_like(p), (torch.zeros_like(p),)]}
                        state["box"] = self.Box(torch.zeros_like(p))
                    state["momentum_buffer"] += p.grad
                    state["foo"]["deep"][1][0].add_(1)
                    p.sub_(0.1 * state["momentum_buffer"])


def test_row_28_state_is_found_whatever_it_is_called(make: Make) -> None:
    """Others: the state of Muon and its kin is missed, because `exp_avg` is a hard-coded key.

    Here: dictionaries, lists, tuples and objects in the state are walked: everything leaves and comes back.
    By: a scan of everything reachable from `optimizer.state` (`offload/inventory`).
    """
    rig = make(Net(), lambda model: Odd([p for p in model.parameters() if p.requires_grad], lr=0.1))
    with rig.policy.training_mode():
        rig.train()
    tensors = [t for state in rig.optimizer.state.values() for t in tensors_in(state)]
    assert len(tensors) == 4 * 3
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    with rig.policy.training_mode():
        assert all(t.untyped_storage().nbytes() for t in tensors)
        rig.train()


class Quantised(nn.Module):
    """A layer with tensors that are neither parameters nor buffers, and an object that holds one."""

    class QuantState:
        """As bitsandbytes keeps it."""

        def __init__(self) -> None:
            self.absmax = torch.ones(5)

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.codebook = torch.ones(16)
        self.quant_state = self.QuantState()

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        out: Tensor = self.net(input_ids)
        return out


def test_row_29_tensors_outside_every_component_are_reported(make: Make) -> None:
    """Others: 8-bit and quantisation state is left behind on the GPU, without a word.

    Here: what no component covers is named in a warning, with its bytes, and can be registered as an extra.
    By: the scan walks attributes too, and reports what belongs to nobody (`offload/inventory`).
    """
    rig = make(Quantised())
    (warning,) = rig.records("warning")
    assert warning.event.code == "uncovered"
    assert "codebook" in warning.event.message
    assert warning.event.nbytes >= rig.model.codebook.nbytes
    rig.policy.register("quant", [rig.model.codebook, rig.model.quant_state.absmax])
    rig.policy.offload()
    assert rig.model.codebook.untyped_storage().nbytes() == 0
    assert rig.model.quant_state.absmax.untyped_storage().nbytes() == 0


def test_row_30_the_optimizer_is_not_brought_in_for_what_does_not_step(make: Make) -> None:
    """Others: optimizer state is resident during forwards that do not need it.

    Here: a logprob or refit scope from the host never brings the optimizer in; only a training scope does.
    By: no cell of the mode table but TRAINING's asks for it (`lifecycle.MODE_TABLE`).
    """
    rig = make()
    with rig.policy.training_mode():
        rig.train()
    for scope in (rig.policy.logprob_mode, rig.policy.refit_mode):
        with scope():
            assert not any(t.untyped_storage().nbytes() for t in rig.optimizer_tensors())
    brought = {r.event.component for r in rig.records("component.moved") if r.event.to_tier == "device"}
    with rig.policy.training_mode():
        assert all(t.untyped_storage().nbytes() for t in rig.optimizer_tensors())
    assert "optimizer" not in brought, "the first step made it on the device; nothing has brought it in"


def test_row_32_two_owners_of_a_placement_are_refused(
    tmp_path: Path, single_rank_process_group: None, make: Make
) -> None:
    """Others: FSDP's own CPU offload and a second offload fight for the same parameters.

    Here: a model and a configuration that disagree are an error when they meet.
    By: a check at attach (`OffloadConfig(cpu_offload=...)`).
    """
    model = Net()
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(rs.ConfigError, match="CPUOffloadPolicy"):
        make(model, None)
    with pytest.raises(rs.ConfigError, match="cpu_offload=True"):
        make(Net(), offload=rs.OffloadConfig(cpu_offload=True))


def test_row_33_where_bytes_are_is_found_by_looking(make: Make) -> None:
    """Others: the optimizer is moved every time, since nobody knows where it is.

    Here: whatever happened before, the placement is what the storages say.
    By: `policy.placement` scans (`offload/ledger`).
    """
    rig = make()
    with rig.policy.training_mode():
        rig.train()
        assert (rig.policy.placement["optimizer"] is rs.Tier.DEVICE) == bool(rig.on_device())
    for mode in (Mode.RESIDENT, Mode.OFFLOADED, Mode.LOGPROB, Mode.OFFLOADED):
        rig.policy.switch(mode)
        there = all(t.untyped_storage().nbytes() for t in rig.optimizer_tensors())
        assert (rig.policy.placement["optimizer"] is rs.Tier.DEVICE) == there


def test_row_35_a_resume_from_an_offloaded_checkpoint_continues_exactly(make: Make, tmp_path: Path) -> None:
    """Others: a jump of the loss after resuming with an offloaded optimizer, because fp32 masters were not restored.

    Here: three steps, a save while offloaded, a load into another model, three steps: the bits of six steps.
    By: checkpoints hold masters, moments and the scheduler (`workers/checkpoint`).
    """

    def build(model: nn.Module) -> Any:
        trainable = [p for p in model.parameters() if p.requires_grad]
        mapping[id(model)] = {p: nn.Parameter(p.detach().float()) for p in trainable}
        return torch.optim.AdamW(mapping[id(model)].values(), lr=1e-2)

    mapping: dict[int, dict[nn.Parameter, nn.Parameter]] = {}

    def make_half() -> Any:
        model = Net().bfloat16()
        optimizer = build(model)
        return make(model, lambda _: optimizer, masters=mapping[id(model)])

    straight, first, resumed = make_half(), make_half(), make_half()
    first.policy.load_checkpoint(_saved(straight, tmp_path / "start"))
    for rig, steps in ((straight, 6), (first, 3)):
        for _ in range(steps):
            with rig.policy.training_mode():
                rig.train()
    first.policy.offload()
    resumed.policy.load_checkpoint(_saved(first, tmp_path / "middle"))
    for _ in range(3):
        with resumed.policy.training_mode():
            resumed.train()
    assert resumed.contents() == straight.contents()
    assert isinstance(resumed.device, EmulatedDevice)


def _saved(rig: Any, path: Path) -> Path:
    rig.policy.save_checkpoint(path)
    return path
