"""Runs one loop on an emulated device of one capacity, and counts.

Bytes are the device's own counts, never a log's; that the log tells the same is checked in every run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import rl_session as rs
from bytes_moved import bound, legacy_loops, scoped
from bytes_moved.legacy import LegacyEngine, LegacyTrainer, Store
from bytes_moved.phases import TRACES, capacity_of
from bytes_moved.sizes import SCALE, Backend, sizes_of
from rl_session.testing import EmulatedDevice

__all__ = ["Case", "Count", "Row", "measure", "run_legacy", "run_scoped"]

WARM_UP, MEASURED = 2, 3
"""Steps that are not counted, and steps that are."""


class Case(NamedTuple):
    """One row: a loop, a model, a backend's recipe, a number of GPUs, a budget."""

    trace: str
    model: str
    backend: Backend
    num_gpus: int
    budget: str


class Count(NamedTuple):
    """What a run copied.

    Attributes:
        nbytes: A step, on average, in bytes of a real GPU; without the engine's own.
        engine_nbytes: What the engine copied for itself, a step.
        peak: The most that was on the device in the measured steps, by its own count, likewise unscaled.
        fits: Whether that is within the capacity. The manual loops do not know of one.
        outputs: Losses and log-probabilities of every step, where something was computed.
    """

    nbytes: int
    engine_nbytes: int
    peak: int
    fits: bool
    outputs: tuple[Tensor, ...] = ()


class Row(NamedTuple):
    """One case, every way. ``lazy_own`` has the reference as a participant of its own; None where there is no reference."""

    case: Case
    capacity: int
    legacy: Count
    eager: Count
    lazy: Count
    lazy_own: Count | None
    least: int
    least_by_storage: int
    schedule: bound.Schedule

    @property
    def best_lazy(self) -> Count:
        """The better of the two ways to hold a reference."""
        return min((c for c in (self.lazy, self.lazy_own) if c is not None), key=lambda count: count.nbytes)


def _count(
    device: EmulatedDevice,
    step: Callable[[], None],
    engine_bytes: Callable[[], int],
    capacity: int,
    *,
    counts_engine: bool = False,
) -> Count:
    """Steady steps: what a few of them copy after others have warmed up."""
    for _ in range(WARM_UP):
        step()
    device.peak = device.resident_bytes
    before, engine_before = device.bytes_in + device.bytes_out, engine_bytes()
    for _ in range(MEASURED):
        step()
    engine = engine_bytes() - engine_before
    moved = device.bytes_in + device.bytes_out - before - (engine if counts_engine else 0)
    return Count(_real(moved, MEASURED), _real(engine, MEASURED), _real(device.peak), device.peak <= capacity)


def _real(nbytes: int | Fraction, num_steps: int = 1) -> int:
    return round(Fraction(nbytes) * SCALE / num_steps)


def run_legacy(case: Case) -> Count:
    """The manual loop. It runs without a limit, and the count says whether it would have fitted."""
    trace, sizes = TRACES[case.trace], sizes_of(case.model, case.backend, case.num_gpus)
    device = EmulatedDevice()
    value = LegacyTrainer(case.backend, "value", device, sizes, where="host") if trace.has_value else None
    policy = LegacyTrainer(case.backend, "policy", device, sizes)
    engine = LegacyEngine(device, sizes) if trace.engine == "own weights" else None
    kv_cache = Store(device, sizes.megatron_kv_cache, "none") if trace.engine == "training weights" else None
    rig = legacy_loops.Rig(policy, value, engine, kv_cache)
    for method in legacy_loops.START.get(case.trace, ()):
        policy.call(method)
    step = legacy_loops.LOOPS[case.trace]
    engine_bytes = (lambda: engine.bytes_copied) if engine is not None else (lambda: 0)
    capacity = capacity_of(trace, sizes, case.budget)
    return _count(device, lambda: step(rig), engine_bytes, capacity, counts_engine=True)


def run_scoped(case: Case, release: str, *, own_reference: bool = False, log: Path | None = None) -> Count:
    """The loop with scopes, within the capacity.

    Args:
        case: What.
        release: "eager" or "lazy".
        own_reference: Whether a reference is a participant of its own.
        log: Where to keep the audit log; by default it is read and thrown away.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = log or Path(folder) / "run.jsonl"
        trace, sizes = TRACES[case.trace], sizes_of(case.model, case.backend, case.num_gpus)
        device = EmulatedDevice()
        tenants = scoped.move_in(
            case.trace, case.backend, sizes, device, release=release, own_reference=own_reference, log=path
        )
        with tenants.session as session:
            step = _numbered(session, lambda: scoped.LOOPS[case.trace](tenants))
            step()  # makes the optimizer state, which the first step makes outside any plan
            sharing = (tenants.actor, tenants.critic) if trace.leaves_device else ()
            for participant in (*sharing, tenants.reference):
                if participant is not None:
                    participant.offload()
            if tenants.engine is not None:
                tenants.engine.sleep()
            device.capacity = capacity_of(trace, sizes, case.budget)
            count = _count(device, step, tenants.engine_bytes, device.capacity)
            assert count.fits, f"{case}: {count.peak} bytes on a device of {device.capacity}"
            device.capacity = None
        _check_log(path, device.bytes_in + device.bytes_out)
        return count._replace(outputs=tuple(tenants.losses))


def _numbered(session: rs.Session, step: Callable[[], None]) -> Callable[[], None]:
    numbers = iter(range(10**9))

    def numbered() -> None:
        with session.step(next(numbers)):
            step()

    return numbered


def _check_log(path: Path, counted: int) -> None:
    """What records claim is what the device counted: moves of transitions, references copied at attach, and swaps."""
    claimed = 0
    for record in rs.read_audit(path):
        if record.name == "transition.committed":
            claimed += record.event.bytes_moved
        elif record.name == "reference.swapped" or (
            record.name == "component.moved" and record.event.from_tier == "none" and not record.event.elided
        ):
            claimed += record.event.nbytes
    assert claimed == counted, f"{path}: records claim {claimed} bytes, the device counted {counted}"


def measure(case: Case) -> Row:
    """Every way to run a case, and the least that any could copy. That results do not depend on the way is checked."""
    trace, sizes = TRACES[case.trace], sizes_of(case.model, case.backend, case.num_gpus)
    capacity = capacity_of(trace, sizes, case.budget)
    eager, lazy = run_scoped(case, "eager"), run_scoped(case, "lazy")
    own = run_scoped(case, "lazy", own_reference=True) if trace.has_reference else None
    for other in (lazy, own):
        same = other is None or all(map(torch.equal, eager.outputs, other.outputs))
        assert same, f"{case}: other losses under another release policy"
    schedule = bound.whole(sizes.by_name(), trace.phases, capacity)
    return Row(
        case,
        _real(capacity),
        run_legacy(case),
        eager,
        lazy,
        own,
        _real(schedule.nbytes_per_step),
        _real(bound.fractional(sizes.by_name(), trace.phases, capacity)),
        schedule,
    )
