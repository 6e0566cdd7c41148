"""What holds for every test: one thread a process, and tests marked ``gpu`` only where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from rl_session.audit.check import assert_log_is_consistent

# Before torch is imported; `make test` runs several processes. Set, it reaches the processes that tests start too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Timing never decides a test: machines are shared.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only here: tests of the pure modules need not wait for it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _every_log_is_consistent(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test makes a session write must replay without a contradiction (tests of the audit plant their own)."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is None or "audit" in request.path.parts:
        return
    for path in sorted(folder.glob("*.jsonl")):
        if ":" in path.name:  # a rank's, or another process's: read with the driver's
            continue
        assert_log_is_consistent(path, finished=False)
