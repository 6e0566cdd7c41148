"""What is known of a NeMo-RL object before anything is called on it: its kind, its backend, and the flags that matter.

Read from the object's own ``cfg`` where it has one, given by the user otherwise; a contradiction is an error. Knows nothing
of where bytes are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rl_session.errors import ConfigError, UnsupportedError

__all__ = ["EngineTraits", "Kind", "TrainerTraits", "kind_of", "read_traits"]

Kind = Literal["policy", "value", "engine"]

_BACKENDS = ("dtensor", "megatron")
_ENGINES = ("vllm", "sglang", "megatron", "trtllm", "dynamo")


@attrs.frozen(kw_only=True)
class TrainerTraits:
    """What decides the effect of the lifecycle methods of a ``Policy`` or ``Value``.

    Attributes:
        kind: "policy" or "value".
        backend: "dtensor" or "megatron".
        optimizer: Whether it has one (False for a teacher or a frozen model).
        offload_optimizer_for_logprob: ``policy.offload_optimizer_for_logprob``; a value ignores it.
        offload_optimizer_for_refit: ``policy.offload_optimizer_for_refit``; DTensor ignores it.
        cpu_offload: ``dtensor_cfg.cpu_offload``: only buffers move.
        optimizer_cpu_offload: ``megatron_cfg.optimizer.optimizer_cpu_offload``: the optimizer places its own state.
        split_steps: Whether it has ``begin_train_step`` and so on, found by looking.
    """

    kind: Kind
    backend: str
    optimizer: bool = True
    offload_optimizer_for_logprob: bool = False
    offload_optimizer_for_refit: bool = True
    cpu_offload: bool = False
    optimizer_cpu_offload: bool = False
    split_steps: bool = False

    @property
    def is_megatron(self) -> bool:
        """Whether gradients lie in a flat buffer that offloading destroys."""
        return self.backend == "megatron"

    @property
    def weights_move(self) -> bool:
        """Whether the lifecycle methods move parameters at all."""
        return self.is_megatron or not self.cpu_offload

    @property
    def optimizer_moves(self) -> bool:
        """Whether the lifecycle methods move optimizer state at all."""
        owned_elsewhere = self.optimizer_cpu_offload if self.is_megatron else self.cpu_offload
        return self.optimizer and not owned_elsewhere

    @property
    def has_grad_buffer(self) -> bool:
        """Whether gradients are a component of their own; DTensor has none between calls of ``train``."""
        return self.is_megatron and self.optimizer

    @property
    def offloads_for_logprob(self) -> bool:
        """Whether inference sends the optimizer state to the host."""
        return self.kind == "policy" and self.offload_optimizer_for_logprob

    @property
    def offloads_for_refit(self) -> bool:
        """Whether a refit sends the optimizer state to the host."""
        return self.offload_optimizer_for_refit or not self.is_megatron


@attrs.frozen(kw_only=True)
class EngineTraits:
    """What decides the effect of ``prepare_for_generation`` and ``finish_generation``.

    Attributes:
        kind: "engine".
        backend: "vllm", "sglang", "megatron", "trtllm" or "dynamo".
        colocated: Whether it sleeps to give its memory back (of SGLang, ``sglang_server_config.needs_offload``).
    """

    kind: Kind = "engine"
    backend: str = "vllm"
    colocated: bool = True

    @property
    def shares_weights(self) -> bool:
        """Whether waking brings in the training weights of a policy, which then serve both."""
        return self.backend == "megatron" and self.colocated


def kind_of(legacy: object) -> Kind:
    """What an object is, by the methods it has.

    Raises:
        UnsupportedError: It has none of the lifecycle methods.
    """
    if hasattr(legacy, "prepare_for_lp_inference"):
        return "policy"
    if hasattr(legacy, "prepare_for_inference"):
        return "value"
    if hasattr(legacy, "prepare_for_generation"):
        return "engine"
    raise UnsupportedError(
        f"scopes({type(legacy).__name__}): not a NeMo-RL policy, value or generation object",
        ("looked for: prepare_for_lp_inference, prepare_for_inference, prepare_for_generation",),
        "scopes(policy)  # the driver-side facade, not a worker group",
    )


def read_traits(legacy: object, given: Mapping[str, Any]) -> TrainerTraits | EngineTraits:
    """The traits of an object.

    Args:
        legacy: The object.
        given: What the user said, by the names of the traits; only what was said.

    Raises:
        UnsupportedError: It is no NeMo-RL object.
        ConfigError: What was said is unknown, of a wrong type, missing, or contradicts the object's ``cfg``.
    """
    kind = kind_of(legacy)
    cls: type[Any] = EngineTraits if kind == "engine" else TrainerTraits
    _check_names(cls, kind, given)
    found = _read_engine(legacy) if kind == "engine" else _read_trainer(legacy)
    for name, value in given.items():
        if name in found and found[name] != value:
            raise ConfigError(
                f"scopes({kind}, {name}={value!r}) contradicts the object's own cfg",
                (f"cfg says: {name}={found[name]!r}",),
                f"scopes({kind})  # what cfg says need not be said again",
            )
    merged = {**found, **given}
    if "backend" not in merged and kind != "engine":
        raise ConfigError(
            f"scopes({kind}): the backend is not known",
            ("the object has no cfg that enables one of dtensor_cfg and megatron_cfg",),
            f'scopes({kind}, backend="megatron")',
        )
    choices = _ENGINES if kind == "engine" else _BACKENDS
    if merged.get("backend", choices[0]) not in choices:
        raise ConfigError(
            f"scopes({kind}, backend={merged['backend']!r}) is not a backend",
            (f"choices: {', '.join(map(repr, choices))}",),
            f"scopes({kind}, backend={choices[0]!r})",
        )
    if kind != "engine":
        merged["split_steps"] = hasattr(legacy, "begin_train_step")
    traits: TrainerTraits | EngineTraits = cls(kind=kind, **merged)
    return traits


def _check_names(cls: type[Any], kind: Kind, given: Mapping[str, Any]) -> None:
    known = {field.name for field in attrs.fields(cls)} - {"kind", "split_steps"}
    for name, value in given.items():
        wanted = str if name == "backend" else bool
        if name not in known or not isinstance(value, wanted):
            raise ConfigError(
                f"scopes({kind}, {name}={value!r}) is not an option of a {kind}",
                (f"options: {', '.join(sorted(known))}",),
                "share(policy, policy_generation)  # lazy release is for objects that share their GPUs"
                if name == "release"
                else f"scopes({kind}, backend=...)",
            )


def _section(cfg: object, *path: str) -> Mapping[str, Any]:
    """A nested section of a configuration, or an empty one."""
    for name in path:
        cfg = cfg.get(name) if isinstance(cfg, Mapping) else None
    return cfg if isinstance(cfg, Mapping) else {}


def _read_trainer(legacy: object) -> dict[str, Any]:
    cfg = _section(getattr(legacy, "cfg", None))
    enabled = [name for name in _BACKENDS if _section(cfg, f"{name}_cfg").get("enabled")]
    if len(enabled) > 1:
        raise ConfigError(
            "scopes(): the object's cfg enables dtensor_cfg and megatron_cfg", (), "enable one of them in the recipe"
        )
    found: dict[str, Any] = {"backend": enabled[0]} if enabled else {}
    places = (
        ("offload_optimizer_for_logprob", cfg),
        ("offload_optimizer_for_refit", cfg),
        ("cpu_offload", _section(cfg, "dtensor_cfg")),
        ("optimizer_cpu_offload", _section(cfg, "megatron_cfg", "optimizer")),
    )
    found.update({name: bool(section[name]) for name, section in places if section.get(name) is not None})
    return found


def _read_engine(legacy: object) -> dict[str, Any]:
    cfg = _section(getattr(legacy, "cfg", None))
    found: dict[str, Any] = {"backend": cfg["backend"]} if "backend" in cfg else {}
    colocated = _section(cfg, "colocated").get("enabled")
    if found.get("backend") == "sglang":
        colocated = _section(cfg, "sglang_server_config").get("needs_offload", colocated)
    if colocated is not None:
        found["colocated"] = bool(colocated)
    return found
