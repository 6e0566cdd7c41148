"""Configuration of one participant, validated when it is made. Pure: knows nothing of torch or of what is configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs

from rl_session.errors import ConfigError
from rl_session.lifecycle import Flags, LiveGradients, Release

__all__ = ["OffloadConfig", "Verify", "check_budget", "check_choice", "check_seconds"]

Verify = Literal["off", "checksum"]

_RELEASES = ("eager", "lazy", "never")
_VERIFIES = ("off", "checksum")
_LIVE = ("preserve", "refuse", "discard")


def check_choice(owner: str, field: str, value: object, choices: tuple[object, ...]) -> None:
    """Reject a value that is not one of ``choices``.

    Raises:
        ConfigError: It is not; the message names the owner, the field and the choices.
    """
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(
            f"{owner}: {field}={value!r} is not a value it can have",
            (f"choices: {listed}",),
            f"{owner}({field}={choices[0]!r})",
        )


def _optional_choice(choices: tuple[str, ...]) -> Callable[[Any, Any, Any], None]:
    def check(instance: Any, attribute: Any, value: Any) -> None:
        if value is not None:
            check_choice(type(instance).__name__, attribute.name, value, choices)

    return check


def _boolean(instance: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(
            f"{type(instance).__name__}: {attribute.name}={value!r} must be True or False",
            (),
            f"{type(instance).__name__}({attribute.name}=True)",
        )


def check_budget(owner: str, field: str, value: object) -> None:
    """Reject what is neither a number of bytes nor None.

    Raises:
        ConfigError: It is not; the message names the owner and the field.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(
            f"{owner}: {field}={value!r} must be a number of bytes, or None for no limit",
            (),
            f"{owner}({field}=8 * 2**30)",
        )


def check_seconds(owner: str, field: str, value: object) -> None:
    """Reject what is no number of seconds.

    Raises:
        ConfigError: It is not; the message names the owner and the field.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{owner}: {field}={value!r} is no number of seconds", (), f"{owner}({field}=600)")


def _budget(instance: Any, attribute: Any, value: Any) -> None:
    check_budget(type(instance).__name__, attribute.name, value)


@attrs.frozen(kw_only=True)
class OffloadConfig:
    """How one participant's bytes move.

    Attributes:
        release: "eager" (memory is free when the block says so), "lazy" (only when somebody needs the room) or "never"
            (nothing moves). None inherits from the session.
        offload_optimizer_for_logprob: Whether LOGPROB and GENERATION send the optimizer state to the host.
        offload_optimizer_for_refit: Whether REFIT sends the optimizer state to the host.
        cpu_offload: The module's parameters are placed by FSDP's ``CPUOffloadPolicy``; only BUFFERS move then.
        live_gradients: What a transition that would drop gradients nobody consumed does: "preserve" them bit for bit,
            "refuse" with an error, or "discard" them with a record.
        host_budget: Bytes of host memory this participant may hold; None for no limit of its own.
        verify: "checksum" compares contents at every move and names the first storage that lied. None inherits.
        pin: Whether host buffers are page-locked when the device is CUDA.

    Raises:
        ConfigError: A value is not one of its choices.
    """

    release: Release | None = attrs.field(default=None, validator=_optional_choice(_RELEASES))
    offload_optimizer_for_logprob: bool = attrs.field(default=False, validator=_boolean)
    offload_optimizer_for_refit: bool = attrs.field(default=True, validator=_boolean)
    cpu_offload: bool = attrs.field(default=False, validator=_boolean)
    live_gradients: LiveGradients = attrs.field(default="preserve", validator=_optional_choice(_LIVE))
    host_budget: int | None = attrs.field(default=None, validator=_budget)
    verify: Verify | None = attrs.field(default=None, validator=_optional_choice(_VERIFIES))
    pin: bool = attrs.field(default=True, validator=_boolean)

    def flags(self, *, release: Release) -> Flags:
        """The part that decides placements.

        Args:
            release: What holds where this configuration says nothing.

        Returns:
            What :func:`rl_session.lifecycle.resolve` reads.
        """
        return Flags(
            release=self.release or release,
            offload_optimizer_for_logprob=self.offload_optimizer_for_logprob,
            offload_optimizer_for_refit=self.offload_optimizer_for_refit,
            live_gradients=self.live_gradients,
            weights_move=not self.cpu_offload,
        )
