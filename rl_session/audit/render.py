"""One record to one line of JSON, whatever is in it.

Knows JSON and odd values, not events or files. A record is written at the moments when things go wrong, with
values taken from what went wrong, so nothing here may raise; and tensors never enter the log, so anything
array-like is named by its type alone (which also touches neither the device nor storage that is away).
"""

from __future__ import annotations

import numbers
import os
from typing import Any

import orjson

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
_MAX_REPR = 500
_MAX_DEPTH = 16
# What orjson can write: a signed or an unsigned 64-bit integer.
_INT64 = range(-(2**63), 2**64)


def render_line(record: dict[str, Any]) -> bytes:
    """Return the record as one JSON line, newline included. NaN and infinities become null.

    The fast way serves every record of plain values. What orjson refuses (lone surrogates, integers over 64
    bits, odd keys, circular or very deep values) is made plain first.
    """
    try:
        return orjson.dumps(record, default=_to_plain, option=_OPTIONS)
    except Exception:  # orjson, and the repr of a stranger, may raise anything
        return orjson.dumps(_plain(record, _MAX_DEPTH), option=_OPTIONS)


class LineRenderer:
    """A structlog processor that renders a record: what is the same on every line, once; what differs, each time.

    Args:
        constant: The keys that every line begins with. Records must not have them.
    """

    def __init__(self, constant: dict[str, Any]) -> None:
        self._start = render_line(constant)[:-2] + b","

    def __call__(self, _logger: object, _method: str, record: Any) -> bytes:
        """Return the line of a record; never raises."""
        try:
            return self._start + orjson.dumps(record, _to_plain, _OPTIONS)[1:]
        except Exception:  # as in render_line
            return self._start + orjson.dumps(_plain(record, _MAX_DEPTH), option=_OPTIONS)[1:]


def _to_plain(value: object) -> Any:
    """Say what to write for an object that JSON has no form for."""
    # numpy registers its scalars as numbers; tensors are not registered, and would have to be copied.
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if hasattr(type(value), "__array__") or hasattr(type(value), "__dlpack__"):
        return f"<{type(value).__module__}.{type(value).__qualname__}>"
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    return _short_repr(value)


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a broken repr is what this is for
        return f"<unprintable {type(value).__qualname__}>"
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}..."


def _text(value: str) -> str:
    # Paths and messages may hold undecodable bytes as lone surrogates; keep them readable.
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: object, depth: int) -> Any:
    """Return a copy of exact built-in types that orjson accepts."""
    try:
        return _plain_step(value, depth)
    except Exception:  # a container may be as broken as a repr
        return f"<unprintable {type(value).__qualname__}>"


def _plain_step(value: object, depth: int) -> Any:
    if isinstance(value, (dict, list, tuple)):
        return _plain_container(value, depth)
    atom = value if value is None or isinstance(value, (str, int, float)) else _to_plain(value)
    if isinstance(atom, str):
        return _text(atom)
    return _short_repr(atom) if isinstance(atom, int) and atom not in _INT64 else atom


def _plain_container(value: dict[Any, Any] | list[Any] | tuple[Any, ...], depth: int) -> Any:
    # Bounds circular values too.
    if depth == 0:
        return f"<{type(value).__qualname__} of {len(value)}, too deep>"
    if isinstance(value, dict):
        return {
            _text(key if isinstance(key, str) else _short_repr(key)): _plain(item, depth - 1)
            for key, item in value.items()
        }
    return [_plain(item, depth - 1) for item in value]
