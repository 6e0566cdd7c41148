"""Faults 13 to 20: gradients lost or corrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rig import Make, Net, make_batch, nll
from torch import Tensor, nn

import rl_session as rs
from rl_session.errors import OpenStepError

COUNTS = {"global_valid_seqs": 8.0, "global_valid_tokens": 32.0}


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_row_13_gradients_survive_a_logprob_pass_in_an_open_step(make: Make) -> None:
    """Others: the preparation of a logprob pass frees the gradients of the chunks before it.

    Here: an open step's gradients are the same bits as in a run without the pass.
    By: only gradients that an optimizer step consumed may be dropped (`offload/gradients`).
    """
    with_pass, without = make(Net()), make(Net())
    without.model.load_state_dict(with_pass.model.state_dict())
    found = {}
    for rig, passes in ((with_pass, True), (without, False)):
        with rig.policy.training_mode():
            step = rig.policy.begin_step(**COUNTS)
            step.forward_backward(make_batch(4), nll)
            if passes:
                with rig.policy.logprob_mode():
                    rig.policy.get_logprobs(make_batch())
            step.forward_backward(make_batch(3), nll)
            found[passes] = gradients(rig.model)
            step.commit()
    assert len(found[True]) == 3
    assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True))
    assert with_pass.contents() == without.contents()


@pytest.mark.parametrize("policy", ["preserve", "refuse", "discard"])
def test_row_14_what_happens_to_live_gradients_is_said(make: Make, policy: Any) -> None:
    """Others: an offload that destroys gradients, and nobody who owns that decision.

    Here: `live_gradients` says it: kept bit for bit (default), refused, or discarded with a record of how many bytes.
    By: one configuration value, decided in `lifecycle.resolve` from what the worker finds.
    """
    rig = make(offload=rs.OffloadConfig(live_gradients=policy))
    with rig.policy.training_mode():
        rig.model(make_batch()["input_ids"]).sum().backward()
        before = gradients(rig.model)
        if policy == "refuse":
            with pytest.raises(OpenStepError, match="gradients are live"), rig.policy.offloaded():
                pass
            assert all(torch.equal(a, b) for a, b in zip(gradients(rig.model), before, strict=True))
            rig.model.zero_grad()
            return
        with rig.policy.offloaded():
            assert rig.device.resident_bytes == 0
        after = gradients(rig.model)
        if policy == "preserve":
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        else:
            assert after == []
            (dropped,) = rig.records("gradients.dropped")
            assert dropped.event.nbytes == sum(g.nbytes for g in before)
        rig.model.zero_grad()


def test_row_15_accumulation_over_scopes_equals_accumulation_in_one_place(make: Make) -> None:
    """Others: CPU offload together with gradient accumulation gives wrong gradients.

    Here: four chunks in four scopes, offloaded in between, give the gradients of four chunks in a row, bit for bit.
    By: gradients travel as storages, and come back into the same tensors (`offload/engine`).
    """
    scattered, together = make(Net()), make(Net())
    together.model.load_state_dict(scattered.model.state_dict())
    with scattered.policy.training_mode():
        step = scattered.policy.begin_step(**COUNTS)
    for rows in (2, 3, 1, 2):
        with scattered.policy.training_mode():
            step.forward_backward(make_batch(rows), nll)
        assert scattered.device.resident_bytes == 0
    with together.policy.training_mode():
        other = together.policy.begin_step(**COUNTS)
        for rows in (2, 3, 1, 2):
            other.forward_backward(make_batch(rows), nll)
        other.commit()
    with scattered.policy.training_mode():
        step.commit()
    assert scattered.contents() == together.contents()


def test_row_17_live_gradients_are_never_dropped_without_being_asked(make: Make) -> None:
    """Others: offloading parameters zeroes or discards gradients that nobody has used.

    Here: gradients of the user's own backward, outside any train step of the library, come back bit for bit.
    By: a gradient without a consumer's stamp is live, whoever made it (`offload/gradients`).
    """
    rig = make(base="resident")
    rig.model(make_batch()["input_ids"]).logsumexp(-1).sum().backward()
    before = gradients(rig.model)
    rig.policy.offload()
    assert rig.device.resident_bytes == 0
    assert rig.policy.placement["grads"] is rs.Tier.HOST
    with rig.policy.training_mode():
        assert all(torch.equal(a, b) for a, b in zip(gradients(rig.model), before, strict=True))
        rig.model.zero_grad()


def test_row_19_gradients_of_separate_masters_leave_too(make: Make) -> None:
    """Others: gradients on the optimizer's own copies of the weights stay on the GPU.

    Here: after an exit nothing that can be reached from the optimizer is on the device.
    By: masters are part of OPTIMIZER and their `.grad` of GRADS (`offload/inventory`).
    """
    half = Net().bfloat16()
    trainable = [p for p in half.parameters() if p.requires_grad]
    masters = {p: nn.Parameter(p.detach().float()) for p in trainable}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    rig = make(half, lambda _: optimizer, masters=masters)
    with rig.policy.training_mode():
        half(make_batch()["input_ids"]).float().sum().backward()
        for parameter, master in masters.items():
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
    reachable = [t for group in optimizer.param_groups for p in group["params"] for t in (p, p.grad)]
    assert len(reachable) == 2 * len(trainable)
    assert all(t.untyped_storage().nbytes() == 0 for t in reachable)
    assert rig.on_device() == []
    with rig.policy.training_mode():
        optimizer.step()
        optimizer.zero_grad()
        half.zero_grad()


def test_row_20_what_goes_out_comes_back(make: Make) -> None:
    """Others: four things are offloaded and three reloaded.

    Here: the set of storages that a way out moved is the set that the way in moves.
    By: one inventory and one plan for both directions (`offload/inventory`, `planning`).
    """
    rig = make(base="resident")
    rig.train()
    rig.policy.register("ema", {"weights": [torch.ones(3), torch.ones(2, 2)]})
    rig.policy.offload()
    rig.policy.switch("resident")
    moves = rig.records("component.moved")
    out = {r.event.component: r.event.nbytes for r in moves if r.event.to_tier == "host"}
    back = {r.event.component: r.event.nbytes for r in moves if r.event.to_tier == "device"}
    assert out.keys() >= {"params", "buffers", "optimizer", "ema"}
    assert back | {"optimizer": out["optimizer"], "ema": out["ema"]} == out
    with rig.policy.training_mode():
        assert rig.device.bytes_in == rig.device.bytes_out
