"""The events of the audit log: one frozen class per kind of state change.

This file is the vocabulary of the log and nothing else: it does not know how an event is written, where the
file lies, or what the library's own enums look like. Modes, tiers and components are therefore lower-case
strings, and every value is plain JSON, so that a log can be read where neither torch nor this version of the
library is installed.

Units are in the names: ``nbytes`` and ``*_bytes`` count bytes, ``seconds`` is wall time as a float.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, ClassVar

import attrs


@attrs.frozen
class Change:
    """A component whose bytes appeared or vanished during a call, without a transition.

    Attributes:
        component: Which component, for example ``"grads"``.
        tier: Where its bytes lie now: ``"device"``, ``"host"`` or ``"none"``.
        nbytes: How many bytes it has now, summed over the ranks.
    """

    component: str
    tier: str
    nbytes: int


def _changes(values: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(values)


def _strings(values: Iterable[str]) -> tuple[str, ...]:
    # A lone string is an iterable of characters to the type checker, and never what was meant.
    return (values,) if isinstance(values, str) else tuple(values)


def _plain_tuple(values: tuple[Any, ...]) -> list[Any]:
    return [
        {"component": item.component, "tier": item.tier, "nbytes": item.nbytes} if isinstance(item, Change) else item
        for item in values
    ]


@attrs.frozen(kw_only=True)
class Event:
    """Base of all events. ``event`` is the name on the line and belongs to the class."""

    event: ClassVar[str]
    # Worked out once a class: a record is written within microseconds.
    _names: ClassVar[tuple[str, ...]] = ()
    _lists: ClassVar[tuple[str, ...]] = ()
    _values: ClassVar[Any]  # a function of the event, which a type checker would take for a method

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        cls._names = tuple(field.name for field in attrs.fields(cls))
        cls._lists = tuple(field.name for field in attrs.fields(cls) if field.converter is not None)
        get = attrgetter(*cls._names)
        # Of one name, attrgetter gives the value itself and no tuple.
        cls._values = staticmethod(get if len(cls._names) > 1 else lambda event: (get(event),))

    def to_fields(self) -> dict[str, Any]:
        """Return the event's own fields as plain JSON values, as they lie on the line."""
        fields = dict(zip(self._names, self._values(self), strict=True))
        for name in self._lists:
            fields[name] = _plain_tuple(fields[name])
        return fields


# -- session and policies ------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SessionOpened(Event):
    """A session began.

    Attributes:
        device_budget: Bytes of device memory the session may use; None where unlimited.
        host_budget: Bytes of host memory for parked state; None where unlimited.
        release: ``"eager"``, ``"lazy"`` or ``"never"``.
        verify: ``"off"`` or ``"checksum"``.
        versions: Package name to version, for those that matter to a replay.
    """

    event: ClassVar[str] = "session.opened"
    device_budget: int | None = None
    host_budget: int | None = None
    release: str
    verify: str
    versions: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SessionClosed(Event):
    """A session ended.

    Attributes:
        error: What ended it, or None for a normal end.
        seconds: How long it was open.
    """

    event: ClassVar[str] = "session.closed"
    error: str | None = None
    seconds: float


@attrs.frozen(kw_only=True)
class PolicyCreated(Event):
    """A policy joined the session. A replay starts from this mode and placement.

    Attributes:
        mode: The mode it was found or put in.
        placement: Component to tier.
        nbytes: Component to bytes, summed over the ranks.
        num_ranks: How many workers hold it.
    """

    event: ClassVar[str] = "policy.created"
    mode: str
    placement: dict[str, str]
    nbytes: dict[str, int]
    num_ranks: int = 1


@attrs.frozen(kw_only=True)
class PolicyClosed(Event):
    """A policy left the session.

    Attributes:
        reason: Who asked: ``"close"``, ``"detach"``, ``"session"``, ...
    """

    event: ClassVar[str] = "policy.closed"
    reason: str


@attrs.frozen(kw_only=True)
class PolicyFaulted(Event):
    """Putting a policy back failed: its state is unknown and every later call says so.

    Attributes:
        cause: What happened.
        remedy: What cures it.
    """

    event: ClassVar[str] = "policy.faulted"
    cause: str
    remedy: str


