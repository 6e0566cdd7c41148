"""Every illegal use and every trap of the legacy contract, as source: the linter finds it, or the run time answers for it.

One program a row. It is linted, and it is run on the shim on both backends; the row says which codes the linter gives and what
running it does: an error that names the legacy call and the scope, or the difference from legacy that the guide states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import legacy_loops as loops
import pytest
import torch
from shim_rig import Actor, Critic, MainGrad

import rl_session as rs
from rl_session.testing import EmulatedDevice, FakeEngine
from rl_session_migrate import LegacyGeneration, LegacyPolicy, LegacyValue, refit_policy_generation
from rl_session_migrate.lint import lint_text

pytestmark = pytest.mark.filterwarnings("ignore:.*legacy API:DeprecationWarning")

BOTH = ("dtensor", "megatron")


class Mistake(NamedTuple):
    """One row.

    Attributes:
        name: What is wrong.
        body: The program.
        lint: The code that the linter gives at the program's last call that matters; "" where source cannot show it.
        error: What running it raises; None where it is served.
        says: What the remedy has to say.
        backends: Where that error is raised; on the other one the program is served.
        then: Looks at what a program that is served has left; returns what must be true.
    """

    name: str
    body: str
    lint: str
    error: type[rs.RLSessionError] | None = None
    says: tuple[str, ...] = ()
    backends: tuple[str, ...] = BOTH
    then: Callable[[World], bool] | None = None


class World:
    """A policy, a critic and a colocated engine on one device, behind the legacy API."""

    def __init__(self, folder: Path, backend: Any) -> None:
        self.path = folder / "run.jsonl"
        self.session = rs.Session(self.path, verify="checksum")
        device = EmulatedDevice()
        torch.manual_seed(0)
        self.actor, critic = Actor(), Critic()
        flat = MainGrad if backend == "megatron" else lambda params: torch.optim.AdamW(params, lr=0.1)
        policy = self.session.attach(self.actor, flat(self.actor.parameters()), name="actor", device=device)
        value = self.session.attach_value(critic, flat(critic.parameters()), name="critic", device=device)
        self.fake = FakeEngine(device, weights=512, kv_nbytes=256, vocabulary=7)
        config = {"offload_optimizer_for_logprob": True}
        self.policy = LegacyPolicy(policy, backend=backend, config=config)
        self.value = LegacyValue(value, backend=backend)
        self.generation = LegacyGeneration(self.session.engine("vllm", self.fake))
        self.policy.prepare_for_training()
        self.policy.train(loops.text(1), loops.NextTokenLoss())
        self.policy.offload_to_cpu()
        self.names = {
            "policy": self.policy,
            "value_model": self.value,
            "policy_generation": self.generation,
            "refit_policy_generation": refit_policy_generation,
            "b": loops.text(1),
            "prompts": loops.prompts(0),
            "loss_fn": loops.NextTokenLoss(),
            "path": str(folder / "saved"),
            "engine_fails": lambda: self.fake.fail("wake"),
        }

    def run(self, body: str) -> None:
        exec(compile(body, "mistake.py", "exec"), self.names)  # noqa: S102 (the program of the row)

    def warned(self, code: str) -> bool:
        return any(record.event.code == code for record in rs.read_audit(self.path) if record.name == "warning")


def kept(world: World) -> bool:
    return world.warned("open_step_kept") and world.policy.scoped.open_step is not None


def beside(world: World) -> bool:
    return world.policy.mode == "training"


NO_LINT = ""
STEP = "policy.prepare_for_training()\npolicy.begin_train_step(loss_fn)\npolicy.train_microbatches_from_meta(b)\n"
LP = ("policy.prepare_for_lp_inference()", "with policy.logprob_mode()")
TRAIN = ("policy.prepare_for_training()", "with policy.training_mode()")

MISTAKES = [
    # -- illegal uses ------------------------------------------------------------------------------------------------
    Mistake(
        "a second step",
        STEP + "policy.begin_train_step(loss_fn)",
        "RLM009",
        rs.OpenStepError,
        ("policy.finish_train_step()", "policy.abort_train_step()"),
    ),
    Mistake(
        "a chunk without a step",
        "policy.prepare_for_training()\npolicy.train_microbatches_from_meta(b)",
        NO_LINT,
        rs.StepClosedError,
        ("policy.begin_train_step(loss_fn)", "policy.begin_step()"),
    ),
    Mistake(
        "a chunk of a step that was ended",
        STEP + "policy.finish_train_step()\npolicy.train_microbatches_from_meta(b)",
        "RLM009",
        rs.StepClosedError,
        ("policy.begin_train_step(loss_fn)",),
    ),
    Mistake(
        "the end of no step",
        "policy.prepare_for_training()\npolicy.finish_train_step()",
        NO_LINT,
        rs.StepClosedError,
        ("policy.begin_train_step(loss_fn)",),
    ),
    *(
        Mistake(f"{call} in an open step", STEP + f"policy.{call}()", "RLM004", then=kept, backends=("megatron",))
        for call in ("prepare_for_lp_inference", "offload_before_refit", "offload_after_refit", "offload_to_cpu")
    ),
    Mistake(
        "a refit in an open step",
        STEP + "refit_policy_generation(policy, policy_generation, True)",
        "RLM004",
        then=kept,
        backends=("megatron",),
    ),
    Mistake(
        "a whole train call in an open step",
        STEP + "policy.train(b, loss_fn)",
        "RLM004",
        rs.OpenStepError,
        ("policy.finish_train_step()", "step.commit()"),
    ),
    Mistake(
        "a chunk in eval mode",
        STEP + "policy.prepare_for_lp_inference(keep_train_buffers=True)\npolicy.get_logprobs_from_meta(b)\n"
        "policy.train_microbatches_from_meta(b)",
        "RLM008",
        then=lambda world: world.policy.scoped.open_step is not None,  # computed in train mode, as the guide says
    ),
    Mistake(
        "training in LP",
        "policy.prepare_for_training()\npolicy.prepare_for_lp_inference()\n"
        "policy.get_logprobs(b)\npolicy.train(b, loss_fn)",
        "RLM007",
        rs.ModeError,
        TRAIN,
    ),
    Mistake(
        "evaluating with train in LP",
        "policy.prepare_for_lp_inference()\npolicy.get_logprobs(b)\npolicy.train(b, loss_fn, eval_mode=True)",
        "RLM007",
        rs.ModeError,
        TRAIN,
        ("megatron",),
    ),
    Mistake(
        "training in REFIT",
        "policy.prepare_for_training()\npolicy.offload_before_refit()\npolicy.train(b, loss_fn)",
        "RLM007",
        rs.ModeError,
        TRAIN,
    ),
    Mistake("training in OFF", "policy.offload_to_cpu()\npolicy.train(b, loss_fn)", "RLM001", rs.ModeError, TRAIN),
    *(
        Mistake(
            f"log-probabilities after {call}",
            f"policy.prepare_for_lp_inference()\npolicy.get_logprobs(b)\npolicy.{call}()\npolicy.get_logprobs(b)",
            "RLM001",
            rs.ModeError,
            LP,
        )
        for call in ("offload_after_refit", "offload_to_cpu", "finish_inference")
    ),
    Mistake(
        "values after the critic left",
        "value_model.prepare_for_inference()\nvalue_model.get_values(b)\nvalue_model.finish_inference()\n"
        "value_model.get_values(b)",
        "RLM001",
        rs.ModeError,
        ("value.prepare_for_inference()", "with value.inference_mode()"),
    ),
    *(
        Mistake(
            f"a refit straight from {call}, colocated={colocated}",
            f"policy.{call}()\nrefit_policy_generation(policy, policy_generation, {colocated})",
            "RLM011",
            rs.ModeError,
            ("policy.prepare_for_lp_inference()", "policy.refit(engine)"),
        )
        for call in ("finish_inference", "offload_to_cpu")
        for colocated in (True, False)
    ),
    Mistake(
        "sending weights that are away",
        "policy.offload_to_cpu()\nx = policy.broadcast_weights_for_collective()\n"
        "y = policy_generation.update_weights_from_collective()\nray.get(x + y)",
        "RLM011",
        rs.ModeError,
        ("policy.prepare_for_lp_inference()", "policy.refit(engine)"),
    ),
    Mistake(
        "bringing the trainer in beside an engine that is awake",
        "assert policy_generation.prepare_for_generation()\npolicy_generation.generate(prompts)\n"
        "policy.prepare_for_training()",
        "RLM010",
        then=beside,  # whoever needs the room gets it
    ),
    Mistake(
        "generating while asleep",
        "policy_generation.finish_generation()\npolicy_generation.generate(prompts)",
        "RLM006",
        rs.ModeError,
        ("policy_generation.prepare_for_generation()", "with engine.awake()"),
    ),
    Mistake(
        "generating with the weights alone",
        'assert policy_generation.prepare_for_generation(tags=["weights"])\npolicy_generation.generate(prompts)',
        "RLM006",
        rs.ModeError,
        ("prepare_for_generation(tags=['kv_cache'])", "with engine.awake()"),
    ),
    Mistake(
        "a wake that fails, and nobody looks",
        "engine_fails()\npolicy_generation.prepare_for_generation()",
        "RLM005",
        then=lambda world: world.warned("legacy_failure_ignored") and not world.fake.awake_tags,
    ),
    *(
        Mistake(
            f"saving a {name} that is away",
            f"{name}.{call}()\n{name}.save_checkpoint(path)",
            "RLM014",
            then=lambda world: Path(world.names["path"]).exists(),  # written from the host copies
        )
        for name, call in (("policy", "offload_to_cpu"), ("value_model", "finish_training"))
    ),
    Mistake(
        "reference log-probabilities without a reference",
        "policy.prepare_for_lp_inference()\npolicy.get_reference_policy_logprobs(b)",
        NO_LINT,
        rs.UnsupportedError,
        ('reference="copy"',),
    ),
    # -- traps -------------------------------------------------------------------------------------------------------
    *(
        Mistake(
            f"{call} under a checkpoint that nobody waited for",
            f"policy.prepare_for_training()\npolicy.save_checkpoint(path)\npolicy.{call}()",
            "RLM018",
            then=lambda world: Path(world.names["path"]).exists(),  # complete when the call returns
        )
        for call in ("finish_inference", "prepare_for_lp_inference")
    ),
    Mistake(
        "policy and critic at once, where they take turns",
        "value_model.prepare_for_training()\nvalue_model.get_values(b)\npolicy.prepare_for_training()\n"
        "policy.train(b, loss_fn)\nvalue_model.finish_training()",
        "RLM010",
        then=beside,
    ),
    Mistake(
        "offload_after_refit restores nothing",
        "policy.prepare_for_training()\npolicy.train(b, loss_fn)\npolicy.offload_after_refit()\npolicy.train(b, loss_fn)",
        "RLM001",
        rs.ModeError,
        TRAIN,
    ),
    Mistake(
        "the finish_training of a policy frees nothing",
        "policy.prepare_for_training()\npolicy.train(b, loss_fn)\npolicy.finish_training()",
        "RLM016",
        then=beside,
    ),
    Mistake(
        "a policy under the name of an engine",
        "policy: LegacyPolicy\nstudent_generation = policy\nstudent_generation.prepare_for_generation()\n"
        "student_generation.generate(prompts)",
        "RLM016",
        rs.UsageError,
        ("LegacyGeneration(engine).generate(batch)", "with engine.awake()"),
    ),
    Mistake(
        "waiting for one side of a transfer before the other is told",
        "policy.prepare_for_lp_inference()\nx = policy.broadcast_weights_for_collective()\n"
        "x[0].result(timeout=0)\ny = policy_generation.update_weights_from_collective()\ny[0].result()",
        "RLM012",
    ),
    # -- beside scopes -----------------------------------------------------------------------------------------------
    Mistake(
        "a legacy call inside a scope",
        "with policy.training_mode():\n    policy.train(b, loss_fn)\n    policy.offload_to_cpu()",
        "RLM104",
        rs.ShimInScopeError,
        ("with policy.offloaded()", "after the block of training_mode()"),
    ),
    Mistake(
        "a legacy call inside a scope, by a second handle",
        "shim = LegacyPolicy(policy)\nwith policy.training_mode():\n    shim.prepare_for_lp_inference()",
        "RLM104",
        rs.ShimInScopeError,
        ("with policy.logprob_mode()",),
    ),
]


@pytest.fixture(params=BOTH)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, request.param)
    made.names["LegacyPolicy"] = lambda legacy: LegacyPolicy(legacy.scoped)  # as if the loop had a policy in scopes
    yield made
    made.fake.heal()
    made.session.close()


def codes_of(body: str) -> set[str]:
    head = "from rl_session_migrate import LegacyPolicy, refit_policy_generation\n"
    arguments = "policy, value_model, policy_generation, b, prompts, loss_fn, path"
    return {finding.code for finding in lint_text(f"{head}def step({arguments}):\n{indent(body, '    ')}\n")}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found_in_source_or_answered_for_at_run_time(mistake: Mistake, world: World) -> None:
    if mistake.lint:
        assert mistake.lint in codes_of(mistake.body)
    backend = "megatron" if world.policy.cfg["megatron_cfg"]["enabled"] else "dtensor"
    if mistake.error is not None and backend in mistake.backends:
        with pytest.raises(mistake.error) as refused:
            world.run(mistake.body)
        for words in mistake.says:
            assert words in refused.value.remedy
        return
    assert mistake.lint, "what is served must at least be found"
    if mistake.name.startswith("waiting"):
        with pytest.raises(TimeoutError):  # legacy waited two minutes; then the loop may go on
            world.run(mistake.body)
        return
    world.run(mistake.body)
    if mistake.then is not None and backend in mistake.backends:
        assert mistake.then(world)
