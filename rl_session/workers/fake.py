"""Ranks in this process that fail as they are told: real workers on real emulated devices, with the way to them played.

For tests, of users too (:mod:`rl_session.testing`). Knows nothing of who calls.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs
import torch

from rl_session.errors import ClosedError, ConfigError, DeviceMemoryError, TransitionError
from rl_session.offload.device import EmulatedDevice, Fault, InjectedFault, Operation, Point
from rl_session.workers.plan import Parallelize, RankPlan
from rl_session.workers.rank import RankServer
from rl_session.workers.replies import Failed, Lost, Ok, Reply, Stamp

__all__ = ["FakeGroup", "FakeWorkers", "RankDevice"]

Outcome = Literal["fail", "oom", "late", "lost"]


@attrs.define(eq=False)
class FakeWorkers:
    """Ranks in this process, that fail as they are told: real workers and real emulated devices, without a cluster.

    What is real is everything a rank does. What is not is the way to it: a rank that is "late" or "lost" answers nothing, at
    once, and no process group connects the ranks.

    Attributes:
        num_workers: How many ranks.
        parallelize: None only: each rank has a copy of its own.
        group: The group, once a policy was made with it.
    """

    num_workers: int = 2
    parallelize: Parallelize = None
    group: FakeGroup | None = attrs.field(default=None, init=False)

    def site(self) -> object:
        """Nobody shares the devices."""
        return self

    def start(self, plan: RankPlan, timeout_seconds: float) -> tuple[FakeGroup, list[Reply]]:
        """Build every rank."""
        self.group = FakeGroup(self.num_workers, plan, timeout_seconds)
        return self.group, self.group.start()


_groups: weakref.WeakValueDictionary[int, FakeGroup] = weakref.WeakValueDictionary()


def _same_ranks(key: int) -> FakeGroup:
    """Another handle on the ranks of a group, with its own lease."""
    found = _groups[key]
    group = FakeGroup.__new__(FakeGroup)
    group.__dict__.update(found.__dict__)  # the same ranks, scripts and calls
    group.stamp, group.is_owner = Stamp(), False
    return group


@attrs.define
class _Script:
    outcome: Outcome
    point: Point
    operation: Operation


class FakeGroup:
    """Ranks in this process; see :class:`FakeWorkers`.

    Args:
        num_ranks: How many.
        plan: What each is built from.
        timeout_seconds: For messages only: nothing is waited for.
    """

    logs_moves = True
    is_joined = False
    is_sharded = False
    is_owner = True

    def __init__(self, num_ranks: int, plan: RankPlan, timeout_seconds: float = 600.0) -> None:
        self.num_ranks = num_ranks
        self.timeout_seconds = timeout_seconds
        self.stamp = Stamp()
        self.servers: list[RankServer] = []
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        """Every call that was made: the method, and which ranks were asked."""
        self._plan = plan
        self._restarts = 0
        self._lost: dict[int, str] = {}
        self._scripts: dict[tuple[int, str], _Script] = {}
        self._doomed: dict[int, tuple[Fault, Outcome]] = {}
        self._closed = False
        _groups[id(self)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled in this process, it is another handle on the same ranks."""
        return _same_ranks, (id(self),)

    def whoami(self) -> str:
        """As another process would be called."""
        return str(os.getpid())

    def start(self) -> list[Reply]:
        """Build every rank."""
        self._lost = {}
        self.servers = [RankServer(rank, self.num_ranks, self._restarts) for rank in range(self.num_ranks)]
        return [server.build(self._plan) for server in self.servers]

    def script(
        self,
        rank: int,
        method: str,
        outcome: Outcome,
        point: Point = "before",
        operation: Operation = "copy_in",
    ) -> None:
        """Say what becomes of the next call of ``method`` on a rank.

        Args:
            rank: Which.
            method: The worker's method, such as "transition", "undo" or "train".
            outcome: "fail" (an error), "oom" (out of memory), "late" (no answer within the deadline) or "lost" (it died).
            point: "before" the call does anything, "half" way through the first storage of ``operation``, or "after" it: for
                "late" and "lost" after the whole call.
            operation: What of the device fails.

        Raises:
            ConfigError: There is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"script(rank={rank})", (f"ranks: 0 to {self.num_ranks - 1}",), "script(0, ...)")
        self._scripts[rank, method] = _Script(outcome, point, operation)

    def doom(self, rank: int, outcome: Literal["late", "lost"], operation: Operation, k: int, point: Point) -> Fault:
        """A rank will be gone from an exact point of a move on, in whatever call that is.

        Args:
            rank: Which.
            outcome: "late" (no answer within the deadline) or "lost" (it died).
            operation: What of the device it is at.
            k: Which storage, counted from 1 from now on.
            point: "before" the storage, "half" way through it, or "after" it.

        Returns:
            The fault; ``fired`` says whether it has happened.
        """
        device = self.servers[rank].device
        assert isinstance(device, EmulatedDevice)
        fault = device.fail(operation, k, point, InjectedFault(f"injected: {outcome} {point}"))
        self._doomed[rank] = fault, outcome
        return fault

    def spare(self, rank: int) -> None:
        """Take back what :meth:`doom` ordered, if it has not happened."""
        doomed = self._doomed.pop(rank, None)
        device = self.servers[rank].device
        if doomed is not None and isinstance(device, EmulatedDevice):
            device.disarm(doomed[0])

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """Call ``method`` on every rank; one reply a rank, in rank order."""
        found = self.call_on(range(self.num_ranks), method, *args, **kwargs)
        return [found[rank] for rank in range(self.num_ranks)]

    def call_on(self, ranks: Iterable[int], method: str, *args: Any, **kwargs: Any) -> dict[int, Reply]:
        """Call ``method`` on some ranks only."""
        asked = tuple(ranks)
        if method == "register_extra":  # as on the way to another process: ranks must not share tensors
            return {rank: self._one(rank, method, copy.deepcopy(args), kwargs) for rank in asked}
        if self._closed:
            return {rank: Failed(ClosedError(f"{method}() of a worker group after close()")) for rank in asked}
        self.calls.append((method, asked))
        return {rank: self._one(rank, method, args, kwargs) for rank in asked}

    def call_each(self, firsts: Sequence[Any], method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """As :meth:`call`, where each rank has a first argument of its own."""
        return [self.call_on([rank], method, first, *args, **kwargs)[rank] for rank, first in enumerate(firsts)]

    def _one(self, rank: int, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Reply:
        if rank in self._lost:
            return Lost(self._lost[rank])
        if self.servers[rank].is_closed:
            return Lost("the process that made the policy has closed it")
        script = self._scripts.pop((rank, method), None)
        if script is None:
            reply = self.servers[rank].serve(self.stamp, method, (args, kwargs), has_kwargs=True)
            doomed = self._doomed.get(rank)
            return self._gone(rank, method, doomed[1]) if doomed is not None and doomed[0].fired else reply
        is_gone = script.outcome in ("late", "lost")
        if script.point != "before":
            reply = self._interrupted(rank, script, method, args, kwargs)
        elif not is_gone:
            reply = Failed(_told(script, method), "", self.servers[rank].placement())
        if not is_gone:
            return reply
        return self._gone(rank, method, script.outcome)

    def _gone(self, rank: int, method: str, outcome: Outcome) -> Lost:
        self._doomed.pop(rank, None)
        late = f"did not answer {method}() within {self.timeout_seconds:g} s, and was killed"
        self._lost[rank] = late if outcome == "late" else f"died in {method}()"
        return Lost(self._lost[rank])

    def _interrupted(self, rank: int, script: _Script, method: str, args: Any, kwargs: Any) -> Reply:
        """Make the call with a fault in the middle of it; or all of it, where the rank is gone only afterwards."""
        server = self.servers[rank]
        if script.outcome in ("fail", "oom") or script.point == "half":
            device = server.device
            assert isinstance(device, EmulatedDevice)
            device.fail(script.operation, 1, script.point, _error_of(script))
            reply = server.serve(self.stamp, method, (args, kwargs), has_kwargs=True)
            device.heal()
            return reply
        return server.serve(self.stamp, method, (args, kwargs), has_kwargs=True)

    def restart(self) -> list[Reply]:
        """Build every rank anew."""
        if self._closed:
            return [Failed(ClosedError("restart() of a worker group after close()"))] * self.num_ranks
        for server in self.servers:
            server.close()
        self._restarts += 1
        return self.start()

    def close(self) -> None:
        """Let every rank end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self.is_owner:
            return
        for server in self.servers:
            server.close()


