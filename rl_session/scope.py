"""The object behind ``with``, and the train step that may stay open across several of them.

A scope is single-use, synchronous or asynchronous. It is a thin adapter: the state lives in
:class:`rl_session.driver.control.Control`, which remembers a frame and holds this object only weakly.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import torch

from rl_session.audit import events
from rl_session.driver.callsite import call_site
from rl_session.driver.control import Control, Frame
from rl_session.driver.handles import Handle
from rl_session.driver.interrupts import DeferredInterrupt
from rl_session.driver.journal import changes
from rl_session.driver.ownership import Token
from rl_session.errors import OwnershipError, RLSessionError, ScopeReuseError, StepClosedError
from rl_session.lifecycle import MODE_TABLE, Mode
from rl_session.workers.group import LocalGroup
from rl_session.workers.replies import CallResult

__all__ = ["Scope", "Step"]

T = TypeVar("T")
H_co = TypeVar("H_co", covariant=True)
_POLL_SECONDS = 0.01


class Scope(Generic[H_co]):
    """One ``with`` (or ``async with``) block in a mode; yields a handle with the calls of that mode.

    Made by methods such as :meth:`Policy.training_mode`; enter it once.

    Raises (on entry):
        NestingError: The mode may not be opened inside the one around it.
        OwnershipError: Another thread, task or process owns the policy.
        ScopeReuseError: The scope was entered before.
        RLSessionError: The transition failed and was rolled back; the outer mode stands.
    """

    _owner = "policy"
    """How examples in messages call what the scope belongs to."""

    def __init__(
        self,
        control: Control,
        target: Any,
        mode: Mode,
        spelling: str,
        *,
        acquire_timeout: float | None = None,
        engine: str = "",
    ) -> None:
        self._control = control
        self._target = target
        self._mode = mode
        self._spelling = spelling
        self._timeout = acquire_timeout
        self._engine = engine
        self._token: Token | None = None
        self._frame: Frame | None = None
        self._state = "not entered"

    def __repr__(self) -> str:
        where = f" at {self._frame.call_site}" if self._frame is not None else ""
        return f"<{self._spelling} of {self._control.label}: {self._state}{where}>"

    # -- with ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> H_co:
        site = self._use_once()
        try:
            self._token = self._take(site, self._timeout)
            with self._control.lock, DeferredInterrupt():  # as Control.changing(), without its generator
                frame = self._enter(site)
                frame.undo = self._set_forwards(frame)
        except BaseException as error:  # also an interrupt that waited for the move to end: the block will never run
            with DeferredInterrupt():
                self._abandon(error)
            raise
        return self._handle()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        with DeferredInterrupt():
            self._leave_after(error)

    def _use_once(self) -> str:
        site = call_site()
        if self._state != "not entered":
            raise ScopeReuseError(
                f"{self._control.label}: {self._spelling} entered a second time at {site}",
                (f"this scope: {self!r}", *self._control.explain()[1]),
                f"with {self._owner}.{self._spelling}: ...  # a new scope for every block",
            )
        self._state = "entering"
        return site

    def _take(self, site: str, timeout: float | None) -> Token:
        """Become the owner of what the scope needs."""
        return self._control.acquire(self._spelling, site, timeout, is_scope=True)

    def _enter(self, site: str) -> Frame:
        self._frame = self._control.enter(self, self._mode, self._spelling, site, engine=self._engine)
        self._state = "active"
        return self._frame

    def _abandon(self, error: BaseException) -> None:
        """Undo what there is of an entry whose block will not run."""
        if self._frame is not None:
            self._leave_after(error)
            return
        self._state = "failed to enter"
        if self._token is not None:
            self._control.let_go(self._token)

    def _leave_after(self, error: BaseException | None) -> None:
        """Leave; the body's error wins, and one on the way out becomes a note on it."""
        if self._frame is None:
            return
        self._state = "exited"
        try:
            self._control.leave(self._frame, error)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and while leaving {self._spelling}: {failure}")

    def _handle(self) -> H_co:
        return cast("H_co", Handle(self._target, self._mode, self._control.kind))

    def _set_forwards(self, frame: Frame) -> Callable[[], None] | None:
        """Set train or eval, and autograd, for the user's own forwards on this thread; returns how to undo it."""
        group = self._control.group
        forwards = MODE_TABLE[frame.row].forwards
        if not isinstance(group, LocalGroup) or forwards not in ("train", "eval"):
            return None
        modules = group.worker.forward_mode(frame.row, trusting_root=not frame.moved)
        if modules is not None:
            modules.__enter__()
        autograd = _autograd.set(self._control, on=forwards == "train", needed=modules is not None)
        if autograd is None:
            return None  # as the scope around it left things

        def undo() -> None:
            if modules is not None:
                modules.__exit__(None, None, None)
            autograd.undo()

        return undo

    # -- async with ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> H_co:
        site = self._use_once()
        try:
            self._token = await self._acquire(site)
            _, cancelled = await _shielded(lambda: self._enter(site))
            if cancelled is not None:
                raise cancelled
        except BaseException as error:
            failed = error
            await _shielded(lambda: self._abandon(failed))
            raise
        return self._handle()

    async def _acquire(self, site: str) -> Token:
        """Take ownership in this task, so that a thread that works for it is recognised."""
        deadline = time.monotonic() + (self._timeout or 0.0)
        while True:
            if self._control.has_orphans:
                await _shielded(self._control.close_orphans)
            try:
                return self._take(site, None)
            except OwnershipError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        _, cancelled = await _shielded(lambda: self._leave_after(error))
        if cancelled is not None and error is None:
            raise cancelled


