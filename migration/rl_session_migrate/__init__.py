"""Tools that move a training loop from manual offload calls to ``rl_session`` scopes.

    from rl_session_migrate import LegacyPolicy

    policy = LegacyPolicy(rs.attach(model, optimizer), backend="megatron")
    policy.prepare_for_lp_inference()
    prev = policy.get_logprobs(batch)["logprobs"]

Names are loaded when they are first used: importing the package loads neither torch nor ray. The package has no engine of
its own; the one in ``rl_session`` does the work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_session_migrate.proof import Report, verify
    from rl_session_migrate.shim.batch import BatchedDataDict
    from rl_session_migrate.shim.effects import LegacyConfig
    from rl_session_migrate.shim.generation import LegacyGeneration
    from rl_session_migrate.shim.loss import LegacyLoss, as_loss_fn
    from rl_session_migrate.shim.policy import LegacyPolicy
    from rl_session_migrate.shim.refit import LegacySynchronizer, refit_policy_generation
    from rl_session_migrate.shim.value import LegacyValue

_HOMES = {
    "rl_session_migrate.shim.batch": ("BatchedDataDict",),
    "rl_session_migrate.shim.effects": ("LegacyConfig",),
    "rl_session_migrate.shim.generation": ("LegacyGeneration",),
    "rl_session_migrate.shim.loss": ("LegacyLoss", "as_loss_fn"),
    "rl_session_migrate.shim.policy": ("LegacyPolicy",),
    "rl_session_migrate.shim.refit": ("LegacySynchronizer", "refit_policy_generation"),
    "rl_session_migrate.shim.value": ("LegacyValue",),
    "rl_session_migrate.proof": ("Report", "verify"),
}

__all__ = [
    "BatchedDataDict",
    "LegacyConfig",
    "LegacyGeneration",
    "LegacyLoss",
    "LegacyPolicy",
    "LegacySynchronizer",
    "LegacyValue",
    "Report",
    "as_loss_fn",
    "refit_policy_generation",
    "verify",
]

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'rl_session_migrate' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
