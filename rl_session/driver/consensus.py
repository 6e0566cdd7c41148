"""What the replies of all ranks add up to: one answer, or one error that lists every rank.

Pure: replies in, values out. A transition is made on every rank or on none, so the one decision here is who has to be put
back. Knows nothing of how ranks are reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from rl_session.errors import DeviceMemoryError, FaultedError, RLSessionError, TransitionError, WorkerError, WorldError
from rl_session.lifecycle import Placement, Tier
from rl_session.offload.reports import Notice
from rl_session.planning import Moved
from rl_session.workers.replies import (
    CallResult,
    Changed,
    Description,
    Failed,
    Held,
    Lost,
    Ok,
    Reply,
    Room,
    TransitionReply,
)

__all__ = [
    "MERGES",
    "call_error",
    "disagreement",
    "has_dropped_live_gradients",
    "is_short",
    "is_unanimous",
    "merge_calls",
    "merge_starts",
    "merge_transitions",
    "tells_all_changes",
    "to_put_back",
    "transition_error",
    "with_more",
]

E = TypeVar("E", bound=BaseException)

_CHANGES_STATE = frozenset({"train", "commit", "load_checkpoint", "register_extra", "abort", "end_step"})
"""Calls after which ranks are no longer alike if only some of them made it."""


# -- deciding ---------------------------------------------------------------------------------------------------------


def is_unanimous(replies: Sequence[Reply]) -> bool:
    """Whether every rank did it."""
    return all(type(reply) is Ok for reply in replies)


def to_put_back(replies: Sequence[Reply]) -> tuple[int, ...]:
    """The ranks that made a transition which another one did not make."""
    if is_unanimous(replies) and not is_short(replies):
        return ()
    return tuple(
        rank for rank, reply in enumerate(replies) if isinstance(reply, Ok) and not isinstance(reply.value, Room)
    )


def is_short(replies: Sequence[Reply]) -> int:
    """How many ranks said what room they need instead of moving."""
    return sum(isinstance(reply, Ok) and isinstance(reply.value, Room) for reply in replies)


def has_dropped_live_gradients(replies: Sequence[Reply]) -> bool:
    """Whether a rank gave up gradients of an open step, which nothing brings back."""
    made = [reply.value for reply in replies if isinstance(reply, Ok)]
    return any(isinstance(value, TransitionReply) and value.live_dropped for value in made)


def disagreement(method: str, replies: Sequence[Reply]) -> bool:
    """Whether a call that was made on some ranks only leaves them different from the others."""
    made = sum(isinstance(reply, Ok) for reply in replies)
    return method in _CHANGES_STATE and 0 < made < len(replies)


# -- adding up --------------------------------------------------------------------------------------------------------


def merge_placements(placements: Iterable[Placement]) -> Placement:
    """Each component at the highest tier that it has on any rank; a rank without bytes of it says nothing."""
    first, *others = placements
    if all(placement == first for placement in others):  # ranks are alike, unless something is wrong
        return first
    highest: dict[str, Tier] = {}
    for placement in (first, *others):
        for name, tier in placement.items():
            if name not in highest or tier.height > highest[name].height:
                highest[name] = tier
    return Placement(highest)


def merge_transitions(replies: Sequence[TransitionReply]) -> TransitionReply:
    """All ranks as one: bytes are summed, the device and the host are those of the rank that holds most."""
    if len(replies) == 1:
        return replies[0]
    moved, seconds = _merge_moves(replies)
    return TransitionReply(
        before=merge_placements(reply.before for reply in replies),
        placement=merge_placements(reply.placement for reply in replies),
        moved=moved,
        seconds=seconds,
        dropped_bytes=sum(reply.dropped_bytes for reply in replies),
        live_dropped=any(reply.live_dropped for reply in replies),
        device_bytes=max(reply.device_bytes for reply in replies),
        host_bytes=max(reply.host_bytes for reply in replies),
        notices=_merge_notices(notice for reply in replies for notice in reply.notices),
    )


def with_more(reply: TransitionReply, extra: Sequence[TransitionReply]) -> TransitionReply:
    """A transition, and what moved there and back before it."""
    if not extra:
        return reply
    moved, seconds = _merge_moves([*extra, reply])
    return attrs.evolve(reply, moved=moved, seconds=seconds)


def _merge_moves(replies: Sequence[TransitionReply]) -> tuple[tuple[Moved, ...], tuple[float, ...]]:
    """One entry a rank and component: the ranks write a record each, and the sums of the driver's must be theirs."""
    moved = tuple(entry for reply in replies for entry in reply.moved)
    return moved, tuple(spent for reply in replies for spent in reply.seconds)


