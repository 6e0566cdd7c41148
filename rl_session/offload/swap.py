"""Other contents for the same storages, for a while: how a reference model stands in for the live weights.

The live bytes are safe on the host before the first foreign byte is written, and come back by an exception too. Version
counters do not change, so a live autograd graph survives. Knows nothing of what the contents mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from rl_session.errors import DeviceMemoryError, FaultedError, RLSessionError, TransitionError, UnsupportedError
from rl_session.lifecycle import Tier
from rl_session.offload.engine import Engine, Snapshot
from rl_session.offload.host_pool import HostBuffer
from rl_session.offload.tensors import byte_alias, library_access
from rl_session.offload.unit import Unit

__all__ = ["capture", "replaced"]


def capture(engine: Engine, components: Sequence[str]) -> dict[str, HostBuffer]:
    """Copy every storage of ``components`` to host buffers of the engine's pool, keyed by what this policy calls it.

    Raises:
        HostMemoryError: There is no room for the copy.
    """
    with library_access():
        snapshot = engine.refresh()
        units = _units(snapshot, components)
        buffers = engine.pool.acquire([unit.nbytes for unit in units.values()], engine.device, pin=engine.pin)
        try:
            pairs = []
            for unit, buffer in zip(units.values(), buffers, strict=True):
                if unit.tier is Tier.DEVICE:
                    pairs.append((snapshot.storage(unit), buffer.data))
                else:  # built on the CPU and never moved: its own storage has the bytes
                    source = unit.host.data if unit.host is not None else byte_alias(snapshot.storage(unit))
                    buffer.data.copy_(source)
            engine.device.copy_out(pairs)
            engine.device.synchronize()
        except BaseException:
            engine.pool.release(buffers)
            raise
    return dict(zip(units, buffers, strict=True))


@contextmanager
def replaced(
    engine: Engine, contents: Mapping[str, HostBuffer], components: Sequence[str], *, stays_valid: bool
) -> Iterator[int]:
    """Run a block with ``contents`` in place of the bytes of ``components``, which must be on the device.

    Args:
        engine: The policy's engine.
        contents: What :func:`capture` gave.
        components: The components that were captured.
        stays_valid: Whether host copies made on the way may stand in for the device copies afterwards.

    Yields:
        Bytes copied on the way in, the live bytes saved first included.

    Raises:
        UnsupportedError: The storages are not those that were captured.
        DeviceMemoryError, TransitionError: The way in failed; the live bytes are back.
        FaultedError: The live bytes could not be written back; they are safe on the host.
    """
    with library_access():
        snapshot = engine.refresh()
        named = _units(snapshot, components)
        _check_same(engine, named, contents)
        engine.shards.reshard()  # what is gathered now would outlive the weights it was gathered from
        units = list(named.values())
        for unit in units:  # of a policy at rest that shares it: what we write here is no touch
            unit.look_at_barrier()
            unit.lower_barrier()
        with _typed(engine):
            saved = _save(engine, snapshot, units)
            try:
                engine.device.copy_in([(snapshot.storage(unit), contents[name].data) for name, unit in named.items()])
                engine.device.synchronize()
            except BaseException:
                _write_back(engine, snapshot, units)
                _end(engine, units, stays_valid=stays_valid)
                raise
    try:
        yield saved + sum(unit.nbytes for unit in units)
    finally:
        with library_access():
            _write_back(engine, snapshot, units)
            _end(engine, units, stays_valid=stays_valid)


def _end(engine: Engine, units: list[Unit], *, stays_valid: bool) -> None:
    """The live bytes are back: decide what the host copies of them are worth from now on."""
    for unit in units:
        unit.host_valid = unit.host_valid and stays_valid
        if unit.tier is Tier.HOST:  # where FSDP keeps it on the host, its own storage has the bytes
            unit.release_host()
        if unit.resters:
            engine.watch.cover(unit)


@contextmanager
def _typed(engine: Engine) -> Iterator[None]:
    """What the device raises in the block is raised as an error of this library.

    Raises:
        DeviceMemoryError: The device had no room.
        TransitionError: Anything else of it failed.
    """
    try:
        yield
    except (RLSessionError, AssertionError):
        raise
    except Exception as error:
        with suppress(Exception):  # what was started must have ended before its buffers mean something else
            engine.device.synchronize()
        label, facts = engine.explain()
        kind = DeviceMemoryError if isinstance(error, torch.OutOfMemoryError) else TransitionError
        raise kind(
            f"{label}: the reference could not be brought in, and the live weights are back",
            facts,
            "the same call again, once the cause is gone",
            f"{type(error).__name__}: {error}",
        ) from error


def _units(snapshot: Snapshot, components: Sequence[str]) -> dict[str, Unit]:
    """Units by a name that is unique and this policy's own: another that shares a storage may call it something else."""
    wanted = set(components)
    units: dict[str, Unit] = {}
    for key, found in snapshot.inventory.storages.items():
        if wanted & set(found.components):
            repeats = sum(name.partition("#")[0] == found.name for name in units) if found.name in units else 0
            units[f"{found.name}#{repeats}" if repeats else found.name] = snapshot.units[key]
    return units


