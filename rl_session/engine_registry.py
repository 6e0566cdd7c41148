"""The engines of a session, by name: taking one in, finding it, and letting it go. Knows nothing of how one is woken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from rl_session.config import check_choice, check_seconds
from rl_session.driver.engine_control import EngineControl
from rl_session.driver.run import Run
from rl_session.engines import EngineHandle
from rl_session.errors import ConfigError
from rl_session.generation.in_process import InProcessEngine
from rl_session.generation.protocol import GenerationEngine
from rl_session.lifecycle import Release
from rl_session.offload.device import Device

__all__ = ["EngineRegistry"]


class EngineRegistry:
    """What :meth:`Session.engine` asks.

    Args:
        run: What the run shares.
        find_device: Gives the session's device for what a user or an engine calls one.
    """

    def __init__(self, run: Run, find_device: Callable[[Device | torch.device | str], Device]) -> None:
        self._run = run
        self._find_device = find_device
        self._known: dict[str, EngineHandle | InProcessEngine] = {}

    @property
    def handles(self) -> list[EngineHandle]:
        """The external ones, in the order they came."""
        return [engine for engine in self._known.values() if isinstance(engine, EngineHandle)]

    def get(self, name: str) -> EngineHandle | InProcessEngine:
        """The engine of that name.

        Raises:
            ConfigError: There is none.
        """
        _check_name(name)
        if name not in self._known:
            listed = ", ".join(map(repr, self._known)) or "none"
            raise ConfigError(
                f"engine({name!r}): there is no such engine", (f"engines: {listed}",), f"session.engine({name!r}, vllm)"
            )
        return self._known[name]

    def take_in(
        self,
        name: str,
        engine: GenerationEngine | InProcessEngine,
        *,
        device: Device | torch.device | str | None,
        release: Release | None,
        sleep_level: int,
        sizes: Mapping[str, int] | None,
        drain_timeout_seconds: float | None,
        on_busy: Literal["drain", "refuse"],
    ) -> EngineHandle | InProcessEngine:
        """Give an engine a name, and an external one its handle; see :meth:`Session.engine`.

        Raises:
            ConfigError: The name is taken or no name, the engine has one already, a value is not one of its choices, or the
                object is no engine.
            EngineError: It cannot say how many bytes it takes.
        """
        self._check_new(name, engine)
        if isinstance(engine, InProcessEngine):
            engine.name = name
            self._known[name] = engine
            return engine
        check_choice("engine", "release", release, ("eager", "lazy", "never", None))
        check_choice("engine", "on_busy", on_busy, ("drain", "refuse"))
        check_choice("engine", "sleep_level", sleep_level, (1, 2))
        timeout = self._run.timeout_seconds if drain_timeout_seconds is None else drain_timeout_seconds
        check_seconds("engine", "drain_timeout_seconds", timeout)
        wanted: Any = device if device is not None else getattr(engine, "device", None)
        where = None if wanted is None else self._find_device(wanted)
        control = EngineControl(
            name,
            engine,
            self._run,
            where,
            release=release or (self._run.release if where is not None else "never"),
            sleep_level=sleep_level,
            sizes=sizes,
            drain_timeout_seconds=timeout,
            on_busy=on_busy,
        )
        return self._admit(control)

    def _check_new(self, name: str, engine: object) -> None:
        """Refuse a name that is taken, and an engine that has another: its bytes would be counted, and its scopes judged, twice.

        Raises:
            ConfigError: One of them.
        """
        _check_name(name)
        if name in self._known:
            raise ConfigError(f"engine({name!r}): the name is taken in this session", (), f'engine("{name}2", ...)')
        for taken, known in self._known.items():
            if engine is known or (isinstance(known, EngineHandle) and engine is known.engine):
                raise ConfigError(
                    f"engine({name!r}): this engine is in the session already",
                    (f"its name is {taken!r}", f"the engine: {type(engine).__name__}"),
                    f"engine = session.engine({taken!r})  # the one handle there is of it",
                )

    def _admit(self, control: EngineControl) -> EngineHandle:
        handle = EngineHandle(control, self._forget)
        control.handle = handle
        if control.device is not None:
            self._run.arbiter.join(control)
        self._run.engines.append(control)
        self._known[control.name] = handle
        return handle

    def _forget(self, handle: EngineHandle) -> None:
        control = handle._control  # noqa: SLF001 (made here)
        self._known.pop(handle.name, None)
        if control in self._run.engines:
            self._run.engines.remove(control)
        self._run.arbiter.part(control)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"engine({name!r}): a name is a string that says something",
            (f"given: {type(name).__name__}",),
            'session.engine("vllm", engine)',
        )
