"""The illegal uses and traps of the manual API that source shows, each planted once, beside the use that is fine."""

from __future__ import annotations

from textwrap import dedent
from typing import NamedTuple

import pytest

from rl_session_migrate.lint import lint_text


class Trap(NamedTuple):
    name: str
    code: str
    wrong: str
    fine: str


HEAD = "from nemo_rl.algorithms.grpo import refit_policy_generation\n"

TRAPS = [
    Trap(
        "a second begin_train_step",
        "RLM009",
        "policy.begin_train_step(f)\npolicy.begin_train_step(f)",
        "policy.begin_train_step(f)\npolicy.abort_train_step()\npolicy.begin_train_step(f)",
    ),
    Trap(
        "feeding a step that is over",
        "RLM009",
        "policy.begin_train_step(f)\npolicy.finish_train_step()\npolicy.train_microbatches_from_meta(m)",
        "policy.begin_train_step(f)\npolicy.train_microbatches_from_meta(m)\npolicy.finish_train_step()",
    ),
    Trap(
        "ending a step twice",
        "RLM009",
        "policy.begin_train_step(f)\npolicy.finish_train_step()\npolicy.finish_train_step()",
        "policy.begin_train_step(f)\npolicy.finish_train_step()\npolicy.abort_train_step()",
    ),
    *(
        Trap(
            f"{call} in an open step",
            "RLM004",
            f"policy.begin_train_step(f)\npolicy.train_microbatches_from_meta(m)\npolicy.{call}()",
            f"policy.begin_train_step(f)\npolicy.train_microbatches_from_meta(m)\npolicy.finish_train_step()\npolicy.{call}()",
        )
        for call in ("offload_before_refit", "offload_after_refit", "offload_to_cpu", "prepare_for_lp_inference")
    ),
    Trap(
        "a refit in an open step",
        "RLM004",
        "policy.begin_train_step(f)\nrefit_policy_generation(policy, gen, c)",
        "policy.begin_train_step(f)\npolicy.finish_train_step()\nrefit_policy_generation(policy, gen, c)",
    ),
    Trap(
        "logprobs between chunks that keep nothing",
        "RLM004",
        "await to_thread(policy.begin_train_step, f)\nawait to_thread(policy.prepare_for_lp_inference)",
        "await to_thread(policy.begin_train_step, f)\n"
        "await to_thread(policy.prepare_for_lp_inference, keep_train_buffers=streaming)",
    ),
    Trap(
        "chunks in eval mode",
        "RLM008",
        "policy.begin_train_step(f)\npolicy.prepare_for_lp_inference(keep_train_buffers=True)\n"
        "policy.get_logprobs_from_meta(m)\npolicy.train_microbatches_from_meta(m)",
        "policy.begin_train_step(f)\npolicy.prepare_for_lp_inference(keep_train_buffers=True)\n"
        "policy.get_logprobs_from_meta(m)\npolicy.prepare_for_training()\npolicy.train_microbatches_from_meta(m)",
    ),
    Trap(
        "training in the logprob state",
        "RLM007",
        "policy.prepare_for_lp_inference()\npolicy.train(b, f)",
        "policy.prepare_for_training()\npolicy.train(b, f)",
    ),
    Trap(
        "evaluating with train() in the logprob state",
        "RLM007",
        "policy.prepare_for_lp_inference()\npolicy.train(b, f, eval_mode=True)",
        "policy.prepare_for_training()\npolicy.train(b, f, eval_mode=True)",
    ),
    Trap(
        "training in the refit state",
        "RLM007",
        "policy.offload_before_refit()\npolicy.train(b, f)",
        "policy.offload_before_refit()\npolicy.get_logprobs(b)",
    ),
    *(
        Trap(
            f"computing after {call}",
            "RLM001",
            f"policy.{call}()\npolicy.get_logprobs(b)",
            f"policy.{call}()\nvalue_model.get_values(b)\npolicy.prepare_for_lp_inference()\npolicy.get_logprobs(b)",
        )
        for call in ("offload_after_refit", "offload_to_cpu", "finish_inference")
    ),
    Trap(
        "training after everything left",
        "RLM001",
        "policy.offload_to_cpu()\npolicy.train(b, f)",
        "policy.prepare_for_training()\npolicy.train(b, f)",
    ),
    Trap(
        "values after the critic left",
        "RLM001",
        "value_model.finish_training()\nvalue_model.get_values(b)",
        "value_model.get_values(b)\nvalue_model.finish_training()",
    ),
    Trap(
        "computing right after a colocated refit",
        "RLM001",
        "refit_policy_generation(policy, gen, True)\npolicy.get_logprobs(b)",
        "refit_policy_generation(policy, gen, False)\npolicy.get_logprobs(b)",
    ),
    *(
        Trap(
            f"a refit straight from {call}",
            "RLM011",
            f"policy.{call}()\nrefit_policy_generation(policy, gen, c)",
            "policy.prepare_for_lp_inference()\nrefit_policy_generation(policy, gen, c)",
        )
        for call in ("finish_inference", "offload_to_cpu")
    ),
    Trap(
        "sending weights that are away",
        "RLM011",
        "policy.offload_to_cpu()\nx = policy.broadcast_weights_for_collective()\nray.get(x)",
        "x = policy.broadcast_weights_for_collective()\nray.get(x)\npolicy.offload_to_cpu()",
    ),
    Trap(
        "bringing the trainer in beside an engine that is awake",
        "RLM010",
        "ok = gen.prepare_for_generation()\nx = gen.generate(b)\npolicy.prepare_for_training()",
        "ok = gen.prepare_for_generation()\nx = gen.generate(b)\ngen.finish_generation()\npolicy.prepare_for_training()",
    ),
    Trap(
        "waking the engine beside a trainer that is resident",
        "RLM010",
        "policy.prepare_for_training()\npolicy.train(b, f)\nok = gen.prepare_for_generation()",
        "policy.prepare_for_training()\npolicy.train(b, f)\npolicy.offload_to_cpu()\nok = gen.prepare_for_generation()",
    ),
    Trap(
        "policy and critic at once, where they take turns elsewhere",
        "RLM010",
        "value_model.prepare_for_training()\nvalue_model.train(b, f)\npolicy.prepare_for_training()\npolicy.train(b, f)\n"
        "policy.offload_to_cpu()\nvalue_model.finish_training()",
        "value_model.prepare_for_training()\nvalue_model.train(b, f)\nvalue_model.finish_training()\n"
        "policy.prepare_for_training()\npolicy.train(b, f)\npolicy.offload_to_cpu()",
    ),
    Trap(
        "generating while asleep",
        "RLM006",
        "gen.finish_generation()\ngen.generate(b)",
        "gen.generate(b)\ngen.finish_generation()",
    ),
    Trap(
        "a rollout with an engine that is asleep",
        "RLM006",
        "gen.finish_generation()\nrun_multi_turn_rollout(policy_generation=gen, batch=b)",
        "run_multi_turn_rollout(policy_generation=gen, batch=b)\ngen.finish_generation()",
    ),
    Trap(
        "a wake whose False nobody sees",
        "RLM005",
        "gen.prepare_for_generation(tags=['weights'])",
        "if gen.prepare_for_generation(tags=['weights']) is False:\n    raise RuntimeError('asleep')",
    ),
    Trap(
        "saving a critic that is away",
        "RLM014",
        "value_model.finish_training()\nvalue_model.save_checkpoint(p)",
        "value_model.save_checkpoint(p)\nvalue_model.finish_training()",
    ),
    Trap(
        "saving a policy that is away",
        "RLM014",
        "policy.offload_to_cpu()\npolicy.save_checkpoint(p)",
        "policy.save_checkpoint(p)\npolicy.offload_to_cpu()",
    ),
    Trap(
        "evaluation without an optimizer",
        "RLM017",
        "actor = Policy(c, init_optimizer=False)\nactor.train(b, f, eval_mode=True)",
        "actor = Policy(c)\nactor.train(b, f, eval_mode=True)",
    ),
    Trap(
        "reference logprobs without a reference",
        "RLM017",
        "actor = Policy(c, init_reference_model=False)\nactor.get_reference_policy_logprobs(b)",
        "actor = Policy(c, init_reference_model=flag)\nactor.get_reference_policy_logprobs(b)",
    ),
    Trap(
        "parking under a checkpoint that is still being written",
        "RLM018",
        "policy.prepare_for_training()\npolicy.save_checkpoint(p)\npolicy.finish_inference()",
        "policy.prepare_for_training()\npolicy.save_checkpoint(p)\npolicy.offload_to_cpu()",
    ),
    Trap(
        "the finish_training of a policy frees nothing",
        "RLM016",
        "policy.finish_training()",
        "value_model.finish_training()",
    ),
    Trap(
        "a policy under the name of an engine never wakes",
        "RLM016",
        "student: ColocatablePolicyInterface = make()\nstudent_generation = student\nstudent_generation.finish_generation()",
        "student_generation = make()\nstudent_generation.finish_generation()",
    ),
    Trap(
        "a keyword of the policy's for a critic",
        "RLM015",
        "value_model.prepare_for_training(keep=True)",
        "policy.prepare_for_training(keep=True)",
    ),
    Trap(
        "a positional argument to a sleep",
        "RLM015",
        "gen.finish_generation(False)",
        "gen.finish_generation(release_gpu=False)",
    ),
    Trap(
        "waiting for one side of a transfer before the other is started",
        "RLM012",
        "ray.get(policy.broadcast_weights_for_collective())\nray.get(gen.update_weights_from_collective())",
        "a = policy.broadcast_weights_for_collective()\nb = gen.update_weights_from_collective()\nray.get(a)\nray.get(b)",
    ),
    *(
        Trap(
            f"waiting for {name} of a transfer with {wait}, before the other is started",
            "RLM012",
            f"a = {first}\n{wait}\nb = {second}\nray.get(b)",
            f"a = {first}\nb = {second}\n{wait}\nray.get(b)",
        )
        for name, first, second in (
            ("the sending side", "policy.broadcast_weights_for_collective()", "gen.update_weights_from_collective()"),
            ("the receiving side", "gen.update_weights_via_ipc_zmq()", "policy.stream_weights_via_ipc_zmq(m)"),
        )
        for wait in ("ray.get(a)", "a[0].result()", "x = [f.result() for f in a]", "for f in a:\n    ray.get(f)")
    ),
    Trap(
        "waiting for the receiving side in the call that starts it",
        "RLM012",
        "ray.get(gen.update_weights_from_collective())\nray.get(policy.broadcast_weights_for_collective())",
        "ray.get([*gen.update_weights_from_collective(), *policy.broadcast_weights_for_collective()])",
    ),
    Trap(
        "a branch that waits for one side where another branch rightly has one side alone",
        "RLM012",
        "if c:\n    a = policy.broadcast_weights_for_collective()\n    ray.get(a)\n"
        "    b = gen.update_weights_from_collective()\n    ray.get(b)",
        "if c:\n    a = policy.stream_weights_via_http(m)\n    ray.get(a)\n"
        "else:\n    a = policy.broadcast_weights_for_collective()\n    b = gen.update_weights_from_collective()\n"
        "    ray.get(a)\n    ray.get(b)",
    ),
    Trap(
        "generating with the weights alone",
        "RLM006",
        "ok = gen.prepare_for_generation(tags=['weights'])\ngen.generate(b)",
        "ok = gen.prepare_for_generation(tags=['weights'])\nok = gen.prepare_for_generation(tags=['kv_cache'])\ngen.generate(b)",
    ),
    Trap(
        "a rollout with the KV cache alone",
        "RLM006",
        "gen.finish_generation()\nok = gen.prepare_for_generation(tags=['kv_cache'])\nrun_rollout(gen, b)",
        "gen.finish_generation()\nok = gen.prepare_for_generation(tags=tags)\nrun_rollout(gen, b)",
    ),
    Trap(
        "training in an open step",
        "RLM004",
        "policy.begin_train_step(f)\npolicy.train(b, f)\npolicy.finish_train_step()",
        "policy.begin_train_step(f)\npolicy.finish_train_step()\npolicy.train(b, f)",
    ),
    Trap(
        "evaluating in an open step",
        "RLM004",
        "policy.begin_train_step(f)\npolicy.train(b, f, eval_mode=True)",
        "policy.begin_train_step(f)\npolicy.abort_train_step()\npolicy.train(b, f, eval_mode=True)",
    ),
    Trap(
        "logprobs under a checkpoint that is still being written",
        "RLM018",
        "policy.save_checkpoint(p)\npolicy.prepare_for_lp_inference()",
        "policy.save_checkpoint(p)\nmanager.begin_finalization(p, wait_fn=policy.finalize_async_save)\n"
        "policy.prepare_for_lp_inference()",
    ),
    Trap(
        "logprobs that keep nothing under a checkpoint that is still being written",
        "RLM018",
        "policy.save_checkpoint(p)\npolicy.prepare_for_lp_inference(keep_train_buffers=False)",
        "policy.save_checkpoint(p)\npolicy.prepare_for_lp_inference(keep_train_buffers=True)",
    ),
    Trap(
        "offloading under a transfer",
        "RLM013",
        "a = policy.broadcast_weights_for_collective()\npolicy.offload_after_refit()\nray.get(a)",
        "a = policy.broadcast_weights_for_collective()\nray.get(a)\npolicy.offload_after_refit()",
    ),
    Trap(
        "a transfer that outlives its scope",
        "RLM013",
        "from rl_session.adapters.nemo_rl import scopes\n"
        "with scopes(policy).refit_mode():\n    a = policy.broadcast_weights_for_collective()\nray.get(a)",
        "from rl_session.adapters.nemo_rl import scopes\n"
        "with scopes(policy).refit_mode():\n    a = policy.broadcast_weights_for_collective()\n    ray.get(a)",
    ),
]


