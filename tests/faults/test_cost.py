"""Faults 71 and 76 to 80: cost of transitions, and who has to leave."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from rig import Make, Net, make_batch, nll

import rl_session as rs
from rl_session.offload import engine as offload_engine
from rl_session.offload import inventory, ledger
from rl_session.testing import EmulatedDevice


def test_row_71_entering_one_evicts_the_others(make: Make) -> None:
    """Others: a group of models shares a GPU, and only one of them is thought of when another comes.

    Here: with room for one, entering any of four sends away whatever the other three hold.
    By: an arbiter knows every participant on a device (`driver/arbiter`).
    """
    device = EmulatedDevice()
    session = rs.Session(release="lazy", verify="checksum")
    rigs = [make(Net(), None, session=session, name=f"model {n}", device=device) for n in range(4)]
    for rig in rigs:
        rig.policy.offload()
    size = sum(rigs[0].policy._control.ask("sizes").values())
    device.capacity = size
    for rig in [*rigs, *rigs]:
        with rig.policy.logprob_mode():
            assert [other for other in rigs if other.on_device()] == [rig]
            rig.policy.get_logprobs(make_batch())
    assert device.peak <= 4 * size
    session.close()


def test_row_76_nothing_to_do_costs_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others: 450 ms a step to move nothing: a walk over everything, and a garbage collection.

    Here: entering the mode in effect scans nothing, collects nothing, asks nobody; the count does not depend on the model.
    By: `Control.enter` compares modes and writes two records.
    """
    rig = make()
    calls: list[str] = []

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    with rig.policy.logprob_mode():
        counted(ledger.Ledger, "refresh")
        counted(inventory, "reachable_tensors")
        counted(offload_engine.Engine, "move")
        counted(gc, "collect")
        counted(type(rig.policy._control.group), "call")
        with rig.policy.logprob_mode():
            pass
        assert calls == []
        copies = rig.device.num_copies
    assert rig.device.num_copies >= copies
    assert "refresh" in calls, "the counters count: leaving for the outer mode is a transition"


def test_row_77_neighbouring_phases_share_one_stay(make: Make) -> None:
    """Others: neighbouring scopes undo each other: train, save and push move everything three times.

    Here: train, save and read all weights in one stay: one way in, one way out.
    By: saving and reading take the bytes from where they are; a scope inside a scope that has what it needs moves nothing.
    """
    rig = make()
    with rig.policy.training_mode():
        rig.train()
    rig.device.bytes_in = rig.device.bytes_out = 0
    with rig.policy.training_mode():
        rig.train()
        rig.policy.save_checkpoint(rig.log.parent / "checkpoint")
        with rig.policy.refit_mode():
            weights = {name: t.clone() for bucket in rig.policy.iter_weights() for name, t in bucket.items()}
    moved = rig.device.bytes_in
    assert weights.keys() >= {"embed.weight", "mix.weight"}
    sizes = rig.policy._control.ask("sizes")
    state = sizes["params"] + sizes["buffers"] + sizes["optimizer"]
    assert moved == state + sizes["optimizer"], "refit really frees the optimizer, as its flag says"


def test_row_78_the_second_cycle_allocates_nothing_and_packs_copies(make: Make) -> None:
    """Others: pageable copies, tensor by tensor, into memory that is pinned anew each time.

    Here: from the second cycle on no host buffer is made, and a component's storages go in one call.
    By: exact buffers by storage, kept for ever (`offload/host_pool`), and packed copies (`offload/device`).
    """
    rig = make(base="resident")
    rig.train()
    pool = rig.session._run.pool

    def cycle() -> None:
        rig.policy.offload()
        with rig.policy.training_mode():
            pass

    cycle()
    made = pool.num_allocations
    calls: list[int] = []
    original = rig.device.copy_out
    rig.device.copy_out = lambda pairs: (calls.append(len(pairs)), original(pairs))[1]  # type: ignore[method-assign]
    with rig.policy.training_mode():
        rig.train()
    cycle()
    assert pool.num_allocations == made
    assert max(calls) > 3, "many storages a call"


@pytest.mark.parametrize("release", ["lazy", "eager"])
def test_row_79_what_fits_stays(make: Make, release: Any) -> None:
    """Others: sleeping and waking makes training slower although everything would fit.

    Here: under `release="lazy"` a loop that fits moves nothing after its first entry; eager is what was asked for.
    By: bytes leave when somebody needs the room (`driver/arbiter`).
    """
    rig = make(offload=rs.OffloadConfig(release=release), device=EmulatedDevice(capacity=1_000_000))
    with rig.policy.training_mode():
        rig.train()
    rig.device.bytes_in = rig.device.bytes_out = 0
    for _ in range(3):
        with rig.policy.logprob_mode():
            rig.policy.get_logprobs(make_batch())
        with rig.policy.training_mode():
            rig.policy.train(make_batch(), nll)
    moved = rig.device.bytes_in + rig.device.bytes_out
    assert (moved == 0) == (release == "lazy")


class DeepSpeedEngine(torch.nn.Module):
    """What DeepSpeed's engine looks like from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def test_row_80_what_cannot_be_served_is_refused_at_construction(make: Make) -> None:
    """Others: an unsupported ZeRO stage or backend is accepted, and its setting silently ignored.

    Here: an engine that owns its own placement, and a value that is no choice, are errors when they are given.
    By: checks at attach and in the configuration classes (`config`, `session`).
    """
    with pytest.raises(rs.UnsupportedError, match=r"[Dd]eep[Ss]peed"):
        make(DeepSpeedEngine(), None)
    with pytest.raises(rs.ConfigError, match="sometimes"):
        rs.OffloadConfig(release="sometimes")  # type: ignore[arg-type]
    with pytest.raises(rs.ConfigError):
        rs.Session(device_budget=-1)
