"""Ranks as Ray actors: the one module that imports Ray.

Each rank is a :class:`RankServer` in an actor of its own, in a bundle of a placement group. A call is one message to each
and one reply from each. A rank that died is known by its connection; one past the deadline is killed, because nobody can
know its state any more. Knows nothing of what is called.
"""

from __future__ import annotations

import math
import os
import pickle
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_session.errors import ClosedError, ConfigError, UnsupportedError, WorkerError
from rl_session.lifecycle import Flags, Mode, Placement
from rl_session.workers.launch import RayWorkers
from rl_session.workers.plan import RankPlan
from rl_session.workers.rank import ASIDE, RankServer
from rl_session.workers.replies import Failed, Lost, Ok, Reply, Stamp, TransitionRequest

__all__ = ["RayGroup"]

_LOOK_SECONDS = 0.5
"""How often a slow call looks whether a rank has died meanwhile."""
_GRACE_SECONDS = 5.0
"""How long ranks may stay in a call after another one was lost: it may be a collective that cannot end any more."""
_WAKE_SECONDS = 1.0
"""How long ranks have to come back once they were told to break off."""
_START_SECONDS = 600.0
"""How long starting processes and building models may take, where a call may not take longer."""
_END_SECONDS = 10.0
"""How long ranks may take to let go of everything at the end, before they are killed."""
_SMALL = (str, int, float, bool, type(None), TransitionRequest, Flags, Mode, Placement, Stamp)
"""Arguments that are sent with the message; everything else is put into the object store once, for all ranks."""


class _RankActor(RankServer):
    """A rank with a second thread, which answers while the first is stuck in a collective."""

    def node_address(self) -> str:
        """The address at which the other ranks reach this one."""
        return str(ray.util.get_node_ip_address())

    def nothing(self) -> None:
        """What a message costs by itself; for benchmarks."""

    @ray.method(concurrency_group="control")
    def abort_collectives(self) -> bool:
        """Break off what the process group is stuck in."""
        return self.break_off()

    @ray.method(concurrency_group="control")
    def serve_aside(self, stamp: Stamp, method: str, packed: Any = (), has_kwargs: bool = False) -> Reply:
        """As ``serve``, at once also while the rank computes: for questions about the lease."""
        return self.serve(stamp, method, packed, has_kwargs)

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """The process."""
        return os.getpid()


_Actor: Any = ray.remote(concurrency_groups={"control": 1})(_RankActor)  # type: ignore[call-overload]  # Ray types it not