@attrs.frozen(kw_only=True)
class PolicyRecovered(Event):
    """A faulted policy serves again.

    Attributes:
        origin: Where its state came from, for example ``"host"`` or ``"checkpoint"``. (Not ``source``: that
            key of the line names the writer.)
        detail: What was done, in words.
        placement: Component to tier, as found. None where the writer did not say: a replay then knows the placement
            of a component again when it moves next.
        nbytes: Component to bytes, summed over the ranks; likewise.
    """

    event: ClassVar[str] = "policy.recovered"
    origin: str
    detail: str = ""
    placement: dict[str, str] | None = None
    nbytes: dict[str, int] | None = None


# -- scopes and transitions ----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ScopeEntered(Event):
    """A scope was entered, after its transition (if any) committed.

    Attributes:
        mode: The mode in effect now.
        outer_mode: The mode that its exit restores.
        depth: How many scopes were open around it: 0 for an outermost one.
        via: Who asked: ``"scope"``, ``"switch"``, ``"shim"`` or ``"session"``.
        call_site: ``"file:line"`` of the user's code.
    """

    event: ClassVar[str] = "scope.entered"
    mode: str
    outer_mode: str
    depth: int
    via: str
    call_site: str


@attrs.frozen(kw_only=True)
class ScopeExited(Event):
    """A scope was left; a scope always closes.

    Attributes:
        mode: The mode of the scope that closed.
        restored_mode: The mode in effect now.
        seconds: How long the scope was open.
        error: What the body or the way out raised, or None.
    """

    event: ClassVar[str] = "scope.exited"
    mode: str
    restored_mode: str
    seconds: float
    error: str | None = None


@attrs.frozen(kw_only=True)
class TransitionStarted(Event):
    """A transition began. Exactly one of committed, rolled back or failed follows with the same id.

    Attributes:
        from_mode: The mode in effect.
        to_mode: The mode wanted.
        reason: Why, for example ``"enter"``, ``"exit"``, ``"switch"`` or ``"make_room"``.
        via: Who asked: ``"scope"``, ``"switch"``, ``"shim"`` (the legacy API) or ``"session"``; None where nobody said.
        call_site: ``"file:line"`` of the user's code, where there is one.
    """

    event: ClassVar[str] = "transition.started"
    from_mode: str
    to_mode: str
    reason: str
    via: str | None = None
    call_site: str | None = None


@attrs.frozen(kw_only=True)
class TransitionCommitted(Event):
    """Every rank reached the new placement.

    Attributes:
        from_mode: The mode before.
        to_mode: The mode in effect now.
        seconds: How long the transition took.
        bytes_moved: Sum of ``nbytes`` of its ``component.moved`` that are not elided.
        bytes_elided: Bytes that needed no copy because they were clean.
        num_moves: How many ``component.moved`` belong to it.
        device_bytes: Bytes on the device afterwards.
        host_bytes: Bytes in the host pool afterwards.
    """

    event: ClassVar[str] = "transition.committed"
    from_mode: str
    to_mode: str
    seconds: float
    bytes_moved: int
    bytes_elided: int
    num_moves: int
    device_bytes: int
    host_bytes: int


@attrs.frozen(kw_only=True)
class TransitionRolledBack(Event):
    """A transition failed and every rank was put back: ``from_mode`` stands.

    Attributes:
        from_mode: The mode in effect, before and now.
        to_mode: The mode that was not reached.
        error: What failed.
    """

    event: ClassVar[str] = "transition.rolled_back"
    from_mode: str
    to_mode: str
    error: str | None


@attrs.frozen(kw_only=True)
class TransitionFailed(Event):
    """A transition failed and so did putting it back: the placement is unknown.

    Attributes:
        from_mode: The mode before.
        to_mode: The mode that was not reached.
        error: What failed.
    """

    event: ClassVar[str] = "transition.failed"
    from_mode: str
    to_mode: str
    error: str | None


