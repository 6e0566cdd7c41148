"""The codemod behind ``rl-session migrate``: from manual lifecycle calls to scopes.

It is driven by use: it finds the calls that compute, puts each into a scope of the mode it needs, and removes the manual
transitions that those scopes make. What it cannot prove it leaves, and says why.
"""

from __future__ import annotations

__all__: list[str] = []