class RayGroup:
    """Ranks that are Ray actors.

    Args:
        workers: How many, and where.
        plan: What each is built from.
        timeout_seconds: How long a call may take.

    Raises:
        WorkerError: The cluster has no room for them.
        ConfigError: A placement group has too few bundles.
    """

    logs_moves = True
    is_owner = True
    """Whether the ranks are this process's to end and to start anew."""

    def __init__(self, workers: RayWorkers, plan: RankPlan, timeout_seconds: float) -> None:
        self.num_ranks = workers.num_workers
        self.timeout_seconds = timeout_seconds
        self.stamp = Stamp()
        self.actors: list[Any] = []
        self.is_joined = self.num_ranks > 1
        self.is_sharded = plan.parallelize is not None and self.num_ranks > 1
        self._workers = workers
        self._plan = plan
        self._lost: dict[int, str] = {}
        self._restarts = 0
        self._closed = False
        _connect()
        self._gpus = _gpus_of(workers)
        owned, self._bundles = _place(workers, self._gpus, plan.label, timeout_seconds)
        # At the end of the session, when the group is dropped, and when the interpreter ends: no actor stays, no bundle.
        self._end = weakref.finalize(self, _end, self.actors, owned)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reaches the same actors; it does not own them."""
        return _attached, (self.num_ranks, self.timeout_seconds, self.is_sharded, list(self.actors), dict(self._lost))

    def whoami(self) -> str:
        """The name of the actor this is, or the number of the process."""
        context = ray.get_runtime_context()
        actor = context.get_actor_id()
        return str(context.get_actor_name() or actor[:12]) if actor else str(os.getpid())

    # -- starting ------------------------------------------------------------------------------------------------

    def start(self) -> list[Reply]:
        """Start every actor and build its rank; one reply a rank."""
        self._lost = {}
        self.actors[:] = [self._start_actor(rank) for rank in range(self.num_ranks)]
        first = self.actors[0]
        patience = max(_START_SECONDS, self.timeout_seconds)
        meeting = first.listen.remote(first.node_address.remote(), patience)
        refs = {rank: actor.build.remote(self._plan, meeting) for rank, actor in enumerate(self.actors)}
        replies = self._gather(refs, "build", patience)
        return [replies[rank] for rank in range(self.num_ranks)]

    def _start_actor(self, rank: int) -> Any:
        # The bundle reserves the CPUs, so that actors of several policies fit into it.
        where = PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=rank)
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self._gpus, "scheduling_strategy": where}
        actor = _Actor.options(**options, max_restarts=0, max_task_retries=0)
        return actor.remote(rank, self.num_ranks, self._restarts, self._workers.affinity)

    def restart(self) -> list[Reply]:
        """End every rank that still lives and build all anew."""
        if self._closed:
            return [Failed(_after_close("restart"))] * self.num_ranks
        if not self.is_owner:
            return [Failed(_not_ours())] * self.num_ranks
        _kill(self.actors)
        self._restarts += 1
        return self.start()

    # -- calling -------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """Call ``method`` on every rank; one reply a rank, in rank order."""
        if self._closed:
            return [Failed(_after_close(method))] * self.num_ranks
        if not self._lost and not kwargs:
            replies = self._quick(method, args)
            if replies is not None:
                return replies
        found = self.call_on(range(self.num_ranks), method, *args, **kwargs)
        return [found[rank] for rank in range(self.num_ranks)]

    def _quick(self, method: str, args: tuple[Any, ...]) -> list[Reply] | None:
        """Small calls in one go; None where one is not small. A rank that is slow or gone is looked at by itself."""
        if not all(isinstance(arg, _SMALL) for arg in args):
            return None
        packed = pickle.dumps((self.stamp, method, args), pickle.HIGHEST_PROTOCOL)
        refs = [actor.serve_packed.remote(packed) for actor in self.actors]
        try:
            return list(map(pickle.loads, ray.get(refs, timeout=_LOOK_SECONDS)))
        except Exception:  # which one it is, is found out rank by rank
            replies = self._gather(dict(enumerate(refs)), method)
            return [replies[rank] for rank in range(self.num_ranks)]

    def call_on(self, ranks: Iterable[int], method: str, *args: Any, **kwargs: Any) -> dict[int, Reply]:
        """Call ``method`` on some ranks only."""
        asked = list(ranks)
        if self._closed:
            return {rank: Failed(_after_close(method)) for rank in asked}
        try:
            packed = self._pack(args, kwargs)
            living = [rank for rank in asked if rank not in self._lost]
            serving = {r: self.actors[r].serve_aside if method in ASIDE else self.actors[r].serve for r in living}
            refs = {rank: serve.remote(self.stamp, method, *packed) for rank, serve in serving.items()}
        except Exception as error:
            return dict.fromkeys(asked, Failed(_unsendable(method, error)))
        replies = self._gather(refs, method)
        return {rank: replies[rank] if rank in replies else Lost(self._lost[rank]) for rank in asked}

    def call_each(self, firsts: Sequence[Any], method: str, *args: Any, **kwargs: Any) -> list[Reply]:
        """As :meth:`call`, where each rank has a first argument of its own, which is sent to no other."""
        if self._closed:
            return [Failed(_after_close(method))] * self.num_ranks
        try:
            packed = self._pack(args, kwargs)
            refs = {
                rank: self.actors[rank].serve_own.remote(first, self.stamp, method, *packed)
                for rank, first in enumerate(firsts)
                if rank not in self._lost
            }
        except Exception as error:
            return [Failed(_unsendable(method, error))] * self.num_ranks
        replies = self._gather(refs, method)
        return [replies[rank] if rank in replies else Lost(self._lost[rank]) for rank in range(self.num_ranks)]

    def _pack(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arguments for the message; what is large is put into the object store once, and sent by reference."""
        if not kwargs and all(isinstance(arg, _SMALL) for arg in args):
            return (args,)
        return ray.put((args, dict(kwargs))), True

    def _gather(self, refs: Mapping[int, Any], method: str, seconds: float | None = None) -> dict[int, Reply]:
        """Wait for every rank until the deadline; kill those past it, and those that wait for one that cannot go on."""
        waiting = _Waiting(self, refs, method, self.timeout_seconds if seconds is None else seconds)
        while waiting.pending:
            waiting.look()
            if waiting.pending and waiting.is_over():
                for rank, cause in waiting.late().items():
                    waiting.replies[rank] = self._kill(rank, cause)
        return waiting.replies

    def _read(self, rank: int, ref: Any, method: str) -> Reply:
        try:
            found = ray.get(ref)
            reply: Reply = pickle.loads(found) if isinstance(found, bytes) else found  # noqa: S301 (a rank's own)
        except RayTaskError as error:  # outside of serve(), which never raises: arguments or the answer did not travel
            return Failed(_unsendable(method, error))
        except RayActorError as error:
            text = (str(error).splitlines() or ["it died"])[0]
            return self._note(rank, f"died in {method}(): {text}")
        except Exception as error:  # a lost object, a cluster that went away
            return self._kill(rank, f"could not be asked {method}(): {type(error).__name__}: {error}")
        return reply

    def _note(self, rank: int, cause: str) -> Lost:
        self._lost[rank] = cause
        return Lost(cause)

    def _kill(self, rank: int, cause: str) -> Lost:
        with suppress(Exception):
            ray.kill(self.actors[rank], no_restart=True)
        return self._note(rank, cause)

    # -- leaving -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let every rank end its records, then end the actors and give the bundles back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self.is_owner:
            return
        if ray.is_initialized():
            living = [actor for rank, actor in enumerate(self.actors) if rank not in self._lost]
            with suppress(Exception):
                refs = [actor.serve.remote(self.stamp, "close") for actor in living]
                ray.wait(refs, num_returns=len(refs), timeout=_END_SECONDS) if refs else None
        self._end()


