"""Who is which tenant: evidence, aliases, and what only looks like a tenant."""

from __future__ import annotations

import pytest

from rl_session_migrate.receivers import Evidence, Names
from rl_session_migrate.rules import Api
from rl_session_migrate.sites import Module, Shape, Site, analyse
from rl_session_migrate.tree import parse

LEGACY = "from nemo_rl.algorithms.grpo import refit_policy_generation\n"


def look(code: str, names: Names | None = None, *, head: str = LEGACY) -> Module:
    return analyse(parse(head + code), names)


def only(module: Module) -> Site:
    (site,) = module.sites
    return site


def found(module: Module) -> list[tuple[str, str, str]]:
    return [
        (s.method, s.receiver.tenant.value, s.receiver.identity.path) for s in module.sites if s.receiver is not None
    ]


def test_a_module_without_tenants_has_no_sites() -> None:
    assert look("model.train()\nmodel.eval()\noptimizer.step()\n").sites == ()


@pytest.mark.parametrize(
    ("name", "method", "tenant"),
    [
        ("policy", "prepare_for_training", "policy"),
        ("student_policy", "offload_to_cpu", "policy"),
        ("teacher_policy", "prepare_for_lp_inference", "policy"),
        ("self._trainer", "prepare_for_training", "policy"),
        ("self._policy", "offload_before_refit", "policy"),
        ("value_model", "prepare_for_inference", "value"),
        ("policy_generation", "finish_generation", "engine"),
        ("student_generation", "prepare_for_generation", "engine"),
        ("pg", "finish_generation", "engine"),
        ("gen", "prepare_for_generation", "engine"),
        ("self._gen", "prepare_for_generation", "engine"),
        ("self._generation", "prepare_for_generation", "engine"),
        ("vllm_inference_policy", "prepare_for_generation", "engine"),
    ],
)
def test_names_that_loops_use_are_known(name: str, method: str, tenant: str) -> None:
    site = only(look(f"class C:\n    def go(self):\n        {name}.{method}()\n"))
    assert site.receiver is not None
    assert (site.receiver.tenant, site.receiver.identity.path) == (tenant, name)


@pytest.mark.parametrize(
    ("code", "evidence", "api"),
    [
        ("import rl_session as rs\nactor = rs.attach(m)\nactor.logprob_mode()\n", Evidence.CONSTRUCTOR, Api.SCOPED),
        ("from rl_session import attach\nx = attach(m)\nx.logprob_mode()\n", Evidence.CONSTRUCTOR, Api.SCOPED),
        (
            "import rl_session as rs\nwith rs.Session() as s:\n    x = s.attach(m)\n    x.training_mode()\n",
            Evidence.CONSTRUCTOR,
            Api.SCOPED,
        ),
        (
            "import rl_session as rs\ns = rs.Session()\nx = s.attach_value(m)\nx.inference_mode()\n",
            Evidence.CONSTRUCTOR,
            Api.SCOPED,
        ),
        (
            "from nemo_rl.models.policy.lm_policy import Policy\nx = Policy(c)\nx.prepare_for_training()\n",
            Evidence.CONSTRUCTOR,
            None,
        ),
        (
            "def f(x: ColocatablePolicyInterface):\n    x.prepare_for_training()\n",
            Evidence.ANNOTATION,
            Api.LEGACY,
        ),
        ("def f(x: Optional['ValueInterface']):\n    x.finish_training()\n", Evidence.ANNOTATION, Api.LEGACY),
        ("def f(x: GenerationInterface | None):\n    x.finish_generation()\n", Evidence.ANNOTATION, Api.LEGACY),
        ("def f(policy):\n    policy.prepare_for_training()\n", Evidence.NAME, None),
        ("def f(thing):\n    thing.prepare_for_lp_inference()\n", Evidence.METHOD, None),
    ],
)
def test_evidence_is_as_strong_as_it_is(code: str, evidence: Evidence, api: Api | None) -> None:
    site = only(look(code))
    assert site.receiver is not None
    assert (site.receiver.evidence, site.receiver.api) == (evidence, api)


def test_an_alias_is_the_object_it_names() -> None:
    module = look("def f(policy):\n    student = policy\n    same = student\n    same.offload_to_cpu()\n")
    assert found(module) == [("offload_to_cpu", "policy", "policy")]


def test_a_policy_under_an_engine_s_name_is_a_policy() -> None:
    module = look("student_generation = student_policy\nstudent_generation.prepare_for_generation()\n")
    assert found(module) == [("prepare_for_generation", "policy", "student_policy")]


def test_a_name_that_may_be_two_tenants_says_so() -> None:
    code = (
        "def f(policy, policy_generation):\n"
        "    if policy_generation is None:\n        policy_generation = policy\n"
        "    policy_generation.finish_generation()\n"
    )
    site = only(look(code))
    assert site.receiver is not None
    assert site.receiver.tenant == "engine"
    assert {str(identity) for identity in site.receiver.may_be} == {"policy"}


def test_tuples_are_unpacked_element_by_element() -> None:
    module = look("a, b = policy, value_model\na.offload_to_cpu()\nb.finish_training()\n")
    assert found(module) == [("offload_to_cpu", "policy", "policy"), ("finish_training", "value", "value_model")]


def test_what_a_setup_function_returns_is_known_by_its_names() -> None:
    module = look("policy, pg, *rest = setup(config)\npolicy.offload_to_cpu()\npg.finish_generation()\n")
    assert [tenant for _, tenant, _ in found(module)] == ["policy", "engine"]


