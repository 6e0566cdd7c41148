"""What holds for every test: one thread a process, and tests marked ``gpu`` only where there is one."""

from __future__ import annotations

import os

import pytest

# Before torch is imported; `make test` runs several processes. Set, it reaches the processes that tests start too.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only here: tests of the pure modules need not wait for it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