class _Waiting:
    """Waiting for the replies of ranks to one call.

    Ranks that fail or die in the middle of a forward leave the others waiting in a collective of the model, which nothing
    ends by itself. From then on those have as long as the call has taken so far to come out of it (ranks have about as much
    to do), and a little more; then they are woken where the backend can, and ended where it cannot.

    Args:
        group: The ranks.
        refs: What is waited for, by rank.
        method: The call.
        seconds: How long it may take.
    """

    def __init__(self, group: RayGroup, refs: Mapping[int, Any], method: str, seconds: float) -> None:
        self.pending = {ref: rank for rank, ref in refs.items()}
        self.replies: dict[int, Reply] = {}
        self._group = group
        self._method = method
        self._seconds = seconds
        self._start = time.monotonic()
        self._deadline = self._start + seconds
        self._cause = ""
        """Which rank cannot go on, and why; the others are then in a hurry."""
        self._failed: Mapping[int, str] = {}
        """Ranks that have failed and wait to say so to the others, with their errors."""
        self._is_woken = False
        """Whether those who wait were told to break off."""
        self._question: Any = None

    def look(self) -> None:
        """Take the replies that are there, and hear what became of other ranks; waits for a moment."""
        left = max(0.0, min(_LOOK_SECONDS, self._deadline - time.monotonic()))
        ready, _ = ray.wait(list(self.pending), num_returns=len(self.pending), timeout=left)
        for ref in ready:
            rank = self.pending.pop(ref)
            self.replies[rank] = self._group._read(rank, ref, self._method)  # noqa: SLF001 (a part of the group)
            if isinstance(self.replies[rank], Lost) and not self._is_woken:
                self._hurry(f"rank {rank} was lost", _GRACE_SECONDS)
                self._wake()
        if self.pending and not self._is_woken:
            self._ask()

    def _ask(self) -> None:
        """Ask the first rank, aside, whether one has failed and cannot tell the others; heard at a later look."""
        group = self._group
        if self._question is None:
            if group.is_joined and 0 not in group._lost:  # noqa: SLF001 (a part of the group)
                self._question = group.actors[0].serve_aside.remote(group.stamp, "trouble")
        elif ray.wait([self._question], timeout=0)[0]:
            question, self._question = self._question, None
            with suppress(RayActorError):  # a rank that died is heard of by its own reply
                self._hear(ray.get(question))

    def _hear(self, told: Reply) -> None:
        was, self._failed = self._failed, cast("Mapping[int, str]", told.value) if isinstance(told, Ok) else {}
        spent = time.monotonic() - self._start
        if self._failed and not was:
            rank, text = next(iter(self._failed.items()))
            self._hurry(f"rank {rank} failed ({text})", _GRACE_SECONDS + spent)
        elif was and not self._failed:  # the others have heard, and all of them are on their way back
            self._cause, self._deadline = "", self._start + self._seconds

    def _hurry(self, cause: str, patience: float) -> None:
        """Others wait for a rank that cannot go on: from now on they have ``patience`` seconds."""
        self._cause = cause
        self._deadline = min(self._deadline, time.monotonic() + patience)

    def _wake(self) -> None:
        """Tell those that wait to break off; NCCL does, gloo notices by the closed connection of a rank that ended."""
        self._is_woken = True
        for rank in self.pending.values():
            with suppress(Exception):
                self._group.actors[rank].abort_collectives.remote()

    def is_over(self) -> bool:
        """Whether those who still wait are to be ended now; they are woken before, where the backend can."""
        if time.monotonic() < self._deadline:
            return False
        if self._cause and not self._is_woken:
            self._wake()
            self._deadline = time.monotonic() + _WAKE_SECONDS
            return False
        return True

    def late(self) -> dict[int, str]:
        """Ranks to kill, and why; one that has failed says so by itself once the others are gone, or is the next."""
        long = f"was still in {self._method}() long after {self._cause}, and was killed"
        slow = f"did not answer {self._method}() within {self._seconds:g} s, and was killed"
        stuck = {ref: rank for ref, rank in self.pending.items() if rank not in self._failed} or dict(self.pending)
        self._deadline, self._failed = time.monotonic() + _END_SECONDS, {}
        for ref in stuck:
            del self.pending[ref]
        return dict.fromkeys(stuck.values(), long if self._cause else slow)


