"""Refit is one primitive: its order, its buckets, what it skips, what it leaves behind, and how it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_rig import ONE, Model, Rig, loss_fn, prompts

import rl_session as rs
from rl_session.testing import EmulatedDevice, FakeEngine

Make = Callable[..., Rig]
LARGEST = 16 * 16 * 4
"""Bytes of the largest weight of the model."""


def serve(rig: Rig) -> None:
    """What the engine serves is what the policy has."""
    with rig.engine.awake() as engine:
        assert int(engine.generate(prompts())["fingerprint"][0]) == rig.weights_crc()


def gradients(rig: Rig) -> list[Any]:
    return [p.grad for p in rig.policy._control.group.worker.module.parameters()]  # type: ignore[attr-defined]


# -- the order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_the_policy_is_in_refit_while_it_is_pushed_and_gone_when_the_cache_wakes(release: str, make: Make) -> None:
    rig = make(capacity=4 * ONE, release=release, kv=3 * ONE)
    rig.train()
    seen: list[Any] = []
    update, wake = rig.fake.update_weights, rig.fake.wake

    def updating(buckets: Any) -> Any:
        seen.append(("push", rig.policy.mode, rig.policy.placement["params"], rig.policy.placement["optimizer"]))
        assert all(gradient is None for gradient in gradients(rig))
        return update(buckets)

    def waking(tags: Any) -> Any:
        seen.append((*tags, rig.policy.mode, rig.policy.placement["params"]))
        return wake(tags)

    rig.fake.update_weights, rig.fake.wake = updating, waking  # type: ignore[method-assign, assignment]
    assert rig.policy.refit(rig.engine) == 1
    assert seen == [
        ("weights", rs.Mode.REFIT, rs.Tier.DEVICE),
        ("push", rs.Mode.REFIT, rs.Tier.DEVICE, rs.Tier.HOST),
        ("kv_cache", rs.Mode.OFFLOADED, rs.Tier.HOST),
    ]
    assert rig.told() == ["woken weights", "published 1", "woken kv_cache"]
    assert rig.engine.state == "awake"
    assert rig.device.peak <= 4 * ONE
    entered = [r.event for r in rig.records("scope.entered") if r.event.mode == "refit"]
    assert [(e.via, e.outer_mode) for e in entered] == [("session", "offloaded")]
    serve(rig)


def test_the_record_of_a_push_says_who_where_what(make: Make) -> None:
    rig = make()
    rig.policy.refit()
    rig.train()
    rig.policy.refit()
    found = rig.records("weights.published")
    assert [(r.policy, r.event.engine, r.event.version, r.event.nbytes) for r in found] == [
        ("actor", "vllm", 1, ONE),
        ("actor", "vllm", 2, ONE),
    ]
    scopes = [r.scope_id for r in rig.records("scope.entered") if r.event.mode == "refit"]
    assert [r.scope_id for r in found] == scopes
    assert rig.engine.version == 2


@pytest.mark.parametrize(
    ("capacity", "given", "num"),
    [(None, None, 1), (None, LARGEST, 3), (None, 1, 5), (2 * ONE + 2 * LARGEST, None, 2), (2 * ONE, None, 3)],
)
def test_buckets_are_as_large_as_what_is_free_and_no_smaller_than_the_largest_weight(
    capacity: int | None, given: int | None, num: int, make: Make
) -> None:
    rig = make(capacity=capacity, kv=ONE)
    rig.policy.refit(bucket_nbytes=given)
    assert rig.fake.num_buckets == [num]
    assert rig.fake.pushed == [rig.weights_crc()]


def test_a_bucket_size_that_is_none_is_refused(make: Make) -> None:
    rig = make()
    with pytest.raises(rs.ConfigError):
        rig.policy.refit(bucket_nbytes=0)


# -- what is not sent ----------------------------------------------------------------------------------------------------------


def test_weights_that_the_engine_has_are_not_sent_again(make: Make) -> None:
    rig = make()
    rig.policy.refit()
    serve(rig)
    with rig.policy.logprob_mode() as policy:
        policy.get_logprobs(prompts())
    with rig.policy.training_mode():
        pass  # something may have been written: it is sent
    assert rig.policy.refit() == 2
    with rig.policy.logprob_mode():
        pass
    moved = rig.device.bytes_in
    assert rig.policy.refit() == 2
    assert rig.device.bytes_in == moved
    assert rig.fake.calls.count("update_weights") == 2
    assert [t for t in rig.told() if "ed " in t and "woken" not in t and "slept" not in t] == [
        "published 1",
        "published 2",
        "skipped 2",
    ]
    assert rig.engine.state == "awake"
    serve(rig)


@pytest.mark.parametrize("change", ["train", "load", "data", "critic"])
def test_weights_that_may_have_changed_are_sent(change: str, make: Make, tmp_path: Any) -> None:
    rig = make()
    module = rig.policy._control.group.worker.module  # type: ignore[attr-defined]
    rig.train()
    rig.policy.save_checkpoint(tmp_path / "before")
    rig.train()
    rig.policy.refit()
    if change == "train":
        rig.train()
    elif change == "load":
        rig.policy.load_checkpoint(tmp_path / "before")
    elif change == "data":
        rig.policy.switch("resident")
        module.head.weight.data.add_(1.0)
        rig.policy.offload()
    else:  # another participant that trains a parameter of the policy's
        other = Model(1)
        other.body.weight = module.body.weight
        critic = rig.session.attach(
            other, torch.optim.AdamW(other.parameters(), lr=0.1), name="critic", device=rig.device
        )
        critic.offload()
        rig.train(critic)
    assert rig.policy.refit() == 2
    serve(rig)


def test_discarded_weights_are_sent_though_they_are_the_same(make: Make) -> None:
    rig = make(sleep_level=2)
    rig.policy.refit()
    serve(rig)
    assert rig.engine.memory()["weights"] == "discarded"
    assert rig.policy.refit() == 2
    serve(rig)


def test_what_is_pushed_by_one_policy_is_not_taken_for_anothers(make: Make) -> None:
    rig = make()
    second = rig.session.attach(Model(7), name="second", device=rig.device)
    second.offload()
    assert (rig.policy.refit(), second.refit(), rig.policy.refit()) == (1, 2, 3)
    serve(rig)


# -- host copies -------------------------------------------------------------------------------------------------------------


def test_an_engine_that_takes_host_tensors_is_pushed_without_bringing_the_policy_in(make: Make) -> None:
    rig = make(fake={"accepts_host_weights": True})
    moved = rig.device.bytes_in
    rig.policy.refit()
    assert rig.device.bytes_in == moved
    assert [r.event.mode for r in rig.records("scope.entered")] == []
    serve(rig)
    rig.train()
    with rig.policy.offloaded():
        rig.policy.refit()
    serve(rig)
    with rig.policy.training_mode() as policy:  # on the device anyway
        policy.train(prompts(), loss_fn)
        rig.policy.refit()
    serve(rig)
    assert rig.engine.version == 3


def test_an_engine_that_does_not_has_them_brought_in_and_not_inside_offloaded(make: Make) -> None:
    rig = make()
    with rig.policy.offloaded():
        with pytest.raises(rs.NestingError, match=r"refit\(\) at test_refit.py:\d+ inside offloaded\(\)") as caught:
            rig.policy.refit()
        assert caught.value.remedy.startswith("policy.refit(engine)")
    assert rig.fake.calls == []
    rig.policy.refit()
    serve(rig)


# -- inside scopes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["training", "logprob", "refit"])
def test_in_a_scope_of_the_policy_the_engine_goes_back_to_sleep_and_the_scope_stands(mode: str, make: Make) -> None:
    rig = make(capacity=4 * ONE)
    rig.train()
    with getattr(rig.policy, f"{mode}_mode")():
        before = rig.policy.mode, rig.policy.placement
        rig.policy.refit()
        assert (rig.policy.mode, rig.policy.placement) == before
        assert rig.engine.state == "asleep"
    assert rig.told() == ["woken weights", "published 1", "slept 1"]
    assert rig.device.peak <= 4 * ONE
    serve(rig)


def test_an_open_step_survives_a_refit_inside_it(make: Make) -> None:
    def run(*, refits: bool) -> list[bytes]:
        rig = make(capacity=4 * ONE if refits else None)
        rig.train()
        with rig.policy.training_mode() as policy:
            step = policy.begin_step(global_valid_seqs=8, global_valid_tokens=32)
            step.forward_backward(prompts(), loss_fn)
            if refits:
                rig.policy.refit()
            step.forward_backward(prompts(), loss_fn)
            step.commit()
        return [t.numpy().tobytes() for t in rig.policy.state_dict().values()]

    assert run(refits=True) == run(refits=False)


def test_where_the_weights_would_be_discarded_at_once_a_refit_is_refused_before_anything_moves(make: Make) -> None:
    rig = make(sleep_level=2)
    with rig.policy.training_mode():
        with pytest.raises(rs.UsageError, match=r"sleep\(level=2\) discards the weights"):
            rig.policy.refit()
        assert rig.fake.calls == []
    resting = make(sleep_level=2, base="resident")
    with pytest.raises(rs.UsageError, match="sleep_level=1"):
        resting.policy.refit()
    resting.policy.switch("offloaded")
    resting.policy.refit()
    serve(resting)


def test_an_engine_in_its_own_scope_is_pushed_in_place_and_forgets_what_it_cached(make: Make) -> None:
    rig = make()
    with rig.engine.awake() as engine:
        first = engine.generate(prompts())
        rig.policy.refit(rig.engine)
        assert rig.policy.mode is rs.Mode.OFFLOADED
        second = engine.generate(prompts())
        assert int(first["fingerprint"][0]) != int(second["fingerprint"][0]) == rig.weights_crc()
        assert rig.engine.state == "awake"
    assert rig.fake.calls == [
        "wake weights kv_cache",
        "generate",
        "update_weights",
        "reset_cache",
        "generate",
        "sleep 1",
    ]


def test_in_a_scope_that_needs_only_the_weights_the_cache_stays_asleep(make: Make) -> None:
    rig = make()
    with rig.engine.awake(tags=["weights"]):
        rig.policy.refit(rig.engine)
        assert rig.engine.state == "weights"
    assert "reset_cache" not in rig.fake.calls


def test_in_generation_with_an_engine_on_the_device_there_is_no_refit(make: Make) -> None:
    rig = make()
    with rig.policy.generation_mode():
        with pytest.raises(rs.NestingError, match=r"inside generation_mode\(\)"):
            rig.policy.refit()
        rig.engine.generate(prompts())
    rig.policy.refit()


def test_another_engines_scope_on_the_device_is_in_the_way(make: Make) -> None:
    rig = make()
    second = rig.session.engine("second", FakeEngine(rig.device, weights=ONE))
    with second.awake(), pytest.raises(rs.NestingError, match="beside awake"):
        rig.policy.refit(rig.engine)
    assert (rig.engine.state, rig.policy.mode) == ("asleep", rs.Mode.OFFLOADED)
    rig.policy.refit(rig.engine)


@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_a_policy_that_rests_on_the_device_gets_it_back(release: str, make: Make) -> None:
    rig = make(capacity=5 * ONE, base="resident", release=release)
    rig.train()
    rig.policy.refit()
    assert rig.policy.mode is rs.Mode.RESIDENT
    assert rig.policy.placement["params"] is rs.Tier.DEVICE
    assert rig.engine.state == "asleep"
    with rig.policy.generation_mode() as policy:
        assert int(policy.generate(prompts())["fingerprint"][0]) == rig.weights_crc()
    assert rig.device.peak <= 5 * ONE


@pytest.mark.parametrize("own_device", [False, True])
def test_an_engine_with_devices_of_its_own_is_pushed_from_anywhere_and_stays_awake(
    own_device: bool, make: Make
) -> None:
    rig = make(apart=True, capacity=4 * ONE, device=EmulatedDevice(3 * ONE) if own_device else None)
    rig.policy.refit()
    assert rig.engine.state == "awake"
    with rig.engine.awake() as engine:
        with rig.policy.training_mode() as policy:
            policy.train(prompts(), loss_fn)
            rig.policy.refit()
            assert rig.policy.mode is rs.Mode.TRAINING
            engine.generate(prompts())
        serve(rig)
    assert rig.engine.version == 2
    assert rig.device.peak <= 4 * ONE


# -- failing -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["before", "half", "after"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_push_that_fails_half_way_leaves_weights_that_are_never_served(k: int, point: Any, make: Make) -> None:
    rig = make(release="lazy")
    rig.policy.refit()
    serve(rig)
    rig.train()
    rig.fake.fail("bucket", k, point)
    with pytest.raises(rs.EngineError, match=f"at bucket {k} of version 2"):
        rig.policy.refit(bucket_nbytes=LARGEST)
    assert (rig.engine.version, rig.policy.mode) == (1, rs.Mode.OFFLOADED)
    assert rig.warnings() == ["engine_push_failed"]
    with rig.engine.awake() as engine, pytest.raises(rs.StaleWeightsError, match="part old, part new"):
        engine.generate(prompts())
    rig.engine.sleep()
    with rig.engine.awake() as engine, pytest.raises(rs.StaleWeightsError):
        engine.generate(prompts())
    assert rig.policy.refit() == 2
    serve(rig)


def test_a_push_that_took_nothing_tears_nothing(make: Make) -> None:
    rig = make()
    rig.policy.refit()
    rig.train()
    rig.fake.fail("update_weights", 1, "before")
    with pytest.raises(rs.EngineError, match="at bucket 0"):
        rig.policy.refit()
    with rig.engine.awake() as engine:
        engine.generate(prompts())  # version 1, whole


def test_an_engine_that_takes_only_some_of_the_buckets_is_found_out(make: Make) -> None:
    rig = make()
    update = rig.fake.update_weights

    def lazy_engine(buckets: Any) -> Any:
        return update(iter([next(buckets)]))

    rig.fake.update_weights = lazy_engine  # type: ignore[method-assign]
    with pytest.raises(rs.EngineError, match="took 1 buckets and left some"):
        rig.policy.refit(bucket_nbytes=1)
    with rig.engine.awake(), pytest.raises(rs.StaleWeightsError):
        rig.engine.generate(prompts())


def test_a_cache_that_cannot_be_reset_makes_the_push_fail(make: Make) -> None:
    rig = make()
    with rig.engine.awake() as engine:
        rig.fake.fail("reset_cache", error=False)
        with pytest.raises(rs.EngineError, match=r"reset_cache\(\) returned False"):
            rig.policy.refit(rig.engine)
        with pytest.raises(rs.StaleWeightsError):
            engine.generate(prompts())
        rig.policy.refit(rig.engine)
        engine.generate(prompts())


def test_a_cache_that_finds_no_room_leaves_the_engine_asleep_with_the_new_weights(make: Make) -> None:
    rig = make(capacity=4 * ONE, kv=2 * ONE)
    guest = FakeEngine(rig.device, weights=2 * ONE, kv_nbytes=0)
    update = rig.fake.update_weights

    def crowded(buckets: Any) -> Any:
        done = update(buckets)
        guest.wake(["weights"])  # somebody the session knows nothing of
        return done

    rig.fake.update_weights = crowded  # type: ignore[method-assign]
    with pytest.raises(rs.DeviceMemoryError, match=r"wake\(\['kv_cache'\]\) failed"):
        rig.policy.refit()
    assert (rig.engine.state, rig.engine.version, rig.policy.mode) == ("asleep", 1, rs.Mode.OFFLOADED)
    guest.sleep(1)
    rig.fake.update_weights = update  # type: ignore[method-assign]
    assert rig.policy.refit() == 1  # it has them: nothing is sent
    serve(rig)


@pytest.mark.parametrize("mode", ["training", "logprob", None])
@pytest.mark.parametrize("operation", ["wake", "bucket"])
def test_a_failure_inside_a_scope_leaves_the_scope_as_it_was(mode: str | None, operation: Any, make: Make) -> None:
    rig = make(capacity=4 * ONE)
    rig.train()
    rig.fake.fail(operation, 1, "half")
    if mode is None:
        with pytest.raises(rs.EngineError):
            rig.policy.refit()
        assert rig.policy.mode is rs.Mode.OFFLOADED
    else:
        with getattr(rig.policy, f"{mode}_mode")():
            before = rig.policy.mode, rig.policy.placement
            with pytest.raises(rs.EngineError):
                rig.policy.refit()
            assert (rig.policy.mode, rig.policy.placement) == before
    assert rig.engine.state == "asleep"
    rig.policy.refit()
    serve(rig)


@pytest.mark.parametrize("operation", ["copy_in", "copy_out"])
def test_a_policy_that_fails_on_its_way_leaves_the_engine_alone(operation: Any, make: Make) -> None:
    rig = make()
    rig.train()
    if operation == "copy_in":
        rig.device.fail("copy_in")
        with pytest.raises(rs.TransitionError):
            rig.policy.refit()
        assert rig.fake.calls == []
    else:  # on the way back: the weights are over there, and the release stays pending
        rig.policy.refit()
        rig.engine.sleep()
        rig.train()
        rig.device.fail("free")
        with pytest.raises(rs.TransitionError):
            rig.policy.refit()
        assert rig.engine.version == 2
    assert rig.policy.mode is rs.Mode.OFFLOADED
    assert rig.engine.state == "asleep"
    rig.policy.refit()
    serve(rig)


def test_the_first_error_is_on_top_and_the_others_are_notes(make: Make) -> None:
    rig = make()
    rig.fake.fail("bucket")
    rig.fake.fail("sleep")
    rig.device.fail("free")
    with pytest.raises(rs.EngineError, match="update_weights") as caught:
        rig.policy.refit()
    notes = "\n".join(caught.value.__notes__)
    assert "and while putting engine 'vllm' back to sleep" in notes
    assert "and while leaving refit()" in notes
    rig.device.heal()
    rig.policy.refit()
    serve(rig)


# -- versions -------------------------------------------------------------------------------------------------------------------


def test_an_engine_serves_its_first_weights_unless_they_are_placeholders(make: Make) -> None:
    rig = make()
    with rig.engine.awake() as engine:
        engine.generate(prompts())
    assert rig.engine.version == 0
    dummy = make(fake={"requires_refit": True})
    with dummy.engine.awake() as engine, pytest.raises(rs.StaleWeightsError, match="placeholders"):
        engine.generate(prompts())
    dummy.policy.refit()
    serve(dummy)


def test_weights_that_sleep_discarded_are_not_served_until_a_push(make: Make) -> None:
    rig = make(sleep_level=2)
    rig.policy.refit()
    serve(rig)
    with rig.policy.generation_mode() as policy, pytest.raises(rs.StaleWeightsError) as caught:
        policy.generate(prompts())
    assert "nothing was pushed since" in str(caught.value)
    assert "policy.refit(engine)" in caught.value.remedy
    assert "generate" not in rig.fake.calls[-2:]
    with rig.engine.awake() as engine:
        rig.policy.refit(rig.engine)
        engine.generate(prompts())


def test_refit_waits_for_nobody_who_owns_the_policy_or_the_engine(make: Make) -> None:
    import threading

    rig = make()
    caught: list[Exception] = []

    def elsewhere() -> None:
        try:
            rig.policy.refit()
        except rs.OwnershipError as error:
            caught.append(error)

    for scope in (rig.policy.logprob_mode(), rig.engine.awake()):
        with scope:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
    assert len(caught) == 2
    rig.policy.refit()
