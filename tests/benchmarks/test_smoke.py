"""Every benchmark runs, small and short, and writes its numbers; how fast it is decides nothing here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HERE = {
    "engine": ["--shapes", "1gib-in-16mib", "64mib-in-1kib", "--repeats", "1"],
    "scope": ["--repeats", "1"],
    "training": [],
    "audit": [],
    "codemod": ["--jobs", "1"],
    "startup": [],
    "gpu": ["--device", "cpu", "--shapes", "1gib-in-256kib"],
}
"""Options of each, beside ``--smoke``. The bytes have tests of their own, and ranks are tested where Ray is."""


def numbers_in(found: Any) -> list[float]:
    """Every number, however deep."""
    if isinstance(found, dict):
        return [number for value in found.values() for number in numbers_in(value)]
    if isinstance(found, list):
        return [number for value in found for number in numbers_in(value)]
    return [float(found)] if isinstance(found, int | float) else []


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("name", HERE)
def test_a_benchmark_runs_and_writes_its_numbers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    load_script(f"benchmarks/{name}.py").main(["--smoke", "--json", str(path), *HERE[name]])
    found = json.loads(path.read_text())
    assert found.pop("machine")["cpus"] >= 1
    assert any(number > 0 for number in numbers_in(found))
    assert "━" in capsys.readouterr().out, "a table"


def test_without_a_gpu_the_gpu_benchmark_says_so_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = load_script("benchmarks/gpu.py")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    gpu.main(["--json", str(tmp_path / "numbers.json")])
    assert "no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "numbers.json").exists()


def test_all_of_them_are_in_the_list_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    everything = load_script("benchmarks/everything.py")
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {"harness", "everything"}
    assert set(everything.ALL) == scripts
    assert scripts == {*HERE, "bytes", "ranks"}
    with pytest.raises(SystemExit) as end:
        everything.main(["engin"])
    assert end.value.code == 2
    assert "engin" in capsys.readouterr().err


def test_one_that_fails_is_named_and_the_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = load_script("benchmarks/everything.py")
    (tmp_path / "engine.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "scope.py").write_text("import sys; open(sys.argv[2], 'w').write('{\"scope\": 1}')")
    monkeypatch.setattr(everything, "HERE", tmp_path)
    assert everything.main(["engine", "scope", "--json", str(tmp_path / "all.json")]) == 1
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["engine"]["status"] == 3
    assert found["scope"]["scope"] == 1
    assert "script_benchmarks_engine" not in sys.modules
