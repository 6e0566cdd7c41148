r"""Every error this library raises, in one tree, with a short stable code each.

    RLSessionError
      UsageError (RuntimeError)            your call was wrong, nothing was changed
        ModeError            RLS101        the call is not legal in the mode in effect
        NestingError         RLS102 \
        ScopeReuseError      RLS103  \     ScopeError: scopes entered, left or nested wrongly
        ScopeOrderError      RLS104  /
        ShimInScopeError     RLS113 /
        OwnershipError       RLS105        another thread, task or process owns the policy
        OpenStepError        RLS106        gradients nobody consumed yet are in the way
        StepClosedError      RLS107        the train step was committed or aborted before
        OffloadedAccessError RLS108        a tensor was touched while its bytes are on the host
        ClosedError          RLS109        the policy, engine or session was closed
        StaleWeightsError    RLS111        an engine has no weights that it may serve
        StaleHandleError     RLS112        (OwnershipError) another process changed the policy meanwhile
      ArgumentError (ValueError)           what was passed in was wrong, nothing was changed
        ConfigError          RLS201
        BatchError           RLS202
        UnsupportedError     RLS203        a model, optimizer or tensor that cannot be served
        OptimizerError       RLS204        the optimizer does not belong to the model
        AuditError           RLS205        not an audit log
        CheckpointError      RLS206        a checkpoint that does not fit, or is damaged
      WorldError                           the world failed
        DeviceMemoryError    RLS301 (MemoryError)
        HostMemoryError      RLS302 (MemoryError)
        TransitionError      RLS303        a transition failed and was rolled back
        FaultedError         RLS304        a failure that could not be undone
        IntegrityError       RLS305        bytes differ from what they were known to be
        NonFiniteError       RLS306 (ArithmeticError)   NaN in logits, loss or gradients
        CheckpointWriteError RLS307
        EngineError          RLS308        a generation engine failed
        OptimizerStepError   RLS309        optimizer.step() failed half-way and was undone
        WorkerError          RLS310        workers could not be started

Each message has three parts: what was attempted, the facts, and what to write instead. Fields are positional and all
reach ``Exception.args``, so that errors survive pickling and Ray's dual exception classes; the cause is kept as text.
This module knows nothing of torch, of policies or of scopes: callers bring the facts.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ArgumentError",
    "AuditError",
    "BatchError",
    "CheckpointError",
    "CheckpointWriteError",
    "ClosedError",
    "ConfigError",
    "DeviceMemoryError",
    "EngineError",
    "FaultedError",
    "HostMemoryError",
    "IntegrityError",
    "ModeError",
    "NestingError",
    "NonFiniteError",
    "OffloadedAccessError",
    "OpenStepError",
    "OptimizerError",
    "OptimizerStepError",
    "OwnershipError",
    "RLSessionError",
    "ScopeError",
    "ScopeOrderError",
    "ScopeReuseError",
    "ShimInScopeError",
    "StaleHandleError",
    "StaleWeightsError",
    "StepClosedError",
    "TransitionError",
    "UnsupportedError",
    "UsageError",
    "WorkerError",
    "WorldError",
]


class RLSessionError(Exception):
    """Base of every error of this library.

    Args:
        attempted: What was tried, naming the policy and the call.
        facts: What is known: modes, open scopes with call sites, bytes needed and free, ranks. One line each.
        remedy: What to write instead, or what to do now.
        cause: The original error as text (exceptions may not survive a process boundary; text does).
    """

    code: ClassVar[str] = "RLS000"

    def __init__(self, attempted: str, facts: tuple[str, ...] = (), remedy: str = "", cause: str = "") -> None:
        facts = tuple(facts)
        super().__init__(attempted, facts, remedy, cause)
        self.attempted = attempted
        self.facts = facts
        self.remedy = remedy
        self.cause = cause

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.attempted}"]
        lines += [f"  {fact}" for fact in self.facts]
        if self.cause:
            lines.append(f"  cause: {self.cause}")
        if self.remedy:
            lines.append(f"  write: {self.remedy}")
        return "\n".join(lines)


class UsageError(RLSessionError, RuntimeError):
    """Your call was wrong at this point of the program; nothing was changed."""

    code = "RLS100"


class ModeError(UsageError):
    """The call is not legal in the mode in effect."""

    code = "RLS101"


class ScopeError(UsageError):
    """Scopes were entered, left or nested in a way that has no meaning."""

    code = "RLS110"


class NestingError(ScopeError):
    """This scope may not be opened inside that one."""

    code = "RLS102"


class ScopeReuseError(ScopeError):
    """A scope object was entered a second time; each ``with`` needs a new one."""

    code = "RLS103"


class ScopeOrderError(ScopeError):
    """A scope was left while scopes opened inside it were still open."""

    code = "RLS104"


class ShimInScopeError(ScopeError):
    """A call of the legacy API that moves bytes, while a scope is open: only one of the two can decide where they are."""

    code = "RLS113"


class OwnershipError(UsageError):
    """Another thread, task or process owns the policy right now."""

    code = "RLS105"


class StaleHandleError(OwnershipError):
    """Another process has changed the policy since this handle last looked; it looked again, and still may not."""

    code = "RLS112"


class OpenStepError(UsageError):
    """Gradients that no optimizer step has consumed are in the way."""

    code = "RLS106"


class StepClosedError(UsageError):
    """The train step was already committed or aborted."""

    code = "RLS107"


class OffloadedAccessError(UsageError):
    """A tensor, module or optimizer was touched while its bytes are away from the device."""

    code = "RLS108"


class ClosedError(UsageError):
    """The policy, engine or session was closed or detached."""

    code = "RLS109"


class StaleWeightsError(UsageError):
    """A generation engine was asked to serve weights that were discarded, or pushed only in part."""

    code = "RLS111"


class ArgumentError(RLSessionError, ValueError):
    """What was passed in is wrong; nothing was changed."""

    code = "RLS200"


class ConfigError(ArgumentError):
    """A configuration value is invalid, or contradicts the model."""

    code = "RLS201"


class BatchError(ArgumentError):
    """A batch misses a key, or has a wrong dtype, shape or length."""

    code = "RLS202"


class UnsupportedError(ArgumentError):
    """A model, optimizer or tensor that this library cannot move without corrupting it."""

    code = "RLS203"


class OptimizerError(ArgumentError):
    """The optimizer does not belong to the model."""

    code = "RLS204"


class AuditError(ArgumentError):
    """A file that is not an audit log, or cannot be read as one."""

    code = "RLS205"


class CheckpointError(ArgumentError):
    """A checkpoint that does not fit the model, or is missing, damaged or truncated."""

    code = "RLS206"


class WorldError(RLSessionError):
    """The world failed: memory, disk, a device, another process."""

    code = "RLS300"


class DeviceMemoryError(WorldError, MemoryError):
    """The device has no room for what a transition needs; it was rolled back."""

    code = "RLS301"


class HostMemoryError(WorldError, MemoryError):
    """The host, or the host budget, has no room for what a transition needs; nothing was moved."""

    code = "RLS302"


class TransitionError(WorldError):
    """A transition failed and was rolled back: the state before it stands, and it may be retried."""

    code = "RLS303"


class FaultedError(WorldError):
    """A failure that could not be undone; the policy refuses work until it is recovered."""

    code = "RLS304"


class IntegrityError(WorldError):
    """Bytes differ from what they were known to be (found with ``verify="checksum"``)."""

    code = "RLS305"


class NonFiniteError(WorldError, ArithmeticError):
    """NaN in logits, loss or gradients; the step was aborted and the weights are untouched."""

    code = "RLS306"


class CheckpointWriteError(WorldError):
    """A checkpoint could not be written; what stood at the path before still stands."""

    code = "RLS307"


class EngineError(WorldError):
    """A generation engine failed or refused."""

    code = "RLS308"


class OptimizerStepError(WorldError):
    """``optimizer.step()`` failed half-way; parameters and optimizer state were restored from their host copies."""

    code = "RLS309"


class WorkerError(WorldError):
    """Workers could not be started, or could not be started anew."""

    code = "RLS310"


def _name_publicly() -> None:
    """Give every error the name users import it by: a traceback then ends in ``rl_session.ModeError: [RLS101] ...``."""
    for name in __all__:
        globals()[name].__module__ = "rl_session"


_name_publicly()
