"""The benchmark of transitions over ranks runs, small and short, and re-entering a mode sends nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ray import cloudpickle
from scripts import load_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ranks.py"


@pytest.mark.usefixtures("cluster")
def test_the_benchmark_runs_and_the_lease_holder_sends_nothing(tmp_path: Path) -> None:
    module = load_script("benchmarks/ranks.py")
    sys.modules[module.__name__] = module  # to be pickled by value, a module has to be registered
    cloudpickle.register_pickle_by_value(module)
    try:
        module.main(["--smoke", "--ranks", "2", "--json", str(tmp_path / "numbers.json")])
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[module.__name__]
    (row,) = json.loads((tmp_path / "numbers.json").read_text())["ranks"]
    assert row["ranks"] == 2
    assert row["messages, mode in effect"] == 0
    assert row["messages, in and out"] == 4, "one round in, one round out"
    assert row["transition us"] > 0
