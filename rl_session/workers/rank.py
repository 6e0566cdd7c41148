"""What runs inside one rank of several: a worker, the lease, and the rank's own records.

It is a plain object, so that a process of any kind can serve it: a Ray actor, or a test in one process. Whatever happens
inside, the answer is a value that survives the way to the driver. Knows nothing of how calls arrive.
"""

from __future__ import annotations

import copy
import datetime as dt
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch lists it nowhere
from torch.distributed.device_mesh import init_device_mesh

from rl_session.audit import AuditLog, events, sibling_path
from rl_session.audit.naming import find_parts, rank_source
from rl_session.errors import FaultedError, RLSessionError
from rl_session.lifecycle import Placement
from rl_session.offload.device import Device, EmulatedDevice, as_device
from rl_session.offload.host_pool import HostPool
from rl_session.workers.checks import check_spec, device_of
from rl_session.workers.faults import emulate
from rl_session.workers.lease import Lease
from rl_session.workers.plan import AuditTarget, RankPlan, build_spec
from rl_session.workers.ranks import Ranks
from rl_session.workers.replies import (
    CallResult,
    Description,
    Failed,
    Ok,
    Reply,
    Room,
    Stamp,
    TransitionReply,
    TransitionRequest,
)
from rl_session.workers.worker import Worker

__all__ = ["ASIDE", "RankServer", "Rendezvous"]


ASIDE = frozenset({"acquire", "release", "note_scope", "connect", "view", "trouble"})
"""Questions about the lease, and whether a rank has failed: answered also while the rank computes."""

_OPEN_TO_ALL = ASIDE | frozenset(
    {"describe", "nothing", "emulated", "close", "records", "export_state"}
    | {"placement", "sizes", "memory", "component_names", "has_open_step"}
)
"""What any handle may ask at any time; ``export_state`` when the rank that grants the lease is gone with it."""

_TROUBLE = "rl_session/trouble"
"""Where ranks say in the store that they have failed and wait for the others: how many, and after a slash each one's error."""

_PROTOCOL = pickle.HIGHEST_PROTOCOL

_CHANGES_NOTHING = ASIDE | {"transition", "nothing", "describe", "records"}
"""After these the last look at the model still holds."""


@attrs.define(slots=False)
class Rendezvous:
    """Where the ranks of one group meet.

    Attributes:
        host: The address of the first rank.
        port: The port its store listens on.
        timeout_seconds: How long a rank waits for the others.
    """

    host: str
    port: int
    timeout_seconds: float


@attrs.define(slots=False)
class WholeState:
    """All that a rank would be lost with.

    Attributes:
        files: A checkpoint: relative path to content.
        reference: The copied reference, by tensor; None without one.
        last_checkpoint: What was saved or loaded last.
    """

    files: dict[str, bytes]
    reference: dict[str, bytes] | None
    last_checkpoint: str | None


