"""What every lifecycle, compute and transfer method of the manual API means, and what to write instead. Data only.

One table, read by the linter, the codemod and the documentation, so that they cannot disagree. A rule belongs to a method
*of a tenant*: ``finish_training`` of a value model offloads everything, of a policy it does nothing. Knows nothing of
source code; who is which tenant is decided in :mod:`rl_session_migrate.receivers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import attrs

from rl_session.lifecycle import Mode

__all__ = [
    "HELPERS",
    "RULES",
    "SCOPES",
    "Api",
    "Helper",
    "Kind",
    "Rule",
    "Tenant",
    "is_distinctive",
    "methods",
    "rule_of",
    "rules_of",
    "speaks",
    "tenants_of",
]


class Tenant(StrEnum):
    """Who lives on the GPUs."""

    POLICY = "policy"
    VALUE = "value"
    ENGINE = "engine"
    SYNCHRONIZER = "synchronizer"
    """A weight synchroniser: it moves the policy and wakes the engine by itself."""


class Kind(StrEnum):
    """What a method does to where bytes are."""

    PREPARE = "prepare"
    OFFLOAD = "offload"
    WAKE = "wake"
    SLEEP = "sleep"
    COMPUTE = "compute"
    STEP = "step"
    """Begins, feeds, ends or aborts a train step that stays open between calls."""
    STATE = "state"
    """Reads or writes state (checkpoints, metadata, caches) and moves nothing by contract."""
    TRANSFER = "transfer"
    """One side of a weight transfer; legacy ones return futures."""
    REFIT = "refit"
    """A whole push of weights: offload, wake, transfer, offload, wake."""
    NOOP = "no-op"
    SCOPE = "scope"
    """Makes a scope of this library, to be entered with ``with``."""
    SWITCH = "switch"
    """Changes the resting mode of a policy of this library."""


class Api(StrEnum):
    """Whose method it is."""

    LEGACY = "legacy"
    SCOPED = "scoped"


def _components(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


PARAMS, GRADS, OPTIMIZER = "params", "grads", "optimizer"
_NOTHING: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True)
class Rule:
    """One method of one tenant.

    Attributes:
        method: Its name.
        tenant: Whose method it is.
        kind: What it does.
        mode: The mode it leaves its tenant in (lifecycle), or makes a scope of (scopes); None for everything else. A wake
            leaves GENERATION, a sleep OFFLOADED.
        gate: What the mode table calls it, "" where no mode forbids it.
        needs: Components that must be on the device.
        brings: Components that it brings to the device.
        frees: Components that leave the device, on at least one backend and with default flags.
        destroys_gradients: Whether Megatron frees the gradient buffer without saving it.
        evaluates: Whether it leaves the module in eval mode; None leaves the mode as it is, False leaves train.
        write: What to write instead; ``{0}`` is the receiver.
        says: One line: what it does, for findings and documentation.
        distinctive: Whether the name alone says that the receiver is a tenant of this kind.
        num_args: The fewest arguments a real call has: ``train()`` of a torch module has none.
        takes: Keywords it accepts; None accepts anything.
        api: Whose method it is.
    """

    method: str
    tenant: Tenant
    kind: Kind
    mode: Mode | None = None
    gate: str = ""
    needs: frozenset[str] = attrs.field(default=_NOTHING, converter=_components)
    brings: frozenset[str] = attrs.field(default=_NOTHING, converter=_components)
    frees: frozenset[str] = attrs.field(default=_NOTHING, converter=_components)
    destroys_gradients: bool = False
    evaluates: bool | None = None
    write: str = ""
    says: str = ""
    distinctive: bool = False
    num_args: int = 0
    takes: frozenset[str] | None = None
    api: Api = Api.LEGACY

    @property
    def is_lifecycle(self) -> bool:
        """Whether it moves bytes, or is a call of the lifecycle API that moves none."""
        return self.kind in _LIFECYCLE

    @property
    def computes(self) -> bool:
        """Whether it runs the model, and so needs its weights on the device."""
        return self.kind is Kind.COMPUTE or (self.kind is Kind.STEP and bool(self.needs))


_LIFECYCLE = frozenset({Kind.PREPARE, Kind.OFFLOAD, Kind.WAKE, Kind.SLEEP, Kind.NOOP})


@attrs.frozen(kw_only=True)
class Helper:
    """A function that is handed tenants and does a known thing to them.

    Attributes:
        name: The function's name.
        kind: What it does.
        roles: The tenant at each leading position, with the parameter's name.
        write: What to write instead; ``{0}``, ``{1}`` are the arguments of the roles.
        says: One line.
    """

    name: str
    kind: Kind
    roles: tuple[tuple[str, Tenant], ...]
    write: str
    says: str


def _policy_rules() -> Iterable[Rule]:
    tenant = Tenant.POLICY
    weights = {PARAMS}
    everything = {PARAMS, GRADS, OPTIMIZER}

    def lifecycle(method: str, kind: Kind, mode: Mode | None, write: str, says: str, **more: object) -> Rule:
        return Rule(method=method, tenant=tenant, kind=kind, mode=mode, write=write, says=says, **more)  # type: ignore[arg-type]

    yield lifecycle(
        "prepare_for_training",
        Kind.PREPARE,
        Mode.TRAINING,
        "with scopes({0}).training_mode():",
        "brings parameters, gradients and optimizer state to the device",
        brings=everything,
        evaluates=False,
    )
    yield lifecycle(
        "prepare_for_lp_inference",
        Kind.PREPARE,
        Mode.LOGPROB,
        "with scopes({0}).logprob_mode():",
        "brings the parameters to the device; Megatron frees the gradients unless keep_train_buffers=True",
        brings=weights,
        frees={GRADS, OPTIMIZER},
        destroys_gradients=True,
        evaluates=True,
        distinctive=True,
        takes=frozenset({"keep_train_buffers"}),
    )
    yield lifecycle(
        "offload_before_refit",
        Kind.OFFLOAD,
        Mode.REFIT,
        "scopes({0}).refit({1}, transfer)",
        "sends the optimizer state to the host; Megatron frees the gradients",
        frees={GRADS, OPTIMIZER},
        destroys_gradients=True,
        distinctive=True,
        takes=_NOTHING,
    )
    for method in ("offload_after_refit", "offload_to_cpu"):
        yield lifecycle(
            method,
            Kind.OFFLOAD,
            Mode.OFFLOADED,
            "scopes({0}).offload()",
            "sends everything to the host; Megatron frees the gradients",
            frees=everything,
            destroys_gradients=True,
            evaluates=True,
            distinctive=method == "offload_after_refit",
            takes=_NOTHING,
        )
    yield lifecycle(
        "finish_inference",
        Kind.OFFLOAD,
        Mode.OFFLOADED,
        "the end of `with scopes({0}).logprob_mode():`",
        "sends the parameters to the host; gradients and optimizer state stay where they are",
        frees=weights,
        evaluates=True,
        takes=_NOTHING,
    )
    for method, says in {
        "finish_training": "does nothing: it is an empty placeholder of a policy",
        "prepare_for_generation": "does nothing: a policy is no engine that sleeps",
        "finish_generation": "does nothing: a policy is no engine that sleeps",
        "invalidate_kv_cache": "does nothing: a policy has no KV cache",
    }.items():
        yield lifecycle(method, Kind.NOOP, None, "nothing: leave the call out", says)

    inference = {
        "get_logprobs": "get_logprobs",
        "get_logprobs_from_meta": "get_logprobs",
        "calibrate_qkv_fp8_scales": "get_logprobs",
        "get_reference_policy_logprobs": "get_reference_policy_logprobs",
        "get_reference_policy_logprobs_from_meta": "get_reference_policy_logprobs",
        "get_topk_logits": "get_topk_logits",
        "get_full_logits_ipc": "get_topk_logits",
        "score": "score",
    }
    for method, gate in inference.items():
        yield Rule(
            method=method,
            tenant=tenant,
            kind=Kind.COMPUTE,
            gate=gate,
            needs=weights,
            evaluates=True,
            write="with scopes({0}).logprob_mode():",
            says="runs the model under no_grad and leaves it in eval mode",
            distinctive=method != "score",
            num_args=1,
        )
    for method in ("train", "train_from_meta"):
        yield Rule(
            method=method,
            tenant=tenant,
            kind=Kind.COMPUTE,
            gate="train",
            needs=everything,
            evaluates=False,
            write="with scopes({0}).training_mode():",
            says="runs forward, backward and optimizer steps",
            distinctive=method != "train",
            num_args=1,
        )
    for method, gate, says in (
        ("begin_train_step", "begin_step", "zeroes the gradients and opens a train step"),
        ("train_microbatches_from_meta", "forward_backward", "adds the gradients of a chunk to the open train step"),
        ("finish_train_step", "commit", "ends the open train step with an optimizer step"),
        ("abort_train_step", "", "ends the open train step without an optimizer step"),
    ):
        yield Rule(
            method=method,
            tenant=tenant,
            kind=Kind.STEP,
            gate=gate,
            needs=everything if gate == "commit" else {PARAMS, GRADS} if gate else _NOTHING,
            evaluates=False if gate == "begin_step" else None,
            write="with scopes({0}).training_mode() as handle:",
            says=says,
            distinctive=True,
        )
    for method in ("stream_weights_via_ipc_zmq", "stream_weights_via_http", "broadcast_weights_for_collective"):
        yield Rule(
            method=method,
            tenant=tenant,
            kind=Kind.TRANSFER,
            gate="publish",
            needs=weights,
            write="scopes({0}).refit({1}, transfer)",
            says="starts to send the weights and returns futures",
            distinctive=True,
        )
    yield Rule(
        method="save_checkpoint",
        tenant=tenant,
        kind=Kind.STATE,
        gate="save_checkpoint",
        needs=weights,
        says="writes what is on the device; only a Megatron policy brings it there by itself",
    )
    for method, says, distinctive in (
        ("finalize_async_save", "waits for an asynchronous checkpoint", True),
        ("prepare_refit_info", "reads names, shapes and types of the weights", False),
        ("release_ipc_buffer", "frees the buffer of the teacher's logits", True),
        ("get_free_memory_bytes", "reads the free memory of the device", False),
    ):
        yield Rule(method=method, tenant=tenant, kind=Kind.STATE, says=says, distinctive=distinctive)


def _value_rules() -> Iterable[Rule]:
    tenant = Tenant.VALUE
    everything = {PARAMS, GRADS, OPTIMIZER}
    yield Rule(
        method="prepare_for_training",
        tenant=tenant,
        kind=Kind.PREPARE,
        mode=Mode.TRAINING,
        brings=everything,
        evaluates=False,
        write="with scopes({0}).training_mode():",
        says="brings parameters, gradients and optimizer state to the device",
        takes=_NOTHING,
    )
    yield Rule(
        method="prepare_for_inference",
        tenant=tenant,
        kind=Kind.PREPARE,
        mode=Mode.LOGPROB,
        brings={PARAMS},
        frees={GRADS},
        destroys_gradients=True,
        evaluates=True,
        write="with scopes({0}).inference_mode():",
        says="brings the parameters to the device; Megatron frees the gradients",
        takes=_NOTHING,
    )
    yield Rule(
        method="finish_inference",
        tenant=tenant,
        kind=Kind.OFFLOAD,
        mode=Mode.OFFLOADED,
        frees={PARAMS},
        write="the end of `with scopes({0}).inference_mode():`",
        says="sends the parameters to the host; gradients and optimizer state stay where they are",
        takes=_NOTHING,
    )
    yield Rule(
        method="finish_training",
        tenant=tenant,
        kind=Kind.OFFLOAD,
        mode=Mode.OFFLOADED,
        frees=everything,
        destroys_gradients=True,
        evaluates=True,
        write="scopes({0}).offload()",
        says="sends everything to the host; Megatron frees the gradients",
        takes=_NOTHING,
    )
    yield Rule(
        method="get_values",
        tenant=tenant,
        kind=Kind.COMPUTE,
        gate="get_values",
        needs={PARAMS},
        evaluates=True,
        write="with scopes({0}).inference_mode():",
        says="runs the model under no_grad and leaves it in eval mode",
        distinctive=True,
        num_args=1,
    )
    yield Rule(
        method="train",
        tenant=tenant,
        kind=Kind.COMPUTE,
        gate="train",
        needs=everything,
        evaluates=False,
        write="with scopes({0}).training_mode():",
        says="runs forward, backward and optimizer steps",
        num_args=1,
    )
    yield Rule(
        method="save_checkpoint",
        tenant=tenant,
        kind=Kind.STATE,
        gate="save_checkpoint",
        needs={PARAMS},
        says="writes what is on the device, and brings nothing there",
    )


def _engine_rules() -> Iterable[Rule]:
    tenant = Tenant.ENGINE
    yield Rule(
        method="prepare_for_generation",
        tenant=tenant,
        kind=Kind.WAKE,
        mode=Mode.GENERATION,
        write="with scopes({0}).awake():",
        says="wakes the engine; vLLM and TensorRT-LLM report a failure by False",
        distinctive=True,
    )
    yield Rule(
        method="finish_generation",
        tenant=tenant,
        kind=Kind.SLEEP,
        mode=Mode.OFFLOADED,
        write="the end of `with scopes({0}).awake():`",
        says="puts the engine to sleep",
        distinctive=True,
    )
    for method in ("generate", "generate_async"):
        yield Rule(
            method=method,
            tenant=tenant,
            kind=Kind.COMPUTE,
            gate="generate",
            needs={PARAMS},
            write="with scopes({0}).awake():",
            says="samples from the engine",
            num_args=1,
        )
    for method in (
        "update_weights_via_ipc_zmq",
        "update_weights_from_collective",
        "update_weights_from_ipc_handles",
    ):
        yield Rule(
            method=method,
            tenant=tenant,
            kind=Kind.TRANSFER,
            write="scopes(policy).refit({0}, transfer)",
            says="starts to receive the weights and returns futures",
            distinctive=True,
        )
    for method, says in (
        ("suspend_for_refit", "pauses the engine around a weight swap"),
        ("resume_after_refit", "resumes the engine after a weight swap"),
        ("invalidate_kv_cache", "drops the KV cache"),
    ):
        yield Rule(method=method, tenant=tenant, kind=Kind.STATE, says=says, distinctive=method != "resume_after_refit")
    yield Rule(
        method="prepare_refit_info",
        tenant=tenant,
        kind=Kind.STATE,
        says="tells the engine names, shapes and types of the weights",
    )


def _synchronizer_rules() -> Iterable[Rule]:
    yield Rule(
        method="sync_weights",
        tenant=Tenant.SYNCHRONIZER,
        kind=Kind.REFIT,
        mode=Mode.GENERATION,
        write="scopes(policy).refit(policy_generation, transfer)",
        says="pushes the weights; depending on the class it offloads the policy and wakes the engine",
    )
    yield Rule(
        method="init_communicator",
        tenant=Tenant.SYNCHRONIZER,
        kind=Kind.STATE,
        says="connects trainer and engine",
    )


SCOPES: Mapping[str, Mode] = {
    "training_mode": Mode.TRAINING,
    "logprob_mode": Mode.LOGPROB,
    "inference_mode": Mode.LOGPROB,
    "refit_mode": Mode.REFIT,
    "generation_mode": Mode.GENERATION,
    "awake": Mode.GENERATION,
    "offloaded": Mode.OFFLOADED,
}
"""The methods of this library that make a scope, and its mode."""

_SCOPES_OF: Mapping[Tenant, tuple[str, ...]] = {
    Tenant.POLICY: ("training_mode", "logprob_mode", "refit_mode", "generation_mode", "offloaded"),
    Tenant.VALUE: ("training_mode", "inference_mode", "offloaded"),
    Tenant.ENGINE: ("awake",),
}


def _scoped_rules() -> Iterable[Rule]:
    for tenant, scopes in _SCOPES_OF.items():
        for method in scopes:
            yield Rule(
                method=method,
                tenant=tenant,
                kind=Kind.SCOPE,
                mode=SCOPES[method],
                says=f"makes a scope of {SCOPES[method]} mode",
                distinctive=method in ("logprob_mode", "refit_mode"),
                api=Api.SCOPED,
            )
    for tenant in (Tenant.POLICY, Tenant.VALUE):
        yield Rule(
            method="switch",
            tenant=tenant,
            kind=Kind.SWITCH,
            says="changes the resting mode",
            num_args=1,
            api=Api.SCOPED,
        )
        yield Rule(
            method="offload",
            tenant=tenant,
            kind=Kind.SWITCH,
            mode=Mode.OFFLOADED,
            frees={PARAMS, GRADS, OPTIMIZER},
            says="rests on the host",
            api=Api.SCOPED,
        )
        yield Rule(
            method="begin_step",
            tenant=tenant,
            kind=Kind.STEP,
            gate="begin_step",
            needs={PARAMS, GRADS, OPTIMIZER},
            write="with {0}.training_mode():",
            says="opens a train step",
            api=Api.SCOPED,
        )
        for method, gate in (("load_checkpoint", "load_checkpoint"), ("iter_weights", "iter_weights")):
            yield Rule(
                method=method,
                tenant=tenant,
                kind=Kind.STATE,
                gate=gate,
                says="reads or writes the weights",
                api=Api.SCOPED,
            )
        for method, gate in (("forward_backward", "forward_backward"), ("commit", "commit"), ("abort", "")):
            yield Rule(
                method=method,
                tenant=tenant,
                kind=Kind.STEP,
                gate=gate,
                needs={PARAMS, GRADS} if gate else _NOTHING,
                write="with {0}.training_mode():",
                says="works on the open train step",
                api=Api.SCOPED,
            )
    for tenant in (Tenant.POLICY, Tenant.VALUE, Tenant.ENGINE):
        yield Rule(
            method="forget",
            tenant=tenant,
            kind=Kind.STATE,
            says="believes nothing of where the bytes are",
            api=Api.SCOPED,
        )
    for method, mode, says in (
        ("wake", Mode.GENERATION, "wakes the engine until it is put to sleep"),
        ("sleep", Mode.OFFLOADED, "puts the engine to sleep"),
    ):
        yield Rule(method=method, tenant=Tenant.ENGINE, kind=Kind.SWITCH, mode=mode, says=says, api=Api.SCOPED)
    yield Rule(
        method="legacy_refit",
        tenant=Tenant.POLICY,
        kind=Kind.REFIT,
        says="makes a block around a helper that makes the legacy calls of a refit itself",
        num_args=1,
        api=Api.SCOPED,
    )
    yield Rule(
        method="refit",
        tenant=Tenant.POLICY,
        kind=Kind.REFIT,
        says="pushes the weights to the engine",
        num_args=1,
        api=Api.SCOPED,
    )
    yield Rule(
        method="generate",
        tenant=Tenant.POLICY,
        kind=Kind.COMPUTE,
        gate="generate",
        needs={PARAMS},
        write="with {0}.generation_mode():",
        says="samples from the policy's engine",
        num_args=1,
        api=Api.SCOPED,
    )


RULES: Mapping[tuple[Tenant, str], Rule] = {
    (rule.tenant, rule.method): rule
    for table in (_policy_rules, _value_rules, _engine_rules, _synchronizer_rules, _scoped_rules)
    for rule in table()
}

HELPERS: Mapping[str, Helper] = {
    helper.name: helper
    for helper in (
        Helper(
            name="refit_policy_generation",
            kind=Kind.REFIT,
            roles=(("policy", Tenant.POLICY), ("policy_generation", Tenant.ENGINE)),
            write="scopes({0}).refit({1}, transfer)",
            says="offloads the policy in two phases around a weight transfer and leaves the engine awake",
        ),
    )
}


def rule_of(tenant: Tenant, method: str) -> Rule | None:
    """The rule of a method of a tenant, or None where it has no part in the lifecycle."""
    return RULES.get((tenant, method))


def tenants_of(method: str) -> tuple[Tenant, ...]:
    """The tenants that have a method of this name, in the order of :class:`Tenant`."""
    return tuple(tenant for tenant in Tenant if (tenant, method) in RULES)


def rules_of(method: str) -> tuple[Rule, ...]:
    """The rules of every tenant's method of this name."""
    return tuple(RULES[tenant, method] for tenant in tenants_of(method))


def speaks(method: str) -> bool:
    """Whether a call of this name says by itself that a module is written against one of the two APIs.

    Narrower than :func:`is_distinctive`: ``get_logprobs`` and ``get_values`` exist elsewhere too.
    """
    return any(
        rule.distinctive and (rule.kind in _SPEAKING or method.endswith("_from_meta") or "reference_policy" in method)
        for (_, name), rule in RULES.items()
        if name == method
    )


_SPEAKING = _LIFECYCLE | {Kind.STEP, Kind.TRANSFER, Kind.SCOPE}


def is_distinctive(method: str) -> Tenant | None:
    """The tenant that the name of the method alone gives away, if it does.

    ``prepare_for_generation`` is an engine's: a policy has it too, but there it does nothing.
    """
    owners = [tenant for tenant in tenants_of(method) if RULES[tenant, method].distinctive]
    return owners[0] if len(owners) == 1 or (owners and Tenant.POLICY in owners) else None


def methods() -> frozenset[str]:
    """Every method and helper name in the tables."""
    return frozenset(method for _, method in RULES) | frozenset(HELPERS)
