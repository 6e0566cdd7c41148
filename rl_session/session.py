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
from rl_session.driver.control import Control
from rl_session.driver.engine_control import EngineControl
from rl_session.driver.run import Run, error_text
from rl_session.engines import EngineHandle
from rl_session.errors import ClosedError, ConfigError, OptimizerError, RLSessionError, UnsupportedError
from rl_session.generation.in_process import InProcessEngine
from rl_session.generation.protocol import GenerationEngine
from rl_session.lifecycle import Mode, Release
from rl_session.offload.device import Device, as_device
from rl_session.offload.host_pool import HostPool
from rl_session.policy import Policy, TrainableModel, ValueModel
from rl_session.workers.group import LocalGroup
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
        timeout_seconds: How long to wait for somebody else: an engine with requests in flight.
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
        self._is_implicit = False
        self._opened_at = time.perf_counter()
        self._closed = False
        self._participants: list[TrainableModel] = []
        self._engines: dict[str, EngineHandle | InProcessEngine] = {}
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
        """Make a policy of a model in this process; see :func:`attach` for the arguments and errors."""
        spec = _spec(locals())
        return self._add(Policy, spec, name, device, base, offload or OffloadConfig())

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

        ``forward_fn(model, batch)`` gives values ``[b, S]`` or ``[b, S, 1]``.
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
    ) -> M:
        label = f"{kind._kind} {name!r}"  # noqa: SLF001 (the class says how messages call it)
        self._check_open(f"attach {label}")
        check_choice("attach", "base", base, ("offloaded", "resident"))
        if any(participant.name == name for participant in self._participants):
            raise ConfigError(f"{label}: the name is taken in this session", (), f'attach(..., name="{name}2")')
        _check_model(spec.model, spec.optimizer, label)
        _check_optimizer(spec, label)
        _check_scheduler(spec.scheduler, label)
        _check_options(spec, label)
        _check_cpu_offload(spec.model, config, label)
        spec.label, spec.pin = label, config.pin
        spec.verify = (config.verify or self._run.verify) == "checksum"
        where = self._device(device, _device_of(spec.model, label))
        control: Control | None = None

        def explain() -> tuple[str, tuple[str, ...]]:
            return control.explain() if control is not None else (label, ())

        flags = config.flags(release=self._run.release)
        pool = self._run.pool if config.host_budget is None else HostPool(config.host_budget, self._warn)
        worker = Worker(spec, where, pool, explain)
        worker.set_flags(flags)
        first = worker.start()
        resting = Mode.OFFLOADED if base == "offloaded" else Mode.RESIDENT
        control = Control(name, kind._kind, LocalGroup(worker), self._run, flags, first, resting, where)  # noqa: SLF001
        control.digests = spec.verify
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

        Raises:
            ConfigError: The name is taken or unknown, a value is not one of its choices, or the object is no engine.
            EngineError: It cannot say how many bytes it takes.
            ClosedError: The session was closed.
        """
        self._check_open(f"engine({name!r})")
        if engine is None:
            return self._known_engine(name)
        if name in self._engines:
            raise ConfigError(f"engine({name!r}): the name is taken in this session", (), f'engine("{name}2", ...)')
        if isinstance(engine, InProcessEngine):
            engine.name = name
            self._engines[name] = engine
            return engine
        check_choice("engine", "release", release, ("eager", "lazy", "never", None))
        check_choice("engine", "on_busy", on_busy, ("drain", "refuse"))
        check_choice("engine", "sleep_level", sleep_level, (1, 2))
        timeout = self._run.timeout_seconds if drain_timeout_seconds is None else drain_timeout_seconds
        check_seconds("engine", "drain_timeout_seconds", timeout)
        where = self._device_of_engine(engine, device)
        control = EngineControl(
            name,
            engine,
            self._run,
            where,
            release=release or (self._run.release if where is not None else "never"),
            sleep_level=sleep_level,
            sizes=bytes_needed,
            drain_timeout_seconds=timeout,
            on_busy=on_busy,
        )
        return self._take_in(control)

    def _take_in(self, control: EngineControl) -> EngineHandle:
        handle = EngineHandle(control, self._forget_engine)
        control.handle = handle
        if control.device is not None:
            self._run.arbiter.join(control)
        self._run.engines.append(control)
        self._engines[control.name] = handle
        return handle

    def _known_engine(self, name: str) -> EngineHandle | InProcessEngine:
        if name not in self._engines:
            listed = ", ".join(repr(known) for known in self._engines) or "none"
            raise ConfigError(
                f"engine({name!r}): there is no such engine", (f"engines: {listed}",), f"session.engine({name!r}, vllm)"
            )
        return self._engines[name]

    def _device_of_engine(self, engine: object, device: Device | torch.device | str | None) -> Device | None:
        wanted = device if device is not None else getattr(engine, "device", None)
        if wanted is None:
            return None
        return self._device(wanted, torch.device("cpu"))

    def _forget_engine(self, handle: EngineHandle) -> None:
        control = handle._control  # noqa: SLF001 (the session made it)
        self._engines.pop(handle.name, None)
        if control in self._run.engines:
            self._run.engines.remove(control)
        self._run.arbiter.part(control)

    # -- the run -------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """A block in which every record carries the step number ``n``; the outer number comes back after it.

        Args:
            n: The number of the training step.

        Raises:
            ClosedError: The session was closed.
        """
        self._check_open(f"step({n})")
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
            "engines": {name: e.memory() for name, e in self._engines.items() if isinstance(e, EngineHandle)},
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
        handles = [e for e in self._engines.values() if isinstance(e, EngineHandle)]
        # Engines first: asleep they leave room for models that are given back on the device.
        closing: list[EngineHandle | TrainableModel] = [*reversed(handles), *reversed(self._participants)]
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


def _versions() -> dict[str, str]:
    found: dict[str, str] = {"torch": str(torch.__version__)}
    try:
        found["rl-session"] = version("rl-session")
    except PackageNotFoundError:
        found["rl-session"] = "unknown"
    return found


def _check_model(model: object, optimizer: object, label: str) -> None:
    if type(model).__module__.startswith("deepspeed"):
        raise UnsupportedError(
            f"{label}: a DeepSpeed engine owns the placement of its tensors",
            (),
            "attach the plain module and a torch optimizer, or leave offloading to DeepSpeed",
        )
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"{label}: {type(model).__name__} is not a torch module", (), "attach(module, optimizer)"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"{label}: {type(optimizer).__name__} is not a torch optimizer",
            (),
            "attach(module, optimizer) with a torch.optim.Optimizer (of a wrapper, the optimizer inside)",
        )


def _device_of(model: nn.Module, label: str) -> torch.device:
    devices = {str(p.device) for p in model.parameters() if p.device.type != "meta"}
    if len(devices) > 1:
        raise UnsupportedError(
            f"{label}: one module over several devices",
            (f"devices: {', '.join(sorted(devices))}",),
            "put it on one device, or shard it over workers",
        )
    return torch.device(devices.pop()) if devices else torch.device("cpu")


def _check_optimizer(spec: WorkerSpec, label: str) -> None:
    """An optimizer that shares no parameter with the module steps something else, unless it is told what.

    Raises:
        OptimizerError: It does.
    """
    if spec.optimizer is None:
        if spec.masters:
            raise OptimizerError(
                f"{label}: masters= without an optimizer that steps them",
                (f"pairs: {len(spec.masters)}",),
                "attach(model, optimizer, masters={parameter: master, ...})",
            )
        return
    own = {id(p) for p in spec.model.parameters()}
    stepped = {id(p) for group in spec.optimizer.param_groups for p in group["params"]}
    for parameter, master in spec.masters:
        if id(parameter) not in own or id(master) not in stepped:
            raise OptimizerError(
                f"{label}: masters= names a pair that is not one",
                (f"parameter of the model: {id(parameter) in own}, master in the optimizer: {id(master) in stepped}",),
                "attach(model, optimizer, masters={parameter: master, ...})",
            )
    if not own & stepped and not spec.masters:
        raise OptimizerError(
            f"{label}: the optimizer shares no parameter with the model",
            (f"parameters of the model: {len(own)}, of the optimizer: {len(stepped)}",),
            "build it over model.parameters(), or map its fp32 copies with masters={parameter: master}",
        )


def _check_scheduler(scheduler: object, label: str) -> None:
    """A scheduler is stepped without arguments, after weights have changed: one that needs them is refused before.

    Raises:
        UnsupportedError: It has no ``step()``, or needs a metric.
    """
    if scheduler is None:
        return
    if not callable(getattr(scheduler, "step", None)) or isinstance(
        scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
    ):
        raise UnsupportedError(
            f"{label}: {type(scheduler).__name__} cannot be stepped without a metric",
            ("train() and commit() call scheduler.step()",),
            "attach without scheduler=, and call scheduler.step(metric) in the loop",
        )


def _check_options(spec: WorkerSpec, label: str) -> None:
    """A norm that is not positive would turn gradients round or to zero without a word.

    Raises:
        ConfigError: ``max_grad_norm`` is no positive number, or ``forward_fn`` cannot be called.
    """
    norm: object = spec.max_grad_norm
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, int | float) or not norm > 0):
        raise ConfigError(
            f"{label}: max_grad_norm={norm!r} is no positive number",
            ("gradients are clipped to that norm",),
            "attach(..., max_grad_norm=1.0), or None for no clipping",
        )
    if spec.forward_fn is not None and not callable(spec.forward_fn):
        raise ConfigError(
            f"{label}: forward_fn={spec.forward_fn!r} cannot be called",
            (),
            "attach(..., forward_fn=lambda model, batch: model(batch['input_ids']).logits)",
        )


def _check_cpu_offload(model: nn.Module, config: OffloadConfig, label: str) -> None:
    """FSDP's own CPU offload and ``OffloadConfig(cpu_offload=True)`` must agree: a parameter has one owner.

    Raises:
        ConfigError: They disagree.
    """
    owned = any(_has_cpu_offload_policy(module) for module in model.modules())
    if owned != config.cpu_offload:
        has = "has" if owned else "has not"
        raise ConfigError(
            f"{label}: OffloadConfig(cpu_offload={config.cpu_offload}), but the model {has} FSDP's CPUOffloadPolicy",
            (),
            f"OffloadConfig(cpu_offload={owned})",
        )


def _has_cpu_offload_policy(module: nn.Module) -> bool:
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return False
    group = getattr(get_state(), "_fsdp_param_group", None)
    return group is not None and type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy"
