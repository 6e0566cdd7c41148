"""How fast bytes go out and come back here: a few copies of one block, best of several.

The best counts, not the mean: what else the machine does can only make a copy slower. Knows nothing of what the numbers mean.
CUDA paths are written against torch's public API and have not been run yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rl_session.doctor.verdict import Copies

__all__ = ["measure_copies"]

_NBYTES = 64 * 2**20
"""Far more than a cache holds, little enough to be done in a second on anything."""
_REPEATS = 5


def measure_copies(where: str, nbytes: int = _NBYTES, repeats: int = _REPEATS) -> Copies:
    """Time copies between ``where`` and the host.

    Args:
        where: "cpu", or a CUDA device such as "cuda:0".
        nbytes: Bytes of the block.
        repeats: How often each copy is made; the fastest counts.
    """
    import torch

    device = torch.empty(nbytes, dtype=torch.uint8, device=where).fill_(1)
    host = torch.empty(nbytes, dtype=torch.uint8).fill_(1)  # filled: fresh pages would be paid for in the first copy
    is_cuda = device.is_cuda

    def rate(copy: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(repeats):
            if is_cuda:
                torch.cuda.synchronize(device.device)
            start = time.perf_counter()
            copy()
            if is_cuda:
                torch.cuda.synchronize(device.device)
            best = min(best, time.perf_counter() - start)
        return nbytes / best

    pinned, pin_error = _pinned(nbytes) if is_cuda else (None, "")
    return Copies(
        where=where,
        pinned_out=None if pinned is None else rate(lambda: pinned.copy_(device, non_blocking=True)),
        pinned_in=None if pinned is None else rate(lambda: device.copy_(pinned, non_blocking=True)),
        pageable_out=rate(lambda: host.copy_(device)),
        pageable_in=rate(lambda: device.copy_(host)),
        fresh_out=rate(lambda: torch.empty(nbytes, dtype=torch.uint8).copy_(device)),
        pin_error=pin_error,
    )


def _pinned(nbytes: int) -> tuple[Any, str]:
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1), ""
    except RuntimeError as error:
        return None, str(error).splitlines()[0]
