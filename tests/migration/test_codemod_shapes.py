"""Loops in the shapes in which they really occur, whole: every site is rewritten, or stays for a true reason."""

from __future__ import annotations

from collections import Counter

import pytest
from rewriting import migrated

SHAPES: dict[str, str] = {}
SHAPES["distillation"] = """
from loops.a import refit_policy_generation, run_rollout, validate, maybe_gpu_profile_step
import ray


def distillation_train(student_policy, teacher_policy, student_generation, dataloader, loss_fn, checkpointer, config, timer):
    NEED_REFIT = True
    # Without an engine the student generates by itself.
    if student_generation is None:
        student_generation = student_policy  # type: ignore
        NEED_REFIT = False
    POLICY_GENERATION_STALE = True
    assert student_generation is not None
    colocated_inference = config.colocated

    if config.val_at_start:
        if NEED_REFIT and POLICY_GENERATION_STALE:
            refit_policy_generation(student_policy, student_generation, colocated_inference)
            POLICY_GENERATION_STALE = False
        else:
            student_generation.prepare_for_generation()
        val_metrics = validate(student_generation, config)
        student_generation.finish_generation()

    for step, batch in enumerate(dataloader):
        maybe_gpu_profile_step(student_policy, step + 1)
        if student_policy != student_generation:
            maybe_gpu_profile_step(student_generation, step + 1)
        with timer.time("total_step_time"):
            with timer.time("prepare_for_generation"):
                if NEED_REFIT and POLICY_GENERATION_STALE:
                    refit_policy_generation(
                        student_policy, student_generation, colocated_inference, timer=timer
                    )
                    POLICY_GENERATION_STALE = False
                else:
                    student_generation.prepare_for_generation()

            with timer.time("generation"):
                if config.is_async:
                    batch, metrics = run_rollout(policy_generation=student_generation, batch=batch)
                else:
                    batch, metrics = run_rollout(student_generation, batch)
                student_generation.finish_generation()

            with timer.time("teacher_logprob_inference_prep"):
                if not colocated_inference:
                    # The optimizer is still there from the step before.
                    student_policy.offload_before_refit()
                teacher_policy.prepare_for_lp_inference()
            with timer.time("teacher_logprob_inference"):
                topk = teacher_policy.get_topk_logits(batch, k=config.k, timer=timer)
                batch["teacher_topk"] = topk["topk_logits"]
                teacher_policy.offload_after_refit()

            with timer.time("training_prep"):
                student_policy.prepare_for_training()
                POLICY_GENERATION_STALE = True
            with timer.time("policy_training"):
                results = student_policy.train(batch, loss_fn, timer=timer)

            if config.validates(step):
                if NEED_REFIT and POLICY_GENERATION_STALE:
                    refit_policy_generation(student_policy, student_generation, colocated_inference)
                    POLICY_GENERATION_STALE = False
                else:
                    student_generation.prepare_for_generation()
                val_metrics = validate(student_generation, config)
                student_generation.finish_generation()

            if config.saves(step):
                student_policy.prepare_for_training()
                with timer.time("checkpointing"):
                    path = checkpointer.begin(step)
                    student_policy.save_checkpoint(
                        weights_path=path / "weights",
                        optimizer_path=path / "optimizer",
                    )
                    checkpointer.begin_finalization(path, wait_fn=student_policy.finalize_async_save)
"""
SHAPES["async_grpo"] = """
import ray
from loops.a import validate
from .grpo import refit_policy_generation


def async_grpo_train(policy, policy_generation, dataloader, loss_fn, checkpointer, config, timer):
    POLICY_GENERATION_STALE = True
    trajectory_collector = AsyncTrajectoryCollector.remote(policy_generation=policy_generation, config=config)
    trajectory_collector.start_collection.remote(dataloader)

    if POLICY_GENERATION_STALE:
        try:
            refit_policy_generation(policy, policy_generation, config.colocated)
            POLICY_GENERATION_STALE = False
        except Exception as e:
            print(f"refit failed: {e}")
            return
    else:
        try:
            policy_generation.prepare_for_generation()
            print("ready")
        except Exception as e:
            print(f"wake failed: {e}")
            return

    if config.val_at_start:
        ray.get(trajectory_collector.pause.remote())
        try:
            val_metrics = validate(policy_generation, config)
            policy_generation.finish_generation(release_gpu=False)
            print(val_metrics)
        except Exception as e:
            print(e)
        finally:
            trajectory_collector.resume.remote()

    try:
        for step in range(config.num_steps):
            with timer.time("total_step_time"):
                batch = ray.get(trajectory_collector.sample.remote())
                if batch is None:
                    continue
                if policy_generation.blocks_training():
                    ray.get(trajectory_collector.prepare_for_refit.remote())
                    policy_generation.finish_generation(release_gpu=True)
                if config.needs_logprobs:
                    with timer.time("logprob_inference_prep"):
                        policy.prepare_for_lp_inference()
                with timer.time("policy_and_reference_logprobs"):
                    if config.needs_logprobs:
                        batch["prev_logprobs"] = policy.get_logprobs(batch, timer=timer)["logprobs"]
                        batch["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(
                            batch, timer=timer
                        )["reference_logprobs"]
                with timer.time("training_prep"):
                    policy.prepare_for_training()
                    POLICY_GENERATION_STALE = True
                with timer.time("policy_training"):
                    results = policy.train(batch, loss_fn, timer=timer)
                will_save = config.saves(step)
                defer = policy_generation.blocks_training() and will_save
                if defer:
                    with timer.time("offload_before_refit"):
                        policy.offload_before_refit()
                        POLICY_GENERATION_STALE = False
                else:
                    ray.get(trajectory_collector.prepare_for_refit.remote())
                    with timer.time("weight_sync"):
                        refit_policy_generation(policy, policy_generation, config.colocated)
                        POLICY_GENERATION_STALE = False
                        trajectory_collector.resume_after_refit.remote()
                if config.validates(step):
                    ray.get(trajectory_collector.pause.remote())
                    with timer.time("idle/validation"):
                        policy_generation.prepare_for_generation()
                        val_metrics = validate(policy_generation, config)
                        saving = will_save or val_metrics["stop"]
                        policy_generation.finish_generation(release_gpu=saving)
                        trajectory_collector.resume.remote()
                if will_save:
                    with timer.time("checkpointing"):
                        path = checkpointer.begin(step)
                        policy.save_checkpoint(weights_path=path / "weights", optimizer_path=path / "optimizer")
                        checkpointer.begin_finalization(path, wait_fn=policy.finalize_async_save)
                    if defer:
                        policy.offload_after_refit()
                        policy_generation.prepare_for_generation()
                        ray.get(trajectory_collector.resume_after_refit.remote())
    finally:
        ray.kill(trajectory_collector)
"""
SHAPES["dataplane"] = """
import ray
from .grpo import refit_policy_generation


def grpo_train_sync(policy, policy_generation, rollout_actor, dataloader, loss_fn, config, timer):
    POLICY_GENERATION_STALE = True
    for step, batch in enumerate(dataloader):
        with timer.time("prepare_for_generation/total"):
            if POLICY_GENERATION_STALE:
                refit_policy_generation(policy, policy_generation, config.colocated)
                POLICY_GENERATION_STALE = False
            else:
                if config.colocated:
                    policy.offload_after_refit()
                policy_generation.prepare_for_generation()
        policy.prepare_step(step)
        with timer.time("generation"):
            meta = ray.get(rollout_actor.rollout_to_tq.remote(batch, finish_generation=True))
        if meta is None:
            continue
        with timer.time("logprob_inference_prep"):
            policy.prepare_for_lp_inference()
        with timer.time("policy_and_reference_logprobs"):
            policy.get_logprobs_from_meta(meta)
            policy.get_reference_policy_logprobs_from_meta(meta)
        with timer.time("training_prep"):
            policy.prepare_for_training()
            POLICY_GENERATION_STALE = True
        with timer.time("policy_training"):
            results = policy.train_from_meta(meta, loss_fn)
        policy.finish_step(meta)
"""
SHAPES["xtoken"] = """
def export_teacher_logits_and_pack(teacher_policy, batch):
    teacher_policy.prepare_for_lp_inference()
    handle = teacher_policy.get_full_logits_ipc(batch)
    teacher_policy.offload_after_refit()
    return handle


def train(student_policy, teacher_policies, dataloader, loss_fn, config):
    student_policy.prepare_for_training()
    try:
        for batch in dataloader:
            handles = []
            for teacher_policy in teacher_policies:
                handles.append(export_teacher_logits_and_pack(teacher_policy, batch))
            results = student_policy.train({**batch, "teachers": handles}, loss_fn)
            if config.validates(batch):
                student_policy.prepare_for_training()
                student_policy.train(batch, loss_fn, eval_mode=True)
                student_policy.prepare_for_training()
    finally:
        for teacher_policy in teacher_policies:
            teacher_policy.release_ipc_buffer()
            teacher_policy.offload_after_refit()
"""
SHAPES["setup"] = """
from concurrent.futures import ThreadPoolExecutor
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy


def setup(config, cluster):
    def init_vllm():
        pg = VllmGeneration(cluster=cluster, config=config.generation)
        pg.finish_generation()
        return pg

    def init_policy():
        return Policy(cluster=cluster, config=config.policy)

    if config.parallel:
        with ThreadPoolExecutor(max_workers=2) as executor:
            vllm_future = executor.submit(init_vllm)
            policy_future = executor.submit(init_policy)
            policy_generation, policy = vllm_future.result(), policy_future.result()
    else:
        policy_generation = init_vllm()
        policy = init_policy()
    policy.print_node_ip_and_gpu_id()
    state_dict_info = policy.prepare_refit_info()
    policy_generation.prepare_refit_info(state_dict_info)
    return policy, policy_generation
"""
SHAPES["controller"] = """
import asyncio


class SingleController:
    def __init__(self, trainer, gen):
        self._trainer = trainer
        self._gen = gen

    async def _train(self, chunks):
        first = True
        for chunk in chunks:
            await asyncio.to_thread(self._trainer.prepare_for_lp_inference, keep_train_buffers=not first)
            await asyncio.to_thread(self._trainer.get_logprobs_from_meta, chunk)
            await asyncio.to_thread(self._trainer.prepare_for_training)
            if first:
                await asyncio.to_thread(self._trainer.begin_train_step, self._loss_fn)
                first = False
            await asyncio.to_thread(self._trainer.train_microbatches_from_meta, chunk)
        return await asyncio.to_thread(self._trainer.finish_train_step)

    async def _sync(self):
        await asyncio.to_thread(self._weight_synchronizer.sync_weights)
        await asyncio.to_thread(self._gen.invalidate_kv_cache)

    async def _save(self, path):
        await asyncio.to_thread(self._trainer.save_checkpoint, path)
"""
SHAPES["several_conditions"] = """
import ray
from contextlib import nullcontext


def refit_policy_generation(policy, policy_generation, colocated_inference, timer=None, kv_scales=None):
    synchronizer = getattr(policy_generation, "weight_synchronizer", None)
    if synchronizer is not None:
        return synchronizer.sync_weights(timer=timer, kv_scales=kv_scales) or {}
    if isinstance(policy_generation, MegatronGeneration):
        policy_generation.suspend_for_refit()
    if colocated_inference or isinstance(policy_generation, MegatronGeneration):
        policy.offload_before_refit()
    if colocated_inference or isinstance(policy_generation, MegatronGeneration):
        policy_generation.prepare_for_generation(tags=["weights"])
    timer_context = timer.time("transfer") if timer is not None else nullcontext()
    with timer_context:
        futures_train = policy.stream_weights_via_ipc_zmq(buffer_size_bytes=1)
        futures_inference = policy_generation.update_weights_via_ipc_zmq()
        ray.get(futures_train)
        results = ray.get(futures_inference)
    if colocated_inference:
        policy.offload_after_refit()
    if colocated_inference or isinstance(policy_generation, MegatronGeneration):
        policy_generation.prepare_for_generation(tags=["kv_cache"])
    if isinstance(policy_generation, MegatronGeneration):
        policy_generation.resume_after_refit()
    return {}
"""