def _told(script: _Script, method: str) -> Exception:
    """What a rank says that failed before anything was done; a rank's engine puts it so."""
    kind = DeviceMemoryError if script.outcome == "oom" else TransitionError
    return kind(f"{method}()", ("injected: nothing was done",), "the same call again", str(_error_of(script)))


def _error_of(script: _Script) -> Exception:
    text = f"injected: {script.outcome} {script.point}"
    return torch.OutOfMemoryError(text) if script.outcome == "oom" else InjectedFault(text)


class RankDevice:
    """The emulated device of one rank, wherever that rank lives: its counters, and the faults it can be told to have.

    Args:
        group: The group of the rank.
        rank: Which rank.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._rank = rank

    def _ask(self, name: str, *args: Any) -> Any:
        reply: Reply = self._group.call_on([self._rank], "emulated", name, *args)[self._rank]
        if isinstance(reply, Failed):
            raise reply.error
        assert isinstance(reply, Ok), reply
        return reply.value

    def __getattr__(self, name: str) -> Any:
        """A counter of the device: ``bytes_in``, ``bytes_out``, ``resident_bytes``, ``peak``, ``num_copies``, ...

        ``checksums`` are of the rank's storages by name, wherever their bytes are; gradients are not among them.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return self._ask(name)

    def fail(self, operation: Operation, k: int = 1, point: Point = "before", error: Any = None) -> None:
        """As :meth:`EmulatedDevice.fail`."""
        self._ask("fail", operation, k, point, error)

    def die(self, operation: Operation, k: int = 1, point: Point = "before") -> None:
        """The process of the rank ends there, as by ``kill -9``. Never use it on ranks of this process."""
        self._ask("die", operation, k, point)

    def stall(self, operation: Operation, k: int = 1, point: Point = "before") -> None:
        """The rank never comes back from there."""
        self._ask("stall", operation, k, point)

    def set_capacity(self, capacity: int | None) -> None:
        """Change how many bytes the device has."""
        self._ask("set_capacity", capacity)

    def heal(self) -> None:
        """As :meth:`EmulatedDevice.heal`."""
        self._ask("heal")

    def has_failed(self) -> bool:
        """Whether every fault that was ordered has happened; a rank that is gone has had its own."""
        reply: Reply = self._group.call_on([self._rank], "emulated", "num_armed")[self._rank]
        return not isinstance(reply, Ok) or reply.value == 0

    def heal_if_there(self) -> None:
        """As :meth:`heal`, or nothing where the rank is gone."""
        self._group.call_on([self._rank], "emulated", "heal")

    def delay(self, on: bool = True) -> None:
        """As :meth:`EmulatedDevice.delay`."""
        self._ask("delay", on)

    def poison(self, on: bool = True) -> None:
        """As :meth:`EmulatedDevice.poison`."""
        self._ask("poison", on)
