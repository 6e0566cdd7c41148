"""Scopes over NeMo-RL objects: what is where before, inside and after, on every backend and with every flag."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from legacy_model import CPU, FREED, GPU, NONE, LegacyGeneration, LegacyPolicy, LegacyTQPolicy, LegacyValue

import rl_session as rs
from rl_session.adapters.nemo_rl import EngineScopes, PolicyScopes, ValueScopes, scopes, share

BACKENDS = ("dtensor_v1", "dtensor_v2", "megatron")


def is_(legacy: Any, params: str, grads: str | None = None, optimizer: str | None = None) -> bool:
    """Whether components are where they are said to be; None for anywhere. DTensor has no gradients between calls."""
    state = legacy.state
    megatron = legacy.cfg["megatron_cfg"]["enabled"]
    return (
        state["params"] == params
        and (megatron or state["buffers"] == params)
        and (grads is None or state["grads"] == (grads if megatron else NONE))
        and (optimizer is None or state["optimizer"] == optimizer)
    )


# -- before, inside, after ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lp", [False, True])
@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_policy_that_is_alone_rests_on_the_device(backend: str, lp: bool, refit: bool, session: rs.Session) -> None:
    policy = LegacyPolicy(backend, offload_optimizer_for_logprob=lp, offload_optimizer_for_refit=refit)
    mine = scopes(policy, session=session, found="device")
    with mine.logprob_mode():
        assert is_(policy, GPU, FREED, CPU if lp else GPU)
        policy.get_logprobs()
    assert is_(policy, GPU, GPU, GPU)
    with mine.training_mode():
        assert is_(policy, GPU, GPU, GPU)
        policy.train()
    with mine.refit_mode():
        assert is_(policy, GPU, FREED, GPU if backend == "megatron" and not refit else CPU)
    assert is_(policy, GPU, GPU, GPU)
    with mine.offloaded():
        assert is_(policy, CPU, FREED)
    assert is_(policy, GPU, GPU, GPU)


@pytest.mark.parametrize("lp", [False, True])
@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_policy_may_rest_offloaded(backend: str, lp: bool, refit: bool, session: rs.Session) -> None:
    policy = LegacyPolicy(backend, offload_optimizer_for_logprob=lp, offload_optimizer_for_refit=refit)
    mine = scopes(policy, session=session, base="offloaded")
    can_leave = refit or lp or backend != "megatron"
    for _ in range(2):
        with mine.training_mode():
            assert is_(policy, GPU, GPU, GPU)
            policy.train()
        assert is_(policy, CPU, FREED, CPU if can_leave else GPU)
        with mine.logprob_mode():
            assert is_(policy, GPU, FREED, CPU if can_leave else GPU)
            policy.get_logprobs()
        assert is_(policy, CPU, FREED, CPU if can_leave else GPU)
        with mine.refit_mode():
            assert is_(policy, GPU, FREED, CPU if can_leave else GPU)
        assert is_(policy, CPU, FREED)


@pytest.mark.parametrize("backend", ["dtensor_v2", "megatron"])
def test_a_value_has_scopes_of_its_own(backend: str, session: rs.Session) -> None:
    value = LegacyValue(backend, offload_optimizer_for_logprob=True)
    mine = scopes(value, session=session, base="offloaded", found="device")
    with mine.inference_mode():
        assert is_(value, GPU, FREED, GPU)  # a value ignores the flag
        value.get_values()
    assert is_(value, CPU, FREED, CPU)
    with mine.training_mode():
        assert is_(value, GPU, GPU, GPU)
        value.train()
    assert is_(value, CPU, FREED, CPU)
    value.calls()
    with mine.inference_mode():
        value.get_values()
    assert value.calls() == ["prepare_for_inference()", "get_values()", "finish_inference()"]


@pytest.mark.parametrize("backend", ["vllm", "sglang", "megatron", "trtllm"])
def test_an_engine_wakes_and_sleeps(backend: str, session: rs.Session) -> None:
    engine = LegacyGeneration(backend)
    with scopes(engine, session=session).awake() as handle:
        assert engine.state == {"weights": GPU, "kv_cache": GPU}
        handle.generate()
    assert engine.state == {"weights": CPU, "kv_cache": NONE}
    assert engine.calls() == ["prepare_for_generation()", "generate()", "finish_generation()"]


def test_an_engine_wakes_in_parts(session: rs.Session) -> None:
    engine = LegacyGeneration()
    mine = scopes(engine, session=session)
    with mine.awake(tags=["weights"]):
        assert engine.state == {"weights": GPU, "kv_cache": NONE}
        with mine.awake(tags=["weights"]):
            pass
        with pytest.raises(rs.ScopeError, match=r"awake\(\) at test_nemo_scopes.* wakes more than"), mine.awake():
            pass
    assert engine.calls() == ["prepare_for_generation(tags=['weights'])", "finish_generation()"]


def test_an_engine_with_gpus_of_its_own_is_told_of_the_end_and_woken_once(session: rs.Session) -> None:
    engine = LegacyGeneration(colocated=False)
    mine = scopes(engine, session=session)
    for _ in range(2):
        with mine.awake():
            engine.generate()
        assert not engine.cached
    rollout = ["generate()", "finish_generation()"]
    assert engine.calls() == ["prepare_for_generation()", *rollout, *rollout]


def test_parameters_that_fsdp_places_are_left_to_it(session: rs.Session) -> None:
    policy = LegacyPolicy("dtensor_v2", cpu_offload=True)
    mine = scopes(policy, session=session, base="offloaded")
    with mine.training_mode():
        assert policy.state == {"params": CPU, "buffers": GPU, "grads": NONE, "optimizer": CPU}
        policy.train()
    assert policy.state == {"params": CPU, "buffers": CPU, "grads": NONE, "optimizer": CPU}


def test_an_optimizer_that_places_itself_is_left_to_it(session: rs.Session) -> None:
    policy = LegacyPolicy("megatron", optimizer_cpu_offload=True, offload_optimizer_for_logprob=True)
    mine = scopes(policy, session=session, base="offloaded")
    with mine.training_mode():
        assert is_(policy, GPU, GPU, CPU)
        policy.train()
    assert is_(policy, CPU, FREED, CPU)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_teacher_has_no_optimizer(backend: str, session: rs.Session) -> None:
    teacher = LegacyPolicy(backend, optimizer=False)
    mine = scopes(teacher, session=session, name="teacher", optimizer=False, base="offloaded")
    with mine.logprob_mode():
        teacher.get_logprobs()
    assert is_(teacher, CPU)
    assert teacher.calls() == ["prepare_for_lp_inference()", "get_logprobs()", "offload_after_refit()"]


# -- nesting, and what is not called --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scope_in_the_mode_in_effect_calls_nothing(backend: str, session: rs.Session) -> None:
    policy = LegacyPolicy(backend)
    mine = scopes(policy, session=session, found="device")
    with mine.training_mode():
        with mine.training_mode():
            policy.train()
    assert policy.calls() == ["train()"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nested_scopes_come_back_to_the_outer_one(backend: str, session: rs.Session) -> None:
    policy = LegacyPolicy(backend)
    mine = scopes(policy, session=session, found="device")
    with mine.training_mode():
        policy.train()
        with mine.logprob_mode():
            assert is_(policy, GPU, FREED, GPU)
            policy.get_logprobs()
            with mine.refit_mode():
                assert is_(policy, GPU, FREED, CPU)
            assert is_(policy, GPU, FREED, GPU)
        assert is_(policy, GPU, GPU, GPU)
        with mine.offloaded():
            assert is_(policy, CPU, FREED, CPU)
        assert is_(policy, GPU, GPU, GPU)
        policy.train()
    with pytest.raises(rs.NestingError), mine.logprob_mode(), mine.training_mode():
        pass


def test_on_dtensor_logprobs_and_training_move_nothing_unless_a_flag_asks(session: rs.Session) -> None:
    policy = LegacyPolicy("dtensor_v2")
    mine = scopes(policy, session=session, found="device")
    for _ in range(3):
        with mine.logprob_mode():
            policy.get_logprobs()
        with mine.training_mode():
            policy.train()
    assert policy.calls() == ["get_logprobs()", "train()"] * 3


def test_legacy_adjacency_on_megatron_costs_what_it_did(session: rs.Session) -> None:
    policy = LegacyPolicy("megatron")
    mine = scopes(policy, session=session, found="device")
    with mine.logprob_mode():
        policy.get_logprobs()
    with mine.training_mode():
        policy.train()
    assert policy.calls() == ["prepare_for_lp_inference()", "get_logprobs()", "prepare_for_training()", "train()"]


def test_from_a_state_nobody_knows_the_first_entry_calls_and_the_second_does_not(session: rs.Session) -> None:
    policy = LegacyPolicy("dtensor_v2")
    mine = scopes(policy, session=session)
    for _ in range(2):
        with mine.training_mode():
            policy.train()
    assert policy.calls() == ["prepare_for_training()", "train()", "train()"]
    policy.offload_to_cpu()  # by hand
    policy.calls()
    mine.forget()
    with mine.training_mode():
        policy.train()
    assert policy.calls() == ["prepare_for_training()", "train()"]


def test_offload_rests_on_the_host(session: rs.Session) -> None:
    policy = LegacyPolicy("megatron")
    mine = scopes(policy, session=session)
    mine.offload()
    assert is_(policy, CPU, FREED, CPU)
    assert mine.mode is mine.resting_mode is rs.Mode.OFFLOADED
    with mine.training_mode():
        policy.train()
        with pytest.raises(rs.ScopeError):
            mine.offload()
        with pytest.raises(rs.ScopeError, match="forget"):
            mine.forget()
    assert is_(policy, CPU, FREED, CPU)


# -- train steps in pieces ------------------------------------------------------------------------------------------


def test_a_step_begun_on_the_object_survives_logprobs_inside_training(session: rs.Session) -> None:
    policy = LegacyTQPolicy(offload_optimizer_for_logprob=True)
    mine = scopes(policy, session=session, found="device")
    with mine.training_mode():
        policy.begin_train_step()
        for _ in range(3):
            with mine.logprob_mode():
                policy.get_logprobs()
            policy.train_microbatches_from_meta()  # fails if gradients or train mode were lost
        assert policy.finish_train_step() == 3


def test_a_step_begun_through_the_handle_spans_scopes(session: rs.Session, audit_path: Path) -> None:
    policy = LegacyTQPolicy(offload_optimizer_for_logprob=True)
    mine = scopes(policy, session=session, found="device")
    with mine.training_mode() as handle:
        handle.begin_train_step()
        handle.train_microbatches_from_meta()
    with mine.logprob_mode() as logprobs:
        logprobs.get_logprobs()
    with pytest.raises(rs.OpenStepError, match="keep_train_buffers=False"):
        with mine.logprob_mode(keep_train_buffers=False):
            pass
    with mine.training_mode() as handle:
        handle.train_microbatches_from_meta()
        assert handle.finish_train_step() == 2
    names = [record.name for record in rs.read_audit(audit_path)]
    assert names.index("step.opened") < names.index("step.committed")


def test_keep_train_buffers_may_be_said(session: rs.Session) -> None:
    policy = LegacyTQPolicy()
    mine = scopes(policy, session=session, found="device")
    with mine.training_mode():
        policy.begin_train_step()
        policy.train_microbatches_from_meta()
    with mine.logprob_mode(keep_train_buffers=True):
        policy.get_logprobs()
    with mine.training_mode():
        policy.train_microbatches_from_meta()
        assert policy.finish_train_step() == 2
    assert "prepare_for_lp_inference(keep_train_buffers=True)" not in policy.log  # nothing had to be called for it
    with mine.logprob_mode(keep_train_buffers=False):
        assert is_(policy, GPU, FREED)


def test_a_step_may_be_begun_on_the_object_and_ended_through_the_handle(session: rs.Session) -> None:
    policy = LegacyTQPolicy()
    with scopes(policy, session=session).training_mode() as handle:
        policy.begin_train_step()
        handle.train_microbatches_from_meta()
        assert handle.finish_train_step() == 1
        handle.abort_train_step()  # no step: nothing to do, as there


def test_gradients_of_an_open_step_are_never_destroyed_in_silence(session: rs.Session) -> None:
    policy = LegacyTQPolicy()
    mine = scopes(policy, session=session, found="device")
    with mine.training_mode() as handle:
        handle.begin_train_step()
        handle.train_microbatches_from_meta()
        for refused in (mine.refit_mode, mine.offloaded):
            with pytest.raises(rs.OpenStepError, match="finish_train_step"), refused():
                pass
        assert policy.accumulated == 1
        handle.abort_train_step()
        with mine.refit_mode():
            assert is_(policy, GPU, FREED, CPU)


# -- guards ---------------------------------------------------------------------------------------------------------


def test_a_guard_names_the_missing_legacy_call_and_the_scope(session: rs.Session) -> None:
    policy, value, engine = LegacyPolicy("megatron"), LegacyValue("megatron"), LegacyGeneration()
    mine = scopes(policy, session=session, base="offloaded", found="host")
    with pytest.raises(rs.ModeError) as raised:
        mine.check("get_logprobs")
    assert "missing legacy call: policy.prepare_for_lp_inference()" in str(raised.value)
    assert raised.value.remedy == "with scopes(policy).logprob_mode(): policy.get_logprobs(...)"
    with pytest.raises(rs.ModeError, match="prepare_for_training"):
        mine.check("train")
    with pytest.raises(rs.ModeError, match=r"scopes\(policy\)\.refit_mode\(\)"):
        mine.check("broadcast_weights_for_collective")
    with pytest.raises(rs.ModeError, match=r"prepare_for_inference(.|\n)*scopes\(value\)\.inference_mode\(\)"):
        scopes(value, session=session, base="offloaded", found="host").check("get_values")
    with pytest.raises(rs.ModeError, match=r"prepare_for_generation(.|\n)*scopes\(policy_generation\)\.awake\(\)"):
        scopes(engine, session=session).check("generate")
    with pytest.raises(rs.ConfigError, match="no compute call"):
        mine.check("print_node_ip_and_gpu_id")
    with mine.logprob_mode():
        mine.check("get_logprobs")


def test_a_handle_makes_legal_calls_on_the_object_itself(session: rs.Session, audit_path: Path) -> None:
    policy = LegacyPolicy("megatron")
    mine = scopes(policy, session=session, base="offloaded")
    with mine.logprob_mode() as handle:
        assert handle.get_logprobs("batch", timer=None) == {"logprobs": "batch"}
        with pytest.raises(rs.ModeError, match=r"scopes\(policy\)\.training_mode"):
            handle.train("batch", "loss")
        with pytest.raises(rs.ModeError):  # Megatron zeroes its gradient buffer in evaluation too
            handle.train("batch", "loss", eval_mode=True)
        with pytest.raises(AttributeError, match=r"no 'generate_async' \(it has"):
            handle.generate_async()
        assert "get_logprobs" in dir(handle)
        assert repr(handle) == "<handle of policy 'policy' in logprob mode>"
    assert "train()" not in policy.calls()
    with pytest.raises(rs.ModeError):  # outside
        handle.get_logprobs("batch")
    calls = [record.event.method for record in rs.read_audit(audit_path) if record.name == "call.finished"]
    assert calls == ["get_logprobs"]


def test_evaluation_needs_no_training_on_dtensor(session: rs.Session) -> None:
    policy = LegacyPolicy("dtensor_v2")
    with scopes(policy, session=session).logprob_mode() as handle:
        assert handle.train("batch", "loss", True)["loss"] == [0.5]
        assert handle.train("batch", "loss", eval_mode=True)["loss"] == [0.5]


def test_an_error_of_the_object_is_the_users(session: rs.Session) -> None:
    policy = LegacyPolicy("megatron")
    mine = scopes(policy, session=session, base="offloaded")
    with mine.logprob_mode() as handle:
        policy.offload_to_cpu()  # by hand, under the scope
        with pytest.raises(RuntimeError, match="illegal memory access"):
            handle.get_logprobs()
    assert mine.health == "ok"


@pytest.mark.parametrize("optimizer", [None, "optim"])
def test_a_megatron_checkpoint_brings_in_what_it_saves_and_is_known_to(
    session: rs.Session, optimizer: str | None
) -> None:
    policy = LegacyPolicy("megatron")
    mine = scopes(policy, session=session, base="offloaded", nbytes={"params": 10, "optimizer": 60})
    with mine.offloaded() as handle:
        handle.save_checkpoint("weights", optimizer_path=optimizer)
        assert is_(policy, GPU, FREED, GPU if optimizer else CPU)
        assert mine.memory()["device_bytes"] == (70 if optimizer else 10)
    with mine.refit_mode():
        assert is_(policy, GPU, FREED, CPU)
    assert is_(policy, CPU, FREED, CPU)


class Saving(LegacyPolicy):
    """A Megatron policy whose checkpoints are written while it goes on; where the optimizer was when one was waited for."""

    found: str | None = None

    def finalize_async_save(self) -> None:
        self.log.append("finalize_async_save()")
        self.found = self.state["optimizer"]


def test_an_asynchronous_checkpoint_is_waited_for_before_what_it_reads_leaves(session: rs.Session) -> None:
    policy = Saving("megatron", offload_optimizer_for_logprob=True, offload_optimizer_for_refit=False)
    mine = scopes(policy, session=session, base="resident")
    with mine.training_mode() as handle:
        handle.save_checkpoint("weights", optimizer_path="optimizer")
        policy.calls()
    with mine.logprob_mode():
        assert is_(policy, GPU, FREED, CPU)
        assert policy.calls() == ["finalize_async_save()", "prepare_for_lp_inference()"]
        assert policy.found == GPU


def test_nothing_is_waited_for_where_nothing_leaves_or_the_call_waits_itself(session: rs.Session) -> None:
    policy = Saving("megatron", offload_optimizer_for_logprob=True)
    mine = scopes(policy, session=session, base="resident")
    with mine.training_mode():
        policy.calls()
    with mine.logprob_mode():
        assert policy.calls() == ["offload_before_refit()"], "which waits itself"
    policy = Saving("megatron")
    with scopes(policy, session=session, base="resident").logprob_mode():
        assert "finalize_async_save()" not in policy.calls()
    other = Saving("dtensor_v2", offload_optimizer_for_logprob=True)
    with scopes(other, session=session, base="resident").logprob_mode():
        assert "finalize_async_save()" not in other.calls()


def test_other_checkpoints_need_what_they_save_on_the_device(session: rs.Session) -> None:
    policy, value = LegacyPolicy("dtensor_v2"), LegacyValue("megatron")
    for mine, mode in (
        (scopes(policy, session=session), "logprob_mode"),
        (scopes(value, session=session), "inference_mode"),
    ):
        with mine.offloaded() as handle, pytest.raises(rs.ModeError, match=mode):
            handle.save_checkpoint("weights")
        with getattr(mine, mode)() as handle:
            handle.save_checkpoint("weights")
            with pytest.raises(rs.ModeError, match="training_mode"):
                handle.save_checkpoint("weights", "optimizer")
        with mine.training_mode() as handle:
            handle.save_checkpoint("weights", optimizer_path="optimizer")


# -- identity -------------------------------------------------------------------------------------------------------


def test_nothing_is_set_on_an_object() -> None:
    for legacy, kind in (
        (LegacyPolicy("megatron"), PolicyScopes),
        (LegacyValue("megatron"), ValueScopes),
        (LegacyGeneration(), EngineScopes),
    ):
        before = dict(vars(legacy))
        cfg = copy.deepcopy(legacy.cfg)
        mine = scopes(legacy)
        assert isinstance(mine, kind)
        assert scopes(legacy) is mine
        with mine.awake() if isinstance(mine, EngineScopes) else mine.training_mode():
            pass
        assert vars(legacy).keys() == before.keys()
        assert legacy.cfg == cfg
        assert not hasattr(legacy, "training_mode")
        mine.close()


def test_equal_objects_have_states_of_their_own() -> None:
    one, two = LegacyPolicy("megatron"), LegacyPolicy("megatron")
    assert one == two
    assert scopes(one) is not scopes(two)


def test_a_pickled_object_is_another_object() -> None:
    policy = LegacyPolicy("megatron")
    plain = pickle.dumps(policy)
    mine = scopes(policy)
    assert pickle.dumps(policy) == plain
    with mine.logprob_mode():
        other = pickle.loads(pickle.dumps(policy))
    assert scopes(other) is not mine


def test_an_object_dies_as_it_would_have() -> None:
    policy = LegacyPolicy("dtensor_v1")
    mine = scopes(policy)
    with mine.training_mode():
        pass
    gone = weakref.ref(policy)
    key = id(policy)
    del policy
    gc.collect()
    assert gone() is None
    with pytest.raises(rs.ClosedError, match="the object is gone"), mine.training_mode():
        pass
    from rl_session.adapters.nemo_rl import registry

    assert key not in registry._entries


def test_options_come_from_the_objects_own_configuration() -> None:
    policy = LegacyPolicy("megatron", offload_optimizer_for_logprob=True, optimizer_cpu_offload=True)
    traits = scopes(policy).group.traits
    assert traits.backend == "megatron"
    assert traits.offload_optimizer_for_logprob
    assert traits.offload_optimizer_for_refit
    assert traits.optimizer_cpu_offload
    assert not scopes(LegacyGeneration("sglang", colocated=False)).group.traits.colocated


def test_options_may_be_given_once() -> None:
    policy = LegacyPolicy("megatron", with_cfg=False)
    with pytest.raises(rs.ConfigError, match="backend is not known"):
        scopes(policy)
    mine = scopes(policy, backend="megatron", offload_optimizer_for_logprob=True, nbytes={"params": 4})
    assert scopes(policy, backend="megatron", nbytes={"params": 4}) is mine
    others: list[dict[str, Any]] = [
        {"backend": "dtensor"},
        {"offload_optimizer_for_logprob": False},
        {"nbytes": {"params": 5}},
        {"base": "offloaded"},
        {"name": "other"},
    ]
    for said in others:
        with pytest.raises(rs.ConfigError, match="looked up otherwise before"):
            scopes(policy, **said)


@pytest.mark.parametrize(
    "said",
    [
        {"backend": "dtensor"},
        {"offload_optimizer_for_logprob": True},
        {"bakcend": "megatron"},
        {"optimizer": 1},
        {"colocated": True},
        {"nbytes": {"weights": 1}},
        {"nbytes": {"params": -1}},
        {"found": "gpu"},
        {"base": "host"},
    ],
)
def test_options_that_cannot_be_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(rs.ConfigError):
        scopes(LegacyPolicy("megatron"), **said)


def test_other_objects_are_refused() -> None:
    with pytest.raises(rs.UnsupportedError, match="not a NeMo-RL"):
        scopes(object())

    class Slotted:
        __slots__ = ()

        def prepare_for_generation(self) -> bool:
            return True

    with pytest.raises(rs.UnsupportedError, match="weakly"):
        scopes(Slotted())


# -- owners, async, log ---------------------------------------------------------------------------------------------


def test_a_second_thread_is_refused(session: rs.Session) -> None:
    policy = LegacyPolicy("megatron")
    mine = scopes(policy, session=session)
    refused: list[BaseException] = []

    def enter() -> None:
        try:
            with mine.training_mode():
                pass
        except rs.OwnershipError as error:
            refused.append(error)

    with mine.logprob_mode():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(refused) == 1


def test_async_scopes_move_in_a_thread(session: rs.Session) -> None:
    policy, engine = LegacyPolicy("megatron"), LegacyGeneration()
    share(policy, engine, session=session)

    async def step() -> None:
        async with scopes(engine).awake():
            await asyncio.to_thread(engine.generate)
        async with scopes(policy).logprob_mode() as handle:
            await asyncio.to_thread(handle.get_logprobs, "batch")

    asyncio.run(step())
    assert engine.state == {"weights": CPU, "kv_cache": NONE}
    assert policy.calls() == ["prepare_for_lp_inference()", "get_logprobs()"] or policy.log == []


def test_the_log_has_every_move_with_the_sizes_that_were_given(session: rs.Session, audit_path: Path) -> None:
    policy = LegacyPolicy("megatron")
    sizes = {"params": 16, "grads": 32, "optimizer": 96}
    mine = scopes(policy, session=session, name="actor", nbytes=sizes, found="device", base="offloaded")
    with mine.logprob_mode():
        pass
    with mine.training_mode():
        pass
    moves = [
        (
            record.transition_id,
            record.event.component,
            record.event.from_tier,
            record.event.to_tier,
            record.event.nbytes,
            record.event.elided,
        )
        for record in rs.read_audit(audit_path)
        if record.name == "component.moved"
    ]
    assert moves == [
        (1, "grads", "device", "none", 32, True),
        (2, "params", "device", "host", 16, False),
        (2, "optimizer", "device", "host", 96, False),
        (3, "params", "host", "device", 16, False),
        (3, "grads", "none", "device", 32, True),
        (3, "optimizer", "host", "device", 96, False),
        (4, "params", "device", "host", 16, False),
        (4, "grads", "device", "none", 32, True),
        (4, "optimizer", "device", "host", 96, False),
    ]
    assert mine.placement == {"params": "host", "grads": "none", "optimizer": "host"}


def test_a_session_tells_what_its_objects_hold(session: rs.Session) -> None:
    policy = LegacyPolicy("megatron")
    with scopes(policy, session=session, name="actor", nbytes={"params": 16}).logprob_mode():
        told = session.memory()["participants"]["actor"]
    assert told["components"]["params"] == {"device": 16}
    assert told["unknown"] == ["optimizer"]


def test_names_are_told_apart(session: rs.Session) -> None:
    actor, teacher = LegacyPolicy("megatron"), LegacyPolicy("megatron")
    assert scopes(actor, session=session).name == "policy"
    assert scopes(teacher, session=session).name not in ("", "policy")
    with pytest.raises(rs.ConfigError, match="the name is taken"):
        scopes(LegacyPolicy("megatron"), session=session, name="policy")


def test_an_engine_that_dies_awake_ends_in_the_log(session: rs.Session) -> None:
    engine = LegacyGeneration()
    share(engine, session=session)
    with scopes(engine).awake():
        pass
    del engine
    gc.collect()


def test_closing_leaves_a_policy_alone_and_puts_an_engine_to_sleep(session: rs.Session) -> None:
    policy, engine = LegacyPolicy("megatron"), LegacyGeneration()
    share(policy, engine, session=session)
    with scopes(policy).training_mode():
        policy.train()
    policy.calls()
    old = scopes(policy)
    old.close()
    assert policy.calls() == []
    assert old.health == "closed"
    with pytest.raises(rs.ClosedError), old.training_mode():
        pass
    assert scopes(policy, session=session) is not old
    with scopes(engine).awake():
        pass
    session.close()
    assert engine.state == {"weights": CPU, "kv_cache": NONE}