@attrs.frozen(kw_only=True)
class ComponentMoved(Event):
    """One component changed its tier on the rank that wrote this.

    Attributes:
        component: Which component.
        from_tier: ``"device"``, ``"host"`` or ``"none"``.
        to_tier: As above.
        nbytes: Bytes that changed place.
        seconds: How long it took.
        elided: True where nothing was copied because the bytes at the target were still clean.
    """

    event: ClassVar[str] = "component.moved"
    component: str
    from_tier: str
    to_tier: str
    nbytes: int
    seconds: float
    elided: bool = False


# -- calls and steps -----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class CallFinished(Event):
    """A compute call ended.

    Attributes:
        method: Name of the method.
        mode: The mode it ran in.
        seconds: How long it took.
        error: What it raised, or None.
        changed: Components whose bytes appeared or vanished.
        via: ``"shim"`` where it came through the legacy API, else None.
        call_site: ``"file:line"`` of the user's code, where there is one.
        digest: Of the tensors in the result, with ``verify="checksum"``: equal results have equal digests.
    """

    event: ClassVar[str] = "call.finished"
    method: str
    mode: str
    seconds: float
    error: str | None = None
    changed: tuple[Change, ...] = attrs.field(default=(), converter=_changes)
    via: str | None = None
    call_site: str | None = None
    digest: str | None = None


@attrs.frozen(kw_only=True)
class GuardRejected(Event):
    """A call was refused because of the mode in effect or the placement; nothing changed.

    Attributes:
        method: Name of the method.
        mode: The mode in effect.
        needs: What it would have needed: modes or components.
    """

    event: ClassVar[str] = "guard.rejected"
    method: str
    mode: str
    needs: tuple[str, ...] = attrs.field(converter=_strings)


@attrs.frozen(kw_only=True)
class StepOpened(Event):
    """Gradients exist now that no optimizer step has consumed.

    Attributes:
        changed: Components whose bytes appeared or vanished.
    """

    event: ClassVar[str] = "step.opened"
    changed: tuple[Change, ...] = attrs.field(default=(), converter=_changes)


@attrs.frozen(kw_only=True)
class StepCommitted(Event):
    """The optimizer consumed the open step.

    Attributes:
        changed: Components whose bytes appeared or vanished.
        loss: The step's global loss, where known. NaN and infinities are written as null.
        grad_norm: The gradient norm before clipping, where known; likewise.
    """

    event: ClassVar[str] = "step.committed"
    changed: tuple[Change, ...] = attrs.field(default=(), converter=_changes)
    loss: float | None = None
    grad_norm: float | None = None


@attrs.frozen(kw_only=True)
class StepAborted(Event):
    """The open step was discarded; parameters and optimizer are as before it.

    Attributes:
        changed: Components whose bytes appeared or vanished.
        reason: Why.
    """

    event: ClassVar[str] = "step.aborted"
    changed: tuple[Change, ...] = attrs.field(default=(), converter=_changes)
    reason: str


@attrs.frozen(kw_only=True)
class GradientsDropped(Event):
    """Live gradients were discarded by a transition.

    Attributes:
        nbytes: Bytes of the gradients.
        reason: What allowed it.
    """

    event: ClassVar[str] = "gradients.dropped"
    nbytes: int
    reason: str = ""


# -- reference model, engines, checkpoints -------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ReferenceSwapped(Event):
    """The reference weights took the place of the policy's, or gave it back.

    Attributes:
        direction: ``"in"`` or ``"out"``.
        nbytes: Bytes copied.
        kind: How the reference is kept, for example ``"copy"``, ``"adapter-off"`` or ``"module"``.
        seconds: How long it took.
    """

    event: ClassVar[str] = "reference.swapped"
    direction: str
    nbytes: int
    kind: str
    seconds: float


@attrs.frozen(kw_only=True)
class WeightsPublished(Event):
    """An engine holds the policy's weights of this version.

    Attributes:
        version: Counts the pushes to this engine, from 1.
        nbytes: Bytes sent.
        engine: Its name in the session; None where the writer did not say.
        skipped: True where the engine held these bytes already: nothing was sent, and the version stands. None or False
            where they were sent.
    """

    event: ClassVar[str] = "weights.published"
    version: int
    nbytes: int
    engine: str | None = None
    skipped: bool | None = None


