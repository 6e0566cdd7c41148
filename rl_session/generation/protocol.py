"""What a generation engine has to offer to be used in a session: the protocol, and how its optional parts are read.

Any object with these methods will do; nothing has to be inherited. Knows nothing of sessions, scopes or budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rl_session.errors import ConfigError

__all__ = [
    "GenerationEngine",
    "awake_tags_of",
    "check_engine",
    "check_sizes",
    "chosen_tags",
    "num_in_flight_of",
    "refusal_of",
    "tags_of",
]

_DEFAULT_TAGS = ("weights", "kv_cache")
_METHODS = ("wake", "sleep", "update_weights", "generate")


@runtime_checkable
class GenerationEngine(Protocol):
    """A generation engine: something that holds weights and a KV cache, can give their memory back, and samples.

    The calls below are made one at a time, but for :meth:`generate`, which any thread may make while the engine is awake. Waking,
    sleeping, pushing and resetting may answer "it did not work" by a value that is false and not None (False, 0). None and every
    other value are success, and an exception is not. Three promises:

    - ``sleep`` of an engine that is asleep, or awake in part, is harmless and leaves it asleep;
    - a ``wake`` or ``sleep(1)`` that fails leaves the content of the weights intact, wherever it is then;
    - ``update_weights`` works while the weights are awake and the KV cache is not.

    Optional attributes and methods, read where they exist:

    - ``tags``: the parts that can wake one after the other, first the one that pushes go into (``("weights", "kv_cache")``);
    - ``device``: the device that the engine shares with participants of the session;
    - ``awake_tags``: the parts that are awake now, none where the engine cannot be sure; asked when it joins a session, and
      after a ``sleep`` that failed (without it, none);
    - ``accepts_host_weights``: whether ``update_weights`` takes CPU tensors (False);
    - ``requires_refit``: whether its first weights are placeholders that must never be served (False);
    - ``reset_cache() -> bool | None``: forget what was cached of the weights before a push;
    - ``wait_for_idle(timeout_seconds) -> bool``: block until nothing is in flight; without it, ``in_flight`` is polled.
    """

    def wake(self, tags: Sequence[str]) -> bool | None:
        """Take the device memory of ``tags``, and bring their content back where ``sleep`` kept it.

        Args:
            tags: Which parts, of those that the engine has.

        Returns:
            False (or what is false and not None) if it did not work.
        """
        ...

    def sleep(self, level: int) -> bool | None:
        """Give all device memory back.

        Args:
            level: 1 keeps the weights on the host; 2 discards them.

        Returns:
            As :meth:`wake`.
        """
        ...

    def update_weights(self, buckets: Iterator[dict[str, Tensor]]) -> bool | None:
        """Replace the weights, bucket by bucket.

        Args:
            buckets: Name (as in the policy's ``state_dict``) to tensor; a tensor is valid until the next bucket is asked for.

        Returns:
            As :meth:`wake`.
        """
        ...

    def generate(self, batch: Mapping[str, Any], **kwargs: Any) -> Mapping[str, Any]:
        """Continue the prompts of a batch.

        Args:
            batch: ``input_ids [B, S]`` right-padded prompts, ``input_lengths [B]``.
            **kwargs: The engine's own sampling parameters.

        Returns:
            CPU tensors in the caller's order, usually ``output_ids [B, S']``, ``unpadded_sequence_lengths [B]`` and
            ``logprobs [B, S']`` float32; handed on as it is.
        """
        ...

    def bytes_needed(self, tags: Sequence[str]) -> int:
        """Bytes of device memory that ``tags`` take when they are awake.

        Args:
            tags: Which parts.

        Returns:
            The number of bytes.
        """
        ...

    @property
    def in_flight(self) -> int:
        """Requests that are running or waiting, 0 or more; a method of that name will do as well.

        Before every sleep and push it has to be known: what is no such number, or cannot be read, fails them.
        """
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
    """The engine's parts, first the one that pushes go into. A string is one of them.

    Raises:
        ConfigError: There is none, one twice, or one that is no name.
    """
    said: object = getattr(engine, "tags", _DEFAULT_TAGS)
    tags = _as_tags(said)
    if not tags or len(set(tags)) != len(tags):
        raise ConfigError(
            f"session.engine({name!r}): the engine's tags={said!r}",
            ("tags are different strings, at least one",),
            'tags = ("weights", "kv_cache")  # of the engine',
        )
    return tags


def chosen_tags(tags: object, known: Sequence[str], attempted: str, remedy: str) -> tuple[str, ...]:
    """What of ``known`` a user named, in that order. A string is one tag.

    Args:
        tags: What the user passed.
        known: The tags that there are.
        attempted: For the message.
        remedy: For the message.

    Raises:
        ConfigError: Nothing was named, or something that is none of ``known``.
    """
    asked = _as_tags(tags)
    if not asked or not set(asked) <= set(known):
        raise ConfigError(
            f"{attempted} with tags={list(asked) if asked else tags!r}",
            (f"tags of this engine: {', '.join(known)}",),
            remedy,
        )
    return tuple(tag for tag in known if tag in asked)


def _as_tags(said: object) -> tuple[str, ...]:
    """Tags as a tuple; empty where it is no string and no collection of strings that say something."""
    if isinstance(said, str):
        said = (said,)
    if not isinstance(said, Iterable):
        return ()
    tags = tuple(said)
    return tags if all(isinstance(tag, str) and tag for tag in tags) else ()


def check_sizes(sizes: object, tags: Sequence[str], name: str) -> None:
    """Refuse sizes that do not say of each of ``tags``, and of nothing else, how many bytes it takes.

    Args:
        sizes: What the user passed as ``bytes_needed``.
        tags: The engine's.
        name: Its name in the session.

    Raises:
        ConfigError: They do not.
    """
    wrong = ["it is no mapping"]
    if isinstance(sizes, Mapping):
        wrong = [f"unknown: {tag!r}" for tag in sizes if tag not in tags]
        wrong += [f"missing: {tag!r}" for tag in tags if tag not in sizes]
        wrong += [f"no number of bytes: {tag!r}" for tag in tags if tag in sizes and not _is_count(sizes[tag])]
    if wrong:
        example = ", ".join(f"{tag!r}: 8 * 2**30" for tag in tags)
        raise ConfigError(
            f"session.engine({name!r}, bytes_needed={sizes!r})",
            (*wrong, f"tags of this engine: {', '.join(tags)}"),
            f"session.engine({name!r}, engine, bytes_needed={{{example}}})",
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def awake_tags_of(engine: object) -> frozenset[str]:
    """The parts that are awake now, as far as the engine says."""
    return frozenset(_as_tags(getattr(engine, "awake_tags", ())))


def refusal_of(answer: object) -> str:
    """What an engine answered in words, if that says "it did not work": false, but not None. Else ""."""
    return f"returned {answer!r}" if answer is not None and not answer else ""


def num_in_flight_of(engine: object) -> int:
    """How many requests the engine is working on.

    Raises:
        TypeError: The engine says what is no number of requests.
        Exception: Whatever it raised instead.
    """
    value: Any = getattr(engine, "in_flight", 0)
    found: object = value() if callable(value) else value
    if not _is_count(found):
        raise TypeError(f"in_flight gave {found!r}, no number of requests")
    assert isinstance(found, int)
    return found
