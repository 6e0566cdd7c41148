"""The bytes benchmark runs, no run beats the bound, and its own checks can fail."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from bytes_moved import runs, scoped
from bytes_moved.phases import TRACES, capacity_of
from bytes_moved.runs import Case, measure, run_legacy, run_scoped
from bytes_moved.sizes import SCALE, sizes_of
from scripts import load_script

import rl_session as rs
from rl_session.testing import EmulatedDevice

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GRPO = Case("grpo", "8b", "megatron", 8, "roomy")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/bytes.py")


def test_the_smoke_run_meets_the_aims_and_never_beats_the_bound(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = benchmark.main(["--smoke", "--json", str(tmp_path / "bytes.json")])
    assert {row.case.trace for row in rows} == {"grpo", "ppo", "dpo"}
    for row in rows:
        for count in (row.eager, row.lazy, *([row.lazy_own] if row.lazy_own else [])):
            assert count.fits
            assert count.nbytes >= row.least >= row.least_by_storage
        assert row.lazy.nbytes <= row.legacy.nbytes
        if row.case.trace in benchmark.AIMS:
            assert row.best_lazy.nbytes <= benchmark.AIMS[row.case.trace] * row.legacy.nbytes
    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    for line in benchmark.markdown(rows).splitlines():
        assert line in page  # what the page says is what is measured
    printed = capsys.readouterr().out
    assert "lazy above legacy: in no row" in printed
    assert "missed" not in printed
    written = json.loads((tmp_path / "bytes.json").read_text())
    assert [each["trace"] for each in written["bytes"]] == [row.case.trace for row in rows]
    assert written["bytes"][0]["legacy"]["nbytes"] == rows[0].legacy.nbytes


def test_nothing_moves_where_everything_fits(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    assert run_scoped(GRPO, "lazy", own_reference=True, log=log).nbytes == 0
    assert run_legacy(GRPO).nbytes > 0
    moved = [r for r in rs.read_audit(log) if r.name == "component.moved" and not r.event.elided and r.step]
    assert not [record for record in moved if record.step > 1]


def test_counts_are_those_of_one_gpu() -> None:
    """A GRPO step by hand, of the Megatron recipe: the optimizer both ways, the weights both ways, three for the reference."""
    sizes = sizes_of("8b", "megatron", 8)
    by_hand = 2 * sizes.optimizer + 2 * sizes.params + 3 * sizes.params
    assert run_legacy(GRPO).nbytes == by_hand * SCALE
    assert run_legacy(GRPO).engine_nbytes == 2 * sizes.engine_weights * SCALE
    assert sizes.params * SCALE == pytest.approx(8.03e9 * 2 / 8, rel=1e-3)
    assert sizes.optimizer == 6 * sizes.params == 6 * sizes.grads


def test_a_log_that_claims_other_bytes_than_were_counted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    count = EmulatedDevice._count

    def generous(self: EmulatedDevice, operation: str, num_copies: int, nbytes: int) -> None:
        count(self, operation, num_copies, nbytes + 1)  # type: ignore[arg-type]

    monkeypatch.setattr(EmulatedDevice, "_count", generous)
    with pytest.raises(AssertionError, match="records claim"):
        run_scoped(GRPO, "eager")


def test_losses_that_depend_on_the_release_policy_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    step = scoped.LOOPS["grpo"]

    def peeking(tenants: scoped.Tenants) -> None:
        step(tenants)
        if tenants.session._run.release == "lazy":
            tenants.losses[-1] = tenants.losses[-1] + 1

    monkeypatch.setitem(scoped.LOOPS, "grpo", peeking)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="other losses"):
        measure(GRPO)


@pytest.mark.parametrize("trace", ["sft", "grpo-async", "grpo-async-megatron"])
def test_every_kind_of_loop_runs_on_the_smallest_device(trace: str) -> None:
    row = measure(Case(trace, "8b", "dtensor", 8, "tight"))
    assert row.lazy.nbytes <= row.legacy.nbytes
    assert row.best_lazy.nbytes >= row.least
    assert runs.capacity_of(TRACES[trace], sizes_of("8b", "dtensor", 8), "tight") * SCALE == row.capacity


@pytest.mark.parametrize("name", list(TRACES))
def test_every_loop_is_there_three_times(name: str) -> None:
    assert name in scoped.LOOPS
    assert name in runs.legacy_loops.LOOPS
    sizes = sizes_of("30b-moe", "megatron", 8)
    assert capacity_of(TRACES[name], sizes, "tight") <= capacity_of(TRACES[name], sizes, "roomy")
