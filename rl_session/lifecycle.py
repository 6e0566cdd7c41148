"""What a policy can be, and the two tables everything else reads: the mode table and the nesting table.

Pure: no torch, no ray, no I/O. A *mode* says what a policy is for, a *placement* where its bytes are; the mode table turns
a mode, the flags and what is there now into the placement to reach. Scopes, the shim, guards and the documentation all
read the tables below, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

import attrs

__all__ = [
    "CALL_MODES",
    "MODE_TABLE",
    "NESTING",
    "Cell",
    "Cells",
    "Component",
    "Facts",
    "Flags",
    "LiveGradients",
    "Mode",
    "ModeRow",
    "Placement",
    "Release",
    "Tier",
    "may_call",
    "may_nest",
    "modes_allowing",
    "resolve",
    "restore",
    "scope_to_write",
]

Release = Literal["eager", "lazy", "never"]
LiveGradients = Literal["preserve", "refuse", "discard"]


class Mode(StrEnum):
    """What a policy is for right now."""

    OFFLOADED = "offloaded"
    """Everything on the host; reached by ``offload()``, ``offloaded()`` and, with ``base="offloaded"``, outside scopes."""
    LOGPROB = "logprob"
    """Parameters on the device for inference under no_grad; reached by ``logprob_mode()``."""
    TRAINING = "training"
    """Everything on the device; reached by ``training_mode()``."""
    REFIT = "refit"
    """Parameters on the device to be read and published; reached by ``refit_mode()``."""
    GENERATION = "generation"
    """Sampling from an engine; reached by ``generation_mode()``."""
    RESIDENT = "resident"
    """Parameters on the device and the caller in charge; found by ``attach`` or reached by ``switch``."""


class Component(StrEnum):
    """The parts of a policy that move as one. Extras registered by the user are plain strings beside these."""

    PARAMS = "params"
    BUFFERS = "buffers"
    GRADS = "grads"
    OPTIMIZER = "optimizer"
    REFERENCE = "reference"


class Tier(StrEnum):
    """Where the bytes of a component live. NONE: there are none (dropped, or not created yet)."""

    NONE = "none"
    HOST = "host"
    DEVICE = "device"

    @property
    def height(self) -> int:
        """Order of tiers (none, host, device): a shared storage lives at the highest tier any owner needs."""
        return _HEIGHT[self]


_HEIGHT = {Tier.NONE: 0, Tier.HOST: 1, Tier.DEVICE: 2}


class Placement(Mapping[str, Tier]):
    """An immutable map from component to tier; a component it does not name has no bytes (``Tier.NONE``)."""

    __slots__ = ("_tiers",)

    def __init__(self, tiers: Mapping[str, Tier]) -> None:
        self._tiers: dict[str, Tier] = {
            str(name): tier if type(tier) is Tier else Tier(tier) for name, tier in tiers.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """As text: ranks send placements with every transition, and enums are slow to unpickle."""
        return _placement, (tuple((name, tier._value_) for name, tier in self._tiers.items()),)

    def __getitem__(self, component: str) -> Tier:
        return self._tiers.get(component, Tier.NONE)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    def __contains__(self, component: object) -> bool:
        return component in self._tiers

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        if isinstance(other, Placement) and self._tiers == other._tiers:
            return True
        names = set(self) | set(other)
        return all(self[name] == other.get(name, Tier.NONE) for name in names)

    def __hash__(self) -> int:
        return hash(frozenset((name, tier) for name, tier in self._tiers.items() if tier is not Tier.NONE))

    def __repr__(self) -> str:
        return f"Placement({', '.join(f'{name}={tier}' for name, tier in self._tiers.items())})"

    def evolve(self, **tiers: Tier) -> Placement:
        """A copy with the named components at other tiers.

        Args:
            **tiers: Component to its new tier.

        Returns:
            The copy.
        """
        return Placement({**self._tiers, **tiers})

    def as_text(self) -> dict[str, str]:
        """Plain strings, for records and messages.

        Returns:
            Component to "device", "host" or "none".
        """
        return {name: tier.value for name, tier in self._tiers.items()}


@lru_cache(maxsize=256)
def _placement(tiers: tuple[tuple[str, str], ...]) -> Placement:
    """One that was pickled; those that are equal may be one object."""
    return Placement({name: Tier(tier) for name, tier in tiers})


class Cell(StrEnum):
    """One cell of the mode table: what a mode asks of a component."""

    DEVICE = "device"
    HOST = "host"
    AS_IS = "as it is"
    OPEN_STAYS = "open step: kept where it is; else dropped"
    OPEN_TO_HOST = "open step: host; else dropped"
    HOST_IF_LOGPROB_FLAG = "host iff offload_optimizer_for_logprob, else left where it is"
    HOST_IF_REFIT_FLAG = "host iff offload_optimizer_for_refit, else left where it is"


Forwards = Literal["train", "eval", "unchanged", "caller", "none"]

_INFERENCE = frozenset(
    {
        "get_logprobs",
        "get_reference_policy_logprobs",
        "get_topk_logits",
        "score",
        "get_values",
        "train(eval_mode=True)",
    }
)
_ALWAYS = frozenset({"state_dict", "save_checkpoint"})
_TRAINS = frozenset({"train", "begin_step", "forward_backward", "commit"})


@attrs.frozen(kw_only=True)
class Cells:
    """What is asked of each component: a row of the mode table, or a placement that no mode names (a legacy call's).

    Attributes:
        weights: The cell of PARAMS and BUFFERS.
        grads: The cell of GRADS.
        optimizer: The cell of OPTIMIZER and of every registered extra.
        reference: The cell of REFERENCE, which the reference call itself brings in and puts back.
    """

    weights: Cell
    grads: Cell
    optimizer: Cell
    reference: Cell = Cell.AS_IS


@attrs.frozen(kw_only=True)
class ModeRow(Cells):
    """One row of the mode table.

    Attributes:
        forwards: What the mode means for forwards: "train" with autograd, "eval" under no_grad, or nothing.
        calls: The names of the calls that are legal.
        read_only: Whether weights and optimizer state cannot change in it, so that host copies stay valid.
    """

    forwards: Forwards
    calls: frozenset[str]
    read_only: bool


MODE_TABLE: Mapping[Mode, ModeRow] = {
    Mode.TRAINING: ModeRow(
        weights=Cell.DEVICE,
        grads=Cell.DEVICE,
        optimizer=Cell.DEVICE,
        reference=Cell.AS_IS,
        forwards="train",
        calls=_ALWAYS | _INFERENCE | _TRAINS | {"load_checkpoint"},
        read_only=False,
    ),
    Mode.LOGPROB: ModeRow(
        weights=Cell.DEVICE,
        grads=Cell.OPEN_STAYS,
        optimizer=Cell.HOST_IF_LOGPROB_FLAG,
        reference=Cell.AS_IS,
        forwards="eval",
        calls=_ALWAYS | _INFERENCE,
        read_only=True,
    ),
    Mode.REFIT: ModeRow(
        weights=Cell.DEVICE,
        grads=Cell.OPEN_TO_HOST,
        optimizer=Cell.HOST_IF_REFIT_FLAG,
        reference=Cell.AS_IS,
        forwards="unchanged",
        calls=_ALWAYS | {"iter_weights", "publish"},
        read_only=True,
    ),
    # The row of an in-process engine; an external engine's row is OFFLOADED's or nothing, chosen by the session.
    Mode.GENERATION: ModeRow(
        weights=Cell.DEVICE,
        grads=Cell.OPEN_STAYS,
        optimizer=Cell.HOST_IF_LOGPROB_FLAG,
        reference=Cell.AS_IS,
        forwards="eval",
        calls=_ALWAYS | _INFERENCE | {"generate"},
        read_only=True,
    ),
    Mode.RESIDENT: ModeRow(
        weights=Cell.DEVICE,
        grads=Cell.AS_IS,
        optimizer=Cell.AS_IS,
        reference=Cell.AS_IS,
        forwards="caller",
        calls=_ALWAYS | _INFERENCE | _TRAINS | {"load_checkpoint", "iter_weights"},
        read_only=False,
    ),
    Mode.OFFLOADED: ModeRow(
        weights=Cell.HOST,
        grads=Cell.OPEN_TO_HOST,
        optimizer=Cell.HOST,
        reference=Cell.HOST,
        forwards="none",
        calls=_ALWAYS | {"load_checkpoint", "iter_weights"},
        read_only=True,
    ),
}

NESTING: Mapping[Mode, frozenset[Mode]] = {
    Mode.TRAINING: frozenset({Mode.TRAINING, Mode.LOGPROB, Mode.REFIT, Mode.OFFLOADED}),
    Mode.LOGPROB: frozenset({Mode.LOGPROB, Mode.REFIT, Mode.OFFLOADED}),
    Mode.REFIT: frozenset({Mode.REFIT, Mode.OFFLOADED}),
    Mode.GENERATION: frozenset({Mode.GENERATION, Mode.LOGPROB, Mode.OFFLOADED}),
    Mode.OFFLOADED: frozenset({Mode.OFFLOADED}),
    # RESIDENT is a resting mode, never a scope: it neither contains nor is contained.
    Mode.RESIDENT: frozenset(),
}
"""Outer mode to the modes that may be opened inside it (in process; an external engine allows no LOGPROB inside)."""

CALL_MODES: Mapping[str, frozenset[Mode]] = {
    call: frozenset(mode for mode, row in MODE_TABLE.items() if call in row.calls)
    for call in sorted(set().union(*(row.calls for row in MODE_TABLE.values())))
}

CALL_NEEDS: Mapping[str, tuple[Component, ...]] = {
    **dict.fromkeys(_INFERENCE | {"generate"}, (Component.PARAMS, Component.BUFFERS)),
    **dict.fromkeys(_TRAINS, (Component.PARAMS, Component.BUFFERS, Component.GRADS, Component.OPTIMIZER)),
}
"""What has to be on the device for a call; calls not named read from whichever tier holds the bytes."""

_SCOPE_OF_CALL: Mapping[str, str] = {
    **dict.fromkeys(_TRAINS, "training_mode"),
    **dict.fromkeys(_INFERENCE, "logprob_mode"),
    "generate": "generation_mode",
    "iter_weights": "refit_mode",
    "publish": "refit_mode",
    "load_checkpoint": "training_mode",
}


@attrs.frozen(kw_only=True)
class Flags:
    """The configuration that decides the conditional cells (``OffloadConfig`` after inheritance)."""

    release: Release = "eager"
    offload_optimizer_for_logprob: bool = False
    offload_optimizer_for_refit: bool = True
    live_gradients: LiveGradients = "preserve"
    pinned: frozenset[str] = frozenset()
    """Components that stay on the device whatever the mode says."""
    weights_move: bool = True
    """False when something else owns the placement of the parameters (``cpu_offload``): only BUFFERS move then."""


@attrs.frozen(kw_only=True)
class Facts:
    """What a worker found by scanning, as far as decisions need it.

    Attributes:
        placement: Where each component is now.
        live_gradients: Whether a gradient exists that no optimizer step has consumed.
        freed_in_place: Components with storages that were dropped but whose views live on (a flat gradient buffer);
            they can be brought back, zeroed, where a component without bytes cannot.
    """

    placement: Placement
    live_gradients: bool = False
    freed_in_place: frozenset[str] = frozenset()


def may_call(mode: Mode, call: str) -> bool:
    """Whether ``call`` is legal in ``mode``."""
    return call in MODE_TABLE[mode].calls


def modes_allowing(call: str) -> tuple[Mode, ...]:
    """The modes in which ``call`` is legal, in the order of the mode table."""
    return tuple(mode for mode, row in MODE_TABLE.items() if call in row.calls)


def may_nest(outer: Mode, inner: Mode) -> bool:
    """Whether a scope of mode ``inner`` may be opened inside one of mode ``outer``."""
    return inner in NESTING[outer]


def scope_to_write(call: str, kind: str = "policy") -> str:
    """The name of the method whose scope makes ``call`` legal, as a "policy" or a "value" spells it."""
    method = _SCOPE_OF_CALL.get(call, "training_mode")
    return "inference_mode" if kind == "value" and method == "logprob_mode" else method


def _row_cells(row: Cells, components: Mapping[str, Tier]) -> dict[str, Cell]:
    named: dict[str, Cell] = {
        Component.PARAMS: row.weights,
        Component.BUFFERS: row.weights,
        Component.GRADS: row.grads,
        Component.REFERENCE: row.reference,
    }
    return {name: named.get(name, row.optimizer) for name in components}


def _cell_tier(cell: Cell, now: Tier, flags: Flags, *, is_open: bool) -> Tier:
    match cell:
        case Cell.DEVICE:
            return Tier.DEVICE
        case Cell.HOST:
            return Tier.HOST
        case Cell.OPEN_STAYS:
            return now if is_open else Tier.NONE
        case Cell.OPEN_TO_HOST:
            return Tier.HOST if is_open else Tier.NONE
        case Cell.HOST_IF_LOGPROB_FLAG:
            return Tier.HOST if flags.offload_optimizer_for_logprob else now
        case Cell.HOST_IF_REFIT_FLAG:
            return Tier.HOST if flags.offload_optimizer_for_refit else now
        case Cell.AS_IS:
            return now


def _sends_away(cell: Cell, flags: Flags) -> bool:
    """Whether a cell that depends on a flag is the host's: under lazy release what was stored may say otherwise."""
    return (cell is Cell.HOST_IF_LOGPROB_FLAG and flags.offload_optimizer_for_logprob) or (
        cell is Cell.HOST_IF_REFIT_FLAG and flags.offload_optimizer_for_refit
    )


def resolve(mode: Mode, facts: Facts, flags: Flags, cells: Cells | None = None) -> Placement:
    """The placement that entering ``mode`` asks for, with every conditional cell decided from what is there now.

    ``cells`` stand in for the mode's row, for a placement that no mode names.
    A component without bytes stays at ``Tier.NONE``: nothing is created by a transition. Under ``release="lazy"`` a mode
    only brings in what it needs; under ``"never"`` it moves nothing.
    """
    asked = _row_cells(cells or MODE_TABLE[mode], facts.placement)
    keeps_live = facts.live_gradients and flags.live_gradients != "discard"
    wanted = {name: _cell_tier(cell, facts.placement[name], flags, is_open=keeps_live) for name, cell in asked.items()}
    return _permitted(wanted, facts, flags)


def restore(mode: Mode, stored: Placement, facts: Facts, flags: Flags, cells: Cells | None = None) -> Placement:
    """The placement that leaving for the outer ``mode`` (or for ``cells``, at rest) asks for.

    Cells the table fixes come from the table; cells that depended on what was come from ``stored``, the placement of the
    outer scope (or of the resting state) when the inner one was entered. A component that had no bytes then and has now
    (optimizer state made by a first step) stays where it is.
    """
    asked = _row_cells(cells or MODE_TABLE[mode], facts.placement)
    keeps_live = facts.live_gradients and flags.live_gradients != "discard"
    wanted: dict[str, Tier] = {}
    for name, cell in asked.items():
        now = facts.placement[name]
        if cell in (Cell.DEVICE, Cell.HOST, Cell.OPEN_TO_HOST) or _sends_away(cell, flags):
            wanted[name] = _cell_tier(cell, now, flags, is_open=keeps_live)
        elif cell is Cell.OPEN_STAYS and not keeps_live:
            wanted[name] = Tier.NONE
        else:
            wanted[name] = stored[name] if stored[name] is not Tier.NONE else now
    return _permitted(wanted, facts, flags)


def _permitted(wanted: dict[str, Tier], facts: Facts, flags: Flags) -> Placement:
    """Narrow a wish to what exists, what may move at all, and what the release policy forces."""
    result: dict[str, Tier] = {}
    for name, tier in wanted.items():
        now = facts.placement[name]
        owned_elsewhere = not flags.weights_move and name != Component.BUFFERS
        # What was freed in place can come back, as zeros; there is nothing of it that the host could hold.
        absent = now is Tier.NONE and (name not in facts.freed_in_place or tier is not Tier.DEVICE)
        is_pinned = name in flags.pinned and now is Tier.DEVICE
        if absent or owned_elsewhere or is_pinned or flags.release == "never":
            result[name] = now
        elif flags.release == "lazy":
            result[name] = max(tier, now, key=lambda t: t.height)
        else:
            result[name] = tier
    return Placement(result)