OURS = """
import rl_session as rs
from rl_session_migrate import LegacyGeneration, LegacyPolicy
"""

SCOPED = [
    Trap(
        "a shim call inside a scope, by the policy's second handle",
        "RLM104",
        "shim = LegacyPolicy(policy)\nwith policy.training_mode():\n    shim.prepare_for_lp_inference()",
        "shim = LegacyPolicy(policy)\nwith policy.training_mode():\n    shim.train(b, f)\nshim.prepare_for_lp_inference()",
    ),
    Trap(
        "a shim call inside a scope, by a handle made with a keyword",
        "RLM104",
        "shim = LegacyPolicy(policy=policy, backend='megatron')\nwith policy.training_mode():\n    shim.offload_to_cpu()",
        "shim = LegacyPolicy(policy=policy, backend='megatron')\nshim.offload_to_cpu()",
    ),
    Trap(
        "what the second handle sent away",
        "RLM001",
        "shim = LegacyPolicy(policy)\nshim.offload_to_cpu()\nshim.get_logprobs(b)",
        "shim = LegacyPolicy(policy)\nshim.offload_to_cpu()\nwith policy.logprob_mode():\n    shim.get_logprobs(b)",
    ),
    Trap(
        "a wake inside the engine's scope, by its legacy handle",
        "RLM104",
        "gen = LegacyGeneration(engine)\nwith engine.awake():\n    ok = gen.prepare_for_generation()",
        "gen = LegacyGeneration(engine)\nok = gen.prepare_for_generation()",
    ),
    Trap(
        "training after a scope that comes back to where a legacy call left the policy",
        "RLM007",
        "shim = LegacyPolicy(policy)\nshim.prepare_for_lp_inference()\nwith policy.training_mode():\n    policy.train(b, f)\n"
        "shim.train(b, f)",
        "shim = LegacyPolicy(policy)\nshim.prepare_for_training()\nwith policy.logprob_mode():\n    policy.get_logprobs(b)\n"
        "shim.train(b, f)",
    ),
    Trap(
        "a scope that comes back to the host, where no switch says otherwise",
        "RLM107",
        "mine = rs.attach(m, p)\nwith mine.logprob_mode():\n    pass\nmine.get_logprobs(b)",
        "mine = rs.attach(m, p)\nmine.switch('resident')\nwith mine.logprob_mode():\n    pass\nmine.get_logprobs(b)",
    ),
    Trap(
        "a call that the mode of a switch does not have",
        "RLM007",
        "policy.switch(rs.Mode.LOGPROB)\npolicy.train(b, f)",
        "policy.switch(rs.Mode.TRAINING)\npolicy.train(b, f)",
    ),
    Trap(
        "a scope that is entered without being made",
        "RLM101",
        "with policy.training_mode:\n    pass",
        "with policy.training_mode():\n    pass",
    ),
    Trap("a scope that is only named", "RLM101", "policy.refit_mode", "make = policy.refit_mode"),
    Trap(
        "a handle after its scope",
        "RLM108",
        "with policy.training_mode() as h:\n    pass\nh.train(b, f)",
        "with policy.training_mode() as h:\n    h.train(b, f)\nwith policy.logprob_mode() as h:\n    h.get_logprobs(b)",
    ),
    Trap(
        "a step after its block",
        "RLM108",
        "with policy.training_mode(), policy.begin_step() as step:\n    pass\nstep.forward_backward(b, f)",
        "with policy.training_mode(), policy.begin_step() as step:\n    step.forward_backward(b, f)",
    ),
    Trap(
        "training in an open step of this library",
        "RLM009",
        "with policy.training_mode():\n    step = policy.begin_step()\n    policy.train(b, f)",
        "with policy.training_mode():\n    step = policy.begin_step()\n    policy.train(b, f, eval_mode=True)\n    step.commit()",
    ),
    Trap(
        "a second step",
        "RLM009",
        "with policy.training_mode():\n    step = policy.begin_step()\n    step = policy.begin_step()",
        "with policy.training_mode():\n    step = None\n    for x in b:\n        step = step or policy.begin_step()\n"
        "    step.commit()",
    ),
    Trap(
        "sampling from a part of an engine, in its scope",
        "RLM006",
        "with engine.awake(tags=['weights']) as e:\n    e.generate(b)",
        "with engine.awake(tags=['weights']) as e:\n    pass\nwith engine.awake() as e:\n    e.generate(b)",
    ),
]


@pytest.mark.parametrize("trap", SCOPED, ids=lambda trap: trap.name)
def test_a_mistake_beside_scopes_is_found_and_its_mended_twin_is_not(trap: Trap) -> None:
    def codes(body: str) -> list[str]:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        text = f"{OURS}def step(policy: rs.Policy, engine: rs.VLLMEngine, b, f, m, p):\n{lines}"
        return [finding.code for finding in lint_text(text)]

    assert trap.code in codes(trap.wrong)
    assert codes(trap.fine) == []


def codes_of(body: str, arguments: str = "policy, value_model, gen, b, f, m, p, c, streaming, flag") -> list[str]:
    lines = "".join(f"    {line}\n" for line in dedent(body).splitlines())
    return [f.code for f in lint_text(f"{HEAD}async def step({arguments}):\n{lines}") if f.code != "RLM003"]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_the_trap_is_found_and_its_mended_twin_is_not(trap: Trap) -> None:
    assert trap.code in codes_of(trap.wrong)
    assert trap.code not in codes_of(trap.fine)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_nothing_else_is_said_about_the_mended_twin(trap: Trap) -> None:
    assert codes_of(trap.fine) == []
