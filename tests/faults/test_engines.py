"""Faults with engines: woken in part, before there is room, pushed to while asleep, or serving what they should not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rig import Make, Rig, make_batch

import rl_session as rs
from rl_session.testing import EmulatedDevice, FakeEngine


def with_engine(
    make: Make, capacity: int | None = None, **options: Any
) -> tuple[Rig, FakeEngine, rs.EngineHandle, int]:
    """A policy at rest, an engine on its device with as many bytes of weights, and that number."""
    rig = make(device=EmulatedDevice(capacity))
    rig.policy.offload()
    nbytes = sum(t.numel() * t.element_size() for t in rig.policy.state_dict().values())
    fake = FakeEngine(rig.device, weights=nbytes, kv_nbytes=2 * nbytes)
    return rig, fake, rig.session.engine("vllm", fake, **options), nbytes


def test_row_09_an_engine_awake_in_part_serves_nothing(make: Make) -> None:
    """Others: corrupt text or a crash, because the wake named too few tags.

    Here: `generation_mode` wakes every declared tag; with a part asleep, `generate` is refused before the engine is asked.
    By: the engine's tags, kept by its state machine (`driver/engine_control`).
    """
    rig, fake, handle, _ = with_engine(make)
    with handle.awake(tags=["weights"]) as engine:
        with pytest.raises(rs.ModeError, match="kv_cache asleep"):
            engine.generate(make_batch())
        assert "generate" not in fake.calls
    with rig.policy.generation_mode() as generating:
        assert fake.awake_tags == {"weights", "kv_cache"}
        generating.generate(make_batch())


def test_row_11_weights_are_pushed_only_into_an_engine_that_is_awake(make: Make) -> None:
    """Others: a sync into a sleeping engine writes to unmapped memory, silently on CUDA.

    Here: `refit` wakes the weights first; pushed to while asleep, the fake engine crashes, and no way of the library leads there.
    By: one primitive with a fixed order (`driver/refit`).
    """
    rig, fake, handle, _ = with_engine(make)
    with pytest.raises(RuntimeError, match="asleep"):
        fake.update_weights(iter([]))
    fake.calls.clear()
    rig.policy.refit(handle)
    assert fake.calls == ["wake weights", "update_weights", "wake kv_cache"]
    with handle.awake() as engine:
        assert engine.generate(make_batch())["fingerprint"][0] == fake.pushed[-1]


@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_row_65_room_is_made_before_the_engine_wakes(make: Make, release: Any) -> None:
    """Others: out of memory in the wake, because the policy had not left yet.

    Here: no step of the loop goes beyond what its largest phase needs, on a device that has exactly that.
    By: the arbiter, asked before every move and every wake (`driver/arbiter`).
    """
    roomy, _, _, nbytes = with_engine(make)
    with roomy.policy.training_mode():
        roomy.train()
    largest = max(roomy.device.peak, 3 * nbytes)
    session = rs.Session(release=release, verify="checksum")
    rig = make(session=session, device=EmulatedDevice(largest))
    rig.policy.offload()
    handle = session.engine("vllm", FakeEngine(rig.device, weights=nbytes, kv_nbytes=largest - nbytes))
    for _ in range(2):
        rig.policy.refit(handle)
        with rig.policy.generation_mode() as generating:
            generating.generate(make_batch())
        with rig.policy.logprob_mode() as policy:
            policy.get_logprobs(make_batch())
        with rig.policy.training_mode():
            rig.train()
    assert rig.device.peak <= largest
    session.close()


def test_row_74_discarded_weights_are_never_served(make: Make) -> None:
    """Others: text made of garbage after a level 2 sleep, because nothing was pushed before the wake.

    Here: a typed error until a push has succeeded; the engine is not asked, and its poisoned weights never show.
    By: the state of an engine's weights, checked at every call (`driver/engine_control`).
    """
    rig, fake, handle, _ = with_engine(make, sleep_level=2)
    rig.policy.refit(handle)
    with handle.awake() as engine:
        assert not torch.isnan(engine.generate(make_batch())["logprobs"]).any()
    with handle.awake() as engine:
        assert torch.isnan(fake.generate(make_batch())["logprobs"]).any()
        with pytest.raises(rs.StaleWeightsError, match="discarded"):
            engine.generate(make_batch())
        rig.policy.refit(handle)
        assert not torch.isnan(engine.generate(make_batch())["logprobs"]).any()


@pytest.mark.parametrize("point", ["before", "half", "after"])
def test_a_level_2_sleep_that_fails_leaves_weights_that_are_not_served(make: Make, point: Any) -> None:
    rig, fake, handle, _ = with_engine(make, sleep_level=2)
    rig.policy.refit(handle)
    fault = fake.fail("sleep", point=point)
    with pytest.raises(rs.EngineError), handle.awake() as engine:
        assert engine.generate(make_batch())["fingerprint"][0] == fake.pushed[-1]
    assert fault.fired
    with handle.awake() as engine, pytest.raises(rs.StaleWeightsError, match="discarded"):
        engine.generate(make_batch())
    rig.policy.refit(handle)
    with handle.awake() as engine:
        assert not torch.isnan(engine.generate(make_batch())["logprobs"]).any()
