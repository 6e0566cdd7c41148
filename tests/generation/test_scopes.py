"""An engine is awake inside its scopes; who may be at work beside it; what its handle says."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_rig import ONE, Model, Rig, loss_fn, prompts

import rl_session as rs
from rl_session.testing import EmulatedDevice, FakeEngine

Make = Callable[..., Rig]


@pytest.mark.parametrize("release", ["eager", "lazy", "never"])
def test_an_engine_is_awake_in_its_scope_and_after_it_as_the_release_says(release: str, make: Make) -> None:
    rig = make(release=release)
    assert (rig.engine.state, rig.engine_bytes) == ("asleep", 0)
    with rig.engine.awake() as engine:
        assert (rig.engine.state, rig.engine_bytes) == ("awake", 3 * ONE)
        out = engine.generate(prompts(), num_tokens=2)
        assert out["generation_lengths"].tolist() == [2, 2, 2, 2]
    after = ("asleep", 0) if release == "eager" else ("awake", 3 * ONE)
    assert (rig.engine.state, rig.engine_bytes) == after
    assert rig.told() == ["woken weights+kv_cache", *(["slept 1"] if release == "eager" else [])]


def test_records_of_a_scope_carry_its_number_and_the_bytes(make: Make) -> None:
    rig = make()
    with rig.engine.awake():
        pass
    with rig.engine.awake():
        pass
    woken, slept = rig.records("engine.woken"), rig.records("engine.slept")
    assert [r.scope_id for r in woken] == [r.scope_id for r in slept]
    assert len({r.scope_id for r in woken}) == 2
    assert [r.event.nbytes for r in woken] == [3 * ONE, 3 * ONE]
    assert all("leaving awake() at test_scopes.py:" in r.event.reason for r in slept)


def test_an_async_scope_does_the_same(make: Make) -> None:
    rig = make()

    async def loop() -> Any:
        async with rig.engine.awake() as engine:
            assert rig.engine.state == "awake"
            async with rig.policy.offloaded(), rig.engine.awake():
                pass
            out = await asyncio.to_thread(engine.generate, prompts())
        async with rig.policy.generation_mode() as policy:
            assert rig.policy.mode is rs.Mode.GENERATION
            async with rig.engine.awake():
                await asyncio.to_thread(policy.generate, prompts())
        return out

    assert asyncio.run(loop())["output_ids"].shape == (4, 7)
    assert rig.engine.state == "asleep"
    assert rig.policy.mode is rs.Mode.OFFLOADED


def test_a_scope_is_entered_once(make: Make) -> None:
    rig = make()
    scope = rig.engine.awake()
    assert repr(scope) == "<awake() of engine 'vllm': not entered>"
    with scope:
        assert "active at test_scopes.py" in repr(scope)
        with pytest.raises(rs.ScopeReuseError, match=r"with engine\.awake\(\)"):
            scope.__enter__()
        assert rig.engine.state == "awake"
    with pytest.raises(rs.ScopeReuseError), scope:
        pytest.fail("entered")


def test_an_inner_scope_wakes_nothing_and_leaves_the_outer_one_what_it_needs(make: Make) -> None:
    rig = make()
    with rig.engine.awake(tags=["weights"]):
        assert (rig.engine.state, rig.engine_bytes) == ("weights", ONE)
        with rig.engine.awake(), rig.engine.awake():
            assert rig.engine.state == "awake"
            rig.engine.generate(prompts())
        assert rig.engine.state == "awake"  # sleep takes no tags
        with pytest.raises(rs.ModeError, match="no open scope asks for kv_cache"):
            rig.engine.generate(prompts())
    assert rig.engine.state == "asleep"
    assert rig.fake.calls == ["wake weights", "wake kv_cache", "generate", "sleep 1"]


def test_scopes_left_out_of_order_are_all_closed(make: Make) -> None:
    rig = make()
    outer, inner = rig.engine.awake(), rig.engine.awake()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(rs.ScopeOrderError, match="closed first: awake"):
        outer.__exit__(None, None, None)
    assert rig.engine.state == "asleep"
    inner.__exit__(None, None, None)
    with rig.engine.awake():
        rig.engine.generate(prompts())


@pytest.mark.parametrize("release", ["eager", "lazy"])
def test_generate_is_legal_in_a_scope_with_all_of_the_engine_awake_and_nowhere_else(release: str, make: Make) -> None:
    rig = make(release=release)
    with rig.engine.awake():
        rig.engine.generate(prompts())
    with pytest.raises(rs.ModeError, match=r"with engine\.awake\(\) as e"):
        rig.engine.generate(prompts())
    fresh = make(release=release)
    with fresh.engine.awake(tags="weights"), pytest.raises(rs.ModeError, match="kv_cache asleep"):
        fresh.engine.generate(prompts())
    assert [list(r.event.needs) for r in fresh.records("guard.rejected")] == [["kv_cache"]]
    assert fresh.fake.calls == ["wake weights", *(["sleep 1"] if release == "eager" else [])]
    with fresh.engine.awake():
        pass
    with (
        fresh.engine.awake(tags="weights"),
        pytest.raises(rs.ModeError),
    ):  # all of it may be awake, and none asks for it
        fresh.engine.generate(prompts())
    assert [list(r.event.needs) for r in fresh.records("guard.rejected")] == [["kv_cache"], ["kv_cache"]]
    assert "generate" not in fresh.fake.calls


def test_a_tag_that_the_engine_does_not_have_is_refused(make: Make) -> None:
    rig = make()
    for tags in (["weight"], []):
        with pytest.raises(rs.ConfigError, match="tags of this engine: weights, kv_cache"), rig.engine.awake(tags):
            pytest.fail("entered")
    assert rig.fake.calls == []


# -- generation_mode() -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["offloaded", "resident"])
def test_generation_with_an_engine_on_the_device_sends_the_policy_away_first(base: str, make: Make) -> None:
    rig = make(capacity=3 * ONE, base=base)
    before = rig.policy.placement
    with rig.policy.generation_mode(rig.engine) as policy:
        assert rig.policy.mode is rs.Mode.GENERATION
        assert rig.policy.placement["params"] is rs.Tier.HOST
        assert rig.engine.state == "awake"
        assert policy.generate(prompts())["fingerprint"][0] == rig.fake.fingerprint
        assert {"embed.weight", "head.bias"} <= policy.state_dict().keys()
    assert (rig.policy.mode, rig.policy.placement) == (rs.Mode(base), before)
    assert rig.engine.state == "asleep"
    assert rig.device.peak <= 3 * ONE


def test_inside_it_only_what_needs_no_weights_on_the_device_is_legal(make: Make, tmp_path: Any) -> None:
    rig = make()
    with rig.policy.generation_mode() as policy:
        policy.save_checkpoint(tmp_path / "checkpoint")
        for call in (
            lambda: rig.policy.get_logprobs(prompts()),
            lambda: rig.policy.load_checkpoint(tmp_path / "checkpoint"),
            lambda: list(rig.policy.iter_weights()),
        ):
            with pytest.raises(rs.ModeError) as caught:
                call()
            assert "after the block of generation_mode() has ended" in caught.value.remedy
        with pytest.raises(AttributeError, match="it has generate, save_checkpoint, state_dict"):
            policy.get_logprobs(prompts())
        with pytest.raises(rs.NestingError), rig.policy.logprob_mode():
            pytest.fail("entered")
        with rig.policy.offloaded(), rig.policy.offloaded():
            pass
        with rig.policy.generation_mode() as inner:
            inner.generate(prompts())
        policy.generate(prompts())
    assert rig.fake.calls == ["wake weights kv_cache", "generate", "generate", "sleep 1"]


def test_forwards_and_autograd_are_left_alone_in_it(make: Make) -> None:
    rig = make()
    with rig.policy.generation_mode():
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("how", ["handle", "engine", "none"])
def test_an_engine_is_named_by_its_handle_or_itself_or_not_at_all(how: str, make: Make) -> None:
    rig = make()
    which = {"handle": rig.engine, "engine": rig.fake, "none": None}[how]
    with rig.policy.generation_mode(which) as policy:  # type: ignore[arg-type]
        policy.generate(prompts())
    assert rig.policy.refit(which) == 1  # type: ignore[arg-type]


def test_with_two_engines_one_has_to_be_named_and_it_must_be_of_this_session(make: Make) -> None:
    rig, other = make(), make()
    rs.InProcessEngine(rig.policy)
    with pytest.raises(rs.UsageError, match="engines of this policy and its session: 2"):
        rig.policy.generation_mode()
    with pytest.raises(rs.ConfigError, match="no engine of this policy or its session"):
        rig.policy.generation_mode(other.engine)
    with pytest.raises(rs.ConfigError, match="engines: 'engine', 'vllm'"):
        rig.policy.refit(other.fake)


def test_a_policy_does_not_rest_with_an_external_engine(make: Make) -> None:
    rig = make()
    with pytest.raises(rs.UsageError, match=r"with policy\.generation_mode\(engine\)"):
        rig.policy.switch("generation")
    assert rig.policy.mode is rs.Mode.OFFLOADED


def test_an_in_process_engine_is_given_back_as_it_is_and_known_by_its_name(make: Make) -> None:
    rig = make()
    mine = rs.InProcessEngine(rig.policy, max_new_tokens=2, seed=1)
    assert rig.session.engine("own", mine) is mine is rig.session.engine("own")
    assert rig.session.engine("vllm") is rig.engine
    with rig.policy.generation_mode(mine) as policy:
        policy.get_logprobs(prompts())
        policy.generate(prompts())
    assert rig.policy.refit(mine) == 0
    assert [r.event.engine for r in rig.records("engine.woken")] == ["own"]


def test_an_external_engine_in_the_scope_of_an_in_process_one_sends_the_policy_away_and_brings_it_back(
    make: Make,
) -> None:
    rig = make()
    mine = rig.session.engine("own", rs.InProcessEngine(rig.policy, max_new_tokens=2, seed=1))
    with rig.policy.generation_mode(mine) as policy:
        with rig.policy.generation_mode(rig.engine) as away:
            assert rig.policy.placement["params"] is rs.Tier.HOST
            away.generate(prompts())
            with pytest.raises(rs.ModeError):
                mine.generate(prompts())
        assert rig.policy.placement["params"] is rs.Tier.DEVICE
        policy.generate(prompts())


# -- an engine with devices of its own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("own_device", [False, True])
def test_beside_an_engine_with_devices_of_its_own_everything_stays_legal(own_device: bool, make: Make) -> None:
    rig = make(apart=True, device=EmulatedDevice() if own_device else None)
    with rig.policy.generation_mode() as served, rig.policy.training_mode() as policy:
        served.generate(prompts())
        policy.train(prompts(), loss_fn)
        assert served.mode is rs.Mode.TRAINING
        served.generate(prompts())
    with rig.policy.training_mode() as policy, rig.policy.generation_mode() as served:
        served.generate(prompts())
        policy.train(prompts(), loss_fn)
    with rig.engine.awake() as engine, rig.policy.logprob_mode():
        engine.generate(prompts())
    assert rig.engine.state == ("asleep" if own_device else "awake")  # nobody needs the room on a device of its own


# -- policies and engines on one device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["training", "logprob", "refit"])
def test_a_policy_does_not_come_onto_the_device_of_an_engine_in_a_scope(mode: str, make: Make) -> None:
    rig = make()
    other = rig.session.attach(Model(1), name="critic", device=rig.device)
    other.offload()
    with rig.engine.awake():
        for policy in (rig.policy, other):
            with pytest.raises(rs.NestingError) as caught, getattr(policy, f"{mode}_mode")():
                pytest.fail("entered")
            text = str(caught.value)
            assert f"{mode}_mode() at test_scopes.py:" in text
            assert "beside awake() at test_scopes.py:" in text
            with pytest.raises(rs.NestingError):
                policy.switch("resident")
        with other.offloaded():
            rig.engine.generate(prompts())
    with getattr(other, f"{mode}_mode")():
        pass


@pytest.mark.parametrize("mode", ["training", "logprob"])
def test_an_engine_does_not_wake_beside_a_policy_at_work_on_its_device(mode: str, make: Make) -> None:
    rig = make()
    with getattr(rig.policy, f"{mode}_mode")():
        with pytest.raises(rs.NestingError) as caught, rig.engine.awake():
            pytest.fail("entered")
        assert f"beside {mode}_mode() at test_scopes.py:" in str(caught.value)
    assert rig.fake.calls == []
    with rig.policy.refit_mode(), rig.engine.awake(tags=["weights"]):  # how one pushes by hand
        rig.fake.update_weights(rig.policy.iter_weights())
    assert rig.fake.fingerprint == rig.weights_crc()


def test_an_engine_that_stayed_awake_beside_a_policy_is_entered_again_only_without_it(make: Make) -> None:
    rig = make(release="lazy")
    with rig.engine.awake():
        pass
    with rig.policy.logprob_mode():
        assert rig.engine.state == "awake"
        with pytest.raises(rs.NestingError), rig.engine.awake():
            pytest.fail("entered")


# -- owners and lost scopes ----------------------------------------------------------------------------------------------


def test_another_thread_may_generate_but_not_open_a_scope(make: Make) -> None:
    rig = make()
    seen: list[Any] = []

    def elsewhere() -> None:
        seen.append(rig.engine.generate(prompts()))
        with pytest.raises(rs.OwnershipError), rig.engine.awake():
            pytest.fail("entered")
        with pytest.raises(rs.OwnershipError):
            rig.engine.sleep()

    with rig.engine.awake():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(seen) == 1
        with pytest.raises(rs.ScopeError):
            rig.engine.sleep()


def test_a_scope_that_was_lost_is_closed_by_what_comes_next(make: Make) -> None:
    rig = make(capacity=4 * ONE)
    rig.policy.generation_mode().__enter__()
    gc.collect()
    rig.train()
    assert rig.engine.state == "asleep"
    rig.engine.awake().__enter__()
    gc.collect()
    rig.train()
    codes = [r.event.code for r in rig.records("warning")]
    assert codes.count("orphaned_scope") >= 2
    with rig.engine.awake():
        rig.engine.generate(prompts())


# -- into the session and out of it ---------------------------------------------------------------------------------------


def test_what_is_no_engine_is_refused_by_what_it_lacks(make: Make) -> None:
    rig = make()
    with pytest.raises(rs.ConfigError, match="missing: wake, sleep, update_weights, generate, bytes_needed, in_flight"):
        rig.session.engine("odd", object())  # type: ignore[call-overload]
    for wrong in (
        {"release": "often"},
        {"sleep_level": 3},
        {"on_busy": "wait"},
        {"drain_timeout_seconds": -1},
    ):
        with pytest.raises(rs.ConfigError, match=next(iter(wrong))):
            rig.session.engine("odd", FakeEngine(), **wrong)  # type: ignore[call-overload]
    with pytest.raises(rs.ConfigError, match="the name is taken"):
        rig.session.engine("vllm", FakeEngine())
    with pytest.raises(rs.ConfigError, match=r"engines: 'vllm'"):
        rig.session.engine("nobody")
    assert isinstance(rig.fake, rs.GenerationEngine)


def test_sizes_that_are_no_sizes_are_refused_before_anything_is_woken(make: Make) -> None:
    rig = make()
    rig.fake.declared["kv_cache"] = -5
    with pytest.raises(rs.EngineError, match="no number of bytes"), rig.engine.awake():
        pytest.fail("entered")
    rig.fake.declared.clear()
    rig.fake.fail("bytes_needed")
    with pytest.raises(rs.EngineError, match="injected"), rig.engine.awake():
        pytest.fail("entered")
    assert rig.fake.calls == []
    with rig.engine.awake():
        rig.engine.generate(prompts())


def test_an_engine_that_comes_awake_is_counted_from_the_start(make: Make) -> None:
    rig = make(capacity=10 * ONE)
    fake = FakeEngine(rig.device, weights=ONE, kv_nbytes=ONE)
    fake.wake(["weights", "kv_cache"])
    handle = rig.session.engine("second", fake)
    assert handle.state == "awake"
    assert rig.session.memory()["devices"][0]["in_use"] == 2 * ONE
    rig.train()  # eager: what is idle sleeps first
    assert (handle.state, fake.occupied) == ("asleep", 0)


def test_closing_puts_to_sleep_and_ends_everything(make: Make) -> None:
    rig = make()
    scope = rig.engine.awake()
    scope.__enter__()
    rig.engine.close()
    rig.engine.close()
    assert (rig.engine.health, rig.engine_bytes) == ("closed", 0)
    scope.__exit__(None, None, None)
    with pytest.raises(rs.ClosedError, match="close"), rig.engine.awake():
        pytest.fail("entered")
    with pytest.raises(rs.UsageError, match="engines of this policy and its session: 0"):
        rig.policy.generation_mode()
    again = rig.session.engine("vllm", rig.fake)
    with again.awake():
        again.generate(prompts())


def test_closing_the_session_puts_its_engines_to_sleep_so_that_models_go_back_to_the_device(make: Make) -> None:
    rig = make(capacity=3 * ONE, release="lazy")
    with rig.engine.awake():
        pass
    assert rig.engine_bytes == 3 * ONE
    rig.session.close()
    assert rig.engine_bytes == 0
    with pytest.raises(rs.ClosedError):
        rig.session.engine("vllm")


def test_the_handle_says_what_there_is(make: Make) -> None:
    rig = make(release="lazy")
    assert repr(rig.engine) == "<EngineHandle 'vllm': asleep, version 0, ok>"
    assert (rig.engine.name, rig.engine.engine, rig.engine.device) == ("vllm", rig.fake, rig.device)
    rig.fake.begin_requests(2)
    assert rig.engine.in_flight == 2
    rig.fake.finish_requests()
    with rig.engine.awake(tags=["weights"]):
        found = rig.engine.memory()
        assert (found["awake"], found["asleep"]) == ({"weights": ONE}, {"kv_cache": 2 * ONE})
        assert (found["weights"], found["releasable"]) == ("first", 0)
    assert rig.session.memory()["engines"]["vllm"]["releasable"] == ONE
    rig.engine.sleep()
    assert rig.engine_bytes == 0
