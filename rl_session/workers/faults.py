"""What a test may ask of the emulated device of a rank that lives in another process.

Faults beyond those of the device itself: a process that dies, or stops answering, at an exact point of a move. Only an
emulated device obeys. Knows nothing of ranks.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from rl_session.errors import ConfigError
from rl_session.lifecycle import Component, Tier
from rl_session.offload.device import Device, EmulatedDevice, Fault
from rl_session.offload.tensors import byte_alias, find_storage, library_access

__all__ = ["emulate"]

_ASKED = frozenset(
    {"bytes_in", "bytes_out", "resident_bytes", "held_bytes", "peak", "num_copies", "capacity", "num_armed"}
)
_TOLD = frozenset({"fail", "heal", "delay", "poison"})
_OTHERS = frozenset({"die", "stall", "set_capacity", "pid", "checksums"})
_STALL_SECONDS = 3600.0


class _Dying(Fault):
    """A fault that ends the process, as ``kill -9`` would, when it is due."""

    @property
    def error(self) -> BaseException:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    @error.setter
    def error(self, value: BaseException) -> None:
        """Never raised."""


class _Stalling(Fault):
    """A fault that never comes to an end, when it is due."""

    @property
    def error(self) -> BaseException:
        time.sleep(_STALL_SECONDS)
        raise AssertionError

    @error.setter
    def error(self, value: BaseException) -> None:
        """Never raised."""


def emulate(device: Device, name: str, *args: Any) -> Any:
    """Ask, tell, or set up a fault.

    Args:
        device: The device of the rank.
        name: A counter of :class:`EmulatedDevice`; "fail", "heal", "delay" or "poison"; "pid"; "set_capacity"; "checksums"; or
            "die" or "stall" with the first three arguments of "fail".
        *args: Those of the method.

    Raises:
        ConfigError: It is no emulated device, or knows no such thing.
    """
    if not isinstance(device, EmulatedDevice) or name not in _ASKED | _TOLD | _OTHERS:
        raise ConfigError(f"{name!r} is nothing that {device!r} can be asked", (), 'device="cpu" for an emulated one')
    if name == "pid":
        return os.getpid()
    if name in _ASKED:
        return getattr(device, name)
    if name == "checksums":
        return _checksums(device)
    if name == "set_capacity":
        (device.capacity,) = args
    elif name in _TOLD:
        getattr(device, name)(*args)
    else:
        operation, k, point = args
        kind = _Dying if name == "die" else _Stalling
        device.arm(kind(operation, k, point, RuntimeError()))
    return None


def _checksums(device: EmulatedDevice) -> dict[str, int]:
    """A checksum of every storage but gradients, by the name of what is in it, from whichever tier has the bytes."""
    found: dict[str, int] = {}
    with library_access():
        for unit in device.units.values():
            if unit.component == Component.GRADS or unit.tier is Tier.NONE:
                continue
            storage = find_storage(unit.weak)
            if unit.tier is Tier.HOST and unit.host is not None:
                found[unit.name] = device.host_checksum(unit.host_bytes())
            elif storage is not None:
                found[unit.name] = device.host_checksum(byte_alias(storage))
    return found
