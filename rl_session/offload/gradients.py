"""Which gradients are disposable: those that an optimizer step has consumed, and nothing else.

After every optimizer step each gradient it could see is stamped with its identity and version. A gradient without a
matching stamp is *live*: it belongs to a step somebody has not finished, whoever made it. Knows nothing of placements.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from rl_session.offload.tensors import library_access, plain_tensors

__all__ = ["GradientStamps"]


class GradientStamps:
    """Identity and version of every gradient that an optimizer step consumed."""

    def __init__(self) -> None:
        self._stamps: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def consume(self, gradients: Iterable[Tensor]) -> None:
        """Stamp gradients as consumed: by an optimizer step, or because they were dropped."""
        with library_access():
            self._stamps = {key: stamp for key, stamp in self._stamps.items() if stamp[0]() is not None}
            # Of a sharded gradient the shard is stamped: FSDP accumulates into it, and bumps no version but its own.
            plain = [inner for gradient in gradients for inner in plain_tensors(gradient)]
            self._stamps.update(
                {id(grad): (weakref.ref(grad), grad._version) for grad in plain if not grad.is_inference()}
            )

    def is_live(self, gradient: Tensor) -> bool:
        """Whether nobody has consumed ``gradient``, a plain tensor, since it was last written."""
        stamp = self._stamps.get(id(gradient))
        if stamp is None or stamp[0]() is not gradient:
            return True
        with library_access():
            return gradient._version != stamp[1]
