"""Refit: a policy's weights go into an engine, in the order that bounds the peak of a shared device.

    1. the policy goes to REFIT: no optimizer state, no consumed gradients (where room is short, also under lazy release)
    2. room for the engine's weights, and they wake
    3. the push, in buckets sized from what is free
    4. the policy goes back where it was
    5. the KV cache wakes, and the engine is idle: the next scope of it finds it awake

Where the policy goes back to the device (it is in a scope of its own, or rests there), the engine goes back to what it was
before step 4 instead. A failure anywhere puts both sides back. An engine with devices of its own takes the same way, and nobody
has to make room for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import attrs
from torch import Tensor

from rl_session.audit import events
from rl_session.driver.room import needs_device
from rl_session.errors import ConfigError, DeviceMemoryError, NestingError, UnsupportedError, UsageError
from rl_session.lifecycle import Component, Mode, Tier, may_nest
from rl_session.workers.replies import TransitionRequest

if TYPE_CHECKING:
    from rl_session.driver.control import Control, Frame
    from rl_session.driver.engine_control import EngineControl

__all__ = ["buckets_of", "check_bucket", "refit", "refuse_refit_of_value"]

_BUCKET_CAP = 2**30
"""The most bytes in a bucket: beyond that, larger ones save nothing that can be measured, and delay the first."""


def check_bucket(bucket_nbytes: object) -> None:
    """Refuse a size of buckets that is none.

    Args:
        bucket_nbytes: What the user passed; None for the default.

    Raises:
        ConfigError: It is no positive integer.
    """
    if bucket_nbytes is None:
        return
    if isinstance(bucket_nbytes, bool) or not isinstance(bucket_nbytes, int) or bucket_nbytes < 1:
        raise ConfigError(
            f"refit(bucket_nbytes={bucket_nbytes!r}) is no number of bytes",
            ("a bucket has at least 1 byte, in whole bytes; None is what is free on the device, up to 1 GiB",),
            "refit(engine, bucket_nbytes=2**28)",
        )


def refuse_refit_of_value(control: Control) -> NoReturn:
    """A value model has no engine that samples from it.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"{control.label}: refit(): a value model has no weights that an engine serves",
        control.explain()[1],
        "policy.refit(engine)  # of the policy that the engine samples from",
    )


def buckets_of(control: Control, bucket_nbytes: int) -> Iterator[dict[str, Tensor]]:
    """The weights in buckets of at most ``bucket_nbytes``; a larger one is a bucket of its own.

    Raises:
        ModeError: When a bucket is asked for in a mode where weights are not read.
    """
    names: list[str] = []
    filled = 0
    for name, nbytes in control.ask("weight_sizes").items():
        if names and filled + nbytes > bucket_nbytes:
            yield _bucket(control, names)
            names, filled = [], 0
        names.append(name)
        filled += nbytes
    if names:
        yield _bucket(control, names)


def _bucket(control: Control, names: list[str]) -> dict[str, Tensor]:
    control.check_mode("iter_weights")
    bucket: dict[str, Tensor] = control.ask("weights", names)
    return bucket


def refit(
    control: Control, engine: EngineControl, call_site: str, *, bucket_nbytes: int | None = None, in_place: bool = False
) -> int:
    """Push the weights of a policy to an engine.

    Args:
        control: The policy.
        engine: The engine.
        call_site: Where the user asked.
        bucket_nbytes: The most bytes in a bucket; by default from what is free.
        in_place: Only push: the policy stays as it is, in a mode in which weights are read, and the engine is woken no further
            than its weights. For a legacy call, which says each of these steps itself.

    Returns:
        The version that the engine has now.

    Raises:
        ConfigError: ``bucket_nbytes`` is no positive integer.
        NestingError: The policy is in a scope in which no REFIT may be opened.
        UsageError: The engine would discard the weights again at once.
        EngineError, DeviceMemoryError: The engine failed, or there is no room; both sides are back where they were.
        RLSessionError: The policy could not be moved; likewise.
    """
    check_bucket(bucket_nbytes)
    token = control.acquire("refit()", call_site)
    try:
        engine_token = engine.acquire("refit()", call_site)
        try:
            with control.changing(), engine.lock:
                control.ready("refit()")
                engine.ready("refit()")
                return _Refit(control, engine, call_site, bucket_nbytes, in_place=in_place).run()
        finally:
            engine.let_go(engine_token)
    finally:
        control.let_go(token)