def _check_same(engine: Engine, units: Mapping[str, Unit], contents: Mapping[str, HostBuffer]) -> None:
    live = {name: unit.nbytes for name, unit in units.items()}
    kept = {name: buffer.nbytes for name, buffer in contents.items()}
    if live != kept:
        label, facts = engine.explain()
        changed = sorted(set(live.items()) ^ set(kept.items()))[:3]
        raise UnsupportedError(
            f"{label}: the model is not the one its reference was copied from",
            (*facts, f"differs: {', '.join(f'{name} ({nbytes} bytes)' for name, nbytes in changed)}"),
            "attach the model again after changing its layers",
        )


def _save(engine: Engine, snapshot: Snapshot, units: list[Unit]) -> int:
    """Make sure that every unit has a host copy of its live bytes; returns the bytes copied for that."""
    stale = [unit for unit in units if not unit.is_clean()]
    needy = [unit for unit in stale if unit.host is None]
    for unit, buffer in zip(
        needy, engine.pool.acquire([u.nbytes for u in needy], engine.device, pin=engine.pin), strict=True
    ):
        unit.host, unit.pool = buffer, engine.pool
    fallbacks = [unit for unit in stale if unit.is_snapshot]
    for unit in stale:
        unit.host_valid = unit.is_snapshot = False
    engine.device.copy_out([(snapshot.storage(u), u.host.data) for u in stale if u.host is not None])
    engine.device.synchronize()
    for unit in stale:
        unit.validate_host()
        unit.checksum = engine.device.checksum(snapshot.storage(unit)) if engine.verify else None
    for unit in fallbacks:  # what is there now is as good to fall back on: no step was made since
        unit.is_snapshot = True
    return sum(unit.nbytes for unit in stale)


def _write_back(engine: Engine, snapshot: Snapshot, units: list[Unit]) -> None:
    """Put the live bytes back; once more after a failure, and before an interrupt is handed on."""
    engine.shards.reshard()
    pairs = [(snapshot.storage(u), u.host.data) for u in units if u.host is not None]
    interrupt: BaseException | None = None
    for attempt in (1, 2):
        try:
            engine.device.copy_in(pairs)
            engine.device.synchronize()
            break
        except BaseException as error:
            interrupt = None if isinstance(error, Exception) else error
            if attempt == 2:
                engine.unrestored = list(units)
                label, facts = engine.explain()
                raise FaultedError(
                    f"{label}: the live weights could not be put back after the reference pass",
                    (*facts, "they are safe in host buffers"),
                    "policy.recover()",
                    f"{type(error).__name__}: {error}",
                ) from error
    if interrupt is not None:
        raise interrupt