LEFT: dict[str, Counter[str]] = {
    "distillation": Counter(),
    "async_grpo": Counter(
        {"the engine keeps serving, which no scope does": 1, "whether it sleeps is decided at run time": 1}
    ),
    "dataplane": Counter(),
    "xtoken": Counter(),
    "setup": Counter({"it stands in a callback: who runs it, and when, is not in sight": 1}),
    "controller": Counter(
        {
            "a train step stays open here between calls": 2,
            "the method is passed as a value and runs in a thread": 1,
        }
    ),
    "several_conditions": Counter({"the four calls of the push do not stand under one condition": 3}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape(name: str) -> None:
    result = migrated(SHAPES[name])
    found = Counter(outcome.why for outcome in result.outcomes if outcome.status == "left")
    assert found == LEFT[name]
    assert len(result.outcomes) > sum(found.values()) or name in ("setup", "controller")


def text_of(name: str) -> str:
    return migrated(SHAPES[name]).after.decode()


def test_distillation_makes_room_for_the_teacher_before_it_comes() -> None:
    text = text_of("distillation")
    assert text.index("scopes(student_policy).offload()") < text.index("with scopes(teacher_policy).logprob_mode():")
    assert (
        "    share(student_policy, teacher_policy, student_generation, only_colocated=True)\n    if config.val_at_start"
        in text
    )
    assert text.count("with scopes(student_generation).awake():") == 3
    assert 'POLICY_GENERATION_STALE = True\n            with timer.time("policy_training"):' in text


def test_a_collector_in_another_process_finds_its_engine_awake() -> None:
    """What uses the engine is not in sight: wakes keep their places, and their failures raise inside the same try."""
    text = text_of("async_grpo")
    assert '        try:\n            scopes(policy_generation).wake()\n            print("ready")' in text
    deferred = text[text.index("if defer:\n                        scopes") :]
    assert deferred.index("scopes(policy).offload()") < deferred.index("scopes(policy_generation).wake()")
    assert deferred.index("scopes(policy_generation).wake()") < deferred.index("resume_after_refit.remote()")


def test_a_sleep_in_another_process_leaves_the_wake_where_it_is() -> None:
    text = text_of("dataplane")
    assert "                    scopes(policy).offload()\n                scopes(policy_generation).wake()\n" in text
    assert "awake()" not in text


def test_teachers_are_released_whatever_happens() -> None:
    text = text_of("xtoken")
    end = text[text.index("finally:") :]
    assert "        for teacher_policy in teacher_policies:\n" in end
    assert "            scopes(teacher_policy).offload()\n" in end


def test_a_push_under_several_conditions_is_called_inside_a_block_that_knows_it() -> None:
    text = migrated(
        SHAPES["several_conditions"]
        + "\n\ndef train(policy, policy_generation):\n    refit_policy_generation(policy, policy_generation, True)\n"
    ).after.decode()
    assert (
        "    with scopes(policy).legacy_refit(policy_generation):\n"
        "        refit_policy_generation(policy, policy_generation, True)\n"
    ) in text