class RankServer:
    """One rank.

    Args:
        rank: Its number, from 0.
        num_ranks: How many there are.
        restarts: How often the group was started anew.
        affinity: ``affinity(rank)``, called before anything is allocated: pins the process to the cores near its GPU.
    """

    def __init__(
        self, rank: int, num_ranks: int, restarts: int = 0, affinity: Callable[[int], None] | None = None
    ) -> None:
        if affinity is not None:
            affinity(rank)
        self.rank = rank
        self.num_ranks = num_ranks
        self._restarts = restarts
        self._store: TCPStore | None = None
        self._side_door: Any = None
        """The store again, through a connection that no collective ever waits on."""
        self._worker: Worker | None = None
        self._lease = Lease("policy")
        self._log = AuditLog(None)
        self._policy = ""
        self._is_replica = True
        self.is_closed = False
        self._asked: TransitionRequest
        self._own: dict[str, Callable[..., Any]] = {
            "transition": self._transition,
            "undo": self._undo,
            "weights": self._weights,
            "save_checkpoint": self._save_checkpoint,
            "describe": self._describe,
            "emulated": self._emulated,
            "export_state": self._export_state,
            "restore_state": self._restore_state,
            "close": self.close,
            "records": self._records,
            "weights_epoch": self._weights_epoch,
            "nothing": lambda: None,
            "acquire": self._lease.acquire,
            "release": self._lease.release,
            "note_scope": self._lease.note_scope,
            "connect": self._lease.connect,
            "view": self._view,
            "trouble": self._trouble,
        }
        self._open_to_all = _OPEN_TO_ALL

    # -- starting ------------------------------------------------------------------------------------------------

    def listen(self, host: str, timeout_seconds: float) -> Rendezvous:
        """Open the store that the ranks meet at; on the first rank only, before any rank is built."""
        patience = dt.timedelta(seconds=timeout_seconds)
        self._store = TCPStore(host, 0, self.num_ranks, is_master=True, wait_for_workers=False, timeout=patience)
        return Rendezvous(host, self._store.port, timeout_seconds)

    def build(self, plan: RankPlan, meeting: Rendezvous | None = None) -> Reply:
        """Run the factories and make the worker; nothing is moved.

        Args:
            plan: What to build.
            meeting: Where the ranks meet; None where there is no process group (all ranks in one process).

        Returns:
            A :class:`Description`, or what failed.
        """
        try:
            return Ok(self._build(plan, meeting))
        except Exception as error:
            return self._failed(error)

    def _build(self, plan: RankPlan, meeting: Rendezvous | None) -> Description:
        if meeting is not None:
            self._join(meeting)
        label = plan.label if self.num_ranks == 1 else f"{plan.label} (rank {self.rank})"
        spec = build_spec(plan, lambda model: self._shaped(model, plan))
        spec.label = label
        check_spec(spec, plan.config, label)
        device = _own_device(plan.device, device_of(spec.model, label))
        pool = HostPool(plan.config.host_budget, self._warn)
        self._lease._label = label  # noqa: SLF001 (the one lease of this rank)
        self._log, self._policy = (
            _open_log(plan.audit, self.rank, self._restarts),
            plan.audit.policy if plan.audit else "",
        )
        # Copies on ranks that a process group joins are one policy: without this each would train for itself.
        ranks = Ranks() if plan.parallelize is None and dist.is_initialized() and self.num_ranks > 1 else None
        self._worker = Worker(spec, device, pool, lambda: (label, self._facts()), ranks)
        self._worker.set_flags(plan.flags)
        self._worker.is_private = True
        self._worker.ranks.on_failure = self._say
        self._is_replica = not self._worker.sources.shards
        found = self._worker.start()
        found.device_capacity, found.device_free = device.capacity, device.free_bytes()
        found.device_bytes = device.held_bytes
        return found

    def _join(self, meeting: Rendezvous) -> None:
        patience = dt.timedelta(seconds=meeting.timeout_seconds)
        if self._store is None:
            self._store = TCPStore(meeting.host, meeting.port, self.num_ranks, is_master=False, timeout=patience)
        self._side_door = self._store.clone()  # type: ignore[attr-defined]  # torch lists it nowhere
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.num_ranks, timeout=patience)

    def _shaped(self, model: nn.Module, plan: RankPlan) -> nn.Module:
        """The module as one of several ranks; a single one has nothing to spread, unless the user says how."""
        if plan.parallelize is None or (self.num_ranks == 1 and not callable(plan.parallelize)):
            return model
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(kind, (self.num_ranks,))
        shaped: nn.Module = import_module("rl_session.workers.parallel").parallelize(model, plan.parallelize, mesh)
        return shaped

    def _describe(self) -> Description:
        """The rank as it is now."""
        worker = self._of_worker()
        return Description(mode=worker.mode, placement=worker.placement(), nbytes=worker.sizes(), notices=())

    def _of_worker(self) -> Worker:
        if self._worker is None:
            raise FaultedError(f"rank {self.rank} was not built", (), "policy.recover()")
        return self._worker

    def _facts(self) -> tuple[str, ...]:
        return () if self._worker is None else (f"mode of the rank: {self._worker.mode}",)

    # -- serving -------------------------------------------------------------------------------------------------

    def serve(self, stamp: Stamp, method: str, packed: Any = (), has_kwargs: bool = False) -> Reply:
        """Make one call; never raises.

        Args:
            stamp: Who calls, with which lease.
            method: A method of :class:`Worker`, or one of the rank's own.
            packed: Its positional arguments; with ``has_kwargs``, these and the keyword arguments.
            has_kwargs: Whether ``packed`` is a pair.
        """
        args, kwargs = packed if has_kwargs else (packed, {})
        try:
            if method not in self._open_to_all:
                mode = None if self._worker is None else self._worker.mode
                self._lease.check(stamp, mode, method)
            if method not in _CHANGES_NOTHING and self._worker is not None:
                self._worker.touched()
            serve = self._own.get(method) or getattr(self._of_worker(), method)
            with self._ranks_of(stamp, method):
                value = serve(*args, **kwargs)
            if isinstance(value, CallResult):
                value.device_bytes = self._of_worker().engine.device.held_bytes
            return Ok(value)
        except Exception as error:
            return self._failed(error)

    def _ranks_of(self, stamp: Stamp, method: str) -> AbstractContextManager[None]:
        """A rank with a whole copy answers a handle that only reads by itself: no other rank was asked."""
        if stamp.mode is None or method in self._open_to_all:
            return nullcontext()
        return self._of_worker().ranks.alone()

    def serve_own(self, first: Any, stamp: Stamp, method: str, packed: Any = (), has_kwargs: bool = False) -> Reply:
        """As :meth:`serve`, where the first argument is this rank's own: its share of a batch."""
        args, kwargs = packed if has_kwargs else (packed, {})
        return self.serve(stamp, method, ((first, *args), kwargs), has_kwargs=True)

    def serve_packed(self, packed: bytes) -> bytes:
        """As :meth:`serve`, in one string of bytes each way: ten times cheaper to send than objects are.

        An answer that cannot be pickled is one that says so.
        """
        stamp, method, args = pickle.loads(packed)  # noqa: S301 (from the driver of this run)
        reply = self.serve(stamp, method, args)
        try:
            return pickle.dumps(reply, _PROTOCOL)
        except Exception as error:
            return pickle.dumps(self._failed(error), _PROTOCOL)

    def _failed(self, error: Exception) -> Failed:
        text = "".join(traceback.format_exception(error))
        return Failed(portable(error), f"traceback on rank {self.rank}:\n{text}", self.placement())

    @property
    def device(self) -> Device:
        """The device of this rank."""
        return self._of_worker().engine.device

    def placement(self) -> Placement | None:
        """Where each component is, by scan; None where nobody can say."""
        try:
            return None if self._worker is None else self._worker.placement()
        except Exception:  # a look that fails must not hide what failed before it
            return None

    def _view(self) -> dict[str, Any]:
        return {**self._lease.view(), "mode": None if self._worker is None else self._worker.mode}

    def break_off(self) -> bool:
        """Break off what the process group is stuck in, from another thread; whether the backend could be asked to.

        NCCL wakes up; gloo (torch 2.13) takes note and stays where it is until its peer's connection closes.
        """
        try:
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001 (torch has no public door to it)
        except Exception:
            return False
        return True

    def _say(self, error: BaseException | None) -> None:
        """Say that this rank has failed and waits for the others, or that they know."""
        if self._side_door is None:
            return
        key = f"{_TROUBLE}/{self.rank}"
        with suppress(Exception):  # what is said for help must not hide what it is about
            if error is None:
                self._side_door.add(_TROUBLE, -1)
                self._side_door.delete_key(key)
            else:
                self._side_door.set(key, (f"{type(error).__name__}: {error}".splitlines() or [""])[0])
                self._side_door.add(_TROUBLE, 1)

    def _trouble(self) -> dict[int, str]:
        """The ranks that have failed and wait for others, with their errors: of the first rank one question tells of all."""
        if self._side_door is None or self._side_door.add(_TROUBLE, 0) < 1:
            return {}
        keys = {rank: f"{_TROUBLE}/{rank}" for rank in range(self.num_ranks)}
        return {rank: self._side_door.get(key).decode() for rank, key in keys.items() if self._side_door.check([key])}

    # -- calls of its own ----------------------------------------------------------------------------------------

    def _transition(self, request: TransitionRequest) -> TransitionReply | Room:
        worker = self._of_worker()
        try:
            reply = worker.transition(request)
        except Exception as error:
            self._report(request, "failed", self.placement(), error)
            raise
        if isinstance(reply, Room):
            return reply
        self._asked = request
        self._tell(request, reply)
        self._report(request, "ok", reply.placement, None)
        return reply

    def _undo(self) -> TransitionReply:
        """Take the last transition back; its records keep the number of that transition."""
        request = self._asked
        try:
            reply = self._of_worker().undo()
        except Exception as error:
            self._report(request, "failed", self.placement(), error)
            raise
        self._tell(request, reply)
        self._report(request, "undone", reply.placement, None)
        return reply

    def _tell(self, request: TransitionRequest, reply: TransitionReply) -> None:
        for moved, seconds in zip(reply.moved, reply.seconds, strict=True):
            self._write(
                request,
                events.ComponentMoved(
                    component=str(moved.component),
                    from_tier=moved.from_tier.value,
                    to_tier=moved.to_tier.value,
                    nbytes=moved.nbytes,
                    seconds=seconds,
                    elided=moved.elided,
                ),
            )

    def _report(
        self, request: TransitionRequest, outcome: str, placement: Placement | None, error: Exception | None
    ) -> None:
        first = None if error is None else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        where = {} if placement is None else placement.as_text()
        self._write(request, events.RankReported(outcome=outcome, placement=where, error=first))

    def _write(self, request: TransitionRequest, event: events.Event) -> None:
        self._log.write(
            event,
            policy=self._policy,
            scope_id=request.scope_id,
            transition_id=request.transition_id,
            step=request.step,
        )

    def _warn(self, message: str) -> None:
        self._log.write(events.WarningIssued(code="pinning_failed", message=message), policy=self._policy)

    def _weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies on the CPU of the named weights, from the first rank alone: they have a process boundary to cross."""
        found = self._of_worker().weights(names)
        return {name: value.detach().to("cpu", copy=True) for name, value in found.items()} if self.rank == 0 else {}

    def _weights_epoch(self) -> int:
        """As the worker's; a rank that was built anew never gives a number of the one before."""
        return (self._restarts << 48) + self._of_worker().weights_epoch()

    def _save_checkpoint(self, path: str) -> CallResult:
        """Write a checkpoint; of replicas the first one does, and the others take note of it."""
        worker = self._of_worker()
        if worker.ranks.count == 1 and self.rank > 0:  # joined ranks write it together
            worker.note_checkpoint(path)
            return CallResult(None)
        return worker.save_checkpoint(path)

    def _export_state(self) -> WholeState | None:
        """Everything that makes this rank what it is, where it has a whole copy; everything is on the host afterwards.

        Raises:
            FaultedError: A failed optimizer step left it part old, part new.
        """
        if not self._is_replica:
            return None
        worker = self._of_worker()
        kept = worker.last_checkpoint
        with worker.ranks.alone(), tempfile.TemporaryDirectory() as folder:
            worker.recover()
            worker.save_checkpoint(str(Path(folder) / "state"))
            files = _read_files(Path(folder) / "state")
        worker.note_checkpoint(kept)
        return WholeState(files, worker.export_reference(), kept)

    def _restore_state(self, state: WholeState) -> None:
        """Become what another rank was."""
        worker = self._of_worker()
        with tempfile.TemporaryDirectory() as folder:
            _write_files(Path(folder) / "state", state.files)
            worker.recover(str(Path(folder) / "state"))
        worker.note_checkpoint(state.last_checkpoint)
        worker.restore_reference(state.reference)

    def _records(self, known: Sequence[str]) -> dict[str, bytes]:
        """The files of this rank's records, by name, without those that ``known`` names: they are where they belong."""
        path = self._log.path
        if path is None or path.name in known:
            return {}
        parts = [part for _, part in find_parts(path)]
        return {file.name: file.read_bytes() for file in (*parts, path) if file.exists()}

    def _emulated(self, name: str, *args: Any) -> Any:
        """Ask the emulated device of this rank something, or make it fail; for :mod:`rl_session.testing`."""
        return emulate(self._of_worker().engine.device, name, *args)

    def close(self) -> None:
        """Let the model and every buffer go, and end the records of this rank. Idempotent."""
        self.is_closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.drop()
        self._log.close()


def _read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _open_log(target: AuditTarget | None, rank: int, restarts: int) -> AuditLog:
    if target is None:
        return AuditLog(None)
    source = rank_source(rank, policy=target.policy if target.shares_name else "", restarts=restarts)
    path = sibling_path(target.path, source)
    return AuditLog(path, run_id=target.run_id, source=source, rotate_nbytes=target.rotate_nbytes)


def _own_device(device: Device | torch.device | str | None, found: torch.device) -> Device:
    """The device of this rank: what is emulated is made anew, and a worker with a GPU uses it."""
    if isinstance(device, EmulatedDevice):
        return copy.copy(device)
    if device is None and found.type == "cpu" and torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return as_device("cuda", found)
    return as_device(device, found)


def portable(error: Exception) -> Exception:
    """The error itself where it survives the way to another process, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (what was made a moment ago)
    except Exception:
        if isinstance(error, RLSessionError):
            return type(error)(error.attempted, tuple(map(str, error.facts)), error.remedy, str(error.cause))
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
