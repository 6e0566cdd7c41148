"""Legacy methods that raise, wakes that say False: what was in effect before stands, or the object says that it is faulted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from legacy_model import CPU, FREED, GPU, NONE, LegacyGeneration, LegacyPolicy, LegacyTQPolicy, LegacyValue

import rl_session as rs
from rl_session.adapters.nemo_rl import scopes, share

METHODS = {
    "policy": ("prepare_for_training", "prepare_for_lp_inference", "offload_before_refit", "offload_after_refit"),
    "value": ("prepare_for_training", "prepare_for_inference", "finish_inference", "finish_training"),
}
MODES = {
    "policy": ("training_mode", "logprob_mode", "refit_mode", "offloaded"),
    "value": ("training_mode", "inference_mode", "offloaded"),
}
ASLEEP = {"weights": CPU, "kv_cache": NONE}


def make(kind: str, backend: str) -> Any:
    return LegacyPolicy(backend) if kind == "policy" else LegacyValue(backend)


def outcome(enter: Callable[[], Any], then: Callable[[], None]) -> rs.TransitionError | None:
    """Enter and leave a scope, with ``then`` for a body; the error of its entry, if there was one."""
    try:
        with enter():
            then()
    except rs.TransitionError as error:
        return error
    return None


@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize("base", ["resident", "offloaded"])
@pytest.mark.parametrize("backend", ["dtensor_v2", "megatron"])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_an_entry_that_fails_is_undone(kind: str, backend: str, base: Any, when: str, session: rs.Session) -> None:
    for mode in MODES[kind]:
        for method in METHODS[kind]:
            legacy = make(kind, backend)
            mine = scopes(legacy, session=session, base=base, found="device")
            with mine.training_mode():  # from here on it is at rest, and everything is known
                legacy.train()
            before = dict(legacy.state)
            legacy.fail(method, when=when)
            legacy.calls()
            error = outcome(getattr(mine, mode), then=legacy.heal)
            if error is not None:
                assert f"{method}() failed" in error.attempted
                assert "injected" in error.cause
                assert legacy.state == before
            assert mine.health == "ok"
            legacy.heal()
            with mine.training_mode():
                legacy.train()
            assert legacy.state == before
            mine.close()


@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_an_exit_that_fails_closes_the_scope_and_is_tried_again(kind: str, when: str, session: rs.Session) -> None:
    legacy = make(kind, "megatron")
    mine = scopes(legacy, session=session, base="offloaded")
    with pytest.raises(rs.TransitionError), mine.training_mode():
        legacy.train()
        for method in ("offload_after_refit", "finish_training"):
            legacy.fail(method, when=when)
    assert mine.mode is rs.Mode.OFFLOADED
    assert legacy.state["params"] == GPU
    with mine.offloaded():
        assert legacy.state["params"] == CPU


def test_the_bodys_error_wins(session: rs.Session) -> None:
    policy = LegacyPolicy("megatron")
    with (
        pytest.raises(ValueError, match="mine") as raised,
        scopes(policy, session=session, base="offloaded").training_mode(),
    ):
        policy.fail("offload_after_refit")
        raise ValueError("mine")
    assert "offload_after_refit() failed" in raised.value.__notes__[0]


def test_a_way_back_that_fails_faults_until_recovered(session: rs.Session, audit_path: Path) -> None:
    policy = LegacyPolicy("megatron")
    mine = scopes(policy, session=session, base="offloaded", found="host")
    policy.offload_to_cpu()
    policy.fail("prepare_for_training", when="half")
    policy.fail("offload_after_refit")
    with pytest.raises(rs.FaultedError, match="so did the way back") as raised, mine.training_mode():
        pass
    assert raised.value.remedy.startswith("scopes(policy).recover()")
    assert mine.health == "faulted"
    with pytest.raises(rs.FaultedError), mine.logprob_mode():
        pass
    mine.recover()
    assert mine.health == "ok"
    assert policy.state == {"params": CPU, "buffers": NONE, "grads": FREED, "optimizer": CPU}
    with mine.training_mode():
        policy.train()
    names = [record.name for record in rs.read_audit(audit_path)]
    assert names.count("policy.faulted") == names.count("policy.recovered") == 1


def test_the_gradients_of_an_open_step_survive_a_failed_entry(session: rs.Session) -> None:
    policy = LegacyTQPolicy(offload_optimizer_for_logprob=True)
    mine = scopes(policy, session=session, found="device")
    with mine.training_mode() as handle:
        handle.begin_train_step()
        handle.train_microbatches_from_meta()
    for when in ("before", "half", "after"):
        policy.fail("prepare_for_training", when=when)
        with pytest.raises(rs.TransitionError), mine.training_mode():
            pass
    with mine.training_mode() as handle:
        handle.train_microbatches_from_meta()
        assert handle.finish_train_step() == 2


def test_an_interrupt_is_undone_too(session: rs.Session) -> None:
    policy = LegacyPolicy("megatron")
    mine = scopes(policy, session=session, base="offloaded", found="host")
    policy.offload_to_cpu()
    policy.fail("prepare_for_training", when="half", error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), mine.training_mode():
        pass
    assert policy.state["params"] == CPU
    assert mine.health == "ok"


# -- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize("backend", ["vllm", "trtllm", "sglang", "megatron"])
def test_a_wake_that_fails_or_says_false_is_an_error(backend: str, when: str, session: rs.Session) -> None:
    engine = LegacyGeneration(backend)
    mine = scopes(engine, session=session)
    engine.fail("prepare_for_generation", when=when)
    said = "returned False" if backend in ("vllm", "trtllm") else "it raised"
    with pytest.raises(rs.EngineError, match=said), mine.awake():
        pytest.fail("the body ran")
    assert engine.state == ASLEEP
    assert mine.health == "ok"
    with mine.awake():
        engine.generate()


@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_sleep_that_fails_is_an_error_and_is_tried_again(backend: str, when: str, session: rs.Session) -> None:
    engine = LegacyGeneration(backend)
    mine = scopes(engine, session=session)
    with pytest.raises(rs.EngineError, match="finish_generation"), mine.awake():
        engine.fail("finish_generation", when=when)
    assert mine.mode is rs.Mode.OFFLOADED
    engine.calls()
    mine.offload()
    assert engine.calls() == ["finish_generation()"]
    assert engine.state == ASLEEP


def test_an_engine_that_neither_wakes_nor_sleeps_is_faulted(session: rs.Session) -> None:
    engine = LegacyGeneration()
    mine = scopes(engine, session=session)
    engine.fail("prepare_for_generation", when="half")
    engine.fail("finish_generation")
    with pytest.raises(rs.FaultedError, match="finish_generation"), mine.awake():
        pass
    assert mine.health == "faulted"
    mine.recover()
    assert engine.state == ASLEEP
    with mine.awake():
        engine.generate()


def test_a_tenant_that_cannot_leave_keeps_the_newcomer_out(session: rs.Session) -> None:
    policy, engine = LegacyPolicy("megatron"), LegacyGeneration()
    share(policy, engine, session=session)
    with scopes(engine).awake():
        pass
    engine.fail("finish_generation")
    policy.calls()
    with pytest.raises(rs.EngineError, match="finish_generation"), scopes(policy).training_mode():
        pass
    assert policy.calls() == []
    with scopes(policy).training_mode():
        policy.train()
    assert engine.state == ASLEEP