class _Refit:
    """One refit; the policy and the engine are ours."""

    def __init__(
        self, control: Control, engine: EngineControl, call_site: str, bucket_nbytes: int | None, *, in_place: bool
    ) -> None:
        self._control = control
        self._engine = engine
        self._call_site = call_site
        self._bucket_nbytes = bucket_nbytes
        self._reason = f"refit() of {control.label} at {call_site}"
        self._in_place = in_place
        self._was_asleep = not engine.awake
        self._frame: Frame | None = None
        apart = engine.device is not control.device
        row = control.frames[-1].row if control.frames else control.resting_mode
        self._keeps_engine = apart or in_place or not needs_device(row)
        """Whether the engine may stay awake where the policy goes back to."""

    def run(self) -> int:
        self._refuse_in_vain()
        self._engine.refitting = self._control
        try:
            is_current = self._is_current()
            self._refuse_without_room(pushes=not is_current)
            if is_current:
                self._publish(skipped=True)
            else:
                self._push()
            self._wake_the_rest()
        except BaseException as error:
            self._put_back(error)
            raise
        finally:
            self._engine.refitting = None
        return self._engine.version

    def _is_current(self) -> bool:
        """Whether the engine has the weights that a push would give it."""
        stamp = self._stamp()  # asked in any case: from the first time on, writes at rest are watched for
        pushed = self._engine.pushed
        if pushed is None or self._engine.weights != "pushed":
            return False
        return pushed[0]() is self._control and pushed[1] == stamp

    def _stamp(self) -> tuple[int, ...]:
        """What equals an earlier one only if the weights are the same bits on every rank."""
        return tuple(self._control.ask_all("weights_epoch"))

    def _refuse_in_vain(self) -> None:
        engine = self._engine
        if self._was_asleep and not self._keeps_engine and engine.sleep_level >= 2:
            raise UsageError(
                f"{engine.label}: {self._reason}: it would have to sleep at once, and sleep(level=2) discards the weights",
                (*self._control.explain()[1], *engine.explain()[1]),
                "policy.refit(engine)  # outside the scope, of a policy that rests offloaded; or sleep_level=1",
            )

    def _refuse_without_room(self, *, pushes: bool) -> None:
        """Refuse what can never fit, before anything moves; what fits once others leave is the arbiter's to judge.

        Raises:
            DeviceMemoryError: The engine alone is larger than the budget of its device, or its weights and the policy in REFIT.
        """
        engine, device = self._engine, self._engine.device
        budget = None if device is None else self._control.run.arbiter.budget_of(device)
        if budget is None:
            return
        if self._wakes_the_rest():
            self._check_budget(budget, engine.total_bytes(), f"all of {engine.label}")
        if pushes and device is self._control.device and self._needs_refit():
            self._check_nesting()
            weights = engine.total_bytes(engine.tags[:1])
            what = f"the weights of {engine.label} {weights} and {self._control.label} in refit mode"
            self._check_budget(budget, weights + self._refit_bytes(), what)

    def _refit_bytes(self) -> int:
        """Bytes of the policy on its device in REFIT, when everything that may leave has left."""
        control = self._control
        flags = attrs.evolve(control.flags, release="eager")
        held = sum(holding.nbytes for holding in control.seat.holdings())
        return held + control.seat.wish(TransitionRequest(mode=Mode.REFIT, flags=flags)).nbytes

    def _check_budget(self, budget: int, needed: int, what: str) -> None:
        if needed <= budget:
            return
        engine = self._engine
        raise DeviceMemoryError(
            f"{engine.label}: {self._reason}: no room on the device, whoever leaves",
            (f"needed: {needed} bytes for {what}; budget: {budget}", *engine.explain()[1]),
            "a smaller KV cache in the engine, or Session(device_budget=...), or an engine on a device of its own",
        )

    # -- the way in ----------------------------------------------------------------------------------------------

    def _check_nesting(self) -> None:
        frames = self._control.frames
        if frames and not may_nest(frames[-1].mode, Mode.REFIT):
            outer = frames[-1]
            raise NestingError(
                f"{self._control.label}: refit() at {self._call_site} inside {outer.describe()}",
                self._control.explain()[1],
                f"policy.refit(engine)  # after the block of {outer.spelling} has ended",
            )

    def _push(self) -> None:
        control, engine = self._control, self._engine
        if self._needs_refit():
            self._check_nesting()
            self._frame = control.enter(self, Mode.REFIT, "refit()", self._call_site, via="session")
        sizes = control.ask("weight_sizes")
        total, largest = sum(sizes.values()), max(sizes.values(), default=0)
        engine.wake(engine.tags[:1], self._reason, scope_id=self._scope_id, reserve=min(total, _BUCKET_CAP))
        stamp = self._stamp()
        engine.push(buckets_of(control, self._bucket_size(largest)), self._reason)
        engine.pushed = (weakref.ref(control), stamp)
        self._publish(nbytes=total)
        if not self._keeps_engine:
            self._put_engine_back()
        if self._frame is not None:
            frame, self._frame = self._frame, None
            control.leave(frame, None)

    def _needs_refit(self) -> bool:
        """Whether the policy has to go to REFIT for the push."""
        from_host = bool(getattr(self._engine.engine, "accepts_host_weights", False)) and self._reads_on_host()
        return not from_host and not self._in_place

    def _reads_on_host(self) -> bool:
        """Whether the weights can be read from their host copies as the policy stands: nothing has to move."""
        return self._control.row is Mode.OFFLOADED is self._control.mode and self._has_no_weight_there()

    def _has_no_weight_there(self) -> bool:
        placement = self._control.ask("placement")
        return all(placement[component] is not Tier.DEVICE for component in (Component.PARAMS, Component.BUFFERS))

    def _bucket_size(self, largest: int) -> int:
        """What is free on the device, between the largest weight and a cap: an engine stages a bucket beside its weights."""
        if self._bucket_nbytes is not None:
            return self._bucket_nbytes
        device = self._control.device
        free = self._control.run.arbiter.free(device)
        if free is None:
            free = device.free_bytes()
        return max(1, largest, _BUCKET_CAP if free is None else min(free, _BUCKET_CAP))

    @property
    def _scope_id(self) -> int | None:
        return self._frame.scope_id if self._frame is not None else None

    def _publish(self, nbytes: int = 0, *, skipped: bool = False) -> None:
        engine = self._engine
        published = events.WeightsPublished(
            version=engine.version, nbytes=nbytes, engine=engine.name, skipped=skipped or None
        )
        self._control.record(published, scope_id=self._scope_id)

    # -- the way out ---------------------------------------------------------------------------------------------

    def _wake_the_rest(self) -> None:
        """Leave it awake for the scope that follows; in a scope of its own, that scope has said what it needs."""
        if self._wakes_the_rest():
            self._engine.wake(self._engine.tags, self._reason)

    def _wakes_the_rest(self) -> bool:
        return self._keeps_engine and not self._in_place and not self._engine.frames

    def _put_engine_back(self) -> None:
        if self._was_asleep and not self._engine.frames:
            self._engine.put_to_sleep(f"after {self._reason}")

    def _put_back(self, error: BaseException) -> None:
        """The engine as it was, then the policy; what fails on the way is a note on ``error``."""
        if self._engine.fault is None:
            try:
                self._put_engine_back()
            except BaseException as failure:
                error.add_note(f"and while putting {self._engine.label} back to sleep: {failure}")
        if self._frame is not None:
            try:
                self._control.leave(self._frame, error)
            except BaseException as failure:
                error.add_note(f"and while leaving refit(): {failure}")
