"""All ranks of a policy as one: asks them, adds up what they say, and puts back those that went ahead alone.

One round of messages where all goes well; a second one only where a rank failed. Decides nothing itself: that is
:mod:`rl_session.driver.consensus`. Knows nothing of modes or scopes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, cast

from rl_session.audit import events
from rl_session.audit.naming import find_siblings
from rl_session.driver import consensus
from rl_session.errors import FaultedError, RLSessionError
from rl_session.workers.group import SharedGroup, WorkerGroup
from rl_session.workers.replies import (
    CallResult,
    Failed,
    Lost,
    Ok,
    Reply,
    Stamp,
    TransitionReply,
    TransitionRequest,
    error_of,
)
from rl_session.workers.shares import Share, join, split

__all__ = ["Ranks"]

_TRAINS = frozenset({"train", "forward_backward"})
_ON_ROWS = _TRAINS | {
    *("get_logprobs", "get_reference_policy_logprobs", "get_topk_logits", "score", "get_values", "generate"),
}
"""Calls on the rows of a batch, their first argument, of which each rank that is joined to others has its own."""


class Ranks:
    """The ranks of one policy.

    Args:
        group: How they are reached.
        label: How messages name the policy.
        explain: Gives the facts for messages.
        record: Writes an event of the policy.
    """

    def __init__(
        self,
        group: WorkerGroup,
        label: str,
        explain: Callable[[], tuple[str, tuple[str, ...]]],
        record: Callable[..., Any],
    ) -> None:
        self.group = group
        self.label = label
        self.last_checkpoint: str | None = None
        """What was saved or loaded last, for a recovery that no rank survived."""
        self._explain = explain
        self._record = record
        self.is_new = False
        """Whether the last recovery built them anew."""
        self._extra: list[TransitionReply] = []
        """Moves of the transition under way that were taken back."""
        self._lost: set[int] = set()
        self._set_up: list[tuple[str, tuple[Any, ...]]] = []
        """Calls that a rank that is built anew has to be told again."""

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that died or were killed."""
        return frozenset(self._lost)

    @property
    def _some(self) -> SharedGroup:
        return cast("SharedGroup", self.group)

    # -- asking --------------------------------------------------------------------------------------------------

    def transition(self, request: TransitionRequest, reason: str) -> TransitionReply:
        """Ask every rank to move; all do, or none.

        Raises:
            RLSessionError: A rank did not; every other one was put back, and the error lists them all.
            FaultedError: A rank is lost, or could not be put back.
        """
        extra, self._extra = self._extra, []
        reply = self._agreed(self.group.call("transition", request), reason)
        return consensus.with_more(reply, extra)

    def transition_within(
        self, request: TransitionRequest, headroom: int | None, reason: str
    ) -> TransitionReply | None:
        """As :meth:`transition`, where it takes no more than ``headroom`` on any rank; else None, and nothing has moved.

        Asking the ranks first what they need would be a round of messages of its own.
        """
        request.headroom = headroom
        replies = self.group.call("transition", request)
        request.headroom = None
        if not consensus.is_short(replies):
            return self._agreed(replies, reason)
        ahead = consensus.to_put_back(replies)
        if len(ahead) + consensus.is_short(replies) < len(replies):
            return self._agreed(replies, reason)  # another one failed: that is the error
        if ahead:
            undone = self._some.call_on(ahead, "undo")
            if not consensus.is_unanimous(list(undone.values())):
                raise self._disagreed(replies, undone, reason)
            # Moved there and back: the log of those ranks has it, so the sums must.
            self._extra = [r.value for r in (*(replies[k] for k in ahead), *undone.values()) if isinstance(r, Ok)]  # type: ignore[misc]
        return None

    def _agreed(self, replies: list[Reply], reason: str) -> TransitionReply:
        if consensus.is_unanimous(replies) and not consensus.is_short(replies):
            return consensus.merge_transitions([cast("Ok", reply).value for reply in replies])  # type: ignore[misc]
        if len(replies) == 1 and isinstance(replies[0], Failed):
            raise error_of(replies[0])
        ahead = consensus.to_put_back(replies)
        undone = self._some.call_on(ahead, "undo") if ahead else {}
        raise self._disagreed(replies, undone, reason)

    def _disagreed(self, replies: list[Reply], undone: dict[int, Reply], reason: str) -> RLSessionError:
        """The error of a transition that some rank did not make, after the others were put back."""
        self._note_lost([*enumerate(replies), *undone.items()])
        error = consensus.transition_error(f"{self.label}: {reason}", replies, undone, self._explain()[1])
        if consensus.has_dropped_live_gradients(replies):
            # A part of an open step is gone for good, as the user allowed: no rank may go on with the rest of it.
            self._some.call_on([r for r in range(len(replies)) if r not in self._lost], "end_step")
            error.rl_step_ended = True  # type: ignore[attr-defined]
        return error

    def call(self, method: str, *args: Any, **kwargs: Any) -> CallResult:
        """Make a compute or state call on every rank.

        Raises:
            FaultedError: A rank is lost, or the ranks differ now.
            RLSessionError: What the call itself raised.
        """
        parts = self._shares(method, args)
        if parts is None:
            replies = self.group.call(method, *args, **kwargs)
        else:
            replies = self._some.call_each(parts, method, *args[1:], **kwargs)
        if not consensus.is_unanimous(replies):
            raise self._call_error(method, replies)
        results = [cast("CallResult", cast("Ok", reply).value) for reply in replies]
        if parts is not None and method not in _TRAINS:  # there every rank has the numbers of all
            results[0].value = _joined(method, args, parts, results)
        if method in ("save_checkpoint", "load_checkpoint"):
            self.last_checkpoint = str(args[0])
        elif method == "register_extra":
            self._set_up.append((method, args))
        return self._exact(consensus.merge_calls(results), [result.changed for result in results])

    def _shares(self, method: str, args: Sequence[Any]) -> list[Share] | None:
        """The rows of a batch that each rank is sent; None where all are sent the same.

        Raises:
            BatchError: The batch is wrong; it has reached no rank.
        """
        if method not in _ON_ROWS or not self.group.is_joined:
            return None
        gbs, mbs = args[2:4] if method == "train" else (None, None)
        return split(args[0], self.group.num_ranks, f"{self.label}: {method}()", gbs=gbs, mbs=mbs)

    def _exact(self, merged: CallResult, changes: Sequence[Any]) -> CallResult:
        """Where only some ranks said that a component changed, the sum over all of them has to be asked for."""
        if not merged.changed or consensus.tells_all_changes(changes):
            return merged
        sizes = self.ask("sizes")
        changed = tuple(type(each)(each.component, each.tier, sizes[each.component]) for each in merged.changed)
        return CallResult(merged.value, changed, merged.notes, merged.device_bytes)

    def _call_error(self, method: str, replies: list[Reply]) -> BaseException:
        if len(replies) == 1 and isinstance(replies[0], Failed):
            return error_of(replies[0])
        self._note_lost(enumerate(replies))
        failed = [reply.error for reply in replies if isinstance(reply, Failed)]
        error = consensus.call_error(method, self.label, replies, self._explain()[1])
        changes = [each for each in (getattr(e, "rl_changed", ()) for e in failed) if each]
        if changes:
            error.rl_changed = consensus.merge_changes(changes)  # type: ignore[attr-defined]
        return error

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Ask every rank something that is no compute call; the values as one.

        Raises:
            FaultedError: A rank is lost.
            RLSessionError: What a rank raised.
        """
        values = self.ask_each(method, *args, **kwargs)
        if method == "add_cache_hook":
            self._set_up.append((method, args))
        merge = consensus.MERGES.get(method)
        return values[0] if len(values) == 1 or merge is None else merge(values)

    def ask_each(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As :meth:`ask`, one value a rank."""
        replies = self.group.call(method, *args, **kwargs)
        if not consensus.is_unanimous(replies):
            raise self._call_error(method, replies)
        return [cast("Ok", reply).value for reply in replies]

    def note_lost(self, rank: int, cause: str) -> None:
        """A rank is known to be gone."""
        self._note_lost([(rank, Lost(cause))])

    def _note_lost(self, replies: Any) -> None:
        """Write down who died, once."""
        for rank, reply in replies:
            if isinstance(reply, Lost) and rank not in self._lost:
                self._lost.add(rank)
                self._record(events.WorkerLost(rank=rank, cause=reply.cause))

    def fetch_records(self, path: str | PathLike[str] | None) -> None:
        """Bring the records of ranks on other nodes beside the session's own; what cannot be had is left where it is.

        Args:
            path: The session's file, or None.
        """
        if path is None or not self.group.logs_moves:
            return
        folder = Path(path).parent
        known = [found.name for found in find_siblings(Path(path))]
        for reply in self.group.call("records", known):
            for name, content in (reply.value if isinstance(reply, Ok) else {}).items():  # type: ignore[attr-defined]
                with suppress(OSError):
                    (folder / name).write_bytes(content)

    # -- starting anew -------------------------------------------------------------------------------------------

    def recover(self, path: str | None, log_path: str | PathLike[str] | None = None) -> str:
        """Make every rank usable again, all of them with the same state; returns where it came from.

        Where every rank lives, each gathers what it has. Where some are lost, all are built anew, from a checkpoint or,
        where each rank holds a whole copy, from one that survived.

        Raises:
            FaultedError: There is nothing to restore from.
            CheckpointError: The checkpoint cannot be loaded.
            WorkerError: The ranks could not be started.
        """
        if self.group.num_ranks > 1:  # another process may have seen a rank die of which this one has not heard
            self._note_lost(enumerate(self.group.call("nothing")))
        self.is_new = bool(self._lost)
        if not self._lost:
            return str(self.ask("recover", path))
        survivor = None if path else self._surviving_copy()
        path = path or (None if survivor else self.last_checkpoint)
        if survivor is None and path is None:
            raise FaultedError(
                f"{self.label}: recover() without a checkpoint",
                (
                    f"lost: {', '.join(f'rank {rank}' for rank in sorted(self._lost))}",
                    "no rank holds a whole copy of the state",
                ),
                "policy.load_checkpoint(path)",
            )
        self.fetch_records(log_path)
        self._restart()
        if survivor is not None:
            rank, state = survivor
            self.ask("restore_state", state)
            return f"host copies of rank {rank}"
        self.ask("recover", path)
        return f"checkpoint {path}"

    def _surviving_copy(self) -> tuple[int, Any] | None:
        """The whole state, from the first survivor that has it and is not torn."""
        if self.group.num_ranks == 1:
            return None
        for rank in range(self.group.num_ranks):
            if rank in self._lost:
                continue
            reply = self._some.call_on([rank], "export_state")[rank]
            if isinstance(reply, Ok) and reply.value is not None:
                return rank, reply.value
            self._note_lost([(rank, reply)])
        return None

    def _restart(self) -> None:
        replies = self._some.restart()
        consensus.merge_starts(self.label, replies)
        self._lost.clear()
        self._some.stamp = Stamp()  # the ranks know of no lease yet
        for method, args in self._set_up:
            self.group.call(method, *args)


def _joined(method: str, args: Sequence[Any], parts: Sequence[Share], results: Sequence[CallResult]) -> dict[str, Any]:
    """What the ranks found for their rows, in the order of the batch; generated texts differ in length."""
    fill = {"output_ids": args[1].pad_id} if method == "generate" else None
    return join([cast("dict[str, Any]", result.value) for result in results], parts, fill=fill)
