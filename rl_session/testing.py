"""What users need to test their loops without a GPU: the emulated device and the faults it can be told to have."""

from __future__ import annotations

from rl_session.offload.device import EmulatedDevice, Fault, InjectedFault

__all__ = ["EmulatedDevice", "Fault", "InjectedFault"]
