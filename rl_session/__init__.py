"""Scoped GPU residency for RL post-training.

    import rl_session as rs

    policy = rs.attach(model, optimizer, reference="copy")
    with policy.logprob_mode():
        prev = policy.get_logprobs(batch)
    with policy.training_mode():
        metrics = policy.train(batch, loss_fn)

Names are loaded when they are first used: importing the package loads neither torch nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_session.audit import read_audit
    from rl_session.config import OffloadConfig
    from rl_session.engines import EngineHandle
    from rl_session.errors import (
        ArgumentError,
        AuditError,
        BatchError,
        CheckpointError,
        CheckpointWriteError,
        ClosedError,
        ConfigError,
        DeviceMemoryError,
        EngineError,
        FaultedError,
        HostMemoryError,
        IntegrityError,
        ModeError,
        NestingError,
        NonFiniteError,
        OffloadedAccessError,
        OpenStepError,
        OptimizerError,
        OptimizerStepError,
        OwnershipError,
        RLSessionError,
        ScopeError,
        ScopeOrderError,
        ScopeReuseError,
        ShimInScopeError,
        StaleHandleError,
        StaleWeightsError,
        StepClosedError,
        TransitionError,
        UnsupportedError,
        UsageError,
        WorkerError,
        WorldError,
    )
    from rl_session.generation import GenerationEngine, InProcessEngine, VLLMEngine
    from rl_session.lifecycle import Component, Mode, Placement, Tier
    from rl_session.metrics import max, mean, min
    from rl_session.policy import Policy, ValueModel
    from rl_session.scope import Scope, Step
    from rl_session.session import Session, attach
    from rl_session.workers.launch import LocalWorkers, RayWorkers

_HOMES = {
    "rl_session.audit": ("read_audit",),
    "rl_session.config": ("OffloadConfig",),
    "rl_session.engines": ("EngineHandle",),
    "rl_session.generation": ("GenerationEngine", "InProcessEngine", "VLLMEngine"),
    "rl_session.lifecycle": ("Component", "Mode", "Placement", "Tier"),
    "rl_session.metrics": ("max", "mean", "min"),
    "rl_session.policy": ("Policy", "ValueModel"),
    "rl_session.scope": ("Scope", "Step"),
    "rl_session.session": ("Session", "attach"),
    "rl_session.workers.launch": ("LocalWorkers", "RayWorkers"),
}

__all__ = [
    "ArgumentError",
    "AuditError",
    "BatchError",
    "CheckpointError",
    "CheckpointWriteError",
    "ClosedError",
    "Component",
    "ConfigError",
    "DeviceMemoryError",
    "EngineError",
    "EngineHandle",
    "FaultedError",
    "GenerationEngine",
    "HostMemoryError",
    "InProcessEngine",
    "IntegrityError",
    "LocalWorkers",
    "Mode",
    "ModeError",
    "NestingError",
    "NonFiniteError",
    "OffloadConfig",
    "OffloadedAccessError",
    "OpenStepError",
    "OptimizerError",
    "OptimizerStepError",
    "OwnershipError",
    "Placement",
    "Policy",
    "RLSessionError",
    "RayWorkers",
    "Scope",
    "ScopeError",
    "ScopeOrderError",
    "ScopeReuseError",
    "Session",
    "ShimInScopeError",
    "StaleHandleError",
    "StaleWeightsError",
    "Step",
    "StepClosedError",
    "Tier",
    "TransitionError",
    "UnsupportedError",
    "UsageError",
    "VLLMEngine",
    "ValueModel",
    "WorkerError",
    "WorldError",
    "attach",
    "max",
    "mean",
    "min",
    "read_audit",
]

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rl_session' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF.get(name, "rl_session.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
