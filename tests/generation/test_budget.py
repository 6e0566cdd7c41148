"""Engines count in the budget of a device: room is made before they wake, and they make room for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_rig import ONE, Model, Rig, prompts
from torch import Tensor

import rl_session as rs
from rl_session.testing import EmulatedDevice, FakeEngine

Make = Callable[..., Rig]


def steps(rig: Rig, num: int = 3) -> list[Tensor]:
    """A GRPO loop: refit, generate, log-probabilities, train."""
    out: list[Tensor] = []
    for _ in range(num):
        rig.policy.refit(rig.engine)
        with rig.policy.generation_mode(rig.engine) as policy:
            rollout = policy.generate(prompts(), num_tokens=2)
        assert int(rollout["fingerprint"][0]) == rig.weights_crc()
        batch = {"input_ids": rollout["output_ids"], "input_lengths": rollout["unpadded_sequence_lengths"]}
        out += [rollout["output_ids"], rollout["logprobs"]]
        with rig.policy.logprob_mode() as policy:
            out.append(policy.get_logprobs(batch)["logprobs"])
        out.append(rig.train())
    return out


# Not level 2 with a policy that rests on the device: it comes back there, the engine sleeps, and the weights would be lost.
@pytest.mark.parametrize(("base", "level"), [("offloaded", 1), ("offloaded", 2), ("resident", 1)])
@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_a_device_that_holds_only_the_largest_phase_is_enough_and_losses_are_the_same(
    release: str, level: int, base: str, make: Make
) -> None:
    want = steps(make(apart=True))
    rig = make(capacity=4 * ONE, release=release, sleep_level=level, kv=3 * ONE, base=base)
    found = steps(rig)
    assert len(found) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert rig.device.peak <= 4 * ONE
    assert not any(torch.isnan(t).any() for t in found if t.is_floating_point())


@pytest.mark.parametrize("capacity", [4, 5, 6, 7, 9, 12])
def test_losses_are_the_same_however_tight_the_device_is(capacity: int, make: Make) -> None:
    want = steps(make(apart=True))
    for release in ("eager", "lazy"):
        found = steps(make(capacity=capacity * ONE, release=release))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), release


def test_under_lazy_release_what_fits_never_moves(make: Make) -> None:
    rig = make(capacity=20 * ONE, release="lazy")
    steps(rig, 1)
    moved = rig.device.bytes_in, rig.device.bytes_out
    calls = len(rig.fake.calls)
    steps(rig, 2)
    assert (rig.device.bytes_in, rig.device.bytes_out) == moved
    assert rig.fake.calls[calls:] == ["update_weights", "reset_cache", "generate"] * 2


def test_room_is_made_before_the_engine_wakes_and_no_more_than_it_takes(make: Make) -> None:
    rig = make(capacity=4 * ONE, release="lazy", kv=ONE)
    rig.train()
    assert rig.device.resident_bytes == 3 * ONE  # its gradients were consumed
    with rig.engine.awake():
        # Of what is dirty the smaller one leaves first: the weights, then nothing else is needed.
        assert rig.policy.placement["params"] is rs.Tier.HOST
        assert rig.policy.placement["optimizer"] is rs.Tier.DEVICE
        assert rig.engine_bytes == 2 * ONE
    assert rig.device.peak <= 4 * ONE


def test_a_wake_that_cannot_fit_fails_before_the_engine_is_asked_and_says_who_holds_the_bytes(make: Make) -> None:
    rig = make(capacity=3 * ONE, release="lazy")
    other = rig.session.attach(Model(1), name="critic", device=rig.device)
    other.switch("resident")
    with pytest.raises(rs.DeviceMemoryError) as caught, rig.engine.awake():
        pytest.fail("entered")
    assert rig.fake.calls == []
    text = str(caught.value)
    assert f"needed: {3 * ONE} bytes; budget: {3 * ONE}, in use: {ONE}" in text
    assert f"policy 'critic' (rests resident): params {ONE}" in text
    assert rig.engine.state == "asleep"
    other.offload()
    with rig.engine.awake():
        rig.engine.generate(prompts())


def test_an_idle_engine_leaves_when_a_policy_needs_the_room_and_not_before(make: Make) -> None:
    rig = make(capacity=7 * ONE, release="lazy")
    with rig.engine.awake():
        pass
    with rig.policy.logprob_mode():
        assert rig.engine_bytes == 3 * ONE  # both fit
    rig.train()
    assert rig.engine_bytes == 3 * ONE
    smaller = make(capacity=6 * ONE, release="lazy")
    with smaller.engine.awake():
        pass
    with smaller.policy.logprob_mode():
        assert smaller.engine_bytes == 3 * ONE
    smaller.train()
    assert smaller.engine_bytes == 0
    assert "evicted for policy 'actor': entering training_mode()" in smaller.records("engine.slept")[0].event.reason


def test_under_eager_release_an_idle_engine_sleeps_before_a_policy_comes(make: Make) -> None:
    rig = make(capacity=20 * ONE)
    rig.policy.refit(rig.engine)
    assert rig.engine_bytes == 3 * ONE
    with rig.policy.offloaded():
        assert rig.engine_bytes == 3 * ONE  # that one needs no device
    with rig.policy.logprob_mode():
        assert rig.engine_bytes == 0


def test_an_engine_in_a_scope_and_one_that_is_kept_awake_are_never_taken(make: Make) -> None:
    rig = make(capacity=4 * ONE, release="lazy")
    with rig.engine.awake():
        with pytest.raises(rs.DeviceMemoryError, match=r"in awake\(\) at test_budget.py"):
            rig.session.make_room(2 * ONE)
        assert rig.engine_bytes == 3 * ONE
    kept = make(capacity=4 * ONE, release="never")
    with kept.engine.awake():
        pass
    with pytest.raises(rs.DeviceMemoryError, match=r"engine 'vllm' \(idle\)"):
        kept.session.make_room(2 * ONE)
    assert kept.engine_bytes == 3 * ONE


def test_make_room_and_memory_know_engines(make: Make) -> None:
    rig = make(capacity=4 * ONE, release="lazy")
    with rig.engine.awake():
        pass
    held = rig.session.memory()
    assert held["devices"] == [{"device": repr(rig.device), "budget": 4 * ONE, "in_use": 3 * ONE}]
    assert held["engines"]["vllm"]["awake"] == {"weights": ONE, "kv_cache": 2 * ONE}
    rig.session.make_room(ONE)
    assert rig.engine_bytes == 3 * ONE
    rig.session.make_room(2 * ONE)
    assert rig.engine_bytes == 0
    assert rig.session.memory()["devices"][0]["in_use"] == 0


def test_the_one_used_least_recently_leaves_be_it_engine_or_policy(make: Make) -> None:
    rig = make(capacity=6 * ONE, release="lazy")
    a, b = (rig.session.attach(Model(seed), name=name, device=rig.device) for seed, name in ((1, "a"), (2, "b")))
    for policy in (a, b):
        policy.offload()
    second = rig.session.engine("second", FakeEngine(rig.device, weights=ONE, kv_nbytes=ONE))
    for scope in (a.logprob_mode(), rig.engine.awake(), second.awake()):  # a, 3, 2: full
        with scope:
            pass
    with a.logprob_mode():  # the engine is the oldest now
        pass
    with b.logprob_mode():
        pass
    assert a.placement["params"] is rs.Tier.DEVICE
    assert (rig.engine.state, second.state) == ("asleep", "awake")


def test_two_engines_share_a_device(make: Make) -> None:
    rig = make(capacity=4 * ONE)
    second = rig.session.engine("second", FakeEngine(rig.device, weights=ONE, kv_nbytes=ONE), release="lazy")
    with second.awake():
        pass
    with rig.engine.awake():
        assert second.state == "asleep"
        with pytest.raises(rs.DeviceMemoryError), second.awake():
            pytest.fail("entered")
        rig.engine.generate(prompts())


def test_sizes_may_be_given_instead_of_asked_for(make: Make) -> None:
    rig = make(capacity=4 * ONE, release="lazy", bytes_needed={"weights": ONE, "kv_cache": ONE})
    with rig.engine.awake():
        assert rig.session.memory()["devices"][0]["in_use"] == 2 * ONE  # as declared, not as it is
        assert rig.device.resident_bytes == 3 * ONE


def test_an_engine_that_takes_more_than_it_says_gets_no_room_and_is_put_back(make: Make) -> None:
    rig = make(capacity=2 * ONE, bytes_needed={"weights": ONE, "kv_cache": ONE})
    with pytest.raises(rs.DeviceMemoryError, match="bytes_needed= of what the engine really takes"), rig.engine.awake():
        pytest.fail("entered")
    assert (rig.engine.state, rig.engine_bytes) == ("asleep", 0)
    assert rig.fake.calls == ["wake weights kv_cache", "sleep 1"]


def test_an_engine_of_another_device_asks_nobody_for_room(make: Make) -> None:
    rig = make(capacity=4 * ONE, release="lazy")
    rig.train()
    moved = rig.device.bytes_out
    other = rig.session.engine("apart", FakeEngine(EmulatedDevice(3 * ONE), weights=ONE, kv_nbytes=2 * ONE))
    with other.awake():
        other.generate(prompts())
    assert rig.device.bytes_out == moved


def test_an_engine_and_a_policy_may_have_one_name(make: Make) -> None:
    rig = make(capacity=4 * ONE, release="lazy", kv=ONE)
    twin = rig.session.engine("actor", FakeEngine(rig.device, weights=ONE, kv_nbytes=ONE))
    for scope in (rig.policy.logprob_mode(), twin.awake()):
        with scope:
            pass
    with rig.engine.awake():  # the policy is the older one, and enough: its twin stays
        assert (twin.state, rig.policy.placement["params"]) == ("awake", rs.Tier.HOST)
    for scope in (rig.policy.logprob_mode(), rig.policy.logprob_mode(), rig.engine.awake()):
        with scope:
            pass
    assert (twin.state, rig.policy.placement["params"]) == ("asleep", rs.Tier.DEVICE)
