"""What a generation engine has to offer to be used in a session: the protocol, and how its optional parts are read.

Any object with these methods will do; nothing has to be inherited. Knows nothing of sessions, scopes or budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rl_session.errors import ConfigError

__all__ = ["GenerationEngine", "awake_tags_of", "check_engine", "num_in_flight_of", "tags_of"]

_DEFAULT_TAGS = ("weights", "kv_cache")
_METHODS = ("wake", "sleep", "update_weights", "generate")


@runtime_checkable
class GenerationEngine(Protocol):
    """A generation engine: something that holds weights and a KV cache, can give their memory back, and samples.

    The calls below are made one at a time, but for :meth:`generate`, which any thread may make while the engine is awake. Waking
    and sleeping may answer False for "it did not work"; True and None are success, and so is no exception. Three promises:

    - ``sleep`` of an engine that is asleep, or awake in part, is harmless and leaves it asleep;
    - a ``wake`` or ``sleep(1)`` that fails leaves the content of the weights intact, wherever it is then;
    - ``update_weights`` works while the weights are awake and the KV cache is not.

    Optional attributes and methods, read where they exist:

    - ``tags``: the parts that can wake one after the other, first the one that pushes go into (``("weights", "kv_cache")``);
    - ``device``: the device that the engine shares with participants of the session;
    - ``awake_tags``: the parts that are awake when the engine joins a session (none);
    - ``accepts_host_weights``: whether ``update_weights`` takes CPU tensors (False);
    - ``requires_refit``: whether its first weights are placeholders that must never be served (False);
    - ``reset_cache() -> bool | None``: forget what was cached of the weights before a push;
    - ``wait_for_idle(timeout_seconds) -> bool``: block until nothing is in flight; without it, ``in_flight`` is polled.
    """

    def wake(self, tags: Sequence[str]) -> bool | None:
        """Take the device memory of ``tags``, and bring their content back where ``sleep`` kept it."""
        ...

    def sleep(self, level: int) -> bool | None:
        """Give all device memory back. Level 1 keeps the weights on the host; level 2 discards them."""
        ...

    def update_weights(self, buckets: Iterator[dict[str, Tensor]]) -> bool | None:
        """Replace the weights, bucket by bucket; a tensor is valid until the next bucket is asked for."""
        ...

    def generate(self, batch: Mapping[str, Any], **kwargs: Any) -> Mapping[str, Any]:
        """Continue the prompts of a batch."""
        ...

    def bytes_needed(self, tags: Sequence[str]) -> int:
        """Bytes of device memory that ``tags`` take when they are awake."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that are running or waiting; a method of that name will do as well."""
        ...


def check_engine(engine: object, name: str, *, has_sizes: bool) -> None:
    """Refuse what is no engine, naming what it lacks.

    Args:
        engine: What the user passed.
        name: Its name in the session.
        has_sizes: Whether the user gave its sizes, so that ``bytes_needed`` may be missing.

    Raises:
        ConfigError: Methods are missing.
    """
    wanted = _METHODS if has_sizes else (*_METHODS, "bytes_needed")
    missing = [method for method in wanted if not callable(getattr(engine, method, None))]
    with suppress(Exception):  # a property that fails is there
        if not hasattr(engine, "in_flight"):
            missing.append("in_flight")
    if missing:
        raise ConfigError(
            f"session.engine({name!r}): {type(engine).__name__} is no generation engine",
            (f"missing: {', '.join(missing)}", "the protocol: rl_session.GenerationEngine"),
            f"session.engine({name!r}, rs.VLLMEngine(...)), or an object with those methods",
        )


def tags_of(engine: object, name: str) -> tuple[str, ...]:
    """The engine's parts, first the one that pushes go into.

    Raises:
        ConfigError: There is none, or one twice.
    """
    tags = tuple(str(tag) for tag in getattr(engine, "tags", _DEFAULT_TAGS))
    if not tags or len(set(tags)) != len(tags):
        raise ConfigError(
            f"session.engine({name!r}): tags={tags!r}", (), 'tags = ("weights", "kv_cache")  # of the engine'
        )
    return tags


def awake_tags_of(engine: object) -> frozenset[str]:
    """The parts that are awake now, as far as the engine says."""
    return frozenset(str(tag) for tag in getattr(engine, "awake_tags", ()))


def num_in_flight_of(engine: object) -> int:
    """How many requests the engine is working on."""
    value = getattr(engine, "in_flight", 0)
    return int(value() if callable(value) else value)
