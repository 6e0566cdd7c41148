"""What users need to test their loops without a GPU or a cluster: devices, an engine, ranks, faults of each, the log as values.

Nothing here imports pytest; the fixtures are in :mod:`rl_session.testing.pytest`, a plugin that a test suite asks for.
"""

from __future__ import annotations

from rl_session.generation.fake import EngineFault, FakeEngine
from rl_session.offload.device import EmulatedDevice, Fault, InjectedFault
from rl_session.policy import TrainableModel
from rl_session.testing.audit import CapturedAudit, captured_audit
from rl_session.testing.faults import Injection, inject_fault
from rl_session.workers.fake import FakeGroup, FakeWorkers, RankDevice

__all__ = [
    "CapturedAudit",
    "EmulatedDevice",
    "EngineFault",
    "FakeEngine",
    "FakeGroup",
    "FakeWorkers",
    "Fault",
    "InjectedFault",
    "Injection",
    "RankDevice",
    "captured_audit",
    "inject_fault",
    "rank_device",
]


def rank_device(policy: TrainableModel, rank: int) -> RankDevice:
    """The emulated device of a rank: its counters, and the faults it can be told to have.

    Args:
        policy: A policy made with :class:`FakeWorkers` or :class:`rl_session.RayWorkers`.
        rank: Which rank.
    """
    return RankDevice(policy._control.group, rank)  # noqa: SLF001 (a test looks behind the handle)