@attrs.frozen(kw_only=True)
class EngineWoken(Event):
    """A generation engine took its memory.

    Attributes:
        engine: Its name in the session.
        tags: Which parts woke (``"weights"``, ``"kv_cache"``); empty for all.
        nbytes: Bytes of device memory that they take, as the engine declares; None where it shares the policy's.
    """

    event: ClassVar[str] = "engine.woken"
    engine: str
    tags: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    nbytes: int | None = None


@attrs.frozen(kw_only=True)
class EngineSlept(Event):
    """A generation engine gave its memory back.

    Attributes:
        engine: Its name in the session.
        level: The engine's own sleep level.
        reason: Why, in words; None where the writer did not say.
    """

    event: ClassVar[str] = "engine.slept"
    engine: str
    level: int = 1
    reason: str | None = None


@attrs.frozen(kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk.

    Attributes:
        path: Where.
        nbytes: Bytes of tensors in it.
        seconds: How long it took.
    """

    event: ClassVar[str] = "checkpoint.saved"
    path: str
    nbytes: int
    seconds: float


@attrs.frozen(kw_only=True)
class CheckpointLoaded(Event):
    """A checkpoint replaced the policy's state.

    Attributes:
        path: From where.
        nbytes: Bytes of tensors in it.
        seconds: How long it took.
    """

    event: ClassVar[str] = "checkpoint.loaded"
    path: str
    nbytes: int
    seconds: float


# -- workers and warnings ------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class WorkerLost(Event):
    """A worker died or passed its deadline and was killed.

    Attributes:
        rank: Which.
        cause: What is known of why.
    """

    event: ClassVar[str] = "worker.lost"
    rank: int
    cause: str


@attrs.frozen(kw_only=True)
class RankReported(Event):
    """What one rank made of a transition. Which rank is the line's ``source`` (``rank:K``).

    Attributes:
        outcome: ``"ok"``, ``"failed"``, or ``"undone"``: it was put back, because another rank failed.
        placement: Component to tier, as achieved.
        error: What failed on it, or None.
    """

    event: ClassVar[str] = "rank.reported"
    outcome: str
    placement: dict[str, str]
    error: str | None = None


@attrs.frozen(kw_only=True)
class WarningIssued(Event):
    """Something worth knowing that changed no state.

    Attributes:
        code: Short and stable, for a filter.
        message: For a person.
        nbytes: Bytes concerned, where that makes sense.
        count: Things concerned, where that makes sense.
    """

    event: ClassVar[str] = "warning"
    code: str
    message: str
    nbytes: int | None = None
    count: int | None = None


@attrs.frozen(kw_only=True)
class UnknownEvent(Event):
    """A line that this version has no class for, or whose fields do not fit the class. Only readers make it.

    Attributes:
        name: The name on the line.
        fields: Its fields as they were.
    """

    event: ClassVar[str] = "unknown"
    name: str
    fields: dict[str, Any]

    def to_fields(self) -> dict[str, Any]:
        """Return the fields as they were on the line."""
        return dict(self.fields)


#: Name on the line to class, for every event that the library writes.
EVENTS: dict[str, type[Event]] = {
    cls.event: cls
    for cls in (
        SessionOpened,
        SessionClosed,
        PolicyCreated,
        PolicyClosed,
        PolicyFaulted,
        PolicyRecovered,
        ScopeEntered,
        ScopeExited,
        TransitionStarted,
        TransitionCommitted,
        TransitionRolledBack,
        TransitionFailed,
        ComponentMoved,
        CallFinished,
        GuardRejected,
        StepOpened,
        StepCommitted,
        StepAborted,
        GradientsDropped,
        ReferenceSwapped,
        WeightsPublished,
        EngineWoken,
        EngineSlept,
        CheckpointSaved,
        CheckpointLoaded,
        WorkerLost,
        RankReported,
        WarningIssued,
    )
}
