"""One way to make anything fail at an exact point: a device, a policy in this process, a rank of one, a generation engine.

What fails, how and where are arguments; who has to be told is worked out here. Knows nothing of tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import attrs
import torch

from rl_session.engines import EngineHandle
from rl_session.errors import ConfigError
from rl_session.generation.fake import EngineFault, EngineOperation, FakeEngine
from rl_session.offload.device import EmulatedDevice, Fault, InjectedFault, Operation, Point
from rl_session.policy import TrainableModel
from rl_session.workers.fake import FakeGroup, RankDevice

__all__ = ["FaultKind", "Injection", "inject_fault"]

FaultKind = Literal["exception", "out of memory", "refusal", "hang", "kill"]
Target = TrainableModel | EmulatedDevice | EngineHandle | FakeEngine


@attrs.define(eq=False)
class Injection:
    """A fault that was ordered, as :func:`inject_fault` yields it."""

    _has_fired: Callable[[], bool]

    @property
    def fired(self) -> bool:
        """Whether it has happened."""
        return self._has_fired()


@contextmanager
def inject_fault(
    target: Target,
    operation: Operation | EngineOperation,
    *,
    k: int = 1,
    point: Point = "before",
    kind: FaultKind = "exception",
    rank: int | None = None,
    error: BaseException | None = None,
    seconds: float = 30.0,
) -> Iterator[Injection]:
    """A block in which something fails once.

    Args:
        target: A policy or value model, its emulated device, or an engine: a :class:`FakeEngine`, or the session's handle of one.
        operation: Of a device "copy_out", "copy_in", "allocate", "free" or "synchronize"; of an engine as in
            :meth:`FakeEngine.fail`.
        k: Which storage of a device's operation, or which call of an engine's; counted from 1 from now on.
        point: "before" it, "half" way through it, or "after" it, when all is done and still it fails.
        kind: "exception"; "out of memory"; "refusal" (an engine answers False); "hang": nothing more is heard of it; "kill": the
            process ends, as by ``kill -9``. Ranks of :class:`FakeWorkers` are in this process: their hang or end is played. In
            this process a hang lasts until the block ends, which then has to be left by another thread, or for ``seconds``.
        rank: Of a policy with workers: which one fails; the first by default.
        error: What "exception" raises instead of an :class:`InjectedFault`.
        seconds: The longest that a hang in this process lasts.

    Yields:
        Whether it has happened, as ``.fired``. What has not happened by the end of the block is taken back.

    Raises:
        ConfigError: There is no such operation, point or kind, or the target cannot fail so.
    """
    if kind not in get_args(FaultKind):
        listed = ", ".join(repr(each) for each in get_args(FaultKind))
        raise ConfigError(f"inject_fault(kind={kind!r})", (f"kinds: {listed}",), 'kind="out of memory"')
    order = _Order(operation, k, point, kind, error, seconds)
    injection, undo = _arm(target, order, rank)
    try:
        yield injection
    finally:
        undo()


@attrs.frozen
class _Order:
    operation: Any
    k: int
    point: Point
    kind: FaultKind
    error: BaseException | None
    seconds: float

    def raised(self) -> BaseException | None:
        """What a fault raises; None for the target's own."""
        text = f"injected: {self.operation} {self.k}, {self.point}: {self.kind}"
        return torch.OutOfMemoryError(text) if self.kind == "out of memory" else self.error

    def refuse(self, target: object, why: str, remedy: str) -> ConfigError:
        attempted = f"inject_fault({target!r}, {self.operation!r}, kind={self.kind!r})"
        return ConfigError(attempted, (why,), remedy)


_Armed = tuple[Injection, Callable[[], None]]


def _arm(target: Target, order: _Order, rank: int | None) -> _Armed:
    if isinstance(target, EngineHandle):
        target = target.engine
    if isinstance(target, FakeEngine):
        return _arm_engine(target, order)
    if isinstance(target, EmulatedDevice):
        return _arm_device(target, order)
    if not isinstance(target, TrainableModel):
        raise order.refuse(target, "it is no policy, emulated device or fake engine", "inject_fault(policy, ...)")
    group = target._control.group  # noqa: SLF001 (a test looks behind the handle)
    if not group.logs_moves:
        if not isinstance(target.device, EmulatedDevice):
            raise order.refuse(target, f"it is on {target.device!r}", "rs.attach(model, device=EmulatedDevice())")
        return _arm_device(target.device, order)
    which = 0 if rank is None else rank
    if not 0 <= which < group.num_ranks:
        raise order.refuse(target, f"rank={rank}; ranks: 0 to {group.num_ranks - 1}", "rank=0")
    return _arm_rank(group, which, order)


def _arm_device(device: EmulatedDevice, order: _Order) -> _Armed:
    if order.kind in ("kill", "refusal"):
        why = "it is in this process" if order.kind == "kill" else "only an engine answers"
        raise order.refuse(device, why, 'kind="exception", or a rank of FakeWorkers or RayWorkers')
    fault = device.fail(order.operation, order.k, order.point, order.raised())
    release = threading.Event()
    if order.kind == "hang":
        device.disarm(fault)
        fault = _Hanging(order.operation, order.k, order.point, InjectedFault("injected: a hang that has ended"))
        fault.release, fault.seconds = release, order.seconds
        device.arm(fault)

    def undo() -> None:
        release.set()
        device.disarm(fault)

    return Injection(lambda: fault.fired), undo


class _Hanging(Fault):
    """A fault in which the thread stays until it is released."""

    release: threading.Event
    seconds: float

    def happen(self) -> BaseException:
        """Wait; what is raised then rolls the move back."""
        self.release.wait(self.seconds)
        return self.error


def _arm_engine(engine: FakeEngine, order: _Order) -> _Armed:
    if order.kind in ("kill", "hang"):
        raise order.refuse(engine, "a fake engine is in this process", 'kind="exception" or "refusal"')
    error: Any = False if order.kind == "refusal" else order.raised()
    fault: EngineFault = engine.fail(order.operation, order.k, order.point, error)
    return Injection(lambda: fault.fired), lambda: engine.disarm(fault)


def _arm_rank(group: Any, rank: int, order: _Order) -> _Armed:
    if order.kind == "refusal":
        raise order.refuse(f"rank {rank}", "only an engine answers", 'kind="exception"')
    if isinstance(group, FakeGroup):
        if order.kind in ("hang", "kill"):
            fault = group.doom(rank, "late" if order.kind == "hang" else "lost", order.operation, order.k, order.point)
            return Injection(lambda: fault.fired), lambda: group.spare(rank)
        device: Any = group.servers[rank].device
        return _arm_device(device, order)
    far = RankDevice(group, rank)
    if order.kind == "hang":
        far.stall(order.operation, order.k, order.point)
    elif order.kind == "kill":
        far.die(order.operation, order.k, order.point)
    else:
        far.fail(order.operation, order.k, order.point, order.raised())
    return Injection(far.has_failed), far.heal_if_there
