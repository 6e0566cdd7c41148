"""What users need to test their loops without a GPU: the emulated device, a generation engine, and the faults they can have."""

from __future__ import annotations

from rl_session.generation.fake import EngineFault, FakeEngine
from rl_session.offload.device import EmulatedDevice, Fault, InjectedFault

__all__ = ["EmulatedDevice", "EngineFault", "FakeEngine", "Fault", "InjectedFault"]
