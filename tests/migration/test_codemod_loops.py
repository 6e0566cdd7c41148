"""The loops of the repository: what the codemod leaves of them is what is checked in, and does what the legacy ones do."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from tiny_legacy import Actors, policy_loss, value_loss

from loops.support import Checkpointer, Config, Timer
from rl_session_migrate.codemod.batch import migrate_files
from rl_session_migrate.codemod.report import totals

LOOPS = Path(__file__).parents[2] / "migration" / "loops"
LEGACY = sorted((LOOPS / "legacy").glob("*.py"))
NAMES = [path.stem for path in LEGACY if path.stem != "__init__"]


def run(flavour: str, name: str, actors: Actors, config: Config, folder: Path) -> tuple[list[Any], list[str]]:
    """Run a loop; returns what it measured and the blocks it timed."""
    module = importlib.import_module(f"loops.{flavour}.{name}")
    timer = Timer()
    given = {
        "policy": actors.policy,
        "value_model": actors.value,
        "policy_generation": actors.generation,
        "loss_fn": policy_loss,
        "value_loss_fn": value_loss,
        "config": config,
        "checkpointer": Checkpointer(folder),
        "timer": timer,
    }
    if name == "ppo":
        module.setup(actors.policy, actors.value, actors.generation, config)
    train = getattr(module, f"{name}_train")
    result = train(**{key: given[key] for key in inspect.signature(train).parameters})
    return asyncio.run(result) if inspect.iscoroutine(result) else result, timer.keys


def test_no_loop_is_missing() -> None:
    assert NAMES == ["dpo", "grpo", "ppo", "sft", "streaming"]
    assert sorted(path.name for path in (LOOPS / "scoped").glob("*.py")) == [path.name for path in LEGACY]


def test_the_scoped_loops_are_what_the_codemod_leaves() -> None:
    results = migrate_files(LEGACY)
    for result in results:
        assert result.error == ""
        assert result.result is not None
        scoped = LOOPS / "scoped" / result.path.name
        assert scoped.read_bytes() == result.result.after, f"{scoped} is not what the codemod leaves: run make loops"


def test_every_site_is_rewritten_or_explained_and_hardly_any_stays() -> None:
    results = migrate_files(LEGACY)
    counted = totals(results)
    assert counted.trainers.found >= 40
    assert counted.trainers.share >= 0.95
    assert counted.engines.share == 1
    left = [o for r in results if r.result is not None for o in r.result.outcomes if o.status == "left"]
    assert all(outcome.why and outcome.advice for outcome in left)


def test_migrating_the_scoped_loops_again_changes_nothing() -> None:
    for result in migrate_files(sorted((LOOPS / "scoped").glob("*.py"))):
        assert result.result is not None
        assert not result.result.changed


CASES = [
    {},
    {"val_at_start": False},
    {"colocated": False},
    {"use_dynamic_sampling": True},
    {"skip_prev_logprobs": True, "skip_reference_logprobs": True},
    {"skip_reference_logprobs": True},
    {"calibrate": True},
    {"policy_training_start_step": 2},
    {"ppo_epochs": 3, "save_period": 1, "val_period": 1},
    {"val_period": 0, "save_period": 100, "num_steps": 4},
    {"stop_at_validation": 0.0},
]


@pytest.mark.parametrize("backend", ["megatron", "dtensor_v2"])
@pytest.mark.parametrize("case", CASES, ids=[",".join(case) or "default" for case in CASES])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "streaming"])
def test_a_scoped_loop_measures_bit_for_bit_what_the_legacy_one_does(
    name: str, case: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    config = Config(**case)
    flags = {"offload_optimizer_for_logprob": True} if case.get("calibrate") else {}
    legacy, scoped = (
        Actors(backend, colocated=config.colocated, critic=name == "ppo", **flags) for _ in ("legacy", "scoped")
    )
    expected = run("legacy", name, legacy, config, tmp_path / "legacy")
    found = run("scoped", name, scoped, config, tmp_path / "scoped")
    assert found == expected
    assert any("loss" in entry for entry in found[0]) or config.stop_at_validation is not None
    assert scoped.generation.num_pushes == legacy.generation.num_pushes
    assert len(scoped.lifecycle()) <= len(legacy.lifecycle()) + 4  # where everything is has to be found out once
    files = [
        sorted(p.relative_to(tmp_path / f) for p in (tmp_path / f).rglob("*") if p.is_file())
        for f in ("legacy", "scoped")
    ]
    assert files[0] == files[1]
    for file in files[0]:
        assert (tmp_path / "scoped" / file).read_bytes() == (tmp_path / "legacy" / file).read_bytes()


def test_a_step_that_stays_open_trains_the_same(tmp_path: Path) -> None:
    """Only Megatron splits its steps."""
    config = Config(num_steps=4)
    legacy, scoped = Actors(critic=False), Actors(critic=False)
    expected = run("legacy", "streaming", legacy, config, tmp_path / "legacy")
    assert run("scoped", "streaming", scoped, config, tmp_path / "scoped") == expected
    assert len(expected[0]) == 4
