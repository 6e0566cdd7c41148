"""An engine that samples from the policy's own weights, told so in legacy words. Knows nothing of engines with their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_session.errors import ModeError
from rl_session.generation.in_process import InProcessEngine
from rl_session.lifecycle import Cell, Cells, Component, Mode
from rl_session_migrate.shim.batch import BatchedDataDict
from rl_session_migrate.shim.effects import AS_IT_IS, still_freed

__all__ = ["sample_shared", "share_weights"]

_WEIGHTS_IN = Cells(weights=Cell.DEVICE, grads=Cell.AS_IS, optimizer=Cell.AS_IS)


def share_weights(engine: InProcessEngine, call: str, site: str) -> None:
    """What a colocated engine without weights of its own does on waking: the policy's come in, and sample in eval."""
    control = engine.policy._control  # noqa: SLF001 (two faces of one policy)
    control.switch(Mode.GENERATION, call, site, cells=still_freed(_WEIGHTS_IN, control.resting_cells))
    control.ask("hold_mode", "eval")


def sample_shared(
    engine: InProcessEngine, data: Mapping[str, Any], greedy: bool, site: str, overrides: Mapping[str, Any]
) -> BatchedDataDict:
    """Sample with the policy's weights, wherever a scope or a legacy call has them on the device.

    Raises:
        ModeError: They are away; the message names the missing legacy call and the scope.
    """
    control = engine.policy._control  # noqa: SLF001 (two faces of one policy)
    options = {**overrides, **({"temperature": 0.0} if greedy else {})}
    with control.lock:
        if not control.frames and control.mode is not Mode.GENERATION:
            if control.ask("away", (Component.PARAMS, Component.BUFFERS)):
                raise ModeError(
                    f"{control.label}: generate() at {site} needs PARAMS on the device, but they are away",
                    (*control.explain()[1], "the legacy call that was not made: prepare_for_generation()"),
                    "policy_generation.prepare_for_generation()  # before; or: with policy.generation_mode() as p: p.generate()",
                )
            control.switch(Mode.GENERATION, "generate()", site, cells=still_freed(AS_IT_IS, control.resting_cells))
            control.ask("hold_mode", "eval")
        return BatchedDataDict(engine.generate(data, **options))
