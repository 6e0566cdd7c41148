"""The fake engine and the device under it: real bytes, honest failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_rig import prompts

import rl_session as rs
from rl_session.testing import EmulatedDevice, FakeEngine, InjectedFault


def test_bytes_that_something_occupies_count_like_any_others() -> None:
    device = EmulatedDevice(100)
    device.poison()
    block = device.occupy(60)
    assert (device.resident_bytes, device.peak, device.free_bytes()) == (60, 60, 40)
    assert block.tolist() == [255] * 60
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 50 bytes, 60 of 100"):
        device.occupy(50)
    device.vacate(block)
    device.vacate(block)
    assert (device.resident_bytes, block.untyped_storage().nbytes()) == (0, 0)
    dropped = device.occupy(10)
    del dropped
    assert (device.resident_bytes, device.peak) == (0, 60)
    with pytest.raises(rs.ConfigError):
        device.occupy(-1)
    device.fail("allocate")
    with pytest.raises(InjectedFault):
        device.occupy(1)


def engine(**arguments: Any) -> FakeEngine:
    weights = {"a": torch.arange(8.0), "b": torch.ones(3)}
    return FakeEngine(EmulatedDevice(200), weights=weights, kv_nbytes=100, **arguments)


def test_it_holds_what_it_says_and_keeps_weights_through_level_one() -> None:
    fake = engine()
    first = fake.fingerprint
    assert fake.bytes_needed(["weights"]) == 44
    fake.wake(["weights"])
    assert (fake.occupied, fake.awake_tags, fake.fingerprint) == (44, {"weights"}, first)
    fake.wake(["weights", "kv_cache"])
    assert fake.device is not None
    assert fake.device.resident_bytes == fake.occupied == 144
    fake.sleep(1)
    fake.sleep(1)
    assert (fake.device.resident_bytes, fake.fingerprint) == (0, first)


def test_level_two_leaves_poison() -> None:
    fake = engine()
    fake.wake(fake.tags)
    before = fake.generate(prompts())
    fake.sleep(2)
    assert fake.fingerprint == -1
    fake.wake(fake.tags)
    after = fake.generate(prompts())
    assert torch.isnan(after["logprobs"]).any()
    assert not torch.isnan(before["logprobs"]).any()
    assert not torch.equal(after["output_ids"], before["output_ids"])


def test_what_it_generates_tells_the_weights() -> None:
    fake = engine(accepts_host_weights=True)
    fake.wake(fake.tags)
    first, again = fake.generate(prompts(), num_tokens=3), fake.generate(prompts(), num_tokens=3)
    assert torch.equal(first["output_ids"], again["output_ids"])
    fake.update_weights(iter([{"a": torch.zeros(8)}, {"b": torch.ones(3)}]))
    changed = fake.generate(prompts(), num_tokens=3)
    assert not torch.equal(first["output_ids"], changed["output_ids"])
    assert (fake.num_buckets, fake.pushed) == ([2], [fake.fingerprint])
    fake.fail("bucket", 1, "half")
    with pytest.raises(InjectedFault):
        fake.update_weights(iter([{"a": torch.ones(8)}]))
    torn = fake.fingerprint
    assert torn not in fake.pushed
    fake.update_weights(iter([{"a": torch.ones(8)}, {"b": torch.ones(3)}]))
    assert fake.fingerprint != torn


def test_it_crashes_as_a_real_one_would() -> None:
    fake = engine()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fake.generate(prompts())
    with pytest.raises(RuntimeError, match="pushed to an engine that is asleep"):
        fake.update_weights(iter([]))
    fake.wake(fake.tags)
    with pytest.raises(RuntimeError, match="a is on the host"):
        fake.update_weights(iter([{"a": torch.ones(8)}]))
    with pytest.raises(RuntimeError, match="does not fit"):
        engine_with_room = engine(accepts_host_weights=True)
        engine_with_room.wake(["weights"])
        engine_with_room.update_weights(iter([{"c": torch.ones(8)}]))


def test_faults_fire_once_at_their_call_and_point() -> None:
    fake = engine()
    fault = fake.fail("wake", 2, "half", error=False)
    assert fake.wake(["weights"]) is None
    fake.sleep(1)
    assert fake.wake(["weights", "kv_cache"]) is False
    assert (fake.awake_tags, fault.fired) == ({"weights"}, True)
    assert fake.wake(["kv_cache"]) is None
    fake.fail("sleep", 1, "half", OSError)
    with pytest.raises(OSError, match="injected: sleep 1, half"):
        fake.sleep(1)
    assert fake.awake_tags == {"weights"}
    for wrong in ({"operation": "nap"}, {"operation": "wake", "k": 0}, {"operation": "wake", "point": "middle"}):
        with pytest.raises(rs.ConfigError, match="operations: wake"):
            fake.fail(**wrong)  # type: ignore[arg-type]


def test_requests_are_in_flight_as_long_as_one_says() -> None:
    fake = engine()
    fake.begin_requests(2)
    assert (fake.in_flight, fake.in_flight, fake.wait_for_idle(0)) == (2, 2, False)
    fake.finish_requests()
    assert fake.wait_for_idle(0)
    fake.drain_in(2)
    assert [fake.in_flight for _ in range(3)] == [2, 1, 0]
    fake.drain_in(2)
    assert fake.wait_for_idle(0)
    assert fake.in_flight == 0
