"""How sites are written, and what is around them."""

from __future__ import annotations

import pytest

from rl_session_migrate.rules import Kind, Tenant
from rl_session_migrate.sites import Module, Shape, analyse
from rl_session_migrate.tree import parse


def look(code: str) -> Module:
    return analyse(parse("from nemo_rl.x import y\n" + code))


def test_nothing_is_found_in_nothing() -> None:
    assert analyse(parse("")).sites == ()


@pytest.mark.parametrize(
    ("code", "shape", "here"),
    [
        ("policy.prepare_for_training()", Shape.CALL, True),
        ("x = policy.get_logprobs(d)['logprobs']", Shape.CALL, True),
        ("await policy.prepare_for_training()", Shape.AWAITED, True),
        ("await asyncio.to_thread(policy.prepare_for_training)", Shape.TO_THREAD, True),
        ("await loop.run_in_executor(None, policy.prepare_for_training)", Shape.TO_THREAD, True),
        ("asyncio.to_thread(policy.prepare_for_training)", Shape.SUBMITTED, False),
        ("executor.submit(policy.prepare_for_training)", Shape.SUBMITTED, False),
        ("begin(path, wait_fn=policy.finalize_async_save)", Shape.VALUE, False),
        ("callback = policy.offload_to_cpu", Shape.VALUE, False),
        ("getattr(policy, 'offload_to_cpu')()", Shape.STRING, False),
        ("policy.run_all_workers_single_data('prepare_for_training')", Shape.STRING, False),
        ("policy.offload_to_cpu.remote()", Shape.REMOTE, False),
    ],
)
def test_shapes(code: str, shape: Shape, here: bool) -> None:
    module = look(f"async def f():\n    {code}\n")
    (site,) = module.sites
    assert (site.shape, site.shape.runs_here) == (shape, here)
    assert site.position.line == 3
    assert site.function.name == "f"


def test_the_tenant_decides_what_a_method_means() -> None:
    module = look("policy.finish_training()\nvalue_model.finish_training()\n")
    assert [site.rule.kind for site in module.sites] == [Kind.NOOP, Kind.OFFLOAD]


def test_positions_are_those_an_editor_shows() -> None:
    module = look("def f():\n    x = 1; policy.offload_to_cpu()\n")
    assert str(module.sites[0].position) == "3:12"


def test_what_is_around_a_site_is_known() -> None:
    code = (
        "def f():\n"
        "    for a in b:\n"
        "        if c:\n"
        "            with t.time('x'):\n"
        "                try:\n"
        "                    policy.offload_to_cpu()\n"
        "                finally:\n"
        "                    pass\n"
    )
    (site,) = look(code).sites
    assert [len(found) for found in (site.loops, site.conditions, site.withs, site.tries)] == [1, 1, 1, 1]
    assert site.is_statement
    assert not site.is_conditional


def test_the_header_of_a_with_is_not_inside_it() -> None:
    (site,) = look("with scopes(policy, policy.get_logprobs(x)):\n    pass\n").sites
    assert site.withs == ()


@pytest.mark.parametrize(
    ("code", "conditional"),
    [
        ("a and policy.get_logprobs(x)", True),
        ("policy.get_logprobs(x) and a", False),
        ("y = policy.get_logprobs(x) if a else None", True),
        ("y = [policy.get_logprobs(x) for x in xs]", True),
        ("y = [x for x in policy.get_logprobs(x)]", False),
        ("if policy.get_logprobs(x):\n    pass", False),
    ],
)
def test_what_a_statement_may_leave_out_is_conditional(code: str, conditional: bool) -> None:
    (site,) = look(code + "\n").sites
    assert site.is_conditional is conditional


def test_a_result_that_is_used_is_no_statement() -> None:
    module = look("ok = pg.prepare_for_generation()\npg.finish_generation()\n")
    assert [site.is_statement for site in module.sites] == [False, True]


def test_lambdas_and_nested_functions_are_functions_of_their_own() -> None:
    module = look("def f():\n    g(lambda: policy.offload_to_cpu())\n    def h():\n        pg.finish_generation()\n")
    assert [site.function.name for site in module.sites] == ["f.<lambda>", "f.h"]


def test_sites_are_in_the_order_of_the_source() -> None:
    module = look("value_model.train(policy.get_logprobs(x), loss)\npolicy.offload_to_cpu()\n")
    assert [site.method for site in module.sites] == ["train", "get_logprobs", "offload_to_cpu"]


def test_a_helper_knows_whom_it_is_handed() -> None:
    module = look("refit_policy_generation(student, policy_generation=pg, colocated_inference=c)\n")
    (helper,) = module.helpers
    policy, engine = helper.tenant(Tenant.POLICY), helper.tenant(Tenant.ENGINE)
    assert policy is not None
    assert engine is not None
    assert (str(policy), str(engine)) == ("student", "pg")
    assert module.at(helper.node) is helper
