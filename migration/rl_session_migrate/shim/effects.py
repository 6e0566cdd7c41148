"""What each legacy call does to where bytes are, as a table: one row a call, one table a backend.

A row is the same kind of thing as a row of the library's mode table (:class:`rl_session.lifecycle.Cells`), with the mode
that the policy rests in afterwards, the train flag that the call leaves behind, and the scope to write instead. Where legacy
destroyed gradients, the cell keeps those of an open step (``OPEN_STAYS``, ``OPEN_TO_HOST``): that is the one difference.
Pure: knows nothing of torch, of policies or of how bytes move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs

from rl_session.errors import ConfigError
from rl_session.lifecycle import Cell, Cells, Mode

__all__ = [
    "AS_IT_IS",
    "Backend",
    "Effect",
    "LegacyConfig",
    "destroys_gradients",
    "frees_gradients",
    "policy_effect",
    "still_freed",
    "value_effect",
]

Backend = Literal["dtensor", "megatron"]
Forwards = Literal["train", "eval"]

AS_IT_IS = Cells(weights=Cell.AS_IS, grads=Cell.AS_IS, optimizer=Cell.AS_IS)
"""Nothing moves."""


@attrs.frozen(kw_only=True)
class LegacyConfig:
    """The keys of a legacy configuration that lifecycle and compute calls read.

    Attributes:
        backend: "dtensor" or "megatron".
        offload_optimizer_for_logprob: ``prepare_for_lp_inference()`` sends the optimizer state to the host.
        offload_optimizer_for_refit: ``offload_before_refit()`` does, on Megatron; DTensor always does.
        optimizer_cpu_offload: The optimizer owns the placement of its state (Megatron): no call moves it.
        train_global_batch_size: ``gbs`` of ``train`` where none is given.
        train_micro_batch_size: ``mbs`` of ``train`` where none is given.
        logprob_batch_size: Sequences that a forward of an inference call sees.
    """

    backend: Backend = "dtensor"
    offload_optimizer_for_logprob: bool = False
    offload_optimizer_for_refit: bool = True
    optimizer_cpu_offload: bool = False
    train_global_batch_size: int | None = None
    train_micro_batch_size: int | None = None
    logprob_batch_size: int | None = None

    @classmethod
    def of(
        cls, backend: str, config: LegacyConfig | Mapping[str, Any] | None, defaults: Mapping[str, bool]
    ) -> LegacyConfig:
        """The configuration from what the user has: a legacy mapping, this class, or nothing.

        Args:
            backend: "dtensor" or "megatron".
            config: A legacy policy configuration (nested mappings as legacy has them), or None.
            defaults: The flags of the policy's own ``OffloadConfig``, for keys that the mapping lacks.

        Raises:
            ConfigError: There is no such backend, or the configuration is of another.
        """
        if backend not in get_args(Backend):
            raise ConfigError(
                f"backend={backend!r}: there is no such backend",
                ("backends: 'dtensor', 'megatron'",),
                'LegacyPolicy(policy, backend="dtensor")',
            )
        if isinstance(config, LegacyConfig):
            if config.backend != backend:
                facts = (f"config.backend is {config.backend!r}",)
                raise ConfigError(f"backend={backend!r} and a configuration of another", facts, "one backend for both")
            return config
        found: Mapping[str, Any] = config or {}
        optimizer = _nested(found, "megatron_cfg", "optimizer")
        values: dict[str, Any] = {name: bool(found.get(name, default)) for name, default in defaults.items()}
        values |= {
            name: found.get(name)
            for name in ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")
        }
        owns = backend == "megatron" and bool(optimizer.get("optimizer_cpu_offload", False))
        return cls(backend=backend, optimizer_cpu_offload=owns, **values)  # type: ignore[arg-type]


def _nested(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        inner = config.get(name)
        config = inner if isinstance(inner, Mapping) else {}
    return config


@attrs.frozen(kw_only=True)
class Effect:
    """What one legacy call does.

    Attributes:
        mode: The mode that the policy rests in afterwards; REFIT holds only where the weights are on the device.
        cells: What is asked of each component.
        forwards: The train flag it leaves behind; None leaves it.
        scope: The scope to write instead.
    """

    mode: Mode
    cells: Cells
    forwards: Forwards | None
    scope: str


def destroys_gradients(effect: Effect) -> bool:
    """Whether legacy destroyed gradients here, those of an open step too."""
    return frees_gradients(effect.cells)


def frees_gradients(cells: Cells | None) -> bool:
    """Whether a legacy call freed the gradient buffer (Megatron), as far as no step was open.

    Asked of the cells that a policy rests by, it says whether ``train`` would write into a buffer of 0 bytes: only
    ``prepare_for_training()`` brings it back. The cells travel with the policy from process to process.
    """
    return cells is not None and cells.grads in (Cell.OPEN_STAYS, Cell.OPEN_TO_HOST)


def still_freed(cells: Cells, before: Cells | None) -> Cells:
    """The cells of a call that leaves gradients as they are, made where they were freed before: they stay freed."""
    if cells.grads is Cell.AS_IS and frees_gradients(before):
        return attrs.evolve(cells, grads=Cell.OPEN_STAYS)
    return cells


_GONE = "offloaded()"
_TRAIN = "training_mode()"
_LOGPROB = "logprob_mode()"
_VALUES = "inference_mode()"
_REFIT = "refit_mode()"
_D, _H, _SAME, _STAY, _AWAY = Cell.DEVICE, Cell.HOST, Cell.AS_IS, Cell.OPEN_STAYS, Cell.OPEN_TO_HOST

# Method to: mode, weights, gradients, optimizer, train flag, scope. The optimizer's cell may be changed by flags below.
_Row = tuple[Mode, Cell, Cell, Cell, Forwards | None, str]
_POLICY: Mapping[Backend, Mapping[str, _Row]] = {
    "dtensor": {
        "prepare_for_training": (Mode.TRAINING, _D, _D, _D, "train", _TRAIN),
        "prepare_for_lp_inference": (Mode.LOGPROB, _D, _D, _H, "eval", _LOGPROB),
        "finish_inference": (Mode.OFFLOADED, _H, _H, _SAME, "eval", _GONE),
        "offload_before_refit": (Mode.REFIT, _SAME, _SAME, _H, None, _REFIT),
        "offload_after_refit": (Mode.OFFLOADED, _H, _H, _H, "eval", _GONE),
    },
    "megatron": {
        "prepare_for_training": (Mode.TRAINING, _D, _D, _D, "train", _TRAIN),
        "prepare_for_lp_inference": (Mode.LOGPROB, _D, _STAY, _H, "eval", _LOGPROB),
        "finish_inference": (Mode.OFFLOADED, _H, _SAME, _SAME, "eval", _GONE),
        "offload_before_refit": (Mode.REFIT, _SAME, _AWAY, _H, None, _REFIT),
        "offload_after_refit": (Mode.OFFLOADED, _H, _AWAY, _H, "eval", _GONE),
    },
}
_VALUE: Mapping[Backend, Mapping[str, _Row]] = {
    "dtensor": {
        "prepare_for_training": (Mode.TRAINING, _D, _D, _D, "train", _TRAIN),
        "prepare_for_inference": (Mode.LOGPROB, _D, _D, _SAME, "eval", _VALUES),
        "finish_inference": (Mode.OFFLOADED, _H, _H, _SAME, None, _GONE),
        "finish_training": (Mode.OFFLOADED, _H, _H, _H, "eval", _GONE),
    },
    "megatron": {
        "prepare_for_training": (Mode.TRAINING, _D, _D, _D, "train", _TRAIN),
        "prepare_for_inference": (Mode.LOGPROB, _D, _STAY, _SAME, "eval", _VALUES),
        "finish_inference": (Mode.OFFLOADED, _H, _SAME, _SAME, None, _GONE),
        "finish_training": (Mode.OFFLOADED, _H, _AWAY, _H, "eval", _GONE),
    },
}


def policy_effect(method: str, config: LegacyConfig, *, keep_train_buffers: bool = False) -> Effect:
    """What a lifecycle call of a policy does.

    Args:
        method: Its name.
        config: The backend and its flags.
        keep_train_buffers: Of ``prepare_for_lp_inference``: gradients and optimizer state stay where they are.
    """
    mode, weights, grads, optimizer, forwards, scope = _POLICY[config.backend][method]
    is_refit = method in ("offload_before_refit", "offload_after_refit")
    if method == "prepare_for_lp_inference" and (keep_train_buffers or not config.offload_optimizer_for_logprob):
        optimizer = Cell.AS_IS
    if is_refit and config.backend == "megatron" and not config.offload_optimizer_for_refit:
        optimizer = Cell.AS_IS
    if keep_train_buffers and config.backend == "megatron":
        grads = Cell.AS_IS
    return _effect(config, (mode, weights, grads, optimizer, forwards, scope))


def value_effect(method: str, config: LegacyConfig) -> Effect:
    """What a lifecycle call of a value model does."""
    return _effect(config, _VALUE[config.backend][method])


def _effect(config: LegacyConfig, row: _Row) -> Effect:
    mode, weights, grads, optimizer, forwards, scope = row
    if config.optimizer_cpu_offload:
        optimizer = Cell.AS_IS
    cells = Cells(weights=weights, grads=grads, optimizer=optimizer)
    return Effect(mode=mode, cells=cells, forwards=forwards, scope=scope)