def _merge_notices(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Equal warnings of several ranks as one, with their bytes and counts summed."""
    merged: dict[tuple[str, str], Notice] = {}
    for notice in notices:
        key = (notice.code, notice.message)
        before = merged.get(key)
        if before is not None:
            notice = Notice(  # noqa: PLW2901 (the sum takes its place)
                notice.code, notice.message, _sum(before.nbytes, notice.nbytes), _sum(before.count, notice.count)
            )
        merged[key] = notice
    return tuple(merged.values())


def _sum(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else a + b


def merge_starts(label: str, replies: Sequence[Reply]) -> Description:
    """All ranks as one, as they were built.

    Raises:
        WorkerError: A rank died, did not come up in time, or failed in a way of its own.
        RLSessionError: What building it raised, where that is an error of this library.
    """
    if not is_unanimous(replies):
        raise _start_error(f"{label}: starting {len(replies)} workers", replies)
    found: list[Description] = [reply.value for reply in replies if isinstance(reply, Ok)]  # type: ignore[misc]
    if len(found) == 1:
        return found[0]
    return Description(
        mode=found[0].mode,
        placement=merge_placements(each.placement for each in found),
        nbytes=_sum_maps([each.nbytes for each in found]),
        notices=_merge_notices(notice for each in found for notice in each.notices),
        device_capacity=_least(each.device_capacity for each in found),
        device_free=_least(each.device_free for each in found),
        device_bytes=max(each.device_bytes for each in found),
        moved=tuple(fields for each in found for fields in each.moved),
    )


def _least(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


def _sum_maps(maps: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in maps:
        for name, nbytes in each.items():
            total[name] = total.get(name, 0) + nbytes
    return total


def merge_calls(results: Sequence[CallResult]) -> CallResult:
    """All ranks as one: the first rank's value, changes and notes summed."""
    if len(results) == 1:
        return results[0]
    notes = _merge_notes([result.notes for result in results])
    fullest = max(result.device_bytes for result in results)
    return CallResult(results[0].value, merge_changes([result.changed for result in results]), notes, fullest)


def merge_changes(changes: Sequence[Sequence[Changed]]) -> tuple[Changed, ...]:
    """Bytes of each component that changed, summed over the ranks that say so; see :func:`tells_all_changes`."""
    merged: dict[str, Changed] = {}
    for entry in (entry for each in changes for entry in each):
        before = merged.get(entry.component)
        if before is None:
            merged[entry.component] = entry
        else:
            tier = max(before.tier, entry.tier, key=lambda t: t.height)
            merged[entry.component] = Changed(entry.component, tier, before.nbytes + entry.nbytes)
    return tuple(merged.values())


def tells_all_changes(changes: Sequence[Sequence[Changed]]) -> bool:
    """Whether every rank says of the same components that they changed: only then are the sums those of all ranks."""
    named = [{entry.component for entry in each} for each in changes]
    return all(names == named[0] for names in named)


def _merge_notes(notes: Sequence[tuple[tuple[str, dict[str, Any]], ...]]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Facts for records, of which each rank has its own: bytes are summed, the slowest rank gives the seconds.

    A checkpoint is one of all ranks, and each of them knows its size.
    """
    longest = max(notes, key=len)
    merged = []
    for index, (name, fields) in enumerate(longest):
        others = [each[index][1] for each in notes if len(each) > index and each[index][0] == name]
        combined = dict(fields)
        for key, combine in (("nbytes", max if name.startswith("checkpoint.") else sum), ("seconds", max)):
            if key in combined:
                combined[key] = combine(other[key] for other in others)
        merged.append((name, combined))
    return tuple(merged)


def _merge_held(values: Sequence[Sequence[Held]]) -> list[Held]:
    """What is on the device of the rank that has most of it; it may leave where it may on every rank."""
    merged: dict[str, Held] = {}
    for entry in (entry for each in values for entry in each):
        before = merged.get(entry.component)
        merged[entry.component] = (
            entry
            if before is None
            else Held(
                entry.component,
                max(before.nbytes, entry.nbytes),
                max(before.dirty_nbytes, entry.dirty_nbytes),
                before.releasable and entry.releasable,
                before.disposable and entry.disposable,
            )
        )
    return list(merged.values())


def _merge_memory(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Components and host buffers summed over the ranks, the device that of the fullest rank, and each rank's own."""
    components: dict[str, dict[str, int]] = {}
    for value in values:
        for name, tiers in value["components"].items():
            components[name] = _sum_maps([components.get(name, {}), tiers])
    free = [value["device_free"] for value in values if value["device_free"] is not None]
    return {
        "components": components,
        "clean": sum(value["clean"] for value in values),
        "uncovered": _sum_maps([value["uncovered"] for value in values]),
        "device_bytes": max(value["device_bytes"] for value in values),
        "device_free": min(free) if free else None,
        "host_in_use": sum(value["host_in_use"] for value in values),
        "host_held": sum(value["host_held"] for value in values),
        "ranks": list(values),
    }


MERGES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "placement": merge_placements,
    "sizes": _sum_maps,
    "holdings": _merge_held,
    "memory": _merge_memory,
    "has_open_step": any,
}
"""How the values of all ranks become one, where the first rank's is not the answer."""


# -- saying what went wrong --------------------------------------------------------------------------------------------


def transition_error(
    attempted: str,
    replies: Sequence[Reply],
    undone: Mapping[int, Reply],
    facts: tuple[str, ...],
) -> RLSessionError:
    """One error for a transition that some rank did not make.

    Args:
        attempted: What was tried, naming the policy.
        replies: Each rank's answer.
        undone: What putting back the ranks that made it gave, by rank.
        facts: What is known otherwise.

    Returns:
        ``FaultedError`` where a rank is lost or could not be put back; else the class of what failed, out of memory before
        all else.
    """
    lines = tuple(_line(rank, reply, undone.get(rank)) for rank, reply in enumerate(replies))
    stuck = [reply for reply in undone.values() if not isinstance(reply, Ok)]
    failed = [reply.error for reply in (*replies, *stuck) if isinstance(reply, Failed)]
    lost = [reply.cause for reply in (*replies, *stuck) if isinstance(reply, Lost)]
    torn = [error for error in failed if isinstance(error, FaultedError)]
    if lost or stuck or torn:
        cause = lost[0] if lost else _first_line((torn or failed)[0])
        return _chained(FaultedError(attempted, (*lines, *facts), "policy.recover()", cause), failed)
    chosen = _most_telling(failed)
    if not isinstance(chosen, RLSessionError):
        again = "the same call again, once the cause is gone"
        return _chained(TransitionError(attempted, (*lines, *facts), again, _first_line(chosen)), failed)
    told = (*lines, *(fact for fact in chosen.facts if fact not in facts), *facts)
    return _chained(type(chosen)(attempted, told, chosen.remedy, chosen.cause or _first_line(chosen)), failed)


def _start_error(attempted: str, replies: Sequence[Reply]) -> RLSessionError:
    lines = tuple(_line(rank, reply, None) for rank, reply in enumerate(replies))
    failed = [reply.error for reply in replies if isinstance(reply, Failed)]
    ours = [error for error in failed if isinstance(error, RLSessionError)]
    lost = [reply.cause for reply in replies if isinstance(reply, Lost)]
    if ours and not lost:
        chosen = ours[0]
        return _chained(type(chosen)(attempted, (*lines, *chosen.facts), chosen.remedy, chosen.cause), failed)
    cause = _first_line(failed[0]) if failed else lost[0]
    error = WorkerError(attempted, lines, "look at the worker's own log; then the same call again", cause)
    for reply in replies:
        if isinstance(reply, Failed) and reply.traceback:
            error.add_note(reply.traceback)
            break
    return _chained(error, failed)


def call_error(method: str, label: str, replies: Sequence[Reply], facts: tuple[str, ...]) -> BaseException:
    """One error for a call that some rank did not make; where every rank failed alike, it is that failure."""
    failed = [reply.error for reply in replies if isinstance(reply, Failed)]
    lost = [reply.cause for reply in replies if isinstance(reply, Lost)]
    lines = tuple(_line(rank, reply, None) for rank, reply in enumerate(replies))
    if lost or disagreement(method, replies):
        why = f"{label}: {method}() " + ("and a rank was lost" if lost else "on some ranks only, which differ now")
        cause = lost[0] if lost else _first_line(failed[0])
        return _chained(FaultedError(why, (*lines, *facts), "policy.recover()", cause), failed)
    error = _most_telling(failed)
    traces = [reply.traceback for reply in replies if isinstance(reply, Failed) and reply.error is error]
    if len(replies) > 1:
        error.add_note("\n".join(lines))
    if traces and traces[0]:
        error.add_note(traces[0])
    return error


def _most_telling(errors: Sequence[BaseException]) -> BaseException:
    """The world's failure before the caller's mistake, and of those out of memory first."""

    def rank(error: BaseException) -> int:
        if isinstance(error, FaultedError):
            return 0
        if isinstance(error, DeviceMemoryError):
            return 1
        return 2 if isinstance(error, WorldError) else 3

    return min(errors, key=rank)


def _chained(error: E, causes: Sequence[BaseException]) -> E:
    if causes:
        error.__cause__ = causes[0]
    return error


def _line(rank: int, reply: Reply, undone: Reply | None) -> str:
    """One rank: what it did, and where its components are now."""
    text, placement = _outcome(reply)
    if undone is not None:
        after, found = _outcome(undone)
        text += ", was put back" if isinstance(undone, Ok) else f", could not be put back ({after})"
        placement = found or placement
    where = "" if placement is None else f"; now {_where(placement)}"
    return f"rank {rank}: {text}{where}"


def _outcome(reply: Reply) -> tuple[str, Placement | None]:
    if isinstance(reply, Lost):
        return f"lost: {reply.cause}", None
    if isinstance(reply, Failed):
        return _first_line(reply.error), reply.placement
    if isinstance(reply.value, Room):
        return "had no room and did not move", None
    placement = getattr(reply.value, "placement", None)
    return "ok", placement if isinstance(placement, Placement) else None


def _where(placement: Placement) -> str:
    return (
        ", ".join(f"{name} {tier}" for name, tier in placement.items() if tier is not Tier.NONE) or "nothing anywhere"
    )


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
