"""Generation engines: what samples from a policy's weights.

    in_process   samples with the policy's own module, in this process

Knows nothing of sessions or budgets.
"""

from __future__ import annotations

from rl_session.generation.in_process import InProcessEngine

__all__ = ["InProcessEngine"]
