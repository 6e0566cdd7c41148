"""Scopes over objects of other libraries, which keep their own engines underneath."""

from __future__ import annotations

__all__: list[str] = []
