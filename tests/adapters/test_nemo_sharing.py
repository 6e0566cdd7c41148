"""Tenants of the same GPUs: the loops of the legacy contract written with scopes, and no legacy call that is not needed.

The GPUs of the model refuse two tenants at once, so a missing eviction is an out-of-memory error here as it is there.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from legacy_model import (
    CPU,
    FREED,
    GPU,
    NONE,
    DeviceFullError,
    Gpus,
    LegacyGeneration,
    LegacyPolicy,
    LegacyTQPolicy,
    LegacyValue,
)

import rl_session as rs
from rl_session.adapters.nemo_rl import scopes, share

COMPUTE = {"get_logprobs()", "train()", "generate()", "get_values()", "get_reference_policy_logprobs()"}
ASLEEP = {"weights": CPU, "kv_cache": NONE}
AWAKE = {"weights": GPU, "kv_cache": GPU}


class Actors:
    """The objects of a colocated run, off the device as after its setup, and one list of the lifecycle calls on all of them."""

    def __init__(self, backend: str = "megatron", engine: str = "vllm", *, value: bool = False, **flags: Any) -> None:
        gpus = Gpus()
        cls = LegacyTQPolicy if flags.pop("split", False) else LegacyPolicy
        self.policy = cls(backend, gpus=gpus, **flags)
        self.policy.offload_to_cpu()
        self.generation = LegacyGeneration(engine, gpus=gpus, policy=self.policy if engine == "megatron" else None)
        self.value = LegacyValue(backend, gpus=gpus, **flags)
        self.value.finish_training()
        log: list[str] = []
        for letter, legacy in (("P", self.policy), ("V", self.value), ("G", self.generation)):
            legacy.log = _Prefixed(log, letter)  # type: ignore[assignment]
        self.log = log

    def lifecycle(self) -> list[str]:
        """The lifecycle calls since the last time this was asked."""
        found = [call for call in self.log if call[2:] not in COMPUTE]
        self.log.clear()
        return found

    def everything(self) -> list[Any]:
        return [self.policy, self.value, self.generation]


class _Prefixed(list[str]):
    def __init__(self, log: list[str], letter: str) -> None:
        super().__init__()
        self._log, self._letter = log, letter

    def append(self, item: str) -> None:
        self._log.append(f"{self._letter}.{item}")


def grpo_step(run: Actors) -> None:
    """Trace D.1 of the contract, with scopes."""
    scopes(run.policy).refit(run.generation, lambda: None)
    with scopes(run.generation).awake():
        run.generation.generate()
    with scopes(run.policy).logprob_mode():
        run.policy.get_logprobs()
        run.policy.get_reference_policy_logprobs()
    with scopes(run.policy).training_mode():
        run.policy.train()


GRPO_LEGACY = [
    "P.offload_before_refit()",
    "G.prepare_for_generation(tags=['weights'])",
    "P.offload_after_refit()",
    "G.prepare_for_generation(tags=['kv_cache'])",
    "G.finish_generation()",
    "P.prepare_for_lp_inference()",
    "P.prepare_for_training()",
]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("lp", [False, True])
def test_a_colocated_grpo_step_makes_the_legacy_calls_and_no_other(engine: str, lp: bool, session: rs.Session) -> None:
    run = Actors(engine=engine, offload_optimizer_for_logprob=lp)
    share(run.policy, run.generation, session=session)
    grpo_step(run)
    run.lifecycle()
    for _ in range(2):
        grpo_step(run)
        assert run.lifecycle() == GRPO_LEGACY


def test_on_dtensor_too(session: rs.Session) -> None:
    run = Actors("dtensor_v1")
    share(run.policy, run.generation, session=session)
    for _ in range(2):
        grpo_step(run)
        assert len(run.lifecycle()) <= len(GRPO_LEGACY) + 2  # the first step finds out where everything is
    grpo_step(run)
    assert run.lifecycle() == GRPO_LEGACY


def test_a_retry_of_dynamic_sampling_calls_nothing(session: rs.Session) -> None:
    """Waste 2 of the contract: sleep and wake for every retry."""
    run = Actors()
    share(run.policy, run.generation, session=session)
    scopes(run.policy).refit(run.generation, lambda: None)
    run.lifecycle()
    for _ in range(4):
        with scopes(run.generation).awake():
            run.generation.generate()
    assert run.lifecycle() == []


def test_validation_after_a_refit_costs_one_sleep(session: rs.Session) -> None:
    """Waste 1: legacy sleeps after validation, and wakes for the next rollout."""
    run = Actors()
    share(run.policy, run.generation, session=session)
    grpo_step(run)
    scopes(run.policy).refit(run.generation, lambda: None)
    run.lifecycle()
    with scopes(run.generation).awake():
        run.generation.generate()  # validation
    with scopes(run.generation).awake():
        run.generation.generate()  # the next step's rollout
    with scopes(run.policy).logprob_mode():
        run.policy.get_logprobs()
    assert run.lifecycle() == ["G.finish_generation()", "P.prepare_for_lp_inference()"]


def ppo_step(run: Actors, epochs: int = 1) -> None:
    """Trace D.4 of the contract, with scopes."""
    scopes(run.policy).refit(run.generation, lambda: None)
    with scopes(run.generation).awake():
        run.generation.generate()
    with scopes(run.value).inference_mode():
        run.value.get_values()
    with scopes(run.policy).logprob_mode():
        run.policy.get_logprobs()
    for _ in range(epochs):
        with scopes(run.value).training_mode():
            run.value.train()
        with scopes(run.policy).training_mode():
            run.policy.train()


@pytest.mark.parametrize("backend", ["dtensor_v1", "dtensor_v2", "megatron"])
def test_a_colocated_ppo_step_makes_fewer_calls_than_legacy(backend: str, session: rs.Session) -> None:
    run = Actors(backend)
    share(run.policy, run.value, run.generation, session=session)
    ppo_step(run)
    run.lifecycle()
    for epochs in (1, 2):
        ppo_step(run, epochs)
        assert (
            run.lifecycle()
            == [
                "P.offload_before_refit()",  # legacy: V.finish_training() on a value that is off, and lp+ on a policy that is on
                "G.prepare_for_generation(tags=['weights'])",
                "P.offload_after_refit()",
                "G.prepare_for_generation(tags=['kv_cache'])",
                "G.finish_generation()",
                "V.prepare_for_inference()",
                "V.finish_inference()",
                "P.prepare_for_lp_inference()",
                *(
                    [
                        "P.offload_after_refit()",
                        "V.prepare_for_training()",
                        "V.finish_training()",
                        "P.prepare_for_training()",
                    ]
                    * epochs
                ),
            ]
        )


def test_under_eager_every_exit_releases(session: rs.Session) -> None:
    run = Actors()
    share(run.policy, run.value, run.generation, session=session, release="eager")
    with scopes(run.policy).training_mode():
        run.policy.train()
    assert run.policy.state == {"params": CPU, "buffers": NONE, "grads": FREED, "optimizer": CPU}
    with scopes(run.value).inference_mode():
        run.value.get_values()
    assert run.value.state["params"] == CPU
    with scopes(run.generation).awake():
        run.generation.generate()
    assert run.generation.state == ASLEEP
    for _ in range(2):
        ppo_step(run)
    assert run.generation.state == ASLEEP


def test_under_lazy_an_exit_calls_nothing(session: rs.Session) -> None:
    run = Actors()
    share(run.policy, run.value, run.generation, session=session)
    with scopes(run.policy).training_mode():
        run.policy.train()
    run.lifecycle()
    with scopes(run.policy).training_mode():
        run.policy.train()
    with scopes(run.policy).logprob_mode():
        run.policy.get_logprobs()
    with scopes(run.policy).training_mode():
        run.policy.train()
    assert run.lifecycle() == []
    assert run.policy.state == {"params": GPU, "buffers": NONE, "grads": GPU, "optimizer": GPU}
    scopes(run.policy).offload()
    assert run.lifecycle() == ["P.offload_after_refit()"]


def test_under_lazy_the_logprob_flag_is_obeyed(session: rs.Session) -> None:
    run = Actors(offload_optimizer_for_logprob=True)
    share(run.policy, run.generation, session=session)
    with scopes(run.policy).training_mode():
        run.policy.train()
    with scopes(run.policy).logprob_mode():
        assert run.policy.state["optimizer"] == CPU


def test_the_least_recently_used_leaves_first_and_the_engine_before_all(session: rs.Session) -> None:
    gpus = Gpus()
    policies = [LegacyPolicy("dtensor_v2", gpus=gpus) for _ in range(3)]
    engine = LegacyGeneration(awake=True, gpus=gpus)
    log: list[str] = []
    for number, legacy in enumerate([*policies, engine]):
        legacy.log = _Prefixed(log, str(number))  # type: ignore[assignment]
    share(*policies, engine, session=session)  # all of them are in, as after construction
    with scopes(policies[2]).logprob_mode():
        pass
    assert log == [
        "3.finish_generation()",
        "0.offload_after_refit()",
        "1.offload_after_refit()",
        "2.prepare_for_lp_inference()",
    ]


@pytest.mark.parametrize("release", ["lazy", "eager"])
def test_one_is_in_at_a_time(session: rs.Session, release: Any) -> None:
    run = Actors()
    share(run.policy, run.value, run.generation, session=session, release=release)
    with scopes(run.policy).training_mode():
        run.lifecycle()
        for inner in (scopes(run.value).inference_mode, scopes(run.generation).awake):
            with (
                pytest.raises(rs.NestingError, match=r"open: policy 'policy': training_mode\(\) at test_nemo"),
                inner(),
            ):
                pass
        assert run.lifecycle() == []
        with scopes(run.policy).offloaded(), scopes(run.value).inference_mode():  # it has made room
            run.value.get_values()
        run.policy.train()
    assert scopes(run.value).mode is rs.Mode.OFFLOADED


def test_what_does_not_share_does_not_leave(session: rs.Session) -> None:
    policy, value = LegacyPolicy("megatron"), LegacyValue("megatron")
    with scopes(policy, session=session).training_mode(), scopes(value, session=session).training_mode():
        policy.train()
        value.train()
    gpus = Gpus()
    unshared = LegacyPolicy("megatron", gpus=gpus), LegacyValue("megatron", gpus=gpus)
    with pytest.raises(rs.TransitionError) as raised, scopes(unshared[1], session=session).training_mode():
        pass
    assert isinstance(raised.value.__cause__, DeviceFullError)


def test_sharing_is_said_once_and_for_good_reason(session: rs.Session) -> None:
    policy, value = LegacyPolicy("megatron"), LegacyValue("megatron")
    one, two = share(policy, value, session=session)
    assert (one, two) == (scopes(policy), scopes(value))
    assert one.resting_mode is rs.Mode.OFFLOADED
    assert policy.calls() == value.calls() == []
    assert share(value) == (two,)
    assert share(policy, value, session=session) == (one, two)
    with pytest.raises(rs.ConfigError, match="under another release"):
        share(policy, release="eager")
    strangers = share(LegacyPolicy("megatron"), only := LegacyValue("megatron"))
    with pytest.raises(rs.ConfigError, match="different others"):
        share(policy, only)
    del strangers
    with pytest.raises(rs.ConfigError, match="GPUs of its own"):
        share(LegacyGeneration(colocated=False))
    with pytest.raises(rs.ConfigError, match="release"):
        share(LegacyValue("megatron"), release="never")  # type: ignore[arg-type]
    with pytest.raises(rs.ConfigError, match="twice"):
        share(twin := LegacyPolicy("megatron"), twin)
    with pytest.raises(rs.ConfigError, match=r"share\(policy, policy_generation\)"):
        scopes(LegacyPolicy("megatron"), release="lazy")
    other = LegacyPolicy("megatron")
    with scopes(other, session=session).training_mode(), pytest.raises(rs.ScopeError, match="before the loop"):
        share(other)


def test_a_tenant_that_died_holds_nobody_up(session: rs.Session) -> None:
    policy, value = LegacyPolicy("megatron"), LegacyValue("megatron")
    share(policy, value, session=session)
    with scopes(value).training_mode():
        pass
    del value
    with scopes(policy).training_mode():
        policy.train()


def test_a_step_that_is_open_is_not_evicted(session: rs.Session) -> None:
    run = Actors(split=True)
    share(run.policy, run.generation, session=session)
    with scopes(run.policy).training_mode() as handle:
        handle.begin_train_step()
        handle.train_microbatches_from_meta()
    with pytest.raises(rs.OpenStepError, match="finish_train_step"), scopes(run.generation).awake():
        pass
    assert run.policy.accumulated == 1
    with scopes(run.policy).training_mode() as handle:
        handle.train_microbatches_from_meta()
        assert handle.finish_train_step() == 2
    with scopes(run.generation).awake():
        run.generation.generate()


def test_under_eager_an_open_step_stays_where_it_is(session: rs.Session, audit_path: Any) -> None:
    run = Actors(split=True)
    share(run.policy, run.generation, session=session, release="eager")
    with scopes(run.policy).training_mode() as handle:
        handle.begin_train_step()
        handle.train_microbatches_from_meta()
    assert run.policy.state["grads"] == GPU
    assert [r.event.code for r in rs.read_audit(audit_path) if r.name == "warning"] == ["open_step_stays"]
    with scopes(run.policy).training_mode() as handle:
        assert handle.finish_train_step() == 1
    assert run.policy.state["params"] == CPU


def test_two_threads_come_in_in_turn_or_are_refused(session: rs.Session) -> None:
    run = Actors()
    share(run.policy, run.value, session=session)
    entered: list[str] = []

    def work(name: str, enter: Any) -> None:
        while entered.count(name) < 5:
            try:
                with enter():
                    entered.append(name)
            except (rs.OwnershipError, rs.NestingError):
                pass

    work_on = {"policy": scopes(run.policy).training_mode, "value": scopes(run.value).inference_mode}
    threads = [threading.Thread(target=work, args=item, daemon=True) for item in work_on.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(entered) == ["policy"] * 5 + ["value"] * 5


# -- refit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["lazy", "eager"])
def test_a_refit_bounds_the_peak(session: rs.Session, release: Any, audit_path: Any) -> None:
    run = Actors()
    share(run.policy, run.generation, session=session, release=release)
    with scopes(run.policy).training_mode():
        run.policy.train()

    def transfer() -> str:
        assert run.policy.state == {"params": GPU, "buffers": NONE, "grads": FREED, "optimizer": CPU}
        assert run.generation.state == {"weights": GPU, "kv_cache": NONE}
        return "sent"

    assert scopes(run.policy).refit(run.generation, transfer) == "sent"
    assert run.policy.state["params"] == CPU
    assert run.generation.state == AWAKE
    run.lifecycle()
    with scopes(run.generation).awake():
        run.generation.generate()
    assert run.lifecycle() == ([] if release == "lazy" else ["G.finish_generation()"])
    assert [r.event.version for r in rs.read_audit(audit_path) if r.name == "weights.published"] == [1]


def test_a_refit_inside_a_scope_is_refused_before_anything_moves(session: rs.Session) -> None:
    run = Actors()
    share(run.policy, run.generation, session=session)
    with scopes(run.policy).training_mode():
        run.lifecycle()
        with pytest.raises(rs.ScopeError, match=r"refit\(\) at .* inside training_mode"):
            scopes(run.policy).refit(run.generation, lambda: None)
        assert run.lifecycle() == []


@pytest.mark.parametrize("release", ["lazy", "eager"])
def test_a_transfer_that_fails_leaves_both_sides_defined(session: rs.Session, release: Any) -> None:
    run = Actors()
    share(run.policy, run.generation, session=session, release=release)

    def transfer() -> None:
        raise ValueError("ZMQ timed out")

    with pytest.raises(ValueError, match="ZMQ"):
        scopes(run.policy).refit(run.generation, transfer)
    assert run.generation.state == ASLEEP
    assert scopes(run.policy).health == scopes(run.generation).health == "ok"
    for _ in range(2):
        grpo_step(run)


def test_the_first_error_of_a_refit_is_on_top(session: rs.Session) -> None:
    run = Actors()
    share(run.policy, run.generation, session=session)

    def transfer() -> None:
        run.generation.fail("finish_generation")
        run.generation.fail("finish_generation")
        raise ValueError("ZMQ timed out")

    with pytest.raises(ValueError, match="ZMQ") as raised:
        scopes(run.policy).refit(run.generation, transfer)
    assert "putting the engine to sleep" in raised.value.__notes__[-1]
    run.generation.heal()
    grpo_step(run)


@pytest.mark.parametrize(("phase", "letter"), [(0, "weights"), (1, "kv_cache")])
@pytest.mark.parametrize("release", ["lazy", "eager"])
def test_a_wake_that_fails_in_either_phase_leaves_both_sides_defined(
    session: rs.Session, release: Any, phase: int, letter: str
) -> None:
    run = Actors()
    share(run.policy, run.generation, session=session, release=release)
    grpo_step(run)
    if phase:
        transfer = lambda: run.generation.fail("prepare_for_generation", when="half")  # noqa: E731
    else:
        run.generation.fail("prepare_for_generation", when="half")
        transfer = lambda: None  # noqa: E731
    with pytest.raises(rs.EngineError, match=rf"tags=\['{letter}'\](.|\n)*returned False"):
        scopes(run.policy).refit(run.generation, transfer)
    assert run.generation.state == ASLEEP
    for _ in range(2):
        grpo_step(run)


def test_an_engine_elsewhere_is_pushed_to_without_moving_anything(session: rs.Session) -> None:
    policy, engine = LegacyPolicy("megatron"), LegacyGeneration(colocated=False)
    mine = scopes(policy, session=session, found="device")
    mine.refit(engine, lambda: None)
    assert policy.calls() == engine.calls() == []
    mine.offload()
    mine.refit(engine, policy.get_logprobs)
    assert policy.calls() == [
        "offload_after_refit()",
        "prepare_for_lp_inference()",
        "get_logprobs()",
        "offload_after_refit()",
    ]
    with pytest.raises(rs.UsageError):
        mine.refit(policy, lambda: None)


@pytest.mark.parametrize("release", ["lazy", "eager"])
def test_a_megatron_engine_serves_the_training_weights(session: rs.Session, release: Any) -> None:
    run = Actors(engine="megatron")
    share(run.policy, run.generation, session=session, release=release)
    for _ in range(2):
        with scopes(run.policy).training_mode():
            run.policy.train()
        run.lifecycle()
        scopes(run.policy).refit(run.generation, lambda: None)
        assert run.policy.state["params"] == GPU
        assert run.generation.state == AWAKE
        calls = run.lifecycle()
        assert calls[-1] == "G.prepare_for_generation(tags=['colocated_refit'])"
        assert "P.offload_after_refit()" not in calls
        with scopes(run.generation).awake():
            run.generation.generate()
        with scopes(run.policy).logprob_mode():
            assert run.generation.state == ASLEEP
            run.policy.get_logprobs()


def test_what_is_asked_to_be_kept_is_kept_also_where_nothing_is_known() -> None:
    policy = LegacyTQPolicy("megatron")
    share(policy, only_colocated=True)
    policy.prepare_for_training()
    scopes(policy).forget()
    policy.begin_train_step()
    with scopes(policy).logprob_mode(keep_train_buffers=True):
        policy.get_logprobs()
    assert policy.state["grads"] != "freed"
