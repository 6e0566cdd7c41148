"""Scopes over existing NeMo-RL objects: their own legacy methods are called, in the order that their contract demands.

    from rl_session.adapters.nemo_rl import scopes, share

    share(policy, value_model, policy_generation)
    with scopes(policy).logprob_mode():
        prev = policy.get_logprobs(batch)

Nothing is wrapped, replaced or set on an object. Imports nothing of NeMo-RL: objects are known by their methods.
"""

from __future__ import annotations

from rl_session.adapters.nemo_rl.calls import LegacyHandle
from rl_session.adapters.nemo_rl.facade import EngineScopes, LegacyScopes, PolicyScopes, ValueScopes
from rl_session.adapters.nemo_rl.registry import scopes, share

__all__ = ["EngineScopes", "LegacyHandle", "LegacyScopes", "PolicyScopes", "ValueScopes", "scopes", "share"]