def _attached(
    num_ranks: int, timeout_seconds: float, is_sharded: bool, actors: list[Any], lost: dict[int, str]
) -> RayGroup:
    """A group of actors that another process started."""
    group = RayGroup.__new__(RayGroup)
    group.num_ranks, group.timeout_seconds, group.is_sharded = num_ranks, timeout_seconds, is_sharded
    group.actors, group.stamp, group.is_owner, group.is_joined = actors, Stamp(), False, num_ranks > 1
    group._lost, group._closed = lost, False  # noqa: SLF001 (made here)
    return group


def _not_ours() -> UnsupportedError:
    return UnsupportedError(
        "starting workers anew from another process than the one that started them",
        (),
        "policy.recover()  # in the process of the session; then pickle the policy again",
    )


def _after_close(method: str) -> ClosedError:
    return ClosedError(f"{method}() of a worker group after close()")


def _unsendable(method: str, error: BaseException) -> UnsupportedError:
    text = f"{type(error).__name__}: {error}"
    return UnsupportedError(
        f"{method}(): its arguments or its answer cannot be sent to another process",
        ("a batch, a loss and a hook must be picklable; Ray uses cloudpickle",),
        "a plain function or a lambda over picklable values",
        text[:2000],
    )


def _connect() -> None:
    """Use the cluster there is; start one on this machine only where nobody named any."""
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)


def _gpus_of(workers: RayWorkers) -> float:
    if workers.gpus_per_worker is not None:
        return workers.gpus_per_worker
    return 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0


def _place(workers: RayWorkers, gpus: float, label: str, timeout_seconds: float) -> tuple[Any, Any]:
    """The placement group, twice: as one to remove at the end (None where it is another's), and as one to use."""
    asked = workers.placement
    if isinstance(asked, RayWorkers):
        if asked.placement_group is None:
            raise ConfigError(
                f"{label}: RayWorkers(placement=...) of workers that are not started",
                (),
                "make the other policy first: its bundles are shared",
            )
        workers.placement_group = asked.placement_group
        return None, asked.placement_group
    if not isinstance(asked, str):
        if asked.bundle_count < workers.num_workers:
            raise ConfigError(
                f"{label}: {workers.num_workers} workers in a placement group of {asked.bundle_count} bundles",
                ("each worker has a bundle of its own",),
                f"placement_group([...] * {workers.num_workers})",
            )
        workers.placement_group = asked
        return None, asked
    bundle = {"CPU": 1.0, **({"GPU": float(math.ceil(gpus))} if gpus else {}), **workers.resources}
    made = placement_group([bundle] * workers.num_workers, strategy=asked)
    if not made.wait(timeout_seconds=timeout_seconds):
        remove_placement_group(made)
        raise WorkerError(
            f"{label}: no room in the cluster for {workers.num_workers} workers",
            (
                f"a worker needs: {bundle}",
                f"the cluster has: {_told(ray.cluster_resources())}",
                f"free now: {_told(ray.available_resources())}",
                f"waited: {timeout_seconds:g} s",
            ),
            f"RayWorkers({workers.num_workers}, resources={{'CPU': 0.5}}), fewer workers, or a larger cluster",
        )
    workers.placement_group = made
    return made, made


def _told(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU"))


def _kill(actors: Sequence[Any]) -> None:
    """Kill actors and wait until they are gone."""
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor, no_restart=True)
    for actor in actors:
        with suppress(Exception):  # a dead actor says so; one that answers is still ending
            ray.get(actor.pid.remote(), timeout=_END_SECONDS)


def _end(actors: list[Any], owned: Any) -> None:
    """End every actor and give the bundles back, if they are ours."""
    if not ray.is_initialized():  # with the cluster everything went
        return
    _kill(actors)
    actors.clear()
    if owned is not None:
        with suppress(Exception):
            remove_placement_group(owned)
