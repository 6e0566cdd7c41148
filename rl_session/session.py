"""The owner of a run: participants, their shared defaults, the audit log, and closing in order.

``attach`` is the way in for one model; a session is the way in for several. Knows nothing of how bytes move.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import torch
from structlog.typing import Processor
from torch import Tensor, nn

from rl_session.audit import AuditLog, events
from rl_session.config import OffloadConfig, Verify, check_budget, check_choice, check_seconds
from rl_session.driver import consensus
from rl_session.driver.control import Control
from rl_session.driver.lease import LeaseClient
from rl_session.driver.remote_device import RemoteDevice
from rl_session.driver.run import Run, error_text
from rl_session.engine_registry import EngineRegistry
from rl_session.engines import EngineHandle
from rl_session.errors import ClosedError, ConfigError, RLSessionError
from rl_session.generation.in_process import InProcessEngine
from rl_session.generation.protocol import GenerationEngine
from rl_session.lifecycle import Mode, Release
from rl_session.offload.device import Device, as_device
from rl_session.offload.host_pool import HostPool
from rl_session.policy import Policy, TrainableModel, ValueModel
from rl_session.workers.checks import check_spec, device_of
from rl_session.workers.group import LocalGroup
from rl_session.workers.launch import LocalWorkers, Workers
from rl_session.workers.plan import AuditTarget, RankPlan, build_spec, check_factories
from rl_session.workers.replies import Description
from rl_session.workers.worker import Worker, WorkerSpec

__all__ = ["Session", "attach"]

M = TypeVar("M", bound=TrainableModel)
Masters = Mapping[nn.Parameter, Tensor] | Sequence[tuple[nn.Parameter, Tensor]]


class Session:
    """Participants that share devices, and one audit log.

    Args:
        audit_path: Where the log goes, a ``.jsonl`` file; None for nowhere. A file with something in it is rotated.
        device_budget: The most bytes that all participants together may hold on a device. None: an emulated device's capacity,
            or on CUDA what is free when the first participant comes, less 5%.
        host_budget: The most bytes of host memory all participants together may hold; None for no limit.
        release: When bytes leave the device: "eager" (default), "lazy" or "never".
        verify: "checksum" compares contents at every move; "off" by default.
        timeout_seconds: How long to wait for somebody else: an engine with requests in flight, or workers in other processes
            that say nothing else themselves; a rank past it is killed, and the policy is faulted.
        audit_processors: structlog processors that each record passes through; ``rl_session.audit.forward`` makes some that hand
            it on to a structlog logger, to standard logging or to any callable.
        audit_rotate_nbytes: Begin a new part of the log when it has this many bytes; readers find the parts.

    Raises:
        ConfigError: A value is not one of its choices.
        AuditError: The log cannot be opened.
    """

    def __init__(
        self,
        audit_path: str | PathLike[str] | None = None,
        *,
        device_budget: int | None = None,
        host_budget: int | None = None,
        release: Release | None = None,
        verify: Verify | None = None,
        timeout_seconds: float = 600.0,
        audit_processors: Sequence[Processor] = (),
        audit_rotate_nbytes: int | None = None,
    ) -> None:
        if release is not None:
            check_choice("Session", "release", release, ("eager", "lazy", "never"))
        if verify is not None:
            check_choice("Session", "verify", verify, ("off", "checksum"))
        check_budget("Session", "device_budget", device_budget)
        check_budget("Session", "host_budget", host_budget)
        check_seconds("Session", "timeout_seconds", timeout_seconds)
        if audit_path is not None and not isinstance(audit_path, str | PathLike):
            raise ConfigError(f"Session: audit_path={audit_path!r} is no path", (), 'Session("run.jsonl")')
        self._rotate_nbytes = audit_rotate_nbytes
        self._has_ranks = False
        self._sites: dict[int, tuple[object, RemoteDevice]] = {}
        self._is_implicit = False
        self._opened_at = time.perf_counter()
        self._closed = False
        self._participants: list[TrainableModel] = []
        self._devices: dict[str, Device] = {}
        log = AuditLog(audit_path, processors=audit_processors, rotate_nbytes=audit_rotate_nbytes)
        pool = HostPool(host_budget, self._warn)
        self._run = Run(
            log,
            pool,
            release=release or "eager",
            verify=verify or "off",
            device_budget=device_budget,
            timeout_seconds=timeout_seconds,
        )
        self._engines = EngineRegistry(self._run, lambda device: self._device(device, torch.device("cpu")))
        log.write(
            events.SessionOpened(
                device_budget=device_budget,
                host_budget=host_budget,
                release=self._run.release,
                verify=self._run.verify,
                versions=_versions(),
            )
        )

    def _warn(self, message: str) -> None:
        self._run.log.write(events.WarningIssued(code="pinning_failed", message=message))

    def __repr__(self) -> str:
        names = ", ".join(repr(p.name) for p in self._participants)
        return f"<Session of {names or 'nobody'}{', closed' if self._closed else ''}>"

    # -- participants --------------------------------------------------------------------------------------------

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        name: str = "policy",
        device: Device | torch.device | str | None = None,
        base: Literal["offloaded", "resident"] = "offloaded",
        scheduler: Any | None = None,
        max_grad_norm: float | None = None,
        reference: nn.Module | Literal["copy", "adapter-off"] | None = None,
        masters: Masters | None = None,
        forward_fn: Callable[..., Any] | None = None,
        temperature: float = 1.0,
        offload: OffloadConfig | None = None,
    ) -> Policy:
        """Make a policy of a model in this process; see :func:`attach` for the arguments and errors.

        Returns:
            The policy, with this session's log, budget and release.
        """
        spec = _spec(locals())
        return self._add(Policy, spec, name, device, base, offload or OffloadConfig())

    def policy(
        self,
        name: str = "policy",
        *,
        model: Callable[[], nn.Module],
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        workers: Workers | LocalWorkers | None = None,
        device: Device | torch.device | str | None = None,
        base: Literal["offloaded", "resident"] = "offloaded",
        scheduler: Callable[..., Any] | None = None,
        max_grad_norm: float | None = None,
        reference: Callable[[], nn.Module] | Literal["copy", "adapter-off"] | None = None,
        masters: Callable[..., Any] | None = None,
        forward_fn: Callable[..., Any] | None = None,
        temperature: float = 1.0,
        offload: OffloadConfig | None = None,
    ) -> Policy:
        """Make a policy whose model is built by factories, where its workers are; it ends with the policy.

        Args:
            name: In messages and in the log.
            model: ``model() -> module``. Every worker builds its own, after the same seed.
            optimizer: ``optimizer(parameters) -> optimizer``; when its first argument is called ``model`` or ``module``, it is
                given the module. None for a model that only infers.
            workers: Where the ranks live: :class:`LocalWorkers` (default) or :class:`RayWorkers`.
            device: As for :func:`attach`; an emulated device is made anew on every rank, with the same capacity.
            base: Where the policy rests outside scopes.
            scheduler: ``scheduler(optimizer) -> scheduler``.
            max_grad_norm: As for :func:`attach`.
            reference: None, "copy", "adapter-off", or ``reference() -> module``.
            masters: ``masters(model, optimizer) -> {parameter: master}``.
            forward_fn: As for :func:`attach`.
            temperature: As for :func:`attach`.
            offload: How bytes move.

        Returns:
            The policy.

        Raises:
            ConfigError: Something that is no factory was given for one, or an option is wrong.
            WorkerError: The workers could not be started.
            RLSessionError: What building the model raised; see :func:`attach`.
        """
        return self._make(Policy, _factories(locals()), workers)

    def value_model(
        self,
        name: str = "value",
        *,
        model: Callable[[], nn.Module],
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        workers: Workers | LocalWorkers | None = None,
        device: Device | torch.device | str | None = None,
        base: Literal["offloaded", "resident"] = "offloaded",
        scheduler: Callable[..., Any] | None = None,
        max_grad_norm: float | None = None,
        masters: Callable[..., Any] | None = None,
        forward_fn: Callable[..., Any] | None = None,
        offload: OffloadConfig | None = None,
    ) -> ValueModel:
        """As :meth:`policy`, for a critic: model or ``forward_fn(model, batch)`` give values ``[b, S, 1]``.

        Args:
            name: In messages and in the log.
            model: ``model() -> module``. Every worker builds its own, after the same seed.
            optimizer: As for :meth:`policy`.
            workers: As for :meth:`policy`.
            device: As for :meth:`policy`.
            base: Where it rests outside scopes.
            scheduler: ``scheduler(optimizer) -> scheduler``.
            max_grad_norm: As for :func:`attach`.
            masters: As for :meth:`policy`.
            forward_fn: As for :func:`attach`.
            offload: How bytes move.

        Returns:
            The value model.

        Raises:
            ConfigError, WorkerError, RLSessionError: As :meth:`policy`.
        """
        return self._make(ValueModel, _factories(locals()), workers)

    def _make(self, kind: type[M], told: dict[str, Any], workers: Workers | LocalWorkers | None) -> M:
        name, base, config = told.pop("name"), told.pop("base"), told.pop("offload") or OffloadConfig()
        label = f"{kind._kind} {name!r}"  # noqa: SLF001 (the class says how messages call it)
        self._check_new(label, name, base, config)
        verify = (config.verify or self._run.verify) == "checksum"
        flags = config.flags(release=self._run.release)
        plan = RankPlan(label=label, config=config, flags=flags, verify=verify, **told)
        check_factories(plan)
        if workers is None or isinstance(workers, LocalWorkers):
            spec = build_spec(plan)
            return self._add(kind, spec, name, plan.device, base, config, is_built=True)
        if not hasattr(workers, "start") or not hasattr(workers, "site"):
            raise ConfigError(f"{label}: workers={workers!r}", (), "workers=rs.RayWorkers(2), or rs.LocalWorkers()")
        plan.parallelize = workers.parallelize
        plan.seed = torch.initial_seed() % 2**63
        plan.audit = self._audit_target(name)
        group, replies = workers.start(plan, self._run.timeout_seconds)
        try:
            first = consensus.merge_starts(label, replies)
            where = self._remote_device(workers.site(), first)
            where.hold(name, first.device_bytes)
            resting = Mode.OFFLOADED if base == "offloaded" else Mode.RESIDENT
            lease = LeaseClient(group, "driver")
            control = Control(
                name,
                kind._kind,  # noqa: SLF001
                group,
                self._run,
                flags,
                first,
                resting,
                where,
                is_built=True,
                lease=lease,
            )
        except BaseException:
            group.close()
            raise
        return self._admit(kind, control, where)

    def _audit_target(self, name: str) -> AuditTarget | None:
        """Where the ranks of a policy write; the first one's are ``rank:K``, those of others say whose they are."""
        log = self._run.log
        if log.path is None:
            return None
        shares, self._has_ranks = self._has_ranks, True
        return AuditTarget(str(log.path), log.run_id, name, shares, self._rotate_nbytes)

    def _remote_device(self, site: object, found: Description) -> RemoteDevice:
        """The device of ranks elsewhere: one for all policies whose ranks share GPUs."""
        known = self._sites.get(id(site))
        if known is None:  # the site is kept, so that its id stays its own
            known = self._sites[id(site)] = site, RemoteDevice(found.device_capacity, found.device_free)
        return known[1]

    def attach_value(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        name: str = "value",
        device: Device | torch.device | str | None = None,
        base: Literal["offloaded", "resident"] = "offloaded",
        scheduler: Any | None = None,
        max_grad_norm: float | None = None,
        masters: Masters | None = None,
        forward_fn: Callable[..., Any] | None = None,
        offload: OffloadConfig | None = None,
    ) -> ValueModel:
        """Make a value model of a model in this process; see :func:`attach` for the arguments and errors.

        Model or ``forward_fn(model, batch)`` give values ``[b, S, 1]``; to infer only, ``[b, S]`` will do as well.

        Returns:
            The value model.
        """
        spec = _spec(locals())
        return self._add(ValueModel, spec, name, device, base, offload or OffloadConfig())

    def _add(
        self,
        kind: type[M],
        spec: WorkerSpec,
        name: str,
        device: Device | torch.device | str | None,
        base: str,
        config: OffloadConfig,
        *,
        is_built: bool = False,
    ) -> M:
        label = f"{kind._kind} {name!r}"  # noqa: SLF001 (the class says how messages call it)
        self._check_new(label, name, base, config)
        check_spec(spec, config, label)
        spec.label, spec.pin = label, config.pin
        spec.verify = (config.verify or self._run.verify) == "checksum"
        where = self._device(device, device_of(spec.model, label))
        control: Control | None = None

        def explain() -> tuple[str, tuple[str, ...]]:
            return control.explain() if control is not None else (label, ())

        flags = config.flags(release=self._run.release)
        pool = self._run.pool if config.host_budget is None else HostPool(config.host_budget, self._warn)
        worker = Worker(spec, where, pool, explain)
        worker.set_flags(flags)
        first = worker.start()
        resting = Mode.OFFLOADED if base == "offloaded" else Mode.RESIDENT
        group = LocalGroup(worker, is_built=is_built)
        control = Control(name, kind._kind, group, self._run, flags, first, resting, where, is_built=is_built)  # noqa: SLF001
        control.digests = spec.verify
        return self._admit(kind, control, where)

    def _check_new(self, label: str, name: object, base: str, config: object) -> None:
        self._check_open(f"attach {label}")
        check_choice("attach", "base", base, ("offloaded", "resident"))
        if not isinstance(name, str) or not name:
            raise ConfigError(f"attach: name={name!r} is not a name", (), 'attach(..., name="actor")')
        if not isinstance(config, OffloadConfig):
            raise ConfigError(f"{label}: offload={config!r} is no OffloadConfig", (), "offload=rs.OffloadConfig(...)")
        if any(participant.name == name for participant in self._participants):
            raise ConfigError(f"{label}: the name is taken in this session", (), f'attach(..., name="{name}2")')

    def _admit(self, kind: type[M], control: Control, where: Device) -> M:
        participant = kind(control, where, self._forget)
        self._run.arbiter.join(control.seat)
        self._participants.append(participant)
        return participant

    def _device(self, device: Device | torch.device | str | None, found: torch.device) -> Device:
        """The device for what the user wrote; one object for each real device, so that participants share it."""
        if isinstance(device, Device):
            return device
        made = as_device(device, found)
        return self._devices.setdefault(str(made.torch_device), made)

    def _forget(self, participant: TrainableModel) -> None:
        if participant in self._participants:
            self._participants.remove(participant)
            self._run.arbiter.part(participant._control.seat)  # noqa: SLF001 (the session made it)
            participant.device.hold(participant.name, 0)
        if self._is_implicit and not self._participants:
            self.close()

    def _check_open(self, attempted: str) -> None:
        if self._closed:
            raise ClosedError(f"session: {attempted} after close()", (), "with rs.Session(...) as session: ...")

    # -- engines -------------------------------------------------------------------------------------------------

    @overload
    def engine(self, name: str) -> Any: ...

    @overload
    def engine(self, name: str, engine: InProcessEngine) -> InProcessEngine: ...

    @overload
    def engine(
        self,
        name: str,
        engine: GenerationEngine,
        *,
        device: Device | torch.device | str | None = ...,
        release: Release | None = ...,
        sleep_level: int = ...,
        bytes_needed: Mapping[str, int] | None = ...,
        drain_timeout_seconds: float | None = ...,
        on_busy: Literal["drain", "refuse"] = ...,
    ) -> EngineHandle: ...

    def engine(
        self,
        name: str,
        engine: GenerationEngine | InProcessEngine | None = None,
        *,
        device: Device | torch.device | str | None = None,
        release: Release | None = None,
        sleep_level: int = 1,
        bytes_needed: Mapping[str, int] | None = None,
        drain_timeout_seconds: float | None = None,
        on_busy: Literal["drain", "refuse"] = "drain",
    ) -> EngineHandle | InProcessEngine:
        """Take a generation engine into the session, or give back the one of that name.

        Args:
            name: In messages and in the log.
            engine: Anything with the methods of :class:`GenerationEngine`; an in-process engine is given back as it is. None
                for the one that was taken in by that name.
            device: The device it shares with participants. None: the engine's own ``device``, if it has that attribute;
                without either it has devices of its own, which nobody has to make room on.
            release: "eager" puts it to sleep when its scope ends, "lazy" when the room is needed, "never" at no time. None
                inherits from the session; an engine with devices of its own is "never" put to sleep.
            sleep_level: 1 keeps the weights on the host while it sleeps; 2 discards them, and a refit must follow.
            bytes_needed: Bytes of device memory of each tag, instead of asking the engine.
            drain_timeout_seconds: How long a sleep waits for requests in flight; ``timeout_seconds`` by default.
            on_busy: Whether it waits at all ("drain"), or fails at once ("refuse").

        Returns:
            The handle; its ``awake()`` is the engine's scope. An in-process engine is given back as it is.

        Raises:
            ConfigError: The name is taken or unknown, a value is not one of its choices, or the object is no engine.
            EngineError: It cannot say how many bytes it takes.
            ClosedError: The session was closed.
        """
        self._check_open(f"engine({name!r})")
        if engine is None:
            return self._engines.get(name)
        return self._engines.take_in(
            name,
            engine,
            device=device,
            release=release,
            sleep_level=sleep_level,
            sizes=bytes_needed,
            drain_timeout_seconds=drain_timeout_seconds,
            on_busy=on_busy,
        )

    # -- the run -------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """A block in which every record carries the step number ``n``; the outer number comes back after it.

        Args:
            n: The number of the training step.

        Raises:
            ConfigError: It is not a number from 0 on.
            ClosedError: The session was closed.
        """
        self._check_open(f"step({n!r})")
        if type(n) is not int or n < 0:
            raise ConfigError(f"session: step({n!r}): not the number of a step", (), "with session.step(0): ...")
        outer, self._run.step = self._run.step, n
        try:
            yield
        finally:
            self._run.step = outer

    def make_room(self, nbytes: int, *, device: Device | None = None) -> None:
        """Evict what is releasable until ``nbytes`` more fit: least recently used first, clean before dirty.

        Args:
            nbytes: How many bytes must be free afterwards.
            device: On which device; by default on every one of this session's.

        Raises:
            DeviceMemoryError: They do not fit even if everything releasable leaves; nothing was moved, and the message says
                who holds the bytes.
            ClosedError: The session was closed.
        """
        self._check_open(f"make_room({nbytes})")
        check_budget("make_room", "nbytes", nbytes)
        for participant in self._participants:
            participant._control.retry_pending(f"make_room({nbytes})")  # noqa: SLF001
        for engine in list(self._run.engines):
            engine.retry_pending(f"make_room({nbytes})")
        for each in [device] if device is not None else self._all_devices():
            self._run.arbiter.make_room(each, nbytes)

    def _all_devices(self) -> list[Device]:
        found = [p.device for p in self._participants] + [e.device for e in self._run.engines]
        return list({id(device): device for device in found if device is not None}.values())

    def memory(self) -> dict[str, Any]:
        """Who holds what, where.

        Returns:
            ``participants``: name to what :meth:`Policy.memory` gives, and ``releasable``: component to bytes that may be
            evicted; ``engines``: name to what :meth:`EngineHandle.memory` gives; ``devices``: a list of ``budget`` (None: no
            limit) and ``in_use``, awake engines included; ``host_in_use`` and ``host_held`` of the shared pool.

        Raises:
            ClosedError: The session was closed.
        """
        self._check_open("memory()")
        participants = {}
        for participant in self._participants:
            held = participant._control.seat.holdings()  # noqa: SLF001
            releasable = {h.component: h.nbytes for h in held if h.releasable}
            participants[participant.name] = {**participant.memory(), "releasable": releasable}
        return {
            "participants": participants,
            "engines": {handle.name: handle.memory() for handle in self._engines.handles},
            "devices": [{"device": repr(device), **self._run.arbiter.usage(device)} for device in self._all_devices()],
            "host_in_use": self._run.pool.in_use_bytes,
            "host_held": self._run.pool.held_bytes,
        }

    def close(self) -> None:
        """Close every engine, then every participant, last come first, and the log. Goes on after an error and raises the first.

        Raises:
            RLSessionError: An engine or a participant could not be closed; the others are.
        """
        self._close(None)

    def _close(self, body: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        failures: list[RLSessionError] = []
        # Engines first: asleep they leave room for models that are given back on the device.
        closing: list[EngineHandle | TrainableModel] = [*reversed(self._engines.handles), *reversed(self._participants)]
        for closable in closing:
            try:
                closable.close()
            except RLSessionError as error:
                failures.append(error)
        self._run.pool.trim()
        first = body if body is not None else failures[0] if failures else None
        self._run.log.write(
            events.SessionClosed(error=error_text(first), seconds=time.perf_counter() - self._opened_at)
        )
        self._run.log.close()
        if failures and body is None:
            raise failures[0]
        for failure in failures:
            if body is not None:
                body.add_note(f"and while closing the session: {failure}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        self._close(error)


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    name: str = "policy",
    device: Device | torch.device | str | None = None,
    base: Literal["offloaded", "resident"] = "offloaded",
    scheduler: Any | None = None,
    max_grad_norm: float | None = None,
    reference: nn.Module | Literal["copy", "adapter-off"] | None = None,
    masters: Masters | None = None,
    forward_fn: Callable[..., Any] | None = None,
    temperature: float = 1.0,
    offload: OffloadConfig | None = None,
    session: Session | None = None,
) -> Policy:
    """Make a policy of a model and its optimizer. Moves nothing: the first mode is found by looking.

    Args:
        model: Any module that gives logits, or ``torch.compile(module)``.
        optimizer: Any torch optimizer over the model's parameters; None for a model that only infers.
        name: In messages and in the log.
        device: A torch device, or an :class:`rl_session.testing.EmulatedDevice`; where the model is by default. The CPU is
            an emulated device that really copies and really frees.
        base: Where the policy rests outside scopes: "offloaded", or "resident" on the device.
        scheduler: A learning rate scheduler, stepped once a ``train`` call.
        max_grad_norm: Gradients are clipped to this norm.
        reference: None, "copy" (a deep copy as it is now, held on the host), "adapter-off" (a PEFT model without its
            adapters), or a module.
        masters: Module parameter to the optimizer's fp32 master of it, when the optimizer steps copies.
        forward_fn: ``forward_fn(model, batch) -> logits [b, S, V]``, for models with inputs of their own.
        temperature: Logits are divided by it.
        offload: How bytes move.
        session: The session to join; without one it gets its own, which logs nowhere.

    Returns:
        The policy.

    Raises:
        UnsupportedError: The model or a tensor of it cannot be served; it is named.
        OptimizerError: The optimizer does not belong to the model.
        ConfigError: A configuration value is wrong or contradicts the model.
    """
    if session is not None and not isinstance(session, Session):
        raise ConfigError(f"attach: session={session!r} is no session", (), "attach(model, session=rs.Session())")
    if session is None:
        session = Session()
        session._is_implicit = True  # noqa: SLF001 (it ends with its only participant)
    return session.attach(
        model,
        optimizer,
        name=name,
        device=device,
        base=base,
        scheduler=scheduler,
        max_grad_norm=max_grad_norm,
        reference=reference,
        masters=masters,
        forward_fn=forward_fn,
        temperature=temperature,
        offload=offload,
    )


def _spec(arguments: dict[str, Any]) -> WorkerSpec:
    masters = arguments["masters"]
    pairs = list(masters.items()) if isinstance(masters, Mapping) else list(masters or ())
    return WorkerSpec(
        model=arguments["model"],
        optimizer=arguments["optimizer"],
        scheduler=arguments["scheduler"],
        max_grad_norm=arguments["max_grad_norm"],
        masters=pairs,
        reference=arguments.get("reference"),
        forward_fn=arguments["forward_fn"],
        temperature=arguments.get("temperature", 1.0),
    )


def _factories(arguments: dict[str, Any]) -> dict[str, Any]:
    """What the user said of a model to be built, by name."""
    return {key: value for key, value in arguments.items() if key not in ("self", "workers")}


def _versions() -> dict[str, str]:
    found: dict[str, str] = {"torch": str(torch.__version__)}
    try:
        found["rl-session"] = version("rl-session")
    except PackageNotFoundError:
        found["rl-session"] = "unknown"
    return found