def test_attributes_of_self_are_one_object_in_every_method() -> None:
    code = (
        "class C:\n"
        "    def __init__(self, trainer: Policy):\n        self.learner = trainer\n"
        "    def a(self):\n        self.learner.prepare_for_lp_inference()\n"
        "    def b(self):\n        self.learner.offload_before_refit()\n"
    )
    homes = {s.receiver.identity for s in look(code).sites if s.receiver is not None}
    assert [(i.home, i.path) for i in homes] == [("C", "self.learner")]


def test_the_elements_of_a_collection_are_tenants_but_not_one_object() -> None:
    module = look("def f(teachers: list[Policy], xs):\n    for t in teachers:\n        t.offload_after_refit()\n")
    site = only(module)
    assert site.receiver is not None
    assert not site.receiver.is_single
    site = only(look("def f(policies):\n    policies[0].offload_to_cpu()\n"))
    assert site.receiver is not None
    assert not site.receiver.is_single


def test_scopes_of_an_object_speaks_of_that_object() -> None:
    head = "from rl_session.adapters.nemo_rl import scopes\n"
    site = only(look("scopes(policy).logprob_mode()\n", head=head))
    assert site.receiver is not None
    assert site.receiver.is_scopes
    assert site.receiver.identity.path == "policy"


def test_a_handle_is_its_policy() -> None:
    module = look(
        "import rl_session as rs\n"
        "policy = rs.attach(m)\n"
        "with policy.training_mode() as handle:\n    step = policy.begin_step()\n    handle.train(b, loss)\n    step.commit()\n"
    )
    assert [(method, path) for method, _, path in found(module)] == [
        ("training_mode", "policy"),
        ("begin_step", "policy"),
        ("train", "policy"),
        ("commit", "policy"),
    ]


def test_configured_names_are_tenants_and_ignored_ones_are_not() -> None:
    code = "learner.offload_to_cpu()\nsampler.generate(x)\npolicy.offload_to_cpu()\n"
    module = look(code, Names(policies={"learner"}, engines={"sampler"}, ignore={"policy"}))
    assert found(module) == [("offload_to_cpu", "policy", "learner"), ("generate", "engine", "sampler")]


@pytest.mark.parametrize(
    "code",
    [
        "model.train()\nmodel.train(False)\nself.model.train(mode=True)\n",
        "policy.train()\npolicy.train(True)\npolicy.train(mode=False)\n",
        "import torch.nn as nn\ndef f(policy: nn.Module):\n    policy.train(x, y)\n",
        "class Policy(nn.Module):\n    pass\npolicy = Policy()\npolicy.train(x, y)\n",
        "policy = torch.nn.Linear(1, 2)\npolicy.train(x, y)\n",
        "policy = torch.nn.Linear(1, 2)\npolicy = compiled(policy)\npolicy.train(x, y)\n",
        "from tianshou.policy import Policy\npolicy = Policy()\npolicy.train(x, y)\n",
        "for pg in optimizer.param_groups:\n    pg.finish_generation()\n",
        "gen = torch.Generator()\ngen.generate(x)\n",
        "policy = {}\npolicy.train(x)\n",
        "self.config.policy.train(x)\n",
        "import policy\npolicy.train(x, y)\n",
        "buffer.offload_to_cpu()\nself.param_and_grad_buffer.offload_to_cpu()\n",
        "sampler._prepare_for_training_step()\nprepare_step()\nfinish_step()\n",
        "self.prepare_for_generation()\nsuper().offload_after_refit()\n",
        "timer.time('prepare_for_generation/total')\nlog('offload_before_refit')\n",
        "rollout(finish_generation=False)\n",
        "def finish_generation(policy):\n    pass\n",
        "score = env.score(x)\nreward.score(y)\n",
        "with torch.inference_mode():\n    pass\n",
        "policy.prepare_for_training = None\n",
    ],
)
def test_homonyms_are_left_alone(code: str) -> None:
    assert look(f"class C:\n    def go(self):\n{_indented(code)}").sites == ()


def _indented(code: str) -> str:
    return "".join(f"        {line}\n" for line in code.splitlines())


@pytest.mark.parametrize(
    "code",
    [
        "policy.train(x, y)\n",
        "policy.generate(x)\nactor.get_logprobs(y)\n",
        "from stable_baselines3 import PPO\npolicy.save_checkpoint(p)\ncritic.train(x, y)\n",
        "self.model.prepare_for_inference()\nself.model.finish_inference()\nmodel.prepare_for_training()\n",
    ],
)
def test_a_module_that_knows_neither_api_is_somebody_else_s(code: str) -> None:
    assert look(code, head="").sites == ()


def test_an_actor_s_method_of_the_same_name_is_no_tenant_s() -> None:
    site = only(look("ray.get(collector.resume_after_refit.remote())\n"))
    assert (site.shape, site.receiver) == (Shape.REMOTE, None)


def test_a_parameter_is_what_every_call_hands_it() -> None:
    module = look("def send(model):\n    model.offload_to_cpu()\nsend(policy)\nsend(model=student_policy)\n")
    assert found(module) == [("offload_to_cpu", "policy", "model")]
    module = look("def send(model):\n    model.offload_to_cpu()\nsend(policy)\nsend(something)\n")
    assert found(module) == []
    module = look("def send(model: nn.Module):\n    model.offload_to_cpu()\nsend(policy)\n")
    assert found(module) == []
