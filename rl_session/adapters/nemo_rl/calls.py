"""The compute calls of NeMo-RL objects: which mode each needs, the legacy call that makes it legal, and the guarded handle.

The names are NeMo-RL's, the judgement is the mode table's. Knows nothing of where bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rl_session.audit import events
from rl_session.driver.callsite import call_site
from rl_session.driver.control import Control
from rl_session.errors import ConfigError, ModeError
from rl_session.lifecycle import may_call, scope_to_write
from rl_session.workers.replies import CallResult

__all__ = ["LEGACY_CALLS", "LegacyHandle", "check", "gate_of"]

ANYWHERE = ""

LEGACY_CALLS: Mapping[str, str] = {
    **dict.fromkeys(("get_logprobs", "get_logprobs_from_meta", "calibrate_qkv_fp8_scales"), "get_logprobs"),
    "get_reference_policy_logprobs": "get_reference_policy_logprobs",
    "get_reference_policy_logprobs_from_meta": "get_reference_policy_logprobs",
    **dict.fromkeys(("get_topk_logits", "get_full_logits_ipc"), "get_topk_logits"),
    "score": "score",
    "get_values": "get_values",
    **dict.fromkeys(("train", "train_from_meta"), "train"),
    "begin_train_step": "begin_step",
    "train_microbatches_from_meta": "forward_backward",
    "finish_train_step": "commit",
    "abort_train_step": ANYWHERE,
    "save_checkpoint": "save_checkpoint",
    **dict.fromkeys(
        ("stream_weights_via_ipc_zmq", "stream_weights_via_http", "broadcast_weights_for_collective"), "publish"
    ),
    **dict.fromkeys(("generate", "generate_async"), "generate"),
}
"""Legacy call to its name in the mode table."""

_WAYS_IN: Mapping[str, Mapping[str, str]] = {
    "policy": {"logprob_mode": "prepare_for_lp_inference()", "refit_mode": "offload_before_refit()"},
    "value": {"inference_mode": "prepare_for_inference()"},
    "engine": {"awake": "prepare_for_generation()"},
}
_SPOKEN = {"policy": "policy", "value": "value", "engine": "policy_generation"}


class Judged(NamedTuple):
    """How a call is judged: its name in the mode table, and its scope."""

    gate: str
    scope: str


def gate_of(
    control: Control, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_megatron: bool
) -> Judged:
    """How a call is judged.

    Raises:
        ConfigError: It is no compute call of NeMo-RL.
    """
    gate = LEGACY_CALLS.get(method)
    if gate is None:
        raise ConfigError(
            f"{control.label}: {method}() is no compute call that scopes know",
            (f"calls: {', '.join(sorted(LEGACY_CALLS))}",),
            f"call it on the object itself: {_SPOKEN[control.kind]}.{method}(...)",
        )
    eval_mode = kwargs.get("eval_mode", method == "train" and len(args) > 2 and args[2])
    if gate == "train" and eval_mode and not is_megatron:  # Megatron zeroes its gradient buffer in evaluation too
        gate = "train(eval_mode=True)"
    if gate == "save_checkpoint":
        gate = _gate_of_save(control, args, kwargs, is_megatron=is_megatron)
    scope = "awake" if control.kind == "engine" else scope_to_write(gate, control.kind)
    return Judged(gate, scope)


def _gate_of_save(control: Control, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_megatron: bool) -> str:
    """A Megatron policy brings in what it saves; all others save what the caller has placed on the device."""
    if is_megatron and control.kind == "policy":
        return ANYWHERE
    optimizer_path = kwargs.get("optimizer_path", args[1] if len(args) > 1 else None)
    return "train" if optimizer_path else "get_values" if control.kind == "value" else "get_logprobs"


def check(control: Control, method: str, judged: Judged) -> None:
    """Refuse a call that is not legal in the mode in effect.

    Raises:
        ModeError: The message names the legacy call that is missing, and the scope to write.
    """
    if not judged.gate or may_call(control.mode, judged.gate):
        return
    try:
        control.check_mode(judged.gate)
    except ModeError as error:
        missing = _WAYS_IN[control.kind].get(judged.scope, "prepare_for_training()")
        spoken = _SPOKEN[control.kind]
        raise ModeError(
            f"{control.label}: {method}() is not legal in {control.mode} mode",
            (*error.facts, f"missing legacy call: {spoken}.{missing}"),
            f"with scopes({spoken}).{judged.scope}(): {spoken}.{method}(...)",
        ) from None


class LegacyHandle:
    """What a scope yields: the object's own compute calls, each judged, serialised and logged when it is made."""

    __slots__ = ("_control", "_is_megatron", "_legacy")

    def __init__(self, control: Control, legacy: Any, *, is_megatron: bool) -> None:
        self._control = control
        self._legacy = legacy
        self._is_megatron = is_megatron

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in LEGACY_CALLS or not hasattr(self._legacy, name):
            listed = ", ".join(self.__dir__())
            raise AttributeError(f"the handle of {self._control.label} has no {name!r} (it has {listed})")

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs)

        return call

    def _call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        control = self._control
        judged = gate_of(control, method, args, kwargs, is_megatron=self._is_megatron)
        check(control, method, judged)
        # Of a step that was begun on the object itself, the log has no beginning, and so no end.
        recorded = method == "begin_train_step" or control.step is not None
        then = _ENDINGS.get(method) if recorded else None
        result = control.call(method, *args, gate=judged.gate, then=then, **kwargs)
        if method == "begin_train_step":
            control.step = f"{method}() at {call_site()}"
        elif method in _ENDINGS:
            control.end_step()
        return result

    def __dir__(self) -> list[str]:
        return sorted(name for name in LEGACY_CALLS if hasattr(self._legacy, name))

    def __repr__(self) -> str:
        return f"<handle of {self._control.label} in {self._control.mode} mode>"


_ENDINGS: Mapping[str, Callable[[CallResult], events.Event]] = {
    "begin_train_step": lambda result: events.StepOpened(),
    "finish_train_step": lambda result: events.StepCommitted(),
    "abort_train_step": lambda result: events.StepAborted(reason="aborted by the caller"),
}
