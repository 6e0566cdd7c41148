"""Every block of migration/README.md: commands run, what is shown after a migration is what the codemod leaves, all code runs."""

from __future__ import annotations

import re
import shutil
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from tiny_legacy import Actors, policy_loss

from loops.support import Timer, make_train_data, prompts_of
from rl_session.cli import _app
from rl_session_migrate.codemod.rewrite import rewrite
from rl_session_migrate.settings import read_settings

GUIDE = Path(__file__).parents[2] / "migration" / "README.md"
BLOCKS = re.findall(
    r"^```(\w+)(?: (\w+))?\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
)
BEFORE = [text for _, kind, text in BLOCKS if kind == "before"]
AFTER = [text for _, kind, text in BLOCKS if kind == "after"]


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    assert {(language, kind) for language, kind, _ in BLOCKS} == {
        ("sh", ""),
        ("python", "before"),
        ("python", "after"),
        ("python", ""),
        ("toml", ""),
    }
    assert len(BEFORE) == len(AFTER) >= 5


@pytest.mark.parametrize("number", range(len(BEFORE)))
def test_what_is_shown_is_what_the_codemod_leaves(number: int) -> None:
    assert rewrite(BEFORE[number].encode()).after.decode() == AFTER[number]
    assert rewrite(AFTER[number].encode()).after.decode() == AFTER[number]


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GUIDE.parent / "loops" / "legacy", tmp_path / "loops")
    monkeypatch.chdir(tmp_path)
    commands = [line for language, _, text in BLOCKS if language == "sh" for line in text.splitlines()]
    assert len(commands) == 3
    for command in commands:
        assert command.startswith("rl-session ")
        assert CliRunner().invoke(_app, command.split()[1:]).exit_code == 0
    assert (tmp_path / "report.json").is_file()
    for scoped in (GUIDE.parent / "loops" / "scoped").glob("*.py"):
        assert (tmp_path / "loops" / scoped.name).read_bytes() == scoped.read_bytes()


def call(name: str, function: Any, actors: Actors, others: dict[str, Any]) -> Any:
    """Call a function of the guide with what its parameters name."""
    batch = make_train_data({**prompts_of(1, 4), "prompt_lengths": prompts_of(1, 4)["input_lengths"] * 0, **_EXTRA})
    given = {
        "policy": actors.policy,
        "value_model": actors.value,
        "policy_generation": actors.generation,
        "batch": batch,
        "prompts": prompts_of(1, 4),
        "loss_fn": lambda logprobs, data: policy_loss(logprobs, {"token_mask": data["token_mask"]}),
        "timer": Timer(),
        "stale": True,
        "colocated": True,
        "pool": others["pool"],
    }
    del name
    code = function.__code__
    return function(*(given[parameter] for parameter in code.co_varnames[: code.co_argcount]))


_EXTRA: dict[str, Any] = {"generation_logprobs": None}


@pytest.mark.parametrize("number", range(len(BEFORE)))
def test_both_sides_run_and_give_the_same(number: int) -> None:
    results = []
    with ThreadPoolExecutor(1) as pool:
        for text in (BEFORE[number], AFTER[number]):
            actors = Actors()
            actors.policy.offload_to_cpu()
            actors.value.finish_training()
            actors.generation.weights = actors.policy.table.weights.detach()
            push = "def refit_policy_generation" not in text
            names: dict[str, Any] = {"refit_policy_generation": _push} if push else {}
            exec(text, names)  # noqa: S102
            name = re.findall(r"^def (\w+)", text, flags=re.MULTILINE)[0]
            if name == "refit_policy_generation":
                actors.policy.prepare_for_lp_inference()
            results.append(call(name, names[name], actors, {"pool": pool}))
    assert repr(results[0]) == repr(results[1])


def _push(policy: Any, generation: Any, colocated: bool) -> None:
    del colocated
    policy.prepare_for_lp_inference()
    policy.offload_before_refit()
    generation.prepare_for_generation(tags=["weights"])
    policy.stream_weights_via_ipc_zmq(buffer_size_bytes=1)
    generation.update_weights_via_ipc_zmq()
    policy.offload_after_refit()
    generation.prepare_for_generation(tags=["kv_cache"])


def test_what_is_to_do_by_hand_runs() -> None:
    actors = Actors(critic=False)
    chunks = [{**prompts_of(step, 4), "token_mask": prompts_of(step, 4)["input_ids"] * 0 + 1.0} for step in (1, 2)]
    with ThreadPoolExecutor(1) as pool:
        names: dict[str, Any] = {
            "policy": actors.policy,
            "chunks": chunks,
            "batch": chunks[0],
            "loss_fn": policy_loss,
            "pool": pool,
        }
        for language, kind, text in BLOCKS:
            if (language, kind) == ("python", ""):
                exec(text, names)  # noqa: S102
    assert len(names["result"]["loss"]) == 1
    assert len(names["future"].result()["loss"]) == 1


def test_the_configuration_is_read(tmp_path: Path) -> None:
    (text,) = (text for language, _, text in BLOCKS if language == "toml")
    table = tomllib.loads(text)["tool"]["rl-session"]["migrate"]
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    read = read_settings(tmp_path)
    told = {**attrs.asdict(read.names), "exclude": read.exclude}
    assert set(table) <= set(told)
    assert all(set(told[key]) == set(values) for key, values in table.items()), "each key has its effect"
