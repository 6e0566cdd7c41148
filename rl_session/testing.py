"""What users need to test their loops without a GPU or a cluster: devices, a generation engine, ranks, and faults of each."""

from __future__ import annotations

from rl_session.generation.fake import EngineFault, FakeEngine
from rl_session.offload.device import EmulatedDevice, Fault, InjectedFault
from rl_session.policy import TrainableModel
from rl_session.workers.fake import FakeGroup, FakeWorkers, RankDevice

__all__ = [
    "EmulatedDevice",
    "EngineFault",
    "FakeEngine",
    "FakeGroup",
    "FakeWorkers",
    "Fault",
    "InjectedFault",
    "RankDevice",
    "rank_device",
]


def rank_device(policy: TrainableModel, rank: int) -> RankDevice:
    """The emulated device of a rank: its counters, and the faults it can be told to have.

    Args:
        policy: A policy made with :class:`FakeWorkers` or :class:`rl_session.RayWorkers`.
        rank: Which rank.
    """
    return RankDevice(policy._control.group, rank)  # noqa: SLF001 (a test looks behind the handle)
