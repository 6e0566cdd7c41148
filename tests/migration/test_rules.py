"""The table of methods agrees with the mode table, with the adapter, and with itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rl_session.adapters.nemo_rl.calls import LEGACY_CALLS
from rl_session.lifecycle import CALL_MODES, CALL_NEEDS, Mode
from rl_session_migrate.rules import HELPERS, RULES, SCOPES, Api, Kind, Rule, Tenant, is_distinctive, rule_of, speaks


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: f"{rule.tenant}.{rule.method}")
def test_a_gate_is_a_call_of_the_mode_table(rule: Rule) -> None:
    assert rule.gate == "" or rule.gate in CALL_MODES


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: f"{rule.tenant}.{rule.method}")
def test_compute_has_a_gate_needs_and_something_to_write(rule: Rule) -> None:
    if rule.kind is Kind.COMPUTE:
        assert rule.gate in CALL_NEEDS
        assert "params" in rule.needs
        assert rule.write
    assert rule.says


def test_gates_are_those_of_the_adapter() -> None:
    for (_, method), rule in RULES.items():
        if rule.api is Api.LEGACY and method in LEGACY_CALLS:
            assert rule.gate == LEGACY_CALLS[method], method
    named = {method for _, method in RULES}
    assert set(LEGACY_CALLS) <= named


def test_the_same_verb_means_different_things_by_tenant() -> None:
    policy, value = rule_of(Tenant.POLICY, "finish_training"), rule_of(Tenant.VALUE, "finish_training")
    assert policy is not None
    assert value is not None
    assert (policy.kind, value.kind) == (Kind.NOOP, Kind.OFFLOAD)


def test_only_moves_destroy_gradients() -> None:
    for rule in RULES.values():
        if rule.destroys_gradients:
            assert rule.kind in (Kind.PREPARE, Kind.OFFLOAD)
            assert "grads" in rule.frees


@pytest.mark.parametrize(
    ("method", "tenant"),
    [
        ("prepare_for_lp_inference", Tenant.POLICY),
        ("offload_after_refit", Tenant.POLICY),
        ("prepare_for_generation", Tenant.ENGINE),
        ("get_values", Tenant.VALUE),
        ("prepare_for_training", None),
        ("train", None),
        ("generate", None),
        ("offload_to_cpu", None),
        ("save_checkpoint", None),
    ],
)
def test_which_names_give_their_tenant_away(method: str, tenant: Tenant | None) -> None:
    assert is_distinctive(method) is tenant


@pytest.mark.parametrize(
    ("method", "does"), [("prepare_for_lp_inference", True), ("train", False), ("get_values", False)]
)
def test_which_names_say_that_a_module_is_ours(method: str, does: bool) -> None:
    assert speaks(method) is does


def test_every_scope_has_a_mode_that_is_a_scope() -> None:
    assert set(SCOPES.values()) == set(Mode) - {Mode.RESIDENT}
    assert {rule.method for rule in RULES.values() if rule.kind is Kind.SCOPE} == set(SCOPES)


def test_helpers_name_their_roles() -> None:
    for name, helper in HELPERS.items():
        assert helper.name == name
        assert helper.roles


@pytest.mark.parametrize("module", ["rules", "sites", "flow", "lint", "lint.engine", "lint.docs"])
def test_the_analysis_loads_neither_torch_nor_ray(module: str) -> None:
    code = (
        f"import sys, rl_session_migrate.{module}; "
        "sys.exit(', '.join({'torch', 'ray', 'tensordict', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