async def _shielded(work: Callable[[], T]) -> tuple[T, asyncio.CancelledError | None]:
    """Run ``work`` in a thread with this context and wait for its end, whatever happens to the task meanwhile.

    Returns:
        The result, and the cancellation that arrived meanwhile, if one did.

    Raises:
        CancelledError: A cancellation arrived and the work failed; its error is the cause, and a note.
    """
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(None, context.run, work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    failure = future.exception()
    if failure is not None and cancelled is not None:
        cancelled.add_note(f"and meanwhile: {failure}")
        raise cancelled from failure
    return future.result(), cancelled


class _Autograd:
    """What one scope set autograd to on its thread, and what it found there."""

    def __init__(self, stack: list[_Autograd], owner: object, *, on: bool) -> None:
        self.owner = owner
        self.on = on
        self.found = torch.is_grad_enabled()
        self._stack = stack
        self._thread = threading.get_ident()
        stack.append(self)
        torch.set_grad_enabled(on)

    def undo(self) -> None:
        """Restore what was found; or leave that to the scope entered after this one and still open, which found ours.

        Scopes of two policies may end in any order.
        """
        at = self._stack.index(self)
        del self._stack[at]
        if at < len(self._stack):
            self._stack[at].found = self.found
        elif threading.get_ident() == self._thread:  # grad mode belongs to a thread
            torch.set_grad_enabled(self.found)


class _AutogradStack(threading.local):
    """The open scopes of a thread that have set autograd, in the order of entry."""

    def __init__(self) -> None:
        self._open: list[_Autograd] = []

    def set(self, owner: object, *, on: bool, needed: bool) -> _Autograd | None:
        """Set it for a scope of ``owner``; None where the scope around it has done so, unless it is ``needed`` all the same."""
        last = self._open[-1] if self._open else None
        if not needed and last is not None and last.owner is owner and last.on is on is torch.is_grad_enabled():
            return None
        return _Autograd(self._open, owner, on=on)


_autograd = _AutogradStack()


class Step:
    """A train step: gradients accumulate chunk by chunk, and one optimizer step ends it. May span scopes.

    Made by :meth:`Policy.begin_step`. As a context manager it commits when the block ends normally, unless it was committed
    or aborted before, and aborts when it ends by an exception.
    """

    def __init__(self, control: Control, site: str) -> None:
        self._control = control
        self._site = site
        self._state = "open"

    def __repr__(self) -> str:
        return f"<train step of {self._control.label} from {self._site}: {self.state}>"

    @property
    def state(self) -> str:
        """One of "open", "committed" or "aborted"."""
        if self._state == "open" and self._control.step is not self:
            self._state = "aborted"
        return self._state

    def _check_open(self, call: str) -> None:
        if self.state != "open":
            label, facts = self._control.explain()
            raise StepClosedError(
                f"{label}: {call} on a train step that was {self.state}",
                (*facts, f"the step was opened at {self._site}"),
                "step = policy.begin_step()",
            )

    def forward_backward(self, chunk: Any, loss_fn: Any, *, mbs: int | None = None) -> None:
        """Add the gradients of a chunk.

        Args:
            chunk: A batch (see the batch format in the guide).
            loss_fn: ``loss_fn(logits [b, S, V], batch, global_valid_seqs, global_valid_tokens) -> (loss, metrics)``.
            mbs: Micro-batch size in sequences; the whole chunk by default.

        Raises:
            StepClosedError: The step was committed or aborted.
            ModeError: Not in training mode.
            BatchError: The chunk is not a batch; the step stays open.
            NonFiniteError: NaN in logits or loss; the step is aborted.
        """
        self._check_open("forward_backward()")
        with self._ending_on_error():
            self._control.call("forward_backward", chunk, loss_fn, mbs, needs_owner=True)

    def commit(self) -> dict[str, Any]:
        """Make the optimizer step.

        Returns:
            As :meth:`Policy.train`: ``loss [1]``, ``grad_norm [1]``, ``metrics``.

        Raises:
            StepClosedError: The step was committed or aborted.
            ModeError: Not in training mode.
            NonFiniteError: NaN in the gradients; the step is aborted and the weights are untouched.
            OptimizerStepError: ``optimizer.step()`` failed half-way and was undone.
            FaultedError: It failed half-way and could not be undone.
        """
        self._check_open("commit()")
        with self._ending_on_error():
            result: dict[str, Any] = self._control.call("commit", needs_owner=True, then=_committed)
        self._state = "committed"
        self._control.end_step()
        return result

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """An error that ended the step on the worker ends it here too."""
        try:
            yield
        except BaseException as error:
            if self._control.health == "ok" and not self._control.ask("has_open_step"):
                self._abort_record(type(error).__name__)
            raise

    def _abort_record(self, reason: str) -> None:
        self._state = "aborted"
        self._control.end_step()
        self._control.record(events.StepAborted(reason=reason))

    def abort(self) -> None:
        """Discard the gradients; parameters and optimizer state stay as they are. Legal in every mode.

        Raises:
            StepClosedError: The step was committed or aborted.
        """
        self._check_open("abort()")
        reason = "aborted by the caller"
        self._control.call(
            "abort",
            gate="",
            needs_owner=True,
            then=lambda result: events.StepAborted(changed=changes(result.changed), reason=reason),
        )
        self._state = "aborted"
        self._control.end_step()

    def __enter__(self) -> Self:
        self._check_open("entering `with`")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        if self.state != "open":
            return
        if error is None:
            self.commit()
            return
        try:
            self.abort()
        except RLSessionError as failure:
            error.add_note(f"and while aborting the train step: {failure}")


def _committed(result: CallResult) -> events.Event:
    value = cast("dict[str, Any]", result.value)
    return events.StepCommitted(
        changed=changes(result.changed),
        loss=float(value["loss"].sum()),
        grad_norm=float(value["grad_norm"].max()),
    )
